"""Exchanges of experts whole and in parts, for `test_exchanged`: what two ranks compute under each plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gnomon.hardware import parse_cluster
from gnomon.models.mixtral import MixtralConfig, mixtral
from gnomon.plans import Mesh, Overlap, Pass, Plan, Precision, Schedule, Workload
from gnomon.prediction import predict
from gnomon.runtime.optim.update import AdamWSettings
from gnomon.runtime.parameters.parameters import Parameters
from gnomon.runtime.step.execute import Executor

F32 = Precision(param="fp32", compute="fp32", grad="fp32", reduce="fp32", master="none", states="fp32")
GRAPH = mixtral(
    MixtralConfig(
        name="exchanged", num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, vocab_size=64,
        num_experts=8, experts_per_token=3, expert_ffn_size=64,
    )
)  # fmt: skip
"""Widths are whole vectors, so that an activation of some rows is that of all of them."""
WORK = Workload(global_batch_size=8, seq_len=16)


def plan(microbatches: int = 1, *params: tuple[str, int | str], rows: bool = True) -> Plan:
    passes = (Pass(name="lina", params=params),) if params else ()
    return Plan(
        mesh=Mesh(dp_shard=2, ep=2),
        schedule=Schedule(num_microbatches=microbatches, passes=passes),
        precision=F32,
        overlap=Overlap(experts=rows),
    )


WHOLE: Mapping[str, Plan] = {"one": plan(rows=False), "two": plan(2, rows=False)}
"""Without rows of exchanges, by microbatches."""
PLANS: Mapping[str, Plan] = {
    "one, rows": plan(),
    "one, in order": plan(1, ("all_to_all", 1), ("all_reduce", 1), ("first", "issue")),
    "one, uneven parts": plan(1, ("all_to_all", 3), ("all_reduce", 4)),
    "two, rows": plan(2),
    "two, parts": plan(2, ("all_to_all", 4), ("all_reduce", 2)),
}

Trained = tuple[tuple[float, ...], dict[str, Tensor], dict[str, Tensor]]
"""(losses, gradients of the first step, parameters at the end)."""


def train(given: Plan, steps: int = 2) -> Trained:
    rewritten = given.schedule.passes
    program = predict(GRAPH, parse_cluster("2xa100-sxm-40gb"), given, WORK).structure.program if rewritten else None
    executor = Executor(GRAPH, given, WORK, seed=3, settings=AdamWSettings(lr=1e-2), program=program)
    grads, losses = dict[str, Tensor](), list[float]()

    def watch(held: Parameters) -> None:
        grads.update((slot.name, held.my_grad()[low:high].clone()) for slot, (low, high) in held.pieces())

    executor.state.watch = watch
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        losses.append(executor.total_loss(executor.step(torch.randint(0, 64, (8, 17), generator=generator))))
        executor.state.watch = None
    executor.synchronise()
    ends = {slot.name: held.shard[a:b].clone() for held, _ in executor.parameters() for slot, (a, b) in held.pieces()}
    executor.leave()
    return tuple(losses), grads, ends


def run(names: Sequence[str]) -> dict[str, Trained]:
    return {name: train({**WHOLE, **PLANS}[name]) for name in names}
