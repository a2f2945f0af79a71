"""Time of the optimizer's update on one device, from the bytes that its rule reads and writes for each element, and of
adding gradients up over microbatches.

`optimizer_seconds` takes the elements that this rank updates (after ZeRO divides them). Leaves out: collectives before
and after, the wait for the gradient norm, and updates on the host (offload: give the elements left on the device).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from gnomon.errors import UnpricedError
from gnomon.graph import DTYPE_BITS
from gnomon.hardware.measured import Measured
from gnomon.hardware.types import Device
from gnomon.plans import LowRank, Optimizer, Precision
from gnomon.prices.curves import Array, Curves, Size, Time, as_time
from gnomon.prices.gemm import gemm_seconds
from gnomon.prices.kernels import FREE, OpPrice
from gnomon.prices.measured import has, table_seconds
from gnomon.prices.stream import stream_seconds
from gnomon.sharding.parameters import STATE_TENSORS
from gnomon.software import Stack

FOREACH_PASSES: Mapping[str, int] = {
    "adamw": 9, "adam": 9, "sgd": 1, "momentum": 2, "lion": 5, "muon": 2, "adafactor": 9,
}  # fmt: skip
"""Arithmetic steps of the rule, each a kernel over all elements where it is not fused (torch.optim, foreach)."""

CHUNK_ELEMENTS = 65536 * 320
"""Elements of one launch of a multi-tensor kernel, at most: 320 blocks of 65,536. Source: apex and PyTorch
multi_tensor_apply."""
CHUNK_TENSORS = 30
"""Tensors of one launch, at most, for lists of five (same source)."""

SVD_SHARE = 0.034
"""Of a device's fp32 peak that the singular vectors of a matrix reach by their textbook FLOPs: the first update of a
LLaMA of 1.3 billion parameters took 70 s on an A100, later ones 0.03 (jiaweizzhao/GaLore#16)."""

PROJECTED_LAUNCHES = 20
"""Kernels of one matrix's update from a projected gradient: galore_torch and apollo_torch update one parameter after
another, op by op."""

_NEWTON_SCHULZ = 5
"""Iterations of Muon's orthogonalisation. Source: Jordan et al. 2024."""


def optimizer_seconds(
    elements: Size,
    optimizer: Optimizer,
    precision: Precision,
    device: Device,
    curves: Curves,
    stack: Stack,
    *,
    tensors: int = 1,
    matrices: Iterable[tuple[int, int, int]] | None = None,
) -> OpPrice:
    """The price of updating `elements` parameters on this device, clipping included.

    tensors: parameters they lie in (1: one flat buffer); each costs launches if the stack updates one by one.
    matrices: for Muon and projected gradients, (count, rows, columns). UnpricedError for either without them, or if the
    stack does not say how its optimizer step runs. Moments of a byte or less are updated by one kernel a parameter,
    as bitsandbytes and torchao do. Memory-bound: bytes of gradient, states, master copy and parameter, each once if
    fused.
    """
    if device.measured is not None and (own := measured_update(elements, optimizer, precision, device.measured)):
        return own
    if stack.update.optimizer_step is None:
        raise UnpricedError(
            f"stack {stack.name!r} does not say how its optimizer runs; set `optimizer_step`, with a fact"
        )
    projecting, count = FREE, np.asarray(elements, dtype=np.float64)
    if optimizer.low_rank is not None:
        if matrices is None:
            raise UnpricedError("projected gradients have a price with their matrices; give (count, rows, columns)")
        shapes = tuple(matrices)
        projecting = _projected(shapes, optimizer.low_rank, precision, device, curves)
        # What is projected is priced by its matrices; the rest of the elements as usual.
        count = np.maximum(count - sum(n * rows * columns for n, rows, columns in shapes), 1)
        tensors = max(1, tensors - sum(n for n, _, _ in shapes))
    width = {name: DTYPE_BITS[dtype] / 8 for name, dtype in _dtypes(precision).items()}
    narrow = width["states"] < 2
    master = width.get("master", 0.0)
    states_width = STATE_TENSORS[optimizer.kind] * width["states"]
    # Read: gradient, states, master (or the parameter where there is none). Write: states, master and the parameter.
    read = width["grad"] + states_width + (master or width["param"])
    write = states_width + master + width["param"]
    fused = stack.update.optimizer_step == "fused" or narrow
    steps = 1 if fused else FOREACH_PASSES[optimizer.kind]
    # an unfused step reads two arrays and writes one, in the precision of the states
    per_element = (read, write) if fused else (2 * steps * width["states"], steps * width["states"] + width["param"])
    launches = tensors if narrow else _launches(float(count.max()), tensors, stack) * steps
    seconds = stream_seconds(count * per_element[0], count * per_element[1], device, curves, kernels=launches)
    total = OpPrice(device_s=seconds, kernels=launches)
    if optimizer.clip:  # a norm, then a scaling in place unless the update takes the factor
        grad = count * width["grad"]
        total = total + OpPrice(device_s=stream_seconds(grad, 0, device, curves, kernels=2), kernels=2)
        if not fused:
            total = total + OpPrice(device_s=stream_seconds(grad, grad, device, curves), kernels=1)
    if stack.update.update_in_passes and master:
        total = total + _passes(count, precision, device, curves, launches)
    return total + projecting + (_muon(matrices, device, curves) if optimizer.kind == "muon" else FREE)


def _passes(elements: Array, precision: Precision, device: Device, curves: Curves, launches: int) -> OpPrice:
    """What an update reads and writes more where gradients and parameters are copied around it (`update_in_passes`)."""
    width = {name: DTYPE_BITS[dtype] / 8 for name, dtype in _dtypes(precision).items()}
    read, write, passes = width["master"], 0.0, 1  # updated masters are read again to write the parameters
    if width["grad"] < width["master"]:  # the copy, and what norm and update read of it beyond the gradient
        read, write, passes = read + width["grad"] + 2 * (width["master"] - width["grad"]), width["master"], 2
    if precision.param == "fp16":
        read, write, passes = read + width["master"], write + width["master"], passes + 1
    kernels = passes * launches
    return OpPrice(
        device_s=stream_seconds(elements * read, elements * write, device, curves, kernels=kernels), kernels=kernels
    )


def accumulate_seconds(
    elements: Size, precision: Precision, device: Device, curves: Curves, *, fused: bool, tensors: int = 1
) -> OpPrice:
    """What adding weight gradients into their buffer costs beyond the matmuls of `kernels.grad_seconds`.

    elements: of the gradients, in `tensors` parameters. fused: the matmul itself adds into the buffer, so only the
    wider result, read and written, is more; otherwise a kernel for each parameter reads both and writes one. For the
    microbatches that add to what is there; the first may write instead.
    """
    result, buffer = DTYPE_BITS[precision.compute] / 8, DTYPE_BITS[precision.grad] / 8
    count = np.asarray(elements, dtype=np.float64)
    if not fused:
        seconds = stream_seconds(count * (result + buffer), count * buffer, device, curves, kernels=tensors)
        return OpPrice(device_s=seconds, kernels=tensors)
    share = curves.stream_for("plain").efficiency
    # The GEMM writes `result` in any case; with a wider buffer it reads and writes that instead: 2 x buffer - result
    # more.
    moving = count * (2 * buffer - result) / (device.memory_bytes_per_s * share)
    return OpPrice(device_s=as_time(moving), kernels=0)


def norm_seconds(elements: Size, precision: Precision, device: Device, curves: Curves) -> Time:
    """Seconds of reading this rank's gradients for the sum of their squares."""
    measured = device.measured
    if measured is not None and has(measured, "squares", precision.param):
        return table_seconds(measured, "squares", precision.param, elements=np.maximum(elements, 1))
    size = np.asarray(elements, dtype=np.float64) * (DTYPE_BITS[precision.grad] // 8)
    return stream_seconds(size, 0, device, curves, kind="reduce")


def gradient_seconds(elements: Size, precision: Precision, device: Device, *, begins: float) -> OpPrice | None:
    """Adding a microbatch's gradients to the flat buffer as Gnomon's runtime does, where that was measured; None
    elsewhere. begins: share of the microbatches that find no buffer, and make one of zeros."""
    measured = device.measured
    if measured is None or not has(measured, "accumulate", precision.param):
        return None
    added = table_seconds(measured, "accumulate", precision.param, elements=elements)
    zeros = table_seconds(measured, "fill", precision.param, elements=elements)
    return OpPrice(device_s=added + begins * np.asarray(zeros), kernels=1)


def measured_update(elements: Size, optimizer: Optimizer, precision: Precision, measured: Measured) -> OpPrice | None:
    """AdamW on one flat buffer, and the factor that clips with it; None for other rules, or where it was not
    measured."""
    if optimizer.kind != "adamw" or not has(measured, "adamw", precision.param):
        return None
    return OpPrice(device_s=table_seconds(measured, "adamw", precision.param, elements=elements), kernels=1)


def _dtypes(precision: Precision) -> dict[str, str]:
    named = {"grad": precision.grad, "states": precision.states, "param": precision.param, "master": precision.master}
    return {name: dtype for name, dtype in named.items() if dtype != "none"}


def _launches(elements: float, tensors: int, stack: Stack) -> int:
    # One launch a tensor, or multi-tensor launches limited by both tensors and elements.
    if stack.update.optimizer_step == "single":
        return tensors
    return max(1, -(-tensors // CHUNK_TENSORS), int(-(-elements // CHUNK_ELEMENTS)))


def orthogonal_dtype(device: Device) -> str:
    """What Muon's iteration computes in: bf16, and on processors, which have no peak of it, fp32."""
    return "bf16" if device.dense_peak.bf16 is not None else "fp32"


def _muon(matrices: Iterable[tuple[int, int, int]] | None, device: Device, curves: Curves) -> OpPrice:
    """X Xᵀ, its square, and their matmul with X, five times."""
    if matrices is None:
        raise UnpricedError("Muon has a price only with its matrices; give (count, rows, columns) of each shape")
    total = FREE
    for count, rows, columns in matrices:
        short, long = min(rows, columns), max(rows, columns)
        seconds = 0.0
        # A = X Xᵀ (short×long×short), A A, and their matmul with X (long wide): Newton-Schulz of degree five.
        for n, k in ((short, long), (short, short), (long, short)):
            seconds += float(gemm_seconds(short, n, k, dtype=orthogonal_dtype(device), device=device, curves=curves))
        total = total + OpPrice(device_s=seconds, kernels=5) * (_NEWTON_SCHULZ * count)
    return total


def _projected(
    matrices: Iterable[tuple[int, int, int]], low_rank: LowRank, precision: Precision, device: Device, curves: Curves
) -> OpPrice:
    """The update of matrices from projected gradients: the projection, Adam on what is left, for GaLore its product
    back, and passes over the whole matrix (scale, subtract, decay); a projection's own price is spread over the steps
    until the next."""
    total = FREE
    dtype = "fp32" if precision.grad == "fp32" else precision.compute
    wide = DTYPE_BITS[precision.grad] / 8
    for count, rows, columns in matrices:
        short, long = sorted((rows, columns))
        rank = min(low_rank.rank, short)
        matmul_s = float(gemm_seconds(long, rank, short, dtype=dtype, device=device, curves=curves))
        if low_rank.method == "galore":
            matmul_s += float(gemm_seconds(long, short, rank, dtype=dtype, device=device, curves=curves))
        size, small = rows * columns * wide, long * rank * 4
        # Scale and decay read and write the matrix once each, subtract reads two and writes one. Adam's nine steps
        # (FOREACH_PASSES) on fp32 moments read two arrays and write one each.
        passes = stream_seconds(4 * size, 3 * size, device, curves, kernels=3)
        moments = stream_seconds(2 * 9 * small, 9 * small, device, curves, kernels=9)
        again = 0.0
        if low_rank.projection == "svd":
            again = svd_flops(rows, columns) / (SVD_SHARE * device.flops_per_s("fp32")) / low_rank.every
        each = OpPrice(device_s=matmul_s + passes + moments + again, kernels=PROJECTED_LAUNCHES)
        total = total + each * count
    return total


def svd_flops(rows: int, columns: int) -> int:
    """Counts the FLOPs of the thin singular value decomposition of a matrix with both sides: 14 m n^2 + 8 n^3 for m >=
    n (Golub and Van Loan 2013, table 8.6.1, by bidiagonalisation)."""
    short, long = sorted((rows, columns))
    return 14 * long * short**2 + 8 * short**3
