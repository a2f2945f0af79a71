"""ZB-V, p 2, m 4: stages 0 and 3 on rank 0, 1 and 2 on rank 1; F = I = W = 1 a stage, messages free.

From a plan with pp 2, two stages a rank and placement v.
Both ranks work 4 microbatches · 2 stages · 3 = 24. Rank 1 gets its first microbatch at 1 and never waits again: 25.
Rank 0 forwards three microbatches; microbatch 0 is back from rank 1 (F there at 1 and 2) just when it can take it at
3, so it does not wait either, and has nothing left at 24. A step from rest takes 6m + (p - 1) = 25, with the idle cell
of rank 1 before its first action and that of rank 0 after its last: none inside. Rank 0 goes on with the next step at
24, so the period is 24: zero bubble. Rank 0 holds 4 stage activations (S, size 0.5: together 2 full ones) when it
forwards microbatch 0 in stage 3 at 3, rank 1 when it forwards microbatch 1 in stage 2 at 4; 1F1B holds 2 full ones
too. The order is that of torch 2.13's ScheduleZBVZeroBubble. Source: Qi et al. 2023, "Zero bubble pipeline
parallelism", section 6.
"""

from __future__ import annotations

from case_format import Case, Expected, Peak

from gnomon.lowering import lower
from gnomon.models.gpt import GptConfig, gpt
from gnomon.plans import Mesh, Optimizer, Plan, Schedule
from gnomon.program import Program

GRAPH = gpt(
    GptConfig(name="four", num_layers=4, hidden_size=64, num_heads=4, vocab_size=256, max_positions=32, tied=False)
)
PLAN = Plan(
    mesh=Mesh(pp=2),
    schedule=Schedule(name="zero_bubble_v", virtual_stages=2, placement="v", num_microbatches=4),
    optimizer=Optimizer(clip=False),
)

PROGRAM = """\
gnomon.program/1
stages 4
units 4
class 0
  0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 3RECV_F0 3F0 3I0 3SEND_B0 3W0 3RECV_F1 3F1 3I1 3SEND_B1 3W1
  0F3 0SEND_F3 0RECV_B0 0I0 0W0 3RECV_F2 3F2 3I2 3SEND_B2 3W2 0RECV_B1 0I1 0W1 3RECV_F3 3F3 3I3
  3SEND_B3 3W3 0RECV_B2 0I2 0W2 0RECV_B3 0I3 0W3 0OPT 3OPT
class 1
  1RECV_F0 1F0 2F0 2SEND_F0 1RECV_F1 1F1 2F1 2SEND_F1 2RECV_B0 2I0 2W0 1RECV_F2 1F2 1I0 1SEND_B0 1W0
  2F2 2SEND_F2 2RECV_B1 2I1 2W1 1RECV_F3 1F3 1I1 1SEND_B1 1W1 2F3 2SEND_F3 2RECV_B2 2I2 2W2 1I2
  1SEND_B2 2RECV_B3 2I3 1I3 1SEND_B3 1W2 2W3 1W3 1OPT 2OPT
"""


def lowered() -> Program:
    return lower(GRAPH, PLAN)


CASE = Case(
    name="zero_bubble_v",
    graph=GRAPH,
    plan=PLAN,
    program=PROGRAM,
    lowered=lowered,
    busy={"F": 1, "I": 1, "W": 1, "*": 0},
    sizes={"S": 0.5, "X": 0, "Y": 0, "DX": 0, "DY": 0, "P": 0, "G": 0},
    expected=Expected(
        makespan=25,
        period=24,
        exposed={0: 0, 1: 0},
        idle={0: 1, 1: 1},
        issue_peaks={0: Peak(size=2, action="3F0"), 1: Peak(size=2, action="2F1")},
        time_peaks={0: Peak(size=2, moment=3), 1: Peak(size=2, moment=4)},
        ends={"1:1F0": 2, "0:3F0": 4, "0:3I0": 5, "0:0W3": 24, "1:1W3": 25},
    ),
)
