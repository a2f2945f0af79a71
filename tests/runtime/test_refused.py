"""What a plan asks and the runtime does not do is said, before anything runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

from runtime import parity  # noqa: E402

from gnomon.errors import PlanError  # noqa: E402
from gnomon.models.llama import llama  # noqa: E402
from gnomon.models.vit import VitConfig, vit  # noqa: E402
from gnomon.plans import (  # noqa: E402
    Layout,
    LayoutRule,
    Mesh,
    Offload,
    Optimizer,
    Overlap,
    Pass,
    Plan,
    Precision,
    Saved,
    Schedule,
    Split,
    Stage,
)
from gnomon.runtime.mesh.groups import Groups, coordinates, meshes_of  # noqa: E402
from gnomon.runtime.mesh.routes import rows_of  # noqa: E402
from gnomon.runtime.module.apply import apply, check_before, check_plan, dtypes  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan(layout=Layout(rules=(LayoutRule(dim="seq"),))), "layout.rules other than those that keep heads"),
        (Plan(layout=Layout(rules=(LayoutRule(dim="ffn", axes=("cp",)),))), "layout.rules other than those"),
        (
            Plan(mesh=Mesh(dp_shard=2, etp=2), layout=Layout(rules=(LayoutRule(dim="ffn"),))),
            "layout.rules of ffn beside etp",
        ),
        (
            Plan(schedule=Schedule(vocabulary="interlaced"), overlap=Overlap(bucket_bytes=1 << 20)),
            "vocabulary with gradient buckets",
        ),
        (Plan(saved=Saved(preset="full", every=2), optimizer=Optimizer(zero=3)), "every with a row for each layer"),
        (
            Plan(saved=Saved(preset="full", every=2), overlap=Overlap(bucket_bytes=1 << 20)),
            r"every with a row for each layer \(ZeRO 3, gradient buckets\) but for overlap.fused",
        ),
        (Plan(overlap=Overlap(splits=(Split(op="x", dim="seq", parts=2),))), "overlap.splits other than of seq"),
        (
            Plan(
                mesh=Mesh(tp=2),
                layout=Layout(sequence_parallel=True),
                overlap=Overlap(splits=(Split(op="*", dim="seq", parts=4),)),
            ),
            "as many parts as tp ranks",
        ),
        (
            Plan(overlap=Overlap(bucket_bytes=1 << 20), schedule=Schedule(passes=(Pass(name="mario"),))),
            "bucket_bytes, buckets or fused with schedule.passes other than dapple_warmup",
        ),
        (
            Plan(mesh=Mesh(tp=2), optimizer=Optimizer(kind="muon", offload=Offload(), delay=1)),
            r"'muon', which looks at whole matrices, late \(optimizer.delay\)",
        ),
        (Plan(optimizer=Optimizer(delay=1)), "delay"),
        (Plan(mesh=Mesh(dp_replicate=2), placement=(1, 2)), "placement that leaves devices out"),
    ],
)
def test_decisions_that_are_not_carried_out(plan: Plan, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_plan(plan)


@pytest.mark.parametrize(
    ("precision", "message"),
    [
        (replace(parity.FP32, param="fp16", compute="fp32"), "param fp16"),
        (replace(parity.FP32, compute="bf16"), "compute"),
        (replace(parity.FP32, reduce="bf16"), "reduce bf16"),
    ],
)
def test_dtypes_that_would_have_to_be_mixed(precision: Precision, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        dtypes(Plan(precision=precision))


def test_usual_mixed_precision_has_a_master_copy() -> None:
    result = dtypes(Plan())
    assert (result.param, result.grad, result.master) == (torch.bfloat16, torch.float32, torch.float32)
    assert dtypes(Plan(precision=parity.FP32)).master is None


def test_unlike_meshes_where_only_equal_ones_run() -> None:
    unlike = Plan(stages=(Stage(calls=("embed",)), Stage(calls=("layers", "head"), mesh=Mesh(tp=2))))
    assert [mesh.tp for mesh in meshes_of(unlike)] == [1, 2]
    with pytest.raises(PlanError, match="tied table"):
        meshes_of(unlike, tied=(0, 1))
    with pytest.raises(PlanError, match="under sequence_parallel"):
        meshes_of(replace(unlike, layout=Layout(sequence_parallel=True)))
    with pytest.raises(PlanError, match="the same cp"):
        meshes_of(Plan(stages=(Stage(calls=("embed",)), Stage(calls=("layers", "head"), mesh=Mesh(cp=2)))))
    both = (Stage(calls=("embed",), mesh=Mesh(tp=2), devices="0:2"), Stage(calls=("head",), devices="2"))
    again = Stage(calls=("layers",), mesh=Mesh(dp_replicate=2), devices="0:2")
    with pytest.raises(PlanError, match="on the same ranks the same axes"):
        meshes_of(Plan(stages=(both[0], again, both[1])))


def test_what_one_stage_does_not_divide_is_refused_by_the_ranks_of_all() -> None:
    """A rank of another stage began to train, and waited for those that had refused."""
    unlike = Plan(stages=(Stage(calls=("embed", "layers")), Stage(calls=("head",), mesh=Mesh(tp=3))))
    graph = llama(replace(parity.CONFIG, tied=False))
    with pytest.raises(PlanError, match="tp = 3 does not divide") as before:
        check_before(graph, unlike)
    for rank in range(4):
        groups = Groups(mesh=unlike.stage_mesh(int(rank > 0)), here=coordinates(unlike, rank), by_comm={})
        with pytest.raises(PlanError) as error:
            apply(graph, unlike, groups)
        assert str(error.value) == str(before.value)


def test_ranks_of_a_stage_in_another_order_than_its_processes_have() -> None:
    stage = Stage(calls=("*",), mesh=Mesh(tp=2), devices="1,0")
    with pytest.raises(PlanError, match="stage 0 lists its ranks as 1,0.*ascending order.*placement"):
        meshes_of(Plan(stages=(stage,)))


def test_an_action_that_begins_inside_a_run_of_recomputed_layers() -> None:
    plan = Plan(
        optimizer=Optimizer(zero=3, offload_parameters=True),
        overlap=Overlap(fused=(1, 1, 2, 2, 1)),
        saved=Saved(preset="full", every=2),
    )
    groups = Groups(
        mesh=plan.stage_mesh(0), here=coordinates(plan, 0), by_comm=dict.fromkeys(("cp", "tp", "ep", "etp"))
    )
    with pytest.raises(PlanError, match=r"recomputes layers\[1\] from what layers\[0\]"):
        apply(llama(parity.CONFIG), plan, groups)


def test_sequences_are_not_cut() -> None:
    plan = Plan(stages=(Stage(calls=("*",), mesh=Mesh(dp_replicate=2), shares=(3, 1)),))
    assert rows_of(plan, 0, 8) == ((0, 6), (6, 2))
    with pytest.raises(PlanError, match="whole sequences"):
        rows_of(plan, 0, 6)


def test_coordinates_of_each_rank() -> None:
    """pp outermost, tp innermost: ranks 0 to 3 are stage 0, and 4 to 7 stage 1."""
    plan = Plan(mesh=Mesh(pp=2, dp_shard=2, tp=2))
    actual = [coordinates(plan, rank) for rank in range(8)]
    assert [(c.pipeline_rank, c.shard, c.along["tp"]) for c in actual] == [
        (0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1),
    ]  # fmt: skip
    assert [c.position for c in actual] == [0, 1, 2, 3] * 2


@pytest.mark.parametrize(("image_size", "first"), [(12, "9 patches"), (16, "17 seq")])
def test_patches_that_tp_does_not_share_out_are_refused_before_the_first_step(image_size: int, first: str) -> None:
    """A class token is beside them, so that one of the two numbers is odd."""
    config = VitConfig(
        name="vit", num_layers=2, hidden_size=16, num_heads=4, ffn_size=24, image_size=image_size, patch_size=4,
        num_classes=6,
    )  # fmt: skip
    plan = Plan(mesh=Mesh(tp=2), layout=Layout(sequence_parallel=True))
    groups = Groups(mesh=plan.stage_mesh(0), here=coordinates(plan, 0), by_comm={})
    with pytest.raises(PlanError, match=f"vit has {first}, which 2 ranks do not share out"):
        apply(vit(config), plan, groups)
