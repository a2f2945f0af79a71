"""Mean JCT under Sia on a mixed cluster beside the simulator of Sia's artifact, on its own jobs.

    python benchmarks/fleet/sia.py ARTIFACT [--workloads philly/workload-1,saturn/workload-1] [--beside PYTHON]

ARTIFACT: the folder `sia-simulator` of github.com/siasosp23/artifacts. Its cluster: 6 nodes of 4 T4, 2 of 8 A100 and 3
of 8 RTX 2080 Ti, decisions every minute, its seconds to start each application, and its slowdowns against what was
measured. --beside: an interpreter that has what the artifact needs (numpy 1.23, pandas 1.5, scipy, cvxpy with GLPK,
psutil, rich); it plays each workload too, with p = -0.5, lambda_n = 1.1 and lambda_a = 0.01 as its run_experiment.sh
has them. Where its solver CBC is not installed, let line 1034 of its sia.py ask for cp.GLPK_MI, as the line above it
does; both find an optimum.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import subprocess
import tempfile
import time
from pathlib import Path

from gnomon.fleet.forecast import Costs
from gnomon.fleet.goodput import Profiled
from gnomon.fleet.kinds import ByKind, read_kind
from gnomon.fleet.machines import Machines, Pool
from gnomon.fleet.policies import policy
from gnomon.fleet.replay import replay
from gnomon.fleet.rules import Rules
from gnomon.fleet.traces import Reading, read_trace

KINDS = {"aws": ("t4-16gb", 6, 4), "dgx-ext": ("a100-sxm-40gb", 2, 8), "rtx": ("rtx-2080ti-11gb", 3, 8)}
"""The artifact's name -> (ours, nodes, devices in a node)."""
SLOWDOWN = {"cifar10": 1.8, "imagenet": 1.2, "yolov3": 1.2, "bert": 1.2, "deepspeech2": 1.2, "ncf": 1.5}
START_S = {"cifar10": 50, "deepspeech2": 25, "bert": 120, "yolov3": 80, "imagenet": 250, "ncf": 15}
FLAGS = ("--policy=sia", "--policy_p_val=-0.5", "--mip_lambda_a=0.01", "--mip_lambda_n=1.1", "--interval=60",
         "--project_throughput", "--share_max_replicas")  # fmt: skip


def main() -> None:
    """Print a line a workload."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--workloads", default="philly/workload-1,saturn/workload-1")
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
    told = ByKind(machines, {kind: Profiled(known, adaptive=True) for kind, known in profiles.items()})
    rules = Rules(costs=Costs(restart_s=30, first_start_s=30, resize_s=30, by_model=START_S))
    for name in options.workloads.split(","):
        path = options.artifact / "workloads" / f"{name}.csv"
        began = time.process_time()
        trace = read_trace(path, Reading(duration=profiles["aws"].duration_s))
        result = replay(trace, machines, policy("sia"), rules=rules, forecasts=told)
        ours = float(result.jct_s.mean())
        line = f"{name}: {len(trace.jobs)} jobs, {ours:8.1f} s ({time.process_time() - began:.1f} CPU-s)"
        if options.beside:
            theirs, cpu_s = simulated(options.beside, options.artifact, path)
            line += f", its simulator {theirs:8.1f} s ({ours / theirs - 1:+.1%}; {cpu_s:.1f} CPU-s)"
        print(line, flush=True)


def simulated(python: Path, artifact: Path, workload: Path) -> tuple[float, float]:
    """(mean JCT, CPU-seconds) of the artifact's simulator on a workload."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.NamedTemporaryFile(suffix=".log") as log:
        run = subprocess.run(
            [python.absolute(), "multi_simulator.py", workload.absolute(), *FLAGS, f"--output={log.name}"],
            cwd=artifact,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": ""},
            capture_output=True,
            text=True,
            check=True,
        )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    means = re.findall(r"^Average JCT: (\S+)$", run.stdout, re.MULTILINE)
    return float(means[-1]), after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
