// A convolution of each channel by itself (gnomon/compiler/kernels/depthwise.py), of images that lie channels last:
//     out[y, x, k] = after(bias[k] + sum over taps i, j of before(image[y * SH + i * DH - pad_h, x * SW + j * DW - pad_w, k]) w[i, j, k])
// A vector is channels of one pixel. A tile is LINES x PIXELS outputs of one vector whose sums stay in registers: a line of the
// image is read once for all of its sums, a column at a time, with the weights of a window's line in registers too. What lies
// beyond the border is left out and nothing is copied, so weights that are not finite meet no zeros there, as in oneDNN's.
// Tiles and vectors that would reach beyond the end begin earlier, and write some results twice: out lies on no input.
//   weights (KH * KW, channels)      multiplied by the batch norm, turned once
// KH ... DW, PIXELS, LINES, RELUS (before) and ENDED (after) are defined by the text before this; AVERAGES and MAXIMUM make
// a pooling of it, without weights: of the numbers that are there, AVERAGES of 2 divided by all of a window.
#include "vector.h"
#include <omp.h>

namespace {

#define WHOLE _Pragma("GCC unroll 128")
#if defined(AVERAGES) || defined(MAXIMUM)
#define POOLS
#endif
constexpr int DEEP = (LINES - 1) * SH + (KH - 1) * DH + 1;   // lines of the image that a tile reads

struct Call {                                          // as DepthwiseCall in depthwise.py
    int64_t images, high, wide, channels, pad_h, pad_w, out_high, out_wide, relu, threads;
    int64_t x_image, x_line, x_pixel;                  // from one to the next
    const float* x;
    const float* weights;
    const float* bias;                                 // or null
    const float* added;                                // (images, out_high, out_wide, channels), or null
    float* out;
    int* refused;                                      // set where what follows has no answer
};

#ifndef ENDED
ALWAYS F ended(F x, const Call&, int64_t, int64_t, int64_t) { return x; }
#endif

// Lanes of channels: a whole vector, or `left` of an image that has fewer.
template <bool PART> ALWAYS F get(const float* p, int left) { return PART ? ld(p, left) : ld(p); }

// What line i of a tile's part of the image adds. MASK: lines of outputs whose window it is in. row: where the tile's first
// column would be; from: which column of the image that is.
template <int P, int MASK, bool EDGE, bool PART>
ALWAYS void line(const Call& c, F (&sum)[LINES][P], int i, const float* row, int64_t from, const float* weights, int left) {
#ifndef POOLS
    F w[LINES][KW];
    WHOLE for (int r = 0; r < LINES; r++)
        if (MASK >> r & 1)
            WHOLE for (int j = 0; j < KW; j++) w[r][j] = get<PART>(weights + ((i - r * SH) / DH * KW + j) * c.channels, left);
#endif
    WHOLE for (int n = 0; n < (P - 1) * SW + (KW - 1) * DW + 1; n++) {
        if (SW > 1 || DW > 1) {                        // between windows, or between taps
            bool read = false;
            WHOLE for (int j = 0; j < KW; j++) read |= n >= j * DW && (n - j * DW) % SW == 0 && (n - j * DW) / SW < P;
            if (!read) continue;
        }
        if (EDGE && (uint64_t)(from + n) >= (uint64_t)c.wide) continue;
        F v = get<PART>(row + n * c.x_pixel, left);
#ifdef RELUS
        v = larger(F{}, v);                            // v where it is a NaN
#endif
        WHOLE for (int j = 0; j < KW; j++) {
            if (n < j * DW || (n - j * DW) % SW || (n - j * DW) / SW >= P) continue;
            WHOLE for (int r = 0; r < LINES; r++)
                if (MASK >> r & 1) {
                    F& to = sum[r][(n - j * DW) / SW];
#ifdef MAXIMUM
                    to = maxi(to, v);
#elif defined(AVERAGES)
                    to = to + v;
#else
                    to = to + v * w[r][j];
#endif
                }
        }
    }
}

// How many of `many` places from `from` on are within a size.
ALWAYS int64_t there(int64_t from, int64_t many, int64_t size) {
    return (from + many < size ? from + many : size) - (from > 0 ? from : 0);
}

// LINES x P outputs from line y and column at, of one vector of channels from k.
template <int P, bool EDGE, bool PART>
ALWAYS void tile(const Call& c, int64_t image, int64_t y, int64_t at, int64_t k, int left) {
    F sum[LINES][P] = {};
#ifdef MAXIMUM
    WHOLE for (int r = 0; r < LINES; r++)
        WHOLE for (int p = 0; p < P; p++) sum[r][p] = splat(-INF);
#endif
    const int64_t top = y * SH - c.pad_h, from = at * SW - c.pad_w;
    const float* x = c.x + image * c.x_image + from * c.x_pixel + k;
    const int begin = top < 0 ? (int)-top : 0, end = top + DEEP > c.high ? (int)(c.high - top) : DEEP;
    if constexpr (LINES == 1) {
        for (int i = (begin + DH - 1) / DH * DH; i < end; i += DH) line<P, 1, EDGE, PART>(c, sum, i, x + (top + i) * c.x_line, from, c.weights + k, left);
    } else {
        for (int i = begin; i < end; i++) {
            const float* row = x + (top + i) * c.x_line;
            const bool first = i % DH == 0 && i / DH < KH, second = i >= SH && (i - SH) % DH == 0;
            if (first && second) line<P, 3, EDGE, PART>(c, sum, i, row, from, c.weights + k, left);
            else if (first) line<P, 1, EDGE, PART>(c, sum, i, row, from, c.weights + k, left);
            else if (second) line<P, 2, EDGE, PART>(c, sum, i, row, from, c.weights + k, left);
        }
    }
    const F bias = c.bias ? get<PART>(c.bias + k, left) : F{};
    WHOLE for (int r = 0; r < LINES; r++)
        WHOLE for (int p = 0; p < P; p++) {
            const int64_t to = (((image * c.out_high + y + r) * c.out_wide) + at + p) * c.channels + k;
            F v = sum[r][p] + bias;
#ifdef AVERAGES
            v = v / (AVERAGES == 2 ? (float)(KH * KW) : (float)(there(top + r * SH, KH, c.high) * there(from + p * SW, KW, c.wide)));
#endif
            if (c.added) v = v + get<PART>(c.added + to, left);
            if (c.relu) v = maxi(v, F{});
            v = ended(v, c, 0, k, PART ? left : VW);
            if (PART) st(c.out + to, v, left);
            else st(c.out + to, v);
        }
}

// All channels of P pixels.
template <int P>
__attribute__((noinline)) void pixels(const Call& c, int64_t image, int64_t y, int64_t at) {
    const int64_t from = at * SW - c.pad_w;
    const bool inside = from >= 0 && from + (P - 1) * SW + (KW - 1) * DW < c.wide;
    if (c.channels < VW) return tile<P, true, true>(c, image, y, at, 0, (int)c.channels);
    for (int64_t k = 0; k < c.channels; k += VW) {
        const int64_t first = k + VW > c.channels ? c.channels - VW : k;
        if (inside) tile<P, false, false>(c, image, y, at, first, VW);
        else tile<P, true, false>(c, image, y, at, first, VW);
    }
}

// Sizes of tiles: PIXELS, and halves of it down to 1. That with which a line takes the least is taken.
template <int P>
int best(int64_t wide) {
    if constexpr (P == 1) {
        return 1;
    } else {
        const int other = best<P / 2>(wide);
        if (P > wide) return other;
        // A tile's own cost is about that of two pixels: its weights, and columns that two tiles read.
        const int64_t mine = (wide + P - 1) / P * (P + 2), others = (wide + other - 1) / other * (other + 2);
        return mine <= others ? P : other;
    }
}

template <int P>
ALWAYS void lines(const Call& c, int size, int64_t image, int64_t y) {
    if constexpr (P > 1)
        if (size < P) return lines<P / 2>(c, size, image, y);
    for (int64_t at = 0; at < c.out_wide; at += P) pixels<P>(c, image, y, at + P > c.out_wide ? c.out_wide - P : at);
}

}  // namespace

extern "C" int gnomon_kernel(const Call* given) {
    Call c = *given;
    int refused = 0;
    c.refused = &refused;
    if (!c.threads) c.threads = omp_get_max_threads();
    const int size = best<PIXELS>(c.out_wide);
    const int64_t tall = (c.out_high + LINES - 1) / LINES, blocks = c.images * tall;
#pragma omp parallel for schedule(static) num_threads((int)c.threads) if (c.threads > 1)
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t y = b % tall * LINES;
        lines<PIXELS>(c, size, b / tall, y + LINES > c.out_high ? c.out_high - LINES : y);
    }
    return refused;
}
