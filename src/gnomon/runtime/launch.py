"""Starting the processes of a job: by ourselves through torch's elastic agent, or inside the user's own `torchrun`.

`launch(function, world_size, *args)` runs `function(*args)` in every process with `torch.distributed` initialised and
returns the results by rank. Under `torchrun` this process is one of them and only its own result comes back. Left out:
several machines, for which the user's torchrun is the way, and restarts.
"""

from __future__ import annotations

import os
import signal
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from gnomon import orders
from gnomon.errors import PlanError

Result = TypeVar("Result")


GRACE_S = 300
"""Between a signal and the end of processes that do not end by themselves: a step and a checkpoint must fit in it."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""What people and schedulers end a job with."""


def launch(
    function: Callable[..., Result],
    world_size: int,
    *args: Any,
    backend: str = "gloo",
    threads: int = 1,
    ends_itself: bool = False,
) -> dict[int, Result]:
    """Results of `function(*args)` by rank. The function must be importable by name, arguments and results picklable.

    threads: of torch in each process. ^C and SIGTERM are handed on to the processes, which have GRACE_S to end by
    themselves (torch's agent then kills them); then SystemExit with the usual 128 + number of the signal.
    ends_itself: the function handles them, and unblocks them when it can; until then they wait, so that no process ends
    while others count on it. Otherwise they end a process at once. PlanError under a torchrun of another number of
    processes. An error in a process ends all, and comes back as torch's ChildFailedError with its traceback.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        given = int(os.environ["WORLD_SIZE"])
        if given != world_size:
            raise PlanError(f"the plan has {world_size} ranks, but torchrun started {given}; use --nproc-per-node")
        return {int(os.environ["RANK"]): member(function, backend, threads, *args)}
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world_size,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="spawn",
        **_grace(),
    )
    try:
        with _signals_wait_for_children():
            results: dict[int, Result] = elastic_launch(config, _started)(
                ends_itself, orders.added(), function, backend, threads, *args
            )
    except SignalException as stopped:
        raise SystemExit(128 + stopped.sigval) from None
    return results


def _grace() -> dict[str, Any]:
    """How long processes may take to end; torch before 2.12 does not ask."""
    known = {field.name for field in fields(LaunchConfig)}
    given = None if "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" in os.environ else GRACE_S
    return {"shutdown_timeout": given} if "shutdown_timeout" in known else {}


BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""Kind of device -> `backend`: beside GPUs, what lies on the host (flags, checkpoints' plans) still goes over gloo."""


def own_device(backend: str) -> torch.device:
    """This process's device: its place on the machine is the number of its GPU, 0 where no launcher says it."""
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if "nccl" in backend else torch.device("cpu")


@contextmanager
def _signals_wait_for_children() -> Iterator[None]:
    """Processes started meanwhile find signals blocked: one that comes while they load torch waits until they can act.

    A process inherits the mask of the thread that starts it, which is this one. So that this process still takes
    signals, another thread of it does; Python then calls the handler in the main thread, as always.
    """
    resource_tracker.ensure_running()  # when it starts, it unblocks these signals in the thread that started it
    over = threading.Event()
    threading.Thread(target=over.wait, daemon=True).start()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        over.set()


def _started(
    ends_itself: bool,
    schedules: Sequence[Path],
    function: Callable[..., Result],
    backend: str,
    threads: int,
    *args: Any,
) -> Result:
    """`member` in a process that was started here: signals end it without a word, or wait for the function. schedules:
    files of orders that the starting process has added."""
    for path in schedules:
        orders.add(path)
    for number in SIGNALS:
        signal.signal(number, lambda number, frame: os._exit(128 + number))
    if not ends_itself:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    return member(function, backend, threads, *args)


def member(function: Callable[..., Result], backend: str, threads: int, *args: Any) -> Result:
    """One process of the job, from joining it to leaving it."""
    torch.set_num_threads(threads)
    if "nccl" in backend:
        torch.cuda.set_device(own_device(backend))
        # with a device, groups connect when they are made, in the same order everywhere; otherwise when first used,
        # which is another order on every pipeline rank
        dist.init_process_group(backend, device_id=own_device(backend))
    else:
        dist.init_process_group(backend)
    try:
        return function(*args)
    finally:
        dist.destroy_process_group()
