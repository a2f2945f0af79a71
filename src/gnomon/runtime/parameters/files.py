"""Parameters that wait on a disk: files mapped into memory, read ahead of their layer, written after their update.

A `ParameterFile` holds a rank's part of some parameters. Its `tensor` is the file itself, mapped: who updates it writes
the file. `read` brings it into memory of the host, `write_back` puts what was written on the disk; both let its pages
go, so that what is on the disk takes no memory. `ReadAhead` has a thread for them: when a layer's parameters are taken,
it reads those of the next. A file has no name, so that nothing is left of it however the process ends, and has all
its room from the start, so that a full disk is told before the first step. Leaves out states of the optimizer.
Source: Rajbhandari et al. 2021 (ZeRO-Infinity).
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

from gnomon.errors import RunError
from gnomon.units import show_bytes

AHEAD = 2
"""Files that are read before they are asked for: one for each layer, two where it has others' parameters too."""
WRITING = 2
"""Files whose new parameters may be on their way to the disk: they are in memory meanwhile."""


def disk_folder() -> Path:
    """The folder of the files: $GNOMON_DISK, or the system's folder for temporary files."""
    return Path(os.environ.get("GNOMON_DISK") or tempfile.gettempdir())


class ParameterFile:
    """Some parameters, as bytes on a disk."""

    def __init__(self, value: Tensor, folder: Path, *, pinned: bool) -> None:
        """Takes value, a vector of which the file gets a copy, and pinned, whether a GPU copies what is read. RunError
        where the folder is not there or has no room."""
        self.size, self.dtype, self.pinned = value.numel(), value.dtype, pinned
        self.nbytes = max(value.nbytes, 1)
        try:
            self._file = unnamed_file(folder, self.nbytes)
        except OSError as error:
            raise RunError(
                f"cannot put {show_bytes(self.nbytes)} of parameters into a file in {str(folder)!r}: {error.strerror}; "
                "make room there, or set GNOMON_DISK to a folder on another disk"
            ) from error
        self._map = mmap.mmap(self._file, self.nbytes)
        self.tensor = torch.frombuffer(self._map, dtype=self.dtype, count=self.size) if self.size else value.clone()
        """The file: who writes it writes there."""
        self._coming: Future[Tensor] | None = None
        self.reader: ReadAhead | None = None
        """Who reads and writes it beside the step."""
        self.tensor.copy_(value)
        self.write_back()

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)  # its memory, and its room on the disk, go with the last tensor that looks into it

    def begin(self, thread: ThreadPoolExecutor) -> None:
        """Starts to read it."""
        if self._coming is None:
            self._coming = thread.submit(self.read)

    def take(self) -> Tensor:
        """Its parameters in memory, read now unless that has begun."""
        coming, self._coming = self._coming, None
        value = self.read() if coming is None else coming.result()
        if self.reader is not None:
            self.reader.on_read(self)
        return value

    def updated(self) -> None:
        """`tensor` was changed: what was read before is old, and the file is written."""
        self._coming = None
        if self.reader is None:
            self.write_back()
        else:
            self.reader.write(self)

    def read(self) -> Tensor:
        """A copy of it, read from the disk."""
        into = torch.empty(self.size, dtype=self.dtype, pin_memory=self.pinned)
        view, done = memoryview(into.view(torch.uint8).numpy().data), 0
        while done < into.nbytes:
            # One call reads 2 GiB at most.
            done += os.preadv(self._file, [view[done:]], done)
        self._let_go()
        return into

    def write_back(self) -> None:
        """Puts it on the disk. RunError where that fails."""
        try:
            self._map.flush()
        except OSError as error:
            raise RunError(f"parameters could not be written to the disk: {error.strerror}") from error
        self._let_go()

    def _let_go(self) -> None:
        """Lets go of its pages in memory: those that are on the disk take none any more."""
        # First: the system drops no page from its cache that is still mapped.
        self._map.madvise(mmap.MADV_DONTNEED)
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)


class ReadAhead:
    """Files of a rank, in the order in which a step takes them."""

    def __init__(self, order: Sequence[ParameterFile]) -> None:
        """Takes the order in which parameters are gathered in a step; the same file is there as often as it is
        taken."""
        self.order = tuple(order)
        self._next = 0
        self._thread = ThreadPoolExecutor(1, "disk")
        self._writing: deque[Future[None]] = deque()
        self._lock = Lock()  # the host's thread updates too
        for file in order:
            file.reader = self

    def on_read(self, file: ParameterFile) -> None:
        """A file was read: those that a step takes after it are, meanwhile. Not beyond the step's end: there parameters
        are updated."""
        at = self._next if self._next < len(self.order) and self.order[self._next] is file else self.order.index(file)
        self._next = at + 1
        for later in self.order[at + 1 : at + 1 + AHEAD]:
            later.begin(self._thread)

    def write(self, file: ParameterFile) -> None:
        """Starts to write what was updated, and waits while more than `WRITING` files are not written yet."""
        with self._lock:
            self._writing.append(self._thread.submit(file.write_back))
            self._wait(WRITING)

    def finish(self) -> None:
        """Waits until everything is on the disk."""
        with self._lock:
            self._wait(0)

    def _wait(self, most_pending: int) -> None:
        while len(self._writing) > most_pending:
            self._writing.popleft().result()

    def close(self) -> None:
        """Ends the thread that reads ahead."""
        self._thread.shutdown()


def unnamed_file(folder: Path, nbytes: int) -> int:
    """A file of so many bytes that is gone when it is closed."""
    number, name = tempfile.mkstemp(prefix="gnomon-parameters-", dir=folder)
    os.unlink(name)
    try:
        if nbytes:
            os.posix_fallocate(number, 0, nbytes)
    except BaseException:
        os.close(number)
        raise
    return number
