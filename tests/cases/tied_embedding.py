"""1F1B, p 4, m 8, of a model with an embedding before its layers and a head after them, whose weights are tied.

The plan has pp 4; the graph's embedding goes with layer 0, its head with layer 3, and one weight is in both, so that
ranks 0 and 3 add up its gradients in one all-reduce (`0AR/embedding` and `3AR/embedding`, one group: they start and
end together) after their last backwards and before their updates. Messages are free.

Heavy head alone: F 1, B 2; rank 0 with the embedding 1.25 and 2.25, rank 3 with the head 1.5 and 3. Rank 3 gets its
first microbatch at 1.25 + 1 + 1 = 3.25, is the slowest and never waits: 8·4.5 = 36; its last gradient takes 2 + 2 +
2.25 = 6.25 to rank 0. 3.25 + 36 + 6.25 = 45.5. Others wait for it in every turn: rank 0 works 8·3.5 = 28 and waits
17.5. Rank r holds most activations (S, size 1) when F of microbatch 3 - r starts: 3·1.25, 1.25·3, 2.25 + 1.25, 3.25.
Reduction alone, all stages alike: rank 0 ends its last backward at 33 (case one_f_one_b), then the all-reduce takes 1
and the update 0.5: 34.5. Rank 3 ended at 27, and its AR waits for rank 0 until 33. Nothing hides that 1 on either
rank; ranks 1 and 2, done at 31.5 and 29.5, wait through it for the end of the step. Both: 45.5 + 1 + 0.5 = 47.
"""

from __future__ import annotations

from case_format import Case, Expected, Peak

from gnomon.lowering import lower, tied_stages
from gnomon.models.gpt import GptConfig, gpt
from gnomon.plans import Mesh, Optimizer, Plan, Schedule, stage_layers
from gnomon.program import Program

GRAPH = gpt(GptConfig(name="four", num_layers=4, hidden_size=64, num_heads=4, vocab_size=256, max_positions=32))
PLAN = Plan(mesh=Mesh(pp=4), schedule=Schedule(name="one_f_one_b", num_microbatches=8), optimizer=Optimizer(clip=False))

PROGRAM = """\
gnomon.program/1
stages 4
units 8
comm embedding collective
class 0
  0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0F3 0SEND_F3 0RECV_B0 0B0 0F4 0SEND_F4 0RECV_B1 0B1 0F5
  0SEND_F5 0RECV_B2 0B2 0F6 0SEND_F6 0RECV_B3 0B3 0F7 0SEND_F7 0RECV_B4 0B4 0RECV_B5 0B5 0RECV_B6
  0B6 0RECV_B7 0B7 0AR/embedding:embedding#0 0OPT
class 1
  1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 1RECV_F2 1F2 1SEND_F2 1RECV_B0 1B0 1SEND_B0 1RECV_F3
  1F3 1SEND_F3 1RECV_B1 1B1 1SEND_B1 1RECV_F4 1F4 1SEND_F4 1RECV_B2 1B2 1SEND_B2 1RECV_F5 1F5
  1SEND_F5 1RECV_B3 1B3 1SEND_B3 1RECV_F6 1F6 1SEND_F6 1RECV_B4 1B4 1SEND_B4 1RECV_F7 1F7 1SEND_F7
  1RECV_B5 1B5 1SEND_B5 1RECV_B6 1B6 1SEND_B6 1RECV_B7 1B7 1SEND_B7 1OPT
class 2
  2RECV_F0 2F0 2SEND_F0 2RECV_F1 2F1 2SEND_F1 2RECV_B0 2B0 2SEND_B0 2RECV_F2 2F2 2SEND_F2 2RECV_B1
  2B1 2SEND_B1 2RECV_F3 2F3 2SEND_F3 2RECV_B2 2B2 2SEND_B2 2RECV_F4 2F4 2SEND_F4 2RECV_B3 2B3
  2SEND_B3 2RECV_F5 2F5 2SEND_F5 2RECV_B4 2B4 2SEND_B4 2RECV_F6 2F6 2SEND_F6 2RECV_B5 2B5 2SEND_B5
  2RECV_F7 2F7 2SEND_F7 2RECV_B6 2B6 2SEND_B6 2RECV_B7 2B7 2SEND_B7 2OPT
class 3
  3RECV_F0 3F0 3B0 3SEND_B0 3RECV_F1 3F1 3B1 3SEND_B1 3RECV_F2 3F2 3B2 3SEND_B2 3RECV_F3 3F3 3B3
  3SEND_B3 3RECV_F4 3F4 3B4 3SEND_B4 3RECV_F5 3F5 3B5 3SEND_B5 3RECV_F6 3F6 3B6 3SEND_B6 3RECV_F7
  3F7 3B7 3SEND_B7 3AR/embedding:embedding#0 3OPT
"""


def lowered() -> Program:
    return lower(GRAPH, PLAN)


def tied_from_the_graph() -> None:
    assert tied_stages(GRAPH, stage_layers(PLAN, GRAPH)) == ((0, 3),)


SIZES = {"S": 1, "X": 0, "Y": 0, "DX": 0, "DY": 0, "P": 0, "G": 0}
HEAVY = {"F": 1, "B": 2, "0F": 1.25, "0B": 2.25, "3F": 1.5, "3B": 3}
CASES = (
    Case(
        name="tied_embedding-heavy-head",
        graph=GRAPH,
        plan=PLAN,
        program=PROGRAM,
        lowered=lowered,
        busy={**HEAVY, "*": 0},
        sizes=SIZES,
        expected=Expected(
            makespan=45.5,
            period=45.5,
            idle={0: 17.5, 1: 21.5, 2: 21.5, 3: 9.5},
            exposed={r: 0 for r in range(4)},
            issue_peaks={r: Peak(size=4 - r, action=f"{r}F{3 - r}") for r in range(4)},
            time_peaks={r: Peak(size=4 - r, moment=moment) for r, moment in enumerate((3.75, 3.75, 3.5, 3.25))},
            ends={"3:3F0": 4.75, "3:3B7": 39.25, "0:0B7": 45.5},
        ),
        also=(tied_from_the_graph,),
    ),
    Case(
        name="tied_embedding-reduction",
        graph=GRAPH,
        plan=PLAN,
        program=PROGRAM,
        lowered=lowered,
        busy={"F": 1, "B": 2, "embedding": 1, "OPT": 0.5, "*": 0},
        expected=Expected(
            makespan=34.5,
            period=34.5,
            exposed={r: 1 for r in range(4)},
            idle={0: 10, 1: 10, 2: 10, 3: 10},
            ends={"0:0AR": 34, "3:3AR": 34, "1:1OPT": 31.5, "0:0OPT": 34.5, "3:3OPT": 34.5},
        ),
    ),
    Case(
        name="tied_embedding-both",
        graph=GRAPH,
        plan=PLAN,
        program=PROGRAM,
        lowered=lowered,
        busy={**HEAVY, "embedding": 1, "OPT": 0.5, "*": 0},
        expected=Expected(
            makespan=47, period=47, exposed={r: 1 for r in range(4)}, ends={"0:0AR": 46.5, "3:3AR": 46.5}
        ),
    ),
)
