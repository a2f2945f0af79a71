"""Ranks killed (-9) anywhere: those left keep their processes and take copies in memory, beside starting again.

    python benchmarks/faults/survivors.py               # 104 kills, results/survivors.md
    python benchmarks/faults/survivors.py --count 9     # one for each plan

Each kill is run twice in turn, with the same rank, step and row: with copies in the memory of the next rank after every
step (`--memory-checkpoint-every 1`), and as before, with a checkpoint on disk every two steps from which all processes
start again. Rank, step and place are drawn from the number of the kill: a row of the Program, while a process starts,
or while copies are made. "noticed" is from the kill until the last survivor has found out; "back" until all ranks begin
the step again that was cut off, so with what is done twice. Equal means that losses, norms and the loss on held-out
text after the last step are those of a run that nobody killed, bit by bit.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import kills

from gnomon.models.llama import llama
from gnomon.models.mixtral import MixtralConfig, mixtral
from gnomon.plans import Mesh, Optimizer, Plan, Precision, Schedule, Workload
from gnomon.runtime import Outcome, Source, TrainingJob
from gnomon.runtime.checkpoint.in_memory import MemoryCheckpoint
from gnomon.runtime.launch.launcher import run_scheme
from gnomon.runtime.launch.membership import Epoch, Membership
from gnomon.runtime.launch.survivors import SURVIVORS

training: Any = import_module("gnomon.runtime.launch.train")
launching: Any = import_module("gnomon.runtime.launch.run")

STEPS, EVERY = 7, 2
EXPERTS = mixtral(
    MixtralConfig(
        name="experts", num_layers=2, hidden_size=32, num_heads=2, num_kv_heads=2, head_dim=16, expert_ffn_size=64,
        vocab_size=256, num_experts=4, experts_per_token=2,
    )
)  # fmt: skip
DENSE, F32, ONE = llama(kills.CONFIG), kills.FP32, kills.ONE
TWO = Schedule(name="one_f_one_b", num_microbatches=2)
MIXED = Precision()
PLANS = {
    "zero 1, bf16": Plan(mesh=Mesh(dp_shard=2), schedule=ONE, precision=MIXED, optimizer=Optimizer(zero=1)),
    "zero 2": Plan(mesh=Mesh(dp_shard=2), schedule=ONE, precision=F32, optimizer=Optimizer(zero=2)),
    "zero 3": Plan(mesh=Mesh(dp_shard=2), schedule=ONE, precision=F32, optimizer=Optimizer(zero=3)),
    "tp 2 x dp 2, zero 3": Plan(mesh=Mesh(tp=2, dp_shard=2), schedule=ONE, precision=F32, optimizer=Optimizer(zero=3)),
    "pp 2, interleaved": kills.PLANS["pp 2, interleaved"],
    "pp 2 x dp 2": kills.PLANS["pp 2 x dp 2"],
    "pp 2 x tp 2": Plan(mesh=Mesh(pp=2, tp=2), schedule=TWO, precision=F32),
    "cp 2": Plan(mesh=Mesh(cp=2), schedule=ONE, precision=F32),
    "dp 2, experts over 2": Plan(mesh=Mesh(dp_shard=2, ep=2), schedule=ONE, precision=F32),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One of the two runs of a kill."""

    noticed_s: float
    back_s: float
    equal: bool


def surviving(job: TrainingJob, membership: Membership) -> Outcome | None:
    """`train_surviving`, in a process that kills itself where the variable says."""
    rank, place, step, row, mark = os.environ[kills.KILL].split(":", 4)
    _write_down(Path(mark))
    note = Membership.note

    def noted(self: Membership, what: str, epoch: Epoch) -> None:
        _line(Path(mark), f"{what} {time.time()}")
        note(self, what, epoch)

    Membership.note = noted  # type: ignore[method-assign]
    if int(rank) == membership.process and not Path(mark).exists():
        if place == "copy":
            _dies_in_copy(int(step), Path(mark))
        else:
            kills._arm(place, int(step), int(row), Path(mark))
    from_survivors: Any = import_module("gnomon.runtime.launch.survivors")
    outcome: Outcome | None = from_survivors.train_surviving(job, membership)
    return outcome


def restarting(job: TrainingJob) -> Outcome:
    """`train`, in the same way; there are no copies, so the rank dies at the step's first row there."""
    rank, place, step, row, mark = os.environ[kills.KILL].split(":", 4)
    _write_down(Path(mark))
    if int(rank) == int(os.environ["RANK"]) and not Path(mark).exists():
        if place == "copy":
            place, step, row = "row", str(int(step) + 1), "0"
        kills._arm(place, int(step), int(row), Path(mark))
    outcome: Outcome = training.train(job)
    return outcome


def _dies_in_copy(step: int, mark: Path) -> None:
    take = MemoryCheckpoint.take

    def died(self: MemoryCheckpoint, at: int) -> None:
        if at == step:
            mark.write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        take(self, at)

    MemoryCheckpoint.take = died  # type: ignore[method-assign]


