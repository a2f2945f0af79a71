"""A cluster with faster or slower links, or with other memory: the same machines as they might be.

`scaled` multiplies bandwidths and replaces the memory of devices. Latencies, counts and everything else stay. Leaves
out machines that were measured: their links are measured points, which a factor would not reach.
"""

from __future__ import annotations

from dataclasses import replace

from gnomon.errors import InputError
from gnomon.hardware.types import Cluster, Link, Node


def scaled(cluster: Cluster, *, network: float = 1.0, links: float = 1.0, memory_bytes: int | None = None) -> Cluster:
    """network: factor on the bandwidth of network ports. links: factor on that between the devices of a node.
    memory_bytes: of every device. InputError for a factor that is not positive, or a node without network ports."""
    for name, factor in (("network", network), ("links", links)):
        if not 0 < factor < float("inf"):
            raise InputError(f"{name} is scaled by {factor:g}; give a positive factor, as in 0.5 or 2")
    if links != 1 and any(group.node.device.measured is not None for group in cluster.groups):
        raise InputError(f"links of {cluster.name} were measured on this machine and cannot be scaled; vary others")
    if network != 1 and all(group.node.nic is None for group in cluster.groups):
        raise InputError(f"{cluster.name} has no network between nodes to scale; vary links instead")

    def changed(node: Node) -> Node:
        nic = None if node.nic is None else _scaled(node.nic, network)
        device = node.device if memory_bytes is None else replace(node.device, memory_bytes=memory_bytes)
        pair = None if node.pair_bytes_per_s is None else node.pair_bytes_per_s * links
        return replace(node, device=device, nic=nic, intra=_scaled(node.intra, links), pair_bytes_per_s=pair)

    return replace(cluster, groups=tuple(replace(group, node=changed(group.node)) for group in cluster.groups))


def _scaled(link: Link, factor: float) -> Link:
    return replace(link, bytes_per_s=link.bytes_per_s * factor)
