"""What a Hugging Face config says that changes results only: epsilons, rotary angles, how its router normalises.

`read_numerics(values, usual, kind)` returns them for a model type whose Graph computes what transformers computes,
checked tensor by tensor (tests/runtime/test_transformers.py) and key by key (tests/runtime/test_config_keys.py), or the
reason why it is not run. `Usual` says which keys a class reads: a key of another class is read by nobody there. Where a
file leaves a key out, the class's default counts. A block of rotary angles that the class would not compute as it reads
is refused, by the name of its key. Source: configuration and modelling classes of transformers 5.23.
Leaves out sizes (the readers of `huggingface`), and which type has which `Usual` (`model_type`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from gnomon.models.numerics import Numerics, Rotary

SCALINGS = ("linear", "dynamic", "llama3", "yarn", "longrope")
"""Types of rotary scaling that the runtime computes."""

NEEDED: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("long_factor", "short_factor"),
}
"""Type of rotary scaling -> keys of its block without which transformers refuses the file."""

BLOCK_KEYS = frozenset(
    """
    rope_type type rope_theta partial_rotary_factor factor original_max_position_embeddings low_freq_factor
    high_freq_factor beta_fast beta_slow truncate mscale mscale_all_dim attention_factor short_factor long_factor
    """.split()
)
"""Keys of a block of rotary angles: those of types other than its own say nothing there, as in transformers."""

LAYERED = ("full_attention", "sliding_attention")
"""Names of the blocks of a class whose rotary angles go by the type of a layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usual:
    """The numerics of one model type: which keys its class reads, and what counts where its file does not say."""

    eps: float = 1e-6
    """Of its norms."""
    eps_key: str = "rms_norm_eps"
    """Its key; "" for a constant."""
    offset: float = 0.0
    """Added to the weights of its norms."""
    rotary: Literal["", "whole", "part", "layered", "fixed"] = "whole"
    """How its angles are made: none; of whole heads; of the part that a key says; in layers that see all tokens and in
    those with a window by blocks of their own; always the same, of `rotary_dim` elements."""
    base: float = 10_000.0
    """Of its rotary angles."""
    base_key: str = "rope_theta"
    """Of files that have it beside the block."""
    windowed_base: float = 10_000.0
    """Of layers with a window, where angles are `layered`."""
    windowed_base_key: str = ""
    """Its key beside the blocks."""
    fraction: float = 1.0
    """Part of a head that is turned."""
    fraction_key: str = "partial_rotary_factor"
    """Of files that have it beside the block; "" for a class that does not read it there."""
    interleaved: bool = False
    """Neighbours make pairs."""
    interleaved_key: str = ""
    """Key that can turn that off."""
    first_position: int = 0
    """As `Numerics.first_position`; -1: one more than the file's pad_token_id."""
    padding: int | None = None
    """`pad_token_id`, whose row of the table is not trained."""
    padded: bool = True
    """Whether its table knows a padding token (`padding_idx` of torch)."""
    residual_key: str = ""
    """Key of what a sublayer's output is multiplied by."""
    logits: str = ""
    """Key of what logits are multiplied by, or with a `/` before it divided by."""
    logits_usual: float = 1.0
    """Where the file does not say."""
    normalised: bool = True
    """Whether weights of experts are normalised."""
    normalised_key: str = ""
    """Its key."""
    routed_key: str = ""
    """Key of the factor of experts' weights."""
    routed: float = 1.0
    """That factor."""
    least_sum_key: str = ""
    """Key of the least sum that weights of experts are divided by."""
    group_top: int = 2
    """As `Numerics.group_top`."""
    step_min_key: str = ""
    """Key of the least time step of a scan."""
    step_limit_key: str = ""
    """Key of the pair that time steps of a scan stay between."""
    block_needed: str = ""
    """What leaving the block of rotary angles out means, where that is none of our defaults: the file must have it."""
    only_longrope: bool = False
    """Whether its class computes no other scaling than longrope, by older names too (Phi-3)."""
    fraction_from: str = ""
    """Key of the elements of a head that are turned, by which released files say the part (MiniMax M2)."""

    def keys(self) -> Iterator[str]:
        """Those that this class reads."""
        yield from (
            self.eps_key,
            self.interleaved_key,
            self.residual_key,
            self.logits.removeprefix("/"),
            self.normalised_key,
            self.routed_key,
            self.least_sum_key,
            self.step_min_key,
            self.step_limit_key,
        )
        if self.rotary == "fixed":
            yield "rotary_dim"
        elif self.rotary:
            yield from ("rope_parameters", "rope_scaling", self.base_key, self.fraction_key, self.windowed_base_key)


