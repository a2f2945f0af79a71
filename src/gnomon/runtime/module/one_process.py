"""A model on one process, without a plan: what every plan must agree with, and what writes a few words.

`OneProcess(graph, …)` holds all weights and runs the Graph's blocks on whole tensors; it needs no `torch.distributed`.
`loss(batch)` leaves gradients in `gradient(name)`; `output(batch)` is the first output of the Graph (that of
`without_loss` has logits). Leaves out the update and everything that a plan decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from types import MappingProxyType

import torch
from torch import Tensor

from gnomon.graph import Dtypes as GraphDtypes
from gnomon.graph import Graph
from gnomon.plans import Layout, Mesh
from gnomon.runtime.module.apply import beginning, slots_of
from gnomon.runtime.module.blocks import BlockRun
from gnomon.runtime.module.stage import Batch, Stage
from gnomon.runtime.ops import check_runnable
from gnomon.runtime.parameters.frozen import four_bit_of, frozen_of, in_four_bits
from gnomon.runtime.parameters.parameters import CPU, Dtypes, Parameters, Slot, Values
from gnomon.sharding import ShardedBlock, shard_graph


@lru_cache(maxsize=8)
def _undivided(graph: Graph) -> Mapping[str, ShardedBlock]:
    """Every block as one rank runs it alone. Kept: a model is compared with under many plans."""
    sizes, dtypes = {"batch": 1, "seq": 2, "enc_seq": 2}, GraphDtypes(param="fp32", compute="fp32")
    return MappingProxyType(shard_graph(graph, Layout(), Mesh(), sizes, dtypes))


class OneProcess:
    """All layers of a model on this process."""

    def __init__(
        self,
        graph: Graph,
        *,
        values: Values | None = None,
        states: Mapping[str, Tensor] | None = None,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device = CPU,
    ) -> None:
        """Takes values of the parameters (`weights.reader`; None: those of step 0 by the seed) and states, what else a
        captured model reads, by name."""
        check_runnable(graph)
        self.graph = graph
        sharded = _undivided(graph)
        runs = {name: BlockRun(block, {}) for name, block in sharded.items()}
        slots = tuple(slots_of(graph.layers(), sharded, {}, set()))
        dtypes = Dtypes(param=dtype, grad=dtype, master=None, states=dtype)
        self.parameters = Parameters(slots, dtypes, zero=0, shard=0, num_shards=1, device=device)
        first = beginning(values, graph, seed)
        self.parameters.fill(first)
        self.stage = Stage(graph, graph.layers(), (self.parameters,), runs, 0)
        self.stage.states = states or {}
        still = () if self.stage.captured else tuple(slots_of(graph.layers(), sharded, {}, set(), frozen=True))
        narrow = in_four_bits(graph)
        self.stage.frozen = frozen_of((slot for slot in still if slot.name not in narrow), dtype, first, device)
        of_base = (slot for slot in still if slot.name in narrow)
        self.stage.four_bit = four_bit_of(of_base, dtype, first, values, device)

    def output(self, batch: Batch) -> Tensor:
        """The loss summed over tokens, or logits."""
        outputs = self.stage({}, batch)
        first, *others = (outputs[result] for result in self.stage.results)
        return sum(others, first)

    def loss(self, batch: Batch, *, count: int) -> float:
        """The sum of the losses of the batch divided by `count`; gradients of it are in `gradient`."""
        self.parameters.drop_grad()
        loss = self.output(batch) / count
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    def gradient(self, slot: Slot) -> Tensor:
        """The gradient of one parameter, after `loss`."""
        return self.parameters.whole_grad()[slot.start : slot.stop].view(slot.shape)

    @property
    def slots(self) -> Iterable[Slot]:
        """Lists the parameters."""
        return self.parameters.slots
