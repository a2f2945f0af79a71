"""The process beside a live job: it holds the job's lock, passes signals on, and writes down how the job ended.

`python -m gnomon.fleet.child FOLDER ID -- COMMAND …`. The lock says whether a job runs, whoever started it and whether
the controller lives; so no job runs twice. FOLDER gets `ID.pid` and, at the end, `ID.rc`. Leaves out deciding anything.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

ALREADY_RUNS = 75
"""Exit status where another process holds the job's lock (EX_TEMPFAIL)."""


def main(argv: list[str]) -> int:
    """Run the command under the lock of its job."""
    folder, job, command = Path(argv[0]), argv[1], argv[3:]
    lock = open(folder / f"{job}.lock", "a")  # noqa: SIM115 - held as long as the process lives
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return ALREADY_RUNS
    written(folder / f"{job}.pid", str(os.getpid()))
    (folder / f"{job}.rc").unlink(missing_ok=True)
    with open(folder / f"{job}.log", "ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda sent, _frame: process.send_signal(sent))
        status = process.wait()
    written(folder / f"{job}.rc", str(status if status >= 0 else 128 - status))
    return 0


def written(path: Path, text: str) -> None:
    """Whole or not at all, and on the disk."""
    fresh = path.with_name(f"{path.name}.new")
    with open(fresh, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
