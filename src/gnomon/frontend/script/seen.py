"""What is seen of a script while it runs: `ScriptSeen`, one for the process, and the two ways in which it ends early.

Leaves out who fills it in (`machine`, `hub`, `step`) and what is read of it (`answer`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class Stop(BaseException):
    """The script has come as far as it should. No Exception, so that no handler of the script's takes it."""


class NotHere(BaseException):
    """Something of the network is needed that cannot be stood in for; the message says how to get it."""


@dataclass(slots=True)
class ScriptSeen:
    """What the script did up to its first step."""

    devices: int = 1
    """Ranks that it is told of."""
    stopped_at: str = ""
    """Where it was stopped."""
    notes: list[str] = field(default_factory=list)
    """What was stood in for, and other sentences."""
    trainer: Any = None
    """transformers' Trainer whose `train` was called."""
    withheld: dict[str, object] = field(default_factory=dict)
    """Fields of TrainingArguments that were kept from it, as they ask for devices or packages."""
    quantised: str = ""
    """How `from_pretrained` was to store frozen weights: nf4 or int8."""
    unsloth: dict[str, object] | None = None
    """How Unsloth was to checkpoint, and the length it was told, where a script imports it."""
    launcher: dict[str, object] = field(default_factory=dict)
    """Settings of accelerate's Accelerator."""
    deepspeed: Mapping[str, object] | None = None
    """The configuration given to deepspeed.initialize."""
    sharding: str = ""
    """`ddp`, `fsdp` or `fsdp2` where modules were wrapped so."""
    shards: dict[str, object] = field(default_factory=dict)
    """Of FSDP: strategy, dtypes, offload."""
    autocast: str = ""
    """Dtype of torch.autocast around the forward."""
    compiled: bool = False
    """Whether it called torch.compile."""
    checkpointed: bool = False
    """Whether it called torch.utils.checkpoint."""
    clipped: bool = False
    """Whether it clipped the gradient's norm."""
    backwards: int = 0
    """Calls of backward before the first optimizer step."""
    optimizers: list[Any] = field(default_factory=list)
    """In the order in which they were made."""

    def note(self, text: str) -> None:
        """Notes a text; the same text is noted once."""
        if text not in self.notes:
            self.notes.append(text)


SEEN = ScriptSeen()
"""Of this process: a script runs once in it."""
