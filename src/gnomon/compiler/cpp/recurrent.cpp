// One direction of one layer of an LSTM or a GRU over all steps (gnomon/compiler/recurrent.py). What the inputs give is
// multiplied before, for all steps at once. Here the recurrent weights lie in panels of VW units with all their gates, so
// that a step makes the gates of those units in registers and goes on to the new state without leaving them. Each thread has
// the same panels in every step, and waits for the others between steps by spinning.
#include "vector.h"
#include "math.h"

extern "C" int sched_yield(void) noexcept;
extern "C" int omp_get_thread_num(void) noexcept;
extern "C" int omp_get_num_threads(void) noexcept;

namespace {

constexpr int ROWS = VW == 16 ? 6 : VW == 8 ? 3 : 2;  // of a tile: accumulators, weights and one state fit the registers
constexpr int DIGESTS = 16, MOST_THREADS = 64, SPINS = 4000;

struct Call {                                          // as _CALL in recurrent.py has them
    int64_t gates, hidden, steps, batch, reverse, threads;
    int64_t x_step, x_row, y_step, y_row;              // floats from one step, one row, to the next
    const float *weight, *bias, *x, *h0, *c0;          // weight (gates x hidden, hidden) as torch has it; bias may be null
    float *packed, *y, *hn, *cn;
};

struct alignas(64) Progress { int64_t step; };

uint64_t digest(const float* p, int64_t n) {
    U a[4] = {};
    for (int64_t i = 0; i < n; i += 4 * VW) {
        for (int j = 0; j < 4; j++) {
            U w = {};
            const int64_t at = i + j * VW, left = n - at;
            if (left >= VW) memcpy(&w, p + at, sizeof w);
            else if (left > 0) memcpy(&w, p + at, (size_t)left * 4);
            a[j] = (a[j] ^ w) * 0x9E3779B1u + 0x7F4A7C15u;
            a[j] ^= a[j] >> 15;
        }
    }
    uint64_t all = (uint64_t)n;
    for (int j = 0; j < 4; j++)
        for (int l = 0; l < VW; l++) all = ((all ^ a[j][l]) * 0x9E3779B97F4A7C15u) ^ (all >> 29);
    return all;
}

uint64_t digest_of_part(const Call& c, int part) {
    const int64_t n = c.gates * c.hidden * c.hidden, from = n * part / DIGESTS, to = n * (part + 1) / DIGESTS;
    return digest(c.weight + from, to - from);
}

ALWAYS int64_t blocks_of(const Call& c) { return (c.hidden + VW - 1) / VW; }
ALWAYS float* panels(const Call& c) { return c.packed + 2 * DIGESTS; }

void pack(const Call& c, int64_t block) {
    const int64_t h = c.hidden;
    float* to = panels(c) + block * h * c.gates * VW;
    for (int64_t gate = 0; gate < c.gates; gate++) {
        for (int lane = 0; lane < VW; lane++) {
            const int64_t unit = block * VW + lane;
            const float* from = c.weight + (gate * h + unit) * h;
            for (int64_t k = 0; k < h; k++) to[(k * c.gates + gate) * VW + lane] = unit < h ? from[k] : 0.0f;
        }
    }
}

ALWAYS F load(const float* p, int n) { return n == VW ? ld(p) : ld(p, n); }
ALWAYS void store(float* p, F v, int n) { if (n == VW) st(p, v); else st(p, v, n); }

#define UNROLLED _Pragma("GCC unroll 16")

// R rows of one block of units in one step; h, x, c, y at the first row and unit of theirs.
template <int G, int R>
void tile(const Call& c, const float* panel, const float* h, int64_t h_row, const float* x, float* cell, float* y,
          int64_t unit, int n) {
    constexpr int CHAINS = R == 1 ? 2 : 1;             // one row has too few sums to hide how long each takes
    const int64_t hidden = c.hidden;
    F sum[CHAINS][R][G] = {};
    if (c.bias)
        UNROLLED for (int g = 0; g < G; g++)
            UNROLLED for (int r = 0; r < R; r++) sum[0][r][g] = load(c.bias + g * hidden + unit, n);
    int64_t k = 0;
    for (; k + CHAINS <= hidden; k += CHAINS)
        UNROLLED for (int s = 0; s < CHAINS; s++) {
            const float* w = panel + (k + s) * G * VW;
            UNROLLED for (int g = 0; g < G; g++) {
                const F v = ld(w + g * VW);
                UNROLLED for (int r = 0; r < R; r++) sum[s][r][g] = sum[s][r][g] + v * h[r * h_row + k + s];
            }
        }
    for (; k < hidden; k++)
        UNROLLED for (int g = 0; g < G; g++)
            UNROLLED for (int r = 0; r < R; r++) sum[0][r][g] = sum[0][r][g] + ld(panel + (k * G + g) * VW) * h[r * h_row + k];
    UNROLLED for (int r = 0; r < R; r++) {
        const float* in = x + r * c.x_row + unit;
        F v[G];
        UNROLLED for (int g = 0; g < G; g++) {
            v[g] = sum[0][r][g];
            UNROLLED for (int s = 1; s < CHAINS; s++) v[g] = v[g] + sum[s][r][g];
        }
        F out;
        if (G == 4) {
            const F i = vsigmoid(v[0] + load(in, n)), f = vsigmoid(v[1] + load(in + hidden, n));
            const F g = vtanh(v[2] + load(in + 2 * hidden, n)), o = vsigmoid(v[3 % G] + load(in + 3 * hidden, n));
            const F now = f * load(cell + r * hidden + unit, n) + i * g;
            store(cell + r * hidden + unit, now, n);
            out = o * vtanh(now);
        } else {
            const F reset = vsigmoid(v[0] + load(in, n)), update = vsigmoid(v[1] + load(in + hidden, n));
            const F fresh = vtanh(load(in + 2 * hidden, n) + reset * v[2]);
            out = (load(h + r * h_row + unit, n) - fresh) * update + fresh;
        }
        store(y + r * c.y_row + unit, out, n);
    }
}

template <int G, int R>
void rows(const Call& c, int count, const float* panel, const float* h, int64_t h_row, const float* x, float* cell, float* y,
          int64_t unit, int n) {
    if constexpr (R > 1)
        if (count < R) return rows<G, R - 1>(c, count, panel, h, h_row, x, cell, y, unit, n);
    tile<G, R>(c, panel, h, h_row, x, cell, y, unit, n);
}

template <int G>
void step(const Call& c, int64_t at, bool first, int64_t from, int64_t to) {
    const float* before = first ? c.h0 : c.y + (at + (c.reverse ? 1 : -1)) * c.y_step;
    const int64_t h_row = first ? c.hidden : c.y_row;
    const int64_t tiles = (c.batch + ROWS - 1) / ROWS;
    for (int64_t block = from; block < to; block++) {
        const float* panel = panels(c) + block * c.hidden * G * VW;
        const int64_t unit = block * VW, left = c.hidden - unit;
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t row = c.batch * t / tiles, end = c.batch * (t + 1) / tiles;
            rows<G, ROWS>(c, (int)(end - row), panel, before + row * h_row, h_row, c.x + at * c.x_step + row * c.x_row,
                          c.cn + row * c.hidden, c.y + at * c.y_step + row * c.y_row, unit, left < VW ? (int)left : VW);
        }
    }
}

