"""`gnomon run` as people use it: real processes, real signals, resuming to the same losses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

from runtime.parity import FP32  # noqa: E402

from gnomon.cli import main  # noqa: E402
from gnomon.plans import Mesh, Pass, Plan, PlanFile, Schedule, Stage, Workload, load_plan, save_plan_file  # noqa: E402
from gnomon.timeline.text import parse_timeline  # noqa: E402

pytestmark = pytest.mark.torch

SOURCE = Path(__file__).parents[2] / "src"
GNOMON = (sys.executable, "-c", "import sys; from gnomon.cli import main; sys.exit(main())")
PATIENCE_S = 600.0
FOREVER = "1000000"
TRAIN = ("run", "plan.toml", "--data", "text")


@dataclass
class Folder:
    """A folder with a plan of two ranks and some text, where commands run."""

    path: Path

    def start(self, *words: str, prefix: tuple[str, ...] = GNOMON) -> subprocess.Popen[str]:
        """A command in a process group of its own, as a shell would start it."""
        environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
        with (self.path / "stderr").open("w") as error:
            return subprocess.Popen(
                [*prefix, *words],
                cwd=self.path,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=error,
                text=True,
                process_group=0,
            )

    def run(self, *words: str, prefix: tuple[str, ...] = GNOMON) -> tuple[int, str, str]:
        """(status, output, errors) of a command that ends by itself."""
        with self.start(*words, prefix=prefix) as process:
            out, _ = process.communicate(timeout=PATIENCE_S)
        return process.returncode, out, self.errors

    @property
    def errors(self) -> str:
        return (self.path / "stderr").read_text()

    def end(self, process: subprocess.Popen[str], when: Callable[[], bool], end: Callable[[], None]) -> tuple[int, str]:
        """(status, errors) after `end` was done to a process for which `when` has come true."""
        with process:
            until = time.monotonic() + PATIENCE_S
            while not when():
                assert process.poll() is None and time.monotonic() < until, self.errors
                time.sleep(0.05)
            end()
            process.communicate(timeout=PATIENCE_S)
        return process.returncode, self.errors


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    text = tmp_path / "text"
    text.mkdir()
    for i in range(40):
        (text / f"{i}.txt").write_text(f"the loss goes down, line {i % 7} of the text. " * 40)
    plan = Plan(mesh=Mesh(pp=2), schedule=Schedule(name="one_f_one_b", num_microbatches=2), precision=FP32)
    work = Workload(global_batch_size=4, seq_len=32)
    save_plan_file(PlanFile(model="llama-mini", on="2xcpu-process", workload=work, plan=plan), tmp_path / "plan.toml")
    return Folder(tmp_path)


Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """(status, output, errors) of a command in the folder whose launcher is this process, which has loaded torch. Its
    ranks are processes as ever; what they print themselves is not among the errors."""
    monkeypatch.chdir(folder.path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main(words)
        out, err = capsys.readouterr()
        return status, out, err

    return run


def losses(out: str) -> dict[int, float]:
    document = json.loads(out)
    assert document["schema"] == "gnomon.run/1"
    optimizer = document["optimizer"]
    assert optimizer["weight_decay"] == 0.1 and set(optimizer["decays"]).isdisjoint(optimizer["does_not_decay"])
    assert any("q_proj" in name for name in optimizer["decays"])
    assert any("norm" in name for name in optimizer["does_not_decay"])
    return {row["step"]: row["loss"] for row in document["steps"]}


def members(launcher: int) -> list[int]:
    """The launcher's processes that train: those that its fork server started."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(path.name)] = int((path / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except (OSError, IndexError):
            continue
    return sorted(pid for pid, parent in parents.items() if parents.get(parent) == launcher)


def test_it_trains_and_writes_what_it_says(folder: Folder) -> None:
    """Under a plan whose Program a method rewrote with prices: Mario's checkpointed forwards, then recomputes."""
    file = load_plan(folder.path / "plan.toml")
    assert isinstance(file, PlanFile)
    schedule = replace(file.plan.schedule, passes=(Pass(name="mario"),))
    save_plan_file(replace(file, plan=replace(file.plan, schedule=schedule)), folder.path / "plan.toml")
    more = ("--steps", "30", "--lr", "1e-2", "--timeline", "measured.timeline", "--resume")
    status, out, err = folder.run(*TRAIN, *more)
    assert status == 0, err
    assert "\n  - no checkpoint in plan.checkpoints to go on from: starting at the beginning\n" in out
    assert out.startswith("llama-mini on 2xcpu-process: pp=2; ZeRO 0; one_f_one_b + mario,")
    assert "\npredicted: " in out
    assert "the first 3 are warm-up" in out
    assert "\nwrote measured.timeline" in out
    assert err.startswith("step  1/30  loss 5.5")
    assert err.rstrip().split("\n")[-1].startswith("  loss on held-out text ")
    before, after = out.split("\nloss ")[1].split(",")[0].split(" -> ")
    assert float(after) < 0.8 * float(before)
    measured = parse_timeline((folder.path / "measured.timeline").read_text())
    assert measured.clock == "measured"
    assert [worker.name for worker in measured.workers] == ["class 0", "class 1"]
    assert {"C", "R"} <= {measured.kinds[kind] for kind in measured.spans.kind.tolist()}
    assert not (folder.path / "plan.checkpoints").exists()


