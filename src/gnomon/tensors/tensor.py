"""`Tensor`: a named, typed array over dims, without its elements.

A tensor's identity is its name within a block (or a graph, for a graph's input). Leaves out how it lies on mesh axes
(`layout`) and what it holds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeAlias

from gnomon.errors import GraphError, nearest
from gnomon.tensors.dims import DTYPE_BITS, SYMBOLIC_DTYPES, Dim, check_name

TensorKind: TypeAlias = Literal["parameter", "activation", "state"]
Lifetime: TypeAlias = Literal["step", "sequence", "job"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A named, typed array. Identity is the name, within its block (or graph, for a graph input)."""

    name: str
    """Within a block: the path of the op that makes it, or of the parameter (`self_attn.q_proj.weight`)."""
    dims: tuple[Dim, ...]
    """Outermost first; a weight is (out …, in …) as in torch. No name twice."""
    dtype: str = "compute"
    """As in torch (`bf16 fp32 fp8_e4m3 int64 bool`), or `compute` or `param`, which the plan's precision resolves."""
    kind: TensorKind = "activation"
    """parameter (trained or not), activation, or state (KV cache, rotary tables, SSM state)."""
    lifetime: Lifetime = "step"
    """Of a state: a step, a sequence, or the job."""

    def __post_init__(self) -> None:
        check_name(self.name.replace(":", "."), "tensor")
        names = [atom.name for dim in self.dims for atom in dim.atoms]
        if len(set(names)) != len(names):
            raise GraphError(f"tensor {self.name!r} has a dim twice: {', '.join(names)}; give one of them another name")
        known = (*DTYPE_BITS, *SYMBOLIC_DTYPES)
        if self.dtype not in known:
            raise GraphError(
                f"tensor {self.name!r} has unknown dtype {self.dtype!r}{nearest(self.dtype, known)}; known: {known}"
            )

    @property
    def atoms(self) -> tuple[Dim, ...]:
        """The dims with products taken apart, outermost first."""
        return tuple(atom for dim in self.dims for atom in dim.atoms)

    @property
    def is_activation(self) -> bool:
        """Whether ops make it (or a user gives it) anew each time, so that it is neither trained nor a state."""
        return self.kind == "activation"

    @property
    def is_float(self) -> bool:
        """Whether a gradient can flow through it."""
        return not self.dtype.startswith(("int", "uint", "bool"))

    def renamed(self, name: str) -> Tensor:
        """The same array under another name."""
        return replace(self, name=name)

    def __str__(self) -> str:
        return f"{self.name}[{', '.join(map(str, self.dims))}]:{self.dtype}"


class Tensors(Protocol):
    """Tensors by their names, as a block has them: what a rule sees of the block around an op."""

    def tensor(self, name: str) -> Tensor:
        """The tensor of that name."""
