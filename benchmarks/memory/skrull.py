"""Skrull's headline: how much faster than dividing every sequence, on batches of lengths like the paper's.

    python benchmarks/memory/skrull.py        # prints the table of results/skrull.md

The paper (NeurIPS 2025) reports 5.50 times the speed of DeepSpeed on Qwen2.5-0.5B on average over its data sets and
2.03 on 7B, on 4 x 8 H100 with dp 4, cp 8 and 64 sequences a data-parallel worker, under ZeRO 2, with selective
recompute, and 26K and 13K tokens a rank. Lengths are drawn from the shares that it states: Wikipedia (87.88% under 1K,
longest 78K) and ChatQA2 (21.92% under 1K, 40.43% under 8K, 99.86% under 32K, longest 99K). Both sides are predicted;
the baseline has a microbatch a sequence, divided over cp.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gnomon.plans import Layout, Mesh, Optimizer, Pass, Plan, Saved, Schedule, Workload
from gnomon.prediction import predict

K = 1024
DATA = {
    "Wikipedia": ((0.8788, 64, K), (1.0, K, 78 * K)),
    "ChatQA2": ((0.2192, 64, K), (0.4043, K, 8 * K), (0.9986, 8 * K, 32 * K), (1.0, 32 * K, 99 * K)),
}
"""Cumulative share, and between which lengths it lies."""

JOBS = (("qwen2.5-0.5b", 26 * K), ("qwen2.5-7b", 13 * K))
PLAN = Plan(
    mesh=Mesh(dp_shard=4, cp=8),
    layout=Layout(context="all_gather"),
    schedule=Schedule(micro_batch_size=1),
    optimizer=Optimizer(zero=2, clip=False),
    saved=Saved(preset="selective"),
)


def drawn(data: str, seed: int) -> tuple[int, ...]:
    """256 lengths."""
    rng = np.random.default_rng(seed)
    share, low, high = np.transpose(DATA[data])
    part = np.searchsorted(share, rng.random(256))
    return tuple(np.exp(rng.uniform(np.log(low[part]), np.log(high[part]))).astype(int).tolist())


def main() -> None:
    """Prints the table."""
    print("| model | lengths | longest | tokens | divided s | GiB | Skrull s | GiB | microbatches | times |")
    print("|" + "---|" * 10)
    for (model, capacity), data in ((job, data) for job in JOBS for data in DATA):
        passes = (Pass(name="skrull", params=(("capacity", capacity),)),)
        packed = replace(PLAN, schedule=replace(PLAN.schedule, passes=passes))
        for seed in (0, 1):
            lengths = drawn(data, seed)
            work = Workload(lengths=lengths)
            before, after = (predict(model, "4x8xh100-sxm", plan, work) for plan in (PLAN, packed))
            cells = (
                model,
                data,
                f"{max(lengths) / K:.0f}K",
                f"{sum(lengths) / K:.0f}K",
                f"{before.step_s:.2f}",
                f"{before.tightest.peak_bytes / 2**30:.1f}",
                f"{after.step_s:.2f}",
                f"{after.tightest.peak_bytes / 2**30:.1f}",
                f"64 to {len(after.structure.program.units)}",
                f"{before.step_s / after.step_s:.2f}",
            )
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
