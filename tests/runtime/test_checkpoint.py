"""A checkpoint goes on under any plan and number of processes as if nothing had happened, and is whole or not there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

from runtime import parity, resharded  # noqa: E402

from gnomon.runtime import launch  # noqa: E402
from gnomon.runtime.checkpoint import METADATA, RECORD, boxes, newest  # noqa: E402

pytestmark = pytest.mark.torch


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_boxes_are_the_range(shape: list[int], data: st.DataObject) -> None:
    """Element by element and in order; never more than two a dim, and one."""
    size = int(np.prod(shape))
    low = data.draw(st.integers(0, size))
    high = data.draw(st.integers(low, size))
    numbers = np.arange(size).reshape(shape)
    found = list(boxes(shape, low, high))
    parts = [numbers[tuple(slice(a, a + n) for a, n in zip(*box, strict=True))].flatten() for box in found]
    assert [n for part in parts for n in part.tolist()] == list(range(low, high))
    assert len(found) <= 2 * len(shape) - 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def written(folder: Path) -> dict[str, parity.Curve]:
    return launch(resharded.write, 2, folder)[0]


@pytest.mark.parametrize("world_size", resharded.READERS)
def test_training_goes_on_under_another_plan(world_size: int, folder: Path, written: dict[str, parity.Curve]) -> None:
    """ZeRO 3 on two to one process, pp to dp and ZeRO 1, tp to pp …: losses and norms of the plain model to 1e-9."""
    want, _ = parity.plain(parity.CONFIG)
    curves = launch(resharded.read, world_size, folder, world_size)[0]
    assert len(curves) == len(resharded.WRITERS) * len(resharded.READERS[world_size])
    for (writer, _), curve in curves.items():
        np.testing.assert_allclose([*written[writer], *curve], want, rtol=1e-9, atol=0)


def test_another_batch_or_a_broken_file_is_said(folder: Path, written: dict[str, parity.Curve], tmp_path: Path) -> None:
    said = launch(resharded.refused, 1, folder / "1f1b", tmp_path)[0]
    assert "another model, precision or batch" in said[0]
    assert "cannot be read" in said[1] and "remove it" in said[1]


def test_what_is_not_whole_is_not_taken(tmp_path: Path) -> None:
    for name, files in {
        "step-000001": (RECORD, METADATA),
        "step-000002": (RECORD,),
        "step-000003": (METADATA,),
        ".step-000004.partial": (RECORD, METADATA),
    }.items():
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).touch()
    assert newest(tmp_path) == tmp_path / "step-000001"
    assert newest(tmp_path / "nowhere") is None
