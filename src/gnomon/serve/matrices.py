"""Matrices as an engine has them: each packed once for the kernel that multiplies by it (`compiler.stored`).

`Matrices(weights, forms)` packs what is asked for by parameters' names, side by side where several read the same rows;
`Forms` says how they are stored: as the folder has them, or rounded to a storage when they are read. What a folder of
compressed weights has packed stays packed, in bfloat16; float32 and float64 are for exact numbers, and widen it. Leaves
out vectors (norms, biases), which are as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from gnomon.compiler.build import has_compiler
from gnomon.compiler.kernels import stored
from gnomon.compiler.kernels.large_pages import LargePages
from gnomon.compiler.kernels.stored import Activations, AnyPacked
from gnomon.compiler.machine import this_machine
from gnomon.errors import InputError
from gnomon.runtime.parameters.packed import Codes
from gnomon.serve.streamed import Streams
from gnomon.storage.dense import Dense
from gnomon.storage.form import Storage
from gnomon.storage.integers import Integers
from gnomon.storage.names import storage_of
from gnomon.storage.sparse import Sparse

AS_STORED = "stored"
"""The name of a folder's own storage."""
SERVED = ("int8", "int4-g32", "int4-g64", "int4-g128")
"""Storages that weights are rounded to when they are read."""
TABLE = Integers(bits=8, group=0, scale="float32")
"""Of a head, which may be the table of embeddings too, where layers are rounded: in four bits it costs the most."""
ROWS = 4
"""Of the products that the kernel of a sparse matrix is chosen for: sequences that decode beside each other."""
NUMBERS: Mapping[torch.dtype, str] = {torch.bfloat16: "bf16", torch.float32: "fp32"}


Part: TypeAlias = Tensor | Codes
"""(outputs, inputs) of a matrix."""


