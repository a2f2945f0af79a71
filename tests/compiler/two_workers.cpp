// cpp/steps.cpp by itself, with steps that need nothing of PyTorch's, for a sanitizer: `threads` callers run one table of four
// chains that cross, each in a room of its own, `calls` times, and compare; then once more in a process that was forked.
#include "steps.cpp"
#include <stdio.h>
#include <sys/wait.h>
#include <thread>
#include <vector>

constexpr Word CHAINS = 4, DEEP = 6, STEPS = CHAINS * DEEP, BYTES = 64;

// out = 3 * a + b + the step's number; arrays of eight numbers
int step_of(const void* number, void* a, void* b, void* out) {
    for (int i = 0; i < 8; i++) ((int64_t*)out)[i] = 3 * ((const int64_t*)a)[i] + ((const int64_t*)b)[i] + *(const int64_t*)number;
    return 0;
}

int fails(const void*, void*, void*, void*) { return 1; }

void* memory_of(void* object) { return object; }
void* element(void* list, Word i) { return ((void**)list)[i]; }
void* list_of(Word) { return malloc(8); }
int nothing() { return 0; }
void* saved() { return nullptr; }
void restored(void*) {}
void kept(void*) {}

struct Made {
    std::vector<Word> words, start, tasks[2], wide;
    std::vector<Word> numbers;
    Functions f{};
    Table t{};

    // Step n of chain c reads its own chain's last and another chain's; chains 0 and 1 are the first worker's.
    explicit Made(int wrong) : wide(STEPS, 0), numbers(STEPS) {
        auto at = [](Word chain, Word deep) { return (deep * CHAINS + chain + 1) * BYTES; };   // 0: the input's copy
        for (Word deep = 0; deep < DEEP; deep++)
            for (Word chain = 0; chain < CHAINS; chain++) {
                const Word n = deep * CHAINS + chain, other = deep % 2 ? (chain + 1) % CHAINS : chain;
                numbers[n] = n;
                start.push_back((Word)words.size());
                for (Word w : {(Word)KERNEL, n == wrong ? (Word)fails : (Word)step_of, (Word)&numbers[n], (Word)3}) words.push_back(w);
                for (Word of : {chain, other}) {
                    words.push_back(deep ? 0 : 1);
                    words.push_back(deep ? at(of, deep - 1) : 0);
                }
                words.push_back(0);
                words.push_back(at(chain, deep));
                const int worker = chain >= CHAINS / 2;
                tasks[worker].push_back(n);
                tasks[worker].push_back(deep % 2 ? (CHAINS / 2) * deep : deep ? (CHAINS / 2) * (deep - 1) : 0);
            }
        start.push_back((Word)words.size());
        f.data_of_object = memory_of, f.list_get = element, f.list_new = list_of, f.threads = nothing;
        f.save_thread = saved, f.restore_thread = restored, f.keep = kept;
        t.torch = &f, t.buffers = 2, t.inputs = 1, t.arena = (STEPS + 1) * BYTES, t.step = words.data(), t.words = (Word)words.size();
        t.start = start.data(), t.steps = STEPS, t.wide = wide.data(), t.none = &t;
        for (int w = 0; w < 2; w++) t.task[w] = tasks[w].data(), t.tasks[w] = (Word)tasks[w].size() / 2;
    }
};

int64_t expected(const int64_t* input) {
    int64_t now[CHAINS], next[CHAINS];
    for (Word deep = 0; deep < DEEP; deep++) {
        for (Word c = 0; c < CHAINS; c++) {
            const Word other = deep % 2 ? (c + 1) % CHAINS : c;
            next[c] = 3 * (deep ? now[c] : *input) + (deep ? now[other] : *input) + deep * CHAINS + c;
        }
        memcpy(now, next, sizeof now);
    }
    return now[CHAINS - 1];
}

int wrong_calls(const Made& made, int calls, int64_t from, bool refuses) {
    Room* room = room_of(made.t);
    int wrong = 0;
    for (int i = 0; i < calls; i++) {
        int64_t input[8];
        for (int64_t& one : input) one = from + i;
        void* inputs[] = {input};
        void* out = gnomon_kernel(RUN, &made.t, room, inputs);
        const int64_t* last = (const int64_t*)(room->arena + STEPS * BYTES);
        wrong += refuses ? out != made.t.none : out == made.t.none || last[0] != expected(input) || last[7] != last[0];
        if (out != made.t.none) free(out);
    }
    forget(made.t, room);
    return wrong;
}

int main(int, char** given) {
    const int threads = atoi(given[1]), calls = atoi(given[2]);
    omp_set_num_threads(2);
    Made good(-1), bad(STEPS / 2 + 1), late(STEPS - 1);
    std::atomic<int> wrong{0};
    std::vector<std::thread> callers;
    for (int n = 0; n < threads; n++)
        callers.emplace_back([&, n] {
            omp_set_num_threads(2);
            wrong += wrong_calls(good, calls, 1000 * n, false) + wrong_calls(bad, calls, n, true) + wrong_calls(late, calls, n, true);
        });
    for (std::thread& one : callers) one.join();
    const pid_t child = fork();
    if (!child) _exit(wrong_calls(good, 10, 7, false) || !helper.begun);
    int status = 0;
    waitpid(child, &status, 0);
    printf("%d wrong, a second worker %s, forked %d\n", wrong.load(), helper.begun ? "began" : "did not begin", status);
    return wrong.load() || status || !helper.begun;
}
