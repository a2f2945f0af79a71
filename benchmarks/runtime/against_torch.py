"""A step of the runtime beside one of ordinary PyTorch, on one process: `python benchmarks/runtime/against_torch.py`.

The peer is a plain Llama (torch's own layers, scaled_dot_product_attention, autograd, fused AdamW, clip_grad_norm_)
with the same weights, batch and microbatches. Steps alternate; ratios are of CPU-seconds and of wall time, pair by
pair, with a bootstrap's 95% interval of the median. Also prints what the interpreter takes for a row. Writes
results/runtime_speed.md. Left out: several processes, GPUs.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from platform import python_version

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from runtime.plain_llama import Llama  # noqa: E402  (the plain model that the tests compare with)

from gnomon.models.llama import LlamaConfig, llama  # noqa: E402
from gnomon.plans import Plan, Precision, Schedule, Workload  # noqa: E402
from gnomon.runtime import AdamWSettings, Executor  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "runtime_speed.md"
FP32 = Precision(param="fp32", compute="fp32", grad="fp32", reduce="fp32", master="none", states="fp32")
CONFIG = LlamaConfig(
    name="speed", num_layers=4, hidden_size=384, num_heads=6, num_kv_heads=2, head_dim=64, ffn_size=1024,
    vocab_size=4096,
)  # fmt: skip
WORKLOAD, MICROBATCHES = Workload(global_batch_size=4, seq_len=128), 2
SETTINGS = AdamWSettings(lr=1e-3)


def peer() -> Callable[[torch.Tensor], object]:
    """A step of ordinary PyTorch."""
    model = Llama(CONFIG, seed=7, dtype=torch.float32)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": SETTINGS.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=SETTINGS.lr, betas=SETTINGS.betas, fused=True)

    def step(ids: torch.Tensor) -> object:
        adam.zero_grad()
        total = 0.0
        for part in ids.chunk(MICROBATCHES):
            loss = model(part[:, :-1], part[:, 1:]) / ids[:, 1:].numel()
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), SETTINGS.clip_norm)
        adam.step()
        return total

    return step


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """(median, low, high) of a bootstrap, 95%."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(2000))
    return statistics.median(ratios), medians[50], medians[1949]


def row_overhead(executor: Executor) -> float:
    """Seconds that the interpreter takes for a row beside what the row does."""
    rows = executor.rows
    action = type(rows[0])
    idle = [
        action(number=row.number, action=lambda stage, unit: None, stage=0, unit=0, blocks=row.blocks, timed=row.timed)
        for row in rows
    ]
    best = float("inf")
    for _ in range(200):
        began = time.perf_counter()
        for row in idle:
            executor._do(row)
        best = min(best, (time.perf_counter() - began) / len(idle))
    return best


def main() -> int:
    """Alternates, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        plan = Plan(schedule=Schedule(name="one_f_one_b", num_microbatches=MICROBATCHES), precision=FP32)
        executor = Executor(llama(CONFIG), plan, WORKLOAD, seed=7, settings=SETTINGS)
        theirs, cpu, wall = peer(), list[float](), list[float]()
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(
            0, CONFIG.vocab_size, (WORKLOAD.global_batch_size, WORKLOAD.seq_len + 1), generator=generator
        )
        for pair in range(options.pairs + 3):
            took = []
            for step in (executor.step, theirs) if pair % 2 else (theirs, executor.step):
                began = time.process_time(), time.perf_counter()
                step(ids)
                took.append((time.process_time() - began[0], time.perf_counter() - began[1]))
            mine, other = took if pair % 2 else took[::-1]
            if pair >= 3:
                cpu.append(mine[0] / other[0])
                wall.append(mine[1] / other[1])
        a_row = row_overhead(executor)
        executor.leave()
        dist.destroy_process_group()
    lines = [
        "# A step of the runtime beside ordinary PyTorch",
        "",
        f"`python benchmarks/runtime/against_torch.py`, {datetime.now(UTC):%Y-%m-%d}, Python {python_version()}, torch "
        f"{torch.__version__}, one process and thread on 2 shared and busy cores.",
        f"Llama with {llama(CONFIG).num_parameters() / 1e6:.1f}M parameters, {WORKLOAD.global_batch_size} sequences of "
        f"{WORKLOAD.seq_len} tokens in {MICROBATCHES} microbatches, fp32, AdamW fused on both sides; {len(cpu)} pairs.",
        "",
        "| runtime over PyTorch | median | 95% interval |",
        "|---|---|---|",
        *(
            "| {} | {:.3f} | {:.3f} to {:.3f} |".format(name, *interval(ratios))
            for name, ratios in (("CPU-seconds", cpu), ("wall time", wall))
        ),
        "",
        f"The interpreter takes {a_row * 1e6:.1f} us for a row beside what the row does (best of 200).",
    ]
    print("\n".join(lines))
    options.output.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
