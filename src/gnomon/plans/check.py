"""Compare a plan with its graph, cluster and workload: what cannot run, and what is worth knowing.

`problems` returns every `Problem` with a name, what was asked, the limit and the nearest legal value; `check` raises
PlanError with the errors among them. `batch` says how the global batch divides into microbatches. Leaves out memory
(that takes prices) and what a given software supports (`Stack`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal, Protocol

from gnomon import orders
from gnomon.errors import PlanError, nearest
from gnomon.graph import Block, Dim, Graph, Layer
from gnomon.graph import Op as GraphOp
from gnomon.plans.expert_rows import divides_experts
from gnomon.plans.experts import under, whole_experts
from gnomon.plans.mesh import Mesh
from gnomon.plans.parts import INPUT, Schedule
from gnomon.plans.plan import Plan
from gnomon.plans.replicas import busiest, check_placement, load_under, slots
from gnomon.plans.select import select
from gnomon.plans.stages import dependencies, stage_layers, transfers
from gnomon.plans.vocabulary import vocabulary_errors
from gnomon.plans.workload import RouterLoad, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One finding about a plan."""

    severity: Literal["error", "note"]
    """`error`: it cannot run. `note`: it can, in a way that may not be meant."""
    name: str
    """Short and stable, as in `heads_not_divisible`."""
    message: str
    """What was asked, the limit, and the nearest legal value."""

    def __str__(self) -> str:
        return f"{self.name}: {self.message}"


MAX_STAGES = 100_000
"""Stages that are looked at one by one, at most: as many as layers of the largest graph (`graph.types.MAX_REPEAT`)."""


class Machines(Protocol):
    """What is asked of a cluster here; `gnomon.hardware.Cluster` has it."""

    @property
    def name(self) -> str:
        """Returns the name that messages use."""

    @property
    def num_devices(self) -> int:
        """Counts all devices."""


def check(
    plan: Plan, graph: Graph, cluster: Machines | None = None, workload: Workload | None = None
) -> tuple[Problem, ...]:
    """The notes on a plan that can run. PlanError listing every error otherwise."""
    # The graph as it is under the plan: experts that are divided have rules of their own.
    findings = problems(plan, under(graph, plan), cluster, workload)
    if errors := [problem for problem in findings if problem.severity == "error"]:
        raise PlanError("; ".join(problem.message for problem in errors))
    return findings


def problems(
    plan: Plan, graph: Graph, cluster: Machines | None = None, workload: Workload | None = None
) -> tuple[Problem, ...]:
    """Every problem, errors first. What needs a cluster or a workload is checked when it is given."""
    findings = [*_devices(plan, cluster), *_stages(plan, graph)]
    if plan.num_stages > MAX_STAGES:  # what follows looks at every stage
        return tuple(dict.fromkeys(findings))
    findings += [*_schedule(plan), *_selectors(plan, graph)]
    # Rules of dims go stage by stage, and there are no stages to speak of.
    if not any(problem.name == "layers_not_covered" for problem in findings):
        findings += _dims(plan, graph, workload)
    findings += [_error(name, text) for name, text in vocabulary_errors(plan, graph)]
    findings += [*_axes_without_effect(plan, graph), *_batch(plan, workload), *_positions(graph, workload)]
    findings += [*_samples(graph, workload), *_fixed_batch(plan, graph, workload), *_open_sizes(graph, workload)]
    findings += _router(plan, graph, workload)
    findings += _placement(plan, graph)
    unique = dict.fromkeys(findings)
    # Errors first (`error` < `note`), each kind in the order of the checks.
    return tuple(sorted(unique, key=lambda problem: problem.severity))


