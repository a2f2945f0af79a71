// Products of rows that are found at run time (gnomon/compiler/kernels/gathered.py): out[to[i], n] = after(sum over k of
// x[from[i], k] w[g][n, k] + bias[g][n]), where row i is of group g. Rows are gathered by their places while they are copied
// for the tiles, which a product does anyway, and results go to their places from the registers: nothing is converted. Groups
// of few rows read their weights once, as they lie, k by k; of some more, weights are turned in registers, and of many, a panel of
// them in cache.
// A lane is a float, or two of bfloat16 beside each other along k, which one instruction multiplies and adds up.
#include "vector.h"
#include "memory.h"
#include <omp.h>

namespace {

#ifdef PAIRED
constexpr int64_t EACH = 2;                            // numbers of a lane
ALWAYS F fma(F sum, F a, F b) {                        // GCC 12 copies sums back and forth around the intrinsic
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
}
#else
constexpr int64_t EACH = 1;
ALWAYS F fma(F sum, F a, F b) { return sum + a * b; }
#endif
constexpr int ROWS = VW == 16 ? 14 : VW == 8 ? 6 : 4;  // of a tile, beside two vectors of outputs
constexpr int64_t WIDE = 2 * VW, LINE = 16;            // LINE: lanes of a line of memory
constexpr int64_t FEW = 4, SOME = 4;                  // rows of a tile along k; of a group whose weights are not turned: the turn costs as much as is saved by it
constexpr int SQUARE = 8;                              // rows of a group whose weights are turned in registers at most
constexpr int64_t SOON = 64;                           // lanes
constexpr int64_t HELD = 1 << 19;                      // bytes of rows that meet one turned panel, for the second cache
constexpr int64_t APART = 16;                          // lanes between copied rows, so that they fall on other places of a cache

struct Call {                                          // as GatheredCall in gathered.py has it
    int64_t groups, rows, n, k, relu, threads;         // rows: in all
    const int32_t* ends;                               // of groups among rows; null: one group
    const int64_t* from; int64_t x_rows;               // places in x, negative ones from its end; null: as they lie
    const int64_t* to;                                 // places in out, or null
    const int64_t* spare; int64_t spares; double fill; // places in out that no row goes to, and what they are multiples of
    const S* x; int64_t x_row;                         // in elements, as all that follow
    const S* w; int64_t w_group, w_n, w_k;             // one of w_n and w_k is 1; w_k where lanes are pairs
    const S* bias; int64_t bias_group;                 // or null
    S* out; int64_t out_row;
};

// The same in lanes, with what is made on the way.
struct Work {
    const Call& c;
    int64_t k, w_n, w_k, x_row;
    const float* x;
};

ALWAYS const float* weights(const Work& t, int64_t group, int64_t n) {
    return (const float*)(t.c.w + group * t.c.w_group) + n * t.w_n;
}
ALWAYS int64_t begin_of(const Call& c, int64_t group) { return !c.ends ? 0 : group ? c.ends[group - 1] : 0; }
ALWAYS int64_t end_of(const Call& c, int64_t group) { return c.ends ? c.ends[group] : c.rows; }
ALWAYS S* place(const Call& c, int64_t row) { return c.out + (c.to ? c.to[row] : row) * c.out_row; }

ALWAYS void put(const Call& c, F v, S* out, const S* bias, int64_t n) {
    const int64_t left = c.n - n;
    if (left <= 0) return;
    if (bias) v = v + (left >= VW ? ld(bias + n) : ld(bias + n, (int)left));
    if (c.relu) v = maxi(v, F{});
    if (left >= VW) st(out + n, v);
    else st(out + n, v, (int)left);
}

ALWAYS F lanes_of(const float* p, int64_t left) { return left >= VW ? ld(p) : ld(p, (int)left); }

// R rows from m by N outputs from n, along k. The next outputs' weights are asked for.
template <int R, int N>
ALWAYS void along(const Work& t, int64_t group, int64_t m, int64_t n) {
    F sum[VW] = {};
    const float* w = weights(t, group, n);
    const float* x = t.x + m * t.x_row;
    int64_t k = 0;
    for (; k + VW <= t.k; k += VW) {
        F at[R];
        UNROLLED for (int r = 0; r < R; r++) at[r] = ld(x + r * t.x_row + k);
        UNROLLED for (int i = 0; i < N; i++) {
            __builtin_prefetch(w + (i + N) * t.w_n + k);
            const F a = ld(w + i * t.w_n + k);
            UNROLLED for (int r = 0; r < R; r++) sum[r * N + i] = fma(sum[r * N + i], a, at[r]);
        }
    }
    if (const int left = (int)(t.k - k)) {
        F at[R];
        UNROLLED for (int r = 0; r < R; r++) at[r] = ld(x + r * t.x_row + k, left);
        UNROLLED for (int i = 0; i < N; i++) {
            const F a = ld(w + i * t.w_n + k, left);
            UNROLLED for (int r = 0; r < R; r++) sum[r * N + i] = fma(sum[r * N + i], a, at[r]);
        }
    }
    transpose(sum);
    F whole = sum[0];
    UNROLLED for (int i = 1; i < VW; i++) whole = whole + sum[i];
    const S* bias = t.c.bias ? t.c.bias + group * t.c.bias_group : nullptr;
    UNROLLED for (int r = 0; r < R; r++) {
        S* out = place(t.c, m + r) + n;
        float v[N];
        for (int i = 0; i < N; i++) {
            v[i] = whole[r * N + i] + (bias ? one(bias[n + i]) : 0.0f);
            if (t.c.relu && v[i] < 0.0f) v[i] = 0.0f;
        }
        narrow(v, out, N);
    }
}

// R rows by outputs from `from` to `to`, of weights that have the outputs of each k beside each other.
template <int R>
void beside(const Work& t, int64_t group, int64_t m, int64_t from, int64_t to) {
    const S* bias = t.c.bias ? t.c.bias + group * t.c.bias_group : nullptr;
    for (int64_t n = from; n < to; n += VW) {
        const float *w = weights(t, group, n), *x = t.x + m * t.x_row;
        F sum[R] = {};
        for (int64_t k = 0; k < t.k; k++, w += t.w_k) {
            const F a = lanes_of(w, t.c.n - n);
            UNROLLED for (int r = 0; r < R; r++) sum[r] = fma(sum[r], a, splat(x[r * t.x_row + k]));
        }
        UNROLLED for (int r = 0; r < R; r++) put(t.c, sum[r], place(t.c, m + r), bias, n);
    }
}

template <int N>
void rows_along(const Work& t, int64_t group, int64_t begin, int64_t end, int64_t n) {
    for (int64_t m = begin; m < end;) {                // in tiles as equal as they can be
        const int64_t left = end - m, rows = (left + (left + FEW - 1) / FEW - 1) / ((left + FEW - 1) / FEW);
        if (rows == 1) along<1, N>(t, group, m, n);
        else if (rows == 2) along<2, N>(t, group, m, n);
        else if (rows == 3) along<3, N>(t, group, m, n);
        else along<4, N>(t, group, m, n);
        m += rows;
    }
}

// The same where each output has its k beside each other: a few outputs' weights meet all rows from the first cache.
void few(const Work& t, int64_t group, int64_t begin, int64_t end, int64_t from, int64_t to) {
    constexpr int ONE = VW < 8 ? VW : 8, EACH_ROW = VW / 4;
    int64_t n = from;
    for (; end - begin == 1 && n + ONE <= to; n += ONE) along<1, ONE>(t, group, begin, n);
    for (; n + EACH_ROW <= to; n += EACH_ROW) rows_along<EACH_ROW>(t, group, begin, end, n);
    for (; n < to; n++) rows_along<1>(t, group, begin, end, n);
}

// WIDE rows of weights from n as a panel (k, WIDE); 0 beyond the last.
void turn(const Work& t, int64_t group, int64_t n, float* to) {
    for (int64_t half = 0; half < WIDE; half += VW, n += VW, to += VW) {
        const float* w = weights(t, group, n);
        const int64_t wide = t.c.n - n;
        if (t.w_k != 1) {
            for (int64_t k = 0; k < t.k; k++) st(to + k * WIDE, wide <= 0 ? F{} : lanes_of(w + k * t.w_k, wide));
            continue;
        }
        int64_t k = 0;
        for (; wide >= VW && k + VW <= t.k; k += VW) {
            F v[VW];
            UNROLLED for (int r = 0; r < VW; r++) v[r] = ld(w + r * t.w_n + k);
            transpose(v);
            UNROLLED for (int r = 0; r < VW; r++) st(to + (k + r) * WIDE, v[r]);
        }
        for (; k < t.k; k++)
            for (int64_t r = 0; r < VW; r++) to[k * WIDE + r] = r < wide ? w[r * t.w_n + k] : 0.0f;
    }
}

struct Next { const float* w; int64_t count, step; };  // lines of the next panel that are asked for meanwhile, for each line of k

template <int R>
__attribute__((noinline)) void tile(int64_t rows, const Work& t, int64_t group, const float* panel, int64_t m, int64_t n, Next next) {
    F sum[R][2] = {};
    const float* x = t.x + m * t.x_row;
    for (int64_t from = 0; from < t.k; from += LINE) {
        for (int64_t i = 0; i < next.count; i++) __builtin_prefetch(next.w + i * next.step + from, 0, 2);
        const int64_t to = from + LINE < t.k ? from + LINE : t.k;
        for (int64_t k = from; k < to; k++) {
            const F a = ld(panel + k * WIDE), b = ld(panel + k * WIDE + VW);
            UNROLLED for (int r = 0; r < R; r++) {
                const F at = splat(x[r * t.x_row + k]);
                sum[r][0] = fma(sum[r][0], a, at);
                sum[r][1] = fma(sum[r][1], b, at);
            }
        }
    }
    const S* bias = t.c.bias ? t.c.bias + group * t.c.bias_group : nullptr;
    F sums[R][2];                                      // another array than that which lies in registers
    UNROLLED for (int r = 0; r < R; r++) sums[r][0] = sum[r][0], sums[r][1] = sum[r][1];
    for (int64_t r = 0; r < rows; r++) {
        S* out = place(t.c, m + r);
        put(t.c, sums[r][0], out, bias, n);
        put(t.c, sums[r][1], out, bias, n + VW);
    }
}

// The least tile that has so many rows; what it computes beyond them is of rows behind them, and not written.
void tiles(int64_t rows, const Work& t, int64_t group, const float* panel, int64_t m, int64_t n, Next next) {
    constexpr int SMALL = (ROWS + 3) / 3, MIDDLE = (2 * ROWS + 2) / 3;
    if (rows <= SMALL) tile<SMALL>(rows, t, group, panel, m, n, next);
    else if (rows <= MIDDLE) tile<MIDDLE>(rows, t, group, panel, m, n, next);
    else tile<ROWS>(rows, t, group, panel, m, n, next);
}

// VW outputs of R rows, of weights with each output's k beside each other: a square of them at a time is turned in registers, so
// that they are read once and stored nowhere. The squares to come are asked for, SOON lanes ahead in each output.
template <int R>
__attribute__((noinline)) void square(const Work& t, int64_t group, int64_t m, int64_t rows, int64_t n) {
    F sum[R] = {};
    const float *w = weights(t, group, n), *x = t.x + m * t.x_row;
    int64_t k = 0;
    for (; k + VW <= t.k; k += VW, w += VW) {
        const float* soon = k + SOON < t.k ? w + SOON : w + SOON - t.k + VW * t.w_n;
        F v[VW];
        UNROLLED for (int i = 0; i < VW; i++) {
            v[i] = ld(w + i * t.w_n);
            __builtin_prefetch(soon + i * t.w_n, 0, 2);
        }
        transpose(v);
        UNROLLED for (int i = 0; i < VW; i++)
            UNROLLED for (int r = 0; r < R; r++) sum[r] = fma(sum[r], v[i], splat(x[r * t.x_row + k + i]));
    }
    if (const int left = (int)(t.k - k)) {
        F v[VW];
        UNROLLED for (int i = 0; i < VW; i++) v[i] = ld(w + i * t.w_n, left);
        transpose(v);
        F turned[VW];                                  // another array than that which lies in registers
        UNROLLED for (int i = 0; i < VW; i++) turned[i] = v[i];
        for (int i = 0; i < left; i++)
            UNROLLED for (int r = 0; r < R; r++) sum[r] = fma(sum[r], turned[i], splat(x[r * t.x_row + k + i]));
    }
    F sums[R];
    UNROLLED for (int r = 0; r < R; r++) sums[r] = sum[r];
    const S* bias = t.c.bias ? t.c.bias + group * t.c.bias_group : nullptr;
    for (int64_t r = 0; r < rows; r++) put(t.c, sums[r], place(t.c, m + r), bias, n);
}

// Rows of a group by the outputs of one panel.
void panel_of(const Work& t, int64_t group, int64_t begin, int64_t end, int64_t n, float* room) {
    const int64_t to = n + WIDE < t.c.n ? n + WIDE : t.c.n;
    if (t.w_k == 1 && end - begin <= SOME) return few(t, group, begin, end, n, to);
    if (end - begin == 1) return beside<1>(t, group, begin, n, to);
    if (end - begin == 2) return beside<2>(t, group, begin, n, to);
    if (end - begin == 3) return beside<3>(t, group, begin, n, to);
    if (end - begin == 4) return beside<4>(t, group, begin, n, to);
    if (VW == 16 && t.w_k == 1 && end - begin <= SQUARE && to == n + WIDE) {
        for (int64_t half = n; half < to; half += VW)
            end - begin <= 6 ? square<6>(t, group, begin, end - begin, half) : square<SQUARE>(t, group, begin, end - begin, half);
        return;
    }
    turn(t, group, n, room);
    const int64_t blocks = (end - begin + ROWS - 1) / ROWS, left = t.c.n - n - WIDE;
    const int64_t ahead = t.w_k != 1 || left <= 0 ? 0 : left < WIDE ? left : WIDE;
    for (int64_t i = 0; i < blocks; i++) {
        const int64_t m = begin + (end - begin) * i / blocks, last = begin + (end - begin) * (i + 1) / blocks;
        const int64_t a = ahead * i / blocks, b = ahead * (i + 1) / blocks;
        tiles(last - m, t, group, room, m, n, Next{weights(t, group, n + WIDE + a), b - a, t.w_n});
    }
}

// Whether all places are there.
bool sound(const Call& c) {
    int64_t before = 0;
    for (int64_t g = 0; c.ends && g < c.groups; before = c.ends[g++])
        if (c.ends[g] < before || c.ends[g] > c.rows) return false;
    if (c.ends && before != c.rows) return false;
    for (int64_t i = 0; c.from && i < c.rows; i++)
        if (c.from[i] < -c.x_rows || c.from[i] >= c.x_rows) return false;
    return true;
}

}  // namespace

