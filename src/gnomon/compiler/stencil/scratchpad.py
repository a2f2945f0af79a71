"""Stencils for many cores without caches: tiles come by DMA into each core's scratchpad, and results go back.

`program(stencil, device)` makes the loops: for each core a list of `Get`, `Wait`, `Compute` and `Store`, with places in
the scratchpad; the next tile is fetched while this one is computed where both fit. `play` runs them on tensors and
holds them to the device: what does not fit, is read before it has come, or lies outside an array is an error, and
transfers are counted and timed. `text` is the C of a core: complete but for `scratchpad` and three functions of DMA,
which the device's runtime gives. Leaves out edges that wrap around, and in the text fields of neither float nor double.
Source: swTVM (arXiv 1904.07404) for buffers inferred from tiles and double buffering; SWStenDSL (2024) and MSC (ICPP
2021) for steps in the scratchpad.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gnomon.compiler.stencil.lags import Pipeline, parts, pipeline
from gnomon.compiler.stencil.meaning import value_of
from gnomon.compiler.stencil.stages import Factor, Read, Stage, Stencil
from gnomon.compiler.stencil.tile import borders
from gnomon.compiler.text.cpp_text import BINARY, COMPARE
from gnomon.compiler.tiles.body import UnfitError, kind_of
from gnomon.compiler.tiles.device import DeviceDescription
from gnomon.compiler.tiles.stages import COST

Region: TypeAlias = tuple[tuple[int, int], ...]
"""[first, after) by dim."""
ITEM = {"F": 4, "D": 8}


@dataclass(frozen=True, slots=True)
class Get:
    """Fetches a region of an array to a buffer; outside the array stands `outside`."""

    buffer: str
    array: Any
    region: Region
    outside: float


@dataclass(frozen=True, slots=True)
class Wait:
    """Waits until what was fetched to a buffer has come."""

    buffer: str


@dataclass(frozen=True, slots=True)
class Compute:
    """Computes a stage over a region, into a buffer of that region."""

    buffer: str
    stage: Stage
    region: Region
    reads: tuple[tuple[Any, str], ...]
    """(field, the buffer that holds it) of each read."""


@dataclass(frozen=True, slots=True)
class Store:
    """Writes a part of a buffer to an array."""

    buffer: str
    array: Any
    region: Region


Instruction: TypeAlias = Get | Wait | Compute | Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    code: tuple[Instruction, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ManyCore:
    """Programs of all cores for one part of a stencil."""

    of: Pipeline
    device: DeviceDescription
    cores: tuple[Core, ...]
    places: dict[str, tuple[int, int]]
    """Maps a buffer to (first byte in the scratchpad, bytes)."""
    tile: tuple[int, ...]
    twice: bool
    """Whether the next tile is fetched while one is computed."""


@dataclass(slots=True)
class PlayResult:
    """What came of playing the programs: outputs, transfers and times."""

    outputs: list[Tensor] = field(default_factory=list)
    transfers: int = 0
    moved_bytes: int = 0
    seconds: float = 0.0
    """Seconds of the busiest core, foretold by the device's rates."""
    most_bytes: int = 0
    """Bytes of a scratchpad in use, at most."""


class PlayError(Exception):
    """A program that the device could not run; says why."""


# ---- making
def program(stencil: Stencil, device: DeviceDescription) -> list[ManyCore]:
    """The parts of a stencil in order, each with the deepest steps and the largest tiles that the scratchpad holds
    and that are foretold to be fastest. UnfitError where none fits."""
    if device.dma is None or not device.levels[0].explicit:
        raise UnfitError("a device without a scratchpad")
    if stencil.channel is not None or any(r.outside == "wrap" for s in stencil.stages for r in s.reads()):
        raise UnfitError("channels that are mixed, or edges that wrap around, from a scratchpad")
    for dtype in [one.dtype for one in stencil.stages] + [node.meta["val"].dtype for node in stencil.inputs]:
        if kind_of(dtype) not in ITEM:
            raise UnfitError(f"a field of {dtype} in a scratchpad, which holds float and double")
    best: tuple[float, list[ManyCore]] | None = None
    # Deeper steps read less from memory and compute more at the edges: try powers of two.
    for depth in (1, 2, 4, 8):
        if depth > 1 and depth > len(stencil.stages):
            break
        try:
            program_parts = [_part(pipeline(one), device) for one in parts(stencil, depth)]
        except UnfitError:
            continue
        seconds = sum(one[0] for one in program_parts)
        if best is None or seconds < best[0]:
            best = seconds, [one[1] for one in program_parts]
    if best is None:
        raise UnfitError(f"tiles that the scratchpad of {device.name} does not hold")
    return best[1]


