"""Where the weights of a Graph lie in a folder in Hugging Face's layout: names, and which part of which tensor.

`layout_of(graph, family)` returns, for each parameter of the Graph, the `TensorPiece`s of file tensors that fill it:
most are one whole tensor of the same name; GPT-2's are transposed, Phi-3 joins q, k and v, and experts have a tensor
each. A piece is a view, so it is read and written by the same description. Pure: no tensors
(`gnomon.runtime.parameters.weights`). Source: the layouts that `save_pretrained` of transformers 5.23 writes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from gnomon.formats.huggingface.pieces import (
    Parameter,
    Rule,
    Shape,
    TensorPiece,
    channels,
    expert_each,
    part,
    projections,
    transposed,
    whole,
)
from gnomon.graph import Graph, matrix_rows


def parameters_of(graph: Graph) -> dict[str, Parameter]:
    """Every parameter of the Graph, frozen weights too, by full name."""
    parameters: dict[str, Parameter] = {}
    for layer in graph.layers():
        block = graph.block(layer.call.block)
        matrices = {op.inputs[1]: op for op in block.ops if op.contracts and op.does != "multiplies activations"}
        apart = {name for op in block.ops if op.does == "multiplies rows" for name in op.inputs[2:]}
        for tensor in (*block.parameters, *block.frozen):
            name = layer.call.parameter_name(tensor.name, layer.index)
            atoms = tuple(dim.size or 0 for dim in tensor.atoms)
            op = matrices.get(tensor.name)
            if op is None or op.does == "convolves":
                # A file has the bias of a linear in one dim, and that of experts with a row for each.
                joined = prod(atoms) if tensor.name.endswith(".bias") and tensor.name not in apart else None
                shape = (
                    (joined,) if joined is not None else tuple(prod(a.size or 0 for a in d.atoms) for d in tensor.dims)
                )
                rows = 0
            else:
                rows = sum(len(dim.atoms) for dim in tensor.dims[: matrix_rows(op, tensor.dims)])
                # Out dims joined and in dims joined, as torch.nn.Linear has them; experts stay a dim of their own
                # before these.
                first = 1 if op.does == "multiplies rows" else 0
                shape = (*atoms[:first], prod(atoms[first:rows]), prod(atoms[rows:]))
            parameters.setdefault(name, Parameter(name=name, atoms=atoms, shape=shape, rows=rows))
    return parameters


def _joined(names: Mapping[str, str]) -> Callable[[Mapping[str, Parameter]], dict[str, tuple[str, Rule]]]:
    """Linears that a file has as one, one after the other: theirs by ours, `q_proj k_proj v_proj` -> `qkv_proj`."""

    def rules(parameters: Mapping[str, Parameter]) -> dict[str, tuple[str, Rule]]:
        piece_rules: dict[str, tuple[str, Rule]] = {}
        for ours, theirs in names.items():
            first, *others = ours.split()
            for name in parameters:
                head, middle, tail = name.rpartition(f".{first}.")
                if not middle:
                    continue
                parts = [f"{head}.{part}.{tail}" for part in (first, *others)]
                sizes = [parameters[part].shape[0] for part in parts]
                for index, name in enumerate(parts):
                    piece_rules[name] = f"{head}.{theirs}.{tail}", part(sum(sizes[:index]), sum(sizes))
        return piece_rules

    return rules


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What tells a model type's files from its Graph's names."""

    names: tuple[tuple[str, str], ...] = ()
    """Patterns of our names and what stands in their place, applied in this order."""
    rules: tuple[tuple[str, Rule], ...] = ()
    """Patterns of our names and how their pieces lie; the first that is found counts."""
    fused_linears: Mapping[str, str] | None = None
    """Linears that are one in the file, one after the other."""
    together: tuple[Callable[[Mapping[str, Parameter]], dict[str, tuple[str, Rule]]], ...] = ()
    """Rules that look at all parameters: name -> (the file's, before `names`; how it lies there)."""
    ignored: tuple[str, ...] = ()
    """Patterns of tensors that some files have and no model reads: masks, tables of angles."""
    copies: tuple[tuple[str, str], ...] = ()
    """(their name, ours): second names of tied weights that some files have."""
    predictor: bool = False
    """Whether files have a multi-token prediction module after the last layer, which is part of the model only where
    its config says so (`mtp_num_layers`)."""

    @property
    def stored_transposed(self) -> bool:
        """Whether its linears are stored input by output, which PEFT calls `fan_in_fan_out`."""
        return any(rule is transposed for _, rule in self.rules)


