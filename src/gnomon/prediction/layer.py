"""The price of one layer on one rank: seconds by phase, device and host apart, and bytes kept for its backward.

`layer_price(context)` is a pure function of a `LocalContext`, which holds everything a price may depend on and is
the key of the only memo. Work, kernels and collectives are derived from the graph (`sharding.shard_block`,
`graph.backward`); nothing is tabulated per model. Leaves out: pipelines, data-parallel reductions and the optimizer
(`step`), and what one layer hides of another's communication.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from gnomon.graph import (
    DTYPE_BITS,
    Dtypes,
    Op,
    Setting,
    backward,
    forward_work,
    grad_work,
    nbytes,
    saved,
    size_of,
)
from gnomon.graph.types import VIEWS
from gnomon.plans.saving import LayerSaving
from gnomon.prediction.layer_memory import LayerMemory, has_vocab
from gnomon.prediction.layer_types import LayerPrice, LocalContext, Phase
from gnomon.prediction.numbers import as_float, larger
from gnomon.prediction.profiled import profiled_forward, unprofiled
from gnomon.prices.collectives import collective_seconds
from gnomon.prices.curves import Curves, curves_with
from gnomon.prices.deterministic import FILLED, filled_seconds, in_order
from gnomon.prices.dispatch import DISPATCH_SMS, dispatch_seconds, holders
from gnomon.prices.experts import extra_passes, loop_launches, order_pass, row_passes
from gnomon.prices.kernels import (
    FREE,
    WHOLE,
    Cast,
    Low,
    OpPrice,
    cast_weight_seconds,
    fused_dropout_seconds,
    grad_seconds,
    op_seconds,
)
from gnomon.prices.links import AxisLink
from gnomon.prices.power import powered
from gnomon.prices.ring import ring_seconds
from gnomon.sharding import Collective, causal_shares, shard_block

RING = ":ring"
"""Of an attention's path: the entry of what it runs beside its kernels around a ring."""

UNFUSED_BEFORE_CASTS = frozenset({"attention", "linear", "matmul", "grouped_linear"})
"""Kinds whose kernels are a library's: no compiler puts a cast into them."""

ORDERING = frozenset({"dispatch", "combine"})
"""Nor into these where rows are put in order apart: SparseCores gather them (recipes of TPU 7x,
`xla_tpu_enable_offloading_gather_to_sparsecore`)."""


@lru_cache(maxsize=4096)
def layer_price(context: LocalContext) -> LayerPrice:
    """The price. UnpricedError names an op, link or number format without one."""
    saving = context.saving
    kept = replace(context, saving=LayerSaving(policy=(), input="keep"), whole_recompute=False)
    return _priced(kept).price(saving, whole=context.whole_recompute)


def price_layer(context: LocalContext, sizes: Mapping[str, Any]) -> LayerPrice:
    """The price at sizes other than the context's own; arrays of sizes give arrays in every number (see `batch`)."""
    return _Pricing(context, sizes).price(context.saving, whole=context.whole_recompute)


def price_layer_saved(
    context: LocalContext, sizes: Mapping[str, Any], ways: Sequence[tuple[LayerSaving, bool]]
) -> tuple[LayerPrice, ...]:
    """The prices under several ways of (saving, whole_recompute) in place of the context's own; what does not depend on
    them is priced once."""
    pricing = _Pricing(context, sizes)
    return tuple(pricing.price(saving, whole=whole) for saving, whole in ways)


@lru_cache(maxsize=512)
def _priced(context: LocalContext) -> _Pricing:
    """What plans share that keep and recompute other tensors."""
    return _Pricing(context, dict(context.sizes))


