"""The first training step of a plain loop: which modules it calls, on what, and how the loss comes of them.

`watched()` is a context in which calls of trained modules, and what the script computes of their outputs up to
`backward()`, are taken down; the script is stopped at the first step of an optimizer. `first_step()` is then the step
as one module with its inputs, to be captured. Leaves out the machine (`machine`) and capturing (`answer`).
"""

from __future__ import annotations

import contextlib
import inspect
import types
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from gnomon.frontend.script.machine import REAL, PassThrough, where
from gnomon.frontend.script.seen import SEEN, Stop

SHAPING = ("reshape", "view", "flatten", "contiguous", "to", "long", "squeeze", "unsqueeze", "clone", "ravel")
"""Functions by which labels are brought to the shape that a loss takes: what they are given is the input."""

MOST_CALLS = 100_000
"""Entries of a tape: a script that computes more of a model's outputs before it calls backward is stopped."""


@dataclass(slots=True)
class Tape:
    """What the first microbatch ran, in order."""

    entries: list[tuple[Any, Any, Any, Any]] = field(default_factory=list)
    """(module or function, args, kwargs, what it returned)."""
    returned_ids: set[int] = field(default_factory=set)
    """ids of the tensors that entries returned, which the entries hold."""
    loss: Tensor | None = None
    """That backward was called on."""
    depth: int = 0
    """Calls of watched modules that are open."""
    returned: dict[Any, Any] = field(default_factory=dict)
    """Of forwards that do not train, by module and shapes."""
    shaped: deque[tuple[Any, Any, Any, Any]] = field(default_factory=lambda: deque(maxlen=256))
    """The last calls of SHAPING on what is no output of a model."""

    def add(self, what: Any, args: Any, kwargs: Any, out: Any) -> None:
        """An entry, where it belongs to the first microbatch."""
        if self.loss is None and len(self.entries) < MOST_CALLS:
            self.entries.append((what, args, kwargs, out))
            self.returned_ids |= {id(x) for x in leaves(out)}


TAPE = Tape()
"""Of this process: a script runs once in it."""


def leaves(tree: Any) -> list[Tensor]:
    """Tensors of nested containers, of dataclasses and mappings of transformers too."""
    found: list[Tensor] = []
    for x in tree_flatten(tree)[0]:
        if isinstance(x, Tensor):
            found.append(x)
        elif hasattr(x, "__dataclass_fields__"):
            found += leaves([getattr(x, name, None) for name in x.__dataclass_fields__])
    return found


class Taking(TorchFunctionMode):
    """Takes down what is computed of a watched module's outputs outside of modules."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if TAPE.depth == 0 and TAPE.loss is None and torch.is_grad_enabled() and leaves(out):
            if any(id(x) in TAPE.returned_ids for x in leaves((args, kwargs))):
                TAPE.add(func, args, kwargs, out)
            elif getattr(func, "__name__", "") in SHAPING and out is not args[0]:  # `.to` of where it is already
                TAPE.shaped.append((func, args, kwargs, out))
        return out


def _trained() -> set[int]:
    return {id(p) for optimizer in SEEN.optimizers for group in optimizer.param_groups for p in group["params"]}


def _called(begin: Callable[..., Any]) -> Callable[..., Any]:
    """`nn.Module.__call__` that takes down outermost calls of trained modules."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if TAPE.depth or not any(True for _ in self.parameters()):
            return begin(self, *args, **kwargs)
        trained = _trained()
        # A model that no optimizer has, as a reference or a teacher, is none of the job's.
        if trained and not any(id(p) in trained for p in self.parameters()):
            return begin(self, *args, **kwargs)
        learns = torch.is_grad_enabled() and TAPE.loss is None
        key = (id(self), str(tree_map(lambda x: tuple(x.shape) if isinstance(x, Tensor) else x, (args, kwargs)))[:2000])
        # Nothing is learnt of it but shapes, which one of the same shapes has shown.
        if not learns and key in TAPE.returned:
            return TAPE.returned[key]
        _evenly(self)
        TAPE.depth += 1
        try:
            out = begin(self, *args, **kwargs)
        finally:
            TAPE.depth -= 1
        TAPE.returned[key] = out
        if learns:
            TAPE.add(self, args, kwargs, out)
        return out

    return call


def _evenly(module: nn.Module) -> None:
    """All parameters without memory where some have none, or there are many."""
    parameters = list(module.parameters())
    if any(p.is_meta for p in parameters) or sum(p.numel() for p in parameters) > REAL:
        for one in module.modules():
            for name, p in one._parameters.items():
                if p is not None and not p.is_meta:
                    p.data = p.data.to("meta")
                    one._parameters[name] = p


def _backward(self: Any, *args: Any, **kwargs: Any) -> None:
    """Stands in for `backward` and counts its calls; gradients that have no memory are there afterwards."""
    if SEEN.trainer is None and TAPE.loss is None and id(self) in TAPE.returned_ids:
        TAPE.loss = self
    SEEN.backwards += 1
    for optimizer in SEEN.optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    p.grad = torch.empty_like(p)


