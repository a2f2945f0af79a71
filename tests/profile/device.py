"""Writes Kineto traces of a device that does not exist here: a host that issues kernels into queues, played by hand.

`Device` keeps the host's clock and each stream's; a kernel starts when it was issued, its stream is free and what it
waits for has ended. So a test knows every second of the step without the code under test.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

LAUNCH_US = 5.0


class Device:
    """One rank's host and device, in microseconds."""

    def __init__(self, rank: int = 0, world_size: int = 1, start_us: float = 1000.0) -> None:
        self.rank, self.world_size = rank, world_size
        self.host = start_us
        self.free: dict[int, float] = {}
        self.events: list[dict[str, Any]] = []
        self.correlation = 0

    def event(self, category: str, name: str, start: float, duration: float, thread: int, **args: Any) -> None:
        """One complete event."""
        process = 0 if category in ("kernel", "gpu_memcpy") else 42
        self.events.append(
            {
                "ph": "X",
                "cat": category,
                "name": name,
                "pid": process,
                "tid": thread,
                "ts": start,
                "dur": duration,
                "args": args,
            }
        )

    def kernel(self, op: str, kernel: str, us: float, stream: int = 7, after: float = 0.0, **args: Any) -> float:
        """An op that launches one kernel; returns when that ends."""
        self.correlation += 1
        issued = self.host
        self.event("cpu_op", op, issued, LAUNCH_US, 42, **{"External id": self.correlation})
        self.event("cuda_runtime", "cudaLaunchKernel", issued + 1, 3.0, 42, correlation=self.correlation)
        self.host += LAUNCH_US
        start = max(issued + 3.0, self.free.get(stream, 0.0), after)
        copy = kernel.startswith("Memcpy")
        self.event("gpu_memcpy" if copy else "kernel", kernel, start, us, stream, correlation=self.correlation, **args)
        self.free[stream] = start + us
        return start + us

    def wait(self, name: str = "cudaDeviceSynchronize") -> None:
        """The host waits until all streams are empty."""
        start = self.host
        self.host = max([self.host, *self.free.values()]) + 1.0
        self.event("cuda_runtime", name, start, self.host - start, 42, correlation=-1)

    def busy(self, category: str, name: str, us: float) -> None:
        """The host does something for a while."""
        self.event(category, name, self.host, us, 42)
        self.host += us

    def step(self, index: int, start: float) -> None:
        """Marks the step that began at `start` and ends now."""
        self.event("user_annotation", f"ProfilerStep#{index}", start, self.host - start, 42)

    def write(self, folder: Path, *, packed: bool = False) -> Path:
        """`rank<r>.json`, as the profiler writes it."""
        whole = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}],
            "distributedInfo": {"backend": "nccl", "rank": self.rank, "world_size": self.world_size},
            "traceEvents": self.events,
        }
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank{self.rank}.json{'.gz' if packed else ''}"
        text = json.dumps(whole).encode()
        path.write_bytes(gzip.compress(text) if packed else text)
        return path
