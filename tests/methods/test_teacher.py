"""A teacher's layers stand for the model's, as far as both have layers that are counted."""

from __future__ import annotations

from gnomon.graph import BlockBuilder, Call, Dim, Graph, Tensor
from gnomon.methods.learnt.teacher import begins, stands_for
from gnomon.methods.learnt.teaching import Teaching


def test_a_model_without_counted_layers_has_none_that_a_teachers_stand_for() -> None:
    batch, hidden = Dim(name="batch"), Dim(name="hidden", size=4)
    b = BlockBuilder("only")
    x = b.input("x", batch, hidden)
    block = b.build(b.linear("up", x, out=(Dim(name="ffn", size=8),), contract=(hidden,), bias=False))
    given = Tensor(name="x", dims=(batch, hidden), dtype="compute")
    call = Call(block="only", name="only", inputs=(("x", "x"),))
    graph = Graph(name="g", inputs=(given,), blocks=(block,), calls=(call,), outputs=(f"only.{block.outputs[0]}",))
    teaching = Teaching(folder="t")
    assert stands_for(teaching, graph, graph) == {}
    assert begins(teaching, graph, graph)[0].startswith("parameters begin as random numbers")