EXPERTS = ((r"\.experts\.", expert_each),)
CONV1D = ((r"\.(c_attn|c_proj|c_fc)\.", transposed),)
TABLES = (r"rotary_emb\.inv_freq$", r"\.masked_bias$", r"\.attn(\.attention)?\.bias$", r"position_ids$")
"""What older releases wrote beside weights."""
HEAD = (("lm_head.weight", "model.embed_tokens.weight"),)

USUAL = Family(rules=EXPERTS, ignored=TABLES, copies=HEAD)
"""Of Llama and those that write as it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The places of a Graph's weights: the pieces of file tensors that fill each parameter."""

    pieces: Mapping[str, tuple[TensorPiece, ...]]
    """By parameter of the Graph."""
    ignored: tuple[str, ...] = ()
    """As in `Family`."""
    copies: Mapping[str, str] | None = None
    """As in `Family`: their name -> the tensor that it is a copy of."""
    four_bits: Mapping[str, Shape] = field(default_factory=dict)
    """Parameters that a folder has in NF4 (`four_bits`) and the shape of their matrix: their pieces are scales, codes
    and what these mean."""

    def tensors(self) -> dict[str, Shape]:
        """Every tensor that a folder must have, with its shape."""
        return {piece.tensor: piece.shape for pieces in self.pieces.values() for piece in pieces}

    def is_ignored(self, name: str) -> bool:
        """Whether a tensor of a file is one that no model reads."""
        return any(re.search(pattern, name) for pattern in self.ignored)


def layout_of(graph: Graph, family: Family) -> Layout:
    """Lays out a Graph that was read from a config.json of a type whose files are so."""
    known = parameters_of(graph)
    joined = (
        (_joined(family.fused_linears)(known) if family.fused_linears else {}) | channels(known) | projections(known)
    )
    for rules in family.together:
        joined |= rules(known)
    layout: dict[str, tuple[TensorPiece, ...]] = {}
    for name, parameter in known.items():
        theirs, rule = joined.get(name, (name, None))
        if rule is None:
            rule = next((rule for pattern, rule in family.rules if re.search(pattern, name)), whole)
        layout[name] = tuple(rule(_renamed(theirs, family.names), parameter))
    copies = {
        theirs: layout[ours][0].tensor for theirs, ours in family.copies if ours in layout and theirs not in layout
    }
    ignored = family.ignored
    if family.predictor:
        # The module is stored as one more layer, behind the last that the model has.
        numbers = [int(match[1]) for name in layout if (match := re.match(r"model\.layers\.(\d+)\.", name))]
        ignored = (*ignored, rf"^model\.layers\.{max(numbers, default=-1) + 1}\.")
        for name in [name for name in layout if name.endswith(".enorm.weight")]:  # a module's embedding and head
            own = name.removesuffix("enorm.weight")
            copies |= {f"{own}embed_tokens.weight": "model.embed_tokens.weight"}
            copies |= {f"{own}shared_head.head.weight": "lm_head.weight"}
    return Layout(pieces=layout, ignored=ignored, copies=copies)


def _renamed(name: str, names: Sequence[tuple[str, str]]) -> str:
    for pattern, other in names:
        name = re.sub(pattern, other, name)
    return name
