"""Storages by the names that people write: `storage_of("int4-g64")`.

Returns the frozen value of a form. Leaves out how programs spell the same in their files (`formats`).
"""

from __future__ import annotations

import re

from gnomon.errors import InputError, nearest
from gnomon.storage.blocks import Blocks
from gnomon.storage.dense import Dense
from gnomon.storage.float8 import Float8
from gnomon.storage.form import Storage
from gnomon.storage.gguf import KINDS, Ggml
from gnomon.storage.integers import LEAST_GROUP, Integers
from gnomon.storage.n_of_m import NM
from gnomon.storage.ordered import Ordered
from gnomon.storage.shifted import Shifted
from gnomon.storage.sparse import VALUES
from gnomon.storage.tables import MXFP4, NF4
from gnomon.storage.unstructured import CSR, Bitmap

NAMED: dict[str, Storage] = {
    "fp32": Dense(dtype="fp32"),
    "fp16": Dense(dtype="fp16"),
    "bf16": Dense(dtype="bf16"),
    "fp8": Float8(),
    "fp8-row": Float8(block=(1, 0)),
    "nf4": NF4(),
    "mxfp4": MXFP4(),
    **{kind: Ggml(kind=kind) for kind in KINDS},
}


def storage_of(name: str) -> Storage:
    """A storage by its name: `int4-g64`, `int4-g128-zeros`, `int4-g128-offsets`,
    `int4-g128-ordered`, `int8`, `ternary-g64`, `nf4`, `mxfp4`,
    `fp8`, `fp8-128x128`, `q4_k`, `2:4`, `0.9` (a tenth is kept, by a bitmap), `csr:0.9`, `block:16x16:0.9`; what is
    sparse keeps float32, or as `4:16-bf16` and `0.9-int8` say. InputError for another."""
    if name in NAMED:
        return NAMED[name]
    if match := re.fullmatch(r"(int[2348]|ternary)(?:-g(\d+))?(-zeros)?", name):
        kind, group, zeros = match.groups()
        ternary = kind == "ternary"
        if group is None or int(group) >= LEAST_GROUP:
            return Integers(
                bits=2 if ternary else int(kind[3:]), group=int(group or 0), zeros=bool(zeros), ternary=ternary
            )
    if match := re.fullmatch(r"int4(?:-g(\d+))?-offsets", name):
        if match[1] is None or int(match[1]) >= LEAST_GROUP:
            return Shifted(group=int(match[1] or 0))
    if match := re.fullmatch(r"int([2348])-g(\d+)-ordered", name):
        if int(match[2]) >= LEAST_GROUP:
            return Ordered(bits=int(match[1]), group=int(match[2]))
    if match := re.fullmatch(r"fp8-(\d+)x(\d+)", name):
        return Float8(block=(int(match[1]), int(match[2])))
    pattern, _, value = name.partition("-")
    if value in ("", *VALUES) and value != "fp32" and (sparse := _sparse(pattern, value or "fp32")):
        return sparse
    known = [
        *NAMED,
        "int8",
        "int4-g64",
        "int4-g128-zeros",
        "int4-g128-offsets",
        "ternary-g64",
        "2:4",
        "4:16",
        "0.9",
        "block:16x16:0.9",
        "4:16-bf16",
        "0.9-int8",
    ]
    raise InputError(f"{name!r} is no way to store a weight{nearest(name, known)}; as {', '.join(known)}")


def _sparse(pattern: str, value: str) -> Storage | None:
    if match := re.fullmatch(r"(\d+):(\d+)", pattern):
        n, m = int(match[1]), int(match[2])
        if not 0 < n < m <= 16:
            raise InputError(f"{pattern} keeps {n} of every {m}; it takes 0 < n < m <= 16, as 2:4 or 4:16")
        return NM(n=n, m=m, value=value)
    if match := re.fullmatch(r"(csr:|block:(\d+)x(\d+):)?(0?\.\d+)", pattern):
        density = 1 - float(match[4])
        if match[2]:
            return Blocks(kept=density, size=(int(match[2]), int(match[3])), value=value)
        return CSR(kept=density, value=value) if match[1] else Bitmap(kept=density, value=value)
    return None
