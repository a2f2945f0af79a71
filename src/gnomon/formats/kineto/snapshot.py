"""Reads `torch.cuda.memory._dump_snapshot`'s pickle without running anything that is in it.

A snapshot holds dicts, lists, tuples, numbers and text only. The unpickler here refuses every global, so a file that
names a function or a class is an error, not a call.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any, NoReturn

from gnomon.errors import InputError
from gnomon.profile.snapshot import Snapshot, peak_of

_LARGEST_BYTES = 4 * 2**30


class _PlainUnpickler(pickle.Unpickler):
    """Builds plain containers, and nothing else."""

    def find_class(self, module: str, name: str) -> NoReturn:
        """Refuses every global, so that unpickling runs no code."""
        raise pickle.UnpicklingError(f"it names {module}.{name}, which a memory snapshot never does")

    def persistent_load(self, pid: Any) -> NoReturn:
        """Refuses objects that lie elsewhere."""
        raise pickle.UnpicklingError("it refers to objects outside the file")


def is_snapshot(path: str) -> bool:
    """Whether the name is a pickle's."""
    return path.lower().endswith((".pickle", ".pkl"))


def read_snapshot(path: str) -> Snapshot:
    """The device of the snapshot that held most. InputError if it cannot be read."""
    try:
        if Path(path).stat().st_size > _LARGEST_BYTES:
            raise InputError(f"{path!r} is larger than {_LARGEST_BYTES >> 30} GiB; record fewer steps (max_entries=)")
        data = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path!r}: {error.strerror}") from error
    try:
        unpickled = _PlainUnpickler(io.BytesIO(data)).load()
    except Exception as error:  # a torn or hostile pickle fails in many ways, none of them ours
        raise InputError(f"cannot read {path!r} as a memory snapshot: {error or type(error).__name__}") from None
    if not isinstance(unpickled, dict) or not ("segments" in unpickled or "device_traces" in unpickled):
        raise InputError(f"{path!r} is no memory snapshot: it has neither `segments` nor `device_traces`")
    devices = range(max(1, len(unpickled["device_traces"]) if isinstance(unpickled.get("device_traces"), list) else 1))
    found = []
    # A device that recorded nothing is passed over, unless it is the only one.
    for device in devices:
        try:
            found.append(peak_of(path, unpickled, device))
        except InputError:
            if len(devices) == 1:
                raise
    if not found:
        raise InputError(f"{path!r} holds nothing; record with torch.cuda.memory._record_memory_history()")
    return max(found, key=lambda snapshot: snapshot.peak_bytes)
