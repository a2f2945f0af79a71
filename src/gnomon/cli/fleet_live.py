"""`gnomon fleet run`: jobs of this machine under a policy.

`run(options)` returns the exit status. Leaves out the controller (`gnomon.fleet`).
"""

from __future__ import annotations

import sys
from pathlib import Path

from gnomon.cli.models import read_model_to_run
from gnomon.cli.options.fleet import FleetRunOptions
from gnomon.cli.terminal import print_json, print_lines
from gnomon.fleet.fates import LIVE
from gnomon.fleet.live import Controller
from gnomon.fleet.policies import policy
from gnomon.fleet.tasks import read_tasks
from gnomon.report.tables import Column, table


def run(options: FleetRunOptions) -> int:
    """Drive the jobs of a table until all have ended."""
    tasks = read_tasks(options.jobs, read_model_to_run)
    folder = Path(options.folder or f"{options.jobs}.fleet")

    def log_line(text: str) -> None:
        print(f"gnomon: {text}", file=sys.stderr, flush=True)

    controller = Controller(
        folder=folder,
        tasks=tasks,
        devices=options.devices,
        policy=policy(options.policy),
        every_s=options.every,
        log=log_line,
    )
    try:
        fates = controller.run()
    except KeyboardInterrupt:
        still = [name for name, fate in controller.fates.items() if fate.state in LIVE]
        log_line(f"stopped; {len(still)} jobs go on ({', '.join(still)}): the same command drives them again")
        raise
    counts = [
        (name, fate.state, fate.attempt, fate.preemptions, fate.resizes, fate.failures) for name, fate in fates.items()
    ]
    if options.json:
        print_json([dict(zip(_NAMES, row, strict=True)) for row in counts])
    else:
        columns = [Column(name=name, align="left" if name in _NAMES[:2] else "right") for name in _NAMES]
        rows = [tuple(map(str, row)) for row in counts]
        print_lines([*table(columns, rows), f"journal and logs are in {folder}"])
    return 0 if all(fate.state == "done" for fate in fates.values()) else 2


_NAMES = ("job", "state", "starts", "preemptions", "resizes", "failures")
