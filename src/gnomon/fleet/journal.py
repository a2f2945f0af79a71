"""The journal of a live controller: what happened to each job, a line of JSON an event, on the disk before it is done.

`Journal(path)` reads what is there and appends; a last line that a crash cut off is passed over. Leaves out what events
mean.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gnomon.errors import InputError

Event = Mapping[str, Any]


def read_events(path: Path) -> tuple[list[Event], int]:
    """(events, bytes of them) of a journal; nothing of a file that is not there. InputError for a damaged one."""
    events: list[Event] = []
    end = 0
    if path.exists():
        for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
            if not line.endswith(b"\n"):
                break  # cut off by a crash: it was not acted on
            try:
                events.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise InputError(f"{path}: line {number} is not JSON; the journal is damaged") from error
            end += len(line)
    return events, end


class Journal:
    """Events of a controller, in order."""

    def __init__(self, path: Path) -> None:
        self.events, end = read_events(path)
        self._file = open(path, "ab")  # noqa: SIM115 - held as long as the controller lives
        # What a crash cut off goes: the next event would be written behind it on the same line.
        self._file.truncate(end)

    def write(self, kind: str, job: str, **fields: Any) -> None:
        """Appends an event; it is on the disk when this returns."""
        event = {"event": kind, "job": job, **fields}
        self._file.write(json.dumps(event, separators=(",", ":")).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.events.append(event)

    def close(self) -> None:
        """Closes the file of events."""
        self._file.close()
