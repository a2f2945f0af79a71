// Embedding columns of a recommender, all in one call: numbers are made of raw features, looked up, pooled, and written
// where the concatenation has them. A column is a row of int64 (gnomon/compiler/kernels/columns.py, `Column.row`), so the same
// compiled text serves any number of columns. Sums of bags are floats; of a bfloat16 table they are rounded once.
#include "vector.h"
#include "memory.h"

namespace {

enum { COPY, LOOKUP };
enum { INT64, INT32, FLOAT32, BFLOAT16 };
enum { ONE, SUM, MEAN };
enum { REMAINDER, MULTIPLY, ADD, LEAST, MOST, AND, XOR };

struct Column {
    int64_t kind, table, rows, dim;         // of a copy: dim is its width
    int64_t ids, layout, first[3];          // argument, its sizes and strides, position of the first number
    int64_t row_dim, inner_dim, dtype;      // inner_dim -1: one number a row
    int64_t pool, offsets;                  // offsets -1: every bag has the inner dim's numbers
    int64_t code, length;                   // the number's arithmetic: pairs (operation, operand)
    int64_t boundaries, count, right;       // boundaries -1: the number is whole already
    int64_t target;                         // first float of a row of the output
};

struct Call {
    const int64_t* code;
    void* const* args;
    const int64_t* layouts;                 // [layout][size 0 1 2, stride 0 1 2]
    S* out;
    int64_t batch, width;
};

constexpr int ROWS = 16, BLOCK = 512, PART = 8, TOGETHER = 4;
constexpr int64_t AHEAD = 3;                // tiles of rows that are asked for before they are read
constexpr int MOST_NUMBERS = 512;           // of a tile of rows: their table rows are asked for before one is read

// For each x the count of boundaries below it (or not above it, where right): no branch, so that lanes go together. A
// number that is none lies beyond all boundaries, as in torch.bucketize.
template <bool right, class T>
void buckets(const float* x, int64_t n, const T* boundaries, int64_t count, int64_t* out) {
    const auto at = [&](int64_t i) { return one(boundaries[i]); };
    for (int64_t start = 0; start < n; start += ROWS) {
        const int lanes = (int)(n - start < ROWS ? n - start : ROWS);
        float v[ROWS];
        int32_t low[ROWS];
        for (int l = 0; l < ROWS; l++) v[l] = x[start + (l < lanes ? l : 0)], low[l] = 0;
        int64_t left = count;  // the answer is one of low .. low + left
        for (; left > 1; left -= left / 2) {
            const int32_t half = (int32_t)(left / 2);
#pragma omp simd
            for (int l = 0; l < ROWS; l++) {
                const float b = at(low[l] + half - 1);
                low[l] += (right ? !(v[l] < b) : !(v[l] <= b)) ? half : 0;
            }
        }
        for (int l = 0; left && l < ROWS; l++) low[l] += right ? !(v[l] < at(low[l])) : !(v[l] <= at(low[l]));
        for (int l = 0; l < lanes; l++) out[start + l] = low[l];
    }
}

void arithmetic(int64_t* v, int64_t n, const int64_t* code, int64_t length) {
    for (int64_t i = 0; i < length; i++) {
        const int64_t operand = code[2 * i + 1];
        switch (code[2 * i]) {
            case REMAINDER:
                for (int64_t k = 0; k < n; k++) {
                    const int64_t r = v[k] % operand;
                    v[k] = r && ((r < 0) != (operand < 0)) ? r + operand : r;
                }
                break;
            case MULTIPLY: for (int64_t k = 0; k < n; k++) v[k] = (int64_t)((uint64_t)v[k] * (uint64_t)operand); break;
            case ADD: for (int64_t k = 0; k < n; k++) v[k] = (int64_t)((uint64_t)v[k] + (uint64_t)operand); break;
            case LEAST: for (int64_t k = 0; k < n; k++) v[k] = v[k] < operand ? operand : v[k]; break;
            case MOST: for (int64_t k = 0; k < n; k++) v[k] = v[k] > operand ? operand : v[k]; break;
            case AND: for (int64_t k = 0; k < n; k++) v[k] &= operand; break;
            default: for (int64_t k = 0; k < n; k++) v[k] ^= operand; break;
        }
    }
}

// The sum of rows of a table, or their mean: V vectors of it at a time stay in registers.
template <int V>
ALWAYS void pooled(const S* table, const int64_t* chosen, int64_t many, int64_t dim, bool mean, S* y, int n) {
    F sum[V] = {};
    for (int64_t k = 0; k < many; k++) {
        const S* x = table + chosen[k] * dim;
        for (int v = 0; v < V; v++) sum[v] = sum[v] + (n == VW ? ld(x + v * VW) : ld(x, n));
    }
    for (int v = 0; v < V; v++) {
        if (mean && many) sum[v] = sum[v] / (float)many;
        if (n == VW) st(y + v * VW, sum[v]);
        else st(y, sum[v], n);
    }
}

void bag(const S* table, const int64_t* chosen, int64_t many, int64_t dim, bool mean, S* y) {
    int64_t j = 0;
    for (; j + TOGETHER * VW <= dim; j += TOGETHER * VW) pooled<TOGETHER>(table + j, chosen, many, dim, mean, y + j, VW);
    for (; j + VW <= dim; j += VW) pooled<1>(table + j, chosen, many, dim, mean, y + j, VW);
    if (j < dim) pooled<1>(table + j, chosen, many, dim, mean, y + j, (int)(dim - j));
}

ALWAYS void ask_for(const S* row, int64_t dim) {
    for (int64_t byte = 0; byte < dim * (int64_t)sizeof(S) && byte < 256; byte += 64) ask((const char*)row + byte);
}

// Asks for the table rows of a column of plain numbers, some tiles before they are copied.
void ask_ahead(const Call& call, const Column& c, int64_t from, int64_t to) {
    if (c.kind == COPY || c.pool != ONE || c.dtype != INT64 || c.offsets >= 0 || c.inner_dim >= 0 || c.boundaries >= 0 || c.length) return;
    const int64_t* strides = call.layouts + 6 * c.layout + 3;
    const int64_t first = c.first[0] * strides[0] + c.first[1] * strides[1] + c.first[2] * strides[2];
    const int64_t* ids = (const int64_t*)call.args[c.ids] + first;
    for (int64_t row = from; row < to; row++) {
        const int64_t chosen = ids[row * strides[c.row_dim]];
        if ((uint64_t)chosen < (uint64_t)c.rows) ask_for((const S*)call.args[c.table] + chosen * c.dim, c.dim);
    }
}

ALWAYS void copied(const S* x, int64_t dim, S* y) {
    const int64_t bytes = dim * (int64_t)sizeof(S);
    int64_t b = 0;
    for (; b + 64 <= bytes; b += 64) memcpy((char*)y + b, (const char*)x + b, 64);
    if (b < bytes) memcpy((char*)y + b, (const char*)x + b, (size_t)(bytes - b));
}

// Rows `from` to `to` of one column; whether a number was outside the table.
bool column(const Call& call, const Column& c, int64_t from, int64_t to) {
    const int64_t* layout = call.layouts + 6 * c.layout;
    const int64_t* strides = layout + 3;
    const int64_t first = c.first[0] * strides[0] + c.first[1] * strides[1] + c.first[2] * strides[2];
    const int64_t by_row = strides[c.row_dim], inner = c.inner_dim < 0 ? 0 : strides[c.inner_dim];
    const void* base = call.args[c.ids];
    const int64_t dim = c.dim;
    if (c.kind == COPY) {
        for (int64_t row = from; row < to; row++) {
            const S* x = (const S*)base + first + row * by_row;
            S* y = call.out + row * call.width + c.target;
            for (int64_t j = 0; j < dim; j++) y[j] = x[j * inner];
        }
        return false;
    }
    const S* table = (const S*)call.args[c.table];
    const int64_t* offsets = c.offsets < 0 ? nullptr : (const int64_t*)call.args[c.offsets];
    const int64_t fixed = c.inner_dim < 0 ? 1 : layout[c.inner_dim];
    int64_t chosen[MOST_NUMBERS];
    float raw[MOST_NUMBERS];
    for (int64_t row = from; row < to;) {
        int64_t ends[ROWS], count = 0, last = row;
        for (; last < to; last++) {  // as many rows as their numbers fit
            int64_t begin = last * by_row, many = fixed, step = inner;
            if (offsets) {
                begin = offsets[last];
                many = (last + 1 < call.batch ? offsets[last + 1] : layout[0]) - begin;
                if (begin < 0 || many < 0 || begin + many > layout[0]) return true;
                begin *= strides[0], step = strides[0];
            }
            if (count + many > MOST_NUMBERS) break;
            begin += first;
            if (c.dtype == FLOAT32) {
                for (int64_t k = 0; k < many; k++) raw[count + k] = ((const float*)base)[begin + k * step];
            } else if (c.dtype == BFLOAT16) {
                for (int64_t k = 0; k < many; k++) raw[count + k] = one(((const bf16*)base)[begin + k * step]);
            } else if (c.dtype == INT32) {
                for (int64_t k = 0; k < many; k++) chosen[count + k] = ((const int32_t*)base)[begin + k * step];
            } else {
                for (int64_t k = 0; k < many; k++) chosen[count + k] = ((const int64_t*)base)[begin + k * step];
            }
            count += many;
            ends[last - row] = count;
        }
        if (last == row) return true;  // a bag that does not fit: ATen's
        if (c.boundaries >= 0) {
            const void* at = call.args[c.boundaries];
            const auto found = [&](auto* of) {
                c.right ? buckets<true>(raw, count, of, c.count, chosen) : buckets<false>(raw, count, of, c.count, chosen);
            };
            c.dtype == FLOAT32 ? found((const float*)at) : found((const bf16*)at);
        }
        arithmetic(chosen, count, call.code + 2 * c.code, c.length);
        bool outside = false;
        for (int64_t k = 0; k < count; k++) outside |= (uint64_t)chosen[k] >= (uint64_t)c.rows;
        if (outside) return true;
        for (int64_t k = 0; k < count; k++) ask_for(table + chosen[k] * dim, dim);
        int64_t at = 0;
        for (int64_t i = 0; i < last - row; i++) {
            S* y = call.out + (row + i) * call.width + c.target;
            const int64_t end = ends[i];
            if (c.pool == ONE) {
                copied(table + chosen[at] * dim, dim, y);
            } else {
                bag(table, chosen + at, end - at, dim, c.pool == MEAN, y);
            }
            at = end;
        }
        row = last;
    }
    return false;
}

}  // namespace

