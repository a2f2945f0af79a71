"""torchtitan: its own files' settings give the plans they ask for; refusals are those of its code.

`fixtures/torchtitan` holds the settings of the 405B file of v0.2.2. Splits of layers are worked out by hand.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.errors import CatalogueError, FormatError, GnomonError, InputError
from gnomon.formats.given import ReadContext
from gnomon.formats.job import Job
from gnomon.formats.torchtitan.models import FLAVORS
from gnomon.formats.torchtitan.read import read_torchtitan, stage_split
from gnomon.plans import Saved, check, problems
from gnomon.prediction import predict

FILE = Path(__file__).parent / "fixtures/torchtitan/llama3_405b.toml"


def job(devices: int | None = 8, flavor: str = "8B", **sections: dict[str, Any]) -> Job:
    """A TOML file of these sections for a Llama 3."""
    lines = ["[model]", 'name = "llama3"', f'flavor = "{flavor}"']
    for section, values in sections.items():
        lines += [f"[{section}]"] if section != "model" else []
        for key, value in values.items():
            text = str(value).lower() if isinstance(value, bool) else repr(value).replace("'", '"')
            lines.append(f"{key} = {text}")
    return read_torchtitan("\n".join(lines), devices=devices, context=ReadContext(strict=True))


def test_the_405b_file() -> None:
    result = read_torchtitan(FILE, devices=128)
    assert result.graph().num_parameters() == 405_853_388_800
    plan = result.plan
    assert (plan.mesh.dp_shard, plan.mesh.tp) == (16, 8) and result.workload.global_batch_size == 32
    assert plan.optimizer.zero == 3 and plan.optimizer.reshard_after_forward and plan.saved == Saved(preset="full")
    assert (
        plan.precision.fp8 is not None and plan.precision.fp8.gather and plan.precision.fp8.except_ops == ("lm_head",)
    )
    assert (plan.precision.param, plan.precision.compute, plan.precision.master) == ("fp32", "bf16", "none")
    assert plan.layout.sequence_parallel and plan.layout.loss_parallel
    assert (result.stack.launch.launch_mode, result.stack.layers.norm, result.stack.loss.cross_entropy) == (
        "compiled",
        "fused",
        "fused",
    )
    assert result.stack.layers.recompute_stops is True  # the checkpoint is inside what is compiled
    assert not result.unexpressed and [split.parts for split in plan.overlap.splits] == [8]
    check(plan, result.graph(), None, result.workload)


def test_the_newer_flags_mean_the_same() -> None:
    new = read_torchtitan("--module llama3 --config llama3_405b", devices=128)
    old = read_torchtitan(FILE, devices=128)
    assert not new.plan.overlap.splits  # which the file asks for, and the newer configuration does not
    assert new.model == old.model and new.workload == old.workload
    assert new.plan == replace(old.plan, overlap=new.plan.overlap)
    words = "--module=llama3 --config=llama3_8b --parallelism.pipeline-parallel-degree 2 --compile.enable=false"
    changed = read_torchtitan([*words.split(), "--parallelism.num_pp_microbatches=4"], devices=8)
    assert changed.workload.global_batch_size == 1 * 4 * 4  # one sequence, four microbatches, four data ranks
    assert changed.plan.schedule.layers_per_stage == (16, 16)


def test_accumulated_gradients_are_rounds_of_the_pipeline() -> None:
    """32 sequences on two data-parallel ranks, four of them a local batch: four passes of four microbatches each."""
    pipeline = {"pipeline_parallel_degree": 4, "pipeline_parallel_microbatch_size": 1}
    training = {"local_batch_size": 4, "global_batch_size": 32}
    result = job(parallelism=pipeline, training=training)
    assert (result.plan.schedule.rounds, result.plan.mesh.data_ranks) == (4, 2) and not result.notes
    check(result.plan, result.graph(), None, result.workload)
    assert job(training=training).plan.schedule.rounds == 1
    words = "--module llama3 --config llama3_8b --parallelism.pipeline-parallel-degree 2"
    words += " --parallelism.num_pp_microbatches 4"
    tokens = 8192 * 4 * 4
    newer = read_torchtitan([*words.split(), f"--training.num_tokens_per_train_step={3 * tokens}"], devices=8)
    assert newer.plan.schedule.rounds == 3 and newer.workload.global_batch_size == 3 * 4 * 4


@pytest.mark.parametrize(
    ("layers", "stages", "split"),
    [
        (32, 2, (16, 16)),
        (32, 4, (8, 9, 8, 7)),
        (6, 4, (1, 2, 2, 1)),
        (126, 16, (7,) + (8,) * 14 + (7,)),
    ],
)
def test_stage_split(layers: int, stages: int, split: tuple[int, ...]) -> None:
    """Embedding and head count as a layer each: 34 = 9 + 9 + 8 + 8, less one at either end."""
    assert stage_split(layers, stages, 1, 1) == split
    assert sum(split) == layers


@pytest.mark.parametrize(
    ("name", "ours", "virtual", "placement"),
    [
        ("1F1B", "one_f_one_b", 1, "loop"),
        ("Interleaved1F1B", "interleaved_one_f_one_b", 2, "loop"),
        ("ZBVZeroBubble", "zero_bubble_v", 2, "v"),
        ("DualPipeV", "dualpipe_v", 2, "v"),
    ],
)
def test_schedules(name: str, ours: str, virtual: int, placement: str) -> None:
    result = job(
        parallelism={"pipeline_parallel_degree": 4, "pipeline_parallel_schedule": name},
        training={"local_batch_size": 8},
    )
    schedule = result.plan.schedule
    assert (schedule.name, schedule.virtual_stages, schedule.placement) == (ours, virtual, placement)
    assert schedule.micro_batch_size == 1 and not result.plan.optimizer.reshard_after_forward
    listed = problems(result.plan, result.graph(), None, result.workload)
    errors = [entry.name for entry in listed if entry.severity == "error"]
    assert errors == (["composite"] if name == "DualPipeV" else [])  # under FSDP its F&B have no rows by layer


def test_activation_checkpointing() -> None:
    second = job(flavor="debugmodel", activation_checkpoint={"mode": "selective", "selective_ac_option": "2"})
    assert [rule.calls for rule in second.plan.saved.rules] == ["layers[1]", "layers[3]", "layers[5]"]
    ops = job(activation_checkpoint={"mode": "selective", "selective_ac_option": "op"})
    assert ops.plan.saved.preset == "full" and "self_attn.q_proj" in ops.plan.saved.rules[0].tensors
    check(ops.plan, ops.graph())
    assert ops.plan.saved.rules[0].tensors[1:] == (
        "self_attn.q_proj",
        "self_attn.v_proj",
        "mlp.gate_proj",
        "mlp.down_proj",
    )
    budget = job(activation_checkpoint={"mode": "memory_budget"})
    assert [u.field for u in budget.unexpressed] == ["activation_checkpoint.mode"]
    assert job(activation_checkpoint={"mode": "none"}).plan.saved == Saved()


def test_experts_keep_what_their_ranks_exchanged() -> None:
    """Products of DeepSeek-V3's 16B: q, kv_a, kv_b, o, router, shared gate, up, down; the odd ones stay."""
    actual = {}
    for degree in (1, 8):
        made = read_torchtitan(
            f"""
            [model]
            name = "deepseek_v3"
            flavor = "16B"
            [parallelism]
            expert_parallel_degree = {degree}
            [activation_checkpoint]
            mode = "selective"
            selective_ac_option = "op"
            """,
            devices=8,
        )
        actual[degree] = set(made.plan.saved.rules[0].tensors)
        check(made.plan, made.graph())
    assert {"self_attn.q_proj", "self_attn.kv_b_proj", "mlp.gate", "mlp.shared_experts.up_proj"} <= actual[1]
    assert not any("gate_proj" in name for name in actual[1] - {"mlp.gate_proj"})
    assert actual[8] - actual[1] == {"mlp.dispatch", "mlp.experts.down_proj"}


