"""Training on text: the loss falls, plans agree, a signal ends it with a checkpoint, a resume goes on bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

from runtime import training  # noqa: E402

from gnomon.errors import InputError, PlanError  # noqa: E402
from gnomon.runtime import Record, Text, launch, train  # noqa: E402

pytestmark = pytest.mark.torch

Stories = dict[str, tuple[tuple[Record, ...], ...]]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for i in range(60):
        (folder / f"{i}.txt").write_text(f"the loss goes down, line {i % 7} of the text. " * 40)
    return folder


@pytest.fixture(scope="module")
def stories(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Stories]:
    return launch(training.stories, 2, data, tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def alone(data: Path) -> tuple[Record, ...]:
    return launch(train, 1, training.job(data, training.ALONE, 12))[0]


@pytest.mark.parametrize("name", training.PLANS)
def test_plans_train_alike_on_the_same_data(name: str, stories: dict[int, Stories], alone: tuple[Record, ...]) -> None:
    """To rounding, which is coarse in bf16: the order of data does not depend on the number of workers."""
    to = 3e-2 if name.startswith("mixed") else 2e-4
    for rank in stories:
        whole = stories[rank][name][0]
        np.testing.assert_allclose([r.loss for r in whole], [r.loss for r in alone], rtol=to)
        assert whole[-1].validation_loss == pytest.approx(alone[-1].validation_loss, rel=10 * to)
    assert alone[-1].loss < 0.75 * alone[0].loss


@pytest.mark.parametrize("name", training.PLANS)
def test_a_signal_to_one_rank_ends_all_and_resume_goes_on_to_the_same_losses(
    name: str, stories: dict[int, Stories]
) -> None:
    for whole, before, after in (stories[rank][name] for rank in stories):
        assert [r.step for r in before] == [1, 2, 3, 4, 5]
        assert [r.step for r in after] == [6, 7, 8, 9, 10, 11, 12]
        assert [r.loss for r in (*before, *after)] == [r.loss for r in whole]
        assert before[-1].validation_loss is not None


def test_a_batch_follows_from_seed_and_step_alone(data: Path) -> None:
    text = Text.read(data)
    ids = text.batch(3, seed=1, sequences=4, seq_len=16)
    assert ids.shape == (4, 17)
    assert torch.equal(ids, Text.read(data).batch(3, seed=1, sequences=4, seq_len=16))
    assert not torch.equal(ids, text.batch(4, seed=1, sequences=4, seq_len=16))
    assert not torch.equal(ids, text.batch(3, seed=2, sequences=4, seq_len=16))


def test_held_out_files_are_chosen_by_name() -> None:
    files = [(f"{i}.txt", bytes([65 + i % 26]) * 10) for i in range(200)]
    text, fewer = Text.of(files), Text.of(files[:150])
    assert len(text.training) + len(text.validation) == 200 * 11
    assert 0.01 < len(text.validation) / (200 * 11) < 0.12
    assert bytes(text.validation).startswith(bytes(fewer.validation))


def test_the_standard_library_is_text_that_every_machine_has() -> None:
    text = Text.read(limit_bytes=1 << 20)
    assert len(text.training) > 1 << 19
    assert b"import" in bytes(text.training)


def test_a_batch_cannot_be_longer_than_the_text() -> None:
    files = [(f"{i}.txt", b"ab") for i in range(100)]
    with pytest.raises(InputError, match="give more text"):
        Text.of(files).batch(0, seed=0, sequences=1, seq_len=1000)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda folder: Text.read(folder / "nowhere"), "is not a folder"),
        (lambda folder: Text.read(folder), "give more files"),
    ],
)
def test_what_cannot_be_read_is_said(wrong: Callable[[Path], Text], said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said):
        wrong(tmp_path)


def test_a_vocabulary_below_bytes_is_refused(data: Path) -> None:
    with pytest.raises(PlanError, match="256 or more"):
        replace(training.job(data, training.ALONE, 1), config=replace(training.CONFIG, vocab_size=99))
