"""What a captured model does when it trains here: kept bytes, a step's time and memory, and plans against a plain loop.

`trained(model, example)` gives a body a head of one linear layer and a cross-entropy over its first output, captures
both, and returns the columns of `transformers_types` that need a loss. Time and memory are those of one process in
float32 beside a plain loop of the same module, in seconds on a core; plans run on one or two processes, in float64,
from the module's own weights. Dropout is off, as the runtime leaves it out. `kept_error` is as eager PyTorch keeps it.
"""

from __future__ import annotations

import copy
import functools
import gc
import math
import multiprocessing
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

import gnomon
from gnomon.frontend.capture import CapturedModule, captured, quiet
from gnomon.frontend.trace import named_tensors
from gnomon.graph import Dtypes, Setting, graph_saved_bytes
from gnomon.plans import Mesh, Optimizer, Plan, Precision, Saved, SavedRule, Schedule, Workload
from gnomon.plans.check import sample_tokens
from gnomon.prediction.software_kernels import kernels_of
from gnomon.runtime import AdamWSettings
from gnomon.runtime.launch.captured_job import executor
from gnomon.runtime.module.stage import bound
from gnomon.runtime.watch.layer_bytes import LiveBytes
from gnomon.software import stack

CLASSES = 8
ROWS = 8
"""Rows of the step that is timed, where the batch may vary."""
ROUNDS = 5
WAIT_S = 180
"""Wall seconds that a plan may take."""
SETTINGS = AdamWSettings(lr=1e-2, eps=1e-3, weight_decay=0.0, clip_norm=1e9)
TOLERANCE = 1e-9
"""Of the losses of two steps, relative."""
ALL = {"param": "fp64", "compute": "fp64", "grad": "fp64", "reduce": "fp64", "states": "fp64"}
FP64 = Precision(**ALL, master="none")  # type: ignore[arg-type]
FP32 = Precision(**dict.fromkeys(ALL, "fp32"), master="none")  # type: ignore[arg-type]
BASE = Plan(precision=FP64, schedule=Schedule(micro_batch_size=2))
TENSORS = Saved(rules=(SavedRule(calls="*", tensors=("*",), action="recompute"),))
ALONE = {
    "recompute": replace(BASE, saved=Saved(preset="full")),
    "by tensor": replace(BASE, saved=TENSORS),
}
"""Of one process."""
PLANS = {
    "dp": replace(BASE, mesh=Mesh(dp_replicate=2)),
    "zero 3": replace(BASE, mesh=Mesh(dp_shard=2), optimizer=Optimizer(zero=3)),
    "pp": replace(BASE, mesh=Mesh(pp=2)),
    "tp": replace(BASE, mesh=Mesh(tp=2)),
}
"""Of two."""


