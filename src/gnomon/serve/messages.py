"""What a front end and its workers tell each other: frozen values over a pipe.

Leaves out what HTTP says (`api`).
"""

from __future__ import annotations

from dataclasses import dataclass

from gnomon.serve.sampling import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Answers to a prompt."""

    number: int
    """The front end's name for it."""
    prompt: tuple[int, ...]
    """Tokens of the prompt."""
    sampling: Sampling
    """How tokens are chosen."""
    first: int
    """Of the answers that were asked for, the first of these: each draws by its own number."""
    count: int
    """Answers."""
    streams: bool
    """Whether tokens are told as they come; otherwise at the end."""
    stops: tuple[str, ...] = ()
    """Strings that end an answer."""
    keep_stop: bool = False
    """Whether the string that ended it is told."""
    specials: bool = False
    """Whether special tokens have text."""
    adapter: str = ""
    """By its name; empty for the model as it is."""
    salt: str = ""
    """Of those whose keys may be shared: beginnings with another are not found."""
    grammar: str = ""
    """What an answer's text must be, as `grammar` reads it; none: anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A process's place in its replica."""

    rank: int
    """Its rank in the replica."""
    port: int
    """Of the store where ranks meet, on the loopback interface."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody waits for it any more."""

    number: int
    """Of the ask."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The message that ends a worker."""


@dataclass(frozen=True, slots=True)
class Token:
    """A token of an answer."""

    id: int
    """Its number in the vocabulary."""
    text: str
    """Where log-probabilities were asked for."""
    logprob: float | None
    """Natural logarithm of its probability; None where it was not asked for, or there is none."""
    top: tuple[tuple[int, str, float], ...]
    """Id, text and log-probability of the likeliest."""
    rank: int = 0
    """Of a prompt's token: how many tokens are at least as likely, itself included."""


@dataclass(frozen=True, slots=True)
class Delta:
    """Text and tokens of an answer since it was last told of."""

    number: int
    """Of the ask."""
    index: int
    """Which of the ask's answers."""
    text: str
    """Empty where its tokens are no whole letter yet, or have no text."""
    tokens: tuple[Token, ...]
    """Its tokens since then."""
    reason: str | None
    """Why it ended; None: it goes on."""
    prompt: tuple[Token, ...] = ()
    """Once, where it was asked for: the prompt's tokens; its first has no log-probability."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of an iteration."""

    deltas: tuple[Delta, ...]
    """One for each answer that went on."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An ask that is not answered, and how HTTP says it."""

    number: int
    """Of the ask; -1: the worker itself has failed."""
    why: str
    """A sentence."""
    status: int
    """HTTP's status."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The message that a worker serves."""

    max_model_len: int
    """Tokens of prompt and answer."""
    vocab_size: int
    """Tokens that prompts may have: rows of the model's table, however many its tokenizer knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Counts of a worker, since its start."""

    running: int
    """Requests that are computed now."""
    waiting: int
    """Requests that wait for blocks or a place."""
    kv_used: float
    """Share of the blocks that have an owner."""
    preemptions: int
    """Times that a request lost its blocks."""
    found_tokens: int
    """Of prompts, that needed no computing."""
    asked_tokens: int
    """Of prompts, all."""
    iterations: int
    """Iterations that computed something."""
