"""Kinds that work element by element: activations, sums, products, scales, dropout, casts.

Other inputs have some dims of the first one and are spread over the rest. Leaves out kinds with statistics (`norm`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from gnomon.ops.bases import MOVES_BYTES
from gnomon.ops.curve import Curve, once, passes
from gnomon.ops.kernels import Kernels
from gnomon.ops.op import Op, Problem, RuledCall, Steps, Tensors, Zeros, attrs
from gnomon.ops.rules import (
    bytes_of,
    cannot_write,
    first_dims,
    per_element,
    per_element_back,
    saves_inputs,
    saves_operands,
)
from gnomon.ops.work import GradOp, Setting, Work
from gnomon.tensors.tensor import Tensor

OF_OUTPUT = ("relu", "tanh", "sigmoid")
"""Activations whose derivative follows from what they wrote."""


ZERO_TO_ZERO = ("gelu", "gelu_tanh", "gelu_new", "quick_gelu", "relu", "relu2", "silu", "tanh")
"""Activations of which 0 makes 0."""


def _saves_activation(op: Op, block: Tensors, needs_grad: Collection[str]) -> tuple[str, ...]:
    # relu' = (y > 0), tanh' = 1 - y², sigmoid' = y (1 - y): what the next op reads anyway is kept, and the input can
    # go.
    keeps_output = op.attr("fn", "") in OF_OUTPUT
    return (*(op.outputs[:1] if keeps_output else op.inputs[:1]), *op.outputs[1:])


def _saves_aside(op: Op, block: Tensors, needs_grad: Collection[str]) -> tuple[str, ...]:
    """What its kernel wrote aside: the mask of a dropout, the tanh of a softcap."""
    return op.outputs[1:]


def _saves_vector(op: Op, block: Tensors, needs_grad: Collection[str]) -> tuple[str, ...]:
    """Both operands, where it is scaled by a vector and not by a constant."""
    return op.inputs if len(op.inputs) > 1 else ()


def _saves_modulated(op: Op, block: Tensors, needs_grad: Collection[str]) -> tuple[str, ...]:
    # y = x (1 + s) + b: dx = dy (1 + s) reads s, ds sums dy x and reads x, and db reads neither.
    x, by = op.inputs[0], op.inputs[2]
    return tuple(name for name, other in ((x, by), (by, x)) if other in needs_grad)


def _blend_dims(op: Op, block: Tensors) -> Problem:
    """Two tensors of the same dims, and two numbers for each token."""
    a, b, logits, out = (block.tensor(name) for name in (*op.inputs[:3], op.outputs[0]))
    fits = a.dims == b.dims == out.dims and logits.dims[:-1] == a.dims[:-1] and logits.dims[-1].size == 2
    return None if fits else cannot_write(op, block)


def _sum_back(op: Op, block: Tensors, setting: Setting, grad: GradOp) -> Work:
    """The gradient is the incoming one; that of a broadcast operand is summed up."""
    whole = block.tensor(op.outputs[0]).dims
    narrow = [name for name in grad.grads_out if block.tensor(name).dims != whole]
    if not narrow:
        return Work()
    return Work(read_bytes=bytes_of(grad.grads_in, block, setting), write_bytes=bytes_of(narrow, block, setting))


def _glu_steps(op: Op, low: Steps, kernels: Kernels) -> None:
    if kernels.glu == "fused":
        low.ops.append(op)
        return
    # Fused, backward keeps the gate and up. In two steps it keeps three tensors: the activated gate, for up's gradient,
    # too.
    gate, up = op.inputs
    fn = attrs(fn=op.attr("fn", "silu"))
    act = low.step(op, "activated", "activation", (gate,), low.block.tensor(gate), attrs=fn)
    low.ops.append(replace(op, kind="mul", inputs=(act, up), attrs=()))


def _activation_steps(op: Op, low: Steps, kernels: Kernels) -> None:
    fn = op.attr("fn", "") if kernels.glu == "unfused" else ""
    if fn == "gelu_new":
        _gelu_new(op, low)
    elif fn == "relu2":
        _relu_squared(op, low)
    elif op.path in low.weighted:
        out = low.block.tensor(op.outputs[0])
        low.emit(op, Tensor(name=f"{op.path}:plain", dims=out.dims, dtype=out.dtype))
    else:
        low.ops.append(op)


def _gelu_new(op: Op, low: Steps) -> None:
    """0.5 x (1 + tanh(a (x + b x³))), as transformers' NewGELUActivation runs it."""
    x = low.block.tensor(op.inputs[0])
    tanh = low.step(op, "tanh", "activation", (x.name,), x, attrs=attrs(fn="tanh"))
    one_plus = low.step(op, "one_more", "activation", (tanh,), x, attrs=attrs(fn="add_one"))
    half = low.step(op, "half", "activation", (x.name,), x, attrs=attrs(fn="half"))
    low.ops.append(replace(op, kind="mul", inputs=(half, one_plus), attrs=()))


