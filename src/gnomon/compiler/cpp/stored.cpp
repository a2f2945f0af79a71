// Products with weights that are stored in few bits (gnomon/compiler/kernels/stored.py), which writes the constants above this text:
//   BITS 2, 4, 8, 16, 32 of a code       GROUP    columns that share a scale, 0 for all of a row
//   ACTS 8, 16, 32      bits of activations: codes with a scale for each row and group, bfloat16, or float32 (weights too)
//   HALF 0, 1           scales in float16 or float32      ZEROS 0, 1  whether groups have zeros of their own
//   ZERO                what stands for 0 elsewhere       TABLE       bfloat16 bits of the numbers that codes stand for (ACTS 16)
//   LANES               the header that says what an instruction set has: registers of SIDE lanes, and how they multiply codes
//   VNNI 0, 1           whether a set of AVX2 has dot products of bytes
//   RANGE 0, 127, 255   steps from the least to the largest number of all of x, which then has one scale and one zero, as ATen's
//                       dynamic quantisation; 0: a scale for each row and group (ACTS 8, BITS 8, GROUP 0)
// Shapes: x (m, k), weight (n, k), out (m, n). A panel is SIDE outputs, and k in steps of a register: of each output 4 codes
// (ACTS 8), 2 numbers (ACTS 16) or one (ACTS 32), so that one step is one register and, where there are dot products, one
// instruction a row; codes of few bits lie over each other in a step, the first k in the lowest bits. Scales and zeros are
// (panel, group, SIDE).
#include <omp.h>
#include <stdint.h>
#include <string.h>
#include "stored.h"

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

