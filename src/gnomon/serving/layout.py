"""How a model is laid on devices to serve, and how its weights and keys are stored.

`Serving` is what a person decides: axes, formats, limits. `check` says in one line what cannot be. Leaves out engines'
spelling of it (room `formats`) and what follows from it (`weights`, `iteration`, `capacity`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from gnomon.errors import InputError, nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How weights are stored and what they multiply in."""

    name: str
    """The field's name."""
    bits: float
    """Of a weight, scales and zeros included."""
    product: str
    """Dtype of the products: a field of `PeakFlops`."""
    covers: Literal["linear", "experts", "all"]
    """linear: every matrix of the layers, not tables and heads. experts: those of experts only."""


FORMATS: Mapping[str, Format] = {
    row.name: row
    for row in (
        Format(name="bf16", bits=16, product="bf16", covers="all"),
        Format(name="fp16", bits=16, product="bf16", covers="all"),
        Format(name="fp32", bits=32, product="fp32", covers="all"),
        Format(name="fp8", bits=8, product="fp8", covers="linear"),
        Format(name="fp8-block", bits=8.002, product="fp8", covers="linear"),
        Format(name="int8", bits=8, product="int8", covers="linear"),
        Format(name="int8-wo", bits=8.125, product="bf16", covers="linear"),
        Format(name="int4-wo", bits=4.25, product="bf16", covers="linear"),
        Format(name="nvfp4", bits=4.5, product="fp4", covers="linear"),
        Format(name="mxfp4", bits=4.25, product="fp8", covers="experts"),
        Format(name="nf4", bits=4.127, product="bf16", covers="linear"),
        Format(name="q8_0", bits=8.5, product="int8", covers="all"),
        Format(name="q6_k", bits=6.56, product="int8", covers="all"),
        Format(name="q5_k", bits=5.7, product="int8", covers="all"),
        Format(name="q4_k", bits=4.85, product="int8", covers="all"),
        Format(name="q4_0", bits=4.55, product="int8", covers="all"),
        Format(name="q3_k", bits=3.9, product="int8", covers="all"),
        Format(name="q2_k", bits=3.0, product="int8", covers="all"),
    )
}
"""Name -> format. Sources of bits: compressed-tensors (groups of 128 with 16-bit scales and zeros), OCP MX (a scale for
32), NVFP4 (a scale for 16), bitsandbytes (NF4, scales quantised), GGUF (mean over a model's matrices)."""

KV_BITS: Mapping[str, int] = {"bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "q8_0": 8, "fp32": 32}
"""Formats of cached keys and values -> bits."""


def weight_format(name: str) -> Format:
    """The format of that name. InputError with the nearest."""
    found = FORMATS.get(name.lower())
    if found is None:
        raise InputError(f"weights in {name[:40]!r} are not known{nearest(name, FORMATS)}; known: {', '.join(FORMATS)}")
    return found


def kv_bits(name: str) -> int:
    """Bits of a format of keys. InputError with the nearest."""
    if name.lower() not in KV_BITS:
        raise InputError(f"keys in {name[:40]!r} are not known{nearest(name, KV_BITS)}; known: {', '.join(KV_BITS)}")
    return KV_BITS[name.lower()]


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
    replicas: int = 1
    """Copies that share nothing."""
    weights: str = "bf16"
    """A name of `FORMATS`."""
    kv: str = "bf16"
    """A name of `KV_BITS`."""
    max_model_len: int
    """Longest request, prompt and answer together."""

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp", "ep", "replicas", "max_model_len"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} {getattr(self, name)} must be at least 1")
        weight_format(self.weights)
        kv_bits(self.kv)
        if self.ep > 1 and (self.tp * self.dp) % self.ep:
            raise InputError(
                f"ep {self.ep} must divide tp x dp = {self.tp * self.dp}, the devices that share the experts"
            )

    @property
    def devices(self) -> int:
        """Devices in all."""
        return self.tp * self.pp * self.dp * self.replicas
