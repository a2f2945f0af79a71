"""`capture(module, example_inputs)`: a torch module as a Graph, without weights or a GPU.

The forward is recorded twice, with inputs of two sizes (`trace`, `sizes`), and written as blocks of the graph's op
kinds (`convert`, `blocks`). `captured` also returns what was found on the way: dims, opaque ops, notes. Leaves out the
proof that both compute the same (`prove`), and reading a request (`inputs`).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from gnomon.errors import CaptureError, InputError
from gnomon.frontend.blocks import PlacedSegment, graph_of, live_steps, repeated
from gnomon.frontend.convert import Converter
from gnomon.frontend.flow import flow
from gnomon.frontend.records import ForwardTrace, Step
from gnomon.frontend.rules import matmul_shapes
from gnomon.frontend.sizes import Sizes, aligned
from gnomon.frontend.trace import record
from gnomon.graph import Graph

SMALL = 20_000_000
"""Parameters up to which a module on the CPU is recorded as it computes, so that code may look at values."""

Dims = Mapping[str, Sequence[str]]
"""Input -> names of its dims, outermost first; a number or nothing for one that does not vary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedModule:
    """A module as a Graph, and how it became one."""

    graph: Graph
    """The model."""
    notes: tuple[str, ...]
    """What does not hold in general: values that Python read, sizes that are as in the example."""
    opaque: tuple[tuple[str, str, str], ...]
    """(block, path, ATen op) of what no kind says, once for each block."""
    placed: tuple[PlacedSegment, ...]
    """Each layer of the graph as it was recorded, in order."""
    trace: ForwardTrace
    """The forward."""
    steps: int
    """Calls of the torch API in the forward that matter."""
    constants: Mapping[str, Tensor]
    """Values of states that are neither parameters nor buffers."""
    symbols: tuple[str, ...]
    """Dims whose size the workload gives."""
    unread: tuple[tuple[str, int], ...]
    """(file and line, FLOPs on the example) of products that eager PyTorch computes and no output depends on: the graph
    is without them."""


def capture(
    module: nn.Module,
    example_inputs: Sequence[Any] | Mapping[str, Any] = (),
    *,
    dims: Dims | None = None,
    name: str = "",
    dtype: torch.dtype | None = None,
) -> Graph:
    """The Graph of a module's forward on inputs like the example.

    example_inputs: positional ones, or by name. dims: names of inputs' dims, as {"ids": ("batch", "seq")}; left out,
    the first is `batch`, and the second of integers `seq`. dtype: of parameters, in place of their own. CaptureError
    with file and line where the forward cannot be recorded; InputError for what is no ordinary module.
    """
    return captured(module, example_inputs, dims=dims, name=name, dtype=dtype).graph


