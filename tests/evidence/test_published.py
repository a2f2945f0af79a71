"""Published runs: rows by hand to plans and seconds, refusals by name, and tables that are not tables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published_rows import GPT3, LLAMA, reason, run, text

from evidence.published import COLUMNS, Refused, Row, Run, read_runs, read_table, to_run
from evidence.published.notes import read_notes
from evidence.published.plan import libai_stages, redis_head, redistributed
from gnomon.errors import InputError
from gnomon.models.deepseek import DeepseekConfig
from gnomon.models.gpt import GptConfig
from gnomon.models.llama import LlamaConfig
from gnomon.models.mixtral import MixtralConfig
from gnomon.models.presets import model


def test_korthikanti_row() -> None:
    outcome = run(GPT3)
    assert outcome.plan.mesh.describe() == "pp=8 x tp=8"
    assert outcome.plan.schedule.name == "interleaved_one_f_one_b"
    assert outcome.plan.schedule.virtual_stages == 3
    assert outcome.plan.layout.sequence_parallel
    assert outcome.plan.saved.preset == "selective"
    assert outcome.plan.optimizer.zero == 0
    assert outcome.plan.precision.compute == "fp16"
    assert outcome.stack.layers.attention == "unfused"
    assert outcome.workload.batch_size == 64
    assert outcome.step_s == 13.75
    assert outcome.cluster.num_devices == 64
    assert isinstance(outcome.model, GptConfig)
    assert outcome.model.vocab_size == 51_200
    assert any("vocab 51200 not in the row" in note for note in outcome.notes)
    assert outcome.graph.num_parameters() == pytest.approx(175e9, rel=0.005)


@pytest.mark.parametrize(
    ("model", "rows"),
    [
        ("Qwen2.5 7B", 152_064),
        ("qwen2.5-1.5b", 151_936),
        ("Qwen3 8B", 151_936),
        ("LLaMA 7B", 32_000),
        ("open_llama_3b", 32_000),
        ("qwen2.5_7b", 152_064),
        ("llama-30b", 32_000),
        ("Llama 3 8B", 128_256),
        ("gpt-neox-20b", 50_432),
        ("GPT-2 1.5B", 50_257),
        ("Gemma 2 9B", 256_000),
    ],
)
def test_vocabularies_that_names_settle(model: str, rows: int) -> None:
    """Sizes given, vocabulary not: the rows of the tokenizer that the model is known by."""
    outcome = run(GPT3 | {"model": model, "framework": "some trainer", "vocab": ""})
    assert outcome.model.vocab_size == rows


def test_nanotron_row_in_seconds() -> None:
    """256 sequences of 4096 tokens on 16 devices at 38,839.82 tokens/s each: 1.6873 s."""
    outcome = run(LLAMA)
    assert outcome.step_s == pytest.approx(256 * 4096 / 16 / 38839.82)
    assert outcome.step_s == pytest.approx(1.68734, abs=1e-5)
    assert isinstance(outcome.model, LlamaConfig)
    assert outcome.model.tied
    assert outcome.graph.num_parameters() == pytest.approx(1.34e9, rel=0.005)
    assert outcome.plan.mesh.dp_shard == 16
    assert outcome.plan.optimizer.zero == 1
    assert outcome.plan.schedule.name == "one_f_one_b"


def test_seconds_win_over_tokens_and_both_are_kept() -> None:
    """An MFU beside a time is not a reading."""
    row = GPT3 | {"metric": "tokens_per_s_per_device", "value": "150", "second_metric": "s_per_step"}
    both = run(row | {"second_value": "14"})
    assert both.readings_s == pytest.approx((64 * 2048 / 150 / 64, 14.0))
    assert run(GPT3 | {"second_metric": "mfu_pct", "second_value": "40"}).readings_s == (13.75,)


def test_samples_per_second() -> None:
    assert run(GPT3 | {"metric": "samples_per_s", "value": "4"}).step_s == 16.0


def test_narayanan_flops() -> None:
    """Equation 3 for 39.1B: 96 x 1536 x 2048 x 48 x 8192^2 x (1 + 2048/(6 x 8192) + 51200/(16 x 48 x 8192)) FLOPs at
    138 TFLOP/s on 512 devices: 1.02122e18 / 7.0656e16 = 14.4534 s."""
    row = GPT3 | {
        "family": "narayanan-sc21",
        "model": "gpt-39.1B",
        "layers": "48",
        "hidden": "8192",
        "heads": "64",
        "kv_heads": "64",
        "ffn": "32768",
        "vocab": "51200",
        "num_devices": "512",
        "pp": "2",
        "vpp": "1",
        "dp": "32",
        "global_batch": "1536",
        "micro_batch": "4",
        "metric": "tflops_per_device",
        "value": "138",
        "second_metric": "hfu_pct",
        "second_value": "44",
    }
    assert run(row).step_s == pytest.approx(1.02122e18 / 7.0656e16, rel=1e-5)
    # A source whose formula is not known: FLOPs of the mathematics, with the recomputed forward where the row says so.
    unknown = row | {"family": "somebody", "recompute": "full"}
    assert run(unknown).step_s == pytest.approx(1.02122e18 / 7.0656e16, rel=0.01)
    bare = unknown | {"second_metric": "", "second_value": ""}
    other = run(bare).step_s
    assert other == pytest.approx(1.02122e18 * 72 / 96 / 7.0656e16, rel=0.01)
    assert run(bare | {"notes": "96*B*s*l*h^2 incl. full recompute"}).step_s == pytest.approx(other * 4 / 3)
    assert run(bare | {"notes": "MFU; recompute not in table"}).step_s == other
    mfu = run(row | {"family": "somebody", "metric": "mfu_pct", "value": str(100 * 138 / 312)})
    assert mfu.step_s == pytest.approx(other, rel=1e-3)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"micro_batch": "", "pp": "1", "dp": "8", "vpp": "1"}, "micro_batch not given"),
        ({"global_batch": "16 thousand"}, "global_batch = '16 thousand' is not a whole number"),
        ({"dp": "2"}, "dp = 2, but 64 devices / (tp 8 x pp 8 x cp 1) = 1"),
        ({"num_devices": "60", "dp": ""}, "60 devices"),
        ({"device": "h1000-sxm"}, "unknown device or node 'h1000-sxm'"),
        ({"device": "unstated"}, "unknown device or node 'unstated'"),
        ({"precision": "posit8"}, "precision 'posit8' cannot be said in a plan"),
        ({"zero_or_fsdp": "slices"}, "zero_or_fsdp = 'slices'"),
        ({"value": "nan"}, "value = 'nan' is not above 0 and finite"),
        ({"value": "-1"}, "value = '-1' is not above 0 and finite"),
        ({"value": ""}, "value is empty"),
        ({"heads": "97"}, "97"),
        ({"metric": "seconds"}, "metric 'seconds' is not known"),
        ({"notes": "x; WARNING published dp*tp*pp=640 != 320 GPUs"}, "the source contradicts itself"),
        ({"notes": "schedule 1F1B method Vocab-9; vocab"}, "method 'vocab-9'"),
    ],
)
def test_refusals_name_the_reason(change: Mapping[str, str], why: str) -> None:
    assert why in reason(GPT3 | change)


def test_adapters_that_no_recipe_gives_are_an_assumption_in_words() -> None:
    outcome = run(LLAMA | {"family": "somebody", "model": "llama2-7b LoRA"})
    assert "LoRA of rank 16 on q_proj, k_proj, v_proj: assumed, the row does not give them" in outcome.notes
    layer = next(block for block in outcome.graph.blocks if any("lora_A" in tensor.name for tensor in block.tensors))
    assert sum(tensor.kind == "parameter" and "lora_A" in tensor.name for tensor in layer.tensors) == 3


def test_a_column_that_is_not_given_is_an_assumption_in_words() -> None:
    outcome = run(GPT3 | {"recompute": "", "precision": "fp16?", "device": "a100"})
    assert "recompute not stated" in outcome.notes and outcome.recompute_open
    assert "precision fp16 assumed by the table" in outcome.notes
    assert any("memory of the A100 not stated" in note for note in outcome.notes)


def test_an_id_counts_once() -> None:
    runs, refused = read_runs(text(GPT3, LLAMA, GPT3))
    assert [r.id for r in runs] == ["a-1", "b-1"]
    assert refused == (Refused(id="a-1", family="korthikanti-2022", reason="id 'a-1' is used twice"),)


def test_fsdp_keeps_fp32_shards() -> None:
    row = LLAMA | {"framework": "torchtitan", "zero_or_fsdp": "fsdp-full_shard", "notes": ""}
    outcome = run(row)
    assert outcome.plan.optimizer.zero == 3 and outcome.plan.optimizer.reshard_after_forward
    assert (outcome.plan.precision.param, outcome.plan.precision.compute) == ("fp32", "bf16")
    kept = run(row | {"zero_or_fsdp": "fsdp-shard_grad_op"})
    assert not kept.plan.optimizer.reshard_after_forward
    hybrid = run(row | {"zero_or_fsdp": "hsdp"})
    assert (hybrid.plan.mesh.dp_replicate, hybrid.plan.mesh.dp_shard) == (2, 8)


def test_layers_per_virtual_stage() -> None:
    """96 layers on 8 ranks, 4 a virtual stage: 3 virtual stages."""
    assert run(GPT3 | {"vpp": "layers/vstage=4"}).plan.schedule.virtual_stages == 3
    assert "do not divide" in reason(GPT3 | {"vpp": "layers/vstage=7"})


def test_mixtures() -> None:
    moe = LLAMA | {
        "model": "Qwen3_30B_a3B",
        "arch": "moe",
        "layers": "48",
        "kv_heads": "4",
        "ffn": "768 expert",
        "vocab": "151936",
        "experts": "128",
        "topk": "8",
        "ep": "8",
        "notes": "",
    }
    outcome = run(moe)
    assert isinstance(outcome.model, MixtralConfig)
    assert outcome.graph.num_parameters() == 30_532_122_624  # Qwen3-30B-A3B's published size
    assert outcome.plan.mesh.ep == 8
    latent = moe | {
        "model": "DeepSeekV3",
        "layers": "61",
        "hidden": "7168",
        "heads": "128",
        "kv_heads": "MLA",
        "ffn": "18432 dense / 2048 expert",
        "vocab": "129280",
        "experts": "256+1 shared",
    }
    deepseek = run(latent)
    assert isinstance(deepseek.model, DeepseekConfig)
    assert deepseek.graph.num_parameters() == 671_026_419_200
    assert "do not say the mixture" in reason(moe | {"experts": "many"})


@pytest.mark.parametrize(
    "name", ["deepseek-coder-33b", "baichuan2-13b", "vicuna-7b", "qwen2.5-32b", "yi-6b", "olmo-7b"]
)
def test_models_with_llamas_layer(name: str) -> None:
    outcome = run(LLAMA | {"model": name, "notes": ""})
    assert isinstance(outcome.model, LlamaConfig) and not any("taken as a gated one" in note for note in outcome.notes)


def test_gemmas_are_known_by_name() -> None:
    """Their windows and the heads of their full layers stand in no column; the smallest of Gemma 4 have no builder."""
    left_out = dict.fromkeys(("layers", "hidden", "heads", "kv_heads", "ffn", "vocab"), "")
    outcome = run(LLAMA | left_out | {"model": "Gemma3-12B"})
    assert outcome.graph.num_parameters() == model("gemma-3-12b").num_parameters()
    routed = run(LLAMA | left_out | {"model": "gemma4-26b", "arch": "moe"})
    assert routed.graph.num_parameters() == model("gemma-4-26b-a4b").num_parameters()
    assert "inputs of their own" in reason(LLAMA | left_out | {"model": "gemma4-2b"})


def test_oneflows_loss_is_one_kernel_unless_logits_are_divided() -> None:
    for tp, expected in (("1", "fused"), ("2", None)):
        outcome = run(
            LLAMA | {"framework": "LiBai/OneFlow", "tp": tp, "dp": str(8 // int(tp)), "num_devices": "8", "pp": "1"}
        )
        assert outcome.stack.loss.cross_entropy == expected


def test_an_ungated_feed_forward_keeps_its_parameters() -> None:
    """24,576 wide without a gate is 2 matrices; 16,384 wide with one is 3: both 2 x 6144 x 24576 parameters."""
    row = LLAMA | {"model": "GPT 15b", "hidden": "6144", "heads": "48", "kv_heads": "8", "ffn": "24576"}
    outcome = run(row | {"notes": ""})
    assert isinstance(outcome.model, LlamaConfig)
    assert 3 * outcome.model.ffn_size == 2 * 24_576
    assert any("taken as a gated one of 16384" in note for note in outcome.notes)


def row_with(**values: str) -> Row:
    (result,), _ = read_table(text(GPT3 | values))
    return result


def test_what_only_notes_say() -> None:
    facts = read_notes(row_with(notes="release v24.11.1; step time is mean; torch.compile on; async TP"))
    assert (facts.release, facts.compiled, facts.async_tp) == ("v24.11.1", True, True)
    assert read_notes(row_with(notes="schedule V-Half method Vocab-1; x")).schedule == "v-half"
    assert read_notes(row_with(notes="schedule V-Half method Vocab-1; x")).method == "vocab-1"
    ci = read_notes(row_with(notes="mem = max mem-max-allocated-bytes (rank 0)"))
    assert (ci.memory_metric, ci.memory_rank) == ("allocated", 0)
    assert read_notes(row_with(notes="mem = nvidia-smi max of first/last node GB")).memory_metric == "device"
    assert read_notes(row_with(notes="sizes of huggingface/nanotron scripts/scaling_benchmarks.py")).memory_rank == 0
    assert read_notes(row_with(notes="fwd+bwd ONLY (no optimizer step)")).without_optimizer
    assert read_notes(row_with(notes="nothing of that")).compiled is None


def test_rows_that_vtrain_composed_are_told_apart() -> None:
    """Its single-node table is its simulator's; the multi-node one was measured."""
    of = "VIA-Research/vTrain/data/ground_truth_{}.csv"
    row = GPT3 | {"family": "vtrain-micro24", "framework": "Megatron-DeepSpeed", "recompute": "full", "vocab": "50257"}
    composed, measured = run(row | {"source": of.format("single")}), run(row | {"source": of.format("multi")})
    assert (composed.family, composed.stack.name, composed.plan.saved.preset) == ("vtrain-composed", "vtrain", "none")
    assert not composed.plan.optimizer.clip and "lm_head.weight" in composed.graph.parameters()
    assert any("not measured" in note for note in composed.notes)
    assert (measured.family, measured.stack.name) == ("vtrain-micro24", "megatron-deepspeed")
    assert measured.plan.saved.preset == "full"
    assert (composed.model.vocab_size, measured.model.vocab_size) == (50256, 51200)


