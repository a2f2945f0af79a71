"""One layer: every useful trade of kept bytes for seconds of recomputation, and for bytes that wait on the host.

`layer_ways(context)` lowers a budget of bytes step by step, and for each solves an integer programme: a yes-or-no
variable for each tensor (kept), and for each op (run again). A tensor that backward reads is kept or its op is run
again, and what an op run again reads is kept or recomputed too. With `offload` a tensor may wait on the host instead,
and the same is done for several limits on the bytes that do. What copies to and from the host cost follows from what
runs beside them, so it is left to `checkpointing.plan`, as is which layer takes which way. The layer's input is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest

import numpy as np

from gnomon.graph import storages
from gnomon.plans.parts import Action
from gnomon.plans.saving import LayerSaving
from gnomon.prediction.layer import LayerPricing, layer_pricing
from gnomon.prediction.layer_types import LayerPrice, LocalContext
from gnomon.search.checkpointing.milp import Programme

RESOLUTION = 1 / 128
"""Share of what a layer keeps by which the budget shrinks, at least, from one way to the next."""

COARSER = 4
"""How many times farther apart ways with tensors on the host are."""

TIE = 1e-4
"""Weight of bytes beside seconds in the objective, both as shares of the layer's most: of ways that recompute as long,
the one that keeps least is chosen."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Way:
    """What a layer keeps between forward and backward, and what recomputing the rest takes."""

    saved_names: tuple[str, ...]
    """Tensors that are kept of those that the layer makes; its input is kept anyway. All others are recomputed. Empty
    where `everything` is kept."""
    away: tuple[str, ...] = ()
    """Tensors that wait on the host."""
    everything: bool
    """Whether everything is kept, so that nothing is recomputed."""
    price: LayerPrice
    """The layer's price with it."""

    @property
    def bytes(self) -> int:
        """Bytes kept on the device for one microbatch, the layer's input too."""
        return sum(tensor.bytes for tensor in self.price.saved)

    @property
    def offload_bytes(self) -> int:
        """Bytes of one microbatch that go to the host and come back."""
        return self.price.offloaded_bytes

    @property
    def seconds(self) -> float:
        """Seconds of recomputing the rest for one microbatch."""
        return self.price.recompute.device_s

    @property
    def policy(self) -> tuple[tuple[str, Action], ...]:
        """The policy in the words of `graph.saved`."""
        return _policy(frozenset(self.saved_names), frozenset(self.away))


@lru_cache(maxsize=64)
def layer_ways(
    context: LocalContext, resolution: float = RESOLUTION, offload: tuple[float, ...] = ()
) -> tuple[Way, ...]:
    """Ways from the most bytes to the fewest, each the fastest with so few bytes; the first keeps everything.

    resolution: how far apart they are, as a share of all bytes; 0 for every way there is. offload: shares of all bytes
    that may wait on the host; ways for each follow those where none does, COARSER times as far apart. Of these, only
    ways stay than which no other is as good in bytes, host bytes and seconds. InputError without scipy.
    """
    layer = _LayerProgramme(context)
    ways = tuple(_ways(layer, resolution))
    # A way is left out where the next, with fewer bytes, takes no longer.
    ways = tuple(way for way, less in zip_longest(ways, ways[1:]) if less is None or less.seconds > way.seconds)
    for share in offload:
        ways += tuple(_ways(layer, COARSER * resolution, int(share * layer.most)))[1:]
    return _undominated(ways) if offload else ways


def _undominated(ways: tuple[Way, ...]) -> tuple[Way, ...]:
    """The first way, and those than which no other is better in one of bytes, host bytes and seconds and as good in the
    others; of equal ones the first."""
    table = np.array([(way.bytes, way.offload_bytes, way.seconds) for way in ways])
    out = []
    for at, way in enumerate(ways):
        no_worse = (table <= table[at]).all(axis=1)
        better = no_worse & (table < table[at]).any(axis=1)
        if at == 0 or not (better.any() or no_worse[:at].any()):
            out.append(way)
    return tuple(out)


def _ways(layer: _LayerProgramme, resolution: float, away_budget: int = 0) -> Iterator[Way]:
    """Yields the fastest way for budgets of fewer and fewer bytes. away_budget: bytes that may wait on the host."""
    yield layer.everything()
    # At least one byte, so that every budget is below the one before.
    step, size = max(1, int(resolution * layer.most)), layer.most
    while size > 0:
        # From what the last way kept, which may be far less than its budget.
        chosen = layer.fastest(max(size - step, 0), away_budget)
        if chosen is None:
            return
        way = layer.way(*chosen)
        size = sum(layer.sizes[name] for name in way.saved_names)
        yield way


