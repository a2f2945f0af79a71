// Products of pairs of rows of two small matrices a sample (gnomon/compiler/pairs.py): out[k] = x[i[k]] . y[:, j[k]]. All
// pairs of a sample are multiplied into the first cache, which is faster than to look each up, and the wanted ones are taken.
#include "vector.h"

namespace {

#define UNROLLED _Pragma("GCC unroll 16")
constexpr int ROWS = VW == 16 ? 8 : 4;                 // of a tile, beside two vectors of columns

struct Call {                                          // as _Call in pairs.py has them
    int64_t batch, rows, columns, depth, count, before, parallel;
    const float* x; int64_t x_b, x_r, x_d;             // numbers from one sample, row, place in the row to the next
    const float* y; int64_t y_b, y_d, y_c;
    const int64_t *i; int64_t i_step; const int64_t* j; int64_t j_step;
    const float* first; int64_t first_row;             // numbers that come before the products in each row of out
    float* out;
};

template <int R>
ALWAYS void tile(const Call& c, const float* x, const float* y, float* to, int64_t wide) {
    for (int64_t column = 0; column < wide; column += 2 * VW) {
        F sum[R][2] = {};
        for (int64_t d = 0; d < c.depth; d++) {
            const F a = ld(y + d * wide + column), b = ld(y + d * wide + column + VW);
            UNROLLED for (int r = 0; r < R; r++) {
                const float v = x[r * c.x_r + d * c.x_d];
                sum[r][0] = sum[r][0] + a * v;
                sum[r][1] = sum[r][1] + b * v;
            }
        }
        UNROLLED for (int r = 0; r < R; r++) {
            st(to + r * wide + column, sum[r][0]);
            st(to + r * wide + column + VW, sum[r][1]);
        }
    }
}

void sample(const Call& c, int64_t n, const int32_t* at, float* y, float* all, int64_t wide) {
    const float *x = c.x + n * c.x_b, *from = c.y + n * c.y_b;
    if (c.y_c == 1)
        for (int64_t d = 0; d < c.depth; d++) memcpy(y + d * wide, from + d * c.y_d, (size_t)c.columns * sizeof(float));
    else
        for (int64_t column = 0; column < c.columns; column++)
            for (int64_t d = 0; d < c.depth; d++) y[d * wide + column] = from[d * c.y_d + column * c.y_c];
    int64_t row = 0;
    for (; row + ROWS <= c.rows; row += ROWS) tile<ROWS>(c, x + row * c.x_r, y, all + row * wide, wide);
    for (; row < c.rows; row++) tile<1>(c, x + row * c.x_r, y, all + row * wide, wide);
    float* out = c.out + n * (c.before + c.count);
    if (c.before) memcpy(out, c.first + n * c.first_row, (size_t)c.before * sizeof(float));
    for (int64_t k = 0; k < c.count; k++) out[c.before + k] = all[at[k]];
}

// Where a pair's product lies; 1 where there is none.
int places(const Call& c, int32_t* at, int64_t wide) {
    for (int64_t k = 0; k < c.count; k++) {
        int64_t i = c.i[k * c.i_step], j = c.j[k * c.j_step];
        if (i < -c.rows || i >= c.rows || j < -c.columns || j >= c.columns) return 1;
        at[k] = (int32_t)((i < 0 ? i + c.rows : i) * wide + (j < 0 ? j + c.columns : j));
    }
    return 0;
}

}  // namespace

// 1: an index is outside, or there is no memory, and nothing is written
extern "C" int gnomon_kernel(const Call* given) {
    const Call& c = *given;
    const int64_t wide = (c.columns + 2 * VW - 1) / (2 * VW) * (2 * VW);
    const size_t floats = (size_t)((c.depth + c.rows) * wide);
    int32_t* at = (int32_t*)malloc((size_t)c.count * sizeof(int32_t) + 1);
    int failed = !at || places(c, at, wide);
    if (!failed) {
#pragma omp parallel if (c.parallel) reduction(| : failed)
        {
            float* room = (float*)calloc(floats, sizeof(float));
            failed |= !room;
#pragma omp for schedule(static)
            for (int64_t n = 0; n < c.batch; n++)
                if (room) sample(c, n, at, room, room + c.depth * wide, wide);
            free(room);
        }
    }
    free(at);
    return failed;
}
