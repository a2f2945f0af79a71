"""Where one step of a trace went: parts that add up to it to the bit, kinds of kernels, collectives, phases, memory.

With a device, its streams are looked at together: computing is what any kernel covers, communication counts where no
kernel computes at that time (exposed), copies where neither does, and the rest is idle, divided by what the host was
doing: loading data, allocating, waiting for the device, compiling, or issuing the next kernel too late. On CPUs the
ops of all threads are the computing, and the rest is the host's own time (Python between ops).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from gnomon.profile.intervals import Intervals, clip, common, complement, join, length, minus, union
from gnomon.profile.kinds import COMPILED, OTHER, kind_of_kernel, kind_of_op
from gnomon.profile.steps import StepWindow
from gnomon.profile.trace import COPY, CPU_OP, DEVICE_WORK, LAUNCH, MARK, NONE, SET, Trace

PARTS = (
    "compute",
    "exposed communication",
    "copies",
    "data loading",
    "allocator",
    "synchronisation",
    "compilation",
    "host",
    "waiting",
)
"""Parts of a step. host: the device had nothing to do because its next kernel was issued too late (on CPUs: time
between ops); waiting: it was issued in time and waited for another stream or for the launch itself."""

PHASES = ("forward", "backward", "optimizer")

_ITEM_BYTES: Mapping[str, int] = {
    "double": 8, "float64": 8, "long": 8, "long int": 8, "int64": 8,
    "float": 4, "float32": 4, "int": 4, "int32": 4,
    "half": 2, "float16": 2, "c10::half": 2, "bfloat16": 2, "c10::bfloat16": 2, "short": 2, "int16": 2,
    "byte": 1, "char": 1, "bool": 1, "int8": 1, "uint8": 1, "unsigned char": 1, "signed char": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "c10::float8_e4m3fn": 1, "c10::float8_e5m2": 1,
}  # fmt: skip
"""A dtype as Kineto writes it, in lower case -> bytes of an element."""

_LOADING = ("enumerate(DataLoader)", "dataloader", "## load_batch", "## wait_for_batch", "get_batch", "next(data")
_ALLOCATING = ("cudaMalloc", "cudaFree", "cudaHostAlloc", "hipMalloc", "hipFree", "hipHostMalloc", "cuMemCreate")
_SYNCHRONISING = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "hipStreamSynchronize",
    "hipDeviceSynchronize",
    "hipEventSynchronize",
    "cuCtxSynchronize",
    "cuStreamSynchronize",
    "cudaMemcpy ",
    "hipMemcpyWithStream",
)
_COMPILING = ("(dynamo_timed)", "entire_frame_compile", "entire_backward_compile", "inductor_compile")

LONG_GAP_S = 1e-3
"""A gap of this length is no launch: the host did something else."""

LAUNCH_S = 20e-6
"""Between the end of a wait of the host and the device's next kernel there is at least a launch; twice of what one
takes, so that gaps right after a wait count to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KindTime:
    """All kernels (on CPUs: ops, each without those inside it) of one kind in a step."""

    kind: str
    """What the kernels are, as `matmul`."""
    role: str
    """`compute`, `communication` or `copy`."""
    count: int
    """Kernels of the kind."""
    seconds: float
    """Sum of their durations, also where they overlap."""
    largest: str
    """Name of the one that takes most in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One kind of collective in a step."""

    kind: str
    """Which collective."""
    group: str
    """Ranks that take part, as the trace says: `2 ranks`, or empty."""
    count: int
    """Calls in the step."""
    seconds: float
    """Sum of their durations, also while something computes."""
    exposed_s: float
    """While nothing computes."""
    nbytes: int
    """The larger of input and output, all together; 0 where the trace does not tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """One step of one rank."""

    rank: int
    """The rank; 0 where the trace does not say."""
    step: StepWindow
    """The step that was accounted for."""
    on_device: bool
    """Whether the events are kernels of a device; otherwise ops of the host's CPUs."""
    parts: Mapping[str, float]
    """Part -> seconds, all of PARTS; they add up to `step.seconds` to the bit."""
    kinds: tuple[KindTime, ...]
    """Most seconds first."""
    phases: Mapping[str, float]
    """Phase -> seconds of kernels (on CPUs: ops) that compute; empty where the host's ops are not recorded."""
    collectives: tuple[Collective, ...]
    """Those that are exposed longest first; empty without communication."""
    kernels: int
    """Events that did the work."""
    tiny: int
    """Of them, shorter than TINY_S."""
    long_gaps_s: float
    """Of the host's part, what lies in gaps of LONG_GAP_S or more."""
    peak_bytes: float | None
    """Most bytes allocated on the device (on CPUs: by torch on the host), where the allocator was recorded."""

    @property
    def idle_s(self) -> float:
        """Seconds in which nothing computed, communicated or copied."""
        return sum(self.parts[name] for name in PARTS[3:])


