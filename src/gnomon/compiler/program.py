"""From a graph to a Python function: groups called as kernels, all else as ATen, memory freed at its last use.

`Program` plans what runs in which order and writes the function's text, once with every group on trial and once
with what the trials chose. What a group reads is found through views by strides, so views between groups cost
nothing. Operations with effects (random numbers, writes) keep their order. Leaves out the trial itself
(`gate`).
"""

from __future__ import annotations

import ctypes
import heapq
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from gnomon.compiler.build import typed
from gnomon.compiler.graph.groups import Group, device_of, fake, groups, leaves, rebuilt, root, worth
from gnomon.compiler.graph.siblings import join_siblings
from gnomon.compiler.rules.views import VIEWS
from gnomon.compiler.tasks.steps import SOURCE, Run
from gnomon.compiler.text.nest import Kernel, kernel
from gnomon.compiler.text.triton_launch import SizeTable, symbol_names
from gnomon.compiler.text.triton_text import TritonKernel, triton_kernel
from gnomon.compiler.tiles.body import Body, UnfitError
from gnomon.compiler.tiles.check import check_body, check_nest
from gnomon.compiler.tiles.sizes import Size, product, size_of, sizes_of, symbols, text
from gnomon.compiler.tiles.tiling import Nest, Output, nest, output
from gnomon.compiler.tune.gate import Trial
from gnomon.compiler.tune.tuned import tiling_of

LINES = "    "
PRINTERS: dict[str, Callable[[Nest], Kernel]] = {"cpu": kernel, "cuda": triton_kernel}
"""Kind of device -> what writes its kernels."""


@dataclass(slots=True)
class PlannedGroup:
    """A group with its outputs and its kernel."""

    group: Group
    """The nodes and what they compute."""
    outputs: list[torch.fx.Node]
    """Nodes whose results others read."""
    kernel: Kernel
    """Its loop nest and text."""
    number: int
    """Its number in the program, by which its function is named."""
    device: torch.device
    """Where it runs."""
    function: Callable[..., int] | None = None
    """The compiled function; None until it is built."""

    @property
    def inputs(self) -> list[torch.fx.Node]:
        """Nodes that must have run before the group, as a kernel or by ATen."""
        return leaves(self.group)


@dataclass(slots=True)
class Program:
    graph: torch.fx.Graph
    """The graph that is compiled."""
    environment: Any
    """Sizes that are only known when it is called."""
    groups: list[PlannedGroup]
    """The groups that have kernels."""
    units: list[PlannedGroup | torch.fx.Node]
    """What runs, in order."""
    saved: bool = False
    """Whether inputs are what another graph made: their layouts are looked at when it is called."""
    constants: dict[str, Any] = field(default_factory=dict)
    names: dict[Any, str] = field(default_factory=dict)


def program(graph: torch.fx.Graph, environment: Any) -> Program:
    """Groups, their outputs as those who read them ask, and an order of all that runs."""
    fused_groups = groups(graph)
    known = {*_symbol_sources(graph)}
    loops = partial(_loops, environment=environment, known=known)
    fused_groups = join_siblings(graph, fused_groups, _asked(graph, fused_groups), loops, environment)
    fused_groups = [group for group in fused_groups if worth(group) or (environment is None and _only_python(group))]
    # Ends, since every further round has a group less or shorter ones: `_shorter` drops members, `_parted` divides or
    # drops a group.
    while True:
        outputs = _asked(graph, fused_groups)
        planned, refused = _planned(fused_groups, outputs, environment, known)
        if refused:
            fused_groups = [g for group in fused_groups for g in ([group] if group not in refused else _shorter(group))]
            continue
        compiled = Program(graph=graph, environment=environment, groups=planned, units=[])
        try:
            compiled.units = _ordered(compiled)
        except _WaitingError as error:
            fused_groups = _parted(graph, fused_groups, error.groups)
            continue
        return compiled


