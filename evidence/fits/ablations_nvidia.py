"""What each term is worth in NVIDIA's runs (dgxc-benchmarking) and Korthikanti et al.'s; what no prediction beats.

    python -m evidence.fits.ablations_nvidia published_runs.csv [--per-family 60]

Numbers of the stacks are fitted once, to a sample. Then a fact of NVIDIA's scripts is not read, or a term of the prices
is left out; what is common to a family's errors, which its speed of kernels would take up, is taken out of them (the
median of the log errors), so that a term shows by what it does to some runs and not to others. At the end how far runs
alike but for the release, or for the number of devices, lie from their mean, and what rounding of published numbers
leaves. Leaves out terms that belong to a run's plan.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from evidence.fits.ablations import TERMS, forget, take_out
from evidence.fits.fit_stacks import JOBS, Fits
from evidence.fits.stack_fit import Case, cases, spread_evenly
from evidence.published import Run, nvidia, read_runs
from gnomon.prices.fitted import FittedRates, fitted_rates

FAMILIES = ("dgxc-benchmarking", "korthikanti-2022")
FACTS: dict[str, tuple[str, Callable[..., object]]] = {
    "cuDNN's attention switched off": ("without_cudnn", lambda row: False),
    "gradients in bf16": ("narrow_gradients", lambda row: False),
    "experts divided over tp": ("expert_slices", lambda row: 1),
    "packed fine-tuning": ("packed", lambda row: (row, ())),
    "squared ReLU op by op": ("eager_activation", lambda row: False),
    "groups that share parameters": ("sharding_ranks", lambda row: 0),
}
"""What evidence.published.nvidia reads -> the function that says it, and one that does not."""
ALIKE = ("layers", "hidden", "heads", "ffn", "experts", "precision", "device", "tp", "pp", "vpp", "cp", "ep", "seq_len")
"""Columns of runs that are alike, beside the batch of a data-parallel rank."""


def shares(logs: Sequence[float]) -> str:
    """median / mean / p90 of absolute errors, the common factor taken out."""
    off = np.abs(np.expm1(np.asarray(logs) - np.median(logs)))
    return f"{np.median(off):.1%} / {off.mean():.1%} / {np.percentile(off, 90):.1%}"


def refit(runs: Sequence[Run], sample: int) -> FittedRates:
    """Numbers on record with those of both families' stacks fitted to a sample of their runs."""
    numbers = fitted_rates()
    for job in JOBS:
        if not set(job.families) & set(FAMILIES):
            continue
        fits = Fits(runs, job.families)
        fits.all = {f: [c for c in given if c.run.id in few] for f, given in fits.all.items() for few in [
            {run.id for run in spread_evenly([c.run for c in given], sample)}]}  # fmt: skip
        numbers = fits.job(job, lambda case: True, numbers)
        print("  ".join(f"{n.name} {n.arch} {n.value:g}" for r in numbers.stacks[-1:] for n in r.numbers), flush=True)
    return numbers


def by_family(given: Iterable[Case], numbers: FittedRates) -> list[str]:
    """Shares of each family."""
    collected: dict[str, list[float]] = defaultdict(list)
    for case in given:
        collected[case.run.family].append(case.log_error(numbers))
    return [shares(collected[family]) if collected[family] else "" for family in FAMILIES]


def spread(groups: Iterable[Sequence[float]]) -> str:
    """How far values lie from the mean of their group."""
    off = [abs(np.exp(np.log(v) - np.log(g).mean()) - 1) for g in groups if len(g) > 1 for v in g]
    return (
        f"{len(off)} runs: {np.median(off):.1%} / {np.mean(off):.1%} / {np.percentile(off, 90):.1%}" if off else "none"
    )


def floors(runs: Sequence[Run]) -> None:
    """What no prediction beats: releases, numbers of devices, rounding."""
    for family in FAMILIES:
        mine = [run for run in runs if run.family == family]
        releases: dict[object, list[float]] = defaultdict(list)
        scales: dict[object, list[float]] = defaultdict(list)
        rounding = []
        for run in mine:
            row = run.row
            share = (row.global_batch or 0) * (row.tp or 1) * (row.pp or 1) * (row.cp or 1) / (row.num_devices or 1)
            key = (*(getattr(row, c) for c in ALIKE), row.framework, row.micro_batch, row.recompute, share)
            releases[key, row.num_devices].append(run.step_s)
            scales[key, row.model].append(run.step_s)
            text = f"{row.value!r}"
            digits = len(text.partition(".")[2].rstrip("0")) if "." in text else 0
            rounding.append(0.5 * 10.0**-digits / (row.value or 1.0))
        print(f"\n{family}: releases {spread(releases.values())}; devices {spread(scales.values())}; rounding up to "
              f"{np.median(rounding):.2%} (median), {np.percentile(rounding, 90):.2%} (p90)")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--per-family", type=int, default=60, help="runs of a family")
    options = parser.parse_args()
    every = read_runs(options.table)[0]
    floors(every)
    numbers = refit(every, 24)

    def chosen(runs: Iterable[Run]) -> list[Run]:
        few = list(runs)
        return [run for f in FAMILIES for run in spread_evenly([r for r in few if r.family == f], options.per_family)]

    result = cases(chosen(every))
    print("\n| without | " + " | ".join(FAMILIES) + " |\n|---|" + "---|" * len(FAMILIES))
    for term in ("", *TERMS):
        put_back = take_out(term)
        forget(result)
        print(f"| {term or '(nothing)'} | " + " | ".join(by_family(result, numbers)) + " |", flush=True)
        put_back()
    for name, (function, unsaid) in FACTS.items():
        message = getattr(nvidia, function)
        setattr(nvidia, function, unsaid)
        given = cases(chosen(read_runs(options.table)[0]))
        setattr(nvidia, function, message)
        print(f"| {name} | " + " | ".join(by_family(given, numbers)) + " |", flush=True)


if __name__ == "__main__":
    main()
