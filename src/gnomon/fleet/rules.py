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
    """Seconds of the trace at which it goes down."""
    node: int
    """Number of the node."""
    for_s: float
    """Seconds until it is back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How a cluster behaves, apart from its policy."""

    costs: Costs = Costs()
    """Seconds of starts, resizes and checkpoints."""
    spread: bool = True
    """Whether a job may take devices of more nodes than it needs."""
    failures: tuple[Failure, ...] = ()
    """Nodes that go down; empty: none does."""
    demand: tuple[tuple[float, float], ...] = ()
    """(from when, load) of inference: the share of its nodes that it needs."""
    headroom: float = 0.0
    """Share of the inference nodes that is kept free on top of the load."""
    record: bool = False
    """Keep every span, the series and why jobs waited, for a page."""
