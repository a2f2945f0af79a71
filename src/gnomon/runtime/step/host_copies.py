"""Copies between a device and its host, which on a CUDA device overlap with compute: each way has its own stream.

`Copies.down` and `up` start a copy and return what tells that it is done; `room` is pinned memory of the host, from and
to which such copies are fast. On a CPU both sides are memory of one machine, and a copy is done when they return. Left
out: who needs what when (`host_update`).
Source: CUDA C++ Programming Guide, "Asynchronous Concurrent Execution": copies from and to pinned memory on another
stream overlap with kernels.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

AHEAD = 2
"""Copies down that may be under way when the next one starts: what they read cannot be used again until then."""


@dataclass(frozen=True, slots=True)
class Arriving:
    """A copy that was started."""

    tensor: Tensor
    """Where it goes."""
    event: torch.cuda.Event | None
    """After it; None where it is done."""

    def wait(self) -> Tensor:
        """The target, once all of it is there, for the host to read or to write."""
        if self.event is not None:
            self.event.synchronize()
        return self.tensor

    def before(self, stream: torch.cuda.Stream | None) -> None:
        """What is started on the stream from now on runs after the copy."""
        if self.event is not None and stream is not None:
            stream.wait_event(self.event)


class Copies:
    """Those of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.cuda = device, device.type == "cuda"
        self._down, self._up = (torch.cuda.Stream(device) if self.cuda else None for _ in range(2))
        self._under_way: deque[torch.cuda.Event] = deque()

    def room(self, size: int, dtype: torch.dtype) -> Tensor:
        """Memory of the host in which nothing is yet."""
        return torch.empty(size, dtype=dtype, pin_memory=self.cuda)

    def current(self) -> torch.cuda.Stream | None:
        """The stream that computes."""
        return torch.cuda.current_stream(self.device) if self.cuda else None

    def mark(self) -> torch.cuda.Event | None:
        """Tells when all that was started on the stream that computes is done."""
        stream = self.current()
        return None if stream is None else stream.record_event()

    def down(self, source: Tensor) -> Arriving:
        """Copies what the stream that computes makes of `source` to new memory of the host. The caller may forget
        `source` at once. Waits while `AHEAD` earlier ones are under way."""
        target = self.room(source.numel(), source.dtype)
        if self._down is None:
            target.copy_(source)
            return Arriving(target, None)
        while len(self._under_way) >= AHEAD:
            self._under_way.popleft().synchronize()
        # What computes `source` was launched before, and may not have run yet.
        self._down.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._down):
            target.copy_(source, non_blocking=True)
        # Torch's allocator must not give the memory to another tensor before this stream has read it, though the caller
        # drops it now.
        source.record_stream(self._down)
        event = self._down.record_event()
        self._under_way.append(event)
        return Arriving(target, event)

    def up(self, target: Tensor, source: Tensor, after: torch.cuda.Event | None) -> Arriving:
        """Copies `source`, of the host, over `target` once `after` is there: what still reads the target's old values.
        `source` must stay as it is until the copy is done. Any thread may call."""
        if self._up is None:
            target.copy_(source)
            return Arriving(source, None)
        if after is not None:
            self._up.wait_event(after)
        with torch.cuda.stream(self._up):
            target.copy_(source, non_blocking=True)
        return Arriving(source, self._up.record_event())
