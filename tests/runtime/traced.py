"""What really ran in a step, seen from outside the interpreter: stages called, backwards, bytes handed to torch.

Functions of torch are replaced by ones that note their call, so nothing here is the runtime's own account of itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from runtime.parity import CONFIG, PLANS, WORKLOAD, float32, schedule
from torch import Tensor
from torch.autograd.graph import GradientEdge

from gnomon.plans import Mesh, Optimizer, Plan
from gnomon.program import issue_order_peak, validate
from gnomon.runtime import Executor, Parameters, Update
from gnomon.runtime.mesh.collectives import GATHER, SCATTER
from gnomon.runtime.mesh.groups import AXES as MESH_AXES
from gnomon.runtime.module.stage import Batch
from gnomon.runtime.step.rows import stages_of_row

Call = tuple[str, str, int, int]
"""(collective, mesh axes, ranks, bytes of the whole buffer)."""
AXES = MESH_AXES | {"kv_copies": ("tp",), "norm": ("all",), "embedding": ("pp",)}
"""Communicator -> mesh axes."""


ORDERS = [
    name
    for name, plan in PLANS.items()
    if plan.saved.preset == "none" and not plan.stages and plan.optimizer.offload is None
]
"""Plans that are traced: recompute calls forwards again, which is no action of the Program; where ranks have other
shares or meshes than each other, what each communicates is its own; an update on the host makes no call of torch's that
is traced (`test_host_update` counts its copies)."""


WHOLE_MATRICES = {
    f"{kind}, {name}": Plan(
        mesh=mesh,
        schedule=schedule("one_f_one_b", 2),
        optimizer=Optimizer(kind=kind, zero=zero),  # type: ignore[arg-type]
    )
    for kind in ("adafactor", "muon")
    for name, mesh, zero in (("tp", Mesh(tp=2), 0), ("zero 1", Mesh(dp_shard=2), 1), ("zero 3", Mesh(dp_shard=2), 3))
}
"""Plans whose updates communicate."""


@dataclass
class Trace:
    actions: list[str] = field(default_factory=list)
    """`2F0`, `2B0`, `2W`, `SEND>1`, `AR`, `OPT` … in the order in which they happened, each once."""
    calls: list[Call] = field(default_factory=list)

    most_saved: int = 0
    """Most (stage, unit) whose activations were held at once."""

    def note(self, action: str) -> None:
        if not self.actions or self.actions[-1] != action:
            self.actions.append(action)


def ids_of_step() -> Tensor:
    """Sequences that repeat their own number, so that a unit is known by its ids, whichever positions a rank has."""
    assert WORKLOAD.global_batch_size <= CONFIG.vocab_size
    return torch.arange(WORKLOAD.global_batch_size)[:, None].repeat(1, WORKLOAD.seq_len + 1)


def axes_of(executor: Executor, group: Any) -> str:
    """Mesh axes of more than one rank that a group goes over, `dp_replicate+dp_shard`."""
    comms = [comm for comm, made in executor.groups.by_comm.items() if made is group]
    return named(AXES.get(comms[0], ("pp",)), executor.groups.mesh)  # others are channels of messages


def named(axes: Iterable[str], mesh: Mesh) -> str:
    return "+".join(axis for axis in axes if getattr(mesh, axis, 2) > 1 or axis == "pp")


@contextmanager
def watching(executor: Executor, ids: Tensor) -> Iterator[Trace]:
    trace = Trace()
    made: dict[int, str] = {}
    keep: list[object] = []  # so that no other has its id
    stage_of = {id(held): number for number, stage in executor.stages.items() for held in stage.own_parameters}
    inside = [False]
    originals: dict[Any, Any] = {}
    pair = dist.P2POp

    def called(number: int) -> Callable[..., None]:
        def hook(_: object, inputs: tuple[Batch, Batch], outputs: dict[str, Tensor]) -> None:
            unit = int(inputs[1]["input_ids"][0, 0]) // executor.feed.rows_of_unit
            trace.note(f"{number}F{unit}")
            for y in outputs.values():
                made[id(y.grad_fn)] = f"{number}B{unit}"
                keep.append(y.grad_fn)
            trace.most_saved = max(trace.most_saved, 1 + len(executor.compute.saved) + len(executor.compute.aside))

        return hook

    backward, place, update = torch.autograd.backward, Parameters._place, Update.update

    def backward_(tensors: tuple[GradientEdge, ...], grads: tuple[Tensor, ...]) -> None:
        trace.note(made[id(tensors[0].node)])
        inside[0] = True
        backward(tensors, grads)
        inside[0] = False

    def place_(self: Parameters, name: str) -> tuple[Tensor, bool]:
        if not inside[0]:
            trace.note(f"{stage_of[id(self)]}W")
        return place(self, name)

    def update_(self: Update, parameters: Parameters, *args: Any, **named: Any) -> None:
        trace.note(f"{stage_of[id(getattr(parameters, 'device_part', parameters))]}OPT")
        update(self, parameters, *args, **named)

    def noted(name: str, kind: str, whole: int) -> Any:
        function = getattr(dist, name)

        def wrapper(*tensors: Any, **named: Any) -> Any:
            group = named["group"]
            trace.calls.append((kind, axes_of(executor, group), dist.get_world_size(group), tensors[whole].nbytes))
            if named.get("async_op") or tensors[whole].numel() == 1:
                trace.note(kind)
            return function(*tensors, **named)

        return patch.object(dist, name, wrapper)

    def message(name: str, kind: str) -> Any:
        function = getattr(dist, name)

        def wrapper(tensor: Tensor, peer: int, **named: Any) -> Any:
            trace.calls.append((name, axes_of(executor, named["group"]), 2, tensor.nbytes))
            trace.note(f"{kind}>{peer} tag {named['tag']}")
            return function(tensor, peer, **named)

        originals[wrapper] = function
        return patch.object(dist, name, wrapper)

    def of_ring(op: Any, tensor: Tensor, peer: int, group: Any, tag: int) -> Any:
        """A message of a ring, which is started with another one: noted once, by its sender."""
        if originals[op].__name__ == "isend":
            trace.calls.append(("send_recv", axes_of(executor, group), dist.get_world_size(group), tensor.nbytes))
        return pair(originals[op], tensor, peer, group, tag)

    hooks = [stage.register_forward_hook(called(number)) for number, stage in executor.stages.items()]
    with (
        patch.object(torch.autograd, "backward", backward_),
        patch.object(Parameters, "_place", place_),
        patch.object(Update, "update", update_),
        noted("all_reduce", "all_reduce", 0),
        noted(GATHER, "all_gather", 0),
        noted(SCATTER, "reduce_scatter", 1),
        noted("all_to_all_single", "all_to_all", 0),
        message("isend", "SEND"),
        message("irecv", "RECV"),
        patch.object(dist, "P2POp", of_ring),
    ):
        yield trace
    for hook in hooks:
        hook.remove()


def expected_actions(executor: Executor) -> list[str]:
    """The rows of this rank's class of the Program, in the words of `Trace.actions`."""
    program, cls = executor.program, executor.groups.here.pipeline_rank
    place = executor.groups.here.position
    plain = {"AR": "all_reduce", "NORM": "all_reduce", "UNSHARD": "all_gather", "REDUCE_GRAD": "reduce_scatter"}
    actions: list[str] = []
    for row in range(int(program.class_ptr[cls]), int(program.class_ptr[cls + 1])):
        kind, stage, unit = program.kinds[program.kind[row]].name, int(program.stage[row]), int(program.unit[row])
        if kind in ("F", "B"):
            text = f"{stage}{kind}{unit}"
        elif kind == "I":
            text = f"{stage}B{unit}"
        elif kind in ("W", "OPT"):
            text = f"{stage}{kind}"
        elif kind.startswith(("SEND", "RECV")):
            forward = kind.endswith("F")
            other = stage + (1 if forward == kind.startswith("SEND") else -1)
            peer = executor.plan.stage_ranks[executor.messages.plan_stage[other]][place]
            arrives = other if kind.startswith("SEND") else stage
            tag = (unit * program.num_stages + arrives) * 2 + (not forward)
            text = f"{kind[:4]}>{peer} tag {tag}"
        elif kind == "HOST_OPT":
            for of in stages_of_row(program, row):
                actions.append(f"{of}OPT")
            continue
        elif kind in ("RESHARD", "D2H", "HOST_ADD", "H2D") or (kind == "NORM" and executor.plan.world_size == 1):
            continue
        else:
            text = plain[kind]
        if not actions or actions[-1] != text:
            actions.append(text)
    return actions


