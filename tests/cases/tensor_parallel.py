"""A tensor-parallel region on four ranks: all-reduce, sequence-parallel borders, and both borders as hidden rings.

Stages: 0 embedding (F 1, B 1), 1 column-parallel product (F 4, B 8), 2 row-parallel product (F 4, B 8), 3 head and
loss (F 1, B 2): 29 of compute. A ring hop of one shard takes 1, so a gather or reduce-scatter over four ranks takes 3
and an all-reduce 6. Updates are free.

    all-reduce         F0 0-1  F1 1-5  F2 5-9  AR 9-15  F3 15-16  B3 -18  B2 -26  B1 -34  AR -40  B0 -41
    sequence-parallel  F0 0-1  AG 1-4  F1 4-8  F2 8-12  RS 12-15  F3 -16  B3 -18  AG -21  B2 -29  B1 -37  RS -40  B0 -41

Both 41, for both send the same bytes: 2·3/4 of an activation each way (asserted from the rows, and from the sharding
of a Llama layer: two regions, each 2·3/4 of 32 MiB in forward). Cut in four, a product's part takes a quarter:

    gather ring   own 1, hops 1-2, 2-3, 3-4      F1 1-2 2-3 3-4 4-5
    F2 5-6 6-7 7-8 8-9                           scatter ring  hops 6-7, 7-8, 8-9, own part 9
    F3 9-10, B3 10-12, B2 in parts of 2 from 12 to 20 (hops 12-13, 13-14, 14-15), B1 20-28 (hops 22-23, 24-25, 26-27),
    B0 28-29

Everything is hidden: 29. With hops of 1.5 a forward part, 1, is shorter than a hop: the gather's last shard arrives at
1 + 4.5 = 5.5 and its part ends at 6.5, 1.5 late; parts of F2 end at 7.5 … 10.5, hops 7.5-9, 9-10.5, 10.5-12, 1.5 late
again; backward parts of 2 hide their hops: 32, against 29 + 4·4.5 = 47 in one piece.

Memory of the first two, with an activation 4 whole and 1 divided (S of the column-parallel product is its gathered
input, 4). Sequence-parallel: in F2 S 1 + 4 + 1, its input 1 and its partial sums 4: 11, from 8; the reduce-scatter and
the gather of the backward reach it again. All-reduce: S of the embedding is whole, and in the all-reduce partial sums
4 stand beside their sum 4: 4 + 4 + 1 + 8 = 17, from 9. Sources: Shoeybi et al. 2019; Korthikanti et al. 2022; Wang et
al. 2023. The hop and product times are made up.
"""

from __future__ import annotations

from dataclasses import replace

from case_format import Case, Expected, Peak

from gnomon.graph import BF16
from gnomon.lowering.async_tensor_parallel import async_tensor_parallel
from gnomon.lowering.sequence_parallel import tensor_parallel_regions
from gnomon.models.llama import llama, llama3_1_8b
from gnomon.plans import Layout, Mesh
from gnomon.program import Program, effect_table, parse_program, row_effects
from gnomon.sharding import shard_graph

PARTS = """\
gnomon.program/1
stages 4
units 1
class 0 count 4
  0F0 1F0 2F0 3F0 3B0 2B0 1B0 0B0 0OPT 1OPT 2OPT 3OPT
"""

ALL_REDUCE = """\
gnomon.program/1
stages 4
units 1
buffer YP step per unit
buffer DXP step per unit
kind AR_F on tp comm tp: consume YP, write Y
kind AR_B on tp comm tp: consume DXP, write DX
class 0 count 4
  0F0 1F0 2F0{read P 2, consume X 2 0, write S 2 0, write YP 2 0} 2AR_F0 3F0 3B0 2B0
  1B0{read P 1, consume S 1 0, consume DY 1 0, write DXP 1 0, accumulate G 1} 1AR_B0 0B0 0OPT 1OPT
  2OPT 3OPT
"""

