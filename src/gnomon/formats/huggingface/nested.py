"""The language model inside a Hugging Face config of several models (images, sound and text).

`language_model(values, types)` returns its keys as a config of its own, and notes on what was left out or filled in.
transformers writes a config inside another as its difference from the class's defaults, sizes too (the files of Gemma 3
and LLaVA 1.5), so here, and only here, absent sizes are the class's. Leaves out: the readers (read and its neighbours),
and everything that reads images or sound.
"""

from __future__ import annotations

from collections.abc import Mapping

from gnomon.formats.huggingface.model_type import ModelType
from gnomon.models.presets import only_words

PLACES = ("text_config", "llm_config", "language_config")
"""Keys that hold the language model, the first that is there: transformers', InternVL's, DeepSeek-VL's."""

NOT_TEXT = ("vision_config", "audio_config", "projector_hidden_act")
"""Keys of flat files that say nothing of the language model; so do all that end in _token_id."""

NESTED_ONLY = frozenset({"is_composition", "num_image_tokens"})
"""Keys of a language model's config that only its place inside another explains."""


def language_model(
    values: Mapping[str, object], types: Mapping[str, ModelType]
) -> tuple[Mapping[str, object], tuple[str, ...]] | None:
    """The keys of the language model, and the notes; None where there is none whose keys a reader of
    its own reads. types: all that are known."""
    inner = next((config for key in PLACES if isinstance(config := values.get(key), Mapping)), None)
    kind = str(values.get("model_type", ""))
    flat = {other: one.name for one in types.values() for other in one.multimodal_types}
    inside = {other: one.name for one in types.values() for other in one.inside}
    if inner is None and kind in flat:
        inner = {k: v for k, v in values.items() if k not in NOT_TEXT and not k.endswith("_token_id")}
        family, sizes = flat[kind], {}
    elif inner is not None:
        family = str(inner.get("model_type", ""))
        family = inside.get(family, family)
        known = types[family].class_sizes if family in types else {}
        sizes = {k: v for k, v in known.items() if inner.get(k) is None}
    if inner is None or family not in types or types[family].by_keys:
        return None
    text_values = {key: value for key, value in inner.items() if key not in NESTED_ONLY}
    tied = {k: values[k] for k in ("tie_word_embeddings",) if k in values and k not in inner}
    notes = [only_words(family)]
    if sizes:
        defaults_text = ", ".join(f"{key} {size:,}" for key, size in sizes.items())
        notes.append(f"sizes that its text_config leaves out are those of transformers' class: {defaults_text}")
    return {**text_values, **sizes, **tied, "model_type": family}, tuple(notes)
