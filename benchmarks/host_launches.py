"""Host time of a launch forward and backward: a Megatron layer whose tensors are so small that only the host works.

    python benchmarks/host_launches.py [--repeats 400]

Four layers as vTrain's gpt_modeling.py and Megatron-LM of 2022 have them (norm, softmax and GELU as autograd Functions
in Python, bias and dropout and residual scripted), hidden size 16, 8 tokens, on one thread of a CPU. The least of the
repeats is printed, as launches of Gnomon's price of such a layer share it: 13 forward, 27 backward. Needs torch. Leaves
out what a CUDA launch adds to both alike.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch import Tensor, nn

HIDDEN, HEADS, TOKENS, LAYERS = 16, 2, 8, 4
FORWARD, BACKWARD = 13, 27
"""Launches of a layer without recompute, collectives apart: `LayerPrice` of stack vtrain."""


class Passed(torch.autograd.Function):
    """Where a tensor-parallel collective would be."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


class Norm(torch.autograd.Function):
    """LayerNorm as apex binds it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        out, mean, rstd = torch.native_layer_norm(x, (HIDDEN,), weight, bias, 1e-5)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, weight, bias, mean, rstd = ctx.saved_tensors
        wanted = [True, True, True]
        return torch.ops.aten.native_layer_norm_backward(grad, x, (HIDDEN,), mean, rstd, weight, bias, wanted)


class Softmax(torch.autograd.Function):
    """Megatron's fused softmax."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = torch.softmax(x, -1)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (out,) = ctx.saved_tensors
        result: Tensor = torch.ops.aten._softmax_backward_data(grad, out, -1, torch.float32)
        return result


class BiasGelu(torch.autograd.Function):
    """Its bias and GELU: one kernel on a GPU, so no more than one op here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, bias)
        return x + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, _ = ctx.saved_tensors
        grad = grad * x
        return grad, grad


def add_dropped(x: Tensor, bias: Tensor, residual: Tensor, p: float) -> Tensor:
    return residual + torch.nn.functional.dropout(x + bias, p=p, training=True)


class Layer(nn.Module):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2))
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.dropout, self.add = nn.Dropout(0.1), torch.jit.script(add_dropped)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.qkv(Passed.apply(Norm.apply(x, self.norms[0].weight, self.norms[0].bias)))
        q, k, v = mixed.view(TOKENS, 1, HEADS, -1).split(HIDDEN // HEADS, -1)
        q, k, v = (part.contiguous().view(TOKENS, HEADS, -1).transpose(0, 1) for part in (q, k, v))
        scores = torch.baddbmm(torch.empty(HEADS, TOKENS, TOKENS), q, k.transpose(1, 2), beta=0.0, alpha=0.3)
        context = torch.bmm(self.dropout(Softmax.apply(scores)), v).transpose(0, 1).contiguous()
        attended = Passed.apply(nn.functional.linear(context.view(TOKENS, 1, HIDDEN), self.out.weight))
        x = self.add(attended, self.out.bias.expand_as(x), x, 0.1)
        inner = Passed.apply(Norm.apply(x, self.norms[1].weight, self.norms[1].bias))
        inner = BiasGelu.apply(nn.functional.linear(inner, self.up.weight), self.up.bias)
        inner = Passed.apply(nn.functional.linear(inner, self.down.weight))
        result: Tensor = self.add(inner, self.down.bias.expand_as(x), x, 0.1)
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=400)
    options = parser.parse_args()
    torch.set_num_threads(1)
    layers, forward, backward = nn.Sequential(*(Layer() for _ in range(LAYERS))), [], []
    for repeat in range(options.repeats):
        x = torch.randn(TOKENS, 1, HIDDEN, requires_grad=True)
        begun = time.perf_counter()
        y = layers(x)
        done, grad = time.perf_counter(), torch.ones_like(y)
        again = time.perf_counter()
        y.backward(grad)
        if repeat >= options.repeats // 8:
            forward.append(done - begun)
            backward.append(time.perf_counter() - again)
    there, back = (1e6 * min(times) / LAYERS for times in (forward, backward))
    ratio = there / FORWARD / (back / BACKWARD)
    print(f"torch {torch.__version__}: a layer forward {there:.0f} us, backward {back:.0f} us;", end=" ")
    print(f"a launch forward costs {ratio:.2f} of one backward")


if __name__ == "__main__":
    main()
