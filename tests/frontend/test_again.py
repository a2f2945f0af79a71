"""A captured module whose layers are computed again, or whose tensors go to the host, trains to the same bits."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from frontend import project  # noqa: E402
from frontend.own_runs import BASE, SETTINGS  # noqa: E402
from runtime.one_process import alone  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from gnomon.errors import PlanError  # noqa: E402
from gnomon.frontend.capture import CapturedModule, captured  # noqa: E402
from gnomon.plans import Saved, SavedRule, Workload  # noqa: E402
from gnomon.runtime.launch.captured_job import executor, random_ops, weights_of  # noqa: E402
from gnomon.runtime.watch.layer_bytes import LiveBytes  # noqa: E402
from gnomon.tensors.captured import Node, Use, writes_over  # noqa: E402

pytestmark = pytest.mark.torch
STEPS = 2


class Part(nn.Module):
    """Draws numbers, writes what it makes into memory part by part, and sees pairs of it as complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.up(x) * (torch.rand_like(x[..., :1]) + 0.5)
        parts = torch.zeros_like(wide)
        parts[..., :32] = torch.sin(wide[..., :32])
        parts[..., 32:] = torch.tanh(wide[..., 32:]) * wide[..., :32]
        pairs = torch.view_as_complex(parts.unflatten(-1, (-1, 2)))
        parts = torch.view_as_real(pairs * torch.polar(pairs.abs() + 1, pairs.real)).flatten(-2)
        return x + functional.dropout(self.down(parts * parts), 0.2, self.training)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.h, self.head = nn.Embedding(68, 32), nn.ModuleList(Part() for _ in range(3)), nn.Linear(32, 68)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x = self.table(idx)
        for part in self.h:
            x = part(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


@pytest.fixture(scope="module")
def net() -> tuple[Net, CapturedModule]:
    torch.manual_seed(0)
    module = Net().double()
    return module, captured(module, {name: x[:2] for name, x in project.batches(1).items()})


def ran(net: tuple[Net, CapturedModule], saved: Saved) -> tuple[list[float], dict[str, Tensor], int]:
    """Losses, weights after them, and bytes at the peak of a step."""
    with alone():
        job = executor(*net, replace(BASE, saved=saved), Workload(global_batch_size=4, seq_len=16), settings=SETTINGS)
        torch.manual_seed(3)
        losses = [float(job.step(project.batches(step)).loss) for step in range(STEPS)]
        weights, live = weights_of(job), LiveBytes(torch.device("cpu"))
        with live:
            job.step(project.batches(0))
        return losses, weights, live.most


def rule(action: str, *tensors: str) -> Saved:
    return Saved(rules=(SavedRule(calls="*", tensors=tensors, action=action),))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "saved",
    [
        Saved(preset="full"),
        rule("recompute", "*"),
        rule("recompute", "mul*", "dropout*"),
        rule("recompute", "setitem*"),
        rule("offload", "*"),
    ],
    ids=lambda saved: f"{saved.preset} {[(rule.action, rule.tensors) for rule in saved.rules]}",
)
def test_random_numbers_are_drawn_again_and_memory_is_written_again(
    net: tuple[Net, CapturedModule], saved: Saved
) -> None:
    assert len(random_ops(net[1].graph)) == 2 and len(net[1].graph.layers()) > 3
    losses, weights, most = ran(net, Saved())
    again, same, less = ran(net, saved)
    assert again == losses
    assert all(x.equal(same[name]) for name, x in weights.items())
    if saved.preset == "full" or saved == rule("recompute", "*"):
        assert less < most


class Over(nn.Module):
    """Writes over what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2.0)
        return self.b(torch.sin(self.a(x)))


def test_a_layer_that_writes_over_what_it_reads_is_said(net: tuple[Net, CapturedModule]) -> None:
    module = Net().double()
    module.h = nn.ModuleList(Over().double() for _ in range(3))
    example = {name: x[:2] for name, x in project.batches(1).items()}
    with pytest.raises(PlanError, match=r"test_again\.py:\d+\) writes over what its layer reads"):
        ran((module, captured(module, example)), rule("recompute", "*"))


def test_what_is_written_over_is_found_through_views() -> None:
    view = Node(target="aten.slice.Tensor", args=(Use("x"), 0, 0, 2), outputs=("y",), view=True)
    write = Node(target="aten.copy_.default", args=(Use("y"), Use("z")), outputs=("w",))
    other = Node(target="aten.add_.Tensor", args=(Use("made"), Use("z")), outputs=("v",))
    assert writes_over(("x", "z"), (view, write, other)) == ("x",)


def test_dropout_is_the_kind_and_drawn_in_a_run(net: tuple[Net, CapturedModule]) -> None:
    """On the CPU torch writes it out; priced and kept as one op it is a byte an element."""
    graph = net[1].graph
    assert {op.path for block in graph.blocks for op in block.ops if op.kind == "dropout"} == {"dropout"}
    assert not any("bernoulli" in target for _, _, target in net[1].opaque)
    with alone():
        job = executor(*net, replace(BASE, saved=Saved()), Workload(global_batch_size=4, seq_len=16), settings=SETTINGS)
        (stage,) = job.stages.values()
        made: list[Tensor] = []
        stage.watch = lambda layer, name, x: made.append(x.detach()) if name == "dropout" else None
        job.step(project.batches(1))
        assert made and all(0.1 < float((x == 0).double().mean()) < 0.3 for x in made)
