"""What a program learns of its data: which tokens of a conversation or of a completion count in the loss.

`Learn` is that choice, as a file's reader states it and as the runtime masks tokens by it. Leaves out the masks
(`runtime.data.encode`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Learn = Literal["answers", "completions", "all"]
"""What is learnt of a conversation and of a prompt with its completion: what the assistant says, and the completion;
the completion, and a conversation whole (TRL's default); all of both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnt:
    """What a program learns of its data, by one of its files."""

    learn: Learn
    template: Path | None = None
    """The Jinja file that writes conversations as the program does; None for the tokenizer's own chat template."""
    differences: tuple[str, ...] = ()
    """What is learnt or written otherwise than the program does."""
