"""An oracle of units: every token of every sequence is in exactly one of them."""

from __future__ import annotations

from collections.abc import Sequence

from gnomon.plans import Unit


def tokens_of(units: Sequence[Unit]) -> list[tuple[int, int]]:
    """(sequence, token) of all pieces, in order, as often as they are there."""
    return sorted((sequence, token) for unit in units for sequence, a, b in unit.pieces for token in range(a, b))


def check_cover(units: Sequence[Unit], lengths: Sequence[int]) -> None:
    """Asserts that the units hold each token of sequences of these lengths once, and nothing else."""
    assert tokens_of(units) == [(sequence, token) for sequence, length in enumerate(lengths) for token in range(length)]
