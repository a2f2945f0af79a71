"""Which layers stages get and what travels between them, on graphs small enough to see through.

A chain of layers with embedding and head, an encoder with a decoder (T5's pattern), and skips (a U-Net's pattern).
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.errors import PlanError
from gnomon.graph import Block, Call, Dim, Graph, Op, Tensor
from gnomon.models.gpt import gpt, gpt2
from gnomon.models.t5 import t5, t5_small
from gnomon.models.unet import unet, unet_tiny
from gnomon.plans import Mesh, Plan, Schedule, Stage, resolve, shared_parameters, stage_layers, transfers
from gnomon.plans.select import format_layers, select

WIDTH = Dim(name="hidden", size=4)
X = Tensor(name="x", dims=(WIDTH,))


def block(name: str, inputs: int = 1) -> Block:
    """Adds its inputs up; one input is doubled."""
    tensors = [X.renamed("x" if i == 0 else f"x{i}") for i in range(inputs)]
    pair = (tensors[0].name, tensors[-1].name)
    op = Op(kind="add", path="sum", inputs=pair, outputs=("y",))
    names = tuple(tensor.name for tensor in tensors)
    return Block(name=name, inputs=names, outputs=("y",), tensors=(*tensors, X.renamed("y")), ops=(op,))


def chain(num_layers: int) -> Graph:
    """embed, layers[0 … n-1], head."""
    return Graph(
        name="chain",
        inputs=(X.renamed("ids"),),
        blocks=(block("one"),),
        calls=(
            Call(block="one", name="embed", inputs=(("x", "ids"),)),
            Call(
                block="one", name="layers", inputs=(("x", "embed.y"),), repeat=num_layers, first=0, chain=(("y", "x"),)
            ),
            Call(block="one", name="head", inputs=(("x", "layers.y"),)),
        ),
        outputs=("head.y",),
    )


def skips() -> Graph:
    """Four calls; d0 reads u0's output as well as d1's: a U-Net of two levels."""
    return Graph(
        name="skips",
        inputs=(X.renamed("image"),),
        blocks=(block("one"), block("two", inputs=2)),
        calls=(
            Call(block="one", name="u0", inputs=(("x", "image"),)),
            Call(block="one", name="u1", inputs=(("x", "u0.y"),)),
            Call(block="one", name="d1", inputs=(("x", "u1.y"),)),
            Call(block="two", name="d0", inputs=(("x", "d1.y"), ("x1", "u0.y"))),
        ),
        outputs=("d0.y",),
    )


def labels(plan: Plan, graph: Graph) -> list[list[str]]:
    return [[layer.label for layer in part] for part in stage_layers(plan, graph)]


def test_a_uniform_mesh_means_equal_stages() -> None:
    plan = resolve(Plan(mesh=Mesh(pp=2, tp=2)), chain(5))
    assert [stage.calls for stage in plan.stages] == [("embed", "layers[0:3]"), ("layers[3:5]", "head")]
    assert [stage.devices for stage in plan.stages] == ["0:2", "2:4"]
    assert [stage.mesh for stage in plan.stages] == [Mesh(tp=2)] * 2


def test_listed_layers_may_leave_the_ends_a_stage_of_their_own() -> None:
    plan = Plan(mesh=Mesh(pp=4), schedule=Schedule(layers_per_stage=(0, 3, 2, 0)))
    assert labels(plan, chain(5)) == [
        ["embed"],
        ["layers[0]", "layers[1]", "layers[2]"],
        ["layers[3]", "layers[4]"],
        ["head"],
    ]
    with pytest.raises(PlanError, match="adds up to 4 layers, but the graph has 5"):
        stage_layers(Plan(mesh=Mesh(pp=2), schedule=Schedule(layers_per_stage=(2, 2))), chain(5))
    with pytest.raises(PlanError, match="stage 1 of 3 gets no layer"):
        stage_layers(Plan(mesh=Mesh(pp=3), schedule=Schedule(layers_per_stage=(3, 0, 2))), chain(5))
    with pytest.raises(PlanError, match=r"6 stages \(pp = 6 x virtual_stages = 1\).*the graph has 5"):
        stage_layers(Plan(mesh=Mesh(pp=6)), chain(5))


@given(st.integers(1, 4), st.integers(1, 3), st.integers(12, 30))
def test_resolving_changes_nothing_but_the_form(pp: int, virtual: int, num_layers: int) -> None:
    schedule = Schedule(name="interleaved_one_f_one_b", virtual_stages=virtual)
    short, graph = Plan(mesh=Mesh(pp=pp, dp_shard=2, tp=2), schedule=schedule), chain(num_layers)
    full = resolve(short, graph)
    assert resolve(full, graph) == full
    assert labels(full, graph) == labels(short, graph)
    assert full.stage_ranks == short.stage_ranks
    assert full.pipeline_ranks == short.pipeline_ranks
    assert [label for part in labels(full, graph) for label in part] == [layer.label for layer in graph.layers()]
    assert transfers(full, graph) == transfers(short, graph)


def test_selectors() -> None:
    graph = chain(4)
    chosen = select(("layers[1:3]", "head"), graph)
    assert [layer.label for layer in chosen] == ["layers[1]", "layers[2]", "head"]
    assert format_layers(chosen) == ("layers[1:3]", "head")
    assert len(select(("*",), graph)) == 6
    assert [layer.label for layer in select(("layers[2:]",), graph)] == ["layers[2]", "layers[3]"]
    with pytest.raises(PlanError, match=r"'layer' matches no layer.*did you mean 'layers'"):
        select(("layer",), graph)
    with pytest.raises(PlanError, match="layers are 0 to 3"):
        select(("layers[2:5]",), graph)
    with pytest.raises(PlanError, match="does not parse"):
        select(("layers[a]",), graph)
    with pytest.raises(PlanError, match="its end must be above 3"):
        select(("layers[3:1]",), graph)


def test_a_chain_sends_one_tensor_between_neighbours() -> None:
    result = transfers(Plan(mesh=Mesh(pp=3)), chain(3))
    assert [(t.source, t.target, t.tensors) for t in result] == [
        (0, 1, (("layers[0]", "y"),)),
        (1, 2, (("layers[1]", "y"),)),
    ]


def skip_plan(inputs: tuple[int, ...] | None) -> Plan:
    names = ("u0", "u1", "d1", "d0")
    return Plan(stages=tuple(Stage(calls=(n,), inputs=inputs if n == "d0" else None) for n in names))


def test_a_skip_goes_straight_to_its_reader() -> None:
    actual = {(t.source, t.target): t.tensors for t in transfers(skip_plan(None), skips())}
    assert actual == {
        (0, 1): (("u0", "y"),),
        (1, 2): (("u1", "y"),),
        (2, 3): (("d1", "y"),),
        (0, 3): (("u0", "y"),),
    }


def test_a_skip_may_travel_through_the_stages_between() -> None:
    plan = Plan(
        stages=tuple(Stage(calls=(n,), inputs=(i - 1,) if i else ()) for i, n in enumerate(("u0", "u1", "d1", "d0")))
    )
    actual = {(t.source, t.target): t.tensors for t in transfers(plan, skips())}
    # u0's output is needed by u1 anyway, so the first hop carries it once.
    assert actual == {(0, 1): (("u0", "y"),), (1, 2): (("u1", "y"), ("u0", "y")), (2, 3): (("d1", "y"), ("u0", "y"))}


def test_a_stage_that_cannot_get_its_input_is_refused() -> None:
    plan = Plan(stages=tuple(Stage(calls=(n,), inputs=()) for n in ("u0", "u1", "d1", "d0")))
    with pytest.raises(PlanError, match=r"stage 1 has inputs \(\).*stage 0 for u0's y, which u1 reads; add 0"):
        transfers(plan, skips())


def test_t5_sends_the_encoder_to_every_decoder_stage() -> None:
    graph = t5(t5_small())
    calls = [call.name for call in graph.calls]
    assert calls.index("encoder_norm") < calls.index("decoder_layers")
    plan = Plan(
        stages=(
            Stage(calls=("encoder_*",)),
            Stage(calls=("decoder_embed", "decoder_layers[0:3]")),
            Stage(
                calls=(
                    "decoder_layers[3:6]",
                    *(c for c in calls if c not in ("decoder_embed", "decoder_layers") and "encoder" not in c),
                )
            ),
        )
    )
    actual = {(t.source, t.target): {tensor for _, tensor in t.tensors} for t in transfers(plan, graph)}
    assert actual[0, 1] == {"memory"}
    assert actual[0, 2] == {"memory"}
    assert {"y", "bias"} <= actual[1, 2]


def test_a_real_unet_divides_call_by_call() -> None:
    graph = unet(unet_tiny())
    plan = Plan(mesh=Mesh(pp=2))
    parts = labels(plan, graph)
    assert sum(parts, []) == [layer.label for layer in graph.layers()]
    assert abs(len(parts[0]) - len(parts[1])) <= 1
    (only,) = transfers(plan, graph)
    down, up = set(parts[0]), set(parts[1])
    crossing = {
        source
        for call in graph.calls
        if call.name in up
        for _, source in call.inputs
        if source.partition(".")[0] in down
    }
    assert {f"{layer}.{tensor}" for layer, tensor in only.tensors} == crossing
    assert len(crossing) > 1


def test_a_tied_embedding_is_held_by_the_first_and_the_last_stage() -> None:
    graph = gpt(gpt2())
    assert shared_parameters(Plan(mesh=Mesh(pp=4)), graph) == {"transformer.wte.weight": (0, 3)}
    assert shared_parameters(Plan(), graph) == {}
    # In V placement the first and the last stage are on the same rank, but they are still two stages.
    v = Plan(mesh=Mesh(pp=2), schedule=Schedule(name="zero_bubble_v", virtual_stages=2, placement="v"))
    (stages,) = shared_parameters(v, graph).values()
    assert {v.pipeline_ranks[stage] for stage in stages} == {0}


def test_untied_models_share_nothing() -> None:
    assert shared_parameters(Plan(mesh=Mesh(pp=2)), unet(unet_tiny())) == {}
