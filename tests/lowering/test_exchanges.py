"""Exchanges of experts as rows: where they are, what they read, and a backward beside the forward after it."""

from __future__ import annotations

import pytest

from gnomon.lowering.edit import rows_of
from gnomon.lowering.exchanges import BACKWARD, COMPUTES, FORWARD
from gnomon.lowering.lower import lower
from gnomon.models.presets import model
from gnomon.models.tiny import tiny
from gnomon.plans import Mesh, Optimizer, Overlap, Plan, Schedule
from gnomon.program import Program, validate

GRAPH = tiny(model("mixtral-8x7b"), tp=1, ep=2, layers=4)


def lowered(name: str, *, pp: int = 1, virtual: int = 1, zero: int = 0, units: int = 4) -> Program:
    placement = "v" if name in ("dualpipe_v", "zero_bubble_v") else "loop"
    plan = Plan(
        mesh=Mesh(pp=pp, dp_shard=2, ep=2),
        schedule=Schedule(name=name, virtual_stages=virtual, num_microbatches=units, placement=placement),  # type: ignore[arg-type]
        optimizer=Optimizer(zero=zero),  # type: ignore[arg-type]
        overlap=Overlap(experts=True),
    )
    return lower(GRAPH, plan)


@pytest.mark.parametrize(
    "name, pp, virtual",
    [
        ("gpipe", 1, 1),
        ("one_f_one_b", 1, 1),
        ("one_f_one_b", 2, 1),
        ("interleaved_one_f_one_b", 2, 2),
        ("zero_bubble_h1", 2, 1),
        ("zero_bubble_v", 2, 2),
        ("dualpipe_v", 2, 2),
    ],
)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_each_microbatch_goes_to_its_experts_and_back_once(name: str, pp: int, virtual: int, zero: int) -> None:
    if zero == 3 and name == "dualpipe_v":
        pytest.skip("its forwards and backwards are one action, which ZeRO 3 refuses")
    program = lowered(name, pp=pp, virtual=virtual, zero=zero)
    validate(program)
    rows = [row for listed in rows_of(program) for row in listed]
    for kind in (*FORWARD.values(), *BACKWARD.values()):
        places = [row.place for row in rows if row.kind == kind]
        assert len(places) == len(set(places)) == 4 * 4, kind
    exchanges = {row.stage for row in rows if row.kind in COMPUTES}
    other = {row.kind for row in rows if row.stage in exchanges} - set(COMPUTES)
    assert other <= {"SEND_F", "RECV_F", "SEND_B", "RECV_B"}, "an exchange has no weights"


def test_a_backward_and_the_next_forward_take_turns_where_tokens_travel() -> None:
    """Megatron Core's order: combine back beside attention, experts back beside dispatch, and so on."""
    (listed,) = rows_of(lowered("one_f_one_b", units=2))
    order = [(row.kind, row.stage) for row in listed if row.kind in ("F", "B", *COMPUTES) and row.unit >= 0]
    together = order[18:]  # after the forward of the first microbatch, 1 + 4 x 4 + 1 stages
    assert together[:12] == [
        ("B", 17),  # the head, then the last layer from its end
        ("COMBINE_B", 16),
        ("F", 0),
        ("F", 1),
        ("DISPATCH", 2),
        ("B", 15),
        ("DISPATCH_B", 14),
        ("F", 3),
        ("COMBINE", 4),
        ("B", 13),
        ("COMBINE_B", 12),
        ("F", 5),
    ]


def test_under_1f1b_ranks_are_as_far_ahead_as_pairs_ask_for() -> None:
    """Two microbatches a rank: with one, each pair would wait for the whole pair of the next rank."""
    first, last = rows_of(lowered("one_f_one_b", pp=2, units=6))
    ahead = [next(i for i, row in enumerate(rows) if row.kind in ("B", "COMBINE_B")) for rows in (first, last)]
    forwards = [
        {row.unit for row in rows[:at] if row.kind == "F"} for rows, at in zip((first, last), ahead, strict=True)
    ]
    assert [len(units) for units in forwards] == [3, 1]
