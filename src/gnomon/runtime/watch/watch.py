"""`gnomon.watch(model, optimizer, plan)`: expected against actual in anybody's own training loop, and what drifts.

    with gnomon.watch(model, optimizer, "plan.toml", records="watch.jsonl") as watch:
        for batch in watch.data(loader):
            ...

Hooks of the model and of the optimizer cut each step into parts (`drift.Parts`); the ranks tell each other theirs once
a window, without waiting. Plain PyTorch, DDP and FSDP2, on the CPU and on CUDA, where marks are events. Leaves out what
C++ waits for inside a forward (buffers that DDP broadcasts, collectives of a compiled graph), which counts as compute.
"""

from __future__ import annotations

import json
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any, Literal, TextIO, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import Work
from torch.autograd.variable import Variable
from torch.utils._pytree import tree_leaves

from gnomon.errors import InputError
from gnomon.frontend import named
from gnomon.plans import PlanFile, load_plan
from gnomon.prediction import Prediction, predict
from gnomon.request import arguments
from gnomon.request.job_file import is_plan, read_job
from gnomon.request.model import is_code
from gnomon.runtime.watch.drift import WORDS, Drift, ExpectedStep, Parts, expected_of, judge, memory_drift, typical
from gnomon.runtime.watch.expect import FirstForward, expect, machine, reason

WARM_UP = 3
"""First steps, which are slower than the rest and count in no window."""
WINDOW = 8
"""Steps between two looks at what drifts; their medians are compared."""
LINE_S = 10.0
"""Seconds between lines, where nothing new drifts."""
UNPLANNED = (
    "expect {:.3g} s a step, as the first ones took: no plan was given, and what this machine could do is not known: {}"
)
"""What to expect of later steps where there is no plan and the loop cannot be predicted, after the first window."""
PREDICTED = (
    "expect {:.3g} s a step ({:.3g} to {:.3g}): the module as it was called, captured, and predicted on {}; the first "
    "steps took {:.3g}"
)
"""What to expect where there is no plan and the loop could be predicted."""
Batch = TypeVar("Batch")
Record = dict[str, Any]


@dataclass(slots=True)
class _WatchedStep:
    """A step under way: marks, and the parts that lie between them."""

    cuts: list[tuple[str, Any, Any]] = field(default_factory=list)
    """(part, begin, end)."""
    waits: list[tuple[str, Any, Any]] = field(default_factory=list)
    """(part that it lies in, begin, end) of each wait for a collective."""


