// A convolution of 3 x 3, stride 1, with what follows it, by Winograd's minimal filtering (gnomon/compiler/kernels/winograd.py):
// OUT x OUT outputs of a tile are computed from IN x IN inputs, IN = OUT + 2, by IN * IN products in place of 9 * OUT * OUT,
//     Y = A' [ sum over channels of (G g G') * (B' d B) ] A,       * of the numbers at the same place
// d (IN, IN) a tile of the input, g (3, 3) of the weights, Y (OUT, OUT). G g G' is packed. Images lie channels last, so a
// vector is VW channels of one pixel, and every transform is a sum of whole vectors.
//   room    (IN * IN, tiles, channels)        B' d B of a block of tiles, in the second cache
//   weights (panels, IN * IN, channels, WIDE) read once for each block, from first to last
//   sums    (IN * IN, tiles, WIDE)            of one panel, in the first caches; then transformed and written
// Points: 0, 1, -1, infinity for OUT = 2 and 0, a, -a, b, -b, infinity for OUT = 4, a = sqrt(1/2), b = sqrt(2): a * b = 1, so
// what is multiplied stays as large as what is added, and results are about twice as far from those in double as a direct
// sum is; with Lavin and Gray's 1 and 2 they are eight times as far.
// A number that is not finite would spread over its tile: then, or where memory is short, the kernel refuses (1), and the
// caller computes another way. So it never writes to memory that it is to read again.
#include "vector.h"
#include <omp.h>

