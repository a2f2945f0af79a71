"""Policies by trace and load: JCT, queueing, utilisation, preemptions: `python benchmarks/fleet/policies.py TRACES`.

TRACES: a folder with philly_jobs.csv, pollux_workloads.csv (and Pollux's three tables of measured points),
tiresias_60_job.csv. A load is how much faster jobs arrive than in the file. Philly: every third job of a week (days 75
to 82) of at most 64 devices and two days, on 15 nodes of 8 V100; of those on several devices 30% are elastic, from
half to twice what they asked for, at the stated linear curve. Pollux: its first workload on 16 nodes of 4, at measured
speeds and goodput. Tiresias: its 60 jobs on 2 nodes of 4. Starts and resizes take 30 s. Writes
results/fleet_policies.md. Left out: loaning (`lyra.py`), peers' own simulators (`pollux.py`).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from platform import python_version

from gnomon.fleet.costs import Costs
from gnomon.fleet.forecast import Curve
from gnomon.fleet.goodput import Profiled, Profiles
from gnomon.fleet.job import Trace, between
from gnomon.fleet.machines import Machines, machines
from gnomon.fleet.policies import policy
from gnomon.fleet.replay import replay
from gnomon.fleet.rules import Rules
from gnomon.fleet.scenario import DAY_S, with_elastic
from gnomon.fleet.state import Forecasts
from gnomon.fleet.traces import Reading, read_trace

RESULTS = Path(__file__).resolve().parents[1] / "results" / "fleet_policies.md"
NAMES = (
    "fifo", "backfill", "sjf", "srtf", "las", "tiresias", "gandiva", "optimus", "pollux", "sia", "lyra-elastic-only",
    "easyscale",
)  # fmt: skip
RULES = Rules(costs=Costs(restart_s=30, first_start_s=30, resize_s=30))


@dataclass(frozen=True, slots=True)
class Case:
    """A trace on machines."""

    trace: Trace
    machines: Machines
    profiles: Profiles | None = None
    """Measured points of its applications."""

    def told(self, name: str) -> Forecasts:
        """What a policy is told; under Pollux and Sia jobs choose their batch."""
        if self.profiles is None:
            return Curve(self.machines)
        return Profiled(self.profiles, adaptive=name in ("pollux", "sia"))


def cases(folder: Path) -> dict[str, Case]:
    """By name."""
    every = read_trace(folder / "philly_jobs.csv")
    week = between(every, 75 * DAY_S, 82 * DAY_S)
    jobs = tuple(replace(job, work_s=min(job.work_s, 2 * DAY_S)) for job in week.jobs[::3] if job.devices <= 64)
    profiles = Profiles.read(folder, max_local={"yolov3": 8}, fixed={"ncf": 32768})
    pollux = read_trace(folder / "pollux_workloads.csv", Reading(duration=profiles.duration_s, workload=1))
    return {
        "Philly": Case(with_elastic(replace(week, jobs=jobs), 0.3, 0), machines("15x8xv100-sxm-32gb")),
        "Pollux": Case(pollux, machines("16x4xt4-16gb"), profiles),
        "Tiresias": Case(read_trace(folder / "tiresias_60_job.csv"), machines("2x4xv100-sxm-32gb")),
    }


def at_load(trace: Trace, load: float) -> Trace:
    """The trace with arrivals so many times as fast."""
    return replace(trace, jobs=tuple(replace(job, submit_s=job.submit_s / load) for job in trace.jobs))


def row(name: str, load: float, of: str, case: Case) -> str:
    """A line of the table."""
    began = time.process_time()
    result = replay(at_load(case.trace, load), case.machines, policy(of), rules=RULES, forecasts=case.told(of))
    f = result.figures()
    hours = (f"{f[key] / 3600:.2f}" for key in ("jct_mean_s", "jct_p50_s", "jct_p99_s", "queue_mean_s", "queue_p99_s"))
    return (
        f"| {name} | {load:g} | {of} | {' | '.join(hours)} | {f['utilisation']:.1%} | {f['goodput']:.1%} | "
        f"{result.preemptions:,} | {result.resizes:,} | {time.process_time() - began:.1f} |"
    )


def main() -> None:
    """Print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path)
    parser.add_argument("--loads", default="0.5,1,1.5,2")
    parser.add_argument("--policies", default=",".join(NAMES))
    parser.add_argument("--cases", default="Tiresias,Pollux,Philly")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    every = cases(options.traces)
    lines = list(heading(every, options.cases.split(",")))
    print("\n".join(lines), flush=True)
    for name in options.cases.split(","):
        for load in map(float, options.loads.split(",")):
            for of in options.policies.split(","):
                lines.append(row(name, load, of, every[name]))
                print(lines[-1], flush=True)
    options.output.write_text("\n".join(lines) + "\n")


def heading(every: dict[str, Case], names: Sequence[str]) -> tuple[str, ...]:
    """What was played, and the columns."""
    played = "; ".join(f"{name} {len(every[name].trace.jobs):,} jobs on {every[name].machines.text}" for name in names)
    return (
        "# Policies by trace and load",
        "",
        f"`python benchmarks/fleet/policies.py TRACES`, {datetime.now(UTC):%Y-%m-%d}, Python {python_version()}, one "
        "core of a shared machine.",
        f"{played}. Traces, loads and rules are as the benchmark says at its top. used: device-time that jobs held, "
        "until the last is done; useful: without starts, resizes and lost work. stops: preemptions. Times in hours.",
        "",
        "| trace | load | policy | JCT mean | p50 | p99 | wait mean | p99 | used | useful | stops | resizes | CPU-s |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    )


if __name__ == "__main__":
    main()
