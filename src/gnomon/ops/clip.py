"""`clip`: elements kept between two numbers, as `torch.clamp` does.

Leaves out bounds that are tensors.
"""

from __future__ import annotations

from dataclasses import replace

from gnomon.ops.bases import MOVES_BYTES
from gnomon.ops.op import TorchCall
from gnomon.ops.rules import first_dims, per_element, per_element_back, saves_inputs

CLIP = replace(
    MOVES_BYTES,
    name="clip",
    signature="x -> x between min and max, of which one may be left out; min, max",
    dims=first_dims,
    saves=saves_inputs,  # the gradient passes where x lies between
    forward=per_element(2),
    backward=per_element_back(2),
    calls=tuple(
        TorchCall(function=name, operands=("input",), numbers=("min", "max"), axes="alike")
        for name in ("clamp", "clip")
    ),
    zeros="unknown",
    torch="clip:clip",
)

KINDS = (CLIP,)
