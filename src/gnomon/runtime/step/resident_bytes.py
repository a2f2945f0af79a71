"""Bytes that one rank holds, by the classes that predictions name: read off the interpreter's own buffers.

`levels(...)` is what is there between two actions; `measure_resident(run, …)` runs a forward and counts what autograd
keeps of it, each storage once. Every microbatch of a stage keeps the same, so it is counted once a stage and costs
nothing after. Left out: what lives inside one action only (`temporary` of a prediction), workspaces, and what
allocators round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from gnomon.runtime.parameters.parameters import Parameters
from gnomon.runtime.step.buffers import Buffers
from gnomon.runtime.watch.measure import CLASSES, Levels

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentBytes:
    """What a microbatch holds at a stage between two of its actions."""

    activations: int
    """Bytes without the logits."""
    logits: int
    """Bytes of the tensor with a number for each entry of the vocabulary."""

    @staticmethod
    def of(tensors: Sequence[Tensor], *, vocab: int, loss: bool, apart: Sequence[Tensor] = ()) -> ResidentBytes:
        """Counts tensors in the order in which they were saved; some may be views of one storage, which counts once.

        vocab: entries on this rank. loss: whether the run ended in the loss, which saves the one tensor with a number
        for each of them last; hidden states may be as wide. apart: what is not the microbatch's own.
        """
        wide = [t.untyped_storage().data_ptr() for t in tensors if t.shape[-1:] == (vocab,)]
        logits = wide[-1] if loss and wide else None
        shared = {tensor.untyped_storage().data_ptr() for tensor in apart}
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        own = {at: size for at, size in storages.items() if at not in shared}
        return ResidentBytes(activations=sum(own.values()) - own.get(logits or 0, 0), logits=own.get(logits or 0, 0))


NOTHING = ResidentBytes(activations=0, logits=0)


def measure_resident(
    run: Callable[[Callable[[Tensor], None]], Made],
    entered: Sequence[Tensor] = (),
    *,
    vocab: int,
    loss: bool,
    apart: Sequence[Tensor],
) -> tuple[Made, ResidentBytes]:
    """(output of `run`, what its backward will read: what autograd saved, and what entered). run: takes a function to
    tell what it keeps by hooks of its own. loss: whether it ends in the loss."""
    tensors: list[Tensor] = list(entered)

    def pack(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    def unpack(tensor: Tensor) -> Tensor:
        return tensor

    with saved_tensors_hooks(pack, unpack):
        y = run(tensors.append)
    with torch.no_grad():
        return y, ResidentBytes.of(tensors, vocab=vocab, loss=loss, apart=apart)


def levels(
    parameters: Iterable[Parameters],
    optimizer_bytes: int,
    buffers: Buffers,
    microbatches: Iterable[ResidentBytes],
    stages: Mapping[int, object],
) -> Levels:
    """What a rank holds now. stages: those on this rank; what goes to another is communication."""
    values = dict.fromkeys(CLASSES, 0)
    for parameters_ in parameters:
        values["parameters"] += _nbytes(parameters_.flat, None if parameters_.away else parameters_.resident)
        values["gradients"] += _nbytes(parameters_.grad_room, parameters_.grad_shard)
        values["master"] += 0 if parameters_.master_on_host else _nbytes(parameters_.master)
    values["states"] = optimizer_bytes
    for microbatch in microbatches:
        values["activations"] += microbatch.activations
        values["logits"] += microbatch.logits
    for (name, stage, _), tensors in buffers.tensors.items():
        local = stage in stages and not name.startswith("D")
        values["activations" if local else "communication"] += _nbytes(*tensors)
    # What a reduction still reads is a gradient (G; GS of a shard), all else that is held for a communication is its
    # own.
    for (name, *_), under_way in buffers.arriving.items():
        values["gradients" if name in ("G", "GS") else "communication"] += _nbytes(*under_way.holds)
    for under_way in buffers.leaving.values():
        values["communication"] += _nbytes(*under_way.holds)
    return tuple(values.values())


def _nbytes(*tensors: Tensor | None) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
