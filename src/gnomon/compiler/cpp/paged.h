// Attention over keys and values in blocks (gnomon/runtime/ops/paged.py): new ones, if there are any, are written where
// block tables say, then each query meets its sequence's keys where they lie, a few blocks at a time, with the largest score and the sum so far.
// A block of keys lies (kv head, element, token), so that a vector is one element of VW tokens and scores need no sums of
// lanes; a block of values lies (kv head, token, element), whose rows are padded to whole vectors.
#pragma once
#include "vector.h"
#include "math.h"
#include "memory.h"
#if VW == 16 && defined(__AVX512BF16__)
#include <immintrin.h>
#define PAIRS (sizeof(S) == 2)                         // products of two bfloat16 in an instruction
#else
#define PAIRS false
#endif

struct Call {                                          // as _Call in paged.py has them; k and v are null where none are new
    int64_t sequences, heads, kv_heads, k_dim, v_dim, v_row, size, table_row, window, causal, threads;
    double scale, cap;
    const S *q, *k, *v; int64_t q_row, k_row, v_in_row; // a row is a token: its heads lie one after the other
    S *keys, *values;
    const int32_t* tables;                             // (sequences, table_row)
    const int64_t *begins, *lengths;                   // first query of each sequence and one past the last; keys, new ones included
    const float *slopes, *sinks;                       // a head, or null
    S* out;
};

