"""Copies of other ranks' experts, fetched while the layer before theirs computes: `ExpertCopies` of one rank.

Each rank writes its own experts, packed as its kernels read them, into a file without a name, and reads those of the
others as bytes: on one host, through the page cache. A rank has two rooms of so many slots. When a layer's tokens are
routed (`dispatch`), its copies are waited for, its rows are shared out among who holds which expert, and the copies of
the next layer, which are foreseen from what tokens have chosen so far (`serving.foresight`), begin to come into the
other room. All ranks of a stage route all tokens, count the same and decide the same, so that none needs to be told: a
copy is used only once it is whole on the rank that has it, which is why a rank waits for its own.
What an expert's weights and a copy cost beside rows is measured at the start, on all ranks, and the largest taken.
`PathRecorder` keeps what routers chose, for predictions. Leaves out the first layer with experts, which no layer
foresees.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gnomon.compiler.kernels.stored import AnyPacked
from gnomon.errors import InputError, RunError
from gnomon.runtime.ops.routing import Routing, routing_of
from gnomon.runtime.parameters.files import unnamed_file
from gnomon.serve.division import ModelShare
from gnomon.serve.matrices import matmul_by
from gnomon.serve.rows import TokenRows
from gnomon.serving.foresight import LENGTH, Copies, Costs, PathRecord, Paths, choose_copies, holders_of, shares
from gnomon.units import show_bytes

ROOMS = 2
"""One for the layer that computes, one for the layer that is fetched."""
ALIGNED = 64
"""Bytes at multiples of which tensors begin."""
MANY = 256
"""Rows of the product that a row's time is measured by."""
Matrix = AnyPacked | Tensor
Product = Callable[[Tensor], Tensor]


def _tensors(matrix: Matrix) -> dict[str, Tensor]:
    """What a matrix consists of, by field."""
    if isinstance(matrix, Tensor):
        return {"": matrix}
    return {f.name: x for f in fields(matrix) if isinstance(x := getattr(matrix, f.name), Tensor)}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """An op's matrices of a layer's experts, in every rank's file."""

    begin: int
    """First byte of the first expert's."""
    nbytes: int
    """Of an expert's."""
    matrix: Matrix
    """One of them, as which copies are laid."""
    bias: Tensor | None


