"""Small models through backend "gnomon" beside eager, Inductor and ONNX Runtime: what a call costs beside its kernels.

    python benchmarks/compiler/small.py [--seconds 5] [--inductor] [--write]

One thread. Peers take turns of three calls; microseconds are the median and the tenth percentile, which other work on
the machine disturbs less. `dynamo`: the same model through a backend that gives a finished result, which is what guards
and dispatch cost. `saved`: by `gnomon.save` and `gnomon.load`, as the other runtimes are exported, without Dynamo.
ONNX Runtime and silero-vad take part where they are installed (`pip install onnxruntime onnx onnxscript silero-vad`).
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import date
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd

sys.path.insert(0, str(Path(__file__).parents[2]))
import gnomon  # noqa: E402
from benchmarks.compiler.whole_models import silero  # noqa: E402
from gnomon.compiler import backend  # noqa: E402

RESULT = Path(__file__).parents[1] / "results" / "compiler_small.md"
TURN, WARM = 3, 5


class Residual(nn.Module):
    """Four blocks of norm, linear, GELU, linear, with what came before added."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))
        self.up = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(4))
        self.down = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            x = x + down(nn.functional.gelu(up(norm(x))))
        return x


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1), nn.Sigmoid())


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(16, 32, 3, stride=2), nn.ReLU(), nn.Conv1d(32, 32, 3, stride=2), nn.ReLU(), nn.Flatten(),
        nn.Linear(96, 8),
    )  # fmt: skip


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "perceptron, 1 row": (perceptron, (1, 13)),
    "perceptron, 64 rows": (perceptron, (64, 13)),
    "4 residual blocks, 1 row": (Residual, (1, 64)),
    "4 residual blocks, 32 rows": (Residual, (32, 64)),
    "2 convolutions, linear": (convolutions, (1, 16, 17)),
    "silero-vad": (silero, (1, 512)),
}


def dispatched(result: Any) -> Callable[..., Any]:
    """A backend whose graph gives a finished result."""

    def compiler(*_: Any) -> Any:
        def call(args: list[Any]) -> Any:
            args.clear()
            return (result,)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    return aot_autograd(fw_compiler=compiler, inference_compiler=compiler)  # type: ignore[no-any-return]


def by_onnxruntime(model: nn.Module, x: torch.Tensor) -> Callable[[], Any] | None:
    try:
        import onnxruntime
    except ImportError:
        return None
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (x,), str(Path(folder) / "model.onnx"), dynamo=True, verbose=False)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        session = onnxruntime.InferenceSession(
            str(Path(folder) / "model.onnx"), options, providers=["CPUExecutionProvider"]
        )
    logging.disable(logging.NOTSET)
    [given] = session.get_inputs()
    return lambda: session.run(None, {given.name: x.numpy()})


def by_saved(model: nn.Module, x: torch.Tensor) -> Callable[[], Any]:
    with tempfile.TemporaryDirectory() as folder:
        loaded = gnomon.load(gnomon.save(model, (x,), Path(folder) / "model"))
    return lambda: loaded(x)


def row(name: str, seconds: float, with_inductor: bool) -> str:
    build, shape = MODELS[name]
    torch.manual_seed(0)
    model, x = build().eval(), torch.randn(shape)
    backend.reports.clear()
    calls: dict[str, Callable[[], Any] | None] = {"eager": lambda: model(x)}
    which = {"dynamo": dispatched(model(x)), "gnomon": "gnomon", **({"inductor": "inductor"} if with_inductor else {})}
    for peer, of in which.items():
        torch._dynamo.reset()
        fast = torch.compile(model, backend=of)
        for _ in range(WARM):
            fast(x)
        calls[peer] = lambda fast=fast: fast(x)
    compiled = list(backend.reports)
    calls["saved"] = by_saved(model, x)
    for _ in range(WARM):
        calls["saved"]()
    calls["onnxruntime"] = by_onnxruntime(model, x)
    taken: dict[str, list[float]] = {peer: [] for peer, call in calls.items() if call is not None}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for peer, times in taken.items():
            call = calls[peer]
            assert call is not None
            for _ in range(TURN):
                start = time.perf_counter()
                call()
                times.append(time.perf_counter() - start)
    cells = [name]
    for peer in ("eager", "gnomon", "saved", "dynamo", "inductor", "onnxruntime"):
        if peer not in taken:
            cells.append("-")
            continue
        tenths = quantiles(taken[peer], n=10)
        cells.append(f"{tenths[4] * 1e6:.0f} ({tenths[0] * 1e6:.0f})")
    steps = [run.count for report in compiled for run in report.runs if run.kept]
    return f"| {' | '.join(cells)} | {', '.join(map(str, steps)) or '-'} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="of a row")
    parser.add_argument("--inductor", action="store_true")
    parser.add_argument("--write", action="store_true", help=f"to {RESULT}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        "| model | eager | gnomon | saved | dynamo | inductor | ONNX Runtime | steps of a call |",
        "|---" * 8 + "|",
    ]
    print("\n".join(lines))
    with torch.no_grad():
        for name in MODELS:
            try:
                lines.append(row(name, options.seconds, options.inductor))
            except ImportError as error:
                lines.append(f"| {name} | left out: {error} | | | | | | |")
            print(lines[-1], flush=True)
    if options.write:
        asked = f"--seconds {options.seconds:g}{' --inductor' if options.inductor else ''} --write"
        what = f"{date.today()}, `python benchmarks/compiler/small.py {asked}`, torch {torch.__version__}, one thread."
        how = "Microseconds: median (tenth percentile), peers by turns."
        head = ["# Small models: what a call costs", "", what, how, ""]
        RESULT.write_text("\n".join([*head, *lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
