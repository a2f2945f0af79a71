"""A naive simulator to hold the engine against: rules as sentences, steps unrolled, plain Python, no arrays.

Every action of every step is a node; what it waits for follows from replaying the effects of its rank in issue
order over all steps in a row, so nothing special happens at the step boundary. Times are longest paths.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from gnomon.program import EFFECT_OPS, Program, effect_table, row_effects

Node = tuple[int, int]  # (step, row)


def waits(program: Program, steps: int) -> tuple[dict[Node, list[tuple[Node, bool]]], dict[Node, Node]]:
    """For each node what it waits for (and whether that carries data, so lags count), and the node it is merged
    with."""
    table = effect_table(program)
    effects = [
        sorted(row_effects(program, table, r), key=lambda e: EFFECT_OPS.index(e[0])) for r in range(program.num_rows)
    ]
    buffers = {b.name: b for b in program.buffers}
    alias = {(same.buffer, same.stage): one.stage for one, same in program.aliases}
    before: dict[Node, list[tuple[Node, bool]]] = defaultdict(list)
    merged: dict[Node, Node] = {}
    groups: dict[tuple[int, int], Node] = {}
    sends: dict[object, Node] = {}
    receives: dict[object, Node] = {}
    flows: dict[object, tuple[list[Node], list[Node]]] = defaultdict(lambda: ([], []))
    for cls in range(program.num_classes):
        lanes: dict[int, Node] = {}
        versions: dict[object, list[dict[str, list[Node]]]] = {}
        taken: dict[str, list[Node]] = defaultdict(list)
        given: dict[str, list[Node]] = defaultdict(list)
        for step in range(steps):
            for row in range(int(program.class_ptr[cls]), int(program.class_ptr[cls + 1])):
                node = (step, row)
                group = int(program.group[row])
                merged[node] = groups.setdefault((step, group), node) if group >= 0 else node
                lane = int(program.stream[row])
                if lane in lanes:
                    before[node].append((lanes[lane], False))
                lanes[lane] = node
                for op, ref in effects[row]:
                    buffer = buffers[ref.buffer]
                    always = [{"made": [], "read": [], "freed": []}] if buffer.lifetime == "carried" else []
                    history = versions.setdefault(
                        (ref.buffer, alias.get((ref.buffer, ref.stage), ref.stage), ref.at), always
                    )
                    live = bool(history) and not history[-1]["freed"]
                    if op == "write" or (op in ("accumulate", "extend") and not live):
                        if len(history) >= buffer.slots:
                            old = history[-buffer.slots]
                            before[node] += [(n, False) for n in (old["freed"] or old["read"])]
                        if buffer.lifetime == "carried" and history and op == "write":
                            before[node] += [(n, True) for n in history[-1]["made"][-1:]]
                        if buffer.pool and not live:
                            taken[buffer.pool].append(node)
                        history.append({"made": [node], "read": [], "freed": []})
                    elif history:
                        before[node] += [(n, True) for n in history[-1]["made"][-1:]]
                        if op != "read":
                            before[node] += [(n, False) for n in history[-1]["read"]]
                        if op in ("accumulate", "extend"):
                            history[-1]["made"].append(node)
                            history[-1]["read"].clear()
                        elif op == "read":
                            history[-1]["read"].append(node)
                        else:
                            history[-1]["freed"].append(node)
                            if buffer.pool:
                                given[buffer.pool].append(node)
                kind = program.kinds[program.kind[row]]
                if kind.message:
                    override = program.overrides.get(row)
                    here, peer = int(program.stage[row]), override.peer if override else None
                    hop = kind.hop if kind.message == "send" else -kind.hop
                    there = here + hop if peer is None else peer
                    route = (here, there) if kind.message == "send" else (there, here)
                    side = sends if kind.message == "send" else receives
                    side[step, program.comm_of(row), route, int(program.unit[row])] = node
        for pool in program.pools:
            for k, node in enumerate(taken[pool.name]):
                if k >= pool.size:
                    before[node].append((given[pool.name][k - pool.size], False))
    comms = {c.name: c for c in program.comms}
    for tag, send in sends.items():
        comm = comms[tag[1]]  # type: ignore[index]
        receive = receives[tag]
        if comm.semantics == "rendezvous":
            merged[_root(merged, receive)] = _root(merged, send)
        else:
            before[receive].append((send, True))
        flow = flows[comm.name, program.rank_class(send[1]), program.rank_class(receive[1])]
        flow[0].append(send)
        flow[1].append(receive)
    for (name, _, _), (sent, received) in flows.items():  # type: ignore[misc]
        n = comms[name].capacity
        for send, receive in zip(sorted(sent)[n:], sorted(received), strict=False) if n else ():
            before[send].append((receive, False))
    return before, {node: _root(merged, node) for node in merged}


def _root(merged: dict[Node, Node], node: Node) -> Node:
    while merged[node] != node:
        node = merged[node]
    return node


def play(program: Program, busy: Sequence[float], lag: Sequence[float], steps: int) -> dict[Node, tuple[float, float]]:
    """(start, end) of every action of every step; busy and lag by price key. RecursionError never: iterates."""
    before, root = waits(program, steps)
    members: dict[Node, list[Node]] = defaultdict(list)
    for node, r in root.items():
        members[r].append(node)
    length = {r: max(busy[program.key[row]] for _, row in nodes) for r, nodes in members.items()}
    late = {r: max(lag[program.key[row]] for _, row in nodes) for r, nodes in members.items()}

    def later(a: Node, b: Node) -> bool:  # a lag delays readers on other streams only
        same_rank = program.rank_class(a[1]) == program.rank_class(b[1])
        return not (same_rank and program.stream[a[1]] == program.stream[b[1]])

    needs = {
        r: [(root[b], data and later(b, n)) for n in nodes for b, data in before[n] if root[b] != r]
        for r, nodes in members.items()
    }
    start: dict[Node, float] = {}
    stack = list(members)
    while stack:
        r = stack[-1]
        missing = [b for b, _ in needs[r] if b not in start]
        if r in start or not missing:
            stack.pop()
            ends = [start[b] + length[b] + (late[b] if data else 0.0) for b, data in needs[r]]
            start.setdefault(r, max(ends, default=0.0))
        stack += [] if r in start else missing
    return {node: (start[r], start[r] + length[r]) for node, r in root.items()}
