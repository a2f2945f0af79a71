"""The fault matrix: each fault done once to a run of this machine, with how soon it is told, what is said and what is
lost.

    python benchmarks/faults/matrix.py                # results/fault_matrix.md
    python benchmarks/faults/matrix.py --only stop    # one

Two processes train a small llama, with a checkpoint every two steps; the fault comes at a row of step 6 where nothing
else is said. "told in" is from the fault until the first line about it. A run that ends is resumed as its message says.
"lost" are steps done twice. Equal: every loss, and every tensor of the last checkpoint, is that of a run without the
fault, bit by bit. A full and a read-only disk are a tmpfs in a mount namespace of its own (`unshare`, as root).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from multiprocessing import active_children
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from kills import CONFIG, FP32, tensors

from gnomon.errors import GnomonError
from gnomon.models.llama import llama
from gnomon.plans import Mesh, Pass, Plan, Schedule, Workload
from gnomon.runtime import Executor, Outcome, Source, TrainingJob
from gnomon.runtime.checkpoint.record import newest
from gnomon.runtime.launch.launcher import run_scheme
from gnomon.runtime.launch.run import scheme_of
from gnomon.runtime.launch.survivors import SURVIVORS
from gnomon.runtime.launch.takeover import TAKEOVER

running: Any = import_module("gnomon.runtime.launch.run")
training: Any = import_module("gnomon.runtime.launch.train")
saving: Any = import_module("gnomon.runtime.checkpoint.save")
survivors: Any = import_module("gnomon.runtime.launch.survivors")
takeover: Any = import_module("gnomon.runtime.launch.takeover")
redundancy: Any = import_module("gnomon.runtime.launch.redundancy")

STEPS, EVERY, AT = 12, 2, 6
WORKER_STEPS = 60
"""Of logical workers, whose process is killed from outside."""
PROGRESS = re.compile(r"\s*(step +\d+/|loss on held-out|$)")
"""Lines that say how a run goes."""
FAULT, MARK, LAUNCHER = (f"GNOMON_MATRIX_{name}" for name in ("FAULT", "MARK", "LAUNCHER"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A line of the matrix."""

    what: str
    where: str
    plan: str = "dp"
    more: str = ""
    """Of the command."""
    disk: str = ""
    """Size of the disk that checkpoints lie on, where it is one of its own."""
    resumes: bool = True
    """Whether a run that ends is resumed."""


FAULTS = {
    "none": Fault(what="none", where=""),
    "kill": Fault(what="a rank is killed (-9)", where="at a row", more="--max-restarts 1"),
    "start": Fault(what="a rank is killed (-9)", where="while it starts", more="--max-restarts 1"),
    "saving": Fault(what="a rank is killed (-9)", where="writing a checkpoint", more="--max-restarts 1"),
    "memory": Fault(what="a rank is killed (-9)", where="at a row", plan="memory", more="--memory-checkpoint-every 1"),
    "bamboo": Fault(what="a rank is killed (-9)", where="at a row", plan="bamboo", more="copies of stages"),
    "workers": Fault(what="a process is killed (-9)", where="anywhere", plan="workers", more="--processes 2"),
    "stop": Fault(what="a rank is stopped (SIGSTOP)", where="at a row"),
    "memory_out": Fault(what="no memory in one rank", where="at a row"),
    "nan": Fault(what="a parameter is no number", where="at a row"),
    "full": Fault(what="the disk is full", where="before a checkpoint", disk="8m"),
    "read_only": Fault(what="the disk is read-only", where="before a checkpoint", disk="8m"),
    "damaged": Fault(what="64 bytes of the newest checkpoint are flipped", where="after a run"),
    "data": Fault(what="a line of the data is cut off", where="before training", resumes=False),
    "term": Fault(what="SIGTERM", where="at a row"),
    "interrupt": Fault(what="^C", where="at a row"),
    "interrupt_start": Fault(what="^C", where="while processes start"),
    "launcher": Fault(what="the launcher is killed (-9)", where="at a row"),
}


