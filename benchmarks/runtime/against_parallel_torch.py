"""Steps on two processes beside PyTorch's own parallelism: `python benchmarks/runtime/against_parallel_torch.py`.

The same Llama, batch, microbatches and fused AdamW under DistributedDataParallel, FSDP2 (`fully_shard`), tensor
parallelism by DTensor (`parallelize_module`), 1F1B, interleaved 1F1B, interleaved zero bubble and ZB-V of
`torch.distributed.pipelining`, written as their tutorials do, and as a plan of ours. Steps alternate in the same two
processes; ratios are of the CPU-seconds of both processes and of wall time, pair by pair, with a bootstrap's 95%
interval of the median. Losses of the first steps are compared. Peak memory: what building the model and four steps add
to the resident memory of processes that run one side only, the rank that takes most; the median of three launches
each. Writes results/runtime_parallel_speed.md. Left out: clipping (the peers clip in other ways), GPUs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from platform import python_version
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(Path(__file__).parent)]

from against_torch import CONFIG, FP32, SETTINGS, interval  # noqa: E402
from peak_resident import taken_by  # noqa: E402
from runtime.plain_llama import Llama  # noqa: E402  (the plain model that the tests compare with)

from gnomon.models.llama import llama  # noqa: E402
from gnomon.plans import Layout, Mesh, Optimizer, Plan, Schedule, Workload  # noqa: E402
from gnomon.runtime import Executor  # noqa: E402
from gnomon.runtime.processes.launch import launch  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "runtime_parallel_speed.md"
WORK, UNITS = Workload(global_batch_size=8, seq_len=128), 4
Step = Callable[[Tensor], float]
"""A batch of ids -> this rank's part of the mean loss."""


class Adam:
    """Fused AdamW as the runtime updates: matrices decay, vectors do not. A call of the fused kernel takes DTensors or
    tensors, not both."""

    def __init__(self, model: nn.Module) -> None:
        self.parts = []
        for sharded in (True, False):
            own = [p for p in model.parameters() if isinstance(p, DTensor) == sharded]
            groups = [
                {"params": [p for p in own if p.ndim > 1], "weight_decay": SETTINGS.weight_decay},
                {"params": [p for p in own if p.ndim == 1], "weight_decay": 0.0},
            ]
            if groups := [group for group in groups if group["params"]]:
                self.parts.append(torch.optim.AdamW(groups, lr=SETTINGS.lr, betas=SETTINGS.betas, fused=True))

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()

    def step(self) -> None:
        for part in self.parts:
            part.step()


