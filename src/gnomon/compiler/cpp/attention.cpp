// Attention: out = softmax(q k' scale + mask) v, and the logarithm of each row's sum (gnomon/compiler/kernels/attention.py).
// Of each head keys and values are laid out once. Then a block of queries meets a block of keys at a time; scores are
// floats in cache, with the largest and the sum of each row so far, and probabilities are numbers of the tensors' type before they meet v.
#include "vector.h"
#include "math.h"
#include "attention.h"

struct Call {                                          // as _AttentionCall in attention.py has them
    int64_t batch, heads, queries, keys, depth, causal, parallel;
    double scale, hollow;                              // hollow: results of a row of which all is masked
    const S *q, *k, *v; int64_t q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s;
    const char* mask; int64_t mask_kind, mask_b, mask_h, mask_s, mask_t;
    float* sums; int64_t sums_b, sums_h, sums_s;
    S* out; int64_t out_b, out_h, out_s;
};

namespace {

constexpr int64_t QUERIES = 24, BLOCK = 2 * KEYS;      // of a block

struct Room {
    alignas(64) float scores[QUERIES * BLOCK], mask[BLOCK], out[QUERIES * 128], largest[QUERIES], sum[QUERIES];
    alignas(64) S p[QUERIES * BLOCK];
    Word *k, *v;                                       // of a whole head
};

// Scores of a row to probabilities: its first n of `all` columns, zeros after them. What was added up before is scaled.
template <bool MASKS>
ALWAYS void row(const Call& c, Room& m, int64_t r, int64_t n, int64_t all) {
    float* s = m.scores + r * BLOCK;
    S* p = m.p + r * BLOCK;
    const float scale = (float)c.scale;
    for (int64_t j = n; j < up_to(n, VW); j++) s[j] = -INF;
    F top = splat(-INF);
    for (int64_t j = 0; j < n; j += VW) {
        F x = ld(s + j);
        if (MASKS) {
            x = x * scale + ld(m.mask + j);
            st(s + j, x);
        }
        top = peak(top, x);
    }
    const float before = m.largest[r], here = hmax(top) * (MASKS ? 1.0f : scale), largest = here <= before ? before : here;
    const float less = largest == -INF ? 0.0f : largest;
    const bool before_scaled = !MASKS && far(less);
    if (before_scaled) scaled(s, n, scale);
    const float by = before_scaled ? 1.0f : scale;
    F sum = {};
    int64_t j = 0;
    for (; j < n; j += VW) {
        const F x = MASKS ? ld(s + j) - less : ld(s + j) * by - less;
        const F e = vexp(x);
        sum = sum + e;
        st_factor(p + j, e);
    }
    for (; j < all; j += VW) st(p + j, F{});
    m.largest[r] = largest;
    float kept = 1.0f;
    if (before == -INF) kept = 0.0f;
    else if (before != largest) kept = vexp(splat(before - less))[0];
    m.sum[r] = m.sum[r] * kept + hsum(sum);
    if (kept == 1.0f || before == -INF) return;       // nothing was added up before, or it stays
    for (int64_t d = 0; d < c.depth; d += VW) st(m.out + r * c.depth + d, ld(m.out + r * c.depth + d) * kept);
}

// What the next head reads at positions i to i + count.
ALWAYS void ahead(const Call& c, int64_t b, int64_t h, int64_t i, int64_t count) {
    if (++h == c.heads) { h = 0; b++; }
    if (b == c.batch) return;
    for (int64_t n = i; n < i + count; n++) {
        soon(c.q + b * c.q_b + h * c.q_h + n * c.q_s, c.depth);
        if (n >= c.keys) continue;
        soon(c.k + b * c.k_b + h * c.k_h + n * c.k_s, c.depth);
        soon(c.v + b * c.v_b + h * c.v_h + n * c.v_s, c.depth);
    }
}

void block(const Call& c, Room& m, int64_t b, int64_t h, int64_t i, int64_t count) {
    const S* q = c.q + b * c.q_b + h * c.q_h + i * c.q_s;
    const Mask mask = {c.mask, c.mask_kind, c.mask_b, c.mask_h, c.mask_s, c.mask_t};
    const int64_t deep = c.depth / EACH, end = c.causal ? least(c.keys, i + count) : c.keys;
    memset(m.out, 0, (size_t)(count * c.depth) * sizeof(float));
    for (int64_t r = 0; r < count; r++) { m.largest[r] = -INF; m.sum[r] = 0; }
    for (int64_t j = 0; j < end; j += BLOCK) {
        const int64_t here = least(BLOCK, c.keys - j);
        auto seen = [&](int64_t r) { return c.causal ? most(0, least(here, i + r + 1 - j)) : here; };  // columns of row r
        for (int64_t p = 0; p < here; p += KEYS)
            product({(const char*)q, c.q_s * (int64_t)sizeof(S), 4}, count, {m.k + (j + p) * deep, KEYS}, KEYS / VW,
                    {m.scores + p, BLOCK}, false, [&](int64_t, int64_t after) {
                        return Part{0, deep, (seen(after - 1) - p + VW - 1) / VW};
                    });
        for (int64_t r = 0; r < count; r++) {
            const int64_t n = seen(r), all = seen(least(count, (r / ROWS + 1) * ROWS) - 1);
            if (j == 0) ahead(c, b, h, i + r, 1);
            if (!mask.kind) {
                row<false>(c, m, r, n, all);
                continue;
            }
            masked(mask, b, h, i + r, j, n, m.mask);
            row<true>(c, m, r, n, all);
        }
        product({(const char*)m.p, BLOCK * sizeof(S), 4}, count, {m.v + j / EACH * c.depth, c.depth}, c.depth / VW, {m.out, c.depth},
                true, [&](int64_t, int64_t after) { return Part{0, (seen(after - 1) + EACH - 1) / EACH, c.depth / VW}; });
    }
    for (int64_t r = 0; r < count; r++) {
        const bool none = m.largest[r] == -INF;        // all of the row is masked
        const float over = none ? 0.0f : 1.0f / m.sum[r];
        S* to = c.out + b * c.out_b + h * c.out_h + (i + r) * c.out_s;
        const F masked = splat((float)c.hollow);
        for (int64_t d = 0; d < c.depth; d += VW) st(to + d, none ? masked : F(ld(m.out + r * c.depth + d) * over));
        c.sums[b * c.sums_b + h * c.sums_h + (i + r) * c.sums_s] = none ? 0.0f : m.largest[r] + vlog(splat(m.sum[r]))[0];
    }
}

}  // namespace

// 1: not on this processor, or there is no memory, and results are not whole
extern "C" int gnomon_kernel(const Call* given) {
    if (!KNOWN) return 1;
    const Call& c = *given;
    const int64_t whole = up_to(c.keys, KEYS) * c.depth / EACH;
    int failed = 0;
#pragma omp parallel if (c.parallel) reduction(| : failed)
    {
        char* memory = (char*)aligned_alloc(64, sizeof(Room) + (size_t)whole * 2 * sizeof(Word));
        failed |= !memory;
#pragma omp for schedule(static)
        for (int64_t n = 0; n < c.batch * c.heads; n++) {
            if (!memory) continue;
            Room& m = *(Room*)memory;
            m.k = (Word*)(memory + sizeof(Room));
            m.v = m.k + whole;
            const int64_t b = n / c.heads, h = n % c.heads;
            columns(c.k + b * c.k_b + h * c.k_h, c.k_s, c.keys, c.depth, m.k);
            couples(c.v + b * c.v_b + h * c.v_h, c.v_s, c.keys, c.depth, m.v);
            for (int64_t i = 0; i < c.queries; i += QUERIES) block(c, m, b, h, i, least(QUERIES, c.queries - i));
        }
        free(memory);
    }
    return failed;
}
