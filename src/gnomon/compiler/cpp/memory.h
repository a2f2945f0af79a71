// What kernels share that read and write float32 or bfloat16: memory type S, all between them is in floats.
#pragma once
#ifndef MEMORY
#define MEMORY float
#endif
typedef MEMORY S;

ALWAYS float one(float x) { return x; }
ALWAYS float one(bf16 x) {
    const uint32_t bits = (uint32_t)x.bits << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

// n numbers that lie beside each other, as floats and back
ALWAYS void widen(const S* from, float* to, int64_t n) {
    int64_t i = 0;
    for (; i + VW <= n; i += VW) st(to + i, ld(from + i));
    for (; i < n; i++) to[i] = one(from[i]);
}
ALWAYS void narrow(const float* from, S* to, int64_t n) {
    int64_t i = 0;
    for (; i + VW <= n; i += VW) st(to + i, ld(from + i));
    if (i < n) st(to + i, ld(from + i, (int)(n - i)), (int)(n - i));
}
