"""`nn.LSTM` and `nn.GRU` as one node of a graph, and one kernel for all steps of a layer (DeepCPU, Cocktailer).

`keep(module)` puts operations of ours in place of `torch.lstm` and `torch.gru` before AOTAutograd unrolls them;
`fuse(graph)` puts a `Recurrent` in place of those. It multiplies the inputs of all steps at once by the library, then
calls the kernel (cpp/recurrent.cpp), which walks the steps with recurrent weights that were packed once: each thread
keeps the units, and so the weights, that it had in the step before. Its compilation knows neither the number of steps
nor the batch. It is timed like any group (`gate`), once for each size of both: kept where it is equal to ATen and takes
at most SHARE of its time. Float32 and bfloat16; of bfloat16 are weights, inputs and outputs, while sums and states are
floats. Training has operations of its own (`recurrent_training`). Leaves out projections: those graphs stay PyTorch's.
Source: Zhang et al., DeepCPU (USENIX ATC 2018); of its partitions of the recurrent product the one by units reads
weights once and states once a thread, the least for batches that are small beside the hidden size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from gnomon.compiler.build import CPP, has_compiler, kernel_of
from gnomon.compiler.machine import this_machine
from gnomon.compiler.node import Node
from gnomon.compiler.tune.gate import Trial
from gnomon.compiler.tune.tried import MEMORY, text_of

GATES = {"lstm": 4, "gru": 3}
"""Rows of a weight for each unit: input, forget, cell and output gate; or reset, update and new."""
PARALLEL = 1 << 16
"""Multiply-adds of one step's recurrent product from which on several threads share it: less takes no longer than
their waiting for each other."""
HEADER = 32
"""Floats before the packed weights, which hold digests of the weights that were packed."""
SHARE = 0.93
"""Of ATen's time that the kernel may take in a trial: the compiled call comes on top (compiler_recurrent.md)."""
MOST_PACKED = 16
"""Packed weights of a layer that are kept, where one graph serves several modules."""

library = torch.library.Library("gnomon", "FRAGMENT")
OPTIONS = "Tensor[] weights, bool biases, int layers, bool bidirectional, bool batch_first"
"""The arguments that both operations have after x and the states, in the language of PyTorch's schemas."""
library.define(f"lstm(Tensor x, Tensor h, Tensor c, {OPTIONS}) -> (Tensor, Tensor, Tensor)")
library.define(f"gru(Tensor x, Tensor h, {OPTIONS}) -> (Tensor, Tensor)")


def _lstm(x: Tensor, h: Tensor, c: Tensor, weights: list[Tensor], *options: Any) -> Any:
    biases, layers, bidirectional, batch_first, *training = options
    return torch.lstm(x, [h, c], weights, biases, layers, 0.0, any(training), bidirectional, batch_first)


def _gru(x: Tensor, h: Tensor, weights: list[Tensor], *options: Any) -> Any:
    biases, layers, bidirectional, batch_first, *training = options
    return torch.gru(x, h, weights, biases, layers, 0.0, any(training), bidirectional, batch_first)


