"""Biases of routers that move by what tokens chose, in place of a loss: `RouterBias`, for `experts.bias_rate`.

After a step a bias goes up by the rate for experts that fewer of the step's tokens chose than the mean, and down for
those that more did. Counted are the choices of the first forward of every microbatch on every rank, which one
all-reduce adds up before the first update of the step; it is no row of the Program, and has a number for each expert of
each layer. Leaves out losses (`ops.balance`).
Source: DeepSeek-V3 technical report, 2.1.2; Wang et al. 2024, algorithm 1; Megatron-LM's get_updated_expert_bias.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gnomon.formats.router import routers_of
from gnomon.graph import Graph, Layer
from gnomon.plans.experts import router_biases
from gnomon.runtime.mesh.collectives import all_reduce
from gnomon.runtime.parameters.parameters import Parameters


class RouterBias:
    """Those of one rank."""

    def __init__(self, graph: Graph, rate: float, group: ProcessGroup | None, device: torch.device) -> None:
        """Takes the group of all ranks."""
        routers = routers_of(graph)
        self.rate, self.group = rate, group
        self.place = {router.layer: index for index, router in enumerate(routers)}
        self.layer_of = router_biases(graph)
        self.counts = torch.zeros((len(routers), routers[0].experts), dtype=torch.int64, device=device)
        """(layers, experts): tokens that chose an expert in this step, on this rank until they are added up."""
        self.added_up = False

    def new_step(self) -> None:
        """Begins a step, at which all counts are 0."""
        self.counts.zero_()
        self.added_up = False

    def note(self, layer: Layer, indices: Tensor) -> None:
        """Counts rows of each expert of a layer. indices: (…, topk), the experts that tokens chose."""
        self.counts[self.place[layer.label]] += torch.bincount(indices.reshape(-1), minlength=self.counts.shape[1])

    def move(self, parameters: Parameters) -> None:
        """Moves the biases among these parameters, as far as this rank updates them. All ranks come here once they have
        run their microbatches."""
        if not self.added_up:
            if self.group is not None:
                all_reduce(self.counts, self.group)
            self.added_up = True
        target = parameters.shard if parameters.master is None else parameters.master
        for slot, (low, high) in parameters.pieces():
            if (layer := self.layer_of.get(slot.name)) is None:
                continue
            counts = self.counts[self.place[layer]].double()
            first = parameters.mine[0] + low - slot.start
            offset = (self.rate * torch.sign(counts.mean() - counts))[first : first + high - low]
            target[low:high] += offset.to(target.dtype)
            # The next forward reads the shard, which an update would have rounded from the master copy before.
            if target is not parameters.shard:
                parameters.shard[low:high] = target[low:high].to(parameters.shard.dtype)
