"""What a hand-worked case is: a model, a plan, the Program they become, durations, and the timeline a reader can check.

Each file of `tests/cases/` opens with a docstring that works the numbers out and says where they come from, and defines
`CASE` (or several in `CASES`). `tests/test_cases.py` runs them all. A number that is not given is not checked: a case
says only what its author worked out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gnomon.graph import Graph
from gnomon.hardware import Cluster
from gnomon.plans import Plan
from gnomon.program import Program


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Peak memory of one rank class, with its moment."""

    size: float
    """In the case's own unit of size, carried buffers included."""
    action: str = ""
    """Issue order: the action during which the peak is first reached, `0F3`."""
    moment: float | None = None
    """Time order: seconds from the start of the first step at which it is first reached."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What the timeline must show, to the last bit."""

    makespan: float | None = None
    """End of the last action of one step that starts from rest."""
    period: float | None = None
    """Steady-state time per step."""
    exposed: Mapping[int, float] = field(default_factory=dict)
    """Rank class -> communication not hidden by its compute stream, per step that starts from rest."""
    idle: Mapping[int, float] = field(default_factory=dict)
    """Rank class -> idle time of its compute stream in a step that starts from rest (bubble and exposed together)."""
    issue_peaks: Mapping[int, Peak] = field(default_factory=dict)
    time_peaks: Mapping[int, Peak] = field(default_factory=dict)
    time_steps: int = 1
    """Steps played for the peaks in time order: 1 from rest, more to let steps overlap."""
    ends: Mapping[str, float] = field(default_factory=dict)
    """`0:2F3` (rank class:action) -> when it ends in a step that starts from rest."""
    problem: str = ""
    """The kind of problem that validate must find; nothing else is checked then."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One case."""

    name: str
    program: str
    """Text of the Program."""
    expected: Expected
    busy: Mapping[str, float] = field(default_factory=dict)
    """Label -> seconds (see gnomon.simulate.durations)."""
    lag: Mapping[str, float] = field(default_factory=dict)
    sizes: Mapping[str, float] = field(default_factory=dict)
    """Label -> size (see gnomon.program.size_labels)."""
    graph: Graph | None = None
    plan: Plan | None = None
    cluster: Cluster | None = None
    lowered: Callable[[], Program] | None = None
    """How the Program comes from the graph and plan (lower, schedules, passes); it must equal the text."""
    also: tuple[Callable[[], None], ...] = ()
    """Further checks, each a function that asserts."""
