"""Whether a body and a loop nest are legal: the checker that runs between passes.

`check_body` and `check_nest` raise `IllegalError` with the first thing that is wrong; a nest that they accept computes
every value before it is used, stores every output once, and reads from scratch only what an earlier pass put there. A
failure is a mistake of the compiler: the backend then leaves the graph to ATen.
"""

from __future__ import annotations

from gnomon.compiler.tiles.body import REDUCTIONS, Body
from gnomon.compiler.tiles.stages import POST
from gnomon.compiler.tiles.tiling import Nest


class IllegalError(AssertionError):
    """A pass of the compiler made a graph that means nothing."""


def check_body(body: Body) -> None:
    """Checks each instruction: operands come earlier, vary along no axis that it lacks, and have its kind."""
    for i, ins in enumerate(body.code):
        for a in ins.args:
            if not 0 <= a < i:
                raise IllegalError(f"value {i} uses {a}, which does not come before it")
            if ins.op not in REDUCTIONS and not body.code[a].axes <= ins.axes and ins.op != "check":
                raise IllegalError(f"value {i} ({ins.op}) lacks axes of {a}")
        if not all(0 <= axis < len(body.axes) for axis in ins.axes):
            raise IllegalError(f"value {i} varies along an axis that is not there")
        if ins.op in ("load", "take") and not 0 <= ins.attr < len(body.inputs):
            raise IllegalError(f"value {i} reads memory that is not there")
        if ins.op in REDUCTIONS and (set(ins.attr) & ins.axes or not set(ins.attr) <= body.code[ins.args[0]].axes):
            raise IllegalError(f"value {i} reduces along axes that it keeps or never had")
        if ins.op not in ("cast", "check", "select", "take") and ins.kind != "B":
            if any(body.code[a].kind != ins.kind for a in ins.args):
                raise IllegalError(f"value {i} ({ins.op}) mixes kinds")


def check_nest(nest: Nest) -> None:
    """Plays the passes in order: what is known, in scratch and stored after each.

    A pass walks a row of the inner axes once, so it may read only what it computes itself or what an earlier one left:
    in scratch, or in an output (`read_back`: value -> `scratch` or `output N`). A value of a later level (`POST`: once
    the row is over) is not known within a pass.
    """
    inner = nest.stages.inner
    done: set[int] = set()
    scratch: set[int] = set()
    stored: list[int] = []
    for n, step in enumerate(nest.passes):
        for value, where in step.read_back.items():
            if where == "scratch" and value not in scratch:
                raise IllegalError(f"pass {n} reads value {value} from scratch before it is there")
            if where != "scratch" and int(where.split()[1]) not in stored:
                raise IllegalError(f"pass {n} reads back an output that is not stored yet")
        have = set(step.read_back)
        for value in step.values:
            for a in nest.body.code[value].args:
                if nest.body.code[a].axes & inner and a not in have:
                    raise IllegalError(f"pass {n} computes {value} without {a}")
                if nest.stages.level[a] > step.level:
                    raise IllegalError(f"pass {n} uses {a}, which is known only later")
            have.add(value)
        done |= have
        if any(nest.body.code[i].args[0] not in have for i in step.reductions):
            raise IllegalError(f"pass {n} adds up what it does not compute")
        scratch |= set(step.scratch)
        stored += step.stores
    if len(stored) != len(set(stored)):
        raise IllegalError("an output is stored twice")
    for n, out in enumerate(nest.outputs):
        row = set(out.strides) & inner and nest.stages.level[out.value] != POST
        if bool(row) != (n in stored):
            raise IllegalError(f"output {n} is never stored")
