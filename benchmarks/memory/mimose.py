"""Layers recomputed by the length of each batch against a fixed choice: `python benchmarks/memory/mimose.py`.

A Llama of 2M parameters on this machine, one process of one thread, on docstrings of Python's standard library, one a
row, padded to the longest of a microbatch. Budgets between what the longest batch takes with all layers recomputed and
with none. Under each: Mimose, and the fixed choice that the longest batch needs (the fewest layers, by the same
measurements). Jobs take turns on the same batches; CPU-seconds of a step as ratios. Then once more with every tensor
counted: the most bytes of each step. Writes results/mimose.md. Exits with 1 where a step is above the budget, a loss
differs by a bit, or Mimose is slower. Left out: GPUs, and what allocators round.
"""

from __future__ import annotations

import argparse
import ast
import json
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from platform import python_version

import torch

import gnomon
from gnomon.methods.mimose import MARGIN, peak, recomputed
from gnomon.models.llama import LlamaConfig, llama
from gnomon.plans import Pass, Plan, Precision, Saved, SavedRule, Schedule, Workload
from gnomon.plans.select import format_layers
from gnomon.runtime.data import Corpus, Source
from gnomon.runtime.job import PreparedJob
from gnomon.runtime.layer_bytes import LiveBytes
from gnomon.runtime.stage import Batch

RESULTS = Path(__file__).resolve().parents[1] / "results" / "mimose.md"
MIB = 2**20
ROWS, SEQ_LEN, COLLECT = 2, 1024, 10
GRAPH = llama(
    LlamaConfig(
        name="llama-2m", num_layers=8, hidden_size=128, num_heads=4, num_kv_heads=4, head_dim=32, ffn_size=352,
        vocab_size=256,
    )
)  # fmt: skip
WORK = Workload(global_batch_size=ROWS, seq_len=SEQ_LEN)
FP32 = Precision(param="fp32", compute="fp32", grad="fp32", reduce="fp32", master="none", states="fp32")
SHARES = (0.25, 0.6)
"""Where budgets are between all layers recomputed and none, in the longest batch."""


