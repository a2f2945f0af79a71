// Parts of Winograd's convolution F(2 x 2, 3 x 3) with deep reuse, for benchmarks/lowbit/drew.py: transforms of images that lie
// channels last, vectors put together by the signs of their projections, and their products gathered.
#include "vector.h"

struct Call {
    int64_t what, images, high, wide, channels;        // of the padded input (what 0) or of the output (what 1)
    int64_t rows, bits;                                // vectors, and projections of each (what 2)
    const float* x; int64_t x_row;
    const float* signs;                                // (rows, bits)
    int32_t *table, *cluster;                          // (2^bits), (rows)
    int64_t adds;                                      // whether results are added to what is there (what 3)
    float* out; int64_t out_row, count;                // count: clusters that were found
};

namespace {

// B' d B of each tile of 4 x 4, 2 apart: out (16, tiles, channels)
void inputs(const Call& c) {
    const int64_t down = (c.high - 2) / 2, across = (c.wide - 2) / 2, tiles = c.images * down * across;
    for (int64_t t = 0; t < tiles; t++) {
        const int64_t image = t / (down * across), y = t / across % down, x0 = t % across;
        const float* x = c.x + ((image * c.high + 2 * y) * c.wide + 2 * x0) * c.channels;
        for (int64_t k = 0; k < c.channels; k += VW) {
            F d[4][4], e[4][4];
            UNROLLED for (int i = 0; i < 4; i++) UNROLLED for (int j = 0; j < 4; j++) d[i][j] = ld(x + (i * c.wide + j) * c.channels + k);
            UNROLLED for (int j = 0; j < 4; j++) {
                e[0][j] = d[0][j] - d[2][j];
                e[1][j] = d[1][j] + d[2][j];
                e[2][j] = d[2][j] - d[1][j];
                e[3][j] = d[1][j] - d[3][j];
            }
            UNROLLED for (int i = 0; i < 4; i++) {
                float* to = c.out + ((i * 4) * tiles + t) * c.channels + k;
                const int64_t next = tiles * c.channels;
                st(to, e[i][0] - e[i][2]);
                st(to + next, e[i][1] + e[i][2]);
                st(to + 2 * next, e[i][2] - e[i][1]);
                st(to + 3 * next, e[i][1] - e[i][3]);
            }
        }
    }
}

// A' m A of each tile: x (16, tiles, channels), out (images, high, wide, channels)
void outputs(const Call& c) {
    const int64_t down = c.high / 2, across = c.wide / 2, tiles = c.images * down * across;
    for (int64_t t = 0; t < tiles; t++) {
        const int64_t image = t / (down * across), y = t / across % down, x0 = t % across;
        float* to = c.out + ((image * c.high + 2 * y) * c.wide + 2 * x0) * c.channels;
        for (int64_t k = 0; k < c.channels; k += VW) {
            F m[4][4], e[2][4];
            UNROLLED for (int i = 0; i < 4; i++) UNROLLED for (int j = 0; j < 4; j++) m[i][j] = ld(c.x + ((i * 4 + j) * tiles + t) * c.channels + k);
            UNROLLED for (int j = 0; j < 4; j++) {
                e[0][j] = m[0][j] + m[1][j] + m[2][j];
                e[1][j] = m[1][j] - m[2][j] - m[3][j];
            }
            UNROLLED for (int i = 0; i < 2; i++) {
                st(to + i * c.wide * c.channels + k, e[i][0] + e[i][1] + e[i][2]);
                st(to + (i * c.wide + 1) * c.channels + k, e[i][1] - e[i][2] - e[i][3]);
            }
        }
    }
}

// Vectors whose projections have the same signs become one: their mean. out (clusters, channels), with what is in `cluster`.
void together(Call& c) {
    float* sizes = c.out + c.rows * c.out_row;         // behind the sums
    c.count = 0;
    for (int64_t i = 0; i < (int64_t)1 << c.bits; i++) c.table[i] = -1;
    for (int64_t r = 0; r < c.rows; r++) {
        int32_t id = 0;
        for (int64_t b = 0; b < c.bits; b++) id |= (c.signs[r * c.bits + b] > 0) << b;
        int32_t at = c.table[id];
        const float* x = c.x + r * c.x_row;
        if (at < 0) {
            at = c.table[id] = (int32_t)c.count++;
            sizes[at] = 1;
            memcpy(c.out + at * c.out_row, x, (size_t)c.channels * 4);
        } else {
            float* sum = c.out + at * c.out_row;
            sizes[at] += 1;
            for (int64_t k = 0; k < c.channels; k += VW) st(sum + k, ld(sum + k) + ld(x + k));
        }
        c.cluster[r] = at;
    }
    for (int64_t i = 0; i < c.count; i++)
        for (int64_t k = 0; k < c.channels; k += VW) st(c.out + i * c.out_row + k, ld(c.out + i * c.out_row + k) * (1.0f / sizes[i]));
}

void gathered(const Call& c) {
    for (int64_t r = 0; r < c.rows; r++) {
        const float* from = c.x + c.cluster[r] * c.x_row;
        float* to = c.out + r * c.out_row;
        if (c.adds)
            for (int64_t k = 0; k < c.channels; k += VW) st(to + k, ld(to + k) + ld(from + k));
        else
            memcpy(to, from, (size_t)c.channels * 4);
    }
}

}  // namespace

extern "C" int gnomon_kernel(Call* given) {
    if (given->what == 0) inputs(*given);
    else if (given->what == 1) outputs(*given);
    else if (given->what == 2) together(*given);
    else gathered(*given);
    return 0;
}
