"""Bounds of single points: what sharding and overlap add to a family's numbers, in time.

`Sharding` holds, for one way of sharding and each kind of layer, the bytes that are reduced and gathered, and the
seconds of these and of the update. Leaves out what a schedule costs (`bounds.families.time_bound`) and memory
(`point_memory`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from gnomon.graph import DTYPE_BITS
from gnomon.plans import Mesh
from gnomon.plans.parts import Optimizer
from gnomon.prediction.contention import share
from gnomon.prices.collectives import collective_seconds
from gnomon.prices.curves import curves_for
from gnomon.prices.links import AxisLink
from gnomon.prices.optimizer import accumulate_seconds
from gnomon.prices.stream import stream_seconds
from gnomon.search.bounds.families import GRID_S, Actions, Ends, Family, Pipeline, PipelineName, SearchJob, way
from gnomon.search.bounds.layer_tables import KindTable, Split
from gnomon.search.bounds.update_time import Updates
from gnomon.sharding import ParameterCollective
from gnomon.sharding.parameters import (
    parameter_collectives,
)

Doubles = NDArray[np.float64]
Longs = NDArray[np.int64]


class Sharding:
    """One way of sharding: dp_replicate x dp_shard and a ZeRO stage. Families whose layers have the same parameters
    (`layer_tables.parameters_of`) share it: it reads no times and no activations of theirs."""

    def __init__(self, family: Family, replicas: int, shards: int, zero: int) -> None:
        # `pp` is 1 in this mesh: parameters are divided inside a stage, whatever the number of stages.
        self.job, self.layers = family.job, family.table
        base = self.job.space.base
        self.mesh: Mesh = replace(family.mesh, pp=1, dp_replicate=replicas, dp_shard=shards)
        self.optimizer: Optimizer = replace(base.optimizer, zero=zero)  # type: ignore[arg-type]
        self.precision = base.precision
        self.away = self.optimizer.zero == 3 and self.optimizer.offload_parameters
        """Whether parameters come from the host, block by block."""
        # One rank has nobody to divide with; ZeRO then changes nothing unless parameters wait on the host.
        divided = shards * family.cp > 1
        self.zero = zero if divided or self.away else 0
        """The ZeRO stage that has an effect on rows."""
        self.pp = family.pp
        self.known = self.job.alike_on_nodes(self.mesh.world_size)
        self.updates = Updates(self.job, self.layers, self.mesh, self.optimizer, self.pp, away=self.away)
        self._traffic: dict[tuple[PipelineName, bool], Traffic] = {}
        self._sizes: dict[tuple[str, str], dict[str, Doubles]] = {}

    @cached_property
    def links(self) -> Mapping[str, AxisLink]:
        """Maps each axis to the link that its groups run over."""
        return self.job.links(replace(self.mesh, pp=self.pp))

    @cached_property
    def collectives(self) -> tuple[tuple[ParameterCollective, ...], ...]:
        """[kinds] collectives of each layer's parameters and gradients."""
        return tuple(
            parameter_collectives(price.sharded, self.mesh, self.optimizer, self.precision)
            for price in self.layers.prices
        )

    @cached_property
    def weights(self) -> StreamWeights:
        """Shares of the device that its collectives take from overlapped kernels under ZeRO 3."""

        def least(kind: str, when: str) -> float:
            # Where stages lie differently on nodes, links are not known; a share of 0 keeps the bound.
            groups = self.sizes(kind, when) if self.known else {}
            return min((share(self.links[axes]) for axes in groups), default=1.0 if self.known else 0.0)

        reduces = least("reduce_scatter", "after_backward")
        reads = self.optimizer.reshard_after_forward and not self.away  # copies from the host weigh nothing
        gathers = least("all_gather", "before_forward") if reads else 0.0
        return StreamWeights(reduces=reduces, sums=least("all_reduce", "after_backward") >= reduces, reads=gathers)

    def sizes(self, kind: str, when: str) -> dict[str, Doubles]:
        """Maps a group of axes to the [kinds] bytes of its collectives of one kind and moment."""
        if (kind, when) not in self._sizes:
            by_group: dict[str, Doubles] = {}
            for i, of_kind in enumerate(self.collectives):
                for c in of_kind:
                    if c.kind == kind and c.when == when:
                        row = by_group.setdefault("+".join(c.axes), np.zeros(len(self.collectives)))
                        row[i] += c.bytes
            self._sizes[kind, when] = by_group
        return self._sizes[kind, when]

    def seconds(self, kind: str, when: str, parts: Split, buckets: Doubles) -> Doubles:
        """[stages] seconds of a collective in so many buckets, with nothing overlapped."""
        # A stack whose reducer fills buckets of its own (DDP) sends what has come so far: one piece is the least.
        if self.job.stack.gradients.reducer_buckets:
            buckets = np.ones(len(parts.counts))
        total = np.zeros(len(parts.counts))
        for axes, sizes in self.sizes(kind, when).items() if self.known else ():
            # [stages, kinds] @ [kinds] = [stages] bytes.
            link, size = self.links[axes], parts.counts @ sizes
            # Tied parameters are reduced with the first layer that holds them: take out what the later one would have
            # sent.
            for stage, kind_of, rest in self.tied(parts):
                size[stage] += _bytes(rest, kind, when, axes) - _bytes(self.collectives[kind_of], kind, when, axes)
            # buckets x (time of one bucket): latency is paid once a bucket.
            bucket_s = np.asarray(collective_seconds(kind, size / buckets, link), float)
            total += np.where(size > 0, buckets * bucket_s * self.job.slower(link), 0.0)
        return total

    def tied(self, parts: Split) -> Iterator[tuple[int, int, tuple[ParameterCollective, ...]]]:
        """(stage, kind, what is left of its collectives) where a parameter goes with a layer before, as `StagePrice`
        has it: of a layer that is the only one of its kind there, below ZeRO 3."""
        for stage, kind, tensor in parts.repeated if self.zero < 3 else ():
            if parts.counts[stage, kind] == 1:
                sharded, without = self.layers.prices[kind].sharded, frozenset({tensor})
                yield (
                    stage,
                    kind,
                    parameter_collectives(sharded, self.mesh, self.optimizer, self.precision, without=without),
                )

    @cached_property
    def adding(self) -> Doubles:
        """[kinds] seconds of adding a layer's weight gradients to their buffer."""
        divided = self.optimizer.zero >= 2 and self.mesh.dp_shard * self.mesh.cp > 1
        return adding_s(self.layers, self.job, divided=divided)

    @cached_property
    def copying(self) -> Doubles:
        """[kinds] seconds of copying gathered parameters into place, in forward and again in backward (ZeRO 3)."""
        out = np.zeros(len(self.collectives))
        if self.optimizer.zero != 3 or not self.optimizer.reshard_after_forward:
            return out
        device = self.layers.device
        for i, of_kind in enumerate(self.collectives):
            # A copy reads and writes every gathered byte once.
            if size := sum(c.bytes for c in of_kind if c.when == "before_forward"):
                out[i] = float(stream_seconds(size, size, device, curves_for(device)))
        return out

    def traffic(self, pipeline: Pipeline, *, overlap: bool) -> Traffic:
        """What each stage sends before and after the update, with nothing overlapped; kept once a pipeline."""
        key = pipeline.name, overlap
        if key not in self._traffic:
            parts = pipeline.split
            layers = np.maximum(parts.counts.sum(axis=1), 1.0)
            one = np.ones(len(layers))
            last = self._buckets(parts, layers, "reduce_scatter") if overlap else one
            after = self._buckets(parts, layers, "all_reduce") if overlap else one
            ahead = self._buckets(parts, layers, "all_gather") if overlap else one
            reduce = first = nothing = np.zeros(len(layers))
            if self.zero:
                reduce = first = self.seconds("reduce_scatter", "after_backward", parts, last)
                # Reductions and sums over replicas may be cut into different numbers of buckets: `first` is the time of
                # the reductions in as many pieces as the sums have.
                if not np.array_equal(last, after):
                    first = self.seconds("reduce_scatter", "after_backward", parts, after)
            known = self._traffic.get((pipeline.name, not overlap))
            self._traffic[key] = Traffic(
                # The update does not depend on overlap, so the twin's is taken over.
                update=self.updates.seconds(pipeline.split) * pipeline.own if known is None else known.update,
                buckets=last,
                reduce=reduce * pipeline.own,
                after=after,
                first=first,
                both=self.seconds("all_reduce", "after_backward", parts, after) * pipeline.own,
                ahead=ahead,
                gather=self.seconds("all_gather", "after_step", parts, ahead) * pipeline.own if self.zero else nothing,
            )
        return self._traffic[key]

    def _buckets(self, parts: Split, layers: Doubles, kind: str) -> Doubles:
        """[stages] pieces in which a collective goes: one a layer, or by the plan's size; one where the stack has no
        buckets."""
        if self.job.stack.gradients.bucketed is False:
            return np.ones(len(layers))
        size = self.job.space.base.overlap.bucket_bytes
        if size is None:
            return layers
        total = np.zeros(len(layers))
        for i, of_kind in enumerate(self.collectives):  # as prices count them: by kind, whenever they run
            total += parts.counts[:, i] * _bytes(of_kind, kind)
        for stage, i, rest in self.tied(parts):
            total[stage] += _bytes(rest, kind) - _bytes(self.collectives[i], kind)
        return np.maximum(1.0, np.ceil(total / size))

    @cached_property
    def gathered_s(self) -> Doubles:
        """[kinds] seconds of gathering a layer's parameters (ZeRO 3), on the grid or under it; and of copying a rank's
        part of them from the host before, where they wait there."""
        gathered = self._each("all_gather", "before_forward")
        return gathered + self.updates.copies(trained=False) if self.away else gathered

    @cached_property
    def reduced_s(self) -> Doubles:
        """[kinds] seconds of reducing a layer's gradients (ZeRO 3)."""
        return self._each("reduce_scatter", "after_backward")

    def _each(self, kind: str, when: str) -> Doubles:
        # One layer of each kind as a stage of its own: `seconds` then gives a layer's collective.
        one = np.eye(len(self.collectives))
        single_layer = Split(order=(), counts=one, repeated=())
        return np.maximum(self.seconds(kind, when, single_layer, np.ones(len(one))) - GRID_S, 0.0)

    def streams(self, pipeline: Pipeline, act: Actions, sends: Doubles, count: int, joins: Longs) -> float:
        """Seconds of a step under ZeRO 3 by its communication streams."""
        if self.zero != 3:
            return 0.0
        gathered = self.gathered_s if self.optimizer.reshard_after_forward else None
        return streams(pipeline, act, sends, count, joins, self.reduced_s, self.summed_s, gathered)

    def waits(self, pipeline: Pipeline, act: Actions) -> Actions:
        """Actions with what they wait for gathers under ZeRO 3."""
        if self.zero != 3 or not self.optimizer.reshard_after_forward:
            return act
        return waiting(pipeline, act, self.gathered_s, self.job.space.base.overlap.prefetch)

    @cached_property
    def summed_s(self) -> Doubles:
        """[kinds] seconds of adding a layer's divided gradients up over replicas, once a step (ZeRO 3)."""
        return self._each("all_reduce", "after_backward")

    def late(self, pipeline: Pipeline, back: Doubles) -> Doubles:
        """[stages] what ends a step under ZeRO 3: the reductions of a stage's layers begin with its last backward (or
        weight gradients) and the sums over replicas follow them on one stream; what is longer comes after.

        back: [stages] seconds of that backward just as the chain before counts them, with its waits for gathers
        (`waits`): from its start b, the step lasts for max(b, total) more, which is never less for a longer b. A chain
        with the waits and an end from `back` without them would count the reductions beside the waits twice.
        """
        total = pipeline.split.counts @ (self.reduced_s + self.summed_s)
        return np.maximum(total - back, 0.0) * pipeline.own


