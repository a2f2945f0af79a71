"""Matrix products and convolutions by oneDNN or a kernel of ours where it is faster than ATen's; float32 and bfloat16.

ATen gives float32 products to its BLAS and many convolutions of one image to a product of patches, whatever the
processor; bfloat16 it gives to oneDNN, but copies a bias into the result before. `fuse(graph)` puts a `TriedMatmul` in
place of each that is large enough. Its first call tries both (`gate`), once for each size: oneDNN is kept where it is
equal and faster, ATen otherwise. A product of float32 is also tried by a kernel of ours (`linear`), beside the better
of the two. Weights are read as they lie in every call: nothing is packed ahead, so a weight that somebody writes is
seen. Leaves out batched products and attention.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, fx

from gnomon.compiler.build import address_of
from gnomon.compiler.graph.groups import root
from gnomon.compiler.kernels import linear, thin
from gnomon.compiler.machine import this_machine
from gnomon.compiler.node import Node
from gnomon.compiler.tasks.steps import Between, KernelCall, Operation, View
from gnomon.compiler.tune.gate import Trial

aten = torch.ops.aten
SHARE = 0.98
"""Of ATen's time that oneDNN may take: less is noise."""
FEWEST = 1 << 20
"""Multiplications from which on a product is tried; smaller ones by a kernel of ours
alone."""
THIN = 8
"""Rows of a large product up to which the kernel that is tried beside oneDNN's is that of few rows."""
TRANSPOSED: dict[Any, tuple[Any, ...]] = {
    aten.t.default: (),
    aten.permute.default: ([1, 0],),
    aten.transpose.int: (0, 1),
}
"""What turns (n, k) into (k, n), with its arguments."""


Steps = Callable[[Node, str, str], "list[KernelCall | Operation] | None"]


