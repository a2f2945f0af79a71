"""Calibration: the seconds of this runtime's operations on this machine, by size, with their spread.

`calibrate(processes)` starts that many processes of one thread, has all of them run each operation at the same moments
(they share caches, memory and clock, as the ranks of a job do), then one of them alone, then messages and collectives
between them, in several rounds so that a disturbance falls on few repeats of each; what other processes took from a
repeat is not counted where the system says it. Returns a `Measured`. Leaves out
what becomes of it: cluster files and prices are pure (`hardware.local`, `prices.measured`).
"""

from __future__ import annotations

import gc
import math
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from gnomon.hardware import Axis, Measured, Table
from gnomon.runtime.calibrate.cases import Case, Timed, after, cases
from gnomon.runtime.calibrate.disk import Disk
from gnomon.runtime.calibrate.served import served_cases
from gnomon.runtime.mesh.collectives import all_gather, all_reduce, reduce_scatter
from gnomon.runtime.processes.launch import launch
from gnomon.runtime.watch.waiting import waited_s, waited_since

ROUNDS = 3
"""Times that every point is visited."""
REPEATS = 2
"""Fewest repeats of a point in a round, unless asked otherwise."""
MOST_REPEATS = 30
"""Most repeats of a point in a round."""
BESIDE_BYTES = 1 << 22
"""Size of the buffers of collectives that run beside products: about a layer of a small model."""
BESIDE_SIDE = 256
"""Of the square products that they run beside: well under a millisecond each."""
BYTES = (8, 1 << 12, 1 << 16, 1 << 20, 1 << 24)
"""Sizes of messages and of the buffers of collectives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How long calibration may take."""

    seconds: float
    """Of measuring; starting processes comes on top. Repeats follow from it; REPEATS are made whatever it says."""
    fine: bool = True
    """Full grids, or a few points of each."""
    rounds: int = ROUNDS
    """Times that every point is visited."""
    dtypes: tuple[str, ...] = ("fp32", "bf16", "fp64")
    """Number formats that are measured."""
    repeats: int = REPEATS
    """Fewest repeats of a point in a round, after one that is not counted."""
    alone: bool = True
    """Also what one process does with the others idle."""
    quiet: bool = True
    """No progress line."""


