"""A U-Net in a pipeline, p 4, m 4, F 1, B 2, messages free: what the way down keeps for the way up skips stages.

unet-tiny (8 x 8 images, channels 8 and 16) in four stages: stage 0 goes down at full resolution, 1 at half of it, 2
up at half, 3 up at full. One image in bf16: stage 0 hands `conv_in.y` and `down_0_0.y` (8·8·8 = 512 numbers each) and
the time embedding (32) to stage 3, 1056 · 2 = 2112 bytes, and the embedding alone to stage 2, 64 bytes. Other skips
(those of stage 1) go to the next stage with its input. Sizes here are those of skips alone; the rest counts 0.
Gradients weigh the same.

1F1B is not changed: (m + p - 1)·3 = 21. A skip is on its way at u + 1, when stage 0 is through with microbatch u, but
stage 3 takes its first microbatch from 3 to 4: at 3 it holds the skips of 0, 1 and 2; at 4 that of 3 comes as that of 0
goes, and the backward of 0 begins to make its gradient: 4 · 2112 = 8448. Stage 2 holds two from 2 on, and at 6 two and
a gradient, 192. In the order of issue, where a receive stands next to its forward, each holds just one.
Stage 0: forwards hold both skips until they are sent, 2176. Gradients of microbatch u come from stage 3 at 6 + 3u and
from stage 2 at 8 + 3u and are used from 10 + 3u to 12 + 3u: at 11 two of each are there, 2 · 2176 = 4352.

In a V on two ranks (ZB-V, m 3, F = I = W = 1) stages 0 and 3 are on rank 0: the large skip is handed over there,
without a message; only the 64 bytes to stage 2 travel. Rank 0 forwards three microbatches in stage 0 before one in
stage 3: three skips and the 64 bytes being sent, 6400, from 2 on. 6m + 1 = 19 in a step from rest, period 6m = 18
(case zero_bubble_v).
Source: by hand; the model is DDPM's (Ho et al. 2020), made small.
"""

from __future__ import annotations

from collections.abc import Callable

from case_format import Case, Expected, Peak

from gnomon.graph import BF16, nbytes
from gnomon.lowering import lower
from gnomon.models.unet import unet, unet_tiny
from gnomon.plans import Optimizer, Plan, Schedule, Stage, transfers
from gnomon.program import Program, parse_program

