"""What it costs that every sum is in the same order each time (`Stack.deterministic`).

`in_order(price)` is attention's backward, whose blocks add to gradients of queries in turn; `filled_seconds(bytes)` is
what is written before a kernel writes it: under `torch.use_deterministic_algorithms` memory that `torch.empty` and
`at::empty` return is filled first (`torch.utils.deterministic.fill_uninitialized_memory`, on unless switched off), and
so are Transformer Engine's outputs (transformer_engine/pytorch/csrc/common.cpp allocateTorchTensor,
cpp_extensions/gemm.py). PyTorch's own kernels allocate otherwise. Leaves out: NCCL's choice of algorithm (`NCCL_ALGO`),
gathers and scatters by index. Read 2026-11-23.
"""

from __future__ import annotations

from dataclasses import replace

from gnomon.hardware.types import Device
from gnomon.prices.curves import Curves, Size
from gnomon.prices.kernels import OpPrice
from gnomon.prices.stream import stream_seconds

ATTENTION_BACKWARD = 1.15
"""Time of attention's backward in order over that in any: cuDNN 9.22 on GB200, bf16, causal, heads of 128, 2,048 to
32,768 tokens: 1.11, 1.13, 1.15, 1.15, 1.15 (NVIDIA/cudnn-frontend 50c8aeb benchmark/sdpa_benchmark_training/results/
llama3.1/gb200, read 2026-11-23). Of other devices nothing was published: taken as the same."""

FILLED = frozenset({"multiplies", "normalises", "attends"})
"""What ops do that run by Transformer Engine's own kernels."""


def in_order(price: OpPrice) -> OpPrice:
    """Attention's backward whose sums are in one order."""
    return replace(price, device_s=price.device_s * ATTENTION_BACKWARD)


def filled_seconds(written_bytes: Size, tensors: int, device: Device, curves: Curves) -> OpPrice:
    """Filling so many tensors, of so many bytes in all, one kernel each."""
    return OpPrice(device_s=stream_seconds(0, written_bytes, device, curves, kernels=tensors), kernels=tensors)