def test_megatron_of_2021_waits_for_the_collectives_of_its_backward() -> None:
    sc21 = run(GPT3 | {"source": "arXiv 2104.04473 Table 1"})
    assert run(GPT3).stack.layers.backward_overlap and sc21.stack.layers.backward_overlap is False
    assert any(fact.field == "backward_overlap" for fact in sc21.stack.facts)
    assert run(GPT3).stack.gradients.grad_accumulation_fused and sc21.stack.gradients.grad_accumulation_fused is False
    assert sc21.stack.update.update_in_passes and not run(GPT3 | {"source": "elsewhere"}).stack.update.update_in_passes


def test_libraries_that_published_benchmarks_ran_on() -> None:
    """MosaicML's tables ran Triton's attention but for the models that its sweep gives FlashAttention-2."""
    small = GPT3 | {"framework": "llm-foundry/composer FSDP", "tp": "1", "pp": "1", "vpp": "1", "dp": "64"}
    small |= {"source": "mosaicml/llm-foundry/scripts/train/benchmarking/README.md", "zero_or_fsdp": "fsdp-full_shard"}
    small |= {"vocab": "50368"}
    large = small | {"section": "H100 80GB BF16 (Large Scale, >= 128 GPUs)"}
    kernels = [
        run(row).stack.layers.attention_kernel
        for row in (small | {"model": "MPT-7b"}, large | {"model": "MPT-7b"}, large | {"model": "MPT-30b"})
    ]
    assert kernels == ["triton", "flash2", "triton"] and run(large).stack.layers.cublas == "12.1"
    benchmark = LLAMA | {"notes": "dims from scripts/scaling_benchmarks.py"}
    assert (run(LLAMA).stack.layers.cublas, run(benchmark).stack.layers.cublas) == (None, "12.1")


