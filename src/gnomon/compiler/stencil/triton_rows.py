"""The Triton text of a stencil: one function a stage, a tile of rows and points a program; where a weighted box is
cheaper as a product, that product of the tensor cores.

`text(stencil, device)` gives a module's source; `run` calls it on tensors of any device that Triton serves, the
interpreter's too. A stage reads its neighbours from memory (the device's last cache holds them), so steps are calls of
their own. Leaves out keeping steps in shared memory.
Source: the product of a box is ConvStencil's (PPoPP 2024): outputs beside each other in a row are one row of it, and
the weights a band.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from gnomon.compiler.stencil.box import Box, box_of, pays
from gnomon.compiler.stencil.cpp_rows import nest_of
from gnomon.compiler.stencil.lags import Pipeline, pipeline
from gnomon.compiler.stencil.stages import Factor, Read, Stage, Stencil
from gnomon.compiler.text.triton_module import module_of
from gnomon.compiler.text.triton_text import HEAD, TritonText, expression
from gnomon.compiler.tiles.device import DeviceDescription

ROWS, POINTS = 8, 128
"""Of a program's tile: whole lines of memory, few rows so that neighbours are still in the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonLaunch:
    """One function and what it is called with: arrays, then sizes and strides by node and dim."""

    name: str
    stage: Stage
    arrays: tuple[Any, ...]
    numbers: tuple[tuple[str, Any, int], ...]
    tile: tuple[int, int]
    as_matmul: bool


@dataclass(slots=True)
class Lines:
    of: Pipeline
    stage: Stage
    lines: list[str]
    arrays: list[Any]
    numbers: list[tuple[str, Any, int]]

    def say(self, line: str) -> None:
        self.lines.append(f"    {line}")

    def array(self, node: Any) -> str:
        if node not in self.arrays:
            self.arrays.append(node)
        return f"x{self.arrays.index(node)}"

    def number(self, kind: str, node: Any, dim: int) -> str:
        what = (kind, node, dim)
        if what not in self.numbers:
            self.numbers.append(what)
        return f"n{self.numbers.index(what)}"

    def dim(self, place: int) -> int | None:
        spatial = self.of.stencil.rank - self.of.first
        dim = {1: (None, None, 0), 2: (0, None, 1), 3: (0, 1, 2)}[spatial][place]
        return None if dim is None else dim + self.of.first

    def size(self, node: Any, place: int) -> str:
        dim = self.dim(place)
        return "1" if dim is None else self.number("size", node, dim)

    def start(self, node: Any, channel: str) -> str:
        """Writes where a program's batch begins in an array."""
        text = self.array(node)
        for n in range(self.of.stencil.batch):
            text += f" + b{n} * {self.number('stride', node, n)}"
        if self.of.stencil.channel is not None:
            text += f" + {channel} * {self.number('stride', node, self.of.stencil.channel)}"
        return text

    def at(self, node: Any, where: tuple[str, str, str], channel: str) -> str:
        text = self.start(node, channel)
        for place, at in enumerate(where):
            dim = self.dim(place)
            if dim is not None:
                text += f" + ({at}) * {self.number('stride', node, dim)}"
        return text

    def load(self, read: Read, kind: str, where: tuple[str, str, str] = ("i", "m", "j")) -> str:
        """A tile of a field at a shift, with what stands outside it."""
        shift = self.of.place(read.shift)
        at = [f"{name} + {by}" if by else name for name, by in zip(where, shift, strict=True)]
        channel = "c" if read.channel is None else str(read.channel)
        inside = ["live"]
        for place in range(3):
            if self.dim(place) is None:
                continue
            size = self.size(read.field, place)
            if read.outside == "wrap":
                at[place] = f"((({at[place]}) % {size} + {size}) % {size})"
            else:
                inside.append(f"({at[place]} >= 0) & ({at[place]} < {size})")
        other = 0.0 if read.outside in (None, "wrap") else read.outside
        loaded = f"tl.load({self.at(read.field, (at[0], at[1], at[2]), channel)}, mask={' & '.join(inside)}, "
        other_text = f'float("{other}")' if other in (float("inf"), -float("inf")) or other != other else repr(other)
        return f"{loaded}other={other_text}).to({ {'F': 'tl.float32', 'D': 'tl.float64', 'B': 'tl.int1'}[kind] })"


