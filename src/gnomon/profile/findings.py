"""What held a step up, by name, with the seconds it cost, the evidence, and what to do.

`findings(traces, accounts)` looks for a dozen known causes; each is one function that returns a `Finding` or nothing.
Seconds are what the step would lose without the cause, at most. Sorted by them. A cause is named only from SHARE of the
step on, so a clean trace has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gnomon.profile.account import TINY_S, Account, host_calls, named_events
from gnomon.profile.intervals import clip, length
from gnomon.profile.ranks import Lateness, match_ranks
from gnomon.profile.snapshot import Snapshot
from gnomon.profile.trace import COPY, CPU_OP, DEVICE_WORK, LAUNCH, MARK, Trace

SHARE = 0.03
"""Of the step; less is not worth a line."""

SLOW_RANK = 0.25
"""A rank is slow if it waits in collectives for at most this share of what the others wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One cause of lost time, with the seconds that it costs a step and what would help."""

    name: str
    """`slow rank`, `data loading` …"""
    rank: int
    """The rank that it was seen on; the number of the device, of what a memory snapshot shows."""
    seconds: float
    """Of the step."""
    share: float
    """Of the step."""
    evidence: str
    """What was seen, with counts."""
    advice: str
    """What to do."""


def findings(
    traces: Sequence[Trace], accounts: Sequence[Account], snapshots: Sequence[Snapshot] = ()
) -> tuple[Finding, ...]:
    """Looks for every known cause on all ranks and returns those found, most seconds first. A cause seen on several
    ranks is reported for the rank that it costs most."""
    found: dict[str, Finding] = {}
    for trace, account in zip(traces, accounts, strict=True):
        for look in _LOOKS:
            seen = look(trace, account)
            if seen is not None and seen.share >= SHARE:
                if seen.name not in found or seen.seconds > found[seen.name].seconds:
                    found[seen.name] = seen
    slow = _slow_rank(accounts, match_ranks(traces, accounts))
    if slow is not None:
        found[slow.name] = slow
        exposed = found.get("exposed communication")
        if exposed is not None:
            # What waits for the slow rank is not the network's.
            remaining = exposed.seconds - slow.seconds
            share = exposed.share * remaining / exposed.seconds
            del found["exposed communication"]
            if share >= SHARE:
                found[exposed.name] = replace(exposed, seconds=remaining, share=share)
    for seen in _memory(snapshots):
        # A snapshot has no seconds: what a trace shows of the same cause goes before it.
        found.setdefault(seen.name, seen)
    return tuple(sorted(found.values(), key=lambda finding: (-finding.seconds, finding.name)))


def _of(account: Account, name: str, seconds: float, evidence: str, advice: str) -> Finding:
    whole = account.step.seconds
    return Finding(
        name=name,
        rank=account.rank,
        seconds=seconds,
        share=seconds / whole if whole else 0.0,
        evidence=evidence,
        advice=advice,
    )


def _data_loading(trace: Trace, account: Account) -> Finding | None:
    return _of(
        account,
        "data loading",
        account.parts["data loading"],
        "the next batch is waited for in DataLoader.__next__ while nothing computes",
        "more workers (num_workers=, prefetch_factor=, persistent_workers=True), or tokenize before training",
    )


def _synchronisation(trace: Trace, account: Account) -> Finding | None:
    """Waits of the host for the device, whose cost is the empty queue afterwards; and values read back."""
    items = _inside(trace, account, ("aten::_local_scalar_dense", "aten::item "), (CPU_OP,))
    reads = _copies(trace, account, "DtoH")
    if trace.on_device:
        seconds = account.parts["synchronisation"]
        evidence = f"{reads} copies from the device and {items} reads of a value (.item(), .cpu(), print) in the step"
    else:
        return None
    return _of(
        account,
        "synchronisation of host and device",
        seconds,
        evidence,
        "read losses every n steps, keep masks on the device, .to(non_blocking=True) from pinned memory",
    )


def _host_copies(trace: Trace, account: Account) -> Finding | None:
    pageable = _copies(trace, account, "Pageable")
    return _of(
        account,
        "copies between host and device",
        account.parts["copies"],
        f"{_copies(trace, account, 'HtoD')} copies to the device and {_copies(trace, account, 'DtoH')} back, "
        f"{pageable} of them from pageable memory; nothing computes meanwhile",
        "pin_memory=True and non_blocking=True, or issue the copy for the next batch on a stream of its own",
    )


def _tiny_kernels(trace: Trace, account: Account) -> Finding | None:
    """Many kernels that are shorter than their launch: the host cannot keep up."""
    if not account.kernels or account.tiny < 0.5 * account.kernels:
        return None
    # Long gaps are the slow host's (`_late_host`).
    lost = account.parts["host"] - account.long_gaps_s
    if not trace.on_device:
        # On a CPU an op's own dispatch stands for a launch: what tiny ops cost is their time and the gaps between.
        work = [row for row in account.kinds if row.kind == "views and bookkeeping"]
        lost += sum(row.seconds for row in work)
    top = max(account.kinds, key=lambda row: row.count)
    return _of(
        account,
        "tiny kernels",
        lost,
        f"{account.tiny} of {account.kernels} kernels take less than {TINY_S * 1e6:.0f} us (most: {top.kind}, "
        f"{top.count}), and between them nothing runs",
        "torch.compile (mode='reduce-overhead' records CUDA graphs), a larger micro batch, a fused optimizer",
    )


def _late_host(trace: Trace, account: Account) -> Finding | None:
    # Short gaps between many short kernels are said as tiny kernels.
    tiny = bool(account.kernels) and account.tiny >= 0.5 * account.kernels
    return _of(
        account,
        "host too slow",
        account.long_gaps_s if tiny else account.parts["host"],
        "the next kernel is issued after the one before has ended: Python, hooks, logging or other processes on the "
        "cores hold the host",
        "profile the host (with_stack=True), take work out of the step, torch.compile; on shared cores, pin them",
    )


def _allocator(trace: Trace, account: Account) -> Finding | None:
    names = ("cudaMalloc", "cudaFree", "hipMalloc", "hipFree", "cudaHostAlloc")
    calls = _inside(trace, account, names, (LAUNCH,))
    seconds = length(
        clip(host_calls(trace, names, (LAUNCH,)), account.step.start_s, account.step.end_s)
    ) if calls else 0.0  # fmt: skip
    return _of(
        account,
        "allocator retries",
        max(seconds, account.parts["allocator"]),
        f"{calls} calls of cudaMalloc and cudaFree within a step that should reuse what it has",
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, a smaller micro batch, or recomputation: memory is full",
    )


def _compiling(trace: Trace, account: Account) -> Finding | None:
    return _of(
        account,
        "compilation within the step",
        account.parts["compilation"],
        "torch.compile compiles in this step: shapes or guards change",
        "mark_dynamic or pad the length that changes; TORCH_LOGS=recompiles names the guard",
    )


def _communication(trace: Trace, account: Account) -> Finding | None:
    if not account.collectives:
        return None
    top = account.collectives[0]
    size = f", {top.nbytes / 2**20:.4g} MiB" if top.nbytes else ""
    return _of(
        account,
        "exposed communication",
        account.parts["exposed communication"],
        f"most in {top.kind} ({top.count} a step{size}), while nothing computes",
        "overlap it with the backward (buckets, prefetch), use fewer ranks on the slow link, or send less",
    )


def _plain_optimizer(trace: Trace, account: Account) -> Finding | None:
    """An update parameter by parameter where a fused one would be a few kernels."""
    if not account.phases or any(row.kind == "optimizer" for row in account.kinds):
        return None
    # The host's time in the update is lost too where it is what the ops wait for.
    update = length(clip(host_calls(trace, ("Optimizer.step#",), (MARK,)), account.step.start_s, account.step.end_s))
    return _of(
        account,
        "optimizer not fused",
        account.phases["optimizer"] if trace.on_device else update,
        "the update runs as separate elementwise kernels for each parameter",
        "fused=True (or foreach=True) of torch.optim",
    )


def _fp32_matmuls(trace: Trace, account: Account) -> Finding | None:
    """Matmuls of a GPU that do not use its tensor cores, by the names cuBLAS and CUTLASS give them."""
    if not trace.on_device:
        return None
    step, seconds, count = account.step, 0.0, 0
    plain = np.array([_is_plain_fp32(name) for name in trace.names], np.bool_)
    work = trace.of(*DEVICE_WORK)
    for event in work[plain[trace.name[work]]].tolist():
        if step.start_s <= trace.start_s[event] < step.end_s:
            seconds += float(trace.duration_s[event])
            count += 1
    return _of(
        account,
        "fp32 matmuls without tensor cores",
        seconds,
        f"{count} matmuls in plain fp32 (sgemm)",
        "bf16 autocast, or torch.set_float32_matmul_precision('high') for TF32",
    )


def _is_plain_fp32(name: str) -> bool:
    lower = name.lower()
    return "sgemm" in lower and "tensorop" not in lower and "tf32" not in lower and "1688" not in lower


def _slow_rank(accounts: Sequence[Account], late: Sequence[Lateness]) -> Finding | None:
    """One rank that the others wait for, collective after collective."""
    if len(late) < 2:
        return None
    # Whoever waits least in collectives is the one that comes last to them.
    slow = min(range(len(late)), key=lambda i: late[i].waited_s)
    others = [row.waited_s for i, row in enumerate(late) if i != slow]
    typical = sorted(others)[len(others) // 2]
    lost = typical - late[slow].waited_s
    if not late[slow].matched or late[slow].waited_s > SLOW_RANK * typical:
        return None
    # Buckets on the wire at once all wait for the same rank: together no longer than nothing computes.
    exposed = sorted(a.parts["exposed communication"] for i, a in enumerate(accounts) if i != slow)
    lost = min(lost, exposed[len(exposed) // 2])
    whole = accounts[slow].step.seconds
    if lost < SHARE * whole:
        return None
    computes = accounts[slow].parts["compute"]
    mean = float(np.mean([a.parts["compute"] for i, a in enumerate(accounts) if i != slow]))
    return Finding(
        name="slow rank",
        rank=accounts[slow].rank,
        seconds=lost,
        share=lost / whole if whole else 0.0,
        evidence=f"the others wait {typical * 1e3:.4g} ms a step in collectives until rank {accounts[slow].rank} "
        f"comes, and it {late[slow].waited_s * 1e3:.4g} for them; it computes {computes * 1e3:.4g} ms a step, the "
        f"others {mean * 1e3:.4g}",
        advice="look at that machine (clocks, other processes, a slow link), or give it less work",
    )


def _memory(snapshots: Sequence[Snapshot]) -> Iterator[Finding]:
    for snapshot in snapshots:
        if snapshot.out_of_memory or snapshot.retries:
            yield Finding(
                name="allocator retries",
                rank=snapshot.device,
                seconds=0.0,
                share=0.0,
                evidence=f"{snapshot.retries} segments freed in the middle of the work and "
                f"{snapshot.out_of_memory} allocations that failed",
                advice="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, a smaller micro batch, or recomputation",
            )


def _inside(trace: Trace, account: Account, names: tuple[str, ...], categories: tuple[int, ...]) -> int:
    """Number of events by name (see `named_events`) that begin in the step."""
    start = trace.start_s[named_events(trace, names, categories)]
    return int(((start >= account.step.start_s) & (start < account.step.end_s)).sum())


def _copies(trace: Trace, account: Account, part: str) -> int:
    return _inside(trace, account, (part,), (COPY,))


_LOOKS: tuple[Callable[[Trace, Account], Finding | None], ...] = (
    _data_loading,
    _synchronisation,
    _host_copies,
    _tiny_kernels,
    _late_host,
    _allocator,
    _compiling,
    _communication,
    _plain_optimizer,
    _fp32_matmuls,
)
