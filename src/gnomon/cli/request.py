"""What `gnomon predict` was asked, as values: graph, cluster, plan, workload, stack.

`read_request(options)` reads files and options and returns a `Request`, with every default that was filled in listed in
`assumed`. InputError, PlanError or CatalogueError say what is wrong. Leaves out predicting.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gnomon import orders
from gnomon.cli.models import read_model
from gnomon.cli.options.job import (
    PASTED,
    AdapterOptions,
    BatchOptions,
    JobFileOptions,
    PrecisionOption,
    TrainingOptions,
)
from gnomon.cli.own import with_own
from gnomon.cli.values import quantity
from gnomon.errors import InputError, PlanError
from gnomon.formats.given import SEQ_LEN, parse_settings
from gnomon.graph import Graph
from gnomon.hardware import Cluster, parse_cluster, with_host_memory
from gnomon.late import load_late
from gnomon.models.lora import Adapters, parse_adapters
from gnomon.models.t5 import ENC_SEQ
from gnomon.orders.interleaved_one_f_one_b import ORDER as INTERLEAVED
from gnomon.plans import (
    Mesh,
    Plan,
    PlanFile,
    Precision,
    RouterLoad,
    Saved,
    Schedule,
    Workload,
    is_plan_file,
    load_plan,
)
from gnomon.plans.check import learned_positions, open_dims, sample_tokens
from gnomon.plans.precision import PRECISIONS, default_precision
from gnomon.plans.workload import MAX_SEQUENCES, whole_sequences
from gnomon.prediction.predict import PLAIN_STACK
from gnomon.request.model import check_there, is_a_file, is_code, read_source, too_long, with_inputs
from gnomon.software import Stack, able
from gnomon.software import stack as named_stack
from gnomon.units import parse_bytes, parse_count

if TYPE_CHECKING:
    from gnomon.formats.job import Job
    from gnomon.search.fit.terms import Terms

IMAGE_TOKENS = 2**14
"""Patches of the samples of a microbatch where nobody says how many there are: what keeps a device busy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Everything that a prediction needs."""

    graph: Graph
    """The model."""
    cluster: Cluster
    """The machines."""
    plan: Plan
    """Every decision."""
    workload: Workload
    """The batch."""
    stack: Stack
    """The program."""
    assumed: tuple[str, ...]
    """What was not said, and how it was filled in."""
    notes: tuple[str, ...]
    """What the model's or the job's file says that is not predicted."""
    job: Job | None
    """The job file as it was read; None where there is none."""

    @property
    def terms(self) -> Terms | None:
        """The job file's own words for changes; None where they are not known."""
        return None if self.job is None else self.job.terms


def request_of_plan(path: str) -> Request:
    """The request of a plan file, as it is."""
    return read_request(TrainingOptions(plan=path))


def job_request(path: str | None, options: JobFileOptions, on: str | None) -> Request:
    """The request of a job file, or of anything else that trains, with the options beside one. path: None for the file
    that --from names. on: machines; None where the file says them."""
    shared = {field.name: getattr(options, field.name) for field in fields(JobFileOptions)}
    return read_request(TrainingOptions(model=path, on=on, **shared))


