"""How the tokens of an answer are chosen, and when it ends: `Sampling`, checked where it is made.

Leaves out how that is done (`choose`), so that a front end knows it without torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from gnomon.errors import InputError

MOST_LOGPROBS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How an answer's tokens are chosen, and when it ends."""

    max_tokens: int
    """Of the answer, at most."""
    temperature: float = 1.0
    """0 takes the likeliest token."""
    top_p: float = 1.0
    """Among the likeliest tokens that together have this share."""
    top_k: int = 0
    """Among so many likeliest tokens; 0 is all."""
    min_p: float = 0.0
    """Among tokens at least this many times as likely as the likeliest."""
    presence_penalty: float = 0.0
    """Taken from the logit of a token that the answer has."""
    frequency_penalty: float = 0.0
    """The same, for each time."""
    repetition_penalty: float = 1.0
    """Logits of tokens that prompt or answer have are divided by it where positive, multiplied otherwise."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token -> what is added to its logit."""
    allowed: tuple[int, ...] = ()
    """The only tokens that may be chosen; none: all."""
    banned: tuple[tuple[int, ...], ...] = ()
    """Rows of tokens that an answer does not have."""
    seed: int | None = None
    """Of the draws; None: nobody's."""
    logprobs: int = -1
    """Likeliest tokens whose log-probabilities are told beside the chosen one's; -1: none are told."""
    prompt_logprobs: int = -1
    """The same of the prompt's tokens after its first; -1: of none."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end the answer and are no part of it."""
    min_tokens: int = 0
    """Of the answer before one of them may end it."""

    def __post_init__(self) -> None:
        def within(name: str, low: float, high: float) -> None:
            value = getattr(self, name)
            if not (math.isfinite(value) and low <= value <= high):
                raise InputError(f"{name} must be from {low:g} to {high:g}, got {value:g}")

        if self.max_tokens < 1:
            raise InputError(f"max_tokens must be at least 1, got {self.max_tokens}")
        within("temperature", 0, 100)
        within("min_p", 0, 1)
        within("presence_penalty", -2, 2)
        within("frequency_penalty", -2, 2)
        within("logprobs", -1, MOST_LOGPROBS)
        within("prompt_logprobs", -1, MOST_LOGPROBS)
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p must be above 0 and at most 1, got {self.top_p:g}")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise InputError(f"repetition_penalty must be above 0, got {self.repetition_penalty:g}")
        if self.top_k < 0:
            raise InputError(f"top_k must be at least 0 (0 is all), got {self.top_k}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise InputError(f"min_tokens must be from 0 to max_tokens = {self.max_tokens}, got {self.min_tokens}")
        if self.allowed and self.min_tokens and self.stop_ids.issuperset(self.allowed):
            raise InputError("min_tokens asks for tokens, and allowed_token_ids has none but those that end an answer")
        if any(not math.isfinite(value) or abs(value) > 100 for _, value in self.logit_bias):
            raise InputError("logit_bias must be from -100 to 100")

    @property
    def is_plain(self) -> bool:
        """Whether the likeliest token is taken, and logits stay as they are."""
        return self.temperature == 0 and not self.changes

    @property
    def changes(self) -> bool:
        """Whether logits are changed before a token is chosen."""
        return bool(
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0 or self.logit_bias
            or self.min_tokens or self.allowed or self.banned
        )  # fmt: skip


def biases(biases_by_id: Mapping[str, float], vocabulary: int) -> tuple[tuple[int, float], ...]:
    """Reads OpenAI's `logit_bias`. InputError for a token that there is not."""
    pairs = []
    for name, value in biases_by_id.items():
        # `isdecimal` alone takes digits of other scripts, and `int` of a string from outside is to be short.
        if not (name.isascii() and name.isdecimal() and len(name) < 10 and int(name) < vocabulary):
            raise InputError(f"logit_bias names token {name[:40]!r}, and tokens are 0 to {vocabulary - 1}")
        pairs.append((int(name), float(value)))
    return tuple(pairs)