class TriedMatmul:
    """One product or convolution, as a function of its tensors: by oneDNN, a kernel of ours or ATen, as its trial
    says."""

    own: Callable[..., Tensor] | None = None
    """By a kernel of ours, where there is one for it."""
    text: str | None = None
    """Its C++."""
    by: str = "oneDNN"
    """Whose `run` is: oneDNN's, or the C++ of a kernel of ours that is tried alone."""
    in_call = False
    """Whether C++ calls the kernel, which lost only to what Python takes to call it."""
    after = "none"
    """What it ends with: `relu` or `none`."""
    form = linear.PLAIN
    """Of the kernel of ours for any number of rows."""
    cold: tuple[bool, ...] = ()
    """Which arguments come from memory in every call (`from_memory`)."""

    def __init__(
        self, name: str, run: Callable[..., Tensor], aten: Callable[..., Tensor], fixed: bool,
        steps: Steps | None = None,
    ) -> None:  # fmt: skip
        """Is not tried yet. fixed: whether no size of an argument may change. steps: of a
        node of this product and of what the trial chose (`run`, `own`, `aten`), what C++ calls."""
        self.__name__, self.__module__ = f"product_{name}", __name__  # what fx calls a node
        self.name, self.fixed = name, fixed
        self.run, self.aten, self.steps = run, aten, steps
        self.trials: dict[tuple[int, ...], Trial] = {}
        """By the power of two of each size of the arguments; by nothing where all are fixed."""

    def __call__(self, *args: Tensor) -> Tensor:
        """Returns the matmul, by the faster way; each size is tried on its first inputs."""
        # Sizes between the same two powers of two have one trial. All of them count: rows, columns or what is summed
        # over may be the one that changes, and a winner of one sum says nothing of another.
        key = () if self.fixed else tuple(int(size - 1).bit_length() for one in args for size in one.shape)
        trial = self.trials.get(key)
        if trial is None:
            own = self.own
            second = None if own is None else (str(self.text), lambda *a: (own(*a),))
            run, plain = (lambda *a: (self.run(*a),)), (lambda *a: (self.aten(*a),))
            trial_of_key = Trial(
                f"{self.by} {self.name}", run, plain, share=SHARE, second=second, second_share=SHARE, cold=self.cold
            )
            trial = self.trials.setdefault(key, trial_of_key)
        if trial.kept is None:
            result: Tensor = trial(*args)[0]
            return result
        return self._chosen(trial)(*args)

    def _chosen(self, trial: Trial) -> Callable[..., Tensor]:
        chosen: Callable[..., Tensor] = getattr(self, self._which(trial))
        return chosen

    def _which(self, trial: Trial) -> str:
        if trial.second_kept and self.own is not None:
            return "own"
        return "run" if trial.kept else "aten"

    @property
    def texts(self) -> list[str]:
        """C++ of the kernels of ours that are tried."""
        return [*([] if self.text is None else [self.text]), *([] if self.by == "oneDNN" else [self.by])]

    @property
    def kept(self) -> bool:
        """Whether oneDNN runs it."""
        kept = any(t.kept and not t.second_kept for t in self.trials.values())
        return self.by == "oneDNN" and kept and not self.in_call

    @property
    def own_kept(self) -> bool:
        """Whether a kernel of ours runs it."""
        used = any(t.second_kept or (self.by != "oneDNN" and t.kept) for t in self.trials.values())
        return used or self.in_call

    def step(self, node: Node) -> list[KernelCall | Operation] | None:
        """What C++ calls in a node's place; None where only Python does."""
        trial = self.trials.get(()) if self.fixed else None
        if trial is None or trial.kept is None or self.steps is None:
            return None
        which = self._in_call(trial)
        steps = self.steps(node, which, self.after)
        self.in_call = steps is not None and which != self._which(trial)
        return steps

    def _in_call(self, trial: Trial) -> str:
        """What C++ calls: a kernel of ours too that lost by less than Python takes to call it in a trial."""
        which, second = self._which(trial), trial.verdict.get("second", {})
        if self.own is not None and which != "own" and _nearly(second):
            return "own"
        return "run" if which == "aten" and self.by != "oneDNN" and _nearly(trial.verdict) else which

    def settled(self) -> Callable[..., Tensor] | None:
        """What is called from now on, without asking which: known where no size changes and the trial is over."""
        if not self.fixed or not self.trials:
            return None
        trial = self.trials[()]
        return None if trial.kept is None else self._chosen(trial)


def _nearly(verdict: dict[str, Any]) -> bool:
    """Whether a kernel of ours that was right lost to nothing but what Python takes to call it."""
    return "kernel_s" in verdict and verdict["kernel_s"] - verdict["aten_s"] < thin.CALL_S


def fuse(graph: fx.Graph) -> list[TriedMatmul]:
    """Puts a `TriedMatmul` in place of each product and convolution that is large enough; returns them."""
    if not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return []
    calls, cold = [], from_memory(graph)
    for node in list(graph.nodes):
        found = _matmul(node) or _convolution(node)
        if found is None:
            continue
        call, arguments = found
        call.cold = tuple(root(one) in cold for one in arguments)
        last = _relu(node, call)
        with graph.inserting_before(last):
            new = graph.call_function(call, arguments)
        new.meta.update(last.meta)
        last.replace_all_uses_with(new)
        for one in dict.fromkeys((last, node)):
            graph.erase_node(one)
        calls.append(call)
    return calls


PRODUCTS = (aten.addmm.default, aten.mm.default, aten.convolution.default)


def from_memory(graph: fx.Graph) -> set[Node]:
    """Inputs of a graph that its products read, where the last cache does not hold all of them: each call finds them in
    memory, as the other products were called since. A kernel that waits for memory more than another may win of one
    weight alone and lose in the model. Empty where they stay in cache, or sizes are not known."""
    read = {root(one) for node in graph.nodes if node.target in PRODUCTS for one in node.all_input_nodes}
    inputs = {node for node in read if node.op == "placeholder"}
    values = [node.meta.get("val") for node in inputs]
    sizes = [v.numel() * v.itemsize for v in values if isinstance(v, Tensor)]
    total = sum(size for size in sizes if isinstance(size, int))
    return inputs if total > this_machine().l3_bytes else set()


