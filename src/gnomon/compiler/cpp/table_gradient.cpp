// The gradient of a table of which rows were looked up (gnomon/compiler/kernels/table_gradient.py): zeros written past the caches,
// as a table is larger than what was looked up, and each looked up row's gradient added, in the order of the indices. Of
// bfloat16 each sum is rounded when it is made, as ATen does.
#include "vector.h"
#include "memory.h"

namespace {

struct Call {                                          // as _TableGradientCall in table_gradient.py has them
    int64_t rows, width, count, skipped, wide, parallel, zeroed;  // zeroed: out is 0 already, in pages that take memory once they are written to
    const void* index; int64_t index_step;             // int64 where wide, else int32
    const S* grad; int64_t grad_row;
    S* out;
};
constexpr int64_t PARTS = 16, AHEAD = 8;

ALWAYS int64_t row_of(const Call& c, int64_t k) {
    return c.wide ? ((const int64_t*)c.index)[k * c.index_step] : ((const int32_t*)c.index)[k * c.index_step];
}

void zeros(char* p, char* end) {
    const size_t left = (size_t)-(uintptr_t)p % sizeof(F), bytes = (size_t)(end - p), before = left < bytes ? left : bytes;
    memset(p, 0, before);
    for (p += before; p + sizeof(F) <= end; p += sizeof(F)) st_past((float*)p, F{});
    memset(p, 0, (size_t)(end - p));
    st_past_end();
}

// Rows from `from` to `to` of the table; an index outside it adds nothing, as in ATen.
void part(const Call& c, int64_t from, int64_t to) {
    if (!c.zeroed) zeros((char*)(c.out + from * c.width), (char*)(c.out + to * c.width));
    for (int64_t k = 0; k < c.count; k++) {
        if (k + AHEAD < c.count) {
            const int64_t next = row_of(c, k + AHEAD);
            if (next >= from && next < to)
                for (int64_t j = 0; j < c.width; j += 64 / sizeof(S)) __builtin_prefetch(c.out + next * c.width + j, 1);
        }
        const int64_t row = row_of(c, k);
        if (row < from || row >= to || row == c.skipped) continue;
        S* out = c.out + row * c.width;
        const S* grad = c.grad + k * c.grad_row;
        int64_t j = 0;
        for (; j + VW <= c.width; j += VW) st(out + j, ld(out + j) + ld(grad + j));
        const int n = (int)(c.width - j);
        if (n) st(out + j, ld(out + j, n) + ld(grad + j, n), n);
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
