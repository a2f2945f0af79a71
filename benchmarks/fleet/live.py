"""Real jobs under the live controller, which is killed again and again: `python benchmarks/fleet/live.py`.

Each policy drives the same jobs of `gnomon run` (a tiny Llama on Python's own sources, one process or two, some of them
elastic) on two devices of this machine. The controller is killed with kill -9 at moments drawn by the seed and started
again at once, until all jobs are done. From the journal, the checkpoints and the logs it is checked that every job came
to its last step once, that no two processes of a job lived at a time, and that no device had two jobs. Writes
results/fleet_live.md. Left out: speed, which other work on the machine decides.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from platform import python_version
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "fleet_live.md"
DEVICES = 2
_STEP = re.compile(r"^step +(\d+)/", re.MULTILINE)
PLAN = """schema = "gnomon.planfile/1"
model = "llama-tiny"
on = "{processes}xcpu-process"
[workload]
global_batch_size = 4
seq_len = 64
[plan]
mesh = {{dp_shard = {processes}}}
schedule = {{num_microbatches = 1}}
precision = {{param = "fp32", compute = "fp32", grad = "fp32", reduce = "fp32", master = "none", states = "fp32"}}
"""
JOBS = (
    ("wide", 2, 2, 2, 150, 0), ("elastic", 1, 1, 2, 250, 0), ("short", 1, 1, 1, 40, 20), ("late", 1, 1, 2, 100, 40),
    ("last", 2, 1, 2, 60, 60),
)  # fmt: skip
"""(name, devices, fewest, most, steps, submitted after seconds)."""


def write(folder: Path) -> Path:
    """The plans and the table."""
    lines = ["job_id,plan,steps,num_gpus,min_gpus,max_gpus,submit_s,options"]
    for processes in (1, 2):
        (folder / f"plan{processes}.toml").write_text(PLAN.format(processes=processes))
    for seed, (name, devices, fewest, most, steps, after) in enumerate(JOBS):
        plan = folder / f"plan{devices}.toml"
        lines.append(f"{name},{plan},{steps},{devices},{fewest},{most},{after},--seed {seed}")
    table = folder / "jobs.csv"
    table.write_text("\n".join(lines) + "\n")
    return table


def drive(table: Path, policy: str, chance: random.Random) -> int:
    """Run the controller to the end, killing it on the way; how often it was killed."""
    command = [sys.executable, "-m", "gnomon", "fleet", "run", str(table), "--devices", str(DEVICES)]
    command += ["--policy", policy, "--every", "15"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    killed = 0
    while True:
        with (table.parent / "controller.log").open("a") as log:
            controller = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            try:
                status = controller.wait(timeout=chance.uniform(3, 40))
            except subprocess.TimeoutExpired:
                controller.send_signal(signal.SIGKILL)
                controller.wait()
                killed += 1
                continue
        if status:
            raise SystemExit(f"the controller under {policy} ended with {status}: see {table.parent}")
        return killed


def checked(folder: Path, events: Sequence[Mapping[str, Any]]) -> tuple[Counter[str], list[str]]:
    """(how often each thing happened, what is wrong)."""
    wrong: list[str] = []
    held: dict[str, set[int]] = {}
    counts = Counter(event["event"] for event in events)
    for event in events:
        name = event["job"]
        if event["event"] == "starting":
            devices = set(event["devices"])
            if name in held or any(devices & other for other in held.values()):
                wrong.append(f"{name} starts on {sorted(devices)} while {held}")
            held[name] = devices
        elif event["event"] in ("done", "failed", "lost", "preempted", "resized"):
            held.pop(name, None)
    for name, _, _, _, steps, _ in JOBS:
        log = (folder / f"{name}.log").read_text()
        parts = [list(map(int, _STEP.findall(part))) for part in log.split(f"training {steps} steps on")[1:]]
        parts = [part for part in parts if part]  # without those that were stopped before a step
        counts["resumed"] += len(parts) - 1
        done = [step for part in parts for step in part]
        if done[-1] != steps:
            wrong.append(f"{name} ends at step {done[-1]} of {steps}")
        wrong += [f"{name} does step {after} after {before}" for before, after in pairwise(done) if after < before]
        counts["done again"] += sum(max(one[-1] + 1 - next_one[0], 0) for one, next_one in pairwise(parts))
    if counts["done"] != len(JOBS):
        wrong.append(f"{counts['done']} jobs are done")
    return counts, wrong


def main() -> int:
    """Drive all policies, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", default="srtf,sia")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    lines = [
        "# Real jobs under the live controller, killed again and again",
        "",
        f"`python benchmarks/fleet/live.py --policies {options.policies} --seed {options.seed}`, "
        f"{datetime.now(UTC):%Y-%m-%d}, Python {python_version()}: {len(JOBS)} jobs "
        f"of `gnomon run` on {DEVICES} devices (processes of a CPU). failed: "
        "attempts that ended with an error; wrong: jobs lost or run twice, devices given twice.",
        "",
        "| policy | jobs done | controller killed | started | preempted | resized | resumed | failed | wrong |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    problems: list[str] = []
    for policy in options.policies.split(","):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            table = write(folder)
            began = time.monotonic()
            killed = drive(table, policy, chance)
            journal = folder / "jobs.csv.fleet"
            events = [json.loads(line) for line in (journal / "journal.jsonl").read_text().splitlines()]
            counts, wrong = checked(journal, events)
            problems += [f"{policy}: {text}" for text in wrong]
            kinds = ("starting", "preempted", "resized", "resumed")
            lines.append(
                f"| {policy} | {counts['done']} of {len(JOBS)} | {killed} times | "
                f"{' | '.join(str(counts[kind]) for kind in kinds)} | {counts['failed'] + counts['lost']} | "
                f"{len(wrong)} |"
            )
            print(f"{lines[-1]} ({time.monotonic() - began:.0f} s)", *wrong, sep="\n", flush=True)
    options.output.write_text("\n".join(lines) + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
