"""ChunkFlow's headline: how much faster than whole sequences one at a time, on batches of lengths like the paper's.

    python benchmarks/memory/chunkflow.py        # prints the table of results/chunkflow.md

The paper (Yuan et al., ICML 2025) reports up to 4.53 times the speed of Megatron-LM on Qwen2.5 of 7B to 72B, contexts
of 32K and 256K, 256 sequences a step, with these layouts of the baseline (tp with sequence parallelism, pp, recompute).
Its lengths and GPUs are not public: lengths here are drawn from what another paper says of chats (Skrull's reading of
LMSysChat1M: 87.12% under 1K, 99.35% under 4K, and a tail that is cut at the context), on A100s of 80 GB, without data
parallelism. Both sides are predicted: the baseline has a microbatch a sequence; ChunkFlow has the best of a grid of
chunk size, K and recompute that fits.
"""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import product

import numpy as np

from gnomon.plans import Layout, Mesh, Optimizer, Pass, Plan, Saved, Schedule, Workload
from gnomon.prediction import Prediction, predict

JOBS = (
    ("qwen2.5-7b", 32, Mesh(tp=4), "selective"),
    ("qwen2.5-7b", 256, Mesh(tp=4, pp=4), "full"),
    ("qwen2.5-72b", 256, Mesh(tp=8, pp=4), "selective"),
)
"""Model, context in 1,024 tokens, layout and recompute of the paper's baseline."""

SEEDS = (0, 1, 2)


def drawn(context: int, seed: int) -> tuple[int, ...]:
    """256 lengths, of which the longest is the context."""
    rng = np.random.default_rng(seed)
    low = np.select([(u := rng.random(255)) < 0.8712, u < 0.9935], [64, 1024], 4096)
    high = np.select([u < 0.8712, u < 0.9935], [1024, 4096], context)
    return (context, *np.exp(rng.uniform(np.log(low), np.log(high))).astype(int).tolist())


def plans(plain: Plan) -> list[Plan]:
    """The paper's grid, (2K, 16) to (32K, 1) at one product, and K of 1; with the baseline's recompute and without."""
    grid = dict.fromkeys([(size, keep) for size in (2, 4, 8, 16, 32) for keep in (32 // size, 1)])
    out = []
    for (size, keep), saved in product(grid, (plain.saved, Saved())):
        params = (("chunk_size", size * 1024), ("keep", keep))
        schedule = replace(plain.schedule, passes=(Pass(name="chunkflow", params=params),))
        out.append(replace(plain, schedule=schedule, saved=saved))
    return out


def row(model: str, context: int, mesh: Mesh, recompute: str, seed: int) -> str:
    """One line of the table."""
    plain = Plan(
        mesh=mesh,
        layout=Layout(sequence_parallel=True),
        schedule=Schedule(micro_batch_size=1),
        optimizer=Optimizer(clip=False),
        saved=Saved(preset=recompute),
    )
    work, on = Workload(lengths=drawn(context * 1024, seed)), f"{mesh.world_size // 8 or 1}x8xa100-sxm-80gb"
    on = on if mesh.world_size >= 8 else f"{mesh.world_size}xa100-sxm-80gb"
    whole = predict(model, on, plain, work)
    tried: list[Prediction] = [predict(model, on, plan, work) for plan in plans(plain)]
    fits = [one for one in tried if one.fits]
    best = min(fits, key=lambda one: one.step_s)
    named = dict(best.plan.schedule.passes[0].params)

    def share(one: Prediction, part: str) -> str:
        return f"{one.breakdown.get(part, 0) / one.step_s:.0%}"

    cells = (
        model,
        f"{max(work.lengths) // 1024}K",
        f"{sum(work.lengths) / 1024:.0f}K",
        f"{whole.step_s:.2f}",
        f"{whole.tightest.peak_bytes / 2**30:.1f}",
        f"{best.step_s:.2f}",
        f"{best.tightest.peak_bytes / 2**30:.1f}",
        f"{named['chunk_size'] // 1024}K, {named['keep']}, {best.plan.saved.preset}",
        f"{whole.step_s / best.step_s:.2f}",
        share(whole, "launch"),
        share(whole, "bubble"),
        share(best, "bubble"),
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Prints the table."""
    names = ("model", "context", "tokens", "whole s", "GiB", "ChunkFlow s", "GiB", "chunk, K, recompute", "times")
    print(f"| {' | '.join((*names, 'launch before', 'bubble before', 'after'))} |")
    print("|" + "---|" * (len(names) + 3))
    began = time.monotonic()
    for job in JOBS:
        for seed in SEEDS:
            print(row(*job, seed), flush=True)
    print(f"\n{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
