"""What ring attention runs beside its kernels, in bytes counted by hand."""

from __future__ import annotations

import pytest

from gnomon.hardware import catalogue
from gnomon.prices.curves import curves_for
from gnomon.prices.ring import BACKWARD_KERNELS, FORWARD_KERNELS, ring_seconds
from gnomon.prices.stream import stream_seconds

H100 = catalogue.device("h100-sxm-80gb")
CURVES = curves_for(H100)
QUERIES, KEYS = 64 * 2**20, 16 * 2**20


@pytest.mark.parametrize(
    ("backward", "queries", "keys", "launches"),
    [
        # zeros 1, first merge 3, a second step of three quarters of it, half of a half copied: 6.75
        # keys and values joined 2, half of a half copied 0.5
        (False, 4 + 2.25 + 0.5, 2 + 0.5, 3 + FORWARD_KERNELS),
        # first gradient copied 2, half the time all and half the time a half added 2.25, three halves copied 1.5
        # copied, joined, copied 6; half of a half copied 0.5, three quarters joined 1.5 and added 2.25
        (True, 2 + 2.25 + 1.5, 6 + 0.5 + 1.5 + 2.25, 3 + BACKWARD_KERNELS),
    ],
)
def test_two_ranks(backward: bool, queries: float, keys: float, launches: int) -> None:
    result = ring_seconds(QUERIES, KEYS, 2, H100, CURVES, backward=backward)
    moved = QUERIES * queries + KEYS * keys
    assert result.kernels == launches
    assert result.device_s == pytest.approx(stream_seconds(moved, 0, H100, CURVES, kernels=launches))


def test_each_further_rank_costs_as_much() -> None:
    """Less but for the share of a cache that buffers of one size have."""
    two, three, four = (ring_seconds(QUERIES, KEYS, n, H100, CURVES, backward=True) for n in (2, 3, 4))
    assert four.kernels - three.kernels == three.kernels - two.kernels == BACKWARD_KERNELS
    assert four.device_s - three.device_s == pytest.approx(three.device_s - two.device_s, rel=0.02)
