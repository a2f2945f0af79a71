"""DAPPLE's early backward with a chosen warm-up: how many forwards a pipeline rank runs before its first backward.

`dapple_warmup` with policy `p` runs pp - rank forwards first, as 1F1B does; `2p` runs up to twice as many, which hides
messages that take as long as computing, for more activations. Lowering makes the rows (`dapple_warm_up`); this file
says what the method is. Leaves out DAPPLE's planner, which is `search.stages.dapple` (`gnomon plan --uneven-replicas`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gnomon.methods.method import Method, Param
from gnomon.orders.one_f_one_b import DAPPLE
from gnomon.orders.one_f_one_b import ORDER as ONE_F_ONE_B
from gnomon.plans import Pass, Plan


def _refusal(plan: Plan) -> str | None:
    if plan.schedule.name != ONE_F_ONE_B.name:
        return f"it changes schedule {ONE_F_ONE_B.name}, and this one is {plan.schedule.name}; choose one of the two"
    return None


def _variants(plan: Plan) -> Iterator[Plan]:
    schedule = plan.schedule
    if schedule.name == ONE_F_ONE_B.name and plan.num_pipeline_ranks > 1 and not schedule.passes:
        twice = Pass(name=DAPPLE, params=(("policy", "2p"),))
        yield replace(plan, schedule=replace(schedule, passes=(twice,)))


METHOD = Method(
    name=DAPPLE,
    paper="DAPPLE, Fan et al., PPoPP 2021",
    about="more forwards before the first backward, so that messages between stages overlap with computing",
    switch="schedule.passes",
    exactness="bitwise",
    params=(Param(name="policy", about="forwards before the first backward", choices=("p", "2p")),),
    refusal=_refusal,
    variants=_variants,
)
