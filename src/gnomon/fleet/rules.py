"""How a cluster behaves apart from its policy: what starting costs, which nodes fail, what inference needs.

`Rules` are what a replay is played under. Leaves out the machines (`machines`) and the policy (`policies`).
"""

from __future__ import annotations

from dataclasses import dataclass

from gnomon.fleet.costs import Costs


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A node that is down for a while."""

    at_s: float
    node: int
    for_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How a cluster behaves, apart from its policy."""

    costs: Costs = Costs()
    spread: bool = True
    """Whether a job may take devices of more nodes than it needs."""
    failures: tuple[Failure, ...] = ()
    demand: tuple[tuple[float, float], ...] = ()
    """(from when, load) of inference: the share of its nodes that it needs."""
    headroom: float = 0.0
    """Share of the inference nodes that is kept free on top of the load."""
    record: bool = False
    """Keep every span, the series and why jobs waited, for a page."""
