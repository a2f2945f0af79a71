"""Seconds of a layer's kernels: of each op forward, and of each step of its backward.

`LayerKernels(scope, narrow)`: `forward` by path, `grads[weight]` as (path, price, FLOPs). Leaves out collectives
(`layer_exposed`), but for what ring attention runs besides its kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property

from gnomon.graph import Op, grad_work, nbytes
from gnomon.prediction.layer_narrow import LayerNarrow
from gnomon.prediction.layer_scope import LayerScope
from gnomon.prediction.numbers import as_float
from gnomon.prediction.profiled import profiled_forward, unprofiled
from gnomon.prices.deterministic import FILLED, filled_seconds, in_order
from gnomon.prices.experts import (
    extra_passes,
    loop_launches,
    loop_price,
    order_pass,
    row_passes,
    sequential_price,
)
from gnomon.prices.kernels import FREE, WHOLE, OpPrice, fused_dropout_seconds, grad_seconds, op_seconds
from gnomon.prices.ring import ring_seconds
from gnomon.sharding.homes import routed_tensors

RING = ":ring"
"""The suffix of an attention's path for what it runs around a ring, next to its kernels."""


class LayerKernels:
    """Prices of one layer's kernels on one rank."""

    def __init__(self, scope: LayerScope, narrow: LayerNarrow) -> None:
        self.scope, self.narrow = scope, narrow
        self.into_add = self._into_add() if scope.facts.dropout_add_fused else frozenset()
        self.grads = {weight: self._grad_prices(weight=weight) for weight in (False, True)}

    def _into_add(self) -> frozenset[str]:
        """Paths of dropouts whose output only an addition reads; not those of adapters, which no kernel fuses."""
        scope = self.scope
        readers: dict[str, list[str]] = {}
        for op in scope.block.ops:
            for name in op.inputs:
                readers.setdefault(name, []).append(op.does)
        return frozenset(
            op.path
            for op in scope.block.ops
            if op.does == "drops" and readers.get(op.outputs[0]) == ["adds"] and not op.path.endswith(".dropped")
        )

    @cached_property
    def forward(self) -> dict[str, OpPrice]:
        """Maps the path of each op that runs to its price."""
        scope = self.scope
        return {
            **{op.path: self._op(op.path) for op in scope.block.ops if not op.rules.is_view},
            **self._rings(scope.ops, backward=False),
            **(
                profiled_forward(scope.block, scope.setting, scope.device, scope.curves) if scope.facts.composed else {}
            ),
        }

    def _op(self, path: str) -> OpPrice:
        scope = self.scope
        op = scope.ops[path]
        if path in self.into_add:
            return fused_dropout_seconds(op, scope.block, scope.setting(path), scope.device, scope.curves)
        if path in self.narrow.epilogues:
            return FREE
        share = scope.causal_share if op.does == "attends" else None
        price = op_seconds(
            op,
            scope.block,
            scope.setting(path),
            scope.device,
            scope.curves,
            fp8=self.narrow.run_in(path),
            cast=self.narrow.cast_of(op, backward=False) if op.contracts else WHOLE,
            load=scope.context.load,
            causal_share=share,
            pieces=scope.context.pieces,
            experts=scope.facts.experts,
        )
        return _launched(price, op) + self._around_experts(op, backward=False) + self._filled(op, op.outputs)

    def _rings(self, paths: Iterable[str], *, backward: bool) -> dict[str, OpPrice]:
        """What attention of these paths runs besides its kernels where keys and values pass around the ranks of cp, as
        an entry of its own, which is no attention."""
        scope = self.scope
        cp, prices = scope.context.mesh.cp, {}
        if cp == 1 or scope.context.layout.context != "ring":
            return {}
        for op in (scope.ops[path] for path in paths if scope.does(path) == "attends"):
            sizes = scope.sharded.sizes(op.path)
            queries, *keys = (nbytes(scope.block.tensor(name), sizes, scope.dtypes) for name in op.inputs[:3])
            price = ring_seconds(queries, sum(keys), cp, scope.device, scope.curves, backward=backward)
            prices[op.path + RING] = price
        return prices

    def _around_experts(self, op: Op, *, backward: bool) -> OpPrice:
        """What Megatron Core's mixtures and transformers' run around the matmuls of experts, with one of these or with
        a dispatch, and Megatron Core's besides a rotary embedding that its fused kernel cannot do."""
        scope = self.scope
        context, experts = scope.context, scope.local_experts
        if scope.facts.sorted_rows and experts:
            return order_pass(
                op,
                scope.block,
                scope.setting(op.path),
                context.load,
                scope.device,
                scope.curves,
                backward,
            )
        if scope.facts.experts in ("eager", "stacked") and op.does == "dispatches" and experts:
            return self._loop(op, backward=backward)
        if scope.facts.experts == "sequential" and experts:
            return self._one_by_one(op, backward=backward) + self._around_rows(op, backward=backward)
        return self._around_rows(op, backward=backward)

    def _one_by_one(self, op: Op, *, backward: bool) -> OpPrice:
        """The price of modules of experts that Python runs one after another."""
        scope = self.scope
        if op.does not in ("multiplies rows", "gates", "dispatches", "combines"):
            return FREE
        if op.does == "multiplies rows" and not self._leads(op):
            return FREE
        rows = scope.block.tensor(op.outputs[0] if op.does == "dispatches" else op.inputs[0])
        moved = nbytes(rows, scope.sharded.sizes(op.path), scope.dtypes) * scope.context.load
        if op.does == "gates" and not any(name in routed_tensors(scope.block) for name in op.inputs):
            return FREE  # that of a shared expert
        low = self.narrow.low(op.path)
        return sequential_price(op, scope.local_experts, low, moved, scope.device, scope.curves, backward=backward)

    def _leads(self, op: Op) -> bool:
        """Whether a matmul of experts is the first over its rows: gate and up are one matmul."""
        return next(o for o in self.scope.block.ops if o.kind == op.kind and o.inputs[0] == op.inputs[0]) is op

    def _around_rows(self, op: Op, *, backward: bool) -> OpPrice:
        """The price of Megatron Core's passes over rows of experts, and of launches from the loop of a library."""
        scope = self.scope
        context, experts = scope.context, scope.local_experts
        if not scope.facts.transformer_engine or not experts:
            return FREE
        if op.attr("factor", False):
            turned = nbytes(scope.block.tensor(op.outputs[0]), scope.sharded.sizes(op.path), scope.dtypes)
            return extra_passes(op, turned, experts, scope.device, scope.curves, backward=backward)
        low = self.narrow.low(op.path)
        if op.does == "multiplies rows":
            # Gate and up are one matmul, so the loop's launches are counted at the first of them only.
            looped = self._leads(op) and scope.facts.experts != "sequential"
            looped = looped and not (low and scope.facts.experts == "fused")
            return FREE if not looped else OpPrice(device_s=0.0, kernels=loop_launches(experts, low))
        does = op.does
        if does not in ("dispatches", "combines", "gates"):
            return FREE
        rows = scope.block.tensor(op.outputs[0] if does == "dispatches" else op.inputs[0])
        moved = nbytes(rows, scope.sharded.sizes(op.path), scope.dtypes) * context.load
        passes = FREE
        if (op.attr("biased", False) or op.attr("clamped", False)) and not (low and scope.facts.experts == "fused"):
            passes = extra_passes(op, moved, experts, scope.device, scope.curves, backward=backward)
        if does == "gates" or context.mesh.ep == 1 or scope.facts.fused_dispatch:
            return passes
        return passes + row_passes(does, moved, experts, low, scope.device, scope.curves, backward=backward)

    def _loop(self, op: Op, *, backward: bool) -> OpPrice:
        """The price of transformers' loop over experts, at the dispatch that it has instead."""
        scope, stacked = self.scope, 0
        if scope.facts.experts == "stacked":
            weights = [o for o in scope.block.ops if o.does == "multiplies rows"]
            for matmul in weights:
                tensor = scope.block.tensor(matmul.inputs[1])
                stacked += int(nbytes(tensor, scope.sharded.sizes(matmul.path), scope.dtypes))
        tokens = nbytes(scope.block.tensor(op.inputs[0]), scope.sharded.sizes(op.path), scope.dtypes)
        return loop_price(scope.local_experts, tokens, stacked, scope.device, scope.curves, backward=backward)

    def _grad_prices(self, *, weight: bool) -> list[tuple[str, OpPrice, float]]:
        """Lists (op, price, matrix FLOPs) of every step of the backward in one of its halves."""
        scope = self.scope
        steps = []
        for grad in scope.back.ops:
            if (grad.phase == "weight_grad") != weight:
                continue
            # an accumulation is named by its tensor: it has the sizes of an op that reads it
            setting = scope.setting(scope.readers[grad.path] if grad.phase == "accumulate" else grad.path)
            share = scope.causal_share if scope.does(grad.path) == "attends" else None
            if grad.path in self.narrow.epilogues or (scope.facts.composed and self._unprofiled(grad.path)):
                continue
            if grad.phase == "accumulate":  # what one kernel writes for all is no sum
                apart = tuple(path for path in grad.reads if not scope.ops[path].attr("joined", False))
                grad = replace(grad, reads=apart)
            price = grad_seconds(
                grad,
                scope.block,
                setting,
                scope.device,
                scope.curves,
                fp8=self.narrow.run_in(grad.path),
                cast=self.narrow.cast_of(scope.ops[grad.path], backward=True) if grad.path in scope.ops else WHOLE,
                load=scope.context.load,
                causal_share=share,
                pieces=scope.context.pieces,
                experts=scope.facts.experts,
            )
            if grad.path in scope.ops and grad.phase != "accumulate":
                op = scope.ops[grad.path]
                price = _launched(price, op) + self._around_experts(op, backward=True)
                if scope.facts.deterministic and op.does == "attends":
                    price = in_order(price)
                price = price + self._filled(op, grad.grads_out)
            steps.append((grad.path, price, as_float(grad_work(grad, scope.block, setting).matmul_flops)))
        rings = self._rings([path for path, _, _ in steps], backward=True)
        return [*steps, *((path, price, 0.0) for path, price in rings.items())]

    def _filled(self, op: Op, names: Sequence[str]) -> OpPrice:
        """The price of filling memory before Transformer Engine's kernels write these tensors of an op, or their
        gradients."""
        scope = self.scope
        if not (scope.facts.deterministic and scope.facts.transformer_engine) or op.does not in FILLED:
            return FREE
        if op.path in self.narrow.wide or not names:  # the head is PyTorch's
            return FREE
        sizes = scope.sharded.sizes(op.path)
        written = sum(nbytes(scope.block.tensor(name), sizes, scope.dtypes) for name in names)
        return filled_seconds(written, len(names), scope.device, scope.curves)

    def _unprofiled(self, path: str) -> bool:
        """Whether a profile of one layer (`profiled`) leaves a gradient out: of the loss, of the head's norm."""
        scope = self.scope
        op = scope.ops.get(path)
        return op is not None and (op.does == "compares labels" or unprofiled(op, scope.block))


def _launched(price: OpPrice, op: Op) -> OpPrice:
    """The price without launches of an op that runs in the kernel of one before it (`joined`)."""
    return replace(price, kernels=0) if op.attr("joined", False) else price
