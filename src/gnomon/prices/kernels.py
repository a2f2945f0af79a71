"""The price of each op of a lowered block, forward and backward: seconds on the device and kernels launched.

`op_seconds` and `grad_seconds` read the curve that an op's kind names: matmuls go to `gemm`, fused attention to
`attention`, the rest to `stream` with the bytes of its work. Sizes in the `Setting` may be arrays (many contexts at
once). Leaves out: host time (`host`), collectives, and fusion across ops that a compiler does: what is lowered as
separate ops is priced as separate kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np

from gnomon.errors import UnpricedError
from gnomon.graph import Block, Dim, GradOp, Op, Setting, Work, forward_work, grad_work, kv_dim, nbytes, numel, size_of
from gnomon.hardware.types import Device
from gnomon.models.lora import INT8
from gnomon.ops.attention import attention_pairs_x2
from gnomon.ops.curve import Matmul, Stream
from gnomon.ops.paged import key_positions
from gnomon.ops.state_space import Scan
from gnomon.prices.attention import Pieces, attention_seconds, tiled_window
from gnomon.prices.captured import captured_price
from gnomon.prices.curves import Curves, Size, Time, as_time
from gnomon.prices.decoding import attention_row, decode_attention_seconds
from gnomon.prices.gemm import gemm_seconds, peak_of
from gnomon.prices.measured import attention_points, matmul_seconds, rule_seconds, table_seconds
from gnomon.prices.state_space import BACKWARD_KERNELS, FORWARD_KERNELS, scan_seconds
from gnomon.prices.stream import stream_seconds
from gnomon.prices.tpu import UnitShape, apart, devices_of, filled
from gnomon.sharding.homes import routed_tensors

Low: TypeAlias = Literal["", "fp8", "rowwise", "mxfp8", "fp4"]
"""Number format of narrow matmuls; empty for none. `rowwise`: eight bits with a scale for each row of one operand and
column of the other. `mxfp8`: with a scale for 32 of them."""

Experts: TypeAlias = Literal["grouped", "looped", "fused", "sequential", "eager", "stacked"]
"""How matmuls of experts run: as one kernel for all, one after another, or (narrow ones) as one kernel with what lies
between them; wide ones of the last run one after another. The last three: one after another, from a loop in Python."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpPrice:
    """The cost of running an op on the device, which adds up, and is repeated, like a number."""

    device_s: Time
    """Seconds that the device is busy; an array if sizes were arrays."""
    kernels: int
    """Kernels launched: what the host pays for."""

    def __add__(self, other: OpPrice) -> OpPrice:
        return OpPrice(device_s=self.device_s + other.device_s, kernels=self.kernels + other.kernels)

    def __mul__(self, times: int) -> OpPrice:
        return OpPrice(device_s=self.device_s * times, kernels=self.kernels * times)


FREE = OpPrice(device_s=0.0, kernels=0)
"""The price of a view, and the zero of sums."""


TABLE_KERNELS = 5
"""Kernels of the gradient of a table after its zeros: sort of the ids, offsets, sums."""


GROUPED_SHARE = 0.82
"""Speed of grouped matmuls in 16 bits over that of one batched matmul of the same shapes: rows of each expert are not
known when the kernel is launched. Median of 281 shapes of moe_grouped_gemm_aiconfigurator.csv (H100, CUTLASS, balanced,
2048 tokens and more; 10th to 90th percentile 0.30 to 1.02), 2026-11-21, activation and permutation priced apart."""

GROUPED_LOW_SHARE = 0.70
"""Speed of grouped matmuls in 8 bits over that of one batched matmul, with the scales of each expert: 254 shapes (0.28
to 1.06)."""

MXFP8_TIME = 1.05
"""Time of a matmul in MXFP8 over one of the same shape with a scale a tensor, by cuBLAS on Blackwell. Source:
NVIDIA/TransformerEngine 1609c89 (2026-06-01) docs/examples/gemm_profiling/gemm_profiling.rst: 12 matmuls of a layer
4096 wide with 15872 tokens on B300, operands cast before, take 7.16 and 6.81 ms (forward 1.10, gradients 1.03). Of the
curves' fp8 there is no MXFP8. Read 2026-11-23; taken for other shapes and devices too."""

