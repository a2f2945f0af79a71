"""ChunkFlow's example: sequences of 4, 2, 1, 1 tokens over p 4; a forward takes 1 a token, a backward 2.

Whole sequences under 1F1B: 56. The long one fills and drains the pipeline alone, 4·(4 + 8) = 48, and rank 0 still has
the other backwards to do, 4 + 2 + 2. Every rank works 24, so the bubble is 1 - 24/56 = 57.14%.

Chunks of 2 tokens: a1, a2 of the long sequence, b, and c that packs the two short ones; forward 2, backward 4. Rank 3
gets a1 at 6, works 24, and the last backward drains over three ranks, 3·4: 42 if rank 3 never waits, the bubble of
equal lengths (42.86%). a2 goes backward before a1, which needs the gradients of its keys and values (DKV).
- `warm` (unit numbers a1 0, a2 1, b 2, c 3), one warm-up forward more than 1F1B: 42.
- `forced`, forwards ahead only where the next backward needs them: 44. Rank 2 runs 2B1 14-18 before 2F2, so rank 3,
  done with 3B0 at 18, waits 2 for it.
- `apart`, order a1 b a2 c (units 0 to 3): 46, bubble 47.83%. 1F3 stands behind 1B2 (20-24) and 2F3 behind 2B0, so 3F3
  starts at 28 and not at 24: 4 of waiting.
- `once`, as `warm` but only one chunk of a sequence keeps its activations (K 1): rank 3 runs a1 again, so 44.
- `reversed`: a1 backward before a2: refused, because DKV of a1 is not there.

Memory with S 1 for a chunk (1/2 a token), KV and DKV of a1 1/4 (only a1 has a reader). `whole`: rank 0 holds all, 4,
from 0F3 at 7; rank 1 all but the last, 3.5, from 10; rank 2 the first two, 3, and rank 3 the first, 2, both from 12.
The others peak when they start the backward of a2, with KV and DKV: 3B1 at 10 (`apart`, which forwards b first, 3B2 at
12) and 4 later on each rank before. `warm`: 2, 3, 4, 4 chunks on ranks 3 to 0 and 1/2; `forced` one less on 2 and 1;
`apart` 3, 3, 3, 4. `once` has a1 without S then, which spares ranks 0 and 1 a chunk, but not 2 and 3: when they run a1
again, at 20 and 16, they are a chunk further. Source: ChunkFlow (ICML 2025), state-aware 1F1B; the orders of `apart`
are one of twelve pairs that give its 47.8%. Its 54.1% for K 1 is not reproduced.
"""

from __future__ import annotations

from case_format import Case, Expected, Peak

from gnomon.lowering import one_f_one_b, with_messages, with_optimizer
from gnomon.methods.chunkflow import BUFFERS, chunkflow, chunks
from gnomon.plans import Unit, normalised
from gnomon.program import Program

