"""Lets Dynamo take `nn.LSTM` and `nn.GRU` into the graphs of this backend, and of no other.

Dynamo breaks its graph at these modules unless `torch._dynamo.config.allow_rnn` is set, because other backends would
unroll them. With it, torch 2.13 gives a backend one node, `torch.lstm` or `torch.gru`. But to know the shapes of a
GRU's results it walks all its steps, which fixes their number, and AOTAutograd makes of a GRU as many copies of its
step as there are steps (of an LSTM one oneDNN call a layer in inference; in training it fails). `allow()` sets the flag
while Dynamo looks at one such module for backend "gnomon", where `recurrent` can serve it, and gives Dynamo the shapes.
Leaves out everything else: those modules run between graphs, as they always have.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from gnomon.compiler.kernels.recurrent import operation_of, plain, shapes

log = logging.getLogger("gnomon.compiler")
aten = torch.ops.aten


def allow(backend: Any) -> None:
    """Has Dynamo trace recurrent modules, once a process; without effect where Dynamo is built otherwise than we know
    it."""
    try:
        from torch._dynamo import config
        from torch._dynamo.symbolic_convert import InstructionTranslator
        from torch._dynamo.variables.builder import VariableBuilder
        from torch._ops import OpOverload

        original = VariableBuilder.wrap_module
        if getattr(original, "for_gnomon", False):
            return

        def wrap_module(self: Any, value: Any) -> Any:
            if not (_served(value) and backend_of(self.tx) is backend):
                return original(self, value)
            with config.patch(allow_rnn=True):
                return original(self, value)

        def tracing() -> bool:
            try:
                return backend_of(InstructionTranslator.current_tx()) is backend
            except AttributeError:  # Dynamo is not at work in this thread
                return False

        for name, operation in (("lstm", aten.lstm.input), ("gru", aten.gru.input)):
            assert isinstance(operation, OpOverload)
            for key, unrolled in list(operation.py_kernels.items()):
                operation.py_kernels[key] = _short(unrolled, tracing, name)
            # Kernels that were looked up before would be called as they were.
            operation._dispatch_cache.clear()
        wrap_module.for_gnomon = True  # type: ignore[attr-defined]
        VariableBuilder.wrap_module = wrap_module  # type: ignore[method-assign]
    except (ImportError, AttributeError) as error:
        log.debug("recurrent modules stay outside graphs: %s", error)


def _short(unrolled: Callable[..., Any], tracing: Callable[[], bool], name: str) -> Callable[..., Any]:
    """What Dynamo runs to know the shapes of `torch.lstm` and `torch.gru`: no steps where `recurrent` takes them."""

    def kernel(x: Any, states: Any, weights: Any, *options: Any) -> Any:
        initial_states = list(states) if isinstance(states, (list, tuple)) else [states]
        every = (x, *initial_states, *weights)
        served = all(plain(one) and one.dtype == x.dtype for one in every)
        learns = torch.is_grad_enabled() and any(one.requires_grad for one in every)
        if not (served and len(options) == 6 and initial_states[0].shape[-1] == weights[1].shape[1] and tracing()):
            return unrolled(x, states, weights, *options)
        biases, layers, _, _, bidirectional, batch_first = options
        if not learns:
            return shapes(x, *initial_states, weights, biases, layers, bidirectional, batch_first)
        outputs = operation_of(name, True)(
            x, *initial_states, list(weights), biases, layers, bidirectional, batch_first
        )
        return tuple(outputs[: 1 + len(initial_states)])

    return kernel


def _served(value: Any) -> bool:
    """Whether `recurrent` takes a module as it is called now: float32 or bfloat16 on a CPU."""
    if type(value) not in (torch.nn.LSTM, torch.nn.GRU) or value.proj_size:
        return False
    if torch.is_autocast_enabled("cpu") or (value.training and value.dropout and value.num_layers > 1):
        return False
    every = list(value.parameters())
    return all(type(w) is torch.nn.Parameter and plain(w) and w.dtype == every[0].dtype for w in every)


def backend_of(translator: Any) -> Any:
    """The backend that a graph is made for, under what Dynamo and torch.compile put around it."""
    found = translator.output.compiler_fn
    for name in ("_torchdynamo_orig_backend", "compiler_fn"):
        found = getattr(found, name, found)
    return found
