"""Stencils in a graph of ATen's: shifted views (slice, pad, roll), writes into the interior, and convolutions of few
channels, with all pointwise work between.

`regions(graph)` gives what is convex and connected; `stencil(region)` its stages, or raises `UnfitError`. A node is a
stage where somebody reads its neighbours; everything else is computed where it is used. Fixed sizes, on a CPU or as a
text for another device; strides of 1, one group or one a channel. Leaves out gradients, which read weights too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch

from gnomon.compiler.node import Node
from gnomon.compiler.rules import pointwise
from gnomon.compiler.stencil.stages import FURTHEST, MANY, Factor, Read, Shift, Stage, Stencil
from gnomon.compiler.tiles.body import Body, External, UnfitError
from gnomon.compiler.tiles.lowering import Lowering
from gnomon.compiler.tiles.values import Value

aten = torch.ops.aten
CHANNELS = 4
"""The channels of images that a convolution may mix; with more it is a matrix product."""
TAPS = 160
"""Multiplications of a point, at most, all channels together."""
MOST_STAGES = 512
FLOATS = (torch.float32, torch.bfloat16, torch.float64)
SAME = {
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.alias.default,
    aten.detach.default,
    aten.expand.default,
}
"""Ops that keep elements and their order: views of other dims of size 1."""
SHIFTS = {aten.slice.Tensor, aten.constant_pad_nd.default, aten.roll.default, aten.select.int}
POINTWISE = {op for op in pointwise.FORMULAS if op is not aten.clone.default}


@dataclass(slots=True)
class Region:
    """Nodes that are computed together."""

    members: list[Node] = field(default_factory=list)
    after: set[int] = field(default_factory=set)
    """Numbers of the regions that it waits for."""


def fixed(node: Any) -> torch.Tensor | None:
    """The fake tensor of a node where a stage may hold it: dense, of fixed sizes, not empty."""
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_conj() or value.is_neg():
        return None
    return value if all(isinstance(size, int) and size > 0 for size in value.shape) else None


def few_channels(node: Node) -> bool:
    """Whether a convolution's channels are few, or each is its own, of steps of 1."""
    if node.target is not aten.convolution.default or node.kwargs:
        return False
    x, weight, bias, stride, padding, _, transposed, output_padding, groups = node.args
    values = [fixed(one) for one in (x, weight, *([] if bias is None else [bias]))]
    numbers = [*stride, *padding, *node.args[5]]
    if any(one is None for one in values) or not all(type(one) is int for one in numbers):
        return False
    if transposed or any(output_padding) or any(one != 1 for one in stride) or any(one < 0 for one in padding):
        return False
    out, of, *taps = values[1].shape  # type: ignore[union-attr]
    own = groups == values[0].shape[1] == out and of == 1  # type: ignore[union-attr]
    few = groups == 1 and max(out, of) <= CHANNELS
    size = of * torch.Size(taps).numel()
    return (own or few) and 1 < size <= TAPS and len(taps) in (1, 2, 3)


def may_join(node: Node) -> bool:
    """Whether a node may be of a stencil."""
    value = fixed(node)
    if node.op != "call_function" or value is None:
        return False
    if node.target in SHIFTS or node.target in SAME or node.target is aten.slice_scatter.default:
        return value.dtype in FLOATS
    if node.target in (aten.clone.default, aten.copy.default):
        return value.dtype in FLOATS
    if node.target in POINTWISE:
        return value.dtype in FLOATS or value.dtype == torch.bool
    return value.dtype in FLOATS and few_channels(node)


def shifts(node: Node) -> bool:
    """Whether a node reads neighbours by itself, or is how somebody does."""
    return node.target in (aten.constant_pad_nd.default, aten.roll.default, aten.slice.Tensor) or few_channels(node)


