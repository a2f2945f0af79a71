"""What a step computes and holds, counted from outside the interpreter: products by their shapes as torch dispatches
them, and live bytes by torch's own profiler of the allocator."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from runtime.parity import BY_STAGE, FP32, FULL, SP, schedule
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

from gnomon.graph import Graph
from gnomon.models.llama import LlamaConfig, llama
from gnomon.plans import Layout, Mesh, Offload, Optimizer, Overlap, Plan, Saved, Workload
from gnomon.runtime import Executor, Recorder
from gnomon.runtime.mesh.collectives import GATHER, SCATTER
from gnomon.runtime.step.buffers import Buffers
from gnomon.runtime.watch.layer_bytes import LiveBytes
from gnomon.runtime.watch.measure import Levels
from gnomon.timeline import Timeline

CONFIG = LlamaConfig(
    name="wide",
    num_layers=3,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_size=160,
    vocab_size=256,
)
WORKLOAD = Workload(global_batch_size=8, seq_len=64)
SELECTIVE = Saved(preset="selective")
PLANS: dict[str, Plan] = {
    "one device": Plan(schedule=schedule("one_f_one_b")),
    "gpipe": Plan(schedule=schedule("gpipe")),
    "full": Plan(schedule=schedule("one_f_one_b"), saved=FULL),
    "selective": Plan(schedule=schedule("one_f_one_b"), saved=SELECTIVE),
    "split backward": Plan(schedule=schedule("zero_bubble_h1")),
    "dp": Plan(mesh=Mesh(dp_replicate=2), schedule=schedule("one_f_one_b")),
    "dp, buckets": Plan(
        mesh=Mesh(dp_replicate=2), schedule=schedule("one_f_one_b"), overlap=Overlap(bucket_bytes=200_000)
    ),
    "zero 2, buckets, update on the host": Plan(
        mesh=Mesh(dp_shard=2), schedule=schedule("one_f_one_b"), overlap=Overlap(bucket_bytes=200_000),
        optimizer=Optimizer(zero=2, offload=Offload()),
    ),
    "zero 1": Plan(mesh=Mesh(dp_shard=2), schedule=schedule("one_f_one_b"), optimizer=Optimizer(zero=1)),
    "zero 2": Plan(mesh=Mesh(dp_shard=2), schedule=schedule("one_f_one_b"), optimizer=Optimizer(zero=2)),
    "zero 1, buckets": Plan(
        mesh=Mesh(dp_shard=2), schedule=schedule("one_f_one_b"), optimizer=Optimizer(zero=1),
        overlap=Overlap(bucket_bytes=200_000),
    ),
    "zero 2, buckets": Plan(
        mesh=Mesh(dp_shard=2), schedule=schedule("one_f_one_b"), optimizer=Optimizer(zero=2),
        overlap=Overlap(bucket_bytes=200_000),
    ),
    "zero 3": Plan(mesh=Mesh(dp_shard=2), schedule=schedule("one_f_one_b"), optimizer=Optimizer(zero=3)),
    "zero 3, parameters on the host": Plan(
        mesh=Mesh(dp_shard=2), schedule=schedule("one_f_one_b"), optimizer=Optimizer(zero=3, offload_parameters=True)
    ),
    "parameters on the host": Plan(
        schedule=schedule("one_f_one_b"), optimizer=Optimizer(zero=3, offload_parameters=True)
    ),
    "zero 3, full": Plan(
        mesh=Mesh(dp_shard=2), schedule=schedule("one_f_one_b"), optimizer=Optimizer(zero=3), saved=FULL
    ),
    "tp": Plan(mesh=Mesh(tp=2), schedule=schedule("one_f_one_b")),
    "tp and sp": Plan(mesh=Mesh(tp=2), schedule=schedule("one_f_one_b"), layout=SP),
    "tp and sp, whole vocabulary": Plan(
        mesh=Mesh(tp=2), schedule=schedule("one_f_one_b"), layout=replace(SP, vocab_parallel=False)
    ),
    "tp, whole vocabulary": Plan(
        mesh=Mesh(tp=2), schedule=schedule("one_f_one_b"), layout=Layout(vocab_parallel=False)
    ),
    "tp, gathered logits": Plan(
        mesh=Mesh(tp=2), schedule=schedule("one_f_one_b"), layout=Layout(loss_parallel=False)
    ),
    "tp and sp, full": Plan(mesh=Mesh(tp=2), schedule=schedule("one_f_one_b"), layout=SP, saved=FULL),
    "1f1b": Plan(mesh=Mesh(pp=2), schedule=schedule("one_f_one_b")),
    "1f1b, selective": Plan(mesh=Mesh(pp=2), schedule=schedule("one_f_one_b"), saved=SELECTIVE),
    "1f1b, uneven, recompute by stage": Plan(
        mesh=Mesh(pp=2), schedule=schedule("one_f_one_b", layers_per_stage=(2, 1)), saved=BY_STAGE
    ),
    "gpipe on two": Plan(mesh=Mesh(pp=2), schedule=schedule("gpipe")),
    "zero bubble h1": Plan(mesh=Mesh(pp=2), schedule=schedule("zero_bubble_h1")),
    "zero bubble h1, full": Plan(mesh=Mesh(pp=2), schedule=schedule("zero_bubble_h1"), saved=FULL),
    "pp and dp": Plan(mesh=Mesh(pp=2, dp_replicate=2), schedule=schedule("one_f_one_b")),
    "pp, tp and sp, full": Plan(mesh=Mesh(pp=2, tp=2), schedule=schedule("one_f_one_b"), layout=SP, saved=FULL),
    "tp and zero 1": Plan(
        mesh=Mesh(dp_shard=2, tp=2), schedule=schedule("one_f_one_b"), optimizer=Optimizer(zero=1)
    ),
    "tp, sp and zero 3": Plan(
        mesh=Mesh(dp_shard=2, tp=2), schedule=schedule("one_f_one_b"), layout=SP, optimizer=Optimizer(zero=3)
    ),
    "zero bubble h1 and zero 2": Plan(
        mesh=Mesh(pp=2, dp_shard=2), schedule=schedule("zero_bubble_h1"), optimizer=Optimizer(zero=2)
    ),
    "pp and zero 3, full": Plan(
        mesh=Mesh(pp=2, dp_shard=2), schedule=schedule("one_f_one_b"), optimizer=Optimizer(zero=3), saved=FULL
    ),
    "zero bubble h1, tp and sp": Plan(mesh=Mesh(pp=2, tp=2), schedule=schedule("zero_bubble_h1"), layout=SP),
    "dp, buckets, tied": Plan(
        mesh=Mesh(dp_replicate=2), schedule=schedule("one_f_one_b"), overlap=Overlap(bucket_bytes=200_000)
    ),
    "zero 3, tied": Plan(mesh=Mesh(dp_shard=2), schedule=schedule("one_f_one_b"), optimizer=Optimizer(zero=3)),
}  # fmt: skip
ALLOCATOR = frozenset(
    {
        "one device",
        "gpipe",
        "full",
        "selective",
        "split backward",
        "1f1b",
        "zero bubble h1",
        "1f1b, uneven, recompute by stage",
    }
)
"""Plans whose every byte the profiler sees come and go: threads of gloo, which hold tensors of collectives, are none of
those that it watches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """Bytes after one row."""

    action: str
    account: Levels
    """What the runtime says that it holds, by class."""
    live: int
    """What the allocator has given out since the step began, less what came back."""
    most: int
    """The same at most, since the row before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounted:
    """Of one rank."""

    flops: int
    """Of all products of a step; attention in full, its backward as twice its forward."""
    timeline: Timeline
    """Measured, with memory, by rank class."""
    held: tuple[tuple[int, Levels], ...]
    """(row of the Program, what the runtime says that it holds after it), where that changes, if nothing that is
    communicated were over before somebody waits for it: the most that timing can do."""
    live: tuple[Live, ...]
    """Row by row, for plans of ALLOCATOR."""
    most: int
    """Bytes of tensors at the fullest moment of a step: what the runtime says that it holds before, and what ops make
    beside until it is freed."""


class Products(TorchDispatchMode):
    """Counts 2·m·n·k of every product that torch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0].removesuffix("_")
        if name in ("mm", "bmm"):
            self.flops += 2 * args[0].numel() * args[1].shape[-1]
        elif name == "addmm":
            self.flops += 2 * args[1].numel() * args[2].shape[-1]
        elif name.startswith("_scaled_dot_product"):
            back = name.endswith("backward")
            q, k = args[1 if back else 0], args[2 if back else 1]
            self.flops += (2 if back else 1) * 4 * q.numel() * k.shape[2]
        return func(*args, **(kwargs or {}))


