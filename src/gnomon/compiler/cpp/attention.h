// What attention's forward and backward share (gnomon/compiler/kernels/attention.py): products of small matrices, and the layouts
// that they read. A word is 32 bits of a row or a column: a float, or two numbers of bfloat16, the first in the lower
// half, which one instruction of AVX-512 BF16 multiplies and adds. Sums are floats.
#pragma once
#include "memory.h"
namespace {

constexpr bool FLOATS = sizeof(S) == sizeof(float);
#ifdef __AVX512BF16__
constexpr bool KNOWN = true;
#else
constexpr bool KNOWN = FLOATS;
#endif
constexpr int EACH = FLOATS ? 1 : 2;                   // numbers in a word
constexpr int64_t KEYS = 64;                           // columns of a panel
constexpr int ROWS = 6, VECTORS = VW == 16 ? 4 : 2;    // of a tile, which stays in registers
typedef uint32_t Word;

ALWAYS int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
ALWAYS int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
ALWAYS int64_t up_to(int64_t n, int64_t step) { return (n + step - 1) / step * step; }
ALWAYS U words(const Word* p) { U v; memcpy(&v, p, sizeof v); return v; }
ALWAYS void put(Word* p, U v) { memcpy(p, &v, sizeof v); }
ALWAYS F added(F sum, U x, U y) {
#ifdef __AVX512BF16__
    if (!FLOATS) {
        asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(x), "v"(y));
        return sum;
    }
#endif
    return sum + (F)x * (F)y;
}
// numbers that only `added` reads: it takes those of bfloat16 below 1.2e-38 for 0, and so may what makes them
ALWAYS void st_factor(float* p, F x) { st(p, x); }
ALWAYS void st_factor(bf16* p, F x) {
#ifdef __AVX512BF16__
    mem<uint16_t>::V r;
    asm("vcvtneps2bf16 %1, %0" : "=v"(r) : "v"(x));
    memcpy(p, &r, sizeof r);
#else
    st(p, x);
#endif
}
ALWAYS U alone(const char* p) { Word w; memcpy(&w, p, sizeof w); return U{} + w; }

// rows of the left side: bytes from one row, one word to the next
struct Left { const char* p; int64_t row, word; };
// words of the right side: `wide` of them from one row of words to the next
struct Right { const Word* p; int64_t wide; };
struct Sums { float* p; int64_t row; };

// (first, after the last) word that is multiplied, and vectors of columns
struct Part { int64_t begin, end, vectors; };

template <int R, int V>
__attribute__((noinline)) void tile(Left a, Right b, int64_t words_, Sums to, bool more) {
    F sum[R][V];
    UNROLLED for (int r = 0; r < R; r++)
        UNROLLED for (int v = 0; v < V; v++) sum[r][v] = more ? ld(to.p + r * to.row + v * VW) : F{};
    for (int64_t w = 0; w < words_; w++) {
        U y[V];
        UNROLLED for (int v = 0; v < V; v++) y[v] = words(b.p + v * VW);
        UNROLLED for (int r = 0; r < R; r++) {
            const U x = alone(a.p + r * a.row);
            UNROLLED for (int v = 0; v < V; v++) sum[r][v] = added(sum[r][v], x, y[v]);
        }
        a.p += a.word;
        b.p += b.wide;
    }
    UNROLLED for (int r = 0; r < R; r++)
        UNROLLED for (int v = 0; v < V; v++) st(to.p + r * to.row + v * VW, sum[r][v]);
}

// Scores times a scale, less the largest of a row, are one rounding to the processor, and two where the largest was made. That is
// nearer to what is meant, but of scores beyond FAR the difference to the largest would be none: 0 in all of the row, or infinity.
// There they are scaled in memory first. Not a number is beyond.
constexpr float FAR = 1e5f;
ALWAYS bool far(float largest) { return !(largest < FAR && largest > -FAR); }
ALWAYS void scaled(float* scores, int64_t n, float scale) {
    for (int64_t j = 0; j < n; j += VW) st(scores + j, ld(scores + j) * scale);
}

typedef void Tile(Left, Right, int64_t, Sums, bool);
#define OF(r) {tile<r, 1>, tile<r, 2>, tile<r, VECTORS - 1>, tile<r, VECTORS>}
Tile* const TILES[ROWS][4] = {OF(1), OF(2), OF(3), OF(4), OF(5), OF(6)};
#undef OF

