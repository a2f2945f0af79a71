"""Every number that was fitted to how whole jobs came out: how many, to what, and what is done for a source left out.

`groups()` returns them; `python -m evidence constants` prints them with the sum, which README.md states. Numbers fitted
to single kernels and collectives are not among them (`gnomon/prices/curves`, `collectives.toml`); nor are facts that
were read in a program's source. Leaves out finding them (`evidence.fits`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from evidence.published.fitted_reading import CHOICES
from gnomon.prediction.band import BandNumbers
from gnomon.prices.decoding import ggml_rows
from gnomon.prices.fitted import fitted_rates
from gnomon.report.tables import Column, table, wrapped
from gnomon.serving.forecast import BANDS
from gnomon.software.engine import engines

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
    numbers = fitted_rates()
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


HOST = ("host_step_s", "host_sequence_s", "launch_s", "request_s", "request_token_s")
"""Host times of an engine's record."""
GGML = ("start_s", "memory_share", "quantised_memory_share", "quantised_share", "half_share", "experts_share",
        "attention_share")  # fmt: skip
"""Rates of a generation's ggml."""


def inference_groups() -> tuple[Group, ...]:
    """Those that were chosen by hand with published runs of inference servers in view."""
    own = (Path(__file__).parent / "inference" / "engines").glob("*.toml")
    measured = ("gnomon",)  # on the machine that it ran on
    records = [*(name for name in engines() if name not in measured), *own]
    return (
        Group(
            what=f"host times of {len(records)} records of engines",
            count=len(HOST) * len(records),
            seen="time of a token",
            where="gnomon/software/engines, evidence/inference/engines",
            left_out=f"{REFITTED}: evidence.inference.left_out",
        ),
        Group(
            what=f"rates of ggml's matmuls on {len(ggml_rows())} generations",
            count=len(GGML) * len(ggml_rows()),
            seen="tokens a second",
            where="gnomon/prices/decoding.toml",
            left_out=f"{REFITTED}: evidence.inference.left_out",
        ),
        Group(
            what="80% intervals of four situations",
            count=sum(2 * len(bands) for bands in BANDS.values()),
            seen="both",
            where="gnomon/serving/forecast.py BANDS",
            left_out="held by the other half of the runs",
        ),
    )


def total() -> int:
    """How many there are of those fitted to training jobs."""
    return sum(group.count for group in groups())


def text() -> Sequence[str]:
    """A line each, and the sums."""
    return (
        *_lines(groups()),
        "",
        f"{total()} numbers fitted to whole jobs",
        "",
        *_lines(inference_groups()),
        "",
        f"{sum(group.count for group in inference_groups())} numbers chosen with published inference runs in view",
    )


def _lines(found: Sequence[Group]) -> list[str]:
    columns = (Column(name="numbers"), Column(name="seen", align="left"), Column(name="source left out", align="left"))
    rows = [(str(group.count), group.seen, group.left_out) for group in found]
    head, *body = table(columns, rows)
    lines = [head]
    for group, line in zip(found, body, strict=True):
        lines += [line, *wrapped(f"{group.what} ({group.where})", indent="         ")]
    return lines
