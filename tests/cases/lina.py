"""Lina: two expert layers in backward, whose all-to-alls share one network with the reduction of dense gradients.

F 1 (all of it), gate .5, all-to-all 2, experts 4, dense backward 2, all-reduce 2 a layer; updates free. Four ranks.

    in the order in which they are ready     A2A 2.5-4.5  experts -8.5  A2A -10.5  B1 -12.5 | AR1 12.5-14.5 holds up the
                                             A2A of layer 0: 14.5-16.5  experts -20.5  A2A -22.5  B0 -24.5  AR0 -26.5

Each all-to-all, the experts and the all-reduces in two operations: the first tokens are at the experts while the
second half travels. Layer 1: A2A 2.5-3.5, 3.5-4.5, experts 3.5-5.5, 5.5-7.5, A2A 5.5-6.5, 7.5-8.5, B1 8.5-10.5. Then

    in order    AR1 10.5-12.5, A2A -13.5, -14.5, experts 13.5-17.5, A2A 15.5-16.5, 17.5-18.5, B0 -20.5, AR0 -22.5
    priority    the gate runs 10.5-11, so the network is idle at 10.5 and takes half of AR1, -11.5; A2A -12.5, -13.5,
                experts 12.5-16.5, other half 13.5-14.5, A2A -15.5, 16.5-17.5, B0 -19.5, AR0 -21.5
    and hold    nothing before the combine: A2A 11-12, 12-13, experts 12-16, AR1 13-14 and 15-16 between the other A2A
                14-15, 16-17, B0 17-19, AR0 19-21

26.5, 22.5, 21.5, 21, of which 15 are compute; the rest is exposed, for compute waits for nothing but the network. Of
12 on the network .5 is hidden in the first (AR1 by the gate) and 6 in the last. Each operation moves half of what the
whole moved (asserted from the rows' buffers). Source: Li et al. 2023 (Lina), sections 4 and 5; times made up.
"""

from __future__ import annotations

from dataclasses import replace

from case_format import Case, Expected

from gnomon.methods.lina import all_to_all_first, lina, micro_operations
from gnomon.program import Program, Structure, effect_table, parse_program, row_effects
from gnomon.simulate import Clock, Times, durations, play

READY_ORDER = """\
gnomon.program/1
stages 2
units 1
buffer DC step per unit
buffer DE step per unit
buffer DD step per unit
buffer DA step per unit
kind B on compute: read P, consume S, consume DA, write DX, accumulate G
kind AR on net comm dp: accumulate G
kind COMBINE on compute: consume DY, write DC
kind A2A_C on net comm ep: consume DC, write DE
kind EXPERT on compute: read P, consume DE, write DD
kind A2A_D on net comm ep: consume DD, write DA
class 0 count 4
  0F0 1F0 1COMBINE0 1A2A_C0 1EXPERT0 1A2A_D0 1B0 1AR 0COMBINE0 0A2A_C0 0EXPERT0 0A2A_D0 0B0 0AR 0OPT
  1OPT
"""

MICRO_OPERATIONS = """\
gnomon.program/1
stages 2
units 1
buffer DC step per unit
buffer DE step per unit
buffer DD step per unit
buffer DA step per unit
buffer DE.0 step per unit
buffer DE.1 step per unit
buffer DD.0 step per unit
buffer DD.1 step per unit
kind B on compute: read P, consume S, consume DA, write DX, accumulate G
kind AR on net comm dp: accumulate G
kind COMBINE on compute: consume DY, write DC
kind A2A_C on net comm ep: consume DC, write DE
kind EXPERT on compute: read P, consume DE, write DD
kind A2A_D on net comm ep: consume DD, write DA
class 0 count 4
  0F0 1F0 1COMBINE0 1A2A_C0/1A2A_C.2{read DC 1 0, write DE.0 1 0}
  1A2A_C0/1A2A_C.2{consume DC 1 0, write DE.1 1 0}
  1EXPERT0/1EXPERT.2{read P 1, consume DE.0 1 0, write DD.0 1 0}
  1EXPERT0/1EXPERT.2{read P 1, consume DE.1 1 0, write DD.1 1 0}
  1A2A_D0/1A2A_D.2{consume DD.0 1 0, accumulate DA 1 0}
  1A2A_D0/1A2A_D.2{consume DD.1 1 0, accumulate DA 1 0} 1B0 1AR/1AR.2{accumulate G 1}
  1AR/1AR.2{accumulate G 1} 0COMBINE0 0A2A_C0/0A2A_C.2{read DC 0 0, write DE.0 0 0}
  0A2A_C0/0A2A_C.2{consume DC 0 0, write DE.1 0 0}
  0EXPERT0/0EXPERT.2{read P 0, consume DE.0 0 0, write DD.0 0 0}
  0EXPERT0/0EXPERT.2{read P 0, consume DE.1 0 0, write DD.1 0 0}
  0A2A_D0/0A2A_D.2{consume DD.0 0 0, accumulate DA 0 0}
  0A2A_D0/0A2A_D.2{consume DD.1 0 0, accumulate DA 0 0} 0B0 0AR/0AR.2{accumulate G 0}
  0AR/0AR.2{accumulate G 0} 0OPT 1OPT
"""

