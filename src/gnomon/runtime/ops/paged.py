"""`paged_attention`: attention over keys and values that lie in blocks, by one kernel for graphs and for the engine.

`attend(pool, seen, spans, q, new)` is what queries of several sequences see of their own. A kernel of ours
(compiler/cpp/paged.cpp) runs it where it compiles, and `by_torch` elsewhere: in float64, on other devices, for blocks
that are no whole number of vectors. `torch.ops.gnomon.paged_attention(q, keys, values, table, lengths, causal, window,
scale, softcap)` is the same for people's modules, which `gnomon` captures as this kind. Sequences are never copied
together. No gradient passes. Leaves out which block is whose (`serving.kv_blocks`).
Shapes, T tokens of all sequences one after the other: q (T, heads, dim), k (T, kv heads, dim), v (T, kv heads, value
dim); a pool's keys (blocks, kv heads, dim, positions) and values (blocks, kv heads, positions, value dim or wider), so
that a vector of the kernel is one element of many keys, and many elements of one value.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from gnomon.compiler.build import CPP, kernel_of
from gnomon.compiler.tune.tried import text_of
from gnomon.runtime.ops.site import Site

VECTOR = 16
"""Elements of the widest vector of floats that there is: rows of values are a multiple of it for the kernel."""
KERNELS = (torch.float32, torch.bfloat16)
"""Dtypes that the kernel knows."""
SPAN, WIDEST = 64, 1024
"""As cpp/paged.h has them: blocks divide the one, heads are at most as wide as the other."""

_SIZES = "sequences heads kv_heads k_dim v_dim v_row size table_row window causal threads".split()


class PagedCall(ctypes.Structure):
    """The struct `Call` of cpp/paged.h, field by field."""

    # Order and widths must be those of the C struct: nothing checks them.
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
    return kernel_of(text_of(CPP / "paged.cpp", dtype), ctypes.c_void_p) if dtype in KERNELS else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Visibility:
    """What a query sees, and how scores are made."""

    scale: float
    """Of scores."""
    causal: bool = True
    """Whether keys after a query are hidden from it."""
    window: int = 0
    """Of its own position and those before it (without causality as many after it); 0 for all."""
    cap: float = 0.0
    """Scores are cut to ±cap by tanh; 0 for not."""
    slopes: Tensor | None = None
    """Of linear biases, a head, in float32."""
    sinks: Tensor | None = None
    """A score for each head that takes part in the softmax and has no value, in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedPool:
    """Blocks of keys and values."""

    keys: Tensor
    values: Tensor
    v_dim: int
    """Elements of a value; what its row has beyond them is not read."""

    @property
    def size(self) -> int:
        """Positions of a block."""
        return self.keys.shape[3]

    @property
    def fits(self) -> bool:
        """Whether the kernel reads such blocks."""
        widest = max(self.keys.shape[2], self.values.shape[3])
        vectors = self.size % VECTOR == 0 and SPAN % self.size == 0 and self.values.shape[3] % VECTOR == 0
        here = self.keys.device.type == "cpu" and self.keys.is_contiguous() and self.values.is_contiguous()
        return vectors and here and widest <= WIDEST and kernel(self.keys.dtype) is not None

    def call(self, seen: Visibility) -> PagedCall:
        """What the kernel is told of it, which does not change from one time to the next."""
        kv_heads, k_dim = self.keys.shape[1:3]
        return PagedCall(
            kv_heads=kv_heads, k_dim=k_dim, v_dim=self.v_dim, v_row=self.values.shape[3], size=self.size,
            window=seen.window, causal=seen.causal, scale=seen.scale, cap=seen.cap, keys=self.keys.data_ptr(),
            values=self.values.data_ptr(), slopes=None if seen.slopes is None else seen.slopes.data_ptr(),
            sinks=None if seen.sinks is None else seen.sinks.data_ptr(),
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """Whose the queries are, and where the keys of these lie."""

    begins: Tensor
    """(sequences + 1), int64: first query of each, and one past the last."""
    lengths: Tensor
    """(sequences), int64: positions of each that count; its queries are the last of them."""
    table: Tensor
    """(sequences, blocks of one), int32: in order."""
    threads: int
    """That the kernel takes."""


def attend(
    pool: PagedPool,
    seen: Visibility,
    spans: Spans,
    q: Tensor,
    new: tuple[Tensor, Tensor] | None = None,
    call: PagedCall | None = None,
) -> Tensor:
    """(tokens, heads, value dim). new: keys and values of the queries' own positions, which are written to the pool
    first; None: they are there. call: the pool's, by the kernel; None: by torch."""
    q, written = _rows(q), None if new is None else (_rows(new[0]), _rows(new[1]))
    if call is None:
        if written is not None:
            write(pool, spans, *written)
        return by_torch(pool, seen, spans, q)
    out = torch.empty((q.shape[0], q.shape[1], pool.v_dim), dtype=q.dtype)
    # The struct lives from call to call; what changes is written over.
    call.sequences, call.heads, call.threads = len(spans.lengths), q.shape[1], spans.threads
    call.q, call.out, call.q_row = q.data_ptr(), out.data_ptr(), q.stride(0)
    call.k = call.v = None
    if written is not None:
        k, v = written
        call.k, call.v, call.k_row, call.v_in_row = k.data_ptr(), v.data_ptr(), k.stride(0), v.stride(0)
    call.tables, call.table_row = spans.table.data_ptr(), spans.table.shape[1]
    call.begins, call.lengths = spans.begins.data_ptr(), spans.lengths.data_ptr()
    function = kernel(q.dtype)
    assert function is not None
    failed = function(ctypes.addressof(call))
    assert not failed, "`PagedPool.fits` was asked before"
    return out


def _rows(x: Tensor) -> Tensor:
    """A token's heads one after the other."""
    return x if x.stride(-1) == 1 and x.stride(-2) == x.shape[-1] else x.contiguous()


def write(pool: PagedPool, spans: Spans, k: Tensor, v: Tensor) -> None:
    """New keys and values to the last positions of their sequences."""
    bounds, lengths = spans.begins.tolist(), spans.lengths.tolist()
    for number, (begin, end, length) in enumerate(zip(bounds, bounds[1:], lengths, strict=False)):
        # New positions are the last ones of a sequence.
        at = torch.arange(length - (end - begin), length, device=k.device)
        # Position p lies in the (p // size)-th block of its sequence, at p % size.
        block, place = spans.table[number].long()[at // pool.size], at % pool.size
        pool.keys[block, :, :, place] = k[begin:end]
        pool.values[block, :, place, : pool.v_dim] = v[begin:end]


def by_torch(pool: PagedPool, seen: Visibility, spans: Spans, q: Tensor) -> Tensor:
    """A block of a sequence at a time, in float32 or wider, merged as flash attention merges (Dao 2022). A query
    without keys gives zeros."""
    wide, (kv_heads, size) = torch.promote_types(q.dtype, torch.float32), (pool.keys.shape[1], pool.size)
    out = torch.empty((q.shape[0], q.shape[1], pool.v_dim), dtype=q.dtype, device=q.device)
    group = q.shape[1] // kv_heads  # neighbouring query heads share a key head
    bounds, lengths = spans.begins.tolist(), spans.lengths.tolist()
    for number, (begin, end, length) in enumerate(zip(bounds, bounds[1:], lengths, strict=False)):
        table = spans.table[number].long()
        at = torch.arange(length - (end - begin), length, device=q.device)
        mine = q[begin:end].to(wide).unflatten(1, (-1, group))  # (queries, kv heads, group, dim)
        # of each query: the largest score so far, the sum of exponentials below it, the sum of values by these
        top = torch.full(mine.shape[:3], -torch.inf, dtype=wide, device=q.device)
        total = torch.zeros_like(top)
        acc = torch.zeros((*mine.shape[:3], pool.v_dim), dtype=wide, device=q.device)
        # The first query sees back to its own position less window - 1; blocks before that are skipped.
        first = max(0, length - (end - begin) - seen.window + 1) // size if seen.window else 0
        for page in range(first, -(-length // size)):
            keys, values = pool.keys[table[page]].to(wide), pool.values[table[page], :, :, : pool.v_dim].to(wide)
            score = torch.einsum("qhgd,hdt->qhgt", mine, keys) * seen.scale
            if seen.cap:
                score = torch.tanh(score / seen.cap) * seen.cap
            places = torch.arange(page * size, (page + 1) * size, device=q.device)
            distance = places[None, :] - at[:, None]  # (queries, positions of the block)
            if seen.slopes is not None:
                slopes = seen.slopes.to(wide).unflatten(0, (-1, group))
                score = score + slopes[None, :, :, None] * distance[:, None, None, :]
            # What a block holds beyond the sequence's length is of an earlier owner.
            hidden = (places >= length)[None, :].expand_as(distance)
            if seen.causal:
                hidden = hidden | (distance > 0)
            if seen.window:
                hidden = hidden | (distance <= -seen.window) | (distance >= seen.window)
            score = score.masked_fill(hidden[:, None, None, :], -torch.inf)
            most = torch.maximum(top, score.amax(-1))
            # a query that has seen nothing yet keeps -inf, of which no exponential is taken
            base = torch.where(most == -torch.inf, 0.0, most)
            rescale, shares = (top - base).exp(), (score - base[..., None]).exp()
            total = total * rescale + shares.sum(-1)
            acc = acc * rescale[..., None] + torch.einsum("qhgt,htd->qhgd", shares, values)
            top = most
        if seen.sinks is not None:
            sink = seen.sinks.to(wide).unflatten(0, (-1, group))
            most = torch.maximum(top, sink)
            acc, total = acc * (top - most).exp()[..., None], total * (top - most).exp() + (sink - most).exp()
        out[begin:end] = (acc / torch.where(total > 0, total, 1.0)[..., None]).flatten(1, 2).to(out.dtype)
    return out


def over_blocks(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, seen: Visibility) -> Tensor:
    """The kind's own shapes: as many queries of each sequence, q (sequences, queries, heads, dim)."""
    B, Q = q.shape[:2]
    pool = PagedPool(keys=keys, values=values, v_dim=values.shape[3])
    begins = torch.arange(0, (B + 1) * Q, Q, device=q.device)
    spans = Spans(begins=begins, lengths=lengths.long(), table=table.int(), threads=torch.get_num_threads())
    # sequences of no or fewer positions than queries are rows of a batch that is filled up: torch's function has them
    whole = pool.fits and bool((lengths >= Q).all())
    call = pool.call(seen) if whole else None
    return attend(pool, seen, spans, q.flatten(0, 1), call=call).unflatten(0, (B, Q))


@torch.library.custom_op("gnomon::paged_attention", mutates_args=())
def _paged_attention(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, causal: bool, window: int, scale: float,
    softcap: float = 0.0,
) -> Tensor:  # fmt: skip
    seen = Visibility(scale=scale or q.shape[-1] ** -0.5, causal=causal, window=window, cap=softcap)
    return over_blocks(q, keys, values, table, lengths, seen)


@_paged_attention.register_fake
def _(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, causal: bool, window: int, scale: float,
    softcap: float = 0.0,
) -> Tensor:  # fmt: skip
    return q.new_empty(*q.shape[:-1], values.shape[-1])


def paged_attention(site: Site, q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """Attention over the blocks that the table names; no gradient passes."""
    seen = seen_of(site, q.shape[-1])
    with torch.no_grad():
        return over_blocks(q, keys, values, table, lengths, seen)


def seen_of(site: Site, k_dim: int, *, slopes: Tensor | None = None, sinks: Tensor | None = None) -> Visibility:
    """The mask that the attributes of `paged_attention` say; `attention` has the same ones."""
    return Visibility(
        scale=float(site.attr("scale", 0.0)) or k_dim**-0.5,
        causal=bool(site.attr("causal", False)),
        window=int(site.attr("window", 0)),
        cap=float(site.attr("softcap", 0.0)),
        slopes=None if slopes is None else slopes.float().contiguous(),
        sinks=None if sinks is None else sinks.float().contiguous(),
    )
