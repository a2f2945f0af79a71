"""Fully sharded data parallelism over four blocks, on four ranks that all do the same.

The blocks are the embedding, two layers and the head of a graph whose plan has dp_shard 4 and ZeRO 3; the times are
made up and the same for all.

Gather 2, reduce-scatter 2, F 1, B 2, update .25 a block: 13 of compute. One block is gathered ahead and the last is
not gathered again. By hand, from rest:

    gather   0: 0-2   1: 2-4   2: 4-6   3: 6-8   2: 8-10   1: 11-13   0: 13-15        (limit of two blocks)
    compute  F0 2-3   F1 4-5   F2 6-7   F3 8-9   B3 9-11   B2 11-13   B1 13-15   B0 15-17   updates 19-20
    reduce                                       3: 11-13  2: 13-15   1: 15-17   0: 17-19

Compute waits 2 for the first gather, 1 for each of the next three, 2 for the last reduction: 7 exposed, makespan 20.
In the steady state block 0 is gathered as soon as it is updated, at 19.25, under the three updates that follow: .75 is
hidden, the period is 19.25 and 6.25 are exposed in it. The limit costs no time here: without it blocks 1 and 0 are
gathered at 10 and 12, but nothing waited for them.

Sizes: a gathered block 1, its gradient 1, shards of both a quarter, what backward needs of a block .5, the rest 0.
Issue order: during B3 all shards (1), blocks 3 and 2 (2), gradient 3 (1), four activations (2): 6. Time order: during
B2, from 11, shards 1, blocks 2 and 1, gradient 2 and gradient 3, which is being reduced, with its shard .25, three
activations 1.5: 6.75; without the limit block 0 is there too from 12: 7.75.

No block ahead (a pool of one): every gather but the first waits for the compute before it. Seven gathers, 13 of
compute and the last reduction, 14 + 13 + 2 = 29; .75 hidden across the step: 28.25. Gather 1, reduce-scatter 1, F 2, B
4: all hidden but the first gather and the last reduction, 1 + 25 + 1 = 27; period 26.25, exposed 1.25 in it and 2 from
rest; B2 starts at 1 + 8 + 4 = 13, with the same memory as above. Kept from forward to backward
(`reshard_after_forward` off): time is the same, but the four blocks are held: during B3 shards 1, blocks 4, gradient
1, activations 2 = 8.
"""

from __future__ import annotations

from dataclasses import replace

from case_format import Case, Expected, Peak

from gnomon.lowering import lower
from gnomon.lowering.fsdp import fully_shard
from gnomon.models.gpt import GptConfig, gpt
from gnomon.plans import Mesh, Optimizer, Overlap, Plan, Schedule
from gnomon.program import Program, parse_program

GRAPH = gpt(
    GptConfig(name="two", num_layers=2, hidden_size=64, num_heads=4, vocab_size=256, max_positions=32, tied=False)
)
PLAN = Plan(mesh=Mesh(dp_shard=4), schedule=Schedule(num_microbatches=1), optimizer=Optimizer(zero=3, clip=False))
WITHOUT_PREFETCH = replace(PLAN, overlap=Overlap(prefetch=0))
KEPT_PLAN = replace(PLAN, optimizer=replace(PLAN.optimizer, reshard_after_forward=False))

BLOCKS = """\
gnomon.program/1
stages 4
units 1
class 0 count 4
  0F0 1F0 2F0 3F0 3B0 2B0 1B0 0B0 0AR 1AR 2AR 3AR 0OPT 1OPT 2OPT 3OPT
"""

KINDS = """\
kind UNSHARD on unshard comm dp_shard: read PS, write P
kind RESHARD on compute: free P
kind REDUCE_GRAD on reduce comm dp_shard: consume G, accumulate GS
kind OPT on compute: consume GS, read PS, write PS
"""

HEADER = f"""\
gnomon.program/1
stages 4
units 1
buffer P step per stage pool gathered
buffer PS carried per stage
buffer GS step per stage
pool gathered 2
{KINDS}"""

ROWS = """\
class 0 count 4
  0UNSHARD 1UNSHARD 0F0 0RESHARD  2UNSHARD 1F0 1RESHARD  3UNSHARD 2F0 2RESHARD  3F0
  2UNSHARD 3B0 3RESHARD 3REDUCE_GRAD  1UNSHARD 2B0 2RESHARD 2REDUCE_GRAD
  0UNSHARD 1B0 1RESHARD 1REDUCE_GRAD  0B0 0RESHARD 0REDUCE_GRAD  0OPT 1OPT 2OPT 3OPT
"""

