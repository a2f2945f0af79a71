"""Checkpoints: everything a rank needs to go on bit by bit, in one folder a step, complete or not there.

`save(folder, executor, step)` writes a file for each rank beside each other and then renames the folder, so a crash
leaves the one before; `load` puts the newest back and returns its step. Left out: other plans than the one that wrote
it (resharding), and writing while training goes on.
"""

from __future__ import annotations

import os
import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gnomon.errors import InputError
from gnomon.runtime.execute import Executor

KEEP = 2
"""Newest checkpoints that are kept."""


def fingerprint(executor: Executor) -> str:
    """What must be the same for a checkpoint to fit: model, plan, and the batch."""
    parts = (executor.config, executor.plan, executor.workload)
    return sha256(repr(parts).encode()).hexdigest()[:16]


def state(executor: Executor) -> dict[int, dict[str, Any]]:
    """Stage -> this rank's part of its parameters and optimizer states."""
    executor.synchronise()
    found: dict[int, dict[str, Any]] = {}
    for number, stage in executor.stages.items():
        held, adam = stage.parameters_, executor.state.adam[number]
        found[number] = {
            # Under ZeRO 1 and 2 the whole parameters are there; other ranks' parts come with them.
            "parameters": held.shard.clone() if held.zero == 3 else held.flat,
            "master": held.master,
            "first": adam.first,
            "second": adam.second,
            "steps": adam.steps,
        }
    return found


def save(folder: Path, executor: Executor, step: int) -> Path:
    """Writes `folder/step-000120` after 120 steps; all ranks must call it. Returns its path."""
    done = folder / f"step-{step:06}"
    partial = folder / f".{done.name}.partial"
    partial.mkdir(parents=True, exist_ok=True)
    target = partial / f"rank-{dist.get_rank()}.pt"
    torch.save({"fingerprint": fingerprint(executor), "step": step, "state": state(executor)}, target)
    with target.open("rb") as written:
        os.fsync(written.fileno())
    dist.barrier()
    if dist.get_rank() == 0:
        if done.exists():
            shutil.rmtree(done)
        partial.rename(done)
        for old in sorted(folder.glob("step-*"))[:-KEEP]:
            shutil.rmtree(old)
    dist.barrier()
    return done


def newest(folder: Path) -> Path | None:
    """The last complete checkpoint, or None."""
    return max(folder.glob("step-*"), default=None)


def load(folder: Path, executor: Executor) -> int:
    """Puts the newest checkpoint into the executor and returns how many steps it has behind it; 0 without one.

    InputError when it was written by another model, plan or workload.
    """
    found = newest(folder)
    if found is None:
        return 0
    path = found / f"rank-{dist.get_rank()}.pt"
    if not path.is_file():
        raise InputError(f"{found} has no part for rank {dist.get_rank()}; resume with as many processes as wrote it")
    content = torch.load(path, weights_only=True)
    if content["fingerprint"] != fingerprint(executor):
        raise InputError(f"{found} was written by another model, plan or batch; resume with those, or use a new folder")
    executor.synchronise()
    for number, part in content["state"].items():
        held, adam = executor.stages[number].parameters_, executor.state.adam[number]
        if held.zero == 3:
            held.resident = part["parameters"]
        else:
            held.flat = part["parameters"]
        held.master = part["master"]
        adam.first, adam.second, adam.steps = part["first"], part["second"], part["steps"]
    return int(content["step"])
