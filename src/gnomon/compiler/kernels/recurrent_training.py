"""Training of `nn.LSTM` and `nn.GRU` in graphs of backend "gnomon": a forward that keeps its gates, and a backward.

`gnomon::lstm_kept` and `gru_kept` are put in a graph by `recurrent.keep` where gradients are asked for; AOTAutograd
finds their backward here as one node, `lstm_grad` and `gru_grad`. It walks the steps from the last
(cpp/recurrent_backward.cpp) and leaves the gradients of all gates; those of inputs and weights are one product each
over all steps. Weights are packed in every call: they are others after every update. `Learner` tries forward and
backward together, once for each size; where that is wrong or slower, an LSTM is oneDNN's (as in eager), and a GRU is
ATen's, done again in the backward. Float32 and bfloat16, whose sums are floats. Leaves out second derivatives, which
AOTAutograd refuses.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from gnomon.compiler.build import kernel_of
from gnomon.compiler.kernels.recurrent import (
    GATES,
    OPTIONS,
    PACK_AND_RUN,
    SHARE,
    Layers,
    fits,
    forward,
    kernel,
    library,
    packed_memory,
    shapes,
    size_key,
    source,
    threads_for,
)
from gnomon.compiler.machine import this_machine
from gnomon.compiler.tune.gate import Trial

GROUP = 4
"""Vectors of units that lie beside each other in the backward's weights, as in cpp/recurrent_backward.cpp."""
ONEDNN_LSTM = 2
"""Its number for `aten.mkldnn_rnn_layer`."""
FORMULA = "recurrent_backward.cpp"
_memory = threading.local()


class _Backward(ctypes.Structure):
    """The struct `Call` of cpp/recurrent_backward.cpp, field by field."""

    _fields_ = [
        *[(name, ctypes.c_int64) for name in ("gates", "hidden", "steps", "batch", "reverse", "threads")],
        *[(name, ctypes.c_int64) for name in ("y_step", "y_row", "dy_step", "dy_row")],
        *[(name, ctypes.c_void_p) for name in ("weight", "y", "dy", "h0", "c0", "kept", "packed")],
        *[(name, ctypes.c_void_p) for name in ("d_gates", "d_state", "dh", "dc")],
    ]


@cache
def backward_kernel(dtype: torch.dtype) -> Callable[[Any], int] | None:
    """The compiled kernel, None where it does not compile."""
    return kernel_of(source(dtype, FORMULA), ctypes.POINTER(_Backward))


# ---- what a forward leaves to its backward
def kept_shapes(spec: Layers, x: Tensor, h: Tensor) -> list[Tensor]:
    """Makes tensors without values for what a forward keeps: of each direction of each layer its gates (steps, batch,
    gates + 1, hidden); then the outputs of all layers but the last; then oneDNN's memory, of which nothing is known."""
    steps, batch = (x.shape[1], x.shape[0]) if spec.batch_first else (x.shape[0], x.shape[1])
    directions, hidden = spec.layers * spec.directions, h.shape[2]
    # The one more is an LSTM's new cell, or what the state gives to a GRU's new gate before the reset gate multiplies
    # it.
    gates = [x.new_empty((steps, batch, GATES[spec.name] + 1, hidden), dtype=torch.float32) for _ in range(directions)]
    between = [x.new_empty((steps, batch, hidden * spec.directions)) for _ in range(spec.layers - 1)]
    return [*gates, *between, *[x.new_empty((1,), dtype=torch.uint8) for _ in range(directions)]]


def split(spec: Layers, saved: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]:
    """(gates, outputs between layers, oneDNN's memory)."""
    many = spec.layers * spec.directions
    return saved[:many], saved[many : many + spec.layers - 1], saved[many + spec.layers - 1 :]


