// Vectors of VW lanes, the same for every instruction set: F float, D double, L 64-bit integers, B masks (0 or -1).
// Loads and stores take memory types (float, double, bf16, integers, bool); a last part of a row has n < VW lanes.
#pragma once
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#define ALWAYS static inline __attribute__((always_inline, unused))
#include GNOMON_ISA
typedef double D __attribute__((vector_size(8 * VW)));
typedef int64_t L __attribute__((vector_size(8 * VW)));
typedef int32_t B __attribute__((vector_size(4 * VW)));
typedef uint32_t U __attribute__((vector_size(4 * VW)));
struct bf16 { uint16_t bits; };
struct mask32 { int32_t bits; };  // a mask kept in scratch
// From one array of running sums to the next: whole pages less a quarter. A core takes a load for one of an earlier store at
// the same place of another page, and waits; torch's large tensors lie 64 bytes behind the start of one.
#define PAGE 4096
ALWAYS int64_t apart(int64_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE + 3 * PAGE / 4; }
// For the same reason, where in a page a row of scratch begins: as far as can be from where arrays do.
template <class... P> ALWAYS int64_t aside(P... arrays) {
    const int64_t begin[] = {(int64_t)((uintptr_t)arrays % PAGE)...};
    int64_t best = 0, most = -1;
    for (int64_t place = 0; place < PAGE; place += 256) {
        int64_t nearest = PAGE;
        for (int64_t b : begin) {
            const int64_t after = (place - b) & (PAGE - 1), either = after < PAGE - after ? after : PAGE - after;
            nearest = either < nearest ? either : nearest;
        }
        if (nearest > most) { most = nearest; best = place; }
    }
    return best;
}
// Asks for a line of memory. GCC takes a function that does nothing but prefetch for one without effects, and leaves out its
// calls (ipa-pure-const); the empty statement is an effect.
ALWAYS void ask(const void* p) { __builtin_prefetch(p); asm volatile("" : : "r"(p)); }
// What several operations take, in a register: GCC would load it again for each.
ALWAYS F once(F x) {
#ifdef REGISTER
    asm("" : "+" REGISTER(x));
#endif
    return x;
}
#define INF __builtin_inff()
#define NANF __builtin_nanf("")
extern "C" double exp(double) noexcept; extern "C" double log(double) noexcept; extern "C" double log1p(double) noexcept;
extern "C" double expm1(double) noexcept; extern "C" double tanh(double) noexcept; extern "C" double erf(double) noexcept;
extern "C" double sin(double) noexcept; extern "C" double cos(double) noexcept; extern "C" double pow(double, double) noexcept;
extern "C" float sinf(float) noexcept; extern "C" float cosf(float) noexcept; extern "C" float powf(float, float) noexcept;
extern "C" float log1pf(float) noexcept; extern "C" float expm1f(float) noexcept; extern "C" float tanf(float) noexcept;

// one value in every lane; less zeros, as -0 less 0 is -0 where 0 and -0 are 0, and compilers drop it
ALWAYS F splat(float x) { return x - F{}; }
ALWAYS D splatD(double x) { return x - D{}; }
ALWAYS L splatL(int64_t x) { L z = {}; return z + x; }
ALWAYS B splatB(bool x) { B z = {}; return z - (int32_t)x; }
// written out: a loop would be unrolled wherever it is inlined, which was a third of what g++ took for some kernels
#if VW == 16
#define LANES_ {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
#elif VW == 8
#define LANES_ {0, 1, 2, 3, 4, 5, 6, 7}
#else
#define LANES_ {0, 1, 2, 3}
#endif
ALWAYS B lanes() { return B LANES_; }
#define UNROLLED _Pragma("GCC unroll 16")
// VW vectors of four-byte numbers, rows become columns
template <class V> ALWAYS void transpose(V v[VW]) {
    UNROLLED for (int w = 1; w < VW; w *= 2) {
        const B even = (lanes() & w) == 0, low = even ? lanes() : lanes() - w + VW, high = even ? lanes() + w : lanes() + VW;
        UNROLLED for (int r = 0; r < VW; r++) {
            if (r & w) continue;
            const V a = v[r], b = v[r + w];
            v[r] = __builtin_shuffle(a, b, low);
            v[r + w] = __builtin_shuffle(a, b, high);
        }
    }
}
ALWAYS L lanesL() { return L LANES_; }
// the lane at which a position is t; positions of a row fit 32 bits
ALWAYS B at_lane(L t, int64_t j) { return lanes() == (int32_t)(t[0] - j); }
ALWAYS B first(int n) { return lanes() < n; }

