"""A plan applied to a Llama: the stages that one rank holds, each with its parameters and a forward.

`apply(config, graph, plan, groups)` returns a `Stage` for each stage of the Program on this rank (under ZeRO 3 a stage
is one layer). What is whole, divided or copied is read from room `sharding`, so memory and collectives are those that
the prediction counts. PlanError for what the plan asks and is not done here. Left out: when a stage runs (`execute`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gnomon.errors import PlanError
from gnomon.graph import Dtypes as GraphDtypes
from gnomon.graph import Graph, Layer
from gnomon.models.llama import LlamaConfig
from gnomon.plans import Plan, layer_presets, stage_layers
from gnomon.plans.parts import Preset
from gnomon.plans.stages import held_by_several
from gnomon.runtime.layers import TensorAxis, columns, cross_entropy, embedding, norm, row
from gnomon.runtime.mesh import Groups
from gnomon.runtime.model import NORM_EPS, attention_core, check_config, initial, rotary
from gnomon.runtime.parameters import CPU, Dtypes, Parameters, Slot, Tape, Weight
from gnomon.schedules.optimizer import effective_zero
from gnomon.sharding import ShardedBlock, shard_graph

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
"""What the runtime stores and computes in."""
ROWS = {"q_proj.weight": 2, "k_proj.weight": 2, "v_proj.weight": 2}
"""Leading dims that are outputs, where they are not 1 (matrices) or 0 (vectors)."""


class Stage(nn.Module):
    """Consecutive layers on one rank. Autograd holds activations; parameters are in `parameters`."""

    def __init__(self, config: LlamaConfig, layers: Sequence[Layer], parameters: Parameters, axis: TensorAxis) -> None:
        super().__init__()
        self.config, self.layers, self.parameters_, self.axis = config, tuple(layers), parameters, axis
        self.tape = Tape()
        self.first = layers[0].call.block == "embed"
        self.last = layers[-1].call.block == "head"
        self.presets: Mapping[str, Preset] = {}
        """Label of a decoder layer -> what of it is computed again in backward; left out: nothing."""
        self.every = 1

    def forward(self, x: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
        """x: (B, t, C) from the stage before, or any scalar that requires a gradient when it begins with the
        embedding. Returns (B, t, C), or the loss summed over tokens when it ends with the head."""
        run: list[Layer] = []
        for layer in self.layers:
            if layer.call.block == "embed":
                x = embedding(x, ids, self._weight(layer, "embed_tokens.weight", 1), self.axis)
            elif layer.call.block == "head":
                x = self._through(run, x)
                run = []
                x = self._head(layer, x, labels)
            else:
                run.append(layer)
        return self._through(run, x)

    def _through(self, run: Sequence[Layer], x: Tensor) -> Tensor:
        """Decoder layers; of those under full recompute `every` neighbours between two kept inputs."""
        first = 0
        while first < len(run):
            again = self.presets.get(run[first].label) == "full"
            part = run[first : first + (self.every if again else 1)]
            first += len(part)

            def forward(x: Tensor, part: Sequence[Layer] = part) -> Tensor:
                for layer in part:
                    x = self._decoder(layer, x)
                return x

            x = _again(forward, x) if again else forward(x)
        return x

    def _weight(self, layer: Layer, name: str, rows: int | None = None) -> Weight:
        full = layer.call.parameter_name(name, layer.index)
        if rows is None:
            rows = 1 if len(self.parameters_.by_name[full].shape) > 1 and not name.endswith(".bias") else 0
        return Weight(self.parameters_, full, self.tape, rows=rows)

    def _decoder(self, layer: Layer, x: Tensor) -> Tensor:
        w = _Named(self, layer)
        normed = norm(x, w["input_layernorm.weight"], NORM_EPS)
        names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        biases = tuple(w[f"{name}.bias"] for name in names) if self.config.qkv_bias else ()
        made = columns(normed, tuple(w[f"{name}.weight"] for name in names), self.axis, biases)
        q, k, v = (part.unflatten(-1, (-1, self.config.head_dim)) for part in made)
        if self.config.qk_norm:
            q, k = norm(q, w["self_attn.q_norm.weight"], NORM_EPS), norm(k, w["self_attn.k_norm.weight"], NORM_EPS)
        q, k = rotary(q), rotary(k)
        again = self.presets.get(layer.label) == "selective"
        core = _again(attention_core, q, k, v) if again else attention_core(q, k, v)
        x = x + row(core.flatten(2), w["self_attn.o_proj.weight"], self.axis)
        normed = norm(x, w["post_attention_layernorm.weight"], NORM_EPS)
        gate, up = columns(normed, (w["mlp.gate_proj.weight"], w["mlp.up_proj.weight"]), self.axis)
        return x + row(functional.silu(gate) * up, w["mlp.down_proj.weight"], self.axis)

    def _head(self, layer: Layer, x: Tensor, labels: Tensor) -> Tensor:
        w = _Named(self, layer)
        (logits,) = columns(norm(x, w["norm.weight"], NORM_EPS), (w["lm_head.weight"],), self.axis)
        return cross_entropy(logits, labels, self.axis)


class _Named:
    """Weights of one layer by their names in its block."""

    def __init__(self, stage: Stage, layer: Layer) -> None:
        self._stage, self._layer = stage, layer

    def __getitem__(self, name: str) -> Weight:
        rows = next((rows for end, rows in ROWS.items() if name.endswith(end)), None)
        return self._stage._weight(self._layer, name, rows)


def _again(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """The function's output, whose inside is computed again in backward."""
    out: Tensor = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
    return out


