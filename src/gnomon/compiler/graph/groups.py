"""Which nodes of a graph are computed together.

Nodes are taken in order; each joins a group that makes one of its operands if its rule fits that group's body,
the body still has a legal order of passes, and no path leaves the group and comes back. Groups whose operands
meet are merged by lowering all their nodes again. `Group`s come back with their bodies; what no group took
stays ATen's. Leaves out outputs, which depend on who asks (`program`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from gnomon.compiler.rules import RULES
from gnomon.compiler.rules.join import JOINS
from gnomon.compiler.rules.views import VIEWS
from gnomon.compiler.text.triton_module import has_triton
from gnomon.compiler.tiles.body import KINDS, Body, External, Tensor, UnfitError
from gnomon.compiler.tiles.lowering import Lowering
from gnomon.compiler.tiles.sizes import size_of, sizes_of
from gnomon.compiler.tiles.stages import classify

aten = torch.ops.aten
LARGEST = 48
"""Nodes of one group: beyond that registers spill and g++ takes longer than the group gains."""

ALONE = {
    aten._softmax.default,
    aten._log_softmax.default,
    aten._softmax_backward_data.default,
    aten._log_softmax_backward_data.default,
    aten.native_layer_norm.default,
    aten.native_layer_norm_backward.default,
    aten._fused_rms_norm.default,
    aten._fused_rms_norm_backward.default,
    aten.nll_loss_forward.default,
    aten.nll_loss_backward.default,
    aten.gelu.default,
    aten.gelu_backward.default,
    aten.silu.default,
    aten.silu_backward.default,
    aten.logsumexp.default,
    aten.var_mean.correction,
    aten.var.correction,
    aten.std.correction,
    aten.softplus.default,
    aten.elu.default,
    aten.erf.default,
    aten.tanh.default,
    aten.hardswish_backward.default,
    aten.linalg_vector_norm.default,
    aten._native_batch_norm_legit_no_training.default,
    aten._native_batch_norm_legit_functional.default,
    aten.native_batch_norm_backward.default,
}
"""Operations worth a kernel of their own: ATen takes several passes or a slow function for them."""

FREE = {operator.getitem, aten.full.default, aten.arange.default, aten.arange.start_step, *VIEWS}
"""Nodes that cost nothing or nearly so; a group of them alone is none."""


@dataclass(slots=True)
class Group:
    members: list[torch.fx.Node]
    """Nodes of the graph that one kernel computes, in order."""
    body: Body
    """What they compute."""

    @property
    def last(self) -> torch.fx.Node:
        return self.members[-1]

    @property
    def work(self) -> list[torch.fx.Node]:
        return [node for node in self.members if node.target not in FREE]


def fake(node: Any) -> torch.Tensor | None:
    """The fake tensor of a node that makes one where there is a printer for kernels, dense and of a kind we know."""
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    if not isinstance(value, torch.Tensor) or not served(value.device) or value.layout != torch.strided:
        return None
    return value


def served(device: torch.device) -> bool:
    """Whether kernels can be made for a device: C++ for CPUs, Triton for GPUs."""
    return device.type == "cpu" or (device.type == "cuda" and has_triton())


def device_of(node: torch.fx.Node) -> torch.device | None:
    """Finds the device on which a node's results lie; None where it has no tensors."""
    value = node.meta.get("val")
    results = value if isinstance(value, (tuple, list)) else [value]
    return next((r.device for r in results if isinstance(r, torch.Tensor)), None)


def root(node: torch.fx.Node) -> torch.fx.Node:
    """The node whose memory this one is a view of."""
    while node.op == "call_function" and (node.target in VIEWS or node.target is operator.getitem):
        source = node.args[0]
        if not isinstance(source, torch.fx.Node):
            break
        # `getitem` of an operation with several results has memory of its own; only one of a view (split, unbind)
        # shares memory with what was split.
        if node.target is operator.getitem and source.target not in VIEWS:
            break
        # Some of VIEWS copy where the strides do not allow a view (reshape): storages say whether this one did.
        if node.target is not operator.getitem and isinstance(node.meta.get("val"), torch.Tensor):
            above = _tensor_above(source)
            if above is None or not _shares(node.meta["val"], above):
                break
        node = source
    return node


def _tensor_above(node: torch.fx.Node) -> torch.Tensor | None:
    return fake(node)


