"""What a layer waits for its collectives: their seconds less what its own kernels hide.

`LayerExposed(scope, narrow, grads).phase(prices, flops, collectives)` is one phase: computing and exposed seconds by
axis. Leaves out what other layers and microbatches hide, but for dispatch and combine alongside another microbatch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from gnomon.graph import DTYPE_BITS, size_of
from gnomon.prediction.layer_kernels import RING
from gnomon.prediction.layer_narrow import LayerNarrow
from gnomon.prediction.layer_scope import LayerScope
from gnomon.prediction.layer_types import Phase
from gnomon.prediction.numbers import as_float, larger
from gnomon.prices.collectives import collective_seconds
from gnomon.prices.dispatch import DISPATCH_SMS, dispatch_seconds, holders
from gnomon.prices.kernels import OpPrice
from gnomon.prices.links import AxisLink
from gnomon.sharding import Collective

Grads = Mapping[bool, Sequence[tuple[str, OpPrice, float]]]
"""`LayerKernels.grads`: (op, price, matrix FLOPs) of the backward's steps, those of weight gradients apart."""


class LayerExposed:
    """What collectives of one layer cost alongside its kernels."""

    def __init__(self, scope: LayerScope, narrow: LayerNarrow, grads: Grads) -> None:
        self.scope, self.narrow, self.grads = scope, narrow, grads
        self.links = dict(scope.context.links)

    def phase(self, prices: Iterable[tuple[str, OpPrice]], flops: float, collectives: Sequence[Collective]) -> Phase:
        scope = self.scope
        price_list = list(prices)
        # busy: seconds of each op's kernels by its path before lowering, since collectives are named by that.
        busy: dict[str, float] = {}
        for path, price in price_list:
            origin = path.partition(":")[0]
            busy[origin] = busy.get(origin, 0.0) + as_float(price.device_s)
        rings = sum(as_float(price.device_s) for path, price in price_list if path.endswith(RING))
        comm: dict[str, float] = {}
        for path in dict.fromkeys(c.path for c in collectives):
            mine = [c for c in collectives if c.path == path]
            for axis, seconds in self._exposed(mine, busy.get(path, 0.0)):
                comm[axis] = comm.get(axis, 0.0) + seconds
        compute_s = sum(as_float(price.device_s) for _, price in price_list)
        if scope.context.expert_overlap and "ep" in comm:
            comm["ep"] = self._exposed_dispatch_s(comm["ep"], compute_s)
        counts: dict[str, int] = {}
        for collective in collectives:
            counts[collective.axis] = counts.get(collective.axis, 0) + collective.steps
        return Phase(
            compute_s=compute_s,
            attention_s=sum(busy.get(path, 0.0) for path in scope.attending) - rings,
            opaque_s=sum(busy.get(path, 0.0) for path in scope.opaque),
            comm_s=comm,
            kernels=sum(price.kernels for _, price in price_list) + sum(counts.values()),
            collectives=counts,
            flops=flops,
        )

    def _exposed_dispatch_s(self, sent_s: Any, compute_s: Any) -> Any:
        """Seconds that dispatch and combine add to another microbatch's computing of about `compute_s`, alongside which
        they travel: what it does not hide, and the part of the device that their kernels hold meanwhile."""
        # hidden · DISPATCH_SMS / num_sms: while tokens travel, their kernels hold a part of the device.
        hidden = np.minimum(sent_s, compute_s)
        return as_float(sent_s - hidden + hidden * DISPATCH_SMS / self.scope.device.num_sms)

    def _exposed(self, collectives: Sequence[Collective], busy_s: float) -> list[tuple[str, float]]:
        """(axis, seconds that kernels wait) of the collectives of one op, which computes for `busy_s`.

        A ring's rounds overlap with the attention they feed: of n+1 rounds of computing, n hide a round of sending
        each; rounds beyond (the last gradient on its way home) hide under nothing. A collective cut into n parts
        overlaps with its op but for one part.
        """
        ring = [c for c in collectives if c.inside and c.kind == "send_recv" and self._attends(c.path)]
        out = []
        # A ring sends keys and values round by round; all of its messages go at once.
        if ring:
            rounds = min(c.steps for c in ring)
            sends = [self._seconds(c) for c in ring]
            late = sum(t * (c.steps - rounds) for t, c in zip(sends, ring, strict=True))
            out.append((ring[0].axis, rounds * larger(sum(sends) - busy_s / (rounds + 1), 0.0) + late))
        for collective in collectives:
            if collective in ring:
                continue
            seconds, parts = self._seconds(collective) * collective.steps, self._parts(collective.path)
            # Cut into n parts: at least one part is waited for, and at most (n - 1)/n of the op's time hides the
            # others.
            hidden = seconds - larger(seconds / parts, seconds - busy_s * (parts - 1) / parts)
            waited = seconds - hidden * (self.scope.facts.cut_hides if parts > 1 else 1.0)
            out.append((collective.axis, larger(waited - self._overlapped_s(collective), 0.0)))
        return out

    def _overlapped_s(self, collective: Collective) -> float:
        """Seconds of matmuls that a collective of the backward overlaps with: of input gradients, for inputs that are
        gathered again for the weight gradients; of these, for sums over ranks of input gradients."""
        scope = self.scope
        kind, again = collective.kind, collective.weight_grad
        if not scope.facts.backward_overlap or collective.phase != "backward" or collective.inside:
            return 0.0
        if not again and kind not in ("reduce_scatter", "all_reduce"):
            return 0.0
        readers = {op.path for op in scope.sharded.block.ops if collective.tensor in op.inputs}
        steps = self.grads[not again]
        seconds: float = sum(as_float(price.device_s) for path, price, _ in steps if path.partition(":")[0] in readers)
        return seconds

    def _seconds(self, collective: Collective) -> float:
        """Seconds of one round; rows that skewed routing sends to the busiest rank are in it."""
        scope = self.scope
        skewed = collective.inside and collective.axis in ("ep", "etp")
        if skewed and scope.facts.gathered_tokens and scope.context.mesh.ep > 1:
            if scope.context.layout.dispatch != "all_gather":  # the program's own way, which the block does not know
                return self._gathered_s(collective)
            skewed = False  # every rank has all tokens, whichever experts they choose
        size = collective.bytes * (scope.context.load if skewed else 1.0)
        if self.narrow.narrow_gather(collective) or self.narrow.narrow_sum(collective):
            size = size * 8 / DTYPE_BITS[scope.context.precision.compute]
        link = self.links[collective.axis]
        if scope.facts.fused_dispatch and collective.inside and collective.axis == "ep":
            seconds = self._sent_once(collective, size, link)
        else:
            seconds = collective_seconds(collective.kind, size, link)
        elapsed: float = as_float(seconds)
        return elapsed

    def _gathered_s(self, collective: Collective) -> float:
        """A dispatch or combine that gathers tokens of all ranks and scatters their sums (Megatron Core's allgather
        dispatcher): a token goes once to every rank, whichever experts it has chosen, however routing is skewed."""
        scope = self.scope
        router = next(op for op in scope.block.ops if op.does == "routes")
        chosen = scope.block.tensor(router.outputs[0]).dims[-1].size
        assert chosen is not None
        # Bytes are of one copy a chosen expert; gathered tokens come once from each of the ep ranks instead.
        size = collective.bytes * scope.context.mesh.ep / chosen
        outward = (scope.does(collective.path) == "dispatches") == (collective.phase == "forward")
        kind = "all_gather" if outward else "reduce_scatter"
        elapsed: float = as_float(collective_seconds(kind, size, self.links[collective.axis]))
        return elapsed

    def _copies(self, link: AxisLink) -> dict[str, float]:
        """Maps nodes and ranks to the copies of a token that go there, over its experts."""
        scope = self.scope
        router = next(op for op in scope.block.ops if op.does == "routes")
        experts, topk = (scope.block.tensor(name).dims[-1].size for name in (router.inputs[0], router.outputs[0]))
        assert experts is not None and topk is not None
        groups, chosen = router.attr("groups", 1), router.attr("groups_per_token", 1)
        assert isinstance(groups, int) and isinstance(chosen, int)
        return {
            name: holders(places, experts, topk, groups, chosen) / topk
            for name, places in (("nodes", link.nodes), ("ranks", link.ranks))
        }

    def _sent_once(self, collective: Collective, size: Any, link: AxisLink) -> Any:
        """Seconds of a dispatch or combine by DeepEP or HybridEP. HybridEP gathers all ranks' routing before it, and
        sends weights of all experts in the NVLink domain with each copy of a token and with its gradient."""
        scope = self.scope
        copies, router = self._copies(link), next(op for op in scope.block.ops if op.does == "routes")
        if not scope.facts.routing_gathered or scope.does(collective.path) != "dispatches":
            return dispatch_seconds(size, link, **copies)
        sizes = scope.sharded.sizes(router.path)
        scores, topk = (
            scope.block.tensor(router.inputs[0]).dims,
            scope.block.tensor(router.outputs[0]).dims[-1],
        )
        scored = math.prod(size_of(dim, sizes) for dim in scores)
        # fp32 weights of all experts in the NVLink domain travel with each copy.
        weights = 4 * scored * size_of(topk, sizes) * link.ranks_per_node / link.ranks
        seconds = dispatch_seconds(size + weights, link, **copies)
        return seconds + (
            collective_seconds("all_gather", scored * link.ranks, link) if collective.phase == "forward" else 0
        )

    def _parts(self, path: str) -> int:
        return max(
            (parts for pattern, parts in self.scope.context.split_paths if fnmatchcase(path, pattern)), default=1
        )

    def _attends(self, path: str) -> bool:
        return self.scope.sharded.block.op(path).does == "attends"
