"""Memory of every rank class: by class of what is held, the peak's moment, and whether it fits.

What stays between steps comes from the stage's parameters and ZeRO; what comes and goes from the Program in issue
order, which is what a caching allocator sees. Peak bytes are reserved bytes (blocks and segments rounded as the
allocator does) plus what lies outside it. Leaves out host memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnomon.prediction.layer import LayerPrice
from gnomon.prediction.stage import StagePrice
from gnomon.prediction.step import Pricing
from gnomon.prices.allocator import device_overhead, reserved_estimate
from gnomon.program import BufferMoves, Program, Structure, buffer_moves, moves


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Memory of the ranks of one class."""

    rank_class: int
    ranks: tuple[int, ...]
    """Ranks of the job."""
    device: str
    by_class: Mapping[str, int]
    """parameters, gradients, master, states, activations, logits, temporary, communication, overhead -> bytes at the
    peak."""
    allocated_bytes: int
    """Peak of what tensors take."""
    peak_bytes: int
    """Reserved by the allocator and outside it."""
    limit_bytes: int
    """Memory of the device."""
    peak_at: str
    """`backward of unit 2`."""

    @property
    def fits(self) -> bool:
        """Whether the peak is within the device's memory."""
        return self.peak_bytes <= self.limit_bytes

    @property
    def verdict(self) -> str:
        """`fits: 61.4 of 80 GiB (rank 3, backward of unit 2, logits 9.8)`."""
        largest = max((n for n in self.by_class if n not in ("parameters", "overhead")), key=lambda n: self.by_class[n])
        part = f"{largest} {self.by_class[largest] / 2**30:.1f}"
        word = "fits" if self.fits else "does not fit"
        size = f"{self.peak_bytes / 2**30:.1f} of {self.limit_bytes / 2**30:.4g} GiB"
        return f"{word}: {size} (rank {self.ranks[0]}, {self.peak_at}, {part})"

    def to_mapping(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "rank_class": self.rank_class,
            "ranks": list(self.ranks),
            "device": self.device,
            "by_class_bytes": dict(self.by_class),
            "allocated_bytes": self.allocated_bytes,
            "peak_bytes": self.peak_bytes,
            "limit_bytes": self.limit_bytes,
            "fits": self.fits,
            "peak_at": self.peak_at,
        }


_WORDS = {
    "F": "forward",
    "C": "forward",
    "R": "recompute",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "OPT": "optimizer step",
    "UNSHARD": "gather of parameters",
    "REDUCE_GRAD": "reduction of gradients",
}


def rank_memory(structure: Structure, pricing: Pricing, count: int) -> tuple[tuple[RankMemory, ...], dict[str, float]]:
    """Memory of every rank class, and the sizes of the Program's buffers that it follows from."""
    program, deps = structure.program, structure.deps
    sizes = buffer_sizes(pricing, count)
    change = moves(program, deps, sizes)
    extra = _temporaries(program, pricing)
    during = np.cumsum(change.allocated - change.freed) + change.freed + extra
    changes = buffer_moves(program, deps, sizes)
    names = [buffer.name for buffer in program.buffers]
    found = []
    for cls in range(program.num_classes):
        low, high = int(program.class_ptr[cls]), int(program.class_ptr[cls + 1])
        row = low + int(np.argmax(during[low:high]))
        stages = tuple(dict.fromkeys(pricing.blocks[b][0] for b in np.unique(program.stage[low:high]).tolist()))
        held = dict(zip(names, _held(changes, low, row, len(names)), strict=True))
        kind, unit = program.kinds[program.kind[row]].name, int(program.unit[row])
        moment = _WORDS.get(kind, kind.lower()) + (f" of unit {unit}" if unit >= 0 else "")
        found.append(_rank(pricing, cls, stages, held, int(extra[row]), moment))
    return tuple(found), sizes


def _temporaries(program: Program, pricing: Pricing) -> NDArray[np.float64]:
    """[rows] bytes alive only inside an action: gradients of one op, and what recomputation makes again."""
    table = np.zeros((len(program.kinds), program.num_stages))
    for k, kind in enumerate(program.kinds):
        for block, (stage, index) in enumerate(pricing.blocks):
            price = pricing.stages[stage]
            layers = [price.order[index]] if index >= 0 else [layer for layer, _ in price.layers]
            if kind.name in ("B", "I", "R"):
                table[k, block] = max(layer.transient_bytes + layer.remade_bytes for layer in layers)
            elif kind.name in ("F", "C"):
                table[k, block] = max(layer.output_bytes for layer in layers)
    found: NDArray[np.float64] = table[program.kind, program.stage]
    return found