def _shares(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def source(node: torch.fx.Node) -> External | None:
    """Finds where a node's tensor lies in memory, as a view of its root; None where no kernel reads it so."""
    here, base = fake(node), fake(root(node))
    if here is None or base is None or here.dtype not in KINDS or here.dtype != base.dtype:
        return None
    if here.is_conj() or here.is_neg():
        return None
    return External(
        node=root(node),
        sizes=sizes_of(here.shape),
        strides=sizes_of(here.stride()),
        # Relative to the root, as the kernel is given the root's data pointer, which counts the root's own offset.
        offset=size_of(here.storage_offset()) - size_of(base.storage_offset()),
        dtype=here.dtype,
    )


def claimed(node: torch.fx.Node) -> bool:
    """Whether there is a rule for a node, and all its results are tensors that a body can hold."""
    if node.op != "call_function" or node.target not in RULES:
        return False
    value = node.meta.get("val")
    results = value if isinstance(value, (tuple, list)) else [value]
    return all(
        r is None
        or (isinstance(r, torch.Tensor) and served(r.device) and r.layout == torch.strided and r.dtype in KINDS)
        for r in results
    ) and any(isinstance(r, torch.Tensor) and not _empty(r) for r in results)


def _empty(value: torch.Tensor) -> bool:
    return any(isinstance(s, int) and s == 0 for s in value.shape)


def lower(body: Body, node: torch.fx.Node) -> None:
    """Place one node in a body; raises `UnfitError`, after which the body is not to be used."""
    if node.target is operator.getitem:
        # Each result of an operation with several is kept under (node, number), which is what `getitem` has as its
        # arguments.
        tensor = body.tensors.get(node.args)
        if tensor is None:
            raise UnfitError("a result that the group does not make")
        body.tensors[node] = tensor
        return
    tensors = [arg for arg in node.all_input_nodes if isinstance(arg.meta.get("val"), torch.Tensor)]
    for arg in tensors:
        value = arg.meta["val"]
        if value.device != device_of(node) or _empty(value):
            raise UnfitError("a tensor elsewhere, or empty")
    result = RULES[node.target](Lowering(body=body, node=node, sources=source), *node.args, **node.kwargs)
    if isinstance(result, Tensor):
        body.tensors[node] = result
        return
    for i, part in enumerate(result):
        if part is not None:
            body.tensors[(node, i)] = part


def roots_of(body: Body) -> list[int]:
    return sorted({tensor.value for tensor in body.tensors.values()})


def leaves(group: Group) -> list[torch.fx.Node]:
    """What a group's members read that is not of the group: memory, behind any views, and numbers."""
    inside = set(group.members)
    outside: dict[torch.fx.Node, None] = {}
    waiting = [arg for node in group.members for arg in node.all_input_nodes]
    seen: set[torch.fx.Node] = set()
    while waiting:
        node = waiting.pop()
        if node in seen or node in inside:
            continue
        seen.add(node)
        if root(node) is node:
            outside[node] = None
        else:
            waiting += node.all_input_nodes
    return sorted(outside, key=lambda node: node._sort_key)


def groups(graph: torch.fx.Graph) -> list[Group]:
    """All groups, those too that are not worth a kernel of their own."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    of: dict[torch.fx.Node, Group] = {}
    grouped: list[Group] = []
    for node in graph.nodes:
        follows = node.target is operator.getitem and isinstance(node.args[0], torch.fx.Node) and node.args[0] in of
        if not (claimed(node) or follows):
            continue
        above = _distinct(of[arg] for arg in node.all_input_nodes if arg in of)
        # The group that ends last is tried first. Where a later group reads an earlier one and this node reads both,
        # joining the earlier one would leave a path out of it, through the later group, and back.
        above.sort(key=lambda g: order[g.last], reverse=True)
        home = next((g for g in above if _join(g, node, order)), None)
        if home is None:
            if node.target in VIEWS or node.target is operator.getitem:
                continue
            home = _alone(node)
            if home is None:
                continue
            grouped.append(home)
        of[node] = home
        # The node's other operands are of further groups: with the node in `home` they meet in it, and are one kernel
        # where the whole can be lowered again.
        for other in above:
            if other is not home and _merge(home, other, order):
                of.update(dict.fromkeys(other.members, home))
                grouped.remove(other)
    # Views and constants alone compute nothing.
    return [g for g in grouped if g.work]


def worth(group: Group) -> bool:
    work = group.work
    return len(work) > 1 or (len(work) == 1 and work[0].target in ALONE)


def rebuilt(members: Iterable[torch.fx.Node]) -> Body | None:
    body = Body()
    try:
        for node in _joined_first(list(members)):
            lower(body, node)
        classify(body, roots_of(body))
    except UnfitError:
        return None
    return body


def _joined_first(members: list[torch.fx.Node]) -> list[torch.fx.Node]:
    """What is joined along a dim, and all that it is made of, before the rest, which then lies on the axes of the
    parts: an axis of the whole cannot be divided into them afterwards."""
    needed: set[torch.fx.Node] = set()
    for node in reversed(members):
        if node.target in JOINS or any(user in needed for user in node.users):
            needed.add(node)
    return [node for node in members if node in needed] + [node for node in members if node not in needed]


def _distinct(candidates: Iterable[Group]) -> list[Group]:
    out: list[Group] = []
    for group in candidates:
        if not any(group is known for known in out):
            out.append(group)
    return out


def _alone(node: torch.fx.Node) -> Group | None:
    body = rebuilt([node])
    return None if body is None else Group(members=[node], body=body)


def _join(group: Group, node: torch.fx.Node, order: dict[torch.fx.Node, int]) -> bool:
    part = node.target is operator.getitem  # of what the group makes: it must not be left outside alone
    if not part and (len(group.members) >= LARGEST or not _convex({*group.members, node}, order)):
        return False
    # `lower` may raise when it has already placed values, so it works on a copy that is then thrown away.
    body = group.body.copy()
    try:
        lower(body, node)
        classify(body, roots_of(body))
    except UnfitError:
        return False
    group.body = body
    group.members.append(node)
    return True


def _merge(home: Group, other: Group, order: dict[torch.fx.Node, int]) -> bool:
    members = sorted([*home.members, *other.members], key=order.__getitem__)
    if len(members) > LARGEST or not _convex(set(members), order):
        return False
    body = rebuilt(members)
    if body is None:
        return False
    home.members, home.body = members, body
    return True


def _convex(members: set[torch.fx.Node], order: dict[torch.fx.Node, int]) -> bool:
    """Whether no path leaves the members and comes back."""
    # The graph is in topological order: a path that comes back does so at or before the last member, so the search need
    # not go beyond it.
    end = max(order[node] for node in members)
    waiting = [user for node in members for user in node.users if user not in members]
    seen: set[torch.fx.Node] = set()
    while waiting:
        node = waiting.pop()
        if node in seen or order[node] > end:
            continue
        seen.add(node)
        for user in node.users:
            if user in members:
                return False
            waiting.append(user)
    return True


Rule = Callable[..., Any]
