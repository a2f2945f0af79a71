// Gradients of attention (gnomon/compiler/kernels/attention.py), from its output and the logarithms of its rows' sums:
// p = exp(q k' scale + mask - sums), dv = p' g, ds = p (g v' - rows of g out), dq = ds k scale, dk = ds' q scale. Scores
// are made again block by block; p and ds are numbers of the tensors' type before they are multiplied, sums over blocks are floats.
// ATen multiplies what a causal row does not see by probabilities of 0, so that what is not finite there makes NaN, and multiplies
// by the scale before it sums. So numbers beyond LARGE, and gradients that are not finite, leave the call to ATen.
#include "vector.h"
#include "math.h"
#include "attention.h"

struct Call {                                          // as _AttentionBackwardCall in attention.py has them
    int64_t batch, heads, queries, keys, depth, causal, parallel;
    double scale;
    const S *g, *q, *k, *v, *out;
    int64_t g_b, g_h, g_s, q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, out_b, out_h, out_s;
    const char* mask; int64_t mask_kind, mask_b, mask_h, mask_s, mask_t;
    const float* sums; int64_t sums_b, sums_h, sums_s;
    S *dq, *dk, *dv; int64_t dq_b, dq_h, dq_s, dk_b, dk_h, dk_s, dv_b, dv_h, dv_s;
};

