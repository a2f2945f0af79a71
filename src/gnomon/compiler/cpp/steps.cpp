// A run of a graph's steps as one call (gnomon/compiler/tasks/steps.py): kernels of ours and ATen's operations, one after another,
// on buffers that lie in one arena. What is called and with what stands in a table of 64-bit words that Python made once.
// PyTorch is reached by its C interface (torch/csrc/inductor/aoti_torch/c/shim.h, torch/csrc/stable/c/shim.h), Python by its
// limited one, both through addresses: nothing of them is included or linked.
// A table with a schedule is walked by two workers, the caller and a thread that stays: each has a list of steps, and a step
// waits until the other worker has done so many of its own. There is a counter for each worker and no barrier.
#include <fenv.h>
#include <limits.h>
#include <omp.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <atomic>
#include <new>
#include <utility>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
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
    int (*threads)();                                  // at::get_num_threads: a thread's first call sets its OpenMP
    int (*blas_threads)(int);                          // of this thread's MKL, 0: as many as all have; null where there is none
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
    const Word* start;                                 // of each step, its first word; one more for the end
    Word steps;
    const Word* wide;                                  // whether a step has all threads; else half of them
    const Word* task[2];                               // each worker's: (step, how many of the other's are done before)
    Word tasks[2];                                     // 0 of both: no schedule
    double* seconds;                                   // of each step, the least so far, where they are measured
    Word held;                                         // tensors that the run holds beside its inputs
};

// Packed weights (gnomon/compiler/kernels/convolutions.py), by the digest of what they were packed from. Replaced under `taken`.
constexpr int MOST_PACKED = 4;
struct Packed { uint64_t digest; Handle weight, bias; };
struct Slot {
    std::atomic<int> taken;
    int32_t count;
    Packed packed[MOST_PACKED];

    void lock() {
        while (taken.exchange(1, std::memory_order_acquire)) sched_yield();
    }
    void unlock() { taken.store(0, std::memory_order_release); }
};

// Buffers are the arena, inputs, then what ATen or the run's caller owns.
struct Room {                                          // what one call at a time uses
    void** at;                                         // of each buffer its address
    Handle* made;                                      // tensors that go with this call
    Handle* lent[2];                                   // each worker's handles of memory of ours, where there is one
    void** seen[2];                                    // the addresses that these are of
    Handle* held;
    char* arena;
    Room** child;
};

