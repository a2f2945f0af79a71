"""Checkpoints in torch's distributed format: written under one plan, read under any other of the same model.

`save(folder, executor, step)` writes each parameter and AdamW state by its name, every rank its own part, into a hidden
folder that is renamed once it is whole, so a crash leaves the one before; `load` puts the newest back and returns its
step. A part is a range of a flat buffer, which is a few boxes of the whole parameter (`boxes`). Left out: changing the
dtypes on the way, and writing while training goes on.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from gnomon.errors import InputError, PlanError, RunError
from gnomon.runtime.execute import Executor
from gnomon.runtime.optim import MATRIX_RULES
from gnomon.runtime.parameters import Range, Slot

KEEP = 2
"""Newest checkpoints that are kept."""
RECORD, METADATA = "gnomon.json", ".metadata"
"""What was written, by us; which boxes lie in which file, by torch."""
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offsets, sizes)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A box of a parameter or state, and where this rank has it."""

    name: str
    """`parameters/model.layers.0.mlp.up_proj.weight`, `first/…`, `second/…` or `master/…`."""
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    value: Tensor
    """A view, of the box's shape."""

    @property
    def index(self) -> MetadataIndex:
        """Its key in the format."""
        return MetadataIndex(self.name, torch.Size(self.offset))

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """Where it lies in the whole."""
        return ChunkStorageMetadata(offsets=torch.Size(self.offset), sizes=self.value.shape)


def boxes(shape: Sequence[int], low: int, high: int) -> Iterator[Box]:
    """Elements low to high of a tensor in row-major order, as boxes, in order. Each is contiguous."""
    if low >= high:
        return
    if len(shape) <= 1:
        yield ((low,), (high - low,)) if shape else ((), ())
        return
    row_size = int(torch.Size(shape[1:]).numel())
    row, start = divmod(low, row_size)
    if start or high - low < row_size:
        stop = min(row_size, start + high - low)
        for offset, size in boxes(shape[1:], start, stop):
            yield (row, *offset), (1, *size)
        yield from boxes(shape, low + stop - start, high)
        return
    rows = (high - low) // row_size
    yield (row, *[0] * (len(shape) - 1)), (rows, *shape[1:])
    yield from boxes(shape, low + rows * row_size, high)


def pieces(executor: Executor, *, writes: bool) -> Iterator[Piece]:
    """What a rank writes; or what it reads, which under ZeRO 1 and 2 is every part of the parameters."""
    for held, adam in executor.parameters():
        if adam.factored or adam.kind in MATRIX_RULES:
            raise PlanError(
                f"the runtime does not write checkpoints of {adam.kind}'s states yet; use another optimizer"
            )
        states = {"first": adam.first, "second": adam.second, "master": held.master}
        for name, state in states.items():
            if state is not None:
                yield from _of_buffer(name, state, held.mine, held.slots)
        if writes or held.flat is None:
            yield from _of_buffer("parameters", held.shard, held.mine, held.slots)
        else:
            yield from _of_buffer("parameters", held.flat, (0, held.size), held.slots)


def _of_buffer(kind: str, buffer: Tensor, part: Range, slots: Iterable[Slot]) -> Iterator[Piece]:
    """Pieces of a buffer that has the elements `part` of the flat one."""
    for slot in slots:
        low, high = max(slot.start, part[0]), min(slot.stop, part[1])
        at = low - part[0]
        for offset, size in boxes(slot.shape, low - slot.start, high - slot.start):
            count = torch.Size(size).numel()
            yield Piece(
                name=f"{kind}/{slot.name}",
                whole=slot.whole,
                offset=tuple(a + b for a, b in zip(slot.offset, offset, strict=True)),
                value=buffer[at : at + count].view(size),
            )
            at += count


class _Save(DefaultSavePlanner):
    """Writes pieces; of those that several ranks have, one does."""

    def __init__(self, mine: Sequence[Piece]) -> None:
        super().__init__(flatten_state_dict=False)
        self.mine = {piece.index: piece for piece in mine}

    def create_local_plan(self) -> SavePlan:
        items = [
            WriteItem(
                index=index,
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=piece.chunk,
                    properties=TensorProperties.create_from_tensor(piece.value),
                    size=torch.Size(piece.whole),
                ),
            )
            for index, piece in self.mine.items()
        ]
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.mine[write_item.index].value.detach()


