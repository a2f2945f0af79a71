"""A module compiled and called for `gnomon compile`: what was made of it, as data and as text.

`compiled` runs the module once to compile, and once more with what the trials chose. Leaves out finding the module (the
command line's).
"""

from __future__ import annotations

import time
from typing import Any

import torch

from gnomon.compiler import backend
from gnomon.compiler.explain import explained, lines


def compiled(module: Any, inputs: tuple[Any, ...], train: bool) -> dict[str, Any]:
    """Forward, and with `train` also the backward of the sum of the first output's elements."""
    torch._dynamo.reset()
    first = len(backend.reports)
    call = torch.compile(module, backend=backend.gnomon)
    start = time.perf_counter()
    for n in range(2):
        with torch.set_grad_enabled(train):
            out = call(*inputs)
        if train:
            _backward(out)
        if n == 0:
            compile_s = time.perf_counter() - start
    made = [explained(graph) for graph in backend.reports[first:]]
    kept = sum(group["kept"] for graph in made for group in graph["groups"])
    every = sum(len(graph["groups"]) for graph in made)
    summary = [f"compiled in {compile_s:.1f} s: {every} groups in {len(made)} graphs, {kept} kept"]
    text = list(summary)
    for n, graph in enumerate(made):
        text += lines(graph, f"graph {n}")
    return {"data": {"compile_s": compile_s, "graphs": made}, "lines": text, "summary": summary}


def _backward(out: Any) -> None:
    parts = out if isinstance(out, (tuple, list)) else list(out.values()) if hasattr(out, "values") else [out]
    leaf = next((p for p in parts if isinstance(p, torch.Tensor) and p.requires_grad), None)
    if leaf is not None:
        leaf.sum().backward()
