"""What kernels and collectives lose to each other: errors of families by the seconds lost to each second together.

    python -m evidence.fits.contention published_runs.csv [--per-family 24] [--term collectives] [--values 0 0.25]

`collectives`: what they lose to kernels (`contention.BACK`), in runs under ZeRO 3; beside them, of stacks with numbers
of their own, as many other runs of the family take part in the fit. `kernels`: what they lose to collectives of whole
stages, in runs under ZeRO 0 to 2. Prints for each family and value the median / mean / 90th percentile of the absolute
error and the bias: with the numbers on record for runs of other models, and with the stack's own fitted again to these.
Leaves out the numbers of all stacks, which stay, and runs of more experts than one or with checks of each collective.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

from evidence.fits.ablations import Without
from evidence.fits.fit_stacks import JOBS, Job, shares, usable
from evidence.fits.stack_fit import Case, cases, spread_evenly
from evidence.folds import fold_of, folds
from evidence.published import Run, read_runs
from gnomon import orders
from gnomon.prediction import contention
from gnomon.prediction.step import Pricing
from gnomon.prices.fitted import FittedRates, fitted_rates

Cases = dict[str, list[Case]]

VALUES = {"collectives": (0.0, 0.1, 0.25, 0.5), "kernels": (0.0, 0.1, 0.25)}


def shown(term: str, run: Run) -> bool:
    """Whether the term is in the prediction of a run."""
    return (run.plan.optimizer.zero == 3) == (term == "collectives") and not run.stack.launch.checked_collectives


def lose(term: str, value: float) -> Callable[[], None]:
    """Predictions with the term, until the function that is returned is called."""
    plain, back = Pricing._parameters, contention.BACK

    def put_back() -> None:
        Pricing._parameters, contention.BACK = plain, back  # type: ignore[method-assign]

    def slowing(self: Pricing, kind: str, block: int) -> float:
        """The part of a stage's collective that does not hide, and what the computing that hides the rest loses."""
        exposed, beside = plain(self, kind, block), self._beside(kind, block)
        buckets, last = self._buckets(kind, block) if beside else (1, 0.0)
        hidden = self._reduced(kind, block, buckets) - exposed
        if hidden <= 0:
            return exposed
        least, wired = (hidden + exposed) * max(last, 1 / buckets), self._wired[kind, block, buckets]
        taken = sum(s * contention.share(link) for s, link in wired) / sum(s for s, _ in wired)
        computing = "F" if kind == "UNSHARD" else "W" if orders.find(self.plan.schedule.name).split else "B"
        share, idle = contention._kernels(self.parts(computing, block))
        lost = max(value * taken * share * hidden - idle, 0.0)
        return lost + max(min(least, exposed), exposed - lost * (buckets - 1) / buckets)

    if term == "collectives":
        contention.BACK = value
    elif value:
        Pricing._parameters = slowing  # type: ignore[method-assign]
    return put_back


def sample(term: str, runs: list[Run], entry: int) -> tuple[Cases, Cases]:
    """(runs that show the term, those that their stacks are fitted to), by family."""
    shows, fits = dict[str, list[Case]](), dict[str, list[Case]]()
    with_numbers = {family for job in JOBS for family in job.families}
    for family in sorted({run.family for run in runs if shown(term, run)}):
        mine = [run for run in runs if run.family == family]
        few = spread_evenly([run for run in mine if shown(term, run)], entry)
        collected = [case for case in cases(few) if shown(term, case.run)]
        if not collected:
            continue
        shows[family] = fits[family] = collected
        if family in with_numbers and term == "collectives":
            rest = [run for run in mine if not shown(term, run)]
            fits[family] = collected + (cases(spread_evenly(rest, len(collected))) if rest else [])
    return shows, fits


def errors(shows: Cases, fits: Cases) -> dict[str, tuple[str, str]]:
    """Family -> errors of other models' numbers (on record, fitted again)."""
    on_record, again = dict[str, list[float]](), dict[str, list[float]]()
    for family, given in shows.items():
        apart = folds().without_source(family) is not None  # None: no number was fitted to it
        for case in given:
            numbers = folds().without_model(case.run.row.model) if apart else fitted_rates()
            on_record.setdefault(family, []).append(case.log_error(numbers))
    for job in JOBS:
        mine = {family: shows[family] for family in job.families if family in shows}
        for fold in folds().models if mine else ():
            part = without(fits, job, int(fold.left_out))
            for family, given in mine.items():
                held = [case for case in given if fold_of(case.run.row.model) == int(fold.left_out)]
                again.setdefault(family, []).extend(case.log_error(part) for case in held)
    return {f: (shares(on_record[f]), shares(again[f]) if f in again else "") for f in shows}


def without(fits: Cases, job: Job, fold: int) -> FittedRates:
    """The stack's numbers fitted again to models of other folds."""
    base = next(model.numbers for model in folds().models if model.left_out == str(fold))
    return Without(fits).job(job, lambda case: fold_of(case.run.row.model) != fold, base)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--per-family", type=int, default=24, help="runs of a family")
    parser.add_argument("--term", choices=sorted(VALUES), help="one of them; both if left out")
    parser.add_argument("--values", type=float, nargs="+", help="seconds lost to each second together")
    parser.add_argument("--families", nargs="+", help="these alone")
    options = parser.parse_args()
    begun = perf_counter()
    runs = [run for run in read_runs(options.table)[0] if usable(run)]
    runs = [run for run in runs if not options.families or run.family in options.families]
    for term in [options.term] if options.term else sorted(VALUES):
        shows, fits = sample(term, runs, options.per_family)
        print(f"\n| {term} lose | family | runs | on record | fitted again |\n|---:|---|---:|---|---|", flush=True)
        for value in options.values or VALUES[term]:
            for case in (case for given in (*shows.values(), *fits.values()) for case in given):
                case.memo.clear()
            put_back = lose(term, value)
            for family, (record, again) in errors(shows, fits).items():
                print(f"| {value:g} | {family} | {len(shows[family])} | {record} | {again} |", flush=True)
            put_back()
        print(f"{perf_counter() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
