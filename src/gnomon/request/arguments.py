"""What a person hands to Gnomon, as values: names of models, clusters and stacks are looked up, types are checked.

Each function takes an argument of a public verb or a word of the command line and returns the value that it stands for.
InputError for another type says what is wanted; a name that nobody knows is a CatalogueError with the nearest. Leaves
out whether the values go together, which `predict` and `plan` say.
"""

from __future__ import annotations

from typing import TypeVar

from gnomon.errors import InputError
from gnomon.graph import Graph
from gnomon.hardware import Cluster, parse_cluster
from gnomon.models.presets import graph_of
from gnomon.plans import Goal, Plan, PlanFile, Workload
from gnomon.prediction.predict import PLAIN_STACK
from gnomon.request.model import read_model
from gnomon.schema import check_types
from gnomon.software import Stack
from gnomon.software import stack as named_stack

T = TypeVar("T")


def graph(given: Graph | str) -> Graph:
    """The Graph that is given, or that of a preset's name, an id of the Hugging Face hub, a config.json or a folder
    with one."""
    return read_model(given)[0] if isinstance(given, str) else graph_of(given)


def cluster(given: Cluster | str) -> Cluster:
    """A Cluster, or that of a name, a spec such as `4x8xh100-sxm`, a .toml file, or `local`."""
    if isinstance(given, str):
        return parse_cluster(given)
    return _checked("cluster", given, Cluster, "or a name such as '4x8xh100-sxm'")


def stack(given: Stack | str | None) -> Stack:
    """A Stack, or that of a name or a .toml file. None is one of which nothing is known."""
    if given is None:
        return PLAIN_STACK
    if isinstance(given, str):
        return named_stack(given)
    return _checked("stack", given, Stack, "or a name such as 'torchtitan' (gnomon catalogue stacks)")


def plan(given: Plan) -> Plan:
    """A Plan whose fields have the types that they should."""
    if isinstance(given, PlanFile):
        raise InputError("plan is a whole plan file; give its plan, as in load_plan_file(path).plan")
    checked = _checked("plan", given, Plan, "as Plan(mesh=Mesh(tp=2)), or load_plan_file(path).plan")
    check_types(checked, "plan")
    return checked


def workload(given: Workload) -> Workload:
    """A Workload whose fields have the types that they should."""
    checked = _checked("workload", given, Workload, "as Workload(global_batch_size=128, seq_len=4096)")
    check_types(checked, "workload")
    return checked


def goal(given: Goal | None) -> Goal:
    """A Goal whose fields have the types that they should; the default one for None."""
    checked = Goal() if given is None else _checked("goal", given, Goal, "as Goal(memory_bytes=60 * 2**30)")
    check_types(checked, "goal")
    return checked


def _checked(name: str, given: object, kind: type[T], also: str) -> T:
    """The argument, if it is of its type. also: what else could be given, or an example."""
    if not isinstance(given, kind):
        room = kind.__module__.rpartition(".")[0]
        raise InputError(f"{name} is a {room}.{kind.__name__}, {also}; not {_described(given)}")
    return given


def _described(given: object) -> str:
    """The type of a value, and a short one's value."""
    name = type(given).__name__
    shown = f" {given!r}"[:41] if isinstance(given, str | int | float) else ""
    return "None" if given is None else f"{'an' if name[0] in 'aeiou' else 'a'} {name}{shown}"
