"""Convolutional networks and single convolutions by backend "gnomon" beside ONNX Runtime, OpenVINO and oneDNN.

    python benchmarks/compiler/convolutions.py [--networks ResNet-50,VGG-16,MobileNetV2] [--rounds 12] [--sizes]

Inference of one image in float32 on one thread with random weights. All peers take turns in one process; milliseconds
of CPU of the process, medians with quartiles. `--sizes`: the convolutions of ResNet-50 that are no single pixels by
each of our kernels and by oneDNN's packed one: the least of the rounds (GFLOP/s of a direct sum) and the largest
distance from the result in double over the largest result.
ONNX Runtime and OpenVINO take part where they are installed (`pip install onnxruntime onnx
onnxscript openvino`). Prints tables.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.compiler.whole_models import models  # noqa: E402
from gnomon.compiler import backend  # noqa: E402
from gnomon.compiler.kernels import convolutions, taps, winograd  # noqa: E402

SIZES = ((3, 64, 224, 7, 2), (64, 64, 56, 3, 1), (128, 128, 56, 3, 2), (128, 128, 28, 3, 1), (256, 256, 28, 3, 2),
         (256, 256, 14, 3, 1), (512, 512, 14, 3, 2), (512, 512, 7, 3, 1))  # fmt: skip
"""Channels, outputs, height and width, window, stride."""


class Inverted(nn.Module):
    """Of MobileNetV2 (Sandler et al. 2018): pixels to more channels, each channel by itself, pixels to fewer."""

    def __init__(self, channels: int, out: int, stride: int, by: int) -> None:
        super().__init__()
        more, act = channels * by, nn.ReLU6
        first = [nn.Conv2d(channels, more, 1, bias=False), nn.BatchNorm2d(more), act()] if by > 1 else []
        each = [nn.Conv2d(more, more, 3, stride, 1, groups=more, bias=False), nn.BatchNorm2d(more), act()]
        self.body = nn.Sequential(*first, *each, nn.Conv2d(more, out, 1, bias=False), nn.BatchNorm2d(out))
        self.adds = stride == 1 and channels == out

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.adds else self.body(x)


def mobilenet() -> nn.Module:
    parts: list[nn.Module] = [nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU6()]
    channels = 32
    rows = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    for by, out, many, stride in rows:
        for n in range(many):
            parts.append(Inverted(channels, out, 1 if n else stride, by))
            channels = out
    parts += [nn.Conv2d(channels, 1280, 1, bias=False), nn.BatchNorm2d(1280), nn.ReLU6()]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, 1000))


def vgg() -> nn.Module:
    """VGG-16 (Simonyan and Zisserman 2015), with one linear layer behind an average in place of three."""
    parts: list[nn.Module] = []
    channels = 3
    for many, out in ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)):
        for _ in range(many):
            parts += [nn.Conv2d(channels, out, 3, padding=1), nn.ReLU()]
            channels = out
        parts.append(nn.MaxPool2d(2))
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))


def resnet() -> nn.Module:
    return next(one.build() for one in models() if one.name == "ResNet-50")


NETWORKS: dict[str, Callable[[], nn.Module]] = {"ResNet-50": resnet, "VGG-16": vgg, "MobileNetV2": mobilenet}


def peers(network: nn.Module, x: Tensor, folder: str) -> dict[str, Callable[[], Any]]:
    """Each peer's call."""
    fast = torch.compile(network, backend="gnomon")
    calls: dict[str, Callable[[], Any]] = {"eager": lambda: network(x), "gnomon": lambda: fast(x)}
    try:
        import onnxruntime
        import openvino
    except ImportError:
        return calls
    path = f"{folder}/model.onnx"
    torch.onnx.export(network, (x,), path, dynamo=True, verbose=False)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    calls["onnxruntime"] = lambda: session.run(None, {name: x.numpy()})
    precision = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32"}
    request = openvino.Core().compile_model(path, "CPU", precision).create_infer_request()
    calls["openvino"] = lambda: request.infer([x.numpy()])
    return calls


def compared(name: str, rounds: int) -> str:
    """A row of the table of networks."""
    torch.manual_seed(0)
    network, x = NETWORKS[name]().eval(), torch.randn(1, 3, 224, 224)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        calls = peers(network, x, folder)
        spent: dict[str, list[float]] = {peer: [] for peer in calls}
        for n in range(rounds + 4):  # kernels are tried in the first
            for peer, call in calls.items():
                began = time.process_time()
                call()
                if n >= 4:
                    spent[peer].append(1e3 * (time.process_time() - began))
    cells, middle = [], {}
    for peer in ("eager", "gnomon", "onnxruntime", "openvino"):
        if peer not in spent:
            cells.append("-")
            continue
        low, middle[peer], high = quantiles(spent[peer], n=4)
        cells.append(f"{middle[peer]:.1f} ({low:.1f}-{high:.1f})")
    others = [middle[peer] for peer in ("onnxruntime", "openvino") if peer in middle]
    better = f"{min(others) / middle['gnomon']:.2f}" if others else "-"
    calls_of = backend.reports[-1].convolutions
    own = sum(one.own_kept for one in calls_of)
    return f"| {name} | {' | '.join(cells)} | {better} | {own} of {len(calls_of)} |"


def of_size(channels: int, outputs: int, side: int, window: int, stride: int, rounds: int) -> str:
    """A row of the table of convolutions."""
    torch.manual_seed(0)
    padding = window // 2
    x = torch.randn(1, channels, side, side).relu().contiguous(memory_format=torch.channels_last)
    weight, bias = torch.randn(outputs, channels, window, window) * (2 / channels) ** 0.5 / window, torch.randn(outputs)
    sizes = ([1, channels, side, side], [stride] * 2, [padding] * 2, [1, 1], 1)
    numbers = (sizes, True, None, False, True)
    calls = {"oneDNN": convolutions.Convolution(*numbers)}
    form = taps.form_of(x.shape, [window] * 2, [stride] * 2, [padding] * 2, [1, 1])
    assert form is not None
    calls["taps"] = convolutions.Tiled(form, outputs, *numbers)
    if (window, stride) == (3, 1):
        for out in winograd.OUTS:
            filtered = winograd.WinogradForm(out, (padding, padding))
            calls[filtered.name] = convolutions.Tiled(filtered, outputs, *numbers)
    least = dict.fromkeys(calls, float("inf"))
    cells: list[str] = []
    with torch.no_grad():
        exact = calls["oneDNN"].aten(x.double(), weight.double(), bias.double())
        for _ in range(rounds):
            for name, call in calls.items():
                began = time.thread_time()
                made = call.run(x, weight, bias)
                least[name] = min(least[name], time.thread_time() - began)
                if len(cells) < len(calls):
                    cells.append(f"{float((made - exact).abs().max() / exact.abs().max()):.1e}")
    flops = 2 * exact.numel() * channels * window * window
    shown = [f"{1e3 * s:.2f} ({flops / s / 1e9:.0f}), {far}" for s, far in zip(least.values(), cells, strict=True)]
    shown += ["-"] * (4 - len(shown))
    return f"| {channels} to {outputs}, {side} x {side}, {window} x {window} / {stride} | {' | '.join(shown)} |"


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default="", help=f"of {', '.join(NETWORKS)}, with commas")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--sizes", action="store_true", help="single convolutions too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in filter(None, options.networks.split(",")):
        print(compared(name, options.rounds), flush=True)
    for one in SIZES if options.sizes else ():
        print(of_size(*one, options.rounds), flush=True)


if __name__ == "__main__":
    main()
