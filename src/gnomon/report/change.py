"""What a change of a job does: two predictions next to each other, field by field, as text, JSON and annotations.

`change_of(before, after)` compares them; `change_text` is for people, `to_mapping` for programs, `annotation_lines` for
GitHub, `summary` its step summary in Markdown. Leaves out reading the jobs (`cli.diff`) and measured steps
(`report.difference`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gnomon.prediction import Prediction
from gnomon.report.prediction import WORDS
from gnomon.report.tables import Column, memory_unit, number, signed, table, wrapped
from gnomon.units import show_bytes, show_seconds

LEAST = 0.001
"""Share below which two figures are said to be equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A field of the plan, the workload, the machines or the program that differs."""

    name: str
    """`plan.mesh.tp`."""
    before: str
    """Its value before, as text."""
    after: str
    """Its value after, as text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPart:
    """A part of the busiest rank's step."""

    name: str
    """Part of the breakdown."""
    before_s: float
    """Seconds before; 0 where there is no such part."""
    after_s: float
    """Seconds after; 0 where there is no such part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two."""

    source: str
    """What it was read from."""
    step_s: float
    """Seconds of a step."""
    per_s: float
    """Tokens (samples, of a model without sequences) a second of all devices."""
    per_s_per_device: float
    """The same of one device."""
    counted: str
    """What is counted a second: `tokens` or `samples`."""
    mfu: float
    """Model FLOPs over the dense peak of the compute dtype, as in `Prediction`."""
    peak_bytes: int
    """Of the rank with the least room."""
    rank: int
    """The first of the ranks with least room."""
    limit_bytes: int
    """Bytes of memory of that rank's device."""
    fits: bool
    """Whether every rank's peak is within its device's memory."""
    devices: int
    """Devices of the plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobChange:
    """A job before and after a change: both predictions and what differs between them."""

    before: Side
    """The job before."""
    after: Side
    """The job after."""
    fields: tuple[Field, ...]
    """What differs in what was asked."""
    parts: tuple[StepPart, ...]
    """Largest change first."""
    ranks: tuple[tuple[int, int, int], ...]
    """(rank, peak bytes before, after) of ranks that both have, where it changed, most first."""

    @property
    def speed(self) -> float:
        """Share of the speed that is won, negative if it is lost: by tokens (samples) a second of all devices."""
        # Throughput and not step time, as the batch may have changed.
        return self.after.per_s / self.before.per_s - 1

    @property
    def memory_bytes(self) -> int:
        """How much the peak grows on the rank where it grows most; where the two jobs have other ranks, on the
        tightest."""
        if self.ranks:
            return max(after - before for _, before, after in self.ranks)
        return self.after.peak_bytes - self.before.peak_bytes

    @property
    def sentence(self) -> str:
        """`-3.1 % tokens/s; rank 0 +4.2 GiB, no longer fits`."""
        speed = f"{self.speed:+.1%}".replace("%", " %") if abs(self.speed) >= LEAST else "the same"
        words = [f"{speed} {self.after.counted}/s"]
        if self.ranks:
            rank, before, after = max(self.ranks, key=lambda row: abs(row[2] - row[1]))
            sign = "+" if after >= before else "-"
            memory = f"rank {rank} {sign}{show_bytes(abs(after - before), 3)}"
        else:
            memory = "the same memory"
        if self.before.fits and not self.after.fits:
            memory += ", no longer fits"
        elif self.after.fits and not self.before.fits:
            memory += ", now fits"
        elif not self.after.fits:
            memory += ", neither fits"
        return "; ".join([*words, memory])

    def to_mapping(self) -> dict[str, Any]:
        """Plain values for JSON."""

        def side(of: Side) -> dict[str, Any]:
            return {name: getattr(of, name) for name in Side.__dataclass_fields__}

        return {
            "schema": "gnomon.job_change/1",
            "sentence": self.sentence,
            "speed": self.speed,
            "memory_bytes": self.memory_bytes,
            "before": side(self.before),
            "after": side(self.after),
            "fields": [{"name": f.name, "before": f.before, "after": f.after} for f in self.fields],
            "parts": [{"name": p.name, "s": [p.before_s, p.after_s]} for p in self.parts],
            "ranks": [{"rank": rank, "peak_bytes": [before, after]} for rank, before, after in self.ranks],
        }


def change_of(before: Prediction, after: Prediction, sources: tuple[str, str]) -> JobChange:
    """Compares two predictions of anything: other models, machines and programs too."""
    parts = []
    for name in dict.fromkeys((*before.breakdown, *after.breakdown)):
        a, b = before.breakdown.get(name, 0.0), after.breakdown.get(name, 0.0)
        # Of the step and not of the part: a part that doubles may still be nothing.
        if abs(b - a) > LEAST * before.step_s:
            parts.append(StepPart(name=name, before_s=a, after_s=b))
    return JobChange(
        before=_side(before, sources[0]),
        after=_side(after, sources[1]),
        fields=tuple(_fields(before, after)),
        parts=tuple(sorted(parts, key=lambda part: (-abs(part.after_s - part.before_s), part.name))),
        ranks=tuple(_ranks(before, after)),
    )


def _side(of: Prediction, source: str) -> Side:
    devices = of.plan.num_devices
    tight = of.tightest
    return Side(
        source=source,
        step_s=of.step_s,
        per_s=of.tokens_per_s_per_device * devices,
        per_s_per_device=of.tokens_per_s_per_device,
        counted=of.counted,
        mfu=of.mfu,
        peak_bytes=tight.peak_bytes,
        rank=tight.ranks[0],
        limit_bytes=tight.limit_bytes,
        fits=of.fits,
        devices=devices,
    )


def _ranks(before: Prediction, after: Prediction) -> list[tuple[int, int, int]]:
    """One rank of each pair of classes whose peaks differ; a class is the ranks that do the same."""
    peaks = [{rank: m.peak_bytes for m in of.memory for rank in m.ranks} for of in (before, after)]
    seen: set[tuple[int, int]] = set()
    out = []
    for rank in sorted(peaks[0].keys() & peaks[1].keys()):
        pair = peaks[0][rank], peaks[1][rank]
        # Ranks that changed alike are one row, however classes are cut before and after.
        if pair not in seen and abs(pair[1] - pair[0]) > LEAST * pair[0]:
            seen.add(pair)
            out.append((rank, *pair))
    return sorted(out, key=lambda row: (-abs(row[2] - row[1]), row[0]))


def _fields(before: Prediction, after: Prediction) -> Iterator[Field]:
    def what_differs(of: Prediction) -> dict[str, str]:
        pricing = of.pricing
        values: dict[str, object] = {
            "model": f"{of.model}, {pricing.graph.num_parameters() + pricing.graph.num_frozen():,} parameters",
            "machines": of.cluster,
            "program": f"{pricing.stack.name} {pricing.stack.version}".strip(),
            "plan": asdict(of.plan),
            "workload": asdict(of.workload),
        }
        return dict(_flat("", values))

    one, two = what_differs(before), what_differs(after)
    for name in dict.fromkeys((*one, *two)):
        a, b = one.get(name, "-"), two.get(name, "-")
        if a != b:
            yield Field(name=name, before=a, after=b)


def _flat(path: str, value: object) -> Iterator[tuple[str, str]]:
    """`plan.mesh.tp` -> `4`, of every leaf."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(f"{path}.{key}".removeprefix("."), inner)
    elif isinstance(value, list | tuple) and any(isinstance(inner, Mapping) for inner in value):
        for i, inner in enumerate(value):
            yield from _flat(f"{path}[{i}]", inner)
    else:
        yield path, _text(value)


