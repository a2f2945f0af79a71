"""T5 in a pipeline, p 4, m 4: encoder on stages 0 and 1, decoder on 2 and 3, which both read the encoder's output.

Two layers each of a small T5 (hidden 64, 4 heads), one pair of 32 input and 16 output tokens a microbatch, bf16. Three
inputs enter: `input_ids` at stage 0, `decoder_input_ids` at 2, `labels` at 3. What travels, in units of 4096 bytes:
    0 -> 1   residual 32·64·2 = 4096 and the encoder's position bias 32·32·4·2 = 8192: 3 units
    1 -> 2   memory 32·64·2 = 4096: 1 unit
    2 -> 3   residual 16·64·2 = 2048 and the decoder's bias 16·16·4·2 = 2048: 1 unit
    1 -> 3   memory again: 1 unit, straight to stage 3, or through stage 2 (inputs = [2]), when 2 -> 3 carries 2 units.
Gradients travel back likewise. Where memory goes straight, stage 1 gets two gradients of it, one from each decoder
stage, and its backward consumes both; through stage 2, that one adds its own before it sends.

F 1, B 2, a unit .25. The longest chain goes down with microbatch 0, back to stage 1, whose B0 holds up F3, down with
microbatch 3 and back: 1 +.75+ 1 +.25+ 1 +.25+ 1 = 5.25; back 2 +.25+ 2 +.25+ 2 = 6.5, so 11.75; down from stage 1
1 +.25+ 1 +.25+ 1 = 3.5, so 15.25; back 2 +.25+ 2 +.25+ 2 +.75+ 2 = 9.25: 24.5. It crosses between stages 2 and 3 four
times; with memory on board each takes .25 more: 25.5. Reducing the shared embedding (stages 0 and 2) is free here.

Memory at stage 3 (only skips counted): it arrives at 3, 4, 5 and 13 and is taken at 5.25, 8.25, 11.75, 15.25: three
from 5 on, 12288. Stage 1 still sends that of microbatch 0, until 3, when F1 begins to make the next at 2.75: 8192.
Source: by hand; the model is T5 v1.1 (Raffel et al. 2020), made small, without dropout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from case_format import Case, Expected, Peak

from gnomon.graph import BF16, nbytes
from gnomon.lowering import lower
from gnomon.models.t5 import T5Config, t5
from gnomon.plans import Optimizer, Plan, Schedule, Stage, shared_parameters, transfers
from gnomon.program import Program

GRAPH = t5(
    T5Config(
        name="t5-four",
        num_layers=2,
        num_decoder_layers=2,
        hidden_size=64,
        num_heads=4,
        head_dim=16,
        ffn_size=128,
        vocab_size=256,
        gated=False,
        tied=False,
        dropout=0.0,
    )
)
STAGES = (
    Stage(calls=("encoder_embed", "encoder_layers[0]")),
    Stage(calls=("encoder_layers[1]", "encoder_norm")),
    Stage(calls=("decoder_embed", "decoder_layers[0]")),
    Stage(calls=("decoder_layers[1]", "head")),
)
STRAIGHT = Plan(stages=STAGES, schedule=Schedule(num_microbatches=4), optimizer=Optimizer(clip=False))
RELAYED = replace(STRAIGHT, stages=(*STAGES[:3], replace(STAGES[3], inputs=(2,))))
DIRECT = """\
gnomon.program/1
stages 4
units 4
buffer SKIP_1_3 step per unit
buffer DSKIP_1_3 step per unit
kind SEND_SKIP on send_skip comm skip send 0
kind RECV_SKIP on recv_skip comm skip recv 0
kind SEND_SKIP_GRAD on send_skip_grad comm skip_grad send 0
kind RECV_SKIP_GRAD on recv_skip_grad comm skip_grad recv 0
comm embedding collective
class 0
  0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0F3 0SEND_F3 0RECV_B0 0B0 0RECV_B1 0B1 0RECV_B2 0B2
  0RECV_B3 0B3 0AR/embedding:embedding#0 0OPT
