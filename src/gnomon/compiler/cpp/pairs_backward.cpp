// The gradient of vectors of which pairs were multiplied (gnomon/compiler/kernels/pairs_backward.py): out[a] = sum over b of
// G[a, b] right[b] + G[b, a] left[b], where G has each pair's gradient at its place and is never in memory as a whole.
// Of bfloat16 a sample's vectors are made floats in cache first, and a sum is rounded once.
#include "vector.h"
#include "memory.h"

namespace {

constexpr int ROWS = VW == 16 ? 8 : 4;                 // of a tile, beside two vectors of the depth

struct Call {                                          // as _PairsBackwardCall in pairs_backward.py has them
    int64_t batch, rows, depth, count, parallel;
    const S* grad; int64_t grad_b, grad_k;
    const int64_t *i; int64_t i_step; const int64_t* j; int64_t j_step;
    const S* right; int64_t right_b, right_r;          // numbers from one sample, vector to the next
    const S* left; int64_t left_b, left_r;
    S* out;
};
constexpr bool FLOATS = sizeof(S) == sizeof(float);

// R rows of factors by the vectors x, added to `to` or put there.
template <int R, int V>
ALWAYS void tile(const Call& c, const float* factors, const float* x, int64_t x_r, float* to, bool add) {
    F sum[R][V] = {};
    for (int64_t b = 0; b < c.rows; b++)
        UNROLLED for (int v = 0; v < V; v++) {
            const F one = ld(x + b * x_r + v * VW);
            UNROLLED for (int r = 0; r < R; r++) sum[r][v] = sum[r][v] + one * factors[r * c.rows + b];
        }
    UNROLLED for (int r = 0; r < R; r++)
        UNROLLED for (int v = 0; v < V; v++) {
            float* p = to + r * c.depth + v * VW;
            st(p, add ? sum[r][v] + ld(p) : sum[r][v]);
        }
}

template <int R>
ALWAYS void rows(const Call& c, const float* factors, const float* x, int64_t x_r, float* to, bool add) {
    int64_t d = 0;
    for (; d + 2 * VW <= c.depth; d += 2 * VW) tile<R, 2>(c, factors, x + d, x_r, to + d, add);
    for (; d + VW <= c.depth; d += VW) tile<R, 1>(c, factors, x + d, x_r, to + d, add);
    for (; d < c.depth; d++)
        for (int r = 0; r < R; r++) {
            float sum = 0.0f;
            for (int64_t b = 0; b < c.rows; b++) sum += factors[r * c.rows + b] * x[b * x_r + d];
            to[r * c.depth + d] = add ? to[r * c.depth + d] + sum : sum;
        }
}

// The last rows, fewer than a tile has.
template <int R>
void rest(const Call& c, int64_t count, const float* factors, const float* x, int64_t x_r, float* to, bool add) {
    if constexpr (R > 1)
        if (count < R) return rest<R - 1>(c, count, factors, x, x_r, to, add);
    rows<R>(c, factors, x, x_r, to, add);
}

void product(const Call& c, const float* factors, const float* x, int64_t x_r, float* to, bool add) {
    int64_t a = 0;
    for (; a + ROWS <= c.rows; a += ROWS) rows<ROWS>(c, factors + a * c.rows, x, x_r, to + a * c.depth, add);
    if (a < c.rows) rest<ROWS - 1>(c, c.rows - a, factors + a * c.rows, x, x_r, to + a * c.depth, add);
}

// Where a pair lies in G and in its transpose; 1 where an index is outside.
int places(const Call& c, int32_t* at, int32_t* turned) {
    for (int64_t k = 0; k < c.count; k++) {
        int64_t i = c.i[k * c.i_step], j = c.j[k * c.j_step];
        if (i < -c.rows || i >= c.rows || j < -c.rows || j >= c.rows) return 1;
        i += i < 0 ? c.rows : 0;
        j += j < 0 ? c.rows : 0;
        at[k] = (int32_t)(i * c.rows + j);
        turned[k] = (int32_t)(j * c.rows + i);
    }
    return 0;
}

// Vectors as floats: where they lie, or copied.
struct Side { const float* p; int64_t r; };
ALWAYS Side side(const Call& c, const S* x, int64_t r, float* room) {
    if (FLOATS) return {(const float*)x, r};
    for (int64_t row = 0; row < c.rows; row++) widen(x + row * r, room + row * c.depth, c.depth);
    return {room, c.depth};
}

// Floats that a thread needs: of both factors, and of one side's vectors and the sums, where S is no float.
int64_t floats(const Call& c) { return 2 * c.rows * (c.rows + (FLOATS ? 0 : c.depth)); }

void sample(const Call& c, int64_t n, const int32_t* at, const int32_t* turned, float* room) {
    float *first = room, *other = first + c.rows * c.rows, *copied = other + c.rows * c.rows, *sums = copied + c.rows * c.depth;
    const S *grad = c.grad + n * c.grad_b, *right = c.right + n * c.right_b, *left = c.left + n * c.left_b;
    const size_t bytes = (size_t)(c.rows * c.rows) * sizeof(float);
    const bool same = c.right == c.left && c.right_b == c.left_b && c.right_r == c.left_r;
    float* second = same ? first : other;              // of the same vectors both factors are added first
    memset(first, 0, bytes);
    if (!same) memset(other, 0, bytes);
    for (int64_t k = 0; k < c.count; k++) {
        const float g = one(grad[k * c.grad_k]);
        first[at[k]] += g;
        second[turned[k]] += g;
    }
    S* out = c.out + n * c.rows * c.depth;
    float* to = FLOATS ? (float*)out : sums;
    Side x = side(c, right, c.right_r, copied);
    product(c, first, x.p, x.r, to, false);
    if (!same) {
        x = side(c, left, c.left_r, copied);
        product(c, other, x.p, x.r, to, true);
    }
    if (!FLOATS) narrow(sums, out, c.rows * c.depth);
}

}  // namespace

// 1: an index is outside, or there is no memory, and nothing is written
extern "C" int gnomon_kernel(const Call* given) {
    const Call& c = *given;
    int32_t* at = (int32_t*)malloc((size_t)(2 * c.count) * sizeof(int32_t) + 1);
    int failed = !at || places(c, at, at + c.count);
    if (!failed) {
#pragma omp parallel if (c.parallel) reduction(| : failed)
        {
            float* room = (float*)malloc((size_t)floats(c) * sizeof(float));
            failed |= !room;
#pragma omp for schedule(static)
            for (int64_t n = 0; n < c.batch; n++)
                if (room) sample(c, n, at, at + c.count, room);
            free(room);
        }
    }
    free(at);
    return failed;
}
