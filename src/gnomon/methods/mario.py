"""Mario: activation checkpointing whose recompute hides in pipeline bubbles (Liu et al., PPoPP 2025).

Four passes over any schedule of forwards `F` and backwards, whole (`B`) or split (`I`, which what was computed again
serves first, and `W`), without composite actions: `apply_checkpoint` (C and R instead of F),
`overlap_recompute` (R does not wait for the gradient), `remove_redundancy` (no checkpoint where backward follows at
once), `prepose_forward` (later forwards into idle gaps); `mario` runs them in turn. Each returns a Program that
`validate` accepts. They pay when receives block the compute stream; with receives on a stream of their own
a recompute never waits for a gradient and pass 2 changes nothing.
Left out: the search over schedules and batch sizes around the passes, which is `search`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count

import numpy as np
from numpy.typing import NDArray

from gnomon import orders
from gnomon.errors import PlanError, ProgramError
from gnomon.lowering.edit import Row, rows_of, with_rows
from gnomon.methods.method import Context, Method, Param, Params, Simulate
from gnomon.plans import Pass, Plan, Saved
from gnomon.program import STANDARD_KINDS, Kind, Program, Structure, issue_order_peak, structure_of, validate
from gnomon.simulate.play import Times

Sizes = Mapping[str, float]
_FORWARD = ("F", "C")
_BACKWARD = ("B", "I")
"""What needs a gradient; `W` follows `I`."""
_WITH_FORWARD = ("LOAD", "RECV_F", "F", "C", "SEND_F")


def mario(program: Program, simulate: Simulate, *, sizes: Sizes, limit: float = float("inf")) -> Program:
    """All four passes, in their order.

    sizes: bytes by buffer label; limit: bytes of issue-order peak allowed on any rank. ProgramError when the limit
    is exceeded before the last pass, which itself only takes what fits.
    """
    out = remove_redundancy(overlap_recompute(apply_checkpoint(program)))
    _, worst = _peaks(validate(out), sizes)
    if worst > limit:
        raise ProgramError(
            f"checkpointed, the worst rank still needs {worst:g} of {limit:g} bytes; use more stages or smaller units"
        )
    return prepose_forward(out, simulate, sizes=sizes, limit=limit)


def apply_checkpoint(program: Program, where: Callable[[int, int], bool] | None = None) -> Program:
    """Pass 1: makes forwards keep only their input (`C`), and a recompute (`R`) stands right before each backward.

    where: (stage, unit) -> checkpoint it? None checkpoints all. PlanError when a backward is part of a composite
    action: there a recompute has no place of its own.
    """
    edited = []
    for rows in rows_of(program):
        out: list[Row] = []
        for row in rows:
            chosen = row.kind in ("F", *_BACKWARD) and (where is None or where(*row.place))
            if chosen and row.group >= 0:
                raise PlanError(f"Mario checkpoints actions by themselves; {row} is part of a composite one")
            if chosen and row.kind == "F" and row.override is not None and row.override.effects:
                raise PlanError(f"{row} takes or makes a skip, which R would need again; leave its stage out")
            if chosen and row.kind in _BACKWARD:
                out.append(Row(kind="R", stage=row.stage, unit=row.unit))
            out.append(replace(row, kind="C") if chosen and row.kind == "F" else row)
        edited.append(out)
    return _valid(with_rows(program, edited, kinds=_with_recompute(program.kinds)))


def overlap_recompute(program: Program) -> Program:
    """Pass 2: issues each recompute before the receive of the gradient that its backward needs.

    The receive and the recompute are adjacent, so what is live during the backward, and with it the issue-order peak,
    stays.
    """
    edited = []
    for rows in rows_of(program):
        out: list[Row] = []
        for row in rows:
            at = len(out)
            if row.kind == "R":
                # Only over the receive of its own gradient: over another row the recompute would raise the issue-order
                # peak.
                while at and out[at - 1].kind == "RECV_B" and out[at - 1].place == row.place:
                    at -= 1
            out.insert(at, row)
        edited.append(out)
    return _valid(with_rows(program, edited))


def remove_redundancy(program: Program) -> Program:
    """Pass 3: turns a checkpointed forward whose recompute comes next on its stream back into a plain one."""
    streams = {kind.name: kind.stream for kind in program.kinds}
    edited = []
    for rows in rows_of(program):
        # A receive on the compute stream computes nothing, so it does not part a forward from its recompute.
        compute = [row for row in rows if streams[row.kind] == streams["C"] and row.kind != "RECV_B"]
        plain = {
            one.place
            for one, following in zip(compute, compute[1:], strict=False)
            if one.kind == "C" and following.kind == "R" and following.place == one.place
        }
        edited.append(
            [
                replace(row, kind="F") if row.kind == "C" and row.place in plain else row
                for row in rows
                if not (row.kind == "R" and row.place in plain)
            ]
        )
    return _valid(with_rows(program, edited))


def prepose_forward(
    program: Program, simulate: Simulate, *, sizes: Sizes, limit: float = float("inf"), tries: int | None = None
) -> Program:
    """Pass 4: moves forwards ahead of the backward before them, where a stream is idle, while memory allows.

    A move takes one unit's forward over one backward on a run of neighbouring stages at once, because a later stage
    can often only go ahead together with those that feed it. A move is kept when it lowers the makespan, or leaves
    it and lowers the peaks; one that deadlocks or exceeds `limit` bytes of issue-order peak on a rank is refused.
    Stops when no move helps, when the makespan is at a bound that none can beat, or after `tries` orders were played.
    """
    rows, structure = rows_of(program), validate(program)
    times = simulate(structure)
    # Compared in this order: time first, and memory between orders that take equally long.
    score = (float(times.end.max()), _peaks(structure, sizes)[0])
    floor = _floor(structure, times)
    tries_left, moving = count() if tries is None else iter(range(tries)), True
    # Each accepted order lowers the score, and there are finitely many orders: it ends.
    while moving and score[0] > floor:
        moving = False
        # `left` last: zip asks its iterators in turn, and a try must not be counted where no move is left.
        for moved, _ in zip(_moves(structure, times, rows), tries_left, strict=False):
            try:
                trial = structure_of(with_rows(program, moved))
            # The move deadlocks.
            except ProgramError:
                continue
            if trial is None:
                continue
            played = simulate(trial)
            last = float(played.end.max())
            # Memory is asked only of orders that time does not refuse: most are slower.
            if last > score[0]:
                continue
            total, worst = _peaks(trial, sizes)
            if worst <= limit and (last, total) < score:
                rows, structure, times, score = moved, trial, played, (last, total)
                moving = True
                break
    return structure.program


def _moves(structure: Structure, times: Times, rows: list[list[Row]]) -> Iterator[list[list[Row]]]:
    """Row lists after each joint move: short runs of stages first, then deep stages, then early units."""
    stages = structure.program.num_stages
    units = sorted({int(structure.program.unit[row]) for row in _after_stalls(structure, times)})
    for span in range(1, stages + 1):
        for first in range(stages - span, -1, -1):
            for unit in units:
                moved = _hoisted(rows, unit, range(first, first + span))
                if moved is not None:
                    yield moved


def _after_stalls(structure: Structure, times: Times) -> list[int]:
    """Rows of the forwards that are the next ones after an idle gap of their rank's compute stream."""
    program, position = structure.program, structure.order.position
    forward = np.array([kind.name in _FORWARD for kind in program.kinds])
    stalled: list[int] = []
    for lane in _compute_lanes(program):
        start, end = times.start[position[lane]], times.end[position[lane]]
        forwards = lane[forward[program.kind[lane]]]
        # An action that starts later than the one before it ended follows a gap.
        after = np.searchsorted(forwards, lane[1:][start[1:] > end[:-1]])
        stalled += forwards[after[after < len(forwards)]].tolist()
    return stalled


