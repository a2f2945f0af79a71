"""A brute-force interpreter of Programs, to hold `gnomon.program` against: plain Python over one row at a time.

It reads a Program's columns and kinds and nothing else of the package's: no edges, tables or orders. It replays every
rank class in issue order with explicit buffers, matches messages one by one, compares communicators, and then runs the
streams as queues over several steps until nothing moves. `interpret(program)` returns what it found wrong and, for a
deadlock, who waits for whom.

The rules, in words. Effects of a row apply in the order of EFFECT_OPS. A write makes a new version, accumulate and
extend change one (and make the first). Reading, consuming and freeing wait for the last change of the version; changes
and frees wait for its readers; a new version waits until the version `slots` before it is gone (freed, or for carried
buffers read for the last time). RECV waits for SEND; with capacity n, SEND j for RECV j - n; in a pool of n, allocation
k for free k - n. Rows of a group, and both sides of a rendezvous, run together or not at all; rows of a group that
follow each other on a stream are one action, and what they need of each other is its own affair.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from gnomon.program import EFFECT_OPS, NO_UNIT, BufferClass, BufferRef, Override, Program

Buffer = tuple[int, str, int, int]
"""Rank class, name, stage, unit or sequence."""
Event = tuple[int, int]
"""Step and row."""
Finding = tuple[str, int, str]
"""What, rank class, action."""


END = -1
"""Stands for a row after all others of a step."""


class CannotRead(Exception):
    """The Program names something that is not there, so it has no meaning."""


@dataclass(slots=True)
class Row:
    """One row with everything resolved."""

    index: int
    cls: int
    kind: str
    stage: int
    unit: int
    stream: str
    comm: str
    group: int
    side: str
    peer: int
    token: str
    effects: list[tuple[str, Buffer]]


@dataclass(slots=True)
class Result:
    """What the interpreter found."""

    findings: Counter[Finding]
    waits: dict[int, set[int]] = field(default_factory=dict)
    """Deadlock: for each stuck row of the first step, the stuck rows it waits for, those before it on its stream among
    them."""
    heads: dict[int, int] = field(default_factory=dict)
    """For each stuck row the first one of its stream that is stuck."""
    partners: dict[int, frozenset[int]] = field(default_factory=dict)
    """Rows that run together with a row, itself among them."""
    finished: int = 0
    """Rows of the first step that ran."""


def interpret(program: Program, steps: int = 3) -> Result:
    """Everything wrong with a Program. CannotRead where it names buffers that are not there."""
    rows = _rows(program)
    findings: Counter[Finding] = Counter()
    pairs = _messages(program, rows, findings)
    _collectives(program, rows, findings)
    memory = _Memory(program, findings)
    for step in range(steps):
        memory.report = step == 0
        for row in rows:
            memory.apply(step, row)
        memory.end_of_step(rows)
    if findings:
        return Result(findings)
    return _run(program, rows, pairs, memory, steps)


# Reading the rows


def _rows(program: Program) -> list[Row]:
    at_stage = [
        {int(s) for s in program.stage[program.class_ptr[c] : program.class_ptr[c + 1]]}
        for c in range(program.num_classes)
    ]
    rows = []
    for cls in range(program.num_classes):
        for i in range(int(program.class_ptr[cls]), int(program.class_ptr[cls + 1])):
            kind = program.kinds[int(program.kind[i])]
            own = program.overrides.get(i, Override())
            stage, unit = int(program.stage[i]), int(program.unit[i])
            peer = stage + (kind.hop if kind.message == "send" else -kind.hop)
            rows.append(
                Row(
                    index=i,
                    cls=cls,
                    kind=kind.name,
                    stage=stage,
                    unit=unit,
                    stream=own.stream or kind.stream,
                    comm=own.comm or kind.comm,
                    group=int(program.group[i]),
                    side=kind.message,
                    peer=peer if own.peer is None else own.peer,
                    token=f"{stage}{kind.name}" + ("" if unit == NO_UNIT else str(unit)),
                    effects=_effects(program, at_stage, cls, i),
                )
            )
    return rows


def _effects(program: Program, at_stage: list[set[int]], cls: int, i: int) -> list[tuple[str, Buffer]]:
    kind, own = program.kinds[int(program.kind[i])], program.overrides.get(i, Override())
    stage, unit = int(program.stage[i]), int(program.unit[i])
    classes = {b.name: b for b in program.buffers}
    chained = {e.buffer for k in program.kinds for e in k.effects if e.which != "own"}
    ordered: list[tuple[str, Buffer]] = []
    for effect in kind.effects if own.effects is None or own.adds else ():
        buffer = classes[effect.buffer]
        first = _place(program, at_stage, cls, effect.buffer, stage)
        if first is None:
            continue
        for index in _indices(program, buffer, effect.which, unit, buffer.name in chained):
            ordered.append((effect.op, (*first, index)))
    for op, ref in own.effects or ():
        if ref.stage not in at_stage[cls]:
            raise CannotRead(f"row {i}: stage {ref.stage}")
        first = _place(program, at_stage, cls, ref.buffer, ref.stage)
        if first is None:
            raise CannotRead(f"row {i}: {ref.buffer} {ref.stage}")
        ordered.append((op, (*first, ref.at)))
    return sorted(ordered, key=lambda effect: EFFECT_OPS.index(effect[0]))  # type: ignore[arg-type]


def _place(program: Program, at_stage: list[set[int]], cls: int, name: str, stage: int) -> tuple[int, str, int] | None:
    """Which buffer a name means at a stage of a rank class; None where there is none."""
    starts = stage in program.chains
    ends = stage + 1 in program.chains or stage + 1 == program.num_stages
    if (name == "X" and starts and program.inputs == "resident") or (name == "DX" and starts):
        return None
    if name in ("Y", "DY") and ends:
        return None
    if name == "Y" and stage + 1 in at_stage[cls]:
        name, stage = "X", stage + 1
    elif name == "DX" and stage - 1 in at_stage[cls]:
        name, stage = "DY", stage - 1
    for one, same in program.aliases:
        if same == BufferRef(name, stage) and one.stage in at_stage[cls]:
            name, stage = one.buffer, one.stage
    return cls, name, stage


def _indices(program: Program, buffer: BufferClass, which: str, unit: int, chained: bool) -> list[int]:
    """Units or sequences of a buffer class that an effect of a row means."""
    if buffer.per == "stage":
        return [0]
    if unit == NO_UNIT:
        if chained or buffer.per == "sequence":
            return []
        raise CannotRead(f"no unit for {buffer.name}")
    if buffer.per == "sequence":
        return [sequence for sequence, _, _ in program.units[unit].pieces]
    before, after = [], []
    for sequence, start, _ in program.units[unit].pieces:
        for u, other in enumerate(program.units):
            for its, begin, _ in other.pieces:
                if its == sequence and begin < start:
                    before.append(u)
                if its == sequence and begin > start:
                    after.append(u)
    if which == "own":
        return [unit] if after or not chained else []
    return before if which == "prefix" else after


# Buffers, in issue order


@dataclass(slots=True)
class Version:
    """One version of a buffer's contents."""

    changed: Event | None = None
    readers: list[Event] = field(default_factory=list)
    """Since the last change."""
    all_readers: list[Event] = field(default_factory=list)
    freed: Event | None = None


