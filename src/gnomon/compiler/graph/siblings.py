"""Groups beside each other that read the same memory become one, which reads it once.

SwiGLU's backward is two groups, one for each half's gradient; both read the gradient of the product and the halves.
`join_siblings` takes pairs of groups of which neither waits for the other, directly or through anything else that runs,
and whose work is over the same sizes, where one kernel moves at least `LEAST` bytes fewer of the two. Leaves out groups
whose operands meet (`groups`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gnomon.compiler.graph.groups import LARGEST, Group, fake, leaves, rebuilt, worth
from gnomon.compiler.tiles.body import Body, UnfitError
from gnomon.compiler.tiles.sizes import hint, product, sizes_of
from gnomon.compiler.tiles.tiling import Nest

LEAST = 0.1
"""Share of the bytes of two groups that one group must save: below it, registers and the time of g++ count for more."""

Node = torch.fx.Node
Nested = Callable[[Body, Sequence[Node]], Nest]


def join_siblings(
    graph: torch.fx.Graph,
    fused_groups: Sequence[Group],
    outputs: dict[int, list[Node]],
    nested: Nested,
    environment: Any,
) -> list[Group]:
    """The groups after all pairs that gain by it are one. outputs: what others ask of each group, by its place;
    nested: the loops of a body with some outputs, or `UnfitError`; environment: the ShapeEnv, or None."""
    places = _Places(graph, fused_groups, environment)
    group_outputs = {id(group): outputs[n] for n, group in enumerate(fused_groups)}
    out = list(fused_groups)
    first = 0
    while first < len(out):
        second = first + 1
        while second < len(out):
            one = _one(out[first], out[second], group_outputs, places, nested, environment)
            if one is None:
                second += 1
                continue
            both = (*group_outputs[id(out[first])], *group_outputs[id(out[second])])
            group_outputs[id(one)] = sorted(both, key=places.order.__getitem__)
            places.replace(one)
            out[first] = one
            del out[second]
            # The first group reads more now, so pairs that gained nothing before are looked at again.
            second = first + 1
        first += 1
    return out


class _Places:
    """What runs as one unit, and what waits for what."""

    def __init__(self, graph: torch.fx.Graph, fused_groups: Sequence[Group], environment: Any) -> None:
        self.order = order = {node: i for i, node in enumerate(graph.nodes)}
        self.of = {node: group for group in fused_groups for node in group.members}
        self.writes = [order[node] for node in graph.nodes if _writes(node)]
        self.environment = environment
        self.read = {id(group): _read(group, environment) for group in fused_groups}
        self.moved: dict[int, int] = {}
        """Bytes that a group moves by itself, as far as that was asked."""

    def replace(self, one: Group) -> None:
        self.moved.pop(id(one), None)  # of a group that is gone
        self.of.update(dict.fromkeys(one.members, one))
        self.read[id(one)] = _read(one, self.environment)

    def independent(self, a: Group, b: Group) -> bool:
        """Whether all that either reads is there before the first of them runs, nothing writes to memory between their
        members, and neither waits for the other through whatever runs, groups among it."""
        places = [self.order[node] for group in (a, b) for node in group.members]
        begin, end = min(places), max(places)
        if any(begin < at < end for at in self.writes):
            return False
        ready = min(max(self.order[node] for node in group.members) for group in (a, b))
        if any(self.order[node] > ready for group in (a, b) for node in leaves(group)):
            return False
        return not self._reaches(a, b) and not self._reaches(b, a)

    def _reaches(self, start: Group, goal: Group) -> bool:
        waiting, seen = [start.members], {id(start)}
        while waiting:
            for node in waiting.pop():
                for user in node.users:
                    group = self.of.get(user)
                    if group is goal:
                        return True
                    key = id(user if group is None else group)
                    if key not in seen:
                        seen.add(key)
                        waiting.append([user] if group is None else group.members)
        return False


def _writes(node: Node) -> bool:
    if node.op != "call_function":
        return node.op in ("call_module", "call_method")
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _read(group: Group, environment: Any) -> dict[Any, int]:
    """Memory that a group reads, and how many elements it has."""
    values = {inp.node: fake(inp.node) for inp in group.body.inputs}
    return {node: hint(product(sizes_of(v.shape)), environment) for node, v in values.items() if v is not None}


def _one(
    a: Group, b: Group, group_outputs: dict[int, list[Node]], places: _Places, nested: Nested, environment: Any
) -> Group | None:
    """Both groups as one, or None where that is not legal or gains nothing."""
    here, there = places.read[id(a)], places.read[id(b)]
    shared = max((here[node] for node in here.keys() & there.keys()), default=0)
    # What they share is little beside the largest that either reads.
    if 4 * shared < max((*here.values(), *there.values()), default=0) or not (
        group_outputs[id(a)] and group_outputs[id(b)]
    ):
        return None
    if not shared or len(a.members) + len(b.members) > LARGEST or not (worth(a) or worth(b)):
        return None
    if not places.independent(a, b):
        return None
    members = sorted((*a.members, *b.members), key=places.order.__getitem__)
    body = rebuilt(members)
    if body is None or _domain(body, a) != _domain(body, b):
        return None
    try:
        for group in (a, b):
            if id(group) not in places.moved:
                places.moved[id(group)] = traffic(nested(group.body, group_outputs[id(group)]), environment)
        before = places.moved[id(a)] + places.moved[id(b)]
        after = traffic(nested(body, [*group_outputs[id(a)], *group_outputs[id(b)]]), environment)
    except UnfitError:
        return None
    return Group(members=members, body=body) if after <= (1 - LEAST) * before else None


def _domain(body: Body, group: Group) -> frozenset[int]:
    """Axes along which a group's results and all that they are made of vary."""
    waiting = [
        t.value for key, t in body.tensors.items() if (key[0] if isinstance(key, tuple) else key) in group.members
    ]
    seen: set[int] = set()
    while waiting:
        value = waiting.pop()
        if value not in seen:
            seen.add(value)
            waiting += body.code[value].args
    return frozenset().union(*(body.code[value].axes for value in seen))


def traffic(nest: Nest, environment: Any) -> int:
    """Bytes that must come from memory and go there: each element once."""
    moved = 0
    read = {nest.body.code[i].attr for p in nest.passes for i in p.values if nest.body.code[i].op in ("load", "take")}
    for slot in read:
        inp = nest.body.inputs[slot]
        axes = set(inp.strides) | (set(nest.outer) if inp.index is not None else set())
        moved += inp.dtype.itemsize * hint(product(nest.sizes[a] for a in axes), environment)
    for out in nest.outputs:
        moved += out.dtype.itemsize * hint(product(nest.sizes[a] for a in out.strides), environment)
    return moved
