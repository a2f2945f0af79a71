"""Gradients that are freed after each step and made layer by layer in its backward, against torch itself.

A plain loop (`zero_grad(set_to_none=True)`) is run on the CPU under a mode that counts the storages alive; a job of the
same sizes is predicted as PyTorch's FSDP record has it, on one rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gnomon import capture
from gnomon.hardware import parse_cluster
from gnomon.plans import Plan, Precision, Schedule, Workload
from gnomon.prediction import Prediction, predict
from gnomon.software import stack

FP32 = Precision(param="fp32", compute="fp32", grad="fp32", reduce="fp32", master="none", states="fp32")
WIDTH, LAYERS, ROWS, CLASSES = 256, 6, 512, 1000


class Net(nn.Module):
    """Wide and deep enough that gradients and activations weigh about the same."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.cross_entropy(self.head(x), labels)


class Alive(TorchDispatchMode):
    """The most bytes alive at once of storages that ops make."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.seen: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in args if isinstance(t, torch.Tensor)}
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and (key := tensor.untyped_storage()._cdata) not in self.seen | {
                one: 0 for one in given
            }:
                self.seen[key] = tensor.untyped_storage().nbytes()
                self.now += self.seen[key]
                self.most = max(self.most, self.now)
                weakref.finalize(tensor.untyped_storage(), lambda key=key: self.gone(key))
        return out

    def gone(self, key: int) -> None:
        self.now -= self.seen.pop(key, 0)


def measured(microbatches: int) -> int:
    """Bytes at the peak of a step after the first, with what stays from step to step."""
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    batches = [(torch.randn(ROWS, WIDTH), torch.randint(0, CLASSES, (ROWS,))) for _ in range(microbatches)]

    def step() -> None:
        for x, labels in batches:
            net(x, labels).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    alive = Alive()
    with alive:
        step()
    held = sum(p.numel() * p.element_size() for p in net.parameters())
    return 3 * held + alive.most  # parameters and two states


@pytest.fixture(scope="module")
def predicted() -> Callable[[int], Prediction]:
    graph = capture(Net(), {"x": torch.randn(ROWS, WIDTH), "labels": torch.zeros(ROWS, dtype=torch.int64)})

    def made(microbatches: int) -> Prediction:
        plan = Plan(schedule=Schedule(micro_batch_size=ROWS), precision=FP32)
        work = Workload(global_batch_size=ROWS * microbatches, seq_len=1)
        return predict(graph, parse_cluster("1x1xa100-sxm-80gb"), plan, work, stack("pytorch-fsdp"))

    return made


@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_step_holds_what_torch_holds(microbatches: int, predicted: Callable[[int], Prediction]) -> None:
    by_class = predicted(microbatches).tightest.by_class
    tensors = sum(size for name, size in by_class.items() if name not in ("workspace", "overhead"))
    inputs = ROWS * (WIDTH * 4 + 8) * microbatches  # of the step, which the loop made before
    assert tensors - inputs == pytest.approx(measured(microbatches), rel=0.03)


def test_one_microbatch_has_its_activations_before_any_gradient(predicted: Callable[[int], Prediction]) -> None:
    one, three = (predicted(count).tightest.by_class["gradients"] for count in (1, 3))
    whole = 4 * sum(p.numel() for p in Net().parameters())
    assert one < 0.3 * whole and three == whole