Traced = tuple[list[str], list[str], list[Call], tuple[int, int]]
"""(actions that ran, actions of the Program, collectives and messages, most (stage, unit) held and foreseen)."""


def foreseen(executor: Executor) -> int:
    """Most S that this rank holds at once, by the Program."""
    structure = validate(executor.program)
    sizes = {buffer.name: float(buffer.name == "S") for buffer in executor.program.buffers}
    peaks = issue_order_peak(executor.program, structure.deps, sizes)
    return int(peaks[executor.groups.here.pipeline_rank].bytes)


def trace(executor: Executor) -> Traced:
    """Of one rank, in a step that is not its first."""
    ids = ids_of_step()
    with watching(executor, ids) as trace:
        executor.step(ids)
    return trace.actions, expected_actions(executor), trace.calls, (trace.most_saved, foreseen(executor))


def trace_updates(world_size: int) -> dict[str, tuple[list[Call], int]]:
    """Of one rank, of each plan of `WHOLE_MATRICES` with so many: its calls, and the bytes of its states."""
    made = {}
    for name, plan in WHOLE_MATRICES.items():
        if plan.world_size == world_size:
            executor = float32(plan)
            calls = trace(executor)[2]
            made[name] = calls, sum(update.nbytes for _, update in executor.parameters())
            executor.leave()
    return made
