"""Two key-value heads under tp 4 (Qwen2.5-3B): each head is held by a pair of ranks, which add up its gradient.

16 query heads of 128 are four a rank; of 2 key-value heads each rank runs one, whole, and its neighbour the same one:
ranks 0 and 1 hold head 0, ranks 2 and 3 head 1. So key and value weights take half of the model's on every rank, not a
quarter: 128 · 2048 + 128 (bias) = 262,272 numbers each, and all four ranks together hold them twice. Each rank has
other queries, so each copy gets its own term of the gradient: once a step the pair adds up 2 · 262,272 · 4 = 2,098,176
bytes a layer in fp32, 75,534,336 for 36 layers; of two ranks each sends 2·(2-1)/2 of that, once.
Under sequence parallelism each rank sees a quarter of the tokens in norms, and all four add up the norms' gradients
too: 2 · 2048 · 4 = 16,384 bytes a layer.

m 2, F 1, B 2, sum over the pair .25, of norms .125, update .5: 2·3 + .25 + .5 = 6.75, and 6.875 with norms. Nothing
hides the sums: the update waits for them. Source: by hand; the model's config.json (Qwen/Qwen2.5-3B).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from case_format import Case, Expected

from gnomon.graph import BF16
from gnomon.lowering import lower
from gnomon.models.llama import LlamaConfig, llama
from gnomon.plans import Layout, Mesh, Optimizer, Plan, Precision, Schedule, problems
from gnomon.program import Program
from gnomon.sharding import parameter_collectives, shard_graph

GRAPH = llama(
    LlamaConfig(
        name="qwen2.5-3b",
        num_layers=36,
        hidden_size=2048,
        num_heads=16,
        num_kv_heads=2,
        head_dim=128,
        ffn_size=11008,
        vocab_size=151936,
        qkv_bias=True,
        tied=True,
    )
)
PLAN = Plan(mesh=Mesh(tp=4), schedule=Schedule(num_microbatches=2), optimizer=Optimizer(clip=False))
SEQUENCE_PARALLEL = replace(PLAN, layout=Layout(sequence_parallel=True))
PROGRAM = """\
gnomon.program/1
stages 1
units 2
comm kv_copies collective
class 0 count 4
  0F0 0B0 0F1 0B1 0AR/kv_copies:kv_copies 0OPT
"""
WITH_NORMS = """\
gnomon.program/1
stages 1
units 2
comm tp collective
comm kv_copies collective
class 0 count 4
  0F0 0B0 0F1 0B1 0AR/tp:tp 0AR/kv_copies:kv_copies 0OPT
"""


def lowered(plan: Plan) -> Callable[[], Program]:
    return lambda: lower(GRAPH, plan)


def each_rank_holds_half() -> None:
    assert GRAPH.num_parameters() == 3_085_938_688
    layer = shard_graph(GRAPH, PLAN.layout, PLAN.mesh, {"batch": 1, "seq": 4096}, BF16)["layers"]
    held = {
        name: layer.local_elements[f"self_attn.{name}"] for name in ("q_proj.weight", "k_proj.weight", "v_proj.bias")
    }
    assert held == {"q_proj.weight": 4 * 128 * 2048, "k_proj.weight": 128 * 2048, "v_proj.bias": 128}
    assert set(layer.copies.values()) == {2}
    core = layer.sizes("self_attn.core")
    assert (core["heads"], core["kv_heads"]) == (4, 1)
    assert [problem.name for problem in problems(PLAN, GRAPH)] == ["kv_heads_replicated"]


def bytes_of_the_sums() -> None:
    def sums(plan: Plan) -> list[tuple[int, int, object]]:
        layer = shard_graph(GRAPH, plan.layout, plan.mesh, {"batch": 1, "seq": 4096}, BF16)["layers"]
        result = parameter_collectives(layer, plan.mesh, plan.optimizer, Precision())
        assert all(c.when == "before_step" and c.kind == "all_reduce" for c in result)
        return [(c.ranks, c.bytes, c.sent_bytes) for c in result]

    assert sums(PLAN) == [(2, 2_098_176, 2_098_176)] and 36 * 2_098_176 == 75_534_336
    assert sums(SEQUENCE_PARALLEL) == [(4, 16_384, 24_576), (2, 2_098_176, 2_098_176)]


CASES = (
    Case(
        name="gqa_two_kv_heads",
        graph=GRAPH,
        plan=PLAN,
        program=PROGRAM,
        lowered=lowered(PLAN),
        busy={"F": 1, "B": 2, "kv_copies": 0.25, "OPT": 0.5},
        expected=Expected(makespan=6.75, period=6.75, exposed={0: 0.25}, idle={0: 0.25}, ends={"0:0AR": 6.25}),
        also=(each_rank_holds_half, bytes_of_the_sums),
    ),
    Case(
        name="gqa_two_kv_heads-sequence-parallel",
        graph=GRAPH,
        plan=SEQUENCE_PARALLEL,
        program=WITH_NORMS,
        lowered=lowered(SEQUENCE_PARALLEL),
        busy={"F": 1, "B": 2, "tp": 0.125, "kv_copies": 0.25, "OPT": 0.5},
        expected=Expected(makespan=6.875, period=6.875, exposed={0: 0.375}, idle={0: 0.375}),
    ),
)
