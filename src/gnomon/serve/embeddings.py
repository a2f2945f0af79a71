"""`/v1/embeddings` as values: a body to texts, vectors to an answer, in OpenAI's words.

Leaves out the model (`encoder`) and HTTP (`server`).
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnomon.errors import InputError
from gnomon.serve.api import ServedModel, fields_of
from gnomon.serve.vocabulary import Vocabulary

FIELDS = frozenset("model input encoding_format dimensions user".split())
MOST_TEXTS = 2048
"""Of a body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """What a body asks for."""

    ids: tuple[tuple[int, ...], ...]
    """Tokens of each text."""
    base64: bool
    """Whether vectors are told as the bytes of float32."""
    dimensions: int | None
    """Of a vector: its first so many, made length 1 again; None: all."""
    model: str
    """One of the names that are served."""


def texts(body: object, served: ServedModel) -> Texts:
    """InputError for a body that asks for something else."""
    fields = fields_of(body, FIELDS, served)
    form, dimensions = fields.get("encoding_format") or "float", fields.get("dimensions")
    if form not in ("float", "base64"):
        raise InputError("encoding_format is float or base64", "$.encoding_format")
    if dimensions is not None and not (_is_id(dimensions) and dimensions > 0):
        raise InputError("dimensions is a whole number above 0", "$.dimensions")
    return Texts(
        ids=inputs_of(fields, served),
        base64=form == "base64",
        dimensions=dimensions,
        model=str(fields.get("model") or served.names[0]),
    )


def inputs_of(fields: Mapping[str, Any], served: ServedModel) -> tuple[tuple[int, ...], ...]:
    """Tokens of each text of `input`. InputError for none, or one that the model does not take."""
    input_field = fields.get("input")
    # A list of numbers is one text, given as its tokens; a list of lists is several.
    if isinstance(input_field, str) or (
        isinstance(input_field, list) and input_field and all(_is_id(one) for one in input_field)
    ):
        input_field = [input_field]
    if not isinstance(input_field, list) or not 0 < len(input_field) <= MOST_TEXTS:
        raise InputError(f"input is a text, or a list of 1 to {MOST_TEXTS} texts or lists of tokens", "$.input")
    ids = tuple(_ids(one, served.words) for one in input_field)
    for one in ids:
        check_text(one, served, "input")
    return ids


def check_text(ids: Sequence[int], served: ServedModel, field: str) -> None:
    """InputError for a text that the model does not take."""
    where = f"$.{field}"
    if not ids:
        raise InputError("a text has no token; say something", where)
    if len(ids) > served.max_model_len:
        raise InputError(
            f"a text has {len(ids)} tokens, and the model takes at most {served.max_model_len}; shorten it", where
        )
    if max(ids) >= served.vocab_size:
        raise InputError(f"{field} has token {max(ids)}, and tokens are 0 to {served.vocab_size - 1}", where)


def _is_id(value: object) -> bool:
    # JSON's true is a bool here, and a bool is an int in Python.
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _ids(value: object, words: Vocabulary) -> tuple[int, ...]:
    if isinstance(value, str):
        return tuple(words.text(value))
    if isinstance(value, list) and all(_is_id(one) for one in value):
        return tuple(value)
    raise InputError("input is a text, or a list of texts or of lists of tokens", "$.input")


def answer(request: Texts, vectors: Sequence[NDArray[np.float32]]) -> dict[str, Any]:
    """InputError where vectors have fewer dimensions than were asked for."""
    data = []
    for index, vector in enumerate(vectors):
        if request.dimensions is not None:
            if request.dimensions > len(vector):
                raise InputError(f"dimensions is at most {len(vector)}, which the model has", "$.dimensions")
            vector = vector[: request.dimensions]
            vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
        # Little-endian on any machine, as OpenAI's clients read the base64 as plain float32.
        encoded: Any = vector.astype("<f4")
        encoded = base64.b64encode(encoded.tobytes()).decode() if request.base64 else encoded.tolist()
        data.append({"object": "embedding", "index": index, "embedding": encoded})
    tokens = sum(map(len, request.ids))
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": request.model, "usage": usage}
