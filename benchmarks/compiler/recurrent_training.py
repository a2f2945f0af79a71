"""Training of `nn.LSTM` and `nn.GRU`, and bfloat16: one kernel each way against eager, in one run.

    PYTHONPATH=src python benchmarks/compiler/recurrent_training.py [--hidden 256,512,1024] [--batches 4,32]
        [--steps 64] [--threads 1] [--inductor] [--write]

One layer, as many inputs as hidden units, random weights; a step is forward and backward of the sum. Interleaved calls,
medians. `--inductor` compiles it too, with `allow_rnn` (in this process, for as long as it takes).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from datetime import date
from itertools import product
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))
import gnomon.compiler.backend as ours  # noqa: E402
from benchmarks.compiler.recurrent import cpu, interleaved, was_kept  # noqa: E402

RESULT = Path(__file__).parents[1] / "results" / "compiler_recurrent_training.md"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def step_of(module: Any, function: Any, x: torch.Tensor, learns: bool) -> Callable[[], Any]:
    def infer() -> Any:
        with torch.no_grad():
            return function(x)[0]

    def step() -> Any:
        module.zero_grad()
        out = function(x)[0]
        out.sum().backward()
        return out

    return step if learns else infer


def row(name: str, dtype: str, learns: bool, hidden: int, batch: int, steps: int, inductor: bool) -> str:
    """A line of the table."""
    torch.manual_seed(0)
    module = getattr(nn, name)(hidden, hidden).to(DTYPES[dtype])
    x = torch.randn(steps, batch, hidden).to(DTYPES[dtype])
    torch._dynamo.reset()
    ours.reports.clear()
    calls = {
        "eager": step_of(module, module, x, learns),
        "gnomon": step_of(module, torch.compile(module, backend=ours.gnomon), x, learns),
    }
    calls["gnomon"]()
    missing = "-"
    if inductor:
        with torch._dynamo.config.patch(allow_rnn=True):
            made = step_of(module, torch.compile(module), x, learns)
            try:
                made()
                calls["inductor"] = made
            except Exception as error:
                missing = type(error).__name__
    taken = interleaved(calls, 1.0)
    middle = {which: median(values) * 1e3 for which, values in taken.items()}
    spread = [f"{(q[2] - q[0]) / q[1]:.0%}" for q in (quantiles(taken[w], n=4) for w in ("eager", "gnomon"))]
    other = f"{middle['inductor']:.2f}" if "inductor" in middle else missing
    return (
        f"| {name} | {dtype} | {'training' if learns else 'inference'} | {hidden} | {batch} | {steps} "
        f"| {torch.get_num_threads()} | {middle['eager']:.2f} | {middle['gnomon']:.2f} | {other} "
        f"| {middle['eager'] / middle['gnomon']:.2f} | {', '.join(spread)} "
        f"| {'yes' if was_kept(steps, batch) else 'ATen'} |"
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, default in (("hidden", "256,512,1024"), ("batches", "4,32"), ("steps", "64"), ("threads", "1")):
        parser.add_argument(f"--{option}", default=default)
    parser.add_argument("--inductor", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    hidden, batches, steps, threads = (
        [int(part) for part in text.split(",")]
        for text in (options.hidden, options.batches, options.steps, options.threads)
    )
    lines = [
        "# Recurrent layers in training and in bfloat16",
        "",
        f"{date.today()}, `python benchmarks/compiler/recurrent_training.py {' '.join(sys.argv[1:])}`, {cpu()}, "
        f"torch {torch.__version__}, load average {os.getloadavg()[0]:.1f} at the start. Milliseconds, medians of "
        "interleaved calls, of one thread its CPU time; a training step is forward and backward. *spread*: the "
        "quartiles' distance over the median, eager's and ours.",
        "",
        "| | | | hidden | batch | steps | threads | eager ms | gnomon ms | Inductor ms | against eager | spread "
        "| kept |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    kinds = [(dtype, learns) for dtype in DTYPES for learns in (True, False) if learns or dtype != "float32"]
    for number in threads:
        torch.set_num_threads(number)
        for name, (dtype, learns), size, batch, length in product(("LSTM", "GRU"), kinds, hidden, batches, steps):
            lines.append(row(name, dtype, learns, size, batch, length, options.inductor))
            print(lines[-1], flush=True)
    if options.write:
        RESULT.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
