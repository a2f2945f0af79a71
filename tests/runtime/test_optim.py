"""Update rules are torch's own, on flat parameters; learning rates follow their schedules."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

from gnomon.errors import PlanError  # noqa: E402
from gnomon.runtime.optim.learning_rate import LearningRate  # noqa: E402
from gnomon.runtime.optim.matrix import orthogonal  # noqa: E402
from gnomon.runtime.optim.update import STATES, AdamWSettings, Update  # noqa: E402
from gnomon.runtime.parameters.parameters import Dtypes, Parameters, Slot  # noqa: E402

pytestmark = pytest.mark.torch

SHAPES = ((6, 4), (5,), (3, 8))
SETTINGS = AdamWSettings(lr=0.01)


def held() -> Parameters:
    slots, start = [], 0
    for index, shape in enumerate(SHAPES):
        slot = Slot(
            name=f"p{index}", shape=shape, whole=shape, offset=(0,) * len(shape), start=start, holders=1, sums="",
            decays=len(shape) > 1,
            split=(0, 1) if len(shape) > 1 else None,
        )  # fmt: skip
        slots.append(slot)
        start = slot.stop
    fp64 = torch.float64
    return Parameters(
        slots, Dtypes(param=fp64, grad=fp64, master=None, states=fp64), zero=0, shard=0, num_shards=1
    )  # fmt: skip


def theirs(kind: str, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": SETTINGS.weight_decay},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    o, lr, betas = torch.optim, SETTINGS.lr, SETTINGS.betas
    return {
        "adamw": lambda: o.AdamW(groups, lr=lr, betas=betas),
        "adam": lambda: o.Adam(groups, lr=lr, betas=betas),
        "sgd": lambda: o.SGD(groups, lr=lr),
        "momentum": lambda: o.SGD(groups, lr=lr, momentum=SETTINGS.momentum),
        "adafactor": lambda: o.Adafactor(groups, lr=lr),
    }[kind]()


@pytest.mark.parametrize("kind", sorted(STATES.keys() - {"lion", "muon"}))
def test_a_rule_is_torchs(kind: str) -> None:
    mine = held()
    generator = torch.Generator().manual_seed(1)
    begin = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    mine.fill(lambda slot: begin[int(slot.name[1])])
    parameters = [torch.nn.Parameter(value.clone()) for value in begin]
    optimizer, update = theirs(kind, parameters), Update.of(mine, kind)
    for _ in range(4):
        for index, parameter in enumerate(parameters):
            grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.grad = grad.clone()
            mine.add_grad(f"p{index}", grad)
        optimizer.step()
        update.update(mine, SETTINGS, scale=1.0)
        mine.drop_grad()
    for index, parameter in enumerate(parameters):
        assert torch.allclose(mine.value(f"p{index}"), parameter, rtol=1e-12, atol=1e-14)


def test_lion_by_hand() -> None:
    mine = held()
    mine.fill(lambda slot: torch.ones(slot.shape))
    mine.add_grad("p1", torch.tensor([1.0, -2.0, 0.0, 3.0, -0.5], dtype=torch.float64))
    update = Update.of(mine, "lion")
    update.update(mine, SETTINGS, scale=1.0)
    assert mine.value("p1").tolist() == pytest.approx([0.99, 1.01, 1.0, 0.99, 1.01])
    assert update.first is not None and float(update.first[24]) == pytest.approx(0.05)


def test_muon_moves_matrices_along_an_orthogonal_direction() -> None:
    mine = held()
    mine.fill(lambda slot: torch.zeros(slot.shape))
    grad = torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    mine.add_grad("p2", grad)
    Update.of(mine, "muon").update(mine, SETTINGS, scale=1.0)
    moved = -mine.value("p2") / SETTINGS.lr
    assert torch.allclose(moved, orthogonal((grad * 0.19)[None])[0], atol=1e-9)
    assert torch.linalg.svdvals(moved).sub(1).abs().max() < 0.35  # Newton and Schulz's iteration comes so near


def test_gradients_are_the_sum_of_terms_wherever_they_are_written() -> None:
    """The first term is written, later ones are added; what has none is 0."""
    mine = held()
    left, right = torch.randn(6, 9, dtype=torch.float64), torch.randn(9, 4, dtype=torch.float64)
    mine.add_matmul("p0", left, right)
    mine.add_matmul("p0", left, right)
    mine.add_rows("p2", torch.tensor([2, 0, 2]), torch.ones(3, 8, dtype=torch.float64))
    grad = mine.whole_grad()
    assert torch.allclose(grad[:24].view(6, 4), 2 * left @ right)
    assert grad[24:29].tolist() == [0.0] * 5
    assert grad[29:].view(3, 8)[:, 0].tolist() == [1.0, 0.0, 2.0]


@pytest.mark.parametrize(
    ("rate", "factors"),
    [
        (LearningRate(warmup_steps=2), [0.5, 1.0, 1.0, 1.0, 1.0]),
        (LearningRate(shape="linear", total_steps=4), [1.0, 0.75, 0.5, 0.25, 0.0]),
        (LearningRate(shape="cosine", total_steps=4, final=0.5), [1.0, 0.9267766952966369, 0.75, 0.5732233047, 0.5]),
        (LearningRate(shape="wsd", total_steps=4, decay_steps=2, warmup_steps=1), [1.0, 1.0, 1.0, 0.5, 0.0]),
    ],
)
def test_learning_rates_by_hand(rate: LearningRate, factors: list[float]) -> None:
    assert [rate.factor(step) for step in range(5)] == pytest.approx(factors)


def test_a_schedule_without_an_end_is_refused() -> None:
    with pytest.raises(PlanError, match="give total_steps"):
        LearningRate(shape="cosine")
    with pytest.raises(PlanError, match="decay_steps"):
        LearningRate(shape="wsd", total_steps=4)
