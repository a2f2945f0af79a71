"""What tensors of a captured block are among the rows of its experts: integers by row, weights, stacks of matrices.

`RowFacts(block)` is told of ops in their order and keeps a `Fact` for each tensor that only says which row has which
expert, in which order rows are, and which weights are whose. Leaves out rows themselves and what is made of them
(`token_dispatch`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from gnomon.graph.types import Block
from gnomon.ops.op import Op
from gnomon.tensors.captured import Node, uses
from gnomon.tensors.dims import Dim
from gnomon.tensors.tensor import Tensor

VIEWED = ("view", "reshape", "_unsafe_view", "flatten")
PASSED = ("detach", "alias", "clone", "contiguous")
"""Ops that hand on what they read."""


@dataclass(frozen=True, slots=True)
class Fact:
    """What a tensor is among the rows of experts."""

    what: str
    """`chosen`, `perm`, `tokens`, `inverse`, `blank`, `counts`: integers by row; `weights` by row; `stack`: parameters;
    `gathered`: those of each row's expert; `rows`; `weighted`: rows times their weights."""
    of: str = ""
    """The indices (tokens, topk); of weights, the weights so; of a stack, the parameter; of rows, the tensor in the new
    block."""
    chosen: str = ""
    """Of rows, and what is gathered for them: the indices that say whose experts they are."""
    order: str = ""
    """The indices that rows are sorted by; none where they are in the order of tokens."""
    turned: bool = False
    """Of a stack: whether it is seen transposed."""


def work(op: Op) -> list[Node]:
    """Its ATen ops, without those that only hand on."""
    nodes = () if op.captured is None else op.captured.nodes
    return [node for node in nodes if base(node) not in PASSED] or list(nodes)


def base(node: Node) -> str:
    """Returns the operation's base name: `mul` of `aten.mul.Tensor`."""
    return node.target.split(".")[1]


def names(node: Node) -> tuple[str, ...]:
    """Tensors among its operands."""
    return tuple(uses(node.args))


def same_extent(a: Iterable[Dim], b: Iterable[Dim]) -> bool:
    """Whether two runs of dims have the same ones, of size 1 left out."""
    return [dim for dim in a if dim.size != 1] == [dim for dim in b if dim.size != 1]


