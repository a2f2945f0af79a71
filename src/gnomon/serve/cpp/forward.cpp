// A run of layers in one call (gnomon/serve/forward.py): products with packed weights, norms, rotary angles, gates, sums
// and attention over pages, one instruction after the other on rows of a workspace.
// A matrix (out, in) is packed in panels of 16 outputs: of float (panel, in, 16), of bfloat16 (panel, in / 2, 16, 2), so
// that a vector meets one number, or one pair of numbers, of a row. Sums are in float; what is written is rounded once.
#include "paged.h"

#if VW == 16 && defined(__AVX512F__)
#include <immintrin.h>
#define KNOWN 1
#else
#define KNOWN 0
#endif

struct Op {                                            // as _Op in forward.py has them
    int64_t kind, in, in_row, with, with_row, out, out_row, width, out_width, heads, flags, after;
    const void *weight, *bias, *more;
    double first, second;
};

struct Run {                                           // as _Run in forward.py has them
    int64_t count, tokens, wanted, threads, sequences;
    const Op* ops;
    char* room;                                        // rows of the workspace: operands say how many bytes from here
    const int64_t *ids, *positions, *begins, *lengths, *rows;
    const int32_t* const* tables;                      // of each group
    const int64_t* table_rows;
    float* logits;
};

enum Kind { EMBED, NORM, LINEAR, ROTARY, ATTEND, GLU, ADD, SCALE, GATHER, LOGITS, CAP };

