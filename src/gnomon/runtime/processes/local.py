"""The processes of one job on this machine: `Processes` starts them, hands signals on, and ends all when one fails.

What a rank returns comes back through a pipe, and the end of a process wakes its starter at once. A rank that fails
leaves its error in the file that torch's launchers name (`TORCHELASTIC_ERROR_FILE`), so a user's `torchrun` reads it
too. The processes end with the one that started them, however that ends. They meet in a store on the loopback
interface; nothing listens on another one. Leaves out what they run (`launch`), and other machines.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection, forkserver, get_context, parent_process, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, time
from types import FrameType
from typing import Any

from torch._C._distributed_c10d import Store, TCPStore

from gnomon import errors
from gnomon.errors import GnomonError, PeerError, RunError

SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""What people and schedulers end a job with."""
GRACE_S = 300.0
"""Between a signal and the end of processes that do not end by themselves: a step and a checkpoint must fit in it."""
FAILED_S = 2.0
"""After one process failed the others have so long to say what they saw; then they are killed."""
LOOK_S = 0.5
"""Between two looks at the time; the end of a process is seen at once."""
LOADED = ("gnomon.runtime.launch.train", "torch.fx.experimental.symbolic_shapes")
"""What a fork server loads before it starts processes: most of what they would load, once for all of them. The second
is what `torch.autograd.backward` loads when it is first given gradients, as every stage's backward is."""
RECOMPUTE_LOADED = ("torch._dynamo",)
"""What `torch.utils.checkpoint` loads besides when it is first called, which takes as long as torch itself."""
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Variable with the file in which a process leaves its error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A process that ended before its time."""

    rank: int
    """The rank."""
    exitcode: int
    """Below 0: the number of the signal that killed it."""
    kind: str = ""
    """Name of the error, empty where it left none."""
    message: str = ""
    """What the error says; empty where it left none."""
    traceback: str = ""
    """Where it was raised; empty where it left none."""
    out_of_memory: bool = False
    """Whether Linux has killed a process of this machine meanwhile, as memory ran out."""
    at: float = 0.0
    """When it said so, or was seen to end; by the wall clock."""

    @property
    def error(self) -> type[GnomonError] | None:
        """The error of ours that it ended with."""
        kind = getattr(errors, self.kind, None)
        return kind if isinstance(kind, type) and issubclass(kind, GnomonError) else None

    def describe(self) -> str:
        """`was killed by SIGKILL`, or what it said."""
        if self.exitcode < 0 and not self.kind:
            why = ", as this machine's memory ran out" if self.out_of_memory else ""
            return f"was killed by {signal.Signals(-self.exitcode).name}{why}"
        if not self.kind:
            return f"ended with status {self.exitcode} and said nothing"
        return (
            self.message.removeprefix(f"rank {self.rank} ")
            if self.error
            else f"failed: {self.kind}: {self.message[:400]}"
        )


class FailedError(RunError):
    """Processes of a job failed, the cause first."""

    def __init__(self, failures: Sequence[Failure], world_size: int) -> None:
        self.failures = sorted(failures, key=_cause_first)
        first = self.failures[0]
        super().__init__(f"rank {first.rank} of {world_size} {first.describe()}")
        for failure in self.failures[:1]:
            if failure.traceback:
                self.add_note(f"in the process of rank {failure.rank}:\n{failure.traceback}")


def _cause_first(failure: Failure) -> tuple[int, float]:
    """Killed by others, then errors as they came; that a peer is gone follows from something else."""
    return (
        (failure.error is PeerError or "onnection" in failure.message, failure.at) if failure.kind else (-1, failure.at)
    )


@dataclass(slots=True)
class _Rank:
    process: BaseProcess
    results: connection.Connection
    error: Path
    seen_s: float = 0.0
    """When its end was seen."""


class Processes:
    """Those of one job; use as `Processes(...).results()`."""

    def __init__(
        self,
        function: Callable[..., Any],
        world_size: int,
        args: Sequence[Any],
        *,
        start_method: str,
        preload: Sequence[str] = (),
        grace_s: float = GRACE_S,
    ) -> None:
        """function(store, rank, world_size, *args) is called in each. It and args must be picklable. start_method: of
        `multiprocessing`. preload: modules besides LOADED that a fork server which starts for this job loads."""
        self.function, self.world_size, self.args = function, world_size, args
        self.context: Any = get_context(start_method)
        self.start_method, self.preload = start_method, preload
        self.ranks: list[_Rank] = []
        self.returned: dict[int, Any] = {}
        self.listened: dict[connection.Connection, int] = {}
        """Lines on which processes speak while they run -> rank."""
        self.stopped, self.grace_s = 0, grace_s
        self.until = float("inf")
        self.oom_kills = oom_kills()
        self.store: Store | None = None
        """Where they meet, while they run."""
        self.place: tuple[Path, int] | None = None
        """Folder of their errors, and port of the store."""

    def results(self) -> dict[int, Any]:
        """Runs all processes and returns what each gave back, by rank. FailedError where one failed; SystemExit with
        128 + the signal where a signal ended them."""
        with TemporaryDirectory(prefix="gnomon-") as folder:
            store, port = meeting_place()
            self.store, self.place = store, (Path(folder), port)
            try:
                with self._signals_handed_on():
                    with _signals_blocked():
                        self._start(Path(folder), port)
                    if self.stopped:  # it came meanwhile, to a thread that does not block it: ranks missed it
                        self._send_signal(self.stopped)
                    failed = self._wait()
            finally:
                self._kill()
            del store
            self.store = None
            if failed:
                raise FailedError([self._failure(rank) for rank in failed], self.world_size)
            if not self._complete():
                raise SystemExit(128 + self.stopped)
            return dict(sorted(self.returned.items()))

    def _complete(self) -> bool:
        """Whether there is a result of all."""
        return len(self.returned) == self.world_size

    def _start(self, folder: Path, port: int) -> None:
        if self.start_method == "forkserver":
            start_fork_server((*self.preload, *LOADED))
        for _ in range(self.world_size):
            self._start_one(folder, port)

    def _start_one(self, folder: Path, port: int) -> None:
        """The process of the next rank."""
        rank = len(self.ranks)
        receives, sends = self.context.Pipe(duplex=False)
        error = folder / f"{rank}.json"
        environment = self._environment(rank, port, error)
        process = self.context.Process(
            target=_begin,
            args=(environment, sends, self.function, port, rank, self.world_size, self._arguments(rank)),
            name=f"gnomon rank {rank}",
        )
        self.ranks.append(_Rank(process, receives, error))
        process.start()
        # The starter's copy of the writing end: with it open the pipe would not end when the process does.
        sends.close()

    def _arguments(self, rank: int) -> Sequence[Any]:
        """What the rank's process is given."""
        return self.args

    def _environment(self, rank: int, port: int, error: Path) -> dict[str, str]:
        """The environment of one process: this one's, and the variables that torchrun would set."""
        # An interface that the user has named goes before ours; places in the job do not come from outside.
        return {"GLOO_SOCKET_IFNAME": loopback(), **os.environ} | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            ERROR_FILE: str(error),
        }

    def _wait(self) -> list[int]:
        """Waits until all have ended; returns the ranks that failed."""
        failed: list[int] = []
        while self._running():
            if now := self._just_failed(LOOK_S):
                failed += now
                self.until = min(self.until, monotonic() + FAILED_S)
            if monotonic() > self.until:
                break
        return failed

    def _running(self) -> list[int]:
        """Ranks whose end was not seen yet."""
        return [i for i, rank in enumerate(self.ranks) if not rank.seen_s]

    def _just_failed(self, patience_s: float) -> list[int]:
        """Waits for an end, a result or a word, at most so long; ranks that ended then without a result."""
        failed, running = [], self._running()
        ends: dict[Any, int] = {self.ranks[i].process.sentinel: i for i in running}
        pipes: dict[Any, int] = {self.ranks[i].results: i for i in running if i not in self.returned}
        ready = connection.wait([*ends, *pipes, *self.listened], patience_s)
        for line in [one for one in self.listened if one in ready]:
            self._heard(line)
        for one in ready:
            if (rank := pipes.get(one)) is not None:
                self._receive(rank)
        for one in ready:
            if (rank := ends.get(one)) is None:
                continue
            self._receive(rank)
            self.ranks[rank].process.join()
            self.ranks[rank].seen_s = time()
            if rank not in self.returned and self.ranks[rank].process.exitcode != 128 + self.stopped:
                failed.append(rank)
        return failed

    def _heard(self, line: connection.Connection) -> None:
        """A process has said something on its line, or has closed it."""

    def _receive(self, rank: int) -> None:
        """What a rank returned, if it has."""
        pipe = self.ranks[rank].results
        try:
            if rank not in self.returned and pipe.poll():
                self.returned[rank] = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):  # it ends without one
            pass

    def _failure(self, rank: int) -> Failure:
        process, seen = self.ranks[rank].process, self.ranks[rank].seen_s
        try:
            error = json.loads(self.ranks[rank].error.read_text())["message"]
        except (OSError, ValueError):
            killed = process.exitcode == -signal.SIGKILL and oom_kills() > self.oom_kills
            return Failure(rank=rank, exitcode=process.exitcode or 0, out_of_memory=killed, at=seen)
        kind, _, message = error["message"].partition(": ")
        extra = error["extraInfo"]
        return Failure(
            rank=rank,
            exitcode=process.exitcode or 0,
            kind=kind,
            message=message,
            traceback=extra["py_callstack"],
            at=float(extra["at"]),
        )

    @contextmanager
    def _signals_handed_on(self) -> Iterator[None]:
        """The first one to all processes, waking those that were stopped; a second one ends them at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def hand_on(number: int, frame: FrameType | None) -> None:
            self.until = 0.0 if self.stopped else monotonic() + self.grace_s
            self.stopped = number
            self._send_signal(number)

        before = {number: signal.signal(number, hand_on) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _send_signal(self, number: int) -> None:
        """A signal to all processes that there are."""
        for rank in self.ranks:
            if rank.process.pid is not None and rank.process.is_alive():
                with suppress(ProcessLookupError):  # it has ended since, and the fork server has reaped it
                    os.kill(rank.process.pid, signal.SIGCONT)
                    os.kill(rank.process.pid, number)

    def _kill(self) -> None:
        for rank in self.ranks:
            if rank.process.pid is not None:
                rank.process.kill()
        for rank in self.ranks:
            if rank.process.pid is not None:
                rank.process.join()
            rank.results.close()


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Processes started meanwhile find signals blocked: one that comes while they load torch waits until they can act.

    A process inherits the mask of the thread that starts it, which is this one; it takes them itself afterwards.
    """
    resource_tracker.ensure_running()  # when it starts, it unblocks these signals in the thread that started it
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_fork_server(modules: Sequence[str]) -> None:
    """If none runs yet. It loads the modules, and finds them where this process does."""
    forkserver.set_forkserver_preload(list(modules))
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def meeting_place() -> tuple[Store, int]:
    """A store that listens on the loopback interface only, as long as it is held, and its port."""
    listens = socket.create_server(("127.0.0.1", 0), backlog=512)
    port = listens.getsockname()[1]
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listens.detach())
    return store, port


