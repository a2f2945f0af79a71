"""Which layers stay in memory where a model is larger: `staying(resident_bytes, layers)`, for engine and forecast.

Others are on a disk and read into one of `ROOMS` rooms each time that they run. `streamed(shape, serving)` is what an
iteration reads, and what layers take in memory. Leaves out who reads them (`serve.streamed`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from gnomon.serving.layout import Serving
from gnomon.serving.weights import RankModel

ROOMS = 2
"""One is computed with while the other is read into."""


def staying(resident_bytes: float, layers: Sequence[float]) -> frozenset[int]:
    """Numbers of the layers that stay: as many as there is room for, evenly spread among the others so that the disk
    reads while they compute, and those without matrices. layers: bytes of each."""
    having = [number for number, nbytes in enumerate(layers) if nbytes]
    chosen: list[int] = []
    for count in range(1, len(having) + 1):
        # True at `count` places, evenly spread: those where the running share count/len passes a whole number.
        spread = [n for at, n in enumerate(having) if (at + 1) * count // len(having) > at * count // len(having)]
        if sum(layers[number] for number in spread) > resident_bytes:
            break
        chosen = spread
    return frozenset(chosen) | {number for number, nbytes in enumerate(layers) if not nbytes}


def streamed(shape: RankModel, serving: Serving) -> tuple[float, float]:
    """(bytes that a device reads for an iteration, bytes of its layers in memory). Of several stages, the first's."""
    layers = [b.weight_bytes for b in shape.blocks if not b.is_head and not b.has_table for _ in range(b.count)]
    layers = layers[: ceil(len(layers) / serving.pp)]
    if serving.resident_bytes is None:
        return 0.0, sum(layers)
    stay = staying(serving.resident_bytes, layers)
    others = sorted((nbytes for at, nbytes in enumerate(layers) if at not in stay), reverse=True)
    # Rooms are as large as the largest layers that use them. Where there are no more layers than rooms, each is read
    # once and stays.
    resident = sum(layers[at] for at in stay) + sum(others[:ROOMS])
    return (sum(others) if len(others) > ROOMS else 0.0), resident