namespace {

ALWAYS int64_t up_to(int64_t a, int64_t b) { return (a + b - 1) / b * b; }
template <class T> ALWAYS T* at(char* room, int64_t bytes) { return (T*)(room + bytes); }

#if KNOWN
constexpr int64_t PANEL = 16;
typedef __m512i W;

#ifdef __AVX512BF16__
ALWAYS F pair(F acc, W w, uint32_t x) {
    return (F)_mm512_dpbf16_ps((__m512)acc, (__m512bh)w, (__m512bh)_mm512_set1_epi32((int)x));
}
#else
ALWAYS F pair(F acc, W w, uint32_t x) {
    const F low = (F)_mm512_slli_epi32(w, 16), high = (F)_mm512_and_si512(w, _mm512_set1_epi32((int)0xffff0000u));
    float a, b; uint32_t l = x << 16, h = x & 0xffff0000u;
    memcpy(&a, &l, 4); memcpy(&b, &h, 4);
    return acc + low * a + high * b;
}
#endif

// MR rows by NP panels; x: rows that begin at `row`; steps: vectors of a panel.
template <int MR, int NP>
ALWAYS void sums(const float* const row[MR], const float* w, int64_t steps, F acc[MR][NP]) {
    for (int64_t k = 0; k < steps; k++) {
        F v[NP];
        UNROLLED for (int p = 0; p < NP; p++) v[p] = ld(w + (p * steps + k) * PANEL);
        UNROLLED for (int m = 0; m < MR; m++) {
            const F one = splat(row[m][k]);
            UNROLLED for (int p = 0; p < NP; p++) acc[m][p] = acc[m][p] + v[p] * one;
        }
    }
}
template <int MR, int NP>
ALWAYS void sums(const bf16* const row[MR], const bf16* w, int64_t steps, F acc[MR][NP]) {
    for (int64_t k = 0; k < steps; k++) {
        W v[NP];
        UNROLLED for (int p = 0; p < NP; p++) v[p] = _mm512_loadu_si512((const char*)w + (p * steps + k) * 64);
        UNROLLED for (int m = 0; m < MR; m++) {
            uint32_t one;
            memcpy(&one, row[m] + 2 * k, 4);
            UNROLLED for (int p = 0; p < NP; p++) acc[m][p] = pair(acc[m][p], v[p], one);
        }
    }
}

struct Product {
    const S* x; int64_t row;
    const S* w; int64_t steps;                         // vectors of a panel
    const S* bias; const S* added; int64_t added_row;  // null, or added to what comes out
    float factor;                                      // of what comes out, before it is added
    S* out; float* logits; int64_t out_row, n;         // to one of them
};

// Rows m to m + count - 1, at most MR of them: kernels of a few sizes are enough, and quick to compile.
template <int MR, int NP>
__attribute__((noinline)) void tile(const Product& c, int64_t m, int64_t count, int64_t panel) {
    F acc[MR][NP];
    const S* row[MR];
    UNROLLED for (int r = 0; r < MR; r++) {
        row[r] = c.x + (m + least(r, count - 1)) * c.row;
        UNROLLED for (int p = 0; p < NP; p++) acc[r][p] = F{};
    }
    sums<MR, NP>(row, c.w + panel * c.steps * (64 / (int64_t)sizeof(S)), c.steps, acc);
    alignas(64) float made[MR * NP * PANEL];
    UNROLLED for (int r = 0; r < MR; r++) UNROLLED for (int p = 0; p < NP; p++) st(made + (r * NP + p) * PANEL, acc[r][p]);
    for (int64_t r = 0; r < count; r++)
        for (int64_t p = 0; p < NP; p++) {
            const int64_t j = (panel + p) * PANEL, left = c.n - j;
            if (left <= 0) break;
            const bool whole = left >= PANEL;
            F v = ld(made + (r * NP + p) * PANEL);
            if (c.bias) v = v + (whole ? ld(c.bias + j) : ld(c.bias + j, (int)left));
            v = v * c.factor;
            if (c.added) {
                const S* more = c.added + (m + r) * c.added_row + j;
                v = v + (whole ? ld(more) : ld(more, (int)left));
            }
            if (c.logits) {
                float* to = c.logits + (m + r) * c.out_row + j;
                if (whole) st(to, v); else st(to, v, (int)left);
            } else {
                S* to = c.out + (m + r) * c.out_row + j;
                if (whole) st(to, v); else st(to, v, (int)left);
            }
        }
}

constexpr int64_t TILE = 12, TOGETHER = 252;           // rows at a time, and rows that stay in cache

// Matrices have a multiple of four panels.
void multiply(const Product& c, int64_t rows, int64_t threads) {
    const int64_t panels = up_to(c.n, 4 * PANEL) / PANEL, by = rows <= 4 ? 4 : 2;
    for (int64_t m0 = 0; m0 < rows; m0 += TOGETHER) {
        const int64_t end = least(rows, m0 + TOGETHER);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
        for (int64_t panel = 0; panel < panels; panel += by)
            for (int64_t m = m0; m < end; m += TILE) {
                const int64_t count = least(TILE, end - m);
                if (by == 4) {
                    if (count == 1) tile<1, 4>(c, m, count, panel);
                    else if (count == 2) tile<2, 4>(c, m, count, panel);
                    else tile<4, 4>(c, m, count, panel);
                } else if (count <= 6) tile<6, 2>(c, m, count, panel);
                else if (count <= 8) tile<8, 2>(c, m, count, panel);
                else tile<12, 2>(c, m, count, panel);
            }
    }
}

ALWAYS float pairwise(const float* w, int64_t steps, int64_t n, int64_t k) { return w[(n / PANEL * steps + k) * PANEL + n % PANEL]; }
ALWAYS bf16 pairwise(const bf16* w, int64_t steps, int64_t n, int64_t k) {
    return w[((n / PANEL * steps + k / 2) * PANEL + n % PANEL) * 2 + k % 2];
}

// Rows of a table that is packed as a matrix; flags: 1 where it is not.
void embed(const Run& r, const Op& o) {
    const S* w = (const S*)o.weight;
    const int64_t steps = o.width / (4 / (int64_t)sizeof(S));
    for (int64_t t = 0; t < r.tokens; t++) {
        S* to = at<S>(r.room, o.out) + t * o.out_row;
        const int64_t id = r.ids[t];
        if (o.flags) memcpy(to, w + id * o.width, sizeof(S) * (size_t)o.width);
        else for (int64_t k = 0; k < o.width; k++) to[k] = pairwise(w, steps, id, k);
    }
}

ALWAYS F some(const S* p, int64_t left) { return left >= VW ? ld(p) : ld(p, (int)left); }
ALWAYS void put(S* p, F v, int64_t left) { if (left >= VW) st(p, v); else st(p, v, (int)left); }

// flags: 1 of the mean, too. first: eps. second: added to the weight. A row has `heads` parts of `width`.
void norm(const Run& r, const Op& o, int64_t rows) {
    const S *w = (const S*)o.weight, *b = (const S*)o.bias;
    const int64_t n = o.width;
    for (int64_t i = 0; i < rows * o.heads; i++) {
        const S* x = at<S>(r.room, o.in) + i / o.heads * o.in_row + i % o.heads * n;
        S* to = at<S>(r.room, o.out) + i / o.heads * o.out_row + i % o.heads * n;
        float mean = 0.0f;
        if (o.flags & 1) {
            F sum = {};
            for (int64_t j = 0; j < n; j += VW) sum = sum + some(x + j, n - j);
            mean = hsum(sum) / (float)n;
        }
        F squares = {};
        for (int64_t j = 0; j < n; j += VW) {
            F v = some(x + j, n - j) - mean;
            if (n - j < VW) v = sel(first((int)(n - j)), v, F{});
            squares = squares + v * v;
        }
        const float scale = 1.0f / __builtin_sqrtf(hsum(squares) / (float)n + (float)o.first);
        for (int64_t j = 0; j < n; j += VW) {
            F v = (some(x + j, n - j) - mean) * scale;
            if (w) v = v * (some(w + j, n - j) + (float)o.second);
            if (b) v = v + some(b + j, n - j);
            put(to + j, v, n - j);
        }
    }
}

// In place. weight: cosines, bias: sines, (positions, half) floats. out_width: of what is turned. flags: 1 of neighbours.
void rotary(const Run& r, const Op& o) {
    const int64_t half = o.out_width / 2;
    for (int64_t t = 0; t < r.tokens; t++) {
        const float *cosine = (const float*)o.weight + r.positions[t] * half, *sine = (const float*)o.bias + r.positions[t] * half;
        for (int64_t h = 0; h < o.heads; h++) {
            const S* x = at<S>(r.room, o.in) + t * o.in_row + h * o.width;
            S* to = at<S>(r.room, o.out) + t * o.out_row + h * o.width;
            if (!o.flags && half % VW == 0) {
                for (int64_t j = 0; j < half; j += VW) {
                    const F a = ld(x + j), b = ld(x + half + j), c = ld(cosine + j), s = ld(sine + j);
                    st(to + j, a * c - b * s);
                    st(to + half + j, b * c + a * s);
                }
            } else {
                float a[WIDEST], b[WIDEST];
                for (int64_t j = 0; j < half; j++) {
                    a[j] = one(x[o.flags ? 2 * j : j]);
                    b[j] = one(x[o.flags ? 2 * j + 1 : half + j]);
                }
                for (int64_t j = 0; j < half; j++) {
                    st(to + j, splat(a[j] * cosine[j] - b[j] * sine[j]), 1);
                    st(to + half + j, splat(b[j] * cosine[j] + a[j] * sine[j]), 1);
                }
            }
            if (to != x && o.out_width < o.width)
                memcpy(to + o.out_width, x + o.out_width, sizeof(S) * (size_t)(o.width - o.out_width));
        }
    }
}

template <class G> ALWAYS void each(const Run& r, const Op& o, int64_t rows, const G& f) {
    for (int64_t t = 0; t < rows; t++) {
        const S *a = at<S>(r.room, o.in) + t * o.in_row, *b = at<S>(r.room, o.with) + t * o.with_row;
        S* to = at<S>(r.room, o.out) + t * o.out_row;
        for (int64_t j = 0; j < o.width; j += VW) put(to + j, f(some(a + j, o.width - j), some(b + j, o.width - j)), o.width - j);
    }
}

// flags: 0 silu, 1 gelu, 2 gelu by tanh, 3 relu
void glu(const Run& r, const Op& o, int64_t rows) {
    switch (o.flags) {
        case 0: each(r, o, rows, [](F g, F u) { return g * vsigmoid(g) * u; }); return;
        case 1: each(r, o, rows, [](F g, F u) { return 0.5f * g * (1.0f + verf(g * 0.70710678118f)) * u; }); return;
        case 2: each(r, o, rows, [](F g, F u) {
            return 0.5f * g * (1.0f + vtanh(0.7978845608f * (g + 0.044715f * g * g * g))) * u;
        }); return;
        default: each(r, o, rows, [](F g, F u) { return maxi(g, F{}) * u; });
    }
}

void attend(const Run& r, const Op& o) {
    Call c = *(const Call*)o.more;                     // sizes and pages; the rest is this iteration's
    const int64_t group = o.flags;
    c.sequences = r.sequences; c.heads = o.heads; c.table_row = r.table_rows[group]; c.threads = r.threads;
    c.q = at<S>(r.room, o.in); c.q_row = o.in_row;
    c.k = at<S>(r.room, o.with); c.k_row = o.with_row;
    c.v = at<S>(r.room, o.after); c.v_in_row = o.width;
    c.tables = r.tables[group]; c.begins = r.begins; c.lengths = r.lengths;
    c.out = at<S>(r.room, o.out);
    over_pages(c);
}

#endif

}  // namespace

