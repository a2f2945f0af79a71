"""Where a plan's ranks lie and talk, and what its alternatives would take, as rows of tables.

`communication_rows`, `layout_rows` and `alternative_rows` are of a prediction. Leaves out drawing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gnomon.prediction import Prediction
from gnomon.prices.links import AxisLink, axis_link
from gnomon.report.planning import short_plans
from gnomon.report.tables import number, percent, ranges
from gnomon.units import show_bytes, show_seconds

NODES = 32
"""Nodes that are listed; of more the first."""
OTHERS = 8
"""Alternatives that are listed."""

Row = tuple[str, ...]


def communication_rows(prediction: Prediction) -> tuple[Row, ...]:
    """(axis, ranks of a group, link, exposed seconds of the busiest rank) of every axis of several ranks."""
    plan, cluster = prediction.plan, prediction.pricing.cluster
    if plan.stages:
        return ()  # each stage has a mesh of its own
    devices = np.array(plan.device_of)
    views = [(plan.mesh.dense, axis) for axis in plan.mesh.dense.axes]
    views += [(plan.mesh.experts, "ep")] if plan.mesh.ep > 1 else []
    rows = []
    for view, axis in views:
        groups = view.groups(axis)
        if groups.shape[1] > 1:
            exposed = prediction.breakdown.get(f"{axis.split('_')[0]} communication")
            rows.append(
                (
                    axis,
                    f"{groups.shape[1]}",
                    _link(axis_link(cluster, devices[groups])),
                    "-" if exposed is None else number(exposed),
                )
            )
    return tuple(rows)


def _link(link: AxisLink) -> str:
    if link.nodes == 1:
        return f"{link.inside_name}, inside a node"
    return f"{link.across_name}, over {link.nodes} nodes, {link.ranks_per_node} of its ranks on each"


def layout_rows(prediction: Prediction) -> tuple[tuple[Row, ...], int]:
    """((node, device, ranks, their places on the axes) of the first nodes, how many nodes are left out)."""
    plan, cluster = prediction.plan, prediction.pricing.cluster
    place = np.array(plan.device_of)
    rank_of = {int(device): rank for rank, device in enumerate(place)}
    coordinates: dict[str, dict[int, int]] = {}
    if not plan.stages:
        for axis in plan.mesh.dense.axes:
            groups = plan.mesh.dense.groups(axis)
            if groups.shape[1] > 1:
                coordinates[axis] = {int(rank): i for group in groups for i, rank in enumerate(group)}
    rows: list[Row] = []
    first = 0
    for index, node in enumerate(cluster.nodes):
        if index == NODES:
            break
        ranks = sorted(rank_of[d] for d in range(first, first + node.count) if d in rank_of)
        first += node.count
        where = "; ".join(f"{axis} {ranges(sorted({of[r] for r in ranks}))}" for axis, of in coordinates.items())
        rows.append((f"{index}", f"{node.count} x {node.device.name}", ranges(ranks) or "none", where or "one rank"))
    return tuple(rows), max(0, len(cluster.nodes) - NODES)


def alternative_rows(prediction: Prediction, others: Sequence[Prediction]) -> tuple[Row, ...]:
    """(plan in short, step, what it loses, peak, whether it fits) of the plan and of others, the fastest first."""
    shown = [prediction, *others[:OTHERS]]
    names = short_plans([one.plan for one in shown])
    rows = [
        (
            names[i] + (" (this plan)" if i == 0 else ""),
            show_seconds(one.step_s),
            f"{percent(one.step_s / prediction.step_s - 1)} %",
            show_bytes(one.tightest.peak_bytes),
            one.tightest.verdict,
        )
        for i, one in enumerate(shown)
    ]
    order = sorted(range(len(rows)), key=lambda i: (not shown[i].fits, shown[i].step_s))
    return tuple(rows[i] for i in order)
