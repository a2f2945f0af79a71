"""Which rank waits at which row of the Program, when a step does not go on: `Watchdog`.

A thread of every rank writes the row that its rank is at into the job's store once a second. A rank that stays at a row
reads what the others wrote. One that no longer writes was stopped, or is lost; the first rank that finds it says so in
one message, wakes the stopped process up where it can, so that it can be ended, and ends its own, which ends the job.
Where all write and none goes on, that is said and nothing ended: a row may take long. A rank that the store no longer
answers (a cut link, a machine that is off) says so and ends: with no machine in between to say that a connection is
broken, it would wait for many minutes. The same for gloo and NCCL, since only the store and the clock are asked. Leaves
out what a rank does inside a row.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic, time
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from gnomon.program import NO_UNIT, Program
from gnomon.runtime.processes.local import tell_failure

EVERY_S = 1.0
"""Between two looks."""
SILENT_S = 15.0
"""A rank that has written nothing for so long is taken for stopped."""
SOON = 5
"""Part of SILENT_S after which a rank that stands looks at the others, to count from then on."""
UNANSWERED_S = 2 * SILENT_S
"""A store that has not answered for so long is taken for lost. Ranks that it answers speak first, and know more."""
STUCK_S = 300.0
"""No rank going on for so long is worth a word: a deadlock, or very long rows."""
STATUS = 74
"""Exit status of a process that the watchdog ends (EX_IOERR)."""


@dataclass(frozen=True, slots=True)
class Heard:
    """What a rank wrote last."""

    rank: int
    """The rank."""
    host: str
    """Name of its machine."""
    pid: int
    """Number of its process."""
    since_s: float
    """How long it has been at its row."""
    row: int
    """Of the Program; -1 between steps."""


class Watchdog:
    """Watches one rank from a thread of its own. The interpreter assigns the number of each row that it begins to
    `row`."""

    def __init__(
        self,
        program: Program,
        rank: int,
        world_size: int,
        *,
        silent_s: float = SILENT_S,
        stuck_s: float = STUCK_S,
        unanswered_s: float = UNANSWERED_S,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """Takes say, which takes the message in place of what tells it and ends the process."""
        self.unanswered_s = unanswered_s
        self.program, self.rank, self.world_size = program, rank, world_size
        self.silent_s, self.stuck_s, self.say = silent_s, stuck_s, say
        self.row = self._seen = -1
        self._since = monotonic()
        self._compared = -1.0
        """Since when this rank stood at its row when it looked at the others first."""
        self._heard: dict[int, tuple[str, float]] = {}
        self._over = threading.Event()
        self._store = PrefixStore("gnomon.watchdog", _store())
        self._write(0.0)  # so that one that stops before its first look is missed too
        self._looks = 0
        # Two: one that waits for the store cannot say that it waits.
        self._threads = [
            threading.Thread(target=target, name=f"gnomon watchdog of {what}", daemon=True)
            for target, what in ((self._watch, "ranks"), (self._watch_store, "the store"))
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Ends the threads that watch."""
        self._over.set()
        for thread in self._threads:
            thread.join(timeout=5 * EVERY_S)

    def _watch(self) -> None:
        while not self._over.wait(EVERY_S):
            try:
                self._look()
            except (RuntimeError, ValueError):  # the store is gone: the job ends
                self._over.set()
                return
            self._looks += 1

    def _watch_store(self) -> None:
        """Counts its own turns in which no look came to an end: a process that was stopped has not waited."""
        seen, turns = 0, 0
        while not self._over.wait(EVERY_S):
            seen, turns = self._looks, turns + 1 if self._looks == seen else 0
            if turns * EVERY_S >= self.unanswered_s:
                self._over.set()
                text = unanswered(self.program, self.rank, self.row, self.unanswered_s)
                if self.say is not None:
                    self.say(text)
                    return
                tell_failure("PeerError", text)
                print(f"gnomon: {text}", file=sys.stderr, flush=True)  # this machine's torchrun may wait for the store
                os._exit(STATUS)

    def _look(self) -> None:
        if self.row != self._seen:
            self._seen, self._since = self.row, monotonic()
        stood = monotonic() - self._since
        mine = self._write(stood)
        # A rank that goes on has nothing to ask.
        if stood < min(self.silent_s, self.stuck_s):
            # Once for each row: how long others have been silent is counted by this rank's clock, from a first look on,
            # since clocks of machines differ.
            if self._compared != self._since and stood >= self.silent_s / SOON:
                self._compared = self._since
                self._others(mine)  # from here on it counts how long each says nothing
            return
        alarm = message(self.program, self._others(mine), silent_s=self.silent_s, stuck_s=self.stuck_s)
        if alarm is None:
            return
        text, stopped = alarm
        first = self._store.add(f"said of row {self.row}", 1) == 1  # one message of all ranks'
        if self.say is not None:
            self.say(text)
        elif first:
            _tell(text, ends=bool(stopped))
        if self.say is not None or not stopped:
            self._over.set()
            return
        # A stopped process takes no signal but SIGCONT and SIGKILL; awake, it ends with the job.
        for one in stopped:
            if one.host == mine.host:
                _wake(one.pid)
        sys.stderr.flush()
        os._exit(STATUS)

    def _write(self, stood: float) -> Heard:
        mine = Heard(self.rank, socket.gethostname(), os.getpid(), stood, self.row)
        self._store.set(str(self.rank), json.dumps([*_fields(mine), time()]))
        return mine

    def _others(self, mine: Heard) -> list[tuple[Heard, float]]:
        """Each rank with the seconds since it wrote something new, by this rank's own clock."""
        heard = [(mine, 0.0)]
        for rank in range(self.world_size):
            if rank == self.rank or not self._store.check([str(rank)]):
                continue
            text = self._store.get(str(rank)).decode()
            if self._heard.get(rank, ("", 0.0))[0] != text:
                self._heard[rank] = text, monotonic()
            *fields, _ = json.loads(text)
            heard.append((Heard(*fields), monotonic() - self._heard[rank][1]))
        return sorted(heard, key=lambda pair: pair[0].rank)


