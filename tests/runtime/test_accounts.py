"""What ran is what was predicted: FLOPs of products exactly, memory by class, and the interpreter's own account of it.

The account of the measured Timeline is that of the allocator, byte for byte, between any two actions; prediction and
account agree by class after every row. Differences that remain are written beside their tolerance.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

from runtime import accounted, jobs  # noqa: E402
from runtime.parity import FP32  # noqa: E402

import gnomon  # noqa: E402
from gnomon.plans import Plan  # noqa: E402
from gnomon.prediction import Prediction  # noqa: E402
from gnomon.prediction.memory import held_moves  # noqa: E402
from gnomon.runtime.watch.measure import CLASSES  # noqa: E402
from gnomon.software import stack  # noqa: E402
from gnomon.timeline import Timeline, memory_curve, peaks  # noqa: E402
from gnomon.timeline.text import parse_timeline, print_timeline  # noqa: E402

pytestmark = pytest.mark.torch


@cache
def predicted(name: str) -> Prediction:
    plan = _plan(name)
    cluster = f"1x{plan.world_size}xa100-sxm-80gb" if plan.world_size > 1 else "local"
    return gnomon.predict(accounted.graph_of(name), cluster, plan, accounted.WORKLOAD, stack("gnomon"))


def _plan(name: str) -> Plan:
    return replace(accounted.PLANS[name], precision=FP32)


def of_class(timeline: Timeline, cls: int, buffer: str) -> np.ndarray:
    return memory_curve(timeline, f"class {cls}", buffer).bytes


@pytest.mark.parametrize("name", accounted.PLANS)
def test_products_are_those_of_the_graph(name: str) -> None:
    """Forward, both gradients and recompute of each rank's layers, for all its microbatches."""
    actual, plan = predicted(name), _plan(name)
    phases = ("forward", "input_grad", "weight_grad", "recompute")
    for rank, results in jobs.results(plan.world_size).items():
        stages = [stage for stage in actual.stages if rank in stage.ranks]
        want = actual.pricing.count * sum(stage.phase(phase).flops for stage in stages for phase in phases)
        assert results.accounted[name].flops == want


@pytest.mark.parametrize("name", sorted(accounted.ALLOCATOR))
def test_the_account_of_memory_is_the_allocators(name: str) -> None:
    """To the scalars that lie about (losses, norms): a quarter of a KiB of some MiB."""
    for results in jobs.results(_plan(name).world_size).values():
        rows = results.accounted[name].live
        base = sum(rows[0].account) - rows[0].live
        for row in rows:
            assert abs(base + row.live - sum(row.account)) <= 256, row.action


PARTS = {
    "parameters": ("parameters", "master", "states"),
    "gradients": ("gradients",),
    "activations": ("activations", "logits"),
    "communication": ("communication",),
}
"""Classes that are compared together."""


@pytest.mark.parametrize("name", accounted.PLANS)
def test_every_class_of_memory_is_as_predicted_after_every_row(name: str) -> None:
    """On the first rank of each class, in bytes. Of each part, over its peak:

    parameters, master and states: exactly. Gradients: exactly, but for what tensor-parallel ranks add up, which is
    packed for that (norms: 1 %). Activations and logits: 1 %, which is ids (8 bytes a token and microbatch, which here
    are a view of the batch), and under sequence parallelism ids of all tokens, and vectors of norms between I and W (2
    and 10 % where nearly nothing else is kept). Messages that were sent, which live until an answer proves that they
    were taken: at most one for each microbatch both ways more than predicted. The peak of all: 5 %."""
    actual, plan = predicted(name), _plan(name)
    message = max(size for label, size in actual.sizes.items() if label.endswith(("X", "DY")))
    for memory in actual.memory:
        measured = measured_rows(name, actual, memory.rank_class)
        want = predicted_rows(actual, memory.rank_class)
        close = {"parameters": 0.0, "gradients": 0.01 if plan.layout.sequence_parallel else 0.0, "activations": 0.01}
        if "full" in (plan.saved.preset, *(rule.preset for rule in plan.saved.rules)):
            close["activations"] = 0.1 if plan.layout.sequence_parallel else 0.02
        for part, share in close.items():
            far = np.abs(measured[part] - want[part])
            if part == "gradients" and name.endswith(", tied"):  # the table's go with the first of its two updates
                far = far[: next(i for i in range(len(far)) if "OPT" in row_of(actual, memory.rank_class, i))]
            assert far.max() <= share * want[part].max(), (part, row_of(actual, memory.rank_class, int(far.argmax())))
        sent = measured["communication"] - want["communication"]
        assert -2 * message <= sent.min() and sent.max() <= 2 * actual.pricing.count * message
        assert sum(measured.values()).max() == pytest.approx(sum(want.values()).max(), rel=0.05)


