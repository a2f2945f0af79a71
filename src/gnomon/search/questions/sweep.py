"""The best plan at each value of something: lengths, batches, nodes, kinds of machines, links, memory.

`sweep(asked, cluster, workload, varied)` searches every combination of one or two things that vary and returns a `Case`
for each. Leaves out what a sweep is read from, and printing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from gnomon.errors import GnomonError, PlanError, nearest
from gnomon.hardware import Cluster, scaled
from gnomon.hardware.kinds import is_mixed
from gnomon.plans import Plan, Workload
from gnomon.plans.workload import whole_sequences
from gnomon.prediction import fits_within, predict
from gnomon.search.questions.goals import Case, Question, of_nodes
from gnomon.search.results import FoundPlan, memory_limit
from gnomon.units import show_bytes

VARIED = ("seq_len", "global_batch", "nodes", "on", "network", "links", "memory")
"""What `sweep` changes: tokens of a sequence, sequences of a step, whole nodes, the cluster, factors on the bandwidth
between nodes and inside them, bytes of a device."""

Value = int | float | Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Variation:
    """One thing that varies."""

    name: str
    """One of `VARIED`."""
    values: tuple[Value, ...]
    """What it takes."""

    def __post_init__(self) -> None:
        if self.name not in VARIED:
            raise PlanError(
                f"cannot vary {self.name[:40]!r}{nearest(self.name, VARIED)}; there are {', '.join(VARIED)}"
            )
        if not self.values:
            raise PlanError(f"vary {self.name} has no values; give at least one")


def vary(
    question: Question, cluster: Cluster, workload: Workload, name: str, values: Iterable[Value]
) -> tuple[Case, ...]:
    """The best plan at each value of one thing."""
    return sweep(question, cluster, workload, (Variation(name=name, values=tuple(values)),))


def sweep(
    question: Question,
    cluster: Cluster,
    workload: Workload,
    varied: Sequence[Variation],
    *,
    tokens_per_batch: int | None = None,
) -> tuple[Case, ...]:
    """The best plan at each combination of values, the last thing varying fastest.

    tokens_per_batch: tokens of a step, from which the number of sequences follows at each length, in place of the
    workload's. Every case is given the plans of those with the same work and devices too. PlanError for a thing that
    varies twice, and for more than two.
    """
    names = [variable.name for variable in varied]
    if len(set(names)) != len(names) or len(names) > 2:
        raise PlanError(f"cannot vary {' and '.join(names)} together; vary one thing, or two different ones")
    cases = []
    for values in product(*(variable.values for variable in varied)):
        machines, work, labels = cluster, workload, []
        # The cluster first: the others change it.
        for name, value in sorted(zip(names, values, strict=True), key=lambda pair: pair[0] != "on"):
            machines, work = _changed(machines, work, name, value)
            labels.append(label(name, value))
        if tokens_per_batch is not None:
            work = replace(work, global_batch_size=whole_sequences(tokens_per_batch, work.seq_len))
        cases.append(question.best(machines, work, label=" ".join(labels)))
    return tuple(_with_plans_of(question, case, cases) for case in cases)


def _with_plans_of(question: Question, case: Case, cases: Sequence[Case]) -> Case:
    """The case with the fastest of all cases' plans that it can run: those for the same work on as many devices.

    Only the search for equal stages is exact. Uneven stages and choices beyond it begin from a few plans, which differ
    from case to case, so that slower links could get the faster plan.
    """
    if is_mixed(case.cluster):
        return case
    plans: dict[Plan, FoundPlan] = {}
    for other in cases:
        same = other.workload == case.workload and other.cluster.num_devices == case.cluster.num_devices
        if other is not case and same and isinstance(other.best, FoundPlan) and not is_mixed(other.cluster):
            plans.setdefault(other.best.plan, other.best)
    # Its own plan is predicted already.
    if isinstance(case.best, FoundPlan):
        plans.pop(case.best.plan, None)
    # First, so that of equally fast plans the case's own stays (min takes the first).
    tried = [case.best, *(_tried(question, case, candidate) for candidate in plans.values())]
    able = [candidate for candidate in tried if candidate is not None]
    return replace(case, best=min(able, key=lambda candidate: candidate.step_s), why="") if able else case


def _tried(question: Question, case: Case, candidate: FoundPlan) -> FoundPlan | None:
    """Another case's plan on this one's machines; None where it cannot run or does not fit."""
    try:
        prediction = predict(question.graph, case.cluster, candidate.plan, case.workload, question.stack)
    except GnomonError:
        return None
    limit = memory_limit(case.cluster, question.goal)
    if not fits_within(prediction, limit):
        return None
    return FoundPlan(point=candidate.point, plan=candidate.plan, prediction=prediction)


def _changed(cluster: Cluster, workload: Workload, name: str, value: Value) -> tuple[Cluster, Workload]:
    if isinstance(value, Cluster):
        return value, workload
    if name == "seq_len":
        return cluster, replace(workload, seq_len=int(value))
    if name == "global_batch":
        return cluster, replace(workload, global_batch_size=int(value))
    if name == "nodes":
        return of_nodes(cluster, int(value)), workload
    if name == "memory":
        return scaled(cluster, memory_bytes=int(value)), workload
    factors = {name: float(value)}
    return scaled(cluster, **factors), workload  # type: ignore[arg-type]


def label(name: str, value: Value) -> str:
    """The case as a label, as in `seq_len=4096`, `network=2x`, `memory=80 GiB`, or the cluster's name."""
    if isinstance(value, Cluster):
        return value.name
    if name == "memory":
        return f"memory={show_bytes(value)}"
    return f"{name}={value:g}x" if name in ("network", "links") else f"{name}={value}"