GRANITE: dict[str, Any] = {"residual_key": "residual_multiplier", "logits": "/logits_scaling"}
SHARED: dict[str, Any] = {"normalised_key": "norm_topk_prob", "routed_key": "routed_scaling_factor"}
LAYER_NORM: dict[str, Any] = {"eps": 1e-5, "eps_key": "layer_norm_eps"}
GPT: dict[str, Any] = {"eps": 1e-5, "eps_key": "layer_norm_epsilon", "rotary": "", "padded": False}
BERT: dict[str, Any] = {"eps": 1e-12, "eps_key": "layer_norm_eps", "rotary": ""}


class _Refused(Exception):
    """Why a file is not run."""


def _refuse(key: str, reason: str) -> NoReturn:
    raise _Refused(f"{key}: {reason}")


def unread_keys(values: Mapping[str, Any], every: Collection[str], usual: Usual | None) -> tuple[str, ...]:
    """Keys of a file that are among `every` and that its own class does not read."""
    own = set() if usual is None else set(usual.keys())
    return tuple(key for key in values if key in every and key not in own)


def read_numerics(values: Mapping[str, Any], usual: Usual, kind: str) -> Numerics | str:
    """Reads the numerics of a parsed config.json of a type; a sentence where its Graph cannot be run. kind: the type's
    name."""
    try:
        return _read(values, usual, kind)
    except _Refused as refused:
        return str(refused)
    # A damaged file can hold anything in any place; whatever Python says of it, the file cannot be run, and says why.
    except (TypeError, ValueError, KeyError, ArithmeticError, AttributeError) as error:
        return f"a number that its results depend on cannot be read: {error}; correct it in the file"


def _read(values: Mapping[str, Any], usual: Usual, kind: str) -> Numerics:
    """Reads the numerics; raises what Python raises where a value is no number, or none that a float holds."""

    def number(key: str, absent: float) -> float:
        value = values.get(key) if key else None
        return absent if value is None else float(value)

    rotary, windowed = _rotaries(values, usual, kind)
    logits = number(usual.logits.removeprefix("/"), usual.logits_usual)
    # 1/0 would be met only when a loss is computed.
    if not logits:
        _refuse(usual.logits.removeprefix("/"), "logits times or over 0 are not trained; give another factor")
    padding = _padding(values, usual)
    low, high = _step_limit(values, usual)
    normalised = values.get(usual.normalised_key)
    return Numerics(
        residual_factor=number(usual.residual_key, 1.0),
        logits_factor=1 / logits if usual.logits.startswith("/") else logits,
        # RoBERTa: positions of real tokens begin behind the padding's row (create_position_ids_from_input_ids).
        first_position=usual.first_position if usual.first_position >= 0 else (padding or 0) + 1,
        padding=padding,
        padding_moves=usual.first_position < 0,
        norm_eps=number(usual.eps_key, usual.eps),
        norm_offset=usual.offset,
        rotary=rotary,
        windowed_rotary=windowed,
        normalised=usual.normalised if normalised is None else bool(normalised),
        routed_scale=number(usual.routed_key, usual.routed),
        least_sum=number(usual.least_sum_key, 1e-12) if usual.least_sum_key else 0.0,
        group_top=usual.group_top,
        step_min=number(usual.step_min_key, 0.001) if usual.step_min_key else low,
        step_max=high,
    )


