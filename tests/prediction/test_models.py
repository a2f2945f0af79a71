"""Every preset predicts on one device and on small meshes, or is refused with a reason; and what plans can ask for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
from prediction.jobs import FP16

from gnomon.errors import GnomonError, PlanError, UnpricedError
from gnomon.models.presets import PRESETS, model
from gnomon.plans import (
    Fp8,
    Layout,
    Mesh,
    Offload,
    Optimizer,
    Overlap,
    Plan,
    Precision,
    RouterLoad,
    Saved,
    SavedRule,
    Schedule,
    Split,
    Stage,
    Workload,
)
from gnomon.plans.check import sample_tokens
from gnomon.prediction import Prediction, host_memory, predict
from gnomon.prediction.layer_types import LayerPrice
from gnomon.software import Fact, Stack

MESHES: dict[str, dict[str, Any]] = {
    "1": {},
    "dp2-tp2": {"mesh": Mesh(dp_shard=2, tp=2), "layout": Layout(sequence_parallel=True)},
    "pp2-dp2": {"mesh": Mesh(pp=2, dp_shard=2)},
    "fsdp4": {"mesh": Mesh(dp_shard=4), "optimizer": Optimizer(zero=3)},
}
REFUSED = {
    ("gpt2-xl", "dp2-tp2"): "tp = 2 does not divide heads = 25",
    ("ddpm-cifar10", "dp2-tp2"): "tp = 2 does not divide heads = 1",
    ("unet-tiny", "dp2-tp2"): "tp = 2 does not divide heads = 1",
    ("vit-b-16", "dp2-tp2"): "seq_len = 197 does not divide into tp = 2",
    ("vit-l-16", "dp2-tp2"): "seq_len = 197 does not divide into tp = 2",
    ("mamba2-2.7b", "dp2-tp2"): "tp = 2 does not divide ssm_groups = 1",
}
LLAMA = "llama-3.1-8b"
EVEN = RouterLoad()
TOKENS = Workload(global_batch_size=32, seq_len=2048)


def workload_for(name: str) -> Workload:
    """8 sequences of 256 (images where there are no sequences), 128 on the other side of an encoder-decoder."""
    dims = {dim.name for block in model(name).blocks for dim in block.dims if dim.size is None}
    others = sorted(dim for dim in dims if dim not in ("batch", "seq") and not dim.startswith("kv_"))
    seq_len = sample_tokens(model(name)) or 256
    return Workload(global_batch_size=8, seq_len=seq_len, sizes=tuple((dim, 128) for dim in others))


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", PRESETS)
def test_presets(name: str, mesh: str) -> None:
    job = Plan(schedule=Schedule(num_microbatches=2), **MESHES[mesh])
    cluster = f"1x{job.world_size}xh100-sxm"
    if (name, mesh) in REFUSED:
        with pytest.raises(GnomonError, match=REFUSED[name, mesh]):
            predict(name, cluster, job, workload_for(name))
        return
    prediction = predict(name, cluster, job, workload_for(name))
    assert 0 < prediction.step_s < 60
    assert 0 < prediction.mfu < 0.8
    assert len(prediction.memory) == job.mesh.pp
    assert sum(prediction.breakdown.values()) == prediction.step_s


def llama(cluster: str = "1x8xh100-sxm", workload: Workload = TOKENS, **fields: Any) -> Prediction:
    """Llama 3.1 8B in microbatches of one sequence."""
    return predict(LLAMA, cluster, Plan(schedule=Schedule(micro_batch_size=1), **fields), workload)


def test_skewed_routing_is_slower_and_expert_parallelism_divides_experts() -> None:
    def mixtral(ep: int, router: RouterLoad = EVEN) -> Prediction:
        job = Plan(
            mesh=Mesh(pp=2, dp_shard=16, ep=ep), schedule=Schedule(micro_batch_size=1), optimizer=Optimizer(zero=1)
        )
        return predict("mixtral-8x7b", "4x8xh100-sxm", job, replace(TOKENS, router=router))

    even, skewed = mixtral(8), mixtral(8, RouterLoad(kind="zipf", s=0.5))
    assert skewed.step_s > even.step_s
    assert skewed.breakdown["ep communication"] > even.breakdown["ep communication"]
    assert skewed.tightest.by_class["activations"] > even.tightest.by_class["activations"]
    # a capacity of the mean drops what is more, so that the busiest rank is as all are
    level = mixtral(8, RouterLoad(kind="zipf", s=0.5, capacity=1.0))
    assert (level.step_s, level.tightest.by_class) == (even.step_s, even.tightest.by_class)
    padded = mixtral(8, RouterLoad(capacity=1.25, padded=True))
    assert even.step_s < padded.step_s and any("drops 0.0%" in note for note in padded.notes)
    # experts of half of 32 layers, over 8 ranks: 3 matrices of 4096 x 14336 each
    assert mixtral(8).stages[0].elements[1] == 16 * 3 * 4096 * 14336
    assert mixtral(1).stages[0].elements[1] == 8 * 16 * 3 * 4096 * 14336


@pytest.mark.parametrize("context", ["ring", "all_gather", "ulysses"])
def test_context_parallelism(context: Literal["ring", "all_gather", "ulysses"]) -> None:
    """Long sequences over 4 ranks: attention dominates, a ring hides under it, and a zig-zag order evens it out."""
    long = Workload(global_batch_size=4, seq_len=32768)
    job: dict[str, Any] = {"mesh": Mesh(dp_shard=2, cp=4), "optimizer": Optimizer(zero=3)}
    result = llama(workload=long, layout=Layout(context=context), **job)
    exposed = result.breakdown.get("cp communication", 0.0)
    assert exposed < 0.05 * result.step_s
    if context == "ring":
        uneven = llama(workload=long, layout=Layout(context_order="contiguous"), **job)
        assert uneven.step_s > result.step_s


def test_a_ring_merges_what_its_steps_put_out() -> None:
    """Passes over outputs, keys and gradients, which are no attention."""
    long = Workload(global_batch_size=2, seq_len=32768)

    def layer(context: Literal["ring", "all_gather"]) -> LayerPrice:
        return llama(workload=long, mesh=Mesh(dp_shard=2, cp=4), layout=Layout(context=context)).stages[0].order[1]

    ring, gathered = layer("ring"), layer("all_gather")
    assert ring.forward.attention_s == pytest.approx(gathered.forward.attention_s)
    passes = ring.forward.compute_s - gathered.forward.compute_s
    assert 0 < passes < 0.2 * ring.forward.attention_s
    back = sum(
        getattr(ring, name).compute_s - getattr(gathered, name).compute_s for name in ("input_grad", "weight_grad")
    )
    assert back > passes


def test_weights_gathered_in_eight_bits_are_cast_by_parts() -> None:
    def stage(**fields: Any) -> Prediction:
        narrow = Precision(fp8=Fp8(recipe="delayed", **fields))
        return llama(mesh=Mesh(dp_shard=8), optimizer=Optimizer(zero=3), precision=narrow)

    whole, parts = (stage(gather=gather).pricing.compute.parts("F", 1)["compute"] for gather in (False, True))
    cast = stage().stages[0].order[1].weight_cast
    rate = stage().pricing.rates[0].compute
    copied = stage().stages[0].collectives(stage().stages[0].order[1])[0].bytes / 2
    assert whole - parts > 7 / 8 * float(cast.device_s) / rate > 0
    assert whole - parts < (7 / 8 * float(cast.device_s) + 3 * copied / 3.35e12) / rate


def test_a_compiler_fuses_casts() -> None:
    def step(launch: Literal["eager", "compiled"], precision: Precision) -> float:
        fact = Fact(field="launch_mode", source="made up", date="2026-11-23")
        stack = Stack(name="x", version="1").with_values((fact,), launch_mode=launch)
        schedule = Schedule(micro_batch_size=1)
        plan = Plan(mesh=Mesh(dp_shard=8), schedule=schedule, optimizer=Optimizer(zero=1), precision=precision)
        made = predict(LLAMA, "1x8xh100-sxm", plan, Workload(global_batch_size=8, seq_len=2048), stack)
        layer = made.stages[0].order[1]
        return layer.forward.compute_s + layer.input_grad.compute_s

    narrow = Precision(fp8=Fp8(recipe="delayed"))
    assert step("compiled", Precision()) == step("eager", Precision())
    assert step("compiled", narrow) < step("eager", narrow)


def test_fp8_is_faster_where_it_is_asked_for() -> None:
    job: dict[str, Any] = {"mesh": Mesh(dp_shard=8), "optimizer": Optimizer(zero=1)}

    def step(**fields: Any) -> float:
        return llama(precision=Precision(fp8=Fp8(recipe="tensorwise", **fields)), **job).step_s

    wide = llama(**job).step_s
    assert step() < step(except_ops=("mlp.*",)) < wide
    assert step() < step(calls=("layers[0:16]",)) < wide
    assert step(calls=("head",)) == wide  # logits stay in the compute dtype
    with pytest.raises(UnpricedError, match="fp8"):
        llama("1x8xa100-sxm-80gb", precision=Precision(fp8=Fp8(recipe="tensorwise")), **job)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_optimizer_on_the_host(zero: Literal[0, 1, 2, 3]) -> None:
    mesh = Mesh(dp_shard=8)
    here = llama(mesh=mesh, optimizer=Optimizer(zero=zero, clip=False))
    away = llama(mesh=mesh, optimizer=Optimizer(zero=zero, clip=False, offload=Offload()))
    assert away.breakdown["offload"] > 0
    assert away.step_s > here.step_s
    assert away.tightest.peak_bytes < here.tightest.peak_bytes


@pytest.mark.parametrize("ranks", [1, 8])
def test_parameters_on_the_host(ranks: int) -> None:
    """They leave the device but for what is gathered, and each gather waits for its copy: with one rank, which gathers
    nothing, for that of whole blocks."""
    mesh, cluster = Mesh(dp_shard=ranks), f"1x{ranks}xa100-sxm-80gb"
    schedule = Schedule(micro_batch_size=1)

    def step(**optimizer: Any) -> Prediction:
        plan = Plan(mesh=mesh, schedule=schedule, optimizer=Optimizer(zero=3, clip=False, **optimizer))
        return predict(LLAMA, cluster, plan, Workload(global_batch_size=16, seq_len=2048))

    here, there = step(), step(offload_parameters=True)
    elements = sum(here.pricing.stages[0].elements)
    assert there.stages[0].static_bytes()["parameters"] == 0
    assert here.stages[0].static_bytes()["parameters"] == 2 * elements / ranks
    gathered = max(size for name, size in there.sizes.items() if name.endswith("P"))
    assert gathered == 2 * (128_256 + 1) * 4096  # the head and the norm before it, in bf16
    assert there.tightest.peak_bytes < here.tightest.peak_bytes
    assert there.step_s > here.step_s and there.breakdown["offload"] > 0
    assert host_memory(there).bytes == 2 * elements  # of a node, whole
    assert any("parameters on the host" in assumption for assumption in there.assumptions)
    # every microbatch's two passes copy all parameters over the link of the device, at most 32 GB/s
    least = 16 // ranks * 2 * 2 * elements / ranks / 32e9
    assert there.step_s > least
    both = step(offload_parameters=True, offload=Offload())
    assert both.tightest.peak_bytes < step(offload=Offload()).tightest.peak_bytes
    with pytest.raises(PlanError, match="use zero = 3"):
        llama(mesh=mesh, optimizer=Optimizer(zero=2, offload_parameters=True))


def test_a_delayed_update_hides_under_the_step() -> None:
    mesh = Mesh(dp_shard=8)
    now = llama(mesh=mesh, optimizer=Optimizer(zero=1, clip=False, offload=Offload()))
    later = llama(mesh=mesh, optimizer=Optimizer(zero=1, clip=False, offload=Offload(), delay=1))
    assert later.step_s < now.step_s


def test_mixed_devices_wait_for_the_slowest_and_each_has_its_memory() -> None:
    spec, job = "2x8xa100-sxm-80gb+1x8xv100-sxm-32gb", {"mesh": Mesh(dp_shard=24), "precision": FP16}
    work = Workload(global_batch_size=48, seq_len=2048)

    def step(cluster: str, **fields: Any) -> Prediction:
        return predict("llama-3.2-1b", cluster, Plan(schedule=Schedule(micro_batch_size=1), **fields), work)

    mixed, fast = step(spec, **job), step("3x8xa100-sxm-80gb", **job)
    assert mixed.step_s > 1.5 * fast.step_s
    by_device = {rank.device: rank for rank in mixed.memory}
    assert set(by_device) == {"a100-sxm-80gb", "v100-sxm-32gb"}
    assert len(by_device["a100-sxm-80gb"].ranks) == 16 and len(by_device["v100-sxm-32gb"].ranks) == 8
    assert mixed.tightest.device == "v100-sxm-32gb"
    with pytest.raises(UnpricedError, match="v100-sxm-32gb has no peak for 'bf16'"):
        step(spec, mesh=Mesh(dp_shard=24))


def test_shares_suit_the_devices() -> None:
    """Two workers share 6 sequences: a V100 with 2 and an A100 with 4 beat 3 each."""
    work = Workload(global_batch_size=24, seq_len=2048)
    calls = ("embed", "layers[0:16]", "head")

    def step(shares: tuple[int, ...]) -> Prediction:
        stage = Stage(calls=calls, mesh=Mesh(dp_shard=2), shares=shares)
        job = Plan(stages=(stage,), precision=FP16)
        return predict("llama-3.2-1b", "1x1xa100-sxm-80gb+1x1xv100-sxm-32gb", job, work)

    suited, equal, wrong = step((4, 2)), step((3, 3)), step((2, 4))
    assert suited.step_s < equal.step_s < wrong.step_s
    kept = {rank.device: rank.by_class["activations"] for rank in suited.memory}
    assert kept["a100-sxm-80gb"] == pytest.approx(2 * kept["v100-sxm-32gb"], rel=0.01)


@pytest.mark.parametrize(
    ("name", "virtual", "placement"),
    [
        ("gpipe", 1, "loop"),
        ("one_f_one_b", 1, "loop"),
        ("interleaved_one_f_one_b", 2, "loop"),
        ("looped_bfs", 2, "loop"),
        ("zero_bubble_h1", 1, "loop"),
        ("zero_bubble_h2", 1, "loop"),
        ("interleaved_zero_bubble", 2, "loop"),
        ("zero_bubble_v", 2, "v"),
        ("v_half", 2, "v"),
        ("v_min", 2, "v"),
        ("dualpipe_v", 2, "v"),
    ],
)
def test_every_schedule_has_prices(name: Any, virtual: int, placement: Any) -> None:
    schedule = Schedule(name=name, virtual_stages=virtual, placement=placement, micro_batch_size=1)
    job = Plan(mesh=Mesh(pp=4, tp=2), schedule=schedule, layout=Layout(sequence_parallel=True))
    prediction = predict(LLAMA, "1x8xh100-sxm", job, TOKENS)
    assert sum(prediction.breakdown.values()) == prediction.step_s
    assert 0.2 < prediction.mfu < 0.7


def test_asynchronous_tensor_parallelism_hides_communication() -> None:
    job: dict[str, Any] = {"mesh": Mesh(tp=8), "layout": Layout(sequence_parallel=True)}
    split = Overlap(splits=(Split(op="*down_proj", dim="seq", parts=4),))
    whole, cut = llama(**job), llama(overlap=split, **job)
    assert cut.breakdown["tp communication"] < whole.breakdown["tp communication"]


def test_what_no_run_has_shown_is_said() -> None:
    """Cut products and activations on the host are priced, not measured."""
    job: dict[str, Any] = {"mesh": Mesh(tp=8), "layout": Layout(sequence_parallel=True)}
    cut = llama(overlap=Overlap(splits=(Split(op="*down_proj", dim="seq", parts=4),)), **job)
    away = llama(saved=Saved(rules=(SavedRule(tensors=("*act",), action="offload"),)), **job)
    told = [[line.split(":")[0] for line in entry.assumptions] for entry in (llama(**job), cut, away)]
    message = ("cut products (async_tp) hide all parts of a collective but one", "activations on the host")
    assert [[text in lines for text in message] for lines in told] == [[False, False], [True, False], [False, True]]


def test_errors_name_what_is_missing() -> None:
    with pytest.raises(PlanError, match="plan needs 2 devices"):
        llama("1x8xh100-sxm", mesh=Mesh(tp=2))
    with pytest.raises(UnpricedError, match="2 lengths from 128 to 256 tokens, and under ZeRO 3"):
        llama("1x2xh100-sxm", Workload(lengths=(128, 256)), mesh=Mesh(dp_shard=2), optimizer=Optimizer(zero=3))
    with pytest.raises(PlanError, match="easyscale cannot be used in this plan: its ranks do not all hold"):
        llama("1x1xh100-sxm", mesh=Mesh(tp=2), placement=(0, 0))


def test_images_are_counted_where_there_are_no_sequences() -> None:
    job = Plan(schedule=Schedule(micro_batch_size=4))
    prediction = predict("vit-b-16", "1x1xh100-sxm", job, Workload(global_batch_size=8, seq_len=197))
    assert prediction.counted == "samples" and prediction.tokens_per_s_per_device * prediction.step_s == pytest.approx(
        8
    )
    # 14 x 14 patches and a class token: 17.6 billion multiply-adds an image (Touvron et al. 2021), 6 FLOPs each
    assert prediction.model_flops == pytest.approx(8 * 6 * 17.6e9, rel=0.01)
    with pytest.raises(
        PlanError, match="sequences of 1 tokens, but vit-b-16 has 197 tokens a sample; use seq_len = 197"
    ):
        predict("vit-b-16", "1x1xh100-sxm", job, replace(prediction.workload, seq_len=1))


def test_transformer_engine_gathers_in_eight_bits_and_casts_once() -> None:
    """Llama 8B on tp 8: of a layer's collectives, gathers move half the bytes, scatters all."""
    mesh, layout = Mesh(tp=8), Layout(sequence_parallel=True)
    job: dict[str, Any] = {"mesh": mesh, "layout": layout, "precision": Precision(fp8=Fp8(recipe="delayed"))}

    def layer(engine: bool) -> LayerPrice:
        fact = Fact(field="transformer_engine", source="this test", date="2026-11-22")
        stack = Stack(name="unstated", version="").with_values((fact,), transformer_engine=engine)
        made = Plan(**job, schedule=Schedule(micro_batch_size=1))
        stage = predict(LLAMA, "1x8xh100-sxm", made, TOKENS, stack).pricing.stages[0]
        return next(price for price, labels in stage.layers if len(labels) > 1)

    plain, engine = layer(False), layer(True)
    assert plain.forward.kernels == engine.forward.kernels
    assert 0.7 < engine.forward.comm_s["tp"] / plain.forward.comm_s["tp"] < 0.85
    assert engine.forward.compute_s < plain.forward.compute_s
    assert engine.input_grad.compute_s < plain.input_grad.compute_s  # gradients are cast before they are gathered
    assert engine.weight_grad.compute_s == plain.weight_grad.compute_s
