"""`gnomon run` on a user's own module, in the processes of a job: one run a plan, its losses and what it wrote."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from frontend import mixed_op, project
from frontend.mixed_op import mix

import gnomon
from gnomon.frontend.inputs import CodeModel
from gnomon.frontend.named import build, captured_of
from gnomon.plans import Layout, Mesh, Optimizer, Plan, Precision, Saved, Schedule, Workload
from gnomon.runtime import AdamWSettings
from gnomon.runtime.checks import parity
from gnomon.runtime.data.own_batches import OwnData
from gnomon.runtime.launch.train import TrainingJob, train

INPUTS = "(idx=int64[batch,seq=16], targets=int64[batch,seq=16])"
CODE = f"frontend.project:build{INPUTS}"
FLOAT = f"frontend.project:build_float{INPUTS}"
LADDER = f"frontend.project:build_ladder{INPUTS}"
"""Stages read several tensors, of the one before and of others."""
MIXED = "frontend.mixed_op:build(ids=int64[batch,seq=16], labels=int64[batch,seq=16])"
"""Has a custom op, with a rule of how it divides."""
FP64 = Precision(param="fp64", compute="fp64", grad="fp64", reduce="fp64", master="none", states="fp64")
SETTINGS = AdamWSettings(lr=1e-2, weight_decay=0.0, clip_norm=1e9)
STEPS = 3
SEED = 5
BASE = Plan(precision=FP64, schedule=Schedule(micro_batch_size=1))
PLANS = {
    "dp": replace(BASE, mesh=Mesh(dp_replicate=2)),
    **{f"zero {n}": replace(BASE, mesh=Mesh(dp_shard=2), optimizer=Optimizer(zero=n)) for n in (1, 2, 3)},
    "pp": replace(BASE, mesh=Mesh(pp=2)),
    "recompute": replace(BASE, mesh=Mesh(dp_replicate=2), saved=Saved(preset="full")),
    "tp": replace(BASE, mesh=Mesh(tp=2)),
    "tp, sequence parallel": replace(BASE, mesh=Mesh(tp=2), layout=Layout(sequence_parallel=True)),
    "cp": replace(BASE, mesh=Mesh(cp=2)),
    "pp, recompute attention": replace(BASE, mesh=Mesh(pp=2), saved=Saved(preset="selective")),
}


LADDERS = {
    "pp": PLANS["pp"],
    "pp, four stages": replace(
        BASE, mesh=Mesh(pp=2), schedule=Schedule(name="interleaved_one_f_one_b", micro_batch_size=1, virtual_stages=2)
    ),
    "pp, split backward": replace(BASE, mesh=Mesh(pp=2), schedule=Schedule(name="zero_bubble_h1", micro_batch_size=1)),
    "zero 3": PLANS["zero 3"],
    "tp, sequence parallel": PLANS["tp, sequence parallel"],
}


def job(plan: Plan, code: str = "", **changes: object) -> TrainingJob:
    """The user's module on the user's batches."""
    code = code or CODE
    graph = captured_of(CodeModel.parse(code), build(CodeModel.parse(code))).graph
    made = TrainingJob(
        graph=graph,
        code=code,
        plan=plan,
        workload=Workload(global_batch_size=4, seq_len=16),
        steps=STEPS,
        data=OwnData(name="frontend.project:batches"),
        settings=SETTINGS,
        seed=SEED,
        quiet=True,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def every_plan(folder: Path) -> dict[str, list[float]]:
    """Losses by plan; the weights of each at its end are in a folder of its name. `resumed` stops after a step of ZeRO
    3 and goes on under it, `again` begins with the weights that dp wrote."""
    losses = {}
    for name, plan in PLANS.items():
        outcome = train(job(plan, export=(folder / name, folder)))
        losses[name] = [record.loss for record in outcome.records]
    for name, plan in LADDERS.items():
        outcome = train(job(plan, LADDER, export=(folder / f"ladder {name}", folder)))
        losses[f"ladder {name}"] = [record.loss for record in outcome.records]
    gnomon.op_sharding(mix)(mixed_op.divided)
    for name in ("tp", "tp, sequence parallel"):
        outcome = train(job(PLANS[name], MIXED, data=OwnData(name="frontend.mixed_op:batches")))
        losses[f"mixed {name}"] = [record.loss for record in outcome.records]
    for name in ("tp", "pp"):
        given = job(PLANS[name])
        compared = parity.compare(parity.in_small(given.graph, given.plan, given.workload, code=CODE))
        assert not compared.first, compared
        losses[f"parity {name}"] = [compared.largest, float(compared.tensors)]
    with gnomon.prepare(
        CODE, PLANS["dp"], workload=Workload(global_batch_size=4, seq_len=16), settings=SETTINGS, seed=SEED
    ) as own:
        losses["prepared"] = [own.step(project.batches(step)) for step in range(1, STEPS + 1)]
    at = {"checkpoints": folder / "checkpoints"}
    first = train(job(PLANS["zero 3"], steps=1, **at))
    rest = train(job(PLANS["zero 3"], resume=True, export=(folder / "resumed", folder), **at))
    losses["resumed"] = [record.loss for record in (*first.records, *rest.records)]
    again = train(job(PLANS["zero 2"], steps=1, weights=folder / "dp"))
    losses["again"] = [record.loss for record in again.records]
    return losses
