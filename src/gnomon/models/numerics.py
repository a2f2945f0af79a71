"""What changes a model's results and neither its shapes nor its work: epsilons, rotary angles, how routers normalise.

`with_numerics(graph, numerics)` writes them onto the ops as attributes, where the runtime reads them; a value that is
the op's default is not written. Prices read none of them. Leaves out what does change shapes or work (windows, soft
caps, scales of the scores), which the builders of the models say themselves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from gnomon.graph import Block, Graph, Op
from gnomon.ops.op import AttrValue, attrs


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """Angles of a rotary embedding (Su et al. 2021); the names are those of `rope_parameters` in transformers."""

    base: float = 10_000.0
    """`rope_theta`: the i-th pair of n turns by base^(-i/n) a position."""
    fraction: float = 1.0
    """`partial_rotary_factor`: the part of a head, from its first element, that is turned."""
    interleaved: bool = False
    """Pairs are neighbours (GPT-J, DeepSeek-V3) rather than elements of the two halves."""
    scaling: str = ""
    """`rope_type`: none, `linear`, `dynamic`, `llama3`, `yarn` or `longrope`."""
    scaling_factor: float = 1.0
    """How many times the original length."""
    original_length: int = 0
    """`original_max_position_embeddings`, in tokens."""
    low_freq_factor: float = 1.0
    """Of `llama3`."""
    high_freq_factor: float = 4.0
    """Of `llama3`."""
    beta_fast: float = 32.0
    """Of `yarn`."""
    beta_slow: float = 1.0
    """Of `yarn`."""
    truncate: bool = True
    """Of `yarn`: its range begins and ends at whole pairs."""
    short_factors: str = ""
    """Of `longrope`: what each pair's frequency is divided by in sequences up to the original length, with spaces
    between."""
    long_factors: str = ""
    """Of `longrope`, in longer ones."""
    attention_factor: float = 1.0
    """Sines and cosines are multiplied by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """The numbers and functions of a model that its sizes do not say: epsilons, rotary, factors, scores."""

    norm_eps: float = 1e-5
    """Added to the mean square or the variance."""
    latent_eps: float = 1e-6
    """The same of norms of latents of q, k and v, where the public code has a constant (DeepSeek-V2 and V3)."""
    norm_offset: float = 0.0
    """Added to a norm's weight: 1 in Gemma, whose weights begin at 0."""
    rotary: Rotary = Rotary()
    """Of layers that see all tokens, or of all."""
    windowed_rotary: Rotary | None = None
    """Of layers with a sliding window where it differs (Gemma 3)."""
    residual_factor: float = 1.0
    """What a sublayer adds to the residual stream is multiplied by it (Granite)."""
    logits_factor: float = 1.0
    """Of the logits (Granite, Cohere)."""
    first_position: int = 0
    """Row of the position embedding that the first token reads (OPT, RoBERTa: 2)."""
    padding: int | None = None
    """Token id whose row of the table is looked up and not trained."""
    padding_moves: bool = False
    """Positions count tokens other than the padding (RoBERTa), which the runtime does not: it refuses rows with it."""
    normalised: bool = True
    """A token's router weights are divided by their sum (`norm_topk_prob`)."""
    routed_scale: float = 1.0
    """Factor of the router's weights after that (`routed_scaling_factor`)."""
    group_top: int = 2
    """How many of a group's scores are added up to choose groups of experts: 2 in DeepSeek-V3, 1 in V2."""
    least_sum: float = 0.0
    """Least sum that a router's weights are divided by (`moe_norm_min` of ERNIE 4.5)."""
    step_min: float = 0.0
    """Least time step of a state-space scan (`time_step_min` of Nemotron-H, `time_step_limit` of others)."""
    step_max: float = math.inf
    """Largest."""


def _llama3(factor: float) -> Numerics:
    return Numerics(rotary=Rotary(base=500_000.0, scaling="llama3", scaling_factor=factor, original_length=8192))