def text(stencil: Stencil, device: DeviceDescription) -> tuple[str, list[TritonLaunch]]:
    """(source, its calls in order)."""
    of = pipeline(stencil)
    parts, launches = [HEAD], []
    for n, stage in enumerate(stencil.stages):
        box = box_of(stage)
        as_matmul = box is not None and stencil.channel is None and pays(box, stage, device)
        lines = Lines(of=of, stage=stage, lines=[], arrays=[], numbers=[])
        if as_matmul:
            assert box is not None
            tile = _matmul_tile(lines, box)
        else:
            _pointwise(lines)
            tile = (ROWS if lines.dim(0) is not None else 1, POINTS)
        names = [f"x{k}" for k in range(len(lines.arrays))] + [f"n{k}" for k in range(len(lines.numbers))]
        head = f"def stage{n}({', '.join(names)}, ROWS: tl.constexpr, POINTS: tl.constexpr):"
        parts.append("\n".join(["@triton.jit", head, *lines.lines]))
        launches.append(
            TritonLaunch(
                name=f"stage{n}",
                stage=stage,
                arrays=tuple(lines.arrays),
                numbers=tuple(lines.numbers),
                tile=tile,
                as_matmul=as_matmul,
            )  # fmt: skip
        )
    return "\n\n\n".join(parts) + "\n", launches


def _places(lines: Lines) -> None:
    """Writes which tile a program has: points along grid 0, rows along grid 1, all else along grid 2."""
    node, say = lines.stage.node, lines.say
    say("rest = tl.program_id(2)")
    if lines.of.stencil.channel is not None:
        channels = lines.number("size", node, lines.of.stencil.channel)
        say(f"c = rest % {channels}")
        say(f"rest = rest // {channels}")
    if lines.dim(1) is not None:
        say(f"m = rest % {lines.size(node, 1)}")
        say(f"rest = rest // {lines.size(node, 1)}")
    else:
        say("m = 0")
    for n in reversed(range(lines.of.stencil.batch)):
        size = lines.number("size", node, n)
        say(f"b{n} = rest % {size}")
        say(f"rest = rest // {size}")
    say("i = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]")
    say("j = tl.program_id(0) * POINTS + tl.arange(0, POINTS)[None, :]")
    say(f"live = (i < {lines.size(node, 0)}) & (j < {lines.size(node, 2)})")


def _pointwise(lines: Lines) -> None:
    stage, of = lines.stage, lines.of
    _places(lines)
    if stage.box is not None:
        assert stage.base is not None
        low, high = (of.sizes(tuple(edge[k] for edge in stage.box)) for k in range(2))
        inside = [
            f"({name} >= {low[place]}) & ({name} < {high[place]})"
            for place, name in enumerate("imj")
            if lines.dim(place) is not None
        ]
        lines.say("outer = live")
        lines.say(f"base = {lines.load(stage.base, 'D' if stage.dtype == torch.float64 else 'F')}")
        lines.say(f"live = outer & {' & '.join(inside)}")
    printed = TritonText(nest=nest_of(of, stage))
    for i in stage.values:
        ins = stage.body.code[i]
        if ins.op == "load":
            source = stage.body.inputs[ins.attr].node
            formula = lines.load(source, ins.kind) if isinstance(source, Read) else _factor(lines, source)
        elif ins.op == "fused":
            formula = f"(v{ins.args[0]} * v{ins.args[1]} + v{ins.args[2]})"
        else:
            formula = expression(printed, i, 0)
        lines.say(f"v{i} = {formula}")
    value = f"v{stage.value}"
    if stage.box is not None:
        lines.say(f"made = tl.where(live, {value}, base)")
        lines.say("live = outer")
        value = "made"
    lines.say(f"tl.store({lines.at(stage.node, ('i', 'm', 'j'), 'c')}, {value}, mask=live)")


