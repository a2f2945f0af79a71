"""Batches whose sequences differ in length: which tokens this rank takes in each microbatch: `FeedOfLengths`.

A batch is `input_ids` and `labels` with `lengths`, the number of tokens of each sequence, in one of two forms: flat
(tokens of all sequences, one after the other) or padded (a row for each sequence; without `lengths` all of a row).
The microbatches ("units") of a step follow from its lengths by the plan's rule (`lowering.units`), so each step may
have others. In a unit a rank has one row: its part of the unit's sequences, padded only to a multiple of tp under
sequence parallelism. Left out: the computation, and which rows of a Program a step has (`execute`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gnomon.errors import PlanError
from gnomon.graph import Graph
from gnomon.lowering.chunked import chunk_pass
from gnomon.lowering.packed import skrull_pass
from gnomon.lowering.units import units_of_lengths
from gnomon.methods import check_methods, mimose
from gnomon.plans import Plan, Unit, Workload
from gnomon.runtime.data.packing import (
    DOCUMENTS,
    LENGTHS,
    Packing,
    batch_of_ids,
    packing_of_parts,
    with_further,
)
from gnomon.runtime.data.parts import Part, Prefixes, parts_of
from gnomon.runtime.mesh.groups import Groups
from gnomon.runtime.module.stage import Batch
from gnomon.runtime.step.feed import Feed, by_length_reason, labels_or_usual, whole_rows_reason
from gnomon.tensors.names import is_sequence


def has_lengths(plan: Plan, workload: Workload) -> bool:
    """Whether microbatches are made of sequences that may differ in length, or of parts of sequences."""
    methods = chunk_pass(plan.schedule) is not None or skrull_pass(plan.schedule) is not None
    return bool(workload.lengths) or workload.distribution is not None or methods


class FeedOfLengths(Feed):
    """The batches of one rank where each batch brings its lengths.

    Every method of `Feed` that reads rows or positions is overridden; `Feed.__init__`, which divides rows of one
    length, is not called.
    """

    def __init__(self, graph: Graph, plan: Plan, workload: Workload, groups: Groups, device: torch.device) -> None:
        """PlanError for models and plans whose sequences have to be of one length."""
        self.graph, self.plan, self.workload, self.layout, self.device = graph, plan, workload, plan.layout, device
        mesh, here = groups.mesh, groups.here
        self.data_rank, self.cp, self.cp_rank = here.data, mesh.cp, here.along["cp"]
        self.multiple = mesh.tp if plan.layout.sequence_parallel else 1
        # A unit is one row on each data-parallel rank, in order of ranks: `checks.parity` finds this rank's so.
        self.rows_of_unit, self.first_row, self.local_rows = mesh.data_ranks, here.data, 1
        self.labels = labels_or_usual(graph)
        self.batch: Batch = {}
        self.counted = 1
        self.prefixes: Prefixes | None = None
        self._check(plan)
        self._begin(workload.sequence_lengths())

    def _check(self, plan: Plan) -> None:
        lengths = self.workload.sequence_lengths()
        longest = max(lengths)
        if self.workload.distribution is not None:
            longest = max(self.workload.distribution.values)
        odd = [t.name for t in self.graph.inputs if len(t.dims) != 2 or not is_sequence(t.dims[1].name)]
        chunked = chunk_pass(plan.schedule) is not None
        attends = [op for block in self.graph.blocks for op in block.ops if op.does == "attends"]
        reasons = (
            (odd, f"{self.graph.name} reads {', '.join(odd)}, which has no number for each token"),
            (plan.schedule.vocabulary != "ends", "all pipeline ranks divide the vocabulary; use vocabulary = 'ends'"),
            (mimose.METHOD.used(plan), "mimose decides by the length of padded rows; leave it out"),
            (chunked and not all(op.attr("causal", False) for op in attends), "chunkflow cuts causal sequences alone"),
            (
                plan.experts.balance == "global" and plan.mesh.data_ranks > 1,
                "workers have microbatches of their own, over which no shares of a global batch are counted; use "
                "experts.balance = 'layer'",
            ),
            (
                plan.experts.assignment == "sinkhorn" and plan.mesh.cp > 1,
                "ranks of cp have uneven parts, over which Sinkhorn's sums are not taken; use cp = 1, or "
                "experts.assignment = 'top_k'",
            ),
            (
                plan.layout.dispatch == "all_gather" and plan.mesh.ep > 1,
                "layout.dispatch = 'all_gather' gathers as many tokens of each rank; use all_to_all",
            ),
            (
                plan.optimizer.zero == 3 and plan.mesh.data_ranks > 1,
                "ZeRO 3 gathers parameters in step on all workers; use zero <= 2",
            ),
        )
        check_methods(plan, "run")
        reason = next((text for found, text in reasons if found), None)
        if reason := reason or by_length_reason(self.graph, longest) or whole_rows_reason(self.graph):
            raise PlanError(f"sequences have lengths of their own here, and {reason}")

    def _begin(self, lengths: Sequence[int]) -> None:
        """Units of a step with these sequences."""
        self.lengths = tuple(lengths)
        self.units: tuple[Unit, ...] = units_of_lengths(self.graph, self.plan, self.lengths)[self.data_rank]
        self.num_units = len(self.units)
        layout = self.layout
        order, skrull = layout.context_order, skrull_pass(self.plan.schedule)

        def attention_over_cp(tokens: int) -> str:
            return layout.context if skrull is None else skrull.style(tokens, layout.context)

        self._parts = [
            parts_of(unit, self.lengths, index=self.cp_rank, cp=self.cp, order=order, style=attention_over_cp)
            for unit in self.units
        ]
        cut = any(part.is_chunk for parts in self._parts for part in parts)
        self.prefixes = Prefixes(lengths=self.lengths) if cut else None
        starts = [0]
        for length in self.lengths:
            starts.append(starts[-1] + length)
        self._starts = starts
        self._packings: dict[int, Packing] = {}

    def parts(self, unit: int) -> tuple[Part, ...]:
        """What this rank has of a unit's sequences."""
        return self._parts[unit]

    def _tokens(self, unit: int) -> int:
        """Positions of this rank's row: at least one, so that collectives inside layers have something to send."""
        num_tokens = sum(part.tokens for part in self._parts[unit])
        return max(1, -(-num_tokens // self.multiple)) * self.multiple

    def sizes_of(self, unit: int) -> dict[str, int]:
        """Sizes of the open dims of a unit: a row of cp times this rank's tokens. Ranks of cp may have unequal parts:
        `Shapes` divides "seq" by cp, which gives back what this rank has."""
        return {"batch": 1, "seq": self._tokens(unit) * self.cp, **dict(self.workload.sizes)}

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the open dims of the first unit."""
        return self.sizes_of(0)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.lengths)

    @property
    def tokens(self) -> int:
        """Counts the tokens of a batch."""
        return sum(self.lengths)

    def take(self, batch: Tensor | Batch) -> None:
        """Makes a batch the step's. PlanError for one of another shape, or without an input of the graph."""
        flat, lengths = self._flat(batch_of_ids(batch) if isinstance(batch, Tensor) else batch)
        if len(lengths) != self.workload.batch_size:
            raise PlanError(f"a step takes {self.workload.batch_size} sequences, not {len(lengths)}")
        # A drawn distribution has no largest length that the plan was made for; seq_len bounds rows before they come.
        listed = self.workload.distribution is None and self.workload.seq_len == 0
        if listed and max(lengths) > (longest := max(self.workload.lengths)):
            raise PlanError(f"a sequence has {max(lengths)} tokens, and the plan is for at most {longest}")
        input_names = {tensor.name for tensor in self.graph.inputs}
        numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        rows = {name: x[None] for name, x in flat.items()}
        inputs = with_further({**rows, DOCUMENTS: numbers[None]}, input_names)
        if missing := sorted(input_names - set(inputs)):
            raise PlanError(f"{self.graph.name} reads {', '.join(missing)}, which the batch has not")
        if extra := sorted(set(flat) - input_names):
            raise PlanError(f"the batch has {extra[0]}, which {self.graph.name} does not read; leave it out")
        if tuple(lengths) != self.lengths:
            self._begin(lengths)
        if self.prefixes is not None:
            self.prefixes.clear()
        selected = {name: inputs[name][0] for name in input_names}
        self.batch = {name: self._with_end(name, x).to(self.device) for name, x in selected.items()}
        labels = selected.get(self.labels)
        self.counted = self.tokens if labels is None else max(1, int((labels >= 0).sum()))

    def _flat(self, batch: Batch) -> tuple[dict[str, Tensor], list[int]]:
        """(tokens of all sequences, one after the other; tokens of each). PlanError for lengths that are not those of
        the tokens, or under 1."""
        fields = dict(batch)
        counts = fields.pop(LENGTHS, None)
        shapes = {name: tuple(x.shape) for name, x in fields.items()}
        first = next(iter(shapes.values()), ())
        padded = len(first) == 2
        if counts is None and padded:
            lengths = [first[1]] * first[0]
        else:
            lengths = [] if counts is None else [int(n) for n in counts]
        # Every field has one shape: a row for each sequence, or all tokens behind each other.
        expected = (len(lengths), first[1]) if padded else (sum(lengths),)
        longest = first[1] if padded else sum(lengths)
        alike = bool(shapes) and all(shape == expected for shape in shapes.values())
        if not alike or not lengths or not 1 <= min(lengths) <= max(lengths) <= longest:
            raise PlanError(
                f"a batch of sequences of several lengths is their tokens one after the other, and lengths of 1 or "
                f"more that add up to them; or a row for each, and lengths of at most a row; here are {shapes} and "
                f"{sum(lengths)} tokens in {len(lengths)} lengths"
            )
        if not padded:
            return fields, lengths
        return {
            name: torch.cat([row[:n] for row, n in zip(x, lengths, strict=True)]) for name, x in fields.items()
        }, lengths

    def _with_end(self, name: str, x: Tensor) -> Tensor:
        """Appends one position, which counts in no loss: rows are padded with it (`of_unit`)."""
        return torch.cat((x, x.new_full((1,), -1 if "labels" in name else 0)))

    def of_unit(self, unit: int) -> Batch:
        """Its tokens on this rank, a row."""
        parts = self._parts[unit]
        # In the order of the packing (`packing_of_parts`): part after part, segments in their order, then what fills
        # the row up.
        places = [self._places(part.sequence, *segment) for part in parts for segment in part.segments]
        rest = self._tokens(unit) - sum(part.tokens for part in parts)
        chosen = torch.cat([*places, torch.full((rest,), self.tokens)]).to(self.device)
        return {name: x[chosen][None] for name, x in self.batch.items()}

    def _places(self, sequence: int, first: int, count: int) -> Tensor:
        """Indices among all tokens of `count` positions of a sequence from `first` on. Positions beyond its end are
        padding: their index is that of the position which `_with_end` appended."""
        at = torch.arange(first, first + count)
        return torch.where(at < self.lengths[sequence], at + self._starts[sequence], self.tokens)

    def packing_of(self, unit: int) -> Packing:
        """Says which tokens of a unit's row see which."""
        if unit not in self._packings:
            self._packings[unit] = packing_of_parts(self._parts[unit], self._tokens(unit), self.prefixes, self.device)
        return self._packings[unit]