LENGTHS = (4, 2, 1, 1)
CHUNKS = chunks(LENGTHS, 2)
SIZES = {"S": 1, "KV": 0.25, "DKV": 0.25, "X": 0, "Y": 0, "DX": 0, "DY": 0, "P": 0, "G": 0}
WHOLE = """\
gnomon.program/1
stages 4
unit 0 = 0:0:4 weight 0.5
unit 1 = 1:0:2 weight 0.25
unit 2 = 2:0:1 weight 0.125
unit 3 = 3:0:1 weight 0.125
class 0
  0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0F3 0SEND_F3 0RECV_B0 0B0 0RECV_B1 0B1 0RECV_B2 0B2
  0RECV_B3 0B3 0OPT
class 1
  1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 1RECV_F2 1F2 1SEND_F2 1RECV_B0 1B0 1SEND_B0 1RECV_F3
  1F3 1SEND_F3 1RECV_B1 1B1 1SEND_B1 1RECV_B2 1B2 1SEND_B2 1RECV_B3 1B3 1SEND_B3 1OPT
class 2
  2RECV_F0 2F0 2SEND_F0 2RECV_F1 2F1 2SEND_F1 2RECV_B0 2B0 2SEND_B0 2RECV_F2 2F2 2SEND_F2 2RECV_B1
  2B1 2SEND_B1 2RECV_F3 2F3 2SEND_F3 2RECV_B2 2B2 2SEND_B2 2RECV_B3 2B3 2SEND_B3 2OPT
class 3
  3RECV_F0 3F0 3B0 3SEND_B0 3RECV_F1 3F1 3B1 3SEND_B1 3RECV_F2 3F2 3B2 3SEND_B2 3RECV_F3 3F3 3B3
  3SEND_B3 3OPT
"""
WARM = """\
gnomon.program/1
stages 4
unit 0 = 0:0:2 weight 0.25
unit 1 = 0:2:4 weight 0.25
unit 2 = 1:0:2 weight 0.25
unit 3 = 2:0:1 3:0:1 weight 0.25
buffer KV step per unit
buffer DKV step per unit
kind F on compute: read P, read KV<, consume X, write S, write Y, write KV
kind C on compute: read P, read KV<, read X, write Y, write KV
kind R on compute: read P, read KV<, consume X, write S
kind B on compute: read P, read KV<, consume S, consume DY, consume DKV, accumulate DKV<, write DX, accumulate G, free KV
class 0
  0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0F3 0SEND_F3 0RECV_B1 0B1 0RECV_B0 0B0 0RECV_B2 0B2
  0RECV_B3 0B3 0OPT
class 1
  1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 1RECV_F2 1F2 1SEND_F2 1RECV_F3 1F3 1SEND_F3 1RECV_B1
  1B1 1SEND_B1 1RECV_B0 1B0 1SEND_B0 1RECV_B2 1B2 1SEND_B2 1RECV_B3 1B3 1SEND_B3 1OPT
class 2
  2RECV_F0 2F0 2SEND_F0 2RECV_F1 2F1 2SEND_F1 2RECV_F2 2F2 2SEND_F2 2RECV_B1 2B1 2SEND_B1 2RECV_F3
  2F3 2SEND_F3 2RECV_B0 2B0 2SEND_B0 2RECV_B2 2B2 2SEND_B2 2RECV_B3 2B3 2SEND_B3 2OPT
class 3
  3RECV_F0 3F0 3RECV_F1 3F1 3B1 3SEND_B1 3RECV_F2 3F2 3B0 3SEND_B0 3RECV_F3 3F3 3B2 3SEND_B2 3B3
  3SEND_B3 3OPT
"""  # noqa: E501  (one kind is one line)
FORCED = """\
gnomon.program/1
stages 4
unit 0 = 0:0:2 weight 0.25
unit 1 = 0:2:4 weight 0.25
unit 2 = 1:0:2 weight 0.25
unit 3 = 2:0:1 3:0:1 weight 0.25
buffer KV step per unit
buffer DKV step per unit
kind F on compute: read P, read KV<, consume X, write S, write Y, write KV
kind C on compute: read P, read KV<, read X, write Y, write KV
kind R on compute: read P, read KV<, consume X, write S
kind B on compute: read P, read KV<, consume S, consume DY, consume DKV, accumulate DKV<, write DX, accumulate G, free KV
class 0
  0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0F3 0SEND_F3 0RECV_B1 0B1 0RECV_B0 0B0 0RECV_B2 0B2
  0RECV_B3 0B3 0OPT
class 1
  1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 1RECV_F2 1F2 1SEND_F2 1RECV_B1 1B1 1SEND_B1 1RECV_F3
  1F3 1SEND_F3 1RECV_B0 1B0 1SEND_B0 1RECV_B2 1B2 1SEND_B2 1RECV_B3 1B3 1SEND_B3 1OPT
class 2
  2RECV_F0 2F0 2SEND_F0 2RECV_F1 2F1 2SEND_F1 2RECV_B1 2B1 2SEND_B1 2RECV_F2 2F2 2SEND_F2 2RECV_B0
  2B0 2SEND_B0 2RECV_F3 2F3 2SEND_F3 2RECV_B2 2B2 2SEND_B2 2RECV_B3 2B3 2SEND_B3 2OPT
class 3
  3RECV_F0 3F0 3RECV_F1 3F1 3B1 3SEND_B1 3B0 3SEND_B0 3RECV_F2 3F2 3B2 3SEND_B2 3RECV_F3 3F3 3B3
  3SEND_B3 3OPT
"""  # noqa: E501  (one kind is one line)
APART = """\
gnomon.program/1
stages 4
unit 0 = 0:0:2 weight 0.25
unit 1 = 1:0:2 weight 0.25
unit 2 = 0:2:4 weight 0.25
unit 3 = 2:0:1 3:0:1 weight 0.25
buffer KV step per unit
buffer DKV step per unit
kind F on compute: read P, read KV<, consume X, write S, write Y, write KV
kind C on compute: read P, read KV<, read X, write Y, write KV
kind R on compute: read P, read KV<, consume X, write S
kind B on compute: read P, read KV<, consume S, consume DY, consume DKV, accumulate DKV<, write DX, accumulate G, free KV
class 0
  0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0F3 0SEND_F3 0RECV_B2 0B2 0RECV_B0 0B0 0RECV_B1 0B1
  0RECV_B3 0B3 0OPT
class 1
  1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 1RECV_F2 1F2 1SEND_F2 1RECV_B2 1B2 1SEND_B2 1RECV_F3
  1F3 1SEND_F3 1RECV_B0 1B0 1SEND_B0 1RECV_B1 1B1 1SEND_B1 1RECV_B3 1B3 1SEND_B3 1OPT
class 2
  2RECV_F0 2F0 2SEND_F0 2RECV_F1 2F1 2SEND_F1 2RECV_F2 2F2 2SEND_F2 2RECV_B2 2B2 2SEND_B2 2RECV_B0
  2B0 2SEND_B0 2RECV_F3 2F3 2SEND_F3 2RECV_B1 2B1 2SEND_B1 2RECV_B3 2B3 2SEND_B3 2OPT
class 3
  3RECV_F0 3F0 3RECV_F1 3F1 3RECV_F2 3F2 3B2 3SEND_B2 3B0 3SEND_B0 3B1 3SEND_B1 3RECV_F3 3F3 3B3
  3SEND_B3 3OPT
"""  # noqa: E501  (one kind is one line)
ONCE = """\
gnomon.program/1
stages 4
unit 0 = 0:0:2 weight 0.25
unit 1 = 0:2:4 weight 0.25
unit 2 = 1:0:2 weight 0.25
unit 3 = 2:0:1 3:0:1 weight 0.25
buffer KV step per unit
buffer DKV step per unit
kind F on compute: read P, read KV<, consume X, write S, write Y, write KV
kind C on compute: read P, read KV<, read X, write Y, write KV
kind R on compute: read P, read KV<, consume X, write S
kind B on compute: read P, read KV<, consume S, consume DY, consume DKV, accumulate DKV<, write DX, accumulate G, free KV
class 0
  0C0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0F3 0SEND_F3 0RECV_B1 0B1 0R0 0RECV_B0 0B0 0RECV_B2 0B2
  0RECV_B3 0B3 0OPT
class 1
  1RECV_F0 1C0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 1RECV_F2 1F2 1SEND_F2 1RECV_F3 1F3 1SEND_F3 1RECV_B1
  1B1 1SEND_B1 1R0 1RECV_B0 1B0 1SEND_B0 1RECV_B2 1B2 1SEND_B2 1RECV_B3 1B3 1SEND_B3 1OPT
class 2
  2RECV_F0 2C0 2SEND_F0 2RECV_F1 2F1 2SEND_F1 2RECV_F2 2F2 2SEND_F2 2RECV_B1 2B1 2SEND_B1 2RECV_F3
  2F3 2SEND_F3 2R0 2RECV_B0 2B0 2SEND_B0 2RECV_B2 2B2 2SEND_B2 2RECV_B3 2B3 2SEND_B3 2OPT
class 3
  3RECV_F0 3C0 3RECV_F1 3F1 3B1 3SEND_B1 3RECV_F2 3F2 3R0 3B0 3SEND_B0 3RECV_F3 3F3 3B2 3SEND_B2 3B3
  3SEND_B3 3OPT
"""  # noqa: E501  (one kind is one line)
REVERSED = """\
gnomon.program/1
stages 1
unit 0 = 0:0:2 weight 0.5
unit 1 = 0:2:4 weight 0.5
buffer KV step per unit
buffer DKV step per unit
kind F on compute: read P, read KV<, consume X, write S, write Y, write KV
kind B on compute: read P, read KV<, consume S, consume DY, consume DKV, accumulate DKV<, write DX, accumulate G, free KV
class 0
  0F0 0F1 0B0 0B1 0OPT
"""  # noqa: E501  (one kind is one line)


