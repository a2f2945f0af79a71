"""How long the searches take that a planner should do while one watches.

    python benchmarks/search/speed.py [NAME …]      # prints the table kept in results/search.md

Each in a fresh process, byte code compiled before as after `pip install`: seconds of one core (process time, so that
other work on the machine does not count) and of the clock, points covered and predicted, peak memory of the process,
and the best plan. Points are those that were predicted, bounded away, duplicates or illegal; the search checks that
they add up to the space, and so does this.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from tempfile import TemporaryDirectory
from typing import Any

JOBS: dict[str, tuple[str, str, int, int, int]] = {
    "8b on 32": ("llama-3.1-8b", "4x8xh100-sxm", 128, 8192, 5),
    "175b on 512": ("gpt3-175b", "64x8xa100-sxm-80gb", 512, 2048, 5),
    "175b on 512, one": ("gpt3-175b", "64x8xa100-sxm-80gb", 512, 2048, 1),
    "1t on 4096": ("gpt-1t", "512x8xa100-sxm-80gb", 3072, 2048, 5),
    "405b on 16384": ("llama-3.1-405b", "2048x8xh100-sxm", 2048, 8192, 5),
    "deepseek-v3 on 16384": ("deepseek-v3", "2048x8xh100-sxm", 8192, 4096, 5),
}
"""Name -> model, cluster, global batch, sequence length, plans wanted: the fastest, and those next to it. gpt-1t:
Narayanan et al. 2021 (SC21), table 1, whose run of it had 3,072 A100 and this batch."""

_ONE = """
import json, resource, sys, time
name, cluster, batch, seq_len, top = json.loads(sys.argv[1])
start, clock = time.process_time(), time.perf_counter()
import gnomon
from gnomon.models.gpt import GptConfig, gpt
from gnomon.plans import Workload
from gnomon.report.planning import short
if name == "gpt-1t":
    name = gpt(GptConfig(name=name, num_layers=128, hidden_size=25600, num_heads=160, vocab_size=51200,
                         max_positions=2048, dropout=0.1, attention_dropout=0.1))
found = gnomon.plan(name, cluster, Workload(global_batch_size=batch, seq_len=seq_len), top=top)
best, counts = found.best[0], found.counts
assert counts.priced + counts.too_slow + counts.too_large + counts.duplicates + counts.illegal == found.space.size
print(json.dumps({
    "core_s": time.process_time() - start, "clock_s": time.perf_counter() - clock,
    "points": found.space.size, "predicted": counts.priced, "bounded": counts.bounded,
    "duplicates": counts.duplicates, "illegal": counts.illegal, "step_s": best.step_s, "plan": short(best),
    "mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
}))
"""


def run(job: tuple[str, str, int, int, int], byte_code: str) -> dict[str, Any]:
    """One search in a process of its own. byte_code: folder that it is kept in, whatever the shell says of it."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    env["PYTHONPYCACHEPREFIX"] = byte_code
    command = [sys.executable, "-c", _ONE, json.dumps(job)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=env)
    collected: dict[str, Any] = json.loads(done.stdout)
    return collected


def main() -> None:
    """Prints the table."""
    print(time.strftime("%Y-%m-%d"))
    columns = "search", "core s", "clock s", "MiB", "points", "predicted", "bounded", "duplicates", "illegal"
    print(f"| {' | '.join(columns)} | best step s | best plan |\n|{'---|' * (len(columns) + 2)}")
    with TemporaryDirectory() as folder:
        _table(sys.argv[1:] or list(JOBS), folder)


def _table(names: list[str], folder: str) -> None:
    run(("llama-3.1-8b", "1x8xh100-sxm", 8, 8192, 1), folder)  # compiles it
    for name in names:
        one = run(JOBS[name], folder)
        counts = " | ".join(f"{one[key]:,}" for key in ("points", "predicted", "bounded", "duplicates", "illegal"))
        print(
            f"| {name} | {one['core_s']:.1f} | {one['clock_s']:.1f} | {one['mib']:.0f} | {counts} | "
            f"{one['step_s']:.3f} | {one['plan']} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
