"""Contexts priced together are priced as they are alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gnomon.graph import FUSED
from gnomon.hardware import parse_cluster
from gnomon.models.presets import model
from gnomon.plans import Layout, Mesh, Optimizer, Plan, Precision, Saved, Schedule
from gnomon.plans.parts import Fp8
from gnomon.prediction import KernelFacts, LayerPrice, LocalContext, layer_price, layer_prices
from gnomon.prediction.stage import stage_prices

PLANS = {
    "tp": Plan(mesh=Mesh(tp=8), layout=Layout(sequence_parallel=True), schedule=Schedule(micro_batch_size=1)),
    "cp": Plan(
        mesh=Mesh(cp=4, tp=2),
        layout=Layout(sequence_parallel=True),
        schedule=Schedule(micro_batch_size=1),
        saved=Saved(preset="full"),
    ),
    "fp8": Plan(mesh=Mesh(dp_shard=8), schedule=Schedule(micro_batch_size=1), optimizer=Optimizer(zero=3)),
}
SIZES = [(1, 4096), (2, 4096), (4, 2048), (8, 8192), (1, 8192), (1, 4096)]


def contexts(plan: Plan, name: str) -> list[LocalContext]:
    """Contexts of a middle layer of a model at several micro-batches and sequence lengths."""
    caught: list[LocalContext] = []

    def catch(context: LocalContext) -> LayerPrice:
        caught.append(context)
        return layer_price(context)

    graph, cluster = model(name), parse_cluster("1x8xh100-sxm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gnomon.prediction.stage.layer_price", catch)
        stage_prices(plan, graph, cluster, 0, sizes={"batch": 1, "seq": 4096}, kernels=FUSED, facts=KernelFacts())
    middle = caught[1]
    return [replace(middle, sizes=(("batch", b), ("seq", s))) for b, s in SIZES]


@pytest.mark.parametrize("name", ["llama-3.1-8b", "mixtral-8x7b"])
@pytest.mark.parametrize("key", PLANS)
def test_together_as_alone(key: str, name: str) -> None:
    plan = PLANS[key]
    if key == "fp8":
        plan = replace(plan, precision=Precision(fp8=Fp8(recipe="tensorwise")))
    given = contexts(plan, name)
    for together, context in zip(layer_prices(given), given, strict=True):
        alone = layer_price(context)
        for phase in ("forward", "input_grad", "weight_grad", "recompute"):
            a, b = getattr(together, phase), getattr(alone, phase)
            assert a.compute_s == pytest.approx(b.compute_s, rel=1e-12)
            assert a.comm_s == pytest.approx(b.comm_s, rel=1e-12)
            assert (a.kernels, a.flops) == (b.kernels, b.flops)
        assert [k.bytes for k in together.saved] == [k.bytes for k in alone.saved]
        assert together.transient_bytes == alone.transient_bytes
        assert together.sharded.local_bytes == alone.sharded.local_bytes
        assert (together.input_bytes, together.output_bytes) == (alone.input_bytes, alone.output_bytes)
