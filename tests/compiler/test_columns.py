"""Embedding columns in one kernel: the same rows as eager, whatever numbers, bags and shapes; ATen's errors."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the compiler's tests need it")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from gnomon.compiler import backend  # noqa: E402
from gnomon.compiler.build import has_compiler  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not has_compiler(), reason="needs a C++ compiler"),
    pytest.mark.filterwarnings("ignore:torch.searchsorted"),  # eager copies what lies apart, and says so
]

ROWS = 50
NEAR = {torch.float32: {"rtol": 1e-6, "atol": 1e-6}, torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2}}
KINDS = ("plain", "hash", "bucket", "clamp", "sum", "mean", "bag", "bag mean", "ragged", "int32", "dense")


class Columns(torch.nn.Module):
    """Columns of the given kinds, each with a table of its own width."""

    def __init__(self, kinds: list[str], right: bool = False) -> None:
        super().__init__()
        self.kinds, self.right = kinds, right
        bags = {"bag": "sum", "bag mean": "mean", "ragged": "mean"}
        self.tables = torch.nn.ModuleList(
            torch.nn.EmbeddingBag(ROWS, 3 + 4 * (i % 5), mode=bags[kind])
            if kind in bags
            else torch.nn.Embedding(ROWS, 3 + 4 * (i % 5))
            for i, kind in enumerate(kinds)
        )
        self.register_buffer("at", torch.tensor([-1.0, 0.0, 0.0, 0.25, 0.5, 0.5, 0.75]))

    def forward(self, ids: Any, many: Any, values: Any, flat: Any, offsets: Any) -> Any:
        parts = []
        for i, (kind, table) in enumerate(zip(self.kinds, self.tables, strict=True)):
            one = ids[:, i % ids.shape[1]]
            numbers = {
                "plain": lambda one=one: one % ROWS,
                "hash": lambda one=one: (one * 31 - 7) % ROWS,
                "bucket": lambda i=i: torch.bucketize(values[:, i % 3], self.at, right=self.right),
                "clamp": lambda one=one: (one ^ 5).clamp(3, ROWS - 1),
                "int32": lambda: many.int()[:, 0],
            }
            if kind in numbers:
                parts.append(table(numbers[kind]()))
            elif kind in ("sum", "mean"):
                parts.append(getattr(table(many), kind)(1))
            elif kind == "ragged":
                parts.append(table(flat, offsets))
            elif kind == "dense":
                parts.append(values)
            else:
                parts.append(table(many))
        return torch.cat(parts, 1)


def inputs(rows: int, length: int) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(-(2**40), 2**40, (rows, 4), generator=generator)
    many = torch.randint(0, ROWS, (rows, length), generator=generator)
    values = torch.rand((rows, 3), generator=generator)
    values[0] = torch.tensor([0.5, float("nan"), 0.0])
    offsets = torch.randint(0, 3, (rows,), generator=generator).cumsum(0)
    offsets[0] = 0
    flat = torch.randint(0, ROWS, (int(offsets[-1]) + 2,), generator=generator)
    return ids, many, values, flat, offsets


def compiled(module: Any, dynamic: bool = False) -> Any:
    torch._dynamo.reset()
    return torch.compile(module, backend=backend.gnomon, dynamic=dynamic)


def by_kernel(function: Any, given_: tuple[Any, ...]) -> Any:
    """What the kernel gives, whatever the trial said of its speed."""
    function(*given_)
    [columns] = backend.reports[-1].columns
    assert "wrong" not in columns.trial.verdict
    columns.trial.kept, columns.first = True, False
    return function(*given_)


@settings(max_examples=6)
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=2, max_size=9).map(lambda kinds: ["plain", "hash", *kinds, "bag"]),
    rows=st.integers(2, 40),
    length=st.integers(1, 9),
    right=st.booleans(),
    dtype=st.sampled_from(list(NEAR)),
)
def test_any_columns_are_those_of_eager(kinds: list[str], rows: int, length: int, right: bool, dtype: Any) -> None:
    module = Columns([*kinds, "clamp"], right).eval().to(dtype)
    given_ = tuple(one.to(dtype) if one.is_floating_point() else one for one in inputs(rows, length))
    with torch.no_grad():
        result = by_kernel(compiled(module), given_)
        torch.testing.assert_close(result, module(*given_), **NEAR[dtype], equal_nan=True)


def test_one_compilation_serves_any_number_of_rows() -> None:
    module = Columns(list(KINDS)).eval()
    with torch.no_grad():
        function = compiled(module, dynamic=True)
        by_kernel(function, inputs(7, 5))
        for rows, length in ((8, 5), (33, 2), (600, 9)):
            given_ = inputs(rows, length)
            torch.testing.assert_close(function(*given_), module(*given_), rtol=1e-6, atol=1e-6, equal_nan=True)
    assert len(backend.reports[-1].columns) == 1


def test_stacked_rows_beside_what_a_perceptron_makes_are_columns() -> None:
    tables = torch.nn.ModuleList(torch.nn.Embedding(ROWS, 8) for _ in range(5))
    bottom = torch.nn.Linear(3, 8)

    def stacked(ids: Any, dense: Any) -> Any:
        return torch.stack([bottom(dense), *[table(ids[:, i]) for i, table in enumerate(tables)]], 1)

    ids, dense = torch.randint(0, ROWS, (9, 5)), torch.rand(9, 3)
    with torch.no_grad():
        torch.testing.assert_close(by_kernel(compiled(stacked), (ids, dense)), stacked(ids, dense))


def test_rows_that_are_stacked_are_columns_too() -> None:
    tables = torch.nn.ModuleList(torch.nn.Embedding(ROWS, 8) for _ in range(6))

    def stacked(ids: Any) -> Any:
        return torch.stack([table(ids[:, i]) for i, table in enumerate(tables)], 1)

    ids = torch.randint(0, ROWS, (20, 6))
    with torch.no_grad():
        assert torch.equal(by_kernel(compiled(stacked), (ids,)), stacked(ids))
        for table in tables:
            table.to(torch.bfloat16)
        assert torch.equal(by_kernel(compiled(stacked), (ids,)), stacked(ids))


@pytest.mark.parametrize("features", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_bags_of_bfloat16_are_floats_that_are_rounded_once(features: Any) -> None:
    module, given_ = Columns(["sum", "mean", "bag", "bag mean", "bucket"]), list(inputs(11, 7))
    module.tables.to(torch.bfloat16)
    module.at, given_[2] = module.at.to(features), given_[2].to(features)
    with torch.no_grad():
        made = by_kernel(compiled(module), tuple(given_))
        assert torch.equal(made, module.float()(*given_).to(torch.bfloat16))


def test_tables_of_two_dtypes_stay_atens() -> None:
    tables = torch.nn.ModuleList(torch.nn.Embedding(ROWS, 8) for _ in range(6))
    tables[3].to(torch.bfloat16)

    def joined(ids: Any) -> Any:
        return torch.cat([table(ids[:, i]) for i, table in enumerate(tables)], 1)

    ids = torch.randint(0, ROWS, (20, 6))
    with torch.no_grad():
        assert torch.equal(compiled(joined)(ids), joined(ids))
        assert not backend.reports[-1].columns


@pytest.mark.parametrize("by", [1, 7, ROWS])
def test_any_number_is_hashed_as_eager_does(by: int) -> None:
    tables = torch.nn.ModuleList(torch.nn.Embedding(ROWS, 3) for _ in range(4))

    def hashed(ids: Any) -> Any:
        return torch.cat([table(ids[:, i] % by) for i, table in enumerate(tables)], 1)

    edges = torch.tensor([0, 1, by, 2**51 - 1, 2**51, 2**51 + 1, 2**63 - 1, -(2**63)])
    near = torch.randint(-(2**51), 2**51, (64,)) // by * by + torch.randint(-1, 2, (64,))
    ids = torch.cat([near, edges, -edges, torch.randint(-(2**62), 2**62, (49,))])[:, None].repeat(1, 4)
    with torch.no_grad():
        assert torch.equal(by_kernel(compiled(hashed), (ids,)), hashed(ids))


def test_a_number_outside_its_table_is_atens_error() -> None:
    tables = torch.nn.ModuleList(torch.nn.Embedding(ROWS, 8) for _ in range(6))

    def looked_up(ids: Any) -> Any:
        return torch.cat([table(ids[:, i]) for i, table in enumerate(tables)], 1)

    ids = torch.randint(0, ROWS, (20, 6))
    with torch.no_grad():
        function = compiled(looked_up)
        by_kernel(function, (ids,))
        ids[13, 4] = ROWS
        with pytest.raises(IndexError, match="index out of range"):
            function(ids)


def test_training_gives_the_gradients_of_eager() -> None:
    module = Columns([kind for kind in KINDS if kind != "ragged"])
    given_, gradients = inputs(12, 4), []
    for function in (module, compiled(module)):
        for _ in range(2):  # on trial, and after it
            module.zero_grad()
            function(*given_).square().sum().backward()
        gradients.append([p.grad.clone() for p in module.parameters() if p.grad is not None])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_default_dtype_of_the_users_does_not_change_the_result() -> None:
    module, given_ = Columns(list(KINDS)).eval(), inputs(7, 3)
    before = torch.get_default_dtype()
    with torch.no_grad():
        expected = module(*given_)
        try:
            torch.set_default_dtype(torch.float64)
            out = by_kernel(compiled(module), given_)
        finally:
            torch.set_default_dtype(before)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6, equal_nan=True)
