"""The plan file: a plan with what it is for, so that one file says what to predict, run or compare.

`load_plan_file(path)` returns a `PlanFile`; `save_plan_file(value, path)` writes one whole or not at all. `gnomon plan`
writes such files, people edit them, `gnomon predict --plan` and `gnomon run` read them. Leaves out reading the model
and the cluster that it names.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from gnomon import schema
from gnomon.errors import FormatError, InputError
from gnomon.plans.plan import Plan
from gnomon.plans.workload import Workload
from gnomon.units import Bytes, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """What was predicted when the file was written; nothing reads it back as a fact."""

    step_s: Seconds
    """Seconds of a step in the steady state."""
    peak_memory_bytes: Bytes
    """Of the rank with the least room."""
    tokens_per_s: float
    """Of the whole job."""
    made: str
    """By what and when, as in `gnomon 0.1.0, 2026-11-21`."""
    assumptions: tuple[str, ...] = ()
    """What the prediction rests on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What was measured when the plan was run: `gnomon plan --try` writes it, `gnomon calibrate --from` reads it."""

    step_s: Seconds
    """Median seconds of a step after warm-up."""
    spread: float
    """Interquartile range of those steps over their median."""
    steps: int
    """Steps that count."""
    warm_up: int
    """Steps before them, which do not."""
    peak_memory_bytes: Bytes
    """Most that the first process had, libraries and all."""
    host: str
    """Name of the machine."""
    made: str
    """By what and when, as in `gnomon 0.1.0, 2026-11-22`."""
    slowdown: float | None = None
    """Times as long as when the machine was calibrated that it took for a few operations just before; None if it never
    was."""

    def __post_init__(self) -> None:
        if not (self.step_s > 0 and self.steps >= 1 and self.spread >= 0):
            raise InputError("what was measured needs a step longer than 0 s, one step or more, and a spread", "$")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFile:
    """A plan, and the model, machines, program and batch that it is for."""

    SCHEMA: ClassVar[str] = "gnomon.planfile/1"

    model: str
    """Name of a preset, or path of a Hugging Face config.json or of its folder."""
    on: str
    """Cluster, as in `4x8xh100-sxm` or `local`, or the path of a cluster file."""
    stack: str = ""
    """Name of the program that runs it, or the path of a stack file; empty where nobody says."""
    workload: Workload
    """The batch."""
    plan: Plan
    """Every decision."""
    predicted: Predicted | None = None
    """What the writer of the file expected."""
    runners_up: tuple[Plan, ...] = ()
    """The next plans of the search that made it, for `gnomon explain`."""
    too_large: tuple[Plan, ...] = ()
    """Plans of that search that were faster and did not fit."""
    measured: Ran | None = None
    """What a run of it took, if there was one."""

    def __post_init__(self) -> None:
        for name in ("model", "on"):
            if not getattr(self, name).strip():
                raise InputError(f"a plan file must say `{name}`, as on the command line", f"$.{name}")


def load_plan_file(path: str | Path) -> PlanFile:
    """The plan file at `path`; relative paths in it come back relative to the working directory, and are so in a pipe.

    InputError, UnitError or PlanError (with the path to the value) for a file that cannot be.
    """
    return _read(path, schema.read_file(path))


def load_plan(path: str | Path) -> PlanFile | Plan:
    """A plan file, or a plan that does not say what it is for; errors as `load_plan_file`. It is read once, so that it
    may be a pipe."""
    text = schema.read_file(path)
    if not text.strip():
        raise InputError(f"{path}: it is empty; `gnomon plan -o FILE` writes a plan", "$")
    return _read(path, text) if _is_plan_file(path, text) else schema.load(Plan, text, source=str(path))


def _read(path: str | Path, text: bytes) -> PlanFile:
    try:
        file = schema.load(PlanFile, text, source=str(path))
    except FormatError as error:
        raise _no_plan(path, error) from error
    folder = Path(path).parent if Path(path).is_file() else Path()
    return replace(
        file, model=_from(folder, file.model), on=_from(folder, file.on), stack=_stack(_from, folder, file.stack)
    )


def save_plan_file(value: PlanFile, path: str | Path) -> None:
    """Writes the file; a crash leaves what was there before.

    A model, cluster or stack that is a file is written relative to the new file, if it lies below its folder, else in
    full.
    """
    folder = Path(path).parent
    there = replace(
        value, model=_to(folder, value.model), on=_to(folder, value.on), stack=_stack(_to, folder, value.stack)
    )
    schema.save_file(there, path)


def is_plan_file(path: str | Path) -> bool:
    """Whether the file's header says `gnomon.planfile`; InputError if it cannot be read, or is no TOML."""
    return _is_plan_file(path, schema.read_file(path))


def _is_plan_file(path: str | Path, text: bytes) -> bool:
    try:
        return schema.header_of(text, source=str(path)).startswith("gnomon.planfile/")
    except FormatError as error:
        raise _no_plan(path, error) from error


def _no_plan(path: str | Path, error: FormatError) -> FormatError:
    """What a file is that was given as a plan, and is no TOML."""
    return FormatError(
        f"{path} is no plan file: {error}; plan files are TOML, as `gnomon plan MODEL --on CLUSTER --global-batch N -o "
        f"plan.toml` writes them, and of a job file of another program `gnomon fit FILE --on CLUSTER -o plan.toml`"
    )


def _stack(move: Callable[[Path, str], str], folder: Path, name: str) -> str:
    """A stack that is a file, as a model or cluster; the name of one as it is."""
    return move(folder, name) if name.endswith(".toml") else name


def _is_path(name: str) -> bool:
    file = re.sub(r"\+q?[ld]ora[\w:.*,]+$", "", name)  # a model's adapters stand behind its file
    return "/" in file or "\\" in file or file.endswith((".json", ".toml"))


def _from(folder: Path, name: str) -> str:
    return str(folder / name) if _is_path(name) and not Path(name).is_absolute() else name


def _to(folder: Path, name: str) -> str:
    if not (_is_path(name) or Path(name).is_dir()):
        return name
    whole, base = Path(name).resolve(), folder.resolve()
    return f"./{whole.relative_to(base).as_posix()}" if whole.is_relative_to(base) else str(whole)
