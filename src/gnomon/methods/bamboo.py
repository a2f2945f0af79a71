"""Bamboo: each pipeline rank holds a copy of the next one's stage, and does the work of both once that rank has failed
(Thorpe et al., NSDI 2023).

`redundant(program)` is what every step pays for it: the forward of the copy right after what it reads was sent (FRC),
so that it runs while the rank waits for a gradient; and at the end the gradient of the stage, by which the copy is
updated too. `fail_over(program, dead)` is a step after a failure. It merges the instruction lists of the two ranks:
step by step of the failure-free schedule, backwards before forwards. Messages between the two become local hand-offs,
those with other ranks go to the predecessor, gradients of both are reduced, and one update covers both. Leaves out
catching up within a step that had begun, and processes (`runtime.launch.takeover`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gnomon.errors import PlanError
from gnomon.lowering.edit import Row, rows_of, with_rows
from gnomon.lowering.insertions import bucket, by_name
from gnomon.methods.method import Context, Method, Param, Params
from gnomon.orders.one_f_one_b import ORDER as ONE_F_ONE_B
from gnomon.plans import Pass, Plan
from gnomon.program import (
    BufferClass,
    BufferRef,
    Communicator,
    Kind,
    Override,
    Program,
    RowEffect,
    effects,
    validate,
)
from gnomon.simulate.durations import Durations
from gnomon.simulate.play import Clock, play

_BACKWARD = ("R", "B", "I", "W")

NAME = "bamboo"

NOBODY = -1
"""Rank that failed, where none has."""


FRC = Kind(name="FRC", effects=effects("write SC, write KX"))
"""The forward of the next rank's stage, redundantly: what its backward would need stays (SC), and its input (KX)."""
FORGET = Kind(name="FORGET", effects=effects("consume SC, write KD"))
"""What a redundant forward kept is let go, as the next rank has gone back through it. Gradients sent stay (KD)."""
SEND_COPY = Kind(name="SEND_COPY", stream="send_copy", effects=effects("read G"), comm="copy", message="send", hop=-1)
RECV_COPY = Kind(name="RECV_COPY", stream="recv_copy", comm="copy", message="recv", hop=-1)
OPT_COPY = Kind(name="OPT_COPY")
"""The update of the copy, by the gradient that its rank has sent."""
KINDS = (FRC, FORGET, SEND_COPY, RECV_COPY, OPT_COPY)
BUFFERS = (
    BufferClass(name="SC", memory="not in the step's"),
    BufferClass(name="KX", memory="not in the step's"),
    BufferClass(name="KD", memory="not in the step's"),
    BufferClass(name="GC", memory="not in the step's", per="stage"),
)


def redundant(program: Program) -> Program:
    """The step in which each pipeline rank runs the forward of the next one's stage too, and keeps its copy of it up to
    date; the last rank has that of the first. PlanError for ranks that hold several stages."""
    listed, count = rows_of(program), program.num_classes
    if program.num_stages != count:
        raise PlanError(f"ranks hold {program.num_stages / count:g} stages each, and a copy is of one; use one a rank")
    rows = [with_copy(mine, cls, count, holds=True, sends=True) for cls, mine in enumerate(listed)]
    names = {comm.name for comm in program.comms}
    changed = with_rows(program, rows, kinds=(*program.kinds, *KINDS))
    comms = program.comms if "copy" in names else (*program.comms, Communicator(name="copy", semantics="buffered"))
    changed = replace(changed, comms=comms, buffers=(*program.buffers, *BUFFERS))
    validate(changed)
    return changed


def with_copy(rows: Sequence[Row], stage: int, count: int, *, holds: bool, sends: bool) -> list[Row]:
    """The rows of the rank that has `stage` of `count` with those of a copy. holds: whether it has a copy of the next
    stage; sends: whether the rank before it has a copy of this rank's stage."""
    copy, before = (stage + 1) % count, (stage - 1) % count
    units = [row.unit for row in rows if row.kind == "F" and row.stage == stage]
    out: list[Row] = []
    for row in rows:
        here = holds and row.stage == stage
        if row.kind == "OPT" and row.stage == stage:
            out += _copies_meet(stage, copy, before, count, holds=holds, sends=sends)
        first = copy == 0 and here  # what the first stage reads is in the batch: before this rank has anything to do
        if first and row.kind == "RECV_F":
            out.append(Row(kind="FRC", stage=copy, unit=row.unit))
        out.append(row)
        # After the message, which the next rank waits for. The copy reads the same tensor that was sent.
        if here and not first and row.kind == "SEND_F":
            out.append(Row(kind="FRC", stage=copy, unit=row.unit))
        # The first stage goes back through a unit after all others, some `count` backwards of this rank later.
        gone = units.index(row.unit) - (count if first else 0) if here and row.kind == "B" else -1
        if gone >= 0:
            out.append(Row(kind="FORGET", stage=copy, unit=units[gone]))
        if row.kind == "OPT" and here:
            out += [Row(kind="FORGET", stage=copy, unit=unit) for unit in units[-count:] if first]
            consumed = [BufferRef(name, copy, unit) for unit in units for name in ("KX", "KD")]
            freed = tuple(RowEffect("consume", ref) for ref in (BufferRef("GC", copy), *consumed))
            out.append(Row(kind="OPT_COPY", stage=copy, override=Override(effects=freed)))
    return out