class _Pricing:
    """One layer being priced, however its tensors are saved."""

    def __init__(self, context: LocalContext, sizes: Mapping[str, Any]) -> None:
        self.context, self.facts = context, context.facts
        self.dtypes = Dtypes(compute=context.precision.compute, param=context.precision.compute)
        self.sharded = shard_block(
            context.block, context.layout, context.mesh, sizes, self.dtypes, no_grad=context.no_grad
        )
        self.back = backward(context.block, context.kernels, self.dtypes, no_grad_inputs=context.no_grad)
        self.block = self.back.forward
        self.device = powered(context.device)
        self.curves: Curves = curves_with(
            context.device, self.facts.attention_kernel, self.facts.cublas, self.facts.cudnn
        )
        self.links = dict(context.links)
        self.causal_share = self._causal_share(sizes)
        self.ops = {op.path: op for op in self.block.ops}
        self.readers = {name: op.path for op in reversed(self.block.ops) for name in (*op.inputs, *op.outputs)}
        self.makers = {name: op for op in self.block.ops for name in op.outputs}
        self.attending = [op.path for op in context.block.ops if op.kind == "attention"]
        self.wide = self._wide()
        self.into_add = self._into_add() if self.facts.dropout_add_fused else frozenset()
        self.casts = self._casts()
        self.epilogues = self._epilogues() if self.facts.experts == "fused" else frozenset()
        inner = [self.ops[path] for path in self.epilogues]
        self.between = {name for op in inner for name in (*op.inputs, *op.outputs)}
        self.gathered = self._gathered()
        self.memory = LayerMemory(context, self.sharded, self.back, self.dtypes, self._low)
        self.grads = {weight: self._grad_prices(weight=weight) for weight in (False, True)}

    @cached_property
    def forward(self) -> dict[str, OpPrice]:
        """Price of each op that runs."""
        return {
            **{op.path: self._op(op.path) for op in self.block.ops if op.kind not in VIEWS},
            **self._rings(self.ops, backward=False),
            **(profiled_forward(self.block, self._setting, self.device, self.curves) if self.facts.composed else {}),
        }

    @cached_property
    def always(self) -> LayerPrice:
        """The price with everything kept, without what is kept: what does not depend on recomputation."""
        forward = self.forward
        return LayerPrice(
            forward=self._sum(forward.items(), self._forward_flops(forward), self.sharded.forward),
            input_grad=self._backward(weight=False),
            weight_grad=self._backward(weight=True),
            recompute=Phase(),
            kept=(),
            offloaded_bytes=0,
            remade_bytes=0,
            input_away=False,
            transient_bytes=self.memory.transient(),
            deferred_bytes=self.memory.deferred(),
            weight_cast=self._weight_cast(),
            input_bytes=sum(
                self.memory.bytes_of(self.block.tensor(n)) for n in self.block.inputs if n not in self.context.no_grad
            ),
            output_bytes=sum(self.memory.bytes_of(self.block.tensor(n)) for n in self.block.outputs),
            sharded=self.sharded,
        )

    def price(self, saving: LayerSaving, *, whole: bool) -> LayerPrice:
        """All phases and bytes. whole: as `LocalContext.whole_recompute`."""
        forward = self.forward
        fates = saved(self.back, dict(saving.policy), self.dtypes)
        again = self._all() if whole else fates.recompute_ops
        return replace(
            self.always,
            recompute=self._sum(
                [(path, forward[path]) for op in again for path in (op, op + RING) if path in forward],
                self._forward_flops(again),
                self._collectives_again(again),
            ),
            kept=self.memory.kept(fates.kept),
            offloaded_bytes=sum(self.memory.bytes_of(entry.tensor) for entry in fates.offloaded)
            + (self.always.input_bytes if saving.input == "offload" else 0),
            remade_bytes=sum(self.memory.bytes_of(entry.tensor) for entry in fates.recomputed),
            input_away=saving.input != "keep",
        )

    def _causal_share(self, sizes: Mapping[str, Any]) -> float | None:
        """Share of a causal square that the busiest rank works on when sequences are divided over cp."""
        cp = self.context.mesh.cp
        if cp == 1 or "seq" not in sizes or self.context.layout.context == "ulysses":
            return None
        return float(max(causal_shares(sizes["seq"], cp, self.context.layout.context_order)))

    def _setting(self, path: str) -> Setting:
        # FLOPs are reported with full attention; prices of causal attention count pairs by themselves
        return Setting(sizes=self.sharded.sizes(path), dtypes=self.dtypes, causal_flops="full")

    def _wide(self) -> frozenset[str]:
        """Paths of products that no eight-bit recipe narrows: what a router reads, logits over the vocabulary, and
        adapters."""
        routed = {op.inputs[0] for op in self.block.ops if op.kind == "router"}
        made = {name: op.path for op in self.block.ops for name in op.outputs}
        heads = {path for name, path in made.items() if has_vocab(self.block.tensor(name))}
        heads |= {op.path for op in self.block.ops if op.path.endswith((".lora_A", ".lora_B"))}
        return frozenset(heads | {made[name] for name in routed if name in made})

    @cached_property
    def adapted(self) -> frozenset[str]:
        """Tensors that adapters read, in 16 bits, beside narrow products."""
        return frozenset(op.inputs[0] for op in self.block.ops if op.path.endswith(".lora_A"))

    def _into_add(self) -> frozenset[str]:
        """Paths of dropouts whose output only an addition reads; not those of adapters, which no kernel fuses."""
        readers: dict[str, list[str]] = {}
        for op in self.block.ops:
            for name in op.inputs:
                readers.setdefault(name, []).append(op.kind)
        return frozenset(
            op.path
            for op in self.block.ops
            if op.kind == "dropout" and readers.get(op.outputs[0]) == ["add"] and not op.path.endswith(".dropped")
        )

    def _casts(self) -> dict[str, str]:
        """Tensor that narrow products read -> path of the first, which casts it for all."""
        first: dict[str, str] = {}
        for op in self.block.ops:
            if op.kind in ("linear", "grouped_linear") and self._low(op.path):
                first.setdefault(op.inputs[0], op.path)
        return first

    def _epilogues(self) -> frozenset[str]:
        """Paths of activations between narrow products of experts, which run inside these."""
        narrow = {op.path for op in self.block.ops if op.kind == "grouped_linear" and self._low(op.path)}
        made = {name for op in self.block.ops if op.path in narrow for name in op.outputs}
        read = {op.inputs[0] for op in self.block.ops if op.path in narrow}
        inner = {op.path for op in self.block.ops if made.issuperset(op.inputs) and read.issuperset(op.outputs)}
        return frozenset(inner)

    def _gathered(self) -> dict[str, int]:
        """Tensor that narrow products read, or whose gradient they do, and that tensor-parallel ranks gather in eight
        bits -> ranks. Source: NVIDIA/TransformerEngine transformer_engine/pytorch/module/base.py grad_output_preprocess
        (cast, gather, transpose), layernorm_linear.py (the gathered input is what the norm wrote, in 8 bits; in 16
        where adapters read it too, `return_layernorm_output`)."""
        if not self.facts.transformer_engine:
            return {}
        return {c.tensor: c.ranks for c in (*self.sharded.forward, *self.sharded.backward) if self._narrow_gather(c)}

    def _narrow_gather(self, collective: Collective) -> bool:
        gathers = collective.kind == "all_gather" and collective.axis == "tp" and not collective.inside
        narrow = self.facts.transformer_engine and collective.tensor not in self.adapted
        return gathers and narrow and bool(self._low(collective.path))

    def _narrow_sum(self, collective: Collective) -> bool:
        sums = collective.kind == "reduce_scatter" and collective.axis == "tp" and not collective.inside
        return sums and self.facts.narrow_sums and collective.phase == "forward" and bool(self._low(collective.path))

    def _cast_of(self, op: Op, *, backward: bool) -> Cast:
        name = op.outputs[0] if backward else op.inputs[0]
        again = not backward and self.casts.get(name, op.path) != op.path
        made = self.makers.get(name)
        again = again or name in self.between
        engine = not backward and self.facts.transformer_engine
        if self.facts.fused_casts:  # gradients come from what reads the tensor
            near = next((o for o in self.block.ops if name in o.inputs), None) if backward else made
            alone = UNFUSED_BEFORE_CASTS | (ORDERING if self.facts.sorted_rows else frozenset())
            fused = near is not None and near.kind not in alone
        else:
            fused = engine and made is not None and made.kind == "norm" and name not in self.adapted
        once = engine and bool(op.contracts) and self.block.tensor(op.inputs[1]).kind != "parameter"
        fp8 = self.context.precision.fp8
        searched = backward and fp8 is not None and fp8.fixed
        return Cast(again=again, normed=fused, share=1 / self.gathered.get(name, 1), once=once, searched=searched)

    def _low(self, path: str) -> Low:
        fp8 = self.context.precision.fp8
        if fp8 is None or path in self.wide or any(fnmatchcase(path, f"*{p}*") for p in fp8.except_ops):
            return ""
        return "fp4" if fp8.recipe == "nvfp4" else "mxfp8" if fp8.recipe == "mxfp8" else "fp8"

    def _run_in(self, path: str) -> Low:
        """What an op multiplies in; attention in the compute dtype unless the plan narrows it too."""
        fp8 = self.context.precision.fp8
        wide = fp8 is None or (self._kind(path) == "attention" and not fp8.attention)
        return "" if wide else self._low(path)

    def _weight_cast(self) -> OpPrice:
        total = FREE
        for op in self.block.ops:
            if self._low(op.path):
                total += cast_weight_seconds(op, self.block, self._setting(op.path), self.device, self.curves)
        return total

    def _op(self, path: str) -> OpPrice:
        op = self.ops[path]
        if path in self.into_add:
            return fused_dropout_seconds(op, self.block, self._setting(path), self.device, self.curves)
        if path in self.epilogues:
            return FREE
        share = self.causal_share if op.kind == "attention" else None
        price = op_seconds(
            op,
            self.block,
            self._setting(path),
            self.device,
            self.curves,
            fp8=self._run_in(path),
            cast=self._cast_of(op, backward=False) if op.contracts else WHOLE,
            load=self.context.load,
            causal_share=share,
            experts=self.facts.experts,
        )
        return _launched(price, op) + self._around_experts(op, backward=False) + self._filled(op, op.outputs)

    def _rings(self, paths: Iterable[str], *, backward: bool) -> dict[str, OpPrice]:
        """What attention of these paths runs beside its kernels where keys and values pass around the ranks of cp, as
        an entry of its own, which is no attention."""
        cp, found = self.context.mesh.cp, {}
        if cp == 1 or self.context.layout.context != "ring":
            return {}
        for op in (self.ops[path] for path in paths if self._kind(path) == "attention"):
            sizes = self.sharded.sizes(op.path)
            queries, *keys = (nbytes(self.block.tensor(name), sizes, self.dtypes) for name in op.inputs[:3])
            price = ring_seconds(queries, sum(keys), cp, self.device, self.curves, backward=backward)
            found[op.path + RING] = price
        return found

    def _around_experts(self, op: Op, *, backward: bool) -> OpPrice:
        """What Megatron Core's mixtures run around the products of experts, with one of these or with a dispatch, and
        beside a rotary embedding that its fused kernel cannot do."""
        context, experts = self.context, self.local_experts
        if self.facts.sorted_rows and experts:
            return order_pass(op, self.block, self._setting(op.path), context.load, self.device, self.curves, backward)
        if not self.facts.transformer_engine or not experts:
            return FREE
        if op.attr("factor", False):
            turned = nbytes(self.block.tensor(op.outputs[0]), self.sharded.sizes(op.path), self.dtypes)
            return extra_passes(op, turned, experts, self.device, self.curves, backward=backward)
        low = self._low(op.path)
        if op.kind == "grouped_linear":
            mates = [o.path for o in self.block.ops if o.kind == op.kind and o.inputs[0] == op.inputs[0]]
            looped = mates[0] == op.path and not (low and self.facts.experts == "fused")  # gate and up are one product
            return FREE if not looped else OpPrice(device_s=0.0, kernels=loop_launches(experts, low))
        if op.kind not in ("dispatch", "combine", "glu"):
            return FREE
        rows = self.block.tensor(op.outputs[0] if op.kind == "dispatch" else op.inputs[0])
        moved = nbytes(rows, self.sharded.sizes(op.path), self.dtypes) * context.load
        found = FREE
        if (op.attr("biased", False) or op.attr("clamped", False)) and not (low and self.facts.experts == "fused"):
            found = extra_passes(op, moved, experts, self.device, self.curves, backward=backward)
        if op.kind == "glu" or context.mesh.ep == 1 or self.facts.fused_dispatch:
            return found
        return found + row_passes(op.kind, moved, experts, low, self.device, self.curves, backward=backward)

    @cached_property
    def local_experts(self) -> int:
        """Experts of this rank; 0 without any."""
        found = next((op for op in self.block.ops if op.kind == "grouped_linear"), None)
        if found is None:
            return 0
        return int(size_of(self.block.tensor(found.inputs[1]).dims[0], self.sharded.sizes(found.path)))

    def _grad_prices(self, *, weight: bool) -> list[tuple[str, OpPrice, float]]:
        """(op, price, matrix FLOPs) of every step of the backward in one of its halves."""
        found = []
        for grad in self.back.ops:
            if (grad.phase == "weight_grad") != weight:
                continue
            # an accumulation is named by its tensor: it has the sizes of an op that reads it
            setting = self._setting(self.readers[grad.path] if grad.phase == "accumulate" else grad.path)
            share = self.causal_share if self._kind(grad.path) == "attention" else None
            if grad.path in self.epilogues or (self.facts.composed and self._unprofiled(grad.path)):
                continue
            if grad.phase == "accumulate":  # what one kernel writes for all is no sum
                apart = tuple(path for path in grad.reads if not self.ops[path].attr("joined", False))
                grad = replace(grad, reads=apart)
            price = grad_seconds(
                grad,
                self.block,
                setting,
                self.device,
                self.curves,
                fp8=self._run_in(grad.path),
                cast=self._cast_of(self.ops[grad.path], backward=True) if grad.path in self.ops else WHOLE,
                load=self.context.load,
                causal_share=share,
                experts=self.facts.experts,
            )
            if grad.path in self.ops and grad.phase != "accumulate":
                op = self.ops[grad.path]
                price = _launched(price, op) + self._around_experts(op, backward=True)
                if self.facts.deterministic and op.kind == "attention":
                    price = in_order(price)
                price = price + self._filled(op, grad.grads_out)
            found.append((grad.path, price, as_float(grad_work(grad, self.block, setting).matmul_flops)))
        rings = self._rings([path for path, _, _ in found], backward=True)
        return [*found, *((path, price, 0.0) for path, price in rings.items())]

    def _filled(self, op: Op, names: Sequence[str]) -> OpPrice:
        """What is filled before Transformer Engine's kernels write these tensors of an op, or their gradients."""
        if not (self.facts.deterministic and self.facts.transformer_engine) or op.kind not in FILLED:
            return FREE
        if op.path in self.wide or not names:  # the head is PyTorch's
            return FREE
        sizes = self.sharded.sizes(op.path)
        written = sum(nbytes(self.block.tensor(name), sizes, self.dtypes) for name in names)
        return filled_seconds(written, len(names), self.device, self.curves)

    def _unprofiled(self, path: str) -> bool:
        """Whether a profile of one layer (`profiled`) leaves a gradient out: of the loss, of the head's norm."""
        op = self.ops.get(path)
        return op is not None and (op.kind == "cross_entropy" or unprofiled(op, self.block))

    def _backward(self, *, weight: bool) -> Phase:
        steps = self.grads[weight]
        collectives = [c for c in self.sharded.backward if c.weight_grad == weight]
        return self._sum([(path, price) for path, price, _ in steps], sum(f for _, _, f in steps), collectives)

    def _kind(self, path: str) -> str:
        op = self.ops.get(path)
        return op.kind if op is not None else ""

    def _forward_flops(self, paths: Iterable[str]) -> float:
        wanted = set(paths)
        ops = (op for op in self.block.ops if op.path in wanted)
        found: float = as_float(sum(forward_work(op, self.block, self._setting(op.path)).matmul_flops for op in ops))
        return found

    def _sum(self, prices: Iterable[tuple[str, OpPrice]], flops: float, collectives: Sequence[Collective]) -> Phase:
        given = list(prices)
        busy: dict[str, float] = {}
        for path, price in given:
            origin = path.partition(":")[0]
            busy[origin] = busy.get(origin, 0.0) + as_float(price.device_s)
        rings = sum(as_float(price.device_s) for path, price in given if path.endswith(RING))
        comm: dict[str, float] = {}
        for path in dict.fromkeys(c.path for c in collectives):
            mine = [c for c in collectives if c.path == path]
            for axis, seconds in self._exposed(mine, busy.get(path, 0.0)):
                comm[axis] = comm.get(axis, 0.0) + seconds
        compute_s = sum(as_float(price.device_s) for _, price in given)
        if self.context.expert_overlap and "ep" in comm:
            comm["ep"] = self._beside_another(comm["ep"], compute_s)
        counts: dict[str, int] = {}
        for collective in collectives:
            counts[collective.axis] = counts.get(collective.axis, 0) + collective.steps
        return Phase(
            compute_s=compute_s,
            attention_s=sum(busy.get(path, 0.0) for path in self.attending) - rings,
            comm_s=comm,
            kernels=sum(price.kernels for _, price in given) + sum(counts.values()),
            collectives=counts,
            flops=flops,
        )

    def _beside_another(self, sent_s: Any, compute_s: Any) -> Any:
        """Seconds that dispatch and combine add to another microbatch's computing of about `compute_s`, beside which
        they travel: what it does not hide, and the part of the device that their kernels hold meanwhile."""
        hidden = np.minimum(sent_s, compute_s)
        return as_float(sent_s - hidden + hidden * DISPATCH_SMS / self.device.num_sms)

    def _exposed(self, collectives: Sequence[Collective], busy_s: float) -> list[tuple[str, float]]:
        """(axis, seconds that kernels wait) of the collectives of one op, which computes for `busy_s`.

        A ring's rounds travel under the attention they feed: of n+1 rounds of computing, n hide a round of sending
        each; rounds beyond (the last gradient on its way home) hide under nothing. A collective cut into n parts
        overlaps with its op but for one part.
        """
        ring = [c for c in collectives if c.inside and c.kind == "send_recv" and self._attends(c.path)]
        out = []
        if ring:
            rounds = min(c.steps for c in ring)
            each = [self._seconds(c) for c in ring]
            late = sum(t * (c.steps - rounds) for t, c in zip(each, ring, strict=True))
            out.append((ring[0].axis, rounds * larger(sum(each) - busy_s / (rounds + 1), 0.0) + late))
        for collective in collectives:
            if collective in ring:
                continue
            seconds, parts = self._seconds(collective) * collective.steps, self._parts(collective.path)
            waited = larger(seconds / parts, seconds - busy_s * (parts - 1) / parts)
            out.append((collective.axis, larger(waited - self._beside(collective), 0.0)))
        return out

    def _beside(self, collective: Collective) -> float:
        """Seconds of products that a collective of the backward travels beside: of input gradients, for inputs that are
        gathered again for the weight gradients; of these, for sums over ranks of input gradients."""
        kind, again = collective.kind, collective.weight_grad
        if not self.facts.backward_overlap or collective.phase != "backward" or collective.inside:
            return 0.0
        if not again and kind not in ("reduce_scatter", "all_reduce"):
            return 0.0
        readers = {op.path for op in self.context.block.ops if collective.tensor in op.inputs}
        steps = self.grads[not again]
        found: float = sum(as_float(price.device_s) for path, price, _ in steps if path.partition(":")[0] in readers)
        return found

    def _seconds(self, collective: Collective) -> float:
        """One round; rows that skewed routing sends to the busiest rank with it."""
        skewed = collective.inside and collective.axis in ("ep", "etp")
        size = collective.bytes * (self.context.load if skewed else 1.0)
        if self._narrow_gather(collective) or self._narrow_sum(collective):
            size = size * 8 / DTYPE_BITS[self.context.precision.compute]
        link = self.links[collective.axis]
        if self.facts.fused_dispatch and collective.inside and collective.axis == "ep":
            seconds = self._sent_once(collective, size, link)
        else:
            seconds = collective_seconds(collective.kind, size, link)
        found: float = as_float(seconds)
        return found

    def _copies(self, link: AxisLink) -> dict[str, float]:
        """Copies of a token that go to nodes and to ranks, over its experts."""
        router = next(op for op in self.block.ops if op.kind == "router")
        experts, topk = (self.block.tensor(name).dims[-1].size for name in (router.inputs[0], router.outputs[0]))
        assert experts is not None and topk is not None
        groups, chosen = router.attr("groups", 1), router.attr("groups_per_token", 1)
        assert isinstance(groups, int) and isinstance(chosen, int)
        return {
            name: holders(places, experts, topk, groups, chosen) / topk
            for name, places in (("nodes", link.nodes), ("ranks", link.ranks))
        }

    def _sent_once(self, collective: Collective, size: Any, link: AxisLink) -> Any:
        """A dispatch or combine by DeepEP or HybridEP. HybridEP gathers all ranks' routing before it, and sends
        weights of all experts in the NVLink domain with each copy of a token and with its gradient."""
        copies, router = self._copies(link), next(op for op in self.block.ops if op.kind == "router")
        if not self.facts.routing_gathered or self._kind(collective.path) != "dispatch":
            return dispatch_seconds(size, link, **copies)
        sizes = self.sharded.sizes(router.path)
        scores, topk = self.block.tensor(router.inputs[0]).dims, self.block.tensor(router.outputs[0]).dims[-1]
        scored = math.prod(size_of(dim, sizes) for dim in scores)
        weights = 4 * scored * size_of(topk, sizes) * link.ranks_per_node / link.ranks
        seconds = dispatch_seconds(size + weights, link, **copies)
        return seconds + (
            collective_seconds("all_gather", scored * link.ranks, link) if collective.phase == "forward" else 0
        )

    def _parts(self, path: str) -> int:
        return max((parts for pattern, parts in self.context.split_paths if fnmatchcase(path, pattern)), default=1)

    def _attends(self, path: str) -> bool:
        return self.context.block.op(path).kind == "attention"

    def _all(self) -> tuple[str, ...]:
        """Paths of all ops that run."""
        return tuple(op.path for op in self.block.ops if op.kind not in VIEWS)

    def _collectives_again(self, again: Sequence[str]) -> list[Collective]:
        origins = {path.partition(":")[0] for path in again}
        return [c for c in self.sharded.forward if c.path in origins]


def _launched(price: OpPrice, op: Op) -> OpPrice:
    """The price without launches of an op that runs in the kernel of one before it (`joined`)."""
    return replace(price, kernels=0) if op.attr("joined", False) else price


def parameter_elements(price: LayerPrice) -> int:
    """Elements of the layer's parameters on one rank, before ZeRO divides them."""
    sharded = price.sharded
    return sum(int(sharded.local_elements[t.name]) for t in sharded.block.parameters)
