"""Constants that were chosen with published inference runs in view, chosen again without the source that is scored.

Two kinds were: host time of an iteration in records of engines, and rates of ggml's matmuls by generation.
`Refit(rows)` chooses each anew from every source alone, by a rule and from neutral beginnings; `without(source)` gives
`scores` the medians of the others: of the same record or generation, else of the same program or of all. Everything
else is read in programs' sources, or fitted to kernels and collectives, none of them in the table.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from statistics import median
from typing import Any

import numpy as np

from evidence.inference.rows import Asked, read
from evidence.inference.score import Score, scores
from gnomon.errors import GnomonError
from gnomon.hardware import parse_cluster
from gnomon.prices.decoding import Ggml, ggml_row
from gnomon.serving.layout import weight_format
from gnomon.software.engine import Engine

Row = Mapping[str, str]
HOSTS_S = (1e-4, 3e-4, 1e-3, 2e-3, 3e-3, 5e-3, 8e-3)
"""Host times of an iteration that are tried."""
NEUTRAL: Mapping[str, Any] = {"host_sequence_s": 6e-6, "launch_s": 5e-6, "request_s": 8e-3, "request_token_s": 4e-6}
"""What stands in place of the other host times, the same for every engine."""
GGML_HOST: Mapping[str, Any] = {"host_step_s": 2e-4, "host_sequence_s": 6e-6, "launch_s": 5e-6}
"""The same of llama.cpp's."""
START: Mapping[str, Any] = {
    "start_s": 5e-6, "memory_share": 0.7, "quantised_memory_share": 0.7, "quantised_share": 0.2, "half_share": 0.3,
    "experts_share": 0.5, "attention_share": 0.5,
}  # fmt: skip
"""Rates of ggml from which a fit begins."""
FITTED = ("memory_share", "quantised_memory_share", "quantised_share", "half_share")
"""Those that a fit moves."""
ROUNDS, MOST = 3, 12
"""Of a fit of ggml's rates, and rows of a source that a fit looks at."""
STEPS = ("TPOT", "ITL", "decode", "latency")
"""How figures begin that host time shows in."""

Key = tuple[str, str]
"""(program, version) of an engine's record, or ("ggml", generation)."""


def key_of(asked: Asked) -> Key:
    """What a row's constants are of."""
    if not asked.engine.kernels.startswith("ggml"):
        return asked.engine.name, asked.engine.version
    return "ggml", _on_record(asked).arch


def _on_record(asked: Asked) -> Ggml:
    return ggml_row(parse_cluster(asked.on).devices[0], vulkan=asked.engine.kernels == "ggml-vulkan")


def _with_host(seconds: float) -> Callable[[Asked], Asked]:
    def told(asked: Asked) -> Asked:
        engine: Engine = replace(asked.engine, host_step_s=seconds, **NEUTRAL)
        return replace(asked, engine=engine)

    return told


def _with_rates(rates: Mapping[str, float]) -> Callable[[Asked], Asked]:
    def told(asked: Asked) -> Asked:
        return replace(
            asked, engine=replace(asked.engine, **GGML_HOST), ggml=replace(_on_record(asked), **{**START, **rates})
        )

    return told


def _scored(rows: Sequence[Row], told: Callable[[Asked], Asked]) -> list[tuple[Row, Score]]:
    found = []
    for row in rows:
        try:
            found += [(row, one) for one in scores(row, told)]
        except (GnomonError, ValueError, KeyError):
            continue
    return found


def best_host(rows: Sequence[Row]) -> float | None:
    """The host time of an iteration with which these rows are off least, in the median; None where none shows it."""

    def off(seconds: float) -> float:
        made = [s for _, s in _scored(rows, _with_host(seconds)) if s.figure.startswith(STEPS)]
        return float(np.median([abs(np.log(s.predicted / s.measured)) for s in made])) if made else np.inf

    errors = {seconds: off(seconds) for seconds in HOSTS_S}
    best = min(errors, key=lambda one: errors[one])
    return best if np.isfinite(errors[best]) else None


def best_rates(rows: Sequence[Row]) -> dict[str, float]:
    """Rates of ggml: each is moved by the median of predicted over measured of the figures that it is in."""
    rates = {name: START[name] for name in FITTED}
    for _ in range(ROUNDS):
        ratios: dict[str, list[float]] = defaultdict(list)
        for row, made in _scored(rows, _with_rates(rates)):
            wide = weight_format(read(row).serving.weights).bits >= 16
            if made.figure.startswith("decode"):
                name = "memory_share" if wide else "quantised_memory_share"
            elif made.figure == "prefill":
                name = "half_share" if wide else "quantised_share"
            else:
                continue
            ratios[name].append(made.predicted / made.measured)
        for name, seen in ratios.items():
            rates[name] = float(np.clip(rates[name] * median(seen), 0.01, 1.2))
        moved = set(ratios)
    return {name: rates[name] for name in moved}


class Refit:
    """Constants by source."""

    def __init__(self, rows: Sequence[Row]) -> None:
        """rows: of all sources, as the table has them."""
        groups: dict[tuple[Key, str], list[Row]] = defaultdict(list)
        for row in rows:
            try:
                groups[key_of(read(row)), row["family"]].append(row)
            except (GnomonError, ValueError, KeyError):
                continue
        self.rows = {key: rows[:: -(-len(rows) // MOST)] for key, rows in groups.items()}
        self._host = cache(lambda key: best_host(self.rows[key]))
        self._rates = cache(lambda key: best_rates(self.rows[key]))

    def _others(self, key: Key, source: str) -> list[tuple[Key, str]]:
        """Fits that stand in for a key without a source: of the same key, else of the same program, else of all."""
        other = [one for one in self.rows if one[1] != source and (one[0][0] == "ggml") == (key[0] == "ggml")]
        same = [one for one in other if one[0] == key]
        return same or [one for one in other if one[0][0] == key[0]] or other

    def host_s(self, key: Key, source: str) -> float:
        """Host time of an iteration of a record without a source."""
        found = [one for other in self._others(key, source) if (one := self._host(other)) is not None]
        return median(found) if found else median(HOSTS_S)

    def rates(self, key: Key, source: str) -> dict[str, float]:
        """Rates of ggml on a generation without a source."""
        every = [one for one in self.rows if one[0][0] == "ggml" and one[1] != source]
        made = {}
        for name in FITTED:
            near = [r[name] for other in self._others(key, source) if name in (r := self._rates(other))]
            far = [r[name] for other in every if name in (r := self._rates(other))]
            made[name] = median(near or far or [START[name]])
        return made

    def without(self, source: str) -> Callable[[Asked], Asked]:
        """For `scores`: rows of a source with constants that it is no part of."""

        def told(asked: Asked) -> Asked:
            key = key_of(asked)
            if key[0] == "ggml":
                return _with_rates(self.rates(key, source))(asked)
            return _with_host(self.host_s(key, source))(asked)

        return told

    def lines(self) -> list[str]:
        """What was fitted, by record and source, as far as it was asked for."""
        made = []
        for (key, source), rows in sorted(self.rows.items()):
            if key[0] == "ggml":
                rates = " ".join(f"{name} {value:.2f}" for name, value in self._rates((key, source)).items())
                made.append(f"ggml on {key[1]:16}{source:22}{len(rows):4} rows: {rates}")
            else:
                host = self._host((key, source))
                said = "nothing shows it" if host is None else f"{host * 1e3:g} ms"
                made.append(f"{key[0]} {key[1]:24}{source:22}{len(rows):4} rows: {said}")
        return made
