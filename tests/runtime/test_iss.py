"""ISS in a run: components by the paper's definition, units removed without a change of the function, refusals.

Oracle: `nn.LSTM` itself with masked units, and each component's numbers gathered one by one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

from runtime import training  # noqa: E402
from runtime.one_process import alone  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from torch import nn  # noqa: E402

from gnomon.errors import InputError, PlanError  # noqa: E402
from gnomon.frontend.inputs import CodeModel  # noqa: E402
from gnomon.frontend.named import build, captured_of  # noqa: E402
from gnomon.graph import Graph  # noqa: E402
from gnomon.methods import check_methods  # noqa: E402
from gnomon.methods.learnt.iss import IssSettings, Lstm, lstms  # noqa: E402
from gnomon.plans import Mesh, Pass, Plan, Workload  # noqa: E402
from gnomon.prediction import predict  # noqa: E402
from gnomon.runtime import train  # noqa: E402
from gnomon.runtime.checkpoint.smaller_lstm import LstmLayers, shrink, smaller  # noqa: E402
from gnomon.runtime.launch.train import corpus_of  # noqa: E402
from gnomon.runtime.optim.iss import Iss, component_norms  # noqa: E402
from gnomon.runtime.parameters.parameters import Dtypes, Parameters, Slot  # noqa: E402

pytestmark = pytest.mark.torch

CODE = '''
import torch
from torch import nn
from torch.nn import functional as F


class Words(nn.Module):
    """Two layers, another LSTM, a linear."""

    def __init__(self, ways=1):
        super().__init__()
        self.embed = nn.Embedding(256, 8)
        self.rnn = nn.LSTM(8, 12, 2, batch_first=True, bidirectional=ways == 2)
        self.last = nn.LSTM(12 * ways, 10, batch_first=True)
        self.head = nn.Linear(10, 256)

    def forward(self, ids, labels):
        x, _ = self.last(self.rnn(self.embed(ids))[0])
        return F.cross_entropy(self.head(torch.tanh(x)).flatten(0, 1), labels.flatten())


class State(nn.Module):
    """The last state is read, not the outputs."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 8)
        self.rnn = nn.LSTM(8, 12, batch_first=True)
        self.head = nn.Linear(12, 256)

    def forward(self, ids, labels):
        h = self.rnn(self.embed(ids))[1][0][-1]
        return F.cross_entropy(self.head(h), labels[:, 0])


class Gru(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 8)
        self.rnn = nn.GRU(8, 12, batch_first=True)
        self.head = nn.Linear(12, 256)

    def forward(self, ids, labels):
        return F.cross_entropy(self.head(self.rnn(self.embed(ids))[0]).flatten(0, 1), labels.flatten())


def words():
    return Words()


def both_ways():
    return Words(2)


def state():
    return State()


def gru():
    return Gru()
