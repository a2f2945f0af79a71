"""What a captured model is named by: `my_project.model:build(ids=int64[batch,seq])`.

`CodeModel.parse(text)` reads the module, the function in it that returns a torch module, and its inputs: dtype and
dims, a name for one that varies, a number for one that does not, `seq=4096` for a size to record with. `example()`
makes tensors. FormatError says what is wrong. Leaves out importing anything.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gnomon.errors import FormatError, nearest

USUAL = {"batch": 2, "seq": 64}
"""Size that a named dim is recorded with where nothing says it; 16 for others."""

NAME = re.compile(r"([A-Za-z_][\w.]*):([A-Za-z_][\w.]*)(?:\((.*)\))?", re.DOTALL)
_INPUT = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*([a-z]+\d*)\s*\[([^\]]*)\](?:<(\d+))?\s*")
_DTYPES = {
    "int64": torch.int64, "int32": torch.int32, "bool": torch.bool, "float32": torch.float32, "float64": torch.float64,
    "bfloat16": torch.bfloat16, "float16": torch.float16,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One input of a module: its name, dtype and dims."""

    name: str
    """Of the forward's argument."""
    dtype: str
    """Name of its dtype in torch."""
    dims: tuple[str, ...]
    """A name or a number each."""
    below: int
    """Integers are smaller than that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeModel:
    """A model that is code."""

    module: str
    """To be imported: `my_project.model`."""
    function: str
    """Returns the torch module: `build`."""
    inputs: tuple[Input, ...]
    """Inputs of the module's forward."""
    sizes: tuple[tuple[str, int], ...]
    """Of named dims, as far as they are said."""

    @staticmethod
    def parse(text: str) -> CodeModel:
        """Reads MODULE:FUNCTION with its inputs from text."""
        match = NAME.fullmatch(text.strip())
        if match is None:
            raise FormatError(f"{text!r} is no MODULE:FUNCTION, as in my_project.model:build")
        inputs, sizes = parse_inputs(match[3] or "")
        return CodeModel(module=match[1], function=match[2], inputs=inputs, sizes=sizes)

    def example(self, sizes_given: Mapping[str, int] | None = None, *, seed: int = 0) -> dict[str, Tensor]:
        """Makes example inputs by name. given: sizes of dims in place of those that are said."""
        sizes = {**dict(self.sizes), **(sizes_given or {})}
        generator = torch.Generator().manual_seed(seed)
        tensors = {}
        for spec in self.inputs:
            shape = [int(d) if d.isdigit() else sizes.get(d, USUAL.get(d, 16)) for d in spec.dims]
            dtype = _DTYPES[spec.dtype]
            if dtype.is_floating_point:
                tensors[spec.name] = torch.randn(shape, generator=generator).to(dtype)
            else:
                below = 2 if dtype == torch.bool else spec.below
                tensors[spec.name] = torch.randint(0, below, shape, generator=generator).to(dtype)
        return tensors

    @property
    def dims(self) -> dict[str, tuple[str, ...]]:
        """Names of dims of each input; nothing for a number."""
        return {spec.name: tuple("" if d.isdigit() else d for d in spec.dims) for spec in self.inputs}


def parse_inputs(text: str) -> tuple[tuple[Input, ...], tuple[tuple[str, int], ...]]:
    """(inputs, sizes said) of `ids=int64[batch,seq=4096]<1000, mask=bool[batch,seq]`."""
    inputs, sizes, at = list[Input](), dict[str, int](), 0
    while at < len(text):
        match = _INPUT.match(text, at)
        if match is None:
            raise FormatError(
                f"inputs {text[at : at + 60]!r} cannot be read; write NAME=DTYPE[DIM,…], as in ids=int64[batch,seq]"
            )
        name, dtype, inside, below = match.groups()
        if dtype not in _DTYPES:
            raise FormatError(
                f"input {name!r} has dtype {dtype!r}{nearest(dtype, _DTYPES)}; known: {', '.join(_DTYPES)}"
            )
        dims = []
        for part in filter(None, (p.strip() for p in inside.split(","))):
            word, _, size = part.partition("=")
            if not re.fullmatch(r"\d+|[A-Za-z_]\w*", word) or (size and not size.isdigit()):
                raise FormatError(f"dim {part!r} of input {name!r} is no name, number, or name=size")
            if size:
                sizes[word] = int(size)
            dims.append(word)
        inputs.append(Input(name=name, dtype=dtype, dims=tuple(dims), below=int(below or 2)))
        at = match.end()
        if at < len(text):
            if text[at] not in ",;":
                raise FormatError(f"inputs are divided by commas; after {text[:at]!r} comes {text[at:][:20]!r}")
            at += 1
    return tuple(inputs), tuple(sizes.items())
