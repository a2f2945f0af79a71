"""Reasons as text for people and as values for JSON: `gnomon explain`.

`reasons_text` says what to expect and what bounds the step, what the runners-up lose and where, what each change would
do, which do not fit and where, what each axis buys and sends, what other machines would change, and answers what users
ask: is the network the problem, what does a higher ZeRO stage hold, what is the least change that fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gnomon.prediction import Advice, Prediction, host_memory, traffic
from gnomon.report.planning import short_plans
from gnomon.report.prediction import WORDS, beyond_stack, describe
from gnomon.report.tables import Column, gib, number, percent, table, wrapped
from gnomon.search.questions.reasons import SHARE, Neighbour, Other, Reasons, within_share
from gnomon.units import show_seconds

_COMPUTING = ("F", "B", "I", "W")

LARGE = 0.15
"""Share of the step from which a part is named as what bounds it."""


def reasons_text(found: Reasons, *, advice: Sequence[Advice] = ()) -> tuple[str, ...]:
    """Lines of at most 80 columns."""
    prediction = found.prediction
    lines = [f"{prediction.model} on {prediction.cluster}", *wrapped(describe(prediction.plan, prediction.workload))]
    lines += beyond_stack(prediction)
    lines += ["", *wrapped(expected(prediction), indent="")]
    lines += [*wrapped(bounded_by(found), indent=""), *wrapped(prediction.verdict, indent="")]
    if prediction.plan.optimizer.offload is not None or any(r.action == "offload" for r in prediction.plan.saved.rules):
        lines += wrapped(host_line(prediction), indent="")
    for title, part in (
        ("", _runners(found)),
        ("", _able(found)),
        (f"too large, or over {SHARE:.0%} of a device: rank, moment, what it holds most of", _large(found)),
        ("cannot run", _unable(found)),
        ("what each axis buys: the step without it", _bought(found)),
        ("what a rank sends in a step", _traffic(prediction)),
        ("on other machines", _machines(found)),
        ("questions", _answers(found, advice)),
    ):
        if part:
            lines += ["", *((title,) if title else ()), *part]
    return tuple(lines)


def expected(prediction: Prediction) -> str:
    """What to expect: the step, its band, MFU."""
    band = prediction.band
    return (
        f"step {show_seconds(prediction.step_s)} ({show_seconds(band.low_s)} to {show_seconds(band.high_s)} in "
        f"{percent(band.coverage, 0)} % of cases), {number(prediction.tokens_per_s_per_device, 4)} "
        f"{prediction.counted}/s/device, MFU {percent(prediction.mfu)} %"
    )


def host_line(prediction: Prediction) -> str:
    """What a node's host memory holds of it."""
    held = host_memory(prediction)
    if held.limit_bytes is None:
        return f"host memory: {gib(held.bytes)} GiB a node at most; what the nodes have is not stated"
    word = "fits" if held.fits else "too large"
    return f"host memory {word}: {gib(held.bytes)} of {gib(held.limit_bytes)} GiB a node"


def _runners(found: Reasons) -> tuple[str, ...]:
    """The next plans of the search, and what each loses."""
    if not found.runners_up:
        return ()
    columns = (
        Column(name="runners-up of its search", align="left"),
        Column(name="step"),
        Column(name="loses %"),
        Column(name="most in", align="left"),
        Column(name="GiB"),
    )
    rows = []
    for plan, other in zip(_names(found.runners_up), found.runners_up, strict=True):
        part = WORDS.get(other.loss.part, other.loss.part.lower()).partition(" (")[0]
        where = f"{part} {show_seconds(max(other.loss.part_s, 0.0))}" if other.loss.part_s > 0 else ""
        peak = gib(other.prediction.tightest.peak_bytes)
        share = percent(other.loss.seconds / found.prediction.step_s)
        rows.append((plan, show_seconds(other.prediction.step_s), share, where, peak))
    return table(columns, rows)