def ends_of(
    shardings: Sequence[Sharding], pipeline: Pipeline, forward: Doubles, backs: Doubles, overlap: NDArray[np.bool_]
) -> Ends:
    """What begins and ends a step of points that are sharded so, [stages, points].

    shardings: all under ZeRO 3, or none. forward: [stages] what gathers run beside. backs: [stages, points] what
    reductions run beside, backwards or their weight gradients. overlap: [points] whether they do.
    """
    # All points of a group are under ZeRO 3 or none is: their rows differ in kind.
    norm = np.array([sharding.updates.norm_s(pipeline) for sharding in shardings])
    if shardings[0].zero == 3:
        update = np.stack([sharding.updates.by_layer(pipeline) for sharding in shardings], axis=1)
        late = [sharding.late(pipeline, backs[:, i]) for i, sharding in enumerate(shardings)]
        none, reduce = np.zeros_like(update), np.stack(late, axis=1)
        # ZeRO 3 gathers layer by layer in the forward, so nothing but the updates stands between norm and first
        # forward.
        head = _of_rank(pipeline, update)
        return Ends(update=update, head=head, norm=norm, reduce=reduce, microbatch_reduce=none, blocked=none)
    every = [sharding.traffic(pipeline, overlap=bool(o)) for sharding, o in zip(shardings, overlap, strict=True)]
    of = Traffic(**{name: np.stack([getattr(one, name) for one in every], axis=1) for name in TRAFFIC})
    # Without overlap nothing hides: zero seconds of computing stand next to the collectives.
    back, ahead = np.where(overlap, backs, 0.0), np.where(overlap, forward[:, None], 0.0)
    reduce = _exposed_s(of.reduce, of.buckets, back)
    # Sums over replicas follow the reductions on one stream: what the reductions left of the backward may hide them.
    both = _exposed_s(of.both, of.after, np.maximum(back - of.first, 0.0))
    gather = _exposed_s(of.gather, of.ahead, ahead)
    updates, zero = _of_rank(pipeline, of.update), np.array([sharding.zero for sharding in shardings])
    return Ends(
        update=of.update,
        # With overlap a stage waits for its own gather; without, every gather of the rank holds the compute stream.
        head=np.where(overlap, np.maximum(updates, of.update + gather), updates + _of_rank(pipeline, gather)),
        norm=norm,
        reduce=reduce + both,
        microbatch_reduce=np.where((zero == 2) & overlap, reduce, 0.0),
        blocked=np.where((zero > 0) & ~overlap, reduce + both, 0.0),
    )


