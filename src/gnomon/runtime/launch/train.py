"""Training: steps of an executor on text, with validation, progress, checkpoints, a measured Timeline, a clean end.

`train(job)` runs in every process of a job and returns an `Outcome`, the same on all ranks. ^C and SIGTERM end after
the step under way, with a checkpoint; `resume` goes on to the same losses. Left out: starting processes (`run`), those
that come and go (`member`), and the prediction that progress is compared with, which the caller gives.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from textwrap import wrap
from time import perf_counter
from types import FrameType
from typing import Literal

import torch
import torch.distributed as dist

from gnomon.control.placing import ROWS_ALONE, PlacingCosts
from gnomon.errors import GraphError, InputError, PlanError, RunError
from gnomon.formats.router import save_router
from gnomon.graph import Graph
from gnomon.graph.text_inputs import ids_of, labels_of
from gnomon.hardware import Cluster
from gnomon.late import load_late
from gnomon.methods import teaching_of, trained_storage
from gnomon.methods.learnt import iss
from gnomon.plans import Plan, Saved, Workload
from gnomon.program import Program
from gnomon.runtime.calibrate.slowdown import slowdown_now
from gnomon.runtime.checkpoint.load import load
from gnomon.runtime.checkpoint.pretrained import export, taught_by, values_of
from gnomon.runtime.checkpoint.record import checkpoints, newest
from gnomon.runtime.checkpoint.save import Saver
from gnomon.runtime.data import Corpus, Source
from gnomon.runtime.data.own_batches import Batches, OwnBatches, OwnData, TextBatches
from gnomon.runtime.data.sequences import SequenceBatches, longest_of
from gnomon.runtime.launch.membership import MEET_S
from gnomon.runtime.launch.own_module import OwnModule
from gnomon.runtime.module.apply import dtypes
from gnomon.runtime.module.stage import Batch
from gnomon.runtime.optim.update import AdamWSettings
from gnomon.runtime.parameters.parameters import CPU, Slot
from gnomon.runtime.processes.faults import plain
from gnomon.runtime.processes.launch import BACKENDS, own_device
from gnomon.runtime.processes.local import GRACE_S, RECOMPUTE_LOADED, SIGNALS
from gnomon.runtime.step.evaluate import evaluate as evaluate_rows
from gnomon.runtime.step.execute import Executor
from gnomon.runtime.step.feed import size_named
from gnomon.runtime.step.routed import RoutedCounts
from gnomon.runtime.watch.progress import Progress, peak_bytes
from gnomon.runtime.watch.waiting import waited_s, waited_since
from gnomon.runtime.watch.watchdog import where
from gnomon.software.own import places_experts
from gnomon.timeline import Timeline
from gnomon.timeline.queued import without_a_core

WARM_UP = 3
"""First steps of a process, which are slower than the rest (allocation, caches) and count in no median."""
MEASURED = 7
"""Steps whose Timelines are taken; the one of median length is returned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """What to train, on what, for how long."""

    graph: Graph
    """The model."""
    plan: Plan
    """How it runs."""
    workload: Workload
    """Sequences in a batch and their length."""
    program: Program | None = None
    """What every step executes, where methods of `schedule.passes` rewrote it with prices (`Prediction.structure`);
    None: what `lower` makes of the plan."""
    steps: int
    """Steps from the very beginning, those before a resume included."""
    weights: Path | None = None
    """Folder in Hugging Face's layout that parameters begin as; None for random ones by the seed."""
    export: tuple[Path, Path] | None = None
    """(folder to write the weights to at the end, folder or config.json of the model that the plan is for)."""
    data: Source | OwnData = Source()
    """Text, and how it becomes tokens; or a function of the user's that makes batches."""
    code: str = ""
    """The model as code, `my_project.model:build(ids=int64[batch,seq])`, which every rank builds and captures in place
    of `graph`; empty for a model of Gnomon's own."""
    source: Path | None = None
    """Folder or config.json that the model was read from, which its checkpoints name; None: it was no file."""
    settings: AdamWSettings = AdamWSettings()
    """The update."""
    seed: int = 0
    """Of initial parameters and of the order of data."""
    validate_every: int = 0
    """Steps between validations; 0 for none but the last."""
    checkpoints: Path | None = None
    """Folder for checkpoints; None for none."""
    checkpoint_every: int = 0
    """Steps between them; 0 for none on the way."""
    checkpoint_at_end: bool = True
    """Whether a run that is not stopped leaves a checkpoint too."""
    keep: int = 2
    """Newest checkpoints that are kept."""
    grace_s: float = GRACE_S
    """Between a signal and the end of processes that do not end by themselves."""
    max_restarts: int = 0
    """Times that a run which lost a process is started again, or under `memory_checkpoint_every` processes replaced."""
    determinism: Literal["D1", "D2"] = "D1"
    """Of logical workers: the same bits on any number of processes, or on different kinds of processors too."""
    follow_speed: bool = False
    """Whether logical workers move from slow processes to fast ones, by measured speed."""
    kernels: str = ""
    """Instruction set that all processes of a D2 job compute with, once they have agreed (`instruction_sets`)."""
    memory_checkpoint_every: int = 0
    """Steps between copies of each rank's state to another rank's memory; 0 for none (`survivors`)."""
    logical_workers: bool = False
    """Whether ranks are logical workers even where the placement gives each a process of its own (`elastic`)."""
    decisions: Path | None = None
    """File for what the controller saw and decided, where processes may be lost and go on (`control`); None: none."""
    meet_s: float = MEET_S
    """In which processes that are all there must have met, at the start and after a loss."""
    resume: bool = False
    """Go on from the newest whole checkpoint, if there is one."""
    override: tuple[str, ...] = ()
    """What may differ from the run that wrote it: `seed`, `lr`, `optimizer`, `data`."""
    resume_with: str = ""
    """The command that goes on after a stop, to be shown then."""
    measure: bool = False
    """Take a Timeline."""
    expert_costs: PlacingCosts = ROWS_ALONE
    """By which experts move, where the plan rebalances them."""
    record_router: Path | None = None
    """File for the tokens that each expert of each layer got in each step (`formats.router`); None: none."""
    counted: Literal["tokens", "samples"] = "tokens"
    """What a step is made of, as `Prediction.counted`."""
    expected_step_s: float | None = None
    """A prediction to show beside what is measured."""
    calibrated: Cluster | None = None
    """This machine as it was calibrated, to ask before training whether it is as fast now."""
    quiet: bool = False
    """No progress lines."""
    device: Literal["cpu", "cuda"] = "cpu"
    """What every rank computes on."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise PlanError(f"steps = {self.steps} must be at least 1")
        if self.memory_checkpoint_every and places_experts(self.plan):
            raise PlanError(
                "memory_checkpoint_every copies a rank's state to another rank, and experts that the plan places move; "
                "use checkpoints in files (checkpoint_every), or leave experts.replicas and placement out"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What was measured of one step."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a call of `train` went."""

    records: tuple[Record, ...]
    """Of the steps that it ran."""
    resumed_from: int = 0
    """Steps that were behind it."""
    signal: int = 0
    """Number of the signal that ended it early; 0 if none did."""
    checkpoint: Path | None = None
    """The last one written."""
    timeline: Timeline | None = None
    """Of a step of median length, by rank class, if it was asked for and a whole step ran."""
    slowdown: float | None = None
    """Times as long as when it was calibrated that this machine took for the same operations before training."""
    slowdown_said: str = ""
    """The same in words."""
    core_wait_share: float | None = None
    """Share of the steps after warm-up in which the rank that waited most was ready but had no core, as other processes
    had them; None where the system does not say."""
    process_peak_bytes: int = 0
    """Most memory that rank 0's process had, libraries and all; on a GPU what torch's allocator held there."""
    notes: tuple[str, ...] = ()
    """What rank 0's methods say of it."""
    training_tokens: int = 0
    """There are to train on."""
    validation_tokens: int = 0
    """Held out."""
    epochs: float = 0.0
    """How often all steps together read the text."""

    @property
    def warm(self) -> int:
        """First steps that count in no median: WARM_UP, or fewer when little was run."""
        return _warm(len(self.records))

    @property
    def step_s(self) -> float:
        """Median seconds of a step after warm-up; NaN if none ran."""
        return median([record.step_s for record in self.records[self.warm :]] or [float("nan")])


