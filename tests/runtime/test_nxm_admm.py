"""NxMTransformer in a run: the rule against the paper's formulas, the folder that comes out, what is refused.

Oracle: ADMM written out in numpy with an update that is plain gradient descent.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

from runtime import training  # noqa: E402
from runtime.one_process import alone  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from gnomon.cli import main  # noqa: E402
from gnomon.cli import run as cli_run  # noqa: E402
from gnomon.errors import PlanError  # noqa: E402
from gnomon.methods import check_methods  # noqa: E402
from gnomon.methods.learnt.nxm_admm import NxmSettings  # noqa: E402
from gnomon.methods.learnt.trained_weights import compressed  # noqa: E402
from gnomon.models.presets import graph_of  # noqa: E402
from gnomon.plans import Mesh, Optimizer, Pass, Plan, PlanFile, Precision, Schedule, Workload  # noqa: E402
from gnomon.prediction import predict  # noqa: E402
from gnomon.runtime import Outcome, TrainingJob, train  # noqa: E402
from gnomon.runtime.checkpoint.pretrained import load  # noqa: E402
from gnomon.runtime.optim.nxm_admm import NxmAdmm  # noqa: E402
from gnomon.runtime.parameters.packed import sparse_as  # noqa: E402
from gnomon.runtime.parameters.parameters import Dtypes, Parameters, Slot  # noqa: E402
from gnomon.storage.n_of_m import NM  # noqa: E402

pytestmark = pytest.mark.torch

TWO_OF_FOUR = NM(n=2, m=4)


def with_pass(plan: Plan, *params: tuple[str, str | int | float]) -> Plan:
    return replace(plan, schedule=replace(plan.schedule, passes=(Pass(name="nxm_admm", params=params),)))


PLAN = with_pass(training.ALONE, ("every", 2), ("mask_at", 0.5))


def test_updates_are_those_of_the_paper() -> None:
    """W by the gradient and rho (W - Z + U), rho growing; every other step Z = P(W + U), U = W + U - Z; then a mask."""
    slot = Slot(
        name="w", shape=(3, 8), whole=(3, 8), offset=(0, 0), start=0, holders=1, decays=False, sums="", split=(0, 1)
    )
    held = Parameters(
        (slot,), Dtypes(param=torch.float64, grad=torch.float64, master=None, states=torch.float64),
        zero=0, shard=0, num_shards=1,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    w, lr, rho, steps = rng.normal(size=(3, 8)), 0.1, 0.5, 8
    held.fill(lambda slot: torch.from_numpy(w))
    rule = NxmAdmm(NxmSettings(rho=rho, every=2, mask_at=0.5), {"w"}, steps)
    rule.begin(held)

    def pattern(x: np.ndarray) -> np.ndarray:
        return TWO_OF_FOUR.mask(np.abs(x).astype(np.float32))

    z, u, mask = w * pattern(w), np.zeros_like(w), None
    for step in range(1, steps + 1):
        gradient = rng.normal(size=w.shape)
        held.add_grad("w", torch.from_numpy(gradient))
        rule.before(held)
        held.shard.add_(held.my_grad(), alpha=-lr)
        rule.after(held, lr)
        held.drop_grad()
        if mask is None:
            w = w - lr * (gradient + rho * step / 4 * (w - z + u))
            if step == 4:
                mask = pattern(w + u)
            elif step % 2 == 0:
                z, u = (w + u) * pattern(w + u), (w + u) * ~pattern(w + u)
        else:
            w = w - lr * gradient * mask
        w = w if mask is None else w * mask
        np.testing.assert_allclose(held.value("w").numpy(), w, atol=1e-12)
    assert (held.value("w").numpy() != 0).reshape(3, 2, 4).sum(-1).tolist() == [[2, 2]] * 3
    assert rule.nbytes == w.size and "fixed after step 4" in rule.note


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.txt").write_text("the loss goes down, line after line of the text. " * 400)
    return folder


def test_a_run_ends_in_a_sparse_folder_that_is_served_as_one(data: Path, tmp_path: Path) -> None:
    source, target = training.config_folder(tmp_path / "model"), tmp_path / "out"
    with alone():
        outcome = train(training.job(data, PLAN, 8, export=(target, source)))
    assert "fixed after step 4" in outcome.notes[0]
    for tensor, x in load_file(target / "model.safetensors").items():
        if x.ndim == 2:
            most = (x != 0).reshape(len(x), -1, 4).sum(-1).max()
            assert int(most) == (2 if ".layers." in tensor else 4), tensor
    assert sparse_as(target) == TWO_OF_FOUR and not list(tmp_path.glob(".*"))
    batch = {"input_ids": torch.arange(32)[None], "labels": torch.arange(1, 33)[None]}
    assert np.isfinite(load(target).output(batch).detach().item())


def test_its_memory_and_seconds_are_predicted() -> None:
    plan = Plan(schedule=Schedule(micro_batch_size=1), precision=Precision(param="fp32", compute="fp32", master="none"))
    work = Workload(global_batch_size=1, seq_len=128)
    plain, drawn = (predict("llama-3.2-1b", "1xh100-sxm", one, work) for one in (plan, with_pass(plan)))
    numbers = sum(rows * columns for rows, columns in compressed(graph_of("llama-3.2-1b")).values())
    more = {name: drawn.memory[0].by_class[name] - plain.memory[0].by_class[name] for name in ("states", "parameters")}
    assert more == {"states": 8 * numbers, "parameters": 0}
    seconds = drawn.breakdown["OPT"] - plain.breakdown["OPT"]
    assert 4 * numbers / 3.35e12 < seconds == pytest.approx(drawn.step_s - plain.step_s, rel=1e-6)
    assert sum(drawn.breakdown.values()) == drawn.step_s


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (with_pass(Plan(), ("pattern", "5:4")), "0 < n < m <= 16; give one as '2:4'"),
        (with_pass(Plan(), ("pattern", "0.9")), "'0.9' does not keep n of every m"),
        (with_pass(Plan(), ("mask_at", 1.5)), "a share of the steps between 0 and 1"),
        (with_pass(Plan(mesh=Mesh(tp=2))), "use tp = 1"),
        (with_pass(Plan(mesh=Mesh(dp_shard=2), optimizer=Optimizer(zero=1))), "use optimizer.zero = 0"),
        (
            with_pass(Plan(), ("pattern", "3:9")),
            "q_proj.weight has 2,048 columns, no multiple of 9",
        ),
    ],
)
def test_what_cannot_be_is_one_line(plan: Plan, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        check_methods(plan, "run", graph_of("llama-3.2-1b"))


def test_a_stopped_run_does_not_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(
        'schema = "gnomon.planfile/1"\nmodel = "llama-3.2-1b"\non = "local"\n[workload]\nglobal_batch_size = 1\n'
        'seq_len = 8\n[plan]\nschedule = {micro_batch_size = 1, passes = [{name = "nxm_admm"}]}\n'
    )
    assert main(["run", str(file), "--resume"]) == 2
    assert "nxm_admm keeps what no checkpoint holds, so --resume cannot go on with it" in capsys.readouterr().err
    file.write_text(file.read_text().replace(', passes = [{name = "nxm_admm"}]', ""))
    assert main(["run", str(file), "--with-plain"]) == 2
    assert "(ad2, iss, nxm_admm, xtc), and it names none; leave it out" in capsys.readouterr().err


def test_the_loss_without_it_is_shown_beside_its_own(
    monkeypatch: pytest.MonkeyPatch, data: Path, tmp_path: Path
) -> None:
    """`--with-plain`: the same job without the method, for as many steps, whose folder and checkpoints are left out."""
    source = training.config_folder(tmp_path / "model")
    asked = training.job(data, PLAN, 6, export=(tmp_path / "out", source), checkpoints=tmp_path / "saved")
    ran = []

    def run(job: TrainingJob) -> Outcome:
        ran.append(job)
        with alone():
            return train(job)

    monkeypatch.setattr(cli_run, "load_late", lambda name: run)
    plain = cli_run._trained_plain(asked)
    assert not ran[0].plan.schedule.passes and ran[0].export is None and ran[0].checkpoints is None
    assert len(plain.records) == 6 and not (tmp_path / "saved").exists()
    file = PlanFile(model=str(source), on="local", workload=asked.workload, plan=PLAN)
    told = cli_run.RunReport(file=file, graph=asked.graph, prediction=None, outcome=None, plain=plain)  # type: ignore[arg-type]
    last = replace(plain.records[-1], validation_loss=plain.records[-1].validation_loss + 0.25)
    assert "(nxm_admm: +0.250)" in " ".join(cli_run._without(told, last))
