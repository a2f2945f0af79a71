"""`nn.LSTM` and `nn.GRU`: one kernel for all steps against eager (oneDNN for LSTM), in one run.

    PYTHONPATH=src python benchmarks/compiler/recurrent.py [--hidden 256,512,1024] [--batches 1,4,10] [--steps 64,200]
        [--threads 1,2] [--dtype bf16] [--inductor-s 120] [--write]

Inputs as wide as the hidden size, one layer, float32 or bfloat16, no gradients, random weights. Interleaved calls,
medians. Each row also says what bounds it, from the best of two other calls in the same turns: the rate of the
library on a product of matrices of 512 x 512, at which the products of inputs and states go at best, and the rate of
reading again and again as many bytes as each thread has recurrent weights, which are read in every step. Inductor
does not see these modules unless `torch._dynamo.config.allow_rnn` is set; with it, it is compiled once in a process
of its own (256 units, 64 steps). `--write` puts this dtype's part of the page in place.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import nn

import gnomon.compiler.backend as ours
from gnomon.compiler.build import libraries
from gnomon.compiler.kernels.recurrent import size_key

RESULT = Path(__file__).parents[1] / "results" / "compiler_recurrent.md"
READ = """#include "vector.h"
extern "C" int gnomon_kernel(const int64_t* d, const float* x) {
    F a[8] = {};
    for (int64_t k = 0; k < d[1]; k++)
      for (int64_t i = 0; i + 8 * VW <= d[0]; i += 8 * VW)
        _Pragma("GCC unroll 8") for (int j = 0; j < 8; j++) a[j] = a[j] + ld(x + i + j * VW);
    F b = a[0];
    for (int j = 1; j < 8; j++) b = b + a[j];
    return hsum(b) < 0;
}
"""
AGAIN, SQUARE = 16, 512
"""Times that floats are read in one call; rows of the matrices."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
NEAR: dict[str, dict[str, Any]] = {"fp32": {"rtol": 1e-4, "atol": 1e-5}, "bf16": {"rtol": 5e-2, "atol": 2e-2}}
TITLES = {"fp32": "# Recurrent layers", "bf16": "## In bfloat16"}
MODULES = {"LSTM": nn.LSTM, "GRU": nn.GRU}


def interleaved(functions: dict[str, Callable[[], Any]], spend_s: float) -> dict[str, list[float]]:
    """Seconds of each call, in turn. One thread is timed by its own CPU time, which others disturb less."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    taken: dict[str, list[float]] = {name: [] for name in functions}
    until = time.perf_counter() + spend_s
    while time.perf_counter() < until or len(taken[next(iter(taken))]) < 5:
        for name, function in functions.items():
            began = clock()
            function()
            taken[name].append(clock() - began)
    return taken


def reader(floats: int) -> Callable[[], Any]:
    """Adds up so many floats on one thread, `AGAIN` times, as fast as they can be read."""
    [function] = libraries([READ])
    if function is None:
        raise SystemExit("needs a C++ compiler")
    many, sizes, address = torch.ones(floats), (ctypes.c_int64 * 2)(floats, AGAIN), ctypes.c_void_p
    return lambda: function(sizes, address(many.data_ptr()))


def bound_s(flops: int, flops_per_s: float, read_s: float) -> float:
    """Seconds below which no kernel of one layer goes. flops: of the products of all inputs, as many as of all states;
    read_s: of reading the recurrent weights in every step."""
    return flops / flops_per_s + max(flops / flops_per_s, read_s)


def rows(
    name: str, dtype: str, hidden: int, batches: Sequence[int], steps: Sequence[int], threads: Sequence[int]
) -> Iterator[str]:
    """Lines of the table: one compilation for all lengths, batches and numbers of threads."""
    module: Any = MODULES[name](hidden, hidden, dtype=DTYPES[dtype]).eval()
    torch._dynamo.reset()
    function: Any = torch.compile(module, backend=ours.gnomon, dynamic=True)
    square = torch.randn(SQUARE, SQUARE).to(DTYPES[dtype])
    began, said = time.perf_counter(), False
    for number, batch, length in product(threads, batches, steps):
        torch.set_num_threads(number)
        x = torch.randn(length, batch, hidden).to(DTYPES[dtype])
        calls: dict[str, Callable[[], Any]] = {
            "eager": lambda x=x: module(x),
            "gnomon": lambda x=x: function(x),
            "product": lambda: square @ square,
            "read": reader(module.weight_hh_l0.nbytes // 4 // number),
        }
        with torch.no_grad():
            made = function(x)[0]
            if not said:
                said = True
                yield f"{name} of {hidden}: {time.perf_counter() - began:.1f} s"
            torch.testing.assert_close(made, module(x)[0], **NEAR[dtype])
            taken = interleaved(calls, 1.0)
        middle = {which: median(values) for which, values in taken.items()}
        spread = [f"{(q[2] - q[0]) / q[1]:.0%}" for q in (quantiles(taken[w], n=4) for w in ("eager", "gnomon"))]
        flops = 2 * module.weight_hh_l0.numel() * batch * length
        within = bound_s(flops, 2 * SQUARE**3 / min(taken["product"]), length * min(taken["read"]) / AGAIN)
        yield (
            f"| {name} | {hidden} | {batch} | {length} | {number} | {middle['eager'] * 1e3:.2f} "
            f"| {middle['gnomon'] * 1e3:.2f} | {middle['eager'] / middle['gnomon']:.2f} "
            f"| {min(taken['eager']) / min(taken['gnomon']):.2f} | {', '.join(spread)} "
            f"| {middle['eager'] / within:.2f} | {'yes' if was_kept(length, batch) else 'ATen'} |"
        )


def was_kept(steps: int, batch: int) -> bool:
    """Whether the newest trial of these sizes kept the kernel."""
    key = size_key(steps, batch)
    trials = [one.trials[key] for made in ours.reports for one in made.recurrent if key in one.trials]
    return bool(trials and trials[-1].kept)


def inductor(name: str) -> None:
    """Inductor's first call, in a process that may be ended."""
    torch._dynamo.config.allow_rnn = True
    torch.set_num_threads(1)
    with torch.no_grad():
        torch.compile(MODULES[name](256, 256).eval(), backend="inductor")(torch.randn(64, 1, 256))