class ExpertCopies:
    """Copies of one rank."""

    def __init__(self, share: ModelShare, layers: int, experts: int, room: int, folder: Path) -> None:
        """Takes layers (with experts, of this stage), experts (of a layer), room (copies of a layer that this rank has
        slots for), and the folder of the file."""
        self.share, self.experts, self.room, self.folder = share, experts, room, folder
        self.each = experts // share.ep.ranks
        self.first = self.each * share.ep.index
        self.kept: list[list[_Kept]] = [[] for _ in range(layers)]
        """By layer, in the order of its ops."""
        self.paths = Paths(layers, experts)
        self.costs = Costs(touch=0.0, fetch=0.0)
        self.held: list[Copies] = [((),) * share.ep.ranks for _ in range(ROOMS)]
        self.products: list[list[list[Product]]] = []
        """By room and op of a layer: of each slot."""
        self.fetched, self.waited_s = 0, 0.0
        """Copies of all ranks, and seconds that this rank's layers waited for their own, since the start."""
        self._file, self._end = unnamed_file(folder, 0), 0
        self._files: list[int] = []
        """Of each rank of ep: its file, opened here."""
        self._slots: list[list[list[Tensor]]] = []
        self._now = 0
        self._coming: list[Future[None] | None] = [None] * ROOMS
        self._thread = ThreadPoolExecutor(1, "experts")

    def __del__(self) -> None:
        for number in (self._file, *self._files):
            os.close(number)

    # --- before it serves

    def keep(self, layer: int, matrices: Sequence[Matrix], biases: Sequence[Tensor] | None) -> None:
        """Writes an op's matrices of this rank's experts. InputError where one is laid otherwise than another, RunError
        for a disk that is full."""
        parts = [
            [*_tensors(one).values(), *([] if biases is None else [biases[at]])] for at, one in enumerate(matrices)
        ]
        shapes = {tuple((x.dtype, tuple(x.shape)) for x in own) for own in parts}
        if len(shapes) > 1 or any(len(own) == 0 for own in parts):
            raise InputError(
                "copies of experts are of matrices that are all stored alike, and these are not (sparse ones are laid "
                "by what each has); serve without --expert-copies"
            )
        nbytes = sum(_room(x) for x in parts[0])
        bias = None if biases is None else biases[0]
        self.kept[layer].append(_Kept(begin=self._end, nbytes=nbytes, matrix=matrices[0], bias=bias))
        for own in parts:
            at = self._end
            for x in own:
                _write(self._file, x, at, self.folder)
                at += _room(x)
            self._end += nbytes

    def start(self) -> None:
        """All ranks have kept theirs: opens the others' files, makes the slots and measures what copies cost. All ranks
        of a stage must come here. InputError for a model whose layers are unlike."""
        like = [[(k.nbytes, k.begin - own[0].begin) for k in own] for own in self.kept]
        if any(one != like[0] for one in like):
            raise InputError("copies of experts are of layers whose experts are alike; serve without --expert-copies")
        group = self.share.tp.group
        told: list[Any] = [None] * self.share.tp.ranks
        dist.all_gather_object(told, (os.getpid(), self._file), group=group)
        # a file without a name is reached through who has it open; of ranks that share an expert, the one like this
        etp = self.share.etp
        mine = [told[part * etp.ranks + etp.index] for part in range(self.share.ep.ranks)]
        try:
            self._files = [os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY) for pid, number in mine]
        except OSError as error:
            raise RunError(f"cannot open the experts of another process: {error.strerror}") from error
        for _ in range(ROOMS):
            made = [[self._slot(kept) for _ in range(self.room)] for kept in self.kept[0]]
            self._slots.append([[flat for flat, _ in own] for own in made])
            self.products.append([[product for _, product in own] for own in made])
        costs: list[Any] = [None] * self.share.tp.ranks
        dist.all_gather_object(costs, self._measured(), group=group)
        self.costs = Costs(touch=max(c[0] for c in costs), fetch=max(c[1] for c in costs))

    def _slot(self, kept: _Kept) -> tuple[Tensor, Product]:
        """(bytes of a slot, the product of what lies in it)."""
        flat = torch.zeros(kept.nbytes + ALIGNED, dtype=torch.uint8)
        # -p % ALIGNED bytes from address p is the next multiple of ALIGNED: kernels read packed matrices from there.
        flat = flat[-flat.data_ptr() % ALIGNED :][: kept.nbytes]
        at, views = 0, dict[str, Any]()
        for name, x in _tensors(kept.matrix).items():
            views[name] = flat[at : at + x.nbytes].view(x.dtype).view(x.shape)
            at += _room(x)
        bias = None if kept.bias is None else flat[at : at + kept.bias.nbytes].view(kept.bias.dtype)
        if isinstance(kept.matrix, Tensor):
            return flat, matmul_by(views[""], bias)
        return flat, matmul_by(replace(kept.matrix, **views), bias)

    def _measured(self) -> tuple[float, float]:
        """(touch, fetch) as `Costs` has them, on this rank."""
        # The first expert of the next rank: one that this rank has not, read as it would be while serving.
        other = (self.first + self.each) % self.experts
        fetch_s = _least_s(lambda: self._fetch(0, 0, (other,)))
        inner = [_inner(kept.matrix) for kept in self.kept[0]]

        def multiplied(rows: int) -> float:
            xs = [
                torch.zeros((rows, width), dtype=_dtype(kept)) for width, kept in zip(inner, self.kept[0], strict=True)
            ]
            return _least_s(lambda: [own[0](x) for own, x in zip(self.products[0], xs, strict=True)])

        one_s, many_s = multiplied(1), multiplied(MANY)
        # Costs are counted in rows of one product: the time of one row is the slope between two sizes, and reading the
        # weights is what a product of one row takes.
        row_s = max((many_s - one_s) / (MANY - 1), 1e-9)
        return one_s / row_s, fetch_s / row_s

    # --- while it serves

    def dispatch(self, layer: int, rows: TokenRows, x: Tensor, indices: Tensor) -> Tensor:
        """Rows of what this rank computes of a layer, its own experts' and those of copies; begins to fetch the copies
        of the next. layer: its number among those with experts. x: (1, tokens, width)."""
        routing = routing_of(indices, self.experts)
        chosen = indices.reshape(-1, routing.topk).numpy()
        path = self._path(rows, layer, len(chosen))
        self.paths.note(layer, path, chosen)
        room = self._now
        # No layer comes before the first with experts, so nothing was fetched for it.
        copies = self._wait(room) if layer else ((),) * self.share.ep.ranks
        rows.shared_values["routing"] = self._shared(routing, copies)
        rows.shared_values["room"] = room
        self._now = (room + 1) % ROOMS
        if layer + 1 < len(self.kept):
            # A token's path is its first choice in each of the last LENGTH layers with experts: [layers, tokens].
            path = np.concatenate([path, chosen[None, :, 0]])[-LENGTH:]
            rows.shared_values["path"] = path
            wanted = choose_copies(
                self.paths.foresee(layer + 1, path).tolist(), self.share.ep.ranks, self.room, self.costs
            )
            self._begin(self._now, layer + 1, wanted)
        order = rows.shared_values["routing"].order
        return x.reshape(-1, x.shape[-1]).index_select(0, order // routing.topk)

    def _path(self, rows: TokenRows, layer: int, tokens: int) -> Any:
        path = rows.shared_values.get("path")
        if layer == 0 or path is None or path.shape[1] != tokens:
            return np.zeros((0, tokens), np.int64)
        return path

    def _shared(self, routing: Routing, copies: Copies) -> Routing:
        """What this rank computes: of each expert its share of the rows, which are sorted by expert. Its own experts
        come first, then those in its slots."""
        held = holders_of(copies, self.experts)
        made = shares(routing.counts, copies, self.costs)
        # Expert e has the sorted rows [begins[e], begins[e + 1]), which its holders share out in the order of `held`.
        begins = np.concatenate([[0], np.cumsum(routing.counts)]).tolist()
        own = copies[self.share.ep.index]
        parts, counts, rank = [], [], self.share.ep.index
        for expert in (*range(self.first, self.first + self.each), *own):
            place = held[expert].index(rank)
            begin = begins[expert] + sum(made[expert][:place])
            parts.append(routing.order[begin : begin + made[expert][place]])
            counts.append(made[expert][place])
        return Routing(order=torch.cat(parts), counts=tuple(counts), topk=routing.topk)

    def _begin(self, room: int, layer: int, copies: Copies) -> None:
        if (before := self._coming[room]) is not None:  # of an iteration that has failed half-way
            before.result()
        self.held[room] = copies
        own = copies[self.share.ep.index]
        self.fetched += sum(map(len, copies))
        self._coming[room] = self._thread.submit(self._fetch, room, layer, own) if own else None

    def _wait(self, room: int) -> Copies:
        if (coming := self._coming[room]) is not None:
            began = time.perf_counter()
            coming.result()
            self._coming[room] = None
            self.waited_s += time.perf_counter() - began
        return self.held[room]

    def _fetch(self, room: int, layer: int, experts: Sequence[int]) -> None:
        for op, kept in enumerate(self.kept[layer]):
            for slot, expert in enumerate(experts):
                view, done = memoryview(self._slots[room][op][slot].numpy().data), 0
                # All ranks write the same number of experts in the same order, so this rank's offsets hold in the
                # others' files.
                begin = kept.begin + expert % self.each * kept.nbytes
                # A read may return less than was wanted.
                while done < kept.nbytes:
                    count = os.preadv(self._files[expert // self.each], [view[done:]], begin + done)
                    if not count:
                        raise RunError("the file with another process's experts is shorter than it was written")
                    done += count


def _room(x: Tensor) -> int:
    """Bytes that a tensor takes in a file and a slot."""
    return -(-x.nbytes // ALIGNED) * ALIGNED


def _write(file: int, x: Tensor, at: int, folder: Path) -> None:
    view, done = memoryview(x.contiguous().flatten().view(torch.uint8).numpy().data), 0
    try:
        while done < len(view):
            done += os.pwrite(file, view[done:], at + done)
    except OSError as error:
        raise RunError(
            f"cannot put {show_bytes(at + len(view))} of experts into a file in {str(folder)!r}: {error.strerror}; "
            f"make room there, or set GNOMON_DISK to a folder on another disk"
        ) from error


def _inner(matrix: Matrix) -> int:
    """Numbers of a row that it multiplies."""
    return int(matrix.shape[1])


def _dtype(kept: _Kept) -> torch.dtype:
    """The dtype of the rows that a matrix multiplies."""
    if isinstance(kept.matrix, Tensor):
        return kept.matrix.dtype
    return torch.float32 if kept.matrix.storage.name == "fp32" else torch.bfloat16


def _least_s(run: Callable[[], object], times: int = 9) -> float:
    """Seconds of the quickest of some runs after a first."""
    run()
    took = []
    for _ in range(times):
        began = time.perf_counter()
        run()
        took.append(time.perf_counter() - began)
    return min(took)


MOST_TOKENS = 1 << 18
"""Of a record: what comes later is not kept."""


class PathRecorder:
    """What routers choose, token by token."""

    def __init__(self, model: str, layers: Sequence[str], experts: int) -> None:
        self.model, self.layers, self.experts = model, tuple(layers), experts
        self.chosen: list[list[Any]] = [[] for _ in layers]
        """By layer, of each iteration: (tokens, topk)."""
        self.tokens = 0

    def note(self, layer: int, indices: Tensor) -> None:
        """Keeps what a layer's tokens chose. layer: its number among those with experts. indices: (1, tokens, topk)."""
        # an iteration is kept whole or not at all: one that failed half-way ends in fewer layers than it began with
        if layer and len(self.chosen[layer]) + 1 != len(self.chosen[layer - 1]):
            return
        if layer == 0:
            if self.tokens >= MOST_TOKENS:
                return
            # The last layer is noted last: what it has is whole, and what other layers have beyond that is of an
            # iteration that failed.
            whole = len(self.chosen[-1])
            for own in self.chosen:
                del own[whole:]
            self.tokens += indices.shape[-2]
        self.chosen[layer].append(indices.reshape(-1, indices.shape[-1]).to(torch.int16).numpy())

    def record(self) -> PathRecord:
        """Records what is whole. InputError where nothing is."""
        whole = len(self.chosen[-1])
        if not whole:
            raise InputError("no token has been routed, and there is nothing to record")
        counts = [len(one) for one in self.chosen[0][:whole]]
        return PathRecord(
            model=self.model,
            layers=self.layers,
            experts=self.experts,
            begins=tuple(np.cumsum([0, *counts]).tolist()),
            chosen=np.stack([np.concatenate(own[:whole]) for own in self.chosen]).astype(np.int64),
        )
