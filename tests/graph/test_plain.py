"""A Graph as plain values: there and back for every preset, and nothing but a Graph comes out of what others wrote."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.errors import FormatError, GnomonError
from gnomon.graph import Block, Call, Captured, Dim, Graph, Literal, Node, Op, Size, Tensor, Torch, Use
from gnomon.graph.plain import from_plain, to_plain
from gnomon.models.presets import model

BATCH, WIDTH = Dim(name="batch"), Dim(name="width", size=4)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4)
OPERANDS = st.recursive(
    SCALARS
    | st.just(Use("x"))
    | st.builds(Size, st.integers(), st.lists(st.just("batch"), max_size=2).map(tuple), st.integers())
    | st.builds(Torch, st.sampled_from(("float32", "device")))
    | st.just(Literal((1.0, float("inf")), "float32", (2,))),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=6,
)


def graph_of(*operands: Any) -> Graph:
    """One opaque op that has the operands."""
    x = Tensor(name="x", dims=(BATCH, WIDTH))
    y = Tensor(name="y", dims=(BATCH, WIDTH))
    node = Node(target="aten.add.Tensor", args=(Use("x"), *operands), outputs=("y",))
    op = Op(kind="opaque", path="add", inputs=("x",), outputs=("y",), captured=Captured(nodes=(node,)))
    block = Block(name="b", inputs=("x",), outputs=("y",), tensors=(x, y), ops=(op,))
    return Graph(
        name="one", inputs=(x,), blocks=(block,), calls=(Call(block="b", name="c", inputs=(("x", "x"),)),),
        outputs=("c.y",),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["llama-3.1-8b", "mixtral-8x7b", "t5-base"])
def test_a_preset_comes_back(name: str) -> None:
    graph = model(name)
    assert from_plain(json.loads(json.dumps(to_plain(graph)))) == graph


@given(st.lists(OPERANDS, max_size=4))
def test_operands_come_back_with_their_types(operands: list[Any]) -> None:
    graph = graph_of(*operands)
    back = from_plain(json.loads(json.dumps(to_plain(graph))))
    assert back == graph and repr(back) == repr(graph)  # repr: 1, 1.0 and True are equal


def test_what_no_file_holds_is_refused() -> None:
    with pytest.raises(FormatError, match="complex"):
        to_plain(graph_of(1j))


PLAIN = json.loads(json.dumps(to_plain(graph_of(2, (3.0, Use("x"))))))
WRONG = [
    None,
    True,
    -1,
    99,
    1.5,
    "os.system",
    ["os.system", "ls"],
    {"row": 0},
    {"row": 99},
    {"row": -1},
    {"call": "f"},
    [],
]


@given(st.data())
def test_any_change_gives_a_graph_or_an_error_of_ours(data: st.DataObject) -> None:
    """Every value of a Graph's file in turn is another one."""
    changed = deepcopy(PLAIN)
    row = data.draw(st.sampled_from(changed["rows"]))
    place = data.draw(st.integers(0, len(row) - 1))
    row[place] = data.draw(st.sampled_from(WRONG))
    try:
        assert isinstance(from_plain(changed), Graph)
    except GnomonError:
        pass


@pytest.mark.parametrize("given", [None, [], {}, {"rows": 1}, {"rows": []}, {"rows": [["Dim", "a", 1, [], ""]]}])
def test_what_is_no_graph_is_refused(given: object) -> None:
    with pytest.raises(FormatError):
        from_plain(given)


def test_no_class_is_made_but_those_of_a_graph() -> None:
    for name in ("Popen", "Plan", "object", "Path", "__import__"):
        with pytest.raises(FormatError, match="begins with one of"):
            from_plain({"rows": [[name, "x"]]})
