"""The price of one layer on one rank: seconds by phase, device and host apart, and bytes kept for its backward.

`layer_price(context)` is a pure function of a `LocalContext`, which holds everything a price may depend on and is
the key of the only memo. Work, kernels and collectives are derived from the graph (`sharding.shard_block`,
`graph.backward`); nothing is tabulated per model. Leaves out: pipelines, data-parallel reductions and the optimizer
(`step`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from gnomon.graph import Block, Dtypes, Kernels, Setting, Tensor, backward, forward_work, grad_work, saved, storages
from gnomon.graph.types import VIEWS
from gnomon.hardware import Device
from gnomon.plans import Layout, Mesh, Precision
from gnomon.plans.saving import LayerSaving
from gnomon.prices.collectives import collective_seconds
from gnomon.prices.curves import Curves, curves_for
from gnomon.prices.kernels import OpPrice, grad_seconds, op_seconds
from gnomon.prices.links import AxisLink
from gnomon.sharding import Collective, ShardedBlock, causal_shares, shard_block


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalContext:
    """Everything that the price of a layer depends on."""

    block: Block
    """What it computes."""
    no_grad: tuple[str, ...]
    """Inputs that want no gradient."""
    sizes: tuple[tuple[str, int], ...]
    """Sizes that the workload gives: `batch` of one data-parallel rank's microbatch, `seq` of the whole sequence …"""
    mesh: Mesh
    """Axes of the stage."""
    layout: Layout
    """How tensors lie on them."""
    links: tuple[tuple[str, AxisLink], ...]
    """Axis -> what its collectives run over."""
    saving: LayerSaving
    """What is kept, recomputed or offloaded."""
    whole_recompute: bool
    """The layer's whole forward is run again (as Megatron-LM's full recompute does), not the least that suffices."""
    precision: Precision
    kernels: Kernels
    device: Device
    split_paths: tuple[tuple[str, int], ...] = ()
    """Op paths whose collectives are cut into parts that overlap with the op (asynchronous tensor parallelism)."""
    load: float = 1.0
    """Busiest over mean tokens of this rank's experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Forward, input gradient, weight gradient or recompute of a layer on one rank."""

    compute_s: float = 0.0
    """Device seconds of kernels."""
    comm_s: Mapping[str, float] = field(default_factory=dict)
    """Axis -> seconds of collectives that the kernels wait for."""
    kernels: int = 0
    """Launches."""
    flops: float = 0.0
    """Matrix FLOPs of the mathematics on this rank."""

    def __add__(self, other: Phase) -> Phase:
        axes = {*self.comm_s, *other.comm_s}
        return Phase(
            compute_s=self.compute_s + other.compute_s,
            comm_s={axis: self.comm_s.get(axis, 0.0) + other.comm_s.get(axis, 0.0) for axis in sorted(axes)},
            kernels=self.kernels + other.kernels,
            flops=self.flops + other.flops,
        )

    def __mul__(self, times: int) -> Phase:
        return Phase(
            compute_s=self.compute_s * times,
            comm_s={axis: seconds * times for axis, seconds in self.comm_s.items()},
            kernels=self.kernels * times,
            flops=self.flops * times,
        )

    @property
    def device_s(self) -> float:
        """Kernels and the collectives they wait for."""
        return self.compute_s + sum(self.comm_s.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A tensor kept between forward and backward."""

    tensor: str
    """Name in the lowered block."""
    is_input: bool
    """It is an input of the layer, so the layer before may hold the same storage."""
    is_logits: bool
    """It has the vocabulary as a dim: logits, their fp32 copy, log-probabilities."""
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPrice:
    """One layer, one microbatch, one rank."""

    forward: Phase
    input_grad: Phase
    weight_grad: Phase
    recompute: Phase
    kept: tuple[Kept, ...]
    """What stays in device memory between forward and backward."""
    offloaded_bytes: int
    """What leaves device memory and comes back."""
    remade_bytes: int
    """What recomputation makes again: alive while this layer's backward runs."""
    transient_bytes: int
    """Largest gradients alive at once inside the backward."""
    input_bytes: int
    """Activations that the layer reads from layers before."""
    output_bytes: int
    """Its outputs, as they lie between layers."""
    sharded: ShardedBlock
    """The layer on the mesh: for its parameters."""


@lru_cache(maxsize=4096)
def layer_price(context: LocalContext) -> LayerPrice:
    """The price. UnpricedError names an op, link or number format without one."""
    return _Pricing(context).price()


class _Pricing:
    """One layer being priced."""

    def __init__(self, context: LocalContext) -> None:
        self.context = context
        self.dtypes = Dtypes(compute=context.precision.compute, param=context.precision.compute)
        sizes = dict(context.sizes)
        self.sharded = shard_block(
            context.block, context.layout, context.mesh, sizes, self.dtypes, no_grad=context.no_grad
        )
        self.back = backward(context.block, context.kernels, self.dtypes, no_grad_inputs=context.no_grad)
        self.block = self.back.forward
        self.curves: Curves = curves_for(context.device)
        self.links = dict(context.links)
        self.causal_share = self._causal_share(sizes)
        self.ops = {op.path: op for op in self.block.ops}
        self.readers = {name: op.path for op in reversed(self.block.ops) for name in (*op.inputs, *op.outputs)}

    def price(self) -> LayerPrice:
        """All phases and bytes."""
        forward = {op.path: self._op(op.path) for op in self.block.ops if op.kind not in VIEWS}
        fates = saved(self.back, dict(self.context.saving.policy), self.dtypes)
        again = self._again(fates.recompute_ops)
        return LayerPrice(
            forward=self._sum(forward.values(), self._forward_flops(forward), self.sharded.forward),
            input_grad=self._grads(weight=False),
            weight_grad=self._grads(weight=True),
            recompute=self._sum(
                [forward[path] for path in again if path in forward],
                self._forward_flops(again),
                self._collectives_again(again),
            ),
            kept=self._kept([entry.tensor for entry in fates.kept]),
            offloaded_bytes=sum(self._bytes(entry.tensor) for entry in fates.offloaded),
            remade_bytes=sum(self._bytes(entry.tensor) for entry in fates.recomputed),
            transient_bytes=self._transient(),
            input_bytes=sum(
                self._bytes(self.block.tensor(n)) for n in self.block.inputs if n not in self.context.no_grad
            ),
            output_bytes=sum(self._bytes(self.block.tensor(n)) for n in self.block.outputs),
            sharded=self.sharded,
        )

    def _causal_share(self, sizes: Mapping[str, int]) -> float | None:
        """Share of a causal square that the busiest rank works on when sequences are divided over cp."""
        cp = self.context.mesh.cp
        if cp == 1 or "seq" not in sizes or self.context.layout.context == "ulysses":
            return None
        return float(max(causal_shares(sizes["seq"], cp, self.context.layout.context_order)))

    def _setting(self, path: str) -> Setting:
        return Setting(sizes=self.sharded.sizes(path), dtypes=self.dtypes, causal_flops="half")

    def _low(self, path: str) -> bool:
        fp8 = self.context.precision.fp8
        return fp8 is not None and not any(part in path for part in ("head", "router", *fp8.except_ops))

    def _op(self, path: str) -> OpPrice:
        op = self.ops[path]
        share = self.causal_share if op.kind == "attention" else None
        return op_seconds(
            op,
            self.block,
            self._setting(path),
            self.context.device,
            self.curves,
            fp8=self._low(path),
            load=self.context.load,
            causal_share=share,
        )

    def _grads(self, *, weight: bool) -> Phase:
        prices, flops = [], 0.0
        for grad in self.back.ops:
            if (grad.phase == "weight_grad") != weight:
                continue
            # an accumulation is named by its tensor: it has the sizes of an op that reads it
            setting = self._setting(self.readers[grad.path] if grad.phase == "accumulate" else grad.path)
            share = self.causal_share if self._kind(grad.path) == "attention" else None
            prices.append(
                grad_seconds(
                    grad,
                    self.block,
                    setting,
                    self.context.device,
                    self.curves,
                    fp8=self._low(grad.path),
                    load=self.context.load,
                    causal_share=share,
                )
            )
            flops += float(grad_work(grad, self.block, setting).matmul_flops)
        return self._sum(prices, flops, [c for c in self.sharded.backward if c.weight_grad == weight])

    def _kind(self, path: str) -> str:
        op = self.ops.get(path)
        return op.kind if op is not None else ""

    def _forward_flops(self, paths: object) -> float:
        wanted = set(paths)  # type: ignore[call-overload]
        ops = (op for op in self.block.ops if op.path in wanted)
        return float(sum(forward_work(op, self.block, self._setting(op.path)).matmul_flops for op in ops))

    def _sum(self, prices: object, flops: float, collectives: Sequence[Collective]) -> Phase:
        given: list[OpPrice] = list(prices)  # type: ignore[call-overload]
        comm: dict[str, float] = {}
        for collective in collectives:
            comm[collective.axis] = comm.get(collective.axis, 0.0) + self._exposed(collective)
        return Phase(
            compute_s=float(sum(float(p.device_s) for p in given)),
            comm_s=comm,
            kernels=sum(p.kernels for p in given) + len(collectives),
            flops=flops,
        )

    def _exposed(self, collective: Collective) -> float:
        """Seconds that kernels wait for a collective: a ring's rounds hide under the attention they feed, and a
        collective in n parts overlaps with its op but for one part."""
        link = self.links[collective.axis]
        seconds = float(collective_seconds(collective.kind, collective.bytes, link)) * collective.steps
        parts = dict(self.context.split_paths).get(collective.path, 1)
        if collective.kind == "send_recv" and collective.inside and collective.path in self.ops:
            busy = float(self._op(collective.path).device_s)
            return max(seconds - busy * (collective.steps / (collective.steps + 1)), 0.0)
        return seconds / parts

    def _again(self, least: tuple[str, ...]) -> tuple[str, ...]:
        """Paths of ops that run a second time."""
        if self.context.whole_recompute:
            return tuple(op.path for op in self.block.ops if op.kind not in VIEWS)
        return least

    def _collectives_again(self, again: Sequence[str]) -> list[Collective]:
        origins = {path.partition(":")[0] for path in again}
        return [c for c in self.sharded.forward if c.path in origins]

    def _bytes(self, tensor: Tensor) -> int:
        return int(self.sharded.kept_bytes_of(tensor))

    def _kept(self, tensors: Sequence[Tensor]) -> tuple[Kept, ...]:
        roots = storages(self.block, self.dtypes)
        inputs = {roots[name] for name in self.block.inputs}
        return tuple(
            Kept(
                tensor=tensor.name,
                is_input=roots[tensor.name] in inputs,
                is_logits=any(atom.name.split(".")[-1] == "vocab" for atom in tensor.atoms),
                bytes=self._bytes(tensor),
            )
            for tensor in tensors
            if tensor.kind != "parameter"
        )

    def _transient(self) -> int:
        """Gradients of activations alive in the most demanding step of the backward."""
        most = 0
        for grad in self.back.ops:
            names = dict.fromkeys((*grad.grads_in, *grad.grads_out))
            tensors = [self.block.tensor(name) for name in names]
            most = max(most, sum(int(self.sharded.bytes_of(t)) for t in tensors if t.kind != "parameter"))
        return most


def parameter_elements(price: LayerPrice) -> int:
    """Elements of the layer's parameters on one rank, before ZeRO divides them."""
    sharded = price.sharded
    return sum(int(sharded.local_elements[t.name]) for t in sharded.block.parameters)
