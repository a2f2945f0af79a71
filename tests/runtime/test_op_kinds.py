"""Every op kind that is priced has a torch function, or is one that only lowered blocks have."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

from gnomon import ops  # noqa: E402
from gnomon.runtime.ops import ENGINE, FUNCTIONS  # noqa: E402
from gnomon.runtime.optim import MATRIX_RULES  # noqa: E402
from gnomon.software.own import WHOLE_MATRIX_OPTIMIZERS  # noqa: E402

pytestmark = pytest.mark.torch

LOWERED = {"softmax", "matmul", "repeat", "row_stats"}
"""Kinds that attention and norms become where kernels are not fused; the runtime runs the ops before that."""
CAPTURED = {"opaque"}
"""Kinds that run as the ATen ops that were captured (`ops.captured`)."""


def test_every_kind_has_a_torch_function() -> None:
    assert {kind.name for kind in ops.every()} == {*FUNCTIONS, *ENGINE} | LOWERED | CAPTURED


def test_update_rules_that_look_at_whole_matrices_are_those_of_the_list() -> None:
    assert set(MATRIX_RULES) == set(WHOLE_MATRIX_OPTIMIZERS)
