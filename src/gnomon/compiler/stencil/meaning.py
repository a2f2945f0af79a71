"""What a stage's instructions mean, by torch's own operations: how a described device is played where there is none.

Leaves out places: whoever plays says what a read finds.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gnomon.compiler.stencil.stages import Factor, Read, Stage
from gnomon.compiler.tiles.body import HELD, UnfitError

KINDS = {"F": torch.float32, "D": torch.float64, "L": torch.int64, "B": torch.bool}
MEANS: dict[str, Callable[..., Tensor]] = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "lt", "gt", "le", "ge", "eq", "ne", "neg")},
    "div": operator.truediv,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "not": operator.invert,
    "select": torch.where,
    # Rounded twice here, once by a device with fused products.
    "fused": lambda a, b, c: a * b + c,
    "nearest": torch.round,
    **{
        name: getattr(torch, name)
        for name in "maximum minimum abs exp log sqrt erf sin cos floor ceil trunc sigmoid tanh expm1 log1p pow".split()
    },
    **{name: lambda x, dtype=dtype: x.to(dtype).to(x.dtype) for dtype, name in HELD.items()},
}


def value_of(stage: Stage, read: Callable[[Read], Tensor], factor: Callable[[Factor], Any]) -> Tensor:
    """The stage's value over some region. read: a field over that region, at a shift. UnfitError for an operation that
    has no meaning here."""
    values: dict[int, Tensor] = {}
    for i in stage.values:
        ins = stage.body.code[i]
        if ins.op == "load":
            source = stage.body.inputs[ins.attr].node
            values[i] = (read(source) if isinstance(source, Read) else torch.as_tensor(factor(source))).to(
                KINDS[ins.kind]
            )
        elif ins.op == "const":
            plain = {"True": 1.0, "False": 0.0}.get(ins.attr)
            values[i] = torch.tensor(float(ins.attr) if plain is None else plain).to(KINDS[ins.kind])
        elif ins.op == "cast":
            values[i] = values[ins.args[0]].to(KINDS[ins.kind])
        elif ins.op in MEANS:
            values[i] = MEANS[ins.op](*(values[a] for a in ins.args))
        else:
            raise UnfitError(f"{ins.op} on a device that is played")
    return values[stage.value]
