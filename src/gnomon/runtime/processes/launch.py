"""Starting the processes of a job: here (`local`), or inside the user's own `torchrun`.

`launch(function, world_size, *args)` runs `function(*args)` in every process with `torch.distributed` initialised and
returns the results by rank. Under `torchrun` this process is one of them and only its own result comes back. Left out:
several machines, for which the user's torchrun is the way, and starting again after a failure (`launch.run`).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from gnomon import orders
from gnomon.errors import PeerError, PlanError
from gnomon.runtime.processes.faults import plain
from gnomon.runtime.processes.local import GRACE_S, SIGNALS, FailedError, Processes

Result = TypeVar("Result")


def launch(
    function: Callable[..., Result],
    world_size: int,
    *args: Any,
    backend: str = "gloo",
    threads: int = 1,
    ends_itself: bool = False,
    grace_s: float = GRACE_S,
    start_method: str | None = None,
    preload: Sequence[str] = (),
    places: Sequence[int] = (),
) -> dict[int, Result]:
    """Results of `function(*args)` by rank. The function must be importable by name, arguments and results picklable.

    threads: of torch in each process. ^C and SIGTERM are handed on to the processes, which have `grace_s` to end by
    themselves; then SystemExit with the usual 128 + number of the signal.
    ends_itself: the function handles them, and unblocks them when it can; until then they wait, so that no process ends
    while others count on it. Otherwise they end a process at once. PlanError under a torchrun of another number of
    processes. An error of ours in a process ends all and is raised here; anything else is a FailedError.
    start_method: of `multiprocessing`. None: `forkserver`, which loads torch once for all processes and all later jobs
    of this one; `spawn` for CUDA. preload: modules that it loads besides, when this job is the first. places: process,
    which is the number of its device, of each rank (`Plan.device_of`); left out, the rank's own number.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        world = int(os.environ["WORLD_SIZE"])
        if world != world_size:
            raise PlanError(f"the plan has {world_size} ranks, but torchrun started {world}; use --nproc-per-node")
        number = int(os.environ["RANK"])
        return {rank_at(number, places): member(function, backend, threads, *args, places=places)}
    started = Processes(
        _started,
        world_size,
        (ends_itself, orders.added(), tuple(places), function, backend, threads, *args),
        start_method=start_method or ("spawn" if "nccl" in backend else "forkserver"),
        preload=preload,
        grace_s=grace_s,
    )
    try:
        return {rank_at(number, places): result for number, result in started.results().items()}
    except FailedError as failed:
        error = failed.failures[0].error
        if error is None or error is PeerError:
            raise
        raise error(failed.failures[0].message) from failed


BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""Kind of device -> `backend`: beside GPUs, what lies on the host (flags, checkpoints' plans) still goes over gloo."""


def rank_at(number: int, places: Sequence[int]) -> int:
    """The rank of a process, by its number."""
    return list(places).index(number) if places else number


def check_place(places: Sequence[int]) -> None:
    """PlanError where this process has another number than its rank has a place. places: as in `launch`; in the order
    of ranks, or not a process each, they are nobody's to check."""
    in_order = [*range(len(places))]
    if [*places] == in_order or sorted(places) != in_order or dist.get_world_size() != len(places):
        return
    rank = dist.get_rank()
    number = int(os.environ.get("RANK", rank))
    if places[rank] != number:
        raise PlanError(
            f"placement gives rank {rank} device {places[rank]}, and its process is number {number}; gnomon run and "
            f"gnomon.prepare place ranks, for a run without logical workers, spare copies or replacements"
        )


def own_device(backend: str) -> torch.device:
    """The device of this process: its place on the machine is the number of its GPU, 0 where no launcher says it."""
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if "nccl" in backend else torch.device("cpu")


def _started(
    store: Store,
    rank: int,
    world_size: int,
    ends_itself: bool,
    schedules: Sequence[Path],
    places: Sequence[int],
    function: Callable[..., Result],
    backend: str,
    threads: int,
    *args: Any,
) -> Result:
    """`member` in a process that was started here: signals end it without a word, or wait for the function. schedules:
    files of orders that the starting process has added. rank, places: its number, and of each rank that."""
    # A process that is started anew has the built-in orders only; a plan may name one that its starter has added.
    for path in schedules:
        orders.add(path)
    for number in SIGNALS:
        signal.signal(number, lambda number, frame: os._exit(128 + number))
    if not ends_itself:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    return member(function, backend, threads, *args, store=store, rank=rank, world_size=world_size, places=places)


def member(
    function: Callable[..., Result],
    backend: str,
    threads: int,
    *args: Any,
    store: Store | None = None,
    rank: int = -1,
    world_size: int = -1,
    places: Sequence[int] = (),
) -> Result:
    """One process of the job, from joining it to leaving it. store: where it meets the others, with its number; None:
    what torchrun says. places: as in `launch`."""
    torch.set_num_threads(threads)
    device = None
    if "nccl" in backend:
        device = own_device(backend)
        torch.cuda.set_device(device)
        # with a device, groups connect when they are made, in the same order everywhere; otherwise when first used,
        # which is another order on every pipeline rank
    if store is None:
        meet_by_torchrun(backend, device, places)
    else:
        here = rank_at(rank, places)
        dist.init_process_group(backend, store=store, rank=here, world_size=world_size, device_id=device)
    try:
        result = function(*args)
    except BaseException:
        if store is None:
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()
    return result


def meet_by_torchrun(backend: str, device: torch.device | None = None, places: Sequence[int] = ()) -> None:
    """`init_process_group` among the processes that torchrun started. device: of NCCL. places: as in `launch`.

    torchrun keeps its store over a restart, so the addresses of the processes before are still in it: each start has
    keys of its own. PeerError where another process is gone before all have met.
    """
    rank, world_size = rank_at(int(os.environ["RANK"]), places), int(os.environ["WORLD_SIZE"])
    try:
        store, _, _ = next(rendezvous("env://"))
        started = PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        dist.init_process_group(backend, store=started, rank=rank, world_size=world_size, device_id=device)
    except RuntimeError as error:
        raise plain(error, rank, "at the start") from error