def batch() -> Tensor:
    return torch.randint(0, CONFIG.vocab_size, (8, 65), generator=torch.Generator().manual_seed(5))


def fullest_moment(executor: Executor) -> int:
    """Bytes of tensors at the fullest moment of a step: what the runtime says that it holds before, and what ops make
    beside until it is freed."""
    with LiveBytes(torch.device("cpu")) as counted, Released():
        before = sum(executor._levels())
        executor.step(batch())
        executor.synchronise()
        return before + counted.most


class Released(ExitStack):
    """A collective that is waited for where it is called holds nothing afterwards: gloo's thread lets go of tensors
    only some time after it has woken the caller."""

    def __enter__(self) -> Released:
        for name in (GATHER, SCATTER, "all_reduce", "all_to_all_single"):
            self.enter_context(patch.object(dist, name, partial(_released, getattr(dist, name))))
        return super().__enter__()


def _released(collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    tensors = [x for x in args if isinstance(x, Tensor)]
    before = [x._use_count() for x in tensors]
    work = collective(*args, **kwargs)
    while work is None and any(x._use_count() > n for x, n in zip(tensors, before, strict=True)):
        os.sched_yield()
    return work


def graph_of(name: str) -> Graph:
    return llama(replace(CONFIG, tied=name.endswith(", tied")))


def account(name: str) -> Accounted:
    executor = Executor(graph_of(name), replace(PLANS[name], precision=FP32), WORKLOAD)
    with Products() as products:
        executor.step(batch())
        executor.synchronise()
    _, timeline = executor.measured_step(batch(), memory=True)
    executor.synchronise()
    live = watch(executor) if name in ALLOCATOR else ()
    most = fullest_moment(executor)
    recorder = Recorder(memory=True)
    with patch.object(Buffers, "end_finished", lambda self: None):
        executor.step(batch(), recorder)
    executor.leave()
    return Accounted(
        flops=products.flops, timeline=executor.per_class(timeline), held=tuple(recorder.levels), live=live, most=most
    )


def watch(executor: Executor) -> tuple[Live, ...]:
    """A step under torch's memory profiler."""

    class Noting(Recorder):
        def hold(self, row: int, levels: Levels) -> None:
            with record_function("after row"):
                noted.append((executor.program.token(row), levels))

    noted: list[tuple[str, Levels]] = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        executor.step(batch(), Noting(memory=True))
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() in ("[memory]", "after row")]  # type: ignore[union-attr]
    live = most = 0
    history: list[Live] = []
    for event in sorted(events, key=lambda e: int(e.start_ns())):
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
            continue
        action, levels = noted[len(history)]
        history.append(Live(action=action, account=levels, live=live, most=most))
        most = live
    return tuple(history)


def account_all(names: list[str]) -> dict[str, Accounted]:
    return {name: account(name) for name in names}
