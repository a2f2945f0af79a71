"""Requests that a server really answered, as predictions have them: `MeasuredLoad`, and its file.

`of(rows)` reads what `gnomon bench-serve` saw; `ttft`, `tpot` and `e2e` are percentiles by the definitions of
`forecast`. Leaves out the price of anything.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from gnomon.errors import FormatError
from gnomon.serving.forecast import Spread
from gnomon.serving.requests import Load, Request

SCHEMA = "gnomon.serving-measured/1"
COLUMNS = ("arrival_s", "first_s", "end_s", "input_len", "output_len")


class RequestSeconds(Protocol):
    """One request, in seconds from the first arrival."""

    @property
    def arrival_s(self) -> float: ...
    @property
    def first_s(self) -> float: ...
    @property
    def end_s(self) -> float: ...
    @property
    def input_len(self) -> int: ...
    @property
    def output_len(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLoad:
    """Answers of a server."""

    rows: tuple[tuple[float, float, float, int, int], ...]
    """As `COLUMNS` says, in order of arrival."""
    concurrency: int | None
    """Requests at the same time; None: at their own times."""

    @staticmethod
    def of(rows: Iterable[RequestSeconds], *, concurrency: int | None) -> MeasuredLoad:
        """Collects the requests that were answered."""
        # The arrival comes first, so tuples sort by it.
        rows_measured = ((r.arrival_s, r.first_s, r.end_s, r.input_len, r.output_len) for r in rows)
        return MeasuredLoad(rows=tuple(sorted(rows_measured)), concurrency=concurrency)

    @staticmethod
    def read(text: str, source: str) -> MeasuredLoad:
        """The file that `gnomon bench-serve -o` writes. FormatError for another."""
        try:
            value = json.loads(text)
            if value.get("schema") != SCHEMA:
                raise FormatError(f"{source} is no {SCHEMA}; gnomon bench-serve -o writes one")
            columns = [value["requests"][name] for name in COLUMNS]
            rows = tuple((float(a), float(f), float(e), int(i), int(o)) for a, f, e, i, o in zip(*columns, strict=True))
            stated = value["concurrency"]
            if not rows:
                raise FormatError(f"{source} has no requests")
            return MeasuredLoad(rows=rows, concurrency=None if stated is None else int(stated))
        except FormatError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FormatError(f"{source} cannot be read as {SCHEMA}: {error}") from error

    def load(self) -> Load:
        """What was asked, for a prediction of the same."""
        requests = tuple(Request(arrival_s=a, input_len=i, output_len=o) for a, _, _, i, o in self.rows)
        return Load(requests=requests, concurrency=self.concurrency)

    def _column(self, name: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return np.array([row[COLUMNS.index(name)] for row in self.rows], dtype=np.float64)

    @property
    def ttfts(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Arrival to first token of each request."""
        return self._column("first_s") - self._column("arrival_s")

    @property
    def tpots(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """A further token, of each answer of more than one."""
        outputs = self._column("output_len")
        spans = self._column("end_s") - self._column("first_s")
        # An answer of one token has no further one and is left out; the maximum only avoids a division by 0.
        return (spans / np.maximum(outputs - 1, 1))[outputs > 1]

    @property
    def ttft(self) -> Spread:
        """Arrival to first token."""
        return Spread.of(self.ttfts)

    @property
    def tpot(self) -> Spread:
        """A further token, of answers of more than one."""
        return Spread.of(self.tpots)

    @property
    def e2e(self) -> Spread:
        """Arrival to last token."""
        return Spread.of(self._column("end_s") - self._column("arrival_s"))

    @property
    def span_s(self) -> float:
        """Returns the seconds from the first arrival to the last token."""
        return float(self._column("end_s").max() - self._column("arrival_s").min())

    @property
    def output_tokens_per_s(self) -> float:
        """Returns the output tokens a second over the whole span."""
        return float(self._column("output_len").sum()) / self.span_s

    def to_mapping(self) -> Mapping[str, object]:
        """Writes the file's mapping."""
        return {
            "schema": SCHEMA,
            "concurrency": self.concurrency,
            "ttft": self.ttft.to_mapping(),
            "tpot": self.tpot.to_mapping(),
            "e2e": self.e2e.to_mapping(),
            "output_tokens_per_s": self.output_tokens_per_s,
            "requests": {name: [row[at] for row in self.rows] for at, name in enumerate(COLUMNS)},
        }
