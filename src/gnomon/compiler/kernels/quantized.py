"""Linear layers that `torch.ao.quantization.quantize_dynamic` made, inside graphs and by the kernels of stored weights.

Such a layer calls `quantized::linear_dynamic` with a packed weight, a ScriptObject of which Dynamo makes no graph:
each layer breaks it, and what lies between runs in pieces. `allow(backend)` has Dynamo put `gnomon::linear_dynamic` in
the place of that call, for this backend and no other, with a number that stands for the packed weight (`number_of`); a
guard holds the graph to that object, so that a weight which is loaded anew is seen. `fuse(graph)` puts a
`DynamicLinear` in its place: the int8 codes as ATen unpacks them, laid as `stored` lays them, with activations that are
rounded as ATen rounds them: one scale and one zero for the whole tensor, from 0 to 127 where `reduce_range` says so.
Sums are integers and what follows is rounded as FBGEMM rounds it, so results are ATen's bit for bit. Leaves out float16
weights, weights with zeros of their own, QNNPACK's and oneDNN's packed weights, and what needs gradients: those run
between graphs as before.
Source: `PackedLinearWeight::apply_dynamic_impl` in PyTorch's aten/src/ATen/native/quantized/cpu/qlinear_dynamic.cpp,
and FBGEMM's `QuantizeAvx2` for how a number is rounded.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from gnomon.compiler.build import address_of
from gnomon.compiler.kernels import stored
from gnomon.compiler.kernels.recurrent import library
from gnomon.compiler.kernels.recurrent_modules import backend_of
from gnomon.compiler.kernels.stored import PackedStored
from gnomon.compiler.kernels.stored_sparse import StoredMatmul
from gnomon.compiler.node import Node
from gnomon.compiler.tasks.steps import Between, KernelCall
from gnomon.compiler.tune.tried import TriedKernel
from gnomon.storage.integers import Integers

log = logging.getLogger("gnomon.compiler")
CLASS = "__torch__.torch.classes.quantized.LinearPackedParamsBase"
ENGINES = ("x86", "fbgemm")
"""Whose arithmetic the kernel has; the others round activations otherwise."""
CALL_S = 12e-6
"""What Python takes to fill the struct and call the kernel, beside ATen's own call."""

_numbers = itertools.count(1)
_known: dict[int, tuple[weakref.ref[Any], int]] = {}
"""By the id of a packed weight."""
_objects: dict[int, weakref.ref[Any]] = {}
"""By its number."""

library.define("linear_dynamic(Tensor x, int weight, int outputs, bool reduce_range) -> Tensor")


def number_of(weight: Any) -> int:
    """The number that stands for a packed weight in graphs. It is no longer known once the object is gone; whoever
    compiled a graph with it holds the object."""
    found = _known.get(id(weight))
    # An id is given again once its object is gone, so the object is compared too.
    if found is None or found[0]() is not weight:
        number, of = next(_numbers), id(weight)

        def forget(_: Any) -> None:
            _objects.pop(number, None)
            # Another object may have this id by now.
            if _known.get(of, (None, 0))[1] == number:
                del _known[of]

        found = _known[of] = (weakref.ref(weight, forget), number)
        _objects[number] = found[0]
    return found[1]


def weight_of(number: int) -> Any:
    """The packed weight that a number stands for."""
    found = _objects[number]()
    assert found is not None, "a graph outlived the weight that its guard looks at"
    return found


def _linear_dynamic(x: Tensor, weight: int, outputs: int, reduce_range: bool) -> Tensor:
    made: Tensor = torch.ops.quantized.linear_dynamic(x, weight_of(weight), reduce_range)
    return made


def _fake(x: Tensor, weight: int, outputs: int, reduce_range: bool) -> Tensor:
    return x.new_empty((*x.shape[:-1], outputs))


library.impl("linear_dynamic", _linear_dynamic, "CPU")
torch.library.register_fake("gnomon::linear_dynamic", _fake, lib=library)


# ---- while Dynamo looks
def allow(backend: Any) -> None:
    """Has Dynamo take dynamically quantised layers into its graphs, once a process; without effect where Dynamo is
    built otherwise than we know it."""
    try:
        from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

        original = TorchInGraphFunctionVariable.call_function
    except (ImportError, AttributeError) as error:
        log.debug("quantised layers stay outside graphs: %s", error)
        return
    if getattr(original, "for_gnomon", False):
        return

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        relu = _CALLS.get(self.value) if isinstance(self.value, _OPERATIONS) else None
        given = None if relu is None or backend_of(tx) is not backend else _given(tx, args, kwargs)
        if given is None:
            return original(self, tx, args, kwargs)
        made = original(TorchInGraphFunctionVariable(torch.ops.gnomon.linear_dynamic), tx, given, {})
        return original(TorchInGraphFunctionVariable(torch.relu), tx, [made], {}) if relu else made

    call_function.for_gnomon = True  # type: ignore[attr-defined]
    TorchInGraphFunctionVariable.call_function = call_function  # type: ignore[method-assign]


