"""A plan whose stages are replicated unevenly, 3 : 1 (DAPPLE), with the reshard between them; m 4.

Stage 0 is three times the work of stage 1: on one rank F 3, B 6 a microbatch against F 1, B 2. It gets three replicas,
each of which takes one of a microbatch's three sequences, F 1 and B 2: both stages then work at the same pace. Between
them each replica sends its sequence to the one rank of stage 1, and gets its gradient back. A sequence takes .25 on a
link. Three senders meet at one receiver: its link carries three sequences, .75, and the message (rendezvous: send and
receive are one) lasts as long as its longer end. Bytes are conserved: 3 senders · .25 = 1 receiver · .75.

    stage 0  F0 0-1  F1 1-2  B0 5.5-7.5  F2 7.5-8.5  B1 8.5-10.5  F3 10.5-11.5  B2 13-15  B3 16-18  AR -19  OPT -19.5
    stage 1  F0 1.75-2.75  B0 -4.75  F1 -5.75  B1 -7.75  F2 9.25-10.25  B2 -12.25  F3 12.25-13.25  B3 -15.25  OPT -15.75

Microbatch 0: forward 1, message .75, forward and backward 3, message .75: its gradient is back at 5.5. Rank 1 then has
microbatch 1, sent under it, and has to wait for microbatch 2 until 8.5 + .75: with two in flight 1F1B hides no message
both ways, so that the two links show once in two turns. Of its idle time rank 0 waits .75 for each of the gradients of
microbatches 0, 2 and 3 on the link, and 1 for the all-reduce: 3.25 exposed; the rest is for rank 1's compute. Rank 1
waits .75 for microbatches 0 and 2 on the link, and after its end for rank 0: its last gradient's .25 and the
all-reduce: 2.75.

Two microbatches are in flight on rank 0 from F1 on, one on rank 1 from F0 on (S, size 1). Gradients are averaged over
the three replicas of stage 0 only (AR 1), then updated (.5); stage 1 has no one to ask. Source: DAPPLE (Fan et al.
2021), section 4: split and concatenate between stages of different replication.
"""

from __future__ import annotations

from fractions import Fraction

from case_format import Case, Expected, Peak

from gnomon.lowering import lower
from gnomon.models.gpt import GptConfig, gpt
from gnomon.plans import Mesh, Optimizer, Plan, Schedule, Stage, Workload
from gnomon.program import Program
from gnomon.sharding import deal, reshard

GRAPH = gpt(
    GptConfig(name="four", num_layers=4, hidden_size=64, num_heads=4, vocab_size=256, max_positions=32, tied=False)
)
PLAN = Plan(
    stages=(
        Stage(calls=("embed", "layers[0:3]"), mesh=Mesh(dp_replicate=3)),
        Stage(calls=("layers[3]", "head")),
    ),
    schedule=Schedule(num_microbatches=4),
    optimizer=Optimizer(clip=False),
)
WORKLOAD = Workload(global_batch_size=12, seq_len=32)
PROGRAM = """\
gnomon.program/1
stages 2
unit 0 = 0:0:32 1:0:32 2:0:32 weight 0.25
unit 1 = 3:0:32 4:0:32 5:0:32 weight 0.25
unit 2 = 6:0:32 7:0:32 8:0:32 weight 0.25
unit 3 = 9:0:32 10:0:32 11:0:32 weight 0.25
comm fwd rendezvous
comm bwd rendezvous
class 0 count 3
  0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0F2 0SEND_F2 0RECV_B1 0B1 0F3 0SEND_F3 0RECV_B2 0B2
  0RECV_B3 0B3 0AR 0OPT
class 1
  1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1RECV_F2 1F2 1B2 1SEND_B2 1RECV_F3 1F3 1B3
  1SEND_B3 1OPT
"""


def lowered() -> Program:
    return lower(GRAPH, PLAN, workload=WORKLOAD, messages="rendezvous")


def a_third_from_each_replica() -> None:
    messages = reshard(*(deal(3, PLAN.stage_mesh(stage).data_ranks) for stage in (0, 1)))
    assert [(m.source, m.target, m.rows) for m in messages] == [(r, 0, Fraction(1)) for r in range(3)]


CASE = Case(
    name="uneven_replicas",
    graph=GRAPH,
    plan=PLAN,
    program=PROGRAM,
    lowered=lowered,
    busy={
        "F": 1,
        "B": 2,
        "0SEND_F": 0.25,
        "1RECV_F": 0.75,
        "1SEND_B": 0.75,
        "0RECV_B": 0.25,
        "AR": 1,
        "OPT": 0.5,
    },
    sizes={"S": 1, "X": 0, "Y": 0, "DX": 0, "DY": 0, "P": 0, "G": 0},
    expected=Expected(
        makespan=19.5,
        period=19.5,
        idle={0: 7, 1: 7},
        exposed={0: 3.25, 1: 2.75},
        ends={
            "0:0SEND_F0": 1.75,
            "1:1RECV_F0": 1.75,
            "1:1B0": 4.75,
            "0:0B0": 7.5,
            "1:1F2": 10.25,
            "0:0B3": 18,
            "0:0AR": 19,
        },
        issue_peaks={0: Peak(size=2, action="0F1"), 1: Peak(size=1, action="1F0")},
        time_peaks={0: Peak(size=2, action="0F1", moment=1), 1: Peak(size=1, action="1F0", moment=1.75)},
    ),
    also=(a_third_from_each_replica,),
)