extern "C" int gnomon_kernel(const int64_t* table, int64_t columns, const int64_t* code, void* const* args,
                             const int64_t* layouts, S* out, int64_t batch, int64_t width, int64_t parallel) {
    const Call call = {code, args, layouts, out, batch, width};
    const Column* all = (const Column*)table;
    // One column goes through many rows before the next, so that what it reads of its table stays in the cache.
    const int64_t blocks = (batch + BLOCK - 1) / BLOCK, parts = (columns + PART - 1) / PART;
    int bad = 0;
#pragma omp parallel for collapse(2) schedule(static) reduction(| : bad) if (parallel)
    for (int64_t block = 0; block < blocks; block++) {
        for (int64_t part = 0; part < parts; part++) {
            const int64_t from = block * BLOCK, to = from + BLOCK < batch ? from + BLOCK : batch;
            const int64_t first = part * PART, end = first + PART < columns ? first + PART : columns;
            const int64_t tiles = (to - from + ROWS - 1) / ROWS, all_tiles = (end - first) * tiles;
            for (int64_t t = -AHEAD; t < all_tiles; t++) {
                const int64_t next = t + AHEAD, row = from + t % tiles * ROWS, asked = from + next % tiles * ROWS;
                if (next < all_tiles) ask_ahead(call, all[first + next / tiles], asked, asked + ROWS < to ? asked + ROWS : to);
                if (t >= 0) bad |= column(call, all[first + t / tiles], row, row + ROWS < to ? row + ROWS : to);
            }
        }
    }
    return bad;
}
