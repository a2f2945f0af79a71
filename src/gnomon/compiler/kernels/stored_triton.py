"""Linear layers with stored weights on a GPU: the same description of a storage printed as Triton.

    packed = pack(weight, storage_of("int4-g64"))       # of a weight on a GPU; `stored.pack` comes here by itself
    y = linear(x, packed, bias)

`text_of(storage)` writes one kernel around one loop: bytes of a tile of weights are loaded as they are stored, widened
in registers to what `storage.widen` says of them, and multiplied as a dense tile by the tensor cores (`tl.dot`). For
integers that is Ladder's conversion at the last level; for bitmaps and n of m it is Flash-LLM's loading as sparse and
computing as dense, with SpInfer's bits in place of positions. Codes of few bits are laid over each other when they are
packed, so that each byte is loaded once: of a turn of K its layer l has the l-th stretch. Sums are in float32, weights
are rounded to x's dtype. Leaves out gradients, and storages that no text is written for, which are refused by name.
Sources: Wang et al., Ladder (2024); Xia et al., Flash-LLM (2023); Fan et al., SpInfer (2025).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gnomon.compiler.text.triton_module import module_of
from gnomon.errors import InputError
from gnomon.storage.blocks import Blocks
from gnomon.storage.dense import Dense
from gnomon.storage.form import Arrays, Shape, Storage
from gnomon.storage.integers import Integers
from gnomon.storage.n_of_m import NM
from gnomon.storage.sparse import Sparse
from gnomon.storage.tables import E2M1_CODES, MX_BLOCK, MXFP4, NF4, NF4_BLOCK, NF4_CODES
from gnomon.storage.unstructured import Bitmap

TURN = 64
"""K of a turn of the loop."""
LEAST = 16
"""Rows, outputs and K of the smallest product of the tensor cores."""
OUTPUTS = 64
"""Of a program."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

HEAD = """\
import triton
import triton.language as tl


@triton.jit
def product(x, out, bias, codes, scales, zeros, starts, places, M, N, K, x_row,
            HAS_BIAS: tl.constexpr, WIDENS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    wide = n.to(tl.int64)[:, None]
    sums = tl.zeros([BM, BN], tl.float32)
"""
BODY = """\
        whole = (m < M)[:, None] & (k < K)[None, :]
        at = tl.load(x + m.to(tl.int64)[:, None] * x_row + k[None, :], mask=whole, other=0.0)
        w = w.to(at.dtype)
        if WIDENS:
            at, w = at.to(tl.float32), w.to(tl.float32)
        sums = tl.dot(at, tl.trans(w), sums, input_precision="ieee")
"""
TAIL = """\
    if HAS_BIAS:
        sums += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    to = out + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(to, sums.to(out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])
"""
LOOP = "    for begin in range(0, K, BK):\n"
ALL = "        k = begin + tl.arange(0, BK)\n        there = (n < N)[:, None] & (k < K)[None, :]\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class OnGpu:
    """A weight as a Triton kernel reads it."""

    shape: Shape
    """(outputs, inputs)."""
    storage: Storage
    tensors: Mapping[str, Tensor]
    """codes, scales, zeros, starts, places: of each storage what it has."""

    @property
    def by(self) -> str:
        return "kernel"

    @property
    def bytes(self) -> int:
        return sum(one.numel() * one.itemsize for one in self.tensors.values())


def layers_of(storage: Storage) -> int:
    """Codes that lie over each other in a byte."""
    return 8 // storage.bits if isinstance(storage, Integers) else 1


@cache
def text_of(storage: Storage) -> str:
    """Triton of a kernel. InputError for a storage that no text is written for."""
    if isinstance(storage, Integers):
        return HEAD + LOOP + _integers(storage) + TAIL
    if isinstance(storage, Blocks):
        return HEAD + _blocks(storage) + TAIL
    inner = _widened(storage)
    return HEAD + LOOP + ALL + "".join(f"        {line}\n" for line in inner) + BODY + TAIL


def _integers(storage: Integers) -> str:
    """A loop over the layers of a turn, whose bytes are loaded once."""
    # A turn's BK columns lie in BK / layers bytes. Byte i of them holds columns begin + i + l * BK / layers, one for
    # each layer l, so that a layer is a stretch of neighbouring columns.
    layers, group = layers_of(storage), storage.group
    many = f"(K // {group})" if group else "1"
    place = f"wide * {many} + k[None, :] // {group}" if group else "wide + k[None, :] * 0"
    zero = f"tl.load(zeros + {place}, mask=there, other=0).to(tl.float32)" if storage.zeros else f"{storage.zero}.0"
    return f"""\
        lane = tl.arange(0, BK // {layers})
        padded = (K + BK - 1) // BK * (BK // {layers})
        place = codes + wide * padded + (begin // {layers} + lane)[None, :]
        packed = tl.load(place, mask=(n < N)[:, None], other=0).to(tl.int32)
        for layer in tl.static_range({layers}):
            k = begin + layer * (BK // {layers}) + lane
            there = (n < N)[:, None] & (k < K)[None, :]
            code = (packed >> (layer * {storage.bits})) & {2**storage.bits - 1}
            by = tl.load(scales + {place}, mask=there, other=0.0).to(tl.float32)
            w = (code.to(tl.float32) - {zero}) * by
{_deeper(BODY)}"""


