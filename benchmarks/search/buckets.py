"""Gradient buckets that the planner chooses (DisCo), against one bucket and against DDP's 25 MiB.

    python benchmarks/search/buckets.py             # models x links, in the simulator
    python benchmarks/search/buckets.py real [MBIT …]   # two processes over gloo, on a link of that many Mbit/s

Claim: the chosen cuts are at most as slow as the fastest size, and that as both; for a small model they are the best of
all ways to cut its layers. `real` runs itself in a network namespace of its own whose loopback `tc tbf` holds to the
rate: both processes send through it, so each has half. Beside plans runs torch's DistributedDataParallel of the same
model. They take turns, another first at each step; ratios are of steps of one turn (median and quartiles). How fast the
machine computes and reduces at that moment is read from a few steps with one bucket first, and plans are chosen by it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from itertools import combinations, groupby, pairwise
from pathlib import Path
from statistics import median
from statistics import quantiles as fractions
from time import perf_counter
from typing import Any

from gnomon.graph import Graph
from gnomon.hardware import Cluster, local_cluster, parse_cluster
from gnomon.models.llama import LlamaConfig, llama
from gnomon.models.presets import model
from gnomon.plans import Mesh, Optimizer, Plan, Precision, Schedule, Workload, stage_layers
from gnomon.prediction import predict
from gnomon.search.refinement.bucket_cuts import Cut, Grain, both_ways, cut_of, search, seed, with_grain
from gnomon.search.refinement.choices import choice
from gnomon.search.refinement.refine import GRAINS
from gnomon.software import stack

ROOT = Path(__file__).resolve().parents[2]
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
SEEN = 7
"""Steps with one bucket, from which the machine's speed is read before plans are chosen."""
EXACT = (1, 10, 100)
"""Links over which every way to cut the small model is played."""
WARM, ROUNDS = 3, 21
"""Steps of each plan: left out, and counted."""
OF = ("one bucket", "25 MiB", "torch DDP")
Step = Callable[[Any], float]
"""A batch of ids -> the mean loss."""
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


def chosen_grain(
    graph: Graph, cluster: Cluster, plan: Plan, work: Workload, size: int, *, fused: bool
) -> tuple[Grain, float, int]:
    """(layers of each bucket and action, seconds, grains played) that `gnomon plan` finds from the fastest size on.
    fused: otherwise each layer stays an action."""
    played = dict[Grain, float]()

    def seconds(grain: Grain) -> float | None:
        if not fused and max(grain.fused) > 1:
            return None
        played[grain] = predict(graph, cluster, with_grain(plan, grain), work, OWN).step_s
        return played[grain]

    layers = [len(part) for part in stage_layers(plan, graph)]
    finest = predict(graph, cluster, with_buckets(plan, 1), work, OWN)
    cuts = [*(cut_of(with_buckets(plan, some), graph) for some in (1, size or 1)), seed(finest), tuple(layers)]
    found = search(both_ways(cuts), layers, seconds, tries=GRAINS)
    return found, played[found], len(played)


def best_of_all(graph: Graph, cluster: Cluster, plan: Plan, work: Workload) -> tuple[float, float]:
    """Seconds of the fastest of all ways to cut the layers into buckets of neighbours, each layer an action; and with
    actions of several layers too."""
    (layers,) = stage_layers(plan, graph)
    ends = [set(some) for count in range(len(layers)) for some in combinations(range(1, len(layers)), count)]
    cuts = [(tuple(b - a for a, b in pairwise([0, *sorted(some), len(layers)])), some) for some in ends]
    steps = {
        Grain(one, other): predict(graph, cluster, with_grain(plan, Grain(one, other)), work, OWN).step_s
        for one, few in cuts
        for other, many in cuts
        if few <= many
    }
    return min(step for grain, step in steps.items() if max(grain.fused) == 1), min(steps.values())


