"""What `compare` says of small timelines whose differences can be seen: sums, the largest wrong price, refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from timeline.small import Row, timeline

from gnomon.cli import main
from gnomon.errors import InputError
from gnomon.report.difference import compare, comparison_text
from gnomon.timeline import Memory, Timeline, Worker
from gnomon.timeline.text import print_timeline


def run(forward: float, backward: float, optimizer: float, *, message: float = 0.0, microbatches: int = 4) -> Timeline:
    """One worker: so many forwards and backwards, then the update, after a message of `message` seconds."""
    rows: list[Row] = []
    now = 0.0
    for kind, seconds in (("F", forward), ("B", backward)) * microbatches:
        rows.append((0, "compute", kind, "compute", now, now + seconds, len(rows) - 1))
        now += seconds
    if message:
        rows.append((0, "dp", "AR", "communication", now, now + message, len(rows) - 1))
        now += message
    rows.append((0, "compute", "OPT", "compute", now, now + optimizer, len(rows) - 1))
    return timeline(rows, workers=(Worker(name="class 0", count=2),))


PREDICTED = run(1.0, 2.0, 0.5)
MEASURED = replace(run(1.25, 3.0, 0.5), clock="measured")


def test_the_largest_wrong_price_is_named_with_its_count_and_share() -> None:
    """4 backwards take 3 s for 2 s, 4 forwards 1.25 for 1: 4 s of the 5 s that are missing."""
    comparison = compare(PREDICTED, MEASURED)
    assert comparison.largest is not None
    assert (comparison.largest.worker, comparison.largest.action, comparison.largest.count) == ("class 0", "B", 4)
    assert (
        comparison.sentence
        == "B (backward) on class 0: 3,000 ms each measured, 2,000 predicted; 4 of them a step: 80% of the gap"
    )


def test_the_prediction_comes_first_whichever_is_given_first() -> None:
    assert compare(MEASURED, PREDICTED, ("m", "p")) == compare(PREDICTED, MEASURED)
    two = replace(MEASURED, clock="predicted")
    assert compare(PREDICTED, two, ("a.timeline", "b.timeline")).names == ("a.timeline", "b.timeline")


def test_what_a_prediction_gives_no_time_is_still_an_action() -> None:
    """Freeing parameters costs nothing in a prediction, and a little in a run."""
    free: Row = (0, "compute", "RESHARD", "compute", 13.0, 13.0, -1)
    rows: list[Row] = [(0, "compute", "F", "compute", 0.0, 13.0, -1), free]
    workers = (Worker(name="class 0", count=2),)
    slower: list[Row] = [rows[0], (0, "compute", "RESHARD", "compute", 13.0, 13.5, -1)]
    comparison = compare(timeline(rows, workers=workers), replace(timeline(slower, workers=workers), clock="measured"))
    assert comparison.largest is not None and comparison.largest.action == "RESHARD"
    with pytest.raises(InputError, match="1 x RESHARD"):
        compare(timeline(rows, workers=workers), replace(timeline(rows[:1], workers=workers), clock="measured"))


def test_what_was_measured_says_under_what_conditions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(tmp_path / name) for name in ("predicted.timeline", "measured.timeline")]
    busy = replace(MEASURED, assumptions=("this machine is 3 times slower now",))
    for path, entry in zip(paths, (PREDICTED, busy), strict=True):
        Path(path).write_text(print_timeline(entry))
    assert main(["compare", *paths]) == 0
    assert capsys.readouterr().out.endswith("\nof what was measured\n  - this machine is 3 times slower now\n")


def test_a_communication_that_is_waited_for_is_a_price() -> None:
    comparison = compare(run(1, 2, 0.5, message=0.25), replace(run(1, 2, 0.5, message=2.25), clock="measured"))
    assert (
        comparison.sentence
        == "waiting for AR on class 0: 2,250 ms each measured, 250 predicted; one of them a step: 100% of the gap"
    )


def test_prices_that_make_up_for_each_other() -> None:
    """Backwards 4 s longer in all: beside forwards 1 s shorter, a gap of 3; beside an update 3.5 shorter, of 0.5."""
    assert compare(run(1, 2, 1), replace(run(0.75, 3, 1), clock="measured")).sentence.endswith("133% of the gap")
    other = compare(run(1, 2, 8), replace(run(1, 3, 4.5), clock="measured"))
    assert other.difference.seconds == 0.5
    assert other.sentence.endswith("4 of them a step: 20% of the step, which others make up for")


def test_steps_that_agree_blame_no_price() -> None:
    comparison = compare(PREDICTED, replace(PREDICTED, clock="measured"))
    assert comparison.largest is None
    assert comparison.sentence == "no price is wrong by more than 1% of the step"
    assert comparison_text(comparison)[0] == "step: 12.5 s predicted, 12.5 s measured: equal"
    near = replace(run(1.0, 2.0, 0.5 + 2**-10), clock="measured")
    assert comparison_text(compare(PREDICTED, near))[0].endswith("12.5 s measured: equal to 0.1%")


_SECONDS = st.integers(1, 64).map(lambda eighths: eighths / 8)


@given(st.tuples(*[_SECONDS] * 4), st.tuples(*[_SECONDS] * 4))
def test_what_is_listed_adds_up_to_the_difference(
    one: tuple[float, float, float, float], two: tuple[float, float, float, float]
) -> None:
    before, after = (run(f, b, o, message=m) for f, b, o, m in (one, two))
    comparison = compare(before, replace(after, clock="measured"))
    d = comparison.difference
    assert sum(change.seconds for change in d.of("class 0")) == d.seconds == after.makespan_s - before.makespan_s
    lines = comparison_text(comparison)
    assert max(len(line) for line in lines) <= 80
    assert any(line.startswith("step  ") for line in lines) == bool(d.changes)


def test_timelines_of_different_plans_are_refused() -> None:
    other = replace(MEASURED, workers=(Worker(name="class 0", count=4),))
    with pytest.raises(
        InputError, match=r"not of one plan: the first has workers class 0 \(2\), the second class 0 \(4\)"
    ):
        compare(PREDICTED, other)
    with pytest.raises(InputError, match="class 0 has 4 x B in the first and 3 in the second"):
        compare(PREDICTED, replace(run(1, 2, 0.5, microbatches=3), clock="measured"))
    steady = replace(MEASURED, period_s=MEASURED.makespan_s, repeats=True)
    with pytest.raises(InputError, match="one shows|shows a makespan"):
        compare(PREDICTED, steady)


def test_an_action_that_is_priced_at_nothing_is_of_the_same_plan() -> None:
    comparison = compare(run(1, 2, 0), run(1, 2, 0.5))
    assert comparison.largest is not None and (comparison.largest.action, comparison.largest.predicted_s) == (
        "OPT",
        0.0,
    )


def test_memory_is_compared_by_class() -> None:
    def held(timeline: Timeline, activations: float) -> Timeline:
        memory = Memory.of(
            worker=[0, 0],
            buffer=[1, 1],
            span=[0, 1],
            time_s=[0.0, 3.0],
            change_bytes=[activations, -activations],
            resident_bytes=[[1 << 20, 0]],
        )
        return replace(timeline, buffers=("parameters", "activations"), memory=memory)

    comparison = compare(held(PREDICTED, 2 << 20), held(MEASURED, 3 << 20))
    assert comparison.peak_bytes == {"class 0": (3 << 20, 4 << 20)}
    text = "\n".join(comparison_text(comparison))
    assert "activations" in text
    assert "what did not change" in text
    assert "one of the two has no memory" in "\n".join(comparison_text(compare(PREDICTED, MEASURED)))


def test_classes_that_only_one_side_tells_of_are_named_and_not_compared() -> None:
    """A measurement sees nothing of what lives inside an action, and never saw a byte of logits."""

    def held(timeline: Timeline, buffers: tuple[str, ...], resident: list[float]) -> Timeline:
        memory = Memory.of(worker=[], buffer=[], span=[], time_s=[], change_bytes=[], resident_bytes=[resident])
        return replace(timeline, buffers=buffers, memory=memory)

    mib = float(1 << 20)
    one = held(PREDICTED, ("parameters", "logits", "temporary"), [4 * mib, 2 * mib, 3 * mib])
    comparison = compare(one, held(MEASURED, ("parameters", "logits"), [5 * mib, 0.0]))
    assert comparison.peak_bytes == {"class 0": (4 * mib, 5 * mib)}
    assert comparison.left_out == {"logits": (2 * mib, 0.0), "temporary": (3 * mib, 0.0)}
    assert [change.buffer for change in comparison.difference.memory] == ["parameters"]
    text = "\n".join(comparison_text(comparison))
    assert "only predicted has, at its most on a rank: logits (2.00), temporary (3.00)" in text
    assert "logits  " not in text
    assert comparison.to_mapping()["memory_left_out"]["temporary"] == [3 * mib, 0.0]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / name for name in ("predicted.timeline", "measured.timeline")]
    for path, value in zip(paths, (PREDICTED, MEASURED), strict=True):
        path.write_text(print_timeline(value))
    assert main(["compare", *map(str, paths)]) == 0
    out = capsys.readouterr().out
    assert "largest wrong price: B (backward) on class 0" in out
    assert "the prediction is 28.6% too short" in out
    assert main(["compare", str(paths[0]), str(tmp_path / "none.timeline")]) == 2
    assert "cannot read" in capsys.readouterr().err
    paths[1].write_text("something else\n")
    assert main(["compare", *map(str, paths)]) == 2
    assert "expected 'gnomon.timeline/1' in the first line" in capsys.readouterr().err
