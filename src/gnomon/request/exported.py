"""Plans as the file of the program that will run them says them: what is offered for a stack is what can be exported.

`based(base, …)` gives a search the precision, buckets and overlap that every file of the program has; `exportable`
returns a search's plans as their files are read back, priced as that; `comes_back` says whether a plan that was changed
since is still the same in its file. Stacks without an exporter are left as they are. Leaves out what a program runs as
axes, ZeRO stages and schedules: that is in its record (`software`), which bounds the search.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Protocol

from gnomon.errors import GnomonError, PlanError
from gnomon.formats import programs
from gnomon.formats.export import asked_for
from gnomon.formats.job import Job, ModelConfig
from gnomon.graph import Graph
from gnomon.hardware import Cluster
from gnomon.plans import Mesh, Plan, Workload
from gnomon.prediction import Prediction, predict
from gnomon.search import FoundPlan, Result
from gnomon.software import Stack
from gnomon.software import stack as named_stack

SAME = 1e-3
"""Steps of a plan and of its file that differ by no more are the same."""


class Says(Protocol):
    """Somebody's files, which say plans or cannot."""

    def predicted(self, plan: Plan) -> tuple[Plan, Prediction]:
        """A plan as its file has it, with its prediction. GnomonError where there is none."""

    def offered(self, plan: Plan) -> tuple[Plan, Prediction]:
        """The same, of a plan that may be offered. GnomonError for others."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A program that plans are for, and the work."""

    format: programs.Format
    """The program's file format."""
    config: ModelConfig | None
    """The sizes that the model was built from, for a file that says them; None for a model that is only a graph."""
    graph: Graph
    """The model."""
    machines: Cluster
    """The cluster of the plans."""
    workload: Workload
    """The batch of a step."""
    stack: Stack
    """The program's record."""

    def job(self, plan: Plan) -> Job:
        """A plan's file, read back. GnomonError where the program has no such plan."""
        assert self.format.write is not None
        # Files name processes a machine; a cluster of several kinds is written for its largest.
        near = max(node.count for node in self.machines.nodes)
        return self.format.write(asked_for("plan", self.config, self.graph, plan, self.workload, near)).job

    def predicted(self, plan: Plan) -> tuple[Plan, Prediction]:
        """A plan as its file has it, with its prediction. GnomonError where there is none."""
        job = self.job(plan)
        # A file says what its program does, and nothing of how fast this user's runs were.
        stack = replace(job.stack, own=self.stack.own)
        return job.plan, predict(self.graph, self.machines, job.plan, self.workload, stack)

    def offered(self, plan: Plan) -> tuple[Plan, Prediction]:
        """The same, of a plan whose file, written again, is still the same plan. GnomonError for others."""
        reread, prediction = self.predicted(plan)
        _, again = self.predicted(reread)
        # A fixed point: reading may fill in what the file leaves open, but it must do so once and for all.
        if abs(again.step_s / prediction.step_s - 1) > SAME:
            raise PlanError(f"{self.format.name} reads back another plan from the file of what it reads back")
        return reread, prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class AsFile:
    """A plan as the file of one program."""

    program: str
    """Name of the format."""
    stack: str
    """Name of the program's record."""
    prediction: Prediction | None
    """Of the file as that program runs it; None where it has no such plan."""
    why: str
    """Why there is none; empty otherwise."""


def as_files(
    plan: Plan, config: ModelConfig | None, graph: Graph, machines: Cluster, workload: Workload
) -> tuple[AsFile, ...]:
    """What each program with a writer makes of a plan, the fastest first, those that cannot run it last. Nothing for
    work that no job file says."""
    found = []
    for name in programs.writable_programs() if workload.seq_len else ():
        job_format = programs.find(name)
        record = named_stack(job_format.stack)
        to = Target(format=job_format, config=config, graph=graph, machines=machines, workload=workload, stack=record)
        try:
            _, prediction = to.predicted(plan)
        except GnomonError as error:
            found.append(AsFile(program=name, stack=record.name, prediction=None, why=str(error)))
        else:
            found.append(AsFile(program=name, stack=record.name, prediction=prediction, why=""))
    return tuple(sorted(found, key=lambda file: file.prediction.step_s if file.prediction else inf))


def target(
    stack: Stack, config: ModelConfig | None, graph: Graph, machines: Cluster, workload: Workload
) -> Target | None:
    """None for a stack that nothing is exported to, and for work that no job file says."""
    job_format = programs.of_stack(stack.name) if workload.seq_len else None
    if job_format is None:
        return None
    return Target(format=job_format, config=config, graph=graph, machines=machines, workload=workload, stack=stack)


def _trial(base: Plan, to: Target) -> Plan:
    """A plan that the program surely has, if it has the model."""
    runs, devices = to.stack.runs, to.machines.num_devices
    pp = 2 if (not runs.axes or "pp" in runs.axes) and devices % 2 == 0 else 1
    batch = to.workload.batch_size
    # Divides whatever can be divided, so that a refusal is about the model and not about the trial.
    ranks = max((n for n in range(1, devices // pp + 1) if devices // pp % n == 0 and batch % n == 0), default=1)
    return replace(
        base,
        mesh=Mesh(pp=pp, dp_shard=ranks),
        schedule=replace(base.schedule, micro_batch_size=1),
        optimizer=replace(base.optimizer, zero=max(runs.zero, default=0)),
    )


def lacks(base: Plan, to: Target | None) -> str:
    """Why the program has no file for the model, if it has none: its plans are then those of its record alone."""
    if to is None:
        return ""
    try:
        to.job(_trial(base, to))
    except GnomonError as error:
        return str(error)
    return ""


def based(base: Plan, to: Target | None, *, precision: bool) -> Plan:
    """The plan that a search starts from, with what every file of the program has: buckets, messages, the last block
    and, where it is open, precision. As it is for a model that the program has not."""
    if to is None:
        return base
    try:
        usual = to.job(_trial(base, to)).plan
    except GnomonError:
        return base
    return replace(
        base,
        precision=usual.precision if precision else base.precision,
        overlap=replace(
            base.overlap,
            bucket_bytes=usual.overlap.bucket_bytes,
            buckets=(),
            fused=(),
            pipeline_sends=usual.overlap.pipeline_sends,
        ),
        optimizer=replace(base.optimizer, keep_last_block=usual.optimizer.keep_last_block),
    )


def exportable(result: Result, to: Says | None) -> Result:
    """The plans of a search as their files have them, the fastest first; less those that no file says. As it is where
    no plan is left, which `gnomon export` then explains."""
    if to is None:
        return result
    best = []
    for candidate in result.best:
        try:
            plan, prediction = to.offered(candidate.plan)
        except GnomonError:
            continue
        # The program may fill in something that takes more memory than the plan; one that was over the limit already is
        # judged by its own peak.
        if prediction.tightest.peak_bytes <= max(result.limit_bytes, candidate.prediction.tightest.peak_bytes):
            best.append(replace(candidate, plan=plan, prediction=prediction))
    return replace(result, best=tuple(sorted(best, key=lambda candidate: candidate.step_s))) if best else result


def comes_back(candidate: FoundPlan, to: Says | None) -> bool:
    """Whether a plan's file gives the plan's step."""
    if to is None:
        return True
    try:
        _, prediction = to.predicted(candidate.plan)
    except GnomonError:
        return False
    return abs(prediction.step_s / candidate.step_s - 1) <= SAME
