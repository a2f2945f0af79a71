"""`--export` of runs whose processes come and go: the weights are written from the run's last checkpoint.

No process of such a run need have been there from the beginning, or hold one rank's part alone, so that the launcher
exports what was saved in place of them. `keeping(job)` is the job that leaves a checkpoint, `exported(job, outcome)`
exports it and takes it away again where nobody asked for it. Leaves out the layout of weights (`pretrained`).
"""

from __future__ import annotations

import shutil
from dataclasses import replace

from gnomon.errors import PlanError
from gnomon.runtime.checkpoint.adapters import adapters_of
from gnomon.runtime.checkpoint.pretrained import export_checkpoint
from gnomon.runtime.checkpoint.record import newest
from gnomon.runtime.launch.train import Outcome, TrainingJob


def keeping(job: TrainingJob) -> TrainingJob:
    """The same job, with a checkpoint at its end if weights are to be exported. PlanError for weights that are not
    exported from a checkpoint: adapters alone, and without a folder."""
    if job.export is None:
        return job
    if adapters_of(job.graph) is not None:
        raise PlanError("adapters are exported by a run with a process for each rank; leave --export out")
    if job.checkpoints is None:
        raise PlanError("--export needs a folder for checkpoints here: weights are exported from the last one")
    return replace(job, checkpoint_at_end=True)


def exported(job: TrainingJob, outcome: Outcome) -> Outcome:
    """Exports the weights, if that was asked for and the run was not stopped. job: as it was asked for."""
    if job.export is None or outcome.signal:
        return outcome
    assert job.checkpoints is not None
    path = outcome.checkpoint or newest(job.checkpoints)
    assert path is not None, "the run has left a checkpoint"
    target, model = job.export
    export_checkpoint(path, target, model=model)
    due = job.checkpoint_every and job.steps % job.checkpoint_every == 0
    if job.checkpoint_at_end or due or outcome.checkpoint is None:
        return outcome
    shutil.rmtree(path)
    return replace(outcome, checkpoint=None)
