"""What a Hugging Face config says that changes results only: epsilons, rotary angles, how its router normalises.

`numerics_of(values)` returns them for a model type whose Graph computes what transformers computes, checked tensor by
tensor (tests/runtime/test_transformers.py), or the reason why its Graph is for predictions only. Where a file leaves a
key out, the class's default counts, as elsewhere in `formats`. Leaves out sizes (the readers of `hf`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gnomon.models.numerics import Numerics, Rotary

SCALINGS = ("linear", "dynamic", "llama3", "yarn", "longrope")
"""Types of rotary scaling that the runtime computes."""

EPS_KEYS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")
"""Names of the epsilon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usual:
    """Of one model type, where its file does not say."""

    eps: float = 1e-6
    """Of its norms."""
    offset: float = 0.0
    """Added to the weights of its norms."""
    base: float = 10_000.0
    """Of its rotary angles."""
    windowed_base: float | None = None
    """Of layers with a window."""
    fraction: float = 1.0
    """Part of a head that is turned."""
    interleaved: bool = False
    """Neighbours make pairs."""
    first_position: int = 0
    """As `Numerics.first_position`; -1: one more than the file's pad_token_id."""
    logits: str = ""
    """Key of what logits are multiplied by, or with a `/` before it divided by."""
    logits_usual: float = 1.0
    """Where the file does not say."""
    normalised: bool = True
    """Whether weights of experts are normalised."""
    group_top: int = 2
    """As `Numerics.group_top`."""
    step_min: bool = False
    """Time steps of a scan are at least the file's `time_step_min`."""


RUNNABLE: Mapping[str, Usual] = {
    "llama": Usual(),
    "mistral": Usual(),
    "qwen2": Usual(),
    "qwen3": Usual(),
    "gemma": Usual(offset=1.0),
    "gemma2": Usual(offset=1.0),
    "gemma3_text": Usual(offset=1.0, base=1_000_000.0, windowed_base=10_000.0),
    "phi3": Usual(eps=1e-5),
    "gpt2": Usual(eps=1e-5),
    "gpt_neox": Usual(eps=1e-5, fraction=0.25),
    "mixtral": Usual(eps=1e-5, base=1_000_000.0),
    "qwen3_moe": Usual(normalised=False),
    "deepseek_v3": Usual(interleaved=True),
    "deepseek_v2": Usual(interleaved=True, normalised=False, group_top=1),
    "gpt_oss": Usual(eps=1e-5, base=150_000.0),
    "bert": Usual(eps=1e-12),
    "roberta": Usual(eps=1e-12, first_position=-1),
    "xlm-roberta": Usual(eps=1e-12, first_position=-1),
    "vit": Usual(eps=1e-12),
    "t5": Usual(),
    "mt5": Usual(),
    "smollm3": Usual(base=2_000_000.0),
    "granite": Usual(logits="/logits_scaling"),
    "olmo": Usual(eps=1e-5),
    "olmo2": Usual(eps=1e-5),
    "olmo3": Usual(eps=1e-5, base=500_000.0),
    "stablelm": Usual(eps=1e-5, fraction=0.25),
    "cohere": Usual(eps=1e-5, base=500_000.0, interleaved=True, logits="logit_scale", logits_usual=0.0625),
    "cohere2": Usual(eps=1e-5, interleaved=True, logits="logit_scale", logits_usual=0.0625),
    "glm": Usual(eps=1.5625e-7, fraction=0.5, interleaved=True),
    "glm4": Usual(eps=1.5625e-7, fraction=0.5, interleaved=True),
    "seed_oss": Usual(),
    "ernie4_5": Usual(eps=1e-5, base=500_000.0, interleaved=True),
    "exaone4": Usual(eps=1e-5),
    "arcee": Usual(eps=1e-5),
    "nemotron": Usual(eps=1e-5, offset=1.0, fraction=0.5),
    "ministral": Usual(),
    "phi": Usual(eps=1e-5, fraction=0.5),
    "starcoder2": Usual(eps=1e-5),
    "falcon": Usual(eps=1e-5),
    "bloom": Usual(eps=1e-5),
    "mpt": Usual(eps=1e-5),
    "opt": Usual(eps=1e-5, first_position=2),
    "gptj": Usual(eps=1e-5, interleaved=True),
    "gpt_bigcode": Usual(eps=1e-5),
    "gpt_neo": Usual(eps=1e-5),
    "minimax_m2": Usual(base=5_000_000.0),
    "granitemoe": Usual(logits="/logits_scaling"),
    "ernie4_5_moe": Usual(eps=1e-5, base=500_000.0, interleaved=True),
    "olmoe": Usual(eps=1e-5, normalised=False),
    "glm4_moe": Usual(eps=1e-5, fraction=0.5),
    "dots1": Usual(),
    "mamba2": Usual(eps=1e-5),
    "bamba": Usual(eps=1e-5, fraction=0.5),
    "granitemoehybrid": Usual(logits="/logits_scaling"),
    "nemotron_h": Usual(eps=1e-5, step_min=True),
}
"""model_type -> what its class says where the file does not. Source: configuration classes of transformers 5.23."""


def numerics_of(values: Mapping[str, Any]) -> Numerics | str:
    """Of a parsed config.json; a sentence where its Graph cannot be run."""
    try:
        return _read(values)
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        return f"a number that its results depend on cannot be read: {error}; correct it in the file"


