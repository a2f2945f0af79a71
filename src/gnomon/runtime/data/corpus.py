"""A corpus as batches: which tokens a step trains on is a function of (seed, step) and nothing else.

`Corpus.open(source)` maps the tokens; `batch(step, …)` is the whole batch of a step, of which every rank takes its
rows, so the plan and the number of processes change nothing. Each epoch visits every row once, in an order of its own.
Rows are cut from one long stream of documents, packed with whole documents that do not see each other, or
of one document each (`packing`).
Held-out documents make validation batches. Leaves out reading text (`documents`) and encoding it (`store`).
"""

from __future__ import annotations

import json
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gnomon.errors import InputError
from gnomon.runtime.data.megatron import Tokens
from gnomon.runtime.data.packing import DOCUMENTS, LENGTHS
from gnomon.runtime.data.store import HELD_OUT, LEARN, RECORD, SIDES, TOKENS, Say, Source, store

TRAINING, VALIDATION = 0, 1
NOTHING = -1
"""Label of what is not to be learnt."""
Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Side:
    """Documents to train on, or held out: ranges of the ids."""

    starts: Integers
    """[documents] index of the first id of each."""
    lengths: Integers
    """[documents] ids of each."""

    @property
    def size(self) -> int:
        """Counts the tokens."""
        return int(self.lengths.sum())

    def of(self, chosen: NDArray[np.bool_]) -> Side:
        """Some of the documents."""
        return Side(starts=self.starts[chosen], lengths=self.lengths[chosen])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedRows:
    """How a side's tokens fill rows of `seq_len` positions: row r has the pieces first[r] to first[r + 1], each a range
    of the ids, whose last id is only predicted."""

    first: Integers
    starts: Integers
    lengths: Integers
    """Ids of a piece: one more than the positions it takes."""

    def __len__(self) -> int:
        return len(self.first) - 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Corpus:
    """Tokens, in two sides."""

    ids: NDArray[Any]
    """Tokens of all documents, one after the other."""
    learn: NDArray[np.uint8] | None
    """Of each id whether it is to be predicted; None for all."""
    training: Side
    """The documents that are trained on."""
    validation: Side
    """The documents that are held out."""
    packing: str
    """`stream`, `documents` or `padded`."""
    vocab_size: int
    """Least that a model's vocabulary must have."""
    where: str
    """For messages."""
    identity: str
    """Same for the same tokens in the same order; kept in checkpoints."""
    notes: tuple[str, ...] = ()
    """To be told before training."""
    packed: dict[tuple[int, int], PackedRows] = field(default_factory=dict)
    """Rows by (side, seq_len), once they are asked for."""

    @staticmethod
    def open(source: Source, say: Say = lambda line: None) -> Corpus:
        """InputError for text or tokens that cannot be read, or hold nothing."""
        record: dict[str, Any] = {"notes": []}
        if (prefix := source.megatron) is not None:
            tokens = Tokens.open(prefix)
            if len(tokens.ids) and (least := int(tokens.ids.min())) < 0:
                at = int(np.argmin(tokens.ids))
                raise InputError(
                    f"{prefix}.bin has token {least} at place {at:,}, and token ids count from 0; write it again, or "
                    f"with the dtype that its index says"
                )
            digest = (_hash(len(tokens.starts)) % HELD_OUT) == 0
            learn, vocab_size = None, int(tokens.ids.max()) + 1 if len(tokens.ids) else 0
        else:
            folder = store(source, say)
            tokens, record = Tokens.open(folder / TOKENS), json.loads((folder / RECORD).read_text())
            digest = np.load(folder / SIDES, allow_pickle=False)
            learn = Tokens.open(folder / LEARN).ids.view(np.uint8) if record["learn"] else None
            vocab_size = int(record["vocab_size"])
        if not len(tokens.ids):
            raise InputError(f"{source.root}: no tokens in it")
        whole = Side(starts=tokens.starts, lengths=tokens.lengths)
        training, validation = _divided(whole, digest)
        packing = source.packing or ("documents" if learn is not None else "stream")
        notes = [str(note) for note in record["notes"]]
        # Not all ids: a corpus would be read whole at each start. Lengths of all documents and the first ids tell
        # corpora apart.
        parts = (packing, len(tokens.ids), whole.lengths.tobytes(), tokens.ids[:4096].tobytes(), training.size)
        return Corpus(
            ids=tokens.ids,
            learn=learn,
            training=training,
            validation=validation,
            packing=packing,
            vocab_size=vocab_size,
            where=str(source.root),
            identity=sha256(repr(parts).encode()).hexdigest()[:16],
            notes=tuple(notes),
        )

    @property
    def training_tokens(self) -> int:
        """There are to train on."""
        return self.training.size

    @property
    def validation_tokens(self) -> int:
        """Counts the tokens that are held out."""
        return self.validation.size

    def check(self, seq_len: int) -> None:
        """InputError unless both sides fill a row."""
        for what, side in (("to train on", self.training), ("held out", self.validation)):
            if side.size <= seq_len and self.packing == "stream":
                raise InputError(
                    f"{self.where}: a sequence takes {seq_len + 1} tokens, but there are {side.size} {what}; give more "
                    f"text, or less seq_len"
                )
            if not (side.lengths > 1).any():
                raise InputError(f"{self.where}: no document {what} has two tokens or more; give more text")

    def batch(self, step: int, *, seed: int, sequences: int, seq_len: int) -> dict[str, Tensor]:
        """`input_ids` and `labels` of a step, (sequences, seq_len) each, and `documents` of packed ones or `lengths` of
        padded ones; step counts from 1. `check` says whether there is enough text."""
        first = (step - 1) * sequences
        return self._rows(TRAINING, seed, first, sequences, seq_len)

    def validation_batch(self, index: int, *, sequences: int, seq_len: int) -> dict[str, Tensor]:
        """The same of held-out text; batch `index` is the same in every run."""
        return self._rows(VALIDATION, 0, index * sequences, sequences, seq_len)

    def epochs(self, steps: int, *, sequences: int, seq_len: int) -> float:
        """How often so many steps read the text."""
        return steps * sequences / len(self.rows(TRAINING, seq_len))

    def rows(self, side: int, seq_len: int) -> PackedRows:
        """How a side fills rows; worked out once."""
        if (side, seq_len) not in self.packed:
            chosen = self.training if side == TRAINING else self.validation
            self.packed[side, seq_len] = ROWS[self.packing](chosen, seq_len)
        return self.packed[side, seq_len]

    def one_a_row(self) -> Corpus:
        """The same text with a row for each document, or each piece of a longer one."""
        return replace(self, packing="padded", packed={})

    def _rows(self, side: int, seed: int, first: int, count: int, seq_len: int) -> dict[str, Tensor]:
        rows = self.rows(side, seq_len)
        ids = np.zeros((count, seq_len), np.int64)
        labels = np.full((count, seq_len), NOTHING, np.int64)
        numbers = np.zeros((count, seq_len), np.int64)
        for i in range(count):
            epoch, place = divmod(first + i, len(rows))
            row = int(_order(seed, side, epoch, len(rows))[place])
            self._fill(rows, row, ids[i], labels[i], numbers[i])
        batch = {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}
        if self.packing == "documents":
            batch[DOCUMENTS] = torch.from_numpy(numbers)
        if self.packing == "padded":
            batch[LENGTHS] = torch.from_numpy((numbers == 0).sum(1))
        return batch

    def _fill(self, rows: PackedRows, row: int, ids: Integers, labels: Integers, numbers: Integers) -> None:
        """Fills one row of a batch. In a stream its pieces are one text: the last id of one is followed by the first of
        the next."""
        at, pieces = 0, range(int(rows.first[row]), int(rows.first[row + 1]))
        if self.packing == "stream":
            parts = [slice(int(rows.starts[p]), int(rows.starts[p] + rows.lengths[p])) for p in pieces]
            whole = np.concatenate([self.ids[part] for part in parts]).astype(np.int64)
            ids[:], labels[:] = whole[:-1], whole[1:]
            if self.learn is not None:
                labels[np.concatenate([self.learn[part] for part in parts])[1:] == 0] = NOTHING
            return
        for number, piece in enumerate(pieces):
            begin, length = int(rows.starts[piece]), int(rows.lengths[piece]) - 1
            stop = at + length
            ids[at:stop] = self.ids[begin : begin + length]
            labels[at:stop] = self.ids[begin + 1 : begin + 1 + length]
            if self.learn is not None:
                labels[at:stop][self.learn[begin + 1 : begin + 1 + length] == 0] = NOTHING
            numbers[at:stop], at = number, stop
        # A number of its own for what fills the row up: no token sees it. In padded rows the only piece is 0, by which
        # its tokens are counted.
        numbers[at:] = len(pieces)


