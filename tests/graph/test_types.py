"""Blocks and graphs check themselves: every mistake is a GraphError that names where."""

from __future__ import annotations

import pytest

from gnomon.errors import GraphError
from gnomon.graph import Block, BlockBuilder, Call, Dim, Graph, Op, Tensor, attrs

N = Dim(name="n", size=4)
M = Dim(name="m", size=6)
T = Dim(name="t")


def linear_block(name: str = "lin") -> Block:
    """y = x·W over n, then back to n."""
    b = BlockBuilder(name)
    x = b.input("x", T, N)
    up = b.linear("up", x, out=(M,), contract=(N,), bias=False)
    b.linear("down", up, out=(N,), contract=(M,), bias=True, name="y")
    return b.build("y")


X = Tensor(name="x", dims=(T, N))


def graph(*calls: Call, blocks: tuple[Block, ...] = (), outputs: tuple[str, ...] = ()) -> Graph:
    return Graph(name="g", inputs=(X,), blocks=blocks or (linear_block(),), calls=calls, outputs=outputs)


def call(name: str, x: str, **rest: object) -> Call:
    return Call(block="lin", name=name, inputs=(("x", x),), **rest)  # type: ignore[arg-type]


def test_a_block_of_two_linears() -> None:
    block = linear_block()
    assert [str(p) for p in block.parameters] == [
        "up.weight[m=6, n=4]:param",
        "down.weight[n=4, m=6]:param",
        "down.bias[n=4]:param",
    ]
    assert block.op("up").contracts == ("n",)
    with pytest.raises(GraphError, match="did you mean 'down'"):
        block.op("dwn")
    with pytest.raises(GraphError, match="has no tensor 'z'"):
        block.tensor("z")


def raw(*ops: Op, inputs: tuple[str, ...] = ("x",), outputs: tuple[str, ...] = ("y",)) -> Block:
    tensors = (
        X,
        Tensor(name="w", dims=(M, N), dtype="param", kind="parameter"),
        Tensor(name="y", dims=(T, M)),
        Tensor(name="z", dims=(T, N)),
    )
    return Block(name="b", inputs=inputs, outputs=outputs, tensors=tensors, ops=ops)


def op(kind: str = "linear", inputs: tuple[str, ...] = ("x", "w"), output: str = "y", **rest: object) -> Op:
    contracts = ("n",) if kind == "linear" else ()
    return Op(kind=kind, path="p", inputs=inputs, outputs=(output,), contracts=rest.get("contracts", contracts))  # type: ignore[arg-type]


def test_the_plain_block_is_accepted() -> None:
    assert raw(op()).outputs == ("y",)


def test_contracted_dims_are_on_both_sides() -> None:
    with pytest.raises(GraphError, match=r"b/p: contracts 'm', which is not a dim of x\[t, n=4\]"):
        raw(op(contracts=("m",)))


def test_the_result_of_a_contraction_has_the_other_dims() -> None:
    with pytest.raises(GraphError, match=r"b/p: writes z.* gives dims \['m', 't'\]"):
        raw(op(output="z"), outputs=("z",))


def test_a_linear_needs_a_parameter() -> None:
    tensors = (X, Tensor(name="a", dims=(M, N)), Tensor(name="y", dims=(T, M)))
    with pytest.raises(GraphError, match="use matmul"):
        Block(name="b", inputs=("x", "a"), outputs=("y",), tensors=tensors, ops=(op(inputs=("x", "a")),))


def test_an_unknown_tensor_kind_or_order_is_named() -> None:
    with pytest.raises(GraphError, match="b/p|no tensor 'q'"):
        raw(op(inputs=("q", "w")))
    with pytest.raises(GraphError, match="unknown kind 'linaer'.*did you mean 'linear'"):
        op(kind="linaer")
    with pytest.raises(GraphError, match="reads 'z' before an op writes it"):
        raw(op(inputs=("z", "w")))
    with pytest.raises(GraphError, match="output 'z' is written by no op"):
        raw(op(), outputs=("z",))
    with pytest.raises(GraphError, match="two ops have this path"):
        raw(op(), op(output="z"))
    with pytest.raises(GraphError, match="writes 'x', which is an input"):
        raw(Op(kind="add", path="p", inputs=("x", "x"), outputs=("x",)))


def test_elementwise_dims_agree() -> None:
    with pytest.raises(GraphError, match="b/p: add reads .* but writes"):
        raw(op("add", inputs=("x", "x")))


def test_one_name_is_one_dim_in_a_block() -> None:
    other = Tensor(name="o", dims=(Dim(name="n", size=5),))
    with pytest.raises(GraphError, match="dim 'n' is n=5 in tensor 'o' but n=4 in 'x'"):
        Block(name="b", inputs=("x", "o"), outputs=(), tensors=(X, other), ops=())


