"""Numbers of stacks and links, fitted to published runs: rebuilds `gnomon/prices/fitted.toml` and `folds.toml` here.

    python -m evidence.fits.fit_stacks published_runs.csv [--write] [--no-folds] [--only STACK]

First the numbers of all stacks, every family with the same weight; then each stack's own, shrunk towards them. Prints
errors with neutral rates, with the numbers of all stacks, fitted, with models left out and with the source left out:
in a fold everything is fitted again without it. `--only` fits one stack's own numbers and leaves the others as they are
on record. Leaves out: rows that cannot be predicted, mixtures of experts, and nanotron's runs under HEALTHY_MFU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter

import numpy as np

import gnomon.prices
from evidence.fits.stack_fit import Array, Case, Number, Problem, cases, spread_evenly
from evidence.folds import FILE, MODEL_FOLDS, Fold, Folds, fold_of, folds
from evidence.published import Run, read_runs
from evidence.published.row import COMPOSED
from gnomon import schema
from gnomon.prices.curves import Provenance
from gnomon.prices.fitted import ANY, FittedRates, fitted_rates

DATE = "2026-11-23"
LEFT = ("megatron-ci",)
"""Times of tiny models of which the source does not say what they cover."""
APART = (COMPOSED,)
"""Families that only their own stack is fitted to: a simulator made them, so they say nothing of other programs."""
EACH = 14
"""Runs of a family for the numbers of all stacks."""
HEALTHY_MFU = 5.0
"""Per cent; slower nanotron runs wait for messages and checks, of which no number of a stack says anything."""

UNIVERSAL = (
    Number("host_kernel_s", 25e-6),
    Number("host_collective_s", 2e-5),
    Number("compute", 0.9, "volta"),
    Number("compute", 0.9, "ampere"),
    Number("compute", 0.88, "hopper"),
    Number("compute", 0.95, "blackwell"),
    Number("compute", 0.93, "tpu"),
    Number("compute", 0.93, "tpu-v6e"),
    Number("attention", 0.9),
    Number("attention", 1.2, "tpu"),
    Number("exposed", 0.9),
)
"""Of all stacks, with where they start and stay without data."""


@dataclass(frozen=True)
class Job:
    """One stack's fit."""

    stack: str
    families: tuple[str, ...]
    numbers: tuple[tuple[str, str], ...]
    """(name, generation of devices); `link:` or `hop:` and a link."""
    sample: int = 32
    """Runs of a family."""
    starts: tuple[tuple[str, float], ...] = ()
    """Centres of numbers that no other stack has."""


JOBS = (
    Job(
        "megatron-deepspeed",
        ("vtrain-micro24", "bloom-prequel"),
        (
            ("compute", ""),
            ("attention", ""),
            ("exposed", ""),
            ("link:omnipath-100", ""),
        ),
        sample=40,
        starts=(("attention", 1.0),),  # attention op by op; layers so wide that the host does not show
    ),
    Job(
        "vtrain",
        (COMPOSED,),
        (("host_kernel_s", ""), ("compute", ""), ("attention", ""), ("exposed", "")),
        sample=200,
        starts=(("attention", 1.0),),
    ),
    Job(
        "nanotron",
        ("nanotron-ultrascale",),
        (
            ("host_kernel_s", ""),
            ("host_collective_s", ""),
            ("compute", ""),
            ("exposed", ""),
            ("link:efa-100", ""),
            ("hop:efa-100", ""),
        ),
        sample=200,  # some of its runs met trouble: fewer follow them
        starts=(("link:efa-100", 2.0), ("hop:efa-100", 4e-4)),
    ),
    Job(
        "llm-foundry",
        ("mosaic-llmfoundry",),
        (
            ("host_kernel_s", ""),
            ("compute", "ampere"),
            ("compute", "hopper"),
            ("triton", "ampere"),
            ("triton", "hopper"),
        ),
        starts=(("triton", 1.0),),
    ),
    Job(
        "megatron-bridge",
        ("dgxc-benchmarking", "nemo-24.07", "megatron-bridge"),
        (
            ("host_kernel_s", ""),
            ("compute", "hopper"),
            ("compute", "blackwell"),
            ("exposed", ""),
        ),
    ),
    Job(
        "megatron-lm",
        ("vocab-parallel-mlsys25", "korthikanti-2022", "narayanan-sc21"),
        (("host_kernel_s", ""), ("compute", "ampere"), ("exposed", "")),
    ),
)


