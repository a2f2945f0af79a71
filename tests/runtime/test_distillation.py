"""A model that learns from a teacher in a run: XTC's rounding and layers, AD2's moved embeddings, what comes out.

Oracle: transformers in train mode, with the losses, the straight-through estimator and the moves written out here, and
plain gradient descent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

from runtime import training  # noqa: E402
from runtime.hf_models import CONFIGS, build, quiet  # noqa: E402
from runtime.one_process import alone  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from gnomon.cli import main  # noqa: E402
from gnomon.errors import PlanError  # noqa: E402
from gnomon.methods import check_methods, teaching_of  # noqa: E402
from gnomon.models.presets import graph_of  # noqa: E402
from gnomon.plans import Mesh, Optimizer, Pass, Plan, Precision, Saved, Schedule, Workload  # noqa: E402
from gnomon.prediction import predict  # noqa: E402
from gnomon.runtime import Outcome, train  # noqa: E402
from gnomon.runtime.checkpoint.pretrained import load, model_of  # noqa: E402
from gnomon.runtime.launch.train import corpus_of  # noqa: E402
from gnomon.runtime.optim.xtc import binary, ternary  # noqa: E402
from gnomon.runtime.parameters.packed import PackedFolder, open_folder  # noqa: E402

pytestmark = pytest.mark.torch

LR, SHARE, HEAT, HIDDEN, RADIUS = 0.5, 0.6, 2.0, 0.3, 0.2
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ALONE = replace(training.ALONE, optimizer=Optimizer(kind="sgd", clip=False))


def write(folder: Path, layers: int, vocab: int = 256) -> nn.Module:
    sizes = {"vocab_size": vocab, "intermediate_size": 64, "hidden_size": 32, "head_dim": 16}
    config = {**CONFIGS["llama"], **sizes, "num_hidden_layers": layers, "num_attention_heads": 2}
    torch.manual_seed(layers)
    with quiet():
        model: nn.Module = build("llama", {**config, "num_key_value_heads": 2}).float()
        model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher of four layers, a student of two, a teacher of other tokens, and text."""
    folder = tmp_path_factory.mktemp("taught")
    write(folder / "teacher", 4)
    write(folder / "student", 2)
    write(folder / "other", 2, vocab=300)
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text("".join(f"line {i} of the text is {i * i} long. " for i in range(900)))
    return folder


def passes(folder: Path, *, ad2: bool = False, **more: str | int | float) -> tuple[Pass, ...]:
    common: tuple[tuple[str, str | float], ...] = (
        ("teacher", str(folder / "teacher")), ("share", SHARE), ("temperature", HEAT),
    )  # fmt: skip
    made = (Pass(name="xtc", params=(*common, ("layers", "1,3"), *more.items())),)
    return (*made, Pass(name="ad2", params=(*common, ("radius", RADIUS)))) if ad2 else made


def run(folder: Path, given: tuple[Pass, ...], target: Path | None, steps: int = 1) -> tuple[Outcome, Tensor]:
    """(how it went, the first batch's rows)."""
    plan = replace(ALONE, schedule=replace(ALONE.schedule, passes=given))
    asked = training.job(folder / "text", plan, steps, graph=model_of(folder / "student").graph)
    asked = replace(asked, settings=replace(asked.settings, lr=LR, weight_decay=0.0))
    asked = replace(asked, export=None if target is None else (target, folder / "student"))
    with alone():
        outcome = train(asked)
    batch = corpus_of(asked).batch(1, seed=0, sequences=8, seq_len=32)
    assert isinstance(batch, dict)
    return outcome, torch.cat([batch["input_ids"], batch["labels"][:, -1:]], 1)


def kl(student: Tensor, teacher: Tensor) -> Tensor:
    own, other = (functional.log_softmax(x / HEAT, -1) for x in (student, teacher))
    return HEAT**2 * (other.exp() * (other - own)).sum(-1).sum()


@pytest.fixture
def models(folders: Path) -> Iterator[tuple[nn.Module, nn.Module]]:
    """The student as layers 1 and 3 of the teacher, and the teacher."""
    from transformers import AutoModelForCausalLM

    with quiet():
        teacher = AutoModelForCausalLM.from_pretrained(folders / "teacher", attn_implementation="eager")
        student = AutoModelForCausalLM.from_pretrained(folders / "student", attn_implementation="eager")
    own, theirs = student.model, teacher.model
    for mine, other in ((own.embed_tokens, theirs.embed_tokens), (own.norm, theirs.norm)):
        mine.load_state_dict(other.state_dict())
    student.lm_head.load_state_dict(teacher.lm_head.state_dict())
    for i, place in enumerate((1, 3)):
        own.layers[i].load_state_dict(theirs.layers[place].state_dict())
    yield student.train(), teacher.train()


