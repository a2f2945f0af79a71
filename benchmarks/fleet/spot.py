"""Machines that are taken away: useful steps of Bamboo beside restarts from checkpoints and torch elastic, simulated.

    python benchmarks/fleet/spot.py -o spot.md          # results/spot.md

One list of losses for all three at each rate. Seconds of a step, with copies, and while a rank has two stages are those
of `predict` for the job below; 45 s until a machine comes and 30 s of a start are those of Bamboo's own simulator.
`torch elastic` is one that makes whole pipelines of what machines are left, which torch's own launcher leaves to the
script.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from gnomon.fleet.spot import MachineShape, SpotCosts, System, shares
from gnomon.plans import Mesh, Pass, Plan, Schedule, Workload
from gnomon.prediction import predict

SHAPE, HOURS, SEEDS = MachineShape(stages=8, pipelines=4), 24, 5
MODEL, CLUSTER, WORK = "llama-3.1-8b", "4x8xa100-sxm-80gb", Workload(global_batch_size=128, seq_len=4096)
RATES = (0.0, 0.01, 0.05, 0.1, 0.2, 0.33)
"""Losses of a machine in an hour; Bamboo's evaluation has 10, 16 and 33 %."""
SYSTEMS: tuple[System, ...] = ("bamboo", "restart", "elastic")
COMES_S, BULK = (45.0, 600.0), 0.1
"""Seconds until another machine is there, and share of losses that take a second one at the same moment."""
EVERY_S = 300.0
"""Seconds between checkpoints."""
TAKEOVER_S = 1.4
"""Above the median until all go on in `results/takeover.md`, which was taken on a very loaded machine."""


def costs() -> SpotCosts:
    """Seconds of the job's step and of what each loss costs it."""
    plain = Plan(mesh=Mesh(pp=8, dp_shard=4), schedule=Schedule(name="one_f_one_b", micro_batch_size=1))

    def seconds(*passes: Pass) -> float:
        order = Schedule(name="one_f_one_b", micro_batch_size=1, passes=passes)
        return predict(MODEL, CLUSTER, Plan(mesh=plain.mesh, schedule=order), WORK).step_s

    step = seconds()
    taken = max(seconds(Pass(name="bamboo", params=(("rank", rank),))) for rank in range(SHAPE.stages))
    return SpotCosts(
        step_s=step, copied_step_s=seconds(Pass(name="bamboo")), taken_step_s=taken, takeover_s=TAKEOVER_S,
        come_s=COMES_S[0], start_s=30.0, checkpoint_every=max(1, round(EVERY_S / step)),
    )  # fmt: skip


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path)
    options = parser.parse_args()
    given, seconds = costs(), HOURS * 3600.0
    lines = [
        f"{MODEL} on {CLUSTER}, pp 8 x dp 4: a step takes {given.step_s:.2f} s, with copies "
        f"{given.copied_step_s:.2f} s, while a rank has two stages {given.taken_step_s:.2f} s; a checkpoint every "
        f"{given.checkpoint_every} steps.",
        "",
        "| a machine comes after | losses in an hour | Bamboo | restart | elastic | over restart | over elastic |",
        "|---|---|---|---|---|---|---|",
    ]
    for come_s in COMES_S:
        for rate in RATES:
            given = replace(given, come_s=come_s)
            share = shares(rate, SHAPE, given, SYSTEMS, seconds=seconds, seeds=SEEDS, bulk=BULK)
            b, r, e = (share[system] for system in SYSTEMS)
            lines.append(f"| {come_s:.0f} s | {rate:.0%} | {b:.3f} | {r:.3f} | {e:.3f} | {b / r:.2f} | {b / e:.2f} |")
    print("\n".join(lines))
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
