"""Layers of a Graph bound to their weights, op by op, on rows of several texts: what encoders and T5 run on.

`Bound(graph, layers, weights, dtype)` reads the weights once; `run(values, texts)` computes the layers. Matrices are
packed once for oneDNN, which then need not pack them anew at every call (`torch.ops.mkldnn`, float32 and bfloat16), and
linears that read the same tensor are one product. Rows of a text that are filled up count nowhere: nobody attends to
them. Leaves out decoders whose keys lie in pages (`decoder`), and gradients.
Shapes: activations are (1, rows, …), with a torch dim for each dim of the Graph's tensor, products flattened.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from gnomon.errors import PlanError
from gnomon.graph import Block, Graph, Layer, Op
from gnomon.runtime.module.crossings import reads, writes
from gnomon.runtime.ops import check_runnable, function_of
from gnomon.runtime.ops.places import places, relative_buckets
from gnomon.runtime.ops.site import Site
from gnomon.runtime.parameters.weights import WeightReader
from gnomon.serve.decoder import matrix_dims
from gnomon.serve.load import whole_slots

PACKS = (torch.float32, torch.bfloat16)
"""Dtypes that oneDNN has packed products for."""


class BoundWeights(Protocol):
    """Parameters by their full names."""

    def __getitem__(self, name: str, /) -> Tensor: ...


class BoundParameters:
    """Parameters by their full names, as the graph shapes them."""

    def __init__(self, reader: WeightReader, graph: Graph) -> None:
        self.reader, self.slots = reader, {slot.name: slot for slot in whole_slots(graph)}

    def __getitem__(self, name: str) -> Tensor:
        slot = self.slots[name]
        value = self.reader(slot)
        assert value is not None, "`settled` has looked at what is there"
        return value.view(slot.shape)


@dataclass(slots=True)
class BoundText:
    """Some rows of a call, which are of one text."""

    start: int
    """Its first row."""
    rows: int
    """How many it has."""
    real: int
    """Of these, from the first on, that are tokens; the rest fills up."""
    first: int = 0
    """Position of its first row."""
    keys_values: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Layer -> its keys and values so far, (heads, tokens, dim) with room at the end, where tokens come one by one."""
    memory_values: dict[str, Tensor] = field(default_factory=dict)
    """Linear of `memory` -> what it made of it, (heads, tokens, dim)."""
    memory: Tensor | None = None
    """(1, tokens, hidden): what an encoder made of the text that is answered."""

    @property
    def slice(self) -> slice:
        """The slice of its rows."""
        return slice(self.start, self.start + self.rows)


Run = Callable[..., Any]
"""(texts, *activations) -> what an op writes: a tensor, or several."""


@dataclass(frozen=True, slots=True)
class BoundStep:
    """An op, or linears that run as one."""

    run: Run
    reads: tuple[str, ...]
    writes: tuple[str, ...]


def matmul_by(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """x (…, in) -> (…, out) by a matrix (out, in), packed where it can be."""
    weight = weight.contiguous()
    if weight.dtype not in PACKS or not torch.backends.mkldnn.is_available():
        return lambda x: functional.linear(x, weight, bias)
    # 64 is the number of rows for which oneDNN chooses the layout; other numbers are computed with it too.
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 64)
    multiply = torch.ops.mkldnn._linear_pointwise
    return lambda x: multiply(x, packed, bias, "none", [], "")


