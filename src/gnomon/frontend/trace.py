"""One forward of a module, recorded: every ATen op with its operands, the torch call and module it belongs to.

`record(module, inputs)` runs the module under two modes and returns a `ForwardTrace`. A `Step` is one call of the torch
API (a `linear`, a `scaled_dot_product_attention`, a `+`) with the ATen ops that it runs; what autograd keeps of it is
read off saved-tensor hooks. On the meta device nothing is computed; an integer that Python asks for is worked out from
the ops that lead to it. Leaves out what the ops mean (`convert`) and how sizes depend on the inputs (`sizes`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn.utils.stateless import _reparametrize_module
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from gnomon.errors import CaptureError
from gnomon.frontend.caches import forgotten
from gnomon.frontend.numbers import FINITE, Numbers, on_cpu
from gnomon.frontend.records import AtenNode, ForwardTrace, Ref, Step, Value, is_trained

LITERAL_ELEMENTS = 64
"""Constants of so many elements are written into the graph; longer ones are states with a name."""


# Python functions of torch.nn.functional that are made of others worth seeing.
_OPENED = ("multi_head_attention_forward",)
_VALUE_READERS = ("aten._local_scalar_dense.default", "aten.is_nonzero.default", "aten.equal.default")
_VALUE_SIZED = ("aten.nonzero.default", "aten._unique2.default", "aten.masked_select.default",
                "aten.unique_consecutive.default", "aten.unique_dim.default", "aten.bincount.default",
                "aten.repeat_interleave.Tensor")  # fmt: skip
"""Ops whose output's size depends on values."""


