"""Steps of a trace as ops of a Block.

`Converter` knows the axes of every value; `block(steps, prefix, name)` writes the steps that lie under one module as a
Block with relative names, so that equal layers give equal blocks. A call that a kind of the graph says becomes that
kind, a view a `reshape`, the rest `opaque` with its ATen ops. Leaves out which steps make a block (`blocks`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gnomon.errors import CaptureError
from gnomon.frontend.axes import Axes
from gnomon.frontend.kinds import Kind, kind_of, link_kind
from gnomon.frontend.rules import ALONG, MOVES, POINTWISE, base_name, link, products
from gnomon.frontend.sizes import Extent, Sizes
from gnomon.frontend.trace import LITERAL_ELEMENTS, Ref, Step, Trace
from gnomon.frontend.trace import Node as Traced
from gnomon.graph import Block, Captured, Dim, Literal, Node, Op, Size, Tensor, Torch, Use, attrs
from gnomon.graph.captured import mutates
from gnomon.graph.types import AttrValue
from gnomon.sharding.homes import TENSOR_DIMS, base

DTYPES = {
    torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
    torch.int64: "int64", torch.int32: "int32", torch.int16: "int32", torch.int8: "int8", torch.uint8: "uint8",
    torch.bool: "bool", torch.complex64: "fp64", torch.complex128: "fp64",
    torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2",
}  # fmt: skip
"""Of complex numbers only the bytes are right (of complex128 half)."""

_SIZED = ("view", "_unsafe_view", "reshape", "expand")


@dataclass(frozen=True, slots=True)
class Part:
    """A block, and what it is called with."""

    block: Block
    inputs: tuple[tuple[str, int], ...]
    """(its name in the block, value)."""
    outputs: tuple[tuple[str, int], ...]
    params: tuple[tuple[str, str], ...]
    """(name in the block, full name) of parameters and states whose names do not follow from the prefix."""
    opaque: tuple[tuple[str, str], ...]
    """(path, target) of ops that no kind says."""
    values: Mapping[str, int]
    """Activation -> the value of the trace that it is."""
    lines: Mapping[str, str]
    """Path of an op -> file and line."""


class Converter:
    """A trace with classes of axes, ready to be written as blocks."""

    def __init__(self, trace: Trace, sizes: Sizes, live: Sequence[Step], names: Mapping[int, Sequence[str]]) -> None:
        """live: the steps that matter. names: declared dims of an input value."""
        self.trace, self.sizes, self.axes = trace, sizes, Axes()
        self.readers: dict[int, set[int]] = {}
        for step in live:
            for node in step.nodes:
                for ref in refs(node):
                    self.readers.setdefault(ref, set()).add(id(step))
        other = sizes.other.values if sizes.other is not None else trace.values
        self.rows = [
            [self.axes.new(sizes.extent(x, y, v.name or "")) for x, y in zip(v.shape, w.shape, strict=False)]
            for v, w in zip(trace.values, other, strict=False)
        ]
        for index, declared in names.items():
            for axis, name in zip(self.rows[index], declared, strict=False):
                if name and not name.isdigit():
                    self.axes.role(axis, name)
        self.main = _main_dtype(trace)
        self.kinds: dict[int, Kind] = {}
        for step in live:
            found = kind_of(step, trace)
            inner = {out for node in step.nodes for out in node.outs if out is not None}
            if found is not None and all(
                out == found.out or self.readers.get(out, set()) <= {id(step)} for out in inner
            ):
                self.kinds[id(step)] = found
                link_kind(found, self.rows, self.axes)
                continue
            for node in step.nodes:
                link(node, trace, self.rows, self.axes)
        self._roles(live)
        self.others = self._second(trace, sizes)

    def _second(self, trace: Trace, sizes: Sizes) -> dict[int, Traced]:
        """Each node's twin in the other trace."""
        if sizes.other is None:
            return {}
        return {
            id(a): b
            for s, t in zip(trace.steps, sizes.other.steps, strict=True)
            for a, b in zip(s.nodes, t.nodes, strict=True)
        }

    def _roles(self, live: Sequence[Step]) -> None:
        """Words for classes: tables and widths of embeddings, what a feed-forward widens to."""
        embeddings = [k for k in self.kinds.values() if k.kind == "embedding"]
        embeddings.sort(key=lambda k: -self.trace.values[k.operands[1]].shape[0])
        for place, found in enumerate(embeddings):
            rows = self.rows[found.operands[1]]
            self.axes.role(rows[0], "vocab" if place == 0 else "rows")
            self.axes.role(rows[1], "hidden")
        linears = [k for k in self.kinds.values() if k.kind == "linear"]
        vocab = self.trace.values[embeddings[0].operands[1]].shape[0] if embeddings else 0
        for found in linears:
            weight = self.trace.values[found.operands[1]]
            if weight.shape[0] == vocab and vocab:
                self.axes.role(self.rows[found.operands[1]][0], "vocab")
        read = {self.axes.find(self.rows[k.operands[0]][-1]) for k in linears}
        for found in linears:
            out, inner = self.rows[found.operands[1]]
            root = self.axes.find(out)
            wide = self.trace.values[found.operands[1]].shape[0]
            if root in read and root not in self.axes.factors and root != self.axes.find(inner):
                if self.axes.roles.get(root) is None and wide != self._width(embeddings):
                    self.axes.role(out, "ffn")
        for index, value in enumerate(self.trace.values):
            if value.origin == "parameter" and len(value.shape) == 3 and "expert" in value.name:
                self.axes.role(self.rows[index][0], "experts")

    def _width(self, embeddings: Sequence[Kind]) -> int:
        return self.trace.values[embeddings[0].operands[1]].shape[1] if embeddings else 0

    # --- tensors

    def dims(self, index: int) -> tuple[Dim, ...]:
        """Dims of a value."""
        return self.axes.dims(self.rows[index])

    def dtype(self, index: int) -> str:
        """Of an activation."""
        dtype = self.trace.values[index].dtype
        if dtype == self.main:
            return "compute"
        if dtype not in DTYPES:
            raise CaptureError(f"a tensor of {dtype} has no place in a graph; use an ordinary dtype")
        return DTYPES[dtype]

    def extents(self, index: int) -> Sequence[Extent]:
        """Sizes of a value, dim by dim."""
        return [self.axes.extents[axis] for axis in self.rows[index]]

    def block(self, steps: Sequence[Step], prefix: str, name: str, wanted: set[int]) -> Part:
        """The steps as one block. prefix: of the module that they lie under. wanted: values that others read."""
        return _Writer(self, prefix, name, wanted).write(steps)


