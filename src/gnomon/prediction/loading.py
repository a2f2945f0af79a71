"""What loading a pretrained model takes, before the first step: of the host's memory, and of a device's.

`loading(prediction)` counts copies of the model that ranks of a node hold on the host, by how the program loads
(`Stack.loads`), and on a device its shard with the largest layer whole, where training keeps parameters elsewhere.
`host_short(prediction)` says what host memory lacks, of training and of loading. Leaves out what the page cache holds
of files, and the optimizer, which is made later.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gnomon.errors import CatalogueError
from gnomon.hardware import Node, catalogue
from gnomon.prediction.host_memory import host_memory
from gnomon.prediction.predict import Prediction
from gnomon.prediction.stage import StagePrice, width
from gnomon.sharding.parameters import frozen_bytes, local_elements, whole_bytes

FILE_BYTES = 5 * 10**9
"""A file of a checkpoint on the hub, at most, as transformers writes it before release 5."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """Bytes while weights are loaded, of the busiest node and of the tightest rank."""

    host_bytes: int
    """Of a node's memory; 0 where it is not known how the program loads."""
    device_bytes: int
    """Of a device's memory, with what lies outside tensors."""
    how: str
    """Whose copies they are, in words; empty with 0 bytes."""


HOW = {
    "each_rank": "a copy of the model on each rank, before it is divided",
    "first_rank": "a copy of the model on one rank, which sends the others their shards",
    "by_file": "a file of the checkpoint on each rank at a time",
}


def loading(prediction: Prediction) -> Loading:
    """Adds up what loading a model's weights takes of a rank and of its host."""
    pricing = prediction.pricing
    ranks = max(node.count for node in pricing.cluster.node_kinds)
    how = pricing.stack.workspace.loads
    whole = sum(_whole_bytes(stage) for stage in pricing.stages)
    copies = {"each_rank": ranks * whole, "first_rank": whole, "by_file": ranks * min(FILE_BYTES, whole), None: 0}
    outside = prediction.tightest.by_class.get("overhead", 0)
    device = max(_shard_bytes(stage) + max(_layers_bytes(stage), default=0) for stage in pricing.stages)
    return Loading(host_bytes=copies[how], device_bytes=int(device + outside), how="" if how is None else HOW[how])


def host_needed(prediction: Prediction) -> int:
    """Bytes of a node's host memory, at most: while it trains, or while it loads."""
    return max(host_memory(prediction).bytes, loading(prediction).host_bytes)


def host_short(prediction: Prediction, limit_bytes: int | None = None) -> str:
    """What a plan's host memory lacks; empty where it is enough, or nobody says how much there is. Of a node with only
    some of its devices, such as one V100 of a DGX-1, all of the node's memory may be used. limit_bytes: what may be
    filled where host and device are one memory, if that is less than a rank has."""
    host = host_memory(prediction)
    limit = min(host.both_limit_bytes, limit_bytes or host.both_limit_bytes)
    if host.both_bytes > limit:
        return f"with the host's {host.both_bytes / 2**30:.1f} of {limit / 2**30:.1f} GiB"
    known, needed = host_limit(prediction), host_needed(prediction)
    if known is None or needed <= known:
        return ""
    when = " while it loads" if needed > host.bytes else ""
    return f"host {needed / 2**30:.0f} of {known / 2**30:.0f} GiB{when}"


def host_limit(prediction: Prediction) -> int | None:
    """Bytes of a node's host memory, of the node with the least; None where nobody says."""
    whole = [_of_whole_node(node) for node in prediction.pricing.cluster.node_kinds]
    known = [size for size in whole if size is not None]
    return min(known) if len(known) == len(whole) else None


def _of_whole_node(node: Node) -> int | None:
    """Host memory of the node in the catalogue that a smaller one was cut from; its own where there is none."""
    try:
        whole = catalogue.node(node.name)
    except CatalogueError:
        return node.host_memory_bytes
    same = whole.device.name == node.device.name
    # 0 stands for unknown here, and goes back to None.
    return max(whole.host_memory_bytes or 0, node.host_memory_bytes or 0) or None if same else node.host_memory_bytes


def _layers_bytes(stage: StagePrice) -> list[int]:
    """Parameters of each kind of layer on one rank before ZeRO divides them, as they are loaded."""
    size = width(stage.plan.precision.compute)
    out = []
    for price, _ in stage.layers:
        trained = sum(local_elements(price.sharded, experts=experts) for experts in (False, True)) * size
        out.append(trained + sum(frozen_bytes(price.sharded, experts=experts) for experts in (False, True)))
    return out


def _whole_bytes(stage: StagePrice) -> int:
    """All parameters of a stage, as they are loaded."""
    dtype = stage.plan.precision.compute
    return sum(whole_bytes(price.sharded, dtype) * len(labels) for price, labels in stage.layers)


def _shard_bytes(stage: StagePrice) -> int:
    """A rank's parameters where they are on the device, whatever the plan does with them later."""
    optimizer = replace(stage.plan.optimizer, offload_parameters=False)
    return replace(stage, plan=replace(stage.plan, optimizer=optimizer)).static_bytes()["parameters"]
