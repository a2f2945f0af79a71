"""FlexMoE: experts that many tokens choose have copies on several ranks, which follow the load as it drifts.

`experts.replicas` of a plan turns it on, `experts.placement` says which ranks hold which experts, and with
`experts.rebalance_every` the controller of `control.placing` changes that in the run, by predicted gain. Its rows are
one sum of gradients a stage before the update (`lowering.tensor_sums`): all else is where rows of experts go. Every
search tries it as a choice of `--refine`, under the router's load of the workload.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gnomon.methods.method import Method
from gnomon.plans import Plan


def variants(plan: Plan) -> Iterator[Plan]:
    """One and four more experts on each rank."""
    ep = max(plan.stage_mesh(stage).ep for stage in range(plan.num_stages))
    if ep > 1 and not (plan.experts.replicas or plan.experts.placement):
        for multiple in (1, 4):
            yield replace(plan, experts=replace(plan.experts, replicas=multiple * ep))


METHOD = Method(
    name="flexmoe",
    paper="FlexMoE, Nie et al., SIGMOD 2023",
    about="experts with many tokens have copies on several ranks, and move as the load drifts",
    switch="experts.replicas",
    exactness="up to the order of sums",
    on=lambda plan: plan.experts.replicas > 0 or plan.experts.rebalance_every > 0,
    variants=variants,
    searched=True,
)