def _deeper(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines())


def _blocks(storage: Blocks) -> str:
    """A loop over the blocks that are kept of a row of them; a program's outputs are a block's."""
    high, wide = storage.size
    scaled = " * tl.load(scales + n, mask=n < N, other=0.0).to(tl.float32)[:, None]" if storage.value == "int8" else ""
    return f"""\
    row = tl.program_id(1)
    for one in range(tl.load(starts + row), tl.load(starts + row + 1)):
        k = tl.load(places + one) * {wide} + tl.arange(0, BK)
        inside = tl.arange(0, BN)[:, None] * {wide} + tl.arange(0, BK)[None, :]
        w = tl.load(codes + (tl.zeros([1, 1], tl.int64) + one) * {high * wide} + inside).to(tl.float32){scaled}
{BODY}"""


def _widened(storage: Storage) -> list[str]:
    """Lines that make `w`, float32 (outputs, K of a turn), of what is stored."""
    if isinstance(storage, Dense):
        return ["w = tl.load(codes + wide * K + k[None, :], mask=there, other=0.0).to(tl.float32)"]
    if isinstance(storage, NF4):
        return [
            "flat = wide * K + k[None, :]",
            "packed = tl.load(codes + flat // 2, mask=there, other=0).to(tl.int32)",
            "code = tl.where(flat % 2 == 0, packed >> 4, packed & 15)",
            f"w = tl.load(places + code) * tl.load(scales + flat // {NF4_BLOCK}, mask=there, other=0.0)",
        ]
    if isinstance(storage, MXFP4):
        return [
            "packed = tl.load(codes + wide * (K // 2) + k[None, :] // 2, mask=there, other=0).to(tl.int32)",
            "code = (packed >> (k[None, :] % 2 * 4)) & 15",
            # A scale is the exponent of a power of two with a bias of 127 (E8M0 of OCP's microscaling formats): 127 is
            # 1.
            f"power = tl.load(scales + wide * (K // {MX_BLOCK}) + k[None, :] // {MX_BLOCK}, mask=there, other=127)",
            "w = tl.load(places + code) * tl.exp2(power.to(tl.float32) - 127.0)",
        ]
    scaled = " * tl.load(scales + n, mask=n < N, other=0.0).to(tl.float32)[:, None]"
    ends = scaled if isinstance(storage, Sparse) and storage.value == "int8" else ""
    if isinstance(storage, NM):
        n_of_m, m = storage.n, storage.m
        lines = ["w = tl.zeros([BN, BK], tl.float32)", f"first = k[None, :] // {m} * {n_of_m}"]
        for one in range(n_of_m):
            lines += [
                f"both = places + wide * ((K // {m} * {n_of_m} + 1) // 2) + (first + {one}) // 2",
                f"where = (tl.load(both, mask=there, other=0).to(tl.int32) >> ((first + {one}) % 2 * 4)) & 15",
                f"kept = tl.load(codes + wide * (K // {m} * {n_of_m}) + first + {one}, mask=there, other=0)",
                f"w += tl.where(where == k[None, :] % {m}, kept.to(tl.float32), 0.0)",
            ]
        return [*lines, f"w = w{ends}"]
    if isinstance(storage, Bitmap):
        return [
            "bits = tl.load(places + wide * ((K + 7) // 8) + k[None, :] // 8, mask=there, other=0).to(tl.int32)",
            "kept = (bits >> (k[None, :] % 8)) & 1",
            "first = tl.load(starts + wide * ((K + BK - 1) // BK) + begin // BK, mask=(n < N)[:, None], other=0)",
            # The sum of the bits before this one: where among the kept numbers a row's own begins.
            "before = first + tl.cumsum(kept, 1) - kept",
            f"w = tl.load(codes + before, mask=kept != 0, other=0).to(tl.float32){ends}",
        ]
    raise InputError(
        f"no GPU kernel multiplies by {storage.name}; there are those for int8, int4, int2 and ternary weights, nf4, "
        "mxfp4, bf16, fp32, n:m, bitmaps and blocks: convert it, or widen it"
    )


def repack(arrays: Arrays, storage: Storage, shape: Shape, device: torch.device | str) -> OnGpu:
    """What a file holds of a weight, laid for a GPU; no number changes."""
    if why := storage.refused(shape):
        raise InputError(why)
    text_of(storage)
    laid = _laid({name: np.asarray(one) for name, one in arrays.items()}, storage, shape)
    tensors = {name: _tensor(one).to(device) for name, one in laid.items()}
    return OnGpu(shape=shape, storage=storage, tensors=tensors)


