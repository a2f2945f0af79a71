"""What bitsandbytes makes of some weights, printed as JSON: what `test_nf4` compares with.

    pip install bitsandbytes==0.50.2
    PYTHONPATH=src:tests python -m runtime.nf4_bitsandbytes > tests/runtime/nf4_bitsandbytes.json

Its build for processors rounds scales of scales by a table of 65,536 entries, its kernels for GPUs to the nearest; here
they are rounded to the nearest by its own fallback, and standard error says how many of the table's are others.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
import sys
from typing import Any

import torch
from torch import Tensor

CASES = {"small": ((24, 64), "float32"), "large": ((384, 320), "float32"), "half": ((48, 64), "bfloat16")}


def numbers(*shape: int) -> Tensor:
    """Weights whose blocks differ in size, exact in float32."""
    i = torch.arange(torch.Size(shape).numel(), dtype=torch.int64)
    small = ((i * i * 7 + i * 131) % 2003 - 1001).float() / 8192
    return (small * (1 + (i // 64 % 37).float() / 16)).view(shape)


def bytes_of(x: Tensor) -> bytes:
    """As they lie in memory."""
    return bytes(x.contiguous().view(torch.uint8).numpy().tobytes())


def digest(x: Tensor) -> str:
    """A hash of these."""
    return hashlib.sha256(bytes_of(x)).hexdigest()


def made(bnb: Any, name: str) -> dict[str, Any]:
    """Hashes of one case; of the small one all tensors, and hashes of what codes stand for."""
    shape, dtype = CASES[name]
    ops, functions = torch.ops.bitsandbytes, bnb.functional
    weight = numbers(*shape).to(getattr(torch, dtype))
    codes, state = functions.quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
    _, largest = ops.quantize_4bit.default(weight, 64, "nf4", torch.uint8)
    mean = largest.mean()
    scales, groups = ops.quantize_blockwise.default((largest - mean).double(), state.state2.code, 256)
    print(f"{name}: {int((state.absmax != scales).sum())} of {scales.numel()} scales differ", file=sys.stderr)
    state.absmax, state.state2.absmax, state.offset = scales, groups, mean
    tensors = {"": codes, **state.as_dict(packed=True)}
    wide = functions.dequantize_4bit(codes, state)
    found = {"shape": shape, "dtype": dtype, "codes": digest(codes), "scales": digest(scales), "wide": digest(wide)}
    found |= {"groups": groups.tolist(), "mean": float(mean)}
    if name == "small":
        found["maps"] = {key: digest(x) for key, x in tensors.items() if "map" in key}
        found["tensors"] = {
            key: (str(x.dtype).removeprefix("torch."), list(x.shape), base64.b64encode(bytes_of(x)).decode())
            for key, x in tensors.items()
            if "map" not in key
        }
    return found


if __name__ == "__main__":
    bnb = importlib.import_module("bitsandbytes")
    print(json.dumps({"bitsandbytes": bnb.__version__, **{name: made(bnb, name) for name in CASES}}, indent=1))
