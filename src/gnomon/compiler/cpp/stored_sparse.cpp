// Products with weights of which a part is kept (gnomon/compiler/kernels/stored_sparse.py), which writes the constants above this text:
//   KIND       how what is kept is laid (below)
//   ACTS       bits of activations and of kept numbers: 8 (codes with a scale for each row), 16 (bfloat16), 32
//   N, M       of N_OF_M: kept of so many columns side by side; M is 2, 4, 8 or 16
//   WIDE       columns of a block (BLOCKS), or that are gone through at a time (ROWWISE)
// Shapes: x (m, k), weight (n, k), out (m, n). A panel is 16 outputs, a lane of 32 bits each: PER kept numbers a step.
//   N_OF_M     a panel is registers after registers: the places of some steps, bits over bits, and then their numbers. The
//              columns of a step are a register of x (BLOCK numbers), from which each lane takes its own by a permutation.
//   LISTED     any mask: of each 2 * BLOCK columns of a panel as many steps as its fullest output needs (`places`, a byte
//              each), a step being a register of places and one of numbers; lanes that have fewer are filled with zeros.
//   ROWWISE    any mask, ACTS 32: of each WIDE columns the kept numbers of TASK outputs, output after output, and for each its
//              column in 16 bits, filled up with zeros to FILLED; rows of x lie beside each other, WIDE of them in the first cache.
//   BLOCKS     of WIDE columns by 16 outputs; `places` are their first columns.
// Of a Product `scales` are (n) in float32 (ACTS 8), and `sums` (n) those of an output's codes: x is stored with 128 added.
// `starts`: where a panel (LISTED: bytes; BLOCKS: blocks) or an output in its columns (ROWWISE: numbers, TASK for each) begins,
// and where the last ends.
#include <immintrin.h>
#include <stdint.h>
#include <string.h>
#include "stored.h"

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

namespace {

constexpr int64_t SIDE = 16, PER = 32 / ACTS, BLOCK = 512 / ACTS;

// Bytes of a weight that are asked for before, into the second cache: what is asked for must come while R rows are multiplied by
// what is there. One row goes as fast as the processor's own reading ahead, of more a third less waits (measured; twice that no less).
template <int R> constexpr int64_t AHEAD = R > 2 ? 6656 : 3072;

INLINE __m512 sixteen_of(const void* from, int64_t at, __mmask16 some, bool wide) {
    if (wide) return _mm512_maskz_loadu_ps(some, (const float*)from + at);
    const __m256i v = _mm256_maskz_loadu_epi16(some, (const uint16_t*)from + at);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16));
}

// 16 numbers of x from k on, 0 beyond the last
INLINE __m512 sixteen(const Product& c, int64_t row, int64_t k) {
    const int64_t left = c.k - k;
    const __mmask16 some = left >= 16 ? 0xffff : left <= 0 ? 0 : (__mmask16)((1u << left) - 1);
    return sixteen_of(c.x, row * c.x_row + k, some, c.wide);
}

// Sizes as integers: infinity and NaN are above all numbers.
INLINE __m512i size_bits(__m512 x) { return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff)); }

struct Scale { float scale, by; };                     // of codes of -127 to 127; what numbers are multiplied by

// bits: of the largest size. Where that is none or infinite the scale is NaN, and so is what is multiplied by it.
INLINE Scale scale_of(int32_t bits) {
    float size;
    memcpy(&size, &bits, 4);
    const bool sound = bits < 0x7f800000;
    const float by = sound && size > 1e-36f ? 127.0f / size : 0.0f;
    return {!sound ? __builtin_nanf("") : by ? size / 127.0f : 0.0f, by};
}

INLINE __m512i eight_bits(__m512 x, float by) {
    const __m512i code = _mm512_cvtps_epi32(_mm512_mul_ps(x, _mm512_set1_ps(by)));
    return _mm512_max_epi32(_mm512_min_epi32(code, _mm512_set1_epi32(127)), _mm512_set1_epi32(-127));
}

