// Products of pairs of rows of two small matrices a sample: out[k] = x[i[k]] . y[:, j[k]]. All pairs of a sample are
// multiplied into the first cache, which is faster than to look each up, and the wanted ones are taken. Of bfloat16 the
// sample is made floats there first, or stays in pairs of numbers that lie beside each other where one instruction
// multiplies and adds these; a product is rounded once. Who has the samples says where they lie: pairs.cpp, table_pairs.cpp.
#pragma once
#include "vector.h"
#include "memory.h"

namespace {

constexpr int ROWS = VW == 16 ? 8 : 4;                 // of a tile, beside two vectors of columns

struct Call {                                          // as PairsCall in pairs.py has them
    int64_t batch, rows, columns, depth, count, before, parallel;
    const S* x; int64_t x_b, x_r, x_d;                 // numbers from one sample, row, place in the row to the next
    const S* y; int64_t y_b, y_d, y_c;
    const int64_t *i; int64_t i_step; const int64_t* j; int64_t j_step;
    const S* first; int64_t first_row;                 // numbers that come before the products in each row of out
    S* out;
};
constexpr bool FLOATS = sizeof(S) == sizeof(float);
#ifdef __AVX512BF16__
constexpr bool PAIRED = !FLOATS;
#else
constexpr bool PAIRED = false;
#endif
constexpr int EACH = PAIRED ? 2 : 1;                   // numbers in a word of 32 bits
struct Side { const char* p; int64_t r, d; };          // a sample's x as words: bytes from one row, one word to the next
ALWAYS int64_t words(const Call& c) { return (c.depth + EACH - 1) / EACH; }

typedef int32_t __attribute__((may_alias)) Word;

// sum + a * the word at x
ALWAYS F added(F sum, F a, const char* x) {
#ifdef __AVX512BF16__
    if (PAIRED) {
        asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(a), "m"(*(const Word*)x));
        return sum;
    }
#endif
    float b;
    memcpy(&b, x, sizeof b);
    return sum + a * b;
}

// The word that begins with place d of numbers `step` apart.
ALWAYS float word(const Call& c, const S* from, int64_t d, int64_t step) {
    if (!PAIRED) return one(from[d * step]);
    S two[2] = {from[d * step], d + 1 < c.depth ? from[(d + 1) * step] : S{}};
    float w;
    memcpy(&w, two, sizeof w);
    return w;
}

template <int R, int V>
ALWAYS void tile(const Call& c, Side x, const float* y, float* to, int64_t wide) {
    F sum[R][V] = {};
    for (int64_t w = 0; w < words(c); w++)
        UNROLLED for (int v = 0; v < V; v++) {
            const F a = ld(y + w * wide + v * VW);
            UNROLLED for (int r = 0; r < R; r++) sum[r][v] = added(sum[r][v], a, x.p + r * x.r + w * x.d);
        }
    UNROLLED for (int r = 0; r < R; r++)
        UNROLLED for (int v = 0; v < V; v++) st(to + r * wide + v * VW, sum[r][v]);
}

// R rows, as far to the right as somebody asks for.
template <int R>
ALWAYS void rows(const Call& c, Side x, const float* y, float* to, int64_t wide, int64_t needed) {
    int64_t column = 0;
    for (; column + VW < needed; column += 2 * VW) tile<R, 2>(c, x, y + column, to + column, wide);
    if (column < needed) tile<R, 1>(c, x, y + column, to + column, wide);
}

// The last rows, fewer than a tile has.
template <int R>
void rest(const Call& c, int count, Side x, const float* y, float* to, int64_t wide, int64_t needed) {
    if constexpr (R > 1)
        if (count < R) return rest<R - 1>(c, count, x, y, to, wide, needed);
    rows<R>(c, x, y, to, wide, needed);
}

ALWAYS F loaded(const S* p) { return PAIRED ? ld((const float*)p) : ld(p); }

// VW columns of y whose numbers lie beside each other, VW words of each, as rows.
ALWAYS void turned(const Call& c, const S* from, int64_t column, float* to, int64_t wide) {
    F v[VW];
    UNROLLED for (int r = 0; r < VW; r++) v[r] = column + r < c.columns ? loaded(from + (column + r) * c.y_c) : F{};
    transpose(v);
    UNROLLED for (int r = 0; r < VW; r++) st(to + r * wide + column, v[r]);
}

void arranged(const Call& c, const S* from, float* y, int64_t wide) {
    int64_t w = 0;
    if (c.y_d == 1) {
        for (; (w + VW) * EACH <= c.depth; w += VW)
            for (int64_t column = 0; column < wide; column += VW) turned(c, from + w * EACH, column, y + w * wide, wide);
    } else if (c.y_c == 1 && !PAIRED) {
        for (; w < c.depth; w++) widen(from + w * c.y_d, y + w * wide, c.columns);
    }
    for (; w < words(c); w++)
        for (int64_t column = 0; column < c.columns; column++) y[w * wide + column] = word(c, from + column * c.y_c, w * EACH, c.y_d);
}

