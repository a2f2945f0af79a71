// Numbers rounded to codes with a scale for each group, and laid as products' kernels read them, in one pass
// (gnomon/compiler/kernels/stored_rounded.py): what storage/integers.py rounds to and stored.py lays, bit for bit.
// Shapes: x (rows, columns) in float32 or bfloat16; codes (panels, steps, 4 side bytes), a step being `side` outputs times 4 columns
// times `layers` of codes that lie over each other; scales (panels, groups, side). A row may be anywhere in its panel.
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

struct Rounded {                                       // as _Rounded in stored_rounded.py has them
    int64_t rows, columns, x_row, wide;                // wide: x is float32; x_row: elements from one row to the next
    int64_t first, bits, group, padded, half, side, threads; // first: its row in the matrix that is laid; half: scales in float16
    const void* x;
    uint8_t* codes;
    void* scales;
};

namespace {

constexpr int64_t BESIDE = 4;
constexpr float TINY = 1e-12f;                         // of storage/integers.py

inline __m512 sixteen(const Rounded& c, int64_t row, int64_t k, int64_t end) {
    const __mmask16 some = end - k >= 16 ? 0xffff : (__mmask16)((1u << (end - k)) - 1);
    if (c.wide) return _mm512_maskz_loadu_ps(some, (const float*)c.x + row * c.x_row + k);
    const __m256i v = _mm256_maskz_loadu_epi16(some, (const uint16_t*)c.x + row * c.x_row + k);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16));
}

void one_row(const Rounded& c, int64_t row) {
    const int64_t each = c.group ? c.group : c.columns, groups = c.group ? c.columns / c.group : 1;
    const int64_t layers = 8 / c.bits, step = BESIDE * layers, at = c.first + row;
    const int32_t zero = 1 << (c.bits - 1), top = (1 << c.bits) - 1;
    uint8_t* const to = c.codes + (at / c.side * (c.padded / step) * c.side + at % c.side) * BESIDE;
    for (int64_t g = 0; g < groups; g++) {
        const int64_t begin = g * each, end = begin + each;
        __m512 size = _mm512_setzero_ps();
        for (int64_t k = begin; k < end; k += 16) size = _mm512_max_ps(size, _mm512_abs_ps(sixteen(c, row, k, end)));
        float scale = _mm512_reduce_max_ps(size) / (float)(zero - 1);
        if (scale < TINY) scale = TINY;
        const int64_t place = (at / c.side * groups + g) * c.side + at % c.side;
        if (c.half) {
            const uint16_t bits = _cvtss_sh(scale, _MM_FROUND_TO_NEAREST_INT);
            ((uint16_t*)c.scales)[place] = bits;
            scale = _cvtsh_ss(bits);
        } else {
            ((float*)c.scales)[place] = scale;
        }
        for (int64_t k = begin; k < end; k += 16) {
            __m512i code = _mm512_setzero_si512();
            if (scale != 0.0f) code = _mm512_cvtps_epi32(_mm512_div_ps(sixteen(c, row, k, end), _mm512_set1_ps(scale)));
            code = _mm512_add_epi32(code, _mm512_set1_epi32(zero));
            code = _mm512_min_epi32(_mm512_max_epi32(code, _mm512_setzero_si512()), _mm512_set1_epi32(top));
            if (end - k < 16) code = _mm512_maskz_mov_epi32((__mmask16)((1u << (end - k)) - 1), code);
            uint32_t fours[4];                         // four codes of a place each
            _mm_storeu_si128((__m128i*)fours, _mm512_cvtepi32_epi8(code));
            for (int64_t i = 0; i < 4 && k + BESIDE * i < end; i++) {
                const int64_t four = k / BESIDE + i;
                uint8_t* const where = to + four / layers * c.side * BESIDE;
                uint32_t there;
                memcpy(&there, where, 4);
                there |= fours[i] << (c.bits * (four % layers));   // codes are below 1 << bits: none runs into its neighbour
                memcpy(where, &there, 4);
            }
        }
    }
}

}  // namespace

extern "C" int gnomon_kernel(const Rounded* given) {
    const Rounded& c = *given;
    // rows of a panel have bytes of their own, so that threads write beside each other
#pragma omp parallel for schedule(static) num_threads((int)c.threads) if (c.threads > 1)
    for (int64_t row = 0; row < c.rows; row++) one_row(c, row);
    return 0;
}