TINY_S = 10e-6
"""A kernel shorter than this takes less time than its launch."""


def account(trace: Trace, step: StepWindow) -> Account:
    """Attributes a step's seconds to computing, communication, copies and waiting. A step's seconds and all parts lie
    on the grid of time."""
    work = trace.of(*DEVICE_WORK) if trace.on_device else _host_work(trace)
    inside = work[(trace.start_s[work] < step.end_s) & (trace.end_s[work] > step.start_s)]
    kinds = _kinds(trace, inside)
    split = _device_parts if trace.on_device else _host_parts
    parts, long_gaps_s = split(trace, step, inside, kinds)
    own = _own_seconds(trace, inside)
    return Account(
        rank=trace.rank,
        step=step,
        on_device=trace.on_device,
        parts=parts,
        kinds=_by_kind(trace, inside, kinds, own),
        phases=_by_phase(trace, inside, kinds, own),
        collectives=_collectives(trace, step, inside, kinds),
        kernels=len(inside),
        tiny=int((trace.duration_s[inside] < TINY_S).sum()),
        long_gaps_s=long_gaps_s,
        peak_bytes=_peak(trace, step),
    )


def _kinds(trace: Trace, inside: NDArray[np.int64]) -> dict[int, tuple[str, str]]:
    """(kind, role) of every event; what the host does while it compiles is no work of the model."""
    kinds = {event: _kind(trace, event) for event in inside.tolist()}
    if not trace.on_device:
        compiling = host_calls(trace, _COMPILING, (MARK, CPU_OP))
        if len(compiling):
            # The last compilation that began by then; -1 is none, for which `maximum` only keeps the index valid.
            at = np.searchsorted(compiling[:, 0], trace.start_s[inside], side="right") - 1
            is_compiling = (at >= 0) & (trace.end_s[inside] <= compiling[np.maximum(at, 0), 1])
            kinds.update(dict.fromkeys(inside[is_compiling].tolist(), ("compiling", "host")))
    return kinds


def _host_work(trace: Trace) -> NDArray[np.int64]:
    """Ops of the host, and marks of collectives that run outside of any op."""
    marks = [
        event
        for event in trace.of(MARK).tolist()
        if (kind := kind_of_op(trace.name_of(event))) is not None and kind.role == "communication"
    ]
    return np.sort(np.concatenate((trace.of(CPU_OP), np.array(marks, np.int64))))


def _kind(trace: Trace, event: int) -> tuple[str, str]:
    """(kind, role) of an event that works."""
    category = trace.category[event]
    name = trace.name_of(event)
    if category == COPY:
        # A copy within the device's memory holds it like a kernel does.
        return ("copy and cast", "compute") if "DtoD" in name else ("copy to or from the host", "copy")
    # A fill of memory holds the device like an elementwise kernel.
    if category == SET:
        return "elementwise", "compute"
    if trace.on_device:
        own = kind_of_kernel(name)
        if own is not None and own.role == "communication":
            collective_name = trace.details.get(event, {}).get("Collective name")
            by_name = kind_of_kernel(str(collective_name)) if collective_name else None
            return (by_name or own).kind, "communication"
        start = int(trace.op_of[event])
    else:
        own, start = None, event
    while start != NONE:
        row = kind_of_op(trace.name_of(start))
        if row is not None and row.kind != "views and bookkeeping":
            if trace.on_device and row.role == "communication":
                break  # a kernel that computes, issued from within a collective's call (its copies in and out)
            if own is not None and row.kind == COMPILED:
                break  # within a compiled graph a kernel's own name says more than the graph's
            return row.kind, row.role
        if not trace.on_device and row is not None:
            return row.kind, row.role
        start = int(trace.parent[start])
    return (own.kind, own.role) if own is not None else (OTHER, "compute")


