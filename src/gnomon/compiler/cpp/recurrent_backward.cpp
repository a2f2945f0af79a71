// The backward of one direction of one layer of an LSTM or a GRU over all steps (gnomon/compiler/kernels/recurrent_training.py), the
// last step first: gradients of the gates of every step and of the first states. What is left, gradients of inputs and
// weights, are products over all steps at once, and the library's. Each thread has the same units in every step: it makes
// their gates' gradients, waits until all have, and multiplies these by its part of the weights, GROUP vectors of units that
// lie beside each other for all gates.
#include "vector.h"
#include "math.h"
#include "recurrent.h"

namespace {

constexpr int GROUP = 4, WIDE = GROUP * VW;

struct Call {                                          // as _Backward in recurrent_training.py has them
    int64_t gates, hidden, steps, batch, reverse, threads;
    int64_t y_step, y_row, dy_step, dy_row;
    const S *weight, *y, *dy; const float *h0, *c0, *kept;
    S* packed;
    float *d_gates, *d_state;                          // (steps, batch, gates, hidden), as inputs and as states see them
    float *dh, *dc;                                    // (batch, hidden), given for the last states, left for the first
};

ALWAYS int64_t groups_of(const Call& c) { return (c.hidden + WIDE - 1) / WIDE; }

void pack(const Call& c, int64_t group) {
    const int64_t all = c.gates * c.hidden, unit = group * WIDE, left = c.hidden - unit, n = left < WIDE ? left : WIDE;
    S* to = c.packed + group * all * WIDE;
    for (int64_t j = 0; j < all; j++) {
        memcpy(to + j * WIDE, c.weight + j * c.hidden + unit, (size_t)n * sizeof(S));
        for (int64_t k = n; k < WIDE; k++) to[j * WIDE + k] = S{};
    }
}

// Gradients of the gates of n units of one row in one step; leaves in dh what goes past the recurrent product.
template <int G>
ALWAYS void gates(const Call& c, int64_t at, bool first, int64_t row, int64_t unit, int n) {
    const int64_t h = c.hidden, before = at + (c.reverse ? 1 : -1);
    const float* kept = c.kept + (at * c.batch + row) * (G + 1) * h + unit;
    float *to = c.d_gates + (at * c.batch + row) * G * h + unit, *dh = c.dh + row * h + unit, *dc = c.dc + row * h + unit;
    const F grad = load(dh, n) + load(c.dy + at * c.dy_step + row * c.dy_row + unit, n);
    if (G == 4) {
        const F i = load(kept, n), f = load(kept + h, n), g = load(kept + 2 * h, n), o = load(kept + 3 * h, n);
        const F out = vtanh(load(kept + 4 * h, n));
        const F cell = first ? load(c.c0 + row * h + unit, n) : load(c.kept + (before * c.batch + row) * (G + 1) * h + 4 * h + unit, n);
        const F d = load(dc, n) + grad * o * (1.0f - out * out);
        store(to, d * g * i * (1.0f - i), n);
        store(to + h, d * cell * f * (1.0f - f), n);
        store(to + 2 * h, d * i * (1.0f - g * g), n);
        store(to + 3 * h, grad * out * o * (1.0f - o), n);
        store(dc, d * f, n);
        store(dh, splat(0.0f), n);
    } else {
        const F reset = load(kept, n), update = load(kept + h, n), fresh = load(kept + 2 * h, n), made = load(kept + 3 * h, n);
        const F last = first ? load(c.h0 + row * h + unit, n) : load(c.y + before * c.y_step + row * c.y_row + unit, n);
        const F d = grad * (1.0f - update) * (1.0f - fresh * fresh);
        const F d_reset = d * made * reset * (1.0f - reset), d_update = grad * (last - fresh) * update * (1.0f - update);
        float* state = c.d_state + (at * c.batch + row) * G * h + unit;
        store(to, d_reset, n), store(to + h, d_update, n), store(to + 2 * h, d, n);
        store(state, d_reset, n), store(state + h, d_update, n), store(state + 2 * h, d * reset, n);
        store(dh, grad * update, n);
    }
}

// R rows of one group of units: adds the product of the gates' gradients d and the weights to dh.
template <int R>
void tile(const Call& c, const S* panel, const float* d, float* dh, int64_t unit) {
    constexpr int CHAINS = R == 1 ? 2 : 1;
    const int64_t all = c.gates * c.hidden;
    F sum[CHAINS][R][GROUP] = {};
    int64_t j = 0;
    for (; j + CHAINS <= all; j += CHAINS)
        UNROLLED for (int s = 0; s < CHAINS; s++)
            UNROLLED for (int g = 0; g < GROUP; g++) {
                const F w = ld(panel + (j + s) * WIDE + g * VW);
                UNROLLED for (int r = 0; r < R; r++) sum[s][r][g] = sum[s][r][g] + w * d[r * all + j + s];
            }
    for (; j < all; j++)
        UNROLLED for (int g = 0; g < GROUP; g++)
            UNROLLED for (int r = 0; r < R; r++) sum[0][r][g] = sum[0][r][g] + ld(panel + j * WIDE + g * VW) * d[r * all + j];
    UNROLLED for (int r = 0; r < R; r++)
        UNROLLED for (int g = 0; g < GROUP; g++) {
            const int64_t left = c.hidden - unit - g * VW;
            if (left <= 0) continue;
            float* to = dh + r * c.hidden + unit + g * VW;
            F v = sum[0][r][g];
            UNROLLED for (int s = 1; s < CHAINS; s++) v = v + sum[s][r][g];
            store(to, load(to, within(left)) + v, within(left));
        }
}

template <int R>
void rows(const Call& c, int count, const S* panel, const float* d, float* dh, int64_t unit) {
    if constexpr (R > 1)
        if (count < R) return rows<R - 1>(c, count, panel, d, dh, unit);
    tile<R>(c, panel, d, dh, unit);
}

void product(const Call& c, int64_t at, int64_t from, int64_t to) {
    const int64_t tiles = (c.batch + ROWS - 1) / ROWS, all = c.gates * c.hidden;
    for (int64_t group = from; group < to; group++)
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t row = c.batch * t / tiles, end = c.batch * (t + 1) / tiles;
            const float* d = c.d_state + (at * c.batch + row) * all;
            rows<ROWS>(c, (int)(end - row), c.packed + group * all * WIDE, d, c.dh + row * c.hidden, group * WIDE);
        }
}

