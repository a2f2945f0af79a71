"""What a user wrote, in what schedulers, shells and other programs read: one word of theirs, or refused.

Every text field of a job and every scheduler with strings made of what bash, sbatch, YAML, TOML and Kubernetes take for
their own. The oracles are not ours: bash runs what was written, with programs that note what they were given in the
place of torchrun and srun, in a folder where anything else that ran leaves a trace; PyYAML and tomllib read the files.
`pytest tests/fleet/test_injection.py --hypothesis-profile=explore` draws 2,000 of each
(500 of a model's name).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unicodedata import category

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gnomon.cli import main
from gnomon.cli.export import export_file
from gnomon.errors import InputError
from gnomon.fleet.submit import Submission, check_kubernetes, check_ray, check_slurm, kubernetes, ray, slurm
from gnomon.formats import programs
from gnomon.formats.export import asked_for, exported
from gnomon.plans import PlanFile, load_plan_file
from gnomon.request.model import read_config

PIECES = (
    *"abz09 /.,:;-_=+@%#~*?!&|<>(){}[]\"'`\\$^\n\r\t\x00\x0b\x85\u2028\u2029\ufeff\udc80é",
    "$(touch owned)", "`touch owned`", "\ntouch owned\n", ";touch owned;", "' ; touch owned ; '", '"; touch owned; "',
    "$(HOME)", "$$(HOME)", "${HOME}", "$HEAD", "\n#SBATCH --wrap=x", " --wrap=x",
    "\r\nowned: true\r\n", "\nowned = 1\n",
    "--", "-x", "$'\\n'", "%j", "~root", "{a,b}", "\\\n", "\x1b[2J", "*/../",
)  # fmt: skip
"""Characters and phrases that one of the readers takes for its own."""
TEXTS = st.lists(st.sampled_from(PIECES), min_size=1, max_size=6).map("".join)
NAMES = st.one_of(st.just("train"), TEXTS)
FIELDS = ("name", "plan", "queue", "image")


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with programs that note their words."""
    folder = tmp_path_factory.mktemp("machine")
    (folder / "bin").mkdir()
    for name, text in {
        "torchrun": 'printf "%s\\0" "$@" > "$NOTES/words"',
        "srun": '[[ $1 == torchrun ]] && exec "$@"',
        "scontrol": '[[ "$*" == "show hostnames nodes" ]] && echo node0',
    }.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{text}\n", encoding="utf-8")
        (folder / "bin" / name).chmod(0o755)
    (folder / "here").mkdir()
    return folder


def words_under_bash(machine: Path, command: list[str], script: str | None = None) -> tuple[str, ...]:
    """What torchrun was given; whatever else ran would have left something in the folder."""
    environment = {
        "PATH": f"{machine / 'bin'}:/usr/bin:/bin", "NOTES": str(machine), "SLURM_JOB_NODELIST": "nodes",
        "HOME": "/home/of another", "LC_ALL": "C.UTF-8",
    }  # fmt: skip
    (machine / "words").unlink(missing_ok=True)
    given = None if script is None else os.fsencode(script)
    done = subprocess.run(
        command, input=given, capture_output=True, env=environment, cwd=machine / "here", timeout=60, check=False
    )
    assert done.returncode == 0, (command, script, done.stderr)
    assert list((machine / "here").iterdir()) == []
    return tuple(os.fsdecode(word) for word in (machine / "words").read_bytes().split(b"\0")[:-1])


def by_kubernetes(text: str, variables: Mapping[str, str]) -> str:
    """A command as Kubernetes hands it to the container: `$(NAME)` of known variables, and `$$`, once, from left to
    right (k8s.io/kubernetes/third_party/forked/golang/expansion)."""
    known = lambda found: "$" if found[0] == "$$" else variables.get(found[1], found[0])  # noqa: E731
    return re.sub(r"\$\$|\$\(([^)]*)\)", known, text)


