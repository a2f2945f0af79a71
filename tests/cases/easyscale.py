"""EasyScale: four logical workers on two devices, one and four; F 1, B 2, RED 1, each message 1, OPT 1.

The sum is always ((0 + 1) + 2) + 3, so the run on two devices ends with the very numbers of the run on four.

- Workers 0 and 1 on device 0, 2 and 3 on device 1. Both devices compute until 6. The sum: RED1 ends at 7, travels
  until 8, RED2 9, RED3 10; the total is back at device 0 at 11; both update until 12.
- Dealt in turn, 0 1 0 1: the sum changes device after every worker: RED0 4, RED1 6, RED2 8, RED3 10; then as before.
- All on one device: computes until 12, RED3 13, OPT 14. No message.
- One device each: RED0 4, RED1 6, RED2 8, RED3 10, as when dealt in turn; the total goes to devices 0, 1, 2 one after
  the other, 11, 12, 13, so device 2 updates until 14. The period is 12: device 0 has the total first, starts its next
  forward at 12, and nobody is waited for longer.

Exposed are the messages that a device waits for: 2; 3; none; and with one device each 4 until the total is at device 0
and one for each further device: 5, 5, 6, 6 (device 0 waits for the last one at the end).

Memory with S 2, a worker's gradient (DP) 1 and the sum (G) 1: one worker's activations at a time, however many workers
a device has. In issue order S, DP and G in the second worker's backward: 4; dealt in turn the sum is away by then, one
device each has only its own: 3. In time a worker's forward runs beside the RED of the one before, at 3: S, DP and G,
4; device 1 of the pairs has two DP, for its first RED waits until 8: 4 in B3 from 4; dealt in turn the sum is there
too, from 5: 5. Source: EasyScale (SC 2023) for the method; the numbers from an independent simulation.
"""

from __future__ import annotations

from collections.abc import Callable

from case_format import Case, Expected, Peak

from gnomon.methods.easyscale import additions, easyscale
from gnomon.program import Program, parse_program, validate

PAIRS = """\
gnomon.program/1
stages 2
unit 0 = 0:0:1 weight 0.25
unit 1 = 1:0:1 weight 0.25 worker 1
unit 2 = 2:0:1 weight 0.25 worker 2
unit 3 = 3:0:1 weight 0.25 worker 3
chains 0 1
buffer DP step per unit
kind B on compute: read P, consume S, write DP
kind RED on reduce: consume DP, accumulate G
kind SEND_G on send comm sum send 1: consume G
kind RECV_G on recv comm sum recv 1: write G
kind SEND_T on send comm total send 1: read G
kind RECV_T on recv comm total recv 1: write G
class 0
  0F0 0B0 0RED0 0F1 0B1 0RED1 0SEND_G1>1 0RECV_T>1 0OPT
class 1
  1F2 1B2 1RECV_G1>0 1RED2 1F3 1B3 1RED3 1SEND_T>0 1OPT
"""
IN_TURN = """\
gnomon.program/1
stages 2
unit 0 = 0:0:1 weight 0.25
unit 1 = 1:0:1 weight 0.25 worker 1
unit 2 = 2:0:1 weight 0.25 worker 2
unit 3 = 3:0:1 weight 0.25 worker 3
chains 0 1
buffer DP step per unit
kind B on compute: read P, consume S, write DP
kind RED on reduce: consume DP, accumulate G
kind SEND_G on send comm sum send 1: consume G
kind RECV_G on recv comm sum recv 1: write G
kind SEND_T on send comm total send 1: read G
kind RECV_T on recv comm total recv 1: write G
class 0
  0F0 0B0 0RED0 0SEND_G0>1 0F2 0B2 0RECV_G1>1 0RED2 0SEND_G2>1 0RECV_T>1 0OPT
class 1
  1F1 1B1 1RECV_G0>0 1RED1 1SEND_G1>0 1F3 1B3 1RECV_G2>0 1RED3 1SEND_T>0 1OPT
"""
ALONE = """\
gnomon.program/1
stages 1
unit 0 = 0:0:1 weight 0.25
unit 1 = 1:0:1 weight 0.25 worker 1
unit 2 = 2:0:1 weight 0.25 worker 2
unit 3 = 3:0:1 weight 0.25 worker 3
buffer DP step per unit
kind B on compute: read P, consume S, write DP
kind RED on reduce: consume DP, accumulate G
kind SEND_G on send comm sum send 1: consume G
kind RECV_G on recv comm sum recv 1: write G
kind SEND_T on send comm total send 1: read G
kind RECV_T on recv comm total recv 1: write G
class 0
  0F0 0B0 0RED0 0F1 0B1 0RED1 0F2 0B2 0RED2 0F3 0B3 0RED3 0OPT
"""
EACH = """\
gnomon.program/1
stages 4
unit 0 = 0:0:1 weight 0.25
unit 1 = 1:0:1 weight 0.25 worker 1
unit 2 = 2:0:1 weight 0.25 worker 2
unit 3 = 3:0:1 weight 0.25 worker 3
chains 0 1 2 3
buffer DP step per unit
kind B on compute: read P, consume S, write DP
kind RED on reduce: consume DP, accumulate G
kind SEND_G on send comm sum send 1: consume G
kind RECV_G on recv comm sum recv 1: write G
kind SEND_T on send comm total send 1: read G
kind RECV_T on recv comm total recv 1: write G
class 0
  0F0 0B0 0RED0 0SEND_G0>1 0RECV_T>3 0OPT
class 1
  1F1 1B1 1RECV_G0>0 1RED1 1SEND_G1>2 1RECV_T>3 1OPT
class 2
  2F2 2B2 2RECV_G1>1 2RED2 2SEND_G2>3 2RECV_T>3 2OPT
class 3
  3F3 3B3 3RECV_G2>2 3RED3 3SEND_T>0 3SEND_T>1 3SEND_T>2 3OPT
"""
SIZES = {"S": 2, "DP": 1, "G": 1, "X": 0, "Y": 0, "DX": 0, "DY": 0, "P": 0}
BUSY = {"F": 1, "B": 2, "RED": 1, "OPT": 1}
MESSAGES = {"SEND_G": 1, "SEND_T": 1, "*": 0}


