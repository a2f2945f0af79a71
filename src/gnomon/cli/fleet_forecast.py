"""`gnomon fleet forecast`: rate, memory, resize cost and band of a plan on several numbers of devices.

`run(options)` prints a table, and where more devices stop to pay. Leaves out the prediction (`gnomon.fleet.planned`).
"""

from __future__ import annotations

import re

from gnomon.cli.options.fleet import ForecastOptions
from gnomon.cli.request import request_of_plan
from gnomon.cli.terminal import Progress, print_json, print_lines
from gnomon.errors import InputError
from gnomon.fleet.planned import Forecast, Impossible, Planner, stops_paying
from gnomon.hardware.rent import ANY, rent
from gnomon.report.tables import Column, gib, number, percent, table, wrapped
from gnomon.units import MAX_DEVICES, show_seconds


def run(options: ForecastOptions) -> int:
    """Prints the forecasts of one job."""
    request = request_of_plan(options.plan)
    planner = Planner(
        graph=request.graph,
        cluster=request.cluster,
        plan=request.plan,
        workload=request.workload,
        stack=request.stack,
        restart_s=options.restart,
        storage_bytes_per_s=options.storage * 1e9,
    )
    counts = numbers(options.devices)
    progress = Progress("forecast:", len(counts))
    every = []
    for done, count in enumerate(counts):
        progress.show(done)
        every.append(planner.forecast(count))
    progress.end()
    forecasts = [forecast for forecast in every if isinstance(forecast, Forecast)]
    if not forecasts:
        first = every[0]
        assert isinstance(first, Impossible)
        raise InputError(f"the plan runs on none of {options.devices} devices; on {first.devices}: {first.reason}")
    own = {ANY: options.price} if options.price is not None else None
    paid = rent(request.cluster, own)
    an_hour = None if paid is None else paid.dollars_per_hour / request.cluster.num_devices
    best = stops_paying([forecast for forecast in forecasts if forecast.fits] or forecasts)
    if options.json:
        print_json(
            {
                "forecasts": [
                    _mapping(forecast, an_hour, request.workload.global_batch_size) for forecast in forecasts
                ],
                "impossible": [{"devices": e.devices, "reason": e.reason} for e in every if isinstance(e, Impossible)],
                "stops_paying": best,
            }
        )
        return 0
    print_lines(_text(every, forecasts, an_hour, best))
    return 0


def numbers(text: str) -> list[int]:
    """`8..64` is 8, 16, 32, 64; `8,12,16` is what it says."""
    match = re.fullmatch(r"([0-9]{1,7})\.\.([0-9]{1,7})", text.strip())
    parts = text.split(",")
    if match:
        low, high = int(match[1]), int(match[2])
        out = []
        # From 0 doubling would never end; the empty list is refused below.
        while low and low <= high:
            out.append(low)
            low *= 2
    elif all(part.strip().isdecimal() and len(part) < 8 for part in parts):
        out = sorted({int(part) for part in parts})
    else:
        out = []
    if not out or out[0] < 1 or out[-1] > MAX_DEVICES:
        raise InputError(f"--devices {text!r}: give a range such as 8..64 (doubling), or numbers such as 8,12,16")
    return out


def _cost(forecast: Forecast, an_hour: float | None) -> float | None:
    """Dollars for a million sequences."""
    # Hours for 1e6 sequences, times dollars of a device and hour, times devices.
    return None if an_hour is None else 1e6 / forecast.samples_per_s / 3600 * an_hour * forecast.devices


def _mapping(forecast: Forecast, an_hour: float | None, batch: int) -> dict[str, object]:
    return {
        "devices": forecast.devices,
        "step_s": forecast.step_s,
        "band_s": [forecast.low_s, forecast.high_s],
        "samples_per_s": forecast.samples_per_s,
        "global_batch_size": batch,
        "peak_bytes": forecast.peak_bytes,
        "fits": forecast.fits,
        "resize_s": forecast.resize_s,
        "dollars_per_million_samples": _cost(forecast, an_hour),
    }


def _text(every: list[Forecast | Impossible], forecasts: list[Forecast], an_hour: float | None, best: int) -> list[str]:
    names = ("devices", "step", "80% of cases", "samples/s", "linear %", "GiB", "fits", "resize", "$/1M samples")
    # A device of the fewest that run is what "linear %" compares with.
    base = forecasts[0].samples_per_s / forecasts[0].devices
    rows = []
    for forecast in forecasts:
        cost = _cost(forecast, an_hour)
        rows.append(
            (
                f"{forecast.devices:,}",
                show_seconds(forecast.step_s),
                f"{show_seconds(forecast.low_s)} to {show_seconds(forecast.high_s)}",
                number(forecast.samples_per_s),
                percent(forecast.samples_per_s / forecast.devices / base),
                gib(forecast.peak_bytes),
                "yes" if forecast.fits else "no",
                show_seconds(forecast.resize_s),
                "-" if cost is None else f"{cost:,.0f}",
            )
        )
    lines = [*table(tuple(Column(name=name) for name in names), rows, width=110), ""]
    lines += wrapped(
        f"Beyond {best:,} devices a further one brings under half of what one of the first {forecasts[0].devices:,} "
        "does."
        if best < forecasts[-1].devices
        else f"Up to {best:,} devices a further one brings at least half of what one of the first does.",
        indent="",
    )
    for other in every:
        if isinstance(other, Impossible):
            lines += wrapped(f"{other.devices:,} devices: {other.reason}", bullet="- ")
    return lines