SEQUENCE_PARALLEL = """\
gnomon.program/1
stages 4
units 1
buffer XG step per unit
buffer YP step per unit
buffer DYG step per unit
buffer DXP step per unit
kind AG_F on tp comm tp: consume X, write XG
kind RS_F on tp comm tp: consume YP, write Y
kind AG_B on tp comm tp: consume DY, write DYG
kind RS_B on tp comm tp: consume DXP, write DX
class 0 count 4
  0F0 1AG_F0 1F0{read P 1, consume XG 1 0, write S 1 0, write Y 1 0}
  2F0{read P 2, consume X 2 0, write S 2 0, write YP 2 0} 2RS_F0 3F0 3B0 2AG_B0
  2B0{read P 2, consume S 2 0, consume DYG 2 0, write DX 2 0, accumulate G 2}
  1B0{read P 1, consume S 1 0, consume DY 1 0, write DXP 1 0, accumulate G 1} 1RS_B0 0B0 0OPT 1OPT
  2OPT 3OPT
"""

SPLIT = """\
gnomon.program/1
stages 4
units 1
buffer XG step per unit
buffer YP step per unit
buffer DYG step per unit
buffer DXP step per unit
buffer XG.0 step per unit
buffer XG.1 step per unit
buffer XG.2 step per unit
buffer XG.3 step per unit
buffer YP.0 step per unit
buffer YP.1 step per unit
buffer YP.2 step per unit
buffer YP.3 step per unit
buffer DYG.0 step per unit
buffer DYG.1 step per unit
buffer DYG.2 step per unit
buffer DYG.3 step per unit
buffer DXP.0 step per unit
buffer DXP.1 step per unit
buffer DXP.2 step per unit
buffer DXP.3 step per unit
kind AG_F on tp comm tp: consume X, write XG
kind RS_F on tp comm tp: consume YP, write Y
kind AG_B on tp comm tp: consume DY, write DYG
kind RS_B on tp comm tp: consume DXP, write DX
class 0 count 4
  0F0 1AG_F0/1AG_F.own{read X 1 0, write XG.0 1 0}
  1F0/1F.4{accumulate X 2 0, accumulate S 1 0, read P 1, consume XG.0 1 0}
  1AG_F0/1AG_F.4{read X 1 0, write XG.1 1 0}
  1F0/1F.4{accumulate X 2 0, accumulate S 1 0, read P 1, consume XG.1 1 0}
  1AG_F0/1AG_F.4{read X 1 0, write XG.2 1 0}
  1F0/1F.4{accumulate X 2 0, accumulate S 1 0, read P 1, consume XG.2 1 0}
  1AG_F0/1AG_F.4{consume X 1 0, write XG.3 1 0}
  1F0/1F.4{accumulate X 2 0, accumulate S 1 0, read P 1, consume XG.3 1 0}
  2F0/2F.4{read X 2 0, accumulate S 2 0, read P 2, write YP.0 2 0}
  2RS_F0/2RS_F.4{accumulate X 3 0, consume YP.0 2 0}
  2F0/2F.4{read X 2 0, accumulate S 2 0, read P 2, write YP.1 2 0}
  2RS_F0/2RS_F.4{accumulate X 3 0, consume YP.1 2 0}
  2F0/2F.4{read X 2 0, accumulate S 2 0, read P 2, write YP.2 2 0}
  2RS_F0/2RS_F.4{accumulate X 3 0, consume YP.2 2 0}
  2F0/2F.4{consume X 2 0, accumulate S 2 0, read P 2, write YP.3 2 0}
  2RS_F0/2RS_F.own{accumulate X 3 0, consume YP.3 2 0} 3F0 3B0
  2AG_B0/2AG_B.own{read DY 2 0, write DYG.0 2 0}
  2B0/2B.4{read S 2 0, accumulate DY 1 0, read P 2, accumulate G 2, consume DYG.0 2 0}
  2AG_B0/2AG_B.4{read DY 2 0, write DYG.1 2 0}
  2B0/2B.4{read S 2 0, accumulate DY 1 0, read P 2, accumulate G 2, consume DYG.1 2 0}
  2AG_B0/2AG_B.4{read DY 2 0, write DYG.2 2 0}
  2B0/2B.4{read S 2 0, accumulate DY 1 0, read P 2, accumulate G 2, consume DYG.2 2 0}
  2AG_B0/2AG_B.4{consume DY 2 0, write DYG.3 2 0}
  2B0/2B.4{consume S 2 0, accumulate DY 1 0, read P 2, accumulate G 2, consume DYG.3 2 0}
  1B0/1B.4{read S 1 0, read DY 1 0, read P 1, accumulate G 1, write DXP.0 1 0}
  1RS_B0/1RS_B.4{accumulate DY 0 0, consume DXP.0 1 0}
  1B0/1B.4{read S 1 0, read DY 1 0, read P 1, accumulate G 1, write DXP.1 1 0}
  1RS_B0/1RS_B.4{accumulate DY 0 0, consume DXP.1 1 0}
  1B0/1B.4{read S 1 0, read DY 1 0, read P 1, accumulate G 1, write DXP.2 1 0}
  1RS_B0/1RS_B.4{accumulate DY 0 0, consume DXP.2 1 0}
  1B0/1B.4{consume S 1 0, consume DY 1 0, read P 1, accumulate G 1, write DXP.3 1 0}
  1RS_B0/1RS_B.own{accumulate DY 0 0, consume DXP.3 1 0} 0B0 0OPT 1OPT 2OPT 3OPT
"""

