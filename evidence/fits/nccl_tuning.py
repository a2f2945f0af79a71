"""Where NCCL turns from its low-latency protocols (LL, LL128) to Simple within a node: its own tuning model, restated.

`switch_bytes(…)` returns a size for `fit_collectives.py`. NCCL picks the algorithm and protocol whose modelled time is
least, and that model is not the truth: at the size where it switches, measured times jump. Leaves out networks.
Source of figures: NVIDIA/nccl v2.27.3-1, src/graph/tuning.cc (ncclTopoTuneModel, ncclTopoGetAlgoTime), topo.h and
paths.cc, and src/enqueue.cc (addP2pToPlan, and v2.29.2-1's); read 2026-11-22.
"""

from __future__ import annotations

import math

BASE_US = {"ring": (6.6, 14.0, 8.4), "tree": (6.8, 14.0, 8.4)}
"""Latency of an empty collective in LL, LL128 and Simple."""
STEP_US = {
    ("ring", "nvlink"): (0.6, 1.9, 3.4),
    ("tree", "nvlink"): (0.6, 1.25, 4.0),
    ("ring", "pcie"): (1.0, 2.5, 5.7),
    ("tree", "pcie"): (1.0, 1.9, 4.0),
}
"""More for each step."""
NVLS_US = 25.0
"""Of sums in switches."""
LL_MAX = {"ampere": 87.7, "ada": 87.7, "hopper": 141.0, "blackwell": 282.0}
"""Most GB/s of LL within a node."""
RING_LL128_MAX = {"ampere": 20.0, "ada": 20.0, "hopper": 36.7, "blackwell": 73.4}
TREE_LL128_MAX = {"ampere": 20.0, "ada": 20.0, "hopper": 36.7, "blackwell": 73.4}
TREE_MAX = {"ampere": 24.0, "ada": 24.0, "hopper": 38.7, "blackwell": 77.4}
"""Most GB/s of a channel."""
NVLS_SHARE = {"hopper": 0.85, "blackwell": 0.74}
"""Of a ring's GB/s that sums in switches are taken to reach."""
BUS = {"ampere": (240.0, 12), "hopper": (360.0, 18), "blackwell": (720.0, 18), "ada": (24.0, 2)}
"""GB/s of a ring within a node, and its channels: links of 20, 20 and 40 GB/s; on Ada PCIe 4."""
TREE_SHARE = (
    (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1, 1),
    (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1, 1, 1),
    (0.9,) * 7 + (0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9, 0.9),
)
"""Of a tree's GB/s by protocol and size, in powers of two from 64 B."""
P2P_LL_BYTES = 16384
"""Of a message on one channel, up to which LL is used."""
P2P_CHANNELS = {"nvlink": 32, "pcie": 2}
"""Channels of a message between two devices: two for each of the 12 or 18 links to the NVSwitches, rounded up to a
power of two and at most 32; two over PCIe."""

SIMPLE = 2


def switch_bytes(arch: str, kind: str, ranks: int, nccl: tuple[int, int]) -> int:
    """Largest buffer, in bytes, for which NCCL takes LL or LL128 in a group of `ranks` within one node.

    All-to-all is messages, one to each rank: up to NCCL 2.28 the limit of one is that of all its channels together,
    from 2.29 on that of the channels in use, one for such short messages.
    """
    if kind in ("all_to_all", "send_recv"):
        message = P2P_LL_BYTES * (P2P_CHANNELS[_wire(arch)] if nccl < (2, 29) else 1)
        return message * (ranks if kind == "all_to_all" else 1)
    low, high = 2.0**9, 2.0**32
    while high / low > 1.0001:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if _protocol(arch, kind, ranks, middle) == SIMPLE else (middle, high)
    return int(low)


def _wire(arch: str) -> str:
    return "pcie" if arch == "ada" else "nvlink"


def _protocol(arch: str, kind: str, ranks: int, size: float) -> int:
    """Protocol of the least modelled time."""
    times = {}
    for algorithm in ("ring", "tree") if kind == "all_reduce" else ("ring",):
        for protocol in range(3):
            latency, rate = _model(arch, kind, ranks, algorithm, protocol)
            if algorithm == "tree":
                rate *= TREE_SHARE[protocol][min(int(math.log2(size / 64)), 23)]
            times[algorithm, protocol] = latency + size / (1000 * rate)
    if kind == "all_reduce" and ranks > 2 and arch in NVLS_SHARE:
        bus, channels = BUS[arch]
        rate = bus * NVLS_SHARE[arch] * 2 * (channels - 1) / channels * ranks / (2 * (ranks - 1))
        times["nvls", SIMPLE] = NVLS_US + size / (1000 * rate)
    return min(times, key=lambda way: times[way])[1]


def _model(arch: str, kind: str, ranks: int, algorithm: str, protocol: int) -> tuple[float, float]:
    """(us, GB/s) of the model's line."""
    bus, channels = BUS[arch]
    step = STEP_US[algorithm, _wire(arch)][protocol]
    passes = 2 if kind == "all_reduce" else 1
    if algorithm == "ring":
        rate = (
            min(LL_MAX[arch], bus * 0.5),
            min(bus * 0.92, channels * RING_LL128_MAX[arch]) if arch != "ada" else 1e-9,
            bus,
        )[protocol]
        return BASE_US["ring"][protocol] + passes * (ranks - 1) * step, rate * ranks / (passes * (ranks - 1))
    rate = min(bus * 0.92, channels * TREE_MAX[arch])
    if protocol < SIMPLE:
        small = min(rate * 7 / 9, channels * TREE_LL128_MAX[arch]) if arch != "ada" else 1e-9
        rate = (min(rate / 3.8, LL_MAX[arch]), small)[protocol]
    return BASE_US["tree"][protocol] + 2 * (ranks - 1) * step, rate / 2
