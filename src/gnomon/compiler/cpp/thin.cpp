// A linear layer of few rows, or a convolution that gives few positions (gnomon/compiler/kernels/thin.py): out[p, n] = after(sum over
// k of w[n, k] x[p, k] + bias[n]), after: ReLU or nothing. Nearly all memory is weights, which are read once, as they lie, a
// vector of k at a time; nothing of them is turned or packed. A convolution's x is gathered first, k beside each other.
#include "vector.h"
#include <omp.h>

namespace {


struct Call {                                           // as ThinCall in thin.py has it
    int64_t m, n, k, relu, parallel;                    // m: positions
    const float* x; int64_t x_row;                      // of a linear layer: from one row to the next
    int64_t gathered, channels, high, wide;             // of a convolution: its input
    int64_t tall, across, step_h, step_w, pad_h, pad_w, apart_h, apart_w;   // its kernel
    int64_t out_h, out_w, x_b, x_c, x_h, x_w;           // its output, strides of its input
    const float* w; int64_t w_n, w_k;                   // one of them 1; of a convolution and where both are, w_k
    const float* bias;                                  // or null
    float* out; int64_t block, out_block, out_n, out_p; // of positions, `block` lie out_p apart, then out_block to the next
};

// Taps of `size` that fall inside, where the first falls at `at`.
ALWAYS void inside(int64_t at, int64_t apart, int64_t size, int64_t limit, int64_t* from, int64_t* to) {
    int64_t i = 0, j = size;
    while (i < size && at + i * apart < 0) i++;
    while (j > i && at + (j - 1) * apart >= limit) j--;
    *from = i, *to = j;
}

void gather(const Call& c, float* to) {
    const int64_t each = c.tall * c.across;
    for (int64_t p = 0; p < c.m; p++, to += c.k) {
        const int64_t h = p / c.out_w % c.out_h * c.step_h - c.pad_h, w = p % c.out_w * c.step_w - c.pad_w;
        const float* x = c.x + p / (c.out_h * c.out_w) * c.x_b + h * c.x_h + w * c.x_w;
        int64_t i0, i1, j0, j1;
        inside(h, c.apart_h, c.tall, c.high, &i0, &i1);
        inside(w, c.apart_w, c.across, c.wide, &j0, &j1);
        if (i0 || j0 || i1 < c.tall || j1 < c.across) memset(to, 0, (size_t)c.k * sizeof(float));
        const int64_t down = c.apart_h * c.x_h, right = c.apart_w * c.x_w;
        for (int64_t channel = 0; channel < c.channels; channel++)
            for (int64_t i = i0; i < i1; i++) {
                const float* from = x + channel * c.x_c + i * down;
                float* row = to + channel * each + i * c.across;
                for (int64_t j = j0; j < j1; j++) row[j] = from[j * right];
            }
    }
}

// N outputs from n at P positions from p.
template <int N, int P>
ALWAYS void tile(const Call& c, const float* x, int64_t x_row, int64_t n, int64_t p) {
    F sum[VW] = {};
    const float* w = c.w + n * c.w_n;
    int64_t k = 0;
    for (; k + VW <= c.k; k += VW) {
        F at[P];
        UNROLLED for (int q = 0; q < P; q++) at[q] = ld(x + q * x_row + k);
        UNROLLED for (int i = 0; i < N; i++) {
            const F a = ld(w + i * c.w_n + k);
            UNROLLED for (int q = 0; q < P; q++) sum[i * P + q] = sum[i * P + q] + a * at[q];
        }
    }
    if (const int left = (int)(c.k - k)) {
        F at[P];
        UNROLLED for (int q = 0; q < P; q++) at[q] = ld(x + q * x_row + k, left);
        UNROLLED for (int i = 0; i < N; i++) {
            const F a = ld(w + i * c.w_n + k, left);
            UNROLLED for (int q = 0; q < P; q++) sum[i * P + q] = sum[i * P + q] + a * at[q];
        }
    }
    transpose(sum);
    F whole = sum[0];
    UNROLLED for (int i = 1; i < VW; i++) whole = whole + sum[i];
    UNROLLED for (int i = 0; i < N; i++) {
        const float bias = c.bias ? c.bias[n + i] : 0.0f;
        UNROLLED for (int q = 0; q < P; q++) {
            const float v = whole[i * P + q] + bias;
            c.out[(p + q) / c.block * c.out_block + (p + q) % c.block * c.out_p + (n + i) * c.out_n] = c.relu && v < 0.0f ? 0.0f : v;
        }
    }
}

template <int P>
void outputs(const Call& c, const float* x, int64_t x_row, int64_t from, int64_t to, int64_t p) {
    constexpr int N = VW / P < 8 ? VW / P : 8;
    int64_t n = from;
    for (; n + N <= to; n += N) tile<N, P>(c, x, x_row, n, p);
    for (; n < to; n++) tile<1, P>(c, x, x_row, n, p);
}

void work(const Call& c, const float* x, int64_t x_row, int64_t from, int64_t to) {
    int64_t p = 0;
    for (; p + 4 <= c.m; p += 4) outputs<4>(c, x + p * x_row, x_row, from, to, p);
    if (c.m - p == 3) outputs<3>(c, x + p * x_row, x_row, from, to, p);
    if (c.m - p == 2) outputs<2>(c, x + p * x_row, x_row, from, to, p);
    if (c.m - p == 1) outputs<1>(c, x + p * x_row, x_row, from, to, p);
}

// P rows from p by a vector of outputs from n, of weights that have the outputs of each k beside each other.
template <int P>
ALWAYS void beside(const Call& c, int64_t n, int64_t p) {
    const int left = (int)(c.n - n < VW ? c.n - n : VW);
    const float *x = c.x + p * c.x_row, *w = c.w + n;
    F sum[P] = {};
    for (int64_t k = 0; k < c.k; k++, w += c.w_k) {
        const F a = left == VW ? ld(w) : ld(w, left);
        UNROLLED for (int q = 0; q < P; q++) sum[q] = sum[q] + a * x[q * c.x_row + k];
    }
    const F bias = c.bias ? ld(c.bias + n, left) : F{};
    UNROLLED for (int q = 0; q < P; q++) {
        const F v = sum[q] + bias;
        st(c.out + (p + q) * c.out_p + n, c.relu ? maxi(v, F{}) : v, left);
    }
}

template <int P>
void beside(int64_t rows, const Call& c, int64_t n, int64_t p) {
    if constexpr (P > 1)
        if (rows < P) return beside<P - 1>(rows, c, n, p);
    beside<P>(c, n, p);
}

void all_beside(const Call& c, int64_t from, int64_t to) {
    for (int64_t n = from; n < to; n += VW)
        for (int64_t p = 0; p < c.m; p += 8) beside<8>(c.m - p, c, n, p);
}

constexpr int64_t ON_STACK = 8192;                      // floats

}  // namespace

// 1: there is no memory, and nothing is written
extern "C" int gnomon_kernel(const Call* given) {
    const Call& c = *given;
    float small[ON_STACK], *room = small;
    if (c.gathered) {
        if (c.m * c.k > ON_STACK) room = (float*)malloc((size_t)(c.m * c.k) * sizeof(float));
        if (!room) return 1;
        gather(c, room);
    }
    const float* x = c.gathered ? room : c.x;
    const int64_t x_row = c.gathered ? c.k : c.x_row, blocks = (c.n + 31) / 32;
    const auto block = [&](int64_t i) {
        const int64_t to = i * 32 + 32 < c.n ? i * 32 + 32 : c.n;
        if (c.w_k == 1) work(c, x, x_row, i * 32, to);
        else all_beside(c, i * 32, to);
    };
    if (!c.parallel) {
        for (int64_t i = 0; i < blocks; i++) block(i);
    } else {
#pragma omp parallel for schedule(static)
        for (int64_t i = 0; i < blocks; i++) block(i);
    }
    if (room != small) free(room);
    return 0;
}