def nothing_kept(spec: Layers, x: Tensor, h: Tensor) -> list[Tensor]:
    """Makes tensors of these shapes that take no memory, for a forward that keeps nothing."""
    with torch.device("meta"):
        like = kept_shapes(spec, torch.empty(x.shape, dtype=x.dtype), torch.empty(h.shape))
    # Strides of 0: by them `gradients` sees that nothing was kept.
    return [torch.empty(1, dtype=one.dtype).expand(one.shape) for one in like]


class Learner:
    """All layers of an `nn.LSTM` or `nn.GRU` that learns, as a function of x, its states and its weights."""

    def __init__(self, layers: Layers) -> None:
        self.__name__, self.__module__ = f"learning_{layers.name}", __name__  # what fx calls a node
        self.layers = layers
        self.hidden: int | None = None
        """Units, where the graph says."""
        self.trials: dict[tuple[int, ...], Trial] = {}

    def __call__(self, *args: Tensor) -> tuple[Any, ...]:
        """(output, last states ..., what its backward needs)."""
        if not _ready(args, self.layers):
            return self.given_back(*args)
        first, second = args[0].shape[:2]
        key = size_key(second, first) if self.layers.batch_first else size_key(first, second)
        trial = self.trials.get(key)
        if trial is None:
            text = source(args[0].dtype) + source(args[0].dtype, FORMULA)
            trial_of_key = Trial(
                f"{text}// {self.layers}", self._both, self._both_by_aten, share=SHARE, on_made_inputs=True
            )
            trial = self.trials.setdefault(key, trial_of_key)
        if trial.kept is None:
            trial(*args)
        return self.run(*args) if trial.kept else self.given_back(*args)

    def run(self, *args: Tensor) -> tuple[Any, ...]:
        """Runs the kernel on these tensors."""
        spec, run = self.layers, kernel(args[0].dtype)
        assert run is not None
        saved = kept_shapes(spec, args[0], args[1])

        def packing(call: Any, w_h: Tensor, _: int) -> bool:
            packed = _packed(packed_memory, w_h)
            call.packed = packed.data_ptr()
            return not run(call, PACK_AND_RUN)

        outputs = forward(spec, args, packing, split(spec, saved)[0])
        if outputs is None:
            return self.given_back(*args)
        out, between = outputs
        many = spec.layers * spec.directions
        return (*out, [*saved[:many], *between, *saved[many + len(between) :]])

    def given_back(self, *args: Tensor) -> tuple[Any, ...]:
        """Runs what the kernel gives back: oneDNN's operation, as eager has it, or ATen's."""
        spec = self.layers
        if spec.name == "lstm" and args[0].numel() and torch.backends.mkldnn.enabled and _onednn(args[0].dtype):
            return onednn_forward(spec, *args)
        return (*spec.aten(*args), nothing_kept(spec, args[0], args[1]))

    def _both(self, *args: Tensor) -> tuple[Tensor, ...]:
        """Results and all gradients, by the kernels."""
        *out, saved = self.run(*args)
        output_gradients = [seeds(one) for one in out]
        return tuple(
            one.contiguous() for one in (*out, *gradients(self.layers, output_gradients, args, out, saved, True))
        )

    def _both_by_aten(self, *args: Tensor) -> tuple[Tensor, ...]:
        leaves = [one.detach().requires_grad_() for one in args]
        with torch.enable_grad():
            out = self.layers.aten(*leaves, grad=True)
            found = torch.autograd.grad(out, leaves, [seeds(one) for one in out])
        return tuple(one.detach().contiguous() for one in (*out, *found))


def _ready(args: Sequence[Tensor], spec: Layers) -> bool:
    dtype = args[0].dtype
    return fits(args, spec) and kernel(dtype) is not None and backward_kernel(dtype) is not None


def _onednn(dtype: torch.dtype) -> bool:
    return dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def seeds(x: Tensor) -> Tensor:
    """A gradient for a trial, other in neighbours, so that sums do not cancel."""
    return (torch.arange(x.numel()) % 7 * 0.25 - 0.4).to(x.dtype).view(x.shape)


