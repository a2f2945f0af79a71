// Latent attention (MLA) over compressed pages (gnomon/serve/latent.py): a page holds of each token its latent c (R numbers) and its
// rotated key k (P numbers), and nothing a head. Of head h, with the up-projection W = [Wk; Wv] (N + V, R) of that head:
//     key    = [Wk c | k]                 score = q · key = (q_nope Wk) · c + q_rope · k
//     value  = Wv c                       out   = sum p (Wv c) = Wv (sum p c)
// With few queries the right-hand sides are computed ("absorbed"): all heads of a query meet the same rows of N' = R + P numbers, which
// are brought from the pages once for all of them, first as keys, then their first R as values. With many, keys and values of one head are
// made again from a span of latents, and the head's queries meet these: per key and head R (N + V) multiplications once and Q (N + P + V),
// where absorbed ones take Q (2 R + P).
// Either way: spans of KEYS keys are brought into the order of `Span`; tiles of rows (a query of a head is a row) meet them with the
// largest score and the sum so far, as flash attention merges (Dao 2022). Matmuls with Wk and Wv are those of compiler/cpp/stored.cpp.
// A word is what a lane of a vector multiplies at once: two numbers of bfloat16 where the processor has such products, else a float.
#include "paged.h"
#include "stored.h"

extern "C" int omp_get_thread_num(void) noexcept;

struct LatentCall {                                    // as LatentCall in latent.py has them
    int64_t sequences, heads, nope, rope, rank, v_dim, size, table_row, threads, together, narrowed, most_absorbed;
    double scale;
    const S *q, *latent, *rotated; int64_t q_row, latent_row, rotated_row; // a row is a token
    S* pool;                                           // (blocks, size, R + P)
    const int32_t* tables;                             // (sequences, table_row)
    const int64_t *begins, *lengths;                   // first query of each sequence and one past the last; keys, new ones included
    const Product *absorb, *keys, *values;             // of each head: Wk' (R, N), Wk (N, R), Wv (V, R), without rows
    const void *absorbs, *makes_keys, *makes_values;   // the kernels of these
    S* out;                                            // (tokens, heads, V)
};