namespace {

constexpr int64_t SPAN = 64, WIDEST = 1024;            // keys at a time; elements of a head
ALWAYS int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

constexpr int MOST = PAIRS ? 16 : 8;                   // rows at a time

struct Room {
    alignas(64) float q[MOST * WIDEST], out[MOST * WIDEST], p[MOST * SPAN];
    alignas(64) uint16_t narrow[MOST * SPAN];          // p in bfloat16
};

#if VW == 16 && defined(__AVX512BF16__)
// 16 elements of two rows of bfloat16, side by side.
ALWAYS __m512i beside(const void* a, const void* b) {
    alignas(64) static const uint16_t order[32] = {
        0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m256i low = _mm256_loadu_si256((const __m256i*)a), high = b ? _mm256_loadu_si256((const __m256i*)b) : _mm256_setzero_si256();
    return _mm512_permutexvar_epi16(_mm512_load_si512(order), _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
}
// sum += both products of pairs; pair: two bfloat16, for all lanes
ALWAYS F paired(F sum, __m512i rows, uint32_t pair) {
    return (F)_mm512_dpbf16_ps((__m512)sum, (__m512bh)rows, (__m512bh)_mm512_set1_epi32((int)pair));
}
ALWAYS void narrowed(uint16_t* to, F v) {
    const __m256bh half = _mm512_cvtneps_pbh((__m512)v);
    memcpy(to, &half, 32);
}
#else
ALWAYS int beside(const void*, const void*) { return 0; }
ALWAYS F paired(F sum, int, uint32_t) { return sum; }
ALWAYS void narrowed(uint16_t*, F) {}
#endif

// Queries `from` to `from + R / group` of a sequence, all heads of a group of one kv head: R rows at most, `count` real.
// P: products of pairs of bfloat16, by which shares of the softmax are rounded too.
template <int R, bool P>
void rows(const Call& c, Room& m, int64_t s, int64_t h, int64_t first, int64_t count) {
    const int64_t group = c.heads / c.kv_heads, begin = c.begins[s], total = c.begins[s + 1] - begin;
    const int64_t length = c.lengths[s], before = length - total;
    float largest[R], sum[R];
    int64_t at[R];
    for (int r = 0; r < R; r++) {
        const int64_t row = first + least(r, count - 1), query = row / group, head = h * group + row % group;
        const S* q = c.q + (begin + query) * c.q_row + head * c.k_dim;
        if (P) for (int64_t d = 0; d < c.k_dim; d += 2) memcpy(m.q + d / 2 * R + r, q + d, 4);
        else for (int64_t d = 0; d < c.k_dim; d++) m.q[d * R + r] = one(q[d]);
        at[r] = before + query;
        largest[r] = -INF;
        sum[r] = 0.0f;
    }
    memset(m.out, 0, sizeof(float) * (size_t)(R * c.v_row));
    const int64_t end = c.causal ? at[R - 1] + 1 : length;
    int64_t start = c.window ? at[0] - c.window + 1 : 0;
    start = start < 0 ? 0 : start / c.size * c.size;
    const int32_t* table = c.tables + s * c.table_row;
    for (int64_t j = start; j < end; j += SPAN) {
        const int64_t here = least(SPAN, end - j);
        // all rows see all of these, and scores are products
        const bool plain = here == SPAN && !c.window && !c.slopes && c.cap == 0.0 && (!c.causal || j + SPAN - 1 <= at[0]);
        F top[R];
        for (int r = 0; r < R; r++) top[r] = splat(-INF);
        for (int64_t i = 0; i < here; i += VW) {
            const int64_t position = j + i;
            const S* k = c.keys + ((int64_t)table[position / c.size] * c.kv_heads + h) * c.k_dim * c.size + position % c.size;
            F score[R];
            for (int r = 0; r < R; r++) score[r] = F{};
            if constexpr (P) {
                for (int64_t d = 0; d < c.k_dim; d += 2) {
                    const auto both = beside(k + d * c.size, k + (d + 1) * c.size);
                    const uint32_t* q = (const uint32_t*)m.q + d / 2 * R;
                    UNROLLED for (int r = 0; r < R; r++) score[r] = paired(score[r], both, q[r]);
                }
            } else {
                for (int64_t d = 0; d < c.k_dim; d++) {
                    const F key = ld(k + d * c.size);
                    UNROLLED for (int r = 0; r < R; r++) score[r] = score[r] + key * m.q[d * R + r];
                }
            }
            if (plain) {
                UNROLLED for (int r = 0; r < R; r++) {
                    const F x = score[r] * (float)c.scale;
                    top[r] = larger(top[r], x);
                    st(m.p + r * SPAN + i, x);
                }
            } else for (int r = 0; r < R; r++) {
                F x = score[r] * (float)c.scale;
                if (c.cap != 0.0) x = vtanh(x / (float)c.cap) * (float)c.cap;
                const B place = lanes() + (int32_t)position;
                if (c.slopes) {
                    const int64_t head = h * group + (first + least(r, count - 1)) % group;
                    x = x + __builtin_convertvector(place - (int32_t)at[r], F) * c.slopes[head];
                }
                B seen = place < (int32_t)end;
                if (c.causal) seen = seen & (place <= (int32_t)at[r]);
                if (c.window) seen = seen & (place > (int32_t)(at[r] - c.window));
                if (c.window && !c.causal) seen = seen & (place < (int32_t)(at[r] + c.window));
                x = sel(seen, x, splat(-INF));
                top[r] = larger(top[r], x);
                st(m.p + r * SPAN + i, x);
            }
        }
        for (int r = 0; r < R; r++) {
            const float here_top = hmax(top[r]), most = here_top > largest[r] ? here_top : largest[r];
            if (most == -INF) {                        // nothing of these is seen
                for (int64_t i = 0; i < here; i += VW) st(m.p + r * SPAN + i, F{});
                if (P) memset(m.narrow + r * SPAN, 0, 2 * SPAN);
                continue;
            }
            F added = F{};
            for (int64_t i = 0; i < here; i += VW) {
                const F x = ld(m.p + r * SPAN + i), e = plain ? vexp(x - most) : sel(x == splat(-INF), F{}, vexp(x - most));
                added = added + e;
                if (P) narrowed(m.narrow + r * SPAN + i, e);
                else st(m.p + r * SPAN + i, e);
            }
            if (most != largest[r]) {
                const float kept = largest[r] == -INF ? 0.0f : vexp(splat(largest[r] - most))[0];
                sum[r] *= kept;
                for (int64_t d = 0; d < c.v_row; d += VW) st(m.out + r * c.v_row + d, ld(m.out + r * c.v_row + d) * kept);
                largest[r] = most;
            }
            sum[r] += hsum(added);
        }
        for (int64_t d = 0; d < c.v_row; d += VW) {
            F o[R];
            UNROLLED for (int r = 0; r < R; r++) o[r] = ld(m.out + r * c.v_row + d);
            for (int64_t i = 0; i < here; i += c.size) { // a block at a time; a span begins with one
                const int64_t n = least(c.size, here - i);
                const S* v = c.values + ((int64_t)table[(j + i) / c.size] * c.kv_heads + h) * c.size * c.v_row + d;
                if constexpr (P) {
                    for (int64_t t = 0; t < n; t += 2) { // what lies after the last value may be anything, and is not read
                        const auto both = beside(v + t * c.v_row, t + 1 < n ? v + (t + 1) * c.v_row : nullptr);
                        UNROLLED for (int r = 0; r < R; r++) {
                            uint32_t pair;
                            memcpy(&pair, m.narrow + r * SPAN + i + t, 4);
                            o[r] = paired(o[r], both, pair);
                        }
                    }
                } else {
                    for (int64_t t = 0; t < n; t++) {
                        const F value = ld(v + t * c.v_row);
                        UNROLLED for (int r = 0; r < R; r++) o[r] = o[r] + value * m.p[r * SPAN + i + t];
                    }
                }
            }
            UNROLLED for (int r = 0; r < R; r++) st(m.out + r * c.v_row + d, o[r]);
        }
    }
    for (int64_t r = 0; r < count; r++) {
        const int64_t row = first + r, query = row / group, head = h * group + row % group;
        float all = sum[r], by = 1.0f;
        if (c.sinks) {
            const float sink = c.sinks[head], most = sink > largest[r] ? sink : largest[r];
            by = vexp(splat(largest[r] - most))[0];
            all = all * by + vexp(splat(sink - most))[0];
        }
        by = all > 0.0f ? by / all : 0.0f;
        S* to = c.out + ((begin + query) * c.heads + head) * c.v_dim;
        int64_t d = 0;
        for (; d + VW <= c.v_dim; d += VW) st(to + d, ld(m.out + r * c.v_row + d) * by);
        if (d < c.v_dim) st(to + d, ld(m.out + r * c.v_row + d) * by, (int)(c.v_dim - d));
    }
}

void some(const Call& c, Room& m, int64_t s, int64_t h, int64_t first, int64_t count) {
    if (PAIRS && count > 2 && c.k_dim % 2 == 0) {
        if (count <= 4) rows<4, PAIRS>(c, m, s, h, first, count);
        else if (count <= 8) rows<8, PAIRS>(c, m, s, h, first, count);
        else rows<MOST, PAIRS>(c, m, s, h, first, count);
    } else if (count == 1) rows<1, false>(c, m, s, h, first, count);
    else if (count == 2) rows<2, false>(c, m, s, h, first, count);
    else if (count <= 4) rows<4, false>(c, m, s, h, first, count);
    else if (count <= 8) rows<8, false>(c, m, s, h, first, count);
    else rows<MOST, false>(c, m, s, h, first, count);
}

void put(const Call& c, int64_t s) {
    const int64_t begin = c.begins[s], total = c.begins[s + 1] - begin, before = c.lengths[s] - total;
    for (int64_t i = 0; i < total; i++) {
        const int64_t position = before + i, block = c.tables[s * c.table_row + position / c.size], place = position % c.size;
        for (int64_t h = 0; h < c.kv_heads; h++) {
            const S *k = c.k + (begin + i) * c.k_row + h * c.k_dim, *v = c.v + (begin + i) * c.v_in_row + h * c.v_dim;
            S* to = c.keys + (block * c.kv_heads + h) * c.k_dim * c.size + place;
            for (int64_t d = 0; d < c.k_dim; d++) to[d * c.size] = k[d];
            memcpy(c.values + ((block * c.kv_heads + h) * c.size + place) * c.v_row, v, sizeof(S) * (size_t)c.v_dim);
        }
    }
}

// New keys and values, and what each query sees.
void over_pages(const Call& c) {
    const int64_t group = c.heads / c.kv_heads, tile = group >= MOST ? MOST : MOST / group * group;
    int64_t longest = 0, work = 0;
    for (int64_t s = 0; s < c.sequences; s++) {
        if (c.k) put(c, s);
        const int64_t n = (c.begins[s + 1] - c.begins[s]) * group;
        work += n * c.kv_heads * c.lengths[s] * (c.k_dim + c.v_dim);
        longest = n > longest ? n : longest;
    }
    const int64_t tiles = (longest + tile - 1) / tile, units = c.sequences * c.kv_heads * tiles;
    const int64_t threads = work >= 1 << 20 ? c.threads : 1;   // of less, waiting for another thread takes longer
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        Room m;
#pragma omp for schedule(dynamic)
        for (int64_t u = 0; u < units; u++) {
            const int64_t s = u / (c.kv_heads * tiles), h = u / tiles % c.kv_heads, first = u % tiles * tile;
            const int64_t all = (c.begins[s + 1] - c.begins[s]) * group;
            if (first < all) some(c, m, s, h, first, least(tile, all - first));
        }
    }
}

}  // namespace
