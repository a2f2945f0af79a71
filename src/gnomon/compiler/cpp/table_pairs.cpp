// Products of chosen pairs of a sample's vectors that are rows of tables (gnomon/compiler/kernels/table_pairs.py). The rows of a
// sample are brought together in the first cache and multiplied there (pairs.h): what all samples read, (batch, vectors,
// depth), is never written. While a sample is multiplied, rows of one that comes later are asked for, a few beside each
// tile of products: they come from anywhere in tables that no cache holds, and a core waits for so many at once only.
#include "pairs.h"

namespace {

constexpr int MOST = 64, MOST_NUMBERS = 4;             // as in table_pairs.py
constexpr int64_t AHEAD = 2;                           // samples
constexpr int64_t LINE = 64, MOST_LINES = 8;           // bytes; lines of a row that are asked for

struct Vector {                                        // as `TablePairs.described` has them
    int64_t rows;                                      // of the table; 0: a row of floats that is there for each sample
    int64_t step;                                      // numbers from one row of it to the next
    int64_t from, first, by, narrow;                   // which tensor of indices, its first one, from sample to sample, int32
};

struct TableCall {                                     // as _TableCall in table_pairs.py has them
    Call pairs;                                        // but for x and y, which are in the first cache
    const Vector* vectors;
    const void* numbers[MOST_NUMBERS];
    const S* sources[MOST];
};

// The vector of a sample, null where its index is outside.
ALWAYS const S* vector_of(const TableCall& c, int64_t v, int64_t n) {
    const Vector& of = c.vectors[v];
    if (!of.rows) return c.sources[v] + n * of.step;
    const void* numbers = c.numbers[of.from];
    const int64_t place = of.first + n * of.by;
    const int64_t row = of.narrow ? ((const int32_t*)numbers)[place] : ((const int64_t*)numbers)[place];
    return (uint64_t)row < (uint64_t)of.rows ? c.sources[v] + row * of.step : nullptr;
}

ALWAYS void ask_for(const TableCall& c, int64_t v, int64_t end, int64_t n) {
    const int64_t bytes = c.pairs.depth * (int64_t)sizeof(S);
    for (; v < end; v++)
        if (const S* row = vector_of(c, v, n))
            for (int64_t b = 0; b < bytes && b < MOST_LINES * LINE; b += LINE) ask((const char*)row + b);
}

bool brought(const TableCall& c, int64_t n, S* to) {
    const int64_t bytes = c.pairs.depth * (int64_t)sizeof(S);
    for (int64_t v = 0; v < c.pairs.rows; v++, to += c.pairs.depth) {
        const S* row = vector_of(c, v, n);
        if (!row) return false;
        int64_t b = 0;
        for (; b + LINE <= bytes; b += LINE) memcpy((char*)to + b, (const char*)row + b, LINE);
        if (b < bytes) memcpy((char*)to + b, (const char*)row + b, (size_t)(bytes - b));
    }
    return true;
}

}  // namespace

// 1: an index is outside its table or the vectors, or there is no memory; what is written by then is no result
extern "C" int gnomon_kernel(const TableCall* given) {
    const int64_t wide = (given->pairs.columns + VW - 1) / VW * VW;
    Taken taken;
    int failed = places(given->pairs, taken, wide);
    if (!failed) {
#pragma omp parallel if (given->pairs.parallel) reduction(| : failed)
        {
            TableCall c = *given;
            const int64_t numbers = c.pairs.rows * c.pairs.depth;
            const int64_t own = (numbers * (int64_t)sizeof(S) + LINE - 1) / LINE * LINE;
            char* room = (char*)aligned_alloc(LINE, (size_t)(own + (floats(c.pairs, wide) * 4 + LINE - 1) / LINE * LINE));
            failed |= !room;
            if (room) memset(room + own, 0, (size_t)(floats(c.pairs, wide) * 4));
            // One sample as both sides, x by rows and y turned, for every n.
            c.pairs.x = c.pairs.y = (const S*)room;
            c.pairs.x_b = c.pairs.y_b = 0;
            c.pairs.x_r = c.pairs.y_c = c.pairs.depth;
            c.pairs.x_d = c.pairs.y_d = 1;
            const int64_t each = ROWS;                     // rows that are asked for beside a tile of as many
#pragma omp for schedule(static)
            for (int64_t n = 0; n < c.pairs.batch; n++) {
                if (failed) continue;
                if (!brought(c, n, (S*)room)) {
                    failed = 1;
                    continue;
                }
                const int64_t next = n + AHEAD < c.pairs.batch ? n + AHEAD : n;
                sample(c.pairs, n, taken, (float*)(room + own), wide, [&](int64_t tile) {
                    const int64_t end = (tile + 1) * each;
                    ask_for(c, tile * each, end < c.pairs.rows ? end : c.pairs.rows, next);
                });
            }
            free(room);
        }
    }
    free(taken.needed);
    return failed;
}