void copy_units(const Call& c, float* to, const float* from, int64_t from_row, int64_t first, int64_t last) {
    for (int64_t row = 0; row < c.batch; row++)
        memcpy(to + row * c.hidden + first, from + row * from_row + first, (size_t)(last - first) * sizeof(float));
}

void wait(const Progress* all, int threads, int64_t step) {
    for (int other = 0; other < threads; other++)
        for (int spins = 0; __atomic_load_n(&all[other].step, __ATOMIC_ACQUIRE) < step; spins++)
            if (spins > SPINS) sched_yield();          // its core may be somebody else's just now
}

void run(const Call& c, Progress* all, int me, int threads) {
    const int64_t blocks = blocks_of(c), from = blocks * me / threads, to = blocks * (me + 1) / threads;
    const int64_t first = from * VW, last = to * VW < c.hidden ? to * VW : c.hidden;
    if (c.gates == 4) copy_units(c, c.cn, c.c0, c.hidden, first, last);
    int64_t at = 0;
    for (int64_t t = 0; t < c.steps; t++) {
        at = c.reverse ? c.steps - 1 - t : t;
        c.gates == 4 ? step<4>(c, at, !t, from, to) : step<3>(c, at, !t, from, to);
        __atomic_store_n(&all[me].step, t + 1, __ATOMIC_RELEASE);
        wait(all, threads, t + 1);
    }
    copy_units(c, c.hn, c.y + at * c.y_step, c.y_row, first, last);
}

}  // namespace

// 1: these are not the weights that were packed, and nothing is written. With `packing`, packs them and runs nothing.
extern "C" int gnomon_kernel(const Call* given, int64_t packing) {
    const Call& c = *given;
    const int wanted = (int)(c.threads < MOST_THREADS ? c.threads : MOST_THREADS);
    Progress all[MOST_THREADS] = {};
    int other = 0;
#pragma omp parallel num_threads(wanted) if (wanted > 1)
    {
#pragma omp for schedule(static) reduction(| : other)
        for (int part = 0; part < DIGESTS; part++) {
            const uint64_t now = digest_of_part(c, part);
            if (packing) memcpy(c.packed + 2 * part, &now, sizeof now);
            other |= memcmp(c.packed + 2 * part, &now, sizeof now) != 0;
        }
        if (packing) {
#pragma omp for schedule(static)
            for (int64_t block = 0; block < blocks_of(c); block++) pack(c, block);
        } else if (!other) {
            run(c, all, omp_get_thread_num(), omp_get_num_threads());
        }
    }
    return other;
}
