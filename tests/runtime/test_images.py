"""Models of images on the Graph beside plain torch: a diffusion transformer and a U-Net, loss and every gradient.

transformers has neither, so the plain models are written here from the papers, with the parameters of the Graph.
Shapes: B images, C channels, N patches, D width.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

from torch import Tensor  # noqa: E402
from torch.nn import functional  # noqa: E402

from gnomon.models.dit import DitConfig, dit  # noqa: E402
from gnomon.models.unet import unet, unet_tiny  # noqa: E402
from gnomon.runtime.module.one_process import OneProcess  # noqa: E402

pytestmark = pytest.mark.torch

Named = Callable[[str], Tensor]
"""A parameter by its name."""
LIMIT = 1e-9


def compare(model: OneProcess, batch: dict[str, Tensor], plain: Callable[[Named, dict[str, Tensor]], Tensor]) -> None:
    """Fails unless loss and gradients agree."""
    held = {slot.name: model.parameters.value(slot.name).clone().requires_grad_() for slot in model.slots}
    still = model.stage.frozen
    fixed = {} if still is None else {slot.name: still.value(slot.name) for slot in still.slots}
    loss = plain(lambda name: {**held, **fixed}[name], batch)
    loss.backward()  # type: ignore[no-untyped-call]
    assert abs(model.loss(batch, count=1) / float(loss.detach()) - 1) < LIMIT
    for slot in model.slots:
        expected = held[slot.name].grad
        assert expected is not None, slot.name
        difference = (model.gradient(slot) - expected).abs().max()
        assert difference <= LIMIT * expected.abs().max().clamp(min=1e-6), slot.name


def randomised(model: OneProcess) -> OneProcess:
    """With values that are no constants, so that no gradient is zero by chance."""
    flat = model.parameters.flat
    assert flat is not None
    flat.add_(torch.randn(flat.shape, generator=torch.Generator().manual_seed(3), dtype=flat.dtype) * 0.1)
    return model


def waves(time_B: Tensor, width: int, *, sine_first: bool, shift: int) -> Tensor:
    half = width // 2
    speed = torch.tensor([10_000.0 ** (-i / (half - shift)) for i in range(half)], dtype=time_B.dtype)
    angle = time_B[:, None] * speed
    return torch.cat([angle.sin(), angle.cos()] if sine_first else [angle.cos(), angle.sin()], dim=1)


def plain_dit(p: Named, batch: dict[str, Tensor], c: DitConfig) -> Tensor:
    """Peebles and Xie 2023: adaLN-Zero blocks on patches of a latent."""
    kernel = p("x_embedder.proj.weight")
    x_BND = functional.conv2d(
        batch["latent"], kernel.view(c.hidden_size, c.latent_channels, c.patch_size, -1), stride=c.patch_size
    )
    x_BND = x_BND.flatten(2).transpose(1, 2) + p("x_embedder.proj.bias") + p("pos_embed")
    time = waves(batch["time"], c.frequencies, sine_first=False, shift=0)
    for name in ("t_embedder.mlp.0", "t_embedder.mlp.2"):
        time = functional.linear(time, p(f"{name}.weight"), p(f"{name}.bias"))
        time = functional.silu(time) if name.endswith("0") else time
    cond_BD = functional.silu(time + p("y_embedder.embedding_table.weight")[batch["label"]])

    def modulation(path: str, count: int) -> list[Tensor]:
        weight, bias = p(f"{path}.weight").view(-1, c.hidden_size), p(f"{path}.bias").flatten()
        return list(functional.linear(cond_BD, weight, bias)[:, None].chunk(count, dim=-1))

    def normed(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        return functional.layer_norm(x, x.shape[-1:], eps=1e-5) * (1 + scale) + shift

    for i in range(c.num_layers):
        at = f"blocks.{i}"
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = modulation(f"{at}.adaLN_modulation.1", 6)
        weight, bias = p(f"{at}.attn.qkv.weight").view(-1, c.hidden_size), p(f"{at}.attn.qkv.bias").flatten()
        qkv = functional.linear(normed(x_BND, shift_a, scale_a), weight, bias)
        q, k, v = qkv.unflatten(-1, (3, c.num_heads, -1)).permute(2, 0, 3, 1, 4)
        out = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        weight = p(f"{at}.attn.proj.weight").view(c.hidden_size, -1)
        x_BND = x_BND + gate_a * functional.linear(out, weight, p(f"{at}.attn.proj.bias"))
        out = functional.linear(normed(x_BND, shift_m, scale_m), p(f"{at}.mlp.fc1.weight"), p(f"{at}.mlp.fc1.bias"))
        out = functional.gelu(out, approximate="tanh")
        x_BND = x_BND + gate_m * functional.linear(out, p(f"{at}.mlp.fc2.weight"), p(f"{at}.mlp.fc2.bias"))
    shift, scale = modulation("final_layer.adaLN_modulation.1", 2)
    weight, bias = p("final_layer.linear.weight"), p("final_layer.linear.bias")
    made = functional.linear(normed(x_BND, shift, scale), weight.view(-1, c.hidden_size), bias.flatten())
    return (made - batch["target"].flatten(2)).square().flatten(1).mean(1).sum()


def plain_unet(p: Named, batch: dict[str, Tensor]) -> Tensor:
    """Ho et al. 2020 in the sizes of `unet_tiny`: two levels, one residual block each on the way down, two on the way
    up, attention at the lower level and in the middle."""
    time = waves(batch["time"], 8, sine_first=True, shift=1)
    for name in ("linear_1", "linear_2"):
        time = functional.linear(time, p(f"time_embedding.{name}.weight"), p(f"time_embedding.{name}.bias"))
        time = functional.silu(time) if name.endswith("1") else time

    def conv(x: Tensor, path: str, stride: int = 1) -> Tensor:
        weight = p(f"{path}.weight")
        return functional.conv2d(x, weight, p(f"{path}.bias"), stride, weight.shape[-1] // 2)

    def normed(x: Tensor, path: str) -> Tensor:
        return functional.group_norm(x, 4, p(f"{path}.weight"), p(f"{path}.bias"))

    def attend(x: Tensor, at: str) -> Tensor:
        rows = normed(x, f"{at}.attention.group_norm").flatten(2).transpose(1, 2)
        width = rows.shape[-1]
        parts = {}
        for part in ("to_q", "to_k", "to_v"):
            path = f"{at}.attention.{part}"
            parts[part] = functional.linear(rows, p(f"{path}.weight").view(width, width), p(f"{path}.bias").flatten())
        scores = torch.softmax(parts["to_q"] @ parts["to_k"].transpose(1, 2) * width**-0.5, dim=-1)
        weight = p(f"{at}.attention.to_out.weight").view(width, width)
        out = functional.linear(scores @ parts["to_v"], weight, p(f"{at}.attention.to_out.bias"))
        return x + out.transpose(1, 2).view_as(x)

    def residual(x: Tensor, at: str, *, attends: bool) -> Tensor:
        h = conv(functional.silu(normed(x, f"{at}.norm1")), f"{at}.conv1")
        moment = functional.linear(
            functional.silu(time), p(f"{at}.time_emb_proj.weight"), p(f"{at}.time_emb_proj.bias")
        )
        h = normed(h + moment[:, :, None, None], f"{at}.norm2")
        h = conv(functional.silu(h), f"{at}.conv2")
        x = x if x.shape[1] == h.shape[1] else conv(x, f"{at}.conv_shortcut")
        return attend(x + h, at) if attends else x + h

    x = conv(batch["image"], "conv_in")
    skips = [x]
    x = residual(x, "down_blocks.0.resnets.0", attends=False)
    skips.append(x)
    x = conv(x, "down_blocks.0.downsamplers.0.conv", stride=2)
    skips.append(x)
    x = residual(x, "down_blocks.1.resnets.0", attends=True)
    skips.append(x)
    x = residual(x, "mid_block.resnets.0", attends=True)
    x = residual(x, "mid_block.resnets.1", attends=False)
    for step, attends in enumerate((True, False)):
        for index in range(2):
            joined = torch.cat([x, skips.pop()], dim=1)
            x = residual(joined, f"up_blocks.{step}.resnets.{index}", attends=attends)
        if not step:
            x = conv(functional.interpolate(x, scale_factor=2.0), "up_blocks.0.upsamplers.0.conv")
    made = conv(functional.silu(normed(x, "conv_norm_out")), "conv_out")
    return (made - batch["target"]).square().flatten(1).mean(1).sum()


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def test_a_unet_computes_what_plain_torch_computes() -> None:
    model = randomised(OneProcess(unet(unet_tiny()), dtype=torch.float64))
    batch = {"image": noise(2, 3, 8, 8), "target": noise(2, 3, 8, 8) + 1, "time": torch.tensor([3.0, 40.0]).double()}
    compare(model, batch, plain_unet)


def test_a_diffusion_transformer_computes_what_plain_torch_computes() -> None:
    c = DitConfig(
        name="dit-tiny",
        num_layers=2,
        hidden_size=16,
        num_heads=2,
        patch_size=2,
        latent_size=4,
        num_classes=5,
        frequencies=8,
    )
    model = randomised(OneProcess(dit(c), dtype=torch.float64))
    batch = {
        "latent": noise(2, 4, 4, 4),
        "time": torch.tensor([3.0, 40.0]).double(),
        "label": torch.tensor([1, 4]),
        "target": noise(2, 4, 2, 2, 8),
    }
    compare(model, batch, lambda p, given: plain_dit(p, given, c))
