// A linear layer, or a convolution of one pixel (gnomon/compiler/linear.py): out[m, n] = after(sum over k of x[m, k] w[n, k]
// + bias[n]), after: batch norm, a sum, ReLU. Weights are read as they lie: two vectors of them are turned in cache, so that
// a tile of rows has its sums in registers along all k. Either side may also lie turned, as in a layer's backward.
#include "vector.h"
#include <omp.h>

namespace {

constexpr int ROWS = VW == 16 ? 14 : VW == 8 ? 6 : 4;  // of a tile, beside two vectors of outputs
constexpr int64_t WIDE = 2 * VW, TURNED = 1 << 19;     // TURNED: bytes of weights that are turned at once, for L2
constexpr int64_t LINE = 16;                           // floats of a line of memory
constexpr int64_t TOGETHER = 2048;                     // rows that are this far apart fall on few places of the first cache

struct Call {                                          // as Call in linear.py has them 
    int64_t m, n, k, relu, threads;                    // threads: 0 for all
    const float* x; int64_t across, x_row, x_down;     // of m rows `across` are x_row apart, then x_down to the next
    int64_t x_k;                                       // from one k to the next; 1, or x_row is
    const float* w; int64_t w_n, w_k;                  // one of them 1
    const float* bias;                                 // or null
    const float *gamma, *beta, *mean, *variance; double eps;   // or null
    const float* added;                                // (m, n), or null; may be out
    float* out;
};

ALWAYS const float* row(const Call& c, int64_t m) { return c.x + m / c.across * c.x_down + m % c.across * c.x_row; }

// What the batch norm multiplies and adds, with the bias.
void factors(const Call& c, float* scale, float* shift) {
    for (int64_t n = 0; n < c.n; n++) {
        scale[n] = c.gamma ? c.gamma[n] / __builtin_sqrtf(c.variance[n] + (float)c.eps) : 1.0f;
        shift[n] = (c.gamma ? c.beta[n] - c.mean[n] * scale[n] : 0.0f) + (c.bias ? c.bias[n] * scale[n] : 0.0f);
    }
}

// Writes the sums of `rows` rows from m: two vectors of outputs from n each.
void put(const Call& c, const F (*sums)[2], int64_t rows, const float* after, int64_t m, int64_t n) {
    for (int half = 0; half < 2 && n + half * VW < c.n; half++) {
        const int64_t at = n + half * VW, left = c.n - at;
        const F scale = ld(after + at), shift = ld(after + c.n + 2 * VW + at);
        float* out = c.out + m * c.n + at;
        const float* added = (c.added ? c.added : c.out) + m * c.n + at;
        for (int64_t r = 0; r < rows; r++, out += c.n, added += c.n) {
            F v = sums[r][half] * scale + shift;
            if (c.added) v = v + (left >= VW ? ld(added) : ld(added, (int)left));
            if (c.relu) v = maxi(v, F{});
            if (left >= VW) st(out, v);
            else st(out, v, (int)left);
        }
    }
}

// Weights that the next panel is made of, which are asked for while a tile of this panel is computed: for every line of k
// `count` places of them `step` apart, the first k times `along` from w.
struct Next { const float* w; int64_t count, step, along; };

// R rows from m by a panel: WIDE outputs from n, as (k, WIDE).
template <int R, bool ALONG>                            // ALONG: x has the rows of each k beside each other, VW apart from k to k
ALWAYS void tile(
    const Call& c, const float* x, int64_t x_row, const float* panel, const float* after, int64_t m, int64_t n, Next next
) {
    F sum[R][2] = {};
    const float* ends = c.added && c.added != c.out ? c.added : nullptr;
    for (int64_t r = 0; r < R; r++) {                  // what is read and written at the end
        const int64_t at = (m + r) * c.n + n;
        __builtin_prefetch(c.out + at, 1);
        __builtin_prefetch(c.out + at + LINE, 1);
        if (ends) {
            __builtin_prefetch(ends + at);
            __builtin_prefetch(ends + at + LINE);
        }
    }
    for (int64_t from = 0; from < c.k; from += LINE) {
        for (int64_t i = 0; i < next.count; i++) {
            const float* w = next.w + i * next.step + from * next.along;
            __builtin_prefetch(w);
            if (next.along != 1) __builtin_prefetch(w + LINE);
        }
        const int64_t to = from + LINE < c.k ? from + LINE : c.k;
        for (int64_t k = from; k < to; k++) {
            const F a = ld(panel + k * WIDE), b = ld(panel + k * WIDE + VW);
            UNROLLED for (int r = 0; r < R; r++) {
                const float one = ALONG ? x[k * VW + r] : x[r * x_row + k];
                sum[r][0] = sum[r][0] + a * one;
                sum[r][1] = sum[r][1] + b * one;
            }
        }
    }
    F sums[R][2];                                      // another array than that which lies in registers
    UNROLLED for (int r = 0; r < R; r++) sums[r][0] = sum[r][0], sums[r][1] = sum[r][1];
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

// Rows from m, copied to `room`: each with its k beside each other, or each k with its rows.
ALWAYS const float* copied(const Call& c, int64_t m, int64_t rows, float* room) {
    if (c.x_k == 1) {
        for (int64_t r = 0; r < rows; r++) memcpy(room + r * (c.k + 16), row(c, m + r), (size_t)c.k * sizeof(float));
    } else if (m + VW <= c.m) {
        for (int64_t k = 0; k < c.k; k++) st(room + k * VW, ld(c.x + m + k * c.x_k));
    } else {
        for (int64_t k = 0; k < c.k; k++)
            for (int64_t r = 0; r < rows; r++) room[k * VW + r] = c.x[m + r + k * c.x_k];
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
    const int64_t each = ALONG ? c.k * VW : ROWS * x_row;
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

// 1: there is no memory, and nothing is written
extern "C" int gnomon_kernel(const Call* given) {
    Call all_threads = *given;
    if (!all_threads.threads) all_threads.threads = omp_get_max_threads();
    const Call& c = all_threads;
    const int64_t panels = (c.n + WIDE - 1) / WIDE, blocks = (c.m + ROWS - 1) / ROWS, size = c.k * WIDE;
    const bool along = c.x_k != 1, copies = along || c.x_row * 4 % TOGETHER == 0 || c.across < c.m;
    const int64_t each = !copies ? 0 : along ? c.k * VW : ROWS * (c.k + 16);   // of a block of rows that are copied
    // Panels that stay in the second cache are turned once, and a block of rows goes over all of them; else all blocks go
    // over one panel after another.
    const bool once = panels * size * 4 <= TURNED;
    const int64_t shared = once ? panels * size : blocks * each, own = ((once ? each : size) + 15) / 16 * 16;
    const int64_t ends = (2 * (c.n + 2 * VW) + 15) / 16 * 16;
    float* after = (float*)aligned_alloc(64, (size_t)(ends + shared + c.threads * own + 47) / 16 * 64);
    if (!after) return 1;
    float* all = after + ends;
    factors(c, after, after + c.n + 2 * VW);
#pragma omp parallel num_threads((int)c.threads) if (c.threads > 1)
    {
        float* room = all + (shared + 15) / 16 * 16 + omp_get_thread_num() * own;
        if (along) work<true>(c, after, all, room, once, copies);
        else work<false>(c, after, all, room, once, copies);
    }
    free(after);
    return 0;
}
