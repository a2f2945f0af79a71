"""First readings see no outcome; fitted ones do, are listed with their count, and are not used for what is left out."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from published_rows import LLAMA, text

from evidence import constants, validation
from evidence.fits.fit_readings import GRID, Job, best, signed
from evidence.fits.ranking import ENVIRONMENTS, nearest, started
from evidence.folds import Fold, Folds, fold_of
from evidence.published import Row, Run, read_table, to_run
from evidence.published.fitted_reading import CHOICES, as_measured, first_prediction
from evidence.published.nanotron import environment
from evidence.readings import FILE, JobThresholds, ReadingFold, Readings, readings
from evidence.validation import Score, score
from gnomon import schema
from gnomon.prediction.measured import predicted_s
from gnomon.prices.fitted import FittedRates, fitted_rates

ROOT = Path(__file__).parents[2]
BENCHMARK = LLAMA | {"notes": "by scripts/scaling_benchmarks.py; tied emb for 1.34B/3.57B", "params_b": "1.34"}
LATE = BENCHMARK | {"num_devices": "512", "tp": "2", "pp": "4", "dp": "64", "micro_batch": "1"}
"""A job with stages on 64 nodes, which is read as polled by its time."""
OPEN = LLAMA | {"framework": "some trainer", "notes": "", "micro_batch": "8", "recompute": "", "dp": "16"}
"""Eight sequences at once, and nothing said of recompute: it does not fit as it stands."""
FORK = LLAMA | {"framework": "Megatron-LM zero-bubble", "notes": "", "mem_gib": "30"}


def row_with(**values: str) -> Row:
    (row,), refused = read_table(text(values))
    assert not refused
    return row


def decided(run: Run) -> tuple[object, ...]:
    return run.plan, run.stack, run.memory_metric, run.cluster, run.model


@pytest.mark.parametrize("given", [LATE, OPEN, FORK, LATE | {"pp": "1", "dp": "256"}])
def test_a_first_reading_does_not_depend_on_the_outcome(given: dict[str, str]) -> None:
    quick, slow = (to_run(row_with(**given | {"value": value, "mem_gib": "20"})) for value in ("40000", "40"))
    assert quick.readings_s != slow.readings_s
    assert decided(quick) == decided(slow) == decided(to_run(row_with(**given)))


def test_the_script_of_the_benchmark_checks_every_job_and_times_say_which_ran_otherwise() -> None:
    late, early, alone = (
        to_run(row_with(**LATE | changes))
        for changes in ({}, {"num_devices": "32", "dp": "4"}, {"num_devices": "32", "pp": "1", "dp": "16"})
    )
    assert all(
        run.stack.launch.checked_collectives and run.stack.messages.p2p_poll_s is None for run in (late, early, alone)
    )
    known = readings().nanotron
    read = [as_measured(run, known).stack for run in (late, early, alone)]
    assert [(bool(stack.launch.checked_collectives), stack.messages.p2p_poll_s) for stack in read] == [
        (True, 0.1),
        (True, None),
        (False, None),
    ]


def test_a_share_met_exactly_is_read_as_the_code_says_at_first() -> None:
    """The head weighs four of sixteen layers: a stage of four has 6 5 5 by nanotron's `>`, and 5 5 5 by its times."""
    run = to_run(row_with(**LATE))
    assert run.plan.schedule.layers_per_stage[0] == 6
    assert as_measured(run, readings().nanotron).plan.schedule.layers_per_stage == (5, 5, 5, 1)


