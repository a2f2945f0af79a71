"""The fit of numbers to whole runs: cases, a sample of each family, damped Gauss-Newton steps towards a centre.

`Problem.solve` finds the numbers by `gnomon.prices.shrink`. Prices of layers and the Program do not depend on the
numbers and are made once a case; seconds are kept by the numbers that a case really uses. Leaves out: which numbers,
which runs (`fit_stacks`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from evidence.published import Run
from evidence.published.fitted_reading import fitted_reading
from gnomon.errors import GnomonError
from gnomon.prediction import Prediction
from gnomon.prediction.contention import contended
from gnomon.prediction.measured import outside
from gnomon.prices.curves import Provenance
from gnomon.prices.fitted import ANY, LIMITS, FittedRates, LinkNumber, Name, StackNumber, StackRecord
from gnomon.prices.shrink import Array, shrunk_fit
from gnomon.program import Structure
from gnomon.simulate import Durations
from gnomon.simulate.many import Script, periods

HUBER = 0.08
"""Log errors beyond this count linearly: one-off slow runs must not lead."""
LINK_LIMITS = (0.2, 10.0)
HOP_LIMITS = (1e-6, 2e-3)
SPREADS = {
    "host_kernel_s": 0.5,
    "host_collective_s": 1.0,
    "host_unit_s": 1.0,
    "compute": 0.12,
    "attention": 0.2,
    "triton": 0.2,
    "exposed": 0.4,
    "link": 0.5,
    "hop": 1.0,
}
"""How far, as a log, a stack's number is from that of all stacks: what shrinks it towards them."""


@dataclass(frozen=True)
class Number:
    """One number to find."""

    name: str
    """Of `Rates`; or `link:` (its factor) or `hop:` (its `hop_s`) and a link."""
    centre: float
    """Where it stays as long as no data move it."""
    arch: str = ""

    @property
    def spread(self) -> float:
        return SPREADS[self.name.partition(":")[0]]

    @property
    def link(self) -> str:
        """The link whose number it is; empty for a stack's."""
        return self.name.partition(":")[2]

    @property
    def bounds(self) -> tuple[float, float]:
        known: Mapping[str, tuple[float, float]] = {"link": LINK_LIMITS, "hop": HOP_LIMITS, **LIMITS}
        low, high = known[self.name.partition(":")[0]]
        return float(np.log(max(low, 1e-7))), float(np.log(high))


@dataclass
class Case:
    """One run with all of its prediction that no fitted number changes."""

    run: Run
    made: Prediction
    memo: dict[object, float] = field(default_factory=dict)
    script: Script | None = None

    def log_error(self, numbers: FittedRates) -> float:
        """log(predicted / measured) under these numbers."""
        return float(self.log_errors([numbers])[0])

    def log_errors(self, several: Sequence[FittedRates]) -> Array:
        """The same of each, played at once."""
        keys = [self._key(numbers) for numbers in several]
        new = {key: numbers for key, numbers in zip(keys, several, strict=True) if key not in self.memo}
        if new:
            self.memo.update(zip(new, self._played(list(new.values())), strict=True))
        return np.array([self.memo[key] for key in keys])

    def _key(self, numbers: FittedRates) -> object:
        """Returns those of the numbers that this case depends on, for its memo."""
        stages = self.made.pricing.stages
        archs = {stage.device.arch for stage in stages}
        names = {link.across_name or link.inside_name for stage in stages for link in stage.links.values()}
        return (
            tuple(numbers.rates(self.made.pricing.stack, arch) for arch in sorted(archs)),
            tuple((numbers.link_factor(name), numbers.hop_s(name)) for name in sorted(names)),
        )

    def _played(self, several: Sequence[FittedRates]) -> list[float]:
        structure = self.made.structure
        pricings = [self.made.pricing.with_numbers(numbers) for numbers in several]
        busy = np.stack([contended(structure, pricing)[0].busy for pricing in pricings])
        if self.script is None:
            self.script = _script(structure)
        seconds = periods(self.script, Durations(busy=busy)).tolist()
        return [
            float(np.log((whole - outside(self.run, structure, pricing)) / self.run.step_s))
            for whole, pricing in zip(seconds, pricings, strict=True)
        ]


