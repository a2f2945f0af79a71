"""Training on processes that come and go: the launcher's side.

`run_elastic(job)` starts as many processes as the plan's placement names and announces who trains together
(`membership`). When one is lost the others go on with its workers at once, and it is replaced as often as
`job.max_restarts` says; one that was stopped for too long is killed, and so lost. `gnomon scale` asks for more or fewer
(`request.scale`). Who trains, and where workers run, is decided by `control.controllers.logical_workers` alone. Under
determinism D2 they first agree on kernels that all have (`instruction_sets`). Leaves out what processes do (`elastic`),
and other machines.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import time

from torch._C._distributed_c10d import Store

from gnomon.control import Decision, Seen, after_loss, surplus
from gnomon.errors import PlanError
from gnomon.methods.easyscale import Observation, placed
from gnomon.request.scale import Change, JobFolder, JobState
from gnomon.runtime.checkpoint import newest
from gnomon.runtime.launch.elastic import check_elastic, train_elastic
from gnomon.runtime.launch.exported_checkpoint import exported, keeping
from gnomon.runtime.launch.membership import Membership, kernels_of, noted, say_kernels
from gnomon.runtime.launch.replaceable import Replaceable, set_up
from gnomon.runtime.launch.train import Job, Outcome, corpus_of
from gnomon.runtime.module.apply import check_before
from gnomon.runtime.processes import instruction_sets
from gnomon.runtime.processes.faults import ended
from gnomon.runtime.processes.local import FailedError


def run_elastic(job: Job, *, threads: int = 1, pause_s: Sequence[float] = ()) -> Outcome:
    """Starts the job's processes and returns how it went. job.plan.placement: where its logical workers begin.
    pause_s: seconds that each worker of the first processes sleeps in a step, in place of a slower processor.

    PeerError where no process is left, with the newest checkpoint; PlanError for a plan whose ranks cannot be logical
    workers; SystemExit (130, 143) if a signal ended processes that did not end by themselves.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise PlanError("torchrun starts its own processes; run a plan with --processes without it")
    check_before(job.graph, job.plan)
    check_elastic(job)
    start = placed(job.plan, Observation(processes=max(job.plan.device_of) + 1))
    corpus_of(job)  # text becomes tokens once, before processes wait for each other
    folder = None if job.checkpoints is None else JobFolder(job.checkpoints)
    launched = _Launched(replace(keeping(job), plan=start), folder, threads, tuple(pause_s))
    try:
        launched.results()
    except FailedError as failed:
        kept = None if job.checkpoints is None else newest(job.checkpoints)
        raise ended(failed, launched.asked, left=kept, resume_with=job.resume_with) from failed
    finally:
        if folder is not None:
            folder.close()
    outcome: Outcome = exported(job, launched.outcomes()[0])
    return replace(outcome, notes=(*outcome.notes, launched.unlike)) if launched.unlike else outcome


