"""What copies of stages cost (`bamboo`): predicted beside measured, seconds of a step and bytes of a rank.

    python benchmarks/faults/copies_cost.py -o cost.md      # results/takeover.md

The same plan with copies and without, in turn, `--rounds` times; the ratio is of the medians of all steps after the
first three of a run. Bytes are those that a rank's parameters, gradients, master copies and states take, counted on its
tensors. The prediction is for this machine as `gnomon calibrate` found it where `--on` names that file; ratios are
compared, since both sides are wrong alike.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import kills

from gnomon.models.llama import LlamaConfig, llama
from gnomon.plans import Mesh, Pass, Plan, Schedule, Workload
from gnomon.prediction import predict
from gnomon.runtime import Source, TrainingJob, run
from gnomon.runtime.launch.launcher import run_scheme
from gnomon.runtime.launch.run import scheme_of

CONFIG = LlamaConfig(
    name="bytes", num_layers=8, hidden_size=128, num_heads=2, num_kv_heads=2, head_dim=64, ffn_size=512, vocab_size=256
)
GRAPH, WORK, STEPS, WARM = llama(CONFIG), Workload(global_batch_size=8, seq_len=128), 12, 3
PLANS = {
    f"pp {pp}, {count} microbatches": Plan(
        mesh=Mesh(pp=pp), schedule=Schedule(name="one_f_one_b", num_microbatches=count), precision=kills.FP32
    )
    for pp, count in ((2, 4), (2, 8), (4, 8))
}
COUNTED = "GNOMON_BENCHMARK_COUNTED"
"""Variable: the file to which ranks write the bytes of their tensors."""


def with_copies(plan: Plan) -> Plan:
    """The plan with Bamboo."""
    return replace(plan, schedule=replace(plan.schedule, passes=(Pass(name="bamboo"),)))


def counting(job: TrainingJob, membership: Any) -> Any:
    """`train_with_copies`, which says what its tensors take."""
    takeover: Any = import_module("gnomon.runtime.launch.takeover")
    outcome = takeover._Process.until_over

    def counted(self: Any) -> Any:
        done = outcome(self)
        size = sum(_bytes(part) for part in (self.work.own, self.work.copy))
        with Path(os.environ[COUNTED]).open("a") as file:
            file.write(f"{membership.process} {size}\n")
        return done

    takeover._Process.until_over = counted
    return takeover.train_with_copies(job, membership)


def _bytes(executor: Any) -> int:
    tensors: list[Any] = []
    for held, rule in executor.parameters():
        tensors += [held.flat, held.master, held.grad, rule.first, rule.second]
    return sum(x.nbytes for x in tensors if x is not None)


def measured(given: TrainingJob) -> list[float]:
    """Seconds of each step after warm-up."""
    scheme = scheme_of(given)
    outcome = run(given) if scheme is None else run_scheme(given, replace(scheme, train=counting))
    return [record.step_s for record in outcome.records[WARM:]]


def predicted_bytes(prediction: Any) -> dict[int, int]:
    """By rank: parameters, gradients, master copies and states."""
    named = ("parameters", "gradients", "master", "states")
    return {rank: sum(one.by_class[n] for n in named) for one in prediction.memory for rank in one.ranks}


def lines(folder: Path, rounds: int, on: str) -> Iterator[str]:
    """Of the table."""
    source = Source(path=folder / "text", cache=folder / "tokens")
    yield "| plan | step without, with | ratio measured | predicted | bytes of the largest rank counted | predicted |"
    yield "|---|---|---|---|---|---|"
    for number, (name, plan) in enumerate(PLANS.items()):
        cluster = on or f"{plan.mesh.pp}xa100-sxm-80gb"
        os.environ[COUNTED] = str(folder / f"bytes{number}")
        both = (plan, with_copies(plan))
        said = [predict(GRAPH, cluster, one, WORK) for one in both]
        steps: tuple[list[float], list[float]] = ([], [])
        for _ in range(rounds):
            for at, one in enumerate(both):
                given = TrainingJob(graph=GRAPH, plan=one, workload=WORK, steps=STEPS, data=source, quiet=True)
                steps[at].extend(measured(given))
        counts = [int(line.split()[1]) for line in Path(os.environ[COUNTED]).read_text().splitlines()]
        plain, copied = median(steps[0]), median(steps[1])
        most = max(predicted_bytes(said[1]).values())
        yield (
            f"| {name} | {plain * 1e3:.0f} ms, {copied * 1e3:.0f} ms | {copied / plain:.2f} "
            f"| {said[1].step_s / said[0].step_s:.2f} | {max(counts):,} | {most:,} |"
        )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--on", default="", help="cluster of the prediction, as `gnomon calibrate -o FILE` wrote it")
    parser.add_argument("-o", "--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text").mkdir()
        for i in range(60):
            (folder / f"text/{i}.txt").write_text(f"the loss goes down, line {i % 7} of the text. " * 40)
        made = list(lines(folder, options.rounds, options.on))
    made.append(f"\nload of this machine: {os.getloadavg()[1]:.1f}")
    print("\n".join(made))
    if options.out is not None:
        options.out.write_text("\n".join(made) + "\n")


if __name__ == "__main__":
    main()
