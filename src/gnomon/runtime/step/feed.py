"""The batch of a step, and which rows and positions of it this rank takes in each microbatch: `Feed`.

Every rank is given the whole batch and reads its own part. Left out: where batches come from (`data`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gnomon.errors import GraphError, PlanError
from gnomon.graph import Graph
from gnomon.graph.text_inputs import labels_of
from gnomon.plans import Plan, Workload
from gnomon.plans import batch as batch_of
from gnomon.runtime.data.packing import DOCUMENTS, LENGTHS, Packing, batch_of_ids, with_further
from gnomon.runtime.mesh.groups import Groups
from gnomon.runtime.mesh.routes import rows_of
from gnomon.runtime.module.stage import Batch
from gnomon.runtime.ops.site import Axis
from gnomon.tensors.names import is_sequence


class Feed:
    """The batches of one rank."""

    def __init__(
        self, graph: Graph, plan: Plan, workload: Workload, groups: Groups, stages: Sequence[int], device: torch.device
    ) -> None:
        """Has no batch yet. stages: of the plan, those on this rank. PlanError for batches that the runtime does not
        divide so."""
        self.graph, self.workload, self.layout, self.device = graph, workload, plan.layout, device
        self.num_units, self.rows_of_unit = batch_of(plan, workload)
        parts = {rows_of(plan, stage, self.rows_of_unit)[groups.here.data] for stage in stages}
        if len(parts) > 1:
            raise PlanError(
                f"stages {list(stages)} are on the same ranks, but share out microbatches otherwise; make them alike"
            )
        ((self.first_row, self.local_rows),) = parts
        mesh = groups.mesh
        self.shared_seq = Axis(ranks=mesh.cp, index=groups.here.along["cp"], order=plan.layout.context_order)
        """How ranks of cp share sequences out."""
        ways = mesh.cp * (mesh.tp if plan.layout.sequence_parallel else 1)
        # In zig-zag order a rank has a piece from either end of the sequence.
        halves = 2 if mesh.cp > 1 and plan.layout.context_order == "zigzag" else 1
        if workload.seq_len % ways or workload.seq_len % (mesh.cp * halves):
            raise PlanError(
                f"ranks divide seq_len = {workload.seq_len} into {ways} parts, under cp in zig-zag order of two pieces "
                f"each; make it a multiple of {math.lcm(ways, mesh.cp * halves)}"
            )
        self.local_positions = workload.seq_len // ways
        """Of a sequence between layers on this rank."""
        self.labels = labels_or_usual(graph)
        self.one_length_reason = one_length_reason(graph, plan, workload.seq_len)
        self.one_document_reason = by_length_reason(graph, workload.seq_len) or whole_rows_reason(graph)
        inputs = {
            tensor.name for tensor in graph.inputs if [is_sequence(dim.name) for dim in tensor.dims[1:2]] == [True]
        }
        self.per_position = {*inputs, DOCUMENTS}
        """Parts of a batch with a number for each position of a row."""
        self.batch: Batch = {}
        self.counted = self.tokens
        """Labels of the step, whose mean the loss is."""

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the dims that the graph leaves open: rows of a microbatch on this rank, and whole sequences."""
        return {"batch": self.local_rows, "seq": self.workload.seq_len, **dict(self.workload.sizes)}

    def sizes_of(self, unit: int) -> dict[str, int]:
        """The same of one unit: all are alike."""
        return self.sizes

    @property
    def longest(self) -> int:
        """Tokens of a sequence."""
        return self.workload.seq_len

    @property
    def tokens(self) -> int:
        """Positions of a batch."""
        return self.num_units * self.rows_of_unit * self.workload.seq_len

    def take(self, batch: Tensor | Batch) -> None:
        """Makes a batch the step's. PlanError for one of another shape than the plan's, or without an input of the
        graph."""
        sequences, seq_len = self.workload.global_batch_size, self.workload.seq_len
        if isinstance(batch, Tensor):
            if batch.shape != (sequences, seq_len + 1):
                raise PlanError(f"a step takes ids of shape {(sequences, seq_len + 1)}, not {tuple(batch.shape)}")
            batch = batch_of_ids(batch)
        input_names = {tensor.name for tensor in self.graph.inputs}
        batch = with_further(batch, input_names)
        if missing := sorted(input_names - set(batch)):
            raise PlanError(f"{self.graph.name} reads {', '.join(missing)}, which the batch has not")
        for name, value in batch.items():
            length = self._length_of(name)
            if value.shape[0] != sequences or (length and value.ndim > 1 and value.shape[1] != length):
                of = f" of {length} positions" if length else ""
                raise PlanError(f"{name} has shape {tuple(value.shape)}, and a step takes {sequences} rows{of}")
        if LENGTHS in batch and (reason := self.one_length_reason):
            raise PlanError(f"rows are padded to the longest of their microbatch, and {reason}")
        if DOCUMENTS in batch and (reason := self.one_document_reason):
            raise PlanError(f"rows hold several documents, and {reason}")
        known = {*input_names, DOCUMENTS, LENGTHS}
        for name, value in batch.items():
            if name not in known and not _says_nothing(name, value):
                raise PlanError(_dropped(self.graph.name, name))
        self.batch = {name: value.to(self.device) for name, value in batch.items() if name in known}
        labels = batch.get(self.labels)
        self.counted = self.tokens if labels is None else max(1, int((labels >= 0).sum()))

    def _length_of(self, name: str) -> int:
        """Numbers in a row of a part of a batch: what the graph calls its second dim, whatever the part's own name; 0
        where nothing says it."""
        if name == DOCUMENTS:
            return self.workload.seq_len
        dims = next((tensor.dims for tensor in self.graph.inputs if tensor.name == name), ())
        if len(dims) < 2:
            return 0
        return self.sizes.get(dims[1].name, 0) if dims[1].size is None else dims[1].size

    def of_unit(self, unit: int) -> Batch:
        """Rows of a unit on this rank, and its positions of them."""
        first = unit * self.rows_of_unit + self.first_row
        unit_inputs = {name: tensor[first : first + self.local_rows] for name, tensor in self.batch.items()}
        if (lengths := unit_inputs.pop(LENGTHS, None)) is not None:
            longest = int(lengths.max())
            return {name: x[:, :longest] if name in self.per_position else x for name, x in unit_inputs.items()}
        if self.shared_seq.ranks == 1:
            return unit_inputs
        return {name: self._own_positions(name, tensor) for name, tensor in unit_inputs.items()}

    def packing_of(self, unit: int) -> Packing | None:
        """Says which tokens of a unit's rows see which, where its batch does not say it itself; None: all earlier
        ones."""
        return None

    def _own_positions(self, name: str, x: Tensor) -> Tensor:
        """This rank's positions of an input of the graph."""
        dims = next((tensor.dims for tensor in self.graph.inputs if tensor.name == name), ())
        for at, dim in enumerate(dims):
            if is_sequence(dim.name):
                own = self.shared_seq.positions(x.shape[at] // self.shared_seq.ranks, x.device)
                x = x.index_select(at, own)
        return x


def _says_nothing(name: str, mask: Tensor) -> bool:
    """Whether a part of a batch that the graph does not read is what it computes with anyway: every token seen, at its
    own place, of the first type."""
    if name == "attention_mask":
        return bool((mask == 1).all())
    if name == "position_ids":
        return bool((mask == torch.arange(mask.shape[-1], device=mask.device)).all())
    return name == "token_type_ids" and not bool(mask.any())


def _dropped(graph: str, name: str) -> str:
    """Why a batch with this part is refused."""
    instead = {
        "attention_mask": "give `lengths` (tokens of each row) for padding at the end of causal rows, or `documents`",
        "position_ids": "give `documents` (a number for each token) where positions begin again in a row",
    }
    return f"the batch has {name}, which {graph} does not read: {instead.get(name, 'leave it out of the batch')}"


def by_length_reason(graph: Graph, seq_len: int) -> str | None:
    """Why documents of several lengths in a batch of such rows do not compute what they would alone: None where they
    do."""
    for block in graph.blocks:
        for op in block.ops:
            scaling, original = op.attr("scaling", ""), op.attr("original_length", 0)
            if op.does == "rotates" and scaling in ("dynamic", "longrope") and seq_len > int(original):  # type: ignore[arg-type]
                return (
                    f"rotary angles of type {scaling} depend on the length of a sequence over {original} positions; "
                    f"give rows of one document each, or seq_len of at most {original}"
                )
    return None


def whole_rows_reason(graph: Graph) -> str | None:
    """Why rows of several documents are not run, whatever their lengths; None where they are."""
    for block in graph.blocks:
        states = {tensor.name for tensor in block.tensors if tensor.kind == "state"}
        if block.does("scans"):
            return "the runtime's state-space scans run over whole rows; give rows of one document each"
        for op in block.ops:
            if op.attr("per", "") == "sequence":
                return f"the loss that balances experts ({op.path}) is of whole rows; use experts.balance = 'layer'"
            if op.does == "measures distance":
                return f"the runtime's linear biases ({op.path}) are of whole rows; give rows of one document each"
            if op.does == "looks up" and op.inputs[0] in states and len(block.tensor(op.inputs[0]).dims) > 1:
                return f"the runtime's distances in {op.path} are of whole rows; give rows of one document each"
    return None


def one_length_reason(graph: Graph, plan: Plan, seq_len: int) -> str | None:
    """Why the microbatches of a plan cannot differ in length, and what to change; None where they can."""
    mesh = plan.mesh
    if plan.num_stages > 1:
        return "stages of a pipeline send each other tensors of one shape; use pp = 1, or another packing"
    if mesh.cp > 1 or plan.layout.sequence_parallel:
        return "ranks divide sequences of one length; use cp = 1 without sequence_parallel, or another packing"
    ops = [op for block in graph.blocks for op in block.ops]
    if any(op.does == "routes" for op in ops):
        return f"{graph.name} would route padding to experts too; use another packing"
    if reason := by_length_reason(graph, seq_len):
        return reason
    if any(op.does == "attends" and not op.attr("causal", False) for op in ops):
        return f"{graph.name} has attention that would see the padding; use another packing"
    return None


def labels_or_usual(graph: Graph) -> str:
    """The input that says how many labels a loss is the mean of."""
    try:
        return labels_of(graph)
    except GraphError:  # a loss of another kind is the mean over all positions, but where a batch has labels
        return "labels"


def size_named(graph: Graph, name: str) -> int:
    """The size of a dim, wherever the model has it; 0 for none."""
    return next((dim.size or 0 for block in graph.blocks for dim in block.dims if dim.name == name), 0)
