"""The public verbs: `gnomon.predict` and `gnomon.plan`, with arguments as the command line takes them.

Names stand for models, clusters and stacks, and whatever is no model, plan or batch is refused with one InputError that
says what is wanted. Leaves out the prediction and the search themselves (`gnomon.prediction`, `gnomon.search`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from gnomon.errors import InputError, nearest
from gnomon.graph import Graph
from gnomon.hardware import Cluster
from gnomon.plans import Goal, Plan, Workload
from gnomon.prediction import Prediction
from gnomon.prediction import predict as predict_values
from gnomon.request import arguments
from gnomon.request.job_file import is_job, job_of, read_job
from gnomon.request.runnable import refuse_unrunnable
from gnomon.search import Limit, Result
from gnomon.search import plan as plan_values
from gnomon.search.budget import KeepGoing, always
from gnomon.search.space.points import EXTRA_CHOICES
from gnomon.software import Stack


def predict(
    model: Graph | str,
    cluster: Cluster | str | None = None,
    plan: Plan | None = None,
    workload: Workload | None = None,
    stack: Stack | str | None = None,
) -> Prediction:
    """Time and memory of one step.

    model: a Graph; or a preset, an id of the Hugging Face hub, a config.json or a folder with one; or a plan file or a
    job file of another program, which says whatever of the rest is not given. cluster: a Cluster or a spec such as
    `4x8xh100-sxm`. stack: the program that runs it, or its name; None where nothing is known of it.
    InputError for other types and for a job file that cannot be read, CatalogueError for unknown names, PlanError when
    the plan cannot run on the cluster, UnpricedError for anything without a price.
    """
    job = job_of(model, cluster, plan, workload, stack)
    return predict_values(job.graph, job.cluster, job.plan, job.workload, job.stack)


def plan(
    model: Graph | str,
    cluster: Cluster | str | None = None,
    workload: Workload | None = None,
    stack: Stack | str | None = None,
    goal: Goal | None = None,
    *,
    base: Plan | None = None,
    fixed: Mapping[str, object] | None = None,
    forbid: Iterable[str | Limit] = (),
    top: int = 5,
    diverse: bool = False,
    extra_choices: Collection[str] | None = None,
    on_progress: Callable[[int, int, float | None], None] | None = None,
    keep_going: KeepGoing = always,
) -> Result:
    """The fastest plan that fits, and the next `top` - 1; with `diverse`, alternatives to it.

    model, cluster, stack: as for `predict`; a job file gives its batch, its program, and the plan that others start
    from. The rest, and errors, as for `gnomon.search.plan`. InputError for other types.
    """
    if is_job(model):
        job = read_job(str(model), cluster)
        model, cluster, workload = job.graph, job.cluster, workload or job.workload
        stack, base = job.stack if stack is None else stack, base or job.plan
    missing = [name for name, value in (("cluster", cluster), ("workload", workload)) if value is None]
    if cluster is None or workload is None:
        raise InputError(f"give {' and '.join(missing)}: a model alone does not say what is planned; a job file does")
    if isinstance(top, bool) or not isinstance(top, int) or top < 1:
        raise InputError(f"top = {top!r} plans are asked for; give a whole number of at least 1")
    if fixed is not None and not isinstance(fixed, Mapping):
        raise InputError(f"fixed maps fields of a plan to values, as in {{'tp': 2}}; it is a {type(fixed).__name__}")
    limits = (forbid,) if isinstance(forbid, str) else tuple(forbid)
    if wrong := [limit for limit in limits if not isinstance(limit, str | Limit)]:
        raise InputError(f"forbid lists conditions such as 'pp>1', not {wrong[0]!r}")
    if unknown := [name for name in extra_choices or () if name not in EXTRA_CHOICES]:
        raise InputError(
            f"extra_choices names {unknown[0]!r}{nearest(str(unknown[0]), EXTRA_CHOICES)}; there are "
            f"{', '.join(EXTRA_CHOICES)}"
        )
    graph, program = arguments.graph(model), arguments.stack(stack)
    if isinstance(model, str):
        refuse_unrunnable(model, program)
    return plan_values(
        graph,
        arguments.cluster(cluster),
        arguments.workload(workload),
        program,
        arguments.goal(goal),
        base=None if base is None else arguments.plan(base),
        fixed=fixed,
        forbid=limits,
        top=top,
        diverse=diverse,
        extra_choices=extra_choices,
        on_progress=on_progress,
        keep_going=keep_going,
    )
