"""A sample of plans drawn at random trains as the plain model does; `benchmarks/runtime_grid.py` tries many more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

from runtime import grid  # noqa: E402
from runtime.parity import FP64, WORKLOAD  # noqa: E402

from gnomon.plans import Layout, Mesh, Optimizer, Overlap, Plan, Schedule, Workload  # noqa: E402

pytestmark = pytest.mark.torch

SAMPLE = (11, 15, 18, 26, 97, 160)
"""Of `hf_grid`'s first seed: those that once were wrong, and others of other types. A worker is started for each rank,
so none has four."""


@pytest.fixture(scope="module")
def workers() -> Iterator[grid.Workers]:
    """For all cases: what a process loads takes it longer than the steps of a case."""
    with grid.Workers() as made:
        yield made


def test_values_of_fields_are_right_or_refused(workers: grid.Workers) -> None:
    """A plan of one or two ranks for half of the values, with tied and untied weights in turn."""
    drawn = (grid.draw(number) for number in range(len(grid.FIELDS)) if number % 4 < 2)
    cases = [case for case in drawn if case.plan.world_size < 4]
    actual = [(case, *workers.judged(case)) for case in sorted(cases, key=lambda case: case.plan.world_size)]
    wrong = [f"{case}: {verdict}: {message}" for case, verdict, message in actual if verdict in grid.BAD]
    assert not wrong, "\n".join(wrong)
    verdicts = Counter(verdict for _, verdict, _ in actual)
    assert verdicts["equal"] >= 10, verdicts
    assert {case.config.tied for case, verdict, _ in actual if verdict == "equal"} == {True, False}


def test_plans_train_as_transformers_does_in_train_mode(workers: grid.Workers, tmp_path: Path) -> None:
    """Cases of `hf_grid`."""
    pytest.importorskip("transformers", reason="transformers, the oracle, is not installed")
    from runtime import hf_grid

    cases = sorted((hf_grid.draw(number, tmp_path) for number in SAMPLE), key=lambda case: case.plan.world_size)
    actual = [(case, *workers.judged(case)) for case in cases]
    wrong = [f"{case}: {verdict}: {message}" for case, verdict, message in actual if verdict in grid.BAD]
    assert not wrong, "\n".join(wrong)
    assert sum(verdict == "equal" for _, verdict, _ in actual) >= 5


def test_norms_of_heads_together_are_divided(workers: grid.Workers, tmp_path: Path) -> None:
    """OLMo-2's queries and keys are normed over all heads, of which ranks of tp have parts."""
    pytest.importorskip("transformers", reason="transformers, the oracle, is not installed")
    from runtime import hf_grid

    hf_grid.prepared(tmp_path, "olmo2")
    layout, schedule = Layout(sequence_parallel=True), Schedule(num_microbatches=2)
    plan = Plan(mesh=Mesh(tp=2), layout=layout, schedule=schedule, precision=FP64)
    case = hf_grid.HfCase(
        number=0, model="olmo2", folder=tmp_path, plan=plan, workload=WORKLOAD, data="documents", measured=False
    )
    assert workers.judged(case) == ("equal", "")


def test_a_table_of_three_layers_on_two_stages_with_gradient_buckets(workers: grid.Workers, tmp_path: Path) -> None:
    """T5's: the first stage updates it for two of its layers, and must wait for the sum with the second's."""
    pytest.importorskip("transformers", reason="transformers, the oracle, is not installed")
    from runtime import hf_grid

    hf_grid.prepared(tmp_path, "t5")
    plan = Plan(
        mesh=Mesh(pp=2),
        schedule=Schedule(num_microbatches=2),
        precision=FP64,
        overlap=Overlap(bucket_bytes=2000),
        optimizer=Optimizer(clip=False),  # whose norm would wait for all gradients
    )
    case = hf_grid.HfCase(
        number=0, model="t5", folder=tmp_path, plan=plan, data="stream", measured=False,
        workload=Workload(global_batch_size=4, seq_len=8, sizes=(("enc_seq", 8),)),
    )  # fmt: skip
    assert workers.judged(case) == ("equal", "")


def test_experts_are_balanced_as_transformers_does(workers: grid.Workers, tmp_path: Path) -> None:
    """The loss of each microbatch on each data-parallel rank, over two stages, cp, tp and ep, with accumulation."""
    pytest.importorskip("transformers", reason="transformers, the oracle, is not installed")
    from runtime import hf_grid

    layout = Layout(sequence_parallel=True)
    for number, (model, mesh) in enumerate(
        {
            "mixtral (balanced)": Mesh(pp=2),
            "qwen3_moe (balanced)": Mesh(cp=2, ep=2),
            "olmoe (balanced)": Mesh(tp=2, ep=2),
            "granitemoe (balanced)": Mesh(dp_shard=2, ep=2),
        }.items()
    ):
        hf_grid.prepared(tmp_path, model)
        plan = Plan(mesh=mesh, layout=layout, precision=FP64, schedule=Schedule(num_microbatches=2))
        case = hf_grid.HfCase(
            number=number, model=model, folder=tmp_path, plan=plan, workload=Workload(global_batch_size=4, seq_len=8),
            data="masked", measured=False,
        )  # fmt: skip
        assert workers.judged(case) == ("equal", ""), model


def test_a_case_that_hangs_or_fails_is_told_from_one_that_trains() -> None:
    """And ranks that do not agree are wrong, whatever each of them says."""
    case = next(case for case in map(grid.draw, range(99)) if case.plan.world_size == 2)
    trained = grid.Answer(kind="trained", curve=((1.0, 1.0),) * grid.STEPS)
    failed = grid.Answer(kind="failed", message="error")
    refused = grid.Answer(kind="refused", message="not done")
    assert grid.judge(case, {0: refused, 1: refused}) == ("refused", "not done")
    assert grid.judge(case, {0: refused, 1: trained})[0] == "wrong"
    assert grid.judge(case, {0: failed, 1: trained}) == ("crashed", "rank 0: error")
    assert grid.judge(case, {0: trained})[0] == "hung"
    assert grid.judge(case, {0: trained, 1: trained})[0] == "wrong"
