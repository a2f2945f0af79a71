"""Convolutions before max pooling of which a preview in few bits says what is worth computing.

    torch.compile(model, backend="gnomon", options={"preview": True})

Of four outputs that a pooling of 2 x 2 looks at it keeps the largest. `fuse(graph)` has a kernel compute all four in
eight bits, whose order is nearly always that of the exact ones, and then the one that seems largest in float32: what is
returned is an exact output of the convolution, and where the preview chose wrongly one that is a little less than the
largest. So results are near and not equal (`exactness: statistical`), and only somebody who asks gets them. The first
call computes both, keeps the preview where it is faster and at most `APART` away, and says how far. In a graph without
gradients, float32, of convolutions that `convolutions` has laid channels last: stride 1, multiples of 16 channels.
Eight bits, and not the paper's four: the instruction that multiplies codes has eight whatever they use. Leaves out
convolutions before a ReLU alone, of which about half would be computed twice.
Source: Cao et al., SeerNet (2019).
"""

from __future__ import annotations

import ctypes
import logging
import operator
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from gnomon.compiler.build import ASKS, CPP, kernel_of
from gnomon.compiler.kernels.convolutions import Convolution
from gnomon.compiler.machine import has_features
from gnomon.compiler.node import Node

log = logging.getLogger("gnomon.compiler")
aten = torch.ops.aten
FORMULA = CPP / "preview.cpp"
NEEDS = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"})
SIDE = 16
APART = 1e-3
"""Of the exact results' norm, that those by preview may be away from them."""
GAIN = 0.97
"""Of the exact time that the preview may take: less is noise."""
REPEATS = 3
LAST = torch.channels_last


class PreviewCall(ctypes.Structure):
    """The struct `Call` of cpp/preview.cpp, field by field."""

    _fields_ = [
        *[(name, ctypes.c_int64) for name in "images high wide outputs pad_h pad_w relu threads".split()],
        *[(name, ctypes.c_void_p) for name in "x weights codes bias out".split()],
    ]


def part_of(channels: int) -> int:
    """Channels of the input in a turn of the kernel."""
    return next(part for part in (64, 32, 16) if channels % part == 0)


@cache
def text_of(channels: int, tall: int, across: int, wide: int) -> str:
    """C++ of a kernel. wide: columns of the padded image."""
    macros = {"CHANNELS": channels, "PART": part_of(channels), "TALL": tall, "ACROSS": across, "WIDE": wide}
    lines = [f"{ASKS}-mavx512vnni", *(f"#define {name} {value}" for name, value in macros.items())]
    return "\n".join(lines) + "\n" + FORMULA.read_text(encoding="utf-8")