class Bound:
    """Layers that follow each other."""

    def __init__(self, graph: Graph, layers: Sequence[Layer], weights: BoundWeights, dtype: torch.dtype) -> None:
        """PlanError for a model with an op that has no function here."""
        check_runnable(graph)
        self.dtype = dtype
        self._weights, self._by_name = weights, dict[str, Tensor]()
        self.layers: list[tuple[list[BoundStep], dict[str, str], dict[str, str]]] = []
        for layer in layers:
            block = graph.block(layer.call.block)
            self.layers.append((self._steps(layer, block), reads(layer), writes(graph, layer)))
        del self._weights, self._by_name

    @torch.inference_mode()
    def run(self, values: Mapping[str, Any], texts: Sequence[BoundText]) -> dict[str, Any]:
        """Runs the layers. values: what they read, by full names. Returns those with what they made."""
        all_values = dict(values)
        for steps, read, written in self.layers:
            own = {name: all_values[source] for name, source in read.items()}
            for step in steps:
                out = step.run(texts, *[own[name] for name in step.reads])
                own.update(zip(step.writes, out if len(step.writes) > 1 else (out,), strict=True))
            for name, full in written.items():
                all_values[full] = own[name]
        return all_values

    # --- binding

    def _weight(self, layer: Layer, block: Block, name: str) -> Tensor:
        full = layer.call.parameter_name(name, layer.index)
        if full not in self._by_name:
            self._by_name[full] = self._weights[full].to(self.dtype)
        shape = [math.prod(atom.size or 1 for atom in dim.atoms) for dim in block.tensor(name).dims]
        return self._by_name[full].view(shape)

    def _steps(self, layer: Layer, block: Block) -> list[BoundStep]:
        steps, done = list[BoundStep](), set[str]()
        for op in block.ops:
            if op.path in done:
                continue
            alike = self._alike(block, op) if op.is_dense_linear else [op]
            done |= {one.path for one in alike}
            inputs = tuple(name for name in op.inputs if block.tensor(name).is_activation)
            run = self._linears(layer, block, alike) if op.is_dense_linear else self._op(layer, block, op)
            steps.append(BoundStep(run, inputs, tuple(out for one in alike for out in one.outputs)))
        return steps

    @staticmethod
    def _alike(block: Block, op: Op) -> list[Op]:
        """Linears that read what this one reads, from it on."""
        after = block.ops[block.ops.index(op) :]
        return [
            one
            for one in after
            if one.is_dense_linear and one.inputs[0] == op.inputs[0] and one.contracts == op.contracts
            and one.attrs == op.attrs
        ]  # fmt: skip

    def _linears(self, layer: Layer, block: Block, ops: Sequence[Op]) -> Run:
        """Side by side, as one product."""
        matrices, biases, outs, inner = [], [], [], 1
        for op in ops:
            site, weight = Site(op=op, block=block), self._weight(layer, block, op.inputs[1])
            out, inner = matrix_dims(block, op)
            flat = weight.reshape(math.prod(weight.shape[: site.weight_rows]), -1)
            matrices.append(flat.T if site.inner_first else flat)
            outs.append(out)
            bias = self._weight(layer, block, op.inputs[2]).flatten() if len(op.inputs) > 2 else None
            biases.append(bias)
        widths = [len(matrix) for matrix in matrices]
        whole = None
        if any(bias is not None for bias in biases):
            whole = torch.cat([
                torch.zeros(width, dtype=self.dtype) if bias is None else bias
                for bias, width in zip(biases, widths, strict=True)
            ])  # fmt: skip
        matmul = matmul_by(torch.cat(matrices) if len(matrices) > 1 else matrices[0], whole)
        factor = float(ops[0].attr("factor", 1.0))  # type: ignore[arg-type]

        def compute(x: Tensor) -> list[Tensor]:
            rows = matmul(x.flatten(-inner) if inner > 1 else x)
            rows = rows if factor == 1.0 else rows * factor
            parts = rows.split(widths, dim=-1)
            return [part.unflatten(-1, out) if len(out) > 1 else part for part, out in zip(parts, outs, strict=True)]

        if _is_memory(block, ops[0].inputs[0]):
            keys = [f"{layer.call.name}#{layer.index}.{op.path}" for op in ops]
            return lambda texts, x: _few(_remembered(texts, keys, compute))
        return (lambda texts, x: compute(x)[0]) if len(ops) == 1 else (lambda texts, x: compute(x))

    def _op(self, layer: Layer, block: Block, op: Op) -> Run:
        match op.does:
            case "attends":
                return self._attention(layer, block, op)
            case "looks up":
                return self._lookup(layer, block, op)
            case "normalises":
                return self._norm(layer, block, op)
            case "drops":
                return lambda texts, x: x
        site, function = Site(op=op, block=block), function_of(op.kind)
        weights = {n: self._weight(layer, block, n) for n in op.inputs if not block.tensor(n).is_activation}

        def run(texts: Sequence[BoundText], *inputs: Any) -> Any:
            own = iter(inputs)
            return function(site, *(weights[name] if name in weights else next(own) for name in op.inputs))

        return run

    def _norm(self, layer: Layer, block: Block, op: Op) -> Run:
        fn = op.attr("fn", "rms")
        weights = {name.rpartition(".")[2]: self._weight(layer, block, name) for name in op.inputs[1:]}
        weight, bias = weights.get("weight"), weights.get("bias")
        eps = float(op.attr("eps", 1e-5))  # type: ignore[arg-type]
        if op.attr("offset", 0.0) or fn not in ("rms", "layer"):
            raise PlanError(f"{op.path}: norms are by rms or layer, without an offset, not by {fn!r}")
        if fn == "layer":
            return lambda texts, x: functional.layer_norm(x, x.shape[-1:], weight, bias, eps)

        def rms(texts: Sequence[BoundText], x: Tensor) -> Tensor:
            wide = x.to(torch.promote_types(x.dtype, torch.float32))
            out = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
            out = out if weight is None else out * weight
            return out if bias is None else out + bias

        return rms

    def _lookup(self, layer: Layer, block: Block, op: Op) -> Run:
        place, table = op.inputs[0], self._weight(layer, block, op.inputs[1])
        if block.tensor(place).is_activation:
            return lambda texts, ids: functional.embedding(ids, table)
        if len(block.tensor(place).dims) == 1:

            def rows(texts: Sequence[BoundText]) -> Tensor:
                at = torch.cat([torch.arange(text.first, text.first + text.rows) for text in texts])
                return functional.embedding(places(block, place, at), table).unsqueeze(0)

            return rows
        buckets, farthest = len(table), int(str(op.attr("max_distance", 128)))
        two_sided = bool(op.attr("two_sided", False))

        def biases(texts: Sequence[BoundText]) -> list[Tensor]:
            """Returns for each text (queries, keys, heads): by how far its rows are from all tokens up to their
            last."""
            embedded = []
            for text in texts:
                queries = torch.arange(text.first, text.first + text.rows)
                keys = torch.arange(text.first + text.rows)
                embedded.append(
                    functional.embedding(
                        relative_buckets(keys, buckets, farthest, two_sided=two_sided, queries=queries), table
                    )
                )
            return embedded

        return biases

    def _attention(self, layer: Layer, block: Block, op: Op) -> Run:
        causal = bool(op.attr("causal", False))
        width = block.tensor(op.inputs[0]).dims[-1].size or 1
        scale = float(op.attr("scale", 0.0)) or width**-0.5  # type: ignore[arg-type]
        if op.attr("window", 0) or op.attr("softcap", 0.0) or op.attr("sinks", False):
            raise PlanError(f"{op.path}: windows, caps and sinks of attention are not of encoders or T5 here")
        key, over = f"{layer.call.name}#{layer.index}.{op.path}", _is_memory(block, op.inputs[1])

        def run(texts: Sequence[BoundText], q: Tensor, k: Any, v: Any, bias: Any = None) -> Tensor:
            out = q.new_empty((*q.shape[:-1], q.shape[-1]))
            for at, text in enumerate(texts):
                own = q[0, text.slice]
                if over:
                    keys, values = k[at], v[at]
                elif causal:
                    keys, values = _extended(text, key, k[0, text.slice], v[0, text.slice])
                else:
                    real = slice(text.start, text.start + text.real)
                    keys, values = k[0, real].transpose(0, 1), v[0, real].transpose(0, 1)
                mask, seen = None, keys.shape[1]
                if bias is not None:
                    # (queries, keys, heads) -> (heads, queries, keys), as scores lie.
                    mask = bias[at][:, :seen].movedim(-1, 0).to(q.dtype)
                if causal and text.rows > 1:
                    # Row r is at position first + r and sees keys up to its own: those from first + r + 1 on come
                    # later.
                    later = torch.ones((text.rows, seen), dtype=torch.bool).triu(text.first + 1)
                    mask = (q.new_zeros(()) if mask is None else mask).masked_fill(later, -math.inf)
                if text.rows == 1:
                    out[0, text.slice] = _of_one(own, keys, values, mask, scale)
                    continue
                mixed = functional.scaled_dot_product_attention(
                    own.transpose(0, 1), keys, values, attn_mask=mask, scale=scale
                )
                out[0, text.slice] = mixed.transpose(0, 1)
            return out

        return run


