// A run of a graph's steps as one call (gnomon/compiler/steps.py): kernels of ours and ATen's operations, one after another,
// on buffers that lie in one arena. What is called and with what stands in a table of 64-bit words that Python made once.
// PyTorch is reached by its C interface (torch/csrc/inductor/aoti_torch/c/shim.h, torch/csrc/stable/c/shim.h), Python by its
// limited one, both through addresses: nothing of them is included or linked.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <utility>
#ifdef __linux__
#include <sys/mman.h>
#endif

namespace {

using Word = int64_t;
using Handle = void*;                                  // AtenTensorHandle

// In the order of FUNCTIONS in steps.py. Those of PyTorch return 0 where they succeed.
struct Functions {
    int (*empty_strided)(Word, const Word*, const Word*, int32_t, int32_t, int32_t, Handle*);
    int (*from_blob)(void*, Word, const Word*, const Word*, Word, int32_t, int32_t, int32_t, Handle*);
    int (*new_handle)(Handle, Handle*);
    int (*drop)(Handle);
    int (*data)(Handle, void**);
    int (*strides)(Handle, const Word**);
    int (*copy)(Handle, Handle, int32_t);
    int (*dispatch)(const char*, const char*, uint64_t*, uint64_t);
    int (*new_list)(size_t, void**);
    int (*push)(void*, uint64_t);
    int (*new_value)(uint64_t**);
    int (*new_string)(const char*, size_t, void**);
    void* (*data_of_object)(void*);
    void* (*list_get)(void*, Word);
    void* (*list_new)(Word);
    int (*list_set)(void*, Word, void*);
    void* (*capsule)(void*, const char*, void*);
    void* (*save_thread)();
    void (*restore_thread)(void*);
    void (*keep)(void*);
    int (*signals)();
};

// Where a tensor of the run lies, and how: `buffer` and bytes from its start.
struct Tensor { Word buffer, offset, dtype, dims; const Word *sizes, *strides; };

struct Table {                                         // as _Table in steps.py has it
    const Functions* torch;
    Word buffers, inputs, tensors, arena, results;     // arena: bytes
    const Tensor* tensor;
    const Word* result;                                // tensors that are returned
    const Word* made;                                  // whether each of them is made before the first step, for kernels
    const Word* step;                                  // words of all steps
    Word words;
    void* none;                                        // Python's None
    const Table* const* child;                         // of bodies of loops and branches, whose inputs are set from outside
    Word children;
};

// Buffers are the arena, inputs, then what ATen or the run's caller owns.
struct Room {                                          // what one call at a time uses
    void** at;                                         // of each buffer its address
    Handle* handle;                                    // of each tensor, where there is one
    void** seen;                                       // the address that this handle is of
    bool* owned;                                       // whether it goes with this call
    char* arena;
    Room** child;
};

enum { KERNEL, STRUCT, ATEN, LEAVE, PRODUCT, LOOP, BRANCH };
enum { RAN, REFUSED, INTERRUPTED };
enum { RAW, TENSOR, SOME, LIST, TEXT };
constexpr int MOST_POINTERS = 64, MOST_ARGUMENTS = 64;
constexpr size_t LARGE = 2 << 20, LARGEST_STRUCT = 1024;

template <size_t... I>
int spread(void* function, const void* first, void** p, std::index_sequence<I...>) {
    return ((int (*)(const void*, decltype((void)I, (void*)0)...))function)(first, p[I]...);
}

template <size_t N>
int call(size_t n, void* function, const void* first, void** p) {
    if constexpr (N < MOST_POINTERS)
        if (n > N) return call<N + 1>(n, function, first, p);
    return spread(function, first, p, std::make_index_sequence<N>{});
}

// Elements of `item` bytes from one layout into another; strides in bytes.
void moved(const char* from, char* to, Word item, Word dims, const Word* sizes, const Word* steps, const Word* into) {
    if (!dims) {
        memcpy(to, from, (size_t)item);
        return;
    }
    for (Word i = 0; i < *sizes; i++) moved(from + i * *steps, to + i * *into, item, dims - 1, sizes + 1, steps + 1, into + 1);
}

struct Run {
    const Table& t;
    const Functions& f;
    Room& r;
    void** thread;                                     // Python's state of this thread, which others may have meanwhile

