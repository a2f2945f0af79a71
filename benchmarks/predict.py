"""How fast a prediction is: the first in a fresh process, the next, and a job of 16,384 devices.

    python benchmarks/predict.py            # about 10 s; prints the table kept in results/predict.md

Claims: the first prediction in a fresh process (imports, catalogue and model included) takes < 0.7 s, another plan of
the same model < 20 ms, Llama 3.1 405B on 16,384 H100 (pp 16, dp 128, tp 8, 1F1B of 32 microbatches) < 1 s in a warm
process. Fresh processes: seven runs each, medians with least and most; starting the interpreter is not counted. "next"
is the median of nine plans (tp 2, 4, 8 under ZeRO 1, 2, 3) that share nothing but the model, "worst next" the slowest
of them.
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import time

RUNS = 7

_FIRST = """
import time
start = time.perf_counter()
from gnomon.plans import Mesh, Optimizer, Plan, Schedule, Workload
from gnomon.prediction import predict
work = Workload(global_batch_size=64, seq_len=4096)
plan = Plan(mesh=Mesh(dp_shard=32), schedule=Schedule(micro_batch_size=1), optimizer=Optimizer(zero=3))
predict("llama-3.1-8b", "4x8xh100-sxm", plan, work)
first = time.perf_counter() - start
laps = []
for tp in (2, 4, 8):
    for zero in (1, 2, 3):
        plan = Plan(mesh=Mesh(dp_shard=32 // tp, tp=tp), schedule=Schedule(micro_batch_size=1),
                    optimizer=Optimizer(zero=zero))
        start = time.perf_counter()
        predict("llama-3.1-8b", "4x8xh100-sxm", plan, work)
        laps.append(time.perf_counter() - start)
"""

_LARGE = """
from gnomon.plans import Layout
plan = Plan(mesh=Mesh(pp=16, dp_shard=128, tp=8), schedule=Schedule(micro_batch_size=1),
            layout=Layout(sequence_parallel=True), optimizer=Optimizer(zero=1))
start = time.perf_counter()
predict("llama-3.1-405b", "2048x8xh100-sxm", plan, Workload(global_batch_size=4096, seq_len=8192))
large = time.perf_counter() - start
import json
print(json.dumps({"first": first, "next": sorted(laps)[len(laps) // 2], "worst next": max(laps), "405b": large}))
"""


def once() -> dict[str, float]:
    """Seconds of each claim in a fresh process."""
    done = subprocess.run([sys.executable, "-c", _FIRST + _LARGE], capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    """Prints the table."""
    runs = [once() for _ in range(RUNS)]
    print(f"{time.strftime('%Y-%m-%d')}, Python {platform.python_version()}, {RUNS} fresh processes")
    print()
    print("| what | median | least | most | claim |")
    print("|---|---|---|---|---|")
    claims = {"first": 0.7, "next": 0.02, "worst next": None, "405b": 1.0}
    for name, claim in claims.items():
        values = [run[name] for run in runs]
        median, said = statistics.median(values), f"< {claim} s" if claim else ""
        print(f"| {name} | {median:.3f} s | {min(values):.3f} s | {max(values):.3f} s | {said} |")


if __name__ == "__main__":
    main()
