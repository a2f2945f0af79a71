"""Zeros of weights reach other weights: a layer worked by hand. (`tests/runtime/test_compress.py`: results stay.)"""

from __future__ import annotations

from collections.abc import Callable, Collection
from math import prod

import numpy as np

from gnomon.graph import BlockBuilder, Call, Dim, Graph
from gnomon.graph.wiring import reads, writes
from gnomon.graph.zeros import Mask, columns_read
from gnomon.models.llama import llama, llama_tiny

LAYER = "model.layers.0"
MATRICES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
            "mlp.up_proj", "mlp.down_proj")  # fmt: skip


def whole(graph: Graph) -> dict[str, Mask]:
    """Every matrix of the first layer, with nothing zero: (outputs, inputs)."""
    out = {}
    for name in MATRICES:
        sizes = [atom.size or 1 for atom in graph.parameters()[f"{LAYER}.{name}.weight"].atoms]
        inputs = prod(sizes[1:]) if name in ("self_attn.o_proj", "mlp.down_proj") else sizes[-1]
        out[name] = np.ones((prod(sizes) // inputs, inputs), np.bool_)
    return out


def idle(kept: dict[str, Mask], graph: Graph) -> dict[str, tuple[set[int], set[int]]]:
    """(rows, columns) that are idle as wholes and were kept, of matrices that have some."""
    made = columns_read(graph, {f"{LAYER}.{name}.weight": mask for name, mask in kept.items()}, {})
    out = {}
    for name, mask in kept.items():
        after = made[f"{LAYER}.{name}.weight"]
        assert not (after & ~mask).any()
        rows, columns = (set(np.flatnonzero(mask.any(axis) & ~after.any(axis)).tolist()) for axis in (1, 0))
        if (mask & ~after).any():
            out[name] = rows, columns
    return out


def test_what_a_zero_row_or_column_makes_idle() -> None:
    config = llama_tiny()
    graph, width = llama(config), config.head_dim
    shared = config.num_heads // config.num_kv_heads
    assert shared > 1
    kept = whole(graph)
    assert idle(kept, graph) == {}
    kept["mlp.gate_proj"][5] = False  # the gate is 0 there: what it is times, and what reads it
    kept["mlp.down_proj"][:, 3] = False  # nobody reads it: what makes it
    kept["self_attn.v_proj"][1] = False  # of the first head of values, which `shared` heads have
    columns = {head * width + 1 for head in range(shared)}
    assert idle(kept, graph) == {
        "mlp.gate_proj": ({3}, set()), "mlp.up_proj": ({3, 5}, set()), "mlp.down_proj": (set(), {5}),
        "self_attn.o_proj": (set(), columns),
    }  # fmt: skip
    kept = whole(graph)
    kept["self_attn.o_proj"][:, 0] = False  # one of the heads that share it reads it still
    assert idle(kept, graph) == {}
    for head in range(shared):
        kept["self_attn.o_proj"][:, head * width] = False
    assert idle(kept, graph) == {"self_attn.v_proj": ({0}, set())}


def test_it_goes_on_until_nothing_changes() -> None:
    """No result reads a layer's attention: values, and then queries and keys, are idle; what others read is not."""
    graph = llama(llama_tiny())
    kept = whole(graph)
    kept["self_attn.o_proj"][:] = False
    made = idle(kept, graph)
    assert set(made) == {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}
    assert all(len(rows) == len(kept[name]) for name, (rows, _) in made.items())


BATCH, SEQ, WIDE = Dim(name="batch"), Dim(name="seq"), Dim(name="hidden", size=6)
FFN, LEFT, RIGHT, HEADS, HALF = (
    Dim(name=name, size=size) for name, size in (("ffn", 6), ("left", 2), ("right", 4), ("parts", 2), ("half", 3))
)
OUT = Dim(name="vocab", size=5)


def drawn(chance: np.random.Generator) -> Graph:
    """Two layers of a kind that is drawn, with a table before them and a head after them."""
    b = BlockBuilder("embed")
    embed = b.build(b.embedding("table", b.input("ids", BATCH, SEQ, dtype="int64"), OUT, WIDE, name="hidden"))
    b = BlockBuilder("layer")
    x = b.input("hidden", BATCH, SEQ, WIDE)
    fn, bias = str(chance.choice(["rms", "layer"])), bool(chance.random() < 0.5)
    h = b.norm("norm", x, WIDE, fn=fn, bias=bias) if chance.random() < 0.8 else x
    up = b.linear("up", h, out=(FFN,), contract=(WIDE,), bias=bool(chance.random() < 0.6))
    if chance.random() < 0.4:
        up = b.op("glu", "glu", (b.linear("gate", h, out=(FFN,), contract=(WIDE,), bias=False), up), fn="silu")
    else:
        up = b.op("activation", "act", (up,), fn=str(chance.choice(["relu", "relu", "gelu_tanh"])))
    if chance.random() < 0.5:  # parts in another order
        left, right = b.split("cut", up, {"first": (BATCH, SEQ, LEFT), "rest": (BATCH, SEQ, RIGHT)})
        up = b.op("concat", "joined", (right, left), (BATCH, SEQ, FFN))
    elif chance.random() < 0.5:  # two dims turned
        up = b.op("rename", "named", (up,), (BATCH, SEQ, Dim(name="both", factors=(HEADS, HALF))))
        up = b.op("reshape", "turned", (up,), (BATCH, SEQ, Dim(name="turned", factors=(HALF, HEADS))))
        up = b.op("rename", "again", (up,), (BATCH, SEQ, FFN))
    down = b.linear("down", up, out=(WIDE,), contract=(FFN,), bias=bool(chance.random() < 0.5))
    layer = b.build(b.add("sum", x, down, name="made") if chance.random() < 0.7 else down)
    b = BlockBuilder("head")
    h = b.input("hidden", BATCH, SEQ, WIDE)
    h = b.norm("norm", h, WIDE, fn="rms", bias=False) if chance.random() < 0.5 else h
    head = b.build(b.linear("head", h, out=(OUT,), contract=(WIDE,), bias=False, name="logits"))
    made = layer.outputs[0]
    return Graph(
        name="drawn", blocks=(embed, layer, head), inputs=(embed.tensor("ids"),), outputs=("head.logits",),
        calls=(
            Call(block="embed", name="embed", inputs=(("ids", "ids"),)),
            Call(block="layer", name="layers", inputs=(("hidden", "embed.hidden"),), repeat=2,
                 chain=((made, "hidden"),), first=0),
            Call(block="head", name="head", inputs=(("hidden", f"layers.{made}"),)),
        ),
    )  # fmt: skip


def run(
    graph: Graph,
    numbers: dict[str, np.ndarray],
    ids: np.ndarray,
    rounds: Collection[str] = (),
    early: Collection[str] = (),
    rounded: Callable[[np.ndarray], np.ndarray] = np.asarray,
) -> np.ndarray:
    """The graph by numpy, op by op, in double. rounds: matrices whose products round what they multiply; early: tensors
    (`layer.tensor`) that are rounded where they are made."""
    made: dict[str, np.ndarray] = {"ids": ids}
    for layer in graph.layers():
        block = graph.block(layer.call.block)
        own = {name: made[source] for name, source in reads(layer).items()}
        own |= {one.name: numbers[layer.call.parameter_name(one.name, layer.index)] for one in block.parameters}
        for op in block.ops:
            x = [own[name] for name in op.inputs]
            sizes = [atom.size for atom in block.tensor(op.outputs[0]).atoms[2:]]
            match op.kind:
                case "embedding":
                    out = x[1][x[0]]
                case "linear":
                    if layer.call.parameter_name(op.inputs[1], layer.index) in rounds:
                        x[0] = rounded(x[0])
                    out = x[0] @ x[1].T + (x[2] if len(x) > 2 else 0)
                case "norm":
                    y = x[0] - (x[0].mean(-1, keepdims=True) if op.attr("fn", "") == "layer" else 0)
                    out = y / np.sqrt((y * y).mean(-1, keepdims=True) + 1e-6) * x[1] + (x[2] if len(x) > 2 else 0)
                case "activation" | "glu":
                    fn = {
                        "relu": lambda v: np.maximum(v, 0), "silu": lambda v: v / (1 + np.exp(-v)),
                        "gelu_tanh": lambda v: v * (1 + np.tanh(0.7978845608 * (v + 0.044715 * v**3))) / 2,
                    }[str(op.attr("fn", ""))]  # fmt: skip
                    out = fn(x[0]) * (x[1] if op.kind == "glu" else 1)
                case "add":
                    out = x[0] + x[1]
                case "concat":
                    out = np.concatenate(x, -1)
                case "reshape":
                    out = x[0].reshape(*x[0].shape[:2], *sizes[::-1]).swapaxes(-1, -2).reshape(x[0].shape)
                case "rename":
                    out = x[0]
                case "split":
                    own["first"], own["rest"] = x[0][..., :2], x[0][..., 2:]
                    continue
            own[op.outputs[0]] = rounded(out) if f"{layer.label}.{op.outputs[0]}" in early else out
        made |= {name: own[out] for out, name in writes(graph, layer).items()}
    return made["head.logits"]


def test_what_is_called_idle_changes_nothing() -> None:
    """Of 60 drawn models with drawn zeros: results are the same, bit by bit, whatever stands where nothing counts."""
    idle, over_layers = 0, 0
    for seed in range(60):
        chance = np.random.default_rng(seed)
        graph = drawn(chance)
        numbers = {}
        for name, tensor in graph.parameters().items():
            shape = [atom.size or 1 for atom in tensor.atoms]
            x = chance.standard_normal(shape)
            x[chance.random(shape[0]) < 0.3] = 0
            if len(shape) == 2:
                x[:, chance.random(shape[1]) < 0.35] = 0
                x[chance.random(shape) < 0.2] = 0
            numbers[name] = x
        matrices = [name for name in numbers if numbers[name].ndim == 2 and "table" not in name]
        vectors = {name: x.astype(np.float32) for name, x in numbers.items() if x.ndim == 1}
        vectors["embed.table.weight"] = np.where((numbers["embed.table.weight"] == 0).all(0), 0, np.nan).astype("f4")
        kept = {name: numbers[name] != 0 for name in matrices}
        counts = columns_read(graph, kept, vectors)
        ids = np.arange(5)[None]
        wanted = run(graph, numbers, ids)
        for fill in (0.0, 7.0):
            less = dict(numbers)
            for name in matrices:
                assert not (counts[name] & ~kept[name]).any()
                less[name] = np.where(kept[name] & ~counts[name], fill, numbers[name])
            np.testing.assert_array_equal(run(graph, less, ids), wanted, str(seed))
        idle += sum(int((kept[name] & ~counts[name]).sum()) for name in matrices)
        alone = columns_read(graph, kept, {})
        over_layers += sum(int((alone[name] & ~counts[name]).sum()) for name in matrices)
    assert idle > 600 and over_layers > 100, (idle, over_layers)


def test_a_negative_bias_behind_a_relu_and_a_norms_zero_reach_the_next_matrix() -> None:
    """A row of zeros leaves its bias: below 0 a ReLU makes it 0, above 0 it counts. A zero in a norm's weight makes the
    columns that read it idle, and so does one of a table's columns, through the norm without a mean."""
    b = BlockBuilder("embed")
    embed = b.build(b.embedding("table", b.input("ids", BATCH, SEQ, dtype="int64"), OUT, WIDE, name="hidden"))
    b = BlockBuilder("layer")
    h = b.norm("norm", b.input("hidden", BATCH, SEQ, WIDE), WIDE, fn="rms", bias=False)
    up = b.op("activation", "act", (b.linear("up", h, out=(FFN,), contract=(WIDE,), bias=True),), fn="relu")
    layer = b.build(b.linear("down", up, out=(OUT,), contract=(FFN,), bias=False, name="made"))
    graph = Graph(
        name="two", blocks=(embed, layer), inputs=(embed.tensor("ids"),), outputs=("layer.made",),
        calls=(Call(block="embed", name="embed", inputs=(("ids", "ids"),)),
               Call(block="layer", name="layer", inputs=(("hidden", "embed.hidden"),))),
    )  # fmt: skip
    up_kept, down_kept = np.ones((6, 6), np.bool_), np.ones((5, 6), np.bool_)
    up_kept[[1, 2]] = False
    bias, norm, table = np.ones(6, np.float32), np.ones(6, np.float32), np.full(6, np.nan, np.float32)
    bias[1], norm[3], table[4] = -0.5, 0, 0
    vectors = {"layer.up.bias": bias, "layer.norm.weight": norm, "embed.table.weight": table}
    made = columns_read(graph, {"layer.up.weight": up_kept, "layer.down.weight": down_kept}, vectors)
    assert np.flatnonzero(~made["layer.down.weight"].any(0)).tolist() == [1]
    assert np.flatnonzero(~made["layer.up.weight"].any(0)).tolist() == [3, 4]
