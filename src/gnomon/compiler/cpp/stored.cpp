// Products with weights that are stored in few bits (gnomon/compiler/stored.py), which writes the constants above this text:
//   BITS 2, 4, 8, 16, 32 of a code       GROUP    columns that share a scale, 0 for all of a row
//   ACTS 8, 16, 32      bits of activations: codes with a scale for each row and group, bfloat16, or float32 (weights too)
//   HALF 0, 1           scales in float16 or float32      ZEROS 0, 1  whether groups have zeros of their own
//   ZERO                what stands for 0 elsewhere       TABLE       bfloat16 bits of the numbers that codes stand for (ACTS 16)
// Shapes: x (m, k), weight (n, k), out (m, n). A panel is 16 outputs, and k in steps of 64 bytes: 16 outputs times 4 codes
// (ACTS 8), 2 numbers (ACTS 16) or one (ACTS 32), so that one step is one register and one instruction a row; codes of few bits lie
// over each other in a step, the first k in the lowest bits. Scales and zeros are (panel, group, 16).
#include <immintrin.h>
#include <stdint.h>
#include <string.h>
#include "stored.h"

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

namespace {

constexpr int64_t SIDE = 16, LAYERS = ACTS / BITS > 0 ? ACTS / BITS : 1;   // LAYERS: of codes in a step
constexpr int64_t STEP = (32 / ACTS) * LAYERS;                               // k of a step
constexpr int64_t TOGETHER = 252;                                           // rows that stay in cache
constexpr int64_t AHEAD = 3072;                                             // bytes of a panel that are asked for before, into the second cache: into the first they come a third slower (measured)

INLINE int64_t groups(const Product& c) { return GROUP ? c.padded / (GROUP ? GROUP : 1) : 1; }
INLINE int64_t row_bytes(const Product& c) { return c.padded * (ACTS / 8); }
INLINE float* x_scales(const Product& c) { return (float*)(c.room + (c.m * row_bytes(c) + 63) / 64 * 64); }
INLINE int32_t* x_sums(const Product& c) { return (int32_t*)(x_scales(c) + c.m * groups(c)); }

// Two of bfloat16 times two, added to 16 sums; and 16 floats as bfloat16, to nearest. Processors without the instructions
// compute the same in float32.
#ifdef __AVX512BF16__
INLINE __m512 pairs(__m512 sum, __m512i w, int32_t x) {
    return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)_mm512_set1_epi32(x));
}
INLINE __m256i halves(__m512 v) { return (__m256i)_mm512_cvtneps_pbh(v); }
#else
INLINE __m512 pairs(__m512 sum, __m512i w, int32_t x) {
    const __m512i both = _mm512_set1_epi32(x), high = _mm512_set1_epi32((int)0xffff0000u);
    sum = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(w, 16)), _mm512_castsi512_ps(_mm512_slli_epi32(both, 16)), sum);
    return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(w, high)), _mm512_castsi512_ps(_mm512_and_si512(both, high)), sum);
}
INLINE __m256i halves(__m512 v) {
    const __m512i bits = _mm512_castps_si512(v), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __m512i to = _mm512_mask_mov_epi32(up, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc00000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(to, 16));
}
#endif

INLINE __m512 sixteen_of(const void* from, int64_t at, __mmask16 some, bool wide) {
    if (wide) return _mm512_maskz_loadu_ps(some, (const float*)from + at);
    const __m256i v = _mm256_maskz_loadu_epi16(some, (const uint16_t*)from + at);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16));
}

// 16 numbers of x from k on, 0 from `end` on and beyond the last
INLINE __m512 sixteen(const Product& c, int64_t row, int64_t k, int64_t end) {
    const int64_t left = (end < c.k ? end : c.k) - k;
    const __mmask16 some = left >= 16 ? 0xffff : left <= 0 ? 0 : (__mmask16)((1u << left) - 1);
    return sixteen_of(c.x, row * c.x_row + k, some, c.wide);
}

// Whether x is read where it lies: it has the kernel's numbers, and as many as the weight's groups are filled up to.
INLINE bool as_it_is(const Product& c) { return ACTS > 8 && !ZEROS && c.padded == c.k && c.wide == (ACTS == 32); }
INLINE const char* row_of(const Product& c, int64_t row) {
    return as_it_is(c) ? (const char*)c.x + row * c.x_row * (ACTS / 8) : c.room + row * row_bytes(c);
}

