"""Average and max pooling of images that lie channels last, by the loops of cpp/depthwise.cpp without weights.

`fuse(graph)` puts a `Pool` in place of each pooling of an image that `convolutions` has laid channels last; each is
tried beside ATen's. Sums are taken in ATen's order, a NaN is the maximum, and what is divided by is ATen's count.
Float32, images of fixed sizes. Leaves out a last window that is cut (`ceil_mode`), a divisor of one's own and indices.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from gnomon.compiler.build import address_of
from gnomon.compiler.kernels import depthwise
from gnomon.compiler.node import Node
from gnomon.compiler.tasks.steps import KernelCall, Operation, is_static
from gnomon.compiler.tune.tried import TriedKernel

aten = torch.ops.aten
LAST = torch.channels_last


class Pool(TriedKernel):
    """One pooling, as a function of the image."""

    def __init__(self, form: depthwise.DepthwiseForm, args: tuple[Any, ...]) -> None:
        """Is not tried yet. args: of ATen's function behind the image."""
        self.form, self.args = form, args
        self.text, self.average = form.text, form.pool != "maximum"
        super().__init__("pooling", f"{self.text}// {form.padding} {args}", True)

    def run(self, *args: Tensor) -> Tensor:
        """Runs the kernel."""
        x, function = args[0].contiguous(memory_format=LAST), self.form.kernel()
        call = self.form.filled(x, x.shape[1], False)
        call.threads = call.threads or torch.get_num_threads()
        out = torch.empty((*x.shape[:2], call.out_high, call.out_wide), memory_format=LAST)
        call.x, call.out = x.data_ptr(), out.data_ptr()
        return self.aten(*args) if function is None or function(call) else out

    def aten(self, *args: Tensor) -> Tensor:
        """Runs PyTorch's own."""
        if self.average:
            return aten.avg_pool2d.default(args[0], *self.args)  # type: ignore[no-any-return]
        return aten.max_pool2d_with_indices.default(args[0], *self.args)[0]  # type: ignore[no-any-return]

    def step(self, node: Node) -> list[KernelCall | Operation] | None:
        """What C++ calls in a node's place: the kernel or ATen's."""
        trial, function, x = self.trials.get(()), self.form.kernel(), node.args[0]
        if trial is None or trial.kept is None:
            return None
        if not trial.kept or function is None:
            average = self.average
            target = aten.avg_pool2d.default if average else aten.max_pool2d_with_indices.default
            return [Operation(target=target, args=(x, *self.args), results=(node,) if average else (node, None))]
        value = x.meta["val"]
        if not (value.is_contiguous(memory_format=LAST) and node.meta["val"].is_contiguous(memory_format=LAST)):
            return None
        filled = self.form.filled(value, value.shape[1], False)
        inputs, outputs = (("x", x),), (("out", node),)
        return [KernelCall(function=address_of(function), filled=filled, inputs=inputs, outputs=outputs)]


def fuse(graph: fx.Graph) -> list[Pool]:
    """Puts a `Pool` in place of each pooling of an image that lies channels last; returns them."""
    out = []
    for node in list(graph.nodes):
        found = _found(node)
        if found is None:
            continue
        last, pool = found
        with graph.inserting_before(last):
            new = graph.call_function(pool, (node.args[0],))
        new.meta.update(last.meta)
        last.replace_all_uses_with(new)
        graph.erase_node(last)
        if last is not node:
            graph.erase_node(node)
        out.append(pool)
    return out


def _found(node: Node) -> tuple[Node, Pool] | None:
    """(the node whose value it gives, the pooling) of a node that the kernel knows."""
    average = node.target is aten.avg_pool2d.default
    if (
        node.op != "call_function"
        or node.kwargs
        or not (average or node.target is aten.max_pool2d_with_indices.default)
    ):
        return None
    last = node if average else next(iter(node.users), node)
    if not average and not (len(node.users) == 1 and last.target is operator.getitem and last.args[1] == 0):
        return None
    images = [one.meta.get("val") for one in (node.args[0], last)]
    if not all(is_static(one) and one.dim() == 4 and one.dtype == torch.float32 for one in images):
        return None
    if not all(one.is_contiguous(memory_format=LAST) for one in images):
        return None
    # All of ATen's arguments, as C++ gives them too.
    given = node.args[1:]
    args = (*given, *([[], [0, 0], False, True, None] if average else [[], [0, 0], [1, 1], False])[len(given) - 1 :])
    window, stride, padding = ([*one] * (2 if len(one) == 1 else 1) for one in args[:3])
    dilation = [1, 1] if average else [*args[3]] * (2 if len(args[3]) == 1 else 1)
    divided, included = (args[5], args[4]) if average else (None, False)
    if divided is not None or args[3 if average else 4]:
        return None
    form = depthwise.form_of(images[0].shape, window, stride or window, padding, dilation)
    if form is None or tuple(images[1].shape[2:]) != form.out_sizes(images[0].shape):
        return None
    pool = ("whole average" if included else "average") if average else "maximum"
    return last, Pool(replace(form, pool=pool), args)
