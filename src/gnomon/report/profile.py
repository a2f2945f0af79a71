"""What `gnomon compare` says of a recorded trace: where its step went, what held it up, next to what was predicted.

`profile_of(traces, snapshots)` puts the ranks' accounts together, `against(profile, expected)` lays a predicted step
next to the slowest rank part by part; both return frozen values whose `to_mapping` is plain, and `profile_text` prints
them. Leaves out reading files (`formats.kineto`) and making the prediction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gnomon.prediction import Prediction
from gnomon.profile import (
    PARTS,
    Account,
    Finding,
    Lateness,
    Snapshot,
    Trace,
    account,
    find_steps,
    findings,
    match_ranks,
)
from gnomon.report.tables import Column, memory_unit, number, percent, signed, table, wrapped
from gnomon.timeline import Timeline, breakdown, peaks
from gnomon.units import show_seconds

ROWS = 10
"""Kinds of kernels shown; the rest is one row."""

LEAST = 0.001
"""Share of the step below which a part has no row."""

PART_WORDS: Mapping[str, str] = {
    "compute": "computing",
    "exposed communication": "exposed communication",
    "copies": "copies to and from the host",
    "data loading": "waiting for data",
    "allocator": "allocating and freeing memory",
    "synchronisation": "after the host waited for the device",
    "compilation": "compiling",
    "host": "waiting for the host",
    "waiting": "waiting for other streams or ranks",
}
"""Part of a measured step -> what people call it."""

_CAUSES: Mapping[str, str] = {
    "exposed communication": "exposed communication",
    "copies": "copies between host and device",
    "data loading": "data loading",
    "allocator": "allocator retries",
    "synchronisation": "synchronisation of host and device",
    "compilation": "compilation within the step",
}
"""Part -> the finding that explains it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The recording of a job."""

    sources: tuple[str, ...]
    """The files of the traces."""
    device: str
    """Name of the device; empty where no trace tells it."""
    world_size: int
    """Ranks of the job, as the traces say; there may be traces of fewer."""
    how: str
    """How its steps were found."""
    step_s: tuple[float, ...]
    """Seconds of all steps seen on the slowest rank."""
    accounts: tuple[Account, ...]
    """Of each rank's typical step."""
    lateness: tuple[Lateness, ...]
    """How long each rank waited for others; empty where no collective is seen by two ranks."""
    findings: tuple[Finding, ...]
    """Causes of lost time, the dearest first."""
    snapshots: tuple[Snapshot, ...]
    """Of the allocators' memory, where files of them were given."""

    @property
    def slowest(self) -> Account:
        """The rank that waits least in exposed communication: it sets the pace."""
        # All ranks of a synchronous step take equally long; the one that others wait for is the one that never waits.
        return min(self.accounts, key=lambda a: (a.parts["exposed communication"], -a.parts["compute"], a.rank))

    def to_mapping(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "schema": "gnomon.profile/1",
            "sources": list(self.sources),
            "device": self.device,
            "world_size": self.world_size,
            "steps": {"how": self.how, "seconds": list(self.step_s)},
            "ranks": [_account_mapping(a) for a in self.accounts],
            "lateness": [
                {"rank": row.rank, "waited_s": row.waited_s, "last": row.last, "matched": row.matched}
                for row in self.lateness
            ],
            "findings": [
                {
                    "name": f.name,
                    "rank": f.rank,
                    "seconds": f.seconds,
                    "share": f.share,
                    "evidence": f.evidence,
                    "advice": f.advice,
                }
                for f in self.findings
            ],
            "snapshots": [
                {
                    "source": s.source,
                    "device": s.device,
                    "peak_bytes": s.peak_bytes,
                    "reserved_bytes": s.reserved_bytes,
                    "retries": s.retries,
                    "out_of_memory": s.out_of_memory,
                    "held": [{"class": h.name, "bytes": h.nbytes, "largest": h.largest} for h in s.classes],
                }
                for s in self.snapshots
            ],
        }