@dataclass(slots=True, kw_only=True)
class Times:
    """Repeats of every point of one table, on one process."""

    key: tuple[str, str, str]
    """Operation, dtype, direction."""
    axes: tuple[Axis, ...]
    """Sizes that the grid has."""
    busy: list[list[float]]
    """Seconds of the repeats, a list for each point."""
    alone_s: list[list[float]]
    """The same with other processes idle; empty lists where nobody measured."""

    @staticmethod
    def of(key: tuple[str, str, str], axes: tuple[Axis, ...]) -> Times:
        """A table of one case without repeats yet: a list for each point of its axes."""
        count = math.prod(len(axis.sizes) for axis in axes)
        return Times(key=key, axes=axes, busy=[[] for _ in range(count)], alone_s=[[] for _ in range(count)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """All that one process measured."""

    times: list[Times]
    """A table each, the same ones on every process."""
    lost_in_overlap: list[float]
    """Seconds that products lost to each second of a collective beside them, one for each repeat."""


def calibrate(processes: int, budget: Budget) -> Measured:
    """What this machine does with so many processes of one thread each. Torch's errors where they cannot start."""
    date = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    ranks = launch(measure, processes, budget)
    return assembled([ranks[rank] for rank in sorted(ranks)], processes=processes, date=date)


def assembled(ranks: Sequence[Repeats], *, processes: int, date: str) -> Measured:
    """One calibration from the repeats of all processes."""
    tables, lost_shares = list[Table](), [share for rank in ranks for share in rank.lost_in_overlap]
    for same in zip(*(rank.times for rank in ranks), strict=True):
        busy = [list(chain(*points)) for points in zip(*(times.busy for times in same), strict=True)]
        if not all(busy):
            continue  # a disk on which no file could be made
        tables.append(
            Table(
                what=same[0].key[0],
                dtype=same[0].key[1],
                direction=same[0].key[2],
                axes=same[0].axes,
                seconds=tuple(_digits(np.median(point)) for point in busy),
                alone_s=tuple(_digits(np.median(point)) for point in same[0].alone_s if point),
                spread=tuple(_digits(relative_iqr(point)) for point in busy),
            )
        )
    return Measured(
        host=platform.node() or "this machine",
        date=date,
        software=f"torch {torch.__version__.partition('+')[0]}, gloo",
        processes=processes,
        threads=1,
        tables=tuple(tables),
        lost_beside=_digits(max(float(np.median(lost_shares)), 0.0)) if lost_shares else None,
    )


def pooled(visits: Sequence[Repeats]) -> Repeats:
    """The repeats of several calls of `measure` on one process, as if of one."""
    pool = [Times.of(times.key, times.axes) for times in visits[0].times]
    for visit in visits:
        for times, rank_times in zip(pool, visit.times, strict=True):
            for at in range(len(times.busy)):
                times.busy[at] += rank_times.busy[at]
                times.alone_s[at] += rank_times.alone_s[at]
    return Repeats(times=pool, lost_in_overlap=[share for visit in visits for share in visit.lost_in_overlap])


def relative_iqr(repeats: Sequence[float]) -> float:
    """Interquartile range over median."""
    low, middle, high = np.quantile(np.asarray(repeats), [0.25, 0.5, 0.75])
    return float((high - low) / middle)


def _digits(value: float) -> float:
    """Four digits are more than a clock gives, and few enough to read."""
    return float(f"{value:.4g}")


# --- in every process


def _of_all_ranks(own: Sequence[Case]) -> list[Case]:
    """Cases that every process has a kernel for: all of them run the same ones, or some would wait for ever."""
    everyone: list[set[tuple[str, str]]] = [set()] * dist.get_world_size()
    dist.all_gather_object(everyone, {(case.what, case.dtype) for case in own})
    shared = set.intersection(*everyone)
    return [case for case in own if (case.what, case.dtype) in shared]


def measure(budget: Budget) -> Repeats:
    """Measures every case and returns this process's repeats. All processes of the job must call it."""
    listed = [*cases(budget.dtypes, fine=budget.fine), *_of_all_ranks(served_cases(fine=budget.fine))]
    tables = [Times.of((c.what, c.dtype, c.direction), c.axes) for c in listed]
    points = [(t, c, at) for t, c in zip(tables, listed, strict=True) for at in enumerate(c.points())]
    modes = 2 if budget.alone and dist.get_world_size() > 1 else 1
    # The other fifth is for messages and collectives (`Talk`).
    share = 0.8 * budget.seconds / (len(points) * budget.rounds * modes)
    talk, disk = Talk(budget), Disk(fine=budget.fine)
    progress = _Progress(budget.rounds * len(points), shown=not budget.quiet and dist.get_rank() == 0)
    gc.disable()
    began = perf_counter()
    for done in range(budget.rounds):
        if done and _time_is_up((perf_counter() - began) * (done + 1) / done > 1.2 * budget.seconds):
            break
        for times, case, (number, point) in points:
            _visit(times, number, case.make(point), share, budget)
            progress.step()
        talk.round()
        if dist.get_rank() == 0:
            disk.round()
    gc.enable()
    progress.end()
    return Repeats(times=tables + talk.times + _disk_times(disk), lost_in_overlap=talk.lost_beside)


def _disk_times(disk: Disk) -> list[Times]:
    """Two tables, without repeats on processes that did not measure."""
    columns = {"disk_read": disk.read, "disk_write": disk.write}
    return [
        Times(key=(what, "", ""), axes=(disk.axis,), busy=busy, alone_s=[[] for _ in busy])
        for what, busy in columns.items()
    ]


def _time_is_up(mine: bool) -> bool:
    """Whether another round would take too long: on a slow or busy machine one must do. All processes agree."""
    if dist.get_world_size() == 1:
        return mine
    flag = torch.tensor(int(mine))
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


def _visit(times: Times, number: int, ready: Timed, share: float, budget: Budget) -> None:
    """One visit of a point: all processes at once, then the first alone; a process without others is alone."""
    if dist.get_world_size() == 1:
        times.busy[number] += repeated(ready, share, budget.repeats, own=True)
        return
    dist.barrier()
    times.busy[number] += repeated(ready, share, budget.repeats, own=True)
    if budget.alone:
        dist.barrier()
        if dist.get_rank() == 0:
            times.alone_s[number] += repeated(ready, share, budget.repeats, own=True)


def repeated(ready: Timed, share: float, least: int, *, own: bool = False) -> list[float]:
    """Seconds of each repeat of what is timed, for about `share` seconds in all.

    own: without what this thread waited for a core that other processes had, where the system says it: the machine's
    own speed, whatever else it does meanwhile.
    """
    prepare, run = ready
    run(prepare())
    times: list[float] = []
    end = perf_counter() + share
    while len(times) < least or (perf_counter() < end and len(times) < MOST_REPEATS):
        prepared = prepare()
        before = waited_s() if own else None
        begin = perf_counter()
        run(prepared)
        elapsed_s = perf_counter() - begin
        waited = waited_since(before)
        times.append(
            elapsed_s - waited if waited < elapsed_s else elapsed_s
        )  # NaN, or a wait between the two clocks: as it is
    return times


class Talk:
    """Messages and collectives between the processes: in groups of every size that divides them."""

    def __init__(self, budget: Budget) -> None:
        world, self.times, self.lost_beside = dist.get_world_size(), list[Times](), list[float]()
        self.share = 0.2 * budget.seconds / budget.rounds
        sizes = BYTES if budget.fine else BYTES[:4:3]
        self.bytes = Axis(name="bytes", sizes=sizes)
        counts = tuple(n for n in range(2, world + 1) if world % n == 0)
        self.groups = {n: _group(n) for n in counts}
        if not counts:
            return
        for kind in ("all_reduce", "all_gather", "reduce_scatter"):
            self.times.append(Times.of((kind, "", ""), (Axis(name="ranks", sizes=counts), self.bytes)))
        self.times.append(Times.of(("send_recv", "", ""), (self.bytes,)))

    def round(self) -> None:
        """One visit of every point."""
        for times in self.times:
            counts = times.axes[0].sizes if times.key[0] != "send_recv" else (2,)
            for at, (ranks, size) in enumerate((r, s) for r in counts for s in self.bytes.sizes):
                times.busy[at] += self._repeats(times.key[0], self.groups[ranks], size)
        if self.times:
            for kind in ("all_gather", "reduce_scatter"):
                self.lost_beside += _lost_in_overlap(kind, self.groups[dist.get_world_size()])

    def _repeats(self, kind: str, group: ProcessGroup, size: int) -> list[float]:
        """Seconds of repeated collectives of one size, equally many on every process; larger sizes are repeated
        less."""
        buffer, run = _talk(kind, group, size)
        run()
        times = []
        dist.barrier(group=group)
        for _ in range(REPEATS if size > 1 << 22 else 3 * REPEATS if size > 1 << 18 else 6 * REPEATS):
            after(buffer)  # the ranks do not meet here either: one that comes late is waited for, as in a job
            begin = perf_counter()
            run()
            # There and back are two messages.
            times.append((perf_counter() - begin) / (2 if kind == "send_recv" else 1))
        return times


def _group(ranks: int) -> ProcessGroup:
    """The group of neighbours that this process is in, all groups having so many."""
    mine, world = dist.get_rank() // ranks, dist.get_world_size()
    groups = [dist.new_group(list(range(first, first + ranks))) for first in range(0, world, ranks)]
    group = groups[mine]
    assert isinstance(group, ProcessGroup)
    return group


def _lost_in_overlap(kind: str, group: ProcessGroup) -> list[float]:
    """Seconds that products lose to each second of a collective that runs meanwhile, as all processes do both: 1 where
    the collective takes the only core from them, 0 where it has one of its own."""
    buffer, run = _talk(kind, group, BESIDE_BYTES)
    x = torch.full((BESIDE_SIDE, BESIDE_SIDE), 0.5)

    def seconds(num_matmuls: int, start: Callable[[], Work | None]) -> float:
        after(buffer)
        dist.barrier(group=group)
        begin = perf_counter()
        work = start()
        for _ in range(num_matmuls):
            x @ x
        if work is not None:
            work.wait()
        return perf_counter() - begin

    lasts = []
    for _ in range(3 * REPEATS):
        talking = seconds(0, lambda: run(wait=False))
        one = seconds(20, lambda: None) / 20
        # Twice as long as the collective takes alone, so that all of it runs beside products.
        count = 1 + int(2.0 * talking / one)
        alone_s, both = seconds(count, lambda: None), seconds(count, lambda: run(wait=False))
        lasts.append((both - alone_s) / talking)
    return lasts


def _talk(kind: str, group: ProcessGroup, size: int) -> tuple[Tensor, Callable[..., Any]]:
    """(what is sent, one collective of `size` bytes, which takes `wait`, or a message there and one back)."""
    ranks, me = dist.get_world_size(group), dist.get_rank(group)
    whole = torch.full((max(ranks, size // 4),), 0.5)
    part = torch.full((whole.numel() // ranks,), 0.5)
    # A multiple of the ranks, as equal parts need.
    whole = whole[: part.numel() * ranks]
    if kind == "all_reduce":
        return whole, lambda wait=True: all_reduce(whole, group, wait=wait)
    if kind == "all_gather":
        return part, lambda wait=True: all_gather(whole, part, group, wait=wait)
    if kind == "reduce_scatter":
        return whole, lambda wait=True: reduce_scatter(part, whole, group, wait=wait)
    if me > 1:
        return whole, lambda: None
    other = dist.get_global_rank(group, 1 - me)

    def there_and_back() -> None:
        for sender in (0, 1):
            if me == sender:
                dist.send(whole, other, group=group)
            else:
                dist.recv(whole, other, group=group)

    return whole, there_and_back


class _Progress:
    """A line on standard error: on a terminal rewritten, elsewhere every ten seconds."""

    def __init__(self, total: int, *, shown: bool) -> None:
        self.total, self.done, self.shown = total, 0, shown
        self.terminal = sys.stderr.isatty()
        self.began = self.printed_at = perf_counter()

    def step(self) -> None:
        """One more point was visited."""
        self.done += 1
        now = perf_counter()
        if not self.shown or now - self.printed_at < (0.2 if self.terminal else 10.0):
            return
        self.printed_at = now
        remaining_s = (now - self.began) * (self.total / self.done - 1)
        text = f"measuring {100 * self.done // self.total} %, {remaining_s:.0f} s left"
        print(f"\r{text}  " if self.terminal else text, end="" if self.terminal else "\n", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Wipes the line of progress."""
        if self.shown and self.terminal:
            print(f"\r{' ' * 40}\r", end="", file=sys.stderr, flush=True)


def memory_bytes() -> int:
    """Memory that this machine's processes may use together: what it has, or less where a control group says so."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:
            limit = file.read().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def physical_cores() -> int:
    """Cores that this process may use, threads of one core counted once."""
    try:
        allowed = os.sched_getaffinity(0)
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1
    cores = set()
    for number in allowed:
        try:
            path = f"/sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list"
            with open(path, encoding="ascii") as file:
                cores.add(file.read().strip())
        except OSError:
            cores.add(str(number))
    return max(1, len(cores))
