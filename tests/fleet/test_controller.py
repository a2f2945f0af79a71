"""The live controller on processes that are only pretended, killed at every moment; and what it knows of plans."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.errors import InputError, RunError
from gnomon.fleet.fates import Fate
from gnomon.fleet.forecast import Curve
from gnomon.fleet.job import Job
from gnomon.fleet.journal import Journal, read_events
from gnomon.fleet.live import Controller
from gnomon.fleet.machines import Machines, Pool
from gnomon.fleet.policies import POLICIES, policy
from gnomon.fleet.state import Decision, Forecasts, Policy, State
from gnomon.fleet.tasks import Task, TaskForecasts, cluster_of, read_tasks
from gnomon.plans import load_plan_file

DEVICES = 4


class Killed(Exception):
    """The controller is no more."""


class Machine:
    """Pretended processes, which outlive controllers. A start may come late, even after the controller is gone."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.now = 0.0
        self.running: dict[str, tuple[int, tuple[int, ...]]] = {}
        self.late: list[tuple[str, int, int, tuple[int, ...]]] = []
        self.children: set[str] = set()
        self.begun: dict[str, int] = {}
        self.ends: dict[str, tuple[int, int]] = {}
        self.completed: list[str] = []

    def start(self, name: str, attempt: int, known: int, command: Sequence[str], devices: Sequence[int]) -> None:
        assert command == ("do", str(len(devices)))
        self.late.append((name, attempt, known, tuple(devices)))
        self.children.add(name)

    def _come(self) -> None:
        """Processes that were started take the locks of their jobs, or find that they must not."""
        for name, attempt, known, devices in self.late:
            if name not in self.running and self.begun.get(name, 0) <= known:
                assert name not in self.completed, "a job that was done runs again"
                self.begun[name] = attempt
                self.running[name] = attempt, devices
        self.late.clear()
        self.children = set(self.running) & self.children

    def alive(self, name: str) -> bool:
        return name in self.running or name in self.children

    def stop(self, name: str) -> None:
        if name in self.running and self.chance.random() < 0.7:
            self._end(name, 143)

    def began(self, name: str) -> int:
        return self.begun.get(name, 0)

    def last_end(self, name: str) -> tuple[int, int] | None:
        return self.ends.get(name)

    def _end(self, name: str, status: int | None) -> None:
        attempt, _ = self.running.pop(name)
        if status is not None:
            self.ends[name] = attempt, status
        if status == 0:
            self.completed.append(name)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        if self.chance.random() < 0.8:
            self._come()
        for name in list(self.running):
            if self.chance.random() < 0.1:
                self._end(name, self.chance.choice((0, 0, 0, 0, 3, None)))
        if self.chance.random() < 0.05:
            raise Killed

    def controller_is_gone(self) -> None:
        self.children.clear()


