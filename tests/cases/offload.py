"""The optimizer on the host (ZeRO-Offload) in four tiles, one a block, and the same with a delayed update.

F 1 and B 1 a block, so 8 of compute; a gradient tile down .5, the host's Adam 2 a tile, a parameter tile up .5.

    compute  F 0-4   B3 4-5   B2 5-6   B1 6-7   B0 7-8
    down             3: 5-5.5   2: 6-6.5   1: 7-7.5   0: 8-8.5
    host             3: 5.5-7.5   2: 7.5-9.5   1: 9.5-11.5   0: 11.5-13.5
    up               3: 7.5-8 … 0: 13.5-14

14 = 5 + .5 + 4·2 + .5, and the next F0 waits for the last tile: the period is 14. Every parameter (Psi = 4 in all,
each 2 bytes) goes down once as a gradient and comes up once: 2 Psi + 2 Psi = 4 Psi bytes a step, asserted from the
rows. Copies and the host are not communication, so nothing is exposed as such: the 6 of idle time are theirs. Device
memory (host buffers counted 0): parameters 8 and one gradient of 2 in issue order; in time order gradient 3 is on its
way down while B2 makes the next: 12.

Delayed: the host updates first, with the gradients sent in the step before, so its 8 run beside the 8 of compute. A
parameter tile cannot come up before this step's last read of it, so tile 0 goes 8-8.5 and F0 of the next step starts
at 8.5: makespan and period 8.5. With an update of 2.2 a tile the host is the slower one: period 4·2.2 = 8.8. With one
of 2.12 or 2.1245 it is still 8.5, but from rest the clocks repeat only after hundreds of steps (tests of the pass
count). As in the case of ZeRO the method is applied to blocks written down, for a plan would make one stage of them.
Sources: Ren et al. 2021 (the schedule and the 4 Psi); Rajbhandari et al. 2020 (sizes).
"""

from __future__ import annotations

from dataclasses import replace

from case_format import Case, Expected, Peak

from gnomon.lowering.delayed_update import delay_update
from gnomon.lowering.offload import offload_optimizer
from gnomon.program import Program, effect_table, parse_program, row_effects
from gnomon.units import quantise

BLOCKS = """\
gnomon.program/1
stages 4
units 1
class 0
  0F0 1F0 2F0 3F0 3B0 2B0 1B0 0B0 0OPT 1OPT 2OPT 3OPT
"""

OFFLOAD = """\
gnomon.program/1
stages 4
units 1
buffer GH step per stage
buffer PH carried per stage
kind D2H on d2h: consume G, write GH
kind HOST_OPT on host: consume GH, read PH, write PH
kind H2D on h2d: read PH, write P
class 0
  0F0 1F0 2F0 3F0
  3B0 3D2H 3HOST_OPT 3H2D  2B0 2D2H 2HOST_OPT 2H2D  1B0 1D2H 1HOST_OPT 1H2D  0B0 0D2H 0HOST_OPT 0H2D
"""

DELAYED = """\
gnomon.program/1
stages 4
units 1
buffer GH carried per stage
buffer PH carried per stage
kind D2H on d2h: consume G, write GH
kind HOST_OPT on host: read GH, read PH, write PH
kind H2D on h2d: read PH, write P
class 0
  3HOST_OPT 2HOST_OPT 1HOST_OPT 0HOST_OPT
  0F0 1F0 2F0 3F0 3B0 3D2H 3H2D 2B0 2D2H 2H2D 1B0 1D2H 1H2D 0B0 0D2H 0H2D
"""

SIZES = {"P": 2, "G": 2, "GH": 0, "PH": 0, "S": 0, "X": 0, "Y": 0, "DX": 0, "DY": 0}
PSI = 4


def offloaded() -> Program:
    return offload_optimizer(parse_program(BLOCKS))


def delayed() -> Program:
    return delay_update(offloaded())


def bytes_moved(program: Program) -> tuple[int, int]:
    """(down, up): bytes of the gradients that D2H rows read and of the parameters that H2D rows write."""
    table = effect_table(program)
    moved = {"D2H": 0, "H2D": 0}
    for row in range(program.num_rows):
        kind = program.kinds[program.kind[row]].name
        if kind in moved:
            acts = row_effects(program, table, row)
            ends = [ref.buffer for op, ref in acts if (op in ("read", "consume")) == (kind == "D2H")]
            moved[kind] += sum(SIZES[buffer] for buffer in ends)
    return moved["D2H"], moved["H2D"]


def four_psi() -> None:
    for text in (OFFLOAD, DELAYED):
        assert bytes_moved(parse_program(text)) == (2 * PSI, 2 * PSI)


PLAIN = Case(
    name="offload",
    program=OFFLOAD,
    lowered=offloaded,
    busy={"F": 1, "B": 1, "D2H": 0.5, "HOST_OPT": 2, "H2D": 0.5},
    sizes=SIZES,
    expected=Expected(
        makespan=14,
        period=14,
        exposed={0: 0},
        idle={0: 6},
        issue_peaks={0: Peak(size=10, action="3B0")},
        time_peaks={0: Peak(size=12, action="2B0", moment=5)},
        ends={"0:3D2H": 5.5, "0:3H2D": 8, "0:0HOST_OPT": 13.5},
    ),
    also=(four_psi,),
)

DELAY = replace(
    PLAIN,
    name="offload_delayed",
    program=DELAYED,
    lowered=delayed,
    expected=Expected(
        makespan=8.5,
        period=8.5,
        idle={0: 0.5},
        issue_peaks={0: Peak(size=10, action="3B0")},
        time_peaks={0: Peak(size=12, action="2B0", moment=5)},
        ends={"0:0HOST_OPT": 8, "0:3H2D": 5.5, "0:0H2D": 8.5},
    ),
)


def with_update(seconds: float, period: float) -> Case:
    return replace(
        DELAY,
        name=f"offload_delayed_{4 * seconds:g}",
        busy={**DELAY.busy, "HOST_OPT": seconds},
        expected=Expected(period=period),
    )


CASES = (
    PLAIN,
    DELAY,
    with_update(2.1, 8.5),
    with_update(2.12, 8.5),
    with_update(2.1245, 8.5),
    with_update(2.2, 4 * float(quantise(2.2))),
)
