// A convolution with max pooling of 2 x 2, of which a preview in eight bits says which of each four outputs is the largest
// (gnomon/compiler/kernels/preview.py), so that one of four is computed in float32. Written above this text: CHANNELS of the input, a
// multiple of PART, which is one of 16; TALL and ACROSS of the kernel, WIDE, the padded input's columns. Images lie channels last.
// A preview's order of four sums is that of their codes: what all four have in common (scales, bias, zero) is left out.
#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

namespace {

constexpr int64_t SIDE = 16, ROW = WIDE * CHANNELS, LINE = ACROSS * CHANNELS, TAPS = TALL * LINE;
constexpr int64_t PITCH = CHANNELS + 16;               // of pixels in float32: apart by a power of two they would share few places of the first cache
constexpr int64_t PIXELS = 8;                          // pooled ones that meet a weight
constexpr int64_t BLOCK = 32;                          // outputs whose sums lie in the first cache
constexpr int64_t EACH = ACROSS * PART;                // weights of an output in a turn, of PART channels of x

struct Call {                                          // as PreviewCall in preview.py has it
    int64_t images, high, wide, outputs, pad_h, pad_w, relu, threads;
    const float* x;                                    // (images, high, wide, CHANNELS)
    const float* weights;                              // (TALL, CHANNELS / PART, outputs, ACROSS, PART)
    const int8_t* codes;                               // (panels of 16 outputs, TAPS / 4, 16, 4)
    const float* bias;
    float* out;                                        // (images, pooled high, pooled wide, outputs)
};

// An image with its borders, in float32 and in codes of eight bits: 0 is code `zero`.
void padded(const Call& c, int64_t image, float* wide, uint8_t* narrow, int64_t tall) {
    const float* x = c.x + image * c.high * c.wide * CHANNELS;
    __m512 low = _mm512_setzero_ps(), high = low;
    for (int64_t i = 0; i < c.high * c.wide * CHANNELS; i += 16) {
        const __m512 v = _mm512_loadu_ps(x + i);
        low = _mm512_min_ps(low, v), high = _mm512_max_ps(high, v);
    }
    const float least = _mm512_reduce_min_ps(low), most = _mm512_reduce_max_ps(high);
    const float by = most - least > 1e-30f ? 255.0f / (most - least) : 0.0f;
    const int32_t zero = (int32_t)(-least * by + 0.5f);
    memset(wide, 0, (size_t)(tall * WIDE * PITCH) * 4);
    memset(narrow, zero, (size_t)(tall * ROW));
    const __m512 scale = _mm512_set1_ps(by);
    const __m512i shift = _mm512_set1_epi32(zero);
    for (int64_t y = 0; y < c.high; y++) {
        const float* row = x + y * c.wide * CHANNELS;
        for (int64_t i = 0; i < c.wide; i++, row += CHANNELS) {
            const int64_t at = (y + c.pad_h) * WIDE + c.pad_w + i;
            for (int64_t j = 0; j < CHANNELS; j += 16) {
                const __m512 v = _mm512_loadu_ps(row + j);
                const __m512i code = _mm512_max_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(v, scale)), shift), _mm512_setzero_si512());
                _mm512_storeu_ps(wide + at * PITCH + j, v);
                _mm_storeu_si128((__m128i*)(narrow + at * CHANNELS + j), _mm512_cvtusepi32_epi8(code));
            }
        }
    }
}

// sum += four codes of x times four of 16 outputs. GCC 12 copies sums back and forth around the intrinsic.
INLINE void add(__m512i& sum, __m512i x, __m512i w) { asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w)); }
INLINE int32_t four(const uint8_t* p) { int32_t v; memcpy(&v, p, 4); return v; }

// Where in the padded image the window of the largest of four begins: of two pooled pixels, beside each other, by P panels.
// x, pixel: of the first window.
template <int P>
__attribute__((noinline)) void preview(const Call& c, const uint8_t* x, int64_t panel, int64_t pixel, int32_t* to, bool both) {
    __m512i sum[8][P];
    UNROLL for (int i = 0; i < 8; i++) UNROLL for (int p = 0; p < P; p++) sum[i][p] = _mm512_setzero_si512();
    const int8_t* w = c.codes + panel * TAPS * SIDE;
    for (int64_t ky = 0; ky < TALL; ky++) {
        const uint8_t *above = x + ky * ROW, *below = above + ROW;
        for (int64_t j = 0; j < LINE; j += 4, w += 64) {
            __m512i code[P];
            UNROLL for (int p = 0; p < P; p++) code[p] = _mm512_loadu_si512(w + p * TAPS * SIDE);
            UNROLL for (int i = 0; i < 4; i++) {
                const __m512i a = _mm512_set1_epi32(four(above + i * CHANNELS + j)), b = _mm512_set1_epi32(four(below + i * CHANNELS + j));
                UNROLL for (int p = 0; p < P; p++) {
                    add(sum[i][p], a, code[p]);
                    add(sum[4 + i][p], b, code[p]);
                }
            }
        }
    }
    __m512i sums[8][P];                                // another array than that which lies in registers
    UNROLL for (int i = 0; i < 8; i++) UNROLL for (int p = 0; p < P; p++) sums[i][p] = sum[i][p];
    for (int q = 0; q < 1 + both; q++)
        UNROLL for (int p = 0; p < P; p++) {
            const __m512i four_of[4] = {sums[2 * q][p], sums[2 * q + 1][p], sums[4 + 2 * q][p], sums[5 + 2 * q][p]};
            const int32_t begin = (int32_t)((pixel + 2 * q) * PITCH), below = (int32_t)(WIDE * PITCH), right = (int32_t)PITCH;
            const int32_t places[4] = {begin, begin + right, begin + below, begin + below + right};
            __m512i top = four_of[0], at = _mm512_set1_epi32(places[0]);
            UNROLL for (int i = 1; i < 4; i++) {
                const __mmask16 more = _mm512_cmpgt_epi32_mask(four_of[i], top);
                top = _mm512_mask_mov_epi32(top, more, four_of[i]);
                at = _mm512_mask_set1_epi32(at, more, places[i]);
            }
            const int64_t left = c.outputs - (panel + p) * SIDE;
            if (left > 0)
                _mm512_mask_storeu_epi32(to + q * c.outputs + (panel + p) * SIDE, left >= SIDE ? 0xffff : (__mmask16)((1u << left) - 1), at);
        }
}