def _policy(saved_names: frozenset[str], away: frozenset[str]) -> tuple[tuple[str, Action], ...]:
    """A policy by which what is named is kept, or waits on the host, and everything else is recomputed."""
    named: list[tuple[str, Action]] = [
        (name, "offload" if name in away else "keep") for name in sorted(saved_names | away)
    ]
    return (*named, ("*", "recompute"))


class _LayerProgramme:
    """The integer programme of one layer.

    seconds: of running each op again, by its path. needed: the tensors that backward reads and an op of the layer
    makes; most: their bytes. sizes: bytes of these and of all other activations that a recomputation may read. Views
    count as the tensor that they are of (`roots`).
    """

    def __init__(self, context: LocalContext) -> None:
        self.pricing: LayerPricing = layer_pricing(context)
        back, dtypes = self.pricing.scope.back, self.pricing.scope.dtypes
        self.block = back.forward
        self.roots = storages(self.block, dtypes)
        self.maker = {name: op for op in self.block.ops for name in op.outputs}
        self.seconds = {op.path: self.pricing.again([op.path]).device_s for op in self.block.ops}
        whole = self.everything()
        needed = {saved_tensor.tensor: saved_tensor.bytes for saved_tensor in whole.price.saved}
        self.inputs_kept = {name for name in needed if name in self.block.inputs}
        self.needed = tuple(name for name in needed if name not in self.block.inputs)
        self.sizes = {name: needed[name] for name in self.needed}
        for tensor in self.block.tensors:
            if tensor.is_activation and self.roots[tensor.name] == tensor.name and tensor.name not in needed:
                self.sizes[tensor.name] = self.pricing.memory.bytes_of(tensor)
        self.most = sum(self.sizes[name] for name in self.needed)

    def everything(self) -> Way:
        """Keeps everything: nothing is recomputed."""
        price = self.pricing.price(LayerSaving(policy=(), input="keep"), whole=False)
        return Way(saved_names=(), everything=True, price=price)

    def way(self, saved_names: frozenset[str], away: frozenset[str] = frozenset()) -> Way:
        """The way that keeps these tensors, and has `away` of them on the host, as far as backward or what is run again
        reads them; the block's inputs are kept anyway."""
        inputs = {*self.block.inputs}
        saving = LayerSaving(policy=_policy(saved_names - inputs, away), input="keep")
        price = self.pricing.price(saving, whole=False)
        own = tuple(sorted(entry.tensor for entry in price.saved if entry.tensor not in inputs))
        return Way(saved_names=own, away=tuple(sorted(away)), everything=False, price=price)

    def fastest(self, budget: int, away_budget: int = 0) -> tuple[frozenset[str], frozenset[str]] | None:
        """The tensors of `sizes` to keep, of `budget` bytes at most, and those to send to the host, of `away_budget` at
        most, for which recomputation takes least; None where no choice fits. Seconds and bytes enter as shares of the
        whole, so that coefficients are near 1."""
        # Never 0, since coefficients are divided by them.
        total, most = max(sum(self.seconds.values()), 1e-30), max(self.most, 1)
        programme = Programme()
        keep = {name: programme.variable(TIE * size / most) for name, size in self.sizes.items()}
        again = {op.path: programme.variable(self.seconds[op.path] / total) for op in self.block.ops}
        may_go = self.sizes if away_budget else ()
        # Dearer than keeping, so that nothing goes to the host where the budget has room for it.
        away = {name: programme.variable(2 * TIE * self.sizes[name] / most) for name in may_go}
        for name in self.needed:  # keep + again(its op) + away >= 1
            there = {away[name]: -1.0} if away else {}
            programme.at_most({keep[name]: -1.0, again[self.maker[name].path]: -1.0, **there}, -1)
        for op in self.block.ops:  # again(op) <= keep + again(its op) + away, for each tensor that the op reads
            for name in dict.fromkeys(self.roots[name] for name in op.inputs):
                if not self.block.tensor(name).is_activation or name in self.inputs_kept:
                    continue
                factors = {again[op.path]: 1.0, keep[name]: -1.0}
                if away:
                    factors[away[name]] = -1.0
                # What no op of the layer makes cannot be recomputed.
                if name in self.maker:
                    factors[again[self.maker[name].path]] = -1.0
                programme.at_most(factors, 0)
        programme.at_most({keep[name]: size / most for name, size in self.sizes.items()}, budget / most)
        if away:
            programme.at_most({away[name]: self.sizes[name] / most for name in away}, away_budget / most)
        chosen = programme.solve()
        if chosen is None:
            return None
        gone = frozenset(name for name, at in away.items() if chosen[at])
        return frozenset(name for name, at in keep.items() if chosen[at]) - gone, gone