def usable(run: Run) -> bool:
    """Whether a run may be fitted on: not those with adapters, whose recipes are known from elsewhere, nor those that
    divide the vocabulary over stages, which wait for more than is known of, nor those of which only scripts say what
    ran."""
    if run.pieced:
        return False
    if run.family in LEFT or run.row.experts or run.adapters is not None or run.plan.schedule.vocabulary != "ends":
        return False
    return run.row.second_metric != "mfu_pct" or (run.row.second_value or 0) >= HEALTHY_MFU


class Fits:
    """All cases, and the fits over any part of them."""

    def __init__(self, runs: Sequence[Run], families: Sequence[str] = ()) -> None:
        """families: only these; empty for all."""
        good = [run for run in runs if usable(run) and (not families or run.family in families)]
        sizes = {family: job.sample for job in JOBS for family in job.families}
        self.families = sorted({run.family for run in good})
        self.all: dict[str, list[Case]] = {}
        self.few: dict[str, list[Case]] = {}
        for family in self.families:
            mine = [run for run in good if run.family == family]
            self.all[family] = cases(spread_evenly(mine, sizes.get(family, EACH)))
            chosen = {run.id for run in spread_evenly([case.run for case in self.all[family]], EACH)}
            self.few[family] = [case for case in self.all[family] if case.run.id in chosen]
        self.families = [family for family in self.families if self.all[family]]
        self.best: dict[str, Array] = {}
        """Logs of the numbers to start from, by stack."""
        self.newest: dict[str, Array] = {}
        self.steps = 6

    def from_record(self, record: FittedRates) -> FittedRates:
        """Start from the numbers on record, two steps of each. Returns them."""
        self.steps = 2
        every = {(n.name, n.arch): n.value for n in (record.universal.numbers if record.universal else ())}
        self.best[ANY] = np.log([every.get((n.name, n.arch), n.centre) for n in UNIVERSAL])
        for job in JOBS:
            own = record.record(job.stack)
            known = {(n.name, n.arch): n.value for n in (own.numbers if own else ())}
            known |= {(f"link:{n.link}", ""): n.factor for n in record.links}
            known |= {(f"hop:{n.link}", ""): n.hop_s for n in record.links}
            if all(key in known for key in job.numbers):
                self.best[job.stack] = np.log([known[key] for key in job.numbers])
        return record

    def universal(self, keep: Callable[[Case], bool], base: FittedRates) -> FittedRates:
        """`base` with the numbers of all stacks, from the cases that are kept."""
        families = [family for family in self.families if family not in APART]
        given = [case for family in families for case in self.few[family] if keep(case)]
        bare = replace(base, stacks=(), universal=None)
        problem = Problem(ANY, UNIVERSAL, bare, weight=EACH)
        x = problem.solve(given, self.best.get(ANY), steps=self.steps)
        self.newest[ANY] = x
        return replace(problem.fitted(x, provenance(given, "")), stacks=base.stacks)

    def job(self, job: Job, keep: Callable[[Case], bool], base: FittedRates) -> FittedRates:
        """`base` with a stack's numbers; without them if nothing is kept."""
        given = [case for family in job.families for case in self.all.get(family, ()) if keep(case)]
        links = {name.partition(":")[2] for name, _ in job.numbers} - {""}
        rest = replace(
            base,
            stacks=tuple(r for r in base.stacks if r.stack != job.stack),
            links=tuple(n for n in base.links if n.link not in links),
        )
        if not given:
            return rest
        archs = {device.arch for case in given for device in case.run.cluster.devices[:1]}
        numbers = tuple(
            Number(name, centre(name, arch or min(archs), rest, job), arch)
            for name, arch in job.numbers
            if not arch or any(a.startswith(arch) for a in archs)
        )
        problem = Problem(job.stack, numbers, rest, weight=24.0)
        start = self.best.get(job.stack)
        if start is not None and len(start) != len(numbers):
            start = None
        x = problem.solve(given, start, steps=self.steps)
        if len(numbers) == len(job.numbers):
            self.newest[job.stack] = x
        return problem.fitted(x, provenance(given, ""))

    def everything(self, keep: Callable[[Case], bool], base: FittedRates | None = None) -> FittedRates:
        """All numbers from the cases that are kept. Factors of networks come with a stack, and the numbers of all
        stacks need them: those stacks are fitted first. base: what they are before; None for nothing."""
        result = self.universal(keep, FittedRates()) if base is None else base
        for job in JOBS:
            if any(name.startswith("link:") for name, _ in job.numbers):
                result = self.job(job, keep, result)
        result = self.universal(keep, result)
        for job in JOBS:
            result = self.job(job, keep, result)
        return result


