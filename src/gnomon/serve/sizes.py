"""How much an engine keeps between iterations, and how much an iteration has: `Sizes`; how it is divided: `Ways`.

Leaves out bytes (`load`), which depend on the model.
"""

from __future__ import annotations

from dataclasses import dataclass

from gnomon.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """Into how many parts a replica is divided."""

    tp: int = 1
    """Ranks that share every matrix."""
    pp: int = 1
    """Stages of layers, one after another."""
    ep: int = 1
    """Parts into which the ranks of a stage deal out whole experts; ranks of one part share each of its experts."""

    def __post_init__(self) -> None:
        if self.tp % self.ep:
            raise InputError(
                f"expert-parallel size {self.ep} does not divide tensor-parallel size {self.tp}, whose ranks share the "
                f"experts; use a divisor"
            )

    @property
    def etp(self) -> int:
        """Ranks that share each expert."""
        return self.tp // self.ep

    @property
    def ranks(self) -> int:
        """Processes of a replica."""
        return self.tp * self.pp


ALONE = Ways()
"""A replica of one process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of what is kept between iterations."""

    blocks: int
    """Of keys and values, of layers that see all tokens."""
    block_tokens: int
    """Tokens of a block."""
    max_seqs: int
    """Requests that run at the same time."""
    max_batched_tokens: int
    """Tokens of an iteration."""
    max_len: int
    """Tokens of a request."""
    windows: tuple[int, ...]
    """Sliding windows of the model's attention, rising, without those that see all tokens."""
    scans: bool
    """Whether some layer has a state."""
    snapshots: int = 0
    """States of scans that are kept of beginnings of prompts."""
    lanes: int = 1
    """Batches that are under way at the same time, each with blocks of its own: as many as stages (`division`)."""

    @property
    def slots(self) -> int:
        """States of scans of a lane."""
        return self.max_seqs + self.snapshots if self.scans else 0

    def window_blocks(self, window: int) -> int:
        """Blocks that are enough for layers with a window: what running requests keep between iterations, and an
        iteration's own tokens. What is not taken keeps beginnings of prompts."""
        most = -(-self.max_len // self.block_tokens)
        blocks = self.max_seqs * min(-(-window // self.block_tokens) + 1, most)
        return blocks + -(-self.max_batched_tokens // self.block_tokens) + self.max_seqs
