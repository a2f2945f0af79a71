"""An encoder that makes a vector of a text: `Encoder.open(folder, dtype)`, `embed(ids)`.

A folder of BERT's or RoBERTa's family; its head, if the files have one, is left out. What the last layer makes of the
tokens is pooled as sentence-transformers' `1_Pooling/config.json` says (the mean of them without one) and has length 1,
as OpenAI's vectors. A text is run by itself, at its own length, so that nothing is padded. Leaves out HTTP and text
(`embeddings`), and heads that classify.
Source: Reimers and Gurevych 2019 (pooling).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from gnomon.errors import InputError
from gnomon.formats.huggingface.known import layout
from gnomon.formats.huggingface.weights import Layout
from gnomon.graph import Graph
from gnomon.runtime.checkpoint.pretrained import model_of
from gnomon.runtime.module.apply import DTYPES
from gnomon.runtime.module.one_process import OneProcess
from gnomon.runtime.parameters.packed import open_folder
from gnomon.runtime.parameters.weights import WeightReader, settled

Pooling = Literal["mean", "cls", "max"]
POOLED = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls", "pooling_mode_max_tokens": "max"}
"""Keys of sentence-transformers -> what is done."""


def is_encoder(graph: Graph) -> bool:
    """Whether tokens see those after them, in a model that reads nothing but a text."""
    names = {tensor.name for tensor in graph.inputs} - {"labels"}
    attends = [op for block in graph.blocks for op in block.ops if op.does == "attends"]
    seen = bool(attends) and not any(op.attr("causal", False) for op in attends)
    return seen and names <= {"input_ids", "token_type_ids"} and "input_ids" in names


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


def _longest(graph: Graph) -> int:
    """Tokens that have a place in its tables of positions."""
    rows = [
        int(block.tensor(op.inputs[1]).dims[0].size or 0) - int(str(op.attr("first", 0)))
        for block in graph.blocks
        for op in block.ops
        if op.does == "looks up" and block.tensor(op.inputs[0]).kind != "activation"
    ]
    return min(rows, default=DEFAULT_LEN)


def pooling_of(folder: Path) -> Pooling:
    """InputError for one that is not known, or several together."""
    file = folder / "1_Pooling" / "config.json"
    if not file.is_file():
        return "mean"
    said = json.loads(file.read_text(encoding="utf-8"))
    wanted = [key for key, value in said.items() if key.startswith("pooling_mode") and value]
    if isinstance(mode := said.get("pooling_mode"), str):  # as newer releases write it
        wanted = [next((key for key, name in POOLED.items() if name == mode), mode)]
    if len(wanted) != 1 or wanted[0] not in POOLED:
        raise InputError(f"{file} asks for {', '.join(wanted) or 'nothing'}; one of {', '.join(POOLED)} is done")
    return POOLED[wanted[0]]  # type: ignore[return-value]


DEFAULT_LEN = 4096
"""Tokens of a text, of models without such tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """A model that is read."""

    model: OneProcess
    pooling: Pooling
    max_len: int
    """Tokens of a text."""
    vocab_size: int

    @staticmethod
    def open(folder: Path, dtype: str, max_len: int | None) -> Encoder:
        """max_len: tokens of a text; None: as many as the model has places for. InputError for weights that are not all
        there, a pooling that is not known, or more tokens than places."""
        known = model_of(folder)
        graph = headless(known.graph)
        where = layout(known.graph, known.model_type)
        own = {name: where.pieces[name] for name in graph.parameters()}
        # of other tensors a folder has a head, a pooler, or neither
        files = open_folder(folder)
        reader = WeightReader(files, settled(files, Layout(pieces=own, ignored=(r".",), copies={})))
        longest = _longest(graph)
        if max_len is not None and max_len > longest:
            raise InputError(f"max_model_len {max_len} is above the {longest} places of {graph.name}; lower it")
        table = next(op for block in graph.blocks for op in block.ops if op.inputs[:1] == ("input_ids",))
        block = next(block for block in graph.blocks if table in block.ops)
        return Encoder(
            model=OneProcess(graph, values=reader, dtype=DTYPES[dtype]),
            pooling=pooling_of(folder),
            max_len=max_len or longest,
            vocab_size=int(block.tensor(table.inputs[1]).dims[0].size or 0),
        )

    @torch.inference_mode()
    def embed(self, ids: list[int]) -> Tensor:
        """(hidden,), float32."""
        given = {"input_ids": torch.tensor([ids]), "token_type_ids": torch.zeros((1, len(ids)), dtype=torch.int64)}
        batch = {tensor.name: given[tensor.name] for tensor in self.model.graph.inputs}
        made = self.model.output(batch)[0].float()
        match self.pooling:
            case "cls":
                pooled = made[0]
            case "max":
                pooled = made.amax(0)
            case "mean":
                pooled = made.mean(0)
        return functional.normalize(pooled, dim=0)


assert set(POOLED.values()) == set(get_args(Pooling))
