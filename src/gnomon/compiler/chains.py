"""A linear layer with what surrounds it as one kernel: a layer norm of its rows before, pointwise work after.

`fuse(graph, compiled)` puts a `Chain` in place of each that the traffic model says to gain: what a norm would write and
the product read is normed as rows are copied for the product (`cpp/linear.cpp`), and what follows is computed on sums
that are still in registers, by the rules of groups. The tile is constructed (`matmul_tile`). Each is tried beside the
same operations compiled apart, so it is kept only where it gains. Float32, fixed sizes, on a CPU. Leaves out norms
that several layers read, and products of products.
Source: Welder (OSDI 2023): tiles of a chain connected in registers (after) and in cache (before).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from gnomon.compiler import linear
from gnomon.compiler.body import Body, External, UnfitError
from gnomon.compiler.cpp_text import Text, expression
from gnomon.compiler.device import DeviceDescription, this_device
from gnomon.compiler.gate import Trial
from gnomon.compiler.lowering import Lowering
from gnomon.compiler.matmul_tile import constructed
from gnomon.compiler.node import Node
from gnomon.compiler.products import TRANSPOSED
from gnomon.compiler.rules import pointwise
from gnomon.compiler.stages import classify, live
from gnomon.compiler.tiles import Nest
from gnomon.compiler.tried import TriedKernel

aten = torch.ops.aten
SAME = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
FEWEST_ROWS = 16
"""Of a product: with fewer, weights are better read once as they lie (`thin`, `live`)."""
GAIN = 0.01
"""Of the product's own time, what the traffic that is saved must take at least."""
SHARE = 0.98
"""Of the time of the operations compiled apart that a chain may take: less is noise."""
CALL_S = 3e-6
"""To begin a kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainNodes:
    """Nodes of one chain."""

    product: Node
    bias: Node | None
    x: Node
    weight: Node
    turned: bool
    """Whether the weight is given as (n, k)."""
    norm: Node | None
    members: tuple[Node, ...]
    """All that goes, in the order of the graph."""
    out: Node
    after: tuple[Node, ...]
    """Pointwise nodes and views behind the product."""

    @property
    def sizes(self) -> tuple[int, int, int]:
        m, n = (int(size) for size in self.product.meta["val"].shape)
        return m, n, int(self.weight.meta["val"].shape[1 if self.turned else 0])


class Chain(TriedKernel):
    """One chain as a function of x, the weight, and the bias and the norm's two vectors where there are some."""

    def __init__(self, found: ChainNodes, form: linear.LinearForm, plain: Callable[..., Any]) -> None:
        """Is not tried yet. plain: the same operations compiled apart."""
        self.form, self.plain = form, plain
        self.bias, self.turned = found.bias is not None, found.turned
        self.shape = tuple(int(size) for size in found.out.meta["val"].shape)
        self.norm = None
        if found.norm is not None:
            self.norm = (found.norm.args[2] is not None, found.norm.args[3] is not None, float(found.norm.args[4]))
        self.names = ["layer norm"] * (found.norm is not None) + ["linear"]
        self.names += [str(n.target).split(".")[1] for n in found.after if n.target not in SAME]
        self.sizes = found.sizes
        self.text = linear.source(form)
        super().__init__("chain", f"{self.text}// {found.sizes} {self.bias} {self.turned} {self.norm}", True)

    def run(self, *args: Tensor) -> Tensor:
        """Runs the kernel on these tensors, or the operations one by one where it does not run."""
        x, weight, *rest = args
        bias = [rest.pop(0)] if self.bias else []
        norm = None
        if self.norm is not None:
            gamma = rest.pop(0).contiguous() if self.norm[0] else None
            beta = rest.pop(0).contiguous() if self.norm[1] else None
            norm = (gamma, beta, self.norm[2])
            x = x.contiguous()
        x = x.reshape(-1, x.shape[-1])
        made = linear.linear(*bias, x, weight if self.turned else weight.t(), form=self.form, norm=norm)
        return self.aten(*args) if made is None else made.view(self.shape)

    def aten(self, *args: Tensor) -> Tensor:
        """Runs the operations apart."""
        return self.plain(*args)  # type: ignore[no-any-return]

    def trial(self) -> Trial:
        """Makes a new trial, which a chain must win."""
        listed = self._listed
        return Trial(self.source, listed(self.run), listed(self.aten), share=SHARE, made=True)