def shapes(x: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """Results of either operation without values: the output (steps, batch, directions x hidden), steps outermost in
    memory whatever `batch_first`, and the last states. arguments: as in the schema, states first."""
    *states, _weights, _biases, _layers, bidirectional, batch_first = arguments
    steps, batch = (x.shape[1], x.shape[0]) if batch_first else (x.shape[0], x.shape[1])
    out = x.new_empty(steps, batch, states[0].shape[2] * (2 if bidirectional else 1))
    return (out.transpose(0, 1) if batch_first else out, *[s.new_empty(s.shape) for s in states])


for _name, _function in (("lstm", _lstm), ("gru", _gru)):
    library.impl(_name, _function, "CPU")
    torch.library.register_fake(f"gnomon::{_name}", shapes, lib=library)
OPERATIONS: dict[Any, str] = {torch.ops.gnomon.lstm.default: "lstm", torch.ops.gnomon.gru.default: "gru"}
"""Our operations that keep nothing for a backward -> their names."""


# ---- before AOTAutograd
def keep(module: fx.GraphModule) -> bool:
    """Makes each `torch.lstm` and `torch.gru` of a graph of Dynamo's one operation of ours. False where one cannot be:
    AOTAutograd would unroll it into its steps, so the graph is to run in eager mode."""
    with_grad, changed = torch.is_grad_enabled(), False
    if not has_compiler():
        return not any(node.target in _CALLS for node in module.graph.nodes)
    for node in list(module.graph.nodes):
        if node.target is torch._C._set_grad_enabled:
            with_grad = bool(node.args[0])
        if node.target not in _CALLS:
            continue
        new = _kept(node, with_grad)
        if new is None:
            return False
        operation, arguments = new
        with module.graph.inserting_before(node):
            call = module.graph.call_function(operation, arguments)
        call.meta.update(node.meta)
        node.replace_all_uses_with(call)
        module.graph.erase_node(node)
        changed = True
    if changed:
        module.recompile()
    return True


_CALLS = {torch.lstm: "lstm", torch.gru: "gru"}
"""What `nn.LSTM` and `nn.GRU` call -> its name here."""


def _kept(node: Node, with_grad: bool) -> tuple[Any, tuple[Any, ...]] | None:
    """Our operation for a call of `torch.lstm` or `torch.gru`, and its arguments; None where ours does not do the same:
    dropout between layers, packed sequences, projections, autocast, other dtypes or devices."""
    if node.kwargs or len(node.args) != 9 or torch.is_autocast_enabled("cpu"):
        return None
    x, states, weights, biases, layers, dropout, training, bidirectional, batch_first = node.args
    states = list(states) if isinstance(states, (list, tuple)) else [states]
    if isinstance(dropout, fx.Node):  # with dynamic=True a number that may change: asking guards it
        dropout = dropout.meta.get("example_value", 1.0)  # unknown: taken as dropout
    if not isinstance(weights, (list, tuple)) or (training and layers > 1 and dropout != 0.0):
        return None
    values: list[Any] = [
        one.meta.get("example_value") if isinstance(one, fx.Node) else None for one in (x, *states, *weights)
    ]
    if not all(plain(value) and value.dtype == values[0].dtype for value in values):
        return None
    directions = 2 if bidirectional else 1
    if values[0].dim() != 3 or len(weights) != layers * directions * (4 if biases else 2):
        return None  # a packed sequence, or projections
    if any(isinstance(n, fx.Node) and "autocast" in str(n.target) for n in node.graph.nodes):
        return None
    learns = with_grad and any(value.requires_grad for value in values)
    return operation_of(_CALLS[node.target], learns), (
        x, *states, list(weights), biases, layers, bidirectional, batch_first
    )  # fmt: skip


def operation_of(name: str, learns: bool) -> Any:
    """Our operation for `lstm` or `gru`; learns: the one that keeps what its backward needs (`recurrent_training`)."""
    return getattr(torch.ops.gnomon, f"{name}_kept" if learns else name).default


def plain(value: Any) -> bool:
    """Whether a value is a dense tensor on the CPU of a dtype that the kernels read."""
    dense = isinstance(value, Tensor) and value.device.type == "cpu" and value.layout == torch.strided
    return dense and value.dtype in MEMORY


# ---- in a graph of ATen's
def fuse(graph: fx.Graph, learner: Callable[[Layers], Any]) -> list[Any]:
    """Puts a `Recurrent`, or a `Learner` (of `learner`) where gradients are asked for, in place of each of our
    operations; returns them."""
    calls = []
    for node in list(graph.nodes):
        name, learns = OPERATIONS.get(node.target, ""), False
        if not name:
            name = next((n for n in GATES if node.target is operation_of(n, True)), "")
            learns = True
        if not name:
            continue
        *tensors, weights, biases, layers, bidirectional, batch_first = node.args
        spec = Layers(name, biases, layers, 2 if bidirectional else 1, batch_first, len(tensors) - 1)
        call: Any = learner(spec) if learns else Recurrent(spec)
        call.hidden = weights[1].meta["val"].shape[1]
        with graph.inserting_before(node):
            new = graph.call_function(call, (*tensors, *weights))
        new.meta.update(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        calls.append(call)
    return calls


@dataclass(frozen=True, slots=True)
class Layers:
    """The form of an `nn.LSTM` or `nn.GRU`, without its sizes."""

    name: str
    biases: bool
    layers: int
    directions: int
    batch_first: bool
    states: int
    """The number of its state tensors: 2 of an LSTM (h, c), 1 of a GRU."""

    def aten(self, *args: Tensor, grad: bool = False) -> tuple[Tensor, ...]:
        """Runs ATen's operation on x, the states, and the weights. grad: with autograd's graph recorded."""
        function = _lstm if self.name == "lstm" else _gru
        tensors, weights = args[: 1 + self.states], list(args[1 + self.states :])
        options = (self.biases, self.layers, self.directions == 2, self.batch_first)
        with torch.set_grad_enabled(grad):
            return tuple(function(*tensors, weights, *options, grad))  # type: ignore[arg-type]


class _RecurrentCall(ctypes.Structure):
    """The struct `Call` of cpp/recurrent.cpp, field by field."""

    _fields_ = [
        *[(name, ctypes.c_int64) for name in ("gates", "hidden", "steps", "batch", "reverse", "threads")],
        *[(name, ctypes.c_int64) for name in ("x_step", "x_row", "y_step", "y_row")],
        *[(name, ctypes.c_void_p) for name in ("weight", "bias", "x", "h0", "c0", "packed", "y", "hn", "cn")],
        *[(name, ctypes.c_void_p) for name in ("state", "kept")],
    ]


CHECK_AND_RUN, PACK, PACK_AND_RUN = range(3)
"""`Mode` of cpp/recurrent.cpp."""


@cache
def source(dtype: torch.dtype, file: str = "recurrent.cpp") -> str:
    """Reads the C++ of a kernel for this type."""
    return text_of(CPP / file, dtype)


@cache
def kernel(dtype: torch.dtype) -> Callable[[Any, int], int] | None:
    """The compiled kernel, None where it does not compile."""
    return kernel_of(source(dtype), ctypes.POINTER(_RecurrentCall), ctypes.c_int64)


class Recurrent:
    """All layers of an `nn.LSTM` or `nn.GRU`, as a function of x, its states and its weights."""

    def __init__(self, layers: Layers) -> None:
        self.__name__, self.__module__ = f"recurrent_{layers.name}", __name__  # what fx calls a node
        self.layers = layers
        self.hidden: int | None = None
        """The size of a state, once a graph gives it."""
        self.trials: dict[tuple[int, ...], Trial] = {}
        self.packed: dict[int, Tensor] = {}
        """Address of recurrent weights -> these weights packed; `_checked` sees to it that they still are."""

    def __call__(self, *args: Tensor) -> tuple[Tensor, ...]:
        """Returns (output, last states ...). Each size of steps and batch (`size_key`) is timed on its first inputs;
        from then on the kernel runs, or ATen's operation."""
        if not fits(args, self.layers) or kernel(args[0].dtype) is None:
            return self.layers.aten(*args)
        first, second = args[0].shape[:2]
        key = size_key(second, first) if self.layers.batch_first else size_key(first, second)
        trial = self.trials.get(key)
        if trial is None:
            trial_of_key = Trial(
                f"{source(args[0].dtype)}// {self.layers}", self.run, self.layers.aten, share=SHARE, on_made_inputs=True
            )
            trial = self.trials.setdefault(key, trial_of_key)
        if trial.kept is None:
            return trial(*args)  # type: ignore[no-any-return]
        return self.run(*args) if trial.kept else self.layers.aten(*args)

    def run(self, *args: Tensor) -> tuple[Tensor, ...]:
        """Runs the kernel on these tensors, or ATen's operation where it cannot."""
        outputs = forward(self.layers, args, self._checked)
        return self.layers.aten(*args) if outputs is None else outputs[0]

    def _checked(self, call: _RecurrentCall, w_h: Tensor, _: int) -> bool:
        """Runs the kernel with the weights packed before if their digests are the same, else packs them again first.
        False where another thread writes the weights meanwhile."""
        run, packed = kernel(w_h.dtype), self.packed.get(w_h.data_ptr())
        assert run is not None
        if packed is not None:
            call.packed = packed.data_ptr()
            if not run(call, CHECK_AND_RUN):
                return True
        packed = packed_memory(w_h)  # new memory: another thread may still read the old
        call.packed = packed.data_ptr()
        run(call, PACK)
        if len(self.packed) >= MOST_PACKED * self.layers.layers * self.layers.directions:
            self.packed.clear()
        self.packed[w_h.data_ptr()] = packed
        return not run(call, CHECK_AND_RUN)


def packed_memory(w_h: Tensor) -> Tensor:
    """Empty memory for recurrent weights (gates x hidden, hidden) in panels of as many units as a register has lanes,
    after HEADER floats."""
    lanes = this_machine().isa.lanes
    units = -(-w_h.shape[1] // lanes) * lanes
    return torch.empty(HEADER + -(-units * w_h.shape[0] * w_h.element_size() // 4), dtype=torch.float32, device="cpu")


def threads_for(gates: int, hidden: int, batch: int, units: int) -> int:
    """The number of threads that share a step. units: the fewest that one of them has."""
    several = gates * hidden * hidden * batch >= PARALLEL
    return min(torch.get_num_threads(), -(-hidden // units)) if several else 1


Runner = Callable[[_RecurrentCall, Tensor, int], bool]
"""Runs the kernel on one direction of one layer: (its argument, recurrent weights, layer x directions + direction) ->
whether it ran."""


def forward(
    spec: Layers, args: Sequence[Tensor], runner: Runner, saved: Sequence[Tensor] | None = None
) -> tuple[tuple[Tensor, ...], list[Tensor]] | None:
    """Runs all layers. args: x, the states, the weights of each direction of each layer. saved: for each of these,
    memory for what its backward needs. Returns ((output, last states ...), outputs of all layers but the last), or None
    where the runner returns False."""
    x, *states = args[: 1 + spec.states]
    weights, dtype = args[1 + spec.states :], args[0].dtype
    if spec.batch_first:
        x = x.transpose(0, 1)
    steps, batch, hidden = x.shape[0], x.shape[1], states[0].shape[2]
    starts = [state.float().contiguous() for state in states]
    ends = [torch.empty_like(state) for state in starts]
    each, between = 4 if spec.biases else 2, []
    for layer in range(spec.layers):
        # Each direction writes its own columns of y.
        y = torch.empty((steps, batch, hidden * spec.directions), dtype=dtype, device="cpu")
        for direction in range(spec.directions):
            n = layer * spec.directions + direction
            # Without biases the last two are None.
            w_x, w_h, b_x, b_h = [*weights[n * each : (n + 1) * each], None, None][:4]
            assert w_x is not None and w_h is not None
            projected, into = _inputs(x, w_x, b_x), y[..., direction * hidden :]
            bias = None if b_h is None else b_h.float()
            # Of bfloat16 the outputs are rounded, so the kernel keeps the states that it goes on with in floats
            # elsewhere.
            state = torch.empty(2 * batch * hidden) if dtype != torch.float32 else None
            # A GRU has one state: its c0 and cn are h0 and hn once more.
            call = _RecurrentCall(
                gates=GATES[spec.name], hidden=hidden, steps=steps, batch=batch, reverse=direction,
                threads=threads_for(GATES[spec.name], hidden, batch, this_machine().isa.lanes),
                x_step=projected.stride(0), x_row=projected.stride(1), y_step=into.stride(0), y_row=into.stride(1),
                weight=w_h.data_ptr(), bias=None if bias is None else bias.data_ptr(), x=projected.data_ptr(),
                h0=starts[0][n].data_ptr(), c0=starts[-1][n].data_ptr(), y=into.data_ptr(),
                hn=ends[0][n].data_ptr(), cn=ends[-1][n].data_ptr(),
                state=None if state is None else state.data_ptr(), kept=saved[n].data_ptr() if saved else None,
            )  # fmt: skip
            if not runner(call, w_h, n):
                return None
        if layer < spec.layers - 1:
            between.append(y)
        x = y
    return (x.transpose(0, 1) if spec.batch_first else x, *[end.to(dtype) for end in ends]), between


def _inputs(x: Tensor, w_x: Tensor, b_x: Tensor | None) -> Tensor:
    """x (steps, batch, inputs) times w_xᵀ for all steps at once: (steps, batch, gates x hidden), the last dim dense.
    An x that lies in memory as (batch, steps, inputs) is multiplied so, without a copy of it."""
    # Steps beside each other: batch_first.
    if x.stride(0) < x.stride(1):
        return F.linear(x.transpose(0, 1), w_x, b_x).contiguous().transpose(0, 1)
    return F.linear(x, w_x, b_x).contiguous()


def size_key(steps: int, batch: int) -> tuple[int, ...]:
    """The key of a trial, which speaks for all sizes between the same powers of two, at this number of threads."""
    return (int(steps - 1).bit_length(), int(batch - 1).bit_length(), torch.get_num_threads())


def fits(args: Sequence[Tensor], layers: Layers) -> bool:
    """Whether the kernel can read these tensors: one dtype that it has, no empty input, contiguous weights."""
    weights = args[1 + layers.states :]
    return (
        args[0].dtype in MEMORY
        and all(a.dtype == args[0].dtype for a in args)
        and args[0].numel() > 0
        and all(w.is_contiguous() for w in weights)
    )
