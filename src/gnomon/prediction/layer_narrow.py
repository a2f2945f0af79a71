"""Which matmuls of a layer run in eight or four bits, what is cast for them, and what ranks send in eight bits.

`LayerNarrow(scope)`. Leaves out what a cast takes (`prices.kernels`).
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import cached_property

from gnomon.graph import Op
from gnomon.ops.curve import Matmul
from gnomon.plans.vocabulary import has_vocab
from gnomon.prediction.layer_scope import LayerScope
from gnomon.prices.kernels import FREE, Cast, Low, OpPrice, cast_weight_seconds
from gnomon.sharding import Collective

ORDERING = frozenset({"dispatches", "combines"})
"""Ops into which no compiler puts a cast where rows are put in order apart: SparseCores gather them (recipes of TPU 7x,
`xla_tpu_enable_offloading_gather_to_sparsecore`)."""


class LayerNarrow:
    """The low-precision recipe of the plan, op by op."""

    def __init__(self, scope: LayerScope) -> None:
        self.scope = scope
        self.wide = self._wide()
        self.casts = self._casts()
        self.epilogues = self._epilogues() if scope.facts.experts == "fused" else frozenset()
        inner = [scope.ops[path] for path in self.epilogues]
        self.between = {name for op in inner for name in (*op.inputs, *op.outputs)}
        self.gathered = self._gathered()

    def _wide(self) -> frozenset[str]:
        """Paths of matmuls that no eight-bit recipe narrows: what a router reads, logits over the vocabulary, and
        adapters."""
        scope = self.scope
        routed = {op.inputs[0] for op in scope.block.ops if op.does == "routes"}
        makers = {name: op.path for op in scope.block.ops for name in op.outputs}
        heads = {path for name, path in makers.items() if has_vocab(scope.block.tensor(name))}
        heads |= {op.path for op in scope.block.ops if op.path.endswith((".lora_A", ".lora_B"))}
        return frozenset(heads | {makers[name] for name in routed if name in makers})

    @cached_property
    def adapted(self) -> frozenset[str]:
        """Tensors that adapters read, in 16 bits, besides narrow matmuls."""
        return frozenset(op.inputs[0] for op in self.scope.block.ops if op.path.endswith(".lora_A"))

    def _casts(self) -> dict[str, str]:
        """Maps a tensor that narrow matmuls read to the path of the first, which casts it for all."""
        first: dict[str, str] = {}
        for op in self.scope.block.ops:
            if _multiplies_weights(op) and self.low(op.path):
                first.setdefault(op.inputs[0], op.path)
        return first

    def _epilogues(self) -> frozenset[str]:
        """Paths of activations between narrow matmuls of experts, which run inside these."""
        scope = self.scope
        narrow = {op.path for op in scope.block.ops if op.does == "multiplies rows" and self.low(op.path)}
        narrow_outputs = {name for op in scope.block.ops if op.path in narrow for name in op.outputs}
        read = {op.inputs[0] for op in scope.block.ops if op.path in narrow}
        # An epilogue reads only what narrow matmuls made and writes only what they read: it runs inside them.
        inner = {
            op.path for op in scope.block.ops if narrow_outputs.issuperset(op.inputs) and read.issuperset(op.outputs)
        }
        return frozenset(inner)

    def _gathered(self) -> dict[str, int]:
        """Maps a tensor that narrow matmuls read, or whose gradient they do, and that tensor-parallel ranks gather in
        eight bits -> ranks. Source: NVIDIA/TransformerEngine transformer_engine/pytorch/module/base.py
        grad_output_preprocess (cast, gather, transpose), layernorm_linear.py (the gathered input is what the norm
        wrote, in 8 bits; in 16 where adapters read it too, `return_layernorm_output`)."""
        scope = self.scope
        if not scope.facts.transformer_engine:
            return {}
        return {c.tensor: c.ranks for c in (*scope.sharded.forward, *scope.sharded.backward) if self.narrow_gather(c)}

    def narrow_gather(self, collective: Collective) -> bool:
        gathers = collective.kind == "all_gather" and collective.axis == "tp" and not collective.inside
        narrow = self.scope.facts.transformer_engine and collective.tensor not in self.adapted
        return gathers and narrow and bool(self.low(collective.path))

    def narrow_sum(self, collective: Collective) -> bool:
        sums = collective.kind == "reduce_scatter" and collective.axis == "tp" and not collective.inside
        return (
            sums and self.scope.facts.narrow_sums and collective.phase == "forward" and bool(self.low(collective.path))
        )

    def cast_of(self, op: Op, *, backward: bool) -> Cast:
        scope = self.scope
        # The first reader casts for all; what runs between two fused matmuls needs no cast.
        name = op.outputs[0] if backward else op.inputs[0]
        again = not backward and self.casts.get(name, op.path) != op.path
        maker = scope.makers.get(name)
        again = again or name in self.between
        engine = not backward and scope.facts.transformer_engine
        if scope.facts.fused_casts:  # gradients come from what reads the tensor
            near = next((o for o in scope.block.ops if name in o.inputs), None) if backward else maker
            fused = near is not None and not _is_library(near)
            if near is not None and scope.facts.sorted_rows and near.does in ORDERING:
                fused = False
        else:
            fused = engine and maker is not None and maker.rules.fused_by == "norm" and name not in self.adapted
        once = engine and bool(op.contracts) and scope.block.tensor(op.inputs[1]).kind != "parameter"
        fp8 = scope.context.precision.fp8
        searched = fp8 is not None and (fp8.recipe == "rowwise" or (backward and fp8.fixed))
        return Cast(again=again, normed=fused, share=1 / self.gathered.get(name, 1), once=once, searched=searched)

    def low(self, path: str) -> Low:
        fp8 = self.scope.context.precision.fp8
        if fp8 is None or path in self.wide or any(fnmatchcase(path, f"*{p}*") for p in fp8.except_ops):
            return ""
        own: dict[str, Low] = {"nvfp4": "fp4", "mxfp8": "mxfp8", "rowwise": "rowwise"}
        return own.get(fp8.recipe, "fp8")

    def run_in(self, path: str) -> Low:
        """What an op multiplies in; attention in the compute dtype unless the plan narrows it too."""
        scope = self.scope
        fp8 = scope.context.precision.fp8
        wide = fp8 is None or (scope.does(path) == "attends" and not fp8.attention)
        return "" if wide else self.low(path)

    def weight_cast(self, mine: Callable[[str], bool]) -> OpPrice:
        """Prices the cast of the weights of the ops that are `mine`."""
        scope = self.scope
        total = FREE
        for op in scope.block.ops:
            if mine(op.path) and (low := self.low(op.path)):
                total += cast_weight_seconds(
                    op, scope.block, scope.setting(op.path), scope.device, scope.curves, rowwise=low == "rowwise"
                )
        return total


def _multiplies_weights(op: Op) -> bool:
    """Whether it is a matmul with a weight that recipes narrow."""
    curve = op.rules.curve(op)
    return isinstance(curve, Matmul) and curve.narrow


def _is_library(op: Op) -> bool:
    """Whether its kernel is a library's: no compiler puts a cast into it."""
    return op.rules.contracts or op.does == "attends"
