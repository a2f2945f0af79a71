"""Which processes train together, from when on: epochs that the launcher announces in the job's store.

A process `join`s once it has loaded everything; `next` waits for an epoch, and `meet` makes its process group, in
milliseconds, or gives up when a newer one was announced. A process that an epoch leaves out is free to end. Leaves out
who is in an epoch (`control`, asked by `launcher`), and what they do (`member`).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from time import monotonic, sleep, time
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from gnomon.errors import PeerError

LOOK_S = 0.002
"""Between two looks at the store, while nothing else is to be done."""
LOST_S = 0.05
"""Between two looks whether one was lost, while groups are made."""
MEET_S = 20.0
"""In which processes that all are there must have made a group, where a job does not say; longer means that one was
lost meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """Processes that train together."""

    number: int
    """Counted from 1."""
    members: tuple[int, ...]
    """Numbers of the processes, in order of places: the place is the rank in the epoch's process group."""
    placement: tuple[int, ...]
    """Place of the process that does each rank's, or logical worker's, part; none: each rank its own."""
    ranks: tuple[int, ...]
    """Rank of the plan that each member was started for; none where processes are alike."""


class Membership:
    """One process's view of who trains: it joins, meets the others of an epoch, and says what it saw."""

    def __init__(
        self,
        store: Store,
        process: int,
        *,
        meet_s: float = MEET_S,
        pause_s: float = 0.0,
        launcher: Connection | None = None,
    ) -> None:
        """Takes the process's number, which no other one of the job has or had, meet_s, in which processes that are
        there must have met, pause_s, that it sleeps in each worker's step in place of a slower processor, and launcher,
        where it speaks to the launcher's desk, if there is one."""
        self.store, self.process, self.meet_s = store, process, meet_s
        self.pause_s, self.launcher = pause_s, launcher

    @property
    def announced_s(self) -> float:
        """Seconds within which the launcher must announce an epoch after a loss: all have given up meeting before."""
        return 3 * self.meet_s

    def agree(self, found: str) -> str:
        """Says what kernels this process has, and waits for those that all have (`say_kernels`)."""
        self.store.set(f"kernels/{self.process}", found)
        return self.store.get("kernels").decode()

    def say_kind(self, kind: str) -> None:
        """Says what this process computes with, for people."""
        self.store.set(f"kernels/{self.process}", kind)

    def join(self) -> None:
        """Says that this process is ready to train."""
        self.store.set(f"joined/{self.process}", "1")

    def latest(self) -> int:
        """Number of the newest epoch; 0 before the first."""
        return int(self.store.get("epoch")) if self.store.check(["epoch"]) else 0

    def next(self, after: int, *, patience_s: float = float("inf")) -> Epoch | None:
        """The newest epoch after that one with this process in it; None once one leaves it out that was in `after`.
        PeerError where none is announced in time."""
        until = monotonic() + patience_s
        while monotonic() < until:
            # Only the newest counts: epochs between were given up by those who were in them.
            if (latest := self.latest()) > after:
                epoch = read_epoch(self.store, latest)
                if self.process in epoch.members:
                    return epoch
                # It was in an epoch and is in none now: it may end. A process that was never in one waits on for its
                # first.
                if after:
                    return None
            sleep(LOOK_S)
        raise PeerError(f"process {self.process} lost another one, and the launcher announced nothing since")

    def meet(self, epoch: Epoch) -> bool:
        """Makes the default process group of an epoch; whether it did, as none newer was announced. PeerError where it
        takes longer than meet_s."""
        self.store.set(f"ready/{epoch.number}/{self.process}", "1")
        keys = [f"ready/{epoch.number}/{member}" for member in epoch.members]
        # Polled, not waited for: a member that is lost before it sets its key never will, and only a newer epoch says
        # so.
        while not self.store.check(keys):
            if self.latest() > epoch.number:
                return False
            sleep(LOOK_S)
        store: Any = self.store
        # torch has no public way to give a group another timeout once it is made.
        c10d: Any = dist.distributed_c10d
        began = monotonic()
        try:
            dist.init_process_group(
                "gloo",
                # Each epoch under its own prefix, else addresses of an earlier group would be read; a connection of its
                # own, since the backend blocks on it.
                store=PrefixStore(f"group/{epoch.number}", store.clone()),
                rank=epoch.members.index(self.process),
                world_size=len(epoch.members),
                timeout=timedelta(seconds=self.meet_s),
            )
        except RuntimeError as error:
            c10d._world.group_count = 0  # names of groups, which a process that comes later counts from 0 too
            if monotonic() - began < self.meet_s:
                raise
            self.note("unmet", epoch)
            raise PeerError(
                f"process {self.process} has not met the {len(epoch.members) - 1} others within {self.meet_s:g} s: one "
                f"was lost meanwhile, or this machine is slow (--meet-within gives them longer)"
            ) from error
        c10d._set_pg_timeout(dist.constants.default_pg_timeout, dist.group.WORLD)  # a step may take longer
        return True

    def say_speed(self, epoch: Epoch, speed: float) -> None:
        """Workers a second of this process."""
        self.store.set(f"speed/{epoch.number}/{self.process}", repr(speed))

    def note(self, what: str, epoch: Epoch) -> None:
        """Leaves the time of an event: `noticed` a loss, `going` on, `unmet` where others did not come."""
        self.store.set(f"{what}/{epoch.number}/{self.process}", repr(time()))