def _compute_lanes(program: Program) -> list[NDArray[np.int64]]:
    """Rows of each rank class on the stream of backwards."""
    compute = program.streams.index(next(kind.stream for kind in program.kinds if kind.name in _BACKWARD))
    # Rows are numbered class by class, so class_ptr cuts the rising numbers into one lane a class.
    rows = np.flatnonzero(program.stream == compute)
    return np.split(rows, np.searchsorted(rows, program.class_ptr[1:-1]))


def _floor(structure: Structure, times: Times) -> float:
    """A makespan that no move can beat: on some rank, the start of its first action, the work up to an action behind
    its last forward, and what must follow that. Moves leave first actions, and everything behind the last forwards,
    where they are."""
    edges, position = structure.deps.edges, structure.order.position
    busy, lag = (times.end - times.start)[position], (times.visible - times.end)[position]
    forward = np.array([kind.name in _FORWARD for kind in structure.program.kinds])
    settled = []
    for lane in _compute_lanes(structure.program):
        last = np.flatnonzero(forward[structure.program.kind[lane]]).max(initial=0)
        settled.append((float(times.start[position[lane[0]]]) + np.cumsum(busy[lane])[last:], lane[last:].tolist()))
    after: dict[int, list[tuple[int, float]]] = {}
    for _, rows in settled:
        for source, target in zip(rows, rows[1:], strict=False):
            after.setdefault(source, []).append((target, 0.0))
    within = edges.distance == 0
    for source, target, data in np.transpose([edges.source[within], edges.target[within], edges.data[within]]).tolist():
        after.setdefault(source, []).append((target, float(lag[source]) if data else 0.0))
    tail: dict[int, float] = {}
    # Longest path to the end, over rows in reverse topological order.
    for row in structure.order.rows[::-1].tolist():
        tail[row] = max((late + float(busy[to]) + tail.get(to, 0.0) for to, late in after.get(row, ())), default=0.0)
    return max(float(done) + tail.get(row, 0.0) for ends, rows in settled for done, row in zip(ends, rows, strict=True))


