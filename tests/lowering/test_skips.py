"""Skips between stages: they fit any schedule, cost no message on one rank, and refuse recomputed stages."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.errors import PlanError
from gnomon.lowering import (
    Rows,
    dualpipe_v,
    gpipe,
    of_lists,
    one_f_one_b,
    with_messages,
    with_optimizer,
    zero_bubble_h1,
    zero_bubble_v,
)
from gnomon.lowering.skips import Skip, skip_buffers, with_skips
from gnomon.methods.mario import apply_checkpoint
from gnomon.program import Program, issue_order_peak, validate

NOTHING = {name: 0 for name in ("S", "X", "Y", "DX", "DY", "P", "G")}


def program(rows: Rows, skips: tuple[Skip, ...], *, blocking: bool = False) -> Program:
    return with_messages(with_skips(with_optimizer(rows), skips, blocking=blocking)).program(
        buffers=skip_buffers(skips)
    )


@given(
    schedule=st.sampled_from([gpipe, one_f_one_b, zero_bubble_h1, zero_bubble_v, dualpipe_v]),
    ranks=st.integers(2, 4),
    units=st.integers(1, 9),
    data=st.data(),
)
def test_skips_fit_any_schedule(
    schedule: Callable[[int, int], Rows], ranks: int, units: int, data: st.DataObject
) -> None:
    folded = schedule in (zero_bubble_v, dualpipe_v)  # two skips between one pair of ranks may be sent out of order
    if folded:
        units = max(units, 2 * ranks)
    rows = schedule(ranks, units)
    pairs = [(a, b) for a in range(rows.num_stages) for b in range(a + 2, rows.num_stages)]
    chosen = tuple(sorted(data.draw(st.sets(st.sampled_from(pairs), max_size=1 if folded else 3)))) if pairs else ()
    made = program(rows, chosen)
    structure = validate(made)
    sent = sum(made.kinds[kind].name == "SEND_SKIP" for kind in made.kind.tolist())
    classes = {int(stage): int(cls) for stage, cls in zip(rows.stage, rows.rank_class, strict=True)}
    assert sent == sum(units for a, b in chosen if classes[a] != classes[b])
    sizes = {**NOTHING, **{f"{p}_{a}_{b}": 1 for a, b in chosen for p in ("SKIP", "DSKIP")}}
    assert all(peak.bytes <= 2 * units for peak in issue_order_peak(made, structure.deps, sizes))


def test_two_stages_of_one_rank_hand_a_skip_over_without_a_message() -> None:
    # On two ranks in a V, stages 0 and 3 are both on rank 0: what a U-Net skips never leaves it.
    rows = zero_bubble_v(2, 4)
    made = program(rows, ((0, 3),))
    assert not {made.kinds[kind].name for kind in made.kind.tolist()} & {"SEND_SKIP", "RECV_SKIP"}
    peak = issue_order_peak(made, validate(made).deps, {**NOTHING, "SKIP_0_3": 1, "DSKIP_0_3": 0})
    # Rank 0 keeps as many skips as it runs forwards of stage 0 ahead of the first forward of stage 3.
    kinds = [made.kinds[kind].name for kind in made.kind.tolist()]
    first = next(i for i in range(made.num_rows) if kinds[i] == "F" and made.stage[i] == 3)
    assert peak[0].bytes == sum(kinds[i] == "F" and made.stage[i] == 0 for i in range(first))


def test_blocking_messages_are_on_the_compute_stream() -> None:
    made = program(one_f_one_b(3, 4), ((0, 2),), blocking=True)
    streams = {made.streams[made.stream[i]] for i in range(made.num_rows) if "SKIP" in made.kinds[made.kind[i]].name}
    assert streams == {"compute"}


def test_recomputed_stages_are_refused() -> None:
    rows = of_lists([[("C", 0, 0), ("R", 0, 0), ("B", 0, 0)], [("F", 1, 0), ("B", 1, 0)]], num_stages=3, num_units=1)
    with pytest.raises(PlanError, match="recomputed"):
        with_skips(rows, ((0, 2),))
    made = program(one_f_one_b(3, 4), ((0, 2),))
    with pytest.raises(PlanError, match="0F0 takes or makes a skip"):
        apply_checkpoint(made)
    apply_checkpoint(made, lambda stage, unit: stage == 1)
