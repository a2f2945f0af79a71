"""What a recorded forward is made of: values, ATen ops, and the calls of the torch API that ran them.

A `ForwardTrace` holds the steps in order and every value by its index. Leaves out recording (`trace`) and meaning
(`convert`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


def is_trained(parameter: Tensor) -> bool:
    """Whether a parameter is: one without elements has nothing to train."""
    return parameter.requires_grad and parameter.numel() > 0


@dataclass(frozen=True, slots=True)
class Ref:
    """A value among the arguments of a node."""

    index: int
    """Of the value, in `ForwardTrace.values`."""


@dataclass(slots=True)
class Value:
    """A tensor of the trace."""

    shape: tuple[int, ...]
    """Its sizes."""
    dtype: torch.dtype
    """Its dtype."""
    origin: str
    """`input`, `parameter`, `buffer`, `constant` or `op`."""
    name: str
    """Of an input, parameter or buffer, in full."""
    grad: bool
    """Whether a gradient flows into it."""
    storage: int
    """Two values with the same number look into the same memory."""
    fed: bool
    """Whether it depends on values of inputs or parameters, not on their shapes only."""
    learned: bool
    """Whether it depends on parameters."""


@dataclass(slots=True)
class AtenNode:
    """One ATen op of a recorded forward."""

    target: str
    """`aten.mul.Tensor`."""
    args: tuple[Any, ...]
    """Literals and `Ref`s."""
    kwargs: dict[str, Any]
    """The same by name."""
    outs: tuple[int | None, ...]
    """Values; None for an output that is no tensor."""
    many: bool
    """Whether it returns a tuple."""
    grad: bool
    """Whether autograd was on."""
    read_values: Any = None
    """What Python read of its output, where that depends on values: numbers in lists, or one."""
    sized: bool = False
    """Whether the shape of its output depends on values."""


@dataclass(slots=True)
class Step:
    """One call of the torch API."""

    func: str
    """`linear`, `scaled_dot_product_attention`, `mul` …"""
    module: str
    """Full name of the module whose forward called it."""
    module_type: str
    """Class of that module."""
    where: str
    """`file.py:12` of the user's code."""
    turns: tuple[tuple[str, int], ...] = ()
    """Modules that were running, outermost first, and the how-manieth run of each it was."""
    nodes: list[AtenNode] = field(default_factory=list)
    """ATen ops that it ran, in order."""
    saved_tensors: list[tuple[int, tuple[int, ...], torch.dtype]] = field(default_factory=list)
    """(storage, shape, dtype) of each tensor that autograd keeps."""
    call: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
    """Arguments of the call, with `Ref`s."""


@dataclass(slots=True)
class ForwardTrace:
    """A recorded forward."""

    values: list[Value]
    """All tensors, in the order in which they were first seen."""
    steps: list[Step]
    """Calls of the torch API, in order."""
    outputs: list[int]
    """Values that the module returns, tensors only, in order."""
    output_names: list[str]
    """Names of `outputs`."""
    notes: list[str]
    """What a reader might not expect, a sentence each."""
    constants: dict[str, Tensor]
    """Values of states that are neither parameters nor buffers."""
    reads_values: bool
    """Whether a number or a size depended on values of inputs."""
    tensors: list[Tensor]
    """Of each value, the tensor that it was; on the meta device without numbers."""