namespace {

#ifndef OUT
#define OUT 4
#endif
#ifndef TILE
#define TILE (VW == 16 ? 14 : VW == 8 ? 6 : 4)
#define VECTORS 2
#endif
constexpr int IN = OUT + 2, PLACES = IN * IN, ROWS = TILE, V = VECTORS;
constexpr int64_t WIDE = V * VW, LINE = 16;            // LINE: floats of a line of memory

struct Call {                                          // as WinogradCall in winograd.py
    int64_t images, high, wide, channels, outputs, pad_h, pad_w, out_high, out_wide, relu, together, threads;
    int64_t x_image, x_line, x_pixel;                  // from one to the next; channels lie beside each other
    const float* x;
    const float* weights;
    const float* bias;                                 // or null
    const float* added;                                // (images, out_high, out_wide, outputs), or null
    float* out;                                        // as added
    int* refused;                                      // set where a result is not finite, or what follows has no answer
};

#ifndef ENDED
ALWAYS F ended(F x, const Call&, int64_t, int64_t, int64_t) { return x; }
#endif

// Tile t begins with the output (image, y, x).
struct Place { int64_t image, y, x; };
ALWAYS Place place(const Call& c, int64_t t) {
    const int64_t across = (c.out_wide + OUT - 1) / OUT, down = (c.out_high + OUT - 1) / OUT;
    return {t / (across * down), t / across % down * OUT, t % across * OUT};
}

// B' of IN numbers that are `s` apart, in place.
ALWAYS void before(F* d, int s) {
#if OUT == 2
    const F a = d[0] - d[2 * s], b = d[s] + d[2 * s], e = d[2 * s] - d[s], f = d[s] - d[3 * s];
    d[0] = a, d[s] = b, d[2 * s] = e, d[3 * s] = f;
#else
    constexpr float A = 0.70710678118654752f, B = 1.41421356237309505f;
    const F first = (d[4 * s] - d[2 * s] * 2.5f) + d[0], last = (d[5 * s] - d[3 * s] * 2.5f) + d[s];
    const F even_a = d[4 * s] - d[2 * s] * 2.0f, odd_a = (d[3 * s] - d[s] * 2.0f) * A;
    const F even_b = d[4 * s] - d[2 * s] * 0.5f, odd_b = (d[3 * s] - d[s] * 0.5f) * B;
    d[0] = first, d[5 * s] = last;
    d[s] = even_a + odd_a, d[2 * s] = even_a - odd_a, d[3 * s] = even_b + odd_b, d[4 * s] = even_b - odd_b;
#endif
}

// A' of IN numbers that are `s` apart: the first OUT of them.
ALWAYS void behind(F* d, int s) {
#if OUT == 2
    const F a = d[0] + d[s] + d[2 * s], b = d[s] - d[2 * s] - d[3 * s];
    d[0] = a, d[s] = b;
#else
    constexpr float A = 0.70710678118654752f, B = 1.41421356237309505f;
    const F sum_a = d[s] + d[2 * s], less_a = d[s] - d[2 * s], sum_b = d[3 * s] + d[4 * s], less_b = d[3 * s] - d[4 * s];
    d[0] = d[0] + sum_a + sum_b;
    d[s] = less_a * A + less_b * B;
    d[2 * s] = sum_a * 0.5f + sum_b * 2.0f;
    d[3 * s] = less_a * (0.5f * A) + less_b * (2.0f * B) + d[5 * s];
#endif
}

// B' d B of tile t. to: of its place 0 and channel 0, `step` floats from place to place.
void transformed(const Call& c, int64_t t, float* to, int64_t step) {
    const Place p = place(c, t);
    const int64_t y = p.y - c.pad_h, x = p.x - c.pad_w, row = c.x_line, pixel = c.x_pixel;
    const float* from = c.x + p.image * c.x_image + y * row + x * pixel;
    const bool inside = y >= 0 && x >= 0 && y + IN <= c.high && x + IN <= c.wide;
    for (int64_t k = 0; k < c.channels; k += VW) {
        const int left = (int)(c.channels - k < VW ? c.channels - k : VW);
        F d[PLACES];
        if (inside && left == VW) {
            UNROLLED for (int i = 0; i < IN; i++)
                UNROLLED for (int j = 0; j < IN; j++) d[i * IN + j] = ld(from + i * row + j * pixel + k);
        } else {
            for (int i = 0; i < IN; i++)
                for (int j = 0; j < IN; j++) {
                    const bool there = y + i >= 0 && y + i < c.high && x + j >= 0 && x + j < c.wide;
                    d[i * IN + j] = !there ? F{} : left == VW ? ld(from + i * row + j * pixel + k) : ld(from + i * row + j * pixel + k, left);
                }
        }
        UNROLLED for (int i = 0; i < IN; i++) before(d + i, IN);
        UNROLLED for (int i = 0; i < IN; i++) before(d + i * IN, 1);
        UNROLLED for (int i = 0; i < IN; i++)
            UNROLLED for (int j = 0; j < IN; j++) st(to + (i * IN + j) * step + k, d[i * IN + j]);
    }
}

// Sums over channels of R tiles at one place, by one panel. x: (R, channels), `apart` floats from tile to tile.
template <int R>
ALWAYS void product(int64_t channels, const float* x, int64_t apart, const float* panel, float* to) {
    F sum[R][V] = {};
    for (int64_t k = 0; k < channels; k++, panel += WIDE) {
        F w[V];
        UNROLLED for (int v = 0; v < V; v++) w[v] = ld(panel + v * VW);
        UNROLLED for (int64_t line = 0; line < WIDE; line += LINE) __builtin_prefetch(panel + 24 * WIDE + line);
        UNROLLED for (int r = 0; r < R; r++) {
            const float one = x[r * apart + k];
            UNROLLED for (int v = 0; v < V; v++) sum[r][v] = sum[r][v] + w[v] * one;
        }
    }
    UNROLLED for (int r = 0; r < R; r++)
        UNROLLED for (int v = 0; v < V; v++) st(to + r * WIDE + v * VW, sum[r][v]);
}

template <int R>
__attribute__((noinline)) void products(int64_t rows, int64_t channels, const float* x, int64_t apart, const float* panel, float* to) {
    if constexpr (R > 1)
        if (rows < R) return products<R - 1>(rows, channels, x, apart, panel, to);
    product<R>(channels, x, apart, panel, to);
}

// Writes the outputs of tile t, of the panel that begins with output n. from: the sums of its place 0, `step` from place to place.
ALWAYS void written(const Call& c, int64_t t, const float* from, int64_t step, int64_t n, F& finite) {
    const Place p = place(c, t);
    const int64_t high = c.out_high - p.y < OUT ? c.out_high - p.y : OUT, wide = c.out_wide - p.x < OUT ? c.out_wide - p.x : OUT;
    const int64_t begin = ((p.image * c.out_high + p.y) * c.out_wide + p.x) * c.outputs + n;
    for (int64_t v = 0; v < WIDE && n + v < c.outputs; v += VW) {
        const int left = (int)(c.outputs - n - v < VW ? c.outputs - n - v : VW);
        F d[PLACES];
        UNROLLED for (int i = 0; i < IN; i++)
            UNROLLED for (int j = 0; j < IN; j++) d[i * IN + j] = ld(from + (i * IN + j) * step + v);
        UNROLLED for (int i = 0; i < IN; i++) behind(d + i, IN);
        UNROLLED for (int i = 0; i < OUT; i++) behind(d + i * IN, 1);
        const F bias = !c.bias ? F{} : left == VW ? ld(c.bias + n + v) : ld(c.bias + n + v, left);
        UNROLLED for (int i = 0; i < OUT; i++) {
            if (i >= high) break;
            UNROLLED for (int j = 0; j < OUT; j++) {
                if (j >= wide) break;
                const int64_t at = begin + v + (i * c.out_wide + j) * c.outputs;
                F y = d[i * IN + j] + bias;
                finite = finite + y * 0.0f;            // NaN once y was not finite
                if (c.added) y = y + (left == VW ? ld(c.added + at) : ld(c.added + at, left));
                if (c.relu) y = maxi(y, F{});
                y = ended(y, c, 0, n + v, left);
                if (left == VW) st(c.out + at, y);
                else st(c.out + at, y, left);
            }
        }
    }
}

ALWAYS int64_t start(int64_t many, int64_t parts, int64_t i) { return many * i / parts; }

}  // namespace