ONE_BY_ONE = """\
class 0 count 4
  0UNSHARD 0F0 0RESHARD  1UNSHARD 1F0 1RESHARD  2UNSHARD 2F0 2RESHARD  3UNSHARD 3F0
  3B0 3RESHARD 3REDUCE_GRAD  2UNSHARD 2B0 2RESHARD 2REDUCE_GRAD
  1UNSHARD 1B0 1RESHARD 1REDUCE_GRAD  0UNSHARD 0B0 0RESHARD 0REDUCE_GRAD  0OPT 1OPT 2OPT 3OPT
"""

KEPT = """\
class 0 count 4
  0UNSHARD 1UNSHARD 0F0  2UNSHARD 1F0  3UNSHARD 2F0  3F0
  3B0 3RESHARD 3REDUCE_GRAD  2B0 2RESHARD 2REDUCE_GRAD  1B0 1RESHARD 1REDUCE_GRAD  0B0 0RESHARD 0REDUCE_GRAD
  0OPT 1OPT 2OPT 3OPT
"""


def unlimited() -> Program:
    """No field of a plan says this: memory would be whatever the network leaves time for."""
    return fully_shard(parse_program(BLOCKS), limit_gathered=False)


TWO_AHEAD = Case(
    name="fsdp",
    graph=GRAPH,
    plan=PLAN,
    program=HEADER + ROWS,
    lowered=lambda: lower(GRAPH, PLAN),
    busy={"UNSHARD": 2, "REDUCE_GRAD": 2, "F": 1, "B": 2, "OPT": 0.25, "RESHARD": 0},
    sizes={"P": 1, "G": 1, "PS": 0.25, "GS": 0.25, "S": 0.5, "X": 0, "Y": 0, "DX": 0, "DY": 0},
    expected=Expected(
        makespan=20,
        period=19.25,
        exposed={0: 7},
        idle={0: 7},
        issue_peaks={0: Peak(size=6, action="3B0")},
        time_peaks={0: Peak(size=6.75, action="2B0", moment=11)},
        time_steps=3,
        ends={"0:1UNSHARD": 13, "0:0UNSHARD": 15, "0:3F0": 9, "0:0B0": 17, "0:0REDUCE_GRAD": 19, "0:0OPT": 19.25},
    ),
)

CASES = (
    TWO_AHEAD,
    replace(
        TWO_AHEAD,
        name="fsdp_unlimited",
        program=HEADER.replace(" pool gathered\n", "\n").replace("pool gathered 2\n", "") + ROWS,
        graph=None,
        plan=None,
        lowered=unlimited,
        expected=replace(
            TWO_AHEAD.expected,
            time_peaks={0: Peak(size=7.75, action="0UNSHARD", moment=12)},
            ends={"0:1UNSHARD": 12, "0:0UNSHARD": 14, "0:0B0": 17},
        ),
    ),
    replace(
        TWO_AHEAD,
        name="fsdp_no_prefetch",
        program=HEADER.replace("pool gathered 2", "pool gathered 1") + ONE_BY_ONE,
        plan=WITHOUT_PREFETCH,
        lowered=lambda: lower(GRAPH, WITHOUT_PREFETCH),
        expected=Expected(
            makespan=29,
            period=28.25,
            exposed={0: 16},
            idle={0: 16},
            issue_peaks={0: Peak(size=5, action="3B0")},
            time_peaks={0: Peak(size=5, action="3B0", moment=12)},
        ),
    ),
    replace(
        TWO_AHEAD,
        name="fsdp_hidden",
        busy={"UNSHARD": 1, "REDUCE_GRAD": 1, "F": 2, "B": 4, "OPT": 0.25, "RESHARD": 0},
        expected=Expected(
            makespan=27,
            period=26.25,
            exposed={0: 2},
            idle={0: 2},
            issue_peaks={0: Peak(size=6, action="3B0")},
            time_peaks={0: Peak(size=6.75, action="2B0", moment=13)},
            time_steps=3,
        ),
    ),
    replace(
        TWO_AHEAD,
        name="fsdp_kept_after_forward",
        program=HEADER.replace(" pool gathered\n", "\n").replace("pool gathered 2\n", "") + KEPT,
        plan=KEPT_PLAN,
        lowered=lambda: lower(GRAPH, KEPT_PLAN),
        expected=Expected(
            makespan=20,
            period=19.25,
            exposed={0: 7},
            issue_peaks={0: Peak(size=8, action="3B0")},
            time_peaks={0: Peak(size=8, action="3B0", moment=9)},
        ),
    ),
)