namespace {

constexpr int64_t KEYS = 128;                          // that are brought at once; half of the second cache with R = 512 in float32
constexpr int64_t PIECE = 64;                          // tokens whose queries are absorbed at once
constexpr int64_t ROWS = 192;                          // absorbed rows that meet a span while it is in cache
constexpr int HIGH = VW == 16 ? 12 : 6;                // rows of a tile: with two vectors of sums each, 24 or 12 registers
constexpr int64_t EACH = PAIRS ? 2 : 1;                // numbers of a word

ALWAYS int64_t words(int64_t n) { return (n + EACH - 1) / EACH; }
ALWAYS int64_t up_to(int64_t n, int64_t by) { return (n + by - 1) / by * by; }

#if VW == 16 && defined(__AVX512BF16__)
ALWAYS F both(F sum, F a, uint32_t pair) { return paired(sum, (__m512i)a, pair); }
ALWAYS F side_by_side(const S* a, const S* b) { return (F)beside(a, b); }
#define EXPONENTIAL(x) (PAIRS ? power(x) : vexp(x))
#else
ALWAYS F both(F sum, F, uint32_t) { return sum; }
ALWAYS F side_by_side(const S*, const S*) { return F{}; }
#define EXPONENTIAL(x) vexp(x)
#endif
constexpr float BASE = PAIRS ? 1.44269504088896341f : 1.0f;   // scores are powers of two where `power` takes them

// VW words of a row from p on, of which `left` numbers are its own; 0 beyond them
ALWAYS F words_of(const S* p, int64_t left) {
    if constexpr (PAIRS) {
        S few[2 * VW] = {};
        if (left < 2 * VW) { memcpy(few, p, sizeof(S) * (size_t)left); p = few; }
        F v;
        memcpy(&v, p, sizeof v);
        return v;
    }
    return left >= VW ? ld(p) : ld(p, (int)left);
}

struct Scratch {                                       // of one thread
    float *keys;                                       // (word of a key, key)
    float *values;                                     // (word of keys: two of them or one, number of a value)
    float *q;                                          // (row, word)
    float *out, *sum, *largest;                        // (row, number), (row, lane), (row)
    float *p, *narrow;                                 // (row of a tile, key), the same as words
    S *latents, *made;                                 // (key, R), (key, N + V) of a head
    char* narrowed;                                    // rows as a product's kernel reads them
};

struct LatentSizes { int64_t key, value, rows; };      // words of a key, numbers of a value with what fills up two vectors, rows of all tiles

LatentSizes sizes_of(const LatentCall& c, int64_t rows) {
    const int64_t key = words(c.nope > c.rank ? c.nope : c.rank) + words(c.rope);
    return {key, up_to(c.v_dim > c.rank ? c.v_dim : c.rank, 2 * VW), rows + HIGH};   // blocks of `run` are at most (rows + HIGH - 1) / HIGH
}

// The scratch of a thread from `at` on; returns its bytes, which are all that is asked for where `at` is null.
int64_t divide(const LatentCall& c, const LatentSizes& n, char* at, Scratch& m) {
    int64_t end = 0;
    auto take = [&](int64_t bytes) { char* here = (char*)((uintptr_t)at + (uintptr_t)end); end += up_to(bytes, 64); return here; };
    m.keys = (float*)take(4 * n.key * KEYS);
    m.values = (float*)take(4 * words(KEYS) * n.value);
    m.q = (float*)take(4 * n.rows * n.key);
    m.out = (float*)take(4 * n.rows * n.value);
    m.sum = (float*)take(4 * n.rows * VW);
    m.largest = (float*)take(4 * n.rows);
    m.p = (float*)take(4 * HIGH * KEYS);
    m.narrow = (float*)take(4 * HIGH * KEYS);
    m.latents = (S*)take((int64_t)sizeof(S) * KEYS * c.rank);
    m.made = (S*)take((int64_t)sizeof(S) * KEYS * (c.nope + c.v_dim));
    m.narrowed = take(c.narrowed);
    return up_to(end, PAGE);
}

struct Unit {                                          // queries of a sequence, of some neighbouring heads, that one thread takes
    int64_t s, head, heads, query, queries;
    const S* low;                                      // q_nope Wk of the first of these queries, (query, all heads, R); null: keys are made
    S* to;                                             // sums of latents by shares, alike; or what attention gives, (query, all heads, V)
};

// to (R rows, 2 VW columns) = or += a (R rows of `row` words) times b (count, width)
template <int R, bool MORE>
ALWAYS void tile(const float* a, int64_t row, const float* b, int64_t width, int64_t count, float* to, int64_t to_row) {
    F x[R], y[R];
    UNROLLED for (int r = 0; r < R; r++) {
        x[r] = MORE ? ld(to + r * to_row) : F{};
        y[r] = MORE ? ld(to + r * to_row + VW) : F{};
    }
    for (int64_t t = 0; t < count; t++) {
        const F low = ld(b + t * width), high = ld(b + t * width + VW);
        UNROLLED for (int r = 0; r < R; r++) {
            if constexpr (PAIRS) {
                uint32_t pair;
                memcpy(&pair, a + r * row + t, 4);
                x[r] = both(x[r], low, pair);
                y[r] = both(y[r], high, pair);
            } else {
                x[r] = fused(low, a[r * row + t], x[r]);
                y[r] = fused(high, a[r * row + t], y[r]);
            }
        }
    }
    UNROLLED for (int r = 0; r < R; r++) { st(to + r * to_row, x[r]); st(to + r * to_row + VW, y[r]); }
}

// Words `at` and on of keys: `width` numbers of each of `here` rows, a vector of keys at a time. Beyond the last, the last again.
template <class Row> ALWAYS void bring_keys(float* keys, int64_t at, int64_t width, int64_t here, const Row& row_of) {
    for (int64_t i = 0; i < here; i += VW) {
        const S* row[VW];                              // found once: a division by the block's size takes longer than a vector's words
        for (int l = 0; l < VW; l++) row[l] = row_of(least(i + l, here - 1));
        for (int64_t w = 0; w < words(width); w += VW) {
            F v[VW];
            for (int l = 0; l < VW; l++) v[l] = words_of(row[l] + w * EACH, width - w * EACH);
            transpose(v);
            for (int64_t e = 0; e < VW && w + e < words(width); e++) st(keys + (at + w + e) * KEYS + i, v[e]);
        }
    }
}

// Values of `here` keys, those of two keys beside each other where a word has two. What lies after the last may be anything, and is not read.
template <class Row> ALWAYS void bring_values(float* values, int64_t wide, int64_t width, int64_t here, const Row& row_of) {
    for (int64_t t = 0; t < here; t += EACH) {
        const S *a = row_of(t), *b = PAIRS && t + 1 < here ? row_of(t + 1) : nullptr;
        float* to = values + t / EACH * wide;
        for (int64_t d = 0; d < wide; d += VW) {
            const int64_t left = width - d < 0 ? 0 : width - d;
            if constexpr (PAIRS) {
                S one[VW] = {}, other[VW] = {};
                if (left >= VW) { st(to + d, side_by_side(a + d, b ? b + d : nullptr)); continue; }
                memcpy(one, a + d, sizeof(S) * (size_t)left);
                if (b) memcpy(other, b + d, sizeof(S) * (size_t)left);
                st(to + d, side_by_side(one, other));
            } else st(to + d, left >= VW ? ld(a + d) : ld(a + d, (int)left));
        }
    }
}

void multiply(const Product& product, const void* kernel, char* narrowed, const S* x, int64_t x_row, int64_t rows, S* out, int64_t out_row) {
    Product p = product;
    p.m = rows; p.threads = 1; p.wide = p.wide_out = sizeof(S) == 4;
    p.x = x; p.x_row = x_row; p.out = out; p.out_row = out_row; p.room = narrowed;
    ((int (*)(const Product*))kernel)(&p);
}

// Rows of a unit in tiles of `each` (R or fewer: the others are the last again, and are not written) over all keys that they see.
template <int R>
void meet(const LatentCall& c, const Scratch& m, const LatentSizes& n, const Unit& u, int64_t each) {
    const int64_t count = u.queries * u.heads, tiles = (count + each - 1) / each, begin = c.begins[u.s], held = c.rank + c.rope;
    const int64_t before = c.lengths[u.s] - (c.begins[u.s + 1] - begin);
    const int64_t plain = u.low ? c.rank : c.nope, width = u.low ? c.rank : c.v_dim, key = words(plain) + words(c.rope);
    const int64_t wide = up_to(width, 2 * VW), made_row = c.nope + c.v_dim;
    const int32_t* table = c.tables + u.s * c.table_row;
    const float scale = (float)c.scale * BASE;
    auto row_at = [&](int64_t t, int64_t r) { return least(t * each + least(r, each - 1), count - 1); };
    auto at = [&](int64_t row) { return before + u.query + row / u.heads; };      // position of a row's query
    for (int64_t t = 0; t < tiles; t++)
        for (int64_t r = 0; r < R; r++) {
            const int64_t slot = t * R + r, row = row_at(t, r), token = begin + u.query + row / u.heads, head = u.head + row % u.heads;
            const S* q = c.q + token * c.q_row + head * (c.nope + c.rope);
            const S* first = u.low ? u.low + (row / u.heads * c.heads + head) * c.rank : q;
            float* to = m.q + slot * n.key;
            for (int64_t w = 0; w < words(plain); w += VW) st(to + w, words_of(first + w * EACH, plain - w * EACH), (int)least(VW, words(plain) - w));
            to += words(plain);
            for (int64_t w = 0; w < words(c.rope); w += VW) st(to + w, words_of(q + c.nope + w * EACH, c.rope - w * EACH), (int)least(VW, words(c.rope) - w));
            m.largest[slot] = -INF;
            st(m.sum + slot * VW, F{});
            memset(m.out + slot * wide, 0, sizeof(float) * (size_t)wide);
        }
    const int64_t end = at(count - 1) + 1;             // of keys that the last of these queries sees
    for (int64_t j = 0; j < end; j += KEYS) {
        const int64_t here = least(KEYS, end - j);
        auto held_at = [&](int64_t i) { return (const S*)c.pool + ((int64_t)table[(j + i) / c.size] * c.size + (j + i) % c.size) * held; };
        auto rotated_at = [&](int64_t i) { return held_at(i) + c.rank; };
        if (u.low) {
            bring_keys(m.keys, 0, c.rank, here, held_at);
            bring_values(m.values, wide, c.rank, here, held_at);
        } else {
            for (int64_t i = 0; i < here; i++) memcpy(m.latents + i * c.rank, held_at(i), sizeof(S) * (size_t)c.rank);
            multiply(c.keys[u.head], c.makes_keys, m.narrowed, m.latents, c.rank, here, m.made, made_row);
            multiply(c.values[u.head], c.makes_values, m.narrowed, m.latents, c.rank, here, m.made + c.nope, made_row);
            bring_keys(m.keys, 0, c.nope, here, [&](int64_t i) { return m.made + i * made_row; });
            bring_values(m.values, wide, c.v_dim, here, [&](int64_t i) { return m.made + i * made_row + c.nope; });
        }
        bring_keys(m.keys, words(plain), c.rope, here, rotated_at);
        const int64_t vectors = (here + VW - 1) / VW;
        for (int64_t t = 0; t < tiles; t++) {
            if (j > at(row_at(t, R - 1))) continue;    // all of these come after the tile's last query
            const bool all_seen = here % VW == 0 && j + here - 1 <= at(row_at(t, 0));
            for (int64_t i = 0; i < here; i += 2 * VW) tile<R, false>(m.q + t * R * n.key, n.key, m.keys + i, KEYS, key, m.p + i, KEYS);
            for (int64_t r = 0; r < R; r++) {
                const int64_t slot = t * R + r;
                float* p = m.p + r * KEYS;
                const int32_t last = (int32_t)at(row_at(t, r));
                F top = splat(-INF), x[KEYS / VW];
                for (int64_t i = 0; i < vectors; i++) {
                    x[i] = ld(p + i * VW) * scale;
                    if (!all_seen) x[i] = sel(lanes() + (int32_t)(j + i * VW) <= last, x[i], splat(-INF));
                    top = larger(top, x[i]);
                }
                float most = m.largest[slot];
                const float here_top = hmax(top);
                if (here_top > most || here_top != here_top) {     // of most spans none is larger
                    const float kept = most == -INF ? 0.0f : EXPONENTIAL(splat(most - here_top))[0];
                    m.largest[slot] = most = here_top;
                    st(m.sum + slot * VW, ld(m.sum + slot * VW) * kept);
                    for (int64_t d = 0; d < wide; d += VW) st(m.out + slot * wide + d, ld(m.out + slot * wide + d) * kept);
                }
                F added = F{};
                uint16_t* narrow = (uint16_t*)(m.narrow + r * KEYS);
                for (int64_t i = 0; i < vectors; i++) {
                    F e = most == -INF ? F{} : EXPONENTIAL(x[i] - most);
                    if (!all_seen) e = sel(x[i] == splat(-INF), F{}, e);
                    added = added + e;
                    if (PAIRS) narrowed(narrow + i * VW, e);
                    else st(m.narrow + r * KEYS + i * VW, e);
                }
                st(m.sum + slot * VW, ld(m.sum + slot * VW) + added);
            }
            for (int64_t d = 0; d < wide; d += 2 * VW)
                tile<R, true>(m.narrow, KEYS, m.values + d, wide, words(here), m.out + t * R * wide + d, wide);
        }
    }
    for (int64_t row = 0; row < count; row++) {
        const int64_t slot = row / each * R + row % each;
        const float by = 1.0f / hsum(ld(m.sum + slot * VW));
        S* to = u.to + (row / u.heads * c.heads + u.head + row % u.heads) * width;
        for (int64_t d = 0; d < width; d += VW) {
            const F v = ld(m.out + slot * wide + d) * by;
            if (width - d >= VW) st(to + d, v); else st(to + d, v, (int)(width - d));
        }
    }
}

void run(const LatentCall& c, const Scratch& m, const LatentSizes& n, const Unit& u) {
    const int64_t count = u.queries * u.heads, blocks = (count + HIGH - 1) / HIGH, each = (count + blocks - 1) / blocks;
    if (each <= 2) meet<2>(c, m, n, u, each);
    else if (each <= 4) meet<4>(c, m, n, u, each);
    else if (HIGH > 8 && each <= 8) meet<8>(c, m, n, u, each);
    else meet<HIGH>(c, m, n, u, each);
}

// What is kept of new tokens, to their places.
void put_new(const LatentCall& c, int64_t s) {
    const int64_t begin = c.begins[s], total = c.begins[s + 1] - begin, before = c.lengths[s] - total;
    for (int64_t i = 0; i < total; i++) {
        const int64_t position = before + i;
        S* to = c.pool + ((int64_t)c.tables[s * c.table_row + position / c.size] * c.size + position % c.size) * (c.rank + c.rope);
        memcpy(to, c.latent + (begin + i) * c.latent_row, sizeof(S) * (size_t)c.rank);
        memcpy(to + c.rank, c.rotated + (begin + i) * c.rotated_row, sizeof(S) * (size_t)c.rope);
    }
}

}  // namespace

