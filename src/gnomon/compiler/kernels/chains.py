"""Linear layers with what surrounds them as one kernel: a layer norm of rows before, pointwise work and other tensors
after, and further linear layers behind.

`fuse(graph, compiled)` puts a `Chain` in place of each that the traffic model says to gain and whose trial won: what a
norm would write and the product read is normed as rows are copied for the product (`cpp/linear.cpp`), and what follows
is computed on sums that are still in registers, by the rules of groups, with the tensors that it reads beside them (a
residual, a gate). Where the weights of several layers behind each other stay in the second cache, what lies between
them never goes to memory (`linears`). Tiles are constructed (`matmul_tile`). Each is tried beside the same operations
compiled apart, on numbers that are made, before it comes into the graph, so one that lost costs the graph nothing.
Float32, fixed sizes, on a CPU. Leaves out norms that several layers read.
Source: Welder (OSDI 2023): tiles of a chain connected in registers (after) and in cache (before, between).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from gnomon.compiler.build import address_of, libraries
from gnomon.compiler.graph.groups import root
from gnomon.compiler.kernels import linear, linears
from gnomon.compiler.kernels.linear import Ended
from gnomon.compiler.kernels.products import TRANSPOSED, from_memory
from gnomon.compiler.node import Node
from gnomon.compiler.rules import pointwise
from gnomon.compiler.tasks.steps import KernelCall, Operation
from gnomon.compiler.text.cpp_text import Text, expression
from gnomon.compiler.tiles.body import Body, External, UnfitError
from gnomon.compiler.tiles.device import DeviceDescription, this_device
from gnomon.compiler.tiles.lowering import Lowering
from gnomon.compiler.tiles.matmul_tile import constructed
from gnomon.compiler.tiles.stages import classify, live
from gnomon.compiler.tiles.tiling import Nest
from gnomon.compiler.tune import gate
from gnomon.compiler.tune.gate import Trial
from gnomon.compiler.tune.tried import TriedKernel

aten = torch.ops.aten
SAME = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
FEWEST_ROWS = 16
"""Of a product: with fewer, weights are better read once as they lie (`thin`, `live`)."""
GAIN = 0.02
"""Of the products' own time, what the traffic that is saved must take at least: a core brings most of it while it
computes, so that of less nothing was ever won (benchmarks/results/compiler_chains.md)."""
SHARE = 0.98
"""Of the time of the operations compiled apart that a chain may take: less is noise."""
CALL_S = 3e-6
"""To begin a kernel."""

Apart: TypeAlias = Callable[[fx.GraphModule, int], Callable[[list[Tensor]], Any]]
"""A graph, and how many layers a chain in it may have (0: no chains), as a function of a list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One linear layer of a chain."""

    matmul: Node
    bias: Node | None
    x: Node
    weight: Node
    transposed: bool
    """Whether the weight is given as (n, k)."""
    out: Node
    after: tuple[Node, ...]
    """Pointwise nodes and views behind the product."""
    others: tuple[Node, ...]
    """What they read beside the product: (m, n), or a row of n."""

    @property
    def sizes(self) -> tuple[int, int, int]:
        m, n = (int(size) for size in self.matmul.meta["val"].shape)
        return m, n, int(self.weight.meta["val"].shape[1 if self.transposed else 0])

    @property
    def work(self) -> list[Node]:
        return [one for one in self.after if one.target not in SAME]

    @property
    def rows(self) -> tuple[int, ...]:
        """Strides from one row to the next of each of the others; 0 where it is one row."""
        m, n, _ = self.sizes
        return tuple(n if one.meta["val"].numel() == m * n else 0 for one in self.others)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainNodes:
    """Nodes of one chain."""

    links: tuple[Link, ...]
    norm: Node | None
    before: tuple[Node, ...]
    """The norm's, in the order of the graph."""
    x: Node

    @property
    def out(self) -> Node:
        return self.links[-1].out

    @property
    def members(self) -> tuple[Node, ...]:
        """All that goes, in the order of the graph."""
        return (*self.before, *(node for link in self.links for node in (link.matmul, *link.after)))

    @property
    def names(self) -> list[str]:
        out = ["layer norm"] * (self.norm is not None)
        for link in self.links:
            out += ["linear", *(str(node.target).split(".")[1] for node in link.work)]
        return out

    @property
    def inputs(self) -> list[Node]:
        """What it reads, each once."""
        return list(dict.fromkeys(self.read))

    @property
    def read(self) -> list[Node]:
        """x, the norm's two vectors where there are some, then each layer's weight, bias and others."""
        vectors = [] if self.norm is None else [one for one in self.norm.args[2:4] if one is not None]
        out = [self.x, *vectors]
        for link in self.links:
            out += [link.weight, *([] if link.bias is None else [link.bias]), *link.others]
        return out