def captured(
    module: nn.Module,
    example_inputs: Sequence[Any] | Mapping[str, Any] = (),
    *,
    dims: Dims | None = None,
    name: str = "",
    dtype: torch.dtype | None = None,
    training: bool = True,
    computing: bool = False,
) -> CapturedModule:
    """`capture`, with all that it found. training: whether the module is recorded as it trains (dropout) or not.
    computing: a large module too is recorded as it computes, so that the trace has numbers."""
    # Out of torch.compile first: a compiled forward runs what was traced before, and records nothing.
    module, notes = _plain(module)
    # One tensor given as ids and as labels would be one value with two names.
    example_inputs = _apart(example_inputs)
    named = _named_inputs(module, example_inputs)
    _fits(module, example_inputs)
    declared = _declared(named, dims)
    # A large module is recorded without numbers: nothing is computed, and no memory is taken for what would be.
    meta = _on_meta(module, math.inf if computing else SMALL)
    with quiet(module, training) as changed:
        first = _sizes_of(named, declared)
        tree = _tree(module, example_inputs)
        for _ in range(2):  # a module may make tables in its first forward, and read them in later ones
            trace = _record(module, tree, named, meta, dtype)
            # Recorded twice at two sizes: a size that moves with an input's dim is that dim, however often Python
            # computed with it. Symbolic shapes would specialise on what code looks at.
            second, other = _again(module, tree, named, declared, first, trace, meta, dtype)
            if other is not None or not first:
                break
    flow(trace)
    trace.outputs.sort(key=lambda index: len(trace.values[index].shape) > 0)  # a loss comes first
    notes += [*changed, *trace.notes]
    sizes = Sizes(first, second, other)
    # From the outputs back: shape arithmetic and dead branches cost nothing in a compiled graph and are no ops here.
    live = live_steps(trace)
    inputs = {i: v.name for i, v in enumerate(trace.values) if v.origin == "input"}
    # Where no other size gave the same ops, the graph holds for the example alone, and says so.
    symbols = tuple(n for n in first if other is not None and first[n] != second[n])
    converter = Converter(trace, sizes, live, {i: declared[n] for i, n in inputs.items() if n in declared})
    graph, placed = graph_of(name or type(module).__name__, converter, trace, converter.live, repeated(module), inputs)
    notes += converter.notes
    fixed = [n for n in first if n not in symbols]
    if fixed:
        notes.append(f"{', '.join(fixed)}: as in the example; the code does something else for other sizes")
    unread = _unread(trace, live)
    notes += [f"{where}: a product that no output depends on is left out" for where, _ in unread]
    if sizes.fixed:
        notes.append(
            f"{len(sizes.fixed)} kinds of sizes follow from the inputs by no product, and are as in the example"
        )
    return CapturedModule(
        graph=graph,
        notes=tuple(dict.fromkeys(notes)),
        opaque=tuple((p.block, *entry) for p in placed if p.name == p.block for entry in p.part.opaque),
        placed=tuple(placed),
        trace=trace,
        steps=len(live),
        constants=trace.constants,
        symbols=symbols,
        unread=unread,
    )


def _unread(trace: ForwardTrace, live: Sequence[Step]) -> tuple[tuple[str, int], ...]:
    """Products in steps that nothing reads."""
    live_ids, found = {id(step) for step in live}, dict[str, int]()
    for step in trace.steps:
        for node in () if id(step) in live_ids else step.nodes:
            shapes, _ = matmul_shapes(node, lambda index: trace.values[index].shape)
            if flops := sum(2 * prod(int(size) for size in shape) for shape in shapes):  # type: ignore[call-overload]
                found[step.where] = found.get(step.where, 0) + flops
    return tuple(found.items())


def _plain(module: nn.Module) -> tuple[nn.Module, list[str]]:
    """The module itself, out of its wrappers. InputError for what has no forward that can be recorded."""
    notes = []
    if not isinstance(module, nn.Module):
        raise InputError(f"capture wants a torch.nn.Module, not a {type(module).__name__}")
    if hasattr(module, "_orig_mod"):
        module = module._orig_mod  # type: ignore[assignment]
        notes.append("the module was compiled; what is captured is what it was before")
    # Its calls never come through __torch_function__.
    if isinstance(module, torch.jit.ScriptModule):
        raise InputError("the module is TorchScript, whose forward is no Python; give the module that it was made of")
    for name, inner in module.named_modules():
        kind = type(inner).__module__
        # Packed weights are no parameters, and their matmuls custom ops without gradients.
        if kind.startswith(("torch.ao.nn.quantized", "torch.nn.quantized", "bitsandbytes")):
            raise InputError(f"{name or 'the module'} is a quantised {type(inner).__name__}; capture it before that")
        if hasattr(inner, "_orig_mod") or inner._compiled_call_impl is not None:
            notes.append(f"{name or 'the module'} is compiled; it is recorded as it was before")
    return module, notes


