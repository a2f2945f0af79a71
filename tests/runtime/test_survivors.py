"""Checkpoints in memory: a killed rank is replaced while the others stay, and the run ends with the same bits."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from time import sleep

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from runtime import dying, training  # noqa: E402
from runtime.ranks import launch  # noqa: E402

from gnomon.control import read_trace, replayed  # noqa: E402
from gnomon.errors import PeerError, PlanError  # noqa: E402
from gnomon.hardware import parse_cluster  # noqa: E402
from gnomon.plans import Mesh, Optimizer, Schedule  # noqa: E402
from gnomon.prediction import memory_copies, predict  # noqa: E402
from gnomon.runtime import Outcome, TrainingJob  # noqa: E402
from gnomon.runtime.checkpoint.in_memory import NONE, HeldSteps, latest, source  # noqa: E402
from gnomon.runtime.launch.launcher import run_scheme  # noqa: E402
from gnomon.runtime.launch.run import scheme_of  # noqa: E402
from gnomon.runtime.launch.survivors import SURVIVORS, check_surviving  # noqa: E402
from gnomon.runtime.processes.connections import FOLDER, shut, sockets  # noqa: E402
from gnomon.software import stack  # noqa: E402
from gnomon.units import parse_bytes  # noqa: E402

pytestmark = pytest.mark.torch

STEPS = 4
FOUR = replace(
    training.ALONE,
    mesh=Mesh(pp=2, dp_shard=2),
    optimizer=Optimizer(zero=1),
    schedule=Schedule(name="one_f_one_b", num_microbatches=2),
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for i in range(60):
        (folder / f"{i}.txt").write_text(f"the loss goes down, line {i % 7} of the text. " * 40)
    return folder


def with_kills(
    job: TrainingJob, kills: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Outcome, list[int]]:
    """How the run went, and the numbers of the processes that there were. No process is started twice."""
    folder.mkdir()
    monkeypatch.setenv(dying.KILLS, kills)
    monkeypatch.setenv(dying.MARKS, str(folder))
    assert scheme_of(job) is SURVIVORS
    outcome = run_scheme(job, replace(SURVIVORS, train=dying.train))
    return outcome, sorted(int(path.name.split()[0]) for path in folder.iterdir())


def bits(outcome: Outcome) -> list[tuple[int, float, float, float | None]]:
    """The last loss is of held-out text, by the last parameters."""
    return [(one.step, one.loss, repr(one.grad_norm), one.validation_loss) for one in outcome.records]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("plan", "every", "kills", "says"),
    [
        (FOUR, 1, "2 3 7", "rank 2 of 4 was killed by SIGKILL"),
        (training.PLANS["zero 3"], 2, "0 2 5;2 3 100", "rank 0 of 2 was killed by SIGKILL"),
    ],
)
def test_a_killed_rank_is_replaced_without_a_disk_and_the_run_ends_with_the_same_bits(
    plan: object,
    every: int,
    kills: str,
    says: str,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The second: the process that replaced rank 0 is killed too, with copies after every second step."""
    path, model = tmp_path / "decisions", training.config_folder(tmp_path / "model")
    job = training.job(data, plan, STEPS, max_restarts=2, memory_checkpoint_every=every, decisions=path)  # type: ignore[arg-type]
    size = job.plan.world_size
    folders = tmp_path / "undisturbed", tmp_path / "lost"
    one, other = (replace(job, export=(folder, model)) for folder in folders)
    undisturbed = launch(training.train, size, one)[0]
    outcome, processes = with_kills(other, kills, tmp_path / "marks", monkeypatch)
    assert bits(outcome) == bits(undisturbed)
    weights = [(folder / "model.safetensors").read_bytes() for folder in folders]
    assert weights[0] == weights[1], "its weights are exported to the bit"
    assert processes == list(range(size + len(kills.split(";")))), "the others are the processes of before"
    trace = read_trace(path)
    assert list(replayed(trace)) == [(look.seen, look.decision) for look in trace.looks], "the same in the simulator"
    output = capfd.readouterr().err
    assert f"gnomon: {says}: the others stay, and another process takes its place (1 left)" in output
    assert "waited " in output and "for another process, which is gone" in output
    assert outcome.notes[-1].startswith("checkpoints in memory: rank 0 sent ")
    sent, copies = re.findall(r"sent ([\d.]+ [KMG]iB) in (\d+) copies", outcome.notes[-1])[0]
    predicted = predict(job.graph, parse_cluster(f"{size}xcpu-process"), job.plan, job.workload, stack("gnomon"))
    priced = memory_copies(predicted, every).sent_bytes
    assert parse_bytes(sent) / int(copies) == pytest.approx(priced, rel=0.15), "random numbers are sent besides"
    assert outcome.notes[-1].endswith("; went back to step 2"), "step 0 too, but that process is lost"


