"""Gradient buckets that the planner chooses (DisCo), against one bucket and against DDP's 25 MiB.

    python benchmarks/search/buckets.py             # models x links, in the simulator
    python benchmarks/search/buckets.py real [MBIT …]   # two processes over gloo, on a link of that many Mbit/s

Claim: the chosen size is at most as slow as both; a small model also shows the best of all ways to cut its layers into
buckets, most of which no one size gives. `real` runs itself in a network namespace of its own whose loopback `tc tbf`
holds to the rate: both processes send through it, so each has half. The plans take turns, another first at each step.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from statistics import median
from time import perf_counter
from unittest.mock import patch

from gnomon.graph import Graph
from gnomon.hardware import Cluster, local_cluster, parse_cluster
from gnomon.models.llama import LlamaConfig, llama
from gnomon.models.presets import model
from gnomon.plans import Mesh, Plan, Precision, Schedule, Workload, stage_layers
from gnomon.prediction import predict
from gnomon.prediction.predict import _structure
from gnomon.search.refinement.choices import choice
from gnomon.software import stack

DDP = 25 * 2**20
WHOLE = 2**40
FP32 = Precision(param="fp32", compute="fp32", grad="fp32", reduce="fp32", master="none", states="fp32")
PLAN = Plan(mesh=Mesh(dp_replicate=2), schedule=Schedule(micro_batch_size=8), precision=FP32)
OWN = stack("gnomon")
GBITS = (1, 5, 10, 25, 100)
MODELS = ("gpt2", "bert-large", "llama-3.2-1b", "gpt2-xl")
SMALL = LlamaConfig(
    name="layers-8",
    num_layers=8,
    hidden_size=384,
    num_heads=6,
    num_kv_heads=6,
    head_dim=64,
    ffn_size=1024,
    vocab_size=256,
)
REAL = Workload(global_batch_size=4, seq_len=128)


def linked(gbit: float) -> Cluster:
    """Two nodes of a V100, joined by so many Gbit/s."""
    cluster = parse_cluster("2x1xv100-sxm-32gb")
    (group,) = cluster.groups
    node = replace(group.node, nics=1, nic=replace(group.node.nic, bytes_per_s=gbit * 1e9 / 8))
    return replace(cluster, groups=(replace(group, node=node),))


def with_buckets(plan: Plan, size: int) -> Plan:
    """The plan with buckets of a size; 0: one row for all of a stage."""
    return replace(plan, overlap=replace(plan.overlap, bucket_bytes=size or None))


def chosen(graph: Graph, cluster: Cluster, plan: Plan, work: Workload) -> tuple[int, float]:
    """(bytes, seconds) of the fastest size that `gnomon plan` tries."""
    sizes = choice("bucket_bytes").values(plan, graph, cluster)
    steps = {int(size): predict(graph, cluster, with_buckets(plan, int(size)), work, OWN).step_s for size in sizes}
    return min(steps.items(), key=lambda pair: pair[1])


def best_cut(graph: Graph, cluster: Cluster, plan: Plan, work: Workload) -> float:
    """Seconds of the fastest of all ways to cut the layers into buckets of neighbours."""
    (layers,) = stage_layers(plan, graph)
    last, least = len(layers), float("inf")
    for count in range(last):
        for ends in combinations(range(1, last), count):
            edges = (0, *ends, last)
            cut = tuple(tuple(reversed(range(a, b))) for a, b in zip(edges, edges[1:], strict=False))[::-1]
            _structure.cache_clear()
            with patch("gnomon.lowering.lower.gradient_buckets", lambda *_, cut=cut: cut):
                least = min(least, predict(graph, cluster, with_buckets(plan, DDP), work, OWN).step_s)
    _structure.cache_clear()
    return least


def simulated() -> None:
    """Models x links."""
    work = Workload(global_batch_size=16, seq_len=512)
    print("| model | Gbit/s | one bucket | 25 MiB | chosen | MiB | of one | of 25 MiB | best of all cuts |")
    print("|---|---|---|---|---|---|---|---|---|")
    small = llama(
        replace(SMALL, name="layers-6", num_layers=6, hidden_size=1024, num_heads=16, num_kv_heads=16, ffn_size=2816)
    )
    for graph in (small, *map(model, MODELS)):
        for gbit in GBITS:
            cluster = linked(gbit)
            one = predict(graph, cluster, with_buckets(PLAN, WHOLE), work, OWN).step_s
            ddp = predict(graph, cluster, with_buckets(PLAN, DDP), work, OWN).step_s
            size, step = chosen(graph, cluster, PLAN, work)
            exact = f"{best_cut(graph, cluster, PLAN, work) * 1e3:.1f} ms" if graph is small else ""
            assert step <= min(one, ddp)
            print(
                f"| {graph.name} | {gbit} | {one * 1e3:.1f} ms | {ddp * 1e3:.1f} ms | {step * 1e3:.1f} ms | "
                f"{size / 2**20:g} | {step / one:.3f} | {step / ddp:.3f} | {exact} |",
                flush=True,
            )


def timed(plans: dict[str, Plan], count: int) -> dict[str, list[tuple[float, float]]]:
    """(seconds, loss) of each step of each plan."""
    import torch
    import torch.distributed as dist

    from gnomon.runtime import Executor

    running = {name: Executor(llama(SMALL), plan, REAL, seed=1) for name, plan in plans.items()}
    collected: dict[str, list[tuple[float, float]]] = {name: [] for name in plans}
    for step in range(count):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randint(0, SMALL.vocab_size, (REAL.global_batch_size, REAL.seq_len + 1), generator=generator)
        first = step % len(running)
        for name in [*running][first:] + [*running][:first]:
            dist.barrier()
            start = perf_counter()
            result = running[name].step(batch)
            running[name].synchronise()
            dist.barrier()
            collected[name].append((perf_counter() - start, running[name].total_loss(result)))
    return collected


def real(mbit: int, count: int = 14) -> None:
    """Three plans on this machine, inside the namespace."""
    from gnomon.runtime.launch import launch

    cluster = local_cluster(2)
    (group,) = cluster.groups
    link = replace(group.node.intra, bytes_per_s=mbit * 1e6 / 8 / 2)
    cluster = replace(cluster, groups=(replace(group, node=replace(group.node, intra=link)),))
    plan = replace(PLAN, schedule=Schedule(micro_batch_size=2))
    size, _ = chosen(llama(SMALL), cluster, plan, REAL)
    sizes = {"one bucket": WHOLE, "25 MiB": DDP, "chosen": size}
    measured = launch(timed, 2, {name: with_buckets(plan, bucket) for name, bucket in sizes.items()}, count)[0]
    middle = {name: median(seconds for seconds, _ in rows[2:]) for name, rows in measured.items()}
    foreseen = {
        name: predict(llama(SMALL), cluster, with_buckets(plan, bucket), REAL, OWN).step_s
        for name, bucket in sizes.items()
    }
    losses = [[loss for _, loss in rows] for rows in measured.values()]
    apart = max(abs(a / b - 1) for other in losses for a, b in zip(other, losses[0], strict=True))
    for name, seconds in middle.items():
        print(
            f"| {mbit} | {name} | {sizes[name] / 2**20:g} | {foreseen[name] * 1e3:.0f} ms | {seconds * 1e3:.0f} ms | "
            f"{seconds / middle['25 MiB']:.3f} | {apart:.0e} |",
            flush=True,
        )


def main(arguments: Sequence[str]) -> None:
    """See above."""
    if not arguments:
        simulated()
    elif arguments[0] == "inside":
        real(int(arguments[1]))
    else:
        print("| Mbit/s | buckets | MiB | predicted | measured | of 25 MiB | losses apart |\n" + "|---" * 7 + "|")
        sys.stdout.flush()
        for mbit in arguments[1:] or ("1000", "4000"):
            shape = f"tc qdisc add dev lo root tbf rate {int(mbit)}mbit burst 256kb latency 400ms"
            inside = f"ip link set lo up && {shape} && exec {sys.executable} {__file__} inside {int(mbit)}"
            command = ["unshare", "-rn", "sh", "-c", inside]
            subprocess.run(command, check=True, env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"})


if __name__ == "__main__":
    main(sys.argv[1:])
