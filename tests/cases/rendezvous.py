"""1F1B, p 2, m 3, F 1, B 2, messages of 0.5: buffered, rendezvous, and rendezvous on the compute stream.

Messages have streams of their own here, so a sender goes on computing. Buffered: a send ends without its receive; a
receive that has its data costs nothing more (SEND .5, RECV 0). Rendezvous: send and receive start and end together.

    rank 0   F0 0-1  F1 1-2   B0 5-7  F2 7-8  B1 8-10   B2 12-14
    rank 1   F0 1.5-2.5  B0 2.5-4.5  F1 4.5-5.5  B1 5.5-7.5  F2 8.5-9.5  B2 9.5-11.5

Microbatch 0 reaches rank 1 at 1.5, its gradient rank 0 at 5. F2 ends at 8 and reaches rank 1, which ended B1 at 7.5, at
8.5. Of what the ranks wait, .5 each is a message: rank 0 at 4.5 and 11.5, rank 1 at 1, 8 and, after its end, 11.5. B2
ends at 11.5, and at 12 rank 0 starts its last backward: 14. Both kinds of message give the same times, because
every receive is posted on a stream that has nothing else to do: with receives posted early, rendezvous costs nothing.
All messages on the compute stream, in program order: sends take compute time, F1 ends at 2.5, B1 of rank 1 at 8; but
rank 0 still has F2 across at 8.5, and the step still ends at 14. There rank 0 sends F1 before it receives the gradient
of microbatch 0, while rank 1 sends that gradient before it receives F1. Buffered sends get past it. Rendezvous ones
cannot: each waits for the other, for ever.
Source: by hand; the deadlock is why Megatron-LM sends and receives in one call in the steady state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from case_format import Case, Expected

from gnomon.lowering import lower
from gnomon.models.gpt import GptConfig, gpt
from gnomon.plans import Mesh, Optimizer, Overlap, Plan, Schedule
from gnomon.program import Program, parse_program, problems

CONFIG = GptConfig(name="two", num_layers=2, hidden_size=64, num_heads=4, vocab_size=256, max_positions=32, tied=False)
GRAPH = gpt(CONFIG)
PLAN = Plan(mesh=Mesh(pp=2), schedule=Schedule(num_microbatches=3), optimizer=Optimizer(clip=False))
BLOCKING = replace(PLAN, overlap=Overlap(pipeline_sends=False))
BUSY = {"F": 1, "B": 2, "SEND_F": 0.5, "SEND_B": 0.5, "*": 0}
BUFFERED = """\
gnomon.program/1
stages 2
units 3
class 0
  0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0F2 0SEND_F2 0RECV_B1 0B1 0RECV_B2 0B2 0OPT
class 1
  1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1RECV_F2 1F2 1B2 1SEND_B2 1OPT
"""
RENDEZVOUS = """\
gnomon.program/1
stages 2
units 3
comm fwd rendezvous
comm bwd rendezvous
class 0
  0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0F2 0SEND_F2 0RECV_B1 0B1 0RECV_B2 0B2 0OPT
class 1
  1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1RECV_F2 1F2 1B2 1SEND_B2 1OPT
"""
ON_COMPUTE = """\
gnomon.program/1
stages 2
units 3
kind SEND_F on compute comm fwd send 1: consume Y
kind RECV_F on compute comm fwd recv 1: write X
kind SEND_B on compute comm bwd send -1: consume DX
kind RECV_B on compute comm bwd recv -1: write DY
class 0
  0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0F2 0SEND_F2 0RECV_B1 0B1 0RECV_B2 0B2 0OPT
class 1
  1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1RECV_F2 1F2 1B2 1SEND_B2 1OPT
"""
STUCK = """\
gnomon.program/1
stages 2
units 3
kind SEND_F on compute comm fwd send 1: consume Y
kind RECV_F on compute comm fwd recv 1: write X
kind SEND_B on compute comm bwd send -1: consume DX
kind RECV_B on compute comm bwd recv -1: write DY
comm fwd rendezvous
comm bwd rendezvous
class 0
  0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0F2 0SEND_F2 0RECV_B1 0B1 0RECV_B2 0B2 0OPT
class 1
  1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1RECV_F2 1F2 1B2 1SEND_B2 1OPT
"""


def lowered(plan: Plan, messages: Literal["buffered", "rendezvous"]) -> Callable[[], Program]:
    return lambda: lower(GRAPH, plan, messages=messages)


def each_sends_before_it_receives() -> None:
    (problem,) = problems(parse_program(STUCK))
    assert "0:0SEND_F1 (with 1:1RECV_F1) -> 1:1SEND_B0 (with 0:0RECV_B0) -> 0:0SEND_F1" in str(problem)


CASES = (
    Case(
        name="rendezvous-not-needed-when-buffered",
        graph=GRAPH,
        plan=PLAN,
        program=BUFFERED,
        lowered=lowered(PLAN, "buffered"),
        busy=BUSY,
        expected=Expected(
            makespan=14,
            period=14,
            idle={0: 5, 1: 5},
            exposed={0: 1, 1: 1.5},
            ends={"0:0SEND_F0": 1.5, "1:1B0": 4.5, "0:0B0": 7},
        ),
    ),
    Case(
        name="rendezvous-on-own-streams",
        graph=GRAPH,
        plan=PLAN,
        program=RENDEZVOUS,
        lowered=lowered(PLAN, "rendezvous"),
        busy=BUSY,
        expected=Expected(
            makespan=14,
            period=14,
            idle={0: 5, 1: 5},
            exposed={0: 1, 1: 1.5},
            ends={"1:1RECV_F0": 1.5, "1:1B0": 4.5, "0:0B0": 7},
        ),
    ),
    Case(
        name="rendezvous-buffered-on-compute",
        graph=GRAPH,
        plan=BLOCKING,
        program=ON_COMPUTE,
        lowered=lowered(BLOCKING, "buffered"),
        busy=BUSY,
        expected=Expected(makespan=14, period=14, ends={"0:0F1": 2.5, "1:1B1": 8, "0:0SEND_F2": 8.5}),
    ),
    Case(
        name="rendezvous-on-compute",
        graph=GRAPH,
        plan=BLOCKING,
        program=STUCK,
        lowered=lowered(BLOCKING, "rendezvous"),
        expected=Expected(problem="deadlock"),
        also=(each_sends_before_it_receives,),
    ),
)
