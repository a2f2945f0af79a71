"""Buffers between actions, and the communications that are still writing or reading them.

`Buffers` names them as a Program does. A communication is started under the name of what it writes; `wait(name)` is
what its first reader does. Spans of communications begin and end here too, when a recorder is there. Left out: what is
communicated, and with whom.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from gnomon.runtime.mesh.routes import Waits
from gnomon.runtime.watch.measure import Recorder

Name = tuple[str, int, int]
"""Buffer, stage, unit (NO_UNIT for those of a stage)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnderWay:
    """A communication that was started."""

    work: Waits | None
    """None when it was over at once."""
    finish: Callable[[], None] | None
    """What remains to be done with its result."""
    span: int
    """Of the recorder; -1 without one."""
    holds: tuple[Tensor, ...] = ()
    """What must live until it is over."""


class Buffers:
    """Tensors by name, and what is under way."""

    def __init__(self) -> None:
        self.tensors: dict[Name, tuple[Tensor, ...]] = {}
        self.arriving: dict[Name, UnderWay] = {}
        self.leaving: dict[Name, UnderWay] = {}
        self._come_with: dict[Name, Name] = {}  # what one communication writes -> the name that it is under way by
        self.proofs: Mapping[Name, Sequence[Name]] = {}
        """What has surely left once a message has arrived."""
        self.recorder: Recorder | None = None
        self.row, self.blocks = 0, False
        """The row that runs, and whether it holds the compute stream until it is over."""

    def start(
        self,
        name: Name,
        work: Waits | None,
        nbytes: int,
        finish: Callable[[], None] | None = None,
        holds: tuple[Tensor, ...] = (),
        also: Sequence[Name] = (),
    ) -> None:
        """Notes that `name` is being written, by no one else. also: others that come with it."""
        self.wait(name)
        self._come_with |= dict.fromkeys(also, name)
        # One writer at a time: an earlier communication into the buffer is over (`wait` above).
        self.arriving[name] = UnderWay(work=work, finish=finish, span=self._span(nbytes), holds=holds)
        if self.blocks:
            self.wait(name)

    def leave(self, name: Name, tensors: tuple[Tensor, ...], work: Waits | None) -> None:
        """Notes that `tensors` are being sent, to where they are called `name`. A send is over for its sender at once,
        as a Program takes it, whatever its stream: the backend ends it when it is received, and two ranks that send to
        each other would wait for ever."""
        span = self._span(sum(tensor.nbytes for tensor in tensors))
        if self.blocks and span >= 0 and self.recorder is not None:
            self.recorder.close(span)  # on the compute stream it is what the sender waited: nothing
            span = -1
        self.leaving[name] = UnderWay(work=work, finish=None, span=span, holds=tensors)

    def take(self, name: Name) -> tuple[Tensor, ...]:
        """The last read of a buffer."""
        self.wait(name)
        return self.tensors.pop(name)

    def wait(self, name: Name) -> None:
        """Waits until `name` is there, if it is under way."""
        # The first of several that come together waits for all; the others find nothing under way.
        under_way = self.arriving.pop(self._come_with.pop(name, name), None)
        if under_way is None:
            return
        self._end(under_way)
        if under_way.span >= 0 and self.recorder is not None:
            self.recorder.end_wait(under_way.span)
        # What arrived was made from it: the receiver has it, so the buffer sent from can be let go without asking the
        # backend.
        for sent in self.proofs.get(name, ()):
            if sent in self.leaving:
                self._end(self.leaving.pop(sent))

    def end_finished(self) -> None:
        """Ends the collectives that are over, so that what they read is freed before anyone waits for them."""
        for name in [
            n for n, arrival in self.arriving.items() if arrival.holds and arrival.work and arrival.work.is_completed()
        ]:
            self._end(self.arriving.pop(name))

    def wait_all(self) -> None:
        """Waits until nothing is on its way to this rank any more."""
        for name in list(self.arriving):
            self.wait(name)

    def wait_sent(self) -> None:
        """Waits until everything that was sent has left."""
        for under_way in self.leaving.values():
            self._end(under_way)
        self.leaving.clear()

    def _span(self, nbytes: int) -> int:
        return -1 if self.recorder is None else self.recorder.open(self.row, nbytes)

    def _end(self, under_way: UnderWay) -> None:
        if under_way.work is not None:
            under_way.work.wait()
        if under_way.finish is not None:
            under_way.finish()
        if under_way.span >= 0 and self.recorder is not None:
            self.recorder.close(under_way.span)
