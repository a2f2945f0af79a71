"""Calibration of the disk on which parameters may wait: seconds of reading and writing files, past every cache.

`Disk` is visited in every round by the first process alone: a node's processes share its disks. Files are those of
`parameters.files`, so a figure holds what the runtime does: read into new memory; changed, written and let go.
"""

from __future__ import annotations

from time import perf_counter

import torch

from gnomon.errors import RunError
from gnomon.hardware import Axis
from gnomon.runtime.parameters.files import ParameterFile, disk_folder

BYTES = (1 << 20, 1 << 24)
"""About a layer of a small model, and more."""
REPEATS = 3
"""In a round."""


class Disk:
    """Seconds by size, of reading and of writing."""

    def __init__(self, *, fine: bool) -> None:
        self.axis = Axis(name="bytes", sizes=BYTES if fine else BYTES[:1])
        self.read: list[list[float]] = [[] for _ in self.axis.sizes]
        self.write: list[list[float]] = [[] for _ in self.axis.sizes]

    def round(self) -> None:
        """One visit of every size. Nothing where no file can be made: then no disk is priced."""
        for at, size in enumerate(self.axis.sizes):
            value = torch.full((size // 4,), 0.5)
            try:
                file = ParameterFile(value, disk_folder(), pinned=False)
            except RunError:
                return
            for _ in range(REPEATS):
                begin = perf_counter()
                file.read()
                self.read[at].append(perf_counter() - begin)
                file.tensor.sum()  # its pages are in memory
                begin = perf_counter()
                file.tensor.copy_(value)
                file.write_back()
                self.write[at].append(perf_counter() - begin)
