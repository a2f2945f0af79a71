"""Lyra's claims on public traces: JCT against no loaning, preemptions against random reclaim, inference met; ablations.

    python benchmarks/fleet/lyra.py TRACES [--days 40,57,74] [--seeds 0,1,2]

TRACES: a folder with philly_jobs.csv and genai_load_5min.csv. Of each week every third job (which third is the seed's),
of at most 64 devices and two days; 15 nodes of 8 V100 train, 16 more serve inference under the load of the trace, day
after day; of jobs on several devices 30% are elastic from half to twice what they asked for (drawn by the seed).
A job that is stopped loses the work since its last checkpoint (30 min) and takes 60 s to start again.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import mean

from gnomon.fleet.costs import Costs
from gnomon.fleet.job import between
from gnomon.fleet.machines import machines
from gnomon.fleet.policies import policy
from gnomon.fleet.replay import replay
from gnomon.fleet.rules import Rules
from gnomon.fleet.scenario import DAY_S, read_demand, repeated, with_elastic
from gnomon.fleet.traces import read_trace

NAMES = (
    "lyra-no-loan", "lyra-elastic-only", "lyra-rigid-random", "lyra-rigid-fewest", "lyra-rigid", "lyra-random",
    "lyra-fewest", "lyra",
)  # fmt: skip
MOST_DEVICES, LONGEST_S = 64, 2 * DAY_S


def main() -> None:
    """Print every run, then the means and the claims."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path)
    parser.add_argument("--days", default="40,57,74")
    parser.add_argument("--seeds", default="0,1,2")
    options = parser.parse_args()
    every = read_trace(options.traces / "philly_jobs.csv")
    demand = repeated(read_demand(options.traces / "genai_load_5min.csv"), 40 * DAY_S)
    cluster = machines("15x8xv100-sxm-32gb", inference="16x8xv100-sxm-32gb")
    rules = Rules(costs=Costs(saves_when_preempted=False), demand=demand)
    collected = defaultdict(list)
    for day in map(float, options.days.split(",")):
        week = between(every, day * DAY_S, (day + 7) * DAY_S)
        for seed in map(int, options.seeds.split(",")):
            jobs = [job for job in week.jobs[seed::3] if job.devices <= MOST_DEVICES]
            trace = replace(week, jobs=tuple(replace(job, work_s=min(job.work_s, LONGEST_S)) for job in jobs))
            trace = with_elastic(trace, 0.3, seed)
            for name in NAMES:
                began = time.process_time()
                result = replay(trace, cluster, policy(name), rules=rules)
                f = result.figures()
                collected[name].append(f | {"lost_h": result.device_s["lost"] / 3600})
                print(
                    f"day {day:.0f} seed {seed} {name:18} {len(jobs):,} jobs: JCT {f['jct_mean_s'] / 3600:.2f} h, "
                    f"p99 {f['jct_p99_s'] / 3600:.1f} h, queue {f['queue_mean_s'] / 3600:.2f} h, "
                    f"{result.preemptions} preempted, {result.resizes} resized, unmet {result.unmet_s:.0f}, "
                    f"{time.process_time() - began:.1f} CPU-s",
                    flush=True,
                )
    print(
        f"\n{'mean of ' + str(len(collected['lyra'])):18} JCT h  p99 h  queue h  preempted  resized  lost GPU-h  unmet"
    )
    for name in NAMES:
        m = {key: mean(entry[key] for entry in collected[name]) for key in collected[name][0]}
        print(
            f"{name:18} {m['jct_mean_s'] / 3600:5.2f}  {m['jct_p99_s'] / 3600:5.1f}  {m['queue_mean_s'] / 3600:7.2f}  "
            f"{m['preemptions']:9.1f}  {m['resizes']:7.1f}  {m['lost_h']:10.1f}  {m['unmet_node_s']:5.0f}"
        )
    ratios = [
        a["jct_mean_s"] / b["jct_mean_s"] for a, b in zip(collected["lyra-no-loan"], collected["lyra"], strict=True)
    ]
    print(f"\nJCT without loaning over Lyra's: {min(ratios):.2f} to {max(ratios):.2f}, mean {mean(ratios):.2f}")
    for a, b in (("lyra", "lyra-random"), ("lyra-rigid", "lyra-rigid-random")):
        pairs = [(x["preemptions"], y["preemptions"]) for x, y in zip(collected[a], collected[b], strict=True)]
        fewer = sum(x <= y for x, y in pairs)
        total = [sum(pair) for pair in zip(*pairs, strict=True)]
        print(f"preemptions, {a} against {b}: {total[0]:.0f} and {total[1]:.0f}; no more in {fewer} of {len(pairs)}")
    unmet = sum(run["unmet_node_s"] for runs in collected.values() for run in runs)
    print(f"node-seconds that inference missed in all runs: {unmet:.0f}")


if __name__ == "__main__":
    main()
