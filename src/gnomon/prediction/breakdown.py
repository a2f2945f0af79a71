"""Where the step of the busiest rank goes: kernels, collectives by axis, launches, update, and idle time by cause.

`step_parts` plays the steady state and takes `gnomon.timeline.breakdown` of its compute stream; what holds the stream
is divided further by the prices of its layers. The parts add up to the step to the bit. Leaves out other ranks, and
what communication the clock shows overlapped with computing.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gnomon.lowering.exchanges import COMPUTES
from gnomon.orders.patterns.vocabulary import SHARED
from gnomon.prediction.compute_time import PHASES
from gnomon.prediction.step import Pricing
from gnomon.program import Structure
from gnomon.simulate import Durations, simulate
from gnomon.timeline import Share, breakdown
from gnomon.units import quantise

AXES: Mapping[str, str] = {
    **dict.fromkeys(("SEND_F", "RECV_F", "SEND_B", "RECV_B", "SEND_SKIP", "SEND_SKIP_GRAD"), "pp"),
    **dict.fromkeys(("RECV_SKIP", "RECV_SKIP_GRAD", *SHARED), "pp"),
    **dict.fromkeys(COMPUTES, "ep"),
    **dict.fromkeys(("AR", "REDUCE_GRAD", "UNSHARD"), "dp"),
}
"""Kind of action -> axis that it communicates over."""

RECOMPUTE = "R"
LAUNCH = "launch"
OFFLOAD = "offload"
METHODS = "methods"


def step_parts(structure: Structure, durations: Durations, pricing: Pricing) -> dict[str, float]:
    """Part -> seconds of the rank class that computes most, in the steady state.

    A kind of action (`F`, `B`, `I`, `W`, `OPT`, `NORM` …): its kernels. `R`: kernels of what is computed again. `tp
    communication`, `ep …`: collectives within layers that their kernels wait for. `pp communication`, `dp …`: messages
    and reductions that the rank waits for. `launch`: kernels waiting for the host. `offload`: copies to and from the
    host, and its update, that are waited for. `methods`: a teacher's forward, and passes from other activations.
    `bubble`: waiting for other ranks' computing. `ahead`: waiting for
    nothing of this rank's, because another one sets the pace.
    """
    spent = breakdown(simulate(structure, durations, steady=True))
    worker = min(range(len(spent.workers)), key=lambda w: spent.idle_s(spent.workers[w]))
    out: dict[str, float] = {}
    for share in spent.of(spent.workers[worker]):
        split = (_split if share.busy else _waited)(structure, pricing, worker, share)
        for name, seconds in split.items():
            out[name] = out.get(name, 0.0) + seconds
    return {name: seconds for name, seconds in out.items() if seconds}


def _waited(structure: Structure, pricing: Pricing, worker: int, share: Share) -> dict[str, float]:
    """Idle seconds of one cause; those that wait for gathers of parameters that come from the host, divided as the
    gathers are."""
    if share.action != "UNSHARD" or not pricing.plan.optimizer.offload_parameters:
        return {_idle(share): share.seconds}
    program = structure.program
    rows = slice(int(program.class_ptr[worker]), int(program.class_ptr[worker + 1]))
    keys = [program.keys[index] for index in program.key[rows].tolist()]
    gathers = [key for key in keys if key.kind == share.action]
    whole = sum(pricing.seconds(key) for key in gathers)
    copied = sum(pricing.fetched_s(key.stage) for key in gathers)
    away = min(quantise(share.seconds * copied / whole), share.seconds) if whole else 0.0
    return {OFFLOAD: away, _idle(share): share.seconds - away}


def _idle(share: Share) -> str:
    if share.part == "communication":
        return f"{AXES.get(share.action, share.action.lower())} communication"
    return OFFLOAD if share.part in ("copy", "host") else share.part


def _split(structure: Structure, pricing: Pricing, worker: int, share: Share) -> dict[str, float]:
    """Busy seconds of one kind of action, divided as its prices are; rounding falls to the largest part."""
    kinds = [kind for kind in share.action.split("&") if kind in PHASES]
    if not kinds:
        return {share.action: share.seconds}
    parts = _parts(structure, pricing, worker, kinds)
    whole = sum(parts.values())
    largest = max(parts, key=lambda name: parts[name])
    names = {"compute": share.action, "again": RECOMPUTE, "launch": LAUNCH, "offload": OFFLOAD, "methods": METHODS}
    out = {name: quantise(share.seconds * part / whole) for name, part in parts.items() if whole}
    out[largest] = share.seconds - sum(seconds for name, seconds in out.items() if name != largest)
    return {names.get(name, f"{name} communication"): seconds for name, seconds in out.items()}


def _parts(structure: Structure, pricing: Pricing, worker: int, kinds: list[str]) -> dict[str, float]:
    program = structure.program
    rows = slice(int(program.class_ptr[worker]), int(program.class_ptr[worker + 1]))
    indices, counts = np.unique(program.key[rows], return_counts=True)
    out: dict[str, float] = {"compute": 0.0}
    for index, count in zip(indices.tolist(), counts.tolist(), strict=True):
        key = program.keys[index]
        if key.kind in kinds:
            for name, seconds in pricing.of(key.shape).compute.parts(key.kind, key.stage).items():
                out[name] = out.get(name, 0.0) + seconds * count
    return out
