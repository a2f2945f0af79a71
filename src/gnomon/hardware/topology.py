"""Where ranks stand in a Cluster, and what lies between them.

`place` finds a rank's node, `link_between` the path of two ranks, `link_behind` the slowest hop of a group of ranks and
how many groups share it. All are pure and return peaks. Left out: switch trees inside the network (one factor of
oversubscription stands for them), routing and congestion; those belong to the prices of collectives.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from gnomon.errors import InputError
from gnomon.hardware.types import Cluster, Device, Link, Node


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank stands."""

    rank: int
    """In the cluster."""
    group: int
    """Index into `Cluster.groups`."""
    node_index: int
    """Of its node among all nodes."""
    local_rank: int
    """Among the devices of its node."""
    node: Node
    """The node."""

    @property
    def device(self) -> Device:
        """The device."""
        return self.node.device


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """A path between two ranks, or the slowest part of a group's ring."""

    link: Link
    """The slowest link on it."""
    bytes_per_s: float
    """One direction, for this pair or this group's ring; see the function that made it."""
    latency_s: float
    """Of the link."""
    num_nodes: int
    """Nodes that the ranks are spread over."""
    ranks_per_node: int
    """Most ranks of the group that stand on one node."""
    sharers: float
    """Groups of this shape that use the same node's ports at the same time; 1 inside a node."""


def place(cluster: Cluster, rank: int) -> Place:
    """Where `rank` stands. InputError if the cluster has no such rank."""
    if not 0 <= rank < cluster.num_devices:
        raise InputError(f"rank {rank} is not in cluster {cluster.name!r}, which has {cluster.num_devices} devices")
    starts = [0, *accumulate(group.count * group.node.count for group in cluster.groups)]
    first_nodes = [0, *accumulate(group.count for group in cluster.groups)]
    group = bisect_right(starts, rank) - 1
    node = cluster.groups[group].node
    node_in_group, local_rank = divmod(rank - starts[group], node.count)
    return Place(
        rank=rank, group=group, node_index=first_nodes[group] + node_in_group, local_rank=local_rank, node=node
    )


def link_between(cluster: Cluster, a: int, b: int) -> Hop:
    """The path of two ranks with nothing else running.

    In a node: what one device can send another. Between nodes: the ports of one device, or one port where devices share
    them; the slower end counts. A rank and itself: InputError, there is no link.
    """
    one, two = place(cluster, a), place(cluster, b)
    if a == b:
        raise InputError(f"rank {a} has no link to itself")
    if one.node_index == two.node_index:
        return _inside(one.node, one.node.pair_rate_bytes_per_s, ranks=2)
    ends = [_across(cluster, node, ranks=1, sharers=1.0) for node in (one.node, two.node)]
    slower = min(ends, key=lambda hop: hop.bytes_per_s)
    return replace(slower, latency_s=max(hop.latency_s for hop in ends), num_nodes=2)


def link_behind(cluster: Cluster, ranks: Sequence[int], groups_per_node: float | None = None) -> Hop:
    """The slowest hop of a ring over `ranks` (any order; a ring visits node after node).

    groups_per_node: how many groups of this shape send out of a node at once; by default all its devices are busy, so
    a node of 8 with 2 ranks of the group carries 4 groups, and each ring crosses with a quarter of the node's ports.
    `bytes_per_s` is that share over the cluster's oversubscription, or what a device can send inside a node, whichever
    is less.
    InputError for fewer than two ranks, a rank named twice, or one that is not in the cluster.
    """
    if len(set(ranks)) < 2 or len(set(ranks)) != len(ranks):
        raise InputError(f"a group needs at least two ranks, each once; got {list(ranks)[:8]}")
    places = [place(cluster, rank) for rank in ranks]
    on_node = Counter(where.node_index for where in places)
    nodes = {where.node_index: where.node for where in places}
    most = max(on_node.values())
    inside = [_inside(nodes[i], _ring_bytes_per_s(nodes[i], k), ranks=k) for i, k in on_node.items() if k > 1]
    if len(nodes) == 1:
        return inside[0]
    across = []
    for i, k in on_node.items():
        sharers = nodes[i].count / k if groups_per_node is None else max(groups_per_node, 1.0)
        out = _across(cluster, nodes[i], ranks=k, sharers=sharers)
        across.append(replace(out, bytes_per_s=out.bytes_per_s / cluster.oversubscription))
    slowest = min([*across, *inside], key=lambda hop: hop.bytes_per_s)
    # A ring waits for its slowest hop in time too, whichever link limits its bandwidth.
    latency_s = max(hop.latency_s for hop in [*across, *inside])
    return replace(slowest, latency_s=latency_s, num_nodes=len(nodes), ranks_per_node=most)


def _inside(node: Node, bytes_per_s: float, ranks: int) -> Hop:
    return Hop(
        link=node.intra,
        bytes_per_s=bytes_per_s,
        latency_s=node.intra.latency_s,
        num_nodes=1,
        ranks_per_node=ranks,
        sharers=1.0,
    )


def _ring_bytes_per_s(node: Node, ranks: int) -> float:
    """What each device can send to the rest of its group.

    Only links to members count: in a mesh one a peer, in a torus the two of one axis (a smaller group than the whole
    node is taken to lie along one; slices under 4 chips an axis have fewer links than is assumed here), in a DGX-1's
    ring of uneven links one a peer at least.
    """
    whole = ranks == node.count and node.topology != "mesh"
    if node.topology in ("switch", "bus") or whole:
        return node.intra.bytes_per_s
    peers = min(ranks - 1, 2) if node.topology in ("torus2d", "torus3d") else ranks - 1
    return min(node.pair_rate_bytes_per_s * peers, node.intra.bytes_per_s)


def _across(cluster: Cluster, node: Node, ranks: int, sharers: float) -> Hop:
    """The crossing of one node's boundary by a group that has `ranks` on it, `sharers` groups at once.

    A device drives only its own ports: a lone rank of a node with 8 ports for 8 devices gets one, idle or not.
    """
    if node.nic is None:
        raise InputError(f"node {node.name!r} of cluster {cluster.name!r} has no network port")
    own_ports = max(1.0, node.nics / node.count) * ranks
    return Hop(
        link=node.nic,
        bytes_per_s=min(node.nic_bytes_per_s / sharers, own_ports * node.nic.bytes_per_s),
        latency_s=node.nic.latency_s,
        num_nodes=1,
        ranks_per_node=ranks,
        sharers=sharers,
    )
