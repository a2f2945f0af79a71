"""What a collective over one group of ranks runs over: how the group lies on nodes, and the links inside and between.

`axis_link(cluster, groups)` looks at all groups of an axis (they work at the same time) and returns the slowest one's
`AxisLink`: frozen, hashable, all that the price of a collective depends on beside its bytes. Leaves out algorithms and
sizes (`collectives`), routing and congestion in the network beyond one factor of oversubscription.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gnomon.errors import UnpricedError
from gnomon.hardware import Cluster, Node


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class AxisLink:
    """One group of ranks as its collectives see it. Rates are peaks of one device in one direction."""

    ranks: int
    """Ranks in the group."""
    nodes: int
    """Nodes that it spans."""
    ranks_per_node: int
    """Most ranks of it on one node."""
    inside_kind: str
    """Kind of the link inside a node."""
    inside_bytes_per_s: float
    """What one device can send to its peers of the group inside the node."""
    inside_latency_s: float
    arch: str
    """Generation of the devices; efficiencies are kept by it."""
    across_kind: str = ""
    """Kind of the network; empty inside one node."""
    across_bytes_per_s: float = 0.0
    """What all ranks of the group on one node can send out of it together, other groups having their share."""
    across_latency_s: float = 0.0


def axis_link(cluster: Cluster, groups: NDArray[np.int64]) -> AxisLink:
    """The slowest of `groups` (shape: groups x ranks of each, as devices of the cluster), all communicating at once.

    A node's network ports are divided over the groups that cross its boundary. UnpricedError for groups of one rank.
    """
    if groups.ndim != 2 or groups.shape[1] < 2:
        raise UnpricedError(f"a collective needs groups of two ranks or more, got an array of shape {groups.shape}")
    counts = [group.count * group.node.count for group in cluster.groups]
    per_node = np.concatenate([np.full(c, g.node.count) for c, g in zip(counts, cluster.groups, strict=True)])
    sizes = np.concatenate([np.full(g.count, g.node.count) for g in cluster.groups])
    node_of = np.repeat(np.arange(len(sizes)), sizes)
    assert len(per_node) == len(node_of)
    nodes = np.sort(node_of[groups], axis=1)
    spans = 1 + (nodes[:, 1:] != nodes[:, :-1]).sum(axis=1)
    index = np.arange(len(groups))
    flat = nodes + index[:, None] * len(sizes)
    _, members = np.unique(flat, return_counts=True)
    most = int(members.max())
    least = int(members.min())
    kinds = {int(i): cluster.nodes[i] for i in {int(nodes[0, 0]), int(nodes[-1, -1]), *_kinds(cluster, nodes)}}
    slowest = min(kinds.values(), key=lambda node: (node.nic_bytes_per_s, node.intra.bytes_per_s))
    span = int(spans.max())
    crossing = nodes[spans > 1]
    across = 0.0
    if span > 1:
        if slowest.nic is None:
            raise UnpricedError(f"groups span {span} nodes, but node {slowest.name!r} has no network port")
        sharing = np.bincount(np.unique(crossing + np.flatnonzero(spans > 1)[:, None] * len(sizes)) % len(sizes)).max()
        own = max(1.0, slowest.nics / slowest.count) * max(least, 1) * slowest.nic.bytes_per_s
        across = min(slowest.nic_bytes_per_s / int(sharing), own) / cluster.oversubscription
    return AxisLink(
        ranks=groups.shape[1],
        nodes=span,
        ranks_per_node=most,
        inside_kind=slowest.intra.kind,
        inside_bytes_per_s=_inside(slowest, most),
        inside_latency_s=slowest.intra.latency_s,
        arch=slowest.device.arch,
        across_kind=slowest.nic.kind if span > 1 and slowest.nic else "",
        across_bytes_per_s=across,
        across_latency_s=slowest.nic.latency_s if span > 1 and slowest.nic else 0.0,
    )


def _kinds(cluster: Cluster, nodes: NDArray[np.int64]) -> set[int]:
    """One node of each group of the cluster that the ranks touch."""
    touched, first = set(np.unique(nodes).tolist()), 0
    found = set()
    for group in cluster.groups:
        mine = [n for n in range(first, first + group.count) if n in touched]
        found.update(mine[:1])
        first += group.count
    return found


def _inside(node: Node, ranks: int) -> float:
    """What one device can send to `ranks` - 1 peers in its node."""
    if node.topology in ("switch", "bus") or ranks >= node.count and node.topology != "mesh":
        return node.intra.bytes_per_s
    peers = min(max(ranks - 1, 1), 2) if node.topology in ("torus2d", "torus3d") else max(ranks - 1, 1)
    return min(node.pair_rate_bytes_per_s * peers, node.intra.bytes_per_s)