ROWWISE_TIME = 1.6
"""Time of a matmul with scales by row and column (CUTLASS, `torch._scaled_mm`) over one with a scale a tensor
(cuBLAS). Set with casts twice over (`_cast`) so that 8 H100 train Llama 3 8B 10 % faster than in bf16, as torchao's
README of float8 has it (6,768 of 6,150 tokens/s; tensorwise 7,690), and a 70B with tp = 8 no faster
(pytorch/torchtitan#1299). Read 2026-11-29."""

ODD_ROWS_SHARE = 0.48
"""Speed of 16-bit matmuls whose weight has a side of an odd number of elements: its rows begin at odd multiples of
two bytes, which no wide load can fetch. Fitted to profiles of a head of 50257 rows on A100 (0.44 to 0.53 by model),
2026-11-21 (evidence/LOG.md); with 25128 they show nothing of the kind. nanoGPT gained a quarter
of GPT-2's whole step from a vocabulary of 50304 (A. Karpathy, February 2023)."""

NARROW_ATTENTION = {False: ((64, 1.0), (128, 0.83), (192, 0.72)), True: ((64, 1.0), (128, 1.06), (192, 0.78))}
"""backward -> (head size, time of causal attention in MXFP8 over that in 16 bits): medians of lengths 4096 and 8192 on
GB200 (GB300: 0.86, 0.74, 0.64; 128 and 192 backward 1.06, 0.74), cuDNN 9.22, head size 192 with values of 128
(evidence/fits/fit_cudnn). With one scale a tensor the same are 0.93, 0.77, 0.66 and 0.95, 0.62. The backward of 64 was
measured under a window only, which it does not skip (4096: 2.08 ms, which is the price of the whole square in bf16)."""

ALIGNED = 8
"""Elements of 16 bits in 16 bytes. Batched matmuls with rows of another length (heads of 108, 150 or 450) run without
tensor cores, at the price of fp32 matmuls: cuBLAS asks for rows and pointers of 16 bytes (cuBLAS documentation, Tensor
Core Usage, before release 11). Ten runs on A100 with such heads (CUDA 11) took 18 to 25% longer than others like them,
which makes these matmuls 7 to 14 times as long; fp32's prices are 7 to 12 times."""


@dataclass(frozen=True, slots=True)
class Cast:
    """How the activation that a narrow matmul reads gets its eight bits."""

    again: bool = False
    """Whether another matmul of the same rank has cast it already."""
    normed: bool = False
    """Whether the norm that makes it writes eight bits; what is left is the transposed copy."""
    share: float = 1.0
    """Part that a rank casts before the parts are gathered in eight bits; the transposed copy is made of the whole."""
    once: bool = False
    """Whether the transposed copy, which the weight gradient reads, is left out: of a weight that is not trained."""
    searched: bool = False
    """Whether it is read for its maxima by row and by column first, then cast with either."""


WHOLE = Cast()
"""The cast as one kernel does it: read once, written as is and transposed."""


