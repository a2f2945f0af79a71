"""How many steps of a stencil are computed together, and in which tiles: the least time that a device's description
foretells.

A tile of rows, what lies between and points is computed with a border that grows by every step (`Propagate` of the
tile graph: a stage's domain is what its users read). `foretold` prices one choice: bytes of memory, of the level that
holds the rings, and vector instructions, each with its border. `tiled(stencil, device)` tries depths of powers of two
and tiles that halve until their rings fit a level. Leaves out text.
Source: Welder (OSDI 2023) for widening tiles; MSC (ICPP 2021) for steps together; Roller (OSDI 2022) for few
candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from gnomon.compiler.stencil.lags import Pipeline, Place, parts, pipeline
from gnomon.compiler.stencil.stages import MANY, Read, Stencil, weighted
from gnomon.compiler.tiles.body import kind_of
from gnomon.compiler.tiles.device import DeviceDescription, Level
from gnomon.compiler.tiles.stages import COST

DEPTHS = (1, 2, 4, 8, 16, 32)
LOADED = 1.0
"""Vector instructions that a load takes where it crosses a line, as neighbours' do."""
BESIDE = 0.5
"""Of what is not the longest of memory, cache and arithmetic, what does not hide behind it."""
A_WALK = 90.0
"""Vector instructions to begin and end a row of points, measured from tiles of 256 to 4,096 points."""
BROKEN_S = 1e-7
"""That memory takes to begin a row of points which does not continue the one before it: its latency."""
A_TASK = 64
"""Rows of a band at least, so that what bands compute twice is little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    depth: int
    """Stages that are computed together."""
    size: Place
    """Rows, between and points of a task's results."""
    level: str
    """Where its rings lie."""
    ring_bytes: int
    """Of a task."""
    memory_s: float
    level_s: float
    compute_s: float

    @property
    def seconds(self) -> float:
        every = (self.memory_s, self.level_s, self.compute_s)
        return max(every) + BESIDE * (sum(every) - max(every))

    @property
    def bound(self) -> str:
        every = {"memory": self.memory_s, self.level: self.level_s, "compute": self.compute_s}
        return max(every, key=lambda name: every[name])


def borders(of: Pipeline) -> list[tuple[Place, Place]]:
    """Returns, for each row of a pipeline, how far before and after a task's results it is computed, along each dim."""
    out: list[tuple[Place, Place]] = [((0, 0, 0), (0, 0, 0))] * len(of.rows)
    for n in reversed(range(len(of.rows))):
        low, high = [0, 0, 0], [0, 0, 0]
        for user, shift in of.users[n]:
            for dim in range(3):
                # The user is computed from `low` before the tile on and reads at its own place plus the shift: a
                # negative shift reaches further before, a positive one further after.
                low[dim] = max(low[dim], out[user][0][dim] - shift[dim])
                high[dim] = max(high[dim], out[user][1][dim] + shift[dim])
        out[n] = ((low[0], low[1], low[2]), (high[0], high[1], high[2]))
    return out


def ring_bytes(of: Pipeline, size: Place, edges: list[tuple[Place, Place]]) -> int:
    """Bytes of rings of a task with results of that size."""
    total = 0
    for row, (low, high) in zip(of.rows, edges, strict=True):
        if row.ring and not row.ends:
            channels = 1 if of.stencil.channel is None or row.stage is None else row.stage.sizes[of.stencil.channel]
            total += row.ring * channels * (size[1] + low[1] + high[1]) * (size[2] + low[2] + high[2]) * _bytes(row)
    return total


def _bytes(row: object) -> int:
    stage = getattr(row, "stage", None)
    return 8 if stage is not None and kind_of(stage.dtype) == "D" else 4


def instructions(of: Pipeline, n: int) -> tuple[float, float]:
    """(vector instructions, loads and stores) of a vector of one row."""
    stage = of.rows[n].stage
    if stage is None:
        return 0.0, 0.0 if of.rows[n].ends else 2.0
    code = stage.body.code
    wide = 2.0 if kind_of(stage.dtype) == "D" else 1.0
    computed = sum(COST.get(code[i].op, 1) for i in stage.values if code[i].op not in ("load", "const"))
    reads = [(one, of.place(one.shift)) for _, one in stage.slots() if isinstance(one, Read)]
    # Rows of a block that read the same place share its load.
    loads = {(one.field, one.channel, at[0] + later, *at[1:]) for one, at in reads for later in range(of.block)}
    return wide * computed, wide * (LOADED * len(loads) / of.block + 1)