GRAPH = unet(unet_tiny())
CALLS = (
    ("time", "conv_in", "down_0_0"),
    ("downsample_0", "down_1_0", "mid_0"),
    ("mid_1", "up_1_0", "up_1_1", "upsample_1"),
    ("up_0_0", "up_0_1", "head"),
)
STRAIGHT = Plan(
    stages=tuple(Stage(calls=calls) for calls in CALLS),
    schedule=Schedule(num_microbatches=4),
    optimizer=Optimizer(clip=False),
)
FOLDED = Plan(
    stages=tuple(
        Stage(calls=calls, devices=rank) for calls, rank in zip(CALLS, ("0:1", "1:2", "1:2", "0:1"), strict=True)
    ),
    schedule=Schedule(name="zero_bubble_v", num_microbatches=3),
    optimizer=Optimizer(clip=False),
)
PIPELINE = """\
gnomon.program/1
stages 4
units 4
buffer SKIP_0_2 step per unit
buffer DSKIP_0_2 step per unit
buffer SKIP_0_3 step per unit
buffer DSKIP_0_3 step per unit
kind SEND_SKIP on send_skip comm skip send 0
kind RECV_SKIP on recv_skip comm skip recv 0
kind SEND_SKIP_GRAD on send_skip_grad comm skip_grad send 0
kind RECV_SKIP_GRAD on recv_skip_grad comm skip_grad recv 0
class 0
  0F0{+ write SKIP_0_2 0 0, write SKIP_0_3 0 0} 0SEND_F0
  0SEND_SKIP0>2/SKIP_0_2{consume SKIP_0_2 0 0} 0SEND_SKIP0>3/SKIP_0_3{consume SKIP_0_3 0 0}
  0F1{+ write SKIP_0_2 0 1, write SKIP_0_3 0 1} 0SEND_F1
  0SEND_SKIP1>2/SKIP_0_2{consume SKIP_0_2 0 1} 0SEND_SKIP1>3/SKIP_0_3{consume SKIP_0_3 0 1}
  0F2{+ write SKIP_0_2 0 2, write SKIP_0_3 0 2} 0SEND_F2
  0SEND_SKIP2>2/SKIP_0_2{consume SKIP_0_2 0 2} 0SEND_SKIP2>3/SKIP_0_3{consume SKIP_0_3 0 2}
  0F3{+ write SKIP_0_2 0 3, write SKIP_0_3 0 3} 0SEND_F3
  0SEND_SKIP3>2/SKIP_0_2{consume SKIP_0_2 0 3} 0SEND_SKIP3>3/SKIP_0_3{consume SKIP_0_3 0 3}
  0RECV_SKIP_GRAD0>3/DSKIP_0_3{write DSKIP_0_3 0 0}
  0RECV_SKIP_GRAD0>2/DSKIP_0_2{write DSKIP_0_2 0 0} 0RECV_B0
  0B0{+ consume DSKIP_0_2 0 0, consume DSKIP_0_3 0 0}
  0RECV_SKIP_GRAD1>3/DSKIP_0_3{write DSKIP_0_3 0 1}
  0RECV_SKIP_GRAD1>2/DSKIP_0_2{write DSKIP_0_2 0 1} 0RECV_B1
  0B1{+ consume DSKIP_0_2 0 1, consume DSKIP_0_3 0 1}
  0RECV_SKIP_GRAD2>3/DSKIP_0_3{write DSKIP_0_3 0 2}
  0RECV_SKIP_GRAD2>2/DSKIP_0_2{write DSKIP_0_2 0 2} 0RECV_B2
  0B2{+ consume DSKIP_0_2 0 2, consume DSKIP_0_3 0 2}
  0RECV_SKIP_GRAD3>3/DSKIP_0_3{write DSKIP_0_3 0 3}
  0RECV_SKIP_GRAD3>2/DSKIP_0_2{write DSKIP_0_2 0 3} 0RECV_B3
  0B3{+ consume DSKIP_0_2 0 3, consume DSKIP_0_3 0 3} 0OPT
class 1
  1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 1RECV_F2 1F2 1SEND_F2 1RECV_B0 1B0 1SEND_B0 1RECV_F3
  1F3 1SEND_F3 1RECV_B1 1B1 1SEND_B1 1RECV_B2 1B2 1SEND_B2 1RECV_B3 1B3 1SEND_B3 1OPT
class 2
  2RECV_SKIP0>0/SKIP_0_2{write SKIP_0_2 2 0} 2RECV_F0 2F0{+ consume SKIP_0_2 2 0} 2SEND_F0
  2RECV_SKIP1>0/SKIP_0_2{write SKIP_0_2 2 1} 2RECV_F1 2F1{+ consume SKIP_0_2 2 1} 2SEND_F1 2RECV_B0
  2B0{+ write DSKIP_0_2 2 0} 2SEND_B0 2SEND_SKIP_GRAD0>0/DSKIP_0_2{consume DSKIP_0_2 2 0}
  2RECV_SKIP2>0/SKIP_0_2{write SKIP_0_2 2 2} 2RECV_F2 2F2{+ consume SKIP_0_2 2 2} 2SEND_F2 2RECV_B1
  2B1{+ write DSKIP_0_2 2 1} 2SEND_B1 2SEND_SKIP_GRAD1>0/DSKIP_0_2{consume DSKIP_0_2 2 1}
  2RECV_SKIP3>0/SKIP_0_2{write SKIP_0_2 2 3} 2RECV_F3 2F3{+ consume SKIP_0_2 2 3} 2SEND_F3 2RECV_B2
  2B2{+ write DSKIP_0_2 2 2} 2SEND_B2 2SEND_SKIP_GRAD2>0/DSKIP_0_2{consume DSKIP_0_2 2 2} 2RECV_B3
  2B3{+ write DSKIP_0_2 2 3} 2SEND_B3 2SEND_SKIP_GRAD3>0/DSKIP_0_2{consume DSKIP_0_2 2 3} 2OPT
class 3
  3RECV_SKIP0>0/SKIP_0_3{write SKIP_0_3 3 0} 3RECV_F0 3F0{+ consume SKIP_0_3 3 0}
  3B0{+ write DSKIP_0_3 3 0} 3SEND_B0 3SEND_SKIP_GRAD0>0/DSKIP_0_3{consume DSKIP_0_3 3 0}
  3RECV_SKIP1>0/SKIP_0_3{write SKIP_0_3 3 1} 3RECV_F1 3F1{+ consume SKIP_0_3 3 1}
  3B1{+ write DSKIP_0_3 3 1} 3SEND_B1 3SEND_SKIP_GRAD1>0/DSKIP_0_3{consume DSKIP_0_3 3 1}
  3RECV_SKIP2>0/SKIP_0_3{write SKIP_0_3 3 2} 3RECV_F2 3F2{+ consume SKIP_0_3 3 2}
  3B2{+ write DSKIP_0_3 3 2} 3SEND_B2 3SEND_SKIP_GRAD2>0/DSKIP_0_3{consume DSKIP_0_3 3 2}
  3RECV_SKIP3>0/SKIP_0_3{write SKIP_0_3 3 3} 3RECV_F3 3F3{+ consume SKIP_0_3 3 3}
  3B3{+ write DSKIP_0_3 3 3} 3SEND_B3 3SEND_SKIP_GRAD3>0/DSKIP_0_3{consume DSKIP_0_3 3 3} 3OPT
"""
V = """\
gnomon.program/1
stages 4
units 3
buffer SKIP_0_2 step per unit
buffer DSKIP_0_2 step per unit
buffer SKIP_0_3 step per unit
buffer DSKIP_0_3 step per unit
kind SEND_SKIP on send_skip comm skip send 0
kind RECV_SKIP on recv_skip comm skip recv 0
kind SEND_SKIP_GRAD on send_skip_grad comm skip_grad send 0
kind RECV_SKIP_GRAD on recv_skip_grad comm skip_grad recv 0
class 0
  0F0{+ write SKIP_0_2 0 0, write SKIP_0_3 0 0} 0SEND_F0
  0SEND_SKIP0>2/SKIP_0_2{consume SKIP_0_2 0 0} 0F1{+ write SKIP_0_2 0 1, write SKIP_0_3 0 1}
  0SEND_F1 0SEND_SKIP1>2/SKIP_0_2{consume SKIP_0_2 0 1}
  0F2{+ write SKIP_0_2 0 2, write SKIP_0_3 0 2} 0SEND_F2
  0SEND_SKIP2>2/SKIP_0_2{consume SKIP_0_2 0 2} 3RECV_F0 3F0{+ consume SKIP_0_3 0 0}
  3I0{+ write DSKIP_0_3 3 0} 3SEND_B0 3W0 3RECV_F1 3F1{+ consume SKIP_0_3 0 1}
  3I1{+ write DSKIP_0_3 3 1} 3SEND_B1 3W1 0RECV_SKIP_GRAD0>2/DSKIP_0_2{write DSKIP_0_2 0 0} 0RECV_B0
  0I0{+ consume DSKIP_0_2 0 0, consume DSKIP_0_3 3 0} 0W0 3RECV_F2 3F2{+ consume SKIP_0_3 0 2}
  3I2{+ write DSKIP_0_3 3 2} 3SEND_B2 3W2 0RECV_SKIP_GRAD1>2/DSKIP_0_2{write DSKIP_0_2 0 1} 0RECV_B1
  0I1{+ consume DSKIP_0_2 0 1, consume DSKIP_0_3 3 1} 0W1
  0RECV_SKIP_GRAD2>2/DSKIP_0_2{write DSKIP_0_2 0 2} 0RECV_B2
  0I2{+ consume DSKIP_0_2 0 2, consume DSKIP_0_3 3 2} 0W2 0OPT 3OPT
class 1
  1RECV_F0 1F0 2RECV_SKIP0>0/SKIP_0_2{write SKIP_0_2 2 0} 2F0{+ consume SKIP_0_2 2 0} 2SEND_F0
  1RECV_F1 1F1 2RECV_SKIP1>0/SKIP_0_2{write SKIP_0_2 2 1} 2F1{+ consume SKIP_0_2 2 1} 2SEND_F1
  2RECV_B0 2I0{+ write DSKIP_0_2 2 0} 2SEND_SKIP_GRAD0>0/DSKIP_0_2{consume DSKIP_0_2 2 0} 2W0
  1RECV_F2 1F2 1I0 1SEND_B0 1W0 2RECV_SKIP2>0/SKIP_0_2{write SKIP_0_2 2 2}
  2F2{+ consume SKIP_0_2 2 2} 2SEND_F2 2RECV_B1 2I1{+ write DSKIP_0_2 2 1}
  2SEND_SKIP_GRAD1>0/DSKIP_0_2{consume DSKIP_0_2 2 1} 2W1 1I1 1SEND_B1 2RECV_B2
  2I2{+ write DSKIP_0_2 2 2} 2SEND_SKIP_GRAD2>0/DSKIP_0_2{consume DSKIP_0_2 2 2} 1I2 1SEND_B2 1W1
  2W2 1W2 1OPT 2OPT
"""


