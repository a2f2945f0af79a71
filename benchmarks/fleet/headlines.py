"""What each paper claims of its policy, and what a replay on its own kind of trace gives here.

    python benchmarks/fleet/headlines.py TRACES

TRACES: a folder with philly_jobs.csv, the tables of Pollux, Gavel's two and openb_pods_default.csv. Each policy is
played beside what its paper compares it with, where that is built, on a trace of its kind: Philly's week of days 75 to
82 (every third job, of at most 64 devices and two days, arriving twice as fast) for cluster schedulers, Pollux's own
workloads for Pollux, jobs of Gavel's models with the speeds that Gavel measured of two on one device for sharing, and
the pods that ask for a part of a GPU for MIG. Writes results/fleet_headlines.md. Left out: Lyra (`lyra.py`), Sia
(`sia.py`), and claims on what a replay has not: power, profiling, accuracy.
"""

from __future__ import annotations

import argparse
import csv
import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from gnomon.fleet.costs import Costs
from gnomon.fleet.forecast import Curve
from gnomon.fleet.goodput import Profiled, Profiles
from gnomon.fleet.job import Job, Trace, between
from gnomon.fleet.machines import Machines, machines
from gnomon.fleet.points import MeasuredPoints, Points, read_pairs, read_points
from gnomon.fleet.policies import policy
from gnomon.fleet.policies.sharing import QOS_TARGET
from gnomon.fleet.replay import replay
from gnomon.fleet.result import Result
from gnomon.fleet.rules import Rules
from gnomon.fleet.scenario import DAY_S
from gnomon.fleet.state import Decision, Forecasts, Policy, State
from gnomon.fleet.traces import Reading, read_trace

RESULTS = Path(__file__).resolve().parents[1] / "results" / "fleet_headlines.md"
RULES = Rules(costs=Costs(restart_s=30, first_start_s=30, resize_s=30))
P100, GIB = "p100-sxm-16gb", 2**30
FASTER = 1000
"""Pods of openb come so many times as fast: in the file about 20 that ask for a part of a GPU run at a time."""
PROFILES = ((1, "1g.5gb"), (2, "2g.10gb"), (3, "3g.20gb"), (4, "4g.20gb"), (7, "7g.40gb"))
"""Sevenths of an A100 and the MIG profile that has them."""

Pairs = Mapping[tuple[str, str, str], tuple[float, float]]
Row = tuple[str, str, str, str]
"""Policy, what the paper claims, what is seen here, on which trace and why it differs."""