def _on_meta(module: nn.Module, limit: float) -> bool:
    devices = {t.device.type for t in (*module.parameters(), *module.buffers())}
    # One device of it elsewhere is enough: no op mixes meta with memory.
    return bool(devices - {"cpu"}) or sum(p.numel() for p in module.parameters()) > limit


def _apart(example: Any) -> Any:
    """The example with a tensor that comes twice as two."""
    seen: set[int] = set()

    def once(x: Any) -> Any:
        if isinstance(x, Tensor) and id(x) in seen:
            return x.clone()
        seen.add(id(x))
        return x

    return tree_map(once, example)


def _tree(module: nn.Module, example: Sequence[Any] | Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, Mapping):
        return (), dict(example)
    return (tuple(example) if isinstance(example, (list, tuple)) else (example,)), {}


def _named_inputs(module: nn.Module, example: Sequence[Any] | Mapping[str, Any]) -> dict[str, Tensor]:
    """Every tensor of the example by the name of its argument."""
    args, kwargs = _tree(module, example)
    try:
        # transformers passes inputs by name; positions are only named for people.
        names = [p for p in inspect.signature(module.forward).parameters if p not in ("self", "args", "kwargs")]
    except (TypeError, ValueError):
        names = []
    tensors: dict[str, Tensor] = {}
    pairs = [(names[i] if i < len(names) else f"input{i}", x) for i, x in enumerate(args)] + list(kwargs.items())
    for name, value in pairs:
        flat = [x for x in tree_flatten(value)[0] if isinstance(x, Tensor)]
        for place, tensor in enumerate(flat):
            tensors[name if len(flat) == 1 else f"{name}{place}"] = tensor
    return tensors


def _fits(module: nn.Module, example: Sequence[Any] | Mapping[str, Any]) -> None:
    """InputError where the forward wants other arguments than the example has."""
    args, kwargs = _tree(module, example)
    try:
        signature = inspect.signature(module.forward)
    except (TypeError, ValueError):
        return
    try:
        # Asked of the signature, as the forward's own TypeError would point at the recorder.
        signature.bind(*args, **kwargs)
    except TypeError as error:
        named = ", ".join(map(str, kwargs)) or f"{len(args)} without names"
        takes = f"{type(module).__name__}.forward takes ({', '.join(signature.parameters)})"
        raise InputError(f"{takes}, and the example has {named}: {error}") from error


def _declared(named_inputs: Mapping[str, Tensor], dims: Dims | None) -> dict[str, tuple[str, ...]]:
    if dims is not None:
        for name, names in dims.items():
            if name not in named_inputs:
                raise InputError(f"dims names {name!r}, and the inputs are {', '.join(named_inputs) or 'none'}")
            if len(names) != named_inputs[name].dim():
                raise InputError(f"dims of {name!r} are {tuple(names)}, and it has {named_inputs[name].dim()} dims")
        return {name: tuple(str(n or "") for n in names) for name, names in dims.items()}
    named, sizes = {}, dict[str, int]()
    for name, x in named_inputs.items():
        words = ["batch"] if x.dim() else []
        if x.dim() == 2 and not x.is_floating_point():
            words.append("seq")
        # The first input that has a dim decides: one of another size is no batch or sequence, and has no sequences.
        words = words[:1] if words and sizes.get("batch", x.shape[0]) != x.shape[0] else words
        words = [
            word if sizes.setdefault(word, size) == size else "" for word, size in zip(words, x.shape, strict=False)
        ]
        named[name] = tuple([*words, *[""] * (x.dim() - len(words))])
    return named


def _sizes_of(named: Mapping[str, Tensor], declared: Dims) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for name, names in declared.items():
        for word, size in zip(names, named[name].shape, strict=True):
            if not word or word.isdigit():
                continue
            if sizes.setdefault(word, int(size)) != size:
                raise InputError(f"dim {word!r} is {sizes[word]} in one input and {size} in {name!r}")
    return sizes


