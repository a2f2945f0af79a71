"""From one plan to another in the words of a program's job files: which settings change, and what each becomes.

`Words.settings(change)` asks the program's writer, where it has one, for both plans and takes what differs; otherwise
the words of the file (`Terms`). What no file says (a sentence in place of a setting) is an error.
Leaves out putting settings into a text (`edit`).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from gnomon.errors import GnomonError, PlanError
from gnomon.formats.export import asked_for
from gnomon.formats.format import Format
from gnomon.formats.job import ModelConfig, flatten
from gnomon.formats.yaml_file import read_yaml
from gnomon.graph import Graph
from gnomon.plans import INPUTS_AWAY, Plan
from gnomon.schema.toml import parse_toml
from gnomon.search.fit.terms import REMOVED, Change, Setting, Terms

SCRIPT = ".sh"
"""Suffix that stands for a command's flags."""
KINDS: Mapping[str, str] = {".yaml": ".yaml", ".yml": ".yaml", ".toml": ".toml", ".json": ".json"}
"""End of a file's name -> how its settings are written; anything else is a script."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """How a job's file says things."""

    program: Format
    """The format of the file."""
    kind: str
    """One of `KINDS`, or `SCRIPT`."""
    terms: Terms | None
    config: ModelConfig | None
    """The model's sizes, where the program's file describes it."""
    graph: Graph
    near: int
    """Devices of a machine."""

    def settings(self, change: Change) -> tuple[Setting, ...]:
        """What has to be set for the change. PlanError for one that the file cannot say."""
        written = self._written(change)
        if written is not None:
            return written
        if self.terms is None:
            raise PlanError(f"the settings of {self.program.name} for changes of a job are not known")
        names = options_of(change)
        settings = self.terms.settings(names, change)
        if settings is None or any(not key for key, _ in settings):
            raise PlanError(f"a file of {self.program.name} has no setting for {', '.join(names)}")
        return self.terms.in_file(settings)

    def writes(self, change: Change) -> bool:
        """Whether the program's writer says the job as it is, so that all that it can write is open to a search."""
        return self._file(change.before, change) is not None

    def _written(self, change: Change) -> tuple[Setting, ...] | None:
        """The same by the program's writer; None where it has none for such files, or for the plan as it was."""
        before = self._file(change.before, change)
        if before is None:
            return None
        after = self._file(change.after, change)
        if after is None:
            raise PlanError(f"a file of {self.program.name} does not say such a plan")
        gone: list[Setting] = [(key, REMOVED) for key in before if key not in after]
        return tuple([(key, value) for key, value in after.items() if before.get(key, REMOVED) != value] + gone)

    def _file(self, plan: Plan, change: Change) -> dict[str, object] | None:
        """Settings of the file that the writer makes of a plan; None where there is none of this kind."""
        if self.program.write is None:
            return None
        try:
            request = asked_for("job", self.config, self.graph, plan, change.workload, self.near)
            text = self.program.write(request).text
        except GnomonError:
            return None
        return _settings_of(text, self.kind)


def _settings_of(text: str, kind: str) -> dict[str, object] | None:
    """Settings of a written file; None where it is of another kind."""
    script = text.startswith("#!")
    if script != (kind == SCRIPT):
        return None
    if script:
        return _flags_of(text)
    values: object
    if kind == ".json":
        values = json.loads(text) if text.lstrip().startswith("{") else None
    elif kind == ".toml":
        values = parse_toml(text, "job")
    else:
        values = read_yaml(text, "job")
    return flatten(values) if isinstance(values, Mapping) else None


def _flags_of(script: str) -> dict[str, object]:
    """Flags of the program that a script starts, behind the program's name; those of its launcher are left out."""
    words = shlex.split(script.replace("\\\n", " "), comments=True)
    start = next((i for i, word in enumerate(words) if word.endswith(".py")), -1)
    flags: dict[str, list[str]] = {}
    name = ""
    for word in words[start + 1 :]:
        if word.startswith("--"):
            name = word[2:]
            flags[name] = []
        elif name:
            flags[name].append(word)
    return {
        name: True if not values else values[0] if len(values) == 1 else tuple(values) for name, values in flags.items()
    }


def options_of(change: Change) -> tuple[str, ...]:
    """Names of the options (`search.fit.options`) that take the one plan to the other. PlanError for a difference that
    none of them makes."""
    before, after = change.before, change.after
    b, a = before.mesh, after.mesh
    names: list[str] = []
    for axis in ("tp", "pp", "cp"):
        if getattr(b, axis) != getattr(a, axis):
            names.append(axis)
    if (b.ep, b.etp) != (a.ep, a.etp):
        raise PlanError("this file has no setting for expert parallelism")
    if before.optimizer.zero != after.optimizer.zero or not names and b.dp_replicate != a.dp_replicate:
        names.append("zero")
    if _micro(change, before) != change.micro:
        names.append("micro_batch_size")
    if before.saved != after.saved:
        away = [rule for rule in after.saved.rules if rule.action == "offload"]
        if before.saved.preset != after.saved.preset or not away:
            names.append("recompute")
        if away:
            names.append("input_offload" if INPUTS_AWAY in away else "activation_offload")
    if before.layout.sequence_parallel != after.layout.sequence_parallel and "tp" not in names and a.tp > 1:
        names.append("sequence_parallel")
    if before.optimizer.offload != after.optimizer.offload:
        names.append("optimizer_offload")
    return tuple(names)


def _micro(change: Change, plan: Plan) -> int:
    return Change(before=plan, after=plan, workload=change.workload).micro


def written_setting(setting: Setting, kind: str) -> str:
    """A setting as a line of a file of that kind: `--tp 4`, `a.b: 4`, `a.b = 4`."""
    key, value = setting
    if value is REMOVED or (kind == SCRIPT and value is False):
        return f"without {'--' if kind == SCRIPT else ''}{key}"
    if kind == SCRIPT:
        words = () if value is True else value if isinstance(value, (tuple, list)) else (value,)
        return " ".join([f"--{key}", *map(str, words)])
    written = json.dumps(list(value) if isinstance(value, tuple) else value)
    return f"{key} = {written}" if kind == ".toml" else f"{key}: {written}"
