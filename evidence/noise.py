"""How far published measurements of one setting lie apart: the floor under every error of a prediction.

`noise(rows)` returns a `Noise` with three spreads: repeats (rows alike in every column and note), twins (alike in every
column; their notes differ, but not by release) and releases (alike but for the release of the program). Each is the
median distance from the mean of its group. Leaves out how predictions do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np

from evidence.published import Row
from evidence.published.notes import read_notes

_MEASURED = {"id", "line", "metric", "value", "second_metric", "second_value", "mem_gib", "notes", "section", "source"}
_SETTING = tuple(f.name for f in fields(Row) if f.name not in _MEASURED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Median distances from the mean of a group, as shares; None where no rows are alike."""

    repeats: float | None
    """Of rows that say the same of what was run, in every column and note."""
    repeat_rows: int
    """Rows in such groups."""
    twins: float | None
    """Of rows alike in every column, of one release, whose notes differ."""
    twin_rows: int
    """Rows in such groups."""
    releases: float | None
    """Of the means of releases, of rows alike in every column."""
    release_rows: int
    """Rows in such groups."""

    @property
    def floor(self) -> float | None:
        """What no prediction from the columns can be better than: twins if there are any, else repeats."""
        return self.twins if self.twins is not None else self.repeats


def noise(rows: Iterable[Row]) -> Noise:
    """The spreads of a table."""
    same: dict[tuple[object, ...], list[Row]] = defaultdict(list)
    for row in rows:
        same[(row.metric, *(getattr(row, name) for name in _SETTING))].append(row)
    repeats: list[list[float]] = []
    twins: list[list[float]] = []
    releases: list[list[float]] = []
    counted = 0
    for group in same.values():
        by_release: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for row in group:
            by_release[read_notes(row).release][row.notes].append(row.value)
        for by_note in by_release.values():
            repeats += by_note.values()
            if len(by_note) > 1:
                twins.append([value for values in by_note.values() for value in values])
        if len(by_release) > 1:
            means = [np.mean([v for vs in by_note.values() for v in vs]) for by_note in by_release.values()]
            releases.append([float(mean) for mean in means])
            counted += len(group)
    apart = [_apart(groups) for groups in (repeats, twins, releases)]
    return Noise(
        repeats=apart[0][0],
        repeat_rows=apart[0][1],
        twins=apart[1][0],
        twin_rows=apart[1][1],
        releases=apart[2][0],
        release_rows=counted,
    )


def _apart(groups: Sequence[Sequence[float]]) -> tuple[float | None, int]:
    """(median distance from the mean of its group, values) over groups of more than one."""
    collected = [abs(v / np.mean(values) - 1) for values in groups if len(values) > 1 for v in values]
    return (float(np.median(collected)) if collected else None), len(collected)
