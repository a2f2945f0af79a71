"""Bamboo run: a killed rank's stage goes on in the rank before it, within the step, and no bit differs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from runtime import dying, training  # noqa: E402
from runtime.ranks import launch  # noqa: E402

from gnomon.control import read_trace, replayed  # noqa: E402
from gnomon.errors import PlanError  # noqa: E402
from gnomon.models.llama import llama  # noqa: E402
from gnomon.plans import Mesh, Optimizer, Pass, Plan, Schedule  # noqa: E402
from gnomon.runtime import Outcome, TrainingJob  # noqa: E402
from gnomon.runtime.launch.launcher import run_scheme  # noqa: E402
from gnomon.runtime.launch.member import NONE  # noqa: E402
from gnomon.runtime.launch.run import scheme_of  # noqa: E402
from gnomon.runtime.launch.takeover import TAKEOVER, Roles, StageReport, check_with_copies, handing, roles  # noqa: E402

pytestmark = pytest.mark.torch

STEPS = 4
CONFIG = replace(training.CONFIG, num_layers=3)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for i in range(60):
        (folder / f"{i}.txt").write_text(f"the loss goes down, line {i % 7} of the text. " * 40)
    return folder


def job(data: Path, *, copies: bool, **more: object) -> TrainingJob:
    passes = (Pass(name="bamboo"),) if copies else ()
    order = Schedule(name="one_f_one_b", num_microbatches=4, passes=passes)
    plan = replace(training.ALONE, mesh=Mesh(pp=3), schedule=order)
    return training.job(data, plan, STEPS, graph=llama(CONFIG), **more)


def bits(outcome: Outcome) -> list[tuple[int, float, str, float | None]]:
    """The last loss is of held-out text, by the last parameters."""
    return [(one.step, one.loss, repr(one.grad_norm), one.validation_loss) for one in outcome.records]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return training.config_folder(tmp_path_factory.mktemp("of") / "model", CONFIG.num_layers)


@pytest.fixture(scope="module")
def undisturbed(data: Path, model: Path) -> Outcome:
    """Without copies. Its weights lie beside the model."""
    given = job(data, copies=False, export=(model.parent / "weights", model))
    outcome: Outcome = launch(training.train, 3, given)[0]
    return outcome


@pytest.mark.parametrize(
    ("kills", "restarts", "after"),
    [
        ("1 2 7", 1, "another process takes its place (0 left)"),
        ("0 3 40", 0, "no other one takes its place"),
    ],
)
def test_the_rank_before_takes_over_within_the_step(
    kills: str,
    restarts: int,
    after: str,
    data: Path,
    undisturbed: Outcome,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The second: rank 0, whose copy the last rank has, dies in the update, and nobody comes."""
    monkeypatch.setenv(dying.KILLS, kills)
    export = (tmp_path / "weights", model)
    given = job(data, copies=True, max_restarts=restarts, checkpoints=tmp_path / "kept", export=export)
    assert scheme_of(given) is TAKEOVER
    dies = replace(TAKEOVER, train=dying.train_with_copies)
    outcome = run_scheme(replace(given, decisions=tmp_path / "decisions"), dies)
    assert bits(outcome) == bits(undisturbed)
    one, other = ((folder / "model.safetensors").read_bytes() for folder in (model.parent / "weights", export[0]))
    assert one == other, "its weights are exported to the bit"
    rank, step, _ = map(int, kills.split())
    output = capfd.readouterr().err  # the launcher's
    assert f"rank {rank} of 3 was killed by SIGKILL: the others go on without it, and {after}" in output
    assert outcome.notes[-1].endswith(f"taken over: rank {rank} in step {step}")
    trace = read_trace(tmp_path / "decisions")
    assert list(replayed(trace)) == [(look.seen, look.decision) for look in trace.looks], "the same in the simulator"
    first, loss = [look.decision for look in trace.looks if look.decision is not None][:2]
    assert first.members == (0, 1, 2) and rank not in loss.members and not loss.lost
    assert loss.members[loss.plan.placement[rank]] == (rank - 1) % 3, "that has the copy"


def without(job: TrainingJob) -> Mapping[str, TrainingJob]:
    plan = job.plan
    return {
        "tp, cp and ep of 1": replace(job, plan=replace(plan, mesh=Mesh(pp=3, tp=2))),
        "an optimizer that looks at elements": replace(job, plan=replace(plan, optimizer=Optimizer(kind="muon"))),
        "stages that share no parameter": replace(job, graph=llama(replace(CONFIG, tied=True))),
        "no --timeline": replace(job, measure=True),
        "no --memory-checkpoint-every": replace(job, memory_checkpoint_every=1),
        "a plan in which no rank has failed": replace(job, plan=_with(plan, ("rank", 1))),
        "no other pass": replace(job, plan=_with(plan, None)),
    }


def _with(plan: Plan, param: tuple[str, int] | None) -> Plan:
    one = Pass(name="bamboo", params=() if param is None else (param,))
    passes = (one, Pass(name="dapple_warmup", params=(("policy", "2p"),))) if param is None else (one,)
    return replace(plan, schedule=replace(plan.schedule, passes=passes))


def test_what_it_needs_is_said_where_it_is_not_there(data: Path) -> None:
    given = job(data, copies=True)
    check_with_copies(given)
    for says, one in without(given).items():
        with pytest.raises(PlanError, match=f"bamboo runs with .*{says}"):
            check_with_copies(one)


@given(pp=st.integers(2, 6), data=st.integers(1, 2), lost=st.sets(st.integers(0, 11), max_size=4), back=st.booleans())
def test_a_state_is_lost_only_with_its_copy_and_newcomers_get_theirs(
    pp: int, data: int, lost: set[int], back: bool
) -> None:
    """Ranks are numbered stage by stage. back: whether the lost ones are there again, with nothing."""
    ranks = pp * data
    following = {rank: (rank + data) % ranks for rank in range(ranks)}
    before = {copied: rank for rank, copied in following.items()}
    lost = {rank for rank in lost if rank < ranks}
    born = [rank for rank in range(ranks) if back or rank not in lost]
    told = [
        StageReport() if rank in lost else StageReport(plays=(rank,), copy=following[rank], steps_done=3)
        for rank in born
    ]
    now = roles(told, ranks)
    for rank, place in enumerate(now.places):
        holder = rank if rank not in lost else before[rank]
        assert place == (NONE if holder in lost else born.index(holder))
    if NONE in now.places:
        return
    plan = handing(now, born, following)
    has = {(rank, place) for rank, place in enumerate(now.places)} | set(now.keepers.items())
    for rank, source, target in plan.sent:
        assert (rank, source) in has and source != target and born[target] in (rank, before[rank])
        has.add((rank, target))
    assert {(rank, place) for rank, place in enumerate(plan.places)} | set(plan.keepers.items()) <= has
    if back:
        assert [born[place] for place in plan.places] == list(range(ranks))
        assert {rank: born[place] for rank, place in plan.keepers.items()} == before
    again = Roles(places=plan.places, taken_over={}, keepers=plan.keepers)
    assert handing(again, born, following).sent == (), "nothing is sent twice"
