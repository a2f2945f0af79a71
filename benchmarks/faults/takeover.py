"""Pipeline ranks killed (-9) at any action under Bamboo: the rank before takes over within the step.

    python benchmarks/faults/takeover.py               # 104 kills, results/takeover.md
    python benchmarks/faults/takeover.py --count 6     # one for each plan

A rank, a step and a row of its Program, the update and the meeting at the end of the step among them, are drawn from
the number of the kill; one in eight is killed while it validates. Every other run has no process in the place of the
lost one (`--max-restarts 0`), and one in five loses two ranks that are not neighbours, in the same step or later.
"noticed" is from the kill until the last survivor has found out, "going" until all are in the step again that was cut
off. Equal means that losses, norms and the loss on held-out text after the last step are those of a run that nobody
killed, bit by bit. A rank and the one with its copy are killed together `--pairs N` times: all go back to
a checkpoint.
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

from gnomon import runtime
from gnomon.lowering.edit import Row
from gnomon.models.llama import llama
from gnomon.plans import Mesh, Pass, Plan, Precision, Saved, Schedule, Workload
from gnomon.runtime import Outcome, Source, TrainingJob
from gnomon.runtime.launch.launcher import run_scheme
from gnomon.runtime.launch.membership import Epoch, Membership
from gnomon.runtime.launch.redundancy import ProcessWork
from gnomon.runtime.launch.takeover import TAKEOVER

STEPS = 6
KILLS = "GNOMON_BENCHMARK_TAKEOVER"
"""Variable: `process place step row` of each that is to die, with `;` between them, then `|` and the file of marks."""


def _plan(pp: int, dp: int = 1, count: int = 4, **more: Any) -> Plan:
    order = Schedule(name="one_f_one_b", num_microbatches=count, passes=(Pass(name="bamboo"),))
    return Plan(**{"mesh": Mesh(pp=pp, dp_shard=dp), "schedule": order, "precision": kills.FP32, **more})


PLANS = {
    "pp 2": _plan(2),
    "pp 3": _plan(3),
    "pp 4": _plan(4),
    "pp 4, 8 microbatches": _plan(4, count=8),
    "pp 2 x dp 2": _plan(2, 2, count=2),
    "pp 3 x dp 2, bf16, recompute": _plan(3, 2, precision=Precision(), saved=Saved(preset="full")),
}
GRAPH = llama(kills.CONFIG)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run with one or two kills."""

    plan: str
    kills: str
    noticed_s: float
    going_s: float
    within: bool
    """Whether a step that was cut off went on."""
    equal: bool
    back: bool
    """Whether all went back to a checkpoint."""


def killing(job: TrainingJob, membership: Membership) -> Outcome | None:
    """`train_with_copies`, in a process that kills itself where the variable says."""
    chosen, _, name = os.environ[KILLS].partition("|")
    mark, note = Path(name), Membership.note

    def noted(self: Membership, what: str, epoch: Epoch) -> None:
        _line(mark, f"{what} {time.time()}")
        note(self, what, epoch)

    from_takeover: Any = import_module("gnomon.runtime.launch.takeover")
    Membership.note = noted  # type: ignore[method-assign]
    from_takeover._say = lambda line: _line(mark, f"said {line}")
    for kill in chosen.split(";"):
        process, place, step, row = kill.split()
        if int(process) == membership.process:
            _arm(place, int(step), int(row), mark)
    outcome: Outcome | None = from_takeover.train_with_copies(job, membership)
    return outcome


def _arm(place: str, step: int, row: int, mark: Path) -> None:
    def die() -> None:
        _line(mark, f"died {time.time()}")
        os.kill(os.getpid(), signal.SIGKILL)

    if place == "validation":
        evaluated: Any = import_module("gnomon.runtime.launch.takeover")
        forward, times = evaluated.forward_loss, [0]

        def dies(executor: Any) -> Any:
            times[0] += 1
            return die() if times[0] >= step // 2 else forward(executor)

        evaluated.forward_loss = dies
        return
    do, total = ProcessWork.row, ProcessWork.total

    def done(self: ProcessWork, one: Row) -> None:
        if self.now.number >= step and one is self.rows[min(row % (len(self.rows) + 1), len(self.rows) - 1)]:
            if row % (len(self.rows) + 1) < len(self.rows):
                die()
        do(self, one)

    def ended(self: ProcessWork) -> Any:
        if self.now.number >= step and row % (len(self.rows) + 1) == len(self.rows):
            die()
        return total(self)

    ProcessWork.row, ProcessWork.total = done, ended  # type: ignore[method-assign]


def _line(mark: Path, text: str) -> None:
    with mark.open("a") as file:
        file.write(f"{text}\n")


def job(folder: Path, name: str) -> TrainingJob:
    source = Source(path=folder / "text", cache=folder / "tokens")
    work = Workload(global_batch_size=8, seq_len=32)
    return TrainingJob(
        graph=GRAPH, plan=PLANS[name], workload=work, steps=STEPS, data=source, quiet=True, validate_every=2
    )