extern "C" int gnomon_kernel(const Call* given) {
    Call c = *given;
    int refused = 0;
    c.refused = &refused;
    if (!c.threads) c.threads = omp_get_max_threads();
    const int64_t tiles = c.images * ((c.out_high + OUT - 1) / OUT) * ((c.out_wide + OUT - 1) / OUT);
    const int64_t panels = (c.outputs + WIDE - 1) / WIDE;
    int64_t blocks = (tiles + c.together - 1) / c.together;          // as even as they can be, for each thread as many
    blocks = (blocks + c.threads - 1) / c.threads * c.threads;
    if (blocks > tiles) blocks = tiles;
    const int64_t most = (tiles + blocks - 1) / blocks;
    // Tiles begin a line and a vector further than their channels take: a power of two apart they would share few places of the first cache.
    const int64_t apart = (c.channels + VW - 1) / VW * VW + LINE, step = most * apart, sums = most * WIDE;
    const int64_t own = (PLACES * (step + sums) + 15) / 16 * 16;
    float* room = (float*)aligned_alloc(64, (size_t)(c.threads * own) * sizeof(float));
    if (!room) return 1;
#pragma omp parallel num_threads((int)c.threads) if (c.threads > 1)
    {
        float *x = room + omp_get_thread_num() * own, *y = x + PLACES * step;
        F finite = {};
#pragma omp for schedule(static)
        for (int64_t b = 0; b < blocks; b++) {
            const int64_t first = start(tiles, blocks, b), many = start(tiles, blocks, b + 1) - first;
            for (int64_t t = 0; t < many; t++) transformed(c, first + t, x + t * apart, step);
            const int64_t parts = (many + ROWS - 1) / ROWS;
            const float* panel = c.weights;
            for (int64_t n = 0; n < panels; n++) {
                for (int64_t i = 0; i < PLACES; i++, panel += c.channels * WIDE)
                    for (int64_t q = 0; q < parts; q++) {
                        const int64_t m = start(many, parts, q), rows = start(many, parts, q + 1) - m;
                        products<ROWS>(rows, c.channels, x + i * step + m * apart, apart, panel, y + i * sums + m * WIDE);
                    }
                for (int64_t t = 0; t < many; t++) written(c, first + t, y + t * WIDE, sums, n * WIDE, finite);
            }
        }
        if (any(finite != finite)) {
#pragma omp atomic write
            refused = 1;
        }
    }
    free(room);
    return refused;
}
