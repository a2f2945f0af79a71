"""Methods: published systems that rewrite a plan or its Program, one file each with a `METHOD` that says all of it.

The folder and `learnt` are the registry: `every` lists them, `method(name)` finds one; `check_methods(plan)` refuses
what a plan asks in vain, and `rewritten(program, plan, context)` applies those that `schedule.passes` names. Leaves out
schedules of pipelines, which are `orders`, and prices.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from gnomon.errors import PlanError, nearest
from gnomon.graph import Graph
from gnomon.late import load_late
from gnomon.methods.method import MARKS as MARKS
from gnomon.methods.method import Context as Context
from gnomon.methods.method import Mark as Mark
from gnomon.methods.method import Method as Method
from gnomon.methods.method import Param as Param
from gnomon.methods.method import Simulate as Simulate
from gnomon.plans import Plan
from gnomon.program import Program

if TYPE_CHECKING:
    from gnomon.methods.learnt.teaching import Teaching
    from gnomon.storage.integers import Integers
    from gnomon.storage.sparse import Sparse

_NO_METHOD = frozenset({"__init__", "method", "costs", "teacher", "teaching", "trained_weights"})
"""Files of the folders that hold no method."""


def _stems(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.py") if path.stem not in _NO_METHOD)


@cache
def _usual() -> tuple[Method, ...]:
    return tuple(load_late(f"gnomon.methods.{stem}:METHOD") for stem in _stems(Path(__file__).parent))


@cache
def _learnt() -> frozenset[str]:
    """Names of those in `learnt`, which are loaded where they are named."""
    return frozenset(_stems(Path(__file__).parent / "learnt"))


def _read_learnt(name: str) -> Method:
    entry: Method = load_late(f"gnomon.methods.learnt.{name}:METHOD")
    return entry


@cache
def every() -> tuple[Method, ...]:
    """All methods, by the alphabet."""
    return tuple(sorted((*_usual(), *map(_read_learnt, _learnt())), key=lambda entry: entry.name))


def used(plan: Plan) -> tuple[Method, ...]:
    """Those that a plan uses, by the alphabet; of `learnt`, no other is loaded."""
    named = {method_used.name for method_used in plan.schedule.passes} & _learnt()
    entries = (*(entry for entry in _usual() if entry.used(plan)), *map(_read_learnt, named))
    return tuple(sorted(entries, key=lambda entry: entry.name))


def method(name: str) -> Method:
    """The method of that name. PlanError with the nearest otherwise."""
    known = {entry.name: entry for entry in _usual()}
    if name in _learnt():
        return _read_learnt(name)
    if name not in known:
        known |= {entry.name: entry for entry in every()}
        raise PlanError(f"unknown method {name[:40]!r}{nearest(name, known)}; there are {', '.join(known)}")
    return known[name]


def check_methods(plan: Plan, mark: Mark = "predicted", graph: Graph | None = None) -> None:
    """PlanError for a method that the plan uses and that does not go as far as `mark`, is given parameters that it has
    not, or cannot be used in this plan; with a graph, or with that model."""
    for method_used in plan.schedule.passes:
        entry = method(method_used.name)
        if entry.switch != "schedule.passes":
            raise PlanError(f"{entry.name} is turned on by {entry.switch}, not by schedule.passes; set that field")
        entry.parameters_of(method_used)
    for known in used(plan):
        if mark in known.missing:
            raise PlanError(f"{known.name} ({known.paper}) is not {mark} yet: {known.missing[mark]}; leave it out")
        if (why := known.refusal(plan)) is not None:
            raise PlanError(f"{known.name} cannot be used in this plan: {why}")
        teaching_of(plan)
        if graph is not None and (why := known.unfit(plan, graph)) is not None:
            raise PlanError(f"{known.name} cannot be used with this model: {why}")


def trained_storage(plan: Plan) -> Integers | Sparse | None:
    """How the weights of a plan can be stored once it has trained, by a method that sees to it; None: as numbers."""
    return next((entry.storage(plan) for entry in used(plan) if entry.storage is not None), None)


def teaching_of(plan: Plan) -> Teaching | None:
    """The teacher that a plan's methods ask for; None where none does. PlanError where two ask for different ones, or
    compare with one in two ways."""
    teachers = {entry.name: entry.teaching(plan) for entry in used(plan) if entry.teaching is not None}
    (first, *others) = teachers or ("",)
    for name in others:
        one, other = teachers[first], teachers[name]
        if (one.folder, one.share, one.temperature) != (other.folder, other.share, other.temperature):
            raise PlanError(
                f"{first} and {name} of one plan learn from one teacher: give both the same teacher, share and "
                f"temperature"
            )
        if (one.added, one.until) != (other.added, other.until):
            raise PlanError(
                f"{first} and {name} cannot be in one plan: one adds the comparison with the teacher to the loss, "
                "until a step, and the other shares the loss out between both; leave one of them out"
            )
    return max(teachers.values(), key=lambda teaching: (len(teaching.layers), teaching.hidden), default=None)


def methods_named(text: str) -> tuple[Method, ...]:
    """Methods by names with commas between, or `all`: those that can be planned and change nothing in the mathematics.
    PlanError for a name that is none, or one that no plan can have yet."""
    if text.strip() == "all":
        return tuple(entry for entry in every() if "planned" in entry.marks and entry.exactness != "statistical")
    names = dict.fromkeys(part.strip().replace("-", "_") for part in text.split(",") if part.strip())
    named = tuple(method(name) for name in names)
    for entry in named:
        if "planned" in entry.missing:
            raise PlanError(f"{entry.name} ({entry.paper}) cannot be planned yet: {entry.missing['planned']}")
    return named


def rewrites(plan: Plan) -> bool:
    """Whether `rewritten` changes the plan's Program."""
    return any(method(method_used.name).rewrite is not None for method_used in plan.schedule.passes)


def rewritten(program: Program, plan: Plan, context: Context) -> Program:
    """The Program after the methods that `schedule.passes` names, in their order. PlanError as `check_methods`."""
    for method_used in plan.schedule.passes:
        entry = method(method_used.name)
        if entry.rewrite is not None:
            program = entry.rewrite(program, entry.parameters_of(method_used), context)
    return program
