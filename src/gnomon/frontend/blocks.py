"""A trace as a Graph: which steps matter, which belong together, and which are the same layer again.

`graph_of(…)` drops steps that nothing reads, cuts the rest where a repeated module begins and ends (`model.layers.3`),
writes each part as a Block, stores equal ones once and joins neighbours that feed each other into one Call. Leaves out
what is inside a block (`convert`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

from torch import nn

from gnomon.frontend.convert import Converter, refs
from gnomon.frontend.draft import DraftPart
from gnomon.frontend.records import ForwardTrace, Step
from gnomon.frontend.write import write_block
from gnomon.graph import Block, Call, Graph, Tensor
from gnomon.tensors.captured import Node, mutates


def live_steps(trace: ForwardTrace) -> list[Step]:
    """Steps that an output depends on, that write into memory that does, or that Python reads, in order."""
    live_values = set(trace.outputs)
    memory = {trace.values[i].storage for i in live_values}
    live: list[Step] = []
    for step in reversed(trace.steps):
        outs = {o for node in step.nodes for o in node.outs if o is not None}
        written = {
            trace.values[refs(node)[0]].storage
            for node in step.nodes
            if refs(node) and mutates(Node(target=node.target, args=()))
        }
        if not (outs & live_values or written & memory or any(node.read_values is not None for node in step.nodes)):
            continue
        live.append(step)
        for node in step.nodes:
            for index in refs(node):
                live_values.add(index)
                memory.add(trace.values[index].storage)
    return live[::-1]


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbouring steps that become one block."""

    steps: tuple[Step, ...]
    container: str
    """`model.layers`; empty for steps that no repeated module holds."""
    index: int
    """Which of its modules."""

    @property
    def prefix(self) -> str:
        """The prefix of its parameters' names."""
        return f"{self.container}.{self.index}" if self.container else ""


def repeated(module: nn.Module) -> list[str]:
    """Names of lists of modules of which at least two neighbours are alike, outermost only."""
    names: list[str] = []

    def visit(name: str, child: nn.Module) -> None:
        parts = list(child.named_children())
        if len(parts) > 1 and all(key.isdigit() for key, _ in parts) and _alike([m for _, m in parts]):
            names.append(name)
            return
        for key, inner in parts:
            visit(f"{name}.{key}" if name else key, inner)

    visit("", module)
    return names


def _alike(modules: Sequence[nn.Module]) -> bool:
    """Whether two neighbours have the same parameters, and some; or, with others, are of one class that is not torch's:
    layers of which one computes what all read, or a part of which is of another kind."""
    shapes = [(type(m), [(n, tuple(p.shape)) for n, p in m.named_parameters()]) for m in modules]
    big = [shape for shape in shapes if len(shape[1]) > 2]
    own = [a[0] is b[0] and not a[0].__module__.startswith("torch.") for a, b in zip(big, big[1:], strict=False)]
    return any(own) or any(a == b for a, b in zip(big, big[1:], strict=False))


def segments(steps: Sequence[Step], containers: Sequence[str]) -> list[Segment]:
    """The steps cut where a module of a container begins or ends."""
    ordered = sorted(containers, key=len, reverse=True)
    patterns = [(name, re.compile(rf"{re.escape(name)}\.(\d+)(\.|$)" if name else r"(\d+)(\.|$)")) for name in ordered]

    def place(step: Step) -> tuple[str, int]:
        for name, pattern in patterns:
            match = pattern.match(step.module)
            if match:
                return name, int(match[1])
        return "", 0

    groups: list[tuple[tuple[str, int, int], list[Step]]] = []
    for step in steps:
        container, index = place(step)
        element = f"{container}.{index}" if container else str(index)
        key = (container, index, next((turn for name, turn in step.turns if name == element), 0))
        if groups and groups[-1][0][:2] == key[:2] and (not key[0] or groups[-1][0] == key):
            groups[-1][1].append(step)
        else:
            groups.append((key, [step]))
    return [Segment(tuple(grouped_steps), key[0], key[1]) for key, grouped_steps in groups]


@dataclass(slots=True)
class PlacedSegment:
    """A segment as a block in the graph."""

    segment: Segment
    """Its steps."""
    part: DraftPart
    """The block as it was written for this segment."""
    name: str
    """Of a call."""
    block: str
    """The first block that is equal."""


def graph_of(
    name: str,
    converter: Converter,
    trace: ForwardTrace,
    live: Sequence[Step],
    containers: Sequence[str],
    inputs: Mapping[int, str],
) -> tuple[Graph, list[PlacedSegment]]:
    """(the Graph, its layers in order). inputs: name of each input value."""
    parts = segments(live, containers)
    makers = {o: i for i, p in enumerate(parts) for s in p.steps for n in s.nodes for o in n.outs if o is not None}
    read: dict[int, set[int]] = {}
    for place, part in enumerate(parts):
        for step in part.steps:
            for node in step.nodes:
                for index in refs(node):
                    read.setdefault(index, set()).add(place)
    placed: list[PlacedSegment] = []
    blocks: list[Block] = []
    names: dict[str, int] = {}
    for place, part in enumerate(parts):
        live_outputs = {
            v for v, at in makers.items() if at == place and (read.get(v, set()) - {place} or v in trace.outputs)
        }
        label = _label(part, place, len(parts), names)
        written = write_block(converter, part.steps, part.prefix, label, live_outputs)
        same = next((b for b in reversed(blocks) if replace(written.block, name=b.name) == b), None)
        if same is None:
            blocks.append(written.block)
        placed.append(PlacedSegment(part, written, label, same.name if same else label))
    calls = _calls(placed, trace, inputs)
    tensors = tuple(
        Tensor(name=input_name, dims=converter.dims(index), dtype=converter.dtype(index))
        for index, input_name in inputs.items()
    )
    sources = _sources(placed, calls)
    outputs = tuple(sources[index] for index in trace.outputs if index in sources)
    return Graph(name=name, inputs=tensors, blocks=tuple(blocks), calls=tuple(calls), outputs=outputs), placed