class Chain(TriedKernel):
    """One chain as a function of `ChainNodes.inputs`."""

    plain: Callable[..., Any]
    """The same operations compiled apart."""
    cold: tuple[bool, ...] = ()
    """Which inputs come from memory in every call (`products.from_memory`)."""

    def __init__(self, found: ChainNodes, ended: Sequence[Ended]) -> None:
        """Is not tried yet. ended: what follows each product."""
        self.names = found.names
        self.read = tuple(found.inputs.index(node) for node in found.read)
        self.sizes = [link.sizes for link in found.links]
        self.layers = tuple((link.bias is not None, link.transposed, link.rows) for link in found.links)
        self.shape = tuple(int(size) for size in found.out.meta["val"].shape)
        self.saved_bytes = saved_bytes(found)
        self._filled: dict[Any, Any] = {}
        """Structs without addresses, by strides."""
        self.norm = None
        if found.norm is not None:
            self.norm = (found.norm.args[2] is not None, found.norm.args[3] is not None, float(found.norm.args[4]))
        device, normed = this_device(), found.norm is not None
        self.form: linear.LinearForm | linears.LayersForm
        if len(found.links) == 1:
            [link] = found.links
            weight = link.weight.meta["val"]
            tile = constructed(*self.sizes[0], device)[0]
            if not link.transposed:
                tile = linear.form_of(link.x.meta["val"], weight.t()).tile or tile
            least = linear.least_of(self.sizes[0][0], tile)
            self.form = linear.LinearForm(tile, ended[0], normed, least=least)
            self.text = linear.source(self.form)
        else:
            self.form = linears.form_of(self.sizes, tuple(ended), normed, device)
            self.text = linears.source(self.form)
        # Everything that decides what the kernel computes is in the source: by it chains are alike (`_fused`) and
        # verdicts are kept (`gate`).
        super().__init__(
            "chain", f"{self.text}// {self.sizes} {self.layers} {self.norm} {self.names} {self.read}", True
        )

    def run(self, *args: Tensor) -> Tensor:
        """Runs the kernel on these tensors, or the operations one by one where it does not run."""
        x, *rest = (args[place] for place in self.read)
        x = x.contiguous().reshape(-1, x.shape[-1])
        gamma, beta, eps = self._norm_of(rest)
        layers = self._layers_of(rest)
        if isinstance(self.form, linear.LinearForm):
            [(w, bias, others)] = layers
            bias_args = [] if bias is None else [bias]
            norm = None if self.norm is None else (gamma, beta, eps)
            result = linear.linear(*bias_args, x, w, form=self.form, norm=norm, others=others)
        else:
            result = self._by_layers(self.form, x, layers, gamma, beta, eps)
        return self.aten(*args) if result is None else result.view(self.shape)

    def _norm_of(self, rest: list[Tensor]) -> tuple[Tensor | None, Tensor | None, float]:
        """Takes the norm's gamma and beta from what follows x."""
        if self.norm is None:
            return None, None, 0.0
        gamma = rest.pop(0).contiguous() if self.norm[0] else None
        beta = rest.pop(0).contiguous() if self.norm[1] else None
        return gamma, beta, self.norm[2]

    def _layers_of(self, rest: list[Tensor]) -> list[tuple[Tensor, Tensor | None, list[Tensor]]]:
        """Weight (n, k), bias and others of each layer."""
        out = []
        for biased, turned, rows in self.layers:
            w = rest.pop(0)
            w = w if turned else w.t()
            # Either dim of a weight may be the dense one; the kernel has strides of both.
            w = w if 1 in w.stride() else w.contiguous()
            bias = rest.pop(0).contiguous() if biased else None
            out.append((w, bias, [rest.pop(0).contiguous() for _ in rows]))
        return out

    def _by_layers(
        self, form: linears.LayersForm, x: Tensor, layers: Sequence[tuple[Tensor, Tensor | None, list[Tensor]]],
        gamma: Tensor | None, beta: Tensor | None, eps: float,
    ) -> Tensor | None:  # fmt: skip
        key = (x.stride(), *(w.stride() for w, _, _ in layers))
        filled = self._filled.get(key)
        if filled is None:
            rows = [rows for _, _, rows in self.layers]
            filled = self._filled.setdefault(key, linears.filled(x, [w for w, _, _ in layers], rows, eps))
        # A copy for each call, as addresses are written to it and several threads may call at the same time.
        call = type(filled).from_buffer_copy(filled)
        out = torch.empty((x.shape[0], self.sizes[-1][1]))
        named = {"x": x, "norm_gamma": gamma, "norm_beta": beta, "out": out}
        for s, (w, bias, others) in enumerate(layers):
            named.update({f"w_{s}": w, f"bias_{s}": bias})
            named.update({f"other{i}_{s}": one for i, one in enumerate(others)})
        for name, one in named.items():
            if one is not None:
                setattr(call, name, one.data_ptr())
        return out if linears.run(form, call) else None

    def step(self, node: Node) -> list[KernelCall | Operation] | None:
        """What C++ calls in a node's place; None where a tensor is to be laid anew first."""
        if not node.meta["val"].is_contiguous():
            return None
        rest, is_linear = [node.args[place] for place in self.read], isinstance(self.form, linear.LinearForm)
        x = rest.pop(0)
        inputs, weights = [("x", x)], []
        if self.norm is not None:
            inputs += [
                (name, rest.pop(0)) for name, has in zip(("norm_gamma", "norm_beta"), self.norm, strict=False) if has
            ]
        for s, (biased, turned, rows) in enumerate(self.layers):
            end = "" if is_linear else f"_{s}"
            w = rest.pop(0)
            weights.append(w.meta["val"] if turned else w.meta["val"].t())
            if 1 not in weights[-1].stride():
                return None
            vectors = ([("bias", rest.pop(0))] if biased else []) + [
                (f"other{i}", rest.pop(0)) for i in range(len(rows))
            ]
            inputs += [(f"w{end}", w), *((f"{name}{end}", one) for name, one in vectors)]
        if not all(one.meta["val"].is_contiguous() for name, one in inputs if not name.startswith("w")):
            return None
        wide = x.meta["val"].reshape(-1, x.meta["val"].shape[-1])
        eps = 0.0 if self.norm is None else self.norm[2]
        function: Any
        if isinstance(self.form, linear.LinearForm):
            function, filled = linear.kernel(self.form), linear.of_rows(wide, weights[0], False)
            assert filled is not None
            filled.norm_eps = eps
            for i, row in enumerate(self.layers[0][2]):
                setattr(filled, f"other_row{i}", row)
        else:
            function = linears.kernel(self.form)
            filled = linears.filled(wide, weights, [rows for _, _, rows in self.layers], eps)
        if function is None:
            return None
        call = KernelCall(function=address_of(function), filled=filled, inputs=tuple(inputs), outputs=(("out", node),))
        return [call]

    def aten(self, *args: Tensor) -> Tensor:
        """Runs the operations apart."""
        return self.plain(*args)  # type: ignore[no-any-return]

    def trial(self) -> Trial:
        """Makes a new trial, which a chain must win."""
        listed = self._listed
        return Trial(self.source, listed(self.run), listed(self.aten), share=SHARE, on_made_inputs=True, cold=self.cold)