def _part(of: Pipeline, device: DeviceDescription) -> tuple[float, ManyCore]:
    """(seconds, the programs) of the best tile of a part."""
    whole = of.stencil.stages[-1].sizes
    found: list[tuple[float, tuple[int, ...], bool]] = []
    lanes = device.vectors.lanes
    for tile in _tiles(whole, of.first, lanes):
        # Double buffering first; if it does not fit, one buffer.
        for twice in (True, False):
            tile_bytes = sum(size for _, size in _places(of, tile, twice).values())
            if tile_bytes <= device.levels[0].size:
                found.append((_seconds(of, device, tile, twice), tile, twice))
                break
    if not found:
        raise UnfitError("tiles that the scratchpad does not hold")
    seconds, tile, twice = min(found, key=lambda one: (one[0], one[1]))
    return seconds, _programs(of, device, tile, twice)


def _tiles(whole: tuple[int, ...], first: int, lanes: int) -> list[tuple[int, ...]]:
    """Lists tiles of spatial dims in powers of two, of single points of the others."""
    choices = []
    for dim, size in enumerate(whole):
        if dim < first:
            choices.append([1])
            continue
        least = lanes if dim == len(whole) - 1 else 1
        some = [min(size, least << n) for n in range(12)]
        choices.append(list(dict.fromkeys(some)))
    return list(product(*choices))


def _needed(of: Pipeline, region: Region) -> list[Region]:
    """Returns by row of the pipeline the region that is computed, or fetched, for results in a region; `Propagate`."""
    edges = borders(of)
    out = []
    for low, high in edges:
        spatial = len(region) - of.first
        # Borders are of three dims; a stencil of fewer uses the last of them.
        pick = {1: (2,), 2: (0, 2), 3: (0, 1, 2)}[spatial]
        own = list(region[: of.first])
        own += [(a - low[place], b + high[place]) for (a, b), place in zip(region[of.first :], pick, strict=True)]
        out.append(tuple(own))
    return out


def _inputs(of: Pipeline) -> dict[Any, tuple[Region, float]]:
    """Maps each field from memory to how far around a stage's own place it is read, by dim, and what stands outside."""
    nodes = {one.node for one in of.stencil.stages}
    found: dict[Any, tuple[Region, float]] = {}
    for n, row in enumerate(of.rows):
        if row.stage is None:
            continue
        for read in row.stage.reads():
            if read.field in nodes:
                continue
            zero = tuple(0 for _ in read.shift)
            around = _needed(of, tuple((a, a) for a in zero))[n]
            reach, outside = found.get(read.field, (tuple((10**9, -(10**9)) for _ in zero), 0.0))
            found[read.field] = (
                tuple(
                    (min(a, low + by), max(b, high + by))
                    for (a, b), (low, high), by in zip(reach, around, read.shift, strict=True)
                ),
                outside if read.outside is None else float(read.outside),
            )
    return found


def _grown(region: Region, by: Region) -> Region:
    return tuple((a + low, b + high) for (a, b), (low, high) in zip(region, by, strict=True))


def _points(region: Region) -> int:
    return prod(b - a for a, b in region)


def _places(of: Pipeline, tile: tuple[int, ...], twice: bool) -> dict[str, tuple[int, int]]:
    """Lays buffers one after the other: windows of inputs, twice where the next is fetched meanwhile, then stages."""
    region = tuple((0, size) for size in tile)
    at, out = 0, {}
    for n, (node, (reach, _)) in enumerate(_inputs(of).items()):
        size = _points(_grown(region, reach)) * ITEM[kind_of(node.meta["val"].dtype)]
        for copy in range(1 + twice):
            out[f"in{n}_{copy}"] = (at, size)
            # 32-byte alignment for vectors and DMA.
            at += (size + 31) // 32 * 32
    needed = _needed(of, region)
    for n, row in enumerate(of.rows):
        if row.stage is not None:
            size = _points(needed[n]) * ITEM[kind_of(row.stage.dtype)]
            out[f"stage{n}"] = (at, size)
            at += (size + 31) // 32 * 32
    return out


