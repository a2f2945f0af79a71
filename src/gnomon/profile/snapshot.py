"""What torch's caching allocator held: its peak, by class, from the snapshot that `_dump_snapshot` writes.

`peak_of` replays the recorded allocations and frees, adds what was there before the recording, and returns the moment
at which most was held. A block's class is read off the stack that allocated it: the optimizer's states, gradients
(autograd's engine), parameters (a module's `to`, `empty`, or its making), and what the forward left (activations).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gnomon.errors import InputError

CLASSES = ("parameters", "optimizer states", "gradients", "activations", "not known")

_OPTIMIZER = ("_init_group", "optim/", "optimizer", "adamw", "distrib_optimizer")
_BACKWARD = (
    "torch::autograd::engine",
    "engine_run_backward",
    "autograd/__init__.py",
    "accumulategrad",
    "evaluate_function",
)
_MODULE = (
    "_apply",
    "convert",
    "reset_parameters",
    "load_state_dict",
    "from_pretrained",
    "__init__",
    "_parameters",
    "param",
)
_FORWARD = ("forward", "_call_impl", "functional.py", "checkpoint", "loss")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldClass:
    """Bytes of one class at the peak."""

    name: str
    """Class of memory, as the stack of its allocations tells it."""
    nbytes: int
    """Bytes at the peak."""
    largest: str
    """Where the largest block of it was allocated: `file:line function`; empty where no stack was recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What one device's caching allocator holds at one moment."""

    source: str
    """The file."""
    device: int
    """Number of the device in its process."""
    peak_bytes: int
    """Most bytes allocated while it was recorded."""
    reserved_bytes: int
    """Of the segments at the end, as nvidia-smi would show them."""
    classes: tuple[HeldClass, ...]
    """At the peak, most bytes first; they add up to it."""
    events: int
    """Allocations and frees recorded."""
    retries: int
    """Times that segments were freed in the middle of the work because an allocation did not fit."""
    out_of_memory: int
    """Allocations that failed."""


def peak_of(source: str, document: Mapping[str, Any], device: int) -> Snapshot:
    """The peak of one device. InputError if the snapshot holds nothing of it."""
    traces = document.get("device_traces")
    entries = _list(traces[device]) if isinstance(traces, list) and device < len(traces) else []
    segments = [s for s in _list(document.get("segments")) if isinstance(s, dict) and s.get("device", 0) == device]
    if not entries and not segments:
        raise InputError(
            f"{source!r} holds nothing of device {device}; record with torch.cuda.memory._record_memory_history()"
        )
    end = {address: block for segment in segments for address, block in _blocks(segment)}
    live = _before(entries, end)
    live_bytes = sum(size for size, _ in live.values())
    peak, at_peak = live_bytes, dict(live)
    retries = out_of_memory = 0
    for entry in entries:
        action, address, size = entry.get("action"), _int(entry.get("addr")), _int(entry.get("size"))
        if action == "alloc":
            live[address] = (size, _frames(entry))
            live_bytes += size
            # A copy at each new maximum would take the square of the number of blocks: that there is one is noted, and
            # what was live is copied at the next free.
            if live_bytes > peak:
                peak, at_peak = live_bytes, None  # type: ignore[assignment]
        elif action in ("free", "free_completed") and address in live:
            if at_peak is None:
                # The peak lasted until this free: only now is it worth keeping what was live.
                at_peak = dict(live)
            live_bytes -= live.pop(address)[0]
        elif action == "segment_free":
            retries += 1
        elif action == "oom":
            out_of_memory += 1
    at_peak = dict(live) if at_peak is None else at_peak
    return Snapshot(
        source=source,
        device=device,
        peak_bytes=peak,
        reserved_bytes=sum(_int(segment.get("total_size")) for segment in segments),
        classes=_classes(at_peak.values()),
        events=len(entries),
        retries=retries,
        out_of_memory=out_of_memory,
    )


Frames = Sequence[Mapping[str, Any]]


def _blocks(segment: Mapping[str, Any]) -> Iterable[tuple[int, tuple[int, Frames]]]:
    """(address, (bytes, stack)) of the blocks of a segment that are in use."""
    address = _int(segment.get("address"))
    for block in _list(segment.get("blocks")):
        if not isinstance(block, dict):
            continue
        # A block without an address begins where the one before it ends.
        at = _int(block.get("address")) or address
        size = _int(block.get("size"))
        if block.get("state") == "active_allocated":
            yield at, (_int(block.get("requested_size")) or size, _frames(block))
        address = at + size


def _before(
    entries: Sequence[Mapping[str, Any]], end: Mapping[int, tuple[int, Frames]]
) -> dict[int, tuple[int, Frames]]:
    """What was live when the recording began: what is live at its end, undone backwards.

    A block freed during the recording that was never allocated in it was there before, and its free tells its size.
    """
    live = dict(end)
    for entry in reversed(entries):
        action, address = entry.get("action"), _int(entry.get("addr"))
        if action == "alloc":
            live.pop(address, None)
        elif action == "free_completed" or (action == "free" and address not in live):
            live[address] = (_int(entry.get("size")), ())
    return live


def _frames(entry: Mapping[str, Any]) -> Frames:
    frames = entry.get("frames")
    if frames is None:  # older snapshots keep a block's stack in its history
        history = _list(entry.get("history"))
        frames = history[0].get("frames") if history and isinstance(history[0], dict) else None
    return [frame for frame in _list(frames) if isinstance(frame, dict)]


def _classes(blocks: Iterable[tuple[int, Frames]]) -> tuple[HeldClass, ...]:
    total: dict[str, int] = {}
    largest: dict[str, tuple[int, str]] = {}
    for size, frames in blocks:
        name = _class_of(frames)
        total[name] = total.get(name, 0) + size
        largest[name] = max(largest.get(name, (-1, "")), (size, _place(frames)))
    rows = [HeldClass(name=name, nbytes=nbytes, largest=largest[name][1]) for name, nbytes in total.items()]
    return tuple(sorted(rows, key=lambda row: (-row.nbytes, row.name)))


def _class_of(frames: Frames) -> str:
    """The class of memory that an allocation belongs to, read from its Python stack, innermost call first; the
    optimizer and autograd are looked for anywhere in it."""
    if not frames:
        return "not known"
    texts = [f"{frame.get('filename', '')} {frame.get('name', '')}".lower() for frame in frames]
    # In this order, as stacks within the optimizer and the backward have frames of modules and functions as well.
    if any(word in text for text in texts for word in _OPTIMIZER):
        return "optimizer states"
    if any(word in text for text in texts for word in _BACKWARD):
        return "gradients"
    if any(word in text for text in texts for word in _FORWARD):
        return "activations"
    if any(word in text for text in texts for word in _MODULE):
        return "parameters"
    return "not known"


def _place(frames: Frames) -> str:
    """The innermost line of the user's or a library's Python, not torch's C++."""
    for frame in frames:
        file = str(frame.get("filename", ""))
        if file.endswith(".py"):
            return f"{file.rsplit('/', 1)[-1]}:{_int(frame.get('line'))} {frame.get('name', '')}"
    return ""


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _int(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
