"""Batches of many lengths under a budget: no bit changes, no step is above it, and rows cost what they hold."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

import gnomon  # noqa: E402
from gnomon.cli import main  # noqa: E402
from gnomon.errors import RunError  # noqa: E402
from gnomon.models.llama import LlamaConfig, llama  # noqa: E402
from gnomon.models.mixtral import MixtralConfig, mixtral  # noqa: E402
from gnomon.plans import Mesh, Pass, Plan, PlanFile, Precision, Schedule, Workload, save_plan_file  # noqa: E402
from gnomon.runtime.data import Corpus, Source  # noqa: E402
from gnomon.runtime.launch.job import PreparedJob  # noqa: E402
from gnomon.runtime.step import feed  # noqa: E402
from gnomon.runtime.watch.layer_bytes import LiveBytes  # noqa: E402

pytestmark = pytest.mark.torch

SEQ_LEN, MIB = 256, 2**20
GRAPH = llama(
    LlamaConfig(
        name="narrow",
        num_layers=4,
        hidden_size=64,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        ffn_size=160,
        vocab_size=256,
    )
)
MOE = mixtral(
    MixtralConfig(
        name="narrow-moe", num_layers=1, hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, vocab_size=128,
        expert_ffn_size=32, num_experts=4, experts_per_token=2,
    )
)  # fmt: skip
WORK = Workload(global_batch_size=4, seq_len=SEQ_LEN)
CPU = torch.device("cpu")
PARAGRAPHS = [part for part in (Path(__file__).parents[2] / "docs" / "methods.md").read_text().split("\n\n") if part]


def plan(budget: str = "", dtype: str = "fp32", pp: int = 1, collect: int = 6) -> Plan:
    precision = Precision(param=dtype, compute=dtype, grad=dtype, reduce=dtype, master="none", states=dtype)
    passes = (Pass(name="mimose", params=(("budget", budget), ("collect", collect))),) if budget else ()
    return Plan(mesh=Mesh(pp=pp), schedule=Schedule(num_microbatches=4, passes=passes), precision=precision)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A record for each paragraph of a page."""
    path = tmp_path_factory.mktemp("text") / "paragraphs.jsonl"
    path.write_text("".join(json.dumps({"text": part}) + "\n" for part in PARAGRAPHS))
    return path


@pytest.fixture(scope="module")
def corpus(text: Path) -> Corpus:
    return Corpus.open(Source(path=text, packing="padded", cache=text.parent / "tokens"))


def batch_of(corpus: Corpus, step: int) -> dict[str, torch.Tensor]:
    return corpus.batch(step, seed=1, sequences=WORK.global_batch_size, seq_len=SEQ_LEN)


def most_of_step(job: PreparedJob, batch: dict[str, torch.Tensor]) -> tuple[float, int]:
    """(loss, most bytes that tensors took)."""
    live, before = LiveBytes(CPU), job.executor.resident_bytes()
    with live:
        loss = job.step(batch)
    return loss, before + live.most


def test_no_bit_changes_and_no_step_is_above_the_budget(corpus: Corpus) -> None:
    budget = int(8 * MIB)
    with gnomon.prepare(GRAPH, plan(), workload=WORK, seed=3) as plain:
        expected = [most_of_step(plain, batch_of(corpus, step)) for step in range(1, 7)]
        state = plain.state_dict()
    assert max(most for _, most in expected) > budget, "the budget asks for nothing"
    with gnomon.prepare(GRAPH, plan(f"{budget} B"), workload=WORK, seed=3) as job:
        actual = [most_of_step(job, batch_of(corpus, step)) for step in range(1, 7)]
        mimose = job.executor.compute.mimose
        assert all(torch.equal(value, state[name]) for name, value in job.state_dict().items())
    assert [loss for loss, _ in actual] == [loss for loss, _ in expected]
    assert max(most for _, most in actual) <= budget
    controller = mimose.controller
    assert controller.estimate.error < 0.02 and controller.found > 0
    counts = {size: len(layers) for size, layers in sorted(controller.choices.items())}
    assert list(counts.values()) == sorted(counts.values()) and len(set(counts.values())) > 1
    assert job.executor.notes[0].startswith(f"mimose measured {len(controller.samples)} microbatches")


def test_a_batch_beyond_the_budget_ends_the_run(corpus: Corpus) -> None:
    with gnomon.prepare(GRAPH, plan("2 MiB"), workload=WORK, seed=3) as job:
        with pytest.raises(RunError, match="with every layer recomputed, of mimose's budget of 2.00 MiB"):
            job.step(batch_of(corpus, 1))


def test_a_layer_holds_what_autograd_keeps_of_it() -> None:
    """Of a product and a sine: the operand, the weight not, and the output."""
    live, x, w = LiveBytes(CPU), torch.ones(8, 8, requires_grad=True), torch.ones(8, 8, requires_grad=True)
    with live:
        y = (x @ w).sin()  # the product is kept for the sine, which is made
        assert (live.now, live.most) == (512, 512)
        live.again()
        y.sum().backward()  # the cosine, the gradient of the product, two gradients of 256 bytes that stay
        assert live.most >= 512 + 512
    del y
    assert live.now == 512
    x.grad = w.grad = None
    assert live.now == 0


def test_padding_changes_nothing(corpus: Corpus) -> None:
    """Rows cut to the longest of their microbatch have the loss of whole ones."""
    losses = []
    for cut in (True, False):
        with gnomon.prepare(GRAPH, plan(dtype="fp64"), workload=WORK, seed=3) as job:
            batches = [batch_of(corpus, step) for step in range(1, 4)]
            taken = [{k: x for k, x in one.items() if cut or k != "lengths"} for one in batches]
            losses.append([job.step(one) for one in taken])
            rows = job.executor.feed.of_unit(2)["input_ids"]
            assert rows.shape == (1, int(batches[-1]["lengths"][2]) if cut else SEQ_LEN)
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_rows_are_documents_each_once(corpus: Corpus) -> None:
    rows = corpus.rows(0, SEQ_LEN)
    assert int((rows.lengths - 1).sum()) == int((corpus.training.lengths - 1).sum())
    batch = batch_of(corpus, 2)
    for row, length in enumerate(batch["lengths"].tolist()):
        assert (batch["labels"][row, length:] == -1).all() and (batch["labels"][row, :length] >= 0).all()


def test_run_says_what_it_chose(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = PlanFile(
        model="llama-tiny",
        on="local:1",
        workload=Workload(global_batch_size=8, seq_len=SEQ_LEN),
        plan=replace(plan("75 MiB"), mesh=Mesh()),
        stack="gnomon",
    )
    save_plan_file(file, tmp_path / "plan.toml")
    told = ["run", str(tmp_path / "plan.toml"), "--data", str(text), "--packing", "padded", "--steps", "1"]
    assert main(told) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "mimose recomputes as many layers as the length of each microbatch asks for, within 75.0 MiB" in said
    assert "the prediction, and tokens a second, take rows of seq_len" in said
    assert re.search(r"mimose measured \d+ microbatches", said)
    save_plan_file(replace(file, plan=plan("1 MiB")), tmp_path / "plan.toml")
    assert main(told) == 2
    assert "mimose has a budget of 1.00 MiB" in capsys.readouterr().err


@pytest.mark.parametrize(("given", "says"), [(plan(pp=2), "use pp = 1"), (plan(), "experts")])
def test_padding_is_refused_where_lengths_must_be_one(given: Plan, says: str) -> None:
    graph = GRAPH if says != "experts" else MOE
    assert says in (feed.one_length_reason(graph, given, SEQ_LEN) or "")
