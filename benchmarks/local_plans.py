"""Predicted against measured for plans that run on this machine: `python benchmarks/local_plans.py [-o FILE]`.

Each of PLANS trains a byte-level Llama of a few million parameters on one or two processes of one thread. Before and
after each run the machine is calibrated, and the plan is predicted from the median of both, so that what else the
machine does changes both sides. Prints predicted and measured step (median), error, and how far the steps spread; with
`--differences` the actions that explain the largest errors. No number of a prediction is fitted to a run.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import numpy as np
import torch

from gnomon.hardware import measured_cluster
from gnomon.models.llama import LlamaConfig, llama
from gnomon.plans import Layout, Mesh, Optimizer, Plan, Precision, Saved, Schedule, Workload
from gnomon.prediction import Prediction, predict
from gnomon.runtime import Executor
from gnomon.runtime.calibrate.calibrate import Budget, Times, assembled, measure, memory_bytes, pooled, relative_iqr
from gnomon.runtime.processes.launch import launch
from gnomon.software import stack
from gnomon.timeline import Timeline, peaks
from gnomon.timeline.difference import difference

CONFIG = LlamaConfig(
    name="bytes-5m",
    num_layers=6,
    hidden_size=256,
    num_heads=8,
    num_kv_heads=4,
    head_dim=32,
    ffn_size=704,
    vocab_size=256,
)
STATE = f"Load average {os.getloadavg()[0]:.1f} when it began, nice {os.nice(0)}."
"""What else the machine did."""
UNCOUNTED = ("temporary", "workspace", "overhead")
"""What a prediction counts and the runtime's account does not: inside an action only, and the allocator's own."""
SLICES = 3
"""Calibration and steps take turns so many times."""
WORK = Workload(global_batch_size=8, seq_len=256)
FP32 = Precision(param="fp32", compute="fp32", grad="fp32", reduce="fp32", master="none", states="fp32")


def plan(
    *, name: str = "one_f_one_b", count: int = 4, virtual: int = 1, v: bool = False, zero: int = 0, saved: str = "none",
    sp: bool = False, precision: Precision = FP32, **axes: int,
) -> Plan:  # fmt: skip
    """A plan of the table."""
    return Plan(
        mesh=Mesh(**axes),
        schedule=Schedule(
            name=name,  # type: ignore[arg-type]
            num_microbatches=count,
            virtual_stages=virtual,
            placement="v" if v else "round_robin",
        ),
        optimizer=Optimizer(zero=zero),  # type: ignore[arg-type]
        layout=Layout(sequence_parallel=sp),
        saved=Saved(preset=saved),  # type: ignore[arg-type]
        precision=precision,
    )


PLANS: dict[str, Plan] = {
    "one process": plan(count=1),
    "one process, 8 microbatches": plan(count=8),
    "one process, full recompute": plan(count=2, saved="full"),
    "one process, selective recompute": plan(count=2, saved="selective"),
    "dp 2": plan(dp_replicate=2, count=1),
    "dp 2, 4 microbatches": plan(dp_replicate=2, count=4),
    "ZeRO 1": plan(dp_shard=2, zero=1, count=2),
    "ZeRO 2": plan(dp_shard=2, zero=2, count=2),
    "ZeRO 3": plan(dp_shard=2, zero=3, count=2),
    "tp 2": plan(tp=2, count=2),
    "tp 2, sequence": plan(tp=2, sp=True, count=2),
    "tp 2, sequence, full recompute": plan(tp=2, sp=True, count=2, saved="full"),
    "pp 2, gpipe": plan(pp=2, name="gpipe"),
    "pp 2, 1F1B": plan(pp=2),
    "pp 2, 1F1B, 8 microbatches": plan(pp=2, count=8),
    "pp 2, interleaved": plan(pp=2, name="interleaved_one_f_one_b", virtual=3),
    "pp 2, zero bubble": plan(pp=2, name="zero_bubble_h1"),
}
"""What is run, by name: 8 sequences of 256 bytes a step in each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one plan did on one rank."""

    steps: tuple[float, ...]
    """Seconds of each step after the warm-up."""
    timeline: Timeline
    """Of a middling step, by rank class."""
    held: Timeline
    """Of one more step, with memory."""
    calibrated: list[Times]
    """Repeats of the calibrations before, between and after the steps."""


def execute(config: LlamaConfig, plan: Plan, work: Workload, budget: Budget, seconds: float) -> Run:
    """In every process: calibrate, run steps, calibrate, run steps … for about so many seconds of steps in all."""
    executor = Executor(llama(config), plan, work)
    generator = torch.Generator().manual_seed(0)
    batch = torch.randint(0, 256, (work.global_batch_size, work.seq_len + 1), generator=generator)
    for _ in range(2):
        executor.step(batch)
    visits, steps, timelines = [measure(budget)], list[float](), list[Timeline]()
    for _ in range(SLICES):
        executor.step(batch)  # what calibration left in the caches goes
        for _ in range(_agreed(seconds / SLICES, executor, batch)):
            begin = time.perf_counter()
            executor.total_loss(executor.step(batch))
            steps.append(time.perf_counter() - begin)
        timelines += [executor.per_class(executor.measured_step(batch)[1]) for _ in range(2)]
        visits.append(measure(budget))
    middle = sorted(timelines, key=lambda entry: entry.makespan_s)[len(timelines) // 2]
    held = executor.per_class(executor.measured_step(batch, memory=True)[1])
    return Run(steps=tuple(steps), timeline=middle, held=held, calibrated=pooled(visits))


def _agreed(seconds: float, executor: Executor, batch: torch.Tensor) -> int:
    """Steps that fit into so many seconds, the same number on every rank."""
    began = time.perf_counter()
    executor.step(batch)
    wanted = torch.tensor(min(max(int(seconds / (time.perf_counter() - began)), 3), 40))
    if torch.distributed.get_world_size() > 1:
        torch.distributed.broadcast(wanted, 0)
    return int(wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table."""

    name: str
    predicted_s: float
    measured_s: float
    spread: float
    peak_bytes: tuple[float, float]
    """Predicted and measured, of the rank class that holds most, but for UNCOUNTED."""
    prediction: Prediction
    timeline: Timeline

    @property
    def error(self) -> float:
        """Of the step, signed, over what was measured."""
        return self.predicted_s / self.measured_s - 1


