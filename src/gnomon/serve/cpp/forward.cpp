// A run of layers in one call (gnomon/serve/forward.py): products with packed weights, norms, rotary angles, gates, sums
// and attention over pages, one instruction after the other on rows of a workspace.
// Products are those of compiler/cpp/stored.cpp, whose kernels instructions point to. What is written is rounded once.
#include "paged.h"
#include "stored.h"

struct Op {                                            // as _Op in forward.py has them
    int64_t kind, in, in_row, with, with_row, out, out_row, width, out_width, heads, flags, after, brief;
    const void *weight, *bias, *more;
    double first, second;
};

struct Run {                                           // as _Run in forward.py has them
    int64_t count, tokens, wanted, threads, sequences, together;
    const Op* ops;
    char* room;                                        // rows of the workspace: operands say how many bytes from here
    const int64_t *ids, *positions, *begins, *lengths, *rows;
    const int32_t* const* tables;                      // of each group
    const int64_t* table_rows;
    float* logits;
    char* narrowed;                                    // rows as a product's kernel reads them
    const int32_t* adapters;                           // of each token, -1 for none
};

struct Adapted { const float *a, *b; int64_t rank; };  // as _Adapted in adapters.py has them: (rank, in), (rank, out); null for none

enum Kind { EMBED, NORM, LINEAR, ROTARY, ATTEND, GLU, ADD, SCALE, GATHER, LOGITS, CAP, ADAPT };

