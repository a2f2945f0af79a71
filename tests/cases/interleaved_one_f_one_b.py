"""Interleaved 1F1B, p 4, two stages a rank, m 8, F 0.5, B 1 a stage, messages free; from a plan with pp 4.

A rank's layers take the same 8·(1 + 2) = 24 as in the 1F1B case, but each hop down or up the pipeline is a half-stage
long: rank 3 gets its first microbatch after 3·0.5 and the last gradient needs 3·1 more to reach rank 0, together (p -
1)(F + B)/v = 4.5. Makespan 28.5, idle 4.5 a rank; 1F1B has 33 and 9. Rank r warms up with 2(3 - r) + 4 forwards and
holds one more when its first backward starts: 11, 9, 7, 5 half-stages (S, size 0.5: 5.5, 4.5, 3.5, 2.5 where 1F1B has
4, 3, 2, 1). It starts at r/2 and needs none it has to wait for, so the last of 11 - 2r forwards starts at r/2 + (10 -
2r)/2 = 5 - r/2. The price of the small bubble is memory, and twice the messages. Source: Narayanan et al. 2021,
section 2.2.
"""

from __future__ import annotations

from case_format import Case, Expected, Peak

from gnomon.lowering import lower
from gnomon.models.gpt import GptConfig, gpt
from gnomon.plans import Mesh, Optimizer, Plan, Schedule
from gnomon.program import Program

GRAPH = gpt(
    GptConfig(name="eight", num_layers=8, hidden_size=64, num_heads=4, vocab_size=256, max_positions=32, tied=False)
)
PLAN = Plan(
    mesh=Mesh(pp=4),
    schedule=Schedule(name="interleaved_one_f_one_b", virtual_stages=2, num_microbatches=8),
    optimizer=Optimizer(clip=False),
)

