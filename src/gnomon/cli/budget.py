"""`--budget`: CPU time that a search may take, and how far the search is.

^C spends it early; what was found until then is the answer.

`Budget` is asked between two plans, as `search.budget` wants it. Leaves out what a search does when it is spent.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import Any

from gnomon.cli.terminal import Progress
from gnomon.cli.values import quantity
from gnomon.search.budget import KeepGoing, until
from gnomon.units import parse_seconds, show_seconds

ONE, QUESTION = "60s", "10min"
"""CPU time of a search for one plan, and of a question that takes several, unless --budget says otherwise."""

FIRST = 0.75
"""Share of a plan's budget that the exact search may take; what comes after it has the rest."""


class Budget:
    """A budget that ^C spends; a second ^C ends the program. Used as `with Budget(...) as budget:`."""

    def __init__(self, text: str | None, default: str) -> None:
        """Reads the text of --budget; None is `default`. InputError for a text that is no time."""
        self.text = text or default
        self.seconds = quantity("--budget", parse_seconds, self.text)
        self.stopped = False
        """Whether ^C was pressed."""
        self._until, self._first, self._half = (until(self.seconds * share) for share in (1, FIRST, 0.5))
        self._before: Any = None

    def __enter__(self) -> Budget:
        self._before = signal.signal(signal.SIGINT, self._stop)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self.stopped:
            raise KeyboardInterrupt
        self.stopped = True
        print("\nstopping with the best plan so far; ^C again ends at once", file=sys.stderr, flush=True)

    def __call__(self) -> bool:
        """Whether there is time left."""
        return not self.stopped and self._until()

    @property
    def first(self) -> KeepGoing:
        """The same of the exact search's share."""
        return lambda: not self.stopped and self._first()

    @property
    def half(self) -> KeepGoing:
        """The same of half of it."""
        return lambda: not self.stopped and self._half()

    @property
    def status(self) -> int:
        """Exit status of a search that gave its answer."""
        # What a shell reports of a program that a signal ended.
        return 128 + signal.SIGINT if self.stopped else 0


class Passing:
    """Progress of the passes after a search: what its `on_pass` calls. Used as `with Passing() as on_progress:`."""

    def __init__(self) -> None:
        self._name, self._covered = "", SearchProgress()

    def __enter__(self) -> Passing:
        return self

    def __exit__(self, *_: object) -> None:
        self._covered.end()

    def __call__(self, name: str, done: int, most: int) -> None:
        """So many of at most so many plans of a pass were looked at."""
        if name != self._name:
            self._covered.end()
            self._name, self._covered = name, SearchProgress(name)
        self._covered(done, most)


class SearchProgress:
    """Progress of a search, which says how many points there are when it begins: what its `on_progress` calls."""

    def __init__(self, what: str = "covered") -> None:
        self._what = what
        self._progress: Progress | None = None

    def __call__(self, done: int, size: int, best_s: float | None = None) -> None:
        """So many of so many points are covered. best_s: step of the best plan so far."""
        if self._progress is None:
            self._progress = Progress(self._what, size)
        self._progress.show(done, "" if best_s is None else f"; best so far {show_seconds(best_s)} a step")

    def end(self) -> None:
        """Wipes the line of progress."""
        if self._progress is not None:
            self._progress.end()
