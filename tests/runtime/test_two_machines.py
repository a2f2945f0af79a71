"""Two machines, as two network namespaces with a link between them: a `torchrun` on each trains one job.

Needs root and `ip` of iproute2; skipped where namespaces are not permitted.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

from runtime.parity import FP32  # noqa: E402

from gnomon.plans import Mesh, Plan, PlanFile, Schedule, Workload, save_plan_file  # noqa: E402

pytestmark = pytest.mark.torch

SOURCE = Path(__file__).parents[2] / "src"
PATIENCE_S = 600.0
CUT_S = 3.0


def ip(*words: str) -> None:
    subprocess.run(("ip", *words), check=True, capture_output=True, text=True)


@dataclass
class Machine:
    """A namespace with one end of the link."""

    name: str
    interface: str
    address: str

    def link(self, state: str) -> None:
        """Puts this end of the link up or down."""
        ip("netns", "exec", self.name, "ip", "link", "set", self.interface, state)


@dataclass
class Machines:
    """Both, and the folder that they share as two machines share a disk."""

    both: tuple[Machine, Machine]
    folder: Path
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, port: int, *words: str) -> None:
        """`torchrun -m gnomon run plan.toml` on each; what rank r prints goes to out-r and err-r."""
        for rank, machine in enumerate(self.both):
            where = ("--nnodes", "2", "--node-rank", str(rank), "--nproc-per-node", "1")
            meet = ("--master-addr", self.both[0].address, "--master-port", str(port))
            with (self.folder / f"out-{rank}").open("w") as out, (self.folder / f"err-{rank}").open("w") as err:
                self.started.append(
                    subprocess.Popen(
                        ("ip", "netns", "exec", machine.name, sys.executable, "-m", "torch.distributed.run", *where,
                         *meet, "-m", "gnomon", "run", "plan.toml", "--data", "text", *words),
                        cwd=self.folder,
                        env={**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1",
                             "GLOO_SOCKET_IFNAME": machine.interface},
                        stdout=out,
                        stderr=err,
                        process_group=0,
                    )
                )  # fmt: skip

    def said(self, rank: int) -> str:
        return (self.folder / f"err-{rank}").read_text()

    def end(self) -> None:
        """Kills what still runs."""
        for process in self.started:
            if process.poll() is None:
                os.killpg(process.pid, 9)
            process.wait()

    def wait_for(self, what: Callable[[], bool]) -> None:
        until = time.monotonic() + PATIENCE_S
        while not what():
            ended = all(process.poll() is not None for process in self.started)
            assert time.monotonic() < until and (not ended or what()), (self.said(0), self.said(1))
            time.sleep(0.05)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    tag = f"{os.getpid() % 100000}"
    both = (Machine(f"gn-a{tag}", f"ga{tag}", "10.213.0.1"), Machine(f"gn-b{tag}", f"gb{tag}", "10.213.0.2"))
    made = Machines(both, tmp_path)
    try:
        for machine in both:
            ip("netns", "add", machine.name)
        ip("link", "add", both[0].interface, "type", "veth", "peer", "name", both[1].interface)
        for machine in both:
            ip("link", "set", machine.interface, "netns", machine.name)
            inside = ("netns", "exec", machine.name, "ip")
            ip(*inside, "addr", "add", f"{machine.address}/24", "dev", machine.interface)
            ip(*inside, "link", "set", "lo", "up")
            machine.link("up")
    except subprocess.CalledProcessError as error:
        for machine in both:
            subprocess.run(("ip", "netns", "del", machine.name), capture_output=True)
        pytest.skip(f"network namespaces are not permitted here: {error.stderr.strip()}")
    (tmp_path / "text").mkdir()
    for i in range(40):
        (tmp_path / "text" / f"{i}.txt").write_text(f"the loss goes down, line {i % 7} of the text. " * 40)
    plan = Plan(mesh=Mesh(pp=2), schedule=Schedule(name="one_f_one_b", num_microbatches=2), precision=FP32)
    work = Workload(global_batch_size=4, seq_len=32)
    save_plan_file(PlanFile(model="llama-mini", on="2xcpu-process", workload=work, plan=plan), tmp_path / "plan.toml")
    yield made
    made.end()
    for machine in both:
        subprocess.run(("ip", "netns", "del", machine.name), capture_output=True)


def test_they_train_together_through_a_short_cut_and_go_on_after_a_long_one(machines: Machines) -> None:
    """A short cut costs its seconds. After a long one each machine says what it lost, and the losses from the newest
    checkpoint on are those of a run on one machine."""
    saved = machines.folder / "saved"
    kept = ("--checkpoints", "saved", "--checkpoint-every", "20", "--json")

    def newest() -> int:
        return max((int(path.name.removeprefix("step-")) for path in saved.glob("step-*")), default=0)

    machines.start(29617, "--steps", "100000", *kept)
    machines.wait_for(lambda: newest() > 0)
    link = machines.both[0].link
    link("down")
    time.sleep(CUT_S)
    link("up")
    before = newest()
    machines.wait_for(lambda: newest() > before)
    assert "gnomon: " not in machines.said(0) + machines.said(1)

    link("down")
    machines.wait_for(lambda: "has not been heard of for 15 s: stopped, or lost; rank 0 waits " in machines.said(0))
    lost = (
        "the job's store on 10.213.0.1 has not answered rank 1 for 30 s: the machine that keeps it is lost, or the link"
    )
    machines.wait_for(lambda: f"gnomon: {lost}" in machines.said(1))
    machines.end()
    link("up")

    last = newest() + 3
    machines.start(29618, "--steps", str(last), "--resume", *kept)
    machines.wait_for(lambda: all(process.poll() is not None for process in machines.started))
    alone = (sys.executable, "-m", "gnomon", "run", "plan.toml", "--data", "text", "--steps", str(last), "--json")
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    whole = subprocess.run(alone, cwd=machines.folder, env=environment, capture_output=True, text=True, check=True)
    resumed = json.loads((machines.folder / "out-0").read_text())["steps"]
    undisturbed = {row["step"]: row["loss"] for row in json.loads(whole.stdout)["steps"]}
    assert resumed[-1]["step"] == last
    assert all(row["loss"] == undisturbed[row["step"]] for row in resumed)