// Rows times columns into sums, or added to them. part(first row, row after the last): what of it is needed.
template <class P>
ALWAYS void product(Left a, int64_t rows, Right b, int64_t vectors, Sums to, bool more, P part) {
    for (int64_t v = 0; v < vectors; v += VECTORS)
        for (int64_t r = 0; r < rows; r += ROWS) {
            const int64_t count = least(ROWS, rows - r);
            const Part need = part(r, r + count);
            const int64_t across = least(least(VECTORS, vectors - v), need.vectors - v);
            if (across <= 0 || (more && need.end <= need.begin)) continue;
            const Left left = {a.p + r * a.row + need.begin * a.word, a.row, a.word};
            const Right right = {b.p + need.begin * b.wide + v * VW, b.wide};
            TILES[count - 1][across - 1](left, right, most(0, need.end - need.begin), {to.p + r * to.row + v * VW, to.row}, more);
        }
}

// A row of `depth` numbers will be read soon: rows lie too far apart for the processor to see it coming.
ALWAYS void soon(const S* row, int64_t depth) {
    for (int64_t d = 0; d < depth; d += 64 / sizeof(S)) __builtin_prefetch(row + d, 0, 2);
}

// Words of VW positions that begin at `from`, one row of KEYS words for each: of the first `there` positions, zeros for
// the others. BYTES of each position.
template <int BYTES>
ALWAYS void turned(const S* from, int64_t step, int64_t there, Word* to) {
    U v[VW];
    UNROLLED for (int r = 0; r < VW; r++) {
        v[r] = U{};
        if (r < there) memcpy(&v[r], from + r * step, BYTES);
    }
    transpose(v);
    UNROLLED for (int r = 0; r < BYTES / 4; r++) put(to + r * KEYS, v[r]);
}

// Numbers of positions that are `step` apart, each of `depth` numbers, as panels of KEYS columns: words along the depth,
// one panel behind the other, zeros in the place of positions that are not there.
void columns(const S* from, int64_t step, int64_t count, int64_t depth, Word* to) {
    const int64_t deep = depth / EACH;
    for (int64_t n = 0; n < up_to(count, KEYS); n += VW) {
        Word* panel = to + n / KEYS * KEYS * deep + n % KEYS;
        const S* rows = from + n * step;
        int64_t w = 0;
        for (; w + VW <= deep; w += VW) {
            if (n + VW <= count) turned<sizeof(U)>(rows + w * EACH, step, VW, panel + w * KEYS);
            else turned<sizeof(U)>(rows + w * EACH, step, count - n, panel + w * KEYS);
        }
        // A head's size is a multiple of 16, so only words of two numbers leave half a vector.
        if (!FLOATS && w < deep) turned<sizeof(U) / 2>(rows + w * EACH, step, count - n, panel + w * KEYS);
    }
}

// The same numbers as words of positions that follow each other, one row of `depth` words for them; zeros where the last
// is alone.
void couples(const S* from, int64_t step, int64_t count, int64_t depth, Word* to) {
    for (int64_t n = 0; n < count; n += EACH, to += depth)
        for (int64_t d = 0; d < depth; d += VW) {
            U both = (U)ld(from + n * step + d);       // of bfloat16 a float's upper half
            if (!FLOATS) both = both >> 16 | (n + 1 < count ? (U)ld(from + (n + 1) * step + d) : U{});
            put(to + d, both);
        }
}

// A mask that is added to scores: none, floats or bfloat16.
struct Mask { const char* p; int64_t kind, b, h, s, t; };

// `n` numbers of a row of the mask from column j on, as floats, and zeros to the end of a vector
template <class T>
ALWAYS void floats(const T* from, int64_t step, int64_t n, float* room) {
    int64_t k = 0;
    if (step == 1)
        for (; k + VW <= n; k += VW) st(room + k, ld(from + k));
    if (step == 0) {
        for (const F all = ld1(from); k + VW <= n; k += VW) st(room + k, all);
    }
    for (; k < n; k += VW) st(room + k, lds(from + k * step, step, (int)least(VW, n - k)));
}
ALWAYS void masked(const Mask& m, int64_t b, int64_t h, int64_t i, int64_t j, int64_t n, float* room) {
    const int64_t first = b * m.b + h * m.h + i * m.s + j * m.t;
    if (m.kind == 1) floats((const float*)m.p + first, m.t, n, room);
    else floats((const bf16*)m.p + first, m.t, n, room);
}

}  // namespace
