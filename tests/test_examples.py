"""The plan files in examples/ can be predicted on machines of their size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gnomon.models.presets import model
from gnomon.plans import Overlap, Saved, check, load_plan_file
from gnomon.prediction import predict
from gnomon.software import stack

FILES = sorted((Path(__file__).parents[1] / "examples").glob("*.toml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_it_fits_processors(path: Path) -> None:
    file = load_plan_file(path)
    cluster = f"{file.plan.world_size}xcpu-process"
    prediction = predict(file.model, cluster, file.plan, file.workload)
    assert prediction.fits
    assert check(file.plan, model(file.model), prediction.pricing.cluster, file.workload) == ()


def test_deepseek_v3_as_its_authors_ran_it() -> None:
    """19.9 s by their report, on 80 GB; nothing is fitted to it."""
    folder = Path(__file__).parents[1] / "examples/deepseek-v3"
    file, record = load_plan_file(folder / "plan.toml"), stack(str(folder / "stack.toml"))
    prediction = predict(file.model, file.on, file.plan, file.workload, record)
    assert prediction.fits and prediction.unsupported == ()
    assert prediction.band.low_s < 19.9 < prediction.band.high_s and prediction.step_s < 1.25 * 19.9
    plain = replace(file.plan, saved=Saved(), overlap=Overlap())
    silent = predict(file.model, file.on, plain, file.workload)
    assert silent.step_s > 1.5 * prediction.step_s and not silent.fits


def test_there_are_examples() -> None:
    assert FILES