def centre(name: str, arch: str, base: FittedRates, job: Job) -> float:
    """What a number is for all stacks."""
    given = dict(job.starts)
    if name in given:
        return given[name]
    if name.startswith("link:"):
        return 1.0
    every = base.universal
    collected = [n.value for n in (every.numbers if every else ()) if n.name == name and arch.startswith(n.arch)]
    return collected[-1] if collected else next(n.centre for n in UNIVERSAL if n.name == name)


def provenance(given: Sequence[Case], error: str) -> Provenance:
    """Of numbers fitted to these cases."""
    families = sorted({case.run.family for case in given})
    archs = sorted({device.arch for case in given for device in case.run.cluster.devices[:1]})
    most = max(case.run.row.num_devices or 0 for case in given)
    return Provenance(
        data=f"published_runs.csv: {len(given)} runs of {', '.join(families)}",
        date=DATE,
        error=error or "not computed",
        range=f"{', '.join(archs)}; up to {most} devices; dense models",
    )


def shares(errors: Sequence[float]) -> str:
    """Median / mean / 90th percentile of the absolute error, and bias, in per cent."""
    off = np.expm1(np.asarray(errors))
    size = np.abs(off)
    return f"{np.median(size):.1%} / {size.mean():.1%} / {np.percentile(size, 90):.1%}, {np.median(off):+.1%}"


def with_errors(
    result: FittedRates, fits: Fits, models: dict[str, list[float]], sources: dict[str, list[float]]
) -> FittedRates:
    """The numbers with the errors of what was left out in their provenance."""

    def told(record_families: Sequence[str], where: dict[str, list[float]], what: str) -> str:
        parts = [f"{family} {shares(where[family])}" for family in record_families if family in where]
        return f"{what} left out, median / mean / p90, bias: " + "; ".join(parts)

    job_of = {job.stack: job for job in JOBS}
    stacks = tuple(
        replace(r, provenance=replace(r.provenance, error=told(job_of[r.stack].families, models, "models")))
        for r in result.stacks
    )
    by_link = {name[5:]: job for job in JOBS for name, _ in job.numbers if name.startswith("link:")}
    links = tuple(
        replace(n, provenance=replace(n.provenance, error=told(by_link[n.link].families, models, "models")))
        for n in result.links
    )
    assert result.universal is not None
    source = replace(result.universal.provenance, error=told(fits.families, sources, "sources"))
    return replace(result, stacks=stacks, links=links, universal=replace(result.universal, provenance=source))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--write", action="store_true", help="replace the numbers on record")
    parser.add_argument("--workers", type=int, default=2, help="processes for the folds")
    parser.add_argument("--nearby", action="store_true", help="start from the numbers on record")
    parser.add_argument("--no-folds", action="store_true", help="skip what is left out")
    parser.add_argument("--only", metavar="STACK", choices=[job.stack for job in JOBS], help="fit one stack's numbers")
    options = parser.parse_args()
    begun = perf_counter()
    runs, _ = read_runs(options.table)
    if options.only:
        one_stack(runs, next(job for job in JOBS if job.stack == options.only), write=options.write)
        return
    fits = Fits(runs)
    print(f"{sum(map(len, fits.all.values()))} cases, {perf_counter() - begun:.0f} s", flush=True)
    if options.nearby:
        result = fits.everything(lambda case: True, fits.from_record(fitted_rates()))
    else:
        result = fits.everything(lambda case: True)
    fits.best, fits.steps = fits.newest, 1  # without a part of the runs the numbers are near: slopes are at hand
    print_numbers(result)
    print(f"{perf_counter() - begun:.0f} s", flush=True)
    models: dict[str, list[float]] = {}
    sources: dict[str, list[float]] = {}
    by_model, by_source = [], []
    if not options.no_folds:
        with get_context("fork").Pool(options.workers, _shared, (fits, result)) as pool:
            for left, part, held in pool.imap(_fold, [*map(str, range(MODEL_FOLDS)), *fits.families], chunksize=1):
                (by_model if left.isdigit() else by_source).append(Fold(left_out=left, numbers=part))
                for family, errors in held.items():
                    (models if left.isdigit() else sources).setdefault(family, []).extend(errors)
                print(f"without {left}, {perf_counter() - begun:.0f} s", flush=True)
    print_errors(fits, result, models, sources)
    if options.write and not options.no_folds:
        folder = Path(gnomon.prices.__file__).parent
        result = with_errors(result, fits, models, sources)
        (folder / "fitted.toml").write_text(schema.dump(result), encoding="utf-8")
        FILE.write_text(schema.dump(Folds(models=tuple(by_model), sources=tuple(by_source))), encoding="utf-8")