def regions(graph: torch.fx.Graph) -> list[Region]:
    """Connected, convex sets of nodes that may be of stencils, with something shifted in each."""
    merged: list[Region] = []
    of: dict[Node, int] = {}
    behind: dict[Node, frozenset[int]] = {}
    """Maps a node to the regions that it waits for on a way that leaves them."""
    alias: dict[int, int] = {}

    def number(n: int) -> int:
        while n in alias:
            n = alias[n]
        return n

    for node in graph.nodes:
        above = node.all_input_nodes
        waits: set[int] = set()
        for arg in above:
            waits |= {number(n) for n in behind.get(arg, ())}
        homes = list(dict.fromkeys(number(of[arg]) for arg in above if arg in of))
        if may_join(node):
            # A node joins a region of its inputs unless it waits for that region on a way through others: then the
            # region would not be convex.
            fit = [n for n in homes if n not in waits]
            home = fit[0] if fit else None
            for other in fit[1:]:
                # Two regions become one if neither waits for the other.
                if home in merged[other].after or other in merged[home].after:  # type: ignore[operator, index]
                    continue
                merged[home].members += merged[other].members  # type: ignore[index]
                merged[home].after |= merged[other].after  # type: ignore[index]
                merged[other].members, alias[other] = [], home  # type: ignore[assignment]
            if home is None:
                home = len(merged)
                merged.append(Region())
            of[node] = home
            merged[home].members.append(node)
            others = {number(of[arg]) for arg in above if arg in of} - {home}
            merged[home].after |= (waits | others) - {home}
            behind[node] = frozenset((waits | others | merged[home].after) - {home})
        else:
            behind[node] = frozenset(waits | set(homes))
    order = {node: n for n, node in enumerate(graph.nodes)}
    laid = any(node.target is aten.convolution.default and not few_channels(node) for node in graph.nodes)
    found = []
    for one in merged:
        one.members.sort(key=order.__getitem__)
        if laid and any(few_channels(node) for node in one.members):
            continue  # images are laid for the other convolutions
        if any(shifts(node) for node in one.members):
            found.append(one)
    return found


