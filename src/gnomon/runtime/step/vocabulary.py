"""The embedding and the head divided by vocabulary over all pipeline ranks (`schedule.vocabulary`), as ranks run them.

`DividedVocabulary` says what a rank holds of both beside its stages, `Heads` has a function for each of their actions:
a part of the lookup (EMBED) and its gradient (EGRAD), a part of the logits, the loss and their gradient (S), and what
ranks exchange. Each part runs as a block that tp divides, with pipeline ranks in place of tp's. Leaves out the order of
actions (`orders.patterns.vocabulary`) and how the graph is cut (`plans.ends`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gnomon.errors import PlanError
from gnomon.graph import Dtypes as GraphDtypes
from gnomon.graph import Graph, Layer
from gnomon.plans import Layout, Mesh, Plan
from gnomon.plans.ends import EMBEDDED, HIDDEN, Ends
from gnomon.runtime.mesh.groups import Groups, stage_sets
from gnomon.runtime.module.apply import VocabularyShare, axes_of, looked_up, slots_of
from gnomon.runtime.module.blocks import BlockRun
from gnomon.runtime.module.crossings import Crossing, Hop, ReceivedShape, Shapes
from gnomon.runtime.module.stage import Batch, Stage
from gnomon.runtime.ops.site import Axis
from gnomon.runtime.step.buffers import Buffers
from gnomon.runtime.step.compute import Compute
from gnomon.runtime.step.feed import Feed
from gnomon.runtime.step.rows import Action
from gnomon.sharding import ShardedBlock, shard_graph


@dataclass(frozen=True, slots=True, kw_only=True)
class DividedVocabulary:
    """What a rank has of a divided embedding and head."""

    ends: Ends
    plan: Plan
    """With its vocabulary."""
    at: int
    """The stage that they are beside: the first of this rank."""
    axes: Mapping[str, Axis]
    """`tp` are the ranks of the pipeline."""
    blocks: Mapping[str, ShardedBlock]
    """Of `ends.parts`."""
    layout: Layout
    mesh: Mesh
    """In which `axes` are divided."""

    @staticmethod
    def of(ends: Ends, plan: Plan, groups: Groups) -> DividedVocabulary:
        """Divides embedding and head over pipeline ranks, and takes this rank's part. PlanError for a parameter that
        would lie whole on every rank."""
        rank, count = groups.here.pipeline_rank, plan.num_pipeline_ranks
        part = Axis(group=groups.by_comm["vocabulary"], ranks=count, index=rank)
        # What divides the vocabulary is called tp here, so that blocks shard by the rules of a vocabulary-parallel
        # table and head; a plan's own tp is 1 under a divided vocabulary.
        mesh = Mesh(dp_shard=1, cp=groups.mesh.cp, tp=count)
        layout = replace(plan.layout, sequence_parallel=False, vocab_parallel=True, loss_parallel=True, rules=())
        open_dims = {dim.name for block in ends.parts.blocks for dim in block.dims if dim.size is None}
        # Only layouts are asked for: any sizes that the axes divide.
        sizes = {name: 1 if name == "batch" else 2 * mesh.cp * count for name in (*open_dims, "batch", "seq")}
        blocks = shard_graph(ends.parts, layout, mesh, sizes, GraphDtypes(param="fp32", compute="fp32"))
        axes = {**axes_of(ends.plan, groups), "tp": part}
        at = plan.pipeline_ranks.index(rank)
        for block in blocks.values():
            for tensor in (*block.block.parameters, *block.block.frozen):
                if block.homes[tensor.name].dim_of("tp") is None:
                    raise PlanError(f"vocabulary: {tensor.name} is not divided over the pipeline; use 'ends'")
        return DividedVocabulary(ends=ends, plan=plan, at=at, axes=axes, blocks=blocks, layout=layout, mesh=mesh)

    def shares_of_stages(self, graph: Graph) -> dict[int, VocabularyShare]:
        """Says for each stage what this rank holds besides and what the stage is handed. graph: the whole one."""
        layers, shares = self.ends.parts.layers(), dict[int, VocabularyShare]()
        tables, last = looked_up(graph), self.plan.num_stages - 1
        trained = tuple(slots_of(layers, self.blocks, self.axes, set(), looked_up=tables))
        still = tuple(slots_of(layers, self.blocks, self.axes, set(), frozen=True))
        for stage, rank in enumerate(self.plan.pipeline_ranks):
            if rank == self.plan.pipeline_ranks[self.at]:
                own = stage == self.at
                shares[stage] = VocabularyShare(
                    slots=trained if own else (),
                    frozen=still if own else (),
                    enters=(self.embedded,) if stage == 0 and self.ends.embedded else (),
                    leaves=(self.hidden,) if stage == last else (),
                )
        return shares

    @property
    def embedded(self) -> Hop:
        """Embedded tokens, to the first stage."""
        lookup = self.ends.parts.layers()[0].call.block
        block = self.ends.parts.block(lookup)
        crossing = Crossing(name=EMBEDDED, block=lookup, tensor=block.tensor(block.outputs[0]), trained=True)
        return Hop(source=0, target=0, crossings=(crossing,), buffers=("EX", "EG"))

    @property
    def hidden(self) -> Hop:
        """Hidden states, from the last stage."""
        last, head = self.plan.num_stages - 1, self.ends.parts.layers()[-1].call
        own = next(name for name, source in head.inputs if source == HIDDEN)
        tensor = self.ends.parts.block(head.block).tensor(own)
        at = self.plan.pipeline_ranks.index(self.plan.pipeline_ranks[last])
        crossing = Crossing(name=self.ends.hidden, block=head.block, tensor=tensor, trained=True)
        return Hop(source=last, target=at, crossings=(crossing,), buffers=("HX", "HG"))


class Heads:
    """A rank's part of the embedding and the head at work, where all pipeline ranks meet for each (`interlaced`)."""

    def __init__(
        self, divided: DividedVocabulary, stage: Stage, groups: Groups, compute: Compute, buffers: Buffers, feed: Feed
    ) -> None:
        """Makes the stages of the ends. stage: the one that has the parameters."""
        self.divided, self.stage, self.compute, self.buffers, self.feed = divided, stage, compute, buffers, feed
        plan, parts, at = divided.plan, divided.ends.parts, divided.at
        self.last = plan.num_stages - 1
        runs = {name: BlockRun(block, divided.axes) for name, block in divided.blocks.items()}
        *lookup, head = parts.layers()
        self.head = self._stage(head, runs, ())
        self.lookup: Stage | None = None
        if lookup:
            crossing = replace(divided.embedded.crossings[0], name=divided.ends.embedded)
            self.lookup = self._stage(lookup[0], runs, (Hop(source=at, target=at, crossings=(crossing,)),))
        self.group = divided.axes["tp"].group
        column = [ranks[groups.here.position] for ranks in stage_sets(plan)]
        here = groups.here.pipeline_rank
        self.first_rank, self.last_rank = column[plan.pipeline_ranks[0]], column[plan.pipeline_ranks[-1]]
        self.is_first, self.is_last = plan.pipeline_ranks[0] == here, plan.pipeline_ranks[-1] == here
        dtype = stage.own_parameters[0].dtypes.param
        shapes = Shapes(parts, divided.layout, divided.mesh, feed.sizes, dtype)
        self.hidden = shapes.of(divided.hidden.crossings[0])
        self.embedded = shapes.of(divided.embedded.crossings[0]) if lookup else None
        self.looked_up: dict[int, GradientEdge] = {}
        """Of each microbatch whose gradient of the embedding is not there yet."""

    def _stage(self, layer: Layer, runs: Mapping[str, BlockRun], leaves: Sequence[Hop]) -> Stage:
        share_stage = Stage(
            self.divided.ends.parts, [layer], self.stage.own_parameters, runs, self.stage.zero, leaves=leaves
        )
        share_stage.frozen, share_stage.four_bit = self.stage.frozen, self.stage.four_bit
        return share_stage

    def close(self) -> None:
        """Ends what it has begun: nothing."""

    def actions(self) -> Mapping[str, Action]:
        """Maps each kind of row to what does it."""
        return {"EMBED": self._embed, "EGRAD": self._embedding_gradient, "S": self._head}

    def embed(self, batch: Batch) -> Tensor:
        """Embedded tokens of a microbatch, the same on all pipeline ranks; all ask."""
        assert self.lookup is not None
        outputs: dict[str, Tensor] = self.lookup({}, batch)
        return outputs[self.divided.ends.embedded]

    def hand_embedded(self, unit: int, batch: Batch) -> Tensor | None:
        """Embedded tokens, handed to the first stage on its rank; None for a graph without an embedding."""
        if self.lookup is None:
            return None
        x = self.embed(batch)
        if self.is_first:
            self.buffers.tensors["EX", 0, unit] = (x.detach(),)
        return x

    def last_hidden(self, unit: int) -> Tensor:
        """Hidden states of the last stage, on every pipeline rank; all ask."""
        return self._from(self.last_rank, self.hidden, ("HX", self.divided.at, unit) if self.is_last else None)

    def _embed(self, stage: int, unit: int) -> None:
        self.compute.state.gathered(stage)
        x = self.hand_embedded(unit, self.feed.of_unit(unit))
        assert x is not None
        self.looked_up[unit] = get_gradient_edge(x)

    def _embedding_gradient(self, stage: int, unit: int) -> None:
        assert self.embedded is not None
        grad = self._from(self.first_rank, self.embedded, ("EG", 0, unit) if self.is_first else None)
        torch.autograd.backward([self.looked_up.pop(unit)], [grad])

    def loss(self, hidden: Tensor, batch: Batch) -> Tensor:
        """Summed over tokens, the same on all pipeline ranks; all ask."""
        outputs: dict[str, Tensor] = self.head({HIDDEN: hidden}, batch)
        return outputs[self.head.results[0]]

    def share(self, loss: Tensor) -> Tensor:
        """What of the mean loss this rank reports: the sum over ranks is the loss."""
        return loss.detach().double() / self.feed.counted / self.head.copies[self.head.results[0]]

    def _head(self, stage: int, unit: int) -> None:
        self.compute.state.gathered(stage)
        hidden = self.last_hidden(unit).requires_grad_()
        loss = self.loss(hidden, self.feed.of_unit(unit))
        self.compute.loss += self.share(loss)
        torch.autograd.backward([loss], [self.compute.loss_grad()])
        if self.is_last:
            assert hidden.grad is not None
            self.buffers.tensors["HG", self.last, unit] = (hidden.grad,)

    def _from(self, rank: int, shape: ReceivedShape, name: tuple[str, int, int] | None) -> Tensor:
        """A tensor that `rank` has in a buffer, on every rank of the pipeline."""
        if name is not None:
            (x,) = self.buffers.take(name)
            x = x.contiguous()
        else:
            x = torch.empty(shape.sizes, dtype=shape.dtype, device=self.feed.device)
        dist.broadcast(x, rank, group=self.group)
        return x
