"""What routers did in a step so far: `StepLoad`, for `experts.balance = "global"`.

Each microbatch's choices in a layer are added up over the ranks that have other tokens, by one all-reduce in its
forward that the Graph's op `step_load` lists as inside, and then over the microbatches that the layer has seen in this
step. A microbatch that is computed again gets what it got first. Leaves out the loss (`ops.balance`).
Source: Megatron-LM core, router.py, `_apply_global_aux_loss`: `global_tokens_per_expert` and its `ga_steps`.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from gnomon.graph import Layer
from gnomon.runtime.mesh.collectives import all_reduce
from gnomon.runtime.ops.balance import choices


class StepLoad:
    """The load of one rank's experts within a step."""

    def __init__(self, group: ProcessGroup | None) -> None:
        """Takes the group of the ranks that hold the same layers."""
        self.group = group
        self.so_far: dict[str, Tensor] = {}
        """Label of a layer -> (experts): of the microbatches that it has seen."""
        self.known: dict[tuple[str, int], Tensor] = {}
        """The same as a microbatch found it, itself included."""

    def new_step(self) -> None:
        """Begins a step at 0."""
        self.so_far.clear()
        self.known.clear()

    def counted(self, layer: Layer, unit: int, load: Tensor) -> Tensor:
        """Counts (experts): how many tokens chose each, up to this microbatch. load: (rows, 2 or 3, experts), this
        rank's."""
        # A layer that is computed again finds its key: nothing is counted twice, and there is no second all-reduce.
        key = layer.label, unit
        if key not in self.known:
            own = choices(load)
            if self.group is not None:
                all_reduce(own, self.group)
            before = self.so_far.get(layer.label)
            self.known[key] = self.so_far[layer.label] = own if before is None else before + own
        return self.known[key]
