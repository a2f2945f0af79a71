"""Full sharding inside a pipeline: two stages of two blocks, two microbatches in 1F1B, each stage on two ranks.

F 1, B 2, gather 1, reduce-scatter 1, update .5 a block; messages free. Without communication a stage has F 2 and B 4,
so 1F1B takes (m + p - 1) · 6 = 18. By hand, class 0 (blocks 0 and 1) and class 1 (blocks 2 and 3), from rest:

    0 gather   0: 0-1  1: 1-2  0: 2-3  1: 3-4  0: 4-5                          1: 11-12  0: 13-14
    0 compute  F0 1-2  F1 2-3  F0 3-4  F1 4-5        B1 9-11  B0 11-13  B1 15-17  B0 17-19  updates 20-21
    1 gather   2: 0-1  3: 1-2  2: 4-5  3: 7-8  2: 10-11
    1 compute  F2 3-4  F3 4-5  B3 5-7  B2 7-9  F2 9-10  F3 10-11  B3 11-13  B2 13-15  updates 16-17

Block 1 is not gathered again between its forward of microbatch 1 and its backward of microbatch 0, nor block 3 at its
turns, nor block 2 between B of microbatch 0 and F of microbatch 1: class 0 gathers seven times, class 1 five. On both
the limit of two blocks makes each gather wait for a free. First gather, 18, last reduction, two updates: 21. Block 0 of
the next step is gathered from 20.5, beside the update of block 1: period 20.5. Compute is 13 a rank, so 8 idle.

Sizes: gathered block 1, gradient 1, shards .5, activations of a block and microbatch 1. Class 0 in issue order, B1 of
microbatch 0: shards 1, blocks 2, gradient 1, activations 4 = 8. In time order, B0 from 11: shards 1, block 0 and block
1 on its way, gradient 0 and gradient 1 with its shard .5, activations 3 = 8.5. Class 1, B3 of microbatch 1: shards 1,
blocks 2, gradient 1, gradient shards 1, activations 2 = 7, in both orders.
"""

from __future__ import annotations

from case_format import Case, Expected, Peak

from gnomon.lowering import lower
from gnomon.models.gpt import GptConfig, gpt
from gnomon.plans import Mesh, Optimizer, Plan, Schedule
from gnomon.program import Program

GRAPH = gpt(
    GptConfig(name="two", num_layers=2, hidden_size=64, num_heads=4, vocab_size=256, max_positions=32, tied=False)
)
PLAN = Plan(mesh=Mesh(pp=2, dp_shard=2), schedule=Schedule(num_microbatches=2), optimizer=Optimizer(zero=3, clip=False))

PROGRAM = """\
gnomon.program/1
stages 4
units 2
buffer P step per stage pool gathered
buffer PS carried per stage
buffer GS step per stage
pool gathered 2
kind UNSHARD on unshard comm dp_shard: read PS, write P
kind RESHARD on compute: free P
kind REDUCE_GRAD on reduce comm dp_shard: consume G, accumulate GS
kind OPT on compute: consume GS, read PS, write PS
class 0 count 2
  0UNSHARD 1UNSHARD 0F0 0RESHARD  0UNSHARD 1F0 1RESHARD 1SEND_F0  1UNSHARD 0F1 0RESHARD  1F1 1SEND_F1
  1RECV_B0 0UNSHARD 1B0 1RESHARD 1REDUCE_GRAD  1UNSHARD 0B0 0RESHARD 0REDUCE_GRAD
  1RECV_B1 0UNSHARD 1B1 1RESHARD 1REDUCE_GRAD  0B1 0RESHARD 0REDUCE_GRAD  0OPT 1OPT
class 1 count 2
  2RECV_F0 2UNSHARD 3UNSHARD 2F0 2RESHARD  3F0 2UNSHARD 3B0 3RESHARD 3REDUCE_GRAD  2B0 2REDUCE_GRAD 2SEND_B0
  2RECV_F1 3UNSHARD 2F1 2RESHARD  3F1 2UNSHARD 3B1 3RESHARD 3REDUCE_GRAD  2B1 2RESHARD 2REDUCE_GRAD 2SEND_B1
  2OPT 3OPT
"""


def lowered() -> Program:
    return lower(GRAPH, PLAN)


CASE = Case(
    name="fsdp_in_pipeline",
    graph=GRAPH,
    plan=PLAN,
    program=PROGRAM,
    lowered=lowered,
    busy={"UNSHARD": 1, "REDUCE_GRAD": 1, "F": 1, "B": 2, "OPT": 0.5, "*": 0},
    sizes={"P": 1, "G": 1, "PS": 0.5, "GS": 0.5, "S": 1, "X": 0, "Y": 0, "DX": 0, "DY": 0},
    expected=Expected(
        makespan=21,
        period=20.5,
        idle={0: 8, 1: 8},
        issue_peaks={0: Peak(size=8, action="1B0"), 1: Peak(size=7, action="3B1")},
        time_peaks={0: Peak(size=8.5, action="0B0", moment=11), 1: Peak(size=7, action="3B1", moment=11)},
        time_steps=2,
        ends={"0:0UNSHARD": 14, "0:1B0": 11, "0:0B1": 19, "1:2UNSHARD": 11, "1:2B1": 15, "1:3OPT": 17},
    ),
)
