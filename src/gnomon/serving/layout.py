"""How a model is laid on devices to serve, and how its weights and keys are stored.

`Serving` is what a person decides: axes, formats, limits. `check` says in one line what cannot be. Leaves out engines'
spelling of it (room `formats`) and what follows from it (`weights`, `iteration`, `capacity`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from gnomon.errors import InputError, nearest
from gnomon.storage.integers import Integers
from gnomon.storage.names import storage_of
from gnomon.storage.sparse import Sparse
from gnomon.units import Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How weights are stored and what they multiply in."""

    name: str
    """The field's name."""
    bits: float
    """Of a weight, scales and zeros included."""
    compute_dtype: str
    """Dtype of the products: a field of `PeakFlops`."""
    covers: Literal["matrices", "experts", "all"]
    """matrices: every matrix of the layers, not tables and heads. experts: those of experts only."""
    rest: str = "bf16"
    """The format of what it does not cover."""


FORMATS: Mapping[str, Format] = {
    row.name: row
    for row in (
        Format(name="bf16", bits=16, compute_dtype="bf16", covers="all"),
        Format(name="fp16", bits=16, compute_dtype="bf16", covers="all"),
        Format(name="fp32", bits=32, compute_dtype="fp32", covers="all"),
        Format(name="fp8", bits=8, compute_dtype="fp8", covers="matrices"),
        Format(name="fp8-block", bits=8.002, compute_dtype="fp8", covers="matrices"),
        Format(name="int8", bits=8, compute_dtype="int8", covers="matrices"),
        Format(name="int8-wo", bits=8.125, compute_dtype="bf16", covers="matrices"),
        Format(name="int4-wo", bits=4.25, compute_dtype="bf16", covers="matrices"),
        Format(name="nvfp4", bits=4.5, compute_dtype="fp4", covers="matrices"),
        Format(name="mxfp4", bits=4.25, compute_dtype="fp8", covers="experts"),
        Format(name="mxfp4-gguf", bits=4.25, compute_dtype="int8", covers="experts", rest="q8_0"),
        Format(name="nf4", bits=4.127, compute_dtype="bf16", covers="matrices"),
        Format(name="q8_0", bits=8.5, compute_dtype="int8", covers="all"),
        Format(name="q6_k", bits=6.56, compute_dtype="int8", covers="all"),
        Format(name="q5_k", bits=5.7, compute_dtype="int8", covers="all"),
        Format(name="q4_k", bits=4.85, compute_dtype="int8", covers="all"),
        Format(name="q4_0", bits=4.55, compute_dtype="int8", covers="all"),
        Format(name="q3_k", bits=3.9, compute_dtype="int8", covers="all"),
        Format(name="q2_k", bits=3.0, compute_dtype="int8", covers="all"),
    )
}
"""Name -> format. Sources of bits: compressed-tensors (groups of 128 with 16-bit scales and zeros), OCP MX (a scale for
32), NVFP4 (a scale for 16), bitsandbytes (NF4, scales quantised), GGUF (mean over a model's matrices)."""

TYPICAL = (4096, 4096)
"""A matrix whose bits a weight are told of a storage."""

