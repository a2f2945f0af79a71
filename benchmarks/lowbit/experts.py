"""Products of experts by packed kernels beside loops of PyTorch's: 64 experts of 2048 x 1536, 8 for each token.

    python benchmarks/lowbit/experts.py [--tokens 1,8,64] [--rounds 5] [--write]

One thread, bfloat16, rows sorted by expert. Milliseconds of CPU of all products of a layer, in turn in one process:
median (least-most). `loop` is F.linear for each expert that has rows; ours calls `stored.linear` for each, as the
engine does; `int8` and `4:16` are the same with other storages.
"""

from __future__ import annotations

import argparse
import os
import sys
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from kernels import measured
from torch.nn import functional as F

from gnomon.compiler.kernels import stored
from gnomon.compiler.machine import this_machine
from gnomon.storage.names import storage_of

RESULT = Path(__file__).parents[1] / "results" / "lowbit_experts.md"
EXPERTS, TOP, INNER, OUTER = 64, 8, 2048, 1536
OURS = ("bf16", "int8", "int4-g64", "4:16-bf16")


def loop(weights: Any, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
    parts, at = [], 0
    for expert, count in enumerate(counts):
        if count:
            parts.append(F.linear(x[at : at + count], weights[expert]))
            at += count
    return torch.cat(parts)


def ours(packed: Any, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
    parts, at = [], 0
    for expert, count in enumerate(counts):
        if count:
            parts.append(stored.linear(x[at : at + count], packed[expert]))
            at += count
    return torch.cat(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="1,8,64")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help=f"to {RESULT.name}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    weights = (torch.randn(EXPERTS, OUTER, INNER) * 0.02).bfloat16()
    made: dict[str, Any] = {}
    for name in OURS:
        how: Any = "bf16" if name == "bf16" else "int8"
        made[name] = [stored.pack(one, storage_of(name), how, rows=4) for one in weights]
    tokens = [int(one) for one in options.tokens.split(",")]
    found: dict[tuple[str, int], list[float]] = {}
    with torch.inference_mode():
        for many in tokens:
            chosen = torch.stack([torch.randperm(EXPERTS)[:TOP] for _ in range(many)]).flatten()
            counts = torch.bincount(chosen, minlength=EXPERTS).tolist()
            x = torch.randn(len(chosen), INNER).bfloat16()
            ends = torch.tensor(counts).cumsum(0).to(torch.int32)
            across = weights.transpose(1, 2)
            calls: dict[str, Any] = {"loop": partial(loop, weights, x, counts)}
            calls["torch._grouped_mm"] = partial(torch._grouped_mm, x, across, offs=ends)
            calls |= {name: partial(ours, one, x, counts) for name, one in made.items()}
            for name, took in measured(calls, options.rounds, 0.02).items():
                found[name, many] = took
    lines = [
        "# Products of experts\n",
        f"{date.today()}, `python {' '.join(['benchmarks/lowbit/experts.py', *sys.argv[1:]])}`, "
        f"{this_machine().model}, one thread, torch {torch.__version__}, load average {os.getloadavg()[0]:.1f}. "
        f"{EXPERTS} experts of {INNER} x {OUTER}, {TOP} for each token, bfloat16 rows. Milliseconds of CPU: median "
        "(least-most), and times the loop.\n",
        f"| | {' | '.join(f'{many} tokens' for many in tokens)} |",
        "|---|" + "---|" * len(tokens),
    ]
    for name in dict.fromkeys(name for name, _ in found):
        cells = []
        for many in tokens:
            took = found[name, many]
            ratio = median(b / a for a, b in zip(took, found["loop", many], strict=True))
            cells.append(f"{median(took):.2f} ({min(took):.2f}-{max(took):.2f}), {ratio:.2f}")
        lines.append(f"| {name if name not in OURS else f'ours, {name}'} | {' | '.join(cells)} |")
    print("\n".join(lines))
    if options.write:
        RESULT.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
