"""Layers recomputed by the length of each batch against a fixed choice: `python benchmarks/memory/mimose.py`.

A Llama of 2M parameters on this machine, one process of one thread, on docstrings of Python's standard library, one a
row, padded to the longest of a microbatch. Budgets between what the longest batch takes with all layers recomputed and
with none. Under each: Mimose, and the fixed choice that the longest batch needs (the fewest layers, by the same
measurements). Jobs take turns on the same batches; CPU-seconds of a step as ratios. Then once more with every tensor
counted: the most bytes of each step. `--device cuda`: a Llama of 300M parameters in bf16, 16 docstrings a step, seconds
of the clock, and the peak of torch's allocator. Writes results/mimose.md or results/mimose_gpu.md. Exits with 1 where a
step is above the budget, a loss differs by a bit, or Mimose is slower. Left out: several GPUs.
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from platform import python_version

import torch

import gnomon
from gnomon.graph import Graph
from gnomon.methods.mimose import MARGIN, peak, recomputed
from gnomon.models.llama import LlamaConfig, llama
from gnomon.plans import Pass, Plan, Precision, Saved, SavedRule, Schedule, Workload
from gnomon.plans.select import format_layers
from gnomon.runtime.data import Corpus, Source
from gnomon.runtime.launch.job import PreparedJob
from gnomon.runtime.module.stage import Batch
from gnomon.runtime.watch.layer_bytes import LiveBytes

RESULTS = Path(__file__).resolve().parents[1] / "results"
MIB = 2**20
SEQ_LEN, COLLECT = 1024, 10
FP32 = Precision(param="fp32", compute="fp32", grad="fp32", reduce="fp32", master="none", states="fp32")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is trained on a device."""

    device: str
    rows: int
    """Docstrings of a step."""
    config: LlamaConfig
    precision: Precision
    about: str

    @cached_property
    def graph(self) -> Graph:
        return llama(self.config)

    def plan(self, saved: Saved = Saved(), budget: int = 0) -> Plan:  # noqa: B008 (frozen)
        passes = (Pass(name="mimose", params=(("budget", f"{budget} B"), ("collect", COLLECT))),) if budget else ()
        return Plan(schedule=Schedule(num_microbatches=1, passes=passes), precision=self.precision, saved=saved)

    def prepared(self, given: Plan) -> PreparedJob:
        work = Workload(global_batch_size=self.rows, seq_len=SEQ_LEN)
        return gnomon.prepare(self.graph, given, workload=work, seed=3, device=self.device)

    def clock(self) -> float:
        """CPU-seconds, on a GPU seconds of the clock once it is idle."""
        if self.device == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()


SETTINGS = {
    "cpu": Setting(
        device="cpu",
        rows=2,
        config=LlamaConfig(
            name="llama-2m", num_layers=8, hidden_size=128, num_heads=4, num_kv_heads=4, head_dim=32, ffn_size=352,
            vocab_size=256,
        ),
        precision=FP32,
        about="A Llama of 8 layers of 128, fp32, one process of one thread",
    ),
    "cuda": Setting(
        device="cuda",
        rows=16,
        config=LlamaConfig(
            name="llama-300m", num_layers=24, hidden_size=1024, num_heads=16, num_kv_heads=16, head_dim=64,
            ffn_size=2816, vocab_size=256,
        ),
        precision=Precision(),
        about="A Llama of 24 layers of 1024, bf16 with fp32 gradients, master weights and states, one GPU",
    ),
}  # fmt: skip
SHARES = (0.25, 0.6)
"""Where budgets are between all layers recomputed and none, in the longest batch."""


