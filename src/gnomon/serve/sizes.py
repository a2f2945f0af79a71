"""How much an engine keeps between iterations, and how much an iteration has: `Sizes`.

Leaves out bytes (`load`), which depend on the model.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of what is kept between iterations."""

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

    def window_blocks(self, window: int) -> int:
        """Blocks that are enough for layers with a window: what running requests keep between iterations, and an
        iteration's own tokens; never more than without a window."""
        kept = self.max_seqs * (-(-window // self.block_tokens) + 1)
        return min(self.blocks, kept + -(-self.max_batched_tokens // self.block_tokens) + self.max_seqs)
