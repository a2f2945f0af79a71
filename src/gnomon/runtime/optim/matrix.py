"""Update rules that look at whole matrices, Adafactor and Muon, where ranks have parts of them.

Adafactor adds up squares of rows and columns over the ranks (`Ranks`), and then the squares of its updates: two short
all-reduces. Muon gathers what its momentum makes of the gradient: the shards of ZeRO as they lie, then the parts of
tensor parallelism matrix by matrix, and each rank orthogonalises the matrices that it updates elements of. A rank keeps
the states of its own elements alone, but for means of whole rows and columns. `sharding.matrices` says what
travels. Left out: elementwise rules (`optim`).
Sources: Shazeer and Stern 2018, as torch.optim.Adafactor has it; Jordan et al. 2024, as torch.optim.Muon has it; Liu et
al. 2025 (Distributed Muon: gather, orthogonalise, keep the own part).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gnomon.runtime.mesh.collectives import all_gather, all_reduce
from gnomon.runtime.parameters.parameters import Parameters, Range, Slot

BETA2_DECAY, RELATIVE_EPS, LARGEST = -0.8, 1e-3, 1.0
"""Adafactor: decay of the second moment in steps, smallest size that an update is relative to, largest update."""
COEFFICIENTS, ITERATIONS = (3.4445, -4.7750, 2.0315), 5
"""Muon's polynomial, and how often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Groups that have parts of the same matrices; None for none."""

    shards: ProcessGroup | None = None
    """Those that ZeRO divides over."""
    inner: ProcessGroup | None = None
    """Tensor-parallel ones, or those of the pipeline that divide the vocabulary."""
    differ: bool = False
    """Whether these have other parameters than each other beside those that they divide."""

    def of(self, slots: Iterable[Slot]) -> Ranks:
        """Those that divide these parameters."""
        return self if any(slot.places for slot in slots) else Ranks(shards=self.shards)

    def add_up(self, sums: _Sums, slots: Iterable[Slot]) -> None:
        """The sums over all of them, in place."""
        if self.inner is not None:
            parts = [sums.parts[slot.name] for slot in slots if slot.places or not self.differ]
            together = torch.cat(parts) if self.differ else sums.flat
            all_reduce(together, self.inner)
            if self.differ:
                for part, value in zip(parts, together.split([len(part) for part in parts]), strict=True):
                    part.copy_(value)
        if self.shards is not None:
            all_reduce(sums.flat, self.shards)


ALONE = Ranks()

Moments = tuple[Tensor, Tensor]
"""Means of squares by rows (count, rows) and by columns (count, columns) of whole matrices; of a vector those of a
rank's elements, and none."""


def moments_of(kind: str, parameters: Parameters) -> dict[str, Moments]:
    """Moments at 0, by parameter: Adafactor's of all that this rank has elements of; Muon's of what it leaves to
    AdamW."""
    moments = dict[str, Moments]()
    for slot, (low, high) in parameters.pieces():
        sizes: tuple[tuple[int, ...], tuple[int, ...]]
        if kind == "adafactor" and slot.split is not None:
            count, rows, columns = slot.whole_matrix
            sizes = (count, rows), (count, columns)
        elif kind == "adafactor" or (kind == "muon" and not is_orthogonal(slot)):
            sizes = (high - low,), (0,)
        else:
            continue
        one, other = (torch.zeros(size, dtype=parameters.dtypes.states, device=parameters.device) for size in sizes)
        moments[slot.name] = one, other
    return moments


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """Neighbouring rows and columns of one of a parameter's matrices on this rank."""

    matrix: int
    rows: slice
    columns: slice
    at: slice
    """Its elements within the rank's part of the parameter."""


