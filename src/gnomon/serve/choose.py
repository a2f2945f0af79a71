"""From logits to tokens: greedy or drawn, with penalties, the usual cuts, a grammar's mask, and log-probabilities.

`choose(logits, rows)` picks a token for each row. Logits are changed in this order: bias, penalties, mask, temperature,
top-k, top-p, min-p. A row with a seed draws the same tokens whoever runs beside it. Leaves out beams.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gnomon.serve.sampling import Sampling

COLDEST = 1e-30
"""Temperature that float32 holds; the likeliest token is the only one long before."""
SCORED_AT_ONCE = 64
"""Tokens of a prompt whose log-probabilities are computed together."""


@dataclass(frozen=True, slots=True)
class ChosenToken:
    """A token of an answer."""

    token: int
    """Its number in the vocabulary."""
    logprob: float | None
    """Natural logarithm of its probability by the model's own logits, where it was asked for."""
    top: tuple[tuple[int, float], ...]
    """The same of the likeliest tokens."""
    rank: int = 0
    """Of a prompt's token: how many tokens are at least as likely, itself included."""


@dataclass(slots=True)
class LogitsRow:
    """Whose logits a row has."""

    sampling: Sampling
    """How its token is chosen."""
    prompt: Sequence[int]
    """Tokens before the answer."""
    answer: Sequence[int]
    """Tokens of the answer so far."""
    generator: torch.Generator | None
    """Draws its numbers; None where nothing is drawn."""
    mask: Callable[[], Tensor | None] | None = None
    """Of a grammar: which tokens may follow (vocabulary), None for all."""

    @staticmethod
    def of(sampling: Sampling, prompt: Sequence[int], answer: Sequence[int], index: int = 0) -> LogitsRow:
        """Makes the row of an answer. index: of the answer, among several to one prompt, which draw differently."""
        generator = None
        if sampling.temperature > 0:
            generator = torch.Generator()
            if sampling.seed is None:
                generator.seed()
            else:
                generator.manual_seed((sampling.seed + index) & 0x7FFF_FFFF_FFFF_FFFF)
        return LogitsRow(sampling, prompt, answer, generator)


def choose(logits: Tensor, rows: Sequence[LogitsRow]) -> list[ChosenToken]:
    """A token of each row. logits: (rows, vocabulary)."""
    if all(row.sampling.is_plain and row.mask is None and row.sampling.logprobs < 0 for row in rows):
        # numpy looks for the largest of floats in vectors: a third of torch's time
        best = logits.numpy().argmax(-1) if logits.dtype == torch.float32 else logits.argmax(-1)
        return [ChosenToken(token, None, ()) for token in best.tolist()]
    return [_choose(own, row) for own, row in zip(logits.float(), rows, strict=True)]


def scores(logits: Tensor, tokens: Sequence[int], top: int) -> list[ChosenToken]:
    """Returns log-probability and rank of given tokens. logits: (tokens, vocabulary). top: likeliest tokens that each
    is given with."""
    results = []
    # a slice at a time: of 2,048 tokens and 150,000 words the logarithms would be as large again as the logits
    for begin in range(0, len(tokens), SCORED_AT_ONCE):
        part = torch.tensor(tokens[begin : begin + SCORED_AT_ONCE])
        logs = logits[begin : begin + SCORED_AT_ONCE].float().log_softmax(-1)
        own = logs.gather(1, part.unsqueeze(1))
        ranks = (logs >= own).sum(-1).tolist()
        best = logs.topk(min(top, logs.shape[1]))
        for token, value, ids, values, rank in zip(
            part.tolist(), own.squeeze(1).tolist(), best.indices.tolist(), best.values.tolist(), ranks, strict=True
        ):
            results.append(ChosenToken(token, value, tuple(zip(ids, values, strict=True)), rank))
    return results


def _choose(raw: Tensor, row: LogitsRow) -> ChosenToken:
    """Chooses a token. raw: (vocabulary), float32."""
    s = row.sampling
    logits = _changed(raw, row) if s.changes else raw
    allowed = row.mask() if row.mask is not None else None
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -torch.inf)
    if s.temperature == 0:
        token = int(logits.argmax())
    else:
        # from the largest on: divided by next to nothing it would be infinite, and no share a number
        token = _drawn((logits - logits.max()) / max(s.temperature, COLDEST), s, row.generator)
    if s.logprobs < 0:
        return ChosenToken(token, None, ())
    logprobs = raw.log_softmax(-1)
    top: tuple[tuple[int, float], ...] = ()
    if s.logprobs:
        best = logprobs.topk(min(s.logprobs, len(logprobs)))
        top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return ChosenToken(token, float(logprobs[token]), top)


def _changed(raw: Tensor, row: LogitsRow) -> Tensor:
    s, logits = row.sampling, raw.clone()
    if s.logit_bias:
        ids, values = zip(*s.logit_bias, strict=True)
        logits.index_add_(0, torch.tensor(ids), torch.tensor(values, dtype=logits.dtype))
    if s.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*row.prompt, *row.answer}))
        own = logits[seen]
        logits[seen] = torch.where(own > 0, own / s.repetition_penalty, own * s.repetition_penalty)
    if (s.presence_penalty or s.frequency_penalty) and row.answer:
        ids, counts = torch.tensor(list(row.answer)).unique(return_counts=True)
        logits[ids] -= s.presence_penalty + s.frequency_penalty * counts
    if len(row.answer) < s.min_tokens and s.stop_ids:
        logits[torch.tensor(sorted(s.stop_ids))] = -torch.inf
    for row_of in s.banned:
        # Only the last token of a row is forbidden, and only where the answer ends with the others.
        before = row_of[:-1]
        if not before or tuple(row.answer[-len(before) :]) == before:
            logits[row_of[-1]] = -torch.inf
    if s.allowed:
        allowed = torch.tensor(s.allowed)
        logits = torch.full_like(logits, -torch.inf).index_copy_(0, allowed, logits[allowed])
    return logits


def _drawn(logits: Tensor, s: Sampling, generator: torch.Generator | None) -> int:
    """top-p as transformers and vLLM have it: the likeliest tokens until their share reaches p, the one that reaches it
    included."""
    if 0 < s.top_k < len(logits):
        values, ids = logits.topk(s.top_k)
    elif s.top_p < 1:
        values, ids = logits.sort(descending=True)
    else:
        values, ids = logits, None
    shares = values.softmax(-1)
    if s.top_p < 1:
        # The sum less its own share is that of the likelier tokens: a token is kept while they have not reached p.
        shares = torch.where(shares.cumsum(-1) - shares < s.top_p, shares, 0.0)
    if s.min_p > 0:
        shares = torch.where(shares >= s.min_p * shares.max(), shares, 0.0)
    # an exponential race: one number a token, and no sum that rounding could fall short of
    race = torch.empty_like(shares).exponential_(generator=generator)
    at = int((shares / race).argmax())
    return at if ids is None else int(ids[at])
