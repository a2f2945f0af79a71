"""Plans for a program, exported to it: the step that `gnomon plan --stack X` promises and the one that X's file gives.

    python benchmarks/planned_exports.py            # 15 models x 5 programs; writes results/planned_exports.md
    python benchmarks/planned_exports.py --models llama-3.1-8b --programs torchtitan

For each model and program: the best plans of the exact search for the program's record (`--seconds` of processor time
each), as `gnomon plan` offers them; exported; the file read by the program's own reader, and what it says predicted. A
row is right where both steps are the same to 0.1%. Models that a program has not are listed on standard error. Prints
the table; ends with 1 if a plan is refused by the export, or comes back as another.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from platform import python_version

from gnomon.errors import GnomonError
from gnomon.formats import programs
from gnomon.formats.export import Draft, asked_for, exported
from gnomon.hardware import parse_cluster
from gnomon.plans import Plan, Workload
from gnomon.prediction import predict
from gnomon.request.exported import based, exportable, lacks, target
from gnomon.request.model import read_config
from gnomon.search import Result, default_precision, plan
from gnomon.search.budget import until
from gnomon.software import Stack, stack

RESULTS = Path(__file__).parent / "results" / "planned_exports.md"

STACKS = {
    "megatron": "megatron-lm", "torchtitan": "torchtitan", "deepspeed": "deepspeed", "nanotron": "nanotron",
    "accelerate": "pytorch-fsdp",
}  # fmt: skip
"""Program that a plan can be exported to -> the record of what it does."""

JOBS: dict[str, tuple[str, int, int]] = {
    "gpt2-xl": ("1x8xa100-sxm-80gb", 64, 1024),
    "llama-2-13b": ("2x8xa100-sxm-80gb", 256, 4096),
    "gpt3-175b": ("16x8xa100-sxm-80gb", 512, 2048),
    "llama-2-7b": ("1x8xa100-sxm-80gb", 64, 4096),
    "llama-2-70b": ("8x8xa100-sxm-80gb", 256, 4096),
    "llama-3.1-8b": ("2x8xh100-sxm", 64, 8192),
    "llama-3.1-70b": ("32x8xh100-sxm", 512, 8192),
    "llama-3.1-405b": ("64x8xh100-sxm", 512, 8192),
    "llama-3.2-1b": ("1x8xh100-sxm", 64, 4096),
    "mistral-7b": ("1x8xh100-sxm", 64, 4096),
    "mixtral-8x7b": ("4x8xh100-sxm", 256, 4096),
    "qwen2.5-7b": ("1x8xh100-sxm", 64, 4096),
    "qwen2.5-72b": ("16x8xh100-sxm", 256, 4096),
    "qwen3-30b-a3b": ("4x8xh100-sxm", 256, 4096),
    "deepseek-v3": ("32x8xh100-sxm", 1024, 4096),
}
"""Model -> machines, sequences of a batch, their length."""

TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One plan."""

    model: str
    program: str
    planned_s: float
    exported_s: float | None
    """None where the export refuses it."""
    note: str
    """The plan, or why it is refused; what is not expressed."""

    @property
    def right(self) -> bool:
        """Whether both steps are the same."""
        return self.exported_s is not None and abs(self.exported_s / self.planned_s - 1) <= TOLERANCE


def missing(model: str, program: Stack) -> str:
    """Why the program has no such model, if it has none."""
    on, batch, seq_len = JOBS[model]
    config, graph = read_config(model)
    work = Workload(global_batch_size=batch, seq_len=seq_len)
    return lacks(Plan(), target(program, config, graph, parse_cluster(on), work))


def searched(model: str, program: Stack, seconds: float, top: int) -> Result:
    """The best plans that the program's record allows."""
    on, batch, seq_len = JOBS[model]
    config, graph = read_config(model)
    machines, work = parse_cluster(on), Workload(global_batch_size=batch, seq_len=seq_len)
    to = target(program, config, graph, machines, work)
    base = based(Plan(precision=default_precision(machines)), to, precision=True)
    return exportable(plan(graph, machines, work, program, base=base, top=top, keep_going=until(seconds)), to)


