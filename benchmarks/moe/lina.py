"""Lina (ATC 2023): exchanges of experts and all-reduces in small operations, all-to-all first, against issue order.

    python benchmarks/moe/lina.py                   # sixteen A100, as in the paper, in the simulator
    python benchmarks/moe/lina.py real [MBIT …]     # two processes over gloo, on a link of that many Mbit/s

Claim: where both collectives compete a step takes at most 0.75 of that in the order of issue (simulated), and 0.85 on a
link of 0.3 Gbit/s; gradients are the same to the bit. `real` runs itself in a network namespace of its own whose
loopback `tc tbf` holds to the rate: both processes send through it, so each has half. Plans take turns, another first
at each step; ratios are of steps of one turn (median and quartiles). All of them run on one network, but for the first,
whose exchanges and all-reduces go beside each other as gloo has them. How fast the machine computes and reduces at that
moment is read from a few steps first, and where all-reduces go is decided by it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from statistics import median, quantiles
from time import perf_counter
from typing import Any

from gnomon.graph import Graph
from gnomon.hardware import Cluster, local_cluster, parse_cluster
from gnomon.models.mixtral import MixtralConfig, mixtral
from gnomon.plans import Mesh, Optimizer, Overlap, Pass, Plan, Precision, Schedule, Workload
from gnomon.prediction import predict
from gnomon.software import stack

FP32 = Precision(param="fp32", compute="fp32", grad="fp32", reduce="fp32", master="none", states="fp32")
OWN = stack("gnomon")
WARM, ROUNDS = 2, 9
"""Steps of each plan: left out, and counted."""
IN_ORDER = "in the order of issue"
SMALL = MixtralConfig(
    name="experts-8", num_layers=4, hidden_size=256, num_heads=4, num_kv_heads=4, head_dim=64, vocab_size=256,
    num_experts=8, experts_per_token=2, expert_ffn_size=1024,
)  # fmt: skip
BASE = Plan(mesh=Mesh(dp_shard=2, ep=2), precision=FP32, optimizer=Optimizer(clip=False), overlap=Overlap(experts=True))
REAL = Workload(global_batch_size=8, seq_len=128)


def lina(all_to_all: int, all_reduce: int, first: str = "all_to_all") -> Schedule:
    """One microbatch, with so many parts."""
    params = (("all_to_all", all_to_all), ("all_reduce", all_reduce), ("first", first))
    return Schedule(num_microbatches=1, passes=(Pass(name="lina", params=params),))


def simulated() -> None:
    """Models of twelve layers of 64 experts on the paper's machines."""
    cluster, parts = parse_cluster("4x4xa100-sxm-40gb"), ((1, 1), (1, 4), (2, 4), (4, 4), (4, 8))
    names = " | ".join(f"{a} and {r} parts" for a, r in parts)
    print(f"| width, experts' width, tokens a device | in order, s | {names} |\n" + "|---" * (2 + len(parts)) + "|")
    for hidden, ffn, rows in ((1024, 4096, 8), (1024, 4096, 16), (2048, 4096, 4), (2048, 4096, 8), (2048, 8192, 8)):
        heads = hidden // 128
        graph = mixtral(
            MixtralConfig(
                name="experts-64", num_layers=12, hidden_size=hidden, num_heads=heads, num_kv_heads=heads, head_dim=128,
                vocab_size=50304, num_experts=64, experts_per_token=2, expert_ffn_size=ffn,
            )
        )  # fmt: skip
        plan = Plan(mesh=Mesh(dp_shard=16, ep=16), overlap=Overlap(experts=True))
        workload = Workload(global_batch_size=16 * rows, seq_len=512)

        def step(schedule: Schedule, graph: Graph = graph, plan: Plan = plan, workload: Workload = workload) -> float:
            return predict(graph, cluster, replace(plan, schedule=schedule), workload).step_s

        in_order = step(lina(1, 1, "issue"))
        ratios = " | ".join(f"{step(lina(a, r)) / in_order:.3f}" for a, r in parts)
        print(f"| {hidden}, {ffn}, {512 * rows} | {in_order:.3f} | {ratios} |", flush=True)


def linked(mbit: int) -> Cluster:
    """This machine, joined by half a link of so many Mbit/s each way."""
    cluster = local_cluster(2)
    (group,) = cluster.groups
    assert group.node.intra is not None
    link = replace(group.node.intra, bytes_per_s=mbit * 1e6 / 8 / 2)
    return replace(cluster, groups=(replace(group, node=replace(group.node, intra=link)),))