KV_BITS: Mapping[str, int] = {"bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "q8_0": 8, "fp32": 32}
"""Formats of cached keys and values -> bits."""


def weight_format(name: str) -> Format:
    """The format of that name; `q4_k:4.83` is one with as many bits a weight as a file says. InputError with the
    nearest."""
    if (sparse := _of_sparse(name)) is not None:
        return sparse
    plain, colon, bits_text = name.partition(":")
    found = FORMATS.get(plain.lower()) or _of_storage(name)
    if found is None:
        raise InputError(
            f"weights in {name[:40]!r} are not known{nearest(plain, FORMATS)}; known: {', '.join(FORMATS)}, and groups "
            f"of another size as int4-g64, int8-g32, int4-g128-zeros, and sparse ones as 4:16-bf16, 0.9-int8"
        )
    if not colon:
        return found
    try:
        bits = float(bits_text)
    except ValueError:
        bits = 0.0
    if not 0.5 <= bits <= 64:
        raise InputError(f"weights in {name[:40]!r}: after the colon stand the bits of a weight, as in q4_k:4.83")
    return replace(found, name=name, bits=bits)


def _of_storage(name: str) -> Format | None:
    """Integers of four or eight bits in groups, by the bits of their arrays; products as of `int4-wo`. None for another
    name: no engine on record multiplies by other forms."""
    try:
        stored = storage_of(name.lower())
    except InputError:
        return None
    if not isinstance(stored, Integers) or stored.bits < 4 or not stored.group or stored.refused(TYPICAL):
        return None
    return Format(name=stored.name, bits=stored.bits_a_weight(TYPICAL), compute_dtype="bf16", covers="matrices")


def _of_sparse(name: str) -> Format | None:
    """What is sparse, by the bits of its arrays, places included; products as those of a whole matrix, which many rows
    take. float32 is not told apart from bfloat16 in a name that says neither: folders are served in bfloat16."""
    try:
        stored = storage_of(name.lower())
    except InputError:
        return None
    if not isinstance(stored, Sparse) or stored.refused(TYPICAL):
        return None
    plain = replace(stored, value="bf16") if stored.value == "fp32" else stored
    return Format(name=name.lower(), bits=plain.bits_a_weight(TYPICAL), compute_dtype=plain.value, covers="matrices")


def is_sparse(name: str) -> bool:
    """Whether weights in that format are kept in part."""
    return _of_sparse(name) is not None


def kv_bits(name: str) -> int:
    """Bits of a format of keys. InputError with the nearest."""
    if name.lower() not in KV_BITS:
        raise InputError(f"keys in {name[:40]!r} are not known{nearest(name, KV_BITS)}; known: {', '.join(KV_BITS)}")
    return KV_BITS[name.lower()]


Draft = Literal["none", "mtp", "ngram", "model"]
"""mtp: a layer of the model's own made for it. ngram: matches in the text (also suffixes), at no cost on the device.
model: a small model of the same vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """One way of serving a model: a replica's axes, formats and limits, and how many replicas."""

    tp: int = 1
    """Devices that share every matrix."""
    pp: int = 1
    """Parts of the layers, one after another."""
    dp: int = 1
    """Groups that each have whole attention and requests of their own, and share the experts."""
    ep: int = 1
    """Devices over which whole experts are dealt; of tp · dp."""
    redundant_experts: int = 0
    """Copies of experts beyond one of each, of a layer's."""
    expert_copies: int = 0
    """Copies of other devices' experts that a device has room for, of a layer: those that its tokens are foreseen to
    want (`foresight`)."""
    expert_load: float = 1.0
    """Rows of experts that the busiest of ep devices computes, over the mean."""
    replicas: int = 1
    """Copies that share nothing."""
    weights: str = "bf16"
    """A name of `FORMATS`."""
    kv: str = "bf16"
    """A name of `KV_BITS`."""
    max_model_len: int
    """Longest request, prompt and answer together."""
    resident_bytes: Bytes | None = None
    """Of layers' matrices in a device's memory, where others are read from its node's disk each time that they run;
    left out: all are in memory."""
    draft: Draft = "none"
    """Who guesses tokens that the model then checks in one iteration."""
    draft_tokens: int = 0
    """Guessed before each check."""
    acceptance: float = 0.0
    """Chance that a guess is right where all before it were."""
    lora_rank: int = 0
    """Of adapters on every matrix of the layers; 0: none."""
    lora_slots: int = 0
    """Adapters that are held at the same time, of which a batch may use all."""

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp", "ep", "replicas", "max_model_len"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} {getattr(self, name)} must be at least 1")
        weight_format(self.weights)
        kv_bits(self.kv)
        if (self.draft == "none") != (self.draft_tokens == 0):
            raise InputError(
                f"draft {self.draft!r} with {self.draft_tokens} draft_tokens: say both who guesses (mtp, ngram, model) "
                f"and how many, or neither"
            )
        if not 0 <= self.draft_tokens <= 64:
            raise InputError(f"draft_tokens {self.draft_tokens} must be from 0 to 64")
        if not 0 <= self.acceptance <= 1:
            raise InputError(f"acceptance {self.acceptance:g} is a chance: from 0 to 1")
        if self.draft != "none" and not self.acceptance:
            raise InputError("acceptance is not said: what chance a guess has depends on the text; give one, as in 0.7")
        if self.resident_bytes is not None and self.resident_bytes < 0:
            raise InputError(f"resident_bytes {self.resident_bytes} of layers in memory must be at least 0")
        if self.lora_rank < 0 or self.lora_slots < 0 or bool(self.lora_rank) != bool(self.lora_slots):
            raise InputError(
                f"lora_rank {self.lora_rank} with {self.lora_slots} lora_slots: give both above 0, or neither"
            )
        if self.expert_copies < 0 or (self.expert_copies and (self.ep == 1 or self.dp > 1 or self.redundant_experts)):
            raise InputError(
                f"expert_copies {self.expert_copies} are of experts dealt out over ep above 1, where every device has "
                f"all tokens (dp 1), and in place of redundant_experts; set ep, or leave them out"
            )
        if self.expert_copies and self.resident_bytes is not None:
            raise InputError(
                "expert_copies are of experts in memory, and resident_bytes leaves layers on a disk; one only"
            )
        if self.ep > 1 and (self.tp * self.dp) % self.ep:
            raise InputError(
                f"ep {self.ep} must divide tp x dp = {self.tp * self.dp}, the devices that share the experts"
            )

    @property
    def devices(self) -> int:
        """Counts the devices of all replicas."""
        return self.tp * self.pp * self.dp * self.replicas

    @property
    def tokens_a_check(self) -> float:
        """Tokens that a request gets of an iteration, on average: 1 + a + a² + … of the guesses that hold."""
        return float(sum(self.acceptance**i for i in range(self.draft_tokens + 1))) if self.draft_tokens else 1.0
