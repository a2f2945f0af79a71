"""Small random pipelines, and the best of all their cuts by predicting each."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations

from gnomon import orders
from gnomon.graph import Graph
from gnomon.hardware import parse_cluster
from gnomon.models import gemma, gpt, llama
from gnomon.plans import Layout, Mesh, Optimizer, Plan, Saved, Schedule, Workload
from gnomon.prediction import Prediction, predict
from gnomon.search.stages.cut import Cut

FLAT: tuple[str, ...] = ("one_f_one_b", "one_f_one_b", "gpipe", "zero_bubble_h1", "zero_bubble_h2")
DEEP: tuple[str, ...] = ("interleaved_one_f_one_b", "zero_bubble_v", "v_half", "looped_bfs")


@dataclass(frozen=True)
class Pipeline:
    """A plan, predicted with equal stages."""

    graph: Graph
    prediction: Prediction
    schedule: str


def model(draw: random.Random) -> Graph:
    """A decoder of 4 to 9 layers whose head is worth none to several of them; Gemma's layers are of two kinds."""
    layers, hidden = draw.randint(4, 9), draw.choice((128, 256, 512))
    vocab = draw.choice((1024, 16384, 65536, 131072))
    kind = draw.choice(("llama", "gpt", "tied", "gemma"))
    if kind in ("gpt", "tied"):
        return gpt.gpt(
            gpt.GptConfig(
                name="g", num_layers=layers, hidden_size=hidden, num_heads=8, vocab_size=vocab, max_positions=1024,
                tied=kind == "tied",
            )
        )  # fmt: skip
    if kind == "gemma":
        small = replace(
            gemma.gemma2_2b(), name="e", num_layers=layers, hidden_size=hidden, num_heads=4, num_kv_heads=2,
            head_dim=32, ffn_size=4 * hidden, vocab_size=vocab, window=64,
        )  # fmt: skip
        return gemma.gemma2(small)
    return llama.llama(
        llama.LlamaConfig(
            name="l", num_layers=layers, hidden_size=hidden, num_heads=8, num_kv_heads=2, head_dim=32,
            ffn_size=4 * hidden, vocab_size=vocab, tied=draw.random() < 0.3,
        )
    )  # fmt: skip


def pipeline(seed: int) -> Pipeline:
    """A plan of 2 to 4 pipeline ranks."""
    draw = random.Random(seed)
    graph = model(draw)
    layers = sum(1 for layer in graph.layers() if layer.call.first is not None)
    pp, dp, tp = draw.choice((2, 3, 4)), draw.choice((1, 2)), draw.choice((1, 1, 2))
    deep = 2 * pp <= layers and draw.random() < 0.35
    name = draw.choice(DEEP if deep else FLAT)
    micro, count = draw.choice((1, 2)), draw.choice((2 * pp, 2 * pp, 4 * pp))
    plan = Plan(
        mesh=Mesh(pp=pp, dp_shard=dp, tp=tp),
        schedule=Schedule(
            name=name,
            micro_batch_size=micro,
            virtual_stages=2 if deep else 1,
            placement=orders.find(name).placement,
        ),
        layout=Layout(sequence_parallel=tp > 1 and draw.random() < 0.5),
        optimizer=Optimizer(zero=draw.choice((0, 1, 2)), clip=draw.random() < 0.8),
        saved=Saved(preset=draw.choice(("none", "full"))),
    )
    nodes = 2 if pp * dp * tp > 8 else 1
    cluster = parse_cluster(
        f"{nodes}x{pp * dp * tp // nodes}x{draw.choice(('a100-sxm-80gb', 'h100-sxm', 'v100-sxm-32gb'))}"
    )
    if "v100" in cluster.name:
        plan = replace(plan, precision=replace(plan.precision, param="fp16", compute="fp16"))
    work = Workload(global_batch_size=micro * count * dp, seq_len=draw.choice((128, 512)))
    return Pipeline(graph, predict(graph, cluster, plan, work), name)


def every_cut(layers: int, stages: int) -> Iterator[Cut]:
    """All ways to cut layers into stages of at least one."""
    for ends in combinations(range(1, layers), stages - 1):
        yield tuple(b - a for a, b in zip((0, *ends), (*ends, layers), strict=True))


def by_hand(result: Prediction, cut: Cut) -> Prediction:
    """The plan with another cut, by `predict` alone."""
    pricing = result.pricing
    plan = replace(result.plan, schedule=replace(result.plan.schedule, layers_per_stage=cut))
    return predict(pricing.graph, pricing.cluster, plan, result.workload, pricing.stack)
