"""Writing checkpoints: each rank its own file, into a hidden folder that is renamed once all are there.

`Saver.start` copies what a rank has and writes it in a thread while training goes on; `Saver.finish` waits for all
ranks, writes `gnomon.json` and renames. A failure anywhere is one RunError on every rank, and earlier checkpoints stay.
Parameters that are not finite are not written. Leaves out when to save (`train`).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from gnomon.errors import InputError, RunError
from gnomon.runtime.checkpoint.files import WrittenTensor, write_file
from gnomon.runtime.checkpoint.lock import FolderLock
from gnomon.runtime.checkpoint.pieces import Piece, pieces, shared_out
from gnomon.runtime.checkpoint.record import File, Record, checkpoints, identity_of, newest, write_record

if TYPE_CHECKING:
    from gnomon.runtime.step.execute import Executor

KEEP = 2
"""Newest checkpoints that are kept."""


class Saver:
    """Checkpoints of one run, one at a time."""

    def __init__(
        self,
        folder: Path,
        executor: Executor,
        *,
        identity: Mapping[str, str] | None = None,
        keep: int = KEEP,
        source: Path | None = None,
    ) -> None:
        """Takes identity, what the run adds to model, precision and batch, and source, what the model was read from, if
        it was a file."""
        self.folder, self.executor, self.keep, self.source = folder, executor, keep, source
        self.identity = {**identity_of(executor.graph, executor.plan, executor.workload), **(identity or {})}
        self.step = self.updates = 0
        self.loss_scale: tuple[float, int] | None = None
        self.pending: Future[File] | None = None
        self.pool = ThreadPoolExecutor(1, "checkpoint")
        self.lock = FolderLock(folder)
        # Taken when the run begins, not with its first checkpoint: a second run on the folder ends at once, not after
        # hours.
        if dist.get_rank() == 0 and folder.is_dir():
            self.lock.take()

    @property
    def busy(self) -> bool:
        """Whether this rank still writes."""
        return self.pending is not None and not self.pending.done()

    def start(self, step: int, *, copy: bool = True) -> None:
        """Begins a checkpoint after `step` steps; all ranks must call it. copy: of everything, so that training may go
        on while it is written. RunError if it cannot be begun, or an earlier one failed."""
        self.finish()
        self.executor.settle()
        self.step = step
        scaler = self.executor.state.loss_scale
        self.loss_scale = None if scaler is None else (scaler.scale, scaler.good_steps)
        # Every part has as many updates behind it; 0 where this rank has none.
        self.updates = max((adam.steps for _, adam in self.executor.parameters()), default=0)
        first = dist.get_rank() == 0
        problem = ""
        try:
            if first:
                self.folder.mkdir(parents=True, exist_ok=True)
                self.lock.take()
                shutil.rmtree(self._partial, ignore_errors=True)
                self._partial.mkdir()
        except (OSError, InputError) as error:
            problem = getattr(error, "strerror", None) or str(error)
        mine = list(pieces(self.executor.parameters(), writes=True))
        # Not written: a checkpoint that cannot be gone on from would push out older ones that can.
        if not problem and not all(
            bool(torch.isfinite(p.value).all()) for p in mine if p.name.startswith("parameters/")
        ):
            problem = f"parameters are not finite after step {step}: training diverged"
        chosen = self._agreed(problem, mine)
        copied = {p.key: WrittenTensor(whole=p.whole, value=_on_host(p, copy)) for p in mine if p.key in chosen}
        target = self._partial / f"rank-{dist.get_rank():05}.safetensors"
        self.pending = self.pool.submit(write_file, target, copied)

    @property
    def _partial(self) -> Path:
        return self.folder / f".step-{self.step:06}.partial"

    def _agreed(self, problem: str, mine: Sequence[Piece]) -> set[str]:
        """Keys that this rank writes: of those that several have, the one with the least to write does."""
        everyone: list[tuple[str, dict[str, int]]] = [("", {})] * dist.get_world_size()
        dist.all_gather_object(everyone, (problem, {p.key: p.value.nbytes for p in mine}))
        self._fail([(rank, why) for rank, (why, _) in enumerate(everyone) if why])
        return shared_out([keys for _, keys in everyone])[dist.get_rank()]

    def finish(self) -> Path | None:
        """Waits for all ranks and completes the checkpoint; None if none was begun. All ranks must call it."""
        if self.pending is None:
            return None
        written: File | str
        try:
            written = self.pending.result()
        except OSError as error:
            # Told to all ranks below, so that every one of them ends with the same error.
            written = error.strerror or str(error)
        self.pending = None
        # Also a barrier: rank 0 renames only when each file is on disk.
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, written)
        self._fail([(rank, why) for rank, why in enumerate(everyone) if isinstance(why, str)])
        problem = ""
        if dist.get_rank() == 0:
            try:
                self._complete(everyone)
            except OSError as error:
                problem = error.strerror or str(error)
        problems = [problem]
        dist.broadcast_object_list(problems)
        self._fail([(0, problems[0])] if problems[0] else [])
        return self.folder / f"step-{self.step:06}"

    def close(self) -> None:
        """Ends the thread and lets other runs have the folder."""
        self.pool.shutdown()
        self.lock.free()

    def _complete(self, files: Sequence[File]) -> None:
        """What rank 0 does when all files are there."""
        record = Record(
            step=self.step,
            updates=self.updates,
            identity=self.identity,
            plan=self.executor.plan.mesh.describe(),
            files=tuple(files),
            source=None if self.source is None else str(self.source),
            loss_scale=self.loss_scale,
        )
        write_record(self._partial, record)
        # The record was written last, within the hidden folder: a folder with a name always has all of its files.
        put_in_place(self._partial, self.folder / f"step-{self.step:06}")
        # Only once the new one is in place, so that there is always a whole one.
        for old in checkpoints(self.folder)[: -self.keep]:
            shutil.rmtree(old)

    def _fail(self, failed: Sequence[tuple[int, str]]) -> None:
        """RunError on every rank for the first that failed."""
        if not failed:
            return
        if dist.get_rank() == 0:
            shutil.rmtree(self._partial, ignore_errors=True)
        rank, why = failed[0]
        last_checkpoint = newest(self.folder)
        after = (
            f"{last_checkpoint} is whole: go on from it with --resume" if last_checkpoint else "there is no earlier one"
        )
        what = "" if "finite" in why else ". Make room there, or give another folder (--checkpoints)"
        raise RunError(
            f"cannot write a checkpoint to {str(self.folder)!r}: {why} (rank {rank}), so the run ended; {after}{what}"
        )


def _on_host(piece: Piece, copy: bool) -> torch.Tensor:
    value = piece.value.detach()
    # A copy to the host is one anyway; on the CPU the optimizer would write into what is being written out.
    return value.clone() if copy and value.device.type == "cpu" else value.cpu().contiguous()


def put_in_place(partial: Path, done: Path) -> None:
    """Gives a checkpoint that is whole its name, in place of one that has it."""
    if done.exists():
        shutil.rmtree(done)
    # A rename within one file system is atomic: a reader sees all of the folder, or none of it.
    partial.rename(done)
    _to_disk(done.parent)


def _to_disk(folder: Path) -> None:
    """The folder's own entries, where the system can."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def save(
    folder: Path,
    executor: Executor,
    step: int,
    *,
    identity: Mapping[str, str] | None = None,
    keep: int = KEEP,
    source: Path | None = None,
) -> Path:
    """Writes `folder/step-000120` after 120 steps and returns its path; all ranks must call it.

    RunError on all ranks if any of them cannot write its part; checkpoints from before are left as they are.
    """
    saver = Saver(folder, executor, identity=identity, keep=keep, source=source)
    try:
        saver.start(step, copy=False)
        done = saver.finish()
    finally:
        saver.close()
    assert done is not None
    return done
