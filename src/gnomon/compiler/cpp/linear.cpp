// A linear layer, or a convolution of one pixel (gnomon/compiler/linear.py): out[m, n] = after(sum over k of x[m, k] w[n, k]
// + bias[n]), after: batch norm, a sum, ReLU, or what ENDED says of each number. Weights are read as they lie: a panel of
// VECTORS of them is turned in cache, so that a tile of TILE rows has its sums in registers along all k. Either side may also
// lie turned, as in a layer's backward. With NORMED, rows are normed as they are copied, so that no norm goes to memory.
#include "vector.h"
#include <omp.h>

namespace {

#ifndef TILE                                           // as matmul_tile.py constructs it for a size and a device
#define TILE (VW == 16 ? 14 : VW == 8 ? 6 : 4)
#define VECTORS 2
#endif
#ifndef ENDED
#define ENDED(v) v
#endif
#ifdef NORMED
constexpr bool NORMS = true;
#else
constexpr bool NORMS = false;
#endif
constexpr int ROWS = TILE, V = VECTORS;
constexpr int64_t WIDE = V * VW, TURNED = 1 << 19;     // TURNED: bytes of weights that are turned at once, for L2
constexpr int64_t AHEAD = (ROWS + VW - 1) / VW * VW;   // rows of x that lie beside each other, where they are copied so
constexpr int64_t LINE = 16;                           // floats of a line of memory
constexpr int64_t TOGETHER = 2048;                     // rows that are this far apart fall on few places of the first cache

struct Call {                                          // as LinearCall in linear.py has them 
    int64_t m, n, k, relu, threads;                    // threads: 0 for all
    const float* x; int64_t across, x_row, x_down;     // of m rows `across` are x_row apart, then x_down to the next
    int64_t x_k;                                       // from one k to the next; 1, or x_row is
    const float* w; int64_t w_n, w_k;                  // one of them 1
    const float* bias;                                 // or null
    const float *gamma, *beta, *mean, *variance; double eps;   // or null
    const float* added;                                // (m, n), or null; may be out
    float* out;
    const float *norm_gamma, *norm_beta; double norm_eps;      // of the rows of x, or null
    int* refused;                                      // set where a row's norm is not finite, which ATen has its own way with
};

ALWAYS const float* row(const Call& c, int64_t m) { return c.x + m / c.across * c.x_down + m % c.across * c.x_row; }

// What the batch norm multiplies and adds, with the bias.
void factors(const Call& c, float* scale, float* shift) {
    for (int64_t n = 0; n < c.n; n++) {
        scale[n] = c.gamma ? c.gamma[n] / __builtin_sqrtf(c.variance[n] + (float)c.eps) : 1.0f;
        shift[n] = (c.gamma ? c.beta[n] - c.mean[n] * scale[n] : 0.0f) + (c.bias ? c.bias[n] * scale[n] : 0.0f);
    }
}

// Writes the sums of `rows` rows from m: V vectors of outputs from n each.
void put(const Call& c, const F (*sums)[V], int64_t rows, const float* after, int64_t m, int64_t n) {
    for (int half = 0; half < V && n + half * VW < c.n; half++) {
        const int64_t at = n + half * VW, left = c.n - at;
        const F scale = ld(after + at), shift = ld(after + c.n + WIDE + at);
        float* out = c.out + m * c.n + at;
        const float* added = (c.added ? c.added : c.out) + m * c.n + at;
        for (int64_t r = 0; r < rows; r++, out += c.n, added += c.n) {
            F v = sums[r][half] * scale + shift;
            if (c.added) v = v + (left >= VW ? ld(added) : ld(added, (int)left));
            if (c.relu) v = maxi(v, F{});
            v = ENDED(v);
            if (left >= VW) st(out, v);
            else st(out, v, (int)left);
        }
    }
}

// Weights that the next panel is made of, which are asked for while a tile of this panel is computed: for every line of k
// `count` places of them `step` apart, the first k times `along` from w.
struct Next { const float* w; int64_t count, step, along; };

// R rows from m by a panel: WIDE outputs from n, as (k, WIDE).
template <int R, bool ALONG>                            // ALONG: x has the rows of each k beside each other, AHEAD apart from k to k
ALWAYS void tile(
    const Call& c, const float* x, int64_t x_row, const float* panel, const float* after, int64_t m, int64_t n, Next next
) {
    F sum[R][V] = {};
    const float* ends = c.added && c.added != c.out ? c.added : nullptr;
    for (int64_t r = 0; r < R; r++) {                  // what is read and written at the end
        const int64_t at = (m + r) * c.n + n;
        for (int64_t line = 0; line < WIDE; line += LINE) __builtin_prefetch(c.out + at + line, 1);
        if (ends)
            for (int64_t line = 0; line < WIDE; line += LINE) __builtin_prefetch(ends + at + line);
    }
    for (int64_t from = 0; from < c.k; from += LINE) {
        for (int64_t i = 0; i < next.count; i++) {
            const float* w = next.w + i * next.step + from * next.along;
            __builtin_prefetch(w);
            if (next.along != 1)
                for (int64_t line = LINE; line < WIDE; line += LINE) __builtin_prefetch(w + line);
        }
        const int64_t to = from + LINE < c.k ? from + LINE : c.k;
        for (int64_t k = from; k < to; k++) {
            F w[V];
            UNROLLED for (int v = 0; v < V; v++) w[v] = ld(panel + k * WIDE + v * VW);
            UNROLLED for (int r = 0; r < R; r++) {
                const float one = ALONG ? x[k * AHEAD + r] : x[r * x_row + k];
                UNROLLED for (int v = 0; v < V; v++) sum[r][v] = sum[r][v] + w[v] * one;
            }
        }
    }
    F sums[R][V];                                      // another array than that which lies in registers
    UNROLLED for (int r = 0; r < R; r++)
        UNROLLED for (int v = 0; v < V; v++) sums[r][v] = sum[r][v];
    put(c, sums, R, after, m, n);
}

template <int R, bool ALONG>
__attribute__((noinline)) void tiles(
    int64_t rows, const Call& c, const float* x, int64_t x_row, const float* panel, const float* after, int64_t m, int64_t n, Next next
) {
    if constexpr (R > 1)
        if (rows < R) return tiles<R - 1, ALONG>(rows, c, x, x_row, panel, after, m, n, next);
    tile<R, ALONG>(c, x, x_row, panel, after, m, n, next);
}

// WIDE rows of weights from n as a panel; 0 beyond the last.
void turn(const Call& c, int64_t n, float* to) {
    for (int64_t half = 0; half < WIDE; half += VW, n += VW, to += VW) {
        int64_t k = 0;
        if (c.w_k != 1 && n + VW <= c.n)
            for (; k < c.k; k++) st(to + k * WIDE, ld(c.w + n + k * c.w_k));
        for (; c.w_k == 1 && k + VW <= c.k; k += VW) {
            F v[VW];
            UNROLLED for (int r = 0; r < VW; r++) v[r] = n + r < c.n ? ld(c.w + (n + r) * c.w_n + k) : F{};
            transpose(v);
            UNROLLED for (int r = 0; r < VW; r++) st(to + (k + r) * WIDE, v[r]);
        }
        for (; k < c.k; k++)
            for (int64_t r = 0; r < VW; r++) to[k * WIDE + r] = n + r < c.n ? c.w[(n + r) * c.w_n + k * c.w_k] : 0.0f;
    }
}

ALWAYS int64_t start(const Call& c, int64_t blocks, int64_t i) { return c.m * i / blocks; }

// A row minus its mean, over its deviation: two walks, the deviation from the mean, as layer norm's kernel has them.
void normed(const Call& c, const float* x, float* to) {
    const int rest = (int)(c.k % VW);
    const int64_t whole = c.k - rest;
    F sum = {}, square = {};
    float tail = 0, tail_square = 0;
    for (int64_t k = 0; k < whole; k += VW) sum = sum + ld(x + k);
    for (int64_t k = whole; k < c.k; k++) tail += x[k];
    const float mean = (hsum(sum) + tail) / (float)c.k;
    for (int64_t k = 0; k < whole; k += VW) {
        const F d = ld(x + k) - mean;
        square = square + d * d;
    }
    for (int64_t k = whole; k < c.k; k++) tail_square += (x[k] - mean) * (x[k] - mean);
    if (!(hsum(square) + tail_square < 1e37f)) *c.refused = 1;
    const float by = 1.0f / __builtin_sqrtf((hsum(square) + tail_square) / (float)c.k + (float)c.norm_eps);
    for (int64_t k = 0; k < whole; k += VW) {
        F v = (ld(x + k) - mean) * by;
        if (c.norm_gamma) v = v * ld(c.norm_gamma + k);
        if (c.norm_beta) v = v + ld(c.norm_beta + k);
        st(to + k, v);
    }
    for (int64_t k = whole; k < c.k; k++) {
        const float v = (x[k] - mean) * by;
        to[k] = v * (c.norm_gamma ? c.norm_gamma[k] : 1.0f) + (c.norm_beta ? c.norm_beta[k] : 0.0f);
    }
}

// Rows from m, copied to `room`: each with its k beside each other, or each k with its rows.
ALWAYS const float* copied(const Call& c, int64_t m, int64_t rows, float* room) {
    if (c.x_k == 1) {
        for (int64_t r = 0; r < rows; r++) {
            if (NORMS) normed(c, row(c, m + r), room + r * (c.k + 16));
            else memcpy(room + r * (c.k + 16), row(c, m + r), (size_t)c.k * sizeof(float));
        }
    } else if (m + AHEAD <= c.m) {
        for (int64_t k = 0; k < c.k; k++)
            for (int64_t r = 0; r < AHEAD; r += VW) st(room + k * AHEAD + r, ld(c.x + m + r + k * c.x_k));
    } else {
        for (int64_t k = 0; k < c.k; k++)
            for (int64_t r = 0; r < rows; r++) room[k * AHEAD + r] = c.x[m + r + k * c.x_k];
    }
    return room;
}

// What all threads do: `all` is shared, `room` each thread's own.
template <bool ALONG>
void work(const Call& c, float* after, float* all, float* room, bool once, bool copies) {
    const int64_t panels = (c.n + WIDE - 1) / WIDE, blocks = (c.m + ROWS - 1) / ROWS, size = c.k * WIDE;
    const int64_t x_row = copies ? c.k + 16 : c.x_row;
    if (once) {
#pragma omp for schedule(static)
        for (int64_t p = 0; p < panels; p++) turn(c, p * WIDE, all + p * size);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < blocks; i++) {
            const int64_t m = start(c, blocks, i), rows = start(c, blocks, i + 1) - m;
            const float* x = copies ? copied(c, m, rows, room) : c.x + m * x_row;
            for (int64_t p = 0; p < panels; p++)
                tiles<ROWS, ALONG>(rows, c, x, x_row, all + p * size, after, m, p * WIDE, Next{});
        }
        return;
    }
    const int64_t each = ALONG ? c.k * AHEAD : ROWS * x_row;
    if (copies) {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < blocks; i++) {
            const int64_t m = start(c, blocks, i);
            copied(c, m, start(c, blocks, i + 1) - m, all + i * each);
        }
    }
