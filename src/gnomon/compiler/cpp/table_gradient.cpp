// The gradient of a table of which rows were looked up (gnomon/compiler/table_gradient.py): zeros written past the caches,
// as a table is larger than what was looked up, and each looked up row's gradient added, in the order of the indices.
#include "vector.h"

namespace {

struct Call {                                          // as _Call in table_gradient.py has them
    int64_t rows, width, count, skipped, wide, parallel;
    const void* index; int64_t index_step;             // int64 where wide, else int32
    const float* grad; int64_t grad_row;
    float* out;
};
constexpr int64_t PARTS = 16, AHEAD = 8;

ALWAYS int64_t row_of(const Call& c, int64_t k) {
    return c.wide ? ((const int64_t*)c.index)[k * c.index_step] : ((const int32_t*)c.index)[k * c.index_step];
}

void zeros(float* p, float* end) {
    for (; p < end && (uintptr_t)p % sizeof(F); p++) *p = 0.0f;
    for (; p + VW <= end; p += VW) st_past(p, F{});
    for (; p < end; p++) *p = 0.0f;
    st_past_end();
}

// Rows from `from` to `to` of the table; an index outside it adds nothing, as in ATen.
void part(const Call& c, int64_t from, int64_t to) {
    zeros(c.out + from * c.width, c.out + to * c.width);
    for (int64_t k = 0; k < c.count; k++) {
        if (k + AHEAD < c.count) {
            const int64_t next = row_of(c, k + AHEAD);
            if (next >= from && next < to)
                for (int64_t j = 0; j < c.width; j += 16) __builtin_prefetch(c.out + next * c.width + j, 1);
        }
        const int64_t row = row_of(c, k);
        if (row < from || row >= to || row == c.skipped) continue;
        float* out = c.out + row * c.width;
        const float* grad = c.grad + k * c.grad_row;
        int64_t j = 0;
        for (; j + VW <= c.width; j += VW) st(out + j, ld(out + j) + ld(grad + j));
        for (; j < c.width; j++) out[j] += grad[j];
    }
}

}  // namespace

extern "C" int gnomon_kernel(const Call* given) {
    const Call& c = *given;
    const int64_t parts = c.parallel ? PARTS : 1;
#pragma omp parallel for schedule(static) if (c.parallel)
    for (int64_t n = 0; n < parts; n++) part(c, c.rows * n / parts, c.rows * (n + 1) / parts);
    return 0;
}
