// AVX-512 F, BW, DQ, VL: sixteen floats a vector.
#define VW 16
typedef float F __attribute__((vector_size(64)));
#define REGISTER "v"
ALWAYS F vsqrt(F x) { return (F)__builtin_ia32_sqrtps512_mask(x, x, (unsigned short)-1, 4); }
ALWAYS F vfloor(F x) { return (F)__builtin_ia32_rndscaleps_mask((F)x, 1 | 8, (F)x, (unsigned short)-1, 4); }
ALWAYS F vnearest(F x) { return (F)__builtin_ia32_rndscaleps_mask((F)x, 0 | 8, (F)x, (unsigned short)-1, 4); }
// a * b + c, rounded once where the machine can
ALWAYS F fused(F a, F b, F c) { return (F)__builtin_ia32_vfmaddps512_mask(a, b, c, (unsigned short)-1, 4); }
// past the caches: nobody reads it before it would have left them; p on a vector's boundary
ALWAYS void st_past(float* p, F v) { __builtin_ia32_movntps512(p, v); }
ALWAYS void st_past_end() { __builtin_ia32_sfence(); }
// a > b ? a : b, so b where one is a NaN
ALWAYS F larger(F a, F b) { return (F)__builtin_ia32_maxps512_mask(a, b, a, (unsigned short)-1, 4); }
ALWAYS F smaller(F a, F b) { return (F)__builtin_ia32_minps512_mask(a, b, a, (unsigned short)-1, 4); }
// x times 2 to the power of k, down to 0 and up to infinity
ALWAYS F scaled(F x, F k) { return (F)__builtin_ia32_scalefps512_mask(x, k, x, (unsigned short)-1, 4); }
#define SCALES
// whole vectors of narrow integers; GCC's own conversion takes them in halves
#define WIDENS
typedef int I __attribute__((vector_size(64)));
typedef short I16 __attribute__((vector_size(32)));
typedef char I8 __attribute__((vector_size(16)));
ALWAYS I widened(I16 v) { return __builtin_ia32_pmovzxwd512_mask(v, I{}, (unsigned short)-1); }
ALWAYS I widened(I8 v) { return __builtin_ia32_pmovzxbd512_mask(v, I{}, (unsigned short)-1); }
ALWAYS I16 narrowed16(I v) { return __builtin_ia32_pmovdw512_mask(v, I16{}, (unsigned short)-1); }
ALWAYS I8 narrowed8(I v) { return __builtin_ia32_pmovdb512_mask(v, I8{}, (unsigned short)-1); }
// numbers of a table of sixteen: each lane's is at the low four bits of its place
#define LOOKS_UP
ALWAYS F looked_up(const float* table, F place) {
    F numbers;
    memcpy(&numbers, table, sizeof numbers);
    return (F)__builtin_ia32_permvarsf512_mask(numbers, (I)place, numbers, (unsigned short)-1);
}
