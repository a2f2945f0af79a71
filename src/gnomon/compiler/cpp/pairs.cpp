// Products of chosen pairs of vectors of samples that lie in memory (gnomon/compiler/kernels/pairs.py).
#include "pairs.h"

// 1: an index is outside, or there is no memory, and nothing is written
extern "C" int gnomon_kernel(const Call* given) {
    const Call& c = *given;
    const int64_t wide = (c.columns + VW - 1) / VW * VW;
    Taken taken;
    int failed = places(c, taken, wide);
    if (!failed) {
#pragma omp parallel if (c.parallel) reduction(| : failed)
        {
            float* room = (float*)calloc((size_t)floats(c, wide), sizeof(float));
            failed |= !room;
#pragma omp for schedule(static)
            for (int64_t n = 0; n < c.batch; n++)
                if (room) sample(c, n, taken, room, wide, [](int64_t) {});
            free(room);
        }
    }
    free(taken.needed);
    return failed;
}
