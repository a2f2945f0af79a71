"""A memo's key holds all that its value reads: a field that it does not hold cannot be read."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gnomon.lowering.lower import outline
from gnomon.models.presets import model
from gnomon.plans import Mesh, Plan, Precision, Saved, Schedule, Workload
from gnomon.plans.unread import without
from gnomon.prediction import predict
from gnomon.prediction.predict import _of_rows

WORK = Workload(global_batch_size=4, seq_len=256)
PLAN = Plan(mesh=Mesh(pp=2), schedule=Schedule(num_microbatches=4))


def test_plans_that_differ_in_what_is_not_read_are_one_key() -> None:
    other = replace(PLAN, saved=Saved(preset="full"), precision=Precision(param="fp32"))
    assert without(PLAN, "saved", "precision") == without(other, "saved", "precision")
    assert hash(without(PLAN, "saved", "precision")) == hash(without(other, "saved", "precision"))
    assert without(PLAN, "saved") != without(other, "saved")
    assert PLAN.saved == Saved()  # the plan itself is as it was


@pytest.mark.parametrize("use", [lambda x: x.preset, bool, len, list])
def test_reading_it_fails(use: object) -> None:
    with pytest.raises(AssertionError, match="plan.saved is read where its memo's key does not hold it"):
        use(without(PLAN, "saved").saved)  # type: ignore[operator]


def test_rows_follow_from_what_their_memo_is_keyed_by() -> None:
    graph = model("gpt2")
    whole = outline(graph, PLAN)
    assert outline(graph, without(PLAN, "saved", "precision")) == whole
    before = _of_rows.cache_info().misses
    for saved in (Saved(), Saved(preset="full")):
        predict("gpt2", "1x2xh100-sxm", replace(PLAN, saved=saved), WORK)
    assert _of_rows.cache_info().misses <= before + 1
