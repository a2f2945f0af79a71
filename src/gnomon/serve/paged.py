"""Keys and values in pages, and attention over them where they lie: `Pages` is those of one attention op of one layer.

`attend(rows, q, k, v)` writes the new keys and values where the block tables say and returns what each query sees of
its own sequence. By a kernel of ours (cpp/paged.cpp); where that does not compile, or in float64, by PyTorch a column
of pages at a time. Sequences are never copied together. Leaves out which block is whose (`serving.kv_blocks`).
Shapes: q (tokens, heads, dim), k (tokens, kv heads, dim), v (tokens, kv heads, value dim).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gnomon.compiler.build import kernel_of
from gnomon.compiler.tried import text_of
from gnomon.serve.rows import Rows

CPP = Path(__file__).with_name("cpp")
VECTOR = 16
"""Rows of values are padded to this many elements, the widest vector of floats that there is."""
KERNELS = (torch.float32, torch.bfloat16)
"""Dtypes that the kernel knows."""
SPAN, WIDEST = 64, 1024
"""As cpp/paged.cpp has them: blocks divide the one, heads are at most as wide as the other."""

_SIZES = "sequences heads kv_heads k_dim v_dim v_row size table_row window causal threads".split()


class _Call(ctypes.Structure):
    """`Call` of cpp/paged.cpp."""

    _fields_ = [
        *[(name, ctypes.c_int64) for name in _SIZES],
        *[(name, ctypes.c_double) for name in ("scale", "cap")],
        *[(name, ctypes.c_void_p) for name in "qkv"],
        *[(name, ctypes.c_int64) for name in ("q_row", "k_row", "v_in_row")],
        *[(name, ctypes.c_void_p) for name in ("keys", "values", "tables", "begins", "lengths", "slopes", "sinks")],
        ("out", ctypes.c_void_p),
    ]


@cache
def kernel(dtype: torch.dtype) -> Callable[[Any], int] | None:
    """The compiled kernel, None where it does not compile."""
    return kernel_of(source("paged.cpp", dtype), ctypes.c_void_p) if dtype in KERNELS else None


def source(name: str, dtype: torch.dtype) -> str:
    """C++ of a kernel that has attention over pages in it."""
    return text_of(CPP / "paged.h", dtype) + (CPP / name).read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a query sees, and how scores are made."""

    scale: float
    """Of scores."""
    causal: bool = True
    """Whether keys after a query are hidden from it."""
    window: int = 0
    """Of its own position and those before it (without causality as many after it); 0 for all."""
    cap: float = 0.0
    """Scores are cut to ±cap by tanh; 0 for not."""