namespace {

#include LANES

constexpr int64_t LAYERS = ACTS / BITS > 0 ? ACTS / BITS : 1;   // of codes in a step
constexpr int64_t STEP = (32 / ACTS) * LAYERS;                  // k of a step
constexpr int64_t BYTES = 4 * SIDE;                             // of a step
constexpr int64_t X_BYTES = ACTS == 16 ? PAIR_BYTES / 2 : ACTS / 8;   // of a number of x as it is multiplied
constexpr int64_t TOGETHER = 252;                               // rows that stay in cache
constexpr int64_t AHEAD = 3072;                                 // bytes of a panel that are asked for before, into the second cache: into the first they come a third slower (measured)

INLINE int64_t groups(const Product& c) { return GROUP ? c.padded / (GROUP ? GROUP : 1) : 1; }
INLINE int64_t row_bytes(const Product& c) { return c.padded * X_BYTES; }
INLINE float* x_scales(const Product& c) { return (float*)(c.room + (c.m * row_bytes(c) + 63) / 64 * 64); }
INLINE int32_t* x_sums(const Product& c) { return (int32_t*)(x_scales(c) + c.m * groups(c)); }

#if RANGE
// How all of x is rounded: code = x inverse + zero, from 0 to 255, of which CENTER is taken so that it is a signed byte (whose
// negative is one too, where registers need it: AVX2 without dot products has RANGE 127 only).
constexpr int32_t CENTER = (RANGE + 1) / 2;
struct Whole { float inverse, scale; int32_t zero; };
INLINE Whole* whole_of(const Product& c) { return (Whole*)(x_sums(c) + c.m); }

// As ATen chooses them (quant_utils::ChooseQuantizationParams of aten/src/ATen/native/quantized/cpu/QuantUtils.h with qmin 0):
// the interval takes in 0, a scale is at least SMALLEST, and the zero is that of the end whose rounding errs less.
Whole chosen(float low, float high) {
    constexpr double SMALLEST = 6.1e-5f;
    low = low < 0 ? low : 0, high = high > 0 ? high : 0;
    double scale = ((double)high - low) / RANGE;
    if ((float)scale == 0 || __builtin_isinf(1.0f / (float)scale)) scale = 0.1;
    if (scale < SMALLEST) {
        const float larger = (float)SMALLEST / (float)scale;
        scale = SMALLEST;
        if (low == 0) high = (float)SMALLEST * RANGE;
        else if (high == 0) low = -(float)SMALLEST * RANGE;
        else low *= larger, high *= larger;
    }
    const double from_low = 0 - low / scale, from_high = RANGE - high / scale;
    const double first = -__builtin_fabs(low / scale) < RANGE - __builtin_fabs(high / scale) ? from_low : from_high;
    const int32_t zero = first < 0 ? 0 : first > RANGE ? RANGE : (int32_t)__builtin_nearbyint(first);
    return {1.0f / (float)scale, (float)scale, zero};
}
#endif

INLINE V some_of(const void* from, int64_t at, int64_t n, bool wide) {
    return wide ? some((const float*)from + at, n) : some((const uint16_t*)from + at, n);
}

// SIDE numbers of x from k on, 0 from `end` on and beyond the last
INLINE V x_at(const Product& c, int64_t row, int64_t k, int64_t end) {
    const int64_t left = (end < c.k ? end : c.k) - k;
    return left > 0 ? some_of(c.x, row * c.x_row + k, left, c.wide) : nothing();
}

// Whether x is read where it lies: it has the kernel's numbers, and as many as the weight's groups are filled up to.
INLINE bool as_it_is(const Product& c) {
    return (ACTS == 32 || (ACTS == 16 && X_BYTES == 2)) && !ZEROS && c.padded == c.k && c.wide == (ACTS == 32);
}
INLINE const char* row_of(const Product& c, int64_t row) {
    return as_it_is(c) ? (const char*)c.x + row * c.x_row * X_BYTES : c.room + row * row_bytes(c);
}

// Activations of a row: codes of -127 to 127 with a scale for each group, and the sums of the codes. Where a group has a number
// that is none or infinite its scale is NaN, and so is the row's result.
void narrowed(const Product& c, int64_t row) {
    const int64_t each = GROUP ? GROUP : c.padded, many = groups(c);
#if RANGE
    int8_t* to = (int8_t*)c.room + row * c.padded;
    const Whole how = *whole_of(c);
    const V by = all(how.inverse), zero = all((float)how.zero);
    I sum = every(0);
    int64_t lanes = 0;
    for (int64_t k = 0; k < c.padded; k += SIDE, lanes += SIDE) {
        const I code = larger(smaller(nearest(fma(x_at(c, row, k, c.k), by, zero)), every(255)), every(0));
        const I from_center = plus(code, every(-CENTER));
        sum = plus(sum, from_center);
        put(to + k, from_center, c.padded - k);
    }
    for (int64_t k = c.k; k < c.padded; k++) to[k] = 0;   // panels are filled up with codes that stand for -128
    x_scales(c)[row] = how.scale;
    x_sums(c)[row] = total(sum) - (int32_t)(lanes - c.k) * (how.zero - CENTER);
#elif ACTS == 8
    int8_t* to = (int8_t*)c.room + row * c.padded;
    for (int64_t g = 0; g < many; g++) {
        const int64_t end = (g + 1) * each;
        I top = every(0);                              // sizes as integers: infinity and NaN are above all numbers
        for (int64_t k = g * each; k < end; k += SIDE) top = larger(top, both(bits(x_at(c, row, k, end)), every(0x7fffffff)));
        const int32_t word = largest(top);
        float size;
        memcpy(&size, &word, 4);
        const bool sound = word < 0x7f800000;
        const float by = sound && size > 1e-36f ? 127.0f / size : 0.0f;
        I sum = every(0);
        for (int64_t k = g * each; k < end; k += SIDE) {
            const I code = larger(smaller(nearest(x_at(c, row, k, end) * all(by)), every(127)), every(-127));
            sum = plus(sum, code);
            put(to + k, code, end - k);
        }
        x_scales(c)[row * many + g] = !sound ? __builtin_nanf("") : by ? size / 127.0f : 0.0f;
        x_sums(c)[row * many + g] = total(sum);
    }
#elif ACTS == 32
    for (int64_t k = 0; k < c.padded; k += SIDE) put((float*)c.room + row * c.padded + k, x_at(c, row, k, c.k), c.padded - k);
#else
    uint16_t* to = (uint16_t*)(c.room + row * row_bytes(c));
    for (int64_t k = 0; k < c.padded; k += SIDE) {
        const int64_t n = c.padded - k < SIDE ? c.padded - k : SIDE;
        if (X_BYTES == 2) {
            put(to + k, x_at(c, row, k, c.k), n);
        } else {                                       // rounded as they would be there
            uint16_t few[SIDE];
            put(few, x_at(c, row, k, c.k), SIDE);
            put((float*)to + k, some(few, SIDE), n);
        }
    }
    for (int64_t g = 0; ZEROS && g < many; g++) {      // what zeros multiply: sums of the rounded numbers
        float sum = 0;
        for (int64_t k = g * each; k < (g + 1) * each; k++) {
            const uint32_t word = (uint32_t)to[k] << 16;
            float one;
            memcpy(&one, X_BYTES == 2 ? (const void*)&word : (const void*)((const float*)to + k), 4);
            sum += one;
        }
        x_scales(c)[row * many + g] = sum;
    }
#endif
}

INLINE V scale(const Product& c, int64_t at) {
#if HALF
    return float16((const uint16_t*)c.scales + at);
#else
    return load((const float*)c.scales + at);
#endif
}

INLINE int32_t four(const char* p) { int32_t v; memcpy(&v, p, 4); return v; }

template <bool COLD>
INLINE I next(const uint8_t*& w, int64_t ahead) {
    const I step = load((const void*)w);
    if constexpr (COLD) __builtin_prefetch(w + ahead, 0, 2);
    w += BYTES;
    return step;
}

// R rows from m by P panels from `panel`; rows beyond `last` are the last again, and are not written. COLD: panels come from memory, and
// are asked for before; where other rows have met them already, asking takes as much of a core as 7 of 100 products (measured).
template <int R, int P, bool COLD>
__attribute__((noinline)) void tile(const Product& c, int64_t m, int64_t last, int64_t panel) {
    const int64_t many = groups(c), bytes = c.padded / STEP * BYTES, each = many > 1 ? GROUP : c.padded, steps = each / STEP;
    const char* x[R];
    int64_t row[R];
    UNROLL for (int r = 0; r < R; r++) row[r] = m + r < last ? m + r : last - 1, x[r] = row_of(c, row[r]);
    const uint8_t* w[P];
    UNROLL for (int p = 0; p < P; p++) w[p] = c.codes + (panel + p) * bytes;
    const uint8_t* const end = w[0] + bytes;
    V sum[R][P];
    UNROLL for (int p = 0; p < P; p++) {
        const int64_t n = (panel + p) * SIDE;          // with RANGE a product and its bias are rounded once, as FBGEMM's are
        const V begin = RANGE && c.bias ? some(c.bias + n, c.n - n) : nothing();
        UNROLL for (int r = 0; r < R; r++) sum[r][p] = begin;
    }
    int64_t k = 0;                                     // in bytes of a row of x
    for (int64_t g = 0; g < many; g++) {
#if ACTS == 8
        I part[R][P];
#if RANGE
        I away[P];                                     // what the zero of x is from CENTER, times the sums of the weights
        UNROLL for (int p = 0; p < P; p++)
            away[p] = times(load((const void*)(c.sums + (panel + p) * SIDE)), every(CENTER - whole_of(c)->zero));
#endif
        UNROLL for (int r = 0; r < R; r++) {
            const I begin = every((int32_t)(SHIFTED - (ZEROS ? 0 : ZERO)) * x_sums(c)[row[r] * many + g]);
#if RANGE
            UNROLL for (int p = 0; p < P; p++) part[r][p] = plus(begin, away[p]);
#else
            UNROLL for (int p = 0; p < P; p++) part[r][p] = begin;
#endif
        }
        int64_t ahead = AHEAD;
        for (int64_t step = 0; step < steps;) {
            const int64_t until = FLUSH && step + FLUSH < steps ? step + FLUSH : steps;
            I few[R][P];                               // sums in 16 bits
            if constexpr (FLUSH > 0) UNROLL for (int r = 0; r < R; r++) UNROLL for (int p = 0; p < P; p++) few[r][p] = every(0);
            for (; step < until; step++) {
                if (COLD && step % (AHEAD / BYTES) == 0 && w[0] + AHEAD >= end) ahead = AHEAD + (P - 1) * bytes;   // the next P panels
                I packed[P];
                UNROLL for (int p = 0; p < P; p++) packed[p] = next<COLD>(w[p], ahead);
                UNROLL for (int i = 0; i < LAYERS; i++) {
                    Code code[P];
                    UNROLL for (int p = 0; p < P; p++) code[p] = code_of(packed[p], i);
                    UNROLL for (int r = 0; r < R; r++) {   // a number of x is in a register while panels meet it, and no longer
                        const I one = every(four(x[r] + k + 4 * i));
                        UNROLL for (int p = 0; p < P; p++) dot(FLUSH ? few[r][p] : part[r][p], code[p], one);
                    }
                }
                k += STEP;
            }
            if constexpr (FLUSH > 0)
                UNROLL for (int r = 0; r < R; r++) UNROLL for (int p = 0; p < P; p++) part[r][p] = plus(part[r][p], wide(few[r][p]));
        }
        UNROLL for (int p = 0; p < P; p++) {
            const V by = scale(c, ((panel + p) * many + g) * SIDE);
            const V zero = ZEROS ? load(c.zeros + ((panel + p) * many + g) * SIDE) : nothing();
            UNROLL for (int r = 0; r < R; r++) {
                const int64_t at = row[r] * many + g;
                V whole = numbers(part[r][p]);
                if (ZEROS) whole = fnma(zero, all((float)x_sums(c)[at]), whole);
                sum[r][p] = fma(whole, by * all(x_scales(c)[at]), sum[r][p]);
            }
        }
#else
        V part[R][P];
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int p = 0; p < P; p++) part[r][p] = nothing();
        int64_t ahead = AHEAD;
        for (int64_t step = 0; step < steps; step++) {
            if (COLD && step % (AHEAD / BYTES) == 0 && w[0] + AHEAD >= end) ahead = AHEAD + (P - 1) * bytes;   // the next P panels
            I packed[P];
            UNROLL for (int p = 0; p < P; p++) packed[p] = next<COLD>(w[p], ahead);
#if ACTS == 32
            UNROLL for (int r = 0; r < R; r++) {
                const V one = all(*(const float*)(x[r] + k));
                UNROLL for (int p = 0; p < P; p++) part[r][p] = fma(of_bits(packed[p]), one, part[r][p]);
            }
#else
            alignas(64) static const uint16_t table[32] = {TABLE};
            UNROLL for (int i = 0; i < LAYERS; i++) {
                Pair code[P];
                UNROLL for (int p = 0; p < P; p++) code[p] = pair_of(packed[p], i, table);
                UNROLL for (int r = 0; r < R; r++) {
                    const XPair one = pair_at(x[r] + k + PAIR_BYTES * i);
                    UNROLL for (int p = 0; p < P; p++) part[r][p] = pairs(part[r][p], code[p], one);
                }
            }
#endif
            k += X_BYTES * STEP;
        }
#if BITS < 16
        UNROLL for (int p = 0; p < P; p++) {
            const V by = scale(c, ((panel + p) * many + g) * SIDE);
            const V zero = ZEROS ? load(c.zeros + ((panel + p) * many + g) * SIDE) : nothing();
            UNROLL for (int r = 0; r < R; r++) {
                if (ZEROS) part[r][p] = fnma(zero, all(x_scales(c)[row[r] * many + g]), part[r][p]);
                sum[r][p] = fma(part[r][p], by, sum[r][p]);
            }
        }
#else
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int p = 0; p < P; p++) sum[r][p] = part[r][p];
#endif
#endif
    }
    UNROLL for (int p = 0; p < P; p++) {
        const int64_t n = (panel + p) * SIDE, left = c.n - n;
        if (left <= 0) break;
        const V bias = !RANGE && c.bias ? some(c.bias + n, left) : nothing();
        for (int r = 0; r < R && m + r < last; r++) {
            V v = (sum[r][p] + bias) * all(c.factor);
            if (c.added) v = v + some_of(c.added, (m + r) * c.added_row + n, left, c.wide);
            if (c.wide_out) put((float*)c.out + (m + r) * c.out_row + n, v, left);
            else put((uint16_t*)c.out + (m + r) * c.out_row + n, v, left);
        }
    }
}