PROGRAM = """\
gnomon.program/1
stages 8
units 8
class 0
  0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0F3 0SEND_F3 4RECV_F0 4F0 4SEND_F0 4RECV_F1 4F1 4SEND_F1
  4RECV_F2 4F2 4SEND_F2 4RECV_F3 4F3 4SEND_F3 0F4 0SEND_F4 0F5 0SEND_F5 0F6 0SEND_F6 4RECV_B0 4B0
  4SEND_B0 0F7 0SEND_F7 4RECV_B1 4B1 4SEND_B1 4RECV_F4 4F4 4SEND_F4 4RECV_B2 4B2 4SEND_B2 4RECV_F5
  4F5 4SEND_F5 4RECV_B3 4B3 4SEND_B3 4RECV_F6 4F6 4SEND_F6 0RECV_B0 0B0 4RECV_F7 4F7 4SEND_F7
  0RECV_B1 0B1 0RECV_B2 0B2 0RECV_B3 0B3 4RECV_B4 4B4 4SEND_B4 4RECV_B5 4B5 4SEND_B5 4RECV_B6 4B6
  4SEND_B6 4RECV_B7 4B7 4SEND_B7 0RECV_B4 0B4 0RECV_B5 0B5 0RECV_B6 0B6 0RECV_B7 0B7 0OPT 4OPT
class 1
  1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 1RECV_F2 1F2 1SEND_F2 1RECV_F3 1F3 1SEND_F3 5RECV_F0
  5F0 5SEND_F0 5RECV_F1 5F1 5SEND_F1 5RECV_F2 5F2 5SEND_F2 5RECV_F3 5F3 5SEND_F3 1RECV_F4 1F4
  1SEND_F4 5RECV_B0 5B0 5SEND_B0 1RECV_F5 1F5 1SEND_F5 5RECV_B1 5B1 5SEND_B1 1RECV_F6 1F6 1SEND_F6
  5RECV_B2 5B2 5SEND_B2 1RECV_F7 1F7 1SEND_F7 5RECV_B3 5B3 5SEND_B3 5RECV_F4 5F4 5SEND_F4 1RECV_B0
  1B0 1SEND_B0 5RECV_F5 5F5 5SEND_F5 1RECV_B1 1B1 1SEND_B1 5RECV_F6 5F6 5SEND_F6 1RECV_B2 1B2
  1SEND_B2 5RECV_F7 5F7 5SEND_F7 1RECV_B3 1B3 1SEND_B3 5RECV_B4 5B4 5SEND_B4 5RECV_B5 5B5 5SEND_B5
  5RECV_B6 5B6 5SEND_B6 5RECV_B7 5B7 5SEND_B7 1RECV_B4 1B4 1SEND_B4 1RECV_B5 1B5 1SEND_B5 1RECV_B6
  1B6 1SEND_B6 1RECV_B7 1B7 1SEND_B7 1OPT 5OPT
class 2
  2RECV_F0 2F0 2SEND_F0 2RECV_F1 2F1 2SEND_F1 2RECV_F2 2F2 2SEND_F2 2RECV_F3 2F3 2SEND_F3 6RECV_F0
  6F0 6SEND_F0 6RECV_F1 6F1 6SEND_F1 6RECV_F2 6F2 6SEND_F2 6RECV_B0 6B0 6SEND_B0 6RECV_F3 6F3
  6SEND_F3 6RECV_B1 6B1 6SEND_B1 2RECV_F4 2F4 2SEND_F4 6RECV_B2 6B2 6SEND_B2 2RECV_F5 2F5 2SEND_F5
  6RECV_B3 6B3 6SEND_B3 2RECV_F6 2F6 2SEND_F6 2RECV_B0 2B0 2SEND_B0 2RECV_F7 2F7 2SEND_F7 2RECV_B1
  2B1 2SEND_B1 6RECV_F4 6F4 6SEND_F4 2RECV_B2 2B2 2SEND_B2 6RECV_F5 6F5 6SEND_F5 2RECV_B3 2B3
  2SEND_B3 6RECV_F6 6F6 6SEND_F6 6RECV_B4 6B4 6SEND_B4 6RECV_F7 6F7 6SEND_F7 6RECV_B5 6B5 6SEND_B5
  6RECV_B6 6B6 6SEND_B6 6RECV_B7 6B7 6SEND_B7 2RECV_B4 2B4 2SEND_B4 2RECV_B5 2B5 2SEND_B5 2RECV_B6
  2B6 2SEND_B6 2RECV_B7 2B7 2SEND_B7 2OPT 6OPT
class 3
  3RECV_F0 3F0 3SEND_F0 3RECV_F1 3F1 3SEND_F1 3RECV_F2 3F2 3SEND_F2 3RECV_F3 3F3 3SEND_F3 7RECV_F0
  7F0 7B0 7SEND_B0 7RECV_F1 7F1 7B1 7SEND_B1 7RECV_F2 7F2 7B2 7SEND_B2 7RECV_F3 7F3 7B3 7SEND_B3
  3RECV_F4 3F4 3SEND_F4 3RECV_B0 3B0 3SEND_B0 3RECV_F5 3F5 3SEND_F5 3RECV_B1 3B1 3SEND_B1 3RECV_F6
  3F6 3SEND_F6 3RECV_B2 3B2 3SEND_B2 3RECV_F7 3F7 3SEND_F7 3RECV_B3 3B3 3SEND_B3 7RECV_F4 7F4 7B4
  7SEND_B4 7RECV_F5 7F5 7B5 7SEND_B5 7RECV_F6 7F6 7B6 7SEND_B6 7RECV_F7 7F7 7B7 7SEND_B7 3RECV_B4
  3B4 3SEND_B4 3RECV_B5 3B5 3SEND_B5 3RECV_B6 3B6 3SEND_B6 3RECV_B7 3B7 3SEND_B7 3OPT 7OPT
"""


def lowered() -> Program:
    return lower(GRAPH, PLAN)


CASE = Case(
    name="interleaved_one_f_one_b",
    graph=GRAPH,
    plan=PLAN,
    program=PROGRAM,
    lowered=lowered,
    busy={"F": 0.5, "B": 1, "*": 0},
    sizes={"S": 0.5, "X": 0, "Y": 0, "DX": 0, "DY": 0, "P": 0, "G": 0},
    expected=Expected(
        makespan=28.5,
        period=28.5,
        exposed={r: 0 for r in range(4)},
        idle={0: 4.5, 1: 4.5, 2: 4.5, 3: 4.5},
        issue_peaks={
            0: Peak(size=5.5, action="0F6"),
            1: Peak(size=4.5, action="1F4"),
            2: Peak(size=3.5, action="6F2"),
            3: Peak(size=2.5, action="7F0"),
        },
        time_peaks={r: Peak(size=5.5 - r, moment=5 - r / 2) for r in range(4)},
        ends={"3:3F0": 2.0, "3:7F0": 4.0, "0:0B7": 28.5},
    ),
)
