"""Processes of live jobs on this machine: start one, see whether it lives, ask it to stop, read how it ended.

Each job has a process beside it (`gnomon.fleet.child`) that holds the job's lock, whoever started it and whether the
controller lives. The lock is the job's own process's too: it is held as long as either lives. Leaves out deciding.
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
        """Starts a job. Nothing happens where one of its processes lives, or an attempt after `known` began: it may
        have done the job already."""

    def alive(self, name: str) -> bool:
        """Whether a process of the job lives, or is about to."""

    def stop(self, name: str) -> None:
        """Ask the job's process to end, once however often it is called."""

    def began(self, name: str) -> int:
        """The last attempt whose process came to the job; 0 for none."""

    def last_end(self, name: str) -> tuple[int, int] | None:
        """(attempt, exit status) of the last attempt that ended by itself."""


@dataclass(slots=True)
class LocalProcesses:
    """Processes of this machine."""

    folder: Path
    """Of locks, records and logs."""
    children: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    """Those that this controller started."""

    def start(self, name: str, attempt: int, known: int, command: Sequence[str], devices: Sequence[int]) -> None:
        """Starts a job under a child process of ours, as `Processes` has it."""
        words = [sys.executable, "-m", "gnomon.fleet.child", str(self.folder), name, str(attempt), str(known), "--"]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        own = [visible[number] if number < len(visible) and visible[0] else str(number) for number in devices]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(own)}
        self.children[name] = subprocess.Popen(
            [*words, *command], start_new_session=True, stdin=subprocess.DEVNULL, env=environment
        )

    def alive(self, name: str) -> bool:
        """Says whether one of the job's processes lives."""
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
        """Sends SIGTERM to the process alongside the job, which passes it on once; if that is gone, the job gets it."""
        began = read_began(self.folder, name)
        if began is None:
            return  # it has not come so far: asked again at the next look
        for pid in (began.beside, began.job):
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
