"""Tokens a CPU-second of the engine beside transformers' generate: `python benchmarks/serve/speed.py [--no-file]`.

A model of SmolLM2-135M's shape with random weights, one thread, CPU time of the whole process, engines in turn. Decode:
24 tokens after a prompt of 32. Prefill: 256 tokens. Eight at once: 12 requests of mixed lengths, output tokens a
CPU-second, prompts included. Bound: bytes of the weights over the bandwidth that a read of 512 MiB has here. Writes
benchmarks/results/serve_speed.md. Leaves out other programs' servers, and HTTP.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch
import transformers

from gnomon.serve.engine import Engine
from gnomon.serve.load import open_model
from gnomon.serve.sampling import Sampling
from gnomon.software.engine import engine

RESULTS = Path(__file__).resolve().parents[1] / "results" / "serve_speed.md"
SHAPE = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192, "tie_word_embeddings": True,
}  # fmt: skip
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


def measured(answer: Answer) -> dict[str, float]:
    """Tokens a CPU-second."""
    first, whole = seconds(answer, [(32, 1)]), seconds(answer, [(32, 25)])
    return {
        "decode": 24 / (whole - first),
        "prefill of 256": 256 / seconds(answer, [(256, 1)]),
        "eight at once": sum(count for _, count in MIXED) / seconds(answer, MIXED),
    }


def bandwidth() -> float:
    """Bytes a CPU-second of a read that no cache holds."""
    whole, best = torch.ones(1 << 27), 0.0
    for _ in range(5):
        before = time.process_time()
        whole.sum()
        best = max(best, whole.nbytes / (time.process_time() - before))
    return best


def main() -> int:
    """The table, and the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-file", action="store_true", help="print only")
    parser.add_argument("--rounds", type=int, default=5, help="of all engines in turn; 5")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    rules = replace(engine("gnomon"), max_seqs=8)
    with tempfile.TemporaryDirectory() as folder:
        model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SHAPE)).to(torch.bfloat16)
        model.save_pretrained(folder)
        engines = {
            f"gnomon {dtype}": ours(open_model(Path(folder), rules, dtype=dtype, kv_bytes=1 << 28, max_model_len=2048))
            for dtype in ("bf16", "fp32")
        }
    engines["transformers bf16"] = theirs(model.eval())
    found: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
    for answer in engines.values():
        seconds(answer, [(16, 4)])
    for _ in range(options.rounds):
        for name, answer in engines.items():
            found[name].append(measured(answer))
    parameters = sum(p.numel() for p in model.parameters())
    speed = bandwidth()
    lines = ["| engine | decode, batch 1 | prefill of 256 | eight at once |", "|---|---|---|---|"]
    for name, rows in found.items():
        cells = []
        for what in rows[0]:
            values = sorted(row[what] for row in rows)
            cells.append(f"{statistics.median(values):.0f} [{values[0]:.0f}, {values[-1]:.0f}]")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    bounds = ", ".join(f"{dtype} {speed / parameters / size:.0f}" for dtype, size in (("bf16", 2), ("fp32", 4)))
    lines += ["", f"Bound of decode by {speed / 1e9:.1f} GB/s of one thread: {bounds} tokens a CPU-second."]
    print("\n".join(lines))
    if not options.no_file:
        head = [
            "# Tokens a CPU-second, one thread",
            "",
            f"`python benchmarks/serve/speed.py`, {datetime.now(UTC):%Y-%m-%d}, torch {torch.__version__}, "
            f"transformers {transformers.__version__}, SmolLM2-135M's shape, random weights; median [least, most] of "
            f"{options.rounds} rounds in turn, on a machine that others used too.",
            "",
        ]
        RESULTS.write_text("\n".join([*head, *lines]) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
