"""What `gnomon plan` is asked: the model, the machines, the batch, and what its plans must be.

`PlanRequest.read(options)` is all of it, the same for every kind of search. Leaves out the searches (`plan`,
`plan_mixed`, `plan_lengths`, `plan_goals`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gnomon import orders
from gnomon.cli.models import read_model
from gnomon.cli.options.plan import PlanOptions
from gnomon.cli.own import with_own
from gnomon.cli.plan_choices import PlanChoices
from gnomon.cli.plan_goals import name_of
from gnomon.cli.request import (
    adapted_name,
    default_seq_len,
    given_batch,
    given_precision,
    given_router,
    listed_lengths,
    with_sizes,
)
from gnomon.cli.values import quantity
from gnomon.errors import GnomonError, InputError
from gnomon.formats import programs
from gnomon.formats.job import ModelConfig
from gnomon.graph import Graph
from gnomon.hardware import Cluster, parse_cluster
from gnomon.hardware.kinds import is_mixed
from gnomon.plans import Goal, Optimizer, Plan, RouterLoad, Workload
from gnomon.plans.check import sample_tokens
from gnomon.prediction.predict import PLAIN_STACK
from gnomon.request.exported import Says, based, lacks, target
from gnomon.request.model import read_config, too_long, with_inputs
from gnomon.request.runnable import refuse_unrunnable
from gnomon.search.checkpointing.improve import check_stack
from gnomon.search.refinement.choices import fixed_base
from gnomon.software import Stack, own
from gnomon.software import stack as named_stack
from gnomon.units import parse_bytes, show_bytes

FIELDS = {
    "tp": "tp", "pp": "pp", "cp": "cp", "ep": "ep", "dp_shard": "dp_shard", "dp_replicate": "dp_replicate",
    "vpp": "virtual_stages", "zero": "zero", "recompute": "recompute", "schedule": "schedule",
    "micro_batch_size": "micro_batch_size", "sequence_parallel": "sequence_parallel",
    "context": "context",
}  # fmt: skip
"""Option -> field of a point that it fixes."""


def whole_model(options: PlanOptions) -> PlanOptions:
    """The options with a MODEL that says its adapters and inputs itself, as plan files name it."""
    named = adapted_name(options, options.model) or options.model
    return replace(options, model=with_inputs(named, options.inputs, options.seq_len))


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What was asked of one search."""

    graph: Graph
    """The model."""
    notes: tuple[str, ...]
    """What the model's file says that is not predicted."""
    machines: Cluster
    """The cluster."""
    stack: Stack
    """The program that runs the plans."""
    workload: Workload
    """The batch of a step."""
    base: Plan
    """The plan whose other fields every plan takes over."""
    fixed: dict[str, object]
    """Field of a point -> its one value."""
    choices: PlanChoices
    """What options fix, forbid and open beyond a point's fields."""
    goal: Goal
    """How much of a device's memory may be filled."""
    assumed: list[str]
    """What was not said, and how it was filled in."""
    target: Says | None = None
    """The files that say the plans which are offered."""

    @property
    def job(self) -> tuple[Graph, Cluster, Workload, Stack, Goal]:
        """What every search is asked first."""
        return self.graph, self.machines, self.workload, self.stack, self.goal

    @staticmethod
    def read(options: PlanOptions) -> PlanRequest:
        """Reads the question from the options, whose model is whole. InputError, PlanError or CatalogueError say what
        is wrong."""
        graph, notes = read_model(options.model)
        machines = parse_cluster(options.on)
        assumed: list[str] = []
        stack, base = _stack(options, machines, assumed), _base(options, machines, assumed)
        refuse_unrunnable(options.model, stack)
        workload = _workload(options, graph, assumed)
        fixed: dict[str, object] = {
            field: value for name, field in FIELDS.items() if (value := getattr(options, name)) is not None
        }
        if options.sac_ilp:
            check_stack(stack)
        chosen = PlanChoices.read(options, stack)
        for field, value in chosen.point.items():
            if fixed.get(field, value) != value:
                option = next(name for name, other in FIELDS.items() if other == field).replace("_", "-")
                raise InputError(
                    f"--fix {field}={value} and --{option} {fixed[field]} contradict each other; drop one of them"
                )
        fixed |= chosen.point
        goal = (
            Goal() if options.memory is None else Goal(memory_bytes=quantity("--memory", parse_bytes, options.memory))
        )
        least = min(device.memory_bytes for device in machines.devices)
        if goal.memory_bytes is not None and goal.memory_bytes > least:
            assumed.append(f"--memory {options.memory} is more than a device has: {show_bytes(least)} are allowed")
        cut = options.layers_per_stage
        if cut is not None:
            fixed |= _stages_of(cut, options)
        to = None
        if not is_mixed(machines) and options.stack in programs.stacks():
            to = target(stack, config_of(options.model), graph, machines, workload)
        if why := lacks(base, to):
            assumed.append(f"no file of {stack.name} says these plans: {why}")
        base = based(base, to, precision=options.precision is None)
        return PlanRequest(
            target=to,
            graph=graph,
            notes=notes,
            machines=machines,
            stack=stack,
            workload=workload,
            base=fixed_base(base, graph, chosen.fixed),
            fixed=fixed,
            choices=chosen,
            goal=goal,
            assumed=assumed,
        )