// kinds
ALWAYS F toF(F x) { return x; }
ALWAYS F toF(D x) { return __builtin_convertvector(x, F); }
ALWAYS F toF(L x) { return __builtin_convertvector(x, F); }
ALWAYS F toF(B x) { return __builtin_convertvector(-x, F); }
ALWAYS D toD(F x) { return __builtin_convertvector(x, D); }
ALWAYS D toD(D x) { return x; }
ALWAYS D toD(L x) { return __builtin_convertvector(x, D); }
ALWAYS D toD(B x) { return __builtin_convertvector(-x, D); }
ALWAYS L toL(F x) { return __builtin_convertvector(x, L); }
ALWAYS L toL(D x) { return __builtin_convertvector(x, L); }
ALWAYS L toL(L x) { return x; }
ALWAYS L toL(B x) { return __builtin_convertvector(-x, L); }
// what an integer of that type keeps of 64 bits
template <class T> struct mem { typedef T V __attribute__((vector_size(sizeof(T) * VW))); };
template <class T> ALWAYS L kept(L x) { return __builtin_convertvector(__builtin_convertvector(x, typename mem<T>::V), L); }
ALWAYS L vint8(L x) { return kept<int8_t>(x); }
ALWAYS L vuint8(L x) { return kept<uint8_t>(x); }
ALWAYS L vint16(L x) { return kept<int16_t>(x); }
ALWAYS L vint32(L x) { return kept<int32_t>(x); }
// a float's integer part as 32 bits have it: the least number in the place of what they have not
ALWAYS L vfits32(L x) { L fits = (x >= INT32_MIN) & (x <= INT32_MAX); return (fits & x) | (~fits & (int64_t)INT32_MIN); }
ALWAYS B toB(B x) { return x; }
ALWAYS B toB(F x) { return x != 0.0f; }
ALWAYS B toB(L x) { return __builtin_convertvector(x != 0, B); }
ALWAYS B toB(D x) { return __builtin_convertvector(x != 0.0, B); }

ALWAYS F sel(B c, F a, F b) { return c ? a : b; }
ALWAYS B sel(B c, B a, B b) { return c ? a : b; }
ALWAYS L sel(B c, L a, L b) { L m = __builtin_convertvector(c, L); return (m & a) | (~m & b); }
ALWAYS D sel(B c, D a, D b) { return (D)sel(c, (L)a, (L)b); }

