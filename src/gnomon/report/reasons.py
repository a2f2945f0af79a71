"""Reasons as text for people and as values for JSON: `gnomon explain`.

`reasons_text` says what to expect and what bounds the step, what the runners-up lose and where, what each change would
do, which do not fit and where, what each axis buys and sends, what other machines would change, and answers what users
ask: is the network the problem, what does a higher ZeRO stage hold, what is the least change that fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gnomon.prediction import Prediction, host_memory, traffic
from gnomon.report.planning import short_plans
from gnomon.report.prediction import WORDS, beyond_stack, describe
from gnomon.report.tables import Column, gib, number, percent, table, wrapped
from gnomon.search.fit.advice import NOTHING, FitAdvice
from gnomon.search.fit.terms import Change, Terms
from gnomon.search.questions.reasons import SHARE, Neighbour, Other, OtherJob, Reasons, within_share
from gnomon.units import show_seconds

_COMPUTING = ("F", "B", "I", "W")

LARGE = 0.15
"""Share of the step from which a part is named as what bounds it."""


def reasons_text(reasons: Reasons, *, advice: FitAdvice = NOTHING, terms: Terms | None = None) -> tuple[str, ...]:
    """Lines of at most 80 columns. terms: of the job's own file."""
    prediction = reasons.prediction
    lines = [f"{prediction.model} on {prediction.cluster}", *wrapped(describe(prediction.plan, prediction.workload))]
    lines += beyond_stack(prediction)
    lines += ["", *wrapped(expected(prediction), indent="")]
    lines += [*wrapped(bounded_by(reasons), indent=""), *wrapped(prediction.verdict, indent="")]
    if prediction.plan.optimizer.offload is not None or any(r.action == "offload" for r in prediction.plan.saved.rules):
        lines += wrapped(host_line(prediction), indent="")
    for title, part in (
        ("", _runners(reasons)),
        ("", _able(reasons)),
        ("", _other_jobs(reasons, terms)),
        (f"too large, or over {SHARE:.0%} of a device: rank, moment, what it holds most of", _large(reasons)),
        ("cannot run", _unable(reasons)),
        ("what each axis and method buys: the step without it", _bought(reasons)),
        ("what a rank sends in a step", _traffic(prediction)),
        ("on other machines", _machines(reasons)),
        ("questions", _answers(reasons, advice)),
    ):
        if part:
            lines += ["", *((title,) if title else ()), *part]
    return tuple(lines)


def expected(prediction: Prediction) -> str:
    """One line that says what to expect: the step, its band, throughput and MFU."""
    band = prediction.band
    return (
        f"step {show_seconds(prediction.step_s)} ({show_seconds(band.low_s)} to {show_seconds(band.high_s)} in "
        f"{percent(band.coverage, 0)} % of cases), {number(prediction.tokens_per_s_per_device, 4)} "
        f"{prediction.counted}/s/device, MFU {percent(prediction.mfu)} %"
    )


def host_line(prediction: Prediction) -> str:
    """What a node's host memory holds of it."""
    host = host_memory(prediction)
    if host.limit_bytes is None:
        return f"host memory: {gib(host.bytes)} GiB a node at most; what the nodes have is not stated"
    word = "fits" if host.fits else "too large"
    return f"host memory {word}: {gib(host.bytes)} of {gib(host.limit_bytes)} GiB a node"


def _runners(reasons: Reasons) -> tuple[str, ...]:
    """The next plans of the search, and what each loses."""
    if not reasons.runners_up:
        return ()
    columns = (
        Column(name="runners-up of its search", align="left"),
        Column(name="step"),
        Column(name="loses %"),
        Column(name="most in", align="left"),
        Column(name="GiB"),
    )
    rows = []
    for plan, other in zip(_names(reasons.runners_up), reasons.runners_up, strict=True):
        part = WORDS.get(other.loss.part, other.loss.part.lower()).partition(" (")[0]
        where = f"{part} {show_seconds(max(other.loss.part_s, 0.0))}" if other.loss.part_s > 0 else ""
        peak = gib(other.prediction.tightest.peak_bytes)
        share = percent(other.loss.seconds / reasons.prediction.step_s)
        rows.append((plan, show_seconds(other.prediction.step_s), share, where, peak))
    return table(columns, rows)


def _names(others: Sequence[Other]) -> tuple[str, ...]:
    return short_plans([other.prediction.plan for other in others])


def _large(reasons: Reasons) -> tuple[str, ...]:
    """Faster plans of the search, and neighbours, that do not fit: on which rank, when, and with what."""
    large = [(n, o.prediction) for n, o in zip(_names(reasons.too_large), reasons.too_large, strict=True)]
    large += [(e.what, e.prediction) for e in sorted(reasons.neighbours, key=_seconds) if e.prediction is not None]
    lines: list[str] = []
    for what, prediction in large:
        if not within_share(prediction):
            lines += wrapped(f"{what}: {where(prediction)}", bullet="- ")
    return tuple(lines)


