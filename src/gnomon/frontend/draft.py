"""A block that grows op by op: names of its tensors, paths of its ops, what it reads from outside.

`Draft` is what writers of kinds (`write_kinds`) and of captured ops (`write_captured`) add to; `done` makes the Block.
Leaves out what becomes of a step.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from gnomon.frontend.convert import Converter
from gnomon.frontend.records import Step
from gnomon.graph import Block, Dim, Op, Tensor


@dataclass(frozen=True, slots=True)
class DraftPart:
    """A block, and what it is called with."""

    block: Block
    inputs: tuple[tuple[str, int], ...]
    """(its name in the block, value)."""
    outputs: tuple[tuple[str, int], ...]
    params: tuple[tuple[str, str], ...]
    """(name in the block, full name) of parameters and states whose names do not follow from the prefix."""
    opaque: tuple[tuple[str, str], ...]
    """(path, target) of ops that no kind says."""
    values: Mapping[str, int]
    """Activation -> the value of the trace that it is."""
    lines: Mapping[str, str]
    """Path of an op -> file and line."""


class Draft:
    """Builds a block op by op. prefix: path of the module that its steps lie under. wanted: values that others read."""

    def __init__(self, owner: Converter, prefix: str, name: str, values: set[int]) -> None:
        self.owner, self.trace, self.prefix, self.name, self.read_later = owner, owner.trace, prefix, name, values
        self.tensors: dict[str, Tensor] = {}
        self.ops: list[Op] = []
        self.own: dict[int, str] = {}
        self.inputs: dict[str, int] = {}
        self.params: dict[str, str] = {}
        self.paths: set[str] = set()
        self.opaque: list[tuple[str, str]] = []
        self.turned: dict[int, str] = {}
        self.lines: dict[str, str] = {}

    def finish(self) -> DraftPart:
        """The block with the ops added so far."""
        outputs = [(self.own[v], v) for v in sorted(self.read_later) if v in self.own and self._is_computed(v)]
        used = set(self.inputs) | {n for op in self.ops for n in (*op.inputs, *op.outputs)}
        block = Block(
            name=self.name,
            inputs=tuple(self.inputs),
            outputs=tuple(own for own, _ in outputs),
            tensors=tuple(t for t in self.tensors.values() if t.name in used),
            ops=tuple(self.ops),
        )
        return DraftPart(
            block,
            tuple(self.inputs.items()),
            tuple(outputs),
            tuple(self.params.items()),
            tuple(self.opaque),
            {own: value for value, own in self.own.items()},
            self.lines,
        )

    def _is_computed(self, index: int) -> bool:
        return self.own[index] not in self.inputs and self.tensors[self.own[index]].is_activation

    def path(self, step: Step, what: str) -> str:
        """A path of its own for an op: the module's for what a module is, with the call's name behind it otherwise."""
        inside = step.module.removeprefix(self.prefix).lstrip(".") if self.prefix else step.module
        plain = what in ("linear", "norm", "embedding", "dropout", "activation") and inside
        stem = inside if plain else ".".join(filter(None, (inside, what.strip("_"))))
        stem = _legal(stem or what)
        path, count = stem, 1
        while path in self.paths:
            count += 1
            path = f"{stem}.n{count}"
        self.paths.add(path)
        self.lines[path] = step.where
        return path

    def read(self, index: int) -> str:
        """The block's name of a value that it reads."""
        if index in self.own:
            return self.own[index]
        value = self.trace.values[index]
        if value.origin in ("parameter", "buffer", "constant"):
            inner = value.name.removeprefix(f"{self.prefix}.") if self.prefix else value.name
            name = _legal(inner)
            while name in self.tensors:
                name += "_"
            if name != value.name.removeprefix(f"{self.prefix}.") or (self.prefix and inner == value.name):
                self.params[name] = value.name
            trained = value.origin == "parameter" and value.grad
            self.add(
                Tensor(
                    name=name,
                    dims=self.owner.dims(index),
                    dtype="param" if value.dtype == self.owner.main else self.owner.dtype(index),
                    kind="parameter" if trained else "state",
                    lifetime="step" if trained else "job",
                )
            )
        else:
            name = value.name if value.origin == "input" else "x"
            stem, count = _legal(name), 1
            name = stem
            while name in self.tensors:
                count += 1
                name = f"{stem}{count}"
            self.add(Tensor(name=name, dims=self.owner.dims(index), dtype=self.owner.dtype(index)))
            self.inputs[name] = index
        self.own[index] = name
        return name

    def add(self, tensor: Tensor) -> str:
        """Declares a tensor and returns its name."""
        self.tensors[tensor.name] = tensor
        return tensor.name

    def make(self, index: int, name: str, dims: tuple[Dim, ...] | None = None) -> str:
        """Declares a value that an op of the block writes."""
        self.own[index] = name
        return self.add(
            Tensor(name=name, dims=self.owner.dims(index) if dims is None else dims, dtype=self.owner.dtype(index))
        )


def _legal(name: str) -> str:
    name = re.sub(r"[^A-Za-z0-9_.\-]", "_", name)
    return name if re.match(r"[A-Za-z_]", name) else f"m{name}"