class Weights(Protocol):
    """Parameters by their full names, in the dtype of their file."""

    def __getitem__(self, name: str, /) -> Tensor: ...

    def mapped(self, name: str, /) -> Tensor:
        """The same, maybe of its file's own memory: for what is copied at once."""

    def codes(self, name: str) -> Sequence[Codes]:
        """What a folder has packed of it, rows one below the other; nothing where it has numbers."""

    def let_go(self) -> None:
        """What was read of files takes no memory any more."""

    @property
    def sparse_as(self) -> Sparse | None:
        """How the folder says that its matrices are sparse; None: it does not."""

    @property
    def packed_as(self) -> Storage | None:
        """How the folder has matrices packed; None: it has not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forms:
    """How matrices are stored while they are served."""

    dtype: torch.dtype
    """That is computed in, and of what is not rounded."""
    layers: Integers | None
    """Of the matrices of layers; None: as the folder has them."""

    @staticmethod
    def of(name: str, dtype: torch.dtype) -> Forms:
        """InputError for a storage that no kernel of the engine multiplies by."""
        if name == AS_STORED:
            return Forms(dtype=dtype, layers=None)
        storage = storage_of(name)
        if dtype not in NUMBERS:
            raise InputError(f"weights in {name} are multiplied with float32 or bfloat16, not float64; take bf16")
        if not isinstance(storage, Integers) or storage.bits not in (4, 8):
            raise InputError(f"weights are served as {', '.join((AS_STORED, *SERVED))}, not as {name}")
        stored.form_of(storage)
        return Forms(dtype=dtype, layers=storage)

    @property
    def bits(self) -> float:
        """Bits of a weight of the layers, about."""
        return 8.0 * self.dtype.itemsize if self.layers is None else self.layers.bits_a_weight((1024, 1024))

    @property
    def numbers(self) -> Dense | None:
        """How numbers that are not rounded are stored; None: no kernel of ours multiplies by them."""
        name = NUMBERS.get(self.dtype)
        return None if name is None else Dense(dtype=name)

    @property
    def head(self) -> Integers | None:
        """How the head is stored; None where it is not rounded."""
        return None if self.layers is None else TABLE

    @property
    def keeps(self) -> bool:
        """Whether what a folder has packed stays so."""
        return self.layers is None and self.dtype == torch.bfloat16


def activations_of(storage: Storage) -> Activations:
    """What a storage is multiplied with."""
    return "int8" if isinstance(storage, Integers) else "fp32" if storage.name == "fp32" else "bf16"


class Matrices:
    """The matrices of a model, by the names of their parameters."""

    def __init__(self, weights: Weights, forms: Forms, streams: Streams | None = None) -> None:
        """Takes streams, the layers that stay on a disk."""
        self.weights, self.forms, self.streams = weights, forms, streams
        self.by_name: dict[str, AnyPacked] = {}
        self._memory = LargePages() if streams is None else None  # what goes to a disk is let go of one by one

    def have_kernels(self) -> bool:
        """Whether this machine has one for each storage that there may be."""
        forms, own = self.forms, self.weights.packed_as
        storages = [forms.numbers, forms.layers, forms.head, own if forms.keeps else None]
        if forms.numbers is None:
            return False
        return all(stored.kernel(stored.form_of(one, activations_of(one))) for one in storages if one is not None)

    def why(self) -> list[str]:
        """Explains matrices of which a part is kept: a line for each form that was taken, with the first one's
        reasons; and what this machine has no kernels for."""
        if not has_compiler():
            return ["PyTorch multiplies by matrices, widened: there is no C++ compiler to make kernels with (CXX)"]
        if (sparse_as := self.weights.sparse_as) is not None and not stored.has_sparse():
            return [
                f"matrices of {sparse_as.name} are multiplied whole: kernels of sparse weights are for AVX-512 with "
                f"VNNI, BF16 and VBMI2, and this machine computes with {this_machine().isa.name}"
            ]
        by_form: dict[tuple[str, str], list[AnyPacked]] = {}
        for one in self.by_name.values():
            if one.choice is not None:
                by_form.setdefault((one.storage.name, one.choice.form), []).append(one)
        lines = []
        for (name, _), several in by_form.items():
            first = several[0]
            assert first.choice is not None
            count = f"{len(several)} matrices" if len(several) > 1 else "a matrix"
            size = " x ".join(map(str, first.shape))
            lines.append(f"{count} of {name} by {first.choice.why} ({size})")
        return lines

    def packed(self, name: str, parts: Callable[[], Sequence[Part]], *, head: bool = False) -> AnyPacked:
        """Made once by that name. parts: rows one below the other."""
        if name not in self.by_name:
            matrix = self._packed_of(parts(), head)
            # Heads stay in memory: streams hold matrices of layers alone.
            self.by_name[name] = matrix if head or self.streams is None else self.streams.keep(name, matrix)
        return self.by_name[name]

    def _packed_of(self, parts: Sequence[Part], head: bool) -> AnyPacked:
        forms, rounded = self.forms, self.forms.head if head else self.forms.layers
        codes = [part for part in parts if isinstance(part, Codes)]
        storage: Storage
        # Parts become one matrix with one storage: they must all be packed, and in the same way.
        if forms.keeps and len(codes) == len(parts) and len({part.storage for part in codes}) == 1:
            storage, arrays = codes[0].storage, [dict(part.arrays) for part in codes]
        elif rounded is None:
            return self._numbers(parts, sparse=not head)
        else:
            _check(rounded, parts)
            numbers = [part for part in parts if isinstance(part, Tensor)]
            whole = len(numbers) == len(parts)
            rounded_parts = stored.round_parts(numbers, rounded, memory=self._memory) if whole else None
            if rounded_parts is not None:
                return rounded_parts
            storage, arrays = rounded, [rounded.narrow(_wide(rows).numpy()) for part in parts for rows in _few(part)]
        joined = {key: np.concatenate([one[key] for one in arrays]) for key in arrays[0]}
        shape = sum(part.shape[0] for part in parts), parts[0].shape[1]
        return stored.repack(joined, storage, shape, activations_of(storage), memory=self._memory)

    def _numbers(self, parts: Sequence[Part], *, sparse: bool) -> AnyPacked:
        """Packs a matrix that is not rounded; of a sparse folder what is not 0, where a matrix has its pattern and a
        kernel is faster so."""
        forms = self.forms
        assert forms.numbers is not None
        if not sparse or self.weights.sparse_as is None:
            numbers = [part for part in parts if isinstance(part, Tensor)]
            laid = stored.lay_parts(numbers, forms.numbers, self._memory) if len(numbers) == len(parts) else None
            if laid is not None:
                return laid
        whole = torch.cat([(part.widened() if isinstance(part, Codes) else part).to(forms.dtype) for part in parts])
        # NumPy has no bfloat16: the bits travel as integers of the same width.
        bits = whole.view(torch.int16 if forms.dtype == torch.bfloat16 else torch.int32).numpy()
        shape = whole.shape[0], whole.shape[1]
        sparse_as = self.weights.sparse_as if sparse else None
        if sparse_as is not None and stored.has_sparse() and not sparse_as.refused(shape):
            wide = whole.float().numpy()
            try:
                storage, mask = replace(sparse_as, value=forms.numbers.name).of_zeros(wide)
            except InputError:  # a layer that was left as it is: its numbers are multiplied by as they are
                return self._whole(bits, shape)
            return stored.repack(storage.of_mask(wide, mask), storage, shape, rows=ROWS)
        return self._whole(bits, shape)

    def _whole(self, bits: NDArray[Any], shape: tuple[int, int]) -> AnyPacked:
        numbers = self.forms.numbers
        assert numbers is not None
        return stored.repack({"values": bits}, numbers, shape, activations_of(numbers), memory=self._memory)


TOGETHER = 1 << 16
"""Numbers that are rounded at a time, so that what is made on the way stays in cache; each row is by itself."""


def _few(part: Part) -> Iterator[Part]:
    """Rows of a matrix, some at a time."""
    if isinstance(part, Codes):
        yield part
        return
    yield from part.split(max(1, TOGETHER // part.shape[1]))


def _wide(part: Part) -> Tensor:
    return part.widened() if isinstance(part, Codes) else part.float()


def _check(storage: Integers, parts: Sequence[Part]) -> None:
    for part in parts:
        if why := storage.refused((part.shape[0], part.shape[1])):
            raise InputError(f"a matrix of {' x '.join(map(str, part.shape))} cannot be served as {why}; take int8")


def matmul_by(matrix: AnyPacked | Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """x (…, in) -> (…, out). A tensor is multiplied by PyTorch."""
    if isinstance(matrix, Tensor):
        plain = matrix.contiguous()
        return lambda x: functional.linear(x, plain, bias)
    wide = None if bias is None else bias.float()
    return lambda x: stored.linear(x, matrix, wide)
