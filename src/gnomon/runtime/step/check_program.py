"""Whether a Program does a step of its plan: what a user's own must have in it before it is run.

`check_program(program, standard, ...)` compares it with the Program that `lower` makes of the plan. Beside what
`program.validate` finds (buffers, messages, deadlocks of streams) it refuses what would train another model in silence
(a microbatch, a reduction or an update that is missing, twice, or at the wrong place) and what would wait for ever: a
rank of the runtime issues its rows one by one, and waits where one reads what is not there yet. Pure. Left out: the
kinds that the runtime executes, which `Executor` says.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

import numpy as np

from gnomon.errors import ProgramError
from gnomon.lowering.gradients import TIED
from gnomon.program import Key, Program, Structure, validate

GRADIENT = ("B", "W")
"""Kinds that add to the gradient of their stage."""
USES_GRADIENT = ("NORM", "OPT")
"""Kinds that read it when it is whole."""


_Of = TypeVar("_Of")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Action:
    """A row as these checks see it."""

    row: int
    """In the Program."""
    kind: str
    stages: tuple[int, ...]
    """Those whose parameters or gradients it is about: several for a bucket and for the norm."""
    unit: int
    comm: str
    """Communicator, or empty."""
    share: Fraction = Fraction(1)
    """Of the action, of which it is a part (`2AR.4`)."""


def check_program(program: Program, standard: Program, *, zero: int, tied: Collection[int]) -> None:
    """ProgramError for the first reason why the Program is no step of the plan whose own Program is `standard`.

    zero: the ZeRO stage in effect. tied: stages that hold a parameter which another one holds too.
    """
    if program.num_classes != standard.num_classes or program.num_stages != standard.num_stages:
        raise ProgramError(
            f"this Program has {program.num_classes} rank classes and {program.num_stages} stages, and the plan's has "
            f"{standard.num_classes} and {standard.num_stages}; give one for the same plan"
        )
    if len(program.units) != len(standard.units):
        raise ProgramError(
            f"this Program has {len(program.units)} microbatches and the plan {len(standard.units)}, so that the loss "
            f"would not be the mean over the batch; give one for the same plan"
        )
    structure = validate(program)
    for cls in range(program.num_classes):
        mine, expected = _actions(program, cls), _actions(standard, cls)
        for problem in (*_microbatches(mine, expected, len(program.units)), *_end_of_step(mine, expected, zero, tied)):
            raise ProgramError(f"this Program would not train the plan's model: rank class {cls}: {problem}")
    if stuck := waits_for_ever(structure):
        raise ProgramError(f"this Program would never end: {stuck}")


def _actions(program: Program, cls: int) -> list[_Action]:
    actions = []
    for row in range(int(program.class_ptr[cls]), int(program.class_ptr[cls + 1])):
        override = program.overrides.get(row)
        if override is not None and override.inside:
            continue
        stages: tuple[int, ...] = (int(program.stage[row]),)
        if override is not None and override.effects is not None and not override.adds:
            stages = tuple(dict.fromkeys(effect.ref.stage for effect in override.effects)) or stages
        kind, unit = program.kinds[program.kind[row]].name, int(program.unit[row])
        share = _share(program.keys[program.key[row]])
        actions.append(_Action(row=row, kind=kind, stages=stages, unit=unit, comm=program.comm_of(row), share=share))
    return actions


def _share(key: Key) -> Fraction:
    whole, dot, parts = key.name.partition(".")
    return Fraction(1, int(parts)) if dot and whole == f"{key.stage}{key.kind}" and parts.isdigit() else Fraction(1)


def _counted(pairs: Iterable[tuple[_Of, Fraction]]) -> Counter[_Of]:
    """How often each is there, parts counted together; a whole number where all parts are."""
    sums = dict[_Of, Fraction]()
    for what, share in pairs:
        sums[what] = sums.get(what, Fraction(0)) + share
    # Parts that do not make a whole count as none, and whatever goes beyond one as the next number: both then differ
    # from the plan's.
    return Counter({what: math.ceil(total) if total > 1 else math.floor(total) for what, total in sums.items()})


def _stages(actions: list[_Action]) -> list[int]:
    return sorted({action.stages[0] for action in actions if action.kind in GRADIENT})


def _microbatches(mine: list[_Action], expected: list[_Action], units: int) -> Iterator[str]:
    """Every stage runs every microbatch forward once and backward once."""
    stages = _stages(expected)
    if other := sorted({action.stages[0] for action in mine if action.kind in ("F", "C", *GRADIENT)} ^ set(stages)):
        yield f"stage {other[0]} is on another rank class than the plan has it on"
        return
    count = _counted(((action.kind, action.stages[0], action.unit), action.share) for action in mine)
    for stage in stages:
        for unit in range(units):
            f, c, r, b, i, w = (count[kind, stage, unit] for kind in "FCRBIW")
            if f + c != 1 or c != r:
                yield (
                    f"stage {stage} runs microbatch {unit} forward {f + c} times (F {f}, C {c}, R {r}); once is an F, "
                    f"or a C with an R"
                )
            if b + w != 1 or i != w:
                yield (
                    f"stage {stage} runs microbatch {unit} backward {b + w} times (B {b}, I {i}, W {w}); once is a B, "
                    f"or an I with a W"
                )


def _end_of_step(mine: list[_Action], expected: list[_Action], zero: int, tied: Collection[int]) -> Iterator[str]:
    """Gradients are reduced over the plan's communicators once they are whole, then measured and used once."""
    place = {action.row: at for at, action in enumerate(mine)}
    reduced, last = dict[int, int](), dict[int, int]()
    for at, action in enumerate(mine):
        for stage in action.stages:
            if action.kind in GRADIENT:
                last[stage] = at
            elif action.kind == "REDUCE_GRAD":
                reduced[stage] = at
    for stage in _stages(expected):
        use = min((at for at, a in enumerate(mine) if a.kind in USES_GRADIENT and stage in a.stages), default=len(mine))
        for what in ("REDUCE_GRAD", "AR", "OPT", "NORM"):
            have = [a for a in mine if a.kind == what and stage in a.stages and a.comm != TIED]
            want = [a for a in expected if a.kind == what and stage in a.stages and a.comm != TIED]
            yield from _as_often(what, stage, have, want, several=what == "REDUCE_GRAD" and zero > 1)
            for action in have if what in ("AR", "REDUCE_GRAD") else ():
                ready = max(last[stage], reduced.get(stage, -1)) if what == "AR" else last[stage]
                at = place[action.row] if what == "AR" else reduced[stage]
                if not ready <= at < use:
                    before = "its last backward" if at < ready else "what reads it"
                    side = "before" if at < ready else "after"
                    yield (
                        f"the gradient of stage {stage} is reduced over {action.comm} ({what}) {side} {before}; put it "
                        f"between the last backward and NORM or OPT"
                    )
    yield from _norm_first(mine)
    yield from _tied_sums(mine, expected, {stage: max(last[stage], reduced.get(stage, -1)) for stage in last}, tied)
    if zero in (1, 2):
        yield from _gathered(mine, _stages(expected))