def _packed(room: Callable[[Tensor], Tensor], w_h: Tensor) -> Tensor:
    """Memory for packed weights, one a thread and size: fresh pages would cost as much as packing."""
    known: dict[Any, Tensor] = _memory.__dict__.setdefault("packed", {})
    key = (room, w_h.shape, w_h.dtype)
    if key not in known:
        known.clear()
        known[key] = room(w_h)
    return known[key]


# ---- backward
def gradients(
    spec: Layers,
    output_gradients: Sequence[Tensor],
    args: Sequence[Tensor],
    out: Sequence[Tensor],
    saved: Sequence[Tensor],
    dx: bool,
) -> list[Tensor]:
    """Returns the gradients of x, the states and the weights, in their order. output_gradients: those of the output and
    the last states. dx: whether that of x is wanted; it is empty if not."""
    gates, _, memory = split(spec, saved)
    # More than the one byte of `kept_shapes`: the forward was oneDNN's.
    if memory[0].numel() > 1:
        return onednn_backward(spec, output_gradients, args, out, saved, dx)
    # As `nothing_kept` made them: there is only the forward to run again.
    if 0 in gates[0].stride() and gates[0].numel() > 1 or not _ready(args, spec):
        return again(spec, output_gradients, args)
    return by_kernel(spec, output_gradients, args, out[0], saved, dx)


def again(spec: Layers, output_gradients: Sequence[Tensor], args: Sequence[Tensor]) -> list[Tensor]:
    """Runs the forward once more, by ATen."""
    leaves = [one.detach().requires_grad_() for one in args]
    with torch.enable_grad():
        out = spec.aten(*leaves, grad=True)
        return list(torch.autograd.grad(out, leaves, list(output_gradients)))


def by_kernel(
    spec: Layers,
    output_gradients: Sequence[Tensor],
    args: Sequence[Tensor],
    out: Tensor,
    saved: Sequence[Tensor],
    dx: bool,
) -> list[Tensor]:
    x, *states = args[: 1 + spec.states]
    weights, each, dtype = args[1 + spec.states :], 4 if spec.biases else 2, args[0].dtype
    gates, between, _ = split(spec, saved)
    if spec.batch_first:
        x, out = x.transpose(0, 1), out.transpose(0, 1)
    dy = output_gradients[0].transpose(0, 1) if spec.batch_first else output_gradients[0]
    starts = [state.float().contiguous() for state in states]
    ends = [torch.empty(one.shape, dtype=torch.float32).copy_(one) for one in output_gradients[1:]]
    hidden, found = states[0].shape[2], [torch.empty(0)] * len(weights)
    for layer in reversed(range(spec.layers)):
        below, y = (between[layer - 1] if layer else x), (between[layer] if layer < spec.layers - 1 else out)
        dy = dy if dy.stride(2) == 1 else dy.contiguous()
        passed: Tensor | None = None
        for direction in range(spec.directions):
            n = layer * spec.directions + direction
            part = slice(direction * hidden, (direction + 1) * hidden)
            w_x, w_h = weights[n * each : n * each + 2]
            starts_n, ends_n = [s[n] for s in starts], [s[n] for s in ends]
            d_gates, d_state = _walk(spec, w_h, y[..., part], dy[..., part], starts_n, ends_n, gates[n], direction)
            found[n * each : (n + 1) * each] = _of_weights(
                d_gates, d_state, below, y[..., part], states[0][n], direction, spec.biases
            )
            if layer or dx:
                # [steps x batch, gates x hidden] times w_x [gates x hidden, inputs]: a layer's directions read the same
                # input, so their parts are added.
                flat = d_gates.to(dtype).flatten(0, 1)
                passed = flat @ w_x if passed is None else torch.addmm(passed, flat, w_x)
        dy = passed.view(below.shape) if passed is not None else dy.new_empty(0)
    wide = dy.transpose(0, 1) if spec.batch_first and dx else dy
    return [wide, *[end.to(dtype) for end in ends], *found]