def foretold(of: Pipeline, size: Place, device: DeviceDescription, depth: int) -> Tile:
    """Prices tasks of that size for one part of the stencil."""
    edges = borders(of)
    tile_bytes = ring_bytes(of, size, edges)
    level = _level(device, tile_bytes)
    stage = of.stencil.stages[-1]
    whole = of.sizes(stage.sizes)
    batches = prod(stage.sizes[: of.first])
    workers = device.workers
    tasks = prod(-(-whole[dim] // size[dim]) for dim in range(3)) * batches
    made_s = level_s = 0.0
    for n, (low, high) in enumerate(edges):
        halo_factor = prod((size[dim] + low[dim] + high[dim]) / size[dim] for dim in range(3))
        vectors = prod(whole) * batches * halo_factor / device.vectors.lanes
        computed, moved = instructions(of, n)
        walks = prod(whole[:2]) * batches * halo_factor * -(-whole[2] // size[2])
        made_s += (vectors * computed + walks * A_WALK) / device.vectors.rate
        level_s += vectors * moved * device.vectors.lanes * 4 / level.bandwidth
    busiest = -(-tasks // workers) / tasks
    memory = 0.0
    for node in (*of.stencil.inputs, *of.stencil.outputs):
        value = node.meta["val"]
        memory += value.numel() * value.element_size()
    first = edges[0] if edges else ((0, 0, 0), (0, 0, 0))
    again = prod((size[dim] + first[0][dim] + first[1][dim]) / size[dim] for dim in range(1, 3))
    tiles = -(-whole[2] // size[2])
    broken_s = BROKEN_S * prod(whole[:2]) * batches * tiles / min(tasks, workers) if tiles > 1 else 0.0
    return Tile(
        depth=depth,
        size=size,
        level=level.name,
        ring_bytes=tile_bytes,
        memory_s=memory * again / device.memory_bandwidth + broken_s,
        level_s=level_s * busiest,
        compute_s=made_s * busiest,
    )


def _level(device: DeviceDescription, tile_bytes: int) -> Level:
    """The first level of which half holds a task's rings."""
    for level in device.levels:
        if 2 * tile_bytes <= level.size // (device.workers if level.shared else 1):
            return level
    return Level(name="memory", size=1 << 60, bandwidth=device.memory_bandwidth / device.workers)


def sizes(of: Pipeline, device: DeviceDescription) -> list[Place]:
    """Tiles of a part: whole rows of points, then halves, and halves of what lies between, by which rings fit."""
    whole = of.sizes(of.stencil.stages[-1].sizes)
    batches = prod(of.stencil.stages[-1].sizes[: of.first])
    # Two bands a worker, unless they would have fewer than A_TASK rows.
    rows = max(min(whole[0], A_TASK), -(-whole[0] * batches // (2 * device.workers)))
    rows = min(rows, whole[0])
    lanes = device.vectors.lanes
    points, between = [whole[2]], [whole[1]]
    while points[-1] > 16 * lanes:
        points.append(-(-points[-1] // 2 // lanes) * lanes)
    while between[-1] > 4:
        between.append(-(-between[-1] // 2))
    return [(rows, m, v) for m in between for v in points]


def block(stencil: Stencil) -> int:
    """Rows of each stage that are computed at a time, so that they share what they load: of one stage alone four, as
    each comes from memory once more for every block above or below it; eight where they share weights too and are
    many."""
    if all(weighted(one) for one in stencil.stages) and stencil.stages[0].sizes[-2:-1] >= (A_TASK,):
        return 8
    return 4 if len(stencil.stages) == 1 or max(len(one.reads()) for one in stencil.stages) >= MANY else 2


def tiled(stencil: Stencil, device: DeviceDescription) -> tuple[Tile, list[Tile]]:
    """(the best choice, the best of each depth): by the whole stencil's foretold seconds."""
    found = []
    most = len(stencil.stages)
    for depth in dict.fromkeys(min(depth, most) for depth in DEPTHS):
        cut = parts(stencil, depth)
        alike: dict[tuple[object, ...], Tile] = {}
        total: list[Tile] = []
        for part in cut:
            key = (len(part.stages), len(part.inputs), len(part.outputs), part.stages[0].sizes)
            if key not in alike:
                of = pipeline(part, block(part))
                alike[key] = min((foretold(of, size, device, depth) for size in sizes(of, device)), key=_seconds)
            total.append(alike[key])
        first = total[0]
        found.append(
            Tile(
                depth=depth,
                size=first.size,
                level=first.level,
                ring_bytes=first.ring_bytes,
                memory_s=sum(one.memory_s for one in total),
                level_s=sum(one.level_s for one in total),
                compute_s=sum(one.compute_s for one in total),
            )  # fmt: skip
        )
    return min(found, key=_seconds), found


def _seconds(tile: Tile) -> float:
    return tile.seconds
