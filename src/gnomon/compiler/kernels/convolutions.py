"""Convolutions of inference with what follows them, channels last, by weights that are packed once.

In a graph without gradients a convolution, the batch norm after it (of running statistics), a sum with another tensor
and a ReLU are one kernel of ours (`Tiled`: Winograd's of 3 x 3, else taps in the tile of a product), or one call of
oneDNN's with a ReLU in its memory. ATen reorders weights and images in every call; here weights are multiplied by the
batch norm and packed once, and images lie channels last from one convolution to the next.
A float32 convolution of single pixels is a linear layer instead, which reads weights as they lie (`linear`), with all
pointwise work behind it (SiLU, GELU, hardswish) on sums that are still in registers. `fuse(graph)` puts a `Convolution`
in place of each and orders the dims of what others read. A digest of packed weights and statistics is compared in every
call, at the cost of reading them once, so that what is written by whatever means is packed again. Each is tried
(`gate`); where all together are slower than ATen's, or one is wrong, the graph is compiled without them. Float32 and
bfloat16 (weights are multiplied by the batch norm in float32; oneDNN's alone), images of fixed sizes.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from gnomon.compiler.build import CPP, address_of, kernel_of
from gnomon.compiler.kernels import depthwise, linear, taps, winograd
from gnomon.compiler.kernels.chains import Link, epilogue
from gnomon.compiler.kernels.products import dtypes
from gnomon.compiler.node import Node
from gnomon.compiler.rules import pointwise
from gnomon.compiler.tasks.steps import Between, KernelCall, Operation, PackedArgument, PackedSlot, Packing
from gnomon.compiler.tiles.body import UnfitError
from gnomon.compiler.tiles.matmul_tile import MatmulTile
from gnomon.compiler.tune import gate
from gnomon.compiler.tune.gate import Trial
from gnomon.compiler.tune.tried import TriedKernel

aten = torch.ops.aten
FEWEST = 3
"""Convolutions of a graph from which on it is worth to turn images."""
LIBRARY = 0.97
"""Of the time of a kernel of ours that oneDNN's may take in its place: less is noise, and its ReLU is a step by itself
in a run."""
MOST_PACKED = 4
"""Packed weights of a convolution that are kept, where one graph serves several modules."""
LAST = torch.channels_last
Form: TypeAlias = winograd.WinogradForm | taps.TapsForm | depthwise.DepthwiseForm
DIGEST = CPP / "digest.cpp"


@cache
def _digest() -> Callable[..., int] | None:
    number, pointer = ctypes.c_int64, ctypes.c_void_p
    return kernel_of(DIGEST.read_text(encoding="utf-8"), pointer, number, pointer, number)


def digest_of(tensors: Sequence[Tensor]) -> int:
    """64 bits that are others once any number is another."""
    return _digest_of(_pieces(tensors))


def _pieces(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_int64]:
    """Address and bytes of each."""
    numbers = [number for one in tensors for number in (one.data_ptr(), one.nbytes)]
    return (ctypes.c_int64 * len(numbers))(*numbers)


def _digest_of(pieces: ctypes.Array[ctypes.c_int64]) -> int:
    function = _digest()
    assert function is not None
    result = ctypes.c_int64()
    threads = int(torch.get_num_threads() > 1)
    function(ctypes.addressof(pieces), len(pieces) // 2, ctypes.addressof(result), threads)
    return result.value


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """What was made of weights, and the digest of what it was made of."""

    pieces: ctypes.Array[ctypes.c_int64]
    digest: int
    weight: Tensor
    bias: Any
    """A tensor or None; of other kinds of convolutions what they keep beside."""


class Convolution(TriedKernel):
    """One convolution and what follows it, as a function of the image, the tensor that is added (if any), and the
    tensors that it is packed from: weight, bias (if any), and the batch norm's four (if any)."""

    checked = False
    """Both ways are oneDNN's, and packed weights are kept by their addresses."""
    own = False
    """Whether a kernel of ours is tried first, and oneDNN's as the second."""

    def __init__(
        self, sizes: tuple[Any, ...], bias: bool, eps: float | None, added: bool, relu: bool, *,
        before: bool = False, work: Sequence[Node] = (),
    ) -> None:  # fmt: skip
        """Has packed nothing yet. sizes: of the image, then stride, padding, dilation, groups. eps: of the batch norm,
        None without one. before: whether a ReLU is in front. work: pointwise operations that follow, each of what the
        last gave."""
        names = "".join(f" {node.target} {node.args[1:]} {node.kwargs}" for node in work)
        source = f"convolution {sizes} {bias} {eps} {added} {relu}{' relus' * before}{names}"
        super().__init__("convolution", source, True)
        self.before = before
        self.work = [
            (node.target, [None if isinstance(a, fx.Node) else a for a in node.args], node.kwargs) for node in work
        ]
        self.image, self.stride, self.padding, self.dilation, self.groups = sizes
        self.bias, self.eps, self.added, self.relu = bias, eps, added, relu
        self.spends = False
        """Whether nobody else reads the tensor that is added afterwards, so that the sum may take its memory."""
        self.in_call = False
        """Whether it is a step of a run: then it takes no memory, as what is added may be the run's input, on which the
        same steps in C++ and in Python are tried."""
        self.packed: dict[tuple[int, ...], PackedWeight] = {}
        """By the addresses of what is packed."""
        self.slot: PackedSlot | None = None
        """Where C++ finds what is packed, once it calls the convolution."""

    def run(self, *args: Tensor) -> Tensor:
        """Runs oneDNN's fused convolution."""
        x = args[0].contiguous(memory_format=LAST)
        x = x.relu() if self.before else x
        weight, bias = self._weights(args[1 + self.added :])
        sizes = (self.padding, self.stride, self.dilation, self.groups)
        if self.added:
            call = torch.ops.mkldnn._convolution_pointwise.binary
            other = args[1].contiguous(memory_format=LAST)
            out: Tensor = call(x, other, weight, bias, *sizes, "add", 1.0, None, [], "")
        else:
            out = torch.ops.mkldnn._convolution_pointwise.default(x, weight, bias, *sizes, "none", [], "")
        out = out.contiguous(memory_format=LAST)
        return self._worked(out.relu_() if self.relu else out)  # oneDNN's own ReLU of what is not a number is 0

    def _worked(self, out: Tensor) -> Tensor:
        for target, args, named in self.work:
            out = target(*(out if a is None else a for a in args), **named)
        return out

    @property
    def lost(self) -> bool:
        """Whether its work, or the ReLU in front, is PyTorch's now, as the kernel with it is not the fastest."""
        trial = self.trials.get(())
        return bool(self.work or self.before) and trial is not None and (not trial.kept or trial.second_kept)

    def settled(self) -> Callable[..., Any] | None:
        call = super().settled()
        return self._in_place if self.spends and not self.in_call and call == self.run else call

    @property
    def own_kept(self) -> bool:
        """Whether our kernel runs it."""
        trial = self.trials.get(())
        return self.own and trial is not None and bool(trial.kept) and not trial.second_kept

    @property
    def by_onednn(self) -> bool:
        """Whether oneDNN runs it."""
        trial = self.trials.get(())
        return trial is not None and bool(trial.second_kept if self.own else trial.kept)

    def _in_place(self, *args: Tensor) -> Tensor:
        """Runs oneDNN's fused convolution, into the tensor that is added."""
        other = args[1]
        if not other.is_contiguous(memory_format=LAST):
            return self.run(*args)
        weight, bias = self._weights(args[2:])
        x = args[0].contiguous(memory_format=LAST)
        sizes = (self.padding, self.stride, self.dilation, self.groups)
        call = torch.ops.mkldnn._convolution_pointwise_.binary
        out: Tensor = call(other, x, weight, bias, *sizes, "add", 1.0, None, [], "")
        return out.relu_() if self.relu else out

    def _weights(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Any]:
        """Packed weight and bias."""
        # The digest reads `nbytes` bytes from the address on, which is the tensor only where it is dense.
        if not all(one.is_contiguous() for one in tensors):
            tensors = [one.contiguous() for one in tensors]
        # By address, as one graph may serve several modules, whose weights take turns.
        places = tuple(one.data_ptr() for one in tensors)
        known = self.packed.get(places)
        pieces = _pieces(tensors) if known is None else known.pieces
        now = _digest_of(pieces)
        if known is not None and known.digest == now:
            return known.weight, known.bias
        packed, bias = self._made(tensors)
        if len(self.packed) >= MOST_PACKED:
            # What was packed for the kernel that lost is not read any more.
            self.packed.clear()
        self.packed[places] = PackedWeight(pieces, now, packed, bias)
        if self.slot is not None:
            self._share(self.slot)
        return packed, bias

    def _share(self, slot: PackedSlot) -> None:
        slot.hold([(one.digest, one.weight, one.bias) for one in self.packed.values()])

    def step(self, node: Node) -> list[KernelCall | Operation] | None:
        """What C++ calls in a node's place: oneDNN's, with what is packed found by its digest, or ATen's."""
        trial = self.trials.get(())
        if trial is None or trial.kept is None:
            return None
        return self._packed_step(node) if trial.kept else self._aten_steps(node)

    def _aten_steps(self, node: Node) -> list[KernelCall | Operation] | None:
        """ATen's operations, of images that lie as it wants them; None with a sum, whose scale may be of any type."""
        x, weight, *rest = node.args
        if self.added or not x.meta["val"].is_contiguous():
            return None
        bias = rest.pop(0) if self.bias else None
        between = Between(node.meta["val"].contiguous())
        operands = (x, weight, bias, self.stride, self.padding, self.dilation, False, [0, 0], self.groups)
        steps: list[tuple[Any, tuple[Any, ...], int]] = [(aten.convolution.default, operands, 0)]
        if self.eps is not None:
            steps.append((aten._native_batch_norm_legit_no_training.default, (*rest, 0.0, self.eps), 2))
        if self.relu:
            steps.append((aten.relu.default, (), 0))
        out: list[KernelCall | Operation] = []
        for n, (target, args, others) in enumerate(steps):
            result = node if n == len(steps) - 1 else Between(between.like)
            out.append(
                Operation(target=target, args=(between, *args) if n else args, results=(result,) + (None,) * others)
            )
            between = result
        return out

    def _packing(self, node: Node) -> Packing | None:
        """Says where C++ finds what a node's weights were packed to; None where they do not lie as they are read."""
        function, pieces = _digest(), node.args[1 + self.added :]
        if function is None or not all(one.meta["val"].is_contiguous() for one in pieces):
            return None
        if self.slot is None:
            self.slot = PackedSlot()
            self._share(self.slot)
        return Packing(slot=self.slot, digest=address_of(function), pieces=tuple(pieces))

    def _packed_step(self, node: Node) -> list[KernelCall | Operation] | None:
        x, packing = node.args[0], self._packing(node)
        added = [node.args[1]] if self.added else []
        if packing is None:
            return None
        self.in_call = True
        packed_args = (PackedArgument(0), PackedArgument(1) if self.bias or self.eps is not None else None)
        sizes = (self.padding, self.stride, self.dilation, self.groups)
        call = torch.ops.mkldnn._convolution_pointwise
        if added:
            target, args = call.binary, (x, *added, *packed_args, *sizes, "add", None, None, [], "")
        else:
            target, args = call.default, (x, *packed_args, *sizes, "none", [], "")
        if not self.relu:
            return [Operation(target=target, args=args, results=(node,), packing=packing)]
        between = Between(node.meta["val"])
        first = Operation(target=target, args=args, results=(between,), packing=packing)
        return [first, Operation(target=aten.relu.default, args=(between,), results=(node,))]

    def _made(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Any]:
        """What is kept of weights, and of the bias."""
        weight, bias = self._folded(tensors)
        pack: Any = torch._C._nn.mkldnn_reorder_conv2d_weight
        return pack(weight.to_mkldnn(), self.padding, self.stride, self.dilation, self.groups, self.image), bias

    def _folded(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """The weight and bias of a convolution that gives what this and its batch norm give."""
        weight, *rest = tensors
        bias = rest.pop(0) if self.bias else None
        if self.eps is None:
            return weight, bias
        gamma, beta, mean, variance = (one.float() for one in rest)
        # gamma (w x + bias - mean) / sqrt(variance + eps) + beta: the factor goes to the weights of each output, the
        # rest is the new bias.
        scale = gamma * (variance + self.eps).rsqrt()
        shift = beta - mean * scale
        if bias is not None:
            shift = shift + bias.float() * scale
        return (weight.float() * scale[:, None, None, None]).to(weight.dtype), shift.to(weight.dtype)

    def aten(self, *args: Tensor) -> Tensor:
        """Runs PyTorch's operations, one after another."""
        x, *rest = args
        added = rest.pop(0) if self.added else None
        weight = rest.pop(0)
        bias = rest.pop(0) if self.bias else None
        x = x.contiguous()
        x = x.relu() if self.before else x
        out = torch.convolution(x, weight, bias, self.stride, self.padding, self.dilation, False, [0, 0], self.groups)
        if self.eps is not None:
            out = torch.nn.functional.batch_norm(out, rest[2], rest[3], rest[0], rest[1], eps=self.eps)
        out = out if added is None else out + added
        return self._worked(out.relu() if self.relu else out).contiguous(memory_format=LAST)


class Pixels(Convolution):
    """One of single pixels in float32: a linear layer of all pixels, by a kernel that reads weights as they lie, with
    pointwise work behind it."""

    own = True

    def __init__(
        self, *args: Any, work: Sequence[Node] = (), ended: linear.Ended = (), tile: MatmulTile | None = None,
        before: bool = False, rows: int = 0,
    ) -> None:  # fmt: skip
        """Is not tried yet. work, before: as of a `Convolution`; ended: work's C++; tile: of the kernel, None for the
        one of most sizes; rows: pixels of the result, 0 where they are not known."""
        super().__init__(*args, work=work, before=before)
        least = linear.least_of(rows, tile)
        self.form = linear.LinearForm(tile=tile, epilogue=ended, relus=before, least=least)
        self.text = linear.source(self.form)
        self.source = f"{self.text}// {self.source}"

    def _by_onednn(self, *args: Tensor) -> Tensor:
        return super().run(*args)

    def trial(self) -> Trial:
        """Makes a new trial: of our kernel, then of oneDNN's with packed weights."""
        listed = self._listed
        second = (self.source.removeprefix(str(self.text)), listed(self._by_onednn))
        return Trial(self.source, listed(self.run), listed(self.aten), second=second, second_share=LIBRARY)

    def __call__(self, *args: Tensor) -> Any:
        """Returns the results, which are PyTorch's while the kernels are tried."""
        call = self.settled()
        return super().__call__(*args) if call is None else call(*args)

    def settled(self) -> Callable[..., Any] | None:
        trial = self.trials.get(())
        if trial is None or trial.kept is None:
            return None
        spends = self.spends and not self.in_call
        if trial.second_kept:
            return super()._in_place if spends and not self.work else self._by_onednn
        if not trial.kept:
            return self.aten
        # with work a kernel may find that ATen has an answer of its own, and what is added has to be there still
        return self._in_place if spends and not self.work else self.run

    def step(self, node: Node) -> list[KernelCall | Operation] | None:
        """What C++ calls in a node's place: our kernel or oneDNN's."""
        trial, function = self.trials.get(()), linear.kernel(self.form)
        if trial is None or trial.kept is None or function is None:
            return None
        if trial.second_kept or not trial.kept:
            if self.work:
                return None
            return self._packed_step(node) if trial.second_kept else self._aten_steps(node)
        x, *rest = node.args
        inputs = [("x", x), *([("added", rest.pop(0))] if self.added else []), ("w", rest.pop(0))]
        inputs += [("bias", rest.pop(0))] if self.bias else []
        inputs += zip(("gamma", "beta", "mean", "variance"), rest, strict=False)
        laid = all(
            self._is_laid(one.meta["val"])
            if name == "x"
            else one.meta["val"].is_contiguous(memory_format=LAST if name == "added" else torch.contiguous_format)
            for name, one in inputs
        )
        sizes, out = x.meta["val"].shape, node.meta["val"]
        if not laid or not out.is_contiguous(memory_format=LAST):
            return None
        self.in_call = True
        turned = not x.meta["val"].is_contiguous(memory_format=LAST)
        filled = linear.of_pixels(sizes, int(out.shape[1]), self.stride[0], self.relu, self.eps or 0.0, turned)
        return [
            KernelCall(function=address_of(function), filled=filled, inputs=tuple(inputs), outputs=(("out", node),))
        ]

    def _is_laid(self, x: Tensor) -> bool:
        """Whether the kernel reads an image as it lies."""
        turns = len(x) == 1 and self.stride[0] == 1 and not self.work
        return x.is_contiguous(memory_format=LAST) or (turns and x.is_contiguous())

    def run(self, *args: Tensor) -> Tensor:
        """Runs our kernel on these tensors."""
        return self._by_kernel(args, into=False)

    def _in_place(self, *args: Tensor) -> Tensor:
        """Runs our kernel, into the tensor that is added."""
        return self._by_kernel(args, into=args[1].is_contiguous(memory_format=LAST))

    def _by_kernel(self, args: Sequence[Tensor], into: bool) -> Tensor:
        x, *tensors = args
        added = tensors.pop(0).contiguous(memory_format=LAST) if self.added else None
        weight, *norm = (one.contiguous() for one in tensors)
        bias = norm.pop(0) if self.bias else None
        x, step = x if self._is_laid(x) else x.contiguous(memory_format=LAST), self.stride[0]
        out = linear.pixels(x, weight, bias, norm, self.eps or 0.0, step, added, self.relu, into, self.form)
        return self.aten(*args) if out is None else out


class Tiled(Convolution):
    """One in float32 by a kernel of ours with packed weights (`winograd`, `taps`, `depthwise`), or by oneDNN, as is
    faster."""

    own = True

    def __init__(self, form: Form, outputs: int, *args: Any, work: Sequence[Node] = (), before: bool = False) -> None:
        """Is not tried yet. Others: as of a `Convolution`."""
        super().__init__(*args, work=work, before=before)
        self.form, self.outputs = form, outputs
        self.library = Convolution(*args, work=work, before=before)
        """The same by oneDNN, which has the answer where our kernel refuses."""
        self.text = form.text
        self.source = f"{self.text}// {self.source}"

    def trial(self) -> Trial:
        """Makes a new trial: of our kernel, then of oneDNN's."""
        listed = self._listed
        second = (self.library.source, listed(self.library.run))
        return Trial(self.source, listed(self.run), listed(self.aten), second=second, second_share=LIBRARY)

    def _laid(self, x: Tensor) -> Tensor:
        """The image as the kernel reads it: `taps` copies one with a border from any order."""
        turns = isinstance(self.form, taps.TapsForm) and any(self.padding)
        return x if turns else x.contiguous(memory_format=LAST)

    def run(self, *args: Tensor) -> Tensor:
        """Runs our kernel on these tensors; oneDNN's where it refuses."""
        x, function = self._laid(args[0]), self.form.kernel()
        added = args[1].contiguous(memory_format=LAST) if self.added else None
        weights, bias = self._weights(args[1 + self.added :])
        call = self.form.filled(x, self.outputs, self.relu)
        call.threads = call.threads or torch.get_num_threads()
        out = torch.empty((len(x), self.outputs, call.out_high, call.out_wide), memory_format=LAST)
        call.x, call.weights, call.out = x.data_ptr(), weights.data_ptr(), out.data_ptr()
        call.bias = None if bias is None else bias.data_ptr()
        call.added = None if added is None else added.data_ptr()
        return self.library.run(*args) if function is None or function(call) else out

    def __call__(self, *args: Tensor) -> Any:
        """Returns the results, which are PyTorch's while the kernels are tried."""
        call = self.settled()
        return super().__call__(*args) if call is None else call(*args)

    def settled(self) -> Callable[..., Any] | None:
        trial = self.trials.get(())
        if trial is None or trial.kept is None:
            return None
        if trial.second_kept:
            spends = self.spends and not self.library.in_call and not self.library.work and not self.before
            return self.library._in_place if spends else self.library.run
        # a kernel that refuses may have written: what is added has to be there still
        return self.run if trial.kept else self.aten

    def step(self, node: Node) -> list[KernelCall | Operation] | None:
        """What C++ calls in a node's place: our kernel or oneDNN's."""
        trial = self.trials.get(())
        if trial is None or trial.kept is None:
            return None
        if trial.second_kept:
            self.packed.clear()
            return None if self.lost else self.library._packed_step(node)
        if not trial.kept:
            return None if self.lost else self._aten_steps(node)
        self.library.packed.clear()
        function, packing = self.form.kernel(), self._packing(node)
        images = [("x", node.args[0]), *([("added", node.args[1])] if self.added else [])]
        x, *laid = [one.meta["val"] for _, one in images] + [node.meta["val"]]
        if function is None or packing is None or not all(one.is_contiguous(memory_format=LAST) for one in laid):
            return None
        if self._laid(x).stride() != x.stride():
            return None
        held = (("weights", PackedArgument(0)), ("bias", PackedArgument(1)))
        return [
            KernelCall(
                function=address_of(function), filled=self.form.filled(x, self.outputs, self.relu),
                inputs=tuple(images), outputs=(("out", node),), packing=packing, held=held,
            )
        ]  # fmt: skip

    def _made(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Any]:
        """What is kept of weights, and of the bias."""
        weight, bias = self._folded(tensors)
        return self.form.packed(weight), bias


def slower(calls: Sequence[Convolution]) -> bool:
    """Whether all together took longer than ATen's in their trials, or one was wrong: then none is to stay."""
    verdicts = [one.verdict for one in calls]
    # Without seconds it was wrong or did not run.
    if any("kernel_s" not in verdict for verdict in verdicts):
        return bool(verdicts)
    return sum(one["kernel_s"] for one in verdicts) > gate.SLOWER * sum(one["aten_s"] for one in verdicts)


# ---- in a graph of ATen's
def fuse(graph: fx.Graph, works: bool = True, apart: frozenset[str] = frozenset()) -> list[Convolution]:
    """Puts a `Convolution` in place of each convolution with what follows it; returns them. works: whether pointwise
    work is taken in by kernels of ours. apart: sources of those that lost with it."""
    if not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled or _digest() is None:
        return []
    found = [node for node in graph.nodes if _taken(node)]
    if len(found) < FEWEST:
        return []
    fused_nodes = [_fused(graph, node, works, apart) for node in found]
    # After all are fused, as only a tensor whose readers are all such calls may be written over.
    for node in fused_nodes:
        node.target.spends = _spends(node)
    _turn(graph, fused_nodes)
    return [node.target for node in fused_nodes]


def _value(node: Any) -> Tensor | None:
    """The fake tensor of a node, where it is of fixed sizes and oneDNN reads such tensors."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, Tensor) or value.device.type != "cpu" or value.layout != torch.strided:
        return None
    fixed = all(isinstance(size, int) and size > 0 for size in value.shape)
    return value if value.dtype in dtypes() and fixed and not value.is_neg() else None


def _taken(node: Node) -> bool:
    """A convolution along two dims of a weight that is given to the graph."""
    if node.target is not aten.convolution.default or node.kwargs or tuple(node.args[6:8]) != (False, [0, 0]):
        return False
    x, weight, bias = node.args[:3]
    values = [_value(one) for one in (x, weight, *([] if bias is None else [bias]))]
    if any(value is None for value in values) or values[0].dim() != 4:  # type: ignore[union-attr]
        return False
    if len({value.dtype for value in values}) > 1:  # type: ignore[union-attr]
        return False
    numbers = [*node.args[3], *node.args[4], *node.args[5], node.args[8]]
    fixed_weight = weight.op == "placeholder" and (bias is None or bias.op == "placeholder")
    return fixed_weight and len(numbers) == 7 and all(type(one) is int for one in numbers)


def _only_user(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _norm(node: Node) -> tuple[Node, tuple[Node, ...], float] | None:
    """(result, gamma beta mean variance, eps) of the batch norm that alone reads a node."""
    norm = _only_user(node)
    if norm is None or norm.target is not aten._native_batch_norm_legit_no_training.default or norm.args[0] is not node:
        return None
    tensors = tuple(norm.args[1:5])
    # The norm gives (result, saved mean, saved deviation); nobody may read the last two, which a fused kernel does not
    # give.
    first = _only_user(norm)
    values = [_value(one) for one in (node, *tensors)]
    if norm.kwargs or first is None or first.args[1] != 0 or any(value is None for value in values):
        return None
    if len({value.dtype for value in values}) > 1:  # type: ignore[union-attr]
        return None  # a batch norm that stayed in float32
    return (first, tensors, float(norm.args[6])) if all(one.op == "placeholder" for one in tensors) else None


def _fused(graph: fx.Graph, node: Node, works: bool, apart: frozenset[str]) -> Node:
    """One convolution with what follows it, as one node."""
    x, weight, bias, stride, padding, dilation = node.args[:6]
    gone, last, eps, tensors = [node], node, None, [weight, *([] if bias is None else [bias])]
    norm = _norm(node)
    if norm is not None:
        last, four, eps = norm
        gone, tensors = [node, last.args[0], last], [*tensors, *four]
    added, user = None, _only_user(last)
    if user is not None and user.target is aten.add.Tensor and len(user.args) == 2 and not user.kwargs:
        other = user.args[1] if user.args[0] is last else user.args[0]
        value, mine = _value(other), last.meta["val"]
        if value is not None and (value.shape, value.dtype) == (mine.shape, mine.dtype) and other is not last:
            # Same shape and dtype, so it is read at the place of the result, without broadcasting.
            added, last = other, user
            gone.append(user)
            user = _only_user(last)
    relu = user is not None and user.target is aten.relu.default
    if relu:
        last = user
        gone.append(user)
    sizes = (list(x.meta["val"].shape), list(stride), list(padding), list(dilation), node.args[8])
    numbers = (sizes, bias is not None, eps, added is not None, relu)
    call, front, work = _call(node, last, numbers, works)
    if call.source in apart:
        call, front, work = _call(node, last, numbers, works=False)
    gone += work
    last = gone[-1]
    # At the place of the last node: what is added may be computed after the convolution.
    with graph.inserting_before(last):
        new = graph.call_function(call, (front, *([] if added is None else [added]), *tensors))
    new.meta.update(last.meta)
    last.replace_all_uses_with(new)
    # Readers first, as fx erases only what nobody reads.
    for one in reversed(gone):
        graph.erase_node(one)
    if front is not x and not x.users:  # a ReLU in front, which nobody else reads
        graph.erase_node(x)
    return new


def _call(node: Node, last: Node, numbers: tuple[Any, ...], works: bool) -> tuple[Convolution, Node, list[Node]]:
    """What computes a convolution up to `last` and the work behind that, the image that it reads, and that work."""
    x, outputs = node.args[0], int(node.args[1].meta["val"].shape[0])
    work, ended = _work(last) if works else ([], ())
    # Behind other pointwise work a ReLU in front is part of that work's kernel.
    before = works and x.target is aten.relu.default and not _is_work(x.args[0])
    front = x.args[0] if before else x
    if _of_pixels(node):
        rows, tile = node.meta["val"].numel() // max(1, outputs), linear.tile_of_pixels(outputs)
        return Pixels(*numbers, work=work, ended=ended, tile=tile, before=before, rows=rows), front, work
    form = _form(node)
    if form is None:
        return Convolution(*numbers), x, []
    if isinstance(form, depthwise.DepthwiseForm):
        form = replace(form, relus=before)
    else:
        before, front = False, x
    return Tiled(replace(form, ended=ended), outputs, *numbers, work=work, before=before), front, work


def _is_work(node: Node) -> bool:
    return node.target in pointwise.RULES or node.target is operator.getitem


def _work(node: Node) -> tuple[list[Node], linear.Ended]:
    """(pointwise operations behind a convolution, each of what the last gave alone, their C++)."""
    work: list[Node] = []
    user = _only_user(node)
    while user is not None and user.target in pointwise.FORMULAS and user.all_input_nodes == [(work or [node])[-1]]:
        like = _value(user)
        if (
            like is None
            or like.dtype != torch.float32
            or user.kwargs.get("dtype")
            or like.shape != node.meta["val"].shape
        ):
            break
        if sum(isinstance(a, fx.Node) for a in user.args) != 1 or any(
            isinstance(a, fx.Node) for a in user.kwargs.values()
        ):
            break
        work.append(user)
        user = _only_user(user)
    if not work:
        return [], ()
    link = Link(
        matmul=node, bias=None, x=node, weight=node, transposed=True, out=work[-1], after=tuple(work), others=()
    )
    try:
        return work, epilogue(link)
    except UnfitError:
        return [], ()


def _of_pixels(node: Node) -> bool:
    """Whether a convolution reads single pixels, which lie at even distances."""
    x, weight, _, stride, padding = node.args[:5]
    # The kernel knows one distance between pixels of a line and one between lines, none between images: from the last
    # line that is read of an image to the first of the next is as far as between lines only where the stride divides
    # the height.
    (images, _, high, _), groups = x.meta["val"].shape, node.args[8]
    plain = x.meta["val"].dtype == torch.float32 and list(weight.meta["val"].shape[2:]) == [1, 1]
    even = stride[0] == stride[1] and (stride[0] == 1 or images == 1 or high % stride[0] == 0)
    return plain and even and groups == 1 and not any(padding)


def _form(node: Node) -> Form | None:
    """What a kernel of ours computes a convolution by, None where there is none."""
    x, weight, _, stride, padding, dilation = node.args[:6]
    value, (outputs, _, *window), groups = x.meta["val"], weight.meta["val"].shape, node.args[8]
    if value.dtype == torch.float32 and groups == outputs == value.shape[1] > 1:
        return depthwise.form_of(value.shape, window, stride, padding, dilation)
    if value.dtype != torch.float32 or groups != 1:
        return None
    if window == [winograd.SIDE] * 2 and [*stride, *dilation] == [1] * 4:
        form = winograd.form_of(value.shape, int(outputs), padding)
        if form is not None:
            return form
    return taps.form_of(value.shape, window, stride, padding, dilation)


def _spends(node: Node) -> bool:
    """Whether what a convolution adds is another's result that all others have read before."""
    call = node.target
    if not call.added or node.args[0] is node.args[1] or not isinstance(node.args[1].target, Convolution):
        return False
    # All that this convolution depends on, itself among them: such a reader has run before the memory is written over,
    # in whatever order the graph runs. Only convolutions are accepted as readers, since a view's own readers are not
    # looked at.
    above, waiting = {node}, [node]
    while waiting:
        new = [one for one in waiting.pop().all_input_nodes if one not in above]
        above.update(new)
        waiting += new
    return all(user in above and isinstance(user.target, Convolution) for user in node.args[1].users)


POOLS = (aten.avg_pool2d.default,)
"""Beside pointwise operations, what is as quick of images that lie channels last, and leaves them so."""


def _turn(graph: fx.Graph, region: Sequence[Node]) -> None:
    """Says of what is now channels last that it is, and of what is computed from that alone, point by point or by
    pooling; who needs another order of dims is given a copy."""
    turned, readers = set(region), set(region)
    for node in graph.nodes:
        if node.target is aten.max_pool2d_with_indices.default and node.args[0] in turned:
            first = _only_user(node)
            if first is not None and first.target is operator.getitem and first.args[1] == 0:
                turned.add(first)
                readers |= {node, first}
                node.meta["val"] = tuple(one.contiguous(memory_format=LAST) for one in node.meta["val"])
        elif node not in turned and _follows(node, turned):
            turned.add(node)
            readers.add(node)
    for node in [one for one in graph.nodes if one in turned]:
        before = node.meta["val"]
        node.meta["val"] = before.contiguous(memory_format=LAST)
        others = [user for user in node.users if user not in readers]
        if others and node.meta["val"].stride() != before.stride():
            with graph.inserting_after(node):
                copy = graph.call_function(aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
            copy.meta.update({**node.meta, "val": before})
            for user in others:
                user.replace_input_with(node, copy)


def _follows(node: Node, turned: set[Node]) -> bool:
    """Whether images are computed of turned ones of the same size alone, and of vectors."""
    value = _value(node)
    if (
        value is None
        or value.dim() != 4
        or not (node.target in pointwise.RULES or node.target in POOLS + (aten.cat.default,))
    ):
        return False
    if node.target is aten.cat.default and node.args[1:] != (1,):
        return False
    images = [
        one for one in node.all_input_nodes if isinstance(one.meta.get("val"), Tensor) and one.meta["val"].dim() == 4
    ]
    others = [one for one in node.all_input_nodes if one not in images]
    if not images or any(getattr(one.meta.get("val"), "ndim", 4) for one in others):
        return False
    whole = [one for one in images if one in turned]
    return len(whole) == len(images)