def op_seconds(
    op: Op,
    block: Block,
    setting: Setting,
    device: Device,
    curves: Curves,
    *,
    fp8: bool | Low = False,
    cast: Cast = WHOLE,
    load: float = 1.0,
    causal_share: float | None = None,
    pieces: Pieces = (),
    experts: Experts = "grouped",
) -> OpPrice:
    """The price of running a lowered op once, forward.

    fp8: matmuls with weights run in 8 bits (`fp4`: in 4), with the `cast` of their input (the weight's own, once a
    step, is `cast_weight_seconds`). load: rows that this rank's experts get over those of balanced routing; for
    experts padded to the busiest, busiest over mean. causal_share: of the key-length square under a causal mask,
    the share that this rank works on (`sharding.context.causal_shares`); None: the queries are the last ones of the
    keys. pieces: parts of sequences that the tokens are of, each seen by itself. UnpricedError for a number
    format that the device cannot.
    """
    work = forward_work(op, block, setting)
    # A cast between equal dtypes is a view.
    if _is_no_cast(op, block, setting):
        return FREE
    # A measured machine has a table for some kinds: it goes before every curve.
    if (known := _measured(op, block, setting, device, backward=False)) is not None:
        return known
    match op.rules.curve(op):
        case "free":
            return FREE
        case "aten":
            return _captured(op, work, setting, device, curves, backward=False)
        case Matmul():
            low = _low(op, fp8)
            of = _Contraction(
                op=op, block=block, setting=setting, device=device, curves=curves, low=low, load=load, experts=experts
            )
            # Shapes: forward is m×k by k×n; see `_shape` for what m, n and k are of each op.
            price = _matmuls(of, "forward", work)
            price = price + _widened(op, block, setting, device, curves)
            return price + _cast(op.inputs[0], block, setting, device, curves, cast) if low else price
        case "attention":
            narrow = bool(fp8)
            return _attention(op, block, setting, device, curves, causal_share, pieces, backward=False, narrow=narrow)
        case "paged":
            return _paged(op, block, setting, device, curves, work)
        case "scan":
            seconds = scan_seconds(Scan.of(op, block, setting.sizes), setting.dtypes, device, curves, backward=False)
            return OpPrice(device_s=seconds, kernels=FORWARD_KERNELS)
        case "labels":
            labels = numel(block.tensor(op.inputs[1]).dims, setting.sizes)
            # one sector of 32 bytes and a label for each token
            return OpPrice(device_s=stream_seconds(labels * 40, labels * 4, device, curves, kind="gather"), kernels=1)
        case "table":
            return _table_grad(work, device, curves)
        case Stream() as stream:
            return _streamed(stream, work, device, curves, _load(op, block, load))


def grad_seconds(
    grad: GradOp,
    block: Block,
    setting: Setting,
    device: Device,
    curves: Curves,
    *,
    fp8: bool | Low = False,
    cast: Cast = WHOLE,
    load: float = 1.0,
    causal_share: float | None = None,
    pieces: Pieces = (),
    experts: Experts = "grouped",
) -> OpPrice:
    """The price of one step of a derived backward; arguments as in `op_seconds`, `cast` of the incoming gradient.

    A matmul of m×k by k×n has an input gradient of m×n by n×k and a weight gradient of n×m by m×k. fp8 casts the
    incoming gradient once, with the input gradient (without one, with the weight gradient).
    """
    work = grad_work(grad, block, setting)
    if grad.phase == "accumulate":
        # k gradients of one tensor need k - 1 sums.
        adds = len(grad.reads) - 1  # autograd adds gradients up in pairs: two read, one written
        size = work.write_bytes
        return OpPrice(
            device_s=stream_seconds(2 * adds * size, adds * size, device, curves, kernels=adds), kernels=adds
        )
    op = block.op(grad.path)
    if _is_no_cast(op, block, setting):
        return FREE
    if (known := _measured(op, block, setting, device, backward=True)) is not None:
        return known
    curve = op.rules.grad_curve(op, grad)
    match curve:
        case "free":
            return FREE
        case "aten":
            return _captured(op, work, setting, device, curves, backward=True)
        case Matmul():
            low = _low(op, fp8)
            of = _Contraction(
                op=op, block=block, setting=setting, device=device, curves=curves, low=low, load=load, experts=experts
            )
            price = _matmul_grad(of, grad, work)
            # The incoming gradient is cast once for both gradients; the price goes with the input gradient.
            if grad.phase == "weight_grad":
                return price
            price = price + _widened(op, block, setting, device, curves)
            return price + _cast(op.outputs[0], block, setting, device, curves, cast) if low else price
        case "attention":
            narrow = bool(fp8)
            return _attention(op, block, setting, device, curves, causal_share, pieces, backward=True, narrow=narrow)
        case "scan":
            seconds = scan_seconds(Scan.of(op, block, setting.sizes), setting.dtypes, device, curves, backward=True)
            return OpPrice(device_s=seconds, kernels=BACKWARD_KERNELS)
    if isinstance(work.read_bytes, int) and work.read_bytes + work.write_bytes == 0:
        return FREE
    if not isinstance(curve, Stream):
        return _table_grad(work, device, curves)
    return _streamed(curve, work, device, curves, _load(op, block, load))


