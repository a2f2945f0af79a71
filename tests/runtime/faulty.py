"""What processes of a job do that are killed, stopped, or look at their sockets."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
from torch._C._distributed_c10d import Store

from gnomon.runtime import Executor, Outcome, TrainingJob, train
from gnomon.runtime.processes.local import Processes
from gnomon.runtime.step.rows import RankRow


def dies_in_start_up(store: Store, rank: int, world_size: int) -> int:
    """Rank 1 is killed before it has met anybody, and rank 0 waits for it."""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return len(store.get("never set"))


def ends_when_asked(store: Store, rank: int, world_size: int) -> int:
    """The signal that it was sent while it blocks them, as a rank does that loads; 0 for none."""
    told = signal.sigtimedwait({signal.SIGTERM}, 60)
    return told.si_signo if told else 0


def waits(store: Store, rank: int, world_size: int, folder: Path) -> None:
    """Says who it is, and waits as a rank does that has nobody to meet."""
    (folder / f"{rank}.part").write_text(str(os.getpid()))
    (folder / f"{rank}.part").rename(folder / f"{rank}.pid")
    store.get("never set")


def launches(store: Store, rank: int, world_size: int, folder: Path) -> None:
    """Starts two that wait, and is itself killed then."""
    if os.fork() == 0:
        while len(list(folder.glob("*.pid"))) < 2:
            time.sleep(0.02)
        os.kill(os.getppid(), signal.SIGKILL)
        os._exit(0)
    Processes(waits, 2, (folder,), start_method="fork").results()


def listening() -> list[str]:
    """Addresses on which this process and the one that started it listen, in hexadecimal, as Linux tells them."""
    mine = set()
    for process in (os.getpid(), int(os.environ["STARTER"])):
        for file in Path(f"/proc/{process}/fd").iterdir():
            try:
                mine.add(os.readlink(file))
            except OSError:
                continue
    addresses = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
                addresses.append(fields[1].partition(":")[0])
    return addresses


FAULT = "GNOMON_TEST_FAULT"
"""Variable: `memory` or `nan`, what befalls rank 1 in its seventh step."""


def trains(job: TrainingJob) -> Outcome:
    """`train`, with a fault in one rank."""
    do, steps = Executor._do, [0]

    def done(self: Executor, row: RankRow) -> None:
        steps[0] += row is self.rows[0]
        if steps[0] == 7 and row is self.rows[1]:
            if os.environ[FAULT] == "memory":
                torch.empty(1 << 50)
            for stage in self.stages.values():
                stage.own_parameters[0].shard.fill_(float("nan"))
        do(self, row)

    if os.environ["RANK"] == "1":
        Executor._do = done  # type: ignore[method-assign]
    return train(job)
