"""Embedding columns: one kernel for all of them against eager and Inductor, in one run.

    PYTHONPATH=src python benchmarks/compiler/columns.py [--columns 50,500,2000] [--inductor 50,500] [--dtype bf16]
        [--write]

A third of the columns each: numbers hashed by a remainder and looked up; floats bucketized and looked up; bags of
five numbers added up. Tables of 10,000 rows of 16 numbers, random numbers; of bf16 the tables alone, features stay
float32. Columns of inductor: it is given up after `--limit` seconds of compiling. Interleaved, medians; one thread and
two. `--write` puts this dtype's part of the page in place.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import gnomon.compiler.backend as ours

ROWS, DIM, BAG = 10_000, 16, 5
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
NEAR: dict[str, dict[str, Any]] = {"fp32": {"rtol": 1e-5, "atol": 1e-6}, "bf16": {"rtol": 2e-2, "atol": 2e-2}}
TITLES = {"fp32": "# Embedding columns", "bf16": "## bfloat16 tables"}
RESULT = Path(__file__).parents[1] / "results" / "compiler_columns.md"


class Columns(nn.Module):
    """So many columns, concatenated."""

    def __init__(self, count: int, dtype: str) -> None:
        super().__init__()
        of = DTYPES[dtype]
        self.tables = nn.ModuleList(nn.Embedding(ROWS, DIM, dtype=of) for _ in range(count - count // 3))
        self.bags = nn.ModuleList(nn.EmbeddingBag(ROWS, DIM, mode="sum", dtype=of) for _ in range(count // 3))
        self.register_buffer("at", torch.linspace(0, 1, ROWS - 1))

    def forward(self, ids: Tensor, values: Tensor, bags: Tensor) -> Tensor:
        parts = []
        for i, table in enumerate(self.tables):
            if i % 2:
                parts.append(table(torch.bucketize(values[i], self.at)))
            else:
                parts.append(table((ids[:, i] * 31 + 7) % ROWS))
        parts += [bag(bags[i]) for i, bag in enumerate(self.bags)]
        return torch.cat(parts, 1)


def inputs(count: int, batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """For a module of so many columns."""
    ids = torch.randint(0, 2**40, (batch, count))
    return ids, torch.rand(count, batch), torch.randint(0, ROWS, (count // 3, batch, BAG))


def seconds(functions: dict[str, Callable[..., Any]], given: tuple[Tensor, ...], spend_s: float) -> dict[str, float]:
    """Median of each, in turn."""
    taken: dict[str, list[float]] = {name: [] for name in functions}
    until = time.perf_counter() + spend_s
    while time.perf_counter() < until or len(taken[next(iter(taken))]) < 5:
        for name, function in functions.items():
            began = time.perf_counter()
            function(*given)
            taken[name].append(time.perf_counter() - began)
    return {name: median(values) for name, values in taken.items()}


def compiles(count: int, dtype: str) -> None:
    """What Inductor is tried with first, in a process that may be ended."""
    with torch.no_grad():
        torch.compile(Columns(count, dtype).eval(), backend="inductor")(*inputs(count, 64))


def inductor_s(count: int, dtype: str, limit_s: float) -> float | None:
    """Seconds that its first call takes, None where it takes longer than it may."""
    process = get_context("spawn").Process(target=compiles, args=(count, dtype))
    began = time.perf_counter()
    process.start()
    process.join(limit_s)
    if process.is_alive():
        process.kill()
        process.join()
        return None
    return time.perf_counter() - began if process.exitcode == 0 else None


def rows(count: int, dtype: str, batch: int, threads: Sequence[int], inductor: bool) -> Iterator[str]:
    """Lines of the table: one compilation, measured with each number of threads."""
    torch._dynamo.reset()
    module, given = Columns(count, dtype).eval(), inputs(count, batch)
    with torch.no_grad():
        wanted, functions = module(*given), {"eager": module}
        began = time.perf_counter()
        functions["gnomon"] = torch.compile(module, backend=ours.gnomon)  # type: ignore[assignment]
        torch.testing.assert_close(functions["gnomon"](*given), wanted, **NEAR[dtype])
        compile_s = time.perf_counter() - began
        if inductor:
            functions["inductor"] = torch.compile(module, backend="inductor")  # type: ignore[assignment]
            torch.testing.assert_close(functions["inductor"](*given), wanted, **NEAR[dtype])
        for number in threads:
            torch.set_num_threads(number)
            taken = seconds(functions, given, spend_s=4.0)
            beside = f"{taken['inductor'] / taken['gnomon']:.1f}" if inductor else "-"
            yield (
                f"| {count:,} | {batch:,} | {number} | {taken['eager'] * 1e3:.2f} | {taken['gnomon'] * 1e3:.2f} "
                f"| {taken['eager'] / taken['gnomon']:.1f} | {beside} | {compile_s:.1f} |"
            )


def commit() -> str:
    """Of the sources that run."""
    asked = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(asked, capture_output=True, text=True).stdout.strip() or "unknown"


def cpu() -> str:
    """Its name, as the system says."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "a CPU")


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--columns", default="50,500,2000")
    parser.add_argument("--batches", default="64,512")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--inductor", default="50,500", help="numbers of columns that it is tried with")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds that it may compile")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="fp32", help="of the tables")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    dtype = options.dtype
    counts, batches, threads, tried = (
        [int(part) for part in text.split(",") if part]
        for text in (options.columns, options.batches, options.threads, options.inductor)
    )
    torch._dynamo.config.cache_size_limit = 64
    first_s = {count: inductor_s(count, dtype, options.limit) for count in tried}
    lines = [
        TITLES[dtype],
        "",
        f"{date.today()}, `PYTHONPATH=src python {' '.join(sys.argv)}`, commit {commit()}, {cpu()}, torch "
        f"{torch.__version__}, load average {os.getloadavg()[0]:.1f} at the start. A third of the columns each are "
        f"hashed, bucketized, and bags of {BAG}; tables of {ROWS:,} x {DIM} in {dtype}. Milliseconds, medians of "
        "interleaved calls; *against* is that time over ours.",
        "",
        "| columns | batch | threads | eager ms | gnomon ms | against eager | against Inductor | first call s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for count in counts:
        for batch in batches:
            for line in rows(count, dtype, batch, threads, inductor=first_s.get(count) is not None):
                lines.append(line)
                print(line, flush=True)
    told = ", ".join(
        f"{count:,} columns: {'over ' + str(round(options.limit)) if taken is None else round(taken)} s"
        for count, taken in first_s.items()
    )
    lines += ["", f"Inductor's first call, in a process of its own: {told}."]
    print(lines[-1])
    if options.write:
        first, title, second = RESULT.read_text().partition(TITLES["bf16"])
        made = "\n".join(lines) + "\n"
        RESULT.write_text(made + "\n" + title + second if dtype == "fp32" else first.rstrip("\n") + "\n\n" + made)


if __name__ == "__main__":
    main()
