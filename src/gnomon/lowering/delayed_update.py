"""Delayed parameter update (ZeRO-Offload's DPU): the host updates with the gradients of the step before.

`delay_update(program)` takes a Program whose optimizer is on the host (`offload_optimizer`) and issues the host's
updates first: they read the gradients that the step before sent down (GH is carried) and run alongside this step's
forward and backward. The parameters that come back are used from the next step on, so staleness is one step; it
changes the mathematics. The period is the longer of the host's update and the device's step.
Left out: the first steps, which run without delay.
Source: Ren et al. 2021, section 5.2.
"""

from __future__ import annotations

from dataclasses import replace

from gnomon.errors import PlanError
from gnomon.lowering.edit import Row, rows_of, with_rows
from gnomon.lowering.insertions import by_name
from gnomon.program import Program, effects, with_buffers, with_kinds


def delay_update(program: Program) -> Program:
    """The Program with its host updates one step late; those on the device stay in their own step. PlanError when none
    is on the host, and for a norm of gradients of both."""
    kinds = by_name(program.kinds)
    used = {program.kinds[kind].name for kind in program.kind.tolist()}
    if "HOST_OPT" not in used or used >= {"OPT", "NORM"}:
        raise PlanError(
            "a delayed update runs on the host beside the next step, and its norm is of gradients of the step before: "
            "offload the optimizer, all of it where gradients are clipped"
        )
    host_update = replace(kinds["HOST_OPT"], effects=effects("read GH, read PH, write PH"))
    # Carried: what is read at the head of a step was written in the one before.
    buffers = [replace(b, lifetime="carried") for b in program.buffers if b.name == "GH"]
    listed = []
    for rows in rows_of(program):
        first = [_reading(row) for row in rows if row.kind in ("NORM", "HOST_OPT")]
        listed.append([*first, *(row for row in rows if row.kind not in ("NORM", "HOST_OPT"))])
    return with_rows(
        replace(program, buffers=with_buffers(*buffers, base=program.buffers)),
        listed,
        kinds=with_kinds(host_update, base=program.kinds),
    )


def _reading(row: Row) -> Row:
    """A tile of several blocks lists its effects itself: there too the gradient is read and stays. A norm that was read
    off gradients before they went down is of those that are on the host."""
    if row.override is None or row.override.effects is None:
        return row
    changed = [effect._replace(op="read") if effect.op == "consume" else effect for effect in row.override.effects]
    if row.kind == "NORM":
        changed = [e._replace(ref=e.ref._replace(buffer="GH")) if e.op == "read" else e for e in changed]
    return replace(row, override=replace(row.override, effects=tuple(changed)))
