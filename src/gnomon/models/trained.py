r"""A model of which some parameters are trained and the others read: frozen layers, embeddings, or all but a few names.

`with_trained(graph, trained)` returns the same model whose other parameters are states of the job, as those beside
adapters are (`models.lora`), so they have no gradient and no optimizer state. Layers that then differ become calls of
their own. Where nothing before a layer is trained, no gradient flows into it: its forward keeps nothing and it has no
backward. `parse_trained` reads the end of a model's name: `llama-3.1-8b+only:layers\.3[01]\.`. Leaves out rows of a
table that are trained apart from the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from gnomon.errors import GraphError
from gnomon.graph import Block, Call, Graph, gradients
from gnomon.ops.op import attrs

ONLY, FROZEN = "+only:", "+frozen:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """The choice of parameters that are trained."""

    patterns: tuple[str, ...] = ()
    r"""Regular expressions, of which one is found anywhere in the full name of a parameter that is trained, as in
    `layers\.3[01]\.`, or `^lm_head`; what matches none is frozen, but for what `frozen` leaves."""
    frozen: tuple[str, ...] = ()
    """Of parameters that are frozen unless `patterns` match them too; every other one is trained."""

    def __post_init__(self) -> None:
        if not (self.patterns or self.frozen):
            raise GraphError("a model is trained in part by names; give patterns, as in +only:lm_head")
        for pattern in (*self.patterns, *self.frozen):
            try:
                re.compile(pattern)
            except re.error as error:
                raise GraphError(f"{pattern!r} is no regular expression of names: {error}") from error

    def __str__(self) -> str:
        frozen = f"{FROZEN}{','.join(self.frozen)}" if self.frozen else ""
        return frozen + (f"{ONLY}{','.join(self.patterns)}" if self.patterns else "")

    def of(self, name: str) -> bool:
        """Whether the parameter of that full name is trained."""
        if any(re.search(pattern, name) for pattern in self.patterns):
            return True
        return bool(self.frozen) and not any(re.search(pattern, name) for pattern in self.frozen)


def parse_trained(name: str) -> tuple[str, Trained | None]:
    """(name of the model, what of it is trained) of `llama-3.1-8b+only:lm_head` or `+frozen:embed_tokens`; None where
    the name has no such end."""
    start, _, patterns = name.partition(ONLY)
    model, _, frozen = start.partition(FROZEN)
    if model == name:
        return name, None
    return model, Trained(patterns=_split(patterns), frozen=_split(frozen))


def _split(patterns: str) -> tuple[str, ...]:
    return tuple(part for part in patterns.split(",") if part)


def with_trained(graph: Graph, trained: Trained) -> Graph:
    """`graph` with its other parameters frozen. GraphError where nothing of it is trained, with some of its names."""
    parts = _Parts(graph, trained)
    calls = tuple(part for call in graph.calls for part in parts.calls(call))
    if not any(block.parameters for block in parts.blocks.values()):
        names = parameter_names(graph)
        raise GraphError(
            f"no parameter of {graph.name} is left to train by {str(trained)!r}; its names are as {names[0]}, "
            f"{names[len(names) // 2]}, {names[-1]}"
        )
    used = {call.block for call in calls}
    blocks = tuple(block for block in parts.blocks.values() if block.name in used)
    outputs = tuple(parts.renamed(source) for source in graph.outputs)
    return replace(graph, name=f"{graph.name}{trained}", blocks=blocks, calls=calls, outputs=outputs)


def parameter_names(graph: Graph) -> list[str]:
    """Full names of a model's parameters, in its order."""
    return [
        layer.call.parameter_name(tensor.name, layer.index)
        for layer in graph.layers()
        for tensor in graph.block(layer.call.block).parameters
    ]


