"""Mean JCT of three policies beside Pollux's artifact: what it publishes, and its own simulator run on the same files.

    python benchmarks/fleet/pollux.py TRACES ARTIFACT [--loads 0.5,1.0,1.5,2.0] [--policies tiresias,optimus,pollux]
        [--workloads 1-8] [--learned] [--beside PYTHON]

TRACES: a folder with pollux_validation.csv, pollux_placements.csv and pollux_scalability.csv. ARTIFACT: the folder
`simulator` of branch osdi21-artifact of github.com/petuum/adaptdl, for its workloads at four loads and the JCTs that
its simulator gave (results-jobload). --learned: jobs under Pollux learn their speeds as they run, as the artifact's do;
else they know them. 64 devices in nodes of 4, decisions every minute, 30 s for a start or a resize.
--beside: an interpreter that has what the artifact needs (pymoo 0.4.2, pandas 1, numpy below 1.24, scipy); each
workload is then played by its simulator too, as it is, of whose process the CPU-seconds are counted.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

from artifact import simulated

from gnomon.fleet.costs import Costs
from gnomon.fleet.goodput import Profiled, Profiles
from gnomon.fleet.kinds import ByKind
from gnomon.fleet.learned import LearnedForecasts
from gnomon.fleet.machines import Machines, Pool
from gnomon.fleet.policies import policy
from gnomon.fleet.policies.priority import tiresias_spread
from gnomon.fleet.replay import replay
from gnomon.fleet.rules import Rules
from gnomon.fleet.traces import Reading, read_trace

MACHINES = Machines((Pool(name="training", device="t4-16gb", nodes=16, per_node=4),))
RULES = Rules(costs=Costs(restart_s=30, first_start_s=30, resize_s=30))


def main() -> None:
    """Print a line a case, and the mean of each policy and load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--loads", default="0.5,1.0,1.5,2.0")
    parser.add_argument("--policies", default="tiresias,optimus,pollux")
    parser.add_argument("--workloads", default="1-8")
    parser.add_argument("--learned", action="store_true", help="jobs under Pollux learn their speeds")
    parser.add_argument("--beside", type=Path, help="interpreter for the artifact's own simulator")
    options = parser.parse_args()
    first, _, last = options.workloads.partition("-")
    # As in the artifact: larger local batches of YOLOv3 were not measured on many nodes; NCF stays on one device.
    profiles = Profiles.read(options.traces, max_local={"yolov3": 8}, fixed={"ncf": 32768})
    for load in options.loads.split(","):
        folder = options.artifact / ("workloads" if load == "1.0" else f"workloads-{load}")
        for name in options.policies.split(","):
            published = json.loads((options.artifact / f"results-jobload/{name}-{load}/summary.json").read_text())[
                "avgs"
            ]
            ours, theirs, beside = [], [], []
            told: Profiled | LearnedForecasts = Profiled(profiles, adaptive=name == "pollux")
            if options.learned and name == "pollux":
                told = LearnedForecasts(ByKind(MACHINES, {MACHINES.pools[0].device: told}))
            for number in range(int(first), int(last or first) + 1):
                began = time.process_time()
                trace = read_trace(folder / f"workload-{number}.csv", Reading(duration=profiles.duration_s))
                chosen = policy(name)
                if name == "tiresias":
                    chosen = replace(chosen, decide=tiresias_spread)
                result = replay(trace, MACHINES, chosen, rules=RULES, forecasts=told)
                ours.append(float(result.jct_s.mean()))
                theirs.append(published[f"workload-{number}"])
                own = f"{ours[-1]:8.1f} s ({time.process_time() - began:.1f} CPU-s)"
                line = f"load {load} {name:9} workload {number}: {own}, published {theirs[-1]:8.1f} s"
                line += f" ({ours[-1] / theirs[-1] - 1:+.1%})"
                if options.beside:
                    command = ("simulator.py", (folder / f"workload-{number}.csv").absolute(), "--policy", name)
                    seconds, _, cpu_s = simulated(options.beside, options.artifact, command)
                    beside.append(seconds)
                    line += f", its simulator here {seconds:8.1f} s ({ours[-1] / seconds - 1:+.1%}; {cpu_s:.1f} CPU-s)"
                print(line, flush=True)
            mine, other = sum(ours) / len(ours), sum(theirs) / len(theirs)
            line = f"load {load} {name:9} mean of {len(ours)}: {mine:.0f} s, published {other:.0f} s"
            line += f" ({mine / other - 1:+.1%})"
            if beside:
                here = sum(beside) / len(beside)
                line += f", its simulator here {here:.0f} s, {mine / here - 1:+.1%}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
