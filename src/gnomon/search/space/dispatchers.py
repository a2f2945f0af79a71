"""How tokens get to experts of other ranks, as a choice of a search: the fastest way that machines and program have.

`with_dispatcher(base, cluster, stack)` puts it into the base plan. Leaves out what each way costs (`prices.dispatch`).
"""

from __future__ import annotations

from dataclasses import replace

from gnomon.graph import Graph
from gnomon.hardware import Cluster
from gnomon.plans import Dispatch, Plan
from gnomon.prices.dispatch import sends_once
from gnomon.software import Stack


def dispatchers(cluster: Cluster) -> tuple[Dispatch, ...]:
    """Ways that the machines have, those before others that are usually faster.

    DeepEP's kernels take no longer than an all-to-all of one copy an expert (`prices.dispatch.dispatch_seconds` is the
    lesser of both), and HybridEP's send more than DeepEP's. A gather sends every token to every rank: less than an
    all-to-all where ranks are fewer than the experts of a token.
    """
    return ("fused", "hybrid_ep", "all_to_all", "all_gather") if sends_once(cluster) else ("all_to_all", "all_gather")


def has_dispatcher(stack: Stack, name: object) -> bool:
    """Whether a program has that way; the unstated one is taken to have all, others those on record."""
    return stack.is_unstated or name in stack.runs.dispatches


def routes_by_kind(graph: Graph) -> bool:
    """Whether every block that dispatches has an op that routes: how many copies of a token go to a node follows from
    it. A captured module may route in its own way."""
    return all(
        any(op.does == "routes" for op in block.ops)
        for block in graph.blocks
        if any(op.does == "dispatches" for op in block.ops)
    )


def with_dispatcher(base: Plan, cluster: Cluster, stack: Stack) -> Plan:
    """The base plan with the first of these that the program has on the machines; as it is where it says one, or where
    the program's record lists none.

    Beside DeepEP's kernels other ways need not be looked at: they keep no less, no collective takes less time with
    them, and a step is no shorter for longer actions, which all bounds of the search rest on. Where the machines have
    no such kernels, a gather in place of the all-to-all is tried on the best plans (`refinement.choices`).
    """
    if base.layout.dispatch is not None:
        return base
    name = next((name for name in dispatchers(cluster) if has_dispatcher(stack, name)), None)
    return base if name is None else replace(base, layout=replace(base.layout, dispatch=name))
