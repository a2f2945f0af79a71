// What products with stored weights (stored.cpp) are told of AVX-512: F, BW, DQ, VL; VNNI for activations in eight bits.
#pragma once
#include <immintrin.h>
constexpr int64_t SIDE = 16;                           // outputs of a panel: 32-bit lanes of a register
constexpr int64_t REGISTERS = 32;
constexpr int64_t PAIR_BYTES = 4;                      // of two numbers of x that meet two of bfloat16
typedef __m512 V;
typedef __m512i I;

INLINE __mmask16 first(int64_t n) { return n >= SIDE ? 0xffff : n <= 0 ? 0 : (__mmask16)((1u << n) - 1); }
INLINE V nothing() { return _mm512_setzero_ps(); }
INLINE V all(float x) { return _mm512_set1_ps(x); }
INLINE I every(int32_t x) { return _mm512_set1_epi32(x); }
INLINE V load(const float* p) { return _mm512_loadu_ps(p); }
INLINE I load(const void* p) { return _mm512_loadu_si512(p); }
INLINE V float16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
INLINE V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
INLINE V fnma(V a, V b, V c) { return _mm512_fnmadd_ps(a, b, c); }
INLINE I plus(I a, I b) { return _mm512_add_epi32(a, b); }
INLINE I times(I a, I b) { return _mm512_mullo_epi32(a, b); }
INLINE I larger(I a, I b) { return _mm512_max_epi32(a, b); }
INLINE I smaller(I a, I b) { return _mm512_min_epi32(a, b); }
INLINE V larger(V a, V b) { return _mm512_max_ps(a, b); }
INLINE V smaller(V a, V b) { return _mm512_min_ps(a, b); }
INLINE int32_t largest(I a) { return _mm512_reduce_max_epi32(a); }
INLINE int32_t total(I a) { return _mm512_reduce_add_epi32(a); }
INLINE V numbers(I a) { return _mm512_cvtepi32_ps(a); }
INLINE I nearest(V a) { return _mm512_cvtps_epi32(a); }
INLINE I bits(V a) { return _mm512_castps_si512(a); }
INLINE V of_bits(I a) { return _mm512_castsi512_ps(a); }
INLINE I both(I a, I b) { return _mm512_and_si512(a, b); }

// The first n of 16; 0 in the others.
INLINE V some(const float* p, int64_t n) { return _mm512_maskz_loadu_ps(first(n), p); }
INLINE V some(const uint16_t* p, int64_t n) {          // bfloat16
    return of_bits(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first(n), p)), 16));
}

// 16 floats as bfloat16, to nearest; and two of bfloat16 times two, added to 16 sums. Processors without the instructions compute
// the same in float32.
#ifdef __AVX512BF16__
INLINE __m256i halves(V v) { return (__m256i)_mm512_cvtneps_pbh(v); }
INLINE V pairs(V sum, I w, I x) { return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)x); }
#else
INLINE __m256i halves(V v) {
    const I up = plus(bits(v), plus(both(_mm512_srli_epi32(bits(v), 16), every(1)), every(0x7fff)));
    const I to = _mm512_mask_mov_epi32(up, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), every(0x7fc00000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(to, 16));
}
INLINE V pairs(V sum, I w, I x) {
    const I high = every((int)0xffff0000u);
    sum = fma(of_bits(_mm512_slli_epi32(w, 16)), of_bits(_mm512_slli_epi32(x, 16)), sum);
    return fma(of_bits(both(w, high)), of_bits(both(x, high)), sum);
}
#endif
INLINE void put(float* p, V v, int64_t n) { _mm512_mask_storeu_ps(p, first(n), v); }
INLINE void put(uint16_t* p, V v, int64_t n) { _mm256_mask_storeu_epi16(p, first(n), halves(v)); }
INLINE void put(int8_t* p, I v, int64_t n) { _mm_mask_storeu_epi8(p, first(n), _mm512_cvtepi32_epi8(v)); }

#if ACTS == 8
typedef I Code;                                        // four codes a lane, from 0
constexpr int64_t FLUSH = 0, SHIFTED = 0;              // steps after which sums of 16 bits are full, 0 where they have 32; taken from codes
INLINE Code code_of(I packed, int i) {
    return BITS == 8 ? packed : both(i ? _mm512_srli_epi16(packed, BITS * i) : packed, _mm512_set1_epi8((1 << (BITS % 8)) - 1));
}
// sum += four codes times four of x, of 16 outputs. GCC 12 copies sums back and forth around the intrinsic: twice as slow.
INLINE void dot(I& sum, Code code, I x) { asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(code), "v"(x)); }
INLINE I wide(I sum) { return sum; }
#elif ACTS == 16
typedef I Pair;
typedef I XPair;
INLINE XPair pair_at(const char* x) { int32_t v; memcpy(&v, x, 4); return every(v); }
#if BITS < 16
INLINE Pair pair_of(I packed, int i, const uint16_t* table) {
    return _mm512_permutexvar_epi16(both(i ? _mm512_srli_epi16(packed, BITS * i) : packed, _mm512_set1_epi16((1 << BITS) - 1)), load(table));
}
#else
INLINE Pair pair_of(I packed, int, const uint16_t*) { return packed; }
#endif
#endif
