"""Which experts tokens chose, counted as steps run: `RoutedCounts`, for `gnomon run --record-router`.

Counted is what a layer's dispatch is given in the first forward of a microbatch: not what is computed again in
backward, not validation, and before a capacity drops any. Every token is at the dispatch of one rank alone, so that the
sum over ranks is that of the batch. The file: `formats.router`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from gnomon.formats.router import RouterRecord, routers_of
from gnomon.graph import Graph, Layer


class RoutedCounts:
    """Counts of one rank."""

    def __init__(self, graph: Graph, device: torch.device) -> None:
        """InputError for a graph without routers."""
        self.model, self.routers = graph.name, routers_of(graph)
        self.place = {router.layer: index for index, router in enumerate(self.routers)}
        self.step = torch.zeros((len(self.routers), self.routers[0].experts), dtype=torch.int64, device=device)
        """(layers, experts): of the step under way."""
        self.steps: dict[int, Tensor] = {}
        """The same of those before, by their numbers."""

    def note(self, layer: Layer, indices: Tensor) -> None:
        """Adds up where tokens go. indices: (…, topk), the experts that this rank's tokens chose in a layer."""
        self.step[self.place[layer.label]] += torch.bincount(indices.reshape(-1), minlength=self.step.shape[1])

    def end_step(self, number: int) -> None:
        """Puts the counts of a step away."""
        self.steps[number] = self.step.cpu().clone()
        self.step.zero_()

    def record(self) -> RouterRecord:
        """Sums what all ranks have noted. All must call it, after the same steps."""
        counts = torch.stack(list(self.steps.values()))
        dist.all_reduce(counts)
        return RouterRecord(model=self.model, routers=self.routers, steps=tuple(self.steps), counts=counts.numpy())