'''
MODULE = "words_of_lstms"


@pytest.fixture(scope="module", autouse=True)
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("project")
    (folder / f"{MODULE}.py").write_text(CODE)
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))
    sys.modules.pop(MODULE, None)


def named(function: str) -> str:
    return f"{MODULE}:{function}(ids=int64[batch,seq],labels=int64[batch,seq])"


def graph_of(function: str) -> Graph:
    asked = CodeModel.parse(named(function))
    return captured_of(asked, build(asked, real=True, seed=0)).graph


def with_iss(plan: Plan, **params: float) -> Plan:
    return replace(plan, schedule=replace(plan.schedule, passes=(Pass(name="iss", params=tuple(params.items())),)))


def held_of(module: nn.Module, dtype: torch.dtype = torch.float64) -> Parameters:
    """A module's parameters one behind the other."""
    slots, start = [], 0
    for name, x in module.named_parameters():
        shape = tuple(x.shape)
        split = (0, 1) if x.ndim == 2 else None
        slots.append(
            Slot(name=name, shape=shape, whole=shape, offset=(0,) * x.ndim, start=start, holders=1, decays=False,
                 sums="", split=split)
        )  # fmt: skip
        start = slots[-1].stop
    kept = Dtypes(param=dtype, grad=dtype, master=None, states=dtype)
    held = Parameters(slots, kept, zero=0, shard=0, num_shards=1)
    known = dict(module.named_parameters())
    held.fill(lambda slot: known[slot.name].detach())
    return held


def component(module: nn.Module, lstm: int, layer: int, k: int) -> list[float]:
    """All numbers of a hidden unit's component, by the paper, each once."""
    own = {n: x.detach().numpy() for n, x in module.named_parameters()}
    path, last, hidden = (("rnn", 1, 12), ("last", 0, 10))[lstm]
    reader = f"{path}.weight_ih_l{layer + 1}" if layer < last else ("last.weight_ih_l0", "head.weight")[lstm]
    at = set()
    for name in (f"{path}.weight_ih_l{layer}", f"{path}.weight_hh_l{layer}"):
        at |= {(name, g * hidden + k, j) for g in range(4) for j in range(own[name].shape[1])}
    at |= {(f"{path}.weight_hh_l{layer}", i, k) for i in range(4 * hidden)}
    at |= {(reader, i, k) for i in range(len(own[reader]))}
    return [float(own[name][i, j]) for name, i, j in at]


@pytest.fixture(scope="module")
def found() -> tuple[Lstm, ...]:
    return lstms(graph_of("words"))


def test_components_are_those_of_the_paper_and_shrink_by_the_proximal_step(found: tuple[Lstm, ...]) -> None:
    assert [(one.path, [layer.hidden for layer in one.layers]) for one in found] == [("rnn", [12, 12]), ("last", [10])]
    module = build(CodeModel.parse(named("words")), real=True, seed=3)
    held = held_of(module)
    norms = {}
    for n, lstm in enumerate(found):
        for m, layer in enumerate(lstm.layers):
            norms[n, m] = component_norms(held, layer).numpy()
            wanted = [np.linalg.norm(component(module, n, m, k)) for k in range(layer.hidden)]
            np.testing.assert_allclose(norms[n, m], wanted, rtol=1e-6)
    rule, lr, before = Iss(IssSettings(decay=2.0), found, 10), 0.1, held.value("head.weight").clone()
    rule.after(held, lr)
    factors = np.maximum(0, 1 - lr * 2.0 / norms[1, 0])
    np.testing.assert_allclose(held.value("head.weight").numpy(), before.numpy() * factors, rtol=1e-9)
    assert 0 < factors.max() < 1


def test_units_without_a_component_are_removed_and_the_function_stays(found: tuple[Lstm, ...], tmp_path: Path) -> None:
    """Masked units keep biases, and with them outputs that nothing reads."""
    module = build(CodeModel.parse(named("words")), real=True, seed=1)
    own, rng = dict(module.named_parameters()), np.random.default_rng(0)
    left: dict[str, list[int]] = {}
    with torch.no_grad():
        for lstm in found:
            for layer in lstm.layers:
                gone = torch.from_numpy(rng.permutation(layer.hidden)[: layer.hidden // 3])
                left.setdefault(lstm.path, []).append(layer.hidden - len(gone))
                for name in (layer.input_weights, layer.recurrent):
                    own[name].view(4, layer.hidden, -1)[:, gone] = 0
                for name in (layer.recurrent, *layer.readers):
                    own[name][:, gone] = 0
    save_file({name: x.detach().contiguous() for name, x in own.items()}, tmp_path / "model.safetensors")
    sizes = shrink(tmp_path, tmp_path / "small", found)
    assert {path: list(of) for path, of in sizes.items()} == left == {"rnn": [8, 8], "last": [7]}
    small = smaller(build(CodeModel.parse(named("words")), real=True, seed=2), tmp_path / "small")
    ids = torch.randint(0, 256, (3, 9), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(small(ids, ids), module(ids, ids), rtol=1e-6, atol=1e-6)
    assert isinstance(small.rnn, LstmLayers) and small.head.in_features == 7
    with pytest.raises(InputError, match="begins at zeros"):
        small.rnn(torch.zeros(1, 2, 8), hx=(torch.zeros(2, 1, 12),))
    with pytest.raises(InputError, match="of a module with an LSTM 'rnn' of 2 layers, and this has none"):
        smaller(nn.Linear(2, 2), tmp_path / "small")
    with pytest.raises(InputError, match="has no iss.json"):
        smaller(module, tmp_path)


def test_a_run_leaves_a_smaller_module_with_the_same_loss(found: tuple[Lstm, ...], tmp_path: Path) -> None:
    data = tmp_path / "text"
    data.mkdir()
    (data / "a.txt").write_text("the loss goes down, line after line of the text. " * 400)
    plan, target = with_iss(training.ALONE, decay=60.0, freeze_at=0.75), tmp_path / "out"
    asked = training.job(data, plan, 8, graph=graph_of("words"), code=named("words"), export=(target, tmp_path))
    with alone():
        outcome = train(asked)
    small = smaller(build(CodeModel.parse(named("words")), real=True, seed=5), target)
    sizes = [layer.hidden_size for part in (small.rnn, small.last) for layer in part.layers]
    assert all(1 <= size < whole for size, whole in zip(sizes, (12, 12, 10), strict=True))
    assert f"rnn {sizes[0]} of 12, {sizes[1]} of 12; last {sizes[2]} of 10" in outcome.notes[0]
    held_out = corpus_of(asked).validation_batch(0, sequences=8, seq_len=32)
    assert isinstance(held_out, dict)
    loss = small(*held_out.values()).item()
    assert loss == pytest.approx(outcome.records[-1].validation_loss, rel=1e-5)
    assert not list(tmp_path.glob(".*")) and set(load_file(target / "model.safetensors")) >= {"rnn.weight_hh_l1"}


def test_its_seconds_are_predicted(found: tuple[Lstm, ...]) -> None:
    graph, work = graph_of("words"), Workload(global_batch_size=4, seq_len=16)
    plain, asked = (predict(graph, "1xcpu-process", plan, work) for plan in (training.ALONE, with_iss(training.ALONE)))
    more = asked.breakdown["OPT"] - plain.breakdown["OPT"]
    assert 0 < more == pytest.approx(asked.step_s - plain.step_s)


@pytest.mark.parametrize(
    ("function", "plan", "says"),
    [
        ("both_ways", training.ALONE, "rnn.* runs both ways or projects its units"),
        ("state", training.ALONE, "last state is read|reads rnn"),
        ("gru", training.ALONE, "has no LSTM, whose hidden units it removes"),
        ("words", replace(training.ALONE, mesh=Mesh(pp=2)), "use pp = 1"),
        ("words", replace(training.ALONE, mesh=Mesh(tp=2)), "use tp = 1"),
    ],
)
def test_what_has_no_components_is_refused(function: str, plan: Plan, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        check_methods(with_iss(plan), "run", graph_of(function))