def data_parallel(model: nn.Module, whole: nn.Module, last: Callable[[bool], None]) -> Step:
    """Each rank's half of the batch, in microbatches. last: told whether the microbatch's gradients are exchanged."""
    optimizer = Adam(whole)

    def step(ids: Tensor) -> float:
        optimizer.zero_grad()
        mine, total = ids.chunk(2)[dist.get_rank()], 0.0
        parts = mine.chunk(UNITS // 2)
        for number, part in enumerate(parts):
            last(number == len(parts) - 1)
            loss = model(part[:, :-1], part[:, 1:]) / mine[:, 1:].numel()
            loss.backward()
            total += loss.item() / 2
        optimizer.step()
        return total

    return step


def ddp() -> Step:
    """DistributedDataParallel, gradients exchanged with the last microbatch."""
    wrapped = DistributedDataParallel(Llama(CONFIG, seed=7, dtype=torch.float32))

    def last(exchanged: bool) -> None:
        wrapped.require_backward_grad_sync = exchanged

    return data_parallel(wrapped, wrapped, last)


def fsdp2() -> Step:
    """`fully_shard` of each layer and of the whole, gathered again for the backward (ZeRO 3)."""
    model = Llama(CONFIG, seed=7, dtype=torch.float32)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return data_parallel(model, model, lambda exchanged: None)


def dtensor() -> Step:
    """Column and row parallel projections, as in torchtitan's Llama without sequence parallelism."""
    model = Llama(CONFIG, seed=7, dtype=torch.float32)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        plan = {name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")} | {"o_proj": RowwiseParallel()}
        parallelize_module(layer.self_attn, mesh, plan)
        ways = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
        parallelize_module(layer.mlp, mesh, ways)
    optimizer = Adam(model)

    def step(ids: Tensor) -> float:
        optimizer.zero_grad()
        total = 0.0
        for part in ids.chunk(UNITS):
            loss = model(part[:, :-1], part[:, 1:]) / ids[:, 1:].numel()
            loss.backward()
            total += loss.item() / 2
        optimizer.step()
        return total

    return step


class Part(nn.Module):
    """Some layers of the model, the first with its table, the last with its head."""

    def __init__(self, whole: Llama, first: int, stop: int) -> None:
        super().__init__()
        decoder = whole.model
        self.embed = decoder.embed_tokens if first == 0 else None
        self.layers = nn.ModuleList(decoder.layers[first:stop])
        self.norm, self.head = (decoder.norm, whole.lm_head) if stop == len(decoder.layers) else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(self.norm(x))


def pipelining(kind: Any, places: Sequence[Sequence[int]]) -> Step:
    """A schedule of torch. places: the stages of each rank."""
    whole, rank = Llama(CONFIG, seed=7, dtype=torch.float32), dist.get_rank()
    count = sum(map(len, places))
    per, tokens = CONFIG.num_layers // count, WORK.global_batch_size * WORK.seq_len
    parts = {index: Part(whole, index * per, (index + 1) * per) for index in places[rank]}
    stages = [PipelineStage(part, index, count, torch.device("cpu")) for index, part in parts.items()]
    optimizer = Adam(nn.ModuleList(parts.values()))

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / tokens

    schedule = kind(stages[0] if len(stages) == 1 else stages, UNITS, loss_fn=loss_of, scale_grads=False)

    def step(ids: Tensor) -> float:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        given = (ids[:, :-1].contiguous(),) if 0 in parts else ()
        if count - 1 in parts:
            schedule.step(*given, target=ids[:, 1:].contiguous(), losses=losses)
        else:
            schedule.step(*given)
        optimizer.step()
        return sum(float(loss.detach()) for loss in losses)

    return step


def ours(plan: Plan) -> Step:
    """The same by a plan."""
    plan = replace(plan, precision=FP32, optimizer=replace(plan.optimizer, clip=False))
    executor = Executor(llama(CONFIG), plan, WORK, seed=7, settings=SETTINGS)
    return lambda ids: float(executor.step(ids).loss)


def pipeline(name: str, virtual: int = 1) -> Schedule:
    return Schedule(name=name, num_microbatches=UNITS, virtual_stages=virtual)


HALF = Schedule(num_microbatches=UNITS // 2)
CASES: dict[str, tuple[Callable[[], Step], Plan]] = {
    "DDP": (ddp, Plan(mesh=Mesh(dp_replicate=2), schedule=HALF)),
    "FSDP2": (fsdp2, Plan(mesh=Mesh(dp_shard=2), schedule=HALF, optimizer=Optimizer(zero=3))),
    "DTensor tp": (
        dtensor,
        Plan(
            mesh=Mesh(tp=2),
            schedule=Schedule(num_microbatches=UNITS),
            layout=Layout(sequence_parallel=False),
        ),
    ),
    "pipelining 1F1B": (
        lambda: pipelining(Schedule1F1B, ((0,), (1,))),
        Plan(mesh=Mesh(pp=2), schedule=pipeline("one_f_one_b")),
    ),
    "pipelining interleaved 1F1B": (
        lambda: pipelining(ScheduleInterleaved1F1B, ((0, 2), (1, 3))),
        Plan(mesh=Mesh(pp=2), schedule=pipeline("interleaved_one_f_one_b", 2)),
    ),
    "pipelining interleaved zero bubble": (
        lambda: pipelining(ScheduleInterleavedZeroBubble, ((0, 2), (1, 3))),
        Plan(mesh=Mesh(pp=2), schedule=pipeline("interleaved_zero_bubble", 2)),
    ),
    "pipelining ZB-V": (
        lambda: pipelining(ScheduleZBVZeroBubble, ((0, 3), (1, 2))),
        Plan(mesh=Mesh(pp=2), schedule=pipeline("zero_bubble_v", 2)),
    ),
}


def batches() -> Iterator[Tensor]:
    """Ids of one step after the other."""
    generator = torch.Generator().manual_seed(0)
    shape = (WORK.global_batch_size, WORK.seq_len + 1)
    while True:
        yield torch.randint(0, CONFIG.vocab_size, shape, generator=generator)


def alone(name: str, which: str) -> int:
    """Bytes that one side takes on this rank."""
    peer, plan = CASES[name]
    given = batches()
    return taken_by((lambda: ours(plan)) if which == "ours" else peer, lambda step: step(next(given)))


def peaks(name: str, launches: int = 3) -> tuple[float, float]:
    """(ours, theirs): bytes of the rank that takes most, the median of some launches, taken in turn."""
    found: dict[str, list[int]] = {"ours": [], "theirs": []}
    for _ in range(launches):
        for which, all_found in found.items():
            all_found.append(max(launch(alone, 2, name, which).values()))
    return statistics.median(found["ours"]), statistics.median(found["theirs"])


def measured(name: str, pairs: int) -> tuple[list[float], list[float], list[float], float]:
    """(ratios of CPU-seconds, of wall time, milliseconds of theirs, largest difference of losses) on all ranks."""
    theirs, mine = CASES[name][0](), ours(CASES[name][1])
    given = batches()
    cpu, wall, taken_ms, off = list[float](), list[float](), list[float](), 0.0
    for pair in range(pairs + 3):
        ids = next(given)
        taken, losses = {}, {}
        for which, step in (("ours", mine), ("theirs", theirs))[:: 1 if pair % 2 else -1]:
            dist.barrier()
            began = time.process_time(), time.perf_counter()
            losses[which] = step(ids)
            taken[which] = torch.tensor([time.process_time() - began[0], time.perf_counter() - began[1]])
        both = torch.stack([*taken.values(), torch.tensor(list(losses.values()))[[0, 1]]])
        longest = both.clone()
        dist.all_reduce(both)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        names = list(taken)
        total, most = (dict(zip(names, x.tolist(), strict=False)) for x in (both[:2], longest[:2]))
        summed = dict(zip(losses, both[2].tolist(), strict=True))
        if pair < 3:
            off = max(off, abs(summed["ours"] - summed["theirs"]))
            continue
        cpu.append(total["ours"][0] / total["theirs"][0])
        wall.append(most["ours"][1] / most["theirs"][1])
        taken_ms.append(most["theirs"][1] * 1e3)
    return cpu, wall, taken_ms, off


def main() -> int:
    """One launch a case; prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    lines = [
        "# Steps on two processes beside PyTorch's own parallelism",
        "",
        f"`python benchmarks/runtime/against_parallel_torch.py`, {datetime.now(UTC):%Y-%m-%d}, Python "
        f"{python_version()}, torch {torch.__version__}, gloo, two processes of one thread on two cores. Llama with "
        f"{llama(CONFIG).num_parameters() / 1e6:.1f}M parameters, {WORK.global_batch_size} sequences of "
        f"{WORK.seq_len} tokens in {UNITS} microbatches, fp32, fused AdamW; {options.pairs} pairs. Ratios are ours "
        f"over theirs.",
        "",
        "| peer | CPU-seconds | 95% interval | wall time | 95% interval | theirs, ms a step | losses differ by "
        "| peak memory | theirs, MiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for name in options.cases.split(","):
        cpu, wall, taken_ms, off = launch(measured, 2, name, options.pairs)[0]
        row = [f"{middle:.3f} | {low:.3f} to {high:.3f}" for middle, low, high in map(interval, (cpu, wall))]
        mine, theirs = peaks(name)
        lines.append(
            f"| {name} | {row[0]} | {row[1]} | {statistics.median(taken_ms):.0f} | {off:.0e} "
            f"| {mine / theirs:.3f} | {theirs / 2**20:.0f} |"
        )
        print(lines[-1], flush=True)
    options.output.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