class _Load(DefaultLoadPlanner):
    """Reads what overlaps with pieces, into them."""

    def __init__(self, mine: Sequence[Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.mine = {piece.index: piece for piece in mine}

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for piece in self.mine.values():
            found = self.metadata.state_dict_metadata.get(piece.name)
            if not isinstance(found, TensorStorageMetadata) or tuple(found.size) != piece.whole:
                raise InputError(f"the checkpoint has no {piece.name} of shape {piece.whole}; it is of another model")
            items += create_read_items_for_chunk_list(piece.name, found, [piece.chunk])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.mine[index].value


def fingerprint(executor: Executor) -> str:
    """What must be the same for a checkpoint to go on to the same losses: model, dtypes, and the batch."""
    parts = (executor.graph, executor.plan.precision, executor.workload)
    return sha256(repr(parts).encode()).hexdigest()[:16]


def save(folder: Path, executor: Executor, step: int) -> Path:
    """Writes `folder/step-000120` after 120 steps; all ranks must call it. Returns its path.

    RunError on all ranks if any of them cannot write its part; checkpoints from before are left as they are.
    """
    executor.synchronise()
    done = folder / f"step-{step:06}"
    partial = folder / f".{done.name}.partial"
    first = dist.get_rank() == 0
    with _written_by_all(partial):
        if first:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
    with _written_by_all(partial):
        save_state({}, checkpoint_id=partial, planner=_Save(tuple(pieces(executor, writes=True))))
    with _written_by_all(partial):
        if first:
            _complete_and_rename(folder, executor, step)
    return done


def _complete_and_rename(folder: Path, executor: Executor, step: int) -> None:
    """What rank 0 does when all parts are there."""
    done = folder / f"step-{step:06}"
    partial = folder / f".{done.name}.partial"
    updates = max((adam.steps for _, adam in executor.parameters()), default=0)
    record = {"fingerprint": fingerprint(executor), "step": step, "updates": updates}
    with (partial / RECORD).open("w") as written:
        json.dump(record, written)
        written.flush()
        os.fsync(written.fileno())
    if done.exists():
        shutil.rmtree(done)
    partial.rename(done)
    for old in _complete(folder)[:-KEEP]:
        shutil.rmtree(old)


@contextmanager
def _written_by_all(partial: Path) -> Iterator[None]:
    """Ranks leave together: RunError on all of them when writing failed on one, which is why nobody waits for it."""
    said = ""
    try:
        yield
    except (OSError, CheckpointException) as error:
        said = _why(error)
    everyone: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(everyone, said)
    if failed := [(rank, why) for rank, why in enumerate(everyone) if why]:
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
        rank, why = failed[0]
        left = newest(partial.parent)
        after = f"{left} is whole: go on from it with --resume" if left else "there is no earlier one"
        raise RunError(
            f"cannot write a checkpoint to {str(partial.parent)!r}: {why} (rank {rank}), so the run ended; {after}. "
            f"Make room there, or give another folder (--checkpoints)"
        )


def _why(error: BaseException) -> str:
    """The system's reason, which torch wraps more than once."""
    seen: list[BaseException] = [error]
    if isinstance(error, CheckpointException):
        seen += [each for each, _ in error.failures.values()]
    for each in seen:
        inner: BaseException | None = each
        while inner is not None:
            if isinstance(inner, OSError) and inner.strerror:
                return inner.strerror
            inner = inner.__cause__ or inner.__context__
    return str(seen[-1]).strip().splitlines()[-1][:200] if str(seen[-1]).strip() else type(error).__name__


def _complete(folder: Path) -> list[Path]:
    """Checkpoints that have all they are read by, in order of steps."""
    found = (path for path in folder.glob("step-*") if (path / RECORD).is_file() and (path / METADATA).is_file())
    return sorted(found)


def newest(folder: Path) -> Path | None:
    """The last complete checkpoint, or None."""
    return next(reversed(_complete(folder)), None)


def load(folder: Path, executor: Executor) -> int:
    """Puts the newest checkpoint into the executor and returns how many steps it has behind it; 0 without one. All
    ranks must call it; their number and the plan may be others than those that wrote it.

    InputError when it was written for another model, dtypes or workload, or cannot be read.
    """
    found = newest(folder)
    if found is None:
        return 0
    record: dict[str, Any] = json.loads((found / RECORD).read_text())
    if record["fingerprint"] != fingerprint(executor):
        raise InputError(
            f"{found} was written by another model, precision or batch; resume with those, or use a new folder"
        )
    executor.synchronise()
    try:
        load_state({}, checkpoint_id=found, planner=_Load(tuple(pieces(executor, writes=False))))
    except CheckpointException as error:
        why = next(iter(error.failures.values()), ("",))[0]
        raise InputError(f"{found} cannot be read ({why}); remove it to go on from the one before") from error
    for _, adam in executor.parameters():
        adam.steps = record["updates"]
    return int(record["step"])
