"""Reads a Chrome trace as `torch.profiler.profile(...).export_chrome_trace` and tensorboard's handler write it.

`read_trace(path)` returns one rank's `Trace`; `read_traces(path)` all ranks of a folder, by rank. Plain and gzipped
JSON, an object with `traceEvents` or a bare list of events; times in microseconds, as the format has them. Categories
of older and newer versions of Kineto are one (`Kernel` is `kernel`), and those of ROCm, XPU and MTIA lie with CUDA's.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gnomon.errors import InputError
from gnomon.profile.trace import (
    COPY,
    CPU_OP,
    DEVICE_MARK,
    KERNEL,
    LAUNCH,
    MARK,
    NONE,
    PYTHON,
    SET,
    Allocations,
    Lane,
    Trace,
)
from gnomon.units import quantise

_CATEGORIES: Mapping[str, int] = {
    "cpu_op": CPU_OP,
    "operator": CPU_OP,
    "cuda_runtime": LAUNCH,
    "cuda_driver": LAUNCH,
    "runtime": LAUNCH,
    "xpu_runtime": LAUNCH,
    "xpu_driver": LAUNCH,
    "mtia_runtime": LAUNCH,
    "privateuse1_runtime": LAUNCH,
    "privateuse1_driver": LAUNCH,
    "glow_runtime": LAUNCH,
    "user_annotation": MARK,
    "kernel": KERNEL,
    "mtia_ccp_events": KERNEL,
    "gpu_memcpy": COPY,
    "memcpy": COPY,
    "gpu_memset": SET,
    "memset": SET,
    "gpu_user_annotation": DEVICE_MARK,
    "python_function": PYTHON,
}
"""Kineto's category, in lower case -> ours."""

_IGNORED = frozenset({"trace", "overhead", "cuda_sync", "cuda_profiler_range", "ac2g", "fwdbwd", "async_cpu_to_gpu"})
"""Marks of the recording itself, waits of streams that the launches repeat, and arrows."""

_KEPT = (
    "Input Dims",
    "Input type",
    "Collective name",
    "In msg nelems",
    "Out msg nelems",
    "Group size",
    "dtype",
    "Process Group Name",
    "Process Group Description",
    "Process Group Ranks",
    "bytes",
    "size",
)
"""What is kept of an event's `args`."""

_US = 1e-6
_LARGEST_BYTES = 8 * 2**30
"""Of JSON; more does not fit a laptop's memory as objects. A few steps are enough (`torch.profiler.schedule`)."""


def is_trace(path: str) -> bool:
    """Whether it is named as a trace of torch.profiler is (`.json`, `.json.gz`) and does not begin as text of ours; of
    a folder: whether a file in it is."""
    where = Path(path)
    if where.is_dir():
        return any(True for _ in _files(where))
    return where.name.lower().endswith((".json", ".json.gz")) and not _begins(where).startswith(b"gnomon.")


def _begins(path: Path) -> bytes:
    try:
        return _bytes(path, 64).lstrip(b"\xef\xbb\xbf \t\r\n")
    except InputError:
        return b""


def read_traces(path: str) -> tuple[Trace, ...]:
    """The traces in a file or a folder, by rank. InputError if there is none, or two are of one rank."""
    where = Path(path)
    files = sorted(_files(where)) if where.is_dir() else [where]
    if not files:
        raise InputError(f"{path!r} has no trace: files that end in .json or .json.gz and hold `traceEvents`")
    traces = sorted((read_trace(str(file)) for file in files), key=lambda trace: trace.rank)
    for one, two in zip(traces, traces[1:], strict=False):
        if one.rank == two.rank:
            raise InputError(
                f"{one.source!r} and {two.source!r} are both of rank {one.rank}: give one of them, or a folder with "
                f"one recording of one job, a file a rank (a schedule of torch.profiler without repeat=1 records "
                f"again and again)"
            )
    return tuple(traces)


def _files(folder: Path) -> Iterator[Path]:
    for file in folder.iterdir():
        if file.is_file() and is_trace(str(file)):
            yield file


