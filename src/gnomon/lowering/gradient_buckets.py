"""Gradient buckets: gradients of several layers, reduced by one collective as soon as all of them are whole.

`gradient_buckets(graph, plan, layers)` says which layers share one; `with_gradient_buckets(program, buckets)` merges
their rows: one AR a bucket, named `2..4.AR`. Where the plan overlaps reductions with backward (`overlap.grad_reduce`)
it comes right after the last backward of its own layers. `with_shard_buckets` does so with the REDUCE_GRAD of ZeRO.
Left out: seconds, and where gradients lie.
Source of the rule: PyTorch DistributedDataParallel (Li et al. 2020), whose buckets fill in the order of backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

from gnomon import orders
from gnomon.errors import PlanError
from gnomon.graph import BF16, DTYPE_BITS, Block, Graph, Layer
from gnomon.lowering.edit import Row, rows_of, with_rows
from gnomon.lowering.gradients import WRITES_GRADIENTS
from gnomon.lowering.insertions import bucket, by_name
from gnomon.orders.one_f_one_b import DAPPLE
from gnomon.plans import Layout, Mesh, Plan
from gnomon.plans.groups import Groups, layer_groups, split_by_stage
from gnomon.program import Program
from gnomon.sharding import shard_block


def gradient_buckets(graph: Graph, plan: Plan, layers: Sequence[Sequence[Layer]]) -> tuple[tuple[int, ...], ...]:
    """Layers (groups of `overlap.fused`) whose gradients are reduced together, in the order of backward, numbered
    through all stages.

    layers: of each stage of the plan. A bucket takes layers of one stage, the last first, until it has at least
    `overlap.bucket_bytes` of a rank's gradients; the rest of a stage is one more; or as many as `overlap.buckets` says.
    Empty without both. PlanError for schedules whose rows do not go layer by layer, and for buckets that do not fit
    the stages.
    """
    size = plan.overlap.bucket_bytes
    if not plan.overlap.in_buckets:
        return ()
    others = [method.name for method in plan.schedule.passes if method.name != DAPPLE]  # it orders whole stages
    if orders.find(plan.schedule.name).composite or others or plan.schedule.vocabulary != "ends":
        raise PlanError(
            f"overlap.bucket_bytes and overlap.buckets want a row for each layer, which {plan.schedule.name} with "
            f"these passes has not; choose a schedule of single actions without passes (one_f_one_b), or leave them out"
        )
    groups = layer_groups(plan, layers)
    if size is None:
        return _of_counts(plan.overlap.buckets or plan.overlap.fused, groups)
    width, first = DTYPE_BITS[plan.precision.reduce] // 8, 0
    buckets: list[tuple[int, ...]] = []
    for stage, part in enumerate(groups):
        mesh, filled, members = plan.stage_mesh(stage), 0, list[int]()
        for index in reversed(range(len(part))):
            members.append(first + index)
            blocks = [graph.block(layer.call.block) for layer in part[index]]
            filled += width * sum(_elements(block, plan.layout, mesh) for block in blocks)
            # A stage's first layer ends its last bucket, however full: buckets do not span stages, whose ranks differ.
            if filled >= size or not index:
                buckets.append(tuple(members))
                filled, members = 0, []
        first += len(part)
    return tuple(buckets)


def _of_counts(buckets: Sequence[int], groups: Groups) -> tuple[tuple[int, ...], ...]:
    """The same of so many layers each."""
    counted, first = list[tuple[int, ...]](), 0
    stages = [sum(map(len, part)) for part in groups]
    for part, counts in zip(groups, split_by_stage(buckets, stages, "buckets"), strict=True):
        ends = list(accumulate(map(len, part)))
        cuts = list(accumulate(counts))
        if not {*cuts} <= {*ends}:
            raise PlanError(
                f"overlap.buckets = {list(buckets)} cuts a group of overlap.fused, whose layers have their gradients "
                f"together; let buckets end where groups do"
            )
        places = [0, *(ends.index(end) + 1 for end in cuts)]
        counted += [tuple(reversed(range(first + a, first + b))) for a, b in pairwise(places)][::-1]
        first += len(part)
    return tuple(counted)


@lru_cache(maxsize=1024)
def _elements(block: Block, layout: Layout, mesh: Mesh) -> int:
    """Counts the elements of the trained parameters of a layer that one rank holds."""
    # Open dims (batch, sequence) have no parameters; they only must divide.
    sizes = {dim.name: 2 * mesh.cp * mesh.tp for dim in block.dims if dim.size is None}  # any that axes divide
    local = shard_block(block, layout, mesh, sizes, BF16).local_elements
    frozen = {tensor.name for tensor in block.frozen}
    return sum(int(local[tensor.name]) for tensor in block.parameters if tensor.name not in frozen)


def with_gradient_buckets(program: Program, buckets: Sequence[Sequence[int]], *, overlap: bool) -> Program:
    """The Program, whose stages are layers, with one AR over data-parallel ranks for each bucket that has any.

    overlap: right after the last backward of its layers; otherwise where the last AR of them was."""
    reduction, of_layer = by_name(program.kinds)["AR"], {layer: tuple(one) for one in buckets for layer in one}
    listed = []
    for rows in rows_of(program):
        sums = {i: of_layer[row.stage] for i, row in enumerate(rows) if row.kind == "AR" and row.override is None}
        # The last AR of a bucket's layers wins, since later items overwrite.
        at = {of: i for i, of in sums.items()}
        if overlap:
            reduced = set(sums.values())
            writes = [(i, of_layer[row.stage]) for i, row in enumerate(rows) if row.kind in WRITES_GRADIENTS]
            at = {of: i for i, of in writes if of in reduced}
        bucket_rows = {i: bucket(reduction, of) for of, i in at.items()}
        new_rows = [
            ([] if i in sums else [row]) + ([bucket_rows[i]] if i in bucket_rows else []) for i, row in enumerate(rows)
        ]
        listed.append([row for some in new_rows for row in some])
    return with_rows(program, listed)


def with_shard_buckets(program: Program, buckets: Sequence[Sequence[int]]) -> Program:
    """The Program, whose stages are layers under ZeRO, with one REDUCE_GRAD for each bucket where its last layer had
    its own; under ZeRO 2 and 3 one for each unit. All-reduces over replicas (AR) stay a layer's, and come after it."""
    reduction, of_layer = by_name(program.kinds)["REDUCE_GRAD"], {layer: tuple(one) for one in buckets for layer in one}
    listed = []
    for rows in rows_of(program):
        new_rows, waiting, after = list[Row](), dict[tuple[int, ...], set[int]](), dict[tuple[int, ...], list[Row]]()
        for row in rows:
            of = of_layer.get(row.stage, ())
            if row.kind == "REDUCE_GRAD":
                there = waiting.setdefault(of, set())
                there.add(row.stage)
                # The last layer of the bucket is reduced here: the bucket is whole.
                if there == set(of):
                    new_rows += [bucket(reduction, of), *after.pop(of, ())]
                    del waiting[of]
            elif row.kind == "AR" and row.override is None and of in waiting:
                after.setdefault(of, []).append(row)
            else:
                new_rows.append(row)
        assert not waiting, "every layer of a bucket is reduced as often as the others"
        listed.append(new_rows)
    return with_rows(program, listed)
