"""Every rule of one element by the interpreter of bodies, against ATen, on inputs that the checker makes: all dtypes,
special numbers, layouts. What differs only by rounding of numbers that cancel is compared with double."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from compiler import made  # noqa: E402
from compiler.interpreter import Failed, Lowered  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from gnomon.compiler.rules.pointwise import FORMULAS  # noqa: E402

aten = torch.ops.aten
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]
NUMBERS = {
    "threshold": 0.1, "beta": 2.0, "negative_slope": 0.01, "alpha": 1, "min_val": -0.3, "max_val": 0.7, "scale": 1.5,
    "input_scale": 1, "self_is_result": False, "value": 1, "min": -0.3, "max": 0.7, "weight": 0.3, "other": 0.1,
    "exponent": 1.3, "eps": None,
}  # fmt: skip
LEFT_OUT = {"dtype", "layout", "device", "pin_memory", "non_blocking", "memory_format", "rounding_mode", "approximate"}
GUARDED = {aten.gelu.default, aten.hardswish_backward.default, aten.hardtanh_backward.default}
"""What leaves some numbers to ATen, which has two answers for them."""
SAMPLED = {torch.float64: 2, torch.int32: 3, torch.int16: 3}
"""Dtypes whose rules are those of another dtype but for its size -> each how many-th is tried."""
SLOPE = 1e-6
"""Of the largest operand: erf and its like are within this of ATen's where they cancel."""


def arguments(op: Any) -> tuple[list[Any], dict[str, Any]]:
    """What an operation is called with: "T" where a tensor belongs."""
    args: list[Any] = []
    named: dict[str, Any] = {}
    for a in op._schema.arguments:
        if a.name in LEFT_OUT:
            continue
        value = "T" if "Tensor" in str(a.type) else NUMBERS[a.name]
        if a.kwarg_only:
            named[a.name] = value
        else:
            args.append(value)
    return args, named


def tensors(op: Any, count: int, dtype: torch.dtype, chance: torch.Generator) -> list[torch.Tensor]:
    name = str(op)
    every = [
        [made.drawn((3, 63), dtype, kind, chance) for kind in ("random", "special", "mixed")] for _ in range(count)
    ]
    given = [torch.cat(kinds) for kinds in every]
    layouts = list(made.LAYOUTS.values())
    given = [layouts[(n + count) % len(layouts)](x) for n, x in enumerate(given)]
    if "where" in name:
        given[0] = given[0] != 0
    if "masked_fill" in name or "dropout" in name:
        given[1] = given[1] > 0
    if "masked_fill.Tensor" in name:
        given[2] = given[2][0, 0]
    return given


@pytest.mark.parametrize("dtype", made.DTYPES, ids=str)
def test_each_rule_gives_what_aten_gives(dtype: torch.dtype) -> None:
    chance, tried, wrong = torch.Generator().manual_seed(0), 0, list[str]()
    for op in [*FORMULAS][:: SAMPLED.get(dtype, 1)]:
        args, named = arguments(op)
        given = tensors(op, args.count("T"), dtype, chance)

        def function(*x: torch.Tensor, op: Any = op, args: Any = args, named: Any = named) -> Any:
            left = iter(x)
            return op(*(next(left) if a == "T" else a for a in args), **named)

        if guarded := op in GUARDED:
            given = [x.contiguous() for x in given]
        try:
            function(*given)
        except (RuntimeError, NotImplementedError):  # no such operation of this dtype
            continue
        lowered = Lowered(function, *given)
        if lowered.body is None:
            continue
        tried += 1
        if guarded and dtype.is_floating_point:
            with pytest.raises(Failed):
                lowered(*(torch.full_like(x, 2e38 if op is aten.gelu.default else torch.nan) for x in given))
            given = [x.nan_to_num(0.5, 2.0, -2.0).clamp(-1e30, 1e30) for x in given]
        for a, b in zip(*lowered(*given), strict=True):
            if why := unlike(a, b, given):
                wrong.append(f"{op}{' guarded' if guarded else ''}: {why}")
    assert not wrong, "\n".join(wrong)
    assert tried > (60 if dtype.is_floating_point else 15) // SAMPLED.get(dtype, 1)