class 1
  1RECV_F0 1F0{+ write SKIP_1_3 1 0} 1SEND_F0 1SEND_SKIP0>3/SKIP_1_3{consume SKIP_1_3 1 0} 1RECV_F1
  1F1{+ write SKIP_1_3 1 1} 1SEND_F1 1SEND_SKIP1>3/SKIP_1_3{consume SKIP_1_3 1 1} 1RECV_F2
  1F2{+ write SKIP_1_3 1 2} 1SEND_F2 1SEND_SKIP2>3/SKIP_1_3{consume SKIP_1_3 1 2}
  1RECV_SKIP_GRAD0>3/DSKIP_1_3{write DSKIP_1_3 1 0} 1RECV_B0 1B0{+ consume DSKIP_1_3 1 0} 1SEND_B0
  1RECV_F3 1F3{+ write SKIP_1_3 1 3} 1SEND_F3 1SEND_SKIP3>3/SKIP_1_3{consume SKIP_1_3 1 3}
  1RECV_SKIP_GRAD1>3/DSKIP_1_3{write DSKIP_1_3 1 1} 1RECV_B1 1B1{+ consume DSKIP_1_3 1 1} 1SEND_B1
  1RECV_SKIP_GRAD2>3/DSKIP_1_3{write DSKIP_1_3 1 2} 1RECV_B2 1B2{+ consume DSKIP_1_3 1 2} 1SEND_B2
  1RECV_SKIP_GRAD3>3/DSKIP_1_3{write DSKIP_1_3 1 3} 1RECV_B3 1B3{+ consume DSKIP_1_3 1 3} 1SEND_B3
  1OPT
class 2
  2RECV_F0 2F0 2SEND_F0 2RECV_F1 2F1 2SEND_F1 2RECV_B0 2B0 2SEND_B0 2RECV_F2 2F2 2SEND_F2 2RECV_B1
  2B1 2SEND_B1 2RECV_F3 2F3 2SEND_F3 2RECV_B2 2B2 2SEND_B2 2RECV_B3 2B3 2SEND_B3
  2AR/embedding:embedding#0 2OPT
class 3
  3RECV_SKIP0>1/SKIP_1_3{write SKIP_1_3 3 0} 3RECV_F0 3F0{+ consume SKIP_1_3 3 0}
  3B0{+ write DSKIP_1_3 3 0} 3SEND_B0 3SEND_SKIP_GRAD0>1/DSKIP_1_3{consume DSKIP_1_3 3 0}
  3RECV_SKIP1>1/SKIP_1_3{write SKIP_1_3 3 1} 3RECV_F1 3F1{+ consume SKIP_1_3 3 1}
  3B1{+ write DSKIP_1_3 3 1} 3SEND_B1 3SEND_SKIP_GRAD1>1/DSKIP_1_3{consume DSKIP_1_3 3 1}
  3RECV_SKIP2>1/SKIP_1_3{write SKIP_1_3 3 2} 3RECV_F2 3F2{+ consume SKIP_1_3 3 2}
  3B2{+ write DSKIP_1_3 3 2} 3SEND_B2 3SEND_SKIP_GRAD2>1/DSKIP_1_3{consume DSKIP_1_3 3 2}
  3RECV_SKIP3>1/SKIP_1_3{write SKIP_1_3 3 3} 3RECV_F3 3F3{+ consume SKIP_1_3 3 3}
  3B3{+ write DSKIP_1_3 3 3} 3SEND_B3 3SEND_SKIP_GRAD3>1/DSKIP_1_3{consume DSKIP_1_3 3 3} 3OPT
"""
THROUGH_STAGE_2 = """\
gnomon.program/1
stages 4
units 4
comm embedding collective
class 0
  0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0F3 0SEND_F3 0RECV_B0 0B0 0RECV_B1 0B1 0RECV_B2 0B2
  0RECV_B3 0B3 0AR/embedding:embedding#0 0OPT