@pytest.mark.parametrize(
    ("message", "hidden", "seq_len", "kernel", "batch", "entry"),
    [
        ("FA1", 2048, 2048, "flash1", 512, 8),
        ("FA2", 2048, 8192, "flash2", 128, 4),
        ("FA2", 2560, 2048, "flash2", 512, 4),
        ("no", 2048, 2048, None, 512, 2),
    ],
)
def test_flash_attention_s_own_training_code(
    message: str, hidden: int, seq_len: int, kernel: str | None, batch: int, entry: int
) -> None:
    """Which kernel ran is in the row; batches are in the repository's configs."""
    outcome = run(
        GPT3
        | {"framework": "flash-attention training repo", "flash_attention": message, "hidden": str(hidden)}
        | {"seq_len": str(seq_len), "micro_batch": "", "global_batch": "", "num_devices": "8"}
        | {
            "tp": "1",
            "pp": "1",
            "vpp": "",
            "dp": "8",
            "zero_or_fsdp": "",
            "heads": "16",
            "kv_heads": "16",
            "layers": "24",
        }
        | {"ffn": str(4 * hidden), "metric": "tflops_per_device"}
    )
    assert outcome.stack.layers.attention_kernel == kernel
    assert outcome.stack.layers.attention == ("flash" if kernel else "unfused")
    assert (outcome.workload.batch_size, outcome.plan.schedule.micro_batch_size) == (batch, entry)


