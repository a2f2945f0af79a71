"""Sums in one order: attention's backward waits, and what Transformer Engine writes is filled before."""

from __future__ import annotations

import pytest

from gnomon.plans import Mesh, Plan, Schedule, Workload
from gnomon.prediction import Prediction, predict
from gnomon.prices.deterministic import ATTENTION_BACKWARD
from gnomon.software import Fact, Stack, stack

HIDDEN = 768
TOKENS = 2 * 1024


def run(**changes: object) -> Prediction:
    base = stack("megatron-lm")
    kept = tuple(fact for fact in base.facts if fact.field not in changes)
    facts = tuple(Fact(field=name, source="a test", date="2026-11-23") for name in changes)
    program: Stack = base.with_values((*kept, *facts), **changes)
    plan = Plan(mesh=Mesh(dp_shard=8), schedule=Schedule(micro_batch_size=2))
    return predict("gpt2", "1x8xh100-sxm", plan, Workload(global_batch_size=16, seq_len=1024), program)


def test_attention_backward_waits_its_turn() -> None:
    free, ordered = (run(deterministic=how).pricing.stages[0].layers[1][0] for how in (False, True))
    assert ordered.forward.attention_s > free.forward.attention_s  # its output is filled
    assert ordered.input_grad.attention_s > ATTENTION_BACKWARD * free.input_grad.attention_s
    plain = run(deterministic=True, transformer_engine=False).pricing.stages[0].layers[1][0]
    assert plain.input_grad.attention_s == pytest.approx(ATTENTION_BACKWARD * free.input_grad.attention_s)


def test_outputs_are_filled_once_each() -> None:
    """Forward: two norms, four products, attention; of the norms their statistics too, of attention its log-sum-exp."""
    free, ordered = (run(deterministic=how).pricing.stages[0].layers[1][0] for how in (False, True))
    assert ordered.forward.kernels - free.forward.kernels == 2 * 3 + 4 + 2
    written = TOKENS * 2 * (HIDDEN * (2 + 3 + 1 + 4 + 1 + 1))  # norms, q k v, out, up, down, attention
    seconds = ordered.forward.compute_s - free.forward.compute_s
    launched = (ordered.forward.kernels - free.forward.kernels) * 3e-6  # an empty kernel takes under 3 us
    assert written / 3.35e12 < seconds < 1.5 * written / 3.35e12 + launched


def test_the_head_is_pytorchs() -> None:
    """But for the norm before it."""
    free, ordered = (run(deterministic=how).pricing.stages[0].layers[-1][0] for how in (False, True))
    assert ordered.weight_grad.compute_s - free.weight_grad.compute_s < 1e-5
    assert ordered.forward.kernels - free.forward.kernels == 3
