"""How one tensor lies on the mesh axes, and the collectives that change it.

A `Sharding` says for each axis whether it divides a dim, leaves the tensor whole, or holds partial sums, as DTensor's
Shard / Replicate / Partial do, with dims by name. `redistribute` returns the `Collective`s from one to another, with
bytes. Leaves out which sharding an op wants (`strategies`) and how long a collective takes (`prices`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from gnomon.errors import PlanError
from gnomon.tensors.dims import Dim, Dtypes, Number, Sizes, size_of
from gnomon.tensors.tensor import Tensor

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"]
Phase = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How one tensor is divided over the axes of a mesh. An axis that is not named leaves it whole: every rank of the
    axis has all of it."""

    shards: tuple[tuple[str, str], ...] = ()
    """(axis, dim) for each axis that divides a dim; of two axes on one dim the first is the outer one."""
    partial: tuple[str, ...] = ()
    """Axes whose ranks hold terms of a sum. Sorted."""

    def __post_init__(self) -> None:
        axes = [axis for axis, _ in self.shards] + list(self.partial)
        if len(set(axes)) != len(axes):
            raise PlanError(f"sharding uses an axis twice: {self}; an axis divides one dim, or holds partial sums")
        object.__setattr__(self, "partial", tuple(sorted(self.partial)))

    def dim_of(self, axis: str) -> str | None:
        """The dim that `axis` divides, if any."""
        return next((dim for known, dim in self.shards if known == axis), None)

    def axes_of(self, dim: str) -> tuple[str, ...]:
        """Axes that divide `dim`, outermost first."""
        return tuple(axis for axis, known in self.shards if known == dim)

    def without(self, axis: str) -> Sharding:
        """The same, with the tensor whole on `axis`."""
        shards = tuple(pair for pair in self.shards if pair[0] != axis)
        return Sharding(shards=shards, partial=tuple(known for known in self.partial if known != axis))

    def with_shard(self, axis: str, dim: str) -> Sharding:
        """The same, with `axis` dividing `dim`, inside what divides it already."""
        rest = self.without(axis)
        return Sharding(shards=(*rest.shards, (axis, dim)), partial=rest.partial)

    def with_partial(self, *axes: str) -> Sharding:
        """The same, holding partial sums on `axes`."""
        rest = self
        for axis in axes:
            rest = rest.without(axis)
        return Sharding(shards=rest.shards, partial=(*rest.partial, *axes))

    def __str__(self) -> str:
        parts = [f"{dim}/{axis}" for axis, dim in self.shards] + [f"partial({axis})" for axis in self.partial]
        return ", ".join(parts) or "replicated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One communication of a block, as every rank of a group of `axis` takes part in it."""

    kind: CollectiveKind
    """What it does. `send_recv` is `steps` rounds in which every rank sends to a neighbour."""
    axis: str
    """Mesh axis whose groups communicate."""
    ranks: int
    """Ranks in a group."""
    bytes: Number
    """Bytes of the whole buffer on one rank: what is reduced, the gathered result, what is scattered, what is
    exchanged (with the part that stays), or what one round of `send_recv` sends."""
    phase: Phase
    """Forward or backward."""
    path: str
    """The op it belongs to."""
    tensor: str
    """The tensor that travels, or whose gradient does."""
    inside: bool = False
    """Part of the op's own algorithm (ring attention, loss, dispatch), rather than before or after it."""
    steps: int = 1
    """Rounds, for `send_recv`."""
    weight_grad: bool = False
    """Needed only by the weight gradient: gathers an input again, so it can overlap with the input gradient."""

    @property
    def sent_bytes(self) -> Number:
        """Bytes that one rank sends in a bandwidth-optimal algorithm: 2(n-1)/n of the buffer for an all-reduce,
        (n-1)/n for the other group collectives (Thakur, Rabenseifner, Gropp 2005). Whole bytes, rounded up."""
        if self.kind == "send_recv":
            return self.bytes * self.steps
        passes = 2 if self.kind == "all_reduce" else 1
        total = self.bytes * (passes * (self.ranks - 1))
        return ceil_div(total, self.ranks)