def test_a_batch_that_no_config_gives_stays_open() -> None:
    row = GPT3 | {"framework": "flash-attention training repo", "flash_attention": "no", "seq_len": "8192"}
    _, refused = read_runs(text(row | {"micro_batch": "", "global_batch": ""}))
    assert [entry.reason for entry in refused] == ["global_batch not given"]


def test_recipes_that_reduce_partial_sums_in_eight_bits() -> None:
    """Llama's of 405B on H100, and of 70B since NeMo 2 (dgxc's release v25.04)."""
    nemo = GPT3 | {"framework": "NeMo", "device": "h100-sxm-80gb", "precision": "fp8", "vocab": "128256"}
    sums = [
        run(nemo | {"model": model, "notes": f"release {release}; dims"}).stack.layers.tp_reduce_dtype
        for model, release in (
            ("Llama 3.1 405b FP8", "v24.11.1"), ("Llama 3.1 70b FP8", "v25.02.02"), ("Llama 3.1 70b FP8", "v25.04.02"),
            ("NeMo Megatron FP8", "v25.04.02"),
        )
    ]  # fmt: skip
    assert sums == ["fp8", "compute", "fp8", "compute"]


def test_what_neusight_s_scripts_did() -> None:
    """Its file names count microbatches, whatever the row says; runs of one device have no optimizer."""
    label = "sitar-lab/NeuSight/scripts/asplos/label/NVIDIA_H100_80GB_HBM3/gpt2_large-train-1024-16"
    notes = "published e2e_latency ms = mean fwd+bwd ONLY (no optimizer step)"
    staged = GPT3 | {"device": "h100-sxm-80gb", "num_devices": "4", "tp": "1", "pp": "4", "vpp": "1", "notes": notes}
    staged |= {"global_batch": "16", "micro_batch": "4", "source": f"{label}-pp4_1.json", "framework": "Megatron-LM"}
    staged |= {"sequence_parallel": "no"}
    alone = staged | {"num_devices": "1", "pp": "1", "source": f"{label}.json"}
    assert (run(staged).plan.schedule.micro_batch_size, run(staged).plan.optimizer.kind) == (16, "adamw")
    assert (run(alone).plan.schedule.micro_batch_size, run(alone).plan.optimizer.kind) == (4, "sgd")