def _label(part: Segment, place: int, count: int, names: dict[str, int]) -> str:
    stem = part.container.rpartition(".")[2] or (
        "embed" if place == 0 and count > 1 else "head" if place == count - 1 else "middle"
    )
    stem = re.sub(r"[^A-Za-z0-9_\-]", "_", stem)
    stem = stem if re.match(r"[A-Za-z_]", stem) else f"m{stem}"
    names[stem] = names.get(stem, 0) + 1
    return stem if names[stem] == 1 else f"{stem}_{names[stem]}"


def _runs(placed: Sequence[PlacedSegment]) -> Iterator[list[PlacedSegment]]:
    """Neighbours that are one Call: equal blocks with rising indices, each fed by the one before and by the same
    other values."""
    run: list[PlacedSegment] = []
    for p in placed:
        if run and _continues(run, p):
            run.append(p)
            continue
        if run:
            yield run
        run = [p]
    if run:
        yield run


def _continues(run: Sequence[PlacedSegment], p: PlacedSegment) -> bool:
    last = run[-1]
    same = p.block == last.block and p.segment.container == last.segment.container != ""
    if not same or p.segment.index != last.segment.index + 1 or p.part.params != last.part.params:
        return False
    if any(p.part.params):  # parameters of other modules: their names do not follow from an index
        return False
    own_names = {value: own for own, value in last.part.outputs}
    before = dict(last.part.inputs)
    chain = [(own_names[value], own) for own, value in p.part.inputs if value in own_names]
    if not chain or any(before[own] != value for own, value in p.part.inputs if value not in own_names):
        return False
    return len(run) == 1 or chain == _chain(run[-2], last)


def _chain(a: PlacedSegment, b: PlacedSegment) -> list[tuple[str, str]]:
    own_names = {value: own for own, value in a.part.outputs}
    return [(own_names[value], own) for own, value in b.part.inputs if value in own_names]


def _calls(placed: Sequence[PlacedSegment], trace: ForwardTrace, inputs: Mapping[int, str]) -> list[Call]:
    """Lists the calls in order. A run's outputs are those of its last repeat; a value of an earlier one that others
    read breaks the run."""
    runs = [part for run in _runs(placed) for part in _unread(run, placed, trace.outputs)]
    calls: list[Call] = []
    sources = dict(inputs)
    families: dict[str, str] = {}
    owned: set[str] = set()
    labelled: set[tuple[str, int, int]] = set()
    for run in runs:
        first = run[0]
        container = first.segment.container
        bound = tuple((own, sources[value]) for own, value in first.part.inputs)
        params = dict(first.part.params)
        block = first.part.block
        if container and len(run) > 1:
            family = families.setdefault(container, _family(container, families))
            indices = range(first.segment.index, first.segment.index + len(run))
            turn = next(n for n in count(1) if not {(family, n, index) for index in indices} & labelled)
            labelled |= {(family, turn, index) for index in indices}
            family += f"_{turn}" if turn > 1 else ""
            call = Call(
                block=first.block, name=first.name, inputs=bound, repeat=len(run), chain=tuple(_chain(run[0], run[1])),
                first=first.segment.index, family=family, prefix=container,
            )  # fmt: skip
        else:
            prefix = first.segment.prefix
            for tensor in (*block.parameters, *block.frozen):
                full = params.get(tensor.name, f"{prefix}.{tensor.name}" if prefix else tensor.name)
                if full in owned:
                    params[tensor.name] = full
            parameter_names = {t.name for t in (*block.parameters, *block.frozen)}
            params = {own: full for own, full in params.items() if own in parameter_names}
            call = Call(block=first.block, name=first.name, inputs=bound, prefix=prefix, params=tuple(params.items()))
        for p, index in zip(run, range(len(run)), strict=True):
            owned |= {call.parameter_name(t.name, index) for t in (*block.parameters, *block.frozen)}
            for own, value in p.part.outputs:
                sources[value] = f"{call.name}.{own}"
        calls.append(call)
    return calls


def _unread(
    run: Sequence[PlacedSegment], placed: Sequence[PlacedSegment], returned: Sequence[int]
) -> Iterator[list[PlacedSegment]]:
    """A run cut behind each repeat whose outputs someone other than the next one reads, or the module returns."""
    readers: dict[int, list[PlacedSegment]] = {}
    for p in placed:
        for _, value in p.part.inputs:
            readers.setdefault(value, []).append(p)
    part: list[PlacedSegment] = []
    for p, following in zip(run, [*run[1:], None], strict=True):
        part.append(p)
        outside = any(r is not following for _, value in p.part.outputs for r in readers.get(value, ()))
        outside = outside or any(value in returned for _, value in p.part.outputs)
        if following is None or outside or any(not readers.get(v) for _, v in p.part.outputs):
            yield part
            part = []


def _family(container: str, families: Mapping[str, str]) -> str:
    last = re.sub(r"[^A-Za-z0-9_\-]", "_", container.rpartition(".")[2])
    return last if last not in families.values() else re.sub(r"[^A-Za-z0-9_\-]", "_", container)


def _sources(placed: Sequence[PlacedSegment], calls: Sequence[Call]) -> dict[int, str]:
    sources: dict[int, str] = {}
    by_name = {call.name for call in calls}
    owner = ""
    for p in placed:
        owner = p.name if p.name in by_name else owner
        for own, value in p.part.outputs:
            sources[value] = f"{owner}.{own}"
    return sources
