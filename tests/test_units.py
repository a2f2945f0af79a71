"""Quantities: what people write becomes the right number, prints back exactly, and everything else is refused.

Expected numbers are powers of ten and two that a reader can check; round trips are checked on generated values.
"""

import math
from functools import partial

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gnomon import units
from gnomon.errors import UnitError
from gnomon.units import Unit

FLOAT_UNITS = [unit for unit in Unit if unit is not Unit.BYTES]
LEGAL_FLOATS = st.floats(min_value=0, allow_nan=False, allow_infinity=False)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("80 GiB", 80 * 2**30),
        ("80GiB", 80 * 2**30),
        ("80 GB", 80 * 10**9),
        ("1.5 MiB", 3 * 2**19),
        ("1_000 kB", 10**6),
        ("7 KB", 7000),
        ("0 B", 0),
        ("1e3 B", 1000),
        ("0.1 GiB", 107374182),  # 107374182.4, the nearest whole byte
    ],
)
def test_bytes_are_whole_and_gib_is_not_gb(text: str, expected: int) -> None:
    assert units.parse_bytes(text) == expected


def test_bits_are_an_eighth_of_bytes() -> None:
    assert units.parse("400 Gb/s", Unit.BYTES_PER_S) == 50e9
    assert units.parse("400 Gbit/s", Unit.BYTES_PER_S) == units.parse("400 Gbps", Unit.BYTES_PER_S) == 50e9
    assert units.parse("400 GB/s", Unit.BYTES_PER_S) == 400e9
    assert units.parse("1 GiB/s", Unit.BYTES_PER_S) == 2**30


def test_other_kinds() -> None:
    assert units.parse("989 TFLOP/s", Unit.FLOPS_PER_S) == 989e12
    assert units.parse("1.979 PFLOPS", Unit.FLOPS_PER_S) == 1.979e15
    assert units.parse_seconds("3 us") == 3e-6
    assert units.parse_seconds("2 min") == 120.0
    assert units.parse("1.4 kW", Unit.WATTS) == 1400.0
    assert units.parse_dollars_per_hour("$2.49/h") == units.parse_dollars_per_hour("2.49 $/h") == 2.49
    assert units.parse("1980 MHz", Unit.HERTZ) == 1.98e9


@pytest.mark.parametrize(
    ("text", "expected"),
    [("4096", 4096), ("4k", 4000), ("4Ki", 4096), ("1.5M", 1_500_000), ("8B", 8 * 10**9), ("0", 0), ("1_024", 1024)],
)
def test_counts(text: str, expected: int) -> None:
    assert units.parse_count(text) == expected


@pytest.mark.parametrize("text", ["1.5", "-1", "four", "4 GB", "", "nan", "1e400", "0.0001k", "1e19"])
def test_what_is_no_count_is_refused(text: str) -> None:
    with pytest.raises(UnitError):
        units.parse_count(text)


@pytest.mark.parametrize(
    ("parse", "text", "says"),
    [
        (units.parse_bytes, "80", "GiB"),  # a bare number: offers the units
        (units.parse_bytes, "80 Gb", "bits"),
        (units.parse_bytes, "80 GB/s", "unit of bytes/s"),
        (units.parse_bytes, "0.3 B", "less than one byte"),
        (units.parse_bytes, "9 EiB", "limit"),
        (units.parse_bytes, "80 gib", "did you mean 'GiB'"),
        (partial(units.parse, unit=Unit.BYTES_PER_S), "900 GB", "unit of bytes"),
        (units.parse_seconds, "-3 us", "negative"),
        (units.parse_seconds, "nan s", "no finite number"),
        (units.parse_seconds, "inf s", "no finite number"),
        (units.parse_seconds, "1e999 s", "too large"),
        (units.parse_seconds, "1e999999999 s", "unit"),
        (units.parse_seconds, "3 uss", "did you mean 'us'"),
        (units.parse_seconds, "3,5 s", "unit"),
        (units.parse_seconds, "٣ s", "no finite number"),
        (units.parse_seconds, "", "no finite number"),
        (units.parse_seconds, "1" * 5000 + " s", "5002 characters"),
        (partial(units.parse, unit=Unit.FLOPS_PER_S), "989 TFLOP", "'TFLOP/s'"),
        (partial(units.parse, unit=Unit.FLOPS_PER_S), "989 TFLOPs", "TFLOP/s"),
    ],
)
def test_wrong_text_is_refused_with_the_accepted_units(parse, text: str, says: str) -> None:
    with pytest.raises(UnitError) as caught:
        parse(text)
    assert says in str(caught.value)
    assert len(str(caught.value)) < 400


