"""Latent attention (MLA) over compressed pages, kernel beside torch: `python benchmarks/serve/latent.py [--no-file]`.

One layer's attention with DeepSeek-V2-Lite's head sizes (16 heads, 128 + 64 numbers of a key, 128 of a value, a latent
of 512), from queries to values, matmuls with the up-projection in it; one thread, pages of 16 tokens dealt out at
random. CPU-seconds, both in turn, medians [least, most]. Compared: the largest difference of what comes out, over
the largest value. Bound: multiplications over what a product of 256 rows reaches here, or bytes of latents and matrices
over the bandwidth that a read of 512 MiB has, whichever takes longer. Writes benchmarks/results/serve_latent.md.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path

import torch

from gnomon.compiler.kernels import stored
from gnomon.compiler.machine import this_machine
from gnomon.runtime.ops.paged import Visibility
from gnomon.serve.latent import LatentPages
from gnomon.serve.rows import Part, TokenRows
from gnomon.storage.dense import Dense

RESULTS = Path(__file__).resolve().parents[1] / "results" / "serve_latent.md"
BY_HAND = "\n## What is not reached"
"""Where the page's part begins that a person writes."""
HEADS, NOPE, ROPE, RANK, VALUE, SIZE, BLOCKS = 16, 128, 64, 512, 128, 16, 2048
CASES = {
    # new tokens of each sequence, and tokens before them
    "a decode, 512 tokens before it": [(1, 512)],
    "a decode, 8,192": [(1, 8192)],
    "eight decodes, 40 to 2,000": [(1, n) for n in (40, 100, 210, 333, 517, 800, 1300, 2000)],
    "32 decodes, 50 to 1,600": [(1, 50 * n) for n in range(1, 33)],
    "a prompt of 64": [(64, 0)],
    "a prompt of 256": [(256, 0)],
    "256 of a prompt, 1,024 before": [(256, 1024)],
    "2,048 of a prompt": [(2048, 0)],
    "seven decodes beside 256 of a prompt": [*[(1, n) for n in (40, 100, 333, 517, 800, 1300, 2000)], (256, 256)],
}


def rate(dtype: torch.dtype) -> float:
    """Multiplications a CPU-second of a product of 256 rows."""
    name = "bf16" if dtype == torch.bfloat16 else "fp32"
    form = Dense(dtype=name)
    packed = stored.pack(torch.randn(1024, 1024).to(dtype), form, stored.VALUES[name])
    x = torch.randn(256, 1024).to(dtype)
    seconds = []
    for _ in range(7):
        began = time.thread_time()
        stored.linear(x, packed)
        seconds.append(time.thread_time() - began)
    return 256 * 1024 * 1024 / min(seconds)


def bandwidth() -> float:
    """Bytes a CPU-second of a read of 512 MiB."""
    whole, seconds = torch.ones(1 << 27), []
    for _ in range(5):
        began = time.thread_time()
        whole.sum()
        seconds.append(time.thread_time() - began)
    return whole.nbytes / min(seconds)


def work(sequences: list[tuple[int, int]], most_absorbed: int, itemsize: int) -> tuple[float, float]:
    """(multiplications, bytes that are read at the least), keys that a query does not see left out."""
    products, read = 0.0, float(HEADS * RANK * (NOPE + VALUE) * itemsize)
    for new, before in sequences:
        pairs = new * before + new * (new + 1) / 2
        read += (new + before) * (RANK + ROPE) * itemsize
        if new <= most_absorbed:
            products += HEADS * (pairs * (2 * RANK + ROPE) + new * RANK * (NOPE + VALUE))
        else:
            products += HEADS * (pairs * (NOPE + ROPE + VALUE) + (new + before) * RANK * (NOPE + VALUE))
    return products, read


def measured(dtype: torch.dtype, rounds: int) -> list[str]:
    """A line of the table for each case."""
    rng = torch.Generator().manual_seed(0)
    weight = (torch.randn((HEADS, NOPE + VALUE, RANK), generator=rng) * RANK**-0.5).to(dtype)
    both = {
        name: LatentPages(BLOCKS, SIZE, weight, (NOPE, ROPE), Visibility(scale=(NOPE + ROPE) ** -0.5))
        for name in ("kernel", "torch")
    }
    assert both["kernel"].call is not None, "there is no kernel here"
    both["torch"].call = None
    for pages in both.values():
        pages.pool.copy_(torch.randn(pages.pool.shape, generator=torch.Generator().manual_seed(1)).to(dtype))
    order = random.Random(0)
    speed, read_rate = rate(dtype), bandwidth()
    lines = []
    for name, sequences in CASES.items():
        free = order.sample(range(BLOCKS), BLOCKS)
        tables = [[free.pop() for _ in range(-(-(new + before) // SIZE))] for new, before in sequences]
        parts = [Part(n, before, [0] * new, True, 1) for n, (new, before) in enumerate(sequences)]
        tokens = sum(new for new, _ in sequences)
        q, latent, rotated = (
            torch.randn((tokens, *shape), generator=rng).to(dtype) for shape in ((HEADS, NOPE + ROPE), (RANK,), (ROPE,))
        )
        seconds: dict[str, list[float]] = {"kernel": [], "torch": []}
        made = {}
        for number in range(rounds + 1):
            for how, pages in both.items():
                rows = TokenRows.of(parts, [tables], [-1] * len(parts))
                began = time.process_time()
                made[how] = pages.attend(rows, q, latent, rotated)
                if number:  # the first is for caches and allocations
                    seconds[how].append(time.process_time() - began)
        off = float((made["kernel"].float() - made["torch"].float()).abs().max() / made["torch"].float().abs().max())
        products, read = work(sequences, both["kernel"].most_absorbed, dtype.itemsize)
        bound = max(products / speed, read / read_rate)
        told = [f"{1e3 * statistics.median(s):.2f} [{1e3 * min(s):.2f}, {1e3 * max(s):.2f}]" for s in seconds.values()]
        ratio = statistics.median(seconds["torch"]) / statistics.median(seconds["kernel"])
        over = statistics.median(seconds["kernel"]) / bound
        cells = (str(dtype).removeprefix("torch."), name, *told, f"{ratio:.1f}", f"{over:.1f}", f"{off:.0e}")
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    """The table, and the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-file", action="store_true", help="print only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        "| cache | iteration | kernel, CPU-ms | torch, CPU-ms | times faster | kernel over its bound | difference |",
        "|---|---|---|---|---|---|---|",
    ]
    with torch.inference_mode():
        for dtype in (torch.float32, torch.bfloat16):
            lines += measured(dtype, options.rounds)
    if not options.no_file:
        head = [
            "# Latent attention over compressed pages: the kernel beside torch",
            "",
            f"`python benchmarks/serve/latent.py --rounds {options.rounds}`, {datetime.now(UTC):%Y-%m-%d}, torch "
            f"{torch.__version__}, {this_machine().model}, {this_machine().isa.name}, one thread, on a machine that "
            "others used too: one layer with DeepSeek-V2-Lite's head sizes, medians [least, most], both in turn.",
            "",
        ]
        _, mark, by_hand = RESULTS.read_text(encoding="utf-8").partition(BY_HAND) if RESULTS.exists() else ("", "", "")
        RESULTS.write_text("\n".join([*head, *lines]) + "\n" + mark + by_hand, encoding="utf-8")


if __name__ == "__main__":
    main()