def whole() -> Program:
    units = normalised(tuple(Unit(pieces=((sequence, 0, length),)) for sequence, length in enumerate(LENGTHS)))
    return with_optimizer(with_messages(one_f_one_b(4, 4))).program(units=units)


def chunked(units: tuple[Unit, ...], *, keep: int | None = None, extra: int = 0) -> Program:
    rows = with_messages(chunkflow(4, units, keep=keep, extra=extra))
    return with_optimizer(rows).program(units=units, buffers=BUFFERS)


def warm() -> Program:
    return chunked(CHUNKS, extra=1)


def forced() -> Program:
    return chunked(CHUNKS)


def apart() -> Program:
    return chunked(tuple(CHUNKS[i] for i in (0, 2, 1, 3)))


def once() -> Program:
    return chunked(CHUNKS, keep=1, extra=1)


HIDDEN = {r: 0.0 for r in range(4)}


def in_backward(unit: int, *held: float, first: float | None = None) -> dict[int, Peak]:
    """The peak of each rank, when it starts the backward of `unit`: on rank 3 at `first`, 4 later a rank before."""
    times = [None if first is None else first + 4 * (3 - r) for r in range(4)]
    return {r: Peak(size=size, action=f"{r}B{unit}", moment=times[r]) for r, size in enumerate(held)}


