"""Loops and branches that stay what they are: bodies of `scan`, `while_loop` and `cond` are compiled as graphs of their
own (Cocktailer, OSDI 2023).

`compile_bodies` puts the compiled function in the place of each body, so that a loop of a thousand steps is compiled
as its one step. A body's groups are tried in the first step that runs. Leaves out the loop itself, which is a step of a
run (`steps`) or PyTorch's, and other operations of higher order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensor
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

LOOPS = ("scan", "while_loop", "cond")
Compiler = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]


class CompiledBody(torch.nn.Module):
    """A compiled body, called as the graph that it was."""

    def __init__(self, function: Callable[[list[Any]], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        """What the graph returns."""
        return self.function(list(args))


def compile_bodies(module: fx.GraphModule, compiler: Compiler) -> list[CompiledBody]:
    """Compiles the bodies of a graph's loops and branches and puts them in their place; returns them."""
    modules = []
    for node in module.graph.nodes:
        if not isinstance(node.target, torch._ops.HigherOrderOperator) or node.target.name() not in LOOPS:
            continue
        for argument in node.args:
            name = str(argument.target) if isinstance(argument, fx.Node) and argument.op == "get_attr" else ""
            body = getattr(module, name, None)
            if isinstance(body, fx.GraphModule):
                _without_overlap(body)
                # Under the same name, so that the operation of higher order calls it as it called the graph.
                setattr(module, name, CompiledBody(compiler(body, [])))
                modules.append(getattr(module, name))
    return modules


def _without_overlap(body: fx.GraphModule) -> None:
    """Declares no argument of a body as expanded: it is traced with the first step's, and those of later steps, which
    the body returned, have numbers of their own where these share one."""
    inputs = [node.meta.get("val") for node in body.graph.nodes if node.op == "placeholder"]
    dense = [one.clone(memory_format=torch.contiguous_format) if _overlaps(one) else one for one in inputs]
    if any(one is not other for one, other in zip(inputs, dense, strict=True)):
        mode = next(one.fake_mode for one in dense if isinstance(one, FakeTensor))
        FakeTensorProp(body, mode).propagate_dont_convert_inputs(*dense)


def _overlaps(value: Any) -> bool:
    """Whether it is the fake tensor of one that is expanded along a dim."""
    if not isinstance(value, FakeTensor) or value.layout != torch.strided:
        return False
    return any(
        isinstance(stride, int) and stride == 0 and not (isinstance(size, int) and size == 1)
        for size, stride in zip(value.shape, value.stride(), strict=True)
    )
