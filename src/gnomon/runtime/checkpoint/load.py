"""Going on from a checkpoint: `load` checks every file, takes the newest that is whole, and says which were not.

All ranks check, each its share of the files, before one of them changes a parameter.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch.distributed as dist

from gnomon.errors import InputError
from gnomon.runtime.checkpoint.files import Reader, problems_of
from gnomon.runtime.checkpoint.pieces import pieces
from gnomon.runtime.checkpoint.record import check_identity, checkpoints, identity_of, read_record
from gnomon.runtime.step.execute import Executor


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def load(
    folder: Path,
    executor: Executor,
    *,
    identity: Mapping[str, str] | None = None,
    override: Iterable[str] = (),
    say: Callable[[str], None] = _to_stderr,
) -> int:
    """Puts the newest whole checkpoint into the executor and returns how many steps it has behind it; 0 where there is
    none. All ranks must call it; their number and the plan may be others than those that wrote it.

    identity: what the run adds to model, precision and batch; what differs and is not in `override` is an InputError,
    as is a folder in which no checkpoint is whole. say: takes a line for each damaged one, and one for what was read,
    on rank 0.
    """
    # Rank 0 looks for all: on a shared file system ranks may see a new folder at different times.
    candidates = [[str(path) for path in checkpoints(folder)]]
    dist.broadcast_object_list(candidates)
    first_said = ""
    for path in map(Path, reversed(candidates[0])):
        if problem := _damage(path):
            first_said = first_said or problem
            if dist.get_rank() == 0:
                say(f"{problem}; taking the checkpoint before it")
            continue
        record = read_record(path)
        check_identity(
            path,
            record.identity,
            {**identity_of(executor.graph, executor.plan, executor.workload), **(identity or {})},
            override,
        )
        # Nothing of a step may still be on its way into what is about to be overwritten.
        executor.synchronise()
        reader = Reader(path, record)
        for piece in pieces(executor.parameters(), writes=False):
            reader.fill(piece)
        executor.host.take()
        for _, adam in executor.parameters():
            adam.steps = record.updates
        if (scaler := executor.state.loss_scale) is not None and record.loss_scale is not None:
            scaler.scale, scaler.good_steps = record.loss_scale
        if dist.get_rank() == 0:
            say(f"resumed after step {record.step:,}, from {path}")
        return record.step
    if candidates[0]:
        raise InputError(
            f"no checkpoint in {folder} is whole ({first_said}); remove them to begin anew, or give another folder"
        )
    return 0


def _damage(path: Path) -> str:
    """The first problem that any rank found, or empty."""
    rank, size = dist.get_rank(), dist.get_world_size()
    # Files are dealt out over ranks by stride, so that each is read once; three problems are enough to tell.
    everyone: list[list[str]] = [[]] * size
    dist.all_gather_object(everyone, problems_of(path, slice(rank, None, size))[:3])
    return next((problem for problems in everyone for problem in problems), "")
