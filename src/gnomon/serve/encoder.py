"""An encoder that makes a vector of a text, or says of which class it is: `Encoder.open(folder, dtype, max_len)`.

A folder of BERT's or RoBERTa's family. `embed(text)`: what the last layer makes of the tokens, pooled as
sentence-transformers' `1_Pooling/config.json` says (the mean of them without one), of length 1 as OpenAI's vectors; the
folder's own head, if it has one, is left out. Of a classifier (`*ForSequenceClassification`) `classify(text)` are the
chances of its classes. A text is computed at its own length, or padded to that of a runtime (`serving.dispatch`); what
fills it up is seen by nobody. Leaves out HTTP and text (`embeddings`, `classes`).
Source: Reimers and Gurevych 2019 (pooling).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from gnomon.errors import InputError
from gnomon.formats.huggingface.known import layout
from gnomon.formats.huggingface.runnable import classifies
from gnomon.formats.huggingface.weights import Layout
from gnomon.graph import Graph
from gnomon.runtime.checkpoint.pretrained import CONFIG, model_of
from gnomon.runtime.module.apply import DTYPES
from gnomon.runtime.parameters.packed import open_folder
from gnomon.runtime.parameters.weights import WeightReader, settled
from gnomon.serve.bound import Bound, BoundParameters, BoundText

Pooling = Literal["mean", "cls", "max"]
POOLED = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls", "pooling_mode_max_tokens": "max"}
"""Keys of sentence-transformers -> what is done."""
Activation = Literal["softmax", "sigmoid", "identity"]
"""Of a classifier's logits, as `problem_type` asks for it: one class, several at once, or a number."""


def headless(graph: Graph) -> Graph:
    """What the last layer makes of the tokens, in place of a loss on them."""
    head = next(call for call in graph.calls if graph.outputs[0].startswith(f"{call.name}."))
    calls = tuple(call for call in graph.calls if call is not head)
    read, used = {source for call in calls for _, source in call.inputs}, {call.block for call in calls}
    return replace(
        graph,
        blocks=tuple(block for block in graph.blocks if block.name in used),
        calls=calls,
        inputs=tuple(tensor for tensor in graph.inputs if tensor.name in read),
        outputs=(dict(head.inputs)["x"],),
    )


def longest_of(graph: Graph) -> int:
    """Tokens that have a place in its tables of positions."""
    rows = [
        int(block.tensor(op.inputs[1]).dims[0].size or 0) - int(str(op.attr("first", 0)))
        for block in graph.blocks
        for op in block.ops
        if op.does == "looks up" and not block.tensor(op.inputs[0]).is_activation
    ]
    return min(rows, default=DEFAULT_LEN)


def pooling_of(folder: Path) -> Pooling:
    """InputError for one that is not known, or several together."""
    file = folder / "1_Pooling" / "config.json"
    if not file.is_file():
        return "mean"
    config = json.loads(file.read_text(encoding="utf-8"))
    modes = [key for key, value in config.items() if key.startswith("pooling_mode") and value]
    if isinstance(mode := config.get("pooling_mode"), str):  # as newer releases write it
        modes = [next((key for key, name in POOLED.items() if name == mode), mode)]
    if len(modes) != 1 or modes[0] not in POOLED:
        raise InputError(f"{file} asks for {', '.join(modes) or 'nothing'}; one of {', '.join(POOLED)} is done")
    return POOLED[modes[0]]  # type: ignore[return-value]


DEFAULT_LEN = 4096
"""Tokens of a text, of models without such tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderKind:
    """What a folder's encoder is, before its weights are read."""

    graph: Graph
    """That is computed."""
    model_type: str
    """As its config.json says."""
    pooling: Pooling
    """What a text's vector is made of."""
    labels: tuple[str, ...]
    """Of a classifier's classes; () for vectors."""
    activation: Activation
    """What classes' scores go through."""
    max_len: int
    """Tokens of a text."""
    vocab_size: int
    """Rows of its table of words."""
    token_types: int
    """Which text of a pair a token may be said to be of; RoBERTa has one, and tells pairs by a token between them."""

    @staticmethod
    def of(folder: Path, max_len: int | None) -> EncoderKind:
        """Reads what a folder's encoder is. max_len: tokens of a text; None: as many as the model has places for.
        InputError for a pooling or a problem that is not known, or more tokens than places."""
        text = ((folder if folder.is_dir() else folder.parent) / CONFIG).read_text(encoding="utf-8")
        classifier = classifies(text)
        known = model_of(folder, classifier=classifier)
        graph = known.graph if classifier else headless(known.graph)
        longest = longest_of(graph)
        if max_len is not None and max_len > longest:
            raise InputError(f"max_model_len {max_len} is above the {longest} places of {graph.name}; lower it")
        table = next(op for block in graph.blocks for op in block.ops if op.inputs[:1] == ("input_ids",))
        block = next(block for block in graph.blocks if table in block.ops)
        labels = _labels(graph, json.loads(text)) if classifier else ()
        return EncoderKind(
            graph=graph,
            model_type=known.model_type,
            pooling="mean" if classifier else pooling_of(folder),
            labels=labels,
            activation=_activation(json.loads(text), len(labels)),
            max_len=max_len or longest,
            vocab_size=int(block.tensor(table.inputs[1]).dims[0].size or 0),
            token_types=_token_types(graph),
        )


