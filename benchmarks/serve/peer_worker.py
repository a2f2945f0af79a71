"""One engine on one model, asked by lines: `PYTHON peer_worker.py ENGINE PATH FORM`, in the environment that has it.

A line is JSON, requests as [prompt's tokens, how many to make]; the answer is [tokens made, CPU-seconds of the
process]. At most eight requests run at once, greedily, on one thread, and ends of text are not looked at. Imports
nothing of Gnomon but for its own engine. Leaves out who asks (`peers`).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Requests = list[tuple[list[int], int]]
Run = Callable[[Requests], int]


def gnomon(path: str, form: str) -> Run:
    """form: as --weights has it, computed in bfloat16."""
    from dataclasses import replace

    import torch

    from gnomon.serve.load import open_model
    from gnomon.serve.sampling import Sampling
    from gnomon.software.engine import engine

    torch.set_num_threads(1)
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


def transformers(path: str, form: str) -> Run:
    """`generate`, in padded batches of eight; form: a torch dtype."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
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


def openvino(path: str, form: str) -> Run:
    """OpenVINO GenAI's continuous batching; form: the precision that it computes in."""
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_seqs, scheduler.max_num_batched_tokens = 1, 8, 2048
    scheduler.dynamic_split_fuse, scheduler.enable_prefix_caching = True, False
    settings = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": form}
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


def ctranslate2(path: str, form: str) -> Run:
    """Static batches of eight; form: a compute type."""
    import ctranslate2 as ct

    words = json.loads(Path(path, "vocabulary.json").read_text())
    model = ct.Generator(path, device="cpu", compute_type=form, intra_threads=1, inter_threads=1)

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


def main() -> None:
    """Answers until there are no more lines."""
    name, path, form = sys.argv[1:4]
    run = {"gnomon": gnomon, "transformers": transformers, "openvino": openvino, "ctranslate2": ctranslate2}[name](
        path, form
    )
    run([([7] * 16, 4)])
    out = sys.__stdout__
    assert out is not None
    print("@ready", file=out, flush=True)
    for line in sys.stdin:
        before = time.process_time()
        made = run([(prompt, count) for prompt, count in json.loads(line)])
        print(f"@{json.dumps([made, time.process_time() - before])}", file=out, flush=True)


if __name__ == "__main__":
    main()