def _text(value: object) -> str:
    # As files spell it: what differs can be copied into one.
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def change_text(change: JobChange, limits: Sequence[str] = ()) -> tuple[str, ...]:
    """Writes the lines: the sentence, the figures, what was changed, where time and memory went. limits: what is
    over its limit, a sentence each."""
    lines = [change.sentence, "", *figures_text(change)]
    if change.fields:
        columns = (Column(name="what differs", align="left"), Column(name="before", align="left"), Column(name="after"))
        lines += ["", *table(columns, [(f.name, f.before, f.after) for f in change.fields])]
    else:
        lines += ["", "the two are the same job"]
    if change.parts:
        rows = [
            (WORDS.get(p.name, p.name), number(p.before_s), number(p.after_s), signed(p.after_s - p.before_s))
            for p in change.parts
        ]
        names = ("before", "after", "change")
        lines += ["", *table((Column(name="busiest rank, s", align="left"), *(Column(name=n) for n in names)), rows)]
    if len(change.ranks) > 1:
        unit, scale = memory_unit(max(b for _, _, b in change.ranks))
        rows = [
            (f"rank {r}", number(a / scale), number(b / scale), signed((b - a) / scale)) for r, a, b in change.ranks
        ]
        names = ("before", "after", "change")
        lines += ["", *table((Column(name=f"peak {unit}", align="left"), *(Column(name=n) for n in names)), rows)]
    for text in limits:
        lines += ["", *wrapped(text, indent="", bullet="over the limit: ")]
    return tuple(lines)