class Preview(Convolution):
    """A convolution with what follows it and a max pooling of 2 x 2, as a function of the image and what it is packed
    from."""

    def __init__(self, exact: Convolution, kernel: Sequence[int]) -> None:
        """Is not tried yet. exact: without its pooling; kernel: its height and width."""
        sizes = exact.image, exact.stride, exact.padding, exact.dilation, exact.groups
        super().__init__(sizes, exact.bias, exact.eps, False, exact.relu)
        self.__name__, self.__module__ = "preview", __name__
        self.exact = exact
        self.text = text_of(self.image[1], *kernel, self.image[3] + 2 * self.padding[1])
        self.apart: float | None = None
        """Of the exact results' norm, on the first call."""
        self.times: tuple[float, float] = (0.0, 0.0)
        """Seconds by preview and exactly, on the first call."""
        self.keeps: bool | None = None

    def __call__(self, *args: Tensor) -> Tensor:
        """The exact results, while it is tried."""
        if self.keeps is None:
            return self._tried(args)
        return self.run(*args) if self.keeps else self.aten(*args)

    def settled(self) -> Callable[..., Any] | None:
        """What is called from now on."""
        return None if self.keeps is None else self.run if self.keeps else self.aten

    @property
    def kept(self) -> bool:
        return bool(self.keeps)

    @property
    def verdict(self) -> dict[str, Any]:
        """Returns the verdict in the form that a trial's has."""
        return {} if self.keeps is None else {"kernel_s": self.times[0], "aten_s": self.times[1]}

    def _tried(self, args: tuple[Tensor, ...]) -> Tensor:
        expected, result = self.aten(*args), self.run(*args)
        norm = float(torch.linalg.vector_norm(expected.double()))
        self.apart = float(torch.linalg.vector_norm(result.double() - expected.double())) / max(norm, 1e-30)
        clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        best = [float("inf")] * 2
        for _ in range(REPEATS):
            for which, call in enumerate((self.run, self.aten)):
                start = clock()
                call(*args)
                best[which] = min(best[which], clock() - start)
        self.times = best[0], best[1]
        # Not `>`: a NaN is far away too.
        if not self.apart <= APART:
            log.warning("a preview is %.2g of the results away from them: the convolution stays exact", self.apart)
        self.keeps = self.apart <= APART and best[0] <= GAIN * best[1]
        return expected

    def aten(self, *args: Tensor) -> Tensor:
        """Computes the result exactly: the convolution by oneDNN or ATen as its own trial says, then the pooling."""
        pooled: Tensor = torch.nn.functional.max_pool2d(self.exact(*args), 2)
        return pooled.contiguous(memory_format=LAST)

    def run(self, *args: Tensor) -> Tensor:
        """Computes by preview, and exactly where there is no kernel."""
        x = args[0].contiguous(memory_format=LAST)
        function = kernel_of(str(self.text), ctypes.c_void_p)
        if function is None:
            return self.aten(*args)
        weights, codes, bias = self._laid(args[1:])
        images, _, high, wide = x.shape
        tall, _, outputs, taps, _ = weights.shape
        down = (high + 2 * self.padding[0] - tall + 1) // 2
        across = (wide + 2 * self.padding[1] - taps + 1) // 2
        out = torch.empty((images, outputs, down, across), memory_format=LAST)
        call = PreviewCall(
            images=images, high=high, wide=wide, outputs=outputs, pad_h=self.padding[0], pad_w=self.padding[1],
            relu=self.relu, threads=torch.get_num_threads(), x=x.data_ptr(), weights=weights.data_ptr(),
            codes=codes.data_ptr(), bias=bias.data_ptr(), out=out.data_ptr(),
        )  # fmt: skip
        return self.aten(*args) if function(ctypes.addressof(call)) else out

    def _laid(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Weights (height, turns, outputs, width, channels of a turn), their codes in panels and the bias."""
        weight, extra = self._weights(tensors)
        assert isinstance(extra, tuple)
        return weight, *extra

    def _made(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Any]:
        """What is kept of weights: as `_laid` gives it."""
        weight, bias = self._folded(tensors)
        weights = weight.float().permute(0, 2, 3, 1).contiguous()
        flat = weights.flatten(1)
        scales = flat.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
        rows = -(-len(flat) // SIDE) * SIDE
        codes = torch.zeros((rows, flat.shape[1]), dtype=torch.int8)
        codes[: len(flat)] = (flat / scales).round().to(torch.int8)
        # [panels, taps / 4, outputs of a panel, 4]: four codes of an output lie beside each other, as one instruction
        # multiplies and adds them.
        panels = codes.view(-1, SIDE, flat.shape[1] // 4, 4).transpose(1, 2).contiguous()
        part = part_of(weights.shape[3])
        turns = weights.unflatten(3, (-1, part)).permute(1, 3, 0, 2, 4).contiguous()
        return turns, (panels, torch.zeros(len(flat)) if bias is None else bias.float().contiguous())


def fuse(graph: fx.Graph) -> list[Preview]:
    """Puts a preview in place of each convolution and the pooling that alone reads it; returns them."""
    if not has_features(NEEDS):
        return []
    calls = []
    for node in list(graph.nodes):
        found = _pooled(node)
        if found is None:
            continue
        pool, last = found
        weight = node.args[1].meta["val"]
        call = Preview(node.target, weight.shape[2:])
        with graph.inserting_before(last):
            new = graph.call_function(call, node.args)
        new.meta.update(last.meta)
        last.replace_all_uses_with(new)
        for one in (last, pool, node):
            graph.erase_node(one)
        calls.append(call)
    return calls


def _pooled(node: Node) -> tuple[Node, Node] | None:
    """(pooling, its result) after a convolution that the kernel knows."""
    call = node.target
    if node.op != "call_function" or not isinstance(call, Convolution) or isinstance(call, Preview):
        return None
    if call.added or call.work or call.before:
        return None
    plain = call.groups == 1 and [*call.stride, *call.dilation] == [1, 1, 1, 1]
    channels = node.args[1].meta["val"].shape[1] if plain else 0
    if node.meta["val"].dtype != torch.float32 or not channels or channels % SIDE:
        return None
    pool = next(iter(node.users)) if len(node.users) == 1 else None
    if pool is None or pool.target is not aten.max_pool2d_with_indices.default or pool.kwargs:
        return None
    window, stride, *rest = [*pool.args[1:], [2, 2]][:2] if len(pool.args) == 2 else pool.args[1:]
    if [*window, *(stride or window)] != [2, 2, 2, 2] or any(one not in ([0, 0], [1, 1], False) for one in rest):
        return None
    if rest and rest[0] != [0, 0]:
        return None
    last = next(iter(pool.users)) if len(pool.users) == 1 else None
    first = last is not None and last.target is operator.getitem and last.args[1] == 0
    return (pool, last) if first else None
