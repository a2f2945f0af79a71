"""Lina: all-to-all first, on a network that mixture-of-experts layers share with the reduction of gradients.

In backward the exchanges of an expert layer hold up computing and the all-reduce of gradients does not, and neither can
be interrupted. `micro_operations` cuts both, and the experts between two exchanges, into small operations: each
exchange is of some of every rank's experts, so that the first are computed while the others' tokens travel.
`all_to_all_first` issues an all-reduce's operations only where the network would be idle for as long. Programs are
those of `lowering.exchanges`; the network is one stream, whose order is the schedule. Left out: packing of experts
(several on a rank are what is cut), inference.
Source: Li et al. 2023 (Lina, USENIX ATC), sections 4 and 5.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from gnomon.errors import PlanError
from gnomon.lowering.edit import Row, rows_of, with_rows
from gnomon.lowering.exchanges import BACKWARD, COMPUTES, FORWARD, TRAVEL
from gnomon.lowering.insertions import touches
from gnomon.methods.method import Context, Method, Param, Params, Simulate
from gnomon.plans import Pass, Plan
from gnomon.plans.expert_rows import COMBINE, DISPATCH, LINA, has_rows
from gnomon.program import BufferClass, BufferRef, Override, Program, RowEffect, Structure, validate, with_buffers
from gnomon.simulate.play import Times

NETWORK = "network"
"""Stream of exchanges and reductions, one after the other."""
REDUCES = "AR"
OVERRUNS = 32
"""Reductions that may start before an exchange is due and hold it up, at most: each is played."""


def micro_operations(program: Program, *, all_to_all: int, all_reduce: int) -> Program:
    """The Program with each exchange, and the experts between two, in `all_to_all` parts, and each all-reduce in
    `all_reduce` parts (1 leaves them whole), all on one network. The paper's operations are of 30 MB."""
    listed = []
    for rows in rows_of(program):
        cut = _exchanges(rows, all_to_all) if all_to_all > 1 else rows
        listed.append([part for row in cut for part in _on_network(row, all_reduce)])
    part_buffers = tuple(
        BufferClass(name=f"{name}.{part}", memory="communication")
        for name in (TRAVEL if all_to_all > 1 else ())
        for part in range(all_to_all)
    )
    return with_rows(replace(program, buffers=with_buffers(*part_buffers, base=program.buffers)), listed)


def _on_network(row: Row, all_reduce: int) -> Iterator[Row]:
    """The row there, where it is a collective; a reduction in parts."""
    own = row.override or Override()
    if row.kind in COMPUTES:
        yield replace(row, override=replace(own, stream=NETWORK))
    elif row.kind == REDUCES and not own.comm:
        # The name is the key of a price: parts of one size share it, so it says how many they are and not which part it
        # is.
        name = f"{row.stage}{REDUCES}.{all_reduce}" if all_reduce > 1 and not own.name else own.name
        for _ in range(all_reduce if not own.name else 1):
            yield replace(row, override=replace(own, stream=NETWORK, name=name))
    else:
        yield row


def _exchanges(rows: Sequence[Row], parts: int) -> list[Row]:
    """The rows with exchanges in parts. The second exchange of a layer goes with its experts, part by part."""
    rows_of_parts = list[Row]()
    # The exchange that comes first in its direction, and by how many stages the experts are away from it.
    first = {FORWARD[DISPATCH]: 1, BACKWARD[COMBINE]: -1}
    experts = {(row.stage + first[row.kind], row.unit) for row in rows if row.kind in first}
    for row in rows:
        if row.kind in first:
            rows_of_parts += [_part(row, part, parts) for part in range(parts)]
        elif row.kind in COMPUTES:
            continue
        elif (row.stage, row.unit) in experts and row.kind in ("F", "B", "I"):
            step, kind = (1, FORWARD[COMBINE]) if row.kind == "F" else (-1, BACKWARD[DISPATCH])
            after = Row(kind=kind, stage=row.stage + step, unit=row.unit)
            rows_of_parts += [
                one for part in range(parts) for one in (_part(row, part, parts), _part(after, part, parts))
            ]
        else:
            rows_of_parts.append(row)
    return rows_of_parts