def _spans(trace: Trace, step: StepWindow, events: NDArray[np.int64]) -> Intervals:
    return clip(union(trace.start_s[events], trace.end_s[events]), step.start_s, step.end_s)


def _device_parts(
    trace: Trace, step: StepWindow, inside: NDArray[np.int64], kinds: Mapping[int, tuple[str, str]]
) -> tuple[dict[str, float], float]:
    role = np.array([kinds[event][1] for event in inside.tolist()], dtype=object)
    computing = _spans(trace, step, inside[role == "compute"])
    communicating = _spans(trace, step, inside[role == "communication"])
    copying = _spans(trace, step, inside[role == "copy"])
    busy = join(computing, communicating, copying)
    idle = complement(busy, step.start_s, step.end_s)
    out = dict.fromkeys(PARTS, 0.0)
    out["compute"] = length(computing)
    out["exposed communication"] = length(minus(communicating, computing))
    out["copies"] = length(minus(copying, join(computing, communicating)))
    # In this order: a call may lie within another, and each takes from the idle time what those before it have left.
    for part, names, categories in (
        ("data loading", _LOADING, (MARK, CPU_OP)),
        ("compilation", _COMPILING, (MARK, CPU_OP)),
        ("allocator", _ALLOCATING, (LAUNCH,)),
    ):
        doing = common(idle, host_calls(trace, names, categories))
        out[part] = length(doing)
        idle = minus(idle, doing)
    waits = host_calls(trace, _SYNCHRONISING, (LAUNCH,))
    issued, began = _issues(trace)
    long_gaps_s = 0.0
    for start, end in idle.tolist():
        if _after_wait(waits, start, end):
            out["synchronisation"] += end - start
            continue
        # A gap ends where the device's next work begins: that work, by a picosecond's tolerance. Was it issued after
        # the device had run dry, then the host was late.
        after = int(np.searchsorted(began, end - 1e-12))
        late = after < len(began) and issued[after] >= start
        out["host" if late else "waiting"] += end - start
        long_gaps_s += end - start if late and end - start >= LONG_GAP_S else 0.0
    return out, long_gaps_s


def _issues(trace: Trace) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(when issued, when begun) of the device's work, by its start; -inf where the launch is not recorded."""
    work = trace.of(*DEVICE_WORK)
    launch = trace.launched_by[work]
    issued = np.where(launch == NONE, -np.inf, trace.start_s[np.maximum(launch, 0)])
    return issued, trace.start_s[work]


def _after_wait(waits: Intervals, start_s: float, end_s: float) -> bool:
    """Whether the host came back from a wait for the device within this gap, or just before it."""
    at = int(np.searchsorted(waits[:, 0], end_s)) - 1
    return at >= 0 and waits[at, 1] >= start_s - LAUNCH_S and waits[at, 0] <= start_s + LAUNCH_S


def named_events(trace: Trace, names: tuple[str, ...], categories: tuple[int, ...]) -> NDArray[np.int64]:
    """Events of these categories whose name holds one of these parts, by start. `x ` (a blank at the end): the whole
    name."""

    def matches(name: str) -> bool:
        return any(name == part[:-1] if part.endswith(" ") else part in name for part in names)

    hit = np.array([matches(name) for name in trace.names], np.bool_)
    events = trace.of(*categories)
    return events[hit[trace.name[events]]]


def host_calls(trace: Trace, names: tuple[str, ...], categories: tuple[int, ...]) -> Intervals:
    """When the host was in a call of such a name: see `named_events`."""
    events = named_events(trace, names, categories)
    return union(trace.start_s[events], trace.end_s[events])