class 1
  1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 1RECV_F2 1F2 1SEND_F2 1RECV_B0 1B0 1SEND_B0 1RECV_F3
  1F3 1SEND_F3 1RECV_B1 1B1 1SEND_B1 1RECV_B2 1B2 1SEND_B2 1RECV_B3 1B3 1SEND_B3 1OPT
class 2
  2RECV_F0 2F0 2SEND_F0 2RECV_F1 2F1 2SEND_F1 2RECV_B0 2B0 2SEND_B0 2RECV_F2 2F2 2SEND_F2 2RECV_B1
  2B1 2SEND_B1 2RECV_F3 2F3 2SEND_F3 2RECV_B2 2B2 2SEND_B2 2RECV_B3 2B3 2SEND_B3
  2AR/embedding:embedding#0 2OPT
class 3
  3RECV_F0 3F0 3B0 3SEND_B0 3RECV_F1 3F1 3B1 3SEND_B1 3RECV_F2 3F2 3B2 3SEND_B2 3RECV_F3 3F3 3B3
  3SEND_B3 3OPT
"""


def lowered(plan: Plan) -> Callable[[], Program]:
    return lambda: lower(GRAPH, plan)


def units_of(plan: Plan) -> dict[tuple[int, int], float]:
    sizes, units = {"batch": 1, "enc_seq": 32, "seq": 16}, {}
    for hop in transfers(plan, GRAPH):
        tensors = [GRAPH.block(GRAPH.call(layer.partition("[")[0]).block).tensor(name) for layer, name in hop.tensors]
        units[hop.source, hop.target] = sum(nbytes(tensor, sizes, BF16) for tensor in tensors) / 4096
    return units


def what_travels() -> None:
    assert units_of(STRAIGHT) == {(0, 1): 3, (1, 2): 1, (1, 3): 1, (2, 3): 1}
    assert units_of(RELAYED) == {(0, 1): 3, (1, 2): 1, (2, 3): 2}
    assert shared_parameters(STRAIGHT, GRAPH) == {"shared.weight": (0, 2)}


BUSY = {"F": 1, "B": 2, "0SEND_F": 0.75, "1SEND_B": 0.75, "1SEND_F": 0.25, "2SEND_B": 0.25, "*": 0}
CASES = (
    Case(
        name="t5_pipeline",
        graph=GRAPH,
        plan=STRAIGHT,
        program=DIRECT,
        lowered=lowered(STRAIGHT),
        busy={**BUSY, "2SEND_F": 0.25, "3SEND_B": 0.25, "1:SKIP_1_3": 0.25, "3:DSKIP_1_3": 0.25},
        sizes={**dict.fromkeys(("S", "X", "Y", "DX", "DY", "P", "G"), 0), "SKIP_1_3": 4096, "DSKIP_1_3": 4096},
        expected=Expected(
            makespan=24.5,
            period=24.5,
            idle={rank: 24.5 - 12 for rank in range(4)},
            issue_peaks={1: Peak(size=4096, action="1F0"), 3: Peak(size=4096, action="3RECV_SKIP0")},
            time_peaks={
                1: Peak(size=8192, action="1F1", moment=2.75),
                3: Peak(size=12288, action="3RECV_SKIP2", moment=5),
            },
            ends={"3:3F0": 5.25, "3:3RECV_SKIP0": 3, "1:1RECV_SKIP_GRAD0": 7.5, "1:1B0": 11.75, "0:0B0": 14.5},
        ),
        also=(what_travels,),
    ),
    Case(
        name="t5_pipeline-relayed",
        graph=GRAPH,
        plan=RELAYED,
        program=THROUGH_STAGE_2,
        lowered=lowered(RELAYED),
        busy={**BUSY, "2SEND_F": 0.5, "3SEND_B": 0.5},
        expected=Expected(
            makespan=25.5, period=25.5, idle={rank: 25.5 - 12 for rank in range(4)}, ends={"3:3F0": 5.5, "1:1B0": 12.25}
        ),
    ),
)