_SCRIPTS: dict[int, Script] = {}


def _script(structure: Structure) -> Script:
    """The structure's script, made once (structures are shared and kept by their predictions)."""
    if id(structure) not in _SCRIPTS:
        _SCRIPTS[id(structure)] = Script.of(structure)
    return _SCRIPTS[id(structure)]


def spread_evenly(runs: Iterable[Run], count: int) -> list[Run]:
    """So many runs, in an order that neighbours in model and layout share."""
    mine = sorted(
        runs,
        key=lambda r: (r.row.model, r.row.num_devices or 0, r.row.tp or 0, r.row.pp or 0, r.row.micro_batch or 0, r.id),
    )
    picks = np.unique(np.linspace(0, len(mine) - 1, min(count, len(mine))).round().astype(int))
    return [mine[i] for i in picks]


def cases(runs: Iterable[Run]) -> list[Case]:
    """Those that can be predicted."""
    collected = []
    for run in runs:
        try:
            collected.append(Case(*fitted_reading(run)))
        except GnomonError:
            continue
    return collected


def with_values(
    base: FittedRates, stack: str, numbers: Sequence[Number], values: Sequence[float], message: Provenance
) -> FittedRates:
    """`base` with these numbers of a stack (ANY: of all) and of links in place of its own."""
    own: list[StackNumber] = []
    links = {number.link: number for number in base.links}
    for number, value in zip(numbers, values, strict=True):
        value = float(f"{value:.3g}")
        if number.link:
            plain = LinkNumber(link=number.link, factor=1.0, provenance=message)
            changed = {"factor": value} if number.name.startswith("link:") else {"hop_s": value}
            links[number.link] = replace(links.get(number.link, plain), provenance=message, **changed)
        else:
            name: Name = number.name  # type: ignore[assignment]
            own.append(StackNumber(stack=stack, name=name, value=value, arch=number.arch))
    record = StackRecord(numbers=tuple(own), provenance=message)
    if stack == ANY:
        return FittedRates(universal=record, stacks=base.stacks, links=tuple(links.values()))
    rest = tuple(r for r in base.stacks if r.stack != stack)
    return FittedRates(universal=base.universal, stacks=(*rest, record), links=tuple(links.values()))


@dataclass(frozen=True)
class Problem:
    """Numbers of one stack, or of all, to be found."""

    stack: str
    numbers: tuple[Number, ...]
    base: FittedRates
    """Everything else."""
    weight: float = 16.0
    """Rows that a family counts for, however many it has."""

    def fitted(self, x: Array, message: Provenance | None = None) -> FittedRates:
        """`base` with the numbers whose logs are x."""
        blank = Provenance(data="being fitted", date="2026-11-21", error="unknown", range="unknown")
        return with_values(self.base, self.stack, self.numbers, np.exp(x).tolist(), message or blank)

    def weights(self, given: Sequence[Case]) -> Array:
        """Of each case: a family's rows share its weight."""
        count: dict[str, int] = {}
        for case in given:
            count[case.run.family] = count.get(case.run.family, 0) + 1
        return np.array([min(1.0, self.weight / count[case.run.family]) for case in given])

    def solve(self, given: Sequence[Case], start: Array | None = None, steps: int = 6) -> Array:
        """Logs of the numbers."""
        centre = np.log([number.centre for number in self.numbers])
        spread = np.array([number.spread for number in self.numbers])
        low, high = np.array([number.bounds for number in self.numbers]).T

        def errors(points: Array) -> Array:
            several = [self.fitted(x) for x in points]
            return np.array([case.log_errors(several) for case in given]).T

        return shrunk_fit(
            errors,
            centre,
            spread,
            limits=(low, high),
            weights=self.weights(given),
            scale=HUBER,
            start=start,
            steps=steps,
        )
