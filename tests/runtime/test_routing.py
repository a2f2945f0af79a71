"""Tokens beyond an expert's capacity, rows that fill it up, and tokens that go to one of two experts alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

from runtime.lengths import planned  # noqa: E402
from runtime.one_process import alone  # noqa: E402
from runtime.parity import SETTINGS  # noqa: E402
from runtime.ranks import launch  # noqa: E402
from torch import Tensor  # noqa: E402

from gnomon.errors import PlanError  # noqa: E402
from gnomon.models.mixtral import MixtralConfig, mixtral  # noqa: E402
from gnomon.models.presets import model  # noqa: E402
from gnomon.plans import Experts, Layout, Mesh, Plan, RouterLoad, Schedule, Workload  # noqa: E402
from gnomon.plans.experts import under, with_one_expert  # noqa: E402
from gnomon.prediction import predict  # noqa: E402
from gnomon.runtime import Executor  # noqa: E402
from gnomon.runtime.ops.routing import combine, dispatch, routing_of  # noqa: E402

pytestmark = pytest.mark.torch

EXPERTS, TOKENS = 4, 24
WORK = Workload(global_batch_size=4, seq_len=8)
CONFIG = MixtralConfig(
    name="tiny", num_layers=2, hidden_size=16, num_heads=2, num_kv_heads=2, head_dim=8, vocab_size=32,
    num_experts=EXPERTS, experts_per_token=2, expert_ffn_size=24,
)  # fmt: skip


@pytest.fixture
def process() -> Iterator[None]:
    with alone():
        yield


def kept_by_hand(indices: Tensor, weights: Tensor, capacity: float, policy: str) -> list[list[tuple[int, int]]]:
    """(token, which of its choices) that each expert keeps, as Megatron-LM's topk_softmax_with_capacity does."""
    most = math.ceil(indices.numel() / EXPERTS * capacity)
    kept = []
    for expert in range(EXPERTS):
        asked = [(t, k) for t, row in enumerate(indices.tolist()) for k, chosen in enumerate(row) if chosen == expert]
        if policy == "probs":
            asked.sort(key=lambda pair: -float(weights[pair]))
        kept.append(asked[:most])
    return kept


@pytest.mark.parametrize("policy", ["position", "probs"])
@pytest.mark.parametrize("capacity", [1.0, 1.5])
def test_what_exceeds_a_capacity_is_dropped_and_rows_of_zeros_change_nothing(policy: str, capacity: float) -> None:
    torch.manual_seed(0)
    scores = torch.rand(TOKENS, EXPERTS, dtype=torch.float64) + torch.tensor([0.6, 0.0, 0.2, 0.0])
    weights, indices = scores.softmax(-1).topk(2, dim=-1)
    kept, x = kept_by_hand(indices, weights, capacity, policy), torch.rand(TOKENS, 3, dtype=torch.float64)
    by = weights if policy == "probs" else None
    expected = torch.zeros_like(x)
    for expert, pairs in enumerate(kept):
        for token, choice in pairs:
            expected[token] += weights[token, choice] * x[token] * (expert + 1)
    most = math.ceil(TOKENS * 2 / EXPERTS * capacity)
    for padded in (False, True):
        leaf = x.clone().requires_grad_()
        routing = routing_of(indices, EXPERTS, capacity=capacity, padded=padded, weights=by)
        assert routing.counts == tuple(most if padded else len(pairs) for pairs in kept)
        factors = torch.arange(1, EXPERTS + 1).repeat_interleave(torch.tensor(routing.counts)).unsqueeze(-1)
        out = combine(dispatch(leaf, routing) * factors, weights, routing)
        assert torch.allclose(out, expected, atol=1e-14)
        out.sum().backward()
        shares = torch.zeros(TOKENS, dtype=torch.float64)
        for expert, pairs in enumerate(kept):
            for token, choice in pairs:
                shares[token] += weights[token, choice] * (expert + 1)
        assert leaf.grad is not None and torch.allclose(leaf.grad, shares[:, None].expand_as(x), atol=1e-14)


