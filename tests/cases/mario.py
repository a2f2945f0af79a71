"""Mario's four passes over 1F1B: p 4, m 8, F 1, B 2, recompute R 1, messages free.

RECV_B stands on the compute stream, before the recompute that the first pass inserts: without that, a recompute would
never wait for a gradient and the second pass would have nothing to do.

    none               33   (m + p - 1)(F + B)
    checkpointed       44   (m + p - 1)(F + R + B): each gradient is waited for first, then R and B follow
    overlapped         41   the last rank starts at 3, does 8·4 without a break, and B drains over three ranks: 3·2
    less redundant     39   the last rank needs no recompute, so rank 2 sets the pace: starts at 2, works 8·4, waits 1
                            for the first gradient (R0 ends at 5, 3B0 at 6), then drains 2·2
    preposed           38   2C2 fills that one idle second; ranks 0 and 1 stay as they are

`planned` is the last one from a model and a plan that names the pass. With `overlap.pipeline_sends` off all messages
are on the compute stream; they are free, so nothing else changes, except that inputs are there and not loaded (rank 0
holds no X).

Every critical path starts with rank 0's first forward and ends with its last backward, so periods are the makespans.
Memory in issue order with S = 1 and X = 1/8 for a unit: before, p - r units and one input; checkpointed, one unit and
p - r inputs; rank 2 ends with one input more. In time order a rank also holds the inputs that have come meanwhile:
rank 0, whose inputs load from the start, all of the other units' (1/2 more), checkpointed ranks the next one, sent at
4 (1/8 more, unless it is in use by then). Source: Mario (Liu et al., PPoPP 2025) for the passes; the numbers from an
independent simulation, and from the closed forms above.
"""

from __future__ import annotations

from case_format import Case, Expected, Peak

from gnomon.lowering import lower, one_f_one_b, with_loads, with_messages, with_optimizer
from gnomon.methods import Context, rewritten
from gnomon.methods.mario import apply_checkpoint, mario, overlap_recompute, remove_redundancy
from gnomon.models.gpt import GptConfig, gpt
from gnomon.plans import Mesh, Overlap, Pass, Plan, Schedule
from gnomon.program import Program, Structure
from gnomon.simulate import Clock, Times, durations, play

