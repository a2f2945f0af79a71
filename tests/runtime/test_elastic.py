"""Logical workers: the same bits on any number of processes, through rescaling and kill -9, in the same processes."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

from runtime import elastic_steps, training  # noqa: E402
from runtime.elastic_steps import PLAN, TWO, Told, logical, on, ordinary  # noqa: E402
from runtime.ranks import launch  # noqa: E402

from gnomon.cli import main  # noqa: E402
from gnomon.control import read_trace, replayed  # noqa: E402
from gnomon.errors import PeerError, PlanError  # noqa: E402
from gnomon.methods.easyscale import Observation, move_workers, place_workers  # noqa: E402
from gnomon.plans import Mesh, Optimizer, Schedule  # noqa: E402
from gnomon.request.scale import ask, read_state  # noqa: E402
from gnomon.runtime import Outcome, TrainingJob, run  # noqa: E402
from gnomon.runtime.checkpoint.record import newest, read_record  # noqa: E402
from gnomon.runtime.launch.elastic import LOGICAL_WORKERS  # noqa: E402
from gnomon.runtime.launch.launcher import Launcher, run_scheme  # noqa: E402
from gnomon.runtime.launch.logical_workers import LogicalWorkers  # noqa: E402
from gnomon.runtime.processes import instruction_sets  # noqa: E402

pytestmark = pytest.mark.torch

STEPS = 6
PATIENCE_S = 300.0


@pytest.fixture(scope="module")
def alone() -> Told:
    """All four workers in one process."""
    return launch(logical, 1, PLAN, [on(PLAN, 1)] * STEPS)[0]


def assert_same_bits(result: Told, expected: Told) -> None:
    assert result[0] == expected[0]
    assert all(torch.equal(one, other) for one, other in zip(result[1], expected[1], strict=True))


@pytest.mark.parametrize("processes", [2, 4])
def test_losses_and_parameters_are_the_same_bits_on_any_number_of_processes(processes: int, alone: Told) -> None:
    for process in launch(logical, processes, PLAN, [on(PLAN, processes)] * STEPS).values():
        assert_same_bits(process, alone)


def test_and_when_workers_move_before_every_step(alone: Told) -> None:
    """Each step at a placement of its own, that leaves some of three processes without a worker, in any order."""
    chance = random.Random(7)
    placements = [tuple(chance.randrange(3) for _ in range(4)) for _ in range(STEPS)]
    for placement in launch(logical, 3, PLAN, placements).values():
        assert_same_bits(placement, alone)


def test_two_workers_are_the_bits_of_two_ranks_and_four_their_sums_in_another_order(alone: Told) -> None:
    ranks = launch(ordinary, 2, TWO, STEPS)[0]
    results = launch(logical, 1, TWO, [on(TWO, 1)] * STEPS)[0]
    assert_same_bits((results[0][:-1], results[1]), ranks)
    torch.testing.assert_close(torch.tensor(alone[0]), torch.tensor(results[0]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (replace(PLAN, optimizer=Optimizer(zero=1)), "use zero = 0, not 1"),
        (replace(PLAN, mesh=Mesh(dp_replicate=2, tp=2)), "leave dp_replicate alone above 1"),
        (replace(PLAN, mesh=Mesh(pp=2), schedule=Schedule(num_microbatches=4)), "leave dp_replicate alone above 1"),
    ],
)
def test_ranks_that_do_not_hold_the_whole_model_are_refused(plan: object, says: str) -> None:
    with pytest.raises(PlanError, match=f"easyscale cannot be used in this plan: .*{says}"):
        LogicalWorkers(training.llama(training.CONFIG), plan, elastic_steps.WORK)  # type: ignore[arg-type]


# --- processes that come and go


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for i in range(60):
        (folder / f"{i}.txt").write_text(f"the loss goes down, line {i % 7} of the text. " * 40)
    return folder


def job(data: Path, processes: int, folder: Path, **more: object) -> TrainingJob:
    plan = replace(PLAN, schedule=Schedule(num_microbatches=1))
    start = place_workers(plan, Observation(processes=processes))
    return training.job(data, start, 10**6, checkpoints=folder, **more)


def until(happened: Callable[[], object]) -> None:
    ends = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < ends, "it did not happen"
        time.sleep(0.02)


def changed(folder: Path, count: int) -> Callable[[], bool]:
    """Whether all go on after so many changes, the start among them."""

    def happened() -> bool:
        path = folder / ".job" / "state.json"
        changes = json.loads(path.read_text())["changes"] if path.exists() else []
        return len(changes) >= count and changes[-1]["going_at"] is not None

    return happened


def pids() -> dict[str, int]:
    return {child.name: child.pid for child in active_children() if child.pid and child.name.startswith("gnomon rank")}


def beside(
    given: TrainingJob, act: Callable[[Path], None], *, stops: bool = True, pause_s: tuple[float, ...] = ()
) -> Outcome:
    """Runs the job with `act` in a thread. stops: and tells it to stop then."""
    failed: list[BaseException] = []

    def acts() -> None:
        try:
            assert given.checkpoints is not None
            act(given.checkpoints)
        except BaseException as error:
            failed.append(error)
        if stops or failed:
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=acts)
    thread.start()
    try:
        return run_scheme(given, LOGICAL_WORKERS, pause_s=pause_s)
    finally:
        thread.join()
        if failed:
            raise failed[0]


def undisturbed(given: TrainingJob, steps: int) -> list[float]:
    """Losses of the same job in one process."""
    return launch(_losses, 1, replace(given, steps=steps, checkpoints=None))[0]


def assert_replayed(path: Path, decided: list[tuple[int, tuple[int, ...]]]) -> None:
    """A simulated launcher that is told what happened sees the same at each moment, and decides the same. decided:
    processes and placement of each decision, the first ones."""
    trace = read_trace(path)
    assert list(replayed(trace)) == [(look.seen, look.decision) for look in trace.looks]
    found = [look.decision for look in trace.looks if look.decision is not None]
    assert [(len(one.members), one.plan.placement) for one in found][: len(decided)] == decided


def _losses(given: TrainingJob) -> list[float]:
    if given.kernels:
        instruction_sets.compute_with(given.kernels)
    workers = LogicalWorkers(given.graph, given.plan, given.workload, seed=given.seed, settings=given.settings)
    workers.place((0,) * 4)
    corpus = training.corpus_of(given)
    size = {"sequences": given.workload.global_batch_size, "seq_len": given.workload.seq_len}
    return [
        workers.total_loss(workers.step(corpus.batch(step, seed=given.seed, **size)))
        for step in range(1, given.steps + 1)
    ]


def test_a_killed_process_is_replaced_and_the_job_rescaled_while_the_others_stay(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three processes; one is killed, and replaced; then there are two; the last bits are those of one process."""
    stayed: list[bool] = []

    def act(folder: Path) -> None:
        until(changed(folder, 1))
        before = pids()
        os.kill(before["gnomon rank 1"], signal.SIGKILL)
        until(changed(folder, 3))  # without it, and with another in its place
        after = pids()
        stayed.append(all(after[f"gnomon rank {n}"] == before[f"gnomon rank {n}"] for n in (0, 2)))
        assert main(["scale", str(folder), "--to", "2"]) == 0

    given = job(data, 3, tmp_path / "kept", max_restarts=1, decisions=tmp_path / "decisions.jsonl")
    outcome = beside(given, act)
    assert_replayed(
        tmp_path / "decisions.jsonl", [(3, (0, 0, 1, 2)), (2, (0, 0, 1, 1)), (3, (0, 0, 1, 2)), (2, (0, 0, 1, 1))]
    )
    assert stayed == [True]
    losses = [record.loss for record in outcome.records]
    assert outcome.signal == signal.SIGINT and outcome.resumed_from == 0
    assert outcome.checkpoint == newest(tmp_path / "kept")
    assert losses == undisturbed(given, len(losses))
    changes = json.loads((tmp_path / "kept" / ".job" / "state.json").read_text())["changes"]
    decided = [place_workers(given.plan, Observation(processes=count)).placement for count in (3, 2, 3, 2)]
    assert [tuple(change["placement"]) for change in changes] == decided, "what was observed decides"
    assert changes[1]["why"] == "process 1 was killed by SIGKILL"
    assert changes[1]["noticed_at"] is not None and changes[3]["noticed_at"] is None
    output = capsys.readouterr()
    assert "4 logical workers on 2 processes" in output.out
    assert main(["scale", str(tmp_path / "kept"), "--to", "2"]) == 2, "it is over"