def where(prediction: Prediction) -> str:
    """Why a plan does not fit: `rank 0, backward of unit 0: 101.8 of 79.1 GiB, activations 68.4`."""
    rank = prediction.tightest
    # Workspace and overhead are the program's: naming them would give nothing to change.
    named = {n: size for n, size in rank.by_class.items() if n not in ("workspace", "overhead")}
    # One class is named: people can change one thing at a time.
    most = max(named, key=lambda n: named[n])
    peak_text = f"{gib(rank.peak_bytes)} of {gib(rank.limit_bytes)} GiB"
    return f"rank {rank.ranks[0]}, {rank.peak_at}: {peak_text}, {most} {gib(named[most])}"


def _unable(reasons: Reasons) -> tuple[str, ...]:
    unable = [neighbour for neighbour in reasons.neighbours if neighbour.prediction is None]
    return tuple(
        line for neighbour in unable for line in wrapped(f"{neighbour.what}: {neighbour.why_not}", bullet="- ")
    )


def _bought(reasons: Reasons) -> tuple[str, ...]:
    lines: list[str] = []
    for neighbour in reasons.bought:
        if neighbour.prediction is None:
            effect = f"cannot run: {neighbour.why_not}"
        else:
            change = (neighbour.prediction.step_s / reasons.prediction.step_s - 1) * 100
            effect = f"{change:+.1f} %" + (
                "" if neighbour.prediction.fits else f", too large: {where(neighbour.prediction)}"
            )
        lines += wrapped(f"{neighbour.what}: {effect}", bullet="- ")
    return tuple(lines)


def _traffic(prediction: Prediction) -> tuple[str, ...]:
    lines: list[str] = []
    for group in traffic(prediction):
        over = f" on {group.link}" if group.link else ""
        lines += wrapped(f"{group.axes}: {gib(group.sent_bytes)} GiB to {group.ranks} ranks{over}", bullet="- ")
    return tuple(lines)


def _machines(reasons: Reasons) -> tuple[str, ...]:
    lines: list[str] = []
    for line in reasons.sensitivities:
        gain = f"{(line.step_s / reasons.prediction.step_s - 1) * 100:+.1f} %"
        lines += wrapped(f"{line.what}: {gain}" + (f" ({line.change})" if line.change else ""), bullet="- ")
    return tuple(lines)


def _answers(reasons: Reasons, advice: FitAdvice) -> tuple[str, ...]:
    lines = [*wrapped(network(reasons), indent=""), *wrapped(sharding(reasons), indent="")]
    if advice.ways:
        first = advice.ways[0]
        lines += wrapped(f"fastest change that fits: {first.what}, step {show_seconds(first.step_s)}", indent="")
    return tuple(lines)


def bounded_by(reasons: Reasons) -> str:
    """What the step consists of, the largest parts first."""
    step = reasons.prediction.step_s
    parts = sorted(reasons.prediction.breakdown.items(), key=lambda part: -part[1])
    named = [f"{WORDS.get(n, n.lower()).partition(' (')[0]} {percent(s / step, 0)} %" for n, s in parts[:4] if s > 0]
    # Below that share nothing that is changed there would be seen in the step.
    rest = [(n, s) for n, s in parts if n not in _COMPUTING and s / step >= LARGE]
    computing = sum(s for n, s in parts if n in _COMPUTING) / step
    why = "computing" if not rest else WORDS.get(rest[0][0], rest[0][0].lower()).partition(" (")[0]
    # Both are said where computing is the larger: then the other is what can still be won.
    if rest and computing > rest[0][1] / step:
        why = f"computing, then {why}"
    return f"bounded by {why}: {', '.join(named)}"


def network(reasons: Reasons) -> str:
    """Whether links are the problem: yes where links of twice the bandwidth would save LARGE of the step, partly from a
    third of that on."""
    share, step = reasons.communication, reasons.prediction.step_s
    gain = max(
        (1 - sensitivity.step_s / step for sensitivity in reasons.sensitivities if sensitivity.what.endswith("2x")),
        default=0.0,
    )
    # By what faster links would save and not by what is waited for: waiting for a slow rank is no fault of the network.
    word = "yes" if gain >= LARGE else "partly" if gain >= LARGE / 3 else "no"
    return (
        f"is the network the problem? {word}: the busiest rank waits {percent(share)} % of the step for links; "
        f"twice as fast ones would save up to {percent(max(gain, 0.0))} %"
    )