// 1: not on this processor, and nothing is done
extern "C" int gnomon_kernel(const Run* given) {
#if KNOWN
    const Run& r = *given;
    int64_t rows = r.tokens;
    for (const Op* o = r.ops; o < r.ops + r.count; o++) {
        switch ((Kind)o->kind) {
            case EMBED: embed(r, *o); break;
            case NORM: norm(r, *o, rows); break;
            case LINEAR:
                multiply(Product{at<S>(r.room, o->in), o->in_row, (const S*)o->weight, o->width / (4 / (int64_t)sizeof(S)),
                         (const S*)o->bias, o->with < 0 ? nullptr : at<S>(r.room, o->with), o->with_row, (float)o->first,
                         at<S>(r.room, o->out), nullptr, o->out_row, o->out_width}, rows, r.threads);
                break;
            case ROTARY: rotary(r, *o); break;
            case ATTEND: attend(r, *o); break;
            case GLU: glu(r, *o, rows); break;
            case ADD: { const float by = (float)o->first; each(r, *o, rows, [by](F a, F b) { return a + b * by; }); break; }
            case SCALE: { const float by = (float)o->first; each(r, *o, rows, [by](F a, F) { return a * by; }); break; }
            case GATHER:
                for (int64_t t = 0; t < r.wanted; t++)
                    memcpy(at<S>(r.room, o->out) + t * o->out_row, at<S>(r.room, o->in) + r.rows[t] * o->in_row, sizeof(S) * (size_t)o->width);
                rows = r.wanted;
                break;
            case LOGITS:
                multiply(Product{at<S>(r.room, o->in), o->in_row, (const S*)o->weight, o->width / (4 / (int64_t)sizeof(S)),
                         (const S*)o->bias, nullptr, 0, (float)o->first, nullptr, r.logits, o->out_width, o->out_width}, rows, r.threads);
                break;
            case CAP:
                for (int64_t j = 0; j < rows * o->width; j += VW) {
                    const int64_t left = rows * o->width - j;
                    const float by = (float)o->first;
                    if (left >= VW) st(r.logits + j, vtanh(ld(r.logits + j) / by) * by);
                    else st(r.logits + j, vtanh(ld(r.logits + j, (int)left) / by) * by, (int)left);
                }
        }
    }
    return 0;
#else
    return 1;
#endif
}
