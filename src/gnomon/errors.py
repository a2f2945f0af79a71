"""The exception tree.

Every error a user can cause is one of these, and says what was asked, what the limit is and what to do.

    GnomonError(ValueError)
    ├── InputError         a file or value that cannot be read: carries the path to the value (`$.stages[2].calls`)
    │   ├── UnitError      a quantity without a unit, with a wrong unit, or not finite
    │   └── FormatError    a text form (Program, Timeline, another tool's file) that does not parse: line and column
    ├── CaptureError       a module whose forward cannot be recorded: file and line of its code
    ├── GraphError         a model that is not well formed (unknown tensor, shapes that disagree)
    ├── PlanError          a plan that cannot run on this graph or cluster, or that contradicts itself
    ├── ProgramError       a Program that cannot run: carries the `Problem`s that validate found
    ├── UnpricedError      an action, op, link or buffer without a price or size
    ├── CatalogueError     an unknown device, cluster or model: carries the nearest names
    └── RunError           a run that ended before its time: which process, and what is left of it
        ├── PeerError      another process of the job is gone: what this one waited for
        └── NoMemoryError  memory ran out in one rank

`assert` is for our own mistakes, never for a user's.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class GnomonError(ValueError):
    """Base of every error that Gnomon raises on purpose."""


class InputError(GnomonError):
    """A value that cannot be read. `path` says where, as in `$.stages[2].calls`; the message ends with it."""

    def __init__(self, message: str, path: str = "") -> None:
        self.path = path
        super().__init__(f"{message} - at `{path}`" if path else message)


class UnitError(InputError):
    """A quantity without a unit, with a unit of the wrong kind, or not finite."""


class FormatError(InputError):
    """Text that does not parse. `path` is `file:line:column` or `line N`."""


class CaptureError(GnomonError):
    """A module whose forward cannot be recorded, or whose Graph does not compute what it computes."""


class GraphError(GnomonError):
    """A model graph that is not well formed."""


class PlanError(GnomonError):
    """A plan that contradicts itself, its graph or its cluster."""


class ProgramError(GnomonError):
    """A Program that cannot run. `problems` holds what `validate` found, first cause first."""

    def __init__(self, message: str, problems: tuple[object, ...] = ()) -> None:
        self.problems = problems
        super().__init__(message)


class UnpricedError(GnomonError):
    """Something without a price or a size: naming it beats a total that is silently low."""


class CatalogueError(GnomonError):
    """An unknown name of a device, cluster or model."""


class RunError(GnomonError):
    """A run that ended before its time."""


class PeerError(RunError):
    """Another process of the job is gone, which is not this one's mistake: the run may be started again."""


class NoMemoryError(RunError):
    """Memory ran out in one rank."""


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.5) -> str:
    """` (did you mean 'a', 'b'?)` for an error message, or `` when nothing is close: cutoff, 0 to 1, is how close."""
    close = get_close_matches(name, list(dict.fromkeys(known)), n=3, cutoff=cutoff)
    return f" (did you mean {', '.join(repr(c) for c in close)}?)" if close else ""