class _WaitingError(UnfitError):
    """Groups that wait for each other, as random numbers and writes stay in the order of the graph."""

    def __init__(self, stuck: Sequence[Group]) -> None:
        super().__init__("groups that wait for each other")
        self.groups = stuck


def _parted(graph: torch.fx.Graph, fused_groups: Sequence[Group], stuck: Sequence[Group]) -> list[Group]:
    """Groups with those that are stuck taken apart where something with effects lies between their members; where
    nothing does, without the largest of them."""
    passed, before = {}, 0
    for node in graph.nodes:
        before += _has_effects(node)
        passed[node] = before
    out, parted = [], False
    for group in fused_groups:
        parts: dict[int, list[torch.fx.Node]] = {}
        for node in group.members:
            parts.setdefault(passed[node], []).append(node)
        if len(parts) == 1 or not any(group is one for one in stuck):
            out.append(group)
            continue
        parted = True
        for members in parts.values():
            body = rebuilt(members)
            if body is not None and worth(remainder := Group(members=members, body=body)):
                out.append(remainder)
    if not parted:
        largest = max(stuck, key=lambda group: len(group.members))
        out = [group for group in out if group is not largest]
    return out


def _only_python(group: Group) -> bool:
    """Whether a group is one operation that C++ cannot call in PyTorch, as it takes a number of any type: where sizes
    are fixed, its kernel lets a run go on."""
    work = group.work
    if len(work) != 1 or device_of(work[0]) != torch.device("cpu"):
        return False
    schema = getattr(work[0].target, "_schema", None)
    if schema is None:
        return False
    numbers = [isinstance(arg, (bool, int, float)) for arg in work[0].args]
    as_tensor = any(n and of.type.kind() == "TensorType" for n, of in zip(numbers, schema.arguments, strict=False))
    return as_tensor or any(of.type.kind() == "NumberType" for of in schema.arguments)


def _shorter(group: Group) -> list[Group]:
    """A group without its last member of work: what it made could not be stored."""
    members = list(group.members)
    while members:
        last = members.pop()
        if last.target is operator.getitem:  # an operation goes with all of its results
            members = [m for m in members if m is not last.args[0] and last.args[0] not in m.args]
        body = rebuilt(members)
        if body is not None:
            remainder = Group(members=members, body=body)
            return [remainder] if worth(remainder) else []
    return []


def _asked(graph: torch.fx.Graph, fused_groups: Sequence[Group]) -> dict[int, list[torch.fx.Node]]:
    """Finds for each group the members whose memory somebody outside it reads."""
    of = {node: n for n, group in enumerate(fused_groups) for node in group.members}
    outputs: dict[int, dict[torch.fx.Node, None]] = {n: {} for n in range(len(fused_groups))}
    seen: set[torch.fx.Node] = set()
    entered: set[int] = set()
    waiting = [graph.output_node()]
    waiting += [node for node in graph.nodes if _has_effects(node)]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in of and node.target not in VIEWS:
            n = of[node]
            outputs[n][node] = None
            # A kernel reads all of its inputs whichever of its outputs is needed, so they are followed once for each
            # group.
            if n not in entered:
                entered.add(n)
                waiting += leaves(fused_groups[n])
            continue
        waiting += node.all_input_nodes
    return {n: sorted(nodes, key=lambda node: node._sort_key) for n, nodes in outputs.items()}


def _planned(
    fused_groups: Sequence[Group], outputs: dict[int, list[torch.fx.Node]], environment: Any, known: set[str]
) -> tuple[list[PlannedGroup], list[Group]]:
    planned_groups: list[PlannedGroup] = []
    refused: list[Group] = []
    for n, group in enumerate(fused_groups):
        if not outputs[n]:
            continue
        try:
            written = _kernel(group.body, outputs[n], environment, known)
        except UnfitError:
            refused.append(group)
            continue
        where = device_of(outputs[n][0])
        assert where is not None, "groups make tensors"
        planned_groups.append(
            PlannedGroup(group=group, outputs=outputs[n], kernel=written, number=len(planned_groups), device=where)
        )
    return planned_groups, refused