@given(st.integers(0, units.MAX_INTEGER))
@example(units.MAX_INTEGER)
@example(80 * 2**30)
def test_bytes_print_exactly(value: int) -> None:
    assert units.parse_bytes(units.format_quantity(value, Unit.BYTES)) == value


@given(LEGAL_FLOATS, st.sampled_from(FLOAT_UNITS))
@example(5e-324, Unit.SECONDS)
@example(1.7976931348623157e308, Unit.FLOPS_PER_S)
@example(0.1 + 0.2, Unit.DOLLARS_PER_HOUR)
def test_floats_print_exactly(value: float, unit: Unit) -> None:
    assert units.parse(units.format_quantity(value, unit), unit) == value


def test_exact_text_is_what_a_person_would_write() -> None:
    assert units.format_quantity(80 * 2**30, Unit.BYTES) == "80 GiB"
    assert units.format_quantity(80 * 10**9, Unit.BYTES) == "80 GB"
    assert units.format_quantity(1025, Unit.BYTES) == "1025 B"
    assert units.format_quantity(900e9, Unit.BYTES_PER_S) == "900 GB/s"
    assert units.format_quantity(989.4e12, Unit.FLOPS_PER_S) == "989.4 TFLOP/s"
    assert units.format_quantity(3e-6, Unit.SECONDS) == "3 us"
    assert units.format_quantity(0.0, Unit.SECONDS) == "0 s"


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, "3 s", True, None])
def test_what_is_no_legal_number_is_not_printed(value) -> None:
    with pytest.raises(UnitError):
        units.format_quantity(value, Unit.SECONDS)


def test_shown_numbers_are_rounded_in_a_fitting_unit() -> None:
    assert units.show_bytes(61.44 * 2**30) == "61.4 GiB"
    assert units.show_bytes(1023.9 * 2**20) == "1.00 GiB"
    assert units.show_bytes(0) == "0 B"
    assert units.show_seconds(0.00124) == "1.24 ms"
    assert units.show_seconds(0.00099996) == "1.00 ms"
    assert units.show_seconds(61.8) == "61.8 s" and units.show_seconds(599.9) == "600 s"
    assert units.show_seconds(600) == "10.0 min" and units.show_seconds(7200) == "2.00 h"


def test_a_tick_is_kept_and_half_a_tick_goes_to_even() -> None:
    tick = units.TICK_S
    assert tick == 2.0**-36
    assert units.quantise(tick) == tick
    assert units.quantise(tick / 2) == 0.0
    assert units.quantise(1.5 * tick) == 2 * tick
    assert units.quantise(units.MAX_TIME_S) == units.MAX_TIME_S == 131072.0


@given(st.lists(st.floats(0, 100), min_size=2, max_size=50))
def test_sums_on_the_grid_do_not_depend_on_the_order(values: list[float]) -> None:
    on_grid = units.quantise(np.array(values))
    assert sum(on_grid.tolist()) == sum(reversed(on_grid.tolist())) == math.fsum(on_grid.tolist())
    assert np.all(np.abs(on_grid - np.array(values)) <= units.TICK_S / 2)
    assert np.array_equal(units.quantise(on_grid), on_grid)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1e-9, 131072.1])
def test_times_off_the_grid_are_refused(bad: float) -> None:
    with pytest.raises(UnitError, match="from 0 to 131,072 s"):
        units.quantise(bad)
    with pytest.raises(UnitError, match=f"got {bad:,.6g} s"):
        units.quantise(np.array([[0.0, 1.0], [bad, 2.0]]))