// A sample's x as words: where it lies, or copied.
ALWAYS Side side(const Call& c, int64_t n, float* room) {
    const S* x = c.x + n * c.x_b;
    const int64_t wide = sizeof(float), step = sizeof(S), many = words(c);
    if (FLOATS) return {(const char*)x, c.x_r * step, c.x_d * step};
    if (PAIRED && c.x_d == 1 && c.depth % EACH == 0) return {(const char*)x, c.x_r * step, wide};
    for (int64_t r = 0; r < c.rows; r++) {
        if (c.x_d == 1 && !PAIRED) widen(x + r * c.x_r, room + r * many, c.depth);
        else for (int64_t w = 0; w < many; w++) room[r * many + w] = word(c, x + r * c.x_r, w * EACH, c.x_d);
    }
    return {(const char*)room, many * wide, wide};
}

// Floats that a thread needs: of y, of all products, and of x and the products that are taken, where S is no float; and a
// vector that is read beyond the last.
int64_t floats(const Call& c, int64_t wide) {
    return (words(c) + c.rows) * wide + (FLOATS ? 0 : c.rows * words(c) + c.count) + VW;
}

// Which products are taken: pair k lies at at[k] of all, runs r of pairs that lie beside each other begin at runs[r], and
// each tile of rows needs so many columns.
struct Taken {
    int32_t *needed, *at, *runs;
    int64_t many;
};

// Products of a run are taken by vectors, of which the end is the next run's, which is taken after: half of a matrix below
// its diagonal has as many runs as rows. The last vector would be the next sample's, so it is taken one by one.
ALWAYS void take(const Taken& taken, const float* all, float* to, int64_t count) {
    for (int64_t r = 0; r < taken.many; r++) {
        int64_t k = taken.runs[r];
        const int64_t end = taken.runs[r + 1];
        const float* from = all + taken.at[k];
        for (; end - k > 1 && k + VW <= count; k += VW, from += VW) st(to + k, ld(from));
        for (; k < end; k++) to[k] = *from++;
    }
}

// between: called with the number of each tile of rows before it is multiplied
template <class Between>
ALWAYS void sample(const Call& c, int64_t n, const Taken& taken, float* room, int64_t wide, Between between) {
    float *y = room, *all = y + words(c) * wide, *copied = all + c.rows * wide, *floats = copied + c.rows * words(c);
    const Side x = side(c, n, copied);
    arranged(c, c.y + n * c.y_b, y, wide);
    for (int64_t row = 0; row < c.rows; row += ROWS) {
        const Side some = {x.p + row * x.r, x.r, x.d};
        const int64_t left = c.rows - row;
        between(row / ROWS);
        if (left >= ROWS) rows<ROWS>(c, some, y, all + row * wide, wide, taken.needed[row / ROWS]);
        else rest<ROWS - 1>(c, (int)left, some, y, all + row * wide, wide, taken.needed[row / ROWS]);
    }
    S* out = c.out + n * (c.before + c.count);
    if (c.before) memcpy(out, c.first + n * c.first_row, (size_t)c.before * sizeof(S));
    out += c.before;
    float* to = FLOATS ? (float*)out : floats;
    take(taken, all, to, c.count);
    if (!FLOATS) narrow(floats, out, c.count);
}

// Finds where products lie; 1 where an index is outside, or there is no memory. The caller frees `needed`.
int places(const Call& c, Taken& taken, int64_t wide) {
    const int64_t tiles = c.rows / ROWS + 1;
    taken.needed = (int32_t*)calloc((size_t)(tiles + 2 * c.count + 1), sizeof(int32_t));
    taken.many = 0;
    if (!taken.needed) return 1;
    int32_t *needed = taken.needed, *at = taken.at = needed + tiles;
    taken.runs = at + c.count;
    for (int64_t k = 0; k < c.count; k++) {
        int64_t i = c.i[k * c.i_step], j = c.j[k * c.j_step];
        if (i < -c.rows || i >= c.rows || j < -c.columns || j >= c.columns) return 1;
        i += i < 0 ? c.rows : 0;
        j += j < 0 ? c.columns : 0;
        at[k] = (int32_t)(i * wide + j);
        if (!k || at[k] != at[k - 1] + 1) taken.runs[taken.many++] = (int32_t)k;
        if (j >= needed[i / ROWS]) needed[i / ROWS] = (int32_t)(j + 1);
    }
    taken.runs[taken.many] = (int32_t)c.count;
    return 0;
}

}  // namespace