def _host_parts(
    trace: Trace, step: StepWindow, inside: NDArray[np.int64], kinds: Mapping[int, tuple[str, str]]
) -> tuple[dict[str, float], float]:
    role = np.array([kinds[event][1] for event in inside.tolist()], dtype=object)
    communicating = _spans(trace, step, inside[role == "communication"])
    ops = inside[(role == "compute") & (trace.category[inside] == CPU_OP)]
    # A collective within an op (a compiled graph, a hook of autograd) is waited for on the op's own thread.
    nested = [e for e in inside[role == "communication"].tolist() if _within_op(trace, e)]
    computing = minus(_spans(trace, step, ops), _spans(trace, step, np.array(nested, np.int64)))
    loading = clip(host_calls(trace, _LOADING, (MARK, CPU_OP)), step.start_s, step.end_s)
    computing = minus(computing, loading)
    communicating = minus(minus(communicating, computing), loading)
    compiling = clip(host_calls(trace, _COMPILING, (MARK, CPU_OP)), step.start_s, step.end_s)
    computing = minus(computing, compiling)
    idle = complement(join(computing, communicating, loading), step.start_s, step.end_s)
    compiling = common(idle, compiling)
    out = dict.fromkeys(PARTS, 0.0)
    out["compute"], out["exposed communication"] = length(computing), length(communicating)
    out["data loading"], out["compilation"] = length(loading), length(compiling)
    gaps = minus(idle, compiling)
    out["host"] = length(gaps)
    return out, length(gaps[gaps[:, 1] - gaps[:, 0] >= LONG_GAP_S])


def _within_op(trace: Trace, event: int) -> bool:
    return any(
        trace.category[above] == CPU_OP
        and ((kind := kind_of_op(trace.name_of(above))) is None or kind.role != "communication")
        for above in trace.ancestors(event)
    )


def _own_seconds(trace: Trace, inside: NDArray[np.int64]) -> NDArray[np.float64]:
    """Seconds of each event without those inside it: ops of the host nest, kernels do not."""
    own = trace.duration_s[inside].copy()
    if trace.on_device:
        return own
    place = {int(event): i for i, event in enumerate(inside.tolist())}
    for event, seconds in zip(inside.tolist(), trace.duration_s[inside].tolist(), strict=True):
        above = int(trace.parent[event])
        # What encloses an op may be a mark, or lie outside of the step.
        while above != NONE and above not in place:
            above = int(trace.parent[above])
        if above != NONE:
            own[place[above]] -= seconds
    return np.maximum(own, 0.0)


def _by_kind(
    trace: Trace, inside: NDArray[np.int64], kinds: Mapping[int, tuple[str, str]], own: NDArray[np.float64]
) -> tuple[KindTime, ...]:
    total: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0])
    names: dict[tuple[str, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for event, seconds in zip(inside.tolist(), own.tolist(), strict=True):
        sums = total[kinds[event]]
        sums[0] += 1
        sums[1] += seconds
        names[kinds[event]][trace.name_of(event)] += seconds
    rows = [
        KindTime(
            kind=kind,
            role=role,
            count=int(count),
            seconds=seconds,
            largest=max(names[kind, role], key=lambda name: names[kind, role][name]),
        )
        for (kind, role), (count, seconds) in total.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.seconds, row.kind)))


def _by_phase(
    trace: Trace, inside: NDArray[np.int64], kinds: Mapping[int, tuple[str, str]], own: NDArray[np.float64]
) -> dict[str, float]:
    """Forward, backward and optimizer by what encloses the op: autograd's engine, `Optimizer.step`, or neither."""
    phases = _host_phases(trace)
    out = dict.fromkeys(PHASES, 0.0)
    known = False
    for event, seconds in zip(inside.tolist(), own.tolist(), strict=True):
        if kinds[event][1] != "compute":
            continue
        above = int(trace.op_of[event]) if trace.on_device else event
        known |= above != NONE
        out[PHASES[phases[above]] if above != NONE else PHASES[0]] += seconds
    return out if known else {}