def _factor(lines: Lines, source: Factor) -> str:
    channel = "c" if lines.of.stencil.channel is not None else f"b{source.dim}"
    by = f" + {channel} * {source.by_channel}" if source.by_channel else ""
    return f"tl.load({lines.array(source.weight)} + {source.element}{by}).to(tl.float32)"


def _matmul_tile(lines: Lines, box: Box) -> tuple[int, int]:
    """Rows of POINTS results: windows of all rows of the box beside each other, times a band of its weights."""
    stage, say = lines.stage, lines.say
    _places(lines)
    wide = box.across + box.group - 1
    # A window has box.down rows of `wide` points, for `group` results beside each other; `tl.arange` and `tl.dot` want
    # a power of two of them, and what is beyond is masked.
    depth = 1 << (box.down * wide - 1).bit_length()
    say(f"q = tl.arange(0, {depth})")
    say(f"down, across = q // {wide}, q % {wide}")
    say(f"o = tl.arange(0, {box.group})")
    say("tap = across[:, None] - o[None, :]")
    weights = f"{lines.array(box.weight)} + down[:, None] * {box.across} + tap"
    say(f"held = (tap >= 0) & (tap < {box.across}) & (down[:, None] < {box.down})")
    say(f"band = tl.load({weights}, mask=held, other=0.0)")
    say("point = tl.arange(0, ROWS)")
    say("i = tl.program_id(1) + tl.zeros([ROWS, 1], tl.int32)")
    say(f"first = tl.program_id(0) * (ROWS * {box.group}) + point[:, None] * {box.group}")
    say("row, at = i + down[None, :], first + across[None, :]")
    say(f"live = down[None, :] < {box.down}")
    read = box.read
    say(f"window = {lines.load(read, 'F', ('row', 'm', 'at'))}.to(band.dtype)")
    precision = "" if stage.dtype == torch.bfloat16 else ', input_precision="ieee"'
    say(f"made = tl.dot(window, band{precision})")
    say("j = first + o[None, :]")
    say(f"live = (i < {lines.size(stage.node, 0)}) & (j < {lines.size(stage.node, 2)})")
    say(f"tl.store({lines.at(stage.node, ('i', 'm', 'j'), 'c')}, made, mask=live)")
    # Sides of 16 are the smallest that `tl.dot` takes.
    return (16, box.group)


def run(stencil: Stencil, source: str, launches: list[TritonLaunch], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The outputs, by Triton, of tensors where it runs."""
    module = module_of(source)
    arrays = dict(zip(stencil.inputs, inputs, strict=True))
    for launch in launches:
        value = launch.stage.node.meta["val"]
        arrays[launch.stage.node] = torch.empty(value.shape, dtype=value.dtype, device=inputs[0].device)
        whole = stencil.channel is not None
        numbers = [_number(arrays[node], kind, dim, whole) for kind, node, dim in launch.numbers]
        sizes = launch.stage.sizes
        of = pipeline(stencil)
        rows, between, points = of.sizes(sizes)
        many = prod(sizes) // (rows * points)
        rows_of, points_of = launch.tile
        down, across = (1, rows_of * points_of) if launch.as_matmul else (rows_of, points_of)
        grid = (-(-points // across), -(-rows // down), many)
        function: Callable[..., Any] = getattr(module, launch.name)[grid]
        function(*[arrays[node] for node in launch.arrays], *numbers, ROWS=rows_of, POINTS=points_of)
    return [arrays[node] for node in stencil.outputs]


def _number(tensor: torch.Tensor, kind: str, dim: int, whole: bool) -> int:
    every = tensor.stride() if kind == "stride" else tensor.shape
    sizes = [int(n) for size, n in zip(tensor.shape, every, strict=True) if whole or size > 1]
    return sizes[dim]