def test_a_rank_that_never_comes_is_given_up_and_one_without_memory_goes_back_to_the_copy(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The others wait for it as long as --meet-within says; no process is left behind."""
    job = training.job(data, training.PLANS["zero 3"], STEPS, max_restarts=3, memory_checkpoint_every=1, meet_s=3.0)
    undisturbed = launch(training.train, 2, job)[0]
    (tmp_path / "marks").mkdir()
    monkeypatch.setenv(dying.MARKS, str(tmp_path / "marks"))
    outcome = run_scheme(job, replace(SURVIVORS, train=dying.absent))
    assert bits(outcome) == bits(undisturbed)
    output = capfd.readouterr().err
    assert "process 0 has not met the 1 others within 3 s: one was lost meanwhile, or this machine is slow" in output
    assert "gnomon: process 1 has not met the others within 3 s (--meet-within), nor since: it is killed" in output
    assert re.search(
        r"gnomon: rank 1 of 2 ran out of memory at row \d+, .*: the others stay, and another process", output
    )
    assert outcome.notes[-1].endswith("; went back to step 1")
    for one in (tmp_path / "marks").iterdir():
        while not ended(int(one.name.split()[1])):
            sleep(0.02)


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def test_where_both_places_of_a_state_are_lost_all_go_back_to_the_newest_checkpoint(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Both of two ranks die at once, the last step but one being in a checkpoint at least. Then a loss is one too many,
    and leaves the checkpoint."""
    job = training.job(
        data,
        training.PLANS["zero 1"],
        STEPS,
        max_restarts=2,
        memory_checkpoint_every=1,
        checkpoints=tmp_path / "kept",
        checkpoint_every=1,
    )
    undisturbed = launch(training.train, 2, replace(job, checkpoints=None))[0]
    outcome, _ = with_kills(job, "0 3 0 1", tmp_path / "marks", monkeypatch)
    assert bits(outcome)[-1] == bits(undisturbed)[-1]
    assert outcome.resumed_from in (1, 2)
    assert "rank 1 of 2 was killed by SIGKILL" in capfd.readouterr().err
    again = replace(job, resume=True, steps=6, max_restarts=1)
    with pytest.raises(PeerError, match=r"was killed by SIGKILL, so the run ended.*step-00000[45] is whole"):
        with_kills(again, "0 2 1;2 1 1", tmp_path / "again", monkeypatch)


def test_steps_from_a_copy_are_the_same_bits_also_from_the_other_rank_s() -> None:
    """Parameters in two precisions, the loss scale of fp16, random numbers, parts gathered by ZeRO 1 and 3."""
    for told in launch(dying.copies, 2, list(dying.HELD)).values():
        for name, (first, *again) in told.items():
            assert again == [first, first], name


@pytest.mark.skipif(not FOLDER.is_dir(), reason="looks at sockets in /proc")
def test_connections_are_shut_down_and_what_listens_or_was_there_before_is_not() -> None:
    """gloo ends the process where its listening socket is shut down."""
    with socket.create_server(("127.0.0.1", 0)) as listens, socket.create_connection(listens.getsockname()) as old:
        kept, _ = listens.accept()
        before = sockets()
        with socket.create_server(("127.0.0.1", 0)) as new, socket.create_connection(new.getsockname()) as one:
            other, _ = new.accept()
            assert shut(sockets() - before) == 2
            assert other.recv(1) == one.recv(1) == b"", "both ends find out"
            with socket.create_connection(new.getsockname()):
                new.accept()[0].close()
            other.close()
        old.sendall(b"x")
        assert kept.recv(1) == b"x"
        kept.close()


def without(job: TrainingJob) -> Mapping[str, TrainingJob]:
    two = job.plan
    return {
        "several ranks": replace(job, plan=training.ALONE),
        "--max-restarts N": replace(job, max_restarts=0),
        "no --timeline": replace(job, measure=True),
        "--device cpu": replace(job, device="cuda"),
        "a process for each rank": replace(job, plan=replace(two, placement=(0, 0))),
    }


def test_what_it_needs_is_said_where_it_is_not_there(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two = replace(training.ALONE, mesh=Mesh(dp_replicate=2))
    job = training.job(data, two, STEPS, max_restarts=1, memory_checkpoint_every=1)
    check_surviving(job)
    for says, one in without(job).items():
        with pytest.raises(PlanError, match=f"--memory-checkpoint-every needs {says}"):
            check_surviving(one)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with pytest.raises(PlanError, match="torchrun"):
        check_surviving(job)


PHASES = st.lists(st.integers(0, 2), min_size=2, max_size=7)
"""How far each rank is with the copies of step 8: not taken, taken, committed."""


@given(phases=PHASES, lost=st.sets(st.integers(0, 6)), replicas=st.booleans())
def test_no_loss_but_of_both_places_loses_a_state(phases: list[int], lost: set[int], replicas: bool) -> None:
    """A rank commits only once all have taken, so phases 0 and 2 are never there together; a lost rank has nothing.
    replicas: of three ranks or more, all but the first hold the same."""
    ranks = len(phases)
    alike = [0, *[1] * (ranks - 1)] if replicas and ranks > 2 else list(range(ranks))
    if 0 in phases:
        phases = [min(phase, 1) for phase in phases]
    own = [(7, NONE), (7, 8), (8, NONE)]
    nothing = (NONE, NONE)
    lost = {rank for rank in lost if rank < ranks}
    held = []
    for rank, phase in enumerate(phases):
        keeps = alike.count(alike[rank - 1]) == 1
        steps = nothing if rank in lost else own[phase]
        held.append(HeldSteps(own=steps, of_neighbour=steps if keeps else nothing))
    others = [{(rank + 1) % ranks} if alike.count(alike[rank]) == 1 else set(range(1, ranks)) for rank in range(ranks)]
    step = latest(held, alike)
    if any(others[rank] <= lost for rank in lost):
        assert step is None
        return
    there = [phase for rank, phase in enumerate(phases) if rank not in lost]
    assert step == 8 if min(there) >= 1 else step in (7, 8)
    for rank in range(ranks):
        has = source(rank, step or 0, held, alike)
        assert has is not None and step in (held[has].own if alike[has] == alike[rank] else held[has].of_neighbour)
