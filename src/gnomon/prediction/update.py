"""The update of a stage's parameters: the optimizer's kernels, the norm of the gradients, and an update on the host.

Seconds on one rank. Leaves out collectives of parameters and gradients around it (`step`), but for sums over
tensor-parallel ranks right before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from math import ceil

import numpy as np

from gnomon.errors import UnpricedError
from gnomon.graph import DTYPE_BITS
from gnomon.hardware import Cluster, Node
from gnomon.plans import LowRank, Precision
from gnomon.prediction.layer import parameter_elements
from gnomon.prediction.layer_types import LayerPrice
from gnomon.prediction.stage import StagePrice
from gnomon.prices.collectives import collective_seconds, copy_seconds
from gnomon.prices.curves import curves_for
from gnomon.prices.host import check_s
from gnomon.prices.links import axis_link
from gnomon.prices.optimizer import measured_update, norm_seconds, optimizer_seconds, orthogonal_dtype
from gnomon.prices.stream import stream_seconds
from gnomon.sharding.matrices import UpdateCollective, matrices_of
from gnomon.sharding.parameters import waiting_bytes
from gnomon.software import Stack
from gnomon.units import distinct

HOST_ADAM_S = 0.7e-9
"""Seconds a parameter of a vectorised Adam on all cores of a server: 8.2 s for 11.6 billion (DeepSpeed's figure)."""


HOST_BYTES_PER_S = 100e9
"""Bytes a second of a server's memory, where nobody says."""

ADDED_BYTES = 10
"""Bytes that are moved to add a gradient of two bytes to one of four: both read, one written."""

REACHED = 0.5
"""Share of the host memory's bandwidth that such a sum is taken to reach; not measured."""


def update_parts(
    stage: StagePrice, layers: Sequence[tuple[LayerPrice, int]], stack: Stack, *, whole: bool
) -> tuple[float, int, float]:
    """Returns (device seconds, launches, seconds before them) of an update of a stage's layers. whole: they are all of
    them."""
    optimizer, precision = stage.plan.optimizer, stage.plan.precision
    updated, share = stage.updated_elements(), 1.0
    if not whole:
        # Layer by layer each takes its share of the stage's owned elements and tensors.
        share = sum(len(p.sharded.block.parameters) for p, _ in layers) / max(stage.num_tensors, 1)
        elements = sum(parameter_elements(price) * times for price, times in layers)
        updated = updated * elements // max(sum(stage.elements), 1)
    price = optimizer_seconds(
        max(updated, 1),
        optimizer,
        precision,
        stage.device,
        curves_for(stage.device),
        stack,
        tensors=max(1, round(stage.num_tensors * share)),
        matrices=_matrices(stage, layers),
    )
    before = 0.0
    if optimizer.zero < 3:  # eight-bit weights are kept over the microbatches of a step
        before = sum(float(layer.weight_cast.device_s) * times for layer, times in layers)
    for layer, times in layers:
        for collective in stage.collectives(layer):
            if collective.when == "before_step":
                before += times * float(
                    collective_seconds(collective.kind, collective.bytes, stage.links["+".join(collective.axes)])
                )
    return float(price.device_s), price.kernels, before + exchanged_s(stage, layers)


def exchanged_s(stage: StagePrice, layers: Sequence[tuple[LayerPrice, int]]) -> float:
    """Seconds of the collectives inside an update of these layers; of one on the host as if its ranks had the links of
    their devices."""
    return sum(
        float(collective_seconds(one.kind, one.bytes, stage.link_of(one.axes))) * times
        for one, times in in_update(stage, layers)
    )


def in_update(stage: StagePrice, layers: Sequence[tuple[LayerPrice, int]]) -> Iterator[tuple[UpdateCollective, int]]:
    """Collectives inside an update of these layers, and how often each is there."""
    # Collectives of one part over the same axes go together; those of single matrices one by one.
    together: dict[tuple[str, tuple[str, ...]], UpdateCollective] = {}
    for layer, times in layers:
        for one in stage.update_collectives(layer):
            if one.part == "matrix":
                yield one, times
                continue
            at = one.part, one.axes
            before = together[at].bytes if at in together else 0
            together[at] = replace(one, bytes=before + one.bytes * times)
    yield from ((one, 1) for one in together.values())


def _matrices(stage: StagePrice, layers: Sequence[tuple[LayerPrice, int]]) -> list[tuple[int, int, int]]:
    """(count, rows, columns) of what a rank makes orthogonal: of its share of the elements."""
    counts: dict[tuple[int, int], int] = {}
    for layer, times in layers:
        for count, rows, columns in stage.update_matrices(layer):
            counts[rows, columns] = counts.get((rows, columns), 0) + count * times
    # ZeRO divides elements, so of each shape's matrices this rank has a share.
    share = stage.updated_elements() / max(sum(stage.elements), 1)
    return [(ceil(count * share), rows, columns) for (rows, columns), count in counts.items()]


def inside_update(stage: StagePrice, layers: Sequence[tuple[LayerPrice, int]]) -> int:
    """Bytes that an update of these layers makes on its way where it looks at whole matrices.

    Projected gradients: the largest matrix's update, and, every so often, what its singular vectors take. Muon: the
    gathered update under ZeRO 2 and 3 (under 1 it lies where the whole gradient did); of the largest matrix
    its parts and the whole under tensor parallelism, and what the iteration holds: four of it and three squares of its
    shorter side. Adafactor: two arrays of the largest matrix's size.
    """
    optimizer, precision = stage.plan.optimizer, stage.plan.precision
    if optimizer.low_rank is not None:
        shapes = [(rows, columns) for layer, _ in layers for _, rows, columns in stage.update_matrices(layer)]
        return max((_projecting(shape, optimizer.low_rank, precision) for shape in shapes), default=0)
    if optimizer.kind not in ("adafactor", "muon") or optimizer.offload is not None:
        return 0
    if optimizer.kind == "adafactor":
        sizes = [m.elements // m.count for layer, _ in layers for m in matrices_of(layer.sharded, stage.mesh)]
        return 2 * max(sizes, default=0) * max(4, DTYPE_BITS[precision.states] // 8)
    found = list(in_update(stage, layers))
    gathered = sum(one.bytes for one, _ in found if one.part == "shards") if optimizer.zero >= 2 else 0
    parts = 2 * max((one.bytes for one, _ in found if one.part == "matrix"), default=0)
    width = orthogonal_dtype(stage.device)
    matrices = [matrix for layer, _ in layers for matrix in stage.update_matrices(layer)]
    # Newton-Schulz: four arrays of the matrix's size and three squares of its shorter side, at once.
    inside = [count * (4 * rows * columns + 3 * min(rows, columns) ** 2) for count, rows, columns in matrices]
    return gathered + parts + max(inside, default=0) * DTYPE_BITS[width] // 8


def _projecting(shape: tuple[int, int], low_rank: LowRank, precision: Precision) -> int:
    """Bytes of a matrix's update from its projected gradient, or of its gradient's singular vectors: a copy in fp32,
    which the decomposition overwrites, and both sides of them."""
    rows, columns = shape
    update = 2 * rows * columns * (DTYPE_BITS[precision.grad] // 8)
    if low_rank.projection == "random":
        return update
    short = min(rows, columns)
    return max(update, 4 * (2 * rows * columns + short * short + short * short))


def norm_s(stage: StagePrice, cluster: Cluster, stack: Stack) -> float:
    """Seconds of reading a rank's gradients, and of an all-reduce of one number over all ranks."""
    count = stage.updated_elements()
    if stage.plan.optimizer.offload is not None:  # gradients add to it as they are made
        count = 0
    own = float(norm_seconds(count, stage.plan.precision, stage.device, curves_for(stage.device)))
    plan = stage.plan
    count = plan.num_devices
    if count < 2:
        return own
    return own + _meeting_s(cluster, plan.placement, plan.world_size) + check_s(stack, count)


@lru_cache(maxsize=64)
def _meeting_s(cluster: Cluster, placement: tuple[int, ...], ranks: int) -> float:
    """Seconds in which all devices of a plan add up one number."""
    devices = distinct(np.array(placement or range(ranks)))
    return float(collective_seconds("all_reduce", 8, axis_link(cluster, devices[None, :])))


def on_host_s(
    kind: str, stage: StagePrice, layers: Sequence[tuple[LayerPrice, int]], cluster: Cluster, *, streamed: bool = False
) -> float:
    """Seconds of `D2H` and `H2D`, copies over the host link; of `HOST_OPT` and `HOST_ADD`, the update and a sum of
    gradients on the host's cores, which the ranks of a node share. streamed: gradients go down as they are made."""
    if kind == "H2D" and stage.plan.optimizer.offload_parameters:  # they are where they wait
        return parameters_back_s(stage, layers, cluster)
    elements = sum(n * parameter_elements(layer) for layer, n in layers)
    share = stage.updated_elements() / max(sum(stage.elements), 1)
    if kind in ("HOST_OPT", "HOST_ADD"):
        node = _node(stage, cluster)
        sharers = min(node.count, stage.plan.world_size)
        # Moved bytes over the share of bandwidth that a sum reaches.
        added = ADDED_BYTES / (REACHED * (node.host_memory_bytes_per_s or HOST_BYTES_PER_S))
        usual = elements * share * sharers * (HOST_ADAM_S if kind == "HOST_OPT" else added)
        return max(usual, _by_processor_s(kind, stage, elements * share))
    dtype = stage.plan.precision.grad if kind == "D2H" else stage.plan.precision.param
    if streamed and kind == "D2H" and stage.mesh.data_ranks * stage.mesh.cp == 1:  # as the backward makes it
        dtype = min((dtype, stage.plan.precision.param), key=lambda name: DTYPE_BITS[name])
    return host_copy_s(stage, cluster, elements * share * (DTYPE_BITS[dtype] // 8))


def _by_processor_s(kind: str, stage: StagePrice, elements: float) -> float:
    """Seconds of an update on the host, or of a sum of gradients, where a processor that was measured is device and
    host in one; 0 elsewhere."""
    device, precision = stage.device, stage.plan.precision
    if device.measured is None or not elements:
        return 0.0
    if kind == "HOST_OPT":
        price = measured_update(elements, stage.plan.optimizer, precision, device.measured)
        return 0.0 if price is None else float(price.device_s)
    grad = elements * (DTYPE_BITS[precision.grad] // 8)
    return float(stream_seconds(2 * grad, grad, device, curves_for(device)))


def parameters_s(
    stage: StagePrice, layers: Sequence[tuple[LayerPrice, int]], cluster: Cluster, *, copies: bool = True
) -> float:
    """Seconds of copying a rank's part of the parameters of some layers from the host, where they wait there, and of
    reading it from the node's disk first, where they wait there; 0 where not. copies: else without the copies.

    On the stream that gathers them, before they are gathered: DeepSpeed's `all_gather_coalesced` (deepspeed/runtime/
    zero/partition_parameters.py, edaa722) issues both there, and torch's FSDP2 its copy before its all-gather.
    """
    read = disk_s(stage, cluster, _waiting(stage, layers, trained=False), write=False)
    return read + (_parameter_copies_s(stage, layers, cluster, trained=False) if copies else 0.0)


def parameters_back_s(stage: StagePrice, layers: Sequence[tuple[LayerPrice, int]], cluster: Cluster) -> float:
    """Seconds of copying updated parameters from the device to the host, where they wait there; and in before, where
    there is no other copy of them to update (`master = none`). On a disk, whose file is mapped into memory, pages are
    read before they are written. Where the host updates it is the disk alone."""
    size = _waiting(stage, layers, trained=True)
    disk = disk_s(stage, cluster, size, write=False) + disk_s(stage, cluster, size, write=True)
    if stage.plan.optimizer.offload is not None:
        return disk
    ways = 2 if stage.plan.precision.master == "none" else 1
    return ways * _parameter_copies_s(stage, layers, cluster, trained=True) + disk


def _parameter_copies_s(
    stage: StagePrice, layers: Sequence[tuple[LayerPrice, int]], cluster: Cluster, *, trained: bool
) -> float:
    size = _waiting(stage, layers, trained=trained)
    return host_copy_s(stage, cluster, size) if size else 0.0


def _waiting(stage: StagePrice, layers: Sequence[tuple[LayerPrice, int]], *, trained: bool) -> int:
    """Bytes of a rank's part of the parameters of some layers that wait away from the device."""
    if not stage.plan.optimizer.offload_parameters:
        return 0
    mesh, precision = stage.mesh, stage.plan.precision
    return sum(n * waiting_bytes(layer.sharded, mesh, precision, trained=trained) for layer, n in layers)


def disk_s(stage: StagePrice, cluster: Cluster, size: float, *, write: bool) -> float:
    """Seconds in which each rank of a node reads or writes so many bytes of parameters that wait on its disk, all at
    once; 0 where they do not. UnpricedError for a node whose disk nobody described."""
    if stage.plan.optimizer.parameter_tier != "disk" or not size:
        return 0.0
    node = _node(stage, cluster)
    rate = node.disk_write_bytes_per_s if write else node.disk_read_bytes_per_s
    if rate is None:
        raise UnpricedError(
            f"node {node.name!r} does not say how fast its disk is; `gnomon calibrate` measures this machine's, and a "
            "cluster file gives disk_read_bytes_per_s and disk_write_bytes_per_s of the node"
        )
    return size * min(node.count, stage.plan.world_size) / rate


def host_copy_s(stage: StagePrice, cluster: Cluster, size: float) -> float:
    """Seconds of a copy between a stage's device and its host, all devices of the node copying at once. Where a
    processor that was measured is both, it is as fast as such a copy there; no price is under that of the link, which
    searches take as a bound."""
    link = float(copy_seconds(size, _node(stage, cluster)))
    if stage.device.measured is None or not size:
        return link
    return max(link, float(stream_seconds(size, size, stage.device, curves_for(stage.device))))


def _node(stage: StagePrice, cluster: Cluster) -> Node:
    return cluster.node_with(stage.device.name)