#pragma omp for schedule(static)
    for (int64_t p = 0; p < panels; p++) {
        turn(c, p * WIDE, room);
        const int64_t ahead = (p + 1) * WIDE, left = ahead < c.n ? c.n - ahead : 0, wide = left < WIDE ? left : WIDE;
        const bool plain = c.w_k == 1;
        const int64_t count = plain ? wide : left ? LINE : 0, step = plain ? c.w_n : c.w_k;
        for (int64_t i = 0; i < blocks; i++) {
            const int64_t m = start(c, blocks, i), rows = start(c, blocks, i + 1) - m;
            const int64_t a = count * i / blocks, b = count * (i + 1) / blocks;
            const Next next{c.w + ahead * c.w_n + a * step, b - a, step, c.w_k};
            const float* x = copies ? all + i * each : c.x + m * x_row;
            tiles<ROWS, ALONG>(rows, c, x, x_row, room, after, m, p * WIDE, next);
        }
    }
}

}  // namespace

// 1: there is no memory, or a norm is not finite: what is written is to be written again
extern "C" int gnomon_kernel(const Call* given) {
    Call all_threads = *given;
    int refused = 0;
    all_threads.refused = &refused;
    if (!all_threads.threads) all_threads.threads = omp_get_max_threads();
    const Call& c = all_threads;
    const int64_t panels = (c.n + WIDE - 1) / WIDE, blocks = (c.m + ROWS - 1) / ROWS, size = c.k * WIDE;
    const bool along = c.x_k != 1, copies = NORMS || along || c.x_row * 4 % TOGETHER == 0 || c.across < c.m;
    const int64_t each = !copies ? 0 : along ? c.k * AHEAD : ROWS * (c.k + 16);   // of a block of rows that are copied
    // Panels that stay in the second cache are turned once, and a block of rows goes over all of them; else all blocks go
    // over one panel after another.
    const bool once = panels * size * 4 <= TURNED;
    const int64_t shared = once ? panels * size : blocks * each, own = ((once ? each : size) + 15) / 16 * 16;
    const int64_t ends = (2 * (c.n + WIDE) + 15) / 16 * 16;
    float* after = (float*)aligned_alloc(64, (size_t)(ends + shared + c.threads * own + 47) / 16 * 64);
    if (!after) return 1;
    float* all = after + ends;
    factors(c, after, after + c.n + WIDE);
#pragma omp parallel num_threads((int)c.threads) if (c.threads > 1)
    {
        float* room = all + (shared + 15) / 16 * 16 + omp_get_thread_num() * own;
        if (along) work<true>(c, after, all, room, once, copies);
        else work<false>(c, after, all, room, once, copies);
    }
    free(after);
    return refused;
}