def _relu(node: Node, call: TriedMatmul) -> Node:
    """What the product ends with: a ReLU that alone reads it is taken in; else the product itself."""
    user = next(iter(node.users)) if len(node.users) == 1 else None
    if user is None or user.target is not aten.relu.default:
        return node
    run, plain, own = call.run, call.aten, call.own
    if own is not None:
        call.own = lambda *args: own(*args, after="relu")
    # oneDNN's own ReLU of what is not a number is 0, by which it would be lost
    call.run = (lambda *args: run(*args).relu_()) if call.by == "oneDNN" else lambda *args: run(*args, after="relu")
    call.after = "relu"
    call.aten = lambda *args: torch.relu(plain(*args))
    # The name is part of what a verdict is kept by.
    call.name = call.name.replace(" ", "+relu ", 1)
    return user


def _plain(node: Any) -> Tensor | None:
    """The fake tensor of a node, where oneDNN reads such tensors."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, Tensor) or value.device.type != "cpu" or value.layout != torch.strided:
        return None
    return value if value.dtype in dtypes() and not value.is_neg() else None


@cache
def dtypes() -> tuple[torch.dtype, ...]:
    """Those of which oneDNN has fast products on this processor."""
    bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return (torch.float32, torch.bfloat16) if bf16 else (torch.float32,)


def _matmul(node: Node) -> tuple[TriedMatmul, tuple[Node, ...]] | None:
    """Reads an `addmm` or `mm` as a matmul with its inputs; None where no kernel of ours takes it."""
    if node.target not in (aten.addmm.default, aten.mm.default) or node.kwargs:
        return None
    *bias, x, w = node.args
    values = [_plain(one) for one in (*bias, x, w)]
    if any(value is None for value in values) or (bias and values[0].dim() != 1):  # type: ignore[union-attr]
        return None
    if len({value.dtype for value in values}) > 1:  # type: ignore[union-attr]
        return None
    # [m, n, k].
    sizes = (*node.meta["val"].shape, values[-2].shape[1])  # type: ignore[union-attr]
    fixed = [size for size in sizes if isinstance(size, int)]
    if len(fixed) < 2 or (bias and not isinstance(sizes[1], int)):
        return None
    small = len(fixed) == 3 and sizes[0] * sizes[1] * sizes[2] < FEWEST
    back = isinstance(w, fx.Node) and w.op == "call_function" and tuple(w.args[1:]) == TRANSPOSED.get(w.target)
    weight = w.args[0] if back else w  # the transpose of a transpose is the tensor itself
    run, plain = (_linear, _aten_linear) if back else (_times, _aten_times)
    if bias and values[0].shape[0] != sizes[1]:  # type: ignore[union-attr]
        return None
    known = len(fixed) == 3
    name = f"{'linear' if back else 'matmul'} {'x'.join(map(str, fixed))}"
    call = TriedMatmul(name, run, plain, known, partial(_linear_steps, back))
    float32 = values[0].dtype == torch.float32  # type: ignore[union-attr]
    laid: tuple[Any, Any] = (values[-2], weight.meta["val"] if back else values[-1].t())  # type: ignore[union-attr]
    few = float32 and known and thin.of_rows(*laid, False) is not None
    if small:
        if not float32 or not known:
            return None
        call.form = linear.LinearForm(least=linear.least_of(sizes[0]))
        call.run, call.by = _own(few, back), thin.source()
        if not few:
            call.run, call.by = partial(_own(False, back), form=call.form), linear.source(call.form)
        return call, (*bias, x, weight)
    if few and sizes[0] <= THIN:
        call.own, call.text = _own(True, back), thin.source()
        return call, (*bias, x, weight)
    if float32:
        call.form = linear.form_of(*laid)
        call.own, call.text = partial(_own(False, back), form=call.form), linear.source(call.form)
    return call, (*bias, x, weight)


def _own_linear(*args: Tensor, after: str = "none", form: linear.LinearForm = linear.PLAIN) -> Tensor:
    out = linear.linear(*args, after=after, form=form)
    if out is not None:
        return out
    out = _aten_linear(*args)
    return torch.relu(out) if after == "relu" else out


def _thin_linear(*args: Tensor, after: str = "none") -> Tensor:
    """(bias,) x (m, k), weight (n, k), of few rows."""
    *bias, x, w = args
    call = thin.of_rows(x, w, after == "relu")
    out = thin.run(call, x, w, bias[0] if bias else None, (x.shape[0], w.shape[0]))
    return _own_linear(*args, after=after) if out is None else out


def _thin_times(*args: Tensor, after: str = "none") -> Tensor:
    """(bias,) x (m, k), w (k, n), of few rows."""
    return _thin_linear(*args[:-1], args[-1].t(), after=after)


def _own(few: bool, back: bool) -> Callable[..., Tensor]:
    """The kernel of ours: of few rows or any, of a weight that is turned back or not."""
    if few:
        return _thin_linear if back else _thin_times
    return _own_linear if back else _own_times


def _linear_steps(back: bool, node: Node, which: str, after: str) -> list[KernelCall | Operation] | None:
    """Returns the steps of (bias,) x (m, k) and a weight (n, k), or (k, n) where it is not turned back."""
    *bias, x, w = node.args
    turned: Any = View(node=w, like=w.meta["val"].t())
    values = x.meta["val"], w.meta["val"] if back else turned.like
    if which == "aten":
        turned = turned if back else w
        if bias:
            return _with_relu(torch.ops.aten.addmm.default, (bias[0], x, turned, 1, 1), node, after)
        return _with_relu(torch.ops.aten.mm.default, (x, turned), node, after)
    matmul: Any = node.target
    if which == "run" and matmul.by == "oneDNN":
        operands: tuple[Any, ...] = (x, w if back else turned, bias[0] if bias else None, "none", [], "")
        return _with_relu(torch.ops.mkldnn._linear_pointwise.default, operands, node, after)
    is_thin = (matmul.by if which == "run" else matmul.text) == thin.source()
    call: Any = (thin.of_rows if is_thin else linear.of_rows)(*values, after == "relu")
    return _called(thin.kernel() if is_thin else linear.kernel(matmul.form), call, node, x, w, bias)


def _called(
    kernel: Any, call: Any, node: Node, x: Node, w: Node, bias: list[Node]
) -> list[KernelCall | Operation] | None:
    """A kernel of ours with its struct, whose result lies as the graph says."""
    if kernel is None or call is None or not node.meta["val"].is_contiguous():
        return None
    inputs = (("x", x), ("w", w), *(("bias", one) for one in bias))
    return [KernelCall(function=address_of(kernel), filled=call, inputs=inputs, outputs=(("out", node),))]


def _with_relu(target: Any, args: tuple[Any, ...], node: Node, after: str) -> list[KernelCall | Operation]:
    """An operation of ATen's, and a ReLU where it ends with one."""
    if after != "relu":
        return [Operation(target=target, args=args, results=(node,))]
    between = Between(node.meta["val"])
    first = Operation(target=target, args=args, results=(between,))
    return [first, Operation(target=torch.ops.aten.relu.default, args=(between,), results=(node,))]