def _step_limit(values: Mapping[str, Any], usual: Usual) -> tuple[float, float]:
    limit = values.get(usual.step_limit_key) if usual.step_limit_key else None
    if limit is None:
        return 0.0, math.inf
    # transformers writes infinity as {"__float__": "Infinity"}
    low, high = (float(one["__float__"] if isinstance(one, Mapping) else one) for one in limit)
    if not 0 <= low < high:
        _refuse(usual.step_limit_key, f"{limit!r} is no pair of a least and a largest time step")
    return low, high


def _padding(values: Mapping[str, Any], usual: Usual) -> int | None:
    """The row of the table that is not trained, as `padding_idx` of torch counts it."""
    padding = values.get("pad_token_id", usual.padding)
    if not usual.padded or padding is None:
        # OPT and others begin at a constant; RoBERTa's offset is the padding's id itself.
        if usual.first_position < 0:
            _refuse("pad_token_id", "its positions begin after the padding token's; give its id")
        return None
    rows = values.get("vocab_size")
    if isinstance(padding, bool) or not isinstance(padding, int) or not isinstance(rows, int):
        _refuse("pad_token_id", f"{padding!r} is no token id")
    if not -rows <= padding < rows or (usual.first_position < 0 and padding < 0):
        _refuse(
            "pad_token_id", f"{padding} is no row of a table of {rows}; give an id below vocab_size, or null for none"
        )
    # torch counts a negative padding_idx from the end.
    return padding % rows


def _rotaries(values: Mapping[str, Any], usual: Usual, kind: str) -> tuple[Rotary, Rotary | None]:
    """Reads the rotary embeddings of layers that see all tokens, and of layers with a window where they differ."""
    if not usual.rotary:
        return Rotary(), None
    if usual.rotary == "fixed":
        return _fixed(values), None
    plain, older = values.get("rope_parameters"), values.get("rope_scaling")
    for key, block in (("rope_parameters", plain), ("rope_scaling", older)):
        if block is not None and not isinstance(block, Mapping):
            _refuse(key, f"{block!r} is no block of rotary angles")
    if usual.rotary == "layered":
        return _layered(plain, older, values, usual)
    # The older key wins where both are there, as transformers 5 standardises it into the newer one.
    key, block = ("rope_scaling", older) if older else ("rope_parameters", plain)
    if block is None and usual.block_needed:
        _refuse("rope_parameters", f"leaving it out is {usual.block_needed} here; write it into the file")
    block = dict(block or {})
    # A nested block is what Gemma 3 has, and to a class of one kind of layers an unknown key.
    for name, inner in block.items():
        if isinstance(inner, Mapping):
            _refuse(
                f"{key}.{name}", f"{kind} has one block of rotary angles for all layers; give it without layer types"
            )
    if block.get("rope_theta") is None and values.get(usual.base_key) is not None:
        block["rope_theta"] = values[usual.base_key]
    if block.get("partial_rotary_factor") is None:
        block["partial_rotary_factor"] = _fraction(values, usual)
    if values.get("original_max_position_embeddings") is not None:  # wins over the block's, as in transformers
        block["original_max_position_embeddings"] = values["original_max_position_embeddings"]
    # Phi-3's classes default to 4,096, the length of the short variants they were made from.
    elif usual.only_longrope:
        block["original_max_position_embeddings"] = 4096
    named = block.get("rope_type", block.get("type", "default"))
    if usual.only_longrope and named in ("su", "yarn"):  # older names, which its class takes for this one
        block["rope_type"] = "longrope"
    elif usual.only_longrope and named not in ("default", "longrope"):
        _refuse(key, f"{kind} takes longrope, not {named!r}")
    return _rotary(block, values, usual, at=key, base=usual.base), None


def _fraction(values: Mapping[str, Any], usual: Usual) -> float:
    """Reads the fraction of a head that is turned, from keys outside the block."""
    fraction = values.get(usual.fraction_key) if usual.fraction_key else None
    turned = values.get(usual.fraction_from) if usual.fraction_from else None
    if fraction is None and turned is not None:
        # MiniMax M2's files say 64 of 128 elements, and its class reads the part.
        fraction = float(turned) / float(values.get("head_dim") or 128)
    return usual.fraction if fraction is None else float(fraction)


