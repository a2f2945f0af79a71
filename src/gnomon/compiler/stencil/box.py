"""Stages that are products of a whole box of neighbours with given weights, and when a matrix unit does them faster.

`box_of(stage)` recognises one; `pays(box, stage, device)` compares the device's vectors with its matrices. Outputs
that lie beside each other are a row of a product: their windows overlap in all but one column, so the product's depth
is (taps across + outputs - 1) x taps down, of which taps across / (taps across + outputs - 1) is work that counts.
Source: ConvStencil (PPoPP 2024), whose two matrices are the halves of that window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from gnomon.compiler.stencil.stages import Factor, Read, Stage
from gnomon.compiler.tiles.device import DeviceDescription

GROUP = 16
"""Outputs beside each other that are one row of the product."""
LEAST = 16
"""Taps from which on a product may pay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    read: Read
    """At the first tap."""
    weight: Any
    down: int
    across: int
    group: int = GROUP

    @property
    def useful(self) -> float:
        """The share of the product's work that counts."""
        wide = self.across + self.group - 1
        depth = 1 << (self.down * wide - 1).bit_length()
        return self.down * self.across / depth


def box_of(stage: Stage) -> Box | None:
    """A stage that adds products of one field's neighbours, in a box along the last two dims, with one weight's
    numbers in their order, and nothing else; None where it is something else."""
    code = stage.body.code
    if stage.box is not None:
        return None
    taps: dict[int, Read] = {}
    weights = set()
    for i in stage.values:
        ins = code[i]
        if ins.op in ("fused", "mul"):
            point, by = (stage.body.inputs[code[a].attr].node if code[a].op == "load" else None for a in ins.args[:2])
            if not isinstance(point, Read) or not isinstance(by, Factor) or by.by_channel:
                return None
            taps[by.element] = point
            weights.add(by.weight)
        elif ins.op not in ("load", "bf16"):
            return None
    # Each number of one weight, exactly once.
    if len(weights) != 1 or not taps or sorted(taps) != list(range(len(taps))):
        return None
    first = taps[0]
    if len({(tap.field, tap.outside, tap.channel) for tap in taps.values()}) != 1 or len(first.shift) < 2:
        return None
    across = 1
    # As long as numbers of the weight are read with the first row of the window.
    while across in taps and taps[across].shift[-2] == first.shift[-2]:
        across += 1
    down = len(taps) // across
    for element, tap in taps.items():
        row, column = divmod(element, across)
        if tap.shift != (*first.shift[:-2], first.shift[-2] + row, first.shift[-1] + column) or row >= down:
            return None
    return Box(read=first, weight=next(iter(weights)), down=down, across=across)


def pays(box: Box, stage: Stage, device: DeviceDescription) -> bool:
    """Whether the device's matrices do a box faster than its vectors, in the stage's own type."""
    matrices = device.matrices
    taps = box.down * box.across
    names = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}
    if matrices is None or taps < LEAST or matrices.dtype != names[stage.dtype]:
        return False
    by_vectors = taps / (device.vectors.lanes * device.vectors.rate)
    by_matrices = taps / box.useful / matrices.rate
    return by_matrices < by_vectors
