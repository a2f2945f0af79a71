"""Skrull: sequences of 4, 4, 4, 4 and 8 tokens on cp 2, room for 12 tokens a rank: whole ones and a divided one.

Work is the square of the length, backward twice that. DACP keeps the 4s whole, two on each rank (32 of work), and
divides the 8, 4 tokens and 64/2 = 32 of work a rank; its keys and values take 1 a token to exchange (8), a rank's part
1/4 a token to project (1, backward 2).
- `hidden`: 1 QKV, 32 LOCAL with the exchange beside it, 32 DIST; backward 64, 64 with the exchange beside it, 2: 195.
- `exposed`, the exchange five times as slow, 40: forward waits 8 for it, backward hides it: 203.
- `divided`, all sequences divided, as without Skrull: projections 3 and 6, the exchange of 24 tokens, 24 each way,
  with nothing beside it: 3 + 24 + 64 + 128 + 24 + 6 = 249, exposed 48.
- `uneven`, sequences 2, 4 and 8 with room for 8: rank 0 has the 2 (4 of work), rank 1 the 4 (16). Forward: rank 0
  attends at 9, when the exchange ends, to 41; rank 1 at 17 to 49. Backward DIST_B until 105 and 113, where the
  exchange starts; rank 0 does LOCAL_B 105-113, waits until 121 and is done at 123; rank 1 does LOCAL_B 113-145 and is
  done at 147. Exposed on rank 0: 4 forward, 8 backward. Rank 1 has no pause, so every period is the makespan.
Forward times are the paper's objective, max over ranks of max(exchange, whole) + divided, and QKV: 65, 73, 91, 49.

Memory with 1/4 a token for what backward needs (SL of whole, S of divided sequences), for keys and values (KVL a
rank's own, KV all) and for their gradients. Most is held when DIST_B starts: KV 2, DKV 2, S 1 and SL 2 for the two
whole 4s: 7 at 65 or 73. `divided`: KV 6, DKV 6 and S 3: 15, at 91. `uneven`: SL is .5 and 1: 5.5 at 41 and 6 at 49.
Source: Skrull (NeurIPS 2025), sections on DACP and its cost model; numbers by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from case_format import Case, Expected, Peak

from gnomon.methods.skrull import gds, microbatch_step
from gnomon.plans import Unit
from gnomon.program import Program

HIDDEN = """\
gnomon.program/1
stages 1
unit 0 = 0:0:4 1:0:4 2:0:4 3:0:4 4:0:8 weight 1.0 local 0:0 1:1 2:0 3:1
buffer KVL step per unit
buffer KV step per unit
buffer SL step per unit
buffer DKV step per unit
buffer DKVL step per unit
kind QKV on compute: read P, write KVL
kind AG_KV on cp comm cp: consume KVL, write KV
kind LOCAL on compute: read P, write SL
kind DIST on compute: read P, read KV, write S
kind DIST_B on compute: read P, consume S, consume KV, write DKV, accumulate G
kind RS_DKV on cp comm cp: consume DKV, write DKVL
kind LOCAL_B on compute: read P, consume SL, accumulate G
kind QKV_B on compute: read P, consume DKVL, accumulate G
comm cp collective
comm fwd buffered
comm bwd buffered
comm dp collective
class 0
  0QKV0 0AG_KV0#0 0LOCAL0 0DIST0 0DIST_B0 0RS_DKV0#1 0LOCAL_B0 0QKV_B0 0OPT
class 1
  0QKV0 0AG_KV0#0 0LOCAL0 0DIST0 0DIST_B0 0RS_DKV0#1 0LOCAL_B0 0QKV_B0 0OPT
"""
DIVIDED = """\
gnomon.program/1
stages 1
unit 0 = 0:0:4 1:0:4 2:0:4 3:0:4 4:0:8 weight 1.0
buffer KVL step per unit
buffer KV step per unit
buffer SL step per unit
buffer DKV step per unit
buffer DKVL step per unit
kind QKV on compute: read P, write KVL
kind AG_KV on cp comm cp: consume KVL, write KV
kind LOCAL on compute: read P, write SL
kind DIST on compute: read P, read KV, write S
kind DIST_B on compute: read P, consume S, consume KV, write DKV, accumulate G
kind RS_DKV on cp comm cp: consume DKV, write DKVL
kind LOCAL_B on compute: read P, consume SL, accumulate G
kind QKV_B on compute: read P, consume DKVL, accumulate G
comm cp collective
comm fwd buffered
comm bwd buffered
comm dp collective
class 0
  0QKV0 0AG_KV0#0 0DIST0 0DIST_B0 0RS_DKV0#1 0QKV_B0 0OPT
class 1
  0QKV0 0AG_KV0#0 0DIST0 0DIST_B0 0RS_DKV0#1 0QKV_B0 0OPT
