"""Models of `quantize_dynamic` through backend "gnomon" beside eager and ONNX Runtime's own dynamic quantisation.

    python benchmarks/compiler/quantized.py [--only BERT-base,ViT-B] [--layers 12] [--rounds 9] [--write]

Linear layers are in eight bits, their activations rounded in each call: torch's by `torch.ao.quantization
.quantize_dynamic`, ONNX Runtime's by `onnxruntime.quantization.quantize_dynamic` of the same weights. One thread; peers
take turns, each in another order; milliseconds are CPU time, medians and quartiles. `apart`: how far a peer's results
are from those of float32, of their norm. ONNX Runtime takes part where it is installed (`pip install onnxruntime onnx
onnxscript`).
"""

from __future__ import annotations

import argparse
import logging
import os
import random
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
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.compiler.table import commit  # noqa: E402
from benchmarks.compiler.whole_models import Model, models  # noqa: E402
from gnomon.compiler import backend  # noqa: E402

RESULT = Path(__file__).parents[1] / "results" / "compiler_quantized.md"
PEERS = ("eager fp32", "gnomon fp32", "eager int8", "gnomon int8", "onnxruntime fp32", "onnxruntime int8")
WARM = 4
"""Calls before the first that is measured: kernels are tried in the first ones."""


def shortened(model: nn.Module, layers: int) -> nn.Module:
    """The encoder with its first layers only."""
    inner: Any = model.inner
    encoder = (
        inner.encoder if isinstance(getattr(getattr(inner, "encoder", None), "layer", None), nn.ModuleList) else inner
    )
    name = next(name for name, one in encoder.named_children() if isinstance(one, nn.ModuleList))
    setattr(encoder, name, getattr(encoder, name)[:layers])
    return model


def by_onnxruntime(model: nn.Module, inputs: tuple[Tensor, ...]) -> dict[str, Callable[[], Any]]:
    try:
        import onnxruntime
        from onnxruntime.quantization import QuantType, quantize_dynamic
    except ImportError:
        return {}
    calls: dict[str, Callable[[], Any]] = {}
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        plain, small = Path(folder) / "plain.onnx", Path(folder) / "small.onnx"
        torch.onnx.export(model, inputs, str(plain), dynamo=True, verbose=False)
        quantize_dynamic(plain, small, weight_type=QuantType.QInt8)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = torch.get_num_threads()
        for dtype, path in (("fp32", plain), ("int8", small)):
            session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
            given = {one.name: x.numpy() for one, x in zip(session.get_inputs(), inputs, strict=True)}
            calls[f"onnxruntime {dtype}"] = lambda session=session, given=given: torch.from_numpy(
                session.run(None, given)[0]
            )
    logging.disable(logging.NOTSET)
    return calls


def row(of: Model, layers: int, rounds: int) -> str:
    torch.manual_seed(0)
    model = shortened(of.build().eval(), layers)
    inputs = of.inputs(of.batch)
    small = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    torch._dynamo.reset()
    backend.reports.clear()
    fast, fast_small = (torch.compile(one, backend="gnomon") for one in (model, small))
    every = {"eager fp32": model, "gnomon fp32": fast, "eager int8": small, "gnomon int8": fast_small}
    calls: dict[str, Callable[[], Any]] = {name: lambda one=one: one(*inputs) for name, one in every.items()}
    calls |= by_onnxruntime(model, inputs)
    for call in calls.values():
        for _ in range(WARM):
            call()
    wanted = calls["eager fp32"]()
    apart = {name: float((call() - wanted).norm() / wanted.norm()) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    order, shuffled = list(calls), random.Random(0)
    for _ in range(rounds):
        shuffled.shuffle(order)
        for name in order:
            began = time.process_time()
            calls[name]()
            times[name].append(1e3 * (time.process_time() - began))
    cells = [f"{of.name}, {layers} layers"]
    middle = {name: quantiles(each, n=4) for name, each in times.items()}
    for name in PEERS:
        if name in middle:
            low, mid, high = middle[name]
            cells.append(f"{mid:.1f} ({low:.1f}-{high:.1f}), {apart[name]:.1e}")
        else:
            cells.append("-")
    ours = middle["gnomon int8"][1]
    cells += [f"{middle[one][1] / ours:.2f}" if one in middle else "-" for one in ("eager int8", "onnxruntime int8")]
    kept = sum(one.kept for report in backend.reports for one in report.quantized)
    cells.append(f"{kept} of {sum(len(report.quantized) for report in backend.reports)}")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="BERT-base,ViT-B", help="names of models")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--write", action="store_true", help=f"to {RESULT}")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    heads = ("model", *PEERS, "eager int8 / gnomon int8", "onnxruntime int8 / gnomon int8", "layers by our kernel")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    print("\n".join(lines))
    with torch.no_grad():
        for of in models():
            if of.name in options.only.split(","):
                lines.append(row(of, options.layers, options.rounds))
                print(lines[-1], flush=True)
    asked = " ".join(["python benchmarks/compiler/quantized.py", *sys.argv[1:]])
    what = f"{date.today()}, `{asked}`, commit {commit()}, torch {torch.__version__}, one thread, load average "
    what += (
        f"{os.getloadavg()[0]:.1f} at the end. Milliseconds of CPU: median (quartiles), and how far results are from "
    )
    what += "float32's, of their norm."
    if options.write:
        RESULT.write_text("\n".join(["# Dynamically quantised models", "", what, "", *lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