def apply(
    config: LlamaConfig, graph: Graph, plan: Plan, groups: Groups, *, seed: int = 0, device: torch.device = CPU
) -> dict[int, Stage]:
    """Stage number in the Program -> the stage, for those on this rank, filled with the values of step 0."""
    check_config(config)
    check_plan(plan)
    zero, mesh, here = effective_zero(plan), groups.mesh, groups.here
    axis = TensorAxis(
        group=groups.by_comm["tp"],
        ranks=mesh.tp,
        index=here.tp,
        sequence=plan.layout.sequence_parallel,
        keep_gathered=plan.layout.keep_gathered,
    )
    sizes = {"batch": 1, "seq": 2 * mesh.tp}  # any that tp divides: only parameters are asked for
    sharded = shard_graph(graph, plan.layout, mesh, sizes, GraphDtypes(param="fp32", compute="fp32"))
    found, number = dict[int, Stage](), 0
    presets, first = layer_presets(plan, graph), holders(plan, graph, zero)
    for index, layers in enumerate(stage_layers(plan, graph)):
        for part in [(layer,) for layer in layers] if zero == 3 else [layers]:
            if plan.pipeline_ranks[index] == here.pipeline_rank:
                counted = {name for name, stages in first.items() if stages[0] != number}
                slots = tuple(_slots(part, sharded, mesh.tp, here.tp, counted))
                held = Parameters(
                    slots,
                    dtypes(plan),
                    zero=zero,
                    shard=here.shard,
                    num_shards=mesh.dp_shard if zero else 1,
                    device=device,
                )
                held.fill(lambda slot: _part(slot, seed))
                found[number] = Stage(config, part, held, axis)
                found[number].presets, found[number].every = presets, plan.saved.every
            number += 1
    return found


def holders(plan: Plan, graph: Graph, zero: int) -> dict[str, tuple[int, ...]]:
    """Stages of the Program of each parameter that several of them hold (tied weights). zero: the ZeRO stage in effect;
    under 3 a stage of the Program is a layer."""
    stages = stage_layers(plan, graph)
    return held_by_several(graph, [(layer,) for part in stages for layer in part] if zero == 3 else stages)


