"""What was made of a graph, in a line of the log at its first call: what runs as kernels, what was given back and why.

    logging.getLogger("gnomon.compiler").setLevel(logging.INFO)     # or TORCH_LOGS="gnomon.compiler"

Silent otherwise. `gnomon compile --explain` says more (`explain`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gnomon.compiler.graph.groups import FREE

MOST_NAMED = 4
"""Of groups that were given back, and of operations that no kernel knows."""


def summary(compiled: Any) -> str:
    """Summarizes a `backend.CompiledGraph` whose trials are over."""
    in_kernels = [planned for planned in compiled.program.groups if compiled.by_kernel(planned)]
    back = [planned for planned in compiled.program.groups if not compiled.by_kernel(planned)]
    own = sum(bool(one.trial.kept) for one in compiled.columns) + sum(one.own_kept for one in compiled.products)
    # A convolution may be kept as oneDNN's, which is counted below.
    own += sum(one.own_kept if one in compiled.convolutions else one.kept for one in compiled.tried)
    own += sum(any(trial.kept for trial in one.trials.values()) for one in compiled.recurrent)
    text = _counted(len(in_kernels), "group") + (f" and {_counted(own, 'operation')}" if own else "") + " as kernels"
    library = sum(one.kept for one in compiled.products)
    library += sum(one.by_onednn for one in compiled.convolutions)
    text += f", {_counted(library, 'product or convolution', 'products or convolutions')} by oneDNN" if library else ""
    if back:
        text += f"; given back to ATen: {_named(compiled, back)}"
    if unknown := _unknown(compiled):
        text += f"; ATen's as before: {unknown}"
    if runs := [run.count for run in compiled.runs]:
        text += f"; {_counted(len(runs), 'call')} of C++ for {_counted(sum(runs), 'step')}"
    if two := sum(run.two_kept for run in compiled.runs):
        text += f", {two} of them by two workers"
    return f"{text}; compiled in {compiled.made_s:.1f} s, tried in {compiled.tried_s:.1f} s"


def _named(compiled: Any, back: Sequence[Any]) -> str:
    names = [f"{_operations(planned)} ({_why(compiled, planned)})" for planned in back[:MOST_NAMED]]
    return ", ".join(names) + (f" and {len(back) - MOST_NAMED} more" if len(back) > MOST_NAMED else "")


def _unknown(compiled: Any) -> str:
    """Operations that no kernel computes and that compute something, each once, in the order of the graph."""
    nodes = [unit for unit in compiled.program.units if getattr(unit, "op", "") == "call_function"]
    names = dict.fromkeys(
        str(node.target).removeprefix("aten.").removesuffix(".default")
        for node in nodes
        if isinstance(node.target, torch._ops.OpOverload) and node.target not in FREE
    )
    named = ", ".join([*names][:MOST_NAMED])
    return named + (f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else "")


def _operations(planned: Any) -> str:
    return " + ".join(str(node.target).removeprefix("aten.").removesuffix(".default") for node in planned.group.work)


def _why(compiled: Any, planned: Any) -> str:
    trial = compiled.trials.get(planned.number)
    if trial is None:
        return "it does not compile"
    if trial.verdict.get("wrong"):
        return str(trial.verdict["wrong"])
    return f"{trial.verdict['kernel_s'] / max(trial.verdict['aten_s'], 1e-9):.2f} of ATen's time"


def _counted(count: int, one: str, several: str = "") -> str:
    return f"{count} {one if count == 1 else several or one + 's'}"
