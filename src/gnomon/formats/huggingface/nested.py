"""The language model inside a Hugging Face config of several models (images, sound and text).

`language_model(values, readers)` returns its keys as a config of its own, and notes on what was left out or filled in.
transformers writes a config inside another as its difference from the class's defaults, sizes too (the files of Gemma 3
and LLaVA 1.5), so here, and only here, absent sizes are the class's. Leaves out: the readers (read and its neighbours),
and everything that reads images or sound.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

PLACES = ("text_config", "llm_config", "language_config")
"""Keys that hold the language model, the first that is there: transformers', InternVL's, DeepSeek-VL's."""

SAME_AS = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
"""model_type of a language model inside another -> the reader's, where they differ in name only."""

FLAT = {"qwen2_vl": "qwen2", "qwen2_5_vl": "qwen2"}
"""model_type of files that have the language model's keys beside the others' -> its reader's."""

NOT_TEXT = ("vision_config", "audio_config", "projector_hidden_act")
"""Keys of flat files that say nothing of the language model; so do all that end in _token_id."""

NESTED_ONLY = frozenset({"is_composition", "num_image_tokens"})
"""Keys of a language model's config that only its place inside another explains."""


def _class(hidden: int, ffn: int, layers: int, heads: int, vocab: int, kv_heads: int = 0) -> Mapping[str, int]:
    sizes = {"hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {**sizes, "vocab_size": vocab, **({"num_key_value_heads": kv_heads} if kv_heads else {})}


CLASS_SIZES: Mapping[str, Mapping[str, int]] = {
    "llama": _class(4096, 11008, 32, 32, 32000),
    "mistral": _class(4096, 14336, 32, 32, 32000, 8),
    "qwen2": _class(4096, 22016, 32, 32, 151936, 32),
    "qwen3": _class(4096, 22016, 32, 32, 151936, 32),
    "gemma": _class(3072, 24576, 28, 16, 256000, 16),
    "gemma2": _class(2304, 9216, 26, 8, 256000, 4),
    "gemma3_text": _class(2304, 9216, 26, 8, 262208, 4),
}
"""model_type -> sizes of the class's constructor in transformers 4.57 (the same since each class exists). Llama without
num_key_value_heads has as many as heads."""


def language_model(
    values: Mapping[str, object], readers: Collection[str]
) -> tuple[Mapping[str, object], tuple[str, ...]] | None:
    """The keys of the language model, and the notes; None where there is none that `readers` has."""
    inner = next((config for key in PLACES if isinstance(config := values.get(key), Mapping)), None)
    kind = str(values.get("model_type", ""))
    if inner is None and kind in FLAT:
        inner = {k: v for k, v in values.items() if k not in NOT_TEXT and not k.endswith("_token_id")}
        family, sizes = FLAT[kind], {}
    elif inner is not None:
        family = str(inner.get("model_type", ""))
        family = SAME_AS.get(family, family)
        sizes = {k: v for k, v in CLASS_SIZES.get(family, {}).items() if inner.get(k) is None}
    if inner is None or family not in readers:
        return None
    kept = {key: value for key, value in inner.items() if key not in NESTED_ONLY}
    tied = {k: values[k] for k in ("tie_word_embeddings",) if k in values and k not in inner}
    notes = [f"only its language model ({family}): what reads images or sound, and its projector, are left out"]
    if sizes:
        taken = ", ".join(f"{key} {size:,}" for key, size in sizes.items())
        notes.append(f"sizes that its text_config leaves out are those of transformers' class: {taken}")
    return {**kept, **sizes, **tied, "model_type": family}, tuple(notes)
