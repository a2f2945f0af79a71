// What products with stored weights (stored.cpp) are told of any machine with 16-byte vectors (SSE2, Arm's Advanced SIMD), by
// GCC's generic vectors: correct wherever there is a compiler, and as fast as that makes it.
#pragma once
constexpr int64_t SIDE = 4;                            // outputs of a panel
constexpr int64_t REGISTERS = 16;
constexpr int64_t PAIR_BYTES = 8;                      // of two numbers of x that meet two of bfloat16: they are kept as floats
typedef float V __attribute__((vector_size(16)));
typedef int32_t I __attribute__((vector_size(16)));
typedef uint32_t U __attribute__((vector_size(16)));

INLINE V nothing() { return V{}; }
INLINE V all(float x) { return V{x, x, x, x}; }
INLINE I every(int32_t x) { return I{x, x, x, x}; }
INLINE V load(const float* p) { V v; memcpy(&v, p, sizeof v); return v; }
INLINE I load(const void* p) { I v; memcpy(&v, p, sizeof v); return v; }
INLINE V fma(V a, V b, V c) { return a * b + c; }
INLINE V fnma(V a, V b, V c) { return c - a * b; }
INLINE I plus(I a, I b) { return a + b; }
INLINE I times(I a, I b) { return a * b; }
INLINE I larger(I a, I b) { return a > b ? a : b; }
INLINE I smaller(I a, I b) { return a < b ? a : b; }
INLINE V larger(V a, V b) { return a > b ? a : b; }
INLINE V smaller(V a, V b) { return a < b ? a : b; }
INLINE int32_t most(int32_t a, int32_t b) { return a > b ? a : b; }
INLINE int32_t largest(I a) { return most(most(a[0], a[1]), most(a[2], a[3])); }
INLINE int32_t total(I a) { return a[0] + a[1] + a[2] + a[3]; }
INLINE V numbers(I a) { return __builtin_convertvector(a, V); }
INLINE I nearest(V a) {
    I out;
    for (int i = 0; i < SIDE; i++) out[i] = (int32_t)__builtin_rintf(a[i]);
    return out;
}
INLINE I bits(V a) { return (I)a; }
INLINE V of_bits(I a) { return (V)a; }
INLINE I both(I a, I b) { return a & b; }

INLINE V float16(const uint16_t* p) {
    V out;
    for (int i = 0; i < SIDE; i++) {                   // exact: the exponent is moved by a multiplication, which knows subnormals
        const uint32_t size = p[i] & 0x7fffu, sign = (uint32_t)(p[i] & 0x8000u) << 16;
        const uint32_t plain = size << 13;
        float v;
        memcpy(&v, &plain, 4);
        v *= 0x1p112f;
        uint32_t word;
        memcpy(&word, &v, 4);
        word = (size >= 0x7c00u ? plain | 0x7f800000u : word) | sign;
        memcpy(&v, &word, 4);
        out[i] = v;
    }
    return out;
}

// The first n of 4; 0 in the others.
INLINE V some(const float* p, int64_t n) {
    if (n >= SIDE) return load(p);
    V out = {};
    for (int64_t i = 0; i < n; i++) out[i] = p[i];
    return out;
}
INLINE V some(const uint16_t* p, int64_t n) {          // bfloat16
    U out = {};
    for (int64_t i = 0; i < SIDE && i < n; i++) out[i] = (uint32_t)p[i] << 16;
    return (V)out;
}
INLINE void put(float* p, V v, int64_t n) {
    if (n >= SIDE) memcpy(p, &v, sizeof v);
    else for (int64_t i = 0; i < n; i++) p[i] = v[i];
}
INLINE void put(uint16_t* p, V v, int64_t n) {         // to nearest
    const U word = (U)v, up = (word + ((word >> 16 & 1) + 0x7fff)) >> 16;
    const I none = v != v;
    for (int64_t i = 0; i < SIDE && i < n; i++) p[i] = none[i] ? 0x7fc0 : (uint16_t)up[i];
}
INLINE void put(int8_t* p, I v, int64_t n) { for (int64_t i = 0; i < SIDE && i < n; i++) p[i] = (int8_t)v[i]; }

#if ACTS == 8
typedef I Code;                                        // four codes a lane, from 0
constexpr int64_t FLUSH = 0, SHIFTED = 0;              // steps after which sums of 16 bits are full, 0 where they have 32; taken from codes
INLINE Code code_of(I packed, int i) {
    return BITS == 8 ? packed : (I)((U)packed >> (unsigned)(BITS * i)) & every(0x01010101 * ((1 << (BITS % 8)) - 1));
}
INLINE void dot(I& sum, Code code, I x) {
    for (int i = 0; i < 32; i += 8) sum += (I)((U)code >> (unsigned)i & 255u) * ((I)((U)x << (unsigned)(24 - i)) >> 24);
}
INLINE I wide(I sum) { return sum; }
#elif ACTS == 16
struct Pair { V low, high; };                          // two numbers a lane, as floats
typedef Pair XPair;
INLINE XPair pair_at(const char* x) {
    float v[2];
    memcpy(v, x, 8);
    return {all(v[0]), all(v[1])};
}
INLINE V pairs(V sum, Pair w, XPair x) { return fma(w.high, x.high, fma(w.low, x.low, sum)); }
#if BITS < 16
INLINE V looked_up(I packed, int at, const uint16_t* table) {
    U out;
    for (int i = 0; i < SIDE; i++) out[i] = (uint32_t)table[(uint32_t)packed[i] >> at & ((1u << BITS) - 1)] << 16;
    return (V)out;
}
INLINE Pair pair_of(I packed, int i, const uint16_t* table) {
    return {looked_up(packed, BITS * i, table), looked_up(packed, 16 + BITS * i, table)};
}
#else
INLINE Pair pair_of(I packed, int, const uint16_t*) {
    return {(V)((U)packed << 16), (V)((U)packed & 0xffff0000u)};
}
#endif
#endif
