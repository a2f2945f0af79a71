"""Products on TPUs: sides that fill a matrix unit, chips that are two devices, rows brought into order, casts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gnomon.hardware import catalogue
from gnomon.models.mixtral import mixtral, qwen3_30b_a3b
from gnomon.plans import Fp8, Mesh, Optimizer, Plan, Precision, Saved, SavedRule, Schedule, Workload
from gnomon.prediction import Prediction, predict
from gnomon.prices import curves_for, gemm_seconds
from gnomon.prices.tpu import UnitShape, apart, devices_of, filled, lanes_of
from gnomon.software import Fact, Stack

V5P, V6E, IRONWOOD = (catalogue.device(name) for name in ("tpu-v5p", "tpu-v6e", "tpu-7x"))


def test_sides_fill_up_the_matrix_unit() -> None:
    """2880 is 11 and a quarter times 256: twelve units' worth is worked on. Rows may take the columns' place where a
    compiler chooses, and cost nothing then."""
    assert (lanes_of(V5P), lanes_of(V6E)) == (128, 256)
    m, n, k = filled(4096, 2880, 2880, V6E, columns_held=True)
    assert (m, n, k) == (4096, 3072, 3072)
    assert filled(4096, 2880, 2880, V6E, columns_held=False) == (4096, 2880, 3072)
    assert filled(4096, 2880, 2880, V5P, columns_held=True) == (4096, 2944, 2944)
    assert filled(100, 512, 256, V6E, columns_held=False) == (100, 512, 256)


def test_each_device_of_a_chip_multiplies_its_rows_by_all_weights() -> None:
    """The FLOPs stay, the weights are read twice."""
    assert (devices_of(V6E), devices_of(IRONWOOD)) == (1, 2)
    one = UnitShape(8192, 1024, 512, 4)
    assert apart(one, V6E) == one
    two = apart(one, IRONWOOD)
    assert (two.m, two.batch) == (4096, 8)
    assert two.m * two.n * two.k * two.batch == one.m * one.n * one.k * one.batch


@pytest.mark.parametrize(
    ("side", "flops_per_s"), [(1024, 349.7e12), (2048, 679.3e12), (4096, 892.9e12), (32768, 956.4e12)]
)
def test_products_of_tpu_7x_take_what_google_measured(side: int, flops_per_s: float) -> None:
    """Squares in bf16 on one of a chip's two devices, which is two such products on the chip."""
    result = gemm_seconds(side, side, side, 2, dtype="bf16", device=IRONWOOD, curves=curves_for(IRONWOOD))
    assert result == pytest.approx(2 * side**3 / flops_per_s, rel=0.05)


def experts(rows: str | None, precision: Precision | None = None, *, again: bool = False) -> Prediction:
    """Two layers of a mixture on four chips of TPU 7x."""
    message = ("launch_mode", "moe_rows") if rows else ("launch_mode",)
    facts = tuple(Fact(field=name, source="test", date="2026-11-23") for name in message)
    stack = Stack(name="x", version="").with_values(facts, moe_rows=rows, launch_mode="compiled")
    saved = Saved(rules=(SavedRule(calls="layers[0:2]", action="recompute"),)) if again else Saved()
    plan = Plan(
        mesh=Mesh(dp_shard=4),
        schedule=Schedule(micro_batch_size=4),
        optimizer=Optimizer(zero=3),
        precision=precision or Precision(),
        saved=saved,
    )
    graph = mixtral(replace(qwen3_30b_a3b(), num_layers=2))
    return predict(graph, "4xtpu-7x", plan, Workload(global_batch_size=16, seq_len=4096), stack)


def test_rows_put_in_order_are_passes_of_their_own() -> None:
    """Of 16,384 tokens with eight experts each 2048 wide, 0.54 GB are read and written twice forward and twice
    backward; what the last product puts out is brought into order again where it is made again."""
    plain, ordered = experts(None), experts("sorted")
    once = 2 * 2 * 16384 * 8 * 2048 * 2 / IRONWOOD.memory_bytes_per_s  # both layers, one pass each
    for part in ("F", "B"):
        added = ordered.breakdown[part] - plain.breakdown[part]
        assert 2 * once <= added <= 3.5 * once
    added = experts("sorted", again=True).breakdown["R"] - experts(None, again=True).breakdown["R"]
    assert 2 * once <= added <= 3.5 * once


def test_gradients_that_are_searched_for_maxima_take_longer_to_cast() -> None:
    """Constant scales leave activations as they were."""
    actual, fixed = (experts("sorted", Precision(fp8=Fp8(recipe="tensorwise", fixed=fixed))) for fixed in (False, True))
    assert fixed.breakdown["B"] > actual.breakdown["B"] * 1.01
    assert fixed.breakdown["F"] == pytest.approx(actual.breakdown["F"])


def test_weights_are_cast_again_where_their_products_run_again() -> None:
    """Under ZeRO 3 in eight bits, whole; not where they are gathered in eight bits, each rank casting its part."""

    def backward(gather: bool, again: bool) -> float:
        made = experts(None, Precision(fp8=Fp8(recipe="tensorwise", gather=gather)), again=again)
        return made.breakdown["B"] + made.breakdown.get("R", 0.0)

    whole = backward(False, True) - backward(False, False)
    parts = backward(True, True) - backward(True, False)
    assert whole > parts