def _copies_meet(stage: int, copy: int, before: int, count: int, *, holds: bool, sends: bool) -> list[Row]:
    """Lists the messages by which gradients get to the copies, for each other end that is there."""
    # A kind's hop says a neighbour. Only where the ring closes, between the last rank and the first, is the peer named.
    got = Override(effects=(RowEffect("write", BufferRef("GC", copy)),), peer=copy if copy != stage + 1 else None)
    sent = Override(peer=before) if before != stage - 1 else None
    receives = [Row(kind="RECV_COPY", stage=stage, override=got)] if holds else []
    return receives + ([Row(kind="SEND_COPY", stage=stage, override=sent)] if sends else [])


def fail_over(program: Program, dead: Sequence[int], *, one_update: bool = True) -> Program:
    """The step without the rank classes `dead`: each one's predecessor takes over its stages; later classes move up.

    The predecessor of the first rank is the last. A step of the failure-free schedule is what starts together when
    every forward and backward takes one second and all else nothing. The update is one action named by all stages
    (`1..2.OPT`), to be priced as such; one for each stage without `one_update`. PlanError when a predecessor is dead
    too (then only a checkpoint helps), when a class has several ranks (one of them fails: give it a class of its own),
    or when lists cannot be merged.
    """
    _check(program, dead)
    rows, kinds, steps = rows_of(program), by_name(program.kinds), _steps(program)
    for rank in dead:
        # Rank 0's shadow is the last rank: the ring closes.
        shadow = (rank - 1) % program.num_classes
        rows[shadow] = _merge(rows[shadow], rows[rank], kinds, steps, one_update=one_update)
    alive = [cls for cls in range(program.num_classes) if cls not in dead]
    out = with_rows(program, [rows[cls] for cls in alive], counts=tuple(program.counts[cls] for cls in alive))
    validate(out)
    return out


def _check(program: Program, dead: Sequence[int]) -> None:
    ranks = program.num_classes
    if any(not 0 <= rank < ranks for rank in dead):
        raise PlanError(f"ranks {tuple(dead)} cannot fail; the Program has rank classes 0 to {ranks - 1}")
    for rank in dead:
        shadow = (rank - 1) % ranks
        if shadow in dead:
            raise PlanError(
                f"ranks {shadow} and {rank} failed, and only {shadow} has a copy of {rank}; restart from a checkpoint"
            )
        if program.counts[rank] != 1 or program.counts[shadow] != 1:
            raise PlanError(f"rank classes {shadow} and {rank} must be single ranks; give the failed replica its own")


def _merge(
    ours: Sequence[Row], theirs: Sequence[Row], kinds: dict[str, Kind], steps: dict[Row, float], *, one_update: bool
) -> list[Row]:
    """The rows of both ranks as one list."""
    slots = sorted(
        [*_slots(ours, kinds), *_slots(theirs, kinds)],
        # By the failure-free schedule; backwards first among what starts together, since they free activations.
        key=lambda slot: (steps[slot.work], slot.work.kind not in _BACKWARD),
    )
    stages = {slot.work.stage for slot in slots}
    merged_rows = [row for slot in slots for row in slot.rows if not _within(row, kinds, stages)]
    merged_rows += _one_sum([row for row in ours if _is_tied_sum(row)], [row for row in theirs if _is_tied_sum(row)])
    norms = [row for row in [*ours, *theirs] if row.kind == "NORM"]
    merged_rows += _one_norm(norms) if norms else []
    updates = sorted((row for row in [*ours, *theirs] if row.kind == "OPT"), key=lambda row: row.stage)
    return merged_rows + (_one_update(updates, kinds) if one_update else updates)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slot:
    """One forward or backward with what belongs to it: loads and receives before, sends and reductions after."""

    work: Row
    rows: tuple[Row, ...]


def _slots(rows: Sequence[Row], kinds: dict[str, Kind]) -> Iterator[_Slot]:
    """A rank's rows as slots, without what ends the step: sums of tied parameters' gradients, the gradient norm and
    updates."""
    work: Row | None = None
    slot_rows: list[Row] = []
    for row in rows:
        kind = kinds[row.kind]
        if row.kind in ("NORM", "OPT") or _is_tied_sum(row):
            continue
        if row.group >= 0:
            raise PlanError(f"{row} starts together with others; Bamboo merges plain actions only")
        # Rows of no unit are about the stage: reductions, which come after its last backward.
        after = kind.message == "send" or row.unit < 0
        if work is not None and not after:
            yield _Slot(work=work, rows=tuple(slot_rows))
            work, slot_rows = None, []
        slot_rows.append(row)
        if not after and not kind.message and kind.stream == kinds["B"].stream:
            work = row
    if work is None:
        raise PlanError("a rank's list ends without a forward or backward; there is nothing to merge")
    yield _Slot(work=work, rows=tuple(slot_rows))


