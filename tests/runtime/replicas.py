"""Runs whose experts lie on ranks as plans place them, for `test_replicas`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from runtime.parity import FP64, SETTINGS
from torch import Tensor

from gnomon.models.mixtral import MixtralConfig, mixtral
from gnomon.plans import Experts, Mesh, Plan, Schedule, Workload
from gnomon.runtime import Executor
from gnomon.runtime.checkpoint.load import load
from gnomon.runtime.checkpoint.save import save
from gnomon.runtime.launch.job import PreparedJob

CONFIG = MixtralConfig(
    name="tiny", num_layers=2, hidden_size=16, num_heads=2, num_kv_heads=2, head_dim=8, vocab_size=32,
    num_experts=8, experts_per_token=2, expert_ffn_size=24,
)  # fmt: skip
WORK = Workload(global_batch_size=4, seq_len=16)
STATIC = Plan(mesh=Mesh(dp_shard=2, ep=2), schedule=Schedule(num_microbatches=2), precision=FP64)
GIVEN = Experts(replicas=2, placement=((7, 1, 2, 5, 4, 1, 2, 0, 3, 6),))
"""Both ranks have experts 1 and 2."""
MOVING = Experts(replicas=2, rebalance_every=1)
SWAPPED = Experts(placement=((3, 0, 2, 1, 7, 6, 5, 4), (0, 2, 4, 6, 7, 5, 3, 1)))
AHEAD = Experts(speculate=True)
BOTH = Experts(placement=SWAPPED.placement, speculate=True)
STEPS = 4


def skewed(executor: Executor) -> None:
    """Makes two experts of each router, both of rank 0, more likely than the others."""
    for held, _ in executor.parameters():
        for slot in held.slots:
            if slot.name.endswith("gate.weight"):
                value = held.value(slot.name)
                value[1] *= 12.0
                value[2] *= 12.0


def batch(step: int) -> Tensor:
    return torch.randint(0, 32, (4, 17), generator=torch.Generator().manual_seed(step))


def whole(executor: Executor) -> Mapping[str, Tensor]:
    """Every parameter, whole."""
    executor.synchronise()
    return PreparedJob(executor, source=None, owns_group=False).state_dict()


def trained(plans: Sequence[Plan], folder: str = "") -> list[dict[str, object]]:
    """Losses, norms, parameters after STEPS steps of each plan, and slots that moved. folder: where the first plan's
    state after half of them is written; the others then go on from it."""
    found = []
    for number, plan in enumerate(plans):
        executor = Executor(mixtral(CONFIG), plan, WORK, settings=SETTINGS)
        begin = 0
        if folder and number:
            begin = load(Path(folder), executor, say=lambda line: None)
        else:
            skewed(executor)
        losses, norms = [], []
        for step in range(begin, STEPS):
            result = executor.step(batch(step))
            losses.append(executor.total_loss(result))
            norms.append(float(result.grad_norm))
            if folder and number == 0 and step + 1 == STEPS // 2:
                save(Path(folder), executor, step + 1)
        moved = executor.state.replicas.rebalanced if executor.state.replicas is not None else []
        guesses = [guess for stage in executor.stages.values() for guess in stage.guesses.values()]
        missed = [sum(guess.missed for guess in guesses), sum(guess.guesses for guess in guesses)]
        said = {"losses": losses, "norms": norms, "moved": len(moved), "missed": missed}
        found.append({**said, "parameters": whole(executor)})
        executor.leave()
    return found