def fuse(graph: fx.Graph, apart: Apart, most: int = linears.MOST) -> list[Chain]:
    """Puts a `Chain` in place of each that is faster than apart; returns those that were tried. most: layers of one.

    Several layers first: apart, each of them is tried with what surrounds it, as it stays where they lose."""
    several = _fused(graph, lambda module: apart(module, 1), range(2, most + 1)) if most > 1 else []
    return several + _fused(graph, lambda module: apart(module, 0), range(1, 2))


def _fused(graph: fx.Graph, apart: Callable[[fx.GraphModule], Callable[..., Any]], layers: range) -> list[Chain]:
    """`fuse` of chains of so many layers. Chains that are alike are one, which is tried once."""
    found: list[tuple[ChainNodes, str]] = []
    known: dict[str, tuple[Chain, ChainNodes]] = {}
    used: set[Node] = set()
    cold = from_memory(graph)
    for node in list(graph.nodes):
        one = None if node in used else _found(node, layers)
        if one is None or not gains(one, this_device()):
            continue
        try:
            chain = Chain(one, [epilogue(link) for link in one.links])
        except UnfitError:
            continue
        chain.cold = tuple(root(x) in cold for x in one.inputs)
        known.setdefault(chain.source, (chain, one))
        found.append((one, chain.source))
        used.update(link.matmul for link in one.links)
    # All are compiled beside each other before the first is tried.
    libraries([str(chain.text) for chain, _ in known.values()])
    for chain, one in known.values():
        chain.plain = _apart(one, apart)
        with _disable_current_modes(), torch.no_grad():  # Dynamo's fake tensors have no memory
            chain(*(gate.made_like(node.meta["val"], n) for n, node in enumerate(one.inputs)))
    placed: dict[Node, Node] = {}
    for one, source in found:
        if known[source][0].kept:
            placed[one.out] = _place(graph, one, known[source][0], placed)
    return [known[source][0] for _, source in found]


