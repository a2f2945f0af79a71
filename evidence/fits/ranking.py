"""Would the planner have chosen well? Layouts that were really run, and configurations that their authors tuned.

    python -m evidence.fits.ranking published_runs.csv [--family NAME …] [--no-environments] [--tuned ID …]

Prints `results/ranking.md`. First, groups of runs that differ in layout alone (model, devices, batch, sequence length,
precision): what the layout predicted fastest costs against the fastest measured (its regret), whether the best is among
five that `gnomon plan --try` would run, and the rank correlation; with the numbers on record on the fitted reading, and
with the group's model or source left out of every fit on the first one. nanotron's runs differ in how they were
started, which rows do not say: one line has each in whichever way of three its time is nearest to. Then, for
configurations tuned by their authors: how many plans of the search are predicted to be faster, what the best of them
gains, and where. Leaves out time itself (`gnomon validate`).
"""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import numpy as np

from evidence.published import Run, read_runs
from evidence.published.fitted_reading import as_measured, fitted_reading
from evidence.published.nanotron import NANOTRON_POLL_S
from evidence.readings import readings
from evidence.validate import score_all
from evidence.validation import Score, spearman
from gnomon.errors import GnomonError
from gnomon.formats.job import with_job_fields as with_fields
from gnomon.report.prediction import WORDS, describe
from gnomon.search import FoundPlan, loss, make_space, pick_diverse, solve
from gnomon.software import Stack

FAMILIES = ("nanotron-ultrascale", "vtrain-micro24", "mosaic-llmfoundry", "bloom-prequel", "libai")
"""Sources that ran several layouts of one model on as many devices."""
SMALLEST = 4
"""Layouts of a group."""
FEW = 5
"""Plans that `gnomon plan --try` would run."""
BAD = 0.1
"""Regret from which a group is listed."""
TOP = 10
"""Plans of the search that a tuned configuration is ranked among."""
BENCHMARKED = "nanotron-ultrascale"
ENVIRONMENTS: tuple[tuple[bool | None, float | None], ...] = ((None, None), (True, None), (True, NANOTRON_POLL_S))
"""Collectives checked or not, and seconds between looks at messages: ways in which runs of that source were started."""
TROUBLE = 1.8
"""A run so many times slower than predicted, and than its twin, met trouble that no layout explains."""

TUNED = (
    "narayanan-sc21-0001",
    "korthikanti-2022-0004",
    "nemo-24.07-0003",
    "nemo-24.07-0005",
    "nemo-24.07-0006",
    "nemo-24.07-0007",
    "nemo-24.07-0008",
    "nemo-24.07-0011",
    "dgxc-benchmarking-0026",
    "dgxc-benchmarking-0036",
    "megatron-bridge-0127",
    "fms-fsdp-0001",
)
"""Rows of the table: Megatron's papers, NVIDIA's recipes and IBM's FSDP runs, tuned by who ran them."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Runs of one choice."""

    name: str
    runs: tuple[tuple[Run, Score], ...]

    def predicted(self, truth: str) -> np.ndarray:
        """Seconds, as `fitted`, `model` or `source` was left out."""
        errors = {"fitted": "error", "model": "without_model", "source": "without_source"}[truth]
        return np.array([score.measured_s * (1 + getattr(score, errors)) for _, score in self.runs])

    @property
    def measured(self) -> np.ndarray:
        return np.array([run.step_s for run, _ in self.runs])

    def regret(self, truth: str = "fitted", few: int = 1) -> float:
        """What the best of a few, as `gnomon plan --try` chooses them, costs over the best measured."""
        order = np.argsort(self.predicted(truth), kind="stable")
        chosen = order[pick_diverse([self.runs[i][0].plan for i in order], few, fill=True)]
        return float(self.measured[chosen].min() / self.measured.min() - 1)

    def correlation(self, truth: str = "fitted") -> float | None:
        return spearman(self.predicted(truth).tolist(), self.measured.tolist())

    def without_trouble(self) -> Group:
        """Its runs that took no longer than TROUBLE times the prediction."""
        slow = self.measured > TROUBLE * self.predicted("fitted")
        kept = tuple(run for run, off in zip(self.runs, slow.tolist(), strict=True) if not off)
        return Group(name=self.name, runs=kept)

    @property
    def typical(self) -> float:
        """What a median layout costs over the best."""
        return float(np.median(self.measured) / self.measured.min() - 1)


def groups(runs: Sequence[Run], scores: Iterable[Score]) -> list[Group]:
    """Of at least SMALLEST layouts, in order of name."""
    by_id = {run.id: run for run in runs}
    collected: dict[tuple[object, ...], list[tuple[Run, Score]]] = defaultdict(list)
    for score in scores:
        run = by_id[score.id]
        row = run.row
        collected[row.family, row.model, row.num_devices, row.global_batch, row.seq_len, row.precision].append(
            (run, score)
        )
    made = [
        Group(name=f"{key[1]} on {key[2]}, batch {key[3]} x {key[4]}", runs=tuple(members))
        for key, members in sorted(collected.items(), key=str)
        if len({str(run.plan) for run, _ in members}) >= SMALLEST
    ]
    return made