def simulated() -> None:
    """Models x links x batches."""
    heads = ("one bucket", "25 MiB", "one size", "cuts", "with actions", "buckets / actions", "played", "of one bucket",
             "of 25 MiB", "of one size", "of cuts", "best of all cuts, of all")  # fmt: skip
    print(f"| model, sequences | Gbit/s | {' | '.join(heads)} |\n" + "|---" * 14 + "|")
    small = llama(
        replace(SMALL, name="layers-6", num_layers=6, hidden_size=1024, num_heads=16, num_kv_heads=16, ffn_size=2816)
    )
    cases = [(graph, 8, 512, gbit) for graph in (small, *map(model, MODELS)) for gbit in GBITS]
    cases += [(graph, 1, 128, gbit) for graph in (small, model("bert-large")) for gbit in GBITS[2:]]
    for graph, sequences, length, gbit in cases:
        work, cluster = Workload(global_batch_size=2 * sequences, seq_len=length), linked(gbit)
        plan = replace(PLAN, schedule=Schedule(micro_batch_size=sequences))
        one = predict(graph, cluster, with_buckets(plan, WHOLE), work, OWN).step_s
        ddp = predict(graph, cluster, with_buckets(plan, DDP), work, OWN).step_s
        size, step = chosen(graph, cluster, plan, work)
        _, cut_step, _ = chosen_grain(graph, cluster, plan, work, size, fused=False)
        grain, found, count = chosen_grain(graph, cluster, plan, work, size, fused=True)
        exact = ""
        if graph is small and gbit in EXACT:
            best = best_of_all(graph, cluster, plan, work)
            exact = ", ".join(f"{seconds * 1e3:.1f}" for seconds in best)
        times = " | ".join(f"{seconds * 1e3:.1f}" for seconds in (one, ddp, step, cut_step, found))
        ratios = " | ".join(f"{found / other:.3f}" for other in (one, ddp, step, cut_step))
        what = f"{graph.name}, {sequences} of {length} | {gbit}"
        counts = f"{shown(grain.buckets)} / {shown(grain.fused)} | {count}"
        print(f"| {what} | {times} | {counts} | {ratios} | {exact} |", flush=True)
        assert found <= min(cut_step, step, one, ddp)


def shown(cut: Cut) -> str:
    """Layers of each bucket, runs of ones shortened."""
    runs = [(size, len(list(alike))) for size, alike in groupby(cut)]
    return " ".join(f"{size}" if count == 1 else f"{size}x{count}" for size, count in runs)


def ddp_step() -> Step:
    """The same model, batch and update under DistributedDataParallel, whose buckets are of 25 MiB."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks" / "runtime")]
    from against_torch import SETTINGS
    from runtime.plain_llama import Llama

    wrapped = DistributedDataParallel(Llama(SMALL, seed=1, dtype=torch.float32))
    matrices = [p for p in wrapped.parameters() if p.ndim > 1]
    vectors = [p for p in wrapped.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": SETTINGS.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=SETTINGS.lr, betas=SETTINGS.betas, fused=True)

    def step(ids: torch.Tensor) -> float:
        optimizer.zero_grad()
        mine = ids.chunk(2)[dist.get_rank()]
        loss = wrapped(mine[:, :-1], mine[:, 1:]) / mine[:, 1:].numel()
        loss.backward()
        optimizer.step()
        total = loss.detach() / 2
        dist.all_reduce(total)
        return float(total)

    return step


def own_step(plan: Plan) -> Step:
    """A plan of ours."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks" / "runtime")]
    from against_torch import SETTINGS

    from gnomon.runtime import Executor

    executor = Executor(llama(SMALL), plan, REAL, seed=1, settings=SETTINGS)

    def step(ids: Any) -> float:
        result = executor.step(ids)
        executor.synchronise()
        return executor.total_loss(result)

    return step


def timed(plans: dict[str, Plan], count: int) -> dict[str, list[tuple[float, float]]]:
    """(seconds, loss) of each step of each plan, and of torch's DDP."""
    import torch
    import torch.distributed as dist

    running = {name: own_step(plan) for name, plan in plans.items()} | {"torch DDP": ddp_step()}
    collected: dict[str, list[tuple[float, float]]] = {name: [] for name in running}
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        batch = torch.randint(0, SMALL.vocab_size, (REAL.global_batch_size, REAL.seq_len + 1), generator=generator)
        first = number % len(running)
        for name in [*running][first:] + [*running][:first]:
            dist.barrier()
            start = perf_counter()
            loss = running[name](batch)
            dist.barrier()
            collected[name].append((perf_counter() - start, loss))
    return collected


def observed(plan: Plan, count: int) -> tuple[float, float]:
    """(seconds of computing, of the reduction) in a step of a plan with one bucket: medians."""
    import torch

    from gnomon.runtime import Executor

    executor, parts = Executor(llama(SMALL), plan, REAL, seed=1), list[tuple[float, float]]()
    for _ in range(count):
        _, timeline = executor.measured_step(torch.randint(0, 256, (REAL.global_batch_size, REAL.seq_len + 1)))
        spans, reduced, computed = timeline.spans, 0.0, 0.0
        for i in range(spans.size):
            if timeline.workers[spans.worker[i]].name != timeline.workers[0].name:
                continue
            seconds = float(spans.duration_s[i])
            if timeline.kinds[spans.kind[i]] == "AR":
                reduced += seconds
            else:
                computed += seconds
        parts.append((computed, reduced))
    return median(c for c, _ in parts), median(r for _, r in parts)