CASES = (
    Case(
        name="chunkflow-whole",
        program=WHOLE,
        lowered=whole,
        busy={"F~4": 4, "F~2": 2, "F~1": 1, "B~4": 8, "B~2": 4, "B~1": 2, "*": 0},
        sizes={"S~4": 2, "S~2": 1, "S~1": 0.5, "X": 0, "Y": 0, "DX": 0, "DY": 0, "P": 0, "G": 0},
        expected=Expected(
            makespan=56,
            period=56,
            idle={r: 32 for r in range(4)},
            ends={"0:0B0": 48},
            exposed=HIDDEN,
            issue_peaks={
                0: Peak(size=4, action="0F3"),
                1: Peak(size=3.5, action="1F2"),
                2: Peak(size=3, action="2F1"),
                3: Peak(size=2, action="3F0"),
            },
            time_peaks={
                0: Peak(size=4, moment=7),
                1: Peak(size=3.5, moment=10),
                2: Peak(size=3, moment=12),
                3: Peak(size=2, moment=12),
            },
        ),
    ),
    Case(
        name="chunkflow-warm",
        program=WARM,
        lowered=warm,
        busy={"F": 2, "B": 4, "*": 0},
        sizes=SIZES,
        expected=Expected(
            makespan=42,
            period=42,
            idle={r: 18 for r in range(4)},
            ends={"3:3F0": 8, "3:3B1": 14, "3:3B0": 20, "3:3B3": 30},
            exposed=HIDDEN,
            issue_peaks=in_backward(1, 4.5, 4.5, 3.5, 2.5),
            time_peaks=in_backward(1, 4.5, 4.5, 3.5, 2.5, first=10),
        ),
    ),
    Case(
        name="chunkflow-forced",
        program=FORCED,
        lowered=forced,
        busy={"F": 2, "B": 4, "*": 0},
        sizes=SIZES,
        expected=Expected(
            makespan=44,
            period=44,
            idle={r: 20 for r in range(4)},
            exposed=HIDDEN,
            issue_peaks=in_backward(1, 4.5, 3.5, 2.5, 2.5),
            time_peaks=in_backward(1, 4.5, 3.5, 2.5, 2.5, first=10),
            ends={"2:2F2": 20, "3:3B0": 18, "3:3F2": 22},
        ),
    ),
    Case(
        name="chunkflow-apart",
        program=APART,
        lowered=apart,
        busy={"F": 2, "B": 4, "*": 0},
        sizes=SIZES,
        expected=Expected(
            makespan=46,
            period=46,
            idle={r: 22 for r in range(4)},
            exposed=HIDDEN,
            issue_peaks=in_backward(2, 4.5, 3.5, 3.5, 3.5),
            time_peaks=in_backward(2, 4.5, 3.5, 3.5, 3.5, first=12),
            ends={"1:1F3": 26, "2:2F3": 28, "3:3F3": 30},
        ),
    ),
    Case(
        name="chunkflow-once",
        program=ONCE,
        lowered=once,
        busy={"F": 2, "C": 2, "R": 2, "B": 4, "*": 0},
        sizes=SIZES,
        expected=Expected(
            makespan=44,
            period=44,
            idle={r: 18 for r in range(4)},
            exposed=HIDDEN,
            issue_peaks={
                0: Peak(size=3.5, action="0B1"),
                1: Peak(size=3.5, action="1B1"),
                2: Peak(size=3.5, action="2R0"),
                3: Peak(size=2.5, action="3R0"),
            },
            time_peaks={
                0: Peak(size=3.5, moment=22),
                1: Peak(size=3.5, moment=18),
                2: Peak(size=3.5, moment=20),
                3: Peak(size=2.5, moment=16),
            },
            ends={"3:3R0": 18, "3:3B0": 22},
        ),
    ),
    Case(name="chunkflow-reversed", program=REVERSED, expected=Expected(problem="missing buffer")),
)
