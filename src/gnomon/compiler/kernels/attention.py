"""Attention on CPUs by a kernel of our own, forward and backward.

PyTorch's scaled_dot_product_attention is one ATen operation on a CPU. Its products of bfloat16 are far from what the
instruction for pairs of them can do, and a causal one multiplies what is above the diagonal too. `fuse(graph)` puts an
`Attention` and an `AttentionBackward` in place of it and of its gradients, whose kernels (cpp/attention.cpp,
cpp/attention_backward.cpp) hold a block of scores in cache; in float32 also in the place of two matrix products with a
scale, a mask and a softmax between, as eager models write attention, where nothing else reads the probabilities (a
backward does). Each is compared with ATen's on the first inputs of each size, in results and time, and kept or given
back (`tried`). One thread computes a head, so results are the same with any number of threads. Bfloat16 where the
processor has AVX-512 BF16, float32 on all. Leaves out dropout, other dtypes, and heads whose size is no multiple of 16
up to 128: these stay ATen's.
Shapes: queries (batch, heads, S, depth), keys and values (batch, heads, T, depth).
Source: the order of the work is that of Dao, FlashAttention-2 (2023).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from gnomon.compiler.build import CPP, kernel_of
from gnomon.compiler.machine import this_machine
from gnomon.compiler.node import Node
from gnomon.compiler.tune.tried import TriedKernel, text_of

aten = torch.ops.aten
FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
"""What scaled_dot_product_attention and its backward are in ATen on a CPU."""
DEPTHS = range(16, 129, 16)
"""Sizes of a head for which the kernels are written."""
PARALLEL = 1 << 18
"""Multiply-adds of q kᵀ (batch x heads x S x T x depth) from which on threads share the heads."""
MASKS = {torch.float32: 1, torch.bfloat16: 2}
"""Dtype of a mask that is added -> its `mask_kind` in cpp/attention.h, where 0 is no mask."""
_SIZES = "batch heads queries keys depth causal parallel".split()
"""Whole numbers that begin both kernels' arguments; the last two are flags."""


def _fields(inputs: str, outputs: str) -> list[tuple[str, Any]]:
    """Fields of a kernel's argument: sizes, scale, the tensors that are read, the mask, sums of rows, and results; of
    each tensor its address and its strides in numbers. `hollow` is what the forward writes for a row all of whose
    scores are masked by -inf: 0 as ATen's operation does, or NaN as a softmax that is written out."""
    scales = ["scale", "hollow"] if outputs == "out" else ["scale"]
    whole = [*_numbers(_SIZES), *((name, ctypes.c_double) for name in scales), *_tensors(inputs.split())]
    mask = [("mask", ctypes.c_void_p), *_numbers(f"mask_{name}" for name in ("kind", *"bhst"))]
    return [*whole, *mask, *_tensors(["sums"]), *_tensors(outputs.split())]


def _numbers(names: Iterable[str]) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_int64) for name in names]


def _tensors(names: Sequence[str]) -> list[tuple[str, Any]]:
    """Addresses of all, then strides of each along batch, heads and positions; the last dim is dense."""
    pointers: list[tuple[str, Any]] = [(name, ctypes.c_void_p) for name in names]
    return pointers + _numbers(f"{name}_{dim}" for name in names for dim in "bhs")


class _AttentionCall(ctypes.Structure):
    """The struct `Call` of cpp/attention.cpp, field by field."""

    _fields_ = _fields("q k v", "out")


class _AttentionBackwardCall(ctypes.Structure):
    """The struct `Call` of cpp/attention_backward.cpp, field by field."""

    _fields_ = _fields("g q k v out", "dq dk dv")


def text(name: str, dtype: torch.dtype) -> str:
    """The C++ source of a kernel (`attention` or `attention_backward`) for a dtype."""
    return text_of(CPP / f"{name}.cpp", dtype)


@cache
def kernel(name: str, dtype: torch.dtype) -> Callable[[Any], int] | None:
    """The compiled kernel, None where it does not compile."""
    return kernel_of(text(name, dtype), ctypes.c_void_p)


def dtypes() -> tuple[torch.dtype, ...]:
    """Dtypes for which kernels are made on this processor."""
    paired = this_machine().isa.name == "avx512_bf16"
    return (torch.float32, torch.bfloat16) if paired else (torch.float32,)