def test_stages_with_other_numbers_of_replicas_run(folder: Folder, command: Command) -> None:
    """Two replicas of the first stage, one of the second, as `gnomon plan --uneven-replicas` writes them."""
    stages = (
        Stage(calls=("embed", "layers[0:1]"), mesh=Mesh(dp_shard=2), devices="0,2"),
        Stage(calls=("layers[1:2]", "head"), devices="1"),
    )
    warm_up = Pass(name="dapple_warmup", params=(("policy", "2p"),))
    plan = Plan(stages=stages, schedule=Schedule(num_microbatches=2, passes=(warm_up,)), precision=FP32)
    file = PlanFile(
        model="llama-mini",
        on="3xcpu-process",
        stack="gnomon",
        workload=Workload(global_batch_size=4, seq_len=32),
        plan=plan,
    )
    save_plan_file(file, folder.path / "plan.toml")
    status, out, err = command(*TRAIN, "--steps", "12", "--lr", "1e-2")
    assert status == 0, err
    assert out.startswith("llama-mini on 3xcpu-process: 2 stages, 3 ranks;")
    before, after = out.split("\nloss ")[1].split(",")[0].split(" -> ")
    assert float(after) < float(before)


def stopped(folder: Folder, number: signal.Signals, *, group: bool) -> int:
    """Step after which a run that was sent the signal left its checkpoint, as it said."""
    process = folder.start(*TRAIN, "--steps", FOREVER)
    target = -process.pid if group else process.pid
    status, err = folder.end(process, lambda: "step " in folder.errors, lambda: os.kill(target, number))
    assert status == 128 + number, err
    message = err.rstrip().split("\n")[-1]
    assert message.startswith(f"stopped by {number.name} after step ")
    assert message.endswith(" --resume")
    assert "Traceback" not in err
    (kept,) = (folder.path / "plan.checkpoints").iterdir()
    done = int(kept.name.removeprefix("step-"))
    assert f"after step {done}; checkpoint in plan.checkpoints/{kept.name}" in message
    return done


def test_control_c_reaches_every_process_and_ends_the_run_with_a_checkpoint(folder: Folder) -> None:
    assert stopped(folder, signal.SIGINT, group=True) >= 1


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc")
def test_a_signal_before_the_processes_can_act_on_it_waits_for_them(folder: Folder) -> None:
    """They are loading torch when it comes: no traceback of theirs, one step, a checkpoint."""
    process = folder.start(*TRAIN, "--steps", FOREVER)
    group = -process.pid
    status, err = folder.end(process, lambda: len(members(process.pid)) == 2, lambda: os.kill(group, signal.SIGINT))
    assert status == 130
    assert "Traceback" not in err
    assert "stopped by SIGINT after step 1; checkpoint in plan.checkpoints/step-000001" in err


def test_sigterm_leaves_a_checkpoint_and_resume_goes_on_to_the_same_losses(folder: Folder, command: Command) -> None:
    done = stopped(folder, signal.SIGTERM, group=False)
    last = str(done + 3)
    status, out, err = command(*TRAIN, "--steps", last, "--resume", "--json")
    assert status == 0, err
    resumed = losses(out)
    assert list(resumed) == [done + 1, done + 2, done + 3]
    whole = losses(command(*TRAIN, "--steps", last, "--checkpoints", "other", "--json")[1])
    assert {step: whole[step] for step in resumed} == resumed


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc")
def test_a_rank_that_is_killed_is_one_clear_error_and_the_checkpoint_before_is_whole(
    folder: Folder, command: Command
) -> None:
    words = (*TRAIN, "--checkpoints", "kept", "--checkpoint-every", "2")
    process = folder.start(*words, "--steps", FOREVER)
    kept = folder.path / "kept"
    ended, err = folder.end(
        process,
        lambda: any(kept.glob("step-*")) if kept.exists() else False,
        lambda: os.kill(members(process.pid)[-1], signal.SIGKILL),
    )
    assert ended == 2
    errors = [line for line in err.split("\n") if line.startswith("gnomon: ")]
    assert len(errors) == 1
    assert "killed" in errors[0]
    assert "is whole: gnomon run plan.toml" in errors[0]
    assert "Traceback" not in err
    done = max(int(path.name.removeprefix("step-")) for path in kept.glob("step-*"))
    result, out, err = command(*words, "--steps", str(done + 2), "--resume", "--json")
    assert result == 0, err
    assert list(losses(out)) == [done + 1, done + 2]


