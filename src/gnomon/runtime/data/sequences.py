"""Batches of sequences of several lengths: `SequenceBatches`, of a text and a workload that says how long they are.

A step's batch is the tokens of all its sequences, one after the other, with `lengths`. Of a stream of text it takes
sequences of the workload's lengths, drawn anew each step where those are a distribution; of documents (`documents`,
`padded`) as many as the workload has sequences, as long as they are but no longer than its longest. Leaves out
how microbatches are made of them (`lowering.units`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gnomon.plans import Workload
from gnomon.runtime.data.corpus import Corpus
from gnomon.runtime.data.packing import LENGTHS

SEEDS = 2**32
"""Steps whose lengths are drawn apart for each seed."""


def longest_of(workload: Workload) -> int:
    """Tokens of the longest sequence that a step may have."""
    if workload.distribution is not None:
        return max(workload.distribution.values)
    return max(workload.sequence_lengths(), default=0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SequenceBatches:
    """A text's batches of sequences of several lengths."""

    corpus: Corpus
    workload: Workload
    """With `lengths` or a `distribution`."""
    rows: Corpus = field(init=False)
    """The text in rows of the longest length."""

    def __post_init__(self) -> None:
        whole = self.corpus if self.corpus.packing == "stream" else self.corpus.one_a_row()
        object.__setattr__(self, "rows", whole)

    @property
    def notes(self) -> tuple[str, ...]:
        """Lists what is said before training."""
        return self.corpus.notes

    @property
    def training_tokens(self) -> int:
        """There are to train on."""
        return self.corpus.training_tokens

    @property
    def validation_tokens(self) -> int:
        """Counts the tokens that are held out."""
        return self.corpus.validation_tokens

    @property
    def identity(self) -> str:
        """Names the batches, as checkpoints keep it."""
        return f"{self.corpus.identity} {self.rows.packing} lengths"

    def lengths(self, step: int, seed: int) -> tuple[int, ...]:
        """Tokens of each sequence of a step, of a stream."""
        return self.workload.sequence_lengths(seed * SEEDS + step)

    def batch(self, step: int, *, seed: int, sequences: int, seq_len: int) -> dict[str, Tensor]:
        """The batch of a step; step counts from 1. seq_len: of the longest sequence that there may be."""
        return self._flat(self.rows.batch(step, seed=seed, sequences=sequences, seq_len=seq_len), step, seed)

    def validation_batch(self, index: int, *, sequences: int, seq_len: int) -> dict[str, Tensor]:
        """The same of held-out text; batch `index` is the same in every run."""
        rows_of_batch = self.rows.validation_batch(index, sequences=sequences, seq_len=seq_len)
        return self._flat(rows_of_batch, index, 0)

    def epochs(self, steps: int, *, sequences: int, seq_len: int) -> float:
        """How often so many steps read the text: tokens that are trained on over those that there are."""
        if self.rows.packing == "padded":
            return self.rows.epochs(steps, sequences=sequences, seq_len=seq_len)
        return steps * sum(self.workload.sequence_lengths()) / max(self.training_tokens, 1)

    def _flat(self, rows: dict[str, Tensor], step: int, seed: int) -> dict[str, Tensor]:
        if (counts := rows.get(LENGTHS)) is not None:
            where = [(row, 0, int(count)) for row, count in enumerate(counts)]
        else:
            where = list(_placed(self.lengths(step, seed), rows["input_ids"].shape[1]))
        cut = {
            name: torch.cat([x[row, first : first + count] for row, first, count in where])
            for name, x in rows.items()
            if name != LENGTHS
        }
        return {**cut, LENGTHS: torch.tensor([count for _, _, count in where])}


def _placed(lengths: Sequence[int], width: int) -> list[tuple[int, int, int]]:
    """(row, first position, tokens) of each sequence, in order, behind each other in as few rows as first fit finds: no
    token of a row is in two of them."""
    used = list[int]()
    places = []
    for length in lengths:
        # Never more rows than sequences, as none is longer than a row: the batch has a row for each.
        row = next((at for at, filled in enumerate(used) if filled + length <= width), len(used))
        if row == len(used):
            used.append(0)
        places.append((row, used[row], length))
        used[row] += length
    return places
