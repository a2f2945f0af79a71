"""All that is known of one `model_type` of Hugging Face's configs: `ModelType`.

A new type is one value of it, beside the reader of its keys, in `configured`, `decoders`, `mixtures`, `older`,
`hybrids` or `encoders`; a decoder that its keys describe alone is a `Shape` in `generic`. `known` finds them by name.
Leaves out what is done with it: reading (`read`), numbers (`numerics`), weights (`weights`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from gnomon.formats.huggingface.numerics import Usual
from gnomon.formats.huggingface.parts import Reader
from gnomon.formats.huggingface.weights import Family


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelType:
    """One model type: its shape, numerics and names of weights."""

    name: str
    """As files have it."""
    reader: Reader
    """Makes a Graph, or a config of ours, of a file's keys."""
    numerics: Usual | None
    """What its class reads that changes results only; None where it is predicted, and not run."""
    weights: Family
    """Where its files have the Graph's parameters."""
    by_keys: bool = False
    """Whether its keys alone describe it (`generic`)."""
    wide_norm: bool = False
    """Whether its RMSNorm multiplies by its weight in fp32 and narrows then, where Llama's narrows first. Source:
    transformers 5.23."""
    layer_norm: Literal["", "wide", "steps"] = ""
    """How its LayerNorm runs in fp32: `wide`, one kernel on a copy of the rows (OLMo); `steps`, op by op (Cohere).
    Empty: one kernel in the compute dtype, as torch's."""
    attention: Literal["", "by_flash", "op_by_op"] = ""
    """How its attention runs: in ops of its own, unless FlashAttention is asked for, or always. Empty: by PyTorch's
    kernels. Source: `_supports_sdpa` and `_supports_flash_attn` of its class."""
    gguf: str = ""
    """The architecture of llama.cpp as which its weights are written; empty: they are not."""
    gguf_turned: bool = False
    """Whether llama.cpp has the rows of its q and k in another order: those of a head's two halves in turn."""
    llama_layers: bool = False
    """Whether its layers are Llama's: linears and norms by these names, and a norm multiplies by its weight as it
    lies, so that a scale of a linear's inputs is taken back in what makes them (AWQ)."""
    same_keys: tuple[str, ...] = ()
    """Other types whose keys its reader reads to the same network."""
    inside: tuple[str, ...] = ()
    """The same, of language models inside a config of several models."""
    multimodal_types: tuple[str, ...] = ()
    """Types whose files have its keys beside those of what reads images or sound."""
    class_sizes: Mapping[str, int] = field(default_factory=dict)
    """Sizes of its class's constructor, which a config inside another leaves out; empty: such a file must say them.
    Source: transformers 4.57 (the same since each class exists)."""


def class_sizes(hidden: int, ffn: int, layers: int, heads: int, vocab: int, kv_heads: int = 0) -> Mapping[str, int]:
    """`ModelType.class_sizes` by the keys of configs. kv_heads: 0 for a class that has as many as heads."""
    sizes = {"hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {**sizes, "vocab_size": vocab, **({"num_key_value_heads": kv_heads} if kv_heads else {})}
