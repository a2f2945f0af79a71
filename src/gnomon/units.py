"""Quantities: parse the text that people write, print it back exactly, and the grid that all times lie on.

Inside Gnomon every number is canonical (seconds, whole bytes, bytes/s, FLOP/s, hertz, watts, dollars/hour); units
exist only in text. `parse_*` is strict: a bare number, NaN, infinity, a negative number or a unit of another kind is a
`UnitError` that lists the accepted units. `format_*` is its exact inverse (`parse(format(x)) == x` for every legal
value); `show_*` rounds, for reports. GB is 10**9 bytes, GiB is 2**30, Gb is bits and only legal in a rate. `quantise`
puts durations on a dyadic grid, on which float64 sums and maxima are exact. Left out: arithmetic on quantities.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from typing import Annotated, Any, overload

import numpy as np
from numpy.typing import NDArray

from gnomon.errors import UnitError, nearest

TICK_S = 2.0**-36
"""Spacing of the grid of time (14.6 ps). Up to MAX_TIME_S, multiples of it and their sums and maxima are exact."""

MAX_TIME_S = 2.0**17
"""Largest time on the grid (36.4 hours): 17 + 36 bits are the 53 of float64."""

MAX_INTEGER = 2**63 - 1
"""Largest number of bytes or things: what an int64 column holds."""

MAX_DEVICES = 4_000_000
"""Devices of a cluster and ranks of a mesh, at most: above the largest machines planned, and few enough to list."""

_SI = {"": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}

# Possessive quantifiers and a bounded exponent: no text makes this slow or the number astronomically long.
_NUMBER = re.compile(r"[0-9][0-9_]*+(?:\.[0-9]++)?(?:[eE][+-]?[0-9]{1,3}(?![0-9]))?")
_MAX_TEXT = 2048


def _scaled(symbol: str, *, factor: Fraction = Fraction(1), binary: bool = False) -> dict[str, Fraction]:
    scales = {prefix + symbol: Fraction(10**power) * factor for prefix, power in _SI.items()}
    if binary:
        scales |= {prefix + symbol: Fraction(2**power) * factor for prefix, power in _BINARY.items()}
        scales["K" + symbol] = 1000 * factor
    return scales


_BIT = Fraction(1, 8)


class Unit(Enum):
    """The kinds of quantity. In an annotation (`Annotated[float, Unit.SECONDS]`) it tells `gnomon.schema` how a
    file spells the field."""

    SECONDS = "seconds"
    BYTES = "bytes"
    BYTES_PER_S = "bytes/s"
    FLOPS_PER_S = "FLOP/s"
    HERTZ = "hertz"
    WATTS = "watts"
    DOLLARS_PER_HOUR = "dollars/hour"


Seconds = Annotated[float, Unit.SECONDS]
Bytes = Annotated[int, Unit.BYTES]
BytesPerS = Annotated[float, Unit.BYTES_PER_S]
FlopsPerS = Annotated[float, Unit.FLOPS_PER_S]
Hertz = Annotated[float, Unit.HERTZ]
Watts = Annotated[float, Unit.WATTS]
DollarsPerHour = Annotated[float, Unit.DOLLARS_PER_HOUR]

_SCALES: Mapping[Unit, Mapping[str, Fraction]] = {
    Unit.SECONDS: {
        "ps": Fraction(1, 10**12),
        "ns": Fraction(1, 10**9),
        "us": Fraction(1, 10**6),
        "µs": Fraction(1, 10**6),
        "ms": Fraction(1, 10**3),
        "s": Fraction(1),
        "min": Fraction(60),
        "h": Fraction(3600),
        "d": Fraction(86400),
    },
    Unit.BYTES: _scaled("B", binary=True),
    Unit.BYTES_PER_S: _scaled("B/s", binary=True)
    | _scaled("b/s", factor=_BIT)
    | _scaled("bit/s", factor=_BIT)
    | _scaled("bps", factor=_BIT),
    Unit.FLOPS_PER_S: _scaled("FLOP/s") | _scaled("FLOPS") | _scaled("OP/s"),
    Unit.HERTZ: _scaled("Hz"),
    Unit.WATTS: _scaled("W") | {"mW": Fraction(1, 1000)},
    Unit.DOLLARS_PER_HOUR: {"$/h": Fraction(1), "USD/h": Fraction(1)},
}

# What an error message offers: the spellings people use, not all the table accepts.
_OFFERED = {
    Unit.SECONDS: "ns, us, ms, s, min, h, d",
    Unit.BYTES: "B, kB, MB, GB, TB (powers of 1000), KiB, MiB, GiB, TiB (powers of 1024)",
    Unit.BYTES_PER_S: "MB/s, GB/s, TB/s, GiB/s (bytes), Mb/s, Gb/s, Tb/s (bits)",
    Unit.FLOPS_PER_S: "GFLOP/s, TFLOP/s, PFLOP/s, EFLOP/s",
    Unit.HERTZ: "Hz, kHz, MHz, GHz",
    Unit.WATTS: "mW, W, kW, MW",
    Unit.DOLLARS_PER_HOUR: "$/h, USD/h",
}

# Units that exact printing chooses from, smallest first. All are powers of ten, so shifting the decimal point is
# exact; bytes are apart (below).
_PRINTED = {
    Unit.SECONDS: ((-9, "ns"), (-6, "us"), (-3, "ms"), (0, "s")),
    Unit.BYTES_PER_S: ((0, "B/s"), (3, "kB/s"), (6, "MB/s"), (9, "GB/s"), (12, "TB/s")),
    Unit.FLOPS_PER_S: ((0, "FLOP/s"), (9, "GFLOP/s"), (12, "TFLOP/s"), (15, "PFLOP/s"), (18, "EFLOP/s")),
    Unit.HERTZ: ((0, "Hz"), (6, "MHz"), (9, "GHz")),
    Unit.WATTS: ((0, "W"), (3, "kW"), (6, "MW")),
    Unit.DOLLARS_PER_HOUR: ((0, "$/h"),),
}

_COUNTS = {prefix: Fraction(10**power) for prefix, power in _SI.items() if power <= 12}
_COUNTS |= {"K": Fraction(1000), "B": Fraction(10**9)} | {p: Fraction(2**b) for p, b in _BINARY.items() if b <= 40}


def parse(text: str, unit: Unit, path: str = "") -> float | int:
    """The canonical number of a quantity such as `"900 GB/s"`: int for bytes, float for the others.

    text: a number that is not negative, then a unit of this kind; a blank between them is optional. Dollars may also
        be written `$2.49/h`.
    path: where the text stands, for the error message.
    Bytes written with a fraction (`"79.6 GiB"`) become the nearest whole byte. UnitError if it is anything else.
    """
    body = text.strip()
    if unit is Unit.DOLLARS_PER_HOUR and body.startswith("$"):
        body = body.removeprefix("$").removesuffix("/h").strip() + " $/h"
    number, suffix = _split(body, _expected(unit), path)
    scale = _SCALES[unit].get(suffix)
    if scale is None:
        raise UnitError(_wrong_unit(text, suffix, unit), path)
    return _whole(number * scale, text, path) if unit is Unit.BYTES else _finite(number * scale, text, path)


def format_quantity(value: float | int, unit: Unit) -> str:
    """Exact text of a canonical number: `parse(format_quantity(x, u), u) == x`. UnitError if x is not legal."""
    check(value, unit)
    if unit is Unit.BYTES:
        return _format_bytes(int(value))
    if value == 0:
        return f"0 {_PRINTED[unit][0 if unit is not Unit.SECONDS else -1][1]}"
    exact = Decimal(repr(float(value)))
    power, symbol = _PRINTED[unit][0]
    for candidate in _PRINTED[unit]:
        if exact.adjusted() >= candidate[0]:
            power, symbol = candidate
    return f"{_plain(exact.scaleb(-power))} {symbol}"


def check(value: float | int, unit: Unit, path: str = "") -> None:
    """Raise UnitError unless `value` is a legal canonical number of this kind: finite, not negative, whole if bytes."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UnitError(f"Expected {_expected(unit)} as a number, got {value!r}", path)
    if not math.isfinite(value):
        raise UnitError(f"Expected a finite number of {unit.value}, got {value!r}", path)
    if value < 0:
        raise UnitError(f"Expected {unit.value} of at least 0, got {value!r}", path)
    if unit is Unit.BYTES and (not isinstance(value, int) or value > MAX_INTEGER):
        raise UnitError(f"Expected a whole number of bytes up to {MAX_INTEGER}, got {value!r}", path)


