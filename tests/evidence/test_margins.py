"""What margins call: each counts jobs beyond their device, of both sorts."""

from __future__ import annotations

from evidence.fits.margins import MARGINS, Case, called


def test_a_larger_margin_calls_more_of_both_and_each_counts_its_own_bytes() -> None:
    gib = 2.0**30
    cases = [
        Case(ran=False, peak=82 * gib, allocated=80 * gib, moving=10 * gib, limit=80 * gib),
        Case(ran=False, peak=72 * gib, allocated=70 * gib, moving=35 * gib, limit=80 * gib),
        Case(ran=True, peak=72 * gib, allocated=70 * gib, moving=7 * gib, limit=80 * gib),
    ]
    for margin, sizes in MARGINS.values():
        counts = [called(cases, margin, size) for size in sizes]
        assert all(a <= b and c <= d for (a, c), (b, d) in zip(counts, counts[1:], strict=False))
    share, moving, fixed = (margin for margin, _ in MARGINS.values())
    assert called(cases, share, 0) == (1, 0)
    assert called(cases, share, 0.15) == (2, 1)
    assert called(cases, moving, 0.5) == (2, 0)
    assert called(cases, fixed, 9) == (2, 1)
