"""ZB-H1, p 4, m 8, F = I = W = 1, messages free; from a plan with pp 4.

The backward is split: I (input gradient) is what the rank before waits for, W (weight gradient) can wait. Rank 3
starts at 3, works 8·3 = 24 without a break, with its last W at the end: I7 ends at 23, three steps earlier than a
whole backward would. Gradients pass up at 1 a hop instead of 2; rank 0 ends its last I and W at 27 = 24 + (p - 1)(F +
I - W). Every rank works 24 and waits 3, where 1F1B with B = 2 waits 9 in 33. Rank r delays W by r microbatches, so all
ranks hold 4 activations (S, size 1, freed by W), which is 1F1B's rank 0. It has four once F3 runs: rank 0 at 3, in its
warm-up; the others by turns of F and I after their first I, which starts at 4 on rank 3 and one later on each rank
before: rank 3 F1 5, I1, F2 7, I2, F3 9; rank 2 F2 6, I1, F3 8; rank 1 F3 7. Source: Qi et al. 2023, "Zero bubble
pipeline parallelism", section 2.2: a third of 1F1B's bubble at its peak memory.
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
    schedule=Schedule(name="zero_bubble_h1", num_microbatches=8),
    optimizer=Optimizer(clip=False),
)

PROGRAM = """\
gnomon.program/1
stages 4
units 8
class 0
  0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0F3 0SEND_F3 0RECV_B0 0I0 0W0 0F4 0SEND_F4 0RECV_B1 0I1 0W1
  0F5 0SEND_F5 0RECV_B2 0I2 0W2 0F6 0SEND_F6 0RECV_B3 0I3 0W3 0F7 0SEND_F7 0RECV_B4 0I4 0W4 0RECV_B5
  0I5 0W5 0RECV_B6 0I6 0W6 0RECV_B7 0I7 0W7 0OPT
class 1
  1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 1RECV_F2 1F2 1SEND_F2 1RECV_B0 1I0 1SEND_B0 1RECV_F3
  1F3 1SEND_F3 1RECV_B1 1I1 1SEND_B1 1W0 1RECV_F4 1F4 1SEND_F4 1RECV_B2 1I2 1SEND_B2 1W1 1RECV_F5
  1F5 1SEND_F5 1RECV_B3 1I3 1SEND_B3 1W2 1RECV_F6 1F6 1SEND_F6 1RECV_B4 1I4 1SEND_B4 1W3 1RECV_F7
  1F7 1SEND_F7 1RECV_B5 1I5 1SEND_B5 1W4 1RECV_B6 1I6 1SEND_B6 1W5 1RECV_B7 1I7 1SEND_B7 1W6 1W7
  1OPT
class 2
  2RECV_F0 2F0 2SEND_F0 2RECV_F1 2F1 2SEND_F1 2RECV_B0 2I0 2SEND_B0 2RECV_F2 2F2 2SEND_F2 2RECV_B1
  2I1 2SEND_B1 2RECV_F3 2F3 2SEND_F3 2RECV_B2 2I2 2SEND_B2 2W0 2RECV_F4 2F4 2SEND_F4 2RECV_B3 2I3
  2SEND_B3 2W1 2RECV_F5 2F5 2SEND_F5 2RECV_B4 2I4 2SEND_B4 2W2 2RECV_F6 2F6 2SEND_F6 2RECV_B5 2I5
  2SEND_B5 2W3 2RECV_F7 2F7 2SEND_F7 2RECV_B6 2I6 2SEND_B6 2W4 2RECV_B7 2I7 2SEND_B7 2W5 2W6 2W7
  2OPT
class 3
  3RECV_F0 3F0 3I0 3SEND_B0 3RECV_F1 3F1 3I1 3SEND_B1 3RECV_F2 3F2 3I2 3SEND_B2 3RECV_F3 3F3 3I3
  3SEND_B3 3W0 3RECV_F4 3F4 3I4 3SEND_B4 3W1 3RECV_F5 3F5 3I5 3SEND_B5 3W2 3RECV_F6 3F6 3I6 3SEND_B6
  3W3 3RECV_F7 3F7 3I7 3SEND_B7 3W4 3W5 3W6 3W7 3OPT
"""


def lowered() -> Program:
    return lower(GRAPH, PLAN)


CASE = Case(
    name="zero_bubble_h1",
    graph=GRAPH,
    plan=PLAN,
    program=PROGRAM,
    lowered=lowered,
    busy={"F": 1, "I": 1, "W": 1, "*": 0},
    sizes={"S": 1, "X": 0, "Y": 0, "DX": 0, "DY": 0, "P": 0, "G": 0},
    expected=Expected(
        makespan=27,
        period=27,
        exposed={r: 0 for r in range(4)},
        idle={0: 3, 1: 3, 2: 3, 3: 3},
        issue_peaks={r: Peak(size=4, action=f"{r}F3") for r in range(4)},
        time_peaks={r: Peak(size=4, action=f"{r}F3", moment=moment) for r, moment in enumerate((3, 7, 8, 9))},
        ends={"3:3I0": 5, "3:3I7": 23, "3:3W7": 27, "0:0I0": 8, "0:0W7": 27},
    ),
)
