"""Rows to put among the rows of one rank class, and the questions that passes ask of effects.

`Insertions` collects rows before and after existing ones and then makes the new list. `bucket` is one action for
several stages: a reduction of their gradients together, a tile that is copied to the host. `last_row` finds the row
after which a gradient is complete or a parameter no longer read. Left out: what any pass does with them.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from gnomon.errors import PlanError
from gnomon.lowering.edit import Row
from gnomon.program import BufferRef, Effect, Kind, Override, Program, RowEffect

MODIFIES = ("accumulate", "extend", "write")


class Insertions:
    """Rows to insert into one rank class's list. Rows of one anchor keep the order in which they are given.

    Next to a composite action (neighbouring rows of one group) they stand before or after all of it.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows
        self._span: dict[int, tuple[int, int]] = {}
        for index, row in enumerate(rows):
            if row.group >= 0:
                # (first, last) row of each group, which are neighbours in a rank class.
                self._span[row.group] = (self._span.get(row.group, (index, index))[0], index)
        self._before: dict[int, list[Row]] = {}
        self._after: dict[int, list[Row]] = {}

    def before(self, index: int, row: Row) -> None:
        """Puts `row` before the row at `index`, behind those put there earlier."""
        group = self.rows[index].group
        self._before.setdefault(self._span[group][0] if group >= 0 else index, []).append(row)

    def after(self, index: int, row: Row) -> None:
        """Puts `row` after the row at `index`, behind those put there earlier."""
        self._after.setdefault(self.end_of(index), []).append(row)

    def end_of(self, index: int) -> int:
        """The row itself, or the last of its composite action."""
        group = self.rows[index].group
        return self._span[group][1] if group >= 0 else index

    # The default is every stage that a Program can have (`MAX_STAGES`).
    def without(self, kind: str, stages: Container[int] = range(1 << 16)) -> list[Row]:
        """Returns the new list, in which old rows of `kind` are dropped where they are of one of these stages."""
        out: list[Row] = []
        for index, row in enumerate(self.rows):
            out += self._before.get(index, ())
            if row.kind != kind or row.stage not in stages:
                out.append(row)
            out += self._after.get(index, ())
        return out


def by_name(kinds: Sequence[Kind]) -> dict[str, Kind]:
    """Indexes kinds by their names."""
    return {kind.name: kind for kind in kinds}


def touches(kind: Kind, buffer: str, *ops: str) -> bool:
    """Whether a kind has one of these effects on its own instance of a buffer class."""
    return any(effect.buffer == buffer and effect.op in ops and effect.which == "own" for effect in kind.effects)


def last_row(rows: Sequence[Row], kinds: Sequence[Kind], buffer: str, *ops: str) -> dict[int, int]:
    """Stage -> index of the last row that has one of these effects on the stage's buffer: by its kind, or by effects of
    its own."""
    chosen, last = {kind.name for kind in kinds if touches(kind, buffer, *ops)}, dict[int, int]()
    for index, row in enumerate(rows):
        if row.override is None or row.override.effects is None:
            if row.kind in chosen:
                last[row.stage] = index
            continue
        for effect in row.override.effects:
            if effect.op in ops and effect.ref.buffer == buffer:
                last[effect.ref.stage] = index
    return last


def bucket(kind: Kind, stages: Sequence[int]) -> Row:
    """One row of `kind` for all `stages`, standing at the last of them.

    A row for several stages has the kind's effects on each, and the price name `2..3.KIND`; its buffers must be per
    stage.
    """
    if len(stages) == 1:
        return Row(kind=kind.name, stage=stages[0])
    effects = tuple(_per_stage(effect, stage) for stage in stages for effect in kind.effects)
    name = f"{min(stages)}..{max(stages)}.{kind.name}"
    return Row(kind=kind.name, stage=stages[-1], override=Override(name=name, effects=effects))


def _per_stage(effect: Effect, stage: int) -> RowEffect:
    return RowEffect(effect.op, BufferRef(effect.buffer, stage))


def buckets(stages: Sequence[int], size: int) -> list[tuple[int, ...]]:
    """Stages in runs of `size`, the last one shorter if need be."""
    if size < 1:
        raise PlanError(f"buckets of {size} blocks; use 1 or more")
    return [tuple(stages[i : i + size]) for i in range(0, len(stages), size)]


def refuse_tied(program: Program, what: str) -> None:
    """PlanError when parameters of two stages are one buffer, which passes that divide parameters do not handle."""
    if any(one.buffer == "P" for one, _ in program.aliases):
        raise PlanError(f"{what} does not handle parameters tied over stages of one rank; put them into one block")


def require_updates(program: Program, what: str) -> None:
    """PlanError when a stage that computes gradients has no update: its gradients would never be used."""
    gradients = {k.name for k in program.kinds if k.name != "AR" and touches(k, "G", "accumulate")}
    names = [kind.name for kind in program.kinds]
    computed, updated = set(), set()
    for kind, stage in zip(program.kind.tolist(), program.stage.tolist(), strict=True):
        if names[kind] in gradients:
            computed.add(stage)
        elif names[kind] == "OPT":
            updated.add(stage)
    if computed - updated:
        raise PlanError(
            f"{what} needs an update (OPT) of stage {min(computed - updated)}; add the optimizer before this pass"
        )
