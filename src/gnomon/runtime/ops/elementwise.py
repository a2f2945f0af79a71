"""Kinds that work element by element: `add`, `mul`, `activation`, `glu`, `scale`, `softcap`, `modulate`, `cast`.

A second operand has some of the first one's dims and is spread over the others. Attributes: `fn` of activations,
`factor` of scale, `cap` of softcap. Leaves out dropout of the runtime's own models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from gnomon.runtime.ops.site import Operand, Site, read

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "gelu_new": partial(functional.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
    "silu": functional.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}
"""`fn` -> its function."""


def spread(site: Site, x: Tensor, index: int, over: int = 0) -> Tensor:
    """Operand `index` with a dim of 1 for each dim of operand `over` that it has not."""
    own, target_dims = site.dims(site.op.inputs[index]), site.dims(site.op.inputs[over])
    if own == target_dims or x.dim() == len(target_dims):  # packed rows have positions of their own, and so all dims
        return x
    shape = [x.shape[own.index(name)] if name in own else 1 for name in target_dims]
    return x.permute([own.index(name) for name in target_dims if name in own]).reshape(shape)


def add(site: Site, a: Operand, b: Operand) -> Tensor:
    """a + b, or a + factor · b (Granite's residuals)."""
    other = spread(site, read(b), 1)
    factor = site.attr("factor", 1.0)
    return read(a) + (other if factor == 1.0 else other * factor)


def mul(site: Site, a: Operand, b: Operand) -> Tensor:
    """Elementwise a · b; b is spread over the dims that it lacks."""
    return read(a) * spread(site, read(b), 1)


def activation(site: Site, x: Tensor) -> Tensor:
    """Elementwise fn(x), by the op's `fn`."""
    return ACTIVATIONS[site.attr("fn", "")](x)


def glu(site: Site, gate: Tensor, up: Tensor) -> Tensor:
    """fn(gate) · up, in two kernels, as the stack's record says; with a `limit`, both sides are clamped and 1 is added
    to up (GPT-OSS)."""
    if limit := site.attr("limit", 0.0):
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(gate * site.attr("alpha", 1.0)) * (up + 1)
    return ACTIVATIONS[site.attr("fn", "silu")](gate) * up


def scale(site: Site, x: Tensor, by: Operand | None = None) -> Tensor:
    """x times a constant, rounded to x's dtype first as models in PyTorch have it, or times a learned vector."""
    if by is not None:
        return x * spread(site, read(by), 1)
    return x * torch.tensor(site.attr("factor", 1.0), dtype=x.dtype, device=x.device)


def softcap(site: Site, x: Tensor) -> Tensor:
    """cap · tanh(x / cap)."""
    cap = site.attr("cap", 1.0)
    return torch.tanh(x / cap) * cap


def modulate(site: Site, x: Tensor, shift: Operand, by: Operand) -> Tensor:
    """x · (1 + by) + shift."""
    return x * (1 + spread(site, read(by), 2)) + spread(site, read(shift), 1)


def blend(site: Site, a: Tensor, b: Tensor, logits: Tensor) -> Tensor:
    """softmax(logits)[0] · a + softmax(logits)[1] · b."""
    first, second = logits.softmax(-1).split(1, dim=-1)
    return a * first + b * second


def unchanged(site: Site, x: Tensor) -> Tensor:
    """Returns x itself: casts, whose dtype is the plan's."""
    return x


def dropped(site: Site, x: Tensor) -> Tensor:
    """Dropout of a captured model: elements left out at random, the others scaled up; a byte of each is kept. Of the
    runtime's own models x itself: it trains them without."""
    if not site.attr("drawn", False):
        return x
    keep_share = 1.0 - site.attr("p", 0.0)
    # The mask is what autograd keeps for x: as bools, a byte an element.
    return x * torch.empty_like(x, dtype=torch.bool).bernoulli_(keep_share) / keep_share