def ceil_div(total: Number, ways: int) -> Number:
    """total / ways, rounded up; exact for integers."""
    if isinstance(total, int):
        return -(-total // ways)
    return np.asarray(np.ceil(total / ways), dtype=np.float64)


def local_size(dim: Dim, sharding: Sharding, axis_sizes: Mapping[str, int], sizes: Sizes) -> Number:
    """Elements along `dim` (not a product) on one rank: an uneven share is the largest one; at least 1.

    1 where more ranks than elements divide it: then neighbours hold the same element (key-value heads under larger tp).
    """
    ways = 1
    for axis in sharding.axes_of(dim.name):
        ways *= axis_sizes.get(axis, 1)
    return ceil_div(size_of(dim, sizes), ways)


def local_bytes(
    tensor: Tensor, sharding: Sharding, axis_sizes: Mapping[str, int], sizes: Sizes, dtypes: Dtypes
) -> Number:
    """Bytes of `tensor` on one rank."""
    count: Number = 1
    for dim in tensor.atoms:
        count = count * local_size(dim, sharding, axis_sizes, sizes)
    return ceil_div(count * dtypes.bits(tensor.dtype), 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What turns shardings into numbers: sizes of axes and dims, and dtypes."""

    axis_sizes: Mapping[str, int]
    """Ranks on each axis (`tp`, `cp`, `ep`, `etp` …)."""
    sizes: Sizes
    """Sizes of the dims that the graph leaves open, before any axis divides them: `seq` is the whole sequence.
    `batch` is what one data-parallel rank has, since units are dealt to data-parallel ranks."""
    dtypes: Dtypes
    """What `compute` and `param` are."""

    def bytes(self, tensor: Tensor, sharding: Sharding) -> Number:
        """Bytes of `tensor` on one rank."""
        return local_bytes(tensor, sharding, self.axis_sizes, self.sizes, self.dtypes)

    def ranks(self, axis: str) -> int:
        """Counts the ranks on `axis`."""
        return self.axis_sizes.get(axis, 1)


def redistribute(
    tensor: Tensor,
    source: Sharding,
    target: Sharding,
    scene: Scene,
    *,
    path: str,
    phase: Phase = "forward",
    weight_grad: bool = False,
) -> tuple[Collective, ...]:
    """Collectives that turn `tensor` from `source` into `target`, in order.

    Sums come first (all-reduce, or reduce-scatter when the axis then divides a dim), then exchanges of one dim for
    another, then gathers, innermost axis first, so that as little as possible travels. Where that would leave parts
    in another order (an outer axis that leaves a dim before an inner one), gathers come before exchanges, or all of
    the tensor is gathered. Taking one's own part of a whole tensor is free, as is calling a whole tensor a partial
    sum (all ranks but one hold zeros). PlanError for a divided tensor turned into partial sums.
    """
    for axis, _ in source.shards:
        if axis in target.partial:
            raise PlanError(f"{path}: {tensor.name} is divided over {axis} and cannot become partial sums of it")
    return tuple(
        Collective(
            kind=hop.kind,
            axis=hop.axis,
            ranks=scene.ranks(hop.axis),
            bytes=scene.bytes(tensor, hop.counts),
            phase=phase,
            path=path,
            tensor=tensor.name,
            weight_grad=weight_grad,
        )
        for hop in hops(source, target)
        if hop.kind != "part" and scene.ranks(hop.axis) > 1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """One change of a tensor's layout on one axis."""

    kind: CollectiveKind | Literal["part"]
    """A collective, or `part`: each rank takes its own part of what is whole."""
    axis: str
    """The mesh axis."""
    dim: str | None
    """What is gathered, scattered, taken a part of, or (all_to_all) was divided before; None for an all-reduce."""
    to: str | None
    """Of an all_to_all: the dim that is divided after it."""
    counts: Sharding
    """The layout whose bytes on a rank are those of the collective."""


def hops(source: Sharding, target: Sharding) -> tuple[Hop, ...]:
    """The changes that turn a tensor from `source` into `target`, as `redistribute` orders them."""
    # (axis, the dim that it divides afterwards): with one a reduce-scatter, without an all-reduce.
    sums = [(axis, target.dim_of(axis)) for axis in source.partial if axis not in target.partial]
    leaving = [(axis, target.dim_of(axis)) for axis, dim in source.shards if target.dim_of(axis) != dim]
    exchanges = [step for step in leaving if step[1] is not None]
    # Innermost first: an outer axis can only be gathered once nothing within it is divided.
    gathers = [step for step in reversed(leaving) if step[1] is None]
    whole: list[_Step] = [*((axis, None) for axis, _ in sums), *((axis, None) for axis, _ in reversed(source.shards))]
    # The last way always arrives: nothing is divided any more, and the rest is free.
    ways = (sums + exchanges + gathers, sums + gathers + exchanges, whole)
    return tuple(next(path for way in ways if (path := _hops(source, target, way)) is not None))


_Step = tuple[str, str | None]
"""(axis, the dim that it goes to divide, or None)."""


def _hops(source: Sharding, target: Sharding, steps: list[_Step]) -> list[Hop] | None:
    """The hops of these steps, or None if parts end in another order than `target` says."""
    path: list[Hop] = []
    now = source
    for axis, target_dim in steps:
        dim = now.dim_of(axis)
        if dim is not None and now.axes_of(dim)[-1] != axis:
            return None  # an inner axis divides the dim further
        after = now.without(axis) if target_dim is None else now.with_shard(axis, target_dim)
        if dim is None:
            kind: CollectiveKind = "all_reduce" if target_dim is None else "reduce_scatter"
            path.append(Hop(kind=kind, axis=axis, dim=target_dim, to=None, counts=now))
        elif target_dim is None:
            path.append(Hop(kind="all_gather", axis=axis, dim=dim, to=None, counts=after))
        else:
            path.append(Hop(kind="all_to_all", axis=axis, dim=dim, to=target_dim, counts=now))
        now = after
    for axis, dim in target.shards:  # each rank takes its own part of what is whole
        if now.dim_of(axis) is None:
            now = now.with_shard(axis, dim)
            path.append(Hop(kind="part", axis=axis, dim=dim, to=None, counts=now))
    same = all(now.axes_of(dim) == target.axes_of(dim) for _, dim in (*now.shards, *target.shards))
    return path if same else None
