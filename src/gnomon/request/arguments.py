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


def graph(network: Graph | str) -> Graph:
    """The Graph that is given, or that of a preset's name, an id of the Hugging Face hub, a config.json or a folder
    with one."""
    return read_model(network)[0] if isinstance(network, str) else graph_of(network)


def cluster(machines: Cluster | str) -> Cluster:
    """A Cluster, or that of a name, a spec such as `4x8xh100-sxm`, a .toml file, or `local`."""
    if isinstance(machines, str):
        return parse_cluster(machines)
    return _checked("cluster", machines, Cluster, "or a name such as '4x8xh100-sxm'")


def stack(software: Stack | str | None) -> Stack:
    """A Stack, or that of a name or a .toml file. None is one of which nothing is known."""
    if software is None:
        return PLAIN_STACK
    if isinstance(software, str):
        return named_stack(software)
    return _checked("stack", software, Stack, "or a name such as 'torchtitan' (gnomon catalogue stacks)")


def plan(stated: Plan) -> Plan:
    """A Plan whose fields have the types that they should."""
    if isinstance(stated, PlanFile):
        raise InputError("plan is a whole plan file; give its plan, as in load_plan_file(path).plan")
    checked = _checked("plan", stated, Plan, "as Plan(mesh=Mesh(tp=2)), or load_plan_file(path).plan")
    check_types(checked, "plan")
    return checked


def workload(stated: Workload) -> Workload:
    """A Workload whose fields have the types that they should."""
    checked = _checked("workload", stated, Workload, "as Workload(global_batch_size=128, seq_len=4096)")
    check_types(checked, "workload")
    return checked


def goal(stated: Goal | None) -> Goal:
    """A Goal whose fields have the types that they should; the default one for None."""
    checked = Goal() if stated is None else _checked("goal", stated, Goal, "as Goal(memory_bytes=60 * 2**30)")
    check_types(checked, "goal")
    return checked


def _checked(name: str, argument: object, kind: type[T], also: str) -> T:
    """The argument, if it is of its type. also: what else could be given, or an example."""
    if not isinstance(argument, kind):
        room = kind.__module__.rpartition(".")[0]
        raise InputError(f"{name} is a {room}.{kind.__name__}, {also}; not {_described(argument)}")
    return argument


def _described(argument: object) -> str:
    """The type of a value, and a short one's value."""
    name = type(argument).__name__
    shown = f" {argument!r}"[:41] if isinstance(argument, str | int | float) else ""
    return "None" if argument is None else f"{'an' if name[0] in 'aeiou' else 'a'} {name}{shown}"
