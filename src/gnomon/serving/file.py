"""A server as a file: what is served, where, by which engine with which limits; what `plan --serve -o` writes.

Leaves out the load, which is asked of a prediction, and what engines call these fields.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from gnomon.serving.layout import Serving
from gnomon.software.engine import Engine, engine


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeFile:
    """The record of one server."""

    SCHEMA: ClassVar[str] = "gnomon.serve/1"

    model: str
    """A preset's name, or the path of a config."""
    on: str
    """A cluster, as `--on` takes it."""
    engine: str
    """A record's name."""
    max_seqs: int
    """As in `Engine`."""
    max_batched_tokens: int
    """As in `Engine`."""
    memory_fraction: float
    """As in `Engine`."""
    serving: Serving
    """Axes and formats."""
    prefill_count: int = 0
    """Engines that compute prompts alone, each laid out so; 0: every engine does both."""
    decode_count: int = 0
    """Engines that answer, beside those."""
    buckets: tuple[int, ...] = ()
    """Of an encoder: lengths that texts are padded to, as `serving.dispatch.Policy` has them; (): each has its own."""
    every_bucket: bool = False
    """Whether each worker has all of them, in place of one each."""
    patience: float = 1.0
    """Of its own time there, that a text waits for its runtime before a longer one may have it."""

    @classmethod
    def of(cls, model: str, on: str, serving: Serving, record: Engine) -> ServeFile:
        """The file of a choice."""
        return cls(
            model=model,
            on=on,
            engine=record.name,
            max_seqs=record.max_seqs,
            max_batched_tokens=record.max_batched_tokens,
            memory_fraction=record.memory_fraction,
            serving=serving,
        )

    def record(self) -> Engine:
        """The engine with the file's limits."""
        return replace(
            engine(self.engine),
            max_seqs=self.max_seqs,
            max_batched_tokens=self.max_batched_tokens,
            memory_fraction=self.memory_fraction,
        )
