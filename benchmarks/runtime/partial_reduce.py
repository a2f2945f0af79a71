"""Partial reduce with one worker four times as slow: throughput beside an all-reduce, loss beside data parallelism.

    PYTHONPATH=src python benchmarks/runtime/partial_reduce.py [--workers 16] [--steps 100] [--write]

Devices are imitated: every worker sleeps to the end of `DEVICE_S` seconds a step beside its real computation, the slow
one for SLOWER times as long, since cores that all share would lend the slow one's time to the others. Models, data,
averages and processes are real. Prints the part of the speed that a slow worker costs, measured and as the same
controller is played (`replay`), for groups of two and of all (which is what an all-reduce waits for); and the loss on
held-out text after equal steps and after equal time.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import median

from gnomon.methods.partial_reduce import replay, settings_of
from gnomon.models.llama import LlamaConfig, llama
from gnomon.plans import Mesh, Pass, Plan, Precision, Schedule, Workload
from gnomon.runtime import TrainingJob
from gnomon.runtime.launch.run import run
from gnomon.runtime.launch.tickets import PartialRun, run_partial_reduce

DEVICE_S, SLOWER = 0.8, 4.0
RESULT = Path(__file__).parents[1] / "results" / "partial_reduce.md"
MODEL = LlamaConfig(
    name="bytes", num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=4, head_dim=16, ffn_size=128, vocab_size=256
)
FP32 = Precision(param="fp32", compute="fp32", grad="fp32", reduce="fp32", master="none", states="fp32")


def job(workers: int, group: int, steps: int, *, passes: bool = True, weights: str = "constant") -> TrainingJob:
    """A small model on the Python standard library's source, two rows for each worker."""
    given = Pass(name="partial_reduce", params=(("group", group), ("weights", weights)))
    schedule = Schedule(num_microbatches=1, passes=(given,) if passes else ())
    plan = Plan(mesh=Mesh(dp_replicate=workers), schedule=schedule, precision=FP32)
    made = TrainingJob(
        graph=llama(MODEL),
        plan=plan,
        workload=Workload(global_batch_size=2 * workers, seq_len=64),
        steps=steps,
        quiet=True,
    )
    return replace(made, settings=replace(made.settings, lr=1e-3))


def told(workers: int, group: int, steps: int, slower: float, weights: str = "constant") -> PartialRun:
    """One run. slower: times that the last worker takes."""
    pauses = [DEVICE_S] * (workers - 1) + [DEVICE_S * slower]
    return run_partial_reduce(job(workers, group, steps, weights=weights), pause_s=pauses)


def played(workers: int, group: int, steps: int, slower: float, compute_s: float) -> float:
    """Seconds of the same by the controller alone."""
    times = [DEVICE_S + compute_s] * (workers - 1) + [DEVICE_S * slower + compute_s]
    return replay(settings_of(job(workers, group, steps).plan), times, steps=steps).seconds


def throughput(workers: int, steps: int, repeats: int) -> list[str]:
    """Rows of the first table."""
    rows = []
    for group in (2, workers):
        alike, slow = [], []
        for _ in range(repeats):  # interleaved
            alike.append(told(workers, group, steps, 1.0))
            slow.append(told(workers, group, steps, SLOWER))
        kept = [a.seconds / b.seconds for a, b in zip(alike, slow, strict=True)]
        compute_s = max(0.0, median(a.seconds for a in alike) / steps - DEVICE_S)
        expected = played(workers, group, steps, 1.0, compute_s) / played(workers, group, steps, SLOWER, compute_s)
        average = median(one.average_s for one in slow) * 1e3
        name = "all (an all-reduce)" if group == workers else str(group)
        steps_s = [median(one.seconds for one in runs) / steps for runs in (alike, slow)]
        rows.append(
            f"| {name} | {steps_s[0]:.3f} | {steps_s[1]:.3f} | {1 - median(kept):.1%} | {1 - expected:.1%} "
            f"| {1 - min(kept):.1%} | {average:.1f} | {slow[-1].tickets[-1]} of {steps} |"
        )
        print(rows[-1], flush=True)
    return rows


def convergence(workers: int, steps: int) -> list[str]:
    """Rows of the second: the loss on held-out text after equal steps, and what each takes with a slow worker."""
    rows = []
    plain = run(job(workers, workers, steps, passes=False)).records[-1]
    step_s = DEVICE_S * SLOWER
    rows.append(
        f"| data parallelism (all-reduce of gradients) | {plain.validation_loss:.3f} | {step_s * steps:.0f} (waits) |"
    )
    print(rows[-1], flush=True)
    equal_time = None
    for weights in ("constant", "dynamic"):
        result = told(workers, 2, steps, SLOWER, weights)
        loss = result.outcome.records[-1].validation_loss
        rows.append(f"| partial reduce, groups of 2, {weights} weights | {loss:.3f} | {result.seconds:.0f} |")
        print(rows[-1], flush=True)
        equal_time = equal_time or max(1, round(result.seconds / step_s))
    short = run(job(workers, workers, equal_time or 1, passes=False)).records[-1]
    rows.append(
        f"| data parallelism, the {equal_time} steps that it does in the time of partial reduce | "
        f"{short.validation_loss:.3f} | {step_s * (equal_time or 1):.0f} (waits) |"
    )
    print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--long", type=int, default=300, help="steps of the runs whose losses are compared")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    command = f"--workers {options.workers} --steps {options.steps} --repeats {options.repeats} --long {options.long}"
    lines = [
        "# Partial reduce beside waiting for all",
        "",
        f"{date.today()}, `PYTHONPATH=src python benchmarks/runtime/partial_reduce.py {command} --write`, two cores, "
        f"gloo. {options.workers} workers, the last one {SLOWER:g} times as slow. Devices are imitated: every worker "
        f"sleeps {DEVICE_S} s in a step beside its real computation, the slow one {DEVICE_S * SLOWER:g} s; processes, "
        f"model, text and averages are real. Medians of interleaved pairs; *costs* is the part of the throughput that "
        f"the slow worker takes away, of which {(1 - 1 / SLOWER) / options.workers:.1%} is its own work.",
        "",
        "| group | step, all alike (s) | step, one slow (s) | costs | played | worst pair | an average (ms) "
        "| tickets of the slow one |",
        "|---|---|---|---|---|---|---|---|",
        *throughput(options.workers, options.steps, options.repeats),
        "",
        f"Loss on held-out text (the Python standard library's source, bytes) after {options.long} steps of as many "
        f"rows, one worker slow; each result is one run. Data parallelism is run without sleeping, and its time is "
        f"that of the slow worker.",
        "",
        "| | loss | seconds |",
        "|---|---|---|",
        *convergence(options.workers, options.long),
    ]
    if options.write:
        RESULT.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
