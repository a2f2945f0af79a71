"""What to change when a plan does not or may not fit: neighbouring plans, each predicted like any other.

`advice(prediction)` tries changes in the order of how little they change a job and returns those that fit, the fastest
first, with their time and memory. A bounded number of predictions. Leaves out other meshes than those that move ranks
from data to tensor or pipeline parallelism, which are for `search`, and an optimizer on the host for very long steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, combinations

from gnomon.errors import GnomonError
from gnomon.plans import Plan
from gnomon.prediction.changes import micro_batch, offload, parallel, recompute, sequence_parallel, zero
from gnomon.prediction.predict import Prediction, predict
from gnomon.software import proposes

TRIES = 24
"""Predictions at most: with 20 ms each, half a second. Fewer, but FEWEST, for jobs of thousands of devices."""
FEWEST = 4
MANY_DEVICES = 1024
MOST_STREAMED = 20_000
"""Layers times microbatches up to which an optimizer on the host is tried: gradients that stream there have rows of
their own for each, and a prediction of more takes ten seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A change after which every rank fits with room."""

    what: str
    """In words, as in `micro_batch_size 4 -> 2 and recompute full`."""
    plan: Plan
    """The plan with it."""
    step_s: float
    """Its predicted step."""
    peak_bytes: int
    """Predicted peak of its tightest rank."""
    limit_bytes: int
    """Memory of that rank's device."""


Change = tuple[tuple[str, ...], Plan]
"""(each single change in words, the plan with all of them)."""


def advice(prediction: Prediction, *, most: int = 4) -> tuple[Advice, ...]:
    """Changes after which every rank fits with room, the fastest first, `most` of them; empty for a plan that has it.

    One change at a time, then pairs, then threes, where no smaller set is part of them that is enough. At most TRIES
    predictions: an empty result for a plan that does not fit says that none of those fits, not that nothing does.
    """
    if prediction.has_room:
        return ()
    plan = prediction.plan
    advised: list[Advice] = []
    enough: list[frozenset[str]] = []
    long = len(prediction.pricing.graph.layers()) * prediction.pricing.count > MOST_STREAMED
    tries, limit = 0, max(FEWEST, min(TRIES, TRIES * MANY_DEVICES // plan.world_size))
    for names, changed in chain(_changes(plan), _several(plan, 2), _several(plan, 3)):
        if tries == limit:
            break
        if any(fewer < frozenset(names) for fewer in enough):
            continue
        if not proposes(prediction.pricing.stack, plan, changed):
            continue
        if long and changed.optimizer.offload is not None and plan.optimizer.offload is None:
            continue
        tries += 1
        made = _try(prediction, " and ".join(names), changed)
        if made is not None:
            advised.append(made)
            enough.append(frozenset(names))
    return tuple(sorted(advised, key=lambda change: change.step_s)[:most])


def _try(prediction: Prediction, what: str, plan: Plan) -> Advice | None:
    pricing = prediction.pricing
    try:
        tried = predict(pricing.graph, pricing.cluster, plan, prediction.workload, pricing.stack)
    except GnomonError:  # this neighbour cannot run or has no price; there are others
        return None
    if not tried.has_room:
        return None
    tightest = tried.tightest
    return Advice(
        what=what, plan=plan, step_s=tried.step_s, peak_bytes=tightest.peak_bytes, limit_bytes=tightest.limit_bytes
    )


def _several(plan: Plan, count: int) -> Iterator[Change]:
    """Plans with `count` changes of different kinds, each taken as far as it goes; those that free most come first."""
    kinds = (zero, recompute, parallel, micro_batch, offload)
    for chosen in combinations(kinds, count):
        names, changed = [], plan
        for kind in chosen:
            last = list(kind(changed))[-1:]
            if not last:
                break
            names.append(last[0][0])
            changed = last[0][1]
        else:
            yield tuple(names), changed


def _changes(plan: Plan) -> Iterator[Change]:
    """Single changes, the least first."""
    for kind in (micro_batch, recompute, sequence_parallel, zero, offload, parallel):
        yield from (((name,), changed) for name, changed in kind(plan))