def _host_phases(trace: Trace) -> NDArray[np.int8]:
    """Phase of every event of the host, as an index of PHASES. A parent starts before its child, so one pass does."""
    own = np.zeros(len(trace.names), np.int8)
    for i, name in enumerate(trace.names):
        if name.startswith("Optimizer.step#"):
            own[i] = 2
        elif name.startswith("autograd::engine::evaluate_function") or name.endswith(("Backward", "Backward0")):
            own[i] = 1
    out = own[trace.name].copy()
    host = np.flatnonzero(trace.parent != NONE)
    for event in host[np.lexsort((-trace.duration_s[host], trace.start_s[host]))].tolist():
        out[event] = max(out[event], out[trace.parent[event]])
    return out


def message_bytes(details: Mapping[str, object]) -> int:
    """Bytes of a collective: the larger of what goes in and what comes out; 0 where the trace does not tell."""
    size = _ITEM_BYTES.get(str(details.get("dtype", "")).lower(), 0)
    counts = [value for key in ("In msg nelems", "Out msg nelems") if isinstance(value := details.get(key), int)]
    if size and counts:
        return size * max(counts)
    dims, types = details.get("Input Dims"), details.get("Input type")
    if isinstance(dims, list) and isinstance(types, list):
        return sum(_tensor_bytes(shape, kind) for shape, kind in zip(dims, types, strict=False))
    return 0


def _tensor_bytes(shape: object, kind: object) -> int:
    """Bytes of one input of an op. Kineto writes its shape as a list of sizes, or as a list of such lists for a list of
    tensors."""
    if not isinstance(shape, list) or not shape:
        return 0
    if all(isinstance(size, int) for size in shape):
        return prod(shape) * _ITEM_BYTES.get(str(kind).lower(), 0)
    kinds = kind if isinstance(kind, list) else [kind] * len(shape)
    return sum(_tensor_bytes(each, one) for each, one in zip(shape, kinds, strict=False))


def _collectives(
    trace: Trace, step: StepWindow, inside: NDArray[np.int64], kinds: Mapping[int, tuple[str, str]]
) -> tuple[Collective, ...]:
    events = [event for event in inside.tolist() if kinds[event][1] == "communication"]
    if not trace.on_device:
        # A mark of a collective encloses the backend's own op: one call, not two.
        events = [e for e in events if not any(above in kinds and kinds[above][1] == "communication"
                                               for above in trace.ancestors(e))]  # fmt: skip
    computing = _spans(
        trace,
        step,
        np.array([e for e in inside.tolist() if kinds[e][1] == "compute" and trace.category[e] != MARK], np.int64),
    )
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for event in events:
        size = trace.details.get(event, {}).get("Group size")
        groups[kinds[event][0], f"{size} ranks" if size else ""].append(event)
    rows = []
    for (kind, group), members in groups.items():
        index = np.array(members, np.int64)
        spans = _spans(trace, step, index)
        rows.append(
            Collective(
                kind=kind,
                group=group,
                count=len(members),
                seconds=float(trace.duration_s[index].sum()),
                exposed_s=length(minus(spans, computing)),
                nbytes=sum(message_bytes(trace.details.get(event, {})) for event in members),
            )
        )
    return tuple(sorted(rows, key=lambda row: (-row.exposed_s, -row.seconds, row.kind)))


def collective_events(trace: Trace, step: StepWindow) -> Iterator[tuple[str, str, float]]:
    """(kind, group, seconds) of the step's collectives, in the order in which the rank came to them."""
    work = trace.of(*DEVICE_WORK) if trace.on_device else _host_work(trace)
    inside = work[(trace.start_s[work] < step.end_s) & (trace.end_s[work] > step.start_s)]
    kinds = _kinds(trace, inside)
    for event in inside.tolist():
        if kinds[event][1] != "communication":
            continue
        if not trace.on_device and any(kinds.get(a, ("", ""))[1] == "communication" for a in trace.ancestors(event)):
            continue
        details = trace.details.get(event, {})
        group = str(details.get("Process Group Name", "")) or str(details.get("Group size", ""))
        yield kinds[event][0], group, float(trace.duration_s[event])


def _peak(trace: Trace, step: StepWindow) -> float | None:
    seen = trace.allocations
    if seen is None:
        return None
    mine = (seen.on_device == trace.on_device) & (seen.time_s >= step.start_s) & (seen.time_s < step.end_s)
    return float(seen.allocated_bytes[mine].max()) if mine.any() else None
