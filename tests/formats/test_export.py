"""Plans written for other programs: each field written or listed, and read back equal where a program can say it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.errors import InputError, PlanError
from gnomon.formats import programs
from gnomon.formats.export import REASONS, Export, asked_for, exported, reason_for
from gnomon.formats.normalized import normalized
from gnomon.graph import Graph
from gnomon.models.presets import CONFIGS, model
from gnomon.plans import (
    Experts,
    Fp8,
    Layout,
    LayoutRule,
    LowRank,
    Mesh,
    Offload,
    Optimizer,
    Overlap,
    Pass,
    Plan,
    Precision,
    Saved,
    SavedRule,
    Schedule,
    Split,
    Stage,
    Workload,
)
from gnomon.plans.mesh import DENSE_AXES

PROGRAMS = programs.writable_programs()

FSDP = Precision(param="fp32", compute="bf16", grad="fp32", reduce="fp32", master="none", states="fp32")
KEPT = ("self_attn.core*", "self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.down_proj")


@cache
def graph_of(name: str) -> Graph:
    return model(name)


def export(program: str, plan: Plan, name: str = "llama-3.1-8b", work: Workload | None = None) -> Export:
    work = work or Workload(global_batch_size=64, seq_len=8192)
    draft = programs.find(program).write
    assert draft is not None
    asked = asked_for(name, CONFIGS[name]() if name in CONFIGS else None, graph_of(name), plan, work, 8)
    return exported(asked, draft(asked))


def lost(result: Export) -> dict[str, tuple[str, str]]:
    return {one.field: (one.planned, one.becomes) for one in result.unwritten}


def test_there_is_a_writer_for_each_program() -> None:
    assert PROGRAMS == ("accelerate", "deepspeed", "megatron", "nanotron", "torchtitan")


# Every field of a plan: written or listed.


def leaves(cls: type, path: str = "") -> Iterator[str]:
    """Paths of the fields of a dataclass; of an optional part both its own path and those of its fields."""
    for name, hint in get_type_hints(cls).items():
        if name not in {field.name for field in fields(cls)}:
            continue
        inner = f"{path}{name}"
        options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        parts = [one for one in options if is_dataclass(one)]
        if not parts or len(options) > 1:
            yield inner
        for part in parts:
            yield from leaves(part, f"{inner}.")


@dataclass(frozen=True)
class Change:
    """A new value of a field, in a plan where it has an effect."""

    value: Any
    zero: int = 1
    name: str = "llama-3.1-8b"
    fp8: bool = False
    offload: bool = False
    low_rank: bool = False


MOE = "qwen3-30b-a3b"

CHANGES = {
    "mesh.pp": Change(4),
    "mesh.dp_replicate": Change(4),
    "mesh.dp_shard": Change(4),
    "mesh.cp": Change(4),
    "mesh.tp": Change(4),
    "mesh.ep": Change(2, name=MOE),
    "mesh.etp": Change(2, name=MOE),
    "experts.balance": Change("sequence", name=MOE),
    "experts.coefficient": Change(0.01, name=MOE),
    "experts.z_loss": Change(0.001, name=MOE),
    "experts.assignment": Change("sinkhorn", name=MOE),
    "experts.router_dtype": Change("fp64", name=MOE),
    "experts.bias_rate": Change(0.001, name=MOE),
    "experts.drop": Change("probs", name=MOE),
    "experts.threshold": Change(0.5, name=MOE),
    "experts.replicas": Change(8, name=MOE),
    "experts.speculate": Change(True, name=MOE),
    "experts.placement": Change((tuple(range(127, -1, -1)),), name=MOE),
    "experts.rebalance_every": Change(10, name=MOE),
    "mesh.order": Change(("tp", "pp", "dp_replicate", "dp_shard", "cp")),
    "stages": Change((Stage(calls=("*",), mesh=Mesh(dp_shard=4), shares=(1, 1, 1, 2)),)),
    "schedule.name": Change("gpipe"),
    "schedule.micro_batch_size": Change(2),
    "schedule.num_microbatches": Change(4),
    "schedule.virtual_stages": Change(4),
    "schedule.placement": Change("v"),
    "schedule.layers_per_stage": Change((20, 12)),
    "schedule.vocabulary": Change("vocab_1"),
    "schedule.passes": Change((Pass(name="mario"),)),
    "schedule.rounds": Change(2),
    "saved.preset": Change("full"),
    "saved.every": Change(2),
    "saved.rules": Change((SavedRule(tensors=("mlp.*",), action="offload"),)),
    "layout.sequence_parallel": Change(False),
    "layout.context": Change("ulysses"),
    "layout.context_order": Change("contiguous"),
    "layout.dispatch": Change("fused", name=MOE),
    "layout.vocab_parallel": Change(False),
    "layout.loss_parallel": Change(False),
    "layout.keep_gathered": Change(True),
    "layout.rules": Change((LayoutRule(dim="vocab"),)),
    "overlap.grad_reduce": Change(False),
    "overlap.param_gather": Change(False),
    "overlap.prefetch": Change(3, zero=3),
    "overlap.bucket_bytes": Change(2**24),
    "overlap.buckets": Change((16, 18)),
    "overlap.fused": Change((16, 18)),
    "overlap.pipeline_sends": Change(False),
    "overlap.optimizer": Change(True),
    "overlap.experts": Change(True),
    "overlap.priority": Change(("all_to_all",)),
    "overlap.splits": Change((Split(op="mlp.down_proj", dim="seq", parts=2),)),
    "optimizer.kind": Change("lion"),
    "optimizer.zero": Change(2),
    "optimizer.reshard_after_forward": Change(False, zero=3),
    "optimizer.keep_last_block": Change(False, zero=3),
    "optimizer.offload": Change(Offload()),
    "optimizer.offload.fraction": Change(0.5, offload=True),
    "optimizer.offload.tiles": Change(4, offload=True),
    "optimizer.offload.accumulate": Change("device", offload=True),
    "optimizer.offload_parameters": Change(True, zero=3),
    "optimizer.parameter_tier": Change("disk", zero=3),
    "optimizer.delay": Change(1),
    "optimizer.delay_after": Change(10),
    "optimizer.low_rank": Change(LowRank(method="galore")),
    "optimizer.low_rank.method": Change("apollo", low_rank=True),
    "optimizer.low_rank.rank": Change(8, low_rank=True),
    "optimizer.low_rank.every": Change(50, low_rank=True),
    "optimizer.low_rank.projection": Change("random", low_rank=True),
    "optimizer.low_rank.targets": Change(("mlp.*",), low_rank=True),
    "optimizer.paged": Change(True),
    "optimizer.clip": Change(False),
    "precision.param": Change("fp16"),
    "precision.compute": Change("fp16"),
    "precision.grad": Change("bf16"),
    "precision.reduce": Change("bf16"),
    "precision.master": Change("bf16"),
    "precision.states": Change("bf16"),
    "precision.wide_tables": Change(True),
    "precision.fp8": Change(Fp8(recipe="tensorwise")),
    "precision.fp8.recipe": Change("rowwise", fp8=True),
    "precision.fp8.calls": Change(("layers[0:8]",), fp8=True),
    "precision.fp8.except_ops": Change(("mlp.down_proj",), fp8=True),
    "precision.fp8.gather": Change(True, fp8=True),
    "precision.fp8.attention": Change(True, fp8=True),
    "precision.fp8.fixed": Change(True, fp8=True),
    "placement": Change(tuple(reversed(range(32)))),
}
"""Of each field of a plan. A new field fails the next test until it is here, and the one after until it is handled."""

WITHOUT_AXES = {
    "deepspeed": ("pp", "cp", "ep", "etp"),
    "accelerate": ("pp", "ep", "etp"),
    "nanotron": ("ep",),
    "megatron": (),
    "torchtitan": (),
}


def base(program: str, change: Change) -> Plan:
    """A plan in which every axis that the program has is used."""
    axes = {"pp": 2, "dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 2}
    if program == "deepspeed" and change.zero == 3:  # refused: test_models_and_batches_that_no_file_says
        del axes["dp_replicate"]
    mesh = Mesh(**{axis: size for axis, size in axes.items() if axis not in WITHOUT_AXES[program]})
    return Plan(
        mesh=mesh,
        schedule=Schedule(
            name="interleaved_one_f_one_b" if mesh.pp > 1 else "one_f_one_b",
            virtual_stages=2 if mesh.pp > 1 else 1,
            micro_batch_size=1,
        ),
        layout=Layout(sequence_parallel=True),
        overlap=Overlap(),
        optimizer=Optimizer(
            zero=change.zero,  # type: ignore[arg-type]
            offload=Offload() if change.offload else None,
            low_rank=LowRank(method="galore") if change.low_rank else None,
        ),
        precision=Precision(fp8=Fp8(recipe="tensorwise") if change.fp8 else None),
    )


def changed(plan: Plan, field: str, value: Any) -> Plan:
    """The plan with one field changed, and what must change with it for the plan to be one at all."""
    if field == "stages":
        return Plan(stages=value, optimizer=plan.optimizer)
    if field == "schedule.num_microbatches":
        return replace(plan, schedule=replace(plan.schedule, micro_batch_size=None, num_microbatches=value))
    if field == "schedule.name":
        return replace(plan, schedule=replace(plan.schedule, name=value, virtual_stages=1))
    if field == "schedule.layers_per_stage":
        if plan.mesh.pp == 1:
            pytest.skip("there is one stage")
        return replace(plan, schedule=Schedule(micro_batch_size=1, layers_per_stage=value))
    if field == "saved.every":
        return replace(plan, saved=Saved(preset="full", every=value))
    if field == "placement":
        return replace(plan, placement=tuple(reversed(range(plan.world_size))))
    if field in ("experts.balance", "experts.coefficient"):
        plan = replace(plan, experts=Experts(balance="layer", coefficient=0.1))
    if field == "optimizer.zero" or field.startswith("optimizer.offload"):
        plan = replace(plan, optimizer=replace(plan.optimizer, clip=False))
    if field == "optimizer.parameter_tier":
        plan = replace(plan, optimizer=replace(plan.optimizer, offload_parameters=True))
    name, *rest = field.split(".")

    def put(part: Any, path: list[str]) -> Any:
        inner = value if len(path) == 1 else put(getattr(part, path[0]), path[1:])
        return replace(part, **{path[0]: inner})

    return put(plan, [name, *rest])  # type: ignore[no-any-return]


def test_each_field_of_a_plan_has_a_change_to_try_and_a_reason() -> None:
    actual = set(leaves(Plan))
    assert actual == set(CHANGES)
    for field in actual - {"stages"}:
        assert reason_for(field, tuple(REASONS.items()))


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("field", CHANGES)
def test_a_field_is_written_or_listed(program: str, field: str) -> None:
    change = CHANGES[field]
    plan = base(program, change)
    axis = field.removeprefix("mesh.")
    if field == "stages" or (axis in WITHOUT_AXES[program]):
        with pytest.raises((PlanError, InputError)):
            export(program, changed(plan, field, change.value), change.name)
        return
    of_pipelines = ("schedule.virtual_stages", "schedule.placement", "schedule.rounds", "overlap.pipeline_sends")
    if plan.mesh.pp == 1 and field in of_pipelines:
        return  # it has no effect on one stage
    if plan.mesh.cp == 1 and field.startswith("layout.context") or plan.mesh.ep == 1 and field == "layout.dispatch":
        return
    before = export(program, plan, change.name)
    after = export(program, changed(plan, field, change.value), change.name)
    text = body(before), body(after)
    either = lost(before) | lost(after)  # a program that has one way only lists the plan that asks for the other
    listed = any(f"{name}.".startswith(f"{field}.") or f"{field}.".startswith(f"{name}.") for name in either)
    said_in_code = before.elsewhere != after.elsewhere
    assert listed or said_in_code or text[0] != text[1]


def body(result: Export) -> list[str]:
    """The file without its comments."""
    return [line for line in result.text.splitlines() if not line.startswith("#")]


# What each program can say comes back equal.

WORK = Workload(global_batch_size=96, seq_len=2048)


def meshes(draw: st.DrawFn, heads: int, kv_heads: int, *, pp: bool, cp: bool, replicas: bool) -> Mesh:
    powers = st.sampled_from([1, 2, 4])
    tp = draw(st.sampled_from([n for n in (1, 2, 4) if heads % n == 0 and kv_heads % n == 0]))
    return Mesh(
        pp=draw(powers) if pp else 1,
        dp_replicate=draw(st.sampled_from([1, 2])) if replicas else 1,
        dp_shard=draw(st.sampled_from([2, 4, 8])),
        cp=draw(st.sampled_from([1, 2])) if cp else 1,
        tp=tp,
    )


@st.composite
def megatron_plans(draw: st.DrawFn) -> tuple[str, Plan]:
    name = draw(st.sampled_from(["llama-3.1-8b", "mixtral-8x7b", "gpt3-175b", "qwen3-8b", "deepseek-v3", "mistral-7b"]))
    config = CONFIGS[name]()
    experts = getattr(config, "num_experts", 0)
    mesh = meshes(
        draw, config.num_heads, getattr(config, "num_kv_heads", config.num_heads), pp=True, cp=True, replicas=True
    )
    zero = draw(st.sampled_from([0, 1, 1, 2, 3]))
    if experts:
        etp = draw(st.sampled_from([1, mesh.tp]))
        ranks = mesh.dp_shard * mesh.cp * mesh.tp // etp
        mesh = replace(mesh, etp=etp, ep=draw(st.sampled_from([n for n in (1, 2, 4, 8) if ranks % n == 0])))
    if zero == 0 or experts:
        mesh = replace(mesh, dp_replicate=1)
    mesh = replace(mesh, order=draw(st.sampled_from([DENSE_AXES, ("dp_replicate", "dp_shard", "pp", "cp", "tp")])))
    virtual = draw(st.sampled_from([1, 2])) if mesh.pp > 1 else 1
    layers = config.num_layers
    stages = mesh.pp * virtual
    cuts = sorted(draw(st.lists(st.integers(1, layers - 1), min_size=stages - 1, max_size=stages - 1, unique=True)))
    split = tuple(b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True)) if stages > 1 else ()
    if not draw(st.booleans()):
        split = ()
        if layers % stages:
            split = tuple(layers // stages + (stage < layers % stages) for stage in range(stages))
    reduce = draw(st.booleans()) or mesh.data_ranks * mesh.cp == 1
    param = draw(st.sampled_from(["bf16", "fp16", "fp32"]))
    wide = "fp32" if draw(st.booleans()) or param == "fp32" else param
    bucket = draw(st.integers(1, 2**20)) * 4 if reduce and zero < 2 else None
    rules = draw(st.sampled_from([(), ("*experts.act",) if experts else ("mlp.*",)]))
    saved = draw(
        st.sampled_from(
            [
                Saved(),
                Saved(preset="selective", rules=tuple(SavedRule(tensors=(r,), action="recompute") for r in rules)),
                Saved(preset="full", every=draw(st.integers(1, 4))),
                Saved(rules=(SavedRule(preset="full", first_per_stage=draw(st.integers(1, 4))),)),
            ]
        )
    )
    return name, Plan(
        mesh=mesh,
        schedule=Schedule(
            name="interleaved_one_f_one_b" if virtual > 1 else "one_f_one_b",
            micro_batch_size=1,
            virtual_stages=virtual,
            layers_per_stage=split,
        ),
        experts=draw(st.sampled_from(BALANCED[: 4 if name.startswith("deepseek") else 5])) if experts else Experts(),
        saved=saved,
        layout=Layout(
            sequence_parallel=bool(experts) or draw(st.booleans()),
            context=draw(st.sampled_from(["ring", "all_gather", "ulysses"])),
        ),
        overlap=Overlap(
            grad_reduce=reduce,
            param_gather=reduce and draw(st.booleans()),
            bucket_bytes=bucket,
            pipeline_sends=virtual > 1 and draw(st.booleans()),
        ),
        optimizer=Optimizer(zero=zero, clip=draw(st.booleans())),  # type: ignore[arg-type]
        precision=Precision(
            param=param,  # type: ignore[arg-type]
            compute=param,  # type: ignore[arg-type]
            grad=wide,  # type: ignore[arg-type]
            reduce=wide,  # type: ignore[arg-type]
            master="none" if param == "fp32" else "fp32",
        ),
    )


BALANCED = (
    Experts(),
    Experts(balance="layer", coefficient=1e-2, z_loss=1e-3, router_dtype="fp32"),
    Experts(balance="sequence", coefficient=1e-4),
    Experts(balance="global", coefficient=0.02, router_dtype="fp64"),
    Experts(assignment="sinkhorn", z_loss=1e-3),
)


@settings(max_examples=60, deadline=None)
@given(megatron_plans())
def test_what_megatron_can_say_comes_back(case: tuple[str, Plan]) -> None:
    name, plan = case
    work = replace(WORK, global_batch_size=plan.mesh.data_ranks * plan.mesh.pp * 3)
    exported = export("megatron", plan, name, work)
    left = set(lost(exported)) - {"model.vocab_size"}
    zero = normalized(plan, graph_of(name), work).optimizer.zero
    gathers = plan.overlap.param_gather and (not plan.overlap.grad_reduce) and zero > 0
    assert left <= ({"overlap.param_gather"} if gathers else set())


@st.composite
def torchtitan_plans(draw: st.DrawFn) -> tuple[str, Plan]:
    name = draw(st.sampled_from(["llama-3.1-8b", "llama-3.1-70b", "llama-2-7b", "qwen3-30b-a3b"]))
    config = CONFIGS[name]()
    mesh = meshes(
        draw, config.num_heads, getattr(config, "num_kv_heads", config.num_heads), pp=True, cp=True, replicas=True
    )
    if hasattr(config, "num_experts"):
        mesh = replace(mesh, ep=draw(st.sampled_from([1, 2])), etp=1)
    names = [("one_f_one_b", 1), ("gpipe", 1), ("interleaved_one_f_one_b", 2), ("interleaved_one_f_one_b", 3)]
    names += [("looped_bfs", 2), ("interleaved_zero_bubble", 2), ("zero_bubble_v", 2), ("dualpipe_v", 2)]
    schedule, virtual = draw(st.sampled_from(names)) if mesh.pp > 1 else ("one_f_one_b", 1)
    stages, layers = mesh.pp * virtual, config.num_layers
    cuts = sorted(draw(st.lists(st.integers(1, layers - 1), min_size=stages - 1, max_size=stages - 1, unique=True)))
    split = tuple(b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True))
    every = draw(st.integers(2, 4))
    op = (Saved(preset="full", rules=(SavedRule(tensors=KEPT),)),) if name.startswith("llama") else ()
    nth = Saved(
        rules=tuple(SavedRule(calls=f"layers[{i}]", action="recompute") for i in range(every - 1, layers, every))
    )
    reshard = draw(st.booleans())
    return name, Plan(
        mesh=mesh,
        schedule=Schedule(
            name=schedule,  # type: ignore[arg-type]
            micro_batch_size=1,
            virtual_stages=virtual,
            placement="v" if schedule in ("zero_bubble_v", "dualpipe_v") else "loop",
            layers_per_stage=split if draw(st.booleans()) and stages > 1 else (),
        ),
        saved=draw(st.sampled_from([Saved(), Saved(preset="full"), nth, *op])),
        layout=Layout(
            sequence_parallel=True,
            context=draw(st.sampled_from(["ring", "all_gather"])),
            loss_parallel=draw(st.booleans()),
        ),
        overlap=Overlap(),
        optimizer=Optimizer(
            kind=draw(st.sampled_from(["adam", "adamw"])),
            zero=3,
            reshard_after_forward=reshard,
            keep_last_block=not reshard or (mesh.pp == 1 and draw(st.booleans())),
        ),
        precision=draw(
            st.sampled_from(
                [
                    FSDP,
                    replace(FSDP, compute="fp32"),
                    replace(FSDP, param="bf16", grad="bf16", states="bf16"),
                    replace(FSDP, fp8=Fp8(recipe="tensorwise", except_ops=("lm_head",), gather=draw(st.booleans()))),
                    replace(FSDP, fp8=Fp8(recipe="rowwise", except_ops=("lm_head",))),
                ]
            )
        ),
    )


@settings(max_examples=60, deadline=None)
@given(torchtitan_plans())
def test_what_torchtitan_can_say_comes_back(case: tuple[str, Plan]) -> None:
    name, plan = case
    work = replace(WORK, global_batch_size=plan.mesh.data_ranks * plan.mesh.pp * 2)
    assert lost(export("torchtitan", plan, name, work)) == {}


@st.composite
def deepspeed_plans(draw: st.DrawFn) -> tuple[str, Plan]:
    name = draw(st.sampled_from(["llama-3.1-8b", "gpt2", "bert-base", "mixtral-8x7b"]))
    zero = draw(st.sampled_from([0, 1, 2, 3]))
    param = draw(st.sampled_from(["bf16", "fp16", "fp32"]))
    reduce = draw(st.sampled_from(["bf16", "fp16", "fp32"]))
    together = draw(st.booleans())
    offload = Offload(fraction=draw(st.sampled_from([0.25, 1.0])) if zero == 3 else 1.0)
    offloaded = zero > 0 and draw(st.booleans())
    return name, Plan(
        mesh=Mesh(dp_shard=draw(st.sampled_from([2, 4, 8]))),
        schedule=Schedule(micro_batch_size=draw(st.sampled_from([1, 2, 3]))),
        saved=draw(st.sampled_from([Saved(), Saved(preset="full"), Saved(preset="selective")])),
        overlap=Overlap(
            grad_reduce=together or zero == 3,
            param_gather=together and zero == 3,
            prefetch=0 if zero == 3 and not together else Overlap().prefetch,
            bucket_bytes=draw(st.integers(1, 2**28)) * 4 if together and zero in (1, 2) else None,
        ),
        optimizer=Optimizer(
            kind=draw(st.sampled_from(["adam", "adamw", "sgd", "lion", "muon"])),
            zero=zero,  # type: ignore[arg-type]
            offload=offload if offloaded else None,
            offload_parameters=(away := zero == 3 and draw(st.booleans())),
            parameter_tier=draw(st.sampled_from(["host", "disk"])) if away else "host",  # type: ignore[arg-type]
            clip=not offloaded and draw(st.booleans()),
        ),
        precision=Precision(
            param=param,  # type: ignore[arg-type]
            compute=param,  # type: ignore[arg-type]
            grad=draw(st.sampled_from(["fp32", param])),  # type: ignore[arg-type]
            reduce=reduce,  # type: ignore[arg-type]
            master="none" if param == "fp32" else "fp32",
        ),
    )


@settings(max_examples=60, deadline=None)
@given(deepspeed_plans())
def test_what_deepspeed_can_say_comes_back(case: tuple[str, Plan]) -> None:
    name, plan = case
    assert lost(export("deepspeed", plan, name, replace(WORK, seq_len=512))) == {}


@st.composite
def accelerate_plans(draw: st.DrawFn) -> tuple[str, Plan]:
    compute = draw(st.sampled_from(["bf16", "fp16", "fp32"]))
    reduce = compute
    mesh = Mesh(
        dp_replicate=draw(st.sampled_from([1, 2])),
        dp_shard=draw(st.sampled_from([2, 4])),
        cp=draw(st.sampled_from([1, 2])),
        tp=draw(st.sampled_from([1, 2])),
    )
    return draw(st.sampled_from(["llama-3.1-8b", "gemma-2-9b", "gpt2-xl"])), Plan(
        mesh=mesh,
        schedule=Schedule(micro_batch_size=1),
        saved=draw(st.sampled_from([Saved(), Saved(preset="full"), Saved(preset="selective")])),
        layout=Layout(context=draw(st.sampled_from(["ring", "all_gather"]))),
        optimizer=Optimizer(zero=3, reshard_after_forward=draw(st.booleans())),
        precision=replace(FSDP, compute=compute, reduce=reduce),  # type: ignore[arg-type]
    )


@settings(max_examples=40, deadline=None)
@given(accelerate_plans())
def test_what_accelerate_can_say_comes_back(case: tuple[str, Plan]) -> None:
    name, plan = case
    assert lost(export("accelerate", plan, name, Workload(global_batch_size=32, seq_len=1024))) == {}


@st.composite
def nanotron_plans(draw: st.DrawFn) -> tuple[str, Plan]:
    name = draw(st.sampled_from(["llama-3.1-8b", "llama-3.2-1b", "qwen2.5-7b", "mixtral-8x7b"]))
    config = CONFIGS[name]()
    mesh = meshes(
        draw, config.num_heads, getattr(config, "num_kv_heads", config.num_heads), pp=True, cp=True, replicas=False
    )
    half = draw(st.sampled_from(["bf16", "fp16"]))
    precisions = [
        Precision(param=half, compute=half),
        Precision(param=half, compute=half, grad=half, reduce=half, master="none", states=half),
        Precision(param="fp32", compute="fp32", master="none"),
    ]
    experts = name.startswith("mixtral")
    return name, Plan(
        mesh=mesh,
        schedule=Schedule(
            name=draw(st.sampled_from(["one_f_one_b", "gpipe"])) if mesh.pp > 1 else "one_f_one_b", micro_batch_size=1
        ),
        saved=Saved(preset=draw(st.sampled_from(["none", "full"]))),
        layout=Layout(sequence_parallel=experts or draw(st.booleans()), keep_gathered=draw(st.booleans())),
        overlap=Overlap(bucket_bytes=draw(st.integers(1, 100)) * 2**20, pipeline_sends=False),
        optimizer=Optimizer(
            kind=draw(st.sampled_from(["adamw", "sgd"])),
            zero=draw(st.sampled_from([0, 1])),
            clip=draw(st.booleans()),
        ),
        precision=draw(st.sampled_from(precisions)),
    )


@settings(max_examples=60, deadline=None)
@given(nanotron_plans())
def test_what_nanotron_can_say_comes_back(case: tuple[str, Plan]) -> None:
    name, plan = case
    work = replace(WORK, global_batch_size=plan.mesh.data_ranks * 4)
    result = lost(export("nanotron", plan, name, work))
    # Its own rule divides the layers, and says nothing of mixtures; a sum in ring order of 1 on a mesh of one.
    assert set(result) <= {"schedule.layers_per_stage", "model.vocab_size"}


# By hand.


def test_products_that_are_cut_overlap_their_collectives_on_megatron() -> None:
    """What `gnomon plan` calls async_tp; Transformer Engine cuts the products, under sequence parallelism only."""
    plan = Plan(
        mesh=Mesh(dp_shard=4, tp=2),
        schedule=Schedule(micro_batch_size=1),
        layout=Layout(sequence_parallel=True),
        overlap=Overlap(splits=(Split(op="*", dim="seq", parts=2),)),
        optimizer=Optimizer(zero=1),
    )
    assert "\n    --tp-comm-overlap" in export("megatron", plan).text
    for without in (replace(plan, layout=Layout()), replace(plan, overlap=Overlap())):
        assert "\n    --tp-comm-overlap" not in export("megatron", without).text


def test_a_megatron_script_in_full() -> None:
    plan = Plan(
        mesh=Mesh(pp=2, dp_shard=2, tp=2),
        schedule=Schedule(micro_batch_size=2, layers_per_stage=(17, 15)),
        layout=Layout(sequence_parallel=True),
        overlap=Overlap(bucket_bytes=400_000_000, pipeline_sends=False),
        optimizer=Optimizer(zero=1),
        saved=Saved(preset="full", every=2),
    )
    exported = export("megatron", plan)
    assert lost(exported) == {}
    for words in (
        "torchrun --nnodes 1 --nproc-per-node 8 pretrain_gpt.py",
        f"--pipeline-model-parallel-layout 'E{'t' * 17}|{'t' * 15}L'",
        "--tensor-model-parallel-size 2",
        "--ddp-bucket-size 100000000",  # of four bytes
        "--recompute-num-layers 2",
        "--use-distributed-optimizer",
        "--hidden-dropout 0.0",
        "--num-query-groups 8",
    ):
        assert f" {words} " in exported.text.replace("\n", " ") or exported.text.startswith(words), words
    assert exported.additions == ()


def test_stages_that_differ_in_layers_only_are_a_mesh() -> None:
    mesh = Mesh(dp_shard=2, tp=2)
    stages = (
        Stage(calls=("embed", "layers[0:20]"), mesh=mesh),
        Stage(calls=("layers[20:]", "head"), mesh=mesh),
    )
    plan = Plan(stages=stages, schedule=Schedule(micro_batch_size=1), layout=Layout(sequence_parallel=True))
    short = normalized(plan, graph_of("llama-3.1-8b"))
    assert short.mesh == Mesh(pp=2, dp_shard=2, tp=2) and short.schedule.layers_per_stage == (20, 12)
    assert "'E" + "t" * 20 + "|" in export("megatron", plan).text
    unlike = replace(plan, stages=(stages[0], replace(stages[1], mesh=Mesh(dp_shard=4))))
    with pytest.raises(PlanError, match="differ in more than their layers"):
        export("megatron", unlike)


def test_what_is_not_expressed_is_said_in_the_file() -> None:
    exported = export(
        "nanotron", Plan(mesh=Mesh(dp_shard=8), schedule=Schedule(micro_batch_size=1), optimizer=Optimizer(zero=3))
    )
    assert lost(exported)["optimizer.zero"] == ("3", "1")
    assert "#   - optimizer.zero = 3 becomes 1: nanotron has ZeRO 0 and 1" in exported.text.splitlines()


def test_another_recomputation_keeps_no_more() -> None:
    plan = Plan(mesh=Mesh(dp_shard=8), schedule=Schedule(micro_batch_size=1), saved=Saved(preset="selective"))
    for program in ("torchtitan", "nanotron"):
        assert lost(export(program, plan))["saved.preset"] == ("selective", "full")


@pytest.mark.parametrize(
    ("program", "message"), [("megatron", "scaling of rotary embeddings"), ("nanotron", "rope_theta")]
)
def test_what_changes_results_and_no_time_is_said(program: str, message: str) -> None:
    """A Llama 3 trained with the program's own rotary base would be another model."""
    plan = Plan(mesh=Mesh(dp_shard=8), schedule=Schedule(micro_batch_size=1))
    assert any(message in line for line in export(program, plan).elsewhere)


