"""Tokens a CPU-second of the engine beside transformers' generate: `python benchmarks/serve/speed.py [--no-file]`.

Models of the shapes of SmolLM2-135M and Qwen2.5-0.5B with random weights, one thread, CPU time of the whole process,
engines in turn. Decode: 24 tokens after a prompt of 32. Prefill: 256 and 2,048 tokens. Eight at once: 12 requests of
mixed lengths, output tokens a CPU-second, prompts included. Host: what of a step of eight decodes is not in the layers'
call. Apart, a process for each form: memory beyond that of a process with torch, over weights and keys, and CPU-seconds
from its start to the first token. Bound: bytes of the weights over the bandwidth that a read of 512 MiB has here.
Writes benchmarks/results/serve_speed.md. Leaves out other programs' servers, and HTTP.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

from gnomon.compiler.machine import this_machine
from gnomon.serve.engine import Engine
from gnomon.serve.load import open_model
from gnomon.serve.rows import TokenRows
from gnomon.serve.sampling import Sampling
from gnomon.software.engine import engine

RESULTS = Path(__file__).resolve().parents[1] / "results" / "serve_speed.md"
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "135M": ("LlamaConfig", {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "vocab_size": 49152,
    }),
    "0.5B": ("Qwen2Config", {
        "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2, "vocab_size": 151936,
    }),
}  # fmt: skip
FORMS = ("bf16 stored", "bf16 int8", "bf16 int4-g64", "fp32 stored")
"""dtype, and how matrices are stored."""
KV_BYTES = 1 << 28
rng = random.Random(0)
MIXED = [(rng.choice((16, 32, 64, 96, 128)), rng.choice((8, 12, 16, 24))) for _ in range(12)]
Answer = Callable[[list[tuple[list[int], int]]], int]
"""(prompt, tokens) of requests -> tokens that came."""


def ours(model: Engine) -> Answer:
    """The engine."""

    def run(requests: list[tuple[list[int], int]]) -> int:
        for prompt, count in requests:
            model.add(prompt, Sampling(max_tokens=count, temperature=0))
        made = 0
        while model.has_work:
            made += len(model.step())
        return made

    return run


def theirs(model: torch.nn.Module) -> Answer:
    """transformers, in padded batches of eight."""

    def run(requests: list[tuple[list[int], int]]) -> int:
        for first in range(0, len(requests), 8):
            part = requests[first : first + 8]
            longest = max(len(prompt) for prompt, _ in part)
            ids = torch.tensor([[0] * (longest - len(p)) + p for p, _ in part])
            model.generate(
                ids, attention_mask=(ids != 0).long(), max_new_tokens=max(c for _, c in part), do_sample=False,
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        return sum(count for _, count in requests)

    return run


def seconds(answer: Answer, requests: list[tuple[int, int]]) -> float:
    """CPU time. Prompts are new each time, so that nothing of them is found."""
    made = [([rng.randrange(5, 4000) for _ in range(length)], count) for length, count in requests]
    before = time.process_time()
    answer(made)
    return time.process_time() - before


def measured(answer: Answer, long: bool) -> dict[str, float]:
    """Tokens a CPU-second."""
    first, whole = seconds(answer, [(32, 1)]), seconds(answer, [(32, 25)])
    return {
        "decode": 24 / (whole - first),
        "prefill of 256": 256 / seconds(answer, [(256, 1)]),
        "of 2,048": 2048 / seconds(answer, [(2048, 1)]) if long else 0.0,
        "eight at once": sum(count for _, count in MIXED) / seconds(answer, MIXED),
    }


def host_share(model: Engine) -> float:
    """Of a step of eight decodes: the share that is not in the layers' call."""
    for _ in range(8):
        model.add([rng.randrange(5, 4000) for _ in range(16)], Sampling(max_tokens=48, temperature=0))
    forward, inside = model.model.forward, 0.0

    def timed(rows: TokenRows) -> torch.Tensor:
        nonlocal inside
        before = time.process_time()
        made = forward(rows)
        inside += time.process_time() - before
        return made

    model.model.forward = timed  # type: ignore[method-assign]
    model.step()
    inside, before = 0.0, time.process_time()
    while model.has_work:
        model.step()
    whole = time.process_time() - before
    model.model.forward = forward  # type: ignore[method-assign]
    return 1 - inside / whole


