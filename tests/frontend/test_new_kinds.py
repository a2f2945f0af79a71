"""Two kinds that a file of `ops/` and a torch function add, `clip` and `nm_linear`: captured, priced, divided over
tp, trained. The oracle is the module itself, in fp64."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from frontend.new_kinds import PLANS, batch, module, run  # noqa: E402
from frontend.train import SETTINGS, STEPS  # noqa: E402
from torch.nn import functional  # noqa: E402

from gnomon import ops  # noqa: E402
from gnomon.errors import PlanError  # noqa: E402
from gnomon.frontend import call_rules  # noqa: E402
from gnomon.frontend.capture import captured  # noqa: E402
from gnomon.graph import BF16, FUSED, Setting, backward, forward_work, gradients  # noqa: E402
from gnomon.hardware import catalogue  # noqa: E402
from gnomon.ops.op import RuledCall  # noqa: E402
from gnomon.plans import Layout  # noqa: E402
from gnomon.prices.curves import curves_for  # noqa: E402
from gnomon.prices.kernels import op_seconds  # noqa: E402
from gnomon.runtime.ops import function_of  # noqa: E402
from gnomon.runtime.processes.launch import launch  # noqa: E402
from gnomon.sharding import Scene, setting_of, strategies  # noqa: E402

pytestmark = pytest.mark.torch


def test_they_are_captured_priced_and_divided() -> None:
    graph = captured(module(), batch()).graph
    (block,) = {block.name: block for block in graph.blocks if block.does("multiplies")}.values()
    kinds = {op.kind: op for op in block.ops}
    assert kinds["clip"].attrs == (("max", 0.75), ("min", -0.5)) and kinds["nm_linear"].attrs == (("m", 4), ("n", 2))
    back = backward(block, FUSED, BF16)
    clip, wide = kinds["clip"], next(op for op in block.ops if op.kind == "nm_linear")
    assert clip.inputs[0] in {saved.tensor.name for saved in back.saved}  # what a clamp's backward compares
    setting = Setting(sizes={"batch": 4, "seq": 8}, dtypes=BF16, causal_flops="full")
    work = forward_work(wide, block, setting)
    assert work.matmul_flops == work.extra_matmul_flops == 32 * 16 * 24  # half of 2·m·n·k each
    h100 = catalogue.device("h100-sxm")
    seconds = {op.path: op_seconds(op, block, setting, h100, curves_for(h100)).device_s for op in block.ops}
    assert seconds[clip.path] > 0 and seconds[wide.path] > 0
    scene = Scene(axis_sizes={"tp": 2}, sizes={"batch": 4, "seq": 8}, dtypes=BF16)
    ways = [strategies(op, setting_of(block, Layout(), scene))[0] for op in block.ops if op.kind == "nm_linear"]
    assert [way.name for way in ways] == ["column", "row"] and ways[1].outputs[0].partial == ("tp",)
    with pytest.raises(PlanError, match="no whole groups of m = 4; lower tp"):
        strategies(
            kinds["nm_linear"],
            setting_of(block, Layout(), Scene(axis_sizes={"tp": 4}, sizes=scene.sizes, dtypes=BF16)),
        )


def test_they_are_trained_as_the_module_is() -> None:
    model, wanted = module(), []
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=SETTINGS.lr, betas=SETTINGS.betas, eps=SETTINGS.eps, weight_decay=SETTINGS.weight_decay
    )
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(**batch())
        loss.backward()
        optimizer.step()
        wanted.append(float(loss.detach()))
    by_rank = launch(run, 2)
    assert set(PLANS) == set(by_rank[0])
    for name in PLANS:
        sums = [sum(by_rank[rank][name][step] for rank in by_rank) for step in range(STEPS)]
        assert sums == pytest.approx(wanted, rel=1e-12), name


class Cached(torch.nn.Module):
    """Attention of new tokens over keys and values that lie in blocks, between a table and a head."""

    def __init__(self) -> None:
        super().__init__()
        function_of("paged_attention")  # defines the custom op
        self.table, self.head = torch.nn.Embedding(32, 16), torch.nn.Linear(16, 32)
        generator = torch.Generator().manual_seed(2)
        self.register_buffer("keys", torch.randn(9, 2, 4, 4, generator=generator))
        self.register_buffer("values", torch.randn(9, 2, 4, 4, generator=generator))

    def forward(self, ids: torch.Tensor, blocks: torch.Tensor, lengths: torch.Tensor, targets: torch.Tensor) -> Any:
        x = self.table(ids)
        q = x.unflatten(-1, (4, 4))
        seen = torch.ops.gnomon.paged_attention(q, self.keys, self.values, blocks, lengths, True, 0, 0.5)
        return functional.cross_entropy(self.head(x + seen.flatten(-2)).view(-1, 32), targets.view(-1))


def test_attention_over_blocks_is_captured_priced_and_divided() -> None:
    generator = torch.Generator().manual_seed(3)
    given = {name: torch.randint(0, 32, (4, 8), generator=generator) for name in ("ids", "targets")}
    given |= {"blocks": torch.randint(0, 9, (4, 5), generator=generator), "lengths": torch.tensor([8, 20, 13, 9])}
    graph = captured(Cached(), given).graph
    (block,) = (block for block in graph.blocks if block.does("attends blocks"))
    op = next(op for op in block.ops if op.kind == "paged_attention")
    assert op.attrs == (("causal", True), ("scale", 0.5), ("window", 0))
    assert [len(block.tensor(name).dims) for name in op.inputs] == [4, 4, 4, 2, 1]
    setting = Setting(sizes={"batch": 4, "seq": 8}, dtypes=BF16, causal_flops="full")
    # q kᵀ and p v of 4 · 8 · 4 rows over the 20 positions of five blocks, of widths 4 and 4
    assert forward_work(op, block, setting).matmul_flops == 2 * 128 * 20 * 8
    h100 = catalogue.device("h100-sxm")
    assert op_seconds(op, block, setting, h100, curves_for(h100)).device_s > 0
    assert op.outputs[0] not in gradients(block)


def test_the_rule_that_a_kind_names_for_a_call_is_there() -> None:
    """No call is left `opaque` because a kind's file names a rule that nobody wrote; no call has two kinds."""
    calls = [call for kind in ops.every() if kind.calls != "none" for call in kind.calls]
    assert len({call.function for call in calls}) == len(calls)
    ruled = {call.rule for call in calls if isinstance(call, RuledCall)}
    assert all(callable(getattr(call_rules, rule)) for rule in ruled)
