"""What a rank does beside its computing, in the order of its rows: a thread of its own, as a stream of a device.

`Lane.start(work)` has the thread do it after what it was given before; a `Turn` is what there is to wait for. Each
collective of a lane is over before the next begins, on all ranks in the same order. Left out: what is done.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Turn:
    """Something under way on a lane."""

    future: Future[None]

    def wait(self) -> Any:
        """Waits until it is over; what went wrong in it is raised here."""
        return self.future.result()

    def is_completed(self) -> bool:
        """Whether it is over."""
        return self.future.done()


class Lane:
    """One thread that carries out actions in the order in which they are given."""

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(max_workers=1)

    def start(self, work: Callable[[], None]) -> Turn:
        """Has it done after all that was started before."""
        return Turn(self.thread.submit(work))

    def close(self) -> None:
        """Ends the thread, once it has done what it was given."""
        self.thread.shutdown()