INLINE int32_t four(const char* p) { int32_t v; memcpy(&v, p, 4); return v; }

#if ACTS == 8
typedef __m512i Sum;
INLINE Sum nothing() { return _mm512_setzero_si512(); }
INLINE Sum mac(Sum sum, __m512i x, __m512i w) {        // GCC 12 copies sums back and forth around the intrinsic
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w));
    return sum;
}
INLINE Sum added(Sum a, Sum b) { return _mm512_add_epi32(a, b); }
INLINE __m512i taken(__m512i at, __m512i x) { return _mm512_permutexvar_epi8(at, x); }
INLINE __m512i taken2(__m512i at, __m512i low, __m512i high) { return _mm512_permutex2var_epi8(low, at, high); }
#elif ACTS == 16
typedef __m512 Sum;
INLINE Sum nothing() { return _mm512_setzero_ps(); }
INLINE Sum added(Sum a, Sum b) { return _mm512_add_ps(a, b); }
INLINE Sum mac(Sum sum, __m512i x, __m512i w) { return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)x); }
INLINE __m512i taken(__m512i at, __m512i x) { return _mm512_permutexvar_epi16(at, x); }
INLINE __m512i taken2(__m512i at, __m512i low, __m512i high) { return _mm512_permutex2var_epi16(low, at, high); }
#else
typedef __m512 Sum;
INLINE Sum nothing() { return _mm512_setzero_ps(); }
INLINE Sum added(Sum a, Sum b) { return _mm512_add_ps(a, b); }
INLINE Sum mac(Sum sum, __m512i x, __m512i w) { return _mm512_fmadd_ps(_mm512_castsi512_ps(x), _mm512_castsi512_ps(w), sum); }
INLINE __m512i taken(__m512i at, __m512i x) { return _mm512_permutexvar_epi32(at, x); }
INLINE __m512i taken2(__m512i at, __m512i low, __m512i high) { return _mm512_permutex2var_epi32(low, at, high); }
#endif

INLINE int64_t row_bytes(const Product& c) { return c.padded * (ACTS / 8); }
INLINE const char* row_of(const Product& c, int64_t row) { return c.room + row * row_bytes(c); }
INLINE float* x_scales(const Product& c) { return (float*)(c.room + (c.m * row_bytes(c) + 63) / 64 * 64); }

// A row of x as it is multiplied. ACTS 8: where it has a number that is none or infinite its scale is NaN, and so is the result.
void laid(const Product& c, int64_t row) {
#if ACTS == 8
    uint8_t* to = (uint8_t*)c.room + row * c.padded;
    __m512i top = _mm512_setzero_si512();
    for (int64_t k = 0; k < c.k; k += 16) top = _mm512_max_epi32(top, size_bits(sixteen(c, row, k)));
    const Scale scale = scale_of(_mm512_reduce_max_epi32(top));
    for (int64_t k = 0; k < c.padded; k += 16) {
        const __m512i code = eight_bits(sixteen(c, row, k), scale.by);
        _mm_storeu_si128((__m128i*)(to + k), _mm512_cvtepi32_epi8(_mm512_add_epi32(code, _mm512_set1_epi32(128))));
    }
    x_scales(c)[row] = scale.scale;
#elif ACTS == 16
    uint16_t* to = (uint16_t*)c.room + row * c.padded;
    for (int64_t k = 0; k < c.padded; k += 16)
        _mm256_storeu_si256((__m256i*)(to + k), (__m256i)_mm512_cvtneps_pbh(sixteen(c, row, k)));
#else
    float* to = (float*)c.room + row * c.padded;
    for (int64_t k = 0; k < c.padded; k += 16) _mm512_storeu_ps(to + k, sixteen(c, row, k));
#endif
}