def _warm(steps: int) -> int:
    return min(WARM_UP, (steps - 1) // 2) if steps else 0


def preload_of(job: TrainingJob) -> Sequence[str]:
    """Modules that the job's processes load besides, which a fork server loads once for all."""
    recomputes = job.plan.saved != Saved() or bool(job.plan.schedule.passes)
    return RECOMPUTE_LOADED if recomputes else ()


def corpus_of(job: TrainingJob) -> Batches:
    """The job's tokens, made if they are not there, or the batches of a function of the user's. InputError for text
    that cannot be read or is too short, PlanError for a model whose vocabulary is too small, or that reads no text."""

    def say(line: str) -> None:
        if not job.quiet:
            print(line, file=sys.stderr, flush=True)

    if isinstance(job.data, OwnData):
        return OwnBatches.open(job.data)
    names = _text_inputs(job.graph) if job.code else None
    corpus = Corpus.open(job.data, say)
    corpus.check(max(longest_of(job.workload), 1))
    if (vocab := size_named(job.graph, "vocab")) < corpus.vocab_size:
        raise PlanError(
            f"the tokens of {corpus.where} need a vocabulary of {corpus.vocab_size:,}, and {job.graph.name} has "
            f"{vocab:,}; take the model's own tokenizer"
        )
    if names is not None:
        return TextBatches.of(corpus, *names)
    return corpus if job.workload.seq_len else SequenceBatches(corpus=corpus, workload=job.workload)


def _text_inputs(graph: Graph) -> tuple[str, str]:
    """Inputs of a model that is code for a text's token ids and labels. PlanError where it has others too, or none."""
    try:
        names = ids_of(graph), labels_of(graph)
    except GraphError as error:
        raise PlanError(str(error)) from None
    if others := [tensor.name for tensor in graph.inputs if tensor.name not in names]:
        raise PlanError(
            f"{graph.name} reads {', '.join(others)} beside token ids and labels, which a text has not; give batches "
            f"of your own with --data MODULE:FUNCTION"
        )
    return names


def train(job: TrainingJob) -> Outcome:
    """How it went, with a record of each step that this call ran. All ranks of the job must call it. PeerError, which
    says where this rank stood, if another is gone."""
    executors: list[Executor] = []
    try:
        return _train(job, executors)
    except Exception as error:
        raise plain(error, dist.get_rank(), _at(executors)) from error


def _at(executors: Sequence[Executor]) -> str:
    """Says at which row of the Program this rank stands, for messages."""
    watchdogs = [executor.watchdog for executor in executors]
    if not watchdogs:
        return "while it started"
    row = -1 if watchdogs[0] is None else watchdogs[0].row
    return f"at {where(executors[0].program, row)}" if row >= 0 else "between steps"


def _train(job: TrainingJob, executors: list[Executor]) -> Outcome:
    """Trains as `train` does. executors: takes the one that is made."""
    with signals_noted() as signals:
        # One process of each machine makes the tokens, while the others wait; then all map the same file.
        if int(os.environ.get("LOCAL_RANK", "0")) == 0:
            corpus_of(job)
        dist.barrier()
        corpus = corpus_of(job)
        device = own_device(BACKENDS[job.device])
        own = OwnModule.of(job.code, job.seed) if job.code else None
        executor = executor_of(job, own, device=device)
        executor.watch()
        executors.append(executor)
        identity, done = identity_of(job, corpus), 0
        if job.checkpoints is not None and job.resume:
            done = load(job.checkpoints, executor, identity=identity, override=job.override)
        loop = Loop(job, executor, corpus, done)
        loop.measure_slowdown()
        routed = None if job.record_router is None else RoutedCounts(executor.graph, executor.device)
        executor.compute.routed = None if routed is None else routed.note
        try:
            for step in range(done + 1, job.steps + 1):
                loop.step(step)
                if routed is not None:
                    routed.end_step(step)
                busy = loop.saver is not None and loop.saver.busy
                # Ranks must end, and begin checkpoints, after the same step.
                sent, is_busy = largest_of_ranks([max(signals, default=0), int(busy)])
                if loop.ends(step, sent, busy=bool(is_busy)):
                    break
        finally:
            if loop.saver is not None:
                loop.saver.close()
        # A delayed update is applied before weights are written.
        executor.settle()
        if job.record_router is not None and routed is not None and routed.steps:
            record = routed.record()
            if dist.get_rank() == 0:
                save_router(record, job.record_router)
        exported(job, executor, own, stopped=bool(loop.stopped))
        executor.leave()
        return loop.outcome(_teachers_loss(executor, loop))


def executor_of(
    job: TrainingJob,
    own: OwnModule | None,
    *,
    device: torch.device | None = None,
    values: Callable[[Slot], torch.Tensor | None] | None = None,
) -> Executor:
    """This rank of the job, with the values of step 0. own: the model, where it is code. values: in place of those."""
    if values is None and own is not None:
        values = own.start(job.weights)
    elif values is None and job.weights is not None:
        values = values_of(job.weights, job.graph)
    teacher = None
    if (teaching := teaching_of(job.plan)) is not None:
        teacher, beginning = taught_by(teaching, job.graph, dtypes(job.plan).param, device or CPU)
        values = values or beginning
    return Executor(
        job.graph if own is None else own.graph,
        job.plan,
        job.workload,
        seed=job.seed,
        settings=job.settings,
        program=job.program,
        device=CPU if device is None else device,
        values=values,
        states=None if own is None else own.states,
        steps=job.steps,
        expert_costs=job.expert_costs,
        teacher=teacher,
    )


def exported(job: TrainingJob, executor: Executor, own: OwnModule | None, *, stopped: bool) -> None:
    """Writes the weights, if that was asked for and the run was not stopped. All ranks must call it."""
    if job.export is None or stopped:
        return
    target, model = job.export
    if own is not None and iss.METHOD.used(job.plan):
        # Beside the target, so that a run that is cut off leaves no half-written target.
        whole = target.with_name(f".{target.name}.whole")
        own.export(executor, whole)
        if dist.get_rank() == 0:
            load_late("gnomon.runtime.checkpoint.smaller_lstm:shrink")(whole, target, iss.lstms(executor.graph))
            shutil.rmtree(whole)
        dist.barrier()
    elif own is not None:
        own.export(executor, target)
    elif (storage := trained_storage(job.plan)) is None:
        export(executor, target, model=model)
    else:
        whole = target.with_name(f".{target.name}.whole")
        export(executor, whole, model=model)
        if dist.get_rank() == 0:
            load_late("gnomon.runtime.checkpoint.compress:stored_as_trained")(whole, target, storage)
            shutil.rmtree(whole)
        dist.barrier()


def _teachers_loss(executor: Executor, loop: Loop) -> tuple[str, ...]:
    """The loss that a teacher has on the text that the model was validated on, if there are both."""
    distillation = executor.compute.distillation
    batch = None if distillation is None else loop.corpus.validation_batch(0, **loop.size)
    if distillation is None or batch is None:
        return ()
    inputs = {name: x.to(executor.device) for name, x in batch.items()}
    counted = int((inputs[distillation.teacher_hooks.labels] >= 0).sum())
    with torch.no_grad():
        loss = float(distillation.teacher.output(inputs)) / max(counted, 1)
    return (f"the teacher's loss on that held-out text is {loss:.3f}",)


class Loop:
    """What is known between two steps."""

    def __init__(
        self,
        job: TrainingJob,
        executor: Executor,
        corpus: Batches,
        done: int,
        evaluate: Callable[[Batch], float] | None = None,
    ) -> None:
        """Takes evaluate, the loss of a batch without training; None: the executor's rows'."""
        self.job, self.executor, self.corpus, self.done = job, executor, corpus, done
        self.evaluate = evaluate or partial(evaluate_rows, executor)
        """Takes a batch, returns its loss without training."""
        self.size = {"sequences": job.workload.batch_size, "seq_len": longest_of(job.workload)}
        """Sequences of a step, and tokens of the longest."""
        self.records: list[Record] = []
        """A record of each step that was trained here."""
        self.timelines: list[Timeline] = []
        """Of the steps that were measured; empty where none was to be."""
        self.measured = _measured_steps(done, job.steps) if job.measure else frozenset()
        """Numbers of the steps that are to be measured."""
        self.stopped = 0
        """Number of the signal that asked it to end; 0: none did."""
        self.checkpoint: Path | None = None
        """The checkpoint written last; None before the first."""
        self.saver: Saver | None = None
        """Writes checkpoints; None where there is no folder for them."""
        if job.checkpoints is not None:
            self.saver = Saver(
                job.checkpoints, executor, identity=identity_of(job, corpus), keep=job.keep, source=job.source
            )
        self.slowdown: float | None = None
        """Times slower than the machine was when it was calibrated; None where that is not known."""
        self.slowdown_said = ""
        """The same in words; empty where there is nothing to say."""
        self.waits: list[float] = []
        """Seconds of each step without a core; NaN where the system does not say."""
        work = job.workload
        tokens = sum(work.sequence_lengths()) if job.counted == "tokens" else work.batch_size
        says = not job.quiet and dist.get_rank() == 0
        expected = job.expected_step_s
        if says:
            for note in corpus.notes:
                print("\n".join(wrap(note, 80)), file=sys.stderr, flush=True)
        device = executor.device
        self.progress = (
            Progress(steps=job.steps, tokens=tokens, counted=job.counted, expected_step_s=expected, device=device)
            if says
            else None
        )

    def measure_slowdown(self) -> None:
        """Says how much slower it is than when it was calibrated, and expects so much; nothing, if it never was."""
        if self.job.calibrated is None or not self.job.calibrated.groups[0].node.device.measured:
            return
        self.slowdown, self.slowdown_said = slowdown_now(self.job.calibrated, step_s=self.job.expected_step_s)
        if self.progress is not None:
            print("\n".join(wrap(self.slowdown_said, 80)), file=sys.stderr, flush=True)
            if self.job.expected_step_s is not None:
                self.progress.expected_step_s = self.job.expected_step_s * self.slowdown

    def step(self, step: int) -> None:
        """Trains one step."""
        began, queued = perf_counter(), waited_s()
        batch = self.corpus.batch(step, seed=self.job.seed, **self.size)
        if step in self.measured:
            result, timeline = self.executor.measured_step(batch, memory=True)
            notes = [f"step {step}, of median length among {len(self.measured)} measured ones"]
            notes += without_a_core(dist.get_rank(), waited_since(queued) / (perf_counter() - began))
            notes += [self.slowdown_said] if self.slowdown_said else []
            by_class = self.executor.per_class(timeline)
            self.timelines.append(replace(by_class, assumptions=(*by_class.assumptions, *notes)))
            elapsed_s, loss = timeline.makespan_s, self.executor.total_loss(result)
        else:
            result = self.executor.step(batch)
            loss = self.executor.total_loss(result)
            elapsed_s = perf_counter() - began
        self.waits.append(waited_since(queued))
        self.records.append(Record(step=step, loss=loss, grad_norm=float(result.grad_norm), step_s=elapsed_s))

    def ends(self, step: int, signal_number: int, busy: bool) -> bool:
        """Validates, reports and saves as is due after the step; whether it was the last. signal_number: of the signal
        that asked for an end, or 0. busy: whether any rank still writes the checkpoint before. RunError where training
        diverged."""
        # The loss is the same sum on every rank, so all raise or none does.
        self._check_loss(step)
        # Without waiting: where a rank still writes, training goes on.
        if self.saver is not None and not busy:
            self.checkpoint = self.saver.finish() or self.checkpoint
        job, last = self.job, bool(signal_number) or step == self.job.steps
        if last or (job.validate_every and step % job.validate_every == 0):
            self._validate()
        self._show(last)
        due = job.checkpoint_every and step % job.checkpoint_every == 0
        at_end = bool(signal_number) or (last and (due or job.checkpoint_at_end))
        if self.saver is not None and (at_end or due):
            # At the end nothing trains on meanwhile, so nothing needs to be copied.
            self.saver.start(step, copy=not at_end)
        if self.saver is not None and last:
            self.checkpoint = self.saver.finish() or self.checkpoint
        if signal_number:
            self.stopped = signal_number
            self._say_stopped(step)
        return last

    def _validate(self) -> None:
        """Puts the loss on held-out data, if there is any, into the last record."""
        batch = self.corpus.validation_batch(0, **self.size)
        if batch is not None:
            self.records[-1] = replace(self.records[-1], validation_loss=self.evaluate(batch))

    def _check_loss(self, step: int) -> None:
        """RunError on every rank for a loss that is no number: nothing is learnt after it."""
        if math.isfinite(loss := self.records[-1].loss):
            return
        last_checkpoint = None
        if self.saver is not None:
            self.saver.finish()
            last_checkpoint = newest(self.saver.folder)
        after = (
            f"the checkpoint {last_checkpoint} is from before it: go on from it with a lower --lr"
            if last_checkpoint
            else "no checkpoint"
        )
        raise RunError(f"the loss of step {step} is {loss}: training diverged, so the run ended; {after}")

    def _show(self, last: bool) -> None:
        record = self.records[-1]
        if self.progress is not None:
            self.progress.show(
                record.step,
                record.loss,
                record.step_s,
                held_out=record.validation_loss,
                warm=len(self.records) <= WARM_UP + 1,
                last=last,
            )

    def _say_stopped(self, step: int) -> None:
        """The processes are about to be ended, so nobody else can say it."""
        if self.progress is not None:
            name = signal.Signals(self.stopped).name
            checkpoint_text = f"checkpoint in {self.checkpoint}" if self.checkpoint else "no checkpoint was asked for"
            again = f"; go on with: {self.job.resume_with}" if self.checkpoint and self.job.resume_with else ""
            print(f"stopped by {name} after step {step}; {checkpoint_text}{again}", file=sys.stderr, flush=True)

    def outcome(self, notes: tuple[str, ...] = ()) -> Outcome:
        """What there is to tell. notes: beside the executor's."""
        ordered = sorted(self.timelines, key=lambda timeline: timeline.makespan_s)
        return Outcome(
            records=tuple(self.records),
            resumed_from=self.done,
            signal=self.stopped,
            checkpoint=self.checkpoint,
            timeline=ordered[(len(ordered) - 1) // 2] if ordered else None,
            slowdown=self.slowdown,
            slowdown_said=self.slowdown_said,
            core_wait_share=self._waited(),
            process_peak_bytes=peak_bytes(self.executor.device),
            notes=self.executor.notes + notes,
            training_tokens=self.corpus.training_tokens,
            validation_tokens=self.corpus.validation_tokens,
            epochs=self.corpus.epochs(self.job.steps, **self.size),
        )

    def _waited(self) -> float | None:
        """Measures `Outcome.core_wait_share`; all ranks must call it."""
        warm = _warm(len(self.records))
        took = sum(record.step_s for record in self.records[warm:])
        share = sum(self.waits[warm:]) / took if took else math.nan
        # NaN does not survive a maximum in one way everywhere; infinity does.
        most = torch.tensor([math.inf if math.isnan(share) else share], dtype=torch.float64)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return float(most) if math.isfinite(float(most)) else None


def _measured_steps(done: int, steps: int) -> frozenset[int]:
    """Picks at most MEASURED steps, spread over those after warm-up; the last one if there are none."""
    first = min(done + WARM_UP + 1, steps)
    count = min(MEASURED, steps - first + 1)
    # Evenly from the first to the last.
    return frozenset(first + i * (steps - first) // max(1, count - 1) for i in range(count))


def largest_of_ranks(flags: Sequence[int]) -> list[int]:
    """The largest of each flag over all ranks: a signal may reach one of them only."""
    largest = torch.tensor(flags)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return [int(flag) for flag in largest]


def identity_of(job: TrainingJob, corpus: Batches) -> dict[str, str]:
    """What a run goes on from beside model, precision and batch."""
    # The learning rate has an entry of its own, so that `override` may name it alone.
    rest = replace(job.settings, lr=0.0)
    own = {"seed": str(job.seed), "lr": str(job.settings.lr), "optimizer": repr(rest), "data": corpus.identity}
    return own | ({"kernels": job.kernels} if job.kernels else {})


@contextmanager
def signals_noted() -> Iterator[list[int]]:
    """A list that signals are put on, in place of their usual effect."""
    signals: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        signals.append(number)

    before = {number: signal.signal(number, note) for number in SIGNALS}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # what came before is noted now
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def check_unused(folder: Path) -> None:
    """InputError if the folder has checkpoints: a run that does not resume from them would mix with them."""
    if earlier := checkpoints(folder):
        raise InputError(
            f"{earlier[-1]} is from an earlier run; go on from it with --resume, or give another folder "
            f"(--checkpoints), or remove {folder}"
        )