def _token_types(graph: Graph) -> int:
    """Rows of the table of token types; 1 without one."""
    for block in graph.blocks:
        for op in block.ops:
            if op.does == "looks up" and op.inputs[0] == "token_type_ids":
                return int(block.tensor(op.inputs[1]).dims[0].size or 1)
    return 1


def _labels(graph: Graph, values: Mapping[str, object]) -> tuple[str, ...]:
    """Names the classes as the file does, or as transformers does."""
    count = int(graph.source(graph.outputs[0])[1].dims[-1].size or 0)
    named = values.get("id2label")
    label_names = {str(key): str(value) for key, value in named.items()} if isinstance(named, dict) else {}
    return tuple(label_names.get(str(at), f"LABEL_{at}") for at in range(count))


def _activation(values: Mapping[str, object], classes: int) -> Activation:
    match values.get("problem_type"):
        case None:
            return "softmax" if classes > 1 else "sigmoid"
        case "single_label_classification":
            return "softmax"
        case "multi_label_classification":
            return "sigmoid"
        case "regression":
            return "identity"
        case other:
            raise InputError(f"problem_type {str(other)[:60]!r} is not known; transformers has single_label_"
                             "classification, multi_label_classification and regression")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """A model that is read."""

    model: Bound
    """Its ops, with their weights."""
    kind: EncoderKind
    """What it is."""

    @staticmethod
    def open(folder: Path, dtype: str, max_len: int | None) -> Encoder:
        """InputError as `EncoderKind.of` has them, and for weights that are not all there."""
        kind = EncoderKind.of(folder, max_len)
        whole = model_of(folder, classifier=bool(kind.labels)).graph
        where = layout(whole, kind.model_type)
        own = {name: where.pieces[name] for name in kind.graph.parameters()}
        # of other tensors a folder has a head, a pooler, or neither
        files = open_folder(folder)
        reader = WeightReader(files, settled(files, Layout(pieces=own, ignored=(r".",), copies={})))
        graph = kind.graph
        return Encoder(model=Bound(graph, graph.layers(), BoundParameters(reader, graph), DTYPES[dtype]), kind=kind)

    @property
    def max_len(self) -> int:
        """Tokens of a text."""
        return self.kind.max_len

    def embed(self, ids: list[int], tokens: int = 0) -> Tensor:
        """Returns the vector (hidden,) of a text, float32. tokens: that the text is padded to; 0: its own."""
        # Rows that fill up have states too, and are no part of the vector.
        states = self._run(ids, None, tokens)[0, : len(ids)].float()
        match self.kind.pooling:
            case "cls":
                pooled = states[0]
            case "max":
                pooled = states.amax(0)
            case "mean":
                pooled = states.mean(0)
        return functional.normalize(pooled, dim=0)

    def classify(self, ids: list[int], types: list[int] | None = None, tokens: int = 0) -> Tensor:
        """Returns (classes,), float32: their chances, or the numbers of a regression. types: of the tokens, 0 or 1;
        None: 0."""
        logits = self._run(ids, types, tokens)[0].float()
        match self.kind.activation:
            case "softmax":
                return logits.softmax(-1)
            case "sigmoid":
                return logits.sigmoid()
            case "identity":
                return logits

    @torch.inference_mode()
    def _run(self, ids: list[int], types: list[int] | None, tokens: int) -> Tensor:
        """Returns the graph's output. Rows that fill up are token 0."""
        rows = max(tokens, len(ids))
        inputs = torch.zeros((2, 1, rows), dtype=torch.int64)
        inputs[0, 0, : len(ids)] = torch.tensor(ids)
        if types is not None and max(types) < self.kind.token_types:
            inputs[1, 0, : len(ids)] = torch.tensor(types)
        graph, names = self.kind.graph, ("input_ids", "token_type_ids")
        input_names = {tensor.name for tensor in graph.inputs}
        batch = {name: x for name, x in zip(names, inputs, strict=True) if name in input_names}
        output: Tensor = self.model.run(batch, [BoundText(start=0, rows=rows, real=len(ids))])[graph.outputs[0]]
        return output


assert set(POOLED.values()) == set(get_args(Pooling))
