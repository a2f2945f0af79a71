"""What mixture layers run around the matmuls of experts. Megatron Core's: launches one expert at a time, and passes
over the rows that its all-to-all needs. MaxText's: rows brought into order in passes of their own. transformers' loop
in Python: a chain of ops for each expert, and gradients of whole tensors that each expert adds a part to.

A grouped matmul of Transformer Engine is a loop in its library: for each expert a matmul (`kernels.Experts`), and in
eight bits a cast and the layout of scales. Rows that come from an all-to-all lie by rank and are sorted by expert;
eight bits want rows of each expert padded. DeepEP's and HybridEP's kernels do both on the way. Leaves out the host's
wait for the number of rows.
Source: NVIDIA/Megatron-LM 5eb20b8 megatron/core/transformer/moe/token_dispatcher.py MoEAlltoAllTokenDispatcher
(preprocess, sort_chunks_by_idxs), experts.py TEGroupedMLP (quantization_padding); NVIDIA/TransformerEngine
transformer_engine/pytorch/module/grouped_linear.py; read 2026-11-22.
"""

from __future__ import annotations

from gnomon.graph import Block, Op, Setting, nbytes
from gnomon.hardware.types import Device
from gnomon.prices.curves import Curves, Size
from gnomon.prices.kernels import Low, OpPrice
from gnomon.prices.stream import stream_seconds

IN_LOOP = 0.15
"""Host time of a launch from a library's loop over that of an op from Python: 8 us (a matmul with its choice of
algorithm) of some 53, which is what all stacks' runs show for an op."""

EACH_EXPERT = {"": 1, "fp8": 4, "rowwise": 4, "mxfp8": 4, "fp4": 4}
"""Kernels of a matmul for each expert: the matmul; narrow, the cast of an operand and the layouts of two scales."""

BOOKKEEPING = {("dispatches", False): 12, ("combines", False): 2, ("dispatches", True): 4, ("combines", True): 3}
"""(what the op does, backward) -> small kernels of the all-to-all dispatcher: counts of rows by rank and expert,
gathered over ranks and copied to the host; probabilities that travel by themselves."""

CLAMPED = {False: (4, 4, 3), True: (10, 10, 7)}
"""backward -> (reads, writes, kernels) of clamping both sides of a gate before the activation, in units of one side's
bytes: two clamps and their join; two clamps' gradients, two slices' of zeros and their sum (fusions/fused_bias_geglu.py
weighted_bias_quick_geglu_impl)."""

BIASED = {False: (7, 7), True: (12, 8)}
"""backward -> (reads, writes) of biases on the rows of the last product, in units of their bytes in 16 bits: bias
times probability in fp32, sum, join, cast; the gradients of all (experts.py TEGroupedMLP._apply_bias, expert by
expert)."""

FACTORED = {False: (5.5, 4.5, 11), True: (6.5, 5.5, 6)}
"""backward -> (reads, writes, kernels) of a rotary embedding op by op beyond the fused kernel, which knows no factor on
sines and cosines (YaRN's `mscale`), in units of its tensor's bytes: products with either, a half negated, joins and
their sum, and six kernels on the table; the gradients of all, with zeros and a sum for the part of a head that is not
turned, though it is empty (megatron/core/models/common/embeddings/rope_utils.py apply_rotary_pos_emb)."""

LOOP_OPS = {False: 14, True: 22}
"""backward -> ATen ops, views left out, that each expert of transformers' loop adds to a step (`nonzero` of its rows,
two `index`, the matmuls, activation, weights, `index_add_`; their gradients, with the zeros and sums of what `index`
read), counted by a dispatch mode over Qwen3-MoE of 5.23 with `experts_implementation = "eager"`; modules of release 4
have one matmul more and no slices of a stacked tensor. A test counts them again."""

LOOP_OP = 0.27
"""Host time of one of them over that of a launch as all stacks' runs show it (16 us of 59): they are counted here one
by one, while runs were fitted to ops that stand for several. With DeepSpeed's `gradient_hook_s`, which was set
together with it, Qwen1.5-MoE-A2.7B under ZeRO 2 takes 6.02 s where 2.5 s are kernels (ms-swift's documentation,
Megatron-SWIFT Training, 8 A800, 8192 tokens, 2 microbatches)."""

ROWS_PASSES, STACK_PASSES = (2, 2), (2, 2)
"""(reads, writes) that each expert's backward adds over all tokens, and over all stacked weights: zeros of the whole
tensor, into which its own part goes, and the sum with the gradients of experts before."""