def _laid(arrays: dict[str, NDArray[Any]], storage: Storage, shape: Shape) -> dict[str, NDArray[Any]]:
    if isinstance(storage, Integers):
        laid = {"codes": _layered(storage.codes_of(arrays, shape), layers_of(storage), storage.bits)}
        return laid | {name: arrays[name] for name in ("scales", "zeros") if name in arrays}
    if isinstance(storage, NF4 | MXFP4):
        table = NF4_CODES if isinstance(storage, NF4) else E2M1_CODES
        return {"codes": arrays["codes"], "scales": arrays["scales"], "places": np.asarray(table, np.float32)}
    values = arrays["values"]
    if isinstance(storage, Dense):
        return {"codes": _numbers(values, storage.dtype)}
    assert isinstance(storage, Sparse)
    laid = {"codes": _numbers(values, storage.value)}
    if storage.value == "int8":
        laid["scales"] = arrays["scales"]
    if isinstance(storage, Bitmap):
        nonzeros = storage.kept_of(arrays, shape)
        turns = -(-shape[1] // TURN)
        # Kept numbers of each (row, turn of K); their sums before each are where its kept numbers begin.
        counts = np.pad(nonzeros, ((0, 0), (0, turns * TURN - shape[1]))).reshape(-1, TURN).sum(1)
        return laid | {"places": arrays["bits"], "starts": (np.cumsum(counts) - counts).astype(np.int64)}
    if isinstance(storage, Blocks):
        if any(side < LEAST or side & (side - 1) for side in storage.size):
            raise InputError(
                f"{storage.name}: blocks of a GPU kernel have sides of {LEAST}, 32, 64 …, as its tensor cores; "
                "take such a size, or widen it"
            )
        return laid | {"places": arrays["columns"], "starts": arrays["starts"]}
    return laid | {"places": arrays["places"]}


def _layered(codes: NDArray[np.uint8], layers: int, bits: int) -> NDArray[np.uint8]:
    """(rows, columns) -> (rows, bytes): of each turn layer l has the l-th stretch."""
    rows, columns = codes.shape
    padded = np.pad(codes, ((0, 0), (0, -columns % TURN))).reshape(rows, -1, layers, TURN // layers)
    out = np.zeros((rows, padded.shape[1], TURN // layers), np.uint8)
    for layer in range(layers):
        out |= padded[:, :, layer] << np.uint8(layer * bits)
    return out.reshape(rows, -1)


def _numbers(values: NDArray[Any], name: str) -> NDArray[Any]:
    return values.view({"fp32": np.float32, "bf16": np.uint16, "int8": np.int8}[name])


def _tensor(one: NDArray[Any]) -> Tensor:
    one = np.ascontiguousarray(one)
    return (
        torch.from_numpy(one.view(np.int16)).view(torch.bfloat16) if one.dtype == np.uint16 else torch.from_numpy(one)
    )


def pack(weight: Tensor, storage: Storage) -> OnGpu:
    """A weight (outputs, inputs), rounded to the nearest that can be stored so, on its device."""
    arrays = storage.narrow(weight.detach().float().cpu().numpy())
    return repack(arrays, storage, (weight.shape[0], weight.shape[1]), weight.device)


def linear(x: Tensor, packed: OnGpu, bias: Tensor | None = None) -> Tensor:
    """x (..., inputs) in float32, bfloat16 or float16 on the weight's device -> (..., outputs) of its dtype."""
    n, k = packed.shape
    if x.shape[-1] != k or x.dtype not in DTYPES:
        raise InputError(
            f"a weight of {n} x {k} multiplies rows of {k} in float32, bfloat16 or float16, not {tuple(x.shape)} "
            f"{x.dtype}"
        )
    rows = x.reshape(-1, k)
    rows = rows if rows.stride(-1) == 1 or k == 1 else rows.contiguous()
    out = torch.empty((len(rows), n), dtype=x.dtype, device=x.device)
    if len(rows) and n:
        high, wide, turn = tile_of(len(rows), packed.storage)
        # The kernel has all five parameters; a text that does not read one is given any tensor.
        packed_tensors = [packed.tensors.get(name, out) for name in ("codes", "scales", "zeros", "starts", "places")]
        grid = (-(-len(rows) // high), -(-n // wide))
        function = module_of(text_of(packed.storage)).product
        function[grid](
            rows, out, out if bias is None else bias, *packed_tensors, len(rows), n, k, rows.stride(0),
            HAS_BIAS=bias is not None, WIDENS=interpreted(), BM=high, BN=wide, BK=turn,
        )  # fmt: skip
    return out.view(*x.shape[:-1], n)


def interpreted() -> bool:
    """Whether Triton runs its text in Python, whose products know no bfloat16."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def tile_of(rows: int, storage: Storage) -> tuple[int, int, int]:
    """(rows, outputs, K of a turn) of a program: few rows leave the multiprocessors to the outputs."""
    # A power of two, as `tl.arange` takes no other length.
    high = min(64, max(LEAST, 1 << (rows - 1).bit_length()))
    return (high, *storage.size) if isinstance(storage, Blocks) else (high, OUTPUTS, TURN)
