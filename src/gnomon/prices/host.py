"""What the host pays for a kernel, and how far a device falls under its short-burst speed when it works for minutes.

Both are facts of a stack and a device: fitted to runs where there are any (`fitted`), else by the way of launching;
returned as values with their source and whether anyone checked them, kept apart from the device's own time. Leaves
out: how far the host runs ahead and where it waits (room `simulate`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from gnomon.hardware.types import Device
from gnomon.prices.fitted import FittedRates, evidence_of, rates, rates_note
from gnomon.prices.power import power_share
from gnomon.software import Stack
from gnomon.units import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCost:
    """Host time of one kernel, with its source."""

    per_kernel_s: Seconds
    """Seconds from one launch to the next, with the framework's work between them."""
    source: str
    """Where it is known from."""
    confidence: Literal["checked", "unchecked"]
    """Whether a measurement stands behind it."""
    assumption: str = ""
    """What was assumed for want of a fact; to be shown next to the number."""


_LAUNCHES: Mapping[str, HostCost] = {
    "eager": HostCost(
        per_kernel_s=8e-6,
        source="PyTorch eager: 5 to 10 us an operator with dispatch, autograd and module calls; launch alone 2 to 4 us",
        confidence="unchecked",
    ),
    "compiled": HostCost(
        per_kernel_s=4e-6,
        source="generated wrapper code: a launch and its arguments, without dispatch or autograd nodes",
        confidence="unchecked",
    ),
    "cuda_graph": HostCost(
        per_kernel_s=0.3e-6,
        source="replay: one host call a graph, spread over its kernels",
        confidence="unchecked",
    ),
}


def host_cost(stack: Stack, device: Device, numbers: FittedRates | None = None) -> HostCost:
    """Host time of a kernel under a stack, with its source. What was fitted to runs, which launch kernels one by one,
    falls with other ways of launching as their price does. A stack that does not say how it launches is taken as eager,
    and the result says so. TPUs run whole compiled programs: nothing a kernel. numbers: in place of those on record."""
    if device.kind == "tpu":
        return HostCost(per_kernel_s=0.0, source="XLA runs a step as one program", confidence="unchecked")
    if device.kind == "cpu":
        return HostCost(
            per_kernel_s=0.0, source="host and device are one: in the kernel's own time", confidence="unchecked"
        )
    seen = rates(stack, device, numbers).host_kernel_s
    if seen is not None:
        # Fitted runs launched eagerly; other ways of launching are taken to be faster by the ratio of their own prices.
        share = _LAUNCHES[stack.launch.launch_mode or "eager"].per_kernel_s / _LAUNCHES["eager"].per_kernel_s
        checked = evidence_of(stack, device, numbers) in ("own", "stack")
        return HostCost(
            per_kernel_s=seen * share,
            source=rates_note(stack, device),
            confidence="checked" if checked else "unchecked",
            assumption="" if stack.launch.launch_mode or checked else _unsaid(stack),
        )
    if stack.launch.launch_mode is not None:
        return _LAUNCHES[stack.launch.launch_mode]
    eager = _LAUNCHES["eager"]
    return HostCost(
        per_kernel_s=eager.per_kernel_s, source=eager.source, confidence="unchecked", assumption=_unsaid(stack)
    )


def _unsaid(stack: Stack) -> str:
    return f"stack {stack.name!r} does not say how it launches kernels: eager"


LAUNCH_S = 4e-6
"""Host seconds of a launch alone, many alike in a row: 2 to 4 us, and the view that it copies to."""

CHECK_S = 2.2e-4
"""Host seconds of a collective for each rank of its group, where all of them are checked over TCP first (a barrier in
which one rank hears the others one after another, then two all-gathers of what each is about to do: PyTorch's
ProcessGroupWrapper). Measured 2026-11-22: torch 2.13, gloo, an all-reduce of four numbers by two processes on two cores
of one machine takes 0.43 ms more with TORCH_DISTRIBUTED_DEBUG=DETAIL (the least of 200, twice); three processes on the
same two cores 1.2 to 1.5 ms more."""


def check_s(stack: Stack, ranks: int) -> float:
    """Host seconds that a stack's checks add to a collective of so many ranks."""
    return CHECK_S * ranks if stack.launch.checked_collectives else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SustainedSpeed:
    """Speed under long load over speed in a short burst, with a note."""

    factor: float
    """The factor by which compute-bound times are divided; at most 1."""
    note: str
    """Why it is so, or why nothing is known."""


def sustained(stack: Stack, device: Device) -> SustainedSpeed:
    """The factor of a stack on a device, with what it rests on in the note: 1 where no runs were fitted.

    Kernel data are bursts at locked clocks. On H100, long runs of large matmuls were seen at 0.85 to 0.93 of them, and
    training runs at 0.77 to 0.97 depending on the software; A100 at 0.95.
    """
    note = rates_note(stack, device)
    factor = rates(stack, device).compute
    if factor == 1.0 and device.generation.long_runs:
        note += f"; {device.generation.long_runs}"
    if (share := power_share(device)) < 1:
        note += f"; {device.name} sustains {share:.2f} of its peaks, by its watts a FLOP/s"
    return SustainedSpeed(factor=factor, note=note)