// memory: whole vectors, first n lanes, and lanes `s` apart
template <class T> ALWAYS typename mem<T>::V raw(const T* p) { typename mem<T>::V v; memcpy(&v, p, sizeof v); return v; }
#ifdef WIDENS
ALWAYS U wide(mem<uint16_t>::V v) { return (U)widened((I16)v); }
ALWAYS B wide(mem<uint8_t>::V v) { return (B)widened((I8)v); }
ALWAYS mem<uint16_t>::V low16(U v) { return (mem<uint16_t>::V)narrowed16((I)v); }
ALWAYS mem<uint8_t>::V low8(B v) { return (mem<uint8_t>::V)narrowed8((I)v); }
#else
ALWAYS U wide(mem<uint16_t>::V v) { return __builtin_convertvector(v, U); }
ALWAYS B wide(mem<uint8_t>::V v) { return __builtin_convertvector(v, B); }
ALWAYS mem<uint16_t>::V low16(U v) { return __builtin_convertvector(v, mem<uint16_t>::V); }
ALWAYS mem<uint8_t>::V low8(B v) { return __builtin_convertvector(v, mem<uint8_t>::V); }
#endif
ALWAYS F up(mem<uint16_t>::V v) { return (F)(wide(v) << 16); }
// The nearest bfloat16 in a float's upper half. Integer steps, as the instruction vcvtneps2bf16 gives 0 for the denormals
// that bfloat16 has, and with a branch for these was 1.6 times slower in chains. A NaN with lower bits set would carry into
// its sign: `quiet` it where numbers may come from float memory; those of arithmetic and of bfloat16 memory have none.
ALWAYS U nearest16(F x) { const U u = (U)x; return u + 0x7fffu + ((u >> 16) & 1u); }
ALWAYS F quiet(F x) { return sel(x != x, splat(NANF), x); }
ALWAYS mem<uint16_t>::V down(F x) { return low16(nearest16(quiet(x)) >> 16); }
ALWAYS F vbf16(F x) { return (F)(nearest16(x) & 0xffff0000u); }
struct rounded { F v; };                               // numbers of bfloat16 already
ALWAYS F ld(const float* p) { return raw(p); }
ALWAYS D ld(const double* p) { return raw(p); }
ALWAYS F ld(const bf16* p) { return up(raw((const uint16_t*)p)); }
ALWAYS L ld(const int64_t* p) { return raw(p); }
ALWAYS L ld(const int32_t* p) { return __builtin_convertvector(raw(p), L); }
ALWAYS L ld(const int16_t* p) { return __builtin_convertvector(raw(p), L); }
ALWAYS L ld(const int8_t* p) { return __builtin_convertvector(raw(p), L); }
ALWAYS L ld(const uint8_t* p) { return __builtin_convertvector(raw(p), L); }
ALWAYS B ld(const bool* p) { return wide(raw((const uint8_t*)p)) != 0; }
template <class T> ALWAYS auto ld(const T* p, int n) { T b[VW] = {}; for (int i = 0; i < n; i++) b[i] = p[i]; return ld(b); }
template <class T> ALWAYS auto lds(const T* p, int64_t s, int n) { T b[VW] = {}; for (int i = 0; i < n; i++) b[i] = p[i * s]; return ld(b); }
ALWAYS B ld(const mask32* p) { B v; memcpy(&v, p, sizeof v); return v; }
ALWAYS void st(mask32* p, B v) { memcpy(p, &v, sizeof v); }
ALWAYS F ld1(const float* p) { return splat(*p); }
ALWAYS D ld1(const double* p) { return splatD(*p); }
ALWAYS F ld1(const bf16* p) { uint32_t u = (uint32_t)p->bits << 16; float f; memcpy(&f, &u, 4); return splat(f); }
ALWAYS B ld1(const bool* p) { return splatB(*p); }
template <class T> ALWAYS L ld1(const T* p) { return splatL(*p); }

ALWAYS void st(float* p, F v) { memcpy(p, &v, sizeof v); }
ALWAYS void st(double* p, D v) { memcpy(p, &v, sizeof v); }
ALWAYS void st(bf16* p, F v) { auto u = down(v); memcpy(p, &u, sizeof u); }
ALWAYS void st(bf16* p, rounded x) { auto u = low16((U)x.v >> 16); memcpy(p, &u, sizeof u); }
ALWAYS void st(int64_t* p, L v) { memcpy(p, &v, sizeof v); }
ALWAYS void st(int32_t* p, L v) { auto u = __builtin_convertvector(v, mem<int32_t>::V); memcpy(p, &u, sizeof u); }
ALWAYS void st(int16_t* p, L v) { auto u = __builtin_convertvector(v, mem<int16_t>::V); memcpy(p, &u, sizeof u); }
ALWAYS void st(int8_t* p, L v) { auto u = __builtin_convertvector(v, mem<int8_t>::V); memcpy(p, &u, sizeof u); }
ALWAYS void st(uint8_t* p, L v) { auto u = __builtin_convertvector(v, mem<uint8_t>::V); memcpy(p, &u, sizeof u); }
ALWAYS void st(bool* p, B v) { auto u = low8(-v); memcpy(p, &u, sizeof u); }
template <class T, class V> ALWAYS void st(T* p, V v, int n) { T b[VW]; st(b, v); for (int i = 0; i < n; i++) p[i] = b[i]; }
template <class T, class V> ALWAYS void sts(T* p, int64_t s, V v, int n) { T b[VW]; st(b, v); for (int i = 0; i < n; i++) p[i * s] = b[i]; }