def nearest(runs: Sequence[Run], workers: int) -> list[Score]:
    """Each run's score in the environment of three whose prediction is nearest to its time."""
    every = [
        known_to_run(run, checked, poll_s)
        for run in runs
        for checked, poll_s in ENVIRONMENTS
        if poll_s is None or run.plan.mesh.pp > 1
    ]
    best: dict[str, Score] = {}
    for score in score_all(every, workers):
        if isinstance(score, Score):
            known = best.get(score.id)
            if known is None or abs(np.log1p(score.error)) < abs(np.log1p(known.error)):
                best[score.id] = score
    return list(best.values())


def known_to_run(run: Run, checked: bool | None, poll_s: float | None) -> Run:
    """The run as one whose flags are known, so that thresholds decide nothing of it."""
    read = as_measured(run, readings().nanotron)
    return replace(read, stack=started(run.stack, checked, poll_s), row=replace(run.row, notes=""))


def started(stack: Stack, checked: bool | None, poll_s: float | None) -> Stack:
    """The stack in one environment."""
    facts = tuple(fact for fact in stack.facts if fact.field not in ("checked_collectives", "p2p_poll_s"))
    bare = stack.with_values(facts, checked_collectives=None, p2p_poll_s=None)
    return with_fields(bare, "an environment that is tried", checked_collectives=checked, p2p_poll_s=poll_s)


def family_line(family: str, given: Sequence[Group]) -> str:
    """One row of the table of families."""
    cells = []
    for truth in ("fitted", "model", "source"):
        regrets = np.array([group.regret(truth) for group in given])
        cells.append(f"{np.median(regrets):.1%} / {regrets.mean():.1%} / {regrets.max():.0%}")
    best = sum(group.regret(few=FEW) < 1e-9 for group in given)
    sizes = np.array([len(group.runs) for group in given])
    rho = np.array([group.correlation() or 0.0 for group in given])
    typical = np.median([group.typical for group in given])
    return (
        f"| {family} | {len(given)} | {sizes.sum()} | {cells[0]} | {cells[1]} | {cells[2]} | {best} of {len(given)} | "
        f"{float((rho * sizes).sum() / sizes.sum()):.2f} | {typical:.0%} |"
    )


def group_line(group: Group) -> str:
    """A group whose choice cost something, with the reason as far as the runs tell it."""
    predicted, measured = group.predicted("fitted"), group.measured
    chosen, best = int(np.argmin(predicted)), int(np.argmin(measured))
    return (
        f"| {group.name} | {len(group.runs)} | {group.regret():.1%} | {words(group.runs[chosen][0])}: "
        f"{predicted[chosen]:.3g} s predicted, {measured[chosen]:.3g} measured | {words(group.runs[best][0])}: "
        f"{predicted[best]:.3g}, {measured[best]:.3g} | {reason(group, chosen, best)} |"
    )


def reason(group: Group, chosen: int, best: int) -> str:
    """Why the choice was not the best, in one line."""
    predicted, measured = group.predicted("fitted"), group.measured
    run = group.runs[chosen][0]
    twin = next((i for i, (other, _) in enumerate(group.runs) if i != chosen and is_twin(run, other)), None)
    slow = float(np.mean(measured > TROUBLE * predicted))
    if measured[chosen] > TROUBLE * predicted[chosen]:
        if twin is not None and measured[chosen] > TROUBLE * measured[twin]:
            zero = group.runs[twin][0].plan.optimizer.zero
            return f"the run met trouble: with ZeRO {zero} it took {measured[twin]:.3g} s"
        return f"the run met trouble, as {slow:.0%} of this group's runs did (over {TROUBLE} times the prediction)"
    if predicted[best] / predicted[chosen] < 1.1:
        return "a near tie: the two are predicted within a tenth"
    return f"the best is predicted {predicted[best] / measured[best] - 1:+.0%}"


def is_twin(run: Run, other: Run) -> bool:
    """Whether two runs differ in ZeRO alone."""
    mine, theirs = run.plan, other.plan
    return mine.mesh == theirs.mesh and mine.schedule == theirs.schedule and mine.optimizer != theirs.optimizer


def words(run: Run) -> str:
    """Axes of a run."""
    mesh, micro = run.plan.mesh, run.plan.schedule.micro_batch_size
    return f"tp {mesh.tp} pp {mesh.pp} dp {mesh.data_ranks} micro {micro} ZeRO {run.plan.optimizer.zero}"


