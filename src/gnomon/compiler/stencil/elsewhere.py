"""A module's stencils as text for a described device, for `gnomon compile --device`: tiles, foretold time, and what
came of loops that are played here, beside ATen.

`texts(module, inputs, name)` traces the module as `torch.compile` does. Leaves out everything of a module that is no
stencil.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func

from gnomon.compiler.stencil import cpp_rows, scratchpad, triton_rows
from gnomon.compiler.stencil.call import replaced
from gnomon.compiler.stencil.lags import parts, pipeline
from gnomon.compiler.stencil.stages import Stencil
from gnomon.compiler.stencil.tile import block, tiled
from gnomon.compiler.tiles.body import UnfitError
from gnomon.compiler.tiles.device import DeviceDescription, described
from gnomon.errors import InputError
from gnomon.units import show_bytes, show_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class StencilText:
    """One stencil for a device."""

    source: str
    suffix: str
    lines: tuple[str, ...]
    """What was chosen and what it is foretold to take."""
    data: dict[str, Any]


class RunElsewhere:
    """Stands in a stencil's place: ATen's operations, and the tensors that they were given."""

    __name__ = "stencil"

    def __init__(self, stencil: Stencil, plain: Callable[..., Any]) -> None:
        self.made, self.plain, self.several = stencil, plain, len(stencil.outputs) > 1
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []

    def __call__(self, *args: Tensor) -> Any:
        self.inputs = list(args)
        self.outputs = list(self.plain(*args))
        return self.outputs if self.several else self.outputs[0]


def texts(module: Any, inputs: Sequence[Any], name: str) -> list[StencilText]:
    """Writes the text of each stencil of the module. InputError where it has none, or there is no such device."""
    device = described(name)
    found: list[RunElsewhere] = []

    def compiled(graph: torch.fx.GraphModule, _: Any) -> Any:
        for _, one in replaced(graph.graph, RunElsewhere):
            found.append(one)
        return make_boxed_func(graph.forward)

    # A module that was compiled before is traced once more.
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(module, backend=aot_autograd(fw_compiler=compiled, inference_compiler=compiled))(*inputs)
    if not found:
        raise InputError(
            f"--device {name}: the module has no stencil; texts for other devices are made of stencils alone: slices, "
            "pads or rolls of one tensor added up, or convolutions of at most 4 channels"
        )
    return [_text(one, device) for one in found]


def _text(one: RunElsewhere, device: DeviceDescription) -> StencilText:
    try:
        if device.printer == "scratchpad":
            return _played(one, device)
        return _triton(one, device) if device.printer == "triton" else _cpp(one, device)
    except UnfitError as error:
        raise InputError(f"--device {device.name}: a stencil does not fit: {error}") from error


def _about(one: RunElsewhere) -> str:
    stages, sizes = len(one.made.stages), " x ".join(map(str, one.made.stages[-1].sizes))
    return f"stencil of {stages} {'stage' if stages == 1 else 'stages'} over {sizes}"


def _cpp(one: RunElsewhere, device: DeviceDescription) -> StencilText:
    tile, _ = tiled(one.made, device)
    cut = parts(one.made, tile.depth)
    sources = dict.fromkeys(cpp_rows.text(pipeline(part, block(part)))[0] for part in cut)
    head = f'// for {device.name}: -DGNOMON_ISA="\\"{device.header}\\"", tiles of {" x ".join(map(str, tile.size))}\n'
    lines = (
        f"{_about(one)}: {tile.depth} together, tiles of {' x '.join(map(str, tile.size))}",
        f"  {show_bytes(tile.ring_bytes)} in {tile.level}, bound by {tile.bound}, "
        f"foretold {show_seconds(tile.seconds)}",
    )
    data = {"depth": tile.depth, "tile": list(tile.size), "level": tile.level, "foretold_s": tile.seconds}
    return StencilText(source=head + "\n".join(sources), suffix="cpp", lines=lines, data=data)


def _triton(one: RunElsewhere, device: DeviceDescription) -> StencilText:
    source, launches = triton_rows.text(one.made, device)
    matmuls = sum(launch.as_matmul for launch in launches)
    lines = (f"{_about(one)}: {len(launches)} kernels, {matmuls} of them products of tensor cores",)
    return StencilText(
        source=source, suffix="py", lines=lines, data={"kernels": len(launches), "products": matmuls}
    )  # fmt: skip


def _played(one: RunElsewhere, device: DeviceDescription) -> StencilText:
    programs = scratchpad.program(one.made, device)
    played = scratchpad.play(programs, one.made, one.inputs)
    apart = max(float((a.double() - b.double()).abs().max()) for a, b in zip(played.outputs, one.outputs, strict=True))
    deep = len(programs[0].of.stencil.stages)
    lines = (
        f"{_about(one)}: {deep} together, tiles of {' x '.join(map(str, programs[0].tile))}"
        f"{', the next one fetched meanwhile' if programs[0].twice else ''}",
        f"  played on {len(programs[0].cores)} cores: {apart:.3g} from ATen, {played.transfers:,} transfers, "
        f"{show_bytes(played.moved_bytes)}, {show_bytes(played.most_bytes)} of each scratchpad, "
        f"foretold {show_seconds(played.seconds)}",
    )
    data = {
        "depth": deep, "tile": list(programs[0].tile), "apart": apart, "transfers": played.transfers,
        "moved_bytes": played.moved_bytes, "scratchpad_bytes": played.most_bytes, "foretold_s": played.seconds,
    }  # fmt: skip
    return StencilText(source=scratchpad.text(programs), suffix="c", lines=lines, data=data)
