"""`gnomon fleet submit` and `gnomon fleet run`: a plan for another scheduler, and jobs of this machine under a policy.

`submit(options)` and `run(options)` return the exit status. Leaves out the scripts and the controller (`gnomon.fleet`).
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

from gnomon.cli.terminal import print_json, print_lines
from gnomon.errors import InputError
from gnomon.fleet.live import Controller, read_tasks
from gnomon.fleet.policies import policy
from gnomon.fleet.submit import Submission, check_kueue, check_ray, check_slurm, kueue, ray, slurm
from gnomon.hardware.specs import parse_cluster
from gnomon.plans import load_plan_file
from gnomon.report.tables import Column, table

PROGRAMS = {
    "slurm": ("sbatch",),
    "kueue": ("kubectl", "create", "-f", "-"),
}
"""What a job is sent with: it is given on standard input."""


def submit(options: argparse.Namespace) -> int:
    """Print what would be submitted, or submit it."""
    found = load_plan_file(options.plan)
    cluster = parse_cluster(found.on)
    groups = {(group.node.count, group.node.device.name) for group in cluster.groups}
    if len(groups) > 1:
        raise InputError(f"the plan is for nodes of several kinds ({found.on}); submit takes one kind")
    name = options.name or Path(options.plan).stem.lower().replace("_", "-").replace(".", "-")
    job = Submission(
        name=name,
        plan=options.plan,
        nodes=cluster.num_nodes,
        per_node=cluster.groups[0].node.count,
        steps=options.steps,
        hours=options.hours,
        queue=options.queue or "",
        image=options.image,
    )
    if options.via == "slurm":
        text = slurm(job)
        check_slurm(text, cluster.num_devices)
    elif options.via == "kueue":
        manifest = kueue(job)
        check_kueue(manifest, cluster.num_devices)
        text = json.dumps(manifest, indent=2)
    else:
        request = ray(job)
        check_ray(request, cluster.num_devices)
        text = json.dumps(request, indent=2)
    if options.dry_run:
        print(text)
        return 0
    return _send(options.via, text)


def _send(via: str, text: str) -> int:
    command = PROGRAMS.get(via)
    if command is None:
        raise InputError("a Ray job is sent by `ray job submit`; print it with --dry-run")
    if shutil.which(command[0]) is None:
        raise InputError(f"{command[0]} is not on this machine; --dry-run prints what it would be given")
    done = subprocess.run(command, input=text, text=True, capture_output=True, check=False)
    if done.returncode:
        raise InputError(f"{' '.join(command)} refused the job: {done.stderr.strip()}")
    print(done.stdout.strip())
    return 0


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