def _walk(
    spec: Layers,
    w_h: Tensor,
    y: Tensor,
    dy: Tensor,
    starts: Sequence[Tensor],
    ends: Sequence[Tensor],
    saved: Tensor,
    reverse: int,
) -> tuple[Tensor, Tensor]:
    """Gradients of all gates (steps, batch, gates x hidden), as inputs and as states see them. Those of the first
    states take the place of the last states' in `ends`."""
    steps, batch, hidden, count = *y.shape, GATES[spec.name]
    d_gates = torch.empty((steps, batch, count * hidden), dtype=torch.float32)
    # A GRU's new gate is tanh(x's part + reset * (the state's part)), so states see the gradient of their part times
    # reset and inputs do not. An LSTM's gates are sums of both parts, with one gradient.
    d_state = torch.empty_like(d_gates) if spec.name == "gru" else d_gates
    call = _Backward(
        gates=count, hidden=hidden, steps=steps, batch=batch, reverse=reverse,
        threads=threads_for(count, hidden, batch, GROUP * this_machine().isa.lanes),
        y_step=y.stride(0), y_row=y.stride(1), dy_step=dy.stride(0), dy_row=dy.stride(1),
        weight=w_h.data_ptr(), y=y.data_ptr(), dy=dy.data_ptr(), h0=starts[0].data_ptr(), c0=starts[-1].data_ptr(),
        kept=saved.data_ptr(), packed=_packed(_room, w_h).data_ptr(),
        d_gates=d_gates.data_ptr(), d_state=d_state.data_ptr(), dh=ends[0].data_ptr(), dc=ends[-1].data_ptr(),
    )  # fmt: skip
    run = backward_kernel(w_h.dtype)
    assert run is not None
    run(call)
    return d_gates, d_state