def act(fault: str) -> None:
    """The fault, in the process that it comes to."""
    Path(os.environ[MARK]).write_text(str(time.time()))
    saved = Path(os.environ[MARK]).parent / "saved"
    if fault in ("kill", "start", "saving", "memory", "bamboo"):
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "memory_out":
        torch.empty(1 << 50)
    elif fault == "full":
        descriptor = os.open(saved / "others", os.O_WRONLY | os.O_CREAT)
        with contextlib.suppress(OSError):
            while os.write(descriptor, bytes(1 << 12)):
                pass
        os.close(descriptor)
    elif fault == "read_only":
        subprocess.run(["mount", "-o", "remount,ro", str(saved)], check=True)
    elif fault in ("term", "interrupt", "launcher"):
        number = {"term": signal.SIGTERM, "interrupt": signal.SIGINT, "launcher": signal.SIGKILL}[fault]
        os.kill(int(os.environ[LAUNCHER]), number)


def armed(executor: type, first: Callable[[Any, Any], bool]) -> None:
    """Does the fault at a row in the middle of step AT. first: whether a row begins a step."""
    do, steps, rows = executor._do, [0], [0]  # type: ignore[attr-defined]

    def done(self: Any, one: Any) -> Any:
        if first(self, one):
            steps[0], rows[0] = steps[0] + 1, 0
        rows[0] += 1
        if steps[0] == AT and rows[0] == 4 and not Path(os.environ[MARK]).exists():
            if os.environ[FAULT] == "nan":
                for stage in self.stages.values():
                    stage.own_parameters[0].shard.fill_(float("nan"))
            act(os.environ[FAULT])
        return do(self, one)

    executor._do = done  # type: ignore[attr-defined]


def _arm() -> None:
    fault = os.environ.get(FAULT, "none")
    if fault in ("none", "workers", "interrupt_start") or Path(os.environ[MARK]).exists():
        return
    if int(os.environ["RANK"]) != (0 if fault in ("full", "read_only") else 1):
        return
    if fault == "start":
        act(fault)
    if fault == "saving":
        write = saving.write_file

        def cut_off(path: Path, values: object) -> object:
            if path.parent.name == f".step-{AT:06}.partial":
                path.write_bytes(bytes(99))
                act(fault)
            return write(path, values)

        saving.write_file = cut_off
    elif fault == "bamboo":
        row_of = redundancy.Work.row

        def row(self: Any, one: Any) -> None:
            if self.now.number == AT and one is self.rows[4]:
                act(fault)
            row_of(self, one)

        redundancy.Work.row = row
    elif fault not in ("damaged", "data"):
        armed(Executor, lambda self, row: row is self.rows[0])


def train(job: TrainingJob) -> Any:
    _arm()
    return training.train(job)


def train_surviving(job: TrainingJob, membership: Any) -> Any:
    _arm()
    return survivors.train_surviving(job, membership)


def train_with_copies(job: TrainingJob, membership: Any) -> Any:
    _arm()
    return takeover.train_with_copies(job, membership)


def job_of(folder: Path, fault: str, *, resume: bool) -> TrainingJob:
    kind = FAULTS[fault].plan
    order = Schedule(num_microbatches=1)
    mesh = Mesh(dp_replicate=2)
    if kind == "bamboo":
        order = Schedule(name="one_f_one_b", num_microbatches=4, passes=(Pass(name="bamboo"),))
        mesh = Mesh(pp=2)
    if kind == "memory":
        mesh = Mesh(dp_shard=2)
    plan = Plan(mesh=mesh, schedule=order, precision=FP32)
    text = folder / "text.jsonl"
    again = fault in ("kill", "start", "saving", "memory", "bamboo", "workers")
    return TrainingJob(
        graph=llama(CONFIG), plan=plan, workload=Workload(global_batch_size=8, seq_len=32),
        steps=WORKER_STEPS if kind == "workers" else STEPS, data=Source(path=text, cache=folder / "tokens"),
        checkpoints=folder / "saved", checkpoint_every=EVERY, max_restarts=int(again), resume=resume,
        memory_checkpoint_every=int(kind == "memory"), resume_with="the same with --resume",
    )  # fmt: skip