def lowered(plan: Plan) -> Callable[[], Program]:
    return lambda: lower(GRAPH, plan)


def bytes_between_stages() -> None:
    blocks = {call.name: GRAPH.block(call.block) for call in GRAPH.calls}
    actual = {
        (hop.source, hop.target): sum(
            nbytes(blocks[layer].tensor(name), {"batch": 1}, BF16) for layer, name in hop.tensors
        )
        for hop in transfers(STRAIGHT, GRAPH)
    }
    # From 1 to 2: mid_0.y and down_1_0.y, 16 x 4 x 4, and downsample_0.y, 8 x 4 x 4. From 2 to 3: 16 x 8 x 8.
    assert actual == {(0, 1): 1024 + 64, (0, 2): 64, (0, 3): 2112, (1, 2): 512 + 512 + 256, (2, 3): 2048}


def only_the_time_embedding_travels_in_a_v() -> None:
    program = parse_program(V)
    sent = [row for row in range(program.num_rows) if program.kinds[program.kind[row]].name == "SEND_SKIP"]
    assert [program.token(row) for row in sent] == ["0SEND_SKIP0", "0SEND_SKIP1", "0SEND_SKIP2"]
    assert {program.overrides[row].peer for row in sent} == {2}


SIZES = {
    **dict.fromkeys(("S", "X", "Y", "DX", "DY", "P", "G"), 0),
    **{"SKIP_0_3": 2112, "DSKIP_0_3": 2112, "SKIP_0_2": 64, "DSKIP_0_2": 64},
}
CASES = (
    Case(
        name="unet_pipeline",
        graph=GRAPH,
        plan=STRAIGHT,
        program=PIPELINE,
        lowered=lowered(STRAIGHT),
        busy={"F": 1, "B": 2, "*": 0},
        sizes=SIZES,
        expected=Expected(
            makespan=21,
            period=21,
            idle={0: 9, 1: 9, 2: 9, 3: 9},
            issue_peaks={
                0: Peak(size=2176, action="0F0"),
                2: Peak(size=64, action="2RECV_SKIP0"),
                3: Peak(size=2112, action="3RECV_SKIP0"),
            },
            time_peaks={
                0: Peak(size=4352, moment=11),
                2: Peak(size=192, action="2B0", moment=6),
                3: Peak(size=8448, moment=4),
            },
            ends={"0:0SEND_SKIP3": 4, "3:3RECV_SKIP3": 4, "3:3F3": 13, "0:0RECV_SKIP_GRAD0": 8, "0:0B0": 12},
        ),
        also=(bytes_between_stages,),
    ),
    Case(
        name="unet_pipeline-in-a-v",
        graph=GRAPH,
        plan=FOLDED,
        program=V,
        lowered=lowered(FOLDED),
        busy={"F": 1, "I": 1, "W": 1, "*": 0},
        sizes=SIZES,
        expected=Expected(
            makespan=19,
            period=18,
            issue_peaks={0: Peak(size=6400, action="0F2")},
            time_peaks={0: Peak(size=6400, action="0F2", moment=2)},
            ends={"0:3F0": 4, "0:0W2": 18},
        ),
        also=(only_the_time_embedding_travels_in_a_v,),
    ),
)