class _Memory:
    """Replays effects of one row after the other, and notes what each row has to wait for."""

    def __init__(self, program: Program, findings: Counter[Finding]) -> None:
        self.findings, self.report = findings, True
        self.classes = {b.name: b for b in program.buffers}
        self.history: dict[Buffer, list[Version]] = defaultdict(list)
        self.live: dict[Buffer, bool] = {}
        self.freed: set[Buffer] = set()
        """Buffers that some row of this step has freed."""
        self.changer: dict[Buffer, Row] = {}
        self.waits: dict[Event, set[Event]] = defaultdict(set)
        self.pool_waits: dict[Event, set[Event]] = defaultdict(set)
        self.sizes = {pool.name: pool.size for pool in program.pools}
        self.taken: dict[tuple[int, str], list[Event]] = defaultdict(list)
        self.given: dict[tuple[int, str], list[Event]] = defaultdict(list)

    def wrong(self, what: str, row: Row) -> None:
        """Notes a finding of the first step."""
        if self.report:
            self.findings[what, row.cls, row.token] += 1

    def apply(self, step: int, row: Row) -> None:
        """One row."""
        for op, buffer in row.effects:
            carried = self.classes[buffer[1]].lifetime == "carried"
            if carried and not self.history[buffer]:
                self.history[buffer].append(Version())
                self.live[buffer] = True
            alive = self.live.get(buffer, False)
            if op in ("write", "accumulate", "extend"):
                if op == "write" and alive and not carried:
                    self.wrong("overwrite", row)
                self.change(op, (step, row.index), buffer, alive)
                self.changer[buffer] = row
                continue
            if not alive:
                what = "double free" if op == "free" else "use after free"
                self.wrong(what if buffer in self.freed else "missing buffer", row)
            if op != "read" and carried:
                self.wrong("carried buffer freed", row)
            self.use(op, (step, row.index), buffer, alive)

    def change(self, op: str, event: Event, buffer: Buffer, alive: bool) -> None:
        """write, accumulate, extend."""
        history, family = self.history[buffer], self.classes[buffer[1]]
        if alive and op != "write":
            version = history[-1]
            self.wait(event, version.changed, *version.readers)
            version.readers = []
        else:
            if not alive:
                self.take(event, buffer, family)
            if alive and history[-1].changed:
                self.wait(event, history[-1].changed)
            if len(history) >= family.slots:
                old = history[-family.slots]
                self.wait(event, old.freed, *(old.all_readers if family.lifetime == "carried" else ()))
            history.append(Version())
        history[-1].changed = event
        self.live[buffer] = True

    def use(self, op: str, event: Event, buffer: Buffer, alive: bool) -> None:
        """read, consume, free."""
        if alive:
            version = self.history[buffer][-1]
            self.wait(event, version.changed)
            if op == "read":
                version.readers.append(event)
                version.all_readers.append(event)
        if op == "read":
            return
        self.freed.add(buffer)
        self.live[buffer] = False
        if alive:
            self.wait(event, *version.readers)
            version.freed = event
            pool = self.classes[buffer[1]].pool
            if pool:
                self.given[buffer[0], pool].append(event)

    def wait(self, event: Event, *others: Event | None) -> None:
        """`event` waits for the others; a row does not wait for itself."""
        self.waits[event].update(other for other in others if other and other != event)

    def take(self, event: Event, buffer: Buffer, family: BufferClass) -> None:
        """An allocation, which may take a place in a pool."""
        if family.pool:
            self.taken[buffer[0], family.pool].append(event)

    def end_of_step(self, rows: list[Row]) -> None:
        """Step buffers must be gone; those of sequences are left to the next step's sequences."""
        for buffer, row in self.changer.items():
            lifetime = self.classes[buffer[1]].lifetime
            if self.live[buffer] and lifetime in ("action", "step"):
                self.wrong("leak", row)
            if lifetime != "carried":
                self.live[buffer] = False
                if lifetime == "sequence":
                    self.abandon(buffer)
        self.freed.clear()
        self.changer.clear()

    def abandon(self, buffer: Buffer) -> None:
        """A sequence's buffer that no action of the step freed: the next step has other sequences, and its place."""
        pool, version = self.classes[buffer[1]].pool, self.history[buffer][-1]
        if pool and version.changed and not version.freed:
            self.given[buffer[0], pool].append((version.changed[0], END))
        self.history[buffer] = []

    def wait_for_pools(self) -> None:
        """Allocation k waits for free k - n, whoever does it."""
        for place, taken in self.taken.items():
            size, given = self.sizes[place[1]], self.given[place]
            for k, event in enumerate(taken):
                if k >= size:
                    free = given[k - size] if k - size < len(given) else event
                    self.pool_waits[event].add(event if free == (event[0], END) else free)


