"""The ladder of `gnomon fit`: its numbers are predictions, no smaller set of its changes is enough, and what is taken
in part is taken no further than it must be."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import combinations

import pytest

from gnomon.hardware import parse_cluster
from gnomon.models.presets import model
from gnomon.plans import Mesh, Plan, Saved, Schedule, Workload
from gnomon.prediction import Prediction, predict
from gnomon.prediction.loading import host_short
from gnomon.request.fit import Ladder, ladder
from gnomon.search.fit.ladder import Fitting, cost, freed_bytes, helps
from gnomon.search.fit.largest import largest
from gnomon.search.fit.options import OPTIONS
from gnomon.search.fit.why import unhelpful, without_room

GIB = 2**30
WORK = Workload(global_batch_size=16, seq_len=2048)


@cache
def job(plan: Plan) -> Prediction:
    return predict(model("llama-3.2-1b"), parse_cluster("1x2xa100-sxm-40gb"), plan, WORK)


def fitting(memory_gib: float | None = 14.0, **changes: object) -> Fitting:
    plan = replace(Plan(mesh=Mesh(dp_shard=2), schedule=Schedule(micro_batch_size=4)), **changes)  # type: ignore[arg-type]
    return Fitting(base=job(plan), limit_bytes=None if memory_gib is None else int(memory_gib * GIB))


@pytest.fixture(scope="module")
def result() -> tuple[Fitting, Ladder]:
    asked = fitting()
    return asked, ladder(asked, tuple(asked.single_changes()))


def test_numbers_are_those_of_predict(result: tuple[Fitting, Ladder]) -> None:
    asked, made = result
    assert not made.fits and made.combined and made.complete
    pricing = asked.base.pricing
    for rung in (*made.single_changes, *made.combined):
        if rung.prediction is not None:
            again = predict(pricing.graph, pricing.cluster, rung.plan, WORK, pricing.stack)
            assert (again.step_s, again.tightest.peak_bytes) == (rung.step_s, rung.peak_bytes)
            assert freed_bytes(asked.base, rung) == asked.base.tightest.peak_bytes - again.tightest.peak_bytes
            assert cost(asked.base, rung) == pytest.approx(again.step_s / asked.base.step_s - 1)
            assert rung.fits == (again.has_room and rung.peak_bytes <= 14 * GIB and not host_short(again))


def test_no_smaller_set_of_changes_is_enough(result: tuple[Fitting, Ladder]) -> None:
    asked, made = result
    enough = [set(rung.options) for rung in made.combined]
    assert not any(a < b for a, b in combinations(enough, 2)) and not any(b < a for a, b in combinations(enough, 2))
    fit_alone = {rung.options[0] for rung in made.single_changes if rung.fits}
    assert fit_alone <= {rung.options[0] for rung in made.combined if len(rung.options) == 1}
    assert [len(rung.options) for rung in made.combined] == sorted(len(rung.options) for rung in made.combined)
    assert made.fastest is not None and made.fastest.step_s == min(rung.step_s for rung in made.combined)


def test_a_part_is_no_larger_than_it_must_be() -> None:
    asked = fitting(32.0, schedule=Schedule(micro_batch_size=4), optimizer=replace(Plan().optimizer, zero=2))
    made = ladder(asked, tuple(asked.single_changes()))
    rules = [(rung, rung.plan.saved.rules) for rung in made.combined if rung.options == ("recompute",)]
    (rung, (rule,)) = rules[0]
    assert rule.first_per_stage is not None and 0 < rule.first_per_stage < 16 and rung.fits
    fewer = replace(rung.plan, saved=Saved(rules=(replace(rule, first_per_stage=rule.first_per_stage - 1),)))
    assert not asked.rung(("recompute",), ("one layer fewer",), fewer).fits
    assert f"in {rule.first_per_stage} of 16 layers" in rung.what


def test_what_does_not_help_and_why() -> None:
    asked = fitting(None, mesh=Mesh(dp_replicate=2), schedule=Schedule(micro_batch_size=1), saved=Saved(preset="full"))
    alone = tuple(asked.single_changes())
    rungs = {rung.what: rung for rung in alone}
    buckets = rungs["gradient buckets of 25 MiB"]
    assert not helps(asked.base, buckets) and "gradients and communication" in unhelpful(asked.base, buckets)
    reasons = dict(without_room(asked.base.plan, alone))
    assert reasons["recompute"] == "recompute is full already"
    assert reasons["micro_batch_size"] == "the microbatch cannot be halved: it is 1 sequence"
    assert reasons["activation_offload"] == "only where nothing is recomputed"
    assert {*reasons} | {rung.options[0] for rung in alone} == {option.name for option in OPTIONS}


def test_a_plan_that_fits_needs_nothing() -> None:
    asked = fitting(None, schedule=Schedule(micro_batch_size=1))
    made = ladder(asked, tuple(asked.single_changes()))
    assert made.fits and not made.combined and made.single_changes


@pytest.mark.parametrize("what", ["batch", "seq-len"])
def test_the_largest_size_fits_and_the_next_does_not(what: str) -> None:
    asked = fitting(30.0)
    asked.options = [option for option in OPTIONS if option.name in ("recompute", "zero", "micro_batch_size")]
    sizes = list(largest(asked, what))  # type: ignore[arg-type]
    first = sizes[0]
    unit = 1 if what == "batch" else 128
    plan, work = asked.base.plan, asked.base.workload
    for size, fits in ((first.size, True), (first.size + unit, False)):
        if what == "batch":
            changed = replace(plan, schedule=replace(plan.schedule, micro_batch_size=size))
            rung = asked.rung((), (), changed, replace(work, global_batch_size=4 * size))
        else:
            rung = asked.rung((), (), plan, replace(work, seq_len=size))
        assert rung.fits == fits
    assert all(size.size >= first.size for size in sizes)
    together = [size for size in sizes if size.added]
    assert together and together[-1].size > max(size.size for size in sizes if not size.added)