@lru_cache(maxsize=4)
def _order(seed: int, side: int, epoch: int, rows: int) -> Integers:
    """The order in which an epoch visits rows: a permutation that follows from seed, side and epoch alone."""
    return np.random.default_rng((seed, side, epoch)).permutation(rows)


def _hash(count: int) -> NDArray[np.uint64]:
    """A number of each document, as good as random (splitmix64)."""
    with np.errstate(over="ignore"):
        # By the document's number, not its text: the same documents are held out however they are tokenised.
        x = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _divided(whole: Side, held_out: NDArray[np.bool_]) -> tuple[Side, Side]:
    """(to train on, held out); where one would be empty, the last twentieth of the documents is held out, or of the
    only one."""
    training, validation = whole.of(~held_out), whole.of(held_out)
    if training.size and validation.size:
        return training, validation
    count = len(whole.starts)
    if count >= HELD_OUT:
        late = np.arange(count) >= count - count // HELD_OUT
        return whole.of(~late), whole.of(late)
    ends = np.cumsum(whole.lengths)
    cut = whole.size - max(1, whole.size // HELD_OUT)
    # Of each document the ids before `cut`, a place in the whole text: all, none, or its first ones.
    before_cut = np.clip(cut - (ends - whole.lengths), 0, whole.lengths)
    before = replace(whole, lengths=before_cut)
    after = Side(starts=whole.starts + before_cut, lengths=whole.lengths - before_cut)
    return before.of(before.lengths > 0), after.of(after.lengths > 0)


def _stream(side: Side, seq_len: int) -> PackedRows:
    """Rows of seq_len + 1 ids, each beginning with the last id of the one before; the ids behind the last whole row are
    not reached."""
    ends = np.cumsum(side.lengths)
    begins = ends - side.lengths
    low = np.arange(max(0, (side.size - 1) // seq_len)) * seq_len
    high = low + seq_len + 1
    # The document that holds a row's first id: the first whose end is beyond it.
    documents = np.searchsorted(ends, low, "right")
    row, document, first = _counted(documents, np.searchsorted(ends, high - 1, "right") - documents + 1)
    # A row's piece of a document is where both overlap, in places of the whole text; `starts` are places in the ids.
    begin = np.maximum(low[row], begins[document])
    starts = side.starts[document] + begin - begins[document]
    return PackedRows(first=first, starts=starts, lengths=np.minimum(high[row], ends[document]) - begin)


def _counted(begins: Integers, counts: Integers) -> tuple[Integers, Integers, Integers]:
    """Lists runs of consecutive numbers, `counts` of each from `begins` on: (the run of each number, the number, where
    each run begins, with the end of all)."""
    first = np.concatenate(([0], np.cumsum(counts)))
    which = np.repeat(np.arange(len(counts)), counts)
    # Number k of all is number k - first[run] of its run.
    return which, begins[which] + np.arange(first[-1]) - first[which], first


def _packed(side: Side, seq_len: int) -> PackedRows:
    """Documents in rows, the longest first, each where the least room is left that holds it (best fit decreasing).
    Longer ones are cut into pieces, of which each begins with the last id of the one before."""
    starts, lengths = _pieces(side, seq_len)
    bins: list[list[int]] = []
    room: dict[int, list[int]] = {}
    """Positions left -> rows with so many."""
    sizes: list[int] = []
    """Keys of `room`, in order."""
    # By length and then by place, so that equal pieces are packed alike on every rank.
    for piece in sorted(range(len(starts)), key=lambda piece: (-lengths[piece], piece)):
        need = lengths[piece] - 1
        # The least room that is enough: the first size not below it.
        place = bisect_left(sizes, need)
        if place == len(sizes):
            row, room_left = len(bins), seq_len
            bins.append([])
        else:
            room_left = sizes[place]
            row = room[room_left].pop()
            if not room[room_left]:
                del room[room_left], sizes[place]
        bins[row].append(piece)
        if room_left := room_left - need:
            if room_left not in room:
                insort(sizes, room_left)
            room.setdefault(room_left, []).append(row)
    order = [piece for pieces in bins for piece in pieces]
    first = np.concatenate(([0], np.cumsum([len(pieces) for pieces in bins])))
    return _rows_of(first.tolist(), [starts[p] for p in order], [lengths[p] for p in order])


def _padded(side: Side, seq_len: int) -> PackedRows:
    """A row for each document, or each piece of a longer one."""
    starts, lengths = _pieces(side, seq_len)
    return _rows_of(range(len(starts) + 1), starts, lengths)


def _pieces(side: Side, seq_len: int) -> tuple[list[int], list[int]]:
    """Documents cut to rows: where each piece starts, and its ids."""
    # A piece of n ids trains n - 1 positions, as its last id is only a label; the next piece begins with it.
    count = np.maximum(-(-(side.lengths - 1) // seq_len), 0)
    document, piece, _ = _counted(np.zeros_like(count), count)
    at = piece * seq_len
    lengths = np.minimum(seq_len + 1, side.lengths[document] - at)
    return (side.starts[document] + at).tolist(), lengths.tolist()


ROWS = {"stream": _stream, "documents": _packed, "padded": _padded}
"""How a side fills rows, by packing."""


def _rows_of(first: Sequence[int], starts: Sequence[int], lengths: Sequence[int]) -> PackedRows:
    one, two, three = (np.asarray(column, np.int64) for column in (first, starts, lengths))
    return PackedRows(first=one, starts=two, lengths=three)