def test_older_names() -> None:
    old = job(training={"batch_size": 4, "tensor_parallel_degree": 2, "compile": True})
    assert old.workload.global_batch_size == 16 and old.plan.mesh.tp == 2 and old.stack.launch.launch_mode == "compiled"


def test_degrees_give_the_devices() -> None:
    assert job(None, parallelism={"data_parallel_shard_degree": 4, "tensor_parallel_degree": 2}).devices == 8
    hybrid = job(8, parallelism={"data_parallel_replicate_degree": 2}).plan.mesh
    assert (hybrid.dp_replicate, hybrid.dp_shard) == (2, 4)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"parallelism": {"tensor_parallel_degree": 3}}, "nearest number of devices is 9"),
        ({"parallelism": {"data_parallel_shard_degree": 4}}, "multiply to 4 .* there are 8 devices"),
        ({"training": {"global_batch_size": 9, "local_batch_size": 1}}, "nearest legal global_batch_size is 8"),
        (
            {"parallelism": {"pipeline_parallel_degree": 2, "pipeline_parallel_microbatch_size": 3}},
            "local_batch_size = 8 is not divisible .* is 2",
        ),
        ({"parallelism": {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "1B1F"}}, "is not one of 1f1b"),
        ({"parallelism": {"context_parallel_degree": 2}, "training": {"seq_len": 2050}}, "seq_len = 2050"),
        (
            {"parallelism": {"data_parallel_replicate_degree": 4, "tensor_parallel_degree": 2}},
            "no other axis is above 1",
        ),
        ({"parallelism": {"tensor_paralel_degree": 2}}, "did you mean 'parallelism.tensor_parallel_degree'"),
        ({"activation_checkpoint": {"mode": "sometimes"}}, "understood are none, full"),
        ({"training": {"local_batch_size": "8"}}, "expected an integer"),
        (
            {"parallelism": {"pipeline_parallel_degree": 8, "pipeline_parallel_first_stage_less_layers": 9}},
            "do not fill",
        ),
    ],
)
def test_what_the_program_refuses_is_refused_with_the_fix(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        job(**sections)


def test_other_mistakes() -> None:
    with pytest.raises(InputError, match="give --on CLUSTER"):
        job(None)
    with pytest.raises(CatalogueError, match="did you mean 'llama3 8B'"):
        job(flavor="8b")
    for nothing in ("", "# only a comment\n", []):
        with pytest.raises(InputError, match="is empty; a torchtitan job sets at least"):
            read_torchtitan(nothing, devices=8)
    with pytest.raises(FormatError):
        read_torchtitan("[model\n", devices=8)
    with pytest.raises(InputError, match="known: llama3_8b"):
        read_torchtitan("--module llama3 --config llama3_9b", devices=8)


def test_flavors_are_the_published_models() -> None:
    """DeepSeek-V2 (236B) and V2-Lite (16B): the counts of their public weights, 235,741,434,880 and 15,706,484,224."""
    counts = {"llama3 8B": 8_030_261_248, "deepseek_v3 16B": 15_706_484_224, "deepseek_v3 236B": 235_741_434_880}
    for name, count in counts.items():
        family, size = name.split()
        result = read_torchtitan(f'[model]\nname = "{family}"\nflavor = "{size}"', devices=8)
        biases = {"deepseek_v3 16B": 64 * 26, "deepseek_v3 236B": 160 * 59}.get(name, 0)  # V3's router has a bias
        assert result.model == FLAVORS[name]
        assert result.graph().num_parameters() - count in (0, biases)


@given(st.text(max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        result = read_torchtitan(text, devices=8)
    except GnomonError as error:
        assert str(error)
    else:
        assert result.plan.world_size == result.devices == 8 and result.stack.name == "torchtitan"


def test_async_tensor_parallelism_is_read_and_hides_some_of_what_ranks_exchange() -> None:
    """And each recipe of eight bits by itself: with scales by row products are slower, casts are two, and nothing is
    gathered in eight bits (pytorch/torchtitan#1299: 70B on 256 H100, bf16 597.3 tokens/s/GPU, with async TP 652.4;
    tensorwise 809.8, rowwise 599.6)."""
    base = (
        '[model]\nname = "llama3"\nflavor = "70B"\nconverters = [CONVERTERS]\n[training]\nlocal_batch_size = 16\n'
        "seq_len = 8192\ncompile = true\n[parallelism]\ndata_parallel_shard_degree = 32\n"
        'tensor_parallel_degree = 8\nenable_async_tensor_parallel = ASYNC\n[activation_checkpoint]\nmode = "full"\n'
    )
    eight = base.replace("CONVERTERS", '"float8"').replace("ASYNC", "true")
    eight += '[float8]\nenable_fsdp_float8_all_gather = true\nrecipe_name = "RECIPE"\n'
    files = {
        "bf16": base.replace("CONVERTERS", "").replace("ASYNC", "false"),
        "async": base.replace("CONVERTERS", "").replace("ASYNC", "true"),
        "tensorwise": eight.replace("RECIPE", "tensorwise"),
        "rowwise": eight.replace("RECIPE", "rowwise"),
    }
    jobs = {name: read_torchtitan(text, devices=256) for name, text in files.items()}
    assert all(job.plan.overlap.splits for name, job in jobs.items() if name != "bf16")
    rowwise = jobs["rowwise"].plan.precision.fp8
    assert rowwise is not None and not rowwise.gather
    speed = {
        name: predict(job.graph(), "32x8xh100-sxm-96gb", job.plan, job.workload, job.stack).tokens_per_s_per_device
        for name, job in jobs.items()
    }
    assert 1.03 < speed["async"] / speed["bf16"] < 1.13  # measured 1.09
    assert 1.15 < speed["tensorwise"] / speed["async"] < 1.35  # 1.24
    assert 0.88 < speed["rowwise"] / speed["async"] < 1.0  # 0.92
    with pytest.raises(InputError, match=r"compile\.enable"):
        read_torchtitan(files["async"].replace("compile = true", "compile = false"), devices=256)
