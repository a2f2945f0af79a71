"""A plan as a job of the scheduler that a cluster has: a Slurm script, a Kubernetes or Kueue job, a Ray job.

`slurm`, `kubernetes` and `ray` return what is to be submitted; `check_slurm` and `check_kubernetes` read it back and
raise for what the scheduler would refuse, or for a number of devices that is not the plan's. What a user wrote gets
into them in two ways: names, a queue and an image are of a few characters, or refused; the plan's path is one quoted
word. Sources: sbatch(1) of Slurm 24.05; Kubernetes API batch/v1, its references `$(NAME)` in commands, and Kueue's
label `kueue.x-k8s.io/queue-name`; Ray's job submission API. Leaves out sending it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from shlex import quote
from typing import Any
from unicodedata import category

from gnomon.errors import InputError

SBATCH = (
    "job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "time", "output", "partition", "account",
    "requeue", "signal", "exclusive",
)  # fmt: skip
"""Options that are written, all of sbatch(1)."""
LONGEST_NAME = 63
"""Characters of a host name and of a label (RFC 1123)."""
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_PARTITION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+@-]*(,[A-Za-z0-9][A-Za-z0-9._+@-]*)*", re.ASCII)
"""One partition of Slurm, or several of which it takes the first that is free."""
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*")
"""Characters of a reference to an image (OCI distribution: registry, repository, tag, digest)."""
LONGEST_TEXT = 1024
"""Characters of a partition's or an image's name."""
LINE_BREAKS = ("Cc", "Cs", "Zl", "Zp")
"""Unicode categories that no word of a script has: control characters, lone surrogates, separators of lines."""


DEFAULT_HOURS, DEFAULT_IMAGE = 24.0, "gnomon:latest"


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A job to be submitted."""

    name: str
    """Letters, digits and hyphens, as Kubernetes wants."""
    plan: str
    """Path of the plan file on the cluster."""
    nodes: int
    """Nodes of the job."""
    per_node: int
    """Devices of a node."""
    gpus: bool = True
    """Whether they are GPUs; otherwise each is a core (`on = "local:4"`, a machine of CPUs)."""
    steps: int = 200
    """Optimizer steps to run."""
    hours: float = DEFAULT_HOURS
    """Limit of time."""
    queue: str = ""
    """Partition of Slurm, or queue of Kueue."""
    image: str = DEFAULT_IMAGE
    """Container, for Kubernetes and Kueue."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise InputError(f"job name {self.name!r} must be of small letters, digits and '-', at most 63")
        if min(self.nodes, self.per_node, self.steps) < 1 or not 0 < self.hours < 24 * 365:
            raise InputError("a job needs at least one node, device and step, and a limit of time under a year")
        if any(category(one) in LINE_BREAKS for one in self.plan):
            raise InputError(
                f"the plan's path {self.plan!r} has characters that no line of a script can hold: rename it"
            )
        if not _IMAGE.fullmatch(self.image) or len(self.image) > LONGEST_TEXT:
            raise InputError(
                f"image {self.image[:80]!r} is no name of a container: letters, digits and . _ / : @ -, as in "
                "registry.example/team/gnomon:1.2"
            )

    @property
    def devices(self) -> int:
        """Devices of all nodes."""
        return self.nodes * self.per_node

    @property
    def command(self) -> str:
        """What each node runs; `gnomon run` takes its rank from torchrun."""
        return f"{self.launcher} {' '.join(quote(word) for word in self.words)}"

    @property
    def launcher(self) -> str:
        """Torchrun and its options, to be followed by `words`."""
        return (
            f"torchrun --nnodes={self.nodes} --nproc-per-node={self.per_node} --rdzv-backend=c10d "
            "--rdzv-endpoint=$HEAD:29500 -m"
        )

    @property
    def words(self) -> tuple[str, ...]:
        """The module that every rank runs, and its arguments."""
        plan = f"./{self.plan}" if self.plan.startswith("-") else self.plan  # no option
        checkpoint_words = ("--checkpoints", f"{plan}.checkpoints", "--resume")
        return ("gnomon", "run", plan, "--steps", str(self.steps), *checkpoint_words)


def slurm(job: Submission) -> str:
    """A script for sbatch. It is told 120 s before its limit, so that a checkpoint is written, and requeued.

    InputError for a queue that is no name of a partition: sbatch reads a line a word.
    """
    if job.queue and (not _PARTITION.fullmatch(job.queue) or len(job.queue) > LONGEST_TEXT):
        raise InputError(
            f"queue {job.queue[:80]!r} is no partition of Slurm: letters, digits and . _ + @ -, several with commas"
        )
    hours, minutes = divmod(round(job.hours * 60), 60)
    lines = [
        f"--job-name={job.name}",
        f"--nodes={job.nodes}",
        # One task a node: torchrun starts the ranks of its node itself.
        "--ntasks-per-node=1",
        f"--gpus-per-node={job.per_node}" if job.gpus else f"--cpus-per-task={job.per_node}",
        f"--time={hours}:{minutes:02}:00",
        f"--output={job.name}-%j.out",
        "--requeue",
        "--signal=TERM@120",
        *([f"--partition={job.queue}"] if job.queue else []),
    ]
    head = "\n".join(f"#SBATCH {line}" for line in lines)
    return f"""\
