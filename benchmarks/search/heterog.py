"""HeteroG's strategies, a choice for every layer, against the mixed search.

    python benchmarks/search/heterog.py [CASE …]    # all cases; prints the table kept in results/heterog.md

Both on the same heterogeneous devices, models and batches. `heterog` is the best strategy that local search finds, over
numbers of microbatches and ways of recomputing, in the play of `layer_strategies`; its seeds are the usual ones (data
parallelism with equal shares and by speed, all-reduce, one device that adds up, sharded; one kind alone; one layer
after the other). `mixed` is the plan of `plan_mixed`, predicted. `play of predict` is what that play says of uneven
data parallelism over what `predict` says of the same plan: the two can be set beside each other as far as it is 1.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

from gnomon.errors import GnomonError
from gnomon.graph import Graph
from gnomon.hardware import Cluster, Device, NodeGroup, parse_cluster
from gnomon.hardware.catalogue import build_node, default_row, device
from gnomon.hardware.kinds import DeviceKind
from gnomon.models.presets import model
from gnomon.plans import Goal, Optimizer, Plan, Precision, Schedule, Workload
from gnomon.prediction import predict
from gnomon.prediction.predict import PLAIN_STACK
from gnomon.report.mixed import short_mixed
from gnomon.search.mixed.bounds import LayerTables
from gnomon.search.mixed.heterog import HeteroGResult, by_speed, search
from gnomon.search.mixed.layer_strategies import LayerChoice, LayerCosts, LayerPlay, Strategy
from gnomon.search.mixed.plan_mixed import memory_limits, plan_mixed
from gnomon.search.mixed.space import MixedPoint, make_mixed_space

FP32 = Precision(param="fp32", compute="fp32", master="none")
FP16 = Precision(param="fp16", compute="fp16")
TRIES = 2500
"""Strategies played for each number of microbatches and way of recomputing, beside the usual ones."""
MICROBATCHES = (1, 2, 4)


@dataclass(frozen=True)
class Case:
    """A model, machines, a batch."""

    model: str
    cluster: Cluster
    batch: int
    seq_len: int
    precision: Precision = Precision()  # noqa: RUF009 (frozen)


def gtx_1080ti() -> Device:
    """11.3 TFLOP/s in fp32, 11 GB at 484 GB/s. Source: NVIDIA's page of the GeForce GTX 1080 Ti, 2017."""
    old = device("p100-sxm-16gb")
    peak = replace(old.dense_peak, **{name: 11.3e12 for name in ("fp32", "fp16") if getattr(old.dense_peak, name)})
    size = 11 * 10**9
    return replace(
        old, name="gtx-1080ti", dense_peak=peak, memory_bytes=size, marketed_memory_bytes=size,
        memory_bytes_per_s=484e9, num_sms=28,
    )  # fmt: skip


def testbed(gbit: float) -> Cluster:
    """HeteroG's machines: two V100, two P100, and twice two 1080 Ti, over so many Gbit/s."""
    rows = [(device("v100-sxm-16gb"), 1), (gtx_1080ti(), 2), (device("p100-sxm-16gb"), 1)]
    groups = []
    for one, count in rows:
        node = build_node(default_row(device("p100-sxm-16gb") if one.name == "gtx-1080ti" else one), one, 2)
        assert node.nic is not None
        nic = replace(node.nic, bytes_per_s=gbit * 1e9 / 8)
        groups.append(NodeGroup(node=replace(node, nics=1, nic=nic), count=count))
    return Cluster(name=f"2 V100 + 4 1080 Ti + 2 P100, {gbit:g} Gbit/s", groups=tuple(groups))


def slower(spec: str, gbit: float) -> Cluster:
    """A spec whose nodes have one port of so many Gbit/s."""
    groups = []
    for group in parse_cluster(spec).groups:
        assert group.node.nic is not None
        nic = replace(group.node.nic, bytes_per_s=gbit * 1e9 / 8)
        groups.append(replace(group, node=replace(group.node, nics=1, nic=nic)))
    return Cluster(name=f"{spec}, {gbit:g} Gbit/s", groups=tuple(groups))


H_A, V_P = "1x4xh100-sxm+1x4xa100-sxm-80gb", "1x8xv100-sxm-16gb+1x8xp100-sxm-16gb"
CASES = {
    "testbed-50": Case("bert-large", testbed(50), 64, 128, FP32),
    "testbed-10": Case("bert-large", testbed(10), 64, 128, FP32),
    "testbed-gpt2": Case("gpt2", testbed(50), 32, 512, FP32),
    "testbed-small": Case("gpt2", testbed(10), 8, 128, FP32),
    "bert-v100-p100": Case("bert-large", parse_cluster(V_P), 256, 128, FP32),
    "bert-10": Case("bert-large", slower(V_P, 10), 256, 128, FP32),
    "1b-h100-a100": Case("llama-3.2-1b", parse_cluster(H_A), 64, 2048),
    "1b-10": Case("llama-3.2-1b", slower(H_A, 10), 16, 512),
    "gpt2-a100-v100": Case("gpt2-xl", parse_cluster("1x4xa100-sxm-40gb+1x4xv100-sxm-32gb"), 64, 1024, FP16),
}


