"""A migration between two tiers carried out: tensors in files on a disk, and in memory of a fixed size.

`carry_out(trace, migration, folder, capacity)` does what `simulate.two_tiers` decided, with a file for each tensor, a
thread that reads and one that writes, beside rows that keep a core busy for their seconds. Memory is given out up to
the capacity only, so what it counts as its most is what was there. Each tensor carries how often it was changed, which
every row checks: what was read is what was written last. Written files are on the disk (`fdatasync`) and out of the
page cache before their memory is free. Leaves out models: rows compute nothing.
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from threading import Condition
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from gnomon.errors import RunError
from gnomon.simulate.two_tiers import STEPS, Link, Migration, TierTrace

WORD = 8
"""Bytes of the count at both ends of a tensor, which is as large at least."""
Bytes = NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """How a migration went that was carried out."""

    step_s: float
    """Seconds of the last step."""
    peak_bytes: float
    """Most memory of tensors at once, the pool included."""
    read_bytes: float
    """In all steps."""
    written_bytes: float


class _Files:
    """Tensors in memory and on the disk."""

    def __init__(self, trace: TierTrace, folder: Path, capacity: float) -> None:
        self.trace, self.room = trace, capacity - trace.inside
        # Two words at least: the count stands in the first and in the last, so that a file of which half was written
        # shows.
        self.words = [max(2, -(-int(tensor.nbytes) // WORD)) for tensor in trace.tensors]
        self.files = [os.open(folder / f"{i}", os.O_CREAT | os.O_RDWR) for i in range(len(trace.tensors))]
        self.memory: dict[int, Bytes] = {}
        self.used = self.most = self.read_bytes = self.written_bytes = 0.0
        # One thread each way: files are read and written in the order in which the migration says so.
        self.free, self.ends = Condition(), False
        self.reader, self.writer = ThreadPoolExecutor(1, "read"), ThreadPoolExecutor(1, "write")
        self.coming: dict[int, Future[None]] = {}
        self.going: dict[int, Future[None]] = {}
        self.changes = [0] * len(trace.tensors)
        """How often each was changed."""
        for number, tensor in enumerate(trace.tensors):
            if tensor.carried:
                _write(self.files[number], np.zeros(self.words[number], np.uint64))

    def stop(self) -> None:
        """Whoever waits for room waits no more, and what has not begun does not."""
        with self.free:
            self.ends = True
            self.free.notify_all()
        self.reader.shutdown(cancel_futures=True)
        self.writer.shutdown(cancel_futures=True)

    def close(self) -> None:
        """Once everything that was begun is done."""
        self.reader.shutdown()
        self.writer.shutdown()
        for file in self.files:
            os.close(file)

    def _take(self, number: int) -> Bytes:
        """Memory for a tensor, once there is room."""
        with self.free:
            nbytes = self.trace.tensors[number].nbytes
            self.free.wait_for(lambda: self.ends or self.used + nbytes <= self.room + 1e-6)
            if self.ends:
                raise RunError("the migration was stopped")
            self.used += nbytes
            self.most = max(self.most, self.used)
        return np.zeros(self.words[number], np.uint64)

    def _give(self, number: int) -> None:
        with self.free:
            del self.memory[number]
            self.used -= self.trace.tensors[number].nbytes
            self.free.notify_all()

    def make(self, number: int) -> None:
        """Makes a tensor in memory, as one that was never changed."""
        self.changes[number] = 0
        self.memory[number] = self._take(number)

    def read(self, number: int) -> None:
        """Begins to read it."""
        written = self.going.get(number)

        def work() -> None:
            # What is written is read back only once it is on the disk.
            if written is not None:
                written.result()
            array = self._take(number)
            os.preadv(self.files[number], [array.data], 0)
            self.memory[number] = array
            self.read_bytes += self.trace.tensors[number].nbytes

        self.coming[number] = self.reader.submit(work)

    def leave(self, number: int, *, write: bool) -> None:
        """Begins to give its memory up."""
        arriving = self.coming.pop(number, None)
        if not write and (arriving is None or arriving.done()):
            self._give(number)
            return

        def work() -> None:
            if arriving is not None:
                arriving.result()
            if write:
                _write(self.files[number], self.memory[number])
                self.written_bytes += self.trace.tensors[number].nbytes
            self._give(number)

        self.going[number] = self.writer.submit(work)

    def run(self, row: int) -> None:
        """Waits for the row's tensors, checks and changes them, and is busy for its seconds."""
        for number in self.trace.uses[row]:
            if (arriving := self.coming.pop(number, None)) is not None:
                arriving.result()
            array = self.memory[number]
            if not array[0] == array[-1] == self.changes[number]:
                raise RunError(
                    f"{self.trace.tensors[number].name} was changed {self.changes[number]} times, and what came from "
                    f"the disk {array[0]} and {array[-1]}: the file is damaged, or the migration is"
                )
            if number in self.trace.writes[row]:
                self.changes[number] += 1
                array[0] = array[-1] = self.changes[number]
        _busy(self.trace.seconds[row])
        for number in self.trace.uses[row]:
            if not self.trace.tensors[number].carried and self.trace.rows_of[number][-1] == row:
                self._give(number)


def carry_out(trace: TierTrace, migration: Migration, folder: Path, capacity: float) -> Carried:
    """Carries out all steps of a migration, and says how it went. folder: empty, on the disk that is the slow tier.
    RunError where what was read is not what was written."""
    files = _Files(trace, folder, capacity)
    begun = {row: list(moves) for row, moves in groupby(migration.moves, key=lambda move: move.row)}
    began = 0.0
    try:
        for row in range(STEPS * len(trace.uses)):
            if row == (STEPS - 1) * len(trace.uses):
                began = perf_counter()
            for move in begun.get(row, ()):
                if move.what == "make":
                    files.make(move.tensor)
                elif move.what == "read":
                    files.read(move.tensor)
                else:
                    files.leave(move.tensor, write=move.what == "write")
            files.run(row % len(trace.uses))
        took = perf_counter() - began
    except BaseException:
        files.stop()
        raise
    finally:
        files.close()
    return Carried(
        step_s=took,
        peak_bytes=files.most + trace.inside,
        read_bytes=files.read_bytes,
        written_bytes=files.written_bytes,
    )


def measured_link(folder: Path, nbytes: int = 32 << 20) -> Link:
    """Bytes a second of the disk, as tensors of so many bytes move: the best of four."""
    array, best = np.ones(nbytes // WORD, np.uint64), [float("inf")] * 2
    file = os.open(folder / "probe", os.O_CREAT | os.O_RDWR)
    for _ in range(4):
        began = perf_counter()
        _write(file, array)
        between = perf_counter()
        os.preadv(file, [array.data], 0)
        best = [min(best[0], between - began), min(best[1], perf_counter() - between)]
    os.close(file)
    os.unlink(folder / "probe")
    return Link(read=nbytes / best[1], write=nbytes / best[0])


def _write(file: int, array: Bytes) -> None:
    """Writes an array to the disk and drops it from the system's cache, so that reading it again costs a read."""
    os.pwritev(file, [array.data], 0)
    os.fdatasync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


_MATRIX = np.ones((96, 96), np.float32)


def _busy(seconds: float) -> None:
    until = perf_counter() + seconds
    while perf_counter() < until:
        _MATRIX @ _MATRIX
