"""Small modules in the styles that people write: nanoGPT's, one with branches on values, one with a convolution."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.c_attn, self.c_proj, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in self.c_attn(x).split(c, dim=2))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class Rows(nn.Module):
    """As GPT-2's `Conv1D`: a linear whose weight is (in, out)."""

    def __init__(self, wide: int, out: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(wide, out) * wide**-0.5), nn.Parameter(torch.zeros(out))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2, self.attn = nn.LayerNorm(width), nn.LayerNorm(width), Attention(width, heads)
        self.up, self.down = Rows(width, 4 * width), Rows(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.down(functional.gelu(self.up(self.ln_2(x))))


class NanoGPT(nn.Module):
    """As nanoGPT: learned positions, a head tied to the table, the loss inside."""

    def __init__(self, width: int = 32, heads: int = 4, layers: int = 3, vocab: int = 65, positions: int = 64) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(positions, width)
        self.h = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.h:
            x = layer(x)
        logits = self.lm_head(self.ln_f(x))
        return functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


class Branching(nn.Module):
    """Python looks at a value of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if x.sum().item() > 0 else self.b(x)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return 3 * grad * ctx.saved_tensors[0]


class Custom(nn.Module):
    """Its own backward is not that of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return Square.apply(self.a(x))  # type: ignore[no-any-return]


class Convolved(nn.Module):
    """A stem, residual blocks in a Sequential, in-place activations, a running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(*(self._block() for _ in range(2)))
        self.head = nn.Linear(8, 10)

    @staticmethod
    def _block() -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(image)).mean((2, 3)))
