"""The line that says how a run goes: step, loss, speed, memory, time left, expected against actual.

On a terminal it is rewritten in place; in a log it is a line at the first step, every LOG_S seconds, at each validation
and at the end. Left out: the summary, which is the caller's.
"""

from __future__ import annotations

import resource
import sys
from collections import deque
from dataclasses import dataclass, field
from shutil import get_terminal_size
from statistics import median
from time import monotonic
from typing import TextIO

import torch

LOG_S = 10.0
"""Seconds between lines in a log."""
SMOOTH = 9
"""Steps whose median is the speed shown."""


def peak_bytes(device: torch.device) -> int:
    """Most memory that this process has had: on a CPU libraries and all, on a GPU what torch's allocator held."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def span(seconds: float) -> str:
    """`42 s`, `3 min 05 s`, `2 h 10 min`."""
    whole = round(seconds)
    if whole < 100:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest:02} s" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02} min"


@dataclass(slots=True, kw_only=True)
class Progress:
    """Says how a run goes, from what it is told of each step."""

    steps: int
    """Of the whole run."""
    tokens: int
    """Of a step; or samples, where `counted` says so."""
    counted: str = "tokens"
    """What a step is made of: `tokens`, or `samples` of a model that reads no text."""
    expected_step_s: float | None = None
    """What was predicted."""
    device: torch.device = torch.device("cpu")
    """Whose memory is shown."""
    peak: int | None = None
    """Bytes to show in place of this process's, where another one trains."""
    out: TextIO = field(default_factory=lambda: sys.stderr)
    """Where to."""
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=SMOOTH))
    """Seconds of the last steps."""
    printed_at: float = float("-inf")
    """When the last line went to a log."""

    def show(
        self, step: int, loss: float, step_s: float, *, held_out: float | None = None, warm: bool, last: bool
    ) -> None:
        """One step is done. warm: it is a warm-up step, which says nothing about later ones."""
        if warm:
            self.recent.clear()
        self.recent.append(step_s)
        line = self.line(step, loss)
        if self.out.isatty():
            line = self.line(step, loss, get_terminal_size().columns - 1)
            text = f"{line}\n{_held_out(held_out)}" if held_out is not None or last else line
            print(f"\r\x1b[K{text}", end="", file=self.out, flush=True)
            return
        if monotonic() - self.printed_at >= LOG_S or held_out is not None or last:
            self.printed_at = monotonic()
            print(f"{line}\n{_held_out(held_out)}", end="", file=self.out, flush=True)

    def line(self, step: int, loss: float, width: int | None = None) -> str:
        """`step 12/60  loss 3.214  0.510 s/step, expected 0.512  4,012 tokens/s  0.42 GiB  24 s left`.

        width: columns there are; what says least goes first where they are too few.
        """
        usual = median(self.recent)
        peak = peak_bytes(self.device) if self.peak is None else self.peak
        expected = f", expected {self.expected_step_s:.3g}" if self.expected_step_s is not None else ""
        count, remaining = f"{step:>{len(str(self.steps))}}/{self.steps}", f"{span((self.steps - step) * usual)} left"
        speed, memory = f"{self.tokens / usual:,.0f}", f"{peak / 2**30:.2f} GiB"
        loss_, took = f"loss {loss:.3f}", f"{usual:.3g} s"
        short = "tok" if self.counted == "tokens" else self.counted
        forms = (
            (f"step {count}", loss_, f"{took}/step{expected}", f"{speed} {self.counted}/s", memory, remaining),
            (count, loss_, f"{took}{expected}", f"{speed} {short}/s", memory, remaining),
            (count, loss_, f"{took}{expected}", f"{speed} {short}/s", remaining),
            (count, loss_, f"{took}{expected}", remaining),
        )
        lines = ["  ".join(parts) for parts in forms]
        return lines[0] if width is None else next((line for line in lines if len(line) <= width), lines[-1][:width])


def _held_out(loss: float | None) -> str:
    return "" if loss is None else f"  loss on held-out text {loss:.3f}\n"
