"""What is scheduled: a `Job` of a trace, and the `Trace` that holds all of them with what was wrong in its file.

Times are seconds from the start of the trace. A job's `work_s` is how long it runs on the devices it asked for; how
long it takes on others is a forecast (`gnomon.fleet.forecast`), not a fact of the trace. Leaves out reading files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gnomon.errors import InputError

LONGEST_S = 50 * 365 * 86400.0
"""Longest time in a trace: anything longer is a wrong unit (milliseconds, a date) and not a job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job of a trace."""

    id: str
    """Its name in the file."""
    submit_s: float
    """When it was submitted, from the start of the trace."""
    work_s: float
    """Seconds that it runs on the devices it asked for."""
    devices: int
    """Devices that it asked for; of a MIG slice, its compute slices."""
    min_devices: int = 0
    """Fewest that it can run on; 0 stands for `devices`."""
    max_devices: int = 0
    """Most that it can use; 0 stands for `devices`."""
    device: str = ""
    """Kind of device that it was measured on, by the catalogue's name; empty where the trace does not say."""
    model: str = ""
    """What it trains: the key under which measured points are kept; empty where the trace does not say."""
    batch_size: int = 0
    """Global batch size; 0 where the trace does not say."""
    plan: str = ""
    """Plan file that it runs; empty where the trace does not say."""
    seq_len: int = 0
    """Tokens of a sequence; 0 where the trace does not say."""
    slice: str = ""
    """MIG profile, as in `3g.20gb`; empty for whole devices."""
    memory_bytes: int = 0
    """Memory that it takes on each device; 0 where the trace does not say."""
    share: float = 1.0
    """Share of its one device that it takes; 1 of jobs on whole devices."""
    deadline_s: float = math.inf
    """When it must have finished, from the start of the trace; infinite where nothing depends on it."""
    weight: float = 1.0
    """How much it counts beside others, of policies that are fair."""
    user: str = ""
    """Who submitted it, or its virtual cluster."""
    line: int = 0
    """Line of the file; 0 for a job that is of no file."""

    @property
    def fewest(self) -> int:
        """Fewest devices that it can run on."""
        return self.min_devices or self.devices

    @property
    def most(self) -> int:
        """Most devices that it can use."""
        return self.max_devices or self.devices

    @property
    def elastic(self) -> bool:
        """Whether it can run on other numbers of devices than it asked for."""
        return self.fewest != self.most


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedRow:
    """A row of a trace that is not a job that can be replayed."""

    line: int
    """Where it stands."""
    reason: str
    """What is wrong with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Jobs in order of submission, and what was left out of them."""

    name: str
    """The file, or what made it."""
    format: str
    """Which reader read it."""
    jobs: tuple[Job, ...]
    """In order of submission, then of the file."""
    left_out: tuple[RefusedRow, ...] = ()
    """Rows that are no jobs for a replay (never ran, no GPU), each with its line, to be reported."""
    notes: tuple[str, ...] = ()
    """What the reader assumed."""

    def __post_init__(self) -> None:
        if not self.jobs:
            raise InputError(f"trace {self.name!r} has no job that can be replayed{reasons(self.left_out)}")
        seen: set[str] = set()
        for job in self.jobs:
            if job.id in seen:
                raise InputError(f"{self.name}: line {job.line}: job {job.id!r} is there twice")
            seen.add(job.id)


def reasons(left_out: Sequence[RefusedRow], most: int = 3) -> str:
    """Says which rows were left out and why, as in `: 12 rows left out (line 4: …; line 9: …; …)`; empty for none."""
    if not left_out:
        return ""
    first = "; ".join(f"line {row.line}: {row.reason}" for row in left_out[:most])
    ellipsis = "; …" if len(left_out) > most else ""
    return f": {len(left_out):,} row{'s' if len(left_out) > 1 else ''} left out ({first}{ellipsis})"


def check_job(job: Job, where: str) -> None:
    """InputError for values that no job can have."""
    for name in ("submit_s", "work_s"):
        value = getattr(job, name)
        if not math.isfinite(value) or value < 0:
            raise InputError(f"{where}: job {job.id!r}: {name} is {value!r}; it must be 0 or more")
        if value > LONGEST_S:
            raise InputError(f"{where}: job {job.id!r}: {name} is {value:g} s; the limit is 50 years")
    if not 0 < job.weight < math.inf:
        raise InputError(f"{where}: job {job.id!r}: weight is {job.weight!r}; it must be over 0")
    if math.isnan(job.deadline_s) or job.deadline_s < job.submit_s:
        raise InputError(f"{where}: job {job.id!r}: its deadline {job.deadline_s:g} s is before its submission")
    if job.devices < 1:
        raise InputError(f"{where}: job {job.id!r} asks for {job.devices} devices; at least 1 is needed")
    if not 1 <= job.fewest <= job.devices <= job.most:
        raise InputError(
            f"{where}: job {job.id!r} asks for {job.devices} devices, which is not from min {job.fewest} to "
            f"max {job.most}"
        )


def between(trace: Trace, start_s: float, end_s: float) -> Trace:
    """Jobs submitted in [start_s, end_s), with `start_s` as the new zero."""
    jobs = tuple(
        replace(job, submit_s=job.submit_s - start_s, deadline_s=job.deadline_s - start_s)
        for job in trace.jobs
        if start_s <= job.submit_s < end_s
    )
    return replace(
        trace,
        jobs=jobs,
        notes=(*trace.notes, f"only jobs submitted in days {start_s / 86400:g} to {end_s / 86400:g} of it"),
    )