RANKS = 4
ACTIVATION = 8.0
SENT = {"AR_F": 2, "AR_B": 2, "AG_F": 1, "RS_F": 1, "AG_B": 1, "RS_B": 1}
"""How often (n - 1)/n of the buffer is sent by each rank."""


def regions(sequence_parallel: bool) -> Program:
    return tensor_parallel_regions(parse_program(PARTS), begin=(1,), end=(2,), sequence_parallel=sequence_parallel)


def sent(program: Program) -> float:
    """What a rank sends: whole collectives (n - 1)/n of the gathered or partial buffer, parts their own size if they
    travel."""
    table, total = effect_table(program), 0.0
    for row in range(program.num_rows):
        kind = program.kinds[program.kind[row]].name
        whole = {ref.buffer for _, ref in row_effects(program, table, row)} & {"XG", "YP", "DYG", "DXP"}
        name = program.keys[program.key[row]].name
        if kind in SENT and whole:
            total += SENT[kind] * ACTIVATION * (RANKS - 1) / RANKS
        elif kind in SENT and not name.endswith(".own"):
            total += ACTIVATION / RANKS
    return total


def same_bytes() -> None:
    actual = [sent(parse_program(text)) for text in (ALL_REDUCE, SEQUENCE_PARALLEL, SPLIT)]
    assert actual == [2 * 2 * ACTIVATION * 3 / 4] * 3