def test_oneflow_reduces_on_the_stream_that_computes() -> None:
    """Its GPT with tensor parallelism, and LiBai with stages too."""
    alone = GPT3 | {"tp": "1", "pp": "1", "vpp": "1", "dp": "64", "sequence_parallel": "no", "framework": "OneFlow-GPT"}
    staged = alone | {"pp": "8", "dp": "8"}
    split = alone | {"tp": "8", "dp": "8"}
    overlapped = [run(row).plan.overlap.grad_reduce for row in (alone, staged, split)]
    assert overlapped == [True, True, False]
    assert not run(staged | {"framework": "LiBai/OneFlow"}).plan.overlap.grad_reduce


@pytest.mark.parametrize(
    ("layers", "stages", "entry"),
    [(24, 4, (6, 7, 7, 4)), (48, 8, (6, 6, 7, 7, 7, 7, 7, 1)), (24, 2, ()), (26, 4, ())],
)
def test_libai_s_middle_stages_have_more_layers(layers: int, stages: int, entry: tuple[int, ...]) -> None:
    """By hand from its loop: 27 layers counted for 24 in four stages, the last three of them of seven."""
    assert libai_stages(layers, stages) == entry


def test_layers_redistributed_around_a_heavy_head() -> None:
    """8 stages of 32 layers of 3072, a vocabulary of 32k and of 256k: heads of 0.8 and 6.4 layers."""
    row = GPT3 | {"layers": "32", "hidden": "3072", "heads": "24", "ffn": "12288", "tp": "1", "vpp": "1", "dp": "1"}
    row |= {"num_devices": "8", "sequence_parallel": "no", "notes": "schedule 1F1B method Redis; x"}
    assert run(row | {"vocab": "32768"}).plan.schedule.layers_per_stage == (4,) * 8
    assert run(row | {"vocab": "262144"}).plan.schedule.layers_per_stage == (4, 4, 4, 5, 5, 5, 5, 0)
    assert redistributed(24, 4, 2.0) == (6, 6, 7, 5)  # 7 at most; 6 on each would be 8 with the head


