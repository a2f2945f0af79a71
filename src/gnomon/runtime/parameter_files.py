"""Parameters that wait on a disk: files mapped into memory, read ahead of their layer, written after their update.

A `ParameterFile` holds a rank's part of some parameters. Its `tensor` is the file itself, mapped: who updates it writes
the file. `read` brings it into memory of the host, `write_back` puts what was written on the disk; both let its pages
go, so that what is on the disk takes no memory. `ReadAhead` has a thread for them: when a layer's parameters are taken,
it reads those of the next one. A file has no name, so that nothing is left of it however the process ends, and has all
its room from the start, so that a full disk is told before the first step. Leaves out states of the optimizer.
Source: Rajbhandari et al. 2021 (ZeRO-Infinity).
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

from gnomon.errors import RunError
from gnomon.units import show_bytes

WRITING = 2
"""Layers whose new parameters may be on their way to the disk: they are in memory meanwhile."""


def disk_folder() -> Path:
    """Where the files are: $GNOMON_DISK, or the system's folder for temporary files."""
    return Path(os.environ.get("GNOMON_DISK") or tempfile.gettempdir())


class ParameterFile:
    """Some parameters, as bytes on a disk."""

    def __init__(self, value: Tensor, folder: Path, *, pinned: bool) -> None:
        """value: a vector, of which the file gets a copy. pinned: whether a GPU copies what is read. RunError where
        the folder is not there or has no room."""
        self.size, self.dtype, self.pinned = value.numel(), value.dtype, pinned
        self.nbytes = max(value.nbytes, 1)
        try:
            self._file = _unnamed(folder, self.nbytes)
        except OSError as error:
            raise RunError(
                f"cannot put {show_bytes(self.nbytes)} of parameters into a file in {str(folder)!r}: {error.strerror}; "
                "make room there, or set GNOMON_DISK to a folder on another disk"
            ) from error
        self._map = mmap.mmap(self._file, self.nbytes)
        self.tensor = torch.frombuffer(self._map, dtype=self.dtype, count=self.size) if self.size else value.clone()
        """The file: who writes it writes there."""
        self._coming: Future[Tensor] | None = None
        self.tensor.copy_(value)
        self.write_back()

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)  # its memory, and its room on the disk, go with the last tensor that looks into it

    def begin(self, thread: ThreadPoolExecutor) -> None:
        """Starts to read it."""
        self._coming = thread.submit(self.read)

    def take(self) -> Tensor:
        """Its parameters in memory, read now unless that has begun."""
        coming, self._coming = self._coming, None
        return self.read() if coming is None else coming.result()

    def forget(self) -> None:
        """What was read ahead is old."""
        self._coming = None

    def read(self) -> Tensor:
        """A copy of it, read from the disk."""
        into = torch.empty(self.size, dtype=self.dtype, pin_memory=self.pinned)
        view, done = memoryview(into.view(torch.uint8).numpy().data), 0
        while done < into.nbytes:
            done += os.preadv(self._file, [view[done:]], done)
        self._let_go()
        return into

    def ahead(self) -> None:
        """Tells the system that an update reads and writes all of it now."""
        self._map.madvise(mmap.MADV_WILLNEED)

    def write_back(self) -> None:
        """Puts it on the disk. RunError where that fails."""
        try:
            self._map.flush()
        except OSError as error:
            raise RunError(f"parameters could not be written to the disk: {error.strerror}") from error
        self._let_go()

    def _let_go(self) -> None:
        """Of its pages, those that are on the disk take no memory any more."""
        self._map.madvise(mmap.MADV_DONTNEED)
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)


class ReadAhead:
    """Files of a rank's stages, in the order in which a step reads them."""

    def __init__(self, order: Sequence[int], files: Mapping[int, Sequence[ParameterFile]]) -> None:
        """order: stages as their parameters are gathered in a step. files: by stage; those that are updated first."""
        self.order, self.files = tuple(order), files
        self._at = len(self.order)
        self._thread = ThreadPoolExecutor(1, "disk")
        self._writing: deque[Future[None]] = deque()
        self._lock = Lock()  # the host's thread updates too

    def new_step(self) -> None:
        """The order begins again."""
        self._at = 0

    def taken(self, stage: int) -> None:
        """The stage's parameters were read: the next one's are, meanwhile. Nothing where another stage was next."""
        if self._at < len(self.order) and self.order[self._at] == stage:
            self._at += 1
            for file in self.files.get(self.order[self._at], ()) if self._at < len(self.order) else ():
                file.begin(self._thread)

    def update(self, stage: int) -> None:
        """The stage's parameters are going to be updated."""
        for file in self.files.get(stage, ()):
            file.forget()
            file.ahead()

    def updated(self, stage: int) -> None:
        """Starts to write what was updated, and waits where more than `WRITING` layers are not written yet."""
        with self._lock:
            for file in self.files.get(stage, ()):
                self._writing.append(self._thread.submit(file.write_back))
            self._wait(WRITING)

    def finish(self) -> None:
        """Until everything is on the disk."""
        with self._lock:
            self._wait(0)

    def _wait(self, left: int) -> None:
        while len(self._writing) > left:
            self._writing.popleft().result()

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown()


def _unnamed(folder: Path, nbytes: int) -> int:
    """A file of so many bytes that is gone when it is closed."""
    number, name = tempfile.mkstemp(prefix="gnomon-parameters-", dir=folder)
    os.unlink(name)
    try:
        os.posix_fallocate(number, 0, nbytes)
    except BaseException:
        os.close(number)
        raise
    return number
