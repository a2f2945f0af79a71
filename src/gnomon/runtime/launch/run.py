"""A job carried out on this machine: the one place that says how its processes are started.

`run(job)` starts them and returns how it went. `scheme_of(job)` says how processes are used that may come, go or be
slow; a job without a scheme has a process for each rank, all of which stay until the end, or are all started again.
Leaves out what a process does (`train`, `member`).
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Any

from gnomon.errors import RunError
from gnomon.methods import bamboo, partial_reduce
from gnomon.runtime.checkpoint.record import newest
from gnomon.runtime.launch.elastic import LOGICAL_WORKERS
from gnomon.runtime.launch.launcher import Scheme, run_scheme
from gnomon.runtime.launch.survivors import SURVIVORS
from gnomon.runtime.launch.takeover import TAKEOVER
from gnomon.runtime.launch.tickets import PARTIAL_REDUCE
from gnomon.runtime.launch.train import Outcome, TrainingJob, corpus_of, preload_of, train
from gnomon.runtime.module.apply import check_before
from gnomon.runtime.processes.faults import failure_of, may_start_again
from gnomon.runtime.processes.launch import BACKENDS, launch
from gnomon.runtime.processes.local import FailedError


def scheme_of(job: TrainingJob) -> Scheme | None:
    """How the job's processes are used; None where each rank has one that stays until the end."""
    if job.memory_checkpoint_every:
        return SURVIVORS
    if job.logical_workers or len(set(job.plan.device_of)) < job.plan.world_size:
        return LOGICAL_WORKERS
    if partial_reduce.METHOD.used(job.plan):
        return PARTIAL_REDUCE
    return TAKEOVER if bamboo.METHOD.used(job.plan) else None


def run(job: TrainingJob, *, threads: int = 1) -> Outcome:
    """Starts the job's processes and returns rank 0's outcome; under `torchrun` this process's.

    threads: of torch, in each process. A run that lost a process is started again `job.max_restarts` times, from its
    newest checkpoint, unless its scheme goes on without; then PeerError. SystemExit (130, 143) if a signal ended
    processes that did not end by themselves.
    """
    scheme = scheme_of(job)
    return _run_ranks(job, threads) if scheme is None else run_scheme(job, scheme, threads=threads)


def _run_ranks(job: TrainingJob, threads: int) -> Outcome:
    """A process for each rank; all are started again where one is lost."""
    check_before(job.graph, job.plan)
    size, backend = job.plan.world_size, BACKENDS[job.device]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        places = job.plan.device_of
        return next(iter(launch(train, size, job, backend=backend, threads=threads, places=places).values()))
    start: dict[str, Any] = {"backend": backend, "threads": threads, "grace_s": job.grace_s, "ends_itself": True}
    start["places"] = job.plan.device_of
    start["preload"] = preload_of(job)
    corpus_of(job)  # text becomes tokens once, before processes wait for each other
    # Each turn returns, raises, or uses up a restart.
    for restarts_left in range(job.max_restarts, -1, -1):
        try:
            return launch(train, size, job, **start)[0]
        except FailedError as failed:
            last_checkpoint = None if job.checkpoints is None else newest(job.checkpoints)
            error = failure_of(failed, size, last_checkpoint=last_checkpoint, resume_with=job.resume_with)
            # A mistake would come again at the same step.
            if not restarts_left or not may_start_again(failed):
                raise error from failed
            beginning = f"from {last_checkpoint}" if last_checkpoint else "from the beginning"
            print(f"gnomon: {error}; starting again {beginning}, {restarts_left - 1} left", file=sys.stderr, flush=True)
            # From this run's own checkpoints, whether or not it was asked to resume.
            job = replace(job, resume=job.checkpoints is not None)
        except RunError as error:
            if not isinstance(cause := error.__cause__, FailedError):
                raise
            last_checkpoint = None if job.checkpoints is None else newest(job.checkpoints)
            raise failure_of(cause, size, last_checkpoint=last_checkpoint, resume_with=job.resume_with) from cause
        except SystemExit:
            if job.checkpoints is None or newest(job.checkpoints) is None:
                print("stopped before there was anything to keep", file=sys.stderr, flush=True)
            raise
    raise AssertionError("the last launch returns or raises")
