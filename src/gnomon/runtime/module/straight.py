"""The ops of a block as one Python function, so that little is decided between two of them.

`straight(name, ops, calls, given_names)` writes a line for each op that reads what others made and moves nothing
between ranks, and calls `do` of the run for the rest: products with weights, experts, what needs no gradient. Arguments
that never change are worked out once; names go in as literals, so that nothing of a Graph is run as code. Leaves out
what looks at each op (`prove`, rules of what is kept), which `BlockRun.run` does one by one.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Mapping, Sequence
from keyword import iskeyword
from typing import Any, Protocol

from torch import Tensor

from gnomon.graph import Literal, Use
from gnomon.runtime.module.block_ops import BlockOp, OpInput
from gnomon.runtime.ops import function_of
from gnomon.runtime.ops.captured import AtenCall
from gnomon.runtime.ops.site import Operand, read


class Running(Protocol):
    """A run of a block (`blocks.Frame`)."""

    def do(self, op: BlockOp, *, again: bool) -> Mapping[str, Tensor]:
        """Runs one op that is left to the run."""

    def operand(self, op: BlockOp, op_input: OpInput | str) -> Operand:
        """What an op reads."""


Straight = Callable[[Running, dict[str, Tensor]], None]
"""(run, its tensors by name): runs all ops."""


def straight(
    name: str, ops: Sequence[BlockOp], calls: Mapping[str, list[AtenCall]], given_names: frozenset[str]
) -> Straight:
    """Writes a block's ops, in their order, as straight code without lookups. calls: of captured ones by path.
    given_names: inputs of the block that are the batch's (`site`); what reads them, and what is made of them, is left
    to the run."""
    text, of_batch, trained = _Text(), set(given_names), set[str]()
    for op in ops:
        aten_calls = calls.get(op.site.op.path)
        plain = not op.no_grad and op.stays and of_batch.isdisjoint(op.site.op.inputs)
        tensors = (op.site.block.tensor(x) for x in op.inputs if isinstance(x, str))
        # As `captured` decides when it runs: what comes of the batch alone needs no gradient, and what a parameter went
        # into does.
        if any(tensor.kind == "parameter" for tensor in tensors) or not trained.isdisjoint(op.site.op.inputs):
            trained.update(op.site.op.outputs)
        elif not of_batch.isdisjoint(op.site.op.inputs):
            of_batch.update(op.site.op.outputs)
        if plain and (text.captured(op, aten_calls) if aten_calls is not None else text.kind(op)):
            for tensor in op.last:
                text.line(f"v.pop({tensor!r}, None)")
        else:
            text.line(f"frame.do({text.name(op)}, again=False)")
    return text.block(name)


class _Text:
    """Lines, and what they name."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.known: dict[str, Any] = {"read": read}

    def line(self, text: str) -> None:
        self.lines.append(f"    {text}")

    def name(self, value: Any) -> str:
        """Gives a constant a name in the text."""
        name = f"c{len(self.known)}"
        self.known[name] = value
        return name

    def block(self, name: str) -> Straight:
        source = "\n".join(("def block(frame, v):", *self.lines, "    return"))
        file = f"<ops of {name}>"
        linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file  # for tracebacks
        exec(compile(source, file, "exec"), self.known)
        straight_run: Straight = self.known["block"]
        return straight_run

    def kind(self, op: BlockOp) -> bool:
        """An op with a function of ours; False where it is left to the frame."""
        site = op.site
        if site.op.rules.runs == "engine" or site.op.rules.documents:
            return False
        operands = [self._operand(op, name, isinstance(op_input, str)) for name, op_input in self._inputs(op)]
        called = f"{self.name(function_of(site.op.kind))}({', '.join((self.name(site), *operands))})"
        self._results(site.op.outputs, called, many=len(site.op.outputs) > 1)
        return True

    def captured(self, op: BlockOp, calls: Sequence[AtenCall]) -> bool:
        """The same of ATen ops."""
        inputs = self._inputs(op)
        if any(call.node.read_values is not None or call.shape is not None or not _writable(call) for call in calls):
            return False
        outputs = op.site.op.outputs
        where = {name: f"v[{name!r}]" for name, given_ in inputs if not isinstance(given_, str)}
        for name, given_ in inputs:
            if isinstance(given_, str):
                where[name] = local = f"p{len(where)}"
                self.line(f"{local} = read({self._operand(op, name, True)})")
        inner = []
        for call in calls:
            args = [self._written(x, where) for x in call.args]
            args += [f"{name}={self._written(x, where)}" for name, x in call.kwargs.items()]
            called, node = f"{self.name(call.function)}({', '.join(args)})", call.node
            saved_outputs = [name for name in node.outputs if name]
            for name in saved_outputs:
                where[name] = f"v[{name!r}]" if name in outputs else f"t{len(where)}"
                if name not in outputs:
                    inner.append(where[name])
            if not saved_outputs:
                self.line(called)
            elif node.many:
                self.line(f"o = {called}")
                for index, name in enumerate(node.outputs):
                    if name:
                        self.line(f"{where[name]} = o[{index}]")
                inner.append("o")
            else:
                self.line(f"{where[saved_outputs[0]]} = {called}")
        for name in outputs:
            if where[name] != f"v[{name!r}]":  # an input that is handed on
                self.line(f"v[{name!r}] = {where[name]}")
        inner += [local for local in where.values() if local.startswith("p")]
        # Locals of the function would hold their tensors until the end of the block.
        if inner:
            self.line(f"del {', '.join(dict.fromkeys(inner))}")
        return True

    def _inputs(self, op: BlockOp) -> list[tuple[str, Any]]:
        return list(zip(op.site.op.inputs, op.inputs, strict=True))

    def _operand(self, op: BlockOp, name: str, by_operand: bool) -> str:
        return f"frame.operand({self.name(op)}, {name!r})" if by_operand else f"v[{name!r}]"

    def _results(self, names: Sequence[str], called: str, *, many: bool) -> None:
        if many:
            self.line(f"{', '.join(f'v[{name!r}]' for name in names)} = {called}")
        else:
            self.line(f"v[{names[0]!r}] = {called}")

    def _written(self, x: Any, where: Mapping[str, str]) -> str:
        if isinstance(x, Use):
            return where[x.name]
        if isinstance(x, list) and any(isinstance(inner, (Use, list)) for inner in x):
            return f"[{', '.join(self._written(inner, where) for inner in x)}]"
        if x is None or isinstance(x, (bool, int)):
            return repr(x)
        # Floats too: inf and nan have no literal.
        return self.name(x)


def _writable(call: AtenCall) -> bool:
    """Whether its arguments can stand in a line: no tensor is written out, and names are names."""
    whole = not any(_written_out(x) for x in (*call.args, *call.kwargs.values()))
    return whole and all(name.isidentifier() and not iskeyword(name) for name in call.kwargs)


def _written_out(x: Any) -> bool:
    return any(map(_written_out, x)) if isinstance(x, list) else isinstance(x, Literal)
