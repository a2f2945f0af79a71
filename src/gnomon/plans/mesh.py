"""Meshes: how ranks are arranged on named axes, and which ranks form a group on each axis.

`Mesh` holds the sizes of `pp dp_replicate dp_shard cp tp` (their product is the number of ranks) and of `ep etp`,
which do not add ranks: experts use the same ranks refolded. A `View` is one way to fold the ranks: `dense` in the
mesh's own order, `experts` with `edp × ep × etp` in the place of `dp_shard × cp × tp`. Ranks count from 0 within the
mesh; a stage adds its own offset. Leaves out: which device a rank is on (the plan's placement) and which link lies
behind an axis (the cluster).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from gnomon.errors import PlanError, nearest
from gnomon.schema import typed
from gnomon.units import MAX_DEVICES

DENSE_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Axes that multiply to the number of ranks, outermost first: neighbours on `tp` are neighbouring ranks. Megatron-LM's
`tp-cp-ep-dp-pp` (written innermost first) and torchtitan's mesh have the same order."""

FOLDED_AXES = ("dp_shard", "cp", "tp")
"""Axes whose ranks the experts refold."""

EXPERT_AXES = ("edp", "ep", "etp")
"""What they are refolded into: replicas (or shards) of experts, experts, slices of one expert; outermost first."""

