"""A module of the user's in a job: built and captured in every rank, with its own weights in and out by its own names.

`OwnModule.of(text, seed)` builds what `my_project.model:build(ids=int64[batch,seq])` names, on each rank alike; the
job runs its Graph and begins with its values, or with a folder's (`begin_with`). `export` writes all its parameters,
those that are not trained too; buffers are not written. Leaves out batches (`data.own_batches`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch import Tensor, nn

from gnomon.formats.huggingface.pieces import TensorPiece
from gnomon.formats.huggingface.weights import Layout, parameters_of
from gnomon.frontend.inputs import CodeModel
from gnomon.frontend.named import build, captured_of
from gnomon.graph import Graph
from gnomon.runtime.checkpoint.pretrained import check_target, gathered, is_first
from gnomon.runtime.launch.captured_job import check_trainable, states_of, values_of
from gnomon.runtime.parameters.parameters import Slot, Values
from gnomon.runtime.parameters.weights import Folder, WeightReader, start_folder
from gnomon.runtime.step.execute import Executor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OwnModule:
    """What a rank needs of it."""

    graph: Graph
    parameters: Mapping[str, Tensor]
    """By the module's names, each once."""
    tied: Mapping[str, str]
    """Other names of parameters -> the name in `parameters`."""
    states: Mapping[str, Tensor]
    """Buffers, constants and what is not trained."""

    @staticmethod
    def of(text: str, seed: int = 0) -> OwnModule:
        """Imports, builds and captures. CaptureError and InputError as `frontend.named`."""
        named = CodeModel.parse(text)
        module = build(named, real=True, seed=seed)
        capture = captured_of(named, module)
        parameters = dict(module.named_parameters())
        return OwnModule(
            graph=capture.graph,
            parameters={name: x.detach() for name, x in parameters.items()},
            tied=_tied(module, parameters),
            states=states_of(module, capture),
        )

    def start(self, weights: Path | None) -> Values:
        """What this rank's parameters begin as: the module's own values, or a folder's (`begin_with`). PlanError for a
        module without a loss."""
        check_trainable(self.graph)
        return values_of(self.parameters) if weights is None else self.begin_with(weights)

    def begin_with(self, path: Path) -> Values:
        """This rank's parts of the weights in a folder or file of safetensors, by the module's names. InputError where
        one is missing, unknown or of another shape. What is not trained takes its values too."""
        folder = Folder.of(path)
        layout = self._layout(tied=False)
        folder.check(layout)
        trained = self.graph.parameters()
        for name, x in self.parameters.items():
            if name not in trained:
                # In place: `states` looks into the same memory, by which the Graph reads it.
                x.copy_(folder.read(name))
        return WeightReader(folder, layout)

    def export(self, executor: Executor, target: Path) -> Path:
        """Writes the parameters as forward reads them, under every name that the module has for them, in the plan's
        dtype; every rank must call it."""
        executor.synchronise()
        first, layout = dist.get_rank() == 0, self._layout(tied=True)
        dtype = next(parameters.dtypes.param for parameters, _ in executor.parameters())
        if first:
            check_target(target)
            writer = start_folder(target, layout, dtype)
        dist.barrier()
        if not first:
            writer = start_folder(target, layout, dtype, join=True)
        for number in sorted(executor.stages):
            for parameters in executor.stages[number].own_parameters:
                was_apart = gathered(executor, parameters)
                if is_first(executor, parameters):
                    for slot in parameters.slots:
                        writer.write_part(layout, slot, parameters.value(slot.name))
                if was_apart:
                    parameters.flat = None
        if first:
            trained = self.graph.parameters()
            for name, x in self.parameters.items():
                if name not in trained:
                    writer.write_part(layout, _whole(name, layout.pieces[name][0].view), x)
        dist.barrier()
        return target

    def _layout(self, *, tied: bool) -> Layout:
        """Each parameter as a tensor of the module's shape. tied: written under its other names too, in place of
        letting a folder have them."""
        known, pieces = parameters_of(self.graph), dict[str, tuple[TensorPiece, ...]]()
        for name, x in self.parameters.items():
            shape = tuple(x.shape)
            view = known[name].atoms if name in known else shape
            names = (name, *(other for other, of in self.tied.items() if of == name)) if tied else (name,)
            pieces[name] = tuple(TensorPiece(tensor=own, shape=shape, view=view) for own in names)
        buffers = tuple(f"^{name}$".replace(".", r"\.") for name in self.states if name not in self.parameters)
        return Layout(pieces=pieces, ignored=buffers, copies=None if tied else dict(self.tied))


def _tied(module: nn.Module, parameters: Mapping[str, Tensor]) -> dict[str, str]:
    names = {id(x): name for name, x in parameters.items()}
    every = module.named_parameters(remove_duplicate=False)
    return {name: names[id(x)] for name, x in every if names[id(x)] != name}


def _whole(name: str, shape: tuple[int, ...]) -> Slot:
    return Slot(
        name=name, shape=shape, whole=shape, offset=(0,) * len(shape), start=0, holders=1, decays=False, sums=""
    )