def _steps(program: Program) -> dict[Row, float]:
    """Finds when each row starts if forwards and backwards take one second each."""
    structure, kinds = validate(program), by_name(program.kinds)
    busy = [
        float(key.kind in ("F", "C", *_BACKWARD) and kinds[key.kind].stream == kinds["B"].stream)
        for key in program.keys
    ]
    start = play(Clock.of(structure, Durations(busy=np.array(busy)))).start[structure.order.position]
    flat = [row for listed in rows_of(program) for row in listed]
    return dict(zip(flat, start.tolist(), strict=True))


def _within(row: Row, kinds: dict[str, Kind], stages: set[int]) -> bool:
    """Whether a row is a message between two of these stages."""
    kind = kinds[row.kind]
    if not kind.message:
        return False
    peer = row.override.peer if row.override is not None else None
    if peer is None:
        peer = row.stage + (kind.hop if kind.message == "send" else -kind.hop)
    if peer in stages and abs(peer - row.stage) != 1:
        raise PlanError(f"{row} goes to stage {peer} of the same rank, which is no neighbour; it has no local hand-off")
    return peer in stages


def _is_tied_sum(row: Row) -> bool:
    """Whether it adds up a tied parameter's gradients between stages; that of a stage's replicas meets no other row."""
    return row.kind == "AR" and row.group >= 0


def _one_sum(ours: Sequence[Row], theirs: Sequence[Row]) -> list[Row]:
    """Sums of gradients of parameters that stages share: of those between the two ranks nothing is left to send."""
    # A sum between just these two ranks has no other member left.
    both = {row.group for row in ours} & {row.group for row in theirs}
    return [row for row in [*ours, *theirs] if row.group not in both]


def _one_norm(norms: Sequence[Row]) -> list[Row]:
    """One gradient norm of all stages whose gradients these read, in the meeting that they were part of."""
    read = [effect for row in norms if row.override is not None for effect in row.override.effects or ()]
    return [replace(norms[0], override=Override(effects=tuple(dict.fromkeys(read))))]


def _one_update(updates: Sequence[Row], kinds: dict[str, Kind]) -> list[Row]:
    """One update of all stages that these update."""
    if any(row.override is not None for row in updates):
        raise PlanError(f"{updates[0]} differs from its kind; Bamboo joins plain updates only")
    return [bucket(kinds["OPT"], [row.stage for row in updates])] if updates else []


def _rewrite(program: Program, params: Params, context: Context) -> Program:
    """What every step pays for copies; or, of a replica that lost `rank`, its step: the others, at full strength, wait
    for it where gradients are reduced."""
    rank = int(params["rank"])
    if rank == NOBODY:
        return redundant(program)
    if not 0 <= rank < program.num_classes:
        raise PlanError(f"bamboo: rank = {rank}, but pipeline ranks are 0 to {program.num_classes - 1}")
    counts = [n for cls, n in enumerate(program.counts) if cls != rank]
    # `fail_over` merges classes of single ranks. Here all ranks of the classes are merged alike, and the counts of
    # those that are left are put back.
    single = replace(program, counts=(1,) * program.num_classes)
    return replace(fail_over(single, [rank], one_update=False), counts=tuple(counts))


def failed_rank(plan: Plan) -> int:
    """Finds the rank that failed in a plan that names the method; NOBODY where none has."""
    return int(METHOD.read_from(plan)["rank"])


def without(plan: Plan) -> Plan:
    """The plan without copies."""
    passes = tuple(one for one in plan.schedule.passes if one.name != NAME)
    return replace(plan, schedule=replace(plan.schedule, passes=passes))


def _refusal(plan: Plan) -> str | None:
    if plan.num_pipeline_ranks < 2:
        return "the rank before the failed one takes over its stages, and there is no other pipeline rank; use pp >= 2"
    if plan.optimizer.zero or plan.optimizer.offload is not None:
        return "ZeRO's and host updates of two ranks have no common rows; use optimizer.zero = 0 on the device"
    if plan.schedule.name != ONE_F_ONE_B.name:
        return f"it merges the rows of {ONE_F_ONE_B.name}, and this schedule is {plan.schedule.name}"
    if failed_rank(plan) == NOBODY and plan.num_stages != plan.num_pipeline_ranks:
        return "a rank has a copy of one stage, and here ranks hold several; use one stage a rank"
    return None


def _variants(plan: Plan) -> Iterator[Plan]:
    with_pass = replace(plan, schedule=replace(plan.schedule, passes=(*plan.schedule.passes, Pass(name=NAME))))
    if plan == without(plan) and _refusal(with_pass) is None:
        yield with_pass


METHOD = Method(
    name=NAME,
    paper="Bamboo, Thorpe et al., NSDI 2023",
    about="each pipeline rank has a copy of the next one's stage, and takes over in the step in which that one is lost",
    switch="schedule.passes",
    exactness="bitwise",
    searched=True,
    params=(Param(name="rank", about="the pipeline rank that has failed; -1: none, all have copies", default=NOBODY),),
    rewrite=_rewrite,
    refusal=_refusal,
    variants=_variants,
)
