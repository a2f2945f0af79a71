"""A step of the runtime beside one of ordinary PyTorch, on one process: `python benchmarks/runtime/against_torch.py`.

Peers: a plain loop over a plain Llama (torch's own layers, scaled_dot_product_attention, autograd, fused AdamW,
clip_grad_norm_), and `transformers.Trainer` with its own Llama (it needs `accelerate`), both with the same weights,
batches and microbatches. Steps alternate; ratios are of CPU-seconds and of wall time, pair by pair, with a bootstrap's
95% interval of the median. Peak memory: what building the model and four steps add to the resident memory of a process
that runs one side only, the median of three. Also prints what the interpreter takes for a row. Writes
results/runtime_speed.md. Left out: several processes, GPUs.
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from platform import python_version
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(Path(__file__).parent)]

from peak_resident import taken_by  # noqa: E402
from runtime.plain_llama import NORM_EPS, Llama  # noqa: E402  (the plain model that the tests compare with)

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
UNCOUNTED = 3
"""Pairs that warm up."""
Times = tuple[float, float]
"""CPU-seconds, seconds."""


def peer() -> Callable[[torch.Tensor], float]:
    """A step of ordinary PyTorch."""
    model = Llama(CONFIG, seed=7, dtype=torch.float32)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": SETTINGS.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=SETTINGS.lr, betas=SETTINGS.betas, fused=True)

    def step(ids: torch.Tensor) -> float:
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


def ours() -> Executor:
    """The same by a plan, in a process group of one."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    plan = Plan(schedule=Schedule(name="one_f_one_b", num_microbatches=MICROBATCHES), precision=FP32)
    return Executor(llama(CONFIG), plan, WORKLOAD, seed=7, settings=SETTINGS)


def batches() -> Iterator[torch.Tensor]:
    """Ids of one step after the other."""
    generator = torch.Generator().manual_seed(0)
    shape = (WORKLOAD.global_batch_size, WORKLOAD.seq_len + 1)
    while True:
        yield torch.randint(0, CONFIG.vocab_size, shape, generator=generator)


@dataclass(slots=True)
class Pairs:
    """Ratios of ours over theirs, pair by pair, and what theirs took."""

    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    theirs_s: list[float] = field(default_factory=list)
    off: float = 0.0
    """Largest difference of the first three steps' losses."""

    def add(self, mine: Times, theirs: Times) -> None:
        self.cpu.append(mine[0] / theirs[0])
        self.wall.append(mine[1] / theirs[1])
        self.theirs_s.append(theirs[1])


def now() -> Times:
    return time.process_time(), time.perf_counter()


def since(began: Times) -> Times:
    return time.process_time() - began[0], time.perf_counter() - began[1]


def beside_loop(count: int) -> Pairs:
    """Steps in turn with the loop's; which of the two is first changes."""
    executor, theirs, found = ours(), peer(), Pairs()
    given = batches()
    for pair in range(count + UNCOUNTED):
        ids, took, losses = next(given), {}, {}
        for which in ("ours", "theirs")[:: 1 if pair % 2 else -1]:
            began = now()
            losses[which] = float(executor.step(ids).loss) if which == "ours" else theirs(ids)
            took[which] = since(began)
        if pair < UNCOUNTED:
            found.off = max(found.off, abs(losses["ours"] - losses["theirs"]))
        else:
            found.add(took["ours"], took["theirs"])
    executor.leave()
    return found


def beside_trainer(count: int) -> Pairs:
    """A step of ours after each of the Trainer's, in its callback. Its time is all that it does from then on."""
    executor, found = ours(), Pairs()
    given = batches()
    losses, began = list[float](), now()

    def after() -> None:
        nonlocal began
        took, began = since(began), now()
        loss, theirs = float(executor.step(next(given)).loss), sum(losses)
        losses.clear()
        mine = since(began)
        if next(steps) < UNCOUNTED:
            found.off = max(found.off, abs(loss - theirs))
        else:
            found.add(mine, took)
        began = now()

    steps = iter(range(count + UNCOUNTED))
    trained(count + UNCOUNTED, losses, after)
    executor.leave()
    return found