def saved_bytes(found: ChainNodes) -> int:
    """What does not go to memory and back: the normed rows, what lies between two layers, and what a product would
    leave for the work after it."""
    m, _, k = found.links[0].sizes
    floats = m * k * (found.norm is not None)
    for link in found.links:
        m, n, _ = link.sizes
        floats += m * n * ((link is not found.links[-1]) + bool(link.work))
    # Written and read again, 4 bytes each.
    return 2 * 4 * floats


def gains(found: ChainNodes, device: DeviceDescription) -> bool:
    """Whether the traffic that is saved, and the kernels' beginnings, are worth looking at beside the products."""
    saved = saved_bytes(found)
    if not saved:
        return False
    # Without a chain the numbers would go to the nearest level that holds them all.
    level = next((one for one in device.levels if saved <= one.size), None)
    rate = device.memory_bandwidth if level is None else level.bandwidth
    multiplies = sum(m * n * k for m, n, k in (link.sizes for link in found.links))
    product_s = multiplies / (device.vectors.lanes * device.vectors.rate)
    return saved / rate + CALL_S * len(found.links) >= GAIN * product_s


# ---- in a graph
def _float(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return (
        isinstance(value, Tensor)
        and value.dtype == torch.float32
        and value.device.type == "cpu"
        and value.layout == torch.strided
        and not value.is_neg()
        and all(isinstance(size, int) and size > 0 for size in value.shape)
    )


def _found(node: Node, layers: range) -> ChainNodes | None:
    """The chain that begins with a product, of so many layers as stay in cache, as long as all in it is read within."""
    first = _link(node)
    if first is None:
        return None
    links = [first]
    while len(links) < layers[-1]:
        following = next(iter(links[-1].out.users)) if len(links[-1].out.users) == 1 else None
        # (bias,) x, w: the next layer must read the result as its x, not as its weight or bias.
        link = None if following is None or following.args[-2:-1] != (links[-1].out,) else _link(following)
        if link is None or not linears.fit([one.sizes for one in (*links, link)], this_device()):
            break
        links.append(link)
    if len(links) < layers[0]:
        return None
    before, norm, x = _norm(first.x)
    only_relu = all(one.target is aten.relu.default for one in first.work)
    if len(links) == 1 and norm is None and only_relu:
        return None  # `products` takes a ReLU alone
    return ChainNodes(links=tuple(links), norm=norm, before=before, x=x)


def _link(node: Node) -> Link | None:
    """A product with the pointwise work that follows it."""
    if node.target not in (aten.addmm.default, aten.mm.default) or node.kwargs:
        return None
    *bias, x, w = node.args
    if not all(_float(one) for one in (node, *bias, x, w)) or (bias and bias[0].meta["val"].dim() != 1):
        return None
    turned = w.op == "call_function" and tuple(w.args[1:]) == TRANSPOSED.get(w.target)
    if node.meta["val"].shape[0] < FEWEST_ROWS or bias and bias[0].meta["val"].shape[0] != node.meta["val"].shape[1]:
        return None
    after, out, others = _after(node)
    return Link(
        matmul=node, bias=bias[0] if bias else None, x=x, weight=w.args[0] if turned else w, transposed=turned,
        after=after, out=out, others=others,
    )  # fmt: skip


def _norm(x: Node) -> tuple[tuple[Node, ...], Node | None, Node]:
    """(nodes, the layer norm, what it norms) where a product alone reads a layer norm of its rows."""
    # From the product up; `reversed` below gives the order of the graph.
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


def _after(node: Node) -> tuple[tuple[Node, ...], Node, tuple[Node, ...]]:
    """(pointwise nodes behind a product, the one that others read, what they read beside the product)."""
    members: list[Node] = [node]
    waiting = sorted(node.users, key=lambda n: n._sort_key)
    while waiting:
        one = waiting.pop(0)
        if one in members or not _float(one) or one.kwargs.get("dtype"):
            continue
        plain = one.target in SAME or one.target in pointwise.FORMULAS
        if not plain or not all(arg in members or _beside(arg, one, node) for arg in one.all_input_nodes):
            continue
        if one.meta["val"].numel() != node.meta["val"].numel() or not one.meta["val"].is_contiguous():
            continue
        members.append(one)
        waiting = sorted({*waiting, *one.users}, key=lambda n: n._sort_key)
    members.sort(key=lambda n: n._sort_key)
    # A kernel writes one result: the first that somebody outside reads. Members behind it are left to others, which
    # read that result from memory.
    out = next((one for one in members if any(user not in members for user in one.users)), members[-1])
    needed, waiting = {out}, [out]
    while waiting:
        for arg in waiting.pop().all_input_nodes:
            if arg in members and arg not in needed:
                needed.add(arg)
                waiting.append(arg)
    after = [one for one in members if one in needed and one is not node]
    others = [arg for one in after for arg in one.all_input_nodes if arg is not node and arg not in after]
    return tuple(after), out, tuple(dict.fromkeys(others))


def _beside(arg: Node, reader: Node, matmul: Node) -> bool:
    """Whether what pointwise work reads lies in memory as the product's results do, or as one row of them. What
    pointwise work makes for that reader alone would lie nowhere: both are one group."""
    source, single_reader = arg, len(arg.users) == 1
    while source.target in SAME:
        source = source.args[0]
        single_reader = single_reader and len(source.users) == 1
    if (
        not _float(arg)
        or not arg.meta["val"].is_contiguous()
        or (single_reader and source.target in pointwise.FORMULAS)
    ):
        return False
    value, shape, wide = arg.meta["val"], reader.meta["val"].shape, int(matmul.meta["val"].shape[1])
    row = value.numel() == wide and value.dim() > 0 and value.shape[-1] == wide == shape[-1]
    return bool(value.shape == shape or row)


def epilogue(link: Link) -> Ended:
    """C++ of what follows a product, of a vector of its results; nothing where nothing does."""
    work = link.work
    if not work:
        return ()
    if len(link.others) > linear.MOST_OTHERS:
        raise UnfitError("many tensors beside the product's results")
    shape = tuple(int(size) for size in work[0].meta["val"].shape)
    if any(tuple(int(size) for size in node.meta["val"].shape) != shape for node in work):
        raise UnfitError("work of several shapes")
    # A body has no axes for dims of size 1 (`Body.place`).
    body = Body(axes=[size for size in shape if size > 1])
    # Row-major: the others lie as the product's results do (`_beside`).
    strides = torch.empty(shape, device="meta").stride()
    roots: dict[Node, Node] = {}
    for node in link.after:  # a view is its source's numbers
        if node.target in SAME:
            roots[node] = roots.get(node.args[0], node.args[0])

    def memory(node: Node) -> External:
        node = roots.get(node, node)
        if node is link.matmul:
            return External(node=node, sizes=shape, strides=strides, offset=0, dtype=torch.float32)
        if node not in link.others:
            raise UnfitError("a view of what is computed on the way")
        value = node.meta["val"]
        return External(node=node, sizes=tuple(value.shape), strides=value.stride(), offset=0, dtype=torch.float32)

    for node in work:
        lowering = Lowering(body=body, node=node, sources=memory)
        body.tensors[node] = pointwise.RULES[node.target](lowering, *node.args, **node.kwargs)
    value = body.tensors[work[-1]].value
    nest = Nest(
        body=body, stages=classify(body, [value]), outputs=(), outer=(), inner=(len(body.axes) - 1,), sizes={},
        passes=(), post=(), scratch=(),
    )  # fmt: skip
    text, lines, checks = Text(nest=nest), [], []
    for i in live(body, [value]):
        ins = body.code[i]
        if ins.op == "check":  # where ATen has an answer of its own
            checks.append(f"~v{ins.args[0]}")
            continue
        operand = _read(body.inputs[ins.attr].node, link) if ins.op == "load" else expression(text, i, "at", False)
        lines.append(f"const {ins.kind} v{i} = {operand};")
    if checks:
        lines.append(f"if (any(({' | '.join(checks)}) & first((int)(left < VW ? left : VW)))) *c.refused = 1;")
    return (*lines, f"return v{value};")


def _read(node: Node, link: Link) -> str:
    """C++ of what lies at a vector of a product's results: they themselves, or another tensor."""
    if node is link.matmul:
        return "x"
    i = link.others.index(node)
    place = f"c.other[{i}] + m * c.other_row[{i}] + at"
    return f"left >= VW ? ld({place}) : ld({place}, (int)left)"


def _apart(
    found: ChainNodes, compiled: Callable[[fx.GraphModule], Callable[[list[Tensor]], Any]]
) -> Callable[..., Tensor]:
    """The chain's own operations, compiled without it, as a function of its inputs."""
    graph = fx.Graph()
    places: dict[Node, Node] = {}
    for n, node in enumerate(found.inputs):
        places[node] = graph.placeholder(f"x{n}")
        places[node].meta.update(node.meta)

    def of(node: Node) -> Node:
        if node not in places:
            places[node] = graph.node_copy(node, of)
        return places[node]

    for node in _all(found):
        of(node)
    graph.output((places[found.out],))
    function = compiled(fx.GraphModule(torch.nn.Module(), graph))

    def apart(*args: Tensor) -> Tensor:
        result: Tensor = function(list(args))[0]
        return result

    return apart


def _all(found: ChainNodes) -> list[Node]:
    """What turns a chain's weights, and its members."""
    turned = [link.matmul.args[-1] for link in found.links if link.transposed]
    return [*dict.fromkeys(turned), *found.members]


def _place(graph: fx.Graph, found: ChainNodes, chain: Chain, placed: dict[Node, Node]) -> Node:
    """Puts a chain in its nodes' place. placed: those before it, which gave what it reads, by what they stand for."""
    out = found.out
    with graph.inserting_before(out):
        new = graph.call_function(chain, tuple(placed.get(node, node) for node in found.inputs))
    new.meta.update(out.meta)
    out.replace_all_uses_with(new)
    for node in reversed(_all(found)):
        if not node.users:
            graph.erase_node(node)
    return new
