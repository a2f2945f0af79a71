"""What an iteration computes, as tensors: `TokenRows` are the tokens of all its sequences, one after the other.

`TokenRows.of(pieces, …)` makes them of numbers. Every op that looks beyond a token reads them: positions, where each
sequence begins, how long it is by now, its block table of each group, and the slot of its state.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens of one sequence."""

    key: int
    """Whose."""
    start: int
    """Tokens before them that are computed."""
    tokens: Sequence[int]
    """Ids."""
    samples: bool
    """Whether what follows the last of them is wanted."""
    prompt: int
    """Tokens of the request's own prompt, on which angles of some rotary embeddings depend."""
    adapter: int = -1
    """That its request asked for; -1 for none."""
    scored: range = range(0)
    """Those of `tokens`, before the last one of the prompt, after which logits are wanted too: they say how likely the
    prompt's own next token is."""

    @property
    def logit_places(self) -> list[int]:
        """The places in `tokens` after which logits are wanted."""
        return [*self.scored, len(self.tokens) - 1] if self.samples else [*self.scored]


@dataclass(frozen=True, slots=True)
class Turn:
    """What an iteration computes, in numbers, as it is sent to every process of a replica."""

    parts: Sequence[Part]
    tables: Sequence[Sequence[Sequence[int]]]
    """Of each group, of each part: its blocks; entries that are let go are negative."""
    slots: Sequence[int]
    """Of each part: that of its scans' states."""
    copies: Sequence[tuple[int, int]]
    """Blocks whose contents go to others first."""
    states: Sequence[tuple[int, int]] = ()
    """Slots whose states go to others first."""
    marks: Sequence[Sequence[tuple[int, int]]] = ()
    """Of each part: (tokens of its sequence, slot that its state after them goes to); none: no part has any."""

    def rows(self) -> TokenRows:
        """Makes the rows as tensors."""
        rows = TokenRows.of(self.parts, self.tables, self.slots)
        rows.marks = self.marks
        return rows


@dataclass(slots=True, kw_only=True)
class TokenRows:
    """Tokens of an iteration."""

    ids: Tensor
    """(tokens)."""
    positions: Tensor
    """(tokens), from 0 in each sequence."""
    begins: Tensor
    """(sequences + 1): first token of each, and one past the last."""
    lengths: Tensor
    """(sequences): keys of each once these tokens are computed."""
    prompts: Tensor
    """(sequences): tokens of their own prompts."""
    tables: Sequence[Tensor]
    """Of each group (sequences, blocks), int32."""
    adapters: Tensor
    """(tokens), int32: adapter of each, -1 for none."""
    slots: Tensor
    """(sequences): of the states of scans."""
    logit_rows: Tensor
    """Tokens after which logits are wanted."""
    all_wanted: bool
    """Whether these are all."""
    one_each: bool
    """Whether every sequence has one token, and some before it."""
    spans: Sequence[tuple[int, int, int]]
    """Of each sequence: first token, one past the last, tokens before them that are computed."""
    threads: int
    """That kernels take."""
    marks: Sequence[Sequence[tuple[int, int]]] = ()
    """As `Turn` has them."""
    shared_values: dict[Hashable, Any] = field(default_factory=dict)
    """What the first layer that wanted it made for all of them."""

    @property
    def count(self) -> int:
        """Counts the sequences."""
        return len(self.spans)

    @staticmethod
    def of(parts: Sequence[Part], tables: Sequence[Sequence[Sequence[int]]], slots: Sequence[int]) -> TokenRows:
        """Makes rows of parts. tables: of each group, of each part; entries that are let go are negative. slots: of
        each part."""
        ids: list[int] = []
        spans, logit_rows, begins = [], [], [0]
        for part in parts:
            first = len(ids)
            ids.extend(part.tokens)
            spans.append((first, len(ids), part.start))
            begins.append(len(ids))
            logit_rows += [first + at for at in part.logit_places]
        # A sequence's first token does not count: on the other way scans clear the slot that it was given.
        one_each = len(ids) == len(parts) and all(part.start for part in parts)
        if one_each:
            positions = np.fromiter((part.start for part in parts), np.int64, len(parts))
        else:
            positions = np.concatenate([np.arange(start, start + end - first) for first, end, start in spans])
        page_tables = []
        for group in tables:
            widest = max(map(len, group), default=0)
            table = np.zeros((len(parts), max(1, widest)), np.int32)
            for row, blocks in zip(table, group, strict=True):
                row[: len(blocks)] = blocks
            # Blocks that are let go are out of every window, so nothing reads them: 0 is a block that is there.
            page_tables.append(torch.from_numpy(np.maximum(table, 0)))
        counts = [end - first for first, end, _ in spans]
        lengths = [start + end - first for first, end, start in spans]
        return TokenRows(
            ids=torch.from_numpy(np.array(ids, np.int64)),
            positions=torch.from_numpy(positions),
            begins=torch.from_numpy(np.array(begins, np.int64)),
            lengths=torch.from_numpy(np.array(lengths, np.int64)),
            prompts=torch.from_numpy(np.array([part.prompt for part in parts], np.int64)),
            tables=page_tables,
            adapters=torch.from_numpy(np.repeat(np.array([part.adapter for part in parts], np.int32), counts)),
            slots=torch.from_numpy(np.array(slots, np.int64)),
            logit_rows=torch.from_numpy(np.array(logit_rows, np.int64)),
            all_wanted=len(logit_rows) == len(ids),
            one_each=one_each,
            spans=spans,
            threads=torch.get_num_threads(),
        )
