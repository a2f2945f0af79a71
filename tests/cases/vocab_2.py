"""1F1B with the vocabulary divided over p 2 ranks, algorithm 2, m 3; F = 1, B = 2, S = T = 0.5, exchanges free.

Each rank has half of the head and half of the embedding: S (logits and the half's gradient of the hidden states) and T
(gradient of the weights) of every microbatch, where plain 1F1B would have the whole head, 2 a microbatch, on rank 1.
Rank 1 ends F0 at 2; all ranks get its hidden states (CAST_H0), run S0 until 2.5 and add up their parts (SUM_V0), which
gives B0 its gradient. That is an exchange later than plain 1F1B has it, so rank 1 runs F1 meanwhile, and B0 from 3.5 to
5.5. Then each turn on it is T, S, F, B (the last ones S, B) without a break until B2 ends at 12.5. Rank 0 gets the
gradients at 5.5, 9.5 and 12.5 and ends at 14.5 + T2 = 15: it works 3·(F + B + S + T) = 12 and waits (p - 1)(F + B) = 3,
what 1F1B waits too. Rank r holds p - r + 1 microbatches, one more than under 1F1B.
Source: Yeung et al. 2024, "Balancing pipeline parallelism with vocabulary parallelism", algorithm 2.
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
PLAN = Plan(
    mesh=Mesh(pp=2),
    schedule=Schedule(num_microbatches=3, vocabulary="vocab_2"),
    optimizer=Optimizer(clip=False),
)

PROGRAM = """\
gnomon.program/1
stages 2
units 3
buffer HX step per unit
buffer VS step per unit
buffer VL step per unit
buffer HG step per unit
buffer EX step per unit
buffer EG step per unit
kind S on compute: read P, read HX, write VS, write VL
kind T on compute: read P, consume HX, consume VS, consume VL, accumulate G
kind EMBED on compute: read P, write EX
kind EGRAD on compute: consume EG, accumulate G
kind CAST_H on vocabulary comm vocabulary: write HX
kind SUM_V on vocabulary comm vocabulary: accumulate VL
kind SUM_E on vocabulary comm vocabulary: consume EX
kind CAST_E on vocabulary comm vocabulary: write EG
comm vocabulary collective
comm fwd buffered
comm bwd buffered
comm dp collective
class 0
  0EMBED0 0SUM_E0#6{accumulate EX 0 0} 0EMBED1 0SUM_E1#7{accumulate EX 0 1} 0F0{+ read EX 0 0}
  0SEND_F0 0EMBED2 0SUM_E2#8{accumulate EX 0 2} 0F1{+ read EX 0 1} 0SEND_F1 0CAST_H0#0 0S0 0SUM_V0#3
  0F2{+ read EX 0 2} 0SEND_F2 0CAST_H1#1 0T0 0S1 0SUM_V1#4 0RECV_B0
  0B0{+ consume EX 0 0, write EG 0 0} 0CAST_H2#2 0T1 0S2 0SUM_V2#5 0RECV_B1
  0B1{+ consume EX 0 1, write EG 0 1} 0CAST_E0#9{read EG 0 0} 0EGRAD0 0RECV_B2
  0B2{+ consume EX 0 2, write EG 0 2} 0CAST_E1#10{read EG 0 1} 0EGRAD1 0CAST_E2#11{read EG 0 2}
  0EGRAD2 0T2 0OPT
class 1
  1EMBED0 1SUM_E0#6 1EMBED1 1SUM_E1#7 1EMBED2 1SUM_E2#8 1RECV_F0 1F0{+ write HX 1 0}
  1CAST_H0#0{read HX 1 0} 1S0 1SUM_V0#3{+ write HG 1 0} 1RECV_F1 1F1{+ write HX 1 1}
  1B0{+ consume HG 1 0} 1SEND_B0 1CAST_H1#1{read HX 1 1} 1T0 1S1 1SUM_V1#4{+ write HG 1 1} 1RECV_F2
  1F2{+ write HX 1 2} 1B1{+ consume HG 1 1} 1SEND_B1 1CAST_H2#2{read HX 1 2} 1T1 1S2
  1SUM_V2#5{+ write HG 1 2} 1B2{+ consume HG 1 2} 1SEND_B2 1CAST_E0#9 1EGRAD0 1CAST_E1#10 1EGRAD1
  1CAST_E2#11 1EGRAD2 1T2 1OPT
"""


def lowered() -> Program:
    return lower(GRAPH, PLAN)


SIZES = dict.fromkeys(("X", "Y", "DX", "DY", "P", "G", "HX", "VS", "VL", "HG", "EX", "EG"), 0.0)

CASE = Case(
    name="vocab_2",
    graph=GRAPH,
    plan=PLAN,
    program=PROGRAM,
    lowered=lowered,
    busy={"F": 1, "B": 2, "S": 0.5, "T": 0.5, "*": 0},
    sizes={"S": 1, **SIZES},
    expected=Expected(
        makespan=15,
        idle={0: 3, 1: 3},
        issue_peaks={0: Peak(size=3, action="0F2"), 1: Peak(size=2, action="1F1")},
        ends={"1:1F0": 2, "0:0S0": 2.5, "1:1B0": 5.5, "0:0B0": 7.5, "1:1B2": 12.5, "0:0B2": 14.5, "0:0T2": 15},
    ),
)
