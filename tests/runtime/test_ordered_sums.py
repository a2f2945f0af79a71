"""Sums over logical workers: the same bits wherever the workers are, and few gradients held at once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

from torch import Tensor  # noqa: E402

from gnomon.methods.easyscale import Node, halves, nodes_of  # noqa: E402
from gnomon.runtime.mesh.ordered_sums import Partial, _finished, exchange  # noqa: E402

pytestmark = pytest.mark.torch

placements = st.integers(1, 4).flatmap(lambda n: st.lists(st.integers(0, n - 1), min_size=1, max_size=17))


def gradients(workers: int) -> list[Tensor]:
    """Of sizes so different that every other order of sums has other bits."""
    generator = torch.Generator().manual_seed(workers)
    scale = 10.0 ** torch.arange(workers).remainder(7)
    return [torch.randn(40, generator=generator) * factor for factor in scale]


def tree(grads: list[Tensor], node: Node) -> Tensor:
    """The sum as it is defined."""
    if node[1] - node[0] == 1:
        return grads[node[0]]
    left, right = halves(node)
    return tree(grads, left) + tree(grads, right)


def held_by(process: int, placement: list[int]) -> list[int]:
    return [worker for worker, place in enumerate(placement) if place == process]


@settings(deadline=None)
@given(placements, st.randoms(use_true_random=False))
def test_the_bits_do_not_depend_on_where_workers_are_nor_on_who_is_done_first(placement, chance) -> None:  # type: ignore[no-untyped-def]
    total, grads = len(placement), gradients(len(placement))
    parts: dict[Node, Tensor] = {}
    for process in set(placement):
        partial, mine = Partial(total), held_by(process, placement)
        for worker in chance.sample(mine, len(mine)):
            partial.add(worker, [grads[worker].clone()])
        assert list(sorted(partial.sums)) == nodes_of(mine, total)
        parts |= {node: grads[0] for node, grads in partial.sums.items()}
    assert torch.equal(_finished(parts, (0, total)), tree(grads, (0, total)))


@settings(deadline=None)
@given(placements)
def test_every_worker_is_in_one_node(placement: list[int]) -> None:
    nodes = [node for process in set(placement) for node in nodes_of(held_by(process, placement), len(placement))]
    assert sorted(worker for low, high in nodes for worker in range(low, high)) == list(range(len(placement)))


@given(st.integers(1, 300))
def test_a_process_holds_few_sums_whatever_the_number_of_its_workers(total: int) -> None:
    partial = Partial(total)
    for worker in range(total):
        partial.add(worker, [torch.ones(1)])
        assert len(partial.sums) <= total.bit_length()
    assert [float(grad) for grads in partial.sums.values() for grad in grads] == [total]


def test_another_order_shows() -> None:
    """The gradients of these tests are told apart by bits."""
    grads = gradients(5)
    assert not torch.equal(tree(grads, (0, 5)), tree(grads[::-1], (0, 5)))


def test_one_process_alone_is_given_its_sum() -> None:
    out = torch.empty(3)
    exchange({(0, 2): torch.arange(3.0)}, out, [[(0, 2)]], 2, None)
    assert torch.equal(out, torch.arange(3.0))