def _names(others: Sequence[Other]) -> tuple[str, ...]:
    return short_plans([other.prediction.plan for other in others])


def _large(found: Reasons) -> tuple[str, ...]:
    """Faster plans of the search, and neighbours, that do not fit: on which rank, when, and with what."""
    large = [(n, o.prediction) for n, o in zip(_names(found.too_large), found.too_large, strict=True)]
    large += [(e.what, e.prediction) for e in sorted(found.neighbours, key=_seconds) if e.prediction is not None]
    lines: list[str] = []
    for what, prediction in large:
        if not within_share(prediction):
            lines += wrapped(f"{what}: {where(prediction)}", bullet="- ")
    return tuple(lines)


def where(prediction: Prediction) -> str:
    """Why a plan does not fit: `rank 0, backward of unit 0: 101.8 of 79.1 GiB, activations 68.4`."""
    rank = prediction.tightest
    named = {n: size for n, size in rank.by_class.items() if n not in ("workspace", "overhead")}
    most = max(named, key=lambda n: named[n])
    held = f"{gib(rank.peak_bytes)} of {gib(rank.limit_bytes)} GiB"
    return f"rank {rank.ranks[0]}, {rank.peak_at}: {held}, {most} {gib(named[most])}"


def _unable(found: Reasons) -> tuple[str, ...]:
    unable = [each for each in found.neighbours if each.prediction is None]
    return tuple(line for each in unable for line in wrapped(f"{each.what}: {each.why_not}", bullet="- "))


def _bought(found: Reasons) -> tuple[str, ...]:
    lines: list[str] = []
    for each in found.bought:
        if each.prediction is None:
            said = f"cannot run: {each.why_not}"
        else:
            change = (each.prediction.step_s / found.prediction.step_s - 1) * 100
            said = f"{change:+.1f} %" + ("" if each.prediction.fits else f", too large: {where(each.prediction)}")
        lines += wrapped(f"{each.what}: {said}", bullet="- ")
    return tuple(lines)


def _traffic(prediction: Prediction) -> tuple[str, ...]:
    lines: list[str] = []
    for each in traffic(prediction):
        over = f" on {each.link}" if each.link else ""
        lines += wrapped(f"{each.axes}: {gib(each.sent_bytes)} GiB to {each.ranks} ranks{over}", bullet="- ")
    return tuple(lines)


def _machines(found: Reasons) -> tuple[str, ...]:
    lines: list[str] = []
    for line in found.sensitivities:
        gain = f"{(line.step_s / found.prediction.step_s - 1) * 100:+.1f} %"
        lines += wrapped(f"{line.what}: {gain}" + (f" ({line.change})" if line.change else ""), bullet="- ")
    return tuple(lines)


def _answers(found: Reasons, advice: Sequence[Advice]) -> tuple[str, ...]:
    lines = [*wrapped(network(found), indent=""), *wrapped(sharding(found), indent="")]
    if advice:
        first = advice[0]
        lines += wrapped(f"fastest change that fits: {first.what}, step {show_seconds(first.step_s)}", indent="")
    return tuple(lines)


def bounded_by(found: Reasons) -> str:
    """What the step consists of, the largest parts first."""
    step = found.prediction.step_s
    parts = sorted(found.prediction.breakdown.items(), key=lambda part: -part[1])
    named = [f"{WORDS.get(n, n.lower()).partition(' (')[0]} {percent(s / step, 0)} %" for n, s in parts[:4] if s > 0]
    rest = [(n, s) for n, s in parts if n not in _COMPUTING and s / step >= LARGE]
    computing = sum(s for n, s in parts if n in _COMPUTING) / step
    why = "computing" if not rest else WORDS.get(rest[0][0], rest[0][0].lower()).partition(" (")[0]
    if rest and computing > rest[0][1] / step:
        why = f"computing, then {why}"
    return f"bounded by {why}: {', '.join(named)}"


