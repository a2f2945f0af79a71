"""Plan as a value and as text: short form, full form, exact round trip, and what it refuses to mean.

Stages of a graph are in test_stages, problems with a cluster or a batch in test_check.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.errors import InputError, PlanError
from gnomon.plans import (
    Fp8,
    Layout,
    LayoutRule,
    Mesh,
    Offload,
    Optimizer,
    Overlap,
    Pass,
    Plan,
    Precision,
    Saved,
    SavedRule,
    Schedule,
    Split,
    Stage,
    format_ranks,
    parse_ranks,
    pipeline_rank,
)
from gnomon.schema import dump, load

SHORT = """schema = "gnomon.plan/1"

[mesh]
pp = 4
dp_shard = 8
tp = 2

[schedule]
micro_batch_size = 1
"""

FULL = Plan(
    stages=(
        Stage(calls=("embed", "layers[0:9]"), mesh=Mesh(dp_shard=3), devices="0:3", shares=(2, 1, 1)),
        Stage(calls=("layers[9:12]", "head"), mesh=Mesh(tp=1), devices="3", inputs=(0,)),
    ),
    schedule=Schedule(
        name="one_f_one_b",
        num_microbatches=8,
        passes=(Pass(name="dapple_warmup", params=(("policy", "2p"),)), Pass(name="mario", params=(("steps", 4),))),
    ),
    saved=Saved(preset="selective", rules=(SavedRule(calls="layers[0:3]", tensors=("mlp.*",), action="offload"),)),
    layout=Layout(context="ulysses", rules=(LayoutRule(region="embed", dim="vocab"),)),
    overlap=Overlap(
        bucket_bytes=25 * 2**20, priority=("all_to_all",), splits=(Split(op="*.combine", dim="seq", parts=4),)
    ),
    optimizer=Optimizer(zero=2, offload=Offload(tiles=4), delay=1),
    precision=Precision(master="none", param="fp32", fp8=Fp8(recipe="delayed", except_ops=("lm_head",))),
    placement=(0, 0, 1, 1),
)


def test_the_short_form_is_what_a_person_writes() -> None:
    plan = load(Plan, SHORT)
    assert plan == Plan(mesh=Mesh(pp=4, dp_shard=8, tp=2), schedule=Schedule(micro_batch_size=1))
    assert dump(plan) == SHORT


def test_a_full_plan_survives_text() -> None:
    text = dump(FULL)
    assert load(Plan, text) == FULL
    assert 'bucket_bytes = "25 MiB"' in text
    assert hash(load(Plan, text)) == hash(FULL)


@given(
    mesh=st.builds(Mesh, pp=st.integers(1, 4), dp_shard=st.integers(1, 8), tp=st.sampled_from((1, 2, 4))),
    schedule=st.builds(
        Schedule,
        name=st.sampled_from(("gpipe", "zero_bubble_v", "dualpipe_v")),
        num_microbatches=st.none() | st.integers(1, 64),
        virtual_stages=st.integers(1, 3),
        placement=st.sampled_from(("loop", "v")),
    ),
    saved=st.builds(Saved, preset=st.sampled_from(("none", "selective", "full"))),
    optimizer=st.builds(Optimizer, zero=st.integers(0, 3), clip=st.booleans(), offload=st.none() | st.just(Offload())),
    params=st.dictionaries(st.text(min_size=1), st.booleans() | st.integers(-9, 9) | st.floats(0, 9) | st.text()),
)
def test_every_plan_survives_text(
    mesh: Mesh, schedule: Schedule, saved: Saved, optimizer: Optimizer, params: dict[str, bool | int | float | str]
) -> None:
    schedule = replace(schedule, passes=(Pass(name="x", params=tuple(params.items())),))
    plan = Plan(mesh=mesh, schedule=schedule, saved=saved, optimizer=optimizer)
    assert repr(load(Plan, dump(plan))) == repr(plan)  # repr tells 1, 1.0 and True apart


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("[mesh]\ntensor = 2\n", "$.mesh"),
        ("[mesh]\ntp = 2.0\n", "$.mesh.tp"),
        ("[overlap]\nbucket_bytes = 25\n", "$.overlap.bucket_bytes"),
        ('[schedule]\nname = "1f1b"\n', "$.schedule.name"),
        ("[optimizer]\nzero = 4\n", "$.optimizer.zero"),
        ("[mesh]\nep = 3\n", "$.mesh"),
    ],
)
def test_a_wrong_file_is_refused_with_the_path(text: str, path: str) -> None:
    with pytest.raises(InputError) as caught:
        load(Plan, 'schema = "gnomon.plan/1"\n' + text)
    assert caught.value.path == path


def test_where_stages_sit() -> None:
    # v placement with two stages a rank: 0 1 2 3 | 3 2 1 0; three turn again.
    assert [pipeline_rank(s, 4, "v") for s in range(12)] == [0, 1, 2, 3, 3, 2, 1, 0, 0, 1, 2, 3]
    assert [pipeline_rank(s, 4, "loop") for s in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    plan = Plan(mesh=Mesh(pp=2, tp=2), schedule=Schedule(name="zero_bubble_v", virtual_stages=2, placement="v"))
    assert plan.stage_ranks == ((0, 1), (2, 3), (2, 3), (0, 1))
    assert plan.pipeline_ranks == (0, 1, 1, 0)


def test_ranks_of_stages_follow_each_other_unless_given() -> None:
    stages = (
        Stage(calls=("a",), mesh=Mesh(dp_shard=3)),
        Stage(calls=("b",)),
        Stage(calls=("c",), devices="0:2,5", mesh=Mesh(tp=3)),
    )
    assert Plan(stages=stages).stage_ranks == ((0, 1, 2), (3,), (0, 1, 5))
    assert Plan(stages=stages).world_size == 6


def test_logical_workers_share_devices() -> None:
    plan = Plan(mesh=Mesh(dp_replicate=4), placement=(0, 1, 0, 1))
    assert plan.world_size == 4
    assert plan.device_of == (0, 1, 0, 1)


@given(st.lists(st.integers(0, 40), unique=True))
def test_ranks_survive_text(ranks: list[int]) -> None:
    assert parse_ranks(format_ranks(ranks)) == tuple(ranks)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Plan(mesh=Mesh(tp=2), stages=(Stage(calls=("a",)),)), "either one mesh or stages"),
        (lambda: Plan(stages=(Stage(calls=("a",), inputs=(0,)),)), "stage 0 has inputs"),
        (lambda: Plan(mesh=Mesh(tp=2), placement=(0,)), "1 ranks, but the plan has 2"),
        (
            lambda: Plan(mesh=Mesh(pp=2), schedule=Schedule(layers_per_stage=(1, 2, 3))),
            "lists 3 stages, but the plan has 2",
        ),
        (lambda: Stage(calls=()), "selects no layers"),
        (lambda: Stage(calls=("a",), mesh=Mesh(pp=2)), "pp counts stages"),
        (lambda: Stage(calls=("a",), devices="0:3", mesh=Mesh(tp=2)), "3 ranks, but its mesh tp=2 needs 2"),
        (lambda: Stage(calls=("a",), shares=(1, 2)), "each of the 1 data-parallel ranks"),
        (lambda: Schedule(micro_batch_size=0), "micro_batch_size = 0"),
        (lambda: Saved(every=2), "above 1 only with 'full'"),
        (lambda: Split(op="x", dim="seq", parts=1), "2 or more"),
        (lambda: Offload(fraction=1.5), "fraction"),
        (lambda: parse_ranks("3:3"), "range '3:3' is empty"),
        (lambda: parse_ranks("0:2,1"), "name a rank twice"),
        (lambda: parse_ranks("a"), "do not parse at 'a'"),
    ],
)
def test_contradictions_are_refused(build: object, message: str) -> None:
    assert callable(build)
    with pytest.raises(PlanError, match=message):
        build()
