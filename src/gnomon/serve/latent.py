"""Latent attention (MLA) as an engine keeps it: the latent and the rotated key of each token, and nothing a head.

`latent_of(block, op)` says whether an attention's keys and values are made of one latent; `LatentPages.attend` runs
what the Graph has as an up-projection, a concatenation and attention. With few queries the up-projection is absorbed:
queries go to the latent's space (q_nope W_UK), see latents as keys and as values, and come back by W_UV. With many,
keys and values of a span are made again from its latents, which is fewer products then. A span of several blocks at a
time, merged as flash attention merges, so that no sequence is copied together. A kernel of ours (cpp/latent.cpp) does
it in float32 and bfloat16, for decodes of many sequences and pieces of prompts in one call; torch (`_seen`) where it
does not compile, in float64, and where an adapter changes the up-projection: `LatentPages.call` says which. Leaves out
windows, caps and sinks, which models with latents do not have: those keep keys and values of every head (`paged`).
Source: DeepSeek-V2, section 2.1.2 and appendix C.
Letters: S sequences, Q queries of each, H heads, L tokens of a span, N width of a key without positions, R of the
latent, P of the rotated part, V of a value.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gnomon.compiler.build import address_of, kernel_of
from gnomon.compiler.kernels import stored
from gnomon.compiler.kernels.stored import PackedStored
from gnomon.compiler.kernels.stored_sparse import StoredMatmul
from gnomon.compiler.tune.tried import text_of
from gnomon.graph import Block, Op
from gnomon.runtime.ops.paged import KERNELS, Visibility
from gnomon.serve.adapters import Low
from gnomon.serve.matrices import NUMBERS, activations_of
from gnomon.serve.paged import untouched
from gnomon.serve.rows import TokenRows
from gnomon.storage.dense import Dense

SPAN = 512
"""Tokens whose scores torch computes at once."""
TOGETHER = 128
"""Rows that the kernel multiplies by a head's matrix at once, at most: `KEYS` and `PIECE` of cpp/latent.cpp."""
TOO_FEW = 2
"""What the kernel returns where it would multiply by more rows at once."""
CPP = Path(__file__).with_name("cpp") / "latent.cpp"
_SIZES = "sequences heads nope rope rank v_dim size table_row threads together narrowed most_absorbed".split()


class LatentCall(ctypes.Structure):
    """The struct `LatentCall` of cpp/latent.cpp, field by field."""

    # Order and widths must be those of the C struct: nothing checks them.
    _fields_ = [
        *[(name, ctypes.c_int64) for name in _SIZES],
        ("scale", ctypes.c_double),
        *[(name, ctypes.c_void_p) for name in ("q", "latent", "rotated")],
        *[(name, ctypes.c_int64) for name in ("q_row", "latent_row", "rotated_row")],
        *[(name, ctypes.c_void_p) for name in ("pool", "tables", "begins", "lengths", "absorb", "keys", "values")],
        *[(name, ctypes.c_void_p) for name in ("absorbs", "makes_keys", "makes_values", "out")],
    ]


@cache
def kernel(dtype: torch.dtype) -> Callable[[Any], int] | None:
    """Returns the compiled kernel; None where it does not compile."""
    return kernel_of(text_of(CPP, dtype), ctypes.c_void_p) if dtype in KERNELS else None


@dataclass(frozen=True, slots=True)
class Latent:
    """The ops around an attention whose keys and values are made of one latent."""

    up: Op
    """A linear from the latent to keys without positions and values, of all heads."""
    apart: Op
    """Splits these."""
    join: Op
    """Puts the rotated key beside the others."""

    @property
    def reads(self) -> tuple[str, str]:
        """Returns (latent, rotated key)."""
        return self.up.inputs[0], self.join.inputs[1]


def latent_of(block: Block, op: Op) -> Latent | None:
    """None where keys and values are not made so, or attention has what `LatentPages` leaves out."""
    makers = {name: one for one in block.ops for name in one.outputs}
    if len(op.inputs) != 3 or op.attr("window", 0) or op.attr("softcap", 0.0) or op.attr("sinks", False):
        return None
    join = makers.get(op.inputs[1])
    if join is None or join.kind != "concat" or len(join.inputs) != 2:
        return None
    apart = makers.get(join.inputs[0])
    if apart is None or apart.kind != "split" or apart.outputs != (join.inputs[0], op.inputs[2]):
        return None
    up = makers.get(apart.inputs[0])
    if up is None or not up.is_dense_linear or len(up.inputs) != 2 or len(up.contracts) != 1:
        return None
    rotated, latent = (block.tensor(name) for name in (join.inputs[1], up.inputs[0]))
    latent_names = {*join.outputs, *apart.outputs, *up.outputs}
    others = [
        one for one in block.ops if one not in (op, join, apart) and any(name in latent_names for name in one.inputs)
    ]
    supported = len(rotated.dims) == len(latent.dims) == 3 and not others and not latent_names & set(block.outputs)
    return Latent(up, apart, join) if supported and up.attr("factor", 1.0) == 1.0 else None


