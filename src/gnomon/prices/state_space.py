"""Time of a Mamba-2 scan: the kernels of mamba_ssm's `ssd_combined`, one by one.

Each is a batch of small matmuls, one for each chunk and head, or a pass over memory. Matmuls are priced as
batched GEMMs of these shapes with the bytes that the kernel moves: states of chunks lie in memory in fp32 between them.
A gated delta rule is priced forward only, by a line in its tokens.
Leaves out kernels that fuse these steps (FlashInfer's for Blackwell).
Source: state-spaces/mamba mamba_ssm/ops/triton/ssd_combined.py `_mamba_chunk_scan_combined_fwd`, `_bwd`, read
2026-11-22.
"""

from __future__ import annotations

from dataclasses import dataclass

from gnomon.errors import UnpricedError
from gnomon.graph import DTYPE_BITS, Dtypes
from gnomon.hardware.types import Device
from gnomon.ops.state_space import Scan
from gnomon.prices.curves import Curves, Size, Time
from gnomon.prices.gemm import gemm_seconds
from gnomon.prices.stream import stream_seconds

TRITON_SHARE = 0.58
"""Speed of these kernels over that of a library's matmuls of their shapes. Dao & Gu 2024 (figure 10, A100, state 64)
find the scan as fast as FlashAttention-2 at a length of 2048; the price of its steps alone is 1.94 ms for 16,384 tokens
of 32 heads of 64, forward and backward, and FlashAttention-2's 3.34 ms. 2026-11-22."""

FORWARD_KERNELS = 6
"""The kernels of a forward: convolution, sums of decays, states of chunks, passing them on, C Bᵀ, the scan."""
BACKWARD_KERNELS = 16
"""The kernels of a backward: the first five again, gate, gradient of states, passed back, x, B, C, C Bᵀ, its factors,
decays, dt, convolution."""


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Bytes and counts that the kernels share."""

    scan: Scan
    width: int
    """Bytes of an element of the compute dtype."""

    @property
    def x(self) -> Size:
        """Bytes of x, z, y or their gradients."""
        return self.scan.tokens * self.scan.width * self.width

    @property
    def b(self) -> Size:
        """Bytes of B or C."""
        return self.scan.tokens * self.scan.groups * self.scan.state * self.width

    @property
    def chunks(self) -> Size:
        """Chunks of all sequences, a part of one counted as a part."""
        return self.scan.tokens / self.scan.chunk

    @property
    def states(self) -> Size:
        """Elements of the states at the chunks' ends."""
        return self.chunks * self.scan.width * self.scan.state

    @property
    def pairs(self) -> Size:
        """Bytes of C Bᵀ within chunks, in fp32."""
        return self.scan.tokens * self.scan.chunk * self.scan.groups * 4

    @property
    def taps(self) -> Size:
        """Bytes of x, B and C, over which the convolution runs."""
        return self.x + 2 * self.b


DELTA_START_S = 12e-6
"""Seconds of a gated delta rule over few tokens, how long each more takes where a sequence's chunks follow each other,
and the share of the 16-bit peak that its matmuls reach where heads and sequences fill the device. Fitted 2026-11-29 to
linear_attention_aiconfigurator.csv (H100, B200, L40S; vllm 0.24, sglang 0.5.14; one sequence, 16 and 32 heads of 128 x
128, 64 to 4096 tokens): within 25 %."""
DELTA_TOKEN_S = 45e-9
DELTA_SHARE = 0.2


def _delta_seconds(scan: Scan, sizes: _Sizes, device: Device, curves: Curves) -> Time:
    """The forward of a gated delta rule over one sequence: its convolution, then chunk after chunk."""
    head = scan.width // scan.heads
    # Per token and head: reading and updating the state (4 · head · state), and products within a chunk.
    flops = scan.tokens * scan.heads * (4 * head * scan.state + 2 * scan.chunk * (2 * scan.state + head))
    peak = device.dense_peak.bf16 or device.dense_peak.fp16 or device.dense_peak.fp32
    if peak is None:
        raise UnpricedError(f"{device.name} has no peak in 16 or 32 bits")
    convolution = stream_seconds(sizes.taps, sizes.taps, device, curves, kernels=1)
    return convolution + DELTA_START_S + scan.tokens * DELTA_TOKEN_S + flops / (peak * DELTA_SHARE)