def refs(node: Traced) -> list[int]:
    """Values that a node reads."""
    found: list[int] = []

    def walk(x: Any) -> None:
        if isinstance(x, Ref):
            found.append(x.index)
        elif isinstance(x, (list, tuple)):
            for inner in x:
                walk(inner)
        elif isinstance(x, dict):
            for inner in x.values():
                walk(inner)

    walk(node.args)
    walk(node.kwargs)
    return found


def _main_dtype(trace: Trace) -> torch.dtype:
    """That of most parameters, in bytes."""
    found: dict[torch.dtype, int] = {}
    for value in trace.values:
        if value.origin in ("parameter", "input") and value.dtype.is_floating_point:
            weight = torch.Size(value.shape).numel() if value.origin == "parameter" else 0
            found[value.dtype] = found.get(value.dtype, 0) + weight
    return max(found, key=lambda d: found[d]) if found else torch.float32


class _Writer:
    """The growing block."""

    def __init__(self, owner: Converter, prefix: str, name: str, wanted: set[int]) -> None:
        self.owner, self.trace, self.prefix, self.name, self.wanted = owner, owner.trace, prefix, name, wanted
        self.tensors: dict[str, Tensor] = {}
        self.ops: list[Op] = []
        self.own: dict[int, str] = {}
        self.inputs: dict[str, int] = {}
        self.params: dict[str, str] = {}
        self.paths: set[str] = set()
        self.opaque: list[tuple[str, str]] = []
        self.turned: dict[int, str] = {}
        self.lines: dict[str, str] = {}

    def write(self, steps: Sequence[Step]) -> Part:
        for step in steps:
            found = self.owner.kinds.get(id(step))
            if found is None or not self._kind(step, found):
                self._captured(step)
        outputs = [(self.own[v], v) for v in sorted(self.wanted) if v in self.own and self._made(v)]
        used = set(self.inputs) | {n for op in self.ops for n in (*op.inputs, *op.outputs)}
        block = Block(
            name=self.name,
            inputs=tuple(self.inputs),
            outputs=tuple(own for own, _ in outputs),
            tensors=tuple(t for t in self.tensors.values() if t.name in used),
            ops=tuple(self.ops),
        )
        return Part(
            block,
            tuple(self.inputs.items()),
            tuple(outputs),
            tuple(self.params.items()),
            tuple(self.opaque),
            {own: value for value, own in self.own.items()},
            self.lines,
        )

    def _made(self, index: int) -> bool:
        return self.own[index] not in self.inputs and self.tensors[self.own[index]].kind == "activation"

    # --- names

    def path(self, step: Step, what: str) -> str:
        """A path of its own for an op: the module's for what a module is, with the call's name behind it otherwise."""
        inside = step.module.removeprefix(self.prefix).lstrip(".") if self.prefix else step.module
        plain = what in ("linear", "norm", "embedding", "dropout", "activation") and inside
        stem = inside if plain else ".".join(filter(None, (inside, what.strip("_"))))
        stem = _legal(stem or what)
        found, count = stem, 1
        while found in self.paths:
            count += 1
            found = f"{stem}.n{count}"
        self.paths.add(found)
        self.lines[found] = step.where
        return found

    def read(self, index: int) -> str:
        """The block's name of a value that it reads."""
        if index in self.own:
            return self.own[index]
        value = self.trace.values[index]
        if value.origin in ("parameter", "buffer", "constant"):
            inner = value.name.removeprefix(f"{self.prefix}.") if self.prefix else value.name
            name = _legal(inner)
            while name in self.tensors:
                name += "_"
            if name != value.name.removeprefix(f"{self.prefix}.") or (self.prefix and inner == value.name):
                self.params[name] = value.name
            trained = value.origin == "parameter" and value.grad
            self._add(
                Tensor(
                    name=name,
                    dims=self.owner.dims(index),
                    dtype="param" if value.dtype == self.owner.main else self.owner.dtype(index),
                    kind="parameter" if trained else "state",
                    lifetime="step" if trained else "job",
                )
            )
        else:
            name = value.name if value.origin == "input" else "x"
            stem, count = _legal(name), 1
            name = stem
            while name in self.tensors:
                count += 1
                name = f"{stem}{count}"
            self._add(Tensor(name=name, dims=self.owner.dims(index), dtype=self.owner.dtype(index)))
            self.inputs[name] = index
        self.own[index] = name
        return name

    def _add(self, tensor: Tensor) -> str:
        self.tensors[tensor.name] = tensor
        return tensor.name

    def make(self, index: int, name: str, dims: tuple[Dim, ...] | None = None) -> str:
        """Declares a value that an op of the block writes."""
        self.own[index] = name
        return self._add(
            Tensor(name=name, dims=self.owner.dims(index) if dims is None else dims, dtype=self.owner.dtype(index))
        )

    # --- kinds

    def _kind(self, step: Step, found: Kind) -> bool:
        """Writes the step as its kind; False where operands' dims do not fit together."""
        if found.kind == "attention":
            return self._attention(step, found)
        dims = [self.owner.dims(i) for i in found.operands]
        out = self.owner.dims(found.out)
        contracts: tuple[str, ...] = ()
        values: dict[str, AttrValue] = dict(found.attrs)
        renamed = None
        match found.kind:
            case "linear":
                rest, weight = dims[0][:-1], dims[1]
                if dims[0][-1] != weight[1] or out != (*rest, weight[0]):
                    fresh = _other(weight[0], dims[0])
                    if out[:-1] != rest or weight[0].factors:
                        return False
                    renamed, weight = (*rest, fresh), (fresh, dims[0][-1])
                if {a.name for a in weight[0].atoms} & {a.name for d in dims[0] for a in d.atoms}:
                    return False
                contracts = tuple(a.name for a in dims[0][-1].atoms)
                dims = [dims[0], weight, *([(weight[0],)] if len(dims) > 2 else [])]
            case "embedding":
                if out != (*dims[0], *dims[1][1:]):
                    return False
            case "cross_entropy":
                if dims[0][:-1] != dims[1]:
                    return False
            case "norm":
                if out != dims[0] or any(d != (dims[0][-1],) for d in dims[1:]):
                    return False
                values["over"] = dims[0][-1].name
            case _:
                if any(d != out for d in dims):
                    return False
        names = []
        for index, wanted in zip(found.operands, dims, strict=True):
            name = self.read(index)
            if self.tensors[name].dims != wanted:
                if self.tensors[name].kind == "activation" or self._read_before(name):
                    return False
                self.tensors[name] = _with_dims(self.tensors[name], wanted)
            names.append(name)
        path = self.path(step, found.kind)
        made = self.make(found.out, path) if renamed is None else self._add(
            Tensor(name=f"{path}.y", dims=renamed, dtype=self.owner.dtype(found.out))
        )  # fmt: skip
        self.ops.append(
            Op(
                kind=found.kind,
                path=path,
                inputs=tuple(names),
                outputs=(made,),
                contracts=contracts,
                attrs=attrs(**values),
            )  # fmt: skip
        )
        if renamed is not None:
            again = self.make(found.out, f"{path}.renamed")
            self.ops.append(Op(kind="rename", path=again, inputs=(made,), outputs=(again,)))
            self.paths.add(again)
        return True

    def _read_before(self, name: str) -> bool:
        return any(name in op.inputs for op in self.ops)

    def _attention(self, step: Step, found: Kind) -> bool:
        """(batch, heads, positions, dim) become the graph's (batch, positions, heads, dim) by views."""
        order = [self.owner.dims(i) for i in found.operands[:3]]
        q, k, v = ([d[0], d[2], d[1], d[3]] for d in order)
        out = self.owner.dims(found.out)
        if q[0] != k[0] or k[:-1] != v[:-1] or q[-1] != k[-1] or tuple(out) != (q[0], q[2], q[1], v[3]):
            return False
        if len({d.name for d in q}) < 4:
            return False
        names = [self._turned(step, i) for i in found.operands[:3]]
        values: dict[str, AttrValue] = dict(found.attrs)
        if values.get("masked", False):
            names.append(self.read(found.operands[3]))
        path = self.path(step, "core")
        made = self._add(Tensor(name=path, dims=(q[0], q[1], q[2], v[3]), dtype=self.owner.dtype(found.out)))
        self.ops.append(Op(kind="attention", path=path, inputs=tuple(names), outputs=(made,), attrs=attrs(**values)))
        back = self.make(found.out, f"{path}.turned")
        self.paths.add(back)
        self._view(back, made, back)
        return True

    def _turned(self, step: Step, index: int) -> str:
        if index not in self.turned:
            source = self.read(index)
            d = self.tensors[source].dims
            path = self.path(step, "turned")
            tensor = Tensor(name=path, dims=(d[0], d[2], d[1], d[3]), dtype=self.tensors[source].dtype)
            self._view(path, source, self._add(tensor))
            self.turned[index] = path
        return self.turned[index]

    def _view(self, path: str, source: str, made: str) -> None:
        node = Node(target="aten.transpose.int", args=(Use(source), 1, 2), outputs=(made,), view=True)
        captured = Captured(nodes=(node,))
        self.ops.append(Op(kind="reshape", path=path, inputs=(source,), outputs=(made,), captured=captured))

    # --- everything else

    def _captured(self, step: Step) -> None:
        """The step's ATen ops as they are."""
        path = self.path(step, step.func)
        inner = {out for node in step.nodes for out in node.outs if out is not None}
        inputs: dict[str, None] = {}
        outputs: list[str] = []
        sides: list[Tensor] = []
        for node in step.nodes:
            for index in refs(node):
                if index not in inner and not self._literal(index):
                    inputs[self.read(index)] = None
        outer = [out for out in sorted(inner) if self._used_outside(step, out)] or [max(inner)]
        for count, out in enumerate(outer):
            outputs.append(self.make(out, path if count == 0 else f"{path}.o{count + 1}"))
        for count, out in enumerate(sorted(inner - set(outer))):
            name = f"{path}:{count}"
            sides.append(Tensor(name=name, dims=self.owner.dims(out), dtype=self.owner.dtype(out)))
            self.own[out] = name
        nodes = tuple(self._node(node) for node in step.nodes)
        views = all(node.view for node in nodes) and len(inputs) == 1
        keeps = self._keeps(step, inputs, outputs, sides)
        values = self.trace.values
        flows = any(values[out].grad for out in outer)
        came = any(values[index].grad for node in step.nodes for index in refs(node) if index not in inner)
        captured = Captured(
            nodes=nodes, tensors=tuple(sides), keeps=keeps, whole=self._whole(step), where=_short(step.where)
        )
        self.ops.append(
            Op(
                kind="reshape" if views else "opaque",
                path=path,
                inputs=tuple(inputs),
                outputs=tuple(outputs),
                attrs=attrs(no_grad=True) if came and not flows else (),
                captured=captured,
            )
        )
        if not views:
            self.opaque.append((path, step.nodes[-1].target))

    def _used_outside(self, step: Step, out: int) -> bool:
        return out in self.wanted or bool(self.owner.readers.get(out, set()) - {id(step)})

    def _literal(self, index: int) -> bool:
        value = self.trace.values[index]
        return value.origin == "constant" and torch.Size(value.shape).numel() <= LITERAL_ELEMENTS

    def _keeps(
        self, step: Step, inputs: Mapping[str, None], outputs: Sequence[str], sides: Sequence[Tensor]
    ) -> tuple[str, ...]:
        """What autograd keeps, by name: an operand or result that looks into the same memory."""
        found: dict[str, None] = {}
        near = [index for node in step.nodes for index in (*refs(node), *(o for o in node.outs if o is not None))]
        for storage, shape, _ in step.kept:
            same = [i for i in near if self.trace.values[i].storage == storage and i in self.own]
            exact = [i for i in same if self.trace.values[i].shape == shape]
            named = [self.own[i] for i in (*exact, *same)]
            known = [n for n in named if n in inputs or n in outputs] or named
            if known:
                found[known[0]] = None
        return tuple(found)

    def _whole(self, step: Step) -> tuple[str, ...]:
        """Dims along which the ops look."""
        found: set[str] = set()
        for node in step.nodes:
            name = base_name(node.target)
            if name in ALONG and node.args and isinstance(node.args[0], (Ref, list, tuple)):
                first = node.args[0] if isinstance(node.args[0], Ref) else next(iter(node.args[0]), None)
                if not isinstance(first, Ref):
                    return ("*",)
                row = self.owner.rows[first.index]
                place = node.args[ALONG[name]] if len(node.args) > ALONG[name] else node.kwargs.get("dim", 0)
                if not isinstance(place, int) or not row:
                    return ("*",)
                found |= {a.name for a in self.owner.axes.dim(row[place % len(row)]).atoms}
            elif name not in POINTWISE and name not in MOVES:
                return ("*",)
        return tuple(sorted(found))

    def _node(self, node: Traced) -> Node:
        twin = self.owner.others.get(id(node))
        args = self._args(node.args, twin.args if twin else node.args)
        kwargs = tuple(
            (key, self._args(value, (twin.kwargs if twin else node.kwargs).get(key, value)))
            for key, value in sorted(node.kwargs.items())
            if key != "generator"
        )
        name = base_name(node.target)
        if name in _SIZED and node.outs[0] is not None:
            args = (args[0], self._target(node, args[1]), *args[2:])
        shapes, pair = products(node, self.owner.extents)
        values = self.trace.values
        wanted = sum(1 for i in pair if values[i].grad) if pair and any(values[o].grad for o in node.outs if o) else 0
        reads = [values[i] for i in refs(node)]
        outs = [values[o] for o in node.outs if o is not None]
        view = bool(outs) and not mutates(_named(node)) and all(
            any(o.storage == r.storage for r in reads) for o in outs
        )  # fmt: skip
        return Node(
            target=node.target,
            args=args,
            kwargs=kwargs,
            outputs=tuple("" if o is None or o not in self.own else self.own[o] for o in node.outs),
            many=node.many,
            view=view,
            products=shapes,
            grads=wanted,
        )

    def _target(self, node: Traced, given: Any) -> Any:
        """Sizes that a view asks for, by the dims of what it makes, so that they hold for parts too."""
        out = node.outs[0]
        assert out is not None, "asked only where there is one"
        row = self.owner.rows[out]
        found: list[Any] = []
        for axis, old in zip(row, given, strict=False):
            atoms = self.owner.axes.dim(axis).atoms
            extent = self.owner.axes.extents[axis]
            divided = any(base(a.name) in TENSOR_DIMS for a in atoms)
            if old == -1 and base_name(node.target) == "expand":
                found.append(-1)
            elif divided and extent != 1 and not any(a.same_as for a in atoms):
                found.append(Size(1, tuple(a.name for a in atoms)))
            else:
                found.append(extent)
        return tuple(found)

    def _args(self, x: Any, y: Any) -> Any:
        if isinstance(x, Ref):
            return self._operand(x.index)
        if isinstance(x, (list, tuple)):
            twins = y if isinstance(y, (list, tuple)) and len(y) == len(x) else x
            return tuple(self._args(a, b) for a, b in zip(x, twins, strict=True))
        if isinstance(x, bool) or x is None or isinstance(x, (float, str, complex)):
            return x
        if isinstance(x, int):
            if isinstance(y, int) and x != y and not isinstance(y, bool):
                return self.owner.sizes.extent(x, y, "a number")
            return x
        if isinstance(x, torch.device):
            return Torch("device")
        if isinstance(x, torch.dtype):
            return Torch("compute" if x == self.owner.main else str(x).removeprefix("torch."))
        if isinstance(x, (torch.layout, torch.memory_format)):
            return Torch(str(x).removeprefix("torch."))
        if isinstance(x, torch.Generator):
            return None
        raise CaptureError(f"an operand of type {type(x).__name__} has no place in a graph")

    def _operand(self, index: int) -> Any:
        if index not in self.own and self._literal(index):
            value = self.trace.values[index]
            held = self.trace.constants[value.name]
            return Literal(_nested(held.tolist()), str(value.dtype).removeprefix("torch."), value.shape)
        return Use(self.own[index] if index in self.own else self.read(index))


def _named(node: Traced) -> Node:
    return Node(target=node.target, args=())


def _nested(x: Any) -> Any:
    return tuple(_nested(y) for y in x) if isinstance(x, list) else x


def _legal(name: str) -> str:
    name = re.sub(r"[^A-Za-z0-9_.\-]", "_", name)
    return name if re.match(r"[A-Za-z_]", name) else f"m{name}"


def _short(where: str) -> str:
    """`package/file.py:12`: the last two folders are enough to find it."""
    return "/".join(where.split("/")[-3:])


def _other(dim: Dim, beside: Sequence[Dim]) -> Dim:
    """The same extent under another name."""
    taken = {a.name for d in beside for a in d.atoms}
    name = f"{dim.name}.out"
    while name in taken:
        name += "_"
    return Dim(name=name, size=dim.size, same_as=dim.same_as or ("" if dim.size is not None else dim.name))


def _with_dims(tensor: Tensor, dims: tuple[Dim, ...]) -> Tensor:
    return Tensor(name=tensor.name, dims=dims, dtype=tensor.dtype, kind=tensor.kind, lifetime=tensor.lifetime)