// 1: there is no memory, or a place that is not there, and nothing is written
extern "C" int gnomon_kernel(const Call* given) {
    const Call& c = *given;
    if (!sound(c)) return 1;
    Work t{c, c.k / EACH, c.w_n / EACH, c.w_k, c.k / EACH + APART, nullptr};
    if (c.w_k != 1) t.w_n = c.w_n;
    const int64_t panels = (c.n + WIDE - 1) / WIDE, own = t.k * WIDE, shared = (c.rows + ROWS) * t.x_row;
    float* room = (float*)aligned_alloc(64, (size_t)(shared + c.threads * own + 31) / 16 * 64);
    if (!room) return 1;
    float* copied = room + c.threads * own;
    t.x = copied;
    int64_t together = HELD / (t.k * 4) / ROWS * ROWS;  // rows that meet one turned panel
    if (together < 4 * ROWS) together = 4 * ROWS;
#pragma omp parallel num_threads((int)c.threads) if (c.threads > 1)
    {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < c.rows; i++) {
            const int64_t at = !c.from ? i : c.from[i] < 0 ? c.from[i] + c.x_rows : c.from[i];
            memcpy(copied + i * t.x_row, c.x + at * c.x_row, (size_t)c.k * sizeof(S));
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < c.spares; i++) {
            S* out = c.out + c.spare[i] * c.out_row;
            const F fill = __builtin_convertvector(lanes(), F) * (float)c.fill;
            for (int64_t n = 0; n < c.n; n += VW) {
                if (c.n - n >= VW) st(out + n, fill);
                else st(out + n, fill, (int)(c.n - n));
            }
        }
        float* mine = room + omp_get_thread_num() * own;
        for (int64_t g = 0; g < c.groups; g++) {
            for (int64_t m = begin_of(c, g); m < end_of(c, g); m += together) {
                const int64_t last = m + together < end_of(c, g) ? m + together : end_of(c, g);
#pragma omp for schedule(static) nowait
                for (int64_t p = 0; p < panels; p++) panel_of(t, g, m, last, p * WIDE, mine);
            }
        }
    }
    free(room);
    return 0;
}
