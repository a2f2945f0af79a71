"""A user's own module trains under plans as it does in a plain loop; its weights go in and out by its own names."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

torch = pytest.importorskip("torch")

from frontend import mixed_op, own_runs, project  # noqa: E402
from frontend.own_runs import BASE, CODE, FLOAT, LADDER, LADDERS, PLANS, SEED, SETTINGS, STEPS  # noqa: E402
from runtime.ranks import launch  # noqa: E402
from torch import nn  # noqa: E402

from gnomon.cli import main  # noqa: E402
from gnomon.errors import GraphError, InputError, PlanError  # noqa: E402
from gnomon.frontend.capture import captured  # noqa: E402
from gnomon.graph import BF16  # noqa: E402
from gnomon.graph.text_inputs import ids_of, labels_of  # noqa: E402
from gnomon.hardware import parse_cluster  # noqa: E402
from gnomon.models.presets import model as preset  # noqa: E402
from gnomon.plans import Layout, Mesh, PlanFile, Precision, Workload, save_plan_file  # noqa: E402
from gnomon.prediction import predict  # noqa: E402
from gnomon.prediction.memory import buffer_sizes  # noqa: E402
from gnomon.runtime.data import Corpus, Source  # noqa: E402
from gnomon.runtime.data.own_batches import OwnBatches, OwnData, TextBatches  # noqa: E402
from gnomon.runtime.launch.captured_job import randomness  # noqa: E402
from gnomon.runtime.launch.train import corpus_of  # noqa: E402
from gnomon.runtime.module.blocks import BlockRun  # noqa: E402
from gnomon.runtime.module.crossings import Shapes, hops  # noqa: E402
from gnomon.runtime.ops.site import Axis  # noqa: E402
from gnomon.runtime.parameters.weights import Folder  # noqa: E402
from gnomon.runtime.step.feed import Feed  # noqa: E402
from gnomon.sharding import shard_graph  # noqa: E402

pytestmark = pytest.mark.torch
Module = TypeVar("Module", bound=nn.Module)


@pytest.fixture(scope="module")
def plain() -> tuple[project.Net, list[float]]:
    """`project.build` in a plain loop."""
    return looped(project.build)


@pytest.fixture(scope="module")
def plain_ladder() -> tuple[project.Ladder, list[float]]:
    return looped(project.build_ladder)


def looped(
    build: Callable[[], Module], batches: Callable[[int], dict[str, torch.Tensor]] = project.batches
) -> tuple[Module, list[float]]:
    """A module after a loop of its own, with the loss of each step and of one more."""
    torch.manual_seed(SEED)
    module = build()
    trained = [x for x in module.parameters() if x.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=SETTINGS.lr, betas=SETTINGS.betas, eps=SETTINGS.eps, weight_decay=SETTINGS.weight_decay
    )
    losses = []
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        loss = _loss(module(**batches(step)))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    losses.append(float(_loss(module(**batches(1))).detach()))
    return module, losses


def _loss(outputs: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return outputs[1] if isinstance(outputs, tuple) else outputs


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[float]]]:
    folder = tmp_path_factory.mktemp("runs")
    return folder, launch(own_runs.every_plan, 2, folder)[0]


@pytest.mark.parametrize("name", [*PLANS, "resumed"])
def test_it_trains_as_in_a_plain_loop(
    name: str,
    plain: tuple[project.Net, list[float]],
    runs: tuple[Path, dict[str, list[float]]],
) -> None:
    (module, losses), (folder, by_plan) = plain, runs
    assert by_plan[name] == pytest.approx(losses[:STEPS], rel=1e-12)
    written = Folder.of(folder / name)
    wanted = {own: x for own, x in module.state_dict().items() if own != "places"}
    assert set(written.entries) == set(wanted)  # the tied name too, and what is not trained
    for own, x in wanted.items():
        assert torch.allclose(written.read(own), x, rtol=1e-9, atol=1e-9), own
    other = project.build()
    other.load_state_dict({own: written.read(own) for own in written.entries}, strict=False)
    assert float(other(**project.batches(1))[1].detach()) == pytest.approx(losses[-1], rel=1e-9)


@pytest.mark.parametrize("name", LADDERS)
def test_stages_that_hand_on_several_tensors_train_as_in_a_plain_loop(
    name: str, plain_ladder: tuple[project.Ladder, list[float]], runs: tuple[Path, dict[str, list[float]]]
) -> None:
    """Skips, an embedding that every layer reads, masks that have no gradient, a table without a batch."""
    (module, losses), (folder, by_plan) = plain_ladder, runs
    assert by_plan[f"ladder {name}"] == pytest.approx(losses[:STEPS], rel=1e-12)
    written = Folder.of(folder / f"ladder {name}")
    for own, x in module.state_dict().items():
        assert torch.allclose(written.read(own), x, rtol=1e-9, atol=1e-9), own


@pytest.mark.parametrize("name", ["tp", "tp, sequence parallel"])
def test_a_custom_op_is_divided_as_its_rule_says(name: str, runs: tuple[Path, dict[str, list[float]]]) -> None:
    _, losses = looped(mixed_op.build, mixed_op.batches)
    assert runs[1][f"mixed {name}"] == pytest.approx(losses[:STEPS], rel=1e-12)


def test_messages_of_several_tensors_weigh_what_is_predicted() -> None:
    """Between all stages of the ladder, skips too; and what a stage's buffers are predicted to hold."""
    graph = own_runs.job(PLANS["pp"], LADDER).graph
    fp32 = Precision(param="fp32", compute="fp32", grad="fp32", reduce="fp32", master="none", states="fp32")
    plan = replace(LADDERS["pp, four stages"], precision=fp32)
    prediction = predict(graph, parse_cluster("1x2xcpu-process"), plan, Workload(global_batch_size=4, seq_len=16))
    sizes = buffer_sizes(prediction.pricing)
    shapes = Shapes(graph, plan.layout, Mesh(), {"batch": 1, "seq": 16}, torch.float32)
    crossing = hops(graph, plan, by_layer=False)
    assert {(hop.source, hop.target) for hop in crossing} >= {(0, 1), (1, 2), (2, 3), (0, 2), (0, 3)}
    for hop in crossing:
        have = [shapes.of(one) for one in hop.crossings]
        nbytes = sum(math.prod(shape.sizes) * shape.dtype.itemsize for shape in have)
        assert nbytes == prediction.pricing.messages.bytes_of((hop.source, hop.target))
        name = f"{hop.target}X" if hop.buffer == "X" else hop.buffer
        assert sizes[name] == nbytes
    assert any(not one.trained for hop in crossing for one in hop.crossings)  # the mask


