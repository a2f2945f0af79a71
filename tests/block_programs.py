"""Random pipelines of blocks, for tests of the passes that work on blocks."""

from __future__ import annotations

from hypothesis import strategies as st

from gnomon.lowering import gpipe, interleaved_one_f_one_b, one_f_one_b, with_messages, with_optimizer, zero_bubble_h1
from gnomon.lowering.blocks import with_blocks
from gnomon.program import Program


@st.composite
def block_programs(draw: st.DrawFn) -> Program:
    """Pipelines of 1 to 3 ranks, of some schedule, with 1 to 3 blocks a stage."""
    ranks, units = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    rows = draw(st.sampled_from([gpipe, one_f_one_b, zero_bubble_h1]))(ranks, units)
    if ranks > 1 and draw(st.booleans()):
        rows = interleaved_one_f_one_b(ranks, ranks * units, 2)
    program = with_messages(with_optimizer(rows)).program()
    return with_blocks(program, [draw(st.integers(1, 3)) for _ in range(program.num_stages)])


def count(program: Program, kind: str) -> int:
    return sum(program.kinds[k].name == kind for k in program.kind.tolist())
