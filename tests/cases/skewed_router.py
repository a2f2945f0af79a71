"""DeepSeek-V3's mixture block on 64 ranks (case deepseek_v3_block) whose router gives some ranks twice the mean.

Sixteen ranks get twice the mean of rows, sixteen the mean, thirty-two half of it: (16·2 + 16·1 + 32·.5) / 64 = 1, so
max/mean = 2. Three rank classes with the same rows and other durations and sizes; an all-to-all is one group over all
three, so it starts when the last rank is ready and ends everywhere at once. It lasts as long as its busiest port: 8192
rows leave every rank, a hot one receives 16384: twice the balanced 1.

Balanced (one class, here as three): forward of one microbatch A 1.5, all-to-all 1 (shared expert .25 under it), experts
2, all-to-all 1: 5.5, of which 3.75 compute and 1.75 waiting. Skewed, with the merge of the outputs at the end:
    hot    A 0-1.5  [2] SH -1.75   experts 3.5-7.5    [2]  9.5       computes 5.75, waits 1.75 + 2
    mean   A 0-1.5  [2] SH -1.75   experts 3.5-5.5    [2]  9.5       computes 3.75, waits 1.75 + 4: 2 for the hot
    cold   A 0-1.5  [2] SH -1.75   experts 3.5-4.5    [2]  9.5       computes 2.75, waits 1.75 + 5: 3 for the hot
All wait 1.75 + 2 for the network; what the others wait beyond that the breakdown gives to EXPERTS, the hot class's
computing ("bubble"), though what ends the wait is COMBINE.

Sizes in units of 14 MiB: the rows received (R) and what experts make of them (E) are 16, 8 and 4; rows before dispatch
and after combine 8; H and SH 1. Peak while experts' rows are sent back and received (combine): H (kept), SH,
R, E and C: 1 + 1 + 16 + 16 + 8 = 42, 26, 18. Sources: by hand; the effect is FlexMoE's (Nie et al. 2023).
"""

from __future__ import annotations

from dataclasses import replace

from case_format import Case, Expected, Peak

from gnomon.models.deepseek import deepseek_v3, deepseek_v3_671b
from gnomon.plans import Layout, Mesh, Plan, RouterLoad, Schedule
from gnomon.program import parse_program, validate
from gnomon.simulate import durations, simulate
from gnomon.timeline import breakdown

GRAPH = deepseek_v3(deepseek_v3_671b())
PLAN = Plan(
    mesh=Mesh(dp_shard=16, cp=2, tp=2, ep=64),
    layout=Layout(sequence_parallel=True),
    schedule=Schedule(num_microbatches=1),
)
PROGRAM = """\
gnomon.program/1
stages 1
units 1
buffer H step per unit
buffer T step per unit
buffer R step per unit
buffer E step per unit
buffer C step per unit
buffer SH step per unit
kind ATTN on compute: read P, write H, write T
kind DISPATCH on ep comm ep: consume T, write R
kind SHARED on compute: read P, read H, write SH
kind EXPERTS on compute: read P, read R, write E
kind COMBINE on ep comm ep: consume E, write C
kind MERGE on compute: consume C, consume SH, free H, free R
class 0 count 16
  0ATTN0 0DISPATCH0#0 0SHARED0 0EXPERTS0 0COMBINE0#1 0MERGE0
class 1 count 16
  0ATTN0 0DISPATCH0#0 0SHARED0 0EXPERTS0 0COMBINE0#1 0MERGE0
class 2 count 32
  0ATTN0 0DISPATCH0#0 0SHARED0 0EXPERTS0 0COMBINE0#1 0MERGE0
"""
BALANCED = {"ATTN": 1.5, "SHARED": 0.25, "EXPERTS": 2, "DISPATCH": 1, "COMBINE": 1, "MERGE": 0}
SKEWED = {**BALANCED, "0:EXPERTS": 4, "2:EXPERTS": 1, "0:DISPATCH": 2, "0:COMBINE": 2}
SIZES = {"P": 0, "T": 8, "R": 8, "E": 8, "C": 8, "H": 1, "SH": 1}


def loads_of_ranks() -> None:
    counts = (2,) * 64 + (1,) * 64 + (0.5,) * 128  # four experts a rank, hot ranks first
    shares = RouterLoad(kind="histogram", counts=counts).fractions(256).reshape(64, 4).sum(axis=1)
    assert (shares * 64).tolist() == [2.0] * 16 + [1.0] * 16 + [0.5] * 32


def who_waits_for_whom() -> None:
    structure = validate(parse_program(PROGRAM))
    parts = breakdown(simulate(structure, durations(structure.program, SKEWED)))
    for rank_class, waits in ((0, 0.0), (1, 2.0), (2, 3.0)):
        match = [share for share in parts.of(f"class {rank_class}") if share.part == "bubble"]
        assert sum(share.seconds for share in match) == waits
        assert {share.action for share in match} <= {"EXPERTS"}
        assert parts.seconds(f"class {rank_class}", "communication", busy=False) == 1.75 + 2


SKEW = Case(
    name="skewed_router",
    graph=GRAPH,
    plan=PLAN,
    program=PROGRAM,
    busy=SKEWED,
    sizes={**SIZES, "0:R": 16, "0:E": 16, "2:R": 4, "2:E": 4},
    expected=Expected(
        makespan=9.5,
        period=9.5,
        idle={0: 3.75, 1: 5.75, 2: 6.75},
        issue_peaks={
            0: Peak(size=42, action="0COMBINE0"),
            1: Peak(size=26, action="0COMBINE0"),
            2: Peak(size=18, action="0COMBINE0"),
        },
        time_peaks={0: Peak(size=42, moment=7.5), 1: Peak(size=26, moment=7.5), 2: Peak(size=18, moment=7.5)},
        ends={"0:0EXPERTS0": 7.5, "1:0EXPERTS0": 5.5, "2:0EXPERTS0": 4.5, "2:0DISPATCH0": 3.5, "2:0COMBINE0": 9.5},
    ),
    also=(loads_of_ranks, who_waits_for_whom),
)
CASES = (
    SKEW,
    replace(
        SKEW,
        name="skewed_router-balanced",
        busy=BALANCED,
        sizes=SIZES,
        expected=Expected(
            makespan=5.5,
            period=5.5,
            idle={0: 1.75, 1: 1.75, 2: 1.75},
            exposed={0: 1.75, 2: 1.75},
            issue_peaks={0: Peak(size=26, action="0COMBINE0")},
        ),
        also=(),
    ),
)