def scan_seconds(scan: Scan, dtypes: Dtypes, device: Device, curves: Curves, *, backward: bool) -> Time:
    """Seconds of the kernels of one pass over `scan`; the backward makes states and C Bᵀ again."""
    dtype = dtypes.resolve("compute")
    sizes = _Sizes(scan, DTYPE_BITS[dtype] // 8)
    if scan.rule == "gated_delta":
        if backward:
            raise UnpricedError(
                "the backward of a gated DeltaNet has no price: such models are predicted for serving only"
            )
        return _delta_seconds(scan, sizes, device, curves)
    matmul_dtype = "tf32" if dtype == "fp32" and device.kind == "gpu" else dtype

    # m, n, k of one chunk's matmul; per_chunk: how many a chunk has (heads or groups); moved: bytes of all.
    def matmul_s(m: Size, n: Size, k: Size, per_chunk: Size, moved: Size) -> Time:
        batch = sizes.chunks * per_chunk
        least = batch if not isinstance(batch, (int, float)) else max(batch, 1)
        seconds = gemm_seconds(m, n, k, least, dtype=matmul_dtype, device=device, curves=curves, moved_bytes=moved)
        return seconds / TRITON_SHARE

    def memory(read: Size, written: Size, kernels: int = 1) -> Time:
        return stream_seconds(read, written, device, curves, kernels=kernels) / TRITON_SHARE

    chunk, state, heads, groups = scan.chunk, scan.state, scan.heads, scan.groups
    head_dim, half = scan.width // scan.heads, max(scan.chunk // 2, 1)  # a token sees half of its chunk
    states, pairs, x, b = sizes.states, sizes.pairs, sizes.x, sizes.b
    # Chunk states are kept in fp32 (4 bytes) and passed on in the compute dtype.
    narrow = states * sizes.width
    total = memory(sizes.taps, sizes.taps)  # convolution
    total += memory(scan.tokens * heads * sizes.width, 8 * scan.tokens * heads)  # dt and sums of decays, fp32
    # States of chunks: x ᵀB, a (head_dim × state) matmul over the chunk's tokens for each head.
    total += matmul_s(head_dim, state, chunk, heads, x + b + 4 * states)
    # Passing states from chunk to chunk is a pass over memory.
    total += memory(4 * states, narrow)
    # C Bᵀ within a chunk, shared by the heads of a group.
    total += matmul_s(chunk, chunk, state, groups, 2 * b + pairs)
    if not backward:
        # y = C · state + (masked C Bᵀ) · x: k is the state and, on average, half a chunk.
        return total + matmul_s(chunk, head_dim, state + half, heads, 4 * x + b + narrow + pairs)
    total += memory(4 * x, 2 * x)  # the gate
    total += matmul_s(head_dim, state, chunk, heads, x + b + 4 * states)
    total += memory(8 * states, 2 * narrow)
    total += matmul_s(chunk, head_dim, state + half, heads, 3 * x + b + narrow + pairs)
    total += matmul_s(chunk, state, head_dim, heads, x + 3 * b + narrow) * 2  # B and C, summed over a group in fp32
    total += matmul_s(chunk, half, head_dim, heads, 2 * x + pairs)
    total += matmul_s(chunk, state, chunk, groups, 4 * b + pairs) * 2
    total += matmul_s(chunk, half, head_dim, heads, 2 * x + pairs)  # decays
    return total + memory(2 * sizes.taps, sizes.taps) + memory(8 * scan.tokens * heads, scan.tokens * heads)
