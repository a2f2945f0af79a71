"""The live controller on local processes: it preempts and resumes, and survives kill -9 without running a job twice."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from gnomon.errors import InputError, RunError
from gnomon.fleet.child import Began, Ended, read_began, write
from gnomon.fleet.journal import read_events
from gnomon.fleet.live import Controller
from gnomon.fleet.policies import policy
from gnomon.fleet.processes import LocalProcesses
from gnomon.fleet.state import Decision, Forecasts, Policy, State
from gnomon.fleet.tasks import Task, read_tasks
from gnomon.plans import load_plan_file

SOURCE = str(Path(__file__).parents[2] / "src")

JOB = """\
import signal, sys, time
from pathlib import Path
out, seconds, other = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
saved = Path(f"{out}.saved")
done = float(saved.read_text()) if saved.exists() else 0.0
say = lambda text: open(out, "a").write(text + "\\n")
def stop(*_):
    saved.write_text(str(done + 0.1)); say("stop"); sys.exit(143)
signal.signal(signal.SIGTERM, stop)
say(f"start {done:.1f}")
while done < seconds or not all(Path(o).exists() and "end" in Path(o).read_text() for o in other):
    time.sleep(0.05); done += 0.05
say("end")
"""


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


def table(folder: Path, *rows: tuple[str, int, float, float], chained: bool = False) -> Path:
    """(name, devices, what policies are told, seconds that it takes) of each job."""
    (folder / "job.py").write_text(JOB)
    lines = ["job_id,num_gpus,duration_s,submit_s,command"]
    for place, (name, devices, told, seconds) in enumerate(rows):
        # Each job ends after the next one, so that it is there to be preempted however slow the machine is.
        after = f" {folder}/{rows[place + 1][0]}.out" if chained and place + 1 < len(rows) else ""
        command = f"{sys.executable} {folder}/job.py {folder}/{name}.out {seconds}{after}"
        lines.append(f"{name},{devices},{told},{1000.0 * place if chained else 0.0},{command}")
    path = folder / "jobs.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def message(folder: Path, name: str) -> list[str]:
    path = folder / f"{name}.out"
    return path.read_text().split("\n")[:-1] if path.exists() else []


def test_a_shorter_job_preempts_and_the_longer_resumes(tmp_path: Path) -> None:
    tasks = read_tasks(table(tmp_path, ("long", 2, 9000, 0.2), ("short", 1, 1, 0.1), chained=True))

    def clock() -> float:  # the short job is submitted as soon as the long one runs
        return 1010.0 if message(tmp_path, "long") else 0.0

    fates = Controller(folder=tmp_path / "f", tasks=tasks, devices=2, policy=policy("srtf"), clock=clock).run()
    assert [fate.state for fate in fates.values()] == ["done", "done"]
    assert fates["long"].preemptions == 1 and fates["long"].attempt == 2
    long = message(tmp_path, "long")
    assert long[1] == "stop" and long[-1] == "end" and float(long[2].split()[1]) > 0  # it went on, not from 0
    assert message(tmp_path, "short") == ["start 0.0", "end"]
    events = [event["event"] for event in read_events(tmp_path / "f/journal.jsonl")[0] if event["job"] == "long"]
    assert events == ["starting", "stopping", "preempted", "starting", "done"]


def test_kill_9_of_the_controller_loses_nothing_and_runs_nothing_twice(tmp_path: Path) -> None:
    jobs = table(tmp_path, ("a", 1, 5, 3.0), ("b", 1, 5, 3.0), ("c", 1, 5, 0.2))
    command = [sys.executable, "-m", "gnomon", "fleet", "run", str(jobs), "--devices", "2", "--json"]
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    first = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (message(tmp_path, "a") and message(tmp_path, "b")) and time.monotonic() < deadline:
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    first.wait()
    with open(tmp_path / "jobs.csv.fleet/journal.jsonl", "a") as journal:
        journal.write('{"event":"sta')  # a line that the crash cut off
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    fates = {load["job"]: load for load in json.loads(done.stdout)}
    assert {name: fate["state"] for name, fate in fates.items()} == dict.fromkeys("abc", "done")
    for name in "abc":
        assert message(tmp_path, name) == ["start 0.0", "end"]
        assert fates[name]["starts"] == 1


class Until(Task):
    """Trains for ever; after a stop, for a few steps more."""

    def command_on(self, devices: int, folder: Path) -> tuple[str, ...]:
        """As a task does, with other steps."""
        saved = [int(path.name[5:]) for path in self.checkpoints.glob("step-??????")]
        return Task.command_on(replace(self, steps=max(saved) + 5 if saved else 10**6), devices, folder)


@pytest.mark.torch
@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
def test_a_real_run_is_resized_from_its_checkpoint_by_the_next_controller(tmp_path: Path, monkeypatch: Any) -> None:
    """One rank, kill of the controller, two ranks: the second process goes on where the first stopped."""
    monkeypatch.setenv("PYTHONPATH", SOURCE)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "p.toml").write_text(PLAN)
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.txt").write_text("all work and no play makes jack a dull boy\n" * 200)
    table = tmp_path / "jobs.csv"
    row = f"a,{tmp_path}/p.toml,1000000,1,1,2,--data {tmp_path}/text --seed 3"
    table.write_text(f"job_id,plan,steps,num_gpus,min_gpus,max_gpus,options\n{row}\n")
    (task,) = read_tasks(table)
    until = Until(**{item.name: getattr(task, item.name) for item in fields(task)})
    log = tmp_path / "f/a.log"

    def trains() -> bool:
        return log.exists() and " 1/1000000 " in log.read_text()

    def decide(state: State, forecasts: Forecasts) -> list[Decision]:
        """Start on one; on two from when the second controller is there."""
        return [Decision("a", ((0, 2 if second and trains() else 1),))]

    class Killed(Exception):
        pass

    deadline = time.monotonic() + 240

    def wait(seconds: float) -> None:
        time.sleep(seconds)
        if time.monotonic() > deadline:  # it would train for ever
            os.killpg(read_began(tmp_path / "f", "a").beside, signal.SIGKILL)  # type: ignore[union-attr]
        if not second and trains():
            raise Killed

    chosen = Policy(name="test", paper="", about="", decide=decide, always=True, adapts=True)
    second = False
    first = Controller(folder=tmp_path / "f", tasks=[until], devices=2, policy=chosen, every_s=0, wait=wait)
    with pytest.raises(Killed):
        first.run()
    second = True
    fates = Controller(folder=tmp_path / "f", tasks=[until], devices=2, policy=chosen, every_s=0, wait=wait).run()
    assert isinstance(first.processes, LocalProcesses)
    first.processes.children["a"].wait()
    fate = fates["a"]
    text = log.read_text()
    assert (fate.state, fate.attempt, fate.resizes, fate.preemptions, fate.failures) == ("done", 2, 1, 0, 0), text
    events = [event for event in read_events(tmp_path / "f/journal.jsonl")[0] if event["job"]]
    assert [event["event"] for event in events] == ["starting", "resizing", "resized", "starting", "done"]
    assert [event["devices"] for event in events if event["event"] == "starting"] == [[0], [0, 1]]
    assert load_plan_file(tmp_path / "f/a.1.toml").plan.world_size == 1
    steps = sorted(int(path.name[5:]) for path in task.checkpoints.glob("step-??????"))
    assert len(steps) == 2 and steps[1] == steps[0] + 5  # where it was stopped, and its end


def test_a_job_that_fails_is_tried_again_and_given_up(tmp_path: Path) -> None:
    path = tmp_path / "jobs.csv"
    path.write_text(f"job_id,num_gpus,duration_s,command\nbad,1,1,{sys.executable} -c 'raise SystemExit(3)'\n")
    fates = Controller(folder=tmp_path / "f", tasks=read_tasks(path), devices=1, policy=policy("fifo")).run()
    assert fates["bad"].state == "failed" and fates["bad"].attempt == 3


def test_what_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "jobs.csv"
    for text, wanted in (
        ("job_id,num_gpus,duration_s\na,1,1\n", "line 2: give `command`, or `plan`"),
        ("job_id,num_gpus,duration_s,command\n../a,1,1,true\n", "line 2: job_id '../a' must be of letters"),
        ("job_id,num_gpus,duration_s,command\na,1,-1,true\n", "line 2: duration_s is negative"),
    ):
        path.write_text(text)
        with pytest.raises(InputError, match=wanted):
            read_tasks(path)
    path.write_text("job_id,num_gpus,duration_s,command\na,4,1,true\n")
    with pytest.raises(InputError, match="line 2: job 'a' wants 4 of 2 devices"):
        Controller(folder=tmp_path / "f", tasks=read_tasks(path), devices=2, policy=policy("fifo")).run()
    path.write_text("job_id,num_gpus,duration_s,command\na,1,1,true\n")
    (tmp_path / "g").mkdir()
    with open(tmp_path / "g/controller.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RunError, match="another controller drives"):
            Controller(folder=tmp_path / "g", tasks=read_tasks(path), devices=2, policy=policy("fifo")).run()
    (tmp_path / "g/journal.jsonl").write_text("nonsense\n")
    with pytest.raises(InputError, match="line 1 is not JSON"):
        read_events(tmp_path / "g/journal.jsonl")


def test_only_a_job_that_runs_is_signalled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process of an attempt that has ended, whose ids may be others', nor this one's group, which 0 means."""
    signalled: list[int] = []

    def gone(pid: int, sent: int) -> None:
        signalled.append(pid)
        raise ProcessLookupError

    monkeypatch.setattr(os, "kill", gone)
    processes = LocalProcesses(tmp_path)
    for job, expected in ((77, [76, 77]), (0, [76])):
        write(tmp_path / "a.began", Began(attempt=2, beside=76, job=job))
        write(tmp_path / "a.ended", Ended(attempt=1, status=0))
        processes.stop("a")
        assert signalled == expected
        write(tmp_path / "a.ended", Ended(attempt=2, status=127))
        processes.stop("a")
        assert signalled == expected
        signalled.clear()


@pytest.mark.parametrize(("visible", "own"), [(None, "1,2"), ("", ""), ("4,5,6", "5,6"), ("2,5", "5")])
def test_a_job_sees_its_own_gpus_of_those_that_are_visible(
    visible: str | None, own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    monkeypatch.setattr(subprocess, "Popen", lambda *_, env, **__: started.append(env["CUDA_VISIBLE_DEVICES"]))
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    LocalProcesses(tmp_path).start("a", 1, 0, ["true"], (1, 2))
    assert started == [own]
