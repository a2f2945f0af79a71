"""`gnomon fleet run`: jobs of this machine under a policy.

`run(options)` returns the exit status. Leaves out the controller (`gnomon.fleet`).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gnomon.cli.terminal import print_json, print_lines
from gnomon.fleet.live import Controller, read_tasks
from gnomon.fleet.policies import policy
from gnomon.report.tables import Column, table


def run(options: argparse.Namespace) -> int:
    """Drive the jobs of a table until all have ended."""
    tasks = read_tasks(options.jobs)
    folder = Path(options.folder or f"{options.jobs}.fleet")

    def told(text: str) -> None:
        print(f"gnomon: {text}", file=sys.stderr, flush=True)

    controller = Controller(
        folder=folder, tasks=tasks, devices=options.devices, policy=policy(options.policy), told=told
    )
    fates = controller.run()
    if options.json:
        print_json(
            [
                {"job": n, "state": f.state, "starts": f.starts, "preemptions": f.preemptions, "failures": f.failures}
                for n, f in fates.items()
            ]
        )
    else:
        columns = (
            Column(name="job", align="left"),
            Column(name="state", align="left"),
            *(Column(name=name) for name in ("started", "preempted", "failed")),
        )
        rows = [(n, f.state, str(f.starts), str(f.preemptions), str(f.failures)) for n, f in fates.items()]
        print_lines([*table(columns, rows), f"journal and logs are in {folder}"])
    return 0 if all(fate.state == "done" for fate in fates.values()) else 2