def figures_text(change: JobChange) -> tuple[str, ...]:
    """Step, speed and memory before and after, a row each."""
    one, two = change.before, change.after
    columns = (Column(name="", align="left"), Column(name="before"), Column(name="after"), Column(name="change"))
    rows = [
        ("step", show_seconds(one.step_s), show_seconds(two.step_s), _percent(one.step_s, two.step_s)),
        (
            f"{two.counted}/s per device",
            number(one.per_s_per_device, 4),
            number(two.per_s_per_device, 4),
            _percent(one.per_s_per_device, two.per_s_per_device),
        ),
        ("MFU %", f"{one.mfu:.1%}".rstrip("%"), f"{two.mfu:.1%}".rstrip("%"), _percent(one.mfu, two.mfu)),
        (
            "peak of the tightest rank",
            show_bytes(one.peak_bytes),
            show_bytes(two.peak_bytes),
            _percent(one.peak_bytes, two.peak_bytes),
        ),
        ("of", show_bytes(one.limit_bytes), show_bytes(two.limit_bytes), ""),
    ]
    if one.devices != two.devices:
        rows.append(("devices", str(one.devices), str(two.devices), _percent(one.devices, two.devices)))
    return table(columns, rows)


def _percent(before: float, after: float) -> str:
    if not before:
        return ""
    share = after / before - 1
    return "equal" if abs(share) < LEAST else f"{share:+.1%}".replace("%", " %")


def annotation_lines(change: JobChange, limits: Sequence[str]) -> tuple[str, ...]:
    """GitHub's workflow commands: an error for each limit that is passed, else one notice."""
    # A source with a colon is a git revision and no file of the checkout, which GitHub could link to.
    file = f"file={_property(change.after.source)}," if ":" not in change.after.source else ""
    title = "title=gnomon diff"
    if not limits:
        return (f"::notice {file}{title}::{_message(change.sentence)}",)
    return tuple(f"::error {file}{title}::{_message(f'{change.sentence}. {text}')}" for text in limits)


def _message(text: str) -> str:
    """Escapes text for a workflow command as GitHub's runner reads it: per cent signs and line ends are escaped."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _message(text).replace(":", "%3A").replace(",", "%2C")


def summary(change: JobChange, limits: Sequence[str]) -> str:
    """The change as Markdown, to be appended to `$GITHUB_STEP_SUMMARY`."""
    # A fence in a name would end the block.
    text = "\n".join(change_text(change, limits)[2:]).replace("```", "'''")
    return f"### {change.before.source} → {change.after.source}: {change.sentence}\n\n```text\n{text}\n```\n"
