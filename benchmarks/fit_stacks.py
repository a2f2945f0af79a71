"""Numbers of stacks and links, fitted to published runs: rebuilds `src/gnomon/prices/fitted.toml`.

    python benchmarks/fit_stacks.py published_runs.csv [--write] [--stack NAME]

Each stack's numbers minimise the Huber loss of log(predicted / measured) over a sample of its families' runs, by damped
Gauss-Newton steps within the limits of `prices.fitted.LIMITS`. Prices of layers and the Program do not depend on the
numbers and are made once. Prints errors with neutral rates, fitted, and with each fold of models left out of the fit
and predicted by the rest. The families in NEVER are not fitted on. Leaves out: rows that `gnomon validate` refuses.
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

import gnomon.prices
from gnomon import schema
from gnomon.errors import GnomonError
from gnomon.formats.published import Run, read_runs
from gnomon.prediction import Prediction, predict
from gnomon.prices.curves import Provenance
from gnomon.prices.fitted import LIMITS, Fitted, LinkNumber, Name, StackNumber, StackRecord
from gnomon.simulate import period

DATE = "2026-11-21"
NEVER = ("korthikanti-2022", "narayanan-sc21")
SAMPLE = 56
"""Runs of a family that are fitted on, spread evenly over models and layouts."""
FOLDS = 4
"""Models are left out a fold at a time; host times start high, where they show: a slope of zero finds nothing."""
HUBER = 0.08
"""Log errors beyond this count linearly: one-off slow runs must not lead."""
SPREAD = 3.0
"""A number may be this many times its start or its inverse at the price of one row's loss: what data do not show stays
where it was."""
HEALTHY_MFU = 5.0
"""Per cent; slower nanotron runs met trouble of the network (published beside them) that no number of a stack says."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Number:
    """One number to find."""

    name: str
    """Of `Rates`, or `link:` and a link."""
    start: float
    arch: str = ""


@dataclass(frozen=True)
class Job:
    """One stack's fit."""

    stack: str
    families: tuple[str, ...]
    numbers: tuple[Number, ...]
    skip: str = ""
    """Which rows are left out, as `chosen` reads it: `moe`, `slow`."""
    sample: int = SAMPLE
    """Runs of a family."""


JOBS = (
    Job(
        "megatron-deepspeed",
        ("vtrain-micro24", "bloom-prequel"),
        (
            Number("host_kernel_s", 50e-6),
            Number("host_collective_s", 3e-5),
            Number("compute", 0.95),
            Number("attention", 1.0),
            Number("exposed", 0.8),
            Number("link:omnipath-100", 1.0),
        ),
    ),
    Job(
        "nanotron",
        ("nanotron-ultrascale",),
        (
            Number("host_kernel_s", 45e-6),
            Number("host_collective_s", 1.4e-4),
            Number("host_peer_s", 2.5e-4),
            Number("compute", 0.86),
            Number("exposed", 0.85),
            Number("host_unit_s", 5e-4),
            Number("link:efa-100", 2.5),
        ),
        "slow",
        sample=168,  # a tenth of its runs met trouble: fewer follow them
    ),
    Job(
        "llm-foundry",
        ("mosaic-llmfoundry",),
        (
            Number("host_kernel_s", 30e-6),
            Number("compute", 0.92, "ampere"),
            Number("compute", 0.8, "hopper"),
            Number("attention", 0.6, "ampere"),
            Number("attention", 0.45, "hopper"),
        ),
    ),
    Job(
        "megatron-bridge",
        ("dgxc-benchmarking", "nemo-24.07", "megatron-bridge"),
        (
            Number("host_kernel_s", 15e-6),
            Number("compute", 0.97, "hopper"),
            Number("compute", 0.85, "blackwell"),
            Number("exposed", 0.8),
        ),
        "moe",
    ),
)


class Case:
    """One run with all of its prediction that no fitted number changes."""

    def __init__(self, run: Run, made: Prediction) -> None:
        self.run, self.made = run, made

    def log_error(self, numbers: Fitted) -> float:
        """log(predicted / measured) under these numbers."""
        pricing = self.made.pricing.with_numbers(numbers)
        seconds = period(self.made.structure, pricing.durations(self.made.structure.program)).seconds
        return float(np.log(seconds / self.run.step_s))