// Activations of a row: codes of -127 to 127 with a scale for each group, and the sums of the codes. Where a group has a number
// that is none or infinite its scale is NaN, and so is the row's result.
void narrowed(const Product& c, int64_t row) {
    const int64_t each = GROUP ? GROUP : c.padded, many = groups(c);
#if ACTS == 8
    int8_t* to = (int8_t*)c.room + row * c.padded;
    for (int64_t g = 0; g < many; g++) {
        const int64_t end = (g + 1) * each;
        __m512i top = _mm512_setzero_si512();          // sizes as integers: infinity and NaN are above all numbers
        for (int64_t k = g * each; k < end; k += 16)
            top = _mm512_max_epi32(top, _mm512_and_si512(_mm512_castps_si512(sixteen(c, row, k, end)), _mm512_set1_epi32(0x7fffffff)));
        const int32_t bits = _mm512_reduce_max_epi32(top);
        float size;
        memcpy(&size, &bits, 4);
        const bool sound = bits < 0x7f800000;
        const float by = sound && size > 1e-36f ? 127.0f / size : 0.0f;
        __m512i sum = _mm512_setzero_si512();
        for (int64_t k = g * each; k < end; k += 16) {
            __m512i code = _mm512_cvtps_epi32(_mm512_mul_ps(sixteen(c, row, k, end), _mm512_set1_ps(by)));
            code = _mm512_max_epi32(_mm512_min_epi32(code, _mm512_set1_epi32(127)), _mm512_set1_epi32(-127));
            sum = _mm512_add_epi32(sum, code);
            if (each % 16 == 0 || k + 16 <= end)
                _mm_storeu_si128((__m128i*)(to + k), _mm512_cvtepi32_epi8(code));
            else
                _mm_mask_storeu_epi8(to + k, (__mmask16)((1u << (end - k)) - 1), _mm512_cvtepi32_epi8(code));
        }
        x_scales(c)[row * many + g] = !sound ? __builtin_nanf("") : by ? size / 127.0f : 0.0f;
        x_sums(c)[row * many + g] = _mm512_reduce_add_epi32(sum);
    }
#elif ACTS == 32
    for (int64_t k = 0; k < c.padded; k += 16)
        _mm512_mask_storeu_ps((float*)c.room + row * c.padded + k, c.padded - k >= 16 ? 0xffff : (__mmask16)((1u << (c.padded - k)) - 1), sixteen(c, row, k, c.k));
#else
    uint16_t* to = (uint16_t*)c.room + row * c.padded;
    for (int64_t k = 0; k < c.padded; k += 16) {
        const __m256i v = halves(sixteen(c, row, k, c.k));
        _mm256_mask_storeu_epi16(to + k, c.padded - k >= 16 ? 0xffff : (__mmask16)((1u << (c.padded - k)) - 1), v);
    }
    for (int64_t g = 0; ZEROS && g < many; g++) {      // what zeros multiply: sums of the rounded numbers
        float sum = 0;
        for (int64_t k = g * each; k < (g + 1) * each; k++) {
            const uint32_t bits = (uint32_t)to[k] << 16;
            float one;
            memcpy(&one, &bits, 4);
            sum += one;
        }
        x_scales(c)[row * many + g] = sum;
    }
#endif
}

INLINE __m512 scale(const Product& c, int64_t at) {
#if HALF
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)((const uint16_t*)c.scales + at)));
#else
    return _mm512_loadu_ps((const float*)c.scales + at);
#endif
}

INLINE int32_t four(const char* p) { int32_t v; memcpy(&v, p, 4); return v; }

// sum += four codes times four of x, of 16 outputs. GCC 12 copies sums back and forth around the intrinsic: twice as slow.
INLINE void codes(__m512i& sum, __m512i code, __m512i x) { asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(code), "v"(x)); }

INLINE __m512i next(const uint8_t*& w, int64_t ahead) {
    const __m512i step = _mm512_loadu_si512(w);
    _mm_prefetch((const char*)w + ahead, _MM_HINT_T1);
    w += 64;
    return step;
}