def bits(outcome: Outcome) -> list[tuple[int, float, str, float | None]]:
    """All that a run tells of its steps, but for the time."""
    return [(r.step, r.loss, repr(r.grad_norm), r.validation_loss) for r in outcome.records]


def one_run(asked: TrainingJob, name: str, chosen: str, mark: Path, whole: Outcome, *, talk: bool) -> Run:
    with (
        patch.dict(os.environ, {KILLS: f"{chosen}|{mark}"}),
        contextlib.redirect_stderr(sys.stdout if talk else io.StringIO()),
    ):
        outcome = run_scheme(asked, replace(TAKEOVER, train=killing))
    if talk:
        print(mark.read_text())
    lines = [line.split(maxsplit=1) for line in mark.read_text().splitlines()]
    times = [(what, float(at)) for what, at in lines if what != "said"]
    died = max(at for what, at in times if what == "died")
    after = {name: [at - died for what, at in times if what == name and at > died] for name in ("noticed", "going")}
    said = mark.read_text()
    others = PLANS[name].world_size - chosen.count(";") - 1
    first = sorted(after["going"])[:others]
    return Run(
        plan=name,
        kills=chosen,
        noticed_s=max(after["noticed"], default=float("nan")),
        going_s=max(first, default=float("nan")),
        within=" within step " in said,
        equal=bits(outcome) == bits(whole)[outcome.resumed_from :],
        back="all go back to step" in said,
    )


def drawn(number: int, name: str, *, pair: bool) -> tuple[str, int]:
    """(kills, restarts) of a number."""
    draw, plan = random.Random(number), PLANS[name]
    pp, ranks = plan.mesh.pp, plan.world_size
    place = "validation" if draw.randrange(8) == 0 else "row"
    first, step, row = draw.randrange(ranks), draw.randint(2, STEPS - 1), draw.randrange(10**6)
    chosen = [f"{first} {place} {step} {row}"]
    restarts = number % 2
    data = ranks // pp
    stage, position = divmod(first, data)
    apart = [
        other
        for other in range(ranks)
        if other != first and (other % data != position or _apart(stage, other // data, pp))
    ]
    if pair:
        chosen.append(f"{((stage + 1) % pp) * data + position} row {step} {row}")
        restarts = 2
    elif number % 5 == 0 and apart:
        chosen.append(f"{draw.choice(apart)} row {draw.randint(step, STEPS - 1)} {draw.randrange(10**6)}")
    return ";".join(chosen), restarts


def _apart(one: int, other: int, pp: int) -> bool:
    return (one - other) % pp not in (0, 1, pp - 1)


def _show(runs: list[Run]) -> None:
    print(f"\nload of this machine: {os.getloadavg()[1]:.1f}")
    print("plan                           kills  within a step  noticed, median  worst  going, median  worst  equal")
    for name in (*PLANS, "all"):
        mine = [run for run in runs if name in (run.plan, "all")]
        if not mine:
            continue
        noticed, going = (
            [x for x in xs if x == x] or [float("nan")]
            for xs in ([r.noticed_s for r in mine], [r.going_s for r in mine])
        )
        count = sum(run.kills.count(";") + 1 for run in mine)
        print(
            f"{name:30} {count:5} {sum(run.within for run in mine):8} of {len(mine):3} {median(noticed):14.2f} s "
            f"{max(noticed):4.2f} s {median(going):12.2f} s {max(going):4.2f} s "
            f"{sum(run.equal for run in mine):4} of {len(mine)}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=104)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--pairs", type=int, default=0)
    parser.add_argument("--talk", action="store_true", help="say what the runs say")
    options = parser.parse_args()
    runs: list[Run] = []
    whole: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory() as place_:
        folder = Path(place_)
        (folder / "text").mkdir()
        for i in range(60):
            (folder / f"text/{i}.txt").write_text(f"the loss goes down, line {i % 7} of the text. " * 40)
        numbers = [(n, False) for n in range(options.first, options.first + options.count)]
        for number, pair in [*numbers, *((n, True) for n in range(options.pairs))]:
            name = list(PLANS)[number % len(PLANS)]
            if pair and PLANS[name].mesh.pp == 2:
                name = "pp 3"
            asked = job(folder, name)
            if name not in whole:
                whole[name] = runtime.run(asked)
            chosen, restarts = drawn(number, name, pair=pair)
            given = replace(asked, max_restarts=restarts)
            if pair:
                given = replace(given, checkpoints=folder / f"saved{number}", checkpoint_every=1)
            run = one_run(given, name, chosen, folder / f"{number}{pair}.mark", whole[name], talk=options.talk)
            runs.append(run)
            told = "within a step" if run.within else "between steps"
            told = "back to a checkpoint" if run.back else told
            print(
                f"{number:3} {name:30} {chosen:28} {told}; noticed {run.noticed_s:.2f} s, going {run.going_s:.2f} s; "
                f"{'equal' if run.equal else 'NOT EQUAL'}",
                flush=True,
            )
    _show(runs)
    return 0 if all(run.equal for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
