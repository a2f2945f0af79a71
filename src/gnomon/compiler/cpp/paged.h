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

struct Call {                                          // as PagedCall in runtime/ops/paged.py has them; k and v are null where none are new
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

// Scores of VW keys from `position` on by a query at `at`: capped, biased by a head's slope, and -INF where it sees them not.
ALWAYS F seen(const Call& c, F score, int64_t position, int64_t at, int64_t end, int64_t head) {
    F x = score * (float)c.scale;
    if (c.cap != 0.0) x = vtanh(x / (float)c.cap) * (float)c.cap;
    const B place = lanes() + (int32_t)position;
    if (c.slopes) x = x + __builtin_convertvector(place - (int32_t)at, F) * c.slopes[head];
    B is = place < (int32_t)end;
    if (c.causal) is = is & (place <= (int32_t)at);
    if (c.window) is = is & (place > (int32_t)(at - c.window));
    if (c.window && !c.causal) is = is & (place < (int32_t)(at + c.window));
    return sel(is, x, splat(-INF));
}

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
                const F x = seen(c, score[r], position, at[r], end, h * group + (first + least(r, count - 1)) % group);
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

#if VW == 16 && defined(__AVX512BF16__)
// Many queries of a sequence, as a prompt has them: TILES times BESIDE rows meet a span of keys and values, which is brought into
// pairs once for all of them, BESIDE by two vectors of sums at a time (24 registers, as in stored.cpp's products).
constexpr int64_t LONG = 128;                          // keys at a time: two of them in 32 KB with a head of 64, 4% less than of 64
constexpr int64_t BESIDE = 12, TILES = 16, BROAD = 256;  // rows beside each other; of one block; elements of a head
constexpr int64_t FROM = 2 * BESIDE;                     // rows from which on a block is faster

struct Block {
    alignas(64) uint32_t keys[BROAD / 2 * LONG];       // (pair of elements, key)
    alignas(64) uint32_t values[LONG / 2 * BROAD];     // (pair of keys, element)
    alignas(64) uint32_t q[TILES][BESIDE * BROAD / 2];   // (row, pair of elements)
    alignas(64) float out[TILES][BESIDE * BROAD];
    alignas(64) F sum[TILES][BESIDE];                    // of each lane's keys
    float largest[TILES][BESIDE];                        // scores are powers of two, not of e
    alignas(64) float p[BESIDE * LONG];
    alignas(64) uint32_t narrow[BESIDE * LONG / 2];      // pairs of keys
};

// 2^x for x of at most 0, within 4e-6 of it: what is multiplied is rounded to bfloat16
ALWAYS F power(F x) {
    const F k = vnearest(x), f = x - k;
    F e = fused(f, 0.0096181292f, 0.0555041086f);
    e = fused(e, f, 0.2402265069f);
    e = fused(e, f, 0.6931471806f);
    return scaled(fused(e, f, 1.0f), k);
}

// to += or = a (BESIDE, pairs, with `row` from one row to the next and `step` between pairs) times b (pairs, width), 32 columns
template <bool MORE>
ALWAYS void multiplied(const uint32_t* a, int64_t row, int64_t step, const uint32_t* b, int64_t width, int64_t pairs, float* to, int64_t to_row) {
    F x[BESIDE], y[BESIDE];
    UNROLLED for (int r = 0; r < BESIDE; r++) {
        x[r] = MORE ? ld(to + r * to_row) : F{};
        y[r] = MORE ? ld(to + r * to_row + VW) : F{};
    }
    for (int64_t t = 0; t < pairs; t++) {
        const __m512i low = _mm512_load_si512(b + t * width), high = _mm512_load_si512(b + t * width + VW);
        UNROLLED for (int r = 0; r < BESIDE; r++) {
            const uint32_t pair = a[r * row + t * step];
            x[r] = paired(x[r], low, pair);
            y[r] = paired(y[r], high, pair);
        }
    }
    UNROLLED for (int r = 0; r < BESIDE; r++) {
        st(to + r * to_row, x[r]);
        st(to + r * to_row + VW, y[r]);
    }
}

void block(const Call& c, Block& m, int64_t s, int64_t h, int64_t first, int64_t count) {
    const int64_t group = c.heads / c.kv_heads, begin = c.begins[s], total = c.begins[s + 1] - begin, length = c.lengths[s];
    const int64_t before = length - total, tiles = (count + BESIDE - 1) / BESIDE, wide = (c.v_row + 2 * VW - 1) / (2 * VW) * 2 * VW;
    const float two = 1.44269504088896341f;            // scores as powers of two
    auto at = [&](int64_t row) { return before + (first + least(row, count - 1)) / group; };
    auto head = [&](int64_t row) { return h * group + (first + least(row, count - 1)) % group; };
    for (int64_t t = 0; t < tiles; t++) {
        for (int64_t r = 0; r < BESIDE; r++) {
            const int64_t row = t * BESIDE + r;
            const S* q = c.q + (begin + at(row) - before) * c.q_row + head(row) * c.k_dim;
            memcpy(m.q[t] + r * BROAD / 2, q, sizeof(S) * (size_t)c.k_dim);
            m.sum[t][r] = F{};
            m.largest[t][r] = -INF;
        }
        memset(m.out[t], 0, sizeof(float) * (size_t)(BESIDE * wide));
    }
    const int64_t end = c.causal ? at(count - 1) + 1 : length;
    int64_t start = c.window ? at(0) - c.window + 1 : 0;
    start = start < 0 ? 0 : start / c.size * c.size;
    const int32_t* table = c.tables + s * c.table_row;
    for (int64_t j = start; j < end; j += LONG) {
        const int64_t here = least(LONG, end - j);
        for (int64_t i = 0; i < here; i += VW) {       // a vector of keys lies in one block
            const int64_t page = (int64_t)table[(j + i) / c.size] * c.kv_heads + h;
            const S* k = c.keys + page * c.k_dim * c.size + (j + i) % c.size;
            for (int64_t d = 0; d < c.k_dim; d += 2)
                _mm512_store_si512(m.keys + d / 2 * LONG + i, beside(k + d * c.size, k + (d + 1) * c.size));
            const S* v = c.values + (page * c.size + (j + i) % c.size) * c.v_row;
            for (int64_t t = 0; t < VW; t += 2)        // what lies after the last value may be anything, and is not read
                for (int64_t d = 0; d < c.v_row; d += VW) {
                    const S *one = v + t * c.v_row + d, *other = one + c.v_row;
                    _mm512_store_si512(m.values + (i + t) / 2 * wide + d,
                        i + t + 1 < here ? beside(one, other) : i + t < here ? beside(one, nullptr) : _mm512_setzero_si512());
                }
        }
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t earliest = at(t * BESIDE), latest = at(t * BESIDE + BESIDE - 1);
            if ((c.causal && j > latest) || (c.window && j + LONG <= earliest - c.window)) continue;
            const bool plain = here == LONG && !c.window && !c.slopes && c.cap == 0.0 && (!c.causal || j + LONG - 1 <= earliest);
            for (int64_t i = 0; i < here; i += 2 * VW)
                multiplied<false>(m.q[t], BROAD / 2, 1, m.keys + i, LONG, c.k_dim / 2, m.p + i, LONG);
            const int64_t vectors = (here + VW - 1) / VW;
            for (int64_t r = 0; r < BESIDE; r++) {
                float* p = m.p + r * LONG;
                F top = splat(-INF), x[LONG / VW];
                for (int64_t i = 0; i < vectors; i++) {
                    x[i] = plain ? ld(p + i * VW) * ((float)c.scale * two)
                                 : seen(c, ld(p + i * VW), j + i * VW, at(t * BESIDE + r), end, head(t * BESIDE + r)) * two;
                    top = larger(top, x[i]);
                }
                uint16_t* narrow = (uint16_t*)(m.narrow + r * LONG / 2);
                float most = m.largest[t][r];
                if (_mm512_cmp_ps_mask((__m512)top, _mm512_set1_ps(most), _CMP_NLE_UQ)) {  // of most spans none is larger
                    const float was = most;
                    m.largest[t][r] = most = hmax(top);
                    const float kept = was == -INF ? 0.0f : power(splat(was - most))[0];
                    m.sum[t][r] = m.sum[t][r] * kept;
                    for (int64_t d = 0; d < wide; d += VW) st(m.out[t] + r * wide + d, ld(m.out[t] + r * wide + d) * kept);
                }
                if (most == -INF) {                    // nothing of these is seen
                    memset(narrow, 0, 2 * LONG);
                    continue;
                }
                F added = F{};
                for (int64_t i = 0; i < vectors; i++) {
                    const F e = plain ? power(x[i] - most) : sel(x[i] == splat(-INF), F{}, power(x[i] - most));
                    added = added + e;
                    narrowed(narrow + i * VW, e);
                }
                m.sum[t][r] = m.sum[t][r] + added;
            }
            for (int64_t d = 0; d < wide; d += 2 * VW)
                multiplied<true>(m.narrow, LONG / 2, 1, m.values + d, wide, (here + 1) / 2, m.out[t] + d, wide);
        }
    }
    for (int64_t row = 0; row < count; row++) {
        const int64_t t = row / BESIDE, r = row % BESIDE, to_head = head(row);
        float all = hsum(m.sum[t][r]), by = 1.0f;
        if (c.sinks) {
            const float sink = c.sinks[to_head] * two, largest = m.largest[t][r], most = sink > largest ? sink : largest;
            by = power(splat(largest - most))[0];
            all = all * by + power(splat(sink - most))[0];
        }
        by = all > 0.0f ? by / all : 0.0f;
        const float* from = m.out[t] + r * wide;
        S* to = c.out + ((begin + at(row) - before) * c.heads + to_head) * c.v_dim;
        int64_t d = 0;
        for (; d + VW <= c.v_dim; d += VW) st(to + d, ld(from + d) * by);
        if (d < c.v_dim) st(to + d, ld(from + d) * by, (int)(c.v_dim - d));
    }
}
#else
constexpr int64_t BESIDE = 1, TILES = 1, BROAD = 0, FROM = 1;
struct Block {};
void block(const Call&, Block&, int64_t, int64_t, int64_t, int64_t) {}
#endif

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
    const bool blocks = PAIRS && c.k_dim % 2 == 0 && c.k_dim <= BROAD && c.v_row <= BROAD;
    int64_t longest = 0, work = 0, units = 0;
    for (int64_t s = 0; s < c.sequences; s++) {
        if (c.k) put(c, s);
        const int64_t n = (c.begins[s + 1] - c.begins[s]) * group, rows = blocks && n >= FROM ? BESIDE * TILES : tile;
        work += n * c.kv_heads * c.lengths[s] * (c.k_dim + c.v_dim);
        longest = (n + rows - 1) / rows > longest ? (n + rows - 1) / rows : longest;
    }
    units = c.sequences * c.kv_heads * longest;
    const int64_t threads = work >= 1 << 20 ? c.threads : 1;   // of less, waiting for another thread takes longer
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        union Either { Room few; Block many; Either() {} } m;
#pragma omp for schedule(dynamic)
        for (int64_t u = 0; u < units; u++) {
            const int64_t s = u / (c.kv_heads * longest), h = u / longest % c.kv_heads;
            const int64_t all = (c.begins[s + 1] - c.begins[s]) * group, rows = blocks && all >= FROM ? BESIDE * TILES : tile;
            const int64_t first = u % longest * rows;
            if (first >= all) continue;
            if (blocks && all >= FROM) block(c, m.many, s, h, first, least(rows, all - first));
            else some(c, m.few, s, h, first, least(rows, all - first));
        }
    }
}

}  // namespace