def row_of(block: Block, found: Latent) -> int:
    """Elements that are kept of a token."""
    return sum(block.tensor(name).dims[-1].size or 0 for name in found.reads)


class HeadMatrices:
    """A matrix of each head, packed as the kernel's matmuls read them."""

    def __init__(self, weight: Tensor) -> None:
        """weight: (H, outputs, inputs)."""
        form = Dense(dtype=NUMBERS[weight.dtype])
        words = torch.int16 if weight.dtype == torch.bfloat16 else torch.int32
        self.packed: list[PackedStored] = []
        for one in weight.contiguous().view(words):
            made = stored.repack({"values": one.numpy()}, form, (one.shape[0], one.shape[1]), activations_of(form))
            assert isinstance(made, PackedStored)
            self.packed.append(made)
        self.function = stored.function_of(self.packed[0])
        self.products = (StoredMatmul * len(self.packed))(*[stored.stored_matmul(one, None) for one in self.packed])
        first = self.packed[0]
        self.room = first.form.room(TOGETHER, first.shape[1])
        """Bytes that rows take as the kernel reads them."""

    @property
    def addresses(self) -> tuple[int, int]:
        """Addresses of what the kernel reads of all heads' matrices, and of the function that multiplies by one."""
        assert self.function is not None
        return ctypes.addressof(self.products), address_of(self.function)


