"""Blocks that are called twice: on one rank one weight, one gradient and one update; on two ranks a sum.

The graphs are those of llama-mini's blocks; a second call names the parameters of the first. A layer has 36,992 numbers
(norms 2·64, q and o 4096 each, k and v 2048 each, feed-forward 3·8192), the embedding 256·64 = 16,384, norm and head
64 + 16,384.

Twice on one rank: layers A, B, A, B on two ranks, interleaved (v 2), m 2. Rank 0 has embedding + A (stage 0) and A
(2), rank 1 has B (1) and B + head (3). The larger stage of a rank stands for both: P and G of stages 0 and 2 are one
buffer of 53,376 numbers, of 1 and 3 one of 53,440, updated once. A rank works 2·2·(1 + 2) = 12, the bubble is
(p - 1)(F + B) = 3: 15, plus one update of .5: 15.5, after which rank 0 begins again. Rank 1 is through one backward
earlier, at 13, and then updates. Weights and gradients in issue order: 2 · 53,376 = 106,752 on rank 0 and 106,880 on
rank 1; with two copies of a layer it would be 73,984 more each.

Twice on two ranks: A, A on p 2, 1F1B, m 2: (2 + 1)·3 = 9, then both ranks add up the gradient of A, 36,992·4 = 147,968
bytes in fp32, in 1, and update in .5: 10.5. Rank 1 is through at 1 + 2·3 = 7, and waits 2 for rank 0.
Source: by hand; sharing of blocks as in ALBERT (Lan et al. 2020).
"""

from __future__ import annotations

from collections.abc import Callable

from case_format import Case, Expected, Peak

from gnomon.graph import Call, Graph
from gnomon.lowering import lower
from gnomon.models.llama import llama, llama_mini
from gnomon.plans import Optimizer, Plan, Schedule, Stage, shared_parameters
from gnomon.program import Program, parse_program

TINY = llama(llama_mini())
LAYER = TINY.block("layers")


def called_twice(layers: int) -> Graph:
    """Embedding, `layers` layers, the same layers again, head."""
    calls, x = [TINY.call("embed")], "embed.x"
    for time in ("once", "again"):
        for i in range(layers):
            name = f"{time}_{i}"
            shared = tuple((tensor.name, f"model.layers.{i}.{tensor.name}") for tensor in LAYER.parameters)
            calls.append(Call(block="layers", name=name, inputs=(("x", x),), params=shared))
            x = f"{name}.y"
    head = TINY.call("head")
    calls.append(
        Call(block="head", name="head", inputs=(("x", x), ("labels", "labels")), prefix="", params=head.params)
    )
    return Graph(name="shared", inputs=TINY.inputs, blocks=TINY.blocks, calls=tuple(calls), outputs=("head.loss",))


FOUR, TWO = called_twice(2), called_twice(1)
ONE_RANK = Plan(
    stages=(
        Stage(calls=("embed", "once_0"), devices="0:1"),
        Stage(calls=("once_1",), devices="1:2"),
        Stage(calls=("again_0",), devices="0:1"),
        Stage(calls=("again_1", "head"), devices="1:2"),
    ),
    schedule=Schedule(name="interleaved_one_f_one_b", num_microbatches=2),
    optimizer=Optimizer(clip=False),
)
TWO_RANKS = Plan(
    stages=(Stage(calls=("embed", "once_0")), Stage(calls=("again_0", "head"))),
    schedule=Schedule(num_microbatches=2),
    optimizer=Optimizer(clip=False),
)
SAME_RANK = """\
gnomon.program/1
stages 4
units 2
alias P 0 = P 2
alias G 0 = G 2
alias P 3 = P 1
alias G 3 = G 1
class 0
  0F0 0SEND_F0 0F1 0SEND_F1 2RECV_F0 2F0 2SEND_F0 2RECV_F1 2F1 2SEND_F1 2RECV_B0 2B0 2SEND_B0
  2RECV_B1 2B1 2SEND_B1 0RECV_B0 0B0 0RECV_B1 0B1 0OPT
class 1
  1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 3RECV_F0 3F0 3B0 3SEND_B0 3RECV_F1 3F1 3B1 3SEND_B1
  1RECV_B0 1B0 1SEND_B0 1RECV_B1 1B1 1SEND_B1 3OPT
"""
OTHER_RANK = """\
gnomon.program/1
stages 2
units 2
comm embedding collective
class 0
  0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0AR/embedding:embedding#0 0OPT
class 1
  1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1AR/embedding:embedding#0 1OPT
"""


def lowered(graph: Graph, plan: Plan) -> Callable[[], Program]:
    return lambda: lower(graph, plan)


def counted_once() -> None:
    layer = 2 * 64 + 2 * 4096 + 2 * 2048 + 3 * 8192
    assert layer == 36_992
    assert FOUR.num_parameters() == 16_384 + 2 * layer + 64 + 16_384
    assert TWO.num_parameters() == FOUR.num_parameters() - layer
    assert set(shared_parameters(ONE_RANK, FOUR).values()) == {(0, 2), (1, 3)}
    assert set(shared_parameters(TWO_RANKS, TWO).values()) == {(0, 1)}


def one_buffer() -> None:
    actual = [(one.buffer, one.stage, same.stage) for one, same in parse_program(SAME_RANK).aliases]
    assert actual == [("P", 0, 2), ("G", 0, 2), ("P", 3, 1), ("G", 3, 1)]


NOTHING = dict.fromkeys(("S", "X", "Y", "DX", "DY"), 0)
CASES = (
    Case(
        name="shared_block-on-one-rank",
        graph=FOUR,
        plan=ONE_RANK,
        program=SAME_RANK,
        lowered=lowered(FOUR, ONE_RANK),
        busy={"F": 1, "B": 2, "OPT": 0.5, "*": 0},
        sizes={**NOTHING, "0P": 53_376, "0G": 53_376, "3P": 53_440, "3G": 53_440},
        expected=Expected(
            makespan=15.5,
            period=15.5,
            idle={0: 3, 1: 3},
            issue_peaks={0: Peak(size=106_752, action="2B0"), 1: Peak(size=106_880, action="3B0")},
            ends={"0:0B1": 15, "0:0OPT": 15.5, "1:1B1": 13, "1:3OPT": 13.5},
        ),
        also=(counted_once, one_buffer),
    ),
    Case(
        name="shared_block-on-two-ranks",
        graph=TWO,
        plan=TWO_RANKS,
        program=OTHER_RANK,
        lowered=lowered(TWO, TWO_RANKS),
        busy={"F": 1, "B": 2, "embedding": 1, "OPT": 0.5, "*": 0},
        expected=Expected(
            makespan=10.5,
            period=10.5,
            exposed={0: 1, 1: 1},
            ends={"1:1B1": 7, "0:0B1": 9, "1:1AR": 10, "0:0AR": 10, "1:1OPT": 10.5},
        ),
    ),
)