def untouched(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros that take no memory until they are written to: torch's own are written as they are made."""
    whole = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(whole).view(dtype).view(*shape)


class Pages:
    """Of one attention op in one layer."""

    def __init__(
        self,
        blocks: int,
        size: int,
        kv_heads: int,
        k_dim: int,
        v_dim: int,
        dtype: torch.dtype,
        seen: Seen,
        *,
        group: int = 0,
        slopes: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """group: of `serving.kv_blocks`, whose tables it reads. slopes: of linear biases, a head. sinks: a score for
        each head that takes part in the softmax and has no value."""
        padded = -(-v_dim // VECTOR) * VECTOR
        self.size, self.group, self.seen, self.v_dim, self.dtype = size, group, seen, v_dim, dtype
        self.keys = untouched((blocks, kv_heads, k_dim, size), dtype)
        self.values = untouched((blocks, kv_heads, size, padded), dtype)
        self.slopes = None if slopes is None else slopes.float().contiguous()
        self.sinks = None if sinks is None else sinks.float().contiguous()
        fits = SPAN % size == 0 and size % VECTOR == 0 and max(k_dim, padded) <= WIDEST
        self.function = kernel(dtype) if fits else None
        self.call = _Call(
            kv_heads=kv_heads, k_dim=k_dim, v_dim=v_dim, v_row=padded, size=size, window=seen.window,
            causal=seen.causal, scale=seen.scale, cap=seen.cap, keys=self.keys.data_ptr(),
            values=self.values.data_ptr(), slopes=None if self.slopes is None else self.slopes.data_ptr(),
            sinks=None if self.sinks is None else self.sinks.data_ptr(),
        )  # fmt: skip
        self.address = ctypes.addressof(self.call)

    @property
    def nbytes(self) -> int:
        """Of all pages, used or not."""
        return self.keys.nbytes + self.values.nbytes

    def copy(self, source: int, target: int) -> None:
        """One block's contents to another."""
        self.keys[target] = self.keys[source]
        self.values[target] = self.values[source]

    def attend(self, rows: Rows, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(tokens, heads, value dim)."""
        q, k, v = (x if x.stride(-1) == 1 and x.stride(-2) == x.shape[-1] else x.contiguous() for x in (q, k, v))
        if self.function is None:
            return self.by_torch(rows, q, k, v)
        out, call, tables = torch.empty((q.shape[0], q.shape[1], self.v_dim), dtype=q.dtype), self.call, None
        tables = rows.tables[self.group]
        call.sequences, call.heads, call.table_row, call.threads = rows.count, q.shape[1], tables.shape[1], rows.threads
        call.q, call.k, call.v, call.out = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()
        call.q_row, call.k_row, call.v_in_row = q.stride(0), k.stride(0), v.stride(0)
        call.tables, call.begins, call.lengths = tables.data_ptr(), rows.begins.data_ptr(), rows.lengths.data_ptr()
        failed = self.function(self.address)
        assert not failed, "sizes were looked at before"
        return out

    def by_torch(self, rows: Rows, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The same by PyTorch, in float32 or wider."""
        seen, wide = self.seen, torch.promote_types(q.dtype, torch.float32)
        out = torch.empty((q.shape[0], q.shape[1], self.v_dim), dtype=q.dtype)
        group = q.shape[1] // k.shape[1]
        bounds, lengths = rows.begins.tolist(), rows.lengths.tolist()
        for number, (begin, end, length) in enumerate(zip(bounds, bounds[1:], lengths, strict=False)):
            table = rows.tables[self.group][number].long()
            at = torch.arange(length - (end - begin), length)
            block, place = table[at // self.size], at % self.size
            self.keys[block, :, :, place] = k[begin:end]
            self.values[block, :, place, : self.v_dim] = v[begin:end]
            mine = q[begin:end].to(wide).unflatten(1, (-1, group))  # (queries, kv heads, group, dim)
            top = torch.full(mine.shape[:3], -torch.inf, dtype=wide)
            total, acc = torch.zeros_like(top), torch.zeros((*mine.shape[:3], self.v_dim), dtype=wide)
            first = max(0, int(at[0]) - seen.window + 1) // self.size if seen.window else 0
            for page in range(first, -(-length // self.size)):
                keys, values = self.keys[table[page]].to(wide), self.values[table[page], :, :, : self.v_dim].to(wide)
                score = torch.einsum("qhgd,hdt->qhgt", mine, keys) * seen.scale
                if seen.cap:
                    score = torch.tanh(score / seen.cap) * seen.cap
                places = torch.arange(page * self.size, (page + 1) * self.size)
                distance = places[None, :] - at[:, None]  # (queries, tokens of the page)
                if self.slopes is not None:
                    slopes = self.slopes.to(wide).unflatten(0, (-1, group))
                    score = score + slopes[None, :, :, None] * distance[:, None, None, :]
                hidden = (places >= length)[None, :].expand_as(distance)
                if seen.causal:
                    hidden = hidden | (distance > 0)
                if seen.window:
                    hidden = hidden | (distance <= -seen.window) | (distance >= seen.window)
                score = score.masked_fill(hidden[:, None, None, :], -torch.inf)
                most = torch.maximum(top, score.amax(-1))
                kept = torch.where(most == -torch.inf, 0.0, (top - most).exp())
                shares = torch.where(most[..., None] == -torch.inf, 0.0, (score - most[..., None]).exp())
                total = total * kept + shares.sum(-1)
                acc = acc * kept[..., None] + torch.einsum("qhgt,htd->qhgd", shares, values)
                top = most
            if self.sinks is not None:
                sink = self.sinks.to(wide).unflatten(0, (-1, group))
                most = torch.maximum(top, sink)
                acc, total = acc * (top - most).exp()[..., None], total * (top - most).exp() + (sink - most).exp()
            out[begin:end] = (acc / total[..., None].clamp(min=1e-30)).flatten(1, 2).to(out.dtype)
        return out