def _kernel(body: Body, outputs: Sequence[torch.fx.Node], environment: Any, known: set[str]) -> Kernel:
    """The kernel that makes these outputs of a body, or `UnfitError`; known: names of symbols."""
    loops = _nest(body, outputs, environment)
    where = device_of(outputs[0])
    assert where is not None, "groups make tensors"
    written = PRINTERS[where.type](loops)
    if not _symbols(written) <= known:
        raise UnfitError("a size that is known only when the graph runs")
    return written


def _nest(body: Body, outputs: Sequence[torch.fx.Node], environment: Any) -> Nest:
    body = body.copy()
    outs = [_output(body, node) for node in outputs]
    check_body(body)
    loops = nest(body, outs, environment)
    check_nest(loops)
    return loops


def _loops(body: Body, outputs: Sequence[torch.fx.Node], environment: Any, known: set[str]) -> Nest:
    """The loops of a body; of those whose text may be refused, as it is written too."""
    if environment is None and device_of(outputs[0]) == torch.device("cpu"):
        return _nest(body, outputs, environment)
    return _kernel(body, outputs, environment, known).nest


def _output(body: Any, node: torch.fx.Node) -> Output:
    value = fake(node)
    if value is None:
        raise UnfitError("an operation whose results are asked for together")
    return output(body, node, body.tensors[node], sizes_of(value.stride()))


ASSERTIONS = (torch.ops.aten._assert_async.msg, torch.ops.aten._assert_async.default)
"""What raises where a tensor is false, as of `one_hot`'s classes, and gives nothing."""


def _has_effects(node: torch.fx.Node) -> bool:
    """Writes, random numbers, assertions, calls that are no plain functions: they run, in the order of the graph."""
    if node.op != "call_function":
        return node.op in ("call_module", "call_method")
    if isinstance(node.target, torch._ops.OpOverload):
        random = torch.Tag.nondeterministic_seeded in node.target.tags
        return node.target._schema.is_mutable or random or node.target in ASSERTIONS
    return isinstance(node.target, torch._ops.HigherOrderOperator) or getattr(node.target, "effects", False)


def _ordered(compiled: Program) -> list[PlannedGroup | torch.fx.Node]:
    """Units in an order that keeps the graph's where it can: those ready first, the earliest first."""
    member = {node: p for p in compiled.groups for node in p.group.members if node in p.outputs}
    units: dict[int, PlannedGroup | torch.fx.Node] = {}
    place = {node: i for i, node in enumerate(compiled.graph.nodes)}
    unit_of: dict[torch.fx.Node, int] = {}
    needs: dict[int, set[int]] = {}

    def visit(start: torch.fx.Node) -> None:
        waiting = [start]
        while waiting:
            node = waiting.pop()
            if node in unit_of:
                continue
            if node in member:
                p = member[node]
                # Nodes have even numbers by their place in the graph; a group has the odd one just behind its last
                # member. The order of the numbers is then the graph's order where it can be.
                number = 2 * max(place[m] for m in p.group.members) + 1
                unit_of.update(dict.fromkeys(p.outputs, number))
                units[number] = p
                waiting += p.inputs
            else:
                unit_of[node] = 2 * place[node]
                units[2 * place[node]] = node
                waiting += node.all_input_nodes

    visit(compiled.graph.output_node())
    for node in compiled.graph.nodes:
        if _has_effects(node):
            visit(node)
    before: int | None = None
    for number, unit in sorted(units.items()):
        asks = unit.inputs if isinstance(unit, PlannedGroup) else unit.all_input_nodes
        needs[number] = {unit_of[a] for a in asks} - {number}
        if not isinstance(unit, PlannedGroup) and _has_effects(unit):
            # A chain through all that has effects, in the order of the graph.
            if before is not None:
                needs[number].add(before)
            before = number
            # Those that read the old contents are no operands of the write, so nothing else keeps them before it.
            if isinstance(unit.target, torch._ops.OpOverload) and unit.target._schema.is_mutable:
                needs[number] |= _earlier_readers(compiled, unit, units, unit_of, number)
    return _topological(units, needs)