def exported_row(model: str, program: str, made: Plan, planned_s: float) -> Row:
    """A plan of the search for `program`, written as its file and predicted as that file says it."""
    on, batch, seq_len = JOBS[model]
    config, graph = read_config(model)
    machines, work = parse_cluster(on), Workload(global_batch_size=batch, seq_len=seq_len)
    shown = f"{_axes(made)}, {made.schedule.name}, ZeRO {made.optimizer.zero}, {made.saved.preset}"
    write = programs.find(program).write
    assert write is not None
    try:
        asked = asked_for(model, config, graph, made, work, max(node.count for node in machines.nodes))
        draft: Draft = write(asked)
        lost = exported(asked, draft).unwritten
        job = draft.job
        back = predict(graph, machines, job.plan, job.workload, job.stack)
    except GnomonError as error:
        return Row(model=model, program=program, planned_s=planned_s, exported_s=None, note=f"{shown}: {error}")
    text = "; ".join(f"{one.field}: {one.planned} becomes {one.becomes}" for one in lost if one.field[:5] != "model")
    note = f"{shown}{' (' + text + ')' if text else ''}"
    return Row(model=model, program=program, planned_s=planned_s, exported_s=back.step_s, note=note)


def _axes(made: Plan) -> str:
    axes = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")
    return " x ".join(f"{axis}={size}" for axis in axes if (size := getattr(made.mesh, axis)) > 1) or "one rank"


def rows(models: list[str], names: list[str], seconds: float, top: int) -> Iterator[Row]:
    """All plans of all models and programs, but of models that a program has not and searches that find none."""
    for model in models:
        for program in names:
            if why := missing(model, stack(STACKS[program])):
                print(f"{model} {program}: {why}", file=sys.stderr, flush=True)
                continue
            try:
                result = searched(model, stack(STACKS[program]), seconds, top)
            except GnomonError as error:
                print(f"{model} {program}: no plan: {error}", file=sys.stderr, flush=True)
                continue
            for candidate in result.best:
                yield exported_row(model, program, candidate.plan, candidate.prediction.step_s)


def main() -> int:
    """The table, and the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(JOBS), choices=list(JOBS))
    parser.add_argument("--programs", nargs="+", default=list(STACKS), choices=list(STACKS))
    parser.add_argument("--seconds", type=float, default=10.0, help="processor time a search (default: %(default)s)")
    parser.add_argument("--top", type=int, default=1, help="plans of each search (default: %(default)s)")
    options = parser.parse_args()
    lines, wrong = ["| model | program | planned s | exported s | plan |", "| --- | --- | ---: | ---: | --- |"], 0
    print(*lines, sep="\n")
    for row in rows(options.models, options.programs, options.seconds, options.top):
        back = "refused" if row.exported_s is None else f"{row.exported_s:.5g}"
        mark = "" if row.right else " **differs**"
        lines.append(f"| {row.model} | {row.program} | {row.planned_s:.5g} | {back}{mark} | {row.note} |")
        wrong += not row.right
        print(lines[-1], flush=True)
    count = len(lines) - 2
    print(f"\n{count - wrong} of {count} plans come back with the same step to 0.1%.")
    if options.models == list(JOBS) and options.programs == list(STACKS):
        when = datetime.now(UTC).strftime("%Y-%m-%d")
        head = (
            "# Plans for a program, exported to it\n\n"
            f"`python benchmarks/planned_exports.py --seconds {options.seconds:g} --top {options.top}`, {when}, "
            f"Python {python_version()}, two cores, no GPU.\n"
            f"{count - wrong} of {count} plans come back from the program's own file with the same step to 0.1%.\n\n"
        )
        RESULTS.write_text(head + "\n".join(lines) + "\n", encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
