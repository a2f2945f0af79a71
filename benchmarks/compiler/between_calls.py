"""silero-vad, a call by what ran before it: with the caches full of it, or of something else.

`python benchmarks/compiler/between_calls.py [--turns 250]` (needs `pip install onnxruntime onnx onnxscript silero-vad`)

Prints CPU microseconds of a call on one thread of `gnomon.load`'s model, of `torch.compile`'s by backend "gnomon", and
of ONNX Runtime's session, which take turns: calls one after another (of 40 turns of 50), an eager call of the model
before each, and an eager call, a product of 1,024 x 1,024 and a pass over 16 MB before each. In the third case weights,
code and Dynamo's guards come from memory, as between the calls of a larger program. Leaves out other models (`small`).
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import quantiles

import torch

import gnomon

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.compiler.small import by_onnxruntime  # noqa: E402
from benchmarks.compiler.whole_models import silero  # noqa: E402

CALLS, TURNS = 50, 40
"""Calls one after another in a turn, and turns."""


def shown(title: str, seconds: dict[str, list[float]]) -> None:
    """Prints least, quartiles and median of each peer in microseconds."""
    print(title)
    for name, values in seconds.items():
        low, middle, high = (1e6 * value for value in quantiles(values, n=4))
        print(f"  {name:14} least {1e6 * min(values):5.0f}  median {middle:5.0f}  quartiles {low:.0f}-{high:.0f}")


def main() -> None:
    """The three cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=250, help="of the cases with something in between")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, x = silero().eval(), torch.randn(1, 512)
    square, large = torch.randn(1024, 1024), torch.randn(4 << 20)
    with torch.no_grad(), tempfile.TemporaryDirectory() as name:
        gnomon.save(model, (x,), Path(name) / "m")
        loaded, compiled = gnomon.load(Path(name) / "m"), torch.compile(model, backend="gnomon")
        for _ in range(80):  # kernels are tried in the first calls
            torch.testing.assert_close(compiled(x), model(x))
            torch.testing.assert_close(loaded(x), model(x))
        session = by_onnxruntime(model, x)
        if session is None:
            raise SystemExit("ONNX Runtime is not installed: pip install onnxruntime onnx onnxscript")
        peers: dict[str, Callable[[], object]] = {
            "saved": lambda: loaded(x),
            "torch.compile": lambda: compiled(x),
            "ONNX Runtime": session,
        }
        seconds: dict[str, list[float]] = {peer: [] for peer in peers}
        for _ in range(TURNS):
            for peer, call in peers.items():
                begin = time.process_time()
                for _ in range(CALLS):
                    call()
                seconds[peer].append((time.process_time() - begin) / CALLS)
        shown("one after another", seconds)
        between: dict[str, Callable[[], object]] = {
            "an eager call before each": lambda: model(x),
            "eager, a product and 16 MB before each": lambda: (model(x), square @ square, large.add(1)),
        }
        rng = random.Random(0)
        for title, before in between.items():
            seconds = {peer: [] for peer in peers}
            for _ in range(options.turns):
                for peer in rng.sample(sorted(peers), len(peers)):
                    before()
                    begin = time.process_time()
                    peers[peer]()
                    seconds[peer].append(time.process_time() - begin)
            shown(title, seconds)


if __name__ == "__main__":
    main()
