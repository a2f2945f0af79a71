"""Time of fused attention (FlashAttention and its relatives) on one device, forward or backward.

    seconds = t0 + (compute² + memory²)^(1/2)
    compute = time of a block · (blocks an SM, and the longest block alone, added with power p)
            = time of a block · (waves of blocks), where no mask makes blocks unlike and a row says how full a wave is
              (either times a factor by the number of waves, where a row has one)

Blocks of queries are shared out over the SMs; each walks the keys it sees; one that is not full costs a whole one.
Leaves out: unfused attention, which is priced by the ops it is lowered to; paged caches; dropout inside the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gnomon.errors import UnpricedError
from gnomon.hardware.types import Device
from gnomon.prices.curves import BEND_WAVES, Array, AttentionCurve, AttentionKernel, Curves, Size, Time, as_time
from gnomon.prices.tpu import lanes_of

BLOCK = 128
"""Queries and keys of a tile of a window."""

Pieces = tuple[tuple[int, int], ...]
"""(tokens, tokens of the same sequence before them) of each part of a sequence that a microbatch holds."""

LANE = 32
"""Head sizes are worked on in multiples of this (FlashAttention; measured: 72 takes no less time than 80)."""

TPU_TILES = {"tpu-7x": (1024, 2048)}
"""Queries and keys of a tile, forward and backward: what MaxText's recipes of a generation set (AI-Hypercomputer,
training on Ironwood: sa_block_q, sa_block_q_dkv), 512 where they do not (MaxText configs/base.yml). Read 2026-11-22."""


def tiled_window(window: int, device: Device, *, backward: bool) -> int:
    """Keys that a query costs under a sliding window of `window` keys, which masks whole tiles only: the tile of its
    neighbours reaches back to the first key of any of them and forward to the last."""
    tile = TPU_TILES.get(device.arch, (512, 512))[backward] if device.kind == "tpu" else BLOCK
    # Whole tiles: the window rounded up, and one more since a tile's first and last query see different keys.
    return -(-window // tile) * tile + tile


def lane_of(device: Device) -> int:
    """The multiple to which head sizes are rounded up as a device multiplies them."""
    return lanes_of(device) if device.kind == "tpu" else LANE


def attention_seconds(
    batch: Size,
    q_len: Size,
    kv_len: Size,
    heads: Size,
    kv_heads: Size,
    head_dim: int,
    *,
    head_dim_v: int | None = None,
    causal: bool,
    backward: bool = False,
    pairs: Size | None = None,
    dtype: str = "bf16",
    device: Device,
    curves: Curves,
    kernel: AttentionKernel | None = None,
) -> Time:
    """Seconds of one fused attention, without host time.

    batch, heads, kv_heads, q_len, kv_len: sizes on this device; broadcast. head_dim of q and k, head_dim_v of v and out
    (None: the same). pairs: (query, key) pairs of one head and sequence that are worked on; None is q·kv, or under a
    causal mask what the last q of kv positions see. backward: gradients of q, k and v (five matmuls to the forward's
    two). kernel: None is `curves.attention_kernel`. Never under the roofline. Source of the form: Dao 2023 (blocks of
    queries), Shah et al. 2024; constants fitted, see `curves`.
    """
    sizes = np.broadcast_arrays(
        *(np.asarray(size, dtype=np.float64) for size in (batch, q_len, kv_len, heads, kv_heads))
    )
    if any(np.any(size < 1) for size in sizes):
        raise UnpricedError(f"attention of {q_len} queries over {kv_len} keys has no price: sizes are at least 1")
    width_v = head_dim if head_dim_v is None else head_dim_v
    _, q, kv, _, _ = sizes
    # queries that outnumber the keys (cross-attention is not causal) see half of them on average
    seen = kv if not causal else np.where(q < kv, kv - q / 2, kv / 2)
    shape = Heads(
        batch=sizes[0],
        q_len=q,
        kv_len=kv,
        heads=sizes[3],
        kv_heads=sizes[4],
        pairs=np.asarray(q * seen if pairs is None else pairs, dtype=np.float64),
        width=head_dim,
        width_v=width_v,
        lane=lane_of(device),
        causal=causal,
    )
    row = curves.attention_for("backward" if backward else "forward", max(head_dim, width_v), kernel)
    return as_time(attention_model(shape, device.flops_per_s(dtype), device, row))


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """The heads of a fused attention, as arrays of equal shape."""

    batch: Array
    """Sequences."""
    q_len: Array
    """Queries of a sequence."""
    kv_len: Array
    """Keys of a sequence."""
    heads: Array
    """Query heads."""
    kv_heads: Array
    """Key heads."""
    pairs: Array
    """(query, key) pairs that are worked on, of one head and sequence."""
    width: int
    """Head size of q and k."""
    width_v: int
    """Head size of v and the output."""
    lane: int = LANE
    """Head sizes are filled up to multiples of it."""
    causal: bool
    """Whether some queries see more keys than others."""

    def flops(self, backward: bool) -> Array:
        """FLOPs of q kᵀ and p v; backward: q kᵀ again, dP = dO vᵀ, dV, dQ, dK. Head sizes as kernels fill them up."""
        # ceil to the lane: a head of 72 works as one of 96.
        width, width_v = (-(-size // self.lane) * self.lane for size in (self.width, self.width_v))
        # Forward: 2 matmuls of 2·pairs·width FLOPs (q kᵀ, p v). Backward: 3 over width (q kᵀ, dQ, dK) and 2 over
        # width_v (dP, dV).
        a_pair = 2 * (3 * width + 2 * width_v) if backward else 2 * (width + width_v)
        return np.asarray(self.batch * self.heads * self.pairs * a_pair)

    def moved_bytes(self, backward: bool) -> Array:
        """Bytes of q, k, v and out in 16 bits; backward: also the gradient of out, and those of q (in fp32), k and
        v."""
        queries, keys = self.q_len * self.heads, self.kv_len * self.kv_heads
        # Elements of q, k (width) and of v, out (width_v).
        elements = (queries + keys) * (self.width + self.width_v)
        if backward:
            elements = elements + queries * (self.width_v + 2 * self.width) + keys * (self.width + self.width_v)
        return np.asarray(self.batch * 2 * elements)


def attention_model(shape: Heads, peak: float, device: Device, row: AttentionCurve) -> Array:
    """`attention_seconds` for one row of constants; what a fit evaluates. peak: dense FLOP/s."""
    backward = row.direction == "backward"
    # Backward runs over blocks of keys, forward over blocks of queries.
    parts = np.maximum((shape.kv_len if backward else shape.q_len) / row.block, 1)
    sequences = shape.batch * shape.heads
    # Seconds of a mean block on one SM: its FLOPs at the SM's reached speed, and starting it.
    block_s = shape.flops(backward) / (sequences * parts) / (peak / device.num_sms * row.efficiency) + row.prologue_s
    # few blocks: the one that sees all keys decides, twice the mean of a causal mask; it has its SM to itself
    ratio = np.minimum(2.0, shape.q_len * shape.kv_len / shape.pairs) if shape.causal else np.ones_like(block_s)
    shared, lone = sequences * np.ceil(parts) / device.num_sms, row.lone_block * ratio
    # Power mean: rounds -> the larger of the two as tail_power grows.
    large, small = np.maximum(shared, lone), np.minimum(shared, lone)
    rounds = large * (1 + (small / large) ** row.tail_power) ** (1 / row.tail_power)
    if row.wave_overlap is not None and not shape.causal:
        rounds = (1 - row.wave_overlap) * np.ceil(shared) + row.wave_overlap * np.maximum(shared, 1)
    compute = block_s * rounds
    if row.bend:
        # The bend is interpolated over log waves, as it was fitted.
        compute = compute * np.exp(np.interp(np.log(shared), np.log(BEND_WAVES), np.log(row.bend)))
    memory = shape.moved_bytes(backward) / (device.memory_bytes_per_s * row.memory_efficiency)
    return np.asarray(row.t0_s + np.hypot(compute, memory))
