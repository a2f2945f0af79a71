"""How fast a prediction is: the first in a fresh process, the next, and a job of 16,384 devices.

    python benchmarks/predict.py            # about 10 s; prints the table kept in results/predict.md

Claims: the first prediction in a fresh process (imports, catalogue and model included) takes < 0.7 s, another plan of
the same model < 20 ms, Llama 3.1 405B on 16,384 H100 (pp 16, dp 128, tp 8, 1F1B of 32 microbatches) < 1 s in a warm
process. Fresh processes: seven runs each, seconds of one core (process time, so that other work on the machine counts
less) and of the clock; starting the interpreter is not counted, and byte code is there, as after `pip install` (the run
before the seven, which compiles it, is given apart). "next" is the median of nine plans (tp 2, 4, 8 under ZeRO 1, 2, 3)
that share nothing but the model, "worst next" the slowest of them. The second table: what kernels lose to collectives
under ZeRO 3 (`prediction.contention`) adds to a prediction in a warm process, medians of nine with it and nine without,
in turns; claimed < 15 %.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from tempfile import TemporaryDirectory

from gnomon.hardware import parse_cluster
from gnomon.plans import Mesh, Optimizer, Plan, Schedule, Workload
from gnomon.prediction import Pricing, predict
from gnomon.program import Structure
from gnomon.simulate import Durations

RUNS = 7

_FIRST = """
import time
def now():
    return time.process_time(), time.perf_counter()
def since(start):
    return [b - a for a, b in zip(start, now())]
start = now()
from gnomon.plans import Mesh, Optimizer, Plan, Schedule, Workload
from gnomon.prediction import predict
work = Workload(global_batch_size=64, seq_len=4096)
plan = Plan(mesh=Mesh(dp_shard=32), schedule=Schedule(micro_batch_size=1), optimizer=Optimizer(zero=3))
predict("llama-3.1-8b", "4x8xh100-sxm", plan, work)
first = since(start)
laps = []
for tp in (2, 4, 8):
    for zero in (1, 2, 3):
        plan = Plan(mesh=Mesh(dp_shard=32 // tp, tp=tp), schedule=Schedule(micro_batch_size=1),
                    optimizer=Optimizer(zero=zero))
        start = now()
        predict("llama-3.1-8b", "4x8xh100-sxm", plan, work)
        laps.append(since(start))
"""

_LARGE = """
from gnomon.plans import Layout
plan = Plan(mesh=Mesh(pp=16, dp_shard=128, tp=8), schedule=Schedule(micro_batch_size=1),
            layout=Layout(sequence_parallel=True), optimizer=Optimizer(zero=1))
start = now()
predict("llama-3.1-405b", "2048x8xh100-sxm", plan, Workload(global_batch_size=4096, seq_len=8192))
large = since(start)
import json
print(json.dumps({"first": first, "next": sorted(laps)[len(laps) // 2], "worst next": max(laps), "405b": large}))
"""


def once(byte_code: str) -> dict[str, tuple[float, float]]:
    """Seconds of one core and of the clock of each claim in a fresh process.

    byte_code: folder that it is kept in, whatever the shell says of it.
    """
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    env["PYTHONPYCACHEPREFIX"] = byte_code
    command = [sys.executable, "-c", _FIRST + _LARGE]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    collected: dict[str, tuple[float, float]] = json.loads(done.stdout)
    return collected


LOSSES = {
    "8B on 32 H100, 2 microbatches": ("llama-3.1-8b", "4x8xh100-sxm", {}, 1, 64, 4096),
    "8B on 32 H100, tp 2": ("llama-3.1-8b", "4x8xh100-sxm", {"tp": 2}, 1, 64, 4096),
    "8B on 8 H100, 8 microbatches": ("llama-3.1-8b", "1x8xh100-sxm", {}, 1, 64, 4096),
    "175B on 512 A100, pp 4, 8 microbatches": ("gpt3-175b", "64x8xa100-sxm-80gb", {"tp": 4, "pp": 4}, 2, 512, 2048),
    "175B on 512 A100, pp 8, 32 microbatches": ("gpt3-175b", "64x8xa100-sxm-80gb", {"tp": 4, "pp": 8}, 1, 512, 2048),
}
"""Name -> model, cluster, axes beside dp_shard, microbatch size, global batch, sequence length."""


def losses(name: str) -> tuple[float, float]:
    """Seconds of process time of a warm prediction with and without losses to collectives."""
    model, cluster, axes, micro, batch, seq_len = LOSSES[name]
    devices = len(parse_cluster(cluster).devices)
    shards = devices // math.prod(axes.values())
    plan = Plan(
        mesh=Mesh(dp_shard=shards, **axes), schedule=Schedule(micro_batch_size=micro), optimizer=Optimizer(zero=3)
    )
    module, work = sys.modules["gnomon.prediction.predict"], Workload(global_batch_size=batch, seq_len=seq_len)
    real = module.contended  # type: ignore[attr-defined]
    collected: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(2 * (1 + 9)):
        with_losses = turn % 2 == 0
        module.contended = real if with_losses else _alone  # type: ignore[attr-defined]
        start = time.process_time()
        predict(model, cluster, plan, work)
        collected[with_losses].append(time.process_time() - start)
    module.contended = real  # type: ignore[attr-defined]
    return statistics.median(collected[True][1:]), statistics.median(collected[False][1:])


def _alone(structure: Structure, pricing: Pricing) -> tuple[Durations, None]:
    return pricing.durations(structure.program), None


def main() -> None:
    """Prints the tables."""
    with TemporaryDirectory() as folder:
        unprepared = once(folder)["first"]
        runs = [once(folder) for _ in range(RUNS)]
    print(f"{time.strftime('%Y-%m-%d')}, Python {platform.python_version()}, {RUNS} fresh processes")
    print()
    print("| what | core s, median | least | most | clock s, median | claim |")
    print("|---|---|---|---|---|---|")
    claims = {"first": 0.7, "next": 0.02, "worst next": None, "405b": 1.0}
    for name, claim in claims.items():
        core, clock = zip(*(run[name] for run in runs), strict=True)
        least, median, most = min(core), statistics.median(core), max(core)
        text = f"< {claim} s" if claim else ""
        print(f"| {name} | {median:.3f} | {least:.3f} | {most:.3f} | {statistics.median(clock):.3f} | {text} |")
    print(f"\nfirst of all, nothing compiled to byte code yet: {unprepared[0]:.3f} s of one core\n")
    print("| plan under ZeRO 3 | with losses | without | added |")
    print("|---|---|---|---|")
    for name in LOSSES:
        slow, fast = losses(name)
        print(f"| {name} | {slow * 1e3:.1f} ms | {fast * 1e3:.1f} ms | {slow / fast - 1:.0%} |")


if __name__ == "__main__":
    main()