def _held(changes: BufferMoves, first: int, row: int, count: int) -> list[float]:
    """Bytes of each class of buffer during `row`, of the rank class whose rows begin at `first`."""
    taken = (changes.bytes > 0) & (changes.row >= first) & (changes.row <= row)
    given = (changes.bytes < 0) & (changes.row >= first) & (changes.row < row)
    mine = taken | given
    total: list[float] = np.bincount(changes.buffer[mine], changes.bytes[mine], count).tolist()
    return total


def _rank(
    pricing: Pricing, cls: int, stages: tuple[int, ...], held: Mapping[str, float], temporary: int, moment: str
) -> RankMemory:
    here = [pricing.stages[s] for s in stages]
    by_class = {"parameters": 0, "gradients": 0, "master": 0, "states": 0}
    for stage in here:
        for name, size in stage.static_bytes().items():
            by_class[name] += size
    by_class["parameters"] += int(held.get("P", 0.0))
    by_class["gradients"] += int(held.get("G", 0.0))
    logits = sum(_logits(stage) for stage in here) if held.get("S", 0.0) else 0
    by_class["activations"] = int(held.get("S", 0.0)) - logits + int(held.get("X", 0.0))
    by_class["logits"] = logits
    by_class["communication"] = int(sum(held.get(name, 0.0) for name in ("Y", "DY", "DX")))
    by_class["temporary"] = temporary
    allocated = sum(by_class.values())
    device = here[0].device
    reserved = int(reserved_estimate(allocated, max(by_class["temporary"], 1), pricing.stack))
    by_class["overhead"] = reserved - allocated + int(device_overhead(device, pricing.stack, len(here[0].links)))
    ranks = tuple(dict.fromkeys(rank for stage in here for rank in stage.ranks))
    return RankMemory(
        rank_class=cls,
        ranks=ranks,
        device=device.name,
        by_class=by_class,
        allocated_bytes=allocated,
        peak_bytes=sum(by_class.values()),
        limit_bytes=device.memory_bytes,
        peak_at=moment,
    )


def _logits(stage: StagePrice) -> int:
    return sum(k.bytes for price, layers in stage.layers for k in price.kept if k.is_logits for _ in layers)


def buffer_sizes(pricing: Pricing, count: int) -> dict[str, float]:
    """Bytes of the Program's buffers by label.

    S is what the layers behind a stage keep; X, Y, DX, DY what travels; P and G are the gathered parameters and whole
    gradients of a block under ZeRO 3, and nothing otherwise (they are then part of what stays between steps).
    """
    sizes: dict[str, float] = {name: 0.0 for name in ("X", "S", "Y", "DY", "DX", "P", "G", "PS", "GS", "M", "H")}
    sharded = pricing.plan.optimizer.zero == 3
    for block, (stage, index) in enumerate(pricing.blocks):
        price = pricing.stages[stage]
        layers = [(price.order[index], 1)] if index >= 0 else [(p, len(ls)) for p, ls in price.layers]
        sizes[f"{block}S"] = float(sum(kept_bytes(layer) * times for layer, times in layers))
        first = price.order[max(index, 0)]
        last = price.order[index if index >= 0 else -1]
        sizes[f"{block}X"] = sizes[f"{block}DX"] = float(first.input_bytes)
        sizes[f"{block}Y"] = sizes[f"{block}DY"] = float(last.output_bytes)
        if sharded and index >= 0:
            gathered = [c for c in price.collectives(layers[0][0]) if c.when == "before_forward"]
            reduced = [c for c in price.collectives(layers[0][0]) if c.kind == "reduce_scatter"]
            sizes[f"{block}P"] = float(sum(c.bytes for c in gathered))
            sizes[f"{block}G"] = float(sum(c.bytes for c in reduced))
    return sizes


def kept_bytes(layer: LayerPrice) -> int:
    """Bytes that a layer keeps for its backward, its input included (the layer before does not keep its output)."""
    return sum(kept.bytes for kept in layer.kept)
