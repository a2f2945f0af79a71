"""Products of padded batches by the rows that are there, where somebody says which.

    torch.compile(model, backend="gnomon", options={"ragged": "attention_mask"})

A batch of texts of many lengths is padded to the longest, and a mask (batch, positions) says which positions are texts.
`Ragged.fuse(graph)` has each product of all positions take the rows that are there, by their places (`gathered`), or
copied beside each other for the library's product, or whole: what is predicted to be fastest for the mask of the call
(`forms`). Results at positions that are there are those of the whole product; the others are 0 after a product, and
what a model returns for them means nothing. Whether what is there depends on what is not is proved before: on the first
call with padding the graph is run with other numbers there, and where any result that counts changes, it stays whole
for good. Inference on a CPU. Leaves out attention itself, whose mask keeps the others out, and elementwise work.
Source: Zheng et al., PIT (2023), dynamic sequence lengths.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from gnomon.compiler.kernels import gathered
from gnomon.compiler.kernels.products import TriedMatmul
from gnomon.compiler.node import Node
from gnomon.compiler.tiles.sizes import equal, sizes_of
from gnomon.compiler.tune.forms import WHOLE, Forms
from gnomon.compiler.tune.gate import TOLERANCE

log = logging.getLogger("gnomon.compiler")
aten = torch.ops.aten
FLATTENS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
TILE = 14
"""Rows that products are computed by."""
POISON = 3.0
"""In the place of results that are not computed, while it is proved that they do not count."""
DRIFT = 30.0
"""Times a product's tolerance that a whole model's results may be away from those of whole products."""


class Places:
    """Computes from a mask (batch, positions), in int64, how many are there, their places in order, and those of the
    others."""

    __name__ = "places_of_rows"
    __module__ = __name__

    def __call__(self, mask: Tensor) -> Tensor:
        there = mask.reshape(-1) != 0
        live = there.nonzero().view(-1)
        return torch.cat([live.new_tensor([len(live)]), live, (~there).nonzero().view(-1)])


class RaggedMatmul:
    """A product of the rows of a padded batch, as a function of the places and its own tensors."""

    def __init__(self, matmul: TriedMatmul, whole: Ragged) -> None:
        self.__name__, self.__module__ = f"ragged_{matmul.__name__}", __name__
        self.product, self.whole = matmul, whole
        self.forms: dict[int, Forms] = {}
        """By the power of two of the rows that there could be."""

    def __call__(self, places: Tensor, *args: Tensor) -> Tensor:
        count, x = int(places[0]), args[-2]
        if count == len(x) or not self.whole.on:
            return self.product(*args)
        live, dead = places[1 : 1 + count], places[1 + count :]
        *bias, _, w = args
        turned = w if self.product.name.startswith("linear") else w.t()
        relu = self.product.after == "relu"

        def by_place() -> Tensor | None:
            return gathered.gathered_matmul(
                x, turned, bias[0] if bias else None, rows=live, to=live, spare=dead, fill=self.whole.fill, relu=relu,
                into=len(x),
            )  # fmt: skip

        def copied() -> Tensor:
            some = self.product(*bias, x.index_select(0, live), w)
            out = some.new_zeros((len(x), some.shape[1]))
            if self.whole.fill:
                # As the kernel does (`gathered`): `fill` times small numbers that differ from column to column.
                out[dead] = self.whole.fill * torch.arange(some.shape[1]).remainder(16).to(some.dtype)
            return out.index_copy_(0, live, some)

        ways = {WHOLE: lambda: self.product(*args), "by place": by_place, "copied": copied}
        forms = self.forms.setdefault(len(x).bit_length(), Forms())
        units = -(-count // TILE) * TILE
        return forms.run(ways, count, units, len(x), lambda out: out.index_select(0, live))


class Ragged:
    """What is padded in a graph, and whether its products may leave it out."""

    def __init__(self, mask: int) -> None:
        """mask: which of the graph's inputs says what is there."""
        self.mask = mask
        self.products: list[RaggedMatmul] = []
        self.on = False
        self.proved: bool | None = None
        """None: no call had padding yet."""
        self.fill = 0.0

    def fuse(self, graph: fx.Graph) -> None:
        """Has the products of all positions take the places of those that are there."""
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        if self.mask >= len(inputs) or any(_changes(node) for node in graph.nodes):
            return
        mask = inputs[self.mask]
        value = mask.meta.get("val")
        if not isinstance(value, Tensor) or value.dim() != 2 or value.device.type != "cpu":
            return
        found = [node for node in graph.nodes if self._of_positions(node, sizes_of(value.shape))]
        if not found:
            return
        with graph.inserting_after(inputs[-1]):
            places = graph.call_function(Places(), (mask,))
        positions = value.shape[0] * value.shape[1]
        places.meta["val"] = value.new_empty((positions + 1,), dtype=torch.int64)
        for node in found:
            node.target = RaggedMatmul(node.target, self)
            node.args = (places, *node.args)
            self.products.append(node.target)

    def _of_positions(self, node: Node, sizes: Sequence[Any]) -> bool:
        """Whether a node is a product of rows that are the mask's positions, in order."""
        if node.op != "call_function" or not isinstance(node.target, TriedMatmul) or "convolution" in node.target.name:
            return False
        x = node.args[-2]
        if x.op != "call_function" or x.target not in FLATTENS or x.meta["val"].dtype not in gathered.dtypes():
            return False
        before = sizes_of(x.args[0].meta["val"].shape)
        return len(before) == 3 and all(equal(a, b) for a, b in zip(before, sizes, strict=False))

    def boxed(self, call: Callable[[list[Any]], Any], settled: Callable[[], bool]) -> Callable[[list[Any]], Any]:
        """The graph's function with the proof before. settled: whether its trials are over."""

        def proving(args: list[Any]) -> Any:
            if self.proved is None and self.products and settled():
                mask = args[self.mask]
                if bool((mask == 0).any()):
                    self.proved = self.on = self._holds(call, args, mask)
                    for one in self.products:
                        one.forms.clear()  # what they measured beside other work of the proof
            return call(args)

        proving._boxed_call = True  # type: ignore[attr-defined]
        proving.compiled = getattr(call, "compiled", None)  # type: ignore[attr-defined]
        return proving

    def _holds(self, call: Callable[[list[Any]], Any], args: list[Any], mask: Tensor) -> bool:
        """Whether results at positions that are there are the same whatever stands at the others."""
        results = []
        for on, fill in ((False, 0.0), (True, 0.0), (True, 0.0), (True, POISON)):  # the second measures the ways
            self.on, self.fill = on, fill
            results.append(_counted(call(list(args)), mask))
        self.on, self.fill = False, 0.0
        whole, _, plain, poisoned = results
        for a, b, c in zip(whole, plain, poisoned, strict=True):
            relative = DRIFT * TOLERANCE.get(b.dtype, (0.0, 0.0))[0]
            near = torch.allclose(a.double(), b.double(), rtol=0.0, atol=relative * _top(a), equal_nan=True)
            # Whole and ragged products add in another order, so their results may be a little apart. What stands at
            # positions that do not count may change nothing at all.
            if not near or not torch.equal(b.nan_to_num(), c.nan_to_num()):
                log.warning(
                    "ragged: results at positions that the mask has depend on those that it has not, so products stay "
                    "whole; pool by the mask, or leave out the option"
                )
                return False
        return True


def _top(a: Tensor) -> float:
    return float(a.double().abs().nan_to_num(posinf=0.0).max()) if a.numel() else 0.0


def _counted(results: Any, mask: Tensor) -> list[Tensor]:
    """Keeps of a graph's results what means something: rows that are there, and all of what has no positions."""
    tensors = [one for one in results if isinstance(one, Tensor)]
    there = mask != 0
    return [one[there] if one.shape[:2] == mask.shape else one.clone() for one in tensors]


def _changes(node: Node) -> bool:
    """Whether running a node twice is not running it once."""
    schema = getattr(node.target, "_schema", None)
    return bool(getattr(schema, "is_mutable", False)) or bool(getattr(node.target, "effects", False))
