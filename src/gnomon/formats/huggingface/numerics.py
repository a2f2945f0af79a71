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

SCALINGS = ("linear", "llama3", "yarn")
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
    normalised: bool = True
    """Whether weights of experts are normalised."""
    group_top: int = 2
    """As `Numerics.group_top`."""


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
}
"""model_type -> what its class says where the file does not. Source: configuration classes of transformers 5.23."""


def numerics_of(values: Mapping[str, Any]) -> Numerics | str:
    """Of a parsed config.json; a sentence where its Graph cannot be run."""
    kind = values.get("model_type")
    usual = RUNNABLE.get(str(kind))
    if usual is None:
        return f"model_type {kind!r} is predicted, and not run yet; these run: {', '.join(sorted(RUNNABLE))}"
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
    return Numerics(
        norm_eps=eps,
        norm_offset=usual.offset,
        rotary=rotary,
        windowed_rotary=windowed,
        normalised=bool(values.get("norm_topk_prob", usual.normalised)),
        routed_scale=float(values.get("routed_scaling_factor") or 1.0),
        group_top=usual.group_top,
    )


def _rotary(given: Mapping[str, Any], values: Mapping[str, Any], usual: Usual, *, base: float) -> Rotary | str:
    """given: rope_parameters (since 5.0), or rope_scaling beside keys of their own (before)."""
    kind = str(given.get("rope_type", given.get("type", "default")) or "default")
    if kind not in ("default", *SCALINGS):
        return f"rotary embeddings of type {kind!r} are predicted, and not run yet; these run: {', '.join(SCALINGS)}"

    def first(*names: str, absent: float) -> float:
        found = (source.get(name) for name in names for source in (given, values))
        return float(next((value for value in found if value is not None), absent))

    scaling = "" if kind == "default" else kind
    original = int(first("original_max_position_embeddings", "max_position_embeddings", absent=0)) if scaling else 0
    factor = first("factor", absent=1.0) if scaling else 1.0
    return Rotary(
        base=first("rope_theta", "rotary_emb_base", absent=base),
        fraction=first("partial_rotary_factor", "rotary_pct", absent=usual.fraction),
        interleaved=usual.interleaved and bool(values.get("rope_interleave", True)),
        scaling=scaling,
        scaling_factor=factor,
        original_length=original,
        low_freq_factor=first("low_freq_factor", absent=1.0) if kind == "llama3" else 1.0,
        high_freq_factor=first("high_freq_factor", absent=4.0) if kind == "llama3" else 4.0,
        beta_fast=first("beta_fast", absent=32.0) if kind == "yarn" else 32.0,
        beta_slow=first("beta_slow", absent=1.0) if kind == "yarn" else 1.0,
        truncate=bool(given.get("truncate", True)),
        attention_factor=_attention_factor(given, factor) if kind == "yarn" else 1.0,
    )


def _attention_factor(given: Mapping[str, Any], factor: float) -> float:
    """Of YaRN: as given, or 0.1 ln(factor) + 1, or the quotient of two of these (Peng et al. 2023, section 3.4)."""

    def scale(by: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0

    if (said := given.get("attention_factor")) is not None:
        return float(said)
    above, below = given.get("mscale"), given.get("mscale_all_dim")
    return scale(float(above)) / scale(float(below)) if above and below else scale(1.0)
