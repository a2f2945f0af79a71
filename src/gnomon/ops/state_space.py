"""A Mamba-2 mixer's core as one op: a short convolution, then a scan over the sequence in chunks, gated.

`Scan` holds the local sizes of a `state_space` op, `scan_flops` its matrix FLOPs. Letters: T tokens, Q tokens of a
chunk, G groups of heads that share B and C, H heads of P, N the state of a head. The op reads what one linear wrote (z,
x of HP; B, C of GN; dt of H), as mamba_ssm's `mamba_split_conv1d_scan_combined` does, and keeps it and the scan's
output before the gate. Leaves out packed sequences and a state that comes in or goes out.
Source: Dao & Gu 2024, section 6; state-spaces/mamba mamba_ssm/ops/triton/ssd_combined.py, read 2026-11-22.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

from gnomon.errors import PlanError
from gnomon.ops.bases import MOVES_BYTES
from gnomon.ops.divided import BOTH, own_collective, with_inside
from gnomon.ops.kernels import Kernels
from gnomon.ops.op import Op, Problem, Steps, Tensors
from gnomon.ops.rules import cannot_write, elementwise_work, extent, moved_back
from gnomon.ops.strategy import Division, Strategy
from gnomon.ops.work import GradOp, Setting, Work
from gnomon.tensors.dims import Number, Sizes, numel, size_of
from gnomon.tensors.layout import ceil_div
from gnomon.tensors.names import STATE_DIMS, base
from gnomon.tensors.tensor import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """Sizes on one rank."""

    tokens: Number
    """T, of all sequences."""
    chunk: int
    """Q."""
    groups: Number
    """G."""
    heads: Number
    """H."""
    width: Number
    """HP, of all heads."""
    state: Number
    """N."""
    rule: Literal["ssd", "gated_delta"] = "ssd"
    """How the state changes with a token: Mamba-2's, or the gated delta rule, of which only the forward is priced."""

    @classmethod
    def of(cls, op: Op, block: Tensors, sizes: Sizes) -> Scan:
        """Reads the sizes of the op's tensors: y is (…, groups, width of a group), the convolution of B and C has (2,
        G, N, kernel), dt's bias has the heads."""
        # The third operand from the end is dt's bias, whichever biases of convolutions there are.
        y, taps, bias = (block.tensor(name) for name in (op.outputs[0], op.inputs[2], op.inputs[-3]))
        chunk = op.attr("chunk", 0)
        assert isinstance(chunk, int)
        return cls(
            tokens=numel(y.dims[:-2], sizes),
            chunk=chunk,
            groups=size_of(y.dims[-2], sizes),
            heads=size_of(bias.dims[0], sizes),
            width=numel(y.dims[-2:], sizes),
            state=size_of(taps.dims[2], sizes),
            rule="gated_delta" if op.attr("rule", "ssd") == "gated_delta" else "ssd",
        )


