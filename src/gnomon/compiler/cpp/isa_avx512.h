// AVX-512 F, BW, DQ, VL: sixteen floats a vector.
#define VW 16
typedef float F __attribute__((vector_size(64)));
ALWAYS F vsqrt(F x) {
    F r;
    for (int i = 0; i < 16; i++) r[i] = __builtin_sqrtf(x[i]);
    return r;
}
ALWAYS F vfloor(F x) { return (F)__builtin_ia32_rndscaleps_mask((F)x, 1 | 8, (F)x, (unsigned short)-1, 4); }
ALWAYS F vnearest(F x) { return (F)__builtin_ia32_rndscaleps_mask((F)x, 0 | 8, (F)x, (unsigned short)-1, 4); }
// past the caches: nobody reads it before it would have left them; p on a vector's boundary
ALWAYS void st_past(float* p, F v) { __builtin_ia32_movntps512(p, v); }
ALWAYS void st_past_end() { __builtin_ia32_sfence(); }
// a > b ? a : b, so b where one is a NaN
ALWAYS F larger(F a, F b) { return (F)__builtin_ia32_maxps512_mask(a, b, a, (unsigned short)-1, 4); }
ALWAYS F smaller(F a, F b) { return (F)__builtin_ia32_minps512_mask(a, b, a, (unsigned short)-1, 4); }
