"""Bamboo: 1F1B, p 4, m 4, rank 2 has failed and rank 1, which holds a copy of stage 2, does the work of both.

F 1, B 2, messages free; the all-reduce of a stage's gradients (AR) 1, an update (OPT) 1/2, that of both stages 1.

Before: (4 + 4 - 1)·3 = 21, then AR and OPT of rank 0: 22.5. After: rank 1 has 8 forwards and 8 backwards to do, 24. It
starts at 1 and waits once: at 6 it has done 1F0 1F1 2F0 1F2 2F1, and 3B0 (3F0 4-5, 3B0 5-7) ends at 7. So it is done
at 26, rank 0 with 0B3 at 28, AR 29, OPT 29.5: 31% slower with a quarter of the ranks gone. The step is its own period:
rank 0 is busy first and last. Exposed is the all-reduce of rank 0, 1, and on the others their own too, but of rank 1
only that of stage 1: that of stage 2 runs under 1B3. Rank 1 has the activations of both, 3 + 2 units in 2F1 from 5 on,
and sends and receives what stage 2 sent and received on its far side: stage 3 does not notice. Gradients of a stage
are added in the same order as before, so nothing changes in the result. Source: Bamboo (NSDI 2023) for the rules of
the merge; numbers by hand.
"""

from __future__ import annotations

from case_format import Case, Expected, Peak

from gnomon.lowering import one_f_one_b, with_all_reduce, with_messages, with_optimizer
from gnomon.lowering.edit import rows_of
from gnomon.methods.bamboo import fail_over
from gnomon.program import Program, parse_program

HEALTHY = """\
gnomon.program/1
stages 4
units 4
class 0
  0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0F3 0SEND_F3 0RECV_B0 0B0 0RECV_B1 0B1 0RECV_B2 0B2
  0RECV_B3 0B3 0AR 0OPT
class 1
  1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 1RECV_F2 1F2 1SEND_F2 1RECV_B0 1B0 1SEND_B0 1RECV_F3
  1F3 1SEND_F3 1RECV_B1 1B1 1SEND_B1 1RECV_B2 1B2 1SEND_B2 1RECV_B3 1B3 1SEND_B3 1AR 1OPT
class 2
  2RECV_F0 2F0 2SEND_F0 2RECV_F1 2F1 2SEND_F1 2RECV_B0 2B0 2SEND_B0 2RECV_F2 2F2 2SEND_F2 2RECV_B1
  2B1 2SEND_B1 2RECV_F3 2F3 2SEND_F3 2RECV_B2 2B2 2SEND_B2 2RECV_B3 2B3 2SEND_B3 2AR 2OPT
class 3
  3RECV_F0 3F0 3B0 3SEND_B0 3RECV_F1 3F1 3B1 3SEND_B1 3RECV_F2 3F2 3B2 3SEND_B2 3RECV_F3 3F3 3B3
  3SEND_B3 3AR 3OPT
"""
FAILED = """\
gnomon.program/1
stages 4
units 4
class 0
  0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0F3 0SEND_F3 0RECV_B0 0B0 0RECV_B1 0B1 0RECV_B2 0B2
  0RECV_B3 0B3 0AR 0OPT
class 1
  1RECV_F0 1F0 1RECV_F1 1F1 2F0 2SEND_F0 1RECV_F2 1F2 2F1 2SEND_F1 2RECV_B0 2B0 1B0 1SEND_B0 2F2
  2SEND_F2 2RECV_B1 2B1 1RECV_F3 1F3 1B1 1SEND_B1 2F3 2SEND_F3 2RECV_B2 2B2 1B2 1SEND_B2 2RECV_B3
  2B3 2AR 1B3 1SEND_B3 1AR
  2OPT/1..2.OPT{consume G 1, read P 1, write P 1, consume G 2, read P 2, write P 2}
class 2
  3RECV_F0 3F0 3B0 3SEND_B0 3RECV_F1 3F1 3B1 3SEND_B1 3RECV_F2 3F2 3B2 3SEND_B2 3RECV_F3 3F3 3B3
  3SEND_B3 3AR 3OPT
"""
SIZES = {"S": 1, "X": 0, "Y": 0, "DX": 0, "DY": 0, "P": 0, "G": 0}


def healthy() -> Program:
    return with_messages(with_optimizer(with_all_reduce(one_f_one_b(4, 4), range(4)))).program()


def failed() -> Program:
    return fail_over(healthy(), (2,))


def same_sums_and_messages_to_the_living() -> None:
    """Each stage adds its gradients in the same order; only messages between stages 1 and 2 are gone."""
    before = [row for rows in rows_of(parse_program(HEALTHY)) for row in rows]
    after = [row for rows in rows_of(parse_program(FAILED)) for row in rows]
    for stage in range(4):
        assert [r.unit for r in after if r.kind == "B" and r.stage == stage] == [0, 1, 2, 3]
    gone = sorted(str(row) for row in before if row not in after and row.kind != "OPT")
    sides = ("1RECV_B", "1SEND_F", "2RECV_F", "2SEND_B")
    assert gone == sorted(f"{side}{unit}" for side in sides for unit in range(4))


CASES = (
    Case(
        name="bamboo-healthy",
        program=HEALTHY,
        lowered=healthy,
        busy={"F": 1, "B": 2, "AR": 1, "OPT": 0.5, "*": 0},
        sizes=SIZES,
        expected=Expected(
            makespan=22.5,
            period=22.5,
            exposed={0: 1, 1: 2, 2: 2, 3: 2},
            issue_peaks={r: Peak(size=4 - r, action=f"{r}F{3 - r}") for r in range(4)},
            time_peaks={r: Peak(size=4 - r, moment=3) for r in range(4)},
        ),
    ),
    Case(
        name="bamboo-failed",
        program=FAILED,
        lowered=failed,
        busy={"F": 1, "B": 2, "AR": 1, "OPT": 0.5, "1..2.OPT": 1, "*": 0},
        sizes=SIZES,
        expected=Expected(
            makespan=29.5,
            period=29.5,
            issue_peaks={0: Peak(size=4, action="0F3"), 1: Peak(size=5, action="2F1"), 2: Peak(size=1, action="3F0")},
            time_peaks={0: Peak(size=4, moment=3), 1: Peak(size=5, moment=5), 2: Peak(size=1, moment=4)},
            exposed={0: 1, 1: 2, 2: 2},
            ends={"1:2F1": 6, "2:3B0": 7, "1:2B0": 9, "1:2B3": 24, "1:1B3": 26, "0:0B3": 28, "1:2OPT": 28},
        ),
        also=(same_sums_and_messages_to_the_living,),
    ),
)
