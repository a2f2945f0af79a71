"""Partial reduce with real processes: groups of all are an average in every step, and a run can be gone on from."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

import torch.distributed as dist  # noqa: E402
from runtime import training  # noqa: E402
from runtime.ranks import launch  # noqa: E402

from gnomon.errors import PlanError  # noqa: E402
from gnomon.methods.partial_reduce import TicketController, settings_of  # noqa: E402
from gnomon.plans import Mesh, Pass, Plan, Schedule  # noqa: E402
from gnomon.runtime import Executor, TrainingJob  # noqa: E402
from gnomon.runtime.checkpoint.load import load  # noqa: E402
from gnomon.runtime.checkpoint.record import newest  # noqa: E402
from gnomon.runtime.launch.exported_checkpoint import exported  # noqa: E402
from gnomon.runtime.launch.replica import Replica, inputs_by_name  # noqa: E402
from gnomon.runtime.launch.tickets import PartialRun, run_partial_reduce  # noqa: E402

pytestmark = pytest.mark.torch

WORKERS, STEPS = 3, 6


def plan(group: int) -> Plan:
    passes = (Pass(name="partial_reduce", params=(("group", group),)),)
    schedule = Schedule(num_microbatches=1, passes=passes)
    return replace(training.ALONE, mesh=Mesh(dp_replicate=WORKERS), schedule=schedule)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for i in range(60):
        (folder / f"{i}.txt").write_text(f"the loss goes down, line {i % 7} of the text. " * 40)
    return folder


def job(data: Path, group: int, **more: object) -> TrainingJob:
    given = training.job(data, plan(group), STEPS, **more)
    return replace(given, workload=replace(given.workload, global_batch_size=2 * WORKERS))


def averaged(given: TrainingJob) -> tuple[list[float], list[torch.Tensor]]:
    """One worker of a loop by hand: a step on its own rows, then the mean of all parameters."""
    replica, rank = Replica(given.graph, given.plan, given.workload, settings=given.settings), dist.get_rank()
    corpus, losses = training.corpus_of(given), []
    for step in range(given.steps):
        batch = inputs_by_name(corpus.batch(step + 1, seed=0, sequences=2 * WORKERS, seq_len=given.workload.seq_len))
        losses.append(float(replica.step(replica.rows_of(batch, rank)).loss))
        for held, _ in replica.parameters():
            held.shard.mul_(1 / WORKERS)
            dist.all_reduce(held.shard)
    return losses, [held.shard.clone() for held, _ in replica.parameters()]


def parameters(given: TrainingJob) -> list[torch.Tensor]:
    """Of the newest checkpoint, under a plan of one rank."""
    assert given.checkpoints is not None
    executor = Executor(given.graph, training.ALONE, given.workload)
    assert load(given.checkpoints, executor) == given.steps
    return [held.shard.clone() for held, _ in executor.parameters()]


def test_groups_of_all_workers_are_the_bits_of_an_average_in_every_step(data: Path, tmp_path: Path) -> None:
    given = job(data, WORKERS, checkpoints=tmp_path)
    told = run_partial_reduce(given)
    expected = launch(averaged, WORKERS, given)
    losses = [sum(expected[rank][0][step] for rank in range(WORKERS)) / WORKERS for step in range(STEPS)]
    assert [record.loss for record in told.outcome.records] == losses
    last = launch(parameters, 1, given)[0]
    for one, other in zip(last, expected[0][1], strict=True):
        assert torch.equal(one, other)
    asked = replace(given, export=(tmp_path / "weights", training.config_folder(tmp_path / "model")))
    assert exported(asked, told.outcome) == told.outcome, "the checkpoint was asked for, and stays"
    weights = (tmp_path / "weights/model.safetensors").read_bytes()
    assert len(weights) > 4 * sum(part.numel() for part in last)
    embedding = last[0][: training.CONFIG.vocab_size * training.CONFIG.hidden_size]
    assert embedding.numpy().tobytes() in weights


@pytest.fixture(scope="module")
def slow(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainingJob, PartialRun]:
    """Groups of two, one worker slower than the others, a checkpoint on the way."""
    given = job(data, 2, checkpoints=tmp_path_factory.mktemp("kept"), checkpoint_every=4)
    return given, run_partial_reduce(given, pause_s=(0.0, 0.0, 0.3))


def test_every_step_is_recorded_and_the_loss_goes_down(slow: tuple[TrainingJob, PartialRun]) -> None:
    given, told = slow
    assert [record.step for record in told.outcome.records] == list(range(1, STEPS + 1))
    assert told.outcome.records[-1].loss < told.outcome.records[0].loss
    assert told.outcome.records[-1].validation_loss is not None
    assert sum(told.tickets) == STEPS * WORKERS and all(len(group) == 2 for group in told.groups)
    assert told.outcome.checkpoint is not None and told.outcome.checkpoint.name == f"step-{STEPS:06}"


def test_the_trace_of_a_run_gives_the_same_groups_again(slow: tuple[TrainingJob, PartialRun]) -> None:
    given, told = slow
    controller = TicketController(settings_of(given.plan), steps=STEPS, meet_every=4)
    for arrival in told.arrivals:
        controller.arrive(arrival)
    assert tuple(controller.groups) == told.groups


def test_it_goes_on_from_its_checkpoint(data: Path, slow: tuple[TrainingJob, PartialRun]) -> None:
    given, _ = slow
    longer = replace(given, steps=STEPS + 2, resume=True)
    told = run_partial_reduce(longer)
    assert told.outcome.resumed_from == STEPS
    assert [record.step for record in told.outcome.records] == [STEPS + 1, STEPS + 2]
    assert newest(given.checkpoints).name == f"step-{STEPS + 2:06}"  # type: ignore[union-attr, arg-type]


def test_a_damaged_newest_checkpoint_is_passed_over(
    data: Path, slow: tuple[TrainingJob, PartialRun], tmp_path: Path
) -> None:
    given, _ = slow
    assert given.checkpoints is not None
    older, newer = sorted(given.checkpoints.glob("step-*"))[-2:]
    for kept in (older, newer):
        shutil.copytree(kept, tmp_path / kept.name)
    victim = max((tmp_path / newer.name).glob("*.safetensors"), key=lambda path: path.stat().st_size)
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    before = int(older.name.removeprefix("step-"))
    told = run_partial_reduce(replace(given, steps=before + 1, resume=True, checkpoints=tmp_path))
    assert told.outcome.resumed_from == before
    assert [record.step for record in told.outcome.records] == [before + 1]


def test_what_it_does_not_do_is_refused(data: Path) -> None:
    with pytest.raises(PlanError, match="partial_reduce does not do --max-restarts yet"):
        run_partial_reduce(job(data, 2, max_restarts=1))
    with pytest.raises(PlanError, match="run by gnomon run alone"):
        Executor(training.llama(training.CONFIG), plan(2), job(data, 2).workload)