@contextmanager
def groups_soon_made(meet_s: float) -> Iterator[None]:
    """Groups that are made meanwhile are there within so many seconds, or an error of torch; then they wait as long as
    others. All members must come here at one time."""
    c10d: Any = dist.distributed_c10d
    usual = c10d.default_pg_timeout
    c10d.default_pg_timeout = timedelta(seconds=meet_s)
    try:
        yield
    finally:
        c10d.default_pg_timeout = usual
    for group in c10d._world.pg_map:
        c10d._set_pg_timeout(usual, group)


@contextmanager
def loss_noticed(store: Store, epoch: Epoch, shut: Callable[[], object]) -> Iterator[None]:
    """Calls `shut` in a thread as soon as the launcher says that a member was lost: who waits in the store for its
    address would not find out. shut: ends this process's connections. store: a connection of this thread's own."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(LOST_S):
            if store.check([f"lost/{epoch.number}"]):
                shut()
                return

    thread = threading.Thread(target=watch, name="gnomon lost", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def part() -> None:
    """Ends the process group, whole or broken."""
    if dist.is_initialized():
        dist.destroy_process_group()


def announce(store: Store, epoch: Epoch) -> None:
    """What the launcher does."""
    store.set(f"epoch/{epoch.number}", json.dumps(asdict(epoch)))
    # Last: whoever sees the number finds the epoch written.
    store.set("epoch", str(epoch.number))


def say_lost(store: Store, epoch: Epoch) -> None:
    """The launcher says that a member was lost."""
    store.set(f"lost/{epoch.number}", "1")


def say_nobody_comes(store: Store) -> None:
    """The launcher says that lost processes are not replaced any more."""
    store.set("nobody comes", "1")


def nobody_comes(store: Store) -> bool:
    """Whether the launcher has said so."""
    return bool(store.check(["nobody comes"]))


def say_waited(store: Store, epoch: Epoch, process: int, what: str) -> None:
    """A process that noticed a loss says what it waited for."""
    store.set(f"waited/{epoch.number}/{process}", what)


def who_waited(store: Store, epoch: Epoch) -> list[str]:
    """What members said that they waited for, in the order of places."""
    keys = [f"waited/{epoch.number}/{process}" for process in epoch.members]
    return [store.get(key).decode() for key in keys if store.check([key])]


def kernels_of(store: Store, processes: Iterable[int]) -> dict[int, str]:
    """What kernels those of them have that have said so."""
    keys = {process: f"kernels/{process}" for process in processes}
    return {process: store.get(key).decode() for process, key in keys.items() if store.check([key])}


def say_kernels(store: Store, agreed: str) -> None:
    """The launcher says which kernels all compute with."""
    store.set("kernels", agreed)


def read_epoch(store: Store, number: int) -> Epoch:
    """Reads an epoch from the store; waits until it is announced."""
    values = json.loads(store.get(f"epoch/{number}"))
    return Epoch(number=number, **{name: tuple(values[name]) for name in ("members", "placement", "ranks")})


def is_ready(store: Store, process: int) -> bool:
    """Returns whether a process has said that it is ready to train."""
    return bool(store.check([f"joined/{process}"]))


def noted(store: Store, what: str, epoch: Epoch) -> dict[int, float]:
    """When each member noted `what` in an epoch; those that did not are left out."""
    keys = {member: f"{what}/{epoch.number}/{member}" for member in epoch.members}
    return {member: float(store.get(key)) for member, key in keys.items() if store.check([key])}
