"""How long the searches take that a planner should do while one watches.

    python benchmarks/search/speed.py [NAME …]      # prints the table kept in results/search.md

Each in a fresh process: seconds of one core (process time, so that other work on the machine does not count) and of the
clock, points covered and predicted, memory of the process, and the best plan.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

JOBS = {
    "8b on 32": ("llama-3.1-8b", "4x8xh100-sxm", 128, 8192),
    "175b on 512": ("gpt3-175b", "64x8xa100-sxm-80gb", 512, 2048),
    "405b on 16384": ("llama-3.1-405b", "2048x8xh100-sxm", 2048, 8192),
    "deepseek-v3 on 16384": ("deepseek-v3", "2048x8xh100-sxm", 8192, 4096),
}
"""Name -> model, cluster, global batch, sequence length."""

_ONE = """
import json, resource, sys, time
name, cluster, batch, seq_len = json.loads(sys.argv[1])
start, clock = time.process_time(), time.perf_counter()
import gnomon
from gnomon.plans import Workload
from gnomon.report.planning import short
found = gnomon.plan(name, cluster, Workload(global_batch_size=batch, seq_len=seq_len))
best = found.best[0]
print(json.dumps({
    "core_s": time.process_time() - start, "clock_s": time.perf_counter() - clock,
    "points": found.counts.space, "predicted": found.counts.priced, "step_s": best.step_s, "plan": short(best),
    "mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
}))
"""


def main() -> None:
    """Prints the table."""
    print(time.strftime("%Y-%m-%d"))
    print("| search | core s | clock s | points | predicted | MiB | best step s | best plan |")
    print("|---|---|---|---|---|---|---|---|")
    for name in sys.argv[1:] or JOBS:
        done = subprocess.run(
            [sys.executable, "-c", _ONE, json.dumps(JOBS[name])], capture_output=True, text=True, check=True
        )
        one = json.loads(done.stdout)
        print(
            f"| {name} | {one['core_s']:.1f} | {one['clock_s']:.1f} | {one['points']:,} | {one['predicted']} | "
            f"{one['mib']:.0f} | {one['step_s']:.3f} | {one['plan']} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