// a NaN on either side is the result, as torch's maximum and amax have it
ALWAYS F maxi(F a, F b) { return a == a ? larger(a, b) : a; }
ALWAYS F mini(F a, F b) { return a == a ? smaller(a, b) : a; }
// either side where one is a NaN: for sums that see the NaN themselves
ALWAYS F peak(F a, F b) { return larger(a, b); }
ALWAYS D peak(D a, D b) { return sel(__builtin_convertvector(a > b, B), a, b); }
ALWAYS D maxi(D a, D b) { return (D)(((L)((a > b) | (a != a)) & (L)a) | (~(L)((a > b) | (a != a)) & (L)b)); }
ALWAYS D mini(D a, D b) { return (D)(((L)((a < b) | (a != a)) & (L)a) | (~(L)((a < b) | (a != a)) & (L)b)); }
ALWAYS L maxi(L a, L b) { L m = a > b; return (m & a) | (~m & b); }
ALWAYS L mini(L a, L b) { L m = a < b; return (m & a) | (~m & b); }
ALWAYS F absv(F x) { return (F)((B)x & 0x7fffffff); }
ALWAYS D absv(D x) { return (D)((L)x & 0x7fffffffffffffffLL); }
ALWAYS L absv(L x) { L m = x >> 63; return (x ^ m) - m; }
// a * b + c in double, rounded once where the machine can (floats: isa_*.h)
#if defined(__FMA__) || defined(__AVX512F__) || defined(__ARM_FEATURE_FMA)
ALWAYS D fused(D a, D b, D c) { D r; for (int i = 0; i < VW; i++) r[i] = __builtin_fma(a[i], b[i], c[i]); return r; }
#else
ALWAYS D fused(D a, D b, D c) { return a * b + c; }
#endif
#define EACH(T, f, x) ({ T r_; for (int i_ = 0; i_ < VW; i_++) r_[i_] = f(x[i_]); r_; })
ALWAYS D vsqrt(D x) { return EACH(D, __builtin_sqrt, x); }
ALWAYS D vfloor(D x) { return EACH(D, __builtin_floor, x); }
ALWAYS D vnearest(D x) { return EACH(D, __builtin_nearbyint, x); }
ALWAYS F vceil(F x) { return -vfloor(-x); }
ALWAYS D vceil(D x) { return -vfloor(-x); }
ALWAYS F vtrunc(F x) { return sel(x < 0.0f, vceil(x), vfloor(x)); }
ALWAYS D vtrunc(D x) { return EACH(D, __builtin_trunc, x); }

// sums of lanes, in a fixed order
template <class V> ALWAYS auto hsum(V v) { auto s = v[0]; for (int i = 1; i < VW; i++) s += v[i]; return s; }
template <class V> ALWAYS auto hprod(V v) { auto s = v[0]; for (int i = 1; i < VW; i++) s *= v[i]; return s; }
// lanes w apart change places; w a power of two
template <class V> ALWAYS V turned(V v, int w) {
#ifdef __clang__
    V r; for (int i = 0; i < VW; i++) r[i] = v[i ^ w]; return r;
#else
    return __builtin_shuffle(v, lanes() ^ w);
#endif
}
ALWAYS float hsum(F v) { for (int w = VW / 2; w; w /= 2) v = v + turned(v, w); return v[0]; }
ALWAYS float hmax(F v) { for (int w = VW / 2; w; w /= 2) v = maxi(v, turned(v, w)); return v[0]; }
ALWAYS float hmin(F v) { for (int w = VW / 2; w; w /= 2) v = mini(v, turned(v, w)); return v[0]; }
template <class V> ALWAYS auto hmax(V v) { auto s = v[0]; for (int i = 1; i < VW; i++) s = (v[i] > s || v[i] != v[i]) ? v[i] : s; return s; }
template <class V> ALWAYS auto hmin(V v) { auto s = v[0]; for (int i = 1; i < VW; i++) s = (v[i] < s || v[i] != v[i]) ? v[i] : s; return s; }
ALWAYS bool any(B v) { for (int w = VW / 2; w; w /= 2) v = v | turned(v, w); return v[0] != 0; }
ALWAYS bool all(B v) { for (int w = VW / 2; w; w /= 2) v = v & turned(v, w); return v[0] != 0; }
