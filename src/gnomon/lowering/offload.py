"""Optimizer states and the update on the host (ZeRO-Offload): gradients go down, parameters come back, in tiles.

`offload_optimizer(program)` takes a Program with updates (OPT) of blocks and replaces them by D2H (a gradient goes to
the host as soon as it is complete), HOST_OPT (the update, on the host's stream) and H2D (the parameter comes back once
nothing in the step still reads the old one). Composes with `zero` and `fsdp`: then the shard travels. Buffers GH and PH
are the host's: their sizes count where a reader wants the host's memory, and are 0 for the device's.
Left out: offload of activations and of parameters.
Source: Ren et al. 2021 (ZeRO-Offload).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from gnomon.errors import PlanError
from gnomon.lowering.edit import rows_of, with_rows
from gnomon.lowering.insertions import MODIFIES, Insertions, bucket, by_name, last_row, require_updates, touches
from gnomon.program import BufferClass, Kind, Program, effects, with_buffers, with_kinds


def offload_optimizer(
    program: Program,
    *,
    tiles: int | None = None,
    stages: Collection[int] | None = None,
    fraction: float = 1.0,
    tied: Sequence[Sequence[int]] = (),
) -> Program:
    """The Program with its updates on the host.

    tiles: pieces in which each rank's gradients go down and parameters come back, each of neighbouring blocks; None
    is one for each block. stages: blocks whose update moves to the host; None is all (Twin-Flow keeps some on the
    device: best those whose gradients are complete last). fraction: in place of stages, the share of each rank's blocks
    that moves, at least one: those whose gradients are complete first. tied: sets of stages that hold the same
    parameters, whose gradients are added up before they go: those of one rank go together, after the last of them.
    PlanError for fewer blocks than tiles.
    """
    require_updates(program, "offload of the optimizer")
    gradient, parameter = update_buffers(by_name(program.kinds)["OPT"])
    kinds = {
        "D2H": Kind(name="D2H", stream="d2h", effects=effects(f"consume {gradient}, write GH")),
        "HOST_OPT": Kind(name="HOST_OPT", stream="host", effects=effects("consume GH, read PH, write PH")),
        "H2D": Kind(name="H2D", stream="h2d", effects=effects(f"read PH, write {parameter}")),
    }
    before_update = [kind for kind in program.kinds if kind.name != "OPT"]
    listed = []
    readers = {kind.name for kind in before_update if touches(kind, parameter, "read")}
    for rows in rows_of(program):
        ready = last_row(rows, before_update, gradient, *MODIFIES)
        updates = {row.stage: i for i, row in enumerate(rows) if row.kind == "OPT"}
        first = set[int]()
        for unit in units_of(sorted(updates, key=lambda s: ready[s]), tied):
            # Tied stages go down together, once the last of them is complete.
            ready |= dict.fromkeys(unit, max(ready[stage] for stage in unit))
            if len(first) < max(1, round(fraction * len(updates))):
                first.update(unit)
        norm = max((i for i, row in enumerate(rows) if row.kind == "NORM"), default=-1)
        ready = {stage: max(index, norm) for stage, index in ready.items()}  # clipped before it goes
        for index, row in enumerate(rows):  # the new parameter comes when nothing in the step needs the old one
            if row.kind in readers and index < updates.get(row.stage, -1):
                ready[row.stage] = max(ready[row.stage], index)
        moved = sorted((s for s in updates if s in first and (stages is None or s in stages)), key=lambda s: ready[s])
        new, units = Insertions(rows), units_of(moved, tied)
        joined = len(moved) - len(units)  # tied ones, which are in one tile
        for run in tiles_of(range(len(units)), len(units) if tiles is None else max(1, tiles - joined)):
            tile = [stage for unit in run for stage in units[unit]]
            for kind in kinds.values():
                # Inserted in order at one anchor: down, update, back.
                new.after(max(ready[s] for s in tile), bucket(kind, tile))
        listed.append(new.without("OPT", moved))
    buffers = with_buffers(
        BufferClass(name="GH", memory="not in the step's", per="stage"),
        BufferClass(name="PH", memory="not in the step's", lifetime="carried", per="stage"),
        base=program.buffers,
    )
    return with_rows(replace(program, buffers=buffers), listed, kinds=with_kinds(*kinds.values(), base=program.kinds))


def update_buffers(update: Kind) -> tuple[str, str]:
    """(gradient that the update uses up, parameter that it writes)."""
    gradient = next(effect.buffer for effect in update.effects if effect.op == "consume")
    return gradient, next(effect.buffer for effect in update.effects if effect.op == "write")


def units_of(stages: Sequence[int], tied: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """The stages, those with the same parameters together: at the place of the last of them."""
    units: list[tuple[int, ...]] = [(stage,) for stage in stages]
    for shared in tied:
        several = [unit for unit in units if not set(shared).isdisjoint(unit)]
        if len(several) > 1:
            joined = tuple(stage for unit in several for stage in unit)
            at = units.index(several[-1])
            units[at] = joined
            units = [unit for unit in units if unit not in several[:-1]]
    return units


def tiles_of(stages: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """Stages in `count` runs, as equal as possible, longer ones first."""
    if not stages:
        return []
    if not 1 <= count <= len(stages):
        raise PlanError(
            f"{len(stages)} blocks cannot travel in {count} tiles; use 1 to {len(stages)}, or smaller blocks"
        )
    size, remainder = divmod(len(stages), count)
    starts = [i * size + min(i, remainder) for i in range(count + 1)]
    return [tuple(stages[a:b]) for a, b in zip(starts, starts[1:], strict=False)]
