"""V-Half, p 4, m 8: half of 1F1B's bubble at little more than half of its memory; F = I = W = 1, messages free.

From a plan with pp 4, two stages a rank and placement v.
A microbatch goes down ranks 0 … 3 (stages 0 … 3, a cell a rank), back up (4 … 7, two cells a rank), and its gradient
the same way; a microbatch starts every 6 cells, so that each rank's six actions fill the six cells. On rank 0: F of
stage 0 in cell 0, of stage 7 in 3 + 4 + 2·3 = 13, I of stage 7 two cells after that in 15, of stage 0 in 15 + 3 + 2 +
6 = 26. Idle cells before the pipeline is full are left out by the order of play, which gives 6·8 + 8 = 56: a bubble of
3p - 4 = 8, where 1F1B with B = 2 on the same stages has (p - 1)·6 = 18. The most activations (S, size 0.5) are those of
p + 3 = 7 stages, 3.5 of full size, on ranks 1 and 3 and of 6 on the others; 1F1B has 4 = 2p stages. (The constant 3
weighs much at p 4; at p 16 it is 19 of 32.) When they are first reached, stepping through the first actions:

    rank 0   0F0 0F1 0F2 0-3   7F0 7-8   7I0 7W0 0F3 7F1 7I1 7W1 0F4 -15   7F2 15
    rank 1   1F0 1F1 1-3   6F0 6-7   1F2 7-8   6I0 6F1 9-11   1F3 6W0 6I1 6F2 1I0 -16   1F4 16
    rank 2   2F0 2F1 2-4   5F0 5-6   2F2 8-9   5F1 5I0 5W0 9-12   2F3 12-13   5F2 13
    rank 3   3F0 4F0 3F1 4F1 3-7   3F2 9-10   4I0 11-12   4F2 3I0 -14   3F3 14

Source: Qi et al. 2024, "Pipeline parallelism with controllable memory"; distances found by search, see the schedule.
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
    schedule=Schedule(name="v_half", virtual_stages=2, placement="v", num_microbatches=8),
    optimizer=Optimizer(clip=False),
)

PROGRAM = """\
gnomon.program/1
stages 8
units 8
class 0
  0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 7RECV_F0 7F0 7I0 7SEND_B0 7W0 0F3 0SEND_F3 7RECV_F1 7F1 7I1
  7SEND_B1 7W1 0F4 0SEND_F4 7RECV_F2 7F2 0RECV_B0 0I0 7I2 7SEND_B2 7W2 0W0 0F5 0SEND_F5 7RECV_F3 7F3
  0RECV_B1 0I1 7I3 7SEND_B3 7W3 0W1 0F6 0SEND_F6 7RECV_F4 7F4 0RECV_B2 0I2 7I4 7SEND_B4 7W4 0W2 0F7
  0SEND_F7 7RECV_F5 7F5 0RECV_B3 0I3 7I5 7SEND_B5 7W5 0W3 7RECV_F6 7F6 0RECV_B4 0I4 7I6 7SEND_B6 7W6
  0W4 7RECV_F7 7F7 0RECV_B5 0I5 7I7 7SEND_B7 7W7 0W5 0RECV_B6 0I6 0W6 0RECV_B7 0I7 0W7 0OPT 7OPT
class 1
  1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 6RECV_F0 6F0 6SEND_F0 1RECV_F2 1F2 1SEND_F2 6RECV_B0
  6I0 6SEND_B0 6RECV_F1 6F1 6SEND_F1 1RECV_F3 1F3 1SEND_F3 6W0 6RECV_B1 6I1 6SEND_B1 6RECV_F2 6F2
  6SEND_F2 1RECV_B0 1I0 1SEND_B0 1RECV_F4 1F4 1SEND_F4 6W1 1W0 6RECV_B2 6I2 6SEND_B2 6RECV_F3 6F3
  6SEND_F3 1RECV_B1 1I1 1SEND_B1 1RECV_F5 1F5 1SEND_F5 6W2 1W1 6RECV_B3 6I3 6SEND_B3 6RECV_F4 6F4
  6SEND_F4 1RECV_B2 1I2 1SEND_B2 1RECV_F6 1F6 1SEND_F6 6W3 1W2 6RECV_B4 6I4 6SEND_B4 6RECV_F5 6F5
  6SEND_F5 1RECV_B3 1I3 1SEND_B3 1RECV_F7 1F7 1SEND_F7 6W4 1W3 6RECV_B5 6I5 6SEND_B5 6RECV_F6 6F6
  6SEND_F6 1RECV_B4 1I4 1SEND_B4 6W5 1W4 6RECV_B6 6I6 6SEND_B6 6RECV_F7 6F7 6SEND_F7 1RECV_B5 1I5
  1SEND_B5 6W6 1W5 6RECV_B7 6I7 6SEND_B7 1RECV_B6 1I6 1SEND_B6 6W7 1W6 1RECV_B7 1I7 1SEND_B7 1W7
  1OPT 6OPT