namespace {

template <class T> ALWAYS T* at(char* room, int64_t bytes) { return (T*)(room + bytes); }

constexpr int64_t PARALLEL = 1 << 20;                  // multiplications from which on threads share them

// weight: the kernel, more: its product; rows of the workspace, or logits.
void multiply(const Run& r, const Op& o, int64_t rows, bool logits) {
    Product p = *(const Product*)o.more;
    p.m = rows; p.threads = rows * p.n * p.k >= PARALLEL ? r.threads : 1;
    p.wide = sizeof(S) == 4; p.wide_out = p.wide || logits;
    p.x = at<S>(r.room, o.in); p.x_row = o.in_row;
    p.factor = (float)o.first;
    p.added = o.with < 0 ? nullptr : at<S>(r.room, o.with); p.added_row = o.with_row;
    p.out = logits ? (void*)r.logits : at<S>(r.room, o.out); p.out_row = logits ? o.out_width : o.out_row;
    p.room = r.narrowed;
    ((int (*)(const Product*))o.weight)(&p);
}

enum Table { NUMBERS, ROWS, CODES };                   // packed numbers, rows as they are, packed codes of eight bits

// Rows of a table, which may be packed as a matrix: (panel, steps, `heads` rows, 4 bytes). flags: of Table. bias: scales of codes.
// with, with_row: first id of this rank's part and how many, where ranks divide it; with -1: all.
void embed(const Run& r, const Op& o) {
    for (int64_t t = 0; t < r.tokens; t++) {
        S* to = at<S>(r.room, o.out) + t * o.out_row;
        const int64_t id = o.with < 0 ? r.ids[t] : r.ids[t] - o.with;
        if (o.with >= 0 && (id < 0 || id >= o.with_row)) { memset(to, 0, sizeof(S) * (size_t)o.width); continue; }
        if (o.flags == ROWS) { memcpy(to, (const S*)o.weight + id * o.width, sizeof(S) * (size_t)o.width); continue; }
        const int64_t beside = o.flags == CODES ? 4 : 4 / (int64_t)sizeof(S), steps = (o.width + beside - 1) / beside;
        const char* from = (const char*)o.weight + (id / o.heads * steps * o.heads + id % o.heads) * 4;
        for (int64_t k = 0; k < o.width; k++) {
            const char* step = from + k / beside * o.heads * 4;
            if (o.flags == CODES) st(to + k, splat(((float)((const uint8_t*)step)[k % 4] - 128.0f) * ((const float*)o.bias)[id]), 1);
            else to[k] = ((const S*)step)[k % beside];
        }
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

// out += first b' (a x) of each row's adapter. more: what each adapter has of this linear.
void adapt(const Run& r, const Op& o) {
    const Adapted* all = (const Adapted*)o.more;
#pragma omp parallel for schedule(static) num_threads(r.threads) if (r.threads > 1)
    for (int64_t t = 0; t < r.tokens; t++) {
        if (r.adapters[t] < 0 || !all[r.adapters[t]].a) continue;
        const Adapted& one = all[r.adapters[t]];
        const S* x = at<S>(r.room, o.in) + t * o.in_row;
        S* to = at<S>(r.room, o.out) + t * o.out_row;
        float low[512];
        for (int64_t j = 0; j < one.rank; j++) {
            F sum = {};
            const float* a = one.a + j * o.width;
            for (int64_t d = 0; d < o.width; d += VW) {
                const int64_t left = o.width - d;
                sum = sum + (left >= VW ? ld(x + d) * ld(a + d) : sel(first((int)left), ld(x + d, (int)left) * ld(a + d, (int)left), F{}));
            }
            low[j] = hsum(sum) * (float)o.first;
        }
        for (int64_t n = 0; n < o.out_width; n += VW) {
            const int64_t left = o.out_width - n;
            F v = some(to + n, left);
            for (int64_t j = 0; j < one.rank; j++) {
                const float* b = one.b + j * o.out_width + n;
                v = v + (left >= VW ? ld(b) : ld(b, (int)left)) * low[j];
            }
            put(to + n, v, left);
        }
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

constexpr int64_t TILE = 12;                           // rows of the widest tile of products

enum Brief { IN = 1, WITH = 2, OUT = 4 };              // operands whose rows are of these tokens alone, as Op.brief says

// What computes each row by itself, on `rows` of them.
void alone(const Run& r, const Op& o, int64_t rows) {
    switch ((Kind)o.kind) {
        case EMBED: embed(r, o); break;
        case NORM: norm(r, o, rows); break;
        case LINEAR: multiply(r, o, rows, false); break;
        case ROTARY: rotary(r, o); break;
        case GLU: glu(r, o, rows); break;
        case ADD: { const float by = (float)o.first; each(r, o, rows, [by](F a, F b) { return a + b * by; }); break; }
        case SCALE: { const float by = (float)o.first; each(r, o, rows, [by](F a, F) { return a * by; }); break; }
        case ADAPT: adapt(r, o); break;
        default: break;
    }
}

constexpr int64_t ASKED_PANELS = 4, ASKED = 6144;             // panels that few rows read beside each other (stored.cpp), and bytes of each
constexpr int64_t FEW = 32;                            // rows for which a product takes as long as its weight takes to come

// Asks for the beginning of the next product's weight, of which what stands before it computes meanwhile: begun cold, each of a hundred
// products waits for memory first (8 to 14 % of a step, measured). after: bytes of a panel.
void ask_for_next(const Op* o, const Op* end) {
    while (o < end && o->kind != LINEAR && o->kind != LOGITS) o++;
    if (o == end) return;
    const char* const codes = (const char*)((const Product*)o->more)->codes;
    for (int64_t panel = 0; panel < ASKED_PANELS; panel++)
        for (int64_t byte = 0; byte < o->after && byte < ASKED; byte += 64) {
            __builtin_prefetch(codes + panel * o->after + byte, 0, 2);
            asm volatile("");                          // an effect: GCC leaves out calls of what only prefetches
        }
}

bool by_itself(const Op& o) { return o.kind != ATTEND && o.kind != GATHER && o.kind != LOGITS && o.kind != CAP; }

// An op for the tokens from `first` on.
Op from(const Op& o, int64_t first) {
    Op own = o;
    if (!(o.brief & IN)) own.in += first * o.in_row * (int64_t)sizeof(S);
    if (!(o.brief & OUT)) own.out += first * o.out_row * (int64_t)sizeof(S);
    if (!(o.brief & WITH) && o.with >= 0 && o.kind != EMBED) own.with += first * o.with_row * (int64_t)sizeof(S);
    return own;
}

// What stands between two ops that look beyond a token, for some tokens after the other: what it makes on the way stays in cache, and
// takes memory for these alone.
void some_after_other(const Run& r, const Op* begin, const Op* end) {
    const int64_t times = (r.tokens + r.together - 1) / r.together, most = (r.tokens + times - 1) / times;
    const int64_t each = (most + TILE - 1) / TILE * TILE < r.together ? (most + TILE - 1) / TILE * TILE : r.together;
    for (int64_t first = 0; first < r.tokens; first += each) {
        Run own = r;
        own.tokens = r.tokens - first < each ? r.tokens - first : each;
        own.ids += first; own.positions += first; own.adapters += first;
        for (const Op* o = begin; o < end; o++) {
            alone(own, from(*o, first), own.tokens);
            if (o->kind == LINEAR && own.tokens <= FEW) ask_for_next(o + 1, r.ops + r.count);
        }
    }
}

}  // namespace

extern "C" int gnomon_kernel(const Run* given) {
    const Run& r = *given;
    const Op* const end = r.ops + r.count;
    int64_t rows = r.tokens;
    bool gathered = false;
    for (const Op* o = r.ops; o < end;) {
        if (by_itself(*o) && !gathered) {
            const Op* const begin = o;
            while (o < end && by_itself(*o)) o++;
            some_after_other(r, begin, o);
            continue;
        }
        switch ((Kind)o->kind) {
            case ATTEND: attend(r, *o); break;
            case GATHER:
                for (int64_t t = 0; t < r.wanted; t++)
                    memcpy(at<S>(r.room, o->out) + t * o->out_row, at<S>(r.room, o->in) + r.rows[t] * o->in_row, sizeof(S) * (size_t)o->width);
                rows = r.wanted; gathered = true;
                break;
            case LOGITS: multiply(r, *o, rows, true); break;
            case CAP:
                for (int64_t j = 0; j < rows * o->width; j += VW) {
                    const int64_t left = rows * o->width - j;
                    const float by = (float)o->first;
                    if (left >= VW) st(r.logits + j, vtanh(ld(r.logits + j) / by) * by);
                    else st(r.logits + j, vtanh(ld(r.logits + j, (int)left) / by) * by, (int)left);
                }
                break;
            default: alone(r, *o, rows);
        }
        o++;
    }
    return 0;
}