def _earlier_readers(
    compiled: Program, write: torch.fx.Node, units: dict[int, Any], unit_of: dict[torch.fx.Node, int], number: int
) -> set[int]:
    """Units that read memory before it is written."""
    schema = write.target._schema.arguments  # type: ignore[union-attr]
    positional = zip(schema, write.args, strict=False)
    named = [(of, write.kwargs[of.name]) for of in schema if of.name in write.kwargs]
    written = {
        root(value)
        for of, value in (*positional, *named)
        if isinstance(value, torch.fx.Node) and of.alias_info is not None and of.alias_info.is_write
    }
    readers = set()
    for other, unit in units.items():
        asks = unit.inputs if isinstance(unit, PlannedGroup) else unit.all_input_nodes
        # A group reads before the write if any of its members does.
        first = min(m._sort_key for m in unit.group.members) if isinstance(unit, PlannedGroup) else unit._sort_key
        if other != number and first < write._sort_key and any(root(a) in written for a in asks):
            readers.add(other)
    return readers


def _topological(units: dict[int, Any], needs: dict[int, set[int]]) -> list[Any]:
    users: dict[int, list[int]] = {}
    for number, asks in needs.items():
        for a in asks:
            users.setdefault(a, []).append(number)
    open_needs = {number: len(asks) for number, asks in needs.items()}
    ready = [number for number, count in open_needs.items() if not count]
    heapq.heapify(ready)
    out = []
    while ready:
        # The smallest number of those ready, by which the order stays the graph's.
        number = heapq.heappop(ready)
        out.append(units[number])
        for user in users.get(number, ()):
            open_needs[user] -= 1
            if not open_needs[user]:
                heapq.heappush(ready, user)
    if len(out) != len(units):
        waits = [units[number] for number, count in open_needs.items() if count]
        raise _WaitingError([unit.group for unit in waits if isinstance(unit, PlannedGroup)])
    return out