// 16 outputs from n of a row.
INLINE void put16(const Product& c, int64_t row, int64_t n, __m512 v) {
    const int64_t left = c.n - n;
    const __mmask16 some = left >= SIDE ? 0xffff : (__mmask16)((1u << left) - 1);
    if (c.bias) v = _mm512_add_ps(v, _mm512_maskz_loadu_ps(some, c.bias + n));
    v = _mm512_mul_ps(v, _mm512_set1_ps(c.factor));
    if (c.added) v = _mm512_add_ps(v, sixteen_of(c.added, row * c.added_row + n, some, c.wide));
    if (c.wide_out) _mm512_mask_storeu_ps((float*)c.out + row * c.out_row + n, some, v);
    else _mm256_mask_storeu_epi16((uint16_t*)c.out + row * c.out_row + n, some, (__m256i)_mm512_cvtneps_pbh(v));
}

// Of a panel's sums.
INLINE __m512 numbers(const Product& c, int64_t row, int64_t n, Sum sum) {
#if ACTS == 8
    const int64_t left = c.n - n;
    const __mmask16 some = left >= SIDE ? 0xffff : (__mmask16)((1u << left) - 1);
    const __m512i none = _mm512_slli_epi32(_mm512_maskz_loadu_epi32(some, c.sums + n), 7);
    const __m512 by = _mm512_mul_ps(_mm512_maskz_loadu_ps(some, (const float*)c.scales + n), _mm512_set1_ps(x_scales(c)[row]));
    return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(sum, none)), by);
#else
    return sum;
#endif
}

#if KIND != 2

#if KIND == 0
constexpr int BITS = M == 2 ? 1 : M == 4 ? 2 : 4;      // of a place
constexpr int FIELDS = ACTS / BITS, STEPS = 16 * N / M; // steps that a register of places serves, and a BLOCK has
constexpr int BLOCKS_BESIDE = FIELDS > STEPS ? FIELDS / STEPS : 1;
constexpr int TURN = STEPS * BLOCKS_BESIDE, PLACES = (TURN + FIELDS - 1) / FIELDS;
constexpr int64_t TURN_BYTES = 64 * (PLACES + TURN);

// Where the group of a kept number begins within its BLOCK, for the PER numbers of a lane.
constexpr uint32_t base(int step) {
    uint32_t out = 0;
    for (int i = 0; i < PER; i++) out |= (uint32_t)((step % STEPS * PER + i) / N * M) << (ACTS % 32 * i);
    return out;
}
constexpr uint32_t every(uint32_t one) {
    uint32_t out = 0;
    for (int i = 0; i < PER; i++) out |= one << (ACTS % 32 * i);
    return out;
}
#endif

template <int R> INLINE __m512i next(const uint8_t*& w) {
    const __m512i v = _mm512_loadu_si512(w);
    _mm_prefetch((const char*)w + AHEAD<R>, _MM_HINT_T1);
    w += 64;
    return v;
}

// R rows from m by a panel; rows beyond `last` are the last again, and are not written. One panel at a time: beside each other
// they come from memory in more streams than are read ahead (measured: half as fast).
template <int R>
__attribute__((noinline)) void tile(const Product& c, int64_t m, int64_t last, int64_t panel) {
    const char* x[R];
    UNROLL for (int r = 0; r < R; r++) x[r] = row_of(c, m + r < last ? m + r : last - 1);
    constexpr int BESIDE = KIND == 3 && R == 1 ? 4 : R <= 2 ? 2 : 1;   // sums beside each other, for the latency
    Sum sum[R][BESIDE];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int i = 0; i < BESIDE; i++) sum[r][i] = nothing();
