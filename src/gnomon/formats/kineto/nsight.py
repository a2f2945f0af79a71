"""Reads what `nsys export --type sqlite` writes, as the events that Kineto would have recorded of the same job.

`read_nsight(path)` returns a `Trace` for each process with work on a device, by device: kernels, copies and sets of
memory, the calls that launched them, NVTX ranges. `emit_nvtx` of PyTorch names ATen ops (`aten::mm, seq = 5`), a range
named after a step or an iteration and its number is one. Columns differ by the version of nsys, and a table is there
only if something was recorded for it; what is not there is left out. Leaves out samples of the CPU, metrics of the GPU
and `.nsys-rep` itself, whose format is not public. Tables: docs.nvidia.com/nsight-systems, "SQLite Schema Reference".
"""

from __future__ import annotations

import re
import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from gnomon.errors import InputError
from gnomon.formats.kineto.read import trace_of_events
from gnomon.profile.trace import Trace

HEADER = b"SQLite format 3\x00"
KERNELS, COPIES, SETS = (f"CUPTI_ACTIVITY_KIND_{kind}" for kind in ("KERNEL", "MEMCPY", "MEMSET"))
CALLS, RANGES = "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"
PUSH_POP = (59, 60)
"""`eventType` of NVTX ranges that have a thread: pushed and popped, started and ended."""
DIRECTIONS = {1: "HtoD", 2: "DtoH", 8: "DtoD", 9: "HtoH", 10: "PtoP"}
"""CUPTI's `copyKind`, in the names that Kineto gives a copy."""
PROCESS = ~0xFFFFFF
"""Bits of a `globalTid` that are those of its `globalPid`; the rest is the thread."""
STEP = re.compile(r"(?:(?:train(?:ing)?|global)[ _-]?)?(?:step|iter(?:ation)?|batch)[ _#:=-]*(\d+)", re.IGNORECASE)
"""What people call a range around a step."""
OP = re.compile(r"((?:aten|c10d|nccl|autograd|torch)::[\w:.]+|[A-Z]\w*Backward\d*)(?:, .*)?")
"""A range of `torch.autograd.profiler.emit_nvtx`: the op, then its number and sizes."""
_US = 1e-3
"""Microseconds of a nanosecond."""


def is_nsight(path: str) -> bool:
    """Whether it is a database of SQLite, or a report that nsys can export as one."""
    file = Path(path)
    if file.name.lower().endswith((".nsys-rep", ".qdrep")):
        return True
    try:
        with file.open("rb") as opened:
            return opened.read(len(HEADER)) == HEADER
    except OSError:
        return False


def read_nsight(path: str) -> tuple[Trace, ...]:
    """The traces of all processes, numbered by the device that each works on. InputError for a report that is not
    exported yet, for another database, and for one without work on a device."""
    if path.lower().endswith((".nsys-rep", ".qdrep")):
        name = Path(path)
        raise InputError(
            f"{path!r} is a report of Nsight Systems, whose format is not public; export it: nsys export --type sqlite "
            f"-o {name.with_suffix('.sqlite').name} {name.name}"
        )
    try:
        # Read only: reading must not write a journal beside somebody's file.
        with closing(sqlite3.connect(f"file:{Path(path).resolve()}?mode=ro", uri=True)) as base:
            return _Export(path, base).traces()
    except sqlite3.Error as error:
        raise InputError(f"cannot read {path!r}: {error}; export the report again: nsys export --type sqlite") from None


