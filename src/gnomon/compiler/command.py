"""A module compiled and called for `gnomon compile`: what was made of it, as data and as text.

`compiled` runs the module in eager, which must work, once to compile, once more with what the trials chose, and then
both by turns for their times. Leaves out finding the module (the command line's).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from statistics import median
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from gnomon.compiler import backend
from gnomon.compiler.explain import explained, lines
from gnomon.compiler.tune import tuner
from gnomon.errors import InputError

ROUNDS, LEAST, SPEND_S = 50, 3, 1.0
"""Calls of each, by turns, whose medians are told: at most `ROUNDS`; after `SPEND_S` seconds no more than `LEAST`."""


def compiled(
    module: Any, inputs: tuple[Any, ...], train: bool, tune_s: float = 0.0, **choices: str | bool
) -> dict[str, Any]:
    """Forward, and with `train` also the backward of the sum of the first output's elements; a call and eager's, timed.

    choices: `ragged`, `frozen` and `preview`, as the backend's options; what came of each is told. Raises `InputError`
    where the module fails on its inputs without the compiler too.
    """
    torch._dynamo.reset()
    earlier = {id(one): one for one in backend.reports}
    _in_eager(module, inputs)
    options: dict[str, Any] = {"tune_s": tune_s, **choices}
    call = torch.compile(module, backend=backend.gnomon, options=options)
    start = time.perf_counter()
    _called(call, inputs, train)
    compile_s = time.perf_counter() - start
    _called(call, inputs, train)
    call_s, eager_s = _by_turns(call, module, inputs, train)
    made = [graph for graph in backend.reports if id(graph) not in earlier]
    body_of = {id(body): n for n, graph in enumerate(made) for body in graph.body_graphs()}
    explanations = [{**explained(graph), "body_of": body_of.get(id(graph))} for graph in made]
    kernels = sum(group["kept"] for graph in explanations for group in graph["groups"])
    every = sum(len(graph["groups"]) for graph in explanations)
    graphs = _counted(len(made) - len(body_of), "graph")
    if body_of:
        bodies = "body" if len(body_of) == 1 else "bodies"
        graphs += f" and {len(body_of)} {bodies} of loops or branches"
    summary = [
        f"compiled in {compile_s:.1f} s: {_counted(every, 'group')} in {graphs}, {kernels} kept",
        f"a call{' and its backward' if train else ''}: {_ms(call_s)}, eager {_ms(eager_s)} "
        f"({_counted(torch.get_num_threads(), 'thread')}, medians)",
        _gain(call_s, eager_s),
        *_tuned(made),
        *_chosen(explanations, choices),
    ]
    text = list(summary)
    for n, graph in enumerate(explanations):
        parent = graph["body_of"]
        text += lines(graph, f"graph {n}" + ("" if parent is None else f": body of a loop or branch of graph {parent}"))
    data = {"compile_s": compile_s, "call_s": call_s, "eager_s": eager_s, "graphs": explanations}
    return {"data": data, "lines": text, "summary": summary}


def _chosen(graphs: list[dict[str, Any]], choices: Mapping[str, str | bool]) -> list[str]:
    """What came of each choice, in a line."""

    def by(counts: str) -> int:
        return sum(one["counts"] == counts for graph in graphs for one in graph["chosen"])

    out, previews = [], [one for graph in graphs for one in graph["previews"]]
    if "ragged" in choices:
        took = f"{_counted(by('rows'), 'matmul')} by the rows that are there"
        out.append(f"ragged: {took if by('rows') else 'no matmul has the rows of that mask, all are whole'}")
    if choices.get("frozen"):
        took = f"{_counted(by('columns'), 'matmul')} by the columns that are there"
        out.append(f"frozen: {took if by('columns') else 'no matmul of few rows follows a ReLU, all are whole'}")
    if choices.get("preview"):
        used = sum(bool(one["kept"]) for one in previews)
        took = f"{used} of {_counted(len(previews), 'convolution')} before a pooling by a preview"
        out.append(f"preview: {took if previews else 'no convolution before a max pooling of 2 x 2 that it takes'}")
    return out


def _tuned(graphs: list[backend.CompiledGraph]) -> list[str]:
    """What tuning found, in a line; nothing where nobody asked for it."""
    subjects = [one for graph in graphs for one in graph.tuned]
    if not subjects:
        return []
    better = [one for one in subjects if one.best_s <= tuner.GAIN * one.usual_s]
    usual_s = sum(one.count * one.usual_s for one in subjects)
    best_s = sum(one.count * min(one.best_s, one.usual_s) for one in subjects)
    measurements = _counted(sum(one.num_measured for one in subjects), "measurement")
    return [
        f"tuned: {measurements} of {_counted(len(subjects), 'kernel')}, {len(better)} with other tiles; "
        f"their calls {_ms(usual_s)} before, {_ms(best_s)} now"
    ]


NOISE = 0.03
"""Of a time: what is nearer is no gain and no loss."""


def _gain(call_s: float, eager_s: float) -> str:
    """Whether the model gained, in a line."""
    if abs(call_s / eager_s - 1) <= NOISE:
        return "no gain: a call takes as long as eager's"
    if call_s < eager_s:
        return f"gain: {eager_s / call_s:.2f} times eager's speed"
    return f"loss: {eager_s / call_s:.2f} times eager's speed, this module is better left to eager"


def _in_eager(module: Any, inputs: tuple[Any, ...]) -> None:
    try:
        with torch.no_grad():
            module(*inputs)
    except Exception as error:
        raise InputError(f"the module fails on its inputs in eager: {type(error).__name__}: {error}") from error


def _called(call: Any, inputs: tuple[Any, ...], train: bool) -> None:
    with torch.set_grad_enabled(train):
        out = call(*inputs)
    if train:
        _backward(out)


def _by_turns(call: Any, module: Any, inputs: tuple[Any, ...], train: bool) -> tuple[float, float]:
    """Median seconds of a call, and of eager's: of one thread CPU time, as in trials, since a busy machine's wall clock
    says "loss" of a model that gains."""
    times: tuple[list[float], list[float]] = ([], [])
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    began = time.perf_counter()
    for n in range(ROUNDS):
        if n >= LEAST and time.perf_counter() - began > SPEND_S:
            break
        for function, taken_s in zip((call, module), times, strict=True):
            start = clock()
            _called(function, inputs, train)
            taken_s.append(clock() - start)
    return median(times[0]), median(times[1])


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def _backward(out: Any) -> None:
    """Backward of the first tensor that has one, in any nesting of tuples, lists and dicts (a ModelOutput is one)."""
    leaf = next((p for p in tree_leaves(out) if isinstance(p, torch.Tensor) and p.requires_grad), None)
    if leaf is None:
        raise InputError(
            "--train: no output has a gradient: none of the module's parameters and inputs has requires_grad=True, "
            "or the outputs are detached; leave out --train, or set requires_grad on what is to be trained"
        )
    leaf.sum().backward()
