"""Ranks killed (-9) at any action, under many plans: found how soon, said how, and whether the run ends as undisturbed.

    python benchmarks/faults/kills.py                 # 104 kills, results/faults.md
    python benchmarks/faults/kills.py --count 8       # one for each plan

Each run trains a small llama, with a checkpoint every two steps and one restart. A rank, a step and a row of its
Program are drawn from the number of the kill; one in eight is killed while it starts, one in eight while it writes a
checkpoint. The rank kills itself with SIGKILL there, which nobody can catch. "found" is from the kill until the
launcher has told what happened and begins again; "lost" the steps that are done twice. Equal means that every loss
after the restart and every tensor of the last checkpoint are those of a run that nobody killed, bit by bit.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from gnomon.errors import RunError
from gnomon.models.llama import LlamaConfig, llama
from gnomon.plans import Mesh, Optimizer, Plan, Precision, Schedule, Workload
from gnomon.runtime import Executor, Outcome, Source, TrainingJob
from gnomon.runtime.checkpoint.files import Reader, problems_of
from gnomon.runtime.checkpoint.record import newest, read_record
from gnomon.runtime.step.rows import RankRow

running: Any = import_module("gnomon.runtime.launch.run")
training: Any = import_module("gnomon.runtime.launch.train")
saving: Any = import_module("gnomon.runtime.checkpoint.save")
"""Modules whose names their rooms have for functions."""

STEPS, EVERY = 7, 2
KILL = "GNOMON_BENCHMARK_KILL"
"""Variable with what a process does to itself: `rank:place:step:row:mark`."""
CONFIG = LlamaConfig(
    name="bytes", num_layers=4, hidden_size=32, num_heads=2, num_kv_heads=2, head_dim=16, ffn_size=64, vocab_size=256
)
FP32 = Precision(param="fp32", compute="fp32", grad="fp32", reduce="fp32", master="none", states="fp32")
ONE = Schedule(num_microbatches=1)
PLANS = {
    "dp 2": Plan(mesh=Mesh(dp_shard=2), schedule=ONE, precision=FP32),
    "zero 1": Plan(mesh=Mesh(dp_shard=2), schedule=ONE, precision=FP32, optimizer=Optimizer(zero=1)),
    "zero 3": Plan(mesh=Mesh(dp_shard=2), schedule=ONE, precision=FP32, optimizer=Optimizer(zero=3)),
    "tp 2": Plan(mesh=Mesh(tp=2), schedule=ONE, precision=FP32),
    "pp 2, 1f1b": Plan(mesh=Mesh(pp=2), schedule=Schedule(name="one_f_one_b", num_microbatches=4), precision=FP32),
    "pp 2, zero bubble": Plan(
        mesh=Mesh(pp=2), schedule=Schedule(name="zero_bubble_h1", num_microbatches=4), precision=FP32
    ),
    "pp 2, interleaved": Plan(
        mesh=Mesh(pp=2),
        schedule=Schedule(name="interleaved_one_f_one_b", virtual_stages=2, num_microbatches=4),
        precision=FP32,
    ),
    "pp 2 x dp 2": Plan(
        mesh=Mesh(pp=2, dp_shard=2), schedule=Schedule(name="one_f_one_b", num_microbatches=2), precision=FP32
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What became of one kill."""

    plan: str
    place: str
    found_s: float
    lost: int
    message: str
    equal: bool


def killing(job: TrainingJob) -> Outcome:
    """`train`, in a process that kills itself where KILL says, once."""
    rank, place, step, row, mark = os.environ[KILL].split(":", 4)
    if int(rank) == int(os.environ["RANK"]) and not Path(mark).exists():
        _arm(place, int(step), int(row), Path(mark))
    outcome: Outcome = training.train(job)
    return outcome


def _arm(place: str, step: int, row: int, mark: Path) -> None:
    def die() -> None:
        mark.write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

    if place == "start":
        die()
    if place == "saving":
        write = saving.write_file

        def cut_off(path: Path, tensors: object) -> object:
            if path.parent.name != ".step-000002.partial":  # a checkpoint is there already
                path.write_bytes(bytes(99))
                die()
            return write(path, tensors)

        saving.write_file = cut_off
        return
    do, steps = Executor._do, [0]

    def done(self: Executor, one: RankRow) -> None:
        if one is self.rows[0]:
            steps[0] += 1
        if steps[0] == step and one is self.rows[row % len(self.rows)]:
            die()
        do(self, one)

    Executor._do = done  # type: ignore[method-assign]


