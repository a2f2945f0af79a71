"""What comes in: requests with their lengths and times, and the ways in which they are offered.

`closed` makes a loop of clients that each wait for their answer, `poisson` and `bursts` requests at a rate, `from_csv`
a recorded trace. Times are seconds from the first. Pure and repeatable: randomness has a seed. Leaves out what tokens
say: two prompts have the same beginning only where a trace says so (`prefix_len`).
"""

from __future__ import annotations

import csv
import io
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gnomon.errors import FormatError, InputError, nearest

ARRIVALS = ("arrival_s", "arrival_ms", "timestamp_ms", "timestamp", "arrived_at", "time_s")
INPUTS = (
    "input_len", "input_tokens", "context_tokens", "prompt_tokens", "ContextTokens", "num_prefill_tokens",
    "prefill_tokens",
)  # fmt: skip
OUTPUTS = (
    "output_len", "output_tokens", "generated_tokens", "completion_tokens", "GeneratedTokens", "num_decode_tokens",
    "decode_tokens",
)  # fmt: skip
PREFIXES = ("prefix_len", "prefix_tokens")
"""Names of a trace's columns, as public traces have them."""

LONGEST = 10_000_000
"""Tokens of a prompt or an answer, at most: more is a mistake in a trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt and its answer."""

    arrival_s: float
    """When it reaches the server; of a closed loop 0, as its client sends it when the one before is answered."""
    input_len: int
    """Tokens of the prompt."""
    output_len: int
    """Tokens of the answer, at least 1."""
    prefix_len: int = 0
    """Tokens at the prompt's beginning that an earlier prompt had too."""

    def __post_init__(self) -> None:
        if self.input_len < 1 or self.output_len < 1:
            raise InputError(
                f"a request of {self.input_len} input and {self.output_len} output tokens cannot be served: both are "
                "at least 1"
            )
        if max(self.input_len, self.output_len) > LONGEST:
            raise InputError(f"a request of {max(self.input_len, self.output_len)} tokens is longer than {LONGEST}")
        if not 0 <= self.arrival_s < math.inf:
            raise InputError(f"a request arrives at {self.arrival_s} s; give a time from 0")
        if not 0 <= self.prefix_len <= self.input_len:
            raise InputError(f"a prefix of {self.prefix_len} tokens is no part of a prompt of {self.input_len}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests and how they are offered."""

    requests: tuple[Request, ...]
    """In order of arrival; in a closed loop in the order in which clients take them."""
    concurrency: int | None = None
    """Clients of a closed loop; None: each comes at its own time."""

    def __post_init__(self) -> None:
        if not self.requests:
            raise InputError("there are no requests to serve; give a trace with rows or lengths")
        if self.concurrency is not None and self.concurrency < 1:
            raise InputError(f"concurrency {self.concurrency} serves nobody: give at least 1")

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and answer together."""
        return max(r.input_len + r.output_len for r in self.requests)

    def share(self, parts: int) -> Load:
        """What one of `parts` equal engines gets, requests dealt in turn; of a closed loop its part of the clients."""
        if parts == 1:
            return self
        mine = self.requests[::parts]
        clients = None if self.concurrency is None else -(-self.concurrency // parts)
        return replace(self, requests=mine, concurrency=clients)


def _lengths(mean: int, spread: float, rng: random.Random) -> int:
    """Uniform from (1 - spread) · mean to mean."""
    return mean if spread == 0 else max(1, rng.randint(math.ceil(mean * (1 - spread)), mean))


def closed(
    input_len: int, output_len: int, concurrency: int, count: int, *, spread: float = 0.0, seed: int = 0
) -> Load:
    """`count` requests by `concurrency` clients. spread: lengths lie uniformly from (1 - spread) of the given ones."""
    if concurrency < 1:
        raise InputError(f"concurrency {concurrency} serves nobody: give at least 1")
    rng = random.Random(seed)
    requests = tuple(
        Request(arrival_s=0.0, input_len=_lengths(input_len, spread, rng), output_len=_lengths(output_len, spread, rng))
        for _ in range(count)
    )
    return Load(requests=requests, concurrency=concurrency)


def poisson(
    input_len: int, output_len: int, rate: float, count: int, *, spread: float = 0.0, seed: int = 0, burst: int = 1
) -> Load:
    """`count` requests at `rate` a second on average, `burst` of them at a time, times between exponential."""
    if not 0 < rate < math.inf:
        raise InputError(f"a rate of {rate} requests a second is none; give a number above 0")
    if burst < 1:
        raise InputError(f"bursts of {burst} requests are none; give at least 1")
    rng, now, requests = random.Random(seed), 0.0, []
    for index in range(count):
        if index and index % burst == 0:
            now += rng.expovariate(rate / burst)
        requests.append(
            Request(
                arrival_s=now,
                input_len=_lengths(input_len, spread, rng),
                output_len=_lengths(output_len, spread, rng),
            )
        )
    return Load(requests=tuple(requests))


def at_rate(load: Load, rate: float) -> Load:
    """The same trace, stretched or pressed so that requests come at `rate` a second on average."""
    if not 0 < rate < math.inf:
        raise InputError(f"a rate of {rate} requests a second is none; give a number above 0")
    span = load.requests[-1].arrival_s - load.requests[0].arrival_s
    if span == 0:
        raise InputError("all requests of the trace come at once: there is nothing that a rate could stretch")
    scale = (len(load.requests) - 1) / rate / span
    start = load.requests[0].arrival_s
    return replace(load, requests=tuple(replace(r, arrival_s=(r.arrival_s - start) * scale) for r in load.requests))


def from_csv(text: str, *, source: str = "<trace>", concurrency: int | None = None) -> Load:
    """A trace of one request a row: a time, input tokens, output tokens, as public traces name their columns.

    FormatError names the first row that cannot be read. Times of day (`2023-11-16 18:17:03.97`) count from the first.
    """
    reader = csv.reader(io.StringIO(text))
    try:
        header = [name.strip() for name in next(reader)]
    except StopIteration:
        raise FormatError(
            f"{source} is empty; the first line names the columns: arrival_s,input_len,output_len"
        ) from None
    inputs, outputs = _column(header, INPUTS, source), _column(header, OUTPUTS, source)
    times = next((header.index(name) for name in (*ARRIVALS, "TIMESTAMP") if name in header), None)
    prefixes = next((header.index(name) for name in PREFIXES if name in header), None)
    if times is None and concurrency is None:
        raise FormatError(
            f"{source} has no column of times ({', '.join(ARRIVALS)}); add one, or say how many wait at a time with "
            f"--concurrency"
        )
    requests: list[Request] = []
    for row in reader:
        if not row or not any(cell.strip() for cell in row):
            continue
        where = f"{source} line {reader.line_num}"
        if len(row) != len(header):
            raise FormatError(f"{where} has {len(row)} columns, the first line names {len(header)}")
        # With a fixed number at a time a request begins when another ends, whatever the trace's times say.
        arrival = 0.0 if times is None or concurrency is not None else _time(row[times], header[times], where)
        try:
            requests.append(
                Request(
                    arrival_s=arrival,
                    input_len=_whole(row[inputs], header[inputs], where),
                    output_len=_whole(row[outputs], header[outputs], where),
                    prefix_len=0 if prefixes is None else _whole(row[prefixes], header[prefixes], where),
                )
            )
        except FormatError:
            raise
        except InputError as error:
            raise FormatError(f"{where}: {error}") from None
    if not requests:
        raise FormatError(f"{source} names columns but has no rows")
    if concurrency is None:
        # Rows of a trace need not be in order of time, and requests are.
        requests.sort(key=lambda r: r.arrival_s)
        first = requests[0].arrival_s
        requests = [replace(r, arrival_s=r.arrival_s - first) for r in requests]
    return Load(requests=tuple(requests), concurrency=concurrency)


def _column(header: Sequence[str], names: tuple[str, ...], source: str) -> int:
    for name in names:
        if name in header:
            return header.index(name)
    raise FormatError(f"{source} has no column {names[0]}{nearest(names[0], header)}; known names: {', '.join(names)}")


def _whole(text: str, name: str, where: str) -> int:
    try:
        value = float(text)
        if not value.is_integer():
            raise ValueError
        return int(value)
    except (ValueError, OverflowError):
        raise FormatError(f"{where}: {name} is {text[:40]!r}; write a whole number of tokens") from None


def _time(text: str, name: str, where: str) -> float:
    """Seconds of a cell: a number (of milliseconds where the column says so), or a time of day."""
    try:
        value = float(text)
    except ValueError:
        return _clock(text, name, where)
    if not (0 <= value < math.inf):
        raise FormatError(f"{where}: {name} is {text[:40]!r}; write a time from 0")
    return value / 1000 if name.endswith("_ms") else value


def _clock(text: str, name: str, where: str) -> float:
    timestamp = text.strip().replace("T", " ").rstrip("Z")
    day, _, clock = timestamp.partition(" ")
    try:
        year, month, date = (int(part) for part in day.split("-"))
        hours, minutes, seconds = clock.split(":")
        return _days(year, month, date) * 86400.0 + int(hours) * 3600 + int(minutes) * 60 + float(seconds)
    except ValueError:
        raise FormatError(f"{where}: {name} is {text[:40]!r}; write seconds, or 2023-11-16 18:17:03.97") from None


def _days(year: int, month: int, day: int) -> int:
    """Days from 0000-03-01 of the Gregorian calendar."""
    if not (1 <= month <= 12 and 1 <= day <= 31):
        raise ValueError
    # Years begin in March, so that a leap day is the last of its year; before month m, counted from March, there are
    # (153 m + 2) // 5 days.
    shifted = year - (month <= 2)
    return (
        365 * shifted + shifted // 4 - shifted // 100 + shifted // 400 + (153 * ((month + 9) % 12) + 2) // 5 + day - 1
    )