def test_a_llama_that_torchtitan_has_not_is_to_be_registered() -> None:
    plan = Plan(
        mesh=Mesh(dp_shard=8), schedule=Schedule(micro_batch_size=1), optimizer=Optimizer(zero=3), precision=FSDP
    )
    exported = export("torchtitan", plan, "llama-2-7b")
    assert (
        lost(exported) == {} and "dim=4096, n_layers=32" in exported.elsewhere[0] and "11008" in exported.elsewhere[0]
    )
    with pytest.raises(InputError, match="no model like gpt2"):
        export("torchtitan", plan, "gpt2")


def test_models_and_batches_that_no_file_says() -> None:
    plan = Plan(mesh=Mesh(dp_shard=2), schedule=Schedule(micro_batch_size=1))
    with pytest.raises(InputError, match="no decoder that can be described"):
        export("megatron", plan, "t5-small")
    with pytest.raises(InputError, match="a job file takes one length"):
        export("deepspeed", plan, work=Workload(lengths=(3, 4)))
    with pytest.raises(PlanError, match="no place for pp = 2"):
        export("deepspeed", replace(plan, mesh=Mesh(pp=2)))
    groups = replace(plan, mesh=Mesh(dp_replicate=2, dp_shard=2), optimizer=Optimizer(zero=3))
    with pytest.raises(PlanError, match=r"gone from current releases.*dp_replicate = 1, or export it to torchtitan"):
        export("deepspeed", groups)


def test_what_a_model_has_and_a_program_has_not_is_listed() -> None:
    plan = Plan(mesh=Mesh(dp_shard=2), schedule=Schedule(micro_batch_size=1))
    result = lost(export("megatron", plan, "pythia-1.4b", WORK))
    assert result["model.parallel_residual"] == ("true", "false")
