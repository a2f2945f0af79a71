"""`op_price` and `op_sharding`: what users say of their ops is what is priced and divided, for all sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from frontend.mixed_op import WIDE, WIDTH, Mixed, divided, mix  # noqa: E402
from torch import nn  # noqa: E402

import gnomon  # noqa: E402
from gnomon.errors import CaptureError, InputError  # noqa: E402
from gnomon.frontend import custom_ops  # noqa: E402
from gnomon.frontend.capture import CapturedModule, captured  # noqa: E402
from gnomon.frontend.opaque import share_lines, shares  # noqa: E402
from gnomon.graph import BF16, EAGER, Dtypes, Setting, Work, forward_work, grad_work, lower  # noqa: E402
from gnomon.graph.backward import backward  # noqa: E402
from gnomon.graph.plain import from_plain, to_plain  # noqa: E402
from gnomon.plans import Layout, Mesh, Plan, Schedule, Workload  # noqa: E402
from gnomon.prediction import Prediction  # noqa: E402
from gnomon.prediction.evidence import opaque_share  # noqa: E402
from gnomon.sharding import shard_graph  # noqa: E402

pytestmark = pytest.mark.torch
NAME = "gnomon_tests::mix"
OP = "mix.default"


@pytest.fixture(autouse=True)
def rules() -> Iterator[None]:
    """Rules of a test are its own."""
    before = dict(custom_ops._PRICES), dict(custom_ops._SHARDINGS)
    yield
    for rules_, old in zip((custom_ops._PRICES, custom_ops._SHARDINGS), before, strict=True):
        rules_.clear()
        rules_.update(old)


def mixed() -> CapturedModule:
    ids = torch.zeros(2, 8, dtype=torch.int64)
    return captured(Mixed(), {"ids": ids, "labels": ids}, dims={"ids": ("batch", "seq"), "labels": ("batch", "seq")})


def works(model: CapturedModule, sizes: Mapping[str, int], dtypes: Dtypes = BF16) -> tuple[Work, Work]:
    """Of the op, forward and backward."""
    block = next(block for block in model.graph.blocks if any(op.path == OP for op in block.ops))
    low, back = lower(block, EAGER), backward(block, EAGER, dtypes)
    setting = Setting(sizes=sizes, dtypes=dtypes, causal_flops="full")
    [grad] = [grad for grad in back.ops if grad.path == OP]
    return forward_work(low.op(OP), low, setting), grad_work(grad, back.forward, setting)


def price(x: Any, weight: Any, times: int) -> dict[str, Any]:
    batch, seq, width = x.shape
    return {"flops": 2 * batch * seq * width * weight.shape[1], "bytes": 2 * x.numel() + 6 * weight.numel() / 3}


def test_what_is_said_holds_for_all_sizes_and_is_opaque_no_more() -> None:
    before = mixed()
    assert shares(before.graph)["gnomon_tests.mix"].bytes > 0.05 and before.opaque
    gnomon.op_price(NAME)(price)
    after = mixed()
    assert after.opaque == () and share_lines(after.graph) == () and after.notes == before.notes
    for batch, seq in ((2, 8), (64, 4096)):
        forward, back = works(after, {"batch": batch, "seq": seq})
        assert forward.matmul_flops == 2 * batch * seq * WIDTH * WIDE
        assert forward.read_bytes + forward.write_bytes == 2 * batch * seq * WIDTH + 2 * WIDTH * WIDE
        assert back.matmul_flops == 2 * forward.matmul_flops
        assert back.read_bytes + back.write_bytes == 2 * (forward.read_bytes + forward.write_bytes)
    assert from_plain(to_plain(after.graph)) == after.graph


def test_seconds_reach_the_predicted_step() -> None:
    plan = Plan(schedule=Schedule(micro_batch_size=2))
    batch = Workload(global_batch_size=4, seq_len=64)

    def step_s() -> float:
        return gnomon.predict(mixed().graph, "1xh100-sxm", plan, batch).step_s

    plain = step_s()
    gnomon.op_price(mix)(lambda x, weight, times: {"seconds": 1e-4 * x.shape[1], "backward_seconds": 0.003})
    # two microbatches; the op's launches and bytes go
    assert step_s() - plain == pytest.approx(2 * (64e-4 + 0.003), rel=0.02)


def test_a_price_that_looks_at_sizes_is_the_examples_and_says_so() -> None:
    @gnomon.op_price(NAME)
    def stepped(x: Any, weight: Any, times: int) -> dict[str, Any]:
        return {"flops": 1000 if x.shape[1] > 4 and x.numel() > 8 else 10}

    model = mixed()
    [note] = [note for note in model.notes if "looks at sizes" in note]
    assert NAME in note and "test_custom_ops.py" in note
    assert works(model, {"batch": 2, "seq": 64})[0].matmul_flops == 1000


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (lambda x: {"flops": 1}, "op_price of gnomon_tests::mix failed: TypeError"),
        (lambda x, weight, times: 3, "returned a int; return a dict with flops"),
        (lambda x, weight, times: {"flop": 1}, "gives 'flop', did you mean 'flops'|gives 'flop'"),
        (lambda x, weight, times: {}, "says nothing; give one of flops"),
        (lambda x, weight, times: {"flops": "many"}, "gives flops = 'many', which is no number"),
        (lambda x, weight, times: {"seconds": -1.0}, "more than 0"),
        (lambda x, weight, times: {"flops": x.shape[7]}, "IndexError"),
    ],
)
def test_wrong_prices_are_errors_with_file_and_line(rule: Callable[..., object], message: str) -> None:
    gnomon.op_price(NAME)(rule)
    with pytest.raises(CaptureError, match=message) as raised:
        mixed()
    assert "test_custom_ops.py:" in str(raised.value)


def test_names_that_are_no_op() -> None:
    for name in ("mix", "a.b", 3, nn.Linear):
        with pytest.raises(InputError, match="namespace::name"):
            gnomon.op_price(name)
    with pytest.raises(InputError, match="is a function of its arguments"):
        gnomon.op_sharding(NAME)(3)  # type: ignore[type-var]


def test_ranks_have_parts_of_what_is_independent() -> None:
    gnomon.op_price(NAME)(price)

    gnomon.op_sharding(NAME)(divided)
    model = mixed()
    sizes = {"batch": 2, "seq": 8}
    whole = shard_graph(model.graph, Layout(), Mesh(), sizes, BF16)
    halves = shard_graph(model.graph, Layout(), Mesh(tp=2), sizes, BF16)
    [name] = [block.name for block in model.graph.blocks if any(op.path == OP for op in block.ops)]
    [one], [half] = ([op for op in blocks[name].ops if op.op.path == OP] for blocks in (whole, halves))
    assert (one.sizes["ffn"], half.sizes["ffn"], half.sizes["seq"]) == (WIDE, WIDE // 2, 8)
    setting = Setting(sizes=half.sizes, dtypes=BF16, causal_flops="full")
    assert forward_work(half.op, halves[name].block, setting).matmul_flops == 2 * 2 * 8 * WIDTH * WIDE // 2
    # the gradient of x, which every rank has whole, is a sum over ranks, and so is the output of what follows
    sums = [(c.path, c.kind, c.phase) for c in halves[name].collectives]
    assert sums.count((OP, "all_reduce", "backward")) == 1
    assert ("down", "all_reduce", "forward") in sums


def test_sums_over_parts_are_partial() -> None:
    @gnomon.op_sharding(NAME)
    def summing(x: Any, weight: Any, times: int) -> dict[str, Any]:
        return {"summed": {"ffn": (x.dim(2), weight.dim(0))}}

    model = mixed()
    [op] = [op for block in model.graph.blocks for op in block.ops if op.path == OP]
    assert op.captured is not None and op.captured.summed == ("ffn",) and "seq" in op.captured.whole


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (lambda x, weight, times: {"independent": [1]}, "lists 1 as independent; give dims, as x.dim"),
        (lambda x, weight, times: {"split": [x.dim(0)]}, "gives 'split'"),
        (lambda x, weight, times: {"independent": [x.dim(9)]}, "IndexError"),
    ],
)
def test_wrong_shardings_are_errors_with_file_and_line(rule: Callable[..., object], message: str) -> None:
    gnomon.op_sharding(NAME)(rule)
    with pytest.raises(CaptureError, match=message) as raised:
        mixed()
    assert "test_custom_ops.py:" in str(raised.value)


def test_the_band_is_wider_by_the_share_of_ops_without_a_rule() -> None:
    plan = Plan(mesh=Mesh(dp_replicate=8), schedule=Schedule(micro_batch_size=2))
    work = Workload(global_batch_size=16, seq_len=8)

    def predicted() -> Prediction:
        return gnomon.predict(mixed().graph, "1x8xh100-sxm", plan, work)

    opaque = predicted()
    gnomon.op_price(NAME)(lambda x, weight, times: {"flops": 1, "bytes": 1})
    priced = predicted()
    shares_ = [opaque_share(result.pricing) for result in (opaque, priced)]
    assert 0 == shares_[1] < shares_[0] < 1
    wide, narrow = (result.band.high_s / result.band.low_s for result in (opaque, priced))
    assert wide > narrow
    assert f"take {shares_[0]:.0%} of the busiest stage's forward and backward" in " ".join(opaque.assumptions)
    assert "without a rule" not in " ".join(priced.assumptions)
