"""`python -m gnomon.watch [--plan FILE] [--records FILE] train.py ARGUMENTS`: a training script watched as it is.

`main(argv)` runs the script as Python does, and puts `watch` around its loop at its first update: the optimizer is the
one that steps, the model the outermost module that was called with gradients and holds the optimizer's parameters.
Under torchrun: `torchrun --nproc-per-node 2 -m gnomon.watch train.py …`. Leaves out scripts without torch.optim.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from gnomon.errors import GnomonError
from gnomon.runtime.watch.watch import Watch, watch

DESCRIPTION = "Runs a training script and says what to expect of its steps, what they take, and what drifts."


class _FirstUpdate:
    """Waits for the script's first update, and then watches its loop."""

    def __init__(self, plan: str | None, records: str | None) -> None:
        self.plan, self.records = plan, records
        self.watching: Watch | None = None
        self.depth = 0
        self.outermost: dict[int, nn.Module] = {}
        """Modules that were called with gradients from outside of any module, by id, the last call last."""
        self.hooks: list[Any] = [
            register_module_forward_pre_hook(self._begins),
            register_module_forward_hook(self._ends, always_call=True),
            register_optimizer_step_post_hook(self._updated),
        ]

    def _begins(self, module: nn.Module, args: Any) -> None:
        if self.depth == 0 and torch.is_grad_enabled():
            self.outermost.pop(id(module), None)
            self.outermost[id(module)] = module
        self.depth += 1

    def _ends(self, module: nn.Module, args: Any, output: Any) -> None:
        self.depth -= 1

    def _updated(self, optimizer: torch.optim.Optimizer, args: Any, named: Any) -> None:
        if self.watching is not None:
            return
        updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for module in reversed(self.outermost.values()):
            # A loss with parameters of its own, or a discriminator, is not what this optimizer updates.
            if updated & {id(p) for p in module.parameters()}:
                self.stop()
                self.watching = watch(module, optimizer, self.plan, records=self.records)
                return

    def stop(self) -> None:
        """Takes the hooks away."""
        for hook in self.hooks:
            hook.remove()
        self.hooks, self.outermost = [], {}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the script; its exit status is Python's. 2 where the request is wrong."""
    parser = argparse.ArgumentParser(prog="python -m gnomon.watch", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument(
        "--plan",
        metavar="FILE",
        help="a plan file, or a job file of another program: its prediction is what is expected",
    )
    parser.add_argument("--records", metavar="FILE", help="one JSON object a step")
    parser.add_argument("script", metavar="SCRIPT", help="a Python file that trains")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="…", help="the script's own")
    options = parser.parse_args(argv)
    if not Path(options.script).is_file():
        print(
            f"gnomon: cannot read {options.script!r}: no such file; give the Python file that trains", file=sys.stderr
        )
        return 2
    first = _FirstUpdate(options.plan, options.records)
    sys.argv = [options.script, *options.arguments]
    # As `python train.py` has it: the script's modules are found beside it.
    sys.path[0] = str(Path(options.script).resolve().parent)
    try:
        runpy.run_path(options.script, run_name="__main__")
    except GnomonError as error:
        print(f"gnomon: {error}", file=sys.stderr)
        return 2
    finally:
        first.stop()
        if first.watching is not None:
            first.watching.close()
    if first.watching is None:
        print(
            "gnomon: nothing was watched: no torch.optim.Optimizer made a step on the parameters of a module that was "
            "called with gradients",
            file=sys.stderr,
        )
    return 0