// 1: there is no memory for what a thread takes; 2: `narrowed` has not room for as many rows. Nothing is written then but new tokens.
extern "C" int gnomon_kernel(const LatentCall* given) {
    const LatentCall& c = *given;
    static_assert(PIECE <= KEYS, "rows of a matmul");
    if (c.together < KEYS) return 2;
    int64_t most = c.heads > ROWS ? c.heads : ROWS, longest = 0, tokens = 0, work = 0;
    for (int64_t s = 0; s < c.sequences; s++) {
        const int64_t queries = c.begins[s + 1] - c.begins[s];
        put_new(c, s);
        if (queries <= c.most_absorbed) tokens += queries;
        else longest = queries > longest ? queries : longest;
        work += queries * c.heads * (c.lengths[s] * (c.nope + c.rope + c.v_dim) + c.rank * (c.nope + c.v_dim));
    }
    const int64_t threads = work >= 1 << 20 ? c.threads : 1;   // of less, waiting for another thread takes longer
    const LatentSizes n = sizes_of(c, most > longest ? most : longest);
    Scratch none;
    const int64_t bytes = divide(c, n, nullptr, none), piece = (int64_t)sizeof(S) * least(tokens, PIECE) * c.heads * c.rank;
    char* const room = (char*)aligned_alloc(PAGE, (size_t)up_to(threads * bytes + 2 * piece + 1, PAGE));
    if (!room) return 1;
    S *low = (S*)(room + threads * bytes), *mixed = (S*)(room + threads * bytes + piece);
    const int64_t parts = c.sequences < threads ? least(threads, c.heads) : 1;     // of the heads, so that each thread has some
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        Scratch m;
        divide(c, n, room + omp_get_thread_num() * bytes, m);
        for (int64_t s = 0, query = 0; s < c.sequences;) {     // absorbed: neighbouring tokens, whoever's they are, a piece at a time
            const int64_t queries = c.begins[s + 1] - c.begins[s];
            if (queries > c.most_absorbed || query >= queries) { s++; query = 0; continue; }
            const int64_t first = c.begins[s] + query;
            int64_t count = 0, last = s, done = query;         // done: queries of `last` that are in the piece or before it
            Unit units[PIECE];                                 // of a query or more each
            int64_t many = 0;
            for (; last < c.sequences && count < PIECE; last++, done = 0) {
                const int64_t all = c.begins[last + 1] - c.begins[last];
                if (all > c.most_absorbed) break;
                const int64_t here = least(all - done, PIECE - count), at_once = c.heads >= ROWS ? 1 : ROWS / c.heads;
                for (int64_t q = 0; q < here; q += at_once)
                    units[many++] = {last, 0, c.heads, done + q, least(at_once, here - q), low + (count + q) * c.heads * c.rank,
                                     mixed + (count + q) * c.heads * c.rank};
                count += here;
                done += here;
                if (done < all) break;
            }
#pragma omp for schedule(static)
            for (int64_t h = 0; h < c.heads; h++)
                multiply(c.absorb[h], c.absorbs, m.narrowed, c.q + first * c.q_row + h * (c.nope + c.rope), c.q_row, count, low + h * c.rank,
                         c.heads * c.rank);
#pragma omp for schedule(dynamic)
            for (int64_t i = 0; i < many * parts; i++) {
                Unit u = units[i / parts];
                const int64_t part = i % parts;
                u.head = part * c.heads / parts;
                u.heads = (part + 1) * c.heads / parts - u.head;
                if (u.heads) run(c, m, n, u);
            }
#pragma omp for schedule(static)
            for (int64_t h = 0; h < c.heads; h++)
                multiply(c.values[h], c.makes_values, m.narrowed, mixed + h * c.rank, c.heads * c.rank, count,
                         c.out + (first * c.heads + h) * c.v_dim, c.heads * c.v_dim);
            s = last;
            query = done;
        }
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < c.sequences * c.heads; i++) {
            const int64_t s = i / c.heads, h = i % c.heads, queries = c.begins[s + 1] - c.begins[s];
            if (queries <= c.most_absorbed) continue;
            run(c, m, n, Unit{s, h, 1, 0, queries, nullptr, c.out + c.begins[s] * c.heads * c.v_dim});
        }
    }
    free(room);
    return 0;
}