def network(found: Reasons) -> str:
    """Whether links are the problem."""
    share, step = found.communication, found.prediction.step_s
    gain = max((1 - each.step_s / step for each in found.sensitivities if each.what.endswith("2x")), default=0.0)
    word = "yes" if gain >= LARGE else "partly" if gain >= LARGE / 3 else "no"
    return (
        f"is the network the problem? {word}: the busiest rank waits {percent(share)} % of the step for links; "
        f"twice as fast ones would save up to {percent(max(gain, 0.0))} %"
    )


def sharding(found: Reasons) -> str:
    """Memory by ZeRO stage, and why a higher one may hold more."""
    stages = found.zero
    if len(stages) < 2:
        return "ZeRO: nothing to divide over"
    said = f"peak GiB by ZeRO stage: {', '.join(f'{zero}: {gib(size)}' for zero, size in stages)}"
    more = [b[0] for a, b in zip(stages, stages[1:], strict=False) if b[1] > a[1]]
    if more:
        held = "two buckets of whole gradients" if more[0] == 2 else "gathered layers and whole gradients of a layer"
        said += f"; stage {more[0]} holds more than the one below: {held} come on top of what it divides"
    return said


def _able(found: Reasons) -> tuple[str, ...]:
    columns = (
        Column(name="one change", align="left"),
        Column(name="step"),
        Column(name="%"),
        Column(name="GiB"),
        Column(name="", align="left"),
    )
    able = sorted((each for each in found.neighbours if each.prediction), key=_seconds)
    rows = []
    for each in able:
        prediction = each.prediction
        assert prediction is not None
        change = prediction.step_s / found.prediction.step_s - 1
        word = "too large" if not prediction.fits else "" if within_share(prediction) else f"over {SHARE:.0%}"
        peak = gib(prediction.tightest.peak_bytes)
        rows.append((each.what, show_seconds(prediction.step_s), f"{change * 100:+.1f}", peak, word))
    return table(columns, rows)


def _seconds(each: Neighbour) -> float:
    return each.prediction.step_s if each.prediction else float("inf")


def reasons_mapping(found: Reasons) -> dict[str, Any]:
    """Plain values for JSON, as `gnomon.reasons/1`."""
    return {
        "schema": "gnomon.reasons/1",
        "step_s": found.prediction.step_s,
        "beyond_stack": list(found.prediction.beyond),
        "breakdown_s": dict(found.prediction.breakdown),
        "bounded_by": bounded_by(found),
        "network": network(found),
        "zero_peak_bytes": {str(zero): size for zero, size in found.zero},
        "changes": [
            {
                "change": each.what,
                "step_s": each.prediction.step_s if each.prediction else None,
                "peak_bytes": each.prediction.tightest.peak_bytes if each.prediction else None,
                "fits": each.fits,
                "why_not": each.why_not or (each.prediction.verdict if each.prediction and not each.fits else ""),
            }
            for each in found.neighbours
        ],
        "runners_up": _listed(found.runners_up),
        "faster_but_too_large": _listed(found.too_large),
        "without": [
            {
                "axis": each.what,
                "step_s": each.prediction.step_s if each.prediction else None,
                "fits": each.fits,
                "why_not": each.why_not or (where(each.prediction) if each.prediction and not each.fits else ""),
            }
            for each in found.bought
        ],
        "sent_bytes": {each.axes: each.sent_bytes for each in traffic(found.prediction)},
        "machines": [{"what": each.what, "step_s": each.step_s, "change": each.change} for each in found.sensitivities],
    }


def _listed(others: Sequence[Other]) -> list[dict[str, Any]]:
    return [
        {
            "plan": name,
            "step_s": other.prediction.step_s,
            "loses_s": other.loss.seconds,
            "most_in": other.loss.part,
            "peak_bytes": other.prediction.tightest.peak_bytes,
            "why_not": "" if other.prediction.fits else where(other.prediction),
        }
        for name, other in zip(_names(others), others, strict=True)
    ]
