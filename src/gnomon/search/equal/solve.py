"""The search of a space of plans over equal devices.

`solve(graph, cluster, workload, …)` searches (`best_first`) from families of points to rows of blocks, to groups, to
points (`candidates`, bounded by `blocks`, `block_points`, `bounds.tighter_time`), drops what cannot fit, and predicts
points one by one until no bound is below the best that was found. The result is what predicting every point would have
given, and says how many points went which way. Leaves out reasons (`reasons`) and other questions than the shortest
step (`goals`).
"""

from __future__ import annotations

from collections.abc import Iterable

from gnomon.graph import Graph
from gnomon.hardware import Cluster
from gnomon.plans import Goal, Workload
from gnomon.prediction.predict import PLAIN_STACK
from gnomon.search.best_first import OnProgress, Search
from gnomon.search.bounds.families import SearchJob
from gnomon.search.budget import KeepGoing, always
from gnomon.search.equal.candidates import FamilyNode
from gnomon.search.equal.devices import EqualDevices
from gnomon.search.results import FoundPlan, Result, most_alike
from gnomon.search.shortlist import Diverse, Shortlist
from gnomon.search.space.points import Space
from gnomon.software import Stack


def solve(
    graph: Graph,
    cluster: Cluster,
    workload: Workload,
    space: Space,
    stack: Stack = PLAIN_STACK,
    goal: Goal | None = None,
    *,
    top: int = 5,
    prune: bool = True,
    diverse: bool = False,
    known: Iterable[FoundPlan] = (),
    job: SearchJob | None = None,
    on_progress: OnProgress | None = None,
    keep_going: KeepGoing = always,
) -> Result:
    """The `top` fastest plans of a space within the goal's memory; with `diverse`, the best and the fastest that are
    unlike it and each other (`shortlist.Diverse`).

    prune: without it every legal point is predicted, which shows that the bounds are right. known: plans of another
    space that are among those looked for. job: of the same request, from a search with another limit, whose prices
    are used again. on_progress: is called with the points covered so far and the best step. keep_going: the budget,
    asked before each candidate; once it is spent the best plan so far is the result (one that fits is looked for a
    little longer), and `Result.open_s` bounds what was not looked at.
    """
    devices = EqualDevices(
        graph, cluster, workload, space, stack, goal or Goal(), near=top, prune=prune, job=job, keep_going=keep_going
    )
    shortlist = Diverse(top, most_alike(len(set(space.axes())), top)) if diverse else Shortlist[FoundPlan](top)
    for candidate in known:
        shortlist.add(candidate)
    search = Search(devices, shortlist, on_progress)
    search.run((bound, FamilyNode(devices, family)) for bound, family in devices.families())
    return devices.result(search)
