"""A plan against the plain model, in small: whether it computes the same, and the first tensor that differs.

`in_small(graph, plan, workload)` gives the tiny job: the plan's own axes, schedule and layout with short dims and few
ranks on each axis. `compare(job)` runs in every rank of it: three steps in float64 beside `OneProcess`, torch's
autograd on whole tensors; it compares each activation as it lies on the rank, then each gradient, loss, gradient norm
and updated parameter. Returns `ParityResult`. Leaves out what float64 hides (dtypes) and speed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import lcm, prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gnomon.errors import PlanError
from gnomon.frontend.inputs import CodeModel
from gnomon.graph import Graph, Layer
from gnomon.graph.text_inputs import labels_of
from gnomon.models.tiny import tiny
from gnomon.plans import Experts, Mesh, Plan, Precision, Workload, check
from gnomon.plans.check import sample_tokens
from gnomon.runtime.data.packing import DOCUMENTS
from gnomon.runtime.launch.own_module import OwnModule
from gnomon.runtime.module.blocks import BlockRun
from gnomon.runtime.module.one_process import OneProcess
from gnomon.runtime.module.stage import Batch, Stage
from gnomon.runtime.ops.site import Axis
from gnomon.runtime.optim.update import AdamWSettings, Update, clip_scale, squares, summed
from gnomon.runtime.parameters.parameters import Parameters, Slot
from gnomon.runtime.step.execute import Executor
from gnomon.sharding.homes import routed_tensors
from gnomon.tensors.names import base, is_sequence

FP64 = Precision(param="fp64", compute="fp64", grad="fp64", reduce="fp64", master="none", states="fp64")
STEPS, TOLERANCE, SMALLEST = 3, 1e-9, 1e-11
"""Steps; largest difference over a tensor's largest element, or over the value; and what is no difference."""
LARGEST = 20_000_000
"""Most parameters of a model of the user's own, which is not made smaller."""
RANKS = 8
"""Most processes of a check."""
SETTINGS = AdamWSettings(lr=1e-2, clip_norm=0.4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Small:
    """A tiny job of a plan."""

    graph: Graph
    """The model, with small sizes."""
    plan: Plan
    """The plan on it, its axes made small too."""
    workload: Workload
    """The batch of a step."""
    packed: bool = False
    """Whether rows hold several documents each."""
    code: str = ""
    """The model as code, whose module every rank builds; empty for a model of Gnomon's own."""
    simplified: tuple[str, ...] = ()
    """What was made smaller than in the plan, other than sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityResult:
    """What a rank found; `merged` is of all."""

    first: str = ""
    """The first tensor that differs, in the order in which a step computes; empty for none."""
    off: float = 0.0
    """By how much: over its largest element."""
    order: tuple[int, int] = (1 << 30, 0)
    """(step and phase, place) of it."""
    tensors: int = 0
    """Compared on this rank."""
    largest: float = 0.0
    """Largest difference of all, as `off`."""
    loss: tuple[float, ...] = ()
    """Of each step."""


OF_EXPERTS = ("balance", "coefficient", "z_loss", "assignment", "bias_rate", "threshold")
"""Fields of `experts` that change what is learnt: most by the tokens of a microbatch, and the plain model takes the
batch as one."""


def in_small(graph: Graph, plan: Plan, workload: Workload, *, ranks: int = RANKS, code: str = "") -> Small:
    """Makes a tiny job that follows the plan's rules. ranks: most processes. code: the model, where it is code; then
    its dims are its own, and only the batch is small. PlanError where no small one follows the plan's rules."""
    if code and graph.num_parameters() > LARGEST:
        raise PlanError(
            f"{graph.name} has {graph.num_parameters():,} parameters, and code is compared as it is, up to "
            f"{LARGEST:,}; name a function that builds a smaller one"
        )
    simplified: list[str] = []
    # In float64 what differs is a mistake, not rounding.
    short = replace(plan, precision=FP64, placement=())
    usual = Experts()
    if unsupported := [name for name in OF_EXPERTS if getattr(plan.experts, name) != getattr(usual, name)]:
        simplified.append(
            f"without {', '.join(f'experts.{name}' for name in unsupported)}, which the plain model has not"
        )
        short = replace(short, experts=replace(plan.experts, **{name: getattr(usual, name) for name in OF_EXPERTS}))
    if not plan.stages:
        mesh = _fewer(plan.mesh, ranks)
        if mesh != plan.mesh:
            simplified.append(f"axes {plan.mesh.describe()} in small: {mesh.describe()}")
        short = replace(short, mesh=mesh)
    if short.world_size > ranks:
        raise PlanError(f"the plan's stages have {short.world_size} ranks, and a check runs up to {ranks}; see --ranks")
    meshes = [short.stage_mesh(stage) for stage in range(short.num_stages)]
    tp = lcm(*(mesh.tp for mesh in meshes)) * (meshes[0].cp if plan.layout.context == "ulysses" else 1)
    # Two parts a rank of cp, as zigzag cuts a sequence, each divided over tp; and 8 positions at least.
    ways = 2 * meshes[0].cp * tp
    seq_len = ways * max(1, -(-8 // ways))
    listed = plan.stages or plan.schedule.layers_per_stage or plan.saved.rules
    deep = max(call.repeat for call in graph.calls) if listed else max(2, short.num_stages)
    if code and all(atom.size is not None for tensor in graph.inputs for atom in tensor.atoms if atom.name == "seq"):
        seq_len = workload.seq_len
    seq_len = sample_tokens(graph) or seq_len
    ep = max(mesh.ep for mesh in meshes)
    small = graph if code else tiny(graph, tp=tp, ep=ep, layers=deep, positions=seq_len)
    # Stages may divide a microbatch differently: its sequences must divide by each.
    rows = lcm(*(sum(stage.shares) or stage.mesh.data_ranks for stage in plan.stages), *(m.data_ranks for m in meshes))
    why: PlanError | None = None
    pp = short.num_pipeline_ranks
    # Some schedules want a multiple of pp, or more than one: the first number that the plan's rules accept.
    for count in dict.fromkeys((2 * pp, pp, 4 * pp, plan.schedule.num_microbatches or pp)):
        schedule = replace(plan.schedule, num_microbatches=count, micro_batch_size=None)
        sizes = workload.sizes if code else tuple((name, seq_len) for name, _ in workload.sizes)
        small_workload = Workload(global_batch_size=rows * count, seq_len=seq_len, router=workload.router, sizes=sizes)
        chosen = replace(short, schedule=schedule)
        try:
            check(chosen, small, None, small_workload)
        except PlanError as error:
            why = error
            continue
        return Small(graph=small, plan=chosen, workload=small_workload, code=code, simplified=tuple(simplified))
    assert why is not None
    raise why


def _fewer(mesh: Mesh, ranks: int) -> Mesh:
    """The mesh with at most two ranks on an axis (experts as far as they then divide), and at most so many in all: the
    outermost axes lose theirs first."""
    if mesh.world_size <= min(ranks, 4):
        return mesh
    sizes = {axis: min(getattr(mesh, axis), 2) for axis in ("dp_replicate", "dp_shard", "pp", "cp", "tp")}
    for axis in ("dp_replicate", "dp_shard", "pp", "cp"):
        if prod(sizes.values()) > ranks:
            sizes[axis] = 1
    # Experts lie on ranks of the other axes (folding), so ep and etp cannot be more than these.
    folded = sizes["dp_shard"] * sizes["cp"] * sizes["tp"]
    etp = min(mesh.etp, 2) if folded > 1 else 1
    ep = min(mesh.ep, folded // etp)
    return replace(mesh, **sizes, ep=ep, etp=etp)


def compare(job: Small) -> ParityResult:
    """Compares the plan with the plain model on all ranks and returns their common result; each rank calls it."""
    mine = _compare(job)
    everyone: list[ParityResult] = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    first = min(everyone, key=lambda one: one.order)
    return replace(
        first,
        tensors=sum(one.tensors for one in everyone),
        largest=max(one.largest for one in everyone),
        loss=mine.loss,
    )


def _compare(job: Small) -> ParityResult:
    own = OwnModule.of(job.code, 3) if job.code else None
    values, states = (None, None) if own is None else (own.start(None), _doubled(own.states))
    graph = job.graph if own is None else own.graph
    executor = Executor(graph, job.plan, job.workload, seed=3, settings=SETTINGS, values=values, states=states)
    plain = OneProcess(graph, seed=3, dtype=torch.float64, values=values, states=states)
    update = Update.of(plain.parameters, job.plan.optimizer.kind)
    differences, losses = _Found(), []
    for step in range(STEPS):
        batch = batch_of(job, step)
        seen = _Plain(plain) if step == 0 else None
        loss = plain.loss(batch, count=_counted(job, batch))
        grads = plain.parameters.whole_grad().clone()
        norm = summed([squares(plain.parameters)], plain.parameters.device).sqrt()
        update.update(plain.parameters, SETTINGS, scale=clip_scale(norm, SETTINGS.clip_norm) if _clips(job) else 1.0)
        if seen is not None:
            seen.close()
            _watch(executor, seen, plain, grads, differences)
        result = executor.step(batch)
        executor.state.watch = None
        for stage in executor.stages.values():
            stage.watch = None
        total = executor.total_loss(result)
        losses.append(total)
        # Behind all activations of its step, whose places are smaller.
        differences.value(f"loss of step {step}", total, loss, (2 * step, 1 << 20))
        if _clips(job):
            differences.value(
                f"gradient norm of step {step}", float(result.grad_norm), float(norm), (2 * step, 1 << 21)
            )
    executor.synchronise()
    for parameters, _ in executor.parameters():
        for slot, (low, high) in parameters.pieces():
            whole = _part(plain.parameters, slot, plain.parameters.flat)
            # `low` counts within this rank's shard; the plain model's part is whole, from the parameter's first element
            # on.
            want = whole[parameters.mine[0] + low - slot.start :][: high - low]
            differences.tensor(f"{slot.name} after {STEPS} steps", parameters.shard[low:high], want, (2 * STEPS, 0))
    executor.leave()
    return replace(differences.result(), loss=tuple(losses))


def _doubled(states: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.double() if x.is_floating_point() else x for name, x in states.items()}


def _counted(job: Small, batch: Batch) -> int:
    """Labels that a loss is the mean of; of a model without labels its tokens."""
    name = labels_of(job.graph) if job.code else "labels"
    if name in batch:
        return max(1, int((batch[name] >= 0).sum()))
    return job.workload.global_batch_size * job.workload.seq_len


def _clips(job: Small) -> bool:
    return job.plan.optimizer.clip


def batch_of(job: Small, step: int) -> Batch:
    """Inputs of a step, drawn alike on every rank: each integer one of those that its op reads, the rest from a normal
    distribution. Labels of a model of text are its next tokens."""
    sizes = {"batch": job.workload.global_batch_size, "seq": job.workload.seq_len, **dict(job.workload.sizes)}
    if job.code:
        return CodeModel.parse(job.code).example(sizes, seed=100 + step)
    generator, batch = torch.Generator().manual_seed(100 + step), dict[str, Tensor]()
    for tensor in job.graph.inputs:
        shape = [prod(atom.size or sizes[atom.name] for atom in dim.atoms) for dim in tensor.dims]
        if tensor.dtype == "int64":
            batch[tensor.name] = torch.randint(0, _values_of(job.graph, tensor.name), shape, generator=generator)
        else:
            batch[tensor.name] = torch.randn(shape, generator=generator, dtype=torch.float64)
    read = batch.get("decoder_input_ids", batch.get("input_ids"))
    if read is not None and "labels" in batch and batch["labels"].shape == read.shape:
        batch["labels"] = torch.cat([read[:, 1:], batch["labels"][:, -1:]], dim=1)
    if job.packed:
        # Some four documents a row; a number counts up where one begins.
        begins = torch.rand(sizes["batch"], sizes["seq"], generator=generator) < 4 / sizes["seq"]
        batch[DOCUMENTS] = begins.cumsum(dim=1)
    return batch


def _values_of(graph: Graph, name: str) -> int:
    """How many values an integer input can have: rows of the table that it looks up, or classes that it is one of."""
    values = []
    for call in graph.calls:
        inside = {own for own, outer in call.inputs if outer == name}
        block = graph.block(call.block)
        for op in block.ops:
            if op.does == "looks up" and op.inputs[0] in inside:
                values.append(block.tensor(op.inputs[1]).dims[0].size)
            elif op.does == "compares labels" and op.inputs[1] in inside:
                values.append(block.tensor(op.inputs[0]).dims[-1].size)
    if not values or None in values:
        raise PlanError(f"{graph.name} reads the integers {name}, and no table or loss says how many there are")
    return min(value for value in values if value is not None)


class _Found:
    """Differences as they are found."""

    def __init__(self) -> None:
        self.best = ParityResult()
        self.count, self.largest = 0, 0.0

    def tensor(self, name: str, have: Tensor, want: Tensor, order: tuple[int, int]) -> None:
        self.count += 1
        if have.numel() != want.numel():
            self._note(f"{name}, of shape {tuple(have.shape)} and not {tuple(want.shape)},", float("inf"), order)
            return
        if not want.numel():
            return
        far = float((have.reshape(-1) - want.reshape(-1)).abs().max())
        # The floor makes a difference of at most SMALLEST pass, whatever the tensor's size.
        self._note(name, far / max(float(want.abs().max()), SMALLEST / TOLERANCE), order)

    def value(self, name: str, have: float, want: float, order: tuple[int, int]) -> None:
        self.count += 1
        self._note(name, abs(have - want) / max(abs(want), SMALLEST / TOLERANCE), order)

    def _note(self, name: str, off: float, order: tuple[int, int]) -> None:
        self.largest = max(self.largest, off)
        # `not <=` also catches NaN.
        if not off <= TOLERANCE and order < self.best.order:
            self.best = ParityResult(first=name, off=off, order=order)

    def result(self) -> ParityResult:
        return replace(self.best, tensors=self.count, largest=self.largest)


class _Plain:
    """Activations of the plain model, by layer and name, in order."""

    def __init__(self, plain: OneProcess) -> None:
        self.values: dict[tuple[str, str], Tensor] = {}
        self.stage = plain.stage
        self.stage.watch = self._note

    def _note(self, layer: Layer, name: str, value: Tensor) -> None:
        self.values.setdefault((layer.label, name), value.detach())

    def close(self) -> None:
        self.stage.watch = None


def _watch(executor: Executor, plain: _Plain, plain_process: OneProcess, grads: Tensor, differences: _Found) -> None:
    """Compares what the step computes as it does."""
    place = {key: at for at, key in enumerate(plain.values)}
    seen = set[tuple[str, str, int]]()

    def activation(stage: Stage, layer: Layer, name: str, value: Tensor) -> None:
        run = stage.runs[layer.call.block]
        key = stage.whole[layer.label].label, name, stage.unit
        if key in seen or name in routed_tensors(run.block) or not value.ndim:
            return  # recomputed in backward, or rows of other ranks' tokens
        seen.add(key)
        want = _local(plain.values[key[:2]], run, name, executor, stage.unit)
        if want is not None:
            differences.tensor(f"{name} of {key[0]}, microbatch {key[2]}", value.detach(), want, (0, place[key[:2]]))

    def gradient(parameters: Parameters) -> None:
        for at, (slot, (low, high)) in enumerate(parameters.pieces()):
            want = _part(plain_process.parameters, slot, grads)[parameters.mine[0] + low - slot.start :][: high - low]
            # Backward comes to the last parameters first: -at.
            differences.tensor(f"gradient of {slot.name}", parameters.my_grad()[low:high], want, (1, -at))

    for stage in executor.stages.values():
        stage.watch = partial(activation, stage)
    executor.state.watch = gradient


def _local(whole: Tensor, run: BlockRun, name: str, executor: Executor, unit: int) -> Tensor | None:
    """What of a tensor of the whole batch lies on this rank for a unit; None where that is not said."""
    axes: Mapping[str, Axis] = run.axes
    dims = run.block.tensor(name).dims
    if not dims or base(dims[0].name) != "batch":
        return None
    first = unit * executor.feed.rows_of_unit + executor.feed.first_row
    part = whole[first : first + executor.feed.local_rows]
    home = run.homes[name]
    for at, dim in enumerate(dims[1:], start=1):
        for atom in dim.atoms:
            for axis in home.axes_of(atom.name):
                if axes[axis].ranks == 1:
                    continue
                if atom != dim.atoms[0]:
                    return None
                part = _chunk(part, at, axes[axis], is_sequence(atom.name))
    return part


def _chunk(x: Tensor, dim: int, axis: Axis, positions: bool) -> Tensor:
    length = x.shape[dim]
    if positions and axis.order != "contiguous":
        return x.index_select(dim, axis.positions(length // axis.ranks, x.device))
    if length % axis.ranks:  # fewer heads than ranks: neighbours have the same
        return x.narrow(dim, axis.index * length // axis.ranks, 1)
    return x.chunk(axis.ranks, dim)[axis.index]


def _part(parameters: Parameters, slot: Slot, flat: Tensor | None) -> Tensor:
    """This rank's part of a parameter, flat, of a buffer that has all of it."""
    assert flat is not None
    own = parameters.by_name[slot.name]
    return slot.part(flat[own.start : own.stop].view(slot.whole)).reshape(-1)


def lines(compared: ParityResult, job: Small) -> Iterator[str]:
    """The comparison as lines of text."""
    w = job.workload
    yield from job.simplified
    yield (
        f"{job.graph.name}: {job.graph.num_parameters():,} parameters, {w.global_batch_size} sequences of {w.seq_len} "
        f"tokens on {job.plan.world_size} ranks, {STEPS} steps in fp64 beside the plain model"
    )
    if compared.first:
        yield f"differs: {compared.first} is off by {compared.off:.1e} of its largest element; limit {TOLERANCE:.0e}"
    else:
        yield f"equal: {compared.tensors:,} tensors and values, the largest difference {compared.largest:.1e}"


def to_mapping(compared: ParityResult, job: Small) -> dict[str, Any]:
    """The comparison as plain values, for `--json`."""
    return {
        "equal": not compared.first,
        "first": compared.first or None,
        "off": compared.off,
        "largest": compared.largest,
        "compared": compared.tensors,
        "loss": list(compared.loss),
        "ranks": job.plan.world_size,
        "parameters": job.graph.num_parameters(),
        "smaller": list(job.simplified),
    }