NONE = """\
gnomon.program/1
stages 4
units 8
inputs loaded
kind RECV_B on compute comm bwd recv -1: write DY
class 0
  0LOAD0 0F0 0SEND_F0 0LOAD1 0F1 0SEND_F1 0LOAD2 0F2 0SEND_F2 0LOAD3 0F3 0SEND_F3 0RECV_B0 0B0
  0LOAD4 0F4 0SEND_F4 0RECV_B1 0B1 0LOAD5 0F5 0SEND_F5 0RECV_B2 0B2 0LOAD6 0F6 0SEND_F6 0RECV_B3 0B3
  0LOAD7 0F7 0SEND_F7 0RECV_B4 0B4 0RECV_B5 0B5 0RECV_B6 0B6 0RECV_B7 0B7 0OPT
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
  3F7 3B7 3SEND_B7 3OPT
"""
CHECKPOINTED = """\
gnomon.program/1
stages 4
units 8
inputs loaded
kind RECV_B on compute comm bwd recv -1: write DY
class 0
  0LOAD0 0C0 0SEND_F0 0LOAD1 0C1 0SEND_F1 0LOAD2 0C2 0SEND_F2 0LOAD3 0C3 0SEND_F3 0RECV_B0 0R0 0B0
  0LOAD4 0C4 0SEND_F4 0RECV_B1 0R1 0B1 0LOAD5 0C5 0SEND_F5 0RECV_B2 0R2 0B2 0LOAD6 0C6 0SEND_F6
  0RECV_B3 0R3 0B3 0LOAD7 0C7 0SEND_F7 0RECV_B4 0R4 0B4 0RECV_B5 0R5 0B5 0RECV_B6 0R6 0B6 0RECV_B7
  0R7 0B7 0OPT
class 1
  1RECV_F0 1C0 1SEND_F0 1RECV_F1 1C1 1SEND_F1 1RECV_F2 1C2 1SEND_F2 1RECV_B0 1R0 1B0 1SEND_B0
  1RECV_F3 1C3 1SEND_F3 1RECV_B1 1R1 1B1 1SEND_B1 1RECV_F4 1C4 1SEND_F4 1RECV_B2 1R2 1B2 1SEND_B2
  1RECV_F5 1C5 1SEND_F5 1RECV_B3 1R3 1B3 1SEND_B3 1RECV_F6 1C6 1SEND_F6 1RECV_B4 1R4 1B4 1SEND_B4
  1RECV_F7 1C7 1SEND_F7 1RECV_B5 1R5 1B5 1SEND_B5 1RECV_B6 1R6 1B6 1SEND_B6 1RECV_B7 1R7 1B7
  1SEND_B7 1OPT
class 2
  2RECV_F0 2C0 2SEND_F0 2RECV_F1 2C1 2SEND_F1 2RECV_B0 2R0 2B0 2SEND_B0 2RECV_F2 2C2 2SEND_F2
  2RECV_B1 2R1 2B1 2SEND_B1 2RECV_F3 2C3 2SEND_F3 2RECV_B2 2R2 2B2 2SEND_B2 2RECV_F4 2C4 2SEND_F4
  2RECV_B3 2R3 2B3 2SEND_B3 2RECV_F5 2C5 2SEND_F5 2RECV_B4 2R4 2B4 2SEND_B4 2RECV_F6 2C6 2SEND_F6
  2RECV_B5 2R5 2B5 2SEND_B5 2RECV_F7 2C7 2SEND_F7 2RECV_B6 2R6 2B6 2SEND_B6 2RECV_B7 2R7 2B7
  2SEND_B7 2OPT
class 3
  3RECV_F0 3C0 3R0 3B0 3SEND_B0 3RECV_F1 3C1 3R1 3B1 3SEND_B1 3RECV_F2 3C2 3R2 3B2 3SEND_B2 3RECV_F3
  3C3 3R3 3B3 3SEND_B3 3RECV_F4 3C4 3R4 3B4 3SEND_B4 3RECV_F5 3C5 3R5 3B5 3SEND_B5 3RECV_F6 3C6 3R6
  3B6 3SEND_B6 3RECV_F7 3C7 3R7 3B7 3SEND_B7 3OPT
"""
OVERLAPPED = """\
gnomon.program/1
stages 4
units 8
inputs loaded
kind RECV_B on compute comm bwd recv -1: write DY
class 0
  0LOAD0 0C0 0SEND_F0 0LOAD1 0C1 0SEND_F1 0LOAD2 0C2 0SEND_F2 0LOAD3 0C3 0SEND_F3 0R0 0RECV_B0 0B0
  0LOAD4 0C4 0SEND_F4 0R1 0RECV_B1 0B1 0LOAD5 0C5 0SEND_F5 0R2 0RECV_B2 0B2 0LOAD6 0C6 0SEND_F6 0R3
  0RECV_B3 0B3 0LOAD7 0C7 0SEND_F7 0R4 0RECV_B4 0B4 0R5 0RECV_B5 0B5 0R6 0RECV_B6 0B6 0R7 0RECV_B7
  0B7 0OPT
class 1
  1RECV_F0 1C0 1SEND_F0 1RECV_F1 1C1 1SEND_F1 1RECV_F2 1C2 1SEND_F2 1R0 1RECV_B0 1B0 1SEND_B0
  1RECV_F3 1C3 1SEND_F3 1R1 1RECV_B1 1B1 1SEND_B1 1RECV_F4 1C4 1SEND_F4 1R2 1RECV_B2 1B2 1SEND_B2
  1RECV_F5 1C5 1SEND_F5 1R3 1RECV_B3 1B3 1SEND_B3 1RECV_F6 1C6 1SEND_F6 1R4 1RECV_B4 1B4 1SEND_B4
  1RECV_F7 1C7 1SEND_F7 1R5 1RECV_B5 1B5 1SEND_B5 1R6 1RECV_B6 1B6 1SEND_B6 1R7 1RECV_B7 1B7
  1SEND_B7 1OPT
class 2
  2RECV_F0 2C0 2SEND_F0 2RECV_F1 2C1 2SEND_F1 2R0 2RECV_B0 2B0 2SEND_B0 2RECV_F2 2C2 2SEND_F2 2R1
  2RECV_B1 2B1 2SEND_B1 2RECV_F3 2C3 2SEND_F3 2R2 2RECV_B2 2B2 2SEND_B2 2RECV_F4 2C4 2SEND_F4 2R3
  2RECV_B3 2B3 2SEND_B3 2RECV_F5 2C5 2SEND_F5 2R4 2RECV_B4 2B4 2SEND_B4 2RECV_F6 2C6 2SEND_F6 2R5
  2RECV_B5 2B5 2SEND_B5 2RECV_F7 2C7 2SEND_F7 2R6 2RECV_B6 2B6 2SEND_B6 2R7 2RECV_B7 2B7 2SEND_B7
  2OPT
class 3
  3RECV_F0 3C0 3R0 3B0 3SEND_B0 3RECV_F1 3C1 3R1 3B1 3SEND_B1 3RECV_F2 3C2 3R2 3B2 3SEND_B2 3RECV_F3
  3C3 3R3 3B3 3SEND_B3 3RECV_F4 3C4 3R4 3B4 3SEND_B4 3RECV_F5 3C5 3R5 3B5 3SEND_B5 3RECV_F6 3C6 3R6
  3B6 3SEND_B6 3RECV_F7 3C7 3R7 3B7 3SEND_B7 3OPT
"""
LESS_REDUNDANT = """\
gnomon.program/1
stages 4
units 8
inputs loaded
kind RECV_B on compute comm bwd recv -1: write DY
class 0
  0LOAD0 0C0 0SEND_F0 0LOAD1 0C1 0SEND_F1 0LOAD2 0C2 0SEND_F2 0LOAD3 0C3 0SEND_F3 0R0 0RECV_B0 0B0
  0LOAD4 0C4 0SEND_F4 0R1 0RECV_B1 0B1 0LOAD5 0C5 0SEND_F5 0R2 0RECV_B2 0B2 0LOAD6 0C6 0SEND_F6 0R3
  0RECV_B3 0B3 0LOAD7 0C7 0SEND_F7 0R4 0RECV_B4 0B4 0R5 0RECV_B5 0B5 0R6 0RECV_B6 0B6 0R7 0RECV_B7
  0B7 0OPT
class 1
  1RECV_F0 1C0 1SEND_F0 1RECV_F1 1C1 1SEND_F1 1RECV_F2 1C2 1SEND_F2 1R0 1RECV_B0 1B0 1SEND_B0
  1RECV_F3 1C3 1SEND_F3 1R1 1RECV_B1 1B1 1SEND_B1 1RECV_F4 1C4 1SEND_F4 1R2 1RECV_B2 1B2 1SEND_B2
  1RECV_F5 1C5 1SEND_F5 1R3 1RECV_B3 1B3 1SEND_B3 1RECV_F6 1C6 1SEND_F6 1R4 1RECV_B4 1B4 1SEND_B4
  1RECV_F7 1C7 1SEND_F7 1R5 1RECV_B5 1B5 1SEND_B5 1R6 1RECV_B6 1B6 1SEND_B6 1R7 1RECV_B7 1B7
  1SEND_B7 1OPT
class 2
  2RECV_F0 2C0 2SEND_F0 2RECV_F1 2C1 2SEND_F1 2R0 2RECV_B0 2B0 2SEND_B0 2RECV_F2 2C2 2SEND_F2 2R1
  2RECV_B1 2B1 2SEND_B1 2RECV_F3 2C3 2SEND_F3 2R2 2RECV_B2 2B2 2SEND_B2 2RECV_F4 2C4 2SEND_F4 2R3
  2RECV_B3 2B3 2SEND_B3 2RECV_F5 2C5 2SEND_F5 2R4 2RECV_B4 2B4 2SEND_B4 2RECV_F6 2C6 2SEND_F6 2R5
  2RECV_B5 2B5 2SEND_B5 2RECV_F7 2C7 2SEND_F7 2R6 2RECV_B6 2B6 2SEND_B6 2R7 2RECV_B7 2B7 2SEND_B7
  2OPT
class 3
  3RECV_F0 3F0 3B0 3SEND_B0 3RECV_F1 3F1 3B1 3SEND_B1 3RECV_F2 3F2 3B2 3SEND_B2 3RECV_F3 3F3 3B3
  3SEND_B3 3RECV_F4 3F4 3B4 3SEND_B4 3RECV_F5 3F5 3B5 3SEND_B5 3RECV_F6 3F6 3B6 3SEND_B6 3RECV_F7
  3F7 3B7 3SEND_B7 3OPT
"""
PREPOSED = """\
gnomon.program/1
stages 4
units 8
inputs loaded
kind RECV_B on compute comm bwd recv -1: write DY
class 0
  0LOAD0 0C0 0SEND_F0 0LOAD1 0C1 0SEND_F1 0LOAD2 0C2 0SEND_F2 0LOAD3 0C3 0SEND_F3 0R0 0RECV_B0 0B0
  0LOAD4 0C4 0SEND_F4 0R1 0RECV_B1 0B1 0LOAD5 0C5 0SEND_F5 0R2 0RECV_B2 0B2 0LOAD6 0C6 0SEND_F6 0R3
  0RECV_B3 0B3 0LOAD7 0C7 0SEND_F7 0R4 0RECV_B4 0B4 0R5 0RECV_B5 0B5 0R6 0RECV_B6 0B6 0R7 0RECV_B7
  0B7 0OPT
class 1
  1RECV_F0 1C0 1SEND_F0 1RECV_F1 1C1 1SEND_F1 1RECV_F2 1C2 1SEND_F2 1R0 1RECV_B0 1B0 1SEND_B0
  1RECV_F3 1C3 1SEND_F3 1R1 1RECV_B1 1B1 1SEND_B1 1RECV_F4 1C4 1SEND_F4 1R2 1RECV_B2 1B2 1SEND_B2
  1RECV_F5 1C5 1SEND_F5 1R3 1RECV_B3 1B3 1SEND_B3 1RECV_F6 1C6 1SEND_F6 1R4 1RECV_B4 1B4 1SEND_B4
  1RECV_F7 1C7 1SEND_F7 1R5 1RECV_B5 1B5 1SEND_B5 1R6 1RECV_B6 1B6 1SEND_B6 1R7 1RECV_B7 1B7
  1SEND_B7 1OPT
class 2
  2RECV_F0 2C0 2SEND_F0 2RECV_F1 2C1 2SEND_F1 2RECV_F2 2C2 2SEND_F2 2R0 2RECV_B0 2B0 2SEND_B0 2R1
  2RECV_B1 2B1 2SEND_B1 2RECV_F3 2C3 2SEND_F3 2R2 2RECV_B2 2B2 2SEND_B2 2RECV_F4 2C4 2SEND_F4 2R3
  2RECV_B3 2B3 2SEND_B3 2RECV_F5 2C5 2SEND_F5 2R4 2RECV_B4 2B4 2SEND_B4 2RECV_F6 2C6 2SEND_F6 2R5
  2RECV_B5 2B5 2SEND_B5 2RECV_F7 2C7 2SEND_F7 2R6 2RECV_B6 2B6 2SEND_B6 2R7 2RECV_B7 2B7 2SEND_B7
  2OPT
class 3
  3RECV_F0 3F0 3B0 3SEND_B0 3RECV_F1 3F1 3B1 3SEND_B1 3RECV_F2 3F2 3B2 3SEND_B2 3RECV_F3 3F3 3B3
  3SEND_B3 3RECV_F4 3F4 3B4 3SEND_B4 3RECV_F5 3F5 3B5 3SEND_B5 3RECV_F6 3F6 3B6 3SEND_B6 3RECV_F7
  3F7 3B7 3SEND_B7 3OPT
"""
PLANNED = """\
gnomon.program/1
stages 4
units 8
kind SEND_F on compute comm fwd send 1: consume Y
kind RECV_F on compute comm fwd recv 1: write X
kind SEND_B on compute comm bwd send -1: consume DX
kind RECV_B on compute comm bwd recv -1: write DY
kind NORM on compute comm norm
comm norm collective
comm fwd buffered
comm bwd buffered
comm dp collective
class 0
  0C0 0SEND_F0 0C1 0SEND_F1 0C2 0SEND_F2 0C3 0SEND_F3 0R0 0RECV_B0 0B0 0C4 0SEND_F4 0R1 0RECV_B1 0B1
  0C5 0SEND_F5 0R2 0RECV_B2 0B2 0C6 0SEND_F6 0R3 0RECV_B3 0B3 0C7 0SEND_F7 0R4 0RECV_B4 0B4 0R5
  0RECV_B5 0B5 0R6 0RECV_B6 0B6 0R7 0RECV_B7 0B7 0NORM#0{read G 0} 0OPT
class 1
  1RECV_F0 1C0 1SEND_F0 1RECV_F1 1C1 1SEND_F1 1RECV_F2 1C2 1SEND_F2 1R0 1RECV_B0 1B0 1SEND_B0
  1RECV_F3 1C3 1SEND_F3 1R1 1RECV_B1 1B1 1SEND_B1 1RECV_F4 1C4 1SEND_F4 1R2 1RECV_B2 1B2 1SEND_B2
  1RECV_F5 1C5 1SEND_F5 1R3 1RECV_B3 1B3 1SEND_B3 1RECV_F6 1C6 1SEND_F6 1R4 1RECV_B4 1B4 1SEND_B4
  1RECV_F7 1C7 1SEND_F7 1R5 1RECV_B5 1B5 1SEND_B5 1R6 1RECV_B6 1B6 1SEND_B6 1R7 1RECV_B7 1B7
  1SEND_B7 1NORM#0{read G 1} 1OPT
class 2
  2RECV_F0 2C0 2SEND_F0 2RECV_F1 2C1 2SEND_F1 2RECV_F2 2C2 2SEND_F2 2R0 2RECV_B0 2B0 2SEND_B0 2R1
  2RECV_B1 2B1 2SEND_B1 2RECV_F3 2C3 2SEND_F3 2R2 2RECV_B2 2B2 2SEND_B2 2RECV_F4 2C4 2SEND_F4 2R3
  2RECV_B3 2B3 2SEND_B3 2RECV_F5 2C5 2SEND_F5 2R4 2RECV_B4 2B4 2SEND_B4 2RECV_F6 2C6 2SEND_F6 2R5
  2RECV_B5 2B5 2SEND_B5 2RECV_F7 2C7 2SEND_F7 2R6 2RECV_B6 2B6 2SEND_B6 2R7 2RECV_B7 2B7 2SEND_B7
  2NORM#0{read G 2} 2OPT
class 3
  3RECV_F0 3F0 3B0 3SEND_B0 3RECV_F1 3F1 3B1 3SEND_B1 3RECV_F2 3F2 3B2 3SEND_B2 3RECV_F3 3F3 3B3
  3SEND_B3 3RECV_F4 3F4 3B4 3SEND_B4 3RECV_F5 3F5 3B5 3SEND_B5 3RECV_F6 3F6 3B6 3SEND_B6 3RECV_F7
  3F7 3B7 3SEND_B7 3NORM#0{read G 3} 3OPT
"""
CONFIG = GptConfig(name="four", num_layers=4, hidden_size=64, num_heads=4, vocab_size=256, max_positions=32, tied=False)
GRAPH = gpt(CONFIG)
PLAN = Plan(
    mesh=Mesh(pp=4),
    schedule=Schedule(num_microbatches=8, passes=(Pass(name="mario"),)),
    overlap=Overlap(pipeline_sends=False),
)
BUSY = {"F": 1, "C": 1, "R": 1, "B": 2, "*": 0}
SIZES = {"X": 0.125, "S": 1, "Y": 0, "DX": 0, "DY": 0, "P": 0, "G": 0}


