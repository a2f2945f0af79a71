"""Every op kind has a torch function, or is one that says why not; a graph with another is refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

import gnomon  # noqa: E402
from gnomon import ops  # noqa: E402
from gnomon.errors import PlanError  # noqa: E402
from gnomon.graph import BF16, BlockBuilder, Call, Dim, Graph, Tensor  # noqa: E402
from gnomon.plans import Layout, Mesh, Pass, Plan, Schedule, Workload  # noqa: E402
from gnomon.runtime import TrainingJob, run  # noqa: E402
from gnomon.runtime.launch.elastic import LOGICAL_WORKERS  # noqa: E402
from gnomon.runtime.launch.run import scheme_of  # noqa: E402
from gnomon.runtime.launch.survivors import SURVIVORS  # noqa: E402
from gnomon.runtime.launch.takeover import TAKEOVER  # noqa: E402
from gnomon.runtime.launch.tickets import PARTIAL_REDUCE  # noqa: E402
from gnomon.runtime.module.blocks import BlockRun  # noqa: E402
from gnomon.runtime.ops import check_runnable, function_of  # noqa: E402
from gnomon.runtime.ops.site import Site  # noqa: E402
from gnomon.runtime.optim.update import MATRIX_RULES  # noqa: E402
from gnomon.sharding import shard_block  # noqa: E402
from gnomon.software.own import WHOLE_MATRIX_OPTIMIZERS  # noqa: E402

pytestmark = pytest.mark.torch

LOWERED = {"softmax", "matmul", "repeat", "row_stats"}
"""Kinds that attention and norms become where kernels are not fused; the runtime runs the ops before that."""
CAPTURED = {"opaque"}
"""Kinds that run as the ATen ops that were captured (`ops.captured`)."""
ENGINE = {"linear", "grouped_linear", "dispatch", "combine"}


def test_every_kind_has_a_torch_function() -> None:
    for kind in ops.every():
        if kind.runs == "function":
            assert callable(function_of(kind.name)), kind.name
    others = {kind.name: kind.runs for kind in ops.every() if kind.runs != "function"}
    said = dict.fromkeys(LOWERED, "lowered") | dict.fromkeys(CAPTURED, "captured") | dict.fromkeys(ENGINE, "engine")
    assert others == said


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("clip", {"min": -0.5, "max": 0.5}),
        ("activation", {"fn": "gelu"}),
        ("activation", {"fn": "relu"}),
        ("activation", {"fn": "silu"}),
        ("activation", {"fn": "tanh"}),
        ("mul", {}),
        ("add", {}),
    ],
)
def test_what_a_kind_keeps_is_what_autograd_keeps(kind: str, values: dict[str, float | str]) -> None:
    width = Dim(name="hidden", size=8)
    b = BlockBuilder("one")
    names = ("a", "b") if kind in ("mul", "add") else ("a",)
    block = b.build(b.op(kind, "y", tuple(b.input(name, width) for name in names), **values))
    tensors = {name: torch.randn(8, requires_grad=True) for name in names}
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.data_ptr()) or x, lambda x: x):
        made = function_of(kind)(Site(op=block.op("y"), block=block), *tensors.values())
    assert isinstance(made, torch.Tensor)
    named = {x.data_ptr(): name for name, x in ({**tensors, "y": made}).items()}
    op = block.op("y")
    assert {named[pointer] for pointer in kept} == set(op.rules.saved(op, block, {"a", "b", "y"}))


def scores() -> Graph:
    """Of a kind that only lowered blocks have."""
    b = BlockBuilder("scores")
    x = b.input("x", Dim(name="batch"), Dim(name="hidden", size=8))
    block = b.build(b.op("softmax", "weights", (x,)))
    call = Call(block="scores", name="scores", inputs=(("x", "x"),))
    return Graph(
        name="g",
        outputs=("scores.weights",),
        inputs=(Tensor(name="x", dims=block.tensor("x").dims),),
        blocks=(block,),
        calls=(call,),
    )


NO_FUNCTION = "scores/weights is of kind 'softmax', which the runtime has no function for"


def test_a_kind_that_only_lowered_blocks_have_is_refused() -> None:
    with pytest.raises(PlanError, match=NO_FUNCTION):
        check_runnable(scores())
    with pytest.raises(PlanError, match="'softmax' has no torch function"):
        function_of("softmax")
    sharded = shard_block(scores().block("scores"), Layout(), Mesh(), {"batch": 1}, BF16)
    with pytest.raises(PlanError, match=NO_FUNCTION):
        BlockRun(sharded, {})


def test_every_launcher_refuses_before_a_process_starts() -> None:
    """Those that go on without the processes they lose, the ones that come and go, and one's own loop."""
    plan, workload = Plan(mesh=Mesh(dp_replicate=2)), Workload(global_batch_size=4, seq_len=8)
    in_memory = TrainingJob(graph=scores(), plan=plan, workload=workload, steps=1, memory_checkpoint_every=1)
    copied = replace(plan, mesh=Mesh(pp=2), schedule=Schedule(passes=(Pass(name="bamboo"),)))
    averaged = replace(plan, schedule=Schedule(passes=(Pass(name="partial_reduce"),)))
    jobs = {
        "stays": replace(in_memory, memory_checkpoint_every=0),
        "survives": in_memory,
        "copies": replace(in_memory, memory_checkpoint_every=0, plan=copied),
        "comes and goes": replace(in_memory, memory_checkpoint_every=0, logical_workers=True),
        "averages": replace(in_memory, memory_checkpoint_every=0, plan=averaged),
    }
    schemes = dict(zip(jobs, (None, SURVIVORS, TAKEOVER, LOGICAL_WORKERS, PARTIAL_REDUCE), strict=True))
    for name, job in jobs.items():
        assert scheme_of(job) is schemes[name]
        with pytest.raises(PlanError, match=NO_FUNCTION):
            run(job)
            raise AssertionError(name)
    with pytest.raises(PlanError, match=NO_FUNCTION):  # and not that it wants two processes
        gnomon.prepare(scores(), plan, workload=workload)


def test_update_rules_that_look_at_whole_matrices_are_those_of_the_list() -> None:
    assert set(MATRIX_RULES) == set(WHOLE_MATRIX_OPTIMIZERS)