def same_bytes_in_a_layer() -> None:
    graph = llama(llama3_1_8b())
    sizes = {"batch": 1, "seq": 4096}
    residual = 4096 * 4096 * 2
    for sequence_parallel in (False, True):
        layout = Layout(sequence_parallel=sequence_parallel)
        forward = shard_graph(graph, layout, Mesh(tp=RANKS), sizes, BF16)["layers"].forward
        assert {c.kind for c in forward} == ({"all_gather", "reduce_scatter"} if sequence_parallel else {"all_reduce"})
        assert sum(c.sent_bytes for c in forward) == 2 * (2 * residual * 3 // 4)


def inside_rows_are_marked() -> None:
    program = tensor_parallel_regions(parse_program(PARTS), begin=(1,), end=(2,), inside=True)
    marked = [program.token(row) for row, override in program.overrides.items() if override.inside]
    assert sorted(marked) == ["1AG_F0", "1RS_B0", "2AG_B0", "2RS_F0"]


COMPUTE = {"0F": 1, "1F": 4, "2F": 4, "3F": 1, "0B": 1, "1B": 8, "2B": 8, "3B": 2, "OPT": 0}
COMPUTE_PARTS = {"0F": 1, "1F.4": 1, "2F.4": 1, "3F": 1, "0B": 1, "1B.4": 2, "2B.4": 2, "3B": 2, "OPT": 0}
OWN = {"1AG_F.own": 0, "2RS_F.own": 0, "2AG_B.own": 0, "1RS_B.own": 0}


def hops(seconds: float) -> dict[str, float]:
    return {**COMPUTE_PARTS, **OWN, "1AG_F.4": seconds, "2RS_F.4": seconds, "2AG_B.4": seconds, "1RS_B.4": seconds}


ACTIVATIONS = {"S": 1, "1S": 4, "X": 1, "Y": 1, "DX": 1, "DY": 1, "P": 0, "G": 0}
DIVIDED = {**ACTIVATIONS, "XG": 4, "YP": 4, "DYG": 4, "DXP": 4}
BORDERS_WHOLE = {**DIVIDED, **{name: 4 for name in ("0S", "3S", "0Y", "1X", "2Y", "3X", "3DX", "2DY", "1DX", "0DY")}}

WHOLE = Case(
    name="sequence_parallel",
    program=SEQUENCE_PARALLEL,
    lowered=lambda: regions(True),
    busy={**COMPUTE, "AG_F": 3, "RS_F": 3, "AG_B": 3, "RS_B": 3},
    sizes=DIVIDED,
    expected=Expected(
        issue_peaks={0: Peak(size=11, action="2F0")},
        time_peaks={0: Peak(size=11, action="2F0", moment=8)},
        makespan=41,
        period=41,
        exposed={0: 12},
        idle={0: 12},
        ends={"0:1AG_F0": 4, "0:2RS_F0": 15, "0:2AG_B0": 21, "0:1RS_B0": 40},
    ),
    also=(same_bytes, same_bytes_in_a_layer, inside_rows_are_marked),
)

HIDDEN = Case(
    name="async_tensor_parallel",
    program=SPLIT,
    lowered=lambda: async_tensor_parallel(regions(True), parts=RANKS),
    busy=hops(1),
    expected=Expected(
        makespan=29,
        period=29,
        exposed={0: 0},
        idle={0: 0},
        ends={"0:1F0": 5, "0:2F0": 9, "0:2RS_F0": 9, "0:2B0": 20, "0:1B0": 28, "0:1RS_B0": 28},
    ),
)

CASES = (
    WHOLE,
    replace(
        WHOLE,
        name="tensor_parallel_all_reduce",
        program=ALL_REDUCE,
        lowered=lambda: regions(False),
        busy={**COMPUTE, "AR_F": 6, "AR_B": 6},
        sizes=BORDERS_WHOLE,
        expected=Expected(
            makespan=41,
            period=41,
            exposed={0: 12},
            idle={0: 12},
            ends={"0:2AR_F0": 15, "0:1AR_B0": 40},
            issue_peaks={0: Peak(size=17, action="2AR_F0")},
            time_peaks={0: Peak(size=17, action="2AR_F0", moment=9)},
        ),
        also=(),
    ),
    HIDDEN,
    replace(
        HIDDEN,
        name="async_tensor_parallel_slow_hops",
        busy=hops(1.5),
        expected=Expected(
            makespan=32, period=32, exposed={0: 3}, idle={0: 3}, ends={"0:1F0": 6.5, "0:2F0": 10.5, "0:2RS_F0": 12}
        ),
    ),
    replace(
        WHOLE,
        name="sequence_parallel_slow_hops",
        busy={**COMPUTE, "AG_F": 4.5, "RS_F": 4.5, "AG_B": 4.5, "RS_B": 4.5},
        expected=Expected(makespan=47, period=47, exposed={0: 18}, idle={0: 18}),
        also=(),
    ),
)
