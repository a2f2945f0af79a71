"""Lina: all-to-all first, on a network that mixture-of-experts layers share with the reduction of gradients.

In backward the all-to-all of an expert layer blocks compute and the all-reduce of gradients does not, and neither can
be interrupted. `micro_operations` cuts both, and the experts between, into small operations; `all_to_all_first` issues
an all-reduce's operations only where the network would be idle, and none while a combine is about to send. Programs use
the kinds of `KINDS`; one network stream, whose order is the schedule. Left out: packing of experts, inference.
Source: Li et al. 2023 (Lina, USENIX ATC), sections 4 and 5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gnomon.lowering.edit import Row, rows_of, with_rows
from gnomon.lowering.insertions import touches
from gnomon.lowering.splits import split
from gnomon.methods.method import Method, Simulate
from gnomon.program import BufferClass, Kind, Program, Structure, effects, validate
from gnomon.simulate.play import Times

NETWORK = "net"
KINDS = (
    Kind(name="COMBINE", effects=effects("consume DY, write DC")),
    Kind(name="A2A_C", stream=NETWORK, comm="ep", effects=effects("consume DC, write DE")),
    Kind(name="EXPERT", effects=effects("read P, consume DE, write DD")),
    Kind(name="A2A_D", stream=NETWORK, comm="ep", effects=effects("consume DD, write DA")),
    Kind(name="B", effects=effects("read P, consume S, consume DA, write DX, accumulate G")),
    Kind(name="AR", stream=NETWORK, comm="dp", effects=effects("accumulate G")),
)
"""Backward of an expert layer: the gate's weighting, all-to-all, experts, all-to-all, and the dense rest `B`, whose
gradients AR reduces. Gradients of the experts stay on their rank."""
BUFFERS = tuple(BufferClass(name=name, memory="not in the step's") for name in ("DC", "DE", "DD", "DA"))
HOLD: Mapping[str, str] = {"COMBINE": "A2A_C"}
"""From the start of a combine to the end of its all-to-all no all-reduce is started."""


def micro_operations(program: Program, *, all_to_all: int, all_reduce: int) -> Program:
    """The Program with each all-to-all, and the experts between two, in `all_to_all` parts, and each all-reduce in
    `all_reduce` parts (1 leaves them whole). The paper's operations are of 30 MB."""
    if all_to_all > 1:
        program = split(program, {"A2A_C": "", "EXPERT": "", "A2A_D": ""}, all_to_all)
    return split(program, {"AR": ""}, all_reduce) if all_reduce > 1 else program


def all_to_all_first(program: Program, simulate: Simulate, *, hold: Mapping[str, str] = HOLD) -> Program:
    """The Program with its all-reduces issued where their stream is idle, in their order.

    An operation starts when the stream is idle, its gradient is there and nothing holds it; once started it ends, so
    an all-to-all waits for one operation at most. What finds no gap comes after all else on the stream, before the
    update. simulate: gives times, from which gaps are read; called once an operation.
    hold: kind of the row from whose start to the end of the all-to-all after it no all-reduce is started.
    """
    consumers = {kind.name for kind in program.kinds if touches(kind, "G", "consume", "free")}
    listed, waiting = [], []
    for rows in rows_of(program):
        late = [row for row in rows if row.kind == "AR"]
        rest = [row for row in rows if row.kind != "AR"]
        end = next((i for i, row in enumerate(rest) if row.kind in consumers), len(rest))
        listed.append([*rest[:end], *late, *rest[end:]])
        waiting.append(len(late))
    for cls in range(len(listed)):
        placed_from = 0.0
        while waiting[cls]:
            out = with_rows(program, listed)
            structure = validate(out)
            line = _Line.of(structure, simulate(structure), cls, listed[cls], waiting[cls], hold)
            gap = line.gap(placed_from)
            if gap is None:
                break
            placed_from, before = gap
            listed[cls].insert(before, listed[cls].pop(line.first_waiting))
            waiting[cls] -= 1
    return with_rows(program, listed)


def lina(program: Program, simulate: Simulate, *, all_to_all: int, all_reduce: int) -> Program:
    """Both steps: small operations, all-to-all first."""
    return all_to_all_first(micro_operations(program, all_to_all=all_to_all, all_reduce=all_reduce), simulate)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """One rank class's network as played, with its first all-reduce that has no place yet."""

    spans: tuple[tuple[int, float, float], ...]
    """(index in the class's list, start, end) of rows on the network that have their place."""
    held: tuple[tuple[float, float], ...]
    """When no all-reduce may start."""
    first_waiting: int
    """Index of the first all-reduce without a place."""
    ready: float
    """When its gradient is complete."""
    after: int
    """Index of the row that completes it."""

    @staticmethod
    def of(
        structure: Structure, times: Times, cls: int, rows: Sequence[Row], waiting: int, hold: Mapping[str, str]
    ) -> _Line:
        program = structure.program
        low, high = int(program.class_ptr[cls]), int(program.class_ptr[cls + 1])
        at = structure.order.position[low:high]
        starts, ends = times.start[at].tolist(), times.end[at].tolist()
        reductions = [i for i, row in enumerate(rows) if row.kind == "AR"]
        pending = frozenset(reductions[len(reductions) - waiting :])
        first = min(pending)
        stream = program.streams.index(NETWORK)
        on_network = [i for i in range(len(rows)) if program.stream[low + i] == stream and i not in pending]
        writers = {kind.name for kind in program.kinds if touches(kind, "G", "accumulate")}
        own = [
            i
            for i, row in enumerate(rows)
            if row.kind in writers and row.stage == rows[first].stage and i not in pending
        ]
        held = []
        for i, row in enumerate(rows):
            if row.kind in hold:
                sends = [j for j, other in enumerate(rows) if other.kind == hold[row.kind] and other.place == row.place]
                held.append((starts[i], max((ends[j] for j in sends), default=ends[i])))
        return _Line(
            spans=tuple((i, starts[i], ends[i]) for i in on_network),
            held=tuple(sorted(held)),
            first_waiting=first,
            ready=max(ends[i] for i in own),
            after=max(own),
        )

    def gap(self, earliest: float) -> tuple[float, int] | None:
        """(moment, index of the row to go before) of the first gap for the waiting all-reduce."""
        idle_from = 0.0
        for index, start, end in self.spans:
            moment = max(idle_from, self.ready, earliest)
            for begin, until in self.held:
                if begin <= moment < until:
                    moment = until
            if moment < start and index > self.after:
                return moment, index
            idle_from = max(idle_from, end)
        return None


METHOD = Method(
    name="lina",
    paper="Lina, Li et al., ATC 2023",
    about="all-to-alls of experts before all-reduces on a shared network, both in small operations",
    switch="schedule.passes",
    exactness="bitwise",
    missing={
        "planned": "plans are lowered to whole stages, and it reorders the operations within expert layers",
        "predicted": "plans are lowered to whole stages, and it reorders the operations within expert layers",
        "run": "the runtime runs the operations of an expert layer in one order",
    },
)
