"""Why a change does not help: what it acts on is not what the peak consists of, or it takes as much as it frees.

`unhelpful(base, rung, option)` says it in a sentence, from the two predictions; `without_room` lists the options that
a plan has no room for. Leaves out changes that help and are not enough: their rung says what is missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gnomon.plans import Plan
from gnomon.prediction import Prediction
from gnomon.search.fit.ladder import Rung
from gnomon.search.fit.options import OPTIONS, Option

GIB = 2**30


def unhelpful(base: Prediction, rung: Rung, options: Sequence[Option] = OPTIONS) -> str:
    """Why a rung of one option frees nothing."""
    if rung.prediction is None:
        return rung.why_not
    before, after = base.tightest, rung.prediction.tightest
    acts = next((option.acts_on for option in options if option.name in rung.options), ())
    grown = {name: after.by_class[name] - size for name, size in before.by_class.items()}
    worst = max(grown, key=lambda name: grown[name])
    shrunk = sum(-growth for name, growth in grown.items() if growth < 0)
    if shrunk > 0 and grown[worst] > 0.5 * shrunk > 0.01 * GIB:
        return (
            f"it frees {shrunk / GIB:.1f} GiB at the peak, and {worst} take {grown[worst] / GIB:.1f} more there"
            f"{_moved(before.peak_at, after.peak_at)}"
        )
    class_bytes = sum(before.by_class.get(name, 0) for name in acts)
    what = " and ".join(acts) if len(acts) < 3 else f"{', '.join(acts[:-1])} and {acts[-1]}"
    if not acts:
        return f"the peak ({before.peak_at}) stays: {_largest(base)}"
    if class_bytes < 0.02 * before.peak_bytes:
        return f"it acts on {what}, {class_bytes / GIB:.1f} GiB of the peak ({before.peak_at}): {_largest(base)}"
    if after.peak_at != before.peak_at:
        return f"the peak moves to the {after.peak_at}, where as much is held: {_largest(rung.prediction)}"
    return f"the {class_bytes / GIB:.1f} GiB of {what} stay: this plan holds them all at its peak ({before.peak_at})"


def without_room(plan: Plan, tried: Sequence[Rung], options: Sequence[Option] = OPTIONS) -> Iterator[tuple[str, str]]:
    """(option, why a plan has no room for it), of options without a level."""
    seen = {name for rung in tried for name in rung.options}
    yield from ((option.name, option.none(plan)) for option in options if option.name not in seen)


def _moved(before: str, after: str) -> str:
    return "" if before == after else f" (the peak moves to the {after})"


def _largest(prediction: Prediction) -> str:
    class_bytes = {n: size for n, size in prediction.tightest.by_class.items() if n not in ("workspace", "overhead")}
    parts = sorted(class_bytes.items(), key=lambda part: -part[1])[:2]
    return " and ".join(f"{name} {size / GIB:.1f}" for name, size in parts)