// R rows from m by P panels from `panel`; rows beyond `last` are the last again, and are not written.
template <int R, int P>
__attribute__((noinline)) void tile(const Product& c, int64_t m, int64_t last, int64_t panel) {
    const int64_t many = groups(c), bytes = c.padded / STEP * 64, each = many > 1 ? GROUP : c.padded;
    const char* x[R];
    int64_t row[R];
    UNROLL for (int r = 0; r < R; r++) row[r] = m + r < last ? m + r : last - 1, x[r] = row_of(c, row[r]);
    const uint8_t* w[P];
    UNROLL for (int p = 0; p < P; p++) w[p] = c.codes + (panel + p) * bytes;
    const uint8_t* const end = w[0] + bytes;
    __m512 sum[R][P];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int p = 0; p < P; p++) sum[r][p] = _mm512_setzero_ps();
    int64_t k = 0;                                     // in bytes of a row of x
    for (int64_t g = 0; g < many; g++) {
#if ACTS == 8
        __m512i part[R][P];
        UNROLL for (int r = 0; r < R; r++) {
            const __m512i begin = ZEROS ? _mm512_setzero_si512() : _mm512_set1_epi32(-ZERO * x_sums(c)[row[r] * many + g]);
            UNROLL for (int p = 0; p < P; p++) part[r][p] = begin;
        }
        for (int64_t step = 0, ahead = AHEAD; step < each / STEP; step++) {
            if (step % (AHEAD / 64) == 0 && w[0] + AHEAD >= end) ahead = AHEAD + (P - 1) * bytes;   // the next P panels
            __m512i packed[P];
            UNROLL for (int p = 0; p < P; p++) packed[p] = next(w[p], ahead);
            UNROLL for (int i = 0; i < LAYERS; i++) {
                __m512i code[P];
                UNROLL for (int p = 0; p < P; p++)
                    code[p] = LAYERS == 1 ? packed[p]
                        : _mm512_and_si512(i ? _mm512_srli_epi16(packed[p], BITS * i) : packed[p], _mm512_set1_epi8((1 << (BITS % 8)) - 1));
                UNROLL for (int r = 0; r < R; r++) {   // a number of x is in a register while panels meet it, and no longer
                    const __m512i one = _mm512_set1_epi32(four(x[r] + k + 4 * i));
                    UNROLL for (int p = 0; p < P; p++) codes(part[r][p], code[p], one);
                }
            }
            k += STEP;
        }
        UNROLL for (int p = 0; p < P; p++) {
            const __m512 by = scale(c, ((panel + p) * many + g) * SIDE);
            const __m512 zero = ZEROS ? _mm512_loadu_ps(c.zeros + ((panel + p) * many + g) * SIDE) : _mm512_setzero_ps();
            UNROLL for (int r = 0; r < R; r++) {
                const int64_t at = row[r] * many + g;
                __m512 whole = _mm512_cvtepi32_ps(part[r][p]);
                if (ZEROS) whole = _mm512_fnmadd_ps(zero, _mm512_set1_ps((float)x_sums(c)[at]), whole);
                sum[r][p] = _mm512_fmadd_ps(whole, _mm512_mul_ps(by, _mm512_set1_ps(x_scales(c)[at])), sum[r][p]);
            }
        }
#else
        __m512 part[R][P];
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int p = 0; p < P; p++) part[r][p] = _mm512_setzero_ps();
#if BITS < 16
        alignas(64) static const uint16_t numbers[32] = {TABLE};
        const __m512i table = _mm512_load_si512(numbers);
#endif
        for (int64_t step = 0, ahead = AHEAD; step < each / STEP; step++) {
            if (step % (AHEAD / 64) == 0 && w[0] + AHEAD >= end) ahead = AHEAD + (P - 1) * bytes;   // the next P panels
            __m512i packed[P];
            UNROLL for (int p = 0; p < P; p++) packed[p] = next(w[p], ahead);
            UNROLL for (int i = 0; i < LAYERS; i++) {
                __m512i code[P];
                UNROLL for (int p = 0; p < P; p++) {
#if BITS < 16
                    code[p] = _mm512_permutexvar_epi16(
                        _mm512_and_si512(i ? _mm512_srli_epi16(packed[p], BITS * i) : packed[p], _mm512_set1_epi16((1 << BITS) - 1)), table);
#else
                    code[p] = packed[p];
#endif
                }
                UNROLL for (int r = 0; r < R; r++) {
#if ACTS == 32
                    const __m512 one = _mm512_set1_ps(*(const float*)(x[r] + k));
                    UNROLL for (int p = 0; p < P; p++) part[r][p] = _mm512_fmadd_ps(_mm512_castsi512_ps(code[p]), one, part[r][p]);
#else
                    const int32_t one = four(x[r] + k + 4 * i);
                    UNROLL for (int p = 0; p < P; p++) part[r][p] = pairs(part[r][p], code[p], one);
#endif
                }
            }
            k += ACTS / 8 * STEP;
        }