def ranking(runs: Sequence[Run], workers: int, families: Sequence[str], *, environments: bool) -> Iterator[str]:
    """The tables of groups. environments: with the line of nanotron's runs each in its nearest environment."""
    wanted = [run for run in runs if run.family in families]
    scores = [score for score in score_all(wanted, workers) if isinstance(score, Score)]
    by_family = {
        family: groups(runs, members)
        for family, group in groupby(sorted(scores, key=lambda s: s.family), key=lambda s: s.family)
        if (members := list(group))
    }
    yield "## Among layouts that were run\n"
    yield (
        "| family | groups | runs | regret | model left out | source left out | best of five is the best | "
        "rank correlation | a median layout |"
    )
    yield "|---|---:|---:|---|---|---|---|---:|---:|"
    for family, given in by_family.items():
        if given:
            yield family_line(family, given)
    for family, given in by_family.items():
        few = [group for group in given if max(run.row.num_devices or 0 for run, _ in group.runs) <= 256]
        if 0 < len(few) < len(given):
            yield family_line(f"{family}, up to 256 devices", few)
    for family, given in by_family.items():
        plain = [group.without_trouble() for group in given]
        if any(len(one.runs) < len(other.runs) for one, other in zip(plain, given, strict=True)):
            yield family_line(f"{family}, without slow runs", [group for group in plain if len(group.runs) >= SMALLEST])
    if environments and BENCHMARKED in by_family:
        known = nearest([run for run in runs if run.family == BENCHMARKED], workers)
        off = np.abs([score.error for score in known])
        yield family_line(f"{BENCHMARKED}, environment known", groups(runs, known))
        yield (
            f"\nEnvironment known: each run in the one of {len(ENVIRONMENTS)} (collectives checked or not, messages "
            f"polled or not) whose prediction is nearest to its time; errors then {np.median(off):.1%} / "
            f"{off.mean():.1%} / {np.percentile(off, 90):.1%} (median, mean, 90th percentile; chosen by the times)."
        )
    yield (
        "\nRegret: median / mean / worst. A median layout: what it costs over the best, median of groups. Slow: over "
        f"{TROUBLE} times the prediction, with the numbers on record.\n"
    )
    yield f"Groups in which the predicted best costs over {BAD:.0%}:\n"
    yield "| group | runs | regret | predicted best | measured best | why |"
    yield "|---|---:|---:|---|---|---|"
    every = [group for given in by_family.values() for group in given]
    for group in sorted(every, key=lambda g: -g.regret()):
        if group.regret() > BAD:
            yield group_line(group)


def tuned(runs: Sequence[Run], wanted: Sequence[str]) -> Iterator[str]:
    """The table of tuned configurations."""
    by_id = {run.id: run for run in runs}
    yield "\n## Configurations tuned by their authors\n"
    yield "| configuration | measured s | predicted s | rank | our plan | gains | where |"
    yield "|---|---:|---:|---:|---|---:|---|"
    for name in wanted:
        try:
            yield tuned_line(by_id[name])
        except (GnomonError, KeyError) as error:
            yield f"| {name} | | | | | | {error} |"


def tuned_line(run: Run) -> str:
    """A configuration beside the search's best for the same model, machines, batch, program and precision."""
    run, made = fitted_reading(run)
    space = make_space(run.graph, run.cluster, run.workload, base=run.plan, stack=run.stack)
    result = solve(run.graph, run.cluster, run.workload, space, run.stack, top=TOP)
    best = result.best[0]
    faster = sum(candidate.step_s < made.step_s * (1 - 1e-9) for candidate in result.best)
    rank = f"{faster + 1}" if faster < TOP else f"over {TOP}"
    theirs = FoundPlan(point=best.point, plan=made.plan, prediction=made)
    lost = loss(best, theirs)
    gain = made.step_s / best.step_s - 1
    part = WORDS.get(lost.part, lost.part.lower()).partition(" (")[0]
    where = f"{part} {lost.part_s / made.step_s:.0%} of its step" if gain > 0 else "the same, or nothing faster fits"
    if not made.fits:
        where += "; predicted not to fit"
    row = run.row
    what = describe(made.plan, run.workload).partition("; recompute")[0]
    return (
        f"| {row.model} on {row.num_devices} {row.device} ({run.stack.name}): {what} | {run.step_s:.3g} | "
        f"{made.step_s:.3g} | {rank} of {space.size:,} | {describe(best.plan, run.workload)} | {gain:+.1%} | {where} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--family", nargs="*", default=FAMILIES)
    parser.add_argument("--no-groups", action="store_true", help="only tuned configurations")
    parser.add_argument("--no-environments", action="store_true", help="no line of nanotron's nearest environments")
    parser.add_argument("--tuned", nargs="*", default=TUNED, help="rows of tuned configurations; none: skip them")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    runs, _ = read_runs(options.table)
    if not options.no_groups:
        for line in ranking(runs, options.workers, options.family, environments=not options.no_environments):
            print(line, flush=True)
    if options.tuned:
        for line in tuned(runs, options.tuned):
            print(line, flush=True)


if __name__ == "__main__":
    main()
