"""Seconds of a collective over one group of ranks: ring, tree, switch reduction and hierarchical, the fastest of them.

Each algorithm is latency per step plus bytes over what links deliver; a sqrt term stands for pipelining that builds up
slowly with size. Sizes follow nccl-tests: the whole buffer on one rank (gathered result, what is reduced or scattered).
Returns seconds, never below bytes over the link's peak. Leaves out contention with compute.
Source of forms: Thakur, Rabenseifner, Gropp 2005; measured fits of NCCL in nccl-tests logs (see EFFICIENCY).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gnomon.errors import UnpricedError
from gnomon.prices.links import AxisLink


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """What software reaches of a link."""

    share: float
    """Of the peak, for large messages."""
    start_s: float
    """Seconds to start a collective: kernel launch, flags."""
    step_s: float
    """Seconds of one step of a ring or tree, empty."""
    ramp: float
    """Weight of sqrt(bytes): the share reached grows with size."""
    source: str
    date: str = "2026-11-21"


EFFICIENCY: Mapping[str, Efficiency] = {
    "nvlink": Efficiency(
        share=0.80, start_s=6e-6, step_s=0.8e-6, ramp=0.25,
        source="nccl-tests on 8 H100 and 8 A100: all-gather to 335 of 450 and 205 of 300 GB/s",
    ),
    "xgmi": Efficiency(share=0.75, start_s=10e-6, step_s=1.5e-6, ramp=0.25, source="unchecked: as nvlink, lower"),
    "pcie": Efficiency(share=0.70, start_s=10e-6, step_s=2e-6, ramp=0.25, source="unchecked"),
    "infiniband": Efficiency(
        share=0.92, start_s=20e-6, step_s=9e-6, ramp=0.35,
        source="GH200 Alps: 92.5 of 100 GB/s a node from 16 ranks on, about 18 us a doubling of nodes",
    ),
    "roce": Efficiency(share=0.85, start_s=20e-6, step_s=10e-6, ramp=0.35, source="unchecked: as infiniband, lower"),
    "efa": Efficiency(share=0.80, start_s=60e-6, step_s=20e-6, ramp=0.35, source="AWS p4de: 78 of 100 GB/s at 16"),
    "ethernet": Efficiency(share=0.80, start_s=60e-6, step_s=25e-6, ramp=0.35, source="unchecked"),
    "omnipath": Efficiency(share=0.85, start_s=20e-6, step_s=10e-6, ramp=0.35, source="unchecked"),
    "ici": Efficiency(share=0.85, start_s=2e-6, step_s=1e-6, ramp=0.1, source="unchecked"),
    "c2c": Efficiency(share=0.80, start_s=5e-6, step_s=1e-6, ramp=0.2, source="unchecked"),
    "loopback": Efficiency(share=0.60, start_s=200e-6, step_s=50e-6, ramp=0.1, source="gloo on one machine, unchecked"),
}  # fmt: skip
"""By kind of link. Replaced by fits per system where there are measurements."""

NVLS_ARCHS = frozenset({"hopper", "blackwell"})
"""Generations whose NVLink switches add up data in flight (NVLS): an all-reduce then sends each byte once."""


def collective_seconds(kind: str, nbytes: Any, link: AxisLink) -> Any:
    """Seconds of one collective.

    kind: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send_recv. nbytes: whole buffer on one rank
    (for send_recv what one rank sends), an int or an array. UnpricedError for another kind or an unknown link.
    """
    size = np.asarray(nbytes, float)
    n = link.ranks
    if kind == "all_reduce":
        rounds, passes = 2 * (n - 1), 2.0
    elif kind in ("all_gather", "reduce_scatter", "all_to_all", "broadcast"):
        rounds, passes = n - 1, 1.0
    elif kind == "send_recv":
        return p2p_seconds(nbytes, link)
    else:
        raise UnpricedError(f"no price for collective {kind!r}; known are all_reduce, all_gather, reduce_scatter, "
                            "all_to_all, broadcast, send_recv")  # fmt: skip
    moved = size * (passes * (n - 1) / n)
    if link.nodes == 1:
        found = _ring(moved, rounds, link.inside_bytes_per_s, _of(link.inside_kind))
        if kind == "all_reduce" and link.arch in NVLS_ARCHS and n >= 4:
            found = np.minimum(found, _ring(moved / 1.35, 8, link.inside_bytes_per_s, _of(link.inside_kind)))
    else:
        found = _across(kind, size, passes, link)
    return float(found) if np.ndim(nbytes) == 0 else found


def p2p_seconds(nbytes: Any, link: AxisLink) -> Any:
    """Seconds of one message between two ranks of the group."""
    size = np.asarray(nbytes, float)
    if link.nodes == 1:
        rate, eff = link.inside_bytes_per_s, _of(link.inside_kind)
    else:
        rate, eff = link.across_bytes_per_s, _of(link.across_kind)
    found = _ring(size, 1, rate, eff)
    return float(found) if np.ndim(nbytes) == 0 else found


def _across(kind: str, size: Any, passes: float, link: AxisLink) -> Any:
    """Between nodes: a ring through all, or a tree; all-to-all sends most of its bytes out of the node."""
    eff, inside = _of(link.across_kind), _of(link.inside_kind)
    per_node = max(link.ranks_per_node, 1)
    out = size * (passes * (link.nodes - 1) / link.nodes)
    if kind == "all_to_all":
        out = out * per_node
        rounds = link.nodes - 1
    else:
        rounds = int(passes) * max(1, int(np.ceil(np.log2(link.nodes))))
    network = _ring(out, rounds, link.across_bytes_per_s, eff)
    local = 0.0
    if per_node > 1:
        local = _ring(size * (passes * (per_node - 1) / per_node), per_node - 1, link.inside_bytes_per_s, inside)
    return np.maximum(network, local) + eff.start_s * 0.5


def _ring(moved: Any, rounds: int, rate: float, eff: Efficiency) -> Any:
    """start + steps + bytes at the link's efficiency, with a part that grows as the root of the bytes."""
    if rate <= 0:
        raise UnpricedError("a link without a bandwidth; give bytes_per_s in the cluster")
    wire = moved / (rate * eff.share)
    fixed = eff.start_s + rounds * eff.step_s
    return fixed + wire + eff.ramp * np.sqrt(fixed * wire)


def _of(kind: str) -> Efficiency:
    if kind not in EFFICIENCY:
        raise UnpricedError(f"no efficiency for links of kind {kind!r}; known are {', '.join(EFFICIENCY)}")
    return EFFICIENCY[kind]