def base() -> Program:
    rows = with_messages(one_f_one_b(4, 8), blocking=("RECV_B",))
    return with_optimizer(with_loads(rows)).program(inputs="loaded")


def checkpointed() -> Program:
    return apply_checkpoint(base())


def overlapped() -> Program:
    return overlap_recompute(checkpointed())


def less_redundant() -> Program:
    return remove_redundancy(overlapped())


def preposed() -> Program:
    return mario(base(), step, sizes=SIZES)


def planned() -> Program:
    return rewritten(lower(GRAPH, PLAN), PLAN, Context(simulate=step, sizes=SIZES, limit=float("inf")))


def step(structure: Structure) -> Times:
    return play(Clock.of(structure, durations(structure.program, BUSY)))


CASES = (
    Case(
        name="mario-none",
        program=NONE,
        lowered=base,
        busy={"F": 1, "B": 2, "*": 0},
        sizes=SIZES,
        expected=Expected(
            makespan=33,
            period=33,
            idle={r: 9 for r in range(4)},
            exposed={r: 0 for r in range(4)},
            time_peaks={
                0: Peak(size=4.625, action="0F3", moment=3),
                **{r: Peak(size=4.125 - r, moment=3) for r in (1, 2, 3)},
            },
            issue_peaks={r: Peak(size=4.125 - r, action=f"{r}F{3 - r}") for r in range(4)},
        ),
    ),
    Case(
        name="mario-checkpointed",
        program=CHECKPOINTED,
        lowered=checkpointed,
        busy={"C": 1, "R": 1, "B": 2, "*": 0},
        sizes=SIZES,
        expected=Expected(
            makespan=44,
            period=44,
            idle={r: 12 for r in range(4)},
            exposed={r: 0 for r in range(4)},
            time_peaks={
                0: Peak(size=2, moment=13),
                1: Peak(size=1.5, moment=10),
                2: Peak(size=1.375, moment=7),
                3: Peak(size=1.25, moment=4),
            },
            issue_peaks={r: Peak(size=1 + (4 - r) / 8, action=f"{r}R0") for r in range(4)},
        ),
    ),
    Case(
        name="mario-overlapped",
        program=OVERLAPPED,
        lowered=overlapped,
        busy={"C": 1, "R": 1, "B": 2, "*": 0},
        sizes=SIZES,
        expected=Expected(
            makespan=41,
            period=41,
            idle={r: 9 for r in range(4)},
            exposed={r: 0 for r in range(4)},
            time_peaks={r: Peak(size=size, moment=4) for r, size in enumerate((2, 1.5, 1.375, 1.25))},
            issue_peaks={r: Peak(size=1 + (4 - r) / 8, action=f"{r}R0") for r in range(4)},
        ),
    ),
    Case(
        name="mario-less-redundant",
        program=LESS_REDUNDANT,
        lowered=less_redundant,
        busy=BUSY,
        sizes=SIZES,
        expected=Expected(
            makespan=39,
            period=39,
            idle={0: 7, 1: 7, 2: 7, 3: 15},
            exposed={r: 0 for r in range(4)},
            time_peaks={
                **{r: Peak(size=size, moment=4) for r, size in enumerate((2, 1.5, 1.375))},
                3: Peak(size=1.125, moment=3),
            },
            issue_peaks={
                0: Peak(size=1.5, action="0R0"),
                1: Peak(size=1.375, action="1R0"),
                2: Peak(size=1.25, action="2R0"),
                3: Peak(size=1.125, action="3F0"),
            },
            ends={"2:2R0": 5, "3:3B0": 6, "2:2B0": 8},
        ),
    ),
    Case(
        name="mario-preposed",
        program=PREPOSED,
        lowered=preposed,
        busy=BUSY,
        sizes=SIZES,
        expected=Expected(
            makespan=38,
            period=38,
            idle={0: 6, 1: 6, 2: 6, 3: 14},
            exposed={r: 0 for r in range(4)},
            time_peaks={
                0: Peak(size=2, moment=4),
                1: Peak(size=1.5, moment=4),
                2: Peak(size=1.375, action="2R0", moment=5),
                3: Peak(size=1.25, action="3RECV_F2", moment=5),
            },
            issue_peaks={
                0: Peak(size=1.5, action="0R0"),
                1: Peak(size=1.375, action="1R0"),
                2: Peak(size=1.375, action="2R0"),
                3: Peak(size=1.125, action="3F0"),
            },
            ends={"2:2C2": 5, "2:2R0": 6, "2:2B0": 8},
        ),
    ),
    Case(
        name="mario-planned",
        graph=GRAPH,
        plan=PLAN,
        program=PLANNED,
        lowered=planned,
        busy=BUSY,
        sizes=SIZES,
        expected=Expected(
            makespan=38,
            period=38,
            idle={0: 6, 1: 6, 2: 6, 3: 14},
            exposed={r: 0 for r in range(4)},
            time_peaks={
                0: Peak(size=1, moment=4),
                1: Peak(size=1.375, moment=4),
                2: Peak(size=1.375, moment=5),
                3: Peak(size=1.125, moment=3),
            },
            issue_peaks={
                0: Peak(size=1, action="0R0"),
                1: Peak(size=1.375, action="1R0"),
                2: Peak(size=1.375, action="2R0"),
                3: Peak(size=1.125, action="3F0"),
            },
        ),
    ),
)
