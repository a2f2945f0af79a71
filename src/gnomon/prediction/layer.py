"""The price of one layer on one rank: seconds by phase, device and host apart, and bytes kept for its backward.

`layer_price(context)` is a pure function of a `LocalContext`, which holds everything a price may depend on and is
the key of the only memo. Work, kernels and collectives are derived from the graph (`sharding.shard_block`,
`graph.backward`); nothing is tabulated per model. Leaves out: pipelines, data-parallel reductions and the optimizer
(`step`), and what one layer hides of another's communication.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any

from gnomon.graph import backward, forward_work, saved
from gnomon.plans.saving import LayerSaving
from gnomon.prediction.layer_exposed import LayerExposed
from gnomon.prediction.layer_kernels import RING, LayerKernels
from gnomon.prediction.layer_memory import LayerMemory
from gnomon.prediction.layer_narrow import LayerNarrow
from gnomon.prediction.layer_scope import LayerScope
from gnomon.prediction.layer_types import LayerPrice, LocalContext, Phase
from gnomon.prediction.numbers import as_float
from gnomon.sharding import Collective, shard_block
from gnomon.sharding.homes import routed_tensors


@lru_cache(maxsize=4096)
def layer_price(context: LocalContext) -> LayerPrice:
    """Prices a layer. UnpricedError names an op, link or number format without one."""
    return layer_pricing(context).price(context.saving, whole=context.whole_recompute)


def layer_pricing(context: LocalContext) -> LayerPricing:
    """The layer being priced, for several ways to save its tensors; the context's own is left out."""
    kept_input = replace(context, saving=LayerSaving(policy=(), input="keep"), whole_recompute=False)
    return _priced(kept_input)


def price_layer(context: LocalContext, sizes: Mapping[str, Any]) -> LayerPrice:
    """The price at sizes other than the context's own; arrays of sizes give arrays in every number (see `batch`)."""
    return LayerPricing(context, sizes).price(context.saving, whole=context.whole_recompute)


def price_layer_saved(
    context: LocalContext, sizes: Mapping[str, Any], ways: Sequence[tuple[LayerSaving, bool]]
) -> tuple[LayerPrice, ...]:
    """The prices under several ways of (saving, whole_recompute) in place of the context's own; what does not depend on
    them is priced once."""
    pricing = LayerPricing(context, sizes)
    return tuple(pricing.price(saving, whole=whole) for saving, whole in ways)


@lru_cache(maxsize=512)
def _priced(context: LocalContext) -> LayerPricing:
    """What plans share that keep and recompute other tensors."""
    return LayerPricing(context, dict(context.sizes))


