"""Kinds of convolutional and diffusion models: `conv2d`, `upsample`, `timestep`, `mse`, and norms over groups.

torch knows their derivatives; parameters are read whole (`site.read`). Images are (batch, channels, height, width).
Leaves out ranks that divide height, width or channels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from gnomon.errors import PlanError
from gnomon.runtime.ops.site import Operand, Site, read


def conv2d(site: Site, x: Tensor, weight: Operand, bias: Operand | None = None) -> Tensor:
    """A square kernel over an image padded by half of it; the stride is what the sizes of input and output say."""
    before, after = (site.block.tensor(name).dims[-1].size or 1 for name in (site.op.inputs[0], site.op.outputs[0]))
    kernel = read(weight)
    padding = kernel.shape[-1] // 2
    return functional.conv2d(x, kernel, None if bias is None else read(bias), before // after, padding)


def upsample(site: Site, x: Tensor) -> Tensor:
    """Every pixel several times (nearest), as often as the output is longer."""
    before, after = (site.block.tensor(name).dims[-1].size or 1 for name in (site.op.inputs[0], site.op.outputs[0]))
    return x.repeat_interleave(after // before, dim=-2).repeat_interleave(after // before, dim=-1)


def timestep(site: Site, time: Tensor) -> Tensor:
    """(batch) -> (batch, width): cosines and sines of a diffusion time at frequencies from 1 to 1/10 000 (Ho et al.
    2020). Attributes: `sine_first`, and `shift` of the frequencies' count."""
    width = site.block.tensor(site.op.outputs[0]).dims[-1].size or 0
    half = width // 2
    work = torch.promote_types(time.dtype, torch.float32)
    steps = torch.arange(half, dtype=work, device=time.device) / (half - site.attr("shift", 0))
    angle = time.to(work)[:, None] * torch.exp(-math.log(10_000.0) * steps)
    parts = (angle.sin(), angle.cos()) if site.attr("sine_first", False) else (angle.cos(), angle.sin())
    return functional.pad(torch.cat(parts, dim=-1), (0, width - 2 * half)).to(time.dtype)


def mse(site: Site, prediction: Tensor, target: Tensor) -> Tensor:
    """The mean squared error of each sample, summed over samples, in float32 or wider."""
    wide = torch.promote_types(prediction.dtype, torch.float32)
    squares = (prediction.to(wide) - target.to(wide)).square()
    return squares.flatten(1).mean(-1).sum()


def group_norm(site: Site, x: Tensor, *parameters: Operand) -> Tensor:
    """Normalises over the positions and the channels of a group (Wu and He 2018); weight and bias a channel."""
    if site.dims(site.op.inputs[0])[1:2] != (site.attr("over", ""),):
        raise PlanError(f"{site.op.path}: the runtime norms groups of the dim after the batch")
    weight, bias, *_ = (*(read(parameter) for parameter in parameters), None, None)
    return functional.group_norm(x, site.attr("groups", 1), weight, bias, site.attr("eps", 1e-5))