def test_attention_needs_matching_heads() -> None:
    b = BlockBuilder("b")
    d = Dim(name="head_dim", size=2)
    q = b.input("q", T, Dim(name="heads", size=6), d)
    k = b.input("k", T, Dim(name="kv_heads", size=4), d)
    b.attention("core", q, k, k, causal=True)
    with pytest.raises(GraphError, match="6 query heads are not a multiple of 4"):
        b.build("core")


def test_attention_takes_a_bias_or_sinks() -> None:
    b = BlockBuilder("b")
    q = b.input("q", T, Dim(name="heads", size=4), Dim(name="head_dim", size=2))
    with pytest.raises(GraphError, match="core is given a bias and sinks"):
        b.attention("core", q, q, q, causal=True, bias=q, sinks=q)


def test_lookups_need_integers_and_matching_dims() -> None:
    b = BlockBuilder("b")
    b.op("cross_entropy", "loss", (b.input("x", T, N), b.input("labels", N, dtype="int64")), (), dtype="fp32")
    with pytest.raises(GraphError, match="b/loss: cross_entropy of x.* and labels.* cannot write loss"):
        b.build("loss")
    b = BlockBuilder("b")
    b.embedding("rows", b.input("ids", T), M, N)
    with pytest.raises(GraphError, match="b/rows: embedding of ids.t.:compute"):
        b.build("rows")


def test_attrs_are_sorted_and_hashable() -> None:
    made = Op(kind="add", path="p", inputs=("a", "b"), outputs=("c",), attrs=attrs(z=1, a=2))
    assert made.attrs == (("a", 2), ("z", 1)) and hash(made)
    assert made.attr("z", 0) == 1 and made.attr("q", 7) == 7


def test_a_chain_of_repeats_counts_each_parameter() -> None:
    g = graph(call("layers", "x", repeat=3, chain=(("y", "x"),), first=0), outputs=("layers.y",))
    assert g.num_parameters() == 3 * (24 + 24 + 4)
    assert [layer.label for layer in g.layers()] == ["layers[0]", "layers[1]", "layers[2]"]
    assert "layers.2.down.bias" in g.parameters()


def test_two_runs_of_one_family_continue_its_index() -> None:
    one = call("a", "x", first=0, repeat=2, chain=(("y", "x"),), family="layers", prefix="model.layers")
    two = call("b", "a.y", first=2, family="layers", prefix="model.layers")
    g = graph(one, two)
    assert [layer.label for layer in g.layers()] == ["layers[0]", "layers[1]", "layers[2]"]
    assert "model.layers.2.up.weight" in g.parameters()
    with pytest.raises(GraphError, match=r"two layers 'layers\[1\]'"):
        graph(one, call("b", "a.y", first=1, family="layers", prefix="other"))


def test_a_shared_block_called_twice_counts_once() -> None:
    params = tuple((p.name, f"shared.{p.name}") for p in linear_block().parameters)
    g = graph(call("one", "x", params=params), call("two", "one.y", params=params))
    assert g.num_parameters() == 24 + 24 + 4


def test_sharing_a_name_without_saying_so_is_refused() -> None:
    with pytest.raises(GraphError, match="'same.up.weight' of two is already that of an earlier call"):
        graph(call("one", "x", prefix="same"), call("two", "one.y", prefix="same"))


def test_a_tied_parameter_has_one_shape() -> None:
    tie = (("down.weight", "one.up.weight"),)
    with pytest.raises(GraphError, match="parameter 'one.up.weight' is .* in one call and .* in two"):
        graph(call("one", "x"), call("two", "one.y", params=tie))


def test_wiring_mistakes_are_named() -> None:
    with pytest.raises(GraphError, match="g/one: input 'x' reads 'two.y', which no earlier call gives .a cycle."):
        graph(call("one", "two.y"), call("two", "one.y"))
    with pytest.raises(GraphError, match="no earlier call gives .unknown"):
        graph(call("one", "zero.y"))
    with pytest.raises(GraphError, match="has no input 'pixels'"):
        graph(call("one", "pixels"))
    with pytest.raises(GraphError, match=r"needs inputs \('x',\), the call gives \(\)"):
        graph(Call(block="lin", name="one"))
    with pytest.raises(GraphError, match="has no output 'up'"):
        graph(call("one", "x"), call("two", "one.up"))
    with pytest.raises(GraphError, match="blocks that no call uses: spare"):
        graph(call("one", "x"), blocks=(linear_block(), linear_block("spare")))
    with pytest.raises(GraphError, match="repeats 2 times: give `first`"):
        call("one", "x", repeat=2)


def test_dims_agree_across_calls() -> None:
    b = BlockBuilder("wide")
    b.linear("up", b.input("x", T, N), out=(M,), contract=(N,), bias=False, name="y")
    wide = b.build("y")
    first = Call(block="wide", name="w", inputs=(("x", "x"),))
    with pytest.raises(GraphError, match=r"g/one: input 'x' from 'w.y': gets y\[t, m=6\].*needs x\[t, n=4\]"):
        graph(first, call("one", "w.y"), blocks=(wide, linear_block()))
