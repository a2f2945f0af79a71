"""Logical workers that share a process: predicted against measured (EasyScale), on this machine.

    OMP_NUM_THREADS=1 python benchmarks/faults/turns.py      # prints the table of results/turns.md

Calibrates the machine into a folder of its own, then runs llama-tiny as four workers (`gnomon run --processes N`)
on one process and on two; each run predicts itself. Medians of the steps after three of warm-up; "on cores" leaves out
the share of the steps in which the system gave the cores to others.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from gnomon.models.presets import graph_of
from gnomon.plans import Mesh, Plan, PlanFile, Precision, Schedule, Workload, save_plan_file

STEPS, WARM_UP = 13, 3
FP32 = Precision(param="fp32", compute="fp32", grad="fp32", reduce="fp32", master="none", states="fp32")


def gnomon(*words: str, home: str) -> str:
    """What a command prints."""
    environment = {**os.environ, "GNOMON_HOME": home, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", "import sys; from gnomon.cli import main; sys.exit(main())", *words]
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout


def ran(folder: Path, processes: int) -> dict[str, Any]:
    """The record of a run of four workers."""
    path = folder / f"plan-{processes}.toml"
    plan = Plan(mesh=Mesh(dp_replicate=4), schedule=Schedule(micro_batch_size=2), precision=FP32)
    work = Workload(global_batch_size=16, seq_len=256)
    save_plan_file(PlanFile(model="llama-tiny", on=f"local:{processes}", workload=work, plan=plan), path)
    words = ("run", str(path), "--processes", str(processes), "--steps", str(STEPS), "--json")
    record: dict[str, Any] = json.loads(gnomon(*words, home=str(folder)))
    return record


def main() -> None:
    """Prints the table."""
    parameters = graph_of("llama-tiny").num_parameters()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        gnomon("calibrate", "--processes", "2", "--seconds", "12", home=made)
        print(f"llama-tiny, {parameters:,} parameters, four workers of two microbatches of 2 x 256 tokens\n")
        print("| processes | predicted s | measured s | waited for a core | on cores s | over predicted |")
        print("|---|---|---|---|---|---|")
        for processes in (1, 2):
            record = ran(folder, processes)
            measured = median(float(step["step_s"]) for step in record["steps"][WARM_UP:])
            predicted = float(record["predicted"]["step_s"])
            waited = float(record["measured"]["waited_for_a_core"] or 0.0)
            own = measured * (1 - waited)
            cells = (processes, f"{predicted:.3f}", f"{measured:.3f}", f"{waited:.0%}", f"{own:.3f}")
            print(f"| {' | '.join(map(str, cells))} | {own / predicted:.2f} |", flush=True)


if __name__ == "__main__":
    main()
