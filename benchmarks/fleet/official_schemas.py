"""Dry runs of `gnomon fleet submit` against what the schedulers themselves check.

    python benchmarks/fleet/official_schemas.py SBATCH_1 --python PYTHON

SBATCH_1: doc/man/man1/sbatch.1 of github.com/SchedMD/slurm, whose options are those that sbatch takes. PYTHON: an
interpreter with `kubernetes-validate` (the schemas of Kubernetes' API, strict: an unknown field is an error) and `ray`
(whose JobSubmitRequest checks a request of its job API). A grid of names, nodes, devices, hours and queues is written
for Slurm, Kubernetes, Kueue and Ray and checked; then each kind is broken in several ways, and it is counted how many
of those the schedulers' checks and our own refuse. Writes results/fleet_schemas.md. Left out: sending a job.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import subprocess
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

from gnomon.errors import InputError
from gnomon.fleet.submit import Submission, check_kubernetes, check_ray, check_slurm, kubernetes, ray, slurm

RESULTS = Path(__file__).resolve().parents[1] / "results" / "fleet_schemas.md"
OFFICIAL = """
import importlib.metadata, json, sys
import kubernetes_validate
from ray.dashboard.modules.job.common import JobSubmitRequest, validate_request_type
version = kubernetes_validate.latest_version()
answers = []
for kind, value in json.load(sys.stdin):
    try:
        if kind == "ray":
            validate_request_type(value, JobSubmitRequest)
        else:
            for item in value["items"]:
                kubernetes_validate.validate(item, version, strict=True)
        answers.append("")
    except Exception as error:
        answers.append(f"{type(error).__name__}: {error}"[:300])
print(json.dumps({"kubernetes": version, "ray": importlib.metadata.version("ray"), "answers": answers}))
"""


def jobs() -> Iterator[Submission]:
    """The grid."""
    for name, nodes, per_node, hours, queue in product(
        ("a", "llama-3-1-8b", "x" * 60), (1, 2, 16), (1, 8), (0.1, 24.0, 400.0), ("", "gpu")
    ):
        plan = "/data/my plans/llama.toml" if queue else "plan.toml"
        yield Submission(name=name, plan=plan, nodes=nodes, per_node=per_node, hours=hours, queue=queue)


def written(job: Submission) -> Iterator[tuple[str, Any]]:
    """(scheduler, what it is sent)."""
    yield "slurm", slurm(job)
    yield "kubernetes", kubernetes(job, queued=False)
    yield "kueue", kubernetes(job, queued=True)
    if job.nodes == 1:
        yield "ray", ray(job)


def ours(kind: str, value: Any, devices: int) -> str:
    """What our own check says; empty for nothing."""
    try:
        if kind == "slurm":
            check_slurm(value, devices)
        elif kind == "ray":
            check_ray(value, devices)
        else:
            check_kubernetes(value, devices, queued=kind == "kueue")
    except InputError as error:
        return str(error)
    return ""


def sbatch(script: str, options: set[str]) -> str:
    """The first option of a script that sbatch does not have; empty for none."""
    for line in script.splitlines():
        if line.startswith("#SBATCH") and (name := re.sub(r"#SBATCH --([a-z-]+).*", r"\1", line)) not in options:
            return f"sbatch has no option {name!r}"
    return "" if script.startswith("#!") else "no #! in the first line"


def changed(path: str, value: Any) -> Callable[[Any], None]:
    """Sets a field of a Job, or takes it away (None)."""

    def change(manifest: Any) -> None:
        *keys, last = path.split(".")
        at = manifest["items"][-1] if "items" in manifest else manifest
        for key in keys:
            at = at[int(key)] if key.isdecimal() else at[key]
        if value is None:
            del at[last]
        else:
            at[last] = value

    return change


BROKEN: dict[str, tuple[Callable[[Any], Any], ...]] = {
    "slurm": (
        lambda script: script.replace("--nodes=", "--node="),
        lambda script: script.replace("--gpus-per-node", "--gpu-per-node"),
        lambda script: script.replace("--requeue", "--re-queue"),
        lambda script: script.removeprefix("#!"),
    ),
    "kueue": (
        changed("spec.completions", "2"),
        changed("spec.suspend", "yes"),
        changed("spec.paralelism", 2),
        changed("spec.template.spec.containers.0.resources.limits", ["nvidia.com/gpu"]),
        changed("spec.template.spec.containers", None),
        changed("spec.template", None),
        changed("spec.backoffLimit", 1.5),
        changed("metadata.name", 7),
    ),
    "ray": (
        changed("entrypoint", None),
        changed("entrypoint", 3),
        changed("gpus", 8),
        changed("metadata", {"devices": 8}),
        changed("entrypoint_num_gpus", "8"),
        changed("submission_id", 1),
    ),
}


def broken(kind: str, value: Any) -> Iterator[Any]:
    """What is sent, each with a mistake."""
    for change in BROKEN[kind]:
        again = copy.deepcopy(value)
        yield change(again) or again


def main() -> None:
    """Check all, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sbatch", type=Path)
    parser.add_argument("--python", type=Path, required=True)
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    manual = options.sbatch.read_text().replace("\\-", "-")
    known = set(re.findall(r"^\\fB(?:-\w\\fR, \\fB)?--([a-z-]+)\\fR", manual, re.MULTILINE))
    cases = [(kind, value, job.devices, True) for job in jobs() for kind, value in written(job)]
    one = Submission(name="llama", plan="plan.toml", nodes=1, per_node=8, queue="gpu")
    cases += [(k, bad, 8, False) for k, value in written(one) if k in BROKEN for bad in broken(k, value)]
    asked = [(kind, value) for kind, value, *_ in cases if kind != "slurm"]
    answered = subprocess.run(
        [options.python, "-c", OFFICIAL], input=json.dumps(asked), capture_output=True, text=True, check=True
    )
    told = json.loads(answered.stdout.splitlines()[-1])
    answers = iter(told["answers"])
    rows = dict.fromkeys(("slurm", "kubernetes", "kueue", "ray"), (0, 0, 0, 0, 0))
    problems = []
    for kind, value, devices, good in cases:
        theirs = sbatch(value, known) if kind == "slurm" else next(answers)
        mine = ours(kind, value, devices)
        n, wrong, bad, by_them, by_us = rows[kind]
        rows[kind] = (
            (n + 1, wrong + bool(theirs or mine), bad, by_them, by_us)
            if good
            else (n, wrong, bad + 1, by_them + bool(theirs), by_us + bool(mine))
        )
        if (good and (theirs or mine)) or (not good and not (theirs and mine)):
            problems.append(f"- {kind}, {'good' if good else 'broken'}: theirs {theirs!r}, ours {mine!r}: {value}")
    lines = [
        "# Dry runs against the schedulers' own checks",
        "",
        f"`python benchmarks/fleet/official_schemas.py`, {datetime.now(UTC):%Y-%m-%d}: sbatch(1) with {len(known)} "
        f"options, Kubernetes {told['kubernetes']} (kubernetes-validate, strict), Ray {told['ray']} (request class).",
        "Kueue admits a batch/v1 Job as it is: its label and `suspend` are checked by ours only.",
        "",
        "| via | written | refused by any | broken | refused by theirs | by ours |",
        "|---|---|---|---|---|---|",
        *(f"| {kind} | {' | '.join(map(str, row))} |" for kind, row in rows.items()),
    ]
    print("\n".join([*lines, *problems]))
    options.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
