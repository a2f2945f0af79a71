"""Groups that read the same memory are one kernel where that is legal."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")
from compiler.traced import same  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from gnomon.compiler.graph.groups import Group, rebuilt  # noqa: E402
from gnomon.compiler.graph.siblings import join_siblings  # noqa: E402
from gnomon.compiler.program import PlannedGroup, _asked, _loops  # noqa: E402

pytestmark = pytest.mark.torch
Tensors = tuple[torch.Tensor, ...]


def test_gradients_of_both_halves_are_one_group_that_reads_once() -> None:
    def backward(gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor) -> Tensors:
        return grad * F.silu(gate), torch.ops.aten.silu_backward(grad * up, gate)

    made = same(backward, *torch.randn(3, 6, 40).unbind(0), groups=1)
    [one] = made.program.groups
    assert len(one.kernel.slots) == 3 and len(one.outputs) == 2


def test_groups_over_other_sizes_or_with_little_in_common_stay_apart() -> None:
    x, bias = torch.randn(8, 12), torch.randn(12)
    same(lambda a: (a.exp() * 2, a[:, :6].tanh() * 3), x, groups=2)
    same(lambda a, b, v: (F.gelu(a + v), torch.cumsum(b, 0).exp() * v), x, x + 1, bias, groups=2)


def test_what_is_written_between_two_groups_keeps_them_apart() -> None:
    def function(a: torch.Tensor) -> Tensors:
        b = a.clone()
        first = b.exp() * b
        b.add_(1)
        return first, b.tanh() * b, b

    same(function, torch.randn(5, 16))


@pytest.mark.parametrize("through_another", [True, False])
def test_groups_that_wait_for_each_other_through_a_third_stay_apart(through_another: bool) -> None:
    """`c` makes what the last reads and reads what the first makes: it would wait for both as one, and they for it."""

    def function(x: torch.Tensor, y: torch.Tensor) -> Tensors:
        c = x.abs() * 2
        a = x.exp() * y
        return a.abs() + 3, x.tanh() * c

    graph = make_fx(function, tracing_mode="fake")(torch.randn(4, 32), torch.randn(4, 32)).graph
    abs_, mul, exp, mul_1, abs_1, add, tanh, mul_2 = (n for n in graph.nodes if n.op == "call_function")
    parts = [[exp, mul_1], [tanh, mul_2]]
    parts += [[abs_, mul, abs_1, add]] if through_another else [[abs_, mul], [abs_1, add]]
    kept = []
    for members in parts:
        body = rebuilt(members)
        assert body is not None
        kept.append(Group(members=members, body=body))
    made = join_siblings(graph, kept, _asked(graph, kept), lambda body, nodes: _loops(body, nodes, None, set()), None)
    together = any({exp, tanh} <= set(group.members) for group in made)
    assert together is not through_another


STEPS: tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], ...] = (
    lambda a, b: a * torch.sigmoid(b),
    lambda a, b: F.gelu(a),
    lambda a, b: torch.tanh(a) + b,
    lambda a, b: F.softmax(a, -1) * b,
    lambda a, b: torch.cumsum(a, 0) * 0.1,
    lambda a, b: a.flip(0),
    lambda a, b: a - b.mean(-1, keepdim=True),
    lambda a, b: a * b.abs().sum(0) * 0.01,
)
CHOSEN = st.lists(
    st.tuples(st.integers(0, len(STEPS) - 1), st.integers(0, 3), st.integers(0, 9)), min_size=5, max_size=10
)


@given(steps=CHOSEN, shape=st.sampled_from([(5, 33), (64, 16)]))
@settings(max_examples=6, deadline=None, derandomize=True, database=None)
def test_any_graph_of_branches_gives_what_eager_gives(
    steps: list[tuple[int, int, int]], shape: tuple[int, ...]
) -> None:
    """Many branches of the first values, with operations between that only ATen runs. Every node is in one group at
    most, and no unit runs before what it reads."""

    def function(a: torch.Tensor, b: torch.Tensor) -> Tensors:
        made = [a, b]
        for which, i, j in steps:
            made.append(STEPS[which](made[i % len(made)], made[j % len(made)]))
        return tuple(one * 1 for one in made[2:])

    torch.manual_seed(0)
    made = same(function, torch.randn(shape), torch.randn(shape))
    members = [node for planned in made.program.groups for node in planned.group.members]
    assert len(members) == len(set(members))
    there: set[torch.fx.Node] = set()
    for unit in made.program.units:
        wanted = unit.inputs if isinstance(unit, PlannedGroup) else unit.all_input_nodes
        assert set(wanted) <= there
        there.update(unit.outputs if isinstance(unit, PlannedGroup) else [unit])