def main() -> None:
    """Print and write a row a claim."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path)
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    lines = [
        "# Papers' claims of their policies, and replays here",
        "",
        f"`python benchmarks/fleet/headlines.py TRACES`, {datetime.now(UTC):%Y-%m-%d}; traces and loads are as the "
        "benchmark says at its top. Claims are of the papers' abstracts, but Pollux's of its artifact's README and "
        "EasyScale's of its artifact's simulated trace. Lyra's and Sia's are in [fleet.md](fleet.md).",
        "",
        "| policy | claim | here | trace, and what differs |",
        "|---|---|---|---|",
    ]
    for part in (schedulers, pollux, sharing, slices):
        began = time.process_time()
        for row in part(options.traces):
            lines.append(f"| {' | '.join(row)} |")
            print(lines[-1], flush=True)
        print(f"({part.__name__}: {time.process_time() - began:.0f} CPU-s)", flush=True)
    options.output.write_text("\n".join(lines) + "\n")


def schedulers(folder: Path) -> Iterator[Row]:
    """Tiresias and EasyScale against first come first served."""
    week = between(read_trace(folder / "philly_jobs.csv"), 75 * DAY_S, 82 * DAY_S)
    jobs = tuple(
        replace(job, work_s=min(job.work_s, 2 * DAY_S), submit_s=job.submit_s / 2)
        for job in week.jobs[::3]
        if job.devices <= 64
    )
    trace, on = replace(week, jobs=jobs), machines("15x8xv100-sxm-32gb")
    fifo, tiresias = (play(trace, on, name) for name in ("fifo", "tiresias"))
    where = f"Philly, {len(jobs):,} jobs on {on.text}"
    soonest = max(job.submit_s + job.work_s for job in jobs) / 3600
    yield (
        "tiresias", "mean JCT up to 5.5 times shorter than in production (YARN's)", ratio(fifo, tiresias), where
    )  # fmt: skip
    # A job keeps as many logical workers as it asked for devices, and runs on one device or more.
    elastic = replace(trace, jobs=tuple(replace(job, min_devices=1) for job in jobs))
    single = sum(job.devices == 1 for job in jobs) / len(jobs)
    for spec, claim, why in (
        (
            "15x8xv100-sxm-32gb",
            "8.3 times shorter mean JCT than YARN's, 2.46 times shorter makespan, devices alike",
            f"on what it asked for no job is faster, so nothing ends all before hour {soonest:.0f}, and fifo does at "
            "hour {end:.0f}",
        ),
        (
            "7x8xv100-sxm-32gb+8x8xp100-sxm-16gb+8x8xt4-16gb",
            "13.2 times and 2.76 times, devices of several kinds",
            "the jobs that end last ask for 8 V100 and stay on the slower devices that they began on, as ours are not "
            "moved to faster ones",
        ),
    ):
        cluster = machines(spec)
        told = Curve(cluster, proportional=True)
        base, own = play(elastic, cluster, "fifo"), play(elastic, cluster, "easyscale", told)
        yield (
            "easyscale", claim, f"{ratio(base, own)}; makespan {base.end_s / own.end_s:.2f} times shorter",
            f"Philly, jobs run on one device up to what they asked for, on {spec}; {single:.0%} ask for one; "
            + why.format(end=base.end_s / 3600),
        )  # fmt: skip


def pollux(folder: Path) -> Iterator[Row]:
    """Pollux against Optimus and Tiresias."""
    profiles, on = Profiles.read(folder, max_local={"yolov3": 8}, fixed={"ncf": 32768}), machines("16x4xt4-16gb")
    means = dict.fromkeys(("pollux", "optimus", "tiresias"), 0.0)
    for number in range(1, 5):
        reading = Reading(duration=profiles.duration_s, workload=number)
        trace = read_trace(folder / "pollux_workloads.csv", reading)
        for name in means:
            told = Profiled(profiles, adaptive=name == "pollux")
            means[name] += float(play(trace, on, name, told).jct_s.mean()) / 4
    less = [f"{1 - means['pollux'] / means[other]:.0%} less than {other}" for other in ("optimus", "tiresias")]
    yield (
        "pollux", "mean JCT 48% less than Optimus, 32% less than Tiresias", ", ".join(less),
        "its workloads 1 to 4; jobs know their speeds",
    )  # fmt: skip


def sharing(folder: Path) -> Iterator[Row]:
    """Two jobs on one device."""
    points, _ = read_points(folder / "gavel_throughputs.csv")
    pairs = read_pairs(folder / "gavel_pair_throughputs.csv")
    models = sorted(model for model, kind in points if kind == P100 and (model, model, P100) in pairs)
    chance, jobs, at = random.Random(0), [], 0.0
    for number in range(600):
        at += chance.expovariate(1 / 200)
        jobs.append(
            Job(
                id=str(number), submit_s=at, work_s=math.exp(chance.uniform(math.log(600), math.log(40000))), devices=1,
                model=chance.choice(models), device=P100, memory_bytes=int(chance.uniform(2, 8) * GIB),
            )
        )  # fmt: skip
    trace, on = Trace(name="Gavel's models", format="drawn", jobs=tuple(jobs)), machines(f"8x4x{P100}")
    told = MeasuredPoints(points, Curve(on), P100, pairs=pairs)
    base = play(trace, on, "fifo", told)
    where = f"{len(jobs)} jobs of Gavel's {len(models)} models, drawn, on {on.text}; speeds of pairs are Gavel's"
    kept: dict[str, float] = {}
    results: dict[str, Result] = {}
    for name in ("gandiva", "cognn", "qos", "federated"):
        seen: list[tuple[str, str]] = []
        results[name] = play(trace, on, watched(policy(name), seen), told)
        by_id = {job.id: job for job in jobs}
        shares = [told.speed_share(by_id[host], by_id[joins]) for host, joins in seen]
        kept[name] = sum(share >= QOS_TARGET for share in shares) / max(1, len(shares))
    shorter = {name: ratio(base, result) for name, result in results.items()}
    together = float(np.mean([_together(points, pairs, a, b) for a in models for b in models]))
    more = base.end_s / results["gandiva"].end_s - 1
    yield (
        "gandiva",
        "utilisation 26% higher",
        f"{more:.0%} more work a second; {shorter['gandiva']}",
        f"{where}: two do {together:.2f} times the work of one in the mean of all pairs; ours packs those that wait, "
        "and moves none to a better partner",
    )
    waits = base.waited_s.mean() / results["cognn"].waited_s.mean()
    yield (
        "cognn", "shorter completion and queueing", f"{shorter['cognn']}; queueing {waits:.2f} times shorter",
        f"{where}; memory from 2 to 8 GiB, drawn",
    )  # fmt: skip
    yield (
        "qos", "2.27% and 7.58% more pairs keep 95% than under Spart and Rollover",
        f"{kept['qos']:.0%} of pairs keep it, {kept['gandiva']:.0%} under gandiva; {shorter['qos']}",
        f"{where}; pairs are chosen, where the paper divides the SMs of given pairs, so it is not the paper's figure",
    )  # fmt: skip
    yield (
        "federated", "2.1 times (against a strict partition)", shorter["federated"],
        f"{where}; beside fifo, which partitions nothing",
    )  # fmt: skip


def _together(points: Points, pairs: Pairs, a: str, b: str) -> float:
    """Work of two models on one device, in that of one alone."""
    of_a, of_b = pairs[a, b, P100]
    return of_a / dict(points[a, P100])[1] + of_b / dict(points[b, P100])[1]


def slices(folder: Path) -> Iterator[Row]:
    """MIG on and off."""
    jobs = []
    with (folder / "openb_pods_default.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            milli = int(row["gpu_milli"] or 0)
            if row["num_gpu"] != "1" or not row["scheduled_time"] or milli >= 1000:
                continue
            profile = next(name for sevenths, name in PROFILES if sevenths >= milli * 7 / 1000)
            start, end = float(row["scheduled_time"]), float(row["deletion_time"])
            jobs.append(
                Job(
                    id=row["name"], submit_s=float(row["creation_time"]) / FASTER, work_s=max(end - start, 1.0),
                    devices=int(profile[0]), slice=profile,
                )
            )  # fmt: skip
    whole = sum(job.devices == 7 for job in jobs) / len(jobs)
    jobs.sort(key=lambda job: job.submit_s)
    alone = tuple(replace(job, devices=1, slice="") for job in jobs)
    peak = {"fifo": 0, "elastic-batch": 0}
    for name, own, mig in (("fifo", alone, False), ("elastic-batch", tuple(jobs), True)):
        used: list[int] = []
        on = machines("1500x1xa100-sxm-40gb", mig=mig)
        play(Trace(name="openb", format="openb", jobs=own), on, counted(policy(name), used))
        peak[name] = max(used)
    yield (
        "elastic-batch", "half as many GPU instances as with MIG off",
        f"{peak['elastic-batch']} devices at most, {peak['fifo']} with MIG off "
        f"({1 - peak['elastic-batch'] / peak['fifo']:.0%} fewer)",
        f"{len(jobs):,} pods of openb that ask for a part of a GPU, {FASTER:,} times as fast; none is batch inference, "
        f"and {whole:.0%} ask for more than four sevenths of a GPU, which is a whole one",
    )  # fmt: skip


def play(trace: Trace, on: Machines, chosen: str | Policy, told: Forecasts | None = None) -> Result:
    """A replay."""
    own = policy(chosen) if isinstance(chosen, str) else chosen
    return replay(trace, on, own, rules=RULES, forecasts=told)


def ratio(base: Result, own: Result) -> str:
    """Of mean JCTs."""
    return f"mean JCT {base.jct_s.mean() / own.jct_s.mean():.2f} times shorter than fifo"


def watched(chosen: Policy, seen: list[tuple[str, str]]) -> Policy:
    """The policy, which notes (running job, joining job) of every pair that it makes."""

    def decide(state: State, forecasts: Forecasts) -> Sequence[Decision]:
        decisions = chosen.decide(state, forecasts)
        seen.extend((decision.shares_with, decision.job) for decision in decisions if decision.shares_with)
        return decisions

    return replace(chosen, decide=decide)


def counted(chosen: Policy, used: list[int]) -> Policy:
    """The policy, which notes how many nodes are in use after each decision."""

    def decide(state: State, forecasts: Forecasts) -> Sequence[Decision]:
        decisions = chosen.decide(state, forecasts)
        held = {node for active in state.running for node, _ in active.allocation}
        used.append(len(held | {node for decision in decisions for node, _ in decision.allocation}))
        return decisions

    return replace(chosen, decide=decide, order=None)


if __name__ == "__main__":
    main()
