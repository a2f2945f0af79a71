// Any machine with 16-byte vectors (SSE2, NEON) or none: four floats a vector, all by GCC's generic vectors.
#define VW 4
typedef float F __attribute__((vector_size(16)));
ALWAYS F vsqrt(F x) {
    F r;
    for (int i = 0; i < VW; i++) r[i] = __builtin_sqrtf(x[i]);
    return r;
}
ALWAYS F vfloor(F x) {
    F r;
    for (int i = 0; i < VW; i++) r[i] = __builtin_floorf(x[i]);
    return r;
}
ALWAYS F vnearest(F x) {
    F r;
    for (int i = 0; i < VW; i++) r[i] = __builtin_nearbyintf(x[i]);
    return r;
}
// a * b + c, rounded once where the machine can
ALWAYS F fused(F a, F b, F c) { return a * b + c; }
ALWAYS void st_past(float* p, F v) { memcpy(p, &v, sizeof v); }
ALWAYS void st_past_end() {}
// a > b ? a : b, so b where one is a NaN
ALWAYS F larger(F a, F b) { return a > b ? a : b; }
ALWAYS F smaller(F a, F b) { return a < b ? a : b; }