def chosen(runs: Sequence[Run], family: str, skip: str, sample: int) -> list[Run]:
    """A family's runs of the sample, in an order that neighbours in model and layout share."""
    mine = [run for run in runs if run.family == family and run.covers == "step"]
    if skip == "moe":
        mine = [run for run in mine if not run.row.experts]
    if skip == "slow":
        mine = [run for run in mine if run.row.second_metric != "mfu_pct" or (run.row.second_value or 0) >= HEALTHY_MFU]
    mine.sort(key=lambda run: (run.row.model, run.row.num_devices, run.row.tp, run.row.pp, run.row.micro_batch, run.id))
    picks = np.unique(np.linspace(0, len(mine) - 1, min(sample, len(mine))).round().astype(int))
    return [mine[i] for i in picks]


def cases(runs: Sequence[Run], job: Job) -> list[Case]:
    found = []
    for family in job.families:
        assert family not in NEVER
        for run in chosen(runs, family, job.skip, job.sample):
            try:
                found.append(Case(run, predict(run.graph, run.cluster, run.plan, run.workload, run.stack)))
            except GnomonError:
                continue
    return found


def numbers_of(job: Job, values: Sequence[float], provenance: Provenance) -> Fitted:
    """The numbers as the prices room reads them."""
    own: list[StackNumber] = []
    links: list[LinkNumber] = []
    for number, value in zip(job.numbers, values, strict=True):
        value = float(f"{value:.3g}")
        if number.name.startswith("link:"):
            links.append(LinkNumber(link=number.name[5:], factor=value, provenance=provenance))
        else:
            name: Name = number.name  # type: ignore[assignment]
            own.append(StackNumber(stack=job.stack, name=name, value=value, arch=number.arch))
    return Fitted(stacks=(StackRecord(numbers=tuple(own), provenance=provenance),), links=tuple(links))


def bounds(job: Job) -> tuple[Array, Array]:
    pairs = [(0.2, 10.0) if n.name.startswith("link:") else LIMITS[n.name] for n in job.numbers]
    return np.log([max(low, 1e-7) for low, _ in pairs]), np.log([high for _, high in pairs])


def fit(job: Job, given: Sequence[Case], start: Array, steps: int) -> Array:
    """Logs of the numbers, from `start`: damped Gauss-Newton with Huber weights, within bounds."""
    blank = Provenance(data="being fitted", date=DATE, error="unknown", range="unknown")
    low, high = bounds(job)
    first = np.log([number.start for number in job.numbers])

    def errors(x: Array) -> Array:
        numbers = numbers_of(job, np.exp(x).tolist(), blank)
        return np.array([case.log_error(numbers) for case in given])

    def loss(e: Array, x: Array) -> float:
        size = np.abs(e)
        huber = np.where(size < HUBER, size**2 / 2, HUBER * (size - HUBER / 2)).sum()
        return float(huber + HUBER**2 * ((x - first) ** 2).sum() / np.log(SPREAD) ** 2 / 2)

    x, damping = start.copy(), 1e-2
    now = errors(x)
    for _ in range(steps):
        slopes = []
        for i in range(len(x)):
            moved = x.copy()
            moved[i] += 0.04 if x[i] + 0.04 <= high[i] else -0.04
            slopes.append((errors(moved) - now) / (moved[i] - x[i]))
        jacobian = np.stack(slopes, axis=1)
        weights = np.minimum(1.0, HUBER / np.maximum(np.abs(now), 1e-12))
        prior = HUBER**2 / np.log(SPREAD) ** 2
        hessian = jacobian.T @ (weights[:, None] * jacobian) + prior * np.eye(len(x))
        slope = jacobian.T @ (weights * now) + prior * (x - first)
        better = False
        for _ in range(4):
            step = np.linalg.solve(hessian + damping * np.diag(np.diag(hessian)), -slope)
            tried = np.clip(x + np.clip(step, -1.0, 1.0), low, high)
            then = errors(tried)
            if loss(then, tried) < loss(now, x):
                better = loss(now, x) - loss(then, tried) > 1e-3 * loss(now, x)
                x, now, damping = tried, then, damping / 4
                break
            damping = damping * 10 + 1e-2
        if not better:
            break
    return x


