"""What a GGUF file is of: its model as a config.json of Hugging Face's, and the names and rows of its tensors there.

`config_of(file)` gives the config; `name_here(theirs)` and `name_there(name)` translate names of tensors, and
`turned(rows, heads)` is llama.cpp's order of the rows of q and k, of a head's first and second half one each in turn.
Models of architecture llama (Mistral's are such), qwen2 and qwen3. What a config here cannot say as the file means it
(scaled rotary embeddings, experts, sizes by layer) is refused by name. Pure. Leaves out tokenizers (`gguf_tokenizer`).
Source: llama.cpp, convert_hf_to_gguf.py (LlamaModel.permute, Qwen2Model) and gguf-py (constants.py: names of tensors
and of metadata).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnomon.errors import InputError
from gnomon.formats.gguf import Gguf
from gnomon.formats.gguf_tokenizer import ends
from gnomon.formats.huggingface.known import TYPES

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
HERE = {theirs: name for name, theirs in NAMES.items()}
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""Those that are read -> transformers' class; the model_type has the architecture's name."""
BESIDE = "put the model's config.json beside the file"


def name_there(name: str) -> str | None:
    """llama.cpp's name of a tensor; None for one that it has no known name for."""
    base, _, end = name.rpartition(".")
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", base)
    known = NAMES.get(layer[2] if layer else base)
    if known is None or end not in ("weight", "bias"):
        return None
    return f"blk.{layer[1]}.{known}.{end}" if layer else f"{known}.{end}"


def name_here(theirs: str) -> str | None:
    """Inverts `name_there`: our name of one of llama.cpp's tensors, None for one that has none."""
    base, _, end = theirs.rpartition(".")
    layer = re.fullmatch(r"blk\.(\d+)\.(.+)", base)
    known = HERE.get(layer[2] if layer else base)
    if known is None or end not in ("weight", "bias"):
        return None
    return f"model.layers.{layer[1]}.{known}.{end}" if layer else f"{known}.{end}"


def row_order(rows: int, heads: int) -> NDArray[np.intp]:
    """Maps each of llama.cpp's rows to the row of ours that it is."""
    # (head, half, pair) -> (head, pair, half): rotary embeddings turn element i with i + width / 2 here, and neighbours
    # in llama.cpp.
    return np.arange(rows).reshape(heads, 2, rows // heads // 2).swapaxes(1, 2).ravel()


def heads_turned(name: str, config: Mapping[str, Any]) -> int:
    """Heads whose rows llama.cpp has in another order, of a tensor by its name here; 0: it has them as they are."""
    known = TYPES.get(str(config.get("model_type")))
    if known is None or not known.gguf_turned:
        return 0
    heads = int(config["num_attention_heads"])
    if ".self_attn.q_proj." in name:
        return heads
    return int(config.get("num_key_value_heads") or heads) if ".self_attn.k_proj." in name else 0


def config_of(file: Gguf) -> dict[str, Any]:
    """InputError for a model that is not read."""
    metadata, kind = file.metadata, file.metadata.get("general.architecture")
    if kind not in ARCHITECTURES:
        raise InputError(f"{file.path} is of the architecture {kind!r}; {', '.join(ARCHITECTURES)} are read")

    def number(key: str, default: int | None = None) -> int:
        value = metadata.get(f"{kind}.{key}", default)
        if not isinstance(value, int) or value <= 0:
            raise InputError(f"{file.path}: {kind}.{key} is {value!r}, not one whole number of all layers; {BESIDE}")
        return value

    if metadata.get(f"{kind}.expert_count"):
        raise InputError(f"{file.path} has {metadata[f'{kind}.expert_count']} experts, which are not read from GGUF")
    scaling = metadata.get(f"{kind}.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in file.entries:
        how = scaling if scaling != "none" else "rope_freqs.weight"
        raise InputError(
            f"{file.path} scales its rotary embeddings ({how}) by factors that a config does not say; {BESIDE}"
        )
    heads, hidden = number("attention.head_count"), number("embedding_length")
    width = number("attention.key_length", hidden // heads)
    if number("attention.value_length", width) != width or number("rope.dimension_count", width) != width:
        raise InputError(f"{file.path} has values or rotated dims of another width than its keys' {width}; {BESIDE}")
    if "token_embd.weight" not in file.entries:
        raise InputError(f"{file.path} has no token_embd.weight; fetch the file again")
    epsilon = metadata.get(f"{kind}.attention.layer_norm_rms_epsilon")
    if not isinstance(epsilon, float):
        raise InputError(f"{file.path}: {kind}.attention.layer_norm_rms_epsilon is {epsilon!r}; {BESIDE}")
    config: dict[str, Any] = {
        "model_type": kind, "architectures": [ARCHITECTURES[kind]], "hidden_size": hidden,
        "intermediate_size": number("feed_forward_length"), "num_hidden_layers": number("block_count"),
        "num_attention_heads": heads, "num_key_value_heads": number("attention.head_count_kv", heads),
        "head_dim": width, "vocab_size": file.entries["token_embd.weight"].shape[0],
        # The file has epsilon in float32: seven digits give back the decimal that was meant.
        "max_position_embeddings": number("context_length"), "rms_norm_eps": float(f"{epsilon:.7g}"),
        "rope_theta": float(metadata.get(f"{kind}.rope.freq_base", 10000.0)),
        "tie_word_embeddings": "output.weight" not in file.entries, "hidden_act": "silu", "torch_dtype": "bfloat16",
    }  # fmt: skip
    if kind == "llama":
        config |= {
            "attention_bias": "blk.0.attn_q.bias" in file.entries,
            "mlp_bias": "blk.0.ffn_up.bias" in file.entries,
        }
    if found := ends(file):
        config["eos_token_id"] = found if len(found) > 1 else found[0]
    begin = metadata.get("tokenizer.ggml.bos_token_id")
    return {**config, "bos_token_id": begin} if isinstance(begin, int) else config
