"""`gnomon launch`, also as `gnomon fleet submit`: a plan file by torchrun, or as a job of Slurm, Kubernetes or Ray.

`run(options)` writes what the scheduler takes, reads it back and checks it, then prints (`--dry-run`) or sends it, and
returns the exit status. Leaves out the scripts themselves (`fleet.submit`).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from gnomon.cli.options.run import LaunchOptions
from gnomon.errors import InputError
from gnomon.fleet.submit import (
    DEFAULT_HOURS,
    DEFAULT_IMAGE,
    Submission,
    check_kubernetes,
    check_ray,
    check_slurm,
    kubernetes,
    ray,
    slurm,
)
from gnomon.hardware.specs import parse_cluster
from gnomon.plans import load_plan_file

PROGRAMS = {
    "slurm": ("sbatch",),
    "kubernetes": ("kubectl", "create", "-f", "-"),
    "kueue": ("kubectl", "create", "-f", "-"),
}
"""What a job is sent with: it is given on standard input."""
TAKES = {
    "name": ("slurm", "kubernetes", "kueue", "ray"),
    "hours": ("slurm", "kubernetes", "kueue"),
    "queue": ("slurm", "kueue"),
    "image": ("kubernetes", "kueue"),
}
"""Option -> what has a use for it."""
RAY_HERE = "http://127.0.0.1:8265"
"""The job API of a Ray that runs on this machine."""


def run(options: LaunchOptions) -> int:
    """Print what would be started or submitted, or do it; InputError for an option that is of no use there."""
    for name, takes in TAKES.items():
        if getattr(options, name) is not None and options.via not in takes:
            raise InputError(f"--{name} means nothing to {options.via}: it is for {', '.join(takes)}; leave it out")
    file = load_plan_file(options.plan)
    cluster = parse_cluster(file.on)
    groups = {(group.node.count, group.node.device.name) for group in cluster.groups}
    if len(groups) > 1:
        raise InputError(f"the plan is for nodes of several kinds ({file.on}); one kind is wanted")
    # Kubernetes takes lower-case letters, digits and hyphens alone.
    name = options.name or Path(options.plan).stem.lower().replace("_", "-").replace(".", "-")
    job = Submission(
        name=name,
        plan=options.plan,
        nodes=cluster.num_nodes,
        per_node=cluster.groups[0].node.count,
        gpus=cluster.groups[0].node.device.kind != "cpu",
        steps=options.steps,
        hours=DEFAULT_HOURS if options.hours is None else options.hours,
        queue=options.queue or "",
        image=options.image or DEFAULT_IMAGE,
    )
    if options.via == "torchrun":
        return _torchrun(job, dry_run=options.dry_run)
    if options.via == "slurm":
        text = slurm(job)
        check_slurm(text, cluster.num_devices, gpus=job.gpus)
    elif options.via in ("kubernetes", "kueue"):
        queued = options.via == "kueue"
        manifest = kubernetes(job, queued=queued)
        check_kubernetes(manifest, cluster.num_devices, queued=queued, gpus=job.gpus)
        text = json.dumps(manifest, indent=2)
    else:
        request = ray(job)
        check_ray(request, cluster.num_devices)
        text = json.dumps(request, indent=2)
    if options.dry_run:
        print(text)
        return 0
    return _send(options.via, text)


def _torchrun(job: Submission, *, dry_run: bool) -> int:
    """Torchrun's own exit status. InputError where this is only one of several nodes."""
    if dry_run:
        print(f"HEAD=localhost; {job.command}" if job.nodes == 1 else f"HEAD=first-node; {job.command}  # on each node")
        return 0
    if job.nodes > 1:
        raise InputError(
            f"the plan has {job.nodes} nodes, and torchrun is started on each of them; --dry-run prints the command"
        )
    words = ["--standalone", f"--nproc-per-node={job.per_node}", "-m", *job.words]
    return subprocess.run([sys.executable, "-m", "torch.distributed.run", *words], check=False).returncode


def _send(via: str, text: str) -> int:
    if via == "ray":
        return _send_ray(text)
    command = PROGRAMS[via]
    if shutil.which(command[0]) is None:
        raise InputError(f"{command[0]} is not on this machine; --dry-run prints what it would be given")
    done = subprocess.run(command, input=text, text=True, capture_output=True, check=False)
    if done.returncode:
        raise InputError(f"{' '.join(command)} refused the job: {done.stderr.strip()}")
    print(done.stdout.strip())
    return 0


def _send_ray(text: str) -> int:
    """Submits a job to the job API of the cluster that RAY_API_SERVER_ADDRESS or RAY_ADDRESS names, as `ray job submit`
    does; of this machine where none does."""
    named = (os.environ.get(name, "") for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"))
    address = next((value for value in named if value.startswith(("http://", "https://"))), RAY_HERE).rstrip("/")
    request = Request(f"{address}/api/jobs/", text.encode(), {"Content-Type": "application/json"}, method="POST")
    try:
        with urlopen(request, timeout=60) as answer:
            sent = json.load(answer)["submission_id"]
    except HTTPError as error:
        why = error.read().decode(errors="replace").strip().splitlines()
        raise InputError(f"Ray at {address} refused the job: {why[-1][:300] if why else error.reason}") from error
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"no job API of Ray answers at {address} ({getattr(error, 'reason', error)}); start it with `ray start "
            f"--head`, or set RAY_ADDRESS=http://HEAD:8265; --dry-run prints what it would be given"
        ) from error
    print(f"sent to {address} as {sent}; `ray job logs {sent} --address {address} --follow` shows it")
    return 0
