"""What an answer's text must be: JSON, JSON of a schema, or a regular expression, as masks of tokens (llguidance).

`Grammars(encoder).mask(text)` is the state of one answer: `allowed()` says which tokens may follow, `push(token)` moves
on and returns whether the text is whole and nothing may follow. Written `json`, `schema:{…}`, `regex:…` or
`choice:["…", …]`. A grammar
that turns out to allow nothing, or too costly to go on with, ends its own answer and says so (`Mask.why`). Leaves out
where in an answer a grammar begins: it is about all of it.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gnomon.errors import InputError
from gnomon.runtime.data.encode import BYTES, Encoder

ANY_JSON = '{"type": "object"}'
KEPT = 16
"""Grammars that stay made, the longest unused goes first."""


class _Bytes:
    """A tokenizer whose tokens are bytes, as llguidance asks for one; 0 ends a text."""

    eos_token_id = 0
    bos_token_id = None
    special_token_ids = (0,)

    def __init__(self) -> None:
        self.tokens = [bytes([byte]) for byte in range(BYTES)]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


class Mask:
    """The state of one answer."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self.matcher, self.vocab_size = matcher, vocab_size
        self.why = ""
        """Why no token can follow, where the text is not whole: its answer is none."""

    def allowed(self) -> Tensor | None:
        """Returns (vocabulary): which tokens may follow; None where the grammar is at fault, so that others' rows go
        on."""
        try:
            bits = np.frombuffer(self.matcher.compute_bitmask(), np.uint8)
        except Exception as error:  # llguidance raises nothing narrower
            self.why = str(error)
            return None
        # A bit a token, the first in the lowest bit. Rows of the model beyond the tokenizer's tokens are no text and
        # not allowed.
        known = np.unpackbits(bits, bitorder="little")[: self.vocab_size].astype(bool)
        if self.matcher.is_error() or not known.any():
            self.why = str(self.matcher.get_error()) or "no text is of it"
            return None
        return torch.from_numpy(np.pad(known, (0, self.vocab_size - len(known))))

    def push(self, token: int) -> bool:
        """Takes one more token; returns whether nothing may follow."""
        if not self.why:
            self.matcher.consume_token(token)
            if self.matcher.is_error():
                self.why = str(self.matcher.get_error())
        return bool(self.why) or bool(self.matcher.is_stopped())


class Grammars:
    """The grammars of one tokenizer."""

    def __init__(self, encoder: Encoder, vocab_size: int) -> None:
        """Takes the vocab_size of the model, which may have more rows than the tokenizer has tokens."""
        self.encoder, self.vocab_size = encoder, vocab_size
        self._tokenizer: Any = None
        self._made_of = OrderedDict[str, Any]()
        self._lock = threading.Lock()

    def has(self, text: str) -> bool:
        """Whether it is made: `mask` takes no time then."""
        return text in self._made_of

    def mask(self, text: str) -> Mask:
        """InputError for a grammar that is none, or where llguidance is not installed. May be called by several
        threads, which make one grammar at a time."""
        with self._lock:
            if text not in self._made_of:
                self._made_of[text] = self._matcher(text)
            self._made_of.move_to_end(text)
            if len(self._made_of) > KEPT:
                self._made_of.popitem(last=False)
            # A matcher moves on with the tokens of its answer: the one that is kept stays at the beginning.
            return Mask(self._made_of[text].deep_copy(), self.vocab_size)

    def _matcher(self, text: str) -> Any:
        try:
            import llguidance
        except ImportError as error:
            raise InputError(
                "structured output needs llguidance, which is not installed: pip install gnomon[serve]"
            ) from error
        if self._tokenizer is None:
            self._tokenizer = self._tokens(llguidance)
        make = llguidance.LLMatcher
        kind, _, rest = text.partition(":")
        try:
            if kind == "regex":
                grammar = make.grammar_from_regex(rest)
            elif kind == "choice":
                grammar = make.grammar_from_lark(f"start: {' | '.join(map(json.dumps, json.loads(rest)))}")
            else:
                schema = rest if kind == "schema" else ANY_JSON
                # without, a model that is unsure writes spaces until its tokens are spent
                grammar = make.grammar_from_json_schema(schema, defaults={"whitespace_flexible": False})
        except ValueError as error:
            raise InputError(f"the JSON schema is none: {error}") from error
        matcher = make(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise InputError(f"answers cannot be held to this {kind}: {str(matcher.get_error())[:300]}")
        return matcher

    def _tokens(self, llguidance: Any) -> Any:
        encoder = self.encoder
        if encoder.tokenizer is None:
            return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()))
        if encoder.end is None:
            raise InputError("structured output needs a tokenizer that names its end-of-text token")
        return llguidance.LLTokenizer(encoder.tokenizer.to_str(), eos_token=encoder.end)