def _own_times(*args: Tensor, after: str = "none", form: linear.LinearForm = linear.PLAIN) -> Tensor:
    return _own_linear(*args[:-1], args[-1].t(), after=after, form=form)


def _linear(*args: Tensor) -> Tensor:
    """(bias,) x (m, k), weight (n, k)."""
    *bias, x, weight = args
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias[0] if bias else None, "none", [], "")
    return out


def _aten_linear(*args: Tensor) -> Tensor:
    *bias, x, weight = args
    return torch.addmm(bias[0], x, weight.t()) if bias else torch.mm(x, weight.t())


def _times(*args: Tensor) -> Tensor:
    """(bias,) x (m, k), w (k, n)."""
    return _linear(*args[:-1], args[-1].t())


def _aten_times(*args: Tensor) -> Tensor:
    return torch.addmm(*args) if len(args) == 3 else torch.mm(*args)


def _convolution(node: Node) -> tuple[TriedMatmul, tuple[Node, ...]] | None:
    """Takes a `convolution` of fixed sizes along two dims, or of few positions along one or two; None for another."""
    if node.target is not aten.convolution.default or node.kwargs:
        return None
    x, weight, bias, stride, padding, dilation, *growth = node.args
    tensors = (x, weight) if bias is None else (x, weight, bias)
    values = [_plain(one) for one in tensors]
    if any(value is None for value in values) or len({value.dtype for value in values}) > 1:  # type: ignore[union-attr]
        return None
    if growth[0] or any(growth[1]) or growth[2] != 1:  # transposed, output padding, groups
        return None
    sizes = [*values[0].shape, *values[1].shape, *stride, *padding, *dilation]  # type: ignore[union-attr]
    # 3 + 3 sizes and a stride, a padding and a dilation along one dim; 4 + 4 and two of each along two dims.
    if len(sizes) not in (9, 14) or not all(isinstance(size, int) for size in sizes):
        return None
    stride, padding, dilation = list(stride), list(padding), list(dilation)
    options = (stride, padding, dilation)
    dims: int = values[0].dim()  # type: ignore[union-attr]
    few = values[0].dtype == torch.float32 and thin.of_positions(values[0], values[1], *options, False)  # type: ignore[arg-type, union-attr]

    def run(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        call = torch.ops.mkldnn._convolution_pointwise
        out: Tensor = call(x, weight, bias, padding, stride, dilation, 1, "none", [], "")
        return out

    def plain(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch.convolution(x, weight, bias, stride, padding, dilation, False, [0] * (dims - 2), 1)

    def by_thin(x: Tensor, weight: Tensor, bias: Tensor | None = None, after: str = "none") -> Tensor:
        call = thin.of_positions(x, weight, *options, after == "relu")
        out = None if call is None else thin.run(call, x, weight, bias, thin.shape_of(call, x.shape[0], dims))
        if out is not None:
            return out
        return torch.relu(plain(x, weight, bias)) if after == "relu" else plain(x, weight, bias)

    def steps(node: Node, which: str, after: str) -> list[KernelCall | Operation] | None:
        x, weight, *bias = node.args
        one = bias[0] if bias else None
        if which == "own" or (which == "run" and matmul.by != "oneDNN"):
            call = thin.of_positions(x.meta["val"], weight.meta["val"], *options, after == "relu")
            return _called(thin.kernel(), call, node, x, weight, bias)
        if which == "run":
            operands: tuple[Any, ...] = (x, weight, one, padding, stride, dilation, 1, "none", [], "")
            return _with_relu(torch.ops.mkldnn._convolution_pointwise.default, operands, node, after)
        operands = (x, weight, one, stride, padding, dilation, False, [0] * (dims - 2), 1)
        return _with_relu(aten.convolution.default, operands, node, after)

    matmul = TriedMatmul(f"convolution {'x'.join(map(str, sizes))}", run, plain, True, steps)
    if dims == 3 and not few:
        return None
    if dims == 3:
        matmul.run, matmul.by = by_thin, thin.source()
    elif few:
        matmul.own, matmul.text = by_thin, thin.source()
    return matmul, tensors