def _of_one(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attention of one query (1, heads, dim) to keys (heads, tokens, dim): for 256 of them and more PyTorch's fused
    kernel takes 1.5 to 12 times as long in bfloat16 (torch 2.13 on AVX-512). Probabilities are made in float32."""
    scores = torch.matmul(q.transpose(0, 1), keys.transpose(1, 2)) * scale
    if mask is not None:
        scores = scores + mask
    share = torch.softmax(scores, -1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    return torch.matmul(share, values).transpose(0, 1)


def _is_memory(block: Block, name: str) -> bool:
    """Whether a decoder's tensor has the encoder's tokens: those are of each text, and computed once."""
    own = next((out for out in block.outputs), "")
    has = any(dim.name == "enc_seq" for dim in block.tensor(name).dims)
    return has and not any(dim.name == "enc_seq" for dim in block.tensor(own).dims)


def _remembered(
    texts: Sequence[BoundText], keys: Sequence[str], compute: Callable[[Tensor], list[Tensor]]
) -> list[list[Tensor]]:
    """Returns for each text what linears made of its memory, those that are new together."""
    new = [(text, text.memory) for text in texts if keys[0] not in text.memory_values]
    if new:
        memories = [memory for _, memory in new if memory is not None]
        assert len(memories) == len(new), "a text whose encoder has not run"
        rows = [part.split([m.shape[1] for m in memories], 1) for part in compute(torch.cat(memories, 1))]
        for at, (text, _) in enumerate(new):  # each head's tokens follow each other, as every later token reads them
            text.memory_values.update(
                zip(keys, (part[at][0].transpose(0, 1).contiguous() for part in rows), strict=True)
            )
    return [[text.memory_values[key] for key in keys] for text in texts]


def _few(rows: list[list[Tensor]]) -> Any:
    """Turns lists by text into lists by linear; of one linear alone what it made."""
    turned = [list(one) for one in zip(*rows, strict=True)]
    return turned if len(turned) > 1 else turned[0]


ROOM = 64
"""Tokens by which keys and values grow at a time, at least; then by half of what they are."""


def _extended(text: BoundText, key: str, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values (heads, tokens, dim) of all tokens so far, the new ones (tokens, heads, dim) among them."""
    last = text.first + text.rows
    cached = text.keys_values.get(key)
    if cached is None or cached[0].shape[1] < last:
        room = last + max(ROOM, last // 2)
        grown = tuple(x.new_empty((x.shape[1], room, x.shape[2])) for x in (k, v))
        if cached is not None:
            for new, old in zip(grown, cached, strict=True):
                new[:, : text.first] = old[:, : text.first]
        cached = text.keys_values[key] = (grown[0], grown[1])
    cached[0][:, text.first : last], cached[1][:, text.first : last] = k.transpose(0, 1), v.transpose(0, 1)
    return cached[0][:, :last], cached[1][:, :last]