// Registers hold the sums of R rows by P panels; one row reads P streams beside each other.
template <int R, int P, bool COLD = true>
void panels(const Product& c, int64_t m, int64_t last, int64_t from, int64_t to) {
    int64_t p = from;
    for (; p + P <= to; p += P) tile<R, P, COLD>(c, m, last, p);
    if constexpr (P > 1)
        for (; p < to; p++) tile<R, 1, COLD>(c, m, last, p);
}

constexpr int64_t MOST = REGISTERS == 32 ? 8 : ACTS == 32 ? 6 : 4;   // rows of a tile

// The first rows bring panels from memory; those after them find these in the second cache, and take tiles of 6 rows by 4 panels: 24 sums
// for 10 loads a step, where 8 by 3 have them for 11 and 12 by 2 for 14 (1 and 9 of 100 slower). Sums of groups stand beside those of rows.
constexpr bool WIDE = REGISTERS == 32 && !GROUP;
constexpr int64_t WIDE_ROWS = 6;
constexpr int64_t TASK = 64 / SIDE;                    // panels that one task takes over all rows

// again: other rows have met these panels.
void rows_of(const Product& c, int64_t m, int64_t last, int64_t from, int64_t to, bool again) {
    const int64_t rows = last - m;
    if constexpr (WIDE)
        if (again) {
            if (rows <= 4) panels<4, 4, false>(c, m, last, from, to);
            else if (rows <= WIDE_ROWS) panels<WIDE_ROWS, 4, false>(c, m, last, from, to);
            else panels<8, 3, false>(c, m, last, from, to);
            return;
        }
    if (rows == 1) return panels<1, 4>(c, m, last, from, to);
    if (rows == 2) return panels<2, 4>(c, m, last, from, to);
    if constexpr (REGISTERS == 32) {
        if (rows <= 4) panels<4, GROUP ? 2 : 4>(c, m, last, from, to);
        else if (rows <= 6) panels<6, GROUP ? 2 : 4>(c, m, last, from, to);
        else panels<8, GROUP ? 1 : 2>(c, m, last, from, to);
    } else {
        if (rows <= 4) panels<4, 2>(c, m, last, from, to);
        else if constexpr (MOST > 4) panels<6, 2>(c, m, last, from, to);
    }
}