def read_request(given_options: TrainingOptions, lengths: tuple[int, ...] = ()) -> Request:
    """The request of options of training. lengths: of every sequence of the batch, in place of one length of all."""
    options = _plan_as_model(given_options)
    given_plan = None if options.plan is None else load_plan(options.plan)
    file = given_plan if isinstance(given_plan, PlanFile) else None
    # Before the machines: of a file that is no job, that is what is wrong.
    source = load_late("gnomon.cli.jobs:job_file")(options) if _may_be_job(options) else None
    machines = _machines(options, file)
    assumed: list[str] = []
    job: Job | None = None
    named = options.model
    if source is not None:
        # MODEL was the job's file itself unless --from says which program's; then the word is a model beside it.
        named = options.network or (named if options.source is not None else None)
        job = load_late("gnomon.cli.jobs:read_job")(source, options, named, machines.num_devices)
        assumed += load_late("gnomon.cli.jobs:said_of")(job, machines.num_devices)
    named = adapted_name(options, named)
    if named is not None:
        named = with_inputs(named, options.inputs, options.seq_len)
    graph, notes = _model(named or (file.model if file else None), job, options)
    base = _base_plan(given_plan, job)
    # A job's or plan's precision stands although the devices' default may be another: it is a decision of somebody.
    start = base or Plan(precision=given_precision(options, machines, assumed))
    # --precision also fills in what a file leaves to its trainer; the rest of the file's dtypes then stays.
    filled = job is not None and options.precision == job.plan.precision.compute
    # The mesh of a given plan stays as it is; without one, dp_shard takes all devices that are left.
    changed = _changed(start, options, machines, keep_mesh=base is not None, keep_precision=filled)
    workload_given = job.workload if job else file.workload if file else None
    plan = _with_batch(changed, graph, options, workload_given, assumed)
    workload = with_sizes(_workload(graph, plan, options, lengths, workload_given, assumed), graph, options, assumed)
    trained = named or (file.model if file else graph.name)
    if warning := too_long(trained, max(workload.sequence_lengths(), default=0)):
        assumed.append(warning)
    if job is not None:
        notes += load_late("gnomon.cli.jobs:notes_of")(job)
    name = options.stack if options.stack is not None or file is None else file.stack or None
    # A job that runs shows that its program can do what it asks, whatever the record of that program says.
    given_stack = able(job.stack, job.plan, "the job's own file") if job else PLAIN_STACK
    stack = named_stack(name) if name is not None else given_stack
    stack = with_own(stack, machines, options, assumed)
    return Request(
        graph=graph,
        cluster=machines,
        plan=plan,
        workload=workload,
        stack=stack,
        assumed=tuple(assumed),
        notes=notes,
        job=job,
    )


def _may_be_job(options: TrainingOptions) -> bool:
    """Whether the options may name a job file: only then are its readers loaded."""
    name = options.model or ""
    # Each of these has a meaning only beside a job's file.
    is_job = options.source is not None or options.network is not None or options.arguments is not None
    return is_job or name == PASTED or is_a_file(name)


def _plan_as_model(options: TrainingOptions) -> TrainingOptions:
    """`gnomon predict plan.toml` is `gnomon predict --plan plan.toml`, as other commands take a plan file."""
    path = options.model
    # The likeliest mistake of all is a path with a typo; it is said before anything else of the options can be wrong.
    if path and not is_code(path):
        check_there(parse_adapters(path)[0])
    if options.plan is None and options.source is None and path and path.endswith(".toml"):
        if is_plan_file(path):
            return replace(options, plan=path, model=None)
    return options


def adapted_name(options: AdapterOptions, name: str | None) -> str | None:
    """The model's name with the adapters that the options ask for. InputError for targets without a rank, and for
    adapters on a model that has some or is not named."""
    if options.lora_rank is None:
        if options.lora_targets is not None or options.lora_base is not None:
            raise InputError("--lora-targets and --lora-base say what --lora-rank adds; give --lora-rank, as in 16")
        return name
    if name is None or parse_adapters(name)[1] is not None:
        raise InputError("--lora-rank adds adapters to a MODEL that has none; name one, as in llama-3.1-8b")
    targets = tuple(part.strip() for part in (options.lora_targets or "").split(",") if part.strip())
    return f"{name}{Adapters(rank=options.lora_rank, targets=targets, base=options.lora_base or 'compute')}"


def _model(name: str | None, job: Job | None, options: TrainingOptions) -> tuple[Graph, tuple[str, ...]]:
    if job is not None:
        # A file that names a model by its Hub name has no shape in it: what the user named beside it is read then.
        return (job.graph(), ()) if name is None or job.model is not None else read_model(name)
    for option, is_set in (("--vocab-size", options.vocab_size is not None), ("--strict", options.strict)):
        if is_set and name is not None and not (is_a_file(name) or Path(name).is_dir() or is_code(name)):
            raise InputError(f"{option} is for what a file leaves open, and {name[:64]!r} is a name; leave it out")
    if name is None:
        raise InputError("no model; give a name (`gnomon catalogue models`), a config.json, or a job file")
    return read_model(name, settings=parse_settings(options.settings), strict=options.strict)


