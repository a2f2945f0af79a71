"""Kernels of inference that training does not run: attention of single queries over cached keys, few rows to many
experts, and sums over ranks in one kernel.

Constants are by generation of device, in `decoding.toml`, fitted to measured kernels as its rows say; a generation
without a row takes that of `generic`, and `assumptions` names it. Sizes may be arrays. Leaves out paging's own cost
(in the constants), and kernels that share a prefix of keys between requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np

from gnomon import schema
from gnomon.errors import UnpricedError
from gnomon.hardware.generations import decoding_of
from gnomon.hardware.types import Device
from gnomon.prices.curves import Array, Provenance, Size
from gnomon.prices.links import AxisLink
from gnomon.units import Seconds

GENERIC = "generic"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeAttention:
    """seconds = t0 + per_head · sequences · kv heads + hypot(bytes of keys / bandwidth, FLOPs / peak)."""

    arch: str
    """Name of the generation."""
    kv_bits: int
    """Bits of an element of the cache."""
    t0_s: Seconds
    """Seconds of its kernels with few keys, reduction over parts included."""
    per_head_s: Seconds
    """Seconds of a sequence's key head."""
    memory_efficiency: float
    """Part of the memory's peak at which keys are read."""
    compute_efficiency: float
    """Part of the 16-bit dense peak that few queries a key reach."""
    provenance: Provenance
    """Where the row's constants are known from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FewRows:
    """Fused experts: seconds = t0 + per_expert · experts touched + hypot(bytes / bandwidth, FLOPs / peak)."""

    arch: str
    """Name of the generation."""
    weight_bits: int
    """Bits of a weight of the experts."""
    t0_s: Seconds
    """Seconds of its kernels: sort of rows, both matmuls, activation, sum."""
    per_expert_s: Seconds
    """Seconds of an expert that gets rows."""
    memory_efficiency: float
    """Part of the memory's peak at which weights are read."""
    compute_efficiency: float
    """Part of the dense peak reached by tiles that are partly empty."""
    provenance: Provenance
    """Where the row's constants are known from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OneShot:
    """A sum over ranks in one kernel: seconds = start + per_rank · ranks + 2 (ranks - 1) / ranks · bytes / rate."""

    arch: str
    """Name of the generation."""
    start_s: Seconds
    """Seconds of a sum of nothing."""
    per_rank_s: Seconds
    """Seconds more for each rank."""
    link_share: float
    """Rate over the link's peak."""
    provenance: Provenance
    """Where the row's constants are known from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ggml:
    """Matmuls of ggml, the library under llama.cpp: seconds = start + max(bytes / bandwidth, FLOPs / peak), the peak
    reached as rows fill a tile: rows / (rows + TILE)."""

    arch: str
    """Name of the generation, with `-vulkan` for that backend."""
    start_s: Seconds
    """Seconds of a matmul's launch, and of each other kernel between two."""
    memory_share: float
    """Part of the memory's peak at which a vector's matmul reads 16-bit weights."""
    quantised_memory_share: float
    """Part of the memory's peak at which a vector's matmul reads quantised weights."""
    quantised_share: float
    """Part of the int8 peak (of the 16-bit one where there is none) that quantised weights reach with many rows."""
    half_share: float
    """Part of the 16-bit peak with 16-bit sums (half the int8 one, where there is one) that 16-bit weights reach."""
    experts_share: float
    """Part of either that matmuls of experts reach."""
    attention_share: float
    """Speed of its attention of prompts over that of the maker's kernels."""
    provenance: Provenance
    """Where the row's constants are known from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingFile:
    """The rows of `decoding.toml`."""

    SCHEMA: ClassVar[str] = "gnomon.decoding/1"

    attention: tuple[DecodeAttention, ...]
    """Rows of decode attention."""
    experts: tuple[FewRows, ...]
    """Rows of fused experts."""
    one_shot: tuple[OneShot, ...]
    """Rows of sums in one kernel."""
    ggml: tuple[Ggml, ...]
    """Rows of ggml."""


@cache
def _file() -> DecodingFile:
    return schema.load_packaged(DecodingFile, Path(__file__).with_name("decoding.toml"))


def attention_row(device: Device, kv_bits: int) -> DecodeAttention:
    """The row of a device: of the width nearest to `kv_bits`, of its generation or the generic one."""
    rows = [row for row in _file().attention if row.arch == decoding_of(device.arch)]
    rows = rows or [row for row in _file().attention if row.arch == GENERIC]
    return min(rows, key=lambda row: abs(row.kv_bits - kv_bits))


def experts_row(device: Device, weight_bits: float) -> FewRows:
    """The row of a device: of the width nearest to `weight_bits`, of its generation or the generic one."""
    rows = [row for row in _file().experts if row.arch == decoding_of(device.arch)]
    rows = rows or [row for row in _file().experts if row.arch == GENERIC]
    return min(rows, key=lambda row: abs(row.weight_bits - weight_bits))


def ggml_row(device: Device, *, vulkan: bool = False) -> Ggml:
    """The row of a device: of its generation (in Vulkan where there is one) or the generic one."""
    names = [f"{decoding_of(device.arch)}-vulkan"] * vulkan + [decoding_of(device.arch), GENERIC]
    known = {row.arch: row for row in _file().ggml}
    return next(known[name] for name in names if name in known)


def ggml_rows() -> tuple[Ggml, ...]:
    """Lists the rows of all generations on record."""
    return _file().ggml


GGML_TILE = 20
"""The number of rows at which a matmul of ggml reaches half of what it does with many."""


def ggml_seconds(
    rows: Size, *, elements: Size, bits: float, moved_bytes: Size, device: Device, row: Ggml, experts: bool = False
) -> Array:
    """Seconds of a matmul of ggml on one device.

    rows: that each weight is multiplied by. elements: weights that are read. bits: of one. moved_bytes: weights and
    activations. row: of `ggml_row`.
    """
    # Above 12 bits weights are multiplied as 16-bit numbers; below, as int8 blocks with scales.
    half = bits > 12
    integer = device.dense_peak.int8
    peak = half_peak(device) if integer is None else integer / 2 if half else integer
    share = (row.half_share if half else row.quantised_share) * (row.experts_share if experts else 1.0)
    many = np.asarray(rows, dtype=np.float64)
    # A tile fills as rows / (rows + TILE); up to 8 rows a vector kernel runs, which is bound by memory alone.
    compute = 2 * many * elements / (peak * share * many / (many + GGML_TILE))
    memory = np.asarray(moved_bytes) / (
        device.memory_bytes_per_s * (row.memory_share if half else row.quantised_memory_share)
    )
    return np.asarray(row.start_s + np.maximum(memory, np.where(many > 8, compute, 0.0)))


def assumptions(device: Device) -> tuple[str, ...]:
    """Lists what was taken from another generation."""
    if any(row.arch == decoding_of(device.arch) for row in _file().attention):
        return ()
    return (
        f"{device.name}: kernels of decoding are priced with shares of other generations (no data of {device.arch})",
    )


def kv_seconds_per_token(
    row: DecodeAttention, *, bytes_per_token: float, flops_per_token: float, device: Device
) -> float:
    """Seconds of each key that a decode attends to, in one layer on one device: bytes and FLOPs of it."""
    memory = bytes_per_token / (device.memory_bytes_per_s * row.memory_efficiency)
    compute = flops_per_token / (half_peak(device) * row.compute_efficiency)
    # hypot, not max: near the balance point neither hides the other entirely.
    return float(np.hypot(memory, compute))


def decode_attention_seconds(
    row: DecodeAttention, *, sequences: Size, kv_heads: Size, moved: Size, flops: Size, device: Device
) -> Array:
    """Seconds of one layer's attention of single queries over cached keys, on one device. moved: bytes of keys and
    values read. flops: of q kᵀ and p v."""
    memory = np.asarray(moved, dtype=np.float64) / (device.memory_bytes_per_s * row.memory_efficiency)
    compute = np.asarray(flops, dtype=np.float64) / (half_peak(device) * row.compute_efficiency)
    heads = np.asarray(sequences, dtype=np.float64) * np.asarray(kv_heads, dtype=np.float64)
    # t0 is paid once, per_head for every (sequence, key head), the rest by bytes and FLOPs.
    return np.asarray(row.t0_s + row.per_head_s * heads + np.hypot(memory, compute))


def half_peak(device: Device) -> float:
    """Dense FLOP/s in 16 bits, or in 32 where it has none."""
    for dtype in ("bf16", "fp16", "fp32"):
        try:
            return device.flops_per_s(dtype)
        except UnpricedError:
            continue
    raise UnpricedError(f"{device.name} has no peak in 16 or 32 bits")


def touched_experts(tokens: Size, experts: int, topk: int) -> Array:
    """Experts that at least one of `tokens` chooses, all choices alike: E (1 - (1 - k/E)^tokens)."""
    # A token misses an expert with probability 1 - k/E; `tokens` independent tokens all miss it with the power.
    return np.asarray(experts * (1 - (1 - min(topk / experts, 1.0)) ** np.asarray(tokens, dtype=np.float64)))


class RoutedExperts(Protocol):
    """What the time of a layer's experts on one rank follows from."""

    @property
    def experts(self) -> int:
        """Counts the experts of all ranks together."""

    @property
    def topk(self) -> int:
        """Counts the experts that a token chooses."""

    @property
    def local_share(self) -> float:
        """Part of the experts, and so of the rows, on this rank."""

    @property
    def elements(self) -> float:
        """Elements of one expert's weights on this rank, all its matrices."""

    @property
    def bits(self) -> float:
        """Bits of an element, as it is stored."""

    @property
    def row_elements(self) -> float:
        """Elements read and written for a (token, expert) pair, weights not counted."""


