"""Backward of a convolution of one pixel (1 x 1, of step 1): two matmuls an image by `linear`'s kernel.

ATen gives it on one thread to its BLAS, image by image. Here both gradients are written where they belong: the input's
is weightᵀ (channels, outputs) by the result's gradient (outputs, pixels), the weight's the sum over images of that
gradient by the input's transpose. `fuse(graph)` puts a `PixelsBackward` in place of each that is large enough; it is
tried beside ATen's (`tried`), which is faster where an image has few pixels. Float32 of fixed sizes on a CPU, channels
first. Leaves out a bias's gradient, groups, steps and padding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from gnomon.compiler.kernels.linear import PARALLEL, LinearCall, kernel, source
from gnomon.compiler.node import Node
from gnomon.compiler.tune.tried import TriedKernel

aten = torch.ops.aten
FEWEST = 1 << 20
"""Multiplications of a gradient from which on it is tried."""


class PixelsBackward(TriedKernel):
    """From the result's gradient, the input and the weight: gradients of the input and the weight, or of the weight
    alone."""

    several = True

    def __init__(self, both: bool) -> None:
        """Is not tried yet. both: whether the input has a gradient too."""
        self.text = source()
        super().__init__("pixels_backward", f"{self.text}// backward of one pixel {both}", True)
        self.both = both

    def run(self, *args: Tensor) -> list[Tensor]:
        """Runs the kernel on these tensors, or PyTorch's operation where it cannot."""
        g, x, w = args
        function = kernel()
        if function is None or not all(one.is_contiguous() for one in args):
            return self.aten(*args)
        (images, k), n, pixels = x.shape[:2], w.shape[0], x.shape[2] * x.shape[3]
        dx, dw, wide = torch.empty_like(x) if self.both else None, torch.empty_like(w), x.element_size()
        threads = torch.get_num_threads() if n * k * pixels >= PARALLEL else 1
        failed = 0
        for image in range(images):
            at_g, at_x = g.data_ptr() + image * n * pixels * wide, x.data_ptr() + image * k * pixels * wide
            calls = [LinearCall(
                m=n, n=k, k=pixels, threads=threads, x=at_g, across=n, x_row=pixels, x_k=1, w=at_x, w_n=pixels, w_k=1,
                added=dw.data_ptr() if image else None, out=dw.data_ptr(),
            )]  # fmt: skip
            if dx is not None:
                calls.append(LinearCall(
                    m=k, n=pixels, k=n, threads=threads, x=w.data_ptr(), across=k, x_row=1, x_k=k, w=at_g, w_n=1,
                    w_k=pixels, out=dx.data_ptr() + image * k * pixels * wide,
                ))  # fmt: skip
            failed |= any([function(call) for call in calls])
        if failed:  # there is no memory
            return self.aten(*args)
        return [dw] if dx is None else [dx, dw]

    def aten(self, *args: Tensor) -> list[Tensor]:
        """Runs PyTorch's operation on the same tensors."""
        options = ([0], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [self.both, True, False])
        dx, dw, _ = aten.convolution_backward.default(*args, *options)
        return [dx, dw] if self.both else [dw]


def fuse(graph: fx.Graph) -> list[PixelsBackward]:
    """Puts a `PixelsBackward` in place of each backward of a convolution of one pixel; returns them."""
    calls = []
    for node in list(graph.nodes):
        if not _taken(node):
            continue
        call = PixelsBackward(bool(node.args[-1][0]))
        places = {0: 0, 1: 1} if call.both else {1: 0}
        with graph.inserting_before(node):
            new = graph.call_function(call, tuple(node.args[:3]))
        new.meta.update(node.meta)
        new.meta["val"] = [node.meta["val"][place] for place in places]
        for user in list(node.users):
            user.args = (new, places[user.args[1]])
        graph.erase_node(node)
        calls.append(call)
    return calls


def _taken(node: Node) -> bool:
    if node.target is not aten.convolution_backward.default or node.kwargs:
        return False
    g, x, w, _, step, padding, dilation, transposed, _, groups, wanted = node.args
    if transposed or groups != 1 or any(padding) or {*step, *dilation} != {1} or not wanted[1] or wanted[2]:
        return False
    values: list[Any] = [one.meta.get("val") for one in (g, x, w)]
    if not all(_plain(value) for value in values) or any(size != 1 for size in values[2].shape[2:]):
        return False
    read = {user.args[1] for user in node.users}  # of what is not wanted there is nothing to read
    return read <= ({0, 1} if wanted[0] else {1}) and values[1].numel() * values[2].shape[0] >= FEWEST


def _plain(value: Any) -> bool:
    """Whether a tensor is a float32 of fixed sizes on the CPU, whose numbers lie in the order of its dims."""
    return (
        isinstance(value, Tensor)
        and value.device.type == "cpu"
        and value.dtype == torch.float32
        and value.dim() == 4
        and all(isinstance(size, int) for size in value.shape)
        and value.is_contiguous()
        and not value.is_neg()
    )
