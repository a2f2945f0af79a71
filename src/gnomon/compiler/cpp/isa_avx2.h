// AVX2 with FMA: eight floats a vector. What GCC's generic vectors cannot say in one instruction.
#define VW 8
typedef float F __attribute__((vector_size(32)));
#define REGISTER "x"
ALWAYS F vsqrt(F x) { return __builtin_ia32_sqrtps256(x); }
ALWAYS F vfloor(F x) { return __builtin_ia32_roundps256(x, 1 | 8); }
ALWAYS F vnearest(F x) { return __builtin_ia32_roundps256(x, 0 | 8); }
// a * b + c, rounded once where the machine can
ALWAYS F fused(F a, F b, F c) { return (F)__builtin_ia32_vfmaddps256(a, b, c); }
// past the caches: nobody reads it before it would have left them; p on a vector's boundary
ALWAYS void st_past(float* p, F v) { __builtin_ia32_movntps256(p, v); }
ALWAYS void st_past_end() { __builtin_ia32_sfence(); }
// a > b ? a : b, so b where one is a NaN
ALWAYS F larger(F a, F b) { return __builtin_ia32_maxps256(a, b); }
ALWAYS F smaller(F a, F b) { return __builtin_ia32_minps256(a, b); }
// lanes of four vectors, each from 0 to 255, as bytes one behind the other; GCC's own conversion takes each lane by itself
#define PACKS
typedef int I __attribute__((vector_size(32)));
typedef char Bytes __attribute__((vector_size(32)));
ALWAYS Bytes packed(I a, I b, I c, I d) {
    const Bytes at = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15,
                      0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
    const Bytes fours = __builtin_ia32_pshufb256((Bytes)(a | b << 8 | c << 16 | d << 24), at);
    return (Bytes)__builtin_ia32_permvarsi256((I)fours, I{0, 4, 1, 5, 2, 6, 3, 7});
}
