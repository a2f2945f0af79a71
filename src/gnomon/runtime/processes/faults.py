"""What a failure in one rank means, in one sentence: a peer that is gone, memory that ran out.

`plain(error, rank, at)` turns torch's and the system's errors into ours, with the row of the Program at which the rank
stood; `failure_of(failed, …)` is what the user is told of a run whose processes failed, and `may_start_again` whether
the same run can go on. Leaves out finding failures (`local`, `watchdog`).
"""

from __future__ import annotations

import errno
from pathlib import Path

from gnomon.errors import GnomonError, NoMemoryError, PeerError, RunError
from gnomon.runtime.processes.local import FailedError

LOST = (
    "Connection closed",
    "Connection reset",
    "Broken pipe",
    "Connection refused",
    "Connect timeout",
    "Timed out waiting",
    "wait timeout",
    "failed recv",
    "Failed to recv",
)
"""What gloo, NCCL and torch's store say where the other end is gone."""
NO_MEMORY = ("can't allocate memory", "out of memory", "Cannot allocate memory")
ENDED = ", so the run ended"
SAID = 3
"""Ranks that waited whose rows are told."""


def plain(error: Exception, rank: int, at: str) -> Exception:
    """Ours in place of the error, or the error itself. at: where in the step the rank stood."""
    text = str(error)
    # An error of ours says already what it means.
    if isinstance(error, GnomonError):
        return error
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(word in text for word in NO_MEMORY)):
        return NoMemoryError(
            f"rank {rank} ran out of memory {at} ({text.splitlines()[0][:160] if text else 'MemoryError'}); take a "
            f"smaller micro batch, recompute more, or shard more"
        )
    if isinstance(error, (RuntimeError, ConnectionError)) and any(word in text for word in LOST):
        return PeerError(f"rank {rank} waited {at} for another process, which is gone")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS):
        what = "a file" if error.filename is None else repr(str(error.filename))
        return RunError(f"rank {rank} cannot write {what} {at}: {error.strerror}; make room there")
    return error


def failure_of(failed: FailedError, world_size: int, *, last_checkpoint: Path | None, resume_with: str) -> RunError:
    """What to tell of a run whose processes failed; an error that says itself what is left, as it is. last_checkpoint:
    the newest whole one."""
    first, *others = failed.failures
    if first.error and ENDED in first.message:
        return RunError(first.message)
    waited = "".join(
        f"; {failure.message}" for failure in [failure for failure in others if failure.error is PeerError][:SAID]
    )
    cause = first.message if first.error else f"rank {first.rank} of {world_size} {first.describe()}"
    after = (
        f"the checkpoint {last_checkpoint} is whole: {resume_with or 'resume from it'}"
        if last_checkpoint
        else "no checkpoint"
    )
    kind = PeerError if may_start_again(failed) else RunError
    return kind(f"{cause}{ENDED}{waited}; {after}")


def may_start_again(failed: FailedError) -> bool:
    """Whether it was a process that was lost, and not a mistake that would come again."""
    first = failed.failures[0]
    # No kind: it ended by a signal or status, without an exception of its own.
    return first.error is PeerError or not first.kind