def adafactor(
    parameters: Parameters,
    target: Tensor,
    grads: Tensor,
    moments: dict[str, Moments],
    *,
    lr: float,
    decay: float,
    steps: int,
    ranks: Ranks,
) -> None:
    """One step of this rank's part `target`. moments: by parameter. decay: of matrices. steps: this one included."""
    # 1 - beta2 at step t is t^-0.8 (Shazeer and Stern 2018), so the first step takes the square as it is.
    change, dtype, ranks = steps**BETA2_DECAY, _wide(parameters.dtypes.states), ranks.of(parameters.slots)
    eps = torch.finfo(target.dtype).eps
    sums = _Sums(parameters.slots, dtype, target.device)
    for slot, (low, high) in parameters.pieces():
        own, rows, columns = sums.of(slot)
        share = 1 / slot.copies if ranks.inner is not None else 1.0
        for block in _blocks(slot, parameters, low, high):
            p, g = (x[low:high][block.at].to(dtype) for x in (target, grads))
            # Elements that several ranks hold are added up once for all of them.
            own[block.matrix] += p.square().sum() * share
            if slot.split is not None:
                square, (rows_at, columns_at) = _square(g, block) * share, _places(slot, target.device)
                rows[block.matrix].index_add_(0, rows_at[block.rows], square.sum(1))
                columns[block.matrix].index_add_(0, columns_at[block.columns], square.sum(0))
    ranks.add_up(sums, parameters.slots)
    for slot, (low, high) in parameters.pieces():
        _move(moments[slot.name], grads[low:high], sums, slot, change)
    # Updates are made twice, here for their length over all ranks and below to be applied: kept in between, those of
    # all parameters would be as large as the gradients.
    lengths = _Sums(parameters.slots, dtype, target.device, only_own=True)
    for slot, (low, high) in parameters.pieces():
        share = 1 / slot.copies if ranks.inner is not None else 1.0
        for block in _blocks(slot, parameters, low, high):
            update = _update(moments[slot.name], grads[low:high], block, slot, eps, dtype)
            lengths.of(slot)[0][block.matrix] += update.square().sum() * share
    ranks.add_up(lengths, parameters.slots)
    for slot, (low, high) in parameters.pieces():
        # Root mean squares of whole matrices: an update is relative to the size of its parameter, and its own is at
        # most LARGEST.
        size = math.prod(slot.whole_matrix[1:]) if slot.split is not None else math.prod(slot.whole)
        own = (sums.of(slot)[0] / size).sqrt_().clamp_(min=RELATIVE_EPS) * min(lr, steps**-0.5)
        own /= (lengths.of(slot)[0] / size).sqrt_().div_(LARGEST).clamp_(min=1.0)
        if decay and slot.decays:
            target[low:high].mul_(1 - lr * decay)
        for block in _blocks(slot, parameters, low, high):
            update = _update(moments[slot.name], grads[low:high], block, slot, eps, dtype)
            target[low:high][block.at] -= (update * own[block.matrix]).to(target.dtype)


class _Sums:
    """Sums of squares, in one vector: of each matrix itself (a vector is one), of its gradient by rows and columns."""

    def __init__(self, slots: Iterable[Slot], dtype: torch.dtype, device: torch.device, *, only_own: bool = False):
        self.sizes: dict[str, tuple[int, int, int]] = {}
        for slot in slots:
            count, rows, columns = slot.whole_matrix if slot.split is not None else (1, 0, 0)
            self.sizes[slot.name] = count, 0 if only_own else rows, 0 if only_own else columns
        total = [count * (1 + rows + columns) for count, rows, columns in self.sizes.values()]
        self.flat = torch.zeros(sum(total), dtype=dtype, device=device)
        self.parts = dict(zip(self.sizes, self.flat.split(total), strict=True))

    def of(self, slot: Slot) -> tuple[Tensor, Tensor, Tensor]:
        """The sums of each matrix (count), of its rows (count, rows) and of its columns (count, columns)."""
        count, rows, columns = self.sizes[slot.name]
        own, by_rows, by_columns = self.parts[slot.name].split((count, count * rows, count * columns))
        return own, by_rows.view(count, rows), by_columns.view(count, columns)


