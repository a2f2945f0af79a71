"""The body of a group: what is computed for each point of its domain, as a list of instructions in order.

A `Body` has axes (the domain), memory that it reads (`Input`) and the instructions; a value varies along some
axes and is the same along the others, so a row's maximum is a value without the row's axis. `Tensor` is how a
tensor of the graph lies on the axes. Returns bodies that are copied before a trial (`copy`), so that a rule
that does not fit leaves no trace. Leaves out order and memory levels (`stages`) and text (`nest`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from gnomon.compiler.tiles.sizes import Size, equal, product, quotient

KINDS = {
    torch.float32: "F",
    torch.bfloat16: "F",
    torch.float64: "D",
    torch.int64: "L",
    torch.int32: "L",
    torch.int16: "L",
    torch.int8: "L",
    torch.uint8: "L",
    torch.bool: "B",
}
"""Memory type -> the kind of vector that it is computed in (cpp/vector.h)."""

RANK = "BLFD"
"""Kinds from the narrowest: what two of them are computed in is the later."""

HELD = {
    torch.bfloat16: "bf16",
    torch.int32: "int32",
    torch.int16: "int16",
    torch.int8: "int8",
    torch.uint8: "uint8",
}
"""Memory type that is narrower than its kind -> the operation that gives the number of it: the nearest, or the last
bits."""

ALIKE = ("maximum", "minimum", "max", "min", "peak")
"""What gives one of the numbers that it is given."""

REDUCTIONS = ("sum", "prod", "max", "min", "peak", "any", "all")
"""`peak` is `max` where a NaN may be lost, for sums that see it themselves."""


class UnfitError(Exception):
    """An operation cannot be part of this group; it says why. Never reaches a user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One value of a body, in static single assignment. `attr`: a constant, an axis, axes that a reduction sums, the
    slot that a load reads."""

    op: str
    """Name of the operation."""
    args: tuple[int, ...] = ()
    """Values that it reads."""
    kind: str
    """Kind of vector that it is computed in, a letter of RANK: truths, whole numbers, floats, doubles."""
    axes: frozenset[int] = frozenset()
    """Axes along which its value differs."""
    attr: Any = None
    """What else says it, by `op`; None for most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """Memory of the graph that a body reads: `node`'s buffer from element `offset`, `strides` by axis (0 where absent).

    `index`: the value that chooses a row of it, `index_stride` elements a row, of `rows`."""

    node: Any
    """The node of the graph whose buffer it is."""
    dtype: torch.dtype
    """As it lies in memory."""
    strides: dict[int, Size]
    """Axis -> elements from one index to the next; 0 where absent."""
    offset: Size = 0
    """Elements before the first."""
    index: int | None = None
    """The value that chooses a row; None where none is chosen."""
    index_stride: Size = 0
    """Elements from one row to the next."""
    rows: Size = 0
    """How many rows there are, which the index is checked against."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor of the graph inside a body: each of its dims is a row-major list of axes (none: size 1 or broadcast)."""

    value: int
    """Its value in the body."""
    sizes: tuple[Size, ...]
    """Sizes of its dims."""
    dims: tuple[tuple[int, ...], ...]
    """Axes of each of its dims, row-major; none: of size 1, or broadcast."""
    dtype: torch.dtype
    """Of the tensor in the graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class External:
    """A tensor of the graph that lies in memory: a view of the buffer that `node` makes."""

    node: Any
    """The node that makes the buffer."""
    sizes: tuple[Size, ...]
    """Sizes of its dims."""
    strides: tuple[Size, ...]
    """Elements from one index to the next, by dim."""
    offset: Size
    """Elements before the first."""
    dtype: torch.dtype
    """As it lies in memory."""


@dataclass(slots=True)
class Body:
    """What a group computes for each point of its axes. A value's number is the place of its instruction in `code`."""

    axes: list[Size] = field(default_factory=list)
    """Size of each axis."""
    inputs: list[Input] = field(default_factory=list)
    """What it reads, by slot."""
    code: list[Instruction] = field(default_factory=list)
    """Instructions, each after those that it reads."""
    tensors: dict[Any, Tensor] = field(default_factory=dict)
    """Node of the graph -> where it lies; nodes with several results are `(node, i)`."""
    known: dict[Instruction, int] = field(default_factory=dict)
    """Instruction -> its value: one that is emitted twice is computed once."""
    joined_axes: list[tuple[int, ...]] = field(default_factory=list)
    """Axes of dims along which parts are joined: the parts' axis, then those of one part."""

    def copy(self) -> Body:
        return Body(
            axes=list(self.axes),
            inputs=list(self.inputs),
            code=list(self.code),
            tensors=dict(self.tensors),
            known=dict(self.known),
            joined_axes=list(self.joined_axes),
        )

    # ---- values
    def emit(self, op: str, *args: int, kind: str, axes: Iterable[int] | None = None, attr: Any = None) -> int:
        """The value of an instruction; the same one twice is one."""
        along = frozenset(axes) if axes is not None else frozenset().union(*(self.code[a].axes for a in args))
        instruction = Instruction(op=op, args=args, kind=kind, axes=along, attr=attr)
        if instruction not in self.known:
            self.known[instruction] = len(self.code)
            self.code.append(instruction)
        return self.known[instruction]

    def const(self, value: float | int | bool, kind: str) -> int:
        # Kept as text: NaN would not be equal to itself, and 0.0 would be equal to -0.0, where equal instructions are
        # one value.
        plain = bool(value) if kind == "B" else int(value) if kind == "L" else float(value)
        return self.emit("const", kind=kind, axes=(), attr=repr(plain))

    def cast(self, value: int, kind: str) -> int:
        here = self.code[value]
        if here.kind == kind:
            return value
        if here.op == "const":
            return self.const(
                {"True": 1, "False": 0}.get(here.attr, None) or float(here.attr.replace("False", "0")), kind
            )
        return self.emit("cast", value, kind=kind)

    def round_to(self, value: int, dtype: torch.dtype) -> int:
        """The value as memory of that type would give it back: eager rounds, or wraps, each result."""
        op = HELD.get(dtype)
        if op is None or self._holds(value, dtype, op):
            return value
        return self.emit(op, value, kind=self.code[value].kind)

    def _holds(self, value: int, dtype: torch.dtype, op: str) -> bool:
        """Whether a value is a number of that type whatever it is made of."""
        ins = self.code[value]
        # Truths are 0 and 1, which every type holds.
        if ins.op in ("load", "take"):
            return self.inputs[ins.attr].dtype in (dtype, torch.bool)
        if ins.op == "const":
            number = float(ins.attr)
            if ins.kind == "L":
                limits = torch.iinfo(dtype)
                return limits.min <= int(ins.attr) <= limits.max
            return number != number or float(torch.tensor(number, dtype=dtype)) == number
        if ins.op == "cast":
            return self.code[ins.args[0]].kind == "B"
        # Not of integers: the least number of a type has no negative in it.
        if ins.op in ALIKE or (ins.op in ("abs", "neg") and dtype == torch.bfloat16):
            return all(self._holds(a, dtype, op) for a in ins.args)
        if ins.op == "select":
            return all(self._holds(a, dtype, op) for a in ins.args[1:])
        # Signed integers are sign-extended to 64 bits and stay so under these operations. uint8 is extended by zeros,
        # and `not` would set the upper bits.
        if ins.op in ("and", "or", "xor", "not") and dtype not in (torch.bfloat16, torch.uint8):
            return all(self._holds(a, dtype, op) for a in ins.args)
        return ins.op == op

    def reduce(self, op: str, value: int, axes: Iterable[int]) -> int:
        """Reduces a value along axes; those along which the value does not vary count by their size."""
        here = self.code[value]
        over = frozenset(axes)
        reduced = over & here.axes
        if reduced:
            value = self.emit(op, value, kind=here.kind, axes=here.axes - reduced, attr=tuple(sorted(reduced)))
        if op == "sum" and over - reduced:
            value = self.emit("mul", value, self.extent(over - reduced, here.kind), kind=here.kind)
        elif op == "prod" and over - reduced:
            raise UnfitError("a product of equal values")
        return value

    def extent(self, axes: Iterable[int], kind: str) -> int:
        """How many points lie along these axes."""
        return self.emit("extent", kind=kind, axes=(), attr=tuple(sorted(axes)))

    # ---- where tensors lie
    def split(self, axis: int, inner: Size) -> int:
        """Divide an axis in (outer, inner); returns the inner axis, the outer keeps its number."""
        outer = quotient(self.axes[axis], inner)
        if outer is None:
            raise UnfitError("an axis that does not divide")
        fresh = len(self.axes)
        self.axes[axis] = outer
        self.axes.append(inner)

        def along(axes: Iterable[int]) -> tuple[int, ...]:
            return tuple(b for a in axes for b in ((a, fresh) if a == axis else (a,)))

        for i, ins in enumerate(self.code):
            # These name one axis; after the division an index would be made of two.
            if ins.op in ("index", "is_at") and ins.attr == axis:
                raise UnfitError("an index along an axis that is divided")
            attr = tuple(sorted(along(ins.attr))) if ins.op in (*REDUCTIONS, "extent") else ins.attr
            self.code[i] = replace(ins, axes=frozenset(along(ins.axes)), attr=attr)
        # Reversed, so that of equal instructions the earliest is the one that is found.
        self.known = {ins: i for i, ins in reversed(list(enumerate(self.code)))}
        for i, inp in enumerate(self.inputs):
            if axis in inp.strides:
                # The old index is outer * inner size + inner index: the inner axis keeps the step, the outer one takes
                # as many steps at once as the inner has points.
                step = inp.strides[axis]
                self.inputs[i] = replace(inp, strides={**inp.strides, axis: product((step, inner)), fresh: step})
        for key, tensor in self.tensors.items():
            self.tensors[key] = replace(tensor, dims=tuple(along(dim) for dim in tensor.dims))
        self.joined_axes = [along(dim) for dim in self.joined_axes]
        return fresh

    def load(self, source: External, dims: Sequence[tuple[int, ...]]) -> Tensor:
        """Read memory whose dims lie on these axes."""
        strides: dict[int, Size] = {}
        varies = []
        for size, stride, dim in zip(source.sizes, source.strides, dims, strict=True):
            # The axes of a dim are row-major: the last has the dim's own stride, and each before it that times the
            # sizes of those behind it.
            step = stride
            for axis in reversed(dim):
                varies.append(axis)
                if not equal(step, 0):
                    if axis in strides:
                        raise UnfitError("a diagonal")
                    strides[axis] = step
                step = product((step, self.axes[axis]))
            if not dim and not equal(size, 1):
                raise UnfitError("a dim without an axis")
        slot = self.slot(Input(node=source.node, dtype=source.dtype, strides=strides, offset=source.offset))
        # Along axes without a stride (broadcast dims) the value does not vary.
        value = self.emit("load", kind=kind_of(source.dtype), axes=strides, attr=slot)
        return Tensor(value=value, sizes=source.sizes, dims=tuple(dims), dtype=source.dtype)

    def slot(self, dims: Input) -> int:
        for i, known in enumerate(self.inputs):
            if known == dims:
                return i
        self.inputs.append(dims)
        return len(self.inputs) - 1

    def place(self, sizes: Sequence[Size], known: Sequence[tuple[int, ...] | None]) -> tuple[tuple[int, ...], ...]:
        """Axes for each dim of a shape, given those of some; the others take the axes of a joined dim of their size,
        or, in order, axes that are not taken yet and multiply to their size, and new ones where none are left."""
        out: list[tuple[int, ...]] = []
        used = {a for dim in known if dim for a in dim}
        free = [a for a in range(len(self.axes)) if a not in used]
        for size, dim in zip(sizes, known, strict=True):
            if dim is not None or equal(size, 1):
                out.append(dim or ())
                continue
            axes, free = self._axes_of(size, free)
            out.append(axes)
        return tuple(out)

    def _axes_of(self, size: Size, free: list[int]) -> tuple[tuple[int, ...], list[int]]:
        for dim in self.joined_axes:
            if all(axis in free for axis in dim) and equal(product(tuple(self.axes[axis] for axis in dim)), size):
                return dim, [axis for axis in free if axis not in dim]
        # Neighbouring free axes only. What lies before them is given up, as later dims must lie on later axes.
        for start in range(len(free)):
            total: Size = 1
            for stop in range(start, len(free)):
                total = product((total, self.axes[free[stop]]))
                if equal(total, size):
                    return tuple(free[start : stop + 1]), free[stop + 1 :]
        for i, axis in enumerate(free):  # an axis that holds this dim and the next ones
            rest = quotient(self.axes[axis], size)
            if rest is not None and not equal(rest, 1):
                return (axis,), [self.split(axis, rest), *free[i + 1 :]]
        self.axes.append(size)
        return (len(self.axes) - 1,), free

    def reshape(self, tensor: Tensor, sizes: Sequence[Size]) -> Tensor:
        """The same elements in the same order under other dims."""
        atoms: list[int] = []
        for size, axes in zip(tensor.sizes, tensor.dims, strict=True):
            if not axes and not equal(size, 1):
                raise UnfitError("a view of a broadcast")
            atoms += axes
        dims = []
        for size in sizes:
            have: Size = 1
            dim: list[int] = []
            while not equal(have, size):
                if not atoms:
                    raise UnfitError("a view that does not divide")
                axis = atoms.pop(0)
                need = quotient(size, have)
                if need is None:
                    raise UnfitError("a view that does not divide")
                # The axis is larger than what this dim still needs: its outer part completes the dim, its inner part
                # begins the next one.
                if quotient(need, self.axes[axis]) is None:
                    rest = quotient(self.axes[axis], need)
                    if rest is None:
                        raise UnfitError("a view that does not divide")
                    atoms.insert(0, self.split(axis, rest))
                    # what was placed before keeps its axes: only this one is divided, and it is whole in no other dim
                have = product((have, self.axes[axis]))
                dim.append(axis)
            dims.append(tuple(dim))
        if atoms:
            raise UnfitError("a view that does not divide")
        return replace(tensor, sizes=tuple(sizes), dims=tuple(dims))


def kind_of(dtype: torch.dtype) -> str:
    if dtype not in KINDS:
        raise UnfitError(f"{dtype} has no vector kind")
    return KINDS[dtype]


def wider(*kinds: str) -> str:
    return max(kinds, key=RANK.index)
