"""Convolutions with pooling by a preview in eight bits (SeerNet) beside exact ones: time, and what it costs.

    python benchmarks/lowbit/preview.py [--rounds 7] [--write]

One thread, float32. `VGG-11` (random weights, 224 x 224) and `Conv-4` (64 channels, a pooling after each convolution,
84 x 84), which is trained here for a few steps on gratings of ten directions in noise and tested on 2,000 others.
Milliseconds of CPU of a call, in turn in one process: median (least-most).
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from kernels import measured
from torch import nn
from torch.nn import functional as F

from gnomon.compiler import backend
from gnomon.compiler.machine import this_machine

RESULT = Path(__file__).parents[1] / "results" / "lowbit_preview.md"
CLASSES = 10


def network(outputs: list[int], pooled: str) -> nn.Sequential:
    layers, before = list[nn.Module](), 3
    for after, pool in zip(outputs, pooled, strict=True):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] * (pool == "p")
        before = after
    for layer in layers:
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, CLASSES))


def gratings(count: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images (count, 3, side, side) and the directions of their waves."""
    labels = torch.randint(0, CLASSES, (count,))
    angle = (labels + 0.8 * torch.rand(count)) * math.pi / CLASSES
    y, x = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    wave = 0.3 + 0.5 * torch.rand(count)
    phase = 2 * math.pi * torch.rand(count)
    along = x * angle.cos()[:, None, None] + y * angle.sin()[:, None, None]
    image = (wave[:, None, None] * along + phase[:, None, None]).sin()[:, None]
    return image * torch.rand(count, 3, 1, 1) + 1.2 * torch.randn(count, 3, side, side), labels


def trained(model: nn.Module, side: int, steps: int) -> None:
    adam = torch.optim.Adam(model.parameters(), 2e-3)
    for _ in range(steps):
        images, labels = gratings(32, side)
        loss = F.cross_entropy(model(images), labels)
        adam.zero_grad()
        loss.backward()
        adam.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", action="store_true", help=f"to {RESULT.name}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    conv4 = network([64] * 4, "pppp")
    trained(conv4, 42, 60)
    vgg = network([64, 128, 256, 256, 512, 512, 512, 512], "pp-p-p-p")
    lines = [
        "# Convolutions by a preview\n",
        f"{date.today()}, `python {' '.join(['benchmarks/lowbit/preview.py', *sys.argv[1:]])}`, "
        f"{this_machine().model}, one thread, torch {torch.__version__}, load average {os.getloadavg()[0]:.1f}. "
        "Milliseconds of CPU of a call: median (least-most). Apart: the norm of the logits' difference over theirs.\n",
        "| | eager | exact | by preview | exact / preview | apart | accuracy exact, by preview | same class |",
        "|---|---|---|---|---|---|---|---|",
    ]
    with torch.no_grad():
        for name, model, batch, side, test in (("Conv-4", conv4, 8, 84, 2000), ("VGG-11", vgg, 1, 224, 16)):
            model.eval()
            torch._dynamo.reset()
            backend.reports.clear()
            images, _ = gratings(batch, side)
            exact: Any = torch.compile(model, backend="gnomon")
            near: Any = torch.compile(model, backend="gnomon", options={"preview": True})
            for _ in range(4):
                exact(images), near(images)
            calls = {"eager": partial(model, images), "exact": partial(exact, images), "near": partial(near, images)}
            took = measured(calls, options.rounds, 0.02)
            right, many, same, apart, norm = [0, 0], 0, 0, 0.0, 0.0
            for _ in range(test // batch):
                x, labels = gratings(batch, side)
                a, b = exact(x), near(x)
                right[0] += int((a.argmax(1) == labels).sum())
                right[1] += int((b.argmax(1) == labels).sum())
                same += int((a.argmax(1) == b.argmax(1)).sum())
                many += batch
                apart, norm = apart + float((a - b).square().sum()), norm + float(a.square().sum())
            accuracy = (
                f"{100 * right[0] / many:.2f} %, {100 * right[1] / many:.2f} %" if name == "Conv-4" else "not trained"
            )
            cells = [f"{median(one):.1f} ({min(one):.1f}-{max(one):.1f})" for one in took.values()]
            ratio = median(b / a for a, b in zip(took["near"], took["exact"], strict=True))
            lines.append(
                f"| {name}, {batch} of {side} x {side} | {' | '.join(cells)} | {ratio:.2f} | "
                f"{100 * math.sqrt(apart / norm):.3f} % | {accuracy} | {100 * same / many:.2f} % of {many} |"
            )
            lines_of = [
                f"| {one.image[1]} channels of {one.image[2]} x {one.image[3]} | | {1e3 * one.times[1]:.1f} | "
                f"{1e3 * one.times[0]:.1f} | {one.times[1] / one.times[0]:.2f} | {100 * (one.apart or 0):.3f} % | "
                f"{'kept' if one.kept else 'exact'} | |"
                for one in backend.reports[-1].previews
            ]
            lines += lines_of
    print("\n".join(lines))
    if options.write:
        RESULT.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
