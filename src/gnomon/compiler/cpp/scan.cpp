// A linear recurrence over time, h[t] = a[t] * h[t-1] + b[t], of (steps, batch, width, n) numbers (gnomon/compiler/kernels/scan.py).
// a is a product of factors, or its exponential, and b is one; a factor is the same along the dims that it lacks, and nothing
// is written of either. With DOT what comes out is the sum over n of h times a weight, and no h is written.
// The text before this one says RATES, DRIVES, EXP, DOT, BACKWARD, and for each factor whether it varies along n and time.
#include "vector.h"
#include "math.h"

namespace {

constexpr int ALL = RATES + DRIVES + DOT;

struct Factor { const float* p; int64_t t, b, d; };    // numbers from one step, row of the batch, column to the next; n is 1
struct Gradient { float* p; int64_t t, b, d, chunk; }; // chunk: from one chunk's part of a sum to the next, or 0
struct Call {                                          // as _ScanCall in scan.py has them
    int64_t steps, batch, width, n, chunks, parallel;
    Factor of[9];                                      // rates, drives, the weight
    Gradient out, grad[9];                             // out: what is made; in the backward its gradient, which is read
};

ALWAYS F load(const float* p, int m) { return m == VW ? ld(p) : ld(p, m); }
ALWAYS void store(float* p, F v, int m) { if (m == VW) st(p, v); else st(p, v, m); }

// The sum of lanes, in a fixed order.
ALWAYS float total(F v) {
    UNROLLED for (int w = VW / 2; w; w /= 2) v = v + __builtin_shuffle(v, lanes() ^ w);
    return v[0];
}

// Product of factors FROM .. FROM + COUNT at one step, without one of them.
template <int FROM, int COUNT>
ALWAYS F product(const Call& c, const float* const* at, int64_t t, int m, int without) {
    F v = splat(1.0f);
    float s = 1.0f;
    UNROLLED for (int i = FROM; i < FROM + COUNT; i++) {
        if (i == without) continue;
        const float* p = at[i] + (TIMED[i] ? t * c.of[i].t : 0);
        if (VARIES[i]) v = v * load(p, m);
        else s = s * *p;
    }
    return v * s;
}

ALWAYS F rate(const Call& c, const float* const* at, int64_t t, int m) {
    const F p = product<0, RATES>(c, at, t, m, -1);
    return EXP ? vexp(p) : p;
}

ALWAYS void places(const Call& c, const float** at, int64_t b, int64_t d, int64_t n) {
    UNROLLED for (int i = 0; i < ALL; i++) at[i] = c.of[i].p + b * c.of[i].b + d * c.of[i].d + (VARIES[i] ? n : 0);
}

void forward(const Call& c, int64_t b, int64_t d, int64_t n, int m) {
    const float* at[ALL];
    places(c, at, b, d, n);
    float* y = c.out.p + b * c.out.b + d * c.out.d + (DOT ? 0 : n);
    F h = {};
    for (int64_t t = 0; t < c.steps; t++) {
        const F drive = product<RATES, DRIVES>(c, at, t, m, -1);
        // The first state is b[0]: no state is before it, and 0 times an infinite rate would be NaN.
        h = t ? rate(c, at, t, m) * h + drive : drive;
        if (DOT) {
            const float part = total(sel(first(m), h * product<RATES + DRIVES, DOT>(c, at, t, m, -1), splat(0.0f)));
            y[t * c.out.t] = n ? y[t * c.out.t] + part : part;
        } else {
            store(y + t * c.out.t, h, m);
        }
    }
}

#if BACKWARD
// What a factor's gradient gets at one step: `keep` holds what a factor without time has so far.
ALWAYS void add(const Call& c, float* const* to, F* keep, int i, int64_t t, F v, int m) {
    if (VARIES[i] && TIMED[i]) {
        float* p = to[i] + t * c.grad[i].t;
        store(p, load(p, m) + v, m);
    } else if (TIMED[i]) {
        to[i][t * c.grad[i].t] += total(sel(first(m), v, splat(0.0f)));
    } else {
        keep[i] = keep[i] + v;
    }
}

// One row and vector of n: states again from the first step on, then gradients from the last. a, h: room for all steps.
void backward(const Call& c, int64_t b, int64_t d, int64_t n, int m, int64_t chunk, float* a, float* h) {
    const float* at[ALL];
    float* to[ALL];
    F keep[ALL] = {};
    places(c, at, b, d, n);
    UNROLLED for (int i = 0; i < ALL; i++) {
        const Gradient& g = c.grad[i];
        to[i] = g.p + b * g.b + d * g.d + chunk * g.chunk + (VARIES[i] ? n : 0);
    }
    F state = {};
    for (int64_t t = 0; t < c.steps; t++) {
        const F now = rate(c, at, t, m);
        const F drive = product<RATES, DRIVES>(c, at, t, m, -1);
        state = t ? now * state + drive : drive;
        st(a + t * VW, now);
        st(h + t * VW, state);
    }
    const float* dy = c.out.p + b * c.out.b + d * c.out.d + (DOT ? 0 : n);
    F later = {};                                      // of the next step's state, times its rate
    for (int64_t t = c.steps - 1; t >= 0; t--) {
        F seed;
        if (DOT) {
            const F here = splat(dy[t * c.out.t]);
            seed = here * product<RATES + DRIVES, DOT>(c, at, t, m, -1);
            add(c, to, keep, RATES + DRIVES, t, here * ld(h + t * VW), m);
        } else {
            seed = load(dy + t * c.out.t, m);
        }
        const F dh = seed + later, now = ld(a + t * VW);
        UNROLLED for (int i = RATES; i < RATES + DRIVES; i++)
            add(c, to, keep, i, t, dh * product<RATES, DRIVES>(c, at, t, m, i), m);
        F of_rate = t ? dh * ld(h + (t - 1) * VW) : F{};
        if (EXP) of_rate = of_rate * now;
        UNROLLED for (int i = 0; i < RATES; i++) add(c, to, keep, i, t, of_rate * product<0, RATES>(c, at, t, m, i), m);
        later = dh * now;
    }
    UNROLLED for (int i = 0; i < ALL; i++) {
        if (TIMED[i]) continue;
        if (VARIES[i]) store(to[i], load(to[i], m) + keep[i], m);
        else *to[i] += total(sel(first(m), keep[i], splat(0.0f)));
    }
}
#endif

}  // namespace

extern "C" int gnomon_kernel(const Call* given) {
    const Call& c = *given;
    const int64_t rows = c.batch * c.width;
    int failed = 0;
#pragma omp parallel for schedule(static) if (c.parallel) reduction(| : failed)
    for (int64_t chunk = 0; chunk < c.chunks; chunk++) {
#if BACKWARD
        float* room = (float*)malloc((size_t)(2 * c.steps * VW) * sizeof(float));
        if (!room) { failed = 1; continue; }
#endif
        for (int64_t row = rows * chunk / c.chunks; row < rows * (chunk + 1) / c.chunks; row++)
            for (int64_t n = 0; n < c.n; n += VW) {
                const int m = c.n - n < VW ? (int)(c.n - n) : VW;
#if BACKWARD
                backward(c, row / c.width, row % c.width, n, m, chunk, room, room + c.steps * VW);
#else
                forward(c, row / c.width, row % c.width, n, m);
#endif
            }
#if BACKWARD
        free(room);
#endif
    }
    return failed;
}
