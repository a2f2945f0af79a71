"""Useful steps a second while processes are killed, beside what others use: torchrun with checkpoints, and torchft.

    python benchmarks/faults/goodput.py --torchft /path/to/venv/bin/python -o goodput.md
    python benchmarks/faults/goodput.py --torchft /path/to/venv/bin/python --rounds 2 --wall 34    # within 8 minutes

Each side trains the same llama on two processes with the same batch, and loses the same process at the same second:
KILLS seconds after its first step. Useful steps are those behind it WALL seconds after its first step, of which none is
counted twice. `before` is steps a second until the first kill, `share` what is left of it over the whole time. Sides:

- Gnomon, copies in memory: two replicas, `--memory-checkpoint-every 1`; a lost process is replaced;
- Gnomon, from disk: two replicas, a checkpoint every ten steps, all processes start again;
- Gnomon, copies of stages: a pipeline of two (`bamboo`), the other rank takes over;
- torchrun: DistributedDataParallel as people write it, `torch.save` every ten steps, `--standalone --max-restarts`
  (with the static rendezvous of `--master-port` its processes did not meet again here);
- torchft: its Manager and a lighthouse, each replica under a torchrun of its own.

Rounds interleave the sides. Seconds are those of the machine's clock.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

KILLS = ((8.0, 1),)
"""(seconds after the first step, rank)."""
WALL = 48.0
STARTS_S = 100.0
"""In which a side must have done its first step."""
HERE = Path(__file__).resolve().parent
SIDES = ("gnomon-memory", "gnomon-disk", "gnomon-stages", "torchrun", "torchft")
NAMES = {
    "gnomon-memory": "Gnomon, copies in memory",
    "gnomon-disk": "Gnomon, from disk",
    "gnomon-stages": "Gnomon, copies of stages (pp 2)",
    "torchrun": "torchrun --max-restarts, torch.save",
    "torchft": "torchft",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """One run of a side."""

    useful: int
    """Steps behind it at the end."""
    before_s: float
    """Steps a second until the first kill."""
    longest_s: float
    """Longest time without a step that was not behind it yet, after the first kill."""


def steps_of(log: Path) -> list[tuple[int, float]]:
    """(step, when it was over) as ranks wrote them, in order of time."""
    if not log.exists():
        return []
    lines = [line.split() for line in log.read_text().splitlines() if line.startswith("step ")]
    return sorted(((int(line[1]), float(line[2])) for line in lines if len(line) == 3), key=lambda one: one[1])


def pid_of(log: Path, rank: int) -> int | None:
    """The newest process of a rank."""
    lines = [line.split() for line in log.read_text().splitlines() if line.startswith("pid ")]
    found = [int(line[2]) for line in lines if len(line) == 3 and int(line[1]) == rank]
    return found[-1] if found else None


def commands(side: str, folder: Path, log: Path, torchft: str) -> list[list[str]]:
    """What is started, in that order."""
    script = str(HERE / "goodput_side.py")
    if side == "torchrun":
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "100"]
        watched = ["--monitor-interval", "0.1", "--nproc-per-node", "2"]
        return [[*torchrun, *watched, script, side, str(log), str(folder)]]
    if side == "torchft":
        house = str(Path(torchft).parent / "torchft_lighthouse")
        bind = ["--bind", "127.0.0.1:29510", "--min_replicas", "1", "--join_timeout_ms", "1000"]
        made = [[house, *bind, "--quorum_tick_ms", "50", "--heartbeat_timeout_ms", "5000"]]
        for replica in (0, 1):
            run = [torchft, "-m", "torch.distributed.run", "--max-restarts", "100", "--monitor-interval", "0.1"]
            port = ["--nproc-per-node", "1", "--master-port", str(29620 + replica)]
            made.append([*run, *port, script, side, str(log), str(folder), str(replica)])
        return made
    return [[sys.executable, script, side, str(log), str(folder)]]


def one_run(side: str, torchft: str, wall_s: float) -> Ran:
    """A side, killed as all are."""
    with tempfile.TemporaryDirectory() as name:
        folder, log = Path(name), Path(name) / "steps.log"
        source = str(HERE.parents[1] / "src")
        environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        environment |= {"TORCHFT_LIGHTHOUSE": "http://127.0.0.1:29510"}
        said = (folder / "said").open("w")
        started = []
        try:
            for command in commands(side, folder, log, torchft):
                started.append(
                    subprocess.Popen(
                        command, env=environment, stdout=said, stderr=said, stdin=subprocess.DEVNULL,
                        start_new_session=True,
                    )
                )  # fmt: skip
            return _watched(side, folder, log, wall_s)
        finally:
            for process in started:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            _end_left(log)


def _watched(side: str, folder: Path, log: Path, wall_s: float) -> Ran:
    """Kills on time, and counts."""
    until = time.time() + STARTS_S
    while not steps_of(log):
        if time.time() > until:
            raise RuntimeError(f"{side} did no step in {STARTS_S:.0f} s:\n{(folder / 'said').read_text()[-3000:]}")
        time.sleep(0.05)
    first = steps_of(log)[0][1]
    for after, rank in KILLS:
        time.sleep(max(0.0, first + after - time.time()))
        pid = pid_of(log, rank)
        try:
            os.kill(pid or 0, signal.SIGKILL) if pid else None
        except ProcessLookupError:  # it is on its way back from the kill before
            print(f"    {side}: rank {rank} was not there {after:.0f} s after the first step", flush=True)
    time.sleep(max(0.0, first + wall_s - time.time()))
    seen = [(step, at) for step, at in steps_of(log) if at <= first + wall_s]
    early = [step for step, at in seen if at <= first + KILLS[0][0]]
    best, news = 0, [first + KILLS[0][0]]
    for step, at in seen:
        if step > best:
            best = step
            if at > news[0]:
                news.append(at)
    news.append(first + wall_s)
    gaps = [later - earlier for earlier, later in zip(news, news[1:], strict=False)]
    begun = seen[0][0]
    return Ran(useful=best - begun, before_s=(max(early) - begun) / KILLS[0][0], longest_s=max(gaps))


def _end_left(log: Path) -> None:
    """Processes that outlive who started them."""
    for line in log.read_text().splitlines() if log.exists() else ():
        if line.startswith("pid "):
            try:
                os.kill(int(line.split()[2]), signal.SIGKILL)
            except (ProcessLookupError, IndexError, ValueError):
                continue


def table(ran: dict[str, list[Ran]], wall_s: float) -> list[str]:
    """The page's."""
    lines = [
        "| side | steps/s before | useful steps/s under kills | share | longest standstill | useful, over torchrun |",
        "|---|---|---|---|---|---|",
    ]
    base = median(one.useful for one in ran["torchrun"]) if ran.get("torchrun") else float("nan")
    for side, runs in ran.items():
        useful, before = median(one.useful for one in runs) / wall_s, median(one.before_s for one in runs)
        lines.append(
            f"| {NAMES[side]} | {before:.2f} | {useful:.2f} | {useful / before:.2f} "
            f"| {median(one.longest_s for one in runs):.1f} s | {useful * wall_s / base:.2f} |"
        )
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Runs all sides in turn and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--torchft", default="", help="python of an environment with torchft; without it that side is left out"
    )
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--wall", type=float, default=WALL, help="seconds after the first step")
    parser.add_argument("-o", "--out", type=Path)
    options = parser.parse_args(argv)
    sides = [side for side in options.sides.split(",") if side != "torchft" or options.torchft]
    ran: dict[str, list[Ran]] = {side: [] for side in sides}
    for number in range(options.rounds):
        for side in sides if number % 2 == 0 else reversed(sides):
            one = one_run(side, options.torchft, options.wall)
            ran[side].append(one)
            print(
                f"{number} {side:14} {one.useful} useful steps, {one.before_s:.2f} steps/s before, "
                f"{one.longest_s:.1f} s longest",
                flush=True,
            )
    lines = table(ran, options.wall)
    lines.append(f"\nload of this machine: {os.getloadavg()[1]:.1f}")
    print("\n".join(lines))
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