def seen(nbytes: int) -> tuple[float, float]:
    """(seconds of an all-reduce of so many bytes, of computing in a step in order), as this machine is now."""
    import torch
    import torch.distributed as dist

    from gnomon.runtime import Executor

    reduced, x = list[float](), torch.ones(nbytes // 4)
    for _ in range(4):
        dist.barrier()
        start = perf_counter()
        dist.all_reduce(x)
        reduced.append(perf_counter() - start)
    executor = Executor(mixtral(SMALL), replace(BASE, schedule=Schedule(num_microbatches=1)), REAL, seed=1)
    computed = list[float]()
    for _ in range(4):
        batch = torch.randint(0, SMALL.vocab_size, (REAL.global_batch_size, REAL.seq_len + 1))
        spans = executor.measured_step(batch)[1].spans
        computed.append(float(spans.duration_s[(spans.role == 0) & (spans.worker == 0)].sum()))
    executor.leave()
    return median(reduced[1:]), median(computed[1:])


def as_seen(cluster: Cluster, graph: Graph) -> Cluster:
    """The machine, as fast as it computes and reduces now."""
    from gnomon.runtime.processes.launch import launch

    plan = replace(BASE, schedule=lina(1, 1, "issue"))
    prediction = predict(graph, cluster, plan, REAL, OWN)
    pricing = prediction.pricing
    key = next(key for key in prediction.structure.program.keys if key.kind == "AR" and key.stage == 1)
    reduced, computed = launch(seen, 2, int(pricing.amounts(key)[0]))[0]
    work = sum(prediction.breakdown.get(kind, 0.0) for kind in ("F", "B", "OPT"))
    slower, wire = computed / work, reduced / pricing.seconds(key)
    (group,) = cluster.groups
    device, intra = group.node.device, group.node.intra
    assert intra is not None
    peaks = {f.name: getattr(device.dense_peak, f.name) for f in fields(device.dense_peak)}
    scaled = replace(device.dense_peak, **{name: rate / slower for name, rate in peaks.items() if rate})
    device = replace(device, dense_peak=scaled, memory_bytes_per_s=device.memory_bytes_per_s / slower)
    node = replace(group.node, device=device, intra=replace(intra, bytes_per_s=intra.bytes_per_s / wire))
    print(f"computing {slower:.2f} and an all-reduce {wire:.2f} of what is foreseen", file=sys.stderr)
    return replace(cluster, groups=(replace(group, node=node),))


def timed(plans: Mapping[str, tuple[Plan, Any]], count: int) -> dict[str, tuple[list[float], list[float], Any]]:
    """(seconds and losses of each step, all parameters at the end, as they lie on this rank) of each plan. plans: with
    their Programs, or None."""
    import torch
    import torch.distributed as dist

    from gnomon.runtime import Executor

    running = {
        name: Executor(mixtral(SMALL), plan, REAL, seed=1, program=program) for name, (plan, program) in plans.items()
    }
    seconds, losses = {name: list[float]() for name in running}, {name: list[float]() for name in running}
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        batch = torch.randint(0, SMALL.vocab_size, (REAL.global_batch_size, REAL.seq_len + 1), generator=generator)
        first = number % len(running)
        for name in [*running][first:] + [*running][:first]:
            dist.barrier()
            start = perf_counter()
            result = running[name].step(batch)
            running[name].synchronise()
            dist.barrier()
            seconds[name].append(perf_counter() - start)
            losses[name].append(running[name].total_loss(result))
    ends = {name: torch.cat([held.shard for held, _ in one.parameters()]) for name, one in running.items()}
    return {name: (seconds[name], losses[name], ends[name]) for name in running}


def real(mbit: int) -> None:
    """Plans on this machine, inside the namespace."""
    from gnomon.runtime.processes.launch import launch

    graph = mixtral(SMALL)
    cluster = as_seen(linked(mbit), graph)
    schedules = {
        "beside each other, whole": Schedule(num_microbatches=1),
        IN_ORDER: lina(1, 1, "issue"),
        "2 and 4 parts, all-to-all first": lina(2, 4),
        "4 and 8 parts, all-to-all first": lina(4, 8),
    }
    plans = {}
    for name, schedule in schedules.items():
        plan = replace(BASE, schedule=schedule)
        prediction = predict(graph, cluster, plan, REAL, OWN)
        plans[name] = plan, prediction.structure.program if schedule.passes else None, prediction.step_s
    measured = launch(timed, 2, {name: (plan, program) for name, (plan, program, _) in plans.items()}, WARM + ROUNDS)
    of = measured[0][IN_ORDER][0][WARM:]
    for name, (seconds, losses, ends) in measured[0].items():
        steps = seconds[WARM:]
        low, middle, high = quantiles([a / b for a, b in zip(steps, of, strict=True)], n=4, method="inclusive")
        same = (
            all(bool((ends == measured[0][IN_ORDER][2]).all()) for ends in [ends])
            and losses == measured[0][IN_ORDER][1]
        )
        print(
            f"| {mbit} | {name} | {plans[name][2] * 1e3:.0f} ms | {median(steps) * 1e3:.0f} ms | "
            f"{middle:.3f} ({low:.3f} to {high:.3f}) | {'yes' if same else 'no'} |",
            flush=True,
        )


def main(arguments: Sequence[str]) -> None:
    """See above."""
    if not arguments:
        simulated()
    elif arguments[0] == "inside":
        real(int(arguments[1]))
    else:
        print("| Mbit/s | collectives | foreseen | measured | of that in order, turn by turn | same bits |")
        print("|---" * 6 + "|", flush=True)
        for mbit in arguments[1:] or ("300",):
            shape = f"tc qdisc add dev lo root tbf rate {int(mbit)}mbit burst 256kb latency 400ms"
            inside = f"ip link set lo up && {shape} && exec {sys.executable} {__file__} inside {int(mbit)}"
            command = ["unshare", "-rn", "sh", "-c", inside]
            subprocess.run(command, check=True, env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"})


if __name__ == "__main__":
    main(sys.argv[1:])