def _move(moments: Moments, grad: Tensor, sums: _Sums, slot: Slot, change: float) -> None:
    """The moments after this step, in place."""
    first, second = moments
    if slot.split is None:
        first.lerp_(grad.to(first.dtype).square(), change)
        return
    _, rows, columns = sums.of(slot)
    _, height, width = slot.whole_matrix
    first.lerp_((rows / width).to(first.dtype), change)
    second.lerp_((columns / height).to(second.dtype), change)


def _update(moments: Moments, grad: Tensor, block: _Block, slot: Slot, eps: float, dtype: torch.dtype) -> Tensor:
    """The update of some of this rank's elements, before it is clipped to its length."""
    first, second = moments
    if slot.split is None:
        variance = first[block.at].to(dtype, copy=True)
    else:
        rows_at, columns_at = _places(slot, grad.device)
        by_rows, by_columns = first[block.matrix].to(dtype), second[block.matrix].to(dtype)
        variance = by_rows[rows_at[block.rows]].unsqueeze(1) * by_columns[columns_at[block.columns]]
        # Rank-one estimate: outer product of row and column means over the mean of all.
        variance = variance.div_(by_rows.mean().clamp(min=eps)).view(-1)
    return variance.clamp_(min=eps * eps).rsqrt_().mul_(grad[block.at])