def row(name: str, plan: Plan, budget: Budget, seconds: float) -> Row:
    """Runs and predicts one plan."""
    date = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    results = launch(execute, plan.world_size, CONFIG, plan, WORK, budget, seconds)
    runs = [results[rank] for rank in sorted(results)]
    machine = assembled([run.calibrated for run in runs], processes=len(runs), date=date)
    cluster = measured_cluster(machine, memory_bytes())
    predicted = predict(llama(CONFIG), cluster, plan, WORK, stack("gnomon"))
    return Row(
        name=name,
        peak_bytes=(accounted_bytes(predicted.timeline(steady=False)), accounted_bytes(runs[0].held)),
        predicted_s=predicted.step_s,
        measured_s=median(runs[0].steps),
        spread=relative_iqr(runs[0].steps),
        prediction=predicted,
        timeline=runs[0].timeline,
    )


def accounted_bytes(timeline: Timeline) -> float:
    """Peak of the class that holds most, of what the runtime accounts for."""
    return max(sum(size for name, size in peak.by_buffer if name not in UNCOUNTED) for peak in peaks(timeline))


def differences(row: Row) -> list[str]:
    """Seconds by class, part and kind of action, predicted and measured."""
    result = difference(row.prediction.timeline(steady=False), row.timeline)
    totals: dict[tuple[str, str, str], list[float]] = {}
    for change in result.changes:
        key = (change.worker, str(change.part), change.action.strip("0123456789"))
        one = totals.setdefault(key, [0.0, 0.0])
        one[0] += change.before_s
        one[1] += change.after_s
    lines = sorted(totals.items(), key=lambda item: -abs(item[1][1] - item[1][0]))[:8]
    return [f"    {' '.join(key):<40} predicted {1e3 * a:8.1f} ms, measured {1e3 * b:8.1f} ms" for key, (a, b) in lines]


def main() -> None:
    """The table, and the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, help="write the table as Markdown")
    parser.add_argument("--only", nargs="+", help="plans whose name holds one of these")
    parser.add_argument("--seconds", type=float, default=6.0, help="of steps a plan")
    parser.add_argument("--differences", action="store_true", help="what explains each error")
    options = parser.parse_args()
    budget = Budget(seconds=1.0, rounds=1, repeats=1, alone=False, dtypes=("fp32",))
    rows = []
    for name, plan in PLANS.items():
        if options.only and not any(part in name for part in options.only):
            continue
        rows.append(row(name, plan, budget, options.seconds))
        one = rows[-1]
        print(
            f"{name:<34} predicted {1e3 * one.predicted_s:7.1f} ms  measured {1e3 * one.measured_s:7.1f} ms  "
            f"error {100 * one.error:+6.1f} %  spread {100 * one.spread:5.1f} %  "
            f"peak {one.peak_bytes[0] / 2**20:.1f} and {one.peak_bytes[1] / 2**20:.1f} MiB",
            flush=True,
        )
        if options.differences:
            print("\n".join(differences(one)), flush=True)
    if not rows:
        parser.error(f"no plan's name holds {options.only!r}; there are: {', '.join(PLANS)}")
    print(summary(rows))
    if options.output is not None:
        options.output.write_text(markdown(rows), encoding="utf-8")


def summary(rows: list[Row]) -> str:
    """One line."""
    errors = np.abs([one.error for one in rows])
    spread = median(one.spread for one in rows)
    return (
        f"median error {100 * float(np.median(errors)):.1f} %, worst {100 * errors.max():.1f} %; "
        f"steps spread by {100 * spread:.1f} % at the median"
    )


def markdown(rows: list[Row]) -> str:
    """The table as a page."""
    result = rows[-1].prediction.assumptions
    message = next((line for line in result if line.startswith("measured on")), "")
    lines = [
        "# Plans on this machine, predicted and measured",
        "",
        "`python benchmarks/local_plans.py -o benchmarks/results/local_plans.md`: "
        f"{CONFIG.name}, {WORK.global_batch_size} x {WORK.seq_len} bytes a step, one thread a process.",
        f"Calibration and steps take turns; the last one: {message}.",
        f"{STATE} Peaks are without what lives inside an action only.",
        "",
        "| plan | predicted, ms | measured, ms | error, % | spread of steps, % | peak predicted, MiB | measured, MiB |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {one.name} | {1e3 * one.predicted_s:.0f} | {1e3 * one.measured_s:.0f} | {100 * one.error:+.1f} | "
        f"{100 * one.spread:.1f} | {one.peak_bytes[0] / 2**20:.1f} | {one.peak_bytes[1] / 2**20:.1f} |"
        for one in rows
    ]
    return "\n".join([*lines, "", summary(rows) + ".", ""])


if __name__ == "__main__":
    main()
