"""What the controller of experts' placement weighs (`control.placing`): seconds of a row, of a sum and of a move.

`expert_costs(prediction)` asks the simulator: a row's seconds are what the step gets longer by when the busiest rank
has more of them, all else alike. Leaves out moves that other traffic slows.
"""

from __future__ import annotations

from dataclasses import replace

from gnomon.control.placing import ROWS_ALONE, PlacingCosts
from gnomon.graph import DTYPE_BITS
from gnomon.plans import RouterLoad
from gnomon.plans.experts import routers, without_replicas
from gnomon.prediction.predict import Prediction, predict
from gnomon.prices.collectives import collective_seconds

SKEW = RouterLoad(kind="zipf", s=0.5)
"""A load with which steps are compared with balanced ones."""


def expert_costs(prediction: Prediction) -> PlacingCosts:
    """Costs of placing the experts of a predicted plan, which lie on several ranks; `ROWS_ALONE` where a row takes no
    time that the step shows."""
    plan, pricing, work = prediction.plan, prediction.pricing, prediction.workload
    stage = max(pricing.stages, key=lambda one: one.elements[1])
    ep, layers = stage.mesh.ep, routers(pricing.graph)
    still = replace(plan, experts=replace(plan.experts, replicas=0, placement=(), rebalance_every=0))
    graph = without_replicas(pricing.graph)
    even, uneven = (
        predict(graph, pricing.cluster, still, replace(work, router=load), pricing.stack).step_s
        for load in (RouterLoad(), SKEW)
    )
    experts, here = max(router.experts for router in layers), max(1, len(layers) // plan.num_stages)
    routed = sum(work.sequence_lengths()) * max(router.topk for router in layers)
    extra_rows = (SKEW.busiest(experts, ep) - 1.0) * routed / stage.mesh.world_size * here
    row_s = (uneven - even) / extra_rows
    if row_s <= 0.0:
        return ROWS_ALONE
    slots = max(map(len, plan.experts.placement), default=experts) // ep
    each = stage.elements[1] // (here * slots)  # parameters of an expert
    moved = sum(size for name, size, _ in stage.kept_kinds if name != "gradients")
    link = stage.links["ep"]
    return PlacingCosts(
        row_s=row_s,
        sum_s=float(collective_seconds("all_reduce", each * DTYPE_BITS[plan.precision.reduce] // 8, link)),
        move_s=float(collective_seconds("all_to_all", each * moved, link)),
    )
