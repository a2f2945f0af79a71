"""Ring attention under a causal mask: 8 tokens over cp 4, contiguous (unbalanced) and zig-zag (its cure).

Work is counted in (query, key) pairs, one second each: 8·9/2 = 36 in all, 9 a rank if it were even.

Contiguous, 2 tokens a rank: 3 pairs with a rank's own keys, 4 with those of an earlier rank, none with a later one's.
Ranks do 3, 7, 11, 15. With 2 for a message all are hidden: rank 3 works without a break until 15, at 60% of the whole.
With 5 rank 3 waits for the keys of rank 2 from 3 to 5, then 1 in each of the next two steps: 19, exposed 4.

Zig-zag, rank r holds tokens r and 7 - r: with its own keys 1 + 1 pairs and 1 of token 7 - r with r, so 3; with those of
an earlier rank both tokens see that rank's first one, with those of a later rank the second token sees both: 2 each.
Every rank does 3 + 2 + 2 + 2 = 9 and with messages of 2 nobody waits: 9. With 3 each of the last two steps waits for
its keys, which come at 6 and 9 where work ends at 5 and 8: 11, exposed 2.

Keys and values are double-buffered: a rank has room for two units (pool 2), so it receives the next one only once the
one before the present has been used and sent on: the first receive takes the second place, at 0. The next step starts
when the last rank is done, so periods are makespans. Ring attention: Liu et al. 2023; numbers by hand.
"""

from __future__ import annotations

from collections.abc import Callable

from case_format import Case, Expected, Peak

from gnomon.lowering.context_parallel import ring_attention
from gnomon.program import Program

CONTIGUOUS = """\
gnomon.program/1
stages 4
unit 0 = 0:0:2 weight 0.25
unit 1 = 0:2:4 weight 0.25
unit 2 = 0:4:6 weight 0.25
unit 3 = 0:6:8 weight 0.25
chains 0 1 2 3
buffer KV step per unit pool kv
pool kv 2
kind QKV on compute: read P, write KV
kind SEND_KV on send comm ring send 1: read KV
kind RECV_KV on recv comm ring recv 1: write KV
kind DIAG on compute: read KV
kind ATTN on compute: read KV
kind DROP on compute: consume KV
comm ring rendezvous
class 0
  0QKV0 0SEND_KV0>1 0RECV_KV3>3 0DIAG0 0DROP0 0SEND_KV3>1 0RECV_KV2>3 0DROP3 0SEND_KV2>1 0RECV_KV1>3
  0DROP2 0DROP1
class 1
  1QKV1 1SEND_KV1>2 1RECV_KV0>0 1DIAG1 1DROP1 1SEND_KV0>2 1RECV_KV3>0 1ATTN0 1DROP0 1SEND_KV3>2
  1RECV_KV2>0 1DROP3 1DROP2
class 2
  2QKV2 2SEND_KV2>3 2RECV_KV1>1 2DIAG2 2DROP2 2SEND_KV1>3 2RECV_KV0>1 2ATTN1 2DROP1 2SEND_KV0>3
  2RECV_KV3>1 2ATTN0 2DROP0 2DROP3
class 3
  3QKV3 3SEND_KV3>0 3RECV_KV2>2 3DIAG3 3DROP3 3SEND_KV2>0 3RECV_KV1>2 3ATTN2 3DROP2 3SEND_KV1>0
  3RECV_KV0>2 3ATTN1 3DROP1 3ATTN0 3DROP0
"""
ZIGZAG = """\
gnomon.program/1
stages 4
unit 0 = 0:0:1 0:7:8 weight 0.25
unit 1 = 0:1:2 0:6:7 weight 0.25
unit 2 = 0:2:3 0:5:6 weight 0.25
unit 3 = 0:3:4 0:4:5 weight 0.25
chains 0 1 2 3
buffer KV step per unit pool kv
pool kv 2
kind QKV on compute: read P, write KV
kind SEND_KV on send comm ring send 1: read KV
kind RECV_KV on recv comm ring recv 1: write KV
kind DIAG on compute: read KV
kind ATTN on compute: read KV
kind DROP on compute: consume KV
comm ring rendezvous
class 0
  0QKV0 0SEND_KV0>1 0RECV_KV3>3 0DIAG0 0DROP0 0SEND_KV3>1 0RECV_KV2>3 0ATTN3 0DROP3 0SEND_KV2>1
  0RECV_KV1>3 0ATTN2 0DROP2 0ATTN1 0DROP1
class 1
  1QKV1 1SEND_KV1>2 1RECV_KV0>0 1DIAG1 1DROP1 1SEND_KV0>2 1RECV_KV3>0 1ATTN0 1DROP0 1SEND_KV3>2
  1RECV_KV2>0 1ATTN3 1DROP3 1ATTN2 1DROP2
class 2
  2QKV2 2SEND_KV2>3 2RECV_KV1>1 2DIAG2 2DROP2 2SEND_KV1>3 2RECV_KV0>1 2ATTN1 2DROP1 2SEND_KV0>3
  2RECV_KV3>1 2ATTN0 2DROP0 2ATTN3 2DROP3
class 3
  3QKV3 3SEND_KV3>0 3RECV_KV2>2 3DIAG3 3DROP3 3SEND_KV2>0 3RECV_KV1>2 3ATTN2 3DROP2 3SEND_KV1>0
  3RECV_KV0>2 3ATTN1 3DROP1 3ATTN0 3DROP0
"""


