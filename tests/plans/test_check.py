"""Problems of plans that cannot run, each with its name and fix, and the notes on those that can.

Models are real presets, so that the dims are those that people meet: Llama 3.1 8B has 32 heads, 8 key-value heads, 32
layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.errors import PlanError
from gnomon.models.gpt import gpt, gpt2
from gnomon.models.llama import llama, llama3_1_8b, qwen2_5_7b
from gnomon.models.mixtral import mixtral, mixtral_8x7b
from gnomon.plans import (
    Fp8,
    Layout,
    LayoutRule,
    Mesh,
    Optimizer,
    Overlap,
    Plan,
    Precision,
    RouterLoad,
    Saved,
    SavedRule,
    Schedule,
    Split,
    Stage,
    Workload,
    batch,
    check,
    problems,
)

LLAMA = llama(llama3_1_8b())
MIXTRAL = mixtral(mixtral_8x7b())
BATCH_64 = Workload(global_batch_size=64, seq_len=4096)


@dataclass(frozen=True)
class Devices:
    """A cluster as far as `check` looks at it."""

    num_devices: int
    name: str = "example"


def plan(name: str = "one_f_one_b", *, m: int | None = None, mbs: int | None = None, v: int = 1, **axes: int) -> Plan:
    placement = "v" if v > 1 and name in ("zero_bubble_v", "v_half", "v_min", "dualpipe_v") else "loop"
    schedule = Schedule(  # type: ignore[arg-type]
        name=name, num_microbatches=m, micro_batch_size=mbs, virtual_stages=v, placement=placement
    )
    return Plan(mesh=Mesh(**axes), schedule=schedule)


def errors(
    a_plan: Plan, graph: object = LLAMA, cluster: Devices | None = None, workload: Workload | None = None
) -> dict[str, str]:
    result = problems(a_plan, graph, cluster, workload)  # type: ignore[arg-type]
    return {problem.name: problem.message for problem in result if problem.severity == "error"}


def notes(a_plan: Plan, graph: object = LLAMA, workload: Workload | None = None) -> dict[str, str]:
    result = problems(a_plan, graph, None, workload)  # type: ignore[arg-type]
    return {problem.name: problem.message for problem in result if problem.severity == "note"}


def test_a_sound_plan_has_no_problems() -> None:
    sound = plan(m=8, pp=4, dp_shard=4, tp=2)
    assert check(sound, LLAMA, Devices(32), BATCH_64) == ()


def test_check_raises_every_error_at_once() -> None:
    with pytest.raises(PlanError, match=r"'example' has 32.*tp = 3 does not divide heads = 32"):
        check(plan(mbs=1, tp=3), LLAMA, Devices(32))


@pytest.mark.parametrize(("devices", "fix"), [(32, "lower an axis"), (128, "raise dp_shard")])
def test_world_size(devices: int, fix: str) -> None:
    message = errors(plan(mbs=1, pp=4, dp_shard=8, tp=2), cluster=Devices(devices))["world_size"]
    assert message.startswith(f"plan needs 64 devices (pp=4 x dp_shard=8 x tp=2), but cluster 'example' has {devices}")
    assert fix in message


def test_logical_workers_may_leave_devices_unused_but_not_exceed_them() -> None:
    workers = replace(plan(mbs=1, dp_replicate=4), placement=(0, 0, 1, 1))
    assert "world_size" not in errors(workers, cluster=Devices(4))
    assert "world_size" in errors(workers, cluster=Devices(1))


@pytest.mark.parametrize(
    ("graph", "axes", "name", "fix"),
    [
        (LLAMA, {"tp": 6}, "heads_not_divisible", "nearest legal tp is 4"),
        (LLAMA, {"tp": 3}, "kv_heads_not_divisible", "nearest legal tp is 2"),
        (
            llama(qwen2_5_7b()),
            {"tp": 8},
            "heads_not_divisible",
            "tp = 8 does not divide heads = 28; the nearest legal tp is 7",
        ),
        (MIXTRAL, {"dp_shard": 16, "ep": 16}, "experts_not_divisible", "nearest legal ep is 8"),
        (LLAMA, {"dp_shard": 2, "ep": 2}, "no_experts", "use ep = 1"),
        (MIXTRAL, {"tp": 2}, "experts_need_sequence_parallel", "layout.sequence_parallel = true"),
    ],
)
def test_dims_that_axes_do_not_divide(graph: object, axes: dict[str, int], name: str, fix: str) -> None:
    assert fix in errors(plan(mbs=1, **axes), graph)[name]


def test_fewer_key_value_heads_than_tp_are_copied_and_said_so() -> None:
    sixteen = plan(mbs=1, tp=16)
    assert errors(sixteen) == {}
    assert "each key-value head is held by 2 ranks" in notes(sixteen)["kv_heads_replicated"]
    assert "kv_heads_replicated" not in notes(plan(mbs=1, tp=8))


def test_padded_vocabulary_is_said() -> None:
    assert "it is padded to 50260" in notes(plan(mbs=1, tp=4), gpt(gpt2()))["vocab_padded"]  # 50257 rows


def test_ulysses_divides_heads_over_tp_and_cp() -> None:
    ulysses = replace(plan(mbs=1, tp=8, cp=8), layout=Layout(context="ulysses"))
    assert "tp x cp = 64 does not divide heads = 32" in errors(ulysses)["heads_not_divisible"]
    assert "or context = 'ring' or 'all_gather'" in errors(ulysses)["heads_not_divisible"]
    for other in ("ring", "all_gather"):
        assert "heads_not_divisible" not in errors(replace(ulysses, layout=Layout(context=other)))


def test_key_value_heads_limit_ulysses_by_what_they_divide() -> None:
    """Llama 3.1 8B has 32 heads and 8 key-value heads: up to 8 ranks divide them, multiples of 8 hold copies, others
    cannot."""
    by = {cp: replace(plan(mbs=1, cp=cp), layout=Layout(context="ulysses")) for cp in (4, 8, 16, 32)}
    for cp in (4, 8):
        assert errors(by[cp]) == {} and "kv_heads_replicated" not in notes(by[cp])
    for cp in (16, 32):
        assert f"each key-value head is held by {cp // 8} ranks" in notes(by[cp])["kv_heads_replicated"]
    narrow = llama(replace(qwen2_5_7b(), num_heads=24, num_kv_heads=4, hidden_size=24 * 128, name="narrow"))
    six = replace(plan(mbs=1, cp=6), layout=Layout(context="ulysses"))
    assert "tp x cp = 6 does not divide kv_heads = 4" in errors(six, narrow)["kv_heads_not_divisible"]
    ring = replace(six, layout=Layout(context="ring"))
    assert errors(ring, narrow) == {}


def test_ring_and_gather_are_limited_by_the_sequence_alone() -> None:
    """A zig-zag needs 2 x cp pieces; Ulysses, which has whole sequences in attention, only cp."""
    odd = Workload(global_batch_size=8, seq_len=4 * 1031)
    for context in ("ring", "all_gather"):
        four = replace(plan(mbs=1, cp=4), layout=Layout(context=context))
        assert "2 x cp = 8" in errors(four, workload=odd)["sequence_not_divisible"]
        plain = replace(four, layout=replace(four.layout, context_order="contiguous"))
        assert "sequence_not_divisible" not in errors(plain, workload=odd)
    ulysses = replace(plan(mbs=1, cp=4), layout=Layout(context="ulysses"))
    assert "sequence_not_divisible" not in errors(ulysses, workload=odd)


def test_router_loads_that_cannot_be_and_what_others_do() -> None:
    def work(**load: object) -> Workload:
        return Workload(global_batch_size=8, seq_len=4096, router=RouterLoad(**load))  # type: ignore[arg-type]

    eight = plan(mbs=1, dp_shard=8, ep=8)
    assert (
        "3 counts, but the block has 8 experts"
        in (errors(eight, MIXTRAL, workload=work(kind="histogram", counts=(1.0, 2.0, 3.0)))["router_counts"])
    )
    steep = errors(eight, MIXTRAL, workload=work(kind="zipf", s=2.0))["router_share"]
    assert "65% of its (token, expert) pairs to one expert, but a token goes to 2" in steep
    message = notes(eight, MIXTRAL, workload=work(kind="zipf", s=1.0, capacity=1.25))["router_load"]
    assert (
        "the busiest of ep = 8 ranks computes and holds 1.25 times the mean rows" in message
        and "drops 23.9%" in message
    )
    assert "has no experts" in notes(plan(mbs=1), LLAMA, workload=work(kind="zipf", s=1.0))["no_effect"]
    assert "router_load" not in notes(eight, MIXTRAL, workload=work())


def test_sequence_divides_into_what_the_axes_need() -> None:
    odd = Workload(global_batch_size=8, seq_len=4100)
    zigzag = replace(plan(mbs=1, tp=4, cp=4), layout=Layout(sequence_parallel=True))
    message = errors(zigzag, workload=odd)["sequence_not_divisible"]
    assert message == (
        "seq_len = 4100 does not divide into 2 x cp = 8 x tp = 4 (sequence parallel) parts; the nearest "
        "legal length is 4096"
    )
    assert "sequence_not_divisible" not in errors(plan(mbs=1, tp=4), workload=odd)


def test_layers_belong_to_exactly_one_stage() -> None:
    def stages(*calls: tuple[str, ...]) -> Plan:
        return Plan(stages=tuple(Stage(calls=c) for c in calls), schedule=Schedule(num_microbatches=8))

    assert "layers_not_covered" not in errors(stages(("embed", "layers[0:16]"), ("layers[16:32]", "head")))
    assert (
        "leave out layers[16]"
        in errors(stages(("embed", "layers[0:16]"), ("layers[17:32]", "head")))["layers_not_covered"]
    )
    assert (
        "layers[15] more than once"
        in errors(stages(("embed", "layers[0:16]"), ("layers[15:32]", "head")))["layers_not_covered"]
    )
    assert "did you mean" in errors(stages(("embed", "layer"), ("head",)))["layers_not_covered"]
    assert "order the stages as the graph runs" in errors(stages(("layers", "head"), ("embed",)))["stage_order"]
    assert "need as many layers" in errors(plan(m=64, pp=64))["layers_not_covered"]


@pytest.mark.parametrize(
    ("a_plan", "name", "fix"),
    [
        (
            plan("interleaved_one_f_one_b", m=10, v=2, pp=4),
            "microbatches",
            "multiple of 4 microbatches (its pipeline ranks), not 10; the nearest is 8",
        ),
        (
            plan("interleaved_one_f_one_b", m=8, v=1, pp=4),
            "interleaved",
            "at least 2 pipeline ranks and 2 virtual stages",
        ),
        (
            plan("dualpipe_v", m=7, v=2, pp=4),
            "microbatches",
            "at least 2 x 4 = 8 microbatches (two for each pipeline rank), not 7",
        ),
        (plan("zero_bubble_v", m=8, v=1, pp=4), "v_placement", "needs virtual_stages = 2"),
        (plan("zero_bubble_v", m=8, v=4, pp=4), "v_placement", "needs virtual_stages = 2"),
        (plan("one_f_one_b", m=8, v=2, pp=4), "virtual_stages", "use an interleaved one"),
    ],
)
def test_rules_of_schedules(a_plan: Plan, name: str, fix: str) -> None:
    assert fix in errors(a_plan)[name]


@pytest.mark.parametrize("name", ["zero_bubble_v", "v_half", "dualpipe_v"])
def test_v_schedules_accept_what_they_need(name: str) -> None:
    assert errors(plan(name, m=8, v=2, pp=4)) == {}


def test_microbatches_that_follow_from_the_batch_obey_the_schedule_too() -> None:
    interleaved = plan("interleaved_one_f_one_b", mbs=1, v=2, pp=4, dp_shard=8)
    assert "microbatches" not in errors(interleaved, workload=BATCH_64)  # 64 / (1 x 8) = 8
    assert "microbatches" in errors(interleaved, workload=Workload(global_batch_size=48, seq_len=4096))  # 6
    assert "2 microbatches cannot fill 4" in notes(plan(m=2, pp=4))["few_microbatches"]


def test_patterns_that_match_nothing_are_not_lost() -> None:
    lost = {
        "precision.fp8": Plan(precision=Precision(fp8=Fp8(recipe="delayed", calls=("layer",)))),
        "saved rule 0": Plan(saved=Saved(rules=(SavedRule(calls="blocks"),))),
        "saved rule on 'mlpp.*'": Plan(saved=Saved(rules=(SavedRule(tensors=("mlpp.*",)),))),
        "split of 'moe.combine'": Plan(overlap=Overlap(splits=(Split(op="moe.combine", dim="seq", parts=2),))),
        "layout rule on dim 'head'": Plan(layout=Layout(rules=(LayoutRule(dim="head"),))),
    }
    for where, a_plan in lost.items():
        assert where in errors(replace(a_plan, schedule=Schedule(micro_batch_size=1)))["selector"]
    elsewhere = Layout(rules=(LayoutRule(dim="vocab", region="tail"),))
    assert "matches no block" in errors(Plan(layout=elsewhere))["selector"]
    crossing = Layout(rules=(LayoutRule(dim="hidden", axes=("tp",), region="layers"),))
    assert "use region = '*'" in errors(Plan(layout=crossing))["layout_region"]
    with pytest.raises(PlanError, match="names axis 'dp'"):
        LayoutRule(dim="hidden", axes=("dp",))
    kept = Plan(saved=Saved(rules=(SavedRule(calls="layers[0:3]", tensors=("mlp.*",)),)))
    assert "selector" not in errors(kept)


def test_axes_without_effect_are_said() -> None:
    idle = replace(plan(mbs=1), layout=Layout(sequence_parallel=True), optimizer=Optimizer(zero=1))
    actual = [problem.message for problem in problems(idle, LLAMA) if problem.name == "no_effect"]
    assert actual == [
        "sequence_parallel has no effect at tp = 1",
        "ZeRO 1 has no effect: dp_shard x cp = 1, so there is nothing to divide over",
    ]


def test_batch_divides_into_microbatches() -> None:
    assert batch(plan(mbs=2, dp_shard=4), BATCH_64) == (8, 8)
    assert batch(plan(m=4, dp_replicate=2, dp_shard=4), BATCH_64) == (4, 16)
    assert batch(plan(m=8, mbs=2, dp_shard=4), BATCH_64) == (8, 8)
    with pytest.raises(PlanError, match="not 5 microbatches of 12 sequences.*nearest legal global batch is 60"):
        batch(plan(m=5, dp_shard=4), BATCH_64)
    with pytest.raises(PlanError, match="have 2 sequences, which 4 data-parallel ranks cannot share"):
        batch(plan(m=32, dp_shard=4), BATCH_64)
    with pytest.raises(PlanError, match="neither micro_batch_size nor num_microbatches"):
        batch(plan(), BATCH_64)


def test_batch_of_unequal_stages() -> None:
    def uneven(shares: tuple[int, ...], **schedule: int) -> Plan:
        first = Stage(calls=("embed", "layers[0:24]"), mesh=Mesh(dp_shard=3), shares=shares)
        rest = Stage(calls=("layers[24:32]", "head"))
        return Plan(stages=(first, rest), schedule=Schedule(**schedule))

    six = Workload(global_batch_size=24, seq_len=128)
    assert batch(uneven((), num_microbatches=4), six) == (4, 6)
    assert batch(uneven((3, 2, 1)), six) == (4, 6)
    with pytest.raises(PlanError, match="cannot divide a microbatch of 8 sequences over 3"):
        batch(uneven((), num_microbatches=3), six)
    with pytest.raises(PlanError, match="stages have .1, 3. of them; give num_microbatches"):
        batch(uneven((), micro_batch_size=2), six)


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 8), st.integers(1, 4))
def test_batch_is_micro_batch_times_microbatches_times_data_ranks(m: int, mbs: int, shard: int, replicate: int) -> None:
    workload = Workload(global_batch_size=m * mbs * shard * replicate, seq_len=1)
    for given_plan in (
        plan(mbs=mbs, dp_shard=shard, dp_replicate=replicate),
        plan(m=m, dp_shard=shard, dp_replicate=replicate),
    ):
        assert batch(given_plan, workload) == (m, mbs * shard * replicate)


def test_learned_positions_limit_the_sequence() -> None:
    graph, plan = gpt(gpt2()), Plan(schedule=Schedule(micro_batch_size=1))
    check(plan, graph, workload=Workload(global_batch_size=1, seq_len=1024))
    with pytest.raises(PlanError, match="1025 tokens, but gpt2 has learned positions for 1024"):
        check(plan, graph, workload=Workload(global_batch_size=1, seq_len=1025))
