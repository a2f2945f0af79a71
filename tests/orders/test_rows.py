"""Orders written out for small pipelines, and the promises of each schedule as errors.

Those of ZB-V, DualPipe-V and the interleaved schedules are also what torch 2.13's `torch.distributed.pipelining`
gives for the same sizes (compared for 2, 3, 4 and 8 ranks; the ones with two ranks are written here).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gnomon.errors import PlanError
from gnomon.lowering import (
    Rows,
    dapple_warm_up,
    dualpipe_v,
    gpipe,
    interleaved_one_f_one_b,
    interleaved_zero_bubble,
    looped_bfs,
    one_f_one_b,
    v_half,
    zero_bubble_h1,
    zero_bubble_v,
)
from gnomon.orders import rows


def written(rows: Rows) -> list[str]:
    """Each rank's actions, composites in parentheses."""
    out = []
    for low, high in zip(rows.class_ptr, rows.class_ptr[1:], strict=False):
        names: list[str] = []
        for row in range(int(low), int(high)):
            name = f"{rows.stage[row]}{rows.kinds[rows.kind[row]].name}{rows.unit[row]}"
            if rows.group[row] >= 0 and row > low and rows.group[row] == rows.group[row - 1]:
                names[-1] = f"({names[-1]}&{name})"
            else:
                names.append(name)
        out.append(" ".join(names))
    return out


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        (
            gpipe(2, 3),
            ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"],
        ),
        (
            one_f_one_b(3, 4),
            [
                "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
                "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
                "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
            ],
        ),
        (
            one_f_one_b(2, 3, warm_up=dapple_warm_up("2p", 2)),
            ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"],
        ),
        (
            interleaved_one_f_one_b(2, 4, 2),
            [
                "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
                "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
            ],
        ),
        (
            looped_bfs(2, 2, 2),
            ["0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", "1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1"],
        ),
        (
            zero_bubble_h1(2, 3),
            ["0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2", "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"],
        ),
        (
            interleaved_zero_bubble(2, 2, 2),
            ["0F0 0F1 2F0 2F1 2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1", "1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1"],
        ),
        (
            zero_bubble_v(2, 4),
            [
                "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3",
                "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3",
            ],
        ),
        (
            dualpipe_v(2, 4),
            [
                "0F0 0F1 0F2 3F0 3I0 3W0 3F1 (0F3&3B1) (3F2&0B0) 3B2 (3F3&0B1) 3B3 0I2 0W2 0I3 0W3",
                "1F0 2F0 1F1 2F1 1F2 2B0 (2F2&1B0) (1F3&2B1) (2F3&1B1) 2B2 1B2 2I3 1I3 2W3 1W3",
            ],
        ),
        (
            v_half(2, 2),
            # Cells of microbatch 0 on rank 0: F 0, F 7, I 9, W 10, I 14, W 17; microbatch 1 six later.
            ["0F0 0F1 3F0 3I0 3W0 3F1 0I0 3I1 3W1 0W0 0I1 0W1", "1F0 2F0 1F1 2I0 2F1 1I0 2W0 1W0 2I1 1I1 2W1 1W1"],
        ),
    ],
    ids="gpipe 1f1b dapple-2p interleaved looped zb-h1 interleaved-zb zb-v dualpipe-v v-half".split(),
)
def test_small_pipelines(rows: Rows, wanted: list[str]) -> None:
    assert written(rows) == wanted


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: rows("one_f_one_b", 0, 4), "at least 1 pipeline rank and 1 microbatch, but has 0 and 4"),
        (lambda: rows("gpipe", 4, 0), "schedule gpipe needs at least 1 pipeline rank"),
        (lambda: one_f_one_b(3, 4, warm_up=(1, 2, 0)), r"warm-up forwards \(1, 2, 0\) must be one number >= 0"),
        (lambda: one_f_one_b(3, 4, warm_up=(1, 0)), "for each of 3 ranks"),
        (lambda: dapple_warm_up("3p", 4), "policy '3p': use 'p'"),  # type: ignore[arg-type]
        (lambda: rows("interleaved_one_f_one_b", 4, 6), "multiple of 4 microbatches .* not 6; the nearest is 8"),
        (lambda: rows("interleaved_zero_bubble", 4, 6), "interleaved_zero_bubble needs a multiple of 4"),
        (lambda: rows("interleaved_one_f_one_b", 1, 4), "at least 2 pipeline ranks and 2 virtual stages, but has 1 a"),
        (lambda: rows("looped_bfs", 4, 4, 1), "but has 4 and 1; raise them, or use one_f_one_b"),
        (lambda: rows("gpipe", 4, 4, 2), "takes one stage on each rank, but has 2"),
        (lambda: rows("zero_bubble_v", 4, 6), "at least 2 x 4 - 1 = 7 microbatches, not 6"),
        (lambda: rows("dualpipe_v", 4, 7), "at least 2 x 4 = 8 microbatches .* not 7"),
        (lambda: rows("v_half", 2, 2, 3), "schedule v_half needs virtual_stages = 2 and placement = 'v', but has 3"),
        (lambda: rows("zbv", 2, 4), r"unknown schedule 'zbv' \(here it is 'zero_bubble_v'\)"),
    ],
)
def test_what_a_schedule_refuses(build: Callable[[], Rows], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        build()