def _fixed(values: Mapping[str, Any]) -> Rotary:
    """GPT-J's, whose files say how many elements of a head are turned."""
    turned, width, heads = values.get("rotary_dim", 64), values.get("n_embd"), values.get("n_head")
    if not (isinstance(turned, int) and isinstance(width, int) and isinstance(heads, int) and heads):
        _refuse("rotary_dim", f"{turned!r} is no number of elements of a head")
    if not 0 < turned <= width // heads:
        _refuse("rotary_dim", f"{turned} elements are turned of a head of {width // heads}")
    return Rotary(fraction=turned * heads / width, interleaved=True)


def _layered(plain: Any, older: Any, values: Mapping[str, Any], usual: Usual) -> tuple[Rotary, Rotary | None]:
    """Reads the rotary embeddings of two blocks. Older files have one, for layers that see all tokens, and keys of
    their own for the rest."""
    blocks = dict(plain) if plain is not None else {name: {"rope_type": "default"} for name in LAYERED}
    if strange := [name for name in blocks if name not in LAYERED]:
        _refuse(f"rope_parameters.{strange[0]}", f"its rotary angles go by the type of a layer: {', '.join(LAYERED)}")
    for name, block in blocks.items():
        if block is not None and not isinstance(block, Mapping):
            _refuse(f"rope_parameters.{name}", f"{block!r} is no block of rotary angles")
    if older and plain is not None:
        _refuse("rope_scaling", "the file has rope_parameters too; keep one of them")
    full, windowed = (dict(blocks.get(name) or {}) for name in LAYERED)
    if older:
        # In silence: the model would run with unscaled angles and answer worse.
        if "rope_type" not in older and older.get("type", "default") != "default":
            _refuse(
                "rope_scaling.type", "transformers reads rope_type there, and would leave the scaling out; rename it"
            )
        full |= older
    for block, key in ((full, usual.base_key), (windowed, usual.windowed_base_key)):
        if block.get("rope_theta") is None and key and values.get(key) is not None:
            block["rope_theta"] = values[key]
    at = "rope_scaling" if older else "rope_parameters"
    for block in (full, windowed):
        if block.get("truncate") is not None and not block["truncate"]:
            _refuse(f"{at}.truncate", "transformers does not read it in a block of a type of layers; leave it out")
    first = _rotary(full, values, usual, at=at, base=usual.base)
    second = _rotary(windowed, values, usual, at=at, base=usual.windowed_base)
    return first, None if second == first else second


