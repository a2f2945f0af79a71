"""An operation of ours in a graph that is tried by itself: a function of tensors by a kernel or by PyTorch.

`TriedKernel` runs both on the first inputs of each size (`gate.Trial`) and then what the trial chose. A program asks it
with `settled()` for the function to call from then on. Leaves out groups, whose trials the program holds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gnomon.compiler.tune.gate import Trial

MEMORY = {torch.float32: "float", torch.bfloat16: "bf16"}
"""What kernels of several dtypes read and write (`S` of cpp/memory.h), by its name in C++."""


@cache
def text_of(formula: Path, dtype: torch.dtype) -> str:
    """C++ of a kernel for tensors of that dtype."""
    text = formula.read_text(encoding="utf-8")
    return text if dtype == torch.float32 else f"#define MEMORY {MEMORY[dtype]}\n{text}"


class TriedKernel:
    """A function of tensors; what it is made of says `run` (the kernel) and `aten` (PyTorch)."""

    several = False
    """Whether it gives a list of tensors in place of one."""
    effects = False
    """Whether calls do more than give a result, and keep their order."""
    checked = True
    """Whether it is tried on inputs of the checker's own too."""
    text: str | None = None
    """C++ of its kernel, which is compiled beside those of groups."""

    def __init__(self, name: str, source: str, fixed: bool) -> None:
        """Is not tried yet. name: what fx calls a node. source: what a verdict depends on, beside sizes. fixed: no size
        changes."""
        self.__name__, self.__module__ = name, type(self).__module__
        self.source, self.fixed = source, fixed
        self.trials: dict[tuple[int, ...], Trial] = {}
        """By sizes' powers of two."""

    def run(self, *args: Tensor) -> Any:
        """Runs the kernel on these tensors."""
        raise NotImplementedError

    def aten(self, *args: Tensor) -> Any:
        """Runs PyTorch's operations on these tensors."""
        raise NotImplementedError

    def __call__(self, *args: Tensor) -> Any:
        """Returns the results, which are PyTorch's while the kernel is tried."""
        key = () if self.fixed else tuple(int(size).bit_length() for one in args for size in one.shape)
        trial = self.trials.get(key)
        if trial is None:
            # `setdefault`, so that threads that come at once have one trial.
            trial = self.trials.setdefault(key, self.trial())
        if trial.kept is None:
            out = trial(*args)
            return out if self.several else out[0]
        return self.run(*args) if trial.kept else self.aten(*args)

    def trial(self) -> Trial:
        """Makes a new trial, whose results are lists."""
        return Trial(self.source, self._listed(self.run), self._listed(self.aten), on_made_inputs=self.checked)

    def _listed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function if self.several else lambda *args: (function(*args),)

    @property
    def kept(self) -> bool:
        return any(trial.kept for trial in self.trials.values())

    @property
    def verdict(self) -> dict[str, Any]:
        """Says what came of the trial of the size that was tried last."""
        return next((trial.verdict for trial in reversed([*self.trials.values()])), {})

    def settled(self) -> Callable[..., Any] | None:
        """What is called from now on: known where no size changes and the trial is over."""
        trial = self.trials.get(()) if self.fixed else None
        if trial is None or trial.kept is None:
            return None
        return self.run if trial.kept else self.aten