def streams(
    pipeline: Pipeline,
    act: Actions,
    sends: Doubles,
    count: int,
    joins: Longs,
    reduced: Doubles,
    summed: Doubles,
    gathered: Doubles | None,
) -> float:
    """Seconds of a step under ZeRO 3 by its communication streams. reduced, summed, gathered: [kinds] of a layer, at
    least; None where parameters stay gathered.

    Gradients are reduced once a microbatch and layer, and added up over replicas once, one after another on one stream,
    and not before the first forward of one of the rank's stages has ended. A pass of a microbatch over a stage reads
    its layers one by one; a gather serves neighbouring reads of one layer, so two passes over one stage that follow
    each other share at most one layer, and that only where they turn or the stage has no other (`joins`, [stages], how
    often): `gathers`, on one stream.
    """
    counts = pipeline.split.counts
    # Earliest end of a first forward on each rank: -max(-x) is the minimum over the rank's stages.
    before = way(pipeline, act.forward, sends)
    start = -pipeline.most_of_rank(-(before + act.forward)[:, 0])
    # Reductions of a rank follow each other on one stream: once a microbatch and layer, sums over replicas once a step.
    seconds = float((start + pipeline.on_rank @ (counts @ (reduced * count + summed))).max())
    if gathered is not None:
        seconds = max(seconds, float(gathers(pipeline, count, joins, gathered).max()))
    return seconds


