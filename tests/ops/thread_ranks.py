"""Ranks as threads of one process: `gnomon.runtime.mesh.collectives` by memory, with a record of what was sent.

`ThreadRanks(axes)` stands in for the module's `dist`. `run(function)` calls a function on every rank at once, with its
coordinates; what ranks send is recorded as (phase, kind, axis) -> bytes of rank 0, counted as `Collective.bytes` counts
them. Leaves out everything that the runtime's collectives do not use.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from queue import Queue
from typing import Any, TypeVar

import torch
import torch.distributed as real
from torch import Tensor

from gnomon.runtime.ops.site import Axis

Result = TypeVar("Result")
LIMIT_S = 60.0


@dataclass
class Meeting:
    """Ranks of one group, which exchange what they hold."""

    ranks: int
    barrier: threading.Barrier
    held: list[Any]
    mail: dict[tuple[int, int, int], Queue[Tensor]] = field(default_factory=dict)
    """(sender, receiver, tag) -> messages on their way."""

    def exchange(self, index: int, value: Any) -> list[Any]:
        """What every rank holds, in order."""
        self.held[index] = value
        self.barrier.wait(LIMIT_S)
        every = list(self.held)
        self.barrier.wait(LIMIT_S)
        return every

    def box(self, sender: int, receiver: int, tag: int) -> Queue[Tensor]:
        return self.mail.setdefault((sender, receiver, tag), Queue())


@dataclass(frozen=True)
class Member:
    """One rank's place in a group: what the runtime holds as a `ProcessGroup`."""

    meeting: Meeting
    axis: str
    index: int
    sent: Counter[tuple[str, str, str]]
    phase: list[str]

    def record(self, kind: str, x: Tensor) -> None:
        if x.is_floating_point():  # counts of rows go along, which strategies leave out
            self.sent[self.phase[0], kind, self.axis] += x.numel() * x.element_size()


class Arrival:
    """A message that is waited for; of a message sent, nothing."""

    def __init__(self, box: Queue[Tensor] | None = None, into: Tensor | None = None) -> None:
        self.box, self.into = box, into

    def wait(self) -> None:
        if self.box is not None and self.into is not None:
            self.into.copy_(self.box.get(timeout=LIMIT_S))


class ThreadRanks:
    """A mesh of threads, `axes` by name; in place of `torch.distributed`."""

    ReduceOp = real.ReduceOp

    def __init__(self, axes: Mapping[str, int], order: str) -> None:
        self.axes, self.order = dict(axes), order
        self.places = list(itertools.product(*(range(n) for n in axes.values())))
        self.meetings: dict[tuple[str, tuple[int, ...]], Meeting] = {}
        self.sent = [Counter[tuple[str, str, str]]() for _ in self.places]
        self.phases = [["forward"] for _ in self.places]

    def coordinates(self, rank: int) -> dict[str, int]:
        return dict(zip(self.axes, self.places[rank], strict=True))

    def mesh(self, rank: int) -> dict[str, Axis]:
        """The axes as an op of that rank sees them."""
        found = {}
        for at, (name, ranks) in enumerate(self.axes.items()):
            place = self.places[rank]
            key = name, (*place[:at], *place[at + 1 :])
            meeting = self.meetings.setdefault(key, Meeting(ranks, threading.Barrier(ranks), [None] * ranks))
            group: Any = Member(meeting, name, place[at], self.sent[rank], self.phases[rank])
            order = self.order if name == "cp" else "contiguous"
            found[name] = Axis(group=group, ranks=ranks, index=place[at], order=order)
        return found

    def run(self, function: Callable[[int], Result]) -> list[Result]:
        """Results of all ranks; the first failure of one is raised."""
        results: list[Any] = [None] * len(self.places)
        errors: list[BaseException] = []

        def work(rank: int) -> None:
            try:
                results[rank] = function(rank)
            except BaseException as error:
                errors.append(error)
                for meeting in self.meetings.values():
                    meeting.barrier.abort()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(self.places))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        first = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)] or errors
        if first:
            raise first[0]
        return results

    def all_reduce(self, x: Tensor, op: Any, group: Member, async_op: bool = False) -> None:
        group.record("all_reduce", x)
        parts = torch.stack(group.meeting.exchange(group.index, x.clone()))
        x.copy_(parts.amax(0) if op == real.ReduceOp.MAX else parts.sum(0))

    def all_gather_single(self, out: Tensor, part: Tensor, group: Member, async_op: bool = False) -> None:
        group.record("all_gather", out)
        out.copy_(torch.cat([x.reshape(-1) for x in group.meeting.exchange(group.index, part)]).view_as(out))

    all_gather_into_tensor = all_gather_single

    def reduce_scatter_single(self, out: Tensor, whole: Tensor, group: Member, async_op: bool = False) -> None:
        group.record("reduce_scatter", whole)
        total = torch.stack(group.meeting.exchange(group.index, whole)).sum(0)
        out.copy_(total.reshape(group.meeting.ranks, -1)[group.index].view_as(out))

    reduce_scatter_tensor = reduce_scatter_single

    def all_to_all_single(
        self,
        out: Tensor,
        x: Tensor,
        received: Sequence[int] | None,
        sent: Sequence[int] | None,
        group: Member,
        async_op: bool = False,
    ) -> None:
        group.record("all_to_all", x)
        ranks = group.meeting.ranks
        parts = x.split(list(sent)) if sent is not None else x.chunk(ranks)
        every = group.meeting.exchange(group.index, parts)
        out.copy_(torch.cat([theirs[group.index] for theirs in every]))

    # One round of a ring: peers are numbers of ranks within the group.
    isend, irecv = "send", "receive"

    @staticmethod
    def P2POp(way: str, x: Tensor, peer: int, group: Member, tag: int) -> tuple[str, Tensor, int, Member, int]:  # noqa: N802
        return way, x, peer, group, tag

    def batch_isend_irecv(self, works: Sequence[tuple[str, Tensor, int, Member, int]]) -> list[Arrival]:
        arrivals = []
        for way, x, peer, group, tag in works:
            if way == "send":
                group.record("send_recv", x)
                group.meeting.box(group.index, peer, tag).put(x.clone())
                arrivals.append(Arrival())
            else:
                arrivals.append(Arrival(group.meeting.box(peer, group.index, tag), x))
        return arrivals

    @staticmethod
    def get_world_size(group: Member) -> int:
        return group.meeting.ranks

    @staticmethod
    def get_rank(group: Member) -> int:
        return group.index

    @staticmethod
    def get_global_rank(group: Member, rank: int) -> int:
        return rank


def total(axes: Mapping[str, int]) -> int:
    return math.prod(axes.values())