def _machines(options: TrainingOptions, file: PlanFile | None) -> Cluster:
    if options.on is None and file is None:
        raise InputError("no machines; give --on CLUSTER, as in 4x8xh100-sxm, or a plan file that says it")
    machines = parse_cluster(options.on or (file.on if file else ""))
    if options.host_memory is None:
        return machines
    size = quantity("--host-memory", parse_bytes, options.host_memory)
    if size <= 0:
        raise InputError(f"--host-memory {options.host_memory} must be more than nothing, as in 512GiB")
    return with_host_memory(machines, size)


def _base_plan(given_plan: PlanFile | Plan | None, job: Job | None) -> Plan | None:
    if given_plan is not None and job is not None:
        raise InputError("--plan and --from both give a plan; use one of them")
    if given_plan is not None:
        return given_plan.plan if isinstance(given_plan, PlanFile) else given_plan
    return None if job is None else job.plan


def _changed(plan: Plan, options: TrainingOptions, machines: Cluster, *, keep_mesh: bool, keep_precision: bool) -> Plan:
    """The plan with what the options say."""
    changes: dict[str, Any] = {}
    axes = ("tp", "pp", "cp", "ep", "dp_shard", "dp_replicate")
    axis_sizes = {axis: size for axis in axes if (size := getattr(options, axis)) is not None}
    if axis_sizes or not keep_mesh:
        if plan.stages:
            raise PlanError("the plan lists its stages, each with a mesh; change the axes there, not by options")
        changes["mesh"] = _mesh(plan.mesh, axis_sizes, machines.num_devices)
    if options.zero is not None:
        changes["optimizer"] = replace(plan.optimizer, zero=options.zero)
        # ZeRO 3 reduces each layer's gradients as its backward ends: a bucket size would mean nothing, and is refused
        # by check.
        if options.zero == 3 and plan.optimizer.zero < 3:  # which has neither, as a file of another stage may
            changes["overlap"] = replace(plan.overlap, grad_reduce=True, bucket_bytes=None, buckets=())
    if options.recompute is not None:
        changes["saved"] = Saved(preset=options.recompute)
    # Whole records, as `bf16` says the dtypes of parameters, gradients and states together.
    if options.precision is not None and not keep_precision:
        changes["precision"] = PRECISIONS[options.precision]
    mesh = changes.get("mesh", plan.mesh)
    if options.context is not None and mesh.cp == 1 and not plan.stages:
        raise InputError(f"--context {options.context} says how cp ranks share a sequence, and cp is 1; give --cp too")
    layout: dict[str, Any] = {"sequence_parallel": True} if options.sequence_parallel else {}
    layout |= {"context": options.context} if options.context is not None else {}
    if layout:
        changes["layout"] = replace(plan.layout, **layout)
    return replace(plan, schedule=_schedule(plan.schedule, options), **changes)


def given_precision(options: PrecisionOption, machines: Cluster, assumed: list[str]) -> Precision:
    """Returns the precision of `--precision`; without it the devices' default."""
    if options.precision is not None:
        return PRECISIONS[options.precision]
    precision = default_precision(machines)
    if precision.compute != "bf16":
        assumed.append(f"precision not given: {precision.compute}, as the devices have no bf16 (--precision)")
    return precision


