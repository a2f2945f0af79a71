"""The plan files in examples/ can be predicted on machines of their size."""

from __future__ import annotations

from pathlib import Path

import pytest

from gnomon.models.presets import model
from gnomon.plans import check, load_plan_file
from gnomon.prediction import predict

FILES = sorted((Path(__file__).parents[1] / "examples").glob("*.toml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_it_fits_processors(path: Path) -> None:
    file = load_plan_file(path)
    cluster = f"{file.plan.world_size}xcpu-process"
    found = predict(file.model, cluster, file.plan, file.workload)
    assert found.fits
    assert check(file.plan, model(file.model), found.pricing.cluster, file.workload) == ()


def test_there_are_examples() -> None:
    assert FILES