_OPERATIONS = (torch._ops.OpOverloadPacket, torch._ops.OpOverload)
_CALLS = {
    of: relu
    for name, relu in (("linear_dynamic", False), ("linear_relu_dynamic", True))
    for packet in [getattr(torch.ops.quantized, name)]
    for of in (packet, packet.default)
}
"""PyTorch's operations, and whether a ReLU follows."""


def _given(tx: Any, args: Any, kwargs: Any) -> list[Any] | None:
    """The arguments of ours as Dynamo's variables; None where the call is to break the graph as it would for others."""
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.variables import ConstantVariable

    named = {**dict(zip(("X", "W_prepack", "reduce_range"), args, strict=False)), **kwargs}
    x, weight, reduce_range = (named.get(name) for name in ("X", "W_prepack", "reduce_range"))
    if x is None or weight is None:
        return None
    x, weight = (one.realize() if hasattr(one, "realize") else one for one in (x, weight))
    value, source = getattr(weight, "value", None), getattr(weight, "source", None)
    example = x.as_proxy().node.meta.get("example_value") if hasattr(x, "as_proxy") else None
    if not isinstance(value, torch.ScriptObject) or source is None or not _is_served(value):
        return None
    if not isinstance(example, Tensor) or example.dtype != torch.float32 or example.device.type != "cpu":
        return None
    if example.dim() < 2 or (torch.is_grad_enabled() and example.requires_grad):  # ATen has no gradient to give either
        return None
    # The number stands for this very object: with another one at its place the graph is made anew.
    install_guard(source.make_guard(GuardBuilder.ID_MATCH))
    outputs = _codes(value).shape[0]
    given = [ConstantVariable.create(one) for one in (number_of(value), outputs)]
    return [x, *given, ConstantVariable.create(False) if reduce_range is None else reduce_range]


def _is_served(weight: Any) -> bool:
    """Whether a ScriptObject is a weight in eight bits that FBGEMM packed."""
    return weight._type().qualified_name() == CLASS and torch.backends.quantized.engine in ENGINES and _eight(weight)


def _codes(weight: Any) -> Tensor:
    codes: Tensor = weight.unpack()[0]
    return codes


def _eight(weight: Any) -> bool:
    codes = _codes(weight)
    return bool(codes.is_quantized and codes.dtype == torch.qint8)