def _part(row: Row, part: int, parts: int) -> Row:
    """One of the parts of a row, with what it reads and makes."""
    stage, unit, last = row.stage, row.unit, part == parts - 1
    own = {name: BufferRef(name, stage, unit) for name in ("X", "Y", "S", "DX", "DY")}
    there = {FORWARD[DISPATCH]: 1, FORWARD[COMBINE]: -1, BACKWARD[COMBINE]: -1, BACKWARD[DISPATCH]: 1}
    experts = stage + there.get(row.kind, 0)
    sent, received, dmade, dsent = (BufferRef(f"{name}.{part}", experts, unit) for name in TRAVEL)
    # Only the last part may free what all parts read.
    done = "consume" if last else "read"
    weights, grads = BufferRef("P", stage), BufferRef("G", stage)
    acts: dict[str, list[tuple[str, BufferRef]]] = {
        FORWARD[DISPATCH]: [(done, own["X"]), ("accumulate", own["S"]), ("write", sent)],
        "F": [("read", weights), ("consume", sent), ("accumulate", own["S"]), ("write", received)],
        FORWARD[COMBINE]: [("consume", received), ("accumulate", own["S"]), ("accumulate", own["Y"])],
        BACKWARD[COMBINE]: [(done, own["DY"]), (done, own["S"]), ("write", dmade)],
        "B": [("read", weights), ("consume", dmade), (done, own["S"]), ("write", dsent), ("accumulate", grads)],
        "I": [("read", weights), ("consume", dmade), ("read", own["S"]), ("write", dsent), ("accumulate", own["DY"])],
        BACKWARD[DISPATCH]: [("consume", dsent), (done, own["S"]), ("accumulate", own["DX"])],
    }
    effects = tuple(RowEffect(op, ref) for op, ref in acts[row.kind])  # type: ignore[arg-type]
    return replace(row, override=Override(name=f"{stage}{row.kind}.{parts}", effects=effects))


def all_to_all_first(program: Program, simulate: Simulate, *, overrun: bool = False) -> Program:
    """The Program with its all-reduces issued where the network is idle, in their order, as early as they can start.

    An operation starts when the network is idle and its gradient is there, if it ends before the next exchange is due;
    what finds no such gap comes after all else, before the update. overrun: it may also start in a gap that is too
    short for it, and hold up that exchange, as long as there are few (OVERRUNS). simulate: gives times, from which gaps
    are read; called once for every time something was held up, and once more.
    """
    uses = {kind.name for kind in program.kinds if touches(kind, "G", "consume", "free")} | {"NORM"}
    listed, waiting = [], []
    for rows in rows_of(program):
        late = [row for row in rows if _movable(row)]
        rest = [row for row in rows if not _movable(row)]
        end = next((i for i, row in enumerate(rest) if row.kind in uses), len(rest))
        # Reductions start out at the very end, before the first row that uses a gradient, and are moved forward from
        # there.
        listed.append([*rest[:end], *late, *rest[end:]])
        waiting.append(len(late))
    for cls in range(len(listed)):
        # A turn follows only on an overrun, of which there are OVERRUNS at most.
        overruns_left, moving = OVERRUNS if overrun else 0, waiting[cls] > 0
        while moving:
            structure = validate(with_rows(program, listed))
            line = _NetworkLine.of(structure, simulate(structure), cls, listed[cls], waiting[cls])
            moves, moving = line.fit_moves(overrun=overruns_left > 0)
            overruns_left -= moving
            listed[cls] = _moved(listed[cls], moves)
            waiting[cls] -= len(moves)
            moving = moving and waiting[cls] > 0
    return with_rows(program, listed)


def _movable(row: Row) -> bool:
    return row.kind == REDUCES and (row.override is None or not row.override.comm)


def _moved(rows: Sequence[Row], moves: Sequence[tuple[int, int]]) -> list[Row]:
    """Rows with some put after others. moves: (index of a row, index of the one that it comes after), in order."""
    gone, after = {index for index, _ in moves}, dict[int, list[Row]]()
    for index, anchor in moves:
        after.setdefault(anchor, []).append(rows[index])
    out = list[Row]()
    for index, row in enumerate(rows):
        if index not in gone:
            out += [row, *after.get(index, ())]
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class _NetworkLine:
    """One rank class's network as played, with reductions that have no place yet."""

    spans: tuple[tuple[int, float, float], ...]
    """(index in the class's list, start, end) of rows on the network that have their place, in order."""
    waiting: tuple[tuple[int, float, int, float], ...]
    """(index, when its gradient is complete, index of the row that completes it, seconds) of the others."""

    @staticmethod
    def of(structure: Structure, times: Times, cls: int, rows: Sequence[Row], waiting: int) -> _NetworkLine:
        program = structure.program
        low, high = int(program.class_ptr[cls]), int(program.class_ptr[cls + 1])
        at = structure.order.position[low:high]
        starts, ends = times.start[at].tolist(), times.end[at].tolist()
        reductions = [i for i, row in enumerate(rows) if _movable(row)]
        # Those without a place are the last ones, in the order of issue.
        pending = reductions[len(reductions) - waiting :]
        stream = program.streams.index(NETWORK)
        writers = {kind.name for kind in program.kinds if touches(kind, "G", "accumulate")}
        last = {row.stage: i for i, row in enumerate(rows) if row.kind in writers and i not in set(pending)}
        return _NetworkLine(
            spans=tuple(
                (i, starts[i], ends[i])
                for i in range(len(rows))
                if program.stream[low + i] == stream and i < pending[0]
            ),
            waiting=tuple((i, ends[last[rows[i].stage]], last[rows[i].stage], ends[i] - starts[i]) for i in pending),
        )

    def fit_moves(self, *, overrun: bool) -> tuple[list[tuple[int, int]], bool]:
        """(moves of those that find a gap, whether the last of them holds up what comes after it)."""
        moves, free_from = list[tuple[int, int]](), 0.0
        for index, ready, completes, seconds in self.waiting:
            found = self._gap(max(ready, free_from), completes, seconds, overrun=overrun)
            # Reductions keep their order: where one finds no gap, none behind it may go first.
            if found is None:
                break
            moment, anchor, late = found
            moves.append((index, anchor))
            if late:
                return moves, True
            free_from = moment + seconds
        return moves, False

    def _gap(self, earliest: float, completes: int, seconds: float, *, overrun: bool) -> tuple[float, int, bool] | None:
        """(moment, index of the row to come after, whether the next is held up) of the first gap."""
        idle_from, before = 0.0, -1
        for index, start, end in self.spans:
            moment = max(idle_from, earliest)
            # Not before the row that completes its gradient, or it would wait for itself in issue order.
            if index > completes and moment < start and (overrun or moment + seconds <= start):
                return moment, max(before, completes), moment + seconds > start
            idle_from, before = max(idle_from, end), index
        return None