def sharding(reasons: Reasons) -> str:
    """Memory by ZeRO stage, and why a higher one may hold more."""
    stages = reasons.zero
    if len(stages) < 2:
        return "ZeRO: nothing to divide over"
    text = f"peak GiB by ZeRO stage: {', '.join(f'{zero}: {gib(size)}' for zero, size in stages)}"
    # People expect memory to fall with every stage; where it does not, the reason is owed.
    growing = [b[0] for a, b in zip(stages, stages[1:], strict=False) if b[1] > a[1]]
    if growing:
        what_grows = (
            "two buckets of whole gradients" if growing[0] == 2 else "gathered layers and whole gradients of a layer"
        )
        text += f"; stage {growing[0]} holds more than the one below: {what_grows} come on top of what it divides"
    return text


def _able(reasons: Reasons) -> tuple[str, ...]:
    """The plan with one change each, of those that can run, the fastest first."""
    columns = (
        Column(name="one change", align="left"),
        Column(name="step"),
        Column(name="%"),
        Column(name="GiB"),
        Column(name="", align="left"),
    )
    able = sorted((neighbour for neighbour in reasons.neighbours if neighbour.prediction), key=_seconds)
    rows = []
    for neighbour in able:
        prediction = neighbour.prediction
        assert prediction is not None
        change = prediction.step_s / reasons.prediction.step_s - 1
        word = "too large" if not prediction.fits else "" if within_share(prediction) else f"over {SHARE:.0%}"
        peak = gib(prediction.tightest.peak_bytes)
        rows.append((neighbour.what, show_seconds(prediction.step_s), f"{change * 100:+.1f}", peak, word))
    return table(columns, rows)


def _other_jobs(reasons: Reasons, terms: Terms | None) -> tuple[str, ...]:
    """The same job with another precision or batch: what a token then takes, and what to write for it."""
    if not reasons.other_jobs:
        return ()
    columns = (
        Column(name="another job", align="left"),
        Column(name="step"),
        Column(name=f"{reasons.prediction.counted}/s/device"),
        Column(name="GiB"),
    )
    rows = [
        (
            job.what,
            show_seconds(job.prediction.step_s),
            number(job.prediction.tokens_per_s_per_device, 4),
            gib(job.prediction.tightest.peak_bytes),
        )
        for job in reasons.other_jobs
    ]
    notes = [
        line
        for job in reasons.other_jobs
        if (lines := own_lines(reasons, job, terms))
        for line in wrapped(f"{job.what}: {'; '.join(lines)}", bullet="  ")
    ]
    return (*table(columns, rows), *notes)


def own_lines(reasons: Reasons, job: OtherJob, terms: Terms | None) -> tuple[str, ...]:
    """What to write into the job's own file for another job; empty where that is not known."""
    if terms is None or job.option not in terms.words:
        return ()
    change = Change(before=reasons.prediction.plan, after=job.prediction.plan, workload=job.prediction.workload)
    return terms.of((job.option,), change) or ()


def _seconds(neighbour: Neighbour) -> float:
    return neighbour.prediction.step_s if neighbour.prediction else float("inf")


def reasons_mapping(reasons: Reasons, terms: Terms | None = None) -> dict[str, Any]:
    """Plain values for JSON, as `gnomon.reasons/1`. terms: of the job's own file."""
    return {
        "schema": "gnomon.reasons/1",
        "step_s": reasons.prediction.step_s,
        "beyond_stack": list(reasons.prediction.unsupported),
        "breakdown_s": dict(reasons.prediction.breakdown),
        "bounded_by": bounded_by(reasons),
        "network": network(reasons),
        "other_jobs": [
            {
                "change": job.what,
                "step_s": job.prediction.step_s,
                "per_s_per_device": job.prediction.tokens_per_s_per_device,
                "peak_bytes": job.prediction.tightest.peak_bytes,
                "lines": list(own_lines(reasons, job, terms)),
            }
            for job in reasons.other_jobs
        ],
        "zero_peak_bytes": {str(zero): size for zero, size in reasons.zero},
        "changes": [
            {
                "change": neighbour.what,
                "step_s": neighbour.prediction.step_s if neighbour.prediction else None,
                "peak_bytes": neighbour.prediction.tightest.peak_bytes if neighbour.prediction else None,
                "fits": neighbour.fits,
                "why_not": neighbour.why_not
                or (neighbour.prediction.verdict if neighbour.prediction and not neighbour.fits else ""),
            }
            for neighbour in reasons.neighbours
        ],
        "runners_up": _listed(reasons.runners_up),
        "faster_but_too_large": _listed(reasons.too_large),
        "without": [
            {
                "axis": neighbour.what,
                "step_s": neighbour.prediction.step_s if neighbour.prediction else None,
                "fits": neighbour.fits,
                "why_not": neighbour.why_not
                or (where(neighbour.prediction) if neighbour.prediction and not neighbour.fits else ""),
            }
            for neighbour in reasons.bought
        ],
        "sent_bytes": {group.axes: group.sent_bytes for group in traffic(reasons.prediction)},
        "machines": [
            {"what": sensitivity.what, "step_s": sensitivity.step_s, "change": sensitivity.change}
            for sensitivity in reasons.sensitivities
        ],
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
