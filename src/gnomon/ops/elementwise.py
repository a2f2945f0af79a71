"""Kinds that work element by element: activations, sums, products, scales, dropout, casts.

Other inputs have some dims of the first one and are spread over the rest. Leaves out kinds with statistics (`norm`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from gnomon.ops.op import Op, OpKind, Tensors
from gnomon.ops.rules import first_dims, saves_inputs, saves_operands, saves_output

OF_OUTPUT = ("relu", "tanh", "sigmoid")
"""Activations whose derivative follows from what they wrote."""


def _saves_activation(op: Op, block: Tensors, needs_grad: Collection[str]) -> tuple[str, ...]:
    keeps_output = op.attr("fn", "") in OF_OUTPUT
    return (*(op.outputs[:1] if keeps_output else op.inputs[:1]), *op.outputs[1:])


def _saves_mask(op: Op, block: Tensors, needs_grad: Collection[str]) -> tuple[str, ...]:
    return op.outputs[1:]


def _saves_vector(op: Op, block: Tensors, needs_grad: Collection[str]) -> tuple[str, ...]:
    """Both operands, where it is scaled by a vector and not by a constant."""
    return op.inputs if len(op.inputs) > 1 else ()


def _saves_modulated(op: Op, block: Tensors, needs_grad: Collection[str]) -> tuple[str, ...]:
    x, by = op.inputs[0], op.inputs[2]
    return tuple(name for name, other in ((x, by), (by, x)) if other in needs_grad)


ACTIVATION = OpKind(
    name="activation",
    signature="x -> fn(x); fn: gelu | gelu_tanh | gelu_new | quick_gelu | relu | relu2 | silu | tanh | sigmoid",
    contracts=False,
    dims=first_dims,
    memory="own",
    saves=_saves_activation,
    weight_grad="together",
    ungraded=(),
    decay="none",
    runs="function",
)

GLU = replace(
    ACTIVATION,
    name="glu",
    signature="gate, up -> fn(gate) · up; fn: silu (SwiGLU) | gelu | gelu_tanh (GeGLU) | relu; limit, alpha",
    saves=saves_inputs,
)

ADD = replace(ACTIVATION, name="add", signature="a, b -> a + factor · b; factor", saves="nothing", decay="matrices")

MUL = replace(ACTIVATION, name="mul", signature="a, b -> a · b", saves=saves_operands, decay="matrices")

SCALE = replace(
    ACTIVATION,
    name="scale",
    signature="x[, vector] -> x times a constant or a learned vector; factor",
    dims="open",
    saves=_saves_vector,
    decay="matrices",
)

MODULATE = replace(
    ACTIVATION,
    name="modulate",
    signature="x, shift, scale -> x · (1 + scale) + shift",
    dims="open",
    saves=_saves_modulated,
    decay="matrices",
)

SOFTCAP = replace(ACTIVATION, name="softcap", signature="x -> cap · tanh(x / cap); cap", saves=saves_output)

DROPOUT = replace(
    ACTIVATION,
    name="dropout",
    signature="x -> x with elements left out at random, the others scaled up; p, drawn",
    saves=_saves_mask,
)

CAST = replace(ACTIVATION, name="cast", signature="x -> x in another dtype", memory="cast", saves="nothing")

KINDS = (ACTIVATION, GLU, ADD, MUL, SCALE, MODULATE, SOFTCAP, DROPOUT, CAST)
