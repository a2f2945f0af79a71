"""What a device's power limit leaves of its peaks when it works for minutes.

`powered(device)` returns the device with the peaks that its power sustains: those of the sheet are of a boost clock,
which bursts reach. Memory and launches are untouched.

`Generation.sustained_w_per_flops` holds watts for each FLOP/s of the dense bf16 peak with which a device sustains what
its generation does, for generations on TSMC's 4N and 4NP. With less it runs at a lower clock, in proportion. GB300 has
0.56 pW: 1400 W for 2.5 PFLOP/s (B300 0.49, GB200 0.48, B200 0.44; H100 as SXM has 0.71, as a card 0.46). In dense runs
GB300 sustains 1.20 times what GB200 does, and has 1.17 times its watts (33 and 39 runs, 2026-11-22; evidence/LOG.md).
Processes: NVIDIA's architecture papers of Hopper (2022) and Blackwell (2024). Leaves out what power costs
below the limit, and how a limit that is set by hand is known.
"""

from __future__ import annotations

from dataclasses import fields, replace
from functools import lru_cache

from gnomon.hardware.types import Device


def power_share(device: Device) -> float:
    """Sustained peaks over those of the sheet, from over 0 to 1; 1 for other generations, for a device whose power is
    not known, and for one that was measured."""
    enough, peak = device.generation.sustained_w_per_flops, device.dense_peak.bf16
    if enough is None or peak is None or device.power_w is None or device.measured is not None:
        return 1.0
    return min(1.0, device.power_w / (enough * peak))


@lru_cache(maxsize=256)
def powered(device: Device) -> Device:
    """The device with the peaks that it sustains."""
    share = power_share(device)
    if share == 1.0:
        return device
    rates = {field.name: getattr(device.dense_peak, field.name) for field in fields(device.dense_peak)}
    # A format that the device lacks stays None.
    slower = {name: rate and rate * share for name, rate in rates.items()}
    return replace(device, dense_peak=replace(device.dense_peak, **slower))
