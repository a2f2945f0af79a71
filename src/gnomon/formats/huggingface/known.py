"""Every `model_type` that is known, by name: TYPES, and what is asked of one.

`numerics_of(values)` and `layout(graph, model_type)` are what a file of a type says and where its weights lie. Leaves
out the types themselves (`model_type` says where they stand).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gnomon.formats.huggingface.configured import CONFIGURED
from gnomon.formats.huggingface.decoders import DECODERS
from gnomon.formats.huggingface.encoders import ENCODERS
from gnomon.formats.huggingface.generic import GENERIC
from gnomon.formats.huggingface.hybrids import HYBRIDS
from gnomon.formats.huggingface.mixtures import MIXTURES
from gnomon.formats.huggingface.model_type import ModelType
from gnomon.formats.huggingface.numerics import read_numerics, unread_keys
from gnomon.formats.huggingface.older import OLDER
from gnomon.formats.huggingface.parts import Reader
from gnomon.formats.huggingface.weights import USUAL, Layout, layout_of
from gnomon.graph import Graph
from gnomon.models.numerics import Numerics

TYPES: Mapping[str, ModelType] = {
    one.name: one for one in (*CONFIGURED, *DECODERS, *OLDER, *MIXTURES, *HYBRIDS, *ENCODERS, *GENERIC)
}
"""By name."""
READERS: Mapping[str, Reader] = {name: one.reader for name, one in TYPES.items() if not one.by_keys}
"""Of types that have a reader of their own."""
SAME_KEYS: Mapping[str, str] = {other: one.name for one in TYPES.values() for other in (*one.same_keys, *one.inside)}
"""model_type -> the one whose reader reads its keys to the same network."""
RUNNABLE: tuple[str, ...] = tuple(name for name, one in TYPES.items() if one.numerics is not None)
"""Types that the runtime runs."""

NOT_DESCRIBED = {
    "qwen3_next": "three of four layers are gated DeltaNet, whose kernels have no price",
    "qwen3_5": "three of four layers are gated DeltaNet, whose kernels have no price",
    "kimi_linear": "its layers are Kimi delta attention, whose kernels have no price",
    "falcon_h1": "its layers run attention and Mamba side by side",
    "jamba": "its Mamba is the first version, whose scan has no price",
    "mamba": "its scan is Mamba's first version, which has no price",
    "zamba2": "its attention is one block that layers share",
    **dict.fromkeys(
        ("gemma3n", "gemma3n_text"),
        "each layer adds an embedding of its own to several residual streams, and layers share keys",
    ),
    "lfm2": "two of three layers are short convolutions between gates",
    "minimax": "seven of eight layers are lightning attention, whose kernels have no price",
    "deepseek_v32": "its attention chooses keys by an index of its own, which has no price",
    "glm_moe_dsa": "its attention chooses keys by an index of its own, which has no price",
    "deepseek_v4": "its attention reads compressed keys, chosen by an index that has no price",
    "longcat_flash": "a layer has two attentions, and experts beside them that compute nothing",
    "apertus": "its feed-forward's activation (xIELU) has no price",
    "whisper": "its encoder reads sound, which is no text",
    "mllama": "its language model attends to the image in layers of their own",
}
"""model_type -> why there is no reader, for models that people ask for."""


def numerics_of(values: Mapping[str, Any]) -> Numerics | str:
    """What a parsed config.json says that changes results only; a sentence where its Graph cannot be run."""
    kind = str(values.get("model_type"))
    usual = TYPES[kind].numerics if kind in TYPES else None
    if usual is None:
        return (
            f"model_type {values.get('model_type')!r} is predicted, and not run yet; docs/weights.md lists the "
            f"{len(RUNNABLE)} that are"
        )
    return read_numerics(values, usual, kind)


def unread(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Keys of a file that other classes read for their numerics and that its own class does not."""
    every = {key for one in TYPES.values() if one.numerics is not None for key in one.numerics.keys()} - {""}
    kind = TYPES.get(str(values.get("model_type")))
    return unread_keys(values, every, None if kind is None else kind.numerics)


def layout(graph: Graph, model_type: str) -> Layout:
    """Says where the weights lie of a Graph that was read from a config.json of this type."""
    return layout_of(graph, TYPES[model_type].weights if model_type in TYPES else USUAL)
