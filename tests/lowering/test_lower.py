"""From graph and plan to Program: stages on ranks, units, what ends the step, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gnomon.errors import PlanError
from gnomon.lowering import lower
from gnomon.models.gpt import GptConfig, gpt
from gnomon.plans import Mesh, Offload, Optimizer, Overlap, Pass, Plan, Schedule, Stage, Workload
from gnomon.program import Program, print_program, validate
from gnomon.simulate import durations, period, simulate

CONFIG = GptConfig(
    name="eight", num_layers=8, hidden_size=64, num_heads=4, vocab_size=256, max_positions=32, tied=False
)
GRAPH = gpt(CONFIG)
TIED = gpt(replace(CONFIG, tied=True))
NO_CLIP = Optimizer(clip=False)
NAMES: tuple[tuple[str, int, str], ...] = (
    ("gpipe", 1, "loop"),
    ("one_f_one_b", 1, "loop"),
    ("interleaved_one_f_one_b", 2, "loop"),
    ("looped_bfs", 2, "loop"),
    ("zero_bubble_h1", 1, "loop"),
    ("zero_bubble_h2", 1, "loop"),
    ("interleaved_zero_bubble", 2, "loop"),
    ("zero_bubble_v", 2, "v"),
    ("v_half", 2, "v"),
    ("v_min", 2, "v"),
    ("dualpipe_v", 2, "v"),
)


def plan(name: str = "one_f_one_b", virtual: int = 1, placement: str = "loop", **fields: object) -> Plan:
    mesh = fields.pop("mesh", Mesh(pp=4))
    schedule = Schedule(
        name=name, virtual_stages=virtual, placement="v" if placement == "v" else "loop", num_microbatches=8
    )
    return Plan(mesh=mesh, schedule=schedule, **{"optimizer": NO_CLIP, **fields})  # type: ignore[arg-type]


def lines(program: Program) -> dict[int, str]:
    """Rows of each class on one line."""
    text = print_program(program).split("class ")[1:]
    return {int(part.split()[0]): " ".join(part.split("\n", 1)[1].split()) for part in text}


@pytest.mark.parametrize(("name", "virtual", "placement"), NAMES, ids=[name for name, _, _ in NAMES])
def test_every_schedule_lowers_and_runs_with_data_parallel_ranks_and_tied_weights(
    name: str, virtual: int, placement: str
) -> None:
    program = lower(TIED, plan(name, virtual, placement, mesh=Mesh(pp=4, dp_replicate=2, tp=2)))
    structure = validate(program)
    assert program.counts == (4,) * 4
    assert program.num_stages == 4 * virtual
    kinds = [program.kinds[kind].name for kind in program.kind.tolist()]
    tied = 0 if placement == "v" else 2  # in a V the first and the last stage are on one rank
    assert kinds.count("AR") == program.num_stages + tied
    assert kinds.count("OPT") == program.num_stages
    assert simulate(structure, durations(program, {"*": 1.0})).makespan_s > 0


def test_what_ends_the_step_of_one_rank() -> None:
    """Reduction right after the last backward and its message; tied weights, norm and update after all else."""
    program = lower(TIED, plan(mesh=Mesh(pp=2, dp_shard=2), optimizer=Optimizer()))
    assert lines(program)[1].endswith("1B7 1SEND_B7 1AR 1AR/embedding:embedding#0 1NORM#1{read G 1} 1OPT")


def test_reductions_may_wait_for_the_end() -> None:
    early = lower(GRAPH, plan("interleaved_one_f_one_b", 2, mesh=Mesh(pp=2, dp_shard=2)))
    late = lower(
        GRAPH, plan("interleaved_one_f_one_b", 2, mesh=Mesh(pp=2, dp_shard=2), overlap=Overlap(grad_reduce=False))
    )
    assert lines(early)[0].endswith("2B7 2SEND_B7 2AR 0RECV_B6 0B6 0RECV_B7 0B7 0AR 0OPT 2OPT")
    assert lines(late)[0].endswith("2AR 0AR 0OPT 2OPT")


def test_the_norm_makes_every_rank_wait() -> None:
    """ZB-V has no bubble between steps; with a global norm before the update it has: 6m + p - 1 instead of 6m."""
    free = lower(GRAPH, plan("zero_bubble_v", 2, "v"))
    clipped = lower(GRAPH, plan("zero_bubble_v", 2, "v", optimizer=Optimizer()))
    busy = {"F": 1.0, "I": 1.0, "W": 1.0, "*": 0.0}
    seconds = [period(validate(p), durations(p, busy)).seconds for p in (free, clipped)]
    assert seconds == [48.0, 51.0]


def test_units_hold_the_sequences_of_a_microbatch() -> None:
    """Batch 16 in microbatches of 2 on each of 2 data ranks: four units of four sequences."""
    given = plan(mesh=Mesh(pp=2, dp_shard=2))
    given = replace(given, schedule=Schedule(micro_batch_size=2))
    program = lower(GRAPH, given, workload=Workload(global_batch_size=16, seq_len=32))
    assert [len(unit.pieces) for unit in program.units] == [4] * 4
    assert [unit.weight for unit in program.units] == [0.25] * 4
    assert {key.shape for key in program.keys} == {""}


def test_unequal_sequences_give_units_their_own_prices() -> None:
    given = replace(plan(mesh=Mesh(pp=2)), schedule=Schedule(micro_batch_size=1))
    program = lower(GRAPH, given, workload=Workload(lengths=(32, 16)))
    assert {key.label for key in program.keys if key.kind == "F"} == {"0F~32", "0F~16", "1F~32", "1F~16"}
    assert [unit.weight for unit in program.units] == [2 / 3, 1 / 3]


def test_stages_of_a_plan_written_out_are_classes_of_their_own_size() -> None:
    stages = (Stage(calls=("embed", "layers[0:6]"), mesh=Mesh(dp_replicate=3)), Stage(calls=("layers[6:8]", "head")))
    program = lower(GRAPH, Plan(stages=stages, schedule=Schedule(num_microbatches=2), optimizer=NO_CLIP))
    assert program.counts == (3, 1)
    assert [key.label for key in program.keys if key.kind == "AR"] == ["0AR"]


def test_full_sharding_takes_stages_apart_into_layers() -> None:
    """Four stages of two layers, the first with the embedding and the last with the head: ten blocks."""
    program = lower(TIED, plan(mesh=Mesh(pp=4, dp_shard=2), optimizer=Optimizer(zero=3)))
    validate(program)
    assert program.num_stages == 10
    assert lines(program)[0].startswith("0UNSHARD 1UNSHARD 0F0 0RESHARD 2UNSHARD 1F0")
    names = [key.label for key in program.keys]
    assert names.count("embedding") == 2
    assert {"0REDUCE_GRAD", "9REDUCE_GRAD", "9OPT"} <= set(names)


@pytest.mark.parametrize("zero", [1, 2])
def test_divided_states(zero: int) -> None:
    program = lower(TIED, plan(mesh=Mesh(pp=4, dp_shard=2), optimizer=Optimizer(zero=1 if zero == 1 else 2)))
    validate(program)
    kinds = [program.kinds[kind].name for kind in program.kind.tolist()]
    assert kinds.count("REDUCE_GRAD") == (4 if zero == 1 else 4 * 8)
    assert kinds.count("AR") == 2  # the tied weights
    assert kinds.count("NORM") == 4


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_hybrid_sharding_reduces_over_the_replicas_too(zero: int) -> None:
    chosen = Optimizer(zero=1 if zero == 1 else 2 if zero == 2 else 3)
    program = lower(TIED, plan(mesh=Mesh(pp=2, dp_replicate=2, dp_shard=2), optimizer=chosen))
    validate(program)
    stages = program.num_stages  # blocks under ZeRO 3: eight layers, embedding, head
    assert stages == (10 if zero == 3 else 2)
    assert [program.kinds[kind].name for kind in program.kind.tolist()].count(
        "AR"
    ) == stages + 2  # and the tied weights


def test_stages_divided_differently_are_refused() -> None:
    stages = (
        Stage(calls=("embed", "layers[0:6]"), mesh=Mesh(dp_shard=2)),
        Stage(calls=("layers[6:8]", "head"), mesh=Mesh(dp_replicate=2)),
    )
    given = Plan(stages=stages, schedule=Schedule(num_microbatches=2), optimizer=Optimizer(zero=1))
    with pytest.raises(PlanError, match="ZeRO stage 1 divides over dp_shard x cp, which is 1 in stage 1 and more"):
        lower(GRAPH, given)


def test_divided_over_one_rank_is_not_divided() -> None:
    assert lower(GRAPH, plan(optimizer=Optimizer(zero=3, clip=False))) == lower(GRAPH, plan())


def test_a_host_update_a_step_late() -> None:
    program = lower(GRAPH, plan(optimizer=Optimizer(clip=False, offload=Offload(), delay=1)))
    validate(program)
    assert lines(program)[0].startswith("2HOST_OPT 1HOST_OPT 0HOST_OPT 0F0")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (replace(plan(), schedule=Schedule()), "give a workload or num_microbatches"),
        (plan("interleaved_one_f_one_b", 2, mesh=Mesh(pp=3)), "a multiple of 3 microbatches"),
        (plan("dualpipe_v", 2, "loop"), "needs virtual_stages = 2 and placement = 'v'"),
        (plan("one_f_one_b", 2), "takes one stage on each rank, but has 2"),
        (
            replace(plan(), schedule=Schedule(num_microbatches=8, passes=(Pass(name="dapple_warmup"),))),
            "takes policy = 'p' or '2p', not {}",
        ),
        (
            replace(
                plan("gpipe"), schedule=Schedule(name="gpipe", num_microbatches=8, passes=(Pass(name="dapple_warmup"),))
            ),
            "pass dapple_warmup changes one_f_one_b, but the schedule is gpipe",
        ),
        (replace(plan(), placement=(0, 1, 2, 1)), "puts ranks 1 and 3 on device 1, where they would take turns"),
        (plan(overlap=Overlap(priority=("all_to_all",))), r"overlap.priority = \['all_to_all'\], but .* ready"),
    ],
)
def test_what_is_refused(given: Plan, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        lower(GRAPH, given)
