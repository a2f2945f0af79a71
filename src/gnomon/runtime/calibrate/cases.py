"""What calibration runs: the operations of this runtime, each on a grid of sizes, made of its own functions.

`cases()` lists them; `Case.make(point)` returns what is prepared before the clock starts and what is timed. Sizes span
what a processor trains: beyond them prices grow as the work does. As in a job, nothing is in the core's own caches
before the clock starts but what the operation before has just made: weights, what was saved for backward and memory for
results are not. Leaves out the clock and other processes (`calibrate`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gnomon.hardware import Axis
from gnomon.hardware.measured import grid_points
from gnomon.models.presets import model
from gnomon.runtime.module.apply import DTYPES
from gnomon.runtime.ops import function_of
from gnomon.runtime.ops.site import Site
from gnomon.runtime.optim.update import AdamWSettings, Update, squares, summed
from gnomon.runtime.parameters.parameters import Dtypes, Parameters, Slot, Tape, Weight

Point = Mapping[str, int]
"""Axis -> size."""

Timed = tuple[Callable[[], Any], Callable[[Any], object]]
"""(what is prepared each time, what is timed, given that)."""

VOCAB = 256
"""Rows of the table whose gradient `embedding` makes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One operation on a grid."""

    what: str
    """Name of the operation."""
    dtype: str
    """Name of the dtype."""
    direction: str
    axes: tuple[Axis, ...]
    """Sizes that the grid has."""
    build: Callable[[Point, torch.dtype, str], Timed]
    """Makes what is timed at one point."""

    def points(self) -> Iterator[Point]:
        """Every point of the grid, in the order of its table."""
        yield from grid_points(self.axes)

    def make(self, point: Point) -> Timed:
        """What is prepared and what is timed at a point."""
        return self.build(point, DTYPES.get(self.dtype, torch.bfloat16), self.direction)


def cases(dtypes: Sequence[str], *, fine: bool = True) -> tuple[Case, ...]:
    """All operations in these number formats. fine: fp32 on the full grids; else a few points of each, for tests."""
    listed: list[Case] = []
    for dtype in dtypes:
        full = fine and dtype == "fp32"
        for what, directions, build, axes in _OPERATIONS:
            grid = axes if full else {name: (sizes[0], sizes[max(1, len(sizes) - 2)]) for name, sizes in axes.items()}
            case_axes = tuple(Axis(name=name, sizes=sizes) for name, sizes in grid.items())
            listed += [Case(what=what, dtype=dtype, direction=way, axes=case_axes, build=build) for way in directions]
    return tuple(listed)


def build_case(what: str, dtype: str, direction: str, point: Point) -> Timed:
    """One operation at one point, whether or not a grid has it."""
    build = next(build for name, _, build, _ in _OPERATIONS if name == what)
    return build(point, DTYPES[dtype], direction)


COLD_BYTES = 8 << 20
"""Written before each repeat: more than the caches of one core hold."""


@cache
def _other() -> Tensor:
    return torch.zeros(COLD_BYTES // 4)


def after(*fresh: Tensor) -> None:
    """Leaves in the caches what a job would have there: `fresh`, and nothing else."""
    _other().add_(1.0)
    for tensor in fresh:
        tensor.detach().sum()


KEPT_BYTES = 128 << 20
"""Results of forwards that live at once in a process: more than its share of the caches that cores share."""


class _Results:
    """Forward's results are kept for backward, so each is written to memory that nobody has touched for long: here the
    latest are kept too, of all operations together. Into memory just freed, sums took half as long (2026-11-21)."""

    def __init__(self) -> None:
        self.results: deque[Tensor] = deque()
        self.nbytes = 0

    def keep(self, tensor: Tensor) -> None:
        """Keeps it, with what its backward needs, and lets the oldest go."""
        self.results.append(tensor)
        self.nbytes += tensor.nbytes
        while self.nbytes > KEPT_BYTES and len(self.results) > 1:
            self.nbytes -= self.results.popleft().nbytes


_results = _Results()


@cache
def _many() -> Tensor:
    return torch.zeros(KEPT_BYTES // 4)


def after_step() -> None:
    """Leaves the caches as a whole step does: what is used once a step (moments, master copies) comes from memory."""
    _many().sum()
    after()


def _tensor(dtype: torch.dtype, *shape: int) -> Tensor:
    """Values that no operation is slow on, cheap to make."""
    return torch.linspace(0.25, 0.75, shape[-1]).to(dtype).expand(*shape).contiguous()


class _Lone(Weight):
    """A parameter whose gradient is dropped: adding it up is measured by itself."""

    def add(self, grad: Tensor) -> None:
        """Does nothing: gradients are not measured here."""


def _parameters(dtype: torch.dtype, *shapes: tuple[int, ...]) -> Parameters:
    slots, start = [], 0
    for number, shape in enumerate(shapes):
        slots.append(
            Slot(
                name=f"{number}.weight",
                shape=shape,
                whole=shape,
                offset=(0,) * len(shape),
                start=start,
                holders=1,
                decays=len(shape) > 1,
                sums="",
            )
        )
        start = slots[-1].stop
    wide = torch.promote_types(dtype, torch.float32)
    dtypes = Dtypes(param=dtype, grad=wide, master=None if wide == dtype else wide, states=wide)
    parameters = Parameters(tuple(slots), dtypes, zero=0, shard=0, num_shards=1)
    parameters.fill(lambda slot: torch.full(slot.shape, 0.5, dtype=torch.float64))
    return parameters


@cache
def _site(kind: str) -> Site:
    """An op of a Llama on one rank, as the runtime runs it."""
    graph = model("llama-mini")
    block, op = next((block, op) for block in graph.blocks for op in block.ops if op.kind == kind)
    return Site(op=op, block=block)


def _op(kind: str, *operands: Any) -> Tensor:
    out = function_of(kind)(_site(kind), *operands)
    assert isinstance(out, Tensor)
    return out


def _matmul(point: Point, dtype: torch.dtype, direction: str) -> Timed:
    """Sizes are those of this product itself: m×n from sums over k. Operands lie as a linear's do."""
    m, n, k = point["m"], point["n"], point["k"]
    if direction == "forward":
        x, w = _tensor(dtype, m, k), _tensor(dtype, n, k)
        return lambda: after(x), lambda _: _results.keep(functional.linear(x, w))
    if direction == "input_grad":
        x, w = _tensor(dtype, m, k), _tensor(dtype, k, n)
        return lambda: after(x), lambda _: x @ w
    x, w = _tensor(dtype, k, m), _tensor(dtype, k, n)
    return lambda: after(x), lambda _: x.T @ w