class 2
  2RECV_F0 2F0 2SEND_F0 2RECV_F1 2F1 2SEND_F1 5RECV_F0 5F0 5SEND_F0 2RECV_F2 2F2 2SEND_F2 5RECV_F1
  5F1 5SEND_F1 5RECV_B0 5I0 5SEND_B0 5W0 2RECV_F3 2F3 2SEND_F3 5RECV_F2 5F2 5SEND_F2 2RECV_B0 2I0
  2SEND_B0 5RECV_B1 5I1 5SEND_B1 5W1 2W0 2RECV_F4 2F4 2SEND_F4 5RECV_F3 5F3 5SEND_F3 2RECV_B1 2I1
  2SEND_B1 5RECV_B2 5I2 5SEND_B2 5W2 2W1 2RECV_F5 2F5 2SEND_F5 5RECV_F4 5F4 5SEND_F4 2RECV_B2 2I2
  2SEND_B2 5RECV_B3 5I3 5SEND_B3 5W3 2W2 2RECV_F6 2F6 2SEND_F6 5RECV_F5 5F5 5SEND_F5 2RECV_B3 2I3
  2SEND_B3 5RECV_B4 5I4 5SEND_B4 5W4 2W3 2RECV_F7 2F7 2SEND_F7 5RECV_F6 5F6 5SEND_F6 2RECV_B4 2I4
  2SEND_B4 5RECV_B5 5I5 5SEND_B5 5W5 2W4 5RECV_F7 5F7 5SEND_F7 2RECV_B5 2I5 2SEND_B5 5RECV_B6 5I6
  5SEND_B6 5W6 2W5 2RECV_B6 2I6 2SEND_B6 5RECV_B7 5I7 5SEND_B7 5W7 2W6 2RECV_B7 2I7 2SEND_B7 2W7
  2OPT 5OPT
class 3
  3RECV_F0 3F0 4F0 4SEND_F0 3RECV_F1 3F1 4F1 4SEND_F1 3RECV_F2 3F2 4RECV_B0 4I0 4F2 4SEND_F2 3I0
  3SEND_B0 3RECV_F3 3F3 4W0 3W0 4RECV_B1 4I1 4F3 4SEND_F3 3I1 3SEND_B1 3RECV_F4 3F4 4W1 3W1 4RECV_B2
  4I2 4F4 4SEND_F4 3I2 3SEND_B2 3RECV_F5 3F5 4W2 3W2 4RECV_B3 4I3 4F5 4SEND_F5 3I3 3SEND_B3 3RECV_F6
  3F6 4W3 3W3 4RECV_B4 4I4 4F6 4SEND_F6 3I4 3SEND_B4 3RECV_F7 3F7 4W4 3W4 4RECV_B5 4I5 4F7 4SEND_F7
  3I5 3SEND_B5 4W5 3W5 4RECV_B6 4I6 3I6 3SEND_B6 4W6 3W6 4RECV_B7 4I7 3I7 3SEND_B7 4W7 3W7 3OPT 4OPT
"""


def lowered() -> Program:
    return lower(GRAPH, PLAN)


CASE = Case(
    name="v_half",
    graph=GRAPH,
    plan=PLAN,
    program=PROGRAM,
    lowered=lowered,
    busy={"F": 1, "I": 1, "W": 1, "*": 0},
    sizes={"S": 0.5, "X": 0, "Y": 0, "DX": 0, "DY": 0, "P": 0, "G": 0},
    expected=Expected(
        makespan=56,
        period=56,
        exposed={r: 0 for r in range(4)},
        idle={0: 8, 1: 8, 2: 8, 3: 8},
        issue_peaks={
            0: Peak(size=3, action="7F2"),
            1: Peak(size=3.5, action="1F4"),
            2: Peak(size=3, action="5F2"),
            3: Peak(size=3.5, action="3F3"),
        },
        time_peaks={
            0: Peak(size=3, action="7F2", moment=15),
            1: Peak(size=3.5, action="1F4", moment=16),
            2: Peak(size=3, action="5F2", moment=13),
            3: Peak(size=3.5, action="3F3", moment=14),
        },
        ends={"0:7F0": 8, "0:7I0": 9, "0:0I0": 17, "0:0W7": 56},
    ),
)