def _mesh(mesh: Mesh, axis_sizes: dict[str, int], devices: int) -> Mesh:
    """The mesh with the given axes; dp_shard takes the devices that remain unless it is given too."""
    sizes = {axis: getattr(mesh, axis) for axis in ("tp", "pp", "cp", "dp_replicate")} | axis_sizes
    # The axis that takes the rest is dp_shard even without ZeRO: then it is plain data parallelism under the field's
    # newer name.
    if "dp_shard" not in axis_sizes:
        rest = sizes["tp"] * sizes["pp"] * sizes["cp"] * sizes["dp_replicate"]
        if devices % rest:
            legal = [n for n in range(1, devices + 1) if devices % n == 0]
            # Only divisors, so that what is proposed works as it stands.
            near = min(legal, key=lambda n: abs(n - rest))
            raise PlanError(
                f"the cluster has {devices} devices, which tp x pp x cp x dp_replicate = {sizes['tp']} x {sizes['pp']} "
                f"x {sizes['cp']} x {sizes['dp_replicate']} = {rest} does not divide; the nearest product that does is "
                f"{near}"
            )
        sizes["dp_shard"] = devices // rest
    return replace(mesh, **sizes)


def _schedule(schedule: Schedule, options: TrainingOptions) -> Schedule:
    changes: dict[str, Any] = {}
    if options.schedule is not None:
        changes["name"] = options.schedule
    if options.vpp is not None:
        changes["virtual_stages"] = options.vpp
        # More stages than ranks mean nothing to 1F1B; who gives --vpp alone wants its interleaved form, as Megatron-LM
        # switches.
        if options.vpp > 1 and options.schedule is None and schedule.name == orders.DEFAULT:
            changes["name"] = INTERLEAVED.name
    order = orders.find(str(changes.get("name", schedule.name)))
    # V-shaped schedules (zero bubble V, V-half) put the first and the last stage on one rank: their placement is no
    # choice.
    if "name" in changes and order.placement == "v":
        changes |= {"virtual_stages": options.vpp or order.stages[0], "placement": order.placement}
    if options.layers_per_stage is not None:
        changes["layers_per_stage"] = options.layers_per_stage
    if options.micro_batch_size is not None:
        # Either follows from the other and the batch; both would have to agree.
        changes |= {"micro_batch_size": options.micro_batch_size, "num_microbatches": None}
    return replace(schedule, **changes)


