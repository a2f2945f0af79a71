"""Plans for clusters of heterogeneous devices: what the best one gains over equal shares and over leaving kinds out.

    python benchmarks/search/mixed.py [CASE …]      # all cases; prints the table kept in results/mixed.md

Claim: on every case the plan found is at least as fast as the best plan with equal shares and equal layers, and as the
best on each kind alone; both are searched, not guessed. `data parallel` is what a user without a planner gets: the best
plan that gives every device the same share of every microbatch. All seconds are the simulator's. The ideal is the
quotient of the two devices' peaks r: equal shares waste all that the fast one has above the slow one, (1 + r) / 2.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace

from gnomon.hardware import Cluster, NodeGroup, parse_cluster
from gnomon.models.presets import model
from gnomon.plans import Goal, Plan, Precision, Workload
from gnomon.prediction.predict import PLAIN_STACK
from gnomon.report.mixed import short_mixed
from gnomon.report.tables import Column, number, table
from gnomon.search.mixed.bounds import LayerTables
from gnomon.search.mixed.devices import MixedDevices
from gnomon.search.mixed.plan_mixed import memory_limits, plan_mixed, search_mixed
from gnomon.search.mixed.results import MixedFound
from gnomon.search.mixed.space import make_mixed_space

FP32 = Precision(param="fp32", compute="fp32", master="none")
FP16 = Precision(param="fp16", compute="fp16")


@dataclass(frozen=True)
class Case:
    """A model, machines, a batch."""

    model: str
    cluster: Cluster
    batch: int
    seq_len: int
    precision: Precision = Precision()  # noqa: RUF009 (frozen)


def slower_network(spec: str, nics: int) -> Cluster:
    """Two nodes of a spec, the second with fewer ports."""
    (group,) = parse_cluster(spec).groups
    second = NodeGroup(node=replace(group.node, nics=nics))
    return Cluster(name=f"{spec}, one with {nics} ports", groups=(replace(group, count=1), second))


CASES = {
    "bert-v100-p100": Case("bert-large", parse_cluster("1x8xv100-sxm-16gb+1x8xp100-sxm-16gb"), 256, 128, FP32),
    "1b-h100-a100": Case("llama-3.2-1b", parse_cluster("1x4xh100-sxm+1x4xa100-sxm-80gb"), 64, 2048),
    "gpt2-a100-v100": Case("gpt2-xl", parse_cluster("1x4xa100-sxm-40gb+1x4xv100-sxm-32gb"), 64, 1024, FP16),
    "8b-h100-a100": Case("llama-3.1-8b", parse_cluster("1x8xh100-sxm+1x8xa100-sxm-80gb"), 64, 4096),
    "8b-h100-l40s": Case("llama-3.1-8b", parse_cluster("1x4xh100-sxm+1x4xl40s"), 32, 4096),
    "8b-two-networks": Case("llama-3.1-8b", slower_network("2x4xa100-sxm-80gb", 1), 32, 4096),
}


def data_parallel(case: Case) -> MixedFound | None:
    """The best plan that gives every device the same share."""
    graph, work = model(case.model), Workload(global_batch_size=case.batch, seq_len=case.seq_len)
    base = Plan(precision=case.precision)
    space = make_mixed_space(graph, case.cluster, work, base=base, fixed={"pp": 1})
    tables = LayerTables(graph, case.cluster, work, PLAIN_STACK, base, space.kinds)
    limits = memory_limits(space.kinds, Goal())
    search = search_mixed(MixedDevices(tables, work, PLAIN_STACK, replace(space, equal=True), limits))
    return search.best[0] if search.best else None


def main() -> None:
    """Runs the cases that are named, or all."""
    rows, gains = [], []
    for name in sys.argv[1:] or CASES:
        case, start = CASES[name], time.process_time()
        work = Workload(global_batch_size=case.batch, seq_len=case.seq_len)
        result = plan_mixed(case.model, case.cluster, work, base=Plan(precision=case.precision))
        best, plain = result.best[0], data_parallel(case)
        others = [result.equal, plain, *(entry for _, entry in result.best_of_kinds)]
        assert all(other.step_s >= best.step_s for other in others if other is not None), name
        gain = [None if other is None else other.step_s / best.step_s for other in others]
        gains.append((gain[0], gain[1]))
        sure = "proved" if result.proved else f"within {(best.step_s / result.bound_s - 1) * 100:.1f} %"
        shown = ["none fits" if g is None else f"{g:.2f}x" for g in gain]
        rows.append((name, number(best.step_s), *shown[:2], " ".join(shown[2:]), sure,
                     str(result.predicted), f"{time.process_time() - start:.0f}"))  # fmt: skip
        print(f"{name}: {short_mixed(best, result.space.kinds)}", file=sys.stderr, flush=True)
    heads = ("case", "step s", "equal", "data parallel", "each kind alone", "optimum", "predicted", "core s")
    print(*table([Column(name=head, align="left") for head in heads], rows, width=130), sep="\n")
    for what, column in (("equal shares and layers", 0), ("equal data parallelism", 1)):
        values = sorted(pair[column] for pair in gains if pair[column] is not None)
        if values:
            print(f"gain over {what}: worst {values[0]:.2f}x, median {values[len(values) // 2]:.2f}x of {len(values)}")


if __name__ == "__main__":
    main()