class Watch:
    """The hooks of one rank. `close` takes them away; a `with` does."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        expected: ExpectedStep | None,
        *,
        records: Callable[[Record], object] | None,
        out: TextIO | None,
        clock: Callable[[], float],
    ) -> None:
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.expected, self.records, self.out = expected, records, out
        self.steps = 0
        """Optimizer steps so far."""
        self.drifts: tuple[Drift, ...] = ()
        """What drifts as of the last window, the costliest first."""
        self.recent: deque[Parts] = deque(maxlen=WINDOW)
        """Steps of this rank, the last ones."""
        self._cuda = device if device.type == "cuda" else None
        self._now = _event if self._cuda is not None else clock
        self._phase: Literal["between", "evaluating", "loading", "forward", "backward", "after"] = "between"
        self._told_data = self._said_what_to_expect = False
        self._seen = None if expected is not None else FirstForward()
        self._loop = (model, optimizer)
        self._last: Any = None
        self._open = _WatchedStep()
        self._late: deque[_WatchedStep] = deque()
        self._first: tuple[Parts, ...] | None = None
        self._windows: list[int] = []
        self._retries = self._count_retries()
        self._pending: deque[tuple[Work, list[Tensor]]] = deque()
        self._printed = float("-inf")
        self._group = dist.new_group(backend="gloo") if _together() else None
        self.rank = dist.get_rank() if self._group is not None else 0
        """This process's rank; 0 where it is alone."""
        self._hook(model, optimizer)

    # --- hooks

    def _hook(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._handles: list[Any] = [
            model.register_forward_pre_hook(self._forward_begins, prepend=True, with_kwargs=True),
            model.register_forward_hook(self._forward_ends),
            optimizer.register_step_pre_hook(self._update_begins),
            optimizer.register_step_post_hook(self._update_ends),
        ]
        self._plain_wait = plain = Work.wait

        def wait(work: Work, *args: Any, **named: Any) -> Any:
            if not self._handles or self._last is None:
                return plain(work, *args, **named)
            begin = self._now()
            try:
                return plain(work, *args, **named)
            finally:
                self._open.waits.append(("", begin, self._now()))

        self._timed_wait = wait
        Work.wait = wait  # type: ignore[method-assign,assignment]

    def close(self) -> None:
        """Takes every hook away; the model, the optimizer and torch are as they were."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if Work.wait is self._timed_wait:
            Work.wait = self._plain_wait  # type: ignore[method-assign]
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None
        close = getattr(self.records, "close", None)
        if close is not None:
            close()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def data(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yields the loader's batches. What it takes is `data loading`, and the rest between two steps the loop's
        own."""
        self._told_data = True
        batches = iter(loader)
        while True:
            self._cut("loop_s")
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                self._cut("data_s")
            yield batch

    # --- a step

    def _cut(self, part: str) -> None:
        """What lies between the last mark and now is of this part; of none for ""."""
        mark, step = self._now(), self._open
        if self._last is not None and part:
            step.cuts.append((part, self._last, mark))
        step.waits = [(w[0] or part, w[1], w[2]) for w in step.waits if w[0] or part]
        self._last = mark

    def _forward_begins(self, module: nn.Module, args: Any, named: Any) -> None:
        between = "loop_s" if self._told_data else "data_s"
        if self._seen is not None and torch.is_grad_enabled():
            self._seen.forward("cpu" if self._cuda is None else self._cuda.type, args, named)
        if not torch.is_grad_enabled():
            self._cut(between)
        else:
            # A forward after another one without a backward in between: what lies there is the loop's own arithmetic,
            # and no loading.
            self._cut("compute_s" if self._phase == "forward" else between)

    def _forward_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            self._cut("")  # an evaluation is no part of a step
            return
        self._cut("compute_s")
        self._phase = "forward"
        outputs = [x for x in tree_leaves(_plain(output)) if isinstance(x, Tensor) and x.requires_grad]
        for x in outputs:
            x.register_hook(self._backward_begins)

    def _backward_begins(self, gradient: Tensor) -> None:
        if self._phase == "forward" and self._handles:
            self._phase = "backward"
            _at_the_end(self._backward_computed)

    def _backward_computed(self) -> None:
        """Every gradient is there; what was called for by then (DDP's last buckets) is waited for after this."""
        self._cut("compute_s")
        _at_the_end(self._backward_ends)

    def _backward_ends(self) -> None:
        self._cut("communication_s")
        self._phase = "after"

    def _update_begins(self, *_: Any) -> None:
        self._cut("update_s" if self._phase == "after" else "compute_s")

    def _update_ends(self, *_: Any) -> None:
        self._cut("update_s")
        self._phase = "between"
        self.steps += 1
        if self._seen is not None:
            self._seen.step()
        if self.steps > 1:  # the first has no beginning
            self._late.append(self._open)
        self._open = _WatchedStep()
        # On a GPU the host is ahead of its events: a step is summed up when its last one has come, and nothing waits
        # for that.
        while self._late and (self._cuda is None or self._late[0].cuts[-1][2].query()):
            self._done(self._late.popleft())

    def _seconds(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end) / 1e3 if self._cuda is not None else end - begin  # type: ignore[no-any-return]

    def _done(self, step: _WatchedStep) -> None:
        """A step whose marks have come."""
        sums = dict.fromkeys(WORDS, 0.0)
        for part, begin, end in step.cuts:
            sums[part] += self._seconds(begin, end)
        for part, begin, end in step.waits:
            waited = min(self._seconds(begin, end), sums[part])
            sums[part] -= waited
            sums["communication_s"] += waited
        parts, number = Parts(**sums), self.steps - len(self._late)
        self.recent.append(parts)
        memory, before = self._memory(), [drift.name for drift in self.drifts]
        if number > WARM_UP + 1 and (number - WARM_UP - 1) % WINDOW == 0:
            self._windows.append(memory)
            self._ask()
        self._hear()
        self._tell(number, parts, memory, new=before != [drift.name for drift in self.drifts])

    # --- what drifts

    def _ask(self) -> None:
        """Every rank's parts of this window, when they come; nothing waits for them."""
        mine = typical(self.recent)
        if self._group is None:
            self._judge((mine,))
            return
        tensor = torch.tensor(astuple(mine), dtype=torch.float64)
        heard = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        work = dist.all_gather(heard, tensor, group=self._group, async_op=True)
        assert work is not None, "an asynchronous collective returns its work"
        self._pending.append((work, heard))

    def _hear(self) -> None:
        while self._pending and self._pending[0][0].is_completed():
            _, heard = self._pending.popleft()
            names = list(Parts.__dataclass_fields__)
            self._judge(tuple(Parts(**dict(zip(names, one.tolist(), strict=True))) for one in heard))

    def _judge(self, now: tuple[Parts, ...]) -> None:
        drifts = judge(now, self._first, self.expected)
        retries = self._count_retries() - self._retries
        peak = None if self._cuda is None else torch.cuda.max_memory_allocated(self._cuda)
        memory = memory_drift(self._windows, WINDOW, retries=retries, peak=peak, expected=self.expected)
        self.drifts = drifts if memory is None else (*drifts, memory)
        if self._first is None:
            self._first = now

    def _expect(self, took_s: float) -> str:
        """Predicts the loop as it is, once, on the rank that tells; what to say of it."""
        assert self._seen is not None, "only a loop without a plan asks"
        seen, self._seen = self._seen, None
        try:
            prediction = expect(*self._loop, seen)
        except Exception as error:  # a module of the user's may fail in any way when it is captured: training goes on
            return UNPLANNED.format(took_s, reason(error))
        finally:
            self._last = self._now() if self._last is not None else None  # capturing is no part of a step
        self.expected = expected_of(prediction)
        band = prediction.band
        return PREDICTED.format(prediction.step_s, band.low_s, band.high_s, prediction.cluster, took_s)

    def _count_retries(self) -> int:
        return 0 if self._cuda is None else int(torch.cuda.memory_stats(self._cuda).get("num_alloc_retries", 0))

    def _memory(self) -> int:
        """What the process holds now: on a GPU what its tensors have there."""
        return resident() if self._cuda is None else torch.cuda.memory_allocated(self._cuda)

    # --- what is said

    def _tell(self, number: int, parts: Parts, memory: int, *, new: bool) -> None:
        if self.records is not None:
            self.records(self.record(number, parts, memory))
        if self.out is None or self.rank != 0 or number <= WARM_UP:
            return
        if self.expected is None and not self._said_what_to_expect and number > WARM_UP + WINDOW:
            self._said_what_to_expect = True
            print(self._expect(typical(self.recent).step_s), file=self.out, flush=True)
        if new or monotonic() - self._printed >= LINE_S:
            self._printed = monotonic()
            print(self.line(number, memory), file=self.out, flush=True)

    def record(self, number: int, parts: Parts, memory: int) -> Record:
        """One step as JSON values; seconds, bytes. `drift` is the name of what costs most, None for nothing."""
        drift, expected = self.drifts[0] if self.drifts else None, self.expected
        return {
            "step": number,
            "rank": self.rank,
            "step_s": parts.step_s,
            **asdict(parts),
            "memory_bytes": memory,
            "expected_step_s": None if expected is None else expected.parts.step_s,
            "expected": None if expected is None else asdict(expected.parts),
            "drift": None if drift is None else drift.name,
            "why": None if drift is None else drift.why,
            "also": [other.name for other in self.drifts[1:]],
        }

    def line(self, number: int, memory: int) -> str:
        """`step 20  0.082 s, expected 0.034  data loading 0.05 (0)  compute 0.03 (0.03)  0.41 GiB  drifts: …`."""
        parts, expected = typical(self.recent), self.expected
        expected_text = "" if expected is None else f", expected {expected.parts.step_s:.3g}"
        words = [f"step {number}", f"{parts.step_s:.3g} s{expected_text}"]
        for part, name in WORDS.items():
            seconds, should = getattr(parts, part), None if expected is None else getattr(expected.parts, part)
            if seconds > 0.005 * parts.step_s or should:
                words.append(f"{name} {seconds:.3g}" + (f" ({should:.3g})" if should is not None else ""))
        words.append(f"{memory / 2**30:.2f} GiB")
        if self.drifts:
            drift = self.drifts[0]
            words.append(f"drifts: {drift.name}: {drift.why}")
        return "  ".join(words)


def watch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    plan: str | Path | PlanFile | Prediction | None = None,
    *,
    records: str | Path | Callable[[Record], object] | None = None,
    out: TextIO | None = sys.stderr,
    clock: Callable[[], float] = perf_counter,
) -> Watch:
    """Watches a training loop from here on: a line now and then, and a record of each step. All ranks must call it.

    model: what the loop calls, DDP and FSDP2 included. plan: a plan file, whose plan is predicted anew; a job file of
    another program (YAML, a launch script), predicted on this machine with the ranks that run; or a Prediction. None:
    after the first steps the module is captured with the inputs that it was called with and predicted on this machine,
    and where that cannot be done the first steps alone are compared with. records: takes each record on every rank, or
    a file that rank 0 writes, one JSON object a line. out: where rank 0's lines go; None for none. clock: seconds, on a
    CPU.
    InputError for other types, and as `predict`.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"watch wants the torch.nn.Module that the loop calls, not a {type(model).__name__}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(
            f"watch wants the torch.optim.Optimizer that makes the steps, not a {type(optimizer).__name__}"
        )
    expected = None if plan is None else expected_of(_predicted(plan, model))
    first = not _together() or dist.get_rank() == 0
    if isinstance(records, str | Path):
        records = _Lines(Path(records)) if first else None
    return Watch(model, optimizer, expected, records=records, out=out, clock=clock)


class _Lines:
    """A file of records."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("w", encoding="utf-8")

    def __call__(self, record: Record) -> None:
        print(json.dumps(record), file=self.file, flush=True)

    def close(self) -> None:
        self.file.close()


