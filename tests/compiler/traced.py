"""A function compiled as one ATen graph, without Dynamo, and compared with itself: what the tests of kernels share.

`compiled` gives the compiled graph, `same` runs it and compares every group's kernel with eager; the trial's
time is taken out, so that no result depends on how busy the machine is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from gnomon.compiler.backend import CompiledGraph


def compiled(function: Callable[..., Any], *inputs: Any, symbolic: bool = False) -> CompiledGraph:
    traced = make_fx(function, tracing_mode="symbolic" if symbolic else "fake")(*inputs)
    traced.graph.eliminate_dead_code()
    return CompiledGraph(traced)


def run(made: CompiledGraph, *inputs: Any) -> tuple[Any, ...]:
    out = made.boxed()(list(inputs))
    return tuple(out) if isinstance(out, (tuple, list)) else (out,)


def same(function: Callable[..., Any], *inputs: Any, groups: int | None = None, again: Any = None) -> CompiledGraph:
    """Kernels give what eager gives, on the first call (each beside ATen) and on the second (kernels alone)."""
    made = compiled(function, *inputs)
    if groups is not None:
        assert len(made.program.groups) == groups, [p.group.members for p in made.program.groups]
    for args in (inputs, again if again is not None else inputs):
        wanted = function(*args)
        wanted = tuple(wanted) if isinstance(wanted, (tuple, list)) else (wanted,)
        for a, b in zip(run(made, *args), wanted, strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()
            top = max(1.0, float(b.double().abs().nan_to_num(posinf=0).max())) if b.numel() else 1.0
            torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5 * top, equal_nan=True)
    for planned in made.program.groups:
        assert made.kept(planned), made.trials[planned.number].verdict
    return made
