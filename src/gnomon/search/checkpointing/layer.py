"""One layer: every useful trade of kept bytes for seconds of recomputation.

`layer_ways(context)` lowers a budget of bytes step by step, and for each solves an integer programme: a yes-or-no
variable for each tensor (kept) and for each op (run again). A tensor that backward reads is kept or its op is run
again, and what an op run again reads is kept or recomputed too. Leaves out which layer takes which way
(`checkpointing.plan`), and offloading.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest

from gnomon.graph import storages
from gnomon.plans.parts import Action
from gnomon.plans.saving import LayerSaving
from gnomon.prediction.layer import LayerPricing, layer_pricing
from gnomon.prediction.layer_types import LayerPrice, LocalContext
from gnomon.search.checkpointing.milp import Programme

RESOLUTION = 1 / 128
"""Share of what a layer keeps by which the budget shrinks, at least, from one way to the next."""

TIE = 1e-4
"""Weight of bytes beside seconds, both as shares of the most: of ways that take as long the one that keeps least."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Way:
    """What a layer keeps."""

    kept: tuple[str, ...]
    """Tensors that are kept of those that the layer makes; its input is kept anyway. All others are recomputed."""
    everything: bool
    """Nothing is recomputed."""
    price: LayerPrice
    """With it."""

    @property
    def bytes(self) -> int:
        """Kept of one microbatch, the layer's input too."""
        return sum(kept.bytes for kept in self.price.kept)

    @property
    def seconds(self) -> float:
        """To recompute the rest, once."""
        return self.price.recompute.device_s

    @property
    def policy(self) -> tuple[tuple[str, Action], ...]:
        """For `graph.saved`."""
        return _policy(frozenset(self.kept))


@lru_cache(maxsize=64)
def layer_ways(context: LocalContext, resolution: float = RESOLUTION) -> tuple[Way, ...]:
    """Ways from the most bytes to the fewest, each the fastest with so few bytes; the first keeps everything.

    resolution: how far apart they are, as a share of all bytes; 0 for every way there is. InputError without scipy.
    """
    ways = tuple(_ways(_Layer(context), resolution))
    return tuple(way for way, less in zip_longest(ways, ways[1:]) if less is None or less.seconds > way.seconds)


def _ways(layer: _Layer, resolution: float) -> Iterator[Way]:
    yield layer.everything()
    least, size = max(1, int(resolution * layer.most)), layer.most
    while size > 0:
        kept = layer.fastest(max(size - least, 0))
        if kept is None:
            return
        way = layer.way(kept)
        size = sum(layer.sizes[name] for name in way.kept)
        yield way


def _policy(kept: frozenset[str]) -> tuple[tuple[str, Action], ...]:
    """Everything is recomputed but what is named."""
    return (*((name, "keep") for name in sorted(kept)), ("*", "recompute"))


class _Layer:
    """The programme of one layer."""

    def __init__(self, context: LocalContext) -> None:
        self.pricing: LayerPricing = layer_pricing(context)
        back, dtypes = self.pricing.scope.back, self.pricing.scope.dtypes
        self.block = back.forward
        self.roots = storages(self.block, dtypes)
        self.maker = {name: op for op in self.block.ops for name in op.outputs}
        self.seconds = {op.path: self.pricing.again([op.path]).device_s for op in self.block.ops}
        whole = self.everything()
        needed = {kept.tensor: kept.bytes for kept in whole.price.kept}
        self.inputs_kept = {name for name in needed if name in self.block.inputs}
        self.needed = tuple(name for name in needed if name not in self.block.inputs)
        self.sizes = {name: needed[name] for name in self.needed}
        for tensor in self.block.tensors:
            if tensor.kind == "activation" and self.roots[tensor.name] == tensor.name and tensor.name not in needed:
                self.sizes[tensor.name] = self.pricing.memory.bytes_of(tensor)
        self.most = sum(self.sizes[name] for name in self.needed)

    def everything(self) -> Way:
        """Nothing is recomputed."""
        price = self.pricing.price(LayerSaving(policy=(), input="keep"), whole=False)
        return Way(kept=(), everything=True, price=price)

    def way(self, kept: frozenset[str]) -> Way:
        """These are kept, as far as backward or what is run again reads them; the block's inputs are anyway."""
        saving = LayerSaving(policy=_policy(kept - {*self.block.inputs}), input="keep")
        price = self.pricing.price(saving, whole=False)
        own = tuple(sorted(entry.tensor for entry in price.kept if entry.tensor not in self.block.inputs))
        return Way(kept=own, everything=False, price=price)

    def fastest(self, budget: int) -> frozenset[str] | None:
        """Tensors of `sizes` to keep, within as many bytes, so that recomputation takes least."""
        total, most = max(sum(self.seconds.values()), 1e-30), max(self.most, 1)
        programme = Programme()
        keep = {name: programme.variable(TIE * size / most) for name, size in self.sizes.items()}
        again = {op.path: programme.variable(self.seconds[op.path] / total) for op in self.block.ops}
        for name in self.needed:  # kept, or recomputed
            programme.at_most({keep[name]: -1, again[self.maker[name].path]: -1}, -1)
        for op in self.block.ops:  # what is run again reads what is kept or recomputed
            for name in dict.fromkeys(self.roots[name] for name in op.inputs):
                if self.block.tensor(name).kind != "activation" or name in self.inputs_kept:
                    continue
                factors = {again[op.path]: 1.0, keep[name]: -1.0}
                if name in self.maker:
                    factors[again[self.maker[name].path]] = -1.0
                programme.at_most(factors, 0)
        programme.at_most({keep[name]: size / most for name, size in self.sizes.items()}, budget / most)
        chosen = programme.solve()
        return None if chosen is None else frozenset(name for name, at in keep.items() if chosen[at])
