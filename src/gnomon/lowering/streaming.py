"""Gradients that stream to the host as they are made (ZeRO-Offload): a device holds those of a layer or two.

`stream_gradients(program)` takes a Program whose stages are blocks, with updates (OPT), and moves updates to the host:
after every row that completes a block's gradient of a unit, that goes down (D2H); the host adds those of later units
(HOST_ADD), updates when all are there (HOST_OPT), and the parameter comes back (H2D). Under clipping every rank's
updates wait for the norm (NORM), to which each gradient adds as it is made. With `fraction` some blocks stay on the
device (Twin-Flow): those whose gradients are complete last, whose update would otherwise be waited for.
GT is a gradient on its way, GH and PH gradients and parameters on the host; the device holds none of them.
Left out: which plans stream (`lowering.lower.streams`), sizes, and rows of delayed updates (`delayed_update`).
Source: Ren et al. 2021 (ZeRO-Offload); Twin-Flow: DeepSpeed's `offload_optimizer.ratio`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gnomon.lowering.edit import Row, rows_of, with_rows
from gnomon.lowering.insertions import MODIFIES, Insertions, bucket, by_name, require_updates, touches
from gnomon.lowering.norm import EVERYONE
from gnomon.lowering.offload import tiles_of, update_buffers
from gnomon.program import (
    BufferClass,
    BufferRef,
    Communicator,
    Kind,
    Override,
    Program,
    RowEffect,
    effects,
    with_buffers,
    with_kinds,
)

NORM = "NORM"


def stream_gradients(
    program: Program, *, fraction: float = 1.0, tiles: int | None = None, clip: bool = False, each_unit: bool = True
) -> Program:
    """The Program with gradients that stream to the host, and updates there.

    fraction: of the blocks of each rank whose update is on the host, at least one. tiles: pieces in which each rank
    updates and parameters come back; None is one for each block. clip: updates wait for the norm of all gradients.
    each_unit: after each unit; otherwise gradients add up on the device and go down once, complete.
    """
    require_updates(program, "offload of the optimizer")
    gradient, parameter = update_buffers(by_name(program.kinds)["OPT"])
    kinds = {
        "D2H": Kind(name="D2H", stream="d2h", effects=effects(f"consume {gradient}, write GH")),
        "HOST_ADD": Kind(name="HOST_ADD", stream="host", effects=effects("consume GT, accumulate GH")),
        "HOST_OPT": Kind(name="HOST_OPT", stream="host", effects=effects("consume GH, read PH, write PH")),
        "H2D": Kind(name="H2D", stream="h2d", effects=effects(f"read PH, write {parameter}")),
    }
    writers = {k.name for k in program.kinds if k.name != "OPT" and touches(k, gradient, *MODIFIES)}
    readers = {k.name for k in program.kinds if k.name != "OPT" and touches(k, parameter, "read")}
    # One group, above all that there are, for the norms of all rank classes: ranks take them together.
    group = int(program.group.max(initial=-1)) + 1
    listed, kept_any = [], False
    for rows in rows_of(program):
        updates = {row.stage: i for i, row in enumerate(rows) if row.kind == "OPT"}
        written_rows: dict[int, list[int]] = {stage: [] for stage in updates}
        for i, row in enumerate(rows):
            if row.kind in writers:
                written_rows[row.stage].append(i)
        # By when the gradient is complete: early ones have the rest of the backward to hide their update behind.
        last_first = sorted(updates, key=lambda stage: written_rows[stage][-1])
        moved = last_first[: max(1, round(fraction * len(last_first)))] if last_first else []
        on_device = [stage for stage in updates if stage not in moved]
        kept_any = kept_any or bool(on_device)
        new = Insertions(rows)
        for stage in moved:
            _down(new, stage, written_rows[stage] if each_unit else written_rows[stage][-1:], gradient)
        # Of each stage the last read before its update: later items of a dict replace earlier ones.
        read = {row.stage: i for i, row in enumerate(rows) if row.kind in readers and i < updates.get(row.stage, -1)}
        if clip and updates:
            new.before(min(updates.values()), _norm(gradient, moved, on_device, group))
        for tile in tiles_of(moved, len(moved) if tiles is None else tiles):
            for name in ("HOST_OPT", "H2D"):
                row = bucket(kinds[name], tile)
                if clip:
                    new.before(min(updates.values()), row)
                else:
                    # Not before the last read in the step of the old parameter.
                    new.after(max(max(written_rows[stage][-1], read.get(stage, -1)) for stage in tile), row)
        listed.append(new.without("OPT", moved))
    buffers = with_buffers(
        BufferClass(name="GT", memory="not in the step's", per="stage"),
        BufferClass(name="GH", memory="not in the step's", per="stage"),
        BufferClass(name="PH", memory="not in the step's", lifetime="carried", per="stage"),
        base=program.buffers,
    )
    # Where some updates stay on the device it waits there too.
    norm = (Kind(name=NORM, stream="compute" if kept_any else "host", comm=EVERYONE),) if clip else ()
    comms = (*program.comms, Communicator(name=EVERYONE, semantics="collective")) if clip else program.comms
    changed = replace(program, buffers=buffers, comms=comms)
    return with_rows(changed, listed, kinds=with_kinds(*kinds.values(), *norm, base=program.kinds))


def _down(new: Insertions, stage: int, rows_written: Sequence[int], gradient: str) -> None:
    """A gradient goes down after each of these rows; what the host has is written by the first and added to by the
    others."""
    for number, index in enumerate(rows_written):
        if number == 0:
            new.after(index, Row(kind="D2H", stage=stage))
            continue
        moves = (RowEffect("consume", BufferRef(gradient, stage)), RowEffect("write", BufferRef("GT", stage)))
        new.after(index, Row(kind="D2H", stage=stage, override=Override(effects=moves)))
        new.after(index, Row(kind="HOST_ADD", stage=stage))


def _norm(gradient: str, moved: Sequence[int], on_device: Sequence[int], group: int) -> Row:
    """The wait for the norm: updates on the host wait for it as it scales what they read."""
    scaled = tuple(RowEffect("accumulate", BufferRef("GH", stage)) for stage in moved)
    read = tuple(RowEffect("read", BufferRef(gradient, stage)) for stage in on_device)
    return Row(kind=NORM, stage=(*moved, *on_device)[0], group=group, override=Override(effects=(*scaled, *read)))