#if KIND == 0
    const int64_t turns = c.padded / (BLOCK * BLOCKS_BESIDE);
    const uint8_t* w = c.codes + panel * turns * TURN_BYTES;
    for (int64_t turn = 0; turn < turns; turn++) {
        __m512i places[PLACES];
        UNROLL for (int i = 0; i < PLACES; i++) places[i] = next<R>(w);
        UNROLL for (int t = 0; t < TURN; t++) {
            const __m512i v = next<R>(w), field = _mm512_srli_epi32(places[t / FIELDS], t % FIELDS * BITS);
            const __m512i at = _mm512_ternarylogic_epi32(   // (field & a place's bits) | where its group begins
                field, _mm512_set1_epi32((int)every((1u << BITS) - 1)), _mm512_set1_epi32((int)base(t)), 0xEA);
            UNROLL for (int r = 0; r < R; r++)
                sum[r][t % BESIDE] = mac(sum[r][t % BESIDE], taken(at, _mm512_loadu_si512(x[r] + 64 * (t / STEPS))), v);
        }
        UNROLL for (int r = 0; r < R; r++) x[r] += 64 * BLOCKS_BESIDE;
    }
#elif KIND == 1
    const int64_t blocks = c.padded / (2 * BLOCK);
    const uint8_t* w = c.codes + c.starts[panel];
    const uint8_t* steps = (const uint8_t*)c.places + panel * blocks;
    for (int64_t b = 0; b < blocks; b++) {
        __m512i low[R], high[R];
        UNROLL for (int r = 0; r < R; r++) low[r] = _mm512_loadu_si512(x[r] + 128 * b), high[r] = _mm512_loadu_si512(x[r] + 128 * b + 64);
        const auto step = [&](int i) __attribute__((always_inline)) {
#if ACTS == 8
            const __m512i at = _mm512_loadu_si512(w);
#elif ACTS == 16
            const __m512i at = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)w));
#else
            const __m512i at = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)w));
#endif
            const __m512i v = _mm512_loadu_si512(w + 16 * PER);
            _mm_prefetch((const char*)w + AHEAD<R>, _MM_HINT_T1);
            _mm_prefetch((const char*)w + 64 + AHEAD<R>, _MM_HINT_T1);
            w += 64 + 16 * PER;
            UNROLL for (int r = 0; r < R; r++) sum[r][i] = mac(sum[r][i], taken2(at, low[r], high[r]), v);
        };
        int left = steps[b];
        for (; left >= BESIDE; left -= BESIDE) UNROLL for (int i = 0; i < BESIDE; i++) step(i);
        if (BESIDE > 1 && left) step(0);
    }
#else
    const int32_t* columns = (const int32_t*)c.places;
    constexpr int STEPS = WIDE / PER;
    const uint8_t* w = c.codes + c.starts[panel] * STEPS * 64;
    for (int64_t b = c.starts[panel]; b < c.starts[panel + 1]; b++) {
        const int64_t from = columns[b] * (ACTS / 8);
        UNROLL for (int t = 0; t < STEPS; t++) {
            const __m512i v = _mm512_loadu_si512(w + 64 * t);
            _mm_prefetch((const char*)w + 64 * t + AHEAD<R>, _MM_HINT_T1);
            UNROLL for (int r = 0; r < R; r++)
                sum[r][t % BESIDE] = mac(sum[r][t % BESIDE], _mm512_set1_epi32(four(x[r] + from + 4 * t)), v);
        }
        w += 64 * STEPS;
    }
#endif
    for (int r = 0; r < R && m + r < last; r++) {
        UNROLL for (int i = 1; i < BESIDE; i++) sum[r][0] = added(sum[r][0], sum[r][i]);
        put16(c, m + r, panel * SIDE, numbers(c, m + r, panel * SIDE, sum[r][0]));
    }
}

constexpr int64_t TASK = 4, ROWS = 8;                  // panels of a task; rows of a tile at most

template <int R>
void some(const Product& c, int64_t m, int64_t last, int64_t from, int64_t to) {
    for (int64_t p = from; p < to; p++) tile<R>(c, m, last, p);
}