def inductor_s(name: str, limit_s: float) -> float | None:
    """Seconds, None where it is given up."""
    process = get_context("spawn").Process(target=inductor, args=(name,))
    began = time.perf_counter()
    process.start()
    process.join(limit_s)
    if process.is_alive():
        process.kill()
        process.join()
        return None
    return time.perf_counter() - began if process.exitcode == 0 else None


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
    for option, default in (("hidden", "256,512,1024"), ("batches", "1,4,10"), ("steps", "64,200"), ("threads", "1,2")):
        parser.add_argument(f"--{option}", default=default)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="fp32")
    parser.add_argument("--inductor-s", type=float, default=120.0, help="seconds that it may compile; 0: not tried")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    hidden, batches, steps, threads = (
        [int(part) for part in text.split(",")]
        for text in (options.hidden, options.batches, options.steps, options.threads)
    )
    torch._dynamo.config.recompile_limit = 64
    lines = [
        TITLES[options.dtype],
        "",
        f"{date.today()}, `PYTHONPATH=src python {' '.join(sys.argv)}`, commit {commit()}, {cpu()}, torch "
        f"{torch.__version__}, load average {os.getloadavg()[0]:.1f} at the start. One layer, as many inputs as hidden "
        f"units, {options.dtype}, inference. Milliseconds, medians of interleaved calls, of one thread its CPU time; "
        "*best calls* is the ratio of the fastest of each, which others on the machine disturb least; *spread* is the "
        "quartiles' distance over the median, eager's and ours; *at most* is eager over the bound, what a perfect "
        "kernel would gain.",
        "",
        "| | hidden | batch | steps | threads | eager ms | gnomon ms | against eager | best calls | spread | at most "
        "| kept |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    said = []
    for name in MODULES:
        for size in hidden:
            for line in rows(name, options.dtype, size, batches, steps, threads):
                (lines if line.startswith("|") else said).append(line)
                print(line, flush=True)
    lines += ["", f"The first call, with trial and g++ (once): {'; '.join(said)}."]
    if options.inductor_s:
        tried = {name: inductor_s(name, options.inductor_s) for name in MODULES}
        times = ", ".join(
            f"{name} {'given up after ' + str(round(options.inductor_s)) if s is None else round(s)} s"
            for name, s in tried.items()
        )
        lines.append(
            f"Inductor's first call with `allow_rnn`, 256 units and 64 steps alone, in a process of its own: {times}."
        )
    print("\n".join(lines[-2:]))
    if options.write:
        first, title, second = RESULT.read_text().partition(TITLES["bf16"])
        page = "\n".join(lines) + "\n"
        RESULT.write_text(page + "\n" + title + second if options.dtype == "fp32" else first.rstrip() + "\n\n" + page)


if __name__ == "__main__":
    main()