class _Parts:
    """Calls and blocks as they come to differ, in order of the graph."""

    def __init__(self, graph: Graph, trained: Trained) -> None:
        self.graph, self.trained = graph, trained
        self.blocks: dict[str, Block] = {}
        self.last: dict[str, str] = {}
        """Call -> the last of those that it became."""
        self.ungraded = {graph_input.name for graph_input in graph.inputs}

    def renamed(self, source: str) -> str:
        """A source where it is made now."""
        call, dot, tensor = source.partition(".")
        return f"{self.last.get(call, call)}{dot}{tensor}"

    def calls(self, call: Call) -> Iterator[Call]:
        """The parts of a call, each of layers of which the same is trained."""
        block = self.graph.block(call.block)
        inputs = tuple((own, self.renamed(source)) for own, source in call.inputs)
        parts = [*self._runs(call, block)]
        start, before = 0, ""
        for trained_names, count in parts:
            if before:
                chained = {own: f"{before}.{out}" for out, own in call.chain}
                inputs = tuple((own, chained.get(own, source)) for own, source in inputs)
            graded = self._flows(block, trained_names, inputs)
            # where gradients begin, a first layer has none of its input, and the next one has
            for size in (1, count - 1) if count > 1 and graded and self._begins(call, inputs) else (count,):
                placed = self._placed(
                    call, block, trained_names, start, size, inputs, whole=len(parts) == 1 and size == count
                )
                yield placed
                start, before = start + size, placed.name
                self._note(placed, trained_names, graded)
                chained = {own: f"{before}.{out}" for out, own in call.chain}
                inputs = tuple((own, chained.get(own, source)) for own, source in inputs)
        self.last[call.name] = before

    def _runs(self, call: Call, block: Block) -> Iterator[tuple[frozenset[str], int]]:
        """(parameters that are trained, layers one after the other)."""
        run: tuple[frozenset[str], int] | None = None
        for index in range(call.repeat):
            names = frozenset(t.name for t in block.parameters if self.trained.of(call.parameter_name(t.name, index)))
            if run is not None and run[0] != names:
                yield run
                run = None
            run = (names, 1 if run is None else run[1] + 1)
        assert run is not None
        yield run

    def _begins(self, call: Call, inputs: tuple[tuple[str, str], ...]) -> bool:
        """Whether what the call passes on from layer to layer comes into it without gradients."""
        passed = {own for _, own in call.chain}
        return any(own in passed and source in self.ungraded for own, source in inputs)

    def _flows(self, block: Block, trained_names: frozenset[str], inputs: tuple[tuple[str, str], ...]) -> bool:
        """Whether what a block writes has gradients."""
        still = tuple(t.name for t in block.parameters if t.name not in trained_names)
        ungraded = tuple(own for own, source in inputs if source in self.ungraded)
        return bool(gradients(block, still, ungraded) & set(block.outputs))

    def _note(self, new_call: Call, trained_names: frozenset[str], graded: bool) -> None:
        if not graded:
            self.ungraded |= {f"{new_call.name}.{name}" for name in self.blocks[new_call.block].outputs}

    def _placed(
        self,
        call: Call,
        block: Block,
        trained_names: frozenset[str],
        start: int,
        size: int,
        inputs: tuple[tuple[str, str], ...],
        *,
        whole: bool,
    ) -> Call:
        """So many layers of a call from `start` on. whole: all of them."""
        frozen = _frozen(block, trained_names)
        name = frozen.name
        # Layers frozen in the same way share a block; one that is frozen in another way gets a name of its own.
        while name in self.blocks and replace(self.blocks[name], name=frozen.name) != frozen:
            name += "_"
        self.blocks[name] = replace(frozen, name=name)
        if whole:
            return replace(call, block=name, inputs=inputs)
        prefix = call.group if call.prefix is None else call.prefix
        return replace(
            call,
            block=name,
            name=call.name if not start else f"{call.name}_{start}",
            inputs=inputs,
            repeat=size,
            chain=call.chain if size > 1 else (),
            first=None if call.first is None else call.first + start,
            family=call.group,
            prefix=prefix,
        )


def _frozen(block: Block, trained_names: frozenset[str]) -> Block:
    """The block with its other parameters as states of the job; a table that is not trained asks for no gradients."""
    tensors = tuple(
        replace(t, kind="state", lifetime="job", dtype="compute")
        if t.kind == "parameter" and t.name not in trained_names
        else t
        for t in block.tensors
    )
    still = {t.name for t in block.parameters if t.name not in trained_names}
    ops = tuple(
        replace(op, attrs=attrs(**dict(op.attrs), no_grad=True))
        if op.does == "looks up" and still & {*op.inputs}
        else op
        for op in block.ops
    )
    return replace(block, tensors=tensors, ops=ops)
