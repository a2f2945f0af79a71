"""What a collective over one group of ranks runs over: how the group lies on nodes, and the links inside and between.

`axis_link(cluster, groups)` looks at all groups of an axis, which work at the same time, and returns the slowest one's
`AxisLink`: frozen, hashable, all that the price of a collective depends on besides its kind and bytes. All rates are
peaks. Leaves out algorithms and sizes (`collectives`), groups of other axes that are busy at the same moment, and the
network beyond one factor of oversubscription.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, lru_cache

import numpy as np
from numpy.typing import NDArray

from gnomon.errors import InputError, UnpricedError
from gnomon.hardware import Cluster, Measured, Node
from gnomon.units import BytesPerS, Seconds, distinct

Ranks = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisLink:
    """One group of ranks as its collectives see it. Rates are peaks in one direction."""

    ranks: int
    """Number of ranks in the group."""
    nodes: int
    """Number of nodes that it spans."""
    ranks_per_node: int
    """The most of its ranks on one node."""
    arch: str
    """Generation of the devices on its slowest node."""
    inside_kind: str
    """Kind of the link inside a node; empty where no two of its ranks share a node."""
    inside_name: str
    """Name of that link in the catalogue; measured efficiencies are kept by it."""
    inside_bytes_per_s: BytesPerS
    """What one device can send to its peers of the group inside the node, in a ring; 0 where it has none."""
    inside_latency_s: Seconds
    """Seconds of an empty message inside the node."""
    switch_sums: bool
    """Whether switches inside the node add up data in flight."""
    pair_bytes_per_s: BytesPerS
    """What one of its ranks can send to one other, on the slowest of its hops."""
    across_kind: str = ""
    """Kind of the network; empty inside one node."""
    across_name: str = ""
    """Name of the network in the catalogue."""
    across_bytes_per_s: BytesPerS = 0.0
    """What all its ranks on one node can send out of it together, the other groups there having their share."""
    across_latency_s: Seconds = 0.0
    """Seconds of an empty message between nodes."""
    sharers: int = 1
    """Groups of the axis that leave the same node, this one included."""
    measured: Measured | None = None
    """Seconds of collectives inside this very node, where they were measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """The places of the devices of a cluster, as arrays over devices or nodes."""

    node_of: Ranks
    """[devices] node of each."""
    kind_of: Ranks
    """[nodes] index into `kinds`."""
    kinds: tuple[Node, ...]
    """Kinds of nodes, one for each group of the cluster."""


def axis_link(cluster: Cluster, groups: Ranks) -> AxisLink:
    """The slowest of `groups`, all communicating at once.

    groups: devices of the cluster, shape (groups, ranks of each), as `View.groups` makes them. A node's network ports
    are divided evenly over the groups with ranks on it and elsewhere; a group cannot use more ports than its devices
    have. Slowest is the least rate of its slowest hop, then the most nodes, then the longest latency; every figure is
    of that one group. InputError for groups of one rank or devices that do not exist; UnpricedError for a group that
    spans nodes without network ports.
    """
    layout = _layout(cluster)
    if groups.ndim != 2 or groups.shape[1] < 2 or not len(groups):
        raise InputError(f"a collective needs groups of two ranks or more, got an array of shape {groups.shape}")
    if groups.min() < 0 or groups.max() >= len(layout.node_of):
        raise InputError(
            f"groups name device {groups.max() if groups.min() >= 0 else groups.min()}, but cluster {cluster.name!r} "
            f"has {len(layout.node_of)} devices, from 0"
        )
    if len(cluster.groups) == 1:  # nodes are alike: the answer is the same some whole nodes further on
        # Shifting all groups by whole nodes changes nothing, so equal stages share one cached answer.
        size = cluster.groups[0].node.count
        moved = groups - groups.min() // size * size
        return _slowest(cluster, np.ascontiguousarray(moved, dtype=np.int64).tobytes(), groups.shape)
    return _slowest(cluster, np.ascontiguousarray(groups, dtype=np.int64).tobytes(), groups.shape)


@lru_cache(maxsize=4096)
def _slowest(cluster: Cluster, devices: bytes, shape: tuple[int, int]) -> AxisLink:
    """The link of groups given as bytes, so that the stages of a pipeline share one answer."""
    layout, groups = _layout(cluster), np.frombuffer(devices, np.int64).reshape(shape)
    num_nodes = len(layout.kind_of)
    # One entry for each pair (group, node that it has ranks on), in order of groups.
    # key = group x nodes + node: unique keys are the (group, node) pairs, their counts the ranks there.
    rows = np.arange(len(groups), dtype=np.int64)[:, None] * num_nodes
    key, members = np.unique(rows + layout.node_of[groups], return_counts=True)
    group, node = np.divmod(key, num_nodes)
    # spans: nodes of each group; only groups on several nodes leave theirs and share its ports.
    spans = np.bincount(group, minlength=len(groups))
    leaves = spans[group] > 1
    sharers = np.bincount(node[leaves], minlength=num_nodes)[node]
    kind = layout.kind_of[node]
    inside = _inside_rates(layout.kinds, kind, members)
    across = np.where(leaves, _across_rates(cluster, layout.kinds, kind, members, sharers, leaves), np.inf)
    # lone: what a single rank can send out, for point-to-point messages.
    lone = _across_rates(cluster, layout.kinds, kind, np.ones_like(members), sharers, leaves)
    near = np.where(members > 1, np.array([n.pair_rate_bytes_per_s for n in layout.kinds])[kind], np.inf)
    pair = np.minimum(np.where(leaves, lone, np.inf), near)
    latency = np.array([n.nic.latency_s if n.nic else 0.0 for n in layout.kinds])[kind] * leaves
    # starts: first pair of each group. reduceat gives each group's slowest hop; lexsort orders by it, then most nodes,
    # then latency.
    starts = np.flatnonzero(np.r_[True, group[1:] != group[:-1]])
    slowest_hop = np.minimum.reduceat(np.minimum(inside, across), starts)
    slowest = int(np.lexsort((-np.maximum.reduceat(latency, starts), -spans, slowest_hop))[0])
    mine = slice(int(starts[slowest]), int(starts[slowest]) + int(spans[slowest]))
    link = _describe(
        layout.kinds, groups.shape[1], kind[mine], members[mine], inside[mine], across[mine], sharers[mine]
    )
    return replace(link, pair_bytes_per_s=float(pair[mine].min()))


