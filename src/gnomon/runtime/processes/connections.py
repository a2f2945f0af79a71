"""TCP connections of this process, so that those of broken process groups can be shut down at once.

When a rank is lost, a rank that waits for it finds its connection closed; one that waits for that rank does not. So
each that finds out shuts down the connections of all its groups: who waits in one of them finds out at once, and no
group waits in its destructor for an operation that will not end. gloo's `abort` waits for its threads instead (torch
2.13). Sockets are looked up in /proc: without it none are found, and none shut down. Leaves out making groups again
(`membership`).
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

FOLDER = Path("/proc/self/fd")

Sockets = frozenset[tuple[int, str]]
"""File descriptor, and what it is: a number that no other socket has."""


def sockets() -> Sockets:
    """All of this process; none where the system does not say."""
    if not FOLDER.is_dir():
        return frozenset()
    found = set[tuple[int, str]]()
    for name in os.listdir(FOLDER):
        if (what := _what(int(name))).startswith("socket:"):
            found.add((int(name), what))
    return frozenset(found)


def shut(chosen: Sockets) -> int:
    """Shuts TCP connections down, both ways, and returns how many."""
    count = 0
    for number, what in chosen:
        if _what(number) != what:  # closed, and the number perhaps another's
            continue
        try:
            # A descriptor of our own for the same connection: closing it leaves the group's.
            with socket.socket(fileno=os.dup(number)) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                    one.getpeername()  # one that listens has none, and gloo ends the process where it is shut down
                    one.shutdown(socket.SHUT_RDWR)
                    count += 1
        except OSError:  # it listens, or is closed already
            continue
    return count


def _what(number: int) -> str:
    try:
        return os.readlink(FOLDER / str(number))
    except OSError:
        return ""
