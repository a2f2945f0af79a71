"""Other questions than the fastest plan, each answered by searches: fronts, fewest devices, longest sequences, sweeps.

`pareto`, `fewest_devices`, `longest` and `vary` return `Case`s: machines and work with the best plan there. They are as
exact as `solve` is, for the space that it searches; what is assumed beside that stands with each. Leaves out printing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from gnomon.errors import PlanError
from gnomon.graph import Graph
from gnomon.hardware import Cluster
from gnomon.plans import Goal, Plan, Stack, Workload
from gnomon.search.requests import check_request
from gnomon.search.solve import Found, memory_limit, solve
from gnomon.search.space import Limit, make_space
from gnomon.units import show_bytes


@dataclass(frozen=True, kw_only=True)
class Case:
    """Machines and work, and the best plan there."""

    label: str
    """What was varied, as in `seq_len=4096`."""
    cluster: Cluster
    workload: Workload
    found: Found | None
    """None where nothing runs or fits."""
    why: str = ""
    """Why there is none."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A search with machines, work and memory left open."""

    graph: Graph
    stack: Stack
    base: Plan
    fixed: Mapping[str, object] = field(default_factory=dict)
    limits: tuple[Limit, ...] = ()
    goal: Goal = field(default_factory=Goal)

    def best(self, cluster: Cluster, workload: Workload, *, label: str = "", memory_bytes: int | None = None) -> Case:
        """The fastest plan; without one, the reason. memory_bytes: a limit in place of the goal's."""
        goal = self.goal if memory_bytes is None else replace(self.goal, memory_bytes=memory_bytes)
        case = Case(label=label, cluster=cluster, workload=workload, found=None)
        try:
            check_request(self.graph, cluster, workload, self.base, self.fixed, cluster.num_devices)
            space = make_space(
                self.graph, cluster, workload, base=self.base, fixed=self.fixed, limits=self.limits, stack=self.stack
            )
        except PlanError as error:
            return replace(case, why=str(error))
        found = solve(self.graph, cluster, workload, space, self.stack, goal, top=1)
        if found.best:
            return replace(case, found=found.best[0])
        large = found.counts.too_large or found.counts.priced
        return replace(case, why="nothing fits in memory" if large else "nothing can run")


def pareto(asked: Question, cluster: Cluster, workload: Workload, *, resolution_bytes: int = 1) -> tuple[Case, ...]:
    """Plans that no other beats in both time and peak memory, the fastest first.

    Each search allows `resolution_bytes` less than the plan before it takes. With 1 the front is the whole one: a plan
    of it that is slower than one found takes less memory, so the next search allows it, and returns it or one between.
    With more, plans may be left out that save less than so many bytes on the one before; none is shown that is beaten
    by a plan shown.
    """
    cases: list[Case] = []
    limit = memory_limit(cluster, asked.goal)
    while limit > 0:
        case = asked.best(cluster, workload, memory_bytes=limit)
        if case.found is None:
            break
        peak = case.found.prediction.tightest.peak_bytes
        while cases and cases[-1].found is not None and cases[-1].found.step_s >= case.found.step_s:
            cases.pop()  # as fast, with more memory
        cases.append(replace(case, label=show_bytes(limit)))
        limit = peak - resolution_bytes
    return tuple(cases)


def fewest_devices(
    asked: Question, clusters: Iterable[Cluster], workload: Workload, max_step_s: float
) -> tuple[Case, ...]:
    """Clusters in the order given, up to the first on which a step takes no longer than `max_step_s`; the last one is
    the answer, if its plan is that fast."""
    cases: list[Case] = []
    for cluster in clusters:
        case = asked.best(cluster, workload, label=f"devices={cluster.num_devices}")
        cases.append(case)
        if case.found is not None and case.found.step_s <= max_step_s:
            break
    return tuple(cases)


def longest(
    asked: Question, cluster: Cluster, workload: Workload, *, multiple: int, most: int = 1 << 24
) -> tuple[Case, ...]:
    """Lengths tried, the last case the longest with a plan that fits: a multiple of `multiple` tokens.

    Doubled until nothing fits, then halved in. Taken for granted: where a length fits, so does a shorter multiple,
    which holds when `multiple` divides into what every axis needs. PlanError when not even one `multiple` fits.
    """
    tried: dict[int, Case] = {}

    def fits(count: int) -> bool:
        length = count * multiple
        work = replace(workload, seq_len=length)
        tried[count] = asked.best(cluster, work, label=f"seq_len={length}")
        return tried[count].found is not None

    if not fits(1):
        raise PlanError(f"no plan fits with {multiple} tokens: {tried[1].why}; use more devices or a smaller multiple")
    low = 1
    while low * 2 * multiple <= most and fits(low * 2):
        low *= 2
    high = low * 2
    while high - low > 1 and high in tried:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return (*(case for count, case in sorted(tried.items()) if count != low), tried[low])


VARIED = ("seq_len", "global_batch", "nodes")
"""What `vary` changes."""


def vary(asked: Question, cluster: Cluster, workload: Workload, name: str, values: Iterable[int]) -> tuple[Case, ...]:
    """The best plan at each value of `seq_len`, `global_batch` or `nodes`."""
    cases = []
    for value in values:
        machines, work = cluster, workload
        if name == "nodes":
            machines = of_nodes(cluster, value)
        elif name == "seq_len":
            work = replace(workload, seq_len=value)
        elif name == "global_batch":
            work = replace(workload, global_batch_size=value)
        else:
            raise PlanError(f"cannot vary {name[:40]!r}; there are {', '.join(VARIED)}")
        cases.append(asked.best(machines, work, label=f"{name}={value}"))
    return tuple(cases)


def of_nodes(cluster: Cluster, nodes: int) -> Cluster:
    """So many nodes of a cluster's one kind. PlanError for a cluster of several kinds."""
    if len(cluster.groups) != 1:
        raise PlanError(f"{cluster.name} has several kinds of nodes; name one kind to vary their number")
    (group,) = cluster.groups
    return replace(cluster, name=f"{nodes} nodes of {cluster.name}", groups=(replace(group, count=nodes),))
