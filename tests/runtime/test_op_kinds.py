"""Every op kind that is priced has a torch function, or is one that only lowered blocks have."""

from __future__ import annotations

from gnomon.graph import OP_KINDS
from gnomon.runtime.ops import ENGINE, FUNCTIONS

LOWERED = {"softmax", "matmul", "repeat", "row_stats"}
"""Kinds that attention and norms become where kernels are not fused; the runtime runs the ops before that."""
REFUSED = {"state_space"}
"""Kinds that the runtime refuses by name."""


def test_every_kind_has_a_torch_function() -> None:
    assert set(OP_KINDS) == {*FUNCTIONS, *ENGINE} | LOWERED | REFUSED
