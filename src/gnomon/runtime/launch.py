"""Starting the processes of a job: by ourselves through torch's elastic agent, or inside the user's own `torchrun`.

`launch(function, world_size, *args)` runs `function(*args)` in every process with `torch.distributed` initialised and
returns the results by rank. Under `torchrun` this process is one of them and only its own result comes back. Left out:
several machines, for which the user's torchrun is the way, and restarts.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from gnomon.errors import PlanError

Result = TypeVar("Result")


def launch(
    function: Callable[..., Result], world_size: int, *args: Any, backend: str = "gloo", threads: int = 1
) -> dict[int, Result]:
    """Results of `function(*args)` by rank. The function must be importable by name, arguments and results picklable.

    threads: of torch in each process. ^C and SIGTERM are handed on to the processes, which have half a minute to end by
    themselves (torch's agent then kills them); then SystemExit with the usual 128 + number of the signal. PlanError
    under a torchrun of another number of processes. An error in a process ends all, and comes back as torch's
    ChildFailedError with its traceback.
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
    )
    try:
        results: dict[int, Result] = elastic_launch(config, member)(function, backend, threads, *args)
    except SignalException as stopped:
        raise SystemExit(128 + stopped.sigval) from None
    return results


BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""Kind of device -> `backend`: beside GPUs, what lies on the host (flags, checkpoints' plans) still goes over gloo."""


def own_device(backend: str) -> torch.device:
    """This process's device: its place on the machine is the number of its GPU."""
    return torch.device("cuda", int(os.environ["LOCAL_RANK"])) if "nccl" in backend else torch.device("cpu")


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