// Of one output: sums at PIXELS places, of PART channels of a line of taps.
INLINE void multiply(const float* const* x, const float* w, float* sums) {
    __m512 sum[PIXELS];
    UNROLL for (int i = 0; i < PIXELS; i++) sum[i] = _mm512_load_ps(sums + i * 16);
    for (int64_t tap = 0; tap < ACROSS; tap++)
        UNROLL for (int64_t j = 0; j < PART; j += 16) {
            const __m512 one = _mm512_loadu_ps(w + tap * PART + j);
            UNROLL for (int i = 0; i < PIXELS; i++) sum[i] = _mm512_fmadd_ps(_mm512_loadu_ps(x[i] + tap * PITCH + j), one, sum[i]);
        }
    UNROLL for (int i = 0; i < PIXELS; i++) _mm512_store_ps(sums + i * 16, sum[i]);
}

// What was chosen of PIXELS pooled pixels, all outputs; `many` of them are real, and others are the last again.
void chosen(const Call& c, const float* image, const int32_t* at, int64_t many, float* out) {
    alignas(64) float sums[BLOCK][PIXELS * 16];
    for (int64_t from = 0; from < c.outputs; from += BLOCK) {
        const int64_t to = from + BLOCK < c.outputs ? from + BLOCK : c.outputs;
        memset(sums, 0, sizeof sums);
        for (int64_t ky = 0; ky < TALL; ky++)
            for (int64_t part = 0; part < CHANNELS; part += PART)
                for (int64_t n = from; n < to; n++) {
                    const float* x[PIXELS];
                    UNROLL for (int i = 0; i < PIXELS; i++) x[i] = image + at[(i < many ? i : many - 1) * c.outputs + n] + ky * WIDE * PITCH + part;
                    multiply(x, c.weights + ((ky * (CHANNELS / PART) + part / PART) * c.outputs + n) * EACH, sums[n - from]);
                }
        for (int64_t n = from; n < to; n++)
            for (int64_t i = 0; i < many; i++) {
                const float v = _mm512_reduce_add_ps(_mm512_load_ps(sums[n - from] + i * 16)) + c.bias[n];
                out[i * c.outputs + n] = c.relu && v < 0.0f ? 0.0f : v;
            }
    }
}

}  // namespace

// 1: there is no memory, and nothing is written
extern "C" int gnomon_kernel(const Call* given) {
    const Call& c = *given;
    const int64_t tall = c.high + 2 * c.pad_h, down = (tall - TALL + 1) / 2, across = (WIDE - ACROSS + 1) / 2;
    const int64_t panels = (c.outputs + SIDE - 1) / SIDE, pooled = down * across;
    const int64_t size = (tall + 2) * ROW;             // the last tile reads beyond it
    float* wide = (float*)aligned_alloc(64, (size_t)((tall + 2) * WIDE * PITCH * 4 + 64) / 64 * 64);
    uint8_t* narrow = (uint8_t*)aligned_alloc(64, (size_t)(size + 4 * CHANNELS + 64) / 64 * 64);
    int32_t* at = (int32_t*)aligned_alloc(64, (size_t)(pooled * c.outputs * 4 + 64) / 64 * 64);
    if (!wide || !narrow || !at) { free(wide), free(narrow), free(at); return 1; }
    memset(narrow, 0, (size_t)(size + 4 * CHANNELS));
    for (int64_t image = 0; image < c.images; image++) {
        padded(c, image, wide, narrow, tall);
#pragma omp parallel num_threads((int)c.threads) if (c.threads > 1)
        {
#pragma omp for schedule(static)
            for (int64_t y = 0; y < down; y++)
                for (int64_t panel = 0; panel < panels; panel += 3)
                    for (int64_t q = 0; q < across; q += 2) {
                        const int64_t pixel = 2 * y * WIDE + 2 * q;
                        const uint8_t* x = narrow + pixel * CHANNELS;
                        int32_t* to = at + (y * across + q) * c.outputs;
                        const bool both = q + 1 < across;
                        if (panels - panel >= 3) preview<3>(c, x, panel, pixel, to, both);
                        else if (panels - panel == 2) preview<2>(c, x, panel, pixel, to, both);
                        else preview<1>(c, x, panel, pixel, to, both);
                    }
#pragma omp for schedule(static)
            for (int64_t i = 0; i < pooled; i += PIXELS) {
                const int64_t many = pooled - i < PIXELS ? pooled - i : PIXELS;
                chosen(c, wide, at + i * c.outputs, many, c.out + (image * pooled + i) * c.outputs);
            }
        }
    }
    free(wide), free(narrow), free(at);
    return 0;
}
