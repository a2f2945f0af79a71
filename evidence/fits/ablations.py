"""What each term of a prediction is worth: the error of families without it, the numbers of their stack fitted again.

    python -m evidence.fits.ablations published_runs.csv [--per-family 16] [--kernels | --composed]

A term is taken out of the prices of every case, the stack's numbers are found again (`fit_stacks`), and the median and
mean absolute error of each family are printed. Leaves out terms that belong to a run's plan (stages, microbatches).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from evidence.fits.fit_stacks import JOBS, Fits, usable
from evidence.fits.stack_fit import Case, cases, spread_evenly
from evidence.folds import folds
from evidence.published import Run, read_runs
from evidence.published.row import COMPOSED
from gnomon.prediction import contention, step
from gnomon.prediction.layer_types import Phase
from gnomon.prediction.step import Pricing
from gnomon.prices.fitted import fitted_rates
from gnomon.program import Key

FAMILIES = ("vtrain-micro24", "bloom-prequel", "nanotron-ultrascale", "mosaic-llmfoundry")
FACTS = ("checks", "polls", "slices")
"""What nanotron's benchmark did, each left out with the numbers as they are."""
KERNELS: dict[str, dict[str, object]] = {
    "(nothing)": {},
    "Triton's attention": {"attention_kernel": "flash2"},
    "cuBLAS 12.1": {"cublas": None},
    "metrics of the loss": {"loss_metrics": None},
    "all three": {"attention_kernel": "flash2", "cublas": None, "loss_metrics": None},
}
"""What MosaicML's benchmarks ran on, with what a stack has in its place."""
SIMULATED: dict[str, dict[str, object]] = {
    "as its code has it": {},
    "a launch forward costs as much as one backward": {"forward_launches": None},
    "and collectives are issued, in embedding and head too, and the layer is a trained one's": {
        "forward_launches": None,
        "composed": None,
    },
    "and messages travel over the link": {"forward_launches": None, "composed": None, "p2p_bytes_per_s": None},
}
"""What vTrain's simulator does, taken out one after the other."""
TERMS = ("host", "attention", "collectives in layers", "recompute", "head", "data-parallel", "contention")


class Without(Fits):
    """Some runs of some families, whose prices lack a term."""

    def __init__(self, result: dict[str, list[Case]]) -> None:
        self.all, self.best, self.newest, self.steps = result, {}, {}, 6


def take_out(term: str) -> Callable[[], None]:
    """Prices without the term, until the function that is returned is called."""
    phase, host, seconds, slowed = Pricing.phase, Pricing._host_s, Pricing._seconds, contention.SLOWED

    def lacking(self: Pricing, name: str, block: int) -> Phase:
        total = Phase()
        for layer, times in self._layers(block)[1]:
            result = getattr(layer, name) * times
            is_head = layer.sharded.block.name == "head"
            if (term == "recompute" and name == "recompute") or (term == "head" and is_head):
                continue
            total = total + Phase(
                compute_s=result.compute_s - (result.attention_s if term == "attention" else 0.0),
                attention_s=0.0 if term == "attention" else result.attention_s,
                comm_s={} if term == "collectives in layers" else result.comm_s,
                kernels=result.kernels,
                collectives=result.collectives,
                flops=result.flops,
            )
        return total

    def unlaunched(self: Pricing, *given: object) -> float:
        return 0.0 if term == "host" else host(self, *given)  # type: ignore[arg-type]

    def unreduced(self: Pricing, key: Key) -> float:
        if term == "data-parallel" and key.kind in ("AR", "REDUCE_GRAD", "UNSHARD"):
            return 0.0
        return 0.0 if term == "polls" and key.kind in step.POLLS else seconds(self, key)

    Pricing.phase, Pricing._host_s, Pricing._seconds = lacking, unlaunched, unreduced  # type: ignore[method-assign]
    contention.SLOWED = 0.0 if term == "contention" else slowed

    checks, launch = step.check_s, step.LAUNCH_S
    step.check_s = (lambda stack, ranks: 0.0) if term == "checks" else checks
    step.LAUNCH_S = 0.0 if term == "slices" else launch

    def put_back() -> None:
        step.check_s, step.LAUNCH_S = checks, launch
        Pricing.phase, Pricing._host_s, Pricing._seconds = phase, host, seconds  # type: ignore[method-assign]
        contention.SLOWED = slowed

    return put_back


