"""What scripts and papers say of rows: sizes by name, layers by parameters, batches in tokens, tests' devices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evidence.published import Row, to_run
from evidence.published.row import read_table
from evidence.published.rules import rules
from evidence.published.scripts import with_script_facts
from gnomon.errors import InputError

GPT = Row(
    id="s-1",
    family="bigscience-v100",
    source="bigscience-workshop/bigscience/experiments/gpt2.md",
    section="Megatron",
    model="gpt2-39B",
    device="v100-sxm-32gb",
    framework="Megatron-LM",
    metric="s_per_step",
    value=80.0,
    seq_len=1024,
    num_devices=32,
    devices_per_node=4,
    precision="fp16",
    tp=4,
    pp=8,
    dp=1,
    micro_batch=4,
    global_batch=512,
    recompute="full",
)
"""A row of a page that names its models by parameters alone."""


@pytest.mark.parametrize(
    ("model", "billions"),
    [("gpt2-7.5B", 7), ("gpt2-18B", 18), ("gpt2-39B", 39), ("gpt2-116B", 116), ("gpt2-206B", 206)],
)
def test_sizes_by_name_give_the_parameters_of_the_name(model: str, billions: int) -> None:
    row, notes = with_script_facts(replace(GPT, model=model))
    assert row.layers and row.hidden and row.vocab and "MSIZE" in notes[0]
    parameters = row.layers * 12 * row.hidden**2 + row.vocab * row.hidden
    assert parameters / 1e9 == pytest.approx(billions, abs=1)


def test_such_a_row_is_a_run_on_four_omni_path_links_a_node() -> None:
    run = to_run(GPT)
    assert {(group.node.nic.name, group.node.nics) for group in run.cluster.groups} == {("omnipath-100", 4)}
    assert run.plan.mesh.pp == 8 and any("gpt2-meg" in note for note in run.notes)


def test_a_run_whose_sizes_only_a_script_says_is_not_fitted_to() -> None:
    assert to_run(GPT).pieced
    given = replace(with_script_facts(GPT)[0], source="somewhere/else.md")
    assert not to_run(given).pieced and to_run(given).model == to_run(GPT).model


def test_a_column_that_is_given_stays() -> None:
    assert with_script_facts(replace(GPT, heads=64))[0].heads == 64


def test_a_row_of_another_source_is_left_as_it_is() -> None:
    other = replace(GPT, source="somewhere/else.md")
    assert with_script_facts(other) == (other, ())


def test_layers_are_those_that_parameters_leave_as_many_on_each_stage() -> None:
    """Rows whose FLOP/s and seconds give the work of 77, 81 and 72 layers."""
    page = "bigscience-workshop/bigscience/train/tr11-176B-ml/chronicles-prequel.md"
    row = replace(GPT, source=page, section="Choosing the fastest 3D Topology", model="bloom-proto", hidden=14400)
    for billions, stages, layers in ((195, 11, 77), (191, 7, 77), (205, 9, 81), (183, 12, 72)):
        result, notes = with_script_facts(replace(row, params_b=billions, pp=stages))
        assert (result.layers, result.heads) == (layers, 96)
        assert any(f"{layers} layers" in note for note in notes)


def test_a_page_that_names_whose_model_it_runs_says_so_in_the_framework() -> None:
    page = "hpcaitech/ColossalAI-Pytorch-lightning/benchmark/gpt/README.md"
    row, _ = with_script_facts(replace(GPT, source=page, framework="PyTorch-Lightning ddp (AMP)"))
    assert row.framework.endswith("transformers") and row.flash_attention == "no"


def test_every_script_says_where_it_was_read_and_gives_something() -> None:
    known = rules("columns")
    assert known and all(rule.source and rule.date and rule.set["columns"] for rule in known)


@pytest.mark.parametrize(
    ("batch", "length", "sequences"),
    [("16M tokens", "8192", 2048), ("4M tokens", "4096", 1024), ("1.5M tokens", "2048", 732)],
)
def test_a_batch_in_tokens_is_sequences(batch: str, length: str, sequences: int) -> None:
    header = "id,family,model,device,framework,metric,value,seq_len,global_batch\n"
    rows, refused = read_table(header + f"a,f,llama,h100,x,s_per_step,1,{length},{batch}\n")
    assert not refused and rows[0].global_batch == sequences


def test_a_batch_in_tokens_without_a_length_is_kept_for_one() -> None:
    header = "id,family,model,device,framework,metric,value,global_batch\n"
    rows, _ = read_table(header + "a,f,llama,h100,x,s_per_step,1,16M tokens\n")
    assert rows[0].global_batch is None and f"tokens/step={16 << 20}" in rows[0].notes


@pytest.mark.parametrize(("test", "devices"), [("gpt3_7b_tp1_pp4_memory_speed", 8), ("gpt3_mcore_tp4_pp1_1node", 4)])
def test_tests_on_gb200_have_the_devices_of_their_recipe(test: str, devices: int) -> None:
    row = replace(
        GPT, framework="Megatron-LM CI", source=None, section=test, device="gb200", devices_per_node=4,
        num_devices=None, layers=32, hidden=4096, heads=32, ffn="16384", tp=4, pp=1, dp=None, micro_batch=1,
        global_batch=8,
    )  # fmt: skip
    assert to_run(row).cluster.num_devices == devices
    with pytest.raises(InputError, match="num_devices not given"):
        to_run(replace(row, section="gpt3_15b_8t_release"))


MAXTEXT = replace(
    GPT, source="AI-Hypercomputer/maxtext/src/maxtext/configs/tpu/v4/README.md", section="1x v4-128",
    model="maxtext-22B",
    framework="MaxText", device="tpu-v4", metric="tflops_per_device", value=150.0, seq_len=None, num_devices=64,
    devices_per_node=None, precision="bf16", tp=None, pp=None, dp=None, micro_batch=13, global_batch=None,
    layers=48, hidden=6144, heads=24, ffn="24576", flash_attention="flash", zero_or_fsdp="ici_fsdp=64",
)  # fmt: skip
"""A row whose columns are of a script that changed after the run."""


def test_a_run_is_read_by_the_script_of_its_time() -> None:
    run = to_run(MAXTEXT)
    assert (run.workload.seq_len, run.workload.global_batch_size) == (1024, 16 * 64)
    assert run.stack.layers.attention == "unfused" and any("281e04bf3" in note for note in run.notes)


def test_flops_of_parameters_alone() -> None:
    """Seconds by six FLOPs for each parameter and token, as the program counted them then."""
    run = to_run(MAXTEXT)
    tokens = run.workload.global_batch_size * run.workload.seq_len
    assert run.step_s == pytest.approx(6 * run.graph.num_parameters() * tokens / (150e12 * 64))


def test_tensor_parallel_products_on_tpus_are_cut() -> None:
    page = "AI-Hypercomputer/maxtext/src/maxtext/configs/tpu/v5p/README.md"
    row = replace(MAXTEXT, source=page, model="maxtext-512B", device="tpu-v5p", tp=8, seq_len=2048, micro_batch=2)
    assert [split.parts for split in to_run(row).plan.overlap.splits] == [16]
    assert not to_run(replace(row, device="h100", model="llama")).plan.overlap.splits
