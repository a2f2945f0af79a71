"""Steps that a kind of the graph says, written as ops of that kind.

`KindWriter.write` adds a step to a block; False where its operands' dims do not fit the kind. Attention's heads are
turned by views. Leaves out which step has which kind (`kinds`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gnomon import ops
from gnomon.frontend.call_rules import CallKind
from gnomon.frontend.draft import Draft
from gnomon.frontend.kinds import named_axes
from gnomon.frontend.records import Ref, Step
from gnomon.frontend.write_captured import short
from gnomon.graph import Captured, Dim, Node, Op, Tensor, Torch, Use, attrs
from gnomon.ops.op import AttrValue


class _Named:
    """Tensors by name, as rules of dims ask for them."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def tensor(self, name: str) -> Tensor:
        """The tensor of that name."""
        return self.tensors[name]


class KindWriter:
    """Writes the ops of one block from their recognised kinds."""

    def __init__(self, draft: Draft) -> None:
        self.draft, self.owner = draft, draft.owner
        self.turned: dict[int, str] = {}

    def write(self, step: Step, kind: CallKind) -> bool:
        """Writes the step as its kind; False where operands' dims do not fit together."""
        does = ops.find(kind.kind).does
        if does == "attends":
            return self._attention(step, kind)
        dims = [self.owner.dims(i) for i in kind.operands]
        out = self.owner.dims(kind.out)
        contracts: tuple[str, ...] = ()
        values = self._attrs(kind)
        renamed = None
        multiplies = does == "multiplies"
        match does:
            case "multiplies":
                rest, (out_dim, inner) = dims[0][:-1], kind.weight_of(dims[1])
                if dims[0][-1] != inner or out != (*rest, out_dim):
                    if out[:-1] != rest or out_dim.factors:
                        return False
                    out_dim, inner = _other(out_dim, dims[0]), dims[0][-1]
                    renamed = (*rest, out_dim)
                if {a.name for a in out_dim.atoms} & {a.name for d in dims[0] for a in d.atoms}:
                    return False
                contracts = tuple(a.name for a in dims[0][-1].atoms)
                dims = [dims[0], kind.weight_of((out_dim, inner)), *([(out_dim,)] if len(dims) > 2 else [])]
            case "looks up":
                if out != (*dims[0], *dims[1][1:]):
                    return False
            case "compares labels":
                if dims[0][:-1] != dims[1]:
                    return False
            case "normalises":
                if out != dims[0] or any(d != (dims[0][-1],) for d in dims[1:]):
                    return False
                values["over"] = dims[0][-1].name
            case _ if named_axes(kind.kind):
                pass  # its own rule looks at them, below
            case _:
                if any(d != out for d in dims):
                    return False
        names = list[str]()
        for index, expected in zip(kind.operands, dims, strict=True):
            name = self.draft.read(index)
            if self.draft.tensors[name].dims != expected:
                if self.draft.tensors[name].is_activation or self._read_before(name):
                    return False
                self.draft.tensors[name] = _with_dims(self.draft.tensors[name], expected)
            names.append(name)
        if multiplies and _copies(step, kind.operands[0]):
            names[0] = self._copied(step, names[0])
        path = self.draft.path(step, kind.kind)
        if named_axes(kind.kind):
            tried = Tensor(name="tried", dims=out, dtype=self.owner.dtype(kind.out))
            op = Op(kind=kind.kind, path=path, inputs=tuple(names), outputs=("tried",), attrs=attrs(**values))
            if op.rules.problem(op, _Named({**self.draft.tensors, "tried": tried})):
                return False
        out_dim = self.draft.make(kind.out, path) if renamed is None else self.draft.add(
            Tensor(name=f"{path}.y", dims=renamed, dtype=self.owner.dtype(kind.out))
        )  # fmt: skip
        self.draft.ops.append(
            Op(
                kind=kind.kind,
                path=path,
                inputs=tuple(names),
                outputs=(out_dim,),
                contracts=contracts,
                attrs=attrs(**values),
            )  # fmt: skip
        )
        if renamed is not None:
            again = self.draft.make(kind.out, f"{path}.renamed")
            self.draft.ops.append(Op(kind="rename", path=again, inputs=(out_dim,), outputs=(again,)))
            self.draft.paths.add(again)
        return True

    def _copied(self, step: Step, name: str) -> str:
        """A copy of rows that do not lie one after the other, which torch makes for a product, and keeps."""
        path, rows = self.draft.path(step, "rows"), self.draft.tensors[name]
        copied = self.draft.add(Tensor(name=path, dims=rows.dims, dtype=rows.dtype))
        layout = (("memory_format", Torch("contiguous_format")),)
        node = Node(target="aten.clone.default", args=(Use(name),), kwargs=layout, outputs=(copied,))
        captured = Captured(nodes=(node,), where=short(step.where))
        self.draft.ops.append(Op(kind="opaque", path=path, inputs=(name,), outputs=(copied,), captured=captured))
        self.draft.opaque.append((path, node.target))
        return copied

    def _attrs(self, kind: CallKind) -> dict[str, AttrValue]:
        """The attributes of the op; `no_grad` where its result gets no gradient and an operand would."""
        values = self.draft.trace.values
        stops = not values[kind.out].grad and any(values[index].grad for index in kind.operands)
        return dict(kind.attrs) | ({"no_grad": True} if stops else {})

    def _read_before(self, name: str) -> bool:
        return any(name in op.inputs for op in self.draft.ops)

    def _attention(self, step: Step, kind: CallKind) -> bool:
        """(batch, heads, positions, dim) become the graph's (batch, positions, heads, dim) by views."""
        order = [self.owner.dims(i) for i in kind.operands[:3]]
        q, k, v = ([d[0], d[2], d[1], d[3]] for d in order)
        out = self.owner.dims(kind.out)
        if q[0] != k[0] or k[:-1] != v[:-1] or q[-1] != k[-1] or tuple(out) != (q[0], q[2], q[1], v[3]):
            return False
        if len({d.name for d in q}) < 4:
            return False
        names = [self._turned(step, i) for i in kind.operands[:3]]
        values = self._attrs(kind)
        if values.get("masked", False):
            names.append(self.draft.read(kind.operands[3]))
        path = self.draft.path(step, "core")
        output = self.draft.add(Tensor(name=path, dims=(q[0], q[1], q[2], v[3]), dtype=self.owner.dtype(kind.out)))
        self.draft.ops.append(
            Op(kind=kind.kind, path=path, inputs=tuple(names), outputs=(output,), attrs=attrs(**values))
        )
        back = self.draft.make(kind.out, f"{path}.turned")
        self.draft.paths.add(back)
        self._view(back, output, back)
        return True

    def _turned(self, step: Step, index: int) -> str:
        if index not in self.turned:
            source = self.draft.read(index)
            d = self.draft.tensors[source].dims
            path = self.draft.path(step, "turned")
            tensor = Tensor(name=path, dims=(d[0], d[2], d[1], d[3]), dtype=self.draft.tensors[source].dtype)
            self._view(path, source, self.draft.add(tensor))
            self.turned[index] = path
        return self.turned[index]

    def _view(self, path: str, source: str, output: str) -> None:
        node = Node(target="aten.transpose.int", args=(Use(source), 1, 2), outputs=(output,), view=True)
        captured = Captured(nodes=(node,))
        self.draft.ops.append(Op(kind="reshape", path=path, inputs=(source,), outputs=(output,), captured=captured))


def _copies(step: Step, rows: int) -> bool:
    """Whether the first thing that a product does with its rows is to copy them."""
    reads = [node for node in step.nodes if any(isinstance(x, Ref) and x.index == rows for x in node.args)]
    return bool(reads) and reads[0].target == "aten.clone.default"


def _other(dim: Dim, other_dims: Sequence[Dim]) -> Dim:
    """The same extent under another name."""
    names_used = {a.name for d in other_dims for a in d.atoms}
    name = f"{dim.name}.out"
    while name in names_used:
        name += "_"
    return Dim(name=name, size=dim.size, same_as=dim.same_as or ("" if dim.size is not None else dim.name))


def _with_dims(tensor: Tensor, dims: tuple[Dim, ...]) -> Tensor:
    return Tensor(name=tensor.name, dims=dims, dtype=tensor.dtype, kind=tensor.kind, lifetime=tensor.lifetime)
