"""How fast a big Program is built, checked and played, and how fast thousands of price vectors are.

    python benchmarks/simulate.py            # about 20 s on one core; prints the table kept in results/simulate.md

Claims: 64 stages x 512 microbatches x 8 virtual stages with explicit sends and receives (1.57 million rows) built,
checked and played with memory and period in < 1.5 s and < 1 GiB on a quiet core; 2,048 duration vectors over one
64 x 512 1F1B structure played once in < 1 s, to their periods in < 2.5 s. Five runs each, medians; every run of the
first claim is a fresh process, so that memory and first-touch costs are counted.
"""

from __future__ import annotations

import json
import platform
import resource
import statistics
import subprocess
import sys
import time

import numpy as np

from gnomon.lowering import interleaved_one_f_one_b, one_f_one_b, with_messages, with_optimizer
from gnomon.program import issue_order_peak, validate
from gnomon.simulate import Clock, Durations, Script, durations, makespans, period, periods, play

ZERO = {"SEND_F": 0.0, "RECV_F": 0.0, "SEND_B": 0.0, "RECV_B": 0.0, "OPT": 0.0}
SIZES = {"S": 1.0, "X": 0.0, "Y": 0.0, "DX": 0.0, "DY": 0.0, "P": 0.0, "G": 0.0}


def one_big_program() -> dict[str, float]:
    """Seconds of each part, the answers, and peak memory, in this process."""
    laps, begin = {}, time.perf_counter()

    def lap(name: str) -> None:
        laps[name] = time.perf_counter() - begin - sum(laps.values())

    program = with_messages(with_optimizer(interleaved_one_f_one_b(64, 512, 8))).program()
    lap("build")
    structure = validate(program)
    lap("check and order")
    peak = issue_order_peak(program, structure.deps, SIZES)
    lap("memory")
    prices = durations(program, {"F": 1 / 8, "B": 2 / 8, **ZERO})
    makespan = float(play(Clock.of(structure, prices)).end.max())
    lap("play")
    steady = period(structure, prices).seconds
    lap("period")
    assert makespan == 512 * 3 + 63 * 3 / 8, makespan
    total = sum(laps.values())
    mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    rows = program.num_rows
    return {
        **laps,
        "total": total,
        "MiB": mib,
        "rows": rows,
        "makespan_s": makespan,
        "period_s": steady,
        "peak": peak[0].bytes,
    }


def many_vectors() -> dict[str, float]:
    """Seconds to prepare a 64 x 512 1F1B structure, to play 2,048 vectors once, and to find their periods."""
    program = with_messages(with_optimizer(one_f_one_b(64, 512))).program()
    structure = validate(program)
    begin = time.perf_counter()
    script = Script.of(structure)
    prepared = time.perf_counter()
    base = durations(program, {"F": 1.0, "B": 2.0, **ZERO}).busy
    rng = np.random.default_rng(0)
    grid = 2.0**-36
    busy = np.round(base * (0.5 + rng.random((2048, 1))) * (1 + 0.05 * rng.random((2048, len(base)))) / grid) * grid
    started = time.perf_counter()
    whole = makespans(script, Durations(busy=busy))
    once = time.perf_counter()
    steady = periods(script, Durations(busy=busy))
    done = time.perf_counter()
    for i in (0, 1023, 2047):
        one = Durations(busy=busy[i])
        assert whole[i] == play(Clock.of(structure, one)).end.max() and steady[i] == period(structure, one).seconds
    return {
        "prepare": prepared - begin,
        "play once": once - started,
        "to periods": done - once,
        "rows": program.num_rows,
    }


def main() -> None:
    """Prints medians (and the spread of the totals) of five runs."""
    if sys.argv[1:] == ["--once"]:
        print(json.dumps(one_big_program()))
        return
    command = [sys.executable, __file__, "--once"]
    runs = [json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout) for _ in range(5)]
    print(f"Python {platform.python_version()}, numpy {np.__version__}, {platform.machine()}")
    print("\n64 x 512 x 8 interleaved 1F1B, median of 5 fresh processes")
    for name in runs[0]:
        values = [run[name] for run in runs]
        print(f"  {name:<16}{statistics.median(values):>14.3f}   ({min(values):.3f} to {max(values):.3f})")
    print("\n2,048 vectors over 64 x 512 1F1B, median of 5")
    lots = [many_vectors() for _ in range(5)]
    for name in lots[0]:
        values = [run[name] for run in lots]
        print(f"  {name:<16}{statistics.median(values):>14.3f}   ({min(values):.3f} to {max(values):.3f})")


if __name__ == "__main__":
    main()
