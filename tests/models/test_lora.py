"""Adapters on frozen models: published counts, what has a gradient, memory by hand, layouts, the search."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

import gnomon
from gnomon.errors import GraphError, PlanError
from gnomon.formats import programs
from gnomon.formats.given import ReadContext
from gnomon.graph import BF16, Graph
from gnomon.graph.backward import backward
from gnomon.hardware import parse_cluster
from gnomon.models.lora import Adapters, parse_adapters, with_adapters
from gnomon.models.presets import model
from gnomon.ops.kernels import FUSED
from gnomon.plans import Fp8, Layout, Mesh, Optimizer, Plan, Precision, Schedule, Workload
from gnomon.prediction import predict
from gnomon.prediction.layer_types import LayerPrice
from gnomon.prediction.predict import stages_of
from gnomon.prices.collectives import collective_seconds
from gnomon.request.runnable import read_runnable_model
from gnomon.sharding import shard_block
from gnomon.software import stack

LAYER = "layers"
BATCH = Workload(global_batch_size=8, seq_len=512)


def priced(graph: Graph, *, fp8: bool = False) -> LayerPrice:
    """A layer under Megatron-Bridge on one H100."""
    precision = Precision(fp8=Fp8(recipe="delayed")) if fp8 else Precision()
    plan = Plan(schedule=Schedule(micro_batch_size=1), precision=precision)
    (stage,) = stages_of(graph, parse_cluster("1x1xh100-sxm"), plan, BATCH, stack("megatron-bridge"))
    return next(price for price, layers in stage.layers if layers[0].call.block == LAYER)


@pytest.mark.parametrize(
    ("name", "trained"),
    [
        ("llama-3.1-8b+lora16", 41_943_040),  # what PEFT prints for r = 16 on all linears of Llama 3 8B
        ("llama-3.1-8b+lora8:q_proj,v_proj", 3_407_872),  # its default targets and rank
        ("llama-3.1-8b+qlora16", 41_943_040),
        ("llama-3.1-70b+lora16", 207_093_760),
    ],
)
def test_published_counts(name: str, trained: int) -> None:
    graph = model(name)
    assert graph.num_parameters() == trained
    assert graph.num_frozen() == model(name.partition("+")[0]).num_parameters()


def test_only_adapters_have_weight_gradients() -> None:
    block = model("llama-tiny+lora8:q_proj").block(LAYER)
    steps = backward(block, FUSED, BF16).ops
    written = {name for step in steps if step.phase == "weight_grad" for name in step.grads_out}
    assert written == {"self_attn.q_proj.lora_A.weight", "self_attn.q_proj.lora_B.weight"}
    assert any(step.phase == "input_grad" and step.path == "self_attn.k_proj" for step in steps)


def test_what_only_weight_gradients_read_is_not_kept() -> None:
    kept = {s.tensor.name for s in backward(model("llama-tiny+lora8:q_proj").block(LAYER), FUSED, BF16).saved}
    assert "mlp.act" not in kept and {"input_layernorm", "mlp.gate_proj"} <= kept
    assert "mlp.act" in {s.tensor.name for s in backward(model("llama-tiny").block(LAYER), FUSED, BF16).saved}


def test_a_joined_projection_has_one_adapter() -> None:
    qkv = ("q_proj", "k_proj", "v_proj")
    apart = with_adapters(model("llama-tiny"), Adapters(rank=8, targets=qkv))
    joined = with_adapters(model("llama-tiny"), Adapters(rank=8, targets=qkv, joined=True))
    assert apart.num_parameters() - joined.num_parameters() == 4 * 2 * 8 * 256


@pytest.mark.parametrize("scaled", ["input", "output"])
@pytest.mark.parametrize("magnitudes", [False, True])
def test_the_joined_read_the_first_ones_low_rank_activation(
    magnitudes: bool, scaled: Literal["input", "output"]
) -> None:
    """With DoRA's magnitudes too, which follow `lora_B`."""
    qkv = ("q_proj", "k_proj", "v_proj")
    adapters = Adapters(rank=8, targets=qkv, joined=True, magnitudes=magnitudes, scaled=scaled, dropout=0.1)
    block = next(
        b for b in with_adapters(model("llama-tiny"), adapters).blocks if any("lora_B" in o.path for o in b.ops)
    )
    ups = [op for op in block.ops if op.path.endswith("lora_B")]
    assert len(ups) == 3 and len({op.inputs[0] for op in ups}) == 1
    assert [dim.name for dim in block.tensor(ups[0].inputs[0]).dims][-1] == "lora_rank"


