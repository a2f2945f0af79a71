// One direction of one layer of an LSTM or a GRU over all steps (gnomon/compiler/kernels/recurrent.py). What the inputs give is
// multiplied before, for all steps at once. Here the recurrent weights lie in panels of VW units with all their gates, so
// that a step makes the gates of those units in registers and goes on to the new state without leaving them. Each thread has
// the same panels in every step, and waits for the others between steps by spinning.
#include "vector.h"
#include "math.h"
#include "recurrent.h"
#include "digest.h"

namespace {

constexpr int DIGESTS = 16;
enum Mode { CHECK_AND_RUN, PACK, PACK_AND_RUN };

struct Call {                                          // as _RecurrentCall in recurrent.py has them
    int64_t gates, hidden, steps, batch, reverse, threads;
    int64_t x_step, x_row, y_step, y_row;              // numbers from one step, one row, to the next
    const S *weight; const float* bias; const S* x; const float *h0, *c0;  // weight (gates x hidden, hidden); bias may be null
    float* packed; S* y; float *hn, *cn;
    float *state;                                      // two steps of (batch, hidden), where y is no float; or null
    float *kept;                                       // (steps, batch, gates + 1, hidden) for the backward, or null
};

uint64_t digest_of_part(const Call& c, int part) {
    const int64_t n = c.gates * c.hidden * c.hidden, from = n * part / DIGESTS, to = n * (part + 1) / DIGESTS;
    return digest((const char*)(c.weight + from), (to - from) * (int64_t)sizeof(S));
}

ALWAYS int64_t blocks_of(const Call& c) { return (c.hidden + VW - 1) / VW; }
ALWAYS S* panels(const Call& c) { return (S*)(c.packed + 2 * DIGESTS); }

void pack(const Call& c, int64_t block) {
    const int64_t h = c.hidden, some = 32;             // of k: so many rows of the panel stay in the first cache
    S* to = panels(c) + block * h * c.gates * VW;
    for (int64_t start = 0; start < h; start += some) {
        const int64_t end = start + some < h ? start + some : h;
        for (int64_t gate = 0; gate < c.gates; gate++)
            for (int lane = 0; lane < VW; lane++) {
                const int64_t unit = block * VW + lane;
                const S* from = c.weight + (gate * h + unit) * h;
                for (int64_t k = start; k < end; k++) to[(k * c.gates + gate) * VW + lane] = unit < h ? from[k] : S{};
            }
    }
}

// One row of a tile at its place in every array.
struct Place { const S* x; float* cell; S* y; float *state, *kept; };

// R rows of one block of units in one step; h at the first row.
template <int G, int R>
void tile(const Call& c, const S* panel, const float* h, int64_t h_row, const Place& at, int64_t unit, int n) {
    constexpr int CHAINS = R == 1 ? 2 : 1;             // one row has too few sums to hide how long each takes
    const int64_t hidden = c.hidden;
    F sum[CHAINS][R][G] = {};
    if (c.bias)
        UNROLLED for (int g = 0; g < G; g++)
            UNROLLED for (int r = 0; r < R; r++) sum[0][r][g] = load(c.bias + g * hidden + unit, n);
    int64_t k = 0;
    for (; k + CHAINS <= hidden; k += CHAINS)
        UNROLLED for (int s = 0; s < CHAINS; s++) {
            const S* w = panel + (k + s) * G * VW;
            UNROLLED for (int g = 0; g < G; g++) {
                const F v = ld(w + g * VW);
                UNROLLED for (int r = 0; r < R; r++) sum[s][r][g] = sum[s][r][g] + v * h[r * h_row + k + s];
            }
        }
    for (; k < hidden; k++)
        UNROLLED for (int g = 0; g < G; g++)
            UNROLLED for (int r = 0; r < R; r++) sum[0][r][g] = sum[0][r][g] + ld(panel + (k * G + g) * VW) * h[r * h_row + k];
    UNROLLED for (int r = 0; r < R; r++) {
        const S* in = at.x + r * c.x_row + unit;
        F v[G];
        UNROLLED for (int g = 0; g < G; g++) {
            v[g] = sum[0][r][g];
            UNROLLED for (int s = 1; s < CHAINS; s++) v[g] = v[g] + sum[s][r][g];
        }
        F out, keep[G + 1];
        if (G == 4) {
            const F i = vsigmoid(v[0] + load(in, n)), f = vsigmoid(v[1] + load(in + hidden, n));
            const F g = vtanh(v[2] + load(in + 2 * hidden, n)), o = vsigmoid(v[3 % G] + load(in + 3 * hidden, n));
            const F now = f * load(at.cell + r * hidden + unit, n) + i * g;
            store(at.cell + r * hidden + unit, now, n);
            out = o * vtanh(now);
            keep[0] = i, keep[1] = f, keep[2] = g, keep[3] = o, keep[G] = now;
        } else {
            const F reset = vsigmoid(v[0] + load(in, n)), update = vsigmoid(v[1] + load(in + hidden, n));
            const F fresh = vtanh(load(in + 2 * hidden, n) + reset * v[2]);
            out = (load(h + r * h_row + unit, n) - fresh) * update + fresh;
            keep[0] = reset, keep[1] = update, keep[2] = fresh, keep[G] = v[2];
        }
        store(at.y + r * c.y_row + unit, out, n);
        if (at.state) store(at.state + r * hidden + unit, out, n);
        if (at.kept)
            UNROLLED for (int g = 0; g <= G; g++) store(at.kept + (r * (G + 1) + g) * hidden + unit, keep[g], n);
    }
}

template <int G, int R>
void rows(const Call& c, int count, const S* panel, const float* h, int64_t h_row, const Place& at, int64_t unit, int n) {
    if constexpr (R > 1)
        if (count < R) return rows<G, R - 1>(c, count, panel, h, h_row, at, unit, n);
    tile<G, R>(c, panel, h, h_row, at, unit, n);
}

ALWAYS float* state_of(const Call& c, int64_t number) { return c.state ? c.state + number % 2 * c.batch * c.hidden : nullptr; }

template <int G>
void step(const Call& c, int64_t number, int64_t at, int64_t from, int64_t to) {
    const float* before = !number ? c.h0 : c.state ? state_of(c, number - 1) : (const float*)c.y + (at + (c.reverse ? 1 : -1)) * c.y_step;
    const int64_t h_row = !number || c.state ? c.hidden : c.y_row;
    const int64_t tiles = (c.batch + ROWS - 1) / ROWS;
    for (int64_t block = from; block < to; block++) {
        const S* panel = panels(c) + block * c.hidden * G * VW;
        const int64_t unit = block * VW;
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t row = c.batch * t / tiles, end = c.batch * (t + 1) / tiles;
            const Place place = {
                c.x + at * c.x_step + row * c.x_row, c.cn + row * c.hidden, c.y + at * c.y_step + row * c.y_row,
                c.state ? state_of(c, number) + row * c.hidden : nullptr,
                c.kept ? c.kept + (at * c.batch + row) * (G + 1) * c.hidden : nullptr,
            };
            rows<G, ROWS>(c, (int)(end - row), panel, before + row * h_row, h_row, place, unit, within(c.hidden - unit));
        }
    }
}