def _describe(
    kinds: tuple[Node, ...],
    ranks: int,
    kind: Ranks,
    members: Ranks,
    inside: NDArray[np.float64],
    across: NDArray[np.float64],
    sharers: Ranks,
) -> AxisLink:
    """The AxisLink of one group, given one entry a node that it has ranks on."""
    in_node, out = int(np.argmin(inside)), int(np.argmin(across))
    within, leaving = kinds[int(kind[in_node])], kinds[int(kind[out])]
    has_peers, spans = bool(np.isfinite(inside[in_node])), len(members) > 1
    nic = leaving.nic if spans else None
    return AxisLink(
        ranks=ranks,
        nodes=len(members),
        ranks_per_node=int(members.max()),
        arch=(within if has_peers else leaving).device.arch,
        inside_kind=within.intra.kind if has_peers else "",
        inside_name=within.intra.name if has_peers else "",
        inside_bytes_per_s=float(inside[in_node]) if has_peers else 0.0,
        inside_latency_s=within.intra.latency_s if has_peers else 0.0,
        pair_bytes_per_s=0.0,
        # In-switch reduction needs every node of the group to have it.
        switch_sums=has_peers and all(_switch_sums(kinds[k]) for k in set(kind.tolist())),
        across_kind=nic.kind if nic else "",
        across_name=nic.name if nic else "",
        across_bytes_per_s=float(across[out]) if nic else 0.0,
        across_latency_s=max(_latency(kinds[k]) for k in set(kind.tolist())) if nic else 0.0,
        sharers=int(sharers[out]) if nic else 1,
        measured=within.device.measured if has_peers and not spans else None,
    )


def _latency(node: Node) -> float:
    return node.nic.latency_s if node.nic else 0.0


def _switch_sums(node: Node) -> bool:
    return node.topology == "switch" and node.intra.kind == "nvlink" and node.device.generation.switch_sums


@cache
def _layout(cluster: Cluster) -> _Layout:
    counts = np.array([group.count for group in cluster.groups])
    kind_of = np.repeat(np.arange(len(counts)), counts)
    sizes = np.array([group.node.count for group in cluster.groups])[kind_of]
    node_of = np.repeat(np.arange(len(kind_of)), sizes)
    return _Layout(node_of=node_of, kind_of=kind_of, kinds=tuple(group.node for group in cluster.groups))


def _inside_rates(kinds: tuple[Node, ...], kind: Ranks, members: Ranks) -> NDArray[np.float64]:
    """What a device can send to its peers on the node, for each pair (group, node); infinite where it has none."""
    rates = np.full(len(members), np.inf)
    for k, m in {(int(k), int(m)) for k, m in zip(*_distinct(kind, members), strict=True)}:
        if m > 1:
            rates[(kind == k) & (members == m)] = _ring_rate(kinds[k], m)
    return rates


def _distinct(kind: Ranks, members: Ranks) -> tuple[Ranks, Ranks]:
    most = int(members.max()) + 1
    return np.divmod(distinct(kind * most + members), most)


def _ring_rate(node: Node, ranks: int) -> float:
    """What each device can send to the rest of its group in one node.

    Only links to members count: in a mesh one a peer; in a torus two, as a group smaller than the node is taken to lie
    along one axis; in a ring of uneven links (DGX-1) one a peer at least.
    """
    whole = ranks >= node.count and node.topology != "mesh"
    if node.topology in ("switch", "bus") or whole:
        return node.intra.bytes_per_s
    peers = min(ranks - 1, 2) if node.topology in ("torus2d", "torus3d") else ranks - 1
    return min(node.pair_rate_bytes_per_s * peers, node.intra.bytes_per_s)


def _across_rates(
    cluster: Cluster,
    kinds: tuple[Node, ...],
    kind: Ranks,
    members: Ranks,
    sharers: Ranks,
    leaves: NDArray[np.bool_],
) -> NDArray[np.float64]:
    """What the ranks of a group on a node can send out of it, for each pair (group, node)."""
    for k in distinct(kind[leaves]).tolist():
        if kinds[k].nic is None:
            raise UnpricedError(
                f"groups span several nodes, but node {kinds[k].name!r} of cluster {cluster.name!r} has no network "
                "port; give it `nic` and `nics`"
            )
    total = np.array([node.nic_bytes_per_s for node in kinds])[kind]
    port = np.array([node.nic.bytes_per_s if node.nic else 0.0 for node in kinds])
    # A device drives its own ports only: a lone rank of a node with 8 ports for 8 devices gets one, idle or not.
    own = np.array([max(1.0, node.nics / node.count) for node in kinds]) * port
    shared: NDArray[np.float64] = np.minimum(total / np.maximum(sharers, 1), own[kind] * members)
    return shared / cluster.oversubscription
