"""What is known of a model's release beside its network: how long a text it was made for, how its weights are stored.

`context_of(name)` returns tokens of prompt and answer together, or None where nobody says: what a config.json says in
`max_position_embeddings`, and presets' own. Rotary models have no table that ends, so their Graph does not know it, and
engines refuse to start beyond it. `stored_of(name)` is the format of weights that a preset was released in, or that the
name of a checkpoint says. Leaves out tables of positions, which the Graph has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gnomon.formats.job import read_source
from gnomon.formats.keys import read_json

KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")
"""Of configs, as vllm looks for them (the sdist of 0.19.0, config/model.py _get_and_verify_max_len)."""
SCALED = ("linear", "dynamic", "yarn")
"""Types of rotary scaling whose factor lengthens what the file says; others' files say it lengthened."""
PRESETS: Mapping[str, int] = {
    "deepseek-v": 163_840,
    "gemma-2": 8192,
    "gemma-3-1b": 32_768,
    "gemma-3-": 131_072,
    "gpt-neox": 2048,
    "gpt-oss": 131_072,
    "llama-2": 4096,
    "llama-3.": 131_072,
    "mistral-7b": 32_768,
    "mistral-nemo": 131_072,
    "mixtral-8x22b": 65_536,
    "mixtral-8x7b": 32_768,
    "pythia": 2048,
    "qwen2.5-0.5b": 32_768,
    "qwen2.5-1.5b": 32_768,
    "qwen2.5-3b": 32_768,
    "qwen2.5-": 131_072,
    "qwen3-": 40_960,
}
"""How the name of a preset begins -> max_position_embeddings of its config.json on the Hugging Face hub, the longest of
its releases; the first that fits counts. From memory, not verified, for gemma, deepseek and qwen2.5."""


STORED: Mapping[str, str] = {
    "gpt-oss": "mxfp4",
    "deepseek-v3": "fp8-block",
    "deepseek-r1": "fp8-block",
    "kimi-k2": "fp8-block",
}
"""How the name of a model begins -> the format that its weights were released in, where that is not 16 bits."""
SAID: Mapping[str, str] = {
    r"nvfp4|[-_]fp4\b": "nvfp4",
    r"mxfp4": "mxfp4",
    r"[-_.]fp8|fp8[-_.]": "fp8",
    r"awq|gptq[-_]int4|w4a16|[-_]int4|4[-_]?bit": "int4-wo",
    r"w8a8": "int8",
    r"gptq[-_]int8|w8a16|[-_]int8|8[-_]?bit": "int8-wo",
    r"q8_0": "q8_0",
    r"q6_k": "q6_k",
    r"q5_": "q5_k",
    r"q4_0": "q4_0",
    r"q4_|iq4": "q4_k",
    r"q3_|iq3": "q3_k",
    r"q2_|iq2": "q2_k",
}
"""Patterns of names of checkpoints, lower case -> format; the first that is found counts."""


def stored_of(name: str | None) -> str | None:
    """Storage that a preset's, repository's or file's name says; None where it says nothing: 16 bits."""
    last = _last(name)
    form_named = next((form for pattern, form in SAID.items() if re.search(pattern, last)), None)
    return form_named or next((form for begins, form in STORED.items() if last.startswith(begins)), None)


def _last(name: str | None) -> str:
    """The part of a repository's, preset's or file's name that tells models apart."""
    return (name or "").rstrip("/").rpartition("/")[2].lower().removeprefix("meta-")


def context_of(name: str | None) -> int | None:
    """Tokens that the model was made for; None where nothing says. name: a preset's, a config.json, or a folder with
    one."""
    path = Path(name or "").expanduser()
    path = path / "config.json" if path.is_dir() else path
    if path.suffix == ".json" and path.is_file():
        return _stated_bits(read_json(read_source(path)[0], str(path), infinite=True))
    return next((tokens for begins, tokens in PRESETS.items() if _last(name).startswith(begins)), None)


def _stated_bits(values: Mapping[str, Any]) -> int | None:
    inner = values.get("text_config")
    values = {**values, **(inner if isinstance(inner, Mapping) else {})}
    found = [int(values[key]) for key in KEYS if type(values.get(key)) is int]
    scaling = values.get("rope_scaling") or values.get("rope_parameters")
    longest = min(found, default=None)
    if longest is None or not isinstance(scaling, Mapping):
        return longest
    factor, before = scaling.get("factor"), scaling.get("original_max_position_embeddings")
    if scaling.get("rope_type", scaling.get("type")) not in SCALED or not isinstance(factor, (int, float)):
        return longest
    return max(longest, int((before if isinstance(before, int) else longest) * factor))
