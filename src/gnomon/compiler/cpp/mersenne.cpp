// Numbers of PyTorch's generator on CPUs (gnomon/compiler/kernels/mersenne.py): MT19937, whose block of 624 words is made from the
// one before. Blocks lie behind each other here, so that every word follows from three earlier ones at fixed distances, whole
// vectors are made at a time, and a number whose two words are of different blocks is no special case.
// Source: Matsumoto and Nishimura, Mersenne Twister (1998), with the constants of MT19937.
#include "vector.h"

namespace {

constexpr int BLOCK = 624, FAR = 397, BLOCKS = 6;      // words, distance of the third, blocks made at once: 17 KB
constexpr int HIGH_BITS = 21;                          // of a number of 53: the low ones of its first word
constexpr uint32_t HIGH = (1u << HIGH_BITS) - 1;
static_assert(BLOCK % VW == 0, "blocks are whole vectors");

struct Generator {                                     // as torch.Generator.get_state() gives it, up to the words
    uint64_t seed;
    int32_t left, seeded;                              // words left, and one more
    uint64_t next;                                     // the next word's place
    uint64_t words[BLOCK];
};

enum { MASK, FLOAT, BF16 };

struct Call {                                          // as _DrawCall in mersenne.py has them
    int64_t count, kind;                               // numbers, and what they become
    uint64_t below;                                    // a mask is true where a number of 53 bits is below
    int64_t bytes;                                     // of the state
    const uint8_t* before; uint8_t* after;             // states
    void* out;                                         // of that kind
};

ALWAYS U words(const uint32_t* p) { U v; memcpy(&v, p, sizeof v); return v; }
ALWAYS void keep(uint32_t* p, U v) { memcpy(p, &v, sizeof v); }

template <class T> ALWAYS T tempered(T y) {
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680u;
    y ^= (y << 15) & 0xefc60000u;
    return y ^ (y >> 18);
}

// the block behind x
void advance(uint32_t* x) {
    _Pragma("GCC unroll 3") for (int k = 0; k < BLOCK; k += VW) {
        const U here = words(x + k), next = words(x + k + 1), far = words(x + k + FAR);
        const U mixed = (here & 0x80000000u) | (next & 0x7fffffffu);
        keep(x + BLOCK + k, far ^ (mixed >> 1) ^ (-(next & 1u) & 0x9908b0dfu));
    }
}

ALWAYS U every_second(U a, U b) {
#ifdef __clang__
    U r; for (int i = 0; i < VW; i++) r[i] = i < VW / 2 ? a[2 * i] : b[2 * i - VW]; return r;
#else
    return __builtin_shuffle(a, b, lanes() * 2);
#endif
}

// Of numbers from x on: 1 where one is below, 0 where not. A number's first word decides but for one in two million, so only
// first words are tempered, and ties looked at again.
ALWAYS U decided(const uint32_t* x, uint32_t high, B& ties) {
    const U first = tempered(every_second(words(x), words(x + VW))) & HIGH;
    ties |= (B)(first == high);
    return (first - high) >> 31;
}

void mask(const uint32_t* x, int64_t count, uint64_t below, uint8_t* out) {
    const uint32_t high = (uint32_t)(below >> 32), low = (uint32_t)below;
    B ties = {};
    int64_t j = 0;
#ifdef PACKS
    for (; j + 4 * VW <= count; j += 4 * VW) {
        I part[4];
        for (int v = 0; v < 4; v++) part[v] = (I)decided(x + 2 * (j + v * VW), high, ties);
        const auto bytes = packed(part[0], part[1], part[2], part[3]);
        memcpy(out + j, &bytes, sizeof bytes);
    }
#endif
    for (; j + VW <= count; j += VW) {
        const auto bytes = low8((B)decided(x + 2 * j, high, ties));
        memcpy(out + j, &bytes, sizeof bytes);
    }
    const int64_t tail = j;
    for (j = any(ties) ? 0 : tail; j < count; j++) {
        const uint32_t first = tempered(x[2 * j]) & HIGH;
        out[j] = first < high || (first == high && tempered(x[2 * j + 1]) < low);
    }
}

// of 24 bits; what is 1 after rounding to bfloat16 is 0
ALWAYS F fraction(U word, float) { return __builtin_convertvector((B)(tempered(word) & 0xffffffu), F) * 0x1p-24f; }
ALWAYS F fraction(U word, bf16) {
    const F v = fraction(word, 0.0f);
    return (F)((B)v & (B)(v < 1.0f - 0x1p-9f));
}

template <class T> void fractions(const uint32_t* x, int64_t count, T* out) {
    int64_t j = 0;
    for (; j + VW <= count; j += VW) st(out + j, fraction(words(x + j), T()));
    if (j < count) st(out + j, fraction(words(x + j), T()), (int)(count - j));
}

void write(const Call& c, const uint32_t* x, int64_t done, int64_t count) {
    if (c.kind == MASK) mask(x, count, c.below, (uint8_t*)c.out + done);
    else if (c.kind == FLOAT) fractions(x, count, (float*)c.out + done);
    else fractions(x, count, (bf16*)c.out + done);
}

}  // namespace

// 1: a state that ATen does not leave, and nothing is written
extern "C" int gnomon_kernel(const Call* given) {
    const Call& c = *given;
    Generator at;
    if (c.bytes < (int64_t)sizeof at) return 1;
    memcpy(&at, c.before, sizeof at);
    const bool fresh = at.left == 1 && at.next == 0;   // seeded, and the first block not yet made
    if (!fresh && (at.left < 1 || at.left > BLOCK || at.next != (uint64_t)(BLOCK + 1 - at.left))) return 1;
    alignas(64) uint32_t x[BLOCK * (BLOCKS + 1) + 2 * VW] = {};
    for (int i = 0; i < BLOCK; i++) x[i] = (uint32_t)at.words[i];
    const int64_t each = c.kind == MASK ? 2 : 1;               // words of a number
    int64_t place = fresh ? BLOCK : (int64_t)at.next;
    int64_t missing = each * c.count - (BLOCK - place);
    missing = missing > 0 ? (missing + BLOCK - 1) / BLOCK : 0;
    int64_t last = 0;                                  // where the last block lies
    for (int64_t done = 0; done < c.count;) {
        const int64_t made = missing < BLOCKS ? missing : BLOCKS;
        for (int64_t b = 0; b < made; b++) advance(x + last + b * BLOCK);
        missing -= made;
        last += made * BLOCK;
        int64_t count = (last + BLOCK - place) / each;
        count = count < c.count - done ? count : c.count - done;
        write(c, x + place, done, count);
        done += count;
        place += each * count;
        if (done < c.count) {
            memcpy(x, x + last, BLOCK * sizeof *x);
            place -= last;
            last = 0;
        }
    }
    memcpy(c.after, c.before, (size_t)c.bytes);
    if (!c.count) return 0;
    for (int i = 0; i < BLOCK; i++) at.words[i] = x[last + i];
    at.next = (uint64_t)(place - last);
    at.left = (int32_t)(BLOCK + 1 - at.next);
    memcpy(c.after, &at, sizeof at);
    return 0;
}
