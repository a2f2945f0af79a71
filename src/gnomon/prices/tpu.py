"""What a TPU's matrix units, and chips that are two devices, make of a matmul.

A unit holds a square of `lanes_of` weights a side, and sides that do not fill it cost as much. A chip of TPU 7x is two
devices to a program: each multiplies half of the rows by all of the weights, which lie in the memory of both. Leaves
out the padding of rows to 8, and of activations in memory to 128 lanes.
Source: Google Cloud documentation, TPU system architecture and the pages of v6e and TPU7x, read 2026-11-23.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from gnomon.errors import UnpricedError
from gnomon.hardware.types import Device
from gnomon.prices.curves import Size


@dataclass(frozen=True, slots=True)
class UnitShape:
    """m×k by k×n, `batch` times."""

    m: Size
    """Rows of the first matrix."""
    n: Size
    """Columns of the second."""
    k: Size
    """Columns of the first, rows of the second."""
    batch: Size = 1
    """Such products."""


def lanes_of(device: Device) -> int:
    """Side of a TPU's matrix unit."""
    side = device.generation.matrix_unit
    if side is None:
        raise UnpricedError(f"{device.name} is of generation {device.arch!r}, whose matrix unit is not known")
    return side


def devices_of(device: Device) -> int:
    """Devices that hold a whole copy of what a chip gathers."""
    return device.generation.devices_a_chip


def apart(shape: UnitShape, device: Device) -> UnitShape:
    """A matmul with a weight as the devices of a chip run it: each with its part of the rows."""
    parts = devices_of(device)
    return shape if parts == 1 else replace(shape, m=np.maximum(shape.m / parts, 1), batch=shape.batch * parts)


def filled(m: Size, n: Size, k: Size, device: Device, *, columns_held: bool) -> tuple[Size, Size, Size]:
    """Sizes of a matmul filled up to the matrix unit: what is summed over, and the columns, which the unit holds; or
    the rows, if a compiler may choose and they cost less."""
    side = lanes_of(device)
    rows, columns, depth = (_up(size, side) for size in (m, n, k))
    if columns_held:
        return m, columns, depth
    few = rows / np.asarray(m) < columns / np.asarray(n)
    return np.where(few, rows, m), np.where(few, n, columns), depth


def _up(size: Size, side: int) -> Size:
    return np.ceil(np.asarray(size, np.float64) / side) * side
