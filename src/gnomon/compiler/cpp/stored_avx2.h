// What products with stored weights (stored.cpp) are told of AVX2 with FMA and F16C, and of AVX-VNNI where VNNI says so.
#pragma once
#include <immintrin.h>
constexpr int64_t SIDE = 8;                            // outputs of a panel: 32-bit lanes of a register
constexpr int64_t REGISTERS = 16;
constexpr int64_t PAIR_BYTES = 8;                      // of two numbers of x that meet two of bfloat16: they are kept as floats
typedef __m256 V;
typedef __m256i I;

INLINE V nothing() { return _mm256_setzero_ps(); }
INLINE V all(float x) { return _mm256_set1_ps(x); }
INLINE I every(int32_t x) { return _mm256_set1_epi32(x); }
INLINE V load(const float* p) { return _mm256_loadu_ps(p); }
INLINE I load(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
INLINE V float16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
INLINE V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
INLINE V fnma(V a, V b, V c) { return _mm256_fnmadd_ps(a, b, c); }
INLINE I plus(I a, I b) { return _mm256_add_epi32(a, b); }
INLINE I times(I a, I b) { return _mm256_mullo_epi32(a, b); }
INLINE I larger(I a, I b) { return _mm256_max_epi32(a, b); }
INLINE I smaller(I a, I b) { return _mm256_min_epi32(a, b); }
INLINE V larger(V a, V b) { return _mm256_max_ps(a, b); }
INLINE V smaller(V a, V b) { return _mm256_min_ps(a, b); }
INLINE int32_t largest(I a) {
    __m128i v = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    v = _mm_max_epi32(v, _mm_shuffle_epi32(v, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(v, _mm_shuffle_epi32(v, 0xb1)));
}
INLINE int32_t total(I a) {
    __m128i v = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    v = _mm_add_epi32(v, _mm_shuffle_epi32(v, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(v, _mm_shuffle_epi32(v, 0xb1)));
}
INLINE V numbers(I a) { return _mm256_cvtepi32_ps(a); }
INLINE I nearest(V a) { return _mm256_cvtps_epi32(a); }
INLINE I bits(V a) { return _mm256_castps_si256(a); }
INLINE V of_bits(I a) { return _mm256_castsi256_ps(a); }
INLINE I both(I a, I b) { return _mm256_and_si256(a, b); }

INLINE V of_bfloat16(__m128i v) { return of_bits(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16)); }
INLINE __m128i halves(V v) {                           // to bfloat16, to nearest
    const I up = plus(bits(v), plus(both(_mm256_srli_epi32(bits(v), 16), every(1)), every(0x7fff)));
    const I to = _mm256_srli_epi32(_mm256_blendv_epi8(up, every(0x7fc00000), bits(_mm256_cmp_ps(v, v, _CMP_UNORD_Q))), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(to), _mm256_extracti128_si256(to, 1));
}

// The first n of 8; 0 in the others. There are no masks for 16 bits and for bytes.
INLINE I first(int64_t n) { return _mm256_cmpgt_epi32(every((int32_t)(n < SIDE ? n : SIDE)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)); }
INLINE V some(const float* p, int64_t n) { return n >= SIDE ? load(p) : _mm256_maskload_ps(p, first(n)); }
INLINE V some(const uint16_t* p, int64_t n) {          // bfloat16
    if (n >= SIDE) return of_bfloat16(_mm_loadu_si128((const __m128i*)p));
    uint16_t few[SIDE] = {};
    for (int64_t i = 0; i < n; i++) few[i] = p[i];
    return of_bfloat16(_mm_loadu_si128((const __m128i*)few));
}
INLINE void put(float* p, V v, int64_t n) { if (n >= SIDE) _mm256_storeu_ps(p, v); else _mm256_maskstore_ps(p, first(n), v); }
INLINE void put(uint16_t* p, V v, int64_t n) {
    if (n >= SIDE) return _mm_storeu_si128((__m128i*)p, halves(v));
    uint16_t few[SIDE];
    _mm_storeu_si128((__m128i*)few, halves(v));
    for (int64_t i = 0; i < n; i++) p[i] = few[i];
}
INLINE void put(int8_t* p, I v, int64_t n) {
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    int8_t few[16];
    _mm_storeu_si128((__m128i*)few, _mm_packs_epi16(words, words));
    if (n >= SIDE) memcpy(p, few, SIDE);
    else for (int64_t i = 0; i < n; i++) p[i] = few[i];
}

#if ACTS == 8
#define MASKED(packed, i) both(i ? _mm256_srli_epi16(packed, BITS * i) : packed, _mm256_set1_epi8((1 << (BITS % 8)) - 1))
#if VNNI
typedef I Code;                                        // four codes a lane, from 0
constexpr int64_t FLUSH = 0, SHIFTED = 0;              // steps after which sums of 16 bits are full, 0 where they have 32; taken from codes
INLINE Code code_of(I packed, int i) { return BITS == 8 ? packed : MASKED(packed, i); }
#ifdef __AVXVNNI__
#define ENCODED "{vex} vpdpbusd"
#else
#define ENCODED "vpdpbusd"                             // that of AVX-512 VL
#endif
INLINE void dot(I& sum, Code code, I x) { asm(ENCODED " %2, %1, %0" : "+v"(sum) : "v"(code), "v"(x)); }
INLINE I wide(I sum) { return sum; }
#elif BITS == 8
// Two products of codes from 0 to 255 do not fit the 16 bits of `vpmaddubsw`; of codes from -128, whose signs x takes, they do:
// 2 * 128 * 127.
struct Code { I size, sign; };
constexpr int64_t FLUSH = 0, SHIFTED = 128;
INLINE Code code_of(I packed, int) {
    const I sign = _mm256_xor_si256(packed, _mm256_set1_epi8((char)0x80));
    return {_mm256_abs_epi8(sign), sign};
}
INLINE void dot(I& sum, Code code, I x) {
    const I twos = _mm256_maddubs_epi16(code.size, _mm256_sign_epi8(x, code.sign));
    sum = plus(sum, _mm256_madd_epi16(twos, _mm256_set1_epi16(1)));
}
INLINE I wide(I sum) { return sum; }
#else
// Of few bits several are added up in 16 bits: two codes times 127 so often as they fit.
typedef I Code;
constexpr int64_t FLUSH = 32767 / (2 * 127 * ((1 << BITS) - 1)) / (8 / BITS), SHIFTED = 0;
INLINE Code code_of(I packed, int i) { return MASKED(packed, i); }
INLINE void dot(I& sum, Code code, I x) { sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(code, x)); }
INLINE I wide(I sum) { return _mm256_madd_epi16(sum, _mm256_set1_epi16(1)); }
#endif
#elif ACTS == 16
struct Pair { V low, high; };                          // two numbers a lane, as floats
typedef Pair XPair;
INLINE XPair pair_at(const char* x) { return {_mm256_broadcast_ss((const float*)x), _mm256_broadcast_ss((const float*)x + 1)}; }
INLINE V pairs(V sum, Pair w, XPair x) { return fma(w.high, x.high, fma(w.low, x.low, sum)); }
#if BITS < 16
// A permutation looks at three bits of each lane, whatever lies above them; the fourth chooses between two tables.
INLINE V looked_up(I packed, int at, const uint16_t* table) {
    const I where = at ? _mm256_srli_epi32(packed, at) : packed;
    const V low = _mm256_permutevar8x32_ps(of_bfloat16(_mm_load_si128((const __m128i*)table)), where);
    if (BITS == 2) return low;                         // whose table is there twice
    const V high = _mm256_permutevar8x32_ps(of_bfloat16(_mm_load_si128((const __m128i*)(table + 8))), where);
    return _mm256_blendv_ps(low, high, of_bits(_mm256_slli_epi32(packed, 28 - at)));
}
INLINE Pair pair_of(I packed, int i, const uint16_t* table) {
    return {looked_up(packed, BITS * i, table), looked_up(packed, 16 + BITS * i, table)};
}
#else
INLINE Pair pair_of(I packed, int, const uint16_t*) {
    return {of_bits(_mm256_slli_epi32(packed, 16)), of_bits(both(packed, every((int)0xffff0000u)))};
}
#endif
#endif