class ForwardRecorder:
    """The growing trace of one forward."""

    def __init__(self, module: nn.Module, *, meta: bool) -> None:
        self.meta = meta
        self.values: list[Value] = []
        self.steps: list[Step] = []
        self.notes: list[str] = []
        self.constants: dict[str, Tensor] = {}
        self.by_id: dict[int, int] = {}
        self.by_alias: dict[tuple[Any, ...], int] = {}
        self.alive: list[Tensor] = []
        self.keep_alive: list[Tensor] = []
        self.numbers = Numbers(self.values)
        self.storages: dict[int, int] = {}
        self.names = {id(child): name for name, child in module.named_modules()}
        self.stack: list[tuple[str, str]] = [("", type(module).__name__)]
        self.turns: list[tuple[tuple[str, int], ...]] = [()]
        self.entered: dict[str, int] = {}
        self.late: list[Step] = []
        self.inside = 0
        self.read = False
        self.open: Step | None = None
        self.pending: list[tuple[int, tuple[int, ...], torch.dtype]] = []

    # --- values

    def value(
        self,
        tensor: Tensor,
        origin: str,
        name: str = "",
        *,
        fed: bool = True,
        learned: bool = False,
        grad: bool | None = None,
    ) -> int:
        index = len(self.values)
        if tensor.is_quantized or tensor.layout is not torch.strided:
            kind = "quantised" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
            where = name if origin in ("parameter", "buffer", "input") else _where()
            raise CaptureError(f"{where}: a {kind} tensor has no place in a graph")
        key = tensor.untyped_storage()._cdata
        number = self.storages.setdefault(key, len(self.storages))
        self.values.append(
            Value(
                tuple(tensor.shape),
                tensor.dtype,
                origin,
                name,
                tensor.requires_grad if grad is None else grad,
                number,
                fed,
                learned,
            )
        )
        self.keep_alive.append(tensor)
        self.by_id[id(tensor)] = index
        self.by_alias[_alias(tensor)] = index
        return index

    def value_of(self, tensor: Tensor) -> int | None:
        index = self.by_id.get(id(tensor))
        if index is not None or is_functorch_wrapped_tensor(tensor):
            return index
        return self.by_alias.get(_alias(tensor))

    def ref(self, tensor: Tensor) -> Ref:
        """The value of a tensor; one that nobody made here is a constant."""
        index = self.value_of(tensor)
        if index is None:
            name = f"constants.{len(self.constants)}"
            self.constants[name] = tensor.detach().clone()
            index = self.value(tensor, "constant", name, fed=False)
            if self.meta and tensor.device.type != "meta":
                self.numbers.real[index] = tensor
        return Ref(index)

    def refs(self, tree: Any) -> Any:
        return tree_map(lambda x: self.ref(x) if isinstance(x, Tensor) else x, tree)

    def refs_known(self, tree: Any) -> Any:
        """Does what `refs` does, with None for tensors that are not values (those of vmap)."""

        def one(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            index = self.value_of(x)
            return None if index is None else Ref(index)

        return tree_map(one, tree)

    def adopt(self, out: Any, before: int) -> None:
        """What a call returns is known by the tensors that its caller sees: autograd may wrap what an op made."""
        for x in tree_flatten(out)[0]:
            if not isinstance(x, Tensor) or is_functorch_wrapped_tensor(x):
                continue
            index = self.value_of(x)
            if index is not None:
                self.by_id[id(x)] = index
                self.alive.append(x)
                if index >= before and not self.inside:
                    self.values[index].grad = x.requires_grad

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def read_by(self, what: str, args: Any, where: str) -> None:
        """Python asks for numbers: said where they depend on the inputs."""
        reads = [self.value_of(x) for x in tree_flatten(args)[0] if isinstance(x, Tensor)]
        if any(index is not None and self.values[index].fed for index in reads):
            self.read = True
            self.note(f"{where}: {what} depends on values; the graph holds for inputs like the example")

    def was_read(self, tensor: Tensor, numbers: Any, where: str) -> None:
        """A step that has what Python read, so that a run of the graph can see whether it is the same."""
        index = self.value_of(tensor)
        if index is None or not self.values[index].fed:
            return
        self.values.append(replace(self.values[index], origin="op", name="", grad=False))
        self.keep_alive.append(tensor)
        out = (len(self.values) - 1,)
        node = AtenNode(
            "aten.detach.default", (Ref(index),), {}, out, False, torch.is_grad_enabled(), read_values=numbers
        )
        step = Step("read", *self.stack[-1], where, self.turns[-1], [node])
        (self.steps if self.open is None else self.late).append(step)

    # --- steps

    def step(self) -> Step:
        if self.open is not None:
            return self.open
        step = Step("", *self.stack[-1], _where(), self.turns[-1])
        self.steps.append(step)
        return step

    def keep(self, tensor: Tensor) -> Tensor:
        key = tensor.untyped_storage()._cdata
        self.alive.append(tensor)
        number = self.storages.setdefault(key, len(self.storages))
        (self.open.saved_tensors if self.open is not None else self.pending).append(
            (number, tuple(tensor.shape), tensor.dtype)
        )
        return tensor

    def add(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        step = self.step()
        if self.open is None:
            step.saved_tensors, self.pending = self.pending, []
        many = isinstance(out, (tuple, list))
        flat = list(out) if many else [out]
        refs_args, refs_kwargs = self.refs(tuple(args)), self.refs(dict(kwargs))
        reads = [self.values[x.index] for x in tree_flatten((refs_args, refs_kwargs))[0] if isinstance(x, Ref)]
        fed, learned = any(v.fed for v in reads), any(v.learned for v in reads)
        flows = (
            (torch.is_grad_enabled() or self.inside > 0) and any(v.grad for v in reads) and "detach" not in str(func)
        )
        outs = tuple(
            self.value(x, "op", fed=fed, learned=learned, grad=flows and x.is_floating_point())
            if isinstance(x, Tensor)
            else None
            for x in flat
        )
        sized = str(func) in _VALUE_SIZED and fed
        node = AtenNode(str(func), refs_args, refs_kwargs, outs, many, torch.is_grad_enabled(), sized=sized)
        step.nodes.append(node)
        if self.meta:
            self.numbers.add(node)


def _alias(tensor: Tensor) -> tuple[Any, ...]:
    offset = tensor.storage_offset() if tensor.layout is torch.strided else 0
    stride = tensor.stride() if tensor.layout is torch.strided else ()
    return (tensor.untyped_storage()._cdata, offset, tuple(tensor.shape), stride, tensor.dtype)


_OURS = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parent}/", "<frozen", "<string>")


def _where() -> str:
    """File and line of the nearest frame that is neither torch's nor ours."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_OURS):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"


class _Calls(TorchFunctionMode):
    """Opens a step for each call of the torch API that runs an op."""

    def __init__(self, recorder: ForwardRecorder) -> None:
        super().__init__()
        self.recorder = recorder
        self.entering = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, recorder = kwargs or {}, self.recorder
        name = getattr(func, "__name__", str(func))
        if name == "__get__" or recorder.open is not None:
            return func(*args, **kwargs)
        if name in _OPENED:
            self.entering = True
            with self:
                return func(*args, **kwargs)
        if name in ("tolist", "numpy") and args and isinstance(args[0], Tensor):
            recorder.read_by(name, args, _where())
            if not recorder.meta:
                recorder.was_read(args[0], args[0].tolist(), _where())
            else:
                real = recorder.numbers.of(recorder.ref(args[0]).index, _where())
                recorder.was_read(args[0], real.tolist(), _where())
                return getattr(real, name)()
        if recorder.meta and "device" in kwargs and kwargs["device"] is not None:
            written_out = name in ("tensor", "as_tensor") and not isinstance(args[0], Tensor)
            kwargs = {**kwargs, "device": torch.device("cpu" if written_out else "meta")}  # so its numbers stay known
        step = Step(name, *recorder.stack[-1], "", recorder.turns[-1])
        recorder.open = step
        before = len(recorder.values)
        try:
            if recorder.meta and name in ("__getitem__", "__setitem__"):
                args = (args[0], _indices(args[1]), *args[2:])
            out = func(*args, **kwargs)
            if recorder.meta and name == "scaled_dot_product_attention" and out.dim() == 4:
                out = out.transpose(1, 2).contiguous().transpose(1, 2)  # as fused kernels lay it, unlike torch on meta
        finally:
            recorder.open = None
        if step.nodes:
            step.where = _where()
            step.call = (recorder.refs_known(args), recorder.refs_known(kwargs))
            recorder.steps.append(step)
            recorder.adopt(out, before)
            answered = recorder.value_of(out) if recorder.meta and name in FINITE else None
            if answered is not None:
                recorder.numbers.finite(answered, FINITE[name])
        recorder.steps += recorder.late
        recorder.late.clear()
        return out


def _indices(index: Any) -> Any:
    """An index whose lists of numbers are tensors, as torch makes of them, on the CPU, so that these are known."""
    if isinstance(index, tuple):
        return tuple(_indices(part) for part in index)
    if isinstance(index, list) and index and all(isinstance(x, int) for x in index):
        return torch.tensor(index)
    return index


class _Ops(TorchDispatchMode):
    """Records each ATen op; on the meta device brings every operand there."""

    def __init__(self, recorder: ForwardRecorder) -> None:
        super().__init__()
        self.recorder = recorder
        self.moved: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, recorder, name = kwargs or {}, self.recorder, str(func)
        if func.namespace in ("prim", "profiler"):
            return func(*args, **kwargs)
        if name in _VALUE_READERS or name in _VALUE_SIZED:
            recorder.read_by(name.split(".")[1].lstrip("_"), args, _where())
        if not recorder.meta:
            out = func(*args, **kwargs)
            if name not in _VALUE_READERS:
                recorder.add(func, args, kwargs, out)
            elif name != "aten.equal.default":
                recorder.was_read(args[0], out, _where())
            return out
        args, kwargs = tree_map(self._on_meta, (tuple(args), dict(kwargs)))
        if "device" in kwargs:
            kwargs["device"] = torch.device("meta")
        if name in _VALUE_READERS:
            real = tree_map(
                lambda x: recorder.numbers.of(recorder.ref(x).index, _where()) if isinstance(x, Tensor) else x, args
            )
            read = func(*real)
            if name != "aten.equal.default":
                recorder.was_read(args[0], read, _where())
            return read
        try:
            if name in _VALUE_SIZED:
                raise NotImplementedError
            out = func(*args, **kwargs)
        except NotImplementedError:
            out = self._through_values(func, args, kwargs)
        recorder.add(func, args, kwargs, out)
        return out

    def _on_meta(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or x.device.type == "meta":
            return x
        meta = self.moved.get(id(x))
        if meta is None:
            with torch.no_grad():
                meta = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
            self.moved[id(x)] = meta
            recorder = self.recorder
            name = f"constants.{len(recorder.constants)}"
            recorder.constants[name] = x
            index = recorder.value(meta, "constant", name, fed=False)
            recorder.numbers.real[index] = x
            recorder.alive.append(x)
        return meta

    def _through_values(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An op without a shape function, by the numbers of its operands."""
        recorder, where = self.recorder, _where()
        if str(func) not in _VALUE_SIZED:
            where = f"{where}: {func} has no shape function (`torch.library.register_fake`)"
        real = tree_map(
            lambda x: recorder.numbers.of(recorder.ref(x).index, where) if isinstance(x, Tensor) else on_cpu(x),
            (args, kwargs),
        )
        out = func(*real[0], **real[1])
        return tree_map(lambda x: torch.empty_like(x, device="meta") if isinstance(x, Tensor) else x, out)


@contextmanager
def _modules(recorder: ForwardRecorder) -> Iterator[None]:
    """Knows at any time whose forward runs."""

    def enter(module: nn.Module, args: Any) -> None:
        name = recorder.names.get(id(module), recorder.stack[-1][0])
        recorder.stack.append((name, type(module).__name__))
        recorder.entered[name] = recorder.entered.get(name, 0) + 1
        recorder.turns.append((*recorder.turns[-1], (name, recorder.entered[name])))

    def leave(module: nn.Module, args: Any, out: Any) -> None:
        recorder.stack.pop()
        recorder.turns.pop()

    hooks = (
        nn.modules.module.register_module_forward_pre_hook(enter),
        nn.modules.module.register_module_forward_hook(leave, always_call=True),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _functions(recorder: ForwardRecorder) -> Iterator[None]:
    """Names autograd functions of the user's own, whose backward the graph takes from their forward."""
    plain = torch.autograd.Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not cls.__module__.startswith("torch."):
            recorder.note(f"{_where()}: the backward of {cls.__qualname__} is its own; the graph derives it instead")
        recorder.inside += torch.is_grad_enabled()  # its forward runs without autograd, and is gone back through
        try:
            return plain.__get__(None, cls)(*args, **kwargs)
        finally:
            recorder.inside -= torch.is_grad_enabled()

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = plain  # type: ignore[method-assign]


@contextmanager
def _entering(calls: _Calls) -> Iterator[None]:
    """Lets the body of an opened function run although the mode is on: its own first question is answered no."""
    space = torch.nn.functional
    plain = space.has_torch_function  # type: ignore[attr-defined]

    def was_entered(*args: Any) -> bool:
        if calls.entering:
            calls.entering = False
            return False
        return bool(plain(*args))

    space.has_torch_function = was_entered  # type: ignore[attr-defined]
    try:
        yield
    finally:
        space.has_torch_function = plain  # type: ignore[attr-defined]


def record(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    names: Mapping[int, str],
    *,
    meta: bool,
    dtype: torch.dtype | None = None,
) -> ForwardTrace:
    """Runs the module's forward once. args, kwargs: tensors among them are inputs, called `names[id]`. meta: on shapes
    only. dtype: of the module's floating-point tensors, in place of their own. CaptureError with file and line where
    the forward cannot be run."""
    recorder = ForwardRecorder(module, meta=meta)
    swapped: dict[str, Tensor] = {}

    def copied(x: Tensor) -> Tensor:
        # A clone, since a forward may write into its arguments, which are the caller's.
        own = torch.empty_like(x, device="meta") if meta else x.detach().clone()
        return own.to(dtype) if dtype is not None and x.is_floating_point() else own

    for name, parameter in module.named_parameters():
        swapped[name] = copied(parameter).requires_grad_(is_trained(parameter))
        recorder.value(swapped[name], "parameter", name, learned=True)
    for name, buffer in module.named_buffers():
        swapped[name] = copied(buffer)
        index = recorder.value(swapped[name], "buffer", name, fed=False)
        # A meta tensor has no values; where the forward reads one as a number, it is taken from here.
        if meta and buffer.device.type != "meta":
            recorder.numbers.real[index] = buffer

    def recorded(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        own = copied(x)
        index = recorder.value(own, "input", names[id(x)])
        if meta and x.device.type != "meta":
            recorder.numbers.real[index] = x
        return own

    args, kwargs = tree_map(recorded, (tuple(args), dict(kwargs)))
    calls = _Calls(recorder)
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.enter_context(forgotten(module))
        stack.enter_context(_reparametrize_module(module, swapped, tie_weights=True, strict=False))
        for context in (_modules(recorder), _functions(recorder), _entering(calls)):
            stack.enter_context(context)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(recorder.keep, lambda x: x))
        stack.enter_context(_Ops(recorder))
        stack.enter_context(calls)
        try:
            out = module(*args, **kwargs)
        except CaptureError:
            raise
        except Exception as error:
            where = _line_of(error, module)
            raise CaptureError(f"{where}: {type(error).__name__}: {_first_line(error)}") from error
    outputs, output_names = list[int](), list[str]()
    for name, tensor in named_tensors(out):
        value = recorder.value_of(tensor)
        if value is not None and value not in outputs:
            outputs.append(value)
            output_names.append(name)
    if not outputs:
        raise CaptureError(f"{type(module).__name__} returned no tensor")
    return ForwardTrace(
        values=recorder.values,
        steps=recorder.steps,
        outputs=outputs,
        output_names=output_names,
        notes=recorder.notes,
        constants=recorder.constants,
        reads_values=recorder.read,
        tensors=recorder.keep_alive,
    )


def named_tensors(out: Any, name: str = "out") -> Iterator[tuple[str, Tensor]]:
    """Tensors in what a module returned, by key; caches and other objects are passed over."""
    if isinstance(out, Tensor):
        yield name, out
    elif isinstance(out, Mapping):
        for key, inner in out.items():
            yield from named_tensors(inner, str(key))
    elif isinstance(out, (list, tuple)):
        fields = getattr(out, "_fields", None)
        for index, inner in enumerate(out):
            yield from named_tensors(inner, fields[index] if fields else f"{name}.{index}")
    elif hasattr(out, "__dataclass_fields__"):
        for key in out.__dataclass_fields__:
            yield from named_tensors(getattr(out, key), key)


def _line_of(error: BaseException, module: nn.Module) -> str:
    """File and line, in the user's code, where an error came from, and the module of torch's that it lies in."""
    where, at, inner = "", error.__traceback__, module
    while at is not None:
        name, holder = at.tb_frame.f_code.co_filename, at.tb_frame.f_locals.get("self")
        if not name.startswith(_OURS):
            where, inner = f"{name}:{at.tb_lineno}", module
        elif isinstance(holder, nn.Module):
            inner = holder
        at = at.tb_next
    path = next((path for path, other in module.named_modules() if other is inner), "")
    return ", ".join(filter(None, (where, f"{path} ({type(inner).__name__})" if path else ""))) or type(inner).__name__


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]