# Messages and communicators


def _messages(program: Program, rows: list[Row], findings: Counter[Finding]) -> list[tuple[Row, Row]]:
    """Matched (send, receive), and what is wrong with the rest."""
    first: dict[str, dict[tuple[str, int, int, int], Row]] = {"send": {}, "recv": {}}
    unmatched: list[tuple[Row, tuple[str, int, int, int]]] = []
    for row in rows:
        if not row.side:
            continue
        ends = (row.stage, row.peer) if row.side == "send" else (row.peer, row.stage)
        tag = (row.comm, *ends, row.unit)
        if tag in first[row.side]:
            findings["duplicate message", row.cls, row.token] += 1
        first[row.side].setdefault(tag, row)
        unmatched.append((row, tag))
    for row, tag in unmatched:
        other, what = ("recv", "send without receive") if row.side == "send" else ("send", "receive without send")
        if tag not in first[other]:
            findings[what, row.cls, row.token] += 1
    pairs = [(send, first["recv"][tag]) for tag, send in first["send"].items() if tag in first["recv"]]
    ordered = {comm.name for comm in program.comms if comm.ordered}
    for flow in _flows(pairs).values():
        for (_, early), (_, late) in zip(flow, flow[1:], strict=False):
            if early.comm in ordered and late.index < early.index:
                findings["wrong order on a communicator", late.cls, late.token] += 1
    return pairs