class LayerPricing:
    """One layer being priced, however its tensors are saved."""

    def __init__(self, context: LocalContext, sizes: Mapping[str, Any]) -> None:
        self.scope = scope = LayerScope(context, sizes)
        self.narrow = LayerNarrow(scope)
        self.prices = LayerKernels(scope, self.narrow)
        self.exposed = LayerExposed(scope, self.narrow, self.prices.grads)
        self.sharded, self.back = scope.sharded, scope.back
        self.paths: frozenset[str] | None = None
        """Paths of the ops of a part of a layer; None where the layer is whole."""
        if context.block.part_of is not None:
            self.paths = frozenset(op.path for op in context.block.ops)
            self.sharded = shard_block(
                context.block, context.layout, context.mesh, sizes, scope.dtypes, no_grad=context.no_grad
            )
            self.back = backward(context.block, context.kernels, scope.dtypes, no_grad_inputs=context.no_grad)
        self.memory = LayerMemory(context, self.sharded, self.back, scope.dtypes, self.narrow.low)

    def _mine(self, path: str) -> bool:
        """Whether a step is of this part of the layer: an op of it, or the sum of gradients of what one of its ops
        makes or is the first to read."""
        if self.paths is None:
            return True
        return path.partition(":")[0] in self.paths or self.scope.readers.get(path, "").partition(":")[0] in self.paths

    @cached_property
    def always(self) -> LayerPrice:
        """The price with everything kept, without what is kept: what does not depend on recomputation."""
        scope, block = self.scope, self.back.forward
        forward = {path: price for path, price in self.prices.forward.items() if self._mine(path)}
        sent = [collective for collective in scope.sharded.forward if self._mine(collective.path)]
        early, late = self.memory.around_gradients()
        return LayerPrice(
            forward=self._waits(self.exposed.phase(forward.items(), self._forward_flops(forward), sent), forward),
            input_grad=self._backward(weight=False),
            weight_grad=self._backward(weight=True),
            recompute=Phase(),
            saved=(),
            offloaded_bytes=0,
            remade_bytes=0,
            input_away=False,
            transient_bytes=self.memory.transient(),
            early_bytes=early,
            late_bytes=late,
            forward_bytes=0,
            deferred_bytes=self.memory.deferred(),
            weight_cast=self.narrow.weight_cast(self._mine),
            input_bytes=sum(
                self.memory.bytes_of(block.tensor(n)) for n in block.inputs if n not in scope.context.no_grad
            ),
            output_bytes=sum(self.memory.bytes_of(block.tensor(n)) for n in block.outputs),
            sharded=self.sharded,
            context=scope.context,
        )

    def price(self, saving: LayerSaving, *, whole: bool) -> LayerPrice:
        """All phases and bytes. whole: as `LocalContext.whole_recompute`."""
        fates = saved(self.back, dict(saving.policy), self.scope.dtypes)
        # Recomputing the whole layer runs every op again; a policy runs only what the saved tensors do not give.
        # a layer without a backward, before the first that is trained, is not computed again
        again = self._all() if whole and self.back.ops else fates.recompute_ops if self.back.ops else ()
        return replace(
            self.always,
            recompute=self.again(again),
            saved=self.memory.saved_bytes(fates.on_device),
            offloaded_bytes=sum(self.memory.bytes_of(entry.tensor) for entry in fates.offloaded)
            + (self.always.input_bytes if saving.input == "offload" else 0),
            remade_bytes=sum(self.memory.bytes_of(entry.tensor) for entry in fates.recomputed),
            input_away=saving.input != "keep",
            forward_bytes=self.memory.forward(fates.on_device),
        )

    def again(self, paths: Sequence[str]) -> Phase:
        """The phase of these ops of the forward, run once more."""
        forward = self.prices.forward
        phase = self.exposed.phase(
            [(path, forward[path]) for op in paths for path in (op, op + RING) if path in forward],
            self._forward_flops(paths),
            self._collectives_again(paths),
        )
        return self._waits(phase, paths)

    def _waits(self, phase: Phase, paths: Iterable[str]) -> Phase:
        """The phase of a forward over these ops, with what the host waits for in it. Where experts run in a loop in
        Python that is all but the work on their rows, since each expert asks the device which rows are its own; where
        tokens are gathered, also the gather, since each rank asks how many of them have chosen its experts (a masked
        select)."""
        scope = self.scope
        gathers = scope.facts.gathered_tokens and scope.context.mesh.ep > 1
        if (scope.facts.experts not in ("eager", "stacked") and not gathers) or not scope.local_experts:
            return phase
        rows = routed_tensors(scope.block)
        forward = self.prices.forward
        before = (op for op in (scope.ops.get(path) for path in paths) if op is not None)
        waited = sum(as_float(forward[op.path].device_s) for op in before if not rows.intersection(op.outputs))
        # Half of what travels: out to the experts; the way back is not waited for by the host.
        sent = sum(phase.comm_s.get(axis, 0.0) for axis in ("ep", "etp")) / 2  # there; as much comes back
        return replace(phase, waited_s=waited + (sent if gathers else 0.0))

    def _backward(self, *, weight: bool) -> Phase:
        steps = [step for step in self.prices.grads[weight] if self._mine(step[0])]
        sent = (c for c in self.scope.sharded.backward if c.weight_grad == weight)
        collectives = [c for c in sent if self._mine(c.path)]
        return self.exposed.phase([(path, price) for path, price, _ in steps], sum(f for _, _, f in steps), collectives)

    def _forward_flops(self, paths: Iterable[str]) -> float:
        scope = self.scope
        path_set = set(paths)
        ops = (op for op in scope.block.ops if op.path in path_set)
        flops: float = as_float(sum(forward_work(op, scope.block, scope.setting(op.path)).matmul_flops for op in ops))
        return flops

    def _all(self) -> tuple[str, ...]:
        """Paths of all ops that run."""
        return tuple(op.path for op in self.back.forward.ops if not op.rules.is_view)

    def _collectives_again(self, again: Sequence[str]) -> list[Collective]:
        origins = {path.partition(":")[0] for path in again}
        return [c for c in self.scope.sharded.forward if c.path in origins]


def parameter_elements(price: LayerPrice) -> int:
    """Elements of the layer's parameters on one rank, before ZeRO divides them."""
    sharded = price.sharded
    return sum(int(sharded.local_elements[t.name]) for t in sharded.block.parameters)