def shares(errors: Array) -> str:
    """Median / mean / 90th percentile of the absolute error, and bias, in per cent."""
    off = np.exp(errors) - 1
    size = np.abs(off)
    return f"{np.median(size):.1%} / {size.mean():.1%} / {np.percentile(size, 90):.1%}, bias {np.median(off):+.1%}"


def left_out(job: Job, given: Sequence[Case], best: Array, steps: int) -> Array:
    """Log errors of each fold of models under numbers fitted to the others."""
    out = np.zeros(len(given))
    names = sorted({case.run.row.model for case in given}, key=lambda name: zlib.crc32(name.encode()))
    fold_of = {name: i % FOLDS for i, name in enumerate(names)}
    folds = np.array([fold_of[case.run.row.model] for case in given])
    blank = Provenance(data="being fitted", date=DATE, error="unknown", range="unknown")
    first = np.log([number.start for number in job.numbers])
    for fold in sorted(set(folds.tolist())):
        rest = [case for case, f in zip(given, folds, strict=True) if f != fold]
        x = fit(job, rest, (best + first) / 2, steps)
        numbers = numbers_of(job, np.exp(x).tolist(), blank)
        for i in np.flatnonzero(folds == fold):
            out[i] = given[i].log_error(numbers)
    return out


def fit_job(job: Job, runs: Sequence[Run], steps: int, *, folds: bool) -> Fitted:
    begun = perf_counter()
    given = cases(runs, job)
    low, high = bounds(job)
    neutral = np.array([case.log_error(Fitted()) for case in given])
    x = fit(job, given, np.clip(np.log([n.start for n in job.numbers]), low, high), steps)
    blank = Provenance(data="being fitted", date=DATE, error="unknown", range="unknown")
    numbers = numbers_of(job, np.exp(x).tolist(), blank)
    errors = np.array([case.log_error(numbers) for case in given])
    out = left_out(job, given, x, max(3, steps // 2)) if folds else errors
    told = [f"{n.name} {n.arch}".strip() + f" {v:.3g}" for n, v in zip(job.numbers, np.exp(x), strict=True)]
    print(f"\n{job.stack}: {', '.join(told)}")
    lines = []
    for family in job.families:
        mine = np.array([case.run.family == family for case in given])
        if not mine.any():
            continue
        lines.append(f"{family} {shares(out[mine])}")
        print(f"| {family} | {mine.sum()} | {shares(neutral[mine])} | {shares(errors[mine])} | {shares(out[mine])} |")
    print(f"{perf_counter() - begun:.0f} s", flush=True)
    archs = sorted({device.arch for case in given for device in case.run.cluster.devices[:1]})
    most = max(case.run.row.num_devices or 0 for case in given)
    left = {"moe": "; dense models only", "slow": f"; MFU of {HEALTHY_MFU:g}% and more"}.get(job.skip, "")
    provenance = Provenance(
        data=f"published_runs.csv: {len(given)} runs of {', '.join(job.families)}",
        date=DATE,
        error="models left out, median / mean / p90: " + "; ".join(lines),
        range=f"{', '.join(archs)}; up to {most} devices{left}",
    )
    return numbers_of(job, np.exp(x).tolist(), provenance)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--write", action="store_true", help="replace the numbers on record")
    parser.add_argument("--stack", help="only this one; the others stay as they are")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--no-folds", action="store_true", help="skip the models left out")
    options = parser.parse_args()
    runs, _ = read_runs(options.table)
    jobs = [job for job in JOBS if options.stack in (None, job.stack)]
    print("| family | runs | neutral: median / mean / p90 | fitted | models left out |\n|---|---:|---|---|---|")
    found = [fit_job(job, runs, options.steps, folds=not options.no_folds) for job in jobs]
    path = Path(gnomon.prices.__file__).parent / "fitted.toml"
    new = {record.stack for each in found for record in each.stacks}
    links = {number.link for each in found for number in each.links}
    old = schema.load_file(Fitted, path)
    everything = Fitted(
        stacks=(*(r for r in old.stacks if r.stack not in new), *(r for each in found for r in each.stacks)),
        links=(*(n for n in old.links if n.link not in links), *(n for each in found for n in each.links)),
    )
    print(f"\n{everything.count} numbers in all")
    if options.write:
        path.write_text(schema.dump(everything), encoding="utf-8")


if __name__ == "__main__":
    main()