def _room(w_h: Tensor) -> Tensor:
    """Memory for recurrent weights (gates x hidden, hidden) in groups of units."""
    wide = GROUP * this_machine().isa.lanes
    return torch.empty(-(-w_h.shape[1] // wide) * wide * w_h.shape[0], dtype=w_h.dtype)


def _of_weights(
    d_gates: Tensor, d_state: Tensor, x: Tensor, y: Tensor, h0: Tensor, reverse: int, biases: bool
) -> list[Tensor]:
    """Gradients of one direction's weights and biases, each one product over all steps."""
    dtype = x.dtype
    d_in = d_gates.to(dtype)
    d_st = d_in if d_state is d_gates else d_state.to(dtype)
    # The state before step t is the output of step t - 1, or t + 1 when walked backwards; before the first step it is
    # h0.
    first, later = (-1, slice(0, -1)) if reverse else (0, slice(1, None))
    before = y[1:] if reverse else y[:-1]
    weight_gradients = [d_in.flatten(0, 1).t() @ x.flatten(0, 1)]
    of_first = d_st[first].t() @ h0
    weight_gradients.append(
        torch.addmm(of_first, d_st[later].flatten(0, 1).t(), before.flatten(0, 1)) if len(y) > 1 else of_first
    )
    if biases:
        sums = d_gates.sum((0, 1)).to(dtype)
        # A copy, as results of an operation may not share memory.
        weight_gradients += [sums, sums.clone() if d_state is d_gates else d_state.sum((0, 1)).to(dtype)]
    return weight_gradients


# ---- oneDNN's LSTM, as eager calls it
def _layers_of(spec: Layers, weights: Sequence[Tensor]) -> list[list[Tensor]]:
    each = 4 if spec.biases else 2
    layers = [list(weights[n : n + each]) for n in range(0, len(weights), each)]
    return layers if spec.biases else [[*w, *[w[0].new_zeros(w[0].shape[0])] * 2] for w in layers]


def onednn_forward(spec: Layers, *args: Tensor) -> tuple[Any, ...]:
    args = tuple(one.detach() for one in args)
    x, h, c = args[:3]
    x = (x.transpose(0, 1) if spec.batch_first else x).contiguous()
    last_h, last_c, between, memory = [], [], [], []
    weights = _layers_of(spec, args[3:])
    for layer in range(spec.layers):
        outputs = []
        for direction in range(spec.directions):
            n = layer * spec.directions + direction
            with torch.enable_grad():  # without, it keeps nothing
                y, hn, cn, used = torch.ops.aten.mkldnn_rnn_layer(
                    x, *weights[n], h[n], c[n], direction > 0, [], ONEDNN_LSTM, h.shape[2], spec.layers, spec.biases,
                    spec.directions == 2, False, True,
                )  # fmt: skip
            outputs.append(y)
            last_h.append(hn.view_as(h[n]))
            last_c.append(cn.view_as(c[n]))
            memory.append(used)
        x = torch.cat(outputs, -1) if len(outputs) > 1 else outputs[0]
        between.append(x)
    # Of the gates alone nothing is kept: oneDNN has them in its own memory.
    saved = nothing_kept(spec, args[0], h)[: spec.layers * spec.directions]
    results = (x.transpose(0, 1) if spec.batch_first else x, torch.stack(last_h), torch.stack(last_c))
    return (*results, [*saved, *between[:-1], *memory])


def onednn_backward(
    spec: Layers,
    output_gradients: Sequence[Tensor],
    args: Sequence[Tensor],
    out: Sequence[Tensor],
    saved: Sequence[Tensor],
    dx: bool,
) -> list[Tensor]:
    x, h, c = args[:3]
    weights, each = _layers_of(spec, args[3:]), 4 if spec.biases else 2
    _, between, memory = split(spec, saved)
    y, dy = out[0], output_gradients[0]
    if spec.batch_first:
        x, y, dy = x.transpose(0, 1), y.transpose(0, 1), dy.transpose(0, 1)
    found, hidden = [torch.empty(0)] * (len(weights) * each), h.shape[2]
    first: list[list[Tensor]] = [[h] * len(weights), [c] * len(weights)]
    for layer in reversed(range(spec.layers)):
        below, of_layer = (between[layer - 1] if layer else x), (between[layer] if layer < spec.layers - 1 else y)
        passed: Tensor | None = None
        for direction in range(spec.directions):
            n, part = layer * spec.directions + direction, slice(direction * hidden, (direction + 1) * hidden)
            d_in, *d_weights, d_h, d_c = torch.ops.aten.mkldnn_rnn_layer_backward(
                below.contiguous(), *weights[n], h[n], c[n], of_layer[..., part].contiguous(), out[1][n], out[2][n],
                dy[..., part].contiguous(), output_gradients[1][n].contiguous(), output_gradients[2][n].contiguous(),
                direction > 0,
                ONEDNN_LSTM, hidden, spec.layers, spec.biases, True, spec.directions == 2, [], False, memory[n],
            )  # fmt: skip
            # Both biases have the same gradient, and results of an operation may not share memory.
            d_weights[3] = d_weights[3].clone() if d_weights[3].data_ptr() == d_weights[2].data_ptr() else d_weights[3]
            found[n * each : (n + 1) * each] = [one.to(x.dtype).contiguous() for one in d_weights[:each]]
            first[0][n], first[1][n] = d_h.view_as(h[n]), d_c.view_as(c[n])
            passed = d_in if passed is None else passed + d_in
        assert passed is not None
        dy = passed.to(x.dtype).contiguous()
    wide = dy.transpose(0, 1) if spec.batch_first else dy
    states = [torch.stack(each_state).to(x.dtype) for each_state in first]
    return [wide if dx else wide.new_empty(0), *states, *found]


# ---- operations
@cache
def learner(spec: Layers) -> Learner:
    """Makes what trains layers in graphs that were not fused."""
    return Learner(spec)


def spec_of(name: str, biases: bool, layers: int, bidirectional: bool, batch_first: bool) -> Layers:
    return Layers(name, biases, layers, 2 if bidirectional else 1, batch_first, 2 if name == "lstm" else 1)


def _define(name: str) -> None:
    """`gnomon::NAME_kept`, its backward `gnomon::NAME_grad`, and how autograd joins them."""
    states = ("h", "c") if name == "lstm" else ("h",)
    plain = ", ".join(f"Tensor {one}" for one in ("x", *states))
    signature = ", ".join(f"Tensor {one}" for one in ("dy", *(f"d{one}" for one in states)))
    out = ", ".join(f"Tensor {one}" for one in ("y", *(f"last_{one}" for one in states)))
    results = ", ".join(["Tensor"] * (1 + len(states)))
    library.define(f"{name}_kept({plain}, {OPTIONS}) -> ({results}, Tensor[])")
    library.define(
        f"{name}_grad({signature}, {plain}, {out}, Tensor[] kept, {OPTIONS}, bool dx) -> ({results}, Tensor[])"
    )
    many = len(states)

    def saved_shapes(*all_: Any) -> Any:
        *tensors, weights, biases, layers, bidirectional, batch_first = all_
        return learner(spec_of(name, biases, layers, bidirectional, batch_first))(*tensors, *weights)

    def kept_fake(*all_: Any) -> Any:
        spec = spec_of(name, *all_[-4:])
        return (*shapes(*all_), kept_shapes(spec, all_[0], all_[1]))

    def grad(*all_: Any) -> Any:
        *tensors, saved, weights, biases, layers, bidirectional, batch_first, dx = all_
        spec = spec_of(name, biases, layers, bidirectional, batch_first)
        d, args, outputs = (tensors[n * (1 + many) : (n + 1) * (1 + many)] for n in range(3))
        found = gradients(spec, d, [*args, *weights], outputs, saved, dx)
        return (*found[: 1 + many], found[1 + many :])

    def grad_fake(*all_: Any) -> Any:
        weights, batch_first, dx = all_[-6], all_[-2], all_[-1]
        x, *first = all_[1 + many : 2 * (1 + many)]
        order = (1, 0, 2) if batch_first else (0, 1, 2)
        wide = x.new_empty([x.shape[i] for i in order]).permute(order) if dx else x.new_empty(0)
        return (wide, *[s.new_empty(s.shape) for s in first], [w.new_empty(w.shape) for w in weights])

    library.impl(f"{name}_kept", saved_shapes, "CPU")
    library.impl(f"{name}_grad", grad, "CPU")
    torch.library.register_fake(f"gnomon::{name}_kept", kept_fake, lib=library)
    torch.library.register_fake(f"gnomon::{name}_grad", grad_fake, lib=library)

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, weights, biases, layers, bidirectional, batch_first = inputs
        *outputs, saved = output
        ctx.options = (biases, layers, bidirectional, batch_first)
        ctx.counts = (len(weights), len(saved))
        ctx.save_for_backward(*tensors, *outputs, *weights, *saved)

    def backward(ctx: Any, *d: Any) -> Any:
        kept_tensors = list(ctx.saved_tensors)
        args, outputs = kept_tensors[: 1 + many], kept_tensors[1 + many : 2 * (1 + many)]
        weights = kept_tensors[2 * (1 + many) :][: ctx.counts[0]]
        saved = kept_tensors[len(kept_tensors) - ctx.counts[1] :]
        dx = bool(ctx.needs_input_grad[0])
        operation = getattr(torch.ops.gnomon, f"{name}_grad")
        *found, of_weights = operation(*d[: 1 + many], *args, *outputs, saved, weights, *ctx.options, dx)
        return (found[0] if dx else None, *found[1:], list(of_weights), None, None, None, None)

    torch.library.register_autograd(f"gnomon::{name}_kept", backward, setup_context=setup, lib=library)


for _name in GATES:
    _define(_name)