def on(*devices: int) -> Callable[[], Program]:
    return lambda: easyscale(devices)


def in_order_of_workers(program: str) -> Callable[[], None]:
    def check() -> None:
        orders = additions(validate(parse_program(program)))
        assert orders == ((0, 1, 2, 3),) * len(orders)

    return check


CASES = (
    Case(
        name="easyscale-pairs",
        program=PAIRS,
        lowered=on(0, 0, 1, 1),
        busy={**BUSY, **MESSAGES},
        sizes=SIZES,
        expected=Expected(
            issue_peaks={0: Peak(size=4, action="0B1"), 1: Peak(size=4, action="1B3")},
            time_peaks={0: Peak(size=4, moment=3), 1: Peak(size=4, action="1B3", moment=4)},
            makespan=12,
            period=12,
            idle={0: 5, 1: 5},
            exposed={0: 2, 1: 2},
            ends={"0:0RED1": 7, "1:1RED2": 9, "1:1RED3": 10, "0:0OPT": 12, "1:1OPT": 12},
        ),
        also=(in_order_of_workers(PAIRS),),
    ),
    Case(
        name="easyscale-in-turn",
        program=IN_TURN,
        lowered=on(0, 1, 0, 1),
        busy={**BUSY, **MESSAGES},
        sizes=SIZES,
        expected=Expected(
            issue_peaks={0: Peak(size=3, action="0B0"), 1: Peak(size=3, action="1B1")},
            time_peaks={0: Peak(size=4, moment=3), 1: Peak(size=5, action="1RECV_G0", moment=5)},
            makespan=12,
            period=12,
            idle={0: 5, 1: 5},
            exposed={0: 3, 1: 3},
            ends={"0:0RED0": 4, "1:1RED1": 6, "0:0RED2": 8, "1:1RED3": 10},
        ),
        also=(in_order_of_workers(IN_TURN),),
    ),
    Case(
        name="easyscale-alone",
        program=ALONE,
        lowered=on(0, 0, 0, 0),
        busy=BUSY,
        sizes=SIZES,
        expected=Expected(
            issue_peaks={0: Peak(size=4, action="0B1")},
            time_peaks={0: Peak(size=4, moment=3)},
            makespan=14,
            period=14,
            idle={0: 1},
            exposed={0: 0},
            ends={"0:0RED3": 13},
        ),
        also=(in_order_of_workers(ALONE),),
    ),
    Case(
        name="easyscale-each",
        program=EACH,
        lowered=on(0, 1, 2, 3),
        busy={**BUSY, **MESSAGES},
        sizes=SIZES,
        expected=Expected(
            issue_peaks={r: Peak(size=3, action=f"{r}B{r}") for r in range(4)},
            time_peaks={r: Peak(size=3, action=f"{r}B{r}", moment=1) for r in range(4)},
            makespan=14,
            period=12,
            exposed={0: 5, 1: 5, 2: 6, 3: 6},
            idle={r: 10 for r in range(4)},
            ends={"3:3RED3": 10, "0:0OPT": 12, "1:1OPT": 13, "2:2OPT": 14, "3:3OPT": 14},
        ),
        also=(in_order_of_workers(EACH),),
    ),
)