#!/bin/bash
{head}
set -euo pipefail
export HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun {job.command}
"""


def check_slurm(script: str, devices: int, *, gpus: bool = True) -> None:
    """InputError for an option that sbatch does not know, a value it cannot read, or other than so many devices: GPUs,
    or cores of the one task of each node."""
    if not script.startswith("#!"):
        raise InputError("sbatch wants a script whose first line begins with #!")
    options: dict[str, str] = {}
    for number, line in enumerate(script.splitlines(), start=1):
        if not line.startswith("#SBATCH"):
            continue
        match = re.fullmatch(r"#SBATCH --([a-z-]+)(?:=(\S+))?", line)
        if match is None or match[1] not in SBATCH:
            raise InputError(f"line {number}: sbatch has no option {line.removeprefix('#SBATCH ')!r}")
        options[match[1]] = match[2] or ""
    each, other = ("gpus-per-node", "cpus-per-task")[:: 1 if gpus else -1]
    if other in options:
        raise InputError(f"--{other} is asked for, and the plan's devices are {'GPUs' if gpus else 'cores'}")
    for name in ("nodes", each, "ntasks-per-node"):
        if not options.get(name, "").isdecimal():
            raise InputError(f"--{name} must be a whole number, not {options.get(name, 'missing')!r}")
    if not re.fullmatch(r"([0-9]+-)?[0-9]+:[0-5][0-9]:[0-5][0-9]", options.get("time", "")):
        raise InputError(f"--time must be [days-]hours:minutes:seconds, not {options.get('time', 'missing')!r}")
    total = int(options["nodes"]) * int(options[each])
    if total != devices:
        raise InputError(f"the script asks for {total} devices, the plan has {devices}")


def kubernetes(job: Submission, *, queued: bool) -> dict[str, Any]:
    """A List for `kubectl create`: an indexed Job of a pod a node, and for several nodes the headless Service by which
    they find the first. queued: suspended, for Kueue to start all at once."""
    check_kubernetes_names(job, queued=queued)
    resources = {_resource(job.gpus): str(job.per_node)}
    # Kubernetes puts the value of a variable in the place of `$(NAME)` before bash reads its quotes; `$$` is one `$`.
    words = " ".join(quote(word).replace("$", "$$") for word in job.words)
    # A pod of an indexed Job is the host JOB-INDEX, and the headless Service of the subdomain gives it a name in DNS.
    head = "localhost" if job.nodes == 1 else f"{job.name}-0.{job.name}"
    container = {
        "name": "train",
        "image": job.image,
        "command": ["/bin/bash", "-c", f"HEAD={head}; exec {job.launcher} {words}"],
        "resources": {"requests": resources, "limits": resources},
    }
    pod = {
        "restartPolicy": "Never",
        "subdomain": job.name,
        # Seconds from SIGTERM to SIGKILL, in which the checkpoint is written: as many as Slurm's script asks for.
        "terminationGracePeriodSeconds": 120,
        "containers": [container],
    }
    work = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": job.name,
            "labels": {"kueue.x-k8s.io/queue-name": job.queue or "default"} if queued else {"app": "gnomon"},
        },
        "spec": {
            "suspend": queued,
            "completionMode": "Indexed",
            "completions": job.nodes,
            "parallelism": job.nodes,
            # Failures of all pods together, so it grows with the nodes.
            "backoffLimit": 3 * job.nodes,
            "activeDeadlineSeconds": round(job.hours * 3600),
            "template": {"spec": pod},
        },
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": job.name},
        "spec": {"clusterIP": "None", "selector": {"job-name": job.name}},
    }
    return {"apiVersion": "v1", "kind": "List", "items": [*([service] if job.nodes > 1 else []), work]}


def check_kubernetes_names(job: Submission, *, queued: bool) -> None:
    """InputError for a name that Kubernetes would refuse when it makes the Service or the pods, or a queue that is no
    label."""
    if len(last := f"{job.name}-{job.nodes - 1}") > LONGEST_NAME:
        raise InputError(
            f"job name {job.name!r} has {len(job.name)} characters; its last pod would be {last!r}, and a host has "
            f"a name of at most {LONGEST_NAME}: give a shorter --name"
        )
    if job.nodes > 1 and not job.name[0].isalpha():
        raise InputError(
            f"job name {job.name!r} begins with a digit, which the Service of a job on several nodes may not: give "
            "another --name"
        )
    if queued and job.queue and not _LABEL.fullmatch(job.queue):
        raise InputError(
            f"queue {job.queue!r} is no label of Kubernetes: letters, digits, '-', '_' and '.', at most {LONGEST_NAME}"
        )


def _resource(gpus: bool) -> str:
    """What Kubernetes calls a device."""
    return "nvidia.com/gpu" if gpus else "cpu"


_CONTAINER = {"name": str, "image": str, "command": [str], "resources": {"requests": dict, "limits": dict}}
_POD = {"restartPolicy": str, "subdomain": str, "terminationGracePeriodSeconds": int, "containers": [_CONTAINER]}
_JOB = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str, "labels": dict},
    "spec": {
        "suspend": bool,
        "completionMode": str,
        "completions": int,
        "parallelism": int,
        "backoffLimit": int,
        "activeDeadlineSeconds": int,
        "template": {"spec": _POD},
    },
}
"""Fields of a batch/v1 Job that are written, all of them always, by their types in Kubernetes' API."""


