"""DAPPLE's two warm-up policies and GPipe when messages take time: p 4, m 12, F 1, B 2, latency c a hop.

A message occupies nothing; its receiver sees it c later (a lag of the sends). Policy `p` injects p - r microbatches on
rank r before the first backward, `2p` injects 2(p - r) - 1. Makespans at c = 0, 1, 2, 3:

    p      45   67   89  111     45 + 22c
    2p     45   51   61   75
    GPipe  45   51   57   63     45 + 6c

GPipe pays the 2·3 hops of filling and draining once. Under `p` rank 0 has four microbatches in flight and a round trip
takes (p·F + 3c) + (p·B + 3c) = 12 + 6c, so B4 ends one trip after B0, at 24 + 12c. Within a trip B1 follows 3 after
B0, but B2 and B3 another 3 + 2c each: ranks 2 and 3 share two microbatches, and rank 3 gets the next one only after a
gradient and a microbatch have crossed the last hop. So B0 ends at 12 + 6c, B3 at 21 + 10c and B11, two trips later, at
45 + 22c. `2p` sends enough ahead to hide c = F: 45 + 6c there, like GPipe with little more than half of its memory.
Activations (S, size 1), in both orders: 4, 3, 2, 1 · 7, 5, 3, 1 · 12 each. Rank r forwards from r(F + c) on without a
break, so it reaches its n-th at r(1 + c) + n - 1. Every rank computes 36 and is idle for the rest; under GPipe 6c of
it is the wait for messages. Source: DAPPLE (Fan et al. 2021), section 3; the twelve numbers also from an independent
simulation.
"""

from __future__ import annotations

from collections.abc import Callable

from case_format import Case, Expected, Peak

from gnomon.lowering import lower
from gnomon.models.gpt import GptConfig, gpt
from gnomon.plans import Mesh, Optimizer, Pass, Plan, Schedule
from gnomon.program import Program

