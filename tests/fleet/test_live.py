"""The live controller on local processes: it preempts and resumes, and survives kill -9 without running a job twice."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gnomon.errors import InputError, RunError
from gnomon.fleet.journal import read_events
from gnomon.fleet.live import Controller, read_tasks
from gnomon.fleet.policies import policy

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


def said(folder: Path, name: str) -> list[str]:
    path = folder / f"{name}.out"
    return path.read_text().split("\n")[:-1] if path.exists() else []


def test_a_shorter_job_preempts_and_the_longer_resumes(tmp_path: Path) -> None:
    tasks = read_tasks(table(tmp_path, ("long", 2, 9000, 0.2), ("short", 1, 1, 0.1), chained=True))

    def clock() -> float:  # the short job is submitted as soon as the long one runs
        return 1010.0 if said(tmp_path, "long") else 0.0

    fates = Controller(folder=tmp_path / "f", tasks=tasks, devices=2, policy=policy("srtf"), clock=clock).run()
    assert [fate.state for fate in fates.values()] == ["done", "done"]
    assert fates["long"].preemptions == 1 and fates["long"].starts == 2
    long = said(tmp_path, "long")
    assert long[1] == "stop" and long[-1] == "end" and float(long[2].split()[1]) > 0  # it went on, not from 0
    assert said(tmp_path, "short") == ["start 0.0", "end"]
    events = [event["event"] for event in read_events(tmp_path / "f/journal.jsonl")[0] if event["job"] == "long"]
    assert events == ["starting", "stopping", "preempted", "starting", "done"]


def test_kill_9_of_the_controller_loses_nothing_and_runs_nothing_twice(tmp_path: Path) -> None:
    jobs = table(tmp_path, ("a", 1, 5, 3.0), ("b", 1, 5, 3.0), ("c", 1, 5, 0.2))
    command = [sys.executable, "-m", "gnomon", "fleet", "run", str(jobs), "--devices", "2", "--json"]
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    first = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (said(tmp_path, "a") and said(tmp_path, "b")) and time.monotonic() < deadline:
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    first.wait()
    with open(tmp_path / "jobs.csv.fleet/journal.jsonl", "a") as journal:
        journal.write('{"event":"sta')  # a line that the crash cut off
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    fates = {each["job"]: each for each in json.loads(done.stdout)}
    assert {name: fate["state"] for name, fate in fates.items()} == dict.fromkeys("abc", "done")
    for name in "abc":
        assert said(tmp_path, name) == ["start 0.0", "end"]
        assert fates[name]["starts"] == 1


def test_a_job_that_fails_is_tried_again_and_given_up(tmp_path: Path) -> None:
    path = tmp_path / "jobs.csv"
    path.write_text(f"job_id,num_gpus,duration_s,command\nbad,1,1,{sys.executable} -c 'raise SystemExit(3)'\n")
    fates = Controller(folder=tmp_path / "f", tasks=read_tasks(path), devices=1, policy=policy("fifo")).run()
    assert fates["bad"].state == "failed" and fates["bad"].starts == 3


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
