// Products of rows of which most numbers are 0 (gnomon/compiler/kernels/live.py): out[r, n] = sum over the k of a list of x[r, k] w[k, n]
// + bias[n]. Weights have the outputs of each k beside each other, so that a k that is 0 in all rows is not read at all; the
// list says which comes next, and it is asked for some steps ahead.
#include "vector.h"
#include "memory.h"
#include <omp.h>

namespace {

constexpr int64_t AHEAD = 6;                           // steps of the list

struct Call {                                          // as LiveCall in live.py has it
    int64_t rows, n, k, live, relu, threads;
    const int64_t* list;
    const S* x; int64_t x_row;
    const S* w; int64_t w_k;
    const S* bias;                                     // or null
    S* out; int64_t out_row;
};

// R rows by V vectors of outputs from n.
template <int R, int V>
ALWAYS void chunk(const Call& c, const float* x, int64_t n) {
    F sum[R][V] = {};
    for (int64_t i = 0; i < c.live; i++) {
        const S* w = c.w + c.list[i] * c.w_k + n;
        if (i + AHEAD < c.live) {
            const char* next = (const char*)(c.w + c.list[i + AHEAD] * c.w_k + n);
            UNROLLED for (int64_t b = 0; b < V * VW * (int64_t)sizeof(S); b += 64) __builtin_prefetch(next + b);
        }
        F at[R];
        UNROLLED for (int r = 0; r < R; r++) at[r] = splat(x[i * R + r]);
        UNROLLED for (int v = 0; v < V; v++) {
            const F a = c.n - n - v * VW >= VW ? ld(w + v * VW) : ld(w + v * VW, (int)(c.n - n - v * VW));
            UNROLLED for (int r = 0; r < R; r++) sum[r][v] = sum[r][v] + a * at[r];
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) {
            const int64_t at = n + v * VW, left = c.n - at;
            F y = sum[r][v];
            if (c.bias) y = y + (left >= VW ? ld(c.bias + at) : ld(c.bias + at, (int)left));
            if (c.relu) y = maxi(y, F{});
            if (left >= VW) st(c.out + r * c.out_row + at, y);
            else st(c.out + r * c.out_row + at, y, (int)left);
        }
}

template <int R>
void all(const Call& c, const float* x) {
    constexpr int V = VW < 16 ? (R == 1 ? 8 : 2) : R == 1 ? 16 : R == 2 ? 8 : R <= 4 ? 4 : 2;
    const int64_t wide = V * VW, chunks = c.n / wide, rest = (c.n - chunks * wide + VW - 1) / VW;
#pragma omp parallel for schedule(static) num_threads((int)c.threads) if (c.threads > 1)
    for (int64_t i = 0; i < chunks + rest; i++) {
        if (i < chunks) chunk<R, V>(c, x, i * wide);
        else chunk<R, 1>(c, x, chunks * wide + (i - chunks) * VW);
    }
}

}  // namespace

// 1: there is no memory, or there are too many rows, and nothing is written
extern "C" int gnomon_kernel(const Call* given) {
    const Call& c = *given;
    float* x = (float*)aligned_alloc(64, (size_t)(c.rows * c.live + 32) / 16 * 64);
    if (!x || c.rows < 1 || c.rows > 8) { free(x); return 1; }
    for (int64_t i = 0; i < c.live; i++)
        for (int64_t r = 0; r < c.rows; r++) x[i * c.rows + r] = one(c.x[r * c.x_row + c.list[i]]);
    switch (c.rows) {
        case 1: all<1>(c, x); break;
        case 2: all<2>(c, x); break;
        case 3: all<3>(c, x); break;
        case 4: all<4>(c, x); break;
        case 5: all<5>(c, x); break;
        case 6: all<6>(c, x); break;
        case 7: all<7>(c, x); break;
        default: all<8>(c, x);
    }
    free(x);
    return 0;
}
