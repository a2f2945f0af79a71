"""What surrounds products of experts in Megatron Core: launches by expert, passes over rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gnomon.hardware import catalogue
from gnomon.models.mixtral import mixtral, qwen3_30b_a3b
from gnomon.plans import Fp8, Mesh, Optimizer, Plan, Precision, Schedule, Workload
from gnomon.prediction import predict
from gnomon.prices import curves_for
from gnomon.prices.experts import loop_launches, row_passes
from gnomon.software import Fact, Stack

H100 = catalogue.device("h100-sxm-80gb")


def test_launches_in_a_loop_count_for_a_part() -> None:
    """One product of one expert is the launch that is counted anyway; 16 experts in eight bits are 64 kernels."""
    assert loop_launches(1, "") == 0
    assert loop_launches(16, "fp8") == round(0.15 * 63) > loop_launches(16, "")


@pytest.mark.parametrize(("experts", "low", "passes"), [(1, "", 0), (8, "", 1), (1, "fp8", 1), (8, "fp8", 2)])
def test_rows_are_sorted_where_there_are_several_experts_and_padded_for_eight_bits(
    experts: int, low: str, passes: int
) -> None:
    result = row_passes("dispatches", 1e9, experts, low, H100, curves_for(H100), backward=False)  # type: ignore[arg-type]
    least = 2e9 * passes / H100.memory_bytes_per_s
    assert least <= result.device_s <= 1.6 * least
    assert result.kernels == 12 + passes


def test_only_transformer_engine_has_them_and_kernels_of_dispatch_do_the_passes() -> None:
    """Host time grows with the experts of a rank; with DeepEP's or HybridEP's kernels rows are not walked again."""
    graph = mixtral(replace(qwen3_30b_a3b(), num_layers=1))

    def forward(ep: int, engine: bool, dispatch: str) -> tuple[int, float]:
        facts = tuple(Fact(field=f, source="test", date="2026-11-22") for f in ("transformer_engine", "moe_dispatch"))
        stack = Stack(name="any", version="1").with_values(facts, transformer_engine=engine, moe_dispatch=dispatch)
        plan = Plan(
            mesh=Mesh(dp_shard=8, ep=ep),
            optimizer=Optimizer(zero=1),
            schedule=Schedule(micro_batch_size=1),
            precision=Precision(fp8=Fp8(recipe="tensorwise")),
        )
        prediction = predict(graph, "1x8xh100-sxm", plan, Workload(global_batch_size=8, seq_len=4096), stack)
        phase = prediction.pricing.compute.phase("forward", 0)
        return phase.kernels, phase.compute_s

    plain, engine = forward(8, False, "all_to_all"), forward(8, True, "all_to_all")
    fused, many = forward(8, True, "fused"), forward(1, True, "all_to_all")
    assert plain[0] < fused[0] < engine[0] and fused[1] < engine[1]
    assert many[0] > fused[0]  # 128 experts of a rank


def test_biases_and_clamps_of_experts_cost_megatron_and_not_fused_experts() -> None:
    """GPT-OSS: more kernels and more time than without; where experts are fused, in eight bits, none of it."""
    plain = replace(qwen3_30b_a3b(), num_layers=1, qk_norm=False)
    times = {}
    for biased in (False, True):
        for how in ("grouped", "fused"):
            facts = tuple(
                Fact(field=f, source="test", date="2026-11-22") for f in ("transformer_engine", "moe_experts")
            )
            stack = Stack(name="any", version="1").with_values(facts, transformer_engine=True, moe_experts=how)
            plan = Plan(
                mesh=Mesh(dp_shard=8, ep=8),
                optimizer=Optimizer(zero=1),
                schedule=Schedule(micro_batch_size=1),
                precision=Precision(fp8=Fp8(recipe="mxfp8")),
            )
            graph = mixtral(replace(plain, expert_bias=biased))
            prediction = predict(graph, "1x8xb200", plan, Workload(global_batch_size=8, seq_len=4096), stack).pricing
            times[biased, how] = [prediction.compute.phase(name, 0).compute_s for name in ("forward", "input_grad")]
    rows = 4096 * 8 * 2  # of a rank's experts, bytes of one column
    least = (8 * 768 + 14 * 2048) * rows / catalogue.device("b200").memory_bytes_per_s
    assert times[True, "grouped"][0] - times[False, "grouped"][0] >= least
    assert times[True, "grouped"][1] > times[False, "grouped"][1]
    assert times[True, "fused"] == times[False, "fused"]


def test_a_rotary_embedding_with_a_factor_runs_op_by_op_on_megatron() -> None:
    """YaRN of GPT-OSS: 10 more passes over q and k forward and 12 backward, and 22 and 12 more kernels."""
    plain = replace(qwen3_30b_a3b(), num_layers=1, qk_norm=False)
    plan = Plan(mesh=Mesh(dp_shard=8, ep=8), optimizer=Optimizer(zero=1), schedule=Schedule(micro_batch_size=1))
    fact = Fact(field="transformer_engine", source="test", date="2026-11-22")
    for stack in (
        Stack(name="any", version="1").with_values((fact,), transformer_engine=True),
        Stack(name="x", version="1"),
    ):
        phases = {}
        for factor in (False, True):
            graph = mixtral(replace(plain, rotary_factor=factor))
            made = predict(graph, "1x8xb200", plan, Workload(global_batch_size=8, seq_len=4096), stack).pricing
            phases[factor] = made.compute.phase("forward", 0), made.compute.phase("input_grad", 0)
        for (one, two), passes, kernels in zip(zip(*phases.values(), strict=True), (10, 12), (22, 12), strict=True):
            if not stack.layers.transformer_engine:
                assert one == two
                continue
            turned = 4096 * (32 + 4) * 128 * 2  # bytes of q and k
            least = passes * turned / catalogue.device("b200").memory_bytes_per_s
            assert two.kernels - one.kernels == kernels
            assert least < two.compute_s - one.compute_s < 3 * least
