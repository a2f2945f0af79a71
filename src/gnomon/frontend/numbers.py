"""What tensors of shapes only would hold, worked out from the ops that lead to them when Python asks.

`Numbers.of(index, where)` runs these ops on the CPU; what was written into memory later is written there too. A value
that depends on parameters has no numbers, except the answer to whether some are finite: they are taken to be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from gnomon.errors import CaptureError
from gnomon.frontend.records import AtenNode, Ref, Value
from gnomon.tensors.captured import Node as Written
from gnomon.tensors.captured import mutates

FINITE = {"isfinite": True, "isnan": False, "isinf": False, "isposinf": False, "isneginf": False}
"""Questions of the torch API whether numbers are finite, and what each element's answer is."""


class Numbers:
    """The numbers that integer values of one trace would hold, computed from what made them: on the meta device they
    have none."""

    def __init__(self, values: Sequence[Value]) -> None:
        self.values = values
        self.real: dict[int, Tensor] = {}
        """Value -> what it holds, as far as it is known."""
        self.producers: dict[int, AtenNode] = {}
        self.history: dict[int, list[AtenNode]] = {}
        self.written: set[int] = set()

    def add(self, node: AtenNode) -> None:
        """Adds one more op of the trace."""
        for index in node.outs:
            if index is not None:
                self.producers[index] = node
                self.history.setdefault(self.values[index].storage, []).append(node)
        if mutates(Written(target=node.target, args=())):
            self.written |= {self.values[x.index].storage for x in node.args[:1] if isinstance(x, Ref)}

    def finite(self, index: int, every: bool) -> None:
        """The answer to such a question."""
        with torch.utils._python_dispatch._disable_current_modes():
            self.real[index] = torch.full((), every).expand(self.values[index].shape)
        self.values[index].learned = False

    def of(self, index: int, where: str) -> Tensor:
        """The numbers of a value. CaptureError with `where`, the file and line that asks, if there are none."""
        storage = self.values[index].storage
        if storage in self.written and storage in self.history and not self._is_given(storage):
            for node in self.history.pop(storage):
                self._run(node, where)
        if index in self.real:
            return self.real[index]
        if self.values[index].learned or index not in self.producers:
            raise CaptureError(
                f"{where}: Python reads a number that depends on {self.values[index].name or 'parameters'}, and "
                f"there are only shapes on the meta device; capture a small configuration on the CPU, or write it "
                f"without .item()"
            )
        self._run(self.producers[index], where)
        return self.real[index]

    def _is_given(self, storage: int) -> bool:
        """Whether it is that of an input or a parameter, which is not ours to write into."""
        return any(value.storage == storage and value.origin != "op" for value in self.values)

    def _run(self, node: AtenNode, where: str) -> None:
        reads = [x.index for x in tree_flatten((node.args, node.kwargs))[0] if isinstance(x, Ref)]
        known = {index: self.of(index, where) for index in reads}
        args, kwargs = tree_map(lambda x: known[x.index] if isinstance(x, Ref) else on_cpu(x), (node.args, node.kwargs))
        with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
            outs = resolve(node.target)(*args, **kwargs)
        for out, result in zip(node.outs, outs if node.many else (outs,), strict=False):
            if out is not None and isinstance(result, Tensor):
                self.real[out] = result


def resolve(target: str) -> Any:
    """`aten.mul.Tensor` -> the op."""
    space, name, overload = target.split(".")
    return getattr(getattr(getattr(torch.ops, space), name), overload)


def on_cpu(x: Any) -> Any:
    """An argument for the CPU."""
    return torch.device("cpu") if isinstance(x, torch.device) else x
