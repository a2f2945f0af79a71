"""Numbers of a stack from a few measured runs of the user's own, held to what is known without them.

`fit_own(runs)` returns an `OwnFit`: the stack with its `own` numbers, and every run's error before and after. Four
factors are found apart, on the time of kernels, of attention beyond that, of the host, and of waiting for collectives;
each is held to 1 by how far stacks differ in it. Leaves out reading and writing files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gnomon.errors import GnomonError, InputError
from gnomon.prediction import Prediction, predict
from gnomon.prediction.measured import PredictableRun, RefusedRun, predicted_s
from gnomon.prices.fitted import OWN_LIMITS, FittedRates, fitted_rates, rates
from gnomon.prices.host import host_cost
from gnomon.prices.shrink import Array, shrunk_fit
from gnomon.software import OwnNumber, OwnRuns, Stack

SPREADS: Mapping[str, float] = {"kernels": 0.12, "attention": 0.3, "host": 0.5, "collectives": 0.4}
"""How far stacks differ from each other, as a log: of the numbers in `fitted.toml`."""

MEASURED_KERNELS = 0.5
"""How far kernels of a machine that was calibrated may be off, in place of what programs differ by: other work may
share it now, or did then."""

SCALE = 0.06
"""What runs of one setting and what prices leave open differ by, as a log: an error of this size is noise."""

FEW, MANY = 3, 10
"""Runs from which numbers mean something; above MANY the rest adds little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnFit:
    """What own runs say."""

    stack: Stack
    """With the numbers."""
    factors: tuple[tuple[str, float], ...]
    """(what, how much slower than on record): kernels, attention, host, collectives."""
    runs: tuple[PredictableRun, ...]
    """Those fitted to."""
    before: tuple[float, ...]
    """Predicted over measured, minus 1, of each with the numbers on record."""
    after: tuple[float, ...]
    """With its own."""
    left_out: tuple[float, ...]
    """With those fitted to the other runs; empty for one run, or if nobody asked."""
    refused: tuple[RefusedRun, ...]
    """Runs that cannot be predicted."""


def fit_own(
    runs: Sequence[PredictableRun],
    *,
    source: str,
    date: str,
    machine: str = "",
    numbers: FittedRates | None = None,
    check: bool = True,
) -> OwnFit:
    """The stack of these runs with numbers fitted to them.

    source: name of their table, for the provenance. date: YYYY-MM-DD. machine: the one that they ran on. numbers: known
    before, in place of those on record. check: also fit without each run in turn, to judge the fit. InputError when no
    run can be predicted, or when the runs are of several stacks.
    """
    used, predictions, refused = _predicted(runs, source)
    errors = _Errors(used, predictions, numbers or fitted_rates())
    everyone = np.ones(len(used), bool)
    x = errors.fit(everyone)
    left_out = []
    if check and len(used) > 1:
        for i in range(len(used)):
            others = everyone.copy()
            others[i] = False
            left_out.append(float(np.expm1(errors(errors.fit(others))[i])))
    # Errors are logarithms of predicted over measured, and so are factors: zeros are the numbers on record.
    before, after = np.expm1(errors(np.zeros(len(SPREADS)))), np.expm1(errors(x))
    error = f"median of the absolute errors {np.median(abs(before)):.1%} before, {np.median(abs(after)):.1%} after"
    if left_out:
        error += f", {np.median(np.abs(left_out)):.1%} on each run left out"
    devices = sorted({device.name for run in used for device in run.cluster.devices})
    most = max(run.cluster.num_devices for run in used)
    own = OwnRuns(
        numbers=errors.numbers(x),
        runs=len(used),
        data=f"{source}: {', '.join(run.id for run in used[:MANY])}{' …' if len(used) > MANY else ''}",
        date=date,
        machine=machine,
        error=error,
        range=f"{', '.join(devices)}; up to {most} devices",
    )
    return OwnFit(
        stack=replace(used[0].stack, own=own),
        factors=tuple(zip(SPREADS, np.exp(x).tolist(), strict=True)),
        runs=tuple(used),
        before=tuple(before.tolist()),
        after=tuple(after.tolist()),
        left_out=tuple(left_out),
        refused=refused,
    )


ROUNDS = 4
"""In which factors are found from a trace: what is exposed of a collective changes with the kernels it overlaps."""
LEAST_SHARE = 0.01
"""Of the step: a smaller part of a trace, or of its prediction, says nothing of a rate."""