@contextlib.contextmanager
def _told() -> Iterator[list[float]]:
    """Takes when the launcher has told of a failure."""
    at: list[float] = []
    ended = running.ended

    def noting(*args: object, **more: object) -> RunError:
        result = ended(*args, **more)  # type: ignore[arg-type]
        at.append(time.time())
        return result

    with patch.object(running, "ended", noting):
        yield at


def tensors(path: Path) -> dict[str, torch.Tensor]:
    reader = Reader(path, read_record(path))
    return {name: reader.whole(name) for name in reader.by_name}


def job(folder: Path, name: str, at: str) -> TrainingJob:
    source = Source(path=folder / "text", cache=folder / "tokens")
    work = Workload(global_batch_size=8, seq_len=32)
    given = TrainingJob(graph=llama(CONFIG), plan=PLANS[name], workload=work, steps=STEPS, data=source, quiet=True)
    return replace(given, checkpoints=folder / name / at, checkpoint_every=EVERY, max_restarts=1)


def kill(number: int, folder: Path, whole: dict[str, tuple[Outcome, dict[str, torch.Tensor]]]) -> Found:
    draw = random.Random(number)
    name = list(PLANS)[number % len(PLANS)]
    if name not in whole:
        undisturbed = running.run(job(folder, name, "whole"))
        assert undisturbed.checkpoint is not None
        whole[name] = undisturbed, tensors(undisturbed.checkpoint)
    place = ("start", "saving", *["row"] * 6)[draw.randrange(8)]
    rank, step, row = draw.randrange(PLANS[name].world_size), draw.randint(1, STEPS), draw.randrange(10**6)
    mark = folder / f"{number}.mark"
    asked = job(folder, name, str(number))
    assert asked.checkpoints is not None
    err = io.StringIO()
    with (
        patch.dict(os.environ, {KILL: f"{rank}:{place}:{step}:{row}:{mark}"}),
        patch.object(running, "train", killing),
        _told() as told,
        contextlib.redirect_stderr(err),
    ):
        outcome = running.run(asked)
    reference, same = whole[name]
    last = newest(asked.checkpoints)
    assert last is not None and not problems_of(last)
    after = tensors(last)
    losses = [record.loss for record in reference.records[outcome.resumed_from :]]
    equal = [record.loss for record in outcome.records] == losses and all(
        torch.equal(after[key], same[key]) for key in same
    )
    reached = {"start": 0, "saving": outcome.resumed_from + EVERY, "row": step - 1}[place]
    return Found(
        plan=name,
        place=place,
        found_s=told[0] - float(mark.read_text()),
        lost=max(0, reached - outcome.resumed_from),
        message=err.getvalue().strip(),
        equal=equal,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=104)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    rows: list[Found] = []
    whole: dict[str, tuple[Outcome, dict[str, torch.Tensor]]] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "text").mkdir()
        for i in range(60):
            (folder / f"text/{i}.txt").write_text(f"the loss goes down, line {i % 7} of the text. " * 40)
        for number in range(options.first, options.first + options.count):
            rows.append(kill(number, folder, whole))
            one = rows[-1]
            print(
                f"{number:4} {one.plan:18} {one.place:7} found in {one.found_s:6.2f} s, lost {one.lost}, "
                f"{'equal' if one.equal else 'NOT EQUAL'}",
                flush=True,
            )
            if not re.search(r"rank \d of \d was killed by SIGKILL, so the run ended", one.message):
                print(f"     said: {one.message}", flush=True)
    print("\nplan                kills  found median  worst  lost mean  waits told  equal")
    for name in (*PLANS, "all"):
        mine = [one for one in rows if name in (one.plan, "all")]
        if mine:
            seconds = [one.found_s for one in mine]
            told = sum("waited" in one.message for one in mine)
            print(
                f"{name:18} {len(mine):6} {median(seconds):11.2f} s {max(seconds):4.1f} s "
                f"{sum(one.lost for one in mine) / len(mine):9.1f} {told:11} {sum(one.equal for one in mine):6}"
            )
    print(f"\nan example: {rows[-1].message}")
    return 0 if all(one.equal for one in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