def one_step(student: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Every parameter after a step down the gradient of a loss."""
    loss.backward()  # type: ignore[no-untyped-call]
    return {name: p.detach() - LR * p.grad for name, p in student.named_parameters() if p.grad is not None}


def losses(student: nn.Module, teacher: nn.Module, rows: Tensor) -> tuple[Tensor, Tensor, int]:
    """(cross entropy, KL) summed over tokens, with the squares between layers in the first; tokens."""
    ids, labels = rows[:, :-1], rows[:, 1:]
    mine = student(input_ids=ids, output_hidden_states=True)
    with torch.no_grad():
        other = teacher(input_ids=ids, output_hidden_states=True)
    entropy = functional.cross_entropy(mine.logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return entropy, kl(mine.logits, other.logits), labels.numel()


def test_a_step_of_a_shallow_student_is_that_of_the_losses_written_out(
    folders: Path, models: tuple[nn.Module, nn.Module], tmp_path: Path
) -> None:
    """(1 - share) of the cross entropy and `share` of T^2 KL, and squares between the layers that stand for others."""
    student, teacher = models
    outcome, rows = run(folders, passes(folders, weights="none", hidden=HIDDEN), tmp_path / "out")
    seen: dict[str, Tensor] = {}

    def look(name: str) -> Callable[..., None]:
        return lambda module, given, made: seen.update({name: made[0] if isinstance(made, tuple) else made})

    for i, place in enumerate((1, 3)):
        student.model.layers[i].register_forward_hook(look(f"own {i}"))  # type: ignore[union-attr,index]
        teacher.model.layers[place].register_forward_hook(look(f"their {i}"))  # type: ignore[union-attr,index]
    entropy, off, tokens = losses(student, teacher, rows)
    squares = sum((seen[f"own {i}"] - seen[f"their {i}"].detach()).square().mean(-1).sum() for i in range(2))
    wanted = one_step(student, ((1 - SHARE) * entropy + SHARE * off + HIDDEN * squares) / tokens)
    new = load_file(tmp_path / "out" / "model.safetensors")
    for name, value in wanted.items():
        torch.testing.assert_close(new[name], value, rtol=1e-4, atol=2e-6, msg=name)
    assert outcome.records[0].loss == pytest.approx(float(entropy.detach()) / tokens, rel=1e-5)
    assert f"KL {float(off.detach()) / tokens:.3f}" in outcome.notes[0] and "the teacher's loss" in outcome.notes[-1]


def test_moved_embeddings_are_where_the_gradient_leads_and_are_learnt_from(
    folders: Path, models: tuple[nn.Module, nn.Module], tmp_path: Path
) -> None:
    student, teacher = models
    _, rows = run(folders, passes(folders, ad2=True, weights="none"), tmp_path / "out")
    entropy, off, tokens = losses(student, teacher, rows)
    ids = rows[:, :-1]
    with torch.no_grad():
        embedded, said = student.model.embed_tokens(ids), teacher(input_ids=ids).logits  # type: ignore[operator,union-attr]
    radius = RADIUS * embedded.norm(dim=-1, keepdim=True)
    start = (1e-3 * radius * torch.ones(32) / 32**0.5).requires_grad_()
    (up,) = torch.autograd.grad(kl(student(inputs_embeds=embedded + start).logits, said), start)
    moved = start.detach() + radius * up / up.norm(dim=-1, keepdim=True)
    moved = moved * (radius / moved.norm(dim=-1, keepdim=True)).clamp(max=1)
    with torch.no_grad():
        told = teacher(inputs_embeds=embedded + moved).logits
    wrong = kl(student(inputs_embeds=student.model.embed_tokens(ids) + moved).logits, told)  # type: ignore[operator,union-attr]
    wanted = one_step(student, ((1 - SHARE) * entropy + SHARE * off + wrong) / tokens)
    new = load_file(tmp_path / "out" / "model.safetensors")
    for name, value in wanted.items():
        torch.testing.assert_close(new[name], value, rtol=1e-3, atol=2e-5, msg=name)


@pytest.mark.parametrize("kind", ["ternary", "binary"])
def test_rounded_weights_are_learnt_through_and_stored_so(
    kind: str, folders: Path, models: tuple[nn.Module, nn.Module], tmp_path: Path
) -> None:
    """The gradient at rounded weights moves those behind them, which are rounded again for the folder."""
    student, teacher = models
    outcome, rows = run(folders, passes(folders, weights=kind, group=32), tmp_path / "out")
    behind = {n: p.detach().clone() for n, p in student.named_parameters() if n.split(".")[-2] in LINEARS}

    def rounded(w: Tensor) -> Tensor:
        groups = w.reshape(len(w), -1, 32)
        mean = groups.abs().mean(-1, keepdim=True)
        if kind == "binary":
            return (torch.where(groups < 0, -mean, mean)).reshape(w.shape)
        kept = groups.abs() > 0.7 * mean
        scale = (groups.abs() * kept).sum(-1, keepdim=True) / kept.sum(-1, keepdim=True)
        return (groups.sign() * kept * scale).reshape(w.shape)

    for name, p in student.named_parameters():
        if name in behind:
            p.data = rounded(behind[name])
    entropy, off, tokens = losses(student, teacher, rows)
    one_step(student, ((1 - SHARE) * entropy + SHARE * off) / tokens)
    folder = open_folder(tmp_path / "out")
    assert isinstance(folder, PackedFolder) and set(folder.packed) == set(behind)
    for name, p in student.named_parameters():
        if name in behind:
            assert p.grad is not None
            wanted, made = rounded(behind[name] - LR * p.grad), folder.read(name)
            near = torch.isclose(made, wanted, rtol=1e-3, atol=1e-5).float().mean()
            assert near > 0.995, (name, near)  # a number at the edge may round otherwise
            assert len(made.reshape(len(made), -1, 32).unique(dim=-1)[0].unique()) <= 3 * made.shape[1]
    batch = {"input_ids": rows[:1, :-1], "labels": rows[:1, 1:]}
    assert np.isfinite(load(tmp_path / "out").output(batch).detach().item())
    assert any(kind in note for note in outcome.notes)


def test_rounding_what_is_rounded_changes_nothing() -> None:
    x = torch.randn(7, 3, 16, generator=torch.Generator().manual_seed(0))
    x[0] = 0
    for rounding in (ternary, binary):
        once = rounding(x)
        torch.testing.assert_close(rounding(once), once)
        assert torch.isfinite(once).all()


def test_a_teachers_forward_and_what_is_kept_are_predicted() -> None:
    plan = Plan(schedule=Schedule(micro_batch_size=1), precision=Precision(param="fp32", compute="fp32", master="none"))
    work, small, large = Workload(global_batch_size=2, seq_len=128), graph_of("llama-3.2-1b"), graph_of("llama-3.2-3b")

    def asked(*given: Pass) -> Plan:
        return replace(plan, schedule=replace(plan.schedule, passes=given))

    xtc = Pass(name="xtc", params=(("teacher", "somewhere"),))
    ad2 = Pass(name="ad2", params=(("teacher", "somewhere"), ("rounds", 2)))
    plain, like, taught, moved = (  # two microbatches
        predict(small, "1xh100-sxm", one, work, teacher=teacher)
        for one, teacher in ((plan, None), (asked(xtc), None), (asked(xtc), large), (asked(xtc, ad2), large))
    )
    assert any("as large as the model" in line for line in like.assumptions)
    whole = {
        name: predict(graph, "1xh100-sxm", plan, work).pricing.compute for name, graph in (("s", small), ("l", large))
    }
    took = {(name, kind): sum(time.parts(kind, 0).values()) for name, time in whole.items() for kind in "FIB"}
    assert like.breakdown["methods"] == pytest.approx(2 * took["s", "F"])
    assert taught.breakdown["methods"] == pytest.approx(2 * took["l", "F"])
    more = moved.breakdown["methods"] - taught.breakdown["methods"]
    assert more == pytest.approx(2 * (took["l", "F"] + 3 * took["s", "F"] + 2 * took["s", "I"] + took["s", "B"]))
    held = [p.memory[0].by_class["parameters"] for p in (plain, taught)]
    assert held[1] - held[0] == 4 * large.num_parameters()
    for one in (like, taught, moved):
        assert sum(one.breakdown.values()) == one.step_s


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (Plan(schedule=Schedule(passes=(Pass(name="xtc"),))), "xtc needs teacher"),
        (Plan(mesh=Mesh(pp=2)), "use pp = 1"),
        (Plan(saved=Saved(preset="full")), "leave saved out"),
        (Plan(optimizer=Optimizer(zero=1), mesh=Mesh(dp_shard=2)), "use optimizer.zero = 0"),
        (Plan(schedule=Schedule(name="gpipe")), "use schedule.name = 'one_f_one_b'"),
    ],
)
def test_plans_that_cannot_are_refused(plan: Plan, says: str, folders: Path) -> None:
    given = plan.schedule.passes or passes(folders)
    with pytest.raises(PlanError, match=says):
        check_methods(replace(plan, schedule=replace(plan.schedule, passes=given)), "run")


@pytest.mark.parametrize(
    ("teacher", "params", "says"),
    [
        ("other", '["group", 32]', "has a vocabulary of 300 and student one of 256, whose logits cannot be compared"),
        (
            "teacher",
            '["layers", "1,5"], ["group", 32]',
            "has 2 layers and the teacher in .* 4 .0 to 3.; give layers, .* as '1,3'",
        ),
        ("teacher", '["layers", "3,1"]', "layers = '3,1' are numbers of the teacher's, from 0, rising"),
        ("nowhere", '["group", 32]', "there is no config.json in .*nowhere, the teacher"),
        ("teacher", '["group", 48]', "columns, no multiple of the 48 that share a scale"),
    ],
)
def test_a_teacher_that_cannot_is_one_line(
    teacher: str, params: str, says: str, folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.toml"
    given = ", ".join(filter(None, (f'["teacher", "{folders / teacher}"]', params)))
    file.write_text(
        f'schema = "gnomon.planfile/1"\nmodel = "{folders / "student"}"\non = "local"\n[workload]\n'
        f'global_batch_size = 1\nseq_len = 8\n[plan]\nschedule = {{micro_batch_size = 1, passes = [{{name = "xtc", '
        f"params = [{given}]}}]}}\n"
    )
    assert main(["run", str(file)]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert re.search(says, error), error


@pytest.mark.parametrize("until", [0, 1])
def test_a_student_of_a_mixture_learns_from_it_until_a_step(until: int, tmp_path: Path) -> None:
    """Mixture-of-Students: the loss of the text and alpha times T^2 KL; then the text's alone."""
    from transformers import AutoModelForCausalLM

    alpha = 0.7
    config = {**CONFIGS["mixtral"], "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    for name, layers in (("teacher", 3), ("student", 2)):
        torch.manual_seed(layers)
        with quiet():
            build("mixtral", {**config, "num_hidden_layers": layers}).float().save_pretrained(tmp_path / name)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("".join(f"line {i} of the text is {i * i} long. " for i in range(900)))
    params: tuple[tuple[str, str | int | float], ...] = (
        ("teacher", str(tmp_path / "teacher")), ("alpha", alpha), ("temperature", HEAT), ("until", until),
    )  # fmt: skip
    plan = replace(ALONE, schedule=replace(ALONE.schedule, passes=(Pass(name="mos", params=params),)))
    asked = training.job(tmp_path / "text", plan, 2, graph=model_of(tmp_path / "student").graph)
    asked = replace(asked, settings=replace(asked.settings, lr=LR, weight_decay=0.0), weights=tmp_path / "student")
    asked = replace(asked, export=(tmp_path / "out", tmp_path / "student"))
    with alone():
        train(asked)
    with quiet():
        teacher, student = (
            AutoModelForCausalLM.from_pretrained(tmp_path / name, attn_implementation="eager").train()
            for name in ("teacher", "student")
        )
    corpus = corpus_of(asked)
    for step in (1, 2):
        batch = corpus.batch(step, seed=0, sequences=8, seq_len=32)
        assert isinstance(batch, dict)
        rows = torch.cat([batch["input_ids"], batch["labels"][:, -1:]], 1)
        entropy, off, tokens = losses(student, teacher, rows)
        student.zero_grad()
        loss = entropy if until and step > until else entropy + alpha * off
        after = one_step(student, loss / tokens)
        with torch.no_grad():
            for name, parameter in student.named_parameters():
                parameter.copy_(after[name])
    expected, made = student.state_dict(), AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for name, value in expected.items():
        assert torch.allclose(made[name], value, atol=2e-5), name


def test_mixture_of_students_is_refused_where_logits_are_in_parts() -> None:
    taught = Pass(name="mos", params=(("teacher", "somewhere"), ("until", -1)))
    plan = Plan(schedule=Schedule(micro_batch_size=1, passes=(taught,)))
    with pytest.raises(PlanError, match="until = -1 are numbers of at least 0"):
        check_methods(plan)
    named = replace(plan.schedule, passes=(Pass(name="mos", params=(("teacher", "somewhere"),)),))
    with pytest.raises(PlanError, match="which tp divides; use tp = 1"):
        check_methods(replace(plan, schedule=named, mesh=Mesh(tp=2)))
    with pytest.raises(PlanError, match="use pp = 1"):
        check_methods(replace(plan, schedule=named, mesh=Mesh(pp=2)))
    both = tuple(
        Pass(name=name, params=(("teacher", "t"), ("share", 1.0))[: 1 + (name == "ad2")]) for name in ("mos", "ad2")
    )
    with pytest.raises(PlanError, match="ad2 and mos cannot be in one plan"):
        teaching_of(replace(plan, schedule=replace(plan.schedule, passes=both)))
