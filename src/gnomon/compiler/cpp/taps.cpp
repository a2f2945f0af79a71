// A convolution as a matrix product whose rows are never written (gnomon/compiler/kernels/taps.py): an output pixel is a row of
// what its window holds, and a tile reads the windows of ROWS pixels beside each other where they lie,
//     out[y, x, n] = after(sum over taps i, j and channels c of image[y * stride_h + i * dilation_h, x * stride_w + j * dilation_w, c] w[n, c, i, j])
// Images lie channels last, so the taps of a window's line and their channels are one run of memory (of a line of 7 x 3 of an
// RGB image, 21 numbers); with a dilation of columns each tap is a run of its own. All runs of a pixel are at the same
// distances from where its window begins, and windows of pixels beside each other stride_w * channels apart.
//   image   (images, padded high, padded wide, channels)    a copy with its border; x itself where it has none and lies so
//   weights (panels, runs, run, WIDE)                       packed: a panel is read from first to last by each tile
//   sums    (ROWS, VECTORS)                                 in registers along all runs, then bias, sum, ReLU, and written
#include "vector.h"
#include <omp.h>

namespace {

#ifndef TILE
#define TILE (VW == 16 ? 14 : VW == 8 ? 6 : 4)
#define VECTORS 2
#endif
constexpr int ROWS = TILE, V = VECTORS;
constexpr int64_t WIDE = V * VW, TURN = 1 << 19;       // TURN: bytes of weights that all stay in the second cache

struct Call {                                          // as TapsCall in taps.py
    int64_t images, high, wide, channels, outputs, pad_h, pad_w, out_high, out_wide, stride_h, stride_w;
    int64_t lines, line_apart, taps, tap_apart, run;   // runs of a window: of `lines` lines, pixels apart; each has `taps`; of `run` numbers
    int64_t relu, threads;
    int64_t x_image, x_line, x_pixel, x_channel;       // from one to the next
    const float* x;
    const float* weights;
    const float* bias;                                 // or null
    const float* added;                                // (images, out_high, out_wide, outputs), or null; may be out
    float* out;
    int* refused;                                      // set where what follows has no answer
};

#ifndef ENDED
ALWAYS F ended(F x, const Call&, int64_t, int64_t, int64_t) { return x; }
#endif

// A line of an image with its border, y of the padded one.
void bordered(const Call& c, int64_t image, int64_t y, float* to) {
    const int64_t from = y - c.pad_h, row = (c.wide + 2 * c.pad_w) * c.channels, edge = c.pad_w * c.channels;
    if (from < 0 || from >= c.high) {
        memset(to, 0, (size_t)row * sizeof(float));
        return;
    }
    memset(to, 0, (size_t)edge * sizeof(float));
    memset(to + row - edge, 0, (size_t)edge * sizeof(float));
    const float* x = c.x + image * c.x_image + from * c.x_line;
    if (c.x_channel == 1 && c.x_pixel == c.channels) {
        memcpy(to + edge, x, (size_t)(c.wide * c.channels) * sizeof(float));
        return;
    }
    for (int64_t k = 0; k < c.channels; k++)
        for (int64_t i = 0; i < c.wide; i++) to[edge + i * c.channels + k] = x[i * c.x_pixel + k * c.x_channel];
}

// R pixels from `at` of out (pixels of all images) by one panel. x: where the first window begins. ahead: weights that are read
// next, of which `share` floats are asked for beside each of these.
template <int R>
ALWAYS void tile(const Call& c, const float* x, int64_t row, const float* panel, int64_t at, int64_t n, const float* ahead, int64_t share) {
    F sum[R][V] = {};
    const int64_t step = c.stride_w * c.channels;
    for (int64_t i = 0; i < c.lines; i++)
        for (int64_t j = 0; j < c.taps; j++) {
            const float* run = x + i * c.line_apart * row + j * c.tap_apart * c.channels;
            for (int64_t k = 0; k < c.run; k++, panel += WIDE, ahead += share) {
                F w[V];
                UNROLLED for (int v = 0; v < V; v++) w[v] = ld(panel + v * VW);
                __builtin_prefetch(ahead, 0, 2);
                UNROLLED for (int r = 0; r < R; r++) {
                    const float one = run[r * step + k];
                    UNROLLED for (int v = 0; v < V; v++) sum[r][v] = sum[r][v] + w[v] * one;
                }
            }
        }
    F sums[R][V];                                      // another array than that which lies in registers
    UNROLLED for (int r = 0; r < R; r++)
        UNROLLED for (int v = 0; v < V; v++) sums[r][v] = sum[r][v];
    for (int v = 0; v < V && n + v * VW < c.outputs; v++) {
        const int64_t first = n + v * VW;
        const int left = (int)(c.outputs - first < VW ? c.outputs - first : VW);
        const F bias = !c.bias ? F{} : left == VW ? ld(c.bias + first) : ld(c.bias + first, left);
        for (int r = 0; r < R; r++) {
            const int64_t to = (at + r) * c.outputs + first;
            F y = sums[r][v] + bias;
            if (c.added) y = y + (left == VW ? ld(c.added + to) : ld(c.added + to, left));
            if (c.relu) y = maxi(y, F{});
            y = ended(y, c, at + r, first, left);
            if (left == VW) st(c.out + to, y);
            else st(c.out + to, y, left);
        }
    }
}

template <int R>
__attribute__((noinline)) void tiles(
    int64_t rows, const Call& c, const float* x, int64_t row, const float* panel, int64_t at, int64_t n, const float* ahead, int64_t share
) {
    if constexpr (R > 1)
        if (rows < R) return tiles<R - 1>(rows, c, x, row, panel, at, n, ahead, share);
    tile<R>(c, x, row, panel, at, n, ahead, share);
}

ALWAYS int64_t start(int64_t many, int64_t parts, int64_t i) { return many * i / parts; }

}  // namespace