def parse_seconds(text: str) -> float:
    """`"3 us"` -> 3e-06 s. UnitError as in `parse`."""
    return float(parse(text, Unit.SECONDS))


def parse_bytes(text: str) -> int:
    """`"80 GiB"` -> 85899345920 bytes. UnitError as in `parse`."""
    return int(parse(text, Unit.BYTES))


def parse_dollars_per_hour(text: str) -> float:
    """`"$2.49/h"` or `"2.49 $/h"` -> 2.49. UnitError as in `parse`."""
    return float(parse(text, Unit.DOLLARS_PER_HOUR))


def parse_count(text: str, path: str = "") -> int:
    """A whole number of things: `"4096"`, `"4k"` -> 4000, `"4Ki"` -> 4096, `"1.5M"`, `"8B"` (10**9).

    UnitError if it is not whole, negative or something else.
    """
    number, suffix = _split(text.strip(), "a count such as 4096, 4k, 4Ki or 1.5M", path)
    if suffix and suffix not in _COUNTS:
        accepted = "k, M, G or B, T (powers of 1000) or Ki, Mi, Gi, Ti (powers of 1024)"
        raise UnitError(f"Unknown suffix {_quoted(suffix)} in count {_quoted(text)}; use {accepted}", path)
    value = number * _COUNTS[suffix]
    if value.denominator != 1:
        raise UnitError(f"Expected a whole number, got {_quoted(text)}", path)
    return _whole(value, text, path)