def _predicted(plan: object, model: nn.Module) -> Prediction:
    """The prediction of a plan file, which says what it is for, or of a job file of another program on this machine."""
    if isinstance(plan, Prediction):
        return plan
    if isinstance(plan, str | Path) and not is_plan(plan):
        job = read_job(plan, machine(model))
        return predict(job.graph, job.cluster, job.plan, job.workload, job.stack)
    file = load_plan(plan) if isinstance(plan, str | Path) else plan
    if not isinstance(file, PlanFile):
        raise InputError(
            f"plan is a plan file, which says what it is for, a job file of another program, or a Prediction; a "
            f"{type(file).__name__} says nothing of the model: give gnomon.predict(model, cluster, plan, workload)"
        )
    graph = named.graph_of(file.model)[0] if is_code(file.model) else arguments.graph(file.model)
    cluster = arguments.cluster(file.on)
    return predict(graph, cluster, file.plan, file.workload, arguments.stack(file.stack or None))


def resident() -> int:
    """Bytes of memory that this process has now."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # no Linux
        return 0


def _plain(output: Any) -> Any:
    """A mapping of outputs as a dict, whatever its type."""
    return dict(output) if isinstance(output, Mapping) else output


def _at_the_end(call: Callable[[], None]) -> None:
    """Calls it once the backward under way has computed everything."""
    Variable._execution_engine.queue_callback(call)  # type: ignore[attr-defined]


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _together() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1