CONFIG = GptConfig(name="four", num_layers=4, hidden_size=64, num_heads=4, vocab_size=256, max_positions=32, tied=False)
GRAPH = gpt(CONFIG)
WARM_UP_P = Schedule(num_microbatches=12, passes=(Pass(name="dapple_warmup", params=(("policy", "p"),)),))
WARM_UP_2P = Schedule(num_microbatches=12, passes=(Pass(name="dapple_warmup", params=(("policy", "2p"),)),))
GPIPE = Schedule(name="gpipe", num_microbatches=12)
P = """\
gnomon.program/1
stages 4
units 12
class 0
  0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0F3 0SEND_F3 0RECV_B0 0B0 0F4 0SEND_F4 0RECV_B1 0B1 0F5
  0SEND_F5 0RECV_B2 0B2 0F6 0SEND_F6 0RECV_B3 0B3 0F7 0SEND_F7 0RECV_B4 0B4 0F8 0SEND_F8 0RECV_B5
  0B5 0F9 0SEND_F9 0RECV_B6 0B6 0F10 0SEND_F10 0RECV_B7 0B7 0F11 0SEND_F11 0RECV_B8 0B8 0RECV_B9 0B9
  0RECV_B10 0B10 0RECV_B11 0B11 0OPT
class 1
  1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 1RECV_F2 1F2 1SEND_F2 1RECV_B0 1B0 1SEND_B0 1RECV_F3
  1F3 1SEND_F3 1RECV_B1 1B1 1SEND_B1 1RECV_F4 1F4 1SEND_F4 1RECV_B2 1B2 1SEND_B2 1RECV_F5 1F5
  1SEND_F5 1RECV_B3 1B3 1SEND_B3 1RECV_F6 1F6 1SEND_F6 1RECV_B4 1B4 1SEND_B4 1RECV_F7 1F7 1SEND_F7
  1RECV_B5 1B5 1SEND_B5 1RECV_F8 1F8 1SEND_F8 1RECV_B6 1B6 1SEND_B6 1RECV_F9 1F9 1SEND_F9 1RECV_B7
  1B7 1SEND_B7 1RECV_F10 1F10 1SEND_F10 1RECV_B8 1B8 1SEND_B8 1RECV_F11 1F11 1SEND_F11 1RECV_B9 1B9
  1SEND_B9 1RECV_B10 1B10 1SEND_B10 1RECV_B11 1B11 1SEND_B11 1OPT
class 2
  2RECV_F0 2F0 2SEND_F0 2RECV_F1 2F1 2SEND_F1 2RECV_B0 2B0 2SEND_B0 2RECV_F2 2F2 2SEND_F2 2RECV_B1
  2B1 2SEND_B1 2RECV_F3 2F3 2SEND_F3 2RECV_B2 2B2 2SEND_B2 2RECV_F4 2F4 2SEND_F4 2RECV_B3 2B3
  2SEND_B3 2RECV_F5 2F5 2SEND_F5 2RECV_B4 2B4 2SEND_B4 2RECV_F6 2F6 2SEND_F6 2RECV_B5 2B5 2SEND_B5
  2RECV_F7 2F7 2SEND_F7 2RECV_B6 2B6 2SEND_B6 2RECV_F8 2F8 2SEND_F8 2RECV_B7 2B7 2SEND_B7 2RECV_F9
  2F9 2SEND_F9 2RECV_B8 2B8 2SEND_B8 2RECV_F10 2F10 2SEND_F10 2RECV_B9 2B9 2SEND_B9 2RECV_F11 2F11
  2SEND_F11 2RECV_B10 2B10 2SEND_B10 2RECV_B11 2B11 2SEND_B11 2OPT
class 3
  3RECV_F0 3F0 3B0 3SEND_B0 3RECV_F1 3F1 3B1 3SEND_B1 3RECV_F2 3F2 3B2 3SEND_B2 3RECV_F3 3F3 3B3
  3SEND_B3 3RECV_F4 3F4 3B4 3SEND_B4 3RECV_F5 3F5 3B5 3SEND_B5 3RECV_F6 3F6 3B6 3SEND_B6 3RECV_F7
  3F7 3B7 3SEND_B7 3RECV_F8 3F8 3B8 3SEND_B8 3RECV_F9 3F9 3B9 3SEND_B9 3RECV_F10 3F10 3B10 3SEND_B10
  3RECV_F11 3F11 3B11 3SEND_B11 3OPT
"""
TWO_P = """\
gnomon.program/1
stages 4
units 12
class 0
  0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0F3 0SEND_F3 0F4 0SEND_F4 0F5 0SEND_F5 0F6 0SEND_F6
  0RECV_B0 0B0 0F7 0SEND_F7 0RECV_B1 0B1 0F8 0SEND_F8 0RECV_B2 0B2 0F9 0SEND_F9 0RECV_B3 0B3 0F10
  0SEND_F10 0RECV_B4 0B4 0F11 0SEND_F11 0RECV_B5 0B5 0RECV_B6 0B6 0RECV_B7 0B7 0RECV_B8 0B8 0RECV_B9
  0B9 0RECV_B10 0B10 0RECV_B11 0B11 0OPT
class 1
  1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 1RECV_F2 1F2 1SEND_F2 1RECV_F3 1F3 1SEND_F3 1RECV_F4
  1F4 1SEND_F4 1RECV_B0 1B0 1SEND_B0 1RECV_F5 1F5 1SEND_F5 1RECV_B1 1B1 1SEND_B1 1RECV_F6 1F6
  1SEND_F6 1RECV_B2 1B2 1SEND_B2 1RECV_F7 1F7 1SEND_F7 1RECV_B3 1B3 1SEND_B3 1RECV_F8 1F8 1SEND_F8
  1RECV_B4 1B4 1SEND_B4 1RECV_F9 1F9 1SEND_F9 1RECV_B5 1B5 1SEND_B5 1RECV_F10 1F10 1SEND_F10
  1RECV_B6 1B6 1SEND_B6 1RECV_F11 1F11 1SEND_F11 1RECV_B7 1B7 1SEND_B7 1RECV_B8 1B8 1SEND_B8
  1RECV_B9 1B9 1SEND_B9 1RECV_B10 1B10 1SEND_B10 1RECV_B11 1B11 1SEND_B11 1OPT
class 2
  2RECV_F0 2F0 2SEND_F0 2RECV_F1 2F1 2SEND_F1 2RECV_F2 2F2 2SEND_F2 2RECV_B0 2B0 2SEND_B0 2RECV_F3
  2F3 2SEND_F3 2RECV_B1 2B1 2SEND_B1 2RECV_F4 2F4 2SEND_F4 2RECV_B2 2B2 2SEND_B2 2RECV_F5 2F5
  2SEND_F5 2RECV_B3 2B3 2SEND_B3 2RECV_F6 2F6 2SEND_F6 2RECV_B4 2B4 2SEND_B4 2RECV_F7 2F7 2SEND_F7
  2RECV_B5 2B5 2SEND_B5 2RECV_F8 2F8 2SEND_F8 2RECV_B6 2B6 2SEND_B6 2RECV_F9 2F9 2SEND_F9 2RECV_B7
  2B7 2SEND_B7 2RECV_F10 2F10 2SEND_F10 2RECV_B8 2B8 2SEND_B8 2RECV_F11 2F11 2SEND_F11 2RECV_B9 2B9
  2SEND_B9 2RECV_B10 2B10 2SEND_B10 2RECV_B11 2B11 2SEND_B11 2OPT
class 3
  3RECV_F0 3F0 3B0 3SEND_B0 3RECV_F1 3F1 3B1 3SEND_B1 3RECV_F2 3F2 3B2 3SEND_B2 3RECV_F3 3F3 3B3
  3SEND_B3 3RECV_F4 3F4 3B4 3SEND_B4 3RECV_F5 3F5 3B5 3SEND_B5 3RECV_F6 3F6 3B6 3SEND_B6 3RECV_F7
  3F7 3B7 3SEND_B7 3RECV_F8 3F8 3B8 3SEND_B8 3RECV_F9 3F9 3B9 3SEND_B9 3RECV_F10 3F10 3B10 3SEND_B10
  3RECV_F11 3F11 3B11 3SEND_B11 3OPT
"""
ALL = """\
gnomon.program/1
stages 4
units 12
class 0
  0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0F3 0SEND_F3 0F4 0SEND_F4 0F5 0SEND_F5 0F6 0SEND_F6 0F7
  0SEND_F7 0F8 0SEND_F8 0F9 0SEND_F9 0F10 0SEND_F10 0F11 0SEND_F11 0RECV_B0 0B0 0RECV_B1 0B1
  0RECV_B2 0B2 0RECV_B3 0B3 0RECV_B4 0B4 0RECV_B5 0B5 0RECV_B6 0B6 0RECV_B7 0B7 0RECV_B8 0B8
  0RECV_B9 0B9 0RECV_B10 0B10 0RECV_B11 0B11 0OPT
class 1
  1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 1RECV_F2 1F2 1SEND_F2 1RECV_F3 1F3 1SEND_F3 1RECV_F4
  1F4 1SEND_F4 1RECV_F5 1F5 1SEND_F5 1RECV_F6 1F6 1SEND_F6 1RECV_F7 1F7 1SEND_F7 1RECV_F8 1F8
  1SEND_F8 1RECV_F9 1F9 1SEND_F9 1RECV_F10 1F10 1SEND_F10 1RECV_F11 1F11 1SEND_F11 1RECV_B0 1B0
  1SEND_B0 1RECV_B1 1B1 1SEND_B1 1RECV_B2 1B2 1SEND_B2 1RECV_B3 1B3 1SEND_B3 1RECV_B4 1B4 1SEND_B4
  1RECV_B5 1B5 1SEND_B5 1RECV_B6 1B6 1SEND_B6 1RECV_B7 1B7 1SEND_B7 1RECV_B8 1B8 1SEND_B8 1RECV_B9
  1B9 1SEND_B9 1RECV_B10 1B10 1SEND_B10 1RECV_B11 1B11 1SEND_B11 1OPT
class 2
  2RECV_F0 2F0 2SEND_F0 2RECV_F1 2F1 2SEND_F1 2RECV_F2 2F2 2SEND_F2 2RECV_F3 2F3 2SEND_F3 2RECV_F4
  2F4 2SEND_F4 2RECV_F5 2F5 2SEND_F5 2RECV_F6 2F6 2SEND_F6 2RECV_F7 2F7 2SEND_F7 2RECV_F8 2F8
  2SEND_F8 2RECV_F9 2F9 2SEND_F9 2RECV_F10 2F10 2SEND_F10 2RECV_F11 2F11 2SEND_F11 2RECV_B0 2B0
  2SEND_B0 2RECV_B1 2B1 2SEND_B1 2RECV_B2 2B2 2SEND_B2 2RECV_B3 2B3 2SEND_B3 2RECV_B4 2B4 2SEND_B4
  2RECV_B5 2B5 2SEND_B5 2RECV_B6 2B6 2SEND_B6 2RECV_B7 2B7 2SEND_B7 2RECV_B8 2B8 2SEND_B8 2RECV_B9
  2B9 2SEND_B9 2RECV_B10 2B10 2SEND_B10 2RECV_B11 2B11 2SEND_B11 2OPT
class 3
  3RECV_F0 3F0 3RECV_F1 3F1 3RECV_F2 3F2 3RECV_F3 3F3 3RECV_F4 3F4 3RECV_F5 3F5 3RECV_F6 3F6
  3RECV_F7 3F7 3RECV_F8 3F8 3RECV_F9 3F9 3RECV_F10 3F10 3RECV_F11 3F11 3B0 3SEND_B0 3B1 3SEND_B1 3B2
  3SEND_B2 3B3 3SEND_B3 3B4 3SEND_B4 3B5 3SEND_B5 3B6 3SEND_B6 3B7 3SEND_B7 3B8 3SEND_B8 3B9
  3SEND_B9 3B10 3SEND_B10 3B11 3SEND_B11 3OPT
"""


