"""Several documents in one row of a batch: which positions see which, and where each document begins again.

A batch is a mapping of the graph's inputs, rows first; `documents` beside them (rows, positions) numbers the document
of every token. `packing_of(batch)` is what attention, rotary embeddings and learned positions read of it: a token sees
its own document only, and its position counts from the document's first token, so a packed document computes what it
would alone. Ranks that divide sequences among them (cp) know the documents of whole rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from gnomon.runtime.data.parts import Part, Prefixes

DOCUMENTS = "documents"
"""Key of a batch beside the graph's inputs."""
LENGTHS = "lengths"
"""The same, (rows): how many positions of a row hold tokens, from its first on. A microbatch is as long as its longest
row."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packing:
    """Documents of the rows of a microbatch."""

    documents: Tensor
    """(rows, positions): number of each token's document within its row; equal numbers are neighbours."""
    positions: Tensor
    """(rows, positions): place of each token in its document, from 0."""
    masks: dict[tuple[int, bool], Tensor] = field(default_factory=dict)
    """Those made so far, which all layers share."""
    met: dict[tuple[tuple[int, int], tuple[int, int]], Tensor | bool] = field(default_factory=dict)
    """The same of `together`."""
    parts: tuple[Part, ...] | None = None
    """Where the row is of sequences of several lengths: what this rank has of each, behind each other, and then
    positions that count nowhere. `documents` and `positions` are of this rank's tokens alone then. None: ranks of cp
    divide rows alike."""
    prefixes: Prefixes | None = None
    """Keys and values of chunks before, where sequences are cut."""
    layer: str = ""
    """Label of the layer that runs, where there are prefixes."""

    @property
    def longest(self) -> int:
        """Positions that tables of angles must have."""
        return max((part.stop for part in self.parts or ()), default=0)

    def together(self, queries: tuple[int, int], keys: tuple[int, int]) -> Tensor | bool:
        """Whether queries are in the documents of keys, each (first position, how many): True for all of them, False
        for none, or (rows, 1, queries, keys)."""
        if (queries, keys) not in self.met:
            one, other = (self.documents[:, first : first + count] for first, count in (queries, keys))
            # Once per pair of blocks, since asking `all` waits for the device. Attention without a mask takes a faster
            # kernel, and that of none is skipped.
            same = (one[:, :, None] == other[:, None, :]).unsqueeze(1)
            self.met[queries, keys] = True if bool(same.all()) else same if bool(same.any()) else False
        return self.met[queries, keys]

    def mask(self, *, window: int, causal: bool) -> Tensor:
        """(rows, 1, queries, keys): whether a query sees a key. window: of its own position and those before it (both
        sides without causality); 0 for all."""
        key = window, causal
        if key not in self.masks:
            at = torch.arange(self.documents.shape[1], device=self.documents.device)
            distance = at[:, None] - at
            seen = self.documents[:, :, None] == self.documents[:, None, :]
            if causal:
                seen = seen & (distance >= 0)
            if window:
                seen = seen & (distance < window) & (distance > -window)
            self.masks[key] = seen.unsqueeze(1)
        return self.masks[key]


def packing_of(batch: Mapping[str, Tensor]) -> Packing | None:
    """None for rows of one document each."""
    documents = batch.get(DOCUMENTS)
    if documents is None:
        return None
    at = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    # The latest beginning at or before each token: places of beginnings only grow, so that a running maximum is it.
    first = torch.where(begins, at, 0).cummax(dim=1).values
    return Packing(documents=documents, positions=at - first)


def packing_of_parts(parts: Sequence[Part], tokens: int, prefixes: Prefixes | None, device: torch.device) -> Packing:
    """The packing of a row of `tokens` positions that holds these parts on this rank."""
    places = [torch.arange(first, first + count) for part in parts for first, count in part.segments]
    numbers = [torch.full((part.tokens,), number) for number, part in enumerate(parts)]
    # What is left of the row gets a number of its own: no token of a sequence sees it.
    rest = tokens - sum(part.tokens for part in parts)
    positions = torch.cat([*places, torch.arange(rest)])
    documents = torch.cat([*numbers, torch.full((rest,), len(parts))])
    return Packing(
        documents=documents[None].to(device),
        positions=positions[None].to(device),
        parts=tuple(parts),
        prefixes=prefixes,
    )


def batch_of_ids(ids: Tensor) -> dict[str, Tensor]:
    """A decoder's batch of (rows, positions + 1) token ids: each token's label is the next one."""
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}


def with_further(batch: Mapping[str, Tensor], names: Set[str]) -> Mapping[str, Tensor]:
    """The batch with what multi-token prediction reads: `mtp_ids_2` are the tokens two further, `mtp_labels_2` their
    labels (`mtp_ids` those one further). Nothing counts that lies beyond the row or in another document."""
    derived: dict[str, Tensor] = {}
    for name in names - batch.keys() if {"input_ids", "labels"} <= batch.keys() else ():
        if (found := re.fullmatch(r"mtp_(ids|labels)(?:_(\d+))?", name)) is None:
            continue
        ids, labels, by = batch["input_ids"], batch["labels"], int(found[2] or 1)
        if found[1] == "ids":
            # Any id does behind the end of the row: the labels there are -1.
            derived[name] = functional.pad(ids[:, by:], (0, by), value=0)
            continue
        further = functional.pad(labels[:, by:], (0, by), value=-1)
        if (documents := batch.get(DOCUMENTS)) is not None:
            # The label that is `by` further is of the next document where the numbers differ; its loss would learn
            # across the border.
            same = functional.pad(documents[:, by:] == documents[:, :-by], (0, by), value=False)
            further = torch.where(same, further, -1)
        derived[name] = further
    return {**batch, **derived}
