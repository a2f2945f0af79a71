"""Holds the kernels of every instruction set to the widened weight: all forms, random sizes with tails, odd groups.

    python benchmarks/lowbit/forms.py [--sets avx512,avx2,generic] [--sizes 6]

`tests/compiler/test_stored.py` has a sample. A line a form: the largest difference, relative to the largest result.
"""

from __future__ import annotations

import argparse
import random

import torch

from gnomon.compiler.kernels import lanes, stored
from gnomon.compiler.machine import has_features
from gnomon.storage.names import storage_of

CODES = (
    "int8 int8-g32 int8-g12-zeros int4-g8 int4-g24 int4-g64 int4-g32-zeros int3-g32 int3-g40-zeros "
    "int2-g16 int2-g48-zeros ternary-g64"
).split()
NUMBERS = "bf16 int3-g16 int4-g64 int4-g24 int4-g32-zeros int2-g32 ternary-g64 nf4".split()
FORMS: tuple[tuple[str, stored.Activations], ...] = (
    *[(name, "int8") for name in CODES],
    *[(name, "bf16") for name in NUMBERS],
    ("fp32", "fp32"),
)  # fmt: skip
NEAR = {"nf4": 5e-3}
"""Its numbers are rounded to bfloat16 where two of them are multiplied at once."""


def rounded(x: torch.Tensor, form: stored.StoredForm) -> torch.Tensor:
    """Activations as a kernel has them, in double."""
    if form.activations != "int8":
        return (x.bfloat16() if form.activations == "bf16" else x).double()
    groups = x.view(len(x), -1, form.group or x.shape[1])
    top = groups.abs().amax(-1, keepdim=True)
    codes = (groups * (torch.full_like(top, 127) / top)).round()
    return torch.where(top > 0, codes.double() * (top / 127).double(), 0.0).view(x.shape)


def worst(name: str, activations: stored.Activations, sizes: int) -> float:
    storage, found = storage_of(name), 0.0
    group = stored.form_of(storage, activations).group or 1
    for _ in range(sizes):
        outputs, inputs = random.randint(1, 90), group * random.randint(1, max(2, 300 // group))
        weight, bias = torch.randn(outputs, inputs), torch.randn(outputs)
        packed = stored.pack(weight, storage, activations)
        assert isinstance(packed, stored.PackedStored) and packed.by == "kernel", "there is no compiler"
        wide = torch.from_numpy(storage.widen(storage.narrow(weight.numpy()), (outputs, inputs))).double()
        for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 255):
            x = torch.randn(rows, inputs)
            x[0, : inputs // 2] = 0
            wanted = rounded(x, packed.form) @ wide.t() + bias.double()
            found = max(found, float((stored.linear(x, packed, bias) - wanted).abs().max() / wanted.abs().max()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", default=",".join(one.name for one in lanes.SETS))
    parser.add_argument("--sizes", type=int, default=6)
    options = parser.parse_args()
    random.seed(0), torch.manual_seed(0)
    bad = 0
    for one in lanes.SETS:
        if one.name not in options.sets.split(","):
            continue
        if not has_features(one.needed(8)):
            print(f"{one.name}: this processor has not {', '.join(sorted(one.needed(8)))}")
            continue
        stored.lanes_of = lambda outputs, bits, one=one: one
        for name, activations in FORMS:
            try:
                found = worst(name, activations, options.sizes)
            except stored.InputError as error:
                print(f"{one.name} {name} {activations}: refused: {error}")
                continue
            bad += found >= NEAR.get(name, 1e-5)
            print(f"{one.name} {name} {activations}: {found:.1e}", flush=True)
    raise SystemExit(f"{bad} forms differ" if bad else 0)


if __name__ == "__main__":
    main()
