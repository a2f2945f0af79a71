"""Reasons as text for people and as values for JSON: `gnomon explain`.

`reasons_text` says what bounds the step, what each change would do, which do not fit and where, what other machines
would change, and answers what users ask: is the network the problem, what does a higher ZeRO stage hold, what is the
least change that fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gnomon.prediction import Advice, Prediction
from gnomon.report.prediction import WORDS, describe
from gnomon.report.tables import Column, gib, percent, table, wrapped
from gnomon.search.reasons import Neighbour, Reasons
from gnomon.units import show_seconds

LARGE = 0.15
"""Share of the step from which a part is named as what bounds it."""


def reasons_text(found: Reasons, *, advice: Sequence[Advice] = ()) -> tuple[str, ...]:
    """Lines of at most 80 columns."""
    prediction = found.prediction
    lines = [f"{prediction.model} on {prediction.cluster}", *wrapped(describe(prediction.plan, prediction.workload))]
    lines += ["", f"step {show_seconds(prediction.step_s)}, MFU {percent(prediction.mfu)} %"]
    lines += [*wrapped(bounded_by(found), indent=""), *wrapped(prediction.verdict, indent=""), ""]
    lines += _able(found)
    if unable := [each for each in found.neighbours if each.prediction is None]:
        lines += ["", "cannot run"]
        for each in unable:
            lines += wrapped(f"{each.what}: {each.why_not}", bullet="- ")
    lines += ["", "on other machines"]
    for line in found.sensitivities:
        gain = percent(line.step_s / prediction.step_s - 1)
        said = f"{line.what}: {gain} %" + (f" ({line.change})" if line.change else "")
        lines += wrapped(said, bullet="- ")
    lines += ["", *wrapped(network(found), indent=""), *wrapped(sharding(found), indent="")]
    if advice:
        first = advice[0]
        lines += wrapped(f"smallest change that fits: {first.what}, step {show_seconds(first.step_s)}", indent="")
    return tuple(lines)


def bounded_by(found: Reasons) -> str:
    """What the step consists of, the largest parts first."""
    step = found.prediction.step_s
    parts = sorted(found.prediction.breakdown.items(), key=lambda part: -part[1])
    named = [f"{WORDS.get(n, n.lower()).partition(' (')[0]} {percent(s / step, 0)} %" for n, s in parts[:4] if s > 0]
    rest = [(n, s) for n, s in parts if n not in ("F", "B", "I", "W") and s / step >= LARGE]
    why = "computing" if not rest else WORDS.get(rest[0][0], rest[0][0].lower()).partition(" (")[0]
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
        word = "" if prediction.fits else f"too large: {_where(prediction)}"
        peak = gib(prediction.tightest.peak_bytes)
        rows.append((each.what, show_seconds(prediction.step_s), f"{change * 100:+.1f}", peak, word))
    return table(columns, rows)


def _seconds(each: Neighbour) -> float:
    return each.prediction.step_s if each.prediction else float("inf")


def _where(prediction: Prediction) -> str:
    rank = prediction.tightest
    named = {n: size for n, size in rank.by_class.items() if n not in ("workspace", "overhead")}
    return f"rank {rank.ranks[0]}, {rank.peak_at}, {max(named, key=lambda n: named[n])}"


def reasons_mapping(found: Reasons) -> dict[str, Any]:
    """Plain values for JSON, as `gnomon.reasons/1`."""
    return {
        "schema": "gnomon.reasons/1",
        "step_s": found.prediction.step_s,
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
        "machines": [{"what": each.what, "step_s": each.step_s, "change": each.change} for each in found.sensitivities],
    }