ALONE = """
import resource, sys, time
from dataclasses import replace
from pathlib import Path
import torch
def resident():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmRSS")).split()[1]) << 10
torch.set_num_threads(1)
before = resident()
from gnomon.serve.load import open_model
from gnomon.serve.sampling import Sampling
from gnomon.software.engine import engine
dtype, form = sys.argv[2].split()
rules = replace(engine("gnomon"), max_seqs=8)
model = open_model(Path(sys.argv[1]), rules, dtype=dtype, weights=form, kv_bytes=1 << 28, max_model_len=3072)
model.add(list(range(5, 37)), Sampling(max_tokens=1, temperature=0))
model.step()
first = time.process_time()
for at in range(8):
    model.add(list(range(5 + at, 261 + at)), Sampling(max_tokens=8, temperature=0))
while model.has_work:
    model.step()
weights = sum(one.bytes for one in model.model.program.weights)
sizes, pages = model.model.sizes, sum(pages.nbytes for pages in model.model.pages)
used = pages * 8 * 264 // (sizes.blocks * sizes.block_tokens)
print(first, resident() - before, weights + used)
"""


def alone(folder: str, form: str) -> tuple[float, float]:
    """(CPU-seconds from a process's start to its first token, memory over weights and the keys that are written)."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", ALONE, folder, form], capture_output=True, text=True, check=True, env=env
    )
    first, resident, needed = map(float, done.stdout.split())
    return first, resident / needed


def bandwidth() -> float:
    """Bytes a CPU-second of a read that no cache holds."""
    whole, best = torch.ones(1 << 27), 0.0
    for _ in range(5):
        before = time.process_time()
        whole.sum()
        best = max(best, whole.nbytes / (time.process_time() - before))
    return best


def table(size: str, rounds: int, long: bool) -> list[str]:
    """Returns the rows of one model: a line of the table for each precision."""
    rules = replace(engine("gnomon"), max_seqs=8)
    name, shape = SHAPES[size]
    with tempfile.TemporaryDirectory() as folder:
        config = getattr(transformers, name)(**shape, max_position_embeddings=8192, tie_word_embeddings=True)
        model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
        model.save_pretrained(folder)
        apart = {form: [alone(folder, form) for _ in range(3)] for form in FORMS}
        opened = {}
        for form in FORMS:
            dtype, weights = form.split()
            opened[form] = open_model(
                Path(folder), rules, dtype=dtype, weights=weights, kv_bytes=KV_BYTES, max_model_len=3072
            )
    engines = {f"gnomon {form}": ours(one) for form, one in opened.items()}
    engines["transformers bf16"] = theirs(model.eval())
    found: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
    for answer in engines.values():
        seconds(answer, [(16, 4)])
    for _ in range(rounds):
        for name, answer in engines.items():
            found[name].append(measured(answer, long))
    lines = [
        "| engine | decode, batch 1 | prefill of 256 | of 2,048 | eight at once | host | memory | first token |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, rows in found.items():
        cells = []
        for what in rows[0]:
            values = sorted(row[what] for row in rows)
            cells.append(f"{statistics.median(values):.0f} [{values[0]:.0f}, {values[-1]:.0f}]")
        form = name.removeprefix("gnomon ")
        if form in opened:
            first, memory = (statistics.median(values) for values in zip(*apart[form], strict=True))
            cells += [f"{host_share(opened[form]):.1%}", f"{memory:.2f}", f"{first:.1f} s"]
        else:
            cells += ["", "", ""]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    parameters, speed = sum(p.numel() for p in model.parameters()), bandwidth()
    bounds = ", ".join(f"{dtype} {speed / parameters / size:.0f}" for dtype, size in BYTES.items())
    told = f"Bound of decode by {speed / 1e9:.1f} GB/s of one thread: {bounds} tokens a CPU-second."
    return [f"## {size}", "", *lines, "", told, ""]


BYTES = {"bf16": 2.0, "int8": 1.0, "int4 with a head of int8": 0.66, "fp32": 4.0}
"""Of a parameter; of int4-g64 with scales, in these shapes."""


def main() -> int:
    """The tables, and the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-file", action="store_true", help="print only")
    parser.add_argument("--rounds", type=int, default=5, help="of all engines in turn; 5")
    parser.add_argument("--short", action="store_true", help="without prompts of 2,048")
    parser.add_argument("--sizes", nargs="*", default=[*SHAPES], choices=[*SHAPES])
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    lines = [line for size in options.sizes for line in table(size, options.rounds, not options.short)]
    print("\n".join(lines))
    if not options.no_file:
        head = [
            "# Tokens a CPU-second, one thread",
            "",
            f"`python benchmarks/serve/speed.py --rounds {options.rounds}`, {datetime.now(UTC):%Y-%m-%d}, torch "
            f"{torch.__version__}, transformers {transformers.__version__}, {this_machine().model}, random weights; "
            f"median [least, most] of {options.rounds} rounds in turn, on a machine that others used too. Host: what "
            "of a step of eight decodes is not in the layers' call. Memory: what a process has beyond that with torch "
            "alone, over weights and written keys. First token: CPU-seconds from the start of a process, of which "
            "importing torch is most.",
            "",
        ]
        RESULTS.write_text("\n".join([*head, *lines]) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
