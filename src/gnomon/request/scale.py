"""How a job that runs is asked for another number of processes: files in a hidden folder beside its checkpoints.

The launcher holds `JobFolder(folder)` while it runs: it writes what the job stands on, and reads what is asked. `ask`
and `read_state` are for the one who asks, on the same machine or through a shared file system. The lock ends with the
launcher, however that ends. Leaves out what the launcher does then (`runtime.launch.launcher`).
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gnomon.errors import InputError

FOLDER, STATE, REQUEST = ".job", "state.json", "request.json"
SCHEMA = "gnomon.job/1"
MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of placement: the step from which on, and the processes that train from there."""

    epoch: int
    """Counted from 1."""
    at: float
    """When it was decided, by the wall clock."""
    why: str
    """`started`, `asked for 2 processes`, or which one was lost."""
    placement: tuple[int, ...]
    """Place of each logical worker's process among those that train."""
    noticed_at: float | None = None
    """When the last of the others found its connection to a lost process broken; None where none was lost."""
    going_at: float | None = None
    """When all had the newest state and went on; None until they have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """What a job stands on."""

    pid: int
    """Of its launcher."""
    workers: int
    """Logical ones: no more processes are of use."""
    asked: int
    """Processes that it was last asked for, or has left."""
    changes: tuple[Change, ...]
    """Since it began."""

    @property
    def processes(self) -> int:
        """How many processes train now; 0 before the first step."""
        return max(self.changes[-1].placement) + 1 if self.changes else 0


class JobFolder:
    """The launcher's side of the folder through which a running job is scaled. `close` it when the job is over."""

    def __init__(self, folder: Path) -> None:
        """folder: of checkpoints. InputError where another job has it, or it cannot be written to."""
        self.path = folder / FOLDER
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise InputError(f"cannot write to {str(self.path)!r}: {error.strerror}; give another folder") from error
        if not _locked(self._lock):
            os.close(self._lock)
            raise InputError(f"another job runs in {str(folder)!r}; wait for it, or give another --checkpoints")
        with suppress(FileNotFoundError):
            (self.path / REQUEST).unlink()  # of a job before

    def write(self, state: JobState) -> None:
        """Says what the job stands on now."""
        _replace(self.path / STATE, {"schema": SCHEMA, **asdict(state)})

    def requested_processes(self) -> int | None:
        """Processes that somebody asks for, once; None where nobody does, or what is there cannot be read."""
        try:
            processes = _read(self.path / REQUEST)["processes"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            processes = None
        with suppress(FileNotFoundError):
            (self.path / REQUEST).unlink()
        return processes if type(processes) is int else None

    def close(self) -> None:
        """Ends the job for those who would ask."""
        os.close(self._lock)


def ask(folder: Path, processes: int) -> JobState:
    """Asks the job of a folder for so many processes; what it stood on then. InputError where no job runs there, or it
    has fewer logical workers."""
    state = read_state(folder)
    if not 1 <= processes <= state.workers:
        raise InputError(
            f"the job has {state.workers} logical workers, which run on 1 to {state.workers} processes, not {processes}"
        )
    try:
        _replace(folder / FOLDER / REQUEST, {"processes": processes})
    except OSError as error:
        raise InputError(f"cannot ask the job in {str(folder)!r}: {error.strerror}") from error
    return state


def read_state(folder: Path) -> JobState:
    """What the job of a folder stands on. InputError where none runs that can be scaled."""
    if not is_running(folder):
        raise InputError(
            f"no job that can be scaled runs in {str(folder)!r}; start one with gnomon run PLAN --processes N, and "
            f"name its plan file or its folder of checkpoints"
        )
    path = folder / FOLDER / STATE
    try:
        values = _read(path)
        changes = [Change(**{**one, "placement": tuple(one["placement"])}) for one in values["changes"]]
        state = JobState(pid=values["pid"], workers=values["workers"], asked=values["asked"], changes=tuple(changes))
        if values["schema"] != SCHEMA or not all(type(n) is int for n in (state.pid, state.workers, state.asked)):
            raise ValueError("it is of another kind")
        return state
    except FileNotFoundError:
        raise InputError(f"the job in {str(folder)!r} has only begun; ask again in a moment") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{path} does not say what a job stands on: {error}") from error


def is_running(folder: Path) -> bool:
    """Whether a launcher holds the folder."""
    try:
        lock = os.open(folder / FOLDER, os.O_RDONLY)
    except OSError:
        return False
    try:
        return not _locked(lock)
    finally:
        os.close(lock)


def _locked(file: int) -> bool:
    """Takes the lock, if nobody has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _read(path: Path) -> Mapping[str, Any]:
    with path.open("rb") as opened:
        values: Mapping[str, Any] = json.loads(opened.read(MOST_BYTES))
    return values


def _replace(path: Path, values: Mapping[str, Any]) -> None:
    """Writes a file aside and renames it, so that no reader sees a part of it."""
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps(values))
    partial.rename(path)
