"""Bounds of single points: what the update of parameters adds, in time.

`Updates` holds, for one way of sharding, the seconds of a rank's optimizer, of the norm for which all ranks meet, and
of copies to the host and back. Leaves out what gradients and parameters take on links (`point_time`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gnomon.graph import DTYPE_BITS
from gnomon.hardware import Node
from gnomon.plans import Mesh
from gnomon.plans.parts import Optimizer
from gnomon.prediction.update import HOST_ADAM_S
from gnomon.prices.collectives import copy_s_per_byte, copy_seconds
from gnomon.prices.curves import curves_for
from gnomon.prices.optimizer import norm_seconds, optimizer_seconds
from gnomon.search.bounds.families import GRID_S, Pipeline, PipelineName, SearchJob
from gnomon.search.bounds.layer_tables import KindTable, Split
from gnomon.sharding.parameters import shard_ranks, waiting_bytes

Doubles = NDArray[np.float64]


class Updates:
    """The least seconds of updates under one way of sharding."""

    def __init__(
        self, job: SearchJob, table: KindTable, mesh: Mesh, optimizer: Optimizer, pp: int, *, away: bool
    ) -> None:
        """Takes the mesh of a stage, and away: whether parameters come from the host, block by block."""
        self.job, self.table, self.mesh, self.optimizer, self.pp, self.away = job, table, mesh, optimizer, pp, away
        self.precision = job.space.base.precision
        self._by_pipeline: dict[PipelineName, Doubles] = {}
        self._norms: dict[PipelineName, float] = {}

    def elements(self, parts: Split) -> Doubles:
        """[stages, 2] dense and routed parameter elements of a rank, shared ones once."""
        # [stages, kinds] @ [kinds, 2] = [stages, 2].
        elements = parts.counts @ self.table.elements
        for stage, kind, tensor in parts.repeated:
            elements[stage, 0] -= int(self.table.prices[kind].sharded.local_elements[tensor])
        return elements

    def _ways(self) -> tuple[int, int]:
        return shard_ranks(self.mesh, experts=False), shard_ranks(self.mesh, experts=True)

    def owned(self, parts: Split) -> Doubles:
        """[stages] elements that a rank's optimizer updates."""
        ways = self._ways() if self.optimizer.zero >= 1 else (1, 1)
        # ceil: the fullest rank of a division.
        elements: Doubles = np.ceil(self.elements(parts) / np.array(ways)).sum(axis=1)
        return elements

    def seconds(self, parts: Split) -> Doubles:
        """[stages] seconds of a rank's update, at least."""
        owned, tensors = self.owned(parts), parts.counts @ self.table.tensors
        pairs = list(zip(owned.tolist(), tensors.tolist(), strict=True))
        # Stages of the middle of a model are all alike: price each (elements, tensors) pair once.
        done = {pair: self._update_s(*pair) for pair in dict.fromkeys(pairs)}
        return np.array([done[pair] for pair in pairs])

    def by_layer(self, pipeline: Pipeline) -> Doubles:
        """[stages] seconds of the updates of its layers one by one (ZeRO 3): each has the stage's elements and tensors
        in its share. With what goes back to the host, where parameters wait there."""
        key = pipeline.name
        if key not in self._by_pipeline:
            self._by_pipeline[key] = self._by_layer(pipeline)
        return self._by_pipeline[key]

    def _by_layer(self, pipeline: Pipeline) -> Doubles:
        own = self.table.elements.sum(axis=1)
        owned, total = self.owned(pipeline.split), pipeline.split.counts @ own
        out = np.zeros(len(total))
        for kinds, stages in pipeline.distinct:
            # ZeRO 3 updates layer by layer; a layer's part of the stage's owned elements is its part of the stage's
            # parameters.
            for kind, times in zip(*np.unique(kinds, return_counts=True), strict=True):
                elements = owned[stages[0]] * own[kind] // max(total[stages[0]], 1.0)
                out[stages] += times * self._update_s(elements, self.table.tensors[kind])
        if self.away and self.optimizer.offload is None:
            out += pipeline.split.counts @ self.copies(trained=True)
        return out

    def norm_s(self, pipeline: Pipeline) -> float:
        """Seconds of the norm, for which all ranks meet, at least: each reads the gradients of its first stage (of the
        smallest, where one updates what another shares), and all of them send one number."""
        key = pipeline.name
        if key not in self._norms:
            self._norms[key] = self._norm_s(pipeline)
        return self._norms[key]

    def _norm_s(self, pipeline: Pipeline) -> float:
        if self.optimizer.offload is not None:  # gradients add to it on their way to the host
            return max(self.job.meeting_s - GRID_S, 0.0)
        owned = self.owned(pipeline.split)
        # Each rank reads at least the gradients of its first stage; where one stage updates what another holds, of its
        # smallest.
        first = owned[pipeline.lowest]
        if not pipeline.own.all():
            first = np.array([owned[pipeline.rank_of == r].min() for r in range(len(first))])
        device = self.table.device
        own = norm_seconds(float(first.max()), self.precision, device, curves_for(device))
        return max(float(own) + self.job.meeting_s - GRID_S, 0.0)

    def copies(self, *, trained: bool) -> Doubles:
        """[kinds] seconds of copying a rank's part of a layer's parameters to or from the host, on the fastest node;
        with the disk, where they wait there: read, and if `trained` read and written."""
        sizes = [waiting_bytes(p.sharded, self.mesh, self.precision, trained=trained) for p in self.table.prices]
        nodes = [group.node for group in self.job.cluster.groups]
        disk_s = min(self._disk_s_per_byte(node, write=trained) for node in nodes)
        seconds = [
            min(float(copy_seconds(size, node)) for node in nodes) + size * disk_s if size else 0.0 for size in sizes
        ]
        return np.maximum(np.array(seconds) - GRID_S, 0.0)

    def _disk_s_per_byte(self, node: Node, *, write: bool) -> float:
        """Seconds a byte of each rank; 0 where parameters do not wait on a disk. write: after they were read."""
        if self.optimizer.parameter_tier != "disk":
            return 0.0
        rates = [node.disk_read_bytes_per_s, *([node.disk_write_bytes_per_s] if write else [])]
        # All ranks of a node read one disk at the same time.
        sharers = min(self.mesh.world_size * self.pp, node.count)
        return sum(sharers / rate for rate in rates if rate)

    def _update_s(self, elements: float, tensors: float) -> float:
        """Seconds of an update, at least: what comes before it only adds to it."""
        if self.optimizer.offload is not None:
            return self._host_s(elements)
        key = max(int(elements), 1), max(1, round(tensors)), self.table.device
        known = self.job.updates
        if key not in known:
            known[key] = self._updated_s(*key[:2])
        return known[key]

    def _host_s(self, elements: float) -> float:
        """Seconds of an update on the host, at least, where it is in one tile: it begins after a rank's last backward,
        and nothing of its next step before the parameters are back, so they come on top of all its computing.
        Gradients may have gone down before; an update layer by layer, in several tiles, or a step late, may hide."""
        offload = self.optimizer.offload
        if offload is None or offload.tiles != 1 or offload.fraction < 1 or self.optimizer.delay:
            return 0.0
        nodes = [group.node for group in self.job.cluster.groups]
        sharers = min(self.mesh.world_size * self.pp, *(node.count for node in nodes))
        # Parameters that live on the host need no copy back to the device.
        moved = 0 if self.away else DTYPE_BITS[self.precision.param] // 8
        element_s = sharers * HOST_ADAM_S + moved * min(copy_s_per_byte(node) for node in nodes)
        # The update and the copy back are two rows, each rounded to the grid.
        return max(elements * element_s - 2 * GRID_S, 0.0)

    def host_s(self, pipeline: Pipeline) -> float:
        """Seconds of a step by the stream of a rank's updates on the host, one after another, at least; and by that on
        which updated parameters go to a disk, where they wait there."""
        offload = self.optimizer.offload
        if offload is None or offload.fraction < 1:
            return 0.0
        sharers = min(self.mesh.world_size * self.pp, *(group.node.count for group in self.job.cluster.groups))
        rows = float(pipeline.split.counts.sum())
        elements: Doubles = pipeline.on_rank @ (self.owned(pipeline.split) * pipeline.own)
        # One stream updates all that a rank owns, and the host's cores are shared by the ranks of a node.
        updated = float(elements.max()) * sharers * HOST_ADAM_S
        return max(max(updated, self._written_s(pipeline)) - (rows + 1) * GRID_S, 0.0)

    def _written_s(self, pipeline: Pipeline) -> float:
        """Seconds of reading and writing all that a rank updates on a disk."""
        if not self.away or self.optimizer.parameter_tier != "disk":
            return 0.0
        sizes = [waiting_bytes(p.sharded, self.mesh, self.precision, trained=True) for p in self.table.prices]
        written_bytes: Doubles = pipeline.on_rank @ (pipeline.split.counts @ np.array(sizes, float))
        nodes = [group.node for group in self.job.cluster.groups]
        return float(written_bytes.max()) * min(self._disk_s_per_byte(node, write=True) for node in nodes)

    def _updated_s(self, elements: int, tensors: int) -> float:
        price = optimizer_seconds(
            elements,
            self.job.space.base.optimizer,
            self.precision,
            self.table.device,
            curves_for(self.table.device),
            self.job.stack,
            tensors=tensors,
            matrices=(),  # what Muon makes orthogonal is left out: a bound
        )
        # Kernels on the device, or their launches, whichever is longer.
        return max(float(price.device_s), price.kernels * self.table.launch_s) - GRID_S