def at_random(chance: random.Random) -> Policy:
    """Starts, stops and resizes without sense, within the devices that are free."""

    def decide(state: State, forecasts: Forecasts) -> Sequence[Decision]:
        out = []
        for active in (*state.queue, *state.running):
            count = chance.randint(active.job.fewest, active.job.most)
            if active.allocation and chance.random() < 0.2:
                out.append(Decision(active.job.id, ()))
            elif chance.random() < 0.5:
                out.append(Decision(active.job.id, ((0, count),)))
        return out

    return Policy(name="random", paper="", about="", decide=decide, always=True, adapts=True)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_however_often_the_controller_is_killed_no_job_is_lost_or_runs_twice(
    seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    chance = random.Random(seed)
    folder = tmp_path_factory.mktemp("fleet")
    machine = Machine(chance)
    tasks = [
        Task(
            job=Job(
                id=f"j{i}", submit_s=i / 5, work_s=9, devices=2, min_devices=1, max_devices=1 + chance.randint(1, 3)
            ),
            command=("do", "{devices}"),
        )
        for i in range(5)
    ]

    class Mortal(Journal):
        """A journal whose controller dies before or after it writes, now and then."""

        def write(self, kind: str, job: str, **more: object) -> None:
            if chance.random() < 0.03:
                raise Killed
            super().write(kind, job, **more)
            if chance.random() < 0.03:
                raise Killed

    fates: dict[str, Fate] = {}
    for _ in range(400):
        controller = Controller(
            folder=folder, tasks=tasks, devices=DEVICES, policy=at_random(chance), every_s=0.3,
            clock=lambda: machine.now, wait=machine.wait, journal_of=Mortal,
        )  # fmt: skip
        controller.processes = machine
        try:
            fates = controller.run()
            break
        except Killed:
            machine.controller_is_gone()
    assert {fate.state for fate in fates.values()} <= {"done", "failed"}
    for name, fate in fates.items():
        assert machine.completed.count(name) == (fate.state == "done")
        assert fate.state == "done" or fate.failures == 3
    events, _ = read_events(folder / "journal.jsonl")
    check_never_too_many(events, {task.job.id: Fate(task=task, index=index) for index, task in enumerate(tasks)}, fates)


def check_never_too_many(events: Sequence[dict[str, object]], again: dict[str, Fate], fates: dict[str, Fate]) -> None:
    """At no event do jobs hold a device twice; the journal alone gives the fates."""
    for event in events:
        if event["job"]:
            again[str(event["job"])].apply(event)
        held = [number for fate in again.values() for number in fate.devices]
        assert len(held) == len(set(held)) <= DEVICES and set(held) <= set(range(DEVICES))
        for fate in again.values():
            if fate.devices:
                assert fate.task.job.fewest <= len(fate.devices) <= fate.task.job.most
    assert again == fates


def test_a_job_that_runs_and_is_no_longer_in_the_table_is_refused(tmp_path: Path) -> None:
    """Its devices would be given to others. Once it has ended, and for new rows, the table may change."""
    machine = Machine(random.Random(2))
    a, b = (Task(job=Job(id=name, submit_s=0, work_s=9, devices=1), command=("do", "{devices}")) for name in "ab")

    def controller(*tasks: Task) -> Controller:
        made = Controller(
            folder=tmp_path, tasks=tasks, devices=1, policy=policy("fifo"), clock=lambda: machine.now, wait=wait
        )
        made.processes = machine
        return made

    def wait(seconds: float) -> None:
        machine._come()
        raise Killed

    with pytest.raises(Killed):
        controller(a).run()
    with pytest.raises(RunError, match="job 'a' of .* still runs and is not in the table"):
        controller(b).run()
    machine._end("a", 0)
    machine.controller_is_gone()
    with pytest.raises(Killed):
        controller(b).run()
    assert machine.completed == ["a"] and list(machine.running) == ["b"]


def test_policies_that_share_devices_are_refused(tmp_path: Path) -> None:
    task = Task(job=Job(id="a", submit_s=0, work_s=1, devices=1), command=("true",))
    refused = set()
    for known in POLICIES:
        try:
            Controller(folder=tmp_path, tasks=(task,), devices=1, policy=known)
        except InputError as error:
            assert "share devices" in str(error)
            refused.add(known.name)
    assert refused == {"gandiva", "cognn", "qos", "federated", "fgd", "elastic-batch"}


@pytest.mark.parametrize("name", ["fifo", "backfill", "srtf", "las", "tiresias", "optimus", "pollux", "sia", "lyra"])
def test_every_policy_ends_its_jobs_live(name: str, tmp_path: Path) -> None:
    """On pretended processes whose work takes as long as foretold."""
    chance = random.Random(1)
    machine = Machine(chance)
    machine.wait = lambda seconds: None  # type: ignore[method-assign]
    tasks = [
        Task(
            job=Job(id=f"j{i}", submit_s=10.0 * i, work_s=60.0 + 40 * i, devices=2, min_devices=1, max_devices=4),
            command=("do", "{devices}"),
        )
        for i in range(4)
    ]

    def wait(seconds: float) -> None:
        machine.now += 1.0
        machine._come()
        for job, fate in controller.fates.items():
            if fate.state == "running" and controller._reached(fate) >= fate.task.job.work_s and job in machine.running:
                machine._end(job, 0)

    controller = Controller(
        folder=tmp_path, tasks=tasks, devices=4, policy=policy(name), clock=lambda: machine.now, wait=wait
    )
    controller.processes = machine
    fates = controller.run()
    assert sorted(machine.completed) == sorted(fates) and machine.now < 2000
    assert all(fate.failures == 0 and fate.done_s == fate.task.job.work_s for fate in fates.values())


PLAN = """schema = "gnomon.planfile/1"
model = "llama-tiny"
on = "2xcpu-process"
[workload]
global_batch_size = 4
seq_len = 32
[plan]
mesh = {dp_shard = 2}
schedule = {num_microbatches = 1}
precision = {param = "fp32", compute = "fp32", grad = "fp32", reduce = "fp32", master = "none", states = "fp32"}
"""


def test_a_plan_is_foretold_and_resized(tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text(PLAN)
    table = tmp_path / "jobs.csv"
    table.write_text(f"job_id,plan,steps,min_gpus,max_gpus,options\na,{tmp_path}/p.toml,40,1,4,--seed 3\n")
    (task,) = read_tasks(table)
    assert (task.job.devices, task.job.fewest, task.job.most) == (2, 1, 4)
    assert task.planner is not None
    assert task.job.work_s == pytest.approx(40 * task.planner.forecast(2).step_s)  # type: ignore[union-attr]
    told = TaskForecasts({"a": task}, Curve(Machines((Pool(name="l", device="cpu-process", nodes=1, per_node=4),))))
    assert told.phase(task.job, 0, ((0, 2),))[0] == 1
    assert told.phase(task.job, 0, ((0, 3),))[0] == 0  # 4 sequences on 3 ranks
    assert told.remaining_s(task.job, 0, ((0, 1),)) == pytest.approx(40 * task.planner.forecast(1).step_s)  # type: ignore[union-attr]
    assert [task.on(count) for count in (0, 1, 2, 3, 4, 9)] == [0, 1, 2, 2, 4, 4]
    assert task.command_on(2, tmp_path)[4] == f"{tmp_path}/p.toml"
    command = task.command_on(4, tmp_path)
    assert command[-2:] == ("--seed", "3") and "--resume" in command
    resized = load_plan_file(command[4])
    assert resized.plan.world_size == 4 and resized.on == "4xcpu-process"
    assert resized.workload == load_plan_file(tmp_path / "p.toml").workload
    assert task.saved_s() == 0
    (task.checkpoints / "step-000010").mkdir(parents=True)
    (task.checkpoints / "step-000030.partial").mkdir()
    assert task.saved_s() == pytest.approx(task.job.work_s / 4)


def test_a_plan_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    """And runs on no number of devices on which it would not."""
    large = PLAN.replace("llama-tiny", "llama-3.1-8b").replace("2xcpu-process", "2xv100-sxm-32gb")
    (tmp_path / "p.toml").write_text(large)
    table = tmp_path / "jobs.csv"
    table.write_text(f"job_id,plan,steps\na,{tmp_path}/p.toml,40\n")
    with pytest.raises(InputError, match=r"line 2: plan .*p.toml' does not fit on 2 devices: \d+.* GiB on the fullest"):
        read_tasks(table)


def test_clusters_of_other_sizes() -> None:
    assert cluster_of("local", 2) == cluster_of("local:4", 2) == "local:2"
    assert cluster_of("1x8xa100-sxm-80gb", 4) == "4xa100-sxm-80gb"
    assert cluster_of("2xcpu-process", 3) == "3xcpu-process"
    for on in ("machines.toml", "8xh100-sxm+8xa100-sxm-80gb", "2xno-such-device"):
        with pytest.raises(InputError, match="cannot be written for 2 devices"):
            cluster_of(on, 2)


def test_rows_that_are_refused(tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text(PLAN)
    head = "job_id,num_gpus,duration_s,min_gpus,max_gpus,command,plan,steps,options\n"
    for row, message in (
        (f"a,,,1,2,,{tmp_path}/p.toml,0,", "line 2: steps is 0"),
        (f"a,3,,,,,{tmp_path}/p.toml,9,", "line 2: plan .* on 3 devices: "),
        (f"a,4,,,2,,{tmp_path}/p.toml,9,", "line 2: job 'a' asks for 4 devices, which is not from"),
        ("a,,,,,,missing.toml,9,", "line 2: plan 'missing.toml': "),
        ("a,2,9,1,2,train,,,", "line 2: a command that can run on several numbers of devices says where: {devices}"),
        ("a,2,9,,,train,,,--seed 3", "line 2: `options` are of gnomon run"),
        ("a,2,9,,,it's,,,", "line 2: a command or options cannot be split"),
        ("a,2,,,,train,,,", "line 2: duration_s is missing"),
    ):
        (tmp_path / "jobs.csv").write_text(head + row + "\n")
        with pytest.raises(InputError, match=message):
            read_tasks(tmp_path / "jobs.csv")