def _read(values: Mapping[str, Any]) -> Numerics | str:
    """The same; what Python raises where a value is no number, or none that a float holds."""
    kind = values.get("model_type")
    usual = RUNNABLE.get(str(kind))
    if usual is None:
        return f"model_type {kind!r} is predicted, and not run yet; docs/weights.md lists the {len(RUNNABLE)} that are"
    eps = next((float(values[key]) for key in EPS_KEYS if values.get(key) is not None), usual.eps)
    given = values.get("rope_parameters") or values.get("rope_scaling") or {}
    layered = {key: inner for key, inner in given.items() if isinstance(inner, Mapping)}
    full = layered.get("full_attention", {} if layered else given)
    rotary = _rotary(full, values, usual, base=usual.base)
    if isinstance(rotary, str):
        return rotary
    windowed: Rotary | None = None
    if usual.windowed_base is not None:
        local = layered.get("sliding_attention", {"rope_theta": values.get("rope_local_base_freq")})
        read = _rotary(local, {}, usual, base=usual.windowed_base)
        if isinstance(read, str):
            return read
        windowed = read
    logits = values.get(usual.logits.removeprefix("/"))
    logits = usual.logits_usual if logits is None else float(logits)
    return Numerics(
        residual_factor=float(values.get("residual_multiplier") or 1.0),
        logits_factor=1 / logits if usual.logits.startswith("/") else logits,
        first_position=usual.first_position if usual.first_position >= 0 else _padding(values) + 1,
        norm_eps=eps,
        norm_offset=usual.offset,
        rotary=rotary,
        windowed_rotary=windowed,
        normalised=bool(values.get("norm_topk_prob", usual.normalised)),
        routed_scale=float(values.get("routed_scaling_factor") or 1.0),
        group_top=usual.group_top,
        step_min=float(values.get("time_step_min", 0.001)) if usual.step_min else 0.0,
    )


def _rotary(given: Mapping[str, Any], values: Mapping[str, Any], usual: Usual, *, base: float) -> Rotary | str:
    """given: rope_parameters (since 5.0), or rope_scaling beside keys of their own (before)."""
    kind = str(given.get("rope_type", given.get("type", "default")) or "default")
    if kind not in ("default", *SCALINGS):
        return f"rotary embeddings of type {kind!r} are predicted, and not run yet; these run: {', '.join(SCALINGS)}"

    def first(*names: str, absent: float) -> float:
        candidates = (source.get(name) for name in names for source in (given, values))
        return float(next((value for value in candidates if value is not None), absent))

    scaling = "" if kind == "default" else kind
    trained = ("max_position_embeddings",) if kind == "dynamic" else ()  # as transformers has it
    original = int(first(*trained, "original_max_position_embeddings", "max_position_embeddings", absent=0))
    original = original if scaling else 0
    factor = first("factor", absent=1.0) if scaling else 1.0
    return Rotary(
        base=first("rope_theta", "rotary_emb_base", absent=base),
        fraction=_fraction(values) or first("partial_rotary_factor", "rotary_pct", absent=usual.fraction),
        interleaved=usual.interleaved and bool(values.get("rope_interleave", True)),
        scaling=scaling,
        scaling_factor=factor,
        original_length=original,
        low_freq_factor=first("low_freq_factor", absent=1.0) if kind == "llama3" else 1.0,
        high_freq_factor=first("high_freq_factor", absent=4.0) if kind == "llama3" else 4.0,
        beta_fast=first("beta_fast", absent=32.0) if kind == "yarn" else 32.0,
        beta_slow=first("beta_slow", absent=1.0) if kind == "yarn" else 1.0,
        truncate=bool(given.get("truncate", True)),
        short_factors=_factors(given, "short_factor") if kind == "longrope" else "",
        long_factors=_factors(given, "long_factor") if kind == "longrope" else "",
        attention_factor=_of_longrope(given, values, original)
        if kind == "longrope"
        else _attention_factor(given, factor)
        if kind == "yarn"
        else 1.0,
    )


def _padding(values: Mapping[str, Any]) -> int:
    """Of RoBERTa's, whose class says 1."""
    given = values.get("pad_token_id")
    return 1 if given is None else int(given)


def _fraction(values: Mapping[str, Any]) -> float:
    """Of files that say how many elements of a head are turned (GPT-J); 0 for others."""
    turned, width, heads = (values.get(key) for key in ("rotary_dim", "n_embd", "n_head"))
    return turned * heads / width if turned and width and heads else 0.0


def _factors(given: Mapping[str, Any], key: str) -> str:
    return " ".join(str(float(factor)) for factor in given.get(key) or ())


def _of_longrope(given: Mapping[str, Any], values: Mapping[str, Any], original: int) -> float:
    """As given, or the root of 1 + ln(factor) / ln(original) (Ding et al. 2024)."""
    if (stated := given.get("attention_factor")) is not None:
        return float(stated)
    factor = given.get("factor") or (values.get("max_position_embeddings") or original) / original
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def _attention_factor(given: Mapping[str, Any], factor: float) -> float:
    """Of YaRN: as given, or 0.1 ln(factor) + 1, or the quotient of two of these (Peng et al. 2023, section 3.4)."""

    def scale(by: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0

    if (stated := given.get("attention_factor")) is not None:
        return float(stated)
    above, below = given.get("mscale"), given.get("mscale_all_dim")
    return scale(float(above)) / scale(float(below)) if above and below else scale(1.0)
