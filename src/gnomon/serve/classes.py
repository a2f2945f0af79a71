"""`/classify` and `/score` as values: a body to texts, chances to an answer, in vLLM's words.

`to_classify(body, served)` and `classified(…)` are of a text's class; `pairs(body, served)` and `scored(…)` of how far
a text goes with another, by a classifier of one class (a cross-encoder). Leaves out the model (`encoder`) and HTTP.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnomon.errors import InputError
from gnomon.serve.api import ServedModel, fields_of
from gnomon.serve.embeddings import MOST_TEXTS, check_text, inputs_of

CLASSIFY = frozenset("model input user".split())
SCORE = frozenset("model text_1 text_2 user".split())


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassesRequest:
    """What a body asks for."""

    ids: tuple[tuple[int, ...], ...]
    """Tokens of each text."""
    types: tuple[tuple[int, ...], ...] | None
    """Of the tokens of pairs: of which text each is, 0 or 1."""
    model: str
    """One of the names that are served."""


def to_classify(body: object, served: ServedModel) -> ClassesRequest:
    """InputError for a body that asks for something else."""
    fields = fields_of(body, CLASSIFY, served)
    return ClassesRequest(ids=inputs_of(fields, served), types=None, model=str(fields.get("model") or served.names[0]))


def pairs(body: object, served: ServedModel) -> ClassesRequest:
    """Reads pairs of one text with each of others, or of as many with as many. InputError for a body that asks for
    something else."""
    fields = fields_of(body, SCORE, served)
    first, second = (_texts(fields.get(name), name) for name in ("text_1", "text_2"))
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        raise InputError(
            f"{len(first)} texts do not pair with {len(second)}; text_1 is one text, or as many as text_2 has",
            "$.text_1",
        )
    encoded = [served.words.pair(one, other) for one, other in zip(first, second, strict=True)]
    for ids, _ in encoded:
        check_text(ids, served, "text_2")
    return ClassesRequest(
        ids=tuple(tuple(ids) for ids, _ in encoded),
        types=tuple(tuple(types) for _, types in encoded),
        model=str(fields.get("model") or served.names[0]),
    )


def _texts(value: object, name: str) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if (
        not isinstance(texts, list)
        or not 0 < len(texts) <= MOST_TEXTS
        or not all(isinstance(one, str) for one in texts)
    ):
        raise InputError(f"{name} is a text, or a list of 1 to {MOST_TEXTS} texts", f"$.{name}")
    return texts


def _answer(request: ClassesRequest, kind: str, data: list[dict[str, Any]]) -> dict[str, Any]:
    tokens = sum(map(len, request.ids))
    return {
        "id": f"{kind}-{uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": request.model,
        "data": data,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0},
    }


def classified(
    request: ClassesRequest, chances: Sequence[NDArray[np.float32]], labels: Sequence[str]
) -> dict[str, Any]:
    """The likeliest class of each text, and the chances of all."""
    data = [
        {"index": at, "label": labels[int(one.argmax())], "probs": one.tolist(), "num_classes": len(one)}
        for at, one in enumerate(chances)
    ]
    return _answer(request, "classify", data)


def scored(request: ClassesRequest, chances: Sequence[NDArray[np.float32]]) -> dict[str, Any]:
    """The score of each pair."""
    data = [{"index": at, "object": "score", "score": float(one[0])} for at, one in enumerate(chances)]
    return _answer(request, "score", data)
