"""Winograd's convolution with deep reuse (DREW) beside Winograd's and oneDNN's direct one: whether it pays here.

    python benchmarks/lowbit/drew.py [--rounds 5] [--peers FOLDER] [--write]

F(2 x 2, 3 x 3): each 4 x 4 tile is transformed to 16 vectors of channels, which meet 16 matrices. Vectors (or parts of
them, `length` channels long) whose `bits` random projections have the same signs are put together, their mean is
multiplied once, and the product is gathered; a cluster holds the tiles of all images of the batch. One thread,
float32; milliseconds of CPU of a convolution, medians in turn. `left`: distinct vectors over all; `apart`: the norm of
the difference over the results'. The network is trained here to tell crops of five photographs apart (scikit-image's,
which is installed into FOLDER), and its accuracy is measured with reuse in all convolutions but the first.
Source: Ruofan Wu et al., DREW (2022).
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
from preview import network
from torch import Tensor, nn
from torch.nn import functional as F

from gnomon.compiler.build import kernel_of
from gnomon.compiler.kernels import linear
from gnomon.compiler.machine import this_machine

RESULT = Path(__file__).parents[1] / "results" / "lowbit_drew.md"
FORMULA = Path(__file__).with_name("drew.cpp")
PICTURES = ("astronaut", "chelsea", "coffee", "hubble_deep_field", "immunohistochemistry")
SIDE, BATCH = 48, 8
SETTINGS = ((0, 8), (0, 12), (0, 16), (32, 8), (32, 12), (16, 8), (16, 12))
"""(channels of a part, 0 for all; projections)."""
G = torch.tensor([[1.0, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])


class Call(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_int64) for name in "what images high wide channels rows bits".split()],
        ("x", ctypes.c_void_p),
        ("x_row", ctypes.c_int64),
        *[(name, ctypes.c_void_p) for name in "signs table cluster".split()],
        ("adds", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("out_row", ctypes.c_int64),
        ("count", ctypes.c_int64),
    ]


def kernel() -> Callable[[ctypes.Array[ctypes.c_int64]], int]:
    function = kernel_of(FORMULA.read_text(encoding="utf-8"), ctypes.c_void_p)
    assert function is not None
    return function


class Winograd:
    """A convolution of 3 x 3 with a border of 1, by tiles."""

    def __init__(self, weight: Tensor, length: int = 0, bits: int = 0) -> None:
        """bits: 0 for no reuse."""
        self.matrices = torch.einsum("ia,ncab,jb->ijnc", G, weight, G).reshape(16, *weight.shape[:2]).contiguous()
        self.length, self.bits = length or weight.shape[1], bits
        self.planes = torch.randn(weight.shape[1] // self.length, bits, self.length)
        self.left = 0.0

    def __call__(self, x: Tensor) -> Tensor:
        """x (images, channels, high, wide), both even, channels last."""
        images, channels, high, wide = x.shape
        outputs, tiles = self.matrices.shape[1], images * high * wide // 4
        padded = F.pad(x, (1, 1, 1, 1)).contiguous(memory_format=torch.channels_last)
        vectors, products = torch.empty(16, tiles, channels), torch.empty(16, tiles, outputs)
        call = Call(what=0, images=images, high=high + 2, wide=wide + 2, channels=channels, x=padded.data_ptr(),
                    out=vectors.data_ptr())  # fmt: skip
        kernel()(ctypes.addressof(call))
        found = 0
        for at in range(16):
            if not self.bits:
                products[at] = linear.linear(vectors[at], self.matrices[at])
            else:
                found += self.reused(vectors[at], self.matrices[at], products[at])
        self.left = found / (16 * tiles * len(self.planes))
        out = torch.empty((images, outputs, high, wide), memory_format=torch.channels_last)
        call = Call(what=1, images=images, high=high, wide=wide, channels=outputs, x=products.data_ptr(),
                    out=out.data_ptr())  # fmt: skip
        kernel()(ctypes.addressof(call))
        return out

    def reused(self, vectors: Tensor, matrix: Tensor, to: Tensor) -> int:
        """Products of one of the 16 places; how many were multiplied."""
        rows, length, found = len(vectors), self.length, 0
        table, cluster = torch.empty(1 << self.bits, dtype=torch.int32), torch.empty(rows, dtype=torch.int32)
        means = torch.empty(rows * length + rows)
        for part, planes in enumerate(self.planes):
            mine = vectors[:, part * length : (part + 1) * length]
            signs = linear.linear(mine, planes)
            assert signs is not None
            call = Call(what=2, channels=length, rows=rows, bits=self.bits, x=mine.data_ptr(), x_row=vectors.stride(0),
                        signs=signs.data_ptr(), table=table.data_ptr(), cluster=cluster.data_ptr(),
                        out=means.data_ptr(), out_row=length)  # fmt: skip
            kernel()(ctypes.addressof(call))
            few = means[: call.count * length].view(-1, length)
            products = linear.linear(few, matrix[:, part * length : (part + 1) * length])
            assert products is not None
            found += call.count
            call = Call(what=3, channels=to.shape[1], rows=rows, x=products.data_ptr(), x_row=to.shape[1],
                        cluster=cluster.data_ptr(), adds=part > 0, out=to.data_ptr(), out_row=to.stride(0))  # fmt: skip
            kernel()(ctypes.addressof(call))
        return found


def pictures(folder: Path) -> list[Tensor]:
    """(3, high, wide) each, from 0 to 1."""
    python, held = folder / "bin" / "python", folder / "pictures.npz"
    if not held.is_file():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", "scikit-image"], check=True)
        read = f"{{n: getattr(d, n)() for n in {PICTURES!r}}}"
        text = f"import numpy, skimage.data as d; numpy.savez({str(held)!r}, **{read})"
        subprocess.run([str(python), "-c", text], check=True)
    return [torch.from_numpy(one).permute(2, 0, 1).float() / 255 for one in np.load(held).values()]


def crops(images: list[Tensor], count: int) -> tuple[Tensor, Tensor]:
    labels = torch.randint(0, len(images), (count,))
    out = torch.empty(count, 3, SIDE, SIDE)
    for n, label in enumerate(labels.tolist()):
        image = images[label]
        y, x = (int(torch.randint(0, size - SIDE, ())) for size in image.shape[1:])
        out[n] = image[:, y : y + SIDE, x : x + SIDE]
    mean = out.mean((1, 2, 3), keepdim=True)  # told apart by what is in them, and not by how bright they are
    return (out - mean) / (out - mean).std((1, 2, 3), keepdim=True), labels


def trained(images: list[Tensor], steps: int) -> nn.Sequential:
    model = network([64, 64, 128, 128], ".p.p")
    adam = torch.optim.Adam(model.parameters(), 2e-3)
    for _ in range(steps):
        batch, labels = crops(images, 16)
        loss = F.cross_entropy(model(batch), labels)
        adam.zero_grad()
        loss.backward()
        adam.step()
    return model.eval()


def with_reuse(model: nn.Sequential, length: int, bits: int, x: Tensor) -> Tensor:
    seen = 0
    for layer in model:
        if isinstance(layer, nn.Conv2d) and (seen := seen + 1) > 1:
            assert layer.bias is not None
            x = Winograd(layer.weight, length, bits)(x) + layer.bias[:, None, None]
        else:
            x = layer(x)
    return x


def timed(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Medians in milliseconds of CPU."""
    took: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.thread_time()
            call()
            took[name].append(1e3 * (time.thread_time() - start))
    return {name: median(one) for name, one in took.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", type=Path, default=Path(tempfile.gettempdir()) / "gnomon_drew")
    parser.add_argument("--write", action="store_true", help=f"to {RESULT.name}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images = pictures(options.peers)
    model = trained(images, 24)
    lines = [
        "# Winograd with deep reuse\n",
        f"{date.today()}, `python {' '.join(['benchmarks/lowbit/drew.py', *sys.argv[1:]])}`, "
        f"{this_machine().model}, one thread, torch {torch.__version__}, load average {os.getloadavg()[0]:.1f}. "
        f"Batches of {BATCH} crops of {SIDE} x {SIDE}. Milliseconds of CPU of a convolution; speed beside oneDNN's "
        "direct one; distinct vectors over all; the norm of the difference over the results'.\n",
        "| convolution | form | ms | direct / it | left | apart |",
        "|---|---|---|---|---|---|",
    ]
    with torch.inference_mode():
        x, _ = crops(images, BATCH)
        seen = 0
        for layer in model:
            if isinstance(layer, nn.Conv2d) and (seen := seen + 1) > 1:
                mine, weight = x.contiguous(memory_format=torch.channels_last), layer.weight
                direct = partial(torch.ops.mkldnn._convolution_pointwise, mine, weight, None, [1, 1], [1, 1], [1, 1], 1,
                                 "none", [], "")  # fmt: skip
                forms = {"Winograd": Winograd(weight)}
                for length, bits in SETTINGS:
                    if length < weight.shape[1]:
                        part = f"parts of {length}" if length else "whole"
                        forms[f"with reuse, {part}, {bits} bits"] = Winograd(weight, length, bits)
                took = timed({"direct": direct, **{k: partial(f, mine) for k, f in forms.items()}}, options.rounds)
                exact = direct()
                size = f"{weight.shape[1]} -> {weight.shape[0]} at {x.shape[2]} x {x.shape[3]}"
                for name, ms in took.items():
                    apart = (
                        "" if name == "direct" else f"{float((forms[name](mine) - exact).norm() / exact.norm()):.2g}"
                    )
                    left = f"{forms[name].left:.3f}" if "reuse" in name else ""
                    lines.append(f"| {size} | {name} | {ms:.2f} | {took['direct'] / ms:.2f} | {left} | {apart} |")
            x = layer(x)
        tests = [crops(images, BATCH) for _ in range(12)]

        def right(run: Callable[[Tensor], Tensor]) -> float:
            return sum(int((run(x).argmax(1) == y).sum()) for x, y in tests) / (len(tests) * BATCH)

        lines += ["", "| network | accuracy |", "|---|---|", f"| exact | {100 * right(model):.1f} % |"]
        lines += [
            f"| with reuse, {f'parts of {n}' if n else 'whole'}, {bits} bits | "
            f"{100 * right(partial(with_reuse, model, n, bits)):.1f} % |"
            for n, bits in SETTINGS
        ]
    print("\n".join(lines))
    if options.write:
        RESULT.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