class Attention(TriedKernel):
    """Attention of queries (batch, heads, S, depth), keys and values (batch, heads, T, depth) and a mask to add, where
    there is one: the output, and the logarithm of each row's sum of exponentials (batch, heads, S) in float32."""

    several = True
    name = "attention"

    def __init__(self, causal: bool, scale: float | None, fixed: bool, dtype: torch.dtype = torch.bfloat16) -> None:
        """Makes a kernel that was not timed yet. scale: of scores; None for depth to the power of -1/2. fixed: whether
        all sizes are constants of the graph."""
        self.text = text(self.name, dtype)
        super().__init__(self.name, f"{self.text}// {causal} {scale}", fixed)
        self.causal, self.scale = causal, scale

    def run(self, *args: Tensor) -> list[Tensor]:
        """Runs the kernel on these tensors, or PyTorch's operation where it cannot."""
        q, k, v, *mask = args
        out, sums = torch.empty_like(q), _turned(q.shape[:3], torch.float32)
        q, k, v = (_dense(one) for one in (q, k, v))
        function = kernel(self.name, q.dtype)
        if function is None or not (q.numel() and k.numel()) or out.stride(3) != 1:
            return self.aten(*args)
        call = _AttentionCall()
        self._fill(call, q, k, mask, {"q": q, "k": k, "v": v, "sums": sums, "out": out})
        return self.aten(*args) if function(ctypes.addressof(call)) else [out, sums]

    def aten(self, *args: Tensor) -> list[Tensor]:
        """Runs PyTorch's own operation."""
        q, k, v, *mask = args
        return [*FORWARD(q, k, v, 0.0, self.causal, attn_mask=mask[0] if mask else None, scale=self.scale)]

    def _fill(self, call: Any, q: Tensor, k: Tensor, mask: Sequence[Tensor], tensors: dict[str, Tensor]) -> None:
        """Writes sizes, scale, and addresses and strides of tensors and mask into a kernel's argument. A mask is
        broadcast by strides of 0."""
        call.batch, call.heads, call.queries, call.depth = q.shape
        call.keys, call.causal = k.shape[2], int(self.causal)
        call.scale = q.shape[3] ** -0.5 if self.scale is None else self.scale
        call.parallel = int(torch.get_num_threads() > 1 and q.numel() * k.shape[2] >= PARALLEL)
        for name, one in tensors.items():
            setattr(call, name, one.data_ptr())
            for dim, step in zip("bhs", one.stride(), strict=False):
                setattr(call, f"{name}_{dim}", step)
        for one in mask:
            # [batch, heads, S, T] by strides of 0 where the mask is smaller: it is never written out.
            wide = one.expand(*q.shape[:3], k.shape[2])
            call.mask, call.mask_kind = wide.data_ptr(), MASKS[wide.dtype]
            call.mask_b, call.mask_h, call.mask_s, call.mask_t = wide.stride()


class AttentionBackward(Attention):
    """Computes attention's backward. From the output's gradient, queries, keys, values, the output and the rows' sums,
    and the mask where there is one: gradients of queries, keys and values."""

    name = "attention_backward"

    def run(self, *args: Tensor) -> list[Tensor]:
        """Runs the kernel on these tensors, or PyTorch's operation where it cannot."""
        g, q, k, v, out = (_dense(one) for one in args[:5])
        sums, *mask = args[5:]
        function = kernel(self.name, q.dtype)
        # With one key the gradient of the scores is 0, which the kernel would get as a difference of rounded numbers.
        if function is None or not q.numel() or k.shape[2] < 2:
            return self.aten(*args)
        gradients = [_turned(one.shape, one.dtype) for one in (q, k, v)]
        call, names = _AttentionBackwardCall(), "g q k v out sums dq dk dv".split()
        self._fill(call, q, k, mask, dict(zip(names, (g, q, k, v, out, sums, *gradients), strict=True)))
        return self.aten(*args) if function(ctypes.addressof(call)) else gradients

    def aten(self, *args: Tensor) -> list[Tensor]:
        """Runs PyTorch's operation on the same tensors."""
        *tensors, mask = args if len(args) == 7 else (*args, None)
        return [*BACKWARD(*tensors, 0.0, self.causal, attn_mask=mask, scale=self.scale)]


