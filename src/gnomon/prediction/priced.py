"""A plan's stages with the numbers that turn the prices of their layers into seconds.

`PricedStages` is what every part of a step's price reads: the stages, which of their layers stand behind each of the
Program's stages and what these add up to, and each stage's fitted rates. Leaves out seconds (`compute_time`,
`reduction_time`, `step`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from gnomon.graph import Graph
from gnomon.hardware import Cluster
from gnomon.late import load_late
from gnomon.plans import Plan, shared_parameters
from gnomon.plans.plan import effective_zero
from gnomon.prediction.layer_types import LayerPrice, Phase
from gnomon.prediction.stage import StagePrice
from gnomon.prediction.stage_kernels import around, other_host_s
from gnomon.prices.fitted import FittedRates, Rates, fitted_rates, rates
from gnomon.prices.host import host_cost
from gnomon.prices.kernels import OpPrice
from gnomon.prices.links import AxisLink
from gnomon.software import Stack

if TYPE_CHECKING:
    from gnomon.methods.learnt.costs import MethodCosts


@dataclass(frozen=True, kw_only=True, eq=False)
class PricedStages:
    """Stages, their layers and their rates under one plan."""

    plan: Plan
    """The plan that is priced."""
    graph: Graph
    """The model."""
    cluster: Cluster
    """The machines."""
    stack: Stack
    """The program that runs it."""
    stages: tuple[StagePrice, ...]
    """Each pipeline stage on its slowest worker."""
    blocks: tuple[tuple[int, int], ...]
    """(stage, layer in it) of each of the Program's stages when those are layers; (stage, -1) when whole stages."""
    count: int
    """Microbatches."""
    teacher_s: float = 0.0
    """Of a microbatch's forward through the teacher that a method of the plan asks."""
    teacher_bytes: int = 0
    """Of its parameters on each rank."""
    numbers: FittedRates = field(default_factory=fitted_rates)
    """Fitted to runs; left out, those on record."""

    @cached_property
    def costs(self) -> MethodCosts | None:
        """What methods that change what is learnt take beside the plan's own step; None where it has none."""
        if not self.plan.schedule.passes:
            return None
        of_plan: MethodCosts = load_late("gnomon.prediction.method_costs:costs_of")(self.plan, self.graph)
        return of_plan if any(astuple(of_plan)) else None

    @cached_property
    def rates(self) -> tuple[Rates, ...]:
        """The rate that each stage's device keeps for minutes, as training runs show it."""
        # Once for each device, since most stages have the same.
        reached = {device: rates(self.stack, device, self.numbers) for device in {s.device for s in self.stages}}
        return tuple(reached[stage.device] for stage in self.stages)

    @cached_property
    def launch_s(self) -> tuple[float, ...]:
        """Host seconds of a kernel launch on each stage."""
        devices = {stage.device for stage in self.stages}
        launched = {device: host_cost(self.stack, device, self.numbers).per_kernel_s for device in devices}
        return tuple(launched[stage.device] for stage in self.stages)

    @cached_property
    def waits_by_layer(self) -> bool:
        """Whether the host waits for each layer by itself, as under ZeRO 3, where it may not gather parameters long
        before they are read. Else its launches go on over all rows of a stage."""
        return effective_zero(self.plan) == 3

    @cached_property
    def shared(self) -> Mapping[str, tuple[int, ...]]:
        """Stages of each parameter that several hold."""
        return shared_parameters(self.plan, self.graph)

    def span(self, block: int) -> tuple[int, int]:
        """The layers of its stage, [first, last), that stand behind one of the Program's stages."""
        stage, index = self.blocks[block]
        if index < 0:
            return 0, len(self.stages[stage].order)
        # A block ends where the next one of its stage begins, the last one with the stage.
        after = self.blocks[block + 1] if block + 1 < len(self.blocks) else (-1, 0)
        return index, after[1] if after[0] == stage else len(self.stages[stage].order)

    def layers(self, block: int) -> tuple[StagePrice, list[tuple[LayerPrice, int]]]:
        """The stage and the (price, times) of the layers behind one of the Program's stages."""
        stage, index = self.blocks[block]
        price = self.stages[stage]
        if index >= 0:
            first, last = self.span(block)
            # Layers of the same price are counted, as the other return does.
            return price, list(Counter(price.order[first:last]).items())
        return price, [(layer, len(labels)) for layer, labels in price.layers]

    def with_parts(self, block: int) -> tuple[StagePrice, list[tuple[LayerPrice, int]]]:
        """The same, and parts of layers whose parameters the stage has too."""
        price, layers = self.layers(block)
        return price, layers if price.share is None else [(layer, len(labels)) for layer, labels in price.held_layers]

    # What layers add up to follows from no fitted number: `with_numbers` hands these three on to a value of other ones.
    @cached_property
    def _phases(self) -> dict[tuple[str, int], Phase]:
        return {}

    @cached_property
    def _extras(self) -> dict[tuple[str, int], OpPrice]:
        return {}

    @cached_property
    def _other_host(self) -> dict[tuple[str, int], float]:
        return {}

    def phase(self, name: str, block: int) -> Phase:
        """A phase of all layers behind one of the Program's stages."""
        if (name, block) not in self._phases:
            total = Phase()
            for layer, times in self.layers(block)[1]:
                total = total + getattr(layer, name) * times
            self._phases[name, block] = total
        return self._phases[name, block]

    def extras(self, kind: str, block: int) -> OpPrice:
        """The kernels of an action around those of its layers."""
        if (kind, block) not in self._extras:
            self._extras[kind, block] = around(kind, *self.layers(block), self.stack, self.count)
        return self._extras[kind, block]

    def other_host_s(self, kind: str, block: int) -> float:
        """Seconds that the host spends in an action on other things than launches."""
        if (kind, block) not in self._other_host:
            self._other_host[kind, block] = other_host_s(kind, *self.layers(block), self.stack)
        return self._other_host[kind, block]

    def slower(self, link: AxisLink) -> float:
        """Seconds over price of transfers over a link, as training runs show it."""
        return self.numbers.link_factor(link.across_name or link.inside_name)
