"""Ranks for tests: `launch` as `gnomon.runtime.processes.launch`, with processes forked from one that has loaded torch.

Loading torch takes a process seconds; here it is loaded once in each process that runs tests. The program's own
`launch`, its signals and torchrun are tested by `test_run` and `test_watchdog`.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Sequence
from multiprocessing import forkserver, get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from traceback import format_exc
from typing import Any, TypeVar
from unittest.mock import patch

import torch.distributed as dist

from gnomon.runtime.processes.launch import member

Result = TypeVar("Result")

LIMIT_S = 1200.0
"""A job that takes longer hangs: this machine may be very busy."""

LOADED = ["torch", "torch.distributed", "gnomon.runtime"]
"""What the process is given that ranks are forked from, besides what `conftest` gives it."""


def context() -> ForkServerContext:
    """Where processes that have torch come from."""
    result = get_context("forkserver")
    result.set_forkserver_preload(LOADED)
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(path for path in sys.path if path)):
        forkserver.ensure_running()
    return result


def launch(
    function: Callable[..., Result],
    world_size: int,
    *args: Any,
    backend: str = "gloo",
    threads: int = 1,
    places: Sequence[int] = (),
) -> dict[int, Result]:
    """Results of `function(*args)` by the number of the process, which is its rank but for `places`. AssertionError
    with the traceback of a process that fails."""
    store = dist.TCPStore("localhost", 0, None, True, wait_for_workers=False)
    made, pipes = context(), dict[Connection, int]()
    processes = []
    for rank in range(world_size):
        ours, theirs = made.Pipe()
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
        here = {"MASTER_ADDR": "localhost", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
        environment = dict(os.environ) | {name: str(value) for name, value in (place | here).items()}
        process = made.Process(
            target=_rank, args=(theirs, environment, function, backend, threads, args, places), daemon=True
        )
        process.start()
        theirs.close()
        pipes[ours] = rank
        processes.append(process)
    try:
        return _gathered(pipes)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _gathered(pipes: dict[Connection, int]) -> dict[int, Any]:
    """The results of all ranks."""
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        ready = wait([pipe for pipe, rank in pipes.items() if rank not in results], LIMIT_S)
        assert ready, f"no rank of {len(pipes)} has ended in {LIMIT_S:.0f} s; there are results of {sorted(results)}"
        for pipe in ready:
            assert isinstance(pipe, Connection)
            try:
                ended, result = pipe.recv()
            except EOFError:
                ended, result = False, "the process died"
            assert ended, f"rank {pipes[pipe]}: {result}"
            results[pipes[pipe]] = pickle.loads(result)
    return {rank: results[rank] for rank in sorted(results)}


def _rank(
    pipe: Connection,
    environment: dict[str, str],
    function: Callable[..., Any],
    backend: str,
    threads: int,
    args: tuple[Any, ...],
    places: Sequence[int],
) -> None:
    """One process."""
    os.environ.clear()
    os.environ.update(environment)
    try:
        result = member(function, backend, threads, *args, places=places)
        pipe.send((True, pickle.dumps(result)))  # as bytes: torch's own way leaves tensors with the sender, which ends
    except Exception:
        pipe.send((False, format_exc()))
