"""Playing a trace under the policies that options name, with progress.

`played(what, policies)` returns a Result a policy. Leaves out what is printed of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gnomon.cli.fleet_request import FleetRequest
from gnomon.cli.options.fleet import TraceOptions
from gnomon.cli.terminal import Progress
from gnomon.fleet.forecast import Curve
from gnomon.fleet.goodput import Profiled
from gnomon.fleet.kinds import ByKind
from gnomon.fleet.learned import LearnedForecasts
from gnomon.fleet.points import MeasuredPoints
from gnomon.fleet.policies import policy
from gnomon.fleet.predicted import PredictedForecasts
from gnomon.fleet.replay import replay
from gnomon.fleet.result import Result
from gnomon.fleet.state import Forecasts, Policy


def played(what: FleetRequest, chosen: Sequence[Policy]) -> Sequence[Result]:
    """The results of policies, with progress."""
    out = []
    for candidate in chosen:
        progress = Progress(f"{candidate.name}:", len(what.trace.jobs))
        try:
            out.append(
                replay(
                    what.trace,
                    what.machines,
                    candidate,
                    rules=what.rules,
                    forecasts=adaptive(what, candidate),
                    progress=progress.show,
                )
            )
        finally:
            progress.end()
    return out


def adaptive(what: FleetRequest, chosen: Policy) -> Forecasts | None:
    """Forecasts for policies that change a job's batch. Under Pollux and Sia jobs choose their batch too, where it was
    measured; under EasyScale each device gets work in proportion to its speed."""
    if isinstance(what.forecasts, Profiled) and chosen.name in ("pollux", "sia"):
        known = Profiled(what.forecasts.profiles, adaptive=True)
        kinds = {pool.device: known for pool in what.machines.pools}
        return LearnedForecasts(ByKind(what.machines, kinds)) if what.learned else known
    if chosen.name == "easyscale" and not isinstance(what.forecasts, Profiled | MeasuredPoints | PredictedForecasts):
        return replace(what.forecasts or Curve(what.machines), proportional=True)
    return what.forecasts


def policies_of(options: TraceOptions) -> Sequence[Policy]:
    """--policy, then --compare, each once."""
    names = [options.policy, *(options.compare.split(",") if options.compare else ())]
    return [policy(name.strip()) for name in dict.fromkeys(names)]
