"""The vocabulary divided over the pipeline: exact beside the plain model, and the same program as predicted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

import torch.distributed as dist  # noqa: E402
from runtime import accounted  # noqa: E402
from runtime.parity import CONFIG, FP32, FP64, schedule  # noqa: E402
from runtime.ranks import launch  # noqa: E402

import gnomon  # noqa: E402
from gnomon.graph import Graph  # noqa: E402
from gnomon.models.gpt import GptConfig, gpt  # noqa: E402
from gnomon.models.llama import llama  # noqa: E402
from gnomon.models.presets import model  # noqa: E402
from gnomon.models.tiny import tiny  # noqa: E402
from gnomon.plans import Mesh, Optimizer, Plan, Saved, Stage, Workload  # noqa: E402
from gnomon.prediction import Prediction  # noqa: E402
from gnomon.prediction.update import in_update  # noqa: E402
from gnomon.runtime import Executor  # noqa: E402
from gnomon.runtime.checkpoint.convert import holdings  # noqa: E402
from gnomon.runtime.checks.parity import ParityResult, Small, batch_of, compare  # noqa: E402
from gnomon.runtime.module.one_process import OneProcess  # noqa: E402
from gnomon.runtime.step.evaluate import evaluate  # noqa: E402
from gnomon.software import stack  # noqa: E402

pytestmark = pytest.mark.torch

LLAMA = llama(replace(CONFIG, num_layers=4))
TIED = gpt(
    GptConfig(
        name="small", num_layers=4, hidden_size=16, num_heads=2, vocab_size=32, max_positions=8, tied=True, dropout=0
    )
)
"""With a table of positions on the first rank."""
SOFTCAP = tiny(model("gemma-2-2b"), tp=4, layers=4, positions=8)
"""Embedded tokens are scaled, logits are capped, tables are tied."""
HALVES = (Stage(calls=("embed", "layers[0:1]")), Stage(calls=("layers[1:4]", "head")))


def job(graph: Graph, how: str, mesh: Mesh, *, name: str = "one_f_one_b", **parts: Any) -> Small:
    more = {"virtual_stages": 2, "placement": "v"} if name == "v_half" else {}
    plan = Plan(mesh=mesh, schedule=schedule(name, 6, vocabulary=how, **more), precision=FP64)
    return Small(graph=graph, plan=replace(plan, **parts), workload=Workload(global_batch_size=12, seq_len=8))


SHARDED = Optimizer(zero=1)
JOBS: dict[str, Small] = {
    "interlaced": job(LLAMA, "interlaced", Mesh(pp=2)),
    "interlaced, tied": job(TIED, "interlaced", Mesh(pp=2), saved=Saved(preset="full")),
    "interlaced, uneven stages": job(LLAMA, "interlaced", Mesh(), stages=HALVES),
    "interlaced, pp 4, capped": job(SOFTCAP, "interlaced", Mesh(pp=4)),
    "interlaced, zero 1, tied": job(TIED, "interlaced", Mesh(pp=2, dp_shard=2), optimizer=SHARDED),
    "vocab_1": job(LLAMA, "vocab_1", Mesh(pp=2)),
    "vocab_2, v half, tied": job(TIED, "vocab_2", Mesh(pp=2), name="v_half"),
    "vocab_2, pp 4, capped": job(SOFTCAP, "vocab_2", Mesh(pp=4)),
    "vocab_1, v half, zero 1, tied": job(TIED, "vocab_1", Mesh(pp=2, dp_shard=2), name="v_half", optimizer=SHARDED),
    "interlaced, muon, zero 1": job(
        LLAMA, "interlaced", Mesh(pp=2, dp_shard=2), optimizer=Optimizer(kind="muon", zero=1)
    ),
    "vocab_2, adafactor, zero 1, tied": job(
        llama(replace(CONFIG, num_layers=4, tied=True)),
        "vocab_2",
        Mesh(pp=2, dp_shard=2),
        optimizer=Optimizer(kind="adafactor", zero=1),
    ),
    "interlaced and cp": job(LLAMA, "interlaced", Mesh(pp=2, cp=2)),
}


def compare_all(ranks: int) -> dict[str, tuple[ParityResult, float]]:
    """With the held-out loss of the first batch, before anything is trained."""
    return {name: (compare(small), held_out(small)) for name, small in JOBS.items() if small.plan.world_size == ranks}


def held_out(small: Small) -> float:
    executor = Executor(small.graph, small.plan, small.workload, seed=3)
    loss = evaluate(executor, batch_of(small, 0))
    executor.leave()
    return loss


@cache
def compared(ranks: int) -> dict[str, tuple[ParityResult, float]]:
    return launch(compare_all, ranks, ranks)[0]


@pytest.mark.parametrize("name", JOBS)
def test_it_trains_as_the_plain_model(name: str) -> None:
    """Activations, gradients, loss, norm and parameters over three steps, to 1e-9, and the loss of an evaluation."""
    small = JOBS[name]
    result, evaluated = compared(small.plan.world_size)[name]
    assert not result.first and result.largest <= 1e-9 and result.tensors > 100
    alone = OneProcess(small.graph, seed=3, dtype=torch.float64)
    batch = batch_of(small, 0)
    assert evaluated == pytest.approx(float(alone.loss(batch, count=batch["labels"].numel())), rel=1e-12)


@pytest.mark.parametrize("name", ["interlaced", "interlaced, zero 1, tied"])
def test_ranks_hold_parts_that_make_up_the_whole(name: str) -> None:
    """As a checkpoint is written: each element of each table once, as long a part on every pipeline rank."""
    small = JOBS[name]
    found: dict[str, list[tuple[int, int]]] = {}
    for rank in range(small.plan.world_size):
        for held, _ in holdings(small.graph, small.plan, rank):
            for slot in held.slots:
                if 32 in slot.whole[:1] and len(slot.whole) == 2:
                    found.setdefault(slot.name, []).append((slot.offset[0], slot.shape[0]))
    assert found
    for parts in found.values():
        assert sorted(set(parts)) == [(0, 16), (16, 16)]
        assert len(parts) == small.plan.world_size


WIDE = replace(accounted.CONFIG, num_layers=4)
SAME = {
    "interlaced": Plan(mesh=Mesh(pp=2), schedule=schedule("one_f_one_b", 8, vocabulary="interlaced"), precision=FP32),
    "vocab_1": Plan(mesh=Mesh(pp=2), schedule=schedule("one_f_one_b", 8, vocabulary="vocab_1"), precision=FP32),
    "vocab_2": Plan(
        mesh=Mesh(pp=2), schedule=schedule("one_f_one_b", 8, vocabulary="vocab_2"), precision=FP32,
        optimizer=Optimizer(kind="adafactor"),
    ),
}  # fmt: skip
"""In fp32, against the prediction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A step of one rank."""

    flops: int
    exchanged: list[tuple[str, int]]
    """(collective, bytes) over the ranks of the pipeline, in the order in which they were asked for."""
    most: int
    """Bytes at the fullest moment."""


def run_all() -> dict[str, Ran]:
    return {name: _run(plan) for name, plan in SAME.items()}


def _run(plan: Plan) -> Ran:
    executor = Executor(llama(WIDE), plan, accounted.WORKLOAD)
    with accounted.Products() as products:
        executor.step(accounted.batch())
        executor.synchronise()
    with exchanges(executor) as exchanged:
        executor.step(accounted.batch())
        executor.synchronise()
    most = accounted.fullest_moment(executor)
    executor.leave()
    return Ran(flops=products.flops, exchanged=exchanged, most=most)


@contextmanager
def exchanges(executor: Executor) -> Iterator[list[tuple[str, int]]]:
    """What goes over the ranks of the pipeline."""
    seen: list[tuple[str, int]] = []
    group = executor.groups.by_comm["vocabulary"]

    def noted(name: str) -> Any:
        function = getattr(dist, name)

        def wrapper(x: torch.Tensor, *given: Any, **named: Any) -> Any:
            if named["group"] is group:
                seen.append((name, x.nbytes))
            return function(x, *given, **named)

        return patch.object(dist, name, wrapper)

    with noted("all_reduce"), noted("broadcast"):
        yield seen


@cache
def ran() -> dict[int, dict[str, Ran]]:
    return launch(run_all, 2)


@cache
def predicted(name: str) -> Prediction:
    return gnomon.predict(llama(WIDE), "1x2xa100-sxm-80gb", SAME[name], accounted.WORKLOAD, stack("gnomon"))


@pytest.mark.parametrize("name", SAME)
def test_ranks_exchange_what_the_rows_say(name: str) -> None:
    """Collective by collective, in order, with its bytes. Adafactor's sums come last, of the parts of the tables."""
    made = predicted(name)
    program, share = made.structure.program, made.pricing.stages[0].share
    assert share is not None
    for rank, results in ran().items():
        rows = range(int(program.class_ptr[rank]), int(program.class_ptr[rank + 1]))
        kinds = [program.kinds[program.kind[row]].name for row in rows]
        want = [pair for kind in kinds for pair in share.exchanged(kind)]
        updates = in_update(*made.pricing.with_parts(rank))
        want += [(one.kind, one.bytes) for one, _ in updates if one.axes == ("vocabulary",)]
        assert results[name].exchanged == want and len(want) > 8 * 5


@pytest.mark.parametrize("name", SAME)
def test_products_are_those_of_the_graph(name: str) -> None:
    made = predicted(name)
    program = made.structure.program
    for rank, results in ran().items():
        (stage,) = (stage for stage in made.stages if rank in stage.ranks)
        share = stage.share
        assert share is not None
        inside = sum(stage.phase(phase).flops for phase in ("forward", "input_grad", "weight_grad", "recompute"))
        parts = sum(p.flops for kind in ("S", "T", "EMBED", "EGRAD") for p in share.phases(kind))
        assert len(program.units) == 8
        assert results[name].flops == 8 * (inside + parts)


@pytest.mark.parametrize("name", SAME)
def test_the_fullest_moment_is_as_predicted(name: str) -> None:
    for memory in predicted(name).memory:
        want = memory.allocated_bytes - memory.by_class["workspace"]
        assert ran()[memory.ranks[0]][name].most == pytest.approx(want, rel=0.05)