@pytest.mark.parametrize("dtype", made.FLOATS, ids=str)
def test_gradients_of_clamps_have_one_answer_for_special_numbers(dtype: torch.dtype) -> None:
    """Whatever the length of a row and its layout; or the rule leaves these numbers to ATen, whose vectors give another
    gradient of some than the rest of a row."""
    for op in [one for one in FORMULAS if "_backward" in str(one) and "dropout" not in str(one)]:
        args, named = arguments(op)

        def function(*x: torch.Tensor, op: Any = op, args: Any = args, named: Any = named) -> Any:
            left = iter(x)
            return op(*(next(left) if a == "T" else a for a in args), **named)

        for count in (3, 70):
            grad = torch.linspace(1, 2, count).to(dtype)
            for laid in (torch.clone, lambda one: torch.stack([one, one], 1)[:, 0]):
                lowered = Lowered(function, laid(grad), laid(grad))
                for number in (torch.nan, torch.inf, -torch.inf, -0.0):
                    given = [laid(grad), laid(torch.full_like(grad, number))]
                    try:
                        [a], [b] = lowered(*given)
                    except Failed:
                        continue
                    assert not unlike(a, b, given), (op, number, count)


def unlike(a: torch.Tensor, b: torch.Tensor, given: list[torch.Tensor]) -> str:
    """What differs by more than rounding."""
    if not b.is_floating_point():
        return made.apart(a, b, 0)
    narrow = b.dtype == torch.bfloat16
    if not (why := made.apart(a, b, 1.01 if narrow else 8)):
        return ""
    sizes = torch.stack([x.double().abs().nan_to_num(posinf=0).expand(b.shape) for x in given]).amax(0)
    size = torch.maximum(sizes, sizes.prod() if sizes.numel() == 1 else sizes * sizes)
    near = (a.double() - b.double()).abs() <= (SLOPE if b.dtype != torch.float64 else 1e-14) * size + 1e-6 * narrow
    rest = ~((a == b) | near | a.isnan() & b.isnan())
    return why if bool((rest & ~(a.isfinite() & b.isfinite() & near)).any()) else ""


ROWS = {
    "softmax": lambda x: F.softmax(x, -1),
    "log_softmax": lambda x: F.log_softmax(x, 0),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "logsumexp": lambda x: torch.logsumexp(x, -1),
    "std": lambda x: x.std(-1),
    "var": lambda x: x.var(0),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "amax": lambda x: x.amax(-1),
    "amin": lambda x: x.amin(0),
    "mean": lambda x: x.mean(-1),
    "any": lambda x: x.bool().any(-1),
    "cat": lambda x: torch.cat([x, -x], 0) + 0,
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_with_a_special_number_give_what_aten_gives(name: str) -> None:
    """NaN and infinities at the same places, or the body leaves the inputs to ATen."""
    chance, told = torch.Generator().manual_seed(0), 0
    for dtype in made.FLOATS:
        layout = made.LAYOUTS[["dense", "transposed", "every second"][made.FLOATS.index(dtype)]]
        plain = torch.randn(5, 9, generator=chance, dtype=torch.float64).to(dtype)
        lowered = Lowered(ROWS[name], layout(plain))
        assert lowered.body is not None
        for number in made.special(dtype):
            x = plain.clone()
            x[2, 4] = number
            try:
                [a], [b] = lowered(layout(x))
            except Failed:
                continue
            told += 1
            assert torch.equal(a.isnan(), b.isnan()), (dtype, number)
            near = 2e-2 if dtype == torch.bfloat16 else 1e-4
            torch.testing.assert_close(a, b, rtol=near, atol=1e-5, equal_nan=True)
    assert told > 100