class WrittenAttention(Attention):
    """Attention written as two matmuls with a softmax between, in float32: of queries (..., S, depth), transposed keys
    (..., depth, T), values (..., T, depth) and a mask to add, where there is one; ... is batch x heads, or both.
    Returns (batch x heads, S, depth) as the second matmul does. Scores do not go to memory."""

    several = False

    def __init__(self, scale: float, divided: bool, sizes: tuple[int, int]) -> None:
        """Makes a kernel that was not timed yet. scale: what scores are multiplied by, or `divided` by. sizes: (batch,
        heads)."""
        super().__init__(False, 1.0 / scale if divided else scale, True, torch.float32)
        self.source += f" written {scale} {divided} {sizes}"
        self.scores, self.divided, self.sizes = scale, divided, sizes

    def run(self, *args: Tensor) -> Tensor:  # type: ignore[override]
        """Runs the kernel on these tensors, or PyTorch's operations where it cannot."""
        q, k, v = (one.view(*self.sizes, *one.shape[1:]) if one.dim() == 3 else one for one in args[:3])
        mask = args[3:]
        q, k, v = _dense(q), _dense(k.transpose(2, 3)), _dense(v)
        out, sums = torch.empty_like(q, memory_format=torch.contiguous_format), _turned(q.shape[:3], torch.float32)
        function, call = kernel(self.name, q.dtype), _AttentionCall(hollow=float("nan"))
        if function is None:
            return self.aten(*args)  # type: ignore[return-value]
        self._fill(call, q, k, mask, {"q": q, "k": k, "v": v, "sums": sums, "out": out})
        return self.aten(*args) if function(ctypes.addressof(call)) else out.flatten(0, 1)  # type: ignore[return-value]

    def aten(self, *args: Tensor) -> Tensor:  # type: ignore[override]
        """Runs PyTorch's operations, one after another."""
        q, k, v, *mask = args
        q, k, v = (one.reshape(-1, *one.shape[-2:]) for one in (q, k, v))
        scores = torch.bmm(q, k).view(*self.sizes, q.shape[1], k.shape[2])
        if self.scores != 1.0:
            scores = scores / self.scores if self.divided else scores * self.scores
        scores = scores + mask[0] if mask else scores
        return torch.bmm(torch.softmax(scores, -1).flatten(0, 1), v)