def expected(job: Submission) -> tuple[str, ...]:
    plan = job.plan if not job.plan.startswith("-") else f"./{job.plan}"
    return ("-m", "gnomon", "run", plan, "--steps", "200", "--checkpoints", f"{plan}.checkpoints", "--resume")


def run_slurm(job: Submission, machine: Path) -> None:
    script = slurm(job)
    check_slurm(script, job.devices, gpus=job.gpus)
    head, _, body = script.partition("set -euo pipefail\n")
    # sbatch splits an option's line at blanks, as a shell would.
    options = [shlex.split(line.removeprefix("#SBATCH ")) for line in head.split("\n")[1:-1]]
    assert all(len(words) == 1 for words in options) and len(options) == 8 + bool(job.queue)
    given = dict(words[0].removeprefix("--").partition("=")[::2] for words in options)
    assert given["job-name"] == job.name and given.get("partition", "") == job.queue
    assert body.count("\n") == 2
    assert words_under_bash(machine, ["bash"], script)[-9:] == expected(job)


def run_kubernetes(job: Submission, machine: Path, *, queued: bool = False) -> None:
    yaml = pytest.importorskip("yaml")
    manifest = kubernetes(job, queued=queued)
    check_kubernetes(manifest, job.devices, queued=queued, gpus=job.gpus)
    read = yaml.safe_load(json.dumps(manifest, indent=2))
    assert read == manifest
    [container] = read["items"][-1]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == job.image and re.fullmatch(r"[\w./:@-]+", job.image, re.ASCII)
    command = [by_kubernetes(word, {"HOME": "'; touch owned; '"}) for word in container["command"]]
    assert words_under_bash(machine, command)[-9:] == expected(job)


def run_ray(job: Submission, machine: Path) -> None:
    request = ray(job)
    check_ray(request, job.devices)
    assert json.loads(json.dumps(request)) == request
    assert words_under_bash(machine, ["bash", "-c", request["entrypoint"]])[-9:] == expected(job)


def run_kueue(job: Submission, machine: Path) -> None:
    run_kubernetes(job, machine, queued=True)


VIA: dict[str, Callable[[Submission, Path], None]] = {
    "slurm": run_slurm, "kubernetes": run_kubernetes, "kueue": run_kueue, "ray": run_ray,
}  # fmt: skip


@pytest.mark.parametrize("via", VIA)
@given(field=st.sampled_from(FIELDS), text=TEXTS, gpus=st.booleans())
@example(field="queue", text="part\ntouch owned", gpus=True)
@example(field="queue", text="part --wrap=x", gpus=True)
@example(field="plan", text="$(HOME).toml", gpus=True)
@example(field="plan", text="a 'b' $(touch owned).toml", gpus=False)
@example(field="image", text="gnomon\n", gpus=True)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_text_of_the_user_is_one_word_or_refused(via: str, machine: Path, field: str, text: str, gpus: bool) -> None:
    try:
        job = replace(Submission(name="train", plan="p.toml", nodes=1, per_node=4, gpus=gpus), **{field: text})
        VIA[via](job, machine)
    except InputError as error:
        assert "\n" not in str(error)
        assert any(str(error).startswith(what) for what in ("job name", "the plan's path", "queue", "image"))


def test_what_people_write_is_taken(machine: Path) -> None:
    """Several partitions, a registry with a port and a digest, paths with blanks and letters of any language."""
    job = Submission(
        name="a-1", plan="/données/мой план (2)/it's.toml", nodes=1, per_node=8, queue="gpu,gpu_long,a100-80.b",
        image="registry.example:5000/team/gnomon_x:1.2@sha256:0a1b",
    )  # fmt: skip
    for via in ("slurm", "kubernetes", "ray"):
        VIA[via](job, machine)
    run_kueue(replace(job, queue="team_a.gpu"), machine)