    // The handle of a tensor: one that ATen made, or one on memory of ours, which stays while its address does.
    Handle handle(Word n) {
        const Tensor& one = t.tensor[n];
        char* at = (char*)r.at[one.buffer] + one.offset;
        if (r.handle[n] && (r.owned[n] || r.seen[n] == at)) return r.handle[n];
        if (r.handle[n]) f.drop(r.handle[n]);
        r.handle[n] = nullptr;
        if (f.from_blob(at, one.dims, one.sizes, one.strides, 0, (int32_t)one.dtype, 0, -1, &r.handle[n])) r.handle[n] = nullptr;
        r.seen[n] = at;
        return r.handle[n];
    }

    int make(Word n) {
        const Tensor& one = t.tensor[n];
        Handle made;
        if (f.empty_strided(one.dims, one.sizes, one.strides, (int32_t)one.dtype, 0, -1, &made)) return 1;
        return own(n, made);
    }

    int own(Word n, Handle made) {
        if (r.handle[n]) f.drop(r.handle[n]);
        r.handle[n] = made;
        r.owned[n] = true;
        return f.data(made, &r.at[t.tensor[n].buffer]);
    }

    // What ATen made, in the layout that others are told of.
    int declared(Word n, Handle made) {
        const Tensor& one = t.tensor[n];
        const Word* have;
        if (f.strides(made, &have)) return 1;
        bool same = true;
        for (Word d = 0; d < one.dims; d++) same = same && (one.sizes[d] <= 1 || have[d] == one.strides[d]);
        void* at;
        if (f.data(made, &at)) return 1;
        const bool ours = (char*)at >= r.arena && (char*)at < r.arena + t.arena;   // it gave its argument
        if (same && !ours) return own(n, made);
        const int wrong = make(n) || f.copy(r.handle[n], made, 0);
        f.drop(made);
        return wrong;
    }

    // One argument of ATen's, which takes what it is given.
    int argument(const Word*& w, uint64_t* to) {
        const Word kind = *w++;
        if (kind == RAW) {
            *to = (uint64_t)*w++;
            return 0;
        }
        if (kind == TENSOR) {
            Handle of = handle(*w++), made;
            if (!of || f.new_handle(of, &made)) return 1;
            *to = (uint64_t)made;
            return 0;
        }
        if (kind == SOME) {
            uint64_t inner, *held;
            if (argument(w, &inner) || f.new_value(&held)) return 1;
            *held = inner;
            *to = (uint64_t)held;
            return 0;
        }
        if (kind == TEXT) {
            void* made;
            const char* text = (const char*)*w++;
            const size_t length = (size_t)*w++;
            if (f.new_string(text, length, &made)) return 1;
            *to = (uint64_t)made;
            return 0;
        }
        const Word count = *w++;
        void* list;
        if (f.new_list((size_t)count, &list)) return 1;
        for (Word i = 0; i < count; i++) {
            uint64_t one;
            if (argument(w, &one) || f.push(list, one)) return 1;
        }
        *to = (uint64_t)list;
        return 0;
    }