# ---- text
class Writer:
    """Writes the function of a program. Values that are no literals are constants."""

    def __init__(self, compiled: Program) -> None:
        self.made = compiled
        self.constants: dict[str, Any] = {"_empty": torch.empty_strided}
        self.symbols = _symbol_sources(compiled.graph)

    def name(self, node: torch.fx.Node) -> str:
        return _plain(node.name)

    def constant(self, value: Any) -> str:
        name = f"_c{len(self.constants)}"
        self.constants[name] = value
        return name

    def argument(self, arg: Any) -> str:
        if isinstance(arg, torch.fx.Node):
            return self.name(arg)
        if arg is None or isinstance(arg, (bool, int, str)):
            return repr(arg)
        if isinstance(arg, float):
            # NaN and the infinities have no literal.
            return repr(arg) if arg == arg and abs(arg) != float("inf") else f"float({str(arg)!r})"
        if isinstance(arg, (list, tuple)):
            inside = ", ".join(self.argument(a) for a in arg)
            return f"[{inside}]" if isinstance(arg, list) else f"({inside}{',' if len(arg) == 1 else ''})"
        if isinstance(arg, slice):
            return f"slice({self.argument(arg.start)}, {self.argument(arg.stop)}, {self.argument(arg.step)})"
        return self.constant(arg)

    def aten(self, node: torch.fx.Node) -> str:
        """One operation by ATen."""
        if node.op == "get_attr":
            value = self.made.graph.owning_module
            for part in str(node.target).split("."):
                value = getattr(value, part)
            return f"{self.name(node)} = {self.constant(value)}"
        args = [self.argument(a) for a in node.args] + [f"{k}={self.argument(v)}" for k, v in node.kwargs.items()]
        if node.target is operator.getitem and isinstance(node.args[1], int):
            return f"{self.name(node)} = {args[0]}[{args[1]}]"
        if node.op == "call_method":
            return f"{self.name(node)} = {args[0]}.{node.target}({', '.join(args[1:])})"
        settled = getattr(node.target, "settled", None)  # an operation of ours, tried by itself
        target = (settled() if settled else None) or _fast(node.target)
        return f"{self.name(node)} = {self.constant(target)}({', '.join(args)})"

    def declared(self, node: torch.fx.Node) -> list[str]:
        """Has memory that kernels read lie as they read it."""
        value = fake(node)
        if value is None or not value.dim():
            return []
        name, strides = self.name(node), ", ".join(self.size(s) for s in sizes_of(value.stride()))
        comma = "," if value.dim() == 1 else ""
        return [
            f"if {name}.stride() != ({strides}{comma}):",
            f"{LINES}{name} = {self.constant(as_declared)}({name}, ({strides}{comma}))",
        ]

    def size(self, value: Size) -> str:
        return text(value)

    def kernel_lines(self, planned: PlannedGroup) -> list[str]:
        """Allocate outputs, call the kernel, and ATen in its place where an index was out of range."""
        nest = planned.kernel.nest
        out = []
        for node, o in zip(planned.outputs, nest.outputs, strict=True):
            shape = ", ".join(self.size(s) for s in o.shape)
            strides = ", ".join(self.size(s) for s in o.memory)
            comma = "," if len(o.shape) == 1 else ""
            kind = f"dtype={self.constant(o.dtype)}"
            kind += "" if planned.device.type == "cpu" else f", device={self.constant(planned.device)}"
            out.append(f"{self.name(node)} = _empty(({shape}{comma}), ({strides}{comma}), {kind})")
        if isinstance(planned.kernel, TritonKernel):
            return [*out, *self._launched(planned, planned.kernel)]
        names = sorted({str(s) for size in self._host_sizes(planned) for s in symbols(size)})
        table = self.constant(Table(planned, names))
        array = f"{table}({', '.join(names)})" if names else self.constant(self.constants[table]())
        pointers = []
        for slot in planned.kernel.slots:
            # `data_ptr` counts the tensor's own storage offset; the input's is relative to that, in elements.
            inp = nest.body.inputs[slot]
            pointer = f"{self.name(inp.node)}.data_ptr()"
            if not (isinstance(inp.offset, int) and inp.offset == 0):
                pointer += f" + {self.size(inp.offset * inp.dtype.itemsize)}"
            pointers.append(pointer)
        pointers += [f"{self.name(node)}.data_ptr()" for node in planned.outputs]
        kinds = [ctypes.c_void_p] * (1 + len(pointers))
        called = None if planned.function is None else typed(planned.function, *kinds)
        function = self.constant(called)
        call = f"{function}({', '.join([array, *pointers])})"
        if not may_fail(planned):
            return [*out, call]
        return [*out, f"if {call}:", *(LINES + line for line in self.given_back(planned))]

    def _launched(self, planned: PlannedGroup, kernel: TritonKernel) -> list[str]:
        """A call of a Triton kernel, and ATen in its place where it does not fit these sizes."""
        names = symbol_names(kernel)
        table = self.constant(SizeTable(kernel, names, _SIZE_FUNCTIONS))
        args = [self.name(kernel.nest.body.inputs[slot].node) for slot in kernel.slots]
        args += [self.name(node) for node in planned.outputs]
        function = self.constant(planned.function)
        call = f"{function}({table}({', '.join(names)}), {', '.join(args)})"
        return [f"if {call}:", *(LINES + line for line in self.given_back(planned))]

    def scope(self) -> dict[str, Any]:
        return {**self.constants, **_SIZE_FUNCTIONS}

    def symbols_of(self, planned: PlannedGroup) -> set[str]:
        return set(symbols_in(planned))

    def _host_sizes(self, planned: PlannedGroup) -> Iterable[Size]:
        nest = planned.kernel.nest
        return [*planned.kernel.sizes, *(nest.sizes[a] for a in (*nest.outer, *nest.inner))]

    def given_back(self, planned: PlannedGroup) -> list[str]:
        """The group by ATen, its results in the layouts that other kernels and callers are told of."""
        known = set(self.symbols)
        laid = [self.declared(node) for node in planned.outputs if _declares(node, known)]
        return [*self.aten_lines(planned), *(line for lines in laid for line in lines)]

    def aten_lines(self, planned: PlannedGroup) -> list[str]:
        """The group's members, each by ATen."""
        outside = set(planned.inputs)
        needed: set[torch.fx.Node] = set()
        waiting: list[torch.fx.Node] = list(planned.outputs)
        while waiting:
            node = waiting.pop()
            if node not in needed and node not in outside:
                needed.add(node)
                waiting += node.all_input_nodes
        return [self.aten(node) for node in sorted(needed, key=lambda node: node._sort_key)]