def _bytes(path: Path, limit: int) -> bytes:
    """The first bytes of a file, unpacked. InputError with the reason."""
    try:
        with path.open("rb") as file:
            # gzip's magic number: names do not always say it.
            packed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else path.open("rb") as file:
            return file.read(limit)
    except EOFError:
        raise InputError(f"cannot read {str(path)!r}: the gzip file ends early; export or copy it again") from None
    except (OSError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"cannot read {str(path)!r}: {reason}") from error


def read_trace(path: str) -> Trace:
    """Reads one rank's trace. InputError if it cannot be read or holds no events."""
    data = _bytes(Path(path), _LARGEST_BYTES)
    # Exactly the limit was read: there is more.
    if len(data) == _LARGEST_BYTES:
        raise InputError(
            f"{path!r} holds more than {_LARGEST_BYTES >> 30} GiB of JSON; record fewer steps: "
            f"torch.profiler.schedule(wait=1, warmup=1, active=3)"
        )
    try:
        # Names of kernels may hold bytes that are no UTF-8; control characters stand raw in some of Kineto's strings.
        whole = json.loads(data.decode("utf-8", "replace"), strict=False)
    except (ValueError, RecursionError) as error:
        raise InputError(f"cannot read {path!r} as a trace: {error}; was the job stopped while it wrote?") from error
    del data
    events = whole.get("traceEvents") if isinstance(whole, dict) else whole
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise InputError(
            f"{path!r} is no trace: it has no list `traceEvents`; see torch.profiler's export_chrome_trace"
        )
    return trace_of_events(path, whole if isinstance(whole, dict) else {}, events)


def trace_of_events(path: str, document: Mapping[str, Any], events: list[dict[str, Any]]) -> Trace:
    """The trace of events as Kineto writes them. document: what stands beside `traceEvents`. InputError without any."""
    return _Reading(path, document, events).trace()