def _write_down(mark: Path) -> None:
    """Has every step's beginning written beside the mark."""
    step_of = training.Loop.step

    def written(self: Any, step: int) -> None:
        _line(mark, f"step-{step} {time.time()}")
        step_of(self, step)

    training.Loop.step = written


def _line(mark: Path, text: str) -> None:
    with mark.with_suffix(".log").open("a") as file:
        file.write(f"{text}\n")


def job(folder: Path, name: str, at: str) -> TrainingJob:
    source = Source(path=folder / "text", cache=folder / "tokens")
    graph, work = EXPERTS if "experts" in name else DENSE, Workload(global_batch_size=8, seq_len=32)
    given = TrainingJob(graph=graph, plan=PLANS[name], workload=work, steps=STEPS, data=source, quiet=True)
    return replace(given, checkpoints=folder / name / at, max_restarts=1)


def bits(outcome: Outcome) -> list[tuple[int, float, str, float | None]]:
    """All that a run tells of its steps, but for the time."""
    return [(r.step, r.loss, repr(r.grad_norm), r.validation_loss) for r in outcome.records]


def one_run(asked: TrainingJob, kill: str, mark: Path, whole: Outcome, again: int) -> Run:
    """again: the step that is cut off."""
    err = io.StringIO()
    with (
        patch.dict(os.environ, {kills.KILL: f"{kill}:{mark}"}),
        patch.object(launching, "train", restarting),
        kills._told() as told,
        contextlib.redirect_stderr(err),
    ):
        in_memory = asked.memory_checkpoint_every > 0
        outcome = run_scheme(asked, replace(SURVIVORS, train=surviving)) if in_memory else launching.run(asked)
    died = float(mark.read_text())
    lines = [line.split() for line in mark.with_suffix(".log").read_text().splitlines()]
    after = [(what, float(at) - died) for what, at in lines if float(at) > died]
    noticed = [at for what, at in after if what == "noticed"] if in_memory else [told[0] - died]
    back = [at for what, at in after if what == f"step-{again}"]
    steps = asked.plan.world_size
    return Run(
        noticed_s=max(noticed, default=float("nan")),
        back_s=max(back[:steps]) if len(back) >= steps else float("nan"),
        equal=bits(outcome) == bits(whole)[outcome.resumed_from :],
    )


def _show(rows: list[tuple[str, str, Run, Run]]) -> None:
    """The table of all kills."""
    print(f"\nload of this machine: {os.getloadavg()[1]:.1f}")
    print("plan                   kills  noticed, median  worst  back in memory  from disk  ratio  equal")
    for name in (*PLANS, "all"):
        chosen = [(a, b) for plan, _, a, b in rows if name in (plan, "all")]
        if not chosen:
            continue
        noticed = [a.noticed_s for a, _ in chosen if a.noticed_s == a.noticed_s] or [float("nan")]
        both = [(a.back_s, b.back_s) for a, b in chosen if a.back_s == a.back_s and b.back_s == b.back_s]
        memory, disk = (median([pair[i] for pair in both] or [float("nan")]) for i in (0, 1))
        equal = sum(a.equal and b.equal for a, b in chosen)
        print(
            f"{name:22} {len(chosen):5} {median(noticed):14.2f} s {max(noticed):4.2f} s {memory:13.2f} s {disk:8.2f} s "
            f"{disk / memory:6.1f} {equal:6}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=104)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    rows: list[tuple[str, str, Run, Run]] = []
    whole: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory() as place_:
        folder = Path(place_)
        (folder / "text").mkdir()
        for i in range(60):
            (folder / f"text/{i}.txt").write_text(f"the loss goes down, line {i % 7} of the text. " * 40)
        for number in range(options.first, options.first + options.count):
            draw, name = random.Random(number), list(PLANS)[number % len(PLANS)]
            place = ("start", "copy", *["row"] * 6)[draw.randrange(8)]
            rank, step = draw.randrange(PLANS[name].world_size), draw.randint(2, STEPS - 1)
            if name not in whole:
                whole[name] = launching.run(job(folder, name, "whole"))
            kill, again = (
                f"{rank}:{place}:{step}:{draw.randrange(10**6)}",
                {"start": 1, "copy": step + 1}.get(place, step),
            )
            mine = replace(job(folder, name, f"{number}m"), memory_checkpoint_every=1)
            disk = replace(job(folder, name, f"{number}d"), checkpoint_every=EVERY)
            runs = [
                one_run(asked, kill, folder / f"{number}{how}.mark", whole[name], again)
                for asked, how in ((mine, "m"), (disk, "d"))
            ]
            rows.append((name, place, runs[0], runs[1]))
            told = "; ".join(
                f"{how}: noticed {one.noticed_s:.2f} s, back {one.back_s:.2f} s, "
                f"{'equal' if one.equal else 'NOT EQUAL'}"
                for how, one in zip(("in memory", "from disk"), runs, strict=True)
            )
            print(f"{number:3} {name:22} {place:5} {told}", flush=True)
    _show(rows)
    return 0 if all(a.equal and b.equal for _, _, a, b in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