def oom_kills() -> int:
    """Processes that Linux has killed on this machine as memory ran out; 0 where it does not say."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


# --- in the processes


def tell_failure(kind: str, message: str, callstack: str = "") -> bool:
    """Leaves this process's error for whoever started it; whether somebody reads it. The first one stays."""
    path = os.environ.get(ERROR_FILE)
    if path is None or Path(path).exists():
        return path is not None
    extra = {"py_callstack": callstack or message, "timestamp": str(int(time())), "at": time()}
    text = json.dumps({"message": {"message": f"{kind}: {message}", "extraInfo": extra}})
    Path(path).write_text(text)
    return True


def _begin(
    environment: Mapping[str, str],
    results: connection.Connection,
    function: Callable[..., Any],
    port: int,
    rank: int,
    world_size: int,
    args: Sequence[Any],
) -> None:
    """One process, from its start to its end."""
    end_with_starter()
    os.environ.clear()  # a fork server's are those of its own start
    os.environ.update(environment)
    try:
        result = function(TCPStore("127.0.0.1", port, is_master=False), rank, world_size, *args)
        results.send_bytes(pickle.dumps(result))  # torch's own way leaves tensors with the sender, which ends
    except Exception as failed:
        tell_failure(type(failed).__name__, str(failed), traceback.format_exc())
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # at once: others wait for it, and groups that are broken are not left


def loopback() -> str:
    """Name of the interface on which nobody else listens."""
    names = [name for _, name in socket.if_nameindex()]
    return "lo0" if "lo0" in names else "lo"


def end_with_starter() -> None:
    """Ends this process when the one that started it ends, also by kill -9, whatever this one is doing. A fork server
    ends with its starter."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, which reaches a stopped process too
    starter: Any = parent_process()

    def watch() -> None:
        connection.wait([starter.sentinel])
        os._exit(128 + signal.SIGKILL)

    threading.Thread(target=watch, name="gnomon starter", daemon=True).start()
