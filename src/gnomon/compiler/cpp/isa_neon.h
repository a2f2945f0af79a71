// Arm's Advanced SIMD: four floats a vector.
#include <arm_neon.h>
#define VW 4
typedef float F __attribute__((vector_size(16)));
#define REGISTER "w"
ALWAYS F vsqrt(F x) { return (F)vsqrtq_f32((float32x4_t)x); }
ALWAYS F vfloor(F x) { return (F)vrndmq_f32((float32x4_t)x); }
ALWAYS F vnearest(F x) { return (F)vrndnq_f32((float32x4_t)x); }
// a * b + c, rounded once
ALWAYS F fused(F a, F b, F c) { return (F)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
// past the caches: there is no such store of one vector
ALWAYS void st_past(float* p, F v) { memcpy(p, &v, sizeof v); }
ALWAYS void st_past_end() {}
// a > b ? a : b, so b where one is a NaN
ALWAYS F larger(F a, F b) { return a > b ? a : b; }
ALWAYS F smaller(F a, F b) { return a < b ? a : b; }