def message(
    program: Program, heard: Sequence[tuple[Heard, float]], *, silent_s: float, stuck_s: float
) -> tuple[str, list[Heard]] | None:
    """(what to say, ranks that were stopped), or None while nothing is wrong. heard: each rank and how long it has been
    silent."""
    silent = [one for one, quiet in heard if quiet >= silent_s]
    waiting = [one for one, quiet in heard if quiet < silent_s]
    there = "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} wait{'' if len(ranks) > 1 else 's'} {row}"
        for row, ranks in _by_row(program, waiting).items()
    )
    if silent:
        lost = " and ".join(f"rank {one.rank} ({where(program, one.row)})" for one in silent)
        verb = "has" if len(silent) == 1 else "have"
        return f"{lost} {verb} not been heard of for {silent_s:.0f} s: stopped, or lost; {there}", silent
    if min(one.since_s for one in waiting) >= stuck_s:
        return f"no rank has gone on for {stuck_s:.0f} s: {there}", []
    return None


def unanswered(program: Program, rank: int, row: int, seconds: float) -> str:
    """What a rank says that the store does not answer."""
    address = os.environ.get("MASTER_ADDR", "")
    keeper = f"on {address} " if address else ""
    return (
        f"the job's store {keeper}has not answered rank {rank} for {seconds:.0f} s: the machine that keeps it is lost, "
        f"or the link to it; rank {rank} waits {_at(program, row)}"
    )


def where(program: Program, row: int) -> str:
    """`row 12, 0F3` or `row 40, AR of stage 1 over dp`."""
    if row < 0:
        return "between steps"
    kind, stage, unit = program.kinds[program.kind[row]].name, int(program.stage[row]), int(program.unit[row])
    if comm := program.comm_of(row):
        name = f"{kind} of stage {stage}{'' if unit == NO_UNIT else f', microbatch {unit}'} over {comm}"
    else:
        name = f"{stage}{kind}{'' if unit == NO_UNIT else unit}"
    return f"row {row}, {name}"


def _at(program: Program, row: int) -> str:
    return where(program, row) if row < 0 else f"at {where(program, row)}"


def _by_row(program: Program, waiting: Sequence[Heard]) -> Mapping[str, list[int]]:
    by_row: dict[str, list[int]] = {}
    for one in waiting:
        by_row.setdefault(_at(program, one.row), []).append(one.rank)
    return by_row


def _fields(one: Heard) -> list[Any]:
    return [one.rank, one.host, one.pid, one.since_s, one.row]


def _store() -> Any:
    """The store that the job's processes met in, by a connection of this thread's own: one that waits holds its own."""
    store: Any = dist.distributed_c10d._get_default_store()
    return store.clone()


def _wake(pid: int) -> None:
    """So that a stopped process takes the signal that ends the job."""
    try:
        os.kill(pid, signal.SIGCONT)
    except (ProcessLookupError, PermissionError):
        pass


def _tell(text: str, *, ends: bool) -> None:
    """Tells a failure to whoever started the processes, if the job ends by it and they read it; else prints it."""
    if not (ends and tell_failure("PeerError", text)):
        print(f"gnomon: {text}", file=sys.stderr, flush=True)