// How many of the `left` rows come next: blocks as equal as they can be, as what fills up a tile is computed for nothing; sixes where
// there are many, or where these leave no rest.
INLINE int64_t next_rows(int64_t left, bool again) {
    const int64_t blocks = (left + MOST - 1) / MOST, equal = (left + blocks - 1) / blocks;
    if (!WIDE || left <= MOST) return equal;
    if (!again) return (left - MOST) % WIDE_ROWS == 0 ? MOST : equal;
    return left % WIDE_ROWS == 0 || left > WIDE_ROWS * WIDE_ROWS ? WIDE_ROWS : equal;
}

}  // namespace

extern "C" int gnomon_kernel(const Product* given) {
    const Product& c = *given;
    const int64_t all = (c.n + SIDE - 1) / SIDE, own = TASK, tasks = (all + own - 1) / own;
    const int threads = c.threads ? (int)c.threads : omp_get_max_threads();
#if RANGE
    float low = 0, high = 0;                           // the interval takes in 0 anyway
    int32_t top = 0;
#endif
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#if RANGE
#pragma omp for schedule(static) reduction(min : low) reduction(max : high, top)
        for (int64_t row = 0; row < c.m; row++) {
            V least = nothing(), most = nothing();
            I sizes = every(0);                        // as integers: infinity and NaN are above all numbers
            for (int64_t k = 0; k < c.k; k += SIDE) {
                const V x = x_at(c, row, k, c.k);
                least = smaller(least, x), most = larger(most, x);
                sizes = larger(sizes, both(bits(x), every(0x7fffffff)));
            }
            float ends[2][SIDE];
            put(ends[0], least, SIDE), put(ends[1], most, SIDE);
            for (int64_t i = 0; i < SIDE; i++) {
                low = ends[0][i] < low ? ends[0][i] : low;
                high = ends[1][i] > high ? ends[1][i] : high;
            }
            const int32_t size = largest(sizes);
            top = size > top ? size : top;
        }
#pragma omp single
        *whole_of(c) = chosen(low, high);
        if (top < 0x7f800000) {                        // else the interval has no end, and ATen says what that gives
#else
        {
#endif
        if (!as_it_is(c)) {
#pragma omp for schedule(static)
            for (int64_t row = 0; row < c.m; row++) narrowed(c, row);
        }
        for (int64_t m0 = 0; m0 < c.m; m0 += TOGETHER) {
            const int64_t end = m0 + TOGETHER < c.m ? m0 + TOGETHER : c.m;
#pragma omp for schedule(static) nowait
            for (int64_t task = 0; task < tasks; task++) {
                const int64_t from = task * own, to = from + own < all ? from + own : all;
                for (int64_t m = m0; m < end;) {
                    const bool again = m > m0;
                    const int64_t last = m + next_rows(end - m, again);
                    rows_of(c, m, last, from, to, again);
                    m = last;
                }
            }
        }
        }
    }
#if RANGE
    return top >= 0x7f800000;
#else
    return 0;
#endif
}
