"""What dims are by their names, whatever their scope: over tokens, heads, a mixer's state.

Names are the graph's (`heads`, `vision.heads`, `image_h.2`). Leaves out which axis divides which (`sharding.homes`).
"""

from __future__ import annotations

TOKEN_DIMS = ("seq", "enc_seq", "patches", "kv_seq")
"""Dims over tokens (base names): cp divides them, and tp between its regions under sequence parallelism."""

SEQUENCE_DIMS = (*TOKEN_DIMS, "image_h")
"""Dims over positions (base names), which cp divides; images into bands of rows."""


HEAD_DIMS = ("heads", "kv_heads")
"""Dims of attention heads (base names); tp divides both alike."""

STATE_DIMS = ("ssm_groups", "ssm_heads", "ssm_proj")
"""Dims of a Mamba-2 mixer (base names): groups of heads, heads, and all that its input projection writes."""

TENSOR_DIMS = (*HEAD_DIMS, *STATE_DIMS, "ffn", "shared_ffn")
"""Dims that tp divides wherever they are (base names)."""


_KNOWN_DIMS = frozenset((*SEQUENCE_DIMS, *TENSOR_DIMS, "vocab", "experts", "expert_ffn", "topk", "kernel_h"))


def base(name: str) -> str:
    """What a dim is, whatever its scope or number: `vision.heads` is `heads`, `image_h.2` is `image_h`."""
    return next((part for part in name.split(".") if part in _KNOWN_DIMS), name)


def is_sequence(name: str) -> bool:
    """Whether a dim runs over positions of the input."""
    return base(name) in SEQUENCE_DIMS