def _paged(op: Op, block: Block, setting: Setting, device: Device, curves: Curves, work: Work) -> OpPrice:
    """Attention of cached keys in blocks. One query a sequence: as decoding kernels are measured (`decoding`), keys
    read at their share of the memory's peak. Several (a chunk of a prompt): as fused attention of as many queries."""
    q, keys, values = (block.tensor(name) for name in op.inputs[:3])
    # q [sequences, queries, heads, width]; keys [blocks, kv heads, width …]: the cache in blocks.
    sizes, positions = setting.sizes, key_positions(op, block, setting)
    sequences, queries, heads = (size_of(dim, sizes) for dim in q.dims[:3])
    kv_heads = size_of(keys.dims[1], sizes)
    row = attention_row(device, setting.dtypes.bits(keys.dtype))
    one = decode_attention_seconds(
        row, sequences=sequences, kv_heads=kv_heads, moved=work.read_bytes, flops=work.matmul_flops, device=device
    )
    width, width_v = size_of(keys.dims[2], sizes), size_of(values.dims[3], sizes)
    assert isinstance(width, int) and isinstance(width_v, int), "widths of heads are no arrays"
    several = attention_seconds(
        sequences, queries, positions, heads, kv_heads, width, head_dim_v=width_v,
        causal=bool(op.attr("causal", False)), device=device, curves=curves,
    )  # fmt: skip
    # One query a sequence runs the decoding kernel, several run fused attention; sizes may be arrays that have both.
    return OpPrice(device_s=as_time(np.where(np.asarray(queries) == 1, one, several)), kernels=1)


def _table_grad(work: Work, device: Device, curves: Curves) -> OpPrice:
    """The gradient of a table of embeddings: it begins as zeros, and rows are added to it by index. What adding it to
    gradients before costs is `optimizer.accumulate_seconds`. Source: PyTorch embedding_dense_backward."""
    table, rows = work.write_bytes, work.read_bytes
    # embedding_dense_backward: the whole table is zeroed, then rows are sorted by id and summed into it.
    zeros = stream_seconds(0, table, device, curves)
    sums = stream_seconds(rows, np.minimum(rows, table), device, curves, kernels=TABLE_KERNELS, kind="scatter")
    return OpPrice(device_s=zeros + sums, kernels=TABLE_KERNELS + 1)


def _widened(op: Op, block: Block, setting: Setting, device: Device, curves: Curves) -> OpPrice:
    """Making a frozen weight that is stored in four or eight bits wide before a matmul, which then reads it once more.
    Source: bitsandbytes MatMul4Bit dequantizes in the forward and again in the backward; MatMul8bitLt in the backward,
    and its forward casts rows to eight bits and takes outliers by themselves, which is read as as much."""
    weight = block.tensor(op.inputs[1])
    stored, wide = setting.dtypes.bits(weight.dtype), setting.dtypes.bits("compute")
    # 4 bits or int8 only: wider weights are multiplied as they are stored.
    if _rows(op) != "tokens" or (stored > 4 and weight.dtype != INT8):
        return FREE
    elements = numel(weight.dims, setting.sizes)
    # Read narrow, written wide, and read wide once more by the matmul: 2 x written.
    written = elements * wide / 8
    seconds = stream_seconds(elements * stored / 8, 2 * written, device, curves)
    return OpPrice(device_s=seconds, kernels=1)


def fused_dropout_seconds(op: Op, block: Block, setting: Setting, device: Device, curves: Curves) -> OpPrice:
    """What a dropout adds to the residual addition that it is fused with: its mask is written. No kernel of its own."""
    mask = sum(nbytes(block.tensor(name), setting.sizes, setting.dtypes) for name in op.outputs[1:])
    share = curves.stream_for("plain").efficiency
    return OpPrice(device_s=mask / (device.memory_bytes_per_s * share), kernels=0)


def cast_weight_seconds(
    op: Op, block: Block, setting: Setting, device: Device, curves: Curves, *, rowwise: bool
) -> OpPrice:
    """Casting the weight of a matmul to 8 bits, in both layouts: once a step, or once a microbatch where it is not
    kept. Zero for ops that `fp8` leaves alone. rowwise: scales are of rows, and of columns for the other layout."""
    how = Cast(searched=True) if rowwise else WHOLE
    return _cast(op.inputs[1], block, setting, device, curves, how) if _low(op, True) else FREE


