"""Context and expert parallelism compute what the plain model computes: every activation, gradient and parameter."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

from runtime import axes, jobs  # noqa: E402

from gnomon.models.presets import model  # noqa: E402
from gnomon.models.tiny import tiny  # noqa: E402
from gnomon.plans import Experts, Layout, Mesh, Plan, Schedule, Workload  # noqa: E402
from gnomon.runtime.checks.parity import in_small  # noqa: E402
from gnomon.runtime.data.packing import packing_of  # noqa: E402
from gnomon.runtime.ops.pieces import OnlineSoftmax, Rule, attend, backward, pieces  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("name", axes.CASES)
def test_a_plan_computes_what_the_plain_model_computes(name: str) -> None:
    for results in jobs.results(axes.CASES[name].plan.world_size).values():
        result = results.axes[name]
        assert not result.first, (result.first, result.off)
        assert result.tensors > 100


def test_the_first_tensor_that_differs_is_named() -> None:
    """Keys gathered in the order of ranks, not of positions: the first attention is wrong, and nothing before it."""
    results = jobs.results(2)[0].axes[axes.BROKEN]
    assert results.first.startswith("self_attn.core of layers[0], microbatch 0")
    assert results.off > 1e-3


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("cap", [0.0, 2.0])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("documents", [(), ((0,) * 5 + (1,) * 9 + (2,) * 2, (0,) * 4 + (1,) * 4 + (2,) * 8)])
def test_pieces_merge_to_attention_over_everything(
    window: int, cap: float, causal: bool, documents: tuple[tuple[int, ...], ...]
) -> None:
    """Of a zig-zag rank that holds positions 4 to 8 and 12 to 16 of 16, in rows of one document or of several."""
    torch.manual_seed(0)
    rule = Rule(causal=causal, window=window, scale=0.4, cap=cap)
    q, k, v = (torch.randn(2, heads, 16, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    queries = ((4, 4), (12, 4))
    rows = [*range(4, 8), *range(12, 16)]
    at = torch.arange(16)
    distance = at[:, None] - at
    seen = (distance >= 0) if causal else torch.ones(16, 16, dtype=torch.bool)
    if window:
        seen = seen & (distance < window) & (distance > -window)
    packing = None
    if documents:
        numbers = torch.tensor(documents)
        packing = packing_of({"documents": numbers})
        seen = seen & (numbers[:, None, :, None] == numbers[:, None, None, :])
    scores = q @ k.repeat_interleave(2, 1).mT * rule.scale
    scores = torch.tanh(scores / cap) * cap if cap else scores
    whole = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v.repeat_interleave(2, 1)
    merged, own = OnlineSoftmax(), q.detach()[:, :, rows]
    keys = ((8, 8), (0, 8))  # in another order than their positions'
    places = [*range(8, 16), *range(8)]
    attend(merged, own, k.detach()[:, :, places], v.detach()[:, :, places], queries, keys, rule, packing)
    out, lse = merged.result(own)
    assert torch.allclose(out, whole[:, :, rows], rtol=1e-12, atol=1e-13)
    grad = torch.randn_like(out)
    whole[:, :, rows].backward(grad)
    into = tuple(torch.zeros_like(x) for x in (own, k, v))
    given = own, k.detach()[:, :, places], v.detach()[:, :, places]
    backward(grad, *given, out, lse, queries, keys, rule, into, packing)
    assert torch.allclose(into[0], q.grad[:, :, rows], rtol=1e-11, atol=1e-12)
    for have, want in zip(into[1:], (k.grad, v.grad), strict=True):
        assert torch.allclose(have, want[:, :, places], rtol=1e-11, atol=1e-12)


def test_keys_that_nobody_sees_are_no_piece() -> None:
    rule = Rule(causal=True, window=0, scale=1.0, cap=0.0)
    actual = list(pieces(((0, 4), (12, 4)), ((4, 8),), rule))
    assert [(piece.q.start, piece.k.start, piece.k.stop, piece.diagonal) for piece in actual] == [(4, 0, 8, False)]


def test_a_plan_in_small_keeps_its_axes_and_divides_its_model() -> None:
    plan = Plan(
        mesh=Mesh(pp=8, dp_shard=16, cp=4, tp=8, ep=64), schedule=Schedule(micro_batch_size=1),
        layout=Layout(sequence_parallel=True),
    )  # fmt: skip
    small = in_small(model("mixtral-8x7b"), plan, Workload(global_batch_size=512, seq_len=8192))
    assert small.plan.mesh == Mesh(pp=2, cp=2, tp=2, ep=4)
    assert small.graph.num_parameters() < 100_000
    assert any("in small" in message for message in small.simplified)
    balanced = replace(plan, experts=Experts(balance="global", coefficient=0.1))
    told = in_small(model("mixtral-8x7b"), balanced, Workload(global_batch_size=512, seq_len=8192))
    assert told.plan == small.plan  # a loss by microbatches, which the plain model has not
    assert any("without experts.balance, experts.coefficient" in message for message in told.simplified)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "mixtral-8x7b", "deepseek-v3", "gemma-2-9b", "gpt2"])
def test_a_model_in_small_has_the_same_ops(name: str) -> None:
    graph = model(name)
    small = tiny(graph, tp=2, ep=2)
    for block, other in zip(graph.blocks, small.blocks, strict=True):
        assert [(op.kind, op.path) for op in block.ops] == [(op.kind, op.path) for op in other.ops]
    assert small.num_parameters() < graph.num_parameters() / 1000