def one_stack(runs: Sequence[Run], job: Job, *, write: bool) -> None:
    """A stack's own numbers again, on record and in every fold; those of all stacks and of other stacks stay."""
    fits, record, known = Fits(runs, job.families), fitted_rates(), folds()
    result = fits.job(job, lambda case: True, record)
    print_numbers(result)
    models: dict[str, list[float]] = {}
    sources: dict[str, list[float]] = {}
    by_model, by_source = [], []
    for fold in known.models:
        part = fits.job(job, lambda case, left=fold.left_out: str(fold_of(case.run.row.model)) != left, fold.numbers)
        for family, given in fits.all.items():
            held = [c.log_error(part) for c in given if str(fold_of(c.run.row.model)) == fold.left_out]
            models.setdefault(family, []).extend(held)
        by_model.append(Fold(left_out=fold.left_out, numbers=part))
    mine = next(stack for stack in result.stacks if stack.stack == job.stack)
    before = {fold.left_out: fold.numbers for fold in known.sources}
    for left in sorted({*before, *fits.families}):
        base = before.get(left, record)  # a source that no number was fitted to
        if left in fits.families:
            part = fits.job(job, lambda case, left=left: case.run.family != left, base)
            sources[left] = [case.log_error(part) for case in fits.all[left]]
        else:
            part = replace(base, stacks=tuple(mine if r.stack == job.stack else r for r in base.stacks))
        by_source.append(Fold(left_out=left, numbers=part))
    print_errors(fits, result, models, sources)
    if write:
        told = "; ".join(f"{family} {shares(errors)}" for family, errors in models.items() if errors)
        error = f"models left out, median / mean / p90, bias: {told}"
        mine = replace(mine, provenance=replace(mine.provenance, error=error))
        stacks = tuple(mine if r.stack == job.stack else r for r in result.stacks)
        its = {name.partition(":")[2] for name, _ in job.numbers}
        links = tuple(replace(n, provenance=mine.provenance) if n.link in its else n for n in result.links)
        folder = Path(gnomon.prices.__file__).parent
        (folder / "fitted.toml").write_text(schema.dump(replace(result, stacks=stacks, links=links)), encoding="utf-8")
        written = Folds(models=tuple(by_model), sources=tuple(by_source))
        FILE.write_text(schema.dump(written), encoding="utf-8")


_SHARED: list[tuple[Fits, FittedRates]] = []
"""What the processes that fit the folds have in common."""


def _shared(fits: Fits, result: FittedRates) -> None:
    _SHARED.append((fits, result))


def _fold(left: str) -> tuple[str, FittedRates, dict[str, list[float]]]:
    """(what was left out, the numbers without it, log errors of it by family)."""
    fits, result = _SHARED[0]
    if not left.isdigit():
        part = without(fits, left, result)
        return left, part, {left: [case.log_error(part) for case in fits.all[left]]}
    fold = int(left)
    part = fits.everything(lambda case: fold_of(case.run.row.model) != fold, result)
    held = {
        family: [c.log_error(part) for c in fits.all[family] if fold_of(c.run.row.model) == fold]
        for family in fits.families
    }
    return left, part, held


def without(fits: Fits, family: str, result: FittedRates) -> FittedRates:
    """The numbers as they would be without a source: of all stacks, of its own stack, of its network."""

    def keep(case: Case) -> bool:
        return case.run.family != family

    mine = [job for job in JOBS if family in job.families]
    part = result
    for job in mine:
        part = fits.job(job, keep, part)
    part = fits.universal(keep, part)
    for job in mine:
        part = fits.job(job, keep, part)
    return part


def print_numbers(result: FittedRates) -> None:
    """Every number, and how many there are."""
    for record in (result.universal, *result.stacks):
        if record is not None:
            print(record.stack, ", ".join(f"{n.name} {n.arch}".strip() + f" {n.value:.3g}" for n in record.numbers))
    print("links", ", ".join(f"{n.link} {n.factor:.3g} hop_s {n.hop_s:.3g}" for n in result.links))
    print(f"{result.count} numbers in all, {result.shared} of all stacks and links", flush=True)


def print_errors(
    fits: Fits, result: FittedRates, models: dict[str, list[float]], sources: dict[str, list[float]]
) -> None:
    """One line a family."""
    print("\n| family | runs | neutral | of all stacks | fitted | models left out | source left out |")
    print("|---|---:|---|---|---|---|---|")
    alone = replace(result, stacks=())
    for family, given in ((family, fits.all[family]) for family in fits.families):
        columns = [shares([case.log_error(numbers) for case in given]) for numbers in (FittedRates(), alone, result)]
        columns += [shares(where[family]) if where.get(family) else "" for where in (models, sources)]
        print(f"| {family} | {len(given)} | " + " | ".join(columns) + " |", flush=True)


if __name__ == "__main__":
    main()