PRIORITY = """\
gnomon.program/1
stages 2
units 1
buffer DC step per unit
buffer DE step per unit
buffer DD step per unit
buffer DA step per unit
buffer DE.0 step per unit
buffer DE.1 step per unit
buffer DD.0 step per unit
buffer DD.1 step per unit
kind B on compute: read P, consume S, consume DA, write DX, accumulate G
kind AR on net comm dp: accumulate G
kind COMBINE on compute: consume DY, write DC
kind A2A_C on net comm ep: consume DC, write DE
kind EXPERT on compute: read P, consume DE, write DD
kind A2A_D on net comm ep: consume DD, write DA
class 0 count 4
  0F0 1F0 1COMBINE0 1A2A_C0/1A2A_C.2{read DC 1 0, write DE.0 1 0}
  1A2A_C0/1A2A_C.2{consume DC 1 0, write DE.1 1 0}
  1EXPERT0/1EXPERT.2{read P 1, consume DE.0 1 0, write DD.0 1 0}
  1EXPERT0/1EXPERT.2{read P 1, consume DE.1 1 0, write DD.1 1 0}
  1A2A_D0/1A2A_D.2{consume DD.0 1 0, accumulate DA 1 0}
  1A2A_D0/1A2A_D.2{consume DD.1 1 0, accumulate DA 1 0} 1B0 0COMBINE0 1AR/1AR.2{accumulate G 1}
  0A2A_C0/0A2A_C.2{read DC 0 0, write DE.0 0 0} 0A2A_C0/0A2A_C.2{consume DC 0 0, write DE.1 0 0}
  0EXPERT0/0EXPERT.2{read P 0, consume DE.0 0 0, write DD.0 0 0}
  0EXPERT0/0EXPERT.2{read P 0, consume DE.1 0 0, write DD.1 0 0} 1AR/1AR.2{accumulate G 1}
  0A2A_D0/0A2A_D.2{consume DD.0 0 0, accumulate DA 0 0}
  0A2A_D0/0A2A_D.2{consume DD.1 0 0, accumulate DA 0 0} 0B0 0AR/0AR.2{accumulate G 0}
  0AR/0AR.2{accumulate G 0} 0OPT 1OPT
"""

HOLD = """\
gnomon.program/1
stages 2
units 1
buffer DC step per unit
buffer DE step per unit
buffer DD step per unit
buffer DA step per unit
buffer DE.0 step per unit
buffer DE.1 step per unit
buffer DD.0 step per unit
buffer DD.1 step per unit
kind B on compute: read P, consume S, consume DA, write DX, accumulate G
kind AR on net comm dp: accumulate G
kind COMBINE on compute: consume DY, write DC
kind A2A_C on net comm ep: consume DC, write DE
kind EXPERT on compute: read P, consume DE, write DD
kind A2A_D on net comm ep: consume DD, write DA
class 0 count 4
  0F0 1F0 1COMBINE0 1A2A_C0/1A2A_C.2{read DC 1 0, write DE.0 1 0}
  1A2A_C0/1A2A_C.2{consume DC 1 0, write DE.1 1 0}
  1EXPERT0/1EXPERT.2{read P 1, consume DE.0 1 0, write DD.0 1 0}
  1EXPERT0/1EXPERT.2{read P 1, consume DE.1 1 0, write DD.1 1 0}
  1A2A_D0/1A2A_D.2{consume DD.0 1 0, accumulate DA 1 0}
  1A2A_D0/1A2A_D.2{consume DD.1 1 0, accumulate DA 1 0} 1B0 0COMBINE0
  0A2A_C0/0A2A_C.2{read DC 0 0, write DE.0 0 0} 0A2A_C0/0A2A_C.2{consume DC 0 0, write DE.1 0 0}
  0EXPERT0/0EXPERT.2{read P 0, consume DE.0 0 0, write DD.0 0 0}
  0EXPERT0/0EXPERT.2{read P 0, consume DE.1 0 0, write DD.1 0 0} 1AR/1AR.2{accumulate G 1}
  0A2A_D0/0A2A_D.2{consume DD.0 0 0, accumulate DA 0 0} 1AR/1AR.2{accumulate G 1}
  0A2A_D0/0A2A_D.2{consume DD.1 0 0, accumulate DA 0 0} 0B0 0AR/0AR.2{accumulate G 0}
  0AR/0AR.2{accumulate G 0} 0OPT 1OPT
"""