def _as_often(
    what: str, stage: int, have: list[_Action], want: list[_Action], *, several: bool = False
) -> Iterator[str]:
    """Checks that a kind has as many rows on each communicator as in the plan's Program."""
    why = {
        "AR": "ranks that should hold the same would drift apart",
        "REDUCE_GRAD": "each rank would update with its own gradient",
        "OPT": "its parameters would not be updated once a step",
        "NORM": "gradients would not be clipped as the plan says",
    }[what]
    ours, theirs = (_counted((a.comm, a.share) for a in actions) for actions in (have, want))
    for comm in sorted(set(ours) | set(theirs)):
        if ours[comm] != theirs[comm] and not (several and ours[comm] and theirs[comm]):
            over = f" over {comm}" if comm else ""
            yield (
                f"stage {stage} has {ours[comm]} {what}{over}, and the plan's Program has {theirs[comm]}: {why}; give "
                f"it as many"
            )


def _norm_first(mine: list[_Action]) -> Iterator[str]:
    norms = [at for at, action in enumerate(mine) if action.kind == "NORM"]
    update = next((at for at, action in enumerate(mine) if action.kind == "OPT"), len(mine))
    if norms and norms[-1] > update:
        yield "an OPT comes before NORM, so that its gradient would not be clipped; put NORM first"


