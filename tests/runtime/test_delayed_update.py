"""An update that lags by a step: a delayed loop in plain torch, its warm-up, and what waits at a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

import torch.distributed as dist  # noqa: E402
from runtime.parity import CONFIG, FP64, SETTINGS, WORKLOAD, config_of, token_ids  # noqa: E402
from runtime.plain_llama import Llama  # noqa: E402
from runtime.ranks import launch  # noqa: E402
from torch import Tensor  # noqa: E402

import gnomon  # noqa: E402
from gnomon.models.llama import llama  # noqa: E402
from gnomon.plans import Mesh, Optimizer, Plan, Schedule  # noqa: E402
from gnomon.plans.parts import Offload  # noqa: E402

pytestmark = pytest.mark.torch

TIED = config_of(", tied")
GRAPH = llama(CONFIG)
AFTER, STEPS = 3, 7
OFFLOADS = {
    "as they are made": Offload(),
    "after the last microbatch": Offload(accumulate="device"),
    "in two tiles": Offload(tiles=2),
}
Numbers = tuple[list[float], dict[str, Tensor]]
"""(loss of each step, parameters at the end)."""


def delayed(
    parameters: list[Tensor], loss_of: Callable[[int], Tensor], update: Any, *, steps: int, after: int
) -> list[float]:
    """Losses of a loop by hand. loss_of: of the step of that number. update: torch's optimizer of the parameters. From
    step `after` + 1 on a step applies, at its end, the gradients of the step before; the first such step has none."""
    losses, waiting = [], None
    for step in range(1, steps + 1):
        update.zero_grad()
        loss = loss_of(step)
        loss.backward()
        losses.append(loss.item())
        made = [p.grad.clone() for p in parameters if p.grad is not None]
        applied, waiting = (made, None) if step <= after else (waiting, made)
        if applied is not None:
            for p, grad in zip(parameters, applied, strict=True):
                p.grad = grad
            torch.nn.utils.clip_grad_norm_(parameters, update.defaults.get("clip", float("inf")))
            update.step()
    return losses


def test_the_loop_by_hand_is_the_paper_s() -> None:
    """Of f = x²/2 with steps of 0.1: five as usual, one that changes nothing, then one behind."""
    x, seen = torch.ones((), dtype=torch.float64, requires_grad=True), []

    def loss(step: int) -> Tensor:
        seen.append(float(x.detach()))
        return x**2 / 2

    delayed([x], loss, torch.optim.SGD([x], lr=0.1), steps=9, after=5)
    after = [*seen[1:], float(x.detach())]
    assert after[3:] == pytest.approx([0.6561, 0.59049, 0.59049, 0.531441, 0.472392, 0.419248], abs=1e-6)


@cache
def by_hand(clip: bool, tied: bool = False) -> Numbers:
    model = Llama(TIED if tied else CONFIG, seed=3, dtype=torch.float64)
    groups = [
        {"params": [p for p in model.parameters() if (p.ndim > 1) == wide], "weight_decay": decay}
        for wide, decay in ((True, SETTINGS.weight_decay), (False, 0.0))
    ]
    adam = torch.optim.AdamW(groups, lr=SETTINGS.lr, betas=SETTINGS.betas, eps=SETTINGS.eps)
    if clip:
        adam.defaults["clip"] = SETTINGS.clip_norm

    def loss(step: int) -> Tensor:
        ids = token_ids(step, CONFIG, WORKLOAD)
        result: Tensor = model(ids[:, :-1], ids[:, 1:]) / ids[:, 1:].numel()
        return result

    losses = delayed(list(model.parameters()), loss, adam, steps=STEPS, after=AFTER)
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def plan_of(offload: Offload, clip: bool = True) -> Plan:
    optimizer = Optimizer(offload=offload, clip=clip, delay=1, delay_after=AFTER)
    return Plan(schedule=Schedule(num_microbatches=2), precision=FP64, optimizer=optimizer)


def run(
    plan: Plan, folder: Path | None = None, steps: range = range(1, STEPS + 1), graph: gnomon.Graph = GRAPH
) -> Numbers:
    """folder: of a checkpoint to go on from, and to leave one after step AFTER + 2."""
    with gnomon.prepare(graph, plan, workload=WORKLOAD, seed=3, settings=SETTINGS) as job:
        if folder is not None and steps.start > 1:
            assert job.load(folder) == steps.start - 1
        losses = []
        for step in steps:
            losses.append(job.step(token_ids(step, CONFIG, WORKLOAD)))
            if folder is not None and step == AFTER + 2:
                job.save(folder)
        return losses, job.state_dict()


def same(actual: Numbers, expected: Numbers) -> None:
    assert actual[0] == pytest.approx(expected[0], rel=1e-9)
    for name, value in expected[1].items():
        torch.testing.assert_close(actual[1][name].flatten(), value.flatten(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("name", OFFLOADS)
def test_it_trains_as_the_loop_by_hand(name: str, clip: bool) -> None:
    same(run(plan_of(OFFLOADS[name], clip)), by_hand(clip))


def test_on_two_ranks_that_divide_the_states() -> None:
    plan = replace(plan_of(Offload()), mesh=Mesh(dp_shard=2), optimizer=replace(plan_of(Offload()).optimizer, zero=2))
    for rank in launch(_on_a_rank, 2, plan).values():
        same(rank, by_hand(True))


def _on_a_rank(plan: Plan) -> Numbers:
    assert dist.get_world_size() == 2
    return run(plan)


def test_layers_on_the_device_are_updated_in_their_own_step() -> None:
    """Half of the layers, without clipping; those on the host lag."""
    plan = plan_of(Offload(fraction=0.5), clip=False)
    with gnomon.prepare(GRAPH, plan, workload=WORKLOAD, seed=3, settings=SETTINGS) as job:
        late = {name for parts in job.executor.host.parts.values() for part in parts for name in part.by_name}
        losses = [job.step(token_ids(step, CONFIG, WORKLOAD)) for step in range(1, STEPS + 1)]
        job.executor.settle()
        state = job.state_dict()
        names = {slot.name for held, _ in job.executor.parameters() for slot in held.slots}
    model = Llama(CONFIG, seed=3, dtype=torch.float64)
    named = dict(model.named_parameters())
    assert late and late < names == named.keys()
    groups = [
        {"params": [p for p in model.parameters() if (p.ndim > 1) == wide], "weight_decay": decay}
        for wide, decay in ((True, SETTINGS.weight_decay), (False, 0.0))
    ]
    adam = torch.optim.AdamW(groups, lr=SETTINGS.lr, betas=SETTINGS.betas, eps=SETTINGS.eps)
    waiting, wanted = dict[str, Tensor](), []
    for step in range(1, STEPS + 1):
        adam.zero_grad()
        ids = token_ids(step, CONFIG, WORKLOAD)
        loss = model(ids[:, :-1], ids[:, 1:]) / ids[:, 1:].numel()
        loss.backward()
        wanted.append(loss.item())
        if step > AFTER:
            for name in late:
                waiting[name], named[name].grad = named[name].grad, waiting.get(name)
        adam.step()
    for p in named.values():
        p.grad = None
    for name, grad in waiting.items():
        named[name].grad = grad
    adam.step()
    same((losses, state), (wanted, {name: p.detach() for name, p in named.items()}))


OTHER_AXES = {
    "pipeline": (Mesh(pp=2), Schedule(name="zero_bubble_h1", num_microbatches=2), False),
    "two stages a rank": (
        Mesh(pp=2),
        Schedule(name="interleaved_one_f_one_b", num_microbatches=2, virtual_stages=2),
        False,
    ),
    "tensor": (Mesh(tp=2), Schedule(num_microbatches=2), False),
    "tied over stages": (Mesh(pp=2), Schedule(num_microbatches=2), True),
}


def _on_other_axes() -> dict[str, Numbers]:
    torch.set_num_threads(1)
    found = {}
    for name, (mesh, order, tied) in OTHER_AXES.items():
        plan = replace(plan_of(Offload()), mesh=mesh, schedule=order)
        found[name] = run(plan, graph=llama(TIED) if tied else GRAPH)
    return found


def test_with_pipeline_stages_and_tensor_parallel_ranks() -> None:
    """What stages share is added up in the step that made it, though the norm is of the step before."""
    for found in launch(_on_other_axes, 2).values():
        for name, numbers in found.items():
            same(numbers, by_hand(True, OTHER_AXES[name][2]))


def test_the_usual_loop_is_another() -> None:
    plan = plan_of(Offload())
    usual = run(replace(plan, optimizer=replace(plan.optimizer, delay=0)))[0]
    late = run(plan)[0]
    assert usual[: AFTER + 1] == late[: AFTER + 1] and usual[AFTER + 2] != late[AFTER + 2]


def test_nothing_waits_at_a_checkpoint(tmp_path: Path) -> None:
    """What a step left is applied before it is written, so a run goes on from it to the same losses."""
    plan = plan_of(Offload())
    whole = run(plan, tmp_path)
    rest = run(plan, tmp_path, range(AFTER + 3, STEPS + 1))
    assert rest[0] == whole[0][AFTER + 2 :]
    assert all(torch.equal(value, rest[1][name]) for name, value in whole[1].items())