PRESETS: Mapping[str, Numerics] = {
    "llama-mini": Numerics(),
    "llama-tiny": Numerics(),
    "llama-2": Numerics(),
    "llama-3.1": _llama3(8.0),
    "llama-3.2": _llama3(32.0),
    "llama-3.3": _llama3(8.0),
    "mistral-7b": Numerics(),
    "mixtral": Numerics(rotary=Rotary(base=1_000_000.0)),
    "qwen2.5": Numerics(norm_eps=1e-6, rotary=Rotary(base=1_000_000.0)),
    "qwen3": Numerics(norm_eps=1e-6, rotary=Rotary(base=1_000_000.0)),
    "gemma-2": Numerics(norm_eps=1e-6, norm_offset=1.0),
    "gpt2": Numerics(),
    "gpt-neox": Numerics(),
    "pythia": Numerics(),
}
"""How the name of a preset begins -> what its config.json on the Hugging Face hub says."""


def with_numerics(graph: Graph, numerics: Numerics) -> Graph:
    """The graph with these attributes on its norms, rotary embeddings and routers."""
    return replace(graph, blocks=tuple(_block(block, numerics) for block in graph.blocks))


def _block(block: Block, n: Numerics) -> Block:
    windowed = any(op.does == "attends" and op.attr("window", 0) for op in block.ops)
    rotary = n.windowed_rotary if windowed and n.windowed_rotary is not None else n.rotary
    # a builder that says which part is turned is of a model whose files say it by several keys
    rotary_fraction = {"fraction": rotary.fraction} if any(op.attr("fraction", 0.0) for op in block.ops) else {}
    written: Mapping[str, Mapping[str, AttrValue]] = {
        "norm": _changed(n, ("norm_eps", "norm_offset"), strip="norm_"),
        "rotary": {**rotary_fraction, **_changed(rotary, tuple(field.name for field in fields(Rotary)))},
        "router": _changed(n, ("normalised", "routed_scale", "group_top", "least_sum")),
        "state_space": _changed(n, ("step_min", "step_max")),
    }
    padding: dict[str, AttrValue] = {} if n.padding is None else {"padding": n.padding}
    if n.padding_moves:
        padding["padding_moves"] = True
    own: Mapping[str, Mapping[str, AttrValue]] = {
        "add": {"factor": n.residual_factor} if n.residual_factor != 1.0 else {},
        "linear": {"factor": n.logits_factor} if n.logits_factor != 1.0 else {},
        "embedding": {"first": n.first_position} if n.first_position else {},
    }
    latent: Mapping[str, AttrValue] = {**written["norm"], "eps": n.latent_eps}
    # Residual sums, lm_head and tables of positions take `own`; an op elsewhere takes what its kind does.
    places = {op.path for op in block.ops if _is_special(op)}

    def changes_of(op: Op) -> Mapping[str, AttrValue]:
        if _norms_latent(op):
            return latent
        if _reads_tokens(op):
            return padding
        return (own if op.path in places else written).get(op.kind, {})

    return replace(block, ops=tuple(_op(op, changes_of(op)) for op in block.ops))


def _is_special(op: Op) -> bool:
    """Whether an op is one that a factor of the model is about, or reads rows of positions."""
    ends = {"add": op.path.endswith("_residual"), "linear": op.path == "lm_head"}
    return ends.get(op.kind, op.does == "looks up" and "position" in op.path)


def _norms_latent(op: Op) -> bool:
    return op.does == "normalises" and op.path.endswith(("q_a_layernorm", "kv_a_layernorm"))


def _reads_tokens(op: Op) -> bool:
    """Whether an op looks token ids up."""
    return op.does == "looks up" and op.inputs[0] in ("input_ids", "next_ids")


def _op(op: Op, changes: Mapping[str, AttrValue]) -> Op:
    return replace(op, attrs=attrs(**{**dict(op.attrs), **changes})) if changes else op


def _changed(of: Rotary | Numerics, names: tuple[str, ...], *, strip: str = "") -> dict[str, AttrValue]:
    usual = type(of)()
    changes = {name: getattr(of, name) for name in names if getattr(of, name) != getattr(usual, name)}
    return {name.removeprefix(strip): value for name, value in changes.items()}
