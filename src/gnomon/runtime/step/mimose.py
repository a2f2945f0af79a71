"""Mimose in a run: each microbatch recomputes the layers that its length asks for (`methods.mimose`).

`Mimose` tells a `Stage` before a forward which layers are recomputed. The first microbatches, and later ones that are
longer than all before, are measured (`layer_bytes`) with every repeated layer recomputed, which is the least that they
can take. A measured one above the budget ends the run. Left out: the choice itself.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from gnomon.errors import PlanError, RunError
from gnomon.graph import Graph
from gnomon.methods.mimose import MARGIN, MimoseSettings, RecomputeController, Sample
from gnomon.runtime.module.stage import Batch, Stage
from gnomon.runtime.watch.layer_bytes import LayerBytes, LiveBytes
from gnomon.units import show_bytes


class Mimose:
    """Mimose's controller at work on the one stage of a rank."""

    def __init__(
        self, settings: MimoseSettings, graph: Graph, stage: Stage, base: Callable[[], int], device: torch.device
    ) -> None:
        """Begins without a measurement. base: bytes on the device now that are no microbatch's. PlanError for a model
        whose layers keep what their lengths ask for."""
        if any(op.attr("window", 0) for block in graph.blocks for op in block.ops if op.does == "attends"):
            raise PlanError(f"{graph.name}: attention windows keep a mask for each length, which mimose does not count")
        self.settings, self.stage, self.base, self.live = settings, stage, base, LiveBytes(device)
        repeated = [index for index, layer in enumerate(stage.layers) if layer.call.first is not None]
        self.controller = RecomputeController(settings, repeated)
        self.measured: LayerBytes | None = None
        self.tokens = self.at_start = 0
        self.warm = False
        """Whether a microbatch went back: the first makes what all others find there."""

    def begin(self, batch: Batch) -> None:
        """Chooses what the forward of a microbatch keeps, before it runs. batch: its inputs, rows first."""
        self.tokens = max(x.numel() for x in batch.values())
        chosen = self.controller.choose(self.tokens)
        layers = self.controller.layers if chosen is None else chosen
        self.stage.presets = {self.stage.layers[index].label: "full" for index in layers}
        if chosen is None:
            self.at_start = self.base()
            self.live.__enter__()
            self.stage.measures = self.measured = LayerBytes(self.live, len(self.stage.layers))

    def end(self) -> None:
        """Ends a microbatch after its backward. RunError where it took more than the budget, with every layer
        recomputed."""
        if self.measured is None:
            return
        self.live.__exit__(None, None, None)
        measured, self.measured, self.stage.measures = self.measured, None, None
        forward_bytes = measured.forward_bytes()
        if (took := self.at_start + measured.most) > self.settings.budget * (1 - MARGIN):
            raise RunError(
                f"a microbatch of {self.tokens} tokens took {show_bytes(took)} with every layer recomputed, of "
                f"mimose's budget of {show_bytes(self.settings.budget)}, of which {MARGIN:.0%} stays free; raise the "
                f"budget, or take shorter sequences or fewer a microbatch"
            )
        # The first microbatch also makes tables and buffers that all later ones find: its bytes are not a microbatch's.
        if self.warm:
            self.controller.take(Sample(tokens=self.tokens, base=self.at_start, forward_bytes=forward_bytes))
        self.warm = True

    def summary(self) -> str:
        """How it went, in a line."""
        controller = self.controller
        if controller.estimate is None:
            return f"mimose measured {len(controller.samples)} microbatches and chose for none"
        num_chosen, counts = (
            controller.num_made + controller.found,
            [len(layers) for layers in controller.choices.values()],
        )
        return (
            f"mimose measured {len(controller.samples)} microbatches (polynomials off by "
            f"{controller.estimate.error:.1%} at most) and chose for {num_chosen}, "
            f"{controller.found / num_chosen:.0%} of them "
            f"from {len(counts)} choices of {min(counts)} to {max(counts)} recomputed layers"
        )
