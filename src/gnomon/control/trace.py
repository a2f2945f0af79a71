"""What a launcher saw and decided, recorded: a line of JSON for each look at which anything was new.

`Recorder(path, …)` writes as it goes; `read_trace(path)` reads. The first line has the controller's name and the plan.
Nothing in a file is executed. Leaves out playing it (`simulated`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from time import time
from typing import ClassVar, TypeVar

from gnomon import schema
from gnomon.control.controllers import CONTROLLERS
from gnomon.control.seen import Decision, JobProcesses
from gnomon.errors import InputError
from gnomon.plans import Plan

MOST_BYTES = 1 << 28
NONE = JobProcesses(there=(), ready=())
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What was seen of the job at one moment."""

    at: float
    """Seconds since the job was started."""
    seen: JobProcesses
    """The job's processes at that moment."""
    decision: Decision | None
    """None where all went on as it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlTrace:
    """What was seen and decided of one job, from its start to its end."""

    controller: str
    """Of `CONTROLLERS`."""
    plan: Plan
    """That the job was started with."""
    restarts: int
    """Processes that could be replaced."""
    looks: tuple[Look, ...]
    """Everything that was seen, in order of time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    """The first line of a trace's file."""

    SCHEMA: ClassVar[str] = "gnomon.decisions/1"
    controller: str
    restarts: int
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class _DecisionLine:
    """A decision, without what all have in common."""

    members: tuple[int, ...]
    placement: tuple[int, ...]
    lost: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """Any other line of a trace's file."""

    at: float
    seen: JobProcesses
    decision: _DecisionLine | None = None


class Recorder:
    """Writes the trace as the launcher goes on."""

    def __init__(self, path: Path, *, controller: str, plan: Plan, restarts: int) -> None:
        """InputError where the file cannot be written."""
        self.path, self.began, self.last = path, time(), NONE
        self._line(_Head(controller=controller, restarts=restarts, plan=plan), mode="w")

    def look(self, seen: JobProcesses, decision: Decision | None) -> None:
        """A line, if anything is new."""
        if seen == self.last and decision is None:
            return
        self.last, decision_line = seen, None
        if decision is not None:
            decision_line = _DecisionLine(
                members=decision.members, placement=decision.plan.placement, lost=decision.lost
            )
        self._line(_Line(at=round(time() - self.began, 6), seen=seen, decision=decision_line))

    def _line(self, value: object, *, mode: str = "a") -> None:
        try:
            # Opened and closed for each line, so that a launcher that is killed leaves whole lines, but for the last.
            with self.path.open(mode, encoding="utf-8") as file:
                file.write(json.dumps(schema.to_mapping(value)) + "\n")
        except OSError as error:
            raise InputError(f"cannot write decisions to {str(self.path)!r}: {error.strerror}") from error


def read_trace(path: Path) -> ControlTrace:
    """The trace in a file; a last line that was cut off is passed over. InputError for any other file."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise InputError(f"{path} is larger than any trace of decisions")
        # A launcher that was killed may have cut off its last line, which then has no end.
        lines = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {str(path)!r}: {error}") from error
    head = _read(_Head, lines[0] if lines else "", f"{path}:1")
    if head.controller not in CONTROLLERS:
        raise InputError(f"{path}:1: no controller is called {head.controller!r}: {', '.join(CONTROLLERS)}")
    looks, plan = list[Look](), head.plan
    for number, text in enumerate(lines[1:], start=2):
        line, decision = _read(_Line, text, f"{path}:{number}"), None
        if line.decision is not None:
            read_decision = line.decision
            plan = replace(plan, placement=read_decision.placement)
            decision = Decision(members=read_decision.members, plan=plan, lost=read_decision.lost)
        looks.append(Look(at=line.at, seen=line.seen, decision=decision))
    return ControlTrace(controller=head.controller, plan=head.plan, restarts=head.restarts, looks=tuple(looks))


def _read(cls: type[T], text: str, where: str) -> T:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: {error}; it is no recorded decision") from None
    if not isinstance(values, dict):
        raise InputError(f"{where}: it is no recorded decision")
    return schema.from_mapping(cls, values, where)