def trained(plan: Plan, config: MixtralConfig = CONFIG, work: Workload = WORK) -> tuple[float, dict[str, Tensor]]:
    """(loss, parameters after two steps, where this rank has them whole)."""
    executor = Executor(mixtral(config), plan, work, settings=SETTINGS)
    for step in range(2):
        ids = torch.randint(0, 32, (4, 9), generator=torch.Generator().manual_seed(step))
        loss = executor.total_loss(executor.step(ids))
    executor.synchronise()
    found = {slot.name: held.value(slot.name).clone() for held, _ in executor.parameters() for slot in held.slots}
    executor.leave()
    return loss, found


def same(one: dict[str, Tensor], other: dict[str, Tensor], *, left_out: tuple[str, ...] = ()) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[name], other[name]) for name in one if not name.endswith(left_out or ("\0",))
    )


def test_at_0_every_token_has_one_expert_and_at_1_two(process: None) -> None:
    plan = planned(size=2)
    two, one = trained(plan), trained(plan, replace(CONFIG, experts_per_token=1))
    at_0 = trained(replace(plan, experts=Experts(threshold=0.0)))
    at_1 = trained(replace(plan, experts=Experts(threshold=1.0)))
    between = trained(replace(plan, experts=Experts(threshold=0.02)))
    assert at_0[0] == one[0] and same(at_0[1], one[1])
    assert at_1[0] == two[0] and same(at_1[1], two[1])
    assert between[0] not in (one[0], two[0])


def both(plans: tuple[Plan, ...], work: Workload) -> list[float]:
    return [trained(plan, work=work)[0] for plan in plans]


def test_a_capacity_that_is_filled_up_trains_alike_over_ranks() -> None:
    """Ranks have tokens of their own, of which each expert takes so many: one process with as small microbatches."""
    plain = planned(size=1)
    spread = replace(plain, mesh=Mesh(dp_shard=2, ep=2))
    plans = (spread, replace(spread, layout=Layout(dispatch="all_gather")))
    dropped = replace(WORK, router=RouterLoad(capacity=1.0))
    filled = replace(WORK, router=RouterLoad(capacity=1.0, padded=True))
    spread_out = [loss for work in (dropped, filled) for loss in launch(both, 2, plans, work)[0]]
    ((alone_too,),) = (launch(both, 1, (plain,), dropped)[0],)
    assert spread_out == pytest.approx([alone_too] * 4, abs=1e-12)


def test_rows_that_are_not_routed_are_not_priced() -> None:
    plan = Plan(schedule=Schedule(micro_batch_size=8), experts=Experts(threshold=0.3))
    work = Workload(global_batch_size=64, seq_len=2048)
    halved = replace(work, router=RouterLoad(alone=1.0))
    one = replace(model("mixtral-8x7b"), name="one")
    times = [predict(one, "1xh200-sxm", plan, given).step_s for given in (work, halved)]
    assert times[1] < 0.75 * times[0]
    flops = [predict(one, "1xh200-sxm", plan, given).model_flops for given in (work, halved)]
    top_1 = predict(with_one_expert(one), "1xh200-sxm", replace(plan, experts=Experts()), work).model_flops
    assert flops[1] == top_1 < flops[0]
    ungated = predict(one, "1xh200-sxm", replace(plan, experts=Experts()), halved)
    assert ungated.step_s == times[0] and ungated.model_flops == flops[0]
    with pytest.raises(PlanError, match="has none; leave it out"):
        under(model("llama-3.2-1b"), plan)
    with pytest.raises(PlanError, match="chooses 8 by sigmoid"):
        under(model("deepseek-v3"), plan)
    with pytest.raises(PlanError, match="from 0 to 1"):
        Experts(threshold=1.5)