def errors(result: dict[str, list[Case]]) -> dict[str, str]:
    """Family -> median / mean error, its stack fitted to these cases."""
    out = {}
    for job in JOBS:
        mine = [family for family in job.families if family in result]
        if not mine:
            continue
        numbers = Without(result).job(job, lambda case: True, fitted_rates())
        for family in mine:
            off = np.abs(np.expm1([case.log_error(numbers) for case in result[family]]))
            out[family] = f"{np.median(off):.1%} / {off.mean():.1%}"
    return out


def without(run: Run, changes: dict[str, object]) -> Run:
    """The run under a stack without some of its facts."""
    kept = tuple(fact for fact in run.stack.facts if changes.get(fact.field, "") is not None)
    return replace(run, stack=run.stack.with_values(kept, **changes))


def kernels(runs: Iterable[Run]) -> None:
    """MosaicML's runs under the numbers of all stacks, to which none of them was fitted."""
    mine = [run for run in runs if run.family == "mosaic-llmfoundry"]
    numbers = folds().without_source("mosaic-llmfoundry")
    assert numbers is not None
    print(f"\n| without | {len(mine)} of MosaicML, source left out | bias |\n|---|---|---|")
    for name, changes in KERNELS.items():
        signed = np.expm1([case.log_error(numbers) for case in cases(without(run, changes) for run in mine)])
        off = np.abs(signed)
        shares = f"{np.median(off):.1%} / {off.mean():.1%} / {np.percentile(off, 90):.1%}"
        print(f"| {name} | {shares} | {np.median(signed):+.1%} |", flush=True)


def composed(runs: Iterable[Run]) -> None:
    """Rows that vTrain's simulator made, with and without what its code does; its stack's numbers fitted again."""
    mine = [run for run in runs if run.family == COMPOSED]
    job = next(job for job in JOBS if COMPOSED in job.families)
    print("\n| vtrain's rows, 260 of 780 | median / mean / 90th percentile |\n|---|---|")
    for name, changes in SIMULATED.items():
        every = cases(without(run, changes) for run in spread_evenly(mine, 260))
        numbers = Without({COMPOSED: every[::4]}).job(job, lambda case: True, fitted_rates())
        off = np.abs(np.expm1([case.log_error(numbers) for case in every]))
        print(f"| {name} | {np.median(off):.1%} / {off.mean():.1%} / {np.percentile(off, 90):.1%} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--per-family", type=int, default=16, help="runs of a family")
    parser.add_argument("--kernels", action="store_true", help="only what MosaicML's benchmarks ran on")
    parser.add_argument("--composed", action="store_true", help="only how vTrain puts its layers together")
    options = parser.parse_args()
    runs = read_runs(options.table)[0]
    if options.composed:
        composed(runs)
        return
    if options.kernels:
        kernels(runs)
        return
    good = [run for run in runs if usable(run)]
    collected = {f: cases(spread_evenly([r for r in good if r.family == f], options.per_family)) for f in FAMILIES}
    print("| without | " + " | ".join(FAMILIES) + " |\n|---|" + "---|" * len(FAMILIES))
    for term in ("", *TERMS):
        put_back = take_out(term)
        for given in collected.values():
            forget(given)
        shown = errors(collected)
        put_back()
        print(f"| {term or '(nothing)'} | " + " | ".join(shown.get(f, "") for f in FAMILIES) + " |", flush=True)
    every = cases(spread_evenly([run for run in runs if run.family == "nanotron-ultrascale"], 20 * options.per_family))
    late = [case for case in every if case.run.stack.messages.p2p_poll_s is not None]
    print(f"\n| without | nanotron, {len(every)} of all runs | {len(late)} that polled |\n|---|---|---|")
    for term in ("", *FACTS):
        put_back = take_out(term)
        forget(every)
        shares = []
        for given in (every, late):
            off = np.abs(np.expm1([case.log_error(fitted_rates()) for case in given]))
            shares.append(f"{np.median(off):.1%} / {off.mean():.1%} / {np.percentile(off, 90):.1%}")
        put_back()
        print(f"| {term or '(nothing)'} | " + " | ".join(shares) + " |", flush=True)
    kernels(runs)


def forget(given: Iterable[Case]) -> None:
    """Prices that were made with other terms."""
    for case in given:
        case.memo.clear()
        case.made = replace(case.made, pricing=replace(case.made.pricing))


if __name__ == "__main__":
    main()