def test_where_no_process_is_left_another_goes_on_from_the_checkpoint(data: Path, tmp_path: Path) -> None:
    def act(folder: Path) -> None:
        until(lambda: newest(folder) is not None)
        assert main(["scale", str(folder), "--to", "5"]) == 2, "it has four workers"
        os.kill(pids()["gnomon rank 0"], signal.SIGKILL)
        until(changed(folder, 2))

    given = job(data, 1, tmp_path / "kept", max_restarts=1, checkpoint_every=2)
    outcome = beside(given, act)
    assert outcome.resumed_from >= 2
    steps = outcome.records[-1].step
    assert [record.loss for record in outcome.records] == undisturbed(given, steps)[outcome.resumed_from :]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes in /proc")
def test_a_stopped_process_is_killed_and_the_others_go_on(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gnomon.runtime.launch.launcher.SILENT_S", 0.5)

    def act(folder: Path) -> None:
        until(changed(folder, 1))
        os.kill(pids()["gnomon rank 0"], signal.SIGSTOP)
        until(changed(folder, 2))

    given = job(data, 2, tmp_path / "kept")
    outcome = beside(given, act)
    assert "process 0 was stopped for 0 s: it is killed" in capfd.readouterr().err
    assert [record.loss for record in outcome.records] == undisturbed(given, len(outcome.records))


OLD = {1: "avx2", 2: "default"}
"""Processes that compute as on an older machine, and with what."""


@pytest.fixture
def unlike(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Processes with unlike kernels; what their launcher says."""
    lines: list[str] = []
    environment = Launcher._environment

    def restricted(self: Launcher, rank: int, *place: Any) -> dict[str, str]:
        own = {instruction_sets.CAPABILITY: OLD[rank]} if rank in OLD else {}
        return {**environment(self, rank, *place), **own}

    monkeypatch.setattr(Launcher, "_environment", restricted)
    monkeypatch.setattr(Launcher, "_say", lambda self, line: lines.append(line))
    return lines


def test_unlike_processors_give_the_same_bits_at_d2(data: Path, tmp_path: Path, unlike: list[str]) -> None:
    """Two processes, the second as on an older machine; a third that is older still; a fourth; then one alone."""

    def act(folder: Path) -> None:
        until(changed(folder, 1))
        ask(folder, 3)
        until(lambda: any("left out" in line for line in unlike))
        assert main(["scale", str(folder), "--to", "3"]) == 0
        assert main(["scale", str(folder), "--to", "1"]) == 0

    given = job(data, 2, tmp_path / "kept", determinism="D2")
    outcome = beside(given, act)
    losses = [record.loss for record in outcome.records]
    assert losses == undisturbed(replace(given, kernels="avx2"), len(losses))
    assert unlike[0] == "all processes compute with avx2 kernels, which all have; without oneDNN"
    assert "process 2 has no avx2 kernels, with which this job began: it is left out" in unlike
    assert read_record(newest(tmp_path / "kept")).identity["kernels"] == "avx2"


def test_unlike_processors_are_told_of_at_d1(data: Path, tmp_path: Path, unlike: list[str]) -> None:
    """The same two processes, without D2. The bits are those of one process or not, but nobody is left in the dark."""
    outcome = beside(job(data, 2, tmp_path / "kept"), lambda folder: until(changed(folder, 1)))
    said = next(line for line in unlike if "may then differ" in line)
    assert "avx2 kernels on " in said and "--determinism D2 gives the same bits" in said
    assert outcome.notes[-1] == said


def test_weights_are_exported_at_the_end_of_a_run_that_lost_a_process(data: Path, tmp_path: Path) -> None:
    """One of two processes is lost, and the other ends the run: the file has the bytes of a run that lost none. The
    checkpoint that it was written from is gone again, as nobody asked for it."""

    def act(folder: Path) -> None:
        until(changed(folder, 1))
        os.kill(pids()["gnomon rank 1"], signal.SIGKILL)

    config = training.config_folder(tmp_path / "model")
    folders = {name: tmp_path / f"{name} weights" for name in ("whole", "lost")}
    for name, weights in folders.items():
        given = job(data, 2, tmp_path / name, export=(weights, config), checkpoint_at_end=False)
        given = replace(given, steps=30)
        if name == "whole":
            outcome = run(given)
        else:
            outcome = beside(given, act, stops=False, pause_s=(0.0, 0.1))
            state = json.loads((tmp_path / name / ".job" / "state.json").read_text())
            assert len(state["changes"]) == 2
        assert outcome.records[-1].step == 30 and outcome.checkpoint is None and newest(tmp_path / name) is None
    one, other = ((folder / "model.safetensors").read_bytes() for folder in folders.values())
    assert one == other and len(one) > 4 * 20_000


def test_a_job_agrees_on_kernels_that_all_have() -> None:
    assert instruction_sets.common(["avx512", "avx512"]) == "avx2", "that those have too that come later"
    assert instruction_sets.common(["avx512", "default"]) == "default"
    assert instruction_sets.has("avx512", "avx2") and not instruction_sets.has("default", "avx2")


def test_kernels_that_torch_has_chosen_are_not_changed_in_silence() -> None:
    with pytest.raises(Exception, match="torch computes with .* kernels in this process, and the job with default"):
        launch(_too_late, 1)


def _too_late() -> None:
    assert torch.backends.cpu.get_cpu_capability() != "DEFAULT"
    instruction_sets.compute_with("default")


def test_workers_move_from_a_slow_process_to_a_fast_one(data: Path, tmp_path: Path) -> None:
    """Two of four workers each; a worker of the second process takes a third of a second longer than one of the first,
    which then has three. The decision is the controller's, and the bits are those of one process."""

    def act(folder: Path) -> None:
        until(changed(folder, 2))

    given = job(data, 2, tmp_path / "kept", follow_speed=True, decisions=tmp_path / "decisions.jsonl")
    outcome = beside(given, act, pause_s=(0.0, 0.3))
    assert_replayed(tmp_path / "decisions.jsonl", [(2, (0, 0, 1, 1)), (2, (0, 0, 0, 1))])
    losses = [record.loss for record in outcome.records]
    assert losses == undisturbed(given, len(losses))
    changes = json.loads((tmp_path / "kept" / ".job" / "state.json").read_text())["changes"]
    assert [tuple(change["placement"]) for change in changes[:2]] == [(0, 0, 1, 1), (0, 0, 0, 1)]
    assert changes[1]["why"].startswith("workers moved by measured speeds ")
    speeds = tuple(float(text) for text in changes[1]["why"].split("speeds ")[1].split(", "))
    decided = move_workers(place_workers(given.plan, Observation(processes=2)), Observation(processes=2, speeds=speeds))
    assert decided.placement == (0, 0, 0, 1)


def test_without_restarts_the_last_loss_is_one_error(data: Path, tmp_path: Path) -> None:
    def act(folder: Path) -> None:
        until(changed(folder, 1))
        os.kill(pids()["gnomon rank 0"], signal.SIGKILL)

    with pytest.raises(PeerError, match="rank 0 of 1 was killed by SIGKILL, so the run ended; no checkpoint"):
        beside(job(data, 1, tmp_path / "kept"), act, stops=False)


def test_the_state_of_no_job_is_said(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="no job that can be scaled runs in"):
        read_state(tmp_path)