void rows_of(const Product& c, int64_t m, int64_t last, int64_t from, int64_t to) {
    const int64_t rows = last - m;
    if (rows == 1) some<1>(c, m, last, from, to);
    else if (rows == 2) some<2>(c, m, last, from, to);
    else if (rows <= 4) some<4>(c, m, last, from, to);
    else if (rows <= 6) some<6>(c, m, last, from, to);
    else some<8>(c, m, last, from, to);
}

#else

constexpr int64_t TASK = 64, ROWS = 32;                // outputs of a task; rows beside each other at most

// Adds the numbers from `from` to `to` times their columns of x to 16 * V rows.
template <int V>
INLINE void line(const float* w, const uint16_t* at, int64_t from, int64_t to, const float* x, float* out) {
    constexpr int BESIDE = V == 1 ? 4 : 2;
    __m512 sum[BESIDE][V];
    UNROLL for (int i = 0; i < BESIDE; i++) UNROLL for (int v = 0; v < V; v++)
        sum[i][v] = i ? _mm512_setzero_ps() : _mm512_loadu_ps(out + 16 * v);
    for (int64_t j = from; j < to; j += BESIDE)
        UNROLL for (int i = 0; i < BESIDE; i++) {
            const __m512 one = _mm512_set1_ps(w[j + i]);
            UNROLL for (int v = 0; v < V; v++)
                sum[i][v] = _mm512_fmadd_ps(one, _mm512_loadu_ps(x + (size_t)at[j + i] * (16 * V) + 16 * v), sum[i][v]);
        }
    UNROLL for (int v = 0; v < V; v++) {
        UNROLL for (int i = 1; i < BESIDE; i++) sum[0][v] = _mm512_add_ps(sum[0][v], sum[i][v]);
        _mm512_storeu_ps(out + 16 * v, sum[0][v]);
    }
}

// The same of 8 rows. Eight kept numbers are read at once and each is spread by a permutation: broadcasts from memory would take
// as many loads as the rows of x do (measured: 1.2 times as long; half of that again for what is not asked for before).
INLINE void line8(const float* w, const uint16_t* at, int64_t from, int64_t to, const float* x, float* out) {
    __m256 sum[8];
    __m256i pick[8];
    UNROLL for (int i = 0; i < 8; i++) pick[i] = _mm256_set1_epi32(i), sum[i] = i ? _mm256_setzero_ps() : _mm256_loadu_ps(out);
    for (int64_t j = from; j < to; j += 8) {
        _mm_prefetch((const char*)(w + j) + 2048, _MM_HINT_T0);
        _mm_prefetch((const char*)(at + j) + 1024, _MM_HINT_T0);
        const __m256 eight = _mm256_loadu_ps(w + j);
        UNROLL for (int i = 0; i < 8; i++)
            sum[i] = _mm256_fmadd_ps(_mm256_permutevar8x32_ps(eight, pick[i]), _mm256_loadu_ps(x + (size_t)at[j + i] * 8), sum[i]);
    }
    UNROLL for (int i = 4; i; i /= 2) UNROLL for (int v = 0; v < i; v++) sum[v] = _mm256_add_ps(sum[v], sum[v + i]);
    _mm256_storeu_ps(out, sum[0]);
}

INLINE void line1(const float* w, const uint16_t* at, int64_t from, int64_t to, const float* x, float* out) {
    __m128 sum[2] = {_mm_setzero_ps(), _mm_setzero_ps()};
    for (int64_t j = from; j < to; j += 8)
        UNROLL for (int i = 0; i < 2; i++) {
            uint64_t a;
            memcpy(&a, at + j + 4 * i, 8);
            const __m128 four = _mm_setr_ps(x[a & 0xffff], x[a >> 16 & 0xffff], x[a >> 32 & 0xffff], x[a >> 48]);
            sum[i] = _mm_fmadd_ps(_mm_loadu_ps(w + j + 4 * i), four, sum[i]);
        }
    sum[0] = _mm_add_ps(sum[0], sum[1]);
    sum[0] = _mm_add_ps(sum[0], _mm_movehl_ps(sum[0], sum[0]));
    *out += sum[0][0] + sum[0][1];
}

