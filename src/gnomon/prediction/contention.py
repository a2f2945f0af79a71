"""Kernels and the collectives that run alongside them slow each other: an outer fixed point over the timeline.

A collective of parameters or gradients takes SMs, memory bandwidth and power from the kernels alongside it. How long
runs alongside what follows from the clock, and the clock from how much longer the kernels take: `contended` plays,
lengthens, and plays again. Actions only get slower and never by more than SLOWED and BACK allow, so bounds from kernels
that run alone stay bounds. As in Echo (arXiv 2412.12487, the successor of Merak), with one number for all kinds of
kernel: there are no public measurements of kernels alongside NCCL to fit more to. A collective weighs by the bytes that
its link can move past each device a second, up to FULL_RATE: memory traffic and the SMs that copy grow with them, and
one that waits for a slow network moves few. That form, a straight line through the origin, is a choice: runs set its
upper end, and six runs over slower networks fit it. On a machine that `gnomon calibrate` has measured, the share is the
one it saw (`Measured.lost_beside`), for collectives of any rate. Copies to and from the host go by copy engines and
weigh nothing. Where a processor that was measured is device and host in one, they, and additions and updates on the
host, take from computing what a collective does. Leaves out messages between stages, and collectives of whole stages,
which are priced with the computing alongside them (`step`): ZeRO 0 to 2, where runs show nothing
(evidence/fits/contention).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gnomon.hardware import Device
from gnomon.lowering.exchanges import COMPUTES
from gnomon.orders.patterns.vocabulary import SHARED
from gnomon.prediction.compute_time import PHASES
from gnomon.prediction.step import Pricing
from gnomon.prices.dispatch import DISPATCH_SMS
from gnomon.prices.links import AxisLink
from gnomon.program import Key, Structure
from gnomon.simulate import Durations, Times
from gnomon.simulate.overlap_times import OverlapTimes
from gnomon.units import quantise

SLOWED = 0.5
"""Seconds that kernels lose to each second of a collective alongside them. Fitted: of 0, 0.35 and 0.5, the one with the
least median error (4.9%, 4.2%, 3.7%) on 50 fully sharded runs on A100 and H100 whose models were left out of the fit of
rates, 2026-11-22 (evidence/LOG.md)."""

FULL_RATE = 200e9
"""Bytes a second that a collective can move past each device from which on it costs kernels all of SLOWED: the least in
the runs that SLOWED was fitted to (A100 with 25 GB/s of network a device, eight to a node; up to 450e9 over NVLink), so
they say nothing of what is below. Six runs of FSDP, over 50e9 and 100e9, are 22% off (median) with a share that
does not depend on the rate, and 7% with this one, 2026-11-22 (evidence/LOG.md)."""

BACK = 0.0
"""Seconds that a collective over a link of FULL_RATE loses to each second of kernels alongside it; 0 leaves it as on
idle devices, which its curve is of. Fitted: of 0, 0.1, 0.25 and 0.5, 0 has the least median error in each of three
programs, models left out, 2026-11-22 (evidence/fits/contention). NCCL timed alongside kernels would settle it."""

ROUNDS = 2
"""Rounds of losses. Of 43 fully sharded plans (7B to 175B, with and without pipelines, one step begun at rest and one
after it) the step is then 0.15% under that of twelve rounds at most, 0.01% in the median; after one round 1.3%."""

TRANSFERS = ("UNSHARD", "REDUCE_GRAD", "AR")
HOST = ("D2H", "H2D", "HOST_ADD", "HOST_OPT")
"""The kinds of action that the host does, or that go to and from it."""


def contended(structure: Structure, pricing: Pricing) -> tuple[Durations, Times | None]:
    """(seconds of each price key, with what kernels lose to collectives alongside them; the step played last on the
    way, from which `period` may go on)."""
    # With rows of whole stages contention is in the prices of computing (`step`), unless the vocabulary is divided.
    uncontended, keys = pricing.durations(structure.program), structure.program.keys
    divided = pricing.stages[0].share is not None
    lost_to_each = slowed(pricing.stages[0].device)
    if (pricing.blocks[0][1] < 0 and not divided) or not lost_to_each:
        return uncontended, None
    moving = SHARED if divided else (*TRANSFERS, *COMPUTES, *HOST)
    loads, computes = dict[tuple[str, int, str], float](), dict[tuple[str, int, str], tuple[float, float]]()
    # Per price key: what it takes from kernels, which share of it is kernels, and how long it can lose without harm.
    others, kernels, idle = np.zeros((3, len(keys)))
    for at, (key, busy) in enumerate(zip(keys, uncontended.busy.tolist(), strict=True)):
        stage = pricing.alike[key.stage]
        if key.kind in moving:
            if (key.kind, stage, key.name) not in loads:
                loads[key.kind, stage, key.name] = weight(pricing, key, busy)
            others[at] = loads[key.kind, stage, key.name]
        elif key.kind in PHASES and not key.name:
            if (key.kind, stage, key.shape) not in computes:
                parts = pricing.of(key.shape).compute.parts(key.kind, stage)
                computes[key.kind, stage, key.shape] = _kernels(parts)
            kernels[at], idle[at] = computes[key.kind, stage, key.shape]
    if not others.any() or not kernels.any():
        return uncontended, None
    lost, now, overlap_times = np.zeros(len(keys)), uncontended, OverlapTimes(structure, kernels > 0, others)
    back = OverlapTimes(structure, others > 0, kernels) if BACK else None
    for _ in range(ROUNDS):
        # Time lost to overlapped collectives, less what the action waits for its launches anyway.
        slower = np.maximum(lost_to_each * kernels * overlap_times.seconds(now) - idle, 0.0)
        if back is not None:
            slower += BACK * others * back.seconds(now)
        grown = np.maximum(slower, lost)  # never less than before: the rounds only climb
        if np.array_equal(grown, lost):
            break
        lost, now = grown, Durations(busy=quantise(uncontended.busy + grown), lag=uncontended.lag)
    return now, overlap_times.last


def slowed(device: Device) -> float:
    """Seconds that kernels lose to each second of a collective of full weight: SLOWED, or as a calibration measured."""
    return SLOWED if device.measured is None else device.measured.lost_beside or 0.0


def _kernels(parts: Mapping[str, float]) -> tuple[float, float]:
    """(share of an action that is kernels, seconds in which they wait for the host and have time to lose)."""
    whole = sum(parts.values())
    share = (parts["compute"] + parts["again"]) / whole if whole else 0.0
    return share, parts["launch"] + parts["offload"]


def weight(pricing: Pricing, key: Key, busy: float) -> float:
    """What a second of an action takes from kernels alongside it, from 0 to 1 times SLOWED; 0 for what is no
    transfer."""
    if key.kind not in (*TRANSFERS, *COMPUTES, *SHARED, *HOST) or busy <= 0:
        return 0.0
    device = pricing.stages[0].device
    measured = device.measured
    processor = measured is not None
    if key.kind in COMPUTES:  # its kernels hold a part of the device
        # A dispatch's kernels hold DISPATCH_SMS of the SMs; the weight is that part over SLOWED.
        return 1.0 if processor else min(1.0, DISPATCH_SMS / max(device.num_sms, 1) / slowed(device))
    if key.kind in HOST:
        apart = measured is None or (
            measured.processes == 1 and pricing.plan.optimizer.delay > 0
        )  # another core's thread
        return 0.0 if apart else 1.0
    carried = pricing.carried(key)
    whole = sum(seconds for seconds, _ in carried)
    # Copies from the host are made by copy engines: only what is not such a copy weighs.
    by_engine = pricing.fetched_s(pricing.alike[key.stage], copies=not processor) if key.kind == "UNSHARD" else 0.0
    if not whole:
        return max(1 - by_engine / busy, 0.0) if processor and key.kind == "UNSHARD" else 0.0
    return sum(seconds * share(link) for seconds, link in carried) / whole * max(1 - by_engine / busy, 0.0)


def share(link: AxisLink) -> float:
    """Computes the part of SLOWED that a collective over the link takes, by the bytes that a ring moves past each of
    its devices at most: all that enters a node passes each of the group's devices there."""
    if link.measured is not None:  # what is lost was measured with such collectives
        return 1.0
    rate = link.across_bytes_per_s if link.nodes > 1 else link.inside_bytes_per_s
    return min(1.0, rate / FULL_RATE)