def gathers(pipeline: Pipeline, count: int, joins: Longs, gathered: Doubles) -> Doubles:
    """[ranks] seconds of a step's gathers under ZeRO 3, at least: two passes over each stage for each microbatch, less
    the longest layer where passes may share one."""
    # Two passes (forward, backward) a microbatch; a join saves at most the longest layer of the stage.
    counts = pipeline.split.counts
    present = np.where(counts > 0, gathered, 0.0).max(axis=1)
    seconds: Doubles = pipeline.on_rank @ np.maximum(2 * count * (counts @ gathered) - joins * present, 0.0)
    return seconds


def waiting(pipeline: Pipeline, act: Actions, gathered: Doubles, prefetch: int) -> Actions:
    """Actions under ZeRO 3 with what they wait for gathers, of which a layer's takes at least `gathered` [kinds].

    At most prefetch + 1 layers are held gathered, so the gather of a layer waits until the one that many before it is
    let go, which in the same pass is after the pass has begun: a pass takes at least the gathers of all its layers but
    the first prefetch + 1. The weight gradients read no parameters.
    """
    gathers_open = prefetch + 1
    # Forward holds the first `held` layers for free, backward the last ones: the bound takes the smaller rest, so it
    # holds in both directions.
    least = np.zeros((len(act.forward), 1))
    for order, stages in pipeline.distinct:
        times = gathered[order]
        if len(times) > gathers_open:
            least[stages] = max(
                min(float(times[gathers_open:].sum()), float(times[: len(times) - gathers_open].sum())), 0.0
            )
    return replace(
        act,
        forward=np.maximum(act.forward, least),
        whole=np.maximum(act.whole, least),
        input=np.maximum(act.input, least),
    )


