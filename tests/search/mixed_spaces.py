"""Small random spaces over heterogeneous devices: a tiny model, two or three kinds, few choices of every field."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from search.spaces import model

from gnomon.errors import GnomonError
from gnomon.graph import Graph
from gnomon.hardware import Cluster, Node, NodeGroup
from gnomon.hardware.catalogue import build_node, default_row, device
from gnomon.plans import Optimizer, Plan, Precision, Workload
from gnomon.prediction import Prediction, predict
from gnomon.prediction.predict import PLAIN_STACK
from gnomon.search.mixed.space import MixedPoint, MixedSpace, make_mixed_space
from gnomon.software import Stack, stack

DEVICES = ("h100-sxm-80gb", "a100-sxm-80gb", "a100-sxm-40gb", "v100-sxm-32gb", "l40s")


@dataclass(frozen=True)
class MixedCase:
    """What the search is asked."""

    graph: Graph
    cluster: Cluster
    workload: Workload
    space: MixedSpace
    stack: Stack


def node(name: str, count: int, draw: random.Random) -> Node:
    """Devices of a kind, as fast as drawn, in a node with a network."""
    one = device(name)
    slower = draw.choice((1.0, 1.0, 0.5, 0.25))
    peaks = {
        key: value * slower
        for key in ("fp32", "tf32", "fp16", "bf16", "fp8")
        if isinstance(value := getattr(one.dense_peak, key, None), float)
    }
    one = replace(one, dense_peak=replace(one.dense_peak, **peaks))
    made = build_node(default_row(one), one, count)
    return replace(made, nics=draw.choice((1, max(made.nics, 1)))) if made.nic else made


def mixed_case(seed: int) -> MixedCase:
    """A space of at most 16 of points."""
    draw = random.Random(seed)
    graph = model(draw.choice(("gpt", "tied", "llama", "llama")), draw.choice((2, 3, 4, 5, 6)))
    kinds = draw.sample(DEVICES, draw.choice((2, 2, 2, 3)))
    groups = tuple(NodeGroup(node=node(name, draw.choice((1, 2, 2, 4)), draw)) for name in kinds)
    cluster = Cluster(name="+".join(kinds), groups=groups)
    workload = Workload(global_batch_size=draw.choice((4, 6, 8, 12)), seq_len=draw.choice((128, 512, 1024)))
    precision = Precision(param="fp16", compute="fp16") if "v100-sxm-32gb" in kinds else Precision()
    base = Plan(precision=precision, optimizer=Optimizer(clip=draw.random() < 0.8))
    program = draw.choice((PLAIN_STACK, stack("megatron-lm"), stack("gnomon")))
    space = make_mixed_space(graph, cluster, workload, base=base, stack=program)
    return MixedCase(graph, cluster, workload, _few(space, draw), program)


def _few(space: MixedSpace, draw: random.Random) -> MixedSpace:
    """The space with few choices of each field."""
    some = {
        name: tuple(sorted(draw.sample(values, min(len(values), most)), key=values.index))
        for name, most in (
            ("tp", 2), ("pp", 3), ("microbatches", 2), ("recompute", 2), ("zero", 2), ("schedule", 2),
            ("sequence_parallel", 1),
        )
        for values in [getattr(space, name)]
    }  # fmt: skip
    made = replace(space, **some)
    while made.size > 16:
        name = draw.choice([n for n in some if len(getattr(made, n)) > 1] or ["none"])
        if name == "none":
            return made
        made = replace(made, **{name: tuple(v for v in getattr(made, name) if v != draw.choice(getattr(made, name)))})
        made = made if made.size else replace(made, **{name: some[name][:1]})
    return made if made.size else replace(space, zero=(0,), recompute=("none",), schedule=("one_f_one_b",), pp=(1, 2))


def predicted(case: MixedCase) -> Iterator[tuple[MixedPoint, Prediction]]:
    """Every point that can run, with its prediction."""
    for point in case.space.points():
        try:
            yield point, predict(case.graph, case.cluster, case.space.plan(point), case.workload, case.stack)
        except GnomonError:
            continue
