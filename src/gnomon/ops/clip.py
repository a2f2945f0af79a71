"""`clip`: elements kept between two numbers, as `torch.clamp` does.

Leaves out bounds that are tensors.
"""

from __future__ import annotations

from gnomon.ops.curve import once
from gnomon.ops.op import OpKind, TorchCall
from gnomon.ops.rules import first_dims, per_element, per_element_back, saves_inputs

CLIP = OpKind(
    name="clip",
    signature="x -> x between min and max, of which one may be left out; min, max",
    contracts=False,
    dims=first_dims,
    memory="own",
    saves=saves_inputs,  # the gradient passes where x lies between
    forward=per_element(2),
    backward=per_element_back(2),
    steps="one kernel",
    fused_by="every stack",
    weight_grad="together",
    ungraded=(),
    decay="none",
    price=once(),
    grad_price=once(),
    calibrated="no",
    begins="random",
    weight_sum="apart",
    gradient="computed",
    strategies="plain",
    sums=False,
    together=(),
    does="computes",
    calls=tuple(TorchCall(name, ("input",), ("min", "max")) for name in ("clamp", "clip")),
    documents=False,
    torch="clip:clip",
)

KINDS = (CLIP,)