def _check_fields(value: Any, schema: Any, path: str = "") -> None:
    """InputError for a field that is missing, unknown or of another type."""
    kind = dict if isinstance(schema, dict) else list if isinstance(schema, list) else schema
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise InputError(f"{path or 'a Job'} must be of type {kind.__name__}, got {value!r}")
    inside = f"{path}." if path else ""
    if isinstance(schema, dict):
        for name in value:
            if name not in schema:
                raise InputError(f"a Job has no field {inside}{name}")
        for name, field in schema.items():
            if name not in value:
                raise InputError(f"{inside}{name} is missing")
            _check_fields(value[name], field, f"{inside}{name}")
    elif isinstance(schema, list):
        if not value:
            raise InputError(f"{path} is empty")
        for index, item in enumerate(value):
            _check_fields(item, schema[0], f"{inside}{index}")


def check_kubernetes(manifest: Mapping[str, Any], devices: int, *, queued: bool, gpus: bool = True) -> None:
    """InputError for a field that is missing, unknown or of the wrong type, or other than so many GPUs or cores."""
    jobs = [item for item in manifest.get("items", ()) if item.get("kind") == "Job"]
    if len(jobs) != 1:
        raise InputError(f"the list must hold one Job, it holds {len(jobs)}")
    [manifest] = jobs
    _check_fields(manifest, _JOB)
    spec = manifest["spec"]
    if queued and (not manifest["metadata"]["labels"].get("kueue.x-k8s.io/queue-name") or not spec["suspend"]):
        raise InputError("Kueue takes only jobs with the label kueue.x-k8s.io/queue-name that are created suspended")
    if not _NAME.fullmatch(manifest["metadata"]["name"]):
        raise InputError(f"metadata.name {manifest['metadata']['name']!r} is no name of Kubernetes")
    if spec["template"]["spec"]["restartPolicy"] not in ("Never", "OnFailure"):
        raise InputError("restartPolicy of a Job must be Never or OnFailure")
    total = 0
    for container in spec["template"]["spec"]["containers"]:
        limits, requests = container["resources"]["limits"], container["resources"]["requests"]
        if limits != requests or list(limits) != [_resource(gpus)] or not str(limits[_resource(gpus)]).isdecimal():
            raise InputError(
                f"requests and limits must be equal, a whole number of {_resource(gpus)}: {requests} and {limits}"
            )
        total += spec["completions"] * int(limits[_resource(gpus)])
    if total != devices or spec["parallelism"] != spec["completions"]:
        raise InputError(f"the job asks for {total} devices, the plan has {devices}")


def ray(job: Submission) -> dict[str, Any]:
    """What Ray's job API takes (POST /api/jobs/). InputError for several nodes: an entry point runs on one."""
    if job.nodes > 1:
        raise InputError(
            f"Ray's job API starts a command on one node, and the plan has {job.nodes}; give --via kueue or slurm"
        )
    return {
        "submission_id": job.name,
        "entrypoint": f"HEAD=localhost; {job.command}",
        "entrypoint_num_gpus" if job.gpus else "entrypoint_num_cpus": job.per_node,
        "metadata": {"plan": job.plan, "devices": str(job.devices)},
    }


RAY_DEVICES = ("entrypoint_num_gpus", "entrypoint_num_cpus")
"""What an entry point asks for."""


def check_ray(request: Mapping[str, Any], devices: int) -> None:
    """InputError for fields that the API does not know, or other than so many devices."""
    known: dict[str, type] = {"entrypoint": str, "submission_id": str, "metadata": dict, "runtime_env": dict}
    known |= {name: int for name in RAY_DEVICES}
    for name, value in request.items():
        if name not in known or not isinstance(value, known[name]):
            raise InputError(f"Ray's job API has no field {name!r} of type {type(value).__name__}")
    requested = sum(request.get(name, 0) for name in RAY_DEVICES)
    if not request.get("entrypoint") or requested != devices:
        raise InputError(f"the request asks for {requested} devices, the plan has {devices}")
    if not all(isinstance(value, str) for value in request.get("metadata", {}).values()):
        raise InputError("metadata of a Ray job holds texts only")
