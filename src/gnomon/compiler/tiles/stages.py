"""When each value of a body is computed: which axes are rows, which are a row's points, and in which pass over the
row.

`classify` chooses the inner axes (what one worker works through, vector by vector) and gives every reduction a
role: `row` (along the inner axes: known after one pass over the row), `column` (along the outer axes, a result
for each point of a row) or `total` (along all). A body for which no such choice exists raises `UnfitError`: it
would need a barrier.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from gnomon.compiler.tiles.body import REDUCTIONS, Body, UnfitError
from gnomon.compiler.tiles.sizes import equal

POST = 1_000
"""The level of what is known only after all rows: columns, totals and what follows from them."""

COST = {
    "exp": 12,
    "log": 16,
    "tanh": 16,
    "erf": 16,
    "cdf": 12,
    "sigmoid": 16,
    "expm1": 20,
    "log1p": 40,
    "pow": 80,
    "sin": 60,
}
COST |= {
    "cos": 60,
    "sqrt": 6,
    "div": 5,
    "load": 1,
    "take": 1,
    "const": 0,
    "extent": 0,
    "index": 1,
    "cast": 1,
    "bf16": 6,
}
"""Vector instructions of an operation, roughly; others are 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    inner: frozenset[int]
    """Axes along a row."""
    outer: frozenset[int]
    """Axes from row to row."""
    roles: dict[int, str]
    """Reduction -> row, column or total."""
    level: dict[int, int]
    """Value -> the pass over the row in which it is known (0 the first), or POST."""


def live(body: Body, roots: Sequence[int]) -> list[int]:
    """Values that the roots need, in order."""
    # Checks are computed whoever needs them: by them a kernel says that ATen must do the call.
    needed = set(roots) | {i for i, ins in enumerate(body.code) if ins.op == "check"}
    # Arguments stand before what reads them, so one pass from the end finds all.
    for i in range(len(body.code) - 1, -1, -1):
        if i in needed:
            needed.update(body.code[i].args)
    return sorted(needed)


def classify(body: Body, roots: Sequence[int]) -> Stages:
    values = live(body, roots)
    every = frozenset().union(*(body.code[i].axes for i in values)) if values else frozenset()
    over = {i: frozenset(body.code[i].attr) for i in values if body.code[i].op in REDUCTIONS}
    every |= frozenset().union(*over.values()) if over else frozenset()
    fast = _fastest(body, values, every)
    inner = _inner(body, over, every, fast)
    # At first a reduction along all axes is a total, which is known only after all rows. Where there is a single row it
    # may as well be that row's result, so that later passes over the row can read it.
    try:
        return _with(body, values, every, inner, over, single=False)
    except UnfitError:
        if every - inner:
            raise
        return _with(body, values, every, inner, over, single=True)


def _fastest(body: Body, values: Sequence[int], every: frozenset[int]) -> int | None:
    """The axis along which most memory is contiguous. One tensor along more axes is larger than any that are along
    fewer (an image beside numbers of its channels)."""
    votes: Counter[int] = Counter()
    for i in values:
        if body.code[i].op in ("load", "take"):
            inp = body.inputs[body.code[i].attr]
            # A power of the number of axes: no number of smaller tensors outvotes one that lies along an axis more.
            votes.update({axis: 16 ** len(inp.strides) for axis, stride in inp.strides.items() if equal(stride, 1)})
    return max(votes, key=lambda a: (votes[a], a)) if votes else max(every, default=None)


def _inner(body: Body, over: dict[int, frozenset[int]], every: frozenset[int], fast: int | None) -> frozenset[int]:
    partial = {axes for axes in over.values() if axes != every}
    # A reduction along the fast axis makes its axes the row. One that leaves it out is a column, and the row is all
    # other axes.
    rows = {axes for axes in partial if fast in axes}
    if len(rows) > 1:
        raise UnfitError("reductions along unequal axes")
    if rows:
        return next(iter(rows))
    if partial:
        if len(partial) > 1:
            raise UnfitError("reductions along unequal axes")
        return every - next(iter(partial))
    return frozenset() if fast is None else frozenset({fast})


def _with(
    body: Body,
    values: Sequence[int],
    every: frozenset[int],
    inner: frozenset[int],
    over: dict[int, frozenset[int]],
    single: bool,
) -> Stages:
    outer = every - inner
    roles: dict[int, str] = {}
    level: dict[int, int] = {}
    for i in values:
        ins = body.code[i]
        at = max((level[a] for a in ins.args), default=0)
        if i in over:
            source = body.code[ins.args[0]].axes
            roles[i] = _role(source, over[i], inner, outer, every, single)
            if at == POST:
                raise UnfitError("a reduction of a reduction of all rows")
            if roles[i] == "column" and ins.kind == "B":
                raise UnfitError("any and all down columns")
            at = at + 1 if roles[i] == "row" else POST
        if (
            ins.op in ("load", "take")
            and ins.op == "take"
            and (ins.axes & inner)
            and body.code[ins.args[0]].axes & inner
        ):
            raise UnfitError("an index along the row")
        if ins.op == "is_at" and ins.attr in inner and body.code[ins.args[0]].axes & inner:
            raise UnfitError("a target along the row")
        # It would be a second walk over the rows, with a barrier before it.
        if at == POST and ins.axes & outer:
            raise UnfitError("a value that needs all rows first")
        if at == POST and ins.op == "take":
            raise UnfitError("a row that is chosen after all rows")
        level[i] = at
    return Stages(inner=inner, outer=outer, roles=roles, level=level)


def _role(
    source: frozenset[int],
    over: frozenset[int],
    inner: frozenset[int],
    outer: frozenset[int],
    every: frozenset[int],
    single: bool,
) -> str:
    if over == every and (outer or not single):
        return "total"
    if over == inner:
        if outer and not source & outer:
            raise UnfitError("a reduction of what all rows share")
        return "row"
    if over == outer:
        if source & inner:
            if source & inner != inner or source & outer != outer:
                raise UnfitError("columns of a part of the row")
            return "column"
        return "total"
    raise UnfitError("a reduction along a part of the axes")


def cost(body: Body, value: int, seen: set[int] | None = None) -> int:
    """Vector instructions to compute a value from memory and from reductions."""
    seen = set() if seen is None else seen
    if value in seen:
        return 0
    seen.add(value)
    ins = body.code[value]
    if ins.op in REDUCTIONS:
        return 0
    # `seen` has each value once, as code computes what several read only once.
    return COST.get(ins.op, 1) + sum(cost(body, a, seen) for a in ins.args)
