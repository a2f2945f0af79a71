// The tile of a linear layer, which one layer (linear.cpp) and several behind each other (linears.cpp) share: weights are
// turned a panel at a time, a tile of rows has its sums in registers along all k, and they pass through what follows the
// product before they are written.
#pragma once
#include "vector.h"
#include <omp.h>

namespace {

#ifndef TILE                                           // as matmul_tile.py constructs it for a size and a device
#define TILE (VW == 16 ? 14 : VW == 8 ? 6 : 4)
#define VECTORS 2
#endif
#ifndef LEAST                                          // rows of a block at least: tiles of fewer are not compiled
#define LEAST 1
#endif
#ifdef NORMED
constexpr bool NORMS = true;
#else
constexpr bool NORMS = false;
#endif
#ifdef RELUS
constexpr bool FRONT = true;                           // a ReLU in front, for which rows are copied
#else
constexpr bool FRONT = false;
#endif
constexpr int ROWS = TILE;
constexpr int64_t AHEAD = (ROWS + VW - 1) / VW * VW;   // rows of x that lie beside each other, where they are copied so
constexpr int OTHERS = 4;                              // as MOST_OTHERS of linear.py
constexpr int64_t LINE = 16;                           // floats of a line of memory
constexpr int64_t TOGETHER = 2048;                     // rows that are this far apart fall on few places of the first cache
constexpr int CLOSE = 8;                               // of which it holds so many beside each other

struct Call {                                          // as LinearCall in linear.py has its first fields
    int64_t m, n, k, relu, threads;                    // threads: 0 for all
    const float* x; int64_t across, x_row, x_down;     // of m rows `across` are x_row apart, then x_down to the next
    int64_t x_k;                                       // from one k to the next; 1, or x_row is
    const float* w; int64_t w_n, w_k;                  // one of them 1
    const float* bias;                                 // or null
    const float *gamma, *beta, *mean, *variance; double eps;   // or null
    const float* added;                                // (m, n), or null; may be out
    float* out;
    const float *norm_gamma, *norm_beta; double norm_eps;      // of the rows of x, or null
    int* refused;                                      // set where a norm is not finite or what follows has no answer
    int64_t out_row, first;                            // from one row of out to the next, and which row it begins with
    const float* other[OTHERS]; int64_t other_row[OTHERS];     // what follows the product reads beside it; 0: one row for all
};

// What follows a product: of its results in row m, from column `at`, of which `left` are there. Stage: which of several.
template <int Stage> struct Ended {
    ALWAYS F of(F x, const Call&, int64_t, int64_t, int64_t) { return x; }
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
template <int Stage, int V>
void put(const Call& c, const F (*sums)[V], int64_t rows, const float* after, int64_t m, int64_t n) {
    constexpr int64_t WIDE = V * VW;
    for (int half = 0; half < V && n + half * VW < c.n; half++) {
        const int64_t at = n + half * VW, left = c.n - at;
        const F scale = ld(after + at), shift = ld(after + c.n + WIDE + at);
        float* out = c.out + (m - c.first) * c.out_row + at;
        const float* added = c.added ? c.added + m * c.n + at : nullptr;
        for (int64_t r = 0; r < rows; r++, out += c.out_row) {
            F v = sums[r][half] * scale + shift;
            if (c.added) v = v + (left >= VW ? ld(added + r * c.n) : ld(added + r * c.n, (int)left));
            if (c.relu) v = maxi(v, F{});
            v = Ended<Stage>::of(v, c, m + r, at, left);
            if (left >= VW) st(out, v);
            else st(out, v, (int)left);
        }
    }
}

// Weights that the next panel is made of, which are asked for while a tile of this panel is computed: for every line of k
// `count` places of them `step` apart, the first k times `along` from w.
struct Next { const float* w; int64_t count, step, along; };

// R rows from m by a panel: V vectors of outputs from n, as (k, V vectors). ALONG: x has the rows of each k beside each other,
// AHEAD apart from k to k. FILLS: the panel is made on the way, of weights that have the outputs of each k beside each other;
// its stores cost nothing beside the sums, where a walk of its own waits for the second cache.
template <int Stage, int V, int R, bool ALONG, bool FILLS = false>
ALWAYS void tile(
    const Call& c, const float* x, int64_t x_row, float* panel, const float* after, int64_t m, int64_t n, Next next
) {
    constexpr int64_t WIDE = V * VW;
    F sum[R][V] = {};
    const float* ends = c.added && c.added != c.out ? c.added : nullptr;
    for (int64_t r = 0; r < R; r++) {                  // what is read and written at the end
        const float* out = c.out + (m + r - c.first) * c.out_row + n;
        for (int64_t line = 0; line < WIDE; line += LINE) __builtin_prefetch(out + line, 1);
        if (ends)
            for (int64_t line = 0; line < WIDE; line += LINE) __builtin_prefetch(ends + (m + r) * c.n + n + line);
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
            UNROLLED for (int v = 0; v < V; v++) w[v] = ld(FILLS ? c.w + n + k * c.w_k + v * VW : panel + k * WIDE + v * VW);
            if (FILLS)
                UNROLLED for (int v = 0; v < V; v++) st(panel + k * WIDE + v * VW, w[v]);
            UNROLLED for (int r = 0; r < R; r++) {
                const float one = ALONG ? x[k * AHEAD + r] : x[r * x_row + k];
                UNROLLED for (int v = 0; v < V; v++) sum[r][v] = sum[r][v] + w[v] * one;
            }
        }
    }
    F sums[R][V];                                      // another array than that which lies in registers
    UNROLLED for (int r = 0; r < R; r++)
        UNROLLED for (int v = 0; v < V; v++) sums[r][v] = sum[r][v];
    put<Stage, V>(c, sums, R, after, m, n);
}

template <int Stage, int V, int R, bool ALONG, bool FILLS = false>
__attribute__((noinline)) void tiles(
    int64_t rows, const Call& c, const float* x, int64_t x_row, float* panel, const float* after, int64_t m, int64_t n, Next next
) {
    // Of several blocks none has less than half of the rows.
    if constexpr (R > (FILLS && ROWS / 2 > LEAST ? ROWS / 2 : LEAST))
        if (rows < R) return tiles<Stage, V, R - 1, ALONG, FILLS>(rows, c, x, x_row, panel, after, m, n, next);
    tile<Stage, V, R, ALONG, FILLS>(c, x, x_row, panel, after, m, n, next);
}

// V vectors of rows of weights from n as a panel; 0 beyond the last.
template <int V>
void turn(const Call& c, int64_t n, float* to) {
    constexpr int64_t WIDE = V * VW;
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

// What a product reads of a number of x: itself where it is a NaN.
ALWAYS F fronted(F x) { return FRONT ? larger(F{}, x) : x; }
ALWAYS float fronted(float x) { return FRONT && 0.0f > x ? 0.0f : x; }

// Rows from m, copied to `room`: each with its k beside each other, or each k with its rows.
ALWAYS const float* copied(const Call& c, int64_t m, int64_t rows, float* room) {
    if (c.x_k == 1) {
        for (int64_t r = 0; r < rows; r++) {
            if (NORMS) normed(c, row(c, m + r), room + r * (c.k + 16));
            else if (!FRONT) memcpy(room + r * (c.k + 16), row(c, m + r), (size_t)c.k * sizeof(float));
            else {
                const float* x = row(c, m + r);
                float* to = room + r * (c.k + 16);
                int64_t k = 0;
                for (; k + VW <= c.k; k += VW) st(to + k, fronted(ld(x + k)));
                for (; k < c.k; k++) to[k] = fronted(x[k]);
            }
        }
    } else if (m + AHEAD <= c.m) {
        for (int64_t k = 0; k < c.k; k++)
            for (int64_t r = 0; r < AHEAD; r += VW) st(room + k * AHEAD + r, fronted(ld(c.x + m + r + k * c.x_k)));
    } else {
        for (int64_t k = 0; k < c.k; k++)
            for (int64_t r = 0; r < rows; r++) room[k * AHEAD + r] = fronted(c.x[m + r + k * c.x_k]);
    }
    return room;
}

}  // namespace
