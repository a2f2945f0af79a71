"""One layer on one rank, before it is priced: its sharded ops, their backward, and what every price of it reads.

`LayerScope(context, sizes)`. Leaves out number formats narrower than the compute dtype (`layer_narrow`) and all prices.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from gnomon.graph import Dtypes, Setting, backward, size_of
from gnomon.prediction.layer_types import LocalContext
from gnomon.prices.curves import Curves, curves_with
from gnomon.prices.power import powered
from gnomon.sharding import causal_shares, shard_block


class LayerScope:
    """A layer's ops on one rank by their paths; of a part of a layer (`Block.part_of`), those of the whole."""

    def __init__(self, context: LocalContext, sizes: Mapping[str, Any]) -> None:
        self.context, self.facts = context, context.facts
        self.dtypes = Dtypes(compute=context.precision.compute, param=context.precision.compute)
        whole = context.block.part_of or context.block
        no_grad = tuple(name for name in context.no_grad if name in whole.inputs)
        self.sharded = shard_block(whole, context.layout, context.mesh, sizes, self.dtypes, no_grad=no_grad)
        self.back = backward(whole, context.kernels, self.dtypes, no_grad_inputs=no_grad)
        self.block = self.back.forward
        self.device = powered(context.device)
        self.curves: Curves = curves_with(
            context.device, self.facts.attention_kernel, self.facts.cublas, self.facts.cudnn
        )
        self.causal_share = self._causal_share(sizes)
        self.ops = {op.path: op for op in self.block.ops}
        # In reverse, so that of several ops the first one stays.
        self.readers = {name: op.path for op in reversed(self.block.ops) for name in (*op.inputs, *op.outputs)}
        self.makers = {name: op for op in self.block.ops for name in op.outputs}
        self.attending = [op.path for op in whole.ops if op.does == "attends"]
        self.opaque = [op.path for op in whole.ops if op.is_opaque]

    def _causal_share(self, sizes: Mapping[str, Any]) -> float | None:
        """Share of a causal square that the busiest rank works on when sequences are divided over cp."""
        cp = self.context.mesh.cp
        if cp == 1 or "seq" not in sizes or self.context.layout.context == "ulysses":
            return None
        return float(max(causal_shares(sizes["seq"], cp, self.context.layout.context_order)))

    def setting(self, path: str) -> Setting:
        # FLOPs are reported with full attention; prices of causal attention count pairs by themselves
        return Setting(sizes=self.sharded.sizes(path), dtypes=self.dtypes, causal_flops="full")

    def does(self, path: str) -> str:
        """What an op does; empty for a path that is none's."""
        op = self.ops.get(path)
        return op.does if op is not None else ""

    @cached_property
    def local_experts(self) -> int:
        """Experts of this rank; 0 without any."""
        grouped = next((op for op in self.block.ops if op.does == "multiplies rows"), None)
        if grouped is None:
            return 0
        return int(size_of(self.block.tensor(grouped.inputs[1]).dims[0], self.sharded.sizes(grouped.path)))