def _recording_init(begin: Callable[..., None]) -> Callable[..., None]:
    """`Optimizer.__init__` of optimizers whose first step stops the script."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)

        def step(self: Any, *args: Any, **kwargs: Any) -> None:
            if args and callable(args[0]):  # a closure computes the loss
                args[0]()
            if SEEN.backwards == 0:
                return
            SEEN.stopped_at = f"the first step of {type(self).__name__} ({where()})"
            raise Stop

        self.step = types.MethodType(step, self)
        SEEN.optimizers.append(self)

    return init


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """While it lasts, the first step is taken down."""
    with contextlib.ExitStack() as stack:
        for place, name, value in (
            (nn.Module, "__call__", _called(nn.Module.__call__)),
            (Tensor, "backward", _backward),
            (torch.autograd, "backward", lambda tensors, *a, **k: _backward(leaves(tensors)[0])),
            (torch.optim.Optimizer, "__init__", _recording_init(torch.optim.Optimizer.__init__)),
        ):
            stack.enter_context(mock.patch.object(place, name, value))
        stack.enter_context(Taking())
        yield


class TrainStep(nn.Module):
    """A microbatch of the script: its modules, and what it computes of them up to the loss."""

    def __init__(self, entries: list[tuple[Any, Any, Any, Any]], loss: Tensor, named: dict[str, Tensor]) -> None:
        super().__init__()
        self.loss_id, self.named = id(loss), {id(x): name for name, x in named.items()}
        self.entries = entries
        for what, *_ in entries:
            if isinstance(what, nn.Module):
                inner = unwrapped(what)
                known = {id(child) for child in self.children()}
                if id(inner) not in known:
                    self.add_module(type(inner).__name__ if not known else f"{type(inner).__name__}{len(known)}", inner)

    def forward(self, **inputs: Tensor) -> Any:
        """Computes the loss as the script does."""
        values: dict[int, Any] = {key: inputs[name] for key, name in self.named.items()}

        def now(x: Any) -> Any:
            return values.get(id(x), x) if isinstance(x, Tensor) else x

        for what, args, kwargs, before in self.entries:
            call = unwrapped(what) if isinstance(what, nn.Module) else what
            out = call(*_mapped(now, args), **_mapped(now, kwargs))
            values |= {id(old): new for old, new in zip(leaves(before), leaves(out), strict=False)}
        return values[self.loss_id]


def _mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    return tree_map(change, tree)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module within wrappers of data parallelism."""
    while isinstance(module, PassThrough):
        module = module.module
    return module


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstStep:
    """The first microbatch of a loop: the modules called, their inputs and the loss."""

    module: nn.Module
    """To be captured: the script's own where its call returns the loss."""
    inputs: dict[str, Tensor]
    """By argument."""
    modules: tuple[nn.Module, ...]
    """The script's own modules."""


def first_step() -> FirstStep | None:
    """The microbatch that was taken down; None where backward was called on nothing that a trained module made."""
    if TAPE.loss is None:
        return None
    calls = [entry for entry in TAPE.entries if isinstance(entry[0], nn.Module)]
    modules = tuple(dict.fromkeys(unwrapped(entry[0]) for entry in calls))
    what, args, kwargs, out = TAPE.entries[0]
    whole = unwrapped(what) if isinstance(what, nn.Module) else None
    if len(calls) == 1 and whole is not None and any(x is TAPE.loss for x in leaves(out)):
        named = _by_argument(whole, args, kwargs)
        if named is not None:
            return FirstStep(module=whole, inputs=named, modules=modules)
    needed = _needed(TAPE.entries, TAPE.loss)
    inputs = _inputs(needed)
    return FirstStep(module=TrainStep(needed, TAPE.loss, inputs), inputs=inputs, modules=modules)


def _needed(entries: list[tuple[Any, Any, Any, Any]], loss: Tensor) -> list[tuple[Any, Any, Any, Any]]:
    """Entries that the loss depends on, the shaping of its labels among them."""
    needed_ids, entries_needed = {id(loss)}, []
    for entry in reversed([*TAPE.shaped, *entries]):
        if any(id(x) in needed_ids for x in leaves(entry[3])):
            entries_needed.append(entry)
            needed_ids |= {id(x) for x in leaves((entry[1], entry[2]))}
    return entries_needed[::-1]


def _by_argument(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """Arguments by the names of forward; None where some have none."""
    try:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return None
    kinds = {p.kind for p in bound.signature.parameters.values() if p.name in bound.arguments}
    if inspect.Parameter.VAR_POSITIONAL in kinds or inspect.Parameter.POSITIONAL_ONLY in kinds:
        return None
    arguments = dict(bound.arguments)
    for name, p in bound.signature.parameters.items():
        if p.kind is inspect.Parameter.VAR_KEYWORD:
            arguments |= arguments.pop(name, {})
    return arguments


def _inputs(entries: list[tuple[Any, Any, Any, Any]]) -> dict[str, Tensor]:
    """Tensors that entries take and none of them makes, by name: of the first module's arguments, else in order."""
    made_ids = {id(x) for entry in entries for x in leaves(entry[3])}
    own = {id(x) for e in entries if isinstance(e[0], nn.Module) for x in (*e[0].parameters(), *e[0].buffers())}
    named: dict[str, Tensor] = {}
    seen_ids: set[int] = set()
    for what, args, kwargs, _ in entries:
        arguments = _by_argument(unwrapped(what), args, kwargs) if isinstance(what, nn.Module) else None
        pairs = list(arguments.items()) if arguments else [("labels", x) for x in leaves((args, kwargs))]
        for name, value in pairs:
            for x in leaves(value):
                if id(x) in made_ids | own | seen_ids:
                    continue
                seen_ids.add(id(x))
                base, count = name if name.isidentifier() else "input", 0
                while name in named:
                    count += 1
                    name = f"{base}{count}"
                named[name] = x
    return named