FULL_DISK = ("bash", "-c", 'ulimit -f 16; exec "$@"', "-", *GNOMON)
"""No file of the command can be over 16 KiB, as if the disk were full."""


def test_a_checkpoint_that_cannot_be_written_is_one_clear_error(folder: Folder) -> None:
    (folder.path / "little").mkdir()
    for i in range(30):
        (folder.path / "little" / f"{i}.txt").write_text(f"some text, line {i}; " * 16)
    small = ("run", "plan.toml", "--data", "little")
    status, out, err = folder.run(*small, "--steps", "4", "--checkpoints", "saved", prefix=FULL_DISK)
    assert status == 2, (out, err)
    message = err.rstrip().split("\n")[-1]
    assert message.startswith("gnomon: cannot write a checkpoint to 'saved': ")
    assert "File too large" in message and "there is no earlier one" in message and "lost" not in message
    assert not list((folder.path / "saved").glob("*step*"))


def test_a_checkpoint_that_one_rank_alone_cannot_write_does_not_hang(folder: Folder, command: Command) -> None:
    """A file lies where rank 0 makes a folder; the one before stays."""
    every = (*TRAIN, "--checkpoints", "saved", "--checkpoint-every", "2")
    (folder.path / "saved").mkdir()
    (folder.path / "saved" / ".step-000004.partial").write_text("in the way")
    status, _, err = command(*every, "--steps", "4")
    assert status == 2, err
    message = err.rstrip().split("\n")[-1]
    assert "cannot write a checkpoint to 'saved': File exists (rank 0)" in message
    assert "saved/step-000002 is whole: go on from it with --resume" in message


@pytest.mark.parametrize("place", ["plan.toml", "plan.toml/inside", "/proc/nowhere"])
def test_a_folder_that_cannot_hold_checkpoints_is_refused_before_training(command: Command, place: str) -> None:
    status, out, err = command(*TRAIN, "--steps", "2", "--checkpoints", place)
    assert (status, out) == (2, "")
    assert err.startswith(f"gnomon: cannot write checkpoints to {place!r}: ")


KILLED_IN_STEP_3 = """import os, signal, sys
from gnomon.cli import main
from gnomon.runtime import Executor

step, steps = Executor.step, []
def dies(*args, **more):
    steps.append(1)
    if len(steps) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(*args, **more)
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    Executor.step = dies
sys.exit(main())
"""


def test_the_users_own_torchrun_starts_again_after_a_kill(folder: Folder) -> None:
    """The processes of the second start meet anew, and nobody calls the lost peer a mistake of Gnomon."""
    script = folder.path / "job.py"
    script.write_text(KILLED_IN_STEP_3)
    asked = ("--nproc-per-node", "2", "--max-restarts", "1", "--standalone", str(script))
    kept = ("--checkpoints", "saved", "--checkpoint-every", "1", "--resume")
    torchrun = (sys.executable, "-m", "torch.distributed.run", *asked)
    status, out, err = folder.run(*TRAIN, "--steps", "4", "--json", *kept, prefix=torchrun)
    assert status == 0, err
    assert list(losses(out))[-1] == 4
    assert "mistake in Gnomon" not in err


def test_a_folder_without_text_is_the_users_mistake(folder: Folder, command: Command) -> None:
    (folder.path / "empty").mkdir()
    status, _, err = command("run", "plan.toml", "--data", "empty")
    assert status == 2
    assert [line for line in err.split("\n") if line] == [
        "gnomon: empty: no text in it; files that count end in .py, .txt, .md, .rst, .c, .h, .json, .toml, "
        ".html, .tex, .jsonl, .ndjson, .jsonl.gz, .ndjson.gz or .parquet"
    ]


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="there are GPUs to run it on")
def test_gpus_that_are_not_there_are_said(command: Command) -> None:
    status, _, errors = command(*TRAIN, "--device", "cuda")
    assert status == 2
    assert "needs 2 GPUs on this machine, where torch sees" in errors


def test_a_plan_for_gpus_runs_on_processors_if_that_is_asked(folder: Folder, command: Command) -> None:
    plan = folder.path / "plan.toml"
    plan.write_text(plan.read_text().replace('on = "2xcpu-process"', 'on = "2xh100-sxm"'))
    status, out, errors = command(*TRAIN, "--steps", "2", "--device", "cpu")
    assert status == 0, errors
    assert "the prediction is for 2xh100-sxm, and this runs on cpu" in " ".join(out.split())
