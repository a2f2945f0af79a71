"""A file of a job as values, for Python: a plan file, or the job file of another program as `gnomon predict` takes it.

`read_job(path, cluster)` returns a `JobFile`. Readers of formats are loaded when a file is read. Leaves out what stands
beside a file on a command line (`cli.request`) and scripts of Python, whose model `gnomon.capture` takes as it is.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gnomon.errors import InputError
from gnomon.graph import Graph
from gnomon.hardware import Cluster
from gnomon.late import load_late
from gnomon.plans import Plan, Workload, is_plan_file, load_plan_file
from gnomon.request import arguments
from gnomon.request.model import FILES, check_there, is_job_file
from gnomon.software import Stack, able

if TYPE_CHECKING:
    from gnomon.formats.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFile:
    """What a file says, with what was given in its place."""

    graph: Graph
    """The model."""
    cluster: Cluster
    """The machines."""
    plan: Plan
    """Every decision that the file states or leaves to its program's defaults."""
    workload: Workload
    """The batch."""
    stack: Stack
    """The program that runs it."""
    assumed: tuple[str, ...] = ()
    """What the file leaves open, and how it was filled in."""
    unexpressed: tuple[str, ...] = ()
    """Fields that change how the job runs and that are in none of the values above."""


def is_job(name: object) -> bool:
    """Whether a name can only be that of a job's file: a plan file, or one of another program, and no model."""
    if not isinstance(name, str | Path):
        return False
    path = str(name)
    if not path.lower().endswith(FILES):
        return False
    check_there(path)
    return is_job_file(path)


def is_plan(path: str | Path) -> bool:
    """Says whether a file is a plan of ours, and no TOML of another program. One that is not there is, so that reading
    it says so."""
    file = Path(path)
    if file.suffix != ".toml":
        return False
    return not file.exists() or load_late("gnomon.formats.programs:recognised")(file) is None


def read_job(path: str | Path, cluster: Cluster | str | None = None, *, model: Graph | str | None = None) -> JobFile:
    """A plan file, or the job file of another program, on machines.

    cluster: None for those of a plan file. model: in place of the file's. InputError for a file that is neither, for
    one whose machines or model are not known, and for what its reader refuses; CatalogueError for unknown names.
    """
    file = Path(path)
    check_there(str(file))
    if file.suffix == ".toml" and is_plan_file(file):
        planned = load_plan_file(file)
        return JobFile(
            graph=arguments.graph(planned.model if model is None else model),
            cluster=arguments.cluster(planned.on if cluster is None else cluster),
            plan=planned.plan,
            workload=planned.workload,
            stack=arguments.stack(planned.stack or None),
        )
    if file.suffix == ".py":
        raise InputError(
            f"{str(path)!r} is Python: capture its model (gnomon.capture), or give it to gnomon predict {path} --args"
        )
    program = load_late("gnomon.formats.programs:recognised")(file)
    if program is None:
        sample = load_late("gnomon.formats.programs:sample")(file)
        if images := load_late("gnomon.formats.diffusion:refusal")(sample):
            raise InputError(images)
        raise InputError(f"{str(path)!r} is no plan file and no job file that is recognised")
    if cluster is None:
        raise InputError(f"{str(path)!r} does not say its machines; give cluster, as in '1x8xh100-sxm'")
    machines = arguments.cluster(cluster)
    job: Job = program.read(file, _context(machines.num_devices, model))
    return JobFile(
        graph=job.graph(),
        cluster=machines,
        plan=job.plan,
        workload=job.workload,
        stack=able(job.stack, job.plan, "the job's own file"),
        assumed=job.assumed,
        unexpressed=tuple(map(str, job.unexpressed)),
    )


def job_of(
    model: Graph | str,
    cluster: Cluster | str | None,
    plan: Plan | None,
    workload: Workload | None,
    stack: Stack | str | None,
) -> JobFile:
    """What a verb was given, of which a model that is a job's file says the rest. InputError for what neither says."""
    if is_job(model):
        job = read_job(str(model), cluster)
        model, cluster = job.graph, job.cluster
        plan, workload, stack = plan or job.plan, workload or job.workload, job.stack if stack is None else stack
    if cluster is None or plan is None or workload is None:
        required = {"cluster": cluster, "plan": plan, "workload": workload}
        missing = " and ".join(name for name, value in required.items() if value is None)
        raise InputError(f"give {missing}: a model alone does not say how it is trained; a job file does")
    return JobFile(
        graph=arguments.graph(model),
        cluster=arguments.cluster(cluster),
        plan=arguments.plan(plan),
        workload=arguments.workload(workload),
        stack=arguments.stack(stack),
    )


def _context(devices: int, model: Graph | str | None) -> Any:
    """What stands beside the file: `formats.given.ReadContext`."""
    graph = None if model is None else arguments.graph(model)
    return load_late("gnomon.formats.given:ReadContext")(devices=devices, model=graph, env=dict(os.environ))
