"""Seconds of sending tokens to their experts with kernels that send a token once to each node: DeepEP, HybridEP.

A plain all-to-all sends a token once for each of its experts. These send it over the network once to each node that
holds one, and there over the links inside to each rank that does, both at once. `dispatch_seconds` is the price of
either way, since a combine is a dispatch backwards. `holders` counts nodes and ranks, exactly. HybridEP first gathers
a map of all ranks' tokens and experts, a byte for each, and sends a weight in fp32 for each expert of an NVLink domain
with a copy (`prediction.layer`). Sends in the dtype of activations: eight bits, which DeepEP can dispatch in, are an
option that no record of a stack states. Leaves out what its kernels take from computing, and that HybridEP's combine
may be slower than its links.
Source: DeepEP's README and tests (deepseek-ai/DeepEP), read 2026-11-22; DeepSeek-V3 (arXiv 2412.19437, section 3.2.2);
deepseek-ai/DeepEP 34152ae (Megatron-Bridge v0.5.0 and v0.6.0 docker/Dockerfile.ci) and 17cfb81 (Megatron-LM) csrc/
hybrid_ep/backend/hybrid_ep_backend.cuh, extension/allgather.cu, read 2026-11-23.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from math import comb
from typing import Any

import numpy as np

from gnomon.hardware import Cluster
from gnomon.prices.collectives import algorithm_costs, bound_seconds, collective_seconds
from gnomon.prices.links import AxisLink

RDMA_SHARE = ((2, 0.73), (4, 0.93))
"""(nodes, share of the ports' peak that leaves a node; beyond the last as there): 8 H100 with 8 ports of 400 Gb/s, 4096
tokens of 7168 to 8 of 256 experts on 4 nodes at most. Without what stays on the node, of 50 GB/s a device: on 2 nodes
40 (dispatch) and 33 (combine), on 4 nodes 47 and 47, on 8 nodes 47 and 47 (DeepEP README-NCCL.md 4580d73, NVSHMEM)."""

DISPATCH_SMS = 32
"""Multiprocessors that dispatch and combine hold while they run (NVIDIA-NeMo/Megatron-Bridge 067f987
src/megatron/bridge/perf_recipes/_common.py moe_hybridep_num_sms; DeepEP's own default is 20)."""

RDMA = ("infiniband", "roce")
"""The kinds of network that the share is for; over others the all-to-all's own price stands."""


def sends_once(cluster: Cluster) -> bool:
    """Whether such kernels run on the cluster's devices and links, as far as is known."""
    nodes = [group.node for group in cluster.groups]
    linked = all(node.device.generation.sends_once and node.device.fabric_bytes_per_s for node in nodes)
    return linked and (cluster.num_nodes == 1 or all(node.nic is not None and node.nic.kind in RDMA for node in nodes))


@lru_cache(maxsize=1024)
def holders(places: int, experts: int, topk: int, groups: int = 1, groups_per_token: int = 1) -> float:
    """Expected number of places (nodes or ranks) that hold one of a token's experts, at most min(places, topk).

    Experts lie in order, an equal part on each place. A token chooses `groups_per_token` of `groups` equal groups of
    consecutive experts, then topk experts of these, all choices alike: with one group, topk of all. By linearity the
    sum over places of 1 - P(none of its experts is chosen). Given that j chosen groups have o experts in common with a
    place, P = C(c - o, topk) / C(c, topk) with c experts in chosen groups; the ways to choose them are counted group by
    group. One group: places · (1 - C(experts - experts/places, topk) / C(experts, topk)).
    """
    # size: experts of a group; chosen: experts in the groups that a token chooses from.
    size = experts // groups
    chosen = size * groups_per_token
    # All choices are alike, so probabilities are counts: the denominator is C(groups, g) · C(chosen, topk).
    every = comb(groups, groups_per_token) * comb(chosen, topk)
    expected = Fraction(0)
    for place in range(places):
        low, high = place * experts // places, (place + 1) * experts // places
        # ways[(count, shared)]: number of ways to choose `count` of the groups that this place touches, which have
        # `shared` experts in common with it.
        ways, touched = {(0, 0): 1}, range(low // size, -(-high // size) if high > low else low // size)
        for group in touched:
            common = min(high, (group + 1) * size) - max(low, group * size)
            extended: dict[tuple[int, int], int] = defaultdict(int, ways)
            for (count, shared), number in ways.items():
                extended[count + 1, shared + common] += number
            ways = dict(extended)
        # No expert of the place is chosen: topk from the chosen groups' experts less the shared ones.
        none = sum(
            number * comb(groups - len(touched), groups_per_token - count) * comb(chosen - shared, topk)
            for (count, shared), number in ways.items()
            if count <= groups_per_token
        )
        expected += 1 - Fraction(none, every)
    return float(expected)


def dispatch_seconds(nbytes: Any, link: AxisLink, *, nodes: float, ranks: float) -> Any:
    """Seconds: a float, or an array as `nbytes` is one; never more than those of a plain all-to-all.

    nbytes: rows of one rank's tokens, a copy for each expert. nodes, ranks: copies that are sent to nodes and to ranks,
    over those, from 0 to 1.
    """
    plain = collective_seconds("all_to_all", nbytes, link)
    if link.nodes == 1:
        # In a node only copies to ranks matter: `ranks` of the rows are sent.
        return _less(plain, collective_seconds("all_to_all", nbytes * ranks, link))
    if link.across_kind in RDMA:
        start = algorithm_costs("all_to_all", link)[0].start_s
        share = float(np.interp(np.log2(link.nodes), *np.transpose([(np.log2(n), s) for n, s in RDMA_SHARE])))
        # A fitted share of the ports' peak, interpolated over log2 of the nodes, and the all-to-all's own start.
        far = start + bound_seconds("all_to_all", nbytes * nodes, link) / share
    else:
        far = collective_seconds("all_to_all", nbytes * nodes, link)
    # The network and the links inside work at once: the slower of the two sets the time.
    if link.ranks_per_node > 1:
        inside = replace(
            link, ranks=link.ranks_per_node, nodes=1, across_kind="", across_name="", across_bytes_per_s=0.0, sharers=1
        )
        near = collective_seconds("all_to_all", nbytes * ranks, inside)
        far = np.maximum(far, near) if np.ndim(nbytes) else max(far, near)
    return _less(plain, far)


def _less(one: Any, two: Any) -> Any:
    return np.minimum(one, two) if np.ndim(one) else min(one, two)