def _captured(op: Op, work: Work, setting: Setting, device: Device, curves: Curves, *, backward: bool) -> OpPrice:
    price = captured_price(op, work, setting, device, curves, backward=backward)
    return OpPrice(device_s=price.device_s, kernels=price.kernels)


def _measured(op: Op, block: Block, setting: Setting, device: Device, *, backward: bool) -> OpPrice | None:
    """The price of an op that has a table of its own on this device, as the runtime runs it; None for others."""
    if device.measured is None:
        return None
    # A loss that was lowered to steps was measured as one op: its steps are free.
    if block_loss(op, block):
        return FREE  # it was measured with all its steps
    calibrated = op.rules.calibrated
    if calibrated == "no" or (backward and calibrated == "elements, forward"):
        return None
    of = block.tensor(op.inputs[0] if calibrated == "rows read" else op.outputs[0])
    width = size_of(of.dims[-1], setting.sizes)
    rows = numel(of.dims[:-1], setting.sizes)
    dtype = setting.dtypes.resolve("compute")
    seconds = rule_seconds(
        # Rows of the op's table: everything but the last dimension, which is the width.
        device.measured,
        op.kind,
        dtype,
        rows=rows,
        width=width,
        backward=backward,
        by_rows=calibrated.startswith("rows"),
    )
    if seconds is None:
        return None
    if op.does == "looks up" and backward:  # the table's gradient begins as zeros
        table = numel(block.tensor(op.inputs[1]).dims, setting.sizes)
        seconds = seconds + table_seconds(device.measured, "fill", dtype, elements=table)
    return OpPrice(device_s=seconds, kernels=1)


def block_loss(op: Op, block: Block) -> bool:
    """Whether an op is a step of a cross-entropy that was lowered to several."""
    origin, _, step = op.path.partition(":")
    return bool(step) and any(o.path == origin and o.does == "compares labels" for o in block.ops)


def _low(op: Op, fp8: bool | Low) -> Low:
    """The narrow dtype that an op's matmuls run in; empty for none."""
    curve = op.rules.curve(op)
    if not fp8 or not isinstance(curve, Matmul) or not curve.narrow:
        return ""
    return "fp8" if fp8 is True else fp8


def _is_no_cast(op: Op, block: Block, setting: Setting) -> bool:
    # Other ops name no tensors here, and an empty set is no single dtype.
    names = (op.inputs[0], op.outputs[0]) if op.rules.memory == "cast" else ()
    # One distinct dtype: nothing to cast.
    return len({setting.dtypes.resolve(block.tensor(name).dtype) for name in names}) == 1


def _load(op: Op, block: Block, load: float) -> float:
    """`load` for ops on the rows of experts, from dispatch to combine; 1 for others."""
    if load == 1.0:
        return load
    routed = routed_tensors(block)
    return load if any(name in routed for name in (*op.inputs, *op.outputs)) else 1.0


def _streamed(stream: Stream, work: Work, device: Device, curves: Curves, load: float) -> OpPrice:
    seconds = stream_seconds(
        work.read_bytes * (stream.reads * load),
        work.write_bytes * (stream.writes * load),
        device,
        curves,
        kernels=stream.kernels,
        kind=stream.walk,
        vector_flops=work.vector_flops,
    )
    return OpPrice(device_s=seconds, kernels=stream.kernels)