def scan_flops(op: Op, block: Tensors, sizes: Sizes, *, whole: bool) -> Number:
    """Matrix FLOPs of the forward: states of chunks and what they give (2THPN each), C Bᵀ of a chunk (2TQGN) and its
    matmul with x (2TQHP). whole: the last two as if a token saw all of its chunk; else half of them."""
    s = Scan.of(op, block, sizes)
    within = 2 * s.tokens * s.chunk * (s.groups * s.state + s.width)
    # 2THPN to make the states of chunks and 2THPN to read them, HP being `width`.
    return 4 * s.tokens * s.width * s.state + (within if whole else within // 2)


def _dims(op: Op, block: Tensors) -> Problem:
    """(…, projected) and weights of a convolution (groups, width, taps) give (…, groups, width); z and x have HP
    elements each, B and C GN, dt H."""
    joined, taps_x, taps_bc, out = (block.tensor(name).dims for name in (*op.inputs[:3], op.outputs[0]))
    heads = block.tensor(op.inputs[-3]).dims
    if len(taps_x) != 3 or len(taps_bc) != 4 or out != (*joined[:-1], *taps_x[:2]):
        return cannot_write(op, block)
    read = (extent(out[-2:]), extent(taps_bc[1:3]), extent(heads))
    width = extent(joined[-1:])
    if width is None or None in read:
        return None
    inner, state, own = (size or 0 for size in read)
    per_head = 2 if op.attr("rule", "ssd") == "gated_delta" else 1  # the delta rule has a step besides the decay
    return None if width == 2 * inner + 2 * state + per_head * own else cannot_write(op, block)


def _saves(op: Op, block: Tensors, needs_grad: Collection[str]) -> tuple[str, ...]:
    """All that it read, and what the scan wrote before the gate; convolution, states and chunks are computed again."""
    return (*op.inputs, *op.outputs[1:])


def _work(op: Op, block: Tensors, setting: Setting) -> Work:
    return elementwise_work(
        op, block, setting, flops=(scan_flops(op, block, setting.sizes, whole=setting.causal_flops == "full"), 0)
    )


def _work_back(op: Op, block: Tensors, setting: Setting, grad: GradOp) -> Work:
    flops = 2 * scan_flops(op, block, setting.sizes, whole=setting.causal_flops == "full")
    return moved_back(op, block, setting, grad, flops=(flops, 0))


def _steps(op: Op, low: Steps, kernels: Kernels) -> None:
    """Its backward wants what the scan wrote before it was gated, unless it is run again."""
    if kernels.scan_recomputed:
        low.ops.append(op)
        return
    y = low.block.tensor(op.outputs[0])
    low.emit(op, Tensor(name=f"{op.path}:ungated", dims=y.dims, dtype=y.dtype))


def _scanned(op: Op, setting: Division, plain: Strategy) -> tuple[Strategy, ...]:
    """All-to-alls exchange sequence for groups of heads before a Mamba-2 scan and back after it, and for gradients.
    Source: NVIDIA/Megatron-LM megatron/core/ssm/mamba_context_parallel.py. PlanError where a rank would get no group of
    its own (it copies groups then, which is not described)."""
    if setting.scene.ranks("cp") == 1:
        return (plain,)
    cp, sizes = setting.scene.ranks("cp"), setting.scene.sizes
    y, names = setting.block.tensor(op.outputs[0]), (op.inputs[0], op.outputs[0])
    groups = size_of(y.dims[-2], sizes)
    ways = setting.scene.ranks("tp") * cp
    if not isinstance(groups, int) or groups % ways:
        raise PlanError(
            f"{op.path}: a scan divided over cp = {cp} exchanges positions for groups of heads, and tp x cp = {ways} "
            f"does not divide {groups} groups; lower cp"
        )
    local: dict[str, Number] = {y.dims[-3].name: size_of(y.dims[-3], sizes)}
    for name in op.inputs + op.outputs:
        for dim in setting.block.tensor(name).atoms:
            if base(dim.name) in STATE_DIMS:
                local[dim.name] = ceil_div(size_of(dim, sizes), ways)
    shardings = (plain.inputs[0], plain.outputs[0])
    inside = []
    for phase in BOTH:
        for name, sharding in zip(names, shardings, strict=True):
            inside.append(own_collective(op, setting, "all_to_all", "cp", setting.bytes(name, sharding), phase, name))
    return (with_inside(plain, "exchanged", tuple(inside), local),)


STATE_SPACE = replace(
    MOVES_BYTES,
    name="state_space",
    signature="z x B C dt, conv weights and biases, dt bias, decay, skip -> y: Mamba-2; chunk",
    dims=_dims,
    saves=_saves,
    forward=_work,
    backward=_work_back,
    steps=_steps,
    fused_by="scan_recomputed",
    decay=(1, 2),  # the convolutions' weights; mamba_ssm exempts dt bias, decay and skip
    price="scan",
    grad_price="scan",
    strategies=_scanned,
    together=STATE_DIMS,
    does="scans",
    served="apart",
    zeros="unknown",
    torch="state_space:state_space",
)

KINDS = (STATE_SPACE,)