# ---- in a graph of ATen's
def packed_of(weight: Any, reduce_range: bool) -> tuple[PackedStored, Tensor, Tensor | None] | None:
    """(the codes as a kernel reads them, their sums for each output, the bias) of a weight that FBGEMM packed; None
    where no kernel of ours computes what ATen does."""
    codes, bias = weight.unpack()
    if codes.qscheme() == torch.per_tensor_affine:
        zeros, scales = torch.tensor([codes.q_zero_point()]), torch.tensor([codes.q_scale()])
    elif codes.qscheme() == torch.per_channel_affine and codes.q_per_channel_axis() == 0:
        zeros, scales = codes.q_per_channel_zero_points(), codes.q_per_channel_scales()
    else:
        return None
    if bool(zeros.any()) or not codes.numel():
        return None
    whole, plain = Integers(bits=8, group=0, scale="float32"), codes.int_repr()
    outputs, inputs = plain.shape
    wide = scales.float().expand(outputs).contiguous().numpy()[:, None]
    # As `Integers` of eight bits are stored: with their zero, 128, added.
    shifted = (plain.to(torch.int16) + 128).to(torch.uint8).numpy()
    packed = stored.repack(whole.of_codes(shifted, wide), whole, (outputs, inputs))
    assert isinstance(packed, PackedStored)
    # With seven bits of activations two products with codes of eight fit the 16 bits in which AVX2 adds them up.
    form = replace(packed.form, range=127 if reduce_range else 255)
    if not reduce_range and form.lanes.name != "avx512":  # FBGEMM adds pairs of products up in 16 bits there
        return None
    if packed.by != "kernel" or stored.kernel(form) is None:
        return None
    # The product of shifted codes has the activations' zero in it, which is taken off by these sums; 0 beyond the last
    # output.
    panels = np.zeros(-(-outputs // form.side) * form.side, np.int32)
    panels[:outputs] = plain.sum(1, dtype=torch.int32).numpy()
    return replace(packed, form=form), torch.from_numpy(panels), None if bias is None else bias.detach().contiguous()


class DynamicLinear(TriedKernel):
    """One layer, as a function of x (..., inputs) in float32."""

    def __init__(
        self, weight: Any, reduce_range: bool, packed: PackedStored, sums: Tensor, bias: Tensor | None, fixed: bool
    ) -> None:
        """weight: the object that was packed, which lives as long as this. sums: of the codes of each output."""
        self.text = stored.text_of(packed.form)
        super().__init__("linear_dynamic", f"{self.text}// {packed.shape}", fixed)
        self.weight, self.reduce_range = weight, reduce_range
        self.packed, self.sums = packed, sums
        self.bias = bias
        self.name = f"linear in eight bits {'x'.join(map(str, reversed(packed.shape)))}"

    def run(self, *args: Tensor) -> Tensor:
        """Runs the kernel; ATen where a number is not finite."""
        [x] = args
        n, k = self.packed.shape
        rows = x.reshape(-1, k)
        if rows.stride(-1) != 1 and k > 1:
            rows = rows.contiguous()
        m = rows.shape[0]
        out = torch.empty((*x.shape[:-1], n), dtype=torch.float32, device="cpu")
        room = torch.empty(self.packed.form.room(m, k), dtype=torch.uint8, device="cpu")
        call = self.call(m, rows.stride(0) if m > 1 else k)
        call.x, call.out, call.room = rows.data_ptr(), out.data_ptr(), room.data_ptr()
        function = stored.kernel(self.packed.form)
        if not m or function is None or function(ctypes.addressof(call)):
            return self.aten(x)
        return out

    def call(self, m: int, x_row: int) -> StoredMatmul:
        """What the kernel is told, without the memory of a call."""
        call, (n, k) = stored.stored_matmul(self.packed, self.bias), self.packed.shape
        call.m, call.threads = m, 0 if m * n * k >= stored.PARALLEL else 1
        call.wide = call.wide_out = True
        call.x_row, call.out_row, call.sums = x_row, n, self.sums.data_ptr()
        return call

    def aten(self, *args: Tensor) -> Tensor:
        """Runs ATen's operation."""
        made: Tensor = torch.ops.quantized.linear_dynamic(args[0], self.weight, self.reduce_range)
        return made

    def step(self, node: Node) -> list[Any] | None:
        """What C++ calls in a node's place; None where only Python does."""
        trial = self.trials.get(()) if self.fixed else None
        value, function = node.args[0].meta["val"], stored.kernel(self.packed.form)
        if trial is None or trial.kept is None or trial.verdict.get("wrong") or function is None:
            return None
        if not trial.kept and trial.verdict["kernel_s"] - trial.verdict["aten_s"] > CALL_S:
            return None
        if not (value.is_contiguous() and node.meta["val"].is_contiguous()):
            return None
        k = self.packed.shape[1]
        m = value.numel() // k
        with _disable_current_modes():
            room = torch.empty(self.packed.form.room(m, k), dtype=torch.uint8, device="cpu")
        return [
            KernelCall(
                function=address_of(function), filled=self.call(m, k), inputs=(("x", node.args[0]),),
                outputs=(("out", node), ("room", Between(room))),
            )
        ]  # fmt: skip


def fuse(graph: fx.Graph) -> list[DynamicLinear]:
    """Puts a kernel of ours in the place of each layer that it computes; returns them."""
    made: list[DynamicLinear] = []
    of: dict[tuple[int, bool], Any] = {}
    for node in list(graph.nodes):
        if node.target is not torch.ops.gnomon.linear_dynamic.default:
            continue
        x, number, _, reduce_range = node.args
        weight = weight_of(number)
        if (number, reduce_range) not in of:
            with _disable_current_modes():  # a weight is no fake tensor
                of[number, reduce_range] = packed_of(weight, reduce_range)
        found = of[number, reduce_range]
        if found is None:
            continue
        packed, sums, bias = found
        fixed = all(isinstance(size, int) for size in x.meta["val"].shape)
        call = DynamicLinear(weight, reduce_range, packed, sums, bias, fixed)
        with graph.inserting_before(node):
            new = graph.call_function(call, (x,))
        new.meta.update(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        made.append(call)
    return made