def _both_ways(direction: str, run: Callable[[], Tensor], *inputs: Tensor) -> Timed:
    """A function, or the gradients of its inputs."""
    for tensor in inputs:
        tensor.requires_grad_()
    if direction == "forward":
        return lambda: after(*inputs), lambda _: _results.keep(run())

    def saved() -> Tensor:
        outputs = run()
        after(ones)
        return outputs

    def backward(y: Tensor) -> object:
        return torch.autograd.grad((y,), inputs, (ones,))

    ones = torch.ones_like(run())
    return saved, backward


def _attention(point: Point, dtype: torch.dtype, direction: str) -> Timed:
    shape = (1, point["seq"], point["heads"], point["head_dim"])
    q, k, v = (_tensor(dtype, *shape) for _ in range(3))
    return _both_ways(direction, lambda: _op("attention", q, k, v), q, k, v)


def _norm(point: Point, dtype: torch.dtype, direction: str) -> Timed:
    parameters = _parameters(dtype, (point["width"],))
    weight = _Lone(parameters, "0.weight", Tape(), rows=0)
    x = _tensor(dtype, 1, point["rows"], point["width"])
    return _both_ways(direction, lambda: _op("norm", x, weight), x)


def _rotary(point: Point, dtype: torch.dtype, direction: str) -> Timed:
    # Rows are vectors of a head: 4 sequences, rows / 16 positions, 4 heads.
    x = _tensor(dtype, 4, point["rows"] // 16, 4, point["width"])
    return _both_ways(direction, lambda: _op("rotary", x), x)


def _embedding(point: Point, dtype: torch.dtype, direction: str) -> Timed:
    parameters = _parameters(dtype, (VOCAB, point["width"]))
    weight = _Lone(parameters, "0.weight", Tape(), rows=1)
    ids = (torch.arange(point["rows"]) * 37 % VOCAB)[None]
    if direction == "forward":
        return after, lambda _: _results.keep(_op("embedding", ids, weight))
    ones = torch.ones(1, point["rows"], point["width"], dtype=dtype)

    def saved() -> Tensor:
        embedded = _op("embedding", ids, weight)
        after(ones)
        return embedded

    return saved, lambda y: torch.autograd.backward((y,), (ones,))


def _cross_entropy(point: Point, dtype: torch.dtype, direction: str) -> Timed:
    logits = _tensor(dtype, 1, point["rows"], point["width"])
    labels = (torch.arange(point["rows"]) * 37 % point["width"])[None]
    return _both_ways(direction, lambda: _op("cross_entropy", logits, labels), logits)


def _activation(point: Point, dtype: torch.dtype, direction: str) -> Timed:
    x = _tensor(dtype, point["elements"]).requires_grad_()
    if direction == "forward":  # another product was made since its input was
        return after, lambda _: _results.keep(functional.silu(x))
    return _both_ways(direction, lambda: functional.silu(x), x)


def _mul(point: Point, dtype: torch.dtype, direction: str) -> Timed:
    x, y = _tensor(dtype, point["elements"]), _tensor(dtype, point["elements"])
    return _both_ways(direction, lambda: x * y, x, y)


def _add(point: Point, dtype: torch.dtype, direction: str) -> Timed:
    x, y = (_tensor(dtype, point["elements"]).requires_grad_() for _ in range(2))
    return lambda: after(y), lambda _: _results.keep(x + y)


def _fill(point: Point, dtype: torch.dtype, direction: str) -> Timed:
    return after, lambda _: torch.zeros(point["elements"], dtype=dtype)


def _copy(point: Point, dtype: torch.dtype, direction: str) -> Timed:
    x = _tensor(dtype, point["elements"])
    return after, lambda _: x.clone()


def _accumulate(point: Point, dtype: torch.dtype, direction: str) -> Timed:
    """A gradient in the compute dtype, added to its place in the flat one."""
    parameters, grad = _parameters(dtype, (point["elements"],)), _tensor(dtype, point["elements"])
    parameters.add_grad("0.weight", grad)
    return lambda: after(grad), lambda _: parameters.add_grad("0.weight", grad)


def _adamw(point: Point, dtype: torch.dtype, direction: str) -> Timed:
    parameters = _parameters(dtype, (point["elements"] // 8, 8))
    parameters.add_grad("0.weight", _tensor(dtype, point["elements"]))
    adam = Update.of(parameters)
    # At a rate of 0 the parameters stay as they are, however often it is repeated.
    settings, scale = AdamWSettings(lr=0.0), torch.ones((), dtype=torch.float64)
    return after_step, lambda _: adam.update(parameters, settings, scale=scale)


def _squares(point: Point, dtype: torch.dtype, direction: str) -> Timed:
    parameters = _parameters(dtype, (point["elements"],))
    parameters.add_grad("0.weight", _tensor(dtype, point["elements"]))
    return after, lambda _: summed([squares(parameters)], parameters.device)


_ELEMENTS = {"elements": (1 << 8, 1 << 14, 1 << 18, 1 << 22)}
_BOTH, _ONE = ("forward", "backward"), ("",)
_WIDE = {"rows": (32, 512, 4096), "width": (64, 512)}

_OPERATIONS: tuple[
    tuple[str, tuple[str, ...], Callable[[Point, torch.dtype, str], Timed], Mapping[str, tuple[int, ...]]], ...
] = (
    (
        "matmul",
        ("forward", "input_grad", "weight_grad"),
        _matmul,
        {"m": (32, 128, 512, 2048), "n": (32, 128, 512, 1024), "k": (32, 128, 512, 2048)},
    ),
    ("attention", _BOTH, _attention, {"heads": (2, 8), "seq": (32, 128, 512), "head_dim": (16, 32, 64, 128)}),
    ("norm", _BOTH, _norm, _WIDE),
    ("rotary", _BOTH, _rotary, {"rows": (512, 4096, 32768), "width": (16, 64)}),
    ("embedding", _BOTH, _embedding, _WIDE),
    ("cross_entropy", _BOTH, _cross_entropy, {"rows": (32, 512, 4096), "width": (64, 256, 1024)}),
    ("activation", _BOTH, _activation, _ELEMENTS),
    ("mul", _BOTH, _mul, _ELEMENTS),
    ("add", ("forward",), _add, _ELEMENTS),
    ("fill", _ONE, _fill, _ELEMENTS),
    ("copy", _ONE, _copy, _ELEMENTS),
    ("accumulate", _ONE, _accumulate, _ELEMENTS),
    ("adamw", _ONE, _adamw, _ELEMENTS),
    ("squares", _ONE, _squares, _ELEMENTS),
)
