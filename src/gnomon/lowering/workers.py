"""Data-parallel workers that are not alike: other shares of a microbatch, or other devices (Whale, HeteroG).

`alike` groups the workers of a plan whose ranks do the same on the same kind of device; where there are several groups,
`divided_units` gives each its part of every microbatch, `split` makes a rank class of each pipeline rank and group, and
`meet` lets their reductions start and end together. Weights of units are shares of the global batch, so that unequal
shares leave the gradient as it is. Left out: workers whose stages have different shares, or numbers of replicas.
Source: Jia et al. 2022 (Whale, USENIX ATC).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gnomon.errors import PlanError
from gnomon.hardware import Cluster
from gnomon.plans import Plan, Unit, normalised
from gnomon.program import Communicator, Override
from gnomon.program.rows import Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """Workers that are alike."""

    members: tuple[int, ...]
    """Data-parallel ranks."""
    share: int
    """Parts of a microbatch that each takes; 1 where all take equally much."""


def alike(plan: Plan, cluster: Cluster | None) -> tuple[Workers, ...]:
    """Groups of workers by share and by devices, in order of their first member; one group if all are alike.

    cluster: without it all devices are taken to be alike. PlanError where workers differ and stages have other shares
    or numbers of workers than each other.
    """
    meshes = [plan.stage_mesh(stage) for stage in range(plan.num_stages)]
    stage_shares_of = [stage.shares for stage in plan.stages] or [()]
    # A plan that lists no stages has one entry here, which stands for all of them.
    shares = [
        stage_shares or (1,) * mesh.data_ranks
        for stage_shares, mesh in zip(stage_shares_of * (len(meshes) // len(stage_shares_of)), meshes, strict=True)
    ]
    kinds: list[tuple[str, ...]] = [() for _ in shares[0]]
    devices = [device.name for device in cluster.devices] if cluster is not None else []
    # One kind of device: workers differ by shares alone.
    if len(set(devices)) > 1:
        for mesh, ranks in zip(meshes, plan.stage_ranks, strict=True):
            for index, rank in enumerate(ranks):
                worker = mesh.dense.coordinate(index, "dp")
                if worker < len(kinds):
                    # All devices of a worker in order of its ranks: workers are alike only if these agree one by one.
                    kinds[worker] += (devices[plan.device_of[rank]],)
    if len(set(shares)) > 1:
        uneven = any(len(set(stage_shares)) > 1 for stage_shares in shares) or len(set(kinds)) > 1
        if uneven:
            raise PlanError(f"stages share out microbatches as {sorted(set(shares))}; make them alike in all stages")
        return (Workers(members=tuple(range(len(kinds))), share=1),)
    if min(shares[0]) == 0:
        raise PlanError(f"shares {shares[0]} give worker {shares[0].index(0)} nothing to do; leave that worker out")
    groups: dict[tuple[int, tuple[str, ...]], list[int]] = {}
    for worker, kind in enumerate(kinds):
        groups.setdefault((shares[0][worker], kind), []).append(worker)
    return tuple(Workers(members=tuple(members), share=shares[0][members[0]]) for members in groups.values())


def divided_units(units: Sequence[Unit], count: int, groups: Sequence[Workers]) -> tuple[Unit, ...]:
    """The units of each microbatch, one for each group in order: the sequences that its workers take together.

    units: of whole microbatches; none: `count` plain ones, of one sequence of one token for each part. Sequences are
    dealt to workers in order. PlanError when the parts do not divide a microbatch.
    """
    parts = sum(group.share * len(group.members) for group in groups)
    if not units:
        units = [Unit(pieces=tuple((j * parts + i, 0, 1) for i in range(parts))) for j in range(count)]
    # Sequences go to workers in order of their numbers, whichever group they are in.
    by_worker = sorted((worker, g) for g, group in enumerate(groups) for worker in group.members)
    divided = []
    for unit in units:
        per_part, rest = divmod(len(unit.pieces), parts)
        if rest:
            raise PlanError(f"a microbatch of {len(unit.pieces)} sequences does not divide into {parts} equal parts")
        pieces_of: list[list[tuple[int, int, int]]] = [[] for _ in groups]
        first = 0
        for _, g in by_worker:
            last = first + per_part * groups[g].share
            pieces_of[g] += unit.pieces[first:last]
            first = last
        divided += [Unit(pieces=tuple(pieces_of[g]), worker=group.members[0]) for g, group in enumerate(groups)]
    return normalised(divided)


def split(rows: Rows, count: int) -> Rows:
    """The compute rows with `count` classes for each one, one after the other; unit u becomes u · count + group."""
    parts, row_ptr, overrides, total = [], [0], {}, 0
    for low, high in zip(rows.class_ptr[:-1].tolist(), rows.class_ptr[1:].tolist(), strict=True):
        for g in range(count):
            parts.append((np.arange(low, high), g))
            overrides.update({total + row - low: o for row, o in rows.overrides.items() if low <= row < high})
            total += high - low
            row_ptr.append(total)
    index = np.concatenate([part for part, _ in parts])
    group_of = np.concatenate([np.full(len(part), g, np.int32) for part, g in parts])
    unit, group = rows.unit[index], rows.group[index]
    return replace(
        rows,
        num_units=rows.num_units * count,
        class_ptr=np.array(row_ptr, np.int64),
        kind=rows.kind[index],
        stage=rows.stage[index],
        # Rows of no unit (-1) stay so.
        unit=np.where(unit < 0, unit, unit * count + group_of).astype(np.int32),
        group=np.where(group < 0, group, group * count + group_of).astype(np.int32),
        overrides=overrides,
    )


def meet(rows: Rows, pipeline_ranks: Sequence[int]) -> Rows:
    """The rows whose reductions over data-parallel ranks (AR) of one stage are one group over its classes.

    Each pipeline rank has its own communicator (`dp.1`) where there are several.
    """
    group, overrides, comms = rows.group.copy(), dict(rows.overrides), {comm.name: comm for comm in rows.comms}
    base = int(group.max(initial=-1)) + 1
    for row in np.flatnonzero(rows.is_kind("AR")).tolist():
        stage = int(rows.stage[row])
        group[row] = base + stage
        if len(set(pipeline_ranks)) > 1:
            # Classes of one pipeline rank meet with each other only.
            name = f"dp.{pipeline_ranks[stage]}"
            overrides[row] = Override(comm=name)
            comms[name] = Communicator(name=name, semantics="collective")
    return replace(rows, group=group, overrides=overrides, comms=tuple(comms.values()))
