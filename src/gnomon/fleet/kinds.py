"""Measured points of training jobs on several kinds of devices; forecasts from them on mixed clusters.

`read_kind(folder, suffix)` takes the tables of one kind of device from a folder as in Sia's artifact, with a folder
for each application: `validation-BATCH.csv`, `placements-SUFFIX.csv` and `scalability-SUFFIX.csv`. `ByKind` are
forecasts that ask the profiles of the kind of device of an allocation. Leaves out what a profile is (`goodput`).
Source: Jayaram Subramanya et al., SOSP 2023.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gnomon.errors import InputError
from gnomon.fleet.goodput import PLACED, RUNS, SCALED, Profiled, Profiles, Row, rows_of
from gnomon.fleet.job import Job
from gnomon.fleet.machines import Machines
from gnomon.fleet.state import Allocation, PhaseForecasts

_RUN = re.compile(r"validation-(\d+)\.csv")


def read_kind(
    folder: str | Path,
    suffix: str,
    *,
    slowdown: Mapping[str, float] | None = None,
    max_local: Mapping[str, int] | None = None,
) -> Profiles:
    """Profiles of all applications in a folder on one kind of device.

    suffix: of the kind's tables, as `rtx` of placements-rtx.csv; applications without such tables are left out.
    slowdown: of an application, how many times longer its steps take than was measured. max_local: as in
    `Profiles.read`. InputError for a folder without an application that has them, and for damaged tables.
    """
    base, tables = Path(folder), (list[Row](), list[Row](), list[Row]())
    for inner in sorted(path for path in base.iterdir() if path.is_dir()) if base.is_dir() else ():
        placed, scaled = inner / f"placements-{suffix}.csv", inner / f"scalability-{suffix}.csv"
        runs = [(run[1], path) for path in sorted(inner.iterdir()) if (run := _RUN.fullmatch(path.name))]
        if not runs or not placed.is_file() or not scaled.is_file():
            continue
        named = {"app": inner.name}
        for batch, path in runs:
            tables[0].extend({**row, **named, "batch_size": batch} for row in rows_of(path, RUNS[1:]))
        tables[1].extend({**row, **named} for row in rows_of(placed, PLACED))
        tables[2].extend({**row, **named} for row in rows_of(scaled, SCALED))
    if not tables[0]:
        raise InputError(
            f"{str(base)!r} has no application with validation-BATCH.csv, placements-{suffix}.csv and "
            f"scalability-{suffix}.csv; give the folder that has a subfolder for each application"
        )
    return Profiles.of_rows(*tables, where=str(base), max_local=max_local, slowdown=slowdown)


@dataclass(frozen=True)
class ByKind(PhaseForecasts):
    """Forecasts on a mixed cluster: the interface `Forecasts`. A job is on devices of one kind at a time."""

    machines: Machines
    """The cluster, whose pools name the kinds."""
    kinds: Mapping[str, Profiled]
    """Kind of device, as pools name it -> its forecasts."""

    def __post_init__(self) -> None:
        lacking = sorted({pool.device for pool in self.machines.pools} - {*self.kinds})
        if lacking:
            raise InputError(f"no measured points on {', '.join(lacking)}; there are some on {', '.join(self.kinds)}")

    def kind(self, node: int) -> str:
        """Kind of device of a node."""
        return self.machines.pools[self.machines.pool_of[node]].device

    def per_node(self, kind: str) -> int:
        """Most devices of a kind that a node has."""
        return max(pool.per_node for pool in self.machines.pools if pool.device == kind)

    def on(self, node: int) -> Profiled:
        """Those of a node's kind of device."""
        return self.kinds[self.kind(node)]

    def phase(self, job: Job, done_s: float, allocation: Allocation) -> tuple[float, float]:
        """Returns (rate, until) by the forecasts of the allocation's kind of device."""
        return self.on(allocation[0][0]).phase(job, done_s, allocation)

    def packed(self, job: Job, done_s: float, node: int, per_node: int, most: int) -> NDArray[np.float64]:
        """Returns the rates on 1 to `most` devices by the forecasts of the node's kind of device."""
        return self.on(node).packed(job, done_s, node, per_node, most)

    def limits(self, job: Job) -> tuple[int, int]:
        """Returns the widest limits of all kinds."""
        limits = [forecasts.limits(job) for forecasts in self.kinds.values()]
        return min(fewest for fewest, _ in limits), max(most for _, most in limits)

    def remaining_s(self, job: Job, done_s: float, allocation: Allocation) -> float:
        """Returns the seconds left by the forecasts of the allocation's kind of device."""
        return self.on(allocation[0][0]).remaining_s(job, done_s, allocation)