def fuse(graph: fx.Graph, compiled: Callable[[fx.GraphModule], Callable[[list[Tensor]], Any]]) -> list[Chain]:
    """Puts a `Chain` in place of each; returns them. compiled: a graph without chains as a function of a list."""
    made = []
    for node in list(graph.nodes):
        if node.target not in (aten.addmm.default, aten.mm.default):
            continue
        found = _found(node)
        if found is None or not gains(found, this_device()):
            continue
        try:
            ended = _ended(found)
        except UnfitError:
            continue
        form = linear.LinearForm(constructed(*found.sizes, this_device())[0], ended, found.norm is not None)
        chain = Chain(found, form, _apart(found, compiled))
        _place(graph, found, chain)
        made.append(chain)
    return made


def saved_bytes(found: ChainNodes) -> int:
    """What does not go to memory and back: the normed rows, and what the product would leave for the work after it."""
    m, n, k = found.sizes
    work = any(node.target not in SAME for node in found.after)
    return 2 * 4 * (m * k * (found.norm is not None) + m * n * work)


def gains(found: ChainNodes, device: DeviceDescription) -> bool:
    """Whether the traffic that is saved, and the kernels' beginnings, are worth looking at beside the product."""
    m, n, k = found.sizes
    saved = saved_bytes(found)
    if not saved:
        return False
    level = next((one for one in device.levels if saved <= one.size), None)
    rate = device.memory_bandwidth if level is None else level.bandwidth
    product_s = m * n * k / (device.vectors.lanes * device.vectors.rate)
    return saved / rate + CALL_S >= GAIN * product_s


