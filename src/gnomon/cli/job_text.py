"""A job's own file, changed and read again: what `gnomon plan --like` and `gnomon fit --to` offer is what it then says.

`job_text(options, path)` gives a `JobText`; `with_settings` puts settings into its text, reads the job as `gnomon
predict` does, and predicts it. The user's file is never written: a changed one is read from a place of its own, with
the other files of the folder around it. Leaves out which settings to change.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, get_args

from gnomon.cli.options.job import TrainingOptions
from gnomon.cli.request import Request, read_request
from gnomon.errors import GnomonError, PlanError
from gnomon.formats.edit import Places, edited
from gnomon.formats.job import read_source
from gnomon.plans import Workload
from gnomon.prediction import Prediction, predict
from gnomon.request.exported import SAME
from gnomon.schema import save_text
from gnomon.search.fit.terms import Setting

FOLDER = 1000
"""Files around the job's that its changed text can name, at most."""

ANCHORS = (
    "micro-batch-size", "global-batch-size", "tensor-model-parallel-size", "seq-length", "num-layers",
    "per_device_train_batch_size", "gradient_accumulation_steps", "output_dir", "learning_rate", "lr", "model",
)  # fmt: skip
"""Flags near which a new one is put, the first that the script has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """The place of a setting in a script that has several places for it."""

    variables: bool = True
    """At the variable that a flag takes, rather than at the flag."""
    places: Places = "last"
    """Which of several places that fit it is put at."""


WAYS = tuple(Where(variables=variables, places=places) for places in get_args(Places) for variables in (True, False))
"""In the order in which they are tried: a script may hold other commands than the job's, with flags of its names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reread:
    """A changed file, and what it says."""

    text: str
    """The changed file."""
    request: Request
    """The job that it says."""
    prediction: Prediction
    """Time and memory of that."""
    where: Where
    """How its settings were put into the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobText:
    """A job's file as it is, and where changed ones are read."""

    text: str
    """The file as it is."""
    suffix: str
    """End of its name, which tells its kind."""
    options: TrainingOptions
    """How the job was asked for."""
    place: Path
    """Where a changed file is put to be read."""

    def read(self, settings: Sequence[Setting], where: Where = Where(), *, workload: Workload | None = None) -> Reread:
        """What the text says with settings in it. GnomonError where one has no place there, and where the text says no
        job then, or one of another workload than that."""
        return self._read(self._edited(settings, where), where, workload)

    def _edited(self, settings: Sequence[Setting], where: Where) -> str:
        places, variables = where.places, where.variables
        return edited(self.text, self.suffix, settings, variables=variables, places=places, near=ANCHORS)

    def _read(self, text: str, where: Where, workload: Workload | None) -> Reread:
        save_text(text, self.place)
        request = read_request(at(self.options, self.place))
        if workload is not None and request.workload != workload:
            raise PlanError("the batch would be another one")
        prediction = predict(request.graph, request.cluster, request.plan, request.workload, request.stack)
        return Reread(text=text, request=request, prediction=prediction, where=where)

    def with_settings(self, settings: Sequence[Setting], step_s: float, *, workload: Workload | None = None) -> Reread:
        """The text with settings in it, read again: put there in the first of `WAYS` after which the job takes
        `step_s`, or comes nearest to that. GnomonError as `read`, where no way makes a job of it."""
        found: list[tuple[float, Reread]] = []
        problem: GnomonError | None = None
        seen: set[str] = set()
        for where in WAYS:
            try:
                text = self._edited(settings, where)
                if text in seen:
                    continue
                seen.add(text)
                reread = self._read(text, where, workload)
            except GnomonError as error:
                problem = problem or error
                continue
            apart = abs(reread.prediction.step_s / step_s - 1)
            if apart <= SAME:
                return reread
            found.append((apart, reread))
        if not found:
            assert problem is not None
            raise problem
        return min(found, key=lambda one: one[0])[1]


def save_job(text: str, path: Path, output: str) -> None:
    """Writes a changed file of the job at `path`, which can be run where that can. InputError as `save_text`."""
    save_text(text, output)
    runs = path.stat().st_mode & 0o111
    if runs and Path(output).is_file():
        Path(output).chmod(Path(output).stat().st_mode | runs)


def at_fields(options: TrainingOptions, path: Path) -> dict[str, Any]:
    """Fields of the options for the job's file at another place."""
    return {"model": str(path)} if options.source is None else {"source": (options.source[0], str(path))}


def at(options: TrainingOptions, path: Path) -> TrainingOptions:
    """The options with the job's file at another place."""
    return replace(options, **at_fields(options, path))


@contextmanager
def job_text(options: TrainingOptions, path: Path) -> Iterator[JobText]:
    """The text of a job's file, with a place for changed ones while it is used."""
    text, _ = read_source(path)
    with tempfile.TemporaryDirectory(prefix="gnomon-job-") as folder:
        for other in islice(path.resolve().parent.iterdir(), FOLDER):
            if other.name != path.name:
                # Job files name others that lie beside them: these are found from the changed one too.
                os.symlink(other, Path(folder) / other.name)
        yield JobText(text=text, suffix=path.suffix, options=options, place=Path(folder) / path.name)
