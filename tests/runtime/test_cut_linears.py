"""Which linears are cut beside their collective, as `overlap.splits` says."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

from runtime.parity import CONFIG, SP  # noqa: E402

from gnomon.errors import PlanError  # noqa: E402
from gnomon.graph import attrs  # noqa: E402
from gnomon.models.llama import llama  # noqa: E402
from gnomon.plans import Layout, Mesh, Overlap, Plan, Split  # noqa: E402
from gnomon.runtime.module.apply import check_splits, sharded_blocks  # noqa: E402
from gnomon.runtime.module.blocks import BlockRun  # noqa: E402
from gnomon.runtime.ops.site import Axis  # noqa: E402

pytestmark = pytest.mark.torch

GRAPH = llama(CONFIG)


def runs(plan: Plan) -> dict[str, BlockRun]:
    blocks, tp = sharded_blocks(GRAPH, plan, plan.mesh), Axis(ranks=2, index=0)
    return {name: BlockRun(block, {"tp": tp}, splits=plan.overlap.splits) for name, block in blocks.items()}


def split(op: str, layout: Layout = SP) -> Plan:
    return Plan(mesh=Mesh(tp=2), layout=layout, overlap=Overlap(splits=(Split(op=op, dim="seq", parts=2),)))


def test_linears_that_read_the_same_tokens_are_cut_together() -> None:
    cuts = {path: cut.together for run in runs(split("*")).values() for path, cut in run.cuts.items()}
    q, k, v = (f"self_attn.{name}_proj" for name in "qkv")
    gate, up = "mlp.gate_proj", "mlp.up_proj"
    assert cuts == {
        q: (q, k, v), k: (q, k, v), v: (q, k, v), gate: (gate, up), up: (gate, up), "lm_head": ("lm_head",),
        "self_attn.o_proj": (), "mlp.down_proj": (),
    }  # fmt: skip


def test_a_pattern_cuts_what_it_names() -> None:
    plan = split("*down_proj")
    assert {path for run in runs(plan).values() for path in run.cuts} == {"mlp.down_proj"}
    check_splits(plan, runs(plan))


def test_tokens_that_another_op_reads_too_are_gathered_whole() -> None:
    assert not any(run.cuts for run in runs(split("*gate_proj")).values())


@pytest.mark.parametrize(
    ("plan", "known"),
    [
        (split("*gate_proj"), "scattered: lm_head, mlp.down_proj, mlp.gate_proj, mlp.up_proj, self_attn"),
        (split("*norm"), "scattered: lm_head, mlp.down_proj"),
        (split("*", Layout()), "sequence parallelism over tp > 1 makes them"),
    ],
)
def test_a_split_that_cuts_nothing_is_refused(plan: Plan, known: str) -> None:
    with pytest.raises(PlanError, match=f"overlap.splits of .* cuts nothing: what can be cut are linears.*{known}"):
        check_splits(plan, runs(plan))


def test_products_that_the_engine_does_not_run_are_not_cut() -> None:
    # an N:M linear multiplies too, but by a function of its own: cut, it would be multiplied by its whole weight
    block = GRAPH.block("layers")
    ops = [
        replace(op, kind="nm_linear", attrs=attrs(n=2, m=4)) if op.path == "mlp.down_proj" else op for op in block.ops
    ]
    graph = replace(
        GRAPH, blocks=tuple(replace(b, ops=tuple(ops)) if b.name == block.name else b for b in GRAPH.blocks)
    )
    plan = split("*down_proj")
    blocks = sharded_blocks(graph, plan, plan.mesh)
    made = [BlockRun(one, {"tp": Axis(ranks=2)}, splits=plan.overlap.splits) for one in blocks.values()]
    assert not any(run.cuts for run in made)
