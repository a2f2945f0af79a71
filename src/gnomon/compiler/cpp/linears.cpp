// STAGES linear layers behind each other as one kernel (gnomon/compiler/kernels/linears.py): a block of TILE rows goes through all of
// them before the next begins, so that what lies between two layers stays in the first caches and never goes to memory. All
// weights are turned into panels once a call, and stay in the second cache. WIDTHS: vectors of a panel of each layer, 1 where
// it has few outputs. With NORMED, rows are normed as they are copied.
#include "linear.h"

namespace {

constexpr int WIDTH[] = {WIDTHS};                      // of each layer

struct Layer {                                         // as linears.py has them, the fields of each behind the last's
    int64_t n, k;
    const float* w; int64_t w_n, w_k;                  // one of them 1
    const float* bias;                                 // or null
    const float* other[OTHERS]; int64_t other_row[OTHERS];
};
struct Layers {
    int64_t m, threads;                                // threads: 0 for all
    const float* x; int64_t x_row;                     // numbers of a row lie beside each other
    const float *norm_gamma, *norm_beta; double norm_eps;      // of the rows of x, or null
    float* out;
    Layer layers[STAGES];
};
struct Stage { Call call; float *after, *panels; };

ALWAYS int64_t padded(int64_t n) { return (n + 15) / 16 * 16 + 16; }   // floats from row to row, never a page apart
ALWAYS int64_t wide(int s) { return WIDTH[s] * VW; }
ALWAYS int64_t panels(const Call& c, int s) { return (c.n + wide(s) - 1) / wide(s); }

// All panels of a layer, by all threads.
template <int S> void turned(const Stage* stages) {
    const Stage& s = stages[S];
#pragma omp for schedule(static) nowait
    for (int64_t p = 0; p < panels(s.call, S); p++) turn<WIDTH[S]>(s.call, p * wide(S), s.panels + p * s.call.k * wide(S));
    if constexpr (S + 1 < STAGES) turned<S + 1>(stages);
}

// `rows` rows from m through the layers from S on; x: what they begin with, room: for what lies between two layers.
template <int S> void through(const Stage* stages, const float* x, int64_t x_row, float* room, float* other, int64_t m, int64_t rows) {
    Call c = stages[S].call;
    if (S + 1 < STAGES) {
        c.out = room;
        c.out_row = padded(c.n);
        c.first = m;
    }
    for (int64_t p = 0; p < panels(c, S); p++)
        tiles<S, WIDTH[S], ROWS, false>(
            rows, c, x, x_row, stages[S].panels + p * c.k * wide(S), stages[S].after, m, p * wide(S), Next{});
    if constexpr (S + 1 < STAGES) through<S + 1>(stages, room, c.out_row, other, room, m, rows);
}

}  // namespace

// 1: there is no memory, or blocks are smaller than what is compiled, or a norm is not finite, or what follows has no answer:
// what is written is to be written again
extern "C" int gnomon_kernel(const Layers* given) {
    if (given->m < (given->m + ROWS - 1) / ROWS * LEAST) return 1;
    int refused = 0;
    const int threads = given->threads ? (int)given->threads : omp_get_max_threads();
    Stage stages[STAGES] = {};
    int64_t most = given->layers[0].k, floats = 0;
    for (int s = 0; s < STAGES; s++) {
        const Layer& layer = given->layers[s];
        Call& c = stages[s].call;
        c.m = given->m; c.n = layer.n; c.k = layer.k;
        c.w = layer.w; c.w_n = layer.w_n; c.w_k = layer.w_k; c.bias = layer.bias;
        c.out = given->out; c.out_row = layer.n; c.refused = &refused;
        memcpy(c.other, layer.other, sizeof c.other);
        memcpy(c.other_row, layer.other_row, sizeof c.other_row);
        most = layer.n > most ? layer.n : most;
        floats += panels(c, s) * c.k * wide(s) + 2 * (c.n + wide(s)) + 32;
    }
    Call& first = stages[0].call;
    first.x = given->x; first.across = given->m; first.x_row = given->x_row; first.x_k = 1;
    first.norm_gamma = given->norm_gamma; first.norm_beta = given->norm_beta; first.norm_eps = given->norm_eps;
    const int64_t own = ROWS * padded(most);
    float* all = (float*)aligned_alloc(64, (size_t)(floats + 3 * threads * own + 15) / 16 * 64);
    if (!all) return 1;
    float* place = all;
    for (int s = 0; s < STAGES; s++) {
        const Call& c = stages[s].call;
        stages[s].panels = place;
        place += panels(c, s) * c.k * wide(s);
        stages[s].after = place;
        place += (2 * (c.n + wide(s)) + 15) / 16 * 16;
        factors(c, stages[s].after, stages[s].after + c.n + wide(s));
    }
    const int64_t blocks = (given->m + ROWS - 1) / ROWS;
    const bool copies = NORMS || given->x_row * 4 % TOGETHER == 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        float* room = place + 3 * omp_get_thread_num() * own;
        turned<0>(stages);
#pragma omp barrier
#pragma omp for schedule(static)
        for (int64_t i = 0; i < blocks; i++) {
            const int64_t m = start(first, blocks, i), rows = start(first, blocks, i + 1) - m;
            const float* x = copies ? copied(first, m, rows, room) : first.x + m * first.x_row;
            through<0>(stages, x, copies ? first.k + 16 : first.x_row, room + own, room + 2 * own, m, rows);
        }
    }
    free(all);
    return refused;
}