UNIONS = {
    "dp": ("dp_replicate", "dp_shard"),
    "fsdp": ("dp_shard", "cp"),
    "loss": ("dp_replicate", "dp_shard", "cp"),
}
"""Names for products of axes: `dp` splits the batch, `fsdp` is what ZeRO shards over (ranks of one context-parallel
group hold the same parameters), `loss` is what gradients are reduced over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One folding of ranks 0 … n-1 into axes, row-major: the last axis changes fastest."""

    name: str
    """`dense` or `experts`."""
    axes: tuple[str, ...]
    """Axis names, outermost first."""
    sizes: tuple[int, ...]
    """Ranks along each axis."""

    @property
    def num_ranks(self) -> int:
        """Ranks in the view."""
        return prod(self.sizes)

    def size(self, axis: str) -> int:
        """Ranks in a group of `axis`, which may be a union such as `dp`. PlanError if this view has no such axis."""
        return prod(self.sizes[i] for i in self._indices(axis))

    def groups(self, *axes: str) -> NDArray[np.int64]:
        """Ranks of every group that communicates over `axes` together: shape (groups, size).

        Rows are in the order of their first rank. Within a row ranks ascend, whatever the order in which axes are
        named: torch's process groups, NCCL's communicators and MPI number their members so, and a shard index that
        follows another order than its group's would exchange shards.
        """
        indices = sorted(i for axis in axes for i in self._indices(axis))
        if len(set(indices)) != len(indices):
            raise PlanError(f"groups over {axes} name an axis twice; name each axis once")
        others = [i for i in range(len(self.axes)) if i not in indices]
        # The other axes lead, in their order, so that each row of the reshaped grid is one group and ascends.
        grid = np.arange(self.num_ranks, dtype=np.int64).reshape(self.sizes)
        return grid.transpose(others + indices).reshape(-1, prod(self.sizes[i] for i in indices))

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Position of `rank` along each axis of the view."""
        if not 0 <= rank < self.num_ranks:
            raise PlanError(f"rank {rank} is not in a mesh of {self.num_ranks} ranks (0 to {self.num_ranks - 1})")
        return tuple(int(i) for i in np.unravel_index(rank, self.sizes))

    def coordinate(self, rank: int, axis: str) -> int:
        """Position of `rank` within its group of `axis`, which is that of its row in `groups(axis)`."""
        coordinates = self.coordinates(rank)
        position = 0
        for index in self._indices(axis):
            # Mixed radix over the axes of a union, outermost first, as `groups` lays out a row.
            position = position * self.sizes[index] + coordinates[index]
        return position

    def _indices(self, axis: str) -> tuple[int, ...]:
        names = (axis,) if axis in self.axes else UNIONS.get(axis, ())
        if not names or any(name not in self.axes for name in names):
            known = [*self.axes, *(u for u, parts in UNIONS.items() if set(parts) <= set(self.axes))]
            raise PlanError(f"view {self.name!r} has no axis {axis!r}; it has {', '.join(known)}{nearest(axis, known)}")
        return tuple(sorted(self.axes.index(name) for name in names))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Sizes of the parallel axes. All 1 is a single device."""

    pp: int = 1
    """Pipeline-parallel ranks. 1 in the mesh of a single stage."""
    dp_replicate: int = 1
    """Data-parallel ranks that hold whole replicas of what `dp_shard` shards (the outer level of hybrid sharding)."""
    dp_shard: int = 1
    """Data-parallel ranks over which ZeRO shards; with ZeRO stage 0 they hold replicas too."""
    cp: int = 1
    """Context-parallel ranks: each holds a part of every sequence."""
    tp: int = 1
    """Tensor-parallel ranks."""
    ep: int = 1
    """Expert-parallel ranks: a refolding of dp_shard × cp × tp, so it does not add ranks."""
    etp: int = 1
    """Ranks that slice one expert, in the same refolding. Megatron-LM's default is tp; torchtitan's is 1."""
    order: tuple[str, ...] = DENSE_AXES
    """Axes from outermost (ranks far apart) to innermost (neighbouring ranks)."""

    @typed
    def __post_init__(self) -> None:
        for axis in (*DENSE_AXES, "ep", "etp"):
            if (size := getattr(self, axis)) < 1:
                raise PlanError(f"mesh axis {axis} = {size}, but an axis has at least 1 rank; leave it out or use 1")
        if self.world_size > MAX_DEVICES:
            raise PlanError(
                f"a mesh of {self.world_size:,} ranks is over the limit of {MAX_DEVICES:,}, as large as clusters can "
                f"be; lower an axis"
            )
        if sorted(self.order) != sorted(DENSE_AXES):
            raise PlanError(f"mesh order {self.order} must name each of {', '.join(DENSE_AXES)} once, outermost first")
        folded, block = prod(getattr(self, a) for a in FOLDED_AXES), self.ep * self.etp
        if folded % block:
            legal = [d for d in range(1, folded + 1) if folded % (d * self.etp) == 0]
            fix = f"the nearest legal ep is {min(legal, key=lambda d: (abs(d - self.ep), d))}" if legal else "lower etp"
            raise PlanError(
                f"experts need ep x etp = {self.ep} x {self.etp} = {block} ranks out of dp_shard x cp x tp = {folded}, "
                f"which {block} does not divide; {fix}"
            )

    @property
    def world_size(self) -> int:
        """Counts the ranks; `ep` and `etp` do not add any."""
        return prod(getattr(self, axis) for axis in DENSE_AXES)

    @property
    def data_ranks(self) -> int:
        """Ranks that take different sequences: dp_replicate × dp_shard."""
        return self.dp_replicate * self.dp_shard

    @property
    def edp(self) -> int:
        """Ranks within dp_shard × cp × tp that hold the same slice of the same experts."""
        return self.dp_shard * self.cp * self.tp // (self.ep * self.etp)

    @property
    def views(self) -> tuple[View, View]:
        """The foldings `dense` and `experts` of the same ranks."""
        return self.dense, self.experts

    @property
    def dense(self) -> View:
        """The mesh's own axes in its own order."""
        return View(name="dense", axes=self.order, sizes=tuple(getattr(self, axis) for axis in self.order))

    @property
    def experts(self) -> View:
        """`edp × ep × etp` in the place of dp_shard × cp × tp, which must stand together in `order`. PlanError
        otherwise."""
        places = sorted(self.order.index(axis) for axis in FOLDED_AXES)
        if places[-1] - places[0] != len(FOLDED_AXES) - 1:
            raise PlanError(
                f"experts refold {' x '.join(FOLDED_AXES)}, but order {', '.join(self.order)} has other axes between "
                f"them; put these three next to each other"
            )
        # Three axes that stand together are one row-major run of ranks, which may be cut anew; with another between,
        # ranks of different groups would be refolded together.
        before, after = self.order[: places[0]], self.order[places[-1] + 1 :]
        axes = (*before, *EXPERT_AXES, *after)
        return View(name="experts", axes=axes, sizes=tuple(getattr(self, axis) for axis in axes))

    def describe(self) -> str:
        """Text for messages: the axes above 1, as in `pp=4 x dp_shard=8 x tp=2`."""
        parts = [f"{axis}={size}" for axis in self.order if (size := getattr(self, axis)) > 1]
        return " x ".join(parts) or "1 rank"