def as_declared(x: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """The tensor in the layout that its fake tensor declares and kernels read; ATen's may be another."""
    have = x.stride()
    if all(size <= 1 or one == other for size, one, other in zip(x.shape, have, strides, strict=True)):
        return x
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


class Table:
    """The array of sizes that a kernel is given, kept for every set of the symbols' values that came."""

    def __init__(self, planned: PlannedGroup, names: Sequence[str]) -> None:
        nest = planned.kernel.nest
        self.nest, self.source = nest, planned.kernel.source
        self.names = tuple(names)
        rows = product(nest.sizes[a] for a in nest.outer)
        points = nest.sizes[nest.inner[-1]] if nest.inner else 1
        body = ", ".join(text(size) for size in (rows, points, *planned.kernel.sizes))
        scope: dict[str, Any] = dict(_SIZE_FUNCTIONS)
        # As Python's own code, so that no call needs sympy.
        exec(f"def sizes({', '.join(self.names)}):\n    return ({body},)", scope)
        self.sizes = scope["sizes"]
        self.known: dict[tuple[int, ...], Any] = {}

    def __call__(self, *values: int) -> ctypes.Array[Any]:
        array = self.known.get(values)
        if array is None:
            rows, points, *rest = self.sizes(*values)
            t = tiling_of(self.source, self.nest, rows, points)
            every = (t.chunk, t.chunks, t.tile, t.tiles, int(t.parallel), int(t.past), *rest)
            array = (ctypes.c_int64 * len(every))(*every)
            # A bound for programs whose sizes hardly ever come again.
            if len(self.known) > 4096:
                self.known.clear()
            self.known[values] = array
        return array


_SIZE_FUNCTIONS: dict[str, Any] = {}
exec("import math, torch", _SIZE_FUNCTIONS)


def may_fail(planned: PlannedGroup) -> bool:
    """Whether a kernel looks at its inputs, and may leave them to ATen."""
    body = planned.kernel.nest.body
    return any(ins.op in ("take", "check") for ins in body.code)


def _fast(target: Any) -> Any:
    # The builtin behind an overload, without the overload's own call in Python.
    return target._op if isinstance(target, torch._ops.OpOverload) else target


def _plain(name: str) -> str:
    return "n_" + "".join(c if c.isalnum() or c == "_" else "_" for c in name)


def _symbol_sources(graph: torch.fx.Graph) -> dict[str, str]:
    """Symbol -> Python that gives its value from the arguments."""
    out: dict[str, str] = {}
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    for node in inputs:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            size = size_of(value)
            if not isinstance(size, int) and size.is_Symbol:
                out.setdefault(str(size), _plain(node.name))
    for node in inputs:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            for which in ("shape", "stride"):
                parts = value.shape if which == "shape" else value.stride()
                for i, part in enumerate(parts):
                    size = size_of(part)
                    if not isinstance(size, int) and size.is_Symbol:
                        out.setdefault(
                            str(size), f"{_plain(node.name)}.{which if which == 'shape' else 'stride()'}[{i}]"
                        )
    return out


def write(
    compiled: Program, lines_of: Callable[[Writer, PlannedGroup], list[str]], units: Sequence[Any] | None = None
) -> Callable[[list[Any]], Any]:
    """The program as a function of the list of its arguments, which it empties. units: its units with runs among them
    (`steps.join_runs`)."""
    writer = Writer(compiled)
    units = compiled.units if units is None else units
    inputs = [n for n in compiled.graph.nodes if n.op == "placeholder"]
    lines = ["def call(args):"]
    if inputs:
        lines.append(f"    {', '.join(writer.name(n) for n in inputs)}, = args")
    # The caller's list would keep all arguments alive to the end; once it is empty the `del` lines below free each
    # after its last use.
    lines.append("    args.clear()")
    # Before anything is deleted: they are read off the arguments' shapes.
    for symbol in sorted({s for p in compiled.groups for s in symbols_in(p)} | _declared_symbols(compiled)):
        lines.append(f"    {symbol} = {writer.symbols[symbol]}")
    last = _last_uses(compiled, units)
    known = set(writer.symbols)
    read = {inp.node for p in compiled.groups for inp in p.kernel.nest.body.inputs if _declares(inp.node, known)}
    read |= {node for unit in units if isinstance(unit, Run) for node in unit.inputs}
    if compiled.saved:  # what a forward's ATen calls kept
        lines += [LINES + line for node in inputs if node in read for line in writer.declared(node)]
    for unit in units:
        if isinstance(unit, Run):
            lines.append(LINES + _run_line(writer, unit, lines_of))
        elif isinstance(unit, PlannedGroup):
            lines += [LINES + line for line in lines_of(writer, unit)]
        elif unit.op == "output":
            lines.append(f"    return {writer.argument(unit.args[0])}")
        elif unit.op != "placeholder":
            lines.append(LINES + writer.aten(unit))
            if unit in read and unit.op == "call_function":
                lines += [LINES + line for line in writer.declared(unit)]
        gone = last.get(id(unit), [])
        if gone and not (isinstance(unit, torch.fx.Node) and unit.op == "output"):
            lines.append(f"    del {', '.join(writer.name(n) for n in gone)}")
    scope = writer.scope()
    exec(compile("\n".join(lines), "<gnomon>", "exec"), scope)
    function: Callable[[list[Any]], Any] = scope["call"]
    function.text = "\n".join(lines)  # type: ignore[attr-defined]
    return function


def _run_line(writer: Writer, run: Run, lines_of: Callable[[Writer, PlannedGroup], list[str]]) -> str:
    """The line that calls a run, which is given the same steps in Python."""
    names = ", ".join(writer.name(n) for n in run.inputs)
    returned = ", ".join(writer.name(n) for n in run.outputs)
    read = {node for unit in run.units if isinstance(unit, torch.fx.Node) for node in unit.all_input_nodes}
    lines = [writer.aten(node) for node in read if node.op == "get_attr"]
    for unit in run.units:
        lines += lines_of(writer, unit) if isinstance(unit, PlannedGroup) else [writer.aten(unit)]
        results = unit.outputs if isinstance(unit, PlannedGroup) else [unit]
        if isinstance(unit, torch.fx.Node) and fake(unit) is not None:
            lines += [line for node in results for line in writer.declared(node)]
    scope = dict(writer.scope())
    text = "\n".join(LINES + line for line in [*lines, f"return [{returned}]"])
    exec(f"def plain({names}):\n{text}", scope)
    run.plain = scope["plain"]
    # The key of the verdict: the code that walks the steps, and what each step is.
    run.trial = Trial("\n".join([SOURCE, *_steps_text(run)]), run.tried, run.plain)
    return f"{returned}, = {writer.constant(run)}({names})"


def _steps_text(run: Run) -> list[str]:
    """What a run's steps are, with nodes by their place in the run: layers that are alike have the same text, so one of
    them is tried. What the trial sees of sizes are powers of two, so those of the inputs are said here."""
    places: dict[torch.fx.Node, str] = {}

    def place(node: torch.fx.Node) -> str:
        return places.setdefault(node, f"%{len(places)}")

    def laid(node: torch.fx.Node) -> str:
        value = fake(node)
        return "" if value is None else f" {value.dtype} {tuple(value.shape)} {tuple(value.stride())}"

    lines = [place(node) + laid(node) for node in run.inputs]
    for unit in run.units:
        if isinstance(unit, PlannedGroup):
            read, made = (" ".join(map(place, nodes)) for nodes in (unit.inputs, unit.outputs))
            lines.append(f"{made} = {read} by {unit.kernel.source}")
        elif unit.op == "call_function":
            named = torch.fx.node.map_arg((unit.args, unit.kwargs), place)
            lines.append(f"{place(unit)} = {_function_text(unit.target)} of {named}")
        else:
            lines.append(f"{place(unit)} = {unit.op} {unit.target}")
    # What comes out too: a step may hold a weight itself, of a width that no input tells.
    return [*lines, *(place(node) + laid(node) for node in run.outputs)]


def _function_text(target: Any) -> str:
    """What a step calls, as its own trial knows it: by its C++ where it has one."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    named = getattr(target, "name", None) or getattr(target, "__name__", "")
    texts = [str(one) for one in (getattr(target, "source", None), getattr(target, "by", None)) if one]
    return " ".join([type(target).__name__, str(named), *texts])


def _declares(node: torch.fx.Node, known: set[str]) -> bool:
    """Whether the layout of a node's tensor is known before the graph runs."""
    value = fake(node)
    return value is not None and {str(s) for size in sizes_of(value.stride()) for s in symbols(size)} <= known


def _declared_symbols(compiled: Program) -> set[str]:
    """Symbols that layouts of memory which kernels read are made of."""
    known = {*_symbol_sources(compiled.graph)}
    nodes = {inp.node for p in compiled.groups for inp in p.kernel.nest.body.inputs if _declares(inp.node, known)}
    return {str(s) for node in nodes for size in sizes_of(node.meta["val"].stride()) for s in symbols(size)}


def symbols_in(planned: PlannedGroup) -> list[str]:
    """Names of the symbols that a group's sizes are made of."""
    return sorted(_symbols(planned.kernel))


def _symbols(kernel: Kernel) -> set[str]:
    return {str(s) for size in _all_sizes(kernel) for s in symbols(size)}


def _all_sizes(kernel: Kernel) -> Iterable[Size]:
    nest = kernel.nest
    yield from kernel.sizes
    for out in nest.outputs:
        yield from (*out.shape, *out.memory)
    for slot in kernel.slots:
        yield nest.body.inputs[slot].offset
    yield from nest.sizes.values()


def _last_uses(compiled: Program, units: Sequence[Any]) -> dict[int, list[torch.fx.Node]]:
    """Unit -> tensors that nobody needs after it."""
    last: dict[torch.fx.Node, int] = {}
    for n, unit in enumerate(units):
        if isinstance(unit, (PlannedGroup, Run)):
            for node in (*unit.inputs, *unit.outputs):
                last[node] = n
        else:
            # What nobody reads is freed right after the unit that makes it.
            last[unit] = n
            for node in unit.all_input_nodes:
                last[node] = n
    out: dict[int, list[torch.fx.Node]] = {}
    present = {n for n in compiled.graph.nodes if n.op == "placeholder"}
    for unit in units:
        present |= set(unit.outputs) if isinstance(unit, (PlannedGroup, Run)) else {unit}
    for node, n in last.items():
        if node in present and node.op != "output":
            out.setdefault(id(units[n]), []).append(node)
    return out
