"""What memory costs beyond the bytes of tensors: PyTorch's caching allocator, and what lies outside of it.

`round_up` and `segment_bytes` are the allocator's own rules; `reserved_estimate` says without a trace what a job
usually reserves; `device_overhead` what the CUDA context and NCCL take. All in bytes of one device. Figures that were
read or measured are `Figure`s with their source. Leaves out: several streams, what the allocator gives back when the
device is full, and options that change its rules (max_split_size_mb, roundup_power2_divisions).
Source of the rules: PyTorch, c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h (read 2026-11-21).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gnomon.errors import InputError
from gnomon.hardware import Device
from gnomon.software import Stack
from gnomon.units import Bytes

MIB = 2**20
BLOCK_BYTES = 512
"""Bytes of which every allocation is a multiple, rounded up."""
SMALL_BYTES = 1 * MIB
"""Bytes up to which allocations are packed into small segments; a larger free block is split if more than this is
left."""
SMALL_SEGMENT_BYTES = 2 * MIB
"""Bytes that small allocations take from the device at once, and the page of small ones where segments expand."""
OWN_SEGMENT_BYTES = 10 * MIB
"""Bytes from which on an allocation gets a segment of its own size, rounded up to SEGMENT_STEP_BYTES."""
LARGE_SEGMENT_BYTES = 20 * MIB
"""Bytes that allocations between the two take from the device at once, and the page of large ones where segments
expand."""
SEGMENT_STEP_BYTES = 2 * MIB
"""Bytes to a multiple of which a segment of its own is rounded up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A number that was read or measured, with where it is known from."""

    value: float
    """The number, in the unit that its name says."""
    source: str
    """Where the number stands."""
    date: str
    """When that was written or read, YYYY-MM."""
    confidence: Literal["checked", "partly", "unchecked"]
    """How sure it is. partly: measured, but elsewhere than in training jobs of today, or on few points; unchecked: a
    round guess."""

    def __post_init__(self) -> None:
        if not (self.source and self.date and self.value >= 0):
            raise InputError(f"figure {self.value!r} needs a source, a date and a value of at least 0")


_LOGS = (
    "29 training logs that print both (Megatron-LM, Megatron-DeepSpeed, Megatron-Bridge, nanotron, Primus; 2020-2026)"
)

RESERVED_SHARE = Figure(
    value=0.06,
    source=f"peak reserved over peak allocated in {_LOGS}: median +6%, of those over 40 GB +4%",
    date="2026-11",
    confidence="partly",
)
"""What the allocator usually holds beyond the peak of allocated bytes, as a share of it."""
RESERVED_SHARE_LOW = Figure(value=0.008, source=f"10th percentile of {_LOGS}", date="2026-11", confidence="partly")
"""The least that the allocator was seen to hold beyond the peak of allocated bytes, as a share of it. Less than
`FULL_DEVICE_SHARE`, because it has no allowance for what a prediction leaves out: it tells which plans a job that is
known to have run may have had."""
FULL_DEVICE_SHARE = Figure(
    value=0.035,
    source="predicted peaks are too small, in the median, by 1.4% (662 functional tests of Megatron-LM), "
    "3.6% (70 runs of BLOOM) and 5% and more (three jobs of torchtitan, "
    "pytorch/torchtitan#1789 and #1993): 3%; and on full devices 0.5% is reserved beyond what is allocated (median of "
    "12 messages of jobs that ran out of memory, 0 to 1.3%: huggingface/transformers#3360 and #7177, lm-sys/FastChat"
    "#1781, hpcaitech/ColossalAI#4537, imoneoi/openchat#34, tatsu-lab/stanford_alpaca#189, mistralai/mistral-finetune"
    "#69, modelscope/ms-swift#9191, axolotl-ai-cloud/axolotl#998, verl-project/verl#5840, Morizeyao/GPT2-Chinese#104, "
    "deepspeedai/DeepSpeed#115): 3.5% in all",
    date="2026-11",
    confidence="partly",
)
"""What a device that is full must have beyond the predicted peak of allocated bytes, as a share of it: the verdict
`does not fit` is given by it."""
EXPANDABLE_SHARE = Figure(
    value=0.06,
    source="as without: three published jobs of torchtitan reserve 6.9, 10.5 and 12.8% more than the tensors that are "
    "predicted (pytorch/torchtitan#1789: 73.32 GiB, 96% of 79.1; #1993: 88% of 178.4)",
    date="2026-11",
    confidence="partly",
)
"""What the allocator usually holds beyond the peak of allocated bytes where segments expand, as a share of it."""
_FAILED = "total less free less reserved in the messages of jobs on one device that ran out of memory"
CONTEXT_BYTES = Figure(
    value=890 * MIB,
    source=f"{_FAILED}: 0.79, 0.87 and 1.19 GiB (huggingface/transformers#3360, huggingface/blog pytorch-fsdp.md, "
    "NVIDIA/Megatron-LM#525); 274 MiB after one kernel (pytorch/pytorch#86509)",
    date="2023-09",
    confidence="partly",
)
"""CUDA context with the code of kernels and libraries."""
PRELOADED_CONTEXT_BYTES = Figure(
    value=1573 * MIB,
    source="nvidia-smi after a first tensor, A100 40 GB; 1271 MiB on a V100 32 GB "
    "(bigscience-workshop/bigscience train/tr11-176B-ml/chronicles-prequel.md)",
    date="2022-02",
    confidence="checked",
)
"""CUDA context where every kernel's code is loaded with it."""
VOLTA_PRELOADED_CONTEXT_BYTES = Figure(
    value=1271 * MIB, source=PRELOADED_CONTEXT_BYTES.source, date="2022-02", confidence="checked"
)
"""CUDA context on Volta where every kernel's code is loaded with it."""
PAIR_COMMUNICATOR_BYTES = Figure(
    value=544 * MIB,
    source="one all-reduce in a group of 2 of 4 A100 with NVLink: 544 MB (NVIDIA/nccl#964)",
    date="2023-08",
    confidence="partly",
)
"""NCCL's buffers of a communicator of two ranks with all channels of NVLink."""
COMMUNICATOR_BYTES = Figure(
    value=688 * MIB,
    source="one all-reduce in groups of 3 and 4 of 4 A100 with NVLink: 688 MB (NVIDIA/nccl#964); no more beyond two "
    "nodes, linear in channels (NVIDIA/nccl#864)",
    date="2023-08",
    confidence="partly",
)
"""NCCL's buffers of a communicator of more than two ranks."""
BUS_COMMUNICATOR_BYTES = Figure(
    value=100 * MIB,
    source="a round guess: PCIe gets 2 to 4 channels, buffers are linear in channels (NVIDIA/nccl#986)",
    date="2023-09",
    confidence="unchecked",
)
"""NCCL's buffers of a communicator where devices have no fabric of their own."""
EXCHANGE_PEER_BYTES = Figure(
    value=3.28e9 / 7,
    source="first all-to-all of 8 H100 in a node: 1.06 to 4.34 GB outside PyTorch, 32 channels a pair "
    "(NVIDIA/nccl#1685)",
    date="2025-04",
    confidence="partly",
)
"""NCCL's point-to-point buffers for each peer in the node that all-to-all reaches."""
_STAGES = (
    "121 of nanotron's published runs with stages on 64 nodes, whose hosts wait for checks: reserved beyond 1.06 times "
    "allocated"
)
HELD_IN_STEP = Figure(
    value=5,
    source=f"{_STAGES}, as much for every batch and tp of 2 and more. Two are its buffers for gathered inputs and "
    "gradients (huggingface/nanotron 67c5ebb6 parallel/tensor_parallel/functional.py MemoryBuffer)",
    date="2026-11",
    confidence="partly",
)
"""Whole activations that collectives inside layers hold in a pipeline whose host is in step with its device."""
SPLIT_SHARE = Figure(
    value=0.08,
    source=f"{_STAGES}, over the activations at the peak, with tp of 1 and 2: 10% and 8%",
    date="2026-11",
    confidence="partly",
)
"""Share of the activations of several microbatches that lies in gaps between them and cannot be used."""
WORKSPACE_BYTES = Figure(
    value=8_519_680,
    source="cuBLAS default of PyTorch, 2 x 4096 KiB + 8 x 16 KiB; seen in a snapshot (discuss.pytorch.org 178671)",
    date="2023-04",
    confidence="checked",
)
"""cuBLAS workspace of one handle and stream before Hopper. From the allocator, so part of allocated bytes."""
HOPPER_WORKSPACE_BYTES = Figure(
    value=32 * MIB,
    source="cuBLAS reference, cublasSetWorkspace: 32 MiB recommended on Hopper (pytorch/pytorch#120925)",
    date="2024-03",
    confidence="partly",
)
"""cuBLAS workspace of one handle and stream from Hopper on."""
CUBLAS_HANDLES = 2
"""The number of handles with a workspace each: PyTorch keeps them by thread and stream, and forward and backward run in
two threads (aten/src/ATen/cuda/CublasHandlePool.cpp, read 2026-11-21)."""
ENGINE_WORKSPACE_BYTES = Figure(
    value=4 * MIB,
    source="Transformer Engine, pytorch/module/base.py get_cublas_workspace_size_bytes: 4 MiB, 32 MiB from Hopper on; "
    "the same tests of Megatron-LM peak 28 MiB higher on H100 than on A100",
    date="2026-11",
    confidence="partly",
)
"""Workspace of Transformer Engine's matmuls before Hopper. From the allocator."""
HOPPER_ENGINE_WORKSPACE_BYTES = Figure(
    value=32 * MIB, source=ENGINE_WORKSPACE_BYTES.source, date="2026-11", confidence="partly"
)
"""Workspace of Transformer Engine's matmuls from Hopper on."""