def show_seconds(value: float, digits: int = 3) -> str:
    """A duration for people, rounded: `"1.24 ms"`; in seconds up to ten minutes, as steps are compared."""
    check(value, Unit.SECONDS)
    minutes = ((60.0 * 60, "h"), (60.0, "min")) if value >= 600.0 else ()
    return _show(value, (*minutes, (1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")), digits)


def show_bytes(value: float, digits: int = 3) -> str:
    """A size for people, rounded, in powers of 1024: `"61.4 GiB"`."""
    if not 0 <= value < math.inf:
        raise UnitError(f"Expected a finite number of bytes of at least 0, got {value!r}")
    steps = tuple((2.0**power, f"{prefix}B") for prefix, power in reversed(_BINARY.items()))
    return _show(value, (*steps, (1.0, "B")), digits)


@overload
def quantise(seconds: float) -> float: ...
@overload
def quantise(seconds: NDArray[np.float64]) -> NDArray[np.float64]: ...
def quantise(seconds: float | NDArray[np.float64]) -> float | NDArray[np.float64]:
    """The nearest multiple of TICK_S (half to even), for one duration or an array of any shape.

    An error of at most TICK_S / 2 a duration buys exact sums and maxima. UnitError if any is NaN, infinite, negative
    or above MAX_TIME_S.
    """
    values = np.asarray(seconds, dtype=np.float64)
    # The comparison is False for NaN, so one pass finds everything that is not legal.
    legal = (values >= 0) & (values <= MAX_TIME_S)
    if not legal.all():
        bad = values[~legal].flat[0]
        raise UnitError(
            f"a time must be from 0 to {MAX_TIME_S:,.0f} s (2**17, 36 hours), got {bad:,.6g} s; if it is part of a "
            f"step, a size of the model or the batch is likely a mistake"
        )
    on_grid = np.rint(values * (1 / TICK_S)) * TICK_S
    return on_grid if isinstance(seconds, np.ndarray) else float(on_grid)


def _split(body: str, expected: str, path: str) -> tuple[Fraction, str]:
    """The exact number and the unit text of a quantity."""
    if len(body) > _MAX_TEXT:
        raise UnitError(f"Expected {expected}, got a text of {len(body)} characters (limit {_MAX_TEXT})", path)
    match = _NUMBER.match(body)
    if match is None:
        problem = "a negative number" if body.startswith("-") and body[1:2].isdigit() else "no finite number"
        raise UnitError(f"Expected {expected}, got {_quoted(body)} ({problem})", path)
    digits = match.group().replace("_", "")
    return Fraction(digits), body[match.end() :].strip()


def _expected(unit: Unit) -> str:
    return f"{unit.value} ({_OFFERED[unit]})"


def _wrong_unit(text: str, suffix: str, unit: Unit) -> str:
    if not suffix:
        return f"Expected a number with a unit, got bare {_quoted(text)}; units of {unit.value}: {_OFFERED[unit]}"
    kinds = [other.value for other, scales in _SCALES.items() if suffix in scales]
    if kinds:
        why = f"{suffix!r} is a unit of {kinds[0]}"
    elif unit is Unit.BYTES and suffix in _scaled("b") | _scaled("bit"):
        why = f"{suffix!r} are bits; write bytes with a capital B"
    else:
        same = [known for known in _SCALES[unit] if known.casefold() == suffix.casefold()]
        hint = f" (did you mean {same[0]!r}?)" if same else nearest(suffix[:48], _SCALES[unit])
        why = f"unknown unit {_quoted(suffix)}{hint}"
    return f"Expected {unit.value} in {_quoted(text)}, but {why}; accepted: {_OFFERED[unit]}"


def _finite(value: Fraction, text: str, path: str) -> float:
    try:
        return float(value)
    except OverflowError:
        raise UnitError(f"{_quoted(text)} is too large for a float", path) from None


def _whole(value: Fraction, text: str, path: str) -> int:
    if value > MAX_INTEGER:
        raise UnitError(f"{_quoted(text)} is over the limit of {MAX_INTEGER} (an int64)", path)
    if 0 < value < 1:
        raise UnitError(f"{_quoted(text)} is less than one byte", path)
    return round(value)


def _quoted(text: str) -> str:
    return repr(text if len(text) <= 48 else text[:45] + "...")


def _plain(number: Decimal) -> str:
    """Digits without an exponent where that is readable; a Decimal printed either way is exact."""
    if -7 <= number.adjusted() <= 15:
        text = format(number, "f")
        return text.rstrip("0").rstrip(".") if "." in text else text
    return str(number.normalize())


def _format_bytes(value: int) -> str:
    """Prefer the unit with the fewest digits among those in which the value is whole; binary wins a tie."""
    best = f"{value} B"
    if value == 0:
        return best
    scales = [(2**power, f"{prefix}B") for prefix, power in _BINARY.items()]
    scales += [(10**power, f"{prefix}B") for prefix, power in _SI.items()]
    for scale, symbol in scales:
        text = f"{value // scale} {symbol}"
        if value % scale == 0 and len(text.split()[0]) < len(best.split()[0]):
            best = text
    return best


def _show(value: float, steps: tuple[tuple[float, str], ...], digits: int) -> str:
    if value == 0:
        return f"0 {steps[-1][1]}"
    for scale, symbol in steps:
        # Rounding before choosing keeps 999.96 us from printing as 1000 us.
        rounded = float(f"{value / scale:.{digits - 1}e}")
        if rounded >= 1:
            decimals = max(digits - 1 - math.floor(math.log10(rounded)), 0)
            return f"{rounded:.{decimals}f} {symbol}"
    return f"{value / steps[-1][0]:.{digits}g} {steps[-1][1]}"


def distinct(values: NDArray[Any]) -> NDArray[Any]:
    """Each value of an array once, in order. `np.unique` alone loads numpy.ma first, a tenth of a small command."""
    return np.unique(values, return_counts=True)[0]
