"""Steps that no kind says, written as their ATen ops: `opaque`, or `reshape` where all are views.

`CapturedWriter.write` adds a step to a block, with what autograd keeps of it and the dims along which its ops look.
Leaves out running them (`runtime.ops.captured`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gnomon.errors import CaptureError
from gnomon.frontend.convert import refs
from gnomon.frontend.draft import Draft
from gnomon.frontend.records import AtenNode as Traced
from gnomon.frontend.records import Ref, Step
from gnomon.frontend.rules import ALONG, MOVES, POINTWISE, base_name, matmul_shapes
from gnomon.frontend.sizes import fit
from gnomon.frontend.trace import LITERAL_ELEMENTS
from gnomon.graph import Captured, Literal, Node, Op, Size, Tensor, Torch, Use, attrs
from gnomon.tensors.captured import mutates
from gnomon.tensors.names import TENSOR_DIMS, base

_SIZED = ("view", "_unsafe_view", "reshape", "expand")
DEFAULTED = ("ones", "zeros", "empty", "full", "rand", "randn", "linspace", "logspace", "eye")
"""Ops that make numbers of the default dtype where none is named."""


class CapturedWriter:
    """Writes the captured steps of one block."""

    def __init__(self, draft: Draft) -> None:
        self.draft, self.owner, self.trace = draft, draft.owner, draft.trace

    def write(self, step: Step) -> None:
        """Adds an op to the block that does the step's ATen ops as they are."""
        path = self.draft.path(step, step.func)
        inner = {out for node in step.nodes for out in node.outs if out is not None}
        inputs: dict[str, None] = {}
        outputs: list[str] = []
        sides: list[Tensor] = []
        for node in step.nodes:
            for index in refs(node):
                if index not in inner and not self._literal(index):
                    inputs[self.draft.read(index)] = None
        # A step whose values nobody reads still makes one: its last stands for it.
        outer = [out for out in sorted(inner) if self._used_outside(step, out)] or [max(inner)]
        for count, out in enumerate(outer):
            outputs.append(self.draft.make(out, path if count == 0 else f"{path}.o{count + 1}"))
        for count, out in enumerate(sorted(inner - set(outer))):
            name = f"{path}:{count}"
            sides.append(Tensor(name=name, dims=self.owner.dims(out), dtype=self.owner.dtype(out)))
            self.draft.own[out] = name
        nodes = tuple(self._node(node) for node in step.nodes)
        views = all(node.view for node in nodes) and len(inputs) == 1
        values = self.trace.values
        flows = any(values[out].grad for out in outer)
        keeps = self._keeps(step, inputs, outputs, sides) if flows else ()
        came = any(values[index].grad for node in step.nodes for index in refs(node) if index not in inner)
        captured = Captured(
            nodes=nodes,
            tensors=tuple(sides),
            keeps=keeps,
            whole=self._whole(step),
            summed=self._summed(step),
            where=short(step.where),
        )
        self.draft.ops.append(
            Op(
                kind="reshape" if views else "opaque",
                path=path,
                inputs=tuple(inputs),
                outputs=tuple(outputs),
                attrs=attrs(no_grad=True) if came and not flows else attrs(written=True) if flows and not came else (),
                captured=captured,
            )
        )
        if not views and not captured.is_priced:
            self.draft.opaque.append((path, step.nodes[-1].target))

    def _used_outside(self, step: Step, out: int) -> bool:
        return out in self.draft.read_later or bool(self.owner.readers.get(out, set()) - {id(step)})

    def _literal(self, index: int) -> bool:
        value = self.trace.values[index]
        return value.origin == "constant" and torch.Size(value.shape).numel() <= LITERAL_ELEMENTS

    def _keeps(
        self, step: Step, inputs: Mapping[str, None], outputs: Sequence[str], sides: Sequence[Tensor]
    ) -> tuple[str, ...]:
        """Names what autograd keeps: an operand or result that looks into the same memory; where the step writes there
        (`relu_`), the result."""
        names: dict[int, str] = {}
        near = [index for node in step.nodes for index in (*refs(node), *(o for o in node.outs if o is not None))]
        if any(mutates(_named(node)) for node in step.nodes):
            near.reverse()
        for storage, shape, _ in step.saved_tensors:
            same = [i for i in near if self.trace.values[i].storage == storage and i in self.draft.own]
            exact = [i for i in same if self.trace.values[i].shape == shape]
            named = [self.draft.own[i] for i in (*exact, *same)]
            known = [n for n in named if n in inputs or n in outputs] or named
            if known and names.get(storage, "") not in (*inputs, *outputs):
                names[storage] = known[0]
        return tuple(dict.fromkeys(names.values()))

    def _whole(self, step: Step) -> tuple[str, ...]:
        """Names the dims along which the ops look, which ranks may not divide; ("*",) for all."""
        dims: set[str] = set()
        for node in step.nodes:
            name = base_name(node.target)
            division = self.owner.divisions.get(id(node))
            if division is not None:
                dims |= self._atoms(node) - self._named(division.independent) - self._named(division.summed)
                continue
            if name in ALONG and node.args and isinstance(node.args[0], (Ref, list, tuple)):
                first = node.args[0] if isinstance(node.args[0], Ref) else next(iter(node.args[0]), None)
                if not isinstance(first, Ref):
                    return ("*",)
                row = self.owner.rows[first.index]
                place = node.args[ALONG[name]] if len(node.args) > ALONG[name] else node.kwargs.get("dim", 0)
                if not isinstance(place, int) or not row:
                    return ("*",)
                dims |= {a.name for a in self.owner.axes.dim(row[place % len(row)]).atoms}
            elif name not in POINTWISE and name not in MOVES:
                return ("*",)
        return tuple(sorted(dims))

    def _summed(self, step: Step) -> tuple[str, ...]:
        """Dims that a custom op sums over, as its author says."""
        divisions = (self.owner.divisions.get(id(node)) for node in step.nodes)
        return tuple(sorted(set().union(*(self._named(d.summed) for d in divisions if d is not None))))

    def _named(self, groups: Sequence[Sequence[int]]) -> set[str]:
        return {atom.name for group in groups for axis in group for atom in self.owner.axes.dim(axis).atoms}

    def _atoms(self, node: Traced) -> set[str]:
        """Names of all dims of a node's operands and results."""
        values = (*refs(node), *(out for out in node.outs if out is not None))
        return {atom.name for index in values for dim in self.owner.dims(index) for atom in dim.atoms}

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
        shapes, pair = matmul_shapes(node, self.owner.extents)
        values = self.trace.values
        num_grads = (
            sum(1 for i in pair if values[i].grad) if pair and any(values[o].grad for o in node.outs if o) else 0
        )
        reads = [values[i] for i in refs(node)]
        outs = [values[o] for o in node.outs if o is not None]
        if "dtype" not in node.kwargs and name in DEFAULTED and outs[0].dtype != torch.get_default_dtype():
            kwargs += (("dtype", self._args(outs[0].dtype, outs[0].dtype)),)  # the code sets a default of its own
        view = bool(outs) and not mutates(_named(node)) and all(
            any(o.storage == r.storage for r in reads) for o in outs
        )  # fmt: skip
        return Node(
            target=node.target.replace(".generator", ".default"),  # a generator of the code's own is not kept
            args=args,
            kwargs=kwargs,
            outputs=tuple("" if o is None or o not in self.draft.own else self.draft.own[o] for o in node.outs),
            many=node.many,
            view=view,
            matmuls=shapes,
            grads=num_grads,
            cost=self.owner.cost(node),
            read_values=self._read(node.read_values, twin.read_values if twin else node.read_values),
            shape=tuple(self.owner.extents(node.outs[0])) if node.sized and node.outs[0] is not None else None,
        )

    def _read(self, x: Any, y: Any) -> Any:
        """Numbers that Python read, where both traces have them by what follows from the inputs' sizes."""
        if isinstance(x, list):
            return tuple(map(self._read, x, y if isinstance(y, list) and len(y) == len(x) else x))
        whole = isinstance(x, int) and not isinstance(x, bool) and isinstance(y, int)
        sizes = self.owner.sizes
        return (fit(x, y, sizes.first, sizes.second, 1) if whole else None) or x

    def _target(self, node: Traced, shape: Any) -> Any:
        """Sizes that a view asks for, by the dims of what it makes, so that they hold for parts too."""
        out = node.outs[0]
        assert out is not None, "asked only where there is one"
        row = self.owner.rows[out]
        sizes: list[Any] = []
        for axis, old in zip(row, shape, strict=False):
            atoms = self.owner.axes.dim(axis).atoms
            extent = self.owner.axes.extents[axis]
            divided = any(base(a.name) in (*TENSOR_DIMS, "vocab") for a in atoms)
            if old == -1 and base_name(node.target) == "expand":
                sizes.append(-1)
            elif divided and extent != 1 and not any(a.same_as for a in atoms):
                sizes.append(Size(1, tuple(a.name for a in atoms)))
            else:
                sizes.append(extent)
        return tuple(sizes)

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
        if index not in self.draft.own and self._literal(index):
            value = self.trace.values[index]
            constant = self.trace.constants[value.name]
            return Literal(_nested(constant.tolist()), str(value.dtype).removeprefix("torch."), value.shape)
        return Use(self.draft.own[index] if index in self.draft.own else self.draft.read(index))


def _named(node: Traced) -> Node:
    return Node(target=node.target, args=())


def _nested(x: Any) -> Any:
    return tuple(_nested(y) for y in x) if isinstance(x, list) else x


def short(where: str) -> str:
    """The end of a path with its line, as in `package/file.py:12`: two folders are enough to find it."""
    return "/".join(where.split("/")[-3:])
