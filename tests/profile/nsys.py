"""Writes the events of `device.Device` as `nsys export --type sqlite` would: no nsys is here, so tables and columns are
those that NVIDIA's documentation of the export lists, and names are numbers of `StringIds`."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from tests.profile.device import Device

TABLES = """
CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE TARGET_INFO_GPU (id INT, name TEXT, busLocation TEXT);
CREATE TABLE ENUM_CUDA_MEM_KIND (id INT, name TEXT, label TEXT);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT, end INT, deviceId INT, contextId INT, streamId INT,
    correlationId INT, globalPid INT, demangledName INT, shortName INT);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INT, end INT, deviceId INT, contextId INT, streamId INT,
    correlationId INT, globalPid INT, bytes INT, copyKind INT, srcKind INT, dstKind INT);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INT, end INT, eventClass INT, globalTid INT, correlationId INT,
    nameId INT, returnValue INT);
CREATE TABLE NVTX_EVENTS (start INT, end INT, eventType INT, text TEXT, globalTid INT, textId INT);
INSERT INTO ENUM_CUDA_MEM_KIND VALUES (0, 'CUDA_MEMOPR_MEMORY_KIND_PAGEABLE', 'Pageable'),
    (1, 'CUDA_MEMOPR_MEMORY_KIND_PINNED', 'Pinned'), (2, 'CUDA_MEMOPR_MEMORY_KIND_DEVICE', 'Device');
"""
BOOTED_NS = 3 * 10**15
"""Nanoseconds since boot, at which no double tells one from the next."""
WAYS = {"HtoD": 1, "DtoH": 2}
KINDS = {"Pageable": 0, "Pinned": 1, "Device": 2}


def export(devices: Iterable[Device], path: Path) -> Path:
    """The database of all ranks on one node."""
    with closing(sqlite3.connect(path)) as base:
        base.executescript(TABLES)
        words: dict[str, int] = {}

        def number(text: str) -> int:
            if text not in words:
                words[text] = len(words) + 1
                base.execute("INSERT INTO StringIds VALUES (?, ?)", (words[text], text))
            return words[text]

        for device in devices:
            base.execute("INSERT INTO TARGET_INFO_GPU VALUES (?, 'NVIDIA H100 80GB HBM3', '')", (device.rank,))
            process = (1 << 56) + ((4000 + device.rank) << 24)
            for event in device.events:
                start, tie = BOOTED_NS + round(1e3 * event["ts"]), event["args"].get("correlation", -1)
                times = start, start + round(1e3 * event["dur"])
                place = device.rank, 1, event["tid"], tie, process
                name, thread = event["name"], process + event["tid"]
                if event["cat"] == "kernel":
                    row = (*times, *place, number(name), number(name.partition("(")[0]))
                    base.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?,?,?,?,?,?,?,?,?)", row)
                elif event["cat"] == "gpu_memcpy":
                    _, way, source, _, target = name.replace("(", "").replace(")", "").split()
                    copied = (*times, *place, 4096, WAYS[way], KINDS[source], KINDS[target])
                    base.execute("INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (?,?,?,?,?,?,?,?,?,?,?)", copied)
                elif event["cat"] == "cuda_runtime":
                    call = (*times, 0, thread, tie, number(f"{name}_v7000"), 0)
                    base.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?,?,?,?,?,?,?)", call)
                else:  # an op as emit_nvtx has it, with its text in the row; a step with the number of its text
                    step = name.startswith("ProfilerStep#")
                    text = name.replace("ProfilerStep#", "iteration ") if step else f"{name}, seq = 7"
                    range_ = (*times, 59, None if step else text, thread, number(text) if step else None)
                    base.execute("INSERT INTO NVTX_EVENTS VALUES (?,?,?,?,?,?)", range_)
        base.commit()
    return path