def fit_parts(run: PredictableRun, parts: Mapping[str, float], *, source: str, date: str, machine: str = "") -> OwnFit:
    """The stack of one recorded step with numbers from where its time went.

    parts: seconds that the step computed (`compute`), waited for collectives (`exposed communication`) and for the host
    (`host`), as `gnomon.profile.PARTS` names them; what no prediction has, as loading data, is left out of both sides.
    Each of the three has a factor of its own, which is what was measured over what is predicted; attention keeps its
    rate beside other kernels. InputError where the run cannot be predicted.
    """
    (used, *_), (predictions, *_), refused = _predicted([run], source)
    errors = _Errors([used], [predictions], fitted_rates())
    x = np.zeros(len(SPREADS))
    for _ in range(ROUNDS):
        own = OwnRuns(numbers=errors.numbers(x), runs=1, data="-", date="-", error="-", range="-")
        now = predict(run.graph, run.cluster, run.plan, run.workload, replace(run.stack, own=own))
        part_seconds = _seconds_of(now)
        # i: place among SPREADS; attention (1) stays at 0, a factor of 1.
        for i, part in ((0, "compute"), (2, "host"), (3, "exposed communication")):
            least = LEAST_SHARE * run.step_s
            if parts.get(part, 0.0) > least and part_seconds[part] > least:
                # The factor grows by what is still missing, within the limits of `fit`: e² is 7.4 times as slow, or as
                # fast.
                x[i] = float(np.clip(x[i] + np.log(parts[part] / part_seconds[part]), -2.0, 2.0))
    before, after = np.expm1(errors(np.zeros(len(SPREADS)))), np.expm1(errors(x))
    devices = sorted({device.name for device in run.cluster.devices})
    own = OwnRuns(
        numbers=errors.numbers(x),
        runs=1,
        data=f"{source}: the parts of one recorded step",
        date=date,
        machine=machine,
        error=f"the step {before[0]:+.1%} before, {after[0]:+.1%} after, of the trace that it is fitted to",
        range=f"{', '.join(devices)}; up to {run.cluster.num_devices} devices",
    )
    return OwnFit(
        stack=replace(run.stack, own=own),
        factors=tuple(zip(SPREADS, np.exp(x).tolist(), strict=True)),
        runs=(run,),
        before=tuple(before.tolist()),
        after=tuple(after.tolist()),
        left_out=(),
        refused=refused,
    )


def _seconds_of(prediction: Prediction) -> dict[str, float]:
    """Splits a predicted step's seconds into three parts: computing, exposed communication, and kernels that wait for
    the host."""
    parts = {"compute": 0.0, "exposed communication": 0.0, "host": 0.0}
    for name, seconds in prediction.breakdown.items():
        if name.endswith(" communication"):
            parts["exposed communication"] += seconds
        elif name == "launch":
            parts["host"] += seconds
        elif name not in ("bubble", "ahead", "offload"):
            parts["compute"] += seconds
    return parts


def _predicted(
    runs: Sequence[PredictableRun], source: str
) -> tuple[list[PredictableRun], list[Prediction], tuple[RefusedRun, ...]]:
    """The runs that can be predicted, their predictions, and the rest. InputError as fit_own says."""
    used: list[PredictableRun] = []
    predictions: list[Prediction] = []
    refused: list[RefusedRun] = []
    for run in runs:
        try:
            predictions.append(predict(run.graph, run.cluster, run.plan, run.workload, run.stack))
            used.append(run)
        except GnomonError as error:
            refused.append(RefusedRun(id=run.id, reason=str(error)))
    if not used:
        why = f": {refused[0].reason}" if refused else ""
        raise InputError(f"no run of {source} can be predicted{why}")
    names = sorted({run.stack.name for run in used})
    if len(names) > 1:
        stacks_text = ", ".join(names)
        raise InputError(f"{source} has runs of {len(names)} stacks, {stacks_text}; give the runs of one at a time")
    return used, predictions, tuple(refused)


class _Errors:
    """log(predicted / measured) of every run as a function of the logs of the factors."""

    def __init__(self, runs: Sequence[PredictableRun], predictions: Sequence[Prediction], base: FittedRates) -> None:
        self.runs, self.predictions, self.base = runs, predictions, base
        self.stack = replace(runs[0].stack, own=None)
        self.devices = {
            stage.device.arch: stage.device for prediction in predictions for stage in prediction.pricing.stages
        }
        calibrated = any(device.measured is not None for device in self.devices.values())
        self.spreads = {**SPREADS, "kernels": MEASURED_KERNELS} if calibrated else SPREADS
        self.memo: dict[tuple[float, ...], Array] = {}

    def numbers(self, x: Array) -> tuple[OwnNumber, ...]:
        """The stack's numbers with these factors, of each generation of devices."""
        kernels, attention, host, collectives = np.exp(x).tolist()
        out = []
        for arch, device in sorted(self.devices.items()):
            known = rates(self.stack, device, self.base)
            eager = host_cost(self.stack.with_values(launch_mode=None), device, self.base).per_kernel_s
            # A factor above 1 makes rates smaller, seconds longer, and the exposed part of collectives larger.
            slower = {
                "compute": known.compute / kernels,
                "attention": known.attention / attention,
                "host_kernel_s": eager * host,
                "host_collective_s": known.host_collective_s * host,
                "host_unit_s": known.host_unit_s * host,
                "exposed": known.exposed * collectives,
            }
            for name, value in slower.items():
                low, high = OWN_LIMITS[name]
                if value > 0:
                    out.append(OwnNumber(name=name, value=float(f"{min(max(value, low), high):.4g}"), arch=arch))
        return tuple(out)

    def __call__(self, x: Array) -> Array:
        key = tuple(np.round(x, 9).tolist())
        if key not in self.memo:
            own = OwnRuns(numbers=self.numbers(x), runs=1, data="-", date="-", error="-", range="-")
            ratios = [
                predicted_s(run, prediction, self.base, stack=replace(run.stack, own=own)) / run.step_s
                for run, prediction in zip(self.runs, self.predictions, strict=True)
            ]
            self.memo[key] = np.log(ratios)
        return self.memo[key]

    def fit(self, used: Array) -> Array:
        """The factors from the runs that are used."""
        count = len(SPREADS)
        return shrunk_fit(
            lambda points: np.array([self(x)[used] for x in points]),
            np.zeros(count),
            np.array(list(self.spreads.values())),
            limits=(np.full(count, -2.0), np.full(count, 2.0)),
            weights=np.ones(int(used.sum())),
            scale=SCALE,
        )