def lina(program: Program, simulate: Simulate, *, all_to_all: int, all_reduce: int) -> Program:
    """Small operations, all-to-all first: the shorter of the orders with and without reductions that overrun."""
    small = micro_operations(program, all_to_all=all_to_all, all_reduce=all_reduce)
    candidates = [all_to_all_first(small, simulate, overrun=overrun) for overrun in (False, True)]
    return min(candidates, key=lambda one: float(simulate(validate(one)).end.max()))


def _rewrite(program: Program, params: Params, context: Context) -> Program:
    parts = {"all_to_all": int(params["all_to_all"]), "all_reduce": int(params["all_reduce"])}
    if min(parts.values()) < 1:
        raise PlanError(
            f"pass {LINA}: all_to_all = {parts['all_to_all']} and all_reduce = {parts['all_reduce']} parts; "
            f"at least 1 each, which leaves them whole"
        )
    if params["first"] == "issue":
        return micro_operations(program, **parts)
    return lina(program, context.simulate, **parts)


def _refusal(plan: Plan) -> str | None:
    if not has_rows(plan):
        return (
            "it orders the exchanges of experts, which are rows where overlap.experts is set and ranks divide experts; "
            "set overlap.experts = true with ep of 2 or more"
        )
    if any(plan.stage_mesh(stage).etp > 1 for stage in range(plan.num_stages)):
        return "slices of an expert (etp) are exchanged whole; use etp = 1"
    if plan.layout.dispatch not in (None, "all_to_all"):
        return f"dispatch {plan.layout.dispatch} sends tokens to all of their experts at once; use all_to_all"
    if plan.experts.speculate:
        return "speculated rows are no part of an exchange; leave experts.speculate out"
    if plan.optimizer.zero:
        return f"it orders all-reduces, and ZeRO {plan.optimizer.zero} scatters gradients; use optimizer.zero = 0"
    if plan.overlap.in_buckets:
        return "it cuts the all-reduce of each layer by itself; leave overlap.bucket_bytes out"
    return None


def _variants(plan: Plan) -> Iterator[Plan]:
    is_parallel = any(plan.stage_mesh(stage).ep > 1 for stage in range(plan.num_stages))
    whole = replace(plan, overlap=replace(plan.overlap, experts=True, bucket_bytes=None, buckets=(), fused=()))
    if whole.layout.dispatch is not None:
        whole = replace(whole, layout=replace(whole.layout, dispatch="all_to_all"))
    if not is_parallel or METHOD.used(plan) or _refusal(whole) is not None or plan.optimizer.offload is not None:
        return
    for parts, reduced in ((4, 8), (2, 4), (1, 4)):  # as many as a rank has experts, at most
        chosen = Pass(name=LINA, params=(("all_to_all", parts), ("all_reduce", reduced)))
        yield replace(whole, schedule=replace(plan.schedule, passes=(*plan.schedule.passes, chosen)))


METHOD = Method(
    name=LINA,
    paper="Lina, Li et al., ATC 2023",
    about="all-to-alls of experts before all-reduces on a shared network, both in small operations",
    switch="schedule.passes",
    exactness="up to the order of sums",
    params=(
        Param(name="all_to_all", about="parts of an exchange, each of some of a rank's experts", default=2),
        Param(name="all_reduce", about="parts of a layer's all-reduce", default=4),
        Param(
            name="first",
            about="what goes first on the network; issue: all in the order of issue",
            default="all_to_all",
            choices=("all_to_all", "issue"),
        ),
    ),
    rewrite=_rewrite,
    refusal=_refusal,
    variants=_variants,
)
