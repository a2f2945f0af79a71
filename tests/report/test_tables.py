"""Tables: alignment, width, digits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.report.tables import Column, gib, number, percent, ranges, table, table_of_plans, wrapped


def test_numbers_stand_to_the_right() -> None:
    columns = (Column(name="device", align="left"), Column(name="GiB"))
    assert table(columns, [("a100", "39.5"), ("h200-sxm", "139.8")]) == (
        "device      GiB",
        "a100       39.5",
        "h200-sxm  139.8",
    )


def test_a_per_cent_sign_stays_with_its_number() -> None:
    for width in range(20, 60):
        lines = wrapped("MFU 44.0 % and 12 % more, or 100 % of all that 7 % of it is", indent="", width=width)
        assert not [line for line in lines if line.lstrip().startswith("%")] and max(map(len, lines)) <= width
    assert " ".join(wrapped("44.0 % of it", indent="")) == "44.0 % of it"


def test_words_are_shortened_and_numbers_never() -> None:
    columns = (Column(name="name", align="left"), Column(name="n"))
    lines = table(columns, [("a" * 100, "1,234,567")], width=40)
    assert lines[1] == "a" * 28 + "…  1,234,567"
    assert len(lines[1]) == 40


def test_a_plan_is_never_cut() -> None:
    columns = (Column(name="plan", align="left"), Column(name="step"))
    lines = table_of_plans(columns, [("1 " + "tp4 " * 30, "7.54 s"), ("2 dp8", "12.1 s")])
    assert max(map(len, lines)) <= 80 and sum(line.count("tp4") for line in lines) == 30
    assert lines[-1].split() == ["2", "dp8", "12.1", "s"] and lines[1].endswith("  7.54 s")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (13.75, "13.8"),
        (1234567.0, "1,234,567"),
        (0.012345, "0.0123"),
        (0.5, "0.500"),
        (999.9, "1,000"),
        (9.64, "9.64"),
        (9.996, "10.0"),
        (99.7, "99.7"),
        (-0.09996, "-0.100"),
        (3e-7, "3e-07"),
        (2.5e12, "2.5e+12"),
    ],
)
def test_number(value: float, text: str) -> None:
    assert number(value) == text


def test_small_forms() -> None:
    assert gib(61.4 * 2**30) == "61.4"
    assert (percent(0.1234), percent(None)) == ("12.3", "-")
    assert ranges((0, 1, 2, 3, 8)) == "0-3,8"
    assert ranges((0, 2, 4, 6)) == "0,2,4,…"
    assert ranges(()) == ""


def test_wrapped_stands_under_its_text() -> None:
    assert wrapped("one two three", indent="", bullet="- ", width=10) == ("- one two", "  three")


@given(st.floats(min_value=1e-4, max_value=1e8))
def test_number_is_close(value: float) -> None:
    assert float(number(value).replace(",", "")) == pytest.approx(value, rel=5.001e-3)
