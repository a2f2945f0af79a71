"""Layout rules that would be computed wrongly are refused; those that run are compared with the plain model by
`test_axes`."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

from runtime.axes import LLAMA, MIXTRAL, TIED, whole  # noqa: E402

from gnomon.errors import PlanError  # noqa: E402
from gnomon.plans import Layout, LayoutRule, Mesh, Plan  # noqa: E402
from gnomon.runtime.mesh.groups import Groups, coordinates  # noqa: E402
from gnomon.runtime.module.apply import apply, check_shared, sharded_blocks  # noqa: E402
from gnomon.runtime.module.blocks import BlockRun  # noqa: E402
from gnomon.runtime.ops.site import Axis  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (whole("kv_heads"), "give heads and kv_heads the same rule"),
        (whole("heads", "kv_heads", sequence_parallel=True), "use layout.sequence_parallel = false"),
    ],
)
def test_attention_that_the_runtime_does_not_divide_so(layout: Layout, message: str) -> None:
    plan, tp = Plan(mesh=Mesh(tp=2), layout=layout), Axis(ranks=2, index=0)
    blocks = sharded_blocks(LLAMA, plan, plan.mesh)
    with pytest.raises(PlanError, match=message):
        BlockRun(blocks["layers"], {"tp": tp})


def test_a_table_has_one_layout_wherever_it_is_read() -> None:
    one = Plan(mesh=Mesh(tp=2), layout=Layout(rules=(LayoutRule(dim="vocab", region="head"),)))
    with pytest.raises(PlanError, match=r"embed_tokens.weight out in embed as vocab/tp and in head as replicated"):
        check_shared(TIED, sharded_blocks(TIED, one, one.mesh))
    both = Plan(mesh=Mesh(tp=2), layout=whole("vocab"))
    check_shared(TIED, sharded_blocks(TIED, both, both.mesh))


def test_ffn_of_routed_experts_does_not_lie_over_tp() -> None:
    plan = Plan(layout=Layout(rules=(LayoutRule(dim="ffn", axes=("tp",)),)))
    groups = Groups(
        mesh=plan.stage_mesh(0), here=coordinates(plan, 0), by_comm=dict.fromkeys(("cp", "tp", "ep", "etp"))
    )
    with pytest.raises(PlanError, match="that of routed experts lies over etp"):
        apply(MIXTRAL, plan, groups)