def _tied_sums(
    mine: list[_Action], expected: list[_Action], whole: dict[int, int], tied: Collection[int]
) -> Iterator[str]:
    """The sum over stages that hold the same parameter, in which several rank classes meet."""
    have = [at for at, action in enumerate(mine) if action.kind == "AR" and action.comm == TIED]
    want = [action for action in expected if action.kind == "AR" and action.comm == TIED]
    if len(have) != len(want):
        yield (
            f"{len(have)} AR over {TIED}, and the plan's Program has {len(want)}: copies of the tied weights would "
            f"drift apart; give it as many"
        )
    use = next((at for at, action in enumerate(mine) if action.kind in USES_GRADIENT), len(mine))
    for at in have:
        if not max((whole[stage] for stage in tied if stage in whole), default=-1) < at < use:
            yield f"AR over {TIED} is not between the last backward of tied stages and NORM or OPT; put it there"


def _gathered(mine: list[_Action], stages: Collection[int]) -> Iterator[str]:
    """Checks that forwards under ZeRO 1 and 2 read what was gathered after the last update."""
    for stage in stages:
        gathers = [at for at, a in enumerate(mine) if a.kind == "UNSHARD" and stage in a.stages]
        reads = next((at for at, a in enumerate(mine) if a.kind in ("F", "C") and stage in a.stages), len(mine))
        update = next((at for at, a in enumerate(mine) if a.kind == "OPT" and stage in a.stages), -1)
        if not any(at < reads or at > update for at in gathers):
            yield (
                f"stage {stage} has no UNSHARD between its OPT and the next forward, which would read parameters of "
                f"the step before; put one after the OPT"
            )


def waits_for_ever(structure: Structure) -> str:
    """Says where a rank would wait for ever when every rank issues its rows one by one; empty if all reach their end.

    A receive and a collective are over when their other ends have been issued; nobody waits for a send. What waits is a
    row on the compute stream or one that reads what is under way.
    """
    program, deps = structure.program, structure.deps
    count = program.num_rows
    sources: list[list[int]] = [[] for _ in range(count)]
    # What a step before made is over when this one begins.
    now = deps.edges.distance == 0
    for source, target in zip(deps.edges.source[now].tolist(), deps.edges.target[now].tolist(), strict=True):
        sources[target].append(source)
    partners: list[list[int]] = [[] for _ in range(count)]
    for send, receive in zip(*(rows.tolist() for rows in deps.pairs), strict=True):
        partners[receive].append(send)
        # A receive may be issued before its send; only its end waits for that.
        sources[receive] = [source for source in sources[receive] if source != send]
    for group in np.unique(program.group[program.group >= 0]).tolist():
        rows = [row for row in np.flatnonzero(program.group == group).tolist() if program.comm_of(row)]
        for row in rows:
            partners[row] += [other for other in rows if other != row]
    compute = [program.streams[stream] == "compute" for stream in program.stream.tolist()]
    issued = [False] * count
    heads = program.class_ptr[:-1].tolist()

    def over(row: int) -> bool:
        return issued[row] and all(issued[other] for other in partners[row])

    moved = True
    # Ends: every further round has issued a row that was not before.
    while moved:
        moved = False
        for cls, stop in enumerate(program.class_ptr[1:].tolist()):
            while heads[cls] < stop:
                row = heads[cls]
                if not all(over(source) for source in sources[row]):
                    break
                moved |= not issued[row]
                issued[row] = True
                # Issued, so that its partners can go on, but the rank stays at it: the compute stream waits for its
                # end.
                if compute[row] and not over(row):
                    break
                heads[cls] += 1
    stuck = []
    for cls, stop in enumerate(program.class_ptr[1:].tolist()):
        if (row := heads[cls]) < stop:
            missing = [source for source in sources[row] if not over(source)] or [
                other for other in partners[row] if not issued[other]
            ]
            stuck.append(f"rank class {cls} waits at {program.token(row)} for {program.token(missing[0])}")
    return f"{'; '.join(stuck)}; issue what others wait for before what waits" if stuck else ""