def _cast(name: str, block: Block, setting: Setting, device: Device, curves: Curves, how: Cast) -> OpPrice:
    """Prices a cast to 8 bits, as is and transposed (Hopper multiplies 8-bit operands along rows only), and the maximum
    for the scale. A TPU multiplies along both, from one copy. Source: Transformer Engine's cast-transpose;
    fp8_transpose after a gather in 8 bits; two casts of a gradient: see `Fp8.fixed`."""
    if how.again:
        return FREE
    # size: bytes as they are; elements: bytes once cast, one each.
    size = nbytes(block.tensor(name), setting.sizes, setting.dtypes)
    elements = numel(block.tensor(name).dims, setting.sizes)
    if how.searched:  # the kernel before finds the maxima, if it is fused with that
        passes = 1 if how.normed else 2
        seconds = stream_seconds(size * passes, elements * 2, device, curves, kind="reduce", kernels=2)
        return OpPrice(device_s=seconds, kernels=2)
    how = replace(how, once=how.once or device.kind == "tpu")
    if how.once and how.normed:  # the norm wrote what is read
        return FREE
    # written: the copy as is (share of it) and the transposed copy, of the whole.
    read, written = size * how.share, elements * ((0 if how.once else 1) + how.share)
    if how.once:
        return OpPrice(device_s=stream_seconds(read, written, device, curves, kernels=2), kernels=2)
    # The norm wrote the copy as is; only the transposed one is read from it and written.
    if how.normed:
        read, written = 0, elements
    if how.normed or how.share < 1:
        read = read + elements
    return OpPrice(device_s=stream_seconds(read, written, device, curves, kernels=2), kernels=2)


def _rows(op: Op) -> str:
    """What the rows of a matmul are (`Matmul.rows`); empty for what is none."""
    curve = op.rules.curve(op)
    return curve.rows if isinstance(curve, Matmul) else ""


def _shape(op: Op, block: Block, sizes: Mapping[str, Any], load: float) -> UnitShape:
    """The matmuls of a contraction: rows of the left operand, columns of the right, what both share is the batch."""
    # left is [batch, m, k], right [batch, k, n], out [batch, m, n], each in any order and with several dimensions in
    # one of them.
    lhs, right, out = (block.tensor(name).atoms for name in (op.inputs[0], op.inputs[1], op.outputs[0]))
    if _rows(op) == "pixels":  # an implicit matmul: a row for each output pixel
        weight = block.tensor(op.inputs[1]).dims
        depth = [dim for dim in weight if dim.name in op.contracts]
        channels = [dim for dim in weight if dim.name not in op.contracts]
        return UnitShape(
            _count([dim for dim in out if dim not in channels], sizes), _count(channels, sizes), _count(depth, sizes)
        )
    names = {dim.name for dim in right}
    k = _count([dim for dim in lhs if dim.name in op.contracts], sizes)
    # Grouped: tokens of all experts are the rows, divided over the experts that get any: min(experts, rows) of them.
    if _rows(op) == "experts":
        experts = size_of(next(dim for dim in right if dim.name == op.attr("groups", "experts")), sizes)
        rows = _count([dim for dim in lhs if dim.name not in op.contracts], sizes) * load
        busy = np.minimum(experts, rows)
        columns = [d for d in right if d.name not in (*op.contracts, op.attr("groups", "experts"))]
        return UnitShape(np.maximum(rows / busy, 1), _count(columns, sizes), k, np.maximum(busy, 1))
    # Dimensions in both operands and in the result are a batch of matmuls.
    shared = {dim.name for dim in lhs} & names & {dim.name for dim in out}
    rest = [*op.contracts, *shared]
    return UnitShape(
        _count([dim for dim in lhs if dim.name not in rest], sizes),
        _count([dim for dim in right if dim.name not in rest], sizes),
        k,
        _count([dim for dim in lhs if dim.name in shared], sizes),
    )


def _aligned(n: Size, k: Size) -> Size:
    """What the sides of a weight leave of the speed of its matmuls."""
    # A side of 1 is no matrix; odd sides elsewhere break 4-byte alignment of rows.
    odd = (np.asarray(n) % 2 == 1) & (np.asarray(k) > 1) | (np.asarray(k) % 2 == 1) & (np.asarray(n) > 1)
    share = np.where(odd, ODD_ROWS_SHARE, 1.0)
    return share if share.ndim else float(share)


