"""Which pipeline ranks add up the gradients of parameters that several stages hold."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

from gnomon.errors import PlanError  # noqa: E402
from gnomon.plans import Mesh, Plan  # noqa: E402
from gnomon.runtime.mesh.groups import tied_holders  # noqa: E402

pytestmark = pytest.mark.torch
PLAN = Plan(mesh=Mesh(pp=4))


def test_the_set_that_lies_on_several_pipeline_ranks_is_joined_whichever_comes_first() -> None:
    assert tied_holders(PLAN, ()) == tied_holders(PLAN, ((1, 1),)) == ()
    assert tied_holders(PLAN, ((0, 3), (0, 3))) == ((0,), (3,))
    assert tied_holders(PLAN, ((2, 2), (0, 3))) == ((0,), (3,))


def test_sets_on_unlike_pipeline_ranks_are_refused() -> None:
    with pytest.raises(PlanError, match=r"stages \[0, 3\] and \[1, 2\] share other parameters each"):
        tied_holders(PLAN, ((0, 3), (1, 2)))
