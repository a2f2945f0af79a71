// Digests of several pieces of memory as one (gnomon/compiler/kernels/convolutions.py), a part of each by every thread.
#include "vector.h"
#include "digest.h"

constexpr int64_t PARTS = 16, ALONE = 1 << 20;         // ALONE: bytes below which one thread is faster

// pieces: address, bytes of each
extern "C" int gnomon_kernel(const int64_t* pieces, int64_t count, int64_t* result, int64_t parallel) {
    uint64_t all = (uint64_t)count;
    for (int64_t n = 0; n < count; n++) {
        const char* from = (const char*)pieces[2 * n];
        const int64_t bytes = pieces[2 * n + 1];
        uint64_t each[PARTS];
        const int64_t parts = bytes < ALONE ? 1 : PARTS;
#pragma omp parallel for schedule(static) if (parallel && parts > 1)
        for (int64_t part = 0; part < parts; part++) {
            const int64_t a = bytes / parts * part, b = part == parts - 1 ? bytes : bytes / parts * (part + 1);
            each[part] = digest(from + a, b - a);
        }
        for (int64_t part = 0; part < parts; part++) all = ((all ^ each[part]) * 0x9E3779B97F4A7C15u) ^ (all >> 29);
    }
    memcpy(result, &all, sizeof all);
    return 0;
}
