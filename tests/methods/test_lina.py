"""Lina by hand and on random layers: no all-to-all waits for more than one operation, and everything is sent once.

By hand: two layers, the backward of one microbatch, forwards and updates free. A layer's gate takes .5 (the backward of
its join), an exchange 2, experts 4, the dense backward 2, its all-reduce 2.

    in the order in which they are ready     gate -.5  A2A -2.5  experts -6.5  A2A -8.5  B1 -10.5 | gate -11; AR1
                                             10.5-12.5 holds up the A2A of layer 0: 12.5-14.5  experts -18.5  A2A -20.5
                                             B0 -22.5  AR0 -24.5

Exchanges, experts and all-reduces in two operations each: the first rows are at the experts while the others travel.
Layer 1: A2A .5-1.5, 1.5-2.5, experts 1.5-3.5, 3.5-5.5, A2A 3.5-4.5, 5.5-6.5, B1 6.5-8.5. Then

    in order    AR1 8.5-10.5, A2A -11.5, -12.5, experts 11.5-15.5, A2A 13.5-14.5, 15.5-16.5, B0 -18.5, AR0 -20.5
    first       the network is idle for .5 after B1, too short for a part of AR1: gate -9, A2A 9-10, 10-11, experts
                10-14, AR1 11-12, A2A 12-13, AR1 13-14, A2A 14-15, B0 -17, AR0 -19

24.5, 20.5, 19. Source: Li et al. 2023 (Lina), sections 4 and 5; times made up.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.errors import PlanError
from gnomon.hardware import parse_cluster
from gnomon.lowering.edit import rows_of
from gnomon.lowering.exchanges import COMPUTES, with_exchanges
from gnomon.methods.lina import NETWORK, all_to_all_first, lina, micro_operations
from gnomon.models.mixtral import MixtralConfig, mixtral
from gnomon.plans import Mesh, Overlap, Pass, Plan, Schedule, Workload
from gnomon.plans.expert_rows import PARTS
from gnomon.prediction import Prediction, predict
from gnomon.program import Program, ProgramBuilder, Structure, buffer_moves, validate
from gnomon.simulate import Clock, Durations, Times, play

TIMES = st.integers(1, 12).map(lambda twelfths: 12.0 * twelfths)
HAND = {"COMBINE_B": 2, "DISPATCH_B": 2, "experts": 4, "join": 0.5, "route": 2, "AR": 2}


def backward(layers: int) -> Program:
    """One step of a model of expert layers on ranks that all do the same."""
    builder = ProgramBuilder(num_stages=layers * len(PARTS) + 1, units=1)
    cls, stages = builder.rank_class(4), range(layers * len(PARTS) + 1)  # the last one is the loss
    for stage in stages:
        builder.add(cls, "F", stage, 0)
    for stage in reversed(stages):
        builder.add(cls, "B", stage, 0)
        if stage in stages[:-1] and PARTS[stage % len(PARTS)] == "route":
            builder.add(cls, "AR", stage)
    for stage in stages:
        builder.add(cls, "OPT", stage)
    return with_exchanges(builder.build(), {stage: PARTS[stage % len(PARTS)] for stage in stages[:-1]})


def seconds_of(program: Program, whole: dict[str, float]) -> Durations:
    """A part takes its share of the whole; what is not named, and forwards, take nothing."""
    last = program.num_stages - 1
    busy = []
    for key in program.keys:
        part = PARTS[key.stage % len(PARTS)] if key.kind == "B" and key.stage < last else key.kind
        busy.append(whole.get(part, 0.0) / int(key.name.rpartition(".")[2] or 1))
    return Durations(busy=np.array(busy))


def played(program: Program, whole: dict[str, float]) -> Times:
    structure = validate(program)
    return play(Clock.of(structure, seconds_of(program, whole)))


def count(program: Program) -> Counter[str]:
    return Counter(row.kind for rows in rows_of(program) for row in rows)


def test_two_layers_by_hand() -> None:
    def timed(structure: Structure) -> Times:
        return play(Clock.of(structure, seconds_of(structure.program, HAND)))

    step = backward(2)
    parts = micro_operations(step, all_to_all=2, all_reduce=2)
    first = all_to_all_first(parts, timed)
    made = (micro_operations(step, all_to_all=1, all_reduce=1), parts, first)
    assert [float(played(program, HAND).end.max()) for program in made] == [24.5, 20.5, 19.0]
    chosen = lina(step, timed, all_to_all=2, all_reduce=2)
    assert float(played(chosen, HAND).end.max()) == 19.0


def test_each_operation_moves_its_part_and_nothing_is_left() -> None:
    """What comes of rows on their way goes again, and adds up to the whole."""
    program = micro_operations(backward(2), all_to_all=4, all_reduce=3)
    counted = count(program)
    assert all(counted[kind] == 2 * 4 for kind in COMPUTES) and counted["AR"] == 2 * 3
    structure = validate(program)
    sizes = {buffer.name: 0.0 for buffer in program.buffers} | {
        f"{name}.{i}": 1 / 4 for name in ("SENT", "MADE") for i in range(4)
    }
    moves = buffer_moves(program, structure.deps, sizes)
    assert float(moves.bytes[moves.bytes > 0].sum()) == 2 * 2 and float(moves.bytes.sum()) == 0


@settings(max_examples=25)
@given(
    layers=st.integers(1, 3), parts=st.integers(1, 3), reduce_parts=st.integers(1, 4), seconds=st.tuples(*[TIMES] * 6)
)
def test_an_all_to_all_waits_for_no_all_reduce(
    layers: int, parts: int, reduce_parts: int, seconds: tuple[float, ...]
) -> None:
    whole = dict(zip(HAND, seconds, strict=True))
    step = micro_operations(backward(layers), all_to_all=parts, all_reduce=reduce_parts)

    def timed(structure: Structure) -> Times:
        return play(Clock.of(structure, seconds_of(structure.program, whole)))

    for overrun in (False, True):
        program = all_to_all_first(step, timed, overrun=overrun)
        assert count(program) == count(step)
        structure = validate(program)
        last = next(i for i in reversed(range(program.num_rows)) if program.kinds[program.kind[i]].name == "B")
        at = structure.order.position[last]
        alone = played(program, {**whole, "AR": 0.0}).end[at]
        late = played(program, whole).end[at] - alone
        # of two exchanges of a layer each can be held up once, by one operation, where one may overrun
        assert late == 0 if not overrun else late <= whole["AR"] / reduce_parts * 2 * layers * parts


GRAPH = mixtral(
    MixtralConfig(
        name="sixteen", num_layers=12, hidden_size=2048, num_heads=16, num_kv_heads=16, head_dim=128, vocab_size=50304,
        num_experts=64, experts_per_token=2, expert_ffn_size=4096,
    )
)  # fmt: skip
"""On the paper's sixteen A100, four experts a device."""
CLUSTER = parse_cluster("4x4xa100-sxm-40gb")


