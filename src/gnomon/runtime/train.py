"""Training: steps of an executor on text, with validation, a progress line, checkpoints and a clean end.

`train(job)` runs in every process of a job (start it with `launch`) and returns a record a step, the same on all
ranks. ^C and SIGTERM end after the step under way, with a checkpoint; `resume` goes on to the same losses. Left out:
schedules of the learning rate, and the prediction that a progress line may be compared with, which the caller gives.
"""

from __future__ import annotations

import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from types import FrameType

import torch
import torch.distributed as dist

from gnomon.errors import PlanError
from gnomon.models.llama import LlamaConfig
from gnomon.plans import Plan, Workload
from gnomon.runtime.checkpoint import load, save
from gnomon.runtime.data import VOCAB_SIZE, Text
from gnomon.runtime.evaluate import evaluate
from gnomon.runtime.execute import Executor
from gnomon.runtime.optim import AdamWSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to train, on what, for how long."""

    config: LlamaConfig
    """The model; its vocabulary has at least 256 entries."""
    plan: Plan
    """How it runs."""
    workload: Workload
    """Sequences in a batch and their length."""
    steps: int
    """Steps from the very beginning, those before a resume included."""
    data: Path | None = None
    """Folder of text; None is the standard library's own source."""
    settings: AdamWSettings = AdamWSettings()
    """The update."""
    seed: int = 0
    """Of initial parameters and of the order of data."""
    validate_every: int = 0
    """Steps between validations; 0 for none but the last."""
    checkpoints: Path | None = None
    """Folder for checkpoints; None for none."""
    checkpoint_every: int = 0
    """Steps between them; 0 for one at the end only."""
    resume: bool = False
    """Go on from the newest checkpoint, if there is one."""
    expected_step_s: float | None = None
    """A prediction to show beside what is measured."""
    quiet: bool = False
    """No progress lines."""

    def __post_init__(self) -> None:
        if self.config.vocab_size < VOCAB_SIZE:
            raise PlanError(f"bytes need a vocabulary of {VOCAB_SIZE} or more, not {self.config.vocab_size}")
        if self.steps < 1:
            raise PlanError(f"steps = {self.steps} must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One step."""

    step: int
    """Counted from 1."""
    loss: float
    """Mean over all tokens of the batch, in nats."""
    grad_norm: float
    """Before clipping; NaN where the plan does not clip."""
    step_s: float
    """Seconds of the step on this rank."""
    validation_loss: float | None = None
    """On held-out text, where it was asked for after this step."""


def train(job: Job) -> tuple[Record, ...]:
    """Records of the steps that this call ran. All ranks of the job must call it."""
    text = Text.read(job.data)
    executor = Executor(job.config, job.plan, job.workload, seed=job.seed, settings=job.settings)
    done = load(job.checkpoints, executor) if job.checkpoints is not None and job.resume else 0
    records: list[Record] = []
    size = {"sequences": job.workload.global_batch_size, "seq_len": job.workload.seq_len}
    with _asked_to_end() as asked:
        for step in range(done + 1, job.steps + 1):
            began = perf_counter()
            result = executor.step(text.batch(step, seed=job.seed, **size))
            loss = executor.total_loss(result)
            taken = perf_counter() - began
            ends = _anyone(bool(asked)) or step == job.steps
            validates = ends or (job.validate_every and step % job.validate_every == 0)
            held_out = evaluate(executor, text.validation_batch(0, **size)) if validates else None
            records.append(
                Record(step=step, loss=loss, grad_norm=float(result.grad_norm), step_s=taken, validation_loss=held_out)
            )
            if not job.quiet and dist.get_rank() == 0:
                print(_line(job, records[-1]), file=sys.stderr, flush=True)
            if job.checkpoints is not None and (ends or (job.checkpoint_every and step % job.checkpoint_every == 0)):
                save(job.checkpoints, executor, step)
            if ends:
                break
    return tuple(records)


def _line(job: Job, record: Record) -> str:
    """Step, loss, speed, memory, time left, and expected against actual."""
    tokens = job.workload.global_batch_size * job.workload.seq_len
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
    left = (job.steps - record.step) * record.step_s
    parts = [
        f"step {record.step}/{job.steps}",
        f"loss {record.loss:.4f}",
        f"{tokens / record.step_s:,.0f} tokens/s",
        f"rank 0 peak {memory:.2f} GiB",
        f"{left:.0f} s left",
    ]
    if record.validation_loss is not None:
        parts.insert(2, f"held out {record.validation_loss:.4f}")
    if job.expected_step_s is not None:
        parts.append(f"{record.step_s:.3f} s a step, expected {job.expected_step_s:.3f}")
    return " · ".join(parts)


def _anyone(asked: bool) -> bool:
    """Whether any rank was asked to end: a signal may reach one of them only."""
    flag = torch.tensor(int(asked))
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


@contextmanager
def _asked_to_end() -> Iterator[list[int]]:
    """A list that signals are put on, in place of their usual effect."""
    asked: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        asked.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