def test_a_run_begins_with_weights_by_the_module_s_names(
    plain: tuple[project.Net, list[float]], runs: tuple[Path, dict[str, list[float]]]
) -> None:
    assert runs[1]["again"] == pytest.approx(plain[1][-1:], rel=1e-12)


def test_a_prepared_job_and_a_comparison_take_code_too(
    plain: tuple[project.Net, list[float]], runs: tuple[Path, dict[str, list[float]]]
) -> None:
    assert runs[1]["prepared"] == pytest.approx(plain[1][:STEPS], rel=1e-12)
    for name in ("tp", "pp"):
        largest, tensors = runs[1][f"parity {name}"]
        assert largest < 1e-9 and tensors > 100


def test_a_checkpoint_of_code_is_converted(
    tmp_path: Path, runs: tuple[Path, dict[str, list[float]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GNOMON_CACHE", "")
    file = PlanFile(model=CODE, on="1xcpu-process", plan=BASE, workload=Workload(global_batch_size=4, seq_len=16))
    save_plan_file(file, tmp_path / "one.toml")
    out = tmp_path / "converted"
    asked = ["checkpoint", "convert", str(runs[0] / "checkpoints"), "--plan", str(tmp_path / "one.toml")]
    assert main([*asked, "--output", str(out)]) == 0
    assert main(["checkpoint", "verify", str(out)]) == 0


def test_inputs_of_a_text_are_followed_back_from_their_ops() -> None:
    example = {name: x[:2] for name, x in project.batches(1).items()}
    graph = captured(project.build(), example).graph
    assert (ids_of(graph), labels_of(graph)) == ("idx", "targets")
    assert (ids_of(preset("gpt2")), labels_of(preset("gpt2"))) == ("input_ids", "labels")
    without = captured(project.build_without_loss(), (torch.randn(2, 8),)).graph
    with pytest.raises(GraphError, match="returns no loss"):
        labels_of(without)
    with pytest.raises(GraphError, match="looks up none"):
        ids_of(without)


def test_labels_that_the_model_computes_are_refused() -> None:
    class Shifts(project.Net):
        def forward(self, idx: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(idx, (idx + 1) % project.VOCAB)[1]

    graph = captured(Shifts(), (torch.zeros(2, 16, dtype=torch.int64),)).graph
    with pytest.raises(GraphError, match="computes the labels"):
        labels_of(graph)


def test_batches_are_a_dict_of_tensors() -> None:
    given = OwnBatches.open(OwnData(name="frontend.project:no_batches"))
    with pytest.raises(InputError, match="returned list; it should return a dict"):
        given.batch(1, seed=0, sequences=4, seq_len=16)
    with pytest.raises(InputError, match="importing the batches"):
        OwnBatches.open(OwnData(name="frontend.project:nothing_of_that_name"))
    with pytest.raises(InputError, match="no function"):
        OwnBatches.open(OwnData(name="frontend.project:VOCAB"))


def test_a_text_s_batches_have_the_names_of_the_model_s_inputs(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("what is read again and again. " * 200)
    source = Source(path=tmp_path / "text.txt", cache=tmp_path / "cache")
    corpus, size = Corpus.open(source), {"sequences": 2, "seq_len": 16}
    text = TextBatches.of(corpus, "idx", "targets")
    for given, wanted in (
        (text.batch(3, seed=1, **size), corpus.batch(3, seed=1, **size)),
        (text.validation_batch(0, **size), corpus.validation_batch(0, **size)),
    ):
        assert set(given) == {"idx", "targets"}
        assert given["idx"].equal(wanted["input_ids"]) and given["targets"].equal(wanted["labels"])
    with pytest.raises(PlanError, match="need a vocabulary of 256"):
        corpus_of(own_runs.job(PLANS["dp"], data=source))
    with pytest.raises(InputError, match="does not keep apart"):
        TextBatches.of(Corpus.open(replace(source, packing="documents")), "idx", "targets")


PLAN = """schema = "gnomon.planfile/1"
model = "{code}"
on = "1xcpu-process"

[workload]
global_batch_size = 4
seq_len = 16

[plan.schedule]
micro_batch_size = 2

[plan.precision]
param = "fp32"
compute = "fp32"
grad = "fp32"
reduce = "fp32"
master = "none"
states = "fp32"
"""


def test_the_command_runs_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    plain: tuple[project.Net, list[float]],
) -> None:
    """From a plan file, in one process: what it prints and writes; and one clear error each for what cannot run."""
    monkeypatch.setenv("GNOMON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys.modules["gnomon.runtime.launch.run"], "launch", _launch)
    monkeypatch.chdir(tmp_path)
    Path("plan.toml").write_text(PLAN.format(code=FLOAT))
    asked = ["run", "plan.toml", "--data", "frontend.project:batches", "--steps", "2", "--seed", str(SEED)]
    assert main([*asked, "--export", "out"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"parameters begin as frontend.project:build_float() makes them, after torch.manual_seed({SEED})" in out
    assert f"loss {plain[1][0]:.3f}" in out and "held-out" not in out and "by the module's names" in out
    assert "lm_head.weight" in Folder.of(Path("out")).entries
    assert main([*asked, "--export", "out"]) == 2
    assert "has weights already" in capsys.readouterr().err
    Path("plan.toml").write_text(PLAN.format(code="frontend.project:build_table(input=int64[batch,seq=16])"))
    assert main(asked) == 2
    assert "returns no loss that is a mean cross-entropy" in " ".join(capsys.readouterr().err.split())
    Path("plan.toml").write_text(PLAN.format(code="gpt2"))
    assert main(asked) == 2
    assert "makes batches for a model that is code" in " ".join(capsys.readouterr().err.split())


def _launch(function, size, *args, **options):  # type: ignore[no-untyped-def]
    del options
    return launch(function, size, *args)


def test_dropout_is_said() -> None:
    layers = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 8))
    (note,) = randomness(captured(layers, (torch.randn(2, 8),)).graph)
    assert "draws random numbers (dropout)" in note
    gpt = preset("gpt2")
    blocks = [
        replace(block, ops=tuple(replace(op, attrs=tuple(sorted((*op.attrs, ("dropout", 0.1))))) for op in block.ops))
        if any(op.kind == "attention" for op in block.ops)
        else block
        for block in gpt.blocks
    ]
    (note,) = randomness(replace(gpt, blocks=tuple(blocks)))
    assert "trains without it" in note
    assert randomness(own_runs.job(PLANS["dp"]).graph) == ()


class OneKeyHead(nn.Module):
    """As falcon and gpt_bigcode: all heads look at one key head."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.head = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q = self.q(x).view(b, t, 4, 2).transpose(1, 2)
        k, v = (part.view(b, t, 1, 2).transpose(1, 2) for part in self.kv(x).split(2, dim=-1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        y = self.head(y.transpose(1, 2).reshape(b, t, 8))
        return nn.functional.cross_entropy(y.flatten(0, 1), answers.flatten())


def test_a_key_head_that_several_ranks_would_hold_is_refused() -> None:
    example = {"x": torch.randn(2, 4, 8), "answers": torch.zeros(2, 4, dtype=torch.int64)}
    names = {"x": ("batch", "seq", ""), "answers": ("batch", "seq")}
    graph = captured(OneKeyHead(), example, dims=names).graph
    setting = {"batch": 2, "seq": 4}
    sharded = shard_graph(graph, Layout(), Mesh(tp=2), setting, BF16)
    [name] = [b.name for b in graph.blocks if any(d.name.split(".")[-1] == "kv_heads" for d in b.dims)]
    with pytest.raises(PlanError, match="tp = 2 is above kv_heads = 1.* use tp = 1"):
        BlockRun(sharded[name], {"tp": Axis(ranks=2)})


def test_labels_have_the_length_that_their_own_dim_says() -> None:
    """As of speech: another number of labels than of positions, in an input that is called `labels`."""

    class Spoken(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cut, self.out = torch.nn.Conv1d(8, 16, 4, stride=4), torch.nn.Linear(16, 22)

        def forward(self, sound: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            logits = self.out(self.cut(sound).transpose(1, 2))
            return torch.nn.functional.cross_entropy(logits.reshape(-1, 11), labels.flatten())

    batch = {"sound": torch.randn(4, 8, 40), "labels": torch.randint(0, 11, (4, 20))}
    graph = captured(Spoken(), {name: x[:2] for name, x in batch.items()}).graph
    feed = object.__new__(Feed)  # of one rank that takes the whole batch
    feed.graph, feed.workload, feed.device = graph, Workload(global_batch_size=4, seq_len=1), torch.device("cpu")
    feed.num_units, feed.rows_of_unit, feed.local_rows = 1, 4, 4
    feed.labels, feed.one_length_reason = "labels", None
    feed.take(batch)
    assert feed.counted == 80 and set(feed.batch) == {"sound", "labels"}
    with pytest.raises(PlanError, match="labels has shape .3, 20., and a step takes 4 rows of 20 positions"):
        feed.take({**batch, "labels": batch["labels"][:3]})