def _relu_squared(op: Op, low: Steps) -> None:
    """relu(x)², as torch.pow(relu(x), 2) runs it."""
    x = low.block.tensor(op.inputs[0])
    relu = low.step(op, "relu", "activation", (x.name,), x, attrs=attrs(fn="relu"))
    low.ops.append(replace(op, inputs=(relu,), attrs=attrs(fn="square")))


def _mask_steps(op: Op, low: Steps, kernels: Kernels) -> None:
    x = low.block.tensor(op.inputs[0])
    low.emit(op, Tensor(name=f"{op.path}:mask", dims=x.dims, dtype="bool"))


def _softcap_steps(op: Op, low: Steps, kernels: Kernels) -> None:
    """tanh(x / cap) is what backward reads, and not cap times that, which others read and may keep."""
    x = low.block.tensor(op.inputs[0])
    low.emit(op, Tensor(name=f"{op.path}:tanh", dims=x.dims, dtype=x.dtype))


def _softcap_work(op: Op, block: Tensors, setting: Setting) -> Work:
    """One read and one write of each of three kernels (`price`): the tanh that is kept is one of these writes."""
    return per_element(5)(replace(op, outputs=op.outputs[:1]), block, setting)


def _square_back(op: Op, grad: GradOp) -> Curve:
    """Prices the backward of x²: PyTorch's pow_backward copies x, doubles it and multiplies (FunctionsManual.cpp)."""
    return passes(3, 2.33) if op.attr("fn", "") == "square" else once()


def _factors_back(op: Op, grad: GradOp) -> Curve:
    """A kernel for each factor that is trained."""
    return once() if len(grad.grads_out) == 1 else passes(2, 1.33)


def _zeros_of_activation(op: Op) -> Zeros:
    return "all" if op.attr("fn", "") in ZERO_TO_ZERO else "unknown"


def _zeros_of_scale(op: Op) -> Zeros:
    """A learned vector may have zeros of its own, which nobody looks for."""
    return "all" if len(op.inputs) == 1 else "unknown"


def _zeros_of_gate(op: Op) -> Zeros:
    plain = not {"limit", "alpha"} & set(dict(op.attrs))  # GPT-OSS adds 1 to what is gated
    return "either" if plain and op.attr("fn", "silu") in ZERO_TO_ZERO else "unknown"


ACTIVATION = replace(
    MOVES_BYTES,
    name="activation",
    signature="x -> fn(x); fn: gelu | gelu_tanh | gelu_new | quick_gelu | relu | relu2 | silu | tanh | sigmoid",
    dims=first_dims,
    saves=_saves_activation,
    forward=per_element(8),
    backward=per_element_back(10),
    steps=_activation_steps,
    fused_by="glu",
    grad_price=_square_back,
    calibrated="elements",
    calls=tuple(RuledCall(function=name, rule="activation") for name in ("gelu", "relu", "silu", "tanh", "sigmoid")),
    zeros=_zeros_of_activation,
    torch="elementwise:activation",
)

