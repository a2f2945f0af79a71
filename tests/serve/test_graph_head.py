"""A head as a search over the vocabulary: the map keeps the order of products, and sampling that needs all has all."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the engine's tests need it")
for package in ("transformers", "tokenizers"):
    pytest.importorskip(package, reason=f"{package} is not installed")

import numpy as np  # noqa: E402
from serve.served import write_model  # noqa: E402

from gnomon.cli.options.server import ServerOptions  # noqa: E402
from gnomon.cli.serve import settings_of  # noqa: E402
from gnomon.errors import InputError, PlanError  # noqa: E402
from gnomon.serve.graph_head import GraphHead, HeadCalibration, without_head  # noqa: E402
from gnomon.serve.load import open_model  # noqa: E402
from gnomon.serve.sampling import Sampling  # noqa: E402
from gnomon.software.engine import engine  # noqa: E402

pytestmark = pytest.mark.torch


class Nearest:
    """In place of faiss's graph: the nearest points by looking at all."""

    def __init__(self, width: int, neighbours: int) -> None:
        self.hnsw, self.width = SimpleNamespace(efConstruction=0, efSearch=0), width

    def add(self, points: Any) -> None:
        self.points = points

    def search(self, wanted: Any, count: int) -> Any:
        distance = np.square(self.points - wanted).sum(1)
        near = np.argsort(distance, kind="stable")[:count]
        return distance[None, near], near[None]


@pytest.fixture
def brute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        sys.modules, "faiss", SimpleNamespace(IndexHNSWFlat=Nearest, omp_set_num_threads=lambda count: None)
    )


@pytest.mark.parametrize("biased", [False, True])
def test_the_nearest_points_are_the_largest_products(brute: None, biased: bool) -> None:
    """Rows of very different lengths around a common mean."""
    torch.manual_seed(0)
    table = torch.randn(500, 16) * torch.rand(500, 1) * 3 + torch.randn(16)
    bias = torch.randn(500) if biased else None
    head = GraphHead(table, bias)
    for state in torch.randn(30, 16):
        wanted = (table.double() @ state.double() + (0 if bias is None else bias.double())).topk(10)
        tokens, logits = head.likeliest(state, 10, 32)
        best = logits.topk(10)
        assert tokens[best.indices.numpy()].tolist() == wanted.indices.tolist()
        torch.testing.assert_close(best.values, wanted.values.float(), rtol=1e-4, atol=1e-4)


def test_it_is_used_where_it_recalls_enough_and_is_faster(brute: None) -> None:
    ticks = iter(range(10_000))
    head = GraphHead(torch.randn(300, 8), None)
    found = head.calibrate(torch.randn(20, 8), lambda: float(next(ticks)))
    assert found.recall == 1.0 and found.width == 32 and found.graph_s == pytest.approx(1 / 20)
    assert found.pays(1) and "a graph of 300 tokens" in found.summary(300)
    slow = replace(found, graph_s=2.0)
    assert not slow.pays(1) and "exact" in slow.summary(300)
    assert not replace(found, exact_s=(1.0, 1.1, 1.2), graph_s=0.3).pays(8)
    assert not replace(found, width=0).pays(1)


def answers(folder: Path, head: str) -> tuple[Any, dict[int, list[int]]]:
    made = open_model(
        folder, replace(engine("gnomon"), max_seqs=4), dtype="fp32", kv_bytes=1 << 24, head=head
    )  # fmt: skip
    if made.head is not None:
        made.head.calibrated = HeadCalibration(width=64, recall=1.0, graph_s=0.0, exact_s=(1.0, 1.0, 1.0))
    asked = [
        Sampling(max_tokens=12, temperature=0.0), Sampling(max_tokens=9, temperature=0.8, top_k=5, seed=3),
        Sampling(max_tokens=9, temperature=0.8, seed=3), Sampling(max_tokens=5, temperature=0.0, logprobs=2),
        Sampling(max_tokens=9, temperature=0.0, repetition_penalty=1.4),
    ]  # fmt: skip
    keys = [made.add([5, 9, 33], one)[0] for one in asked]
    told: dict[int, list[int]] = {key: [] for key in keys}
    while made.has_work:
        for one in made.step():
            told[one.key].append(one.chosen.token)
    return made, {at: told[key] for at, key in enumerate(keys)}


def test_answers_are_those_of_the_product(brute: None, tmp_path: Path, capfd: Any) -> None:
    """Of a head with a bias."""
    write_model(tmp_path, "phi")
    _, wanted = answers(tmp_path, "exact")
    made, told = answers(tmp_path, "graph")
    assert told == wanted and made.vocab_size == 259
    assert made.head.searched == 12 + 9 and made.head.multiplied == 9 + 5 + 9
    said = capfd.readouterr().err
    assert "gnomon: head:" in said and "exact for requests with log-probabilities" in said


def test_what_it_does_not_do_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path, "gemma2")
    rules = engine("gnomon")
    with pytest.raises(PlanError, match="changes its logits after"):
        open_model(tmp_path, rules, dtype="fp32", kv_bytes=1 << 24, head="graph")
    with pytest.raises(InputError, match="leave --weights out"):
        open_model(tmp_path, rules, dtype="fp32", kv_bytes=1 << 24, head="graph", weights="int8")
    with pytest.raises(InputError, match="in one process"):
        settings_of(ServerOptions(folder=str(tmp_path), head="graph", tensor_parallel_size=2))
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(InputError, match=r"gnomon\[graph\]"):
        GraphHead(torch.randn(9, 4), None)


def test_a_graph_of_faiss_recalls() -> None:
    pytest.importorskip("faiss", reason="faiss is not installed: pip install gnomon[graph]")
    torch.manual_seed(0)
    table = torch.randn(3000, 8) @ torch.randn(8, 32)
    found = GraphHead(table, None).calibrate(table[::50] * 3, iter(range(10_000)).__next__)
    assert found.width and found.recall >= 0.99


def test_a_model_without_its_head_is_the_same_but_for_that() -> None:
    from gnomon.graph.outputs import without_loss
    from gnomon.models.presets import model

    whole = without_loss(model("llama-3.2-1b"))
    cut = without_head(whole)
    assert cut.weight == "model.embed_tokens.weight" and cut.width == 2048 and not cut.bias
    assert cut.graph.source(cut.graph.outputs[0])[1].dims[-1].size == 2048
    assert cut.graph.blocks[:-1] == whole.blocks[:-1]