def transfers(region: Region, item: int, largest: int) -> int:
    """Counts the transfers of a region: one a row of points, or more where a row is larger than the largest."""
    rows = _points(region[:-1]) if len(region) > 1 else 1
    return rows * max(1, -(-(region[-1][1] - region[-1][0]) * item // largest))


def _seconds(of: Pipeline, device: DeviceDescription, tile: tuple[int, ...], twice: bool) -> float:
    """Seconds of the busiest core: DMA and work of all its tiles, beside each other where the next is fetched
    meanwhile."""
    assert device.dma is not None
    whole = of.stencil.stages[-1].sizes
    tiles = prod(-(-size // step) for size, step in zip(whole, tile, strict=True))
    rounds = -(-tiles // device.workers)
    region = tuple((0, size) for size in tile)
    # Cores share the memory's bandwidth.
    bandwidth = device.memory_bandwidth / min(device.workers, tiles)
    moved = 0.0
    for node, (reach, _) in _inputs(of).items():
        window = _grown(region, reach)
        item = ITEM[kind_of(node.meta["val"].dtype)]
        moved += _points(window) * item / bandwidth + device.dma.latency
    moved += sum(_points(region) * 4 / bandwidth + device.dma.latency for _ in of.stencil.outputs)
    work = sum(
        _work_s(row.stage, needed, device)
        for row, needed in zip(of.rows, _needed(of, region), strict=True)
        if row.stage is not None
    )
    # With double buffering a round takes the longer of moving and working; the shorter shows once, at the ends.
    return rounds * (max(moved, work) if twice else moved + work) + (min(moved, work) if twice else 0.0)


def _work_s(stage: Stage, region: Region, device: DeviceDescription) -> float:
    code = stage.body.code
    vectors = _points(region[:-1]) * -(-(region[-1][1] - region[-1][0]) // device.vectors.lanes)
    each = sum(max(1, COST.get(code[i].op, 1)) for i in stage.values if code[i].op != "const" and code[i].axes) + 1
    return vectors * each / device.vectors.rate


def _programs(of: Pipeline, device: DeviceDescription, tile: tuple[int, ...], twice: bool) -> ManyCore:
    """Deals tiles out to cores in turn, and writes each core's program."""
    sizes = {one.node: one.sizes for one in of.stencil.stages}
    every = [
        tuple((at, at + step) for at, step in zip(place, tile, strict=True))
        for place in product(
            *(range(0, max(s.sizes[d] for s in of.stencil.stages), step) for d, step in enumerate(tile))
        )
    ]
    fields = _inputs(of)
    cores = []
    for core in range(min(device.workers, len(every))):
        # Neighbouring tiles go to different cores, as `for (tile = core; ...; tile += workers)` in the text of a core.
        mine = every[core :: device.workers]
        code: list[Instruction] = []

        def fetch(region: Region, copy: int, code: list[Instruction] = code) -> None:
            for n, (node, (reach, outside)) in enumerate(fields.items()):
                code.append(Get(f"in{n}_{copy}", node, _grown(region, reach), outside))

        for n, region in enumerate(mine):
            copy = n % 2 if twice else 0
            if not twice or n == 0:
                fetch(region, copy)
            if twice and n + 1 < len(mine):
                # Fetch the next tile before waiting for this one: it comes while this one is computed.
                fetch(mine[n + 1], (n + 1) % 2)
            code += [Wait(f"in{k}_{copy}") for k in range(len(fields))]
            buffer_names = {node: f"in{k}_{copy}" for k, node in enumerate(fields)}
            for k, (row, needed) in enumerate(zip(of.rows, _needed(of, region), strict=True)):
                if row.stage is None:
                    continue
                reads = tuple((read.field, buffer_names[read.field]) for read in row.stage.reads())
                code.append(Compute(f"stage{k}", row.stage, needed, tuple(dict.fromkeys(reads))))
                buffer_names[row.stage.node] = f"stage{k}"
                if row.output:
                    # Only the tile's own region goes to memory, cut at the array's end; its border belongs to other
                    # tiles.
                    mine_only = tuple((a, min(b, size)) for (a, b), size in zip(region, sizes[row.source], strict=True))
                    if all(a < b for a, b in mine_only):
                        code.append(Store(f"stage{k}", row.source, mine_only))
        cores.append(Core(code=tuple(code)))
    return ManyCore(
        of=of, device=device, cores=tuple(cores), places=_places(of, tile, twice), tile=tile, twice=twice
    )  # fmt: skip


# ---- playing
def play(programs: list[ManyCore], stencil: Stencil, inputs: list[Tensor]) -> PlayResult:
    """The outputs for these inputs by the programs of all cores, held to the device; PlayError where it could not."""
    arrays = {node: _flat(one) for node, one in zip(stencil.inputs, inputs, strict=True)}
    played = PlayResult()
    for part in programs:
        for one in part.of.stencil.stages:
            if any(one.node is node for node in part.of.stencil.outputs):
                arrays[one.node] = torch.full(one.sizes, float("nan"), dtype=one.dtype)
        longest = 0.0
        for core in part.cores:
            longest = max(longest, _core(part, core, arrays, played))
        played.seconds += longest
    for node in stencil.outputs:
        played.outputs.append(arrays[node].reshape(node.meta["val"].shape))
    return played


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape([size for size in tensor.shape if size > 1])


def _core(part: ManyCore, core: Core, arrays: dict[Any, Tensor], played: PlayResult) -> float:
    """Runs one core's program and returns its seconds."""
    device = part.device
    assert device.dma is not None
    local: dict[str, tuple[Region, Tensor]] = {}
    coming: dict[str, float] = {}
    # now: the core's clock; dma: when the engine is free. Transfers follow each other on one engine.
    now = dma = 0.0
    # All cores transfer at the same time.
    bandwidth = device.memory_bandwidth / len(part.cores)
    for place, size in part.places.values():
        if place + size > device.levels[0].size:
            raise PlayError(f"{place + size} B in a scratchpad of {device.levels[0].size} B")
        played.most_bytes = max(played.most_bytes, place + size)
    for one in core.code:
        if isinstance(one, Wait):
            now = max(now, coming.pop(one.buffer, now))
            continue
        if isinstance(one, Compute):
            # Reading a buffer before its Wait is the bug that double buffering invites: it is an error here.
            late = [name for _, name in one.reads if name in coming]
            if late:
                raise PlayError(f"{late[0]} is read before it has come")
            local[one.buffer] = (one.region, _computed(part, one, local, arrays))
            _fits(part, one.buffer, local[one.buffer][1])
            now += _work_s(one.stage, one.region, device)
            continue
        array = arrays[one.array]
        if isinstance(one, Get):
            if one.buffer in coming:
                raise PlayError(f"{one.buffer} is fetched twice")
            window = _window(array, one.region, one.outside)
            local[one.buffer] = (one.region, window)
            _fits(part, one.buffer, window)
            moved = window.numel() * window.element_size()
        else:
            region, values = local[one.buffer]
            cut = tuple(slice(a - low, b - low) for (a, b), (low, _) in zip(one.region, region, strict=True))
            target = tuple(slice(a, b) for a, b in one.region)
            if any(a < 0 or b > size for (a, b), size in zip(one.region, array.shape, strict=True)):
                raise PlayError("a result outside its array")
            array[target] = values[cut].to(array.dtype)
            moved = values[cut].numel() * array.element_size()
        dma = max(dma, now) + device.dma.latency + moved / bandwidth
        if isinstance(one, Get):
            coming[one.buffer] = dma
        played.moved_bytes += moved
        played.transfers += transfers(one.region, array.element_size(), device.dma.largest)
    return max(now, dma)


def _fits(part: ManyCore, buffer: str, values: Tensor) -> None:
    if values.numel() * ITEM[{torch.float64: "D"}.get(values.dtype, "F")] > part.places[buffer][1]:
        raise PlayError(f"{buffer} is larger than its place")


def _window(array: Tensor, region: Region, outside: float) -> Tensor:
    """A region of an array as a tensor, of which some may lie outside."""
    out = torch.full([b - a for a, b in region], outside, dtype=array.dtype) if array.is_floating_point() else None
    if out is None:
        raise UnfitError("a field of no floats in a scratchpad")
    inside = [(max(a, 0), min(b, size)) for (a, b), size in zip(region, array.shape, strict=True)]
    if all(a < b for a, b in inside):
        target = tuple(slice(a - low, b - low) for (a, b), (low, _) in zip(inside, region, strict=True))
        out[target] = array[tuple(slice(a, b) for a, b in inside)]
    return out.float() if array.dtype == torch.bfloat16 else out


def _computed(
    part: ManyCore, one: Compute, local: dict[str, tuple[Region, Tensor]], arrays: dict[Any, Tensor]
) -> Tensor:
    """A stage over a region, from buffers alone; outside its own domain stands what others read there."""
    stage, buffers = one.stage, dict(one.reads)

    def read(what: Read) -> Tensor:
        region, values = local[buffers[what.field]]
        cut = []
        for (a, b), (low, high), by in zip(one.region, region, what.shift, strict=True):
            if a + by < low or b + by > high:
                raise PlayError(f"{stage.node} reads [{a + by}, {b + by}) of a buffer of [{low}, {high})")
            cut.append(slice(a + by - low, b + by - low))
        return values[tuple(cut)]

    def factor(what: Factor) -> Any:
        weight = arrays[what.weight].reshape(-1)
        if not what.by_channel:
            return weight[what.element]
        return weight[what.element + one.region[what.dim][0] * what.by_channel]

    computed = value_of(stage, read, factor).expand([b - a for a, b in one.region]).clone()
    if stage.box is not None:
        assert stage.base is not None
        computed = torch.where(_mask(one.region, stage.box), computed, read(stage.base).to(computed.dtype))
    row = next(row for row in part.of.rows if row.source is stage.node)
    if row.outside is not None:
        inside = _mask(one.region, tuple((0, size) for size in stage.sizes))
        computed = torch.where(inside, computed, torch.tensor(float(row.outside), dtype=computed.dtype))
    return computed


def _mask(region: Region, box: Region) -> Tensor:
    mask = torch.ones([b - a for a, b in region], dtype=torch.bool)
    for dim, ((a, b), (low, high)) in enumerate(zip(region, box, strict=True)):
        at = torch.arange(a, b)
        shape = [1] * len(region)
        shape[dim] = b - a
        mask = mask & ((at >= low) & (at < high)).reshape(shape)
    return mask


# ---- the C of a core
C_TYPES = {"F": "float", "D": "double", "L": "long long", "B": "int"}
FUNCTIONS = {
    "abs": "fabs", "nearest": "nearbyint", "fused": "fma", "maximum": "larger", "minimum": "smaller",
    **{name: name for name in "sigmoid exp log sqrt erf sin cos floor ceil trunc tanh expm1 log1p pow".split()},
}  # fmt: skip
"""Maps an operation to its name in the C of doubles; of floats it ends with f."""
HEAD = """\
#include <math.h>

// What the device's runtime gives. A region is its first place and its count by dim; arrays and buffers lie in the
// order of their dims, without dims of size 1.
extern char scratchpad[];
// Fetches a region of an array to a buffer, with `outside` where there is no array.
void dma_get(void* to, const void* from, int item, int rank, const int* sizes, const int* first, const int* count,
             double outside, int copy);
// Waits until all that was fetched with `copy` has come.
void dma_wait(int copy);
// Writes a region of a buffer, as far as it lies in the array, and returns when it is there. The buffer holds
// `held_count` places from `held_first` on.
void dma_put(const void* from, void* to, int item, int rank, const int* sizes, const int* first, const int* count,
             const int* held_first, const int* held_count);
// What is not a number is the larger and the smaller of any two.
static inline float largerf(float a, float b) { return a != a || a > b ? a : b; }
static inline double larger(double a, double b) { return a != a || a > b ? a : b; }
static inline float smallerf(float a, float b) { return a != a || a < b ? a : b; }
static inline double smaller(double a, double b) { return a != a || a < b ? a : b; }
static inline float sigmoidf(float x) { return 1 / (1 + expf(-x)); }
static inline double sigmoid(double x) { return 1 / (1 + exp(-x)); }
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """A buffer in the text: its name, and its region from the tile's corner on."""

    name: str
    region: Region

    def at(self, shift: tuple[int, ...]) -> str:
        """The element at the point of the loops plus a shift."""
        text = "0"
        for d, ((low, high), by) in enumerate(zip(self.region, shift, strict=True)):
            own = f"(i{d} - t{d} + {by - low})"
            text = own if d == 0 else f"({text} * {high - low} + {own})"
        return f"{self.name}[{text}]"


def text(programs: list[ManyCore]) -> str:
    """The C of each part: what every core runs, with its own number. UnfitError for a type or an operation that it
    does not have."""
    return HEAD + "\n" + "\n\n".join(_part_text(part, n) for n, part in enumerate(programs)) + "\n"


def _c_type(dtype: torch.dtype) -> str:
    if dtype not in (torch.float32, torch.float64):
        raise UnfitError(f"a field of {dtype} in the text for a scratchpad, which has float and double")
    return C_TYPES[kind_of(dtype)]


def _ints(values: Iterable[int | str]) -> str:
    return f"(const int[]){{{', '.join(map(str, values))}}}"


def _part_text(part: ManyCore, number: int) -> str:
    of, fields = part.of, _inputs(part.of)
    names = {node: f"x{n}" for n, node in enumerate(of.stencil.inputs)}
    names |= {node: f"y{n}" for n, node in enumerate(of.stencil.outputs)}
    types = {node: _c_type(node.meta["val"].dtype) for node in of.stencil.inputs}
    types |= {stage.node: _c_type(stage.dtype) for stage in of.stencil.stages}
    arguments = [f"const {types[node]}* x{n}" for n, node in enumerate(of.stencil.inputs)]
    arguments += [f"{types[node]}* y{n}" for n, node in enumerate(of.stencil.outputs)]
    held_bytes = sum(size for _, size in part.places.values())
    lines = [f"// {part.device.name}: tiles of {' x '.join(map(str, part.tile))}, {held_bytes} B",
             f"void part{number}(int core, {', '.join(arguments)}) {{"]  # fmt: skip
    copies = range(1 + part.twice)
    of_buffer = {f"in{n}_{copy}": types[node] for n, node in enumerate(fields) for copy in copies}
    of_buffer |= {f"stage{n}": types[row.source] for n, row in enumerate(of.rows) if row.stage is not None}
    for name, (at, size) in part.places.items():
        lines.append(f"    {of_buffer[name]}* const {name} = ({of_buffer[name]}*)(scratchpad + {at});  // {size} B")
    count = [-(-max(s.sizes[d] for s in of.stencil.stages) // step) for d, step in enumerate(part.tile)]
    lines.append(f"    for (int tile = core; tile < {prod(count)}; tile += {part.device.workers}) {{")
    lines += [f"        {line}" for line in _corner("tile", "t", count, part.tile)]
    workers = part.device.workers
    if part.twice:
        lines.append(f"        const int copy = tile / {workers} % 2, next = tile + {workers};")
        first, later = _gets(part, names, "t", "copy"), _gets(part, names, "n", "1 - copy")
        lines.append("        if (tile == core) {")
        lines += [f"            {line}" for line in first]
        lines.append("        }")
        lines.append(f"        if (next < {prod(count)}) {{")
        lines += [f"            {line}" for line in [*_corner("next", "n", count, part.tile), *later]]
        lines.append("        }")
        lines.append("        dma_wait(copy);")
    else:
        lines += [f"        {line}" for line in _gets(part, names, "t", "0")]
        lines.append("        dma_wait(0);")
    for n, node in enumerate(fields):
        which = f"copy ? in{n}_1 : in{n}_0" if part.twice else f"in{n}_0"
        lines.append(f"        const {types[node]}* const in{n} = {which};")
    region = tuple((0, step) for step in part.tile)
    needed_regions = _needed(of, region)
    held = {
        node: _Held(name=f"in{n}", region=_grown(region, reach)) for n, (node, (reach, _)) in enumerate(fields.items())
    }
    held |= {
        row.source: _Held(name=f"stage{n}", region=needed_regions[n])
        for n, row in enumerate(of.rows)
        if row.stage is not None
    }
    for row, needed in zip(of.rows, needed_regions, strict=True):
        if row.stage is None:
            continue
        depth = 2
        for dim, (a, b) in enumerate(needed):
            lines.append(f"{'    ' * depth}for (int i{dim} = t{dim} + {a}; i{dim} < t{dim} + {b}; i{dim}++)")
            depth += 1
        lines.append(f"{'    ' * depth}{_point(row.stage, row.outside, held, names)}")
        if row.output:
            own = held[row.source]
            places = [
                _ints(row.stage.sizes), _ints(f"t{d}" for d in range(len(part.tile))), _ints(part.tile),
                _ints(f"t{d} + {low}" for d, (low, _) in enumerate(own.region)), _ints(b - a for a, b in own.region),
            ]  # fmt: skip
            item = ITEM[kind_of(row.stage.dtype)]
            lines.append(
                f"        dma_put({own.name}, {names[row.source]}, {item}, {len(part.tile)}, {', '.join(places)});"
            )
    return "\n".join([*lines, "    }", "}"])


def _corner(tile: str, name: str, count: list[int], step: tuple[int, ...]) -> list[str]:
    """Lines that compute where a tile begins, by dim."""
    lines, rest = [], tile
    for dim in reversed(range(len(step))):
        lines.append(f"const int {name}{dim} = {rest} % {count[dim]} * {step[dim]};")
        rest = f"{rest} / {count[dim]}"
    return lines


def _gets(part: ManyCore, names: dict[Any, str], corner: str, copy: str) -> list[str]:
    """Lines that fetch the windows of a tile."""
    lines = []
    region = tuple((0, step) for step in part.tile)
    for n, (node, (reach, outside)) in enumerate(_inputs(part.of).items()):
        window = _grown(region, reach)
        value = node.meta["val"]
        places = [
            _ints(size for size in value.shape if size > 1),
            _ints(f"{corner}{d} + {low}" for d, (low, _) in enumerate(window)),
            _ints(b - a for a, b in window),
        ]
        buffer = f"in{n}_0" if copy == "0" else f"{copy} ? in{n}_1 : in{n}_0"
        item = ITEM[kind_of(value.dtype)]
        rest = f"{', '.join(places)}, {_number(repr(outside), 'D')}, {copy}"
        lines.append(f"dma_get({buffer}, {names[node]}, {item}, {len(window)}, {rest});")
    return lines


def _number(attr: str, kind: str) -> str:
    """A constant in C."""
    if kind in ("L", "B"):
        return {"True": "1", "False": "0"}.get(attr, attr)
    special = {"True": "1.0", "False": "0.0", "inf": "INFINITY", "-inf": "-INFINITY", "nan": "NAN"}
    plain = special.get(attr, attr)
    return plain if kind == "D" or "N" in plain else f"{plain}f"


def _point(stage: Stage, outside: Any, held: dict[Any, _Held], names: dict[Any, str]) -> str:
    """The statement that computes a stage's value at one point. outside: what others read beyond its edges, None where
    they do not."""
    texts: dict[int, str] = {}
    for i in stage.values:
        ins = stage.body.code[i]
        args, c_type = [texts[a] for a in ins.args], C_TYPES[ins.kind]
        if ins.op == "load":
            source = stage.body.inputs[ins.attr].node
            if isinstance(source, Read):
                texts[i] = held[source.field].at(source.shift)
            else:
                along = f" + i{source.dim} * {source.by_channel}" if source.by_channel else ""
                texts[i] = f"{names[source.weight]}[{source.element}{along}]"
        elif ins.op == "const":
            texts[i] = f"({_number(ins.attr, ins.kind)})"
        elif ins.op in {**BINARY, **COMPARE}:
            texts[i] = f"({args[0]} {({**BINARY, **COMPARE})[ins.op]} {args[1]})"
        elif ins.op == "select":
            texts[i] = f"({args[0]} ? {args[1]} : {args[2]})"
        elif ins.op == "neg":
            texts[i] = f"(-{args[0]})"
        elif ins.op == "not":
            texts[i] = f"({'!' if ins.kind == 'B' else '~'}{args[0]})"
        elif ins.op == "cast":
            texts[i] = f"({args[0]} != 0)" if ins.kind == "B" else f"(({c_type}){args[0]})"
        elif ins.op in FUNCTIONS and ins.kind in "FD":
            texts[i] = f"{FUNCTIONS[ins.op]}{'f' if ins.kind == 'F' else ''}({', '.join(args)})"
        else:
            raise UnfitError(f"{ins.op} of {c_type} in the text for a scratchpad")
    value = texts[stage.value]
    if stage.box is not None:
        assert stage.base is not None
        inside = " && ".join(f"i{d} >= {low} && i{d} < {high}" for d, (low, high) in enumerate(stage.box))
        value = f"({inside} ? {value} : {held[stage.base.field].at(stage.base.shift)})"
    if outside is not None:
        inside = " && ".join(f"i{d} >= 0 && i{d} < {size}" for d, size in enumerate(stage.sizes))
        value = f"{inside} ? {value} : {_number(repr(float(outside)), kind_of(stage.dtype))}"
    return f"{held[stage.node].at((0,) * len(stage.sizes))} = {value};"