def loop_price(
    experts: int, tokens_bytes: Size, stacked_bytes: Size, device: Device, curves: Curves, *, backward: bool
) -> OpPrice:
    """What transformers' loop over so many experts of a rank runs besides their matmuls, one way. tokens_bytes: the
    layer's input. stacked_bytes: weights of all experts where they are slices of one tensor, or 0."""
    kernels = round(LOOP_OP * LOOP_OPS[backward] * experts)
    if not backward:
        return OpPrice(device_s=0.0, kernels=kernels)
    # Each expert's backward zeroes and sums whole tensors, so bytes grow with the number of experts.
    reads = ROWS_PASSES[0] * tokens_bytes + STACK_PASSES[0] * stacked_bytes
    writes = ROWS_PASSES[1] * tokens_bytes + STACK_PASSES[1] * stacked_bytes
    seconds = stream_seconds(reads * experts, writes * experts, device, curves, kernels=kernels)
    return OpPrice(device_s=seconds, kernels=kernels)


BIASED_LAUNCHES = {False: 2, True: 6}
"""Maps backward to the kernels of these biases for each expert, from Python."""


def extra_passes(op: Op, size: Size, experts: int, device: Device, curves: Curves, *, backward: bool) -> OpPrice:
    """Kernels of experts with biases and a clamped gate, and of a rotary embedding with a factor, besides an
    activation, a combine or a rotary that says so. size: bytes of one side of the gate, of the rows, or of what is
    turned."""
    if op.does == "rotates":
        reads, writes, kernels = FACTORED[backward]
    elif op.does == "gates":
        reads, writes, kernels = CLAMPED[backward]
    else:
        (reads, writes), kernels = BIASED[backward], BIASED_LAUNCHES[backward] * experts
    seconds = stream_seconds(reads * size, writes * size, device, curves, kernels=kernels)
    return OpPrice(device_s=seconds, kernels=kernels)


def loop_launches(experts: int, low: Low) -> int:
    """Launches of one grouped matmul beyond its first, in launches from Python."""
    return round(IN_LOOP * (experts * EACH_EXPERT[low] - 1))


def sequential_price(
    op: Op, experts: int, low: Low, rows_bytes: Size, device: Device, curves: Curves, *, backward: bool
) -> OpPrice:
    """What Megatron Core's SequentialMLP runs next to the matmuls and activations of so many experts of a rank, which
    are launched one by one from Python: further launches of each, and at the combine the copy that joins what the
    experts put out; of the gradients of rows, which were cut from one tensor, at the dispatch.
    Source: NVIDIA/Megatron-LM d98e8a6 megatron/core/transformer/moe/experts.py SequentialMLP.forward (torch.split,
    a loop over local_experts, torch.cat)."""
    if op.does == "multiplies rows":
        # The first expert's matmul is priced with the op itself, so one launch less.
        return OpPrice(device_s=0.0, kernels=experts * EACH_EXPERT[low] - 1)
    if op.does == "gates":
        return OpPrice(device_s=0.0, kernels=experts - 1)
    # Forward joins (torch.cat) at the combine; backward joins the gradients of the split at the dispatch.
    joins = op.does == ("dispatches" if backward else "combines")
    if not joins or experts == 1:
        return OpPrice(device_s=0.0, kernels=0)
    return OpPrice(device_s=stream_seconds(rows_bytes, rows_bytes, device, curves, kernels=1), kernels=1)


def row_passes(
    does: str, rows_bytes: Size, experts: int, low: Low, device: Device, curves: Curves, *, backward: bool
) -> OpPrice:
    """Passes over the rows around an all-to-all, one way. does: `dispatches` or `combines`. rows_bytes: rows of one
    rank's experts in the compute dtype. experts: of a rank."""
    # One pass to sort rows by expert, one to pad them for eight bits.
    passes = (experts > 1) + bool(low)
    price = OpPrice(device_s=0.0, kernels=BOOKKEEPING[does, backward] + passes)
    if not passes:
        return price
    moved = stream_seconds(rows_bytes * passes, rows_bytes * passes, device, curves, kernels=passes)
    return price + OpPrice(device_s=moved, kernels=0)


def order_pass(
    op: Op, block: Block, setting: Setting, load: float, device: Device, curves: Curves, backward: bool
) -> OpPrice:
    """Rows read in one order and written in another, where that is a pass of its own (`Stack.moe_rows`): copies of
    tokens before the experts and their gradients after; what the last matmul puts out, which is kept in the order of
    tokens, and its gradient. load: rows over those of balanced routing."""
    combined = {other.inputs[0] for other in block.ops if other.does == "combines"}
    last = op.does == "multiplies rows" and op.outputs[0] in combined and not backward
    if not (last or op.does == "dispatches" or (op.does == "combines" and backward)):
        return OpPrice(device_s=0.0, kernels=0)
    rows = block.tensor(op.inputs[0] if op.does == "combines" else op.outputs[0])
    moved = nbytes(rows, setting.sizes, setting.dtypes) * load
    return OpPrice(device_s=stream_seconds(moved, moved, device, curves, kind="reduce"), kernels=1)