def _hoisted(rows: list[list[Row]], unit: int, stages: range) -> list[list[Row]] | None:
    """Rows with the unit's forward (its load, receive and send with it) moved before the backward ahead of it, on
    all of `stages`; None where some stage has no such backward."""
    out = list(rows)
    for stage in stages:
        cls = next((c for c, listed in enumerate(out) if _forward_at(listed, stage, unit) is not None), -1)
        moved = _hoist(out[cls], stage, unit) if cls >= 0 else None
        if moved is None:
            return None
        out[cls] = moved
    return out


def _forward_at(rows: Sequence[Row], stage: int, unit: int) -> int | None:
    return next((i for i, row in enumerate(rows) if row.kind in _FORWARD and row.place == (stage, unit)), None)


def _hoist(rows: list[Row], stage: int, unit: int) -> list[Row] | None:
    at = _forward_at(rows, stage, unit)
    assert at is not None
    backward = next((i for i in range(at, -1, -1) if rows[i].kind in _BACKWARD), None)
    if backward is None:
        return None
    place = rows[backward].place
    # Before the backward's own recompute and receive, which stay next to it.
    target = min(i for i, row in enumerate(rows) if row.place == place and row.kind in ("R", "RECV_B", *_BACKWARD))
    moved_rows = [
        i for i, row in enumerate(rows) if row.place == (stage, unit) and row.kind in _WITH_FORWARD and i > target
    ]
    others = [row for i, row in enumerate(rows) if i not in moved_rows]
    return [*others[:target], *(rows[i] for i in moved_rows), *others[target:]]


def _with_recompute(kinds: tuple[Kind, ...]) -> tuple[Kind, ...]:
    known = {kind.name for kind in kinds}
    return kinds + tuple(kind for kind in STANDARD_KINDS if kind.name in ("C", "R") and kind.name not in known)


def _peaks(structure: Structure, sizes: Sizes) -> tuple[float, float]:
    """Sum and maximum over rank classes of the issue-order peak."""
    peaks = [peak.bytes for peak in issue_order_peak(structure.program, structure.deps, sizes)]
    return sum(peaks), max(peaks)


def _valid(program: Program) -> Program:
    validate(program)
    return program


def _rewrite(program: Program, params: Params, context: Context) -> Program:
    """Runs all four passes; where checkpointing alone does not fit, without the last, so that memory says by how
    much."""
    out = remove_redundancy(overlap_recompute(apply_checkpoint(program)))
    if _peaks(validate(out), context.sizes)[1] > context.limit:
        return out
    tries = int(params["tries"])
    return prepose_forward(out, context.simulate, sizes=context.sizes, limit=context.limit, tries=tries)


def _refusal(plan: Plan) -> str | None:
    saved = plan.saved
    if saved.preset != "none" or saved.rules:
        return (
            "it recomputes the forward of whole stages, beside which nothing is recomputed; set saved.preset = 'none'"
        )
    if plan.optimizer.zero == 3:
        return "under ZeRO 3 a recompute would need its parameters gathered once more, which has no rows; use zero <= 2"
    return None


def _variants(plan: Plan) -> Iterator[Plan]:
    able = plan.num_pipeline_ranks > 1 and plan.optimizer.zero < 3 and plan.schedule.vocabulary == "ends"
    able = able and not METHOD.used(plan)
    if able and not orders.find(plan.schedule.name).composite:
        passes = (*plan.schedule.passes, Pass(name="mario"))
        yield replace(plan, saved=Saved(), schedule=replace(plan.schedule, passes=passes))


METHOD = Method(
    name="mario",
    paper="Mario, Liu et al., PPoPP 2025",
    about="forwards keep only their input, and recomputation runs in pipeline bubbles",
    switch="schedule.passes",
    exactness="bitwise",
    params=(Param(name="tries", about="orders with forwards moved ahead of a backward that are played", default=64),),
    rewrite=_rewrite,
    refusal=_refusal,
    variants=_variants,
)