# ---- in a graph
def _float(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return (
        isinstance(value, Tensor)
        and value.dtype == torch.float32
        and value.device.type == "cpu"
        and value.layout == torch.strided
        and all(isinstance(size, int) and size > 0 for size in value.shape)
    )


def _found(node: Node) -> ChainNodes | None:
    """The chain around a product, as long as everything in it is read within."""
    *bias, x, w = node.args
    if node.kwargs or not all(_float(one) for one in (node, *bias, x, w)) or (bias and bias[0].meta["val"].dim() != 1):
        return None
    turned = w.op == "call_function" and tuple(w.args[1:]) == TRANSPOSED.get(w.target)
    weight = w.args[0] if turned else w
    if node.meta["val"].shape[0] < FEWEST_ROWS or bias and bias[0].meta["val"].shape[0] != node.meta["val"].shape[1]:
        return None
    before, norm, source = _norm(x)
    after, out = _after(node)
    work = [one for one in after if one.target not in SAME]
    if norm is None and all(one.target is aten.relu.default for one in work):
        return None  # `products` takes a ReLU alone
    members = (*before, node, *after)
    return ChainNodes(
        product=node, bias=bias[0] if bias else None, x=source, weight=weight, turned=turned, norm=norm,
        members=members, out=out, after=after,
    )  # fmt: skip


def _norm(x: Node) -> tuple[tuple[Node, ...], Node | None, Node]:
    """(nodes, the layer norm, what it norms) where a product alone reads a layer norm of its rows."""
    nodes, here = [], x
    while here.op == "call_function" and here.target in SAME and len(here.users) == 1:
        nodes.append(here)
        here = here.args[0]
    first = here.target is operator.getitem and here.args[1] == 0 and len(here.users) == 1
    norm = here.args[0] if first else None
    if norm is None or norm.target is not aten.native_layer_norm.default or len(norm.users) != 1:
        return (), None, x
    source, shape, gamma, beta, _ = norm.args
    width = [int(x.meta["val"].shape[-1])]
    if list(shape) != width or not all(one is None or _float(one) for one in (gamma, beta)) or not _float(source):
        return (), None, x
    return (norm, here, *reversed(nodes)), norm, source


def _after(node: Node) -> tuple[tuple[Node, ...], Node]:
    """(nodes behind a product that need nothing else, the one that others read)."""
    members: list[Node] = [node]
    waiting = sorted(node.users, key=lambda n: n._sort_key)
    while waiting:
        one = waiting.pop(0)
        if one in members or not _float(one) or one.kwargs.get("dtype"):
            continue
        plain = one.target in SAME or one.target in pointwise.FORMULAS
        if not plain or any(arg not in members for arg in one.all_input_nodes):
            continue
        if one.meta["val"].numel() != node.meta["val"].numel() or not one.meta["val"].is_contiguous():
            continue
        members.append(one)
        waiting = sorted({*waiting, *one.users}, key=lambda n: n._sort_key)
    members.sort(key=lambda n: n._sort_key)
    out = next((one for one in members if any(user not in members for user in one.users)), members[-1])
    needed, waiting = {out}, [out]
    while waiting:
        for arg in waiting.pop().all_input_nodes:
            if arg in members and arg not in needed:
                needed.add(arg)
                waiting.append(arg)
    return tuple(one for one in members if one in needed and one is not node), out


def _ended(found: ChainNodes) -> str:
    """C++ of what follows, as a function of a vector of the product's results; nothing where nothing does."""
    work = [node for node in found.after if node.target not in SAME]
    if not work:
        return ""
    shape = tuple(int(size) for size in work[0].meta["val"].shape)
    if any(tuple(int(size) for size in node.meta["val"].shape) != shape for node in work):
        raise UnfitError("work of several shapes")
    body = Body(axes=[size for size in shape if size > 1])
    strides = torch.empty(shape, device="meta").stride()

    def memory(node: Node) -> External:
        return External(node=found.product, sizes=shape, strides=strides, offset=0, dtype=torch.float32)

    for node in work:
        lowering = Lowering(body=body, node=node, sources=memory)
        body.tensors[node] = pointwise.RULES[node.target](lowering, *node.args, **node.kwargs)
    value = body.tensors[work[-1]].value
    if len(body.inputs) != 1:
        raise UnfitError("more than the product's results")
    nest = Nest(
        body=body, stages=classify(body, [value]), outputs=(), outer=(), inner=(len(body.axes) - 1,), sizes={},
        passes=(), post=(), scratch=(),
    )  # fmt: skip
    text, lines = Text(nest=nest), ["ALWAYS F ended(F x) {"]
    for i in live(body, [value]):
        ins = body.code[i]
        if ins.op == "check":  # where oneDNN's GELU has an answer of its own, beyond 1e38
            continue
        made = "x" if ins.op == "load" else expression(text, i, last="0", partial=False)
        lines.append(f"    const {ins.kind} v{i} = {made};")
    return "\n".join([*lines, f"    return v{value};", "}"])


def _inputs(found: ChainNodes) -> list[Node]:
    vectors = [] if found.norm is None else [one for one in found.norm.args[2:4] if one is not None]
    return [found.x, found.weight, *([] if found.bias is None else [found.bias]), *vectors]


def _apart(
    found: ChainNodes, compiled: Callable[[fx.GraphModule], Callable[[list[Tensor]], Any]]
) -> Callable[..., Tensor]:
    """The chain's own operations, compiled without chains, as a function of its inputs."""
    graph = fx.Graph()
    places: dict[Node, Node] = {}
    for n, node in enumerate(dict.fromkeys(_inputs(found))):
        places[node] = graph.placeholder(f"x{n}")
        places[node].meta.update(node.meta)
    shared, inputs = list(places), _inputs(found)

    def of(node: Node) -> Node:
        if node not in places:
            places[node] = graph.node_copy(node, of)
        return places[node]

    weight = found.product.args[-1]
    for node in (*([weight] if found.turned else []), *found.members):
        of(node)
    graph.output((places[found.out],))
    function = compiled(fx.GraphModule(torch.nn.Module(), graph))

    def apart(*args: Tensor) -> Tensor:
        given = dict(zip(inputs, args, strict=True))
        made: Tensor = function([given[node] for node in shared])[0]
        return made

    return apart


def _place(graph: fx.Graph, found: ChainNodes, chain: Chain) -> None:
    with graph.inserting_before(found.out):
        new = graph.call_function(chain, tuple(_inputs(found)))
    new.meta.update(found.out.meta)
    found.out.replace_all_uses_with(new)
    weight: Sequence[Node] = [found.product.args[-1]] if found.turned else []
    for node in reversed((*weight, *found.members)):
        if not node.users:
            graph.erase_node(node)