def test_a_joined_projection_may_have_dropout() -> None:
    qkv = ("q_proj", "k_proj", "v_proj")
    plain, dropped = (
        with_adapters(model("llama-tiny"), Adapters(rank=8, targets=qkv, joined=True, dropout=p)) for p in (0.0, 0.1)
    )
    assert plain.num_parameters() == dropped.num_parameters()


def test_a_joined_projection_launches_once() -> None:
    """A, B, its scale and the sum for q, k and v together: 4 launches forward, where each by itself takes 4; backward
    B's and A's two products and one scale: 5, where each by itself takes 5, and two sums of input gradients more."""
    qkv = ("q_proj", "k_proj", "v_proj")
    layers = [
        priced(with_adapters(model("llama-3.1-8b"), Adapters(rank=8, targets=qkv, joined=joined)))
        for joined in (False, True)
    ]
    apart, joined = ((p.forward.kernels, p.input_grad.kernels + p.weight_grad.kernels) for p in layers)
    assert apart[0] - joined[0] == 2 * 4
    assert apart[1] - joined[1] == 2 * 5 + 2


def test_where_the_factor_is() -> None:
    """On 8 numbers a token instead of the output; both ways the gradient passes it once."""
    wide, inner = (
        with_adapters(model("llama-tiny"), Adapters(rank=8, targets=("q_proj",), scaled=scaled))
        for scaled in ("output", "inner")
    )
    for graph, dims in ((wide, ("batch", "seq", "heads", "head_dim")), (inner, ("batch", "seq", "lora_rank"))):
        block = graph.block(LAYER)
        (scale,) = (op for op in block.ops if op.kind == "scale")
        assert tuple(dim.name for dim in block.tensor(scale.outputs[0]).dims) == dims
    assert wide.num_parameters() == inner.num_parameters()
    assert priced(inner).forward.compute_s < priced(wide).forward.compute_s


def test_dropout_after_the_second_product() -> None:
    plain, dropped = (
        with_adapters(model("llama-tiny"), Adapters(rank=8, targets=("q_proj",), dropout=p)) for p in (0.0, 0.1)
    )
    more = priced(dropped).forward.kernels - priced(plain).forward.kernels
    assert more == 1
    kept = {s.tensor.name for s in backward(dropped.block(LAYER), FUSED, BF16).saved}
    assert "self_attn.q_proj.dropped:mask" in kept
    with pytest.raises(GraphError, match="at least 0 and under 1"):
        Adapters(dropout=1.0)


def test_frozen_weights_need_no_transposed_input() -> None:
    """In eight bits, launches of a layer's forward: q, o, gate and down cast what they read, with two each (k, v and up
    find it cast). Frozen, the norm writes what gate reads, and o, with adapters, and down still cast, but one copy; q
    reads what the norm wrote. Adapters of o are four more."""
    trained, frozen = (priced(model(name), fp8=True) for name in ("llama-3.1-8b", "llama-3.1-8b+lora8:o_proj"))
    assert frozen.forward.kernels == trained.forward.kernels - 2 * 2 + 4
    adapted = priced(model("llama-3.1-8b+lora8:q_proj,k_proj,v_proj"), fp8=True)  # 16 bits for these, cast for q
    assert adapted.forward.kernels == trained.forward.kernels - 2 + 3 * 4