class _Export:
    """One database of an export."""

    def __init__(self, path: str, base: sqlite3.Connection) -> None:
        self.path, self.base = path, base
        self.columns: dict[str, frozenset[str]] = {}
        for (table,) in base.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            rows = base.execute(f"PRAGMA table_info({_quoted(table)})").fetchall()
            self.columns[table] = frozenset(str(row[1]) for row in rows)
        if KERNELS not in self.columns and RANGES not in self.columns and CALLS not in self.columns:
            raise InputError(f"{path!r} is no export of Nsight Systems: it has no table {KERNELS}")
        self.words: dict[int, str] = dict(self._rows("StringIds", "id", "value"))

    def traces(self) -> tuple[Trace, ...]:
        """Reads a trace of each process that has work on a device."""
        devices, events = self._work()
        if not devices:
            raise InputError(
                f"{self.path!r} has no kernels; record them: nsys profile --trace=cuda,nvtx,cublas,osrt python train.py"
            )
        first = min(one[0] for each in events.values() for one in each)
        names = self._device_names()
        order = sorted(devices, key=lambda process: (devices[process], process))
        return tuple(
            trace_of_events(
                self.path,
                {
                    "distributedInfo": {"rank": rank, "world_size": len(order)},
                    "deviceProperties": [{"name": names.get(devices[process], "")}],
                },
                [_event(first, *one) for one in events[process]],
            )
            for rank, process in enumerate(order)
        )

    def _work(self) -> tuple[dict[int, int], dict[int, list[_Row]]]:
        """(process -> its device, process -> rows of its events)."""
        devices: dict[int, int] = {}
        events: dict[int, list[_Row]] = defaultdict(list)
        for table in (KERNELS, COPIES, SETS):
            for start, end, device, stream, tie, process, name, extra in self._on_device(table):
                devices.setdefault(process, device)
                category = {KERNELS: "kernel", COPIES: "gpu_memcpy", SETS: "gpu_memset"}[table]
                args = {"correlation": tie, **extra}
                events[process].append((start, end, category, name, f"device {device}", f"stream {stream}", args))
        for start, end, thread, name, tie in self._calls():
            process = self._process(thread, devices)
            events[process].append((start, end, "cuda_runtime", name, "host", str(thread), {"correlation": tie}))
        for start, end, thread, name in self._ranges():
            process = self._process(thread, devices)
            category, shown = _range(name)
            events[process].append((start, end, category, shown, "host", str(thread), {}))
        return devices, events

    def _process(self, thread: int, devices: Mapping[int, int]) -> int:
        """Names the process of a thread; where kernels do not say theirs, all are of one."""
        return 0 if 0 in devices else thread & PROCESS

    def _on_device(self, table: str) -> Iterator[tuple[int, int, int, int, int, int, str, dict[str, Any]]]:
        has = self.columns.get(table, frozenset())
        if not has:
            return
        # Versions of nsys name the column differently; the first that is there is the most telling.
        label = next((one for one in ("demangledName", "shortName", "nameId", "name") if one in has), None)
        process = "globalPid" if "globalPid" in has else "0"
        size = "bytes" if "bytes" in has and table != KERNELS else "NULL"
        kind = "copyKind" if "copyKind" in has else "NULL"
        ends = [one if one in has else "NULL" for one in ("srcKind", "dstKind")]
        places = self._memory_kinds() if table == COPIES else {}
        query = (
            f"SELECT start, end, deviceId, streamId, correlationId, {process}, {label or 'NULL'}, {size}, {kind}, "
            f"{ends[0]}, {ends[1]} FROM {_quoted(table)}"
        )
        for start, end, device, stream, tie, owner, name, nbytes, way, source, target in self.base.execute(query):
            extra = {} if nbytes is None else {"bytes": nbytes}
            if table == KERNELS:
                shown = self._word(name)
            elif table == SETS:
                shown = "Memset (Device)"
            else:
                between = f" ({places[source]} -> {places[target]})" if {source, target} <= set(places) else ""
                shown = f"Memcpy {DIRECTIONS.get(way, '')}{between}".replace("Memcpy  ", "Memcpy ")
            yield start, end, device, stream, tie, int(owner) & PROCESS, shown, extra

    def _calls(self) -> Iterator[tuple[int, int, int, str, int]]:
        for start, end, thread, name, tie in self._rows(CALLS, "start", "end", "globalTid", "nameId", "correlationId"):
            # nsys adds the version of the call: cudaLaunchKernel_v7000.
            yield start, end, thread, re.sub(r"_v\d+$", "", self._word(name)), tie

    def _ranges(self) -> Iterator[tuple[int, int, int, str]]:
        has = self.columns.get(RANGES, frozenset())
        if not {"start", "end", "globalTid", "eventType"} <= has:
            return
        text = "text" if "text" in has else "NULL"
        named = "textId" if "textId" in has else "NULL"
        query = f"SELECT start, end, globalTid, {text}, {named} FROM {RANGES} WHERE eventType IN (?, ?) AND end > start"
        for start, end, thread, own, word in self.base.execute(query, PUSH_POP):
            if thread is not None and (name := own or self._word(word)):
                yield start, end, thread, name

    def _rows(self, table: str, *columns: str) -> Iterator[tuple[Any, ...]]:
        """Those columns of a table; nothing where one of them is not there."""
        if set(columns) <= self.columns.get(table, frozenset()):
            yield from self.base.execute(f"SELECT {', '.join(map(_quoted, columns))} FROM {_quoted(table)}")

    def _word(self, value: Any) -> str:
        """Reads a name: text, or the number of one."""
        return value if isinstance(value, str) else self.words.get(value, "")

    def _device_names(self) -> dict[int, str]:
        known = dict(self._rows("TARGET_INFO_GPU", "id", "name"))
        return {int(device): self._word(name) for device, name in known.items() if device is not None}

    def _memory_kinds(self) -> dict[int, str]:
        """Names memory kinds (`Pageable`, `Pinned`, `Device`) as the export itself calls them."""
        for column in ("label", "name"):
            if rows := list(self._rows("ENUM_CUDA_MEM_KIND", "id", column)):
                return {int(number): str(text).rpartition("_")[2].capitalize() for number, text in rows}
        return {}


_Row = tuple[int, int, str, str, str, str, Mapping[str, Any]]
"""Start and end in nanoseconds, category, name, process, thread, args."""


def _event(
    first: int, start: int, end: int, category: str, name: str, process: str, thread: str, args: Mapping[str, Any]
) -> dict[str, Any]:
    """An event of a Chrome trace. Nanoseconds count from the first: since boot they are beyond a double's digits."""
    times = {"ts": (start - first) * _US, "dur": (end - start) * _US}
    return {"ph": "X", "cat": category, "name": name, "pid": process, "tid": thread, **times, "args": dict(args)}


def _range(name: str) -> tuple[str, str]:
    """(category, name) of an NVTX range."""
    if step := STEP.fullmatch(name.strip()):
        return "user_annotation", f"ProfilerStep#{step.group(1)}"
    if op := OP.fullmatch(name):
        return "cpu_op", op.group(1)
    return "user_annotation", name


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
