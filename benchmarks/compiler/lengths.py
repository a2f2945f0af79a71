"""A BERT of random lengths, compiled once, beside a compilation of its own for each length.

    python benchmarks/compiler/lengths.py [--count 200] [--static 25] [--minutes 9] [--write]

BERT-base in float32, batch 1, on one thread, goes through `torch.compile(dynamic=True, backend="gnomon")` and is fed
with `--count` random lengths of 2 to 512 tokens. Each result is compared with eager's, and what was compiled is
counted. Of `--static` of the lengths, evenly spread, the model is also compiled for that length alone
(`dynamic=False`), and both take turns, in another order each time; CPU time, medians. Exits with 1 where a result is
unlike eager or a second graph was compiled.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.compiler.table import commit  # noqa: E402
from benchmarks.compiler.whole_models import models  # noqa: E402
from gnomon.compiler import backend  # noqa: E402

RESULT = Path(__file__).parents[1] / "results" / "compiler_lengths.md"
LONGEST = 512
NEAR = 2e-4
"""Of the largest number of a result: sums are in another order than eager's."""
WARM, ROUNDS, SPEND_S = 3, 7, 3.0
GOAL = 1.05


def by_turns(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Median CPU milliseconds of each."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(WARM):
            call()
    order, shuffled, started = list(calls), random.Random(0), time.monotonic()
    while len(times["eager"]) < ROUNDS or time.monotonic() - started < SPEND_S:
        shuffled.shuffle(order)
        for name in order:
            began = time.process_time()
            calls[name]()
            times[name].append((time.process_time() - began) * 1e3)
    return {name: median(each) for name, each in times.items()}


def beside(module: Any, fast: Any, x: torch.Tensor) -> dict[str, float]:
    """Milliseconds of eager, of what is compiled once, and of a compilation for this length."""

    def of_its_own(graph: Any, inputs: Any) -> Any:
        return backend.gnomon(graph, inputs)  # another backend for Dynamo, which else takes what `fast` compiled

    alone = torch.compile(module, backend=of_its_own, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=10_000, accumulated_recompile_limit=10_000):
        return by_turns({"eager": lambda: module(x), "once": lambda: fast(x), "alone": lambda: alone(x)})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--static", type=int, default=25, help="lengths that are also compiled alone")
    parser.add_argument("--minutes", type=float, default=9.0, help="after which no length is compiled alone")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    began = time.monotonic()
    module = next(one for one in models() if one.name == "BERT-base").build().eval()
    lengths = random.Random(0).sample(range(2, LONGEST + 1), options.count)
    inputs = {n: torch.randint(3, 1000, (1, n)) for n in lengths}
    fast = torch.compile(module, backend=backend.gnomon, dynamic=True)
    worst, first_s, start = 0.0, 0.0, time.monotonic()
    with torch.no_grad():
        for i, x in enumerate(inputs.values()):
            made = fast(x)
            if i == 0:
                first_s = time.monotonic() - start
            wanted = module(x)
            worst = max(worst, float((made - wanted).abs().max() / wanted.abs().max()))
        graphs, kernels = len(backend.reports), sum(len(one.program.groups) for one in backend.reports)
        rows = []
        for n in sorted(lengths)[:: max(1, options.count // options.static)]:
            if time.monotonic() - began > 60 * options.minutes:
                break
            rows.append((n, beside(module, fast, inputs[n])))
            print(f"{n} tokens: {rows[-1][1]}", file=sys.stderr, flush=True)
    text = page(options.count, graphs, kernels, worst, first_s, rows)
    print(text)
    if options.write:
        RESULT.write_text(text)
    return int(graphs != 1 or worst > NEAR)


def page(count: int, graphs: int, kernels: int, worst: float, first_s: float, rows: list[Any]) -> str:
    ratios = sorted(ms["once"] / ms["alone"] for _, ms in rows)
    over = sum(ratio > GOAL for ratio in ratios)
    return "\n".join([
        "# A BERT of random lengths, compiled once", "",
        f"{date.today()}, `python benchmarks/compiler/lengths.py {' '.join(sys.argv[1:])}`, commit {commit()}, "
        f"torch {torch.__version__}, one thread. BERT-base, float32, batch 1.", "",
        f"{count} lengths of 2 to {LONGEST}: {graphs} graph(s) of {kernels} kernels compiled, in {first_s:.1f} s at "
        f"the first; largest difference from eager {worst:.1e} of the largest number.", "",
        f"Of {len(rows)} lengths, compiled once / compiled for that length alone: median {median(ratios):.3f}, "
        f"worst {ratios[-1]:.3f}; {over} over {GOAL}." if rows else "No time was left for lengths alone.", "",
        "| tokens | eager ms | compiled once | for this length alone | once / alone | eager / once |",
        "|---:|---:|---:|---:|---:|---:|",
        *(
            f"| {n} | {ms['eager']:.1f} | {ms['once']:.1f} | {ms['alone']:.1f} | {ms['once'] / ms['alone']:.3f} "
            f"| {ms['eager'] / ms['once']:.2f} |"
            for n, ms in rows
        ),
    ]) + "\n"  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