void run(const Call& c, Progress* all, int me, int threads) {
    const int64_t groups = groups_of(c), from = groups * me / threads, to = groups * (me + 1) / threads;
    const int64_t last = to * WIDE < c.hidden ? to * WIDE : c.hidden;
    for (int64_t group = from; group < to; group++) pack(c, group);
    for (int64_t t = c.steps - 1, done = 1; t >= 0; t--, done++) {
        const int64_t at = c.reverse ? c.steps - 1 - t : t;
        for (int64_t row = 0; row < c.batch; row++)
            for (int64_t unit = from * WIDE; unit < last; unit += VW) {
                const int n = within(last - unit);
                c.gates == 4 ? gates<4>(c, at, !t, row, unit, n) : gates<3>(c, at, !t, row, unit, n);
            }
        __atomic_store_n(&all[me].step, done, __ATOMIC_RELEASE);
        wait(all, threads, done);
        product(c, at, from, to);
    }
}

}  // namespace

extern "C" int gnomon_kernel(const Call* given) {
    const Call& c = *given;
    const int wanted = (int)(c.threads < MOST_THREADS ? c.threads : MOST_THREADS);
    Progress all[MOST_THREADS] = {};
#pragma omp parallel num_threads(wanted) if (wanted > 1)
    run(c, all, omp_get_thread_num(), omp_get_num_threads());
    return 0;
}