def check_plan(plan: Plan) -> None:
    """PlanError for decisions that the runtime does not carry out, so that none is ignored."""
    layout, saved, optimizer = plan.layout, plan.saved, plan.optimizer
    refused = {
        f"schedule.vocabulary = {plan.schedule.vocabulary!r}": plan.schedule.vocabulary != "ends",
        "layout.rules": bool(layout.rules),
        "layout.vocab_parallel = false": not layout.vocab_parallel,
        "layout.loss_parallel = false": not layout.loss_parallel,
        "saved.rules without a preset": any(rule.preset is None for rule in saved.rules),
        "saved.rules beside saved.every": bool(saved.rules) and saved.every > 1,
        "overlap.splits": bool(plan.overlap.splits),
        "overlap.experts": plan.overlap.experts,
        "overlap.bucket_bytes": plan.overlap.bucket_bytes is not None,
        "optimizer.offload": optimizer.offload is not None,
        "optimizer.offload_parameters": optimizer.offload_parameters,
        "optimizer.delay": optimizer.delay > 0,
        f"optimizer.kind = {optimizer.kind!r}": optimizer.kind != "adamw",
        "precision.fp8": plan.precision.fp8 is not None,
        "saved.every under ZeRO 3": saved.every > 1 and optimizer.zero == 3,
        "placement": plan.device_of != tuple(range(plan.world_size)),
    }
    if asked := [name for name, is_asked in refused.items() if is_asked]:
        raise PlanError(f"the runtime does not carry out {', '.join(asked)} yet; leave it out of the plan")


def dtypes(plan: Plan) -> Dtypes:
    """Dtypes of the plan. PlanError for those that the runtime has not, or that it would have to mix."""
    p = plan.precision
    named = {"param": p.param, "grad": p.grad, "states": p.states, "compute": p.compute, "reduce": p.reduce}
    for field, name in (*named.items(), ("master", p.master)):
        if name not in DTYPES and name != "none":
            raise PlanError(f"the runtime has no {name} for precision.{field}; use one of {', '.join(DTYPES)}")
    if p.param != p.compute or p.reduce != p.grad:
        raise PlanError(
            f"the runtime computes in the dtype that parameters have and reduces gradients as they add up, but compute "
            f"is {p.compute} with param {p.param}, reduce {p.reduce} with grad {p.grad}; make each pair alike"
        )
    master = None if p.master in ("none", p.param) else DTYPES[p.master]
    return Dtypes(param=DTYPES[p.param], grad=DTYPES[p.grad], master=master, states=DTYPES[p.states])


def _slots(
    layers: Sequence[Layer], sharded: Mapping[str, ShardedBlock], tp: int, index: int, counted: set[str]
) -> Iterable[Slot]:
    """The stage's parameters one after the other, each once. index: this rank's along tp. counted: tied ones that an
    earlier stage counts."""
    start, seen = 0, set[str]()
    for layer in layers:
        block = sharded[layer.call.block]
        for tensor in block.block.parameters:
            name = layer.call.parameter_name(tensor.name, layer.index)
            if name in seen:
                continue
            seen.add(name)
            copies = block.copies.get(tensor.name, 1)
            whole = not block.homes[tensor.name].shards
            sizes = tuple(int(dim.size or 0) for dim in tensor.atoms)
            local = [_local(int(dim.size or 0), dim.name, block, tensor.name, tp) for dim in tensor.atoms]
            shape = tuple(length for length, _ in local)
            sums = "tp" if "tp" in block.partial_grads.get(tensor.name, ()) else "kv_copies" if copies > 1 else ""
            slot = Slot(
                name=name,
                shape=shape,
                whole=sizes,
                offset=tuple(index // same * length for length, same in local),
                start=start,
                holders=0 if name in counted else tp if whole else copies,
                sums=sums,
            )
            start = slot.stop
            yield slot


def _local(size: int, dim: str, block: ShardedBlock, tensor: str, tp: int) -> tuple[int, int]:
    """(elements of a dim on one rank, neighbouring ranks that hold the same ones). PlanError for uneven parts."""
    if "tp" not in block.homes[tensor].axes_of(dim):
        return size, tp
    if size % tp == 0:
        return size // tp, 1
    if tp % size == 0:
        return 1, tp // size
    raise PlanError(f"tp = {tp} does not divide {dim} = {size}, and the runtime does not pad; use a divisor")


def _part(slot: Slot, seed: int) -> Tensor:
    """This rank's part of a parameter at step 0."""
    whole = initial(slot.name, slot.whole, seed, torch.float64)
    for dim, (first, length) in enumerate(zip(slot.offset, slot.shape, strict=True)):
        whole = whole.narrow(dim, first, length)
    return whole
