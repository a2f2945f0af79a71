"""PyTorch's own samples (OpInfo) of every operation that the compiler claims, forward and gradient, against eager.

`python tests/compiler/opinfo.py [--samples 8] [--ops softmax,var_mean] [-o FILE]` prints a line an operation. A sample
is traced to ATen as the backend is given it; a result of floats is scaled and shifted besides, because one operation
alone is no group. Kernels are used however slow they are. Counted are samples that a kernel computes a part of, kernels
that do not compile, kernels that the backend's own check called wrong, results unlike eager's, and errors. Samples with
nothing claimed, and those that give other numbers each time, are left out. Needs `expecttest`, as OpInfo does.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from gnomon.compiler.backend import CompiledGraph
from gnomon.compiler.rules import RULES
from gnomon.compiler.tune import gate
from gnomon.compiler.tune.gate import different

COUNTED = ("samples", "by kernels", "not compiled", "called wrong", "unlike eager", "errors")
Function = Callable[..., tuple[torch.Tensor, ...]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=8, help="of an operation and dtype, at most, evenly spread")
    parser.add_argument("--ops", default="", help="names; default all")
    parser.add_argument("-o", "--output", type=Path, help="file for the table")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    untimed()
    began, lines, every = time.time(), list[str](), Counter[str]()
    for op in operations(options.ops.split(",") if options.ops else None):
        counts, why = tried(op, options.samples)
        every += counts
        if counts["by kernels"] or counts["errors"] or counts["unlike eager"]:
            lines.append(f"| {name_of(op)} | {' | '.join(str(counts[name]) for name in COUNTED)} | {why} |")
            print(lines[-1], flush=True)
    head = [f"| operation | {' | '.join(COUNTED)} | |", f"|---|{'---:|' * len(COUNTED)}---|"]
    foot = f"| all {len(lines)} operations | {' | '.join(str(every[name]) for name in COUNTED)} | |"
    print(foot, f"\n{time.time() - began:.0f} s")
    if options.output:
        options.output.write_text("\n".join((*head, *lines, foot)) + "\n")
    sys.exit(bool(every["called wrong"] or every["unlike eager"] or every["errors"] or every["not compiled"]))


def untimed() -> None:
    """Kernels are kept however long they take, in a cache that is thrown away."""
    gate.SLOWER, gate.REPEATS = math.inf, 1
    import os

    os.environ["GNOMON_CACHE"] = tempfile.mkdtemp(prefix="gnomon-opinfo-")


def operations(names: Sequence[str] | None = None) -> Iterator[Any]:
    """OpInfos of these names, or all."""
    from torch.testing._internal.common_methods_invocations import op_db

    for op in op_db:
        if names is None or op.name in names:
            yield op


def name_of(op: Any) -> str:
    return f"{op.name} ({op.variant_test_name})" if op.variant_test_name else str(op.name)


def tried(op: Any, most: int) -> tuple[Counter[str], str]:
    """Counts over its samples in float32 and bfloat16, forward and gradient; and what went wrong first."""
    counts, why = Counter[str](), ""
    for dtype in (torch.float32, torch.bfloat16):
        if dtype not in op.supported_dtypes("cpu"):
            continue
        gradient = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
        try:
            torch.manual_seed(0)
            samples = list(op.sample_inputs("cpu", dtype, requires_grad=False))
        except Exception:  # a sample maker that wants what is not here
            continue
        for sample in samples[:: max(1, -(-len(samples) // most))]:
            for function, inputs in functions(op, sample, gradient):
                result, reason = compared(function, inputs)
                counts[result] += 1
                counts["samples"] += result != "left out"
                why = why or reason
    return counts, why.replace("|", "/").replace("\n", " ")[:120]


def functions(op: Any, sample: Any, gradient: bool) -> Iterator[tuple[Function, list[torch.Tensor]]]:
    """The sample as a function of its tensors, and the gradient of it in those of floats."""
    flat, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [i for i, x in enumerate(flat) if isinstance(x, torch.Tensor)]
    inputs = [flat[i] for i in places]

    def forward(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        filled = list(flat)
        for place, x in zip(places, given, strict=True):
            filled[place] = x
        first, args, kwargs = tree_unflatten(filled, spec)
        out = [x for x in tree_leaves(op(first, *args, **kwargs)) if isinstance(x, torch.Tensor)]
        return tuple(x * 1.5 + 0.25 if x.is_floating_point() else x for x in out)

    yield forward, inputs
    floats = [i for i, x in enumerate(inputs) if x.is_floating_point()]
    if not gradient or not floats:
        return

    def backward(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        asked = [x.detach().requires_grad_() if i in floats else x for i, x in enumerate(given)]
        with torch.enable_grad():
            out = [x for x in forward(*asked) if x.is_floating_point() and x.requires_grad]
            found = torch.autograd.grad(out, [asked[i] for i in floats], [weights(x) for x in out], allow_unused=True)
        return tuple(x for x in found if x is not None)

    yield backward, inputs


def weights(x: torch.Tensor) -> torch.Tensor:
    """A gradient of an output, with other numbers next to each other: with equal ones sums cancel to rounding."""
    return (torch.arange(x.numel(), device=x.device) % 7 * 0.25 - 0.4).to(x.dtype).view(x.shape)


def compared(function: Function, inputs: list[torch.Tensor]) -> tuple[str, str]:
    """(which of COUNTED or `left out`, why)."""
    try:
        wanted, again = function(*inputs), function(*inputs)
        if not all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(wanted, again, strict=True)):
            return "left out", ""
        traced = make_fx(function, tracing_mode="fake")(*inputs)
    except Exception:  # the sample does not run in eager, has no gradient, or cannot be traced
        return "left out", ""
    traced.graph.eliminate_dead_code()
    targets = [node.target for node in traced.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    if not any(target in RULES for target in targets) or any("empty" in str(target) for target in targets):
        return "left out", ""
    if any(torch.Tag.nondeterministic_seeded in target.tags for target in targets):
        return "left out", ""
    try:
        made = CompiledGraph(traced)
        if not made.program.groups:
            return "left out", ""
        if any(planned.function is None for planned in made.program.groups):
            return "not compiled", ""
        call = made.boxed()
        call(list(inputs))
        if wrong := [trial.verdict["wrong"] for trial in made.trials.values() if trial.verdict.get("wrong")]:
            return "called wrong", wrong[0]
        out = call(list(inputs))  # by kernels alone
    except Exception as error:
        return "errors", f"{type(error).__name__}: {error}"
    out = tuple(out) if isinstance(out, (tuple, list)) else (out,)
    wanted = tuple(traced(*inputs))  # eager may choose other operations by the numbers in its inputs
    if unlike := different(out, wanted):
        return ("by kernels", "") if same_in_double(function, inputs, out, wanted) else ("unlike eager", unlike)
    return "by kernels", ""


def same_in_double(function: Function, inputs: list[torch.Tensor], out: Sequence[Any], wanted: Sequence[Any]) -> bool:
    """Whether the results are as near to those in double as eager's."""
    return gate.as_right(out, wanted, function, tuple(inputs))


if __name__ == "__main__":
    main()