def _stages_of(cut: tuple[int, ...], options: PlanOptions) -> dict[str, object]:
    """The choices that `--layers-per-stage` fixes: the number of pipeline ranks. InputError for what contradicts it."""
    virtual = options.vpp or orders.find(options.schedule or orders.DEFAULT).stages[0]
    ranks, rest = divmod(len(cut), virtual)
    if options.equal_stages:
        raise InputError("--layers-per-stage and --equal-stages contradict each other; leave one out")
    if rest or (options.pp is not None and options.pp != ranks):
        raise InputError(
            f"--layers-per-stage lists {len(cut)} stages, but pp x virtual stages = {options.pp or ranks} x {virtual}; "
            f"list one number for each stage"
        )
    return {"pp": ranks, "virtual_stages": virtual}


def _stack(options: PlanOptions, machines: Cluster, assumed: list[str]) -> Stack:
    """The stack that is named; for this machine, Gnomon's own runtime, with what runs of it have shown."""
    if options.stack is not None:
        stack = named_stack(options.stack)
    elif options.try_:
        stack = named_stack(own.NAME)
    elif options.on.partition(":")[0] == "local":
        assumed.append("stack not given: on this machine, Gnomon's own runtime (--stack)")
        stack = named_stack(own.NAME)
    else:
        return PLAIN_STACK
    return with_own(stack, machines, options, assumed)


def _base(options: PlanOptions, machines: Cluster, assumed: list[str]) -> Plan:
    return Plan(precision=given_precision(options, machines, assumed), optimizer=Optimizer(clip=not options.no_clip))


def config_of(model: str) -> ModelConfig | None:
    """The sizes that files of other programs say; None for a model that is no preset and no config.json."""
    try:
        return read_config(model)[0]
    except GnomonError:
        return None


def _workload(options: PlanOptions, graph: Graph, assumed: list[str]) -> Workload:
    varied = {name_of(text) for text in options.vary}
    if options.lengths:
        return with_sizes(listed_lengths(options.lengths, options, graph, RouterLoad()), graph, options, assumed)
    seq_len = options.seq_len
    looked_for = "seq_len" in varied or options.longest
    if looked_for and (fixed := sample_tokens(graph)) is not None:
        option = "--longest" if options.longest else "--vary seq_len"
        raise InputError(
            f"{option} is for models of sequences, and {graph.name} has {fixed} tokens a sample; leave it out"
        )
    if seq_len is None:
        seq_len, note = default_seq_len(graph)
        if not looked_for:
            assumed.append(note)
    # Under a fixed number of tokens, sequences are counted at each length that is tried.
    batch = 1 if "seq_len" in varied and options.tokens_per_batch else given_batch(options, seq_len)
    if batch is None and "global_batch" in varied:
        batch = 1
    if batch is None:
        raise InputError(
            "no batch to plan for; give --global-batch N, the sequences of an optimizer step, or --tokens-per-batch N"
        )
    if not looked_for and (warning := too_long(options.model, seq_len)):
        assumed.append(warning)
    workload = Workload(global_batch_size=batch, seq_len=seq_len, router=given_router(options, RouterLoad(), graph))
    return with_sizes(workload, graph, options, assumed)
