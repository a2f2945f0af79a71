"""The host's AdamW against DeepSpeed's: `python benchmarks/peers/host_adam.py`, where DeepSpeed is installed.

Three updates of the same float32 parameters, gradients and states on a CPU, one thread: `DeepSpeedCPUAdam`, which is
ZeRO-Offload's and built for this processor by its own `op_builder`, torch's fused AdamW, and the update that Gnomon's
runtime makes on the host. They take turns; seconds are CPU-seconds of the process, of which other work takes none. All
three must end in the same parameters, but for rounding. Writes results/host_adam.md. No environment of this project has
DeepSpeed: make one with torch, `pip install --no-build-isolation deepspeed`, and run this with PYTHONPATH=src in it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import deepspeed
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from torch import Tensor

from gnomon.runtime.optim.update import AdamWSettings, Update
from gnomon.runtime.parameters.parameters import Dtypes, Parameters, Slot

RESULTS = Path(__file__).resolve().parents[1] / "results" / "host_adam.md"
SIZES = (5_000_000, 20_000_000, 70_000_000)
"""Not powers of two, at which arrays fall on the same lines of a cache."""
SETTINGS = AdamWSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One way to update."""

    name: str
    prepare: Callable[[], object]
    """Writes a new gradient, as a backward has just done; not timed."""
    step: Callable[[], object]
    value: Callable[[], Tensor]
    """The parameters now."""


def sides(value: Tensor, grad: Tensor) -> Iterator[Side]:
    s = SETTINGS
    for name, make in (
        ("DeepSpeedCPUAdam", lambda p: DeepSpeedCPUAdam([p], lr=s.lr, betas=s.betas, eps=s.eps,
                                                        weight_decay=s.weight_decay, adamw_mode=True)),
        ("torch fused AdamW", lambda p: torch.optim.AdamW([p], lr=s.lr, betas=s.betas, eps=s.eps,
                                                          weight_decay=s.weight_decay, fused=True)),
    ):  # fmt: skip
        parameter = torch.nn.Parameter(value.clone())
        parameter.grad = grad.clone()
        optimizer = make(parameter)
        yield Side(
            name=name,
            prepare=lambda p=parameter: p.grad.copy_(grad),  # type: ignore[misc]
            step=optimizer.step,
            value=lambda p=parameter: p.detach(),  # type: ignore[misc]
        )
    fp32, shape = torch.float32, (1000, value.numel() // 1000)
    slot = Slot(
        name="w", shape=shape, whole=shape, offset=(0, 0), start=0, holders=1, sums="", decays=True, split=(0, 1)
    )
    held = Parameters([slot], Dtypes(param=fp32, grad=fp32, master=None, states=fp32), zero=0, shard=0, num_shards=1)
    held.fill(lambda _: value)
    update = Update.of(held)

    def prepare() -> None:
        held.drop_grad()
        held.add_grad("w", grad)

    def step() -> None:
        update.update(held, SETTINGS, scale=1.0)

    yield Side(name="Gnomon's host update", prepare=prepare, step=step, value=lambda: held.shard)


def measured(size: int, rounds: int) -> list[str]:
    """Rows of one size."""
    generator = torch.Generator().manual_seed(0)
    value, grad = (torch.randn(size, generator=generator) for _ in range(2))
    every, spent = list(sides(value, grad)), dict[str, list[float]]()
    for number in range(rounds + 2):
        for side in every:
            side.prepare()
            began = time.process_time()
            side.step()
            seconds = time.process_time() - began
            if number > 1:
                spent.setdefault(side.name, []).append(seconds)
    for side in every[1:]:
        torch.testing.assert_close(side.value(), every[0].value(), rtol=1e-4, atol=1e-5)
    first = spent[every[0].name]
    rows = []
    for name, seconds in spent.items():
        ratio = statistics.median(a / b for a, b in zip(seconds, first, strict=True))
        middle = statistics.median(seconds)
        rows.append(f"| {size / 1e6:.0f} M | {name} | {1e3 * middle:.1f} | {1e9 * middle / size:.2f} | {ratio:.2f} |")
        print(rows[-1], flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for size in SIZES for row in measured(size, options.rounds)]
    text = [
        "# AdamW on the host",
        "",
        f"`python benchmarks/peers/host_adam.py`, {datetime.now(UTC):%Y-%m-%d}, torch {torch.__version__}, DeepSpeed "
        f"{deepspeed.__version__}, one thread, float32, {options.rounds} rounds in turn, CPU-seconds. A ratio is the "
        "median of those of the rounds; below 1 is faster than DeepSpeed. All end in the same parameters.",
        "",
        "| parameters | update | ms | ns a parameter | ratio |",
        "|---|---|---|---|---|",
        *rows,
        "",
    ]
    options.output.write_text("\n".join(text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
