"""Mean JCT under Sia on a mixed cluster beside the simulator of Sia's artifact, on its own jobs.

    python benchmarks/fleet/sia.py ARTIFACT [--workloads philly/workload-1] [--known] [--others] [--beside PYTHON]

ARTIFACT: the folder `sia-simulator` of github.com/siasosp23/artifacts. Its cluster: 6 nodes of 4 T4, 2 of 8 A100 and 3
of 8 RTX 2080 Ti, decisions every minute, its seconds to start each application, and its slowdowns against what was
measured. Jobs learn their speeds as they run, as its jobs do. --known: in place of that they know them on every kind
and number of devices, and may start on many at once, as with a forecast. --beside: an interpreter that has what the
artifact needs (numpy 1.23, pandas 1.5, scipy, cvxpy with GLPK, psutil, rich); it plays each workload too, with
p = -0.5, lambda_n = 1.1 and lambda_a = 0.01 as its run_experiment.sh has them. Where its solver CBC is not installed,
let line 1034 of its sia.py ask for cp.GLPK_MI, as the line above it does; both find an optimum.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from artifact import simulated

from gnomon.fleet.costs import Costs
from gnomon.fleet.goodput import Profiled
from gnomon.fleet.job import Job
from gnomon.fleet.kinds import ByKind, read_kind
from gnomon.fleet.learned import LearnedForecasts
from gnomon.fleet.machines import Machines, Pool
from gnomon.fleet.policies import policy
from gnomon.fleet.policies.sia import sia
from gnomon.fleet.replay import replay
from gnomon.fleet.rules import Rules
from gnomon.fleet.traces import Reading, read_trace

KINDS = {"aws": ("t4-16gb", 6, 4), "dgx-ext": ("a100-sxm-40gb", 2, 8), "rtx": ("rtx-2080ti-11gb", 3, 8)}
"""The artifact's name -> (ours, nodes, devices in a node)."""
SLOWDOWN = {"cifar10": 1.8, "imagenet": 1.2, "yolov3": 1.2, "bert": 1.2, "deepspeech2": 1.2, "ncf": 1.5}
OTHERS = ("pollux", "srtf", "optimus", "gandiva", "easyscale", "tiresias", "fifo")
START_S = {"cifar10": 50, "deepspeech2": 25, "bert": 120, "yolov3": 80, "imagenet": 250, "ncf": 15}
WEIGHED_S = {"cifar10": 30, "deepspeech2": 25, "bert": 120, "yolov3": 45, "imagenet": 250}
"""What it takes a restart to cost when it weighs one."""
FLAGS = ("--policy=sia", "--policy_p_val=-0.5", "--mip_lambda_a=0.01", "--mip_lambda_n=1.1", "--interval=60",
         "--project_throughput", "--share_max_replicas")  # fmt: skip


def main() -> None:
    """Print a line a workload."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--workloads", default="philly/workload-1")
    parser.add_argument("--known", action="store_true", help="our jobs know their speeds before they ran")
    parser.add_argument("--others", action="store_true", help="other policies on the same cluster too")
    parser.add_argument("--beside", type=Path, help="interpreter for the artifact's own simulator")
    options = parser.parse_args()
    pools = tuple(Pool(name=name, device=name, nodes=nodes, per_node=n) for name, (_, nodes, n) in KINDS.items())
    machines = Machines(pools)
    profiles = {
        kind: read_kind(
            options.artifact / "traces", kind, slowdown=SLOWDOWN, max_local={"deepspeech2": 57} if kind == "rtx" else {}
        )
        for kind in KINDS
    }
    known = ByKind(machines, {kind: Profiled(own, adaptive=True) for kind, own in profiles.items()})
    told = known if options.known else LearnedForecasts(known)
    fixed = ByKind(machines, {kind: Profiled(own, adaptive=False) for kind, own in profiles.items()})
    rules = Rules(costs=Costs(restart_s=30, first_start_s=30, resize_s=30, by_model=START_S))
    for name in options.workloads.split(","):
        path = options.artifact / "workloads" / f"{name}.csv"
        began = time.process_time()
        trace = read_trace(path, Reading(duration=profiles["aws"].duration_s))
        chosen = replace(policy("sia"), decide=partial(sia, learns=not options.known, restart_s=WEIGHED_S))
        result = replay(trace, machines, chosen, rules=rules, forecasts=told)
        ours = float(result.jct_s.mean())
        line = f"{name}: {len(trace.jobs)} jobs, {ours:8.1f} s ({time.process_time() - began:.1f} CPU-s)"
        apart = {"ours": dict(zip((job.id for job in trace.jobs), result.jct_s.tolist(), strict=True))}
        if options.beside:
            with tempfile.NamedTemporaryFile(suffix=".log") as log:
                command = ("multi_simulator.py", path.absolute(), *FLAGS, f"--output={log.name}")
                theirs, apart["its simulator"], cpu_s = simulated(options.beside, options.artifact, command)
            line += f", its simulator {theirs:8.1f} s ({ours / theirs - 1:+.1%}; {cpu_s:.1f} CPU-s)"
        for whose, jobs in apart.items():
            means = ", ".join(f"{app} {seconds:.0f}" for app, seconds in by_application(trace.jobs, jobs).items())
            line += f"\n  {whose}, by application: {means} s"
        print(line, flush=True)
        for other in OTHERS if options.others else ():
            # Only Pollux chooses batches too; it learns as Sia does. The others know their speeds.
            heard = told if other == "pollux" else fixed
            mean = float(replay(trace, machines, policy(other), rules=rules, forecasts=heard).jct_s.mean())
            print(f"  {other}: {mean:.1f} s, Sia {1 - ours / mean:.0%} less", flush=True)


def by_application(jobs: Sequence[Job], jct_s: Mapping[str, float]) -> dict[str, float]:
    """Mean JCT of each application."""
    times: dict[str, list[float]] = {}
    for job in jobs:
        times.setdefault(job.model, []).append(jct_s[job.id])
    return {name: sum(own) / len(own) for name, own in sorted(times.items())}


if __name__ == "__main__":
    main()
