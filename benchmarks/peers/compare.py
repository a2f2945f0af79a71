"""The same published runs through Gnomon, Calculon and llm-analysis in one run: measured, predicted, errors.

    python benchmarks/peers/compare.py RUNS.csv CALCULON_CHECKOUT      # about two minutes; needs PyPI

CALCULON_CHECKOUT is a clone of github.com/calculon-ai/calculon. llm-analysis 0.2.2 is installed from PyPI into a
temporary folder, which goes when this ends. Runs are those that all three might say: dense transformers in 16 bits,
without context parallelism, under 1F1B, interleaved or not. Each peer is compared on the runs that it answers, Gnomon
on the very same ones. A run's measured time is its most trustworthy reading. Prints the page kept in results/peers.md.
"""

from __future__ import annotations

import json
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gnomon
from evidence.published import Run, read_runs
from evidence.published.row import COMPOSED
from gnomon.errors import GnomonError
from gnomon.models.gpt import GptConfig
from gnomon.models.llama import LlamaConfig
from gnomon.plans import batch
from gnomon.prediction import predict
from gnomon.prices.fitted import fitted_rates

HERE = Path(__file__).parent
PACKAGES = ("llm-analysis==0.2.2", "psutil", "numpy", "pandas")
EFFICIENCIES = (0.5, 0.4)
"""Shares of the peak that llm-analysis is told; its README takes 0.5 for what the literature reports."""
SHOWN = "korthikanti-2022"
"""Family whose runs are shown one by one."""


@dataclass(frozen=True)
class Case:
    """A run and what Gnomon says."""

    id: str
    family: str
    job: dict[str, Any]
    measured_s: float
    gnomon_s: float


