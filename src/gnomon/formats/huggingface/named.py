"""Sizes of models that people train and the catalogue has not, by name: what their config.json says.

`config_called(plain)` returns the keys of config.json that decide a network's sizes, by a hub id without its owner and
ends (`hub.plain_name`), and what is not as in the model itself. `language_model(plain)` names the network of words in
one that sees images. Models with code of their own (Qwen's first, Baichuan, InternLM, ChatGLM) are given as the type of
transformers that has the same matmuls. Leaves out models whose sizes two releases of the same name do not share.

Source: the config.json of each, as Lightning-AI/litgpt (litgpt/config.py, 2685705) and transformers' documentation
quote them; parameters of each are held to those that its model card counts (tests/formats/test_named.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from gnomon.models.presets import only_words

Keys = Mapping[str, object]
"""Part of a config.json."""


def _decoder(kind: str, layers: int, hidden: int, heads: int, kv: int, ffn: int, vocab: int, **extra: object) -> Keys:
    """A decoder by Llama's keys. kv: heads of keys and values."""
    sizes = dict(num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=kv)
    return {"model_type": kind, **sizes, "intermediate_size": ffn, "vocab_size": vocab, **extra}


def _llama(layers: int, hidden: int, heads: int, kv: int, ffn: int, vocab: int, **extra: object) -> Keys:
    return _decoder("llama", layers, hidden, heads, kv, ffn, vocab, **{"tie_word_embeddings": False, **extra})


def _mistral(layers: int, hidden: int, kv: int, ffn: int, vocab: int, heads: int = 32) -> Keys:
    """Keys of a Mistral, without the window of the first release."""
    extra = dict(head_dim=128, sliding_window=None, tie_word_embeddings=False)
    return _decoder("mistral", layers, hidden, heads, kv, ffn, vocab, **extra)


def _qwen(layers: int, hidden: int, heads: int, kv: int, ffn: int, vocab: int = 151936, tied: bool = False) -> Keys:
    """Llama's form with biases of queries, keys and values."""
    return _decoder("qwen2", layers, hidden, heads, kv, ffn, vocab, tie_word_embeddings=tied)


def _opt(layers: int, hidden: int, heads: int) -> Keys:
    sizes = dict(num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads, ffn_dim=4 * hidden)
    return {
        "model_type": "opt",
        **sizes,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
        "word_embed_proj_dim": hidden,
    }


def _bloom(layers: int, hidden: int, heads: int) -> Keys:
    return {"model_type": "bloom", "n_layer": layers, "hidden_size": hidden, "n_head": heads, "vocab_size": 250880}


def _neox(layers: int, hidden: int, heads: int, vocab: int = 50304) -> Keys:
    sizes = dict(num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads, vocab_size=vocab)
    return {"model_type": "gpt_neox", **sizes, "intermediate_size": 4 * hidden, "rotary_pct": 0.25}


def _phi(layers: int, partial: float) -> Keys:
    extra = dict(partial_rotary_factor=partial, tie_word_embeddings=False)
    return _decoder(
        "phi", layers, 2048 if layers == 24 else 2560, 32, 32, 8192 if layers == 24 else 10240, 51200, **extra
    )


def _phi3(layers: int, hidden: int, heads: int, kv: int, ffn: int, vocab: int, tied: bool = False) -> Keys:
    return _decoder("phi3", layers, hidden, heads, kv, ffn, vocab, tie_word_embeddings=tied)


def _gpt2(layers: int, hidden: int, heads: int) -> Keys:
    return {
        "model_type": "gpt2",
        "n_layer": layers,
        "n_embd": hidden,
        "n_head": heads,
        "n_positions": 1024,
        "vocab_size": 50257,
    }


