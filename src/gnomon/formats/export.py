"""A plan as the file that another program reads: what the writers for five programs share.

`ExportRequest` is what is to be written and `Draft` what a writer (`megatron_out`, `torchtitan_out` …) makes of it:
text, and the Job that the program's own reader finds in that text. `exported(asked, draft)` compares that Job with what
was asked: what differs was not expressed, and is listed in `unwritten`, so no field can be lost in silence. Where a
program has no place for a choice, writers take the nearest it has: of recomputation one that keeps no more, of products
the dtype that was asked. Leaves out files and printing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from gnomon.errors import InputError, PlanError
from gnomon.formats.given import Network
from gnomon.formats.job import Job, ModelConfig
from gnomon.formats.normalized import Difference, differences, normalized
from gnomon.graph import Graph
from gnomon.models.gpt import GptConfig
from gnomon.plans import DType, Plan, Precision, Workload
from gnomon.software import Stack

NAMES = frozenset({"name", "moe_path", "expert_paths"})
"""Fields of a model's config that are names only."""

REASONS: Mapping[str, str] = {
    "model.vocab_size": "rows are padded so that ranks have as many each",
    "model*": "the program's models do not have this",
    "mesh.order": "the program puts ranks on the axes in its own order",
    "mesh.*": "the program divides ranks among axes differently",
    "schedule.name": "the program has no such schedule",
    "schedule.passes": "a method of Gnomon's own",
    "schedule.vocabulary": "the program has the embedding and the head on the first and the last stage",
    "schedule.placement": "the program has no such schedule",
    "schedule.virtual_stages": "the program's schedule takes another number of stages on a rank",
    "schedule.layers_per_stage": "the program divides layers among stages by its own rule",
    "schedule.*": "the program counts microbatches differently",
    "saved.*": "the program recomputes in its own units; what is written keeps no more than was asked",
    "layout.sequence_parallel": "with tensor parallelism the program decides this",
    "layout.context": "the program has no such exchange for attention",
    "layout.dispatch": "the program sends tokens to their experts in its own way",
    "layout.context_order": "the program orders context-parallel parts by its own rule",
    "layout.rules": "layout of single dims: the program's modules decide",
    "layout.*": "the program's tensor parallelism decides this",
    "overlap.priority": "collectives have no order of priority there",
    "overlap.splits": "the program does not cut ops and their collectives in this way",
    "overlap.bucket_bytes": "the program has its own size of buckets",
    "overlap.*": "the program decides itself what it issues early",
    "optimizer.kind": "the program has not this update",
    "optimizer.zero": "the program has not this stage of ZeRO",
    "optimizer.delay*": "updates are not delayed there",
    "optimizer.*": "the program decides this itself",
    "precision.fp8*": "the program's eight-bit recipes differ",
    "precision.*": "the program keeps other dtypes",
    "experts.*": "losses of routers, moved biases and dropped tokens are options of the program's own",
    "placement": "ranks sit on devices as the launcher puts them",
    "software.*": "the program's own kernels decide this",
    "workload.*": "one step of equal sequences is all that a file says; the data decide the rest",
}
"""Pattern over a field -> why a program may have no place for it; a program's own reasons go before these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest:
    """What is to be written."""

    label: str
    """The model's name for comments."""
    model: ModelConfig | None
    """Its config; None for a model that is no decoder of ours."""
    graph: Graph
    """The model."""
    plan: Plan
    """Every decision, `normalized`."""
    workload: Workload
    """The batch: sequences of one length."""
    processes_per_node: int
    """Ranks that one machine starts."""
    model_id: str = ""
    """Id or path by which a program loads the model; empty where it is not known."""
    base: Network | None = None
    """The network that adapters lie beside, or the model itself; None where nobody gives it."""
    stack: Stack | None = None
    """What the program of the job does, as far as a file may say it; None where nobody says."""

    @property
    def num_nodes(self) -> int:
        """Counts the machines."""
        return max(1, -(-self.plan.world_size // self.processes_per_node))

    @property
    def micro(self) -> int:
        """Sequences of a microbatch on a rank."""
        return self.plan.schedule.micro_batch_size or 1

    @property
    def microbatches(self) -> int:
        """Microbatches in a step."""
        return self.workload.batch_size // (self.micro * self.plan.mesh.data_ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """What a writer made."""

    program: str
    """Name and version of the program, as in `torchtitan v0.2.2`."""
    text: str
    """The file."""
    job: Job
    """What the program's reader finds in it."""
    comment: str = "#"
    """What opens a line of comment; empty where the format has none."""
    elsewhere: tuple[str, ...] = ()
    """What the user's code or command line must say, one sentence each."""
    reasons: tuple[tuple[str, str], ...] = ()
    """(pattern over a field, why this program has no place for it)."""
    code: tuple[str, ...] = ()
    """Patterns over fields that `elsewhere` says; they are not compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unwritten:
    """A field that the file does not carry over."""

    field: str
    """As in `overlap.prefetch`."""
    planned: str
    """What the plan says."""
    becomes: str
    """What the program does with the file."""
    why: str
    """Its reason."""

    def __str__(self) -> str:
        return f"{self.field} = {self.planned} becomes {self.becomes}: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """A file for another program."""

    program: str
    """Name and version."""
    text: str
    """The file, with comments that say what follows here, where the format has comments."""
    unwritten: tuple[Unwritten, ...]
    """What it cannot say."""
    elsewhere: tuple[str, ...]
    """What code or the command line must say."""
    additions: tuple[str, ...]
    """What the program does with the file that no plan says and no prediction has."""
    job: Job
    """The file as it is read back."""


def asked_for(
    label: str, model: ModelConfig | None, graph: Graph, plan: Plan, workload: Workload, processes_per_node: int
) -> ExportRequest:
    """The request, its plan normalized. PlanError for what no job file of these programs can say; see `normalized`."""
    if not workload.seq_len:
        raise InputError(
            "the workload lists sequence lengths, or a distribution of them; a job file takes one length: give seq_len"
        )
    plan = normalized(plan, graph, workload)
    # A job smaller than a machine, or one that does not fill whole ones, is started on one machine.
    nearby = processes_per_node if plan.world_size % processes_per_node == 0 else plan.world_size
    return ExportRequest(
        label=label,
        model=replace(model, ffn_size=model.ffn_size or 4 * model.hidden_size)
        if isinstance(model, GptConfig)
        else model,
        graph=graph,
        plan=plan,
        workload=workload,
        processes_per_node=min(nearby, plan.world_size),
    )


def need_axes(request: ExportRequest, program: str, *without: str) -> None:
    """PlanError if the plan uses an axis that the program has not: a file without it would be of another job."""
    for axis in without:
        if (size := getattr(request.plan.mesh, axis)) > 1:
            raise PlanError(
                f"{program} has no place for {axis} = {size}; give a plan with {axis} = 1, or export to another program"
            )


def need_model(request: ExportRequest, program: str) -> ModelConfig:
    """Returns the model's config; InputError if the program's file must describe the model and it is none of these."""
    if request.model is None:
        raise InputError(
            f"a file for {program} describes the model, and {request.label} is no decoder that can be "
            "described (Llama, "
            f"Mistral, Qwen, Mixtral, DeepSeek-V3, GPT, GPT-NeoX); deepspeed and accelerate take any model"
        )
    return request.model


def exported(request: ExportRequest, draft: Draft) -> Export:
    """The draft with everything that it does not carry over."""
    job = draft.job
    # Never the draft's word for it: what the program's own reader finds in the text is held against the plan.
    lost = list(_model(request, job))
    graph = request.graph if job.model is None or isinstance(job.model, str) else job.graph()
    lost += differences(request.plan, normalized(job.plan, graph, job.workload))
    lost += differences(request.workload, job.workload, "workload")
    lost += _software(request, job)
    reasons = (*draft.reasons, *REASONS.items())
    unwritten = tuple(
        Unwritten(field=d.field, planned=d.before, becomes=d.actual, why=reason_for(d.field, reasons))
        for d in lost
        # What the user's own code says is no fault of the file; `elsewhere` names it.
        if not any(fnmatchcase(d.field, pattern) for pattern in draft.code)
    )
    return Export(
        program=draft.program,
        text=_commented(request, draft, unwritten),
        unwritten=unwritten,
        elsewhere=draft.elsewhere,
        additions=tuple(map(str, job.unexpressed)),
        job=job,
    )


def _model(request: ExportRequest, job: Job) -> Iterator[Difference]:
    """Yields a difference where the model of the file is another one."""
    # Whole graphs are compared: adapters on other linears have the same name.
    if request.base is not None and job.model is not None and job.graph() != request.graph:
        yield Difference(field="model", before=request.graph.name, actual=job.graph().name)
    if job.model is None or isinstance(job.model, str) or request.model is None:
        return
    for one in differences(request.model, job.model, "model"):
        if one.field.removeprefix("model.") not in NAMES:
            yield one


def _software(request: ExportRequest, job: Job) -> Iterator[Difference]:
    """Kernels and loss of the job that the file's own job has not. What either does not say is not compared."""
    if request.stack is None:
        return
    for part, field in SAID_BY_FILES:
        planned, found = (getattr(getattr(stack, part), field) for stack in (request.stack, job.stack))
        # None is "not said", which a file may leave so.
        if planned is not None and found is not None and planned != found:
            yield Difference(field=f"software.{field}", before=str(planned), actual=str(found))


SAID_BY_FILES = (
    ("layers", "norm"),
    ("layers", "activation"),
    ("loss", "cross_entropy"),
    ("launch", "launch_mode"),
    ("experts", "moe_experts"),
)
"""(part, field) of a Stack that files of trainers switch."""


def reason_for(field: str, reasons: tuple[tuple[str, str], ...]) -> str:
    """The first reason whose pattern fits. KeyError when a field has none: then a pattern is missing."""
    for pattern, why in reasons:
        if fnmatchcase(field, pattern):
            return why
    # A field without a pattern would be lost without a word: a test goes through all fields of a plan.
    raise KeyError(f"no reason is given for field {field!r}")


def half_of(precision: Precision) -> DType | None:
    """bf16 or fp16, if products run in it; None for a job in fp32 or another dtype."""
    return next((one for one in (precision.compute, precision.param) if one in ("bf16", "fp16")), None)


def notes_of(request: ExportRequest, draft: Draft, unwritten: tuple[Unwritten, ...]) -> tuple[str, ...]:
    """Lines that say what the file is, what it cannot say, and what must be said elsewhere."""
    axes, work = request.plan.mesh.describe(), request.workload
    lines = [
        f"{request.label} for {draft.program}, {request.plan.world_size} processes: {axes}",
        f"written by gnomon; {work.batch_size} sequences of {work.seq_len} tokens a step",
    ]
    if unwritten:
        lines += ["not expressed:", *(f"  - {one}" for one in unwritten)]
    if draft.job.unexpressed:
        lines += ["done beyond the plan:", *(f"  - {one}" for one in draft.job.unexpressed)]
    if draft.elsewhere:
        lines += ["to be said elsewhere:", *(f"  - {one}" for one in draft.elsewhere)]
    return tuple(lines)


def one_line(text: str) -> str:
    """Text that no format ends a line in: YAML has more breaks than `\\n`, and TOML no control characters."""
    # A model's label could otherwise end a comment and become a setting of the file.
    return "".join(one if one.isprintable() else " " for one in text)


def _commented(request: ExportRequest, draft: Draft, unwritten: tuple[Unwritten, ...]) -> str:
    if not draft.comment:
        return draft.text
    # Only the first line may name the interpreter.
    shell = draft.text.startswith("#!")
    first, rest = draft.text.split("\n", 1) if shell else ("", draft.text)
    notes = "".join(f"{draft.comment} {one_line(note)}\n" for note in notes_of(request, draft, unwritten))
    return f"{first}\n{notes}{rest}" if shell else f"{notes}{rest}"
