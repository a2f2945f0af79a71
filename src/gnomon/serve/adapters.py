"""LoRA adapters that a server answers with by name, beside its model: `read_adapter(name, folder, linears)`.

A folder is PEFT's: adapter_config.json and adapter_model.safetensors, whose tensors are named
`base_model.model.<module>.lora_A.weight` and `.lora_B.weight`. A linear adds factor · B (A x) to the rows of requests
that asked for the adapter, so that requests of several adapters, and of none, run in one iteration. Leaves out DoRA,
biases, ranks that differ by module, and adapters of embeddings and the head.
Source: Hu et al. 2021; PEFT 0.18, LoraConfig. Batched over adapters as Punica (Chen et al. 2023) and S-LoRA (Sheng et
al. 2023) have it.
"""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from gnomon.errors import InputError
from gnomon.runtime.checkpoint.adapters import CONFIG, FILE, PREFIX, UNUSUAL
from gnomon.runtime.parameters.parameters import Slot
from gnomon.runtime.parameters.weights import Folder

MOST_RANK = 512
"""As cpp/forward.cpp has it."""
NO_PARTS: Mapping[str, Slot] = MappingProxyType({})
ENDS = (".lora_A.weight", ".lora_B.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A matrix of the model that may have adapters."""

    parameter: str
    """Its full name in the Graph."""
    shape: tuple[int, int]
    """(outputs, inputs)."""
    inner_first: bool
    """Whether the Graph has it as (inputs, outputs)."""


@dataclass(frozen=True, slots=True)
class Low:
    """What an adapter has of one linear, in float32."""

    a: Tensor
    """(rank, inputs)."""
    b: Tensor
    """(rank, outputs), with the adapter's factor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """One adapter: its matrices by linear."""

    name: str
    low: Mapping[str, Low]
    """Parameter of the Graph -> its matrices."""


def read_adapter(
    name: str, folder: Path, linears: Mapping[str, Linear], slots: Mapping[str, Slot] = NO_PARTS
) -> Adapter:
    """Reads an adapter. linears: by the module that files name. slots: this rank's parts of parameters; none: all of
    each. InputError for another kind, or modules that the model has not."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"adapter {name!r}: {folder / CONFIG} cannot be read: {error}") from error
    rank, alpha = config.get("r"), config.get("lora_alpha", config.get("r"))
    if config.get("peft_type") != "LORA" or not isinstance(rank, int) or not 0 < rank <= MOST_RANK:
        raise InputError(
            f"adapter {name!r} in {folder} is {config.get('peft_type')} of rank {rank}, and LORA of rank 1 to "
            f"{MOST_RANK} is served"
        )
    for key, usual in UNUSUAL.items():
        if key != "use_rslora" and config.get(key, usual) not in (usual, None, {}):
            raise InputError(f"adapter {name!r} in {folder}: {key} = {config[key]!r} is not served; only {usual!r}")
    if config.get("alpha_pattern") or not isinstance(alpha, int | float):
        raise InputError(f"adapter {name!r} in {folder}: lora_alpha is one number; alpha_pattern is not served")
    # rsLoRA divides by the root of the rank.
    factor = alpha / (rank**0.5 if config.get("use_rslora") else rank)
    file = Folder.of(folder / FILE)
    low: dict[str, Low] = {}
    for tensor in file.entries:
        module = tensor.removeprefix(PREFIX)
        if not tensor.startswith(PREFIX) or not module.endswith(ENDS):
            raise InputError(f"adapter {name!r} in {folder} has {tensor}, which is no matrix of a linear's adapter")
        module = module.removesuffix(ENDS[0]).removesuffix(ENDS[1])
        if module not in linears:
            raise InputError(
                f"adapter {name!r} in {folder} is of {module}, which is no linear of the served model's layers with a "
                f"tensor of its own; retrain it with other target_modules, or merge it into the weights"
            )
        linear = linears[module]
        if linear.parameter not in low and (not slots or linear.parameter in slots):
            read = _low(file, f"{PREFIX}{module}", linear.shape, rank, factor, name)
            low[linear.parameter] = _own(read, linear, slots[linear.parameter]) if slots else read
    if not low and not slots:
        raise InputError(f"adapter {name!r} in {folder} has no tensors")
    return Adapter(name=name, low=low)


def _low(file: Folder, head: str, shape: tuple[int, int], rank: int, factor: float, name: str) -> Low:
    outputs, inputs = shape
    factors = []
    for end, entry_shape in zip(ENDS, ((rank, inputs), (outputs, rank)), strict=True):
        if head + end not in file.entries or file.entries[head + end][1].shape != entry_shape:
            there = file.entries[head + end][1].shape if head + end in file.entries else "not there"
            raise InputError(f"adapter {name!r}: {head}{end} is {there}, and the model wants {entry_shape}")
        factors.append(file.read(head + end).float())
    return Low(factors[0].contiguous().clone(), (factors[1].T * factor).contiguous())


def _own(low: Low, linear: Linear, slot: Slot) -> Low:
    """Cuts an adapter to a rank's part of the matrix: the same rows of B and columns of A."""
    # The number of each element of the whole matrix: narrowed as the parameter is, quotients and remainders say which
    # rows and columns this rank has, however dims are joined.
    part = torch.arange(math.prod(slot.whole)).view(slot.whole)
    for dim, (first, length) in enumerate(zip(slot.offset, slot.shape, strict=True)):
        part = part.narrow(dim, first, length)
    flat, (outputs, inputs) = part.flatten(), linear.shape
    if linear.inner_first:
        ins, outs = (flat // outputs).unique(), (flat % outputs).unique()
    else:
        ins, outs = (flat % inputs).unique(), (flat // inputs).unique()
    return Low(low.a[:, ins].contiguous(), low.b[:, outs].contiguous())


class _Adapted(ctypes.Structure):
    """The struct `Adapted` of cpp/forward.cpp."""

    _fields_ = [("a", ctypes.c_void_p), ("b", ctypes.c_void_p), ("rank", ctypes.c_int64)]


def kernel_args(adapters: Sequence[Adapter], parameter: str) -> ctypes.Array[_Adapted] | None:
    """What the kernel is told of a linear's adapters, in their order; None where none has it."""
    lows = [adapter.low.get(parameter) for adapter in adapters]
    if not any(lows):
        return None
    # Rows name adapters by number: one that lacks this linear keeps its place, with null pointers.
    return (_Adapted * len(lows))(
        *[_Adapted(low.a.data_ptr(), low.b.data_ptr(), len(low.a)) if low else _Adapted() for low in lows]
    )


def added(adapters: Sequence[Adapter], parameter: str, chosen: Tensor, x: Tensor) -> Tensor | None:
    """(…, outputs) that a linear's adapters add, by PyTorch; None where no row asks for one of them. chosen: (tokens)
    an adapter's number, or -1. x: (1, tokens, inputs)."""
    out = None
    for number in chosen.unique().tolist():
        low = adapters[number].low.get(parameter) if number >= 0 else None
        if low is None:
            continue
        rows = (chosen == number).nonzero().flatten()
        low_rank = (x[0, rows].float() @ low.a.T) @ low.b
        if out is None:
            out = torch.zeros((1, x.shape[1], low_rank.shape[1]), dtype=x.dtype)
        out[0, rows] = low_rank.to(x.dtype)
    return out