def _record(
    module: nn.Module, tree: Any, named: Mapping[str, Tensor], meta: bool, dtype: torch.dtype | None
) -> ForwardTrace:
    names = {id(x): name for name, x in named.items()}
    # Both recordings draw the same numbers: routers and masks must take the same branches.
    torch.manual_seed(0)
    return record(module, tree[0], tree[1], names, meta=meta, dtype=dtype)


def _again(
    module: nn.Module,
    tree: Any,
    named: Mapping[str, Tensor],
    declared: Dims,
    first: Mapping[str, int],
    trace: ForwardTrace,
    meta: bool,
    dtype: torch.dtype | None,
) -> tuple[dict[str, int], ForwardTrace | None]:
    """The same with other sizes: all that are named, else the batch alone; no trace where the ops then differ."""
    varied = {name: _another(name, size) for name, size in first.items()}
    for sizes in (varied, {n: varied[n] if n == "batch" else s for n, s in first.items()}):
        if sizes == first:
            continue
        other = {name: _resized(x, declared.get(name, ()), sizes) for name, x in named.items()}
        swapped = {id(x): other[name] for name, x in named.items()}
        again = tree_map(lambda x, s=swapped: s.get(id(x), x) if isinstance(x, Tensor) else x, tree)
        try:
            retraced = _record(module, again, other, meta, dtype)
        except CaptureError:
            continue
        if aligned(trace, retraced):
            return dict(sizes), retraced
    return dict(first), None


def _another(name: str, size: int) -> int:
    if name == "batch":
        return size + 1
    # Downwards, so that no table of positions is too short for it; even, as code often wants.
    return size // 2 if size % 2 == 0 and size > 2 else size + 1


def _resized(x: Tensor, names: Sequence[str], sizes: Mapping[str, int]) -> Tensor:
    """A tensor like another, of other sizes: its elements over again."""
    for axis, word in enumerate(names):
        if word in sizes and sizes[word] != x.shape[axis]:
            if x.device.type == "meta":
                shape = list(x.shape)
                shape[axis] = sizes[word]
                x = torch.empty(shape, dtype=x.dtype, device="meta")
            else:
                x = x.index_select(axis, torch.arange(sizes[word]) % x.shape[axis])
    # A slice would share memory with the example, which in-place code writes to.
    return x if x.device.type == "meta" else x.clone()


def _drops(module: nn.Module, configs: Sequence[Any]) -> list[tuple[Any, str, float]]:
    """(object, attribute, probability) wherever whole layers are left out at random, as transformers calls it."""
    return [
        (holder, name, value)
        for holder in (*module.modules(), *configs)
        for name, value in getattr(holder, "__dict__", {}).items()
        if name.endswith(("layerdrop", "layer_drop")) and isinstance(value, float) and value > 0
    ]


@contextmanager
def quiet(module: nn.Module, training: bool) -> Iterator[list[str]]:
    """The module as it trains, without a cache of keys; afterwards as it was."""
    notes: list[str] = []
    # Each by itself: train() would switch on what the user has frozen with eval().
    modes = {inner: inner.training for inner in module.modules()}
    configs = {id(c): c for m in module.modules() if (c := getattr(m, "config", None)) is not None}
    # transformers returns keys and values otherwise: outputs that training never reads, and that nothing would free.
    cached = [c for c in configs.values() if getattr(c, "use_cache", False) is True]
    module.train(training)
    for config in cached:
        config.use_cache = False
    dropped = _drops(module, list(configs.values())) if training else []
    # Whether a layer is there must not depend on the seed.
    for holder, name, _ in dropped:
        setattr(holder, name, 0.0)
    if dropped:
        notes.append("layers that are dropped at random (layerdrop) are all there")
    try:
        yield notes
    finally:
        for holder, name, chance in dropped:
            setattr(holder, name, chance)
        for inner, mode in modes.items():
            inner.training = mode
        for config in cached:
            config.use_cache = True
