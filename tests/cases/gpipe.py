"""GPipe, p 4, m 8, F 1, B 2, messages free; from a plan with pp 4.

Forwards reach rank 3 at 3 and end there at 11; the first backward of rank 0 waits until 11 + 3·2 = 17 and the eighth
ends at 17 + 8·2 = 33 = (m + p - 1)(F + B): as long as 1F1B. But every rank holds all 8 activations (S, size 1) when
its last forward runs, from 7 + r on. Source: Huang et al. 2019, section 2.3; bubble (p - 1)/(m + p - 1).
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
    mesh=Mesh(pp=4),
    schedule=Schedule(name="gpipe", num_microbatches=8),
    optimizer=Optimizer(clip=False),
)

PROGRAM = """\
gnomon.program/1
stages 4
units 8
class 0
  0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0F3 0SEND_F3 0F4 0SEND_F4 0F5 0SEND_F5 0F6 0SEND_F6 0F7
  0SEND_F7 0RECV_B0 0B0 0RECV_B1 0B1 0RECV_B2 0B2 0RECV_B3 0B3 0RECV_B4 0B4 0RECV_B5 0B5 0RECV_B6
  0B6 0RECV_B7 0B7 0OPT
class 1
  1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 1RECV_F2 1F2 1SEND_F2 1RECV_F3 1F3 1SEND_F3 1RECV_F4
  1F4 1SEND_F4 1RECV_F5 1F5 1SEND_F5 1RECV_F6 1F6 1SEND_F6 1RECV_F7 1F7 1SEND_F7 1RECV_B0 1B0
  1SEND_B0 1RECV_B1 1B1 1SEND_B1 1RECV_B2 1B2 1SEND_B2 1RECV_B3 1B3 1SEND_B3 1RECV_B4 1B4 1SEND_B4
  1RECV_B5 1B5 1SEND_B5 1RECV_B6 1B6 1SEND_B6 1RECV_B7 1B7 1SEND_B7 1OPT
class 2
  2RECV_F0 2F0 2SEND_F0 2RECV_F1 2F1 2SEND_F1 2RECV_F2 2F2 2SEND_F2 2RECV_F3 2F3 2SEND_F3 2RECV_F4
  2F4 2SEND_F4 2RECV_F5 2F5 2SEND_F5 2RECV_F6 2F6 2SEND_F6 2RECV_F7 2F7 2SEND_F7 2RECV_B0 2B0
  2SEND_B0 2RECV_B1 2B1 2SEND_B1 2RECV_B2 2B2 2SEND_B2 2RECV_B3 2B3 2SEND_B3 2RECV_B4 2B4 2SEND_B4
  2RECV_B5 2B5 2SEND_B5 2RECV_B6 2B6 2SEND_B6 2RECV_B7 2B7 2SEND_B7 2OPT
class 3
  3RECV_F0 3F0 3RECV_F1 3F1 3RECV_F2 3F2 3RECV_F3 3F3 3RECV_F4 3F4 3RECV_F5 3F5 3RECV_F6 3F6
  3RECV_F7 3F7 3B0 3SEND_B0 3B1 3SEND_B1 3B2 3SEND_B2 3B3 3SEND_B3 3B4 3SEND_B4 3B5 3SEND_B5 3B6
  3SEND_B6 3B7 3SEND_B7 3OPT
"""


def lowered() -> Program:
    return lower(GRAPH, PLAN)


CASE = Case(
    name="gpipe",
    graph=GRAPH,
    plan=PLAN,
    program=PROGRAM,
    lowered=lowered,
    busy={"F": 1, "B": 2, "*": 0},
    sizes={"S": 1, "X": 0, "Y": 0, "DX": 0, "DY": 0, "P": 0, "G": 0},
    expected=Expected(
        makespan=33,
        period=33,
        exposed={r: 0 for r in range(4)},
        idle={0: 9, 1: 9, 2: 9, 3: 9},
        issue_peaks={r: Peak(size=8, action=f"{r}F7") for r in range(4)},
        time_peaks={r: Peak(size=8, action=f"{r}F7", moment=7 + r) for r in range(4)},
        ends={"3:3F7": 11, "3:3B0": 13, "0:0B0": 19, "0:0B7": 33},
    ),
)
