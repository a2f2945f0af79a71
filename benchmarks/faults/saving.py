"""For how long a checkpoint stops training, beside `torch.save` of the same tensors.

    python benchmarks/faults/saving.py [--rounds 15] [-o saving.md]       # results/saving.md

One process has a small llama with the states of AdamW in fp32, as many MiB as said. In turn: training stops while a
checkpoint is begun (everything is copied, and a thread writes, sums and syncs the copy); the same until it is whole on
disk; `torch.save` of the same tensors, and with `os.fsync` after it. Leaves out several ranks, which each write a part.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from statistics import quantiles

import torch

from gnomon import prepare
from gnomon.models.llama import LlamaConfig, llama
from gnomon.plans import Plan, Precision, Schedule, Workload
from gnomon.runtime.checkpoint.pieces import pieces
from gnomon.runtime.checkpoint.save import Saver

CONFIG = LlamaConfig(
    name="saved", num_layers=5, hidden_size=512, num_heads=8, num_kv_heads=8, head_dim=64, ffn_size=1536,
    vocab_size=256,
)  # fmt: skip
FP32 = Precision(param="fp32", compute="fp32", grad="fp32", reduce="fp32", states="fp32", master="none")
WORK = Workload(global_batch_size=1, seq_len=16)


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def measured(folder: Path, rounds: int) -> tuple[float, dict[str, list[float]]]:
    """(MiB that are saved, what was done -> seconds of each round)."""
    job = prepare(llama(CONFIG), Plan(precision=FP32, schedule=Schedule(micro_batch_size=1)), workload=WORK)
    ids = torch.zeros(1, 16, dtype=torch.int64)
    job.step({"input_ids": ids, "labels": ids})
    tensors = {piece.key: piece.value for piece in pieces(job.executor.parameters(), writes=True)}
    size = sum(x.nbytes for x in tensors.values()) / 2**20
    saver, plain = Saver(folder / "checkpoints", job.executor), folder / "plain.pt"
    taken: dict[str, list[float]] = {}

    def synced() -> None:
        torch.save(tensors, plain)
        with plain.open("rb+") as file:
            os.fsync(file.fileno())

    for number in range(rounds + 1):
        stopped = timed(partial(saver.start, number + 1))
        row = {
            "Gnomon, training stops": stopped,
            "Gnomon, until it is whole on disk": stopped + timed(saver.finish),
            "torch.save": timed(lambda: torch.save(tensors, plain)),
            "torch.save, os.fsync": timed(synced),
        }
        for name, seconds in row.items():
            taken.setdefault(name, []).append(seconds)
    saver.close()
    job.close()
    return size, {name: every[1:] for name, every in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("-o", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        size, taken = measured(Path(folder), given.rounds)
    base = quantiles(taken["torch.save"], n=4)[1]
    lines = [
        "# For how long a checkpoint stops training", "",
        f"{date.today()}, `python benchmarks/faults/saving.py --rounds {given.rounds}`, {size:.0f} MiB of parameters "
        f"and AdamW states in fp32, one process, torch {torch.__version__}, {os.cpu_count()} cores, load average "
        f"{os.getloadavg()[0]:.1f}. Seconds: median and quartiles of rounds in turn.", "",
        "| | seconds | of torch.save |", "|---|---|---|",
    ]  # fmt: skip
    for name, every in taken.items():
        low, middle, high = quantiles(every, n=4)
        lines.append(f"| {name} | {middle:.2f} ({low:.2f} to {high:.2f}) | {middle / base:.2f} |")
    text = "\n".join(lines) + "\n"
    print(text)
    if given.o is not None:
        given.o.write_text(text)


if __name__ == "__main__":
    main()
