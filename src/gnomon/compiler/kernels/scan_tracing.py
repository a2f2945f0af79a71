"""Has Dynamo leave an associative scan whole where it is a linear recurrence, for this backend and no other.

PyTorch's `associative_scan(combine, (a, b), dim)` in its generic mode is Python that halves the steps again and again;
Dynamo traces all of it (of 128 steps some 300 operations), and every level is written to memory. `allow` puts a
function before it that traces `combine` once, on one step each, and looks at what was traced: where it is (a * a',
a' * b + b'), one operation of ours is put in the graph (`scan`). Else the scan is PyTorch's, as for other backends.
`widen(module)` then takes into that operation the products and the exponential that make a and b, and the product of
the states with a vector that follows, so that none of these is as large as all states. Leaves out scans of other
dtypes than float32, from the last step, and on a GPU.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from gnomon.compiler.build import has_compiler
from gnomon.compiler.kernels import scan
from gnomon.compiler.kernels.recurrent import library
from gnomon.compiler.kernels.recurrent_modules import backend_of
from gnomon.compiler.node import Node

log = logging.getLogger("gnomon.compiler")
RECURRENCE = (Counter({("la", "ra"): 1}), Counter({("lb", "ra"): 1, ("rb",): 1}))
"""What `combine` makes of a and b to the left and to the right: sums of products, by what is multiplied."""

library.define("probe(Tensor[] left, Tensor[] right, Tensor[] made) -> Tensor")


def _probe(lhs: list[Tensor], right: list[Tensor], results: list[Tensor]) -> Tensor:
    return lhs[0].new_empty(0)


library.impl("probe", _probe, "CPU")
torch.library.register_fake("gnomon::probe", _probe, lib=library)
_backend: list[Any] = []


# ---- while Dynamo looks
def allow(backend: Any) -> None:
    """Has Dynamo trace associative scans, once a process; without effect where Dynamo or the scan is built otherwise
    than we know it."""
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator
        from torch._higher_order_ops.associative_scan import associative_scan
    except ImportError as error:
        log.debug("associative scans are unrolled: %s", error)
        return
    home: Any = sys.modules[associative_scan.__module__]
    original = getattr(home, "generic_associative_scan", None)
    if original is None or getattr(original, "for_gnomon", False) or not hasattr(InstructionTranslator, "current_tx"):
        return
    _backend[:] = [backend]
    home.generic_associative_scan = _instead(original)


def _instead(original: Callable[..., Any]) -> Callable[..., Any]:
    def generic(operator: Any, leaves: Any, dim: int = 0, additional_inputs: Any = ()) -> Any:
        if not (_is_ours() and dim == 0 and len(leaves) == 2 and len(additional_inputs) == 0):
            return original(operator, leaves, dim, additional_inputs)
        a, b = leaves
        if not (_fits(a) and _fits(b) and a.shape == b.shape):
            return original(operator, leaves, dim, additional_inputs)
        # One step each, with the dims of all steps.
        lhs, right = [a[:1], b[:1]], [a[1:2], b[1:2]]
        torch.ops.gnomon.probe(lhs, right, pytree.tree_leaves(operator(*lhs, *right)))
        if not _is_recurrence():
            return original(operator, leaves, dim, additional_inputs)
        # The scan of pairs gives both: running products of a, and the states.
        return [a.cumprod(0), torch.ops.gnomon.scan([a], [b], None, False)]

    generic.for_gnomon = True  # type: ignore[attr-defined]
    return generic


def _fits(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.device.type == "cpu" and 2 <= x.dim() <= scan.RANK and x.shape[0] >= 2


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _is_ours() -> bool:
    """Whether this backend's graph is being traced. Called by Dynamo, while it traces."""
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        return backend_of(InstructionTranslator.current_tx()) is _backend[0] and has_compiler()
    except AttributeError:  # Dynamo is not at work in this thread
        return False


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _is_recurrence() -> bool:
    """Whether what was traced last for a probe is the recurrence. Called by Dynamo, while it traces."""
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        nodes = InstructionTranslator.current_tx().output.graph.nodes
        # The last one: earlier scans of the same graph have probes too.
        probe = next(node for node in reversed(nodes) if node.target is torch.ops.gnomon.probe)
        lhs, right, results = probe.args
        known = dict(zip((*lhs, *right), [Counter({(name,): 1}) for name in ("la", "lb", "ra", "rb")], strict=True))
        return tuple(sum_of_products(node, known) for node in results) == RECURRENCE
    except (AttributeError, StopIteration, ValueError) as error:
        log.debug("a scan is unrolled: %s", error)
        return False


def sum_of_products(node: Node, known: dict[Any, Counter[Any]]) -> Counter[Any] | None:
    """How often each product of known nodes is in a sum; None where a node is made of anything else."""
    if node in known:
        return known[node]
    name = name_of(node)
    if name in ("_add_batch_dim", "_remove_batch_dim"):  # of vmap, by which a combination is applied to all steps
        return sum_of_products(node.args[0], known)
    if name not in ("mul", "add") or len(node.args) != 2 or node.kwargs:
        return None
    one, other = (sum_of_products(argument, known) for argument in node.args)
    if one is None or other is None:
        return None
    if name == "add":
        return Counter({key: one[key] + other[key] for key in (*one, *other)})
    out: Counter[Any] = Counter()
    for key, many in one.items():
        for last, times in other.items():
            out[tuple(sorted((*key, *last)))] += many * times
    return out


def name_of(node: Node) -> str:
    """An operation's name in Python, whether it is called as a function or as a method; else nothing."""
    if not isinstance(node, fx.Node) or node.op not in ("call_function", "call_method"):
        return ""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