def docstrings() -> Iterator[str]:
    """Of the standard library, in order of its files."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(errors="replace"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node)):
                yield text


def batches(folder: Path, steps: int, rows: int) -> list[Batch]:
    path = folder / "docstrings.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in docstrings()))
    corpus = Corpus.open(Source(path=path, packing="padded", cache=folder / "tokens"))
    return [corpus.batch(step, seed=1, sequences=rows, seq_len=SEQ_LEN) for step in range(1, steps + 1)]


def most_bytes(setting: Setting, given: Plan, trace: Sequence[Batch]) -> int:
    """Of any step: on a CPU all tensors counted, on a GPU the peak of torch's allocator."""
    on_gpu = setting.device == "cuda"
    held = torch.cuda.memory_allocated() if on_gpu else 0
    most = 0
    with setting.prepared(given) as job:
        for batch in trace:
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
                job.step(batch)
                most = max(most, torch.cuda.max_memory_allocated() - held)
            else:
                live, before = LiveBytes(torch.device(setting.device)), job.executor.resident_bytes()
                with live:
                    job.step(batch)
                most = max(most, before + live.most)
    return most


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """What the longest batch needs under a budget."""

    budget: int
    layers: tuple[int, ...]

    def plan(self, setting: Setting) -> Plan:
        every = setting.graph.layers()
        chosen = [layer for layer in every if layer.call.first is not None and every.index(layer) in self.layers]
        rules = tuple(SavedRule(calls=calls, preset="full") for calls in format_layers(chosen))
        return setting.plan(Saved(rules=rules))


def fixed_choices(setting: Setting, trace: list[Batch]) -> list[Fixed]:
    """From the measurements of a job with a budget that is never met."""
    with setting.prepared(setting.plan(budget=2**40)) as job:
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


def timed(setting: Setting, jobs: dict[str, PreparedJob], trace: list[Batch]) -> tuple[dict[str, list[float]], bool]:
    """(seconds of each step by job, whether all losses are the same to the bit)."""
    spent, same = {name: list[float]() for name in jobs}, True
    for turn, batch in enumerate(trace):
        names = list(jobs)
        losses = {}
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            began = setting.clock()
            losses[name] = jobs[name].step(batch)
            spent[name].append(setting.clock() - began)
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
    parser.add_argument("--device", default="cpu", choices=SETTINGS)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    setting, on_gpu = SETTINGS[options.device], options.device == "cuda"
    if not on_gpu:
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        trace = batches(Path(folder), options.steps, setting.rows)
    lengths = [int(batch["lengths"].max()) for batch in trace]
    fixed = fixed_choices(setting, trace)
    plans = {"none": setting.plan(), "all": setting.plan(Saved(preset="full"))}
    for one in fixed:
        plans[f"fixed {one.budget}"] = one.plan(setting)
        plans[f"mimose {one.budget}"] = setting.plan(budget=one.budget)
    jobs = {name: setting.prepared(given) for name, given in plans.items()}
    spent, same = timed(setting, jobs, trace)
    notes = {name: job.executor.notes for name, job in jobs.items()}
    microseconds = chosen_in_us(jobs[f"mimose {fixed[0].budget}"])
    jobs.clear()
    most = {name: most_bytes(setting, given, trace) for name, given in plans.items()}
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
        layers = {"none": "0", "all": str(setting.config.num_layers)}.get(kind, "")
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
    counted_by = "of torch's allocator" if on_gpu else "counted op by op"
    name = torch.cuda.get_device_name() if on_gpu else "one core"
    output = options.output or RESULTS / ("mimose_gpu.md" if on_gpu else "mimose.md")
    output.write_text(
        "\n".join(
            [
                "# Layers recomputed by the length of each batch, against a fixed choice",
                "",
                f"`python benchmarks/memory/mimose.py{' --device cuda' if on_gpu else ''}`, "
                f"{datetime.now(UTC):%Y-%m-%d}, {name}, Python {python_version()}, torch {torch.__version__}.",
                "",
                f"{setting.about}. {len(trace)} steps of {setting.rows} docstrings of the "
                f"standard library, bytes as tokens, padded to the longest of a step: {min(lengths)} to "
                f"{max(lengths)} positions, {statistics.median(lengths):.0f} in the median. Jobs take turns on the "
                f"same batches; {'seconds' if on_gpu else 'CPU-seconds'} after the steps that mimose measures.",
                "",
                f"MiB: the most in any step, {counted_by} in a second run of the same steps. Fixed: the fewest layers "
                "that keep the longest batch within the budget. Against it: the median of the ratios of single steps, "
                "and the ratio of all together.",
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
