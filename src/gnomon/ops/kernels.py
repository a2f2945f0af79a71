"""`Kernels`: the choices of a program that change what is kept and moved, and the usual sets of them.

A kind names the choice that fuses it (`OpKind.fused_by`); what it is in steps is its `steps`. Leaves out which
implementation is fastest, tiles, launch costs (room `prices`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Fusion = Literal["fused", "unfused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The choices that change what is kept and moved. No defaults: they belong to the stack that runs the model."""

    attention: Literal["flash", "unfused", "unfused_fp32_softmax"]
    """flash: one kernel, keeps q, k, v, out and the fp32 log-sum-exp (Dao 2022). unfused: matmul, softmax, matmul, as
    Megatron-LM does. unfused_fp32_softmax: the softmax also writes fp32 and is cast back, as eager transformers do."""
    norm: Fusion
    """unfused: RMSNorm in steps as in eager PyTorch, with an fp32 copy of the input. Other norms: always fused."""
    glu: Fusion
    """unfused: the activation and the product are two kernels, and the activated gate is kept too; `gelu_new` of
    transformers runs step by step, and keeps three tensors besides its input; `relu2` is two kernels."""
    cross_entropy: Literal[Fusion, "in_place"]
    """fused: keeps the logits and an fp32 log-sum-exp. unfused: casts the logits to fp32 and keeps the log-softmax.
    in_place: the same steps, with softmax and gradient written over the one fp32 copy, as Megatron-LM does."""
    full_recompute: Literal["whole", "needed"]
    """Of a layer of which only the input is kept. whole: its forward is run again to the end. needed: to the last
    tensor that its backward reads, so without its last matmul."""
    expert_weights: Literal["output", "activation"] = "output"
    """Where rows of experts are multiplied by the router's weights. output: as they are added up, which keeps what the
    last product wrote. activation: before it, which keeps nothing of that; without a gate, a feed-forward then keeps
    its activation with and without weights."""
    ruled_recompute: Literal["whole", "needed"] = "whole"
    """The same of a layer under preset `full` of which rules name single tensors. needed: the least that makes again
    what is not kept."""
    attention_in_steps: bool = False
    """Attention that says `in_steps` runs as products, softmax and products, of scaled copies of its operands, whatever
    else does: torch has no kernel for it on a CPU (sdp_utils_cpp.cpp: heads of equal widths, a bias of no gradient)."""
    scan_recomputed: bool = False
    """A state-space scan is run again in backward; otherwise it keeps what it wrote before the gate."""


FUSED = Kernels(attention="flash", norm="fused", glu="fused", cross_entropy="fused", full_recompute="whole")
"""Flash attention and fused norms, activations and loss."""
UNFUSED = Kernels(attention="unfused", norm="unfused", glu="unfused", cross_entropy="unfused", full_recompute="whole")
"""Everything in steps, the softmax in the compute dtype."""
EAGER = Kernels(
    attention="unfused_fp32_softmax", norm="unfused", glu="unfused", cross_entropy="unfused", full_recompute="whole"
)
"""Everything in steps, as the eager code of transformers runs it."""
