// What both directions of time of a recurrent layer share (recurrent.cpp, recurrent_backward.cpp): memory type S, rows of a
// tile, and how threads wait for each other between steps.
#pragma once
#include "memory.h"                                    // S: of weights, inputs and outputs; sums and states are floats

extern "C" int sched_yield(void) noexcept;
extern "C" int omp_get_thread_num(void) noexcept;
extern "C" int omp_get_num_threads(void) noexcept;

namespace {

constexpr int ROWS = VW == 16 ? 6 : VW == 8 ? 3 : 2;  // of a tile: accumulators, weights and one state fit the registers
constexpr int MOST_THREADS = 64, SPINS = 4000;

struct alignas(64) Progress { int64_t step; };

template <class T> ALWAYS F load(const T* p, int n) { return n == VW ? ld(p) : ld(p, n); }
template <class T> ALWAYS void store(T* p, F v, int n) { if (n == VW) st(p, v); else st(p, v, n); }
ALWAYS int within(int64_t left) { return left < VW ? (int)left : VW; }

ALWAYS void wait(const Progress* all, int threads, int64_t step) {
    for (int other = 0; other < threads; other++)
        for (int spins = 0; __atomic_load_n(&all[other].step, __ATOMIC_ACQUIRE) < step; spins++)
            if (spins > SPINS) sched_yield();          // its core may be somebody else's just now
}

}  // namespace