def _rotary(block: Mapping[str, Any], values: Mapping[str, Any], usual: Usual, *, at: str, base: float) -> Rotary:
    """Reads one rotary embedding. block: rope_parameters (since 5.0), or rope_scaling with the keys that older files
    have next to it. at: its key, for errors."""
    kind = str(block.get("rope_type", block.get("type", "default")) or "default")
    # Refused for running only: prices do not depend on angles.
    if kind not in ("default", *SCALINGS):
        _refuse(
            at, f"rotary embeddings of type {kind!r} are predicted, and not run yet; these run: {', '.join(SCALINGS)}"
        )
    for name in block:
        if name not in BLOCK_KEYS:
            _refuse(f"{at}.{name}", "unknown key of rotary angles; it may change them, so it is not ignored")
    for name in NEEDED.get(kind, ()):
        if block.get(name) is None:
            _refuse(f"{at}.{name}", f"missing, and angles of type {kind!r} need it")

    def number(name: str, absent: float) -> float:
        value = block.get(name)
        return absent if value is None else float(value)

    scaling = "" if kind == "default" else kind
    fraction = number("partial_rotary_factor", 1.0)
    if usual.rotary in ("whole", "layered"):
        # Its class would scale as many frequencies as a part has, and turn whole heads with them: an error of shapes
        # there.
        if scaling and fraction != 1.0:
            _refuse(f"{at}.partial_rotary_factor", "this class turns whole heads; leave it out, or give 1.0")
        fraction = 1.0
    elif not 0 < fraction <= 1:
        _refuse(
            usual.fraction_key or at, f"the part of a head that is turned is {fraction}; it is over 0 and at most 1"
        )
    original, longest = 0, values.get("max_position_embeddings")
    longest = None if longest is None else int(float(longest))
    if scaling:
        # transformers scales dynamic angles from max_position_embeddings, and all others from the original length.
        original_len = longest if kind == "dynamic" else block.get("original_max_position_embeddings") or longest
        original = int(original_len or 0)
        if kind != "linear" and original < 1:
            _refuse(f"{at}.original_max_position_embeddings", f"missing, and angles of type {kind!r} need it")
    factor = number("factor", 1.0) if scaling else 1.0
    theta = number("rope_theta", base)
    if not theta > 0 or (scaling and not factor > 0):
        _refuse(at, f"rope_theta {theta} and factor {factor} must be over 0")
    yarn, three, long = kind == "yarn", kind == "llama3", kind == "longrope"
    # Both stretch the cosines and sines, which scales scores by its square.
    attention = _of_longrope(block, values, original) if long else _attention_factor(block, factor) if yarn else 1.0
    return Rotary(
        base=theta,
        fraction=fraction,
        interleaved=usual.interleaved and _interleaves(values, usual),
        scaling=scaling,
        scaling_factor=factor,
        original_length=original,
        low_freq_factor=number("low_freq_factor", 1.0) if three else 1.0,
        high_freq_factor=number("high_freq_factor", 4.0) if three else 4.0,
        # 0 counts as absent, as it does in transformers (`or`).
        beta_fast=number("beta_fast", 32.0) or 32.0 if yarn else 32.0,
        beta_slow=number("beta_slow", 1.0) or 1.0 if yarn else 1.0,
        truncate=bool(block.get("truncate", True)) if yarn else True,
        short_factors=_factors(block, "short_factor") if long else "",
        long_factors=_factors(block, "long_factor") if long else "",
        attention_factor=attention,
    )


def _interleaves(values: Mapping[str, Any], usual: Usual) -> bool:
    interleaved = values.get(usual.interleaved_key) if usual.interleaved_key else None
    return True if interleaved is None else bool(interleaved)


def _factors(block: Mapping[str, Any], key: str) -> str:
    return " ".join(str(float(factor)) for factor in block.get(key) or ())


def _of_longrope(block: Mapping[str, Any], values: Mapping[str, Any], original: int) -> float:
    """Computes LongRoPE's factor: as given, or the root of 1 + ln(factor) / ln(original) (Ding et al. 2024)."""
    if (stated := block.get("attention_factor")) is not None:
        return float(stated)
    factor = block.get("factor") or (values.get("max_position_embeddings") or original) / original
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def _attention_factor(block: Mapping[str, Any], factor: float) -> float:
    """Computes YaRN's factor: as given, or 0.1 ln(factor) + 1, or the quotient of two of these (Peng et al. 2023,
    section 3.4)."""
    if (stated := block.get("attention_factor")) is not None:
        return float(stated)
    above, below = block.get("mscale"), block.get("mscale_all_dim")
    if above and below:
        return yarn_scale(factor, float(above)) / yarn_scale(factor, float(below))
    return yarn_scale(factor, 1.0)


def yarn_scale(factor: float, by: float) -> float:
    """0.1 · by · ln(factor) + 1 (Peng et al. 2023, equation 22)."""
    return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0


def latent_score_factor(values: Mapping[str, Any]) -> float:
    """What scores of multi-head latent attention are multiplied by besides the root of a head's width: the square of
    YaRN's factor with mscale_all_dim (DeepSeek-V2 and V3, whose blocks say it)."""
    block = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if not isinstance(block, Mapping) or block.get("rope_type", block.get("type", "default")) == "default":
        return 1.0
    factor, by = block.get("factor"), block.get("mscale_all_dim")
    return yarn_scale(float(factor), float(by)) ** 2 if factor and by else 1.0