WHOLE = {"F": 1, "COMBINE": 0.5, "A2A_C": 2, "EXPERT": 4, "A2A_D": 2, "B": 2, "AR": 2, "OPT": 0}
PARTS = {"A2A_C": 1, "EXPERT": 2, "A2A_D": 1, "AR": 1}
HALVES = {
    "F": 1, "COMBINE": 0.5, "B": 2, "OPT": 0,
    **{f"{layer}{kind}.2": seconds for layer in (0, 1) for kind, seconds in PARTS.items()},
}  # fmt: skip
BYTES = {"DC": 8.0, "DE": 8.0, "DD": 8.0, "DA": 8.0, "G": 6.0}


def simulate(structure: Structure) -> Times:
    return play(Clock.of(structure, durations(structure.program, HALVES)))


def whole() -> Program:
    return parse_program(READY_ORDER)


def in_parts() -> Program:
    return micro_operations(whole(), all_to_all=2, all_reduce=2)


def sent(program: Program) -> dict[str, list[float]]:
    """Bytes that each operation on the network moves: of what it reads or, for a reduction, adds to; a row that is one
    of n parts and touches the whole moves 1/n of it."""
    table = effect_table(program)
    moved: dict[str, list[float]] = {}
    for row in range(program.num_rows):
        kind, name = program.kinds[program.kind[row]].name, program.keys[program.key[row]].name
        if kind not in ("A2A_C", "A2A_D", "AR"):
            continue
        parts = int(name.rpartition(".")[2]) if name else 1
        acts = [ref.buffer for op, ref in row_effects(program, table, row) if op in ("read", "consume") or kind == "AR"]
        size = sum(BYTES[buffer.partition(".")[0]] for buffer in acts) / parts
        moved.setdefault(f"{program.stage[row]}{kind}", []).append(size)
    return moved


def bytes_are_conserved() -> None:
    in_one = sent(whole())
    assert in_one == {f"{s}{kind}": [size] for s in (1, 0) for kind, size in (("A2A_C", 8), ("A2A_D", 8), ("AR", 6))}
    for text in (MICRO_OPERATIONS, PRIORITY, HOLD):
        assert sent(parse_program(text)) == {name: [sizes[0] / 2] * 2 for name, sizes in in_one.items()}


READY = Case(
    name="lina_ready_order",
    program=READY_ORDER,
    busy=WHOLE,
    expected=Expected(
        makespan=26.5,
        period=26.5,
        exposed={0: 11.5},
        idle={0: 11.5},
        ends={"0:1AR": 14.5, "0:0A2A_C0": 16.5, "0:0B0": 24.5},
    ),
)

CASES = (
    READY,
    replace(
        READY,
        name="lina_micro_operations",
        program=MICRO_OPERATIONS,
        lowered=in_parts,
        busy=HALVES,
        expected=Expected(
            makespan=22.5,
            period=22.5,
            exposed={0: 7.5},
            idle={0: 7.5},
            ends={"0:1B0": 10.5, "0:1AR": 12.5, "0:0B0": 20.5},
        ),
    ),
    replace(
        READY,
        name="lina_without_hold",
        program=PRIORITY,
        lowered=lambda: all_to_all_first(in_parts(), simulate, hold={}),
        busy=HALVES,
        expected=Expected(
            makespan=21.5,
            period=21.5,
            exposed={0: 6.5},
            idle={0: 6.5},
            ends={"0:1AR": 14.5, "0:0A2A_C0": 13.5, "0:0B0": 19.5},
        ),
    ),
    replace(
        READY,
        name="lina",
        program=HOLD,
        lowered=lambda: lina(whole(), simulate, all_to_all=2, all_reduce=2),
        busy=HALVES,
        expected=Expected(
            makespan=21, period=21, exposed={0: 6}, idle={0: 6}, ends={"0:1AR": 16, "0:0A2A_C0": 13, "0:0B0": 19}
        ),
        also=(bytes_are_conserved,),
    ),
)