def rows_of(result: Prediction, cls: int) -> range:
    program = result.structure.program
    return range(int(program.class_ptr[cls]), int(program.class_ptr[cls + 1]))


def row_of(result: Prediction, cls: int, index: int) -> str:
    return result.structure.program.token(rows_of(result, cls)[index])


def measured_rows(name: str, result: Prediction, cls: int) -> dict[str, np.ndarray]:
    """Part -> bytes after each row."""
    first = next(memory.ranks[0] for memory in result.memory if memory.rank_class == cls)
    noted = jobs.results(result.plan.world_size)[first].accounted[name].held
    now, after, at = noted[0][1], [], dict(noted[1:])
    for row in rows_of(result, cls):
        now = at.get(row, now)
        after.append(now)
    columns = dict(zip(CLASSES, np.array(after, float).T, strict=True))
    return {part: sum((columns[kind] for kind in classes), np.zeros(len(after))) for part, classes in PARTS.items()}


def predicted_rows(result: Prediction, cls: int) -> dict[str, np.ndarray]:
    """The same, of the prediction: what stays, and what has come and gone by the end of each row."""
    program, rows = result.structure.program, rows_of(result, cls)
    moves = held_moves(result.structure, result.pricing, result.sizes)
    rank = next(memory.ranks[0] for memory in result.memory if memory.rank_class == cls)
    static = [stage.static_bytes() for stage in result.stages if rank in stage.ranks]
    out = {}
    for part, classes in PARTS.items():
        of_part = [program.buffers[buffer].memory in classes for buffer in moves.buffer.tolist()]
        mine = np.array(of_part) & (moves.row >= rows.start) & (moves.row < rows.stop)
        come = np.bincount(moves.row[mine] - rows.start, moves.bytes[mine], len(rows))
        there = part == "parameters" or (part == "gradients" and result.plan.optimizer.zero < 2)
        stays = sum(entry[kind] for entry in static for kind in classes) if there else 0
        out[part] = np.cumsum(come) + stays
    return out


@pytest.mark.parametrize("name", ["one device", "gpipe", "full", "selective"])
def test_the_allocators_peak_is_as_predicted(name: str) -> None:
    """With what lives inside an action only, to 3 %: the prediction lets go of whole layers. Without the
    update, which works on a few MiB at a time: more than this model has."""
    (memory,) = predicted(name).memory
    want = memory.allocated_bytes - memory.by_class["workspace"]
    rows = jobs.results(1)[0].accounted[name].live
    base = sum(rows[0].account) - rows[0].live
    assert base + max(row.most for row in rows if not row.action.endswith("OPT")) == pytest.approx(want, rel=0.03)


@pytest.mark.parametrize("name", accounted.PLANS)
def test_the_fullest_moment_is_as_predicted(name: str) -> None:
    """With all that lives inside an action, to 5 %."""
    for memory in predicted(name).memory:
        want = memory.allocated_bytes - memory.by_class["workspace"]
        assert jobs.results(_plan(name).world_size)[memory.ranks[0]].accounted[name].most == pytest.approx(
            want, rel=0.05
        )


@pytest.mark.parametrize("name", ["zero 1", "zero 3", "zero bubble h1", "pp and dp"])
def test_a_measured_timeline_carries_its_memory(name: str) -> None:
    timeline = jobs.results(_plan(name).world_size)[0].accounted[name].timeline
    assert timeline.buffers == CLASSES
    assert all(peak.bytes > 0 and peak.action for peak in peaks(timeline))
    assert parse_timeline(print_timeline(timeline)) == timeline
    for cls in range(len(timeline.workers)):
        gradients = of_class(timeline, cls, "gradients")
        assert gradients[0] == gradients[-1]  # before the first backward, after the update
        assert (gradients[0] == 0) == (_plan(name).optimizer.zero >= 2)
        assert (of_class(timeline, cls, "communication") >= 0).all()