def batch(plan: Plan, workload: Workload) -> tuple[int, int]:
    """(number of microbatches, sequences in each over all data-parallel ranks), where a method makes microbatches of
    several lengths about so. PlanError when the batch does not divide so."""
    schedule, total = plan.schedule, workload.batch_size
    # ChunkFlow and Skrull form microbatches from the lengths that come; one sequence a rank is their mean.
    if schedule.makes_units and not plan.stages:
        ranks = plan.mesh.data_ranks
        return max(1, total // ranks), ranks
    data_ranks = sorted({plan.stage_mesh(stage).data_ranks for stage in range(plan.num_stages)})
    # Unequal devices: a stage's shares are the sequences of a microbatch that each of its ranks takes (Whale, DAPPLE).
    shares = {sum(stage.shares) for stage in plan.stages if stage.shares}
    if schedule.micro_batch_size is None and schedule.num_microbatches is None and not shares:
        raise PlanError("the schedule has neither micro_batch_size nor num_microbatches; give one of them")
    if len(shares) > 1:
        raise PlanError(
            f"stages share out {sorted(shares)} sequences of a microbatch; every stage sees all of it, so "
            f"make them equal"
        )
    if schedule.micro_batch_size is not None:
        if len(data_ranks) > 1:
            raise PlanError(
                f"micro_batch_size is for one data-parallel rank, but stages have {data_ranks} of them; give "
                f"num_microbatches instead"
            )
        size = schedule.micro_batch_size * data_ranks[0]
        if shares and shares != {size}:
            raise PlanError(
                f"shares add up to {shares.pop()} sequences, but micro_batch_size x data ranks = "
                f"{schedule.micro_batch_size} x {data_ranks[0]} = {size}; leave micro_batch_size out"
            )
    else:
        size = shares.pop() if shares else total // (schedule.num_microbatches or 1)
    count = schedule.num_microbatches or max(1, total // max(size, 1))
    if size < 1 or count * size != total:
        # The nearest multiple of what one step takes, and at least one of it.
        legal = max(1, round(total / max(1, count * size))) * max(1, count * size)
        ranks = data_ranks[-1]
        division = f"{size // ranks} x {ranks} data ranks" if size % ranks == 0 else f"over {ranks} data ranks"
        how_many = f"not {count} microbatches" if schedule.num_microbatches else "no whole number of microbatches"
        raise PlanError(
            f"a global batch of {total} sequences is {how_many} of {size} sequences ({division}); the nearest legal "
            f"global batch is {legal}"
        )
    for index, stage in enumerate(plan.stages):
        if not stage.shares and size % stage.mesh.data_ranks:
            raise PlanError(
                f"stage {index} cannot divide a microbatch of {size} sequences over "
                f"{stage.mesh.data_ranks} data-parallel "
                f"ranks; give it shares, or a multiple of {stage.mesh.data_ranks}"
            )
    if not plan.stages and size % data_ranks[0]:
        raise PlanError(
            f"{count} microbatches of a batch of {total} have {size} sequences, which {data_ranks[0]} "
            f"data-parallel ranks "
            f"cannot share equally; use a number of microbatches that divides {total // data_ranks[0] or 1}"
        )
    return count, size


def _error(name: str, message: str) -> Problem:
    return Problem(severity="error", name=name, message=message)


def _note(name: str, message: str) -> Problem:
    return Problem(severity="note", name=name, message=message)


def _devices(plan: Plan, cluster: Machines | None) -> Iterator[Problem]:
    if cluster is None:
        return
    # By device numbers and not by ranks: under a placement several ranks may take turns on one.
    last = max(plan.device_of)
    if last >= cluster.num_devices or (not plan.placement and plan.num_devices != cluster.num_devices):
        axes = plan.mesh.describe() if not plan.stages else f"{len(plan.stages)} stages"
        fewer = last < cluster.num_devices
        fix = (
            "raise dp_shard or dp_replicate, or choose a smaller cluster"
            if fewer
            else "lower an axis, or choose a larger cluster"
        )
        yield _error(
            "world_size",
            f"plan needs {last + 1} devices ({axes}), but cluster {cluster.name!r} has {cluster.num_devices}; {fix}",
        )


def _stages(plan: Plan, graph: Graph) -> Iterator[Problem]:
    try:
        parts = stage_layers(plan, graph)
    except PlanError as error:
        yield _error("layers_not_covered", str(error))
        return
    labels = [layer.label for part in parts for layer in part]
    missing = [layer.label for layer in graph.layers() if layer.label not in labels]
    # Counting is quadratic, and graphs have thousands of layers; only a plan that is wrong pays for it.
    twice = sorted({label for label in labels if labels.count(label) > 1}) if len(set(labels)) < len(labels) else []
    if missing or twice:
        what = f"leave out {', '.join(missing[:3])}" if missing else f"compute {', '.join(twice[:3])} more than once"
        yield _error("layers_not_covered", f"the stages {what}; every layer of the graph belongs to exactly one stage")
        return
    stage_of = {layer.label: stage for stage, part in enumerate(parts) for layer in part}
    for reader, maker, tensor in dependencies(graph):
        # The first one is enough: every other follows from the same order.
        if stage_of[maker] > stage_of[reader]:
            yield _error(
                "stage_order",
                f"stage {stage_of[reader]} has {reader}, which reads {tensor} of {maker} in stage {stage_of[maker]}; "
                f"order the stages as the graph runs",
            )
            return
    try:
        transfers(plan, graph)
    except PlanError as error:
        yield _error("stage_inputs", str(error))


def _schedule(plan: Plan) -> Iterator[Problem]:
    schedule, ranks = plan.schedule, plan.num_pipeline_ranks
    # Looked at before the schedule's own rules, which take the number of virtual stages as given.
    virtual, rest = divmod(plan.num_stages, ranks)
    count = schedule.num_microbatches
    if rest or (plan.stages and schedule.virtual_stages not in (1, virtual)):
        yield _error(
            "virtual_stages",
            f"{plan.num_stages} stages on {ranks} pipeline ranks are not {schedule.virtual_stages} on each; "
            f"every rank holds "
            f"the same number of stages",
        )
        return
    order = orders.find(schedule.name)
    kind = "v_placement" if order.placement == "v" else "interleaved" if order.looped else "virtual_stages"
    # Listed stages say their devices themselves; the next rule holds these against the order's.
    placement = None if plan.stages else schedule.placement
    if (reason := order.stages_reason(ranks, virtual, placement)) is not None:
        yield _error(kind, reason)
        return
    if plan.pipeline_ranks != (expected := tuple(order.rank_of(stage, ranks) for stage in range(plan.num_stages))):
        yield _error(
            kind,
            f"schedule {order.name} needs its stages on pipeline ranks {list(expected)}, not "
            f"{list(plan.pipeline_ranks)}; change the stages' devices",
        )
    divided = any(mesh.dp_shard * mesh.cp > 1 for mesh in map(plan.stage_mesh, range(plan.num_stages)))
    # Under ZeRO 3 each layer of a stage has rows of its own, between which gathers run; a composite is one row.
    if order.composite and plan.optimizer.zero == 3 and (divided or plan.optimizer.offload_parameters):
        yield _error(
            "composite",
            f"schedule {order.name} has forwards and backwards that are one action, which ZeRO 3 cannot take apart "
            f"into layers; use optimizer.zero = 2, or another schedule",
        )
    if count is not None:
        yield from _microbatch_rules(schedule, count, ranks, virtual)


def _microbatch_rules(schedule: Schedule, count: int, ranks: int, virtual: int) -> Iterator[Problem]:
    """The rule of the schedule's order on microbatches, of each round where there are several."""
    if count % schedule.rounds:
        yield _error("rounds", f"{count} microbatches are not a multiple of rounds = {schedule.rounds}")
        return
    count //= schedule.rounds
    if wrong := orders.find(schedule.name).microbatches(ranks, count, virtual):
        yield _error("microbatches", f"schedule {schedule.name} {wrong}")
    elif count < ranks > 1:
        yield _note(
            "few_microbatches",
            f"{count} microbatches cannot fill {ranks} pipeline ranks: at most {count} of them work at a time; "
            f"use {ranks} or more",
        )


def _selectors(plan: Plan, graph: Graph) -> Iterator[Problem]:
    """Patterns that match nothing: a decision that would be lost in silence."""
    calls = [(f"saved rule {i}", rule.calls) for i, rule in enumerate(plan.saved.rules)]
    calls += [("precision.fp8", text) for text in (plan.precision.fp8.calls if plan.precision.fp8 else ())]
    for index, rule in enumerate(plan.saved.rules):
        if missing_stages := [stage for stage in rule.stages if stage >= plan.num_stages]:
            yield _error(
                "selector",
                f"saved rule {index} is for stage {missing_stages[0]}, but the plan has stages 0 to "
                f"{plan.num_stages - 1}",
            )
    for where, text in calls:
        try:
            select((text,), graph)
        except PlanError as error:
            yield _error("selector", f"{where}: {error}")
    # Patterns are matched against all blocks together: one that fits in any of them is a decision that is carried out.
    ops = {op.path: op for block in graph.blocks for op in block.ops}
    for split in plan.overlap.splits:
        chosen = [path for path in ops if fnmatchcase(path, split.op)]
        if not chosen:
            yield _error("selector", f"split of {split.op!r} matches no op{nearest(split.op, ops)}")
    names = {tensor.name for block in graph.blocks for tensor in block.tensors} | set(ops)
    for rule in plan.saved.rules:
        for pattern in rule.tensors:
            op, colon, _ = pattern.partition(":")  # `path:lse`: what the op at `path` makes for its own backward
            if colon and any(fnmatchcase(path, op) for path in ops):
                continue
            if pattern != INPUT and not any(fnmatchcase(name, pattern) for name in names):
                yield _error("selector", f"saved rule on {pattern!r} matches no tensor or op{nearest(pattern, names)}")
    for layout in plan.layout.rules:
        chosen_blocks = [block for block in graph.blocks if fnmatchcase(block.name, layout.region)]
        if not chosen_blocks:
            names = {block.name for block in graph.blocks}
            yield _error(
                "selector", f"layout rule region {layout.region!r} matches no block{nearest(layout.region, names)}"
            )
            continue
        dims = {dim.name for block in chosen_blocks for dim in block.dims}
        crossing = {
            atom.name
            for block in graph.blocks
            for name in (*block.inputs, *block.outputs)
            for atom in block.tensor(name).atoms
        }
        # The tensor would leave one block divided and enter the next whole, with no collective between.
        if layout.region != "*" and layout.dim in crossing:
            yield _error(
                "layout_region",
                f"layout rule on {layout.dim!r} is for {layout.region!r} only, but tensors between blocks have that "
                f"dim; use region = '*'",
            )
        if layout.dim not in dims:
            yield _error(
                "selector", f"layout rule on dim {layout.dim!r} matches no dim of the graph{nearest(layout.dim, dims)}"
            )


def _dims(plan: Plan, graph: Graph, workload: Workload | None) -> Iterator[Problem]:
    for stage, layers in enumerate(stage_layers(plan, graph)):
        mesh = plan.stage_mesh(stage)
        # Each block once a stage, however many layers it has.
        for name in dict.fromkeys(layer.call.block for layer in layers):
            for dim in graph.block(name).dims:
                if (rule := _DIM_RULES.get(_base(dim))) and not _kept_whole(plan, mesh, name, dim):
                    yield from rule(plan, mesh, dim)
        if any(_mixes(graph, layer) for layer in layers):
            yield from _sequence(plan, mesh, workload)


def _kept_whole(plan: Plan, mesh: Mesh, block: str, dim: Dim) -> bool:
    """Whether a layout rule has all of a dim on each rank; Ulysses divides heads over cp all the same."""
    rules = (rule for rule in plan.layout.rules if rule.dim == dim.name and fnmatchcase(block, rule.region))
    return any(not rule.axes for rule in rules) and (mesh.cp == 1 or plan.layout.context != "ulysses")


def _mixes(graph: Graph, layer: Layer) -> bool:
    """Whether tokens of a layer see others."""
    ops: tuple[GraphOp, ...] = graph.block(layer.call.block).ops
    return any(op.does in ("attends", "scans") for op in ops)


def _base(dim: Dim) -> str:
    """What a dim is, whatever its scope: `vision.heads` is `heads`. Empty if no rule is about it."""
    # From the left: of `vision.heads.2` the number behind tells heads of different sizes apart.
    return next((part for part in dim.name.split(".") if part in _DIM_RULES), "")


def _divides(name: str, axis: str, ways: int, dim: Dim) -> Iterator[Problem]:
    size = dim.size
    if size is not None and size % ways:
        # Of two equally near the smaller one, which divides less.
        legal = min((d for d in range(1, size + 1) if size % d == 0), key=lambda d: (abs(d - ways), d))
        yield _error(name, f"{axis} = {ways} does not divide {dim.name} = {size}; the nearest legal {axis} is {legal}")


def _head_ways(plan: Plan, mesh: Mesh) -> tuple[str, int]:
    """Into how many parts heads are cut: over tp, and under Ulysses over cp too."""
    if plan.layout.context == "ulysses" and mesh.cp > 1:
        return "tp x cp", mesh.tp * mesh.cp
    return "tp", mesh.tp


def _heads(plan: Plan, mesh: Mesh, dim: Dim) -> Iterator[Problem]:
    axis, ways = _head_ways(plan, mesh)
    for problem in _divides("heads_not_divisible", axis, ways, dim):
        remedy = ", or context = 'ring' or 'all_gather', which divide the sequence alone" if axis != "tp" else ""
        yield replace(problem, message=problem.message + remedy)


def _kv_heads(plan: Plan, mesh: Mesh, dim: Dim) -> Iterator[Problem]:
    axis, ways = _head_ways(plan, mesh)
    # Grouped-query attention with fewer heads than ranks, as Megatron-LM runs it.
    if dim.size is not None and dim.size < ways and ways % dim.size == 0:
        yield _note(
            "kv_heads_replicated",
            f"{axis} = {ways} is above {dim.name} = {dim.size}: each key-value head is held by {ways // dim.size} "
            f"ranks, and the gradients of its weights are added up over them",
        )
    else:
        yield from _divides("kv_heads_not_divisible", axis, ways, dim)


def _ssm_groups(plan: Plan, mesh: Mesh, dim: Dim) -> Iterator[Problem]:
    """A scan has whole sequences of some groups of heads, whatever exchanges context in attention."""
    axis = "tp x cp" if mesh.cp > 1 else "tp"
    yield from _divides("ssm_groups_not_divisible", axis, mesh.tp * mesh.cp, dim)


def _ffn(plan: Plan, mesh: Mesh, dim: Dim) -> Iterator[Problem]:
    yield from _divides("ffn_not_divisible", "tp", mesh.tp, dim)


def _expert_ffn(plan: Plan, mesh: Mesh, dim: Dim) -> Iterator[Problem]:
    yield from _divides("expert_ffn_not_divisible", "etp", mesh.etp, dim)


def _experts(plan: Plan, mesh: Mesh, dim: Dim) -> Iterator[Problem]:
    yield from _divides("experts_not_divisible", "ep", mesh.ep, dim)


def _vocab(plan: Plan, mesh: Mesh, dim: Dim) -> Iterator[Problem]:
    # Padding rows of a table costs next to nothing, so this is a note; heads cannot be padded.
    if plan.layout.vocab_parallel and dim.size is not None and dim.size % mesh.tp:
        padded = -(-dim.size // mesh.tp) * mesh.tp
        yield _note("vocab_padded", f"tp = {mesh.tp} does not divide {dim.name} = {dim.size}; it is padded to {padded}")


_DIM_RULES: dict[str, Callable[[Plan, Mesh, Dim], Iterator[Problem]]] = {
    "heads": _heads,
    "kv_heads": _kv_heads,
    "ssm_groups": _ssm_groups,
    "ffn": _ffn,
    "shared_ffn": _ffn,
    "expert_ffn": _expert_ffn,
    "experts": _experts,
    "vocab": _vocab,
}


def sequence_parts(plan: Plan, mesh: Mesh) -> tuple[int, list[str]]:
    """(parts that a sequence divides into on a mesh, what each factor is for)."""
    parts, why = 1, []
    if mesh.cp > 1:
        # Under Ulysses every rank has whole sequences in attention: there is no mask to even out.
        zigzag = plan.layout.context_order == "zigzag" and plan.layout.context != "ulysses"
        parts *= mesh.cp * (2 if zigzag else 1)
        why.append(f"{'2 x ' if zigzag else ''}cp = {parts}")
    if plan.layout.sequence_parallel and mesh.tp > 1:
        parts *= mesh.tp
        why.append(f"tp = {mesh.tp} (sequence parallel)")
    return parts, why


def _sequence(plan: Plan, mesh: Mesh, workload: Workload | None) -> Iterator[Problem]:
    """Whether the sequence divides into what the axes need."""
    # Several lengths: each is padded by itself to what its ranks divide.
    if workload is None or not workload.seq_len:
        return
    parts, why = sequence_parts(plan, mesh)
    if workload.seq_len % parts:
        legal = max(1, round(workload.seq_len / parts)) * parts
        yield _error(
            "sequence_not_divisible",
            f"seq_len = {workload.seq_len} does not divide into {' x '.join(why)} parts; the nearest legal "
            f"length is {legal}",
        )


def learned_positions(graph: Graph) -> int | None:
    """Tokens of the longest sequence that the model's learned positions reach; None for a model without such."""
    ops = ((block, op) for block in graph.blocks for op in block.ops if op.does == "looks up")
    tables = (block.tensor(op.inputs[1]).dims[0] for block, op in ops)
    sizes = [dim.size for dim in tables if dim.name.split(".")[-1] == "positions" and dim.size is not None]
    return min(sizes, default=None)


def sample_tokens(graph: Graph) -> int | None:
    """Tokens of a sample where the graph gives them: the patches of an image, 1 for a model without sequences (a
    U-Net). None for a model of sequences, whose tokens the workload gives."""
    sizes = [dim.size for block in graph.blocks for dim in block.dims if dim.name == "seq"]
    return None if None in sizes else max((size for size in sizes if size is not None), default=1)


def open_dims(graph: Graph) -> tuple[str, ...]:
    """Dims whose sizes the workload gives beside the batch and the sequence, as `enc_seq` of an encoder-decoder."""
    atoms = (atom for block in graph.blocks for dim in block.dims for atom in dim.atoms)
    names = dict.fromkeys(atom.name for atom in atoms if atom.size is None and not atom.same_as)
    return tuple(name for name in names if name not in ("batch", "seq"))


def _open_sizes(graph: Graph, workload: Workload | None) -> Iterator[Problem]:
    """Whether the workload gives every size that the graph leaves to it, and no other."""
    if workload is None:
        return
    open_names, stated = open_dims(graph), dict(workload.sizes)
    every = {atom.name for block in graph.blocks for dim in block.dims for atom in dim.atoms} if stated else set()
    for name in open_names:
        if name not in stated:
            yield _error(
                "size_not_given",
                f"{graph.name} leaves the size of {name!r} open; give --size {name}=512, or in Python "
                f"Workload(sizes=(({name!r}, 512),), ...)",
            )
    for name in stated:
        if name not in every:
            known = (
                f"its open sizes are {', '.join(open_names)}" if open_names else "it leaves no size open; leave it out"
            )
            yield _error("size_not_open", f"{graph.name} has no open size {name!r}{nearest(name, open_names)}; {known}")


def _samples(graph: Graph, workload: Workload | None) -> Iterator[Problem]:
    """Whether the workload has as many tokens a sample as the graph."""
    fixed = sample_tokens(graph)
    if workload is None or fixed is None:
        return
    if other := [length for length in workload.sequence_lengths() if length != fixed]:
        what = "takes no sequences: a sample counts as 1 token" if fixed == 1 else f"has {fixed} tokens a sample"
        yield _error(
            "sample_tokens",
            f"sequences of {other[0]} tokens, but {graph.name} {what}; use seq_len = {fixed} (leave --seq-len out)",
        )


def fixed_batch(graph: Graph) -> int | None:
    """Samples of a rank's microbatch where the graph holds for one number only; None for any."""
    return max((d.size or 0 for block in graph.blocks for d in block.dims if d.name == "batch"), default=0) or None


def _fixed_batch(plan: Plan, graph: Graph, workload: Workload | None) -> Iterator[Problem]:
    """Whether a rank's microbatch is the batch of a graph that holds for one batch only."""
    fixed_rows, each = fixed_batch(graph), set[float]()
    with suppress(PlanError):  # of a batch that does not divide, which is said elsewhere
        if workload is not None and fixed_rows is not None:
            rows = batch(plan, workload)[1]
            each = {rows / plan.stage_mesh(stage).data_ranks for stage in range(plan.num_stages)} - {fixed_rows}
    for here in sorted(each):
        yield _error(
            "fixed_batch",
            f"{here:g} samples in a rank's microbatch, but {graph.name} was captured at {fixed_rows} and does "
            "something "
            f"else at others; use micro_batch_size = {fixed_rows}",
        )


def _positions(graph: Graph, workload: Workload | None) -> Iterator[Problem]:
    """Whether learned positions reach to the end of the longest sequence."""
    if workload is None:
        return
    longest, most = max(workload.sequence_lengths(), default=0), learned_positions(graph)
    if most is not None and longest > most:
        yield _error(
            "sequence_too_long",
            f"sequences of {longest} tokens, but {graph.name} has learned positions for {most}; the longest legal "
            f"seq_len is {most}",
        )


def _router(plan: Plan, graph: Graph, workload: Workload | None) -> Iterator[Problem]:
    """Whether routing as the workload has it can be, and what it does to the busiest rank."""
    if workload is None or workload.router == RouterLoad():
        return
    router = load_under(workload.router, plan.experts)
    sizes = {(_size(block, "experts"), _size(block, "topk")) for block in graph.blocks} - {(0, 0)}
    if not sizes:
        yield _note("no_effect", f"the router's load has no effect: graph {graph.name!r} has no experts")
    for experts, chosen in sorted(sizes):
        try:
            shares = router.shares(experts)
            most = float(shares.max())
        except PlanError as error:
            yield _error("router_counts", str(error))
            continue
        if chosen and most > 1 / chosen + 1e-9:
            yield _error(
                "router_share",
                f"the router sends {most:.0%} of its (token, expert) pairs to one expert, but a token goes to {chosen} "
                f"different experts, so that none gets more than 1/{chosen}; use a flatter load",
            )
            continue
        routed = [layer.label for layer in graph.layers() if graph.block(layer.call.block).does("dispatches")]
        if router.layers and len(router.layers) != len(routed):
            yield _error(
                "router_layers",
                f"router record has {len(router.layers)} layers, but graph {graph.name!r} has {len(routed)} with "
                f"experts; record this model's (gnomon run --record-router)",
            )
            continue
        ep = max(plan.stage_mesh(stage).ep for stage in range(plan.num_stages))
        if experts % ep:
            continue  # said already
        try:
            load = busiest(router, plan.experts.placement, experts, ep)
        except PlanError:
            continue  # as above
        text = f"the busiest of ep = {ep} ranks computes and holds {load:.2f} times the mean rows"
        if router.layers:
            worst = routed[int(shares.max(axis=1).argmax())]
            text += (
                f", the mean over {len(routed)} layers of what the recorded steps sum up to; most uneven is {worst}, "
                f"whose busiest expert gets {most * experts:.2f} times the mean"
            )
        if router.capacity:
            padded = ", and every expert computes its whole capacity" if router.padded else ""
            lost = f"{router.dropped(experts):.1%} of (token, expert) pairs"
            text += f"; capacity {router.capacity:g} drops {lost}{padded}"
        yield _note("router_load", f"router load {router.kind}: {text}")


def _placement(plan: Plan, graph: Graph) -> Iterator[Problem]:
    """Whether experts can lie on ranks as the plan places them."""
    expert_plan, ep = plan.experts, max(plan.stage_mesh(stage).ep for stage in range(plan.num_stages))
    if not (expert_plan.replicas or expert_plan.placement or expert_plan.rebalance_every or expert_plan.speculate):
        return
    routed = [
        _size(graph.block(layer.call.block), "experts")
        for layer in graph.layers()
        if graph.block(layer.call.block).does("dispatches")
    ]
    named = next(
        f"experts.{name} = {value}" if name not in ("placement", "speculate") else f"experts.{name}"
        for name in ("replicas", "placement", "rebalance_every", "speculate")
        if (value := getattr(expert_plan, name))
    )
    if not routed:
        yield _error("no_experts", f"{named} is about routed experts, and {graph.name!r} has none; leave it out")
        return
    if any(plan.stage_mesh(stage).ep != ep for stage in range(plan.num_stages)):
        yield _error("replicas", f"{named} with stages of unlike ep; give every stage the same")
        return
    if ep == 1:
        yield _error("replicas", f"{named} places experts on ranks of ep, and ep = 1; use ep of 2 or more")
        return
    rows = expert_plan.placement
    if len(rows) > 1 and len(rows) != len(routed):
        yield _error(
            "placement_layers",
            f"experts.placement has {len(rows)} rows, but {graph.name!r} has {len(routed)} layers with experts; give "
            f"one for each, or one for all",
        )
        return
    try:
        for experts in dict.fromkeys(routed):
            slots(experts, expert_plan.replicas, ep)
        for row, experts in dict.fromkeys(zip(rows if len(rows) > 1 else rows * len(routed), routed, strict=False)):
            check_placement(row, experts, expert_plan.replicas, ep)
    except PlanError as error:
        yield _error("placement", str(error))


def _size(block: Block, name: str) -> int:
    """The size of a block's dim of that base name; 0 without one."""
    return next((dim.size for dim in block.dims if dim.name.split(".")[-1] == name and dim.size), 0)


def _axes_without_effect(plan: Plan, graph: Graph) -> Iterator[Problem]:
    meshes = [plan.stage_mesh(stage) for stage in range(plan.num_stages)]
    routes = any(block.does("dispatches") for block in graph.blocks)
    if not routes and (ep := max(mesh.ep * mesh.etp for mesh in meshes)) > 1:
        yield _error("no_experts", f"ep x etp = {ep}, but {whole_experts(graph)}; use ep = 1 and etp = 1")
    if routes and max(mesh.tp for mesh in meshes) > 1 and not plan.layout.sequence_parallel:
        yield _error(
            "experts_need_sequence_parallel",
            f"graph {graph.name!r} has experts and tp = {max(mesh.tp for mesh in meshes)} without "
            f"sequence_parallel: every tp "
            f"rank would send the same tokens; set layout.sequence_parallel = true (--sequence-parallel)",
        )
    if plan.overlap.experts and not divides_experts(plan):
        yield _note("no_effect", "overlap.experts has no effect: ep x etp = 1, so no tokens go to other ranks")
    if plan.layout.sequence_parallel and all(mesh.tp == 1 for mesh in meshes):
        yield _note("no_effect", "sequence_parallel has no effect at tp = 1")
    away = plan.optimizer.offload_parameters
    if away and plan.optimizer.zero != 3:
        yield _error(
            "parameters_on_host",
            f"optimizer.offload_parameters copies parameters to the device block by block, as ZeRO 3 gathers them, but "
            f"optimizer.zero = {plan.optimizer.zero}; use zero = 3",
        )
    if plan.optimizer.low_rank is not None and (divided := _divides_gradients(plan, meshes)):
        yield _error(
            "low_rank_divided",
            f"optimizer.low_rank projects whole gradients of matrices, which {divided} divides; use data parallelism "
            f"with optimizer.zero = 0",
        )
    if plan.overlap.optimizer:
        yield from _update_in_backward(plan)
    if plan.optimizer.parameter_tier == "disk" and not away:
        yield _error(
            "parameters_on_disk", "optimizer.parameter_tier = 'disk' has an effect with offload_parameters = true only"
        )
    if plan.optimizer.zero and not away and all(mesh.dp_shard * mesh.cp == 1 for mesh in meshes):
        yield _note(
            "no_effect",
            f"ZeRO {plan.optimizer.zero} has no effect: dp_shard x cp = 1, so there is nothing to divide over",
        )
    if plan.optimizer.zero == 3 and plan.num_stages > 1 and plan.optimizer.reshard_after_forward:
        yield _note(
            "gathers", "ZeRO 3 in a pipeline gathers every stage's parameters again for each microbatch and direction"
        )


def _divides_gradients(plan: Plan, meshes: Sequence[Mesh]) -> str:
    """The field that divides the gradient of a matrix over ranks, or moves its update; empty where none does."""
    if plan.optimizer.zero and any(mesh.dp_shard * mesh.cp > 1 for mesh in meshes):
        return f"optimizer.zero = {plan.optimizer.zero}"
    if any(mesh.tp * mesh.etp > 1 for mesh in meshes):
        return "tp"
    return "optimizer.offload" if plan.optimizer.offload is not None else ""


def _update_in_backward(plan: Plan) -> Iterator[Problem]:
    """What an update right after each gradient forbids."""
    if plan.optimizer.clip:
        yield _error(
            "no_norm",
            "overlap.optimizer updates each parameter before the gradients of others are there, so there is no norm "
            "of all of them to clip by; set optimizer.clip = false",
        )
    if plan.optimizer.offload is not None or plan.optimizer.zero in (1, 2):
        option = "offload" if plan.optimizer.offload is not None else f"zero = {plan.optimizer.zero}"
        yield _error(
            "update_in_backward",
            f"overlap.optimizer updates on the device where a gradient is made, and optimizer.{option} updates shards "
            f"after the backward; use zero = 0 or 3, and no offload",
        )


def _batch(plan: Plan, workload: Workload | None) -> Iterator[Problem]:
    if workload is None:
        return
    try:
        count, _ = batch(plan, workload)
    except PlanError as error:
        yield _error("batch", str(error))
        return
    if plan.overlap.optimizer and count > 1:
        yield _error(
            "one_backward",
            f"overlap.optimizer updates after the first gradient of a step, which has {count} microbatches; make it "
            f"one (schedule.micro_batch_size)",
        )
    if plan.schedule.num_microbatches is None:
        ranks = plan.num_pipeline_ranks
        yield from _microbatch_rules(plan.schedule, count, ranks, plan.num_stages // ranks)