void run(const Call& c, Progress* all, int me, int threads, bool packing) {
    const int64_t blocks = blocks_of(c), from = blocks * me / threads, to = blocks * (me + 1) / threads;
    const int64_t first = from * VW, last = to * VW < c.hidden ? to * VW : c.hidden;
    if (packing)
        for (int64_t block = from; block < to; block++) pack(c, block);
    const size_t bytes = (size_t)(last - first) * sizeof(float);
    for (int64_t row = 0; c.gates == 4 && row < c.batch; row++)
        memcpy(c.cn + row * c.hidden + first, c.c0 + row * c.hidden + first, bytes);
    int64_t at = 0;
    for (int64_t t = 0; t < c.steps; t++) {
        at = c.reverse ? c.steps - 1 - t : t;
        c.gates == 4 ? step<4>(c, t, at, from, to) : step<3>(c, t, at, from, to);
        __atomic_store_n(&all[me].step, t + 1, __ATOMIC_RELEASE);
        wait(all, threads, t + 1);
    }
    for (int64_t row = 0; row < c.batch; row++) {
        const float* end = c.state ? state_of(c, c.steps - 1) + row * c.hidden : (const float*)c.y + at * c.y_step + row * c.y_row;
        memcpy(c.hn + row * c.hidden + first, end + first, bytes);
    }
}

}  // namespace

// 1: these are not the weights that were packed, and nothing is written. PACK runs nothing. PACK_AND_RUN keeps no digests: for
// weights that are others in every call.
extern "C" int gnomon_kernel(const Call* given, int64_t mode) {
    const Call& c = *given;
    const int wanted = (int)(c.threads < MOST_THREADS ? c.threads : MOST_THREADS);
    Progress all[MOST_THREADS] = {};
    int other = 0;
#pragma omp parallel num_threads(wanted) if (wanted > 1)
    {
        if (mode != PACK_AND_RUN) {
#pragma omp for schedule(static) reduction(| : other)
            for (int part = 0; part < DIGESTS; part++) {
                const uint64_t now = digest_of_part(c, part);
                if (mode == PACK) memcpy(c.packed + 2 * part, &now, sizeof now);
                other |= memcmp(c.packed + 2 * part, &now, sizeof now) != 0;
            }
        }
        if (mode == PACK) {
#pragma omp for schedule(static)
            for (int64_t block = 0; block < blocks_of(c); block++) pack(c, block);
        } else if (!other) {
            run(c, all, omp_get_thread_num(), omp_get_num_threads(), mode == PACK_AND_RUN);
        }
    }
    return other;
}