# ---- views
@dataclass(slots=True)
class Finder:
    """Makes the stages of one region."""

    members: list[Node]
    inside: set[Node] = field(default_factory=set)
    stages: dict[Node, None] = field(default_factory=dict)
    """The nodes that are stages."""
    whole: bool = False
    """Whether dims of size 1 count: where channels are mixed."""
    views: dict[Node, Read] = field(default_factory=dict)
    """What each node is a view of, where it is one."""

    def sizes(self, node: Node) -> tuple[int, ...]:
        """Returns a node's sizes by dim."""
        shape = tuple(int(size) for size in node.meta["val"].shape)
        return shape if self.whole else tuple(size for size in shape if size > 1)

    def dim(self, node: Node, dim: int) -> int:
        """A tensor's dim as one of ours."""
        shape = node.meta["val"].shape
        dim %= len(shape)
        if self.whole:
            return dim
        if shape[dim] == 1:
            raise UnfitError("a dim of size 1 that is shifted")
        return sum(size > 1 for size in shape[:dim])

    def own(self, node: Node) -> Read:
        return Read(node, (0,) * len(self.sizes(node)))

    def needs(self, node: Node) -> Read:
        """Reads a node as a whole field, which is made a stage where it is a view of something else."""
        read = self.view(node)
        if any(read.shift) or read.outside is not None or self.sizes(read.field) != self.sizes(node):
            self.stages[node] = None
            return self.own(node)
        return read

    def view(self, node: Node) -> Read:
        """What a node reads where it is not computed: a field and a shift. Fields of the region become stages."""
        if node not in self.views:
            self.views[node] = self._view(node)
        return self.own(node) if node in self.stages else self.views[node]

    def _view(self, node: Node) -> Read:
        if node not in self.inside:
            return self.own(node)
        target, args = node.target, node.args
        if target in SAME or target is aten.select.int:
            if self.sizes(args[0]) != self.sizes(node):
                raise UnfitError("other dims")
            return self.view(args[0])
        if target is aten.slice.Tensor:
            if len(args) > 4 and args[4] != 1:
                raise UnfitError("a slice with steps")
            size = args[0].meta["val"].shape[args[1] if len(args) > 1 else 0]
            start = _start(args[2] if len(args) > 2 else None, int(size))
            # A slice of everything is no shift.
            if node.meta["val"].shape == args[0].meta["val"].shape:
                return self.view(args[0])
            dim = self.dim(args[0], args[1] if len(args) > 1 else 0)
            if len(self.sizes(args[0])) != len(self.sizes(node)):
                raise UnfitError("a slice of one row")
            return _moved(self.view(args[0]), dim, start)
        if target is aten.constant_pad_nd.default:
            # Edges of two pads would be two kinds of outside: what is padded must be a field by itself.
            read, pads = self.needs(args[0]), list(args[1])
            fill = float(args[2]) if len(args) > 2 else 0.0
            for n in range(len(pads) // 2):
                # Pairs of (low, high) from the last dim on; element i of the result is element i - low of what is
                # padded.
                low, high = pads[2 * n], pads[2 * n + 1]
                if low < 0 or high < 0:
                    raise UnfitError("a pad that cuts")
                if low or high:
                    read = _moved(read, self.dim(args[0], -1 - n), -low)
            return replace(read, outside=fill)
        if target is aten.roll.default:
            if len(args) < 3 or not args[2]:
                raise UnfitError("a roll of the flat tensor")
            read = self.view(args[0])
            # A roll of something that is already shifted or padded needs that as a stage of its own.
            if read.outside not in (None, "wrap") or (read.outside is None and any(read.shift)):
                read = self.needs(args[0])
            if self.sizes(read.field) != self.sizes(node):
                read = self.needs(args[0])
            for by, dim in zip(args[1], args[2], strict=True):
                if args[0].meta["val"].shape[dim] > 1:
                    # Element i of a roll by `by` is element i - by.
                    read = _moved(read, self.dim(args[0], dim), -int(by))
            return replace(read, outside="wrap")
        if target is aten.copy.default:
            if args[1].meta["val"].shape != node.meta["val"].shape or args[1].meta["val"].dtype != fixed(node).dtype:  # type: ignore[union-attr]
                raise UnfitError("a copy that broadcasts or converts")
            return self.view(args[1])
        if target is aten.clone.default:
            return self.view(args[0])
        self.stages[node] = None
        return self.own(node)

    def has_instructions(self, node: Node) -> bool:
        """Whether a node has instructions of its own, which may be computed where it is used."""
        return node in self.inside and (node.target in POINTWISE or few_channels(node))


def _start(start: Any, size: int) -> int:
    if start is None:
        return 0
    start = int(start)
    return min(max(start + size if start < 0 else start, 0), size)


def _moved(read: Read, dim: int, by: int) -> Read:
    shift = list(read.shift)
    shift[dim] += by
    return replace(read, shift=tuple(shift))


# ---- writes into the interior
def _plain(node: Any, inside: set[Node]) -> Any:
    """The node that a node is a copy of."""
    while isinstance(node, torch.fx.Node) and node in inside:
        if node.target is aten.copy.default:
            node = node.args[1]
        elif node.target in (aten.clone.default, aten.alias.default):
            node = node.args[0]
        else:
            break
    return node


def _scattered(node: Node, inside: set[Node]) -> tuple[Node, dict[int, tuple[int, int]], Node]:
    """(what stands outside, where by the tensor's dims, what is written there) of nested `slice_scatter`."""
    base, source, dim, start, end, step = [*node.args, *[0, None, None, 1][len(node.args) - 2 :]][:6]
    if step != 1:
        raise UnfitError("a write with steps")
    shape = node.meta["val"].shape
    dim %= len(shape)
    low = _start(start, int(shape[dim]))
    high = low + int(source.meta["val"].shape[dim])
    source = _plain(source, inside)
    if source in inside and source.target is aten.slice_scatter.default:
        under, box, what = _scattered(source, inside)
        part = _plain(under, inside)
        # Nested writes: the inner one writes into a slice of the same base, so both are one box.
        cut = part in inside and part.target is aten.slice.Tensor and part.args[1] % len(shape) == dim
        if cut and _plain(part.args[0], inside) is _plain(base, inside) and dim not in box:
            begin = _start(part.args[2] if len(part.args) > 2 else None, int(shape[dim]))
            if begin == low and part.meta["val"].shape[dim] == high - low:
                return _plain(base, inside), {**box, dim: (low, high)}, what
    return _plain(base, inside), {dim: (low, high)}, source


# ---- stages
def stencil(region: Region) -> Stencil:
    """The stages of a region; UnfitError where there is none."""
    finder = Finder(members=region.members, inside=set(region.members))
    finder.whole = any(few_channels(node) and _mixes(node) for node in region.members)
    outputs = _outputs(finder)
    for node in outputs:
        finder.stages[node] = None
    for node in region.members:  # whoever is read at a distance is a stage
        if finder.has_instructions(node):
            for arg in node.all_input_nodes:
                if arg in finder.inside and not finder.has_instructions(arg):
                    finder.view(arg)
            if few_channels(node):
                finder.needs(node.args[0]) if any(node.args[4]) else finder.view(node.args[0])
                if finder.has_instructions(node.args[0]):
                    finder.stages[node.args[0]] = None
    # Reading a stage at a distance may make another node a stage; repeat until none is added.
    stages: list[Stage] = []
    for _ in region.members:
        before = len(finder.stages)
        stages = [_stage(finder, node) for node in region.members if node in finder.stages]
        if len(finder.stages) == before:  # else making one found another
            break
    used = _used(stages, outputs)
    if not used or len(used) > MOST_STAGES:
        raise UnfitError("no stages, or too many")
    found = _periodic(_whole(tuple(used), finder, outputs))
    _check(found)
    return found


def _mixes(node: Node) -> bool:
    weight = node.args[1].meta["val"]
    return node.args[8] == 1 and max(weight.shape[:2]) > 1


def _outputs(finder: Finder) -> list[Node]:
    """Nodes of the region that others read, through views that stay outside."""
    needed: dict[Node, None] = {}
    for node in finder.members:
        if any(user not in finder.inside for user in node.users):
            here = node
            while here in finder.inside and (
                here.target in SAME or here.target in (aten.slice.Tensor, aten.select.int)
            ):
                here = here.args[0]
            if here in finder.inside:
                needed[here] = None
    return list(needed)


def _used(stages: Sequence[Stage], outputs: Sequence[Node]) -> list[Stage]:
    needed = set(outputs)
    for one in reversed(stages):
        if one.node in needed:
            needed |= {read.field for read in one.reads()}
    return [one for one in stages if one.node in needed]


def _stage(finder: Finder, node: Node) -> Stage:
    value = node.meta["val"]
    if value.dtype not in FLOATS:
        raise UnfitError("a field of no floats")
    if node.target is aten.slice_scatter.default:
        base, by_dim, what = _scattered(node, finder.inside)
        sizes = finder.sizes(node)
        box = [(0, size) for size in sizes]
        for dim, edges in by_dim.items():
            if value.shape[dim] > 1:
                box[finder.dim(node, dim)] = edges
        if what.meta["val"].shape != torch.Size(
            [by_dim.get(n, (0, size))[1] - by_dim.get(n, (0, size))[0] for n, size in enumerate(value.shape)]
        ):
            raise UnfitError("a write that broadcasts")
        below = finder.view(base)
        if below.outside is not None:
            below = finder.needs(base)
        body, value_id = _body(finder, what, finder.sizes(what), tuple(-low for low, _ in box))
        return Stage(
            node=node, sizes=sizes, dtype=value.dtype, body=body, value=value_id, box=tuple(box), base=below
        )  # fmt: skip
    body, value_id = _body(finder, node, finder.sizes(node), (0,) * len(finder.sizes(node)), own=True)
    return Stage(node=node, sizes=finder.sizes(node), dtype=value.dtype, body=body, value=value_id)


def _body(finder: Finder, node: Node, sizes: tuple[int, ...], moved: Shift, own: bool = False) -> tuple[Body, int]:
    """The body of a node's value over those sizes. moved: what is added to all shifts. own: the node is the stage."""
    body = Body(axes=[size for size in sizes if size > 1])
    numbers = iter(range(len(sizes)))
    # Axes exist only for dims larger than 1.
    dims = tuple((next(numbers),) if size > 1 else () for size in sizes)
    full = tuple(int(size) for size in node.meta["val"].shape)

    def read(arg: Node) -> Read:
        seen = finder.views.get(arg) if own and arg is node else finder.view(arg)
        if seen is None:
            raise UnfitError("a field that is nothing but padding of what is computed")
        return replace(seen, shift=tuple(a + b for a, b in zip(seen.shift, moved, strict=True)))

    def memory(arg: Node) -> External:
        # A single number is a factor; everything else must have the stage's own sizes.
        shape = tuple(int(size) for size in arg.meta["val"].shape)
        if torch.Size(shape).numel() == 1 and finder.sizes(arg) != sizes:
            source: Any = Factor(arg, 0)
            if arg in finder.inside:
                raise UnfitError("a number that is computed")
        elif tuple(s for s in shape if s > 1) != tuple(s for s in sizes if s > 1):
            raise UnfitError("a field that is broadcast")
        else:
            source = read(arg)
        return External(node=source, sizes=shape, strides=_dense(shape), offset=0, dtype=arg.meta["val"].dtype)

    def inline(one: Node) -> bool:
        return finder.has_instructions(one) and (one not in finder.stages or (own and one is node))

    if not inline(node):
        tensor = body.load(memory(node), _dims_of(full, dims, sizes))
        return body, tensor.value
    order, waiting, seen = [], [node], set()
    while waiting:
        one = waiting.pop()
        if one in seen or not inline(one):
            continue
        seen.add(one)
        # Everything pointwise that is not a stage is computed where it is used.
        order.append(one)
        waiting += [arg for arg in one.all_input_nodes if inline(arg)] if one.target in POINTWISE else []
    for one in sorted(order, key=lambda n: n._sort_key):
        lowering = Lowering(body=body, node=one, sources=memory)
        if few_channels(one):
            body.tensors[one] = _convolution(finder, lowering, one, dims, moved)
        else:
            body.tensors[one] = pointwise.RULES[one.target](lowering, *one.args, **one.kwargs)
    tensor = body.tensors[node]
    if tuple(axis for dim in tensor.dims for axis in dim) != tuple(axis for dim in dims for axis in dim):
        raise UnfitError("other axes")
    if any(ins.op in ("check", "take", "index", "is_at", "extent") for ins in body.code):
        raise UnfitError("a value that is checked")
    return body, tensor.value


def _dims_of(
    shape: tuple[int, ...], dims: tuple[tuple[int, ...], ...], sizes: tuple[int, ...]
) -> tuple[tuple[int, ...], ...]:
    axes = iter([dim for dim, size in zip(dims, sizes, strict=True) if size > 1])
    return tuple(next(axes) if size > 1 else () for size in shape)


def _dense(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _convolution(
    finder: Finder, lowering: Lowering, node: Node, dims: tuple[tuple[int, ...], ...], moved: Shift
) -> Any:
    """Adds products of shifted reads with numbers of the weight, in order of channels and of taps: where they are more
    than registers hold, those of a column after each other (`cpp_rows.Vector`)."""
    x, weight, bias, _, padding, dilation = node.args[:6]
    body, shape = lowering.body, weight.meta["val"].shape
    _, of, *taps = (int(size) for size in shape)
    read = finder.needs(x) if any(padding) else finder.view(x)
    if any(padding) and read.outside is None:
        read = replace(read, outside=0.0)
    mixes = finder.whole
    spatial = [finder.dim(x, n - len(taps)) for n in range(len(taps))]
    # Elements of the weight (outputs, inputs of a group, *taps) from one output channel to the next; 0: all points read
    # the same numbers.
    by_channel = int(torch.Size(shape[1:]).numel()) if int(shape[0]) > 1 else 0
    channel_dim = finder.dim(node, 1) if by_channel else 0
    channel_axis = dims[channel_dim][0] if by_channel else None
    if weight in finder.inside or (bias is not None and bias in finder.inside):
        raise UnfitError("a weight that is computed")

    def factor(of_weight: Node, element: int, step: int) -> Value:
        value = of_weight.meta["val"]
        strides = {} if channel_axis is None or not step else {channel_axis: step}
        if not value.is_contiguous():
            raise UnfitError("a weight that is not contiguous")
        external = External(
            node=Factor(of_weight, element, step, channel_dim),
            sizes=(1,),
            strides=(1,),
            offset=element,
            dtype=value.dtype,
        )
        tensor = body.load(external, ((),))
        value_here = Value(body, tensor.value)
        if strides:  # varies along channels
            slot = body.slot(replace(body.inputs[body.code[tensor.value].attr], strides=strides))
            value_here = Value(body, body.emit("load", kind=value_here.kind, axes=strides, attr=slot))
        return value_here

    full = tuple(int(size) for size in node.meta["val"].shape)
    total = None if bias is None else factor(bias, 0, 1 if by_channel else 0)
    places = list(product(*map(range, taps)))
    if of * len(places) >= MANY:
        places.sort(key=lambda place: place[-1])
    for channel, place in product(range(of), places):
        shift = list(read.shift)
        for dim, at, pad, apart in zip(spatial, place, padding, dilation, strict=True):
            shift[dim] += at * apart - pad
        source = replace(read, shift=tuple(a + b for a, b in zip(shift, moved, strict=True)))
        if mixes:
            source = replace(source, channel=channel)
        external = External(node=source, sizes=full, strides=_dense(full), offset=0, dtype=x.meta["val"].dtype)
        point = Value(body, body.load(external, _dims_of(full, dims, finder.sizes(node))).value)
        element = channel * torch.Size(taps).numel() + sum(a * b for a, b in zip(place, _dense(taps), strict=True))
        by = factor(weight, element, by_channel)
        if total is None:
            total = point * by
        # Fused multiply-add in float32, as ATen's convolution does on a CPU.
        elif point.kind == "F":
            total = Value(body, body.emit("fused", point.id, by.id, total.id, kind="F"))
        else:
            total = total + point * by
    assert total is not None
    return lowering.result(total, _dims_of(full, dims, finder.sizes(node)))


def _whole(stages: tuple[Stage, ...], finder: Finder, outputs: Sequence[Node]) -> Stencil:
    inputs: dict[Node, None] = {}
    inner_fields = {one.node for one in stages}
    for one in stages:
        for read in one.reads():
            if read.field not in inner_fields:
                inputs[read.field] = None
        for _, source in one.slots():
            if isinstance(source, Factor):
                inputs[source.weight] = None
    channel = 1 if finder.whole else None
    rank = len(stages[0].sizes)
    moved = [dim for dim in range(rank) for one in stages for read in one.reads() if read.shift[dim]]
    if not moved:
        raise UnfitError("nothing is shifted")
    # Dims before the first shifted one are a batch (less the channel, where channels are mixed).
    first = min(moved)
    if channel is not None and first < 2:
        raise UnfitError("channels that are shifted")
    batch = first - 1 if channel is not None else first
    return Stencil(stages=stages, inputs=tuple(inputs), outputs=tuple(outputs), batch=batch, channel=channel)


def _periodic(found: Stencil) -> Stencil:
    """Stages whose ends are read as neighbours are computed beyond them, and so is whatever they read."""
    wraps = {read.field for one in found.stages for read in one.reads() if read.outside == "wrap"}
    stages: list[Stage] = []
    # Backwards: what a wrapping stage reads must wrap as well.
    for one in reversed(found.stages):
        if one.node in wraps:
            wraps |= {read.field for read in one.reads()}
            body = one.body.copy()
            for slot, source in enumerate(body.inputs):
                if isinstance(source.node, Read):
                    if source.node.outside not in (None, "wrap"):
                        raise UnfitError("an edge that wraps around another")
                    body.inputs[slot] = replace(source, node=replace(source.node, outside="wrap"))
            one = replace(one, body=body)
        stages.append(one)
    return replace(found, stages=tuple(reversed(stages)))


def _check(found: Stencil) -> None:
    """Raises UnfitError for what no printer says."""
    rank = found.rank
    spatial = rank - found.batch - (found.channel is not None)
    if not 1 <= spatial <= 3:
        raise UnfitError("more dims than three")
    if found.channel is not None and found.batch != 1:
        raise UnfitError("channels elsewhere")
    batch = {one.sizes[: found.batch] for one in found.stages}
    if len(batch) != 1 or any(len(one.sizes) != rank for one in found.stages):
        raise UnfitError("stages of unequal dims")
    far = [abs(n) for one in found.stages for read in one.reads() for n in read.shift]
    if max(far) > FURTHEST:
        raise UnfitError("a neighbour too far away")
    wraps = {read.field for one in found.stages for read in one.reads() if read.outside == "wrap"}
    for one in found.stages:
        fills = {read.outside for s in found.stages for read in s.reads() if read.field is one.node}
        if len(fills - {None}) > 1:
            raise UnfitError("two kinds of edges of one field")
        if one.node in wraps and one.box is not None:
            raise UnfitError("an edge that wraps around a part")
        for ins in one.body.code:
            if ins.op == "load" and isinstance(one.body.inputs[ins.attr].node, Factor):
                if any(axis >= found.batch for axis in ins.axes) and found.channel is None:
                    raise UnfitError("a weight by place")
    wrapped = {_sizes(found, node) for node in wraps} | {one.sizes for one in found.stages if one.node in wraps}
    if len(wrapped) > 1 or (found.channel is not None and wraps):
        raise UnfitError("fields that wrap at unequal places")


def _sizes(found: Stencil, node: Any) -> tuple[int, ...]:
    stage = found.stage(node)
    if stage is not None:
        return stage.sizes
    shape = tuple(int(size) for size in node.meta["val"].shape)
    return shape if found.channel is not None else tuple(size for size in shape if size > 1)