def lowered(plan: Plan) -> Callable[[], Program]:
    return lambda: lower(GRAPH, plan)


def case(policy: str, schedule: Schedule, program: str, latency: float, makespan: float, held: tuple[int, ...]) -> Case:
    plan = Plan(mesh=Mesh(pp=4), schedule=schedule, optimizer=Optimizer(clip=False))
    return Case(
        name=f"dapple_warm_up-{policy}-latency-{latency}",
        graph=GRAPH,
        plan=plan,
        program=program,
        lowered=lowered(plan),
        busy={"F": 1, "B": 2, "*": 0},
        lag={"SEND_F": latency, "SEND_B": latency},
        sizes={"S": 1, "X": 0, "Y": 0, "DX": 0, "DY": 0, "P": 0, "G": 0},
        expected=Expected(
            makespan=makespan,
            period=makespan,
            idle={r: makespan - 36 for r in range(4)},
            exposed={r: 6 * latency for r in range(4)} if policy == "gpipe" or not latency else {},
            issue_peaks={r: Peak(size=count, action=f"{r}F{count - 1}") for r, count in enumerate(held)},
            time_peaks={r: Peak(size=n, moment=r * (1 + latency) + n - 1) for r, n in enumerate(held)},
        ),
    )


CASES = (
    *(case("p", WARM_UP_P, P, c, 45 + 22 * c, (4, 3, 2, 1)) for c in range(4)),
    *(case("2p", WARM_UP_2P, TWO_P, c, end, (7, 5, 3, 1)) for c, end in enumerate((45, 51, 61, 75))),
    *(case("gpipe", GPIPE, ALL, c, 45 + 6 * c, (12, 12, 12, 12)) for c in range(4)),
)
