"""A backward compares what the forward kept with what it makes again: the same bits, whoever computes which."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from compiler.interpreter import Lowered  # noqa: E402
from compiler.test_rules import arguments  # noqa: E402
from compiler.traced import compiled, run  # noqa: E402
from functorch.compile import aot_function, make_boxed_func  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.checkpoint import CheckpointPolicy  # noqa: E402

from gnomon.compiler.backend import partition  # noqa: E402
from gnomon.compiler.graph import kept  # noqa: E402
from gnomon.compiler.machine import this_machine  # noqa: E402
from gnomon.compiler.rules import RULES  # noqa: E402
from gnomon.compiler.rules.pointwise import FORMULAS  # noqa: E402

aten = torch.ops.aten
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]


class Otherwise(TorchDispatchMode):
    """Moves by one unit in the last place what a kernel may round otherwise than ATen."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        alike = func not in RULES or func in kept.PASSED or func in kept.CHOICES
        if alike or not isinstance(out, torch.Tensor) or not out.is_floating_point():
            return out
        return torch.nextafter(out, torch.full_like(out, math.inf))


CHOICES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "amax": lambda x: F.gelu(x).amax(-1),
    "amin of a view": lambda x: (F.gelu(x).t() * 2 + 1).amin(0),
    "max": lambda x: F.silu(x).max(),
    "max, subtracted": lambda x: (y := F.silu(x) * 3e9) - y.amax(-1, keepdim=True),
    "infinite norm": lambda x: torch.linalg.vector_norm(F.gelu(x), math.inf, dim=-1),
    "logsumexp": lambda x: (y := F.silu(x) * 5e21) - torch.logsumexp(y, 1, True),
    "logcumsumexp": lambda x: torch.logcumsumexp(F.gelu(x) * 1e9, -1),
    "log_softmax": lambda x: F.cross_entropy(F.gelu(x) * 1e12, torch.zeros(len(x), dtype=torch.long)),
    "of a layer norm": lambda x: F.layer_norm(x, x.shape[-1:]).amax(-1),
}


@pytest.mark.parametrize("name", CHOICES)
def test_a_backward_by_another_hand_chooses_what_the_forward_chose(name: str) -> None:
    """Forward or backward by kernels whose last bits differ, the other one ATen's."""
    x = torch.randn(40, 33)

    def by(moved: bool) -> Callable[..., Any]:
        def compiler(module: Any, _: Any) -> Any:
            def call(args: list[Any]) -> Any:
                if not moved:
                    return module(*args)
                with Otherwise():
                    return module(*args)

            return make_boxed_func(lambda *args: call(list(args)))

        return compiler

    def gradient(function: Callable[..., Any]) -> torch.Tensor:
        given = x.clone().requires_grad_()
        made = function(given)
        (g,) = torch.autograd.grad(made, given, torch.linspace(1, 2, made.numel()).view(made.shape))
        return g

    wanted = gradient(CHOICES[name])
    assert wanted.isfinite().all()
    for forward in (True, False):
        function = aot_function(
            CHOICES[name], fw_compiler=by(forward), bw_compiler=by(not forward), partition_fn=partition
        )
        torch.testing.assert_close(gradient(function), wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_what_is_not_kept_has_atens_bits(dtype: torch.dtype) -> None:
    """Of ordinary numbers and of sums that cancel, where a product that is not rounded before it is added shows."""
    chance, tried = torch.Generator().manual_seed(0), 0
    for op in [op for op in FORMULAS if op in kept.SAME_BITS]:
        args, named = arguments(op)
        named = {key: 0.7 if key in ("alpha", "value") else value for key, value in named.items()}
        if dtype == torch.bfloat16 and "alpha" in named:  # ATen's vectors and the rest of a row have two answers
            named["alpha"] = 1
        given = [torch.randn(3, 67, generator=chance, dtype=torch.float64).to(dtype) for _ in range(args.count("T"))]
        if len(given) > 1:
            given[0][0] = given[1][0] * -0.7
        if op is aten.where.self:
            given[0] = given[0] > 0
        if "masked_fill" in str(op):
            given[1] = given[1] > 0
        if op is aten.masked_fill.Tensor:
            given[2] = given[2][0, 0]

        def function(*x: torch.Tensor, op: Any = op, args: Any = args, named: Any = named) -> Any:
            left = iter(x)
            return op(*(next(left) if a == "T" else a for a in args), **named)

        try:
            function(*given)
        except (RuntimeError, NotImplementedError):
            continue
        lowered = Lowered(function, *given)
        if lowered.body is None:
            continue
        tried += 1
        for a, b in zip(*lowered(*given), strict=True):
            assert torch.equal(a.nan_to_num(7) if b.is_floating_point() else a, b.nan_to_num(7)), (op, named)
    assert tried > 40


def test_a_product_that_is_added_is_rounded_once_as_atens() -> None:
    """In vectors and in the rest of a row; the last bit is what a sum that cancels leaves."""

    def sums(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a = -a  # one kernel for all
        x = torch.addcmul(a, b, c, value=0.5)
        return x, torch.add(a, b, alpha=0.7), torch.rsub(a, b, alpha=0.3), torch.lerp(a, b, c), torch.lerp(a, b, 0.6)

    for dtype in (torch.float32, torch.float64):
        b, c = torch.randn(2, 5, 67, dtype=dtype).unbind()
        a = 0.5 * b * c
        graph = compiled(sums, a, b, c)
        assert len(graph.program.groups) == 1
        made, eager = run(graph, a, b, c), sums(a, b, c)
        if this_machine().isa.name == "generic":  # has no such instruction, nor has ATen there
            torch.testing.assert_close(made, eager)
            continue
        assert all(torch.equal(x, y) for x, y in zip(made, eager, strict=True))
        assert bool((eager[0] != 0).any())


def test_what_is_to_be_computed_again_is_kept_where_a_choice_outside_reads_it() -> None:
    """`torch.utils.checkpoint`: a choice within what is computed again needs nothing, one behind it does."""
    for inside in (True, False):
        graph = torch.fx.Graph()
        x = graph.placeholder("x")
        gelu = graph.call_function(aten.gelu.default, (x,))
        amax = graph.call_function(aten.amax.default, (graph.call_function(aten.mul.Tensor, (gelu, 2)), [-1]))
        gelu.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
        if inside:
            amax.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
        assert kept.keep(graph) == (not inside)
        saved = CheckpointPolicy.PREFER_RECOMPUTE if inside else CheckpointPolicy.MUST_SAVE
        assert gelu.meta["recompute"] is saved