def child(folder: Path, fault: str, *, resume: bool) -> int:
    """Runs the job; leaves losses in a file."""
    os.environ[LAUNCHER] = str(os.getpid())
    job = job_of(folder, fault, resume=resume)
    if fault == "workers" and not resume:
        threading.Thread(target=_kill_a_process, args=(folder,), daemon=True).start()
    try:
        if FAULTS[fault].plan == "workers":
            outcome: Outcome = running.run(replace(job, logical_workers=True))
        elif (scheme := scheme_of(job)) is not None:
            armed = {SURVIVORS: train_surviving, TAKEOVER: train_with_copies}[scheme]
            outcome = run_scheme(job, replace(scheme, train=armed))
        else:
            with patch.object(running, "train", train):
                outcome = running.run(job)
    except GnomonError as error:
        print(f"gnomon: {error}", file=sys.stderr, flush=True)
        return 2
    said = {"losses": {r.step: r.loss for r in outcome.records}, "resumed_from": outcome.resumed_from}
    (folder / "outcome.json").write_text(json.dumps(said | {"notes": outcome.notes}))
    return 128 + outcome.signal if outcome.signal else 0


def _kill_a_process(folder: Path) -> None:
    state = folder / "saved/.job/state.json"
    while not state.exists() or '"going_at": null' in (text := state.read_text()) or "going_at" not in text:
        time.sleep(0.002)
    Path(os.environ[MARK]).write_text(str(time.time()))
    os.kill(next(c.pid for c in active_children() if c.name == "gnomon rank 1" and c.pid), signal.SIGKILL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A run of a child."""

    status: int
    lines: list[tuple[float, str]]
    """(when, what it said)."""
    outcome: dict[str, Any]


def ran(folder: Path, fault: str, *, resume: bool = False, disk: str = "") -> Ran:
    """One run in a process of its own."""
    mark = folder / "mark"
    words = [sys.executable, __file__, "--child", fault, str(folder)] + ["--resume"] * resume
    if disk:
        (folder / "saved").mkdir(exist_ok=True)
        kept = f'mount -t tmpfs -o size={disk} tmpfs "$0" && "$@"; s=$?; cp -r "$0" "$0.kept"; exit $s'
        words = ["unshare", "-m", "bash", "-c", kept, str(folder / "saved"), *words]
    (folder / "outcome.json").unlink(missing_ok=True)
    environment = {**os.environ, FAULT: "none" if resume else fault, MARK: str(mark)}
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment)
    lines: list[tuple[float, str]] = []
    if fault == "interrupt_start" and not resume:
        threading.Thread(target=_interrupt, args=(process, mark), daemon=True).start()
    assert process.stderr is not None
    for line in process.stderr:
        lines.append((time.time(), line.rstrip()))
    outcome = folder / "outcome.json"
    return Ran(status=process.wait(), lines=lines, outcome=json.loads(outcome.read_text()) if outcome.exists() else {})


def _interrupt(process: subprocess.Popen[str], mark: Path) -> None:
    """As soon as the launcher has a process."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while len(children.read_text().split()) < 2:
        time.sleep(0.002)
    mark.write_text(str(time.time()))
    os.kill(process.pid, signal.SIGINT)


def line_of(name: str, place: Path, whole: dict[str, tuple[dict[str, float], dict[str, torch.Tensor]]]) -> str:
    """The fault done, and its line of the table."""
    fault, folder = FAULTS[name], place / name
    kind = fault.plan
    if kind not in whole:
        clean = next(other for other, one in FAULTS.items() if one.plan == kind)
        first = ran(prepared(place / f"{kind}-whole"), clean, resume=True)  # no fault comes to a resumed run
        last = newest(place / f"{kind}-whole/saved")
        assert first.status == 0 and last is not None, first.lines
        whole[kind] = first.outcome["losses"], tensors(last)
    prepared(folder)
    if name == "damaged":
        ran(folder, name)
        damaged(folder)
    if name == "data":
        text = (folder / "text.jsonl").read_text()
        (folder / "text.jsonl").write_text(text[: len(text) // 2 - 20])
        (folder / "mark").write_text(str(time.time()))
    result = ran(folder, name, resume=name == "damaged", disk=fault.disk)
    if fault.disk:
        (folder / "saved").rmdir()
        (folder / "saved.kept").rename(folder / "saved")
        (folder / "saved/others").unlink(missing_ok=True)
    began = float((folder / "mark").read_text())
    said = [(at, line) for at, line in result.lines if at >= began and not PROGRESS.match(line)]
    told = f"{said[0][0] - began:.2f} s" if said else "-"
    message = said[0][1].removeprefix("gnomon: ") if said else "-"
    if "Traceback" in "\n".join(line for _, line in result.lines):
        message += " TRACEBACK"
    losses, done = dict(result.outcome.get("losses", {})), last_step(folder)
    if result.status and fault.resumes:
        again = ran(folder, name, resume=True)
        assert again.status == 0, again.lines
        losses |= again.outcome["losses"]
        lost = str(max(0, AT - 1 - again.outcome["resumed_from"])) if name not in ("interrupt_start",) else "0"
        if name in ("term", "interrupt"):
            lost = str(max(0, done - again.outcome["resumed_from"]))
    else:
        lost = lost_of(name, result, done)
    equal = "-"
    if fault.resumes:
        reference, same = whole[kind]
        last = newest(folder / "saved")
        assert last is not None
        after = tensors(last)
        matches = all(losses[step] == reference[step] for step in losses) and all(
            torch.equal(after[key], same[key]) for key in same
        )
        equal = "yes" if matches and after.keys() == same.keys() else "NO"
    message = re.sub(rf"{re.escape(str(folder))}/?", "", message).replace("|", "/")
    where = (
        f"{fault.where}, `{fault.more}`"
        if fault.more.startswith("--")
        else ", ".join(filter(None, (fault.where, fault.more)))
    )
    return f"| {fault.what} | {where} | {told} | {message} | {lost} | {equal} |"


def last_step(folder: Path) -> int:
    found = newest(folder / "saved") if (folder / "saved").exists() else None
    return 0 if found is None else int(found.name.removeprefix("step-"))


def lost_of(name: str, result: Ran, done: int) -> str:
    """Of a run that went on by itself."""
    if name == "data":
        return "-"
    if name in ("bamboo", "workers"):
        return "0"
    if name == "memory":
        back = max(
            int(step)
            for step in re.findall(r"went back to step ([\d, ]+)", " ".join(result.outcome["notes"]))[0].split(", ")
        )
        return str(AT - 1 - back)
    before = {"kill": AT - 1, "start": 0, "saving": AT, "damaged": STEPS}[name]
    return str(before - result.outcome["resumed_from"])


def damaged(folder: Path) -> None:
    """Flips bytes of the newest checkpoint."""
    last = newest(folder / "saved")
    assert last is not None
    file = max(last.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    for at in range(64):
        data[len(data) // 2 + at] ^= 0xFF
    file.write_bytes(data)
    (folder / "mark").write_text(str(time.time()))


def prepared(folder: Path) -> Path:
    folder.mkdir()
    rows = [json.dumps({"text": f"the loss goes down, line {i % 7} of the text. " * 40}) for i in range(60)]
    (folder / "text.jsonl").write_text("\n".join(rows) + "\n")
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="names with commas between them")
    parser.add_argument("--child", nargs=2)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    if options.child:
        return child(Path(options.child[1]), options.child[0], resume=options.resume)
    chosen = options.only.split(",") if options.only else [name for name in FAULTS if name != "none"]
    print(
        "| fault | where | told in | message | steps lost | final state equal |\n|---|---|---|---|---|---|", flush=True
    )
    whole: dict[str, tuple[dict[str, float], dict[str, torch.Tensor]]] = {}
    with tempfile.TemporaryDirectory() as place:
        lines = []
        for name in chosen:
            try:
                lines.append(line_of(name, Path(place), whole))
            except Exception as error:  # the other faults are done all the same
                lines.append(f"| {FAULTS[name].what} | {FAULTS[name].where} | NOT SHOWN: {error!r} |")
            print(lines[-1], flush=True)
    return 0 if all(line.endswith((" yes |", " - |")) for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
