"""Calls of the torch API that an op kind of the graph stands for.

`kind_of(step, trace)` looks at what was called with what and returns a `CallKind`: the graph's kind, its operands in
the graph's order and its attributes. None for a call that no kind says exactly; then it becomes an `opaque` op or a
view. Leaves out dims (`axes`), and whether operands' dims fit together, which `convert` sees.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from gnomon import ops
from gnomon.frontend.axes import Axes
from gnomon.frontend.call_rules import Call, CallKind
from gnomon.frontend.records import ForwardTrace, Ref, Step
from gnomon.frontend.rules import Row
from gnomon.late import load_late
from gnomon.ops.op import RuledCall, TorchCall
from gnomon.tensors.captured import Node, mutates


def kind_of(step: Step, trace: ForwardTrace) -> CallKind | None:
    """The kind of a call; None if none says it."""
    if not step.nodes:
        return None
    out = next((index for index in reversed(step.nodes[-1].outs) if index is not None), None)
    first = next((index for index in step.nodes[-1].outs if index is not None), None)
    if out is None or first is None or _writes_over(step, trace):
        return None
    kind, known = _of_calls().get(step.func, ("", None))
    if not isinstance(known, RuledCall):
        return _called(step, out, trace)
    rule: Callable[[Call, int, ForwardTrace], CallKind | None] = load_late(f"gnomon.frontend.call_rules:{known.rule}")
    return rule(Call(step, trace, kind), first, trace)


def _writes_over(step: Step, trace: ForwardTrace) -> bool:
    """Whether it writes into memory that it did not make."""
    own = set[int]()
    for node in step.nodes:
        reads = [trace.values[x.index].storage for x in node.args if isinstance(x, Ref)]
        if mutates(Node(target=node.target, args=())):
            if reads[0] not in own:
                return True
            continue
        own |= {trace.values[o].storage for o in node.outs if o is not None} - set(reads)
    return False


@cache
def _of_calls() -> dict[str, tuple[str, TorchCall | RuledCall]]:
    """Function -> (kind, how it is called), of the kinds that say so."""
    found: dict[str, tuple[str, TorchCall | RuledCall]] = {}
    for kind in ops.every():
        if not isinstance(kind.calls, str):
            found |= {call.function: (kind.name, call) for call in kind.calls}
    return found


ROLES = ("heads", "kv_heads", "head_dim", "v_dim")
"""Names of axes that say what an axis is in any model."""


def named_axes(kind: str) -> tuple[str, ...]:
    """Names of the axes of a kind's operands and result, where its call says them one by one."""
    calls = ops.find(kind).calls
    return next((call.axes for call in calls if isinstance(call, TorchCall) and isinstance(call.axes, tuple)), ())


def _called(step: Step, out: int, trace: ForwardTrace) -> CallKind | None:
    """The kind that says so of a call, of tensors in the dtype that it makes and numbers; None for others."""
    targets = {node.target for node in step.nodes}
    custom = "::".join(next(iter(targets)).split(".")[:2]) if len(targets) == 1 else ""
    found = _of_calls().get(step.func) or _of_calls().get(custom)
    kind, known = found or ("", None)
    if not isinstance(known, TorchCall):
        return None
    call = Call(step, trace, kind)
    if custom == known.function:
        (node,) = step.nodes
        call.args, call.kwargs = tuple(node.args), dict(node.kwargs)
    operands = [call.value(place, name) for place, name in enumerate(known.operands)]
    named = {name: call.get(place, name) for place, name in enumerate(known.numbers, len(operands))}
    named = {name: value for name, value in named.items() if value is not None}
    if not all(isinstance(value, (int, float)) for value in named.values()):
        return None
    values = [trace.values[index] for index in operands if index is not None]
    floats = [value for value in values if value.dtype.is_floating_point]
    if len(values) < len(operands) or any(value.dtype != trace.values[out].dtype for value in floats):
        return None
    trains = ops.find(kind).gradient != "none"
    if values[0].origin == "parameter" or not values[0].dtype.is_floating_point or (trains and not values[0].grad):
        return None
    if ops.find(kind).contracts and (values[1].origin != "parameter" or not values[1].grad):
        return None
    return CallKind(kind=kind, operands=tuple(index for index in operands if index is not None), out=out, attrs=named)


def link_kind(kind: CallKind, rows: list[Row], axes: Axes) -> None:
    """Joins the axes of a kind's operands and output, and says what they are."""
    ins, out = [rows[i] for i in kind.operands], rows[kind.out]
    does = ops.find(kind.kind).does
    match does:
        case "multiplies":
            for a, b in zip(ins[0][:-1], out[:-1], strict=True):
                axes.same(a, b)
            rows_out, inner = kind.weight_of(ins[1])
            axes.same(ins[0][-1], inner)
            axes.same(out[-1], rows_out)
            if len(ins) > 2:
                axes.same(out[-1], ins[2][0])
        case "attends":
            q, k, v = ins[:3]
            for a, b in ((q[0], k[0]), (q[0], v[0]), (q[0], out[0]), (k[2], v[2]), (q[2], out[2]), (k[1], v[1]),
                         (q[1], out[1]), (q[3], k[3]), (v[3], out[3])):  # fmt: skip
                axes.same(a, b)
            axes.role(q[1], "heads")
            axes.role(k[1], "kv_heads")
            axes.role(q[3], "head_dim")
            axes.role(v[3], "v_dim")
            if len(ins) > 3 and len(ins[3]) == 4:  # a bias of each head
                axes.same(q[1], ins[3][1])
        case "looks up":
            for a, b in zip([*ins[0], ins[1][1]], out, strict=True):
                axes.same(a, b)
        case "compares labels":
            axes.same(ins[0][0], ins[1][0])
        case "normalises":
            for a, b in zip(ins[0], out, strict=True):
                axes.same(a, b)
            for row in ins[1:]:
                axes.same(row[0], out[-1])
        case _ if named := named_axes(kind.kind):
            first = dict[str, Any]()
            for row, names in zip([*ins, out], named, strict=True):
                for axis, name in zip(row, names.split(), strict=True):
                    axes.same(first.setdefault(name, axis), axis)
                    if name in ROLES:
                        axes.role(axis, name)
        case _:
            for row in ins:
                for a, b in zip(row, out, strict=True):
                    axes.same(a, b)