class _Reading:
    """The state of reading: events become columns."""

    def __init__(self, path: str, header: Mapping[str, Any], events: list[dict[str, Any]]) -> None:
        self.path, self.header, self.events = path, header, events
        self.dropped = 0

    def trace(self) -> Trace:
        """The columns, by start."""
        lane_names: dict[tuple[str, str], str] = {}
        process_names: dict[str, str] = {}
        lanes: dict[tuple[str, str], int] = {}
        names: dict[str, int] = {}
        rows: list[tuple[int, int, int, float, float, int, int]] = []
        details: list[Mapping[str, Any] | None] = []
        memory: list[tuple[float, float, float, bool]] = []
        for event in self.events:
            phase = event.get("ph")
            if phase == "X":
                category = self._category(event)
                if category is None:
                    continue
                start, duration = _number(event.get("ts")), _number(event.get("dur", 0))
                if start is None or duration is None or duration < 0:
                    self.dropped += 1
                    continue
                args = event.get("args")
                args = args if isinstance(args, dict) else {}
                lane = lanes.setdefault((str(event.get("pid")), str(event.get("tid"))), len(lanes))
                # Columns of numbers: a trace has millions of events and thousands of names.
                name = names.setdefault(str(event.get("name", "")), len(names))
                ties = _whole(args.get("correlation")), _whole(args.get("External id"))
                rows.append((category, name, lane, start, duration, *ties))
                details.append({key: args[key] for key in _KEPT if key in args} or None)
            elif phase == "M":
                named = event.get("args")
                text = str(named.get("name", "")) if isinstance(named, dict) else ""
                if event.get("name") == "thread_name":
                    lane_names[str(event.get("pid")), str(event.get("tid"))] = text
                elif event.get("name") == "process_name":
                    process_names[str(event.get("pid"))] = text
            elif phase == "i" and event.get("name") == "[memory]":
                row = _allocation(event)
                if row is not None:
                    memory.append(row)
        if not rows:
            raise InputError(
                f"{self.path!r} holds no op and no kernel; record with torch.profiler.profile(activities=[CPU, CUDA])"
            )
        return self._columns(rows, details, memory, names, [(*key, lane_names.get(key, "")) for key in lanes])

    def _columns(
        self,
        rows: list[tuple[int, int, int, float, float, int, int]],
        details: list[Mapping[str, Any] | None],
        memory: list[tuple[float, float, float, bool]],
        names: Mapping[str, int],
        lanes: list[tuple[str, str, str]],
    ) -> Trace:
        table = list(zip(*rows, strict=True))
        starts = np.array(table[3], np.float64)
        # Stable: events that start together keep their nesting, the outer first.
        order = np.argsort(starts, kind="stable")
        first = float(starts.min())
        moved = {int(old): new for new, old in enumerate(order.tolist()) if details[old] is not None}
        # Starts and ends go onto the grid of time, so that unions and differences of intervals are exact.
        start_s = quantise((starts[order] - first) * _US)
        distributed = self.header.get("distributedInfo")
        distributed = distributed if isinstance(distributed, dict) else {}
        rank = _whole(distributed.get("rank"))
        return Trace(
            source=self.path,
            rank=_rank_of(self.path) if rank == NONE else rank,
            world_size=max(1, _whole(distributed.get("world_size"))),
            device=self._device(),
            lanes=tuple(Lane(process=process, thread=thread, name=name) for process, thread, name in lanes),
            names=tuple(names),
            category=np.array(table[0], np.int8)[order],
            name=np.array(table[1], np.int32)[order],
            lane=np.array(table[2], np.int32)[order],
            start_s=start_s,
            duration_s=quantise((starts[order] - first + np.array(table[4], np.float64)[order]) * _US) - start_s,
            correlation=np.array(table[5], np.int64)[order],
            external=np.array(table[6], np.int64)[order],
            details={new: value for old, new in moved.items() if (value := details[old]) is not None},
            allocations=_allocations(memory, first),
            dropped=self.dropped,
        )

    def _category(self, event: Mapping[str, Any]) -> int | None:
        """Classifies an event; None for what is no work, which is counted if it is not known."""
        text = str(event.get("cat", "")).lower()
        category = _CATEGORIES.get(text)
        if category is None and text not in _IGNORED:
            self.dropped += 1
        return category

    def _device(self) -> str:
        properties = self.header.get("deviceProperties")
        if isinstance(properties, list) and properties and isinstance(properties[0], dict):
            return str(properties[0].get("name", ""))
        return ""


def _allocation(event: Mapping[str, Any]) -> tuple[float, float, float, bool] | None:
    args, start = event.get("args"), _number(event.get("ts"))
    if start is None or not isinstance(args, dict):
        return None
    change, total = _number(args.get("Bytes")), _number(args.get("Total Allocated"))
    if change is None or total is None:
        return None
    # c10::DeviceType: 0 is the CPU.
    return start, change, total, _whole(args.get("Device Type")) > 0


def _allocations(memory: list[tuple[float, float, float, bool]], first: float) -> Allocations | None:
    if not memory:
        return None
    memory.sort(key=lambda row: row[0])
    start, change, total, on_device = zip(*memory, strict=True)
    return Allocations(
        time_s=(np.array(start, np.float64) - first) * _US,
        change_bytes=np.array(change, np.float64),
        allocated_bytes=np.array(total, np.float64),
        on_device=np.array(on_device, np.bool_),
    )


def _rank_of(path: str) -> int:
    """The rank that a file's name tells (`rank-3.json`, `trace_rank_3.json`); 0 if it tells none."""
    found = re.search(r"rank[-_]?(\d+)", Path(path).name)
    return int(found.group(1)) if found else 0


def _number(value: Any) -> float | None:
    """A finite number, also where it is written as text."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _whole(value: Any) -> int:
    """A whole number of 64 bits; NONE if it is not one."""
    number = _number(value)
    # Beyond 2**53 a double is no exact whole number any more, which identifiers of events stay below.
    return int(number) if number is not None and abs(number) < 2**62 and number == int(number) else NONE