// Lanes that a block of rows has, as `beside` lays them.
INLINE int64_t lanes_of(int64_t rows) { return rows == 1 ? 1 : rows <= 8 ? 8 : rows <= 16 ? 16 : 32; }

void rows_of(const Product& c, int64_t m, int64_t last, int64_t from, int64_t to) {
    const int64_t lanes = lanes_of(last - m), turns = (c.k + WIDE - 1) / WIDE;
    const uint16_t* at = (const uint16_t*)c.places;
    const float* w = (const float*)c.codes;
    alignas(64) float sum[TASK * ROWS];
    memset(sum, 0, (size_t)(TASK * lanes * 4));
    for (int64_t turn = 0; turn < turns; turn++) {
        const float* x = (const float*)c.room + m * c.padded + turn * WIDE * lanes;
        const int64_t* starts = c.starts + (from / TASK * turns + turn) * TASK;
        for (int64_t i = 0; i < to - from; i++) {
            float* const out = sum + i * lanes;
            if (lanes == 1) line1(w, at, starts[i], starts[i + 1], x, out);
            else if (lanes == 8) line8(w, at, starts[i], starts[i + 1], x, out);
            else if (lanes == 16) line<1>(w, at, starts[i], starts[i + 1], x, out);
            else line<2>(w, at, starts[i], starts[i + 1], x, out);
        }
    }
    for (int64_t r = 0; r < last - m; r++)
        for (int64_t i = 0; i < to - from; i += SIDE) {
            alignas(64) float some[SIDE];
            for (int64_t j = 0; j < SIDE; j++) some[j] = sum[(i + j) * lanes + r];
            put16(c, m + r, from + i, _mm512_load_ps(some));
        }
}

// Rows m to last of x, (k, lanes), zeros in lanes beyond; the room of a block begins where that of its first row would.
void beside(const Product& c, int64_t m, int64_t last) {
    const int64_t lanes = lanes_of(last - m);
    float* to = (float*)c.room + m * c.padded;
    if (last - m < lanes) memset(to, 0, (size_t)(c.padded * lanes * 4));
    for (int64_t row = m; row < last; row++)
        for (int64_t k = 0; k < c.k; k += 16) {
            alignas(64) float some[16];
            _mm512_store_ps(some, sixteen(c, row, k));
            for (int64_t i = 0; i < 16 && k + i < c.k; i++) to[(k + i) * lanes + row - m] = some[i];
        }
}

#endif

}  // namespace

extern "C" int gnomon_kernel(const Product* given) {
    const Product& c = *given;
#if KIND == 2
    const int64_t all = c.n;
#else
    const int64_t all = (c.n + SIDE - 1) / SIDE;
#endif
    const int64_t tasks = (all + TASK - 1) / TASK;
#if KIND == 2
    const int64_t blocks = (c.m + ROWS - 1) / ROWS;
#endif
#pragma omp parallel num_threads((int)c.threads) if (c.threads > 1)
    {
#if KIND == 2
#pragma omp for schedule(static)
        for (int64_t b = 0; b < blocks; b++) beside(c, b * ROWS, (b + 1) * ROWS < c.m ? (b + 1) * ROWS : c.m);
#else
#pragma omp for schedule(static)
        for (int64_t row = 0; row < c.m; row++) laid(c, row);
#endif
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < tasks; task++) {
            const int64_t from = task * TASK, to = from + TASK < all ? from + TASK : all;
            for (int64_t m = 0; m < c.m;) {
                const int64_t left = c.m - m;
                const int64_t many = (left + ROWS - 1) / ROWS, rows = KIND == 2 ? (left < ROWS ? left : ROWS) : (left + many - 1) / many;
                rows_of(c, m, m + rows, from, to);
                m += rows;
            }
        }
    }
    return 0;
}
