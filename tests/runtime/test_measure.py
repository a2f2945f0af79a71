"""A measured Timeline has the rows of the Program, in their order, and times that a machine could have."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

from runtime import jobs, measured, parity  # noqa: E402

from gnomon.lowering import lower  # noqa: E402
from gnomon.models.llama import llama  # noqa: E402
from gnomon.program import validate  # noqa: E402
from gnomon.simulate import durations, simulate  # noqa: E402
from gnomon.timeline import ROLES  # noqa: E402
from gnomon.timeline.difference import difference  # noqa: E402
from gnomon.timeline.text import parse_timeline, print_timeline  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("name", measured.PLANS)
def test_spans_are_the_rows_in_order(name: str) -> None:
    plan = replace(parity.PLANS[name], precision=parity.FP32)
    program = lower(llama(parity.CONFIG), plan, None, parity.WORKLOAD)
    timeline = jobs.results(plan.world_size)[0].measured[name][0]
    assert len(timeline.workers) == plan.world_size
    of_rank = {rank: cls for cls, ranks in enumerate(_ranks(plan)) for rank in ranks}
    for rank in range(plan.world_size):
        mine = np.flatnonzero(timeline.spans.worker == rank)
        part = slice(int(program.class_ptr[of_rank[rank]]), int(program.class_ptr[of_rank[rank] + 1]))
        wanted = [program.token(row) for row in range(part.start, part.stop)]
        assert [timeline.action(span) for span in mine.tolist()] == wanted


@pytest.mark.parametrize("name", measured.PLANS)
def test_compute_of_a_rank_does_not_overlap_and_fills_part_of_the_step(name: str) -> None:
    timeline = jobs.results(parity.PLANS[name].world_size)[0].measured[name][0]
    spans = timeline.spans
    for rank in range(len(timeline.workers)):
        mine = np.flatnonzero((spans.worker == rank) & (spans.role == ROLES.index("compute")))
        assert (spans.start_s[mine][1:] >= spans.end_s[mine][:-1]).all()
        assert 0 < float(spans.duration_s[mine].sum()) <= timeline.makespan_s
    assert spans.start_s.min() >= 0
    assert parse_timeline(print_timeline(timeline)) == timeline


@pytest.mark.parametrize("name", measured.PLANS)
def test_it_compares_with_a_prediction(name: str) -> None:
    """Worker by worker and action by action; the changes add up to the difference of the steps."""
    plan = replace(parity.PLANS[name], precision=parity.FP32)
    program = lower(llama(parity.CONFIG), plan, None, parity.WORKLOAD)
    structure = validate(program)
    predicted = simulate(structure, durations(program, {"*": 1e-3}))
    by_class = jobs.results(plan.world_size)[0].measured[name][1]
    result = difference(predicted, by_class)
    assert {change.worker for change in result.changes} == {f"class {c}" for c in range(program.num_classes)}
    for cls in range(program.num_classes):
        total = sum(change.seconds for change in result.changes if change.worker == f"class {cls}")
        assert total == by_class.step_s - predicted.step_s


def _ranks(plan: parity.Plan) -> list[tuple[int, ...]]:
    by_rank = dict(zip(plan.pipeline_ranks, plan.stage_ranks, strict=True))
    return [by_rank[rank] for rank in range(plan.num_pipeline_ranks)]
