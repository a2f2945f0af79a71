"""Buffers that live at the same time never share memory, and those that do not may."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gnomon.compiler.tasks.arena import LINE, Buffer, offsets

buffer = st.builds(
    lambda size, first, lives: Buffer(size_bytes=size, first=first, last=first + lives),
    st.integers(1, 1000),
    st.integers(0, 12),
    st.integers(0, 5),
)


@given(st.lists(buffer, max_size=20))
def test_no_two_that_live_together_share_a_line(buffers: list[Buffer]) -> None:
    places, whole = offsets(buffers)
    lines = [range(at // LINE, -(-(at + b.size_bytes) // LINE)) for at, b in zip(places, buffers, strict=True)]
    for step in range(20):
        alive = [n for n, b in enumerate(buffers) if b.first <= step <= b.last]
        used = [line for n in alive for line in lines[n]]
        assert len(used) == len(set(used))
        assert len(used) * LINE <= whole
    assert all(at % LINE == 0 for at in places)
    assert whole == max((LINE * each.stop for each in lines), default=0)


def test_a_chain_takes_two_places() -> None:
    chain = [Buffer(size_bytes=640, first=n, last=n + 1) for n in range(9)]
    assert offsets(chain)[1] == 2 * 640