enum { KERNEL, STRUCT, ATEN, LEAVE, PRODUCT, LOOP, BRANCH, PACKED };
enum { RAN, REFUSED, INTERRUPTED };
enum { RAW, TENSOR, SOME, LIST, TEXT, HELD };
constexpr int MOST_POINTERS = 64, MOST_ARGUMENTS = 64, MOST_PIECES = 8;
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
    int worker = 0;

    // The handle of a tensor: one that ATen made, or one on memory of ours, which stays while its address does.
    Handle handle(Word n) {
        if (r.made[n]) return r.made[n];
        const Tensor& one = t.tensor[n];
        char* at = (char*)r.at[one.buffer] + one.offset;
        Handle& lent = r.lent[worker][n];
        if (lent && r.seen[worker][n] == at) return lent;
        if (lent) f.drop(lent);
        lent = nullptr;
        if (f.from_blob(at, one.dims, one.sizes, one.strides, 0, (int32_t)one.dtype, 0, -1, &lent)) lent = nullptr;
        r.seen[worker][n] = at;
        return lent;
    }

    int make(Word n) {
        const Tensor& one = t.tensor[n];
        Handle made;
        if (f.empty_strided(one.dims, one.sizes, one.strides, (int32_t)one.dtype, 0, -1, &made)) return 1;
        return own(n, made);
    }

    int own(Word n, Handle made) {
        if (r.made[n]) f.drop(r.made[n]);
        r.made[n] = made;
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
        const int wrong = make(n) || f.copy(r.made[n], made, 0);
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
        if (kind == HELD) {                            // taken by whom it is given
            Handle& of = r.held[*w++];
            *to = (uint64_t)of;
            of = nullptr;
            return *to == 0;
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

    // Tensors that were packed from what these pieces of memory hold: (the slot, the digest's function, the first of held,
    // pieces, then of each its buffer, bytes from its start, bytes). Refuses where nothing was packed from that.
    int packed(const Word*& w) {
        Slot& slot = *(Slot*)w[0];
        const auto digest = (int (*)(const Word*, Word, uint64_t*, Word))w[1];
        Handle* to = r.held + w[2];
        const Word count = w[3];
        w += 4;
        Word pieces[2 * MOST_PIECES];
        for (Word i = 0; i < count; i++, w += 3) {
            pieces[2 * i] = (Word)((char*)r.at[w[0]] + w[1]);
            pieces[2 * i + 1] = w[2];
        }
        uint64_t now;
        digest(pieces, count, &now, omp_get_max_threads() > 1);
        int wrong = REFUSED;
        slot.lock();
        for (int i = 0; i < slot.count; i++)
            if (slot.packed[i].digest == now) {
                const Packed& one = slot.packed[i];
                wrong = f.new_handle(one.weight, to) || (one.bias && f.new_handle(one.bias, to + 1));
                break;
            }
        slot.unlock();
        return wrong;
    }

    int step(const Word*& w) {
        Word kind = *w++;
        if (kind == PACKED) {
            if (const int wrong = packed(w)) return wrong;
            kind = *w++;
        }
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
        const Word bytes = *w++, mode = *w++, count = *w++, packs = *w++;
        memcpy(filled, first, (size_t)bytes);
        for (Word i = 0; i < count; i++, w += 3) {
            const char* at = (const char*)r.at[w[0]] + w[1];
            memcpy(filled + w[2], &at, sizeof at);
        }
        for (Word i = 0; i < packs; i++) {             // null where nothing was packed for it
            void* at = nullptr;
            const Handle of = r.held[w[2 * i]];
            if (of && f.data(of, &at)) return 1;
            memcpy(filled + w[2 * i + 1], &at, sizeof at);
        }
        const int wrong = (mode < 0 ? ((int (*)(void*))function)(filled) : ((int (*)(void*, Word))function)(filled, mode)) != 0;
        for (Word i = 0; i < packs; i++, w += 2) {
            Handle& of = r.held[*w];
            if (of) f.drop(of);
            of = nullptr;
        }
        return wrong;
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
        if (!r.made[n]) return;
        f.drop(r.made[n]);
        r.made[n] = nullptr;
    }

    int begun() {
        for (Word i = 0; i < t.results; i++)
            if (t.made[i] && make(t.result[i])) return 1;
        return 0;
    }

    // One step, and what is left after it.
    int numbered(Word n) {
        for (const Word *w = t.step + t.start[n], *end = t.step + t.start[n + 1]; w < end;)
            if (const int wrong = step(w)) return wrong;
        return RAN;
    }

    int all() {
        if (begun()) return 1;
        for (const Word *w = t.step, *end = t.step + t.words; w < end;)
            if (const int wrong = step(w)) return wrong;
        return RAN;
    }

    // As `all`, with the seconds of each step, where there is room for them.
    int timed() {
        if (begun()) return 1;
        for (Word n = 0; n < t.steps; n++) {
            timespec began, ended;
            clock_gettime(CLOCK_MONOTONIC, &began);
            if (const int wrong = numbered(n)) return wrong;
            clock_gettime(CLOCK_MONOTONIC, &ended);
            const double took = (double)(ended.tv_sec - began.tv_sec) + 1e-9 * (double)(ended.tv_nsec - began.tv_nsec);
            if (t.seconds && took < t.seconds[n]) t.seconds[n] = took;
        }
        return RAN;
    }
};

// ---- two workers
// Threads that this thread's steps have, of OpenMP and of MKL, which counts for itself.
struct Threads {
    const Functions& f;
    int now, blas;

    explicit Threads(const Functions& f) : f(f), now(omp_get_max_threads()), blas(f.blas_threads ? f.blas_threads(now) : 0) {}
    void set(int n) {
        if (n == now) return;
        omp_set_num_threads(now = n);
        if (f.blas_threads) f.blas_threads(n);
    }
    void back(int n) {
        set(n);
        if (f.blas_threads) f.blas_threads(blas);
    }
};

// Counts what one thread does, and lets another wait for it: it looks for a while, then sleeps until it is woken, so that
// a worker that has no core does not keep the other's busy.
struct alignas(64) Counter {
    std::atomic<int> count{0}, asleep{0};

    void to(int n) {
        count.store(n);
        if (!asleep.load()) return;                    // ordered: who sleeps says so, then looks once more
#ifdef __linux__
        syscall(SYS_futex, (int*)&count, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
#endif
    }

    void until(int least) {
        for (int i = 0; i < LOOKS; i++) {
            if (reached(count.load(std::memory_order_acquire), least)) return;
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
        }
        asleep.fetch_add(1);
        for (int seen; !reached(seen = count.load(), least);) {
#ifdef __linux__
            syscall(SYS_futex, (int*)&count, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
#else
            sched_yield();
#endif
        }
        asleep.fetch_sub(1);
    }

    static constexpr int LOOKS = 1000;                 // about 20 to 40 us
    static bool reached(int count, int least) { return (int)((unsigned)count - (unsigned)least) >= 0; }  // it may wrap
};

constexpr int NEVER = INT_MAX;                         // a counter of one that stopped: nobody waits for it

struct Job {
    const Table& t;
    Room& r;
    int threads;                                       // all of them
    fenv_t rounding;                                   // the caller's: denormals may be zeros to it
    Counter* done;                                     // each worker's, which stay when the job is gone
    std::atomic<int> wrong{RAN};

    void work(int worker, void** thread) {
        Run mine{t, *t.torch, r, thread, worker};
        Threads has(*t.torch);
        const int before = has.now, half = threads / 2;
        for (Word i = 0; i < t.tasks[worker] && wrong.load() == RAN; i++) {
            const Word* one = t.task[worker] + 2 * i;
            done[1 - worker].until((int)one[1]);
            if (wrong.load() != RAN) break;
            has.set(t.wide[one[0]] ? threads : half);
            if (const int failed = mine.numbered(one[0])) wrong.store(failed);
            else if (i + 1 < t.tasks[worker]) done[worker].to((int)i + 1);
        }
        has.back(before);
        done[worker].to(NEVER);
    }

    // The same steps with the same threads by the caller alone.
    void alone(void** thread) {
        Run mine{t, *t.torch, r, thread};
        Threads has(*t.torch);
        const int before = has.now, half = threads / 2;
        for (Word n = 0; n < t.steps && wrong.load() == RAN; n++) {
            has.set(t.wide[n] ? threads : half);
            wrong.store(mine.numbered(n));
        }
        has.back(before);
    }
};

// The second worker: one thread of the process, which sleeps while there is nothing to do. One call at a time has it.
struct Helper {
    std::atomic<int> taken{0};
    bool begun = false;                                // written by who has it
    Job* job = nullptr;
    Counter given, done[2];

    static void* live(void* of) {
        Helper& h = *(Helper*)of;
        bool first = true;
        for (unsigned n = 1;; n++) {
            h.given.until((int)n);
            Job* job = h.job;
            if (first) job->t.torch->threads();        // PyTorch sets a new thread's OpenMP at its first operation
            first = false;
            fesetenv(&job->rounding);
            job->work(1, nullptr);
        }
        return nullptr;
    }

    bool take() {
        if (taken.exchange(1)) return false;
        if (begun) return true;
        sigset_t every, before;
        sigfillset(&every);
        pthread_sigmask(SIG_SETMASK, &every, &before); // signals are for Python's threads
        pthread_attr_t apart;
        pthread_attr_init(&apart);
        pthread_attr_setdetachstate(&apart, PTHREAD_CREATE_DETACHED);
        pthread_t made;
        begun = pthread_create(&made, &apart, live, this) == 0;
        pthread_attr_destroy(&apart);
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        if (!begun) taken.store(0);
        return begun;
    }

    void give(Job& one) {
        job = &one;
        for (Counter& each : done) each.count.store(0);
        given.to((int)((unsigned)given.count.load() + 1u));
    }
};

Helper helper;

// A process that was forked has no second thread yet, whatever its parent's did then.
void forked() { new (&helper) Helper; }

__attribute__((constructor)) void watch_forks() { pthread_atfork(nullptr, nullptr, forked); }

int scheduled(const Table& t, Room& r, void** thread) {
    Run first{t, *t.torch, r, thread};
    if (first.begun()) return REFUSED;
    Job job{t, r, omp_get_max_threads(), {}, helper.done, {}};
    fegetenv(&job.rounding);
    if (job.threads < 2 || omp_in_parallel() || !helper.take()) {
        job.threads = job.threads < 2 ? 2 : job.threads;
        job.alone(thread);
        return job.wrong.load();
    }
    helper.give(job);
    job.work(0, thread);
    helper.done[1].until(NEVER);                       // it has left the job, and what it wrote is there
    helper.taken.store(0);
    return job.wrong.load();
}

Room* room_of(const Table& t) {
    Room* r = (Room*)calloc(1, sizeof(Room));
    const size_t buffers = (size_t)t.buffers, tensors = (size_t)t.tensors;
    r->at = (void**)calloc(buffers + 1, sizeof(void*));
    r->made = (Handle*)calloc(tensors + 1, sizeof(Handle));
    for (int i = 0; i < 2; i++) {
        r->lent[i] = (Handle*)calloc(tensors + 1, sizeof(Handle));
        r->seen[i] = (void**)calloc(tensors + 1, sizeof(void*));
    }
    r->held = (Handle*)calloc((size_t)t.held + 1, sizeof(Handle));
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
        for (Handle one : {r->made[i], r->lent[0][i], r->lent[1][i]})
            if (one) t.torch->drop(one);
    for (Word i = 0; i < t.children; i++) forget(*t.child[i], r->child[i]);
    free(r->child);
    free(r->at);
    free(r->made);
    for (int i = 0; i < 2; i++) {
        free(r->lent[i]);
        free(r->seen[i]);
    }
    free(r->held);
    free(r->arena);
    free(r);
}

bool whole(const Table& t, const Room* r) {
    bool all = r->arena != nullptr;
    for (Word i = 0; i < t.children; i++) all = all && whole(*t.child[i], r->child[i]);
    return all;
}

// A list of capsules of the results, or None where a step did not run: nothing was written but the arena. timed: whether
// the seconds of each step are asked for, with halves or all of the threads.
void* run(const Table& t, Room* r, void* inputs, bool timed, bool halved) {
    const Functions& f = *t.torch;
    if (!whole(t, r)) return f.keep(t.none), t.none;
    for (Word i = 0; i < t.inputs; i++) r->at[1 + i] = f.data_of_object(f.list_get(inputs, i));
    void* thread = f.save_thread();
    Run one{t, f, *r, &thread};
    int wrong;
    if (timed) {
        Threads has(f);
        const int before = has.now;
        if (halved) has.set(before < 2 ? 1 : before / 2);
        wrong = one.timed();
        has.back(before);
    } else {
        wrong = t.tasks[0] + t.tasks[1] ? scheduled(t, *r, &thread) : one.all();
    }
    f.restore_thread(thread);
    void* out = wrong ? nullptr : f.list_new(t.results);
    for (Word i = 0; out && i < t.results; i++) {
        const Word n = t.result[i];
        f.list_set(out, i, f.capsule(r->made[n], nullptr, nullptr));
        r->made[n] = nullptr;
    }
    for (Word i = 0; i < t.tensors; i++) one.leave(i);
    for (Word i = 0; i < t.held; i++) {                // of a step that refused
        if (r->held[i]) f.drop(r->held[i]);
        r->held[i] = nullptr;
    }
    if (wrong == INTERRUPTED) return nullptr;          // Python knows why
    if (!out) f.keep(out = t.none);
    return out;
}

}  // namespace

enum { ROOM, RUN, FORGET, HALVED, WHOLE, HOLD, BESIDE };

// HALVED, WHOLE: as RUN, with the seconds of each step. HOLD: `table` is a slot, which takes the place of its packed tensors
// with those at `room` (as many as `inputs` says). BESIDE: whether a second worker began.
extern "C" void* gnomon_kernel(int64_t what, const void* table, void* room, void* inputs) {
    if (what == HOLD) {
        Slot& slot = *(Slot*)table;
        slot.lock();
        slot.count = (int32_t)(intptr_t)inputs;
        memcpy(slot.packed, room, sizeof(Packed) * (size_t)slot.count);
        slot.unlock();
        return nullptr;
    }
    if (what == BESIDE) return helper.begun ? (void*)&helper : nullptr;
    const Table& t = *(const Table*)table;
    if (what == ROOM) return room_of(t);
    if (what == RUN || what == HALVED || what == WHOLE) return run(t, (Room*)room, inputs, what != RUN, what == HALVED);
    forget(t, (Room*)room);
    return nullptr;
}
