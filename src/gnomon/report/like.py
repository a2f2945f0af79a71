"""What to change in a job's file, as text and JSON: the gain, each change by itself, and the diff of the file.

`Like` holds the answer of `gnomon plan --like`. Leaves out the search and the reading of files (`cli.plan_like`).
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gnomon.prediction import Prediction
from gnomon.report.change import change_of, figures_text
from gnomon.report.planning import short_plan
from gnomon.report.tables import Column, memory_unit, number, percent, table, wrapped
from gnomon.units import show_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Settings that belong together, and what they do without the others."""

    settings: tuple[str, ...]
    """As the file has them after the change."""
    by_itself: Prediction | None
    """Of the file with these changes only; None where that is no job, or another one."""
    why: str
    """Why there is none; empty otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Like:
    """A job's file as it is, and as it would be fastest."""

    source: str
    """Name of the file."""
    target: str
    """Name of the changed file; that of the file where none is written."""
    program: str
    """Format of the file."""
    before: Prediction
    """Of the file as it is."""
    after: Prediction | None
    """Of the changed file; None where nothing that the program can do is faster."""
    lines: tuple[Line, ...]
    """What changes in the file, a line each."""
    text: str
    """The file."""
    changed_file: str
    """The file with the changes."""
    covered: str
    """What was searched, in a sentence."""

    @property
    def diff(self) -> tuple[str, ...]:
        """Lines of a unified diff of the file."""
        before, after = self.text.splitlines(), self.changed_file.splitlines()
        return tuple(difflib.unified_diff(before, after, self.source, self.target, lineterm="", n=2))


def like_text(answer: Like, *, assumed: Sequence[str], notes: Sequence[str]) -> tuple[str, ...]:
    """The answer of `plan --like` as lines of text: the job as it is, then as it should be, and what to change."""
    before, after = answer.before, answer.after
    lines = [f"{answer.source} ({answer.program}) on {before.cluster}"]
    lines += wrapped(f"as it is: {short_plan(before.plan)}", indent="")
    if after is None:
        lines += ["", *_still(answer)]
    else:
        how = "faster" if before.fits else "what fits"
        lines += wrapped(f"{how}: {short_plan(after.plan)}", indent="")
        lines += ["", *figures_text(change_of(before, after, (answer.source, answer.source)))]
        lines += ["", *_change_rows(answer), "", *answer.diff]
    lines += ["", *wrapped(answer.covered, indent="")]
    for title, entries in (("assumed", assumed), ("notes", notes)):
        if entries:
            lines += ["", title, *(line for entry in entries for line in wrapped(entry, bullet="- "))]
    return tuple(lines)


def _still(answer: Like) -> tuple[str, ...]:
    step = show_seconds(answer.before.step_s)
    return wrapped(
        f"nothing that {answer.program} can do with this job is faster than the file as it is: {step} a step, with "
        f"everything else as the file has it",
        indent="",
    )


def _change_rows(answer: Like) -> tuple[str, ...]:
    """A row for each change by itself."""
    unit, scale = memory_unit(answer.before.tightest.peak_bytes)
    rows, reasons = [], list[str]()
    for line in answer.lines:
        for setting in line.settings[:-1]:
            rows.append((setting, "", "", ""))
        # Settings of a line were predicted together, so that the numbers stand once, at the last of them.
        last = line.settings[-1]
        if line.by_itself is None:
            rows.append((last, "-", "", ""))
            reasons.append(f"{last}: not by itself: {line.why}")
            continue
        step = line.by_itself.step_s
        rows.append(
            (
                last,
                show_seconds(step),
                f"{'+' if step >= answer.before.step_s else ''}{percent(step / answer.before.step_s - 1)} %",
                number(line.by_itself.tightest.peak_bytes / scale),
            )
        )
    columns = (
        Column(name="each change by itself", align="left"),
        Column(name="step"),
        Column(name="change"),
        Column(name=f"peak {unit}"),
    )
    return (*table(columns, rows), *(one for reason in reasons for one in wrapped(reason, indent="")))


def like_mapping(answer: Like, *, assumed: Sequence[str], notes: Sequence[str]) -> dict[str, Any]:
    """Plain values for JSON."""

    def line_mapping(line: Line) -> dict[str, Any]:
        values: dict[str, Any] = {"settings": list(line.settings)}
        if line.by_itself is None:
            return {**values, "alone": None, "why": line.why}
        peak = line.by_itself.tightest.peak_bytes
        return {**values, "alone": {"step_s": line.by_itself.step_s, "peak_bytes": peak, "fits": line.by_itself.fits}}

    return {
        "schema": "gnomon.plan_like/1",
        "source": answer.source,
        "program": answer.program,
        "change": None
        if answer.after is None
        else change_of(answer.before, answer.after, (answer.source, answer.source)).to_mapping(),
        "step_s": [answer.before.step_s, None if answer.after is None else answer.after.step_s],
        "changes": [line_mapping(line) for line in answer.lines],
        "diff": list(answer.diff),
        "text": answer.changed_file,
        "covered": answer.covered,
        "assumptions": list(assumed),
        "notes": list(notes),
    }