namespace {

constexpr int64_t QUERIES = 64;                        // of a block, beside KEYS
constexpr float LARGE = 1e15f;                         // products of two, summed over a head, are far from infinity

struct Room {
    alignas(64) float s[QUERIES * KEYS], dp[QUERIES * KEYS], mask[EACH][KEYS];
    alignas(64) Word p[QUERIES / EACH * KEYS], ds[QUERIES / EACH * KEYS];  // numbers of EACH rows in a word
    Word ds_rows[FLOATS ? VW : QUERIES * KEYS / EACH];  // of EACH columns; floats are both
};
struct Head {                                          // laid out
    Word *k_columns, *v_columns, *k, *q, *g;
    float *dq, *dk, *dv, *sums, *delta;
};
ALWAYS int64_t room_of(const Call& c) {                // of a Head
    const int64_t q = up_to(c.queries, EACH), k = up_to(c.keys, KEYS);
    return (k * 3 + q * 2) * c.depth / EACH + (q + k * 2) * c.depth + q * 2;
}

#ifdef __AVX512BF16__
typedef uint16_t Shorts __attribute__((vector_size(64)));

// two vectors of floats, rounded: the first in the lower half
ALWAYS Shorts rounded(F low, F high) {
    Shorts r;
    asm("vcvtne2ps2bf16 %1, %2, %0" : "=v"(r) : "v"(low), "v"(high));
    return r;
}
ALWAYS U coupled(Shorts v) {
    const Shorts at = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,
                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return (U)__builtin_shuffle(v, at);
}
#endif

// Keeps p and ds of VW columns of row r and, of bfloat16, the next.
ALWAYS void keep(Room& m, int64_t r, int64_t j, const F* p, const F* ds) {
    const int64_t at = r / EACH * KEYS + j;
#ifdef __AVX512BF16__
    if constexpr (!FLOATS) {
        put(m.p + at, coupled(rounded(p[0], p[1])));
        const Shorts two = rounded(ds[0], ds[1]);
        put(m.ds + at, coupled(two));
        S* rows = (S*)m.ds_rows + r * KEYS + j;
        memcpy(rows, &two, sizeof two / 2);
        memcpy(rows + KEYS, (const char*)&two + sizeof two / 2, sizeof two / 2);
        return;
    }
#endif
    put(m.p + at, (U)p[0]);
    put(m.ds + at, (U)ds[0]);
}

// EACH rows of a block: from scores and g v' to p and ds. n: columns that each of them sees.
template <bool MASKS>
ALWAYS void turned_back(const Call& c, Room& m, const float* sums, const float* delta, int64_t r, const int64_t* n) {
    float by[EACH];
    UNROLLED for (int k = 0; k < EACH; k++) {
        const bool before = !MASKS && n[k] > 0 && far(sums[k]);
        by[k] = before ? 1.0f : (float)c.scale;
        if (before) scaled(m.s + (r + k) * KEYS, n[k], (float)c.scale);
    }
    for (int64_t j = 0; j < KEYS; j += VW) {
        F p[EACH], ds[EACH];
        UNROLLED for (int k = 0; k < EACH; k++) {
            p[k] = ds[k] = F{};
            if (n[k] <= j) continue;
            F x = ld(m.s + (r + k) * KEYS + j) * by[k];
            if (MASKS) x = x + ld(m.mask[k] + j);
            const F e = vexp(x - sums[k]), d = e * (ld(m.dp + (r + k) * KEYS + j) - delta[k]);
            const B in = lanes() < (int32_t)(n[k] - j);
            p[k] = sel(in, e, F{});
            ds[k] = sel(in, d, F{});
        }
        keep(m, r, j, p, ds);
    }
}

// What the next head reads at positions i to i + count.
ALWAYS void ahead(const Call& c, int64_t b, int64_t h, int64_t i, int64_t count) {
    if (++h == c.heads) { h = 0; b++; }
    if (b == c.batch) return;
    for (int64_t n = i; n < i + count; n++) {
        soon(c.q + b * c.q_b + h * c.q_h + n * c.q_s, c.depth);
        soon(c.g + b * c.g_b + h * c.g_h + n * c.g_s, c.depth);
        soon(c.out + b * c.out_b + h * c.out_h + n * c.out_s, c.depth);
        if (n >= c.keys) continue;
        soon(c.k + b * c.k_b + h * c.k_h + n * c.k_s, c.depth);
        soon(c.v + b * c.v_b + h * c.v_h + n * c.v_s, c.depth);
    }
}

void block(const Call& c, Room& m, const Head& a, int64_t b, int64_t h, int64_t i, int64_t j) {
    const int64_t count = least(QUERIES, c.queries - i), here = least(KEYS, c.keys - j), deep = c.depth / EACH;
    const int64_t vectors = c.depth / VW, wide = sizeof(S), down = KEYS * sizeof(Word);
    const S *q = c.q + b * c.q_b + h * c.q_h + i * c.q_s, *g = c.g + b * c.g_b + h * c.g_h + i * c.g_s;
    const Mask mask = {c.mask, c.mask_kind, c.mask_b, c.mask_h, c.mask_s, c.mask_t};
    auto seen = [&](int64_t r) {
        return r >= count ? 0 : c.causal ? most(0, least(here, i + r + 1 - j)) : here;
    };
    auto scored = [&](int64_t, int64_t after) { return Part{0, deep, (seen(after - 1) + VW - 1) / VW}; };
    product({(const char*)q, c.q_s * wide, 4}, count, {a.k_columns + j * deep, KEYS}, KEYS / VW, {m.s, KEYS}, false, scored);
    product({(const char*)g, c.g_s * wide, 4}, count, {a.v_columns + j * deep, KEYS}, KEYS / VW, {m.dp, KEYS}, false, scored);
    for (int64_t r = 0; r < count; r += EACH) {
        const int64_t n[2] = {seen(r), seen(r + 1)};
        if (j == 0) ahead(c, b, h, i + r, least(EACH, count - r));
        if (mask.kind) {
            for (int k = 0; k < EACH; k++)
                if (n[k]) masked(mask, b, h, i + r + k, j, n[k], m.mask[k]);
            turned_back<true>(c, m, a.sums + i + r, a.delta + i + r, r, n);
        } else {
            turned_back<false>(c, m, a.sums + i + r, a.delta + i + r, r, n);
        }
    }
    auto keys = [&](int64_t, int64_t after) { return Part{0, (seen(after - 1) + EACH - 1) / EACH, vectors}; };
    auto queries = [&](int64_t before, int64_t) {      // rows from the first that sees the key on
        return Part{c.causal ? most(0, j + before - i) / EACH : 0, (count + EACH - 1) / EACH, vectors};
    };
    product({(const char*)(FLOATS ? m.ds : m.ds_rows), KEYS * wide, 4}, count, {a.k + j / EACH * c.depth, c.depth}, vectors,
            {a.dq + i * c.depth, c.depth}, true, keys);
    product({(const char*)m.p, 4, down}, here, {a.g + i / EACH * c.depth, c.depth}, vectors,
            {a.dv + j * c.depth, c.depth}, true, queries);
    product({(const char*)m.ds, 4, down}, here, {a.q + i / EACH * c.depth, c.depth}, vectors,
            {a.dk + j * c.depth, c.depth}, true, queries);
}

// whether all sizes of numbers are below `limit`; NaN is below none
ALWAYS B below(F x, float limit) { return (x < limit) & (x > -limit); }
bool below(const S* p, int64_t step, int64_t count, int64_t depth, float limit) {
    B fine = lanes() >= 0;
    for (int64_t n = 0; n < count; n++)
        for (int64_t d = 0; d < depth; d += VW) fine = fine & below(ld(p + n * step + d), limit);
    return all(fine);
}

// Says whether all that it wrote is finite.
ALWAYS bool written(const float* from, int64_t count, int64_t depth, float scale, S* to, int64_t step) {
    B fine = lanes() >= 0;
    for (int64_t n = 0; n < count; n++)
        for (int64_t d = 0; d < depth; d += VW) {
            const F x = ld(from + n * depth + d) * scale;
            fine = fine & below(x, INF);
            st(to + n * step + d, x);
        }
    return all(fine);
}

// false: ATen's answer may be another
bool head(const Call& c, Room& m, float* room, int64_t b, int64_t h) {
    const int64_t queries = up_to(c.queries, EACH), keys = up_to(c.keys, KEYS), depth = c.depth;
    Head a;
    a.k_columns = (Word*)room;
    a.v_columns = a.k_columns + keys * depth / EACH;
    a.k = a.v_columns + keys * depth / EACH;
    a.q = a.k + keys * depth / EACH;
    a.g = a.q + queries * depth / EACH;
    a.dq = (float*)(a.g + queries * depth / EACH);
    a.dk = a.dq + queries * depth;
    a.dv = a.dk + keys * depth;
    a.sums = a.dv + keys * depth;
    a.delta = a.sums + queries;
    const S *q = c.q + b * c.q_b + h * c.q_h, *g = c.g + b * c.g_b + h * c.g_h, *o = c.out + b * c.out_b + h * c.out_h;
    const S *k = c.k + b * c.k_b + h * c.k_h, *v = c.v + b * c.v_b + h * c.v_h;
    if (!(below(k, c.k_s, c.keys, depth, LARGE) && below(v, c.v_s, c.keys, depth, LARGE) && below(q, c.q_s, c.queries, depth, LARGE) &&
          below(g, c.g_s, c.queries, depth, LARGE) && below(o, c.out_s, c.queries, depth, LARGE)))
        return false;
    columns(k, c.k_s, c.keys, depth, a.k_columns);
    columns(v, c.v_s, c.keys, depth, a.v_columns);
    couples(k, c.k_s, c.keys, depth, a.k);
    couples(q, c.q_s, c.queries, depth, a.q);
    couples(g, c.g_s, c.queries, depth, a.g);
    memset(a.dq, 0, (size_t)((queries + keys * 2) * depth) * sizeof(float));
    for (int64_t i = 0; i < queries; i++) {
        F sum = {};
        if (i < c.queries)
            for (int64_t d = 0; d < depth; d += VW) sum = sum + ld(g + i * c.g_s + d) * ld(o + i * c.out_s + d);
        a.delta[i] = hsum(sum);
        a.sums[i] = i < c.queries ? c.sums[b * c.sums_b + h * c.sums_h + i * c.sums_s] : 0.0f;
    }
    for (int64_t j = 0; j < c.keys; j += KEYS)
        for (int64_t i = c.causal ? j / QUERIES * QUERIES : 0; i < c.queries; i += QUERIES) block(c, m, a, b, h, i, j);
    const float scale = (float)c.scale;
    const bool dq = written(a.dq, c.queries, depth, scale, c.dq + b * c.dq_b + h * c.dq_h, c.dq_s);
    const bool dk = written(a.dk, c.keys, depth, scale, c.dk + b * c.dk_b + h * c.dk_h, c.dk_s);
    const bool dv = written(a.dv, c.keys, depth, 1.0f, c.dv + b * c.dv_b + h * c.dv_h, c.dv_s);
    return dq && dk && dv;
}

}  // namespace

// 1: not on this processor, there is no memory, or numbers are such that ATen's answer may be another; results are not whole
extern "C" int gnomon_kernel(const Call* given) {
    if (!KNOWN) return 1;
    const Call& c = *given;
    int failed = 0;
#pragma omp parallel if (c.parallel) reduction(| : failed)
    {
        char* memory = (char*)aligned_alloc(64, sizeof(Room) + (size_t)up_to(room_of(c), 16) * sizeof(float));
        failed |= !memory;
#pragma omp for schedule(static)
        for (int64_t n = 0; n < c.batch * c.heads; n++)
            if (memory && !failed) failed |= !head(c, *(Room*)memory, (float*)(memory + sizeof(Room)), n / c.heads, n % c.heads);
        free(memory);
    }
    return failed;
}
