"""Models as a command line names them: what `request.model` reads, and code of the user's own (MODULE:FUNCTION).

`read_model(name)` returns the Graph and what is to be said of it. Readers of code and of what runs are loaded when they
are needed: a preset's prediction needs neither. Leaves out job files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gnomon.errors import PlanError
from gnomon.graph import Graph
from gnomon.late import load_late
from gnomon.methods import teaching_of
from gnomon.plans import Plan
from gnomon.request import model as known
from gnomon.request.model import is_code


def read_model(
    name: str, *, settings: Mapping[str, str] | None = None, strict: bool = False
) -> tuple[Graph, tuple[str, ...]]:
    """(graph, notes), as `request.model.read_model`; of code too. InputError without torch."""
    if not is_code(name):
        return known.read_model(name, settings=settings, strict=strict)
    read: tuple[Graph, tuple[str, ...]] = load_late("gnomon.cli.captured:read_code")(name)
    return read


def read_model_to_run(name: str) -> tuple[Graph, tuple[str, ...]]:
    """(graph, notes) of a model that the runtime runs: as `request.runnable` reads it, or code of the user's own."""
    if is_code(name):
        return read_model(name)
    read: tuple[Graph, tuple[str, ...]] = load_late("gnomon.request.runnable:read_runnable_model")(name)
    return read


def teacher_of(plan: Plan, graph: Graph) -> Graph | None:
    """The teacher that methods of a plan ask for, read from its folder; None where none does. PlanError for a folder
    that is not there, and for a teacher of other tokens or layers than the model's."""
    if (teaching := teaching_of(plan)) is None:
        return None
    folder = Path(teaching.folder).expanduser()
    if not (folder / "config.json").is_file():
        raise PlanError(
            f"there is no config.json in {folder}, the teacher; give the folder of a model with its weights"
        )
    teacher, _ = read_model_to_run(str(folder))
    load_late("gnomon.methods.learnt.teacher:stands_for")(teaching, graph, teacher)
    return teacher
