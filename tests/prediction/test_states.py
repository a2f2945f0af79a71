"""How optimizer states are kept: narrow, in pages, of projected gradients, and gradients that are used at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gnomon import predict
from gnomon.errors import PlanError
from gnomon.formats.trainers import BF16
from gnomon.models.llama import LlamaConfig, llama
from gnomon.plans import LowRank, Mesh, Optimizer, Overlap, Plan, Precision, Saved, Schedule, Workload
from gnomon.prediction import Prediction
from gnomon.prediction.host_memory import host_memory
from gnomon.prices.collectives import copy_seconds
from gnomon.prices.optimizer import svd_flops
from gnomon.software import stack

BASE = Plan(schedule=Schedule(micro_batch_size=1), saved=Saved(preset="full"), precision=BF16)
SMALL = LlamaConfig(
    name="small", num_layers=3, hidden_size=128, num_heads=4, num_kv_heads=2, head_dim=32, ffn_size=352, vocab_size=512
)


def predicted(plan: Plan, model: str = "llama-2-7b", on: str = "a100-80gb", seq_len: int = 512) -> Prediction:
    given = llama(SMALL) if model == "small" else model
    return predict(
        given, on, plan, Workload(global_batch_size=plan.mesh.data_ranks, seq_len=seq_len), stack("pytorch-fsdp")
    )


def states(plan: Plan, model: str = "small") -> int:
    return predicted(plan, model).tightest.by_class["states"]


def with_states(states: str, **more: object) -> Plan:
    return replace(BASE, precision=replace(BF16, states=states, **more))  # type: ignore[arg-type]


def test_blocks_of_narrow_moments_have_a_scale_each() -> None:
    count = 512 * 128 * 2 + 128 + 3 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 352 * 128 + 2 * 128)
    assert states(with_states("int8")) == round(2 * count * (1 + 4 / 256))
    assert states(with_states("fp4_e2m1")) == round(2 * count * (0.5 + 4 / 128))
    wide = states(with_states("int8", wide_tables=True)) - states(with_states("int8"))
    assert wide == pytest.approx(512 * 128 * 2 * (4 - 1 - 4 / 256), abs=2)


@pytest.mark.parametrize("method", ["galore", "apollo"])
def test_projected_moments_are_what_galore_torch_and_apollo_torch_hold(method: str) -> None:
    """1,805,312 bytes in fp32 of this model at rank 16, by both packages' own optimizers after a step."""
    fp32 = Precision(param="fp32", compute="fp32", grad="fp32", reduce="fp32", master="none", states="fp32")
    low = LowRank(method=method, rank=16)  # type: ignore[arg-type]
    assert states(replace(BASE, precision=fp32, optimizer=Optimizer(low_rank=low))) == 1_805_312


def test_llama_2_7b_takes_what_llama_factory_measured() -> None:
    """42 GB with AdamW in eight bits, 28 with GaLore in eight bits (jiaweizzhao/GaLore#6)."""
    plain = with_states("int8", wide_tables=True)
    galore = replace(with_states("int8"), optimizer=Optimizer(low_rank=LowRank(method="galore")))
    for plan, measured in ((plain, 42), (galore, 28)):
        assert predicted(plan).tightest.peak_bytes / 2**30 == pytest.approx(measured, rel=0.05)


def test_singular_vectors_take_the_70_seconds_that_were_seen() -> None:
    """LLaMA of 1.3 billion parameters on an A100 (jiaweizzhao/GaLore#16): 24 layers, 2048 wide, 5461 in between."""
    flops = 24 * (4 * svd_flops(2048, 2048) + 3 * svd_flops(5461, 2048))
    every = [
        predicted(replace(BASE, optimizer=Optimizer(low_rank=LowRank(method="galore", every=n)))).step_s
        for n in (1, 10**9)
    ]
    mine = 32 * (4 * svd_flops(4096, 4096) + 3 * svd_flops(11008, 4096))
    assert (every[0] - every[1]) * flops / mine == pytest.approx(70, rel=0.02)


def test_pages_go_to_the_host_where_there_is_no_room() -> None:
    wide = replace(BF16, states="fp32")
    whole, paged = (
        predicted(replace(BASE, precision=wide, optimizer=Optimizer(paged=paged)), on="rtx-4090")
        for paged in (False, True)
    )
    assert not whole.fits and not paged.fits  # parameters and gradients alone are 25 GiB
    roomy = predicted(replace(BASE, precision=wide, optimizer=Optimizer(paged=True)), on="h200-sxm")
    assert (roomy.tightest.paged_bytes, roomy.fits) == (0, True)
    tight = predicted(replace(BASE, precision=wide, optimizer=Optimizer(paged=True)), on="a100-80gb")
    away = tight.tightest.paged_bytes
    assert tight.verdict.startswith("fits") and 0 < away == host_memory(tight).bytes
    plain = predicted(replace(BASE, precision=wide), on="a100-80gb")
    assert not plain.tightest.verdict == "fits"
    copied = float(copy_seconds(away, tight.pricing.cluster.node_kinds[0]))
    assert tight.step_s - plain.step_s == pytest.approx(2 * copied, rel=0.01)


def test_gradients_that_are_used_at_once_are_those_of_one_layer() -> None:
    optimizer = Optimizer(clip=False)
    layer, head = 2 * 128 * 128 + 2 * 64 * 128 + 3 * 352 * 128 + 2 * 128, 512 * 128 + 128
    once = predicted(replace(BASE, optimizer=optimizer, overlap=Overlap(optimizer=True)), "small")
    assert once.pricing.stages[0].static_bytes()["gradients"] == 2 * max(layer, head)
    whole = predicted(replace(BASE, optimizer=optimizer), "small")
    assert whole.pricing.stages[0].static_bytes()["gradients"] == 2 * (3 * layer + head + 512 * 128)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (replace(BASE, overlap=Overlap(optimizer=True)), "no norm of all of them to clip by"),
        (
            replace(
                BASE, optimizer=Optimizer(clip=False, zero=2), overlap=Overlap(optimizer=True), mesh=Mesh(dp_shard=2)
            ),
            "optimizer.zero = 2 updates shards",
        ),
        (
            replace(BASE, optimizer=Optimizer(zero=3, low_rank=LowRank(method="galore")), mesh=Mesh(dp_shard=2)),
            "whole gradients of matrices, which optimizer.zero = 3 divides",
        ),
        (replace(BASE, optimizer=Optimizer(low_rank=LowRank(method="apollo")), mesh=Mesh(tp=2)), "which tp divides"),
    ],
)
def test_what_cannot_be(plan: Plan, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        predicted(plan, "small", f"{plan.mesh.world_size}xa100-80gb")