GLU = replace(
    MOVES_BYTES,
    name="glu",
    signature="gate, up -> fn(gate) · up; fn: silu (SwiGLU) | gelu | gelu_tanh (GeGLU) | relu; limit, alpha",
    dims=first_dims,
    saves=saves_inputs,
    forward=per_element(9),
    backward=per_element_back(14),
    steps=_glu_steps,
    fused_by="glu",
    does="gates",
    zeros=_zeros_of_gate,
    torch="elementwise:glu",
)

ADD = replace(
    MOVES_BYTES,
    name="add",
    signature="a, b -> a + factor · b; factor",
    dims=first_dims,
    saves="nothing",
    forward=per_element(1),
    backward=_sum_back,
    decay="matrices",
    grad_price=once("reduce"),  # a broadcast operand: summed
    calibrated="elements, forward",
    gradient="passed on",
    does="adds",
    served="bytes",
    calls=tuple(RuledCall(function=name, rule="pair") for name in ("add", "__add__")),
    zeros="all",
    torch="elementwise:add",
)

MUL = replace(
    MOVES_BYTES,
    name="mul",
    signature="a, b -> a · b",
    dims=first_dims,
    saves=saves_operands,
    forward=per_element(1),
    backward=per_element_back(2),
    decay="matrices",
    grad_price=_factors_back,
    calibrated="elements",
    calls=tuple(RuledCall(function=name, rule="pair") for name in ("mul", "__mul__")),
    zeros="either",
    torch="elementwise:mul",
)

SCALE = replace(
    MOVES_BYTES,
    name="scale",
    does="scales",
    served="free",  # folded into a neighbour
    signature="x[, vector] -> x times a constant or a learned vector; factor",
    dims=first_dims,
    saves=_saves_vector,
    forward=per_element(1),
    backward=per_element_back(1),
    decay="matrices",
    zeros=_zeros_of_scale,
    torch="elementwise:scale",
)

MODULATE = replace(
    MOVES_BYTES,
    name="modulate",
    signature="x, shift, scale -> x · (1 + scale) + shift",
    dims=first_dims,
    saves=_saves_modulated,
    forward=per_element(2),
    backward=per_element_back(4),
    decay="matrices",
    price=passes(3, 1.67),  # 1 + scale, product, sum
    grad_price=passes(4, 1.67, "reduce"),
    zeros="unknown",
    torch="elementwise:modulate",
)

BLEND = replace(
    MOVES_BYTES,
    name="blend",
    signature="a, b, logits (…, 2) -> softmax(logits)[0] · a + softmax(logits)[1] · b",
    dims=_blend_dims,
    saves=saves_inputs,
    forward=per_element(3),
    backward=per_element_back(6),
    price=passes(3, 2.33),  # a product of each, their sum
    grad_price=passes(4, 2.0, "reduce"),  # of a and b, and the two sums over each token
    zeros="unknown",
    torch="elementwise:blend",
)

SOFTCAP = replace(
    MOVES_BYTES,
    name="softcap",
    does="caps",
    signature="x -> cap · tanh(x / cap); cap",
    dims=first_dims,
    saves=_saves_aside,
    forward=_softcap_work,
    backward=per_element_back(3),
    steps=_softcap_steps,
    price=passes(3, 3.0),  # divide, tanh, multiply
    grad_price=passes(3, 3.0),
    zeros="all",
    torch="elementwise:softcap",
)

DROPOUT = replace(
    MOVES_BYTES,
    name="dropout",
    signature="x -> x with elements left out at random, the others scaled up; p, drawn",
    dims=first_dims,
    saves=_saves_aside,
    forward=per_element(2),
    backward=per_element_back(1),
    steps=_mask_steps,
    does="drops",
    served="free",
    calls=(RuledCall(function="dropout", rule="dropout"),),
    zeros="in place",
    torch="elementwise:dropped",
)

CAST = replace(
    MOVES_BYTES,
    name="cast",
    signature="x -> x in another dtype",
    dims=first_dims,
    memory="cast",
    saves="nothing",
    forward=per_element(0),
    backward=per_element_back(0),
    zeros="in place",
    torch="elementwise:unchanged",
)

KINDS = (ACTIVATION, GLU, ADD, MUL, SCALE, MODULATE, BLEND, SOFTCAP, DROPOUT, CAST)