def test_cores_are_asked_of_schedulers_for_a_machine_of_cpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "tiny.toml"
    plan.write_text(PLAN.replace("MODEL", "llama-tiny").replace("2x4xa100-sxm-80gb", "local:8"))
    assert main(["launch", str(plan), "--via", "slurm", "--dry-run"]) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --cpus-per-task=8\n" in script and "gpu" not in script
    assert main(["launch", str(plan), "--via", "kubernetes", "--dry-run"]) == 0
    [job] = json.loads(capsys.readouterr().out)["items"]
    [container] = job["spec"]["template"]["spec"]["containers"]
    assert container["resources"] == {"requests": {"cpu": "8"}, "limits": {"cpu": "8"}}
    with pytest.raises(InputError, match="--cpus-per-task is asked for, and the plan's devices are GPUs"):
        check_slurm(script, 8)


@pytest.mark.parametrize(
    ("via", "option"),
    [("ray", "--queue"), ("kubernetes", "--queue"), ("slurm", "--image"), ("torchrun", "--name"), ("ray", "--hours")],
)
def test_an_option_that_its_scheduler_has_no_use_for_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], via: str, option: str
) -> None:
    plan = tmp_path / "tiny.toml"
    plan.write_text(PLAN.replace("MODEL", "llama-tiny"))
    assert main(["launch", str(plan), "--via", via, option, "3", "--dry-run"]) == 2
    assert f"{option} means nothing to {via}: it is for" in capsys.readouterr().err


PLAN = """\
schema = "gnomon.planfile/1"
model = "MODEL"
on = "2x4xa100-sxm-80gb"
[workload]
global_batch_size = 8
seq_len = 64
[plan]
mesh = {dp_shard = 8}
schedule = {micro_batch_size = 1}
"""


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> PlanFile:
    path = tmp_path_factory.mktemp("plans") / "plan.toml"
    path.write_text(PLAN.replace("MODEL", "llama-tiny"))
    return load_plan_file(path)


def told(text: str, program: str, machine: Path) -> Any:
    """The file as the program itself reads it."""
    if program == "megatron":
        return words_under_bash(machine, ["bash"], text)
    if program == "torchtitan":
        return tomllib.loads(text)
    yaml = pytest.importorskip("yaml")
    return json.loads(text) if program == "deepspeed" else yaml.safe_load(text)


@pytest.mark.parametrize("program", programs.writable_programs())
@given(label=TEXTS)
@example(label="a\rowned: true")
@example(label="a\u2028owned: true")
@example(label="a\ntouch owned")
@settings(max_examples=settings.default.max_examples // 4, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_model_s_name_says_nothing_in_a_file_for_another_program(
    program: str, plan_file: PlanFile, machine: Path, label: str
) -> None:
    """The model's name is a file's: the file with it says what the file with another name says."""
    config, graph = read_config(plan_file.model)
    draft = programs.find(program).write
    assert draft is not None
    texts = []
    for name in ("model", label):
        asked = asked_for(name, config, graph, plan_file.plan, plan_file.workload, 4)
        try:
            texts.append(exported(asked, draft(asked)).text)
        except InputError:
            assert any(category(one) == "Cs" for one in label)  # YAML has no lone surrogates
            return
    plain, hostile = (told(text, program, machine) for text in texts)
    if program == "nanotron":
        assert hostile["general"].pop("run") == label and plain["general"].pop("run") == "model"
    if program == "torchtitan":
        assert hostile["job"].pop("description") == f"{label}, written by gnomon"
        plain["job"].pop("description")
    assert hostile == plain


def test_the_export_of_a_file_and_that_of_a_label_are_one(plan_file: PlanFile) -> None:
    """What the test above writes is what `gnomon export` writes."""
    config, graph = read_config(plan_file.model)
    draft = programs.find("megatron").write
    assert draft is not None
    asked = asked_for("llama-tiny", config, graph, plan_file.plan, plan_file.workload, 4)
    assert exported(asked, draft(asked)).text == export_file(plan_file, "megatron").text