def docstrings() -> Iterator[str]:
    """Of the standard library, in order of its files."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(errors="replace"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node)):
                yield text


def batches(folder: Path, steps: int) -> list[Batch]:
    path = folder / "docstrings.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in docstrings()))
    corpus = Corpus.open(Source(path=path, packing="padded", cache=folder / "tokens"))
    return [corpus.batch(step, seed=1, sequences=ROWS, seq_len=SEQ_LEN) for step in range(1, steps + 1)]


def plan(saved: Saved = Saved(), budget: int = 0) -> Plan:  # noqa: B008 (frozen)
    passes = (Pass(name="mimose", params=(("budget", f"{budget} B"), ("collect", COLLECT))),) if budget else ()
    return Plan(schedule=Schedule(num_microbatches=1, passes=passes), precision=FP32, saved=saved)


def prepared(given: Plan) -> PreparedJob:
    return gnomon.prepare(GRAPH, given, workload=WORK, seed=3)


def most_bytes(job: PreparedJob, batch: Batch) -> int:
    """Of a step, all tensors counted."""
    live, before = LiveBytes(torch.device("cpu")), job.executor.resident_bytes()
    with live:
        job.step(batch)
    return before + live.most


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """What the longest batch needs under a budget."""

    budget: int
    layers: tuple[int, ...]

    @property
    def plan(self) -> Plan:
        repeated = [layer for layer in GRAPH.layers() if layer.call.first is not None]
        chosen = [layer for layer in repeated if GRAPH.layers().index(layer) in self.layers]
        return plan(Saved(rules=tuple(SavedRule(calls=calls, preset="full") for calls in format_layers(chosen))))


def fixed_choices(trace: list[Batch]) -> list[Fixed]:
    """From the measurements of a job with a budget that is never met."""
    with prepared(plan(budget=2**40)) as job:
        mimose = job.executor.compute.mimose
        assert mimose is not None
        controller = mimose.controller
        longest = max(trace, key=lambda batch: int(batch["lengths"].max()))
        for batch in (*trace[: COLLECT + 1], longest, trace[0]):
            job.step(batch)
        assert controller.estimate is not None
        base = max(sample.base for sample in controller.samples)
        held = controller.estimate.at(controller.estimate.most)
    low, high = peak(held, controller.layers), peak(held, ())
    chosen = []
    for share in SHARES:
        budget = int((base + low + share * (high - low)) / (1 - MARGIN))
        layers = recomputed(held, controller.layers, budget * (1 - MARGIN) - base)
        assert layers is not None
        chosen.append(Fixed(budget=budget, layers=layers))
    return chosen


def timed(jobs: dict[str, PreparedJob], trace: list[Batch]) -> tuple[dict[str, list[float]], bool]:
    """(CPU-seconds of each step by job, whether all losses are the same to the bit)."""
    spent, same = {name: list[float]() for name in jobs}, True
    for turn, batch in enumerate(trace):
        names = list(jobs)
        losses = {}
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            began = time.process_time()
            losses[name] = jobs[name].step(batch)
            spent[name].append(time.process_time() - began)
        same &= len(set(losses.values())) == 1
    return spent, same


def chosen_in_us(job: PreparedJob) -> float:
    """Median microseconds of a choice that is worked out."""
    mimose, taken = job.executor.compute.mimose, []
    assert mimose is not None and mimose.controller.estimate is not None
    controller = mimose.controller
    for tokens in range(controller.estimate.least, controller.estimate.most, 7):
        began = time.perf_counter()
        recomputed(mimose.controller.estimate.at(tokens), controller.layers, controller.room)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken) * 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50, help="steps, of which the first are measured by mimose")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        trace = batches(Path(folder), options.steps)
    lengths = [int(batch["lengths"].max()) for batch in trace]
    fixed = fixed_choices(trace)
    plans = {"none": plan(), "all": plan(Saved(preset="full"))}
    for one in fixed:
        plans[f"fixed {one.budget}"], plans[f"mimose {one.budget}"] = one.plan, plan(budget=one.budget)
    jobs = {name: prepared(given) for name, given in plans.items()}
    spent, same = timed(jobs, trace)
    notes = {name: job.executor.notes for name, job in jobs.items()}
    microseconds = chosen_in_us(jobs[f"mimose {fixed[0].budget}"])
    most = {name: max(most_bytes(prepared_again, batch) for batch in trace)
            for name, prepared_again in ((name, prepared(given)) for name, given in plans.items())}  # fmt: skip
    counted = [step for step in range(len(trace)) if step > COLLECT]
    rows, good = list[str](), same

    def ratio(name: str, other: str) -> tuple[float, float]:
        pairs = [(spent[name][step], spent[other][step]) for step in counted]
        return statistics.median(a / b for a, b in pairs), sum(a for a, _ in pairs) / sum(b for _, b in pairs)

    for name in plans:
        kind, _, budget = name.partition(" ")
        other = f"fixed {budget}" if kind == "mimose" else name
        median, total = ratio(name, other)
        _, above = ratio(name, "none")
        layers = {"none": "0", "all": "8"}.get(kind, "")
        if kind == "fixed":
            layers = str(next(len(one.layers) for one in fixed if str(one.budget) == budget))
        if kind == "mimose":
            layers = notes[name][0].partition(" choices of ")[2].partition(" recomputed")[0]
            good &= total < 1
        good &= not budget or most[name] <= int(budget)
        against = f"{median:.3f} | {total:.3f}" if kind == "mimose" else " | "
        allowed = f"{int(budget) / MIB:.1f}" if budget else ""
        rows.append(f"| {allowed} | {kind} | {layers} | {most[name] / MIB:.1f} | {above:.3f} | {against} |")
        print(rows[-1], flush=True)
    first = sum(spent[f"mimose {fixed[0].budget}"][: COLLECT + 1]) / sum(spent["all"][: COLLECT + 1])
    options.output.write_text(
        "\n".join(
            [
                "# Layers recomputed by the length of each batch, against a fixed choice",
                "",
                f"`python benchmarks/memory/mimose.py`, {datetime.now(UTC):%Y-%m-%d}, Python {python_version()}, torch "
                f"{torch.__version__}.",
                "",
                f"A Llama of 8 layers of 128, fp32, one process of one thread. {len(trace)} steps of {ROWS} docstrings "
                f"of the standard library, bytes as tokens, padded to the longest of a step: {min(lengths)} to "
                f"{max(lengths)} positions, {statistics.median(lengths):.0f} in the median. Jobs take turns on the "
                "same batches; CPU-seconds after the steps that mimose measures.",
                "",
                "MiB: the most that tensors took in any step, counted op by op in a second run of the same steps. "
                "Fixed: the fewest layers that keep the longest batch within the budget. Against it: the median of the "
                "ratios of single steps, and the ratio of all together.",
                "",
                "| budget MiB | layers recomputed by | layers | MiB | to none | against fixed, median | all steps |",
                "|---|---|---|---|---|---|---|",
                *rows,
                "",
                f"Losses of all are {'the same to the bit' if same else 'NOT the same'} in every step. A choice takes "
                f"{microseconds:.0f} µs where it is not kept from before (median). The steps that mimose measures take "
                f"{first:.2f} times those that recompute all layers.",
                "",
                *(
                    f"- {float(name.partition(' ')[2]) / MIB:.1f} MiB: {said[0]}"
                    for name, said in notes.items()
                    if said
                ),
                "",
            ]
        )
    )
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