#if BITS < 16
        UNROLL for (int p = 0; p < P; p++) {
            const __m512 by = scale(c, ((panel + p) * many + g) * SIDE);
            const __m512 zero = ZEROS ? _mm512_loadu_ps(c.zeros + ((panel + p) * many + g) * SIDE) : _mm512_setzero_ps();
            UNROLL for (int r = 0; r < R; r++) {
                if (ZEROS) part[r][p] = _mm512_fnmadd_ps(zero, _mm512_set1_ps(x_scales(c)[row[r] * many + g]), part[r][p]);
                sum[r][p] = _mm512_fmadd_ps(part[r][p], by, sum[r][p]);
            }
        }
#else
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int p = 0; p < P; p++) sum[r][p] = part[r][p];
#endif
#endif
    }
    UNROLL for (int p = 0; p < P; p++) {
        const int64_t n = (panel + p) * SIDE, left = c.n - n;
        if (left <= 0) break;
        const __mmask16 some = left >= SIDE ? 0xffff : (__mmask16)((1u << left) - 1);
        const __m512 bias = c.bias ? _mm512_maskz_loadu_ps(some, c.bias + n) : _mm512_setzero_ps();
        for (int r = 0; r < R && m + r < last; r++) {
            __m512 v = _mm512_mul_ps(_mm512_add_ps(sum[r][p], bias), _mm512_set1_ps(c.factor));
            if (c.added) v = _mm512_add_ps(v, sixteen_of(c.added, (m + r) * c.added_row + n, some, c.wide));
            if (c.wide_out) _mm512_mask_storeu_ps((float*)c.out + (m + r) * c.out_row + n, some, v);
            else _mm256_mask_storeu_epi16((uint16_t*)c.out + (m + r) * c.out_row + n, some, halves(v));
        }
    }
}

// Registers hold the sums of R rows by P panels; one row reads P streams beside each other.
template <int R, int P>
void panels(const Product& c, int64_t m, int64_t last, int64_t from, int64_t to) {
    int64_t p = from;
    for (; p + P <= to; p += P) tile<R, P>(c, m, last, p);
    if constexpr (P > 1)
        for (; p < to; p++) tile<R, 1>(c, m, last, p);
}

constexpr int64_t BLOCK = 4;                           // panels that one task takes over all rows

}  // namespace

extern "C" int gnomon_kernel(const Product* given) {
    const Product& c = *given;
    const int64_t all = (c.n + SIDE - 1) / SIDE, tasks = (all + BLOCK - 1) / BLOCK;
#pragma omp parallel num_threads((int)c.threads) if (c.threads > 1)
    {
        if (!as_it_is(c)) {
#pragma omp for schedule(static)
            for (int64_t row = 0; row < c.m; row++) narrowed(c, row);
        }
        for (int64_t m0 = 0; m0 < c.m; m0 += TOGETHER) {
            const int64_t end = m0 + TOGETHER < c.m ? m0 + TOGETHER : c.m;
#pragma omp for schedule(static) nowait
            for (int64_t task = 0; task < tasks; task++) {
                const int64_t from = task * BLOCK, to = from + BLOCK < all ? from + BLOCK : all;
                for (int64_t m = m0; m < end;) {       // rows in blocks as equal as they can be
                    const int64_t most = GROUP ? 8 : 12, left = end - m, blocks = (left + most - 1) / most;
                    const int64_t rows = (left + blocks - 1) / blocks, last = m + rows;
                    if (rows == 1) panels<1, 4>(c, m, last, from, to);
                    else if (rows == 2) panels<2, 4>(c, m, last, from, to);
                    else if (rows <= 4) panels<4, GROUP ? 2 : 4>(c, m, last, from, to);
                    else if (rows <= 6) panels<6, 2>(c, m, last, from, to);
                    else if (GROUP) panels<8, 1>(c, m, last, from, to);        // sums of groups beside those of rows
                    else if (rows <= 8) panels<8, 2>(c, m, last, from, to);
                    else panels<12, 2>(c, m, last, from, to);
                    m = last;
                }
            }
        }
    }
    return 0;
}
