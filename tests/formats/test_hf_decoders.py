"""Configs of further decoders: the published files give the published counts, less what a note says is left out.

The facts are those of the public config.json files; the counts are the sums of the sizes in the published checkpoints
(safetensors indices on the Hugging Face hub), or those of the model that transformers 5.23 builds from the same sizes
(`MADE`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gnomon.errors import InputError
from gnomon.formats.huggingface.decoders import DECODERS
from gnomon.formats.huggingface.mixtures import MIXTURES
from gnomon.formats.huggingface.older import OLDER
from gnomon.formats.huggingface.read import HfModel, from_hf_config
from gnomon.models.presets import model
from gnomon.plans import Layout, Mesh, Optimizer, Plan, Schedule, Workload
from gnomon.prediction import predict


def llama_like(hidden: int, ffn: int, heads: int, layers: int, vocab: int, **more: Any) -> dict[str, Any]:
    """The keys that most families share."""
    return {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "vocab_size": vocab,
        **more,
    }


SCOUT = {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408}
OSS = {"num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128, "attention_bias": True}
LITE = {
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "n_group": 1,
    "topk_group": 1,
}
AIR = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "attention_bias": True,
    "num_nextn_predict_layers": 1,
}
FALCON = {"multi_query": True, "parallel_attn": True, "bias": False, "alibi": False}

# model_type -> (name, facts, parameters in the checkpoint, those that a note leaves out)
PUBLISHED: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "phi3": ("Phi-3-mini-128k", llama_like(3072, 8192, 32, 32, 32064, sliding_window=262144), 3_821_079_552, 0),
    "phi": ("phi-2", llama_like(2560, 10240, 32, 32, 51200, resid_pdrop=0.1), 2_779_683_840, 0),
    "smollm3": ("SmolLM3-3B", llama_like(2048, 11008, 16, 36, 128256, num_key_value_heads=4), 3_075_098_624, 0),
    "granite": (
        "granite-3.1-8b",
        llama_like(4096, 12800, 32, 40, 49155, num_key_value_heads=8, tie_word_embeddings=True, logits_scaling=16.0),
        8_170_848_256,
        0,
    ),
    "olmo2": ("OLMo-2-1124-7B", llama_like(4096, 11008, 32, 32, 100352), 7_298_617_344, 32 * 2 * (4096 - 128)),
    "olmo3": ("Olmo-3-1025-7B", llama_like(4096, 11008, 32, 32, 100278), 7_298_011_136, 32 * 2 * (4096 - 128)),
    "olmoe": (
        "OLMoE-1B-7B-0924",
        llama_like(2048, 1024, 16, 16, 50304, num_experts=64, num_experts_per_tok=8),
        6_919_161_856,
        16 * 2 * (2048 - 128),
    ),
    "stablelm": ("stablelm-3b-4e1t", llama_like(2560, 6912, 32, 32, 50304), 2_795_443_200, 0),
    "starcoder2": (
        "starcoder2-3b",
        llama_like(3072, 12288, 24, 30, 49152, num_key_value_heads=2, sliding_window=4096),
        3_030_371_328,
        0,
    ),
    "falcon": (
        "falcon-7b",
        {"hidden_size": 4544, "num_attention_heads": 71, "num_hidden_layers": 32, "vocab_size": 65024, **FALCON},
        6_921_720_704,
        0,
    ),
    "opt": (
        "opt-1.3b",
        {
            "hidden_size": 2048,
            "ffn_dim": 8192,
            "num_attention_heads": 32,
            "num_hidden_layers": 24,
            "vocab_size": 50272,
            "max_position_embeddings": 2048,
            "word_embed_proj_dim": 2048,
            "init_std": 0.02,
        },
        1_315_758_080,
        0,
    ),
    "bloom": (
        "bloom-7b1",
        {"n_embed": 4096, "num_attention_heads": 32, "n_layer": 30, "vocab_size": 250880},
        7_069_016_064,
        0,
    ),
    "gemma": (
        "gemma-2b",
        llama_like(2048, 16384, 8, 18, 256000, num_key_value_heads=1, head_dim=256, hidden_act="gelu"),
        2_506_172_416,
        0,
    ),
    "gemma3_text": (
        "gemma-3-1b",
        llama_like(1152, 6912, 4, 26, 262144, num_key_value_heads=1, head_dim=256, sliding_window=512),
        999_885_952,
        0,
    ),
    "gpt_oss": (
        "gpt-oss-20b",
        llama_like(2880, 2880, 64, 24, 201088, num_key_value_heads=8, head_dim=64, **OSS),
        20_914_757_184,
        24 * (32 * (3 * 2880) + 32 + 64),  # biases of experts and router, sinks
    ),
    "deepseek_v2": ("DeepSeek-V2-Lite", llama_like(2048, 10944, 16, 27, 102400, **LITE), 15_706_484_224, 0),
    "qwen2_moe": (
        "Qwen1.5-MoE-A2.7B",
        llama_like(2048, 5632, 16, 24, 151936, shared_expert_intermediate_size=5632, **SCOUT),
        14_315_784_192,
        0,
    ),
    "glm4_moe": (
        "GLM-4.5-Air",
        llama_like(4096, 10944, 96, 46, 151552, **AIR),
        106_852_245_504 + 45 * 128,
        0,
    ),  # with biases of routers
}


GPTJ = {"n_embd": 4096, "n_head": 16, "n_layer": 28, "n_positions": 2048, "rotary_dim": 64, "vocab_size": 50400}
CODEGEN = {"n_embd": 2560, "n_head": 32, "n_layer": 32, "n_positions": 2048, "n_ctx": 2048, "vocab_size": 51200}
STARCODER = {"n_embd": 6144, "n_head": 48, "n_layer": 40, "n_inner": 24576, "n_positions": 8192, "vocab_size": 49152}
NEO = {"hidden_size": 2560, "num_heads": 20, "num_layers": 32, "max_position_embeddings": 2048, "vocab_size": 50257}
MPT = {"d_model": 4096, "n_heads": 32, "n_layers": 32, "vocab_size": 50432, "expansion_ratio": 4}
DBRX = {"d_model": 6144, "n_heads": 48, "n_layers": 40, "vocab_size": 100352, "max_seq_len": 32768}
DBRX_FFN = {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4, "moe_loss_weight": 0.05, "model_type": ""}
ERNIE = {"moe_intermediate_size": 1536, "moe_k": 6, "moe_num_experts": 64, "moe_num_shared_experts": 2}
DOTS = {"moe_intermediate_size": 1408, "n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6}
KV8 = {"num_key_value_heads": 8}
GEMMA4 = {
    "head_dim": 256,
    "global_head_dim": 512,
    "num_global_key_value_heads": 4,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 1024,
}
HEAD128 = {"head_dim": 128}

# model_type -> (name, facts, parameters of transformers' model with them, those that a note leaves out)
MADE: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "cohere": (
        "c4ai-command-r-plus",
        llama_like(12288, 33792, 96, 64, 256000, **KV8, use_qk_norm=True),
        103_810_674_688,
        64 * (96 + 8 - 2) * 128,
    ),
    "cohere2": (
        "c4ai-command-a-03-2025",
        llama_like(12288, 36864, 96, 64, 256000, **KV8, **HEAD128, sliding_window=4096, sliding_window_pattern=4),
        111_057_580_032,
        0,
    ),
    "glm": ("glm-4-9b-hf", llama_like(4096, 13696, 32, 40, 151552, num_key_value_heads=2), 9_399_951_360, 0),
    "glm4": (
        "GLM-4-32B-0414",
        llama_like(6144, 23040, 48, 61, 151552, num_key_value_heads=2, **HEAD128, attention_bias=False),
        32_566_081_536,
        0,
    ),
    "seed_oss": ("Seed-OSS-36B", llama_like(5120, 27648, 80, 64, 155136, **KV8, **HEAD128), 36_151_104_512, 0),
    "ernie4_5": (
        "ERNIE-4.5-0.3B",
        llama_like(1024, 3072, 16, 18, 103424, num_key_value_heads=2, **HEAD128),
        360_748_032,
        0,
    ),
    "ernie4_5_moe": (
        "ERNIE-4.5-21B-A3B",
        llama_like(2560, 12288, 20, 28, 103424, num_key_value_heads=4, **ERNIE, moe_layer_start_index=1),
        21_825_437_888,
        0,
    ),
    "phimoe": (
        "Phi-3.5-MoE",
        llama_like(
            4096,
            6400,
            32,
            32,
            32064,
            **KV8,
            num_local_experts=16,
            num_experts_per_tok=2,
            attention_bias=True,
            lm_head_bias=True,
        ),
        41_873_153_344,
        0,
    ),
    "dbrx": (
        "dbrx-base",
        {**DBRX, "attn_config": {"clip_qkv": 8, "kv_n_heads": 8}, "ffn_config": DBRX_FFN},
        131_596_523_520,
        0,
    ),
    "mpt": ("mpt-7b", {**MPT, "attn_config": {"alibi": True, "clip_qkv": None}}, 6_649_286_656, 0),
    "gptj": ("gpt-j-6b", GPTJ, 6_050_882_784, 0),
    "codegen": ("codegen-2B-mono", CODEGEN, 2_779_356_160, 0),
    "gpt_bigcode": ("starcoder", STARCODER, 15_517_456_384, 0),
    "gpt_neo": ("gpt-neo-2.7B", {**NEO, "attention_types": [[["global", "local"], 16]]}, 2_651_307_520, 0),
    "nemotron": ("Nemotron-4-340B", llama_like(18432, 73728, 96, 96, 256000, **KV8), 341_029_195_776, 0),
    "arcee": (
        "AFM-4.5B",
        llama_like(2560, 18432, 20, 36, 128000, num_key_value_heads=4, **HEAD128),
        4_619_164_160,
        0,
    ),
    "exaone4": (
        "EXAONE-4.0-32B",
        llama_like(5120, 27392, 40, 64, 102400, **KV8, sliding_window=4096, sliding_window_pattern="LLLG"),
        32_003_216_384,
        0,
    ),
    "granitemoe": (
        "granite-3.0-3b-a800m",
        llama_like(
            1536, 512, 24, 32, 49155, **KV8, num_local_experts=40, num_experts_per_tok=8, tie_word_embeddings=True
        ),
        3_298_793_472,
        0,
    ),
    "minimax_m2": (
        "MiniMax-M2",
        llama_like(3072, 1536, 48, 62, 200064, **KV8, **HEAD128, num_local_experts=256, num_experts_per_tok=8),
        228_689_748_992 + 62 * 256,  # with biases of routers
        62 * (48 + 8 - 2) * 128,
    ),
    "dots1": (
        "dots.llm1",
        llama_like(4096, 10944, 32, 62, 152064, **DOTS, first_k_dense_replace=1),
        142_774_373_888 + 61 * 128,  # with biases of routers
        0,
    ),
    "ministral": ("Ministral-8B", llama_like(4096, 12288, 32, 36, 131072, **KV8, **HEAD128), 8_019_808_256, 0),
    "ministral3": ("Ministral-3-8B", llama_like(4096, 14336, 32, 34, 131072, **KV8, **HEAD128), 8_489_553_920, 0),
    "gemma4_text": (
        "gemma-4-31b",
        llama_like(5376, 21504, 32, 60, 262144, num_key_value_heads=16, **GEMMA4),
        30_697_345_280,
        0,
    ),
    "olmo": ("OLMo-7B", llama_like(4096, 11008, 32, 32, 50304), 6_888_095_744, -(2 * 32 + 1) * 4096),
}
PUBLISHED |= MADE


def read(kind: str, **changes: Any) -> HfModel:
    values = {"model_type": kind, **PUBLISHED[kind][1], **changes}
    return from_hf_config({key: value for key, value in values.items() if value != "absent"}, "m")


def test_every_reader_is_tried() -> None:
    assert set(PUBLISHED) == {one.name for one in (*DECODERS, *OLDER, *MIXTURES)}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_a_published_config_has_the_published_parameters(kind: str) -> None:
    _, _, count, left_out = PUBLISHED[kind]
    loaded = read(kind)
    assert loaded.graph.num_parameters() == count - left_out
    assert loaded.config is None  # else `gnomon run` would train it as a Llama
    assert not left_out or loaded.notes


@pytest.mark.parametrize("kind", PUBLISHED)
def test_a_key_that_nobody_understands_is_named(kind: str) -> None:
    assert "use_magic = True: no reader knows this key; not accounted for" in read(kind, use_magic=True).notes


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("phi3", "attention_bias", True),
        ("phi", "qk_layernorm", True),
        ("smollm3", "use_sliding_window", True),
        ("olmo2", "attention_dropout", 0.1),
        ("olmo3", "layer_types", ["full_attention"] * 32),
        ("olmoe", "attention_bias", True),
        ("stablelm", "qk_layernorm", True),
        ("starcoder2", "mlp_type", "gated"),
        ("falcon", "num_attention_heads", 70),
        ("opt", "word_embed_proj_dim", 512),
        ("opt", "do_layer_norm_before", False),
        ("bloom", "apply_residual_connection_post_layernorm", True),
        ("gemma", "attention_bias", True),
        ("gemma3_text", "layer_types", ["full_attention"] * 26),
        ("gpt_oss", "attention_bias", False),
        ("deepseek_v2", "scoring_func", "sigmoid"),
        ("deepseek_v2", "topk_method", "noaux_tc"),
        ("qwen2_moe", "decoder_sparse_step", 2),
        ("glm4_moe", "n_routed_experts", 4),
        ("cohere2", "layer_types", ["full_attention"] * 64),
        ("exaone4", "sliding_window_pattern", "GLL"),
        ("ministral", "layer_types", ["full_attention"] * 35),
        ("ministral", "layer_types", ["linear_attention"] * 36),
        ("gpt_neo", "attention_types", [[["global", "local"], 17]]),
        ("gpt_neo", "attention_types", [["global", "local"], 16]),
        ("gptj", "scale_attn_weights", False),
        ("codegen", "embd_pdrop", 0.1),
        ("gpt_bigcode", "num_key_value_heads", 2),
        ("mpt", "no_bias", False),
        ("ernie4_5_moe", "moe_layer_interval", 2),
        ("ernie4_5_moe", "moe_layer_end_index", 26),
        ("minimax_m2", "attn_type_list", [0] * 62),
        ("dots1", "topk_method", "greedy"),
        ("dbrx", "n_heads", 47),
        ("gemma4_text", "hidden_size_per_layer_input", 256),
        ("gemma4_text", "hidden_size_per_layer_input", None),
        ("gemma4_text", "attention_k_eq_v", False),
    ],
)
def test_other_mathematics_is_refused(kind: str, key: str, value: object) -> None:
    with pytest.raises(InputError) as error:
        read(kind, **{key: value})
    assert error.value.path == f"$.{key}" or "experts_per_token=8 exceeds num_experts=4" in str(error.value)


@pytest.mark.parametrize(
    ("kind", "inside", "key", "value"),
    [
        ("mpt", "attn_config", "alibi", False),
        ("mpt", "attn_config", "attn_type", "multiquery_attention"),
        ("dbrx", "attn_config", "attn_pdrop", 0.1),
        ("dbrx", "ffn_config", "ffn_act_fn", {"name": "gelu"}),
        ("dbrx", "ffn_config", "use_magic", True),
        ("dbrx", "ffn_config", "moe_top_k", None),
    ],
)
def test_a_config_inside_another_is_as_strict(kind: str, inside: str, key: str, value: object) -> None:
    facts = {**PUBLISHED[kind][1][inside], key: value}
    if key == "use_magic":
        assert any(note.startswith(f"{inside}.use_magic = True") for note in read(kind, **{inside: facts}).notes)
    else:
        with pytest.raises(InputError) as error:
            read(kind, **{inside: facts})
        assert error.value.path == f"$.{inside}.{key}"
    with pytest.raises(InputError, match="expected an object, got 3"):
        read(kind, **{inside: 3})


def test_heads_of_gemma_4_by_layer_are_those_of_its_older_keys() -> None:
    heads = {f"{index:02}": {"head_dim": 512, "num_key_value_heads": 4} for index in range(5, 60, 6)}
    older = {"global_head_dim": "absent", "num_global_key_value_heads": "absent"}
    assert read("gemma4_text", per_layer_config=heads, **older).graph == read("gemma4_text").graph
    with pytest.raises(InputError, match=r"full layers differ in heads: \[\(2, 512\), \(4, 512\)\]"):
        read("gemma4_text", per_layer_config={**heads, "05": {"head_dim": 512, "num_key_value_heads": 2}}, **older)
    experts = {"num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704, "enable_moe_block": True}
    sizes = llama_like(2816, 2112, 16, 30, 262144, num_key_value_heads=8, num_global_key_value_heads=2)
    assert read("gemma4_text", **{**sizes, **experts}).graph == replace(model("gemma-4-26b-a4b"), name="m")


def test_layers_see_what_their_files_say() -> None:
    mixed = ["sliding_attention", "full_attention", "full_attention"] * 12
    windows = {
        "ministral": [(call.block, call.repeat) for call in read("ministral", layer_types=mixed).graph.calls[1:4]],
        "exaone4": [(call.block, call.repeat) for call in read("exaone4").graph.calls[1:4]],
        "gpt_neo": [(call.block, call.repeat) for call in read("gpt_neo").graph.calls[1:4]],
    }
    assert windows == {
        "ministral": [("layers_windowed", 1), ("layers", 2), ("layers_windowed", 1)],
        "exaone4": [("layers_windowed", 3), ("layers", 1), ("layers_windowed", 3)],
        "gpt_neo": [("layers", 1), ("layers_windowed", 1), ("layers", 1)],
    }
    assert [(c.block, c.repeat) for c in read("exaone4", sliding_window=None).graph.calls[1:-1]] == [("layers", 64)]


def test_windows_alternate_as_the_file_says() -> None:
    gemma = read("gemma3_text").graph
    assert [(call.block, call.first, call.repeat) for call in gemma.calls[1:4]] == [
        ("layers_windowed", 0, 5),
        ("layers", 5, 1),
        ("layers_windowed", 6, 5),
    ]
    assert [b.op("self_attn.core").attr("window", 0) for b in gemma.blocks if b.name.startswith("layers")] == [512, 0]


def test_mixtures_begin_after_the_dense_layers() -> None:
    air = read("glm4_moe").graph
    assert [(call.name, call.first, call.repeat) for call in air.calls[1:-1]] == [
        ("layers", 0, 1),
        ("layers_moe", 1, 45),
    ]
    every = read("qwen2_moe").graph
    assert [(call.name, call.repeat) for call in every.calls[1:-1]] == [("layers_moe", 24)]


def test_falcons_differ_in_norms_heads_and_positions() -> None:
    newer = read("falcon", new_decoder_architecture=True, num_kv_heads=1).graph.block("layers")
    assert {"mlp_layernorm", "input_layernorm"} <= {op.path for op in newer.ops if op.kind == "norm"}
    first = read("falcon", alibi=True, multi_query=False, parallel_attn=False)
    assert not [op for op in first.graph.block("layers").ops if op.kind == "rotary"]
    assert "ALiBi" in first.notes[0]


@pytest.mark.parametrize("kind", ["phi", "falcon", "gemma3_text", "glm4_moe"])
def test_they_are_predicted_over_all_axes(kind: str) -> None:
    mixture = kind == "glm4_moe"
    job = Plan(
        mesh=Mesh(pp=2, dp_shard=4, tp=1 if kind == "falcon" else 2, ep=4 if mixture else 1),
        schedule=Schedule(micro_batch_size=1),
        optimizer=Optimizer(zero=1),
        layout=Layout(sequence_parallel=kind != "falcon"),
    )
    on = "1x8xh100-sxm" if kind == "falcon" else "2x8xh100-sxm"
    prediction = predict(read(kind).graph, on, job, Workload(global_batch_size=16, seq_len=1024))
    assert 0 < prediction.mfu < 0.7
