"""The process beside a live job: it holds the job's lock, passes signals on, and writes down how the job ended.

`python -m gnomon.fleet.child FOLDER ID ATTEMPT KNOWN -- COMMAND …`. The lock says whether a job runs, whoever started
it and whether the controller lives. Where an attempt after KNOWN began, which the controller did not know, nothing is
done; so no job runs twice. FOLDER gets `ID.began`, `ID.log` and, at the end, `ID.ended`. Leaves out deciding anything.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

NOT_NOW = 75
"""Exit status where the job runs already, or began when the controller did not know of it (EX_TEMPFAIL)."""


@dataclass(frozen=True, slots=True)
class Began:
    """What is written when a job's process was started."""

    attempt: int
    """Number of the start, from 1."""
    beside: int
    """Id of the process beside the job."""
    job: int
    """Id of the job's process; 0 where its command could not be started."""


@dataclass(frozen=True, slots=True)
class Ended:
    """What is written when it ended."""

    attempt: int
    """Number of the start that ended."""
    status: int
    """As a shell has it: 128 and the signal, where one killed it."""


def main(argv: list[str]) -> int:
    """Run the command under the lock of its job."""
    folder, job, attempt, known, command = Path(argv[0]), argv[1], int(argv[2]), int(argv[3]), argv[5:]
    lock = open(folder / f"{job}.lock", "a")  # noqa: SIM115 - held as long as the process lives
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return NOT_NOW
    last = read_began(folder, job)
    if last is not None and last.attempt > known:
        return NOT_NOW
    signals_seen: list[int] = []
    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        signal.signal(number, lambda sent, _frame: signals_seen.append(sent))
    with open(folder / f"{job}.log", "ab") as log:
        try:
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, pass_fds=(lock.fileno(),)
            )
        except OSError as error:
            log.write(f"cannot start {command[0]!r}: {error.strerror}\n".encode())
            write(folder / f"{job}.began", Began(attempt=attempt, beside=os.getpid(), job=0))
            write(folder / f"{job}.ended", Ended(attempt=attempt, status=127))
            return 0

        def pass_on(sent: int, _frame: FrameType | None) -> None:
            """A job is told to stop once: to many programs a second time means at once."""
            signals_seen.append(sent)
            if len(signals_seen) == 1:
                process.send_signal(sent)

        if signals_seen:
            process.send_signal(signals_seen[0])
        for number in signals:
            signal.signal(number, pass_on)
        write(folder / f"{job}.began", Began(attempt=attempt, beside=os.getpid(), job=process.pid))
        status = process.wait()
    write(folder / f"{job}.ended", Ended(attempt=attempt, status=status if status >= 0 else 128 - status))
    return 0


def write(path: Path, record: Began | Ended) -> None:
    """Whole or not at all, and on the disk."""
    fresh = path.with_name(f"{path.name}.new")
    with open(fresh, "w", encoding="utf-8") as file:
        json.dump(asdict(record), file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)


def read_began(folder: Path, job: str) -> Began | None:
    """What is noted of a job's last attempt that began; None if none did."""
    path = folder / f"{job}.began"
    return Began(**json.loads(path.read_text())) if path.exists() else None


def read_ended(folder: Path, job: str) -> Ended | None:
    """What is noted of a job's last attempt that ended by itself; None if none did."""
    path = folder / f"{job}.ended"
    return Ended(**json.loads(path.read_text())) if path.exists() else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