def _turned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An empty tensor (batch, heads, positions, ...) laid as ATen lays its results: (batch, positions, heads, ...) in
    memory."""
    batch, heads, positions, *rest = shape
    return torch.empty((batch, positions, heads, *rest), dtype=dtype).transpose(1, 2)


def _dense(one: Tensor) -> Tensor:
    """The tensor, copied unless its last dim is dense, as the kernels read it."""
    return one if one.stride(3) == 1 else one.contiguous()


def fuse(graph: fx.Graph) -> list[Attention]:
    """Puts an `Attention` in place of each attention of the graph that the kernels can compute; returns them."""
    calls: list[Attention] = []
    for node in list(graph.nodes):
        found = _attention(node)
        if found is None:
            continue
        call, tensors = found
        with graph.inserting_before(node):
            new = graph.call_function(call, tuple(tensors))
        new.meta.update(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        calls.append(call)
    return [*calls, *_fuse_written(graph)]


# ---- attention written as two matmuls
SAME = (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default, aten.clone.default)
"""Operations that keep numbers and their order where they keep the shape, or join or part batch and heads: where they
are skipped, the shapes are checked."""


def _fuse_written(graph: fx.Graph) -> list[Attention]:
    """Puts a `WrittenAttention` in place of each matmul of a softmax of a matmul that nothing else reads."""
    calls: list[Attention] = []
    for node in list(graph.nodes):
        found = _written(node)
        if found is None:
            continue
        call, tensors = found
        with graph.inserting_before(node):
            new = graph.call_function(call, tuple(tensors))
        new.meta.update(node.meta)
        node.replace_all_uses_with(new)
        waiting = [node]  # erased from the last product up, as far as nothing else reads them
        while waiting:
            one = waiting.pop()
            if not one.users and one.op == "call_function":
                above = one.all_input_nodes
                graph.erase_node(one)
                waiting += above
        calls.append(call)
    return calls


def _floats(node: Any) -> Tensor | None:
    """The fake tensor of a node on the CPU, if it is float32 of constant sizes, none of which is 0; else None."""
    value = _plain(node)
    fixed = value is not None and all(isinstance(size, int) and size > 0 for size in value.shape)
    return value if fixed and value is not None and value.dtype == torch.float32 else None


def _source(node: Node, batch: int, heads: int) -> Node:
    """Follows views and copies of (batch x heads, ...) or (batch, heads, ...) up to the node that they are of."""
    rest = list(node.meta["val"].shape[-2:])
    shapes = ([batch, heads, *rest], [batch * heads, *rest])
    while node.target in SAME and _floats(node.args[0]) is not None and list(node.args[0].meta["val"].shape) in shapes:
        node = node.args[0]
    return node


def _written(node: Node) -> tuple[WrittenAttention, list[Node]] | None:
    """Recognises the last matmul of softmax(q kᵀ · scale + mask) v; None where something else reads what lies between,
    or the kernels do not fit. Returns the kernel and its (queries, transposed keys, values[, mask])."""
    if node.target is not aten.bmm.default or _floats(node) is None:
        return None
    inside: list[Node] = []  # all nodes between: each must have one reader

    def up(one: Node) -> Node:
        """Skips views and copies that keep all numbers."""
        while one.target in SAME and one.args[0].meta["val"].numel() == one.meta["val"].numel():
            inside.append(one)
            one = one.args[0]
        return one

    softmax = up(node.args[0])
    if softmax.target is not aten._softmax.default or _floats(softmax) is None:
        return None
    dims = softmax.meta["val"].dim()
    if dims not in (3, 4) or softmax.args[1] not in (-1, dims - 1) or softmax.args[2]:
        return None
    inside.append(softmax)
    scores, mask, scale, divided = softmax.args[0], [], 1.0, False
    # (S, T) come last: of four dims the first two are batch and heads, of three all heads are of one batch.
    batch, heads = (1, *softmax.meta["val"].shape)[dims - 3 : dims - 1]
    if scores.target is aten.add.Tensor and len(scores.args) == 2 and not scores.kwargs:
        one, other = scores.args
        of = _floats(other)
        if of is None or of.dim() > dims or _floats(scores) is None:
            return None
        inside.append(scores)
        scores, mask = one, [other]
    if scores.target in (aten.mul.Tensor, aten.div.Tensor) and isinstance(scores.args[1], float) and not scores.kwargs:
        inside.append(scores)
        scale, divided, scores = scores.args[1], scores.target is aten.div.Tensor, scores.args[0]
    scaled_scores = up(scores)
    inside.append(scaled_scores)
    if scaled_scores.target is not aten.bmm.default or not scale > 0 or any(len(one.users) != 1 for one in inside):
        return None
    if list(scores.meta["val"].shape) != list(softmax.meta["val"].shape):
        return None
    # Views between the products may only join batch and heads. Multi-query attention that folds heads into rows,
    # (batch, heads x S, T), is not an attention of (batch x heads, S, T), though its numbers lie in the same order.
    joined = [batch * heads, *softmax.meta["val"].shape[-2:]]
    if any(list(one.meta["val"].shape) != joined for one in (scaled_scores, node.args[0])):
        return None
    q, k, v = (_source(one, batch, heads) for one in (*scaled_scores.args, node.args[1]))
    values = [_floats(one) for one in (q, k, v)]
    if any(value is None for value in values) or kernel_sizes(values) is None:
        return None
    return WrittenAttention(scale, divided, (batch, heads)), [q, k, v, *mask]


def kernel_sizes(values: Sequence[Any]) -> int | None:
    """The size of a head if the kernels have it, else None. values: queries, transposed keys, values."""
    q, k, v = values
    depth = int(q.shape[-1])
    return depth if depth == k.shape[-2] == v.shape[-1] and depth in DEPTHS else None


def _attention(node: Node) -> tuple[Attention, list[Node]] | None:
    """The kernel for ATen's attention or its backward, and the tensors that it reads; None for other nodes, and where
    the kernels do not fit."""
    # The first arguments are tensors: q k v, or grad q k v out logsumexp; dropout_p and is_causal follow.
    count = {FORWARD: 3, BACKWARD: 6}.get(node.target) if node.op == "call_function" else None
    if count is None:
        return None
    tensors = list(node.args[:count])
    optional, defaults = list(node.args[count:]), [0.0, False]
    dropout, causal = optional + defaults[len(optional) :]
    mask, scale = node.kwargs.get("attn_mask"), node.kwargs.get("scale")
    if not (isinstance(dropout, float) and dropout == 0 and isinstance(causal, bool) and _positive(scale)):
        return None
    masks = [] if mask is None else [mask]
    values: Any = [_plain(one) for one in (*tensors, *masks)]
    if set(node.kwargs) - {"attn_mask", "scale"} or any(value is None for value in values):
        return None
    q, k, v = values[:3] if count == 3 else values[1:4]
    # All but the log-sum-exp (the sixth, always float32) are of one dtype.
    if q.dtype not in dtypes() or {one.dtype for one in values[: min(count, 5)]} != {q.dtype} or not _fit(q, k, v):
        return None
    if masks and (values[-1].dtype not in MASKS or values[-1].dim() > 4):
        return None
    fixed = all(isinstance(size, int) for one in values for size in one.shape)
    kind = Attention if count == 3 else AttentionBackward
    return kind(causal, scale, fixed, q.dtype), [*tensors, *masks]


def _positive(scale: Any) -> bool:
    return scale is None or (isinstance(scale, float) and scale > 0)


def _plain(node: Any) -> Tensor | None:
    """The fake tensor of a node if it is dense, on the CPU and not a lazy negation; else None."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, Tensor) or value.device.type != "cpu" or value.layout != torch.strided:
        return None
    return None if value.is_neg() else value


def _fit(q: Any, k: Any, v: Any) -> bool:
    """Whether q, k and v have as many heads as each other, all of one size that the kernels have."""
    if not all(one.dim() == 4 and isinstance(one.shape[3], int) for one in (q, k, v)):
        return False
    depths = {one.shape[3] for one in (q, k, v)}
    heads = {str(one.shape[1]) for one in (q, k, v)}
    return len(depths) == 1 and next(iter(depths)) in DEPTHS and len(heads) == 1
