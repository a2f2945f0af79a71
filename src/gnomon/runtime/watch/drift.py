"""What drifts in a training loop, by name: data loading, straggler, allocator, communication, compute, update, loop.

`judge(...)` is pure: it compares the parts of each rank's recent steps with what was predicted and with the job's own
first steps, and returns a `Drift` for each part that takes longer than both chance and the prediction's band allow, the
costliest first; `memory_drift` looks at memory. Leaves out taking the times (`watch`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import median, median_low

from gnomon.prediction import Prediction
from gnomon.units import show_bytes

WORDS: Mapping[str, str] = {
    "data_s": "data loading",
    "loop_s": "loop",
    "compute_s": "compute",
    "communication_s": "communication",
    "update_s": "update",
}
"""Part of a step -> the name of its drift."""
STRAGGLER, ALLOCATOR = "straggler", "allocator"
LEAST = 0.10
"""A drift is reported if it adds at least this share to the expected step."""
BAND = 1.15
"""A part drifts from its prediction if it takes at least so many times as long, even where the prediction's band is
narrower."""
GROWN = 1.15
"""A part drifts from the job's own first steps if it takes at least so many times as long."""
LEAK_BYTES = 16 << 20
"""A leak is reported if memory has grown by at least so much over `LEAK_WINDOWS` windows, each ending above the one
before."""
LEAK_WINDOWS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Seconds of a step of one rank; they add up to it."""

    data_s: float
    """The loader, or all that the loop does before a forward where nobody says which of it loads."""
    loop_s: float = 0.0
    """The loop's own code, where `Watch.data` tells it from the loader."""
    compute_s: float
    """Forward, loss and backward, without what they wait for."""
    communication_s: float
    """Waiting for collectives and messages."""
    update_s: float
    """From the end of the backward to that of the optimizer's step: clipping too."""

    @property
    def step_s(self) -> float:
        """Seconds of all parts together."""
        return sum(getattr(self, entry.name) for entry in fields(self))

    @property
    def own_s(self) -> float:
        """Seconds of the step without waiting for other ranks."""
        return self.step_s - self.communication_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedStep:
    """What a prediction says of a step."""

    parts: Parts
    """Of the busiest rank; what it waits for others is communication."""
    high: float
    """Upper end of the band of the step, as a multiple of its middle."""
    memory_bytes: int
    """Peak of the rank with the least room."""
    high_bytes: int
    """Upper end of its band."""
    uneven: bool
    """Whether ranks have different work by the plan, as stages of a pipeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """One thing that takes longer, or more, than it should."""

    name: str
    """A value of WORDS, `straggler` or `allocator`."""
    excess_s: float
    """Seconds of a step; 0 for memory."""
    why: str
    """A sentence with the figures."""


def expected_of(prediction: Prediction) -> ExpectedStep:
    """The parts of a predicted step. Copies to the host and its update are compute."""
    sums = dict.fromkeys(WORDS, 0.0)
    for name, seconds in prediction.breakdown.items():
        waits = name.endswith("communication") or name in ("bubble", "ahead", "NORM")
        sums["communication_s" if waits else "update_s" if name == "OPT" else "compute_s"] += seconds
    plan, band = prediction.plan, prediction.band
    return ExpectedStep(
        parts=Parts(**sums),
        high=band.high_s / prediction.step_s,
        memory_bytes=prediction.tightest.peak_bytes,
        high_bytes=band.high_bytes,
        uneven=plan.mesh.pp > 1 or len(plan.stages) > 1,
    )


def typical(steps: Sequence[Parts]) -> Parts:
    """The median of each part."""
    return Parts(**{entry.name: median(getattr(step, entry.name) for step in steps) for entry in fields(Parts)})


def judge(
    now: Sequence[Parts], first: Sequence[Parts] | None = None, expected: ExpectedStep | None = None
) -> tuple[Drift, ...]:
    """Drifts, the costliest first. now: typical parts of each rank lately. first: the same of the job's first steps.

    What every rank has more of is that part's drift; what one has more of than the others is a straggler, and what the
    others then wait for it is not communication: of that, the rank that waits least tells how long it takes.
    """
    together = _together(now)
    drifts = [*_straggler(now, first, expected)]
    before = None if first is None else _together(first)
    for part, name in WORDS.items():
        drift = _part(part, name, together, before, expected)
        if drift is not None:
            drifts.append(drift)
    return tuple(sorted(drifts, key=lambda drift: -drift.excess_s))


def _together(ranks: Sequence[Parts]) -> Parts:
    least = ("data_s", "loop_s", "communication_s")
    values = {name: [getattr(rank, name) for rank in ranks] for name in WORDS}
    return Parts(**{name: min(v) if name in least else median_low(v) for name, v in values.items()})


def _part(part: str, name: str, now: Parts, before: Parts | None, expected: ExpectedStep | None) -> Drift | None:
    """One part against the first steps and against the prediction, whichever it exceeds by more."""
    takes, choices = getattr(now, part), list[tuple[float, str]]()
    if before is not None:
        was = getattr(before, part)
        if takes > GROWN * was and takes - was > LEAST * before.step_s:
            choices.append((takes - was, f"takes {_s(takes)} of a step; in the first steps it took {_s(was)}"))
    if expected is not None:
        should, step = getattr(expected.parts, part), expected.parts.step_s
        if takes > max(BAND, expected.high) * should and takes - should > LEAST * step:
            of = f"{_s(should)}, at most {_s(max(BAND, expected.high) * should)}" if should else "none"
            choices.append((takes - should, f"takes {_s(takes)} of a step; expected {of}"))
    if not choices:
        return None
    excess, why = max(choices)
    return Drift(name=name, excess_s=excess, why=why)


def _straggler(now: Sequence[Parts], first: Sequence[Parts] | None, expected: ExpectedStep | None) -> tuple[Drift, ...]:
    if len(now) < 2:
        return ()
    behind = _behind(now)
    if expected is not None and expected.uneven:
        if first is None:
            return ()
        # Stages have other work each: what counts is how much later a rank is than in its first steps.
        behind = [late - was for late, was in zip(behind, _behind(first), strict=True)]
    rank = max(range(len(now)), key=lambda r: behind[r])
    reference = expected.parts.step_s if expected is not None else median_low([r.own_s for r in now])
    if behind[rank] <= LEAST * max(reference, max(r.step_s for r in now) - behind[rank]):
        return ()
    others = _together([parts for r, parts in enumerate(now) if r != rank])
    own = [part for part in WORDS if part != "communication_s"]
    in_part = max(own, key=lambda part: getattr(now[rank], part) - getattr(others, part))
    why = f"rank {rank} takes {_s(behind[rank])} a step longer than the others, in {WORDS[in_part]}"
    return (Drift(name=STRAGGLER, excess_s=behind[rank], why=why),)


def _behind(ranks: Sequence[Parts]) -> list[float]:
    """How much longer than the middle of the others each rank works."""
    own = [rank.own_s for rank in ranks]
    return [mine - median_low(own[:r] + own[r + 1 :]) for r, mine in enumerate(own)]


def memory_drift(
    windows: Sequence[int],
    steps: int,
    *,
    retries: int = 0,
    peak: int | None = None,
    expected: ExpectedStep | None = None,
) -> Drift | None:
    """The allocator's drift, if there is one. windows: bytes at the end of each window of `steps` steps, oldest first.

    retries: times since the start that it gave its cache back and tried again. peak: of a GPU; a process's on a CPU
    holds libraries and is not compared.
    """
    why = ""
    if retries:
        why = f"memory ran out and the allocator freed its cache {retries} time{'s' if retries > 1 else ''}"
    rising = 0
    while rising < len(windows) - 1 and windows[-1 - rising] > windows[-2 - rising]:
        rising += 1
    grown = windows[-1] - windows[-1 - rising] if windows else 0
    if not why and rising >= LEAK_WINDOWS and grown >= LEAK_BYTES:
        a_step = grown / rising / steps
        why = f"memory grows by {show_bytes(int(a_step))} a step: {show_bytes(windows[-1])} now"
    if not why and peak is not None and expected is not None and peak > expected.high_bytes:
        why = (
            f"memory peaks at {show_bytes(peak)}; expected {show_bytes(expected.memory_bytes)}, at most "
            f"{show_bytes(expected.high_bytes)}"
        )
    return Drift(name=ALLOCATOR, excess_s=0.0, why=why) if why else None


def _s(seconds: float) -> str:
    return f"{seconds:.3g} s"