def _square(grad: Tensor, block: _Block) -> Tensor:
    return grad.view(block.rows.stop - block.rows.start, -1).square()


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What sums are added up in."""
    return torch.promote_types(dtype, torch.float32)


def _blocks(slot: Slot, parameters: Parameters, low: int, high: int) -> Iterator[_Block]:
    """What a rank has of a parameter: a vector as it is, of a matrix part of a row, whole rows, and part of a row."""
    at = parameters.mine[0] + low - slot.start  # of the parameter, where its part begins
    if slot.matrix is None:
        yield _Block(matrix=0, rows=slice(0), columns=slice(0), at=slice(0, high - low))
        return
    _, rows, columns = slot.matrix
    begin, stop = at, at + high - low
    while begin < stop:
        # Rows are counted through all matrices side by side, one after the other.
        row, column = divmod(begin, columns)
        first = row % rows
        if column or stop - begin < columns:
            end = min(stop, (row + 1) * columns)
            part, across = slice(first, first + 1), slice(column, column + end - begin)
        else:
            last = min(stop // columns, row - first + rows)  # of this matrix
            part, across, end = slice(first, first + last - row), slice(0, columns), last * columns
        yield _Block(matrix=row // rows, rows=part, columns=across, at=slice(begin - at, end - at))
        begin = end


@lru_cache(maxsize=4096)
def _places(slot: Slot, device: torch.device) -> tuple[Tensor, Tensor]:
    """The rows and the columns of the whole matrices of which this rank has elements."""
    assert slot.split is not None
    many, rows = slot.split
    found = []
    # Dims [0, many) count matrices, [many, rows) are rows, the others columns. `at` numbers all rows (or columns) of a
    # whole matrix; what is left after the cuts are the numbers of this rank's.
    for part in (slice(many, rows), slice(rows, None)):
        at = torch.arange(math.prod(slot.whole[part])).view(slot.whole[part])
        for dim, (first, length) in enumerate(zip(slot.offset[part], slot.shape[part], strict=True)):
            at = at.narrow(dim, first, length)
        found.append(at.flatten().to(device))
    return found[0], found[1]


def muon(
    parameters: Parameters,
    target: Tensor,
    grads: Tensor,
    momentum: Tensor,
    *,
    lr: float,
    decay: float,
    mu: float,
    ranks: Ranks,
) -> None:
    """One step of the matrices (`is_orthogonal`) in this rank's part `target`, with Nesterov's momentum. Overwrites
    their gradients. decay: of matrices."""
    chosen = [(slot, piece) for slot, piece in parameters.pieces() if is_orthogonal(slot)]
    for _, (low, high) in chosen:
        g, m = grads[low:high].to(momentum.dtype), momentum[low:high]
        m.lerp_(g, 1 - mu)
        # Nesterov: the momentum after this step, looked ahead by mu; written over the gradient, which nothing reads
        # afterwards.
        grads[low:high] = torch.lerp(g, m, mu)
    whole = grads
    if ranks.shards is not None and any(is_orthogonal(slot) for slot in parameters.slots):
        room = (
            parameters.grad if parameters.grad is not None and parameters.grad.numel() == parameters.size else None
        )  # the host's is a shard
        whole = torch.empty(parameters.size, dtype=grads.dtype, device=grads.device) if room is None else room
        all_gather(whole, grads, ranks.shards)
    elif ranks.shards is None:
        assert parameters.mine == (0, parameters.size), "a shard of its own without ranks that have the others"
    pieces = dict[str, Range]((slot.name, piece) for slot, piece in chosen)
    # `_orthogonal` gathers over the inner group: all its ranks come to it for the same matrices in the same order, even
    # those whose own shard has no element of one.
    for slot in parameters.slots if ranks.differ else [slot for slot, _ in chosen]:
        if slot.name not in pieces and not (slot.places and is_orthogonal(slot)):
            continue
        update = _orthogonal(slot, whole[slot.start : slot.stop], ranks)
        if slot.name not in pieces:  # its own part is another shard's, which other ranks of the pipeline may have
            continue
        low, high = pieces[slot.name]
        first = parameters.mine[0] + low - slot.start
        _, rows, columns = slot.whole_matrix
        if slot.decays:
            target[low:high].mul_(1 - lr * decay)
        part = update[first : first + high - low].to(target.dtype)
        # torch.optim.Muon's adjustment ("original"): steps of tall matrices are longer by the root of rows over
        # columns.
        target[low:high].add_(part, alpha=-lr * math.sqrt(max(1.0, rows / columns)))


def is_orthogonal(slot: Slot) -> bool:
    """Whether Muon orthogonalises the update: of matrices, but for tables."""
    return slot.split is not None and not slot.table


def _orthogonal(slot: Slot, update: Tensor, ranks: Ranks) -> Tensor:
    """This rank's part, flat, of the orthogonal factors of whole matrices. update: its part of them, flat."""
    assert slot.split is not None
    many = slot.split[0]
    shape = (*slot.shape[:many], *slot.whole[many:])
    if ranks.inner is None or not slot.places:
        return orthogonal(update.view(slot.whole_matrix)).reshape(-1)
    parts = update.new_empty(len(slot.places) * update.numel())
    all_gather(parts, update, ranks.inner)
    whole = update.new_empty(shape)
    for part, place in zip(parts.view(len(slot.places), *slot.shape), slot.places, strict=True):
        _box(whole, slot, place).copy_(part)
    done = orthogonal(whole.view(slot.whole_matrix)).view(shape)
    return _box(done, slot, slot.offset).reshape(-1)


def _box(whole: Tensor, slot: Slot, place: tuple[int, ...]) -> Tensor:
    """The part of a parameter that begins at `place`."""
    assert slot.split is not None
    for dim in range(slot.split[0], len(slot.shape)):
        whole = whole.narrow(dim, place[dim], slot.shape[dim])
    return whole


def orthogonal(x: Tensor) -> Tensor:
    """Near the orthogonal factor of each matrix, by Newton and Schulz's iteration: on a GPU in bfloat16, on a CPU in
    float32, in float64 for float64 runs, which compare plans."""
    a, b, c = COEFFICIENTS
    y = x if x.dtype == torch.float64 else x.bfloat16() if x.is_cuda else x.float()
    tall = y.shape[-2] > y.shape[-1]
    # The gram matrix is then of the shorter side.
    y = y.mT if tall else y
    # The iteration converges for singular values up to 1, which the Frobenius norm bounds.
    y = y / y.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    # Singular values end near 1, not at it: the coefficients trade that for few iterations (Jordan et al. 2024).
    for _ in range(ITERATIONS):
        gram = y @ y.mT
        y = a * y + (b * gram + c * (gram @ gram)) @ y
    return y.mT if tall else y