def test_what_is_left_out_is_predicted_on_the_first_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same numbers in every fold only the reading differs; and the verdict is that of the first one."""
    numbers = fitted_rates()
    sources = tuple(Fold(left_out=name, numbers=numbers) for name in ("nanotron-ultrascale", "korthikanti-2022"))
    monkeypatch.setattr(validation, "folds", lambda: Folds(sources=sources))
    late = score(to_run(row_with(**LATE)))
    assert isinstance(late, Score) and late.chosen
    assert late.without_source == pytest.approx(late.first_error, rel=1e-9)
    assert late.without_source_chosen == pytest.approx(late.error, rel=1e-9)
    assert late.error > late.first_error + 0.1  # polls make the step longer
    tight = score(to_run(row_with(**OPEN)))
    assert isinstance(tight, Score) and tight.chosen
    assert not tight.fits and tight.first_bytes > tight.predicted_bytes
    assert tight.without_source == pytest.approx(tight.first_error)
    stated = score(to_run(row_with(**OPEN | {"recompute": "full"})))
    assert isinstance(stated, Score) and not stated.chosen and stated.error == stated.first_error


@pytest.mark.parametrize(("checked", "poll_s"), ENVIRONMENTS)
def test_the_nearest_way_of_starting_a_run_is_the_one_that_made_its_time(
    checked: bool | None, poll_s: float | None
) -> None:
    run = as_measured(to_run(row_with(**LATE)), readings().nanotron)
    true = replace(run, stack=started(run.stack, checked, poll_s))
    (result,) = nearest([replace(run, readings_s=(predicted_s(true, first_prediction(true)),))], 1)
    assert result.error == pytest.approx(0, abs=1e-9)


def test_thresholds_of_a_model_are_those_fitted_without_it() -> None:
    other = replace(readings().nanotron, polled_nodes=4096)
    made = Readings(
        nanotron=readings().nanotron,
        models=(ReadingFold(left_out=str(fold_of("llama-1.34B")), nanotron=other),),
        data="a test",
        date="2026-11-24",
    )
    assert made.without_model("llama-1.34B") == other
    assert made.without_model("llama-3.57B") == readings().nanotron
    assert schema.load(Readings, schema.dump(made)) == made
    assert readings() == schema.load(Readings, FILE.read_text(encoding="utf-8"))
    assert {fold.left_out for fold in readings().models} == {
        str(fold_of(f"llama-{n}B")) for n in ("1.34", "3.57", "80")
    }


def test_the_fit_finds_the_thresholds_that_made_the_times() -> None:
    """Jobs whose times are those of one way each, by thresholds that are not on record: they are found again."""
    true = JobThresholds(polled_nodes=32, polled_tp=16, early_nodes=8, early_params_b=2.0, early_micro_batch=4)
    assert all(getattr(true, name) in values for name, values in GRID.items())
    jobs = []
    for nodes in (2, 4, 8, 16, 32, 64):
        for tp, pp, micro, params in (
            (1, 1, 1, 1.34),
            (8, 4, 1, 3.57),
            (16, 2, 1, 8.86),
            (2, 2, 4, 3.57),
            (2, 2, 8, 1.34),
        ):
            row: Row = row_with(
                **BENCHMARK
                | {"num_devices": str(8 * nodes), "tp": str(tp), "pp": str(pp), "dp": "", "zero_or_fsdp": "none"}
                | {"micro_batch": str(micro), "params_b": str(params)}
            )
            way = sum(environment(row, true))
            jobs.append(Job(row=row, log_errors=tuple(0.0 if i == way else 0.7 for i in range(3))))  # type: ignore[arg-type]
    assert signed(jobs, best(jobs)) == [0.0] * len(jobs)
    assert any(signed(jobs, readings().nanotron))


def test_fitted_numbers_are_all_counted_and_the_readme_says_how_many() -> None:
    groups = constants.groups()
    assert (
        constants.total()
        == sum(group.count for group in groups)
        >= fitted_rates().count + sum(c.numbers for c in CHOICES)
    )
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"{constants.total()} constants are fitted to whole jobs" in text
    for group in groups:
        for name in re.findall(r"[\w./-]+\.(?:py|toml)", group.where):
            places = (ROOT / "src" / name, ROOT / "src/gnomon/prices" / name, ROOT / "evidence" / name)
            assert any(place.is_file() for place in places), name
    assert sum(group.count for group in groups if group.what.startswith("widths")) == 20
    assert isinstance(fitted_rates(), FittedRates)
