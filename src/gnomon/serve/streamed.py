"""Matrices of layers that stay on a disk and are read as they are needed, each while the layers before it compute.

`Streams(resident_bytes, layers, …)` is told of the layers as they are packed (`layer`, `keep`): as many as
`resident_bytes` hold stay in memory, evenly spread, so that the disk reads while those compute; of the others a file is
written, and their tensors lie in one of two rooms, into which a thread reads them in turn. An iteration says `take(n)`
before a layer and `release(n)` after it. A model whose layers are larger than memory runs so, at the speed of the disk:
an iteration of many tokens costs as much reading as one of few. Leaves out tables, heads, norms and biases, which stay.
Source: Aminabadi et al. 2022 (DeepSpeed-Inference, ZeRO-Inference: layers streamed through a buffer, fetched ahead).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gnomon.compiler.kernels.stored import AnyPacked
from gnomon.errors import RunError
from gnomon.runtime.parameters.files import unnamed_file
from gnomon.serving.streaming import ROOMS, staying
from gnomon.units import show_bytes

ALIGNED = 4096
"""Bytes at multiples of which tensors begin, in a room and in the file."""
PIECE = 1 << 24
"""Bytes of a read."""
SPARE = 1 << 22
"""Bytes of a room beyond what a layer is thought to have; they take no memory until they are written to."""


@dataclass(slots=True)
class _StreamedLayer:
    """One that is on the disk."""

    begin: int
    """Its first byte in the file."""
    nbytes: int = 0


class Streams:
    """The layers of a model, in the order in which they run."""

    def __init__(self, resident_bytes: int, layers: Sequence[int], shared: frozenset[str], folder: Path) -> None:
        """Takes resident_bytes of layers' matrices in memory apart from the two rooms, layers (about how many bytes the
        matrices of each have, 0 for one that stays), shared, the parameters of several layers, which stay, and the
        folder where the file is."""
        self.shared, self.folder = shared, folder
        self.stay = staying(resident_bytes, layers)
        self.layers: dict[int, _StreamedLayer] = {}
        """Those that are on the disk, by their numbers in the model."""
        self.order: list[int] = []
        self.num_bytes = 0
        """Bytes of those that stay."""
        self._most = 2 * max(layers, default=0) + SPARE
        self._rooms: list[NDArray[np.uint8]] = []
        self._file = unnamed_file(folder, 0)
        self._end, self._now = 0, -1
        self._thread = ThreadPoolExecutor(1, "weights")
        self._coming: list[tuple[int, Future[None]] | None] = [None] * ROOMS

    def __del__(self) -> None:
        os.close(self._file)

    @property
    def streamed_bytes(self) -> int:
        """Counts the bytes that an iteration reads; none where the rooms hold all."""
        return sum(layer.nbytes for layer in self.layers.values()) if len(self.order) > ROOMS else 0

    # --- packing

    def layer(self, number: int) -> None:
        """What is kept from now on is of this one. number: -1 for what stays."""
        self._now = number

    def keep(self, name: str, packed: AnyPacked) -> AnyPacked:
        """The same matrix, in memory or on the disk. name: of its parameters. RunError for a disk that is full."""
        if self._now < 0 or self._now in self.stay or not self.shared.isdisjoint(name.split()):
            self.num_bytes += packed.bytes
            return packed
        if self._now not in self.layers:
            self.layers[self._now] = _StreamedLayer(self._end)
            self.order.append(self._now)
        # Layer k of the order lies in room k % ROOMS, as `take` and `release` count too.
        layer, room = self.layers[self._now], self._room((len(self.order) - 1) % ROOMS)
        changed: dict[str, Any] = {}
        for field in fields(packed):
            tensor = getattr(packed, field.name)
            if not isinstance(tensor, Tensor):
                continue
            flat = tensor.contiguous().flatten().view(torch.uint8)
            at = layer.nbytes
            assert at + flat.nbytes <= len(room), "a layer is within its bound"
            self._write(flat, layer.begin + at)
            changed[field.name] = torch.from_numpy(room[at : at + flat.nbytes]).view(tensor.dtype).view(tensor.shape)
            layer.nbytes += -(-flat.nbytes // ALIGNED) * ALIGNED
        self._end = layer.begin + layer.nbytes
        os.ftruncate(self._file, self._end)
        return replace(packed, **changed)

    def _room(self, at: int) -> NDArray[np.uint8]:
        while len(self._rooms) <= at:  # takes memory as it is written to
            self._rooms.append(np.zeros(self._most + ALIGNED, np.uint8))
        room = self._rooms[at]
        begin = -room.ctypes.data % ALIGNED
        return room[begin : begin + self._most]

    def _write(self, flat: Tensor, at: int) -> None:
        view, done = memoryview(flat.numpy().data), 0
        try:
            while done < len(view):
                done += os.pwrite(self._file, view[done:], at + done)
        except OSError as error:
            raise RunError(
                f"cannot put {show_bytes(at + len(view))} of weights into a file in {str(self.folder)!r}: "
                f"{error.strerror}; make room there, or set GNOMON_DISK to a folder on another disk"
            ) from error

    # --- running

    def start(self) -> None:
        """Reads the first layers: all are packed."""
        for at, number in enumerate(self.order[:ROOMS]):
            self._begin(at, number)

    def take(self, number: int) -> None:
        """Waits until a layer's matrices are in their room."""
        if number not in self.layers:
            return
        at = self.order.index(number) % ROOMS
        coming = self._coming[at]
        if coming is None or coming[0] != number:  # an iteration before it has failed half-way
            coming = self._begin(at, number)
        coming[1].result()

    def release(self, number: int) -> None:
        """Its room is read into for the layer that uses it next, of this iteration or the one after."""
        if number not in self.layers:
            return
        place = self.order.index(number)
        # The next layer of the same room, after the last one the first of the next iteration. A layer that has its room
        # to itself is not read again.
        following = place + ROOMS if place + ROOMS < len(self.order) else place % ROOMS
        if following != place:
            self._begin(place % ROOMS, self.order[following])

    def _begin(self, at: int, number: int) -> tuple[int, Future[None]]:
        future = self._coming[at] = number, self._thread.submit(self._read, at, self.layers[number])
        return future

    def _read(self, at: int, layer: _StreamedLayer) -> None:
        view, done = memoryview(self._room(at)[: layer.nbytes].data), 0
        while done < layer.nbytes:
            count = os.preadv(self._file, [view[done : done + PIECE]], layer.begin + done)
            if not count:
                raise RunError("the file with streamed weights is shorter than it was written")
            done += count