def predicted(*params: tuple[str, int | str]) -> Prediction:
    plan = Plan(
        mesh=Mesh(dp_shard=16, ep=16),
        schedule=Schedule(num_microbatches=1, passes=(Pass(name="lina", params=params),)),
        overlap=Overlap(experts=True),
    )
    return predict(GRAPH, CLUSTER, plan, Workload(global_batch_size=128, seq_len=512))


def test_where_both_compete_a_step_takes_three_quarters_of_that_in_order() -> None:
    in_order = predicted(("all_to_all", 1), ("all_reduce", 1), ("first", "issue"))
    first = predicted(("all_to_all", 4), ("all_reduce", 4))
    assert in_order.breakdown["dp communication"] > 0.1 * in_order.step_s
    assert first.step_s <= 0.75 * in_order.step_s
    spans = first.timeline().spans
    network = spans.stream == first.structure.program.streams.index(NETWORK)
    begins, ends = np.sort(spans.start_s[network]), np.sort(spans.end_s[network])
    assert (begins[1:] >= ends[:-1]).all(), "the network does one thing at a time"
    assert sum(first.breakdown.values()) == first.step_s


def test_more_parts_than_experts_are_refused() -> None:
    with pytest.raises(PlanError, match="all_to_all = 5 parts .* a rank has 4 of the 64 of layers"):
        predicted(("all_to_all", 5))
    with pytest.raises(PlanError, match="at least 1 each"):
        predicted(("all_to_all", 0))
