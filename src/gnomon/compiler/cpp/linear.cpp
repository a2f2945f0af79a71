// A linear layer, or a convolution of one pixel (gnomon/compiler/kernels/linear.py): out[m, n] = after(sum over k of x[m, k] w[n, k]
// + bias[n]), after: batch norm, a sum, ReLU, or what `Ended<0>` makes of each number. Weights are read as they lie: a panel of
// VECTORS of them is turned in cache, so that a tile of TILE rows has its sums in registers along all k. Either side may also
// lie turned, as in a layer's backward; with LIES only w. With NORMED, rows are normed as they are copied, so that no norm goes to memory; with
// RELUS they pass a ReLU there.
#include "linear.h"

namespace {

#ifdef LIES
constexpr bool TURNS = false;                          // x_k is 1, and nothing is compiled for another
#else
constexpr bool TURNS = true;
#endif
constexpr bool FILLS = ROWS > 1;                       // whether the first block of rows may make a panel on its way
constexpr int V = VECTORS;
constexpr int64_t WIDE = V * VW;
#ifndef TURNED
#define TURNED (1 << 19)                               // bytes of weights that are turned at once, for L2
#endif

// What all threads do: `all` is shared, `room` each thread's own.
template <bool ALONG>
void work(const Call& c, float* after, float* all, float* room, bool once, bool copies) {
    const int64_t panels = (c.n + WIDE - 1) / WIDE, blocks = (c.m + ROWS - 1) / ROWS, size = c.k * WIDE;
    const int64_t x_row = copies ? c.k + 16 : c.x_row;
    if (once) {
#pragma omp for schedule(static)
        for (int64_t p = 0; p < panels; p++) turn<V>(c, p * WIDE, all + p * size);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < blocks; i++) {
            const int64_t m = start(c, blocks, i), rows = start(c, blocks, i + 1) - m;
            const float* x = copies ? copied(c, m, rows, room) : c.x + m * x_row;
            for (int64_t p = 0; p < panels; p++)
                tiles<0, V, ROWS, ALONG>(rows, c, x, x_row, all + p * size, after, m, p * WIDE, Next{});
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
        const bool fills = FILLS && !ALONG && c.w_k != 1 && blocks > 1 && (p + 1) * WIDE <= c.n;
        if (!fills) turn<V>(c, p * WIDE, room);
        const int64_t ahead = (p + 1) * WIDE, left = ahead < c.n ? c.n - ahead : 0, wide = left < WIDE ? left : WIDE;
        const bool plain = c.w_k == 1;
        const int64_t count = plain ? wide : left ? LINE : 0, step = plain ? c.w_n : c.w_k;
        for (int64_t i = 0; i < blocks; i++) {
            const int64_t m = start(c, blocks, i), rows = start(c, blocks, i + 1) - m;
            const int64_t a = count * i / blocks, b = count * (i + 1) / blocks;
            const Next next{c.w + ahead * c.w_n + a * step, b - a, step, c.w_k};
            const float* x = copies ? all + i * each : c.x + m * x_row;
            if (fills && !i) tiles<0, V, ROWS, ALONG, FILLS && !ALONG>(rows, c, x, x_row, room, after, m, p * WIDE, next);
            else tiles<0, V, ROWS, ALONG>(rows, c, x, x_row, room, after, m, p * WIDE, next);
        }
    }
}

}  // namespace

// 1: there is no memory, or blocks are smaller than what is compiled, or a norm is not finite: what is written is to be
// written again
extern "C" int gnomon_kernel(const Call* given) {
    if (!TURNS && given->x_k != 1) return 1;
    Call all_threads = *given;
    int refused = 0;
    all_threads.refused = &refused;
    all_threads.out_row = all_threads.n;
    all_threads.first = 0;
    if (!all_threads.threads) all_threads.threads = omp_get_max_threads();
    const Call& c = all_threads;
    const int64_t panels = (c.n + WIDE - 1) / WIDE, blocks = (c.m + ROWS - 1) / ROWS, size = c.k * WIDE;
    if (c.m < blocks * LEAST) return 1;                // `start` deals rows evenly, so a block has m / blocks at least
    const bool along = c.x_k != 1, copies = NORMS || FRONT || along || (ROWS > CLOSE && c.x_row * 4 % TOGETHER == 0) || c.across < c.m;
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
        if constexpr (TURNS) {
            if (along) work<true>(c, after, all, room, once, copies);
            else work<false>(c, after, all, room, once, copies);
        } else {
            work<false>(c, after, all, room, once, copies);
        }
    }
    free(after);
    return refused;
}