def test_last_stages_of_redis_as_its_artifact_has_them() -> None:
    """layers_last of artifact/exp_one_host.csv (sail-sg/VocabularyParallelism 6191c3b): 32 layers of 3072, 8 stages."""
    for seq_len in (2048, 4096):
        heads = [redis_head(vocab, 3072, seq_len) for vocab in (32_000, 64_000, 128_000, 256_000)]
        actual = [redistributed(32, 8, head) for head in heads]
        assert tuple(stages[-1] for stages in actual) == (4, 3, 2, 0)
        assert all(sum(stages) == 32 and sorted(stages[:-1]) == list(stages[:-1]) for stages in actual)


def test_networks() -> None:
    """Named networks replace the usual one; a single node has none to replace."""
    roce = run(LLAMA | {"interconnect": "1600 Gbps node-node RoCE"}).cluster.groups[0].node
    assert roce.nic is not None and (roce.nic.name, roce.nics) == ("roce-200", 8)
    efa = run(LLAMA | {"interconnect": "8xH100 NVLink nodes; inter-node AWS EFA"}).cluster.groups[0].node
    assert efa.name == "aws-p5"
    one = LLAMA | {"num_devices": "8", "dp": "8", "interconnect": "1600 Gbps"}
    assert run(one).cluster.groups[0].node.name == "dgx-h100"


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("", "is empty"),
        ("id,family\n", "no column 'model'"),
        ("id,family,model,device,framework,metric,value,layer\n", "did you mean 'layers'"),
        ("id,id,family,model,device,framework,metric,value\n", "two columns 'id'"),
        ('id,family,model,device,framework,metric,value\n"a', "is not CSV"),
        ("id\0", "NUL"),
    ],
)
def test_tables_that_are_not_tables(table: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_table(table)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read"):
        read_runs(tmp_path / "none.csv")


cells = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=12)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from(COLUMNS), cells), max_size=4))
def test_every_row_is_a_run_or_refused(changes: list[dict[str, str]]) -> None:
    rows = [{c: "" for c in COLUMNS} | GPT3 | change for change in changes]
    runs, refused = read_runs(text(*rows)) if rows else ((), ())
    assert len(runs) + len(refused) == len(rows)
    assert all(r.reason for r in refused)


