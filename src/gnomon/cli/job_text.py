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
from typing import Any

from gnomon.cli.options.job import TrainingOptions
from gnomon.cli.request import Request, read_request
from gnomon.errors import GnomonError, PlanError
from gnomon.formats.edit import edited
from gnomon.formats.job import read_source
from gnomon.plans import Workload
from gnomon.prediction import Prediction, predict
from gnomon.schema import save_text
from gnomon.search.fit.terms import Setting

SAME = 1e-3
"""Steps that differ by a smaller share are the same."""

FOLDER = 1000
"""Files around the job's that its changed text can name, at most."""

ANCHORS = (
    "micro-batch-size", "global-batch-size", "tensor-model-parallel-size", "seq-length", "num-layers",
    "per_device_train_batch_size", "gradient_accumulation_steps", "output_dir", "learning_rate", "lr", "model",
)  # fmt: skip
"""Flags near which a new one is put, the first that the script has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reread:
    """A changed file, and what it says."""

    text: str
    request: Request
    prediction: Prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class JobText:
    """A job's file as it is, and where changed ones are read."""

    text: str
    suffix: str
    options: TrainingOptions
    """How the job was asked for."""
    place: Path
    """Where a changed file is put to be read."""

    def edited(self, settings: Sequence[Setting], *, variables: bool = True) -> str:
        """The text with settings in it. InputError for one that has no place there."""
        return edited(self.text, self.suffix, settings, variables=variables, beside=ANCHORS)

    def read(self, text: str, *, workload: Workload | None = None) -> Reread:
        """What a changed text says. GnomonError where it says no job, or one of another workload than that."""
        save_text(text, self.place)
        request = read_request(at(self.options, self.place))
        if workload is not None and request.workload != workload:
            raise PlanError("the batch would be another one")
        prediction = predict(request.graph, request.cluster, request.plan, request.workload, request.stack)
        return Reread(text=text, request=request, prediction=prediction)

    def with_settings(self, settings: Sequence[Setting], step_s: float, *, workload: Workload | None = None) -> Reread:
        """The text with settings in it, read again: where a flag takes a variable, with another value of that, or, if
        the job would not take `step_s` then, with the value at the flag. GnomonError as `read`, where neither says a
        job."""
        found: list[tuple[float, Reread]] = []
        problem: GnomonError | None = None
        for variables in (True, False):
            try:
                reread = self.read(self.edited(settings, variables=variables), workload=workload)
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
                os.symlink(other, Path(folder) / other.name)
        yield JobText(text=text, suffix=path.suffix, options=options, place=Path(folder) / path.name)
