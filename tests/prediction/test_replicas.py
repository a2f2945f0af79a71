"""A prediction plays each kind of replica by itself and takes the slowest. Here it is compared with the Program that
has a class for every kind of replica, whose reductions meet."""

from __future__ import annotations

import numpy as np
import pytest

from gnomon.hardware import parse_cluster
from gnomon.lowering import lower
from gnomon.models.presets import model
from gnomon.plans import Mesh, Plan, Schedule, Stage, Workload, batch
from gnomon.prediction import predict
from gnomon.prediction.predict import PLAIN_STACK, PredictionRequest
from gnomon.prediction.software_kernels import kernels_of
from gnomon.prediction.step import Pricing
from gnomon.program import validate
from gnomon.simulate import Durations, period
from gnomon.units import quantise

GRAPH = model("llama-3.2-1b")
CLUSTER = parse_cluster("1x2xh100-sxm+1x2xa100-sxm-80gb")
WORKLOAD = Workload(global_batch_size=32, seq_len=2048)


def plan(*shares: int) -> Plan:
    """Four workers side by side, or two of two stages each."""
    if len(shares) == 4:
        stages = (Stage(calls=("*",), mesh=Mesh(dp_replicate=4), shares=shares),)
    else:
        halves = (("embed", "layers[0:9]"), "0,2"), (("layers[9:16]", "head"), "1,3")
        stages = tuple(Stage(calls=c, mesh=Mesh(dp_replicate=2), devices=d, shares=shares) for c, d in halves)
    return Plan(stages=stages, schedule=Schedule(num_microbatches=32 // sum(shares)))


@pytest.mark.parametrize("shares", [(6, 6, 2, 2), (4, 4, 4, 4), (5, 5, 3, 3), (6, 2), (5, 3)])
def test_the_slowest_replica_is_the_step_of_all_classes_together(shares: tuple[int, ...]) -> None:
    """To 0.2 %: where the two kinds are nearly as slow, buckets hide beside one's computing and not quite beside the
    other's. A bucket is reduced when the slowest has it, so its reduction is priced beside the most computing."""
    chosen = plan(*shares)
    prediction = predict(GRAPH, CLUSTER, chosen, WORKLOAD)
    kernels, _, stack = kernels_of(PLAIN_STACK)
    count, size = batch(chosen, WORKLOAD)
    priced = Pricing(plan=chosen, graph=GRAPH, cluster=CLUSTER, stack=stack, stages=(), blocks=(), count=count)
    asked = PredictionRequest(pricing=priced, workload=WORKLOAD, size=size, kernels=kernels, by_layer=False)
    kinds = [pricing for _, pricing in asked.side_by_side()]
    program = lower(GRAPH, chosen, CLUSTER, WORKLOAD)
    assert program.num_classes == 2 * chosen.num_stages and len(kinds) == 2
    busy = [
        min(kind.seconds(key) for kind in kinds)
        if key.kind == "AR" and key.name != "embedding"
        else kinds[key.rank_class % 2].seconds(key)
        for key in program.keys
    ]
    together = period(validate(program), Durations(busy=quantise(np.array(busy)))).seconds
    assert together * 0.998 <= prediction.step_s <= together