def test_what_adapters_read_is_gathered_in_sixteen_bits() -> None:
    """The norm's output for q, k and v, which without adapters travels in eight; and what each `lora_A` writes."""
    narrow = Precision(fp8=Fp8(recipe="delayed"))
    plan = Plan(mesh=Mesh(tp=2), layout=Layout(sequence_parallel=True), schedule=Schedule(micro_batch_size=1))
    gathers_s = []
    for name in ("llama-3.1-8b", "llama-3.1-8b+lora8:q_proj,k_proj,v_proj"):
        job = replace(plan, precision=narrow)
        (stage,) = stages_of(model(name), parse_cluster("1x2xh100-sxm"), job, BATCH, stack("megatron-bridge"))
        layer = next(price for price, layers in stage.layers if layers[0].call.block == LAYER)
        gathers_s.append(layer.forward.comm_s["tp"])

    def gather(size: int) -> float:
        return float(collective_seconds("all_gather", size, stage.links["tp"]))

    wide = 512 * 4096 * 2
    assert gathers_s[1] - gathers_s[0] == pytest.approx(gather(wide) - gather(wide // 2) + 3 * gather(512 * 8 * 2))


@pytest.mark.parametrize(("zero", "ways"), [(0, 1), (1, 4)])
def test_memory_by_hand(zero: Literal[0, 1], ways: int) -> None:
    plan = Plan(mesh=Mesh(dp_shard=4), schedule=Schedule(micro_batch_size=1), optimizer=Optimizer(zero=zero))
    held = gnomon.predict("llama-3.1-8b+lora16", "1x4xh100-sxm", plan, BATCH).memory[0].by_class
    assert held["parameters"] == 2 * (8_030_261_248 + 41_943_040)
    assert held["states"] == 8 * 41_943_040 / ways


def test_fsdp_divides_frozen_weights_too() -> None:
    job = Plan(mesh=Mesh(dp_shard=4), schedule=Schedule(micro_batch_size=1))
    held = [
        gnomon.predict(name, "1x4xh100-sxm", replace(job, optimizer=Optimizer(zero=3)), BATCH).memory[0].by_class
        for name in ("llama-3.1-8b+lora16", "llama-3.1-8b")
    ]
    assert held[0]["parameters"] == pytest.approx(held[1]["parameters"], rel=0.01)
    assert held[0]["states"] == 8 * 41_943_040 / 4


def test_four_bits_take_less_memory_and_more_time() -> None:
    plan = Plan(mesh=Mesh(dp_shard=2), schedule=Schedule(micro_batch_size=1))
    whole, narrow = (
        gnomon.predict(f"llama-3.1-8b+{kind}16", "1x2xh100-sxm", plan, BATCH) for kind in ("lora", "qlora")
    )
    saved = whole.memory[0].by_class["parameters"] - narrow.memory[0].by_class["parameters"]
    linears = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    assert saved == pytest.approx(linears * (2 - (4 + 8 / 64 + 32 / 16384) / 8), rel=1e-6)
    assert narrow.step_s > whole.step_s


def test_eight_bits_of_a_frozen_base() -> None:
    """A byte in place of two for each weight of a layer's linears; made wide before each matmul."""
    plan = Plan(mesh=Mesh(dp_shard=2), schedule=Schedule(micro_batch_size=1))
    whole, narrow = (
        gnomon.predict(f"llama-3.1-8b+{kind}16", "1x2xh100-sxm", plan, BATCH) for kind in ("lora", "q8lora")
    )
    saved = whole.memory[0].by_class["parameters"] - narrow.memory[0].by_class["parameters"]
    assert saved == 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    assert narrow.step_s > whole.step_s
    assert parse_adapters("a+q8dora4") == ("a", Adapters(rank=4, base="int8", magnitudes=True))


def test_tensor_parallel_adapters() -> None:
    """Column-parallel: B is divided, A is not. Row-parallel: A is, and its narrow output is what is summed."""
    block = model("llama-tiny+lora8:q_proj,o_proj").block(LAYER)
    sharded = shard_block(block, Layout(), Mesh(tp=4), {"batch": 1, "seq": 64}, BF16)
    local = {
        name: sharded.local_elements[f"self_attn.{name}.weight"]
        for name in ("q_proj.lora_A", "q_proj.lora_B", "o_proj.lora_A", "o_proj.lora_B")
    }
    assert local == {
        "q_proj.lora_A": 8 * 256,
        "q_proj.lora_B": 8 * 256 // 4,
        "o_proj.lora_A": 8 * 256 // 4,
        "o_proj.lora_B": 8 * 256,
    }
    summed = {c.tensor for c in sharded.forward if c.kind == "all_reduce"}
    assert {"self_attn.o_proj.base", "self_attn.o_proj.lora_A"} <= summed


def test_a_step_is_shorter_than_of_all_weights() -> None:
    plan = Plan(mesh=Mesh(dp_shard=8), schedule=Schedule(micro_batch_size=1), optimizer=Optimizer(zero=3))
    whole, few = (
        gnomon.predict(name, "1x8xh100-sxm", plan, Workload(global_batch_size=32, seq_len=4096))
        for name in ("llama-3.1-8b", "llama-3.1-8b+lora16:q_proj,v_proj")
    )
    assert 0.6 < few.step_s / whole.step_s < 0.85


def test_the_search_knows_frozen_weights() -> None:
    """No plan tried by hand is faster than the best found, whose time is that of predict."""
    name, batch = "llama-3.1-70b+lora16", Workload(global_batch_size=32, seq_len=2048)
    best = gnomon.plan(name, "1x8xh100-sxm", batch).best[0]
    again = gnomon.predict(name, "1x8xh100-sxm", best.plan, batch)
    assert again.fits and again.step_s == pytest.approx(best.step_s)
    tried: tuple[tuple[Mesh, Literal[1, 3]], ...]
    tried = ((Mesh(dp_shard=8), 3), (Mesh(dp_shard=4, tp=2), 3), (Mesh(dp_shard=2, tp=4), 1))
    for mesh, zero in tried:
        plan = Plan(
            mesh=mesh,
            schedule=Schedule(micro_batch_size=1),
            optimizer=Optimizer(zero=zero),
            layout=Layout(sequence_parallel=mesh.tp > 1),
        )
        prediction = gnomon.predict(name, "1x8xh100-sxm", plan, batch)
        assert not prediction.fits or prediction.step_s >= best.step_s - 1e-9


def test_names() -> None:
    assert parse_adapters("llama-3.1-8b") == ("llama-3.1-8b", None)
    made = Adapters(rank=4, targets=("q_proj",), base="nf4")
    assert parse_adapters(f"a/config.json{made}") == ("a/config.json", made)
    made = Adapters(rank=4, targets=("q_proj",), whole=("embed_tokens", "lm_head"))
    assert parse_adapters(f"a{made}") == ("a", made)
    with pytest.raises(GraphError, match="MODEL.lora16"):
        parse_adapters("llama-3.1-8b+lora")


def test_modules_trained_whole() -> None:
    """A tied table is one parameter by either name; one inside layers is trained in every layer."""
    plain = model("llama-3.2-1b+lora8").num_parameters()
    assert {model(f"llama-3.2-1b+lora8+whole:{name}").num_parameters() for name in ("lm_head", "embed_tokens")} == {
        plain + 128256 * 2048
    }
    assert model("llama-3.2-1b+lora8+whole:input_layernorm").num_parameters() == plain + 16 * 2048
    with pytest.raises(PlanError, match=r"trains lm_head whole"):
        read_runnable_model("llama-3.2-1b+lora8+whole:lm_head")


@pytest.mark.parametrize("name", ["llama-tiny+lora8:w_proj", "llama-tiny+lora0", "llama-tiny+lora8+whole:lm_heat"])
def test_refused(name: str) -> None:
    with pytest.raises(GraphError):
        model(name)


def test_dora_trains_a_vector_and_keeps_what_it_scales() -> None:
    """peft keeps of an adapted linear what it wrote and what its adapter did, for the gradient of the vector: two
    tensors as wide as its output (measured of peft 0.21, T x out x 2 bytes each)."""
    plain, scaled = model("llama-3.2-1b+lora8:q_proj,down_proj"), model("llama-3.2-1b+dora8:q_proj,down_proj")
    assert scaled.name == "llama-3.2-1b+dora8:q_proj,down_proj"
    assert scaled.num_parameters() - plain.num_parameters() == 16 * (2048 + 2048)
    kept = []
    for graph in (plain, scaled):
        made = predict(
            graph,
            parse_cluster("1x1xa100-sxm-80gb"),
            Plan(schedule=Schedule(micro_batch_size=1)),
            Workload(global_batch_size=1, seq_len=1024),
        )
        kept.append(made.tightest.by_class["activations"])
    assert kept[1] - kept[0] == pytest.approx(16 * 2 * 2 * 1024 * 2048 * 2, rel=0.02)


def test_dora_by_every_trainer_s_word(tmp_path: Path) -> None:
    factory = "model_name_or_path: Qwen/Qwen2.5-1.5B\nstage: sft\nfinetuning_type: lora\ncutoff_len: 1024\n"
    axolotl = "base_model: Qwen/Qwen2.5-1.5B\nsequence_len: 1024\nmicro_batch_size: 1\nlora_target_linear: true\n"
    tune = "model: {_component_: torchtune.models.qwen2_5.COMPONENT, lora_attn_modules: [q_proj]MORE}\nbatch_size: 1\n"
    for text in (
        f"{factory}use_dora: true\n",
        f"{axolotl}adapter: dora\n",
        f"{axolotl}adapter: lora\npeft_use_dora: true\n",
        tune.replace("COMPONENT", "dora_qwen2_5_1_5b_base").replace("MORE", ""),
        tune.replace("COMPONENT", "lora_qwen2_5_1_5b_base").replace("MORE", ", use_dora: True"),
    ):
        (path := tmp_path / "job.yaml").write_text(text)
        kind = programs.recognised(path)
        assert kind is not None
        job = kind.read(path, ReadContext(devices=1, seq_len=1024))
        assert "+dora" in job.graph().name, text
        assert any("norms of the adapted weights" in str(one) for one in job.unexpressed)