def lowered(order: str) -> Callable[[], Program]:
    return lambda: ring_attention(8, 4, order)


def case(order: str, message: float, expected: Expected) -> Case:
    return Case(
        name=f"ring_attention-{order}-{message}",
        program=CONTIGUOUS if order == "contiguous" else ZIGZAG,
        lowered=lowered(order),
        busy={"DIAG": 3, "ATTN": 4 if order == "contiguous" else 2, "SEND_KV": message, "RECV_KV": message, "*": 0},
        sizes={"KV": 1, "P": 0},
        expected=expected,
    )


RECEIVED = {r: Peak(size=2, action=f"{r}RECV_KV{(r - 1) % 4}") for r in range(4)}
TWO_UNITS = {r: Peak(size=2, moment=0) for r in range(4)}
CASES = (
    case(
        "contiguous",
        2,
        Expected(
            makespan=15,
            period=15,
            idle={0: 12, 1: 8, 2: 4, 3: 0},
            exposed={3: 0},
            ends={"0:0DIAG0": 3, "1:1ATTN0": 7, "2:2ATTN0": 11, "3:3ATTN0": 15},
            issue_peaks=RECEIVED,
            time_peaks=TWO_UNITS,
        ),
    ),
    case(
        "contiguous",
        5,
        Expected(
            makespan=19,
            period=19,
            idle={3: 4},
            exposed={3: 4},
            ends={"3:3ATTN2": 9, "3:3ATTN1": 14, "3:3ATTN0": 19},
            issue_peaks=RECEIVED,
            time_peaks=TWO_UNITS,
        ),
    ),
    case(
        "zigzag",
        2,
        Expected(
            makespan=9,
            period=9,
            idle={r: 0 for r in range(4)},
            exposed={r: 0 for r in range(4)},
            issue_peaks=RECEIVED,
            time_peaks=TWO_UNITS,
        ),
    ),
    case(
        "zigzag",
        3,
        Expected(
            makespan=11,
            period=11,
            idle={r: 2 for r in range(4)},
            exposed={r: 2 for r in range(4)},
            ends={"0:0ATTN3": 5, "0:0ATTN2": 8, "0:0ATTN1": 11, "3:3ATTN0": 11},
            issue_peaks=RECEIVED,
            time_peaks=TWO_UNITS,
        ),
    ),
)