def as_seen(cluster: Cluster, graph: Graph, plan: Plan, computed: float, reduced: float) -> Cluster:
    """The machine, as fast as a step of that plan was, whose reduction has nothing beside it."""
    for _ in range(3):
        prediction = predict(graph, cluster, plan, REAL, OWN)
        program = prediction.structure.program
        (key,) = [key for key in program.keys if key.kind == "AR"]
        alone = prediction.pricing.seconds(key)
        slower, wire = computed / (prediction.step_s - alone), reduced / alone
        (group,) = cluster.groups
        device, intra = group.node.device, group.node.intra
        assert intra is not None
        peaks = {f.name: getattr(device.dense_peak, f.name) for f in fields(device.dense_peak)}
        scaled = replace(device.dense_peak, **{name: rate / slower for name, rate in peaks.items() if rate})
        device = replace(device, dense_peak=scaled, memory_bytes_per_s=device.memory_bytes_per_s / slower)
        node = replace(group.node, device=device, intra=replace(intra, bytes_per_s=intra.bytes_per_s / wire))
        cluster = replace(cluster, groups=(replace(group, node=node),))
    return cluster


def real(mbit: int) -> None:
    """Plans on this machine, inside the namespace."""
    from gnomon.runtime.processes.launch import launch

    cluster = local_cluster(2)
    (group,) = cluster.groups
    assert group.node.intra is not None
    link = replace(group.node.intra, bytes_per_s=mbit * 1e6 / 8 / 2)
    cluster = replace(cluster, groups=(replace(group, node=replace(group.node, intra=link)),))
    plan = replace(PLAN, schedule=Schedule(micro_batch_size=2), optimizer=Optimizer(clip=False))
    graph, one = llama(SMALL), with_buckets(plan, WHOLE)
    computed, reduced = launch(observed, 2, one, SEEN)[0]
    cluster = as_seen(cluster, graph, one, computed, reduced)
    print(
        f"{mbit} Mbit/s, one bucket: {computed * 1e3:.0f} ms of computing, {reduced * 1e3:.0f} of reducing",
        file=sys.stderr,
    )
    size, _ = chosen(graph, cluster, plan, REAL)
    grain, _, _ = chosen_grain(graph, cluster, plan, REAL, size, fused=True)
    cut = grain.buckets
    plans = {
        "one bucket": with_buckets(plan, WHOLE),
        "25 MiB": with_buckets(plan, DDP),
        f"one size, {size / 2**20:g} MiB": with_buckets(plan, size),
        f"cuts {shown(cut)}, each layer an action": with_grain(plan, Grain(cut, (1,) * sum(cut))),
        f"cuts {shown(cut)}, each bucket an action": with_grain(plan, Grain(cut, cut)),
    }
    measured = launch(timed, 2, plans, WARM + ROUNDS)[0]
    seconds = {name: [step for step, _ in rows[WARM:]] for name, rows in measured.items()}
    losses = [[loss for _, loss in rows] for rows in measured.values()]
    for (name, steps), own in zip(seconds.items(), losses, strict=True):
        foreseen = f"{predict(graph, cluster, plans[name], REAL, OWN).step_s * 1e3:.0f} ms" if name in plans else ""
        ratios = [quantiles([a / b for a, b in zip(steps, seconds[of], strict=True)]) for of in OF]
        apart = max(abs(a / b - 1) for a, b in zip(own, losses[0], strict=True))
        print(
            f"| {mbit} | {name} | {foreseen} | {median(steps) * 1e3:.0f} ms | "
            + "".join(f"{middle:.3f} ({low:.3f} to {high:.3f}) | " for low, middle, high in ratios)
            + f"{apart:.0e} |",
            flush=True,
        )


def quantiles(values: Sequence[float]) -> tuple[float, float, float]:
    """(first quartile, median, third quartile)."""
    low, middle, high = fractions(values, n=4, method="inclusive")
    return low, middle, high


def main(arguments: Sequence[str]) -> None:
    """See above."""
    if not arguments:
        simulated()
    elif arguments[0] == "inside":
        real(int(arguments[1]))
    else:
        of = " | ".join(f"of {name}, pair by pair" for name in OF)
        print(f"| Mbit/s | buckets | predicted | measured, median | {of} | losses apart |\n" + "|---" * 8 + "|")
        sys.stdout.flush()
        for mbit in arguments[1:] or ("500", "2000"):
            shape = f"tc qdisc add dev lo root tbf rate {int(mbit)}mbit burst 256kb latency 400ms"
            inside = f"ip link set lo up && {shape} && exec {sys.executable} {__file__} inside {int(mbit)}"
            command = ["unshare", "-rn", "sh", "-c", inside]
            subprocess.run(command, check=True, env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"})


if __name__ == "__main__":
    main(sys.argv[1:])