def trained(steps: int, losses: list[float], after: Callable[[], None]) -> None:
    """`transformers.Trainer` on its own Llama with the same weights and batches: losses of its microbatches, and what
    is called after each step."""
    import transformers
    from transformers.trainer_callback import TrainerCallback

    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=CONFIG.hidden_size, intermediate_size=CONFIG.ffn_size, num_hidden_layers=CONFIG.num_layers,
            num_attention_heads=CONFIG.num_heads, num_key_value_heads=CONFIG.num_kv_heads, head_dim=CONFIG.head_dim,
            vocab_size=CONFIG.vocab_size, rms_norm_eps=NORM_EPS, use_cache=False,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        )
    )  # fmt: skip
    model.load_state_dict(Llama(CONFIG, seed=7, dtype=torch.float32).state_dict())
    per = WORKLOAD.global_batch_size // MICROBATCHES

    class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
        def __init__(self) -> None:
            given = batches()
            self.ids = torch.cat([next(given) for _ in range(steps)])

        def __len__(self) -> int:
            return len(self.ids)

        def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
            ids = self.ids[row]
            return {"input_ids": ids[:-1], "labels": ids[1:], "shift_labels": ids[1:]}

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *given: object) -> torch.utils.data.Sampler[int]:
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def training_step(self, *given: Any, **named: Any) -> torch.Tensor:
            loss = super().training_step(*given, **named)
            losses.append(float(loss))
            return loss

    class Turn(TrainerCallback):
        def on_step_end(self, *given: object, **named: object) -> None:
            after()

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder, use_cpu=True, max_steps=steps, per_device_train_batch_size=per,
            gradient_accumulation_steps=MICROBATCHES, learning_rate=SETTINGS.lr, lr_scheduler_type="constant",
            weight_decay=SETTINGS.weight_decay, adam_beta1=SETTINGS.betas[0], adam_beta2=SETTINGS.betas[1],
            max_grad_norm=SETTINGS.clip_norm, optim="adamw_torch_fused", save_strategy="no", logging_strategy="no",
            report_to=[], disable_tqdm=True, remove_unused_columns=False,
        )  # fmt: skip
        InOrder(model=model, args=arguments, train_dataset=Rows(), callbacks=[Turn()]).train()


def alone(name: str) -> int:
    """Bytes that one side takes in this process."""
    given = batches()
    if name == "ours":
        return taken_by(ours, lambda executor: executor.step(next(given)))
    if name == "plain loop":
        return taken_by(peer, lambda step: step(next(given)))
    return taken_by(lambda: None, lambda _: trained(4, [], lambda: None), steps=1)


def peaks(names: Sequence[str], launches: int = 3) -> dict[str, float]:
    """Median bytes of some processes each, taken in turn."""
    found = {name: list[int]() for name in names}
    for _ in range(launches):
        for name, all_found in found.items():
            run = [sys.executable, __file__, "--alone", name]
            all_found.append(int(subprocess.run(run, capture_output=True, text=True, check=True).stdout.split()[-1]))
    return {name: statistics.median(all_found) for name, all_found in found.items()}


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


PEERS: dict[str, Callable[[int], Pairs]] = {"plain loop": beside_loop, "Trainer": beside_trainer}


def main() -> int:
    """Alternates, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--alone", choices=["ours", *PEERS], help="only print the bytes that this side takes")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    # Before accelerate is imported, which asks for as many threads as there are cores.
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    if options.alone:
        print(alone(options.alone))
        return 0
    names = options.peers.split(",")
    lines = [
        "# A step of the runtime beside ordinary PyTorch",
        "",
        f"`python benchmarks/runtime/against_torch.py`, {datetime.now(UTC):%Y-%m-%d}, Python {python_version()}, torch "
        f"{torch.__version__}, one process and thread on two cores.",
        f"Llama with {llama(CONFIG).num_parameters() / 1e6:.1f}M parameters, {WORKLOAD.global_batch_size} sequences of "
        f"{WORKLOAD.seq_len} tokens in {MICROBATCHES} microbatches, fp32, AdamW fused and gradients clipped on both "
        f"sides; {options.pairs} pairs. Ratios are ours over theirs.",
        "",
        "| peer | CPU-seconds | 95% interval | wall time | 95% interval | theirs, ms a step | losses differ by "
        "| peak memory | theirs, MiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    most = peaks(["ours", *names])
    for name in names:
        found = PEERS[name](options.pairs)
        row = [
            f"{middle:.3f} | {low:.3f} to {high:.3f}" for middle, low, high in map(interval, (found.cpu, found.wall))
        ]
        lines.append(
            f"| {name} | {row[0]} | {row[1]} | {statistics.median(found.theirs_s) * 1e3:.0f} | {found.off:.0e} "
            f"| {most['ours'] / most[name]:.3f} | {most[name] / 2**20:.0f} |"
        )
    executor = ours()
    a_row = row_overhead(executor)
    executor.leave()
    lines += ["", f"The interpreter takes {a_row * 1e6:.1f} us for a row beside what the row does (best of 200)."]
    print("\n".join(lines))
    options.output.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