class _Launched(Replaceable):
    """The processes of one job, while they come and go."""

    controller = "logical_workers"

    def __init__(self, job: Job, folder: JobFolder | None, threads: int, pause_s: tuple[float, ...]) -> None:
        processes = max(job.plan.placement) + 1
        super().__init__(partial(_process, pause_s=pause_s), processes, job, threads)
        self.folder, self.asked = folder, processes
        self.changes: list[Change] = []
        self.lost: list[int] = []
        self.why = "started"
        self.kernels = ""
        """What all processes of a D2 job compute with; empty until they have said what they have."""
        self.kinds: dict[str, int] = {}
        """What processes of a D1 job compute with -> the first that does."""
        self.compared: set[int] = set()
        self.unlike = ""
        """What is told of processes that differ."""

    def _lose(self, process: int, what: str) -> bool:
        """Another is started, if that may be, or the job goes on with fewer."""
        if self.stopped:
            return True
        self.left.add(process)
        self.lost.append(process)
        self.why = f"process {process} {what}"
        others = len(self._there())
        self.asked, self.restarts, starts = after_loss(self.asked, self.restarts)
        if starts:
            self._start_more(starts)
            then = f"another is started ({self.restarts} left)"
        else:
            then = "its workers stay with the others"
        who = "1 other goes" if others == 1 else f"{others} others go"
        goes_on = f"{who} on with its workers" if others else "none is left"
        self._say(f"{self.why}: {goes_on}; {then}")
        return True

    def _say(self, line: str) -> None:
        if not self.job.quiet:
            print(f"gnomon: {line}", file=sys.stderr, flush=True)

    def _ended_by(self) -> list[int]:
        return [] if self._complete() or self.stopped else self.lost

    def _look(self) -> None:
        """Whether somebody asks for another number, a process was stopped, or others can train now."""
        assert self.store is not None
        if self.folder is not None and (asked := self.folder.asked()) is not None:
            self._scale(asked)
        self._end_silent()
        self._follow()
        if self.job.determinism == "D2":
            self._agree()
        else:
            self._compare()
        seen = self._seen()
        for process in surplus(seen):  # it waits for an epoch that will not come
            self.left.add(process)
            self.ranks[process].process.kill()
        if (decision := self._decide(seen)) is not None:
            if seen.parted and decision.members == seen.members:
                self.why = f"processes did not meet within {self.job.meet_s:g} s: they try again (--meet-within)"
                self._say(self.why)
            elif decision.members == seen.members:
                self.why = "workers moved by measured speeds " + ", ".join(f"{speed:.3g}" for speed in seen.speeds)
            self._announce(decision)

    def _seen(self) -> Seen:
        """With the number that is asked for and, where workers follow speeds, these once all have said theirs."""
        assert self.store is not None
        seen, speeds, parted = super()._seen(), dict[int, float](), False
        if self.epochs:
            parted = len(noted(self.store, "noticed", self.epochs[-1])) == len(seen.members)
        if self.job.follow_speed and self.epochs:
            speeds = noted(self.store, "speed", self.epochs[-1])
        known = tuple(speeds[member] for member in seen.members) if len(speeds) == len(seen.members) else ()
        return replace(seen, asked=self.asked, speeds=known, parted=parted)

    def _agree(self) -> None:
        """On kernels that all have which are there at first; one that comes later and lacks them is left out."""
        assert self.store is not None
        found = kernels_of(self.store, set(range(len(self.ranks))) - self.left)
        if not self.kernels and found.keys() >= set(self._there()):
            self.kernels = instruction_sets.common(found.values())
            say_kernels(self.store, self.kernels)
            self._say(f"all processes compute with {self.kernels} kernels, which all have; without oneDNN")
        for process, one in found.items() if self.kernels else ():
            if not instruction_sets.has(one, self.kernels):
                self.left.add(process)
                self.asked = max(1, len(self._there()))
                self._say(f"process {process} has no {self.kernels} kernels, with which this job began: it is left out")
                self._tell()

    def _compare(self) -> None:
        """Warns of a D1 job whose processes compute with different kernels, once for each kind that comes."""
        found = kernels_of(self.store, set(self._there()) - self.compared) if self.store is not None else {}
        for process, one in found.items():
            self.compared.add(process)
            if self.kinds and one not in self.kinds:
                first, other = next(iter(self.kinds.items()))
                self.unlike = (
                    f"process {process} computes with {one}, and process {other} with {first}: at determinism D1 "
                    f"losses may then differ in their last digits with who does what; --determinism D2 gives the same "
                    f"bits"
                )
                self._say(self.unlike)
            self.kinds.setdefault(one, process)

    def _scale(self, asked: int) -> None:
        asked = min(max(asked, 1), self.job.plan.world_size)
        self.why, self.asked = f"asked for {asked} processes", asked
        missing = asked - len(self._there())
        if missing > 0:
            self._start_more(missing)
        self._tell()

    def _announce(self, decision: Decision) -> None:
        """From the next step on, or where one was lost at once, these train together."""
        if self.epochs:
            self.left |= set(self.epochs[-1].members) - set(decision.members)
        placement = decision.plan.placement
        self._announce_epoch(decision.members, placement)
        self.changes.append(Change(epoch=len(self.epochs), at=time(), why=self.why, placement=placement))
        self.why = "another process joined"
        self._tell()

    def _follow(self) -> None:
        """Fills in when the processes of the last change noticed it, and when they went on."""
        if not self.changes or self.changes[-1].going_at is not None:
            return
        assert self.store is not None
        going = noted(self.store, "going", self.epochs[-1])
        if len(going) < len(self.epochs[-1].members):
            return
        noticed = noted(self.store, "noticed", self.epochs[-2]) if len(self.epochs) > 1 else {}
        last = max(noticed.values(), default=None)
        self.changes[-1] = replace(self.changes[-1], noticed_at=last, going_at=max(going.values()))
        self._tell()

    def _tell(self) -> None:
        """Writes what the job stands on, for those who ask."""
        if self.folder is not None:
            workers = self.job.plan.world_size
            state = JobState(pid=os.getpid(), workers=workers, asked=self.asked, changes=tuple(self.changes))
            self.folder.write(state)


def _process(
    store: Store,
    number: int,
    world_size: int,
    job: Job,
    threads: int,
    schedules: Sequence[Path],
    *,
    pause_s: tuple[float, ...],
) -> Outcome | None:
    """One process, from its start to its end."""
    membership = Membership(store, number, meet_s=job.meet_s)
    if job.determinism == "D2":
        found = instruction_sets.own()
        agreed = membership.agree(found)
        if not instruction_sets.has(found, agreed):
            return None
        instruction_sets.compute_with(agreed)
        job = replace(job, kernels=agreed)
    else:
        membership.say_kind(instruction_sets.kind())
    set_up(threads, schedules)
    return train_elastic(job, membership, pause_s=pause_s[number] if number < len(pause_s) else 0.0)