def main(table: str, calculon: str) -> None:
    """Runs all and prints the page."""
    begin = time.perf_counter()
    runs, _ = read_runs(Path(table))
    cases = [case for run in runs if (case := _case(run)) is not None]
    own_s = time.perf_counter() - begin
    with tempfile.TemporaryDirectory() as folder:
        python = _environment(Path(folder))
        answers = {"Calculon": _ask(python, "calculon_driver.py", calculon, cases, folder)}
        for share in EFFICIENCIES:
            name = f"llm-analysis {share}"
            answers[name] = _ask(python, "llm_analysis_driver.py", str(share), cases, folder)
    commit = subprocess.run(
        ["git", "-C", calculon, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    )
    print("\n".join(_page(cases, answers, commit.stdout.strip(), own_s)))


def _case(run: Run) -> Case | None:
    """The case of a run, if it is one that the peers might say and Gnomon can predict."""
    model, plan, row = run.model, run.plan, run.row
    sayable = (
        isinstance(model, GptConfig | LlamaConfig)
        and run.covers == "step"
        and plan.precision.fp8 is None
        and plan.precision.compute in ("bf16", "fp16")
        and plan.mesh.cp == 1
        and not plan.stages
        and plan.schedule.name in ("one_f_one_b", "interleaved_one_f_one_b")
    )
    if not sayable:
        return None
    try:
        prediction = predict(run.graph, run.cluster, plan, run.workload, run.stack)
    except GnomonError:
        return None
    count, _ = batch(plan, run.workload)
    node = run.cluster.groups[0].node
    ports = node.nics * node.nic.bytes_per_s / node.count if node.nic else node.intra.bytes_per_s
    heads = model.num_heads
    size = run.workload.global_batch_size or 0
    data_ranks = plan.mesh.data_ranks
    gated = isinstance(model, LlamaConfig)
    job = {
        "id": run.id,
        "device": node.device.name,
        "devices": plan.world_size,
        "devices_per_node": node.count,
        "inter_bytes_per_s": ports,
        "layers": model.num_layers,
        "hidden": model.hidden_size,
        "heads": heads,
        "kv_heads": model.num_kv_heads if isinstance(model, LlamaConfig) else heads,
        "head_dim": model.head_dim if isinstance(model, LlamaConfig) else model.hidden_size // heads,
        "ffn": model.ffn_size or 4 * model.hidden_size,
        "gated": gated,
        "vocab": model.vocab_size,
        "seq_len": max(run.workload.sequence_lengths()),
        "tp": plan.mesh.tp,
        "pp": plan.mesh.pp,
        "vpp": plan.schedule.virtual_stages,
        "dp": data_ranks,
        "zero": plan.optimizer.zero,
        "sequence_parallel": plan.layout.sequence_parallel,
        "recompute": plan.saved.preset,
        "flash": run.stack.layers.attention != "unfused",
        "global_batch": size,
        "micro_batch": max(1, size // (count * data_ranks)),
    }
    return Case(id=row.id, family=run.family, job=job, measured_s=run.step_s, gnomon_s=prediction.step_s)


def _environment(folder: Path) -> str:
    """The interpreter of a fresh environment with the peers' packages."""
    venv.create(folder / "venv", with_pip=True)
    python = str(folder / "venv" / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    return python


def _ask(python: str, driver: str, argument: str, cases: Sequence[Case], folder: str) -> dict[str, dict[str, Any]]:
    """Answers of a peer by run."""
    if Path(argument).exists():
        argument = str(Path(argument).resolve())
    done = subprocess.run(
        [python, str(HERE / driver), argument],
        input="\n".join(json.dumps(case.job) for case in cases),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=folder,
    )
    collected = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(collected) == len(cases), f"{driver} answered {len(collected)} of {len(cases)} jobs"
    return {answer["id"]: answer for answer in collected}


def _page(
    cases: Sequence[Case], answers: dict[str, dict[str, dict[str, Any]]], commit: str, own_s: float
) -> Iterable[str]:
    packages = f"Calculon {commit}, llm-analysis 0.2.2, gnomon {gnomon.__version__}"
    yield f"{len(cases)} runs; {packages}; Python {platform.python_version()}; Gnomon took {own_s:.0f} s for all"
    yield from ("", "Absolute errors of the step time in %, median and worst, all on the same runs:", "")
    message = {case.id: tuple(name for name in answers if "step_s" in answers[name][case.id]) for case in cases}
    for names in sorted({message[case.id] for case in cases if message[case.id]}, key=len, reverse=True):
        yield from _table(
            [case for case in cases if message[case.id] == names], {name: answers[name] for name in names}
        )
    for name, one in answers.items():
        wall = statistics.median(answer["wall_s"] for answer in one.values() if "wall_s" in answer)
        yield f"{name}: {wall * 1e3:.1f} ms a run at the median."
    yield ""
    yield from (f"Run by run, {SHOWN}:", "")
    yield f"| run | measured s | Gnomon s | {' | '.join(f'{name} s' for name in answers)} |"
    yield "|" + " --- |" * (3 + len(answers))
    for case in cases:
        if case.family == SHOWN:
            cells = [_beside(case.gnomon_s, case), *(_beside(a[case.id].get("step_s"), case) for a in answers.values())]
            yield f"| {case.id} | {case.measured_s:.2f} | {' | '.join(cells)} |"
    for name, answered in answers.items():
        refused = Counter(answer["refused"] for answer in answered.values() if answer["refused"])
        if refused:
            yield from ("", f"Not said by {name}:", "")
            yield from (f"- {count} runs: {reason}" for reason, count in refused.most_common(6))


def _table(cases: Sequence[Case], answers: dict[str, dict[str, dict[str, Any]]]) -> Iterable[str]:
    """Errors by family of runs that all of these peers answer."""
    columns = " | ".join(f"{name} | worst" for name in ("Gnomon", *answers))
    yield f"| runs | | {columns} |"
    yield "|" + " --- |" * (4 + 2 * len(answers))
    for family in (*sorted({case.family for case in cases}), "all"):
        measured = family == "all"  # rows that a simulator made count by themselves alone
        mine = [case for case in cases if case.family == family or (measured and case.family != COMPOSED)]
        star = " (fitted)" if _is_fitted(family) else ""
        predicted = [[case.gnomon_s for case in mine]]
        predicted += [[answer[case.id]["step_s"] for case in mine] for answer in answers.values()]
        cells = [_errors(values, [case.measured_s for case in mine]) for values in predicted]
        yield f"| {family}{star} | {len(mine)} | {' | '.join(cells)} |"
    yield ""


def _is_fitted(family: str) -> bool:
    """Whether some of Gnomon's numbers were fitted to runs of this family, as their record says."""
    result = fitted_rates()
    records = [*([result.universal] if result.universal else []), *result.stacks, *result.links]
    return any(re.search(rf"\b{re.escape(family)}\b", record.provenance.data) for record in records)


def _errors(predicted: Sequence[float], measured: Sequence[float]) -> str:
    """Median and worst, in %."""
    errors = [abs(p / m - 1) * 100 for p, m in zip(predicted, measured, strict=True)]
    return f"{statistics.median(errors):.1f} | {max(errors):.1f}"


def _beside(predicted: float | None, case: Case) -> str:
    return "-" if predicted is None else f"{predicted:.2f} ({(predicted / case.measured_s - 1) * 100:+.1f} %)"


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