def _with_batch(
    plan: Plan, graph: Graph, options: TrainingOptions, workload_given: Workload | None, assumed: list[str]
) -> Plan:
    """The plan with a micro batch, where nobody gave one: a sequence; of images as many as keep a device busy."""
    if plan.schedule.micro_batch_size is not None or plan.schedule.num_microbatches is not None:
        return plan
    size, tokens = 1, sample_tokens(graph) or 0
    if tokens > 1:
        batch = given_batch(options, tokens) or (workload_given.batch_size if workload_given else None)
        # By pipeline ranks too: a pipeline wants at least as many microbatches as it has ranks.
        units, rest = divmod(batch or 0, plan.stage_mesh(0).data_ranks * plan.num_pipeline_ranks)
        most = max(1, IMAGE_TOKENS // tokens)
        if batch is None:
            size = most
        elif not rest:
            # The largest that divides, so that all microbatches are alike.
            size = max(n for n in range(1, most + 1) if units % n == 0)
    what = "sequence" if tokens == 0 else "sample"
    count = f"{size} {what}{'s' if size > 1 else ''}"
    assumed.append(f"micro batch not given: {count} on each data-parallel rank (--micro-batch-size)")
    return replace(plan, schedule=replace(plan.schedule, micro_batch_size=size))


def default_seq_len(graph: Graph) -> tuple[int, str]:
    """(tokens of a sequence when nobody says, what is assumed with them)."""
    fixed = sample_tokens(graph)
    if fixed is not None:
        what = (
            "the model takes no sequences: a sample" if fixed == 1 else f"a sample of the model has {fixed} tokens and"
        )
        return fixed, f"{what} counts as one in samples/s"
    seq_len = min(SEQ_LEN, learned_positions(graph) or SEQ_LEN)
    return seq_len, f"sequence length not given: {seq_len} tokens (--seq-len)"


MOST_TOKENS = 2**28
"""Of a step: four times the largest batches that models were trained with. Beyond, tokens were meant where
sequences are asked for, or all of the training in place of a step."""


def given_batch(options: BatchOptions, seq_len: int) -> int | None:
    """Sequences of a step from `--global-batch` or `--tokens-per-batch`; None without either. InputError for more
    tokens than any step has, whose prediction would take minutes."""
    tokens = tokens_per_batch(options)
    if tokens is not None:
        if tokens > MOST_TOKENS:
            raise InputError(
                f"--tokens-per-batch {options.tokens_per_batch} is over the limit of {MOST_TOKENS:,} tokens; give "
                f"those of one optimizer step, not of the training (--tokens, with --deadline)"
            )
        return whole_sequences(tokens, seq_len)
    batch: int | None = options.global_batch
    # Above MAX_SEQUENCES the workload itself refuses, in words of its own.
    if batch is not None and batch <= MAX_SEQUENCES and batch * seq_len > MOST_TOKENS:
        raise InputError(
            f"--global-batch {batch} is {batch * seq_len:,} tokens a step ({batch:,} sequences of {seq_len:,}), over "
            f"the limit of {MOST_TOKENS:,}; if {batch:,} are tokens, write --tokens-per-batch {batch}"
        )
    return batch


def tokens_per_batch(options: BatchOptions) -> int | None:
    """Tokens of `--tokens-per-batch`, in which k and M are 1,024 and its square, as batches of sequences are named."""
    if options.tokens_per_batch is None:
        return None
    if options.global_batch is not None:
        raise InputError("--global-batch and --tokens-per-batch both give the batch; use one of them")
    text: str = options.tokens_per_batch.strip()
    tokens = quantity("--tokens-per-batch", tokens_of, text)
    if tokens < 1:
        raise InputError(f"--tokens-per-batch {text[:40]!r} must be at least 1")
    return tokens


def given_router(options: BatchOptions, before: RouterLoad, graph: Graph) -> RouterLoad:
    """The load of `--router`, `--capacity` and `--pad-experts`; what they do not say stays as it was. InputError where
    they are given and the model has no experts."""
    router_options = [name for name in ("router", "capacity", "pad_experts") if getattr(options, name) is not None]
    if router_options and not any(dim.name.split(".")[-1] == "experts" for block in graph.blocks for dim in block.dims):
        option = router_options[0].replace("_", "-")
        raise InputError(f"--{option} says how tokens spread over experts, and {graph.name} has none; leave it out")
    if options.capacity == 0:
        raise InputError("--capacity 0 must be at least 1, the mean of rows; leave it out for no limit")
    router = before
    if options.router is not None:
        router = replace(named_router(options.router, graph), capacity=before.capacity, padded=before.padded)
    if options.capacity is not None:
        router = replace(router, capacity=options.capacity)
    return router if options.pad_experts is None else replace(router, padded=True)


def named_router(name: str, graph: Graph) -> RouterLoad:
    """The load that `--router` names. InputError for a file that is wrong, or was recorded of another model."""
    kind, _, value = name.strip().partition(":")
    # A path may hold a colon, so a file is what is left after the two words.
    if kind == "balanced" and not value:
        return RouterLoad()
    if kind == "zipf":
        return RouterLoad(kind="zipf", s=_exponent(value))
    path = Path(name).expanduser()
    if path.suffix == ".json":
        return RouterLoad(kind="histogram", counts=_counts(path))
    if path.suffix == ".npz" and load_late("gnomon.formats.expert_paths:is_paths")(path):
        paths = load_late("gnomon.formats.expert_paths:paths_of")(path, graph)
        made: RouterLoad = load_late("gnomon.formats.expert_paths:load_of")(paths)
        return made
    if path.suffix == ".npz":
        record = load_late("gnomon.formats.router:read_router")(path)
        record.check(graph, str(path))
        load: RouterLoad = record.load
        return load
    raise InputError(
        f"--router {name[:40]!r} is no load; write balanced, zipf:1.0, or the path of a .json or .npz file"
    )


def _exponent(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(f"--router zipf:{text[:20]} has no exponent; write zipf:1.0") from None


def _counts(path: Path) -> tuple[float, ...]:
    """Tokens of each expert from a JSON list of numbers."""
    text, _ = read_source(path)
    try:
        counts = json.loads(text)
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}") from None
    except RecursionError:
        raise InputError(f"{path} is nested too deeply; write a list of numbers, [812, 95, …]") from None
    # bool is an int in Python, and `true` in the JSON would count as one token.
    if not isinstance(counts, list) or not all(isinstance(n, int | float) and not isinstance(n, bool) for n in counts):
        raise InputError(
            f"{path} is no list of numbers; write the tokens that each expert of a layer got, [812, 95, …]"
        )
    try:
        return tuple(float(n) for n in counts)
    except OverflowError:
        raise InputError(f"{path} holds a number that is too large; write tokens") from None


def tokens_of(text: str) -> int:
    """A number of tokens in which k and M are 1,024 and its square, as lengths of contexts are named."""
    # 4k of a context is 4,096: `Ki` is the binary prefix that `parse_count` knows.
    return parse_count(f"{text[:-1]}{text[-1].upper()}i" if text[-1:] in ("k", "K", "M") else text)


def with_sizes(workload: Workload, graph: Graph, options: BatchOptions, assumed: list[str]) -> Workload:
    """The workload with the sizes of `--size`; an encoder that nobody gives one has sequences as long as the
    decoder's."""
    known_sizes: dict[str, int] = {}
    for name, size in options.sizes:
        # The same size twice is no mistake: scripts add options one behind the other.
        if known_sizes.setdefault(name, size) != size:
            raise InputError(f"--size gives {name[:40]!r} twice; keep one")
    sizes = {**dict(workload.sizes), **known_sizes}
    if ENC_SEQ.name in open_dims(graph) and ENC_SEQ.name not in sizes:
        sizes[ENC_SEQ.name] = longest = max(workload.sequence_lengths(), default=SEQ_LEN)
        assumed.append(
            f"tokens of the encoder not given: {longest}, as of the decoder (--size {ENC_SEQ.name}={longest})"
        )
    return replace(workload, sizes=tuple(sizes.items())) if sizes else workload


def listed_lengths(lengths: tuple[int, ...], options: BatchOptions, graph: Graph, router: RouterLoad) -> Workload:
    """The batch of `--lengths`. InputError with another length or size of the batch."""
    if options.seq_len is not None or options.global_batch is not None or options.tokens_per_batch is not None:
        raise InputError("--lengths gives every sequence of the batch; leave --seq-len and the batch out")
    return Workload(lengths=lengths, router=given_router(options, router, graph))


def _workload(
    graph: Graph,
    plan: Plan,
    options: TrainingOptions,
    lengths: tuple[int, ...],
    workload_given: Workload | None,
    assumed: list[str],
) -> Workload:
    if lengths:
        listed = listed_lengths(
            lengths, options, graph, RouterLoad() if workload_given is None else workload_given.router
        )
        return listed if workload_given is None else replace(listed, sizes=workload_given.sizes)
    if workload_given is not None:
        seq_len = options.seq_len or max(workload_given.sequence_lengths(), default=1)
        changes: dict[str, Any] = {"global_batch_size": given_batch(options, seq_len), "seq_len": options.seq_len}
        workload_given = replace(workload_given, router=given_router(options, workload_given.router, graph))
        return replace(workload_given, **{name: value for name, value in changes.items() if value is not None})
    if options.seq_len is None:
        seq_len, note = default_seq_len(graph)
        assumed.append(note)
    else:
        seq_len = options.seq_len
    batch = given_batch(options, seq_len)
    if batch is None:
        ranks = plan.stage_mesh(0).data_ranks
        stages = plan.num_pipeline_ranks
        count = plan.schedule.num_microbatches or (1 if stages == 1 else 4 * stages)
        batch = count * (plan.schedule.micro_batch_size or 1) * ranks
        assumed.append(f"global batch not given: {batch} (sequences a step; --global-batch)")
    return Workload(global_batch_size=batch, seq_len=seq_len, router=given_router(options, RouterLoad(), graph))