def _gpt_neo(layers: int, hidden: int, heads: int) -> Keys:
    """Every other layer has a window of 256 tokens."""
    sizes = dict(num_layers=layers, hidden_size=hidden, num_heads=heads, vocab_size=50257, max_position_embeddings=2048)
    return {
        "model_type": "gpt_neo",
        **sizes,
        "attention_types": [[["global", "local"], layers // 2]],
        "window_size": 256,
    }


def _bigcode(layers: int, hidden: int, heads: int) -> Keys:
    sizes = dict(n_layer=layers, n_embd=hidden, n_head=heads, n_inner=4 * hidden, n_positions=8192)
    return {"model_type": "gpt_bigcode", **sizes, "vocab_size": 49152, "multi_query": True}


def _starcoder2(layers: int, hidden: int, heads: int, kv: int, tied: bool = True) -> Keys:
    return _decoder("starcoder2", layers, hidden, heads, kv, 4 * hidden, 49152, use_bias=True, tie_word_embeddings=tied)


def _glm(layers: int, vocab: int) -> Keys:
    extra = dict(head_dim=128, attention_bias=True, partial_rotary_factor=0.5, tie_word_embeddings=False)
    return _decoder("glm", layers, 4096, 32, 2, 13696, vocab, **extra)


def _olmo(kind: str, layers: int, hidden: int, heads: int, ffn: int, vocab: int, tied: bool = False) -> Keys:
    return _decoder(kind, layers, hidden, heads, heads, ffn, vocab, tie_word_embeddings=tied)


def _granite(layers: int, hidden: int, ffn: int) -> Keys:
    return _decoder("granite", layers, hidden, 32, 8, ffn, 49155, tie_word_embeddings=True)


def _gemma(layers: int, hidden: int, heads: int, kv: int, ffn: int) -> Keys:
    return _decoder("gemma", layers, hidden, heads, kv, ffn, 256000, head_dim=256, tie_word_embeddings=True)


def _t5(layers: int, hidden: int, heads: int, ffn: int) -> Keys:
    """T5 1.1's form: gated GELU, a head of its own."""
    sizes = dict(num_layers=layers, num_decoder_layers=layers, d_model=hidden, num_heads=heads, d_ff=ffn, d_kv=64)
    return {
        "model_type": "t5",
        **sizes,
        "vocab_size": 32128,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
    }


def _bert(layers: int, hidden: int, heads: int, vocab: int) -> Keys:
    return {**_roberta("bert", layers, hidden, heads, vocab), "max_position_embeddings": 512, "type_vocab_size": 2}


def _roberta(kind: str, layers: int, hidden: int, heads: int, vocab: int) -> Keys:
    sizes = dict(num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads, intermediate_size=4 * hidden)
    return {"model_type": kind, **sizes, "vocab_size": vocab, "max_position_embeddings": 514, "type_vocab_size": 1}


# The paper calls the first of these 33B (Touvron et al. 2023, LLaMA), and its files 30B.
LLAMA_30B, LLAMA_65B = _llama(60, 6656, 52, 52, 17920, 32000), _llama(80, 8192, 64, 64, 22016, 32000)
FALCON = {"model_type": "falcon", "vocab_size": 65024, "bias": False, "parallel_attn": True, "alibi": False}

CONFIGS: Mapping[str, Keys] = {
    "codellama-7b": _llama(32, 4096, 32, 32, 11008, 32016),
    "codellama-13b": _llama(40, 5120, 40, 40, 13824, 32016),
    "mistral-7b-*v0.2": _mistral(32, 4096, 8, 14336, 32000),
    "mistral-7b-*v0.3": _mistral(32, 4096, 8, 14336, 32768),
    "llama-30b": LLAMA_30B,
    "llama-33b": LLAMA_30B,
    "vicuna-33b*": LLAMA_30B,
    "llama-65b": LLAMA_65B,
    "guanaco-33b*": LLAMA_30B,
    "guanaco-65b*": LLAMA_65B,
    "smollm-135m": _llama(30, 576, 9, 3, 1536, 49152, tie_word_embeddings=True),
    "smollm2-135m": _llama(30, 576, 9, 3, 1536, 49152, tie_word_embeddings=True),
    "smollm-360m": _llama(32, 960, 15, 5, 2560, 49152, tie_word_embeddings=True),
    "smollm2-360m": _llama(32, 960, 15, 5, 2560, 49152, tie_word_embeddings=True),
    "smollm-1.7b": _llama(24, 2048, 32, 32, 8192, 49152, tie_word_embeddings=True),
    "smollm2-1.7b": _llama(24, 2048, 32, 32, 8192, 49152, tie_word_embeddings=True),
    "smollm3-3b*": _decoder("smollm3", 36, 2048, 16, 4, 11008, 128256, tie_word_embeddings=True),
    "tinyllama-1.1b": _llama(22, 2048, 32, 4, 5632, 32000),
    "tinyllama": _llama(22, 2048, 32, 4, 5632, 32000),
    "tinyllama_v1.1": _llama(22, 2048, 32, 4, 5632, 32000),
    "open_llama_3b*": _llama(26, 3200, 32, 32, 8640, 32000),
    "solar-10.7b*": _llama(48, 4096, 32, 8, 14336, 32000),
    "codellama-34b*": _llama(48, 8192, 64, 8, 22016, 32000),
    "yi-6b*": _llama(32, 4096, 32, 4, 11008, 64000),
    "yi-1.5-6b*": _llama(32, 4096, 32, 4, 11008, 64000),
    "yi-9b*": _llama(48, 4096, 32, 4, 11008, 64000),
    "yi-1.5-9b*": _llama(48, 4096, 32, 4, 11008, 64000),
    "yi-34b*": _llama(60, 7168, 56, 8, 20480, 64000),
    "yi-1.5-34b*": _llama(60, 7168, 56, 8, 20480, 64000),
    "deepseek-llm-7b": _llama(30, 4096, 32, 32, 11008, 102400),
    "deepseek-math-7b*": _llama(30, 4096, 32, 32, 11008, 102400),
    "deepseek-llm-67b": _llama(95, 8192, 64, 8, 22016, 102400),
    "deepseek-coder-1.3b": _llama(24, 2048, 16, 16, 5504, 32256),
    "deepseek-coder-6.7b": _llama(32, 4096, 32, 32, 11008, 32256),
    "deepseek-coder-33b": _llama(62, 7168, 56, 8, 19200, 32256),
    "mistral-small-24b*": _mistral(40, 5120, 8, 32768, 131072),
    "mistral-small-3*": _mistral(40, 5120, 8, 32768, 131072),
    "ministral-8b*": _mistral(36, 4096, 8, 12288, 131072),
    "codestral-22b*": _mistral(56, 6144, 8, 16384, 32768, 48),
    "baichuan-7b": _llama(32, 4096, 32, 32, 11008, 64000),
    "baichuan2-7b": _llama(32, 4096, 32, 32, 11008, 125696),
    "baichuan-13b": _llama(40, 5120, 40, 40, 13696, 64000),
    "baichuan2-13b": _llama(40, 5120, 40, 40, 13696, 125696),
    "internlm2*-1_8b": _llama(24, 2048, 16, 8, 8192, 92544),
    "internlm2*-7b*": _llama(32, 4096, 32, 8, 14336, 92544),
    "internlm2*-20b*": _llama(48, 6144, 48, 8, 16384, 92544),
    "qwen-1_8b": _qwen(24, 2048, 16, 16, 5504),
    "qwen-7b": _qwen(32, 4096, 32, 32, 11008),
    "qwen-14b": _qwen(40, 5120, 40, 40, 13696, 152064),
    "qwen-72b": _qwen(80, 8192, 64, 64, 24576, 152064),
    "qwen1.5-0.5b": _qwen(24, 1024, 16, 16, 2816, tied=True),
    "qwen1.5-1.8b": _qwen(24, 2048, 16, 16, 5504),
    "qwen1.5-4b": _qwen(40, 2560, 20, 20, 6912),
    "qwen1.5-7b": _qwen(32, 4096, 32, 32, 11008),
    "qwen1.5-14b": _qwen(40, 5120, 40, 40, 13696, 152064),
    "qwen1.5-32b": _qwen(64, 5120, 40, 8, 27392, 152064),
    "qwen1.5-72b": _qwen(80, 8192, 64, 64, 24576, 152064),
    "qwen1.5-110b": _qwen(80, 8192, 64, 8, 49152, 152064),
    "qwen1.5-moe-a2.7b": {
        **_decoder("qwen2_moe", 24, 2048, 16, 16, 5632, 151936, tie_word_embeddings=False),
        **dict(moe_intermediate_size=1408, shared_expert_intermediate_size=5632, num_experts=60, num_experts_per_tok=4),
    },
    "qwen2-57b-a14b": {
        **_decoder("qwen2_moe", 28, 3584, 28, 4, 18944, 151936, tie_word_embeddings=False),
        **dict(moe_intermediate_size=2560, shared_expert_intermediate_size=20480, num_experts=64),
        **dict(num_experts_per_tok=8),
    },
    "deepseek-r1-distill-qwen-1.5b": _qwen(28, 1536, 12, 2, 8960),
    "chatglm2-6b": _glm(28, 65024),
    "chatglm3-6b": _glm(28, 65024),
    "glm-4-9b*": _glm(40, 151552),
    "opt-125m": _opt(12, 768, 12),
    "opt-1.3b": _opt(24, 2048, 32),
    "opt-2.7b": _opt(32, 2560, 32),
    "opt-6.7b": _opt(32, 4096, 32),
    "opt-13b": _opt(40, 5120, 40),
    "opt-30b": _opt(48, 7168, 56),
    "opt-66b": _opt(64, 9216, 72),
    "bloom*-560m": _bloom(24, 1024, 16),
    "bloom*-1b1": _bloom(24, 1536, 16),
    "bloom*-1b7": _bloom(24, 2048, 16),
    "bloom*-3b": _bloom(30, 2560, 32),
    "bloom*-7b1*": _bloom(30, 4096, 32),
    "bloom": _bloom(70, 14336, 112),
    "falcon-7b": {**FALCON, **dict(num_hidden_layers=32, hidden_size=4544, num_attention_heads=71, multi_query=True)},
    "falcon-40b": {
        **FALCON,
        **dict(num_hidden_layers=60, hidden_size=8192, num_attention_heads=128, num_kv_heads=8),
        **dict(new_decoder_architecture=True),
    },
    "gpt-j-6b": {
        "model_type": "gptj",
        "n_layer": 28,
        "n_embd": 4096,
        "n_head": 16,
        "rotary_dim": 64,
        "vocab_size": 50400,
    },
    "pythia-70m": _neox(6, 512, 8),
    "pythia-160m": _neox(12, 768, 12),
    "pythia-410m": _neox(24, 1024, 16),
    "pythia-1b": _neox(16, 2048, 8),
    "pythia-2.8b": _neox(32, 2560, 32),
    "pythia-6.9b": _neox(32, 4096, 32, 50432),
    "pythia-12b": _neox(36, 5120, 40, 50688),
    "dolly-v2-3b": _neox(32, 2560, 32, 50280),
    "dolly-v2-7b": _neox(32, 4096, 32, 50280),
    "dolly-v2-12b": _neox(36, 5120, 40, 50280),
    "gpt-neo-125m": _gpt_neo(12, 768, 12),
    "gpt-neo-1.3b": _gpt_neo(24, 2048, 16),
    "gpt-neo-2.7b": _gpt_neo(32, 2560, 20),
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "distilgpt2": _gpt2(6, 768, 12),
    "phi-1_5": _phi(24, 0.5),
    "phi-2": _phi(32, 0.4),
    "phi-3-mini*": _phi3(32, 3072, 32, 32, 8192, 32064),
    "phi-3.5-mini*": _phi3(32, 3072, 32, 32, 8192, 32064),
    "phi-3-medium*": _phi3(40, 5120, 40, 10, 17920, 32064),
    "phi-4": _phi3(40, 5120, 40, 10, 17920, 100352),
    "phi-4-mini*": _phi3(32, 3072, 24, 8, 8192, 200064, tied=True),
    "gemma-2b": _gemma(18, 2048, 8, 1, 16384),
    "gemma-7b": _gemma(28, 3072, 16, 16, 24576),
    "starcoder": _bigcode(40, 6144, 48),
    "starcoderbase": _bigcode(40, 6144, 48),
    "starcoderbase-1b": _bigcode(24, 2048, 16),
    "starcoderbase-7b": _bigcode(42, 4096, 32),
    "wizardcoder-15b*": _bigcode(40, 6144, 48),
    "starcoder2-3b": _starcoder2(30, 3072, 24, 2),
    "starcoder2-7b": _starcoder2(32, 4608, 36, 4),
    "starcoder2-15b*": _starcoder2(40, 6144, 48, 4, tied=False),
    "stablelm-2-1_6b": _decoder(
        "stablelm", 24, 2048, 32, 32, 5632, 100352, use_qkv_bias=True, tie_word_embeddings=False
    ),
    "stablelm-3b-4e1t": _decoder("stablelm", 32, 2560, 32, 32, 6912, 50304, tie_word_embeddings=False),
    "stablelm-zephyr-3b": _decoder("stablelm", 32, 2560, 32, 32, 6912, 50304, tie_word_embeddings=False),
    "granite-3.?-2b*": _granite(40, 2048, 8192),
    "granite-3.?-8b*": _granite(40, 4096, 12800),
    "mpt-7b*": {"model_type": "mpt", "n_layers": 32, "d_model": 4096, "n_heads": 32, "vocab_size": 50432},
    "mpt-30b*": {"model_type": "mpt", "n_layers": 48, "d_model": 7168, "n_heads": 64, "vocab_size": 50432},
    "olmo-1b": _olmo("olmo", 16, 2048, 16, 8192, 50304, tied=True),
    "olmo-7b": _olmo("olmo", 32, 4096, 32, 11008, 50304),
    "olmo-2-*-1b*": _olmo("olmo2", 16, 2048, 16, 8192, 100352),
    "olmo-2-*-7b*": _olmo("olmo2", 32, 4096, 32, 11008, 100352),
    "olmo-2-*-13b*": _olmo("olmo2", 40, 5120, 40, 13824, 100352),
    "olmoe-1b-7b*": {
        **_olmo("olmoe", 16, 2048, 16, 1024, 50304),
        **dict(num_experts=64, num_experts_per_tok=8),
    },
    "t5-large": {**_t5(24, 1024, 16, 4096), "feed_forward_proj": "relu", "tie_word_embeddings": True},
    "flan-t5-small": _t5(8, 512, 6, 1024),
    "flan-t5-large": _t5(24, 1024, 16, 2816),
    "flan-t5-xl": _t5(24, 2048, 32, 5120),
    "flan-t5-xxl": _t5(24, 4096, 64, 10240),
    "bert-base-uncased": _bert(12, 768, 12, 30522),
    "bert-large-uncased": _bert(24, 1024, 16, 30522),
    "bert-base-cased": _bert(12, 768, 12, 28996),
    "bert-large-cased": _bert(24, 1024, 16, 28996),
    "bert-base-multilingual-cased": _bert(12, 768, 12, 119547),
    "bert-base-chinese": _bert(12, 768, 12, 21128),
    "roberta-base": _roberta("roberta", 12, 768, 12, 50265),
    "roberta-large": _roberta("roberta", 24, 1024, 16, 50265),
    "xlm-roberta-base": _roberta("xlm-roberta", 12, 768, 12, 250002),
    "xlm-roberta-large": _roberta("xlm-roberta", 24, 1024, 16, 250002),
}
"""Plain name, or a pattern of it -> its config.json."""

NOT_ALIKE = {
    "baichuan*13b": "its attention adds a bias by distance (ALiBi) where Llama's turns queries and keys",
    "chatglm?-6b": "read as GLM-4's form",
    "mistral-small-3.[12]*": only_words("mistral"),
}
"""Plain name -> how a model differs from what it is read as."""

LANGUAGE_MODELS = {
    "qwen2.5-vl-3b": "qwen2.5-3b",
    "qwen2.5-vl-7b": "qwen2.5-7b",
    "qwen2.5-vl-32b": "qwen2.5-32b",
    "qwen2.5-vl-72b": "qwen2.5-72b",
    # Qwen2's networks of words have the shapes of Qwen2.5's.
    "qwen2-vl-2b": "qwen2.5-1.5b",
    "qwen2-vl-7b": "qwen2.5-7b",
    "qwen2-vl-72b": "qwen2.5-72b",
    "qwen2.5-omni-7b": "qwen2.5-7b",
    "qwen3-vl-4b": "qwen3-4b",
    "qwen3-vl-8b": "qwen3-8b",
    "qwen3-vl-32b": "qwen3-32b",
    "qwen3-vl-30b-a3b": "qwen3-30b-a3b",
    "qwen-vl": "qwen-7b",
    "llava-v1.6-mistral-7b": "mistral-7b",
    "llava-*-7b": "llama-2-7b",
    "llava-*-13b": "llama-2-13b",
    "internvl2-8b": "internlm2.5-7b",
    "internvl2_5-8b": "internlm2.5-7b",
    "internlm-xcomposer2*-7b": "internlm2-7b",
    "minicpm-v-2_6": "qwen2.5-7b",
    "minicpm-llama3-v-2_5": "llama-3.1-8b",
}
"""Plain name of a model that sees images, or a pattern of it -> the network of its words."""


def config_called(plain: str) -> tuple[Keys, str] | None:
    """(config.json of a model, how what is read differs from it or nothing); None for a name that is not here."""
    # The first match in the order of the table: a narrower pattern has to stand before a wider one.
    keys = next((keys for pattern, keys in CONFIGS.items() if fnmatchcase(plain, pattern)), None)
    return None if keys is None else (keys, _named(NOT_ALIKE, plain) or "")


def language_model(plain: str) -> str | None:
    """The network of words of a model that sees images, by its plain name; None for any other."""
    return _named(LANGUAGE_MODELS, plain)


def _named(table: Mapping[str, str], plain: str) -> str | None:
    return next((text for pattern, text in table.items() if fnmatchcase(plain, pattern)), None)