def round_up(nbytes: int) -> int:
    """Bytes of the block that an allocation of `nbytes` gets: a multiple of 512, at least 512; 0 for nothing."""
    if nbytes < 0:
        raise InputError(f"an allocation cannot be of {nbytes} bytes")
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


def segment_bytes(nbytes: int) -> int:
    """Bytes that the allocator asks of the device for an allocation of `nbytes` that no free block can hold.

    2 MiB up to 1 MiB, 20 MiB under 10 MiB, else the size rounded up to 2 MiB. Segments that do not expand.
    """
    size = round_up(nbytes)
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES if size else 0
    if size < OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-size // SEGMENT_STEP_BYTES) * SEGMENT_STEP_BYTES


def reserved_estimate(allocated: float, largest: float, stack: Stack, *, limit_bytes: float | None = None) -> float:
    """Bytes that the allocator holds at the end of a few steps whose tensors peak at `allocated`.

    largest: bytes of the largest tensor; never less than a segment for it. limit_bytes: what the device has left for
    the allocator: it gives free segments back before it fails, so reserves no more than that as long as the least it
    needs (FULL_DEVICE_SHARE) fits. A stack that does not say how it allocates is taken to use plain segments.
    The usual value of a wide spread: a tenth of the published logs reserve 38% more than they allocate.
    """
    usual = _pages(max(allocated * (1 + _usual_share(stack)), segment_bytes(int(largest))))
    # The usual reserve, unless the device is smaller: a full allocator frees cached segments and retries before it
    # fails.
    if limit_bytes is None or usual <= limit_bytes:
        return usual
    # On a device that is full, at least what it cannot do without.
    return max(min(usual, limit_bytes), reserved_when_full(allocated, stack))


