"""DualPipe-V, p 2, m 4, with composite actions: F 1, I 1, W 1, B 2 a stage; a forward and a backward together take 3.

From a plan with pp 2, two stages a rank and placement v.
`(0F3&3B1)` is one action: microbatch 3 goes forward in stage 0 while microbatch 1 goes backward in stage 3, and each
one's communication hides behind the other's compute; here they take as long as one after the other (F + B), so that
the bubble is the order's alone. Rank 0: 0F0 0F1 going down (phase 1), 0F2 3F0 (2), 3I0 3W0 3F1 (3), one steady turn of
two composites from 7 to 14 (4), then the drain. It works 4·2·3 = 24 and waits (p - 1)(F&B + B - 3W) = 3 + 2 - 3 = 2,
once for rank 1's first backward and once for its composites: 26. The most activations are 2p + 1 = 5 stages' (S, size
0.5): one more than ZB-V, because a composite holds its forward's beside its backward's: rank 0 from its first
composite on, at 7, rank 1 at 1F2, 1 + 4. Source: DeepSeek-V3 report, section 3.2.1, table 2, with PP = 2p stages; cut
in half (V) by Sea AI Lab. The order is that of torch 2.13's ScheduleDualPipeV.
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
    schedule=Schedule(name="dualpipe_v", virtual_stages=2, placement="v", num_microbatches=4),
    optimizer=Optimizer(clip=False),
)

PROGRAM = """\
gnomon.program/1
stages 4
units 4
class 0
  0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 3RECV_F0 3F0 3I0 3SEND_B0 3W0 3RECV_F1 3F1 (0F3&3B1)
  0SEND_F3 3SEND_B1 3RECV_F2 0RECV_B0 (3F2&0B0) 3B2 3SEND_B2 3RECV_F3 0RECV_B1 (3F3&0B1) 3B3
  3SEND_B3 0RECV_B2 0I2 0W2 0RECV_B3 0I3 0W3 0OPT 3OPT
class 1
  1RECV_F0 1F0 2F0 2SEND_F0 1RECV_F1 1F1 2F1 2SEND_F1 1RECV_F2 1F2 2RECV_B0 2B0 (2F2&1B0) 2SEND_F2
  1SEND_B0 1RECV_F3 2RECV_B1 (1F3&2B1) (2F3&1B1) 2SEND_F3 1SEND_B1 2RECV_B2 2B2 1B2 1SEND_B2
  2RECV_B3 2I3 1I3 1SEND_B3 2W3 1W3 1OPT 2OPT
"""


def lowered() -> Program:
    return lower(GRAPH, PLAN)


CASE = Case(
    name="dualpipe_v",
    graph=GRAPH,
    plan=PLAN,
    program=PROGRAM,
    lowered=lowered,
    busy={"F": 1, "I": 1, "W": 1, "B": 2, "F&B": 3, "*": 0},
    sizes={"S": 0.5, "X": 0, "Y": 0, "DX": 0, "DY": 0, "P": 0, "G": 0},
    expected=Expected(
        makespan=26,
        period=26,
        exposed={0: 0, 1: 0},
        idle={0: 2, 1: 2},
        issue_peaks={0: Peak(size=2.5, action="0F3"), 1: Peak(size=2.5, action="1F2")},
        time_peaks={0: Peak(size=2.5, moment=7), 1: Peak(size=2.5, moment=5)},
        ends={"0:0F3": 10, "0:3B1": 10, "0:3F2": 14, "0:0B0": 14, "0:0W3": 26},
    ),
)
