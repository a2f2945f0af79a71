"""Processes of live jobs on this machine: start one, see whether it lives, ask it to stop, read how it ended.

Each job has a process beside it (`gnomon.fleet.child`), which outlives the controller and records how the job began and
ended. Both that process and the job's own hold the lock of the file `NAME.lock`, so the job lives as long as the lock
is held, whichever controller started it. Leaves out which jobs are started and stopped (`live`).
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from gnomon.fleet.child import read_began, read_ended


class Processes(Protocol):
    """What the controller asks of the machine."""

    def start(self, name: str, attempt: int, known: int, command: Sequence[str], devices: Sequence[int]) -> None:
        """Starts a job's command on devices, by their indices. Nothing is run where one of its processes lives, or
        where an attempt after `known`, the last whose end is journalled, began: that one may have done the job
        already."""

    def alive(self, name: str) -> bool:
        """Whether a process of the job lives, or has been started and is coming up."""

    def stop(self, name: str) -> None:
        """Asks the job's process to end; it is asked once, however often this is called."""

    def began(self, name: str) -> int:
        """The number of the last attempt whose process came up; 0 for none."""

    def last_end(self, name: str) -> tuple[int, int] | None:
        """(attempt, exit status) of the last attempt whose end was recorded; None for none."""


@dataclass(slots=True)
class LocalProcesses:
    """Processes of this machine."""

    folder: Path
    """The folder of locks, records and logs."""
    children: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    """Name of a job -> the process beside it, if this controller started it."""

    def start(self, name: str, attempt: int, known: int, command: Sequence[str], devices: Sequence[int]) -> None:
        """Starts the process beside the job, which starts the job or, under the conditions of `Processes`, ends."""
        words = [sys.executable, "-m", "gnomon.fleet.child", str(self.folder), name, str(attempt), str(known), "--"]
        # A device's index counts within CUDA_VISIBLE_DEVICES of the controller, where that is set; one beyond it is no
        # GPU: by its number it would be one that is hidden, or another job's.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        own = [str(index) for index in devices]
        if visible is not None:
            gpus = visible.split(",")
            own = [gpus[index] for index in devices if index < len(gpus)]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(own)}
        self.children[name] = subprocess.Popen(
            [*words, *command], start_new_session=True, stdin=subprocess.DEVNULL, env=environment
        )

    def alive(self, name: str) -> bool:
        """Says whether the process beside the job lives, or anybody holds the job's lock."""
        child = self.children.get(name)
        if child is not None:
            if child.poll() is None:
                return True
            del self.children[name]
        path = self.folder / f"{name}.lock"
        if not path.exists():
            return False
        with open(path, "a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return True
            return False

    def stop(self, name: str) -> None:
        """Sends SIGTERM to the process beside the job, which passes it on once; if that is gone, to the job itself."""
        began, ended = read_began(self.folder, name), read_ended(self.folder, name)
        # Still coming up, at first or again: the record, if any, is of an attempt that has ended, whose process ids may
        # be others' by now. The controller calls again when it next looks.
        if began is None or (ended is not None and ended.attempt >= began.attempt):
            return
        # The job's id is 0 where its command could not be started; a signal to 0 goes to this process and its group.
        for pid in (pid for pid in (began.beside, began.job) if pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
                return

    def began(self, name: str) -> int:
        """Returns the number of the last attempt that began; 0 for none."""
        began = read_began(self.folder, name)
        return began.attempt if began else 0

    def last_end(self, name: str) -> tuple[int, int] | None:
        """Returns (attempt, status) of the last attempt that ended; None for none."""
        ended = read_ended(self.folder, name)
        return (ended.attempt, ended.status) if ended else None