def reserved_when_full(allocated: float, stack: Stack) -> int:
    """Bytes that the allocator holds for that predicted peak on a device that is full, in whole segments."""
    return int(_pages(allocated * (1 + min(_usual_share(stack), FULL_DEVICE_SHARE.value))))


def _usual_share(stack: Stack) -> float:
    return (EXPANDABLE_SHARE if stack.workspace.allocator == "expandable_segments" else RESERVED_SHARE).value


def _pages(nbytes: float) -> float:
    return float(-(-nbytes // SEGMENT_STEP_BYTES) * SEGMENT_STEP_BYTES)


def communicator_bytes(device: Device, ranks: int | None = None) -> Bytes:
    """NCCL's buffers on one device for one communicator that has been used; `ranks` None: not known, many."""
    if device.kind != "gpu":
        return 0
    if device.fabric_bytes_per_s is None:
        return round(BUS_COMMUNICATOR_BYTES.value)
    return round((PAIR_COMMUNICATOR_BYTES if ranks == 2 else COMMUNICATOR_BYTES).value)


def workspace_bytes(device: Device, stack: Stack) -> Bytes:
    """Workspaces of libraries inside the allocator: part of allocated bytes, of which a model's tensors know nothing.

    One of cuBLAS for each thread that multiplies, as large as the stack sets it or as its default, and one of
    Transformer Engine's for stacks that use it.
    """
    if device.kind != "gpu":
        return 0
    older = device.generation.workspace == "8 MiB"
    usual = round((WORKSPACE_BYTES if older else HOPPER_WORKSPACE_BYTES).value)
    engine = round((ENGINE_WORKSPACE_BYTES if older else HOPPER_ENGINE_WORKSPACE_BYTES).value)
    own = stack.workspace.cublas_workspace_bytes
    return CUBLAS_HANDLES * (usual if own is None else own) + (engine if stack.layers.transformer_engine else 0)


def device_overhead(device: Device, stack: Stack, communicators: int, *, exchange_peers: int = 0) -> Bytes:
    """Bytes outside the allocator: context, code of kernels, communication buffers.

    communicators: groups that the rank communicates in. exchange_peers: other ranks in its node that it exchanges with
    in all-to-all. A stack that states its own overhead is believed. 0 for a CPU (the process's own memory is not the
    device's) and for a TPU, whose runtime takes its part before `Device.memory_bytes` (unchecked).
    """
    if device.kind != "gpu":
        return 0
    if stack.workspace.device_overhead_bytes is not None:
        return stack.workspace.device_overhead_bytes
    # Each communicator has its channels' buffers; all-to-all adds point-to-point buffers for every peer in the node.
    buffers = communicators * communicator_bytes(device) + exchange_peers * EXCHANGE_PEER_BYTES.value
    return round(_context(device, stack) + buffers)


def _context(device: Device, stack: Stack) -> float:
    """Bytes of the CUDA context."""
    if not stack.workspace.preloaded_kernels:
        return CONTEXT_BYTES.value
    return (VOLTA_PRELOADED_CONTEXT_BYTES if device.arch == "volta" else PRELOADED_CONTEXT_BYTES).value


def least_overhead(device: Device, stack: Stack, communicators: int) -> Bytes:
    """What of `device_overhead` a full device must hold: a context, and buffers of one communicator.

    Later releases of NCCL connect when first used and share buffers, so groups beyond the first may cost little. A
    verdict of not fitting is given against this, since runs are tuned to the last GiB.
    """
    usual = device_overhead(device, stack, communicators)
    if stack.workspace.preloaded_kernels:  # as old: in such releases of NCCL every group has buffers from the start
        return usual
    one = communicator_bytes(device) if communicators else 0
    return min(usual, round(_context(device, stack)) + one) if device.kind == "gpu" else usual


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedMemory:
    """What a job's tensors come to on its device."""

    reserved_bytes: Bytes
    """Bytes that the allocator holds."""
    outside_bytes: Bytes
    """Bytes of context, code of kernels and communication buffers."""
    usual_bytes: Bytes
    """Bytes of both together where there is room to spare; more than the device has where the job must do with less."""
    least_bytes: Bytes
    """Bytes of both together with the fewest gaps, if predictions leave nothing out (`RESERVED_SHARE_LOW`): at most
    those with which a device is full."""

    @property
    def peak_bytes(self) -> Bytes:
        """Bytes of both together on this device."""
        return self.reserved_bytes + self.outside_bytes


def place_memory(
    device: Device,
    stack: Stack,
    allocated: Bytes,
    communicators: int,
    *,
    exchange_peers: int = 0,
    largest: Bytes = 1,
    flat: Bytes = 0,
    early: Bytes = 0,
) -> PlacedMemory:
    """Tensors whose bytes peak at `allocated`, with what the allocator holds around them.

    largest: bytes of the largest tensor. flat: bytes of tensors that fit into no block that others have freed, so
    that they take segments of their own. early: bytes of parameters gathered before they are needed. Overhead shrinks
    on a device that is full: its allocator returns free segments, and communicators beyond the first take less. The
    peak does not fall as `allocated` grows. On a TPU there is nothing besides the tensors, and XLA, which knows its
    memory as it schedules, gathers parameters no earlier than there is room.
    """
    outside = device_overhead(device, stack, communicators, exchange_peers=exchange_peers)
    if device.kind == "tpu":  # XLA lays memory out before it runs: no segments
        least = max(allocated - early, min(allocated, device.memory_bytes - outside))
        usual = allocated + outside
        return PlacedMemory(reserved_bytes=least, outside_bytes=outside, usual_bytes=usual, least_bytes=least + outside)
    # Usual first; then, if tensors and usual overhead do not fit, overhead shrinks as far as it can.
    usual = int(reserved_estimate(allocated, largest, stack)) + flat + outside
    needed = reserved_when_full(allocated, stack)
    if needed + outside > device.memory_bytes:
        outside = max(least_overhead(device, stack, communicators), device.memory_bytes - needed)
    room = device.memory_bytes - outside
    reserved = int(reserved_estimate(allocated, largest, stack, limit_bytes=room))
    # `flat` needs segments of its own, counted as far as there is room.
    reserved = min(reserved + flat, max(reserved, room))
    least = int(_pages(allocated * (1 + RESERVED_SHARE_LOW.value))) + least_overhead(device, stack, communicators)
    return PlacedMemory(reserved_bytes=reserved, outside_bytes=outside, usual_bytes=usual, least_bytes=least)