def _of_rank(pipeline: Pipeline, seconds: Doubles) -> Doubles:
    """[stages] the sum over all stages of a stage's rank."""
    # [ranks, stages] @ [stages] sums a rank's stages; indexing by rank gives each stage its rank's sum.
    sums: Doubles = (pipeline.on_rank @ seconds)[pipeline.rank_of]
    return sums


def adding_s(table: KindTable, job: SearchJob, *, divided: bool) -> Doubles:
    """[kinds] seconds of adding a layer's weight gradients to their buffer. divided: of shards (ZeRO 2 and 3)."""
    device, precision = table.device, job.space.base.precision
    elements = table.elements.sum(axis=1)
    result = DTYPE_BITS[precision.compute] // 8
    out = np.zeros(len(elements))
    for i, count in enumerate(elements.tolist()):
        if not count:
            continue
        # ZeRO 2 and 3 add the reduced shard (width of `reduce`) from the product's result (width of `compute`).
        if divided:
            moved = count * result, count * (DTYPE_BITS[precision.reduce] // 8)
            out[i] = float(stream_seconds(*moved, device, curves_for(device), kernels=1))
        # Gradients of the compute width need no extra kernel: the GEMM accumulates in place.
        elif precision.grad != precision.compute:
            fused, tensors = bool(job.stack.gradients.grad_accumulation_fused), int(table.tensors[i])
            price = accumulate_seconds(count, precision, device, curves_for(device), fused=fused, tensors=tensors)
            out[i] = float(price.device_s)
    return out


@dataclass(frozen=True, kw_only=True)
class StreamWeights:
    """Shares of the device that collectives take from overlapped kernels: the least that any of a kind takes, so at
    most what is lost."""

    reduces: float
    """The share that reductions of every microbatch take."""
    sums: bool
    """Whether sums over replicas take as much as reductions."""
    reads: float
    """The share that gathers take."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Seconds of each stage's update and collectives, each [stages]."""

    update: Doubles
    buckets: Doubles
    """Buckets of gradients."""
    reduce: Doubles
    after: Doubles
    """Buckets of all-reduces."""
    first: Doubles
    """Seconds of reductions in as many buckets as all-reduces have, which hide before them."""
    both: Doubles
    """Seconds of all-reduces, after the reductions."""
    ahead: Doubles
    """Buckets of the gather."""
    gather: Doubles


TRAFFIC = ("update", "buckets", "reduce", "after", "first", "both", "ahead", "gather")


def _exposed_s(whole: Doubles, buckets: Doubles, hiding_s: Doubles) -> Doubles:
    """Seconds of a collective in buckets that overlapped computing cannot hide. Arrays are [stages, points]."""
    endless = ~np.isfinite(hiding_s).all(axis=0)  # nothing is known of a stage's computing: all may hide
    # The last bucket is ready only when computing ends, so at most (buckets - 1) / buckets of the computing hides any
    # of it, and one bucket always remains.
    hidden = np.where(
        endless, whole, np.where(buckets > 1, np.where(endless, 0.0, hiding_s) * (buckets - 1) / buckets, 0.0)
    )
    exposed_s = np.maximum(whole / buckets, whole - hidden)
    return np.maximum(exposed_s - GRID_S, 0.0)


def _bytes(
    collectives: Iterable[ParameterCollective], kind: str, when: str | None = None, axes: str | None = None
) -> int:
    """Bytes of the collectives of a kind; only those of a moment and a group, where given."""
    return sum(
        c.bytes for c in collectives if c.kind == kind and when in (None, c.when) and axes in (None, "+".join(c.axes))
    )
