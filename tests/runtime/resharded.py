"""Checkpoints that are written under some plans and read under others."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from runtime import parity

from gnomon.errors import InputError
from gnomon.models.llama import llama
from gnomon.runtime import Executor
from gnomon.runtime.checkpoint.load import load
from gnomon.runtime.checkpoint.save import save

WRITERS = ("zero 3", "1f1b", "tp and sp", "zero bubble v", "zero 3, update on the host")
"""Of two processes."""
READERS = {
    1: ("one device",),
    2: ("dp", "zero 1", "interleaved", "tp", "zero 3", "shares 3 : 1, zero 3", "zero 2, update on the host"),
}
"""By number of processes."""

STEPS = 3
"""One before the checkpoint, one that shows its parameters, one that shows its optimizer states."""


def executor(name: str) -> Executor:
    plan = replace(parity.PLANS[name], precision=parity.FP64)
    return Executor(llama(parity.CONFIG), plan, parity.WORKLOAD, seed=7, settings=parity.SETTINGS)


def write(folder: Path) -> dict[str, parity.Curve]:
    """One step, then a checkpoint."""
    steps = {}
    for name in WRITERS:
        running = executor(name)
        result = running.step(parity.batch(0))
        steps[name] = [(running.total_loss(result), float(result.grad_norm))]
        save(folder / name, running, 1)
        running.leave()
    return steps


def read(folder: Path, world_size: int) -> dict[tuple[str, str], parity.Curve]:
    """The steps after it."""
    curves = {}
    for name in READERS[world_size]:
        for writer in WRITERS:
            running = executor(name)
            done = load(folder / writer, running)
            curve = []
            for step in range(done, STEPS):
                result = running.step(parity.batch(step))
                curve.append((running.total_loss(result), float(result.grad_norm)))
            running.leave()
            curves[writer, name] = curve
    return curves


def refused(folder: Path, copy: Path) -> list[str]:
    """What is said of a checkpoint of another batch, and of one whose files were emptied."""
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    for file in copy.glob("step-*/*.safetensors"):
        file.write_bytes(b"")
    errors = []
    for at, workload in ((folder, replace(parity.WORKLOAD, global_batch_size=4)), (copy, parity.WORKLOAD)):
        plan = replace(parity.PLANS["one device"], precision=parity.FP64)
        running = Executor(llama(parity.CONFIG), plan, workload, seed=7, settings=parity.SETTINGS)
        try:
            load(at, running)
        except InputError as error:
            errors.append(str(error))
    return errors
