"""`gnomon diff`: what a change of a job does to speed and memory, as text, JSON and annotations, with an exit status.

`run(options)` predicts both, prints, and returns 0, or 1 where a limit is passed or the second no longer fits. A
`REVISION:PATH` is read from the git repository here, together with the files around it. Leaves out measured steps.
"""

from __future__ import annotations

import os
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from io import BytesIO
from pathlib import Path, PurePosixPath

from gnomon.cli.options.diff import DiffOptions
from gnomon.cli.options.job import TrainingOptions
from gnomon.cli.request import read_request
from gnomon.cli.terminal import print_json, print_lines
from gnomon.cli.values import quantity
from gnomon.errors import GnomonError, InputError
from gnomon.prediction import Prediction, predict
from gnomon.report.change import JobChange, annotation_lines, change_of, change_text, summary
from gnomon.units import parse_bytes, show_bytes


def run(options: DiffOptions) -> int:
    """Predict both, compare, print."""
    slower = None if options.max_slower is None else _share(options.max_slower)
    memory = None if options.max_memory is None else quantity("--max-memory", parse_bytes, options.max_memory)
    if options.plan is not None or options.source is not None:
        raise InputError("diff takes its two jobs as BEFORE and AFTER; leave --plan and --from out")
    assert options.model is not None, "the parser asks for it"
    before, after = (_predicted(options, name) for name in (options.model, options.after))
    change = change_of(before, after, (options.model, options.after))
    passed = _passed(change, slower, memory)
    if options.json:
        print_json({**change.to_mapping(), "over_the_limit": list(passed)})
    else:
        print_lines(change_text(change, passed))
    if options.github:
        print_lines(annotation_lines(change, passed))
        if target := os.environ.get("GITHUB_STEP_SUMMARY"):
            with Path(target).open("a", encoding="utf-8") as file:
                file.write(summary(change, passed))
    return 1 if passed else 0


def _passed(change: JobChange, slower: float | None, memory: int | None) -> tuple[str, ...]:
    """What is over its limit, a sentence each."""
    out = []
    if change.before.fits and not change.after.fits:
        out.append(
            f"it no longer fits: rank {change.after.rank} needs {show_bytes(change.after.peak_bytes)} of "
            f"{show_bytes(change.after.limit_bytes)}"
        )
    if slower is not None and -change.speed > slower:
        out.append(f"{-change.speed:.1%} slower, and {slower:.1%} are allowed")
    if memory is not None and change.memory_bytes > memory:
        out.append(f"{show_bytes(change.memory_bytes)} more memory, and {show_bytes(memory)} are allowed")
    return tuple(out)


def _share(text: str) -> float:
    """`2%`, `2` and `0.5 %` are per cent."""
    try:
        value = float(text.rstrip("% "))
    except ValueError:
        value = -1.0
    if not 0 <= value <= 100:
        raise InputError(f"--max-slower: {text[:40]!r} is no per cent from 0 to 100, as in 2%")
    return value / 100


def _predicted(options: DiffOptions, name: str) -> Prediction:
    """The prediction of one of the two. Errors begin with its name."""
    values = {f.name: getattr(options, f.name) for f in fields(TrainingOptions)}
    try:
        with _file(name) as path:
            request = read_request(replace(TrainingOptions(**values), model=path))
    except GnomonError as error:
        if name in str(error):
            raise
        raise InputError(f"{name}: {error}") from error
    return predict(request.graph, request.cluster, request.plan, request.workload, request.stack)


JOB_SUFFIXES = (".yaml", ".yml", ".toml", ".json", ".sh", ".bash", ".sbatch", ".slurm", ".py")
"""Ends of names of job files, which no function of a module has."""


@contextmanager
def _file(name: str) -> Iterator[str]:
    """The path to read: `name` itself, or that of a commit's file, with the commit's other files around it."""
    revision, colon, path = name.partition(":")
    if not colon or Path(name).exists() or not _is_commit(revision):
        if colon and Path(path).suffix in JOB_SUFFIXES and not Path(name).exists():
            raise InputError(f"{revision!r} is no commit of a git repository here, so {name!r} is no file; see git log")
        yield name
        return
    try:
        prefix = _git("rev-parse", "--show-prefix").decode().strip()
        inside = PurePosixPath(os.path.normpath(PurePosixPath(prefix) / path)).as_posix()
        _git("cat-file", "-e", f"{revision}:{inside}")
        archive = _git("archive", "--format=tar", revision, top=True)
    except InputError:
        raise InputError(f"git has no file {path!r} in {revision!r}; see git show {name}") from None
    with tempfile.TemporaryDirectory(prefix="gnomon-diff-") as folder:
        with tarfile.open(fileobj=BytesIO(archive)) as files:
            files.extractall(folder, filter="data")  # a commit may hold links; none leaves the folder
        yield str(Path(folder) / inside)


def _is_commit(revision: str) -> bool:
    # A name that begins with a dash would be an option of git's.
    if not revision or revision.startswith("-"):
        return False
    try:
        _git("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    except InputError:
        return False
    return True


def _git(*arguments: str, top: bool = False) -> bytes:
    """Runs git and returns what it prints. top: run at the repository's root. InputError where it fails, or there is no
    git."""
    here = _git("rev-parse", "--show-toplevel").decode().strip() if top else None
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, check=False, cwd=here)
    except OSError as error:
        raise InputError(f"cannot run git: {error.strerror}") from error
    if done.returncode:
        raise InputError(done.stderr.decode(errors="replace").strip() or f"git {arguments[0]} failed")
    return done.stdout
