"""The numbers of bands, from predictions of sources that were left out: rebuilds `gnomon/prediction/band.toml`.

    python -m evidence.fits.fit_band published_runs.csv [--write]

Up to 100 runs of each source are predicted with the numbers of `folds.toml` that never saw it; and some with those and
a few runs of the source as the user's own. The numbers minimise the pinball loss of two percentiles of
log(measured / predicted), each family weighted by the square root of its runs. That settles how widths compare; all are
then scaled by one factor, so that of families whose widths were fitted without them the asked share lies inside. Prints
coverage and width by family, as fitted and left out. Rows are read with their outcome (`fitted_reading`), as whoever
runs a job knows the flags that its row leaves out. Leaves out rows that `evidence.validate` refuses.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import gnomon.prediction
from evidence.fits.calibrate_from import FAMILIES, drawn
from evidence.fits.fit_stacks import APART, LEFT
from evidence.fits.stack_fit import spread_evenly
from evidence.folds import folds
from evidence.published import Run, read_runs
from evidence.published.fitted_reading import fitted_reading
from evidence.validation import predicted_bytes
from gnomon import schema
from gnomon.errors import GnomonError
from gnomon.prediction.band import COVERAGE, WIDEST, BandNumbers, log_widths
from gnomon.prediction.evidence import Evidence, evidence
from gnomon.prediction.measured import predicted_s
from gnomon.prices.curves import Provenance

DATE = "2026-11-23"
Array = NDArray[np.float64]

START = {
    "own": -2.6, "own_few": 0.7, "stack": -2.2, "stack_elsewhere": -1.9, "device": -1.6, "nothing": -1.2,
    "launch": 0.5, "communication": 0.7, "waiting": 0.5, "crossing": 0.1, "nodes": 0.05, "tensor_across": 0.2,
    "debugged": 0.5, "routed": 0.3, "eight_bit": 0.2, "unmeasured": 0.4, "below": 1.0, "above": 1.0,
}  # fmt: skip
"""Where each number starts, and stays without data: what is not known is wide."""
HOLD = 0.004
"""Pull towards the start, in pinball loss over a squared unit."""
NEVER_NEGATIVE = (
    "own_few", "launch", "communication", "waiting", "crossing", "nodes", "tensor_across", "debugged", "routed",
    "eight_bit", "unmeasured",
)  # fmt: skip
"""What makes predictions harder never makes a band narrower."""
KNOWN = ("nothing", "device", "stack_elsewhere", "stack")
"""From the least known to the most: nor does knowing less."""


@dataclass(frozen=True)
class Row:
    """One prediction of what was left out."""

    family: str
    log_ratio: float
    """Of measured over predicted."""
    evidence: Evidence
    memory: float | None = None
    """The same of the peak."""


def sound(run: Run) -> bool:
    """Whether its time covers what its source says, and the source says what ran. Runs that met trouble count: a band
    is of what happens."""
    return run.family not in (*LEFT, *APART) and not run.pieced


def predicted(run: Run) -> Row | None:
    """One run, predicted without its source."""
    try:
        run, made = fitted_reading(run)
    except GnomonError:
        return None
    numbers = folds().without_source(run.family)
    seconds = predicted_s(run, made, numbers)
    ratio = max((np.log(reading / seconds) for reading in run.readings_s), key=abs)
    memory = None if run.memory_bytes is None else float(np.log(run.memory_bytes / predicted_bytes(run, made)))
    return Row(run.family, float(ratio), evidence(made.pricing.with_numbers(numbers), seconds), memory)


def blank(values: dict[str, float]) -> BandNumbers:
    source = Provenance(data="being fitted", date=DATE, error="unknown", range="unknown")
    return BandNumbers(**values, memory_below=0.1, memory_above=0.1, provenance=source)


def design(rows: Sequence[Row]) -> Array:
    """[2, rows, names]: the log widths down and up are linear in the numbers."""
    names = [name for name in START if name not in ("below", "above")]
    zero = dict.fromkeys(START, 0.0)
    units = [blank({**zero, name: 1.0}) for name in names]
    both = np.array([[log_widths(row.evidence, unit) for unit in units] for row in rows])
    return np.moveaxis(both, -1, 0)


def fit(rows: Sequence[Row]) -> dict[str, float]:
    """Descent over one number at a time, with steps that halve."""
    names = [name for name in START if name not in ("below", "above")]
    matrix, ratio = design(rows), np.array([row.log_ratio for row in rows])
    count = {family: sum(row.family == family for row in rows) for family in {row.family for row in rows}}
    weight = np.array([count[row.family] ** -0.5 for row in rows])
    weight /= weight.sum()
    start = np.array([START[name] for name in names] + [START["above"]])
    tail = (1 - COVERAGE) / 2

    def loss(x: Array) -> float:
        down, up = np.exp(np.clip(matrix @ x[:-1], -6, 2))
        low, high = ratio + down, ratio - np.minimum(x[-1] * up, WIDEST)
        below = np.where(low > 0, tail * low, (tail - 1) * low)
        above = np.where(high > 0, (1 - tail) * high, -tail * high)
        return float((weight * (below + above)).sum() + HOLD * ((x - start) ** 2).sum())

    floor = np.array([0.0 if name in NEVER_NEGATIVE else -6.0 for name in names] + [0.3])
    levels = [names.index(name) for name in KNOWN]
    x, best, step = start.copy(), loss(start), 0.4
    while step > 0.004:
        before = best
        for i in range(len(x)):
            for move in (step, -step):
                tried = x.copy()
                tried[i] = max(tried[i] + move, floor[i])
                if (np.diff(tried[levels]) <= 0).all() and (then := loss(tried)) < best:
                    x, best = tried, then
        if best > before - 1e-7:
            step /= 2
    collected = dict(zip(names, x[:-1].tolist(), strict=True))
    return {**collected, "below": 1.0, "above": float(x[-1])}


def needed(rows: Sequence[Row], values: dict[str, float]) -> Array:
    """Of each row, the factor on all widths from which on its band holds it."""
    names = [name for name in START if name not in ("below", "above")]
    down, up = np.exp(design(rows) @ np.array([values[name] for name in names]))
    ratio = np.array([row.log_ratio for row in rows])
    reach = np.where(ratio < 0, values["below"] * down, np.minimum(values["above"] * up, WIDEST))
    return np.asarray(np.abs(ratio) / reach)


def calibrated(rows: Sequence[Row], own: Sequence[Row], sizes: Mapping[str, int]) -> float:
    """The factor on all widths with which COVERAGE of the rows lie inside, their family being left out of the fit.

    Half of the weight goes to families by the square root of their rows here, half by how many runs they have.
    """
    need, weight = [], []
    count = {family: sum(row.family == family for row in rows) for family in sizes}
    roots = sum(entry**0.5 for entry in count.values())
    for family, size in sizes.items():
        rest = [row for row in (*rows, *own) if row.family.split(",")[0] != family]
        need.append(needed([row for row in rows if row.family == family], fit(rest)))
        share = count[family] ** 0.5 / roots + size / sum(sizes.values())
        weight.append(np.full(count[family], share / 2 / count[family]))
    ordered = np.argsort(every := np.concatenate(need))
    held = np.cumsum(np.concatenate(weight)[ordered])
    return float(every[ordered][np.searchsorted(held, COVERAGE)])


def scaled(values: dict[str, float], factor: float) -> dict[str, float]:
    """The same widths, all times a factor."""
    return {**values, "below": values["below"] * factor, "above": values["above"] * factor}


def inside(rows: Sequence[Row], values: dict[str, float]) -> tuple[Array, Array]:
    """(whether each lies in its band, width of the band as a share of the prediction)."""
    names = [name for name in START if name not in ("below", "above")]
    down, up = np.exp(design(rows) @ np.array([values[name] for name in names]))
    ratio = np.array([row.log_ratio for row in rows])
    low, high = -values["below"] * down, np.minimum(values["above"] * up, WIDEST)
    return (ratio >= low) & (ratio <= high), np.exp(high) - np.exp(low)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--per-family", type=int, default=100, help="most runs of a source")
    parser.add_argument("--write", action="store_true", help="replace the numbers on record")
    options = parser.parse_args()
    runs, _ = read_runs(options.table)
    sources = sorted({run.family for run in runs if sound(run)})
    some = [
        run
        for source in sources
        for run in spread_evenly([r for r in runs if r.family == source and sound(r)], options.per_family)
    ]
    rows = [row for row in map(predicted, some) if row is not None]
    own = [
        Row(f"{family}, {count} own", ratio, run)
        for family in FAMILIES
        for count, ratio, run in drawn(family, runs, draws=2)
        if count
    ]
    families = sorted({row.family for row in rows})
    sizes = {family: sum(run.family == family for run in runs) for family in families}
    factor = calibrated(rows, own, sizes)
    values = scaled(fit([*rows, *own]), factor)
    print(
        "| family | rows | in band | width | in band, family left out of the fit of bands |\n|---|---:|---:|---:|---:|"
    )
    for family in [*families, *sorted({row.family for row in own})]:
        mine = [row for row in (*rows, *own) if row.family == family]
        rest = [row for row in (*rows, *own) if row.family.split(",")[0] != family.split(",")[0]]
        hit, width = inside(mine, values)
        out = inside(mine, scaled(fit(rest), factor))[0]
        print(f"| {family} | {len(mine)} | {hit.mean():.0%} | {np.median(width):.0%} | {out.mean():.0%} |", flush=True)
    hit, width = inside(rows, values)
    told = f"{hit.mean():.0%} of {len(rows)} rows in their band, width {np.median(width):.0%} (median)"
    share = sum(sizes[f] * inside([r for r in rows if r.family == f], values)[0].mean() for f in families)
    print(f"widths scaled by {factor:.3g}")
    print(f"of all rows, families as large as they are: {share / sum(sizes.values()):.0%}")
    print(f"\n{told}\n" + ", ".join(f"{name} {value:.3g}" for name, value in values.items()))
    memory = [np.array([r.memory for r in rows if r.family == f and r.memory is not None]) for f in families]
    memory = [part for part in memory if len(part) > 1]
    piece = np.concatenate([np.quantile(part, np.linspace(0.01, 0.99, 99)) for part in memory])
    low, high = np.quantile(piece, [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2])
    print(f"memory: measured over predicted from {np.exp(low):.3f} to {np.exp(high):.3f}")
    if options.write:
        made = replace(
            blank({name: round(value, 3) for name, value in values.items()}),
            memory_below=round(max(-float(low), 0.01), 3),
            memory_above=round(max(float(high), 0.01), 3),
            provenance=Provenance(
                data=f"published_runs.csv: {len(rows)} runs of {len(families)} sources, each left out",
                date=DATE,
                error=told,
                range="V100 to GB300, 1 to 2304 devices; widths of devices without runs are assumed",
            ),
        )
        path = Path(gnomon.prediction.__file__).parent / "band.toml"
        path.write_text(schema.dump(made), encoding="utf-8")


if __name__ == "__main__":
    main()