def _flows(pairs: list[tuple[Row, Row]]) -> dict[tuple[str, int, int], list[tuple[Row, Row]]]:
    """Messages by communicator and pair of rank classes, as sent."""
    flows: dict[tuple[str, int, int], list[tuple[Row, Row]]] = defaultdict(list)
    for send, receive in sorted(pairs, key=lambda pair: pair[0].index):
        flows[send.comm, send.cls, receive.cls].append((send, receive))
    return flows


def _collectives(program: Program, rows: list[Row], findings: Counter[Finding]) -> None:
    """Every rank class of a communicator must issue the same groups in the same order."""
    calls: dict[str, dict[int, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row.group >= 0 and row.comm and not row.side:
            calls[row.comm][row.cls].append(row)
    for by_class in calls.values():
        first = by_class[min(by_class)]
        for cls in sorted(by_class)[1:]:
            mine = by_class[cls]
            for i in range(max(len(first), len(mine))):
                if i >= len(mine) or i >= len(first) or first[i].group != mine[i].group:
                    row = mine[i] if i < len(mine) else first[i]
                    findings["communicator orders disagree", row.cls, row.token] += 1
                    break


# Running


def _run(program: Program, rows: list[Row], pairs: list[tuple[Row, Row]], memory: _Memory, steps: int) -> Result:
    """Streams as queues: takes what can go until nothing moves."""
    memory.wait_for_pools()
    together = _together(program, rows, pairs)
    waits = _all_waits(program, rows, pairs, memory, steps)
    lanes: dict[tuple[int, str], list[Event]] = defaultdict(list)
    for step in range(steps):
        for row in rows:
            lanes[row.cls, row.stream].append((step, row.index))
    queues = [_entries(lane, together) for lane in lanes.values()]
    done: set[Event] = set()
    moved = True
    while moved:
        moved = False
        heads = {event: entry for queue in queues if queue for entry in queue[:1] for event in entry}
        for queue in queues:
            if queue and _can_run(queue[0][0], together, heads, waits, done):
                partners = {(queue[0][0][0], r) for r in together[queue[0][0][1]]}
                done |= partners
                done |= {(step, END) for step in range(steps) if all((step, row.index) in done for row in rows)}
                for other in queues:
                    if other and other[0][0] in partners:
                        other.pop(0)
                moved = True
                break
    if not any(queues):
        return Result(Counter())
    return _stuck(rows, together, waits, lanes, done)


def _together(program: Program, rows: list[Row], pairs: list[tuple[Row, Row]]) -> dict[int, frozenset[int]]:
    """For each row the rows that run with it."""
    rendezvous = {comm.name for comm in program.comms if comm.semantics == "rendezvous"}
    sets = {row.index: {row.index} for row in rows}

    def join(a: int, b: int) -> None:
        union = sets[a] | sets[b]
        for member in union:
            sets[member] = union

    for a in rows:
        for b in rows:
            if a.group == b.group >= 0:
                join(a.index, b.index)
    for send, receive in pairs:
        if send.comm in rendezvous:
            join(send.index, receive.index)
    return {row: frozenset(members) for row, members in sets.items()}


def _entries(lane: list[Event], together: dict[int, frozenset[int]]) -> list[list[Event]]:
    """A stream as a list of entries: rows that run together and follow each other are one."""
    out: list[list[Event]] = []
    for event in lane:
        if out and out[-1][-1][0] == event[0] and out[-1][-1][1] in together[event[1]]:
            out[-1].append(event)
        else:
            out.append([event])
    return out


def _all_waits(
    program: Program, rows: list[Row], pairs: list[tuple[Row, Row]], memory: _Memory, steps: int
) -> dict[Event, set[Event]]:
    """What each row waits for, besides its stream; within one action nothing waits."""
    waits: dict[Event, set[Event]] = {(step, row.index): set() for step in range(steps) for row in rows}
    for event, others in memory.waits.items():
        waits[event] |= others
    comms = {comm.name: comm for comm in program.comms}
    for (name, _, _), flow in _flows(pairs).items():
        if comms[name].semantics != "rendezvous":
            for step in range(steps):
                for send, receive in flow:
                    waits[step, receive.index].add((step, send.index))
        if comms[name].capacity:
            sends = [(step, send.index) for step in range(steps) for send, _ in flow]
            receives = sorted((step, receive.index) for step in range(steps) for _, receive in flow)
            for k in range(comms[name].capacity, len(sends)):
                waits[sends[k]].add(receives[k - comms[name].capacity])
    for event, others in memory.pool_waits.items():
        waits[event] |= others
    return waits


def _can_run(
    event: Event,
    together: dict[int, frozenset[int]],
    heads: dict[Event, list[Event]],
    waits: dict[Event, set[Event]],
    done: set[Event],
) -> bool:
    """Whether all that run with an event are at the head of their streams with nothing to wait for."""
    partners = [(event[0], row) for row in together[event[1]]]
    return all(
        partner in heads and all(other in done or _inner(other, partner, heads) for other in waits[partner])
        for partner in partners
    )


def _inner(other: Event, event: Event, heads: dict[Event, list[Event]]) -> bool:
    """Whether `other` comes before `event` within one and the same action."""
    return other in heads[event] and other < event


def _stuck(
    rows: list[Row],
    together: dict[int, frozenset[int]],
    waits: dict[Event, set[Event]],
    lanes: dict[tuple[int, str], list[Event]],
    done: set[Event],
) -> Result:
    """Who waits for whom in the first step."""
    stuck = [row for row in rows if (0, row.index) not in done]
    assert stuck, "a later step is stuck although the first one ran"
    waiting: dict[int, set[int]] = {row.index: set() for row in stuck}
    heads: dict[int, int] = {}
    for lane in lanes.values():
        before: list[Event] = []
        for entry in _entries([event for event in lane if event[0] == 0 and event[1] in waiting], together):
            for event in entry:
                others = {other for other in waits[event] if other not in entry or other >= event}
                waiting[event[1]] |= {row for step, row in (*others, *before) if step == 0 and row in waiting}
                heads[event[1]] = before[0][1] if before else entry[0][1]
            before = [*before, *entry]
    findings = Counter({("deadlock", row.cls, row.token): 1 for row in stuck})
    return Result(findings, waits=waiting, heads=heads, partners=together, finished=len(rows) - len(stuck))
