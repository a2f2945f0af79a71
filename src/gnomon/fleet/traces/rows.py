"""Rows of a delimited file, read strictly: what a column must hold, and every mistake with its line.

`TraceRows` reads; its methods return a value or note a problem; `done` raises one InputError with the first of all
problems. Leaves out what the columns mean.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from gnomon.errors import InputError
from gnomon.fleet.job import Job, RefusedRow, check_job

SHOWN = 5
"""Problems that an error lists."""

MAX_BYTES = 2**30
"""Largest trace that is read."""


@dataclass(slots=True)
class TraceRows:
    """A file's rows and what was found wrong with them."""

    name: str
    """The file, for messages."""
    advice: str = "mend the rows, or leave them out with --skip-bad"
    """What to do about mistakes."""
    keep_going: bool = False
    """Rows with a mistake are left out and listed, in place of an error."""
    parts: bool = False
    """Jobs that take a part of a device are kept; otherwise they are listed as left out."""
    problems: list[RefusedRow] = field(default_factory=list)
    """Rows that cannot be read."""
    left_out: list[RefusedRow] = field(default_factory=list)
    """Rows that can be read and are no jobs for a replay."""

    def table(self, text: str, delimiter: str = ",") -> Iterator[tuple[int, dict[str, str]]]:
        """(line, cells by column) of every row that is not empty; names without blanks around them."""
        reader = csv.reader(io.StringIO(text), delimiter=delimiter, strict=True)
        try:
            head = [name.strip() for name in next(reader, [])]
            # Columns without a name may be several; nothing reads them.
            twice = {name for name in head if name and head.count(name) > 1}
            if twice:
                raise InputError(f"{self.name}: line 1: column {sorted(twice)[0]!r} is there twice")
            for cells in reader:
                if not any(cell.strip() for cell in cells):
                    continue
                if len(cells) != len(head):
                    # The last line of the row: a quoted cell may go over several.
                    self.problem(reader.line_num, f"{len(cells)} cells, but the heading has {len(head)}")
                    continue
                yield reader.line_num, dict(zip(head, cells, strict=True))
        except csv.Error as error:
            raise InputError(f"{self.name}: line {reader.line_num}: {error}") from error

    def problem(self, line: int, reason: str) -> None:
        """Note what is wrong with a row."""
        self.problems.append(RefusedRow(line=line, reason=reason))

    def leave_out(self, line: int, reason: str) -> None:
        """Note why a row is no job for a replay."""
        self.left_out.append(RefusedRow(line=line, reason=reason))

    def number(self, line: int, row: dict[str, str], column: str) -> float:
        """A finite number of 0 or more; NaN, with a problem noted, where there is none."""
        return self.value(line, column, row.get(column, ""))

    def value(self, line: int, what: str, text: str) -> float:
        """Reads a number from a text, as `number` does from a cell."""
        text = text.strip()
        if not text:
            self.problem(line, f"{what} is missing")
            return math.nan
        try:
            value = float(text)
        except ValueError:
            self.problem(line, f"{what} is {text[:32]!r}, not a number")
            return math.nan
        if not math.isfinite(value):
            self.problem(line, f"{what} is {text[:32]}, not a finite number")
            return math.nan
        if value < 0:
            self.problem(line, f"{what} is negative: {text[:32]}")
            return math.nan
        return value

    def count(self, line: int, row: dict[str, str], column: str) -> int:
        """A whole number of 0 or more; -1, with a problem noted, where there is none."""
        number = self.number(line, row, column)
        if math.isnan(number):
            return -1
        if number != int(number):
            self.problem(line, f"{column} is {row[column].strip()[:32]!r}, not a whole number")
            return -1
        return int(number)

    def jobs(self, jobs: Sequence[Job]) -> tuple[Job, ...]:
        """The jobs in order of submission, checked. InputError with the first problems, unless `keep_going`."""
        # Jobs of these rows have NaN or -1 where a cell could not be read: checking them would tell the same mistake
        # again.
        bad = {problem.line for problem in self.problems}
        seen: dict[str, int] = {}
        read_jobs = []
        for job in jobs:
            if job.line in bad:
                continue
            if job.id in seen:
                self.problem(job.line, f"job {job.id!r} is there twice, first in line {seen[job.id]}")
                continue
            seen[job.id] = job.line
            try:
                check_job(job, f"line {job.line}")
            except InputError as error:
                self.problem(job.line, str(error).partition(": ")[2])
                continue
            read_jobs.append(job)
        if self.problems and not self.keep_going:
            self.problems.sort(key=lambda problem: problem.line)
            first = "; ".join(f"line {problem.line}: {problem.reason}" for problem in self.problems[:SHOWN])
            rest_text = f"; and {len(self.problems) - SHOWN:,} more" if len(self.problems) > SHOWN else ""
            raise InputError(f"{self.name}: {first}{rest_text}; {self.advice}")
        self.left_out += self.problems
        self.left_out.sort(key=lambda problem: problem.line)
        # The sort is stable: jobs of one second stay in the order of the file.
        return tuple(sorted(read_jobs, key=lambda job: job.submit_s))


def need(name: str, have: Sequence[str], columns: Sequence[str]) -> None:
    """InputError if a column is missing."""
    missing = [column for column in columns if column not in have]
    if missing:
        raise InputError(f"{name}: line 1: no column {missing[0]!r}; it has {', '.join(map(repr, have))}")