"""
UNEVEN = """\
gnomon.program/1
stages 1
unit 0 = 0:0:2 1:0:4 2:0:8 weight 1.0 local 0:0 1:1
buffer KVL step per unit
buffer KV step per unit
buffer SL step per unit
buffer DKV step per unit
buffer DKVL step per unit
kind QKV on compute: read P, write KVL
kind AG_KV on cp comm cp: consume KVL, write KV
kind LOCAL on compute: read P, write SL
kind DIST on compute: read P, read KV, write S
kind DIST_B on compute: read P, consume S, consume KV, write DKV, accumulate G
kind RS_DKV on cp comm cp: consume DKV, write DKVL
kind LOCAL_B on compute: read P, consume SL, accumulate G
kind QKV_B on compute: read P, consume DKVL, accumulate G
comm cp collective
comm fwd buffered
comm bwd buffered
comm dp collective
class 0
  0QKV0 0AG_KV0#0 0LOCAL0 0DIST0 0DIST_B0 0RS_DKV0#1 0LOCAL_B0 0QKV_B0 0OPT
class 1
  0QKV0 0AG_KV0#0 0LOCAL0 0DIST0 0DIST_B0 0RS_DKV0#1 0LOCAL_B0 0QKV_B0 0OPT
"""
BUSY = {"QKV": 1, "LOCAL": 32, "DIST": 32, "DIST_B": 64, "LOCAL_B": 64, "QKV_B": 2, "*": 0}


def square(length: int) -> int:
    return length * length


def scheduled(lengths: tuple[int, ...], capacity: int) -> Callable[[], Program]:
    return lambda: microbatch_step(gds(lengths, data_ranks=1, capacity=capacity, cp=2, work=square)[0], 2)


def divided() -> Program:
    pieces = tuple((sequence, 0, length) for sequence, length in enumerate((4, 4, 4, 4, 8)))
    return microbatch_step(Unit(pieces=pieces, weight=1.0), 2)


SIZES = {"KVL": 1, "KV": 2, "DKV": 2, "DKVL": 1, "S": 1, "SL": 2, "P": 0, "G": 0}


def case(
    name: str,
    program: str,
    lowered: Callable[[], Program],
    busy: Mapping[str, float],
    expected: Expected,
    sizes: Mapping[str, float] = SIZES,
) -> Case:
    return Case(name=f"skrull-{name}", program=program, lowered=lowered, busy=busy, sizes=sizes, expected=expected)


def in_backward(*peaks: tuple[float, float]) -> dict[int, Peak]:
    """(size, moment) of each rank, whose peak is the start of DIST_B."""
    return {r: Peak(size=size, action="0DIST_B0", moment=moment) for r, (size, moment) in enumerate(peaks)}


def as_issued(*peaks: float) -> dict[int, Peak]:
    return {r: Peak(size=size, action="0DIST_B0") for r, size in enumerate(peaks)}


CASES = (
    case(
        "hidden",
        HIDDEN,
        scheduled((4, 4, 4, 4, 8), 12),
        {**BUSY, "AG_KV": 8, "RS_DKV": 8},
        Expected(
            issue_peaks=as_issued(7, 7),
            time_peaks=in_backward((7, 65), (7, 65)),
            makespan=195,
            period=195,
            exposed={0: 0, 1: 0},
            idle={0: 0, 1: 0},
            ends={"0:0DIST0": 65, "1:0DIST0": 65},
        ),
    ),
    case(
        "exposed",
        HIDDEN,
        scheduled((4, 4, 4, 4, 8), 12),
        {**BUSY, "AG_KV": 40, "RS_DKV": 40},
        Expected(
            issue_peaks=as_issued(7, 7),
            time_peaks=in_backward((7, 73), (7, 73)),
            makespan=203,
            period=203,
            exposed={0: 8, 1: 8},
            idle={0: 8, 1: 8},
            ends={"0:0DIST0": 73},
        ),
    ),
    case(
        "divided",
        DIVIDED,
        divided,
        {"QKV": 3, "AG_KV": 24, "DIST": 64, "DIST_B": 128, "RS_DKV": 24, "QKV_B": 6, "*": 0},
        Expected(
            makespan=249,
            period=249,
            exposed={0: 48, 1: 48},
            idle={0: 48, 1: 48},
            ends={"0:0DIST0": 91},
            issue_peaks=as_issued(15, 15),
            time_peaks=in_backward((15, 91), (15, 91)),
        ),
        {name: 3 * size for name, size in SIZES.items() if name != "SL"},
    ),
    case(
        "uneven",
        UNEVEN,
        scheduled((2, 4, 8), 8),
        {
            **{label: time for label, time in BUSY.items() if not label.startswith("LOCAL")},
            **{"0:LOCAL": 4, "1:LOCAL": 16, "0:LOCAL_B": 8, "1:LOCAL_B": 32, "AG_KV": 8, "RS_DKV": 8},
        },
        Expected(
            issue_peaks=as_issued(5.5, 6),
            time_peaks=in_backward((5.5, 41), (6, 49)),
            makespan=147,
            period=147,
            exposed={0: 12, 1: 0},
            ends={"0:0DIST0": 41, "1:0DIST0": 49, "1:0DIST_B0": 113, "0:0QKV_B0": 123, "1:0LOCAL_B0": 145},
        ),
        {**SIZES, "0:SL": 0.5, "1:SL": 1},
    ),
)
