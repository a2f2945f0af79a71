"""ZeRO stages 1 and 2 over four blocks on four ranks: reduce 1, gather 1, F 1, B 2, update .25 a block.

By hand, stages 1 and 2 alike, from rest:

    compute  F 0-4   B3 4-6   B2 6-8   B1 8-10   B0 10-12         updates 13-14
    reduce                3: 6-7   2: 8-9   1: 10-11   0: 12-13
    gather                                                0: 13.25-14.25   1: -15.25   2: -16.25   3: -17.25

Makespan 17.25: 13 of compute, 1 for the last reduction, 3.25 for gathers after the last update at 14: 4.25 exposed.
The next step's F0 waits only for gather 0, and block i is there when F gets to it: the period is 14.25 = 12 + 1 + .25
+ 1, three gathers run under the forward of the next step. Gathers on the compute stream after the last update: 14 + 4
= 18, no overlap, so the period is 18 as well and 5 are exposed, four of them while the stream is held. Two blocks a
bucket (reduction 2): the first goes 8-10, the second 12-14, gather 0 ends at 15.25, which is the period; the fourth at
18.25, 5.25 more than the compute.

Sizes: each block has one parameter (4 in all, Psi), on N = 4 ranks: P 2, G 2, and the shard PS 12/4 = 3 (master copy
and two moments), GS 2/4. Stage 1 holds 4 Psi + 12 Psi/N = 16 + 12 = 28 from B0 on. Stage 2 ends with 2 Psi + 14 Psi/N
= 22, and has one whole gradient of 2 more while the last one is reduced: 24 in issue order. In time order gradient 1
is still being reduced while B0 makes gradient 0, with three shards: 20 + 4 + 1.5 = 25.5. Two blocks a bucket: 26 and
27. The blocks are stages of a Program written down, and the method is applied to it: a plan divides by pipeline stage,
so it would make these four one. Source of the formulas: Rajbhandari et al. 2020, figure 1.
"""

from __future__ import annotations

from dataclasses import replace

from case_format import Case, Expected, Peak

from gnomon.lowering.zero import shard_optimizer
from gnomon.program import parse_program

BLOCKS = """\
gnomon.program/1
stages 4
units 1
class 0 count 4
  0F0 1F0 2F0 3F0 3B0 2B0 1B0 0B0 0AR 1AR 2AR 3AR 0OPT 1OPT 2OPT 3OPT
"""

ZERO_1 = """\
gnomon.program/1
stages 4
units 1
buffer PS carried per stage
kind UNSHARD on unshard comm dp_shard: read PS, write P
kind REDUCE_GRAD on reduce comm dp_shard: accumulate G
kind OPT on compute: consume G, read PS, write PS
class 0 count 4
  0F0 1F0 2F0 3F0  3B0 3REDUCE_GRAD 2B0 2REDUCE_GRAD 1B0 1REDUCE_GRAD 0B0 0REDUCE_GRAD
  0OPT 0UNSHARD 1OPT 1UNSHARD 2OPT 2UNSHARD 3OPT 3UNSHARD
"""

ZERO_1_BLOCKING = ZERO_1.replace("UNSHARD on unshard", "UNSHARD on compute").replace(
    "0OPT 0UNSHARD 1OPT 1UNSHARD 2OPT 2UNSHARD 3OPT 3UNSHARD", "0OPT 1OPT 2OPT 3OPT 0UNSHARD 1UNSHARD 2UNSHARD 3UNSHARD"
)

ZERO_2_HEADER = """\
gnomon.program/1
stages 4
units 1
buffer PS carried per stage
buffer GS step per stage
kind UNSHARD on unshard comm dp_shard: read PS, write P
kind REDUCE_GRAD on reduce comm dp_shard: consume G, accumulate GS
kind OPT on compute: consume GS, read PS, write PS
"""

ZERO_2 = f"""{ZERO_2_HEADER}\
class 0 count 4
  0F0 1F0 2F0 3F0  3B0 3REDUCE_GRAD 2B0 2REDUCE_GRAD 1B0 1REDUCE_GRAD 0B0 0REDUCE_GRAD
  0OPT 0UNSHARD 1OPT 1UNSHARD 2OPT 2UNSHARD 3OPT 3UNSHARD
"""

ZERO_2_BUCKETS = f"""{ZERO_2_HEADER}\
class 0 count 4
  0F0 1F0 2F0 3F0
  3B0 2B0 2REDUCE_GRAD/2..3.REDUCE_GRAD{{consume G 3, accumulate GS 3, consume G 2, accumulate GS 2}}
  1B0 0B0 0REDUCE_GRAD/0..1.REDUCE_GRAD{{consume G 1, accumulate GS 1, consume G 0, accumulate GS 0}}
  0OPT 0UNSHARD 1OPT 1UNSHARD 2OPT 2UNSHARD 3OPT 3UNSHARD
"""

STAGE_1 = Case(
    name="zero_1",
    program=ZERO_1,
    lowered=lambda: shard_optimizer(parse_program(BLOCKS), zero=1),
    busy={"UNSHARD": 1, "REDUCE_GRAD": 1, "F": 1, "B": 2, "OPT": 0.25},
    sizes={"P": 2, "G": 2, "PS": 3, "GS": 0.5, "S": 0, "X": 0, "Y": 0, "DX": 0, "DY": 0},
    expected=Expected(
        makespan=17.25,
        period=14.25,
        exposed={0: 4.25},
        idle={0: 4.25},
        issue_peaks={0: Peak(size=28, action="0B0")},
        time_peaks={0: Peak(size=28, action="0B0", moment=10)},
        time_steps=3,
        ends={"0:0REDUCE_GRAD": 13, "0:3OPT": 14, "0:0UNSHARD": 14.25, "0:3UNSHARD": 17.25},
    ),
)

CASES = (
    STAGE_1,
    replace(
        STAGE_1,
        name="zero_1_gather_exposed",
        program=ZERO_1_BLOCKING,
        lowered=lambda: shard_optimizer(parse_program(BLOCKS), zero=1, overlap_gather=False),
        expected=Expected(
            makespan=18,
            period=18,
            exposed={0: 5},
            idle={0: 1},
            issue_peaks={0: Peak(size=28, action="0B0")},
            time_peaks={0: Peak(size=28, action="0B0", moment=10)},
            ends={"0:0UNSHARD": 15},
        ),
    ),
    replace(
        STAGE_1,
        name="zero_2",
        program=ZERO_2,
        lowered=lambda: shard_optimizer(parse_program(BLOCKS), zero=2),
        expected=replace(
            STAGE_1.expected,
            issue_peaks={0: Peak(size=24, action="0REDUCE_GRAD")},
            time_peaks={0: Peak(size=25.5, action="0B0", moment=10)},
        ),
    ),
    replace(
        STAGE_1,
        name="zero_2_buckets",
        program=ZERO_2_BUCKETS,
        lowered=lambda: shard_optimizer(parse_program(BLOCKS), zero=2, blocks_per_bucket=2),
        busy={"UNSHARD": 1, "2..3.REDUCE_GRAD": 2, "0..1.REDUCE_GRAD": 2, "F": 1, "B": 2, "OPT": 0.25},
        expected=Expected(
            makespan=18.25,
            period=15.25,
            exposed={0: 5.25},
            idle={0: 5.25},
            issue_peaks={0: Peak(size=26, action="0REDUCE_GRAD")},
            time_peaks={0: Peak(size=27, action="1B0", moment=8)},
        ),
    ),
)
