"""Uneven shares carried out: two processes of which one is slower, equal shares against those that the planner gives.

    python benchmarks/mixed_run.py [STEPS]      # default 24 of each; needs torch, two cores; prints the table kept in
                                                # results/mixed.md

The second process is made a slower device by real work: it runs every stage's forward SLOWER more times, without
gradients, before the one that counts. A forward is a third of a microbatch's products, so it needs (3 + SLOWER) / 3
times as long for a sequence. Machine and planner agree on that only roughly; what is claimed is that the planner's
shares make the measured step shorter than equal ones. Losses of all runs are the same, as the batch is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

from gnomon.hardware import Cluster, NodeGroup, catalogue, local_cluster
from gnomon.models.llama import LlamaConfig, llama
from gnomon.plans import Mesh, Plan, Precision, Schedule, Stage, Workload
from gnomon.runtime import Executor
from gnomon.runtime.processes.launch import launch
from gnomon.search.mixed.plan_mixed import MixedResult, plan_mixed
from gnomon.software import stack

SLOWER = 3
"""Forwards more."""
CONFIG = LlamaConfig(
    name="bytes-3m",
    num_layers=4,
    hidden_size=192,
    num_heads=6,
    num_kv_heads=2,
    head_dim=32,
    ffn_size=512,
    vocab_size=256,
)
WORKLOAD = Workload(global_batch_size=12, seq_len=128)
FP32 = Precision(param="fp32", compute="fp32", grad="fp32", reduce="fp32", master="none", states="fp32")


def two_kinds() -> Cluster:
    """This machine as two nodes of one process each, the second (3 + SLOWER) / 3 times slower in all that it does.

    Loopback has no price between nodes; 25 Gbit/s Ethernet stands for it."""
    node = local_cluster(1).groups[0].node
    times = 3 / (3 + SLOWER)
    device = node.device
    peaks = replace(device.dense_peak, fp32=(device.dense_peak.fp32 or 0.0) * times)
    slow = replace(
        device, name="slowed-process", dense_peak=peaks, memory_bytes_per_s=device.memory_bytes_per_s * times
    )
    nodes = [replace(node, device=entry, nic=catalogue.link("ethernet-25"), nics=1) for entry in (device, slow)]
    return Cluster(name="one process and one slowed", groups=tuple(NodeGroup(node=node) for node in nodes))


def planned() -> MixedResult:
    """Data parallelism over both, one microbatch a step."""
    fixed = {"pp": 1, "tp": 1, "zero": 0, "recompute": "none"}
    return plan_mixed(
        llama(CONFIG), two_kinds(), WORKLOAD, stack("gnomon"), base=Plan(precision=FP32), fixed=fixed, forbid=()
    )


def plan_of(shares: tuple[int, int]) -> Plan:
    """Both processes side by side."""
    stages = (Stage(calls=("*",), mesh=Mesh(dp_shard=2), shares=shares),)
    return Plan(stages=stages, precision=FP32, schedule=Schedule(num_microbatches=12 // sum(shares)))


def steps(plans: dict[str, Plan], count: int) -> dict[str, list[tuple[float, float]]]:
    """(seconds, loss) of each step of each plan. Plans take turns, another first each time, so that all see the same
    machine."""
    running = {name: Executor(llama(CONFIG), plan, WORKLOAD, seed=1) for name, plan in plans.items()}
    if dist.get_rank() == 1:
        for executor in running.values():
            for stage in executor.stages.values():
                stage.forward = slowed(stage.forward)  # type: ignore[method-assign]
    collected: dict[str, list[tuple[float, float]]] = {name: [] for name in plans}
    for step in range(count):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randint(0, CONFIG.vocab_size, (12, WORKLOAD.seq_len + 1), generator=generator)
        first = step % len(running)
        for name in [*running][first:] + [*running][:first]:
            executor = running[name]
            dist.barrier()
            start = perf_counter()
            result = executor.step(batch)
            executor.synchronise()
            dist.barrier()
            collected[name].append((perf_counter() - start, executor.total_loss(result)))
    return collected


def slowed(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The forward after SLOWER others."""

    def run(*inputs: Tensor) -> Tensor:
        with torch.no_grad():
            for _ in range(SLOWER):
                forward(*inputs)
        return forward(*inputs)

    return run


def main() -> None:
    """Plans, runs, compares."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 24
    result = planned()
    best = next(candidate for candidate in result.best if candidate.plan.world_size == 2)
    shares = best.plan.stages[0].shares or (1, 1)
    plans = {"equal": plan_of((6, 6)), "planned": best.plan, "the other way": plan_of((4, 8))}
    measured = launch(steps, 2, plans, count)[0]
    equal = median(seconds for seconds, _ in measured["equal"][2:])
    print(f"planned shares {shares}, {best.plan.schedule.num_microbatches} microbatches; of {count} steps, 2 warm-up")
    for name, rows in measured.items():
        middle = median(seconds for seconds, _ in rows[2:])
        least = min(seconds for seconds, _ in rows[2:])
        print(f"{name:15} median {middle * 1e3:7.1f} ms  least {least * 1e3:7.1f} ms  {equal / middle:5.2f}x of equal")
    losses = {name: [loss for _, loss in rows] for name, rows in measured.items()}
    apart = max(abs(a / b - 1) for name in losses for a, b in zip(losses[name], losses["equal"], strict=True))
    print(f"losses of all {count} steps agree to {apart:.1e} in fp32; the first {losses['equal'][0]:.4f}")


if __name__ == "__main__":
    main()