class LatentPages:
    """Pages of latent keys for one attention op in one layer: (blocks, tokens of a block, R + P)."""

    group = 0

    def __init__(self, blocks: int, size: int, weight: Tensor, widths: tuple[int, int], seen: Visibility) -> None:
        """weight: (H, N + V, R), the up-projection. widths: N and P."""
        self.nope, self.rope = widths
        self.up_k, self.up_v = (
            part.contiguous() for part in weight.split([self.nope, weight.shape[1] - self.nope], dim=1)
        )
        self.rank, self.seen, self.size = weight.shape[2], seen, size
        self.pool = untouched((blocks, size, self.rank + self.rope), weight.dtype)
        self.of_adapter: dict[int, tuple[Tensor, Tensor]] = {}
        """Number of an adapter that changes the up-projection -> what it becomes."""
        # Multiplications of a key and head: absorbed, Q (2 R + P); made again, R (N + V) once and Q (N + P + V).
        saved, made = 2 * self.rank - weight.shape[1], self.rank * weight.shape[1]
        self.most_absorbed = made // saved if saved > 0 else 1 << 31
        """Queries of a sequence up to which the up-projection is absorbed."""
        self.call = self._call(weight.dtype)
        """What the kernel is told of them, which does not change from one time to the next; None: torch computes."""

    def _call(self, dtype: torch.dtype) -> LatentCall | None:
        if kernel(dtype) is None:
            return None
        self.matrices = [HeadMatrices(one) for one in (self.up_k.transpose(1, 2), self.up_k, self.up_v)]
        if any(one.function is None for one in self.matrices):
            return None
        (absorb, absorbs), (keys, makes_keys), (values, makes_values) = (one.addresses for one in self.matrices)
        heads, v_dim = self.up_v.shape[:2]
        return LatentCall(
            heads=heads, nope=self.nope, rope=self.rope, rank=self.rank, v_dim=v_dim, size=self.size,
            together=TOGETHER, narrowed=max(one.room for one in self.matrices), most_absorbed=self.most_absorbed,
            scale=self.seen.scale, pool=self.pool.data_ptr(), absorb=absorb, keys=keys, values=values,
            absorbs=absorbs, makes_keys=makes_keys, makes_values=makes_values,
        )  # fmt: skip

    @property
    def nbytes(self) -> int:
        """Bytes of all pages, used or not."""
        return self.pool.nbytes

    def adapt(self, number: int, low: Low) -> None:
        """An adapter of the up-projection: W + B A."""
        both = torch.cat([self.up_k, self.up_v], dim=1)
        # (a.T b).T is b.T a, with b (rank, outputs) and a (rank, inputs): what the adapter adds, as (outputs, inputs).
        both = (both.float().flatten(0, 1) + (low.a.T @ low.b).T).view(both.shape).to(both.dtype)
        self.of_adapter[number] = both[:, : self.nope].contiguous(), both[:, self.nope :].contiguous()

    def copy(self, source: int, target: int) -> None:
        """One block's contents to another."""
        self.pool[target] = self.pool[source]

    def attend(self, rows: TokenRows, q: Tensor, latent: Tensor, rotated: Tensor) -> Tensor:
        """q (tokens, H, N + P), latent (tokens, R), rotated (tokens, P) -> (tokens, H, V)."""
        if self.call is not None and not self.of_adapter:
            return self._by_kernel(self.call, rows, _rows(q), _rows(latent), _rows(rotated))
        return self._by_torch(rows, q, latent, rotated)

    def _by_kernel(self, call: LatentCall, rows: TokenRows, q: Tensor, latent: Tensor, rotated: Tensor) -> Tensor:
        out, table = torch.empty((*q.shape[:2], self.up_v.shape[1]), dtype=q.dtype), rows.tables[self.group]
        # The struct lives from call to call; what changes is written over.
        call.sequences, call.threads, call.table_row = len(rows.lengths), rows.threads, table.shape[1]
        call.q, call.latent, call.rotated = q.data_ptr(), latent.data_ptr(), rotated.data_ptr()
        call.q_row, call.latent_row, call.rotated_row = q.stride(0), latent.stride(0), rotated.stride(0)
        call.tables, call.begins, call.lengths = table.data_ptr(), rows.begins.data_ptr(), rows.lengths.data_ptr()
        call.out, function = out.data_ptr(), kernel(q.dtype)
        assert function is not None
        failed = function(ctypes.addressof(call))
        assert failed != TOO_FEW
        if failed:
            raise MemoryError(f"no memory for what latent attention of {len(q)} tokens computes on the way")
        return out

    def _by_torch(self, rows: TokenRows, q: Tensor, latent: Tensor, rotated: Tensor) -> Tensor:
        table = rows.tables[self.group].long()
        whose = rows.shared_values.get("whose")
        if whose is None:
            whose = rows.shared_values["whose"] = torch.arange(rows.count).repeat_interleave(torch.diff(rows.begins))
        block = table[whose, rows.positions // self.size]
        self.pool[block, rows.positions % self.size] = torch.cat([latent, rotated], dim=-1)
        if rows.one_each and not self.of_adapter:
            return self._seen(q.unsqueeze(1), table, rows.positions.unsqueeze(1), -1)[:, 0]
        outputs = []
        for number, (begin, end, _) in enumerate(rows.spans):
            if begin == end:
                continue
            adapter = int(rows.adapters[begin])
            at = rows.positions[begin:end].unsqueeze(0)
            outputs.append(self._seen(q[begin:end].unsqueeze(0), table[number : number + 1], at, adapter)[0])
        return torch.cat(outputs)

    def _seen(self, q: Tensor, table: Tensor, at: Tensor, adapter: int) -> Tensor:
        """q (S, Q, H, N + P), table (S, blocks), at (S, Q) positions -> (S, Q, H, V)."""
        wide = torch.promote_types(q.dtype, torch.float32)
        up_k, up_v = (w.to(wide) for w in self.of_adapter.get(adapter, (self.up_k, self.up_v)))
        plain, turned = q[..., : self.nope].to(wide), q[..., self.nope :].to(wide)
        values = up_v.shape[1]
        absorbed = q.shape[1] <= self.most_absorbed
        if absorbed:
            plain = torch.einsum("sqhn,hnr->sqhr", plain, up_k)
        width = self.rank if absorbed else values
        top = q.new_full(q.shape[:3], -torch.inf, dtype=wide)
        total, acc = torch.zeros_like(top), q.new_zeros((*q.shape[:3], width), dtype=wide)
        blocks, last = SPAN // self.size, int(at.max())
        for first in range(0, last // self.size + 1, blocks):
            cached = self.pool[table[:, first : first + blocks]].flatten(1, 2).to(wide)  # (S, L, R + P)
            latents = cached[..., : self.rank]
            keys, mixed = latents, latents
            score = torch.einsum("sqhp,slp->sqhl", turned, cached[..., self.rank :])
            if absorbed:
                score = score + torch.einsum("sqhr,slr->sqhl", plain, keys)
            else:
                score = score + torch.einsum("sqhn,slhn->sqhl", plain, torch.einsum("slr,hnr->slhn", keys, up_k))
                mixed = torch.einsum("slr,hvr->slhv", latents, up_v)
            place = torch.arange(first * self.size, first * self.size + cached.shape[1])
            hidden = place > at[..., None]  # (S, Q, L)
            score = (score * self.seen.scale).masked_fill(hidden[:, :, None], -torch.inf)
            most = torch.maximum(top, score.amax(-1))
            # A query that has seen no key yet has the maximum -inf, and -inf less -inf is NaN. With 0 in its place its
            # shares are exp(-inf) = 0.
            base = torch.where(most == -torch.inf, 0.0, most)
            rescale, shares = (top - base).exp(), (score - base[..., None]).exp()
            total = total * rescale + shares.sum(-1)
            added_acc = torch.einsum("sqhl,slr->sqhr" if absorbed else "sqhl,slhr->sqhr", shares, mixed)
            acc, top = acc * rescale[..., None] + added_acc, most
        out = acc / total[..., None]
        return (torch.einsum("sqhr,hvr->sqhv", out, up_v) if absorbed else out).to(q.dtype)


def _rows(x: Tensor) -> Tensor:
    """A token's numbers one after the other."""
    whole = x.stride(-1) == 1 and (x.dim() < 3 or x.stride(-2) == x.shape[-1])
    return x if whole else x.contiguous()


def skipped(block: Block) -> frozenset[str]:
    """Paths of ops that `LatentPages` runs with an attention."""
    found: Sequence[Latent | None] = [latent_of(block, op) for op in block.ops if op.does == "attends"]
    return frozenset(op.path for one in found if one is not None for op in (one.up, one.apart, one.join))