def test_a_run_is_what_its_row_says() -> None:
    (row,), _ = read_table(text(GPT3))
    assert to_run(row) == run(GPT3)


def test_what_a_page_says_of_precision_outside_its_rows() -> None:
    """BigScience's runs accumulate in 16 bits until the section that introduces an optimizer with fp32 gradients."""
    page = "bigscience-workshop/bigscience/train/tr11-176B-ml/chronicles-prequel.md"
    row = GPT3 | {"precision": "bf16?", "source": page, "framework": "Megatron-DeepSpeed", "vpp": "1"}
    assert run(row | {"section": "GBS Variations"}).plan.precision.grad == "fp16"
    assert run(row | {"section": "Rebalancing layers"}).plan.precision.grad == "fp32"


def test_the_eager_code_of_transformers() -> None:
    gpt2 = GPT3 | {"model": "gpt2", "framework": "PyTorch (Hugging Face transformers)", "tp": "1", "pp": "1", "vpp": ""}
    gpt2 |= {"sequence_parallel": "", "num_devices": "1", "recompute": "none"}
    outcome = run(gpt2)
    assert (
        isinstance(outcome.model, GptConfig) and outcome.model.activation == "gelu_new" and outcome.model.dropout == 0.1
    )
    assert (outcome.stack.layers.norm, outcome.stack.layers.activation, outcome.stack.layers.attention) == (
        "unfused",
        "unfused",
        "unfused",
    )
    llama = run(gpt2 | {"model": "llama-7b", "vocab": "32000"})
    assert llama.stack.layers.attention == "unfused_fp32_softmax"


def test_virtual_stages_that_a_source_states_elsewhere() -> None:
    """One recipe in two releases: the row without virtual stages has the other's; with two answers, none."""
    stated = {**GPT3, "pp": "8", "vpp": "3"}
    silent = {**GPT3, "id": "silent", "pp": "8", "vpp": ""}
    other = {**GPT3, "id": "other", "pp": "8", "vpp": "6"}

    def result(*rows: dict[str, str]) -> Run:
        return next(r for r in read_runs(text(*rows))[0] if r.id == "silent")

    assert result(stated, silent).plan.schedule.virtual_stages == 3
    assert any("virtual stages not in the row: 3" in note for note in result(stated, silent).notes)
    assert result(stated, silent, other).plan.schedule.virtual_stages == 1
    assert result({**stated, "tp": "1", "num_devices": ""}, silent).plan.schedule.virtual_stages == 1