    int step(const Word*& w) {
        const Word kind = *w++;
        if (kind == ATEN) {
            const char *name = (const char*)w[0], *overload = (const char*)w[1];
            const Word given = w[2], made = w[3];
            const uint64_t version = (uint64_t)w[4];
            w += 5;
            uint64_t stack[MOST_ARGUMENTS];
            for (Word i = 0; i < given; i++)
                if (argument(w, stack + i)) return 1;
            if (f.dispatch(name, overload, stack, version)) return 1;
            int wrong = 0;
            for (Word i = 0; i < made; i++, w++) {
                if (*w < 0) f.drop((Handle)stack[i]);              // nobody reads it
                else wrong |= declared(*w, (Handle)stack[i]);
            }
            return wrong;
        }
        if (kind == LEAVE) {                                       // what ATen made and nobody reads any more
            const Word gone = *w++;
            for (Word i = 0; i < gone; i++) leave(*w++);
            return 0;
        }
        if (kind == LOOP) return loop(w);
        if (kind == BRANCH) return branch(w);
        void *function = (void*)*w++, *p[MOST_POINTERS];
        if (kind == PRODUCT) {                                     // out, then two or three tensors, the latter scaled
            Handle h[4];
            const Word count = w[0];
            double scale[2];
            memcpy(scale, w + 1, sizeof scale);
            w += 3;
            for (Word i = 0; i < count; i++)
                if (!(h[i] = handle(*w++))) return 1;
            if (count == 3) return ((int (*)(Handle, Handle, Handle))function)(h[0], h[1], h[2]) != 0;
            const auto scaled = (int (*)(Handle, Handle, Handle, Handle, double, double))function;
            return scaled(h[0], h[1], h[2], h[3], scale[0], scale[1]) != 0;
        }
        const char* first = (const char*)*w++;
        if (kind == KERNEL) {
            const Word count = *w++;
            for (Word i = 0; i < count; i++, w += 2) p[i] = (char*)r.at[w[0]] + w[1];
            return call<0>((size_t)count, function, first, p) != 0;
        }
        alignas(16) char filled[LARGEST_STRUCT];
        const Word bytes = *w++, mode = *w++, count = *w++;
        memcpy(filled, first, (size_t)bytes);
        for (Word i = 0; i < count; i++, w += 3) {
            const char* at = (const char*)r.at[w[0]] + w[1];
            memcpy(filled + w[2], &at, sizeof at);
        }
        return (mode < 0 ? ((int (*)(void*))function)(filled) : ((int (*)(void*, Word))function)(filled, mode)) != 0;
    }

    // Sections of a loop or branch: how many, and how many words they take.
    static const Word* after(const Word* w) { return w + 2 + w[1]; }

    // Where a body's inputs lie in step i: (its buffer, ours, bytes, bytes a step).
    void bind(const Word* w, Room& body, Word i) {
        for (Word n = *w, k = 0; k < n; k++) {
            const Word* b = w + 2 + 4 * k;
            body.at[b[0]] = (char*)r.at[b[1]] + b[2] + i * b[3];
        }
    }

    // Copies in step i, from memory of ours or a body's: (whose, buffer, bytes, bytes a step), ours (buffer, bytes, bytes a
    // step), bytes of an element, dims, sizes, strides there and here.
    void copies(const Word* section, Room* body, Word i) {
        const Word* w = section + 2;
        for (Word n = *section, k = 0; k < n; k++) {
            const char* from = (const char*)(w[0] ? body : &r)->at[w[1]] + w[2] + i * w[3];
            const Word dims = w[8];
            moved(from, (char*)r.at[w[4]] + w[5] + i * w[6], w[7], dims, w + 9, w + 9 + dims, w + 9 + 2 * dims);
            w += 9 + 3 * dims;
        }
    }

    int body(Word n) {
        Run inner{*t.child[n], f, *r.child[n], thread};
        return inner.all();
    }

    void over(Word n) {
        Run inner{*t.child[n], f, *r.child[n], thread};
        for (Word i = 0; i < inner.t.tensors; i++) inner.leave(i);
    }

    // Each step: the condition where there is one, the body, and what it gives to where the next step reads it.
    int loop(const Word*& w) {
        const Word step = w[0], condition = w[1], count = w[2], buffer = w[3], offset = w[4];
        const Word *before = w + 5, *asked = after(before), *given = after(asked), *in = after(given), *out = after(in), *end = after(out);
        w = after(end);
        copies(before, nullptr, 0);
        for (Word i = 0; count < 0 || i < count; i++) {
            if (condition >= 0) {
                bind(asked, *r.child[condition], i);
                const int wrong = body(condition);
                const bool goes_on = !wrong && *((const char*)r.child[condition]->at[buffer] + offset);
                over(condition);
                if (wrong) return wrong;
                if (!goes_on) break;
            }
            bind(given, *r.child[step], i);
            copies(in, nullptr, i);
            const int wrong = body(step);
            if (!wrong) copies(out, r.child[step], i);
            over(step);
            if (wrong) return wrong;
            if (i % 4096 == 4095) {                    // somebody may want to end it
                f.restore_thread(*thread);
                const int raised = f.signals();
                *thread = f.save_thread();
                if (raised) return INTERRUPTED;
            }
        }
        copies(end, nullptr, 0);
        return RAN;
    }