def experts_seconds(tokens: Size, layer: RoutedExperts, *, peak: float, device: Device) -> Array:
    """Seconds of a layer's experts on one rank. tokens: of all ranks that share the experts. peak: dense FLOP/s in the
    dtype that they multiply in."""
    row = experts_row(device, layer.bits)
    rows = np.asarray(tokens, dtype=np.float64) * layer.topk * layer.local_share
    touched = touched_experts(tokens, layer.experts, layer.topk) * layer.local_share
    # Every touched expert's weights are read once; rows move 16-bit activations.
    moved = touched * layer.elements * layer.bits / 8 + rows * layer.row_elements * 2
    memory = moved / (device.memory_bytes_per_s * row.memory_efficiency)
    compute = 2 * rows * layer.elements / (peak * row.compute_efficiency)
    # many rows to an expert fill tiles: the share grows to that of grouped matmuls of training
    full = np.minimum(1.0, rows / np.maximum(touched, 1e-9) / 512)
    compute = compute / (1 + full * (0.55 / row.compute_efficiency - 1) * (row.compute_efficiency < 0.55))
    return np.asarray(row.t0_s + row.per_expert_s * touched + np.hypot(memory, compute))


def one_shot_seconds(nbytes: Size, link: AxisLink) -> Array | None:
    """Seconds of a sum over the ranks of a link in one kernel; None between nodes, or without peer links."""
    if link.nodes > 1 or link.inside_kind not in ("nvlink", "xgmi"):
        return None
    rows = [row for row in _file().one_shot if row.arch == decoding_of(link.arch)]
    row = (rows or [row for row in _file().one_shot if row.arch == GENERIC])[0]
    moved = 2 * (link.ranks - 1) / link.ranks * np.asarray(nbytes, dtype=np.float64)
    return np.asarray(row.start_s + row.per_rank_s * link.ranks + moved / (link.inside_bytes_per_s * row.link_share))
