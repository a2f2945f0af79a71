"""Training on text: the loss falls, plans agree, a signal ends it with a checkpoint, a resume goes on bit by bit."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

from runtime import training  # noqa: E402
from runtime.ranks import launch  # noqa: E402
from runtime.test_slowdown import machine  # noqa: E402

from gnomon.errors import InputError, PlanError  # noqa: E402
from gnomon.hardware import parse_cluster  # noqa: E402
from gnomon.models.llama import llama  # noqa: E402
from gnomon.plans import Saved  # noqa: E402
from gnomon.runtime import Record, train  # noqa: E402
from gnomon.runtime.launch.run import run  # noqa: E402
from gnomon.runtime.launch.train import check_unused, corpus_of  # noqa: E402
from gnomon.runtime.processes.local import LOADED  # noqa: E402
from gnomon.runtime.watch.progress import Progress  # noqa: E402

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
    return launch(train, 1, training.job(data, training.ALONE, 12))[0].records


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


def test_a_new_run_does_not_mix_with_an_earlier_ones_checkpoints(tmp_path: Path) -> None:
    check_unused(tmp_path / "nowhere")
    check_unused(tmp_path)
    (tmp_path / "step-000012").mkdir()
    with pytest.raises(InputError, match="step-000012 is from an earlier run; go on from it with --resume"):
        check_unused(tmp_path)


def test_a_machine_that_was_faster_when_calibrated_is_said_and_expected(data: Path) -> None:
    """Calibrated at a nanosecond for a product of 512: no machine is as fast now."""
    asked = training.job(data, training.ALONE, 4, measure=True, calibrated=machine(seconds=1e-9), expected_step_s=0.01)
    outcome = launch(train, 1, asked)[0]
    assert outcome.slowdown is not None and outcome.slowdown > 100
    assert " times slower now" in outcome.slowdown_said
    assert outcome.core_wait_share is None or outcome.core_wait_share >= 0  # no upper limit: others may use the machine
    assert outcome.timeline is not None and outcome.timeline.assumptions[-1] == outcome.slowdown_said
    assert launch(train, 1, replace(asked, calibrated=parse_cluster("1xcpu-process")))[0].slowdown is None


def test_what_only_recompute_needs_is_loaded_before_the_ranks_and_only_for_it(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def launched(*args: object, preload: tuple[str, ...], **named: object) -> dict[int, None]:
        asked.append(preload)
        return {0: None}

    monkeypatch.setitem(run.__globals__, "launch", launched)
    for plan in (training.ALONE, replace(training.ALONE, saved=Saved(preset="full"))):
        run(training.job(data, plan, 1))
    assert asked == [(), ("torch._dynamo",)] and "torch._dynamo" not in LOADED


def test_progress_is_rewritten_on_a_terminal_and_a_line_now_and_then_in_a_log() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    log, screen = io.StringIO(), Terminal()
    for out in (log, screen):
        progress = Progress(steps=30, tokens=1000, expected_step_s=0.2, out=out)
        for step in range(1, 31):
            held_out = 2.5 if step % 10 == 0 else None
            progress.show(step, 3.0, 2.0 if step == 1 else 0.25, held_out=held_out, warm=step < 4, last=step == 30)
    lines = [line for line in log.getvalue().split("\n") if line.startswith("step")]
    assert [line[:10] for line in lines] == ["step  1/30", "step 10/30", "step 20/30", "step 30/30"]
    assert lines[2].startswith("step 20/30  loss 3.000  0.25 s/step, expected 0.2  4,000 tokens/s")
    assert lines[2].endswith(" GiB  2 s left")
    assert screen.getvalue().count("\r") == 30
    assert screen.getvalue().count("\n") == 6


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (200, "step  20/200  loss 3.000  0.25 s/step, expected 0.2  4,000 tokens/s  "),
        (79, " 20/200  loss 3.000  0.25 s, expected 0.2  4,000 tok/s  "),
        (70, " 20/200  loss 3.000  0.25 s, expected 0.2  4,000 tok/s  45 s left"),
        (50, " 20/200  loss 3.000  0.25 s, expected 0.2  45 s left"),
        (20, " 20/200  loss 3.000 "),
    ],
)
def test_a_narrow_terminal_loses_what_says_least(width: int, shown: str) -> None:
    progress = Progress(steps=200, tokens=1000, expected_step_s=0.2)
    progress.recent.append(0.25)
    line = progress.line(20, 3.0, width)
    assert line.startswith(shown[:width])
    assert len(line) <= width


def test_a_vocabulary_below_the_tokens_is_refused(data: Path) -> None:
    with pytest.raises(PlanError, match="need a vocabulary of 256, and bytes has 99"):
        corpus_of(replace(training.job(data, training.ALONE, 1), graph=llama(replace(training.CONFIG, vocab_size=99))))