    int branch(const Word*& w) {
        const bool holds = *((const char*)r.at[w[0]] + w[1]);
        const Word n = w[holds ? 2 : 3];
        const Word *first = w + 4, *second = after(after(after(first))), *chosen = holds ? first : second;
        w = after(after(after(second)));
        copies(chosen, nullptr, 0);
        bind(after(chosen), *r.child[n], 0);
        const int wrong = body(n);
        if (!wrong) copies(after(after(chosen)), r.child[n], 0);
        over(n);
        return wrong;
    }

    void leave(Word n) {
        if (!r.owned[n]) return;
        f.drop(r.handle[n]);
        r.handle[n] = nullptr;
        r.owned[n] = false;
    }

    int all() {
        for (Word i = 0; i < t.results; i++)
            if (t.made[i] && make(t.result[i])) return 1;
        for (const Word *w = t.step, *end = t.step + t.words; w < end;)
            if (const int wrong = step(w)) return wrong;
        return RAN;
    }
};

Room* room_of(const Table& t) {
    Room* r = (Room*)calloc(1, sizeof(Room));
    const size_t buffers = (size_t)t.buffers, tensors = (size_t)t.tensors;
    r->at = (void**)calloc(buffers + 1, sizeof(void*));
    r->handle = (Handle*)calloc(tensors + 1, sizeof(Handle));
    r->seen = (void**)calloc(tensors + 1, sizeof(void*));
    r->owned = (bool*)calloc(tensors + 1, 1);
    size_t bytes = ((size_t)t.arena + 63) / 64 * 64;
#ifdef __linux__
    if (bytes >= LARGE) {                              // new pages cost more than what is written to them
        bytes = (bytes + LARGE - 1) / LARGE * LARGE;
        r->arena = (char*)aligned_alloc(LARGE, bytes);
        if (r->arena) madvise(r->arena, bytes, MADV_HUGEPAGE);
    } else
#endif
        r->arena = (char*)aligned_alloc(64, bytes ? bytes : 64);
    r->at[0] = r->arena;
    r->child = (Room**)calloc((size_t)t.children + 1, sizeof(Room*));
    for (Word i = 0; i < t.children; i++) r->child[i] = room_of(*t.child[i]);
    return r;
}

void forget(const Table& t, Room* r) {
    for (Word i = 0; i < t.tensors; i++)
        if (r->handle[i]) t.torch->drop(r->handle[i]);
    for (Word i = 0; i < t.children; i++) forget(*t.child[i], r->child[i]);
    free(r->child);
    free(r->at);
    free(r->handle);
    free(r->seen);
    free(r->owned);
    free(r->arena);
    free(r);
}

bool whole(const Table& t, const Room* r) {
    bool all = r->arena != nullptr;
    for (Word i = 0; i < t.children; i++) all = all && whole(*t.child[i], r->child[i]);
    return all;
}

// A list of capsules of the results, or None where a step did not run: nothing was written but the arena.
void* run(const Table& t, Room* r, void* inputs) {
    const Functions& f = *t.torch;
    if (!whole(t, r)) return f.keep(t.none), t.none;
    for (Word i = 0; i < t.inputs; i++) r->at[1 + i] = f.data_of_object(f.list_get(inputs, i));
    void* thread = f.save_thread();
    Run one{t, f, *r, &thread};
    const int wrong = one.all();
    f.restore_thread(thread);
    void* out = wrong ? nullptr : f.list_new(t.results);
    for (Word i = 0; out && i < t.results; i++) {
        const Word n = t.result[i];
        f.list_set(out, i, f.capsule(r->handle[n], nullptr, nullptr));
        r->handle[n] = nullptr;
        r->owned[n] = false;
    }
    for (Word i = 0; i < t.tensors; i++) one.leave(i);
    if (wrong == INTERRUPTED) return nullptr;          // Python knows why
    if (!out) f.keep(out = t.none);
    return out;
}

}  // namespace

enum { ROOM, RUN, FORGET };

extern "C" void* gnomon_kernel(int64_t what, const void* table, void* room, void* inputs) {
    const Table& t = *(const Table*)table;
    if (what == ROOM) return room_of(t);
    if (what == RUN) return run(t, (Room*)room, inputs);
    forget(t, (Room*)room);
    return nullptr;
}