extern "C" int gnomon_kernel(const Call* given) {
    Call c = *given;
    int refused = 0;
    c.refused = &refused;
    if (!c.threads) c.threads = omp_get_max_threads();
    const bool plain = !c.pad_h && !c.pad_w && c.x_channel == 1 && c.x_pixel == c.channels && c.x_line == c.wide * c.channels;
    const int64_t high = c.high + 2 * c.pad_h, wide = c.wide + 2 * c.pad_w, row = wide * c.channels, image = high * row;
    float* room = nullptr;
    if (!plain && !(room = (float*)aligned_alloc(64, (size_t)((c.images * image + 15) / 16 * 64)))) return 1;
    const int64_t parts = (c.out_wide + ROWS - 1) / ROWS, blocks = c.images * c.out_high * parts;
    const int64_t panels = (c.outputs + WIDE - 1) / WIDE, size = c.lines * c.taps * c.run * WIDE;
    const bool all = panels * size * (int64_t)sizeof(float) <= TURN;   // then a block of pixels goes over all panels
    // One panel's tiles ask for the next: each for as much as there are tiles to do so.
    const int64_t share = all ? 0 : (WIDE + blocks - 1) / blocks;
#pragma omp parallel num_threads((int)c.threads) if (c.threads > 1)
    {
        if (room) {
#pragma omp for schedule(static)
            for (int64_t i = 0; i < c.images * high; i++) bordered(c, i / high, i % high, room + i * row);
        }
        const float* const x = room ? room : c.x;
        const int64_t apart = room ? image : c.x_image;
        const auto block = [&](int64_t b, int64_t p) {
            const int64_t line = b / parts, part = b % parts, y = line % c.out_high, i = line / c.out_high;
            const int64_t from = start(c.out_wide, parts, part), rows = start(c.out_wide, parts, part + 1) - from;
            const float* window = x + i * apart + y * c.stride_h * row + from * c.stride_w * c.channels;
            const float* panel = c.weights + p * size;
            const float* ahead = share && p + 1 < panels ? panel + size + b * (size / WIDE) * share : panel;
            tiles<ROWS>(rows, c, window, row, panel, line * c.out_wide + from, p * WIDE, ahead, p + 1 < panels ? share : 0);
        };
        if (all) {
#pragma omp for schedule(static)
            for (int64_t b = 0; b < blocks; b++)
                for (int64_t p = 0; p < panels; p++) block(b, p);
        } else {
#pragma omp for schedule(static) collapse(2)
            for (int64_t p = 0; p < panels; p++)
                for (int64_t b = 0; b < blocks; b++) block(b, p);
        }
    }
    free(room);
    return refused;
}