# ---- in a graph of Dynamo's
def widen(module: fx.GraphModule) -> None:
    """Takes into each scan what makes its rates and drives, and the product with its states that follows."""
    scans = [node for node in module.graph.nodes if node.target is torch.ops.gnomon.scan]
    for node in list(module.graph.nodes):
        if node.target is torch.ops.gnomon.probe and not node.users:
            module.graph.erase_node(node)
    for node in scans:
        [[a], [b], _, _] = node.args
        with module.graph.inserting_before(node):
            exponent = _under_exp(a)
            rates = _factors(a if exponent is None else exponent, a)
            drives = _factors(b, b)
        node.args = (rates, drives, None, exponent is not None)
        _dot(module.graph, node)
    if scans:
        module.recompile()


def value(node: Node) -> Tensor | None:
    """What Dynamo knows of a node's tensor."""
    found = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return found if isinstance(found, Tensor) else None


def _source(node: Node) -> tuple[Any, list[int]]:
    """What a node is but for the order of its dims, and where each of its dims is there."""
    found = value(node)
    order = list(range(found.dim())) if found is not None else []
    while True:
        before = node.args[0] if isinstance(node, fx.Node) and node.args else None
        inner, outer = value(before), value(node)
        name = name_of(node)
        if inner is None or outer is None or inner.dim() != len(order) or inner.dtype != outer.dtype:
            return node, order
        if name in ("float", "to", "contiguous"):
            if inner.device != outer.device:
                return node, order
        elif name in ("transpose", "movedim") and len(node.args) == 3 and all(type(x) is int for x in node.args[1:]):
            moved = list(range(len(order)))
            one, other = (x % len(order) for x in node.args[1:])
            if name == "transpose":
                moved[one], moved[other] = other, one
            else:
                moved.insert(other, moved.pop(one))
            order = [moved[place] for place in order]
        else:
            return node, order
        node = before


def _under_exp(node: Node) -> Node | None:
    """What a rate is the exponential of."""
    source, _ = _source(node)
    return source.args[0] if name_of(source) == "exp" and len(source.args) == 1 and not source.kwargs else None


def _factors(node: Node, like: Node) -> list[Node]:
    """Factors of a product, at most `MOST`, in the order of dims of `like`: what a scan reads."""
    _, order = _source(like)
    inner, inside = _source(node)
    if node is like:
        parts = [inner]
    else:  # under the exponential, whose dims are those of what `like` moves
        parts, order = [inner], [inside[place] for place in order]
    k = 0
    while k < len(parts) and len(parts) < scan.MOST:
        split = _product(parts[k], len(order))
        if split is None:
            k += 1
            continue
        parts[k : k + 1] = split
    graph = like.graph
    out = []
    for part in parts:
        factor = part
        if value(part).dtype != torch.float32:  # type: ignore[union-attr]
            factor = graph.call_method("float", (factor,))
        if order != sorted(order):
            factor = graph.call_function(torch.permute, (factor, order))
        out.append(factor)
    return out


def _product(node: Node, rank: int) -> list[Node] | None:
    """The two tensors that a float32 product is of, with as many dims."""
    source, order = _source(node)
    if order != sorted(order) or name_of(source) != "mul" or len(source.args) != 2 or source.kwargs:
        return None
    values = [value(one) for one in source.args]
    if value(source).dtype != torch.float32 or any(one is None for one in values):  # type: ignore[union-attr]
        return None
    if any(one.dim() != rank or not one.dtype.is_floating_point or one.dtype.itemsize > 4 for one in values):  # type: ignore[union-attr]
        return None
    return list(source.args)


def _dot(graph: fx.Graph, node: Node) -> None:
    """Fuses a matmul with one column that alone reads the states: the column becomes the scan's weight."""
    live = _live(graph)
    ends = [user for user in _through_views(node, live) if user in live]
    if len(ends) != 1 or name_of(ends[0]) != "matmul" or len(ends[0].args) != 2:
        return
    matmul, (states, weight) = ends[0], ends[0].args
    source, order = _source(states)
    known, column = value(states), value(weight)
    if source is not node or known is None or column is None or known.dim() != scan.RANK or column.dim() != scan.RANK:
        return
    if order[-1] != scan.RANK - 1 or column.shape[-1] != 1 or column.dtype != torch.float32 or states is weight:
        return
    if column.shape[:-2] != known.shape[:-2]:
        return
    # The inverse of `order`: the weight has its dims as the states are read, and is wanted as the scan has them.
    back = [order.index(place) for place in range(scan.RANK)]
    with graph.inserting_before(matmul):
        row = graph.call_method("transpose", (weight, -1, -2))
        ordered = graph.call_function(torch.permute, (row, back))
        scanned = graph.call_function(torch.ops.gnomon.scan, (*node.args[:2], ordered, node.args[3]))
        moved = graph.call_function(torch.permute, (scanned, order[:-1]))
        out = graph.call_method("unsqueeze", (moved, -1))
    for one in (row, ordered, scanned, moved, out):
        one.meta.update({key: meta_value for key, meta_value in matmul.meta.items() if key != "example_value"})
    matmul.replace_all_uses_with(out)
    graph.erase_node(matmul)


def _live(graph: fx.Graph) -> set[Any]:
    """Nodes that a result needs, or that do more than make one."""
    live: set[Any] = set()
    waiting = [node for node in graph.nodes if node.op == "output" or node.is_impure()]
    while waiting:
        node = waiting.pop()
        if node not in live:
            live.add(node)
            waiting += node.all_input_nodes
    return live


def _through_views(node: Node, live: set[Any]) -> Sequence[Any]:
    """Who reads a node, by any order of its dims."""
    out: list[Any] = []
    for user in node.users:
        if user not in live:
            continue
        before, _ = _source(user)
        out += _through_views(user, live) if before is not user and user.args[0] is node else [user]
    return out
