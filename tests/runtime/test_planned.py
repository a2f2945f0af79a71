"""What a search plans for the runtime's stack, the runtime runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

from runtime.parity import FP32, FP64  # noqa: E402
from runtime.plain_llama import Llama  # noqa: E402
from runtime.ranks import launch  # noqa: E402

import gnomon  # noqa: E402
from gnomon.hardware import local_cluster  # noqa: E402
from gnomon.models.llama import LlamaConfig, llama  # noqa: E402
from gnomon.models.presets import LLAMAS  # noqa: E402
from gnomon.plans import Plan, Workload  # noqa: E402
from gnomon.runtime import Executor  # noqa: E402
from gnomon.search import make_space, solve  # noqa: E402
from gnomon.search.stages.dapple import Prices  # noqa: E402
from gnomon.search.stages.replication import pipelines  # noqa: E402
from gnomon.software import stack  # noqa: E402

pytestmark = pytest.mark.torch

WORKLOAD = Workload(global_batch_size=4, seq_len=16)
CLUSTER = local_cluster(2)
BASE = Plan(precision=FP32)


def losses(given: tuple[tuple[LlamaConfig, Plan], ...]) -> list[float]:
    """Of one step of each plan, on this rank."""
    step_losses = []
    for config, plan in given:
        executor = Executor(llama(config), plan, WORKLOAD)
        step_losses.append(executor.total_loss(executor.step(token_ids(config))))
        executor.leave()
    return step_losses


def token_ids(config: LlamaConfig) -> torch.Tensor:
    """Of a step."""
    return torch.randint(config.vocab_size, (4, 17), generator=torch.Generator().manual_seed(0))


def planned() -> tuple[tuple[LlamaConfig, Plan], ...]:
    """The three best plans of llama-tiny, of it with tied weights, and some plan of every kind that is left open."""
    config = LLAMAS["llama-tiny"]()
    tied = replace(config, tied=True)
    out = []
    for one in (config, tied):
        best = gnomon.plan(llama(one), CLUSTER, WORKLOAD, stack("gnomon"), base=BASE, top=3).best
        assert len(best) == 3
        out += [(one, candidate.plan) for candidate in best]
    for entry in (config, tied):
        for fixed in (
            {"tp": 2},
            {"pp": 2},
            {"pp": 2, "schedule": "zero_bubble_v"},
            {"dp_shard": 2, "zero": 1},
            {"dp_shard": 2, "zero": 3},
            {"dp_replicate": 2},
        ):
            space = make_space(llama(entry), CLUSTER, WORKLOAD, base=BASE, fixed=fixed, stack=stack("gnomon"))
            out += [(entry, f.plan) for f in solve(llama(entry), CLUSTER, WORKLOAD, space, stack("gnomon"), top=1).best]
    return tuple(out)


def test_the_best_plans_run_and_give_the_same_loss() -> None:
    given = planned()
    results = launch(losses, 2, given)
    for config in {config for config, _ in given}:
        of_model = [loss for (entry, _), loss in zip(given, results[0], strict=True) if entry == config]
        assert all(loss == pytest.approx(of_model[0], rel=1e-5) for loss in of_model), of_model


def test_plans_with_other_replicas_in_every_stage_run_and_give_the_same_loss() -> None:
    """What DAPPLE's programme proposes for four devices, in float64, to 1e-9 of the plain model's loss."""
    config, cluster = LLAMAS["llama-tiny"](), local_cluster(4)
    prices = Prices(llama(config), cluster, WORKLOAD, BASE, 2, stack("gnomon"))
    proposed = [replace(prices.plan(pieces), precision=FP64) for _, pieces in pipelines(prices, 4)[0]]
    replicas = {tuple(plan.stage_mesh(s).data_ranks for s in range(plan.num_stages)) for plan in proposed}
    assert any(len(set(replica)) > 1 for replica in replicas), replicas
    ids = token_ids(config)
    alone = Llama(config, seed=0, dtype=torch.float64)(ids[:, :-1], ids[:, 1:]).item() / ids[:, 1:].numel()
    given = tuple((config, plan) for plan in proposed if plan.world_size == 4)
    assert given and launch(losses, 4, given)[0] == pytest.approx([alone] * len(given), rel=1e-9)