class Headed(nn.Module):
    """A body whose first output is averaged over all but rows and features, and classified."""

    def __init__(self, body: nn.Module, example: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.body = body
        with torch.no_grad():
            width = sum(x.shape[-1] for x in self._read(body(**example)))
        if not width:
            raise ValueError("it returns no numbers in rows")
        self.head = nn.Linear(width, CLASSES)

    def forward(self, answers: Tensor, **inputs: Tensor) -> Tensor:
        read = [x.reshape(x.shape[0], -1, x.shape[-1]).mean(1) for x in self._read(self.body(**inputs))]
        return functional.cross_entropy(self.head(torch.cat(read, -1)), answers)

    def _read(self, out: Any) -> list[Tensor]:
        given = [x for _, x in named_tensors(out) if x.is_floating_point() and x.dim() > 1]
        return given[:1]


def trained(model: nn.Module, example: Mapping[str, Tensor], row: dict[str, Any]) -> None:
    """Adds the columns of a small model; of each that failed the reason."""
    try:
        torch.manual_seed(0)
        rows = next(x.shape[0] for x in example.values())
        headed = Headed(model, example).eval()
        given = {**example, "answers": torch.randint(0, CLASSES, (rows,))}
        found = captured(headed, given, training=False)
    except Exception as error:
        row["head"] = _said(error)
        return
    _then(row, "kept_error", lambda: kept_error(headed, given, found.graph))
    ways = ROWS // rows if "batch" in found.symbols and not ROWS % rows else 1
    _then(row, "step", lambda: step(headed, found, wider(given, ways)))
    try:
        headed = in_float64(headed)
        given = {name: x.double() if x.is_floating_point() else x for name, x in given.items()}
        found = captured(headed, given, training=False)
    except Exception as error:
        row["head"] = _said(error)
        return
    row["ran"] = runs(headed, found, wider(given, 2))


def in_float64(module: nn.Module) -> nn.Module:
    """The same module, all of whose arithmetic is float64: with experts as batched products, of which torch has
    float64, and float64 wherever its code asks for a narrower dtype."""
    for inner in module.modules():
        if hasattr(inner, "set_experts_implementation"):
            try:
                inner.set_experts_implementation("batched_mm")
            except (ValueError, KeyError):
                pass  # has none
    own = type(module)

    @functools.wraps(own.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        torch.set_default_dtype(torch.float64)
        try:
            with Widened():
                return own.forward(self, *args, **kwargs)
        finally:
            torch.set_default_dtype(torch.float32)

    module.__class__ = type(own.__name__, (own,), {"forward": forward, "__module__": own.__module__})
    return module.double()


NARROW = (torch.float32, torch.bfloat16, torch.float16)


class Widened(TorchFunctionMode):
    """float64 in place of narrower dtypes that a forward names: a norm or a router in float32 rounds to 1e-7, which
    says nothing about the Graph."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("float", "half", "bfloat16") and len(args) == 1 and not kwargs:
            return args[0].double()
        args = tuple(torch.float64 if _narrow(x) else x for x in args)
        kwargs = {name: torch.float64 if _narrow(x) else x for name, x in (kwargs or {}).items()}
        return func(*args, **kwargs)


def _narrow(x: Any) -> bool:
    return isinstance(x, torch.dtype) and x in NARROW


def wider(given: Mapping[str, Tensor], ways: int) -> dict[str, Tensor]:
    """The same rows over and over, with other answers."""
    wide = {name: x.repeat(ways, *[1] * (x.dim() - 1)) for name, x in given.items()}
    answers = torch.arange(len(wide["answers"])) % CLASSES
    return {**wide, "answers": answers}


class Kept:
    """A tensor that autograd keeps."""

    def __init__(self, x: Tensor) -> None:
        self.x = x.detach()


def kept_error(model: nn.Module, example: Mapping[str, Tensor], graph: Any, dtype: str = "fp32") -> float:
    """Bytes that the Graph says are kept for backward over those that autograd keeps, less 1: storages, each once,
    without parameters and buffers, which are still kept when the forward has returned. dtype: of the module."""
    apart = {x.untyped_storage()._cdata for x in (*model.parameters(), *model.buffers())}
    held = WeakSet[Kept]()

    def pack(x: Tensor) -> Kept:
        kept = Kept(x)
        held.add(kept)
        return kept

    with quiet(model, False), torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.x):
        out = model(**example)
    gc.collect()
    storages = [kept.x.untyped_storage() for kept in held]
    sizes = {storage._cdata: storage.nbytes() for storage in storages if storage._cdata not in apart}
    del out
    kept = Dtypes(param=dtype, compute=dtype)
    setting = Setting(sizes=bound(graph.inputs, example), dtypes=kept, causal_flops="full")
    kernels, *_ = kernels_of(stack("gnomon"), cpu=True)
    return round(float(graph_saved_bytes(graph, kernels, setting, {})) / max(sum(sizes.values()), 1) - 1, 5)


def step(
    module: nn.Module, found: CapturedModule, batch: Mapping[str, Tensor], *, rounds: int = ROUNDS
) -> dict[str, float]:
    """Predicted and measured seconds and bytes of a step, and those of a plain loop, in turns."""
    rows, seq_len = len(batch["answers"]), _length(found, batch)
    work = Workload(global_batch_size=rows, seq_len=seq_len)
    plan = Plan(schedule=Schedule(micro_batch_size=rows), precision=FP32)
    guess = gnomon.predict(found.graph, "local:1", plan, work, "gnomon")
    own = copy.deepcopy(module)
    optimizer = torch.optim.AdamW(own.parameters(), lr=1e-4, fused=True)

    def loop() -> None:
        optimizer.zero_grad()
        own(**batch).backward()
        optimizer.step()

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        job = executor(module, found, plan, work)
        calls: dict[str, Callable[[], object]] = {"measured": lambda: job.step(batch), "plain": loop}
        taken: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(rounds + 2):
            for name, call in calls.items():
                spent = _seconds(call)
                if turn > 1:
                    taken[name].append(spent)
        live, before = LiveBytes(torch.device("cpu")), job.resident_bytes()
        with live:
            job.step(batch)
        job.leave()
    finally:
        dist.destroy_process_group()
    by_class = guess.memory[0].by_class
    said = sum(size for name, size in by_class.items() if name not in ("workspace", "overhead"))
    counted, times = before + live.most, {name: statistics.median(spent) for name, spent in taken.items()}
    return {
        "predicted_s": float(guess.step_s),
        **{f"{name}_s": value for name, value in times.items()},
        "time_error": round(float(guess.step_s) / times["measured"] - 1, 4),
        "predicted_bytes": said,
        "counted_bytes": counted,
        "memory_error": round(said / counted - 1, 4),
    }


def _seconds(call: Callable[[], object]) -> float:
    """That this thread, which computes all, was on a core: other work on the machine is not in it."""
    began = time.thread_time()
    call()
    return time.thread_time() - began


def _length(found: CapturedModule, batch: Mapping[str, Tensor]) -> int:
    """Positions of a sequence: those of the first integers with two dims; 1 for a model of none."""
    if tokens := sample_tokens(found.graph):
        return tokens
    ids = [x for name, x in batch.items() if x.dim() == 2 and not x.is_floating_point()]
    return int(ids[0].shape[1]) if ids else 1


def plain_losses(module: nn.Module, batch: Mapping[str, Tensor]) -> list[float]:
    """Of two steps of a plain loop with a copy of the module."""
    plain = copy.deepcopy(module)
    learned = [x for x in plain.parameters() if x.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=SETTINGS.lr, betas=SETTINGS.betas, eps=SETTINGS.eps, weight_decay=0.0)
    losses = list[float]()
    for _ in range(2):
        optimizer.zero_grad()
        loss = plain(**batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def runs(module: nn.Module, found: CapturedModule, batch: Mapping[str, Tensor]) -> dict[str, str]:
    """Plan -> nothing where two of its steps have the losses of a plain loop, else what happened."""
    losses = plain_losses(module, batch)
    if not all(map(math.isfinite, losses)):
        return dict.fromkeys((*ALONE, *PLANS), "the loss of the module itself is no number")
    said = {}
    for name, plan in {**ALONE, **PLANS}.items():
        try:
            got = (_on_two if name in PLANS else on_one)(module, found, plan, batch)
        except Exception as error:
            got = _said(error)
        if isinstance(got, str):
            said[name] = got
            continue
        off = max(abs(a / b - 1) for a, b in zip(got, losses, strict=True))
        said[name] = "" if off <= TOLERANCE else f"losses differ by {off:.1e}"
    return said


def on_one(module: nn.Module, found: CapturedModule, plan: Plan, batch: Mapping[str, Tensor]) -> list[float] | str:
    """Losses of two steps on this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return _losses(module, found, plan, batch)
    finally:
        dist.destroy_process_group()


def _losses(module: nn.Module, found: CapturedModule, plan: Plan, batch: Mapping[str, Tensor]) -> list[float]:
    work = Workload(global_batch_size=len(batch["answers"]), seq_len=_length(found, batch))
    job = executor(module, found, plan, work, settings=SETTINGS)
    return [job.total_loss(job.step(batch)) for _ in range(2)]


def _on_two(module: nn.Module, found: CapturedModule, plan: Plan, batch: Mapping[str, Tensor]) -> list[float] | str:
    """Losses of two steps on two processes that are forked from this one, or why there are none."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(2):
            mine, theirs = context.Pipe(duplex=False)
            job = (rank, Path(folder) / "store", module, found, plan, batch, theirs)
            process = context.Process(target=_rank, args=job, daemon=True)
            process.start()
            theirs.close()
            pipes.append(mine)
            processes.append(process)
        try:
            for pipe in pipes:
                try:
                    got = pipe.recv() if pipe.poll(WAIT_S) else f"no answer in {WAIT_S} s"
                except EOFError:
                    got = "a rank died"
                if isinstance(got, str):
                    return got
            assert isinstance(got, list)
            return got
        finally:
            for process in processes:
                process.kill()
                process.join()


def _rank(
    rank: int, store: Path, module: nn.Module, found: CapturedModule, plan: Plan, batch: Mapping[str, Tensor], pipe: Any
) -> None:
    signal.alarm(WAIT_S + 5)
    try:
        dist.init_process_group("gloo", store=dist.FileStore(str(store), 2), rank=rank, world_size=2)
        pipe.send(_losses(module, found, plan, batch))
    except Exception as error:
        pipe.send(_said(error))
    os._exit(0)


def _then(row: dict[str, Any], key: str, function: Callable[[], Any]) -> None:
    try:
        row[key] = function()
    except Exception as error:
        row[key] = f"failed: {_said(error)}"


def _said(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {(lines or [''])[0][:200]}"
