"""Every number that was fitted to how whole jobs came out: how many, to what, and what is done for a source left out.

`groups()` returns them; `python -m evidence constants` prints them with the sum, which README.md states. Numbers fitted
to single kernels and collectives are not among them (`gnomon/prices/curves`, `collectives.toml`); nor are facts that
were read in a program's source. Leaves out finding them (`evidence.fits`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from evidence.published.fitted_reading import CHOICES
from gnomon.prediction.band import BandNumbers
from gnomon.prices.fitted import fitted
from gnomon.report.tables import Column, table, wrapped

REFITTED = "fitted again"
KEPT = "kept"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Numbers that were fitted together."""

    what: str
    """What they are."""
    count: int
    """How many."""
    seen: str
    """What of the runs they were fitted to."""
    where: str
    """File that holds them."""
    left_out: str
    """What a prediction does with them when their source is left out."""


PRICES = (
    Group(
        what="which of nanotron's runs rates are fitted to: those with an MFU of 5% and more",
        count=1,
        seen="step time",
        where="fits/fit_stacks.py HEALTHY_MFU",
        left_out="its runs are out of the fit",
    ),
    Group(
        what="kernels beside collectives under ZeRO 3: seconds lost, the rate from which on, seconds lost in turn",
        count=3,
        seen="step time",
        where="gnomon/prediction/contention.py",
        left_out="kept; fits/fit_contention.py chooses again",
    ),
    Group(
        what="16-bit products whose weight has an odd side: their speed",
        count=1,
        seen="step time",
        where="gnomon/prices/kernels.py ODD_ROWS_SHARE",
        left_out=KEPT,
    ),
    Group(
        what="memory: what a full device, expandable segments, and pipelines with record_stream take beyond tensors",
        count=4,
        seen="peak memory",
        where="gnomon/prices/allocator.py",
        left_out=KEPT,
    ),
)
"""Chosen by hand, each with its data beside it."""


def groups() -> tuple[Group, ...]:
    """All of them: of prices, of readings, of bands."""
    numbers = fitted()
    rates = (
        ("rates of all stacks", len(numbers.universal.numbers) if numbers.universal else 0),
        (f"rates of {len(numbers.stacks)} stacks", sum(len(record.numbers) for record in numbers.stacks)),
        ("networks in training over their price", sum(link.count for link in numbers.links)),
    )
    return (
        *(
            Group(
                what=what,
                count=count,
                seen="step time",
                where="gnomon/prices/fitted.toml, folds.toml",
                left_out=REFITTED,
            )
            for what, count in rates
        ),
        *PRICES,
        *(
            Group(
                what=choice.what, count=choice.numbers, seen=choice.seen, where=choice.where, left_out=choice.left_out
            )
            for choice in CHOICES
        ),
        Group(
            what="widths of the 80% intervals",
            count=sum(field.type in (float, "float") for field in fields(BandNumbers)),
            seen="both",
            where="gnomon/prediction/band.toml",
            left_out=KEPT,
        ),
    )


def total() -> int:
    """How many there are."""
    return sum(group.count for group in groups())


def text() -> Sequence[str]:
    """A line each, and the sum."""
    columns = (Column(name="numbers"), Column(name="seen", align="left"), Column(name="source left out", align="left"))
    rows = [(str(group.count), group.seen, group.left_out) for group in groups()]
    head, *body = table(columns, rows)
    lines = [head]
    for group, line in zip(groups(), body, strict=True):
        lines += [line, *wrapped(f"{group.what} ({group.where})", indent="         ")]
    return (*lines, "", f"{total()} numbers fitted to whole jobs")
