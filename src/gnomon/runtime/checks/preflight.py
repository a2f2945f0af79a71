"""Before a run: what every rank has (software, memory, disk, speed) and how fast its links are, beside the prediction.

`reports(world_size, folder, device)` starts the ranks, each of which looks for a few seconds (`look`); `judge(...)` is
pure: what would end the run (problems), and which rank or link is slower than the others (warnings). Leaves out the job
itself.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from gnomon.runtime.processes.launch import BACKENDS, launch
from gnomon.units import show_bytes

SIZES = (8, 1 << 20, 16 << 20)
"""Bytes of the all-reduces that are timed."""
MESSAGE_BYTES = 1 << 20
"""Of a message between two ranks."""
REPEATS = 5
SLOW = 1.5
"""Times the median of all ranks, from which on one is called slow."""
SLOW_LINK = 2.0
"""The same of links, whose times spread more."""
COPIES = 2
"""Checkpoints that must fit on the disk at once: the one before, and the one being written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one rank finds on its machine before training."""

    rank: int
    """The rank."""
    host: str
    """Name of its machine."""
    software: str
    """Python and torch."""
    device: str
    """What it trains on."""
    free_bytes: int
    """Memory that is free on its host, or on its GPU."""
    disk_bytes: int
    """Free where checkpoints go."""
    busy_s: float
    """A product of 512 x 512 matrices."""
    all_reduce_s: tuple[float, ...]
    """Over all ranks, by SIZES."""
    link_s: float
    """A message of MESSAGE_BYTES to the next rank and back, halved; 0 for a rank alone."""


def sizes() -> tuple[tuple[int, ...], int]:
    """(bytes of the all-reduces that are timed, bytes of a message)."""
    return SIZES, MESSAGE_BYTES


def reports(world_size: int, folder: str, device: str) -> list[Report]:
    """Gathers reports of all ranks, started here or by the torchrun that this process is in. device: `cpu` or
    `cuda`."""
    by_rank = launch(look, world_size, folder, device == "cuda", backend=BACKENDS[device])
    return next(iter(by_rank.values()))


def look(folder: str, cuda: bool) -> list[Report]:
    """Looks at this rank's machine and gathers the reports of all ranks; all must call it."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, _own(folder, cuda))
    return everyone


def _own(folder: str, cuda: bool) -> Report:
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    a = torch.ones(512, 512, device=device)

    def multiply() -> None:
        a @ a
        if cuda:
            torch.cuda.synchronize()

    reduces = [torch.zeros(max(1, nbytes // 4), device=device) for nbytes in SIZES]
    return Report(
        rank=rank,
        host=socket.gethostname(),
        software=f"Python {platform.python_version()}, torch {torch.__version__}",
        device=torch.cuda.get_device_name(device) if cuda else platform.machine(),
        free_bytes=_free_bytes(cuda),
        disk_bytes=_disk_bytes(Path(folder)),
        busy_s=_repeated(multiply, 4 * REPEATS),
        all_reduce_s=tuple(_repeated(partial(dist.all_reduce, tensor), REPEATS) for tensor in reduces),
        link_s=_links(rank, size, device),
    )


def _repeated(act: Callable[[], object], times: int) -> float:
    """Median seconds, after one that does not count; all ranks begin together."""
    act()
    seconds = []
    for _ in range(times):
        dist.barrier()
        began = perf_counter()
        act()
        seconds.append(perf_counter() - began)
    return median(seconds)


def _links(rank: int, size: int, device: torch.device) -> float:
    """Seconds of a message to the next rank; one pair at a time, so that none is in another's way."""
    message, fastest_s = torch.zeros(MESSAGE_BYTES // 4, device=device), 0.0
    # A ring of two has one link.
    for first in range(size if size > 2 else size - 1):
        second = (first + 1) % size
        for turn in range(REPEATS + 1):
            dist.barrier()
            began = perf_counter()
            if rank == first:
                dist.send(message, second)
                dist.recv(message, second)
                took_s = (perf_counter() - began) / 2
                # The first turn does not count: the second one writes over it.
                fastest_s = took_s if turn == 1 or not fastest_s else min(fastest_s, took_s)
            elif rank == second:
                dist.recv(message, first)
                dist.send(message, first)
    return fastest_s


def _free_bytes(cuda: bool) -> int:
    if cuda:
        return torch.cuda.mem_get_info()[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _disk_bytes(folder: Path) -> int:
    """Free on the disk of the nearest folder that is there."""
    there = next(path for path in (folder.resolve(), *folder.resolve().parents) if path.exists())
    return shutil.disk_usage(there).free


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a look found."""

    problems: tuple[str, ...]
    """What would end the run."""
    warnings: tuple[str, ...]
    """What would slow it down."""


def judge(
    reports: Sequence[Report], *, peak_bytes: Mapping[int, int], checkpoint_bytes: int, folder: str, shared: bool
) -> Verdict:
    """Judges whether the job can start, from all ranks' reports. peak_bytes: predicted, by rank. shared: whether ranks
    of a host share its memory, as on CPUs."""
    problems, warnings = list[str](), list[str]()
    # The most frequent; those that differ from it are named, as it takes fewer repairs.
    usual = max({one.software for one in reports}, key=[one.software for one in reports].count)
    for one in reports:
        if one.software != usual:
            problems.append(
                f"rank {one.rank} on {one.host} has {one.software}, and others have {usual}: make them alike"
            )
    by_place: dict[tuple[str, int], list[Report]] = {}
    for one in reports:
        # Ranks that share a memory need it together; a GPU has its own.
        by_place.setdefault((one.host, 0 if shared else one.rank), []).append(one)
    for (host, _), ranks in by_place.items():
        needed, free = sum(peak_bytes[one.rank] for one in ranks), min(one.free_bytes for one in ranks)
        if needed > free:
            problems.append(
                f"{_named(ranks)} on {host} need {show_bytes(needed)} and {show_bytes(free)} are free: end what holds "
                f"memory there, recompute more, or shard more"
            )
    least = min(reports, key=lambda one: one.disk_bytes)
    if least.disk_bytes < COPIES * checkpoint_bytes:
        problems.append(
            f"{COPIES} checkpoints are {show_bytes(COPIES * checkpoint_bytes)}, and {folder} of {least.host} has "
            f"{show_bytes(least.disk_bytes)} free: make room, or give another --checkpoints"
        )
    busy = median(one.busy_s for one in reports)
    for one in reports:
        if one.busy_s > SLOW * busy:
            warnings.append(
                f"rank {one.rank} on {one.host} computes {one.busy_s / busy:.1f} times slower than the median of all: "
                f"every step waits for it"
            )
    links = [one for one in reports if one.link_s]
    usual_s = median(one.link_s for one in links) if links else 0.0
    for one in links:
        if one.link_s > SLOW_LINK * usual_s:
            warnings.append(
                f"the link from rank {one.rank} on {one.host} to rank {(one.rank + 1) % len(reports)} takes "
                f"{one.link_s / usual_s:.1f} times as long as the median of all"
            )
    return Verdict(problems=tuple(problems), warnings=tuple(warnings))


def _named(ranks: Sequence[Report]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(str(one.rank) for one in ranks)}"
