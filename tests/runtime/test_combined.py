"""Decisions of a plan together: exact beside the plain model, and the same program as predicted.

On one and two processes: activations, gradients, loss, norm and parameters over three steps in fp64; in fp32 the order
of actions, the bytes of reductions and gathers, FLOPs of products and the fullest moment.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cache

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

from runtime import accounted, traced  # noqa: E402
from runtime.parity import CONFIG, FP32, FP64, SETTINGS, SP, TWICE, cut, schedule  # noqa: E402
from runtime.ranks import launch  # noqa: E402

import gnomon  # noqa: E402
from gnomon.graph import Graph  # noqa: E402
from gnomon.models.llama import llama  # noqa: E402
from gnomon.plans import Layout, LayoutRule, Mesh, Offload, Optimizer, Overlap, Plan, Saved, SavedRule, Workload  # noqa: E402
from gnomon.prediction import Prediction  # noqa: E402
from gnomon.runtime import Executor  # noqa: E402
from gnomon.runtime.checks.parity import ParityResult, Small, compare  # noqa: E402
from gnomon.software import stack  # noqa: E402

pytestmark = pytest.mark.torch

ONE_F = schedule("one_f_one_b", 2)
PAIRS = Overlap(buckets=(2, 2, 1))
"""Layers of each bucket; embedding and head are counted."""
SHARDED = Plan(mesh=Mesh(dp_shard=2), schedule=ONE_F, optimizer=Optimizer(zero=3))
COPIES = Plan(mesh=Mesh(dp_replicate=2), schedule=ONE_F)
MLP = ("mlp.*",)
PLANS: dict[str, Plan] = {
    "zero 3, buckets": replace(SHARDED, overlap=PAIRS),
    "zero 3, fused in buckets, split backward": replace(
        SHARDED, schedule=schedule("zero_bubble_h1"), overlap=Overlap(fused=(1, 2, 2), buckets=(3, 2))
    ),
    "adafactor on the host, zero 1": Plan(
        mesh=Mesh(dp_shard=2), schedule=ONE_F, optimizer=Optimizer(kind="adafactor", zero=1, offload=Offload())
    ),
    "muon on the host, zero 3, buckets": replace(
        SHARDED, overlap=PAIRS, optimizer=Optimizer(kind="muon", zero=3, offload=Offload(tiles=2))
    ),
    "muon on the host, tp": Plan(
        mesh=Mesh(tp=2), schedule=ONE_F, optimizer=Optimizer(kind="muon", offload=Offload(fraction=0.5))
    ),
    "fused, 2p warm-up": Plan(
        mesh=Mesh(pp=2), schedule=schedule("one_f_one_b", 4, passes=(TWICE,)), overlap=Overlap(fused=(2, 1, 2))
    ),
    "buckets, part of the update on the host": Plan(
        mesh=Mesh(dp_replicate=2), schedule=ONE_F, overlap=PAIRS, optimizer=Optimizer(offload=Offload(fraction=0.5))
    ),
    "zero 3, buckets, part of the update on the host": replace(
        SHARDED, overlap=PAIRS, optimizer=Optimizer(zero=3, offload=Offload(fraction=0.5), clip=False)
    ),
    "selective, one layer by tensors": Plan(
        mesh=Mesh(pp=2),
        schedule=ONE_F,
        saved=Saved(preset="selective", rules=(SavedRule(calls="layers[1:2]", tensors=MLP, action="recompute"),)),
    ),
    "runs of two, one layer by tensors": replace(
        COPIES,
        saved=Saved(preset="full", every=2, rules=(SavedRule(calls="layers[2:3]", tensors=MLP, action="keep"),)),
    ),
    "zero 3, fused, runs of two": replace(
        SHARDED, overlap=Overlap(fused=(1, 3, 1)), saved=Saved(preset="full", every=2)
    ),
    "cut linears, one layer by tensors": Plan(
        mesh=Mesh(tp=2),
        schedule=ONE_F,
        layout=SP,
        overlap=cut(2),
        saved=Saved(
            rules=(
                SavedRule(calls="layers[1:2]", tensors=("self_attn.*",), action="recompute"),
                SavedRule(calls="layers[2:3]", tensors=("mlp.gate*",), action="recompute"),
            )
        ),
    ),
    "whole heads and table, divided ffn and head": Plan(
        mesh=Mesh(tp=2),
        schedule=ONE_F,
        layout=Layout(
            vocab_parallel=False,
            rules=(
                *(LayoutRule(dim=dim) for dim in ("heads", "kv_heads", "ffn")),
                LayoutRule(dim="ffn", axes=("tp",), region="layers"),
                LayoutRule(dim="vocab", axes=("tp",), region="head"),
            ),
        ),
    ),
}
TIED = ("zero 3, fused in buckets, split backward",)
"""Plans that are tried with the embedding as head."""
TRACED = [name for name, plan in PLANS.items() if plan.mesh.tp == 1]
"""Tensor parallelism has collectives inside actions (`test_same_program`)."""
ELEMENTWISE = [name for name, plan in PLANS.items() if plan.optimizer.kind == "adamw"]
"""Muon's own products are in no action's FLOPs, and what an update on the host makes on its way is in a processor's
memory too. Adafactor adds up single numbers, as norms are."""


def small(name: str) -> Small:
    graph = llama(replace(CONFIG, num_layers=3, tied=name in TIED))
    plan = replace(PLANS[name], precision=FP64)
    return Small(graph=graph, plan=plan, workload=Workload(global_batch_size=8, seq_len=6))


def wide() -> Graph:
    return llama(accounted.CONFIG)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """Of one rank."""

    compared: ParityResult
    flops: int
    most: int
    """Bytes at the fullest moment."""
    calls: list[traced.Call]
    actions: list[str]
    rows: list[str]


def run_all(ranks: int) -> dict[str, Ran]:
    return {name: _run(name) for name, plan in PLANS.items() if plan.world_size == ranks}


def _run(name: str) -> Ran:
    compared = compare(small(name))
    executor = Executor(wide(), replace(PLANS[name], precision=FP32), accounted.WORKLOAD, settings=SETTINGS)
    trace, ids = traced.Trace(), torch.arange(8)[:, None].repeat(1, 65)
    if name in TRACED:
        with traced.watching(executor, ids) as trace:
            executor.step(ids)
    else:
        executor.step(ids)
    rows = traced.expected_actions(executor) if name in TRACED else []
    executor.synchronise()
    with accounted.Products() as products:
        most = accounted.fullest_moment(executor)
    executor.leave()
    return Ran(compared=compared, flops=products.flops, most=most, calls=trace.calls, actions=trace.actions, rows=rows)


@cache
def ran(ranks: int) -> dict[int, dict[str, Ran]]:
    return launch(run_all, ranks, ranks)


def results(name: str) -> dict[int, Ran]:
    return {rank: made[name] for rank, made in ran(PLANS[name].world_size).items()}


@cache
def predicted(name: str) -> Prediction:
    plan = replace(PLANS[name], precision=FP32)
    cluster = f"1x{plan.world_size}xa100-sxm-80gb"
    return gnomon.predict(wide(), cluster, plan, accounted.WORKLOAD, stack("gnomon"))


@pytest.mark.parametrize("name", PLANS)
def test_it_trains_as_the_plain_model(name: str) -> None:
    for result in results(name).values():
        assert not result.compared.first and result.compared.largest <= 1e-9 and result.compared.tensors > 50


@pytest.mark.parametrize("name", [name for name in TRACED if "adafactor" not in name])
def test_actions_run_in_the_order_of_the_rows(name: str) -> None:
    for result in results(name).values():
        assert result.actions == result.rows and len(result.rows) > 5


KINDS = {
    "UNSHARD": "all_gather",
    "REDUCE_GRAD": "reduce_scatter",
    "AR": "all_reduce",
    "SEND_F": "isend",
    "SEND_B": "isend",
}
"""Row -> what torch is asked for."""


@pytest.mark.parametrize("name", TRACED)
def test_rows_have_the_bytes_that_are_priced(name: str) -> None:
    """Of gathers, reductions, messages (at their senders) and all that updates exchange; not of norms."""
    made = predicted(name)
    program = made.structure.program
    for memory in made.memory:
        rows = range(*program.class_ptr[memory.rank_class :][:2].tolist())
        keys = [program.keys[program.key[row]] for row in rows]
        want = Counter((KINDS[key.kind], round(made.pricing.amounts(key)[0])) for key in keys if key.kind in KINDS)
        for rank in memory.ranks:
            got = Counter((kind, size) for kind, axes, _, size in results(name)[rank].calls if axes != "all")
            got -= Counter({call: n for call, n in got.items() if call[0] == "irecv"})
            assert want and not want - got
            inside = sum(size * n for (_, size), n in (got - want).items())
            assert inside == sum(made.pricing.amounts(key)[0] for key in keys if key.kind in ("OPT", "HOST_OPT"))


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_products_are_those_of_the_graph(name: str) -> None:
    made = predicted(name)
    phases = ("forward", "input_grad", "weight_grad", "recompute")
    for rank, result in results(name).items():
        stages = [stage for stage in made.stages if rank in stage.ranks]
        assert result.flops == made.pricing.count * sum(s.phase(phase).flops for s in stages for phase in phases)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_the_fullest_moment_is_as_predicted(name: str) -> None:
    for memory in predicted(name).memory:
        want = memory.allocated_bytes - memory.by_class["workspace"]
        assert results(name)[memory.ranks[0]].most == pytest.approx(want, rel=0.05)