class RowFacts:
    """Facts about the rows of one block, collected op by op."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.facts: dict[str, Fact] = {}
        self.chosen = self._chosen()
        """Integers by row -> the indices (tokens, topk) that they are."""

    def take(self, op: Op) -> bool:
        """Whether the op only makes such tensors; keeps what they are."""
        nodes = work(op)
        if len(op.outputs) > 1 and (not nodes or base(nodes[0]) != "sort"):
            return False
        return self._integers(op, nodes) or self._parameters(op, nodes) or self._flat(op, nodes)

    def _chosen(self) -> dict[str, str]:
        """Integers by row -> the indices (tokens, topk) that they are."""
        found = {}
        for op in self.block.ops:
            if op.rules.memory != "view" or op.captured is None or len(op.inputs) != 1 or len(op.outputs) != 1:
                continue
            before, after = self.block.tensor(op.inputs[0]), self.block.tensor(op.outputs[0])
            if self._flattens(before, after) and not before.is_float:
                found[after.name] = before.name
        return found

    def _flattens(self, before: Tensor, after: Tensor) -> bool:
        """Whether (tokens, topk) become rows."""
        return (
            len(before.dims) == 2
            and len(after.dims) == 1
            and before.dims[-1].size is not None
            and same_extent(before.atoms, after.atoms)
        )

    def fact(self, name: str, *what: str) -> Fact | None:
        fact = self.facts.get(name)
        return fact if fact is not None and fact.what in what else None

    def _integers(self, op: Op, nodes: list[Node]) -> bool:
        """Recognises the integers that say which expert a row has, and in which order rows are."""
        output = op.outputs[0]
        if output in self.chosen:
            self.facts[output] = Fact("chosen", self.chosen[output])
            return True
        if len(nodes) != 1 or not op.inputs:
            return False
        name, first = base(nodes[0]), self.facts.get(op.inputs[0])
        if first is None:
            return False
        match name, first.what:
            case "sort", "chosen" if len(op.outputs) == 2 and not first.order:
                self.facts[output] = replace(first, order=first.of)
                self.facts[op.outputs[1]] = Fact("perm", first.of)
            case "argsort", "chosen" if not first.order:
                self.facts[output] = Fact("perm", first.of)
            # Place k of the sorted rows is choice perm[k] = token x topk + place: its quotient by topk is the token.
            case (("floor_divide" | "div"), "perm"):
                self.facts[output] = Fact("tokens", first.of)
            # The other way to the inverse: an empty tensor, written at the places of the permutation.
            case "empty_like", "perm":
                self.facts[output] = Fact("blank", first.of)
            case (("index_put_" | "index_put"), "blank") if len(op.inputs) == 3 and self.fact(op.inputs[1], "perm"):
                self.facts[output] = Fact("inverse", first.of)
            # The argsort of a permutation is its inverse.
            case "argsort", "perm":
                self.facts[output] = Fact("inverse", first.of)
            case (("_to_copy" | "histc" | "bincount" | "cumsum"), ("chosen" | "counts")):
                self.facts[output] = Fact("counts", first.of)
            case _:
                return False
        return True

    def _parameters(self, op: Op, nodes: list[Node]) -> bool:
        """Weights of all experts, and those of each row's."""
        if len(nodes) != 1 or not op.inputs:
            return False
        node, first = nodes[0], op.inputs[0]
        parameter = self.block.tensor(first)
        stack = self.fact(first, "stack") or (Fact("stack", first) if parameter.kind == "parameter" else None)
        if stack is None or len(parameter.dims) not in (2, 3):
            return False
        if base(node) in ("transpose", "mT", "permute") and len(parameter.dims) == 3 and self._turns(op):
            self.facts[op.outputs[0]] = replace(stack, turned=not stack.turned)
            return True
        chosen = self.fact(op.inputs[1], "chosen") if len(op.inputs) == 2 else None
        if base(node) == "index" and chosen is not None and names(node) == op.inputs:
            self.facts[op.outputs[0]] = replace(stack, what="gathered", chosen=chosen.of, order=chosen.order)
            return True
        return False

    def _turns(self, op: Op) -> bool:
        """Whether a view changes the last two dims of three."""
        before, after = (self.block.tensor(name).dims for name in (op.inputs[0], op.outputs[0]))
        return len(after) == 3 and (before[0], before[1].size, before[2].size) == (
            after[0],
            after[2].size,
            after[1].size,
        )

    def _flat(self, op: Op, nodes: list[Node]) -> bool:
        """Recognises the weights of rows."""
        if len(nodes) != 1 or not op.inputs:
            return False
        name, source, output = base(nodes[0]), op.inputs[0], op.outputs[0]
        before, after = self.block.tensor(source), self.block.tensor(output)
        if name in VIEWED and before.is_float and source not in self.facts and self._flattens(before, after):
            if any(after.dims == self.block.tensor(flat).dims for flat in self.chosen):
                self.facts[output] = Fact("weights", source)
                return True
        fact = self.fact(source, "weights")
        if fact is None:
            return False
        if name == "unsqueeze" or (name == "_to_copy" and after.is_float):
            self.facts[output] = fact
            return True
        if name == "index" and len(op.inputs) == 2 and not fact.order and (perm := self.fact(op.inputs[1], "perm")):
            self.facts[output] = replace(fact, order=perm.of)
            return True
        return False

    def multiplied_by(self, rows: str) -> str | None:
        """Returns the integers by which the weights are gathered that the first matmul of these rows has."""
        names, gathered = {rows}, dict[str, str]()
        for op in self.block.ops:
            stacks = [name for name in op.inputs if name in self.chosen]
            if stacks and len(op.inputs) == 2 and self.block.tensor(op.inputs[0]).kind == "parameter":
                gathered[op.outputs[0]] = stacks[0]
            if not names & set(op.inputs):
                continue
            if found := next((gathered[name] for name in op.inputs if name in gathered), None):
                return found
            names |= set(op.outputs)
        return None


def alike(rows: Fact, gathered: Fact) -> bool:
    """Whether what was gathered is of these rows' experts, row by row."""
    return (rows.chosen, rows.order) == (gathered.chosen, gathered.order)