def plays(case: Case, graph: Graph, base: Plan) -> Iterator[LayerPlay]:
    """One for each number of microbatches; with everything recomputed where nothing fits otherwise."""
    work = Workload(global_batch_size=case.batch, seq_len=case.seq_len)
    space = make_mixed_space(graph, case.cluster, work, base=base)
    tables = LayerTables(graph, case.cluster, work, PLAIN_STACK, base, space.kinds)
    limits = memory_limits(space.kinds, Goal())
    crossing = crossing_bytes(case, graph, base)
    for recompute in ("none", "full"):
        for count in MICROBATCHES:
            costs = LayerCosts(
                tables=tables,
                sequences=case.batch // count,
                microbatches=count,
                recompute=recompute,
                crossing_bytes=crossing,
            )
            yield LayerPlay(costs, limits)


def crossing_bytes(case: Case, graph: Graph, base: Plan) -> tuple[float, ...]:
    """Of one sequence's output of each layer."""
    one = parse_cluster(f"1x1x{case.cluster.groups[0].node.device.name}")
    work = Workload(global_batch_size=1, seq_len=case.seq_len)
    (stage,) = predict(graph, one, replace(base, schedule=Schedule(micro_batch_size=1)), work).stages
    return tuple(float(layer.output_bytes) for layer in stage.order)


def uneven(case: Case, graph: Graph, play: LayerPlay) -> float | None:
    """Seconds of data parallelism by speed over all devices, played over predicted."""
    costs, kinds = play.costs, play.costs.tables.kinds
    devices = tuple(costs.kind_of)
    shares = by_speed(costs, devices)
    of_kind = [sum(n for d, n in zip(devices, shares, strict=True) if d in kind.devices) for kind in kinds]
    dealt = [n for kind, total in zip(kinds, of_kind, strict=True) for n in _dealt(kind, total)]
    work = Workload(global_batch_size=case.batch, seq_len=case.seq_len)
    space = make_mixed_space(graph, case.cluster, work, base=costs.tables.base)
    point = MixedPoint(
        "replicas", tuple(range(len(kinds))), (1,) * len(kinds), (space.num_layers,), tuple(of_kind),
        costs.microbatches, False, "full" if costs.recompute == "full" else "none", 0, "one_f_one_b",
        ep=(1,) * len(kinds),
    )  # fmt: skip
    try:
        predicted = predict(graph, case.cluster, space.plan(point), work).step_s
    except GnomonError:
        return None
    free = LayerPlay(costs, [2**60] * len(kinds))
    return free.step_s((LayerChoice(devices, tuple(dealt)),) * costs.tables.num_layers) / predicted


def _dealt(kind: DeviceKind, total: int) -> list[int]:
    share, more = divmod(total, len(kind.devices))
    return [share + (place < more) for place in range(len(kind.devices))]


def shown(strategy: Strategy, costs: LayerCosts) -> str:
    """Runs of layers that do alike."""
    said = []
    for choice, alike in groupby(strategy):
        names = [costs.tables.kinds[costs.kind_of[d]].name.split("-")[0] for d in choice.devices]
        who = " + ".join(f"{len(list(same))} {name}" for name, same in groupby(names))
        said.append(f"{len(list(alike))} layers on {who}{f', {choice.sync}' if len(names) > 1 else ''}")
    return "; ".join(said)


def main() -> None:
    """The cases that are named, or all."""
    heads = ("case", "usual", "which", "heterog", "of usual", "its strategy", "microbatches", "played", "mixed",
             "its plan", "heterog of mixed", "play of predict", "core s")  # fmt: skip
    print(f"| {' | '.join(heads)} |\n" + "|---" * len(heads) + "|")
    for name in sys.argv[1:] or CASES:
        case, start = CASES[name], time.process_time()
        graph, ratios, found = model(case.model), list[float](), list[tuple[HeteroGResult, LayerPlay]]()
        base = Plan(precision=case.precision, optimizer=Optimizer(clip=False))
        for play in plays(case, graph, base):
            if play.costs.recompute == "full" and any(one.step_s < float("inf") for one, _ in found):
                break
            found.append((search(play, TRIES), play))
            if (ratio := uneven(case, graph, play)) is not None:
                ratios.append(ratio)
        best, play = min(found, key=lambda pair: pair[0].step_s)
        usual, at = min(((one, play.costs.microbatches) for one, play in found), key=lambda pair: pair[0].seed_s)
        work = Workload(global_batch_size=case.batch, seq_len=case.seq_len)
        result = plan_mixed(case.model, case.cluster, work, base=base)
        mixed = min(
            (one for one in (*result.best, *(o for _, o in result.best_of_kinds)) if one), key=lambda one: one.step_s
        )
        print(
            f"| {case.model}, {case.batch} x {case.seq_len}, {case.cluster.name} | {usual.seed_s * 1e3:.1f} ms | "
            f"{usual.seed}, {at} | {best.step_s * 1e3:.1f} ms | {best.step_s / usual.seed_s:.3f} | "
            f"{shown(best.strategy, play.costs)} | {play.costs.microbatches} | {sum(one.played for one, _ in found)} | "
            f"{mixed.step_s * 1e3:.1f} ms | {short_mixed(mixed, result.space.kinds)} | "
            f"{best.step_s / mixed.step_s:.3f} | {min(ratios):.3f} to {max(ratios):.3f} | "
            f"{time.process_time() - start:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
