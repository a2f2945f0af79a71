"""`opaque`: what no other kind says, as the ATen ops of one call that were captured.

What it keeps, costs and can be divided along was found when it was captured (`Captured`). Leaves out views of captured
models (`views`).
"""

from __future__ import annotations

from collections.abc import Collection

from gnomon.ops.op import Op, OpKind, Tensors


def _saves(op: Op, block: Tensors, needs_grad: Collection[str]) -> tuple[str, ...]:
    """What autograd kept."""
    assert op.captured is not None, "checked by Op"
    return op.captured.keeps


OPAQUE = OpKind(
    name="opaque",
    signature="as its ATen ops say",
    contracts=False,
    dims="open",
    memory="own",
    saves=_saves,
    weight_grad="together",
    ungraded=(),
    decay="matrices",
    runs="captured",
)

KINDS = (OPAQUE,)
