"""Small random spaces: a tiny model, few devices, a few choices of every field."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cache

from gnomon.graph import Graph
from gnomon.hardware import Cluster, parse_cluster
from gnomon.models import gpt, llama, mixtral
from gnomon.plans import Goal, Offload, Optimizer, Overlap, Plan, Precision, Workload
from gnomon.prediction.predict import PLAIN_STACK
from gnomon.search import Space, make_space
from gnomon.search.space.points import EXTRA_CHOICES
from gnomon.software import Stack, own, stack

CLUSTERS = (
    "1x2xa100-sxm-80gb",
    "1x4xh100-sxm",
    "2x2xv100-sxm-32gb",
    "1x8xa100-sxm-80gb",
    "2x4xh100-sxm",
    "4x4xa100-sxm-80gb",
)


@dataclass(frozen=True)
class Case:
    """What `solve` is asked."""

    graph: Graph
    cluster: Cluster
    workload: Workload
    space: Space
    stack: Stack
    goal: Goal


@cache
def model(kind: str, layers: int) -> Graph:
    """A model with few and narrow layers; the embedding of some is tied."""
    if kind == "llama":
        return llama.llama(
            llama.LlamaConfig(
                name="l", num_layers=layers, hidden_size=256, num_heads=8, num_kv_heads=2, head_dim=32, ffn_size=512,
                vocab_size=4096,
            )
        )  # fmt: skip
    if kind == "mixtral":
        return mixtral.mixtral(
            mixtral.MixtralConfig(
                name="m", num_layers=layers, hidden_size=128, num_heads=4, num_kv_heads=2, head_dim=32, num_experts=4,
                experts_per_token=2, expert_ffn_size=256, vocab_size=2048,
            )
        )  # fmt: skip
    config = gpt.GptConfig(
        name="g", num_layers=layers, hidden_size=512, num_heads=8, vocab_size=8192, max_positions=1024,
        tied=kind == "tied",
    )  # fmt: skip
    return gpt.gpt(config)


def with_disks(cluster: Cluster, bytes_per_s: float) -> Cluster:
    """Whose nodes read their disks so fast, and write half as fast."""
    groups = (
        replace(
            group,
            node=replace(group.node, disk_read_bytes_per_s=bytes_per_s, disk_write_bytes_per_s=bytes_per_s / 2),
        )
        for group in cluster.groups
    )
    return replace(cluster, groups=tuple(groups))


def case(seed: int, *, extra_choices: bool = False, away: bool = False, disk: bool = False) -> Case:
    """A space of at most a few dozen legal points. extra_choices: with products that are cut, and
    plans with activations on the host besides those that keep them. away: with parameters on the host (and of two seeds
    in three the update); disk: on one of those that take about as long as the rest of the step."""
    draw = random.Random(seed)
    graph = model(draw.choice(("gpt", "tied", "llama", "mixtral")), draw.choice((2, 3, 4, 8)))
    cluster = parse_cluster(draw.choice(CLUSTERS))
    workload = Workload(global_batch_size=draw.choice((4, 8, 16, 32)), seq_len=draw.choice((128, 512)))
    half = Precision(param="fp16", compute="fp16")
    precision = half if "v100" in cluster.name else draw.choice((Precision(), Precision(grad="bf16"), half))
    overlap = Overlap(bucket_bytes=draw.choice((None, None, 10**6)), prefetch=draw.choice((0, 1, 2)))
    base = Plan(precision=precision, overlap=overlap, optimizer=Optimizer(clip=draw.random() < 0.85))
    program = draw.choice((PLAIN_STACK, stack("megatron-lm"), stack("torchtitan"), stack("gnomon")))
    if program.name == own.NAME and own.search_reason(
        base
    ):  # `gnomon plan` refuses it: bounds know of no rows of layers
        base = replace(base, overlap=replace(overlap, bucket_bytes=None))
    result = make_space(graph, cluster, workload, base=base, extra_choices=EXTRA_CHOICES if extra_choices else ())
    few = _few(result, draw)
    if extra_choices:
        few = replace(few, recompute=("none", "offload"), sequence_parallel=(True,))
    if away:
        optimizer = replace(base.optimizer, offload_parameters=True)
        if seed % 3:
            optimizer = replace(optimizer, clip=False, offload=Offload())
        if disk:
            optimizer = replace(optimizer, parameter_tier="disk")
            cluster = with_disks(cluster, draw.choice((1e9, 1e10)))
        few = replace(few, base=replace(base, optimizer=optimizer), zero=(3,))
    return Case(graph, cluster, workload, few, program, Goal(memory_fraction=1.0))


def _few(space: Space, draw: random.Random) -> Space:
    """The space with few choices of each field."""
    several = {
        name: tuple(sorted(draw.sample(values, min(len(values), most)), key=values.index))
        for name, most in (
            ("tp", 2), ("ep", 2), ("pp", 2), ("dp_replicate", 2), ("schedule", 2), ("virtual_stages", 2),
            ("micro_batch_size", 2), ("recompute", 1), ("zero", 2),
        )
        for values in [getattr(space, name)]
    }  # fmt: skip
    names = ("sequence_parallel", "keep_gathered", "overlap", "context")
    one = {name: (draw.choice(getattr(space, name)),) for name in names}
    made = replace(space, cp=draw.choice(((1,), (1, 2))), **several, **one)
    return made if made.size else replace(made, tp=(1,), cp=(1,), pp=(1,), dp_replicate=(1,), ep=(1,))