def _account_mapping(a: Account) -> dict[str, Any]:
    return {
        "rank": a.rank,
        "step": a.step.label,
        "step_s": a.step.seconds,
        "parts_s": dict(a.parts),
        "phases_s": dict(a.phases),
        "kernels": a.kernels,
        "tiny_kernels": a.tiny,
        "peak_bytes": a.peak_bytes,
        "kinds": [
            {"kind": k.kind, "role": k.role, "count": k.count, "seconds": k.seconds, "largest": k.largest}
            for k in a.kinds
        ],
        "collectives": [
            {
                "kind": c.kind,
                "group": c.group,
                "count": c.count,
                "seconds": c.seconds,
                "exposed_s": c.exposed_s,
                "bytes": c.nbytes,
            }
            for c in a.collectives
        ],
    }


def profile_of(traces: Sequence[Trace], snapshots: Sequence[Snapshot] = ()) -> Profile:
    """The typical step of every rank, and what held the job up."""
    steps = [find_steps(trace) for trace in traces]
    accounts = tuple(account(trace, each.typical) for trace, each in zip(traces, steps, strict=True))
    return Profile(
        sources=tuple(trace.source for trace in traces),
        device=next((trace.device for trace in traces if trace.device), ""),
        world_size=max((trace.world_size for trace in traces), default=1),
        how=steps[0].how if steps else "no trace",
        # Ranks step together, so the windows of any of them will do.
        step_s=tuple(window.seconds for window in steps[0].windows) if steps else (),
        accounts=accounts,
        lateness=match_ranks(traces, accounts),
        findings=findings(traces, accounts, snapshots),
        snapshots=tuple(snapshots),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedParts:
    """A predicted step in the parts of a measured one."""

    source: str
    """What predicted it."""
    step_s: float
    """Seconds of the predicted step."""
    parts: Mapping[str, float]
    """Part -> seconds."""
    peak_bytes: float | None
    """Bytes at the predicted peak; None where it is not told."""
    bytes_by_class: Mapping[str, float]
    """Class of memory -> bytes at the peak of the rank that holds most; empty where it is not told."""


def expected_of(prediction: Prediction, source: str) -> ExpectedParts:
    """What a profile is compared with, taken from a prediction: its busiest rank's step and its tightest rank's
    memory."""
    parts = dict.fromkeys(PARTS, 0.0)
    for name, seconds in prediction.breakdown.items():
        parts[_part_of(name)] += seconds
    # A recording's allocator counts tensors, so their bytes are compared, not those that the device shows as taken.
    rank = prediction.tightest
    return ExpectedParts(
        source=source,
        step_s=prediction.step_s,
        parts=parts,
        peak_bytes=rank.allocated_bytes,
        bytes_by_class=dict(rank.by_class),
    )


def _part_of(name: str) -> str:
    """Part of a predicted step (`gnomon.prediction.breakdown.step_parts`) -> part of a measured one."""
    if name.endswith(" communication"):
        return "exposed communication"
    return {"launch": "host", "bubble": "waiting", "ahead": "waiting", "offload": "copies"}.get(name, "compute")


def expected_of_timeline(timeline: Timeline, source: str) -> ExpectedParts:
    """What a profile is compared with, taken from a Timeline's busiest worker."""
    spent = breakdown(timeline)
    # As the slowest rank of a recording: the one that has least time to spare.
    worker = min(spent.workers, key=spent.idle_s)
    parts = dict.fromkeys(PARTS, 0.0)
    words = {"communication": "exposed communication", "copy": "copies", "host": "host"}
    for share in spent.of(worker):
        parts["compute" if share.busy else words.get(share.part, "waiting")] += share.seconds
    peak_bytes = max((peak.bytes for peak in peaks(timeline)), default=None) if timeline.memory is not None else None
    return ExpectedParts(source=source, step_s=timeline.step_s, parts=parts, peak_bytes=peak_bytes, bytes_by_class={})


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """One part in both."""

    part: str
    """Part of the step."""
    expected_s: float
    """Seconds predicted."""
    measured_s: float
    """Seconds measured."""
    cause: str
    """A finding that explains it, with its advice; empty where none does."""

    @property
    def seconds(self) -> float:
        """Seconds that were measured beyond those expected."""
        return self.measured_s - self.expected_s


def against(profile: Profile, expected: ExpectedParts) -> tuple[Gap, ...]:
    """Part by part, the largest gap first. They add up to the difference of the steps."""
    rank = profile.slowest
    causes = {finding.name: finding for finding in profile.findings}
    gaps = []
    for part in PARTS:
        # A finding explains only time that was not expected; a part that took less than predicted needs no excuse.
        measured, predicted = rank.parts[part], expected.parts[part]
        cause = causes.get(_CAUSES.get(part, "")) if measured > predicted else None
        if part == "host" and measured > predicted:
            cause = causes.get("tiny kernels") or causes.get("host too slow")
        if part == "compute" and measured > predicted:
            cause = causes.get("fp32 matmuls without tensor cores") or causes.get("optimizer not fused")
        # Whoever waits for a slow rank sees it as a long collective: the cause is not the network.
        if part == "exposed communication" and "slow rank" in causes:
            cause = causes["slow rank"]
        text = f"{cause.evidence}; {cause.advice}" if cause is not None else ""
        gaps.append(Gap(part=part, expected_s=predicted, measured_s=measured, cause=text))
    return tuple(sorted(gaps, key=lambda gap: (-abs(gap.seconds), gap.part)))


def profile_text(profile: Profile, expected: ExpectedParts | None = None) -> tuple[str, ...]:
    """A profile as lines of text: the step, where it went (next to what was predicted), kernels, collectives, memory,
    what held it up."""
    lines: list[str] = []
    if profile.accounts:
        lines += _heading(profile, expected)
        lines += ["", *_parts(profile, expected)]
        lines += ["", *_kinds(profile.slowest)]
        if profile.slowest.collectives:
            lines += ["", *_collective_rows(profile.slowest)]
        if len(profile.accounts) > 1:
            lines += ["", *_rank_rows(profile)]
    for snapshot in profile.snapshots:
        lines += [*([""] if lines else []), *_memory(snapshot, expected)]
    if profile.accounts:
        lines += ["", *_findings(profile)]
    return tuple(lines)


def _heading(profile: Profile, expected: ExpectedParts | None) -> list[str]:
    rank = profile.slowest
    where = profile.device or ("a device" if rank.on_device else "CPU")
    low, high = (show_seconds(s, 3) for s in (min(profile.step_s), max(profile.step_s)))
    seen = f"{len(profile.step_s)} seen, {low} to {high}" if len(profile.step_s) > 1 else "one seen"
    of = f"rank {rank.rank} of {max(profile.world_size, len(profile.accounts))}"
    out = [
        *wrapped(f"step: {show_seconds(rank.step.seconds, 3)} measured ({rank.step.label}, {of}, {where})", indent="")
    ]
    if expected is not None:
        share = expected.step_s / rank.step.seconds - 1 if rank.step.seconds else 0.0
        word = "equal" if abs(share) < LEAST else f"{abs(share):.1%} too {'short' if share < 0 else 'long'}"
        out += wrapped(f"{show_seconds(expected.step_s, 3)} predicted ({expected.source}): {word}", indent="      ")
    return [*out, *wrapped(f"{profile.how}; {seen}", indent="")]


def _parts(profile: Profile, expected: ExpectedParts | None) -> tuple[str, ...]:
    rank = profile.slowest
    whole = rank.step.seconds
    if expected is None:
        shown = [(part, rank.parts[part]) for part in PARTS if rank.parts[part] >= LEAST * whole]
        shown.sort(key=lambda row: -row[1])
        rows = [(PART_WORDS[part], number(s * 1e3), percent(s / whole)) for part, s in shown]
        rows.append(("step", number(whole * 1e3), "100.0"))
        return table((Column(name="where the step goes", align="left"), Column(name="ms"), Column(name="%")), rows)
    gaps = against(profile, expected)
    shown_gaps = [gap for gap in gaps if max(gap.expected_s, gap.measured_s) >= LEAST * whole]
    compared = [
        (PART_WORDS[gap.part], number(gap.expected_s * 1e3), number(gap.measured_s * 1e3), signed(gap.seconds * 1e3))
        for gap in shown_gaps
    ]
    total = whole - expected.step_s
    compared.append(("step", number(expected.step_s * 1e3), number(whole * 1e3), signed(total * 1e3)))
    names = ("predicted", "measured", "difference")
    lines = list(
        table((Column(name="where the step goes, ms", align="left"), *(Column(name=name) for name in names)), compared)
    )
    for gap in shown_gaps[:3]:
        if gap.cause and gap.seconds > 0.02 * whole:
            lines += ["", *wrapped(f"{PART_WORDS[gap.part]}: {gap.cause}", indent="", bullet="likely cause of ")]
    return tuple(lines)


def _kinds(rank: Account) -> tuple[str, ...]:
    shown, rest = rank.kinds[:ROWS], rank.kinds[ROWS:]
    rows = [(k.kind, str(k.count), number(k.seconds * 1e3), _short(k.largest)) for k in shown]
    if rest:
        count, seconds = sum(k.count for k in rest), sum(k.seconds for k in rest)
        rows.append((f"{len(rest)} more", str(count), number(seconds * 1e3), ""))
    heading = "kernels" if rank.on_device else "ops"
    columns = (
        Column(name=heading, align="left"),
        Column(name="count"),
        Column(name="ms"),
        Column(name="most time in", align="left"),
    )
    return table(columns, rows)


def _short(name: str) -> str:
    """A kernel's name without its template's arguments."""
    # CUPTI gives the demangled C++ signature, of which only the function's own name tells kernels apart at a glance.
    bare = name.removeprefix("void ").replace("at::native::", "").replace("(anonymous namespace)::", "")
    return bare.split("<", 1)[0].split("(", 1)[0] or name[:40]


def _collective_rows(rank: Account) -> tuple[str, ...]:
    columns = (
        Column(name="collectives", align="left"),
        Column(name="among", align="left"),
        Column(name="count"),
        Column(name="MiB"),
        Column(name="ms"),
        Column(name="exposed ms"),
    )
    rows = [
        (
            c.kind,
            c.group or "-",
            str(c.count),
            number(c.nbytes / 2**20) if c.nbytes else "-",
            number(c.seconds * 1e3),
            number(c.exposed_s * 1e3),
        )
        for c in rank.collectives
    ]
    return table(columns, rows)


def _rank_rows(profile: Profile) -> tuple[str, ...]:
    late = {row.rank: row for row in profile.lateness}
    rows = []
    for a in profile.accounts[: 2 * ROWS]:
        row = late.get(a.rank)
        rows.append(
            (
                str(a.rank),
                number(a.step.seconds * 1e3),
                number(a.parts["compute"] * 1e3),
                number(a.parts["exposed communication"] * 1e3),
                number(row.waited_s * 1e3) if row else "-",
                f"{row.last} of {row.matched}" if row else "-",
            )
        )
    names = ("rank", "step ms", "computing", "exposed communication", "waited for others", "came last")
    return table([Column(name=name) for name in names], rows)


def _memory(snapshot: Snapshot, expected: ExpectedParts | None) -> tuple[str, ...]:
    unit, scale = memory_unit(snapshot.peak_bytes)
    rows = [(h.name, number(h.nbytes / scale), h.largest or "-") for h in snapshot.classes]
    rows.append(("peak allocated", number(snapshot.peak_bytes / scale), ""))
    if snapshot.reserved_bytes:
        rows.append(("reserved at the end", number(snapshot.reserved_bytes / scale), ""))
    if expected is not None and expected.peak_bytes:
        rows.append(("peak allocated, predicted", number(expected.peak_bytes / scale), ""))
    columns = (
        Column(name=f"memory of device {snapshot.device}", align="left"),
        Column(name=unit),
        Column(name="largest from", align="left"),
    )
    return table(columns, rows)


def _findings(profile: Profile) -> list[str]:
    if not profile.findings:
        return ["nothing that is known to hold a step up costs 3 % of it or more"]
    out = ["what holds the step up"]
    for i, finding in enumerate(profile.findings, 1):
        share = f", {finding.share:.0%} of the step" if finding.seconds else ""
        ranks = f" (rank {finding.rank})" if len(profile.accounts) > 1 else ""
        text = f"{finding.name}{ranks}{share}: {finding.evidence}. To do: {finding.advice}"
        out += wrapped(text, bullet=f"{i}. ")
    return out