def _count(dims: Iterable[Dim], sizes: Mapping[str, Any]) -> Size:
    return numel(dims, sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Contraction:
    """An op that is priced as matmuls, and how they run."""

    op: Op
    block: Block
    setting: Setting
    device: Device
    curves: Curves
    low: Low
    """The number format, where that is narrower than the op's own."""
    load: float
    """As in `op_seconds`."""
    experts: Experts


def _computes_in(op: Op, block: Block, setting: Setting) -> str:
    """The dtype of a matmul: its operands', or a wider one of its own."""
    own, stated = setting.dtypes.resolve(block.tensor(op.inputs[0]).dtype), str(op.attr("dtype", ""))
    return stated if stated and setting.dtypes.bits(stated) > setting.dtypes.bits(own) else own


def _matmuls(of: _Contraction, role: str, work: Work) -> OpPrice:
    """One of the three matmuls of a contraction: `forward`, `left` or `right` (the gradient of that operand)."""
    op, block, setting, device, curves = of.op, of.block, of.setting, of.device, of.curves
    low, load, experts = of.low, of.load, of.experts
    shape = _shape(op, block, setting.sizes, load)
    weights: Size = 0
    # Two chips in one package each hold all weights and half of the rows: the other copies' bytes are moved too.
    if device.kind == "tpu" and _rows(op) in ("tokens", "experts"):
        shape = apart(shape, device)
        weights = nbytes(block.tensor(op.inputs[1]), setting.sizes, setting.dtypes) * (devices_of(device) - 1)
    m, n, k = {
        # C = A B: dA = dC Bᵀ is m×n by n×k, dB = Aᵀ dC is n×m by m×k (or k×m by m×n, transposed).
        "forward": (shape.m, shape.n, shape.k),
        "left": (shape.m, shape.k, shape.n),
        "right": (shape.n, shape.k, shape.m),
    }[role]
    own = _computes_in(op, block, setting)
    dtype = "fp8" if low else own
    if device.measured is not None:
        way = {"forward": "forward", "left": "input_grad", "right": "weight_grad"}[role]
        peak = peak_of(dtype, device)
        measured_s = matmul_seconds(device.measured, m, n, k, shape.batch, dtype=dtype, role=way, peak=peak)
        return OpPrice(device_s=measured_s, kernels=1)
    dtype = "fp8" if low in ("mxfp8", "rowwise") else low or own
    # Narrow matmuls: bytes are not the op's own width, so the curve counts them from the shape.
    moved = None if low else work.read_bytes + work.write_bytes + weights
    if device.kind == "tpu":
        columns_held = _rows(op) == "experts" and role != "right"
        m, n, k = filled(m, n, k, device, columns_held=columns_held)
    grouped = _rows(op) == "experts"
    if grouped and experts != "grouped" and not (low and experts == "fused"):  # one expert after another
        # Each expert moves its part of the bytes.
        expert_bytes = None if moved is None else moved / np.maximum(shape.batch, 1)
        single_s = gemm_seconds(m, n, k, dtype=dtype, device=device, curves=curves, moved_bytes=expert_bytes)
        seconds = as_time(np.asarray(single_s) * shape.batch)
    else:
        seconds = gemm_seconds(m, n, k, shape.batch, dtype=dtype, device=device, curves=curves, moved_bytes=moved)
    if grouped and experts == "grouped":
        share = GROUPED_LOW_SHARE if low else GROUPED_SHARE
        # One expert alone is a plain matmul.
        seconds = as_time(seconds / np.where(np.asarray(shape.batch) > 1, share, 1.0))
    if low == "mxfp8" and not (grouped and experts == "fused"):
        seconds = seconds * MXFP8_TIME
    if low == "rowwise":
        seconds = seconds * ROWWISE_TIME
    # Rows whose length is odd cannot be loaded wide (see ODD_ROWS_SHARE).
    if _rows(op) == "tokens" and dtype in ("bf16", "fp16"):
        seconds = seconds / _aligned(shape.n, shape.k)
    # Heads whose length is no multiple of 8 elements run without tensor cores (see ALIGNED).
    if _rows(op) == "batch" and dtype in ("bf16", "fp16") and device.kind == "gpu":
        uneven = (np.asarray(shape.n) % ALIGNED != 0) | (np.asarray(shape.k) % ALIGNED != 0)
        if uneven.any():
            slow = gemm_seconds(m, n, k, shape.batch, dtype="fp32", device=device, curves=curves, moved_bytes=moved)
            seconds = as_time(np.where(uneven, np.maximum(slow, seconds), seconds))
    return OpPrice(device_s=seconds, kernels=1)


def _matmul_grad(of: _Contraction, grad: GradOp, work: Work) -> OpPrice:
    """The matmuls of a step of a contraction's backward, and the sum of a bias's gradient."""
    op, block, setting, device, curves = of.op, of.block, of.setting, of.device, of.curves
    sides = [side for side, name in zip(("left", "right"), op.inputs, strict=False) if name in grad.grads_out]
    total = FREE
    share = Work(read_bytes=work.read_bytes, write_bytes=work.write_bytes)
    if len(sides) == 2:  # each matmul reads the incoming gradient and one operand, and writes the other's gradient
        share = Work(read_bytes=work.read_bytes // 2, write_bytes=work.write_bytes // 2)
    for side in sides:
        total = total + _matmuls(of, side, share)
    if len(op.inputs) > 2 and op.inputs[2] in grad.grads_out:  # a bias: the incoming gradient summed over rows
        incoming = nbytes(block.tensor(op.outputs[0]), setting.sizes, setting.dtypes)
        total = total + OpPrice(device_s=stream_seconds(incoming, 0, device, curves, kind="reduce"), kernels=1)
    return total


def _attention(
    op: Op,
    block: Block,
    setting: Setting,
    device: Device,
    curves: Curves,
    causal_share: float | None,
    pieces: Pieces,
    *,
    backward: bool,
    narrow: bool,
) -> OpPrice:
    sizes = setting.sizes
    q, k, v = (block.tensor(name) for name in op.inputs[:3])
    # pairs: (query, key) pairs of one head that are worked on; everything else follows from it.
    q_len, kv_len = size_of(q.dims[-3], sizes), size_of(kv_dim(k.dims[-3]), sizes)
    causal, window = bool(op.attr("causal", False)), op.attr("window", 0)
    assert isinstance(window, int)
    if window and causal:  # cuDNN's narrow backward masks what is outside a window, and does not skip it
        window = 0 if narrow and backward else tiled_window(window, device, backward=backward)
    pairs: Size = attention_pairs_x2(q_len, kv_len, causal=causal, window=window, convention="half") / 2
    # Context parallelism: this rank works on causal_share of the whole key-length square.
    if causal and causal_share is not None:
        whole = attention_pairs_x2(kv_len, kv_len, causal=True, window=window, convention="half") / 2
        pairs = whole * causal_share
    # Packed pieces: each sees itself and what of its sequence came before it.
    if pieces:
        if not causal and any(before for _, before in pieces):
            raise UnpricedError(f"attention {op.path!r} sees tokens after its own: no chunk of a sequence has a price")
        kv_len = sum(tokens + before for tokens, before in pieces)
        seen = [
            attention_pairs_x2(n, n + before, causal=causal, window=window, convention="half") for n, before in pieces
        ]
        pairs = sum(seen) / 2 * (1.0 if causal_share is None else causal_share)
    head_dim, head_dim_v = size_of(q.dims[-1], sizes), size_of(v.dims[-1], sizes)
    if device.measured is not None and isinstance(head_dim, int):
        heads = np.asarray(numel(q.dims[:-3], sizes), np.float64) * size_of(q.dims[-2], sizes)
        # the table is of a causal mask: pairs that are worked on count as a square of twice as many
        own = attention_points(
            device.measured, heads, 2 * pairs, head_dim, dtype=setting.dtypes.resolve(q.dtype), backward=backward
        )
        return OpPrice(device_s=own, kernels=3 if backward else 1)
    if not isinstance(head_dim, int) or not isinstance(head_dim_v, int):
        raise UnpricedError(f"attention {op.path!r}: head sizes are given as arrays; price each head size by itself")
    seconds = attention_seconds(
        numel(q.dims[:-3], sizes),
        q_len,
        kv_len,
        size_of(q.dims[-2], sizes),
        size_of(k.dims[-2], sizes),
        head_dim,
        head_dim_v=head_dim_v,
        causal=causal,
        backward=backward,
        pairs=pairs,
        dtype=setting.dtypes.resolve(q.dtype),
        device=device,
        curves=curves,
    )
    if narrow:
        seconds = seconds * float(np.interp(max(head_dim, head_dim_v), *np.transpose(NARROW_ATTENTION[backward])))
    return OpPrice(device_s=seconds, kernels=3 if backward else 1)  # backward: row sums of dO·O, main, cast of dQ
